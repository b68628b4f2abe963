"""From the groups of one batch to what an online stage trains on: responses with advantages, or with a pair's sides.

    groups ─► those with a signal ─► GRPO: advantages | DPO: one pair a prompt | GroupDPO: both sides of a prompt

A batch's groups carry all that the loss needs but for other policies' log-probabilities, which `fill` adds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from g2d_jax.config import Online
from g2d_jax.data.packing import Group, Response
from g2d_jax.data.preferences import pairs_of, right
from g2d_jax.losses import (
    dpo_weights,
    group_advantages,
    group_dpo_weights,
    overlong_penalty,
    token_weights,
)
from g2d_jax.records import Problem, ScoredRollout
from g2d_jax.stages.rollouts import Draws, Groups, rewards

LOSSES = ("grpo", "dpo", "group_dpo")
Sides = tuple[list[int], list[int]]  # indices of the chosen and of the rejected responses of a group
NO_PAIR: Sides = ([], [])


@dataclass(frozen=True)
class Batch:
    """groups: for the loss, never empty. signal: bool for each prompt that was drawn. metrics: of the pairs."""

    groups: list[Group]
    has_advantage: np.ndarray
    metrics: dict[str, float] = field(default_factory=dict)


def make(seed: int, stage: Online, draws: Draws, groups: Groups, scalar: Mapping[str, bool]) -> Batch:
    """One update's batch from all that was drawn for it. scalar: whether a task's reward knows no right and wrong.

    A prompt has a signal if it has a pair or, with GRPO, two different rewards. With stage.dynamic_sampling the first
    prompts_per_step prompts with a signal are kept, or as many as there are (without any the first ones); else all are.
    """
    signal, pairs = np.zeros(len(groups), bool), [NO_PAIR] * len(groups)
    if stage.loss == "grpo" or stage.grpo_coef:
        signal |= ((advantages(stage, draws, groups) != 0) & _counted(stage, groups)).any(axis=1)
    if stage.loss != "grpo":
        pairs = [_sides(seed, stage, *both, scalar) for both in zip(draws, groups, strict=True)]
        signal |= [bool(chosen) for chosen, _ in pairs]
    taught = [int(i) for i in np.flatnonzero(signal)]
    some = (taught or range(len(groups)))[: stage.prompts_per_step] if stage.dynamic_sampling else range(len(groups))
    draws, kept, sides = [draws[i] for i in some], [groups[i] for i in some], [pairs[i] for i in some]
    if stage.loss == "grpo":
        return Batch(_grpo(stage, draws, kept), signal)
    made = _dpo(stage, kept, sides) if stage.loss == "dpo" else _group_dpo(stage, draws, kept, sides)
    skipped = {"pairs/skipped": float(sum(not chosen for chosen, _ in pairs))}
    return Batch(_with_entropy(stage, made), signal, {**skipped, **_lengths(kept, sides)})


def _lengths(groups: Groups, sides: Sequence[Sides]) -> dict[str, float]:
    """How many prompts have a pair, and the mean lengths of both sides."""
    metrics = {"pairs/prompts": float(sum(bool(chosen) for chosen, _ in sides))}
    for name, which in (("chosen", 0), ("rejected", 1)):
        lengths = [
            np.mean([len(group[i].rollout.token_ids) for i in side[which]])
            for group, side in zip(groups, sides, strict=True)
            if side[which]
        ]
        metrics |= {f"pairs/{name}_length": float(np.mean(lengths))} if lengths else {}
    return metrics


def advantages(stage: Online, draws: Draws, groups: Groups) -> np.ndarray:
    """float32 [N, G]; rewards of different tasks are normalised apart."""
    values = shaped_rewards(stage, groups)
    found = np.zeros(values.shape, np.float32)
    for task in {problem.task for problem, _ in draws}:
        rows = [i for i, (problem, _) in enumerate(draws) if problem.task == task]
        found[rows] = group_advantages(values[rows], stage.scale_rewards, stage.scale_rewards_eps)
    return found


def shaped_rewards(stage: Online, groups: Groups) -> np.ndarray:
    """float64 [N, G]: rewards less what too long a response costs, NaN where there is none."""
    values = rewards(groups)
    if stage.overlong_buffer:
        lengths = np.array([[len(row.rollout.token_ids) for row in group] for group in groups])
        values = values + overlong_penalty(lengths, stage.sampling.max_new_tokens, stage.overlong_buffer)
    return values


def _counted(stage: Online, groups: Groups) -> np.ndarray:
    """bool [N, G]: False for responses that stage.mask_truncated leaves out of the loss."""
    cut = [[row.rollout.stop_reason == "length" for row in group] for group in groups]
    return ~(np.array(cut) & stage.mask_truncated)


def _grpo(stage: Online, draws: Draws, groups: Groups) -> list[Group]:
    """Without a KL or entropy term a response of advantage 0 has no gradient, so it is not run through the model."""
    tokens = _grpo_tokens(stage, draws, groups)
    always = stage.beta or stage.entropy_coef
    made = [
        Group(
            group[0].rollout.prompt_ids,
            [
                Response(row.rollout.token_ids, token)
                for row, token in zip(group, some, strict=True)
                if token["weight"] and (always or token["advantage"])
            ],
        )
        for group, some in zip(groups, tokens, strict=True)
    ]
    found = [group for group in made if group.responses]
    if not found:  # a batch without any signal still is a step of the schedule: one response of weight 0
        row, zeros = groups[0][0].rollout, {**tokens[0][0], "weight": 0.0, "advantage": 0.0}
        found = [Group(row.prompt_ids, [Response(row.token_ids, zeros)])]
    return _with_entropy(stage, found)


def _grpo_tokens(stage: Online, draws: Draws, groups: Groups) -> list[list[dict[str, Any]]]:
    """What GRPO needs of each response's tokens; normalisers count every response of a full batch."""
    found, counted = advantages(stage, draws, groups), _counted(stage, groups)
    lengths = np.array([[len(row.rollout.token_ids) for row in group] for group in groups])
    prompts = _prompts(stage, groups)
    absent = (prompts - len(groups)) * found.shape[1]
    weights = token_weights(
        stage.loss_type,
        np.pad(lengths.ravel(), (0, absent)),
        num_prompts=prompts,
        max_completion_length=stage.sampling.max_new_tokens,
        mask=np.pad(counted.ravel(), (0, absent)),
    )[: found.size].reshape(found.shape)
    return [
        [
            {"weight": float(w), "advantage": float(a), "sampler_logprob": row.rollout.logprobs}
            for row, w, a in zip(group, ws, some, strict=True)
        ]
        for group, ws, some in zip(groups, weights, found, strict=True)
    ]


