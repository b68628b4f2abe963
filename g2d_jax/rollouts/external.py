"""Rollouts made elsewhere: dumps of any format of `data.dumps`, as groups for a collect or an
online stage.

With token ids they are exact: what the policy saw and sampled. Text alone is tokenised here.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from etils import epath

from g2d_jax.config import Online, Reward
from g2d_jax.data.dumps import DumpRow, by_step, read_dump
from g2d_jax.data.fields import BrokenRow
from g2d_jax.data.problems import plain_answer
from g2d_jax.data.splits import met, problem_id
from g2d_jax.data.tokenizer import PromptTokenizer
from g2d_jax.records import Problem, Rollout, Score, ScoredRollout, Verdict
from g2d_jax.rollouts.generate import (
    Draws,
    Groups,
    Sampled,
    graded_texts,
    on_disk,
    read_sampled,
    rows_of,
    write_sampled,
)
from g2d_jax.runtime import processes
from g2d_jax.runtime.tables import read_rollouts, safe_text, write_rollouts
from g2d_jax.session.cost import Cost
from g2d_jax.session.session import Session


@dataclass(frozen=True, slots=True)
class ExternalRow:
    """A row of a dump, tokenised. rollout: sample 0 of visit 0. score: None if the dump gives no
    reward.

    where, step, prompt_key: as of the dump's row.
    """

    where: str
    step: int | None
    prompt_key: str
    rollout: Rollout
    text: str
    score: Score | None


@dataclass(frozen=True)
class ExternalBatches:
    """The batches of an online stage from a dump: its groups in the order of their steps, then of
    the file."""

    session: Session
    problems: Mapping[str, Problem]
    draws: Draws
    groups: Sequence[Sequence[ExternalRow]]
    prompts: int  # of a batch
    unweighed: int  # rows without log-probabilities that a loss with a ratio of policies trains on

    @property
    def pairs(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """The token ids of each prompt and its response."""
        rows = itertools.chain.from_iterable(self.groups)
        return [(row.rollout.prompt_ids, row.rollout.token_ids) for row in rows]

    def batch(self, number: int, shard: epath.Path) -> Sampled:
        """Score a batch, counted from 0, and write its shard, or read that back. All processes make
        the call."""
        part = slice(number * self.prompts, (number + 1) * self.prompts)
        draws = self.draws[part]
        if not on_disk(self.session, [shard]):
            cost = Cost()
            with self.session.track_cost(cost):
                groups = _score(self.session, self.problems, draws, self.groups[part])
            sampled = Sampled(draws, groups, cost.part())
            processes.on_leader(partial(write_sampled, [sampled], [shard], shard.parent / "_parts"))
        return read_sampled(self.session, shard)


def external_batches(session: Session, name: str, stage: Online) -> ExternalBatches | None:
    """Read the batches of an online stage from stage.rollouts; None if it samples its own.

    Rows of the same prompt and step are a group. Raises ValueError naming file and line of what the
    stage cannot train on, if there are too few groups for its steps, if log-probabilities are there
    that importance_cap=0 would leave unused, and if only some rows have them.
    """
    if stage.rollouts == "sample":
        return None
    problems, rows = read(session, stage.rollouts, stage.reward_column)
    unweighed = _unweighed(name, stage, rows)
    for row in rows:
        if reason := _unfit(session, stage, row):
            raise ValueError(f"{row.where}: {reason}")
    groups: list[list[ExternalRow]] = []
    for same in by_step(rows):
        if len(same) % stage.num_generations:
            at = "" if same[0].step is None else " at its step"
            raise ValueError(
                f"{same[0].where}: its prompt has {len(same)} responses{at}, and "
                f"stages.{name}.num_generations "
                f"is {stage.num_generations}: set that to the size of the groups"
            )
        for i in range(0, len(same), stage.num_generations):
            groups.append(same[i : i + stage.num_generations])
    updates = len(groups) // stage.prompts_per_step * stage.num_iterations
    if updates < stage.steps:
        raise ValueError(
            f"{stage.rollouts} has {len(groups)} groups, which feed {updates} updates of "
            f"prompts_per_step={stage.prompts_per_step}: set stages.{name}.steps to {updates} or "
            f"less, got {stage.steps}"
        )
    session.say_once(
        f"{name}: {stage.rollouts} has {len(groups)} groups, which feed {updates} updates: "
        f"{stage.steps} are taken"
    )
    visits: Counter[str] = Counter()
    draws: Draws = []
    for group in groups:
        identifier = group[0].rollout.problem_id
        draws.append((session.problems.train_by_id[identifier], visits[identifier]))
        visits[identifier] += 1
    return ExternalBatches(session, problems, draws, groups, stage.prompts_per_step, unweighed)


def external_groups(
    session: Session, path: str, shard: epath.Path, reward: str | None = None
) -> tuple[Draws, Groups]:
    """Read and score a dump of responses, grouped by prompt; verdicts are kept like our own.
    reward: its column.

    A row's reward counts as given (null: unscorable). Without one the response is scored against
    the row's answer, or the answer of the same problem in data.train. Prompts of dev and test are
    refused. Log-probabilities are NaN where the dump has none. Raises ValueError naming file and
    line of a broken row.
    """
    problems, by_prompt = read_groups(session, path, reward)
    draws: Draws = [(problems[identifier], 0) for identifier in by_prompt]
    if not on_disk(session, [shard]):
        scored = _score(session, problems, draws, list(by_prompt.values()))
        processes.on_leader(lambda: write_rollouts(shard, rows_of(scored)))
    groups: dict[str, list[ScoredRollout]] = {}
    for kept in read_rollouts(shard):
        groups.setdefault(kept.rollout.problem_id, []).append(kept)
    return draws, [groups[problem.id] for problem, _ in draws]


def read_groups(
    session: Session, path: str, reward: str | None = None
) -> tuple[dict[str, Problem], dict[str, list[ExternalRow]]]:
    """Read problems by id, and the rows of each, of all steps, to make pairs of.

    Raises ValueError as `read`, and where no prompt has two responses.
    """
    problems, rows = read(session, path, reward)
    by_prompt: dict[str, list[ExternalRow]] = {}
    for row in rows:
        by_prompt.setdefault(row.rollout.problem_id, []).append(row)
    if max(map(len, by_prompt.values())) < 2:
        raise ValueError(
            f"{path} has one response to each of its {len(by_prompt)} prompts, and a preference "
            "pair takes two, one "
            "better than the other: take rollouts with several responses to a prompt"
        )
    return problems, by_prompt


def read(
    session: Session, path: str, reward: str | None = None
) -> tuple[dict[str, Problem], list[ExternalRow]]:
    """Read problems by id, and the rows. Raises ValueError naming file and line of a broken row.

    Says how many rows have other prompt ids than the template here gives, or other text than their
    ids, or the beginning of it: the ids count; and how many are of training problems that are left
    out, as they are too.
    """
    left_out = {problem.id for problem in session.problems.left_out["train"]}
    problems: dict[str, Problem] = {}
    rows: list[ExternalRow] = []
    first_prompts: dict[str, tuple[str, np.ndarray]] = {}
    first_answers: dict[str, tuple[str, str]] = {}
    verified: dict[str, str] = {}  # problems whose answer scores a row -> the first such row
    by_text = functools.cache(partial(_by_text, session))
    counts: Counter[str] = Counter()
    for row in read_dump(path, reward):
        try:
            problem = _problem(row, path, session, by_text)
            if met(problem.id, problem.prompt, session.problems.held_out_names):
                raise BrokenRow(
                    "its prompt is in data.dev or data.test, which nothing may be trained on"
                )
            if problem.id in left_out:
                counts["left out"] += 1
                continue
            counts["unknown"] += problem.id not in session.problems.train_by_id
            score = _given(row, session.config.all_tasks[problem.task].reward)
            # raises ValueError, as for special tokens in the text
            ours = session.tokenizer.encode_prompt(problem)
            rollout = _rollout(session, problem, row, ours)
        except ValueError as error:  # BrokenRow is one
            raise ValueError(f"{row.where}: {error}") from error
        where, prompt_ids = first_prompts.setdefault(problem.id, (row.where, rollout.prompt_ids))
        if not np.array_equal(rollout.prompt_ids, prompt_ids):
            raise ValueError(
                f"{row.where}: its prompt_ids are not those of the same prompt in {where}"
            )
        counts["prompts differ"] += not np.array_equal(rollout.prompt_ids, ours)
        text = row.completion
        if text is None:
            text = session.tokenizer.decode(rollout.token_ids)
        elif row.completion_ids is not None:
            counts.update(_compared(session.tokenizer, rollout.token_ids, text.strip()))
        problems.setdefault(problem.id, problem)
        if score is None and session.reading(problem.task).verified:
            verified.setdefault(problem.id, row.where)
        # Of the problem's rows the first with an answer of its own says what all are scored against.
        if row.answer is not None and problem.answer is not None:
            if problem.id not in first_answers:
                problems[problem.id] = problem
            where, answer = first_answers.setdefault(problem.id, (row.where, problem.answer))
            if problem.answer != answer:
                raise ValueError(
                    f"{row.where}: its answer is {problem.answer!r:.80}, and that of the same "
                    f"prompt in {where} is {answer!r:.80}"
                )
        rows.append(
            ExternalRow(row.where, row.step, row.prompt_key, rollout, safe_text(text), score)
        )
    for identifier, where in verified.items():
        if problems[identifier].answer is None:
            raise ValueError(
                f"{where}: it has no reward, and neither a row of its prompt nor data.train has an "
                "answer to score it against"
            )
    if counts["left out"]:
        session.say_once(
            f"{path}: {counts['left out']} rows left out, whose problems data.train goes without: "
            "the verifier cannot read their reference answers"
        )
    if counts["unknown"] and session.config.tasks:
        session.say_once(
            f"{path}: {counts['unknown']} of {len(rows)} responses are to prompts that are not in "
            "data.train: they are scored as the task main's"
        )
    if not rows:
        raise ValueError(f"{path} holds no responses{' but these' if counts['left out'] else ''}")
    if counts["texts differ"]:
        if counts["texts differ"] == counts["texts compared"]:
            raise ValueError(
                f"{path}: no completion is the text of its completion_ids: they are of another "
                "tokenizer"
            )
        session.say_once(
            f"{path}: {counts['texts differ']} of {len(rows)} completions are not the text of "
            "their ids, which count"
        )
    if counts["texts shorter"]:
        session.say_once(
            f"{path}: {counts['texts shorter']} of {len(rows)} completions end before the text of "
            "their ids does, as where a stop string is cut off: they are graded as they are, and "
            "all of their ids are trained on"
        )
    if counts["prompts differ"]:
        session.say_once(
            f"{path}: {counts['prompts differ']} of {len(rows)} prompts have other ids than the "
            "template here gives. "
            "Theirs are used, what the policy saw; evaluation here uses the template's"
        )
    return problems, rows


def _compared(tokenizer: PromptTokenizer, ids: np.ndarray, text: str) -> dict[str, int]:
    """Compare a completion's text with that of its ids, whose end, a stop string, the text may
    lack."""
    decoded = tokenizer.decode(ids).strip(), tokenizer.decode_raw(ids).strip()
    is_begun = any(whole.startswith(text) for whole in decoded)
    return {
        "texts compared": int(bool(text)),  # an empty text tells nothing of the tokenizer
        "texts differ": int(not is_begun),
        "texts shorter": int(is_begun and text not in decoded),
    }


def _by_text(session: Session) -> dict[str, Problem]:
    """Map prompts after the template, with its special tokens and without, to their problems, left
    out or not."""
    tokenizer = session.tokenizer
    texts: dict[str, Problem] = {}
    for source, split in itertools.product(
        (session.problems.left_out, session.problems.by_split), ("dev", "test", "train")
    ):
        for problem in source[split]:
            texts[tokenizer.render(problem).strip()] = problem
            texts[tokenizer.decode(tokenizer.encode_prompt(problem)).strip()] = problem
    return texts


def _problem(
    row: DumpRow, path: str, session: Session, by_text: Callable[[], dict[str, Problem]]
) -> Problem:
    """Return the row's problem: that of data.train where the row brings no answer of its own.
    Raises BrokenRow."""
    if row.prompt is None or row.rendered:
        text = row.prompt if row.prompt_ids is None else session.tokenizer.decode(row.prompt_ids)
        if isinstance(text, str) and text.strip() in by_text():
            return by_text()[text.strip()]
        raise BrokenRow(
            "the dump has prompts behind a chat template only, and this one is of no problem in "
            "data.train: give the problems, the tokenizer and the template of the run that wrote "
            f"it. It begins {text!r:.80}"
        )
    identifier = problem_id(row.prompt)
    known = session.problems.train_by_id.get(identifier)
    if known is not None and row.answer is None:
        return known
    task = "main" if known is None else known.task
    answer = row.answer
    if answer is not None and session.reading(task).verified:
        answer = plain_answer(answer)
    if known is not None:
        return replace(known, answer=answer)
    return Problem(identifier, row.prompt, answer, source=path, task=task)


def _given(row: DumpRow, settings: Reward) -> Score | None:
    """Return the score of the reward that a row gives, None without one. settings: those of its
    problem's task."""
    if not row.has_reward:
        return None
    if row.reward is None:
        return Score(None, Verdict.UNSCORABLE)
    if not settings.is_verifiable:
        return Score(row.reward, Verdict.SCORED)
    is_correct = row.reward > settings.correct_above
    return Score(row.reward, Verdict.CORRECT if is_correct else Verdict.INCORRECT)


