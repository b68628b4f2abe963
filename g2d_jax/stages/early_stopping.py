"""Early stopping of an online stage: at a budget, or where stopping.py finds that further steps do not pay.

stopping.py reads the stage's probes (probes.py): the same prompts each time, drawn by no filter. They are
part of what the stage costs, and of what the rule reckons a step to cost.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from g2d_jax import accounting
from g2d_jax.config import Collect, Config, Offline, Online
from g2d_jax.graph import followers
from g2d_jax.models.config import ModelConfig
from g2d_jax.models.decoder import count_params
from g2d_jax.models.flops import attended, forward_flops, train_flops
from g2d_jax.runtime import processes
from g2d_jax.stages import probes
from g2d_jax.stages.runtime import Runtime
from g2d_jax.stages.trainer import Trainer
from g2d_jax.study import stopping
from g2d_jax.study.gain import Gain

MEASURED = ("mixed", "prompt", "length", "chosen", "rejected")  # of `probes.prospects`, the figures that decide costs


def check_problems(runtime: Runtime, stage: Online) -> None:
    """Raise ValueError if the probes of an adaptive stage have too few problems for an error of their slope."""
    if stage.stop != "adaptive":
        return
    problems = probes.probed(runtime.problems[stage.probe.split], stage.probe.prompts)
    count = sum(runtime.verifiable[problem.task] for problem in problems)
    if count < 2:
        raise ValueError(
            f"stop='adaptive' measures on at least two problems with a verdict, better 64, and probe.prompts="
            f"{stage.probe.prompts} of data.{stage.probe.split} come to {count}: give data.{stage.probe.split} more "
            'problems, or use stop="steps" or "budget"'
        )


def ends(trainer: Trainer, stage: Online) -> bool:
    """Decide whether the stage ends with the step just done, or was ended before, by an earlier process perhaps.

    Call it once this step's probe is made. Records the reason in trainer.extra_state, and shows it; the step's
    checkpoint is then due, and stays.
    """
    state, step = trainer.extra_state, trainer.step
    if state.ended or stage.stop == "steps":
        return state.ended is not None
    reason = None
    if stage.stop == "budget":
        spent = accounting.cost(trainer.cost.manifest())[stage.budget.measure]
        if step and spent >= stage.budget.amount:
            reason = {"rule": "budget", "measure": stage.budget.measure, "spent": spent}
    elif _enough(trainer, stage):
        reason = {"rule": "adaptive"}
    reason = processes.on_leader(lambda: reason)  # seconds differ from one process to the next
    if reason is None:
        return False
    state.ended = {**reason, "step": step}
    trainer.pinned.add(step)
    # Also where the step was saved before: by a process that was stopped during the probe.
    state.costs.setdefault(str(step), trainer.cost.manifest())
    trainer.runtime.tracker.say(f"{trainer.name}: ends after step {step} of at most {stage.steps} by {reason['rule']}")
    return True


def _enough(trainer: Trainer, stage: Online) -> bool:
    """Log the forecast at a probe, and decide whether the warm-up ends."""
    runtime, name, step = trainer.runtime, trainer.name, trainer.step
    probed, forecasts = trainer.extra_state.prospects, trainer.extra_state.forecasts
    if step < stage.adaptive.min_steps or len(probed) < stopping.MIN_PROBES or probed[-1]["step"] != step:
        return False
    if not forecasts or forecasts[-1]["step"] != step:  # else a process before this one was stopped just then
        steps, rates, flops = ([probe[key] for probe in probed] for key in ("step", "rates", "flops"))
        judged = ~np.isnan(np.array(rates)[stopping.window(steps)]).any(axis=0)
        if judged.sum() < 2 or not np.nansum(rates):
            return False  # no estimate for either stage: no verdict, or no correct response and so no pair
        recent = {key: _mean([probe[key] for probe in probed[-stopping.PROBES_IN_A_ROW :]]) for key in MEASURED}
        least = (flops[-1] - flops[0]) / step  # groups all alike cost no trainer, archived ones no sampling
        offline, responses = followed_by(runtime.config, name, step, len(runtime.problems["train"]))
        cost = offline_flops(runtime.model_config, offline, recent, responses=responses)
        if not forecasts and (
            outside := list(offline.outside(np.array(rates[-1]), count_params(runtime.model_config)))
        ):
            runtime.tracker.say(
                f"{name}: what offline training adds is predicted for settings of no study: {'; '.join(outside)}"
            )
        forecast = stopping.forecast(steps, rates, flops, offline=offline, offline_flops=max(cost, least))
        values = {key: float(value) for key, value in dataclasses.asdict(forecast).items()}
        forecasts.append({**values, "mixed": recent["mixed"]})
        runtime.tracker.log(name, step, {f"adaptive/{key}": value for key, value in values.items()}, kind="adaptive")
    fields = [field.name for field in dataclasses.fields(stopping.Forecast)]
    return stopping.ends(
        [stopping.Forecast(**{key: record[key] for key in fields}) for record in forecasts],
        [probe["step"] for probe in probed],
    )


def followed_by(config: Config, name: str, step: int, problems: int) -> tuple[Gain, int]:
    """Return the offline training after an online stage that ends with this step, and how many responses to a prompt
    it draws. problems: to train on."""
    names = followers(name, config.stages)
    assert names is not None  # graph.check_inputs
    drawing, collect = (config.stage(other, Collect) for other in names[:2])
    archived = drawing.rollouts == "archive"
    prompts = step * config.stage(name, Online).prompts_per_step if archived else min(drawing.prompts, problems)
    return Gain(prompts, collect, config.stage(names[2], Offline)), 0 if archived else drawing.num_generations


def _mean(values: Sequence[float]) -> float:
    measured = [value for value in values if not math.isnan(value)]
    return math.fsum(measured) / len(measured) if measured else math.nan


def offline_flops(config: ModelConfig, gain: Gain, recent: dict[str, float], *, responses: int) -> float:
    """Estimate the cost of collecting and training offline, from mean lengths (tokens) and the share of mixed prompts.

    responses: to draw for each prompt, 0 where they exist already. Generation counts each prompt once and each
    response; of the mixed prompts all pairs that the settings ask for are scored once and
    trained on in every epoch: the most it can be, for windows of pass rates and one-sided groups leave fewer.
    """
    prompts, collect, offline = gain.prompts, gain.collect, gain.offline
    prompt, length = round(recent["prompt"]), round(recent["length"])
    drawn = forward_flops(config, prompt, attended(prompt))
    drawn += responses * forward_flops(config, length, attended(length, before=prompt))
    generation = prompts * drawn if responses else 0.0
    sides = [round(recent[side]) if recent[side] == recent[side] else length for side in ("chosen", "rejected")]
    positions = attended(prompt) + sum(attended(side, before=prompt) for side in sides)
    scored, trained = (flops(config, prompt + sum(sides), positions) for flops in (forward_flops, train_flops))
    pairs = prompts * recent["mixed"] * collect.pairs_per_prompt
    pairs = min(pairs, collect.max_pairs) if collect.max_pairs else pairs
    return float(generation + pairs * (scored + offline.epochs * trained))
