"""Several processes that run one program: who is who, agreement between them, and their end when one is lost.

All processes make the same calls in the same order; arrays are spread over the devices of all of them. What a process
finds out for itself (is this file there? how late is it?) may differ from one to the next, so decisions are taken by
one, the leader, and told to the others: `once`. Files that all of them read are written by the leader, inside `once`.
Parts in which each works for itself, sampling for instance, are wrapped in `together`: there the error of one, or the
wish to stop, reaches all.

    initialise ─► watched ─► once, together, gather … ─► the end, of all at once

One process is the special case in which nothing is sent. Messages go through the key-value store of JAX's own
coordination service, not through device collectives: they need no device, and can be waited for with a limit.

Exit statuses of a run: 0 done; 1 stopped with a message; RESTART after SIGTERM or when another process is lost: then
the same command continues.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

RESTART = 75
"""EX_TEMPFAIL: what launchers start again on."""

_PREFIX = "g2d"
_SLICE = 1.0  # seconds of one wait, between two looks at what else happened
_PAUSE = 1.0  # seconds between two signs of life


class Preempted(SystemExit):
    """The run was told to stop (SIGTERM), what it has is saved, and the same command continues it."""

    def __init__(self) -> None:
        super().__init__(RESTART)


class PeerFailed(RuntimeError):
    """Another process failed; the message names its host and has its error."""


@dataclass
class _State:
    """This process: calls of `gather` made so far, marks of progress, and where it is.

    patience: seconds in which a lost peer is found.
    """

    patience: float = 0.0
    gathers: int = 0
    marks: int = 0
    place: str = "starting"
    stop: threading.Event = field(default_factory=threading.Event)


_state = _State()


def _distributed() -> Any:
    from jax._src import distributed  # the store has no public name; Orbax and others reach it in the same way

    return distributed.global_state


def count() -> int:
    """How many processes there are; starts no backend."""
    return int(_distributed().num_processes) if _distributed().client is not None else 1


def index() -> int:
    """Which of them this one is, from 0."""
    return int(_distributed().process_id) if count() > 1 else 0


def leader() -> bool:
    """Whether this process is the one that decides, prints and writes what all share."""
    return index() == 0


def name() -> str:
    """This process, for a message: "process 1 on HOST"."""
    return f"process {index()} on {socket.gethostname()}"


def initialise(coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None) -> None:
    """Join the other processes of the run, if there are any. Call it before anything touches a device.

    From, in this order: the arguments, coordinator being HOST:PORT of process 0; JAX_COORDINATOR_ADDRESS,
    JAX_NUM_PROCESSES and JAX_PROCESS_ID; what JAX detects itself (Cloud TPU, Slurm, Open MPI, Kubernetes). Without any
    of these, and when joined already, it does nothing. Raises ValueError for half of an address, and when the others
    cannot be reached.
    """
    if _distributed().client is not None:
        return
    address = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    total = _integer("JAX_NUM_PROCESSES") if num_processes is None else num_processes
    mine = _integer("JAX_PROCESS_ID") if process_id is None else process_id
    if address is None and total is None and mine is None:
        if _in_cluster():
            _join(None, None, None)
        return
    if address is None or total is None or mine is None:
        known = f"coordinator {address}, number of processes {total}, process id {mine}"
        raise ValueError(
            f"several processes need all three, but there are: {known}. Give --coordinator HOST:PORT, --num-processes "
            "and --process-id, or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID; for one process, none"
        )
    if not 0 <= mine < total or ":" not in address:
        raise ValueError(
            f"process {mine} of {total} at {address!r}: ids go from 0 to the number of processes less 1, and the "
            "coordinator is HOST:PORT"
        )
    if total > 1:
        _join(address, total, mine)


def _integer(variable: str) -> int | None:
    text = os.environ.get(variable)
    if text is None:
        return None
    if not text.isdecimal():
        raise ValueError(f"{variable} must be a whole number, got {text!r:.80}")
    return int(text)


def _in_cluster() -> bool:
    """Whether JAX would find several processes by itself. A single Slurm or MPI task sees all its devices as it is."""
    from jax._src import clusters

    if "1" in (os.environ.get("SLURM_NTASKS"), os.environ.get("OMPI_COMM_WORLD_SIZE")):
        return False
    kinds = clusters.ClusterEnv._cluster_types
    return any(kind.is_env_present() for kind in kinds if not kind.opt_in_only_method)


def _join(address: str | None, total: int | None, mine: int | None) -> None:
    """With all three, or with None to have JAX find them."""
    import jax

    jax.config.update("jax_enable_preemption_service", False)  # SIGTERM is ours, see `watched`
    try:
        jax.distributed.initialize(
            address,
            total,
            mine,
            cluster_detection_method=address and "deactivate",
            shutdown_timeout_seconds=30,
        )
    except (RuntimeError, ValueError, KeyError, TypeError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        place = f"process {mine} of {total} with the coordinator {address}" if address else "the cluster's environment"
        raise ValueError(
            f"the processes did not find each other ({place}): {reason:.300}. Check that all were started, with the "
            "same address and count and each with its own id, and that the port is free and reachable"
        ) from error


# Agreement


def gather(value: Any) -> list[Any]:
    """Every process's value, by index, on every process. All call it, in the same order; it waits for the last.

    value: JSON. Raises PeerFailed when another process ends with an error instead.
    """
    if count() == 1:
        return [value]
    client, number = _distributed().client, _state.gathers
    _state.gathers += 1
    mark(_state.place)
    client.key_value_set(f"{_PREFIX}/gather/{number}/{index()}", json.dumps(value))
    found = [json.loads(_wait(f"{_PREFIX}/gather/{number}/{peer}", peer)) for peer in range(count())]
    if number:  # all have come this far, so all have read the one before
        client.key_value_delete(f"{_PREFIX}/gather/{number - 1}/{index()}")
    mark(_state.place)
    return found


def _wait(key: str, peer: int) -> str:
    """The value that a peer sets; the watcher ends this process if it never will."""
    import jax

    client = _distributed().client
    while True:
        try:
            return str(client.blocking_key_value_get(key, int(_SLICE * 1000)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        if (left := _left()).get(peer):
            raise PeerFailed(left[peer])


def once(make: Callable[[], T]) -> T:
    """What the leader makes, on every process: for decisions, and for writing what all of them read.

    make: returns JSON. An error of the leader's is raised there, and PeerFailed elsewhere.
    """
    if count() == 1:
        return make()
    told: dict[str, Any] | None = None
    failure: Exception | None = None
    if leader():
        try:
            told = {"value": make()}
        except Exception as error:
            failure, told = error, {"failure": _described(error)}
    found = gather(told)[0]
    if failure is not None:
        raise failure
    if "failure" in found:
        raise PeerFailed(found["failure"])
    return found["value"]  # type: ignore[no-any-return]


@contextlib.contextmanager
def together() -> Iterator[None]:
    """A block in which every process works for itself: it ends when all are through.

    The error of one is raised by all, by the others as PeerFailed. Preempted of one is Preempted of all.
    """
    if count() == 1:
        yield
        return
    failure: BaseException | None = None
    try:
        yield
    except (Exception, Preempted) as error:
        failure = error
    told = "" if failure is None else "stop" if isinstance(failure, Preempted) else _described(failure)
    outcomes = gather(told)
    if failure is not None and not isinstance(failure, Preempted):
        raise failure
    if others := [text for text in outcomes if text not in ("", "stop")]:
        raise PeerFailed(others[0])
    if "stop" in outcomes:
        raise Preempted


def _described(error: BaseException) -> str:
    return f"{name()}: {type(error).__name__}: {error}"


def agreed(what: str, value: Any) -> None:
    """Raise ValueError on all processes if one has another value than the leader: other files or settings there."""
    found = gather([value, socket.gethostname()])
    for peer, (other, host) in enumerate(found):
        if other != found[0][0]:
            raise ValueError(
                f"{what} differ between processes: process {peer} on {host} has {other!r:.200}, process 0 on "
                f"{found[0][1]} has {found[0][0]!r:.200}; all hosts need the same files, packages and arguments"
            )


# Being told to stop


def check_stop() -> None:
    """Raise Preempted if this run was told to stop. For blocks where each process works for itself."""
    if _state.stop.is_set():
        raise Preempted


def check_stop_together() -> None:
    """The same where all processes are at one place: if any was told to stop, all raise Preempted."""
    if any(gather(_state.stop.is_set())):
        raise Preempted


def mark(place: str) -> None:
    """Tell that this process is getting on, and where it is."""
    _state.place = place
    _state.marks += 1


# Watching


@contextlib.contextmanager
def watched(*, peer_timeout: float, hang_timeout: float) -> Iterator[None]:
    """See to it that no process waits for ever, and that SIGTERM of one stops all where they can be continued.

    A peer that gives no sign of life for peer_timeout seconds is lost; when no process has got any further for
    hang_timeout seconds they hang. Either ends this process with RESTART, and a message that names the host. An error
    that leaves the block ends the others within seconds.
    """
    _state.stop.clear()
    before = None
    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGTERM, lambda *_: _state.stop.set())
    try:
        if count() == 1:
            yield
            return
        watcher = _Watcher(peer_timeout, hang_timeout)
        try:
            with _told():
                yield
        finally:
            watcher.close()
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Leave together, or tell the others that this process leaves, and why."""
    import jax

    try:
        yield
    except Preempted:
        gather("stopped")
        raise
    except BaseException as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            time.sleep(_state.patience)  # a collective fails first when a peer is gone: the watcher is to name it
        with contextlib.suppress(Exception):
            _distributed().client.key_value_set(f"{_PREFIX}/left/{index()}", _described(error), allow_overwrite=True)
        if leader():
            time.sleep(3 * _PAUSE)  # its end is that of the store, from which the others read why
        raise
    gather("done")  # none leaves while another still needs it


