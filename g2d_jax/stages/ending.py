"""Where an online stage ends before its last step: at a budget, or where stopping.py finds that it has been enough."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from g2d_jax import accounting, stopping
from g2d_jax.models.config import ModelConfig
from g2d_jax.models.flops import attended, forward_flops
from g2d_jax.stages.context import Context
from g2d_jax.stages.rollouts import Groups, correct
from g2d_jax.stages.training import Trainer

STOPS = ("steps", "budget", "adaptive")
RECENT = 10  # steps whose rollouts tell what the offline stages will cost


def check(stage: ConfigDict) -> None:
    """Raise ValueError for settings that cannot work."""
    if stage.stop not in STOPS:
        raise ValueError(f"stop is {stage.stop!r}; choose one of {', '.join(STOPS)}")
    if stage.stop == "budget":
        known = [measure for measure in accounting.MEASURES if measure != "price"]
        if stage.budget.measure not in known:
            raise ValueError(f"budget.measure is {stage.budget.measure!r}; choose one of {', '.join(known)}")
        if stage.budget.amount <= 0:
            raise ValueError(f"budget.amount must be positive, got {stage.budget.amount}")
    if stage.stop == "adaptive" and (stage.adaptive.min_steps < 3 or stage.adaptive.every < 1):
        raise ValueError("adaptive.min_steps must be at least 3, to fit a curve, and adaptive.every at least 1")


def check_plan(name: str, stages: ConfigDict) -> None:
    """Raise ValueError if an adaptive stage has no offline stage to be weighed against."""
    if stages[name].stop == "adaptive" and _followers(name, stages) is None:
        raise ValueError(
            "stop='adaptive' weighs online steps against the collect and offline stages that start from this stage's "
            "last policy, and the config has none"
        )


def _followers(name: str, stages: ConfigDict) -> tuple[ConfigDict, ConfigDict] | None:
    """The collect and the offline stage that start where this one ends."""
    for other in stages.values():
        if other.kind == "offline" and other.policy == name and other.preferences in stages:
            return stages[other.preferences], other
    return None


def ended(training: Trainer) -> bool:
    """Whether the stage was ended before, by an earlier process perhaps."""
    return "ended" in training.facts


def evidence(training: Trainer) -> dict[str, Any]:
    """For the manifest: the rule that ended the stage, and all it saw; {} if it went on to its last step."""
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
    if reason is None:
        return False
    training.facts["ended"] = {**reason, "step": training.step}
    context.tracker.say(f"{name}: ends after step {training.step} of at most {stage.steps} by {reason['rule']}")
    return True


def _enough(context: Context, name: str, stage: ConfigDict, training: Trainer, groups: Groups) -> dict[str, Any] | None:
    """Add this step to what was seen; at a probe, log the forecast and say whether it is enough."""
    settings, followers = stage.adaptive, _followers(name, context.config.stages)
    assert followers is not None
    seen = training.facts.setdefault("seen", [])
    seen.append(_seen(groups, settings.shift))
    step = training.step
    if step < settings.min_steps or (step - settings.min_steps) % settings.every:
        return None
    recent = {key: _mean(np.array([one[key] for one in seen[-RECENT:]])) for key in seen[-1]}
    step_flops = training.tally.flops / step
    found = stopping.forecast(
        [one["accuracy"] for one in seen],
        [one["reachable"] for one in seen],
        step_flops=step_flops,
        # Groups all alike cost no training, archived ones no sampling: then the next step is the yardstick.
        offline_flops=max(offline_flops(context.model_config, *followers, recent), step_flops),
        limit=stage.steps,
    )
    probe = {key: float(value) for key, value in dataclasses.asdict(found).items()}
    training.facts.setdefault("probes", []).append({**probe, "mixed": recent["mixed"]})
    context.tracker.log(name, step, {f"adaptive/{key}": value for key, value in probe.items()}, kind="adaptive")
    return {"rule": "adaptive"} if found.enough else None


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


def offline_flops(config: ModelConfig, collect: ConfigDict, offline: ConfigDict, seen: dict[str, float]) -> float:
    """What collecting and training offline would cost now, from mean lengths and the share of mixed prompts.

    Generation counts each prompt once and each response; of the mixed prompts all pairs that the settings ask for are
    scored once and trained on in every epoch.
    """
    prompt, length = round(seen["prompt"]), round(seen["length"])
    drawn = forward_flops(config, prompt, attended(prompt))
    drawn += collect.num_generations * forward_flops(config, length, attended(length, before=prompt))
    generation = collect.prompts * drawn if collect.rollouts == "sample" else 0.0
    sides = [round(seen[side]) if seen[side] == seen[side] else length for side in ("chosen", "rejected")]
    positions = attended(prompt) + sum(attended(side, before=prompt) for side in sides)
    each = forward_flops(config, prompt + sum(sides), positions)
    pairs = collect.prompts * seen["mixed"] * collect.pairs_per_prompt
    pairs = min(pairs, collect.max_pairs) if collect.max_pairs else pairs
    return float(generation + pairs * each * (1 + 3 * offline.epochs))
