"""Several processes that run one program: who is who, agreement between them, and their end when one is lost.

All processes make the same calls in the same order; arrays are spread over the devices of all of them. What a process
finds out for itself (is this file there? how late is it?) may differ from one to the next, so decisions are taken by
one, the leader, and told to the others: `once`. Files that all of them read are written by the leader, inside `once`.
Parts in which each works for itself, sampling for instance, are wrapped in `together`: there the error of one, or the
wish to stop, reaches all.

    initialise ─► watched ─► once, together, gather … ─► the end, of all at once

One process is the special case in which nothing is sent. Messages go through the key-value store of JAX's own
coordination service, not through device collectives: they need no device, and can be waited for with a limit.

Exit statuses of a run: 0 done; 1 stopped with a message; RESTART after SIGTERM or when another process is lost, and
INTERRUPTED after Ctrl-C: then the same command continues.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from g2d_jax import flags, private

T = TypeVar("T")

RESTART = 75
"""EX_TEMPFAIL: what launchers start again on."""

INTERRUPTED = 130
"""128 and SIGINT: what shells say of a command that Ctrl-C ended."""

SIGTERM, CTRL_C = "SIGTERM", "Ctrl-C"
"""What tells a run to stop where it can be continued."""

PREFIX = "g2d"
"""Of keys in the store."""

AGAIN = "the same command with the same --workdir continues"
JOIN = 300  # seconds in which all processes must have started
LINGER = 10.0  # seconds in which a process that is told to stop still waits for the others to come
SLICE = 1.0  # seconds of one wait, between two looks at what else happened

_NETWORK = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED", "onnection", "ocket", "NCCL")
"""What JAX's errors say where another process or the way to it failed, and not the program. Those of Gloo, the
transport between CPUs, are told by its name, whatever their type."""


class Preempted(SystemExit):
    """The run was told to stop, what it has is saved, and the same command continues it. cause: SIGTERM or CTRL_C."""

    def __init__(self, cause: str = "") -> None:
        self.cause = cause or state.cause or SIGTERM
        super().__init__(INTERRUPTED if self.cause == CTRL_C else RESTART)


class Unreachable(ConnectionError):
    """The other processes of the run were not found in time: they may be next time."""


class PeerFailed(RuntimeError):
    """Another process failed; the message names its host and has its error."""


@dataclass
class State:
    """This process: calls of `gather` made so far, marks of progress, and where it is.

    run: times that it was watched. patience: seconds in which a lost peer is found. joining: waiting for the others to
    come. cause: what told the run to stop where it can be continued, `asked` on the monotonic clock; "" if nothing has.
    savable: Ctrl-C asks for that. interrupted: Ctrl-C was pressed here. Signal handlers set these: plain values, for a
    lock may be held where they are called.
    """

    run: int = 0
    patience: float = 0.0
    gathers: int = 0
    marks: int = 0
    place: str = "starting"
    joining: bool = False
    savable: bool = False
    cause: str = ""
    asked: float = 0.0
    interrupted: bool = False


state = State()


def store() -> Any:
    """The key-value store that all processes share, None for one process."""
    return private.coordination().client


def count() -> int:
    """How many processes there are; starts no backend."""
    return int(private.coordination().num_processes) if store() is not None else 1


def index() -> int:
    """Which of them this one is, from 0."""
    return int(private.coordination().process_id) if count() > 1 else 0


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
    of these, and when joined already, it joins none. Raises ValueError for half of an address, and when the others
    cannot be joined; Unreachable when they did not all come in time.
    """
    if store() is not None:
        return
    flags.take_memory()
    if flags.simulated() > 1:
        flags.order_collectives()
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
    tasks = os.environ.get("OMPI_COMM_WORLD_SIZE", "1")
    if os.environ.get("SLURM_NTASKS") == "1":
        return False
    if tasks != "1" and "OMPI_MCA_orte_hnp_uri" not in os.environ:
        raise ValueError(
            f"{tasks} tasks of an MPI that JAX does not know (Open MPI 5): give --coordinator HOST:PORT, "
            "--num-processes $OMPI_COMM_WORLD_SIZE and --process-id $OMPI_COMM_WORLD_RANK"
        )
    kinds = private.clusters()
    if "JOB_COMPLETION_INDEX" not in os.environ:  # a pod of its own, a notebook: no other processes
        kinds.pop("K8sCluster", None)
    return any(kind.is_env_present() for kind in kinds.values())


