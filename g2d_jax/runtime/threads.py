"""Threads that repeat calls during a block, or make one call for each of many items."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
S = TypeVar("S")


@contextmanager
def repeating(
    *calls: tuple[float, Callable[[], object]], patience: float | None = None
) -> Iterator[None]:
    """Repeat each call at its interval in seconds, in a thread of its own, during the block; then
    wait for the threads.

    patience: most seconds to wait for each thread, None to wait until its call ends.
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


def in_daemons(call: Callable[[S], T], things: Iterable[S], count: int) -> list[Future[T]]:
    """Make a call for each item, in `count` threads, and return the futures of the results, in
    order.

    Cancel the futures that you no longer need. Unlike a ThreadPoolExecutor, these threads do not
    delay the program's end.
    """
    left: queue.SimpleQueue[tuple[Future[T], S]] = queue.SimpleQueue()
    futures = []
    for thing in things:
        future: Future[T] = Future()
        futures.append(future)
        left.put((future, thing))

    def work() -> None:
        while True:
            try:
                future, thing = left.get_nowait()
            except queue.Empty:
                return
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call(thing))
            except BaseException as error:
                future.set_exception(error)

    for _ in range(min(count, len(futures))):
        threading.Thread(target=work, name="g2d-daemon", daemon=True).start()
    return futures
