"""Formulas that choose over how many devices the sampler's weights are split, and how many rows
decode together.

All rows of a decode step share one reading of the weights, so tokens per second grow with the rows
until memory is full. Bytes are per device unless stated otherwise. Rows are split over devices.
Where weights are split over `ways` devices, so are a row's key heads and its attention; a row's
total over all devices does not depend on the ways. Rows at rest are computed like the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from g2d_jax.models.config import ModelConfig
from g2d_jax.models.decoder import count_params
from g2d_jax.models.flops import matmul_params, read_params
from g2d_jax.models.kernels import DecodeKernel
from g2d_jax.runtime.rates import Rates, Seconds

UNKNOWN = 256
"""Rows on a platform that reports no memory, such as a CPU."""

SPARE = 0.06
"""Share of memory reserved for the workspace of decode and prefill, besides weights and cache."""

MEAN = 0.25
"""Mean response length as a share of max_new_tokens. An assumption: rows are chosen before any
response exists."""

REACHED = 0.8
"""Tokens that a row in use has decoded, as a share of a mean response; from simulated.py."""

ENOUGH = 0.95
"""Share of the best estimated rate that suffices. Among similar splits the one over fewest devices
waits least if devices are slower than stated."""


LOGIT = 4
"""Bytes of a logit, float32."""

LOGITS = 4
"""Arrays of a row's logits that a decode step holds at once, rounded up from 3.4 in a step compiled
for 262,144 words (v5e)."""


def kv_bytes(config: ModelConfig, itemsize: int) -> int:
    """Count the bytes of one token's keys and values in all layers with attention. itemsize: bytes
    of a number."""
    numbers = config.num_key_value_heads * config.head_dim
    return 2 * len(config.layers(recurrent=False)) * numbers * itemsize


def memory_bytes(config: ModelConfig, itemsize: int) -> int:
    """Count the bytes that a row keeps in all recurrent layers, at any length."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    tail = (config.linear_conv_kernel_dim - 1) * (2 * keys + values)
    state = values * config.linear_key_head_dim
    return len(config.layers(recurrent=True)) * (4 * state + itemsize * tail)


