"""Several processes that run one program: joining, agreement, stopping, and leaving.

All processes make the same calls in the same order; arrays are spread over the devices of all of
them. Observations (does this file exist? how late is it?) may differ between processes, so the
leader decides and sends the others its decision: `on_leader`. The leader writes
shared files, inside `on_leader`. `barrier` wraps parts in which each works for itself, such as
sampling, and spreads an error, or a request to stop, to all.

    initialise ─► watched ─► on_leader, barrier, gather … ─► the end, of all at once

A single process sends nothing.

No library does this. JAX's collectives (multihost_utils) need all devices, and waiting for them
cannot be stopped, so messages use the key-value store of JAX's coordination service. JAX's
preemption service, which Orbax also uses, agrees only on a training step of several processes after
SIGTERM. A run must also stop alone, after Ctrl-C, and while it samples, scores or waits for a lock.

Exit statuses of a run: 0 done; 1 stopped with a message; RESTART after SIGTERM or SIGHUP, or when
another process is lost, and INTERRUPTED after Ctrl-C: then the same command resumes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, TypeVar
from urllib.parse import quote

from g2d_jax.records import Ended
from g2d_jax.runtime import flags, private, terminal

T = TypeVar("T")

RESTART = 75
"""EX_TEMPFAIL: launchers restart on this status."""

INTERRUPTED = 130
"""128 and SIGINT: the shells' status of a command ended by Ctrl-C."""

SIGTERM, SIGHUP, CTRL_C = "SIGTERM", "SIGHUP", "Ctrl-C"
"""Causes that stop a run at a point where it can resume."""

_CAUSES = ("", SIGHUP, SIGTERM, CTRL_C)

# some systems lack some of them
_STOPS = {getattr(signal, name): name for name in (SIGTERM, SIGHUP) if hasattr(signal, name)}

PREFIX = "g2d"
"""The first part of all keys in the store."""

AGAIN = "the same command with the same --workdir continues"
ANOTHER = "The same command would stop here again: change the settings, and give another --workdir"
JOIN = 300  # seconds in which all processes must start
LINGER = 10.0  # seconds that a stopped process still waits for the others to join
LATE = 30.0  # seconds after which a message names the late process
SLICE = 1.0  # seconds of one wait, between two checks for other events

_PASSING = {"UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED", "INTERNAL", "UNKNOWN"}
"""Status codes of JAX's errors that may come from another process or the network."""


class Preempted(SystemExit):
    """The run was stopped; its data is saved, and the same command resumes it.

    cause: SIGTERM, SIGHUP or CTRL_C.
    """

    def __init__(self, cause: str = "") -> None:
        self.cause = cause or state.cause or SIGTERM
        super().__init__(INTERRUPTED if self.cause == CTRL_C else RESTART)


class Unreachable(ConnectionError):
    """The other processes of the run were not found in time: a retry may succeed."""

    exit_status = RESTART


class PeerFailed(RuntimeError):
    """Another process failed; the message names its host and its error."""

    def __init__(self, message: str, exit_status: int = 1) -> None:
        super().__init__(message)
        self.exit_status = exit_status


@dataclass
class State:
    """This process: number of `gather` calls, marks of progress, and its place.

    meetings: calls of `meet`, by purpose; met: finished ones in total. run: number of watched
    blocks. joining: True while it waits for the others to join. cause: of the request to stop where
    the run can resume, at `asked` on the monotonic clock; "" for none. hearing: SIGTERM and SIGHUP
    request that. savable: Ctrl-C requests it too. interrupted: Ctrl-C was pressed here. Signal
    handlers set cause, asked and interrupted: plain values, since the interrupted code may hold a
    lock. left: the processes that left with an error, with its description and exit status.
    """

    run: int = 0
    gathers: int = 0
    meetings: Counter[str] = field(default_factory=Counter)
    met: int = 0
    marks: int = 0
    place: str = "starting"
    joining: bool = False
    hearing: bool = False
    savable: bool = False
    cause: str = ""
    asked: float = 0.0
    interrupted: bool = False
    left: dict[int, tuple[str, int]] = field(default_factory=dict)


