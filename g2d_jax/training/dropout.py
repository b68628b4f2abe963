"""Keys for the dropout of a batch: one for each sequence, named by its place in the update's data,
not by its row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from g2d_jax import keys
from g2d_jax.data.packing import Packed
from g2d_jax.models.config import ModelConfig
from g2d_jax.models.dropout import KEYS
from g2d_jax.records import SEGMENT_STRIDE


def with_keys(packed: Packed, config: ModelConfig, seed: int, *names: keys.Name) -> Packed:
    """Add the keys of its dropout to an update's batch; return it as it is where the model has
    none.

    names: of the update, such as stage and step. The array "dropout", uint32 [N, R, T, 2], holds at
    every token the key (seed, "dropout", *names, group, response) of its response; -1 is the
    prompt, so that every copy of one prompt is dropped alike. 0 at padding.
    """
    if config.lora is None or not config.lora.dropout:
        return packed
    shape = packed.arrays["segment_ids"].shape
    segments = packed.arrays["segment_ids"].reshape(-1, shape[-1])
    token_keys = np.zeros((*segments.shape, 2), np.uint32)
    for group, places in enumerate(packed.places):
        for number, place in enumerate(places):
            if not place.length:
                continue
            row = segments[place.row]
            prompt = row[place.column] // SEGMENT_STRIDE * SEGMENT_STRIDE
            token_keys[place.row, row == prompt] = keys.key_data(seed, KEYS, *names, group, -1)
            span = slice(place.column, place.column + place.length)
            token_keys[place.row, span] = keys.key_data(seed, KEYS, *names, group, number)
    return replace(packed, arrays={**packed.arrays, KEYS: token_keys.reshape(*shape, 2)})
