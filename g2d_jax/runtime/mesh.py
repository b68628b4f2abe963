"""The device mesh and the one table that says which logical axis lies on which mesh axis."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from g2d_jax.runtime import flags

AXES = ("data", "fsdp", "tensor")

Tree = TypeVar("Tree")

Rules = Mapping[str, str | tuple[str, ...] | None]

# Logical axis -> mesh axes. Parameters: one dimension over fsdp, one over tensor. Activations: rows
# over data and fsdp.
RULES: Rules = MappingProxyType(
    {
        "layers": None,
        "vocab": "tensor",
        "embed": "fsdp",
        "heads": "tensor",
        "kv_heads": "tensor",
        "head_dim": None,
        "mlp": "tensor",
        "experts": "tensor",  # whole ones: a device computes those that it has, for all of its rows
        "expert_mlp": None,
        "routes": None,
        "norm": None,
        "rank": None,
        "taps": None,
        "rows": ("data", "fsdp"),
        "columns": "tensor",  # of rows, between the layers
        "replica_rows": "data",  # rows of which fsdp splits the width instead
        "all_rows": ("data", "fsdp", "tensor"),  # rows whose width no device has a part of
        "devices": ("data", "fsdp", "tensor"),
    }
)

HOST = "pinned_host"
"""The kind of memory that arrays are offloaded to."""


def make_mesh(
    data: int = 1, fsdp: int = -1, tensor: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Arrange the devices as (data, fsdp, tensor); one size may be -1 and takes what is left.

    Over several slices of TPUs goes `data` alone, the other axes lie within each. Raises ValueError
    when the sizes do not multiply to the number of devices, when `data` is no multiple of the
    slices, and for CPU devices that may hang.
    """
    devices = list(jax.devices() if devices is None else devices)
    if len(devices) > 1 and devices[0].platform == "cpu" and not flags.has(flags.ORDER):
        raise ValueError(
            f"collectives of {len(devices)} CPU devices may hang: call "
            "g2d_jax.runtime.processes.initialise() before JAX is used, with JAX_PLATFORMS=cpu "
            f"where JAX passes over an accelerator, or add {flags.ORDER}=false to XLA_FLAGS"
        )
    sizes = [data, fsdp, tensor]
    if any(size != -1 and size < 1 for size in sizes) or sizes.count(-1) > 1:
        raise ValueError(f"mesh sizes must be positive, one of them may be -1; got {_named(sizes)}")
    fixed = math.prod(size for size in sizes if size != -1)
    if len(devices) % fixed if -1 in sizes else len(devices) != fixed:
        raise ValueError(
            f"mesh {_named(sizes)} needs {'a multiple of ' if -1 in sizes else ''}{fixed} "
            f"devices but {len(devices)} "
            "are present; set mesh.data=1, mesh.fsdp=-1 and mesh.tensor=1 to use them all"
        )
    sizes = [len(devices) // fixed if size == -1 else size for size in sizes]
    return Mesh(arranged(devices, sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def arranged(devices: Sequence[jax.Device], sizes: Sequence[int]) -> np.ndarray:
    """Arrange devices of any platform as an array (data, fsdp, tensor) of these sizes, near ones
    along fsdp and tensor.

    Raises ValueError for several slices of TPUs that `data` is no multiple of, or that are not
    equally large.
    """
    # By hand: jax.make_mesh refuses devices of several slices, and to JAX a host of GPUs is a slice
    # of its own.
    devices_of = _devices_of_slices(devices)
    count = len(devices_of)
    if count == 1:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    if len(set(devices_of.values())) > 1:
        raise ValueError(
            f"the {count} slices have {sorted(devices_of.values())} devices: they must have "
            "equally many"
        )
    data, *inner = sizes
    if data % count:
        raise ValueError(
            f"the {len(devices)} devices are {count} slices, and mesh.data alone goes over slices: "
            f"with {_named(sizes)} weights would be gathered over the network between them; set "
            f"mesh.data={count} or a multiple of it, and mesh.fsdp=-1"
        )
    return mesh_utils.create_hybrid_device_mesh(
        (data // count, *inner), (count, 1, 1), devices, allow_split_physical_axes=True
    )


def _devices_of_slices(devices: Sequence[jax.Device]) -> Counter[int]:
    """Count the devices of every slice of TPUs; those of other platforms are one."""
    if devices[0].platform != "tpu":
        return Counter({0: len(devices)})
    return Counter(getattr(device, "slice_index", 0) for device in devices)


def slices(devices: Sequence[jax.Device]) -> int:
    """Count the slices of TPUs that the devices belong to; 1 on other platforms."""
    return len(_devices_of_slices(devices))


def near(mesh: Mesh) -> int:
    """Count the devices that fast links join: of a slice of TPUs, of a host of GPUs (of the
    smallest)."""
    # JAX numbers what NVLink joins as slices: hosts, or racks where it goes beyond them.
    return min(Counter(getattr(device, "slice_index", 0) for device in mesh.devices.flat).values())


def _named(sizes: Sequence[int]) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in zip(AXES, sizes, strict=True))


def describe(mesh: Mesh) -> str:
    """Say what the mesh is of, such as "8 devices (NVIDIA H100 80GB HBM3) of 2 processes"."""
    device = mesh.devices.flat[0]
    kind = "CPU" if device.platform == "cpu" else device.device_kind
    devices = "one device" if mesh.size == 1 else f"{mesh.size:,} devices"
    joined = processes(mesh)
    return f"{devices} ({kind})" + (f" of {joined} processes" if joined > 1 else "")


def spec(
    mesh: Mesh, axes: Sequence[str | None], shape: Sequence[int], rules: Rules = RULES
) -> PartitionSpec:
    """Partition an array by its logical axes. A mesh axis that does not divide the dimension is not
    used for it (two KV heads on four tensor devices are replicated, as every tensor-parallel
    decoder does)."""
    parts: list[str | tuple[str, ...] | None] = []
    for axis, size in zip(axes, shape, strict=True):
        target = () if axis is None else rules[axis] or ()
        if isinstance(target, str):
            target = (target,)
        names = tuple(name for name in target if mesh.shape[name] > 1)
        if not names or size % math.prod(mesh.shape[name] for name in names):
            parts.append(None)
        else:
            parts.append(names[0] if len(names) == 1 else names)
    return PartitionSpec(*parts)


def sharding(mesh: Mesh, axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
    """Return the NamedSharding of `spec`."""
    return NamedSharding(mesh, spec(mesh, axes, shape))


def require_host_memory(mesh: Mesh) -> None:
    """Raise ValueError where arrays cannot be offloaded to the host."""
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST not in kinds:
        raise ValueError(
            f"compute.offload_optimizer is set, but devices of kind {device.device_kind!r} tell of "
            f"no {HOST} memory (there is: {', '.join(kinds) or 'none'}): leave it off"
        )


def fetched(array: jax.Array) -> jax.Array:
    """Return the array on its devices: a copy of one that is offloaded, else itself."""
    if array.sharding.memory_kind != HOST:
        return array
    return jax.device_put(array, array.sharding.with_memory_kind("device"))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding under which every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def row_ways(mesh: Mesh) -> int:
    """Count the parts into which batch rows are split."""
    return int(mesh.shape["data"] * mesh.shape["fsdp"])


def abstract_rows(
    mesh: Mesh, shape: tuple[int, ...], dtype: jax.typing.DTypeLike = np.int32, axis: int = 0
) -> jax.ShapeDtypeStruct:
    """Return a ShapeDtypeStruct, with its sharding, of an array whose rows are split."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=rows_sharding(mesh, shape, axis))


def abstract_number(mesh: Mesh, dtype: jax.typing.DTypeLike) -> jax.ShapeDtypeStruct:
    """Return a ShapeDtypeStruct, with its sharding, of a number that every device has."""
    return jax.ShapeDtypeStruct((), dtype, sharding=replicated(mesh))


def rows_sharding(mesh: Mesh, shape: Sequence[int], axis: int = 0) -> NamedSharding:
    """Return the sharding of an array whose `axis` is split over the row axes."""
    axes: list[str | None] = [None] * len(shape)
    axes[axis] = "rows"
    return sharding(mesh, axes, shape)


def placed(shapes: Tree, shardings: Any) -> Tree:
    """Put shardings into a tree of shapes, for which programs are compiled and as which checkpoints
    are restored."""
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes, shardings
    )


def sampling(mesh: Mesh, tensor: int, kv_heads: int) -> Mesh:
    """Arrange all devices of a mesh for sampling: weights are split over `tensor` of them, and
    copied to the rest.

    Split like the optimiser's, over all of fsdp, they would be gathered anew for every token. Of
    these the tensor axis has as many as divide the key heads, so that a cache is split by heads,
    and fsdp the others: see decode.decode. The devices keep the order of `mesh`. Raises ValueError
    if tensor does not divide the number of devices, or of those of a slice of TPUs.
    """
    if mesh.size % tensor:
        raise ValueError(
            f"compute.sampling_tensor={tensor} does not divide the {mesh.size} devices"
        )
    inside = mesh.size // slices([*mesh.devices.flat])
    if inside % tensor:
        raise ValueError(
            f"sampling over {tensor} devices for a copy of the weights goes beyond the {inside} of "
            f"a slice: set compute.sampling_tensor to a divisor of {inside}, or take larger slices "
            "where none leaves room for rows"
        )
    heads = math.gcd(tensor, kv_heads)
    sizes = mesh.size // tensor, tensor // heads, heads
    return Mesh(mesh.devices.reshape(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def torus_axes(mesh: Mesh) -> tuple[int, int]:
    """Count the axes of a slice's torus on which a group of devices along fsdp lies, and one along
    tensor; 1 at least, and where devices have no places."""
    counts = []
    for group in (mesh.devices[0, :, 0], mesh.devices[0, 0]):
        places = {tuple(getattr(device, "coords", ())) for device in group}
        counts.append(sum(len(set(along)) > 1 for along in zip(*places, strict=True)))
    fsdp, tensor = counts
    return max(fsdp, 1), max(tensor, 1)


def device_bytes(tree: Any) -> int:
    """Count the bytes that a tree of ShapeDtypeStructs with shardings takes on a device, without
    what is offloaded."""
    return sum(
        -(-math.prod(x.sharding.shard_shape(x.shape)) * jax.dtypes.itemsize_bits(x.dtype) // 8)
        for x in jax.tree.leaves(tree)
        if x.sharding and x.sharding.memory_kind != HOST
    )


# On TPUs code, fragments and the runtime take the rest. On GPUs the limit is of JAX's pool, a tenth
# of the memory being left out of it already (flags.take_memory): views, prefill, decode and train
# steps take turns in one allocator, whose free memory is in pieces then, and a program's
# temporaries want one.
USABLE = {"tpu": 0.92, "gpu": 0.93, "cuda": 0.93}
"""Share of the limit that JAX tells of, by platform (GPUs have two names), that programs are to
use."""


def usable(platform: str, limit: int) -> int:
    """Count the bytes that programs may use of a device's limit, for runs and plans alike; all on
    other platforms."""
    return int(USABLE.get(platform, 1.0) * limit)


def memory(mesh: Mesh) -> int | None:
    """Return the bytes that programs may use of each local device, None where the platform does not
    say."""
    stats = [device.memory_stats() for device in mesh.local_devices]
    limit = min(
        (info["bytes_limit"] for info in stats if info and "bytes_limit" in info), default=None
    )
    return usable(mesh.devices.flat[0].platform, limit) if limit else limit


def processes(mesh: Mesh) -> int:
    """Count the processes that the devices of a mesh belong to."""
    return len({device.process_index for device in mesh.devices.flat})
