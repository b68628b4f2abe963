"""What launchers make of g2d's statuses, on local processes: 0 done, 1 and 2 stop, 75 and signals
start again."""

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from stand import ARGUMENTS, BIN, LAUNCH, calls, environment, launch, starts


def wait_for(*files: Path) -> None:
    deadline = time.monotonic() + 30
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, files
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("plan", "status", "count"),
    [
        ("0", 0, 1),
        ("1", 1, 1),
        ("2", 2, 1),
        ("130", 130, 1),
        ("127", 127, 1),
        ("+75\n+75\nkill\n+137\n0", 0, 5),
        ("+75\n1", 1, 2),
        ("+75\nkill\n75\n75\n0", 75, 4),  # three starts in a row without progress
    ],
)
def test_workstation(tmp_path: Path, plan: str, status: int, count: int) -> None:
    done = launch(
        "workstation.sh", "--config", "demo", "--workdir", "runs/x", env=environment(tmp_path, plan)
    )
    assert (done.returncode, starts(tmp_path)) == (status, count), done.stderr
    assert set((tmp_path / "starts0").read_text().splitlines()) == {
        "run --config demo --workdir runs/x"
    }


# As in a terminal: a suite that runs in the background has Ctrl-C ignored, and bash cannot trap
# what was ignored.
HEEDING = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execvp("bash", ["bash", *sys.argv[1:]])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_workstation_hands_on_a_signal_and_ends(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", HEEDING, str(LAUNCH / "workstation.sh"), *ARGUMENTS]
    with subprocess.Popen(
        command, env=environment(tmp_path, "term\n0"), stdout=subprocess.PIPE, text=True
    ) as script:
        wait_for(tmp_path / "waiting0")
        os.kill(script.pid, number)
        output, _ = script.communicate(timeout=30)
    assert (script.returncode, output, starts(tmp_path)) == (75, "waiting\nsaved\n", 1)


@pytest.mark.parametrize(
    ("plan", "status", "requeued"),
    [
        ("0", 0, False),
        ("1", 1, False),
        ("2", 2, False),
        ("75", 75, True),
        ("kill", 137, True),
        ("75 137", 137, True),
        ("0 75", 75, True),
        ("1 75", 1, False),  # srun gives the highest status
        ("75 2", 2, False),
        ("137 1", 1, False),
        ("130", 130, False),
        ("127", 127, False),
    ],
)
def test_slurm(tmp_path: Path, plan: str, status: int, requeued: bool) -> None:
    done = launch("slurm.sbatch", *ARGUMENTS, env=environment(tmp_path, plan))
    assert done.returncode == status, done.stderr
    assert (tmp_path / "scontrol").exists() == requeued
    assert not requeued or (tmp_path / "scontrol").read_text() == "requeue 7\n"
    assert (starts(tmp_path, 0), starts(tmp_path, 1)) == (1, 1)
    for rank in (0, 1):
        assert (tmp_path / f"starts{rank}").read_text() == f"run {' '.join(ARGUMENTS)}\n"
    options = "--cpus-per-task=4 --gpu-bind=none --kill-on-bad-exit=0 --wait=600 "
    assert (tmp_path / "srun").read_text().startswith(options)


@pytest.mark.parametrize(
    "why", [{"JOB_STATE": "CANCELLED"}, {"JOB_STATE": "COMPLETING"}, {"SLURM_RESTART_COUNT": "100"}]
)
def test_slurm_leaves_it_at_that(tmp_path: Path, why: dict) -> None:
    done = launch("slurm.sbatch", *ARGUMENTS, env=environment(tmp_path, "75", **why))
    assert done.returncode == 75 and not (tmp_path / "scontrol").exists()


@pytest.mark.parametrize(
    ("plan", "limit", "status", "count"),
    [("75\n0 137\nkill\n0", "100", 0, 4), ("75\n1", "100", 1, 2), ("75\n75\n75\n75", "2", 75, 3)],
)
def test_a_job_that_sbatch_queues_again(
    tmp_path: Path, plan: str, limit: str, status: int, count: int
) -> None:
    env = environment(tmp_path, plan, G2D_MAX_RESTARTS=limit)
    command = [BIN / "sbatch", LAUNCH / "slurm.sbatch", *ARGUMENTS]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, starts(tmp_path, 0), starts(tmp_path, 1)) == (status, count, count), (
        done.stderr
    )


@pytest.mark.parametrize("script", ["workstation.sh", "slurm.sbatch"])
def test_who_has_not_installed_g2d_is_told(tmp_path: Path, script: str) -> None:
    done = launch(
        script, *ARGUMENTS, env=environment(tmp_path, G2D_COMMAND="g2d-that-is-not-there")
    )
    assert done.returncode == 69 and "there is no command g2d-that-is-not-there" in done.stderr
    assert not (tmp_path / "srun").exists() and not (tmp_path / "scontrol").exists()