state = State()
_MEETING = threading.Lock()
"""Held while threads update `State.meetings` and `State.met`."""


def store() -> Any:
    """Return the key-value store that all processes share, None for one process."""
    return private.coordination().client


def how_to_continue(ended: Ended | None) -> str:
    """Return that no process works on a run, and how to continue it. ended: None if unknown."""
    if ended is None or ended.how != "error":
        return f"no process works on it: {AGAIN}"
    if ended.hopeless:
        return f"no process works on it. {ANOTHER}"
    return (
        f"no process works on it: {AGAIN}, once you have fixed the cause. Other settings need "
        "another --workdir"
    )


def count() -> int:
    """Return the number of processes; starts no backend."""
    if store() is None:
        return 1
    return int(private.coordination().num_processes)


def index() -> int:
    """Return the index of this process, from 0."""
    if count() == 1:
        return 0
    return int(private.coordination().process_id)


def leader() -> bool:
    """Return whether this process decides, prints and writes for all."""
    return index() == 0


def name() -> str:
    """Return this process's name for a message: "process 1 on HOST"."""
    return f"process {index()} on {socket.gethostname()}"


def say(message: str) -> None:
    """Print a line about this process to standard error, escaped by `terminal.shown`. Further lines
    are indented, so that foreign text cannot imitate a message."""
    text = "g2d: " + re.sub(r"\n(?=\S)", "\n  ", terminal.shown(message))
    print(text, file=sys.stderr, flush=True)


# Joining


