"""Score responses: cheap and exact here, the rest in killable worker processes (worker.py says how they are limited).

    with VerifierPool(workers=2) as pool:
        scores = pool.score(golds, texts)

Rewards: CORRECT 1.0; INCORRECT, NO_ANSWER and TIMEOUT 0.0; UNSCORABLE None. A timeout means that the verifier gave up
(CPU, memory, a crash): see `Verdict`. An answer far longer than any reference is INCORRECT unless it is the reference
itself.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from types import TracebackType

from g2d_jax import processes
from g2d_jax.records import Score, Verdict
from g2d_jax.rewards.child import Child, WorkerDied, WorkerOverdue
from g2d_jax.rewards.extract import final_answer
from g2d_jax.rewards.verify import quick_verdict

REWARDS: Mapping[Verdict, float | None] = {
    **{Verdict.CORRECT: 1.0, Verdict.INCORRECT: 0.0, Verdict.NO_ANSWER: 0.0, Verdict.TIMEOUT: 0.0},
    Verdict.UNSCORABLE: None,
}


Begun = tuple[str | None, Verdict | Future[Verdict]]
"""A response's final answer, and its verdict or where that will be."""


class VerifierPool:
    """Worker processes that verify answers. Thread-safe; a context manager; workers start when first needed.

    workers: processes, at most so many answers are graded at a time. cpu_seconds, memory_mb: limits per answer.
    wall_seconds: backstop for a worker that neither works nor answers, far above cpu_seconds since the machine may be
    busy. max_answer_chars: longer answers are INCORRECT unless short against four times the gold.
    Counts since it was made: verdicts given; answers `graded` by a worker (the others were decided or known here);
    `stopped`, why workers gave up, by "cpu", "memory", "crash", "wall"; `cpu_seconds` of workers on answers; `peak_mb`,
    the most memory (resident, MiB) of a process that graded. unconfined: why workers run without a sandbox
    (sandbox.py), "" where they have one, and before the first has started.
    Verdicts are a function of (gold, answer) but for answers near the CPU limit: journal them before use.
    """

    def __init__(
        self,
        workers: int = 2,
        cpu_seconds: float = 5.0,
        memory_mb: int = 2048,
        *,
        wall_seconds: float | None = None,
        max_answer_chars: int = 10_000,
        cache_size: int = 65_536,
    ) -> None:
        if workers < 1 or cpu_seconds <= 0 or memory_mb < 512:
            raise ValueError(
                "a verifier pool needs workers >= 1, cpu_seconds > 0 and memory_mb >= 512 (sympy takes about 300), "
                f"got {workers}, {cpu_seconds}, {memory_mb}"
            )
        self._limits = (float(cpu_seconds), int(memory_mb))
        self._wall_seconds = max(60.0, 20.0 * cpu_seconds) if wall_seconds is None else wall_seconds
        self._max_answer_chars = max_answer_chars
        self._cache_size = cache_size
        self._lock = threading.Lock()
        self._workers = workers
        self._executor = ThreadPoolExecutor(workers, thread_name_prefix="verifier")
        self._idle: list[Child] = []
        self._running: set[Child] = set()
        self._closed = False
        self._verdicts: OrderedDict[tuple[str, str], Future[Verdict]] = OrderedDict()
        self.verdicts: Counter[Verdict] = Counter()
        self.stopped: Counter[str] = Counter()
        self.graded = 0
        self.cpu_seconds = 0.0
        self.peak_mb = 0.0
        self.unconfined = ""

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def score(self, golds: Sequence[str | None], texts: Sequence[str]) -> list[Score]:
        """Score responses against reference answers, in order; blocks until all are done.

        golds, texts: equally long; a gold of None or "" is UNSCORABLE. Raises ValueError for unequal lengths and
        RuntimeError when the pool is closed or a worker cannot start.
        """
        if len(golds) != len(texts):
            raise ValueError(f"score needs one gold per text, got {len(golds)} golds and {len(texts)} texts")
        return self.finish([self.begin(gold, text) for gold, text in zip(golds, texts, strict=True)])

    def begin(self, gold: str | None, text: str) -> Begun:
        """Decide about a response here if that is quick, else let a worker do it meanwhile; see `finish`."""
        answer = final_answer(text)
        return answer, self._decide(gold, answer)

    def finish(self, begun: Sequence[Begun]) -> list[Score]:
        """Give the scores of what was begun, in order; blocks until all are there, and raises as `score`."""
        answers, decided = [answer for answer, _ in begun], [verdict for _, verdict in begun]
        try:
            verdicts = [processes.patiently(item) if isinstance(item, Future) else item for item in decided]
        except CancelledError as error:
            raise RuntimeError("the verifier pool was closed while it was scoring") from error
        with self._lock:
            self.verdicts.update(verdicts)
        return [
            Score(reward=REWARDS[verdict], verdict=verdict, answer=answer)
            for verdict, answer in zip(verdicts, answers, strict=True)
        ]

    def start(self) -> None:
        """Let the workers start in the background, which takes them seconds, before the first answer needs one."""
        for _ in range(self._workers):
            self._executor.submit(self._start)

    def close(self) -> None:
        """End all workers, also those at work. Waits until they are gone; safe to call twice."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            running = list(self._running)
        self._executor.shutdown(wait=False, cancel_futures=True)
        for child in running:
            child.kill()
        for child in idle:
            child.stop()
        self._executor.shutdown(wait=True)

    def _decide(self, gold: str | None, answer: str | None) -> Verdict | Future[Verdict]:
        """A verdict where none needs a worker, otherwise the (shared) future of one."""
        if gold is None or not gold.strip():
            return Verdict.UNSCORABLE
        if answer is None:
            return Verdict.NO_ANSWER
        if len(answer) > max(self._max_answer_chars, 4 * len(gold)):
            return Verdict.CORRECT if answer == gold else Verdict.INCORRECT
        quick = quick_verdict(gold, answer)
        if quick is not None:
            return Verdict.CORRECT if quick else Verdict.INCORRECT
        return self._submit((gold, answer))

    def _submit(self, key: tuple[str, str]) -> Future[Verdict]:
        with self._lock:
            if self._closed:
                raise RuntimeError("the verifier pool is closed; make a new one")
            future = self._verdicts.get(key)
            if future is not None and not (future.done() and (future.cancelled() or future.exception())):
                self._verdicts.move_to_end(key)
                return future
            future = self._verdicts[key] = self._executor.submit(self._grade, *key)
            self.graded += 1
            while len(self._verdicts) > self._cache_size:
                self._verdicts.popitem(last=False)
            return future

    def _grade(self, gold: str, answer: str) -> Verdict:
        """Ask a worker, in a thread of the executor. A worker that is found dead is replaced and asked once more."""
        for _ in range(2):
            child = self._take()
            try:
                reply = child.ask(gold, answer, self._wall_seconds)
            except WorkerDied:
                self._discard(child)
            except WorkerOverdue:
                self._discard(child)
                with self._lock:  # the machine's doing: not to be remembered
                    self._verdicts.pop((gold, answer), None)
                return self._stop_reason("wall", 0.0)
            else:
                self._give_back(child)
                with self._lock:
                    self.peak_mb = max(self.peak_mb, reply["peak_mb"])
                if reply["stopped"] is None:
                    with self._lock:
                        self.cpu_seconds += reply["cpu_seconds"]
                    return Verdict(reply["verdict"])
                return self._stop_reason(reply["stopped"], reply["cpu_seconds"])
        return self._stop_reason("crash", 0.0)

    def _stop_reason(self, reason: str, cpu_seconds: float) -> Verdict:
        with self._lock:
            self.stopped[reason] += 1
            self.cpu_seconds += cpu_seconds
        return Verdict.TIMEOUT

    def _take(self) -> Child:
        with self._lock:
            if self._closed:
                raise CancelledError
            child = self._idle.pop() if self._idle else None
            if child is not None:
                self._running.add(child)
        return child or self._start_child()

    def _start_child(self) -> Child:
        child = Child(*self._limits)  # seconds: not under the lock
        with self._lock:
            self.unconfined = child.unconfined
            if not self._closed:
                self._running.add(child)
                return child
        child.stop()
        raise CancelledError

    def _start(self) -> None:
        self._give_back(self._start_child())

    def _give_back(self, child: Child) -> None:
        with self._lock:
            self._running.discard(child)
            if not self._closed:
                self._idle.append(child)
                return
        child.stop()

    def _discard(self, child: Child) -> None:
        with self._lock:
            self._running.discard(child)
        child.stop(grace=0.5)
