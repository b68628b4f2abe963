"""Generation, scoring and grouping of responses, for online training, collection and evaluation."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from etils import epath

from g2d_jax.data.stops import cut
from g2d_jax.models.flops import attended, forward_flops
from g2d_jax.records import Problem, Request, Rollout, ScoredRollout, Verdict, by_id, differ
from g2d_jax.rewards.pool import Begun
from g2d_jax.rollouts.workload import Workload, prompts_per_call
from g2d_jax.runtime import processes, storage
from g2d_jax.runtime.tables import read_rollouts, safe_text, write_rollouts
from g2d_jax.runtime.tracking import Progress
from g2d_jax.session.session import Session, StopRun
from g2d_jax.session.stage_result import Cost

LOGGED = 8  # responses of an update that are kept for reading

Draws = list[tuple[Problem, int]]
"""Problems, each with its visit: how often it came before."""

Groups = list[list[ScoredRollout]]
"""For each draw its responses, in order of their sample index."""

Batches = Sequence[tuple[Draws, epath.Path]]
"""Draws that are stored together, each batch with its shard: the Parquet file of its rollouts."""


@dataclass(frozen=True)
class Sampled:
    """The draws of a batch, its groups, and the cost of sampling and scoring them, for `Cost.add`.

    greedy: the greedy response to each draw, if there are any. from_disk: whether this was read back:
    an earlier start sampled it, or its batch is one of a long window.
    """

    draws: Draws
    groups: Groups
    cost: Mapping[str, float]
    from_disk: bool = False
    greedy: Sequence[ScoredRollout] = ()

    @property
    def every(self) -> Groups:
        """The groups with the greedy responses behind the sampled ones."""
        if not self.greedy:
            return self.groups
        return [[*group, row] for group, row in zip(self.groups, self.greedy, strict=True)]


class _NoBar(Progress):
    """A bar that shows nothing, for a stage whose own bar counts updates."""

    def __init__(self) -> None:
        self.done = 0

    def begin(self) -> None:
        pass

    def update(self, done: int, metrics: Mapping[str, float] | None = None) -> None:
        self.done = done

    skip = update


def sampled_batches(
    session: Session,
    sampler_params: Callable[[], Any],
    batches: Batches,
    workload: Workload,
    *,
    policy: str,
    cost: Cost,
    bar: Progress | None = None,
) -> list[Sampled]:
    """Sample and score the responses to the draws of all batches, or read them back where that was
    done before.

    See `generate`. Adds to the cost the tokens and FLOPs of all of them, and the time once spent on
    the batches that are read back; the caller tracks new time.
    """
    bar = bar or _NoBar()
    sampled = []
    for batch in generate(session, sampler_params, batches, workload, policy=policy, bar=bar):
        if batch.from_disk:
            cost.add(batch.cost)
        sampled.append(batch)
        bar.update(bar.done, describe(batch.groups))
    session.writer.wait()
    for batch in sampled:
        count_rollouts(session, cost, batch.every)
    return sampled


def concat_rounds(rounds: Sequence[Sampled]) -> tuple[Draws, Groups]:
    """Join the draws of several rounds, and their groups."""
    draws: Draws = []
    groups: Groups = []
    for sampled in rounds:
        draws += sampled.draws
        groups += sampled.groups
    return draws, groups


def joined(parts: Sequence[Sampled]) -> Sampled:
    """Join parts of what one file is to hold, with the sums of their costs."""
    draws, groups = concat_rounds(parts)
    cost: Counter[str] = Counter()
    greedy: list[ScoredRollout] = []
    for part in parts:
        cost.update(part.cost)
        greedy += part.greedy
    return Sampled(draws, groups, dict(cost), greedy=greedy)


def generate(
    session: Session,
    sampler_params: Callable[[], Any],
    batches: Batches,
    workload: Workload,
    *,
    policy: str,
    bar: Progress | None = None,
) -> Iterator[Sampled]:
    """Sample and score responses for batches of draws; yield them batch by batch, in order.

    A call of the sampler takes as many batches as compute.generation_batch_size allows. All
    processes sample together, and each scores what its own devices sampled.
    sampler_params: gives the policy as the engine reads it, called once if anything is sampled.
    policy: its name. bar: moves by the draws that are answered.

    Shards are written in the background: nothing that outlives the process may be made of the
    rollouts before `Session.writer` has waited for it. Next to a shard lies its cost: its share, by
    tokens, of the call's time and of the rewards' cost.
    """
    bar = bar or _NoBar()
    server = session.sampling.server
    params = None
    done = 0
    prompts = sum(len(draws) for draws, _ in batches)
    for call in _calls(batches, prompts_per_call(session, workload.samples)):
        split, shards = zip(*call, strict=True)
        draws = list(itertools.chain.from_iterable(split))
        parts = shards[0].parent / "_parts"
        done += len(draws)
        answered = bar.done + len(draws)
        # A run that is killed and started again trains on the same tokens and verdicts, timeouts
        # included. A call is read back only whole: log-probabilities depend, in their last bits, on
        # what is sampled in one call.
        greedy = list(map(greedy_file, shards)) if workload.greedy else []
        if on_disk(session, [*shards, *greedy]):
            processes.on_leader(partial(_clear, parts))
            bar.skip(answered)
            for batch in call:
                yield _read(*batch, workload)
            continue
        if params is None:
            params = sampler_params()
        cost = Cost()
        with session.track_cost(cost):
            started = time.perf_counter()
            with session.clock.doing("generation"):
                answers = _answers(session, params, draws, workload, bar)
            seconds = time.perf_counter() - started
            served = seconds
            if server is not None:
                served = server.busy.take()
            rows = _scored(session, answers, draws, policy, parts)
        seconds, served = map(max, zip(*processes.gather([seconds, served]), strict=True))
        usage = {"sampling_seconds": seconds, "serving_seconds": served}
        sampled = split_by_batch(split, rows, cost, usage, workload.greedy)
        session.writer.submit(partial(write_sampled, sampled, shards, parts))
        if len(call) < len(batches):
            session.tracker.say(f"{policy}: {done:,} of {prompts:,} prompts sampled and scored")
        bar.update(answered)
        yield from sampled


def ask_ahead(session: Session, params: Any, batches: Batches, workload: Workload) -> None:
    """Send a server the requests of a `generate` that comes later with these batches. Those on disk
    are left out, and all processes make the call.

    params: the policy, as that `generate` will give it.
    """
    server = session.sampling.server
    assert server is not None
    calls = []
    for call in _calls(batches, prompts_per_call(session, workload.samples)):
        split, shards = zip(*call, strict=True)
        if not on_disk(session, shards):
            draws = list(itertools.chain.from_iterable(split))
            calls.append(_requests(session, draws, workload))
    server.ask_ahead(params, calls, workload.rng_stream)


def require_finite(rollouts: Sequence[Rollout], policy: str) -> None:
    """Raise StopRun if a policy sampled with log-probabilities that are not all finite: its weights
    are broken.

    Samples of such a distribution say nothing of the policy; they must not be trained on, nor
    measured.
    policy: its name, for the message.
    """
    broken = [rollout for rollout in rollouts if not np.isfinite(rollout.logprobs).all()]
    if not broken:
        return
    first = broken[0]
    at = int(np.argmin(np.isfinite(first.logprobs)))
    raise StopRun(
        f"policy {policy}: {len(broken)} of {len(rollouts)} sampled responses have "
        f"log-probabilities that are not finite (problem {first.problem_id}, sample "
        f"{first.sample}: {first.logprobs[at]} at token {at + 1}), so its weights or its "
        "activations are not finite either. Nothing was written of them. Check the checkpoint or "
        "model the policy came from, try dtype='float32', or train it again with a lower learning "
        "rate"
    )


def on_disk(session: Session, files: Sequence[epath.Path]) -> bool:
    """Return whether all of the files exist, for all processes alike, after pending writes."""
    session.writer.wait()
    return processes.on_leader(lambda: all(file.exists() for file in files))


def measured_once(
    session: Session, file: epath.Path, measure: Callable[[Cost], Any]
) -> tuple[Any, Cost]:
    """Measure something, and its cost, or read both back where an earlier start wrote them as JSON.

    measure: adds tokens and FLOPs to the cost it is given; its time is tracked.
    """
    if on_disk(session, [file]):
        record = storage.read_json(file)
        return record["value"], Cost(**record["cost"])
    with session.track_cost(cost := Cost()):
        value = measure(cost)
    processes.on_leader(
        lambda: storage.write_json(file, {"value": value, "cost": dataclasses.asdict(cost)})
    )
    return value, cost


def split_by_batch(
    batches: Sequence[Draws],
    rows: Sequence[ScoredRollout],
    cost: Cost,
    spent: Mapping[str, float],
    greedy: bool = False,
) -> list[Sampled]:
    """Split one call's rows and cost by batch, the cost and the seconds spent in sampling by their
    tokens.

    rows: equally many of each of the call's draws, in order; greedy: whether a draw's last is its
    greedy one.
    """
    prompts = sum(map(len, batches))
    samples = len(rows) // prompts
    total = _tokens(rows)
    remaining = iter(rows)
    done = 0
    sampled: list[Sampled] = []
    for draws in batches:
        groups = [list(itertools.islice(remaining, samples)) for _ in draws]
        tokens = _tokens(rows_of(groups))
        part = cost.part(done / total, (done + tokens) / total)
        done += tokens
        usage = {
            "calls": len(draws) / prompts,
            "prompts": len(draws),
            "sampled_tokens": tokens,
        }
        for name, seconds in spent.items():
            usage[name] = seconds * tokens / total
        last = []
        if greedy:
            last = [_as_first(group[-1]) for group in groups]
            groups = [group[:-1] for group in groups]
        sampled.append(Sampled(draws, groups, {**part, **usage}, greedy=last))
    return sampled


def _as_first(row: ScoredRollout) -> ScoredRollout:
    """Return a greedy response as the only sample of a file of its own."""
    return replace(row, rollout=replace(row.rollout, sample=0))


def _tokens(rows: Sequence[ScoredRollout]) -> int:
    return sum(row.rollout.length for row in rows)


def write_sampled(
    sampled: Sequence[Sampled], shards: Sequence[epath.Path], parts: epath.Path
) -> None:
    """Write one call's shards. parts: folder of the processes' own files, whose rows are in the
    shards then."""
    for batch, shard in zip(sampled, shards, strict=True):
        # before the shard, which says that all is there
        storage.write_json(cost_file(shard), batch.cost)
        if batch.greedy:
            write_rollouts(greedy_file(shard), batch.greedy)
        write_rollouts(shard, rows_of(batch.groups))
    _clear(parts)


def _read(draws: Draws, shard: epath.Path, workload: Workload) -> Sampled:
    groups = grouped(read_rollouts(shard), draws, workload.num_generations)
    greedy: Groups = []
    if workload.greedy:
        greedy = grouped(read_rollouts(greedy_file(shard)), draws, 1)
    return Sampled(draws, groups, spent_on(shard), from_disk=True, greedy=rows_of(greedy))


def _clear(parts: epath.Path) -> None:
    """Remove the processes' own files, once their rows are in the shards."""
    if parts.exists():
        parts.rmtree()