def _left() -> dict[int, str]:
    """Who has left with an error, and what it said."""
    with contextlib.suppress(Exception):
        found = _distributed().client.key_value_dir_get(f"{_PREFIX}/left/")
        return {int(key.rsplit("/", 1)[1]): text for key, text in found}
    return {}


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
    """A thread that gives signs of life, looks for those of the others, and ends this process when it must."""

    def __init__(self, peer_timeout: float, hang_timeout: float) -> None:
        self._peer_timeout, self._hang_timeout = peer_timeout, hang_timeout
        _state.patience = peer_timeout + 5
        self._closing = threading.Event()
        self._told_stop = False
        self._beats = 0
        now = time.monotonic()
        self._peers = [_Peer(now) for _ in range(count())]
        self._moved = now
        self._left_at: float | None = None
        self._witness = _Witness()
        self._thread = threading.Thread(target=self._run, name="g2d-watcher", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; a process that is to end says so to its witness first."""
        self._closing.set()
        self._thread.join()
        self._witness.close()

    def _run(self) -> None:
        while not self._closing.wait(_PAUSE):
            try:
                self._beat()
                self._look()
            except Exception as error:  # the store is gone: so is the coordinator, and JAX ends this process now
                self._witness.tell(f"{name()}: the coordinator, {self._peer(0)}, does not answer: {error!s:.200}")

    def _beat(self) -> None:
        client, self._beats = _distributed().client, self._beats + 1
        told = {
            "beat": self._beats,
            "host": socket.gethostname(),
            "place": _state.place,
            "gathers": _state.gathers,
            "marks": _state.marks,
        }
        client.key_value_set(f"{_PREFIX}/beat/{index()}", json.dumps(told), allow_overwrite=True)
        if _state.stop.is_set() and not self._told_stop:
            client.key_value_set(f"{_PREFIX}/stop", "1", allow_overwrite=True)
            self._told_stop = True

    def _look(self) -> None:
        client, now = _distributed().client, time.monotonic()
        for key, text in client.key_value_dir_get(f"{_PREFIX}/beat/"):
            if self._peers[int(key.rsplit("/", 1)[1])].read(text, now):
                self._moved = now
        self._witness.tell(
            f"{name()} has ended without a word; if JAX's coordination service failed above, {self._peer(0)}, which "
            f"runs it, is lost. {self._all()}"
        )
        if not _state.stop.is_set() and client.key_value_dir_get(f"{_PREFIX}/stop"):
            _state.stop.set()
        self._judge(now)

    def _judge(self, now: float) -> None:
        """End this process if a peer is lost, has left, or none gets on."""
        for number, peer in enumerate(self._peers):
            if number != index() and now - peer.heard > self._peer_timeout:
                self._end(f"{self._peer(number)} was not heard of for {now - peer.heard:.0f} s: it is lost")
        if left := {number: text for number, text in _left().items() if number != index()}:
            self._left_at = self._left_at or now
            if now - self._left_at > 5:  # enough to hear of it where it waits for the other
                self._end(f"{next(iter(left.values()))}; it has left, so this process ends too", status=_status(left))
        if now - self._moved > self._hang_timeout:
            last = min(range(count()), key=lambda number: self._peers[number].gathers)
            waited = f"no process got on for {now - self._moved:.0f} s"
            self._end(f"{waited}; the others wait for {self._peer(last)}. {self._all()}")

    def _end(self, message: str, status: int = RESTART) -> NoReturn:
        """End this process at once: its main thread may be inside a collective that never returns."""
        self._witness.close()
        print(f"g2d: {name()}: {message}", file=sys.stderr, flush=True)
        os._exit(status)

    def _peer(self, number: int) -> str:
        peer = self._peers[number]
        return f"process {number} on {peer.host} ({peer.place})"

    def _all(self) -> str:
        return "Last heard of: " + ", ".join(self._peer(number) for number in range(count()))


def _status(left: dict[int, str]) -> int:
    """The exit status that goes with another's error: a fault of the network or of a peer may be gone next time."""
    return RESTART if all(": JaxRuntimeError: " in text for text in left.values()) else 1


class _Witness:
    """A small process that says this one's last words if it is ended by JAX or by a signal, and cannot say them."""

    _PROGRAM = (
        "import sys\n"
        "words = ''\n"
        "for line in sys.stdin:\n"
        "    words = line\n"
        "if words.strip():\n"
        "    sys.stderr.write('g2d: ' + words)\n"
    )

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", self._PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    def tell(self, words: str) -> None:
        """Replace what it would say."""
        with contextlib.suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.write(" ".join(words.split()) + "\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """Nothing is to be said."""
        self.tell("")
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._process.wait()
