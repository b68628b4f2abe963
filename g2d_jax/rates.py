"""Rates of devices by their kind: for plans, and for what a run chooses by formula.

Sources: TPUs: docs.cloud.google.com/tpu/docs/v5e, v5p, v6e and tpu7x, "Key specifications". A
chip's inter-chip bandwidth is stated there for both directions together; half of it is one
direction. The data centre's network is stated for a chip, for v5e for a pod of 256 (6.4 Tbit/s).
GPUs: NVIDIA's data sheets of the A100 80GB SXM, the H100 SXM, the H200 SXM and the L40S, dense
bfloat16, NVLink 600 and 900 GB/s both directions, PCIe 4.0 x16 for the L40S. Between hosts of eight
GPUs, assumed: a network adapter for each GPU as in NVIDIA's DGX, 200 Gbit/s beside an A100 and 400
beside an H100 or H200; 400 Gbit/s for all eight L40S, as in AWS's g6e.48xlarge.

What a collective waits, and what a kernel takes to be launched, is estimated: no source states it,
and nothing here has been timed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rates:
    """The rates of one device as JAX counts them.

    flops: dense bfloat16 operations/s. bandwidth: of its memory, bytes/s. link: bytes/s to other
    devices in one direction, over all links. network: its share of what leaves its slice, or its
    host of GPUs, bytes/s in one direction. axes: of the torus, on each of which a chip has two
    links; 0: its links go to a switch, and all of them to any device. latency: seconds that a
    collective takes of however few bytes. launches: seconds in which the kernels of one layer of a
    decode step are launched, where the host does it one by one.
    """

    flops: float
    bandwidth: float
    link: float
    network: float
    axes: int
    latency: float
    launches: float

    def group_link(self, axes: int) -> float:
        """Return the bytes/s in one direction that a device has to others of a group, which extends
        along so many axes of the torus, and goes round on none."""
        if not self.axes:
            return self.link
        return self.link * min(max(axes, 1), self.axes) / (2 * self.axes)


def _tpu(tflops: float, gbps: float, link: float, network: float, axes: int) -> Rates:
    return Rates(tflops * 1e12, gbps * 1e9, link * 1e9, network * 1e9, axes, 7e-6, 0.0)


def _gpu(tflops: float, gbps: float, link: float, network: float) -> Rates:
    return Rates(tflops * 1e12, gbps * 1e9, link * 1e9, network * 1e9, 0, 14e-6, 60e-6)


RATES = {
    "v5e": _tpu(197, 819, 200, 3.125, axes=2),
    "v5p": _tpu(459, 2765, 600, 6.25, axes=3),
    "v6e": _tpu(918, 1638, 400, 12.5, axes=2),
    "tpu7x": _tpu(1153.5, 3690, 300, 6.25, axes=3),
    "a100-80": _gpu(312, 2039, 300, 25),
    "h100": _gpu(989, 3352, 450, 50),
    "h200": _gpu(989, 4800, 450, 50),
    "l40s": _gpu(362, 864, 32, 6.25),
}

# A part of what JAX calls the devices; of two that fit the first one counts.
_KINDS = {
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU v5": "v5p",
    "TPU7x": "tpu7x",
    "A100": "a100-80",
    "H100": "h100",
    "H200": "h200",
    "L40S": "l40s",
}
_MIDDLING = {"tpu": "v6e", "gpu": "a100-80"}


def kind_of(device: Any) -> str:
    """Return the name of a JAX device's kind in RATES; "" for a kind that is not there."""
    return next((kind for part, kind in _KINDS.items() if part in device.device_kind), "")


def rates_of(device: Any) -> Rates:
    """Return the rates of a JAX device, of a kind that is not known those of a middling one of its
    platform."""
    return RATES[kind_of(device) or _MIDDLING.get(device.platform, "v6e")]
