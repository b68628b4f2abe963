"""Probes of a policy while it is trained: fresh samples on the same prompts.

Offline data says nothing of the trained policy's own entropy and length (arXiv 2506.21495, section 4.2), and rollouts
of a policy synchronised long ago say little: so every stage.probe.every updates the policy itself is sampled. Probes
change no update, and their cost is counted apart from the stage's cost, unless they decide where the stage ends
(stop="adaptive", see early_stopping.py): then it is part of that too.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from g2d_jax.config import Offline, Online, Sampling
from g2d_jax.data.packing import Group, Packed, Response
from g2d_jax.models.decoder import Decoder
from g2d_jax.records import Problem
from g2d_jax.runtime import processes, storage
from g2d_jax.sampler.programs import Shapes
from g2d_jax.stages import alerts
from g2d_jax.stages.cost import Cost
from g2d_jax.stages.programs.program import Program
from g2d_jax.stages.programs.sampling import Asked, rollouts
from g2d_jax.stages.programs.training import logprobs, reference_programs
from g2d_jax.stages.rollouts import Generation, Groups, correct, count_rollouts, describe, on_disk, sampled_groups
from g2d_jax.stages.rows import choose_row_length, pack_rows
from g2d_jax.stages.runtime import Runtime
from g2d_jax.stages.trainer import Trainer
from g2d_jax.study.stats import row_means

FIGURES = (
    *("entropy", "reward", "reward_std", "completions/mean_length", "completions/mean_length_correct"),
    *("completions/mean_length_incorrect", "completions/clipped_ratio"),
)
"""The metrics of `rollouts.describe` that a probe keeps."""

Reference = Callable[[], Decoder]
"""A function that gives the parameters of the policy that KL is measured to; called once a probe."""


def probe(
    runtime: Runtime,
    name: str,
    stage: Online | Offline,
    trainer: Trainer,
    *,
    last: bool = False,
    reference: Reference | None = None,
) -> None:
    """Sample the policy as it is now, if a probe is due at this step and was not made. Measure, log, and warn of what
    has gone wrong.

    Due are step 0, every stage.probe.every updates, the stage's last step, and with `last` any step: a stage may end
    early. Call it outside of blocks whose cost is tracked. The random numbers are the same at each step. Logged with
    kind "probe": see `figures`; with a reference "kl" too. A restart reads back the measurements, and their cost, from
    the stage's folder probe/.
    """
    every, step, entries = stage.probe.every, trainer.step, trainer.extra_state.setdefault("dynamics", [])
    due = every and (step % every == 0 or step == trainer.total or last)
    if not due or any(entry["step"] == step for entry in entries):
        return
    measured = _measured(runtime, name, stage, trainer, reference)
    values, cost = {key: float(value) for key, value in measured["figures"].items()}, measured["cost"]
    entries.append({"step": step, **values})
    total = Cost(**trainer.extra_state.get("probe_cost", {}))
    total.add(cost)
    trainer.extra_state["probe_cost"] = dataclasses.asdict(total)
    if isinstance(stage, Online) and stage.stop == "adaptive":
        trainer.tally.add(cost)
        trainer.extra_state.setdefault("probed", []).append(
            {"step": step, "flops": trainer.tally.flops, **measured["offline"]}
        )
    runtime.tracker.log(name, step, values, kind="probe")
    alerts.watch(runtime, name, stage, trainer, values, kind="probe")


def sampling_shapes(runtime: Runtime, stage: Online | Offline) -> Shapes:
    """Choose the sampler's shapes for the stage's probes."""
    params = runtime.sampling_params(sampling_of(stage))
    return runtime.sampling_shapes(stage, sampled(runtime, stage), stage.probe.num_generations, params)


def sampling_of(stage: Online | Offline) -> Sampling:
    """Return the settings that probes sample with."""
    return stage.probe_sampling if isinstance(stage, Offline) else stage.sampling


def programs(
    runtime: Runtime,
    name: str,
    stage: Online | Offline,
    steps: int,
    response: int | None,
    params: Decoder,
    state: Any,
    *,
    compared: bool,
    reference: tuple[Any, ...] = (),
    viewed: bool = False,
) -> Iterator[Program]:
    """Yield the programs of the stage's probes: before its first update, every so many, and after its last.

    compared: whether KL to a reference is measured. reference: its arrays that stay on the devices, () where each
    probe makes it. viewed: as in `rollouts`.
    """
    if not stage.probe.every:
        return
    sampling, samples = sampling_of(stage), stage.probe.num_generations
    prompts, probes = sampled(runtime, stage), 1 + -(-steps // stage.probe.every)
    shapes = sampling_shapes(runtime, stage)
    workload = Asked(prompts * probes, probes, samples, shapes, sampling.max_new_tokens, response)
    beside, meanwhile = (state.opt_state, *reference), (state, *reference)
    yield from rollouts(
        runtime, name, workload, params, prefix="probe ", viewed=viewed, beside=beside, meanwhile=meanwhile
    )
    if compared:
        if not reference:
            yield from reference_programs(runtime, name, (state,), probes)
        prompt, tokens = (np.zeros(n, np.int32) for n in (runtime.config.data.max_prompt_length, workload.mean))
        packed = _packed(runtime, [Group(prompt, [Response(tokens, {})] * samples)] * prompts, sampling)
        scored = logprobs(runtime, name, packed, probes, (state,), sampling.temperature or 1.0, reference=True)
        yield dataclasses.replace(scored, name=f"probe {scored.name}")


def sampled(runtime: Runtime, stage: Online | Offline) -> int:
    """Count the prompts of a probe."""
    return min(stage.probe.prompts, runtime.problem_counts[stage.probe.split])  # type: ignore[no-any-return]


def evidence(trainer: Trainer) -> dict[str, Any]:
    """Return the manifest's entry {"dynamics": …} with all probes and their cost; {} if there are none.

    The cost, in the fields of a manifest, is in no other field but with stop="adaptive": then the stage's has it too.
    """
    extra_state = trainer.extra_state
    if not extra_state.get("dynamics"):
        return {}
    return {
        "dynamics": {
            "probes": extra_state.get("dynamics", []),
            "probe_cost": Cost(**extra_state.get("probe_cost", {})).manifest(),
        }
    }


def _measured(
    runtime: Runtime, name: str, stage: Online | Offline, trainer: Trainer, reference: Reference | None
) -> dict[str, Any]:
    """Measure the policy at this step: {"figures": …, "offline": see `prospects`, "cost": the fields of a Cost}."""
    folder = runtime.folders[name] / "probe"
    file, shard = (folder / f"step-{trainer.step:06d}.{kind}" for kind in ("json", "parquet"))
    if on_disk(runtime, [file]):
        before: dict[str, Any] = storage.read_json(file)
        return before
    params, cost, sampling = trainer.settled(), Cost(), sampling_of(stage)
    sampling_params, shapes = runtime.sampling_params(sampling), sampling_shapes(runtime, stage)
    with runtime.track_cost(cost):
        groups = sampled_groups(
            runtime,
            None if on_disk(runtime, [shard]) else runtime.view(params),
            [(problem, 0) for problem in probed(runtime.problems[stage.probe.split], stage.probe.prompts)],
            Generation(sampling_params, stage.probe.num_generations, shapes, f"probe/{name}"),
            policy=f"{name}@{trainer.step}",
            shard=shard,
            tally=cost,
        )
        count_rollouts(runtime, cost, groups)
        values = figures(groups)
        if reference is not None:
            values["kl"] = divergence(groups, reference_logprobs(runtime, groups, reference(), sampling, cost))
    measured = {"figures": values, "offline": prospects(groups), "cost": dataclasses.asdict(cost)}
    processes.on_leader(lambda: storage.write_json(file, measured))
    return measured


def probed(problems: Sequence[Problem], count: int) -> list[Problem]:
    """Return the first `count` problems, taken from each task in turn where there are several."""
    tasks: dict[str, list[Problem]] = {}
    for problem in problems:
        tasks.setdefault(problem.task, []).append(problem)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*tasks.values()))
    return list(itertools.islice((problem for problem in turns if problem is not None), count))


def figures(groups: Groups) -> dict[str, float]:
    """Compute the `FIGURES` that exist: entropy in nats a token, lengths in tokens, shares. And "accuracy" (pass@1).

    Entropy is that of the distribution sampled from. Accuracy is over the responses known to be right or wrong, and is
    left out if there are none.
    """
    described = describe(groups)
    values = {name: described[name] for name in FIGURES if name in described}
    judged = correct(groups)
    decided = judged[~np.isnan(judged)]
    return {**values, "accuracy": float(decided.mean())} if decided.size else values


def prospects(groups: Groups) -> dict[str, Any]:
    """Measure the inputs of a forecast of offline training: rates [P], the share of right responses to each prompt.

    NaN for a prompt without a verdict. mixed: the share of prompts with right and wrong ones. And mean lengths in
    tokens, which decide costs: prompt, length, chosen and rejected (of right and of wrong responses, NaN without any).
    """
    judged = correct(groups)
    rates = row_means(judged)
    lengths = np.array([[len(row.rollout.token_ids) for row in group] for group in groups], np.float64)
    sides = {side: lengths[judged == right] for side, right in (("chosen", 1), ("rejected", 0))}
    return {
        "rates": rates.tolist(),
        "mixed": float(np.mean((rates > 0) & (rates < 1))),
        "prompt": float(np.mean([len(group[0].rollout.prompt_ids) for group in groups])),
        "length": float(lengths.mean()),
        **{side: float(values.mean()) if values.size else math.nan for side, values in sides.items()},
    }


def reference_logprobs(
    runtime: Runtime, groups: Groups, reference: Decoder, sampling: Sampling, tally: Cost
) -> list[list[np.ndarray]]:
    """Compute a reference's log-probabilities of every token of the groups' responses, at the sampling temperature.

    At temperature 0, which has no distribution, it is 1. Raises ValueError if compute.row_length is too short for a
    prompt and a response.
    """
    bare = [Group(g[0].rollout.prompt_ids, [Response(row.rollout.token_ids, {}) for row in g]) for g in groups]
    packed = _packed(runtime, bare, sampling)
    logprobs = runtime.score_logprobs(reference, packed, tally, sampling.temperature or 1.0)
    return [list(group) for group in packed.unpack(logprobs)]


def _packed(runtime: Runtime, groups: list[Group], sampling: Sampling) -> Packed:
    row_length = choose_row_length(runtime, runtime.config.data.max_prompt_length + sampling.max_new_tokens)
    return pack_rows(runtime, groups, row_length, sum(len(group.responses) for group in groups))


def divergence(groups: Groups, reference: Sequence[Sequence[np.ndarray]]) -> float:
    """Estimate KL(policy, reference) in nats: the mean over the sampled tokens of log-prob less reference log-prob.

    reference: [T] for every response of every group.
    """
    apart = [
        np.asarray(row.rollout.logprobs, np.float64) - logprobs
        for group, group_logprobs in zip(groups, reference, strict=True)
        for row, logprobs in zip(group, group_logprobs, strict=True)
    ]
    return float(np.concatenate(apart).mean())
