"""The pool and its workers under attack: bombs, dead workers, threads, asyncio, and a parent that
is killed."""

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
from g2d_jax.rewards.pool import VerifierPool, Worker
from g2d_jax.runtime import processes

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
    return sorted(worker.process.pid for worker in pool.workers)


def test_same_scores_in_order_from_main_thread_threads_and_asyncio(pool: VerifierPool) -> None:
    scores = pool.score(GOLDS, TEXTS)
    assert verdicts(scores) == EXPECTED
    assert [score.reward for score in scores] == [1.0, 1.0, 0.0, 0.0, 1.0]
    assert (scores[0].answer, scores[2].answer) == ("1+x", None)
    with ThreadPoolExecutor(4) as threads:
        for scores in threads.map(lambda _: pool.score(GOLDS, TEXTS), range(8)):
            assert verdicts(scores) == EXPECTED

    async def score_twice() -> list[list[Score]]:
        return list(
            await asyncio.gather(*(asyncio.to_thread(pool.score, GOLDS, TEXTS) for _ in range(2)))
        )

    for scores in asyncio.run(score_twice()):
        assert verdicts(scores) == EXPECTED


def bomb_answers() -> list[str]:
    """Twenty different ones: towers, factorials, sums, expansions, long integers and words, deep
    nesting."""
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
    nested = [
        "(" * 4000 + "3" + ")" * 4000,
        r"\sqrt{" * 1200 + "3" + "}" * 1200,
        r"\frac{1}{1+" * 60 + "x" + "}" * 60,
    ]
    return [*towers, *nested, "x^{" * 60 + "x" + "}" * 60, "7" * 9000, "z" * 9000]


@pytest.mark.slow
def test_every_verdict_arrives_among_bombs() -> None:
    cases = [json.loads(line) for line in ANSWERS.read_text("utf-8").splitlines()]
    cases = [
        case for case in cases if case["category"] != "adversarial" and case["id"] != "natural_log"
    ]
    ordinary = [(case["gold"], case["response"], case["expected"]) for case in (cases * 3)[:380]]
    hostile = [("2", rf"\boxed{{{answer}}}", False) for answer in bomb_answers()]
    mixed = ordinary + hostile
    random.Random(0).shuffle(mixed)
    with VerifierPool(workers=2, cpu_seconds=0.5, memory_mb=1024) as pool:
        scores = pool.score([gold for gold, _, _ in mixed], [text for _, text, _ in mixed])
    assert len(hostile) == 20 and len(scores) == 400
    wrong = [
        case
        for case, score in zip(mixed, scores, strict=True)
        if (score.verdict is Verdict.CORRECT) != case[2]
    ]
    assert wrong == []
    given_up = [
        text
        for score, (_, text, _) in zip(scores, mixed, strict=True)
        if score.verdict is Verdict.TIMEOUT
    ]
    assert len(given_up) >= 5
    assert {*given_up} <= {text for _, text, _ in hostile}


NO_FORMULA = r"\oplus\oplus"
SLOW = "x^{" * 60 + "x" + "}" * 60  # seconds of parsing


def test_golds_are_read_many_at_a_time_and_one_that_hangs_harms_no_other() -> None:
    before = {f"x+{n}": True for n in range(150)} | {
        "72": True,
        "about 72, I think": False,
        NO_FORMULA: False,
    }
    after = {"": False, "C": True, r"\frac{\sqrt{3}}{2}": True, "]][(": False} | {
        f"y+{n}": True for n in range(150)
    }
    expected = {**before, SLOW: False, **after}
    with VerifierPool(workers=2, cpu_seconds=0.5) as pool:
        assert pool.read([*expected, *expected]) == expected and len(expected) == 308
        workers, spent = worker_pids(pool), pool.cpu_seconds
        assert 0.5 < spent < 10.0
        assert pool.read(expected) == expected and pool.cpu_seconds == spent  # remembered
        assert verdicts(pool.score(["x+1"], [r"\boxed{1+x}"])) == [Verdict.CORRECT]
        assert set(workers) <= set(worker_pids(pool))  # none ended


def test_a_gold_that_cannot_be_read_scores_every_response_alike() -> None:
    with VerifierPool(workers=1) as pool:
        assert pool.read(["]][("]) == {"]][(": False}
        for gold in (
            "]][(",
            NO_FORMULA,
            "about 72, I think",
        ):  # one that was read before, two that were not
            texts = [
                rf"\boxed{{{gold}}}",
                r"\boxed{7}",
                r"\boxed{x<0}",
                "no idea",
                rf"\boxed{{{'1+' * 20_000}1}}",
            ]
            apart = [pool.finish([pool.begin(gold, text)])[0] for text in texts]
            assert {(score.verdict, score.reward) for score in apart} == {
                (Verdict.UNSCORABLE, None)
            }
            assert pool.score([gold] * 5, texts) == apart


