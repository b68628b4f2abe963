"""What runs on a slice is this checkout, and an installation that fails costs nothing that is
there."""

import subprocess
from pathlib import Path

import pytest
from stand import ARGUMENTS, LAUNCH, bare, calls, installed, launch, starts

WHEEL = "./g2d_jax-0.1.0-py3-none-any.whl[tpu,hub,gcs]"


def slice_of_two(record: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Give the launcher's command anew: the hosts keep what they have, and what g2d ends with is
    counted from there."""
    for rank in range(2):
        (record / f"starts{rank}").unlink(missing_ok=True)
    return launch(
        "tpu-queued-resource.sh", "mine", *ARGUMENTS, env=env | {"ZONE": "z", "TYPE": "v6e-8"}
    )


def test_the_wheel_of_the_checkout_is_built_and_copied_and_installed(tmp_path: Path) -> None:
    done = slice_of_two(tmp_path, bare(tmp_path, "0"))
    assert done.returncode == 0, done.stderr
    built, *_ = (tmp_path / "python3").read_text().splitlines()
    assert built.startswith("python3 -m pip wheel --quiet --no-deps --wheel-dir=")
    assert built.endswith(f"{LAUNCH}/..")
    assert installed(tmp_path) == [f"{WHEEL} first"] * 2
    assert starts(tmp_path) == 1
    (copied,) = [line for line in (tmp_path / "gcloud").read_text().splitlines() if " scp " in line]
    folder = Path(next(word for word in copied.split() if word.endswith(".whl"))).parent
    assert not folder.exists()  # nothing is left behind here


def test_an_edit_is_installed_by_the_same_command_and_nothing_twice(tmp_path: Path) -> None:
    env = bare(tmp_path, "1")
    assert slice_of_two(tmp_path, env).returncode == 1
    assert slice_of_two(tmp_path, env).returncode == 1
    assert installed(tmp_path) == [f"{WHEEL} first"] * 2  # the checkout is what it was
    (tmp_path / "checkout").write_text("edited\n")
    assert slice_of_two(tmp_path, env).returncode == 1
    assert installed(tmp_path)[2:] == [f"{WHEEL} edited"] * 2
    assert "delete" not in calls(tmp_path) and calls(tmp_path).count("create") == 1


@pytest.mark.parametrize("unreachable", ["1", "01"])
def test_an_installation_that_fails_keeps_the_slice(tmp_path: Path, unreachable: str) -> None:
    env = bare(tmp_path, "75")  # of the host on which it did not fail: it lost the other one
    (tmp_path / "unreachable").write_text(unreachable)
    done = slice_of_two(tmp_path, env)
    assert done.returncode == 69, done.stderr
    assert (
        "error: no such package" in done.stdout and f"{WHEEL} could not be installed" in done.stdout
    )
    assert "could not be installed on a host" in done.stderr and "this deletes it" in done.stderr
    assert calls(tmp_path) == ["create", "scp", "ssh"]
    (tmp_path / "unreachable").unlink()
    (tmp_path / "plan").write_text("0")
    assert slice_of_two(tmp_path, env).returncode == 0
    assert calls(tmp_path)[3:] == ["scp", "ssh", "delete"]


def test_a_package_without_the_command_keeps_the_slice(tmp_path: Path) -> None:
    env = bare(tmp_path, "0", G2D_PACKAGE="something-else")
    (tmp_path / "empty").touch()
    done = slice_of_two(tmp_path, env)
    assert done.returncode == 69, done.stderr
    assert installed(tmp_path) == ["something-else "] * 2 and "delete" not in calls(tmp_path)


def test_a_checkout_that_cannot_be_built_costs_no_slice(tmp_path: Path) -> None:
    done = slice_of_two(tmp_path, bare(tmp_path, "0", BUILD_FAILS="1"))
    assert done.returncode == 69 and "G2D_PACKAGE" in done.stderr
    assert calls(tmp_path) == []