def _calls(batches: Batches, prompts: int) -> Iterator[list[tuple[Draws, epath.Path]]]:
    """Split batches, in order, into calls of up to so many prompts, but at least one batch."""
    call: list[tuple[Draws, epath.Path]] = []
    size = 0
    for batch in batches:
        if call and size + len(batch[0]) > prompts:
            yield call
            call = []
            size = 0
        call.append(batch)
        size += len(batch[0])
    if call:
        yield call


def cost_file(shard: epath.Path) -> epath.Path:
    """Return the file of a shard's cost. pandas and pyarrow pass over files with an underscore in
    front."""
    return shard.parent / f"_{shard.stem}.json"


def greedy_file(shard: epath.Path) -> epath.Path:
    """Return the file of the greedy responses beside a shard's sampled ones."""
    return shard.parent / f"{shard.stem}-greedy.parquet"


def spent_on(shard: epath.Path) -> dict[str, float]:
    """Read the cost of sampling and scoring a shard's rollouts, as `generate` wrote it."""
    file = cost_file(shard)
    return storage.read_json(file) if file.exists() else {}


def read_sampled(session: Session, shard: epath.Path) -> Sampled:
    """Read a shard by itself. Raises ValueError if a problem is not in data.train."""
    draws: Draws = []
    groups: Groups = []
    try:
        for (problem_id, visit), rows in itertools.groupby(read_rollouts(shard), draw_of):
            draws.append((session.problems.train_by_id[problem_id], visit))
            groups.append(list(rows))
    except KeyError as error:
        raise ValueError(
            f"{shard}: problem {error} is not in data.train: was the data changed?"
        ) from error
    return Sampled(draws, groups, spent_on(shard), from_disk=True)


