"""Heartbeats, hang detection, and one coordinated end of several processes.

    SIGTERM, SIGHUP or Ctrl-C of one ─► sent to all ─► Preempted at a point where the run can resume
    no heartbeat, or no progress anywhere ─► every process ends by itself, and names the host

JAX's own heartbeats do not suffice. Their timeout is set before the config is read. After it JAX
aborts the process (SIGABRT, which no launcher restarts) with a message that has the peer's number
but not its host. A hanging process still sends heartbeats to JAX.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from g2d_jax.runtime import processes
from g2d_jax.runtime.threads import repeating

_PAUSE = 1.0  # seconds between two heartbeats
_GRACE = 3.0  # seconds from another's end to this process's end, unless it ends by itself


@contextlib.contextmanager
def watched(*, peer_timeout: float, hang_timeout: float) -> Iterator[None]:
    """Prevent endless waits, and stop all processes on SIGTERM of one, where the run can resume.

    So do SIGHUP, sent when a terminal closes, and the first Ctrl-C. The second Ctrl-C ends a g2d
    command at once, and raises KeyboardInterrupt in your own program. Signals are handled in the
    main thread; a custom handler for Ctrl-C stays. A peer without a heartbeat for peer_timeout
    seconds is lost. If no process makes progress for hang_timeout seconds, they hang. Either ends
    this process with RESTART, and a message that names the host. An error that leaves the block
    ends the others within seconds.
    """
    processes.state.run += 1
    processes.state.gathers = 0
    processes.state.meetings.clear()
    processes.check_interrupted()
    try:
        with (
            _signals()
            if threading.current_thread() is threading.main_thread()
            else contextlib.nullcontext()
        ):
            if processes.count() == 1:
                yield
                return
            # also of processes that your own program joined
            processes.meet_before_programs()
            watcher = _Watcher(peer_timeout, hang_timeout)
            calls = (_PAUSE, watcher.give_and_take), (_PAUSE, watcher.judge)
            with repeating(*calls, patience=5 * _PAUSE), _leaving_together(watcher):
                yield
    except processes.Preempted as stopped:
        if processes.leader():
            processes.say(f"stopped by {stopped.cause}: {processes.AGAIN}")
        raise
    except OSError as error:
        # A line may be on its way to a closing terminal: the write fails first, then the signal
        # comes.
        if error.errno == errno.EIO:
            time.sleep(_PAUSE)
            if processes.state.cause == processes.SIGHUP:
                raise processes.Preempted from error
        raise
    finally:  # not at the start: a command may have received the signal earlier
        processes.reset_stop()


# Signals


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Handle SIGTERM, SIGHUP and Ctrl-C. Ctrl-C works also while the main thread is inside foreign
    code, for example compiling; Python's own handlers wait for its end."""
    state, interrupt = processes.state, signal.getsignal(signal.SIGINT)
    command = interrupt is processes.on_interrupt  # of the g2d command, whose process may exit
    with contextlib.ExitStack() as stack:
        stack.enter_context(processes.hearing_stops())
        if (
            command or interrupt is signal.default_int_handler
        ):  # otherwise ignored, in the background; or your own
            stack.enter_context(_listening(command))
            state.savable = True
            signal.signal(signal.SIGINT, processes.on_interrupt)
            stack.callback(signal.signal, signal.SIGINT, interrupt)
        try:
            yield
        finally:
            state.savable = False
            state.interrupted = state.interrupted and command


@contextlib.contextmanager
def _listening(command: bool) -> Iterator[None]:
    """Run a thread that reads the numbers of signals, which the interpreter writes into a
    socket."""
    ears, mouth = socket.socketpair()
    mouth.setblocking(False)
    thread = threading.Thread(target=_listen, args=(ears, command), name="g2d-signals", daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)
    with ears:
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            mouth.close()
            thread.join()


def _forget_interrupts() -> None:
    """Restore Python's handling of Ctrl-C in a forked process, which shares its parent's socket."""
    if processes.state.savable:
        processes.state.savable = False
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)


os.register_at_fork(after_in_child=_forget_interrupts)


def _listen(ears: socket.socket, command: bool) -> None:
    first = True
    while number := ears.recv(1):
        if number[0] != signal.SIGINT:
            continue
        if first:
            processes.ask(processes.CTRL_C)
            processes.say("saving; Ctrl-C again ends at once")
            first = False
        elif command:
            cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # a progress bar hides it
            print(f"{cursor}g2d: interrupted; {processes.AGAIN}", file=sys.stderr, flush=True)
            os._exit(processes.INTERRUPTED)


# Several processes


@contextlib.contextmanager
def _leaving_together(watcher: _Watcher) -> Iterator[None]:
    """Leave together, or send the others the reason why this process leaves."""
    try:
        yield
    except processes.Preempted:
        processes.gather("stopped")
        watcher.leaving = True
        _outlast(3 * _PAUSE)
        raise
    except BaseException as error:
        watcher.leave(error)
        _outlast(_GRACE + 5 * _PAUSE)
        raise
    processes.gather("done")  # none leaves while another still needs it


