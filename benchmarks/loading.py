"""Load and export a model of real size on simulated CPU devices, and hold host memory to what is
promised.

    python benchmarks/loading.py                                  # Qwen2.5-1.5B's shape, bfloat16, shards of 1 GB
    python benchmarks/loading.py --layers 8 --folder /data/model  # a smaller one, kept there for the next time

Writes a checkpoint of random numbers (3.1 GB, tensor by tensor), then in processes of their own:

    load, export     one process with 8 devices: float32 parameters from the file, and back into bfloat16 shards
    merge            an export of the same with adapters of rank 32 on every layer, which are merged into it
    two processes    the same with 4 devices each, and the bytes that each one read

The promise: peak host memory, less what the process had before and less the parameters that stay
(on CPU devices these are host memory too), is at most the largest tensor of the file + 2 GB in
every process; two processes read half of the file each. Exit status 1 if one is broken. Linux; the
whole takes about 23 GB of disk and 11 GB of memory, and is removed at the end but for --folder.
Files just written are in the page cache: speeds are those of the loader, not of a disk.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from g2d_jax.models.config import ModelConfig

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "processes")]

SLACK = 2e9  # bytes beside the largest tensor
SHAPE = {
    "family": "qwen2", "vocab_size": 151_936, "hidden_size": 1536, "num_attention_heads": 12,
    "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 8960, "tie_word_embeddings": True,
    "rope_theta": 1e6,
}  # fmt: skip


def write_checkpoint(folder: Path, config: ModelConfig, shard_bytes: float) -> None:
    """A model folder of random bfloat16 numbers, config.json last; nothing is done if it is
    there."""
    import jax.numpy as jnp
    import numpy as np

    from g2d_jax.models import hf, safetensors_file
    from g2d_jax.models.hf_folder import INDEX
    from g2d_jax.models.table import expected_shapes

    if (folder / "config.json").exists():
        return
    dtype, shapes, rng = np.dtype(jnp.bfloat16), expected_shapes(config), np.random.default_rng(0)

    def draw(name: str) -> np.ndarray:
        return (rng.standard_normal(shapes[name], np.float32) * np.float32(0.02)).astype(dtype)

    folder.mkdir(parents=True, exist_ok=True)
    split = hf.plan_shards(shapes, dtype.itemsize, shard_bytes)
    for file, names in split.filename_to_tensors.items():
        safetensors_file.write(folder / file, {name: shapes[name] for name in names}, dtype, draw)
    (folder / INDEX).write_text(
        json.dumps({"metadata": {}, "weight_map": split.tensor_to_filename})
    )
    (folder / "config.json").write_text(json.dumps(hf.config_to_hf(config, dtype="bfloat16")))


def memory(field: str) -> int:
    """Bytes, from /proc/self/status: VmRSS now, VmHWM at most since `measured` began."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{field}:"))) * 1024


