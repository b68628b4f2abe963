"""The forecast of a run, before it: what its starting policy answers, what offline DPO would add, which K, what cost.

    the run's own stages up to the warm-up, this cut to a few steps (0 without --probe) and probed ─► rates by prompt
    rates ─► study/gain.py: what DPO adds now, and after so many nats of warm-up ─► K;   lengths ─► g2d plan

Nothing is told of what lies outside of the range that the prediction was calibrated in; its errors: docs/forecast.md.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath
from ml_collections import ConfigDict
from scipy.optimize import brentq
from scipy.stats import binom

from g2d_jax import commands, pipeline
from g2d_jax.config import Config, Online
from g2d_jax.graph import followers, plan
from g2d_jax.models.decoder import count_params
from g2d_jax.runtime import storage
from g2d_jax.runtime.tracking import Screen
from g2d_jax.stages.early_stopping import followed_by, offline_flops
from g2d_jax.study.gain import FACTOR, Gain, tilted
from g2d_jax.study.stopping import trend
from g2d_jax.workdir import absolute

PROMPTS, RESPONSES = 256, 8
BENDS, LONGEST = (0.65, 100.0), 240
"""Bends from the sharpest of the studies to none, see `learned`; the steps of their longest warm-up."""
NATS = (0.0, 1.0, 2.0, 3.0)
"""Of warm-up, for which DPO's gain is told."""


def forecast(
    config: ConfigDict,
    workdir: storage.PathLike,
    *,
    probe: int = 0,
    plan_arguments: Sequence[str] = (),
) -> dict[str, Any]:
    """Forecast the run of a config; show the forecast, write WORKDIR/forecast.json, and return it.

    workdir: of the stages that are run for it, which the same call continues. probe: online steps that may be done.
    plan_arguments: of `g2d plan`, for hours and price; () for none. Raises ValueError for a config without an online
    stage, and as `pipeline.run`.
    """
    name = warmup_of(Config.of(config))
    folder = absolute(workdir)
    pipeline.run(shortened(config, name, probe), folder)
    content = {**predicted(Config.of(config), name, folder), "plan": None}
    screen = Screen()
    if plan_arguments:
        lengths = [f"--{key}={max(round(content[key]), 1)}" for key in ("prompt", "response")]
        command = [sys.executable, "-m", "g2d_jax", "plan", *plan_arguments, *lengths]
        done = subprocess.run(command, capture_output=True, text=True)  # it compiles for another machine's devices
        screen.say(done.stdout + done.stderr)
        verdicts = [line for line in done.stdout.splitlines() if line.startswith("fits: ")]
        content["plan"] = verdicts[0] if verdicts else "cannot tell: no plan was made, as said above"
    show(content, screen)
    storage.write_json(folder / "forecast.json", content)
    screen.say(str(folder / "forecast.json"))
    return content


def warmup_of(config: Config) -> str:
    """Return the online stage that offline DPO follows, or else the first. Raises ValueError if there is none."""
    online = [name for name in plan(config).order if isinstance(config.stages[name], Online)]
    if not online:
        raise ValueError(
            "a forecast is of a run with an online stage, and the config has none: g2d plan tells its cost"
        )
    return next((name for name in online if followers(name, config.stages)), online[0])


