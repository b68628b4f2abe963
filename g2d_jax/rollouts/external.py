"""Rollouts from other tools (`data.dumps`), as groups for a collect or an online stage.

Rows with token ids are exact: the tokens that the policy read and sampled. Text alone is tokenised
here.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from etils import epath

from g2d_jax.config import Dump, Online
from g2d_jax.data.distinct import LoadReport
from g2d_jax.data.dumps import DumpRow, by_step, read_dump
from g2d_jax.data.fields import BrokenRow
from g2d_jax.data.problems import plain_answer
from g2d_jax.data.splits import met, problem_id
from g2d_jax.records import Problem, Rollout, Score, ScoredRollout
from g2d_jax.rewards.functions import verdict_of
from g2d_jax.rollouts.groups import Draws, Groups, draw_of, draw_once
from g2d_jax.rollouts.sample import graded_texts
from g2d_jax.rollouts.store import Sampled, cost_of, on_disk, write_sampled
from g2d_jax.runtime import processes
from g2d_jax.runtime.tables import read_rollouts, safe_text
from g2d_jax.session.problems import ids_of, joined, tell
from g2d_jax.session.session import Session
from g2d_jax.session.stage_result import Cost

LEFT_OUT = (
    "are left out, because the verifier cannot parse the reference answers of their problems in "
    "data.train"
)
OTHER_IDS = (
    "have other prompt ids than this run's template: they train with their own ids, but evaluation "
    "uses the template"
)
OTHER_TEXT = (
    "have a completion that is not the beginning of their completion_ids' text: training uses the "
    "ids, grading the completion"
)


@dataclass(frozen=True, slots=True)
class ExternalRow:
    """A tokenised row of a file. rollout: sample 0 of visit 0. score: None if the file has no
    reward."""

    dumped: DumpRow
    problem: Problem
    rollout: Rollout
    text: str
    score: Score | None


ExternalGroups = list[list[ExternalRow]]


@dataclass(frozen=True)
class ExternalBatches:
    """The batches of an online stage from files; groups are in the order of `by_step`."""

    session: Session
    draws: Draws
    groups: ExternalGroups
    prompts: int  # of a batch
    unweighed: int  # rows without log-probabilities in a loss with a policy ratio

    @property
    def pairs(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """The token ids of each prompt and its response."""
        rows = itertools.chain.from_iterable(self.groups)
        return [(row.rollout.prompt_ids, row.rollout.token_ids) for row in rows]

    def batch(self, number: int, shard: epath.Path) -> Sampled:
        """Score a batch, counted from 0, and write its shard, or read the shard back. All processes
        make the call."""
        part = slice(number * self.prompts, (number + 1) * self.prompts)
        return _stored(self.session, self.draws[part], self.groups[part], shard)


def external_batches(session: Session, name: str, stage: Online) -> ExternalBatches | None:
    """Read the batches of an online stage from stage.dump; None if the stage samples.

    Rows of the same prompt and step are a group. Raises ValueError, with file and line, for rows
    that the stage cannot train on. Also raises ValueError for too few groups, if only some rows
    have log-probabilities, and if clip.importance_cap=0 would ignore them.
    """
    if stage.samples:
        return None
    groups: ExternalGroups = []
    size = stage.num_generations
    for same in read(session, stage.dump):
        _refuse_unfit(session, stage, same)
        if len(same) % size:
            raise ValueError(
                f"{same[0].dumped.where}: its prompt has {len(same)} responses at its step, but "
                f"stages.{name}.num_generations is {size}: set it to the size of the groups"
            )
        for i in range(0, len(same), size):
            groups.append(same[i : i + size])
    unweighed = _unweighed(name, stage, groups)
    visits: Counter[str] = Counter()
    draws: Draws = []
    for group in groups:
        problem = session.problems.train_by_id[group[0].problem.id]
        draws.append((problem, visits[problem.id]))
        visits[problem.id] += 1
    updates = len(groups) // stage.prompts_per_step * stage.num_iterations
    fed = f"{stage.dump.path} has {len(groups)} groups, enough for {updates} updates"
    if updates < stage.steps:
        raise ValueError(
            f"{fed} with prompts_per_step={stage.prompts_per_step}: set stages.{name}.steps to at "
            f"most {updates}, got {stage.steps}"
        )
    session.tracker.say_once(f"{name}: {fed}; it uses {stage.steps}")
    return ExternalBatches(session, draws, groups, stage.prompts_per_step, unweighed)


def external_groups(session: Session, dump: Dump, shard: epath.Path) -> tuple[Draws, Groups]:
    """Read and score files of responses, grouped by prompt, and store the verdicts.

    A row's reward is used unchanged (null: unscorable). Without one, the response is scored against
    the row's answer, or the same problem's in data.train. Log-probabilities are NaN if a row has
    none. Raises ValueError, with file and line, for a broken row or a prompt of dev or test.
    """
    groups = read_groups(session, dump)
    draws = draw_once(group[0].problem for group in groups)
    return draws, _stored(session, draws, groups, shard).groups


def read_groups(session: Session, dump: Dump) -> ExternalGroups:
    """Read rows by prompt, over all steps, for preference pairs.

    Raises ValueError as `read`, and if no prompt has two responses.
    """
    by_prompt: dict[str, list[ExternalRow]] = {}
    for group in read(session, dump):
        by_prompt.setdefault(group[0].problem.id, []).extend(group)
    if max(map(len, by_prompt.values())) < 2:
        raise ValueError(
            f"{dump.path} has one response to each of its {len(by_prompt)} prompts, but a preference "
            "pair needs two, one better than the other: use rollouts with several responses per prompt"
        )
    return list(by_prompt.values())


def read(session: Session, dump: Dump) -> ExternalGroups:
    """Read rows grouped by step and prompt, see `by_step`. Raises ValueError, with file and line,
    for a broken row.

    Logs how many rows are left out with their problems, and how many differ from this run's
    template and tokenizer.
    """
    left_out = set(ids_of(session.problems.left_out["train"]))
    by_text = functools.cache(partial(_by_text, session))
    firsts: dict[str, ExternalRow] = {}
    counts: Counter[str] = Counter()
    groups: ExternalGroups = []
    report = LoadReport(dump.path, dump.on_error)
    rows = by_step(read_dump(dump.path, dump.columns, report))
    report.require_usable(rows)
    tell("rollouts", report, session.tracker.say_once, session.tokenizer.template)
    for same in rows:
        group = []
        for dumped in same:
            try:
                problem = _problem(session, dump.path, dumped, by_text)
                if problem.id in left_out:
                    counts[LEFT_OUT] += 1
                    continue
                row = _tokenised(session, problem, dumped, counts)
                _refuse_unlike(row, firsts.setdefault(problem.id, row))
            except ValueError as error:  # also from the tokenizer, for special tokens in a text
                raise ValueError(f"{dumped.where}: {error}") from error
            group.append(row)
        if group:
            groups.append(group)
    if 0 < counts["compared"] == counts[OTHER_TEXT]:
        raise ValueError(
            f"{dump.path}: no completion is the text of its completion_ids: set tokenizer.path to "
            "the tokenizer that wrote them"
        )
    for what in (LEFT_OUT, OTHER_IDS, OTHER_TEXT):
        if counts[what]:
            session.tracker.say_once(f"{dump.path}: {counts[what]} responses {what}")
    if not groups:
        raise ValueError(f"{dump.path} has no responses to train on")
    return groups


def _by_text(session: Session) -> dict[str, Problem]:
    """Map rendered prompts, with and without special tokens, to their problems, including those
    left out."""
    tokenizer = session.tokenizer
    texts: dict[str, Problem] = {}
    problems = session.problems
    for problem in [*joined(problems.left_out), *joined(problems.by_split)]:
        texts[tokenizer.render(problem).strip()] = problem
        texts[tokenizer.decode(tokenizer.encode_prompt(problem)).strip()] = problem
    return texts


def _problem(
    session: Session, path: str, row: DumpRow, by_text: Callable[[], dict[str, Problem]]
) -> Problem:
    """Return the row's problem, with the row's answer if it has one. Raises BrokenRow."""
    if row.prompt is None:
        # a row without both texts has ids
        text = row.rendered_prompt or session.tokenizer.decode(np.asarray(row.prompt_ids))
        found = by_text().get(text.strip())
        if found is None:
            raise BrokenRow(
                "it has only a rendered prompt, which matches no problem in data.train: use the "
                "problems, tokenizer and template of the run that wrote it, or add the column "
                f"prompt. It begins {text!r:.80}"
            )
    else:
        identifier = problem_id(row.prompt)
        new = Problem(identifier, row.prompt, source=path)
        found = session.problems.train_by_id.get(identifier, new)
        answer = row.answer
        if answer is not None:
            if session.reading(found.task).verified:
                answer = plain_answer(answer)
            found = replace(found, answer=answer)
    if met(found.id, found.prompt, session.problems.held_out_names):
        raise BrokenRow("its prompt is in data.dev or data.test: do not train on held-out problems")
    return found


def _tokenised(
    session: Session, problem: Problem, row: DumpRow, counts: Counter[str]
) -> ExternalRow:
    """Use a row's ids, or tokenise its text. Count differences in `counts`. Raises ValueError.

    Without finish_reason the last id decides. Text cut off by the limit gets no stop token.
    """
    tokenizer = session.tokenizer
    ours = tokenizer.encode_prompt(problem)
    prompt_ids = ours if row.prompt_ids is None else row.prompt_ids
    token_ids, text, finish = row.completion_ids, row.completion, row.finish_reason
    if token_ids is None:
        assert text is not None  # a row has one of both
        token_ids = tokenizer.encode_completion(text, problem)
        if finish == "length":
            token_ids = token_ids[:-1]
        finish = finish or "stop"
    elif finish is None:
        finish = "stop" if token_ids[-1] in tokenizer.eos_ids else "length"
    if not len(token_ids):
        raise BrokenRow("its completion has no tokens")
    for name, ids in (("prompt_ids", prompt_ids), ("completion_ids", token_ids)):
        if ids.max() >= tokenizer.id_limit:
            raise BrokenRow(
                f"{name} has {ids.max()}, but the ids of the tokenizer and the model end at "
                f"{tokenizer.id_limit - 1}"
            )
    if text is None:
        text = tokenizer.decode(token_ids)
    elif row.completion_ids is not None and text.strip():
        whole = (tokenizer.decode(token_ids), tokenizer.decode_raw(token_ids))
        begins = any(decoded.strip().startswith(text.strip()) for decoded in whole)
        counts.update({"compared": 1, OTHER_TEXT: int(not begins)})
    counts[OTHER_IDS] += not np.array_equal(prompt_ids, ours)
    score = None
    if row.has_reward:
        settings = session.config.all_tasks[problem.task].reward
        threshold = settings.correct_above if settings.is_verifiable else None
        score = Score(row.reward, verdict_of(row.reward, threshold))
    if score is None and problem.answer is None and session.reading(problem.task).verified:
        raise BrokenRow("it has no reward, and there is no answer in the row or in data.train")
    unknown = np.full(len(token_ids), np.nan, np.float32)
    logprobs = unknown if row.logprobs is None else row.logprobs
    rollout = Rollout(problem.id, 0, 0, prompt_ids, token_ids, logprobs, unknown, finish)
    return ExternalRow(row, problem, rollout, safe_text(text), score)


def _refuse_unlike(row: ExternalRow, first: ExternalRow) -> None:
    """Raise BrokenRow for a row that differs from the first one of its prompt."""
    same_ids = np.array_equal(row.rollout.prompt_ids, first.rollout.prompt_ids)
    if not same_ids or row.problem.answer != first.problem.answer:
        raise BrokenRow(
            f"its answer or its prompt_ids differ from those of the same prompt in {first.dumped.where}"
        )


def _unweighed(name: str, stage: Online, groups: ExternalGroups) -> int:
    """Count the rows that a loss with a policy ratio treats as the policy's own: all, if none has
    log-probabilities.

    Raises ValueError if only some have them, and if all have them but clip.importance_cap is 0. A
    server and int8 follow the same rule.
    """
    rows = list(itertools.chain.from_iterable(groups))
    without = [row.dumped.where for row in rows if row.dumped.logprobs is None]
    count = len(rows) - len(without)
    if without and (stage.clip.importance_cap or (stage.has_ratio and count)):
        raise ValueError(
            f"{without[0]}: it has no logprobs, but {count} of the {len(rows)} responses have: a "
            "GRPO loss weights all by them (clip.importance_cap) or none. Add logprobs to all rows, "
            "or remove them and set clip.importance_cap=0"
        )
    if not stage.has_ratio or stage.clip.importance_cap:
        return 0
    if not without:
        raise ValueError(
            f"{stage.dump.path} has the logprobs of the policy that wrote it, but "
            "clip.importance_cap=0 ignores them: a GRPO loss would treat its responses as sampled from "
            f"this run's policy. Set stages.{name}.clip.importance_cap, for example to 2, to weight "
            "each token by the ratio of the two policies; rollout_corr/kl shows their distance"
        )
    return len(without)


def _refuse_unfit(session: Session, stage: Online, group: Sequence[ExternalRow]) -> None:
    """Raise ValueError for a group that an online stage cannot train on."""
    longest, limit = session.config.data.max_prompt_length, stage.sampling.max_new_tokens
    for row in group:
        where, prompt, response = row.dumped.where, len(row.rollout.prompt_ids), row.rollout.length
        if row.problem.id not in session.problems.train_by_id:
            raise ValueError(
                f"{where}: its prompt is not in data.train, as an online stage requires: add it, or "
                "use collect and pair stages"
            )
        if prompt > longest or response > limit:
            raise ValueError(
                f"{where}: its prompt and completion have {prompt} and {response} tokens: raise "
                f"data.max_prompt_length, {longest}, or the stage's sampling.max_new_tokens, "
                f"{limit}"
            )


def _stored(session: Session, draws: Draws, groups: ExternalGroups, shard: epath.Path) -> Sampled:
    """Score groups and write their shard, or read the shard back. All processes make the call."""
    if not on_disk(session.writer, [shard]):
        cost = Cost()
        with session.track_cost(cost):
            scored = _score(session, draws, groups)
        sampled = Sampled(draws, scored, cost.part())
        processes.on_leader(partial(write_sampled, [sampled], [shard], shard.parent / "_parts"))
    kept = itertools.groupby(read_rollouts(shard), draw_of)
    return Sampled(draws, [list(rows) for _, rows in kept], cost_of(shard), from_disk=True)


def _score(session: Session, draws: Draws, groups: ExternalGroups) -> Groups:
    """Score the responses without a reward in the file."""
    unscored = [row for row in itertools.chain.from_iterable(groups) if row.score is None]
    questions = [row.problem for row in unscored]
    texts = graded_texts(session.tokenizer, questions, [row.text for row in unscored])
    computed = iter(session.scorer(questions, texts, [row.rollout.token_ids for row in unscored]))
    scored: Groups = []
    for (_, visit), group in zip(draws, groups, strict=True):
        rows = []
        for sample, row in enumerate(group):
            rollout = replace(row.rollout, visit=visit, sample=sample)
            score = row.score or next(computed)
            rows.append(ScoredRollout(rollout, row.text, score, "external"))
        scored.append(rows)
    return scored
