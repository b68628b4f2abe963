"""The precision of float32 matrix products in a run.

By default, JAX rounds their factors to TF32 on GPUs and to bfloat16 on TPUs. A float32 run turns
this off, unless you set a precision yourself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

NAME = "jax_default_matmul_precision"
"""JAX's setting, and its name in config.json."""

DEFAULT = "default"
"""The platform's own precision, JAX's default."""

_set: list[str] = []  # by active sessions, the innermost last: none of it is the user's


def of(dtype: str) -> str:
    """Return the precision of a run with activations of this dtype: your own, from JAX's
    configuration or JAX_DEFAULT_MATMUL_PRECISION, otherwise "float32" for float32 and DEFAULT for
    other dtypes."""
    import jax  # here, since reports do not need it

    users = None if _set else getattr(jax.config, NAME)
    return users or ("float32" if dtype == "float32" else DEFAULT)


@contextmanager
def used(dtype: str) -> Iterator[None]:
    """Use the precision `of` a dtype in this block, in all threads, since some compile ahead."""
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
