"""Online RL: rollout, score, group, loss, update; with a larger sync_every all that lies between it and offline.

The warm-up is this stage for K steps; so is full GRPO, and DPO on the policy's own rollouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from g2d_jax.config import Config, Online
from g2d_jax.data.packing import Group, Response
from g2d_jax.models import lora
from g2d_jax.records import Problem, Rollout, Score, ScoredRollout, Verdict
from g2d_jax.stages import alerts, batches, early_stopping, probes
from g2d_jax.stages.buffer import (
    RolloutBuffer,
    TrainBatch,
    asked_of,
    logprobs_temperature,
    trains_off_policy,
)
from g2d_jax.stages.programs.program import Program
from g2d_jax.stages.programs.sampling import rollouts
from g2d_jax.stages.programs.training import (
    logprobs,
    params_and_state,
    reference_programs,
    reference_shapes,
    training_programs,
)
from g2d_jax.stages.rollouts import Groups, correct, describe, rewards, sample_rows
from g2d_jax.stages.rows import choose_row_length, pack_rows
from g2d_jax.stages.runtime import Runtime, StopRun
from g2d_jax.stages.trainer import Trainer, open_trainer
from g2d_jax.training import objectives
from g2d_jax.training.objectives import Compute, Objective


def run(runtime: Runtime, name: str, stage: Online) -> dict[str, Any]:
    """Do stage.steps updates; return the manifest's fields."""
    early_stopping.check_problems(runtime, stage)
    with open_trainer(
        runtime,
        name,
        objective_of(runtime.compute, stage),
        stage.optimizer,
        policy=stage.policy,
        total=stage.steps,
        row_length=row_length(runtime, stage),
        per="tokens" if stage.loss == "grpo" else "pairs",
        pinned=stage.keep,
        places=places(stage),
        most_rows=most_rows(stage),
    ) as trainer:
        buffer = RolloutBuffer(runtime, name, stage, trainer)
        reference = buffer.fixed_reference if stage.compares else None
        problems = len(runtime.problems["train"])
        alerts.alarm(runtime, name, trainer, alerts.scarce("online", problems, stage.prompts_per_step, stage.steps))
        probe = partial(probes.probe, runtime, name, stage, trainer, reference=reference)
        probe()
        ended = early_stopping.ends(runtime, name, stage, trainer)  # by the probe just made, where one was interrupted
        while trainer.goes_on() and not ended:
            generation = buffer.generate_window()
            with runtime.track_cost(trainer.tally):
                train_batch = buffer.next_batch()
                _watch_signal(runtime, name, stage, trainer, train_batch)
                buffer.record_cost(train_batch)
                metrics = {**_describe(train_batch), **train_batch.batch.metrics, **generation}
                trainer.update(train_batch.batch.groups, metrics)
            alerts.watch(runtime, name, stage, trainer, metrics)
            probe()
            ended = early_stopping.ends(runtime, name, stage, trainer)
            if ended:
                trainer.save_here()
            else:
                trainer.checkpoint_if_due()
            if trainer.step % max(stage.steps // 4, 1) == 0:
                rows = sample_rows(train_batch.draws, train_batch.groups, runtime.config.logging.samples)
                runtime.tracker.samples(name, trainer.step, rows)
        probe(last=True)
        alerts.conclude(runtime, name, stage, trainer)
        trainer.end()
        return {
            **trainer.tally.manifest(),
            "counts": {"steps": trainer.step, **buffer.summary(), **trainer.skips.manifest()},
            "at": trainer.extra_state["at"],
            "generation": buffer.generation(),
            **early_stopping.evidence(trainer),
            **probes.evidence(trainer),
            **alerts.evidence(trainer),
        }


def programs(runtime: Runtime, name: str, stage: Online, response: int | None = None) -> Iterator[Program]:
    """Yield the stage's programs in the order of their runs. response: mean tokens of a response, None: the most."""
    if not stage.steps:
        return
    config, sampling = runtime.config, stage.sampling
    columns, rows = row_length(runtime, stage), most_rows(stage)
    bare, filled = (
        pack_rows(runtime, groups, columns, rows, places=places(stage)) for groups in _longest_batch(runtime, stage)
    )
    params, state = params_and_state(runtime, stage.optimizer, stage.steps)
    own, _ = lora.partition(reference_shapes(runtime))  # all policies of a run share the frozen parameters
    reference = (own,) if stage.compares and not stage.reference_sync else ()
    workload = asked_of(runtime, stage, response)
    yield from rollouts(
        runtime, name, workload, params, beside=(state.opt_state, *reference), meanwhile=(state, *reference)
    )
    share = (runtime.mean_prompt + workload.mean) / (config.data.max_prompt_length + sampling.max_new_tokens)
    calls, temperature = stage.steps / stage.num_iterations * share, logprobs_temperature(stage)
    if reference:
        yield from reference_programs(runtime, name, (state,))
        yield logprobs(runtime, name, bare, calls, (state,), temperature, reference=True)
    if stage.reference_sync or trains_off_policy(stage):
        yield logprobs(runtime, name, bare, calls, (state.opt_state, *reference), temperature)
    viewed = not stage.sampling_weights  # probes are of the policy as it is
    yield from probes.programs(
        runtime,
        name,
        stage,
        stage.steps,
        response,
        params,
        state,
        compared=stage.compares,
        reference=reference,
        viewed=viewed,
    )
    objective = objective_of(runtime.compute, stage)
    yield from training_programs(
        runtime, name, stage.optimizer, stage.steps, objective, filled, stage.steps * share, resident=reference
    )


def _longest_batch(runtime: Runtime, stage: Online) -> tuple[list[Group], list[Group]]:
    """Make a batch by the stage's own code: prompts and responses of the greatest length, half of them right.

    Returned without and with the log-probabilities of other policies.
    """
    prompt, length = np.zeros(runtime.config.data.max_prompt_length, np.int32), stage.sampling.max_new_tokens
    tokens, floats = np.zeros(length, np.int32), np.zeros(length, np.float32)
    draws = [(Problem(str(i), "", "0"), 0) for i in range(stage.prompts_per_step)]

    def response(problem: Problem, i: int) -> ScoredRollout:
        right = i < (stage.num_generations + 1) // 2
        score = Score(float(right), Verdict.CORRECT if right else Verdict.INCORRECT)
        return ScoredRollout(Rollout(problem.id, 0, i, prompt, tokens, floats, floats, "stop"), str(i), score)

    groups = [[response(problem, i) for i in range(stage.num_generations)] for problem, _ in draws]
    loss_groups = batches.make(runtime.config.seed, stage, draws, groups, {"main": False}).groups
    count = sum(len(response.token_ids) for group in loss_groups for response in group.responses)
    others = np.zeros(count, np.float32)
    reference, trainer = (others if needed else None for needed in (stage.compares, trains_off_policy(stage)))
    return loss_groups, batches.fill(stage, loss_groups, reference, trainer)


def objective_of(compute: Compute, stage: Online) -> Objective:
    """Return the stage's loss."""
    ratios = ("epsilon", "epsilon_high", "importance_sampling_level", "importance_cap")
    settings = {name: getattr(stage, name) for name in (*ratios, "entropy_coef")}
    dpo = stage.dpo.to_dict()
    del dpo["normalizer"]  # the weights contain it
    if stage.loss == "grpo":
        return objectives.grpo(compute, temperature=stage.sampling.temperature, beta=stage.beta, **settings)
    if stage.loss == "dpo":
        return objectives.dpo(compute, **dpo, entropy_coef=stage.entropy_coef)
    return objectives.group_dpo(compute, **dpo, grpo_coef=stage.grpo_coef, kl_beta=stage.beta, **settings)


def longest(config: Config, stage: Online) -> int:
    """Count the tokens of the longest group in one row: a response, a pair, or all responses, behind a prompt."""
    together = {"grpo": 1, "dpo": 2, "group_dpo": stage.num_generations}[stage.loss]
    return config.data.max_prompt_length + together * stage.sampling.max_new_tokens


def row_length(runtime: Runtime, stage: Online) -> int:
    """Choose the columns of a packed row for responses as long as can be, and for such of all lengths up to that.

    How long they will be is not known, and rows that fit the longest alone leave much empty behind shorter ones.
    """
    most, whole = stage.sampling.max_new_tokens, stage.loss != "grpo"
    together = 2 if stage.loss == "dpo" else stage.num_generations
    prompts = runtime.prompt_lengths[: min(stage.prompts_per_step, 32)]
    shares = np.arange(1, len(prompts) * together + 1) * 0.618034 % 1  # evenly spread over what is below 1, in no order
    lengths = [np.full(shares.shape, most), np.maximum(np.ceil(shares * most), 1).astype(int)]
    batches = [
        [
            Group(np.zeros(prompt, np.int32), [Response(np.zeros(n, np.int32)) for n in sizes], whole)
            for prompt, sizes in zip(prompts, drawn.reshape(-1, together), strict=True)
        ]
        for drawn in lengths
    ]
    return choose_row_length(runtime, longest(runtime.config, stage), batches, places=places(stage))


def most_rows(stage: Online) -> int:
    """Count the packed rows that a batch takes at most: one a response, or one for all of a prompt kept together."""
    return stage.prompts_per_step * (stage.num_generations if stage.loss == "grpo" else 1)


def places(stage: Online) -> int:
    """Count the responses that a packed row can hold: with GroupDPO at least all of a prompt."""
    return max(16, stage.num_generations + stage.num_generations % 2) if stage.loss == "group_dpo" else 16


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


def _watch_signal(runtime: Runtime, name: str, stage: Online, trainer: Trainer, train_batch: TrainBatch) -> None:
    """Stop when no group of many steps in a row taught anything; the policy so far is saved."""
    trainer.extra_state["barren"] = (
        0 if train_batch.batch.has_advantage.any() else trainer.extra_state.get("barren", 0) + 1
    )
    if trainer.extra_state["barren"] < stage.patience:
        return
    trainer.save_here()
    rows = sample_rows(train_batch.draws, train_batch.groups, runtime.config.logging.samples)
    runtime.tracker.samples(name, trainer.step, rows)
    raise StopRun(
        f"{name}: no reward signal for {trainer.extra_state['barren']} steps in a row; "
        f"{_cause(stage, train_batch.groups)}. Look at the completions in samples/. To try: {alerts.SIGNAL_ADVICE}. "
        f"The policy so far is kept, step {trainer.step} in {runtime.folders[name]}"
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
