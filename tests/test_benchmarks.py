"""Benchmarks run on a CPU, so that an hour on an accelerator is not lost to them."""

import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sources import load_problems

from g2d_jax.config import Config
from g2d_jax.data import arithmetic
from g2d_jax.stages import run_issues

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SCRIPT = runpy.run_path(str(BENCHMARKS / "accelerator.py"))
DEMO_TASK = runpy.run_path(str(BENCHMARKS / "demo_task.py"))
READS = runpy.run_path(str(BENCHMARKS / "decode_reads.py"))
AHEAD = runpy.run_path(str(BENCHMARKS / "ahead.py"))


def call(environment, script, *arguments):
    """Run a script as a user does; its standard output and error come together."""
    return subprocess.run(
        [sys.executable, BENCHMARKS / script, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


@pytest.mark.parametrize("part", ["kernel", "logprobs"])
def test_parts_on_a_cpu(part, capsys):
    options = SCRIPT["parsed"](["--parts", part, "--shapes", "tiny"])
    assert SCRIPT["PARTS"][part](SCRIPT["shape"]("tiny"), options)
    lines = capsys.readouterr().out.splitlines()
    assert lines and all(line.split()[0] == part for line in lines)
    assert part != "kernel" or any("cuDNN" in x and "not on this platform" in x for x in lines)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_parts_as_processes_of_their_own(one_device, tmp_path):
    parts = "--parts", "all", "--shapes", "tiny", "--limit", 1500
    done = call(one_device, "accelerator.py", *parts, "--output", tmp_path)
    assert done.returncode == 0, done.stdout
    for part in SCRIPT["PARTS"]:
        device, *lines = (tmp_path / f"{part}-tiny.log").read_text().splitlines()
        assert "1 x cpu" in device and any(line.split()[0] == part for line in lines)
    assert all(f"memory  {stage}, " in done.stdout for stage in SCRIPT["STAGES"])


def test_the_check_names_every_module_that_is_missing(one_device, tmp_path):
    """A finder before all others is as good as an environment without them."""
    (tmp_path / "sitecustomize.py").write_text(
        """import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("grain", "math_verify"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""
    )
    done = call({**one_device, "PYTHONPATH": str(tmp_path)}, "accelerator.py", "--check")
    assert done.returncode != 0, done.stdout
    found = [line for line in done.stdout.splitlines() if line.startswith("missing: ")]
    assert found == ["missing: grain, math_verify"]


def test_a_part_that_takes_too_long_is_ended_with_all_it_started_and_its_output_stays(tmp_path):
    log = tmp_path / "log"
    assert SCRIPT["run"](["bash", "-c", "echo begun; sleep 60 & echo $!; wait"], log, 1.0) == 124
    begun, process_id = log.read_text().split()
    assert begun == "begun"
    limit = time.monotonic() + 30
    while is_running(process_id):
        assert time.monotonic() < limit
        time.sleep(0.1)


def is_running(process_id):
    """Whether it is there; a killed process stays until its parent waits for it."""
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_an_hour_on_a_gpu_begins_with_what_is_worth_most(one_device, tmp_path):
    def planned(minutes):
        dry = "--dry-run", "--minutes", minutes, "--output", tmp_path
        told = call(one_device, "gpu_hour.py", *dry)
        assert told.returncode == 0, told.stdout
        return [line.partition(",")[0] for line in told.stdout.splitlines() if "at most" in line]

    assert planned(15) == ["1-check", "2-kernel", "3-sampling", "5-train"]
    assert {name[0] for name in planned(60) if name[0] != "r"} == set("123456789")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("ahead", [0, 1])
def test_what_sampling_ahead_is_measured_with_can_run(ahead):
    config = Config.of(AHEAD["timed"]("http://localhost:8000/v1", ahead))
    run_issues.checked(config)
    assert config.stages["train"].has_windows


@pytest.mark.parametrize("variant", DEMO_TASK["VARIANTS"])
def test_variants_of_the_demo_can_run(variant, monkeypatch):
    monkeypatch.setattr(arithmetic, "TASKS", {**arithmetic.TASKS})
    config = DEMO_TASK["config_of"](variant, 1)
    run_issues.checked(config)
    problems, _ = load_problems(config.data.train.path, split="train", limit=100)
    assert config.stages.evaluate.split == "dev"
    assert max(len(problem.prompt) for problem in problems) <= config.data.max_prompt_length


def test_a_tpu_reads_hardly_more_of_the_cache_than_lives():
    case = READS["CASES"][0]
    steps = READS["simulate"](case)
    found = READS["ratios"](steps)
    assert 1 < found["TPU, pallas"] <= 1.3 and found["TPU, xla"] > 4
    assert steps.earlier.shape == (3680, 128) and steps.width == 2304
    assert (steps.earlier + 1).mean() == pytest.approx(412.9, abs=0.1)


@pytest.mark.slow
def test_table_beside_no_peers(one_device):
    command = [
        sys.executable,
        BENCHMARKS / "peers.py",
        "dpo",
        "--tiny",
        "--rounds=1",
        "--only=Qwen2",
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=one_device, check=True)
    assert "tunix is left out" in done.stderr and "trl is left out" in done.stderr
    head, line, *rows = [row.split(" | ") for row in done.stdout.split("\n\n")[0].splitlines()]
    assert head == ["| dpo", "ours", "ratio |"] and line == ["|---|---|---|"]
    assert rows and all(row[0].startswith("| Qwen2") and row[2] == "– |" for row in rows)
