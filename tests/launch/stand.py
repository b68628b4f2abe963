"""Runs a launcher with the stand-ins of tests/launch/bin for foreign programs, and for g2d
itself."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
BIN = Path(__file__).parent / "bin"
HOST = Path(__file__).parent / "host"  # python3 and uv of a machine that has no g2d
ARGUMENTS = ("--config", "demo", "--workdir", "gs://bucket/runs/demo")


def environment(record: Path, plan: str = "", **more: str) -> dict[str, str]:
    """plan: what bin/fake-g2d ends with, a line for each start."""
    (record / "plan").write_text(plan)
    return {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(record),
        "RECORD": str(record),
        "PYTHON": sys.executable,
        "G2D_COMMAND": str(BIN / "fake-g2d"),
        "G2D_PAUSE": "0",
        "G2D_LEASE": "0",
        "SLURM_JOB_ID": "7",
        "SLURM_CPUS_PER_TASK": "4",
        **more,
    }


def bare(record: Path, plan: str = "", **more: str) -> dict[str, str]:
    """Return the environment of machines on which g2d is to be installed, from a checkout that can
    be edited."""
    (record / "checkout").write_text("first\n")
    env = environment(record, plan, **{"G2D_COMMAND": "", **more})
    without = [
        folder for folder in env["PATH"].split(os.pathsep) if not (Path(folder) / "g2d").exists()
    ]
    return env | {"PATH": os.pathsep.join([str(HOST), *without])}


def installed(record: Path) -> list[str]:
    """What was installed: a package, and the content of its wheel, for each installation."""
    file = record / "installed"
    return file.read_text().splitlines() if file.exists() else []


def launch(
    script: str, *arguments: str, env: dict[str, str], timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(LAUNCH / script), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)


def starts(record: Path, rank: int = 0) -> int:
    """How often g2d was started there."""
    file = record / f"starts{rank}"
    return len(file.read_text().splitlines()) if file.exists() else 0


def calls(record: Path) -> list[str]:
    """Which gcloud commands were given, without the questions for the state."""
    file = record / "gcloud"
    lines = file.read_text().splitlines() if file.exists() else []
    return [line.split()[3] for line in lines if " describe " not in line]
