"""Which way of computing is the quicker one on this machine: the parts of accelerator.py that only
take times.

Each takes a model's shape and a folder it does not need, prints what it found and returns True.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax

    from g2d_jax.models.config import ModelConfig
    from g2d_jax.plan.topologies import Device

TINY = {
    "vocab_size": 640, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 96,
}  # fmt: skip


def is_tiny(config: ModelConfig) -> bool:
    """Whether it is the shape that a CPU is given, and with it small batches."""
    return config.vocab_size == TINY["vocab_size"]


def machine() -> str:
    """The name of this machine's devices for `g2d plan`, "" if it has none."""
    import jax

    from g2d_jax.plan.topologies import DEVICES, TOPOLOGIES
    from g2d_jax.rates import kind_of

    kind = kind_of(jax.devices()[0])
    if not kind:
        return ""
    device = DEVICES[kind]
    count = device.name_counts * jax.device_count() // device.per_chip
    found = f"{kind}{'x' if device.platform == 'gpu' else '-'}{count}"
    return found if found in TOPOLOGIES else ""


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


def scored(
    config: ModelConfig,
    model: Any,
    tokens: jax.Array,
    dtype: Any,
    remat: Any,
    mesh: Any,
    kernel: Any = "auto",
) -> jax.Array:
    """Log-probs of tokens [B, T] but the first of each row, float32 [B * (T - 1)].

    A row is packed: a prompt of an eighth of it, and two responses that share the prompt and do not
    see each other. kernel: of attention, as compute.attention.
    """
    import jax.numpy as jnp

    from g2d_jax.losses.logprobs import token_logprobs
    from g2d_jax.models.decoder import forward, head_matrix
    from g2d_jax.models.kernels import attention_for
    from g2d_jax.records import SEGMENT_STRIDE

    length = tokens.shape[1]
    columns, prompt, second = jnp.arange(length), length // 8, length // 2
    member = sum((columns >= begin).astype(jnp.int32) for begin in (prompt, second))
    positions = jnp.where(columns >= second, columns - second + prompt, columns)
    positions, segments = (
        jnp.broadcast_to(x, tokens.shape) for x in (positions, SEGMENT_STRIDE + member)
    )
    attention = attention_for(kernel, mesh, "packed")
    hidden, _ = forward(
        model, tokens, positions, segments, dtype=dtype, remat=remat, attention=attention, mesh=mesh
    )
    read = hidden[:, :-1].reshape(-1, config.hidden_size)
    return token_logprobs(
        read, head_matrix(model, dtype), tokens[:, 1:].reshape(-1), with_entropy=False
    )[0]


def decode(config: ModelConfig, folder: Path) -> bool:
    """An array of the cache a layer, layers unrolled, or one of all, layers scanned and columns
    read in blocks."""
    import jax
    import jax.numpy as jnp

    from g2d_jax.models import decoder
    from g2d_jax.models.flops import matmul_params
    from g2d_jax.sampler.programs import Shapes, empty

    rows, width, steps = (8, 64, 4) if is_tiny(config) else (256, 1024, 16)
    mesh, bf16 = one_mesh(), jnp.dtype(jnp.bfloat16)
    stacked = jax.jit(lambda: decoder.cast(decoder.init(config, jax.random.key(0)), bf16))()
    token, place = jnp.ones(rows, jnp.int32), jnp.full(rows, width - 1)
    read = 2 * matmul_params(config)
    read += (
        rows
        * width
        * config.num_hidden_layers
        * 2
        * config.num_key_value_heads
        * config.head_dim
        * 2
    )

    def chunk(model: Any, cache: Any) -> Any:
        def body(_: Any, carry: Any) -> Any:
            hidden, cache = decoder.decode(
                model, token, place, carry[1], widths=(width,), dtype=bf16, mesh=mesh
            )
            logits = jnp.matmul(
                hidden, decoder.head_matrix(model, bf16), preferred_element_type=jnp.float32
            )
            return carry[0] + logits.max(), cache

        return jax.lax.fori_loop(0, steps, body, (jnp.float32(0), cache))

    for name, model in (("unrolled", jax.jit(decoder.unstack)(stacked)), ("scanned", stacked)):
        run, shapes = jax.jit(chunk, donate_argnums=1), Shapes(rows, 1, (16,), (width,), 1, ())
        state, _ = empty(config, shapes, stacked=name == "scanned", dtype=bf16, cache_dtype=bf16)
        cache = state.cache

        def once(run: Callable = run, model: Any = model) -> Any:
            nonlocal cache
            total, cache = run(model, cache)
            return total

        taken = seconds(once) / steps
        share = f", {read / taken / known.bandwidth:.0%} of bandwidth" if (known := rates()) else ""
        say(
            "decode",
            f"{name}, {rows} rows x {width}",
            f"{taken * 1e3:.2f} ms a step, {rows / taken:,.0f} tok/s{share}",
        )
        del cache
    return True


