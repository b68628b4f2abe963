r"""On a GPU or a TPU: is it right, does it need what the plan says, and which way of computing is
the quicker one.

    python benchmarks/accelerator.py                        # shapes of Qwen2.5-0.5B and 1.5B, all parts
    python benchmarks/accelerator.py --shapes tiny          # shows on a CPU that it runs
    python benchmarks/accelerator.py --parts correct memory --shapes 0.5b

Random weights, nothing to download. Every part is a process of its own and prints what it found;
one that fails does not keep the others from running:

    correct   log-probs, their gradient and logits of packed rows, against this machine's CPU; the attention kernel of
              prompts against XLA's. Exit status 1 beyond CLOSE
    memory    G2D with three updates a training stage; the device's peak of each stage against `g2d plan`'s.
              Exit status 1 beyond WITHIN, or where either is not known
    decode    a decode step of 256 rows of 1,024 tokens: layers unrolled (as the sampler has them) and scanned
    ragged    its attention over rows of unequal lengths: matrix products (the sampler's) and cuDNN
    filters   drawing a token: unfiltered, top-k, top-p
    logprobs  log-probs and their gradient by tokens in a chunk
    remat     gradient of a batch by what the backward pass computes again, and log-probs alone
    attention gradients of packed rows by XLA's attention and by the platform's kernel
    sampling  the sampler itself, on responses of very unequal lengths
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from ways import (  # noqa: E402
    TINY,
    attention,
    decode,
    filters,
    is_tiny,
    logprobs,
    machine,
    one_mesh,
    ragged,
    remat,
    sampling,
    say,
    scored,
)

if TYPE_CHECKING:
    import jax
    from ml_collections import ConfigDict

    from g2d_jax.models.config import ModelConfig

CLOSE = 1e-3  # nats, logits and the gradient's relative difference, both sides in float32
WITHIN = 0.10  # of the plan's peak
NAMES = {"0.5b": "Qwen2.5-0.5B", "1.5b": "Qwen2.5-1.5B", "7b": "Qwen2.5-7B"}
END = "</s>"
UPDATES, PROMPT, RESPONSE = 3, 128, 256


def shape(name: str) -> ModelConfig:
    """Of a name in NAMES, or "tiny"."""
    from g2d_jax.models import shapes

    small = name == "tiny"
    return (
        dataclasses.replace(shapes.shape(NAMES["0.5b"]), **TINY)
        if small
        else shapes.shape(NAMES[name])
    )


# Is it right


def correct(config: ModelConfig, folder: Path) -> bool:
    """The device against the CPU."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from g2d_jax import mesh as meshes
    from g2d_jax.models import decoder
    from g2d_jax.models.attention import packed_attention
    from g2d_jax.models.kernels import attention_for
    from g2d_jax.records import SEGMENT_STRIDE

    cpu = meshes.make_mesh(devices=jax.devices("cpu")[:1])
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (4, 256)).astype(np.int32)
    with jax.default_device(cpu.devices.flat[0]):
        model = decoder.init(config, jax.random.key(0))

    def on(mesh: Any, dtype: Any) -> tuple[np.ndarray, np.ndarray, Any]:
        """Log-probs, the logits of each row's first 32 tokens, and the gradient of the mean
        log-prob on the host."""
        place = meshes.replicated(mesh)
        own, ids = jax.device_put(model, place), jax.device_put(tokens, place)

        def logits(model: Any, ids: jax.Array) -> jax.Array:
            steps = jnp.broadcast_to(jnp.arange(32), (4, 32))
            segments = jnp.full_like(steps, SEGMENT_STRIDE)
            hidden, _ = decoder.forward(model, ids[:, :32], steps, segments, dtype=dtype, mesh=mesh)
            return jnp.matmul(
                hidden, decoder.head_matrix(model, dtype), preferred_element_type=jnp.float32
            )

        def mean(model: Any, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
            each = scored(config, model, ids, dtype, "full", mesh)
            return each.mean(), each

        with jax.default_matmul_precision("highest" if dtype == jnp.float32 else "default"):
            slope, found = jax.jit(jax.grad(mean, has_aux=True))(own, ids)
            return np.asarray(found), np.asarray(jax.jit(logits)(own, ids)), jax.device_get(slope)

    *right, slope = on(cpu, jnp.float32)
    length, good = norm(slope), True
    for dtype in (jnp.float32, jnp.bfloat16):
        *found, other = on(one_mesh(), dtype)
        for what, here, there in zip(("log-probs", "logits"), found, right, strict=True):
            off = np.abs(here - there)
            say(
                "correct",
                f"{what} in {dtype.__name__}, CPU in float32",
                f"max {off.max():.2e}  mean {off.mean():.2e}",
            )
            good &= dtype != jnp.float32 or bool(off.max() <= CLOSE)
        share = norm(jax.tree.map(np.subtract, slope, other)) / length
        say("correct", f"gradient in {dtype.__name__}, CPU in float32", f"{share:.2e} of its norm")
        good &= dtype != jnp.float32 or share <= CLOSE
    heads, draw = config.num_attention_heads, np.random.default_rng(1).normal
    q, k, v = (
        jnp.asarray(draw(size=(4, 512, count, config.head_dim)), jnp.bfloat16)
        for count in (heads, config.num_key_value_heads, config.num_key_value_heads)
    )
    begins = np.array([0, 1, 100, 511])[:, None]  # padding on the left, as prompts have it
    segments = jnp.asarray(np.where(np.arange(512) >= begins, SEGMENT_STRIDE, 0), jnp.int32)
    kernel = jax.jit(attention_for("auto", one_mesh(), "sequence"))
    ours, theirs = (
        run(q, k, v, segments).astype(jnp.float32) for run in (packed_attention, kernel)
    )
    off = jnp.where((segments != 0)[:, :, None, None], jnp.abs(ours - theirs), 0.0)
    say(
        "correct",
        "attention of prompts in bfloat16, its kernel and XLA's",
        f"max {float(off.max()):.2e}",
    )
    return good


def norm(tree: Any) -> float:
    """Of all numbers of a tree of arrays on the host."""
    import jax
    import numpy as np

    return math.sqrt(
        sum(float(np.sum(np.square(x, dtype=np.float64))) for x in jax.tree.leaves(tree))
    )


# What it needs


def recipe(config: ModelConfig, folder: Path) -> ConfigDict:
    """G2D on random weights, three updates a training stage, prompts and responses as long as they
    may be."""
    import numpy as np
    from loading import write_checkpoint
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from g2d_jax import config as settings
    from g2d_jax import recipes

    limits = {"train": 256, "dev": 16, "test": 32}
    model = folder / "model"
    files = {split: folder / f"{split}.jsonl" for split in limits}
    if not model.exists():
        backend = Tokenizer(
            models.WordLevel(
                {END: 0} | {f"w{i}": i for i in range(1, config.vocab_size)}, unk_token="w1"
            )
        )
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        write_checkpoint(model, config, 5e9)
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END).save_pretrained(model)
        draw = np.random.default_rng(0)
        for split, limit in limits.items():
            drawn = draw.integers(2, config.vocab_size, (limit, PROMPT))
            rows = [{"problem": " ".join(f"w{i}" for i in row), "answer": "1"} for row in drawn]
            files[split].write_text("\n".join(map(json.dumps, rows)))
    made = recipes.recipe("qwen2.5-0.5b", f"k={UPDATES},length={RESPONSE},path={model}")
    made.tokenizer.prompt_template = "{problem}"
    for split, file in files.items():
        made.data[split] = settings.source(str(file))
    made.data.max_prompt_length = PROMPT
    made.compute.microbatch_tokens = 16_384
    made.stages.collect.prompts = 128
    made.stages.dpo.batch_size = 128 // UPDATES
    if is_tiny(config):
        made.compute.max_num_seqs = 32
        made.stages.warmup.prompts_per_step = 8
        made.stages.collect.prompts = 16
        made.stages.dpo.batch_size = 4
    return made


