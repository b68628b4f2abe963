"""KTO: Kahneman-Tversky optimisation on single responses that are known to be good or bad, without pairs.

Equations 7 and 8 of Ethayarajh et al. (arXiv 2402.01306). Their reference point z0, an estimate of the policy's KL from
the reference, is taken over the whole global batch of one optimiser step (`reference_point`), so that the loss of a
response does not depend on micro-batches or devices. Normaliser: the responses of that batch (`dpo_weights` of them).

N: responses. Log-probabilities are sums over the tokens of a response, in nats; with beta 0.1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from g2d_jax.losses.reduction import Sums, active_count, active_sum, check_same_shape, fill_inactive, weighted_sum


def reference_point(policy: np.ndarray, reference: np.ndarray) -> float:
    """Estimate z0, max(0, mean(policy - reference)), from summed log-probabilities [N] of responses to other prompts.

    As in TRL: each prompt of the batch with a response that was drawn for another one. Host side; it has no gradient.
    """
    return max(0.0, float(np.mean(policy.astype(np.float64) - reference)))


def kto_loss(
    policy: jax.Array,
    reference: jax.Array,
    desirable: jax.Array,
    kl: jax.Array,
    weights: jax.Array,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> tuple[jax.Array, Sums]:
    """Compute sum(weight * lambda * (1 - sigmoid(±beta * (policy - reference - kl)))), + where a response is desirable.

    All arrays have one shape, any. policy, reference: summed log-probability of each response; no gradient flows into
    the reference. desirable: 1 or 0. kl: `reference_point` of the batch, the same everywhere. weights: see
    `dpo_weights`; 0 marks padding, whose values do not matter. lambda: desirable_weight or undesirable_weight.

    Returns (loss, sums), scalars in float32. Sums under TRL's names, over active responses:
      responses                 their number
      kl                        the reference point
      desirable, undesirable    the number of either kind
      rewards/chosen|desirable, rewards/rejected|undesirable    beta * (policy - reference), of either kind
      logps/chosen|desirable, logps/rejected|undesirable        policy
    Raises ValueError for differing shapes.
    """
    check_same_shape(policy=policy, reference=reference, desirable=desirable, kl=kl, weights=weights)
    policy, reference, kl = (fill_inactive(x, weights) for x in (policy, reference, jax.lax.stop_gradient(kl)))
    log_ratio, is_desirable = policy - jax.lax.stop_gradient(reference), desirable > 0
    surprise = jnp.where(is_desirable, 1.0, -1.0) * beta * (log_ratio - kl)
    scale = jnp.where(is_desirable, desirable_weight, undesirable_weight)
    sums = {"responses": active_count(weights), "kl": active_sum(kl, weights)}
    for kind, side, own in (("desirable", "chosen", is_desirable), ("undesirable", "rejected", ~is_desirable)):
        of_kind = jnp.where(own, weights, 0.0)
        sums |= {
            kind: active_count(of_kind),
            f"rewards/{side}|{kind}": active_sum(beta * log_ratio, of_kind),
            f"logps/{side}|{kind}": active_sum(policy, of_kind),
        }
    return weighted_sum(scale * jax.nn.sigmoid(-surprise), weights), sums
