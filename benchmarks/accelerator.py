r"""On a GPU or a TPU: is it right, does it need what the plan says, and which way of computing is
the quicker one.

    python benchmarks/accelerator.py --check                                    # is all here that parts import
    python benchmarks/accelerator.py --parts correct kernel --shapes 1.5b --output logs
    python benchmarks/accelerator.py --make-plan plan.json --topology h100x1 --shapes 0.5b      # on any CPU, before
    python benchmarks/accelerator.py --parts memory --shapes 0.5b --plan plan.json
    python benchmarks/accelerator.py --parts all --shapes tiny                  # shows on a CPU that it runs

Random weights, nothing to download. Every part is a process of its own with the flags and the
environment that a run sets, and a time limit; it prints what it found, and keeps it in a log. One
that fails does not keep the others from running. gpu_hour.py runs them in order of worth.

    trial     the decode kernel on a small ring, as a run tries it. Exit status 1 where it is wrong
    correct   log-probs, their gradient and logits of packed rows, against this machine's CPU; the attention kernel of
              prompts against XLA's. Exit status 1 beyond CLOSE
    memory    G2D with three updates a training stage; the device's peak of each stage against --plan.
              Exit status 1 beyond WITHIN, or where either is not known
    kernel    attention of a decode step over rows of unequal lengths: this library's kernel, XLA's, cuDNN's
    filters   drawing a token: unfiltered, top-k, top-p
    logprobs  log-probs and their gradient by tokens in a chunk
    remat     gradient of a batch by what the backward pass computes again, and log-probs alone
    attention gradients of packed rows by XLA's attention and by the platform's kernel
    sampling  the sampler itself, on responses of very unequal lengths
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import math
import multiprocessing
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import ways  # noqa: E402
from ways import TINY, is_tiny, machine, one_mesh, say, scored  # noqa: E402

if TYPE_CHECKING:
    import jax
    from ml_collections import ConfigDict

    from g2d_jax.models.config import ModelConfig

CLOSE = 1e-3  # nats, logits and the gradient's relative difference, both sides in float32
WITHIN = 0.10  # of the plan's peak
PACKAGES = """jax flax optax orbax.checkpoint etils.epath grain array_record portpicker ml_collections math_verify
    latex2sympy2_extended antlr4 transformers tokenizers safetensors huggingface_hub tensorboardX pyarrow pandas
    matplotlib scipy rich jinja2 fsspec filelock"""
STAGES = ("warmup", "collect", "dpo", "evaluate")
NAMES = {"0.5b": "Qwen2.5-0.5B", "1.5b": "Qwen2.5-1.5B", "7b": "Qwen2.5-7B"}
END = "</s>"
UPDATES, PROMPT, RESPONSE = 3, 128, 256


def shape(name: str) -> ModelConfig:
    """Of a name in NAMES, or "tiny"."""
    from g2d_jax.models import shapes

    tiny = TINY if name == "tiny" else {}
    return dataclasses.replace(shapes.shape(NAMES.get(name, NAMES["0.5b"])), **tiny)


# Is it right


def correct(config: ModelConfig, options: argparse.Namespace) -> bool:
    """The device against the CPU."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from g2d_jax.models import decoder
    from g2d_jax.models.attention import packed_attention
    from g2d_jax.models.kernels import attention_for
    from g2d_jax.records import SEGMENT_STRIDE
    from g2d_jax.runtime import mesh as meshes

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
            head = decoder.head_matrix(model, dtype)
            return jnp.matmul(hidden, head, preferred_element_type=jnp.float32)

        def mean(model: Any, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
            each = scored(model, ids, dtype, "full", mesh)
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
            figure = f"max {off.max():.2e}  mean {off.mean():.2e}"
            say("correct", f"{what} in {dtype.__name__}, CPU in float32", figure)
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
    xla, own = (np.asarray(f(q, k, v, segments), np.float32) for f in (packed_attention, kernel))
    off = np.abs(xla - own)[np.asarray(segments) != 0].max()
    say("correct", "attention of prompts in bfloat16, its kernel and XLA's", f"max {off:.2e}")
    return good


def norm(tree: Any) -> float:
    """Of all numbers of a tree of arrays on the host."""
    import jax
    import numpy as np

    squares = [np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(tree)]
    return math.sqrt(sum(squares))


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
        words = {END: 0} | {f"w{i}": i for i in range(1, config.vocab_size)}
        backend = Tokenizer(models.WordLevel(words, unk_token="w1"))
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
    machine's name for `g2d plan`, or its platform."""
    import jax

    from g2d_jax import pipeline

    pipeline.run(recipe(config, folder), folder / "run", reward=by_chance, until=name)
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peak = max(int(one.get("peak_bytes_in_use", 0)) for one in stats)
    return peak, machine() or jax.default_backend()


def memory(config: ModelConfig, options: argparse.Namespace) -> bool:
    """Stages of a short run against a plan that was made before."""
    found, where = {}, ""
    for name in STAGES[: STAGES.index(options.until) + 1]:
        started = time.perf_counter()
        found[name], where = apart(stage, config, options.folder, name)
        peak = f"peak {found[name] / 2**30:.2f} GiB" if found[name] else "peak not told here"
        taken = time.perf_counter() - started
        say("memory", f"{name}, {taken:.0f} s with start and compiling", peak)
    if where == "cpu":
        say("memory", "compared with a plan", "not on this platform")
        return True
    plans = json.loads(options.plan.read_text()) if options.plan else {}
    (name,) = options.shapes
    plan = plans.get(where, {}).get(name)
    if not plan or not all(found.values()):
        why = f"{options.plan} has no {name} on {where}, or no peaks are known"
        say("memory", "not compared", why)
        return False
    good = True
    for name, peak in found.items():
        size, program = plan["stages"][name]
        good &= abs(peak / size - 1) <= WITHIN
        of = f"{name} on {where}, of {size / 2**30:.2f} GiB ({program}, jax {plan['jax']})"
        say("memory", of, f"{peak / size:.3f}")
    return good


def planned(shape_name: str, folder: Path, name: str) -> dict[str, Any]:
    """The plan of a shape on a machine: of each stage the bytes of its fullest program with the
    rest, and its name."""
    from g2d_jax.plan import planning, target
    from g2d_jax.plan.topologies import topology

    there = topology(name)
    target.prepare(there)
    import jax

    from g2d_jax.config import Config

    config = Config.of(recipe(shape(shape_name), folder))
    fullest: dict[str, tuple[int, str]] = {}
    for entry in planning.make(config, planning.Compiler(there)).entries:
        stage = entry.program.stage
        fullest[stage] = max(fullest.get(stage, (0, "")), (entry.total, entry.program.name))
    return {"jax": jax.__version__, "stages": fullest}


def make_plan(file: Path, topologies: list[str], shapes: list[str]) -> None:
    """Add plans to the file that --plan reads."""
    plans = json.loads(file.read_text()) if file.exists() else {}
    for name in shapes:
        with tempfile.TemporaryDirectory(prefix="g2d-accelerator-") as folder:
            for there in topologies:
                plans.setdefault(there, {})[name] = apart(planned, name, Path(folder), there)
                print(f"{name} on {there}: {plans[there][name]}", flush=True)
                file.write_text(json.dumps(plans, indent=1))


PARTS: dict[str, Callable[[ModelConfig, argparse.Namespace], bool]] = {
    part.__name__: part for part in (ways.trial, correct, *ways.TIMED, memory)
}


# The command


def apart(work: Callable, *arguments: Any) -> Any:
    """Call it in a process of its own, which begins with the device's memory empty."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def versions() -> str:
    """Date, device, packages and flags."""
    import jax

    devices, flags = jax.devices(), os.environ.get("XLA_FLAGS", "")
    kind = devices[0].device_kind
    return f"{time.strftime('%F')}, jax {jax.__version__}, {len(devices)} x {kind}, flags {flags}"


def run(command: Sequence[str], log: Path, seconds: float) -> int:
    """Run a command with its output in a log and on the screen; its status. What still runs after
    so many seconds is ended with all that it started, and has timeout(1)'s status, 124."""
    limit = time.monotonic() + seconds
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out, log.open(errors="replace") as shown:
        where: Any = {"stdout": out, "stderr": subprocess.STDOUT, "start_new_session": True}
        process = subprocess.Popen(command, **where)
        try:
            while (status := process.poll()) is None and time.monotonic() < limit:
                time.sleep(0.2)
                print(shown.read(), end="", flush=True)
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, number)
                    process.wait(10)
            print(shown.read(), end="", flush=True)
    return 124 if status is None else status