def draw_of(row: ScoredRollout) -> tuple[str, int]:
    """Return the id of a response's problem, and its visit."""
    return row.rollout.problem_id, row.rollout.visit


def grouped(rows: Sequence[ScoredRollout], draws: Draws, num_generations: int) -> Groups:
    """Sort rows into the draws' groups. Raises ValueError when some are missing: the file belongs
    to another run."""
    by_key = {(*draw_of(row), row.rollout.sample): row for row in rows}
    groups: Groups = []
    try:
        for problem, visit in draws:
            groups.append([by_key[problem.id, visit, sample] for sample in range(num_generations)])
    except KeyError as error:
        raise ValueError(
            f"rollouts on disk lack problem, visit, sample {error}: was the data changed?"
        ) from error
    return groups


def count_rollouts(session: Session, cost: Cost, groups: Groups) -> None:
    """Add the tokens and FLOPs of generating these groups: each prompt once, each response token
    once.

    From the rollouts, not from the sampler: those read back from a shard after a restart count too.
    """
    config = session.model_config
    for group in groups:
        prompt = len(group[0].rollout.prompt_ids)
        cost.prefilled += prompt
        cost.flops += forward_flops(config, prompt, attended(prompt))
        for row in group:
            length = row.rollout.length
            cost.generated += length
            cost.flops += forward_flops(config, length, attended(length, before=prompt))


