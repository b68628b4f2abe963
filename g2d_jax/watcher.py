"""What keeps several processes from waiting for ever: signs of life, and one end for all.

SIGTERM or Ctrl-C of one ─► told to all ─► Preempted where the run can be continued
no sign of life, or no progress anywhere ─► every process ends by itself, with a message that names the host
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from g2d_jax import processes

_PAUSE = 1.0  # seconds between two signs of life
_HEED = 3.0  # seconds from another's leaving to this process's end, if it does not end by itself


def _prefix() -> str:
    return f"{processes.PREFIX}/{processes.state.run}"


@contextlib.contextmanager
def watched(*, peer_timeout: float, hang_timeout: float) -> Iterator[None]:
    """See to it that no process waits for ever, and that SIGTERM of one stops all where they can be continued.

    So does the first Ctrl-C; the second ends a g2d command at once, and in a program of the user's own it is
    KeyboardInterrupt. Signals are heard in the main thread; a handler for Ctrl-C that is not Python's own stays.
    A peer that gives no sign of life for peer_timeout seconds is lost; when no process has got any further for
    hang_timeout seconds they hang. Either ends this process with RESTART, and a message that names the host. An error
    that leaves the block ends the others within seconds.
    """
    processes.state.run += 1
    processes.state.gathers = 0
    processes.check_interrupted()
    try:
        with _signals() if threading.current_thread() is threading.main_thread() else contextlib.nullcontext():
            if processes.count() == 1:
                yield
                return
            watcher = _Watcher(peer_timeout, hang_timeout)
            try:
                with _told(watcher):
                    yield
            finally:
                watcher.close()
    except processes.Preempted as stopped:
        if processes.leader():
            print(f"g2d: stopped by {stopped.cause}: {processes.AGAIN}", file=sys.stderr, flush=True)
        raise
    finally:  # not at the start: a command may have been told to stop before it came so far
        processes.forget()


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Hear SIGTERM and Ctrl-C, the latter also while the main thread is inside foreign code: a program that compiles,
    say, where Python's own handlers wait for its end."""
    state, interrupt = processes.state, signal.getsignal(signal.SIGINT)
    command = interrupt is processes.on_interrupt  # of the g2d command, whose process may be ended
    before = signal.signal(signal.SIGTERM, processes.on_terminate)
    try:
        if not command and interrupt is not signal.default_int_handler:  # ignored, in the background; a user's
            yield
            return
        with _listening(command):
            state.savable = True
            signal.signal(signal.SIGINT, processes.on_interrupt)
            try:
                yield
            finally:
                signal.signal(signal.SIGINT, interrupt)
                state.savable = False
                if not command:
                    state.interrupted = False
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


@contextlib.contextmanager
def _listening(command: bool) -> Iterator[None]:
    """A thread that reads the numbers of signals, which the interpreter writes into a socket as they come."""
    ears, mouth = socket.socketpair()
    mouth.setblocking(False)
    thread = threading.Thread(target=_listen, args=(ears, command), name="g2d-signals", daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)
    _mouths.append(mouth)
    try:
        yield
    finally:
        _mouths.remove(mouth)
        signal.set_wakeup_fd(before)
        mouth.close()
        thread.join()
        ears.close()


_mouths: list[socket.socket] = []  # what signals are written to while this process listens


def _forget_signals() -> None:
    """Give a forked process, as of a reward function's own pool, the usual handlers: it shares its parent's socket."""
    if _mouths:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)


os.register_at_fork(after_in_child=_forget_signals)


def _listen(ears: socket.socket, command: bool) -> None:
    first = True
    while number := ears.recv(1):
        if number[0] != signal.SIGINT:
            continue
        if first:
            processes.ask(processes.CTRL_C)
            print("g2d: saving; Ctrl-C again ends at once", file=sys.stderr, flush=True)
            first = False
        elif command:
            cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # which a progress bar hides
            print(f"{cursor}g2d: interrupted; {processes.AGAIN}", file=sys.stderr, flush=True)
            os._exit(processes.INTERRUPTED)


@contextlib.contextmanager
def _told(watcher: _Watcher) -> Iterator[None]:
    """Leave together, or tell the others that this process leaves, and why."""
    try:
        yield
    except processes.Preempted:
        processes.gather("stopped")
        watcher.leaving = True
        _outlast(3 * _PAUSE)
        raise
    except BaseException as error:
        if processes.transport_failed(processes.described(error)):
            time.sleep(processes.state.patience)  # collectives fail first when a peer is gone: the watcher names it
        with contextlib.suppress(Exception):
            processes.store().key_value_set(
                f"{_prefix()}/left/{processes.index()}", processes.described(error), allow_overwrite=True
            )
        watcher.leaving = True
        _outlast(_HEED + 5 * _PAUSE)
        raise
    processes.gather("done")  # none leaves while another still needs it


def _outlast(seconds: float) -> None:
    """The leader leaves last: its end is that of the store, from which the others read why."""
    if processes.leader():
        time.sleep(seconds)


