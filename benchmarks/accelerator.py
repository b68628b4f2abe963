r"""On a GPU or a TPU: is it right, does it need what the plan says, and which way of computing is the quicker one.

    python benchmarks/accelerator.py                        # shapes of Qwen2.5-0.5B and 1.5B, all parts
    python benchmarks/accelerator.py --shapes tiny          # shows on a CPU that it runs
    python benchmarks/accelerator.py --parts correct memory --shapes 0.5b

Random weights, nothing to download. Every part is a process of its own and prints what it found; one that fails does
not keep the others from running:

    correct   log-probs, their gradient and logits of packed rows, against this machine's CPU; the attention kernel of
              prompts against XLA's. Exit status 1 beyond CLOSE
    memory    G2D with three updates a training stage; the device's peak of each stage against `g2d plan`'s.
              Exit status 1 beyond WITHIN, or where either is not known
    decode    a decode step of 256 rows of 1,024 tokens: layers unrolled (as the sampler has them) and scanned
    ragged    its attention over rows of unequal lengths: matrix products (the sampler's) and cuDNN
    filters   drawing a token: unfiltered, top-k, top-p
    logprobs  log-probs and their gradient by tokens in a chunk
    remat     gradient of a batch by what the backward pass computes again, and log-probs alone
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import statistics
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

if TYPE_CHECKING:
    import jax
    from ml_collections import ConfigDict

    from g2d_jax.models.config import ModelConfig
    from g2d_jax.plan.topologies import Device

CLOSE = 1e-3  # nats, logits and the gradient's relative difference, both sides in float32
WITHIN = 0.10  # of the plan's peak
NAMES = {"0.5b": "Qwen2.5-0.5B", "1.5b": "Qwen2.5-1.5B", "7b": "Qwen2.5-7B"}
TINY = {
    "vocab_size": 640, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 96,
}  # fmt: skip
END = "</s>"
UPDATES, PROMPT, RESPONSE = 3, 128, 256
# What JAX calls a device -> its name in a plan, and what each adds to the number there.
KINDS = {
    **dict.fromkeys(["TPU v5 lite", "TPU v5e"], ("v5e-{:.0f}", 1)),
    **dict.fromkeys(["TPU v5", "TPU v5p"], ("v5p-{:.0f}", 2)),
    **dict.fromkeys(["TPU v6 lite", "TPU v6e"], ("v6e-{:.0f}", 1)),
    "TPU7x": ("tpu7x-{:.0f}", 0.5),
    **dict.fromkeys(["NVIDIA H100 80GB HBM3"], ("h100x{:.0f}", 1)),
    "NVIDIA H200": ("h200x{:.0f}", 1),
}


def shape(name: str) -> ModelConfig:
    """Of a name in NAMES, or "tiny"."""
    from g2d_jax.models import shapes

    small = name == "tiny"
    return dataclasses.replace(shapes.shape(NAMES["0.5b"]), **TINY) if small else shapes.shape(NAMES[name])


def machine() -> str:
    """The name of this machine's devices for `g2d plan`, "" if it has none."""
    import jax

    from g2d_jax.plan.topologies import names

    name, adds = KINDS.get(jax.devices()[0].device_kind, ("", 0))
    found = name.format(adds * jax.device_count())
    return found if found in names() else ""


def rates() -> Device | None:
    """What one of this machine's devices can do, if that is known."""
    from g2d_jax.plan.topologies import topology

    return topology(machine()).device if machine() else None


def seconds(work: Callable[[], Any], repeats: int = 5) -> float:
    """The median of several calls after a first one, which compiles."""
    import jax

    jax.block_until_ready(work())
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(work())
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def say(part: str, what: str, figure: str) -> None:
    """One line of the result."""
    print(f"{part:>9}  {what:<58} {figure}", flush=True)


def one_mesh() -> Any:
    """A mesh of the first device."""
    import jax

    from g2d_jax import mesh as meshes

    return meshes.make_mesh(devices=jax.devices()[:1])


