"""Threads that do something again and again while a block runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeating(*calls: tuple[float, Callable[[], object]], patience: float | None = None) -> Iterator[None]:
    """Make each call every so many seconds, in a thread of its own, while the block runs; then wait for the threads.

    patience: seconds to wait for each of them at most, None for as long as its call takes.
    """
    closing = threading.Event()

    def run(seconds: float, call: Callable[[], object]) -> None:
        while not closing.wait(seconds):
            call()

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in calls]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        closing.set()
        for thread in threads:
            thread.join(patience)
