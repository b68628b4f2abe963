"""The training batch of an online stage: responses with advantages, or with a pair's sides.

    groups ─► those with a signal ─► GRPO: advantages | RAFT: right responses
                                     | DPO: one pair a prompt | GroupDPO: both sides of a prompt

A batch's groups have all inputs of the loss except for other policies' log-probabilities, which
`fill` adds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, assert_never

import numpy as np

from g2d_jax.config import Online
from g2d_jax.data.packing import Group, Response
from g2d_jax.data.preferences import is_correct, pairs_of
from g2d_jax.losses import (
    dpo_weights,
    group_advantages,
    group_dpo_weights,
    raft_weights,
    token_weights,
)
from g2d_jax.records import Problem, ScoredRollout, exceeds, indices_by_task, pick
from g2d_jax.rollouts.groups import Draws, Groups, by_response, lengths, problems_of, rewards

# indices of a group's chosen and rejected responses
Sides = tuple[list[int], list[int]]
NO_PAIR: Sides = ([], [])


@dataclass(frozen=True)
class Batch:
    """The responses to train on.

    groups: for the loss, never empty. has_signal: bool for each sampled prompt. metrics: of the
    pairs.
    """

    groups: list[Group]
    has_signal: np.ndarray
    metrics: dict[str, float] = field(default_factory=dict)


def make(
    seed: int, stage: Online, draws: Draws, groups: Groups, verifiable: Mapping[str, bool]
) -> Batch:
    """Build an update's batch from all rollouts sampled for it. verifiable: by task.

    A prompt has a signal if it has a pair; with GRPO, two different rewards (`records.differ`);
    with RAFT, a correct response. stage.filter.dynamic_sampling keeps up to prompts_per_step
    prompts with a signal, or the first prompts if none has one. Raises AssertionError for an
    unknown loss.
    """
    signal = np.zeros(len(groups), bool)
    pairs = [NO_PAIR] * len(groups)
    if stage.has_ratio:
        apart = advantages(stage, draws, groups) != 0
        signal |= (apart & _counted(stage, groups)).any(axis=1)
    if stage.is_preference_loss:
        for i, (draw, group) in enumerate(zip(draws, groups, strict=True)):
            pairs[i] = _sides(seed, stage, draw, group, verifiable)
            signal[i] |= bool(pairs[i][0])
    if stage.loss == "raft":
        signal |= _kept(stage, draws, groups, verifiable).any(axis=1)
    rows = np.arange(len(groups))
    if stage.filter.dynamic_sampling:
        rows = (rows[signal] if signal.any() else rows)[: stage.prompts_per_step]
    draws = pick(draws, rows)
    trained = pick(groups, rows)
    sides = pick(pairs, rows)
    match stage.loss:
        case "grpo":
            return Batch(_grpo(stage, draws, trained), signal)
        case "raft":
            kept = _kept(stage, draws, trained, verifiable)
            return Batch(_raft(stage, trained, kept), signal)
        case "dpo":
            loss_groups = _dpo(stage, trained, sides)
        case "group_dpo":
            loss_groups = _group_dpo(stage, draws, trained, sides)
        case _:
            assert_never(stage.loss)
    metrics = {"pairs/skipped": float(pairs.count(NO_PAIR)), **_describe(trained, sides)}
    return Batch(_with_entropy(stage, loss_groups), signal, metrics)


def _describe(groups: Groups, sides: Sequence[Sides]) -> dict[str, float]:
    """Count the prompts with a pair, and average the lengths of both sides over prompts."""
    paired = [(group, side) for group, side in zip(groups, sides, strict=True) if side != NO_PAIR]
    metrics = {"pairs/prompts": float(len(paired))}
    if not paired:
        return metrics
    for which, name in enumerate(("chosen", "rejected")):
        means = [_mean_length(group, side[which]) for group, side in paired]
        metrics[f"pairs/{name}_length"] = float(np.mean(means))
    return metrics


def _mean_length(group: Sequence[ScoredRollout], indices: Sequence[int]) -> float:
    return float(np.mean([group[i].rollout.length for i in indices]))


def advantages(stage: Online, draws: Draws, groups: Groups) -> np.ndarray:
    """Compute advantages, float32 [N, G]; each task's rewards are normalised separately."""
    values = rewards(groups)
    normalised = np.zeros(values.shape, np.float32)
    for rows in indices_by_task(problems_of(draws)).values():
        normalised[rows] = group_advantages(
            values[rows], stage.scale_rewards, stage.scale_rewards_eps
        )
    return normalised


def _counted(stage: Online, groups: Groups) -> np.ndarray:
    """Mark the responses that count, bool [N, G]: False if stage.mask_truncated excludes one from
    the loss."""
    cut = by_response(groups, lambda row: row.rollout.stop_reason == "length")
    return ~(cut & stage.mask_truncated)