def initialise(
    coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Join the other processes of the run, if there are any. Call it before anything uses a device.

    From, in this order: the arguments, with coordinator HOST:PORT of process 0;
    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID; the clusters that JAX detects
    (Cloud TPU, Slurm, Open MPI 4, Kubernetes). Without any of these, or if joined already, it joins
    none. Raises ValueError for an incomplete address, and if joining fails; Unreachable if some did
    not come in time.
    """
    if store() is not None:
        meet_before_programs()
        return
    flags.set_up_gpus()
    if flags.simulated() > 1:
        flags.spare_threads()
        flags.order_collectives()
    address = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    total = _integer("JAX_NUM_PROCESSES") if num_processes is None else num_processes
    mine = _integer("JAX_PROCESS_ID") if process_id is None else process_id
    if address is None and total is None and mine is None:
        if _in_cluster():
            _join(None, None, None)
        return
    if (
        address is None
        or total is None
        or mine is None
        or not 0 <= mine < total
        or ":" not in address
    ):
        raise ValueError(
            f"process {mine} of {total} at {address!r}: several processes need all three values, "
            "with ids from 0 to one less than their number, and a coordinator HOST:PORT. Set "
            "--coordinator, --num-processes and --process-id, or JAX_COORDINATOR_ADDRESS, "
            "JAX_NUM_PROCESSES and JAX_PROCESS_ID; for one process, set none"
        )
    if total > 1:
        _join(address, total, mine)


def _integer(variable: str) -> int | None:
    text = os.environ.get(variable)
    if text is not None and not text.isdecimal():
        raise ValueError(f"{variable} must be a whole number, got {text!r:.80}")
    if text is None:
        return None
    return int(text)


def _in_cluster() -> bool:
    """Return whether a scheduler that JAX knows started this process with others. Call it after
    importing JAX."""
    env = os.environ.keys()
    tasks = os.environ.get("OMPI_COMM_WORLD_SIZE", "1")
    if os.environ.get("SLURM_NTASKS") == "1":  # a single task sees all its devices anyway
        return False
    if tasks != "1" and "OMPI_MCA_orte_hnp_uri" not in env:
        raise ValueError(
            f"{tasks} tasks of an MPI that JAX does not know (Open MPI 5): set --coordinator "
            "HOST:PORT, "
            "--num-processes $OMPI_COMM_WORLD_SIZE and --process-id $OMPI_COMM_WORLD_RANK"
        )
    return (
        tasks != "1"
        or {"SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID"}
        <= env
        # Otherwise a single pod, or a notebook; JAX queries Kubernetes with its package.
        or (
            {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= env
            and find_spec("kubernetes") is not None
        )
        or flags.in_tpu_cluster()
    )


def _join(address: str | None, total: int | None, mine: int | None) -> None:
    """Join with all three values; with None JAX detects them."""
    import jax

    # SIGTERM is ours, see `watcher.watched`
    jax.config.update("jax_enable_preemption_service", False)
    flags.spare_threads()
    flags.order_collectives()
    place = (
        f"process {mine} of {total} with the coordinator {address}"
        if address
        else "the cluster's environment"
    )
    try:
        _in_thread(
            lambda: jax.distributed.initialize(
                address,
                total,
                mine,
                cluster_detection_method=address and "deactivate",
                initialization_timeout=2
                * JOIN,  # then JAX aborts the process; `_in_thread` ends earlier
                shutdown_timeout_seconds=30,
            ),
            place,
        )
    except (RuntimeError, ValueError, KeyError, TypeError, OSError) as error:
        reason, *_ = [*str(error).splitlines(), type(error).__name__]
        kind: type[Exception] = ValueError
        if isinstance(error, (jax.errors.JaxRuntimeError, TimeoutError)):
            # no answer, or the coordination service reports that not all came
            kind = Unreachable
        raise kind(
            f"the processes did not find each other ({place}): {reason:.300}. Check that you "
            "started all of them, with one address and count and different ids, and that the "
            "port is free and reachable"
        ) from error
    meet_before_programs()


def _in_thread(call: Callable[[], None], place: str) -> None:
    """Run a call that waits in foreign code, where Ctrl-C would not be handled.

    Raises what it raises; TimeoutError after JOIN seconds; Preempted after the call, or LINGER
    seconds after this process was stopped. A process that joins first, and then sends the others
    the stop, ends all within seconds. If it left earlier, the others would wait until JOIN is over.
    """
    future: Future[None] = Future()

    def run() -> None:
        try:
            call()
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)

    state.joining = True
    began = time.monotonic()
    reported = False
    threading.Thread(target=run, name="g2d-join", daemon=True).start()
    while not wait([future], 0.2).done:
        waited = time.monotonic() - began
        if waited > 5 and not reported:
            reported = True
            say(f"{place}: waiting for the others, up to {JOIN} s")
        if state.cause and time.monotonic() - max(state.asked, began) > LINGER:
            raise Preempted
        if waited > JOIN:
            raise TimeoutError(f"not all came within {JOIN} s")
    state.joining = False
    future.result()


# Agreement


def gather(value: Any) -> list[Any]:
    """Return every process's value, by index, on every process. All call it in the same order; it
    waits for the last.

    value: JSON. Raises PeerFailed if another process ends with an error instead.
    """
    if count() == 1:
        return [value]
    client = store()
    number = state.gathers
    state.gathers += 1
    note_progress(state.place)
    client.key_value_set(f"{PREFIX}/{state.run}/gather/{number}/{index()}", json.dumps(value))
    values = [
        json.loads(_wait(f"{PREFIX}/{state.run}/gather/{number}/{peer}", peer))
        for peer in range(count())
    ]
    if number:  # all have come this far, so all have read the previous one
        client.key_value_delete(f"{PREFIX}/{state.run}/gather/{number - 1}/{index()}")
    note_progress(state.place)
    return values


def meet_before_programs() -> None:
    """Make all processes on CPUs wait for each other before each program that they execute
    together.

    Gloo, which carries messages between CPU devices, times out after 30 seconds: at the first
    message of a program's devices, and in every reduce-scatter. One process may be minutes late: it
    compiles a program that another finds in its cache, or writes to a slow disk. (JAX's cache key
    includes a process's own devices, so the cache has only the first process's programs.)
    Accelerators wait by themselves.

    Each program then runs synchronously on a CPU device. Otherwise a shared program would start
    only after all earlier ones, long after the processes met. This affects devices that nothing has
    used yet.
    """
    import jax

    if count() > 1:
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    private.before_shared_programs("cpu", meet)


def meet(program: str, peers: tuple[int, ...]) -> None:
    """Wait until all these processes, including this one, have made this call equally often.

    program: the purpose of the meeting, so that threads with different ones do not meet; each is
    used by one thread at a time. Raises PeerFailed if another process ends with an error instead.
    """
    # One name for the counter and the key, in which "/" would begin another folder.
    group = program
    if len(peers) < count():
        group += f" {'-'.join(map(str, peers))}"
    group = quote(group, safe="")
    with _MEETING:
        number = state.meetings[group]
        state.meetings[group] += 1
    client = store()
    key = f"{PREFIX}/{state.run}/meet/{group}/{{}}/{{}}"
    client.key_value_set(key.format(number, index()), "")
    for peer in peers:
        if peer != index():
            late = f"{name()}: waits for process {peer}, which may still compile, before {program}"
            _wait(key.format(number, peer), peer, late)
    if number:  # all have come this far, so none waits for the previous one
        client.key_value_delete(key.format(number - 1, index()))
    with _MEETING:
        state.met += 1
    note_progress(state.place)


def _wait(key: str, peer: int, late: str = "") -> str:
    """Return the value that a peer sets; the watcher ends this process if the peer never does.

    late: a message to print once if that takes long.
    """
    import jax

    client = store()
    began = time.monotonic()
    while True:
        if late and time.monotonic() - began > LATE:
            say(late)
            late = ""
        try:
            return str(client.blocking_key_value_get(key, int(SLICE * 1000)))
        except jax.errors.JaxRuntimeError as error:
            if error.error_code_string != "DEADLINE_EXCEEDED":
                raise
        if peer in state.left:
            raise PeerFailed(*state.left[peer])


def on_leader(make: Callable[[], T]) -> T:
    """Return the leader's result on every process: for decisions, and for writing shared files.

    make: returns JSON. The leader raises its own error, the others PeerFailed. If the leader is
    stopped while it waits, all raise Preempted.
    """
    with barrier() as values:
        if leader():
            values.append(make())
    return values[0]  # type: ignore[no-any-return]


@contextlib.contextmanager
def barrier() -> Iterator[list[Any]]:
    """Run a block in which every process works for itself; wait for all at its end.

    Yields a list, empty at first; after the block it has the items from all processes, by index, on
    every process. JSON. An error of one process is raised by all, as PeerFailed on the others.
    Preempted of one is Preempted of all.
    """
    values: list[Any] = []
    failure = None
    if count() == 1:
        yield values
        return
    # Kept until all have reported: raising at once would leave the others waiting.
    try:
        yield values
    except (Exception, Preempted) as error:
        failure = error
    stopped = ""
    own_error = None
    if isinstance(failure, Preempted):
        stopped = failure.cause
    elif failure is not None:
        own_error = [described(failure), status_of(failure)]
    outcomes = gather([values, stopped, own_error])
    if failure is not None and not stopped:
        raise failure
    for *_, theirs in outcomes:
        if theirs:
            raise PeerFailed(*theirs)
    # The largest is a stopped process's cause; the others have "".
    if cause := max(cause for _, cause, _ in outcomes):
        raise Preempted(cause)
    values[:] = itertools.chain.from_iterable(put for put, _, _ in outcomes)


def described(error: BaseException) -> str:
    """Describe an error and its process, for the others."""
    return f"{name()}: {type(error).__name__}: {error}"


def agreed(what: str, value: Any) -> None:
    """Raise ValueError on all processes if one has another value than the leader: other files or
    settings.

    value: JSON; for nested objects the message names the fields that differ.
    """
    values = gather([value, socket.gethostname()])
    for peer, (other, host) in enumerate(values):
        if other != values[0][0]:
            listed = "; ".join(itertools.islice(_differing(other, values[0][0], ""), 5))
            raise ValueError(
                f"{what} differ between processes: there is process {peer} on {host}, here is "
                "process 0 on "
                f"{values[0][1]}: {listed}. All hosts need the same files, packages and arguments"
            )


def _differing(theirs: Any, ours: Any, path: str) -> Iterator[str]:
    """Describe the fields in which two JSON values differ, a line each."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in sorted({*theirs, *ours}):
            if theirs.get(key) != ours.get(key):
                yield from _differing(
                    theirs.get(key), ours.get(key), f"{path}.{key}" if path else key
                )
    else:
        yield f"{path or 'it'} is {theirs!r:.100} there and {ours!r:.100} here"


# Stopping


def ask(cause: str) -> None:
    """Request that this run stops where it can resume. cause: SIGTERM, SIGHUP or CTRL_C, of any
    process."""
    if not state.cause:
        state.asked = time.monotonic()
        state.cause = cause


def reset_stop() -> None:
    """Clear the request to stop: the run has ended."""
    state.cause = ""


@contextlib.contextmanager
def hearing_stops() -> Iterator[None]:
    """Let SIGTERM and SIGHUP stop a run where it can resume. In the main thread.

    An ignored SIGHUP stays ignored, as with nohup.
    """
    terminals = [file for file in (1, 2) if _is_terminal(file)]

    def hear(number: int, frame: Any) -> None:
        ask(_STOPS[signal.Signals(number)])
        for file in terminals:
            if not _is_terminal(file):  # it was closed: writes there now fail
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, file)
                os.close(nothing)

    before = {}
    for number, name in _STOPS.items():
        if name != SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, hear)
    heard = state.hearing
    state.hearing = True
    try:
        yield
    finally:
        state.hearing = heard
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _hear_no_stops() -> None:
    """Restore the system's signal handling in a forked process, as of a reward function's own
    pool."""
    if not state.hearing:
        return
    state.hearing = False
    for number, name in _STOPS.items():
        if name != SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_hear_no_stops)


