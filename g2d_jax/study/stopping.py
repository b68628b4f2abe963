r"""The adaptive end of the warm-up: when an online step buys less accuracy per FLOP than offline training would.

Before every step there are two ways to spend compute: one more online step, or the offline stages, which come once, at
the end, from wherever the warm-up has got to. What counts is the accuracy after them, the value

    V = mean over prompts of sigmoid(logit(p) + shift)                     p: share of the prompt's responses correct

a = mean p now, and what the offline stages are predicted to add, V - a. A DPO optimum has the odds of a correct
response multiplied by e^(1 / beta) (Rafailov et al. 2023, arXiv 2305.18290, equation 4, for a reward of 0 or 1); what a
stage of finite length reaches of this is `shift`, in nats. A prompt of which all responses are correct, or none, gives
no pair, and by this formula no gain. With V' what a step adds to V, c what a step costs and F what the offline stages
will cost, a probe finds the warm-up enough if

    V' <= r    and    s.e.(V') <= r                                        r = c (V - a) / F

r being what offline training buys for the price of a step; two such probes in a row end the warm-up.

V' is the slope by least squares over the probes of the later half of the steps. Every probe samples the same prompts,
which no filter of the training prompts chose: how much prompts differ cancels, the error is that of the mean of the
prompts' own slopes, and a policy that does not change has slope 0 whatever is retired, refilled or left out. An error
above r decides nothing: the stage goes on, and the error falls as the half grows longer.

What the rule cannot do: see docs/evidence-chains.md. It knows nothing of a policy that will begin to learn later, of
another learning rate, or of how well `shift` holds for the offline stages at hand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

PROBES_IN_A_ROW = 2  # probes in a row that end the warm-up; as many estimate the gain of offline training
MIN_PROBES = 3  # probes that a slope is taken over


@dataclass(frozen=True, slots=True)
class Forecast:
    """The measurements of a probe after `step` steps. Accuracies are fractions of 1, costs FLOPs.

    accuracy, gain: mean over the last PROBES_IN_A_ROW probes, and what offline training is predicted to add. slope,
    slope_error: what one step adds to both together, and its standard error. step_flops, offline_flops: of one step, of
    all of offline training.
    """

    step: int
    accuracy: float
    gain: float
    slope: float
    slope_error: float
    step_flops: float
    offline_flops: float

    @property
    def enough(self) -> bool:
        """True if a step buys no more than offline training does for its price, and the error is small enough."""
        return max(self.slope, self.slope_error) <= self.gain * self.step_flops / self.offline_flops


def ends(forecasts: Sequence[Forecast], steps: Sequence[int]) -> bool:
    """Decide whether the warm-up ends with the last probe. steps: of all probes; one without a verdict has no forecast,
    and so is not enough."""
    last = steps[-PROBES_IN_A_ROW:]
    enough = {forecast.step for forecast in forecasts if forecast.enough}
    return len(last) == PROBES_IN_A_ROW and enough.issuperset(last)


def tilted(rates: ArrayLike, shift: float) -> np.ndarray:
    """Return the rates of correct responses when their odds are e^shift times as high. rates: in [0, 1]; NaN stays."""
    p = np.asarray(rates, np.float64)
    odds = math.exp(shift)
    return p * odds / (p * odds + 1 - p)


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
    steps: Sequence[int], rates: ArrayLike, flops: ArrayLike, *, shift: float, offline_flops: float
) -> Forecast:
    """Compute the forecast of the last of T probes.

    steps: [T], ascending. rates: [T, P], of the same P prompts each time, NaN without a verdict. flops: [T], spent on
    the stage up to each probe; a step costs what it did over the window.
    """
    p, spent, part = np.asarray(rates, np.float64), np.asarray(flops, np.float64), window(steps)
    values = tilted(p, shift)
    x = np.asarray(steps, np.float64)[part]
    slope, error = trend(x, values[part])
    step_flops = float((spent[-1] - spent[part][0]) / (x[-1] - x[0]))
    return Forecast(
        step=int(steps[-1]),
        accuracy=float(np.nanmean(p[-PROBES_IN_A_ROW:])),
        gain=float(np.nanmean((values - p)[-PROBES_IN_A_ROW:])),
        slope=slope,
        slope_error=error,
        step_flops=step_flops,
        offline_flops=offline_flops,
    )
