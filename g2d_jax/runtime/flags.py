"""Flags of XLA, libtpu and JAX's memory by platform, all that a run sets: before JAX looks for devices.

What a user's environment says already stays. NCCL has none: its documentation advises against fixing what it tunes by
itself, and no compiler can check a name.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from glob import glob
from pathlib import Path

from g2d_jax.config import Flags
from g2d_jax.runtime import extras

# compute.flags "overlap": collectives beside products. No device has run it: compiled only. Each variable is read where
# it applies, and libtpu knows XLA's flags of GPUs. What they change, and which were left out and why: docs/engine.md.
OVERLAP = {
    "LIBTPU_INIT_ARGS": {
        # All-reduces, of gradients and norms, may begin and end apart: MaxText, benchmarks/xla_flags_library.py.
        "--xla_enable_async_all_reduce": "true",
        # And be cut into pieces that run inside products: the same.
        "--xla_tpu_enable_async_collective_fusion_fuse_all_reduce": "true",
    },
    "XLA_FLAGS": {
        # Weights of the next layer come while this one is computed: JAX-Toolbox, rosetta/docs/GPU_performance.md.
        "--xla_gpu_enable_pipelined_all_gather": "true",
        # Gradients of the last layer leave while the next one's are computed: the same.
        "--xla_gpu_enable_pipelined_reduce_scatter": "true",
    },
}

ORDER = "--xla_cpu_enable_concurrency_optimized_scheduler"
"""See `order_collectives`."""

DRIVEN = ("/dev/accel*", "/dev/vfio/[0-9]*", "/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd")
"""Files of TPUs, and of GPUs of NVIDIA (under WSL too) and AMD."""


def has(flag: str, variable: str = "XLA_FLAGS") -> bool:
    """Return whether the environment sets a flag."""
    return flag in re.findall(r"[^\s=]+", os.environ.get(variable, ""))


def add(flag: str, value: str, variable: str = "XLA_FLAGS") -> None:
    """Set a flag, unless the environment does."""
    if not has(flag, variable):
        os.environ[variable] = f"{os.environ.get(variable, '')} {flag}={value}".strip()


def use(setting: Flags) -> None:
    """Set the flags of compute.flags. Raises ValueError if JAX has looked for devices without them."""
    wanted = OVERLAP if setting == "overlap" else {}
    missing = [(*item, name) for name, flags in wanted.items() for item in flags.items() if not has(item[0], name)]
    if missing and _backends_started():
        raise ValueError(f"compute.flags is {setting!r}, but JAX has devices already: begin this run in a new process")
    for flag, value, name in missing:
        add(flag, value, name)


def _backends_started() -> bool:
    """Return whether JAX has looked for devices: then it refuses to change their number."""
    import jax

    devices: int = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    try:
        jax.config.update("jax_num_cpu_devices", devices + 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", devices)
    return False


def check_devices() -> None:
    """Raise ValueError where JAX_PLATFORMS asks for devices that JAX does not find. Looks for devices."""
    import jax

    asked = jax.config.jax_platforms  # type: ignore[attr-defined]
    if not asked:
        return
    try:
        jax.devices()
    except Exception as error:  # RuntimeError, or for a plugin that is not installed a bare AssertionError
        reason = (str(error).splitlines() or ["nothing that drives them is installed"])[0]
        raise ValueError(
            f"JAX_PLATFORMS is {asked!r}, and JAX finds no such devices: {reason:.300}. Unset it or make it cpu; for a "
            f"GPU {extras.install('cuda')}, for a TPU the extra tpu"
        ) from error


def simulated() -> int:
    """Return how many CPU devices were asked for, by XLA's flag or JAX's setting; starts no backend."""
    import jax

    asked = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(asked[-1]) if asked else max(1, jax.config.jax_num_cpu_devices)  # type: ignore[attr-defined]


def order_collectives() -> None:
    """Have every CPU device start the collectives of a program in the same order. Before anything touches a device.

    XLA's CPU scheduler starts independent ones at once, each in a thread that blocks until all devices came, and there
    are few threads: devices that begin with different ones wait for each other for ever. (Of 10 runs with 4 devices on
    two busy cores 7 hung, of 9 with 32 threads 3, of 18 with this none.) Accelerators queue theirs, and their plugins
    need not know the flag.
    """
    import jax

    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    if platforms == "cpu" or (not platforms and not accelerated()):
        add(ORDER, "false")


def spare_threads() -> None:
    """Give XLA on CPUs more threads than cores: collectives wait inside a pool of as many, and two soon wait for ever.
    XLA takes the number from this variable when the devices are first looked at."""
    os.environ.setdefault("NPROC", str(max(32, os.cpu_count() or 1)))


def accelerated() -> bool:
    """Return whether JAX may find an accelerator: a plugin is installed, and a device that plugins drive is here."""
    return any(importlib.util.find_spec(plugin) for plugin in ("libtpu", "jax_plugins")) and any(map(glob, DRIVEN))


def take_memory() -> None:
    """Take nine tenths of a GPU's memory, as plans count, where JAX takes three quarters unless it is told. To be
    called before JAX looks for devices, and without effect later."""
    named = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # both at once, and JAX leaves the GPU out
    if not any(os.environ.get(name) for name in named):
        os.environ[named[0]] = "0.9"


def in_tpu_cluster() -> bool:
    """Return whether JAX may find the other hosts of a TPU slice. Call it with JAX imported."""
    named = {"TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES"} & os.environ.keys()
    asks = "TPU_SKIP_MDS_QUERY" not in os.environ  # Google's metadata server; JAX sets it where it sees no chip
    return importlib.util.find_spec("libtpu") is not None and bool(named or asks)


def leave_tpu_out(root: str = "/") -> None:
    """Keep JAX from trying libtpu, which prints pages of errors, where it is installed for plans alone.

    That is on a machine without a sign of a TPU in its devices or in the environment, without JAX's plugins for other
    devices, and where JAX_PLATFORMS says nothing. To be called before JAX is imported, and without effect later.
    root: of the file system, for tests.
    """
    signs = ("JAX_PLATFORMS", "JAX_FORCE_TPU_INIT", "TPU_", "LIBTPU_", "PJRT_", "CLOUD_TPU")
    named = any(name.startswith(signs) and name != "TPU_SKIP_MDS_QUERY" for name in os.environ)  # which JAX sets itself
    others = importlib.util.find_spec("jax_plugins")
    if named or others or "jax" in sys.modules or importlib.util.find_spec("libtpu") is None:
        return
    place = Path(root)
    vendors = (file.read_text().strip() for file in place.glob("sys/bus/pci/devices/*/vendor"))
    devices = [*place.glob("dev/accel*"), *place.glob("dev/vfio/[0-9]*")]
    if not devices and "0x1ae0" not in vendors:  # Google's
        os.environ["JAX_PLATFORMS"] = "cpu"
