r"""The gain predicted of offline DPO, from answers of the policy that it would start from.

Training moves the mean log-odds of a correct response by

    shift = SHIFT * updates * (learning_rate / 1e-4)^POWER * (1 - a)       in nats; a: share of correct responses

updates: batches of the pairs that the answers give. The more is wrong, the more a pair teaches; a policy that has become
right and sure gives few pairs, and those it ranks right already. The value of a policy is the accuracy after it,
sigmoid(logit(a) + shift). One more nat multiplies the odds by e, as a DPO optimum does with beta = 1 (Rafailov et al.
2023, arXiv 2305.18290, equation 4, for a reward of 0 or 1); what a stage of finite length reaches of that is measured.

The constants are those that benchmarks/forecast.py finds on two studies; docs/forecast.md has their errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from g2d_jax.config import Collect, Offline

SHIFT, POWER = 0.040, 0.7
FACTOR = 2.4
"""How many times too large or small SHIFT was for a task that it was not fitted on."""
SLACK = 0.02
"""Accuracy by which measured gains lay outside of what FACTOR allows: late in training DPO may take some away."""
CALIBRATED = {"learning_rate": (2e-5, 1e-4), "updates": (16.0, 64.0), "parameters": (1.2e5, 3.2e5)}
"""The range of the studies' settings. updates: if every prompt gave all pairs that it may."""
FIXED = {
    **{"loss": "dpo", "loss_type": "sigmoid", "beta": 1.0, "label_smoothing": 0.0, "epochs": 1, "batch_size": 64},
    **{"optimizer.kind": "adamw", "optimizer.schedule": "cosine", "collect.select": "all"},
    **{"collect.min_pass_rate": 0.0, "collect.max_pass_rate": 1.0, "collect.num_generations": 8},
}
"""Settings that all of the studies had in common."""


def tilted(rates: ArrayLike, shift: ArrayLike) -> np.ndarray:
    """Return the rates of correct responses when their odds are e^shift times as high. rates: in [0, 1]; NaN stays."""
    p, odds = np.asarray(rates, np.float64), np.exp(shift)
    return np.asarray(p * odds / (p * odds + 1 - p))


@dataclass(frozen=True)
class Gain:
    """What an offline stage's settings say of its gain. prompts: that pairs are made for."""

    prompts: int
    collect: Collect
    offline: Offline

    def updates(self, rates: ArrayLike) -> float:
        """Estimate the stage's updates. rates: of prompts [P], share of correct responses, NaN without a verdict."""
        right = np.asarray(rates, np.float64) * self.collect.num_generations
        pairs = np.minimum(np.minimum(right, self.collect.num_generations - right), self.collect.pairs_per_prompt)
        made = self.prompts * float(np.nanmean(pairs))
        return min(made, self.collect.max_pairs or made) * self.offline.epochs / self.offline.batch_size

    def value(self, rates: ArrayLike, factor: float = 1.0) -> float:
        """Predict the accuracy after the stage. factor: times SHIFT."""
        accuracy = float(np.nanmean(rates))
        pace = SHIFT * factor * (self.offline.optimizer.learning_rate / 1e-4) ** POWER
        return float(tilted(accuracy, pace * self.updates(rates) * (1 - accuracy)))

    def interval(self, rates: ArrayLike) -> tuple[float, float]:
        """Predict the least and the most that the stage adds to the accuracy."""
        low, high = (self.value(rates, factor) - float(np.nanmean(rates)) for factor in (1 / FACTOR, FACTOR))
        return low - SLACK, high + SLACK

    def outside(self, parameters: int | None = None) -> Iterator[str]:
        """Yield a line for each setting that no study had. parameters: of the model, None: not asked."""
        for name, value in FIXED.items():
            given = self.collect if name.startswith("collect.") else self.offline
            for part in name.removeprefix("collect.").split("."):
                given = getattr(given, part)
            if given != value:
                yield f"{name} is {given}, in the studies {value}"
        most = self.prompts * self.collect.pairs_per_prompt
        updates = min(most, self.collect.max_pairs or most) / self.offline.batch_size
        seen = {"learning_rate": self.offline.optimizer.learning_rate, "updates": updates, "parameters": parameters}
        for name, (least, most_seen) in CALIBRATED.items():
            if (figure := seen[name]) is not None and not least <= figure <= most_seen:
                yield f"{name} is {figure:g}, in the studies {least:g} to {most_seen:g}"


def pseudo_values(function: Callable[[np.ndarray], float], rates: ArrayLike) -> np.ndarray:
    """Compute a jackknife's pseudo-value of each prompt (Tukey 1958): their mean estimates the function of all prompts,
    and how they vary is its error. rates: [P]; NaN stays NaN, and is left out of the function's argument."""
    p = np.asarray(rates, np.float64)
    judged = np.flatnonzero(~np.isnan(p))
    values = np.full(len(p), np.nan)
    whole = function(p[judged])
    values[judged] = [whole + (len(judged) - 1) * (whole - function(p[np.delete(judged, i)])) for i in range(len(judged))]
    return values