def _scored(
    session: Session,
    answers: Sequence[_Answer],
    draws: Draws,
    policy: str,
    parts: epath.Path,
) -> list[ScoredRollout]:
    """Score this process's answers; return those of all processes, in the order of draws and
    samples.

    parts: a folder, in which each of several processes leaves the rollouts of its own devices for
    all to read.
    """
    # In the barriers each process works for itself. The error of one is raised by all of them:
    # without it the others would wait for ever where they meet next, in `share_usage`, in the
    # gather of `generate` or inside a program.
    with processes.barrier():
        rows = _score_local(session, answers, policy)
        if processes.count() > 1:
            write_rollouts(parts / f"{processes.index()}.parquet", rows)
    session.scorer.share_usage()
    if processes.count() > 1:
        with processes.barrier():
            rows = []
            for peer in range(processes.count()):
                rows += read_rollouts(parts / f"{peer}.parquet")
            rows = _in_order(rows, draws)
    if session.scorer.has_collective():
        rows = _score_collective(session, rows, draws)
    return rows


def _score_local(session: Session, answers: Sequence[_Answer], policy: str) -> list[ScoredRollout]:
    """Score this process's answers by the rewards that it can compute by itself."""
    if (
        session.sampling.server is None
    ):  # a server checks its own, and may give no log-probabilities
        require_finite([answer.rollout for answer in answers], policy)
    processes.note_progress(f"scoring {policy}")
    with session.clock.doing("verification"):
        scores = session.scorer.score_local(
            [answer.problem for answer in answers],
            [answer.graded for answer in answers],
            [answer.rollout.token_ids for answer in answers],
            [answer.pending for answer in answers],
        )
    return [
        ScoredRollout(answer.rollout, answer.text, score, policy)
        for answer, score in zip(answers, scores, strict=True)
    ]