def _rollout(session: Session, problem: Problem, row: DumpRow, prompt_ids: np.ndarray) -> Rollout:
    """Make a rollout of the row's ids, or of its text. prompt_ids: those of the template here.
    Raises ValueError.

    Without finish_reason the last id decides it. No stop token follows text that the limit cut.
    """
    tokenizer = session.tokenizer
    finish = row.finish_reason
    for name, ids in (("prompt_ids", row.prompt_ids), ("completion_ids", row.completion_ids)):
        if ids is not None and ids.max() >= tokenizer.id_limit:
            last = tokenizer.id_limit - 1
            raise BrokenRow(
                f"{name} has {ids.max()}, and the ids of the tokenizer and the model end at {last}"
            )
    if row.completion_ids is not None:
        token_ids = row.completion_ids
        finish = finish or ("stop" if token_ids[-1] in tokenizer.eos_ids else "length")
    else:
        assert row.completion is not None  # a row has one of both
        token_ids = tokenizer.encode_completion(row.completion)
        finish = finish or "stop"
        if finish == "length":
            token_ids = token_ids[:-1]
    if not len(token_ids):
        raise BrokenRow("its completion has no tokens")
    unknown = np.full(len(token_ids), np.nan, np.float32)
    logprobs = unknown if row.logprobs is None else row.logprobs
    prompt = prompt_ids if row.prompt_ids is None else row.prompt_ids
    return Rollout(problem.id, 0, 0, prompt, token_ids, logprobs, unknown, finish)