def _sides(
    seed: int, stage: Online, drawn: tuple[Problem, int], group: Sequence[ScoredRollout], scalar: Mapping[str, bool]
) -> Sides:
    """Chosen and rejected responses of one prompt, both lists empty where there is no pair.

    GroupDPO takes all correct and all incorrect ones; where the reward knows no right and wrong, best and worst.
    """
    problem, visit = drawn
    some = [int(i) for i in np.flatnonzero(_counted(stage, [list(group)])[0])]
    usable = [group[i] for i in some]
    if stage.loss == "group_dpo" and not scalar[problem.task]:
        known = right(usable)
        chosen, rejected = ([some[i] for i in np.flatnonzero(known == side)] for side in (1, 0))
        return (chosen, rejected) if chosen and rejected else NO_PAIR
    pairs = pairs_of(seed, problem.id, visit, usable, 1, scalar=scalar[problem.task])
    return [some[i] for i, _ in pairs], [some[j] for _, j in pairs]


def _prompts(stage: Online, groups: Groups) -> int:
    """The prompts of a full batch: refill may leave one short."""
    return max(len(groups), stage.prompts_per_step)


def _normalizer(stage: Online, groups: Groups) -> int | None:
    """What DPO divides by in place of the prompts with a pair, if anything."""
    return _prompts(stage, groups) if stage.dpo.normalizer == "prompts" else None


