"""Scoring of responses: cheap and exact here, the rest in killable worker processes (worker.py
describes their limits).

    with VerifierPool(workers=2) as pool:
        scores = pool.score(golds, texts)

Rewards: CORRECT 1.0; INCORRECT, NO_ANSWER and TIMEOUT 0.0; UNSCORABLE None. The answer causes a
timeout: the grader exceeded its CPU time or memory, or crashed (see `Verdict`). The machine causes
the death or silence of a worker, which leaves the response UNSCORABLE. An answer far longer than the
reference is INCORRECT.

The verifier determines once, from the reference answer ("gold") alone, whether it can read it. A
gold that it cannot read makes every response UNSCORABLE, even the same text.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from g2d_jax.records import AnswerRule, Score, Verdict
from g2d_jax.rewards.extract import final_answer
from g2d_jax.rewards.quantity import APPROXIMATION_PLACES
from g2d_jax.rewards.verify import can_be_read, quick_verdict
from g2d_jax.runtime import processes

REWARDS: Mapping[Verdict, float | None] = {
    Verdict.CORRECT: 1.0,
    Verdict.INCORRECT: 0.0,
    Verdict.NO_ANSWER: 0.0,
    Verdict.TIMEOUT: 0.0,
    Verdict.UNSCORABLE: None,
}
START_SECONDS = 300.0
"""Seconds for a worker to import math-verify, on a machine that is busy compiling."""
MAX_ANSWER_CHARS = 10_000
READ_AT_ONCE = 128
"""Golds in one request to a worker."""

Begun = tuple[str | None, Verdict | Future[Verdict]]
"""A response's final answer, and its verdict or the future of it."""


class WorkerDied(Exception):
    """The worker process ended, or was ended because it did not reply in time."""


