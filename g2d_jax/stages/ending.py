"""Where an online stage ends before its last step: at a budget, or where stopping.py finds that it has been enough."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from g2d_jax import accounting, processes, stopping
from g2d_jax.models.config import ModelConfig
from g2d_jax.models.flops import attended, forward_flops, train_flops
from g2d_jax.stages.context import Context
from g2d_jax.stages.rollouts import Groups, correct
from g2d_jax.stages.training import Trainer

STOPS = ("steps", "budget", "adaptive")
MOST_SHIFT = 100  # nats of adaptive.shift; odds times e^100 are certainty


def check(stage: ConfigDict) -> None:
    """Raise ValueError for settings that cannot work."""
    if stage.stop not in STOPS:
        raise ValueError(f"stop is {stage.stop!r}; choose one of {', '.join(STOPS)}")
    if stage.stop == "budget":
        known = [measure for measure in accounting.MEASURES if measure != "price"]
        if stage.budget.measure not in known:
            raise ValueError(f"budget.measure is {stage.budget.measure!r}; choose one of {', '.join(known)}")
        if not stage.budget.amount > 0:
            raise ValueError(f"budget.amount must be positive, got {stage.budget.amount}")
    if stage.stop == "adaptive":
        _check_adaptive(stage)


def _check_adaptive(stage: ConfigDict) -> None:
    settings = stage.adaptive
    if settings.min_steps < 3 or settings.every < 1:
        raise ValueError(
            "adaptive.min_steps must be at least 3, for a slope with an error, and adaptive.every at least 1"
        )
    if settings.min_steps > stage.steps:
        raise ValueError(
            f"adaptive.min_steps is {settings.min_steps} but steps, the most there may be, is {stage.steps}: the rule "
            "would never be asked"
        )
    if not 0 <= settings.shift <= MOST_SHIFT:
        raise ValueError(f"adaptive.shift must be from 0 to {MOST_SHIFT} nats, got {settings.shift}")


def check_plan(name: str, stages: ConfigDict) -> None:
    """Raise ValueError if an adaptive stage has no offline stage to be weighed against."""
    if stages[name].stop == "adaptive" and followers(name, stages) is None:
        raise ValueError(
            f"stop='adaptive' weighs online steps against an offline stage with policy={name!r} and the collect stage "
            f"of its preferences, with policy={name!r} and rollouts='sample' or 'archive'; the config has none"
        )


def followers(name: str, stages: ConfigDict) -> tuple[str, str, str] | None:
    """What starts where this stage ends: the stages that draw rollouts, choose pairs from them, and train on those.

    The first two are one stage unless the second takes the rollouts of another. They decide where the stage ends.
    """
    for other, offline in stages.items():
        if offline.kind != "offline" or offline.policy != name or offline.preferences not in stages:
            continue
        drawing = offline.preferences
        while stages[drawing].get("rollouts") in stages:
            drawing = stages[drawing].rollouts
        if stages[drawing].get("rollouts") in ("sample", "archive") and stages[drawing].policy == name:
            return drawing, offline.preferences, other
    return None


def ended(training: Trainer) -> bool:
    """Whether the stage was ended before, by an earlier process perhaps."""
    return "ended" in training.facts


def evidence(training: Trainer) -> dict[str, Any]:
    """For the manifest: the rule that ended the stage ("steps": it went on to its last), and all that probes saw."""
    return {"stop": {"probes": training.facts.get("probes", []), **training.facts.get("ended", {"rule": "steps"})}}


def ends(context: Context, name: str, stage: ConfigDict, training: Trainer, groups: Groups) -> bool:
    """Whether the stage ends with the step that was just done. Notes why in training.facts, and tells the user."""
    reason = None
    if stage.stop == "budget":
        spent = accounting.cost(training.tally.manifest())[stage.budget.measure]
        if spent >= stage.budget.amount:
            reason = {"rule": "budget", "measure": stage.budget.measure, "spent": spent}
    elif stage.stop == "adaptive":
        reason = _enough(context, name, stage, training, groups)
    reason = processes.once(lambda: reason)  # seconds differ from one process to the next
    if reason is None:
        return False
    training.facts["ended"] = {**reason, "step": training.step}
    context.tracker.say(f"{name}: ends after step {training.step} of at most {stage.steps} by {reason['rule']}")
    return True


def _enough(context: Context, name: str, stage: ConfigDict, training: Trainer, groups: Groups) -> dict[str, Any] | None:
    """Add this step to what was seen; at a probe, log the forecast and say whether it is enough."""
    settings, seen = stage.adaptive, training.facts.setdefault("seen", [])
    before = sum(one["flops"] for one in seen)
    seen.append({**_seen(groups, settings.shift), "flops": training.tally.flops - before})
    step = training.step
    if step < settings.min_steps or (step - settings.min_steps) % settings.every:
        return None
    accuracies = [one["accuracy"] for one in seen]
    latest = seen[-stopping.window(step) :]
    if np.count_nonzero([one["accuracy"] == one["accuracy"] for one in latest]) < 3:
        return None  # unscorable problems alone: no slope yet
    recent = {key: _mean(np.array([one[key] for one in seen[-stopping.RECENT :]])) for key in seen[-1]}
    step_flops = float(np.mean([one["flops"] for one in latest]))
    found = stopping.forecast(
        accuracies,
        [one["reachable"] for one in seen],
        step_flops=step_flops,
        # Groups all alike cost no training, archived ones no sampling: then the next step is the yardstick.
        offline_flops=max(_offline_flops(context, name, stage, step, recent), step_flops),
    )
    probe = {key: float(value) for key, value in dataclasses.asdict(found).items()}
    training.facts.setdefault("probes", []).append({**probe, "mixed": recent["mixed"]})
    context.tracker.log(name, step, {f"adaptive/{key}": value for key, value in probe.items()}, kind="adaptive")
    # Without one correct response nothing is known of either stage, and there would be no pair: go on.
    return {"rule": "adaptive"} if found.enough and any(one > 0 for one in accuracies) else None


def _offline_flops(context: Context, name: str, stage: ConfigDict, step: int, seen: dict[str, float]) -> float:
    """What the stages that follow would cost now."""
    stages = context.config.stages
    named = followers(name, stages)
    assert named is not None  # check_plan
    drawing, collect, offline = (stages[other] for other in named)
    archived = drawing.rollouts == "archive"
    return offline_flops(
        context.model_config,
        collect,
        offline,
        seen,
        prompts=step * stage.prompts_per_step if archived else min(drawing.prompts, len(context.problems["train"])),
        responses=0 if archived else drawing.num_generations,
    )


def _seen(groups: Groups, shift: float) -> dict[str, float]:
    """What one step's groups tell: accuracy, what is reachable from it, and the lengths that decide costs (tokens)."""
    right = correct(groups)
    known = ~np.isnan(right)
    rates = np.where(known.any(axis=1), np.nansum(right, axis=1) / np.maximum(known.sum(axis=1), 1), np.nan)
    lengths = np.array([[len(row.rollout.token_ids) for row in group] for group in groups], np.float64)
    return {
        "accuracy": stopping.tilted(rates, 0.0),
        "reachable": stopping.tilted(rates, shift),
        "mixed": float(np.mean((rates > 0) & (rates < 1))),
        "prompt": float(np.mean([len(group[0].rollout.prompt_ids) for group in groups])),
        "length": float(lengths.mean()),
        "chosen": _mean(lengths[right == 1]),
        "rejected": _mean(lengths[right == 0]),
    }


