"""The forecast of a run, before it: what its starting policy answers, the pairs that its answers
give, and the cost.

    the run's own stages up to the warm-up, this cut to a few steps (0 without --probe) and probed ─► answers by prompt
    answers ─► pass rates, mixed prompts, pairs, entropy, lengths;     lengths ─► g2d plan ─► hours and price

It tells what was measured. What training will make of the policy it does not say.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from g2d_jax import commands, pipeline
from g2d_jax.config import Collect, Config, Online
from g2d_jax.config.graph import plan
from g2d_jax.config.policy_name import own_stage
from g2d_jax.rollouts.generate import draw_once, grouped
from g2d_jax.runtime import storage
from g2d_jax.runtime.tables import read_rollouts
from g2d_jax.runtime.tracking import Screen
from g2d_jax.session.problems import count_drawn
from g2d_jax.session.session import Session
from g2d_jax.stages.collect import choose_pairs
from g2d_jax.stages.probes import probed
from g2d_jax.workdir import absolute

PROMPTS, RESPONSES = 256, 8


def forecast(
    config: ConfigDict,
    workdir: storage.PathLike,
    *,
    probe: int = 0,
    plan_arguments: Sequence[str] = (),
) -> dict[str, Any]:
    """Forecast the run of a config; show the forecast, write WORKDIR/forecast.json, and return it.

    workdir: of the stages that are run for it, which the same call continues. probe: online steps
    that may be done.
    plan_arguments: of `g2d plan`, for hours and price; () for none. Raises ValueError for a config
    without an online stage, and as `pipeline.run`.
    """
    name = warmup_of(Config.of(config))
    folder = absolute(workdir)
    pipeline.run(shortened(config, name, probe), folder)
    content = {**measured(Config.of(config), name, folder), "plan": None}
    screen = Screen()
    if plan_arguments:
        first = content["probes"][0]
        lengths = [f"--{key}={max(round(first[key]), 1)}" for key in ("prompt", "response")]
        command = [sys.executable, "-m", "g2d_jax", "plan", *plan_arguments, *lengths]
        # it compiles for another machine's devices
        done = subprocess.run(command, capture_output=True, text=True)
        screen.say(done.stdout + done.stderr)
        verdicts = [line for line in done.stdout.splitlines() if line.startswith("fits: ")]
        content["plan"] = (
            verdicts[0] if verdicts else "cannot tell: no plan was made, as said above"
        )
    show(content, screen)
    storage.write_json(folder / "forecast.json", content)
    screen.say(str(folder / "forecast.json"))
    return content


def warmup_of(config: Config) -> str:
    """Return the online stage whose policy pairs are collected from, or else the first. Raises
    ValueError if there is none."""
    online = [name for name in plan(config).order if name in config.stages_of(Online)]
    if not online:
        raise ValueError(
            "a forecast is of a run with an online stage, and the config has none: g2d plan "
            "tells its cost"
        )
    return next((name for name in online if collecting(config, name)), online[0])


def collecting(config: Config, name: str) -> Collect | None:
    """Return the first stage that collects pairs from the policy of an online stage, None if there
    is none."""
    collects = config.stages_of(Collect)
    for other in plan(config).order:
        if other in collects and own_stage(collects[other].policy) == name:
            return collects[other]
    return None


def shortened(config: ConfigDict, name: str, steps: int) -> ConfigDict:
    """Return the config of the stages up to the online one, which is probed at its start, middle
    and end."""
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
        stage.budget.amount = 0.0
        stage.update(steps=steps, stop="steps", keep=tuple(range(0, steps, every)))
        stage.probe.update(every=every, prompts=PROMPTS, num_generations=RESPONSES)
        stage.probe.split = "dev" if config.data.dev.path else "train"
        stage.optimizer.update(schedule="constant", min_lr_ratio=0.0)  # a decay has hardly begun
    return short


def measured(config: Config, name: str, folder: epath.Path) -> dict[str, Any]:
    """Return what the probes of the shortened run measured, in the order of their steps. config: of
    the whole run."""
    collect = collecting(config, name)
    with commands.opened(folder) as session:
        steps = sorted(
            int(file.stem[-6:]) for file in session.folders[name].glob("probe/step-*.json")
        )
        collected = None
        if collect is not None and collect.rollouts == "sample":
            problems = count_drawn(session.config, session.problems.train)
            collected = min(collect.prompts, problems)
        probes = [_probe(session, name, step, collect, collected) for step in steps]
    rates = [np.array(probe.pop("rates"), np.float64) for probe in probes]
    change = error = None
    if len(probes) > 1:
        change, error = _mean(rates[-1] - rates[0])
    return {
        "config": config.name,
        "policy": config.stage(name, Online).policy,
        "stage": name,
        "num_generations": RESPONSES,
        "collected": collected,
        "probes": probes,
        "change": change,
        "change_error": error,
    }


def _probe(
    session: Session, name: str, step: int, collect: Collect | None, collected: int | None
) -> dict[str, Any]:
    """Return the figures of the policy after so many steps; its rates too, of each prompt.
    collected: the prompts of the stage that collects, None where that samples none."""
    stage = session.config.stage(name, Online)
    file = session.folders[name] / "probe" / f"step-{step:06d}.parquet"
    value = storage.read_json(file.with_suffix(".json"))["value"]
    rates = np.array(value["offline"]["rates"], np.float64)
    figures = value["figures"]
    draws = draw_once(probed(session.problems.by_split[stage.probe.split], stage.probe.prompts))
    groups = grouped(read_rollouts(file), draws, RESPONSES)
    # All pairs on offer: which of them are kept, where there are more than max_pairs, is no matter
    # here.
    rule = dataclasses.replace(collect or Collect(), max_pairs=None, select="all")
    _, counts = choose_pairs(session, rule, draws, groups)
    pass_rate, error = _mean(rates)
    # Rewards that only rank tell no right from wrong: there the pair rule says which prompts'
    # responses differ.
    mixed = counts["mixed"] if pass_rate is None else int(np.sum((rates > 0) & (rates < 1)))
    return {
        "step": step,
        "prompts": len(draws),
        "rates": rates.tolist(),
        "pass_rate": pass_rate,
        "pass_rate_error": error,
        "by_right": [
            int(np.sum(np.round(rates * RESPONSES) == right)) for right in range(RESPONSES + 1)
        ],
        "mixed": mixed / len(draws),
        "pairs": counts["pairs"],
        "pairs_collected": _collected(counts["pairs"] / len(draws), collect, collected),
        "entropy": figures.get("entropy"),
        "clipped": figures["completions/clipped_ratio"],
        "prompt": value["offline"]["prompt"],
        "response": value["offline"]["length"],
    }


def _collected(pairs_per_prompt: float, collect: Collect | None, prompts: int | None) -> int | None:
    """Return the pairs that a collect stage gets if its prompts give as many as those of the
    probe."""
    if collect is None or prompts is None:
        return None
    pairs = round(pairs_per_prompt * prompts)
    return min(pairs, collect.max_pairs or pairs)


def _mean(values: np.ndarray) -> tuple[float | None, float | None]:
    """Compute the mean over prompts and its standard error, NaN left out; None where there are too
    few."""
    known = values[np.isfinite(values)]
    if len(known) < 2:
        return (float(known[0]) if len(known) else None), None
    return float(known.mean()), float(known.std(ddof=1) / np.sqrt(len(known)))


def show(content: Mapping[str, Any], screen: Screen) -> None:
    """Print a forecast: the policy at the start and after each probe's steps, and what the run will
    cost."""
    probes, collected = content["probes"], content["collected"]
    columns = [_column(probe, collected) for probe in probes]
    heads = ["at the start", *(f"after {probe['step']} steps" for probe in probes[1:])]
    rows = [[name, *map(itemgetter(name), columns)] for name in columns[0]]
    title = (
        f"{content['config']}: policy {content['policy']}, {probes[0]['prompts']} prompts x "
        f"{RESPONSES}"
    )
    screen.table(title, ["", *heads], rows)
    if content["change"] is not None:
        change = f"{_percent(content['change'], '+')} ± {_percent(content['change_error'])} points"
        of_what = "standard error over prompts; another seed is not in it"
        screen.say(f"{probes[-1]['step']} steps changed the pass rate by {change} ({of_what})")
    screen.say(f"hours and price: {content['plan'] or 'cannot tell: give --topology NAME'}")


def _column(probe: Mapping[str, Any], collected: int | None) -> dict[str, str]:
    """Return the figures of a probe as text. collected: prompts of the collect stage."""
    entropy = probe["entropy"]
    column = {
        "pass rate, %": f"{_percent(probe['pass_rate'])} ± {_percent(probe['pass_rate_error'])}",
        f"prompts by right answers, 0 to {RESPONSES}": " ".join(map(str, probe["by_right"])),
        "mixed prompts, %": _percent(probe["mixed"]),
        "pairs from these prompts": f"{probe['pairs']:,}",
    }
    if collected is not None:
        column[f"pairs from {collected:,} such prompts"] = f"{probe['pairs_collected']:,}"
    return {
        **column,
        "entropy, nats a token": "cannot tell" if entropy is None else f"{entropy:.3f}",
        "tokens of a prompt, of a response": f"{probe['prompt']:.0f}, {probe['response']:.0f}",
        "cut at max_new_tokens, %": _percent(probe["clipped"]),
    }


def _percent(value: float | None, sign: str = "") -> str:
    return "cannot tell" if value is None else f"{100 * value:{sign}.1f}"
