"""Calibrate the prediction of what offline DPO adds (g2d_jax/study/gain.py), and print its errors.

    python benchmarks/forecast.py                                 # from the repository's root; 20 seconds
    python benchmarks/forecast.py runs/study#sweep-k-demo         # read the study again, into results/forecast.csv

Prints the constants, and the errors in points of accuracy where a seed, the gentle setting or a task is left out of the
fit. The study of `chains` is there as the table of five seeds' means in docs/evidence-chains.md: its results are gone.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares
from scipy.special import expit, logit

from g2d_jax.config import Collect, Config
from g2d_jax.config_io import from_dict
from g2d_jax.config_load import resolve
from g2d_jax.forecast import BENDS, first_pace, learned, warmed
from g2d_jax.report.read import Policy, read_parquet, read_study
from g2d_jax.study.gain import SHIFT, Gain, tilted

# docs/evidence-chains.md: warm-up alone, after DPO, pairs of 1,024 prompts; at a learning rate of 1e-4.
CHAINS = (
    *((0.379, 0.638, 3768), (0.440, 0.665, 3812), (0.513, 0.700, 3808), (0.620, 0.728, 3614)),
    *((0.728, 0.760, 3013), (0.780, 0.773, 2422), (0.808, 0.794, 2136)),
)
# docs/evidence.md and docs/evidence-chains.md: accuracy after so many steps of GRPO, and the learning rate.
STEPS = (0, 5, 10, 20, 40, 80, 160, 240)
WARM_UPS = {
    "slips, 2e-5": (0.303, 0.337, 0.368, 0.430, 0.551, 0.720, 0.856, 0.905),
    "slips, 5e-5": (0.303, 0.383, 0.463, 0.602, 0.765, 0.881, 0.940, 0.957),
    "slips, 1.5e-4": (0.303, 0.533, 0.688, 0.825, 0.913, 0.954, 0.973, 0.982),
    "chains, 1e-4": (0.379, 0.440, 0.513, 0.620, 0.728, 0.780, 0.808),
}
FILE = Path(__file__).parent / "results" / "forecast.csv"
COEFFICIENTS, POWERS = np.geomspace(0.005, 0.2, 370), np.arange(0.3, 1.21, 0.05)


@dataclass(frozen=True)
class Point:
    """A DPO stage. rates: pass rates of its rollouts. updates: that `Gain` expects of them. rate: of learning, in units
    of 1e-4. before, after: accuracy on test problems."""

    seed: int
    rates: np.ndarray
    updates: float
    rate: float
    before: float
    after: float

    def predicted(self, coefficient: float, power: float) -> float:
        """The accuracy after the stage by the rule of gain.py."""
        return float(tilted(self.before, coefficient * self.updates * self.rate**power * (1 - self.before)))


def write(place: str) -> None:
    """Write the DPO stages of a study DIR#NAME: settings, accuracies, prompts by right answers of their rollouts."""
    root, _, name = place.partition("#")
    policies = [
        policy for group in read_study(root, name).swept for policy in group.policies if policy.gain is not None
    ]
    with FILE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["seed", "learning_rate", "before", "after", *(f"right_{n}" for n in range(9))])
        writer.writerows(map(_row, policies))


def _row(policy: Policy) -> list[float]:
    config = Config.of(from_dict(policy.run.config))
    offline = config.stages[policy.name]
    file = policy.run.stages[offline.preferences].folder / "informativeness" / "prompts.parquet"
    right = np.round(8 * read_parquet(file, ["pass_rate"])["pass_rate"].to_numpy())
    accuracies = [round(float(np.nanmean(p.answers("test").to_numpy())), 6) for p in (policy.parent, policy)]
    counts = [int(np.sum(right == n)) for n in range(9)]
    return [config.seed, offline.optimizer.learning_rate, *accuracies, *counts]


def read(gain: Gain) -> list[Point]:
    """Read the points that `write` wrote. gain: of their settings, but for the learning rate."""
    points = []
    for row in csv.DictReader(FILE.read_text("utf-8").splitlines()):
        rates = np.repeat(np.arange(9) / 8, [int(row[f"right_{n}"]) for n in range(9)])
        updates = float(gain.updates(rates).mean())
        rate, before, after = (float(row[name]) for name in ("learning_rate", "before", "after"))
        points.append(Point(int(row["seed"]), rates, updates, rate / 1e-4, before, after))
    return points


def reconstructed(accuracy: float, pairs: int) -> np.ndarray:
    """Pass rates [P] of 8 responses with a study's accuracy and its share of mixed prompts, a fourth of its pairs a
    prompt: those of prompts whose log-odds are normal."""
    normal = np.polynomial.hermite_e.hermegauss(41)
    weights, right = normal[1] / normal[1].sum(), np.arange(9)

    def shares(mean: float, spread: float) -> np.ndarray:
        p = 1 / (1 + np.exp(-(mean + spread * normal[0])))
        return np.array([math.comb(8, k) * (p**k * (1 - p) ** (8 - k)) @ weights for k in right])

    def apart(drawn: np.ndarray) -> float:
        return abs(drawn @ right / 8 - accuracy) + abs(1 - drawn[0] - drawn[8] - pairs / 4096)

    tried = (shares(mean, spread) for mean in np.arange(-2, 4, 0.05) for spread in np.arange(0, 5, 0.05))
    return np.repeat(right / 8, np.round(1e4 * min(tried, key=apart)).astype(int))


