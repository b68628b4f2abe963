"""Generation, scoring and grouping of responses, for online training, collection and evaluation."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from etils import epath

from g2d_jax.data.stops import cut
from g2d_jax.models.flops import attended, forward_flops
from g2d_jax.records import Problem, Request, Rollout, ScoredRollout, Verdict
from g2d_jax.rewards.pool import Begun
from g2d_jax.rollouts.workload import Workload, prompts_per_call
from g2d_jax.runtime import processes, storage
from g2d_jax.runtime.tables import read_rollouts, safe_text, write_rollouts
from g2d_jax.runtime.tracking import Progress
from g2d_jax.session.cost import Cost
from g2d_jax.session.session import Session, StopRun

Draws = list[tuple[Problem, int]]
"""Problems with their visit: how often each was drawn before."""

Groups = list[list[ScoredRollout]]
"""The responses of each draw, in order of their sample index."""


@dataclass(frozen=True)
class Sampled:
    """The draws of a batch, its groups, and the cost of sampling and scoring them, for `Cost.add`.

    before: whether an earlier start did that, and this was read back.
    """

    draws: Draws
    groups: Groups
    cost: Mapping[str, float]
    before: bool = False


def sampled_groups(
    session: Session,
    sampler_params: Callable[[], Any],
    parts: Sequence[tuple[Draws, epath.Path]],
    workload: Workload,
    *,
    policy: str,
    cost: Cost,
    bar: Progress | None = None,
) -> Groups:
    """Sample and score the responses to the draws of all parts, or read them back where that was done before.

    See `generate`. Their tokens and FLOPs go to the cost, and the time that parts which are read back once took; the
    caller tracks new time.
    """
    groups: Groups = []
    for part in generate(session, sampler_params, parts, workload, policy=policy, bar=bar):
        if part.before:
            cost.add(part.cost)
        groups += part.groups
        if bar is not None:
            bar.update(bar.done, describe(part.groups))
    session.writer.wait()
    count_rollouts(session, cost, groups)
    return groups


def generate(
    session: Session,
    sampler_params: Callable[[], Any],
    batches: Sequence[tuple[Draws, epath.Path]],
    workload: Workload,
    *,
    policy: str,
    bar: Progress | None = None,
) -> Iterator[Sampled]:
    """Sample and score responses for batches of draws; yield them batch by batch, in order.

    A call of the sampler draws as many batches as compute.generation_batch_size allows.

    Each batch has its shard, one Parquet file, written beside what comes next; nothing that outlives the process may
    be made of the rollouts before `Session.writer` has waited for it. So a run that is killed and started again trains
    on the same tokens and the same verdicts, a timeout included. A call whose shards are all there is read back; else
    all of it is done again, since log-probabilities depend, in their last bits, on what is sampled together. Beside a
    shard lies its cost: its share, by tokens, of the call's time and of what the rewards cost. All processes
    sample together, and each scores what its own devices sampled.
    sampler_params: gives the policy as the engine reads it, called once if anything is sampled. policy: its name. bar:
    moves by the draws that are answered.
    """
    params, done, prompts = None, 0, sum(len(draws) for draws, _ in batches)
    for call in _calls(batches, prompts_per_call(session, workload.num_generations)):
        draws, shards = [draw for batch_draws, _ in call for draw in batch_draws], [shard for _, shard in call]
        before, parts = bar.done if bar is not None else 0, shards[0].parent / "_parts"
        done += len(draws)
        if on_disk(session, shards):
            processes.on_leader(partial(_clear, parts))
            sampled = [_read(*batch, workload.num_generations) for batch in call]
            if bar is not None:
                bar.skip(before + len(draws))
        else:
            params = sampler_params() if params is None else params
            with session.track_cost(took := Cost()):
                rows, sampling = _rows(session, params, draws, workload, policy, parts, bar)
            sampled = _shared_out([batch_draws for batch_draws, _ in call], rows, took, max(processes.gather(sampling)))
            session.writer.submit(partial(write_sampled, sampled, shards, parts))
            if len(call) < len(batches):
                session.tracker.say(f"{policy}: {done:,} of {prompts:,} prompts sampled and scored")
            if bar is not None:
                bar.update(before + len(draws))
        yield from sampled


def check_rollouts(rollouts: Sequence[Rollout], policy: str) -> None:
    """Raise StopRun if a policy sampled with log-probabilities that are not all finite: its weights are broken.

    Samples of such a distribution say nothing of the policy; they must not be trained on, nor measured.
    policy: its name, for the message.
    """
    broken = [rollout for rollout in rollouts if not np.isfinite(rollout.logprobs).all()]
    if not broken:
        return
    first = broken[0]
    at = int(np.argmin(np.isfinite(first.logprobs)))
    raise StopRun(
        f"policy {policy}: {len(broken)} of {len(rollouts)} sampled responses have log-probabilities that are not "
        f"finite (problem {first.problem_id}, sample {first.sample}: {first.logprobs[at]} at token {at + 1}), so its "
        "weights or its activations are not finite either. Nothing was written of them. Check the checkpoint or model "
        "the policy came from, try dtype='float32', or train it again with a lower learning rate"
    )


def on_disk(session: Session, files: Sequence[epath.Path]) -> bool:
    """Return whether all of the files exist, for all processes alike, after pending writes."""
    session.writer.wait()
    return processes.on_leader(lambda: all(file.exists() for file in files))


def measured_once(session: Session, file: epath.Path, measure: Callable[[Cost], Any]) -> tuple[Any, Cost]:
    """Measure something, and its cost, or read both back where an earlier start wrote them as JSON.

    measure: adds tokens and FLOPs to the cost it is given; its time is tracked.
    """
    if on_disk(session, [file]):
        record = storage.read_json(file)
        return record["value"], Cost(**record["cost"])
    with session.track_cost(cost := Cost()):
        value = measure(cost)
    processes.on_leader(lambda: storage.write_json(file, {"value": value, "cost": dataclasses.asdict(cost)}))
    return value, cost


def _shared_out(batches: Sequence[Draws], rows: Sequence[ScoredRollout], took: Cost, sampling: float) -> list[Sampled]:
    """Split one call's rows and cost by batch. rows: equally many of each of its draws, in order. sampling: seconds."""
    prompts, total = sum(map(len, batches)), sum(len(row.rollout.token_ids) for row in rows)
    samples, first, done, sampled = len(rows) // prompts, 0, 0, []
    for draws in batches:
        groups = [list(rows[start : start + samples]) for start in range(first, first + len(draws) * samples, samples)]
        first += len(draws) * samples
        tokens = sum(len(row.rollout.token_ids) for group in groups for row in group)
        part, done = took.part(done / total, (done + tokens) / total), done + tokens
        call_share = {"calls": len(draws) / prompts, "prompts": len(draws)}
        call_share |= {"sampled_tokens": tokens, "sampling_seconds": sampling * tokens / total}
        sampled.append(Sampled(draws, groups, {**part, **call_share}))
    return sampled


