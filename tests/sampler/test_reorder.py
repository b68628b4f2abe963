"""Arrays of training's order of the devices, where the sampling mesh has them in another."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from g2d_jax.models import decoder
from g2d_jax.models.config import ModelConfig
from g2d_jax.runtime import mesh as meshes
from g2d_jax.sampler.reorder import Reorder

pytestmark = pytest.mark.quick

CONFIG = ModelConfig("qwen2", 64, 32, 2, 4, 2, 8, 48, tie_word_embeddings=True)


def shuffled(sizes: tuple[int, int, int]) -> Mesh:
    """A sampling mesh that has the devices in no order."""
    devices = np.random.default_rng(0).permutation(np.array(jax.devices()))
    return Mesh(devices.reshape(sizes), meshes.AXES, axis_types=(AxisType.Auto,) * 3)


@pytest.mark.parametrize("sizes", [(4, 1, 2), (2, 2, 2), (1, 4, 2), (1, 1, 8)])
def test_every_device_gets_its_part(sizes: tuple[int, int, int]) -> None:
    """Split by either axis, by both, or by none; and the shapes of the arrays without them."""
    training, target = meshes.make_mesh(1, 8, 1), shuffled(sizes)
    reorder = Reorder(training, target)
    arrays, shardings = {}, {}
    for name, spec, shape in (
        ("columns", PartitionSpec(None, "tensor"), (16, 8)),
        ("rows", PartitionSpec("fsdp"), (8, 3)),
        ("both", PartitionSpec("tensor", None, "fsdp"), (8, 16, 4)),
        ("one", PartitionSpec(("fsdp", "tensor")), (8,)),
        ("none", PartitionSpec(None), (5,)),
    ):
        arrays[name] = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        shardings[name] = NamedSharding(target, spec)
    held = {
        name: jax.device_put(
            array, meshes.sharding(training, ("embed", *[None] * 2)[: array.ndim], array.shape)
        )
        for name, array in arrays.items()
    }
    send = jax.jit(
        lambda tree: reorder.send(tree, shardings),
        out_shardings=reorder.parts_shardings(shardings),
    )
    parts = send(held)
    found = reorder.put_together(parts, shardings)
    shapes = reorder.put_together(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), parts),
        shardings,
    )
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].sharding == shapes[name].sharding == shardings[name]
        assert shapes[name].shape == array.shape


@pytest.mark.slow
def test_a_stacked_model_is_sent_layer_by_layer() -> None:
    training, target = meshes.make_mesh(1, 8, 1), shuffled((2, 2, 2))
    reorder, layout = Reorder(training, target), decoder.shardings(CONFIG, target)
    model = jax.jit(
        lambda: decoder.init(CONFIG, jax.random.key(0)),
        out_shardings=decoder.shardings(CONFIG, training),
    )()
    send = jax.jit(
        lambda model: reorder.send_model(decoder.cast(model, jnp.dtype(jnp.bfloat16)), layout),
        out_shardings=reorder.parts_shardings(layout),
    )
    found = reorder.put_together(send(model), layout)
    assert [x.sharding for x in jax.tree.leaves(found)] == jax.tree.leaves(layout)
    for sent, own in zip(jax.tree.leaves(found), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(sent, own.astype(jnp.bfloat16))
