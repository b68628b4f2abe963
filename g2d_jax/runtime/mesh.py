"""The device mesh, and the table that maps logical axes to mesh axes."""

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
        "experts": "tensor",  # whole experts: a device computes its own, for all of its rows
        "expert_mlp": None,
        "routes": None,
        "norm": None,
        "rank": None,
        "taps": None,
        "rows": ("data", "fsdp"),
        "columns": "tensor",  # a row's columns, between layers
        "replica_rows": "data",  # rows whose width is split over fsdp
        "all_rows": ("data", "fsdp", "tensor"),  # rows whose width is not split
        "devices": ("data", "fsdp", "tensor"),
    }
)

HOST = "pinned_host"
"""The kind of memory that arrays are offloaded to."""


def make_mesh(
    data: int = 1, fsdp: int = -1, tensor: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Arrange the devices as (data, fsdp, tensor); one size may be -1, for all remaining devices.

    Only `data` spans several TPU slices; the other axes stay within each. Raises ValueError if the
    sizes do not multiply to the number of devices, if `data` is not a multiple of the slices, and
    for CPU devices that may hang.
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
        raise ValueError(f"mesh sizes must be positive, but one may be -1; got {_named(sizes)}")
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
    """Arrange devices of any platform as an array (data, fsdp, tensor), near ones along fsdp and
    tensor.

    Raises ValueError for TPU slices of different sizes, and if `data` is not a multiple of their
    number.
    """
    # Not jax.make_mesh: it rejects several slices, and JAX treats each GPU host as a slice.
    devices_of = _devices_of_slices(devices)
    count = len(devices_of)
    if count == 1:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    if len(set(devices_of.values())) > 1:
        raise ValueError(
            f"the {count} slices have {sorted(devices_of.values())} devices: use slices of equal size"
        )
    data, *inner = sizes
    if data % count:
        raise ValueError(
            f"the {len(devices)} devices are {count} slices, and {_named(sizes)} would gather weights "
            f"over the network between them: set mesh.data={count} or a multiple of it, and "
            "mesh.fsdp=-1"
        )
    return mesh_utils.create_hybrid_device_mesh(
        (data // count, *inner), (count, 1, 1), devices, allow_split_physical_axes=True
    )


def _devices_of_slices(devices: Sequence[jax.Device]) -> Counter[int]:
    """Count the devices of every TPU slice; devices of other platforms count as one slice."""
    if devices[0].platform != "tpu":
        return Counter({0: len(devices)})
    return Counter(getattr(device, "slice_index", 0) for device in devices)


def slices(devices: Sequence[jax.Device]) -> int:
    """Count the TPU slices of the devices; 1 on other platforms."""
    return len(_devices_of_slices(devices))


def near(mesh: Mesh) -> int:
    """Count the devices that fast links join: of the smallest TPU slice or GPU host."""
    # JAX numbers GPUs joined by NVLink as a slice: a host, or a rack if NVLink joins its hosts.
    return min(Counter(getattr(device, "slice_index", 0) for device in mesh.devices.flat).values())


def _named(sizes: Sequence[int]) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in zip(AXES, sizes, strict=True))


def describe(mesh: Mesh) -> str:
    """Describe the mesh, for example "8 devices (NVIDIA H100 80GB HBM3) of 2 processes"."""
    device = mesh.devices.flat[0]
    kind = "CPU" if device.platform == "cpu" else device.device_kind
    devices = "one device" if mesh.size == 1 else f"{mesh.size:,} devices"
    joined = processes(mesh)
    return f"{devices} ({kind})" + (f" of {joined} processes" if joined > 1 else "")


def spec(
    mesh: Mesh, axes: Sequence[str | None], shape: Sequence[int], rules: Rules = RULES
) -> PartitionSpec:
    """Partition an array by its logical axes. A mesh axis that does not divide a dimension is not
    used for it: two KV heads on four tensor devices are replicated, as usual in tensor
    parallelism."""
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
    """Raise ValueError if arrays cannot be offloaded to the host."""
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST not in kinds:
        raise ValueError(
            f"devices of kind {device.device_kind!r} have no {HOST} memory (only "
            f"{', '.join(kinds) or 'none'}): set compute.offload_optimizer=False"
        )


def fetched(array: jax.Array) -> jax.Array:
    """Return the array in device memory: a copy if it is offloaded, else itself."""
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
    """Return a ShapeDtypeStruct, with its sharding, of an array with split rows."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=rows_sharding(mesh, shape, axis))


def abstract_number(mesh: Mesh, dtype: jax.typing.DTypeLike) -> jax.ShapeDtypeStruct:
    """Return a ShapeDtypeStruct, with its sharding, of a replicated number."""
    return jax.ShapeDtypeStruct((), dtype, sharding=replicated(mesh))


def rows_sharding(mesh: Mesh, shape: Sequence[int], axis: int = 0) -> NamedSharding:
    """Return the sharding of an array whose `axis` is split over the row axes."""
    axes: list[str | None] = [None] * len(shape)
    axes[axis] = "rows"
    return sharding(mesh, axes, shape)


def placed(shapes: Tree, shardings: Any) -> Tree:
    """Add shardings to a tree of shapes, for compiling programs and restoring checkpoints."""
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes, shardings
    )


def sampling(mesh: Mesh, tensor: int, kv_heads: int) -> Mesh:
    """Arrange all devices of a mesh for sampling: weights are split over `tensor` devices, and
    copied to the rest.

    Split over all of fsdp, as in training, they would be gathered for every token. The tensor axis
    gets as many of these devices as divide the key heads, to split the cache by heads; fsdp gets
    the others (see decode.decode). The order of devices stays. Raises ValueError if tensor does not
    divide the number of devices, or those of a TPU slice.
    """
    if mesh.size % tensor:
        raise ValueError(
            f"compute.sampling_tensor={tensor} does not divide the {mesh.size} devices"
        )
    inside = mesh.size // slices([*mesh.devices.flat])
    if inside % tensor:
        raise ValueError(
            f"a copy of the weights over {tensor} devices does not fit into a slice of {inside}: set "
            f"compute.sampling_tensor to a divisor of {inside}, or use larger slices if memory is "
            "short"
        )
    heads = math.gcd(tensor, kv_heads)
    sizes = mesh.size // tensor, tensor // heads, heads
    return Mesh(mesh.devices.reshape(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def torus_axes(mesh: Mesh) -> tuple[int, int]:
    """Count the torus axes that a group of devices along fsdp spans, and one along tensor; at least
    1, and 1 for devices without coordinates."""
    counts = []
    for group in (mesh.devices[0, :, 0], mesh.devices[0, 0]):
        places = {tuple(getattr(device, "coords", ())) for device in group}
        counts.append(sum(len(set(along)) > 1 for along in zip(*places, strict=True)))
    fsdp, tensor = counts
    return max(fsdp, 1), max(tensor, 1)


def device_bytes(tree: Any) -> int:
    """Count a device's bytes for a tree of ShapeDtypeStructs with shardings, without offloaded
    arrays."""
    return sum(
        -(-math.prod(x.sharding.shard_shape(x.shape)) * jax.dtypes.itemsize_bits(x.dtype) // 8)
        for x in jax.tree.leaves(tree)
        if x.sharding and x.sharding.memory_kind != HOST
    )


# On TPUs code, fragmentation and the runtime need the rest. On GPUs the limit is JAX's pool,
# already without a tenth of the memory (flags.take_memory). All programs share its allocator, which
# fragments free memory, but a program's temporaries need one piece.
USABLE = {"tpu": 0.92, "gpu": 0.93, "cuda": 0.93}
"""Share of JAX's memory limit that programs may use, by platform (GPUs have two names)."""


def usable(platform: str, limit: int) -> int:
    """Count the bytes of a device's limit that programs may use, in runs and plans; all on other
    platforms."""
    return int(USABLE.get(platform, 1.0) * limit)


def memory(mesh: Mesh) -> int | None:
    """Return the bytes that programs may use of each local device, None if the platform does not
    report them."""
    stats = [device.memory_stats() for device in mesh.local_devices]
    limit = min(
        (info["bytes_limit"] for info in stats if info and "bytes_limit" in info), default=None
    )
    return usable(mesh.devices.flat[0].platform, limit) if limit else limit


def processes(mesh: Mesh) -> int:
    """Count the processes of a mesh's devices."""
    return len({device.process_index for device in mesh.devices.flat})
