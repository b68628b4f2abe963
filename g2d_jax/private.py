"""Names that other libraries do not promise and that have no public equal, all of them; see tests/test_private.py."""

from __future__ import annotations

from typing import Any


def coordination() -> Any:
    """JAX's record of the processes: num_processes, process_id, and client, the key-value store that they share.

    client is None for one process. Orbax reaches it in the same way.
    """
    from jax._src import distributed

    return distributed.global_state


def clusters() -> dict[str, Any]:
    """The kinds of clusters in which JAX finds several processes by itself, by class; each has is_env_present()."""
    from jax._src import clusters

    kinds = clusters.ClusterEnv._cluster_types
    return {kind.__name__: kind for kind in kinds if not kind.opt_in_only_method}


def backends_started() -> bool:
    """Whether JAX has looked for devices: from then on flags in the environment have no effect."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def precision(value: Any) -> int:
    """Bits of a sympy Float that are known; 1 where evalf found no digit."""
    return int(value._prec)
