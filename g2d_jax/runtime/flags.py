"""Set the flags of XLA and the share of memory that a run needs, before JAX looks for devices.

Values that a user's environment has already stay.
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
"""Files of NVIDIA's GPUs, under WSL too."""

DRIVEN = ("/dev/accel*", "/dev/vfio/[0-9]*", *NVIDIA, "/dev/kfd")
"""Files of TPUs, and of GPUs of NVIDIA and AMD."""


def has(flag: str) -> bool:
    """Return whether XLA_FLAGS sets a flag."""
    return flag in re.findall(r"[^\s=]+", os.environ.get("XLA_FLAGS", ""))


def add(flag: str, value: str) -> None:
    """Add a flag to XLA_FLAGS, unless it is there."""
    if not has(flag):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={value}".strip()


def check_devices() -> None:
    """Raise ValueError where JAX_PLATFORMS asks for devices that JAX does not find. Looks for
    devices."""
    import jax

    asked = jax.config.jax_platforms  # type: ignore[attr-defined]
    if not asked:
        return
    try:
        jax.devices()
    except (
        Exception
    ) as error:  # RuntimeError, or for a plugin that is not installed a bare AssertionError
        reason = (str(error).splitlines() or ["nothing that drives them is installed"])[0]
        raise ValueError(
            f"JAX_PLATFORMS is {asked!r}, and JAX finds no such devices: {reason:.300}. Unset it "
            f"or make it cpu; for a GPU {failures.install_command('cuda')}, for a TPU the extra tpu"
        ) from error


def simulated() -> int:
    """Return how many CPU devices were asked for, by XLA's flag or JAX's setting; starts no
    backend."""
    import jax

    asked = re.findall(
        r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", "")
    )
    if asked:
        return int(asked[-1])
    return max(1, jax.config.jax_num_cpu_devices)  # type: ignore[attr-defined]


def order_collectives() -> None:
    """Have every CPU device start the collectives of a program in the same order. Before anything
    touches a device.

    XLA's CPU scheduler starts independent ones at once, each in a thread that blocks until all
    devices came, and there are few threads: devices that begin with different ones wait for each
    other for ever. (Of 10 runs with 4 devices on two busy cores 7 hung, of 9 with 32 threads 3, of
    18 with this none.) Accelerators queue theirs, and their plugins need not know the flag.
    """
    import jax

    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    if platforms == "cpu" or (not platforms and not accelerated()):
        add(ORDER, "false")


def spare_threads() -> None:
    """Give XLA on CPUs more threads than cores: collectives wait inside a pool of as many, and two
    soon wait for ever. XLA takes the number from this variable when the devices are first looked
    at."""
    os.environ.setdefault("NPROC", str(max(32, os.cpu_count() or 1)))


def accelerated() -> bool:
    """Return whether JAX may find an accelerator: a plugin is installed, and a device that plugins
    drive is here."""
    return any(map(importlib.util.find_spec, ("libtpu", "jax_plugins"))) and any(map(glob, DRIVEN))


def take_memory() -> None:
    """Take nine tenths of a GPU's memory, as plans count, where JAX takes three quarters unless it
    is told. To be called before JAX looks for devices, and without effect later."""
    # both at once, and JAX leaves the GPU out
    named = (
        "XLA_CLIENT_MEM_FRACTION",
        "XLA_PYTHON_CLIENT_MEM_FRACTION",
    )
    if not any(map(os.environ.get, named)):
        os.environ[named[0]] = "0.9"


def set_up_gpus() -> None:
    """Call `take_memory`, and `sum_in_order` where there is a GPU. To be called before JAX looks
    for devices, and without effect later."""
    take_memory()
    if any(map(glob, NVIDIA)):
        sum_in_order()


def sum_in_order() -> None:
    """Have GPUs add up in one order, so that a program gives the same result every time.

    The gradient of an embedding is a sum that threads add to as they come, and so is that of
    cuDNN's attention, unless XLA is told otherwise.
    """
    add(IN_ORDER, "true")


def in_tpu_cluster() -> bool:
    """Return whether JAX may find the other hosts of a TPU slice. Call it with JAX imported."""
    named = {"TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES"} & os.environ.keys()
    # Google's metadata server; JAX sets it where it sees no chip
    asks = "TPU_SKIP_MDS_QUERY" not in os.environ
    return importlib.util.find_spec("libtpu") is not None and bool(named or asks)


def leave_tpu_out(root: str = "/") -> None:
    """Keep JAX from trying libtpu, which prints pages of errors, where it is installed for plans
    alone.

    That is on a machine without a sign of a TPU in its devices or in the environment, without JAX's
    plugins for other devices, and where JAX_PLATFORMS says nothing. To be called before JAX is
    imported, and without effect later.
    root: of the file system, for tests.
    """
    signs = ("JAX_PLATFORMS", "JAX_FORCE_TPU_INIT", "TPU_", "LIBTPU_", "PJRT_", "CLOUD_TPU")
    # which JAX sets itself
    named = any(name.startswith(signs) and name != "TPU_SKIP_MDS_QUERY" for name in os.environ)
    others = importlib.util.find_spec("jax_plugins")
    if named or others or "jax" in sys.modules or importlib.util.find_spec("libtpu") is None:
        return
    place = Path(root)
    vendors = (file.read_text().strip() for file in place.glob("sys/bus/pci/devices/*/vendor"))
    devices = [*place.glob("dev/accel*"), *place.glob("dev/vfio/[0-9]*")]
    if not devices and "0x1ae0" not in vendors:  # Google's
        os.environ["JAX_PLATFORMS"] = "cpu"