def _unweighed(name: str, stage: Online, rows: Sequence[ExternalRow]) -> int:
    """Count the rows that a loss with a ratio of policies takes for the policy's own: all, where none
    has log-probabilities.

    Raises ValueError where some have them and others not, and where all have them and
    importance_cap is 0: the rule is that of a server and of int8.
    """
    if not stage.has_ratio:
        return 0
    without = [row for row in rows if np.isnan(row.rollout.logprobs[0])]
    if 0 < len(without) < len(rows):
        raise ValueError(
            f"{without[0].where}: it has no logprobs, and {len(rows) - len(without)} of the "
            f"{len(rows)} responses have: a GRPO loss weighs all by them or none. Give all rows "
            "logprobs, or none"
        )
    if stage.importance_cap:
        return 0
    if not without:
        raise ValueError(
            f"{stage.rollouts} has the logprobs of the policy that wrote it, and with "
            "importance_cap=0 a GRPO loss would train on its responses as if the policy here had "
            f"drawn them: set stages.{name}.importance_cap, to 2 say, which weighs each token by "
            "the ratio of the two; rollout_corr/kl then shows how far apart they are"
        )
    return len(without)


def _unfit(session: Session, stage: Online, row: ExternalRow) -> str | None:
    """Return why an online stage cannot train on a row, None if it can."""
    rollout, longest = row.rollout, session.config.data.max_prompt_length
    if rollout.problem_id not in session.problems.train_by_id:
        return (
            "its prompt is not in data.train, whose problems an online stage trains on: add it, "
            "or collect and pair"
        )
    if len(rollout.prompt_ids) > longest:
        return (
            f"its prompt has {len(rollout.prompt_ids)} tokens: raise data.max_prompt_length, "
            f"{longest}"
        )
    limit = stage.sampling.max_new_tokens
    if rollout.length > limit:
        return (
            f"its completion has {rollout.length} tokens: raise the stage's "
            f"sampling.max_new_tokens, {limit}"
        )
    if stage.importance_cap and np.isnan(rollout.logprobs[0]):
        return (
            "importance_cap weighs by the sampler's logprobs, which it lacks: set importance_cap "
            "to 0"
        )
    return None


def _score(
    session: Session,
    problems: Mapping[str, Problem],
    draws: Draws,
    groups: Sequence[Sequence[ExternalRow]],
) -> Groups:
    """Score the responses whose reward the dump does not give. problems: with the answers that the
    dump gives."""
    unscored = [row for row in itertools.chain.from_iterable(groups) if row.score is None]
    questions = [problems[row.rollout.problem_id] for row in unscored]
    texts = graded_texts(session, questions, [row.text for row in unscored])
    computed = iter(session.scorer(questions, texts, [row.rollout.token_ids for row in unscored]))
    scored: Groups = []
    for (_, visit), group in zip(draws, groups, strict=True):
        rows = []
        for sample, row in enumerate(group):
            score = next(computed) if row.score is None else row.score
            rollout = replace(row.rollout, visit=visit, sample=sample)
            rows.append(ScoredRollout(rollout, row.text, score, "external"))
        scored.append(rows)
    return scored
