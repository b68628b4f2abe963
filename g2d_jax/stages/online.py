"""Online RL: rollout, score, group, loss, update. The warm-up is this stage for K steps; so is full GRPO."""

from __future__ import annotations

from typing import Any

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from g2d_jax.data.loader import Order, draw
from g2d_jax.data.packing import Group, Response
from g2d_jax.losses import group_advantages, token_weights
from g2d_jax.models.decoder import Decoder
from g2d_jax.models.flops import attended, forward_flops
from g2d_jax.records import Problem
from g2d_jax.stages import ending
from g2d_jax.stages.context import Context, StopRun, Tally
from g2d_jax.stages.rollouts import Groups, describe, rewards, sample_rows, sampled_groups
from g2d_jax.stages.training import Trainer, trainer
from g2d_jax.training import objectives
from g2d_jax.training.step import make_scorer, put_batch

Draws = list[tuple[Problem, int]]


def journal_of(folder: epath.Path, step: int) -> epath.Path:
    """Where the rollouts of a step (counted from 0) lie."""
    return folder / "rollouts" / f"step-{step:06d}.parquet"


def draws_of(context: Context, order: Order, step: int, prompts: int) -> Draws:
    """The training problems of a step, with their visits."""
    train = context.problems["train"]
    return [(train[index], visit) for index, visit in draw(order, step * prompts, prompts)]


