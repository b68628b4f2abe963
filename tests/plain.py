"""Attention and logits as they are defined, all pairs of tokens in memory: what the library's are
compared with."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from g2d_jax.models import decoder, lora
from g2d_jax.models.config import ModelConfig
from g2d_jax.records import SEGMENT_STRIDE

MIXTURE = ModelConfig(
    "qwen3_moe",
    vocab_size=61,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    intermediate_size=40,
    num_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=12,
    norm_topk_prob=True,
)
"""The shape of a small mixture of experts."""


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax attention. q [B, T, H, D], k and v [B, S, K, D], mask bool [B, T, S] -> [B, T, H,
    D]."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = (
        jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32) * q.shape[3] ** -0.5
    )
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshd->bthd", weights.astype(v.dtype), v)


def logits(model: decoder.Decoder, tokens: Any, **settings: Any) -> jax.Array:
    """The logits, float32 [B, T, V], of rows of one sequence each. settings: of
    `decoder.forward`."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    hidden, _ = decoder.forward(
        model, jnp.asarray(tokens), positions, jnp.full_like(positions, SEGMENT_STRIDE), **settings
    )
    head = decoder.head_matrix(model, hidden.dtype)[None]
    return jnp.matmul(hidden, head, preferred_element_type=jnp.float32)


def merge(model: decoder.Decoder) -> decoder.Decoder:
    """The model with W + scale * A B in place of each adapted layer, float32, codes decoded."""
    assert model.config.lora is not None
    scale = model.config.lora.scale
    return decoder.build(
        model.config.base, lambda name, _: lora.merged(*lora.weight_and_adapter(model, name), scale)
    )


def noisy(tree: Any, size: float = 0.1) -> Any:
    """The tree with noise in every array: norms start as ones, biases and adapters' B as zeros, and
    would not tell."""

    @jax.jit  # one program is compiled sooner than one of every shape
    def add(leaves: list[jax.Array]) -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(1), len(leaves))
        pairs = zip(leaves, keys, strict=True)
        return [x + size * jax.random.normal(key, x.shape, x.dtype) for x, key in pairs]

    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, add(leaves))


def assert_near(found: Any, expected: Any, share: float) -> None:
    """Every array of a tree of gradients, none of them zero, is within this share of its own
    length."""
    paths = jax.tree_util.tree_leaves_with_path(expected)
    for (path, theirs), ours in zip(paths, jax.tree.leaves(found), strict=True):
        size = np.linalg.norm(theirs)
        assert size > 0 and np.linalg.norm(ours - theirs) <= share * size, jax.tree_util.keystr(
            path
        )