def write_sampled(sampled: Sequence[Sampled], shards: Sequence[epath.Path], parts: epath.Path) -> None:
    """Write one call's shards. parts: folder of the processes' own files, whose rows are in the shards then."""
    for batch, shard in zip(sampled, shards, strict=True):
        storage.write_json(_beside(shard), batch.cost)
        write_rollouts(shard, [row for group in batch.groups for row in group])
    _clear(parts)


def _read(draws: Draws, shard: epath.Path, num_generations: int) -> Sampled:
    return Sampled(draws, grouped(read_rollouts(shard), draws, num_generations), spent_on(shard), before=True)


def _clear(parts: epath.Path) -> None:
    """Remove the processes' own files, once their rows are in the shards."""
    if parts.exists():
        parts.rmtree()


def _calls(batches: Sequence[tuple[Draws, epath.Path]], prompts: int) -> Iterator[list[tuple[Draws, epath.Path]]]:
    """Split batches, in order, into calls of together up to so many prompts, but at least one batch."""
    call: list[tuple[Draws, epath.Path]] = []
    for batch in batches:
        if call and sum(len(draws) for draws, _ in call) + len(batch[0]) > prompts:
            yield call
            call = []
        call.append(batch)
    if call:
        yield call


def _beside(shard: epath.Path) -> epath.Path:
    return shard.parent / f"_{shard.stem}.json"  # the underscore: as in stages/collect.py


def spent_on(shard: epath.Path) -> dict[str, float]:
    """Read the cost of sampling and scoring a shard's rollouts, as `generate` wrote it."""
    file = _beside(shard)
    return storage.read_json(file) if file.exists() else {}


def read_sampled(session: Session, shard: epath.Path) -> Sampled:
    """Read a shard by itself. Raises ValueError if a problem is not in data.train."""
    groups = [
        list(rows)
        for _, rows in itertools.groupby(read_rollouts(shard), lambda r: (r.rollout.problem_id, r.rollout.visit))
    ]
    try:
        draws = [(session.train[group[0].rollout.problem_id], group[0].rollout.visit) for group in groups]
    except KeyError as error:
        raise ValueError(f"{shard}: problem {error} is not in data.train: was the data changed?") from error
    return Sampled(draws, groups, spent_on(shard), before=True)


