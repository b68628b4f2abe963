"""Background writing of files: one thread of the leader writes them in order."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from g2d_jax.runtime import processes


class Writer:
    """A queue of writes. After `wait` all files are on disk."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self._pending: list[Future[None]] = []

    def submit(self, write: Callable[[], None]) -> None:
        """Queue `write` for the leader's thread. All processes make the call."""
        if processes.leader():
            self._pending.append(self._thread.submit(write))

    def wait(self) -> None:
        """Wait until all is written. All processes make the call, and all raise a write error."""
        processes.on_leader(self._settle)

    def close(self) -> None:
        """Wait, and end the thread."""
        self._thread.shutdown()

    def _settle(self) -> None:
        pending, self._pending = self._pending, []
        for write in pending:
            write.result()