def _dpo(stage: Online, groups: Groups, sides: Sequence[Sides]) -> list[Group]:
    """One pair a prompt, the loss being the mean over pairs or over prompts."""
    pairs = [(group[c[0]], group[r[0]]) for group, (c, r) in zip(groups, sides, strict=True) if c]
    if pairs:
        weights = dpo_weights(len(pairs), _normalizer(stage, groups))
        return [as_pair(*pair, float(weight)) for pair, weight in zip(pairs, weights, strict=True)]
    return [as_pair(groups[0][0], groups[0][0], 0.0)]


def as_pair(chosen: ScoredRollout, rejected: ScoredRollout, weight: float) -> Group:
    """Both sides in one row, behind one copy of their prompt."""
    responses = [Response(row.rollout.token_ids, {}, {"weight": weight}) for row in (chosen, rejected)]
    return Group(chosen.rollout.prompt_ids, responses, whole=True)


def _group_dpo(stage: Online, draws: Draws, groups: Groups, sides: Sequence[Sides]) -> list[Group]:
    """All responses of a prompt that take part in one row; the loss is the mean over a prompt's pairs, then prompts."""
    correct, incorrect = (np.array([len(side[which]) for side in sides]) for which in (0, 1))
    weights = group_dpo_weights(correct, incorrect, _normalizer(stage, groups))
    tokens = _grpo_tokens(stage, draws, groups) if stage.grpo_coef else [[{} for _ in group] for group in groups]
    made = []
    for number, (group, (chosen, rejected)) in enumerate(zip(groups, sides, strict=True)):
        responses = []
        for i, row in enumerate(group):
            side = 1.0 if i in chosen else -1.0 if i in rejected else 0.0
            token = tokens[number][i]
            if side or (token.get("weight") and (token["advantage"] or stage.beta)):
                sequence = {
                    "side": side,
                    "prompt": float(number),
                    "pair_weight": float(weights[number]) if side else 0.0,
                }
                responses.append(Response(row.rollout.token_ids, token, sequence))
        if responses:
            made.append(Group(group[0].rollout.prompt_ids, responses, whole=True))
    if made:
        return made
    token = {**tokens[0][0], "weight": 0.0, "advantage": 0.0} if stage.grpo_coef else {}
    nothing = Response(groups[0][0].rollout.token_ids, token, {"side": 0.0, "prompt": 0.0, "pair_weight": 0.0})
    return [Group(groups[0][0].rollout.prompt_ids, [nothing], whole=True)]


def _with_entropy(stage: Online, groups: list[Group]) -> list[Group]:
    """Each response's tokens with their weight in the mean next-token entropy, 0 in a response of no weight itself."""
    if not stage.entropy_coef:
        return groups
    count = sum(len(response.token_ids) for group in groups for response in group.responses if _weighs(response))

    def weighed(response: Response) -> Response:
        weight = 1.0 / count if _weighs(response) else 0.0
        return Response(response.token_ids, {**response.token, "entropy_weight": weight}, response.sequence)

    return [Group(group.prompt_ids, [weighed(r) for r in group.responses], group.whole) for group in groups]


def _weighs(response: Response) -> bool:
    own = [response.token.get("weight", 0.0), response.sequence.get("weight", 0.0)]
    return any((*own, response.sequence.get("pair_weight", 0.0)))


def fill(stage: Online, groups: list[Group], reference: np.ndarray | None, trainer: np.ndarray | None) -> list[Group]:
    """Add the log-probabilities of the reference, and of the policy as it was when it sampled, by the trainer.

    reference, trainer: float32 [tokens], those of all responses one after the other, or None where not needed.
    """
    filled, first = [], 0
    for group in groups:
        responses = []
        for response in group.responses:
            token, sequence = dict(response.token), dict(response.sequence)
            span = slice(first, first := first + len(response.token_ids))
            if trainer is not None:
                token["old_logprob"] = trainer[span]
            if reference is not None and stage.loss != "grpo":
                sequence["reference"] = float(reference[span].sum(dtype=np.float32))
            if reference is not None and stage.beta:
                token["ref_logprob"] = reference[span]
            responses.append(Response(response.token_ids, token, sequence))
        filled.append(Group(group.prompt_ids, responses, group.whole))
    return filled
