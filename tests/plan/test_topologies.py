"""The names of machines, and what they stand for."""

import math
import re

import pytest

from g2d_jax.plan.target import gpu_config
from g2d_jax.plan.topologies import DEVICES, GRIDS, TOPOLOGIES, topology
from g2d_jax.runtime.mesh import usable


@pytest.mark.parametrize(
    ("name", "chips", "devices", "hosts", "compiler"),
    [
        ("v5e-1", 1, 1, 1, "v5e:1x1"),
        ("v5e-8", 8, 8, 1, "v5e:2x4"),
        ("v5e-16", 16, 16, 4, "v5e:4x4"),
        ("v6e-8", 8, 8, 1, "v6e:2x4"),
        ("v6e-16", 16, 16, 4, "v6e:4x4"),
        ("v5p-8", 4, 4, 1, "v5p:2x2x1"),
        ("v5p-16", 8, 8, 2, "v5p:2x2x2"),  # named by TensorCores, two to a chip
        ("v5p-128", 64, 64, 16, "v5p:4x4x4"),
        ("tpu7x-8", 8, 16, 2, "tpu7x:2x2x2"),  # two devices to a chip
        ("h100x8", 8, 8, 1, "1x1x8"),
        ("h200x1", 1, 1, 1, "1x1x1"),
        ("h100x16", 16, 16, 2, "1x2x8"),
        ("h200x64", 64, 64, 8, "1x8x8"),
        ("a100-80x32", 32, 32, 4, "1x4x8"),
        ("l40sx4", 4, 4, 1, "1x1x4"),
        ("2xv5e-16", 32, 32, 8, "v5e:4x4"),
        ("4xv6e-8", 32, 32, 4, "v6e:2x4"),
        ("2xv5p-16", 16, 16, 4, "v5p:2x2x2"),
        ("2xtpu7x-8", 16, 32, 4, "tpu7x:2x2x2"),
    ],
)
def test_what_a_name_means(name, chips, devices, hosts, compiler):
    found = topology(name)
    assert (found.chips, found.devices, found.hosts, found.compiler_name) == (
        chips,
        devices,
        hosts,
        compiler,
    )
    assert found.describe().startswith(f"{name}: {chips} chip")


def test_every_machines_grid_has_its_chips():
    assert set(GRIDS) == set(DEVICES)
    for machine in TOPOLOGIES.values():
        assert (
            math.prod(map(int, machine.grid.split("x"))) == machine.chips
            and machine.devices % machine.hosts == 0
        )


@pytest.mark.parametrize(
    ("name", "near", "between", "says"),
    [
        ("v5e-256", 256, "", "64 hosts; "),
        ("2xv5e-16", 16, "slices", "8 hosts in 2 slices; each device 15.75 GiB"),
        ("2xtpu7x-8", 16, "slices", "300 GB/s to others, 6.25 GB/s to other slices"),
        ("h100x8", 8, "", "450 GB/s to others"),
        ("h100x16", 8, "hosts", "450 GB/s to others, 50 GB/s to other hosts"),
        ("l40sx64", 8, "hosts", "32 GB/s to others, 6.25 GB/s to other hosts"),
    ],
)
def test_what_is_near(name, near, between, says):
    found = topology(name)
    assert (found.near, found.between) == (near, between) and says in found.describe()


def test_gpus_are_described_to_the_compiler_by_their_generation():
    capability = {
        "a100-80": "{ major: 8 }",
        "h100": "{ major: 9 }",
        "h200": "{ major: 9 }",
        "l40s": "{ major: 8 minor: 9 }",
    }
    cores = {"a100-80": 108, "h100": 132, "h200": 132, "l40s": 142}
    for kind in (kind for kind, device in DEVICES.items() if device.platform == "gpu"):
        text = gpu_config(topology(f"{kind}x8"))
        assert (
            f"cuda_compute_capability {capability[kind]}" in text
            and f"core_count: {cores[kind]} " in text
        )
        memory = int(re.search(r"device_memory_size: (\d+)", text)[1])
        assert memory == pytest.approx(DEVICES[kind].hbm / 0.9) and text.count("{") == text.count(
            "}"
        )


def test_what_a_plan_may_use_is_what_a_run_may():
    for device in DEVICES.values():
        assert device.usable == usable(device.platform, device.hbm) < device.hbm
    assert 0.9299 < DEVICES["h100"].usable / DEVICES["h100"].hbm <= 0.93


@pytest.mark.parametrize(
    "name",
    [
        "v5e-3",
        "v5p-9",
        "v5p-6",
        "h100-8",
        "h100x128",
        "v9-8",
        "v5e16",
        "",
        "1xv5e-4",
        "2xh100x8",
        "65xv5e-4",
        "0xv5e-4",
        "02xv5e-16",
        "\u0662xv5e-16",  # the Arabic digit two
        "2x2xv5e-4",
    ],
)
def test_other_names_are_refused_with_those_there_are(name):
    with pytest.raises(
        ValueError, match=r"unknown topology .* valid names are v5e-1, .* For 2 to 64 slices"
    ):
        topology(name)
