"""Devices of a target machine, and compilation for them.

libtpu compiles for TPUs and JAX's CUDA plugin for GPUs; neither needs the hardware. This module
sets their environment variables before JAX starts a backend.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from g2d_jax.plan.hlo import bytes_by_group, bytes_sent, collectives
from g2d_jax.plan.topologies import Topology
from g2d_jax.runtime import failures, flags

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # the backend for this process's arrays (there are none)
    "TPU_SKIP_MDS_QUERY": "1",  # no query for the machine's metadata
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",  # libtpu requires one; the topology's own name decides
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# XLA's description of a GPU: openxla/xla, xla/backends/gpu/target_config/specs. The L40S is not
# there: CUDA's properties of compute capability 8.9.
_GPU_CONFIG = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {shared} threads_per_core_limit: {threads} core_count: {cores} fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth:.0f} l2_cache_size: {l2} clock_rate_ghz: {clock} device_memory_size: {memory:.0f}
  shared_memory_per_block_optin: {optin} cuda_compute_capability {{ {capability} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
runtime_version {{ major: 12 minor: 8 }}
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""


@dataclass(frozen=True)
class _Gpu:
    """A GPU's properties in XLA's description, in bytes and GHz. capability: CUDA's, in its text
    form."""

    name: str
    capability: str
    cores: int
    clock: float
    l2: int
    shared: int = 233_472
    optin: int = 232_448
    threads: int = 2048
    fpus: int = 128


_GPUS = {
    "a100-80": _Gpu(
        "NVIDIA A100-SXM4-80GB",
        "major: 8",
        108,
        1.41,
        41_943_040,
        shared=167_936,
        optin=166_912,
        fpus=64,
    ),
    "h100": _Gpu("NVIDIA H100", "major: 9", 132, 1.98, 52_428_800),
    "h200": _Gpu("NVIDIA H200", "major: 9", 132, 1.98, 52_428_800),
    "l40s": _Gpu(
        "NVIDIA L40",  # JAX 0.12 lacks the L40S' capability without the hardware; the L40's is equal
        "major: 8 minor: 9",
        142,
        2.52,
        100_663_296,
        shared=102_400,
        optin=101_376,
        threads=1536,
    ),
}


def gpu_config(topology: Topology) -> str:
    """Write XLA's description of a machine's GPU, the text form of its GpuTargetConfigProto."""
    device = topology.device
    memory = int(device.hbm / 0.9)
    return _GPU_CONFIG.format(
        bandwidth=device.bandwidth, memory=memory, **asdict(_GPUS[topology.kind])
    )


class DoesNotFit(ValueError):
    """The error of a program that needs more memory than a device has, with the compiler's
    message."""


@dataclass(frozen=True)
class Compiled:
    """The compiler's report on one program.

    peak: bytes per device, with arguments and results. sent: bytes that each device sends in one
    call, by kind of collective. groups: the same by the number of devices that take part. far: the
    part that goes to other slices or GPU hosts. collectives: their number in one call. unknown:
    instructions whose bytes are unknown. seconds: of compiling. touched: bytes of arguments and
    results.
    """

    peak: int
    sent: Mapping[str, float]
    groups: Mapping[int, float]
    far: float
    collectives: int
    unknown: int
    seconds: float
    touched: int


def prepare(topology: Topology) -> None:
    """Set the environment for compiling. Call it before JAX touches a device.

    Raises ImportError naming the extra if the compiler is not installed.
    """
    compilers = {"tpu": ("libtpu", "plan"), "gpu": ("jax_plugins", "cuda")}
    package, extra = compilers[topology.device.platform]
    if importlib.util.find_spec(package) is None:
        raise failures.missing_extra(
            f"compiling for {topology.name} needs the package {package}", extra
        )
    os.environ.update(ENVIRONMENT)
    if topology.device.platform == "gpu":
        flags.sum_in_order()
    # A machine that only compiles lacks the CUDA driver.
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    if "jax" in sys.modules:  # it has read the environment already
        sys.modules["jax"].config.update("jax_platforms", ENVIRONMENT["JAX_PLATFORMS"])


def devices(topology: Topology) -> list[Any]:
    """Return a machine's devices, for a mesh. Raises ValueError if the compiler has another number
    of them."""
    from jax.experimental import topologies

    device = topology.device
    options: dict[str, Any] = {}
    if device.platform == "gpu":
        options |= {"platform": "cuda", "topology": topology.grid}
        options["target_config"] = gpu_config(topology)
    else:
        options |= {"platform": "tpu", "topology_name": topology.compiler_name}
        if topology.slices > 1:
            options["num_slices"] = topology.slices
        if topology.hosts == topology.slices:
            # The compiler defaults to hosts of four chips; this machine has one host for all.
            x, y, z, *_ = map(int, f"{topology.grid}x1x1".split("x"))
            options["chips_per_host_bounds"] = (x, y, z)
    units = topologies.get_topology_desc(**options).devices
    if len(units) != topology.devices:
        raise ValueError(
            f"{topology.compiler_name} has {len(units)} devices in this compiler, but "
            f"{topology.devices} were expected"
        )
    return list(units)


def compile_program(lowered: Any, dynamic: int = 1, near: int | None = None) -> Compiled:
    """Compile a lowered program. dynamic: trips of its outermost loop, if they are known only at
    run time.

    near: devices of a slice or host, None: all; the mesh has them slice by slice, host by host.
    Raises DoesNotFit if it needs more memory than a device has.
    """
    import jax

    started = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise DoesNotFit(_needed(str(error))) from error
    memory = compiled.memory_analysis()
    sending = collectives(compiled.as_text(), dynamic, near)
    return Compiled(
        peak=_peak(memory),
        sent=bytes_sent(sending),
        groups=bytes_by_group(sending),
        collectives=sum(collective.times for collective in sending),
        far=sum(collective.far for collective in sending),
        unknown=sum(collective.sent is None for collective in sending),
        seconds=time.perf_counter() - started,
        touched=memory.argument_size_in_bytes + memory.output_size_in_bytes,
    )


def _peak(memory: Any) -> int:
    """Count the peak bytes on a device: the compiler's peak includes arguments and results in host
    memory."""
    host = memory.host_argument_size_in_bytes + memory.host_output_size_in_bytes
    return int(memory.peak_memory_in_bytes - host + memory.host_alias_size_in_bytes)


def _needed(message: str) -> str:
    """Shorten the compiler's out-of-memory message to one line."""
    sizes = re.search(r"\(([\d.]+[KMG])\) exceeds available HBM \(([\d.]+[KMG])\)", message)
    used = re.search(r"Used ([\d.]+[KMG]) of ([\d.]+[KMG]) hbm", message)
    match = used or sizes
    return f"needs {match[1]} of {match[2]}" if match else message.splitlines()[0][:200]
