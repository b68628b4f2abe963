"""The settings of the DPO loss, which stages of two kinds have."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from g2d_jax.config.section import Bounds, Issue, NotNegativeFloat, Section, warning
from g2d_jax.config.stages.stage import unread

DPOLossType = Literal["sigmoid", "sigmoid_norm", "ipo", "simpo"]
DPONormalizer = Literal["pairs", "prompts"]


class DPOLoss(Section):
    """The DPO loss, of a stage of either kind."""

    loss_type: DPOLossType = "sigmoid"
    beta: Annotated[float, Bounds(above=0, below=math.inf)] = 0.1
    # what beta times the gap per token is to exceed, of "simpo"
    simpo_gamma: NotNegativeFloat = 0.5

    @property
    def compares(self) -> bool:
        """True if the loss compares the policy with a reference."""
        return self.loss_type != "simpo"

    def loss_issues(self) -> Iterator[Issue]:
        """Yield settings that the loss does not have, and a beta for another kind of loss."""
        if self.loss_type in ("sigmoid_norm", "simpo") and self.beta < 1:
            yield warning(
                "beta",
                f"is {self.beta:g}, a value for log-probabilities summed over tokens, and "
                f"{self.loss_type!r} takes their means",
                "try 2 to 2.5 as SimPO (arXiv 2405.14734), 5 as Tulu 3 for DPO normalised by "
                "length (arXiv 2411.15124)",
            )
        if self.loss_type != "simpo" and self.simpo_gamma != DPOLoss().simpo_gamma:
            yield unread("simpo_gamma", f"loss_type={self.loss_type!r}")


class OnlineDPO(DPOLoss):
    """The DPO loss of an online stage."""

    normalizer: DPONormalizer = "pairs"  # or "prompts": all of the batch, those without a pair too
    nll_coef: NotNegativeFloat = 0.0  # times the mean over the chosen response's tokens
