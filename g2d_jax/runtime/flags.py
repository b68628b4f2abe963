"""The XLA flags and the memory share of a run, set before JAX looks for devices.

Values already in your environment are kept.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from glob import glob
from pathlib import Path

from g2d_jax.runtime import failures

ORDER = "--xla_cpu_enable_concurrency_optimized_scheduler"
"""See `order_collectives`."""

IN_ORDER = "--xla_gpu_exclude_nondeterministic_ops"
"""See `sum_in_order`."""

NVIDIA = ("/dev/nvidia[0-9]*", "/dev/dxg")
"""Device files of NVIDIA's GPUs, also in WSL."""

DRIVEN = ("/dev/accel*", "/dev/vfio/[0-9]*", *NVIDIA, "/dev/kfd")
"""Device files of TPUs, and of GPUs of NVIDIA and AMD."""


def has(flag: str) -> bool:
    """Return whether XLA_FLAGS sets a flag."""
    return flag in re.findall(r"[^\s=]+", os.environ.get("XLA_FLAGS", ""))


def add(flag: str, value: str) -> None:
    """Add a flag to XLA_FLAGS, unless it is set."""
    if not has(flag):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={value}".strip()


def check_devices() -> None:
    """Raise ValueError if JAX_PLATFORMS names devices that JAX does not find. Initialises
    devices."""
    import jax

    named = jax.config.jax_platforms  # type: ignore[attr-defined]
    if not named:
        return
    try:
        jax.devices()
    except Exception as error:  # RuntimeError, or a bare AssertionError for a missing plugin
        reason = (str(error).splitlines() or ["no driver is installed for them"])[0]
        raise ValueError(
            f"JAX_PLATFORMS is {named!r}, but JAX finds no such devices: {reason:.300}. Unset it, "
            f"set it to cpu, or for a GPU {failures.install_command('cuda')} (TPU: the extra tpu)"
        ) from error


def simulated() -> int:
    """Return the number of CPU devices in XLA's flag or JAX's setting; starts no backend."""
    import jax

    flags = re.findall(
        r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", "")
    )
    if flags:
        return int(flags[-1])
    return max(1, jax.config.jax_num_cpu_devices)  # type: ignore[attr-defined]


def order_collectives() -> None:
    """Make every CPU device start a program's collectives in the same order. Call it before
    anything uses a device.

    XLA's CPU scheduler starts independent collectives at once. Each blocks one of few threads until
    all devices arrive, so devices that begin with different ones deadlock. (With 4 devices on two
    busy cores, 7 of 10 runs hung, 3 of 9 with 32 threads, none of 18 with this.) Accelerators queue
    collectives, and their plugins may not know the flag.
    """
    import jax

    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    if platforms == "cpu" or (not platforms and not accelerated()):
        add(ORDER, "false")


def spare_threads() -> None:
    """Give XLA on CPUs more threads than cores: collectives block threads of a pool, and two of
    them may deadlock. XLA reads this variable when it first initialises devices."""
    os.environ.setdefault("NPROC", str(max(32, os.cpu_count() or 1)))


def accelerated() -> bool:
    """Return whether JAX may find an accelerator: a plugin and one of its devices are present."""
    return any(map(importlib.util.find_spec, ("libtpu", "jax_plugins"))) and any(map(glob, DRIVEN))


def take_memory() -> None:
    """Use nine tenths of a GPU's memory, as plans assume; JAX's default is three quarters. Call it
    before JAX looks for devices; it has no effect later."""
    # with both set, JAX ignores the GPU
    named = (
        "XLA_CLIENT_MEM_FRACTION",
        "XLA_PYTHON_CLIENT_MEM_FRACTION",
    )
    if not any(map(os.environ.get, named)):
        os.environ[named[0]] = "0.9"


def set_up_gpus() -> None:
    """Call `take_memory`, and with a GPU `sum_in_order`. Call it before JAX looks for devices; it
    has no effect later."""
    take_memory()
    if any(map(glob, NVIDIA)):
        sum_in_order()


def sum_in_order() -> None:
    """Make GPUs add in a fixed order, so that a program returns the same result every time.

    By default, threads add to the gradient of an embedding, and to that of cuDNN's attention, in
    any order.
    """
    add(IN_ORDER, "true")


def in_tpu_cluster() -> bool:
    """Return whether JAX may find other hosts of a TPU slice. Call it after importing JAX."""
    named = {"TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES"} & os.environ.keys()
    # Google's metadata server; JAX sets it if it sees no chip
    queries = "TPU_SKIP_MDS_QUERY" not in os.environ
    return importlib.util.find_spec("libtpu") is not None and bool(named or queries)


def leave_tpu_out(root: str = "/") -> None:
    """Keep JAX from trying libtpu, which prints pages of errors if it is installed only for plans.

    This applies to a machine without a TPU in its devices or environment, without JAX's plugins for
    other devices, and with JAX_PLATFORMS unset. Call it before importing JAX; it has no effect
    later. root: of the file system, for tests.
    """
    signs = ("JAX_PLATFORMS", "JAX_FORCE_TPU_INIT", "TPU_", "LIBTPU_", "PJRT_", "CLOUD_TPU")
    # JAX sets these itself
    named = any(name.startswith(signs) and name != "TPU_SKIP_MDS_QUERY" for name in os.environ)
    others = importlib.util.find_spec("jax_plugins")
    if named or others or "jax" in sys.modules or importlib.util.find_spec("libtpu") is None:
        return
    place = Path(root)
    vendors = (file.read_text().strip() for file in place.glob("sys/bus/pci/devices/*/vendor"))
    devices = [*place.glob("dev/accel*"), *place.glob("dev/vfio/[0-9]*")]
    if not devices and "0x1ae0" not in vendors:  # Google's
        os.environ["JAX_PLATFORMS"] = "cpu"
