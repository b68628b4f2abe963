"""Losses: pure functions of log-probabilities and weights, independent of any model.

    token_logprobs ─► sft_loss | grpo_loss | entropy_loss | sequence_sums ─► dpo_loss | group_dpo_loss

Each returns (loss, sums). The loss is sum(value * weight). The host computes the weights once per
optimiser step, and they contain the normaliser of the whole global batch: simply add losses and
sums over micro-batches and devices.
"""

from g2d_jax.losses.dpo import dpo_loss, dpo_weights
from g2d_jax.losses.entropy import entropy_loss
from g2d_jax.losses.group_dpo import group_dpo_loss, group_dpo_weights
from g2d_jax.losses.grpo import (
    GRPOLossType,
    ScaleRewards,
    group_advantages,
    grpo_loss,
    token_weights,
)
from g2d_jax.losses.logprobs import (
    chunk_of,
    sequence_means,
    sequence_sums,
    sharded_token_logprobs,
    token_logprobs,
    transform_logits,
)
from g2d_jax.losses.raft import raft_weights
from g2d_jax.losses.reduction import (
    Number,
    Sums,
    active_count,
    active_sum,
    add_sums,
    check_not_negative,
    empty_sums,
    mean_metrics,
)
from g2d_jax.losses.sft import sft_loss, sft_weights
