"""Losses: pure functions of log-probabilities and weights that know no model.

    token_logprobs ─► sft_loss | grpo_loss | sequence_sums ─► dpo_loss

Each returns (loss, sums). The loss is sum(value * weight) with weights, computed on the host once per optimiser step,
that hold the normaliser of the whole global batch: add losses and sums over micro-batches and devices as they come.
"""

from g2d_jax.losses.dpo import DPOLossType, dpo_loss, dpo_weights
from g2d_jax.losses.grpo import GRPOLossType, ScaleRewards, group_advantages, grpo_loss, token_weights
from g2d_jax.losses.logprobs import sequence_sums, sharded_token_logprobs, token_logprobs, transform_logits
from g2d_jax.losses.reduction import Sums, active_count, active_sum, mean_metrics
from g2d_jax.losses.sft import sft_loss, sft_weights

__all__ = [
    "DPOLossType",
    "GRPOLossType",
    "ScaleRewards",
    "Sums",
    "active_count",
    "active_sum",
    "dpo_loss",
    "dpo_weights",
    "group_advantages",
    "grpo_loss",
    "mean_metrics",
    "sequence_sums",
    "sft_loss",
    "sft_weights",
    "sharded_token_logprobs",
    "token_logprobs",
    "token_weights",
    "transform_logits",
]
