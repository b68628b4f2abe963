r"""When the warm-up has been enough: when online steps add less accuracy per FLOP than offline training would.

Before every step there are two ways to spend compute: one more online step, or the offline stages, which come once, at
the end, from wherever the warm-up has got to. With a the accuracy of the policy now, a' what a step adds to it, c what
a step costs, V what offline training is predicted to reach from here and F what it will cost, the warm-up ends when

    (a' + s.e.) / c  <=  (V - a) / F

so that even one standard error above what was measured, online steps are the worse buy. All is measured on the
warm-up's own rollouts, at no extra cost. a' is the slope of the accuracy over the later half of the steps, by least
squares. V - a is taken from how informative the latest rollouts are:

    V = mean over prompts of sigmoid(logit(p) + shift)                     p: share of the prompt's responses correct

A DPO optimum has the odds of a correct response multiplied by e^(1 / beta) (Rafailov et al. 2023, arXiv 2305.18290,
equation 4, for a reward of 0 or 1); what a stage of finite length reaches of this is `shift`, in nats. Prompts of which
all responses are correct, or none, give no pair, and by this formula no gain: as a policy grows confident, right or
wrong, V - a goes to 0, and nothing is left for offline training to add.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

RECENT = 10  # steps whose rollouts tell what offline training would add; the least that a slope is taken over


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the rule sees after `step` steps. Accuracies are fractions of 1, costs FLOPs.

    accuracy: mean over the last RECENT steps. slope, slope_error: what one step adds, and its standard error. gain:
    what offline training is predicted to add. step_flops, offline_flops: of one step, of all of offline training.
    """

    step: int
    accuracy: float
    slope: float
    slope_error: float
    gain: float
    step_flops: float
    offline_flops: float

    @property
    def enough(self) -> bool:
        """Whether the warm-up ends here."""
        return (self.slope + self.slope_error) / self.step_flops <= self.gain / self.offline_flops


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


def trend(values: ArrayLike) -> tuple[float, float]:
    """Slope a step of values [K] by least squares, and its standard error from the residuals; NaN are left out.

    Raises ValueError for fewer than three values.
    """
    y = np.asarray(values, np.float64)
    x = np.flatnonzero(~np.isnan(y)).astype(np.float64)
    y = y[~np.isnan(y)]
    if len(y) < 3:
        raise ValueError(f"a slope with an error needs at least three steps with a verdict, there are {len(y)}")
    x -= x.mean()
    slope = float(x @ y / (x @ x))
    residual = y - y.mean() - slope * x
    return slope, math.sqrt(float(residual @ residual) / (len(y) - 2) / float(x @ x))


def window(steps: int) -> int:
    """How many of the latest steps the slope is taken over: the later half, at least RECENT, at most all."""
    return min(max(steps - steps // 2, RECENT), steps)


def forecast(accuracies: ArrayLike, reachable: ArrayLike, *, step_flops: float, offline_flops: float) -> Forecast:
    """What the rule sees after K steps.

    accuracies, reachable: [K], for each step the mean of its prompts' rates, and their `tilted` mean; NaN for a step
    without a verdict. step_flops: of one step now. Raises ValueError unless at least three of the last `window(K)`
    steps have a verdict, and unless the costs are positive.
    """
    if not (step_flops > 0 and offline_flops > 0):
        raise ValueError(f"costs must be positive, got {step_flops} a step and {offline_flops} offline")
    now, best = np.asarray(accuracies, np.float64), np.asarray(reachable, np.float64)
    slope, error = trend(now[-window(len(now)) :])
    gains = (best - now)[-RECENT:]
    gains = gains[~np.isnan(gains)]
    recent = now[-RECENT:][~np.isnan(now[-RECENT:])]
    return Forecast(
        step=len(now),
        accuracy=float(recent.mean()) if recent.size else math.nan,
        slope=slope,
        slope_error=error,
        gain=float(gains.mean()) if gains.size else 0.0,
        step_flops=step_flops,
        offline_flops=offline_flops,
    )
