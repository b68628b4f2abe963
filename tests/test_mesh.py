"""Arranging devices and laying arrays out by logical axes, on 8 simulated devices."""

from __future__ import annotations

import random
from dataclasses import dataclass

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from g2d_jax.runtime import mesh as meshes
from g2d_jax.runtime.program import put_like

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((1, -1, 1), (1, 8, 1)),
        ((2, -1, 2), (2, 2, 2)),
        ((-1, 1, 4), (2, 1, 4)),
        ((8, 1, 1), (8, 1, 1)),
    ],
)
def test_sizes(sizes, expected):
    mesh = meshes.make_mesh(*sizes)
    assert mesh.axis_names == ("data", "fsdp", "tensor")
    assert mesh.devices.shape == expected
    assert meshes.row_ways(mesh) == expected[0] * expected[1]


def test_chosen_devices():
    assert meshes.make_mesh(1, -1, 2, jax.devices()[:4]).devices.shape == (1, 2, 2)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((2, 2, 1), "data=2, fsdp=2, tensor=1 needs 4 devices but 8 are present"),
        ((3, -1, 1), "data=3, fsdp=-1, tensor=1 needs a multiple of 3 devices but 8 are present"),
        ((16, -1, 1), "needs a multiple of 16 devices but 8 are present"),
        ((-1, -1, 1), "one may be -1"),
        ((0, 8, 1), "must be positive"),
        ((-2, 8, 1), "must be positive"),
    ],
)
def test_wrong_sizes(sizes, message):
    with pytest.raises(ValueError, match=message):
        meshes.make_mesh(*sizes)


def test_spec_leaves_out_axes_of_one_device_and_those_that_do_not_divide():
    mesh = meshes.make_mesh(2, 2, 2)
    assert meshes.spec(mesh, ("embed", "heads", "head_dim"), (8, 4, 3)) == PartitionSpec(
        "fsdp", "tensor", None
    )
    assert meshes.spec(mesh, ("embed", "kv_heads", "head_dim"), (8, 1, 3)) == PartitionSpec(
        "fsdp", None, None
    )
    assert meshes.spec(mesh, ("rows", None), (4, 5)) == PartitionSpec(("data", "fsdp"), None)
    assert meshes.spec(mesh, ("rows", None), (6, 5)) == PartitionSpec(None, None)
    whole = meshes.make_mesh(1, 1, 8)
    assert meshes.spec(whole, ("embed", "heads"), (8, 4)) == PartitionSpec(None, None)
    assert meshes.spec(whole, ("rows", "mlp"), (8, 16)) == PartitionSpec(None, "tensor")


def test_put_like_splits_one_axis_over_the_row_devices():
    mesh, array = meshes.make_mesh(2, 2, 2), np.arange(24).reshape(3, 8)
    placed = put_like(array, meshes.abstract_rows(mesh, array.shape, array.dtype, axis=1))
    np.testing.assert_array_equal(np.asarray(placed), array)
    assert {shard.data.shape for shard in placed.addressable_shards} == {(3, 2)}


def test_put_replicated_keeps_type_and_value():
    mesh = meshes.make_mesh(2, 2, 2)
    placed = put_like(7, meshes.abstract_number(mesh, np.int32))
    assert placed.dtype == np.int32 and int(placed) == 7 and placed.is_fully_replicated


@pytest.mark.parametrize(
    ("tensor", "kv_heads", "shape"),
    [(1, 2, (8, 1, 1)), (4, 4, (2, 1, 4)), (4, 2, (2, 2, 2)), (8, 1, (1, 8, 1)), (2, 6, (4, 1, 2))],
)
def test_sampling_splits_weights_over_key_heads_and_then_by_width(tensor, kv_heads, shape):
    mesh = meshes.make_mesh(1, 4, 2)
    sampling = meshes.sampling(mesh, tensor, kv_heads)
    assert tuple(sampling.shape.values()) == shape
    assert [*sampling.devices.flat] == [*mesh.devices.flat]


def test_sampling_splits_weights_over_a_part_of_the_devices():
    with pytest.raises(ValueError, match="sampling_tensor=3 does not divide the 8 devices"):
        meshes.sampling(meshes.make_mesh(1, 4, 2), 3, 2)


@dataclass(frozen=True)
class Chip:
    """A device as JAX tells of it: a TPU of a slice that has a place on its torus, or a GPU of a
    host."""

    id: int
    slice_index: int
    process_index: int
    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"
    coords: tuple[int, ...] = ()
    core_on_chip: int = 0


