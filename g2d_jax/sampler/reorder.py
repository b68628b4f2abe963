"""Arrays sent from one order of the devices to another.

The sampling mesh may have the devices in another order than training (mesh.sampling), and a program
has one order. So the program that makes the sampler's parameters writes them in training's order
and sends each device the part that the sampling mesh has there. What it returns is a list of parts,
one a device; outside of the program these are put together as an array of the sampling mesh, and
nothing is copied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from g2d_jax.models.decoder import Block, Decoder, parameter
from g2d_jax.models.table import block_params, outer_params
from g2d_jax.runtime.mesh import slices

Tree = TypeVar("Tree")

EVERY_DEVICE = "parts"
"""The axis of a mesh that has all devices in a line."""

SLICES = "slices"
"""The axis of a mesh along which slices of TPUs follow each other."""


@dataclass(frozen=True)
class Reorder:
    """The way from a program over the devices in `source`'s order to arrays of `target`.

    source, target: meshes of the same devices; of source the order alone matters.
    """

    source: Mesh
    target: Mesh

    @cached_property
    def _written(self) -> Mesh:
        """The target's mesh, with the devices in the source's order, slices an axis of their
        own."""
        data, *others = self.target.devices.shape
        count = slices([*self.source.devices.flat])
        devices = self.source.devices.reshape(count, data // count, *others)
        names = SLICES, *self.target.axis_names
        return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))

    @cached_property
    def _line(self) -> Mesh:
        """The devices in the source's order, in a line."""
        return Mesh(self.source.devices.reshape(-1), (EVERY_DEVICE,), axis_types=(AxisType.Auto,))

    @cached_property
    def _moves(self) -> list[tuple[int, int]]:
        """From where to where in the source's order the parts go."""
        # The part of a place in the target is computed at the same place in the source.
        places = {device: place for place, device in enumerate(self.target.devices.flat)}
        return [(places[device], at) for at, device in enumerate(self.source.devices.flat)]

    def parts_shardings(self, shardings: Tree) -> Tree:
        """Return the shardings of `send`'s results. shardings: a tree of the target's."""
        return jax.tree.map(self._parts_sharding, shardings)

    def send(self, tree: Tree, shardings: Tree) -> Tree:
        """Send every device the part that it has in the target's shardings. To be traced under
        jit.

        Of an array [M, N, ...] whose parts are [M, n, ...] it makes [M, devices * n, ...]; one that
        every device has whole stays as it is.
        """
        return jax.tree.map(self._send, tree, shardings)

    def send_model(self, model: Decoder, shardings: Decoder) -> Decoder:
        """Send the arrays of a model, those of stacked layers one layer after the other, so that
        beside the result no more than a layer lies on a device twice. To be traced under jit."""
        if not isinstance(model.blocks, Block):
            return self.send(model, shardings)
        blocks: dict[str, Any] = {}
        rows = block_params(model.config)
        for layers in dict.fromkeys(row.layers for row in rows.values()):
            names = [name for name, row in rows.items() if row.layers == layers]
            stacks = {name: parameter(model, name) for name in names}
            one = jax.tree.map(
                lambda where: NamedSharding(where.mesh, PartitionSpec(*where.spec[1:])),
                {name: parameter(shardings, name) for name in names},
            )
            blocks |= jax.lax.map(partial(self.send, shardings=one), stacks)
        outer = {}
        for name in outer_params(model.config):
            outer[name] = self.send(parameter(model, name), parameter(shardings, name))
        return Decoder(model.config, outer, Block(blocks))

    def put_together(self, parts: Tree, shardings: Tree) -> Tree:
        """Return the arrays of the target whose parts `send` gave, or the ShapeDtypeStructs of
        theirs."""
        return jax.tree.map(_put_together, parts, shardings)

    def _parts_sharding(self, sharding: NamedSharding) -> NamedSharding:
        return NamedSharding(self._line, _lined_up(sharding, EVERY_DEVICE))

    def _send(self, array: jax.Array, sharding: NamedSharding) -> jax.Array:
        if sharding.is_fully_replicated:
            return array
        # XLA goes from training's parts to these by way of the whole array. Not so in two steps:
        # first the parts are made as small as training's, then those of the copies are gathered.
        copies = self._written.shape["data"]
        for spec in (_finest(sharding, array.shape, copies), sharding.spec):
            array = jax.lax.with_sharding_constraint(array, NamedSharding(self._written, spec))
        names = self._written.axis_names
        run = jax.shard_map(
            lambda part: jax.lax.ppermute(part, names, self._moves),
            mesh=self._written,
            in_specs=sharding.spec,
            out_specs=_lined_up(sharding, names),
            check_vma=False,
        )
        return run(array)


def _lined_up(sharding: NamedSharding, names: str | tuple[str, ...]) -> PartitionSpec:
    """Return the spec of the parts of all devices along the first axis that is split."""
    if sharding.is_fully_replicated:
        return PartitionSpec()
    axis = next(axis for axis, part in enumerate(sharding.spec) if part)
    return PartitionSpec(*[None] * axis, names)


def _finest(sharding: NamedSharding, shape: tuple[int, ...], copies: int) -> PartitionSpec:
    """Split an array's largest axis that is whole over the copies of `data` too, if that divides
    it."""
    parts = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
    whole = [axis for axis, part in enumerate(parts) if not part and shape[axis] % copies == 0]
    if whole:
        parts[max(whole, key=shape.__getitem__)] = "data"
    return PartitionSpec(*parts)


def _put_together(parts: Any, sharding: NamedSharding) -> Any:
    """Return the array of a sharding whose parts lie on their devices, or its ShapeDtypeStruct."""
    shape = _whole(parts.sharding.shard_shape(parts.shape), sharding)
    if isinstance(parts, jax.ShapeDtypeStruct):
        return parts.update(shape=shape, sharding=sharding)
    here = [shard.data for shard in parts.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, sharding, here)


def _whole(part: tuple[int, ...], sharding: NamedSharding) -> tuple[int, ...]:
    """Return the shape of an array that is split into parts of this shape."""
    sizes = []
    for size, names in zip(part, (*sharding.spec, *[None] * len(part)), strict=False):
        axes = (names,) if isinstance(names, str) else names or ()
        sizes.append(size * math.prod(sharding.mesh.shape[axis] for axis in axes))
    return tuple(sizes)
