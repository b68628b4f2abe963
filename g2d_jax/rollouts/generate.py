"""Rollouts of batches of prompts: the phases `sample` and `score` for each call of the sampler.

    draws ─► sample ─► score ─► a shard a batch, written in the background
       └─ read back where a shard exists

A run that is killed and restarted trains on the same tokens and verdicts, including timeouts.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from etils import epath

from g2d_jax.records import ScoredRollout
from g2d_jax.rollouts.groups import Draws, count_rollouts, describe, rows_of
from g2d_jax.rollouts.sample import requests, sample
from g2d_jax.rollouts.score import score
from g2d_jax.rollouts.store import (
    Batches,
    Sampled,
    clear,
    greedy_file,
    on_disk,
    read_batch,
    write_sampled,
)
from g2d_jax.rollouts.workload import Workload, prompts_per_call
from g2d_jax.runtime import processes
from g2d_jax.runtime.tracking import Progress
from g2d_jax.session.session import Session
from g2d_jax.session.stage_result import Cost


class Policy(NamedTuple):
    """A policy in the engine's form, and its name."""

    params: Any
    name: str


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
    policy: Callable[[], Policy],
    batches: Batches,
    workload: Workload,
    *,
    cost: Cost,
    bar: Progress | None = None,
) -> list[Sampled]:
    """Sample and score responses to the draws of all batches, or read them back, see `generate`.

    Adds all tokens and FLOPs to the cost, and the stored time of batches that are read back; the
    caller tracks new time.
    """
    bar = bar or _NoBar()
    sampled = []
    for batch in generate(session, policy, batches, workload, bar):
        if batch.from_disk:
            cost.add(batch.cost)
        sampled.append(batch)
        bar.update(bar.done, describe(batch.groups))
    session.writer.wait()
    for batch in sampled:
        count_rollouts(session.model_config, cost, batch.every)
    return sampled


def generate(
    session: Session,
    policy: Callable[[], Policy],
    batches: Batches,
    workload: Workload,
    bar: Progress | None = None,
) -> Iterator[Sampled]:
    """Sample and score responses for batches of draws; yield them batch by batch, in order.

    A call of the sampler has as many batches as compute.generation_batch_size allows. All processes
    sample together, and each scores its own devices' responses. policy: returns the policy, called
    at most once, and only to sample. bar: advances by answered draws.

    Shards are written in the background: wait for `Session.writer` before you store anything made
    from the rollouts. Next to a shard is its cost: its share, by tokens, of the call's time and the
    rewards' cost.
    """
    bar = bar or _NoBar()
    sampler: Policy | None = None
    done = 0
    prompts = sum(len(draws) for draws, _ in batches)
    for call in _calls(batches, prompts_per_call(session, workload.samples)):
        draws = list(itertools.chain.from_iterable(own for own, _ in call))
        done += len(draws)
        answered = bar.done + len(draws)
        if _is_stored(session, call, workload):
            bar.skip(answered)
            for own, shard in call:
                yield read_batch(own, shard, workload.num_generations, workload.greedy)
            continue
        if sampler is None:
            sampler = policy()
        sampled = _call(session, sampler, call, workload, bar)
        if len(call) < len(batches):
            session.tracker.say(
                f"{sampler.name}: {done:,} of {prompts:,} prompts sampled and scored"
            )
        bar.update(answered)
        yield from sampled


def _is_stored(session: Session, call: Batches, workload: Workload) -> bool:
    """Return whether an earlier start stored all batches of a call.

    A call is only read back whole: the last bits of log-probabilities depend on the call's samples.
    """
    shards = [shard for _, shard in call]
    greedy = map(greedy_file, shards) if workload.greedy else []
    is_stored = on_disk(session.writer, [*shards, *greedy])
    if is_stored:
        processes.on_leader(partial(clear, _parts(shards)))
    return is_stored


def _parts(shards: Sequence[epath.Path]) -> epath.Path:
    """Return the folder in which processes store their own rows of a call."""
    return shards[0].parent / "_parts"


def _call(
    session: Session, policy: Policy, call: Batches, workload: Workload, bar: Progress
) -> list[Sampled]:
    """Sample and score a call's batches, and write their shards in the background."""
    split, shards = zip(*call, strict=True)
    draws = list(itertools.chain.from_iterable(split))
    parts = _parts(shards)
    engine, server, scorer = session.sampling.engine, session.sampling.server, session.scorer
    cost = Cost()
    with session.track_cost(cost):
        started = time.perf_counter()
        with session.clock.doing("generation"):
            answers = sample(
                engine,
                session.tokenizer,
                policy.params,
                draws,
                workload,
                verify=scorer.submit,
                bar=bar,
            )
        seconds = time.perf_counter() - started
        served = seconds
        if server is not None:
            served = server.busy.take()
        with session.clock.doing("verification"):
            rows = score(
                scorer,
                session.tokenizer,
                answers,
                draws,
                policy.name,
                parts,
                has_logprobs=server is None,
            )
    seconds, served = map(max, zip(*processes.gather([seconds, served]), strict=True))
    usage = {"sampling_seconds": seconds, "serving_seconds": served}
    sampled = split_by_batch(split, rows, cost, usage, workload.greedy)
    session.writer.submit(partial(write_sampled, sampled, shards, parts))
    return sampled


def ask_ahead(session: Session, params: Any, batches: Batches, workload: Workload) -> None:
    """Send a server the requests of a later `generate` with these batches, except for those on
    disk. All processes make the call.

    params: the policy that `generate` will use.
    """
    server = session.sampling.server
    assert server is not None
    calls = []
    for call in _calls(batches, prompts_per_call(session, workload.samples)):
        if not on_disk(session.writer, [shard for _, shard in call]):
            draws = list(itertools.chain.from_iterable(own for own, _ in call))
            calls.append(requests(session.tokenizer, draws, workload))
    server.ask_ahead(params, calls, workload.rng_stream)


def _calls(batches: Batches, prompts: int) -> Iterator[list[tuple[Draws, epath.Path]]]:
    """Split batches, in order, into calls of at most this many prompts, but at least one batch."""
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


def split_by_batch(
    batches: Sequence[Draws],
    rows: Sequence[ScoredRollout],
    cost: Cost,
    spent: Mapping[str, float],
    greedy: bool = False,
) -> list[Sampled]:
    """Split a call's rows by batch, and its cost and sampling seconds in proportion to tokens.

    rows: equally many for each draw, in order. greedy: whether a draw's last row is its greedy
    response.
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
    """Return a greedy response as sample 0, for a separate file."""
    return replace(row, rollout=replace(row.rollout, sample=0))


def _tokens(rows: Sequence[ScoredRollout]) -> int:
    return sum(row.rollout.length for row in rows)
