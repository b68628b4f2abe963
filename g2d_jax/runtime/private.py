"""Names that other libraries do not promise and that have no public equal, all of them; see tests/test_private.py.

JAX has one store for what processes tell each other, and lets nobody at it in public; Orbax reaches it in this way too.
"""

from __future__ import annotations

from typing import Any


def coordination() -> Any:
    """Return JAX's record of the processes: num_processes, process_id, and client, the key-value store that they share.

    client is None for one process.
    """
    from jax._src import distributed

    return distributed.global_state


def precision(value: Any) -> int:
    """Return the bits of a sympy Float that are known; 1 where evalf found no digit."""
    return int(value._prec)