def grouped(rows: Sequence[ScoredRollout], draws: Draws, num_generations: int) -> Groups:
    """Sort rows into the draws' groups. Raises ValueError when some are missing: the file belongs to another run."""
    by_key = {(row.rollout.problem_id, row.rollout.visit, row.rollout.sample): row for row in rows}
    try:
        return [[by_key[problem.id, visit, i] for i in range(num_generations)] for problem, visit in draws]
    except KeyError as error:
        raise ValueError(f"rollouts on disk lack problem, visit, sample {error}: was the data changed?") from error


def count_rollouts(session: Session, cost: Cost, groups: Groups) -> None:
    """Add the tokens and FLOPs of generating these groups: each prompt once, each response token once.

    From the rollouts, not from the sampler: those read back from a shard after a restart count too.
    """
    config = session.model_config
    for group in groups:
        prompt = len(group[0].rollout.prompt_ids)
        cost.prefilled += prompt
        cost.flops += forward_flops(config, prompt, attended(prompt))
        for row in group:
            length = len(row.rollout.token_ids)
            cost.generated += length
            cost.flops += forward_flops(config, length, attended(length, before=prompt))


def _rows(
    session: Session,
    params: Any,
    draws: Draws,
    workload: Workload,
    policy: str,
    parts: epath.Path,
    bar: Progress | None,
) -> tuple[list[ScoredRollout], float]:
    """Sample and score responses, in the order of draws and samples; return them with this process's sampling seconds.

    Of several processes each gets the rollouts of its own devices, scores them, and leaves them in the folder `parts`,
    where all read them.
    """
    started = time.perf_counter()
    with session.clock.doing("generation"):
        answers = _generate(session, params, draws, workload, bar)
    sampling = time.perf_counter() - started
    with processes.barrier():
        if session.server is None:  # which checks its own, and may have no log-probabilities
            check_rollouts([answer.rollout for answer in answers], policy)
        processes.note_progress(f"scoring {policy}")
        with session.clock.doing("verification"):
            scores = session.scorer.apart(
                [answer.problem for answer in answers],
                [answer.graded for answer in answers],
                [answer.rollout.token_ids for answer in answers],
                [answer.begun for answer in answers],
            )
        rows = [ScoredRollout(a.rollout, a.text, score, policy) for a, score in zip(answers, scores, strict=True)]
        if processes.count() > 1:
            write_rollouts(parts / f"{processes.index()}.parquet", rows)
    session.scorer.share_usage()
    if processes.count() > 1:
        with processes.barrier():
            shares = (read_rollouts(parts / f"{peer}.parquet") for peer in range(processes.count()))
            rows = _in_order([row for share in shares for row in share], draws)
    if session.scorer.has_joint():
        by_id = {problem.id: problem for problem, _ in draws}
        problems = [by_id[row.rollout.problem_id] for row in rows]
        texts = graded_texts(session, problems, [row.text for row in rows])
        with session.clock.doing("verification"):
            token_ids, scores = [row.rollout.token_ids for row in rows], [row.score for row in rows]
            scores = session.scorer.joint(problems, texts, token_ids, scores)
        rows = [replace(row, score=score) for row, score in zip(rows, scores, strict=True)]
    return rows, sampling


@dataclass(frozen=True)
class _Answer:
    """A rollout as it came: its text, also as it is graded, and its score if that could begin before all were drawn."""

    rollout: Rollout
    problem: Problem
    text: str
    graded: str
    begun: Begun | None


Row = TypeVar("Row", ScoredRollout, _Answer)


def _in_order(rows: Sequence[Row], draws: Draws) -> list[Row]:
    """Sort rows in the order of draws and samples, so that no file depends on which finished first."""
    place = {(problem.id, visit): i for i, (problem, visit) in enumerate(draws)}
    return sorted(rows, key=lambda row: (place[row.rollout.problem_id, row.rollout.visit], row.rollout.sample))


