"""Background writing of files: in one thread of the leader's, in order, while the devices go on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from g2d_jax.runtime import processes


class Writer:
    """A writer whose files are on disk after `wait`, which raises an error of writing."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self._pending: list[Future[None]] = []

    def submit(self, write: Callable[[], None]) -> None:
        """Let the leader's thread call `write`. All processes make the call."""
        if processes.leader():
            self._pending.append(self._thread.submit(write))

    def wait(self) -> None:
        """Wait until all is written. All processes make the call; an error of writing is raised by
        all."""
        processes.on_leader(self._settle)

    def close(self) -> None:
        """Wait, and end the thread."""
        self._thread.shutdown()

    def _settle(self) -> None:
        pending, self._pending = self._pending, []
        for write in pending:
            write.result()
