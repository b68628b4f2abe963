"""Arranging devices and laying arrays out by logical axes, on 8 simulated devices."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from g2d_jax import mesh as meshes

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((1, -1, 1), (1, 8, 1)), ((2, -1, 2), (2, 2, 2)), ((-1, 1, 4), (2, 1, 4)), ((8, 1, 1), (8, 1, 1))],
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
        ((-1, -1, 1), "one of them may be -1"),
        ((0, 8, 1), "must be positive"),
        ((-2, 8, 1), "must be positive"),
    ],
)
def test_wrong_sizes(sizes, message):
    with pytest.raises(ValueError, match=message):
        meshes.make_mesh(*sizes)


def test_spec_leaves_out_axes_of_one_device_and_those_that_do_not_divide():
    mesh = meshes.make_mesh(2, 2, 2)
    assert meshes.spec(mesh, ("embed", "heads", "head_dim"), (8, 4, 3)) == PartitionSpec("fsdp", "tensor", None)
    assert meshes.spec(mesh, ("embed", "kv_heads", "head_dim"), (8, 1, 3)) == PartitionSpec("fsdp", None, None)
    assert meshes.spec(mesh, ("rows", None), (4, 5)) == PartitionSpec(("data", "fsdp"), None)
    assert meshes.spec(mesh, ("rows", None), (6, 5)) == PartitionSpec(None, None)
    whole = meshes.make_mesh(1, 1, 8)
    assert meshes.spec(whole, ("embed", "heads"), (8, 4)) == PartitionSpec(None, None)
    assert meshes.spec(whole, ("rows", "mlp"), (8, 16)) == PartitionSpec(None, "tensor")


def test_put_rows_splits_one_axis_over_the_row_devices():
    mesh, array = meshes.make_mesh(2, 2, 2), np.arange(24).reshape(3, 8)
    placed = meshes.put_rows(mesh, array, axis=1)
    np.testing.assert_array_equal(np.asarray(placed), array)
    assert {shard.data.shape for shard in placed.addressable_shards} == {(3, 2)}


def test_put_replicated_keeps_type_and_value():
    mesh = meshes.make_mesh(2, 2, 2)
    placed = meshes.put(np.asarray(7, np.int32), meshes.replicated(mesh))
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