def _is_terminal(file: int) -> bool:
    """Return whether an open file is a terminal that still exists."""
    try:
        return os.isatty(file)
    except OSError:
        return False


def check_stop() -> None:
    """Raise Preempted if this run was stopped. For blocks where each process works for itself."""
    check_interrupted()
    if state.cause:
        raise Preempted


def check_stop_together() -> None:
    """Raise Preempted on all processes, at the same place, if any was stopped."""
    raise_if_stopped(max(gather(stop_code())))


def stop_code() -> int:
    """Return the request to stop as a number, which programs can carry to all processes."""
    check_interrupted()
    return _CAUSES.index(state.cause)


def raise_if_stopped(number: int) -> None:
    """Raise Preempted for the largest `stop_code` of all processes, unless it is 0."""
    if number:
        raise Preempted(_CAUSES[number])


def on_interrupt(number: int, frame: Any) -> None:
    """Handle Ctrl-C: the first requests a stop where the run can resume, see `watcher.watched`.

    A second one, and that of other commands, raises KeyboardInterrupt now and, if a callback of
    foreign code loses it, at the next check.
    """
    first = not state.interrupted
    state.interrupted = True
    if first and state.savable:
        ask(CTRL_C)
    else:
        signal.default_int_handler(number, frame)


def check_interrupted() -> None:
    """Raise KeyboardInterrupt if Ctrl-C was pressed where nothing can be saved."""
    if state.interrupted and not state.savable:
        raise KeyboardInterrupt


