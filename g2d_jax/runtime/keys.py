"""Randomness by name: random numbers depend on (seed, purpose, names…), never on batch, row, device
or host.

A key is the hash of its names, so nothing needs saving: a resumed or resharded run derives the same
keys.

Exceptions, all repeatable. The order of records is grain's permutation of a hashed seed
(data/order.py). Problems of embedded tasks come from hashes of their own names
(data/arithmetic.py). The rounding of second moments depends on the update's number, not on the seed
(training/moments.py). Two use a fixed seed: the points where expressions are compared
(rewards/exact.py) and the noise of a study's fit (study/bend.py).
"""

from __future__ import annotations

import hashlib

import jax
import jax.numpy as jnp
import numpy as np

Name = str | int


def key_data(seed: int, purpose: str, *names: Name) -> np.ndarray:
    """Hash the names to threefry key data, uint32[2]. Each part includes its kind and length, so
    that different lists never collide: "1" and 1 differ, ("ab",) and ("a", "b") too."""
    parts = [f"{'s' if isinstance(part, str) else 'i'}{part}" for part in (seed, purpose, *names)]
    text = "".join(f"{len(part)}:{part}" for part in parts)
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return np.frombuffer(digest, dtype="<u4").astype(np.uint32)


def key(seed: int, purpose: str, *names: Name) -> jax.Array:
    """Return a typed threefry key for device code, e.g. key(seed, "init")."""
    return jax.random.wrap_key_data(
        jnp.asarray(key_data(seed, purpose, *names)), impl="threefry2x32"
    )


def rng(seed: int, purpose: str, *names: Name) -> np.random.Generator:
    """Return a host generator (Philox, counter based) for the same names."""
    low, high = (int(x) for x in key_data(seed, purpose, *names))
    return np.random.Generator(np.random.Philox(key=low | high << 32))