def _generate(session: Session, params: Any, draws: Draws, workload: Workload, bar: Progress | None) -> list[_Answer]:
    """Generate answers in the order of draws and samples; finished ones are handled while devices decode the others."""
    tokenizer, samples = session.tokenizer, workload.num_generations
    requests = [
        Request(problem.id, tokenizer.encode_prompt(problem), workload.params, num_samples=samples, visit=visit)
        for problem, visit in draws
    ]
    by_id, before = {problem.id: problem for problem, _ in draws}, bar.done if bar is not None else 0
    opened = opening_thoughts(session, by_id.values())
    answers: list[_Answer] = []
    if bar is not None:
        bar.begin()  # the rows decode together, and end together where they are of one length
    for rollout in session.engine.generate(params, requests, workload.rng_stream, workload.shapes):
        problem = by_id[rollout.problem_id]
        text = safe_text(cut(tokenizer.decode(rollout.token_ids), workload.params.stop))
        graded = "<think>" + text if problem.id in opened else text
        answers.append(_Answer(rollout, problem, text, graded, session.scorer.begin(problem, graded)))
        # Of responses that end together the first say nothing of the pace: they are counted with the last of them.
        if bar is not None and not session.engine.ready:
            answered = len(answers) // samples * processes.count()  # the other processes are about as far
            bar.update(before + min(answered, len(draws)))
    return _in_order(answers, draws)


def graded_texts(session: Session, problems: Sequence[Problem], texts: Sequence[str]) -> list[str]:
    """Return responses as rewards see them: with the `<think>` that a template may have opened in the prompt.

    Without it a verifier would take the thought for the answer. problems: that of each text.
    """
    opened = opening_thoughts(session, {problem.id: problem for problem in problems}.values())
    return ["<think>" + text if problem.id in opened else text for problem, text in zip(problems, texts, strict=True)]


def opening_thoughts(session: Session, problems: Iterable[Problem]) -> set[str]:
    """Return the ids of the problems in whose prompt the template opens a thought."""
    return {problem.id for problem in problems if session.tokenizer.render(problem).rstrip().endswith("<think>")}


def rewards(groups: Groups) -> np.ndarray:
    """Return rewards, float64 [N, G], NaN for unscorable responses and, where groups differ in size, for none."""
    values = np.full((len(groups), max(map(len, groups))), np.nan)
    for i, group in enumerate(groups):
        values[i, : len(group)] = [np.nan if row.score.reward is None else row.score.reward for row in group]
    return values


def correct(groups: Groups) -> np.ndarray:
    """Return each response's value in accuracies, float64 [N, G], see `Score.accuracy`."""
    return np.array([[row.score.accuracy for row in group] for group in groups])


def describe(groups: Groups) -> dict[str, float]:
    """Compute metrics of freshly sampled groups, under TRL's names; means over responses (entropy: over tokens).

    frac_reward_zero_std: groups of equal rewards, or with fewer than two that could be scored.
    Lengths of correct and of incorrect responses are included where a verdict knows right and wrong.
    """
    rows = [row for group in groups for row in group]
    lengths = np.array([len(row.rollout.token_ids) for row in rows])
    values = rewards(groups)
    scored = ~np.isnan(values)
    counts = scored.sum(axis=1)
    means = np.where(scored, values, 0.0).sum(axis=1) / np.maximum(counts, 1)
    # Equal rewards leave rounding errors of the mean (six times 0.7 has a standard deviation of 1e-16): compare them.
    differ = np.where(scored, values, -np.inf).max(axis=1) > np.where(scored, values, np.inf).min(axis=1)
    centred = np.where(scored & differ[:, None], values - means[:, None], 0.0)
    spread = np.sqrt(np.square(centred).sum(axis=1) / np.maximum(counts - 1, 1))
    verdicts = {f"verdicts/{v.value}": float(np.mean([row.score.verdict is v for row in rows])) for v in Verdict}
    judged = np.array([row.score.accuracy for row in rows])
    apart = {"correct": lengths[judged == 1], "incorrect": lengths[judged == 0]}
    return {
        "reward": float(values[scored].mean()) if scored.any() else float("nan"),
        "reward_std": float(spread.mean()),
        "frac_reward_zero_std": float(np.mean(~differ)),
        "entropy": float(np.concatenate([row.rollout.entropies for row in rows]).mean()),
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(np.mean([row.rollout.stop_reason == "length" for row in rows])),
        **{f"completions/mean_length_{side}": float(part.mean()) for side, part in apart.items() if part.size},
        **verdicts,
    }


def log_samples(session: Session, name: str, step: int, draws: Draws, groups: Groups, **columns: str) -> None:
    """Log the first response to each of the first logging.samples draws, for people to read, and the prompt as the
    policy saw it. columns: further ones."""
    shown = list(zip(draws, groups, strict=True))[: session.config.logging.samples]
    rows = [
        {
            **columns,
            "problem_id": problem.id,
            "prompt": session.tokenizer.decode_raw(group[0].rollout.prompt_ids),
            "answer": problem.answer,
            "completion": group[0].text,
            "verdict": group[0].score.verdict.value,
        }
        for (problem, _), group in shown
    ]
    session.tracker.samples(name, step, rows)
