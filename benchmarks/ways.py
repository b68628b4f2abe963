"""Parts of accelerator.py that take times: which way of computing is the quicker one here.

Each takes a model's shape and the options, prints what it found and returns whether that is right.
"""

from __future__ import annotations

import copy
import statistics
import time
import traceback
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax
    import numpy as np

    from g2d_jax.models.config import ModelConfig
    from g2d_jax.plan.topologies import Device

TINY: dict[str, Any] = {
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
    from g2d_jax.runtime.rates import kind_of

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


def tried(work: Callable[[], bool]) -> bool:
    """Whether it is right; what it raises is printed, for an accelerator's hours are dear."""
    try:
        return work()
    except Exception:
        traceback.print_exc()
        return False


def of_bandwidth(read: float, taken: float) -> str:
    """The share of the device's bandwidth that so many bytes in so many seconds are, if known."""
    known = rates()
    return f", {read / taken / known.bandwidth:.0%} of bandwidth" if known else ""


def one_mesh() -> Any:
    """A mesh of the first device."""
    import jax

    from g2d_jax.runtime import mesh as meshes

    return meshes.make_mesh(devices=jax.devices()[:1])


def scored(
    model: Any, tokens: jax.Array, dtype: Any, remat: Any, mesh: Any, kernel: Any = "auto"
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
    rows = [jnp.broadcast_to(x, tokens.shape) for x in (positions, SEGMENT_STRIDE + member)]
    ways: Any = {"remat": remat, "attention": attention_for(kernel, mesh, "packed"), "mesh": mesh}
    hidden, _ = forward(model, tokens, *rows, dtype=dtype, **ways)
    read, targets = hidden[:, :-1].reshape(-1, hidden.shape[-1]), tokens[:, 1:].reshape(-1)
    return token_logprobs(read, head_matrix(model, dtype), targets, with_entropy=False)[0]


def trial(config: ModelConfig, options: Namespace) -> bool:
    """What a run tries before it samples: the decode kernel on a small ring, against XLA's."""
    import jax
    import jax.numpy as jnp

    from g2d_jax.models import decode_check

    heads = config.num_attention_heads, config.num_key_value_heads
    sizes = *heads, config.head_dim, jnp.dtype(jnp.bfloat16)
    wrong = decode_check.trial(jax.devices()[0], *sizes)
    say("trial", "{} query and {} key heads".format(*heads), wrong or "as XLA's")
    return not wrong


def kernel(config: ModelConfig, options: Namespace) -> bool:
    """Attention of a decode step: this library's kernel, XLA's, and cuDNN's, which wants each row's
    keys to begin in column 0."""
    sizes = ((8, 64),) if is_tiny(config) else ((256, 2176), (512, 2048))
    good = True
    for rows, width in sizes:
        for live in (0.43, 1.0):
            good &= attended(config, rows, width, live)
    return good


def attended(config: ModelConfig, rows: int, width: int, live: float) -> bool:
    """Time the three with this share of the rows live, the others at rest; False where one differs
    from XLA's by more than a run's trial allows."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from g2d_jax.models.decode_check import TOLERANCE

    kv, dim, rng = config.num_key_value_heads, config.head_dim, np.random.default_rng(0)
    # Of 2,176 columns 454 in the mean: a prompt of 128, and what is sampled so far.
    drawn = width / 17 + rng.exponential(0.15 * width, rows)
    lengths = np.clip(drawn, 1, width).astype(np.int32)
    lives = rng.permutation(rows) < round(live * rows)
    shape = rows, 1, config.num_attention_heads, dim
    q, k, v = (
        jax.random.normal(jax.random.key(number), size, jnp.bfloat16)
        for number, size in enumerate((shape, (rows, width, kv, dim), (rows, width, kv, dim)))
    )
    column = width // 3
    ages = (column - np.arange(width)) % width
    ring = k[:, ages].transpose(0, 2, 3, 1), v[:, ages].transpose(0, 2, 1, 3)
    ours, xla, cudnn = attentions(column, ages, np.where(lives, lengths - 1, -1))
    right = np.asarray(jax.jit(xla)(q, *ring), np.float32)[lives]
    read = 4 * kv * dim * int(lengths[lives].sum())  # keys and values of live tokens
    rounds, platform = 2 if is_tiny(config) else 100, jax.default_backend()

    def timed(what: str, attend: Callable, *cache: jax.Array) -> bool:
        off = np.abs(np.asarray(jax.jit(attend)(q, *cache), np.float32)[lives] - right).max()

        # Each call's queries are the result of the one before.
        def repeated(q: jax.Array, *cache: jax.Array) -> jax.Array:
            return jax.lax.fori_loop(0, rounds, lambda _, q: attend(q, *cache), q)

        taken = seconds(partial(jax.jit(repeated), q, *cache)) / rounds
        figure = f"{taken * 1e6:,.0f} us a layer, {read / taken / 1e9:,.0f} GB/s"
        say("kernel", what, f"{figure}{of_bandwidth(read, taken)}, {off:.1e} from XLA's")
        return bool(off <= TOLERANCE["bfloat16"])

    good, own = True, "ours (interpreted)" if platform == "cpu" else "ours"
    for name, attend, cache in ("XLA's", xla, ring), (own, ours, ring), ("cuDNN's", cudnn, (k, v)):
        what = f"{name}, {rows} x {width}, {live:.0%} live"
        if attend is cudnn and platform != "gpu":
            say("kernel", what, "not on this platform")
        else:
            good &= tried(partial(timed, what, attend, *cache))
    return good


def attentions(column: int, ages: np.ndarray, earlier: np.ndarray) -> tuple[Callable, ...]:
    """Ours, XLA's and cuDNN's, of queries, keys and values. ages: of a ring's columns [W]. earlier:
    tokens of each row before its newest, which is in `column`; -1 at rest."""
    import jax
    import jax.numpy as jnp

    from g2d_jax.models.attention import attend_cached

    mesh, platform = one_mesh(), jax.default_backend()
    newest, before = jnp.int32(column), jnp.asarray(earlier, jnp.int32)
    mask = jnp.asarray(ages[None] <= earlier[:, None])

    def ours(q: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        if platform == "tpu":
            from g2d_jax.models.decode_kernel import attend_ring

            return attend_ring(q, keys[None], values[None], jnp.int32(0), newest, before, mesh)
        from g2d_jax.models.decode_kernel_gpu import attend_columns

        return attend_columns(q, keys, values, newest, before, mesh)

    def xla(q: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        return attend_cached(q, keys, values, mask, by_sums=platform == "cpu")

    def cudnn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        lengths = jnp.maximum(before + 1, 1)
        way: Any = {"key_value_seq_lengths": lengths, "implementation": "cudnn"}
        return jax.nn.dot_product_attention(q, k, v, **way)

    return ours, xla, cudnn


def filters(config: ModelConfig, options: Namespace) -> bool:
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
        chosen = jnp.ones(rows), jnp.full(rows, top_k, jnp.int32), jnp.full(rows, top_p)
        taken = seconds(partial(run, logits, keys, places, *chosen, filters=used))
        say("filters", f"{name}, {rows} rows x {config.vocab_size:,}", f"{taken * 1e3:.2f} ms")
    return True


def logprobs(config: ModelConfig, options: Namespace) -> bool:
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
        times = [seconds(partial(f, hidden, head)) * 1e3 for f in (alone, both)]
        figure = "{:.1f} ms; with gradient {:.1f} ms".format(*times)
        say("logprobs", f"{count:,} tokens, chunks of {chunk}", figure)
    return True


def compiled(lowered: dict[str, Any]) -> dict[str, Future[Any]]:
    """Compile all at once, each in a thread."""
    with ThreadPoolExecutor() as pool:
        return {name: pool.submit(program.compile) for name, program in lowered.items()}


def remat(config: ModelConfig, options: Namespace) -> bool:
    """Gradients of 16k tokens in rows of 4,096, of float32 parameters in bfloat16."""
    import jax
    import jax.numpy as jnp

    from g2d_jax.models import decoder
    from g2d_jax.models.flops import attended, train_flops
    from g2d_jax.session.training_memory import REMATS

    rows, length = (2, 128) if is_tiny(config) else (4, 4096)
    mesh, known = one_mesh(), rates()
    model = jax.jit(lambda: decoder.init(config, jax.random.key(0)))()
    tokens = jax.random.randint(jax.random.key(1), (rows, length), 0, config.vocab_size)
    work = train_flops(config, rows * length, rows * attended(length))

    def loss(model: Any, remat: Any) -> jax.Array:
        return -scored(model, tokens, jnp.bfloat16, remat, mesh).mean()

    lowered: dict[str, Any] = {"log-probs alone": jax.jit(partial(loss, remat="none")).lower(model)}
    for kept in REMATS:
        lowered[kept] = jax.jit(jax.grad(partial(loss, remat=kept))).lower(model)
    for name, future in compiled(lowered).items():
        needed = work / 3 if name == "log-probs alone" else work
        try:
            program = future.result()
            taken = seconds(partial(program, model))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            say("remat", name, "does not fit")
            continue
        share = f", {needed / taken / known.flops:.0%} of its TFLOP/s" if known else ""
        peak = program.memory_analysis().peak_memory_in_bytes / 2**30
        figure = f"{rows * length / taken:,.0f} tok/s, peak {peak:.2f} GiB{share}"
        say("remat", f"{name}, {rows} x {length}", figure)
    return True


def attention(config: ModelConfig, options: Namespace) -> bool:
    """Log-probs and their gradients of packed rows by XLA's attention and by the platform's kernel,
    in bfloat16: their rates, and how far each is from float32."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from g2d_jax.models import decoder
    from g2d_jax.session.training_memory import REMATS

    mesh, platform = one_mesh(), jax.default_backend()
    own = {"gpu": "cudnn", "tpu": "splash"}.get(platform, "xla")
    model = jax.jit(lambda: decoder.init(config, jax.random.key(0)))()
    rows, length = (2, 128) if is_tiny(config) else (5, 3072)
    tokens = jax.random.randint(jax.random.key(1), (rows, length), 0, config.vocab_size)

    def lower(kernel: str, dtype: Any, remat: str) -> Any:
        def loss(model: Any) -> Any:
            each = scored(model, tokens, dtype, remat, mesh, kernel)
            return each.mean(), each

        return jax.jit(jax.grad(loss, has_aux=True)).lower(model)

    def result(program: Any) -> Any:
        slope, each = jax.device_get(program(model))
        return np.concatenate([x.ravel() for x in jax.tree.leaves(slope)]), each

    with jax.default_matmul_precision("float32"):
        lowered = {"float32": lower("xla", jnp.float32, "full")}
    lowered |= {kernel: lower(kernel, jnp.bfloat16, REMATS[0]) for kernel in ("xla", own)}
    programs = compiled(lowered)
    exact_slope, exact = result(programs.pop("float32").result())
    for kernel, program in programs.items():
        taken = seconds(partial(program.result(), model), 3)
        slope, each = result(program.result())
        off = np.linalg.norm(slope - exact_slope) / np.linalg.norm(exact_slope)
        apart = np.abs(each - exact)
        figure = (
            f"{rows * length / taken:,.0f} tok/s; from float32: log-probs max "
            f"{apart.max():.1e}, mean {apart.mean():.1e}, gradients {off:.1e} of their norm"
        )
        say("attention", f"{kernel}, remat {REMATS[0]}, {rows} x {length}", figure)
    if platform == "cpu":
        say("attention", "a kernel of its own", "not on this platform")
    return True


def sampling(config: ModelConfig, options: Namespace) -> bool:
    """The sampler by each decode kernel, with chunks of each size."""
    import jax

    from g2d_jax.models import decoder

    model = jax.jit(lambda: decoder.init(config, jax.random.key(0)))()
    good = True
    for chunk in options.chunk:
        for decode in options.decode:
            if decode == "pallas" and jax.default_backend() == "cpu":
                say("sampling", decode, "not on this platform")
            else:
                good &= tried(partial(sampled, config, model, options, decode, chunk))
    return good


def sampled(config: ModelConfig, model: Any, options: Namespace, decode: str, chunk: int) -> bool:
    """Time calls of 8 responses to each of 64 prompts of 128 tokens, 600 tokens in the mean and
    2,048 at most; with options.trace the last one's first chunks are traced."""
    import jax.numpy as jnp
    import numpy as np

    from g2d_jax.models.flops import matmul_params
    from g2d_jax.records import Request, SamplingParams
    from g2d_jax.runtime import mesh as meshes
    from g2d_jax.sampler.engine import Sampler

    prompts, longest, mean = (4, 64, 20) if is_tiny(config) else (64, 2048, 600)
    rows = 8 if is_tiny(config) else options.rows
    mesh = meshes.sampling(one_mesh(), 1, config.num_key_value_heads)
    sizes: Any = {"max_num_seqs": rows, "chunk": chunk, "decode_kernel": decode}
    sampler = Sampler(config, mesh, seed=0, dtype=jnp.dtype(jnp.bfloat16), **sizes)
    # A random model says each of its words about as often: so many of them end a response.
    stops = tuple(range(1, 1 + config.vocab_size // mean))
    params = SamplingParams(longest, stop_ids=stops)
    draw = np.random.default_rng(0).integers
    requests = [
        Request(f"{i:016x}", draw(0, config.vocab_size, 128).astype(np.int32), params, 8, 0)
        for i in range(prompts)
    ]
    view = sampler.to_sampler_params(model)
    kv = 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    for name in ("with compiling", "again"):
        before = copy.copy(sampler.usage)
        started = time.perf_counter()
        lengths = [len(one.token_ids) for one in sampler.generate(view, requests, name)]
        taken = time.perf_counter() - started
        row_steps = sampler.usage.row_steps - before.row_steps
        used, steps = (sampler.usage.generated - before.generated) / row_steps, row_steps / rows
        # The least that must be read: weights once a step, keys and values of live rows.
        read = 2 * matmul_params(config) * steps
        read += kv * sum(length * (128 + length / 2) for length in lengths)
        what = f"{decode}, {rows} rows, chunk {chunk}, {name}: {len(lengths)} of {np.mean(lengths):.0f}"
        figure = f"{taken:.1f} s, {sum(lengths) / taken:,.0f} tok/s, rows in use {used:.2f}"
        figure += f", {taken / steps * 1e3:.2f} ms a step{of_bandwidth(read, taken)}"
        say("sampling", what, figure)
    if options.trace:
        folder = options.output / f"trace-{decode}-{chunk}"
        traced(sampler.generate(view, requests, "traced"), sampler, folder)
    return True


def traced(rollouts: Iterator[Any], sampler: Any, folder: Path, chunks: int = 3) -> None:
    """Trace so many chunks of a call of the sampler after the first that ends a response, and print
    the kernels that took most of a step."""
    import jax

    next(rollouts)
    rows, begun = sampler.max_num_seqs, sampler.usage.row_steps
    with jax.profiler.trace(str(folder)):
        for _ in rollouts:
            if sampler.usage.row_steps - begun >= chunks * sampler.chunk * rows:
                break
    steps = (sampler.usage.row_steps - begun) / rows
    nanoseconds: Counter[str] = Counter()
    for file in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            for line in plane.lines if plane.name.startswith("/device:") else ():
                if line.name.startswith("Stream") or line.name == "XLA Ops":
                    for event in line.events:
                        nanoseconds[event.name] += event.duration_ns
    say("sampling", f"traced {steps:.0f} steps into {folder.name}, us a step", "")
    for name, taken in nanoseconds.most_common(12):
        say("sampling", f"  {name:.56}", f"{taken / 1e3 / steps:,.1f}")
    if not nanoseconds:
        say("sampling", "  kernels of a device", "not on this platform")


TIMED = kernel, sampling, attention, remat, filters, logprobs