def _grpo(stage: Online, draws: Draws, groups: Groups) -> list[Group]:
    """Build GRPO's groups from responses with a gradient; others skip the forward pass."""
    tokens = _grpo_tokens(stage, draws, groups)
    # KL and entropy terms have a gradient at advantage 0 too
    always = stage.beta or stage.entropy_coef
    loss_groups = []
    for group, group_tokens in zip(groups, tokens, strict=True):
        responses = []
        for row, token in zip(group, group_tokens, strict=True):
            if token["weight"] and (always or token["advantage"]):
                responses.append(_response(row, token, {}))
        if responses:
            loss_groups.append(_group(group, responses))
    if not loss_groups:
        loss_groups = [_group(groups[0], [_without_gradient(groups, tokens[0][0], {})])]
    return _with_entropy(stage, loss_groups)


def _kept(
    stage: Online, draws: Draws, groups: Groups, verifiable: Mapping[str, bool]
) -> np.ndarray:
    """Mark the responses that RAFT trains on, bool [N, G]: the correct ones, or those with the
    highest reward if the reward is not verifiable."""
    kept = np.zeros((len(groups), len(groups[0])), bool)
    values = rewards(groups)
    for i, (problem, _) in enumerate(draws):
        if verifiable[problem.task]:
            kept[i] = is_correct(groups[i]) == 1
        elif not np.isnan(values[i]).all():
            kept[i] = ~np.isnan(values[i]) & ~exceeds(np.nanmax(values[i]), values[i])
    return kept & _counted(stage, groups)


def _raft(stage: Online, groups: Groups, kept: np.ndarray) -> list[Group]:
    """Build RAFT's groups. kept: bool [N, G]."""
    weights = raft_weights(lengths(groups).ravel(), kept.ravel()).reshape(kept.shape)
    loss_groups = []
    for group, own in zip(groups, weights, strict=True):
        responses = []
        for row, weight in zip(group, own, strict=True):
            if weight:
                responses.append(_response(row, {"weight": float(weight)}, {}))
        if responses:
            loss_groups.append(_group(group, responses))
    if not loss_groups:
        loss_groups = [_group(groups[0], [_response(groups[0][0], {"weight": 0.0}, {})])]
    return _with_entropy(stage, loss_groups)


def _without_gradient(
    groups: Groups, token: Mapping[str, Any], sequence: Mapping[str, float]
) -> Response:
    """Build the only response of a batch without a signal, which still is a step of the
    schedule."""
    if token:
        token = {**token, "weight": 0.0, "advantage": 0.0}
    return _response(groups[0][0], token, sequence)


def _response(
    row: ScoredRollout, token: Mapping[str, Any], sequence: Mapping[str, float]
) -> Response:
    """Build the response of a rollout."""
    return Response(row.rollout.token_ids, token, sequence)


def _group(
    rows: Sequence[ScoredRollout], responses: list[Response], keep_together: bool = False
) -> Group:
    """Build a group of responses to the prompt of these rows."""
    return Group(rows[0].rollout.prompt_ids, responses, keep_together)


def _grpo_tokens(stage: Online, draws: Draws, groups: Groups) -> list[list[dict[str, Any]]]:
    """Return GRPO's inputs for each response's tokens, normalised by all responses of a full
    batch."""
    values = advantages(stage, draws, groups)
    has_logprobs = stage.samples or stage.clip.importance_cap  # a dump may lack them
    prompts = _prompts(stage, groups)
    absent = (prompts - len(groups)) * values.shape[1]
    weights = token_weights(
        stage.loss_type,
        np.pad(lengths(groups).ravel(), (0, absent)),
        num_prompts=prompts,
        max_completion_length=stage.sampling.max_new_tokens,
        mask=np.pad(_counted(stage, groups).ravel(), (0, absent)),
    )[: values.size].reshape(values.shape)

    def inputs(row: ScoredRollout, weight: float, advantage: float) -> dict[str, Any]:
        token: dict[str, Any] = {"weight": float(weight), "advantage": float(advantage)}
        if has_logprobs:
            token["sampler_logprob"] = row.rollout.logprobs
        return token

    return [list(map(inputs, *columns)) for columns in zip(groups, weights, values, strict=True)]


def _sides(
    seed: int,
    stage: Online,
    draw: tuple[Problem, int],
    group: Sequence[ScoredRollout],
    verifiable: Mapping[str, bool],
) -> Sides:
    """Select a prompt's chosen and rejected responses; both lists are empty if there is no pair.

    GroupDPO uses all correct and all incorrect ones, or best and worst if the reward is not
    verifiable.
    """
    problem, visit = draw
    counted = np.flatnonzero(_counted(stage, [list(group)])[0])
    usable = pick(group, counted)
    if stage.loss == "group_dpo" and verifiable[problem.task]:
        correct = is_correct(usable)
        chosen = counted[correct == 1].tolist()
        rejected = counted[correct == 0].tolist()
        return (chosen, rejected) if chosen and rejected else NO_PAIR
    pairs = pairs_of(seed, problem.id, visit, usable, 1, verifiable=verifiable[problem.task])
    chosen, rejected = [], []
    for i, j in pairs:
        chosen.append(int(counted[i]))
        rejected.append(int(counted[j]))
    return chosen, rejected


