"""A reward model: the decoder with a scalar head [E] instead of the language model's, and the token
at which its score is read.

Two layouts of Hugging Face folders are supported:

    score.weight   LlamaForSequenceClassification and Qwen2's and Qwen3's, with one label: the score is read at the
                   last token that is not config.json's padding token, as transformers reads it
    v_head.weight  Athene-RM-8B's (huggingface.co/Nexusflow/Athene-RM-8B): a Llama 3.1 trunk; the score is read at the
                   last CLS token, id 128003, which is appended to the conversation

The trunk is `decoder.Decoder` with its embedding marked as tied: a reward model has no product with
an output matrix, so none is loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax import Array
from jax.sharding import Mesh

from g2d_jax.models import decoder, flops, hf
from g2d_jax.models.config import ModelConfig
from g2d_jax.models.decoder import Decoder, forward
from g2d_jax.models.hf_folder import (
    architecture_headers,
    read_config,
    read_headers,
    read_raw_config,
)
from g2d_jax.models.kernels import attention_for
from g2d_jax.models.safetensors_file import Stored
from g2d_jax.models.table import Param
from g2d_jax.records import SEGMENT_STRIDE
from g2d_jax.runtime import mesh as meshes
from g2d_jax.runtime import precision, storage

SCORE, V_HEAD = "score.weight", "v_head.weight"
CLS_ID = 128_003
"""The token at which Athene's scores are read: Llama 3.1's <|reserved_special_token_1|>."""

_ARCHITECTURES = tuple(
    f"{family}ForSequenceClassification" for family in ("Llama", "Qwen2", "Qwen3")
)


@dataclass(frozen=True)
class ReadOut:
    """The token of a conversation at which the score is read.

    cls_id: the last token of this id, which is appended to the conversation; None: the last token
    that is not pad_id.
    pad_id: config.json's padding token; None: the last token is read.
    """

    cls_id: int | None = None
    pad_id: int | None = None

    def complete(self, ids: np.ndarray) -> np.ndarray:
        """Append the CLS token, if there is one, to a conversation's ids, int32 [T]."""
        if self.cls_id is None:
            return ids
        return np.append(ids, np.int32(self.cls_id))

    def scored_part(self, ids: np.ndarray) -> np.ndarray:
        """Cut ids, int32 [T], after the token that is read (later ones cannot affect it); empty if
        there is none."""
        matches = ids == self.cls_id if self.cls_id is not None else ids != self.pad_id
        places = np.flatnonzero(np.broadcast_to(matches, ids.shape))
        return ids[: places[-1] + 1 if len(places) else 0]


@partial(jax.tree_util.register_dataclass, data_fields=("trunk", "head"), meta_fields=("read_out",))
@dataclass(frozen=True)
class ScalarModel:
    """The parameters of a reward model. trunk: stacked Decoder without a head. head: float32
    [E]."""

    trunk: Decoder
    head: Array
    read_out: ReadOut

    @property
    def config(self) -> ModelConfig:
        """The trunk's shape."""
        return self.trunk.config


def load(
    folder: storage.PathLike, *, mesh: Mesh | None = None, dtype: jnp.dtype = jnp.float32
) -> ScalarModel:  # type: ignore[assignment]
    """Load a reward-model folder with the trunk's parameters in dtype and the head in float32.

    Streams, places and checks as `hf.load` does: safetensors only, and a missing, unexpected,
    misshapen or truncated tensor raises ValueError by name. Also raises it for several labels, for a
    folder with neither or both of the two heads, and for an unknown architecture. A language
    model's lm_head.weight in the file is not read, as in transformers.
    """
    config, headers, head, read_out = read_layout(folder)
    trunk = hf.load_decoder(config, headers, mesh=mesh, dtype=dtype)
    everywhere = None if mesh is None else meshes.replicated(mesh)
    array = hf.load_parameter(head, headers, everywhere, jnp.dtype(jnp.float32))
    return ScalarModel(trunk, array, read_out)