def scored(config: ModelConfig, model: Any, tokens: jax.Array, dtype: Any, remat: Any, mesh: Any) -> jax.Array:
    """Log-probs of tokens [B, T] but the first of each row, float32 [B * (T - 1)].

    A row is packed: a prompt of an eighth of it, and two responses that share the prompt and do not see each other.
    """
    import jax.numpy as jnp

    from g2d_jax.losses.logprobs import token_logprobs
    from g2d_jax.models.decoder import forward, head_matrix
    from g2d_jax.models.kernels import attention_for
    from g2d_jax.records import MEMBERS

    length = tokens.shape[1]
    columns, prompt, second = jnp.arange(length), length // 8, length // 2
    member = sum((columns >= begin).astype(jnp.int32) for begin in (prompt, second))
    positions = jnp.where(columns >= second, columns - second + prompt, columns)
    positions, segments = (jnp.broadcast_to(x, tokens.shape) for x in (positions, MEMBERS + member))
    attention = attention_for("auto", mesh, "packed")
    hidden, _ = forward(model, tokens, positions, segments, dtype=dtype, remat=remat, attention=attention, mesh=mesh)
    read = hidden[:, :-1].reshape(-1, config.hidden_size)
    return token_logprobs(read, head_matrix(model, dtype), tokens[:, 1:].reshape(-1), with_entropy=False)[0]


# Is it right


def correct(config: ModelConfig, folder: Path) -> bool:
    """The device against the CPU."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from g2d_jax import mesh as meshes
    from g2d_jax.models import decoder
    from g2d_jax.models.kernels import attention_for, xla_attention
    from g2d_jax.records import MEMBERS

    cpu = meshes.make_mesh(devices=jax.devices("cpu")[:1])
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (4, 256)).astype(np.int32)
    with jax.default_device(cpu.devices.flat[0]):
        model = decoder.init(config, jax.random.key(0))

    def on(mesh: Any, dtype: Any) -> tuple[np.ndarray, np.ndarray, Any]:
        """Log-probs, the logits of each row's first 32 tokens, and the gradient of the mean log-prob on the host."""
        place = meshes.replicated(mesh)
        own, ids = jax.device_put(model, place), jax.device_put(tokens, place)

        def logits(model: Any, ids: jax.Array) -> jax.Array:
            steps = jnp.broadcast_to(jnp.arange(32), (4, 32))
            segments = jnp.full_like(steps, MEMBERS)
            hidden, _ = decoder.forward(model, ids[:, :32], steps, segments, dtype=dtype, mesh=mesh)
            return jnp.matmul(hidden, decoder.head_matrix(model, dtype), preferred_element_type=jnp.float32)

        with jax.default_matmul_precision("highest" if dtype == jnp.float32 else "default"):
            found = jax.jit(lambda m, i: scored(config, m, i, dtype, "full", mesh))(own, ids)
            slope = jax.jit(jax.grad(lambda m, i: scored(config, m, i, dtype, "full", mesh).mean()))(own, ids)
            return np.asarray(found), np.asarray(jax.jit(logits)(own, ids)), jax.device_get(slope)

    *right, slope = on(cpu, jnp.float32)
    length, good = norm(slope), True
    for dtype in (jnp.float32, jnp.bfloat16):
        *found, other = on(one_mesh(), dtype)
        for what, here, there in zip(("log-probs", "logits"), found, right, strict=True):
            off = np.abs(here - there)
            say("correct", f"{what} in {dtype.__name__}, CPU in float32", f"max {off.max():.2e}  mean {off.mean():.2e}")
            good &= dtype != jnp.float32 or bool(off.max() <= CLOSE)
        apart = norm(jax.tree.map(np.subtract, slope, other)) / length
        say("correct", f"gradient in {dtype.__name__}, CPU in float32", f"{apart:.2e} of its norm")
        good &= dtype != jnp.float32 or apart <= CLOSE
    heads, draw = config.num_attention_heads, np.random.default_rng(1).normal
    q, k, v = (
        jnp.asarray(draw(size=(4, 512, count, config.head_dim)), jnp.bfloat16)
        for count in (heads, config.num_key_value_heads, config.num_key_value_heads)
    )
    begins = np.array([0, 1, 100, 511])[:, None]  # padding on the left, as prompts have it
    segments = jnp.asarray(np.where(np.arange(512) >= begins, MEMBERS, 0), jnp.int32)
    kernel = jax.jit(attention_for("auto", one_mesh(), "sequence"))
    off = jnp.abs(kernel(q, k, v, segments).astype(jnp.float32) - xla_attention(q, k, v, segments).astype(jnp.float32))
    off = jnp.where((segments != 0)[:, :, None, None], off, 0.0)
    say("correct", "attention of prompts in bfloat16, its kernel and XLA's", f"max {float(off.max()):.2e}")
    return good


