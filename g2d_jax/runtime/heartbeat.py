"""Heartbeats, hang detection, and one coordinated end of several processes.

SIGTERM, SIGHUP or Ctrl-C of one ─► told to all ─► Preempted where the run can be continued
no sign of life, or no progress anywhere ─► every process ends by itself, with a message that names the host

JAX's own heartbeats cannot do it: their timeout is set before the config is read, and after it JAX
aborts the process (SIGABRT, which no launcher takes for "start again") with a message that knows
the peer's number, not its host. A process that hangs gives JAX signs of life for ever.
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

_PAUSE = 1.0  # seconds between two signs of life
_HEED = 3.0  # seconds from another's leaving to this process's end, if it does not end by itself


@contextlib.contextmanager
def watched(*, peer_timeout: float, hang_timeout: float) -> Iterator[None]:
    """See to it that no process waits for ever, and that SIGTERM of one stops all where they can be
    continued.

    So do SIGHUP, which a terminal sends that is closed, and the first Ctrl-C; the second ends a g2d
    command at once, and in a program of the user's own it is KeyboardInterrupt. Signals are heard
    in the main thread; a handler for Ctrl-C that is not Python's own stays. A peer that gives no
    sign of life for peer_timeout seconds is lost; when no process has got any further for
    hang_timeout seconds they hang. Either ends this process with RESTART, and a message that names
    the host. An error that leaves the block ends the others within seconds.
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
            # of those, too, that were joined by a program of the user's own
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
        # A line may be on its way to a terminal that is being closed: the write fails first, and
        # the signal follows.
        if error.errno == errno.EIO:
            time.sleep(_PAUSE)
            if processes.state.cause == processes.SIGHUP:
                raise processes.Preempted from error
        raise
    finally:  # not at the start: a command may have been told to stop before it came so far
        processes.reset_stop()


# Signals


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Hear SIGTERM, SIGHUP and Ctrl-C, the latter also while the main thread is inside foreign
    code: a program that compiles, say, where Python's own handlers wait for its end."""
    state, interrupt = processes.state, signal.getsignal(signal.SIGINT)
    command = interrupt is processes.on_interrupt  # of the g2d command, whose process may be ended
    with contextlib.ExitStack() as stack:
        stack.enter_context(processes.hearing_stops())
        if (
            command or interrupt is signal.default_int_handler
        ):  # else ignored, in the background; or a user's
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
    """Run a thread that reads the numbers of signals, which the interpreter writes into a socket as
    they come."""
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
    """Give a forked process Python's own handling of Ctrl-C: it shares its parent's socket."""
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
            cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # which a progress bar hides
            print(f"{cursor}g2d: interrupted; {processes.AGAIN}", file=sys.stderr, flush=True)
            os._exit(processes.INTERRUPTED)


# Several processes


@contextlib.contextmanager
def _leaving_together(watcher: _Watcher) -> Iterator[None]:
    """Leave together, or tell the others that this process leaves, and why."""
    try:
        yield
    except processes.Preempted:
        processes.gather("stopped")
        watcher.leaving = True
        _outlast(3 * _PAUSE)
        raise
    except BaseException as error:
        watcher.leave(error)
        _outlast(_HEED + 5 * _PAUSE)
        raise
    processes.gather("done")  # none leaves while another still needs it


def _outlast(seconds: float) -> None:
    """Have the leader leave last: its end is that of the store, from which the others read why."""
    if processes.leader():
        time.sleep(seconds)


class _Watcher:
    """Watches from two threads: one gives signs of life and looks for those of the others, one ends
    this process.

    The first may wait for ever, for the store of a leader whose host is gone. leaving: this process
    ends by itself now.
    """

    def __init__(self, peer_timeout: float, hang_timeout: float) -> None:
        self._peer_timeout, self._hang_timeout = peer_timeout, hang_timeout
        self._own_error: tuple[Any, ...] = ()  # its description and exit status
        now, self._prefix = time.monotonic(), f"{processes.PREFIX}/{processes.state.run}/beat/"
        unheard = {"host": "?", "place": "starting", "met": 0, "marks": -1}
        self._signs: list[dict[str, Any]] = [unheard] * processes.count()
        self._heard = [now] * processes.count()  # when the sign came
        self._signs_of = [0] * processes.count()  # how many came
        self._moved = self._answered = now
        self._left_at: float | None = None
        self._said_silence = self.leaving = False
        processes.state.left.clear()

    def leave(self, error: BaseException) -> None:
        """Tell the others of the error that ends this process, once all of them have given a sign
        of life.

        Where one is gone, collectives fail before it is lost: then this process is ended with a
        message that names it.
        """
        waited_for = {*range(processes.count())} - {processes.index()}
        before = [*self._signs_of]
        while waited_for := waited_for - processes.state.left.keys():
            # The first sign that is found now may be older than the error; another one is not.
            waited_for = {
                number for number in waited_for if self._signs_of[number] < before[number] + 2
            }
            time.sleep(_PAUSE / 10)
        self._own_error = (processes.described(error), processes.status_of(error))
        with contextlib.suppress(Exception):
            self._beat()
        self.leaving = True

    def give_and_take(self) -> None:
        """Give a sign of life, and look for those of the others."""
        try:
            self._beat()
            self._look()
        except (
            Exception
        ) as error:  # the store is gone, and so is its leader; JAX may end this process any moment
            if not self._said_silence:
                self._said_silence = True
                silent = f"{self._peer(0)}, which coordinates, does not answer, it is lost"
                processes.say(f"{processes.name()}: {silent}: {error!s:.200}")

    def _beat(self) -> None:
        state, here = processes.state, {"host": socket.gethostname(), "time": time.monotonic()}
        # of those that wait for one another, who met least often is waited for
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
        """End this process if a peer is lost, has left, or none gets on."""
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
                    f"{self._peer(number)} was not heard of for {now - heard:.0f} s: it is lost"
                )
        if left := list(processes.state.left.values()):
            self._left_at = self._left_at or now
            if now - self._left_at > _HEED:  # enough to hear of it where it waits for the other
                self._end(
                    f"{left[0][0]}; it has left, so this process ends too",
                    min(status for _, status in left),
                )
        if now - self._moved > self._hang_timeout:
            last = min(range(processes.count()), key=lambda number: self._signs[number]["met"])
            everyone = ", ".join(map(self._peer, range(processes.count())))
            faulthandler.dump_traceback()  # where this process's threads are
            self._end(
                f"no process got on for {now - self._moved:.0f} s; the others wait for "
                f"{self._peer(last)}. Last heard of: {everyone}"
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