def ragged(config: ModelConfig, folder: Path) -> bool:
    """Attention of one layer's decode step."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from g2d_jax.models.attention import attend_cached

    rows, width = (8, 64) if is_tiny(config) else (256, 1024)
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
        """Microseconds of a call: a hundred in one program, each with what the one before gave as
        its queries."""
        run = jax.jit(lambda q, k, v: jax.lax.fori_loop(0, 100, lambda _, q: attend(q, k, v), q))
        return seconds(lambda: run(*arrays)) * 1e4

    say("ragged", "matrix products", f"{each(ours, q, keys, values):,.0f} us a layer")
    if jax.default_backend() != "gpu":
        say("ragged", "cuDNN", "not on this platform")
        return True
    k, v = keys.transpose(0, 3, 1, 2), values.transpose(0, 2, 1, 3)

    def theirs(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(
            q, k, v, key_value_seq_lengths=lengths, implementation="cudnn"
        )

    off = jnp.abs(
        jax.jit(theirs)(q, k, v).astype(jnp.float32) - ours(q, keys, values).astype(jnp.float32)
    ).max()
    say("ragged", "cuDNN", f"{each(theirs, q, k, v):,.0f} us a layer, {float(off):.1e} apart")
    return True


def filters(config: ModelConfig, folder: Path) -> bool:
    """A token for each of 256 rows."""
    import jax
    import jax.numpy as jnp

    from g2d_jax.sampler.sampling import FILTERS, draw

    rows = 8 if is_tiny(config) else 256
    logits = 3 * jax.random.normal(jax.random.key(0), (rows, config.vocab_size))
    keys, places = jnp.zeros((rows, 2), jnp.uint32), jnp.arange(rows)
    run = jax.jit(draw, static_argnames="filters")
    for name, used, top_k, top_p in (
        ("unfiltered", (), 0, 1.0),
        ("top-k 50", FILTERS[:1], 50, 1.0),
        ("top-p 0.9", FILTERS[1:], 0, 0.9),
        ("both", FILTERS, 50, 0.9),
    ):
        chosen = (
            jnp.ones(rows),
            jnp.full(rows, top_k, jnp.int32),
            jnp.full(rows, top_p, jnp.float32),
        )
        taken = seconds(lambda c=chosen, u=used: run(logits, keys, places, *c, filters=u))
        say("filters", f"{name}, {rows} rows x {config.vocab_size:,}", f"{taken * 1e3:.2f} ms")
    return True


def logprobs(config: ModelConfig, folder: Path) -> bool:
    """Tokens of a chunk."""
    import jax
    import jax.numpy as jnp

    from g2d_jax.losses.logprobs import token_logprobs

    count = 256 if is_tiny(config) else 16_384
    hidden = jax.random.normal(jax.random.key(0), (count, config.hidden_size), jnp.bfloat16)
    head = 0.02 * jax.random.normal(jax.random.key(1), (config.hidden_size, config.vocab_size))
    targets = jax.random.randint(jax.random.key(2), (count,), 0, config.vocab_size)
    for chunk in (512, 1024, 2048, 4096):

        def total(hidden: jax.Array, head: jax.Array, chunk: int = chunk) -> jax.Array:
            return token_logprobs(hidden, head, targets, chunk=chunk, with_entropy=False)[0].sum()

        alone, both = jax.jit(total), jax.jit(jax.grad(total, argnums=(0, 1)))
        times = [seconds(lambda f=f: f(hidden, head)) * 1e3 for f in (alone, both)]
        say(
            "logprobs",
            f"{count:,} tokens, chunks of {chunk}",
            "{:.1f} ms; with gradient {:.1f} ms".format(*times),
        )
    return True


def remat(config: ModelConfig, folder: Path) -> bool:
    """Gradients of 16k tokens in rows of 4,096, of float32 parameters in bfloat16."""
    import jax
    import jax.numpy as jnp

    from g2d_jax.models import decoder
    from g2d_jax.models.flops import attended, train_flops

    rows, length = (2, 128) if is_tiny(config) else (4, 4096)
    mesh, known = one_mesh(), rates()
    model = jax.jit(lambda: decoder.init(config, jax.random.key(0)))()
    tokens = jax.random.randint(jax.random.key(1), (rows, length), 0, config.vocab_size)
    work = train_flops(config, rows * length, rows * attended(length))

    def loss(model: Any, remat: str) -> jax.Array:
        return -scored(config, model, tokens, jnp.bfloat16, remat, mesh).mean()

    ways = {
        name: jax.jit(jax.grad(lambda model, n=name: loss(model, n)))
        for name in ("full", "attention", "none")
    }
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
        share = (
            f", {needed / taken / known.flops:.0%} of {known.flops / 1e12:,.0f} TFLOP/s"
            if known
            else ""
        )
        peak = run.lower(model).compile().memory_analysis().peak_memory_in_bytes / 2**30
        say(
            "remat",
            f"{name}, {rows} x {length}",
            f"{rows * length / taken:,.0f} tok/s, peak {peak:.2f} GiB{share}",
        )
    return True


def attention(config: ModelConfig, folder: Path) -> bool:
    """Log-probs and their gradients of packed rows by XLA's attention and by the platform's kernel,
    in bfloat16: their rates, and how far each is from float32."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from g2d_jax.models import decoder

    mesh = one_mesh()
    platform = jax.default_backend()
    kernels = ["xla", {"gpu": "cudnn", "tpu": "splash"}.get(platform, "xla")]
    model = jax.jit(lambda: decoder.init(config, jax.random.key(0)))()
    for rows, length in ((2, 128),) if is_tiny(config) else ((5, 3072), (2, 9216)):
        tokens = jax.random.randint(jax.random.key(1), (rows, length), 0, config.vocab_size)

        def run(kernel: str, dtype: Any, tokens: Any = tokens) -> Any:
            def loss(model: Any) -> Any:
                each = scored(config, model, tokens, dtype, "attention", mesh, kernel)
                return each.mean(), each

            return jax.jit(jax.grad(loss, has_aux=True))

        def result(program: Any) -> Any:
            slope, each = jax.device_get(program(model))
            return np.concatenate([x.ravel() for x in jax.tree.leaves(slope)]), each

        with jax.default_matmul_precision("float32"):
            exact_slope, exact = result(run("xla", jnp.float32))
        for kernel in kernels:
            program = run(kernel, jnp.bfloat16)
            taken = seconds(lambda program=program: program(model), 3)
            slope, each = result(program)
            off = np.linalg.norm(slope - exact_slope) / np.linalg.norm(exact_slope)
            apart = np.abs(each - exact)
            figure = (
                f"{rows * length / taken:,.0f} tok/s; from float32: log-probs max "
                f"{apart.max():.1e}, mean {apart.mean():.1e}, gradients {off:.1e} of their norm"
            )
            say("attention", f"{kernel}, {rows} x {length}", figure)
    return True