def heed_term() -> None:
    """Let SIGTERM end what `run` has started, too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def check() -> list[str]:
    """What cannot be imported of all that parts and runs import, each once."""
    import g2d_jax

    own = [module.name for module in pkgutil.walk_packages(g2d_jax.__path__, "g2d_jax.")]
    own.remove("g2d_jax.__main__")
    wrong: dict[str, None] = {}
    for name in [*PACKAGES.split(), *own]:
        if name == "tensorboardX":
            # It imports PyTorch where that is installed, for seconds, and does without.
            sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
        try:
            importlib.import_module(name)
        except ImportError as error:
            missing = isinstance(error, ModuleNotFoundError) and error.name
            wrong[missing or f"{name}: {error}"] = None
    return list(wrong)


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, which parts read."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--check", action="store_true", help="import what parts need first; 1 if any is missing")
    add("--parts", nargs="+", default=[], choices=[*PARTS, "all"])
    add("--shapes", nargs="+", default=["1.5b"], choices=[*NAMES, "tiny"])
    add("--output", type=Path, default=Path("accelerator"), help="folder of a log a part")
    add("--limit", type=float, default=480, help="seconds after which a part is ended")
    add("--decode", nargs="+", default=["pallas", "xla"], choices=("pallas", "xla"))
    add("--rows", type=int, default=256, help="of sampling: rows that decode together")
    add("--chunk", type=int, nargs="+", default=[16], help="of sampling: steps of a chunk")
    add("--trace", action="store_true", help="of sampling: trace three chunks into --output")
    add("--plan", type=Path, help="of memory: a file that --make-plan wrote")
    add("--until", default="evaluate", choices=STAGES, help="of memory: the last stage")
    add("--make-plan", type=Path, metavar="FILE", help="compile for --topology, into this file")
    add("--topology", nargs="+", default=["h100x1", "h200x1"], help="of --make-plan")
    add("--folder", type=Path, help=argparse.SUPPRESS)  # the folder of a part's own process
    arguments = parser.parse_args(argv)
    if "all" in arguments.parts:
        arguments.parts = list(PARTS)
    if not (arguments.check or arguments.parts or arguments.make_plan):
        parser.error("name --parts, --check or --make-plan")
    return arguments


def part_here(arguments: argparse.Namespace) -> bool:
    """Run one part in this process, as a run would."""
    from g2d_jax.runtime import flags

    flags.set_up_gpus()
    flags.leave_tpu_out()
    (part,) = arguments.parts
    # The part that starts processes of its own must not hold the device.
    print(apart(versions) if part == "memory" else versions(), flush=True)
    return PARTS[part](shape(*arguments.shapes), arguments)


def main() -> None:
    """The command."""
    arguments = parsed()
    if arguments.folder:
        sys.exit(not part_here(arguments))
    heed_term()
    os.environ["PYTHONUNBUFFERED"] = "1"
    if arguments.check and (missing := check()):
        sys.exit(f"missing: {', '.join(missing)}")
    if arguments.make_plan:
        make_plan(arguments.make_plan, arguments.topology, arguments.shapes)
    failed = []
    for name in arguments.shapes:
        with tempfile.TemporaryDirectory(prefix="g2d-accelerator-") as folder:
            for part in arguments.parts:
                own = ["--folder", folder, "--parts", part, "--shapes", name]
                command = [sys.executable, __file__, *sys.argv[1:], *own]
                log = arguments.output / f"{part}-{name}.log"
                if status := run(command, log, arguments.limit):
                    failed.append(f"{part} of {name} (status {status})")
    sys.exit(f"not as promised, or not seen: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