def launched_layers(config: ModelConfig, parts: int) -> int:
    """Count the layers whose kernels a GPU launches in a decode step. Each expert of a device
    counts as a layer: it launches about as many, in a loop over blocks (models/experts.py). parts:
    devices that experts are split over."""
    return config.num_hidden_layers * (1 + config.num_experts // parts)


class Sending(NamedTuple):
    """Bytes that a device sends in a decode step, and the number of collectives."""

    sent: float
    collectives: int


@dataclass(frozen=True)
class Split:
    """Weights split over `ways` of `devices`, with a cache whose rows have `columns`.

    itemsize: bytes of a weight and of a cached number. rates: of a device. kernel: of decode steps.
    axes: the number of torus axes that the groups along fsdp and along tensor span
    (`mesh.torus_axes`).
    """

    config: ModelConfig
    itemsize: int
    ways: int
    devices: int
    columns: int
    rates: Rates
    kernel: DecodeKernel = "pallas"
    axes: tuple[int, int] = (1, 1)

    def rows_that_fit(self, memory: int | None, beside: int) -> int:
        """Return how many rows fit together, over all devices; 0 if none fits.

        memory: bytes that a device's programs may use, None if unknown. beside: bytes of these in
        use by other data.
        """
        if memory is None:
            return UNKNOWN
        config = self.config
        weights = self._weight_bytes(count_params(config))
        weights += self._whole_words(2 - config.tie_word_embeddings)
        free = memory - beside - weights
        row_bytes = self.columns * kv_bytes(config, self.itemsize)
        row_bytes += memory_bytes(config, self.itemsize)
        rows = int(max(free - SPARE * memory, 0) * self.devices / row_bytes)
        # Besides their cache, small models mostly need memory for logits. A device also holds
        # logits of other rows until they are summed along fsdp (`_by_fsdp`). If embedding and head
        # are one matrix, the head's product has a copy of it.
        if config.tie_word_embeddings:
            free -= self.itemsize * config.vocab_size * config.hidden_size / self.ways
        arrays = LOGITS - 1 + self.ways // self._split_heads
        row_bytes += arrays * LOGIT * config.vocab_size
        rows = min(rows, int(max(free, 0) * self.devices / row_bytes))
        if rows >= self._step:
            return rows // self._step * self._step
        return rows

    def quickest_rows(self, longest: int, most: int, samples: int) -> int:
        """Choose how many rows, up to `most`, finish a call's samples soonest. Candidates: `most`,
        the number of samples, and both halved repeatedly.

        Few rows read the weights often. Many rows idle while the longest response finishes.
        longest: most tokens of a response; a mean one is assumed to have the share MEAN of them.
        """
        every = -(-samples // self._step) * self._step
        halves = [most >> power for power in range(most.bit_length())]
        halves += [every >> power for power in range(every.bit_length())]
        rows = [
            half // self._step * self._step
            for half in halves
            if self._step <= half <= min(most, every)
        ]
        return min(
            rows,
            key=lambda rows: self.call_seconds(longest, rows, samples),
            default=min(most, every),
        )

    def call_seconds(self, longest: int, rows: int, samples: int) -> float:
        """Estimate the seconds for a call's samples with this many rows."""
        mean = MEAN * longest
        steps = max(samples / rows - 1, 0) * mean + longest
        read: float = self.columns
        if self.kernel == "pallas":  # it reads only the columns that rows in use have filled
            in_use = samples * mean / (rows * steps)
            read = in_use * (self.columns - longest + REACHED * mean)
        return steps * self.step_seconds(rows, read)

    def step_seconds(self, rows: int, read: float) -> float:
        """Estimate the seconds of a decode step. read: mean columns read of each row."""
        config, rates = self.config, self.rates
        decoded = rows * self.ways / self.devices  # on the devices that share a copy
        # The state of recurrent layers is read and written.
        kept = read * kv_bytes(config, self.itemsize) + 2 * memory_bytes(config, self.itemsize)
        cached = rows * kept / self.devices
        weights = self._weight_bytes(read_params(config, decoded)) + self._whole_words(1)
        by_tensor, by_fsdp = self._by_tensor(rows), self._by_fsdp(rows)
        collectives = by_tensor.collectives + by_fsdp.collectives
        parts = Seconds(
            products=2 * matmul_params(config) * rows / self.devices / rates.flops,
            memory=weights / rates.bandwidth,
            cache=cached / rates.bandwidth,
            links=sum(
                sending.sent / rates.group_link(axes)
                for sending, axes in zip((by_fsdp, by_tensor), self.axes, strict=True)
            ),
            waits=collectives * rates.latency
            + launched_layers(config, self._split_heads) * rates.launches,
        )
        return rates.step_seconds(parts)

    @property
    def _split_heads(self) -> int:
        """The size of the mesh's tensor axis, over which key heads and most else are split."""
        return math.gcd(self.ways, self.config.num_key_value_heads)

    # Collectives and their sizes match the program compiled for TPU (tests/plan). A GPU's has one
    # or two fewer.

    def _by_tensor(self, rows: int) -> Sending:
        """Count the bytes of a step along the tensor axis: two sums a layer, then an exchange of
        logits, from some words of all rows to all words of some rows."""
        config, parts = self.config, self._split_heads
        if parts == 1:
            return Sending(0.0, 0)
        others = self.ways // parts
        decoded = rows * self.ways / self.devices  # by the group
        share = (parts - 1) / parts
        sums = 2 * config.num_hidden_layers
        sent = sums * 2 * share * decoded * config.hidden_size / others * self.itemsize
        sent += share * decoded / others * config.vocab_size / parts * LOGIT
        return Sending(sent, sums + 5)

    def _by_fsdp(self, rows: int) -> Sending:
        """Count the bytes of a step along the fsdp axis. A layer's queries, keys, values, gate and
        up products (and the output gates of a recurrent one) are sums over parts of the width.
        Attention's output is gathered. Logits are summed, and each device keeps its own rows."""
        config, parts = self.config, self._split_heads
        others = self.ways // parts
        if others == 1:
            return Sending(0.0, 0)
        decoded = rows * self.ways / self.devices
        share = (others - 1) / others
        queries = config.num_attention_heads * config.head_dim
        keys = 2 * config.num_key_value_heads * config.head_dim
        times = 5 if config.traits.recurrent else 3  # two of them are gates
        attention = len(config.layers(recurrent=False)) * (times * queries + 2 * keys)
        of_keys = config.linear_num_key_heads * config.linear_key_head_dim
        of_values = config.linear_num_value_heads * config.linear_value_head_dim
        recurrent = len(config.layers(recurrent=True)) * (4 * of_keys + 5 * of_values)
        # With experts, each device of the tensor axis has a row for every token sent to any expert.
        feed_forward = config.feed_forward_size * (parts if config.num_experts else 1)
        width = 4 * config.num_hidden_layers * feed_forward + attention + recurrent
        sent = share * decoded * width / parts * self.itemsize
        sent += share * decoded * config.vocab_size / parts * LOGIT
        return Sending(sent, 6 * config.num_hidden_layers + 6)

    @property
    def _step(self) -> int:
        """Eight rows for each part of the mesh: they are computed as quickly as one."""
        return self.devices // self._split_heads * 8

    def _weight_bytes(self, params: int) -> float:
        """Count the bytes of this many of the model's parameters on a device."""
        return self.itemsize * params / self.ways

    def _whole_words(self, matrices: int) -> float:
        """Count the bytes of vocabulary matrices (embedding, head) on a device beyond their share:
        the tensor axis keeps them whole if it does not divide the vocabulary."""
        config, parts = self.config, self._split_heads
        if config.vocab_size % parts == 0:
            return 0.0
        words = config.vocab_size * config.hidden_size
        return self.itemsize * matrices * words * (parts - 1) / self.ways


def best_ways(
    splits: Sequence[Split],
    longest: int,
    memory: int | None,
    beside: int,
    samples: int,
    most: int,
) -> int:
    """Choose over how many devices weights are split: the fewest ways that finish a call about as
    soon as any, each with its quickest rows that fit.

    splits: fewest ways first. longest, samples: see `Split.quickest_rows`. memory, beside: see
    `Split.rows_that_fit`. most: devices of a slice or of a GPU host. Larger ways are used only if
    no smaller one leaves room for rows: every layer waits twice a step for the devices that share
    the weights, and a network is much slower than fast links.
    """
    if memory is None:
        return 1
    rates = {}
    for split in splits:
        rows = split.quickest_rows(longest, split.rows_that_fit(memory, beside), samples)
        rates[split.ways] = 1 / split.call_seconds(longest, rows, samples) if rows else 0.0
    inside = {ways: rate for ways, rate in rates.items() if most % ways == 0}
    if any(inside.values()):
        rates = inside
    return next(ways for ways, rate in rates.items() if rate >= ENOUGH * max(rates.values()))