def _join(address: str | None, total: int | None, mine: int | None) -> None:
    """With all three, or with None to have JAX find them."""
    import jax

    jax.config.update("jax_enable_preemption_service", False)  # SIGTERM is ours, see `watcher.watched`
    flags.spare_threads()
    flags.order_collectives()
    place = f"process {mine} of {total} with the coordinator {address}" if address else "the cluster's environment"
    try:
        if address and mine:
            _reach(address, place)
        _in_thread(
            lambda: jax.distributed.initialize(
                address,
                total,
                mine,
                cluster_detection_method=address and "deactivate",
                initialization_timeout=2 * JOIN,  # then JAX aborts the process; `_in_thread` is done before
                shutdown_timeout_seconds=30,
            ),
            place,
        )
    except (RuntimeError, ValueError, KeyError, TypeError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        # Nobody answered, or the coordination service says that not all came.
        late = isinstance(error, (jax.errors.JaxRuntimeError, TimeoutError))
        raise (Unreachable if late else ValueError)(
            f"the processes did not find each other ({place}): {reason:.300}. Check that all were started, with the "
            "same address and count and each with its own id, and that the port is free and reachable"
        ) from error


def _reach(address: str, place: str) -> None:
    """Wait for the coordinator's port: JAX itself would wait without a word and then abort the process.

    Raises TimeoutError after JOIN seconds, OSError for a host that has no address.
    """
    host, _, port = address.rpartition(":")
    began, told = time.monotonic(), False
    while True:
        _check_linger()
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except socket.gaierror:
            raise
        except OSError as error:
            waited = time.monotonic() - began
            if waited > JOIN:
                raise TimeoutError(f"{address} did not answer for {JOIN} s: {error}") from error
        if waited > 5 and not told:
            _waiting(place)
            told = True
        time.sleep(0.2)


def _in_thread(call: Callable[[], None], place: str) -> None:
    """Make a call that waits in foreign code, where Ctrl-C would not be heard. Raises what it raises, and TimeoutError
    after JOIN seconds."""
    failure: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            failure.append(error)

    state.joining, began = True, time.monotonic()
    thread = threading.Thread(target=run, name="g2d-join", daemon=True)
    thread.start()
    thread.join(5)
    if thread.is_alive():
        _waiting(place)
    while thread.is_alive():
        thread.join(0.2)
        _check_linger()
        if time.monotonic() - began > JOIN:
            raise TimeoutError(f"not all came within {JOIN} s")
    state.joining = False
    if failure:
        raise failure[0]


def _check_linger() -> None:
    """Raise Preempted if this process was told to stop LINGER seconds ago.

    Not at once: a process that joins, and then tells the others, ends all within seconds; for one that leaves before,
    the others wait until JOIN is over.
    """
    if state.cause and time.monotonic() - state.asked > LINGER:
        raise Preempted


def _waiting(place: str) -> None:
    print(f"g2d: {place}: waiting for the others, up to {JOIN} s", file=sys.stderr, flush=True)


# Agreement


def gather(value: Any) -> list[Any]:
    """Every process's value, by index, on every process. All call it, in the same order; it waits for the last.

    value: JSON. Raises PeerFailed when another process ends with an error instead.
    """
    if count() == 1:
        return [value]
    client, number = store(), state.gathers
    state.gathers += 1
    mark(state.place)
    client.key_value_set(f"{PREFIX}/{state.run}/gather/{number}/{index()}", json.dumps(value))
    found = [json.loads(_wait(f"{PREFIX}/{state.run}/gather/{number}/{peer}", peer)) for peer in range(count())]
    if number:  # all have come this far, so all have read the one before
        client.key_value_delete(f"{PREFIX}/{state.run}/gather/{number - 1}/{index()}")
    mark(state.place)
    return found


def _wait(key: str, peer: int) -> str:
    """The value that a peer sets; the watcher ends this process if it never will."""
    import jax

    client = store()
    while True:
        try:
            return str(client.blocking_key_value_get(key, int(SLICE * 1000)))
        except jax.errors.JaxRuntimeError as error:
            if error.error_code_string != "DEADLINE_EXCEEDED":
                raise
        if peer in (gone := left_behind()):
            raise PeerFailed(gone[peer])


def once(make: Callable[[], T]) -> T:
    """What the leader makes, on every process: for decisions, and for writing what all of them read.

    make: returns JSON. An error of the leader's is raised there, and PeerFailed elsewhere. Where the leader is told to
    stop while it waits for something, all raise Preempted.
    """
    if count() == 1:
        return make()
    outcome: dict[str, Any] = {}
    failure: Exception | Preempted | None = None
    if leader():
        try:
            outcome = {"value": make()}
        except Preempted as stop:
            failure, outcome = stop, {"stop": stop.cause}
        except Exception as error:
            failure, outcome = error, {"failure": described(error)}
    outcome = gather(outcome)[0]
    if failure is not None:
        raise failure
    if "stop" in outcome:
        raise Preempted(outcome["stop"])
    if "failure" in outcome:
        raise PeerFailed(outcome["failure"])
    return outcome["value"]  # type: ignore[no-any-return]


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
    told = "" if failure is None else failure.cause if isinstance(failure, Preempted) else described(failure)
    outcomes = gather(told)
    if failure is not None and not isinstance(failure, Preempted):
        raise failure
    if others := [text for text in outcomes if text not in ("", SIGTERM, CTRL_C)]:
        raise PeerFailed(others[0])
    if any(outcomes):
        raise Preempted(max(outcomes))


def described(error: BaseException) -> str:
    """An error and whose it is, for the others."""
    return f"{name()}: {type(error).__name__}: {error}"


def agreed(what: str, value: Any) -> None:
    """Raise ValueError on all processes if one has another value than the leader: other files or settings there.

    value: JSON; of nested objects the fields that differ are named.
    """
    found = gather([value, socket.gethostname()])
    for peer, (other, host) in enumerate(found):
        if other != found[0][0]:
            listed = "; ".join(itertools.islice(_differing(other, found[0][0], ""), 5))
            raise ValueError(
                f"{what} differ between processes, there process {peer} on {host} and here process 0 on "
                f"{found[0][1]}: {listed}. All hosts need the same files, packages and arguments"
            )


def _differing(theirs: Any, ours: Any, path: str) -> Iterator[str]:
    """The fields in which two JSON values differ, a line each."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in sorted({*theirs, *ours}):
            if theirs.get(key) != ours.get(key):
                yield from _differing(theirs.get(key), ours.get(key), f"{path}.{key}" if path else key)
    else:
        yield f"{path or 'it'} is {theirs!r:.100} there and {ours!r:.100} here"


# Being told to stop


def ask(cause: str) -> None:
    """Tell this run to stop where it can be continued. cause: SIGTERM or CTRL_C, of whichever process."""
    if not state.cause:
        state.asked = time.monotonic()
        state.cause = cause


def forget() -> None:
    """Take back that this run was told to stop: it has ended."""
    state.cause = ""


def on_terminate(number: int, frame: Any) -> None:
    """SIGTERM: asks a run to stop where it can be continued."""
    ask(SIGTERM)


def check_stop() -> None:
    """Raise Preempted if this run was told to stop. For blocks where each process works for itself."""
    check_interrupted()
    if state.cause:
        raise Preempted


def check_stop_together() -> None:
    """The same where all processes are at one place: if any was told to stop, all raise Preempted."""
    check_interrupted()
    if any(causes := gather(state.cause)):
        raise Preempted(max(causes))


def notice() -> int:
    """Tell whether this process was told to stop, as a number for `heed`: programs can carry it to all processes."""
    check_interrupted()
    return ("", SIGTERM, CTRL_C).index(state.cause)


def heed(number: int) -> None:
    """Raise Preempted for the largest `notice` of all processes, unless it is 0."""
    if number:
        raise Preempted(("", SIGTERM, CTRL_C)[number])


def on_interrupt(number: int, frame: Any) -> None:
    """Ctrl-C: the first asks a run that can be continued to stop, see `watcher.watched`. Another one, and that of other
    commands, is KeyboardInterrupt, now and, if that is lost in a callback of foreign code, at the next check."""
    first = not state.interrupted
    if first and state.savable:
        ask(CTRL_C)
    state.interrupted = True
    if not (first and state.savable):
        signal.default_int_handler(number, frame)


def check_interrupted() -> None:
    """Raise KeyboardInterrupt if Ctrl-C was pressed where nothing can be saved."""
    if state.interrupted and not state.savable:
        raise KeyboardInterrupt


def patiently(future: Future[T]) -> T:
    """A future's result; raises Preempted if this run is told to stop before it is there."""
    while not future.done():
        check_stop()
        wait([future], SLICE)
    mark(state.place)
    return future.result()


def patiently_completed(futures: Iterable[Future[T]]) -> Iterator[Future[T]]:
    """Futures as they are done; raises Preempted if this run is told to stop before all are."""
    left = set(futures)
    while left:
        check_stop()
        done, left = wait(left, SLICE, FIRST_COMPLETED)
        if done:
            mark(state.place)
        yield from done


def mark(place: str) -> None:
    """Tell that this process is getting on, and where it is."""
    state.place = place
    state.marks += 1


# Leaving


def status_of(error: BaseException | str) -> int:
    """The exit status for an error, or for one as `described` tells it: RESTART where it may be gone next time."""
    text = error if isinstance(error, str) else described(error)
    passing = transport_failed(text) or any(kind in text for kind in ("Unreachable: ", "StoreUnavailable: "))
    return RESTART if passing else 1


def transport_failed(text: str) -> bool:
    """Whether an error, as `described` tells it, is that of a collective whose other end is gone."""
    message = text.partition("JaxRuntimeError: ")[2]  # without the host's name, which may be rocket
    return "Gloo " in text or any(words in message for words in _NETWORK)


def leave(status: int) -> int:
    """End this process at once with an exit status, unless it is alone and nothing is under way; then return it.

    At the ordinary end of the interpreter JAX would wait for the other processes, and requests for their answers.
    """
    if count() > 1 or state.joining or status in (RESTART, INTERRUPTED):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def left_behind() -> dict[int, str]:
    """Who has left with an error, and what it said."""
    with contextlib.suppress(Exception):
        found = store().key_value_dir_get(f"{PREFIX}/{state.run}/left/")
        return {int(key.rsplit("/", 1)[1]): text for key, text in found}
    return {}