def read_layout(folder: storage.PathLike) -> tuple[ModelConfig, dict[str, Stored], Param, ReadOut]:
    """Return the trunk's shape, all tensors by name, the head's row and its read-out, from the
    headers alone.

    Raises ValueError as `load` does.
    """
    place = epath.Path(folder)
    config = dataclasses.replace(read_config(place), tie_word_embeddings=True)
    headers = read_headers(place)
    heads = [name for name in (SCORE, V_HEAD) if name in headers]
    if len(heads) != 1:
        what = f"both {SCORE} and {V_HEAD}" if heads else f"neither {SCORE} nor {V_HEAD}"
        raise ValueError(
            f"{folder} has {what}: a reward model has one scalar head, under one of these names"
        )
    try:
        read_out = _read_out(read_raw_config(place), heads[0], config)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    head = Param((config.hidden_size,), ("norm",), "normal", heads[0], 1)
    checked = architecture_headers(place, headers, config, {head.hf_name: head.stored_shape})
    return config, checked, head, read_out


def abstract_on(config: ModelConfig, mesh: Mesh, dtype: jnp.dtype) -> ScalarModel:
    """Return a reward model of this trunk with a ShapeDtypeStruct and its sharding in place of
    every array."""
    head = jax.ShapeDtypeStruct(
        (config.hidden_size,), jnp.float32, sharding=meshes.replicated(mesh)
    )
    trunk = decoder.abstract_on(dataclasses.replace(config, tie_word_embeddings=True), mesh, dtype)
    return ScalarModel(trunk, head, ReadOut())  # type: ignore[arg-type]  # shapes in place of arrays


def _read_out(raw: Mapping[str, Any], name: str, config: ModelConfig) -> ReadOut:
    """Return the read-out of config.json's model. Raises ValueError naming the field that
    contradicts it."""
    if name == V_HEAD:
        if config.family != "llama" or config.vocab_size <= CLS_ID:
            raise ValueError(
                f"{V_HEAD} is read at the CLS token {CLS_ID} of Llama 3.1, but config.json has "
                f"model_type {config.family!r} with vocab_size {config.vocab_size}"
            )
        return ReadOut(cls_id=CLS_ID)
    names = raw.get("id2label")
    labels = raw.get("num_labels", len(names) if isinstance(names, Mapping) else 1)
    if labels != 1:
        raise ValueError(
            f"config.json: num_labels is {labels!r}, but must be 1 ({SCORE} of shape [1, E])"
        )
    names = raw.get("architectures") or []
    if unknown := [other for other in names if other not in _ARCHITECTURES]:
        raise ValueError(
            f"config.json: architectures {unknown} may read {SCORE} elsewhere; supported: "
            f"{', '.join(_ARCHITECTURES)}"
        )
    pad = raw.get("pad_token_id")
    if type(pad) not in (int, type(None)):
        raise ValueError(f"config.json: pad_token_id must be a token id or null, got {pad!r}")
    return ReadOut(pad_id=pad)


def read_scores(
    model: ScalarModel,
    tokens: Array,
    lengths: Array,
    *,
    mesh: Mesh,
    dtype: jnp.dtype = jnp.float32,  # type: ignore[assignment]
) -> Array:
    """Compute scores, float32 [B], read at the last of each row's tokens, by the platform's
    attention if it can serve.

    tokens: int32 [B, T], filled up on the right with any ids: no earlier token sees them. lengths:
    int32 [B], at least 1. dtype: of activations. The product with the head is a float32 sum, whose
    precision no device reduces.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    segments = jnp.full_like(tokens, SEGMENT_STRIDE)
    attention = attention_for("auto", mesh, "sequence")
    # The run's precision is of its own dtype: Mosaic refuses "float32" for bfloat16.
    with jax.default_matmul_precision(precision.of(jnp.dtype(dtype).name)):
        hidden, _ = forward(
            model.trunk, tokens, positions, segments, dtype=dtype, attention=attention, mesh=mesh
        )
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    return jnp.sum(last.astype(jnp.float32) * model.head[None], axis=-1)


def score_flops(config: ModelConfig, lengths: Sequence[int]) -> float:
    """Count floating-point operations of scoring conversations of these lengths, as in
    models/flops.py.

    config: of `ScalarModel`. No product with an output matrix; 2 E for the head, once a
    conversation.
    """
    tokens, positions = sum(lengths), sum(map(flops.attended, lengths))
    unused = 2.0 * config.vocab_size * config.hidden_size * tokens
    head = 2.0 * config.hidden_size * len(lengths)
    return flops.forward_flops(config, tokens, positions) - unused + head
