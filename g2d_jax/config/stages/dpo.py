"""The settings of the DPO loss, which stages of two kinds have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from g2d_jax.config.section import Bounds, FieldError, NotNegativeFloat, Section

DPOLossType = Literal["sigmoid", "sigmoid_norm", "ipo", "simpo"]
DPONormalizer = Literal["pairs", "prompts"]


class DPOLoss(Section):
    """The DPO loss, of a stage of either kind."""

    loss_type: DPOLossType = "sigmoid"
    beta: Annotated[float, Bounds(above=0)] = 0.1
    label_smoothing: Annotated[float, Bounds(least=0, below=0.5)] = 0.0
    # what beta times the gap per token is to exceed, of "simpo"
    simpo_gamma: NotNegativeFloat = 0.5

    @property
    def compares(self) -> bool:
        """True if the loss compares the policy with a reference."""
        return self.loss_type != "simpo"

    @property
    def idle(self) -> tuple[str, ...]:
        """The settings that are set and that the loss does not read."""
        if self.loss_type != "simpo" and self.simpo_gamma != DPOLoss().simpo_gamma:
            return ("simpo_gamma",)
        return ()

    def conflicts(self) -> Iterator[ValueError]:
        """Refuse label smoothing where the loss has none."""
        yield from super().conflicts()
        if self.loss_type == "ipo" and self.label_smoothing:
            yield FieldError(
                "label_smoothing", "belongs to the sigmoid losses; set it to 0 with 'ipo'"
            )


class OnlineDPO(DPOLoss):
    """The DPO loss of an online stage."""

    normalizer: DPONormalizer = "pairs"  # or "prompts": all of the batch, those without a pair too
    nll_coef: NotNegativeFloat = 0.0
    # the NLL term is a mean over the chosen response's tokens, not a sum
    nll_length_normalization: bool = True
