"""The pool under attack: bombs, dead workers, threads, asyncio, and a parent that is killed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from g2d_jax.records import Score, Verdict
from g2d_jax.rewards.pool import VerifierPool

ANSWERS = Path(__file__).with_name("answers.jsonl")
GOLDS = ["x+1", r"\frac{\sqrt{2}}{2}", "5", "5", "7"]
TEXTS = [r"\boxed{1+x}", r"\boxed{\frac{1}{\sqrt{2}}}", "no idea", r"\boxed{y}", r"\boxed{7}"]
EXPECTED = [Verdict.CORRECT, Verdict.CORRECT, Verdict.NO_ANSWER, Verdict.INCORRECT, Verdict.CORRECT]


def verdicts(scores: list[Score]) -> list[Verdict]:
    return [score.verdict for score in scores]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat").read_text()
    except ProcessLookupError:
        return False
    except FileNotFoundError:  # gone in between, or a system without /proc
        return not Path("/proc").is_dir()
    return stat.rpartition(")")[2].split()[0] != "Z"


def worker_pids(pool: VerifierPool) -> list[int]:
    return [child.pid for child in pool._idle]


def test_scores_come_in_order_with_rewards_and_answers(pool: VerifierPool) -> None:
    scores = pool.score(GOLDS, TEXTS)
    assert verdicts(scores) == EXPECTED
    assert [score.reward for score in scores] == [1.0, 1.0, 0.0, 0.0, 1.0]
    assert scores[0].answer == "1+x"
    assert scores[2].answer is None


def test_same_verdicts_from_main_thread_threads_and_asyncio(pool: VerifierPool) -> None:
    with ThreadPoolExecutor(4) as threads:
        for scores in threads.map(lambda _: pool.score(GOLDS, TEXTS), range(8)):
            assert verdicts(scores) == EXPECTED

    async def score_twice() -> list[list[Score]]:
        return list(await asyncio.gather(*(asyncio.to_thread(pool.score, GOLDS, TEXTS) for _ in range(2))))

    for scores in asyncio.run(score_twice()):
        assert verdicts(scores) == EXPECTED


@pytest.mark.slow
def test_a_hundred_bombs_leave_the_next_answer_unharmed() -> None:
    bombs = [rf"\boxed{{9^{{9^{{9^{{{n}}}}}}}}}" for n in range(9, 109)]
    with VerifierPool(workers=2, cpu_seconds=0.1) as pool:
        scores = pool.score(["1"] * 100, bombs)
        assert {score.verdict for score in scores} == {Verdict.TIMEOUT}
        assert {score.reward for score in scores} == {0.0}  # as a wrong answer
        workers = sorted(worker_pids(pool))
        assert verdicts(pool.score(["x+1"], [r"\boxed{1+x}"])) == [Verdict.CORRECT]
        assert sorted(worker_pids(pool)) == workers  # no worker had to be started again
        stats = pool
    assert stats.stopped == {"cpu": 100}
    assert stats.graded == 101
    assert stats.verdicts[Verdict.TIMEOUT] == 100
    assert stats.cpu_seconds > 5.0


def bomb_answers() -> list[str]:
    """Twenty different ones: towers, factorials, sums, expansions, long integers and words, deep nesting."""
    kinds = (
        "10^{{10^{{{0}}}}}",
        "9^{{9^{{9^{{{0}}}}}}}",
        "({0}00000000)!",
        r"\binom{{10^{{{0}}}}}{{10^{{8}}}}",
        r"\prod_{{k=1}}^{{50000000}} (k+{0})",
        "(a+b+c+d+e+f+g)^{{9{0}}}",
        r"\int_0^{{{0}}} \sin(x^x)^{{x^x}} dx",
    )
    towers = [kind.format(n) for kind in kinds for n in (10, 11)]
    nested = ["(" * 4000 + "3" + ")" * 4000, r"\sqrt{" * 1200 + "3" + "}" * 1200, r"\frac{1}{1+" * 60 + "x" + "}" * 60]
    return [*towers, *nested, "x^{" * 60 + "x" + "}" * 60, "7" * 9000, "z" * 9000]


def test_every_verdict_arrives_among_bombs() -> None:
    cases = [
        case
        for case in map(json.loads, ANSWERS.read_text("utf-8").splitlines())
        if case["category"] != "adversarial" and case["id"] != "natural_log"
    ]
    ordinary = [(case["gold"], case["response"], case["expected"]) for case in (cases * 3)[:380]]
    hostile = [("2", rf"\boxed{{{answer}}}", False) for answer in bomb_answers()]
    mixed = ordinary + hostile
    random.Random(0).shuffle(mixed)
    with VerifierPool(workers=2, cpu_seconds=0.5, memory_mb=1024) as pool:
        scores = pool.score([gold for gold, _, _ in mixed], [text for _, text, _ in mixed])
        stats = pool
    assert len(hostile) == 20 and len(scores) == 400 == sum(stats.verdicts.values())
    right = [(score.verdict is Verdict.CORRECT) == known for score, (*_, known) in zip(scores, mixed, strict=True)]
    assert [case for case, known in zip(mixed, right, strict=True) if not known] == []
    given_up = [text for score, (_, text, _) in zip(scores, mixed, strict=True) if score.verdict is Verdict.TIMEOUT]
    assert 5 <= len(given_up) == sum(stats.stopped.values())
    assert {*given_up} <= {text for _, text, _ in hostile}
    assert 0 < stats.peak_mb < 1024


def test_identical_pairs_are_graded_once() -> None:
    with VerifierPool(workers=2) as pool:
        assert verdicts(pool.score(["x+2"] * 20, [r"\boxed{2+x}"] * 20)) == [Verdict.CORRECT] * 20
        pool.score(["x+2"], [r"\boxed{2+x}"])
        assert pool.graded == 1
        assert pool.verdicts[Verdict.CORRECT] == 21


def test_nothing_starts_for_answers_that_are_decided_here() -> None:
    with VerifierPool(workers=1) as pool:
        pool.score(["5", "0.5", None, "5"], [r"\boxed{5}", r"\boxed{1/2}", "5", ""])
        assert worker_pids(pool) == []
        assert pool.graded == 0


def test_workers_that_were_started_grade_the_first_answer() -> None:
    with VerifierPool(2) as pool:
        pool.start()
        pool._executor.submit(lambda: None).result(60)  # behind both
        started = set(worker_pids(pool))
        assert verdicts(pool.score(GOLDS, TEXTS)) == EXPECTED
        assert started and set(worker_pids(pool)) & started


def test_out_of_memory_is_a_timeout_of_its_own_kind() -> None:
    with VerifierPool(workers=1, cpu_seconds=20.0, memory_mb=512) as pool:
        assert verdicts(pool.score(["y"], [r"\boxed{2^{2^{35}}}"])) == [Verdict.TIMEOUT]
        assert pool.stopped == {"memory": 1}
        assert verdicts(pool.score(["x+1"], [r"\boxed{1+x}"])) == [Verdict.CORRECT]


def test_an_overlong_answer_is_wrong_unless_it_is_the_gold(pool: VerifierPool) -> None:
    long = "1" + "+1" * 20_000
    assert verdicts(pool.score(["x+1", long], [rf"\boxed{{{long}}}"] * 2)) == [Verdict.INCORRECT, Verdict.CORRECT]


def test_a_worker_that_was_killed_is_replaced() -> None:
    with VerifierPool(workers=1) as pool:
        pool.score(["x+1"], [r"\boxed{1+x}"])
        (pid,) = worker_pids(pool)
        os.kill(pid, signal.SIGKILL)
        assert verdicts(pool.score(["x+3"], [r"\boxed{3+x}"])) == [Verdict.CORRECT]
        assert worker_pids(pool) != [pid]
        assert not alive(pid)


def test_a_worker_that_does_not_answer_is_given_up() -> None:
    with VerifierPool(workers=1, wall_seconds=0.3) as pool:
        assert verdicts(pool.score(["x+1"], [r"\boxed{1+x}"])) == [Verdict.CORRECT]
        (pid,) = worker_pids(pool)
        os.kill(pid, signal.SIGSTOP)
        assert verdicts(pool.score(["x+3"], [r"\boxed{3+x}"])) == [Verdict.TIMEOUT]
        assert pool.stopped == {"wall": 1}
        assert not alive(pid)


def test_close_ends_workers_and_what_they_grade() -> None:
    pool = VerifierPool(workers=1, cpu_seconds=300.0)
    pool.score(["x+1"], [r"\boxed{1+x}"])
    (pid,) = worker_pids(pool)
    failures: list[str] = []

    def score_bomb() -> None:
        try:
            pool.score(["1"], [r"\boxed{9^{9^{9^{9}}}}"])
        except RuntimeError as error:
            failures.append(str(error))

    thread = threading.Thread(target=score_bomb)
    thread.start()
    while not pool._running:
        time.sleep(0.01)
    time.sleep(0.2)
    pool.close()
    pool.close()
    thread.join(timeout=30)
    assert failures == ["the verifier pool was closed while it was scoring"]
    assert not alive(pid)
    with pytest.raises(RuntimeError, match="closed"):
        pool.score(["x+1"], [r"\boxed{1+x+0}"])


def test_workers_end_when_their_parent_is_killed() -> None:
    script = (
        "from g2d_jax.rewards.pool import VerifierPool\n"
        "import time\n"
        "pool = VerifierPool(workers=1)\n"
        r"pool.score(['x+1'], [r'\boxed{1+x}'])" + "\n"
        "print(pool._idle[0].pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
    deadline = time.monotonic() + 20
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="workers >= 1"):
        VerifierPool(workers=0)
    with VerifierPool() as pool, pytest.raises(ValueError, match="2 golds and 1 texts"):
        pool.score(["1", "2"], ["1"])
