"""Calibrate the prediction of what offline DPO adds (g2d_jax/study/gain.py), and print its errors.

    python benchmarks/forecast.py                                 # half a minute

Prints the constants, and the errors in points of accuracy where a seed, the gentle setting or a task is left out of the
fit, and on studies that were run after it. They are read from benchmarks/results/; `chains` is the table of five seeds'
means in docs/evidence-chains.md: its results are gone.
"""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from results import unpack
from scipy.optimize import least_squares
from scipy.special import expit, logit

from g2d_jax.config import Collect, Config
from g2d_jax.config_io import from_dict
from g2d_jax.config_load import resolve
from g2d_jax.forecast import BENDS, first_pace, learned, warmed
from g2d_jax.report.read import Policy, read_study
from g2d_jax.study.gain import SHIFT, Gain, tilted

STUDIES = {"slips": ("study-demo", "sweep-k-demo"), "digits": ("middle", "sweep-k-middle")}
"""Task -> archive in benchmarks/results/ and name of its study."""
CHECKS = {"slips, seeds 5 to 10": ("fresh-demo", "sweep-k-demo"), "digits, rates": ("middle-dpo", "middle")}
"""Studies that SHIFT, POWER, FACTOR and SLACK were not fitted on."""
# docs/evidence-chains.md: warm-up alone, after DPO, pairs of 1,024 prompts; at a learning rate of 1e-4.
CHAINS = (
    *((0.379, 0.638, 3768), (0.440, 0.665, 3812), (0.513, 0.700, 3808), (0.620, 0.728, 3614)),
    *((0.728, 0.760, 3013), (0.780, 0.773, 2422), (0.808, 0.794, 2136)),
)
# docs/evidence.md and the others' pages: accuracy after so many steps of GRPO, and the learning rate.
STEPS = (0, 5, 10, 20, 40, 80, 160, 240)
WARM_UPS = {
    "slips, 2e-5": (STEPS, (0.303, 0.337, 0.368, 0.430, 0.551, 0.720, 0.856, 0.905)),
    "slips, 5e-5": (STEPS, (0.303, 0.383, 0.463, 0.602, 0.765, 0.881, 0.940, 0.957)),
    "slips, 1.5e-4": (STEPS, (0.303, 0.533, 0.688, 0.825, 0.913, 0.954, 0.973, 0.982)),
    "chains, 1e-4": (STEPS[:-1], (0.379, 0.440, 0.513, 0.620, 0.728, 0.780, 0.808)),
    "digits, 2e-5": ((*STEPS[:5], 60), (0.391, 0.421, 0.463, 0.553, 0.724, 0.833)),
    "digits, 5e-5": ((*STEPS[:5], 60), (0.391, 0.461, 0.542, 0.694, 0.849, 0.886)),
    "digits, 1e-4": ((*STEPS[:5], 60), (0.391, 0.517, 0.623, 0.752, 0.849, 0.866)),
}
COEFFICIENTS, POWERS = np.geomspace(0.005, 0.2, 370), np.arange(0.3, 1.21, 0.05)


@dataclass(frozen=True)
class Point:
    """A DPO stage. k: steps of warm-up before it. rates: pass rates of its rollouts. gain: by its settings. before,
    after: accuracy on test problems."""

    seed: int
    k: float
    rates: np.ndarray
    gain: Gain
    before: float
    after: float

    @functools.cached_property
    def updates(self) -> float:
        """The updates that `gain` expects of the rates."""
        return float(self.gain.updates(self.rates).mean())

    @property
    def rate(self) -> float:
        """The learning rate, in units of 1e-4."""
        return self.gain.offline.optimizer.learning_rate / 1e-4

    def predicted(self, coefficient: float, power: float) -> float:
        """The accuracy after the stage by the rule of gain.py."""
        return float(tilted(self.before, coefficient * self.updates * self.rate**power * (1 - self.before)))


def read_stages(archive: str, name: str) -> list[Point]:
    """Read the DPO stages of a study from its archive."""
    with tempfile.TemporaryDirectory() as folder:
        unpack(Path(__file__).parent / "results" / f"{archive}.tar.xz", Path(folder))
        groups = read_study(folder, name).swept
        return [_point(policy) for group in groups for policy in group.policies if policy.gain is not None]


def _point(policy: Policy) -> Point:
    config, collected = Config.of(from_dict(policy.run.config, finished=True)), policy.pairs_from
    offline = config.stages[policy.name]
    collect = config.stages[offline.preferences]
    before, after = (float(np.nanmean(p.answers("test").to_numpy())) for p in (policy.parent, policy))
    mixed = collected["counts"]["mixed"] / collected["counts"]["prompts"]
    rates = reconstructed(collected["result"]["informativeness"]["pass_rate"], mixed)
    return Point(config.seed, policy.steps, rates, Gain(collect.prompts, collect, offline), before, after)


def chains() -> list[Point]:
    """Make the points of `CHAINS`; each pair of its 1,024 prompts x 4 is of a mixed prompt."""
    gain = Gain(1024, Collect(), Config.of(resolve("demo")).stages["dpo"])
    return [
        Point(-1, k, reconstructed(before, pairs / 4096), gain, before, after)
        for k, (before, after, pairs) in zip(STEPS, CHAINS, strict=False)
    ]


