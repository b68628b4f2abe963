"""Attention as it is defined, with the scores of all pairs of tokens in memory: what the library's is compared with."""

import jax
import jax.numpy as jnp


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax attention. q [B, T, H, D], k and v [B, S, K, D], mask bool [B, T, S] -> [B, T, H, D]."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32) * q.shape[3] ** -0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshd->bthd", weights.astype(v.dtype), v)