def test_slurm_hands_sigterm_to_the_tasks_and_queues_again(tmp_path: Path) -> None:
    command = ["bash", str(LAUNCH / "slurm.sbatch"), *ARGUMENTS]
    with subprocess.Popen(
        command, env=environment(tmp_path, "term"), stdout=subprocess.PIPE, text=True
    ) as script:
        wait_for(tmp_path / "waiting0", tmp_path / "waiting1", tmp_path / "tasks")
        script.terminate()  # Slurm's --signal=B:TERM@180
        output, _ = script.communicate(timeout=30)
    assert (script.returncode, output) == (75, "waiting\nwaiting\nsaved\nsaved\n")
    assert (tmp_path / "scancel").read_text() == "--signal=TERM 7\n"
    assert (tmp_path / "scontrol").read_text() == "requeue 7\n"


def test_a_slurm_task_hears_ctrl_c_as_it_would_without_the_scripts_shell() -> None:
    """bash has its background commands ignore SIGINT, and Python then leaves it ignored."""
    (function,) = re.findall(
        r"^task\(\) \{.*?^\}$", (LAUNCH / "slurm.sbatch").read_text(), re.MULTILINE | re.DOTALL
    )
    says = "import signal; print(signal.getsignal(signal.SIGINT).__name__)"
    shell = ["-c", f'{function}; task "$@"', "task", sys.executable, "-c", says]
    done = subprocess.run(
        [sys.executable, "-c", HEEDING, *shell], capture_output=True, text=True, timeout=30
    )
    assert done.stdout == "default_int_handler\n", done.stderr


def slice_of_two(
    record: Path, plan: str, *arguments: str, **more: str
) -> subprocess.CompletedProcess[str]:
    env = environment(record, plan, **{"ZONE": "z", "TYPE": "v6e-8", "G2D_PACKAGE": "p", **more})
    return launch("tpu-queued-resource.sh", "mine", *ARGUMENTS, *arguments, env=env)


@pytest.mark.parametrize(
    ("plan", "status", "count"),
    [
        ("0", 0, 1),
        ("1", 1, 1),
        ("75 1", 1, 1),  # one host stopped with a message, the other then lost a peer
        ("2", 2, 1),
        ("127", 69, 1),  # there is no such command
        ("75\n0", 0, 2),
        ("kill\n137 130\n0", 0, 3),
    ],
)
def test_tpu_slice(tmp_path: Path, plan: str, status: int, count: int) -> None:
    done = slice_of_two(tmp_path, plan)
    assert done.returncode == status, done.stderr
    assert (starts(tmp_path, 0), starts(tmp_path, 1)) == (count, count)
    deleted = ["delete"] if status == 0 else []
    assert calls(tmp_path) == ["create", *["scp", "ssh"] * count, *deleted]
    # how to end its cost
    assert ("queued-resources delete mine --zone=z --force" in done.stderr) == (status != 0)


@pytest.mark.parametrize(
    ("plan", "keep", "deleted"), [("0", "always", False), ("1", "never", True)]
)
def test_who_wants_says_what_becomes_of_the_slice(
    tmp_path: Path, plan: str, keep: str, deleted: bool
) -> None:
    done = slice_of_two(tmp_path, plan, KEEP=keep)
    assert done.returncode == int(plan), done.stderr
    assert ("delete" in calls(tmp_path)) == deleted


@pytest.mark.parametrize("keep", ["failed", "never"])
def test_who_stops_the_script_is_told_what_goes_on_costing(tmp_path: Path, keep: str) -> None:
    (tmp_path / "state").write_text("PROVISIONING\n")
    env = environment(tmp_path, ZONE="z", TYPE="v6e-8", G2D_PACKAGE="p", G2D_PAUSE="30", KEEP=keep)
    script = [str(LAUNCH / "tpu-queued-resource.sh"), "mine", *ARGUMENTS]
    with subprocess.Popen(
        [sys.executable, "-c", HEEDING, *script],
        env=env,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        while "PROVISIONING" not in process.stderr.readline():
            pass
        os.killpg(process.pid, signal.SIGINT)  # Ctrl-C reaches what the script waits for, too
        _, said = process.communicate(timeout=30)
    assert process.returncode == 130 and calls(tmp_path) == []
    assert "queued-resources delete mine --zone=z --force" in said


def test_a_slice_that_cannot_be_deleted_is_told(tmp_path: Path) -> None:
    done = slice_of_two(tmp_path, "0", GCLOUD_FAILS="queued-resources delete")
    assert done.returncode == 0 and "NOT DELETED" in done.stderr


def test_the_same_command_uses_the_slice_that_was_kept(tmp_path: Path) -> None:
    assert slice_of_two(tmp_path, "1").returncode == 1
    (tmp_path / "starts0").unlink()
    (tmp_path / "starts1").unlink()
    assert slice_of_two(tmp_path, "0").returncode == 0
    assert calls(tmp_path) == ["create", "scp", "ssh", "scp", "ssh", "delete"]


@pytest.mark.parametrize("status", ["1", "2"])
def test_a_request_that_gcloud_refuses_ends_at_once(tmp_path: Path, status: str) -> None:
    done = slice_of_two(tmp_path, "0", GCLOUD_FAILS="queued-resources create", GCLOUD_STATUS=status)
    assert done.returncode == 1 and "gcloud: queued-resources create failed" in done.stderr
    assert calls(tmp_path) == ["create"]


@pytest.mark.parametrize("command", ["tpu-vm scp", "tpu-vm ssh"])
@pytest.mark.parametrize("status", ["1", "2", "255"])
def test_hosts_that_are_not_reached_are_no_reason_to_delete(
    tmp_path: Path, command: str, status: str
) -> None:
    done = slice_of_two(
        tmp_path, "0", GCLOUD_FAILS=command, GCLOUD_STATUS=status, G2D_MAX_FAILURES="2"
    )
    assert done.returncode == 75 and "not all hosts were reached" in done.stderr
    assert "delete" not in calls(tmp_path) and calls(tmp_path).count("create") == 1


def test_a_preempted_slice_is_made_again(tmp_path: Path) -> None:
    done = slice_of_two(tmp_path, "preempt\n0")
    assert done.returncode == 0, done.stderr
    assert calls(tmp_path) == ["create", "scp", "ssh", "delete", "create", "scp", "ssh", "delete"]


def test_a_machine_that_was_terminated_under_its_request_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "machine").write_text("TERMINATED\n")
    done = slice_of_two(tmp_path, "75\n0")
    assert done.returncode == 0, done.stderr
    assert calls(tmp_path) == ["create", "scp", "ssh", "delete", "create", "scp", "ssh", "delete"]


