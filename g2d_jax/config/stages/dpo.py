"""The settings of the DPO loss, in offline and online stages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from g2d_jax.config.section import Bounds, Issue, NotNegativeFloat, Section, warning
from g2d_jax.config.stages.stage import unread

DPOLossType = Literal["sigmoid", "sigmoid_norm", "ipo", "simpo"]
DPONormalizer = Literal["pairs", "prompts"]


class DPOLoss(Section):
    """The DPO loss."""

    loss_type: DPOLossType = "sigmoid"
    """`sigmoid` is DPO, `sigmoid_norm` divides log-probabilities by length; docs/losses.md has
    all."""
    beta: Annotated[float, Bounds(above=0, below=math.inf)] = 0.1
    """How strongly the reference holds the policy."""
    simpo_gamma: NotNegativeFloat = 0.5
    """The margin of SimPO for beta times the gap per token. See docs/losses.md#simpo."""

    @property
    def compares(self) -> bool:
        """True if the loss compares the policy with a reference."""
        return self.loss_type != "simpo"

    def loss_issues(self) -> Iterator[Issue]:
        """Yield settings that the loss ignores, and a beta meant for another loss."""
        if self.loss_type in ("sigmoid_norm", "simpo") and self.beta < 1:
            yield warning(
                "beta",
                f"is {self.beta:g}, a value for log-probabilities summed over tokens, but "
                f"{self.loss_type!r} uses their mean",
                "try 2 to 2.5 as in SimPO (arXiv 2405.14734), or 5 as in Tulu 3 for DPO over "
                "length (arXiv 2411.15124)",
            )
        if self.loss_type != "simpo" and self.simpo_gamma != DPOLoss().simpo_gamma:
            yield unread("simpo_gamma", f"loss_type={self.loss_type!r}")


class OnlineDPO(DPOLoss):
    """The loss `dpo` or `group_dpo`."""

    normalizer: DPONormalizer = "pairs"
    """The sum is divided by the prompts with a pair, or by all `prompts` of the batch (arXiv
    2506.21495)."""
    nll_coef: NotNegativeFloat = 0.0
    """Coefficient of the chosen responses' negative log-likelihood, a mean over tokens."""
