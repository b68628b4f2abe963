r"""When the warm-up has been enough: where what is gained in all is most, per FLOP spent in all.

After k online steps the whole recipe would end at V(k), the accuracy offline training is predicted to reach from there,
and would have cost C(k) = k * c + F: online steps, and what offline training costs whenever it comes. It ends at

    K* = argmax_k (V(k) - a) / C(k)                                     a: accuracy at the start

which is where another step adds as much per FLOP as the recipe as a whole does on average (the marginal value theorem
of Charnov 1976, Theoretical Population Biology 9, 129-136): before it online steps are the better buy, after it they
are the worse one. V is measured on the warm-up's own rollouts, at no extra cost:

    V_k = mean over the prompts of step k of sigmoid(logit(p) + shift)       p: share of correct responses

A DPO optimum has the odds of a correct response multiplied by e^(1 / beta) (Rafailov et al. 2023, arXiv 2305.18290,
equation 4, for a reward of 0 or 1); what a stage of finite length reaches of this is `shift`, in nats. Prompts of which
all responses are correct, or none, give no pair, and by this formula no gain: the more informative the rollouts, the
larger V - mean p. Single steps are noisy, so V is a saturating curve fitted to all steps so far.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

SCALES = 48  # time constants that are tried, evenly on a logarithmic scale


@dataclass(frozen=True, slots=True)
class Saturation:
    """end + (start - end) * exp(-k / scale): where a curve comes from, where it goes, and in how many steps."""

    start: float
    end: float
    scale: float

    def at(self, steps: ArrayLike) -> NDArray[np.float64]:
        """The curve's value after so many steps, any shape."""
        return self.end + (self.start - self.end) * np.exp(-np.asarray(steps, np.float64) / self.scale)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the rule sees at one probe. Accuracies are fractions of 1, costs FLOPs.

    start: accuracy of the policy the stage starts from. now, offline: fitted accuracy of the policy now, and what
    offline training is predicted to reach from it. best: K*, the number of steps that gains most per FLOP.
    step_flops: of one online step. offline_flops: of collecting and training offline afterwards.
    """

    step: int
    start: float
    now: float
    offline: float
    best: int
    step_flops: float
    offline_flops: float

    @property
    def enough(self) -> bool:
        """Whether the best number of steps is reached."""
        return self.best <= self.step


def tilted(rates: ArrayLike, shift: float) -> float:
    """Mean accuracy when the odds of a correct response are e^shift times as high. rates: [N] in [0, 1], NaN left out.

    NaN without any rate. Raises ValueError for rates outside [0, 1].
    """
    known = np.asarray(rates, np.float64)
    known = known[~np.isnan(known)]
    if ((known < 0) | (known > 1)).any():
        raise ValueError(f"rates are shares between 0 and 1, got {known.min()} to {known.max()}")
    if not known.size:
        return math.nan
    odds = math.exp(shift)
    return float(np.mean(known * odds / (known * odds + 1 - known)))


def fit_saturation(values: ArrayLike, limit: int) -> Saturation:
    """The saturating curve nearest (least squares) to values [K] of steps 0 … K - 1, NaN left out.

    limit: the most steps the curve is for; time constants from 1 step to four times the limit are tried, and for each
    the best ends in closed form, kept within [0, 1]. Raises ValueError for fewer than three values.
    """
    y = np.asarray(values, np.float64)
    x = np.flatnonzero(~np.isnan(y)).astype(np.float64)
    y = y[~np.isnan(y)]
    if len(y) < 3:
        raise ValueError(f"a curve needs at least three steps with a value, there are {len(y)}")
    found = []
    for scale in np.geomspace(1.0, 4.0 * max(limit, 1), SCALES):
        decay = np.exp(-x / scale)
        basis = np.stack([decay, 1.0 - decay], axis=1)  # multiplied with start and end
        start, end = np.clip(np.linalg.lstsq(basis, y, rcond=None)[0], 0.0, 1.0)
        curve = Saturation(float(start), float(end), float(scale))
        found.append((float(np.square(curve.at(x) - y).sum()), curve))
    return min(found, key=lambda pair: pair[0])[1]


def best_steps(curve: Saturation, start: float, step_flops: float, offline_flops: float, limit: int) -> int:
    """K*: the number of steps in 0 … limit with the highest (curve - start) per FLOP; the first of equal ones."""
    steps = np.arange(limit + 1)
    gained = curve.at(steps) - start
    return int(np.argmax(gained / (steps * step_flops + offline_flops)))


def forecast(
    accuracies: ArrayLike, reachable: ArrayLike, *, step_flops: float, offline_flops: float, limit: int
) -> Forecast:
    """What the rule sees after K steps.

    accuracies, reachable: [K], for each step the mean of its prompts' rates, and their `tilted` mean; those of step k
    were drawn from the policy after k steps; NaN for a step without a verdict. limit: the most steps there may be.
    Raises ValueError for fewer than three steps with a verdict, and unless step_flops >= 0 and offline_flops > 0.
    """
    if step_flops < 0 or offline_flops <= 0:
        raise ValueError(f"costs must be positive, got {step_flops} a step and {offline_flops} offline")
    online, offline = fit_saturation(accuracies, limit), fit_saturation(reachable, limit)
    step = len(np.asarray(accuracies))
    return Forecast(
        step=step,
        start=online.start,
        now=float(online.at(step)),
        offline=float(offline.at(step)),
        best=best_steps(offline, online.start, step_flops, offline_flops, limit),
        step_flops=step_flops,
        offline_flops=offline_flops,
    )
