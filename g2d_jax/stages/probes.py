"""Probes of a policy while it is trained: fresh samples on the same prompts.

Offline data says nothing of the trained policy's own entropy and length (arXiv 2506.21495, section
4.2), and rollouts of a policy synchronised long ago say little: so every stage.probe.every updates
the policy itself is sampled. Probes change no update, and their cost is counted apart from the
stage's cost.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from g2d_jax.config import Offline, Online, Sampling
from g2d_jax.data.packing import Group, Response
from g2d_jax.models.decoder import Decoder
from g2d_jax.records import Problem, ScoredRollout, indices_by_task
from g2d_jax.rollouts.generate import (
    Groups,
    concat_rounds,
    correct,
    describe,
    draw_once,
    measured_once,
    rows_of,
    sampled_batches,
)
from g2d_jax.rollouts.programs import sampling_programs
from g2d_jax.rollouts.workload import Workload
from g2d_jax.session.cost import Cost
from g2d_jax.session.program import Program
from g2d_jax.session.row_shapes import RowShape, choose_row_length
from g2d_jax.session.session import Session
from g2d_jax.session.trainer import Trainer
from g2d_jax.session.training_programs import Scorer, reference_programs
from g2d_jax.stages import alerts

FIGURES = (
    "entropy",
    "reward",
    "reward_std",
    "completions/mean_length",
    "completions/mean_length_correct",
    "completions/mean_length_incorrect",
    "completions/clipped_ratio",
)
"""The metrics of `generate.describe` that a probe keeps."""

FLOAT32 = jnp.dtype(jnp.float32)

Reference = Callable[[], Decoder]
"""A function that gives the parameters of the policy that KL is measured to; called once a
probe."""


def probe(
    trainer: Trainer,
    stage: Online | Offline,
    reference: Reference | None = None,
    *,
    last: bool = False,
) -> None:
    """Sample the policy as it is now, if a probe is due at this step; measure, log, and warn of
    what has gone wrong.

    Due are step 0, every stage.probe.every updates, the stage's last step, and with `last` any
    step: a stage may end early. Call it outside of blocks whose cost is tracked. The random numbers
    are the same at each step. Logged with kind "probe": see `figures`; "kl_float32" where
    stage.probe asks for it; with a reference "kl" too, unless the sampling is greedy or filtered,
    since its log-probabilities are not the policy's then. A restart reads back the measurements,
    and their cost, from the stage's folder probe/.
    """
    every, step, state = stage.probe.every, trainer.step, trainer.extra_state
    due = every and (step % every == 0 or step == trainer.total or last)
    if not due or any(entry["step"] == step for entry in state.probes):
        return
    if reference is not None and not stage.probes_compare:
        trainer.session.say_once(
            f"{trainer.name}: its probes are drawn greedily or filtered, and have no kl: that "
            "compares whole distributions (a temperature above 0, top_p 1, top_k 0)"
        )
    measured, cost = _measured(trainer, stage, reference)
    values = {key: float(value) for key, value in measured.items()}
    state.probes.append({"step": step, **values})
    state.probe_cost.add(dataclasses.asdict(cost))
    trainer.session.tracker.log(trainer.name, step, values, kind="probe")
    alerts.watch(trainer, stage, values, kind="probe")


def workload_of(
    session: Session,
    name: str,
    stage: Online | Offline,
    steps: int = 0,
    response: int | None = None,
) -> Workload:
    """Compute the workload of the probes of a stage of so many steps. response: mean tokens, None:
    the most."""
    prompts = min(stage.probe.prompts, session.problems.counts[stage.probe.split])
    samples = stage.probe.num_generations
    params = stage.sampling_of_probes.params(session.sampling.stop_ids)
    shapes = session.sampling.shapes(stage, prompts, samples, params)
    probes = 1 + -(-steps // stage.probe.every)
    return Workload(
        params, samples, shapes, f"probe/{name}", "", prompts * probes, probes, response
    )


def programs(
    session: Session,
    name: str,
    stage: Online | Offline,
    steps: int,
    response: int | None,
    state: Any,
    reference: tuple[Any, ...] = (),
) -> Iterator[Program]:
    """Yield the programs of the stage's probes: before its first update, every so many, and after
    its last.

    reference: its arrays that stay on the devices, () where each probe makes it.
    """
    if not stage.probe.every:
        return
    workload = workload_of(session, name, stage, steps, response)
    yield from sampling_programs(
        session,
        name,
        workload,
        prefix="probe ",
        has_sampler_params=stage.probes_use_sampler_params,
        resident_during_view=(state.opt_state, *reference),
        resident_during_generation=(state, *reference),
    )
    if not (stage.probes_compare or stage.probe.float32):
        return
    prompt = np.zeros(session.config.data.max_prompt_length, np.int32)
    response_ids = np.zeros(workload.mean, np.int32)
    group = Group(prompt, [Response(response_ids)] * workload.num_generations)
    groups = [group] * int(workload.prompts / workload.calls)
    if stage.probes_compare:
        if not reference:
            yield from reference_programs(session, name, (state,), workload.calls)
        scorer = _scorer(session, groups, stage.sampling_of_probes)
        yield scorer.program(
            name, groups, workload.calls, (state,), reference=True, prefix="probe "
        )
    if stage.probe.float32:
        scorer = _scorer(session, groups, stage.sampling_of_probes, FLOAT32)
        resident = (state.opt_state, *reference)
        yield scorer.program(name, groups, workload.calls, resident, prefix="probe float32 ")


def _measured(
    trainer: Trainer, stage: Online | Offline, reference: Reference | None
) -> tuple[dict[str, Any], Cost]:
    """Measure the policy at this step: its metrics (see `figures`) and the cost."""
    session, name = trainer.session, trainer.name
    file = session.folders[name] / "probe" / f"step-{trainer.step:06d}"
    policy = trainer.finished_policy()
    draws = draw_once(probed(session.problems.by_split[stage.probe.split], stage.probe.prompts))

    def measure(cost: Cost) -> dict[str, Any]:
        sampled = sampled_batches(
            session,
            lambda: session.sampling.engine.to_sampler_params(policy),
            [(draws, file.with_suffix(".parquet"))],
            workload_of(session, name, stage),
            policy=f"{name}@{trainer.step}",
            cost=cost,
        )
        _, groups = concat_rounds(sampled)
        values = figures(groups)
        if reference is not None and stage.probes_compare:
            logprobs = reference_logprobs(
                session, groups, reference(), stage.sampling_of_probes, cost
            )
            values["kl"] = divergence(groups, logprobs)
        if stage.probe.float32:
            exact = reference_logprobs(
                session, groups, policy, stage.sampling_of_probes, cost, FLOAT32
            )
            values["kl_float32"] = divergence(groups, exact)
        return dict(values)

    return measured_once(session, file.with_suffix(".json"), measure)


def probed(problems: Sequence[Problem], count: int) -> list[Problem]:
    """Return the first `count` problems, taken from each task in turn where there are several."""
    turns = itertools.chain.from_iterable(
        itertools.zip_longest(*indices_by_task(problems).values())
    )
    return [problems[i] for i in turns if i is not None][:count]


def figures(groups: Groups) -> dict[str, float]:
    """Compute the `FIGURES` that exist: entropy in nats a token, lengths in tokens, shares. And
    "accuracy" (pass@1).

    Entropy is that of the distribution sampled from. Accuracy is over the responses known to be
    right or wrong, and is left out if there are none.
    """
    described = describe(groups)
    values = {name: described[name] for name in FIGURES if name in described}
    judged = correct(groups)
    decided = judged[~np.isnan(judged)]
    if decided.size:
        values["accuracy"] = float(decided.mean())
    return values


def reference_logprobs(
    session: Session,
    groups: Groups,
    reference: Decoder,
    sampling: Sampling,
    cost: Cost,
    dtype: jnp.dtype | None = None,
) -> list[list[np.ndarray]]:
    """Compute a reference's log-probabilities of every token of the groups' responses.

    They are at the sampling temperature, or at 1 for greedy sampling, which has no distribution.
    dtype: of activations, None: the run's. Raises ValueError if compute.row_length is too short for
    a prompt and a response.
    """
    bare = [Group(group[0].rollout.prompt_ids, list(map(_response, group))) for group in groups]
    return _scorer(session, bare, sampling, dtype)(reference, bare, cost)


def _response(row: ScoredRollout) -> Response:
    return Response(row.rollout.token_ids)


def _scorer(
    session: Session, groups: Sequence[Group], sampling: Sampling, dtype: jnp.dtype | None = None
) -> Scorer:
    """Return what scores the responses of a probe. dtype: of activations, None: the run's."""
    longest = session.config.data.max_prompt_length + sampling.max_new_tokens
    responses = sum(len(group.responses) for group in groups)
    rows = RowShape(choose_row_length(session, longest), responses)
    return Scorer(session, rows, sampling.temperature or 1.0, dtype)


def divergence(groups: Groups, reference: Sequence[Sequence[np.ndarray]]) -> float:
    """Estimate KL(policy, reference) in nats: the mean over the sampled tokens of log-prob less
    reference log-prob.

    reference: [T] for every response of every group.
    """
    own = [np.asarray(row.rollout.logprobs, np.float64) for row in rows_of(groups)]
    return float(
        (
            np.concatenate(own) - np.concatenate(list(itertools.chain.from_iterable(reference)))
        ).mean()
    )