def fit(points: Sequence[Point], power: float | None = None) -> tuple[float, float]:
    """Fit coefficient and power (None: fitted too) by least squares of the accuracy after the stage."""

    def loss(pair: tuple[float, float]) -> float:
        return sum((point.predicted(*pair) - point.after) ** 2 for point in points)

    powers = POWERS if power is None else (power,)
    best = min(((c, p) for p in powers for c in COEFFICIENTS), key=loss)
    return float(best[0]), float(best[1])


def errors(points: Sequence[Point], fitted: tuple[float, float]) -> np.ndarray:
    """Predicted less measured, in points of accuracy."""
    return np.array([100 * (point.predicted(*fitted) - point.after) for point in points])


def show(what: str, points: Sequence[Point], fitted: tuple[float, float]) -> None:
    """Print the errors of a fit on points, beside those of a constant shift of 0.5 nats."""
    rule, constant = errors(points, fitted), np.array([100 * (tilted(p.before, 0.5) - p.after) for p in points])
    described = [f"mean |error| {np.abs(e).mean():4.1f}, worst {e[np.abs(e).argmax()]:+5.1f}" for e in (rule, constant)]
    print(f"{what:34s} {len(points):3d} points: {described[0]}; a constant 0.5 nats {described[1]}")


def ahead(points: Sequence[Point], gain: Gain, coefficient: float) -> np.ndarray:
    """Errors of values predicted from each seed's first policy, warmed by the nats that the others were, in points."""
    off = []
    for seed in {point.seed for point in points}:
        first, *others = sorted((p for p in points if p.seed == seed), key=lambda p: p.before)
        for point in others:
            nats = logit(point.before) - logit(first.before)
            rates = warmed(first.rates, nats)
            off.append(100 * (gain.values(rates, coefficient / SHIFT).mean() - point.after))
    return np.array(off)


def show_warm_ups() -> None:
    """Print pace and bend of each warm-up, with the worst error of its fit; and the steps that a forecast gives for its
    last accuracy, from its first 10 steps alone."""
    for name, accuracies in WARM_UPS.items():
        steps, nats = np.array(STEPS[: len(accuracies)]), logit(np.array(accuracies))

        def loss(pair: np.ndarray, steps: np.ndarray = steps, nats: np.ndarray = nats) -> np.ndarray:
            return np.asarray(expit(nats[0] + learned(steps, *np.exp(pair))) - expit(nats))

        fitted = least_squares(loss, [math.log(0.1), 0.0])
        pace, bend = np.exp(fitted.x)
        paces = [(first_pace((nats[2] - nats[0]) / 10, 10, bend), bend) for bend in BENDS]
        needed = [bend * np.expm1((nats[-1] - nats[0]) / bend) / first for first, bend in paces]
        print(
            f"{name:15s} pace {pace:.3f} nats a step, bend {bend:.2f}, worst {100 * abs(fitted.fun).max():.1f} points; "
            f"{steps[-1]} steps from its first 10: {min(needed):.0f} to {max(needed):.0f}"
        )


def main() -> None:
    """Print constants and errors."""
    for place in sys.argv[1:]:
        write(place)
    gain = Gain(1024, Collect(), Config.of(resolve("demo")).stages["dpo"])
    slips = read(gain)
    answers = [reconstructed(before, pairs) for before, _, pairs in CHAINS]
    chains = [
        Point(-1, rates, float(np.mean(gain.updates(rates))), 1.0, before, after)
        for rates, (before, after, _) in zip(answers, CHAINS, strict=True)
    ]
    strong, gentle = [p for p in slips if p.rate == 1], [p for p in slips if p.rate < 1]
    _, power = fit(slips)
    tasks = {"slips": (slips, fit(slips, power)), "chains": (chains, fit(chains, power))}
    for task, (points, fitted) in tasks.items():
        print(f"{task}: coefficient {fitted[0]:.4f}, power {fitted[1]:.2f}, {len(points)} points")
    ends = [fitted[0] for _, fitted in tasks.values()]
    centre, factor = float(np.sqrt(ends[0] * ends[1])), max(ends) / min(ends)
    outside = [
        100 * max(p.predicted(centre / factor, power) - p.after, p.after - p.predicted(centre * factor, power), 0.0)
        for p in slips + chains
    ]
    print(f"SHIFT {centre:.4f}  POWER {power:.2f}  FACTOR {factor:.2f}  SLACK {max(outside):.1f} points")
    for task, (points, fitted) in tasks.items():
        show(f"{task}, fitted on it", points, fitted)
    for seed in sorted({p.seed for p in slips}):
        left_out, others = ([p for p in slips if (p.seed == seed) is own] for own in (True, False))
        show(f"slips, seed {seed} left out", left_out, fit(others))
    show("slips, gentle left out, power 1", gentle, fit(strong, 1.0))
    show("slips left out (chains' fit)", slips, tasks["chains"][1])
    show("chains left out (slips' fit)", chains, tasks["slips"][1])
    show("slips, by the constants", slips, (centre, power))
    show("chains, by the constants", chains, (centre, power))
    for which, coefficient in (("its own fit", tasks["slips"][1][0]), ("the constants", centre)):
        off = ahead(strong, gain, coefficient)
        worst = off[np.abs(off).argmax()]
        print(f"slips, from K = 0, by {which}: mean |error| {np.abs(off).mean():.1f}, worst {worst:+.1f}")
    show_warm_ups()


if __name__ == "__main__":
    main()
