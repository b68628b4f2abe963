"""Offline DPO on a static preference dataset. The reference is the policy it starts from; its log-probabilities are
computed once, cached under a fingerprint, and no reference model stays in memory."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from etils import epath

from g2d_jax.config import Collect, Offline, Optimizer
from g2d_jax.data.loader import Order, draw
from g2d_jax.data.packing import Group, Packed, Response
from g2d_jax.data.preferences import check_preferences
from g2d_jax.losses import dpo_weights
from g2d_jax.models.decoder import Decoder
from g2d_jax.records import Preference
from g2d_jax.runtime import processes, storage
from g2d_jax.runtime.tables import read_preferences
from g2d_jax.stages import alerts, pair_diagnostics, probes
from g2d_jax.stages.cost import Cost
from g2d_jax.stages.policies import checkpoint_of, load_policy, load_reference
from g2d_jax.stages.problems import order as problem_order
from g2d_jax.stages.programs.program import Program
from g2d_jax.stages.programs.training import gradient, logprobs, params_and_state, training_programs
from g2d_jax.stages.rollouts import on_disk
from g2d_jax.stages.rows import choose_row_length, pack_rows
from g2d_jax.stages.runtime import Runtime
from g2d_jax.stages.trainer import open_trainer
from g2d_jax.study import informativeness
from g2d_jax.training import objectives
from g2d_jax.training.objectives import Compute, Objective

SCORED_AT_ONCE = 256  # pairs of one scoring call


def run(runtime: Runtime, name: str, stage: Offline) -> dict[str, Any]:
    """Train stage.epochs over the pairs; return the manifest's fields.

    With stage.diagnose, the pairs are measured under the policy before and after: `result` has flat groups of
    figures, `diagnosis` their cost, which no other field counts, and pairs.parquet each pair's log-probabilities.
    before, after: `pair_summary` of the log-probabilities. margins: `margin_summary` after training; before it, rewards
    and margins are 0 by definition, for the policy is the reference. signal: see `pair_diagnostics.gradient_signal`.
    """
    pairs = read(runtime, stage)
    batch_size = min(stage.batch_size, len(pairs))
    steps = len(pairs) * stage.epochs // batch_size
    unused = len(pairs) * stage.epochs - steps * batch_size
    if unused or batch_size < stage.batch_size:
        runtime.tracker.say(f"{name}: {steps} updates of {batch_size} pairs; {unused} of the last epoch's are not used")
    longest = max(len(p.prompt_ids) + len(p.chosen_ids) + len(p.rejected_ids) for p in pairs)
    size = min(batch_size, SCORED_AT_ONCE)
    batches = [pairs[i : i + size] for i in range(0, min(len(pairs), SCORED_AT_ONCE), size)]
    row_length = choose_row_length(runtime, longest, [batch(drawn, np.zeros((len(drawn), 2))) for drawn in batches])
    runtime.compile_ahead(_programs(runtime, name, stage, len(pairs), row_length, None))
    scoring = Cost()
    with runtime.track_cost(scoring):
        references = reference_logprobs(runtime, name, stage, pairs, row_length, scoring)
    order = problem_order(runtime.config, len(pairs), f"offline/{name}") if stage.shuffle else Order(len(pairs), None)
    objective = objective_of(runtime.compute, stage)
    before = (
        pair_diagnostics.pair_summary(pairs, references) if stage.diagnose else {}
    )  # before training: it refuses responses without tokens
    signal, cost = _signal(runtime, name, stage, objective, pairs, references, row_length)
    with open_trainer(
        runtime,
        name,
        objective,
        _warmup_that_fits(stage.optimizer, steps, lambda text: runtime.tracker.say(f"{name}: {text}")),
        policy=stage.policy,
        total=steps,
        row_length=row_length,
        per="pairs",
        most_rows=batch_size,
    ) as trainer:
        if trainer.step == 0:
            trainer.tally = scoring
        alerts.alarm(runtime, name, trainer, alerts.few_updates(steps, batch_size, len(pairs)))
        probe = partial(
            probes.probe, runtime, name, stage, trainer, reference=lambda: load_reference(runtime, stage.policy)
        )
        probe()
        while trainer.goes_on():
            with runtime.track_cost(trainer.tally):
                drawn = [i for i, _ in draw(order, trainer.step * batch_size, batch_size)]
                trainer.update(batch([pairs[i] for i in drawn], references[drawn]), {})
            probe()
            trainer.checkpoint_if_due()
        trainer.end()
        counts = {"pairs": len(pairs), "steps": steps, "unused": unused, **trainer.skips.manifest()}
        fields = {**trainer.tally.manifest(), "counts": counts, **probes.evidence(trainer)}
        if not stage.diagnose:
            return {**fields, **alerts.evidence(trainer)}
        with runtime.track_cost(cost):
            trained = score_pairs(runtime, trainer.policy, pairs, row_length, cost)
        change = float(np.mean((trained - references)[:, 0] / [len(pair.chosen_ids) for pair in pairs]))
        alerts.alarm(runtime, name, trainer, alerts.displaced(change, stage))
        fields |= alerts.evidence(trainer)
    result = {
        "before": before,
        "after": pair_diagnostics.pair_summary(pairs, trained),
        "margins": informativeness.margin_summary(stage.beta, references, trained),
        "signal": signal,
    }
    pair_diagnostics.write_pairs(runtime.folders[name] / "pairs.parquet", pairs, references, trained)
    runtime.tracker.log(name, steps, pair_diagnostics.figures(result), kind="diagnosis")
    return {**fields, "result": result, "diagnosis": cost.manifest()}


def programs(runtime: Runtime, name: str, stage: Offline, response: int | None = None) -> Iterator[Program]:
    """Yield the stage's programs as far as they are known without its pairs: as many and as long as there can be."""
    source = runtime.config.stages.get(stage.preferences)
    sampling = source.sampling if isinstance(source, Collect) else stage.probe_sampling
    pairs = SCORED_AT_ONCE
    if isinstance(source, Collect):
        most = source.prompts * source.pairs_per_prompt
        pairs = min(most, source.max_pairs or most)
    row_length = choose_row_length(runtime, runtime.config.data.max_prompt_length + 2 * sampling.max_new_tokens)
    yield from _programs(runtime, name, stage, pairs, row_length, response)