def sampling(config: ModelConfig, folder: Path) -> bool:
    """The sampler on 8 responses to each of 64 prompts of 128 tokens, of 600 tokens in the mean and
    2,048 at most."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from g2d_jax import mesh as meshes
    from g2d_jax.models import decoder
    from g2d_jax.models.flops import matmul_params
    from g2d_jax.records import Request, SamplingParams
    from g2d_jax.sampler.engine import Sampler

    prompts, longest, mean, most = (4, 64, 20, 8) if is_tiny(config) else (64, 2048, 600, 256)
    mesh = meshes.sampling(one_mesh(), 1, config.num_key_value_heads)
    sampler = Sampler(config, mesh, seed=0, dtype=jnp.dtype(jnp.bfloat16), max_num_seqs=most)
    model = jax.jit(lambda: decoder.init(config, jax.random.key(0)))()
    # A random model says each of its words about as often: so many of them end a response.
    stops = tuple(range(1, 1 + config.vocab_size // mean))
    params = SamplingParams(longest, stop_ids=stops)
    draw = np.random.default_rng(0).integers
    requests = [
        Request(f"{i:016x}", draw(0, config.vocab_size, 128).astype(np.int32), params, 8, 0)
        for i in range(prompts)
    ]
    view = sampler.to_sampler_params(model)
    for name in ("first, with compiling", "second", "third"):
        before = dataclasses.replace(sampler.usage)
        started = time.perf_counter()
        lengths = [len(one.token_ids) for one in sampler.generate(view, requests, name)]
        taken = time.perf_counter() - started
        used = (sampler.usage.generated - before.generated) / (
            sampler.usage.row_steps - before.row_steps
        )
        # The least that must be read: weights once a step of all rows, each row's keys and values.
        kv = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2
        read = 2 * matmul_params(config) * sum(lengths) / most
        read += kv * sum(length * (128 + length / 2) for length in lengths)
        share = f", {read / taken / known.bandwidth:.0%} of bandwidth" if (known := rates()) else ""
        figure = f"{taken:.1f} s, {sum(lengths) / taken:,.0f} tok/s, slots {used:.2f}{share}"
        say("sampling", f"{name}: {len(lengths)} of {np.mean(lengths):.0f} tokens", figure)
    return True
