"""Online RL: rollout, score, group, loss, update; with a larger sync_every all that lies between it and offline.

The warm-up is this stage for K steps; so is full GRPO, and DPO on the policy's own rollouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from g2d_jax.config import Online
from g2d_jax.data.packing import Group, Response
from g2d_jax.models import lora
from g2d_jax.records import Problem, Rollout, Score, ScoredRollout, Verdict
from g2d_jax.rollouts import batches
from g2d_jax.rollouts.buffer import RolloutBuffer, TrainBatch, trains_off_policy
from g2d_jax.rollouts.external import ExternalBatches, external_batches
from g2d_jax.rollouts.generate import Groups, correct, describe, log_samples, rewards
from g2d_jax.rollouts.programs import rollouts
from g2d_jax.rollouts.workload import workload_of
from g2d_jax.session.problems import train_order
from g2d_jax.session.program import Program
from g2d_jax.session.row_shapes import RowShape, choose_row_length, pack_rows
from g2d_jax.session.session import Session, StopRun
from g2d_jax.session.trainer import Trainer, open_trainer
from g2d_jax.session.training_programs import (
    logprobs,
    reference_programs,
    reference_shapes,
    state_shapes,
    training_programs,
)
from g2d_jax.session.windows import window_at
from g2d_jax.stages import alerts, early_stopping, probes
from g2d_jax.training import objectives
from g2d_jax.training.objectives import Compute, Objective


def run(session: Session, name: str, stage: Online) -> dict[str, Any]:
    """Do stage.steps updates; return the manifest's fields."""
    external = external_batches(session, name, stage)
    objective, per = objective_of(session.compute, stage), "tokens" if stage.loss == "grpo" else "pairs"
    with open_trainer(
        session, name, stage, objective, total=stage.steps, per=per, rows=row_shape(session, stage)
    ) as trainer:
        buffer = RolloutBuffer(trainer, stage, external)
        problems = len(session.problems["train"])
        alerts.alarm(trainer, alerts.scarce("online", problems, stage.prompts_per_step, stage.steps))
        if external is not None:
            alerts.alarm(trainer, alerts.unweighed(external.without_logprobs, external.rows))
        alerts.alarm(trainer, positions_exceeded(session, stage, external))
        probe = partial(probes.probe, trainer, stage, buffer.fixed_reference if stage.compares else None)
        probe()
        ended = early_stopping.ends(trainer, stage)  # before this start, perhaps
        while trainer.goes_on() and not ended:
            window, generation = window_at(trainer.step, stage), dict[str, float]()
            if trainer.step == window.start:
                generation = buffer.generate_window(window)
                buffer.add_logprobs(window)
            with session.track_cost(trainer.cost):
                train_batch = buffer.next_batch(window)
                _check_signal(trainer, stage, train_batch)
                buffer.record_cost(train_batch)
                metrics = {**_describe(train_batch), **train_batch.batch.metrics, **generation}
                trainer.update(train_batch.batch.groups, metrics)
            alerts.watch(trainer, stage, metrics, kind="train")
            probe()
            ended = early_stopping.ends(trainer, stage)
            trainer.checkpoint_if_due()
            if trainer.step % max(stage.steps // 4, 1) == 0:
                log_samples(session, name, trainer.step, train_batch.draws, train_batch.groups)
        probe(last=True)
        alerts.conclude(trainer, stage)
        state = trainer.extra_state
        return {
            **trainer.finish({"steps": trainer.step, **buffer.summary()}),
            "at": state.costs,
            "generation": buffer.usage(),
            "stop": state.ended or {"rule": "steps"},
        }


def alerts_ahead(session: Session, name: str, stage: Online) -> list[alerts.Alert]:
    """Return what may be wrong with the settings, problems and dump. Raises ValueError as the run would for them."""
    row_shape(session, stage)
    problems = session.problems["train"]
    train_order(session.config, problems, name)
    external = external_batches(session, name, stage)
    unweighed = [] if external is None else alerts.unweighed(external.without_logprobs, external.rows)
    scarce = alerts.scarce("online", len(problems), stage.prompts_per_step, stage.steps)
    return [*unweighed, *scarce, *positions_exceeded(session, stage, external)]


def programs(session: Session, name: str, stage: Online, response: int | None = None) -> Iterator[Program]:
    """Yield the stage's programs in the order of their runs. response: mean tokens of a response, None: the most."""
    if not stage.steps:
        return
    config, sampling, rows = session.config, stage.sampling, row_shape(session, stage)
    bare, filled = (pack_rows(session, groups, rows) for groups in _longest_batch(session, stage))
    state = state_shapes(session, stage.optimizer, stage.steps)
    own, _ = lora.partition(reference_shapes(session))  # all policies of a run share the frozen parameters
    reference = (own,) if stage.compares and not stage.reference_sync else ()
    workload = workload_of(session, name, stage, response)
    if stage.rollouts == "sample":
        yield from rollouts(
            session, name, workload, beside=(state.opt_state, *reference), meanwhile=(state, *reference)
        )
    share = (session.mean_prompt + workload.mean) / (config.data.max_prompt_length + sampling.max_new_tokens)
    calls = stage.steps / stage.num_iterations * share
    if reference:
        yield from reference_programs(session, name, (state,))
        yield logprobs(session, name, bare, calls, (state,), reference=True)
    if stage.reference_sync or trains_off_policy(stage):
        yield logprobs(session, name, bare, calls, (state.opt_state, *reference))
    yield from probes.programs(session, name, stage, stage.steps, response, state, reference)
    objective = objective_of(session.compute, stage)
    yield from training_programs(
        session, name, stage.optimizer, stage.steps, objective, filled, stage.steps * share, resident=reference
    )


def _longest_batch(session: Session, stage: Online) -> tuple[list[Group], list[Group]]:
    """Make a batch by the stage's own code: prompts and responses of the greatest length, half of them right.

    Returned without and with the log-probabilities of other policies.
    """
    prompt, length = np.zeros(session.config.data.max_prompt_length, np.int32), stage.sampling.max_new_tokens
    tokens, floats = np.zeros(length, np.int32), np.zeros(length, np.float32)
    draws = [(Problem(str(i), "", "0"), 0) for i in range(stage.prompts_per_step)]

    def response(problem: Problem, i: int) -> ScoredRollout:
        right = i < (stage.num_generations + 1) // 2
        score = Score(float(right), Verdict.CORRECT if right else Verdict.INCORRECT)
        return ScoredRollout(Rollout(problem.id, 0, i, prompt, tokens, floats, floats, "stop"), str(i), score)

    groups = [[response(problem, i) for i in range(stage.num_generations)] for problem, _ in draws]
    loss_groups = batches.make(session.config.seed, stage, draws, groups, {"main": True}).groups
    count = sum(len(response.token_ids) for group in loss_groups for response in group.responses)
    others = np.zeros(count, np.float32)
    reference, trainer = (others if needed else None for needed in (stage.compares, trains_off_policy(stage)))
    return loss_groups, batches.fill(stage, loss_groups, reference, trainer)


def positions_exceeded(session: Session, stage: Online, external: ExternalBatches | None) -> list[alerts.Alert]:
    """Warn if a response of the stage, drawn or from a dump, can be longer than what the model is made for."""
    draws = external is None or stage.probe.every
    return alerts.check_positions(
        session, stage.sampling if draws else None, () if external is None else external.pairs
    )


def objective_of(compute: Compute, stage: Online) -> Objective:
    """Return the stage's loss."""
    ratios = ("epsilon", "epsilon_high", "importance_sampling_level", "importance_cap")
    settings = {name: getattr(stage, name) for name in (*ratios, "entropy_coef")}
    settings["cispo"] = stage.loss_type == "cispo"
    if stage.loss == "grpo":
        return objectives.grpo(compute, temperature=stage.sampling.temperature, beta=stage.beta, **settings)
    if stage.loss == "dpo":
        return objectives.dpo(compute, stage.dpo, entropy_coef=stage.entropy_coef)
    return objectives.group_dpo(compute, stage.dpo, grpo_coef=stage.grpo_coef, kl_beta=stage.beta, **settings)


def row_shape(session: Session, stage: Online) -> RowShape:
    """Choose packed rows for responses as long as can be, and for such of all lengths up to that.

    How long they will be is not known, and rows that fit the longest alone leave much empty behind shorter ones. With
    GroupDPO a row holds at least all responses of a prompt.
    """
    most, apart = stage.sampling.max_new_tokens, stage.loss == "grpo"
    samples = 2 if stage.loss == "dpo" else stage.num_generations
    max_responses = max(16, samples + samples % 2) if stage.loss == "group_dpo" else 16
    prompts = session.prompt_lengths[: min(stage.prompts_per_step, 32)]
    shares = np.arange(1, len(prompts) * samples + 1) * 0.618034 % 1  # evenly spread over what is below 1, in no order
    lengths = [np.full(shares.shape, most), np.maximum(np.ceil(shares * most), 1).astype(int)]
    batches = [
        [
            Group(np.zeros(prompt, np.int32), [Response(np.zeros(n, np.int32)) for n in sizes], keep_together=not apart)
            for prompt, sizes in zip(prompts, drawn.reshape(-1, samples), strict=True)
        ]
        for drawn in lengths
    ]
    longest = session.config.data.max_prompt_length + (1 if apart else samples) * most
    length = choose_row_length(session, longest, batches, max_responses_per_row=max_responses)
    most_rows = stage.prompts_per_step * (stage.num_generations if apart else 1)  # a response each, or all of a prompt
    return RowShape(length, most_rows, max_responses)


def _describe(train_batch: TrainBatch) -> dict[str, float]:
    """Compute metrics of what was drawn, of each task apart where there are several."""
    metrics = {**describe(train_batch.groups), "frac_signal": float(np.mean(train_batch.batch.has_advantage))}
    tasks = list(dict.fromkeys(problem.task for problem, _ in train_batch.draws))
    for task in tasks if len(tasks) > 1 else []:
        task_groups = [
            group
            for (problem, _), group in zip(train_batch.draws, train_batch.groups, strict=True)
            if problem.task == task
        ]
        metrics |= {f"tasks/{task}/{key}": value for key, value in describe(task_groups).items()}
    return metrics


def _check_signal(trainer: Trainer, stage: Online, train_batch: TrainBatch) -> None:
    """Raise StopRun when no group of many steps in a row taught anything; the policy so far is saved."""
    state, session, name = trainer.extra_state, trainer.session, trainer.name
    state.without_signal = 0 if train_batch.batch.has_advantage.any() else state.without_signal + 1
    if state.without_signal < stage.patience:
        return
    trainer.save_here()
    log_samples(session, name, trainer.step, train_batch.draws, train_batch.groups)
    raise StopRun(
        f"{name}: no reward signal for {state.without_signal} steps in a row; "
        f"{_cause(stage, train_batch.groups)}. Look at the completions in samples/. To try: {alerts.SIGNAL_ADVICE}. "
        f"The policy so far is kept, step {trainer.step} in {session.folders[name]}"
    )


def _cause(stage: Online, groups: Groups) -> str:
    values = rewards(groups)
    if np.isnan(values).all():
        return "no response could be scored"
    if stage.mask_truncated and all(row.rollout.stop_reason == "length" for group in groups for row in group):
        return "every response was cut at max_new_tokens, and mask_truncated leaves these out"
    if np.nan_to_num(correct(groups), nan=1.0).max() <= 0:
        return "every response was wrong"
    if np.all(np.nanmax(values, axis=1) == np.nanmin(values, axis=1)):
        return "the responses to each prompt all got the same reward"
    return "no prompt had responses to tell apart: one right and one wrong, both of them counted in the loss"