def _mean(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")


def offline_flops(
    config: ModelConfig,
    collect: ConfigDict,
    offline: ConfigDict,
    seen: dict[str, float],
    *,
    prompts: int,
    responses: int,
) -> float:
    """What collecting and training offline would cost, from mean lengths (tokens) and the share of mixed prompts.

    prompts: how many pairs are made for; responses: to draw for each, 0 where they are there already. Generation counts
    each prompt once and each response; of the mixed prompts all pairs that the settings ask for are scored once and
    trained on in every epoch: the most it can be, for windows of pass rates and one-sided groups leave fewer.
    """
    prompt, length = round(seen["prompt"]), round(seen["length"])
    drawn = forward_flops(config, prompt, attended(prompt))
    drawn += responses * forward_flops(config, length, attended(length, before=prompt))
    generation = prompts * drawn if responses else 0.0
    sides = [round(seen[side]) if seen[side] == seen[side] else length for side in ("chosen", "rejected")]
    positions = attended(prompt) + sum(attended(side, before=prompt) for side in sides)
    scored, trained = (flops(config, prompt + sum(sides), positions) for flops in (forward_flops, train_flops))
    pairs = prompts * seen["mixed"] * collect.pairs_per_prompt
    pairs = min(pairs, collect.max_pairs) if collect.max_pairs else pairs
    return float(generation + pairs * (scored + offline.epochs * trained))