def by_chance(completions: list[str], **_: Any) -> list[float]:
    """A reward that half of random answers get."""
    return [float(zlib.crc32(text.encode()) % 2) for text in completions]


def stage(config: ModelConfig, folder: Path, name: str) -> tuple[int, str]:
    """Run up to this stage, which is the next; bytes of a device at its peak (0: not told), and the
    machine's name."""
    import jax

    from g2d_jax import pipeline

    pipeline.run(recipe(config, folder), folder / "run", reward=by_chance, until=name)
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    return max(int(one.get("peak_bytes_in_use", 0)) for one in stats), machine()


def planned(config: ModelConfig, folder: Path, name: str) -> dict[str, tuple[int, str]]:
    """Stage -> bytes of its fullest program with the rest, and its name."""
    from g2d_jax.config import Config
    from g2d_jax.plan import planning, target
    from g2d_jax.plan.topologies import topology

    there = topology(name)
    target.prepare(there)
    entries = planning.make(Config.of(recipe(config, folder)), planning.Compiler(there)).entries
    fullest: dict[str, tuple[int, str]] = {}
    for entry in entries:
        stage = entry.program.stage
        fullest[stage] = max(fullest.get(stage, (0, "")), (entry.total, entry.program.name))
    return fullest


def memory(config: ModelConfig, folder: Path) -> bool:
    """All stages of a short run against its plan."""
    good, target = True, ""
    found = {}
    for name in ("warmup", "collect", "dpo", "evaluate"):
        started = time.perf_counter()
        found[name], target = apart(stage, config, folder, name)
        peak = f"peak {found[name] / 2**30:.2f} GiB" if found[name] else "peak not told here"
        say(
            "memory",
            f"{name}, {time.perf_counter() - started:.0f} s with start and compiling",
            peak,
        )
    if not target or not all(found.values()):
        say("memory", "not compared", "this machine's plan or its peaks are not known")
        return False
    for name, (size, program) in apart(planned, config, folder, target).items():
        ratio = found[name] / size
        good &= abs(ratio - 1) <= WITHIN
        say(
            "memory",
            f"{name} on {target}, of the plan's {size / 2**30:.2f} GiB ({program})",
            f"{ratio:.3f}",
        )
    return good


