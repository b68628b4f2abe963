"""One verifier pool for the tests of this folder: starting a worker takes a second or two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from g2d_jax.rewards.pool import VerifierPool


@pytest.fixture(scope="package")
def pool() -> Iterator[VerifierPool]:
    with VerifierPool(workers=2, cpu_seconds=1.0) as shared_pool:
        yield shared_pool