def norm(tree: Any) -> float:
    """Of all numbers of a tree of arrays on the host."""
    import jax
    import numpy as np

    return math.sqrt(sum(float(np.sum(np.square(x, dtype=np.float64))) for x in jax.tree.leaves(tree)))


# What it needs


def recipe(config: ModelConfig, folder: Path) -> ConfigDict:
    """G2D on random weights, three updates a training stage, prompts and responses as long as they may be."""
    import numpy as np
    from loading import write_checkpoint
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from g2d_jax import config as settings
    from g2d_jax import recipes

    model, problems = folder / "model", folder / "problems.jsonl"
    if not problems.exists():
        backend = Tokenizer(
            models.WordLevel({END: 0} | {f"w{i}": i for i in range(1, config.vocab_size)}, unk_token="w1")
        )
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        write_checkpoint(model, config, 5e9)
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END).save_pretrained(model)
        drawn = np.random.default_rng(0).integers(2, config.vocab_size, (256, PROMPT))
        rows = [{"problem": " ".join(f"w{i}" for i in row), "answer": "1"} for row in drawn]
        problems.write_text("\n".join(map(json.dumps, rows)))
    made = recipes.recipe("qwen2.5-0.5b", f"k={UPDATES},length={RESPONSE},path={model}")
    made.tokenizer.prompt_template = "{problem}"
    for split, limit in (("train", 256), ("dev", 16), ("test", 32)):
        made.data[split] = settings.source(str(problems), limit=limit)
    made.data.max_prompt_length = PROMPT
    made.compute.microbatch_tokens = 16_384
    made.stages.collect.prompts = 128
    made.stages.dpo.batch_size = 128 // UPDATES
    if config.vocab_size == TINY["vocab_size"]:
        made.compute.slots, made.stages.warmup.prompts_per_step, made.stages.collect.prompts = 32, 8, 16
        made.stages.dpo.batch_size = 4
    return made


def by_chance(completions: list[str], **_: Any) -> list[float]:
    """A reward that half of random answers get."""
    return [float(zlib.crc32(text.encode()) % 2) for text in completions]


def stage(config: ModelConfig, folder: Path, name: str) -> tuple[int, str]:
    """Run up to this stage, which is the next; bytes of a device at its peak (0: not told), and the machine's name."""
    import jax

    from g2d_jax import pipeline

    pipeline.run(recipe(config, folder), folder / "run", reward=by_chance, until=name)
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    return max(int(one.get("peak_bytes_in_use", 0)) for one in stats), machine()


def planned(config: ModelConfig, folder: Path, target: str) -> dict[str, tuple[int, str]]:
    """Stage -> bytes of its fullest program with the rest, and its name."""
    from g2d_jax.plan import compiling, planning
    from g2d_jax.plan.topologies import topology

    there = topology(target)
    compiling.prepare(there)
    entries = planning.make(recipe(config, folder), there, planning.Compiler.of(there)).entries
    fullest: dict[str, tuple[int, str]] = {}
    for entry in entries:
        name = entry.program.stage
        fullest[name] = max(fullest.get(name, (0, "")), (entry.total, entry.program.name))
    return fullest