def _score_collective(
    session: Session, rows: Sequence[ScoredRollout], draws: Draws
) -> list[ScoredRollout]:
    """Add the scores that all processes compute together, on the rows of all of them."""
    of_id = by_id(problems_of(draws))
    problems = [of_id[row.rollout.problem_id] for row in rows]
    texts = graded_texts(session, problems, [row.text for row in rows])
    token_ids = [row.rollout.token_ids for row in rows]
    with session.clock.doing("verification"):
        scores = session.scorer.score_collective(
            problems, texts, token_ids, [row.score for row in rows]
        )
    return [replace(row, score=score) for row, score in zip(rows, scores, strict=True)]


@dataclass(frozen=True)
class _Answer:
    """A rollout as it came: its text, the text as it is graded, and its verification if that could
    begin at once."""

    rollout: Rollout
    problem: Problem
    text: str
    graded: str
    pending: Begun | None


Row = TypeVar("Row", ScoredRollout, _Answer)


def _in_order(rows: Iterable[Row], draws: Draws) -> list[Row]:
    """Sort rows in the order of draws and samples, so that no file depends on which finished
    first."""
    place = {(problem.id, visit): i for i, (problem, visit) in enumerate(draws)}
    return sorted(
        rows, key=lambda row: (place[row.rollout.problem_id, row.rollout.visit], row.rollout.sample)
    )


def _requests(session: Session, draws: Draws, workload: Workload) -> list[Request]:
    """Return the request of each draw."""
    requests = []
    for problem, visit in draws:
        ids = session.tokenizer.encode_prompt(problem)
        requests.append(
            Request(
                problem.id,
                ids,
                workload.params,
                workload.samples,
                visit,
                greedy=workload.greedy,
                needs_logprobs=workload.needs_logprobs,
            )
        )
    return requests


def _answers(
    session: Session, params: Any, draws: Draws, workload: Workload, bar: Progress
) -> list[_Answer]:
    """Generate answers in the order of draws and samples; finished ones are handled while devices
    decode the others."""
    tokenizer = session.tokenizer
    samples = workload.samples
    requests = _requests(session, draws, workload)
    problems = by_id(problems_of(draws))
    opened = opening_thoughts(session, problems.values())
    answers: list[_Answer] = []
    start = bar.done
    bar.begin()  # the rows decode together, and end together where they are of one length
    for rollout in session.sampling.engine.generate(
        params, requests, workload.rng_stream, workload.shapes
    ):
        problem = problems[rollout.problem_id]
        text = safe_text(cut(tokenizer.decode(rollout.token_ids), workload.params.stop))
        graded = _graded(text, problem, opened)
        answers.append(
            _Answer(rollout, problem, text, graded, session.scorer.submit(problem, graded))
        )
        # Of responses that end together the first say nothing of the pace: they are counted with
        # the last of them.
        if not session.sampling.engine.ready:
            # the other processes are about as far
            answered = len(answers) // samples * processes.count()
            bar.update(start + min(answered, len(draws)))
    return _in_order(answers, draws)


def graded_texts(session: Session, problems: Sequence[Problem], texts: Sequence[str]) -> list[str]:
    """Return responses as rewards see them: with the `<think>` that a template may have opened in
    the prompt.

    Without it a verifier would take the thought for the answer. problems: that of each text.
    """
    opened = opening_thoughts(session, by_id(problems).values())
    return [_graded(text, problem, opened) for text, problem in zip(texts, problems, strict=True)]


def _graded(text: str, problem: Problem, opened: set[str]) -> str:
    return "<think>" + text if problem.id in opened else text


def opening_thoughts(session: Session, problems: Iterable[Problem]) -> set[str]:
    """Return the ids of the problems in whose prompt the template opens a thought."""
    opened = set()
    for problem in problems:
        if session.tokenizer.opens_thought(problem):
            opened.add(problem.id)
    return opened


def draw_once(problems: Iterable[Problem]) -> Draws:
    """Draw each problem, for the first time."""
    return [(problem, 0) for problem in problems]


def problems_of(draws: Draws) -> list[Problem]:
    """List the problem of each draw."""
    return [problem for problem, _ in draws]