def test_a_slice_on_which_nothing_works_is_given_up_and_kept(tmp_path: Path) -> None:
    done = slice_of_two(tmp_path, "75\n137\n75", G2D_MAX_FAILURES="3")
    assert done.returncode == 75 and starts(tmp_path) == 3
    assert calls(tmp_path) == ["create", *["scp", "ssh"] * 3]


def test_a_slice_is_given_up_after_starts_without_progress(tmp_path: Path) -> None:
    done = slice_of_two(tmp_path, "+75\n+kill\n75\nkill\n0", G2D_MAX_FAILURES="2")
    assert (done.returncode, starts(tmp_path)) == (75, 4), done.stderr


def test_another_accelerator_type_than_the_slices_is_refused(tmp_path: Path) -> None:
    assert slice_of_two(tmp_path, "1").returncode == 1
    done = slice_of_two(tmp_path, "1\n0", TYPE="v5e-16", KEEP="never")
    assert done.returncode == 2 and "is a v6e-8, not a v5litepod-16" in done.stderr
    assert calls(tmp_path) == ["create", "scp", "ssh"] and starts(tmp_path) == 1


def test_other_arguments_do_not_follow_a_run_that_is_at_work(tmp_path: Path) -> None:
    plan = "term\n0"
    with ThreadPoolExecutor() as threads:
        first = threads.submit(slice_of_two, tmp_path, plan)
        wait_for(tmp_path / "waiting0", tmp_path / "waiting1")
        other = slice_of_two(tmp_path, plan, "--config.seed=2", KEEP="never")
        deleted = "delete" in calls(tmp_path)
        for rank in (0, 1):
            os.kill(int((tmp_path / f"waiting{rank}").read_text()), signal.SIGTERM)
    arguments = f"--config.checkpoint.every=10 {' '.join(ARGUMENTS)}"
    assert other.returncode == 2 and not deleted, other.stderr
    assert f"g2d runs here already with other arguments: {arguments} \n" in other.stdout
    assert f"nothing was started with: {arguments} --config.seed=2 \n" in other.stdout
    assert first.result().returncode == 0 and starts(tmp_path) == 2  # its own two


def test_a_host_starts_an_attempt_once(tmp_path: Path) -> None:
    env = environment(tmp_path, "term\n0")
    command = [
        "bash",
        str(LAUNCH / "tpu-worker.sh"),
        "first",
        "g2d-jax[tpu] @ git+https://host/repository",
        "--config",
        "demo",
    ]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as lost:
        wait_for(tmp_path / "waiting0")
        lost.kill()  # the connection breaks; g2d goes on
    with subprocess.Popen(
        [*command[:2], "second", *command[3:]], env=env, stdout=subprocess.PIPE, text=True
    ) as again:
        # it follows the one that runs
        assert again.stdout is not None and again.stdout.readline() == "waiting\n"
        os.kill(int((tmp_path / "waiting0").read_text()), signal.SIGTERM)
        output, _ = again.communicate(timeout=30)
    assert starts(tmp_path) == 1
    assert (again.returncode, output) == (75, "saved\ng2d exit status: 75\n")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30)
    # the same attempt again: only told how it ended
    assert (done.returncode, starts(tmp_path)) == (
        75,
        1,
    )
    done = subprocess.run(
        [*command[:2], "third", *command[3:]], env=env, capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, starts(tmp_path)) == (0, 2)
