r"""The adaptive end of the warm-up: when an online step buys less accuracy per FLOP than offline training would.

The offline stages come once, at the end, from wherever the warm-up has got to, and cost F. What counts is the accuracy
after them, the value V, which gain.py predicts from the rates of correct answers to the probe's prompts. Before every
step the compute c that it costs has another use, to prolong the offline stages. With V' what a step adds to V and W
what prolonging them adds at the rate of their end, if it went on for F again (`Gain.prolonged`), a probe finds the
warm-up enough if

    V' + 2 s.e.(V') <= r                                                   r = c W / F

two such probes in a row end the warm-up. Both the two standard errors and V and W, by the low end of what gain.py
predicts, err on the side of more steps: those too many cost compute, and those too few cannot be made up for.

V' is the slope by least squares over the probes of the later half of the steps. Every probe samples the same prompts,
which no filter of the training prompts chose: how much prompts differ cancels, the error is that of the mean of the
prompts' own slopes, and a policy that does not change has slope 0 whatever is retired, refilled or left out. Too large
an error decides nothing: the stage goes on, and the error falls as the half grows longer.

What the rule cannot do: see docs/evidence-chains.md. It knows nothing of a policy that will begin to learn later, of
another learning rate, or of how well the prediction holds for offline stages unlike those of the studies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from g2d_jax.study.gain import FACTOR, Gain

PROBES_IN_A_ROW = 2  # probes in a row that end the warm-up; as many estimate the gain of offline training
MIN_PROBES = 3  # probes that a slope is taken over


@dataclass(frozen=True, slots=True)
class Forecast:
    """The measurements of a probe after `step` steps. Accuracies are fractions of 1, costs FLOPs.

    accuracy, gain, prolonged: mean over the last PROBES_IN_A_ROW probes, what offline training is predicted to add, and
    what twice as much of it would add beyond that, at the rate of its end. slope, slope_error: what one step adds to
    accuracy and gain together, and its standard error. step_flops, offline_flops: of one step, of all of offline
    training.
    """

    step: int
    accuracy: float
    gain: float
    prolonged: float
    slope: float
    slope_error: float
    step_flops: float
    offline_flops: float

    @property
    def enough(self) -> bool:
        """True if a step buys no more than longer offline training for its price, by two standard errors."""
        most = self.slope + 2 * self.slope_error
        return most <= self.prolonged * self.step_flops / self.offline_flops


def ends(forecasts: Sequence[Forecast], steps: Sequence[int]) -> bool:
    """Decide whether the warm-up ends with the last probe. steps: of all probes; one without a verdict has no forecast,
    and so is not enough."""
    last = steps[-PROBES_IN_A_ROW:]
    enough = {forecast.step for forecast in forecasts if forecast.enough}
    return len(last) == PROBES_IN_A_ROW and enough.issuperset(last)


def trend(steps: ArrayLike, values: ArrayLike) -> tuple[float, float]:
    """Compute the mean over prompts of the slope a step, by least squares, and its standard error over the prompts.

    steps: [T], at least MIN_PROBES; values: [T, P], of at least two prompts without a NaN; others are left out.
    """
    x, y = np.asarray(steps, np.float64), np.asarray(values, np.float64)
    y = y[:, ~np.isnan(y).any(axis=0)]
    x = x - x.mean()
    slopes = x @ y / (x @ x)
    return float(slopes.mean()), float(slopes.std(ddof=1)) / math.sqrt(len(slopes))


def window(steps: Sequence[int]) -> slice:
    """Select the probes that the slope is taken over, from their steps in order. It is the later half of the steps, but
    no fewer than MIN_PROBES if there are as many."""
    first = int(np.searchsorted(steps, steps[-1] / 2))
    return slice(max(min(first, len(steps) - MIN_PROBES), 0), len(steps))


def forecast(
    steps: Sequence[int], rates: ArrayLike, flops: ArrayLike, *, offline: Gain, offline_flops: float
) -> Forecast:
    """Compute the forecast of the last of T probes.

    steps: [T], ascending. rates: [T, P], of the same P prompts each time, NaN without a verdict; those of the window
    have one. flops: [T], spent on the stage up to each probe; a step costs what it did over the window.
    """
    part = window(steps)
    p, spent, x = (np.asarray(values, np.float64)[part] for values in (rates, flops, steps))
    values, last = offline.values(p, 1 / FACTOR), slice(-PROBES_IN_A_ROW, None)
    slope, error = trend(x, values)
    return Forecast(
        step=int(steps[-1]),
        accuracy=float(np.nanmean(p[last])),
        gain=float(np.nanmean((values - p)[last])),
        prolonged=float(offline.prolonged(p[last], 1 / FACTOR).mean()),
        slope=slope,
        slope_error=error,
        step_flops=float((spent[-1] - spent[0]) / (x[-1] - x[0])),
        offline_flops=offline_flops,
    )
