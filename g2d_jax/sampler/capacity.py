"""Choices by formula: over how many devices the sampler's weights are split, and how many rows
decode together.

Reading the weights is shared by all rows of a decode step, so tokens a second grow with the rows,
until memory is full. Bytes are of one device unless said otherwise. Rows are split over devices,
and where weights are split over `ways` of them so are a row's key heads and its attention: a row
takes the same of all devices together, whatever the ways. Rows at rest are computed as others are.
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
"""Rows where a platform reports no memory, as on CPUs."""

SPARE = 0.06
"""Share of the memory left for the workspace of decode and prefill beside weights and cache."""

MEAN = 0.25
"""Share of max_new_tokens that a mean response takes, assumed because rows are chosen before any
response exists."""

REACHED = 0.8
"""Tokens that a row in use has decoded, as a share of a mean response: as simulated (simulated.py)."""

ENOUGH = 0.95
"""Share of the best rate by formula that suffices: of ways that are about as quick, the fewest wait
least for each other where devices are slower than stated."""


LOGIT = 4
"""The bytes of a logit, float32."""

LOGITS = 4
"""Arrays of all of a row's logits that a decode step has at once, rounded up from the 3.4 of a
compiled one with 262,144 words (v5e)."""


def kv_bytes(config: ModelConfig, itemsize: int) -> int:
    """Count the bytes of keys and values of one token in all layers with attention. itemsize: of a
    number."""
    numbers = config.num_key_value_heads * config.head_dim
    return 2 * len(config.layers(recurrent=False)) * numbers * itemsize


def memory_bytes(config: ModelConfig, itemsize: int) -> int:
    """Count the bytes that a row keeps in all recurrent layers, however long it is."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    tail = (config.linear_conv_kernel_dim - 1) * (2 * keys + values)
    state = values * config.linear_key_head_dim
    return len(config.layers(recurrent=True)) * (4 * state + itemsize * tail)


def launched_layers(config: ModelConfig, parts: int) -> int:
    """Count the layers whose kernels a GPU launches in a decode step, where experts are split over
    so many devices: for each of a device's experts about as many as for a layer, in a loop over
    blocks (models/experts.py)."""
    return config.num_hidden_layers * (1 + config.num_experts // parts)


class Sending(NamedTuple):
    """The bytes that a device sends in a decode step, and in how many collectives."""

    sent: float
    collectives: int


@dataclass(frozen=True)
class Split:
    """Weights split over `ways` of so many devices, beside a cache whose rows have so many columns.

    itemsize: bytes of a weight and of a cached number. rates: of a device. kernel: of decode
    steps. axes: of the torus, on how many the groups along fsdp and along tensor lie
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
        """Choose the most rows that decode together, over all devices; 0 where none fits.

        memory: bytes that a device's programs may use, None where that is not known; beside: bytes
        of these that other data takes meanwhile.
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
        # What small models need beside their cache is mostly of their words: the logits, of which a
        # device has those of other rows too before they are summed along fsdp (`_by_fsdp`), and
        # where embedding and head are one matrix a copy of it, laid out for the head's product.
        if config.tie_word_embeddings:
            free -= self.itemsize * config.vocab_size * config.hidden_size / self.ways
        arrays = LOGITS - 1 + self.ways // self._split_heads
        row_bytes += arrays * LOGIT * config.vocab_size
        rows = min(rows, int(max(free, 0) * self.devices / row_bytes))
        if rows >= self._step:
            return rows // self._step * self._step
        return rows

    def quickest_rows(self, longest: int, most: int, samples: int) -> int:
        """Choose how many rows, at most `most`, draw a call's samples soonest: that, or as many as
        the samples, or a half of either again and again.

        Few rows read the weights often; many wait long for the longest response, when nearly all of
        them are done.
        longest: tokens of a response at most, of which a mean one is taken to have the share MEAN.
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
        """Estimate how long a call's samples take with so many rows."""
        mean = MEAN * longest
        steps = max(samples / rows - 1, 0) * mean + longest
        read: float = self.columns
        if self.kernel == "pallas":  # reads the columns that rows in use have filled
            in_use = samples * mean / (rows * steps)
            read = in_use * (self.columns - longest + REACHED * mean)
        return steps * self.step_seconds(rows, read)

    def step_seconds(self, rows: int, read: float) -> float:
        """Estimate how long a decode step of so many rows takes. read: columns of each, on
        average."""
        config, rates = self.config, self.rates
        decoded = rows * self.ways / self.devices  # by the devices that share a copy
        # What recurrent layers keep is read and written.
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
        """The parts into which the key heads, and most else, are split: the mesh's axis tensor."""
        return math.gcd(self.ways, self.config.num_key_value_heads)

    # The collectives are those of the compiled program, sizes as well (tests/plan): of a TPU's; a
    # GPU's has one or two fewer.

    def _by_tensor(self, rows: int) -> Sending:
        """Count what a step sends along the axis tensor: two sums a layer, then the logits of a
        device's words of all rows for those of all words of its own rows."""
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
        """Count what a step sends along the axis fsdp: a layer's queries, keys and values, and its
        gate and up products, are sums over parts of the width (of a recurrent one also its outputs'
        gates); attention's output is gathered; the logits are summed, each device keeping those of its own rows."""
        config, parts = self.config, self._split_heads
        others = self.ways // parts
        if others == 1:
            return Sending(0.0, 0)
        decoded = rows * self.ways / self.devices
        share = (others - 1) / others
        queries = config.num_attention_heads * config.head_dim
        keys = 2 * config.num_key_value_heads * config.head_dim
        times = 5 if config.traits.recurrent else 3  # of which two are gates
        attention = len(config.layers(recurrent=False)) * (times * queries + 2 * keys)
        of_keys = config.linear_num_key_heads * config.linear_key_head_dim
        of_values = config.linear_num_value_heads * config.linear_value_head_dim
        recurrent = len(config.layers(recurrent=True)) * (4 * of_keys + 5 * of_values)
        # Of experts each device of the axis tensor has a row for every token that goes to any.
        feed_forward = config.feed_forward_size * (parts if config.num_experts else 1)
        width = 4 * config.num_hidden_layers * feed_forward + attention + recurrent
        sent = share * decoded * width / parts * self.itemsize
        sent += share * decoded * config.vocab_size / parts * LOGIT
        return Sending(sent, 6 * config.num_hidden_layers + 6)

    @property
    def _step(self) -> int:
        """Eight rows of each part of the mesh: so many at least are computed as quickly as one."""
        return self.devices // self._split_heads * 8

    def _weight_bytes(self, params: int) -> float:
        """Count the bytes of so many of the model's parameters on a device."""
        return self.itemsize * params / self.ways

    def _whole_words(self, matrices: int) -> float:
        """Count the bytes that so many matrices of the vocabulary, embedding and head, take on a
        device beyond their share: one that the axis tensor does not divide is whole along it."""
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
    """Choose over how many devices weights are split: of the splits the one of fewest ways that
    draws a call about as soon as any, each with its quickest rows of those that fit.

    splits: fewest ways first. longest, samples: see `Split.quickest_rows`. memory, beside:
    `Split.rows_that_fit`.
    most: ways that are taken where any of them leaves room for rows, the devices of a slice or of a
    host of GPUs: every layer waits twice a step for those that share the weights, over a network
    much longer than by fast links.
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