def wait_interruptible(future: Future[T]) -> T:
    """Return a future's result; raises Preempted if this run is stopped earlier."""
    return next(completed_interruptible([future])).result()


def completed_interruptible(futures: Iterable[Future[T]]) -> Iterator[Future[T]]:
    """Yield futures as they finish; raises Preempted if this run is stopped before all are done."""
    left = set(futures)
    while left:
        done, left = wait(left, 0, FIRST_COMPLETED)
        if not done:
            check_stop()
            done, left = wait(left, SLICE, FIRST_COMPLETED)
        if done:
            note_progress(state.place)
        yield from done


def note_progress(place: str) -> None:
    """Record that this process makes progress, and its place."""
    state.place = place
    state.marks += 1


# Leaving


def status_of(error: BaseException) -> int:
    """Return the exit status for an error: its `exit_status` if it has one, RESTART if a retry may
    succeed."""
    passing = getattr(error, "error_code_string", "") in _PASSING
    return int(getattr(error, "exit_status", RESTART if passing else 1))


def leave(status: int) -> int:
    """Exit this process at once with a status; if it is alone and idle, return the status.

    A normal exit of the interpreter would make JAX wait for the other processes, and requests for
    their answers.
    """
    if count() > 1 or state.joining or status in (RESTART, INTERRUPTED):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status
