"""The launchers that hand a run to somebody else's program, against stand-ins of that program, by
g2d's statuses."""

import subprocess
from pathlib import Path

import pytest
import yaml
from stand import ARGUMENTS, BIN, LAUNCH, bare, environment, installed, launch, starts

SAVES = "--config.checkpoint.every=10"


def ended(record: Path) -> tuple[str, int]:
    """How a stand-in of tests/launch/cluster.py ended, after how many restarts."""
    return (record / "ended").read_text(), int((record / "restarts").read_text())


def jobset(record: Path, env: dict[str, str], most: int | None = None) -> None:
    """Apply the JobSet, with another limit of restarts if given."""
    manifest = yaml.safe_load((LAUNCH / "gke-jobset.yaml").read_text())
    if most is not None:
        manifest["spec"]["failurePolicy"]["maxRestarts"] = most
    file = record / "jobset.yaml"
    file.write_text(yaml.safe_dump(manifest))
    subprocess.run([BIN / "kubectl", "apply", "-f", file], env=env, check=True, timeout=60)


@pytest.mark.parametrize(
    ("plan", "how", "restarts"),
    [
        ("0", "Completed", 0),
        ("1", "Failed", 0),
        ("2", "Failed", 0),
        ("75 1", "Failed", 0),
        ("75\n137 75\nkill\n130\n134\n0", "Completed", 5),
        ("75\n1", "Failed", 1),
    ],
)
def test_jobset(tmp_path: Path, plan: str, how: str, restarts: int) -> None:
    jobset(tmp_path, environment(tmp_path, plan))
    assert ended(tmp_path) == (how, restarts)
    assert [starts(tmp_path, pod) for pod in range(4)] == [restarts + 1] * 4
    assert (
        (tmp_path / "starts0")
        .read_text()
        .splitlines()[0]
        .endswith(f"gs://BUCKET/runs/demo {SAVES}")
    )


def test_jobset_gives_up(tmp_path: Path) -> None:
    jobset(tmp_path, environment(tmp_path, "75\n75\n75\n75"), most=2)
    assert ended(tmp_path) == ("Failed", 2)


def sky(env: dict[str, str], *options: str) -> None:
    command = [BIN / "sky", "jobs", "launch", LAUNCH / "skypilot.yaml", *options]
    subprocess.run(command, env=env, check=True, timeout=60)


@pytest.mark.parametrize(
    ("plan", "how", "restarts"),
    [
        ("0", "SUCCEEDED", 0),
        ("1", "FAILED", 0),
        ("2", "FAILED", 0),
        ("127", "FAILED", 0),
        ("0 75\nkill\n137\n0", "SUCCEEDED", 3),
        ("75\n75 1", "FAILED", 1),
    ],
)
def test_skypilot(tmp_path: Path, plan: str, how: str, restarts: int) -> None:
    sky(
        bare(tmp_path, plan),
        "--env",
        "G2D_WORKDIR=gs://mine/r",
        "--env",
        "G2D_OVERRIDES=--config.seed=3",
    )
    assert ended(tmp_path) == (how, restarts)
    assert installed(tmp_path) == [".[cuda,hub,gcs,s3] "] * 2 * (restarts + 1)
    command = f"run --config demo --workdir gs://mine/r {SAVES} --config.seed=3"
    assert (tmp_path / "starts1").read_text().splitlines() == [command] * (restarts + 1)


def test_skypilot_with_an_installation_that_fails(tmp_path: Path) -> None:
    env = bare(tmp_path, "0")
    (tmp_path / "unreachable").write_text("1")
    sky(env)
    assert ended(tmp_path) == ("FAILED_SETUP", 0) and starts(tmp_path) == 0


XPK = {"CLUSTER": "c", "PROJECT": "p", "ZONE": "z", "TYPE": "v6e-16", "IMAGE": "i"}


@pytest.mark.parametrize(
    ("plan", "status", "count"),
    [
        ("0", 0, 1),
        ("1", 1, 1),
        ("2", 2, 1),
        ("75\nkill\n130\n42\n0", 0, 5),
        ("137\n1", 1, 2),
        ("75\n75\n75\n0", 75, 3),
    ],
)
def test_xpk(tmp_path: Path, plan: str, status: int, count: int) -> None:
    env = environment(tmp_path, plan, **XPK, MAX_RESTARTS=str(max(2, count - 1)))
    done = launch("xpk.sh", "mine", *ARGUMENTS, env=env)
    assert done.returncode == 0, done.stderr
    assert f"{SAVES} (G2D_CHECKPOINT_EVERY)" in done.stderr
    assert int((tmp_path / "workload").read_text()) == status
    assert (tmp_path / "starts0").read_text().splitlines() == [
        f"run {SAVES} {' '.join(ARGUMENTS)}"
    ] * count


@pytest.mark.parametrize("status", [1, 2, 137])
def test_what_xpk_itself_ends_with_is_told(tmp_path: Path, status: int) -> None:
    done = launch(
        "xpk.sh", "mine", *ARGUMENTS, env=environment(tmp_path, **XPK, XPK_STATUS=str(status))
    )
    assert done.returncode == status and starts(tmp_path) == 0


@pytest.mark.parametrize("status", [0, 1, 2, 137])
@pytest.mark.parametrize(("sync", "opened"), [("none", ""), ("folder", "VLLM_SERVER_DEV_MODE=1\n")])
def test_vllm(tmp_path: Path, sync: str, opened: str, status: int) -> None:
    env = environment(tmp_path, SERVE_STATUS=str(status))
    assert launch("vllm.sh", "model", sync, "--dtype", "float32", env=env).returncode == status
    options = "--logprobs-mode processed_logprobs --generation-config vllm --dtype float32"
    environ = f"VLLM_NO_USAGE_STATS=1\n{opened}"
    assert (
        tmp_path / "vllm"
    ).read_text() == f"serve model --host 127.0.0.1 --port 8000 {options}\n{environ}"
