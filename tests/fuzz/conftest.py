"""Bounds on time and memory, so that what would hang or fill the machine is a failure here."""

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

GIBIBYTES = 2


@pytest.fixture(scope="module")
def bounded_memory() -> Iterator[None]:
    """At most 2 GiB more address space than at the start, also for processes started: beyond,
    allocations fail."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + GIBIBYTES * 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all examples of a test: each writes its file anew."""
    return tmp_path_factory.mktemp("hostile")