class Worker:
    """A running worker process, for one thread at once. Raises RuntimeError if it cannot start."""

    def __init__(self, cpu_seconds: float, memory_mb: int) -> None:
        module = ["-P", "-m", "g2d_jax.rewards.worker"]
        with tempfile.TemporaryFile() as errors:
            self.process = subprocess.Popen(
                [sys.executable, *module, repr(cpu_seconds), str(memory_mb)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=_environment(),
                cwd=os.sep,
                # the parent handles Ctrl-C, and one kill ends worker and grader
                start_new_session=True,
            )
            try:
                self.send(None, START_SECONDS)
            except WorkerDied as error:
                errors.seek(0)
                raise RuntimeError(
                    "a verifier worker did not start; is math-verify installed (pip install "
                    "math-verify)?\n" + errors.read()[-2000:].decode(errors="replace").strip()
                ) from error

    def send(self, request: Sequence[Any] | None, wall_seconds: float) -> list[Any]:
        """Return the reply to a request, and its CPU seconds, both defined in worker.py. None: wait
        for the first reply.

        Raises WorkerDied; the worker is then unusable.
        """
        line = json.dumps(request).encode() + b"\n" if request else b""
        requests, replies = self.process.stdin, self.process.stdout
        assert requests is not None and replies is not None
        reply = b""
        overdue = threading.Timer(wall_seconds, self.kill)
        overdue.start()
        with contextlib.suppress(OSError):
            requests.write(line)
            requests.flush()
            reply = replies.readline()
        overdue.cancel()
        if not reply:
            self.stop()
            raise WorkerDied
        return list(json.loads(reply))

    def kill(self) -> None:
        """End the worker and its grader at once, from any thread; its owner then sees
        WorkerDied."""
        if self.process.returncode is None:
            with contextlib.suppress(
                ProcessLookupError, PermissionError
            ):  # gone, or on macOS a zombie
                os.killpg(self.process.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Kill the worker and reap it. Safe to call twice."""
        self.kill()
        self.process.communicate()


def _environment() -> dict[str, str]:
    """Return a worker's minimal environment: no credentials, no JAX or TPU settings, one thread."""
    root = str(Path(__file__).resolve().parents[2])
    parts = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    inherited = list(map(os.path.abspath, filter(None, parts)))
    if "site-packages" not in root and "dist-packages" not in root:  # Python finds these itself
        inherited.append(root)
    return {
        "PATH": os.defpath,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",  # keeps sympy's order of terms, and so its CPU time, the same
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join(inherited),
        "OMP_NUM_THREADS": "1",
    }


_CLOSED = "the verifier pool is closed; create a new one"


@contextlib.contextmanager
def _open_pool() -> Iterator[None]:
    """Raise RuntimeError instead of the CancelledError of a pool that another thread closed."""
    try:
        yield
    except CancelledError as error:
        raise RuntimeError("the verifier pool was closed while it was scoring") from error


class VerifierPool:
    """Worker processes that verify answers. Thread-safe; a context manager; workers start when
    first needed.

    workers: the most processes, and so answers graded at once. cpu_seconds, memory_mb: limits per
    answer.
    wall_seconds: a worker without a reply for this long is ended, far above cpu_seconds since the
    machine may be busy. Answers of more than MAX_ANSWER_CHARS are INCORRECT unless shorter than
    four times the gold.
    decimal_places: see `grade.grade`.
    cpu_seconds: used by workers on answers and golds so far. Verdicts are a function of (gold,
    answer) except for answers near the CPU limit: journal them before use.
    """

    def __init__(
        self,
        workers: int = 2,
        cpu_seconds: float = 5.0,
        memory_mb: int = 2048,
        cache_size: int = 65_536,
        decimal_places: int = APPROXIMATION_PLACES,
    ) -> None:
        if workers < 1 or cpu_seconds <= 0 or memory_mb < 512:
            raise ValueError(
                "a verifier pool needs workers >= 1, cpu_seconds > 0 and memory_mb >= 512 (sympy "
                f"needs about 300), got {workers}, {cpu_seconds}, {memory_mb}"
            )
        self._limits = (float(cpu_seconds), int(memory_mb))
        self.wall_seconds = max(60.0, 20.0 * cpu_seconds)
        self._cache_size = cache_size
        self._count = workers
        self._executor = ThreadPoolExecutor(workers, thread_name_prefix="verifier")
        self._thread = threading.local()  # .worker: that of each thread of the executor
        self._lock = threading.Lock()
        self.workers: set[Worker] = set()
        self._closed = False
        self._verdicts: dict[tuple[str, str | None], Future[Verdict]] = {}
        self._decimal_places = decimal_places
        self._readable: dict[str, bool] = {}  # by gold; at most one per problem
        self.cpu_seconds = 0.0

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def score(
        self, golds: Sequence[str | None], texts: Sequence[str], rule: AnswerRule = "boxed"
    ) -> list[Score]:
        """Score responses against reference answers, in order; blocks until all are done.

        golds, texts: equally long; a gold of None or "" is UNSCORABLE. rule: as in `final_answer`.
        Raises ValueError for unequal lengths and RuntimeError when the pool is closed, a worker
        cannot start, or the machine ends it twice while it reads golds.
        """
        if len(golds) != len(texts):
            raise ValueError(
                f"score needs one gold per text, got {len(golds)} golds and {len(texts)} texts"
            )
        self.read(gold for gold in golds if gold is not None)
        return self.finish(
            [self.begin(gold, text, rule) for gold, text in zip(golds, texts, strict=True)]
        )

    def begin(self, gold: str | None, text: str, rule: AnswerRule = "boxed") -> Begun:
        """Score a response here if that is quick, else let a worker do it in the background; see
        `finish`."""
        answer = final_answer(text, rule)
        return answer, self._decide(gold, answer)

    def finish(self, begun: Sequence[Begun]) -> list[Score]:
        """Return the scores of begun responses, in order; blocks until all are done. Raises as
        `score`."""
        scores = []
        for answer, item in begun:
            with _open_pool():
                verdict = processes.wait_interruptible(item) if isinstance(item, Future) else item
            scores.append(Score(reward=REWARDS[verdict], verdict=verdict, answer=answer))
        return scores

    def read(self, golds: Iterable[str]) -> dict[str, bool]:
        """Return for each gold whether the verifier can read it; blocks until all are known.

        One that makes the verifier exceed its limits cannot be read. Raises as `score`; results
        until then are kept.
        """
        wanted = list(dict.fromkeys(golds))
        unknown = [gold for gold in wanted if gold not in self._readable]
        firsts = range(0, len(unknown), READ_AT_ONCE)
        batches = [unknown[first : first + READ_AT_ONCE] for first in firsts]
        with self._lock:
            if self._closed and unknown:
                raise RuntimeError(_CLOSED)
            reading = [self._executor.submit(self._find_out, batch) for batch in batches]
        try:
            with _open_pool():
                for part in processes.completed_interruptible(reading):
                    part.result()
        finally:
            for part in reading:
                part.cancel()
        return {gold: self._readable[gold] for gold in wanted}

    def know(self, golds: Mapping[str, bool]) -> None:
        """Add known results of `read`, perhaps from another process or version."""
        self._readable |= golds

    def start(self) -> None:
        """Start the workers in the background, which takes seconds, before the first answer needs
        one."""
        for _ in range(self._count):
            self._executor.submit(self._worker)

    def close(self) -> None:
        """End all workers, including busy ones. Waits until they are gone; safe to call twice."""
        with self._lock:
            self._closed = True
        self._executor.shutdown(wait=False, cancel_futures=True)
        for worker in set(self.workers):
            worker.kill()
        self._executor.shutdown(wait=True)
        for worker in self.workers:
            worker.stop()

    def _decide(self, gold: str | None, answer: str | None) -> Verdict | Future[Verdict]:
        """Return a verdict if it needs no worker, otherwise the (shared) future of one."""
        if gold is None or not gold.strip():
            return Verdict.UNSCORABLE
        verdict = self._decide_here(gold, answer)
        if verdict is not None:
            return verdict
        with self._lock:
            if self._closed:
                raise RuntimeError(_CLOSED)
            if (gold, answer) not in self._verdicts:
                self._verdicts[gold, answer] = self._executor.submit(self._grade, gold, answer)
            future = self._verdicts[gold, answer]
            if len(self._verdicts) > self._cache_size:
                del self._verdicts[next(iter(self._verdicts))]
            return future

    def _decide_here(self, gold: str, answer: str | None) -> Verdict | None:
        """Return the verdict; None if it needs a worker, perhaps only to check that the gold can be
        read."""
        read = self._can_be_read(gold)
        if read is None:
            return None
        if not read:
            return Verdict.UNSCORABLE
        if answer is None:
            return Verdict.NO_ANSWER
        if len(answer) > max(MAX_ANSWER_CHARS, 4 * len(gold)):
            return Verdict.INCORRECT
        is_correct = quick_verdict(gold, answer, self._decimal_places)
        if is_correct is None:
            return None
        return Verdict.CORRECT if is_correct else Verdict.INCORRECT

    def _can_be_read(self, gold: str) -> bool | None:
        """Return whether a gold can be read, None if that needs a worker."""
        if gold in self._readable:
            return self._readable[gold]
        read = can_be_read(gold)
        if read is not None:
            self._readable[gold] = read
        return read

    def _find_out(self, golds: Sequence[str]) -> None:
        """Determine whether golds can be read, in a thread of the executor. Raises RuntimeError if
        workers end."""
        left = [gold for gold in golds if self._can_be_read(gold) is None]
        while left:
            readable = self._send([left])
            if readable is None:
                raise RuntimeError(
                    "the machine ended a verifier worker twice, or got no reply from it for "
                    f"{self.wall_seconds:.0f} s, while it read reference answers such as "
                    f"{left[0]!r:.80}. If there is too little memory, lower reward.workers, or "
                    "use a larger machine"
                )
            # A gold without a result had the limits to itself and exceeded them.
            for gold, read in zip(left, readable or [False], strict=False):
                self._readable.setdefault(gold, read)
            left = left[len(readable) or 1 :]

    def _grade(self, gold: str, answer: str | None) -> Verdict:
        """Return a worker's verdict, in a thread of the executor; UNSCORABLE if the machine ends
        workers.

        An answer that exceeds its limits ends no worker, so a worker's end does not reflect on it.
        """
        verdict = None
        try:
            self._find_out([gold])
            verdict = self._decide_here(gold, answer)
            if verdict is None:
                verdict = self._send([gold, answer, self._decimal_places])
        finally:
            if verdict is None:
                with self._lock:  # a verdict to forget
                    self._verdicts.pop((gold, answer), None)
        return Verdict(verdict or Verdict.UNSCORABLE)

    def _send(self, request: Sequence[Any]) -> Any:
        """Return a worker's reply. A dead or silent worker is replaced once; None if the second one
        fails too."""
        for _ in range(2):
            worker = self._worker()
            try:
                reply, seconds = worker.send(request, self.wall_seconds)
            except WorkerDied:
                self.workers.discard(worker)
                continue
            with self._lock:
                self.cpu_seconds += seconds
            return reply
        return None

    def _worker(self) -> Worker:
        """Return this thread's worker, started if there is none. Raises CancelledError once the
        pool is closed."""
        worker: Worker | None = getattr(self._thread, "worker", None)
        if not self._closed and worker not in self.workers:
            worker = Worker(*self._limits)  # needs seconds, so not under the lock
            with self._lock:
                self._thread.worker = worker
                self.workers.add(worker)
        if self._closed or worker is None:
            raise CancelledError
        return worker
