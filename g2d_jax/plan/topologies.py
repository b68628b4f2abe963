"""The machines that a plan can be made for: their names, the compiler's names for them, and their chips' rates.

Names count as Google's do. v5e-16 and v6e-16 are 16 chips; v5p is named by TensorCores, two to a chip, so that v5p-16
is 8 chips; tpu7x-8 is 8 chips, each of them two devices to JAX. h100x8 and h200x1 are GPUs of one host. v4 is left out:
ahead of time its compiler makes two devices of a chip, where a run has one.

Sources: TPUs: docs.cloud.google.com/tpu/docs/v5e, v5p, v6e and tpu7x, "Key specifications". A chip's inter-chip
bandwidth is stated there for both directions together; half of it is one direction. What of the memory a program may
use is what the compiler of libtpu 0.0.42 states when it refuses one (November 2026). GPUs: NVIDIA's data sheets of the
H100 SXM and the H200 SXM, dense bfloat16, NVLink 900 GB/s both directions; memory as in XLA's target_config/specs.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from g2d_jax.mesh import USABLE

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """One device as JAX counts them.

    hbm: bytes that programs may use. flops: dense bfloat16 operations/s. bandwidth: of its memory, bytes/s. link:
    bytes/s to other devices in one direction, over all links. per_chip: how many of them a chip is. name_counts: what a
    chip adds to the number in a name. host: the chips of one host.
    """

    platform: str
    hbm: int
    flops: float
    bandwidth: float
    link: float
    per_chip: int = 1
    name_counts: int = 1
    host: int = 4

    @property
    def usable(self) -> int:
        """The bytes that a plan may use: the same that runs use."""
        return int(USABLE * self.hbm) if self.platform == "tpu" else self.hbm


def _tpu(hbm_gib: float, tflops: float, gbps: float, link_gbps: float, **changes: int) -> Device:
    return Device("tpu", int(hbm_gib * GIB), tflops * 1e12, gbps * 1e9, link_gbps * 1e9, **changes)


def _gpu(memory: int, gbps: float) -> Device:
    # The allocator leaves a tenth to the driver and to libraries, see flags.take_memory.
    return Device("cuda", int(0.9 * memory), 989e12, gbps * 1e9, 450e9, host=8)


DEVICES: dict[str, Device] = {
    "v5e": _tpu(15.75, 197, 819, 200),
    "v5p": _tpu(95.74, 459, 2765, 600, name_counts=2),
    "v6e": _tpu(31.25, 918, 1638, 400),
    "tpu7x": _tpu(94.75, 1153.5, 3690, 300, per_chip=2),
    "h100": _gpu(84_942_979_072, 3352),
    "h200": _gpu(151_397_597_184, 4800),
}

# Chips -> the compiler's grid.
_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBES = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8"}
_ONE_HOST = {chips: f"1x1x{chips}" for chips in (1, 2, 4, 8)}
GRIDS: dict[str, dict[int, str]] = {
    "v5e": _FLAT,
    "v5p": _CUBES,
    "v6e": _FLAT,
    "tpu7x": _CUBES,
    "h100": _ONE_HOST,
    "h200": _ONE_HOST,
}


@dataclass(frozen=True)
class Topology:
    """A named machine. kind: key of DEVICES. grid: its chips as the compiler has them. hosts: processes of a run."""

    name: str
    kind: str
    chips: int
    grid: str
    hosts: int

    @property
    def device(self) -> Device:
        """The properties of each of its devices."""
        return DEVICES[self.kind]

    @property
    def devices(self) -> int:
        """The number of devices that JAX sees."""
        return self.chips * self.device.per_chip

    @property
    def compiler_name(self) -> str:
        """The name in libtpu, "v5e:4x4"; for GPUs XLA's "partitions x hosts x devices", "1x1x8"."""
        return self.grid if self.device.platform == "cuda" else f"{self.kind}:{self.grid}"

    def describe(self) -> str:
        """Spell the name's meaning out in words."""
        device = self.device
        several = f" ({self.devices} devices)" if device.per_chip > 1 else ""
        return (
            f"{self.name}: {self.chips} chip{'s' * (self.chips > 1)}{several} on {self.hosts} "
            f"host{'s' * (self.hosts > 1)}; each device {device.hbm / GIB:.2f} GiB, "
            f"{device.flops / 1e12:,.0f} TFLOP/s bf16, {device.bandwidth / 1e9:,.0f} GB/s memory, "
            f"{device.link / 1e9:,.0f} GB/s to others"
        )


def _topologies() -> Iterator[Topology]:
    """Yield all machines, by kind and size."""
    for kind, grids in GRIDS.items():
        device = DEVICES[kind]
        for chips, grid in grids.items():
            name = f"{kind}x{chips}" if device.platform == "cuda" else f"{kind}-{chips * device.name_counts}"
            # A v5e-8 or v6e-8 is one host of eight; larger slices are made of hosts of four.
            host = 8 if kind in ("v5e", "v6e") and chips == 8 else device.host
            yield Topology(name, kind, chips, grid, hosts=-(-chips // host))


TOPOLOGIES = {machine.name: machine for machine in _topologies()}


def topology(name: str) -> Topology:
    """Return the machine of a name such as v5e-16, v5p-16 or h100x8. Raises ValueError with the valid names."""
    if name in TOPOLOGIES:
        return TOPOLOGIES[name]
    near = difflib.get_close_matches(name, TOPOLOGIES, n=4, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}? " if near else ""
    raise ValueError(f"unknown topology {name!r}: {hint}there are {', '.join(TOPOLOGIES)}")