def memory(config: ModelConfig, folder: Path) -> bool:
    """All stages of a short run against its plan."""
    good, target = True, ""
    found = {}
    for name in ("warmup", "collect", "dpo", "evaluate"):
        started = time.perf_counter()
        found[name], target = apart(stage, config, folder, name)
        peak = f"peak {found[name] / 2**30:.2f} GiB" if found[name] else "peak not told here"
        say("memory", f"{name}, {time.perf_counter() - started:.0f} s with start and compiling", peak)
    if not target or not all(found.values()):
        say("memory", "not compared", "this machine's plan or its peaks are not known")
        return False
    for name, (size, program) in apart(planned, config, folder, target).items():
        ratio = found[name] / size
        good &= abs(ratio - 1) <= WITHIN
        say("memory", f"{name} on {target}, of the plan's {size / 2**30:.2f} GiB ({program})", f"{ratio:.3f}")
    return good


# Which way is the quicker one


def decode(config: ModelConfig, folder: Path) -> bool:
    """Layers unrolled or scanned."""
    import jax
    import jax.numpy as jnp

    from g2d_jax.models import decoder
    from g2d_jax.models.attention import attend_cached, rotary_table
    from g2d_jax.models.flops import matmul_params
    from g2d_jax.records import MEMBERS

    rows, width, steps = (256, 1024, 16) if config.vocab_size > 1000 else (8, 64, 4)
    mesh, bf16 = one_mesh(), jnp.bfloat16
    kv, dim, layers = config.num_key_value_heads, config.head_dim, config.num_hidden_layers
    stacked = jax.jit(lambda: decoder.cast(decoder.init(config, jax.random.key(0)), bf16))()
    token, place = jnp.ones((rows, 1), jnp.int32), jnp.full((rows, 1), width - 1)

    def unrolled(model: Any, cache: Any) -> tuple[Any, Any]:
        hidden, cache = decoder.forward(model, token, place, token * MEMBERS, cache, dtype=bf16, mesh=mesh)
        return hidden, dataclasses.replace(cache, column=jnp.int32(width - 1))

    def scanned(model: Any, cache: Any) -> tuple[Any, Any]:
        rope, mask = rotary_table(config, place), jnp.ones((rows, width), bool)

        def layer(carry: Any, own: Any) -> tuple[Any, None]:
            (x, keys, values), (block, i) = carry, own

            def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                nonlocal keys, values  # of all layers, written in place
                keys = jax.lax.dynamic_update_slice(keys, k[:, 0, :, :, None][None], (i, 0, 0, 0, width - 1))
                values = jax.lax.dynamic_update_slice(values, v[:, 0, :, None, :][None], (i, 0, 0, width - 1, 0))
                return attend_cached(q, keys[i], values[i], mask, by_sums=False)

            x, _ = decoder.apply_block(config, block, x, rope, attention)
            return (x, keys, values), None

        x = model.embed[...][token]
        (x, *cache), _ = jax.lax.scan(layer, (x, *cache), (model.blocks, jnp.arange(layers)))
        return decoder.rms_norm(x, model.final_norm[...], config.rms_norm_eps), tuple(cache)

    def keys(*more: int) -> jax.Array:
        return jnp.zeros((*more, rows, kv, dim, width), bf16)

    def values(*more: int) -> jax.Array:
        return jnp.zeros((*more, rows, kv, width, dim), bf16)

    def loose() -> Any:
        column, start = jnp.int32(width - 1), jnp.zeros(rows, jnp.int32)
        each = range(layers)
        return decoder.Cache(tuple(keys() for _ in each), tuple(values() for _ in each), column, start)

    def chunk(step: Callable) -> Callable:
        def run(model: Any, cache: Any) -> Any:
            def body(_: Any, carry: Any) -> Any:
                hidden, cache = step(model, carry[1])
                logits = jnp.matmul(hidden[:, 0], decoder.head_matrix(model, bf16), preferred_element_type=jnp.float32)
                return carry[0] + logits.max(), cache

            return jax.lax.fori_loop(0, steps, body, (jnp.float32(0), cache))

        return jax.jit(run, donate_argnums=1)

    read = 2 * matmul_params(config) + rows * width * layers * 2 * kv * dim * 2
    ways = (
        ("unrolled", unrolled, jax.jit(decoder.unstack)(stacked), loose),
        ("scanned", scanned, stacked, lambda: (keys(layers), values(layers))),
    )
    for name, step, model, empty in ways:
        run, cache = chunk(step), empty()

        def once(run: Callable = run, model: Any = model) -> Any:
            nonlocal cache
            total, cache = run(model, cache)
            return total

        taken = seconds(once) / steps
        share = f", {read / taken / known.bandwidth:.0%} of bandwidth" if (known := rates()) else ""
        say(
            "decode", f"{name}, {rows} rows x {width}", f"{taken * 1e3:.2f} ms a step, {rows / taken:,.0f} tok/s{share}"
        )
        del cache
    return True