def test_what_was_found_out_before_holds(pool: VerifierPool) -> None:
    pool.know({"x+77": False, "y+77": True})
    assert pool.read(["x+77", "y+77"]) == {"x+77": False, "y+77": True}
    assert verdicts(pool.score(["x+77", "y+77"], [r"\boxed{x+77}"] * 2)) == [
        Verdict.UNSCORABLE,
        Verdict.INCORRECT,
    ]


def test_golds_that_the_machine_keeps_from_being_read_are_an_error_and_not_unreadable() -> None:
    with VerifierPool(workers=1, cpu_seconds=30.0) as pool:
        pool.read(["x+1"])
        pool.wall_seconds = 0.05
        with pytest.raises(
            RuntimeError, match=r"ended a verifier worker twice.*'y\+1'.*lower reward.workers"
        ):
            pool.read(["72", "y+1", SLOW])
        with pytest.raises(RuntimeError, match="ended a verifier worker twice"):
            pool.finish([pool.begin(SLOW, "no idea")])
        pool.wall_seconds = 60.0
        assert pool.read(["y+1", NO_FORMULA]) == {"y+1": True, NO_FORMULA: False}
    with pytest.raises(RuntimeError, match="closed"):
        pool.read(["z+1"])


def test_reading_golds_stops_when_the_run_is_told_to() -> None:
    with VerifierPool(workers=1, cpu_seconds=300.0) as pool:
        pool.read(["x+1"])
        asked = threading.Timer(0.3, processes.ask, [processes.SIGTERM])
        asked.start()
        try:
            with pytest.raises(processes.Preempted):
                pool.read([*(f"x+{n}" for n in range(500)), "x^{" * 900 + "x" + "}" * 900])
        finally:
            asked.join()
            processes.reset_stop()


def test_what_is_decided_here_starts_no_worker_and_identical_pairs_are_graded_once() -> None:
    with VerifierPool(workers=2) as pool:
        pool.score(["5", "0.5", None, "5"], [r"\boxed{5}", r"\boxed{1/2}", "5", ""])
        pool.know({"x+2": True})
        assert worker_pids(pool) == []
        assert verdicts(pool.score(["x+2"] * 20, [r"\boxed{2+x}"] * 20)) == [Verdict.CORRECT] * 20
        assert len(worker_pids(pool)) == 1  # the other one had nothing to do


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
        assert pool.cpu_seconds < 15.0
        assert verdicts(pool.score(["x+1"], [r"\boxed{1+x}"])) == [Verdict.CORRECT]


def test_an_overlong_answer_is_wrong_and_an_overlong_gold_is_not_read(pool: VerifierPool) -> None:
    long = "1" + "+1" * 20_000
    assert verdicts(pool.score(["x+1", long], [rf"\boxed{{{long}}}"] * 2)) == [
        Verdict.INCORRECT,
        Verdict.UNSCORABLE,
    ]


def test_a_worker_that_was_killed_or_does_not_answer_is_replaced() -> None:
    with VerifierPool(workers=1, cpu_seconds=1.0) as pool:
        pool.score(["x+1"], [r"\boxed{1+x}"])
        (killed,) = worker_pids(pool)
        os.kill(killed, signal.SIGKILL)
        assert verdicts(pool.score(["x+3"], [r"\boxed{3+x}"])) == [Verdict.CORRECT]
        (stuck,) = worker_pids(pool)
        pool.wall_seconds = 5.0
        os.kill(stuck, signal.SIGSTOP)
        assert verdicts(pool.score(["x+4"], [r"\boxed{4+x}"])) == [Verdict.CORRECT]
        assert (
            not alive(killed) and not alive(stuck) and worker_pids(pool) not in ([killed], [stuck])
        )
        pool.wall_seconds, spent = 0.1, pool.cpu_seconds
        (score,) = pool.score(["1"], [r"\boxed{9^{9^{9^{9}}}}"])
        assert (score.verdict, score.reward) == (Verdict.UNSCORABLE, None)  # the machine's doing
        assert pool.cpu_seconds == spent
        pool.wall_seconds = 60.0
        assert verdicts(pool.score(["1"], [r"\boxed{9^{9^{9^{9}}}}"])) == [Verdict.TIMEOUT]
        assert pool.cpu_seconds > spent + 0.5  # the first verdict was not remembered


def test_close_ends_workers_and_what_they_grade() -> None:
    pool = VerifierPool(workers=1, cpu_seconds=300.0)
    pool.score(["x+1"], [r"\boxed{1+x}"])
    (pid,) = worker_pids(pool)
    children = Path(f"/proc/{pid}/task/{pid}/children")
    failures: list[str] = []

    def score_bomb() -> None:
        try:
            pool.score(["1"], [r"\boxed{9^{9^{9^{9}}}}"])
        except RuntimeError as error:
            failures.append(str(error))

    thread = threading.Thread(target=score_bomb)
    thread.start()
    graders: list[int] = []
    while not graders and children.exists():
        graders = [int(child) for child in children.read_text().split()]
    pool.close()
    pool.close()
    thread.join(timeout=30)
    assert failures == ["the verifier pool was closed while it was scoring"]
    limit = time.monotonic() + 10  # the kernel ends a grader when its worker is gone
    while any(map(alive, graders)) and time.monotonic() < limit:
        time.sleep(0.01)
    assert not alive(pid) and not any(map(alive, graders))
    with pytest.raises(RuntimeError, match="closed"):
        pool.score(["x+1"], [r"\boxed{1+x+0}"])


