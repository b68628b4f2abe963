"""The names of machines, and what they stand for."""

import math

import pytest

from g2d_jax.plan.topologies import DEVICES, GRIDS, TOPOLOGIES, topology


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
    ],
)
def test_what_a_name_means(name, chips, devices, hosts, compiler):
    found = topology(name)
    assert (found.chips, found.devices, found.hosts, found.compiler_name) == (chips, devices, hosts, compiler)
    assert found.describe().startswith(f"{name}: {chips} chip")


def test_every_machines_grid_has_its_chips():
    assert set(GRIDS) == set(DEVICES)
    for machine in TOPOLOGIES.values():
        assert math.prod(map(int, machine.grid.split("x"))) == machine.chips and machine.devices % machine.hosts == 0


@pytest.mark.parametrize("name", ["v5e-3", "v5p-9", "v5p-6", "h100-8", "v9-8", "v5e16", ""])
def test_other_names_are_refused_with_those_there_are(name):
    with pytest.raises(ValueError, match=r"unknown topology .* there are v5e-1, "):
        topology(name)