def _prompts(stage: Online, groups: Groups) -> int:
    """Count the prompts of a full batch; dynamic sampling may leave fewer."""
    return max(len(groups), stage.prompts_per_step)


def _normalizer(stage: Online, groups: Groups) -> int | None:
    """Return DPO's divisor; None for the number of prompts with a pair."""
    return _prompts(stage, groups) if stage.dpo.normalizer == "prompts" else None


def _dpo(stage: Online, groups: Groups, sides: Sequence[Sides]) -> list[Group]:
    """Build groups of one pair per prompt; the loss is the mean over pairs or prompts."""
    pairs = [(group[c[0]], group[r[0]]) for group, (c, r) in zip(groups, sides, strict=True) if c]
    if pairs:
        weights = dpo_weights(len(pairs), _normalizer(stage, groups))
        return [as_pair(*pair, float(weight)) for pair, weight in zip(pairs, weights, strict=True)]
    # a batch without a signal still is a step of the schedule
    return [as_pair(groups[0][0], groups[0][0], 0.0)]


def as_pair(chosen: ScoredRollout, rejected: ScoredRollout, weight: float) -> Group:
    """Put both sides in one row, after one copy of their prompt."""
    rows = (chosen, rejected)
    responses = [_response(row, {}, {"weight": weight}) for row in rows]
    return _group(rows, responses, keep_together=True)


def _group_dpo(stage: Online, draws: Draws, groups: Groups, sides: Sequence[Sides]) -> list[Group]:
    """Put a prompt's selected responses in one row; the loss averages over a prompt's pairs, then
    over prompts."""
    correct = [len(chosen) for chosen, _ in sides]
    incorrect = [len(rejected) for _, rejected in sides]
    weights = group_dpo_weights(correct, incorrect, _normalizer(stage, groups))
    tokens: list[list[dict[str, Any]]] = [[{}] * len(group) for group in groups]
    if stage.grpo_coef:
        tokens = _grpo_tokens(stage, draws, groups)
    always = stage.beta or stage.entropy_coef
    loss_groups = []
    for number, (group, (chosen, rejected)) in enumerate(zip(groups, sides, strict=True)):
        responses = []
        for i, row in enumerate(group):
            side = float(i in chosen) - float(i in rejected)
            token = tokens[number][i]
            if side or (token.get("weight") and (always or token["advantage"])):
                weight = abs(side) * float(weights[number])
                sequence = {"side": side, "prompt": float(number), "pair_weight": weight}
                responses.append(_response(row, token, sequence))
        if responses:
            loss_groups.append(_group(group, responses, keep_together=True))
    if loss_groups:
        return loss_groups
    nothing = _without_gradient(
        groups, tokens[0][0], dict.fromkeys(("side", "prompt", "pair_weight"), 0.0)
    )
    return [_group(groups[0], [nothing], keep_together=True)]


def _with_entropy(stage: Online, groups: list[Group]) -> list[Group]:
    """Add each token's weight in the mean entropy; it is 0 in a response without weight."""
    if not stage.entropy_coef:
        return groups
    count = 0
    for group in groups:
        for response in filter(_weighs, group.responses):
            count += len(response.token_ids)

    def weighed(response: Response) -> Response:
        weight = 1.0 / count if _weighs(response) else 0.0
        return replace(response, token={**response.token, "entropy_weight": weight})

    return [replace(group, responses=list(map(weighed, group.responses))) for group in groups]


def _weighs(response: Response) -> bool:
    """Return whether a response has a weight in GRPO's, DPO's or GroupDPO's loss."""
    return any(
        (
            response.token.get("weight"),
            response.sequence.get("weight"),
            response.sequence.get("pair_weight"),
        )
    )


def fill(
    stage: Online,
    groups: list[Group],
    reference: np.ndarray | None = None,
    trainer: np.ndarray | None = None,
) -> list[Group]:
    """Add the log-probabilities of the reference and of the policy that sampled, as computed by the
    trainer.

    reference, trainer: float32 [tokens], of all responses concatenated, or None if not needed.
    """
    filled = []
    first = 0
    for group in groups:
        responses = []
        for response in group.responses:
            token, sequence = dict(response.token), dict(response.sequence)
            span = slice(first, first + len(response.token_ids))
            first = span.stop
            if trainer is not None:
                token["old_logprob"] = trainer[span]
            if reference is not None and stage.is_preference_loss:
                sequence["reference"] = float(reference[span].sum(dtype=np.float32))
            if reference is not None and stage.beta:
                token["ref_logprob"] = reference[span]
            responses.append(replace(response, token=token, sequence=sequence))
        filled.append(replace(group, responses=responses))
    return filled
