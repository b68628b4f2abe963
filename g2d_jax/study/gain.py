r"""The gain predicted of offline DPO, from answers of the policy that it would start from.

Training moves the log-odds of the accuracy by

    shift = SHIFT * updates * (learning_rate / 1e-4)^POWER * (1 - a)       in nats; a: share of correct responses

updates: batches of disjoint pairs that the answers give, min(right, wrong) of a prompt. The more is wrong, the more a
pair teaches; a policy that has become right and sure gives few pairs, and those it ranks right already. The value of a
policy is the accuracy after it, sigmoid(logit(a) + shift). One more nat multiplies the odds by e, as a DPO optimum does
with beta = 1 (Rafailov et al. 2023, arXiv 2305.18290, equation 4, for a reward of 0 or 1); what a stage of finite
length reaches of that is measured.

The constants are those that benchmarks/forecast.py finds on three studies; docs/forecast.md has their errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from g2d_jax.config import Collect, Offline

SHIFT, POWER = 0.0588, 0.70
FACTOR = 1.84
"""A task's largest coefficient over the smallest; SHIFT is their middle. A task left out of the fit was off by 1.6."""
SLACK = 0.04
"""Accuracy that 75 of the studies' 77 gains lay at most outside of what FACTOR allows: late DPO may take some away."""
PROLONGED = 0.7
"""Share of its mean that the last update of a stage adds: between the 1 of a shift that goes with updates, and the 0.4
of two offline runs from cold policies (of 1 and 2.4 times the compute, 25.8 and 30.9 points, docs/spectrum.md)."""
CALIBRATED = {
    "learning_rate": (1e-5, 1e-4),
    "batch_size": (32, 64),
    "updates": (0.0, 40.0),
    "parameters": (140_480, 3_155_712),
}
"""The range of the studies."""
HARM = (307_488, 5e-5)
"""Parameters and a learning rate above which, both, DPO took up to 46 points from a policy after 20 or 40 steps."""
FIXED = {
    **{"loss": "dpo", "loss_type": "sigmoid", "beta": 1.0, "label_smoothing": 0.0, "epochs": 1},
    **{"optimizer.kind": "adamw", "optimizer.schedule": "cosine", "collect.select": "all"},
    **{"collect.min_pass_rate": 0.0, "collect.max_pass_rate": 1.0, "collect.num_generations": 8},
    **{"collect.pairs_per_prompt": 4, "optimizer.weight_decay": 0.0, "shuffle": True},
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

    def updates(self, rates: np.ndarray) -> np.ndarray:
        """Estimate the stage's updates, as the mean over prompts [..., P].

        rates: of prompts [..., P], share of correct responses, NaN without a verdict.
        """
        right = rates * self.collect.num_generations
        pairs = np.minimum(np.minimum(right, self.collect.num_generations - right), self.collect.pairs_per_prompt)
        most = (self.collect.max_pairs or np.inf) / self.prompts
        capped = np.nanmean(pairs, axis=-1, keepdims=True) > most
        return (
            np.where(capped & ~np.isnan(pairs), most, pairs)
            * self.prompts
            * self.offline.epochs
            / self.offline.batch_size
        )

    def shift(self, rates: np.ndarray, factor: float = 1.0) -> np.ndarray:
        """Predict the nats by which the stage moves the log-odds of the accuracy: [...]. factor: times SHIFT."""
        return self._pace(factor) * np.nanmean(self.updates(rates), axis=-1) * (1 - np.nanmean(rates, axis=-1))

    def _pace(self, factor: float) -> float:
        return float(SHIFT * factor * (self.offline.optimizer.learning_rate / 1e-4) ** POWER)

    def values(self, rates: np.ndarray, factor: float = 1.0) -> np.ndarray:
        """Predict the accuracy after the stage, as the mean over prompts [..., P]; how they vary is its error.

        By the delta method: the prediction, and what each prompt's rate and updates add to it in the first order.
        """
        p, updates, pace = rates, self.updates(rates), self._pace(factor)
        a, mean = (np.nanmean(values, axis=-1, keepdims=True) for values in (p, updates))
        shift = pace * mean * (1 - a)
        odds = np.exp(shift)
        slope = odds / (a * odds + 1 - a) ** 2  # of the value over a, were the shift fixed
        own = (1 - a * shift) * (p - a) + pace * a * (1 - a) ** 2 * (updates - mean)
        return np.asarray(tilted(a, shift) + slope * own)

    def prolonged(self, rates: np.ndarray, factor: float = 1.0) -> np.ndarray:
        """Predict what as much compute again would add at the rate of the stage's end: [...]."""
        shift = self.shift(rates, factor)
        value = tilted(np.nanmean(rates, axis=-1), shift)
        return np.asarray(PROLONGED * shift * value * (1 - value))

    def interval(self, rates: np.ndarray) -> tuple[float, float]:
        """Predict the least and the most that the stage adds to the accuracy."""
        accuracy = float(np.nanmean(rates))
        low, high = (float(tilted(accuracy, self.shift(rates, factor))) for factor in (1 / FACTOR, FACTOR))
        return low - accuracy - SLACK, min(high + SLACK, 1.0) - accuracy

    def outside(self, rates: np.ndarray, parameters: int) -> Iterator[str]:
        """Yield a line for each setting, and for the number of updates, that no study had. parameters: trained ones."""
        for name, value in FIXED.items():
            given: Any = self.collect if name.startswith("collect.") else self.offline
            for part in name.removeprefix("collect.").split("."):
                given = getattr(given, part)
            if given != value:
                yield f"{name} is {given}, in the studies {value}"
        rate = self.offline.optimizer.learning_rate
        seen = {
            "learning_rate": rate,
            "batch_size": self.offline.batch_size,
            "updates": float(np.nanmean(self.updates(rates))),
            "parameters": parameters,
        }
        for name, (least, most) in CALIBRATED.items():
            if not least <= seen[name] <= most:
                yield f"{name} is {seen[name]:g}, in the studies {least:g} to {most:g}"
        if parameters > HARM[0] and rate > HARM[1]:
            yield f"learning_rate is {rate:g}: at 0.0001 DPO took up to 46 points from a model of 3,155,712 parameters"
