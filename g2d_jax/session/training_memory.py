"""Choice of remat and of the tokens of a micro-batch, by formula from the devices' memory.

    a Load for each stage that trains, memory, rates ─► choose ─► Micro: remat, tokens of a device
    compute.remat and compute.microbatch_tokens, if set, fix the choice

A choice changes results only by rounding, since gradients are summed in another order. To resume
with the same rounding, a work directory stores the choice for each machine (`keep`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from etils import epath

from g2d_jax.config import Remat
from g2d_jax.losses.logprobs import chunk_of
from g2d_jax.models.config import ModelConfig
from g2d_jax.models.delta import CHUNK
from g2d_jax.runtime import storage

WORK: Mapping[Remat, float] = {"none": 3.0, "dots": 3.05, "attention": 3.9, "full": 4.0}
"""Products of a train step, in forward passes: the forward pass, two for the backward pass, and
recomputation."""

REMATS: tuple[Remat, ...] = ("dots", "attention", "full")
"""Choices of remat, the quickest first. Not "none": it saves 0.05 of a forward pass, but XLA keeps
1.8 times the memory of "dots", more than the formula counts."""

TOKENS = tuple(4096 * 2**power for power in range(5))
"""Choices for the tokens of a device's micro-batch. Fewer do not keep a device busy. They double,
so that small differences in memory rarely change the choice."""

SHARE = 0.94
"""Share of usable memory that the formula may fill: compiled peaks were up to 6 % above its
estimates."""

WITHOUT_MEMORY = 16_384
"""Tokens of a micro-batch, over all devices, if these do not report their memory."""

KEPT = "compute.json"
"""The file of a work directory that stores the choices."""


@dataclass(frozen=True)
class Micro:
    """A choice. tokens: most tokens of a micro-batch, over all devices."""

    remat: Remat
    tokens: int

    def __str__(self) -> str:
        """Describe the choice in words."""
        return f"remat {self.remat}, micro-batches of at most {self.tokens:,} tokens"


@dataclass(frozen=True)
class Load:
    """A train step's bytes on a device. held: independent of the choice. per_token: per token of a
    micro-batch, by remat. row: tokens of the longest row; a micro-batch has at least one row."""

    held: float
    per_token: Mapping[Remat, float]
    row: int

    def total(self, remat: Remat, tokens: int) -> float:
        """Return the bytes with micro-batches of this many tokens."""
        return self.held + self.per_token[remat] * max(tokens, self.row)


def choose(
    loads: Sequence[Load],
    memory: float,
    *,
    token: float,
    micro_batch: float,
    remats: Sequence[Remat] = REMATS,
    tokens: Sequence[int] = TOKENS,
) -> tuple[Remat, int]:
    """Choose the fastest remat and tokens of a device's micro-batch with which all loads fit.

    memory: usable bytes of a device. token: seconds of a token's products in a forward pass.
    micro_batch: additional seconds per micro-batch, assuming no overlap. If nothing fits, returns
    the choice with the least memory; the plan or compiler then reports the error.
    """

    def needs(choice: tuple[Remat, int]) -> float:
        return max((load.total(*choice) for load in loads), default=0.0)

    def seconds(choice: tuple[Remat, int]) -> float:
        remat, count = choice
        return WORK[remat] * token + micro_batch / count

    choices = list(itertools.product(remats, tokens))
    fitting = [choice for choice in choices if needs(choice) <= SHARE * memory]
    if not fitting:
        return min(choices, key=needs)
    return min(fitting, key=seconds)


def load(
    model: ModelConfig, *, state: float, parameters: float, row: int, itemsize: int, tensor: int = 1
) -> Load:
    """Estimate a train step's bytes on a device.

    state: bytes of its parameters, gradients, optimiser state and other resident arrays.
    parameters: the number of its float32 parameters, of which the layers read a copy in the
    activations' dtype. row: tokens of the longest row. itemsize: bytes of an activation.

    The sum includes the layers' saved activations, and one layer's temporaries without remat. Masks
    are splash attention's (models/kernels.py): a byte per pair of columns for each of three
    kernels, and four more for the current row. The gathered head has a float32 gradient. Logits of
    a chunk of tokens count three times.
    """
    of_attention, recurrent = saved_by_layer(model, "none", tensor)
    largest = max(of_attention, recurrent) if model.layers(recurrent=True) else of_attention
    copy = itemsize * parameters if itemsize < 4 else 0.0
    head = model.vocab_size * model.hidden_size * (itemsize + 4)
    logits = 3 * 4 * chunk_of(model.vocab_size, "tpu") * model.vocab_size
    per_token: dict[Remat, float] = {}
    for remat in WORK:
        saved = saved_per_token(model, remat, tensor)
        per_token[remat] = (saved + 2 * largest) * itemsize + 3 * row
    return Load(state + copy + 4 * row**2 + head + logits, per_token, row)


def kept(workdir: epath.Path, machine: Mapping[str, Any]) -> Micro | None:
    """Return the choice that a work directory stores for a machine, None if there is none. machine:
    see `keep`."""
    file = workdir / KEPT
    for choice in storage.read_json(file) if file.exists() else []:
        if choice["machine"] == dict(machine):
            return Micro(choice["remat"], choice["tokens"])
    return None


def keep(workdir: epath.Path, machine: Mapping[str, Any], chosen: Micro, begun: bool) -> Micro:
    """Return the choice that a work directory stores for a machine, or store `chosen`.

    machine: JSON, the inputs of a choice that may differ between two starts, except memory, whose
    reported size varies slightly. begun: whether any stage has begun; until then stored choices are
    replaced, since settings may change.
    """
    file = workdir / KEPT
    if begun and (found := kept(workdir, machine)):
        return found
    choices = storage.read_json(file) if begun and file.exists() else []
    storage.write_json(file, [*choices, {"machine": dict(machine), **asdict(chosen)}])
    return chosen


def saved_per_token(config: Any, remat: str, tensor: int = 1) -> float:
    """Count the numbers that all layers save per token: their input; with "attention" its output
    too; with "dots" also the linear layers' outputs; with "none" all factors.

    All factors are both norms' results, queries, keys and values before and after rotation,
    attention's output, and three arrays of the feed-forward width.
    """
    attention, recurrent = saved_by_layer(config, remat, tensor)
    with_attention = len(config.layers(recurrent=False))
    return with_attention * attention + (config.num_hidden_layers - with_attention) * recurrent


def saved_by_layer(config: Any, remat: str, tensor: int = 1) -> tuple[float, float]:
    """Count the numbers of `saved_per_token` for one layer with attention and one recurrent
    layer."""
    e, heads, kv = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    between = e / tensor  # activations between layers, and between a layer's two parts
    width = heads * config.head_dim / tensor
    key_width = kv * config.head_dim / tensor
    gate = width if config.traits.recurrent else 0.0
    m = config.feed_forward_size
    products, factors = 2 * m / tensor, 3 * m / tensor
    if config.num_experts:  # of every token sent to an expert, on any device
        products, factors = 0, config.num_experts_per_tok * e + 3 * m
    attention = {
        "full": between,
        "attention": between + width,
        "dots": 2 * between + 2 * width + gate + 2 * key_width + products,
        "none": 2 * between + 2 * e + 3 * width + 2 * gate + 3 * key_width + factors,
    }[remat]
    values = config.linear_num_value_heads * config.linear_value_head_dim
    read = 2 * (config.linear_num_key_heads * config.linear_key_head_dim + values) / tensor
    # Two float32 states for every chunk, counted in bfloat16 numbers.
    states = 4 * values * config.linear_key_head_dim / CHUNK / tensor
    recurrent = {
        "full": between,
        "attention": between,
        "dots": 2 * between + read + 2 * m / tensor,
        "none": 2 * between + 2 * e + 3 * read + states + 3 * m / tensor,
    }[remat]
    return attention, recurrent