def _outlast(seconds: float) -> None:
    """Make the leader leave last: its end closes the store, from which the others read the
    reason."""
    if processes.leader():
        time.sleep(seconds)


class _Watcher:
    """Watches from two threads: one sends and reads heartbeats, one ends this process.

    The first may wait for ever for the store, if the leader's host is lost. leaving: this process
    ends by itself now.
    """

    def __init__(self, peer_timeout: float, hang_timeout: float) -> None:
        self._peer_timeout, self._hang_timeout = peer_timeout, hang_timeout
        self._own_error: tuple[Any, ...] = ()  # its description and exit status
        now, self._prefix = time.monotonic(), f"{processes.PREFIX}/{processes.state.run}/beat/"
        unheard = {"host": "?", "place": "starting", "met": 0, "marks": -1}
        self._signs: list[dict[str, Any]] = [unheard] * processes.count()
        self._heard = [now] * processes.count()  # when the last heartbeat came
        self._signs_of = [0] * processes.count()  # number of heartbeats
        self._moved = self._answered = now
        self._left_at: float | None = None
        self._reported_silence = self.leaving = False
        processes.state.left.clear()

    def leave(self, error: BaseException) -> None:
        """Send the others the error that ends this process, after a heartbeat from each of them.

        If a process is lost, collectives fail before its heartbeats time out. Then the watcher ends
        this process with a message that names it.
        """
        waited_for = {*range(processes.count())} - {processes.index()}
        before = [*self._signs_of]
        while waited_for := waited_for - processes.state.left.keys():
            # The first heartbeat found now may be older than the error; the second is not.
            waited_for = {
                number for number in waited_for if self._signs_of[number] < before[number] + 2
            }
            time.sleep(_PAUSE / 10)
        self._own_error = (processes.described(error), processes.status_of(error))
        with contextlib.suppress(Exception):
            self._beat()
        self.leaving = True

    def give_and_take(self) -> None:
        """Send a heartbeat, and read those of the others."""
        try:
            self._beat()
            self._look()
        except (
            Exception
        ) as error:  # the store and its leader are gone; JAX may end this process any moment
            if not self._reported_silence:
                self._reported_silence = True
                silent = f"{self._peer(0)}, the coordinator, does not answer and is lost"
                processes.say(f"{processes.name()}: {silent}: {error!s:.200}")

    def _beat(self) -> None:
        state, here = processes.state, {"host": socket.gethostname(), "time": time.monotonic()}
        # of processes that wait for each other, the one with the fewest meetings is late
        met = state.gathers + state.met
        progress = {"place": state.place, "met": met, "marks": state.marks, "cause": state.cause}
        sign = json.dumps({**here, **progress, "error": self._own_error})
        processes.store().key_value_set(
            f"{self._prefix}{processes.index()}", sign, allow_overwrite=True
        )

    def _look(self) -> None:
        now = time.monotonic()
        for key, text in processes.store().key_value_dir_get(self._prefix):
            number, sign = int(key.rsplit("/", 1)[1]), json.loads(text)
            if sign["marks"] != self._signs[number]["marks"]:
                self._moved = now
            if sign != self._signs[number]:
                self._heard[number], self._signs[number] = now, sign
                self._signs_of[number] += 1
            if sign["cause"]:
                processes.ask(sign["cause"])
            if sign["error"] and number != processes.index():
                processes.state.left[number] = tuple(sign["error"])
        self._answered = time.monotonic()

    def judge(self) -> None:
        """End this process if a peer is lost or has left, or if no process makes progress."""
        now = time.monotonic()
        if self.leaving:
            return
        if now - self._answered > self._peer_timeout:
            self._end(
                f"{self._peer(0)} did not answer for {now - self._answered:.0f} s: it is lost"
            )
        for number, heard in enumerate(self._heard):
            if number != processes.index() and self._answered - heard > self._peer_timeout:
                self._end(
                    f"{self._peer(number)} sent no heartbeat for {now - heard:.0f} s: it is lost"
                )
        if left := list(processes.state.left.values()):
            self._left_at = self._left_at or now
            if now - self._left_at > _GRACE:  # long enough to notice it while waiting for the other
                self._end(
                    f"{left[0][0]}; it has ended, so this process ends too",
                    min(status for _, status in left),
                )
        if now - self._moved > self._hang_timeout:
            last = min(range(processes.count()), key=lambda number: self._signs[number]["met"])
            everyone = ", ".join(map(self._peer, range(processes.count())))
            faulthandler.dump_traceback()  # the stacks of this process's threads
            self._end(
                f"no process made progress for {now - self._moved:.0f} s; the others wait for "
                f"{self._peer(last)}. Last known states: {everyone}"
            )

    def _end(self, message: str, status: int = processes.RESTART) -> NoReturn:
        """End this process at once: its main thread may be inside a collective that never
        returns."""
        again = f"; {processes.AGAIN}" if status == processes.RESTART else ""
        processes.say(f"{processes.name()}: {message}{again}")
        _outlast(3 * _PAUSE)
        os._exit(status)

    def _peer(self, number: int) -> str:
        sign = self._signs[number]
        return f"process {number} on {sign['host']} ({sign['place']})"
