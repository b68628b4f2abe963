"""Rates of devices by their kind: for plans, and for a run's choices by formula.

Sources: TPUs: docs.cloud.google.com/tpu/docs/v5e, v5p, v6e and tpu7x, "Key specifications". They
state a chip's inter-chip bandwidth for both directions; half of it is one direction. The data
centre's network is stated for a chip, for v5e for a pod of 256 (6.4 Tbit/s). GPUs: NVIDIA's data
sheets of the A100 80GB SXM, the H100 SXM, the H200 SXM and the L40S, dense bfloat16, NVLink 600 and
900 GB/s both directions, PCIe 4.0 x16 for the L40S. Assumed between hosts of eight GPUs: a network
adapter for each GPU as in NVIDIA's DGX, 200 Gbit/s for an A100 and 400 for an H100 or H200; 400
Gbit/s for all eight L40S, as in AWS's g6e.48xlarge.

The share of these rates that programs reach is fitted to three published results, one a kind of
chip, and tested on others (benchmarks/published.py): Llama-3.1-8B trained on v6e and Llama-2-70B on
v5p by MaxText, a GRPO step of Llama-3.1-8B on H100 by NeMo-RL. A v5e is assumed to reach the share
of a v5p, which agrees with MaxText's results for it; the other GPUs that of an H100. For tpu7x no
result was found: it is assumed to reach that of a v6e, the lower of the two. The share of this
library's decode steps on GPUs is fitted to Qwen2.5-1.5B on an H200 (docs/benchmarks.md, "One
H200").

The latency of a collective and of launching kernels is estimated: no source states it, and it has
not been measured. A decode step that is compiled for an H200 has 14 kernels a layer, and XLA
launches them as one graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Seconds(NamedTuple):
    """The parts of a program's time in seconds, each at a device's stated rates.

    products: floating-point operations. memory: bytes read and written. cache: other keys and
    values that a decode step reads. links: bytes sent. network: those that leave a slice, or a host
    of GPUs. waits: latency of collectives and kernel launches, which no rate covers.
    """

    products: float = 0.0
    memory: float = 0.0
    cache: float = 0.0
    links: float = 0.0
    network: float = 0.0
    waits: float = 0.0

    def one_by_one(self) -> float:
        """Return the sum of the parts of a decode step without its waits: each product waits for
        the previous transfer. Weights are read while products are computed."""
        return max(self.products, self.memory) + self.cache + self.links + self.network

    def at_once(self) -> float:
        """Return the longest part of a program over many tokens: the others overlap with it."""
        return max(self.products, self.memory + self.cache, self.links, self.network)


@dataclass(frozen=True)
class Rates:
    """The rates of one device as JAX counts them.

    flops: dense bfloat16 operations/s. bandwidth: of its memory, bytes/s. link: bytes/s to other
    devices in one direction, over all links. network: its share of the traffic out of its slice, or
    its host of GPUs, bytes/s in one direction. axes: of the torus, with two links of a chip on
    each; 0: its links go to a switch, and all of them to any device. latency: seconds of a
    collective of any size. launches: seconds of launching the kernels of one layer of a decode
    step. reached: share of the stated rates of products, memory, links and network that programs
    reach. decoding: the share of products and memory that decode steps reach.
    """

    flops: float
    bandwidth: float
    link: float
    network: float
    axes: int
    latency: float
    launches: float
    reached: float
    decoding: float

    def group_link(self, axes: int) -> float:
        """Return a device's bytes/s in one direction to others of a group that spans this many axes
        of the torus, without wrapping around any."""
        if not self.axes:
            return self.link
        return self.link * min(max(axes, 1), self.axes) / (2 * self.axes)

    def step_seconds(self, parts: Seconds) -> float:
        """Estimate the seconds of a decode step: the sum of its parts and waits."""
        read = max(parts.products, parts.memory) + parts.cache
        return read / self.decoding + (parts.links + parts.network) / self.reached + parts.waits

    def pass_seconds(self, parts: Seconds) -> float:
        """Estimate the seconds of a program over many tokens: its longest part."""
        return parts.at_once() / self.reached


V5P, V6E, H100, H200_DECODING = 0.764, 0.472, 0.376, 0.55
"""Reached share of the stated rates, fitted."""


def _tpu(
    tflops: float, gbps: float, link: float, network: float, axes: int, reached: float
) -> Rates:
    rates = tflops * 1e12, gbps * 1e9, link * 1e9, network * 1e9
    return Rates(*rates, axes, 7e-6, 0.0, reached, decoding=reached)


def _gpu(tflops: float, gbps: float, link: float, network: float) -> Rates:
    rates = tflops * 1e12, gbps * 1e9, link * 1e9, network * 1e9
    return Rates(*rates, 0, 14e-6, 25e-6, H100, decoding=H200_DECODING)


RATES = {
    "v5e": _tpu(197, 819, 200, 3.125, axes=2, reached=V5P),
    "v5p": _tpu(459, 2765, 600, 6.25, axes=3, reached=V5P),
    "v6e": _tpu(918, 1638, 400, 12.5, axes=2, reached=V6E),
    "tpu7x": _tpu(1153.5, 3690, 300, 6.25, axes=3, reached=V6E),
    "a100-80": _gpu(312, 2039, 300, 25),
    "h100": _gpu(989, 3352, 450, 50),
    "h200": _gpu(989, 4800, 450, 50),
    "l40s": _gpu(362, 864, 32, 6.25),
}

# Part of JAX's name of the device; the first match counts.
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
    """Return the name of a JAX device's kind in RATES; "" for an unknown kind."""
    return next((kind for part, kind in _KINDS.items() if part in device.device_kind), "")


def rates_of(device: Any) -> Rates:
    """Return the rates of a JAX device; for an unknown kind, those of an average one of its
    platform."""
    return RATES[kind_of(device) or _MIDDLING.get(device.platform, "v6e")]