def rows_of(groups: Iterable[Sequence[ScoredRollout]]) -> list[ScoredRollout]:
    """List the responses of all groups, one after the other."""
    return list(itertools.chain.from_iterable(groups))


def by_response(groups: Groups, value: Callable[[ScoredRollout], Any]) -> np.ndarray:
    """Return a value of each response, [N, G]. Groups must be of one size."""
    return np.array([list(map(value, group)) for group in groups])


def lengths(groups: Groups) -> np.ndarray:
    """Count the tokens of each response, int64 [N, G]."""
    return by_response(groups, lambda row: row.rollout.length)


def rewards(groups: Groups) -> np.ndarray:
    """Return rewards, float64 [N, G], NaN for unscorable responses and, where groups differ in
    size, for none."""
    values = np.full((len(groups), max(map(len, groups))), np.nan)
    for i, group in enumerate(groups):
        values[i, : len(group)] = [row.score.reward for row in group]  # NumPy makes NaN of None
    return values


def correct(groups: Groups) -> np.ndarray:
    """Return each response's value in accuracies, float64 [N, G], see `Score.accuracy`."""
    return by_response(groups, lambda row: row.score.accuracy)


def describe(groups: Groups) -> dict[str, float]:
    """Compute metrics of freshly sampled groups, under TRL's names; means over responses (entropy:
    over tokens).

    frac_reward_zero_std: groups of equal rewards, or with fewer than two that could be scored.
    Lengths of correct and of incorrect responses are included where a verdict knows right and
    wrong.
    """
    rows = rows_of(groups)
    tokens = np.array([row.rollout.length for row in rows])
    values = rewards(groups)
    scored = ~np.isnan(values)
    counts = scored.sum(axis=1)
    means = np.where(scored, values, 0.0).sum(axis=1) / np.maximum(counts, 1)
    # Equal rewards leave rounding errors of the mean (six times 0.7 has a standard deviation of
    # 1e-16): compare them.
    apart = differ(values)
    centred = np.where(scored & apart[:, None], values - means[:, None], 0.0)
    spread = np.sqrt(np.square(centred).sum(axis=1) / np.maximum(counts - 1, 1))
    metrics = {
        "reward": float(values[scored].mean()) if scored.any() else float("nan"),
        "reward_std": float(spread.mean()),
        "frac_reward_zero_std": float(np.mean(~apart)),
        "entropy": float(np.concatenate([row.rollout.entropies for row in rows]).mean()),
        "completions/mean_length": float(tokens.mean()),
        "completions/min_length": float(tokens.min()),
        "completions/max_length": float(tokens.max()),
        "completions/clipped_ratio": float(
            np.mean([row.rollout.stop_reason == "length" for row in rows])
        ),
    }
    judged = np.array([row.score.accuracy for row in rows])
    for side, accuracy in (("correct", 1), ("incorrect", 0)):
        if accuracy in judged:
            metrics[f"completions/mean_length_{side}"] = float(tokens[judged == accuracy].mean())
    for name in sorted({name for row in rows for name in row.score.parts}):
        parts = np.array([row.score.parts.get(name) for row in rows], np.float64)
        known = parts[~np.isnan(parts)]
        metrics[f"reward/{name}"] = float(known.mean()) if known.size else float("nan")
    verdicts = Counter(row.score.verdict for row in rows)
    for verdict in Verdict:
        metrics[f"verdicts/{verdict.value}"] = verdicts[verdict] / len(rows)
    return metrics


def log_samples(
    session: Session, name: str, step: int, draws: Draws, groups: Groups, **columns: str
) -> None:
    """Log the first response to each of the first LOGGED draws, for people to read, and
    the prompt as the policy saw it. columns: further ones."""
    shown = list(zip(draws, groups, strict=True))[:LOGGED]
    rows = []
    for (problem, _), (first, *_) in shown:
        rows.append(
            {
                **columns,
                "problem_id": problem.id,
                "prompt": session.tokenizer.decode_raw(first.rollout.prompt_ids),
                "answer": problem.answer,
                "completion": first.text,
                "verdict": first.score.verdict.value,
            }
        )
    session.tracker.samples(name, step, rows)