def shortened(config: ConfigDict, name: str, steps: int) -> ConfigDict:
    """Return the config of the stages up to the online one, which is probed at its start, middle and end."""
    order, needed = plan(Config.of(config)), [name]
    for other in needed:
        needed += [stage for stage in order.inputs[other] if stage not in needed]
    short = config.copy_and_resolve_references()
    every = max(-(-steps // 2), 1)
    with short.unlocked(), short.stages.unlocked():
        short.name = f"{config.name}-forecast"
        for other in set(order.order) - set(needed):
            del short.stages[other]
        stage = short.stages[name]
        stage.update(steps=steps, stop="steps", keep=tuple(range(0, steps, every)))
        stage.probe.update(every=every, prompts=PROMPTS, num_generations=RESPONSES)
        stage.probe.split = "dev" if config.data.dev.path else "train"
        stage.optimizer.update(schedule="constant", min_lr_ratio=0.0)  # a decay has hardly begun
    return short


def predicted(config: Config, name: str, folder: epath.Path) -> dict[str, Any]:
    """Compute the forecast from the probes of the shortened run. config: of the whole run."""
    with commands.opened(folder) as runtime:
        place = runtime.folders[name]
        model, train = runtime.model_config, len(runtime.problems["train"])
    manifest = storage.finished(place) or {}
    probes = {int(file.stem[-6:]): storage.read_json(file)["value"] for file in sorted(place.glob("probe/step-*.json"))}
    steps, first = sorted(probes), probes[0]
    rates = np.array([probes[step]["offline"]["rates"] for step in steps], np.float64)
    figures, lengths, judged = first["figures"], first["offline"], np.isfinite(rates[0])
    error = float(rates[0][judged].std(ddof=1) / np.sqrt(judged.sum())) if judged.sum() > 1 else None
    content: dict[str, Any] = {
        "config": config.name,
        "policy": config.stage(name, Online).policy,
        "stage": name,
        "prompts": rates.shape[1],
        "num_generations": RESPONSES,
        "probe_steps": steps[-1],
        "pass_rate": figures.get("accuracy"),
        "pass_rate_error": error,
        "by_right": [int(np.sum(np.round(rates[0] * RESPONSES) == right)) for right in range(RESPONSES + 1)],
        "mixed": lengths["mixed"] if judged.any() else None,
        "entropy": figures.get("entropy"),
        "clipped": figures["completions/clipped_ratio"],
        "prompt": lengths["prompt"],
        "response": lengths["length"],
        "gains": [],
        "pace": None,
        "K": None,
    }
    if why := _unknown(rates[0], config, name):
        return {**content, "cannot_tell": [f"what DPO adds, and K: {why}"]}
    gain, responses = followed_by(config, name, config.stage(name, Online).steps, train)
    if outside := list(gain.outside(rates[0], count_params(model))):
        return {**content, "cannot_tell": [f"what DPO adds, and K: {line}" for line in outside]}
    content["pace"] = pace = pace_of(steps, rates) if len(steps) > 1 else None
    content["gains"] = list(gains(gain, rates[0], steps[-1], pace))
    if pace is None:
        return {**content, "cannot_tell": ["K: no online steps were allowed; --probe 10 allows ten"]}
    if not _corners(pace):
        return {**content, "cannot_tell": ["K: the online steps moved the accuracy by no more than twice its error"]}
    step_flops = (manifest["flops"] - manifest["at"]["0"]["flops"]) / steps[-1]
    price = step_flops / offline_flops(model, gain, lengths, responses=responses)
    content["K"] = low, high = k_interval(gain, rates[0], steps[-1], pace, price)
    undecided = [f"K: from none to more than {LONGEST}, as a step buys about what longer DPO would"]
    return {**content, "cannot_tell": undecided if low == 0 and high is None else []}


def _unknown(rates: np.ndarray, config: Config, name: str) -> str:
    """Say why nothing can be told of offline DPO, "" if something can."""
    if np.isfinite(rates).sum() < 2:
        return "the reward tells no right from wrong"
    if followers(name, config.stages) is None:
        return f"no offline stage takes its pairs from rollouts of {name}"
    return "" if 0 < np.nanmean(rates) < 1 else "all answers are right, or all are wrong"


def pace_of(steps: Sequence[int], rates: np.ndarray) -> tuple[float, float]:
    """Estimate the nats that a step adds to the log-odds of the accuracy, and the standard error. rates: [T, P]."""
    a = np.clip(np.nanmean(rates, axis=1, keepdims=True), 1e-3, 1 - 1e-3)
    return trend(steps, np.log(a / (1 - a)) + (rates - a) / (a * (1 - a)))  # by prompt, in the first order


def learned(steps: np.ndarray, pace: float, bend: float) -> np.ndarray:
    """Return the nats that so many steps of warm-up add, which slow down: bend * log(1 + pace * steps / bend)."""
    return np.asarray(bend * np.log1p(pace * steps / bend))


def first_pace(pace: float, steps: int, bend: float) -> float:
    """Return the pace of the first step, of a warm-up that has had this one in the mean over so many."""
    return float(bend * np.expm1(pace * steps / bend) / steps)


def warmed(rates: np.ndarray, nats: float) -> np.ndarray:
    """Draw rates of the prompts after a warm-up that adds so many nats to the log-odds of the accuracy.

    The log-odds of all prompts rise alike; those without a right or a wrong answer have half a one more of both.
    rates: [P]. Returns [8 * P], the same draws for all nats.
    """
    judged = rates[np.isfinite(rates)]
    start, target = (judged * RESPONSES + 0.5) / (RESPONSES + 1), float(tilted(judged.mean(), nats))
    rise = brentq(lambda shift: tilted(start, shift).mean() - target, -50, 50)
    draws = np.random.default_rng(0).random((8, len(judged)))
    return np.asarray(binom.ppf(draws, RESPONSES, tilted(start, rise)) / RESPONSES).ravel()


def gains(gain: Gain, rates: np.ndarray, steps: int, pace: tuple[float, float] | None) -> Iterator[dict[str, Any]]:
    """Yield what DPO is predicted to add after `NATS` of warm-up, with the steps that these take if a pace is known."""
    for nats in NATS:
        after = warmed(rates, nats) if nats else rates
        corners = [(first_pace(slope, steps, bend), bend) for slope, bend in _corners(pace)]
        needed = [bend * np.expm1(nats / bend) / first for first, bend in corners]
        yield {
            "nats": nats,
            "accuracy": float(np.nanmean(after)),
            "mixed": float(np.mean((after > 0) & (after < 1))),
            "gain": float(np.nanmean(gain.values(after) - after)),
            "gain_interval": gain.interval(after),
            "steps": [min(needed), max(needed)] if needed else None,
        }


def _corners(pace: tuple[float, float] | None) -> list[tuple[float, float]]:
    """List the ends of the pace's interval with those of `BENDS`; [] where the pace is not above its error."""
    if pace is None or pace[0] <= 2 * pace[1]:
        return []
    return list(itertools.product((pace[0] - 2 * pace[1], pace[0] + 2 * pace[1]), BENDS))


def k_interval(
    gain: Gain, rates: np.ndarray, steps: int, pace: tuple[float, float], price: float
) -> tuple[int | None, int | None]:
    """Predict between which K a further step comes to add less than longer offline training for its price.

    That is the rule of study/stopping.py, without errors. price: FLOPs of a step over those of offline training. The
    ends are those over paces, `BENDS` and what gain.py allows; None: more than `LONGEST`.
    """
    ks, ends = np.unique(np.round(np.geomspace(1, LONGEST + 1, 40))) - 1, []
    for (slope, bend), factor in itertools.product(_corners(pace), (1 / FACTOR, 1.0, FACTOR)):
        nats = learned(ks, first_pace(slope, steps, bend), bend)
        after = np.stack([warmed(rates, n) for n in nats])
        values, bought = gain.values(after, factor).mean(axis=1), price * gain.prolonged(after, factor)
        enough = np.flatnonzero(np.diff(values) / np.diff(ks) <= bought[:-1])
        ends.append(int(ks[enough[0]]) if enough.size else None)
    reached = [k for k in ends if k is not None]
    return min(reached, default=None), max(reached) if len(reached) == len(ends) else None


def show(content: Mapping[str, Any], screen: Screen) -> None:
    """Print a forecast: the starting policy, what DPO would add, and K."""

    def percent(value: float | None, sign: str = "") -> str:
        return "cannot tell" if value is None else f"{100 * value:{sign}.1f}"

    entropy = "cannot tell" if content["entropy"] is None else f"{content['entropy']:.3f} nats a token"
    rows = [
        ["pass rate, %", f"{percent(content['pass_rate'])} ± {percent(content['pass_rate_error'])}"],
        [f"prompts by right answers, 0 to {RESPONSES}", " ".join(map(str, content["by_right"]))],
        ["mixed prompts, %", percent(content["mixed"])],
        ["entropy", entropy],
        ["tokens of a prompt, of a response", f"{content['prompt']:.0f}, {content['response']:.0f}"],
        ["cut at max_new_tokens, %", percent(content["clipped"])],
        ["K", k_text(content["K"])],
        ["hours and price", content["plan"] or "cannot tell: give --topology NAME"],
    ]
    title = f"{content['config']}: policy {content['policy']}, {content['prompts']} prompts x {RESPONSES}"
    screen.table(title, ["", "forecast"], rows)
    if content["gains"]:
        columns = ["warm-up, nats", "steps", "accuracy, %", "mixed, %", "DPO adds", "interval"]
        screen.table("what DPO is predicted to add, in points", columns, [
            [
                f"{row['nats']:.0f}",
                "cannot tell" if row["steps"] is None else "{:.0f} to {:.0f}".format(*row["steps"]),
                *(percent(row["accuracy"]), percent(row["mixed"]), percent(row["gain"], "+")),
                " to ".join(percent(end, "+") for end in row["gain_interval"]),
            ]
            for row in content["gains"]
        ])  # fmt: skip
    for line in content["cannot_tell"]:
        screen.say(f"cannot tell: {line}")


def k_text(interval: tuple[int | None, int | None] | None) -> str:
    """Describe an interval for K."""
    if interval is None:
        return "cannot tell"
    low, high = interval
    if low is None:
        return f"more than {LONGEST}, the longest of the studies"
    if high is not None:
        return f"{low} to {high}"
    return f"{low} or more" if low else "cannot tell"