def measured(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What it gives, and seconds, resident bytes before, the peak above that, and bytes that were
    read."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before, read, started = memory("VmRSS"), bytes_read(), time.perf_counter()
    result = work()
    seconds = time.perf_counter() - started
    peak = memory("VmHWM") - before
    return result, {"seconds": seconds, "before": before, "peak": peak, "read": bytes_read() - read}


def bytes_read() -> int:
    """By this process's system calls so far, from files wherever they are cached."""
    return int(Path("/proc/self/io").read_text().split()[1])


def child(folder: Path, output: Path) -> None:
    """Load, export to `output`, and print what was measured as JSON."""
    from g2d_jax.runtime import processes

    processes.initialise()
    import jax

    from g2d_jax.runtime import mesh as meshes

    mesh = meshes.make_mesh()
    jax.block_until_ready(
        jax.jit(lambda: jax.numpy.zeros(8), out_shardings=meshes.replicated(mesh))()
    )
    found = measurements(folder, output, mesh)
    processes.gather("exported")
    print(json.dumps({"devices": jax.device_count(), **found}))


def measurements(folder: Path, output: Path, mesh: Mesh) -> dict[str, Any]:
    """Of loading a model and of exporting it into `output`, alone and merged: each as `measured`
    has it.

    resident: bytes of its parameters on this process's devices.
    """
    import jax

    from g2d_jax.models import hf, lora
    from g2d_jax.models.config import Lora
    from g2d_jax.session import init_params

    model, loading = measured(lambda: jax.block_until_ready(hf.load(folder, mesh=mesh)))
    resident = sum(
        part.data.nbytes for leaf in jax.tree.leaves(model) for part in leaf.addressable_shards
    )
    config = dataclasses.replace(model.config, lora=Lora(32, 64.0))
    policy = jax.block_until_ready(
        init_params.add_lora(lora.frozen(model, config), config, mesh, 0)
    )
    found = {"resident": resident, "load": loading}
    for name, made in {"export": model, "merge": policy}.items():
        _, found[name] = measured(
            lambda name=name, made=made: hf.save(
                made, output / name, dtype="bfloat16", max_shard_bytes=1e9
            )
        )
    return found


def run_child(
    folder: Path, output: Path, devices: int, environment: dict[str, str]
) -> subprocess.Popen[str]:
    """Start `child` in a process of its own with so many devices."""
    flags = (
        f"--xla_force_host_platform_device_count={devices} "
        "--xla_cpu_enable_concurrency_optimized_scheduler=false"
    )
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags,
        "PYTHONPATH": str(ROOT),
        **environment,
    }
    command = [
        sys.executable,
        __file__,
        "--child",
        "--folder",
        str(folder),
        "--output",
        str(output),
    ]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def results(children: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """What they print; none is left running."""
    try:
        outputs = [process.communicate(timeout=1800)[0] for process in children]
    finally:
        for process in children:
            process.kill()
    if any(process.returncode for process in children):
        sys.exit("a process failed")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def report(name: str, part: dict[str, float], kept: float, size: float, largest: float) -> bool:
    """Print one measurement; whether it keeps the promise. kept: bytes of `part`'s peak that are no
    working memory."""
    above = part["peak"] - kept
    keeps = above <= largest + SLACK
    speed, before, peak = (
        number / 1e9 for number in (size / part["seconds"], part["before"], part["peak"])
    )
    print(
        f"{name:>16}  {part['seconds']:6.1f} s  {speed:5.2f} GB/s  before {before:.2f}  peak above "
        f"it {peak:.2f}  less resident {above / 1e9:.2f} GB  {'ok' if keeps else 'TOO MUCH'}"
    )
    return keeps


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--shard-bytes", type=float, default=1e9)
    parser.add_argument(
        "--folder", type=Path, help="of the checkpoint; used if it is there, and kept"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.folder, arguments.output)
        return
    from g2d_jax.models.config import ModelConfig

    with tempfile.TemporaryDirectory(prefix="g2d-loading-") as temporary:
        folder = arguments.folder or Path(temporary) / "model"
        write_checkpoint(
            folder, ModelConfig(**SHAPE, num_hidden_layers=arguments.layers), arguments.shard_bytes
        )
        sys.exit(0 if measure(folder, Path(temporary)) else 1)


def measure(folder: Path, temporary: Path) -> bool:
    """Print all; whether every promise is kept."""
    import jax
    from launched import by_jax, free_port

    from g2d_jax.models.hf_folder import find_weights, read_config
    from g2d_jax.models.safetensors_file import DTYPES

    config = read_config(folder)
    sizes = {
        n: math.prod(s.shape) * DTYPES[s.dtype].itemsize
        for n, s in find_weights(folder, config).items()
    }
    total, (name, largest) = sum(sizes.values()), max(sizes.items(), key=lambda item: item[1])
    print(
        f"jax {jax.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores; "
        f"{time.strftime('%F')}"
    )
    print(
        f"{config.num_hidden_layers} layers, {total / 1e9:.2f} GB in "
        f"{len(list(folder.glob('*.safetensors')))} files; "
        f"largest tensor {name}: {largest / 1e9:.2f} GB; allowed {(largest + SLACK) / 1e9:.2f} GB"
    )
    (alone,) = results([run_child(folder, temporary / "alone", 8, {})])
    print(
        f"one process, 8 devices: {alone['resident'] / 1e9:.2f} GB of float32 parameters stay; "
        f"{alone['load']['read'] / total:.3f} of the file was read"
    )
    kept = report("load", alone["load"], alone["resident"], total, largest)
    for name in ("export", "merge"):
        kept &= report(name, alone[name], 0, total, largest)
    shutil.rmtree(temporary / "alone")
    port = free_port()
    both = results(
        [run_child(folder, temporary / "both", 4, by_jax(2, port, index)) for index in range(2)]
    )
    for index, one in enumerate(both):
        kept &= report(
            f"process {index} of 2", one["load"], one["resident"], one["load"]["read"], largest
        )
        share = one["load"]["read"] / total
        print(f"{'':>16}  {one['resident'] / 1e9:.2f} GB stay; it read {share:.3f} of the file")
        kept &= share < 0.51
        for name in ("export", "merge"):
            kept &= report(f"its {name}", one[name], 0, total, largest)
    return kept


if __name__ == "__main__":
    main()