@functools.cache
def reconstructed(accuracy: float, mixed: float) -> np.ndarray:
    """Pass rates [P] of 8 responses with an accuracy and a share of mixed prompts: those of prompts whose log-odds are
    normal."""
    shares, right = normal_shares(), np.arange(9)
    apart = np.abs(shares @ right / 8 - accuracy) + np.abs(1 - shares[:, 0] - shares[:, 8] - mixed)
    return np.repeat(right / 8, np.round(1e4 * shares[apart.argmin()]).astype(int))


@functools.cache
def normal_shares() -> np.ndarray:
    """Shares of prompts with 0 to 8 right responses, [12,000, 9], for log-odds of many means and spreads."""
    z, weights = np.polynomial.hermite_e.hermegauss(41)
    means, spreads = np.meshgrid(np.arange(-2, 4, 0.05), np.arange(0, 5, 0.05), indexing="ij")
    p = expit(means[..., None] + spreads[..., None] * z)
    shares = [math.comb(8, k) * (p**k * (1 - p) ** (8 - k)) @ weights for k in range(9)]
    return np.stack(shares, axis=-1).reshape(-1, 9) / weights.sum()


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


def ahead(points: Sequence[Point], coefficient: float) -> np.ndarray:
    """Errors of values predicted from each seed's first policy, warmed by the nats that the others were, in points."""
    off = []
    for first in (point for point in points if point.k == 0):
        for point in (p for p in points if p.seed == first.seed and p.k and p.rate == first.rate):
            rates = warmed(first.rates, logit(point.before) - logit(first.before))
            off.append(100 * (point.gain.values(rates, coefficient / SHIFT).mean() - point.after))
    return np.array(off)


def show_warm_ups() -> None:
    """Print pace and bend of each warm-up, with the worst error of its fit; and the steps that a forecast gives for its
    last accuracy, from its first 10 steps alone."""
    for name, (at, accuracies) in WARM_UPS.items():
        steps, nats = np.array(at), logit(np.array(accuracies))

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
    tasks = {"slips": read_stages(*STUDIES["slips"]), "chains": chains(), "digits": read_stages(*STUDIES["digits"])}
    _, power = fit(tasks["slips"])
    fits = {task: fit(points, power)[0] for task, points in tasks.items()}
    for task, points in tasks.items():
        print(f"{task}: coefficient {fits[task]:.4f}, power {power:.2f}, {len(points)} points")
    centre, factor = middle_and_ratio(fits.values())

    def excesses(points: Iterable[Point]) -> list[float]:
        """Sort by how many points the measured accuracies lie outside of what the factor allows."""
        return sorted(
            100 * max(p.predicted(centre / factor, power) - p.after, p.after - p.predicted(centre * factor, power), 0.0)
            for p in points
        )

    outside = excesses(point for points in tasks.values() for point in points)
    slack = math.ceil(outside[int(0.95 * len(outside))])
    print(f"SHIFT {centre:.4f}  POWER {power:.2f}  FACTOR {factor:.2f}  SLACK {slack} points")
    within = sum(points <= slack for points in outside)
    print(f"{within} of {len(outside)} stages within, all with {outside[-1]:.1f} points")
    for task, points in tasks.items():
        show(f"{task}, fitted on it", points, (fits[task], power))
    slips = tasks["slips"]
    for seed in range(5):
        left_out, others = ([p for p in slips if (p.seed == seed) is own] for own in (True, False))
        show(f"slips, seed {seed} left out", left_out, fit(others))
    strong, gentle = [p for p in slips if p.rate == 1], [p for p in slips if p.rate < 1]
    show("slips, gentle left out, power 1", gentle, fit(strong, 1.0))
    for task, points in tasks.items():
        show(f"{task} left out", points, (middle_and_ratio(fits[other] for other in tasks if other != task)[0], power))
    for task, points in tasks.items():
        show(f"{task}, by the constants", points, (centre, power))
    checks = {name: read_stages(*study) for name, study in CHECKS.items()}
    for check, points in checks.items():
        for rate in sorted({point.rate for point in points}):
            same = [point for point in points if point.rate == rate]
            show(f"{check}, DPO at {rate * 1e-4:g}", same, (centre, power))
            print(f"{sum(value <= slack for value in excesses(same))} of {len(same)} within")
    show("slips, seeds 5 to 10, by slips' fit", checks["slips, seeds 5 to 10"], (fits["slips"], power))
    for task in STUDIES:
        for which, coefficient in (("its own fit", fits[task]), ("the constants", centre)):
            off = ahead(tasks[task], coefficient)
            worst = off[np.abs(off).argmax()]
            print(f"{task}, from K = 0, by {which}: mean |error| {np.abs(off).mean():.1f}, worst {worst:+.1f}")
    show_warm_ups()


def middle_and_ratio(fits: Iterable[float]) -> tuple[float, float]:
    """Return the middle of the coefficients, by ratios, and the ratio of the largest to the smallest."""
    ends = sorted(fits)
    return math.sqrt(ends[0] * ends[-1]), ends[-1] / ends[0]


if __name__ == "__main__":
    main()