def ragged(config: ModelConfig, folder: Path) -> bool:
    """Attention of one layer's decode step."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from g2d_jax.models.attention import attend_cached

    rows, width = (256, 1024) if config.vocab_size > 1000 else (8, 64)
    heads, kv, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    rng = np.random.default_rng(0)
    lengths = jnp.asarray(rng.integers(1, width + 1, rows), jnp.int32)
    q, keys, values = (
        jnp.asarray(rng.normal(size=size), jnp.bfloat16)
        for size in ((rows, 1, heads, dim), (rows, kv, dim, width), (rows, kv, width, dim))
    )
    mask = jnp.arange(width)[None] < lengths[:, None]

    def ours(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend_cached(q, k, v, mask, by_sums=jax.default_backend() == "cpu")

    def each(attend: Callable, *arrays: jax.Array) -> float:
        """Microseconds of a call: a hundred in one program, each with what the one before gave as its queries."""
        run = jax.jit(lambda q, k, v: jax.lax.fori_loop(0, 100, lambda _, q: attend(q, k, v), q))
        return seconds(lambda: run(*arrays)) * 1e4

    say("ragged", "matrix products", f"{each(ours, q, keys, values):,.0f} us a layer")
    if jax.default_backend() != "gpu":
        say("ragged", "cuDNN", "not on this platform")
        return True
    k, v = keys.transpose(0, 3, 1, 2), values.transpose(0, 2, 1, 3)

    def theirs(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths, implementation="cudnn")

    off = jnp.abs(jax.jit(theirs)(q, k, v).astype(jnp.float32) - ours(q, keys, values).astype(jnp.float32)).max()
    say("ragged", "cuDNN", f"{each(theirs, q, k, v):,.0f} us a layer, {float(off):.1e} apart")
    return True


def filters(config: ModelConfig, folder: Path) -> bool:
    """A token for each of 256 rows."""
    import jax
    import jax.numpy as jnp

    from g2d_jax.rollout.sampling import draw

    rows = 256 if config.vocab_size > 1000 else 8
    logits = 3 * jax.random.normal(jax.random.key(0), (rows, config.vocab_size))
    keys, places = jnp.zeros((rows, 2), jnp.uint32), jnp.arange(rows)
    run = jax.jit(draw, static_argnames="filtered")
    for name, top_k, top_p in (("unfiltered", 0, 1.0), ("top-k 50", 50, 1.0), ("top-p 0.9", 0, 0.9), ("both", 50, 0.9)):
        chosen = (jnp.ones(rows), jnp.full(rows, top_k, jnp.int32), jnp.full(rows, top_p, jnp.float32))
        taken = seconds(lambda c=chosen, n=name: run(logits, keys, places, *c, filtered=n != "unfiltered"))
        say("filters", f"{name}, {rows} rows x {config.vocab_size:,}", f"{taken * 1e3:.2f} ms")
    return True


def logprobs(config: ModelConfig, folder: Path) -> bool:
    """Tokens of a chunk."""
    import jax
    import jax.numpy as jnp

    from g2d_jax.losses.logprobs import token_logprobs

    count = 16_384 if config.vocab_size > 1000 else 256
    hidden = jax.random.normal(jax.random.key(0), (count, config.hidden_size), jnp.bfloat16)
    head = 0.02 * jax.random.normal(jax.random.key(1), (config.hidden_size, config.vocab_size))
    targets = jax.random.randint(jax.random.key(2), (count,), 0, config.vocab_size)
    for chunk in (512, 1024, 2048, 4096):

        def total(hidden: jax.Array, head: jax.Array, chunk: int = chunk) -> jax.Array:
            return token_logprobs(hidden, head, targets, chunk=chunk, with_entropy=False)[0].sum()

        alone, both = jax.jit(total), jax.jit(jax.grad(total, argnums=(0, 1)))
        times = [seconds(lambda f=f: f(hidden, head)) * 1e3 for f in (alone, both)]
        say("logprobs", f"{count:,} tokens, chunks of {chunk}", "{:.1f} ms; with gradient {:.1f} ms".format(*times))
    return True


def remat(config: ModelConfig, folder: Path) -> bool:
    """Gradients of 16k tokens in rows of 4,096, of float32 parameters in bfloat16."""
    import jax
    import jax.numpy as jnp

    from g2d_jax.models import decoder
    from g2d_jax.models.flops import attended, train_flops

    rows, length = (4, 4096) if config.vocab_size > 1000 else (2, 128)
    mesh, known = one_mesh(), rates()
    model = jax.jit(lambda: decoder.init(config, jax.random.key(0)))()
    tokens = jax.random.randint(jax.random.key(1), (rows, length), 0, config.vocab_size)
    work = train_flops(config, rows * length, rows * attended(length))

    def loss(model: Any, remat: str) -> jax.Array:
        return -scored(config, model, tokens, jnp.bfloat16, remat, mesh).mean()

    ways = {name: jax.jit(jax.grad(lambda model, n=name: loss(model, n))) for name in ("full", "attention", "none")}
    ways["log-probs alone"] = jax.jit(lambda model: loss(model, "none"))
    for name, run in ways.items():
        needed = work / 3 if name == "log-probs alone" else work
        try:
            taken = seconds(lambda run=run: run(model))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            say("remat", name, "does not fit")
            continue
        share = f", {needed / taken / known.flops:.0%} of {known.flops / 1e12:,.0f} TFLOP/s" if known else ""
        peak = run.lower(model).compile().memory_analysis().peak_memory_in_bytes / 2**30
        say("remat", f"{name}, {rows} x {length}", f"{rows * length / taken:,.0f} tok/s, peak {peak:.2f} GiB{share}")
    return True


PARTS = {part.__name__: part for part in (correct, memory, decode, ragged, filters, logprobs, remat)}


def apart(work: Callable, *arguments: Any) -> Any:
    """Call it in a process of its own, which begins with the device's memory empty."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def versions() -> str:
    """Date, device and packages."""
    import jax

    return f"{time.strftime('%F')}, jax {jax.__version__}, {jax.device_count()} x {jax.devices()[0].device_kind}"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
                run = PARTS[part] if part == "memory" else lambda *given, part=part: apart(PARTS[part], *given)
                try:
                    good = run(shape(name), Path(folder))
                except Exception:  # an accelerator's hours are dear: see what can be seen
                    traceback.print_exc()
                    good = False
                failed += [] if good else [f"{part} of {name}"]
    sys.exit(f"not as promised, or not seen: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