@dataclass
class _Peer:
    """What was last heard of a process. heard: own clock, seconds."""

    heard: float
    text: str = ""
    host: str = "?"
    place: str = "starting"
    gathers: int = 0
    marks: int = -1

    def read(self, text: str, now: float) -> bool:
        """Take in its latest sign of life; True if it has got further."""
        if text == self.text:
            return False
        self.heard, self.text = now, text
        told = json.loads(text)
        further = told["marks"] != self.marks
        self.host, self.place, self.gathers, self.marks = told["host"], told["place"], told["gathers"], told["marks"]
        return further


class _Watcher:
    """Two threads: one gives signs of life and looks for those of the others, one ends this process when it must.

    The first may wait for ever, for the store of a leader whose host is gone. leaving: this process ends by itself now.
    """

    def __init__(self, peer_timeout: float, hang_timeout: float) -> None:
        self._peer_timeout, self._hang_timeout = peer_timeout, hang_timeout
        processes.state.patience = peer_timeout + 5
        self._closing = threading.Event()
        self._told_stop = False
        self._beats = 0
        now = time.monotonic()
        self._peers = [_Peer(now) for _ in range(processes.count())]
        self._moved = self._answered = now
        self._left: dict[int, str] = {}
        self._left_at: float | None = None
        self._said_silence = False
        self.leaving = False
        self._threads = [
            threading.Thread(target=target, name=f"g2d-{name}", daemon=True)
            for name, target in (("signs", self._run), ("watcher", self._watch))
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads."""
        self._closing.set()
        for thread in self._threads:
            thread.join(5 * _PAUSE)

    def _run(self) -> None:
        while not self._closing.wait(_PAUSE):
            try:
                self._beat()
                self._look()
            except Exception as error:  # the store is gone, and so is its leader; JAX may end this process any moment
                if not self._said_silence:
                    self._said_silence = True
                    self._print(f"{self._peer(0)}, which coordinates, does not answer, it is lost: {error!s:.200}")

    def _watch(self) -> None:
        while not self._closing.wait(_PAUSE):
            if not self.leaving:
                self._judge(time.monotonic())

    def _beat(self) -> None:
        client, self._beats = processes.store(), self._beats + 1
        told = {
            "beat": self._beats,
            "host": socket.gethostname(),
            "place": processes.state.place,
            "gathers": processes.state.gathers,
            "marks": processes.state.marks,
        }
        client.key_value_set(f"{_prefix()}/beat/{processes.index()}", json.dumps(told), allow_overwrite=True)
        if processes.state.cause and not self._told_stop:
            key, cause = f"{_prefix()}/stop/{processes.index()}", processes.state.cause
            client.key_value_set(key, cause, allow_overwrite=True)
            self._told_stop = True

    def _look(self) -> None:
        client, now = processes.store(), time.monotonic()
        for key, text in client.key_value_dir_get(f"{_prefix()}/beat/"):
            if self._peers[int(key.rsplit("/", 1)[1])].read(text, now):
                self._moved = now
        for _, cause in client.key_value_dir_get(f"{_prefix()}/stop/"):
            processes.ask(cause)
        self._left = {n: text for n, text in processes.left_behind().items() if n != processes.index()}
        self._answered = time.monotonic()

    def _judge(self, now: float) -> None:
        """End this process if a peer is lost, has left, or none gets on."""
        if now - self._answered > self._peer_timeout:
            self._end(f"{self._peer(0)} did not answer for {now - self._answered:.0f} s: it is lost")
        for number, peer in enumerate(self._peers):
            if number != processes.index() and self._answered - peer.heard > self._peer_timeout:
                self._end(f"{self._peer(number)} was not heard of for {now - peer.heard:.0f} s: it is lost")
        if left := self._left:
            self._left_at = self._left_at or now
            if now - self._left_at > _HEED:  # enough to hear of it where it waits for the other
                self._end(
                    f"{next(iter(left.values()))}; it has left, so this process ends too",
                    status=min(map(processes.status_of, left.values())),
                )
        if now - self._moved > self._hang_timeout:
            last = min(range(processes.count()), key=lambda number: self._peers[number].gathers)
            waited = f"no process got on for {now - self._moved:.0f} s"
            self._end(f"{waited}; the others wait for {self._peer(last)}. {self._all()}")

    def _end(self, message: str, status: int = processes.RESTART) -> NoReturn:
        """End this process at once: its main thread may be inside a collective that never returns."""
        then = f"; {processes.AGAIN}" if status == processes.RESTART else ""
        self._print(f"{message}{then}")
        _outlast(3 * _PAUSE)
        os._exit(status)

    def _print(self, message: str) -> None:
        print(f"g2d: {processes.name()}: {message}", file=sys.stderr, flush=True)

    def _peer(self, number: int) -> str:
        peer = self._peers[number]
        return f"process {number} on {peer.host} ({peer.place})"

    def _all(self) -> str:
        return "Last heard of: " + ", ".join(self._peer(number) for number in range(processes.count()))
