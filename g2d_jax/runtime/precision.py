"""The precision of float32 matrix products in a run.

Left alone, JAX rounds their factors to TF32 on GPUs and to bfloat16 on TPUs. A run in float32 tells
it not to; what a user told it stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

NAME = "jax_default_matmul_precision"
"""JAX's setting, and its name in config.json."""

DEFAULT = "default"
"""The platform's own precision, as where nothing is set."""

_set: list[str] = []  # by sessions under way, the innermost last: none of it is the user's


def of(dtype: str) -> str:
    """Return the precision of a run whose activations have this dtype: what the user set, by JAX's
    configuration or JAX_DEFAULT_MATMUL_PRECISION, else "float32" in float32, and DEFAULT in
    others."""
    import jax  # here: reports read work directories without it

    users = None if _set else getattr(jax.config, NAME)
    return users or ("float32" if dtype == "float32" else DEFAULT)


@contextmanager
def used(dtype: str) -> Iterator[None]:
    """Multiply in the precision `of` a dtype in this block, in all threads: some compile ahead."""
    import jax

    before, chosen = getattr(jax.config, NAME), of(dtype)
    if chosen == (before or DEFAULT):
        yield
        return
    jax.config.update(NAME, None if chosen == DEFAULT else chosen)
    _set.append(chosen)
    try:
        yield
    finally:
        _set.pop()
        jax.config.update(NAME, before)