def _programs(
    runtime: Runtime, name: str, stage: Offline, pairs: int, row_length: int, response: int | None
) -> Iterator[Program]:
    """Yield the stage's programs for so many pairs in rows of this length, in the order in which they run."""
    prompt = np.zeros(min(runtime.config.data.max_prompt_length, row_length // 3), np.int32)
    side = np.zeros((row_length - len(prompt)) // 2, np.int32)
    pair = Preference("0", "", "", "", prompt, side, side, 1.0, 0.0)
    mean = min(runtime.mean_prompt, len(prompt)) + 2 * min(response or len(side), len(side))
    share = mean / (len(prompt) + 2 * len(side))

    def packed(count: int) -> Packed:
        return pack_rows(runtime, batch([pair] * count, np.zeros((count, 2), np.float32)), row_length, count)

    batch_size, scored = min(stage.batch_size, pairs), min(SCORED_AT_ONCE, pairs)
    steps = pairs * stage.epochs // batch_size
    settings, objective = _warmup_that_fits(stage.optimizer, steps), objective_of(runtime.compute, stage)
    params, state = params_and_state(runtime, settings, steps)
    yield logprobs(runtime, name, packed(scored), (2 if stage.diagnose else 1) * pairs / scored * share, ())
    if stage.diagnose and stage.signal_pairs:
        draws = pair_diagnostics.signal_draws(
            problem_order(runtime.config, pairs, f"signal/{name}"), stage.signal_pairs
        )
        if len(draws) > 1:
            yield gradient(runtime, name, objective, packed(len(draws[0])), len(draws) * share)
    yield from probes.programs(runtime, name, stage, steps, response, params, state, compared=True)
    yield from training_programs(runtime, name, settings, steps, objective, packed(batch_size), steps * share)


def objective_of(compute: Compute, stage: Offline) -> Objective:
    """Return the stage's loss."""
    return objectives.dpo(compute, beta=stage.beta, label_smoothing=stage.label_smoothing, loss_type=stage.loss_type)


def _signal(
    runtime: Runtime,
    name: str,
    stage: Offline,
    objective: Objective,
    pairs: list[Preference],
    references: np.ndarray,
    row_length: int,
) -> tuple[dict[str, float], Cost]:
    """Measure signal and noise of the gradient that training starts with, and the cost of that; ({}, 0) if off."""
    if not stage.diagnose or not stage.signal_pairs:
        return {}, Cost()
    draws = pair_diagnostics.signal_draws(
        problem_order(runtime.config, len(pairs), f"signal/{name}"), stage.signal_pairs
    )
    batches = [batch([pairs[i] for i in drawn], references[drawn]) for drawn in draws]
    settings = [stage.loss_type, stage.beta, stage.label_smoothing, len(draws)]
    inputs = [settings, _inputs(runtime, stage, [pairs[i] for drawn in draws for i in drawn], row_length)]
    return pair_diagnostics.gradient_signal(runtime, name, stage.policy, objective, batches, row_length, inputs)


def _warmup_that_fits(settings: Optimizer, steps: int, say: Callable[[str], None] = lambda _: None) -> Optimizer:
    """Shorten a warm-up that is too long. The number of pairs is known only now: few pairs must not end a run that has
    its rollouts."""
    if settings.warmup_steps < steps:
        return settings
    say(f"only {steps} updates, so warmup_steps {settings.warmup_steps} becomes {steps - 1}")
    return dataclasses.replace(settings, warmup_steps=steps - 1)


def read(runtime: Runtime, stage: Offline) -> list[Preference]:
    """Read the pairs of a collect stage of this run, or of a folder or file of Parquet.

    Raises ValueError for pairs that cannot be trained on, or that are for held-out problems.
    """
    name = stage.preferences
    source = runtime.folders[name] / "preferences" if name in runtime.folders else epath.Path(name)
    pairs = read_preferences(source)
    check_preferences(source, pairs, runtime.model_config.vocab_size)
    held_out = {problem.id for split in ("dev", "test") for problem in runtime.problems[split]}
    if leaked := sum(pair.problem_id in held_out for pair in pairs):
        raise ValueError(f"{leaked} of {len(pairs)} pairs are for problems of data.dev or data.test: leave them out")
    return pairs


def as_group(pair: Preference, reference: np.ndarray, weight: float) -> Group:
    """Put chosen and rejected in one row, behind one copy of their prompt. reference: [2]."""
    sides = zip((pair.chosen_ids, pair.rejected_ids), reference, strict=True)
    responses = [Response(ids, {}, {"reference": float(value), "weight": weight}) for ids, value in sides]
    return Group(pair.prompt_ids, responses, whole=True)


def batch(pairs: list[Preference], references: np.ndarray) -> list[Group]:
    """Build a batch of pairs, weighted so that the loss is their mean."""
    weights = dpo_weights(len(pairs))
    return [as_group(p, r, float(w)) for p, r, w in zip(pairs, references, weights, strict=True)]


def reference_logprobs(
    runtime: Runtime, name: str, stage: Offline, pairs: list[Preference], row_length: int, tally: Cost
) -> np.ndarray:
    """Compute summed log-probabilities of both sides under the starting policy, float32 [pairs, 2], or read the cache.

    The cache's name is a fingerprint of the policy's weights' origin, tokenizer, dtype and every token id. It holds
    the cost of scoring too, so that a restart changes no count.
    """
    file = runtime.folders[name] / f"reference-{storage.fingerprint(_inputs(runtime, stage, pairs, row_length))}.json"
    if on_disk(runtime, [file]):
        cached = storage.read_json(file)
        tally.scored, tally.flops, tally.seconds = (cached[key] for key in ("scored", "flops", "seconds"))
        tally.device_seconds = tally.seconds * runtime.mesh.size
        tally.add(cached.get("clock", {}))
        return np.asarray(cached["logprobs"], np.float32)
    started, clocked = time.perf_counter(), runtime.clock.read()
    references = score_pairs(runtime, load_policy(runtime, stage.policy), pairs, row_length, tally)
    cost = {"scored": tally.scored, "flops": tally.flops, "seconds": time.perf_counter() - started}
    clock = runtime.clock.since(clocked)
    processes.on_leader(lambda: storage.write_json(file, {"logprobs": references, **cost, "clock": clock}))
    return references


def _inputs(runtime: Runtime, stage: Offline, pairs: list[Preference], row_length: int) -> list[Any]:
    """List all that decides the starting policy's log-probabilities of some pairs."""
    what = [runtime.fingerprint(), _origin(runtime, stage.policy), str(runtime.dtype), row_length]
    return [what, [[p.prompt_ids, p.chosen_ids, p.rejected_ids] for p in pairs]]


def _origin(runtime: Runtime, policy: str) -> Any:
    """Identify a policy's weights: its name and, for a stage, the fingerprint in that stage's manifest."""
    if policy == "init" or policy.startswith("hf:"):
        return [policy, None]
    manifest = storage.finished(checkpoint_of(runtime, policy)[0].parent)
    return [policy, (manifest or {}).get("fingerprint")]


def score_pairs(runtime: Runtime, params: Decoder, pairs: list[Preference], row_length: int, tally: Cost) -> np.ndarray:
    """Compute summed log-probabilities of both sides under a policy, float32 [pairs, 2]."""
    scored = []
    for first in range(0, len(pairs), SCORED_AT_ONCE):
        processes.check_stop_together()
        processes.mark(f"scoring pairs from {first}")
        part = pairs[first : first + SCORED_AT_ONCE]
        packed = pack_rows(runtime, batch(part, np.zeros((len(part), 2))), row_length, min(SCORED_AT_ONCE, len(pairs)))
        sides = packed.unpack(runtime.score_logprobs(params, packed, tally))
        scored.append(np.array([[side.sum(dtype=np.float32) for side in pair] for pair in sides], np.float32))
    return np.concatenate(scored)
