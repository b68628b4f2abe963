"""What a run sets of the environment, and that the compilers know every flag of it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from forks import Forks

from g2d_jax import mesh as meshes
from g2d_jax.runtime import flags, processes

pytestmark = pytest.mark.quick

DEVICES = jax.devices()
"""Looked for before a test changes the flags."""


def test_cpu_devices_start_collectives_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    assert flags.simulated() == 4
    with pytest.raises(
        ValueError, match=f"collectives of 8 CPU devices may hang: .* add {flags.ORDER}=false to XLA_FLAGS"
    ):
        meshes.make_mesh()
    assert meshes.make_mesh(devices=DEVICES[:1]).size == 1
    processes.initialise()
    assert os.environ["XLA_FLAGS"] == f"--xla_force_host_platform_device_count=4 {flags.ORDER}=false"
    assert meshes.make_mesh().size == 8


@pytest.mark.parametrize("driven", [False, True])
def test_a_plugin_without_its_device_leaves_jax_on_the_cpu(
    driven: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine on which libtpu was installed to plan for TPUs."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(flags, "DRIVEN", (f"{tmp_path}/accel*",))
    (tmp_path / "libtpu.py").touch()
    if driven:
        (tmp_path / "accel0").touch()
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", None)
    try:
        processes.initialise()
    finally:
        jax.config.update("jax_platforms", before)
    assert (flags.ORDER in os.environ["XLA_FLAGS"]) is not driven


@pytest.mark.parametrize("own", ["", "--xla_force_host_platform_device_count=1", f"{flags.ORDER}=true"])
def test_flags_of_one_device_and_those_of_the_user_stay(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", own)
    processes.initialise()
    assert os.environ["XLA_FLAGS"] == own


@pytest.mark.parametrize(
    ("told", "taken"),
    [
        ({}, {"XLA_CLIENT_MEM_FRACTION": "0.9"}),
        *(({name: ".8"}, {name: ".8"}) for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")),
    ],
)
def test_memory_is_taken_as_the_user_says(told: dict, taken: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """With both variables JAX would go on without the GPU."""
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, told.get(name, ""))
    flags.take_memory()
    assert {name: value for name, value in os.environ.items() if "_MEM_FRACTION" in name and value} == taken


SET = """
import os
from g2d_jax.runtime import flags
flags.OVERLAP = {"XLA_FLAGS": {"--one": "true", "--one_more": "true"}, "ARGS": {"--two": "2"}}
for setting in ("none", "overlap", "overlap"):
    flags.use(setting)
    print(os.environ["XLA_FLAGS"], os.environ["ARGS"], sep="|")
"""


def test_what_the_user_set_stays_and_the_rest_is_added(forks: Forks) -> None:
    done = forks.run(code=SET, env={**os.environ, "XLA_FLAGS": "--other=1 --one_more=false", "ARGS": ""})
    before, *after = done.stdout.splitlines()
    assert before == "--other=1 --one_more=false|", done.stderr
    assert after == ["--other=1 --one_more=false --one=true|--two=2"] * 2


def test_flags_that_come_too_late_are_refused_but_not_those_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in flags.OVERLAP:
        monkeypatch.setenv(name, "")
    with pytest.raises(ValueError, match="is 'overlap', but JAX has devices already: begin this run in a new process"):
        flags.use("overlap")
    assert not any(os.environ[name] for name in flags.OVERLAP)
    for name, some in flags.OVERLAP.items():
        monkeypatch.setenv(name, " ".join(f"{flag}=false" for flag in some))
    flags.use("overlap")


PLAN = """
import sys
from g2d_jax import cli
from g2d_jax.runtime import flags
variable, topology, config, more = sys.argv[1:]
flags.OVERLAP[variable] |= dict.fromkeys(more.split(), "true")
settings = ["compute.flags=overlap", "model.num_hidden_layers=1", "logging.tensorboard=False", "dtype=bfloat16"]
command = ["plan", "--config", config, "--topology", topology, "--stage", "sft"]
sys.exit(cli.main([*command, *(f"--config.{setting}" for setting in settings)]))
"""
TINY = str(Path(__file__).with_name("tiny.py"))


@pytest.mark.parametrize(
    ("package", "variable", "topology"),
    [("libtpu", "LIBTPU_INIT_ARGS", "v5e-4"), ("jax_plugins.xla_cuda12", "XLA_FLAGS", "h100x8")],
    ids=["tpu", "gpu"],
)
def test_the_compiler_knows_every_flag(package: str, variable: str, topology: str) -> None:
    """A train step is compiled with all of them; one that it does not know ends the process."""
    if importlib.util.find_spec(package.partition(".")[0]) is None or importlib.util.find_spec(package) is None:
        pytest.skip(f"{package}, which compiles for {topology}, is not installed")
    paths = os.pathsep.join([str(Path(TINY).parent), *sys.path])
    environment = {**os.environ, "XLA_FLAGS": "", "LIBTPU_INIT_ARGS": "", "PYTHONPATH": paths}
    runs = []
    for more in ("", "--xla_nonsense"):
        command = [sys.executable, "-c", PLAN, variable, topology, TINY, more]
        runs.append(subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240))
    known, unknown = runs
    assert known.returncode == 0 and "fits: yes" in known.stdout, known.stderr
    assert unknown.returncode != 0 and "xla_nonsense" in unknown.stderr and "fits" not in unknown.stdout