PARTS = {
    part.__name__: part
    for part in (
        correct,
        memory,
        decode,
        ragged,
        filters,
        logprobs,
        remat,
        attention,
        sampling,
    )
}


def apart(work: Callable, *arguments: Any) -> Any:
    """Call it in a process of its own, which begins with the device's memory empty."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def versions() -> str:
    """Date, device and packages."""
    import jax

    return (
        f"{time.strftime('%F')}, jax {jax.__version__}, {jax.device_count()} x "
        f"{jax.devices()[0].device_kind}"
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=["0.5b", "1.5b"], choices=[*NAMES, "tiny"])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    arguments = parser.parse_args()
    print(apart(versions), flush=True)
    failed = []
    for name in arguments.shapes:
        with tempfile.TemporaryDirectory(prefix="g2d-accelerator-") as folder:
            print(f"{name}", flush=True)
            for part in arguments.parts:
                # The part that starts processes of its own must not hold the device.
                run = (
                    PARTS[part]
                    if part == "memory"
                    else lambda *given, part=part: apart(PARTS[part], *given)
                )
                try:
                    good = run(shape(name), Path(folder))
                except Exception:  # an accelerator's hours are dear: see what can be seen
                    traceback.print_exc()
                    good = False
                failed += [] if good else [f"{part} of {name}"]
    sys.exit(f"not as promised, or not seen: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