def test_workers_end_when_their_parent_is_killed() -> None:
    script = (
        "from g2d_jax.rewards.pool import VerifierPool\n"
        "import time\n"
        "pool = VerifierPool(workers=1)\n"
        r"pool.score(['x+1'], [r'\boxed{1+x}'])" + "\n"
        "print(*[worker.process.pid for worker in pool.workers], flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as parent:
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


def run_python(script: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    ).stdout


def test_a_worker_never_imports_jax() -> None:
    modules = run_python(
        "import sys, g2d_jax.rewards.worker, g2d_jax.rewards.exact; print(*sys.modules)"
    )
    assert not {"jax", "flax"} & {*modules.split()}


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_a_running_worker_has_nothing_of_its_parents(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", "sentinel-hf-token")
    held = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(held, True)
    worker = Worker(1.0, 1024)
    try:
        process = Path(f"/proc/{worker.process.pid}")
        assert worker.send(["x+1", "1+x", 6], 60.0)[0] == Verdict.CORRECT.value
        # lines carry any text
        assert worker.send(["\x00 \ud83d ٣ \n", "3", 6], 60.0)[0] == Verdict.CORRECT.value
        environment = dict(
            pair.split("=", 1) for pair in (process / "environ").read_text().split("\0") if pair
        )
        names = {
            "PATH",
            "LANG",
            "PYTHONHASHSEED",
            "PYTHONDONTWRITEBYTECODE",
            "PYTHONPATH",
            "OMP_NUM_THREADS",
        }
        assert environment.keys() == names and "sentinel-hf-token" not in str(environment)
        files = {os.readlink(link) for link in (process / "fd").iterdir()}
        assert {name.partition(":")[0] for name in files} == {"pipe", "/dev/null"}
    finally:
        worker.stop()
        os.close(held)


@pytest.mark.parametrize(
    ("graded", "verdict"),
    [
        ("raise math_verify.errors.TimeoutException('x')", "timeout"),
        ("raise KeyboardInterrupt()", "timeout"),
        ("raise MemoryError()", "timeout"),
        ("raise RecursionError()", "incorrect"),
        ("raise SystemExit(10)", "timeout"),
        ("os.fstat(held)", "timeout"),  # the descriptor is closed
        ("open('written', 'w').write('text')", "timeout"),
        ("while True: pass", "timeout"),
        ("return Verdict.CORRECT", "correct"),
    ],
)
def test_nothing_that_a_grader_does_passes_the_boundary(
    tmp_path: Path, graded: str, verdict: str
) -> None:
    script = (
        f"import json, os, signal, math_verify\nos.chdir({str(tmp_path)!r})\n"
        "from g2d_jax.records import Verdict\nfrom g2d_jax.rewards import worker\n"
        "signal.signal(signal.SIGPROF, signal.SIG_IGN)\n"
        "held = os.open(os.devnull, os.O_RDONLY)\n"
        f"def explode(gold, answer, places):\n    {graded}\n"
        "worker.grade = explode\n"
        "print(json.dumps(worker._grade_apart('1', '2', 6, 0.5, 2048)))\n"
    )
    given, cpu_seconds = json.loads(run_python(script))
    assert given == verdict and cpu_seconds < 1.0
    assert not any(file.stat().st_size for file in tmp_path.iterdir())


def test_a_grader_tells_of_the_golds_before_the_one_that_ends_it() -> None:
    told = {
        "raise math_verify.errors.TimeoutException('x')": [True],
        "raise KeyboardInterrupt()": [True],
        "raise RecursionError()": [True],
        "raise SystemExit(0)": [True],
        "os.fstat(held)": [True],
        "while True: pass": [True],
        "os.abort()": [True],
        "return False": [True, False, True],
        "return True": [True, True, True],
        # the machine's doing: the worker ends
        "os.kill(os.getpid(), signal.SIGKILL)": "a grader was killed",
    }
    script = (
        "import json, os, signal, math_verify\n"
        "from g2d_jax.records import Verdict\nfrom g2d_jax.rewards import worker\n"
        "signal.signal(signal.SIGPROF, signal.SIG_IGN)\n"
        "held = os.open(os.devnull, os.O_RDONLY)\n"
        "worker.parses = lambda gold: second() if gold == '2' else True\n"
        "replies = []\n"
        f"for body in {list(told)!r}:\n"
        "    exec(f'def second():\\n    {body}')\n"
        "    try:\n        replies.append(worker._read_apart(['1', '2', '3'], 0.5, 2048)[0])\n"
        "    except SystemExit as error:\n        replies.append(str(error)[:19])\n"
        "print(json.dumps(replies))\n"
    )
    assert json.loads(run_python(script)) == list(told.values())
