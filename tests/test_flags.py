"""What a run sets of the environment."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import pytest

from g2d_jax.runtime import flags, processes
from g2d_jax.runtime import mesh as meshes

pytestmark = pytest.mark.quick

DEVICES = jax.devices()
"""Looked for before a test changes the flags."""


def test_cpu_devices_start_collectives_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    assert flags.simulated() == 4
    with pytest.raises(
        ValueError,
        match=f"collectives of 8 CPU devices may hang: .* add {flags.ORDER}=false to XLA_FLAGS",
    ):
        meshes.make_mesh()
    assert meshes.make_mesh(devices=DEVICES[:1]).size == 1
    processes.initialise()
    assert (
        os.environ["XLA_FLAGS"] == f"--xla_force_host_platform_device_count=4 {flags.ORDER}=false"
    )
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


@pytest.mark.parametrize(
    "own", ["", "--xla_force_host_platform_device_count=1", f"{flags.ORDER}=true"]
)
def test_flags_of_one_device_and_those_of_the_user_stay(
    own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", own)
    processes.initialise()
    assert os.environ["XLA_FLAGS"] == own


@pytest.mark.parametrize(
    ("told", "taken"),
    [
        ({}, {"XLA_CLIENT_MEM_FRACTION": "0.9"}),
        *(
            ({name: ".8"}, {name: ".8"})
            for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
        ),
    ],
)
def test_memory_is_taken_as_the_user_says(
    told: dict, taken: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With both variables JAX would go on without the GPU."""
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, told.get(name, ""))
    flags.take_memory()
    assert {
        name: value for name, value in os.environ.items() if "_MEM_FRACTION" in name and value
    } == taken


def test_gpus_add_up_in_one_order_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/nowhere")
    flags.sum_in_order()
    assert os.environ["XLA_FLAGS"] == "--xla_dump_to=/nowhere " + f"{flags.IN_ORDER}=true"
    monkeypatch.setenv("XLA_FLAGS", f"{flags.IN_ORDER}=false")
    flags.sum_in_order()
    assert os.environ["XLA_FLAGS"] == f"{flags.IN_ORDER}=false"
