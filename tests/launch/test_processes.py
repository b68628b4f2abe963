"""g2d itself under the Slurm script: two tasks find each other by SLURM_* and train on their two
devices."""

import os
import sys
from pathlib import Path

import pytest
from stand import BIN, ROOT, launch

from g2d_jax.session import stage_result


@pytest.mark.slow
def test_two_slurm_tasks_are_one_run(tmp_path: Path, one_device: dict[str, str]) -> None:
    env = one_device | {
        "PATH": f"{BIN}{os.pathsep}{one_device['PATH']}",
        "RECORD": str(tmp_path),
        "G2D_COMMAND": f"{sys.executable} -m g2d_jax",
        "SLURM_JOB_ID": str(os.getpid()),  # from which JAX takes the coordinator's port
        "SLURM_CPUS_PER_TASK": "1",
    }
    work = tmp_path / "work"
    arguments = (
        "--config",
        str(ROOT / "tests" / "tiny.py"),
        "--workdir",
        str(work),
        "--until",
        "sft",
    )
    done = launch("slurm.sbatch", *arguments, "--config.stages.sft.steps=2", env=env, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("work directory: ") == 1  # one of the two speaks
    (stage,) = work.glob("*-sft")
    assert stage_result.read(stage)
