"""Machines that can be planned for: their names, the compiler's names for them, and their chips'
rates.

Names follow Google's. v5e-16 and v6e-16 have 16 chips. v5p counts TensorCores, two per chip: v5p-16
has 8 chips. tpu7x-8 has 8 chips, each of them two devices in JAX. 2xv5e-16 is two slices of v5e-16,
joined by the data centre's network. h100x8 and h200x1 are one GPU host, h100x64 eight hosts. v4 is
missing: its ahead-of-time compiler has two devices per chip, but a run has one.

Rates are from rates.py. Sources of usable memory: for TPUs, out-of-memory errors of libtpu 0.0.42
(November 2026); for GPUs, XLA's target_config/specs; for the L40S, CUDA's report (44.39 GiB).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from g2d_jax.runtime.mesh import usable
from g2d_jax.runtime.rates import RATES, Rates
from g2d_jax.runtime.terminal import counted

GIB = 2**30


@dataclass(frozen=True)
class Device(Rates):
    """One device as JAX counts them, with its rates.

    platform: JAX's name. hbm: bytes that programs may use. per_chip: devices of a chip.
    name_counts: a chip's contribution to the number in a name. host: chips of a host.
    """

    platform: str
    hbm: int
    per_chip: int = 1
    name_counts: int = 1
    host: int = 4

    @property
    def usable(self) -> int:
        """The bytes that a plan may use, the same as in runs."""
        return usable(self.platform, self.hbm)


def _tpu(kind: str, hbm_gib: float, **changes: int) -> Device:
    return Device(**asdict(RATES[kind]), platform="tpu", hbm=int(hbm_gib * GIB), **changes)


def _gpu(kind: str, memory: float) -> Device:
    # The allocator leaves a tenth for the driver and libraries, see flags.take_memory.
    return Device(**asdict(RATES[kind]), platform="gpu", hbm=int(0.9 * memory), host=8)


DEVICES: dict[str, Device] = {
    "v5e": _tpu("v5e", 15.75),
    "v5p": _tpu("v5p", 95.74, name_counts=2),
    "v6e": _tpu("v6e", 31.25),
    "tpu7x": _tpu("tpu7x", 94.75, per_chip=2),
    "a100-80": _gpu("a100-80", 85_100_068_864),
    "h100": _gpu("h100", 84_942_979_072),
    "h200": _gpu("h200", 151_397_597_184),
    "l40s": _gpu("l40s", 44.39 * GIB),
}

# Chips -> the compiler's grid.
_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBES = {
    4: "2x2x1",
    8: "2x2x2",
    16: "2x2x4",
    32: "2x4x4",
    64: "4x4x4",
    128: "4x4x8",
    256: "4x8x8",
    512: "8x8x8",
}
# Partitions, hosts, of a host.
_GPUS = {gpus: f"1x{-(-gpus // 8)}x{min(gpus, 8)}" for gpus in (1, 2, 4, 8, 16, 32, 64)}
GRIDS = {"v5e": _FLAT, "v5p": _CUBES, "v6e": _FLAT, "tpu7x": _CUBES}
GRIDS |= dict.fromkeys(("a100-80", "h100", "h200", "l40s"), _GPUS)
MOST_SLICES = 64


@dataclass(frozen=True)
class Topology:
    """A named machine. kind: key of DEVICES. chips: of all slices. grid: a slice's chips in the
    compiler's form. hosts: of all slices, each with one process of a run."""

    name: str
    kind: str
    chips: int
    grid: str
    hosts: int
    slices: int = 1

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
        """The name of a slice in libtpu, "v5e:4x4"; for GPUs XLA's "partitions x hosts x devices",
        "1x1x8"."""
        if self.device.platform == "gpu":
            return self.grid
        return f"{self.kind}:{self.grid}"

    @property
    def near(self) -> int:
        """The number of devices that fast links join: those of a slice, or of a host of GPUs."""
        if self.device.platform == "gpu":
            return self.devices // self.hosts
        return self.devices // self.slices

    @property
    def between(self) -> str:
        """The units that the network joins, "hosts" or "slices"; "" if fast links join all
        devices."""
        if self.near == self.devices:
            return ""
        return "hosts" if self.device.platform == "gpu" else "slices"

    def describe(self) -> str:
        """Describe the machine in words."""
        device = self.device
        several = f" ({self.devices} devices)" if device.per_chip > 1 else ""
        slices = f" in {self.slices} slices" if self.slices > 1 else ""
        network = (
            f", {device.network / 1e9:,.3g} GB/s to other {self.between}" if self.between else ""
        )
        return (
            f"{self.name}: {counted(self.chips, 'chip')}{several} on "
            f"{counted(self.hosts, 'host')}{slices}; each device {device.hbm / GIB:.2f} GiB, "
            f"{device.flops / 1e12:,.0f} TFLOP/s bf16, {device.bandwidth / 1e9:,.0f} GB/s memory, "
            f"{device.link / 1e9:,.0f} GB/s to others{network}"
        )


def _topologies() -> Iterator[Topology]:
    """Yield all machines of one slice, by kind and size."""
    for kind, grids in GRIDS.items():
        device = DEVICES[kind]
        for chips, grid in grids.items():
            name = f"{kind}-{chips * device.name_counts}"
            if device.platform == "gpu":
                name = f"{kind}x{chips}"
            # A v5e-8 or v6e-8 is one host of eight; larger slices have hosts of four.
            host = 8 if kind in ("v5e", "v6e") and chips == 8 else device.host
            yield Topology(name, kind, chips, grid, hosts=-(-chips // host))


TOPOLOGIES = {machine.name: machine for machine in _topologies()}
"""The machines of one slice by name."""


def topology(name: str) -> Topology:
    """Return the machine with a name such as v5e-16, 2xv5e-16 or h100x8. Raises ValueError with the
    valid names."""
    if name in TOPOLOGIES:
        return TOPOLOGIES[name]
    several = re.fullmatch(r"([1-9]\d?)x(.+)", name, re.ASCII)
    if several and several[2] in TOPOLOGIES:
        count = int(several[1])
        one = TOPOLOGIES[several[2]]
        if one.device.platform == "tpu" and 2 <= count <= MOST_SLICES:
            chips = count * one.chips
            return replace(one, name=name, chips=chips, hosts=count * one.hosts, slices=count)
    near = difflib.get_close_matches(name, TOPOLOGIES, n=4, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}? " if near else ""
    raise ValueError(
        f"unknown topology {name!r}: {hint}valid names are {', '.join(TOPOLOGIES)}. For 2 to "
        f"{MOST_SLICES} slices, put their number in front of a TPU's name, such as 2xv5e-16"
    )
