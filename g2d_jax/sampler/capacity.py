"""Choices by formula: over how many devices the sampler's weights are split, and how many rows
decode together.

Reading the weights is shared by all rows of a decode step, so tokens a second grow with the rows,
until memory is full. Bytes are of one device unless said otherwise. Rows are split over devices,
and where weights are split over `ways` of them so are a row's key heads and its attention: a row
takes the same of all devices together, whatever the ways.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from g2d_jax.models import quantise
from g2d_jax.models.config import ModelConfig
from g2d_jax.models.decoder import count_params
from g2d_jax.models.flops import matmul_params
from g2d_jax.models.table import block_params

UNKNOWN = 256
"""Rows where a platform reports no memory, as on CPUs."""

SPARE = 0.06
"""Share of the memory left for the workspace of decode and prefill beside weights and cache."""

LINK = 5.0
"""Bytes read from memory while one is sent: 4.1 on v5e and v6e, 4.6 on v5p, 7.4 on an H100
(plan/topologies.py)."""

MEAN = 0.25
"""Share of max_new_tokens that a mean response takes, assumed because rows are chosen before any
response exists."""

ENOUGH = 0.9
"""Share of the best rate by formula that suffices: fewer ways wait less for each other, which it
does not count."""


def kv_bytes(config: ModelConfig, itemsize: int, kv_cache_dtype: str = "") -> int:
    """Count the bytes of keys and values of one token in all layers. itemsize: of a number, where
    they are no codes."""
    head = config.head_dim * itemsize
    if kv_cache_dtype:  # a byte a number, and a float32 scale
        head = config.head_dim + 4
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head


def bytes_saved(config: ModelConfig, itemsize: int) -> int:
    """Count the bytes that int8 codes and their scales save of the weights that they stand for; 0
    without codes."""
    rows = [row for row in block_params(config).values() if row.quantised]
    layer = sum(
        (itemsize - 1) * math.prod(row.shape) - 4 * math.prod(quantise.scale_shape(row))
        for row in rows
    )
    return config.num_hidden_layers * layer


@dataclass(frozen=True)
class Split:
    """Weights split over `ways` of so many devices, beside a cache whose rows have so many columns.

    config: with the kind of codes that the weights are stored as. itemsize: bytes of a weight and
    of a cached number. kv_cache_dtype: see `kv_bytes`.
    """

    config: ModelConfig
    itemsize: int
    ways: int
    devices: int
    columns: int
    kv_cache_dtype: str = ""

    def rows_that_fit(self, memory: int | None, beside: int) -> int:
        """Choose the most rows that decode together, over all devices; 0 where none fits.

        memory: bytes that a device's programs may use, None where that is not known; beside: bytes
        of these that other data takes meanwhile.
        """
        if memory is None:
            return UNKNOWN
        free = (1 - SPARE) * memory - beside - self._weight_bytes(count_params(self.config))
        row_bytes = self.columns * kv_bytes(self.config, self.itemsize, self.kv_cache_dtype)
        rows = int(max(free, 0) * self.devices / row_bytes)
        if rows >= self._step:
            return rows // self._step * self._step
        return rows

    def quickest_rows(self, longest: int, most: int, samples: int) -> int:
        """Choose how many rows, at most `most`, draw a call's samples soonest: that, or a half of
        it again and again.

        Few rows read the weights often; many wait long for the longest response, when nearly all of
        them are done.
        longest: tokens of a response at most, of which a mean one is taken to have the share MEAN.
        """
        most = min(most, -(-samples // self._step) * self._step)
        halves = [most >> power for power in range(most.bit_length())]
        rows = [half // self._step * self._step for half in halves if half >= self._step]
        return min(rows, key=lambda rows: self.call_bytes(longest, rows, samples), default=most)

    def call_bytes(self, longest: int, rows: int, samples: int) -> float:
        """Count the bytes that a device reads for a call's samples, and those that it sends as so
        many more."""
        config = self.config
        # A row that decodes has, over its life, half of its columns filled.
        token = kv_bytes(config, self.itemsize, self.kv_cache_dtype)
        cached = rows * self.columns / 2 * token / self.devices
        read = self._weight_bytes(matmul_params(config)) + cached
        hidden = rows * self.ways / self.devices * config.hidden_size * self.itemsize
        # Two all-reduces a layer.
        sent = 2 * config.num_hidden_layers * hidden * 2 * (self.ways - 1) / self.ways
        steps = max(samples / rows - 1, 0) * MEAN * longest + longest
        return steps * (read + LINK * sent)

    @property
    def _step(self) -> int:
        """Eight rows of each part of the mesh: so many at least are computed as quickly as one."""
        return self.devices // self.ways * 8

    def _weight_bytes(self, params: int) -> float:
        """Count the bytes of so many of the model's parameters on a device."""
        return (self.itemsize * params - bytes_saved(self.config, self.itemsize)) / self.ways


def best_ways(
    split: Split, longest: int, memory: int | None, beside: int, samples: int, most: int
) -> int:
    """Choose over how many devices weights are split: the least power of two that draws a call
    about as soon as any.

    split: its ways do not matter. longest, samples: see `Split.quickest_rows`. memory, beside:
    `Split.rows_that_fit`.
    most: ways that are taken where any of them leaves room for rows, the devices of a slice or of a
    host of GPUs: every layer waits twice a step for those that share the weights, over a network
    much longer than by fast links.
    """
    if memory is None:
        return 1

    def rate(ways: int) -> float:
        candidate = replace(split, ways=ways)
        rows = candidate.quickest_rows(longest, candidate.rows_that_fit(memory, beside), samples)
        if not rows:
            return 0.0
        return 1 / candidate.call_bytes(longest, rows, samples)

    powers = (2**power for power in range(split.devices.bit_length()))
    rates = {ways: rate(ways) for ways in powers if split.devices % ways == 0}
    inside = {ways: rate for ways, rate in rates.items() if most % ways == 0}
    if any(inside.values()):
        rates = inside
    return next(ways for ways, rate in rates.items() if rate >= ENOUGH * max(rates.values()))
