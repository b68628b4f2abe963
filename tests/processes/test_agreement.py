"""How processes agree, and what becomes of the errors of one, of the leader and of all."""

import json
import signal
import threading
import time
from pathlib import Path

import jax
import pytest
from forks import Forks
from launched import Launch, by_jax, by_slurm, command, free_port

from g2d_jax.runtime import processes
from g2d_jax.runtime.heartbeat import watched
from g2d_jax.runtime.storage import StoreUnavailable
from g2d_jax.session.workdir import source_digest

pytestmark = pytest.mark.timeout(900)


def test_a_launcher_starts_again_where_it_may_go_well_next_time() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError) as out_of_memory:
        jax.numpy.zeros(1 << 45)
    errors = {
        jax.errors.JaxRuntimeError("Gloo all-reduce failed: Connection closed by peer"): 75,
        processes.Unreachable("the processes did not find each other"): 75,
        StoreUnavailable("cannot read s3://bucket/config.json"): 75,
        processes.PeerFailed("process 1 on rocket: StoreUnavailable", 75): 75,
        processes.PeerFailed("process 1 on rocket: ValueError", 1): 1,
        out_of_memory.value: 1,
        ValueError("data.train.path: Connection closed"): 1,
    }
    assert {error: processes.status_of(error) for error in errors} == errors


def test_every_way_to_agree(launch: Launch, tmp_path: Path) -> None:
    for index in range(2):
        (tmp_path / f"{index}.jsonl").write_text(
            json.dumps({"problem": f"9 + {index} =", "answer": "9"}) + "\n"
        )
    launched = launch(2, 1, "agreement", tmp_path, told=by_slurm)
    assert launched.statuses() == [0, 0], launched.told()


@pytest.mark.slow
def test_other_settings_on_one_host_are_refused_by_all(launch: Launch, tmp_path: Path) -> None:
    launched = launch(2, 1, *command(tmp_path / "run"), env={"DIFFERS": "1"})
    assert launched.statuses() == [1, 1], launched.told()
    for process in launched.running:
        assert "settings, files or packages differ between processes" in process.stderr
        assert "All hosts need the same files, packages and arguments" in process.stderr
    assert not (tmp_path / "run" / "config.json").exists()


def test_an_edited_copy_of_this_library_is_told_from_another(tmp_path: Path) -> None:
    (tmp_path / "losses").mkdir()
    (tmp_path / "losses" / "dpo.py").write_text("beta = 0.1\n")
    before = source_digest(tmp_path)
    (tmp_path / "losses" / "cached.pyc").write_text("")
    assert source_digest(tmp_path) == before
    (tmp_path / "losses" / "dpo.py").write_text("beta = 0.2\n")
    assert source_digest(tmp_path) != before


def children() -> set[str]:
    tasks = Path("/proc/self/task").iterdir()
    return {child for task in tasks for child in (task / "children").read_text().split()}


def test_a_single_process_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_PROCID", "0")
    before, others = {*threading.enumerate()}, children()
    processes.initialise()
    with watched(peer_timeout=60, hang_timeout=60), processes.barrier():
        started = {thread.name for thread in {*threading.enumerate()} - before}
        # that hears Ctrl-C, unless a suite in the background ignores it
        assert started <= {"g2d-signals"}
        assert children() <= others
        own = processes.on_leader(
            lambda: [processes.count(), processes.index(), processes.leader(), processes.gather(7)]
        )
    assert own == [1, 0, True, [7]]


WRONG = {
    "no id": ({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2"}, "need all three"),
    "no address": ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}, "need all three"),
    "a word": ({"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES must be a whole number, got 'two'"),
    "negative": ({"JAX_PROCESS_ID": "-1"}, "JAX_PROCESS_ID must be a whole number, got '-1'"),
    "nothing": ({"JAX_PROCESS_ID": ""}, "JAX_PROCESS_ID must be a whole number, got ''"),
    "too high": (by_jax(2, 1, 2), "process 2 of 2 at 'localhost:1'"),
    "none": (by_jax(0, 1, 0), "process 0 of 0"),
    "no port": (
        by_jax(2, 1, 0) | {"JAX_COORDINATOR_ADDRESS": "localhost"},
        "a coordinator HOST:PORT",
    ),
}


@pytest.mark.parametrize(("variables", "message"), WRONG.values(), ids=WRONG)
def test_half_an_address_is_refused(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        processes.initialise()
    assert processes.count() == 1


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_who_waits_for_the_others_says_so_and_not_for_ever(index: int, forks: Forks) -> None:
    """Neither the coordinator alone nor one that cannot reach it: and Ctrl-C is heard."""
    code = (
        "import sys; from g2d_jax import cli; from g2d_jax.runtime import processes; "
        "processes.JOIN = int(sys.argv[1]); sys.exit(cli.main(sys.argv[2:]))"
    )
    others = (
        "--coordinator",
        f"localhost:{free_port()}",
        "--num-processes",
        2,
        "--process-id",
        index,
    )
    ended = forks.run(6, "run", "--config", "demo", *others, code=code, timeout=120)
    assert ended.returncode == processes.RESTART, ended.stderr
    place = f"process {index} of 2 with the coordinator localhost:"
    assert f"g2d: {place}" in ended.stderr and "waiting for the others, up to 6 s" in ended.stderr
    assert f"the processes did not find each other ({place}" in ended.stderr
    with forks.start(100, "run", "--config", "demo", *others, code=code) as waiting:
        while "waiting for the others" not in waiting.stderr:
            assert waiting.poll() is None, waiting.stderr
            time.sleep(0.05)
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(20) == 130 and "interrupted" in waiting.stderr


def test_arguments_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in by_jax(2, 1, 0).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="process 3 of 3 at 'other:5'"):
        processes.initialise("other:5", 3, 3)
    processes.initialise("other:5", 1, 0)  # one of one: there is nobody to join
    assert processes.count() == 1