def run(context: Context, name: str, stage: ConfigDict) -> dict[str, Any]:
    """stage.steps updates of GRPO (paper 2, equation 1, by default); returns the manifest's fields."""
    check(stage)
    order = context.order(len(context.problems["train"]), f"online/{name}")
    params = context.sampling_params(stage.sampling)
    objective = objectives.grpo(
        context.compute,
        temperature=stage.sampling.temperature,
        epsilon=stage.epsilon,
        epsilon_high=stage.epsilon_high,
        beta=stage.beta,
    )
    reference = context.policy(stage.policy) if stage.beta else None
    longest = context.config.data.max_prompt_length + stage.sampling.max_new_tokens
    sampler, folder = context.sampler(), context.folders[name]
    with trainer(
        context,
        name,
        objective,
        stage.optimizer,
        policy=stage.policy,
        total=stage.steps,
        row_length=context.row_length(longest),
        per="tokens",
        pinned=stage.keep,
    ) as training:
        while training.step < stage.steps and not ending.ended(training):
            with context.metered(training.tally):
                draws = draws_of(context, order, training.step, stage.prompts_per_step)
                groups = sampled_groups(
                    context,
                    sampler.view(training.state.params),
                    draws,
                    params,
                    num_generations=stage.num_generations,
                    purpose=f"online/{name}",
                    policy=f"{name}@{training.step}",
                    journal=journal_of(folder, training.step),
                    tally=training.tally,
                )
                count_rollouts(context, training.tally, groups)
                _watch_signal(context, name, stage, training, draws, groups)
                packed = training_groups(groups, stage)
                if reference is not None:
                    packed = with_reference(context, training, reference, packed, stage.sampling.temperature)
                metrics = describe(groups)
                training.update(packed, metrics)
            if ending.ends(context, name, stage, training, groups):
                training.save_here()
            else:
                training.checkpoint_if_due()
            if training.step % max(stage.steps // 4, 1) == 0:
                rows = sample_rows(draws, groups, context.config.logging.samples)
                context.tracker.samples(name, training.step, rows)
        training.flush()
        counts = {"steps": training.step, **_census(context, stage, training.step)}
        return {**training.tally.manifest(), "counts": counts, "at": training.facts["at"], **ending.evidence(training)}


def check(stage: ConfigDict) -> None:
    """Raise ValueError for settings that cannot work, before any work."""
    if stage.sampling.temperature <= 0 or stage.sampling.top_p < 1 or stage.sampling.top_k > 0:
        raise ValueError(
            "an online stage needs sampling.temperature > 0, top_p 1 and top_k 0: the loss compares the trained policy "
            "with the distribution that was sampled from, which filters would change"
        )
    if stage.num_generations < 2:
        raise ValueError("an online stage needs num_generations of at least 2: advantages compare responses of a group")
    ending.check(stage)
    token_weights(stage.loss_type, [1], num_prompts=1, max_completion_length=1)  # these two raise for unknown names
    group_advantages(np.array([[0.0, 1.0]]), stage.scale_rewards)
    if stage.beta < 0 or stage.prompts_per_step < 1 or stage.steps < 0:
        raise ValueError("beta and steps must not be negative, prompts_per_step must be at least 1")


def _census(context: Context, stage: ConfigDict, steps: int) -> dict[str, int]:
    return {
        "rollouts": steps * stage.prompts_per_step * stage.num_generations,
        "train_problems": len(context.problems["train"]),
    }


def count_rollouts(context: Context, tally: Tally, groups: Groups) -> None:
    """Add the tokens and FLOPs of generating these groups: each prompt once, each response token once.

    From the rollouts, not from the sampler: those read back from a journal after a restart count too.
    """
    config = context.model_config
    for group in groups:
        prompt = len(group[0].rollout.prompt_ids)
        tally.prefilled += prompt
        tally.flops += forward_flops(config, prompt, attended(prompt))
        for row in group:
            length = len(row.rollout.token_ids)
            tally.generated += length
            tally.flops += forward_flops(config, length, attended(length, before=prompt))


def _watch_signal(
    context: Context, name: str, stage: ConfigDict, training: Trainer, draws: Draws, groups: Groups
) -> None:
    """Stop when no group of many steps in a row had two different rewards; the policy so far is saved."""
    advantages = group_advantages(rewards(groups))
    training.facts["barren"] = 0 if np.any(advantages) else training.facts.get("barren", 0) + 1
    if training.facts["barren"] < stage.patience:
        return
    training.save_here()
    context.tracker.samples(name, training.step, sample_rows(draws, groups, context.config.logging.samples))
    raise StopRun(
        f"{name}: no reward signal for {training.facts['barren']} steps in a row; {_cause(rewards(groups))}. Look at "
        "the completions in samples/, then try easier problems, a better starting policy, a longer max_new_tokens or "
        f"another prompt template; the policy so far is kept, step {training.step} in {context.folders[name]}"
    )


def _cause(values: np.ndarray) -> str:
    known = values[~np.isnan(values)]
    if known.size == 0:
        return "no response could be scored"
    return "every response was wrong" if known.max() <= 0 else "the responses to each prompt all got the same reward"


def training_groups(groups: Groups, stage: ConfigDict) -> list[Group]:
    """Responses with their advantages and weights; normalisers count every response of the step.

    Without a KL term a response of advantage 0 has no gradient, so it is not run through the model.
    """
    advantages = group_advantages(rewards(groups), stage.scale_rewards)
    lengths = [len(row.rollout.token_ids) for group in groups for row in group]
    weights = token_weights(
        stage.loss_type, lengths, num_prompts=len(groups), max_completion_length=stage.sampling.max_new_tokens
    ).reshape(advantages.shape)
    made = []
    for i, group in enumerate(groups):
        responses = [
            Response(
                row.rollout.token_ids,
                {"weight": weights[i, j], "advantage": advantages[i, j], "old_logprob": row.rollout.logprobs},
            )
            for j, row in enumerate(group)
            if stage.beta or advantages[i, j] != 0
        ]
        if responses:
            made.append(Group(group[0].rollout.prompt_ids, responses))
    return made or [_nothing(groups)]


def _nothing(groups: Groups) -> Group:
    """A batch without any signal still is a step of the schedule: one response of weight 0."""
    row = groups[0][0].rollout
    zeros = np.zeros(len(row.token_ids), np.float32)
    return Group(row.prompt_ids, [Response(row.token_ids, {"weight": zeros, "advantage": zeros, "old_logprob": zeros})])


def with_reference(
    context: Context, training: Trainer, reference: Decoder, groups: list[Group], temperature: float
) -> list[Group]:
    """Add the reference's log-probabilities to every response."""
    packed = training.pack(groups)
    score = make_scorer_once(context)
    logprobs, _ = score(reference, *put_batch(packed, context.mesh), temperature=float(temperature))
    training.tally.scored += packed.used
    training.tally.flops += forward_flops(context.model_config, packed.used, packed.attended)
    found = packed.unpack(np.asarray(logprobs))
    return [
        Group(
            g.prompt_ids,
            [Response(r.token_ids, {**r.token, "ref_logprob": x}) for r, x in zip(g.responses, xs, strict=True)],
        )
        for g, xs in zip(groups, found, strict=True)
    ]


def make_scorer_once(context: Context) -> Any:
    """The scoring program, compiled once for the run."""
    if "score" not in context.programs:
        context.programs["score"] = make_scorer(context.compute)
    return context.programs["score"]