def chips(count, shape, kind="TPU v5 lite"):
    """The chips of so many slices of one shape, four to a host, in no order."""
    found, size = [], int(np.prod(shape))
    for number in range(count * size):
        part, place = divmod(number, size)
        coords = tuple(int(at) for at in np.unravel_index(place, shape[::-1])[::-1])
        found.append(Chip(number, part, number // 4, "tpu", kind, coords))
    return random.Random(0).sample(found, len(found))


def gpus(hosts, each):
    """The GPUs of so many hosts: to JAX each host is a slice."""
    return [Chip(at, at // each, at, "gpu", "NVIDIA H100 80GB HBM3") for at in range(hosts * each)]


@pytest.mark.parametrize("kind", ["TPU v5 lite", "TPU v5", "TPU v6 lite"])
@pytest.mark.parametrize(
    ("count", "sizes"),
    [
        (2, (2, 16, 1)),
        (2, (4, 8, 1)),
        (2, (2, 4, 4)),
        (2, (32, 1, 1)),
        (4, (4, 2, 8)),
        (1, (1, 8, 2)),
        (1, (16, 1, 1)),
    ],
)
def test_only_data_goes_over_slices(count, sizes, kind):
    found = meshes.arranged(chips(count, (4, 4, 1), kind), sizes)
    assert found.shape == sizes and len({chip.id for chip in found.flat}) == 16 * count
    assert [chip.slice_index for chip in found.flat] == [
        number // 16 for number in range(16 * count)
    ]


@pytest.mark.parametrize(
    ("count", "sizes"),
    [(2, (1, 32, 1)), (2, (1, 16, 2)), (2, (1, 1, 32)), (3, (2, 24, 1)), (4, (2, 32, 1))],
)
def test_a_mesh_that_cannot_be_over_slices_is_refused_with_the_setting(count, sizes):
    setting = (
        rf"{16 * count} devices are {count} slices.*set mesh.data={count} or a multiple of it, "
        r"and mesh.fsdp=-1"
    )
    with pytest.raises(ValueError, match=setting):
        meshes.arranged(chips(count, (4, 4, 1)), sizes)


def test_slices_of_different_sizes_are_refused():
    with pytest.raises(ValueError, match=r"2 slices have \[8, 16\] devices"):
        meshes.arranged([chip for chip in chips(2, (4, 4, 1)) if chip.id < 24], (2, 12, 1))


@pytest.mark.parametrize("sizes", [(1, 16, 1), (2, 8, 1), (1, 2, 8), (16, 1, 1)])
def test_hosts_of_gpus_are_no_slices_and_follow_each_other(sizes):
    found = meshes.arranged(random.Random(0).sample(gpus(2, 8), 16), sizes)
    assert [gpu.id for gpu in found.flat] == [*range(16)] and found.shape == sizes


def test_what_is_near():
    axes = meshes.AXES
    assert meshes.near(meshes.make_mesh()) == 8 and meshes.slices(jax.devices()) == 1
    for devices, sizes, near, slices in (
        (chips(2, (4, 4, 1)), (2, 16, 1), 16, 2),
        (gpus(4, 8), (1, 32, 1), 8, 1),
    ):
        mesh = jax.sharding.Mesh(meshes.arranged(devices, sizes), axes)
        assert meshes.near(mesh) == near and meshes.slices(devices) == slices


def test_a_copy_of_the_weights_that_is_sampled_from_lies_in_a_slice():
    mesh = jax.sharding.Mesh(meshes.arranged(chips(2, (2, 2, 1)), (2, 4, 1)), meshes.AXES)
    for copy in meshes.sampling(mesh, 4, 2).devices:
        assert len({chip.slice_index for chip in copy.flat}) == 1
    with pytest.raises(
        ValueError,
        match=r"over 8 devices does not fit into a slice of 4: set compute.sampling_tensor to",
    ):
        meshes.sampling(mesh, 8, 2)
    hosts = jax.sharding.Mesh(meshes.arranged(gpus(2, 4), (1, 8, 1)), meshes.AXES)
    # of several hosts, if one asks for it
    assert meshes.sampling(hosts, 8, 2).devices.shape == (
        1,
        4,
        2,
    )


def test_the_sampling_mesh_keeps_the_training_mesh_s_order():
    """A row of the torus for each group along tensor."""
    training = jax.sharding.Mesh(meshes.arranged(chips(1, (4, 4, 1)), (1, 16, 1)), meshes.AXES)
    found = meshes.sampling(training, 8, 4)
    assert found.devices.shape == (2, 2, 4)
    assert [*found.devices.flat] == [*training.devices.flat]
    assert meshes.torus_axes(training) == (2, 1) and meshes.torus_axes(found)[1] == 1


@pytest.mark.parametrize(
    ("platform", "bytes_"), [("tpu", 920), ("gpu", 930), ("cuda", 930), ("cpu", 1000)]
)
def test_the_share_of_a_limit_that_programs_may_use(platform, bytes_):
    assert meshes.usable(platform, 1000) == bytes_
