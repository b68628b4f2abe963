"""The sampler of responses in batches: requests go in, finished rollouts come out as they finish.

One program runs over the whole mesh, of however many processes. Every process follows the same
schedule (schedule.py); it hands out the rollouts of the rows that lie on its own devices. A prompt
is prefilled once; its samples begin in rows that are free, all rows decode together in chunks, and
no row moves while it lives.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Wrapped

from g2d_jax.data.packing import round_up
from g2d_jax.data.stops import Decode, Watch
from g2d_jax.models import decoder, lora
from g2d_jax.models.attention import COLUMN_BLOCK
from g2d_jax.models.config import ModelConfig
from g2d_jax.models.decoder import Decoder
from g2d_jax.models.kernels import (
    LANES,
    AttentionSetting,
    DecodeKernel,
    capability_of,
    choose,
    choose_decode,
    platform_of,
)
from g2d_jax.records import Request, Rollout, SamplingParams
from g2d_jax.runtime import keys as named_keys
from g2d_jax.runtime import mesh as meshes
from g2d_jax.runtime import processes
from g2d_jax.runtime.program import Program
from g2d_jax.runtime.program_cache import Programs
from g2d_jax.sampler import programs
from g2d_jax.sampler.programs import Emitted, Prompts, Rows, Shapes, State, may_branch
from g2d_jax.sampler.sampling import filters_of
from g2d_jax.sampler.schedule import Sample, Schedule

PREFILL_TOKENS = 8192
"""Tokens of prompts that a device prefills at once, at most: a fraction of them keeps its matrix
units busy, and each takes memory in all of a layer's arrays that the cache could have."""


@dataclass(frozen=True)
class Rule:
    """How a platform chooses the rows of a call.

    samples: a row for so many of a call's samples, which take turns. least: rows at least. tail:
    the last samples go on in a fraction of the rows, one in so many; 0: they do not. long: chunks
    of the longest response beyond which they do. least_tail: rows of it at least.
    """

    samples: int = 1
    least: int = 1
    tail: int = 0
    long: int = 0
    least_tail: int = 0


# Gains in CPU-seconds of a warm call of a model of 0.14M, without compiling, on two cores.
RULES = {
    "cpu": Rule(
        samples=4,  # 28 % of 512 samples of 48 tokens, 38 % of 256 of up to 512
        least=32,  # 26 % of 64 samples of up to 144 tokens; 64 rows gain 13 % where they are of 48
        tail=4,  # 21 % of 64 and of 256 samples of up to 256 tokens, 38 % of 64 of up to 512
        long=8,  # of shorter responses a call takes 0.3 s at most, and to compile the tail 2 s
        least_tail=8,
    )
}
"""By platform. Elsewhere a tail gains 0 to 37 % by the simulated schedule on GPUs with their kernel,
but needs a part of the cache besides, which fills the memory there; and no device has run it."""


@dataclass(slots=True)
class Usage:
    """The cost of generation so far. row_steps: decode steps times rows; generated / row_steps is
    the share of them that gave a token.

    Counts are of all processes together, seconds of this one.
    """

    prefilled: int = 0
    generated: int = 0
    row_steps: int = 0
    seconds: float = 0.0


class Engine(Protocol):
    """Draws responses: `Sampler`, or a server (remote.py). All processes make each call, with the
    same arguments. (`config.Engine` is the settings that choose between them.)
    """

    ready: int
    """The samples that have ended in the `generate` under way and are not handed out yet."""

    def to_sampler_params(self, model: Decoder) -> Any:
        """Make a policy ready to sample from, in a form of the engine's own."""

    def generate(
        self,
        sampler_params: Any,
        requests: Iterable[Request],
        purpose: str,
        shapes: Shapes | None = None,
    ) -> Iterator[Rollout]:
        """Yield every sample as it finishes, in one of the processes.

        The settings of a sample are `Request.params_of`. Random numbers are named by seed,
        purpose, problem id, visit and sample index.
        """
        ...


class Sampler:
    """A sampler of one model's shape over all devices of a `meshes.sampling` mesh.

    max_num_seqs: rows decoded together at most. chunk: decode steps between two looks at the rows.
    prefill_rows: prompts of one prefill. dtype: of activations and cache. attention: of prompts, see
    models/kernels.py. decode_kernel: of decode steps, None for the platform's. decode: ids
    to text, which requests with stop strings need. programs: where another sampler's of the same settings,
    such as another point's of a sweep, may lie; the attribute has them by name. Samples of one key
    are bit-equal for the same shapes and mesh; the noise always is.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        *,
        seed: int,
        max_num_seqs: int = 256,
        chunk: int = 16,
        prefill_rows: int = 32,
        dtype: jnp.dtype = jnp.float32,  # type: ignore[assignment]
        attention: AttentionSetting = "auto",
        decode_kernel: DecodeKernel | None = None,
        decode: Decode | None = None,
        programs: Programs | None = None,
    ) -> None:
        sizes = {"max_num_seqs": max_num_seqs, "chunk": chunk, "prefill_rows": prefill_rows}
        if wrong := {name: size for name, size in sizes.items() if size < 1}:
            raise ValueError(f"sizes of the sampler must be positive, got {wrong}")
        self.config = config
        self.mesh = mesh
        self.seed = seed
        self.dtype = dtype
        self.max_num_seqs = max_num_seqs
        self.chunk = chunk
        self.prefill_rows = prefill_rows
        self.decode = decode
        self.platform = platform_of(mesh)
        self.stacked = self.platform == "tpu"
        self.ends_early = may_branch(mesh)
        self.usage, self.ready = Usage(), 0
        self.kernel = choose(
            attention,
            platform=self.platform,
            dtype=dtype,
            head_dim=config.head_dim,
            length=LANES,
            # Layers with a sliding window are served as packed rows are.
            layout="packed" if config.is_sliding else "sequence",
            capability=capability_of(mesh),
        )
        self._programs = programs or Programs()
        heads = (config.num_key_value_heads,)
        self.decode_kernel = decode_kernel or choose_decode(
            device=mesh.devices.flat[0],
            dtype=dtype,
            head_dim=config.head_dim,
            kv_heads=meshes.sharding(mesh, ("kv_heads",), heads).shard_shape(heads)[0],
        )
        settings = config, mesh, chunk, jnp.dtype(dtype), self.kernel, self.decode_kernel
        self._jitted = self._programs.get_or_make(_jitted, *settings)

    def to_sampler_params(self, model: Decoder) -> Decoder:
        """Convert the model to the form that decode reads: in dtype, split over the sampling mesh.
        Once per policy."""
        written: Decoder = self.view(model)(model)
        return written

    def view(self, model: Decoder) -> Program:
        """Return the program of `to_sampler_params`. model: of arrays or shapes."""
        settings = self.config.without_codes, self.mesh, jnp.dtype(self.dtype)
        return Program("view", self._programs.get_or_make(_to_sampler_params, *settings), (model,))

    def abstract_params(self, model: Decoder) -> Decoder:
        """Return the shapes of `to_sampler_params`. model: of shapes."""
        shapes = jax.eval_shape(self.view(model).function, model)
        return meshes.placed(shapes, _layout(self.config.without_codes, self.mesh))

    def programs(self, params: Decoder, shapes: Shapes) -> dict[tuple[Any, ...], Program]:
        """Return the programs of a call, by name and the size where there are several.

        params: of `to_sampler_params`, or of `abstract_params`.
        """
        mesh, run = self.mesh, self._jitted
        state, prompts = self.abstract(shapes)
        rows = partial(meshes.abstract_rows, mesh)
        where = meshes.sharding(mesh, ("devices",), (mesh.size,))
        codes = jax.ShapeDtypeStruct((mesh.size,), np.int32, sharding=where)
        every = rows((shapes.rows,))
        found: dict[tuple[Any, ...], Program] = {}

        def name(program: str, *inputs: Any, size: Any = None, **static: Any) -> None:
            trips = self.chunk if program == "decode" else 1
            found[program, size] = Program(program, run[program], inputs, static, trips)

        name("empty", shapes=shapes)
        for columns in shapes.columns:
            tokens, each = rows((shapes.prompts, columns)), (shapes.prompts,)
            name("prefill", params, prompts, tokens, rows(each), rows(each, bool), size=columns)
        counts = rows((meshes.row_ways(mesh),))
        name("insert", state, prompts, state.rows, every, every, counts)
        static = {"filters": shapes.filters}
        name("decode", params, state, codes, **static)
        if shapes.tail:
            tail, _ = self.abstract(dataclasses.replace(shapes, rows=shapes.tail))
            name("take_rows", state, rows((shapes.tail,)))
            name("decode_tail", params, tail, codes, **static)
        if self.decode is not None:
            name("retire", state, rows((shapes.rows,), bool), size=shapes.rows)
            if shapes.tail:
                name("retire", tail, rows((shapes.tail,), bool), size=shapes.tail)
        return found

    def shapes(
        self,
        requests: int,
        samples: int,
        params: Sequence[SamplingParams],
        lengths: Sequence[int],
        most_rows: int | None = None,
    ) -> Shapes:
        """Choose the shapes to compile for: so many requests and samples, with these SamplingParams
        and prompt lengths.

        most_rows: rows that decode together in this call at most; None: max_num_seqs. `RULES` may
        choose fewer.
        """
        ways = meshes.row_ways(self.mesh)
        rule = RULES.get(self.platform, Rule())
        longest = max(p.max_new_tokens for p in params)
        every = _power(samples)
        turns = max(every // rule.samples, rule.least)
        rows = min(most_rows or self.max_num_seqs, every, turns)
        tail = 0
        is_long = longest > rule.long * self.chunk
        if rule.tail and is_long and self.mesh.size == 1 and rows > rule.least_tail:
            tail = max(rows // rule.tail, rule.least_tail)
        column_step = LANES if self.kernel == "splash" else 16
        columns = _columns(lengths, column_step)
        # Each device of the axis tensor has a row of work for every token that goes to any of them.
        together = self.mesh.shape["tensor"] if self.config.num_experts else 1
        fitting = max(PREFILL_TOKENS // (columns[-1] * together), 1)
        widest = columns[-1] + round_up(longest, 16)
        if self.stacked:
            step = COLUMN_BLOCK if widest > COLUMN_BLOCK else 16
            widest = round_up(widest, step)
        elif self.decode_kernel == "pallas":  # which reads what each row needs of any width
            from g2d_jax.models.decode_kernel_gpu import BLOCK  # Pallas takes long to import

            widest = round_up(widest, BLOCK)
        return Shapes(
            rows=round_up(rows, ways),
            prompts=round_up(min(self.prefill_rows, _power(requests), ways * fitting), ways),
            columns=columns,
            width=widest,
            stops=max(1, *(len(p.stop_ids) for p in params)),
            filters=filters_of(params),
            tail=tail,
        )

    def abstract(self, shapes: Shapes) -> tuple[State, Prompts]:
        """Return the programs' device state and prompts with a ShapeDtypeStruct and its sharding
        for every array."""
        settings = self.config, self.mesh, jnp.dtype(self.dtype), shapes
        return self._programs.get_or_make(_abstract, *settings)

    def generate(
        self,
        sampler_params: Decoder,
        requests: Iterable[Request],
        purpose: str,
        shapes: Shapes | None = None,
    ) -> Iterator[Rollout]:
        """Yield rollouts as they finish, in no particular order: those of this process's rows.

        All processes make the call, with the same requests. sampler_params: of `to_sampler_params`. purpose:
        names the randomness together with the seed, problem id, visit and sample index. shapes:
        what the programs are compiled for, which several calls share; without it the call's own
        requests decide. Raises ValueError, before anything is sampled, for an empty prompt, no
        samples, ids out of the vocabulary, or what the shapes are too small for; Preempted if any
        process was told to stop.
        """
        pending = list(requests)
        for request in pending:
            if wrong := self._wrong(request, shapes):
                raise ValueError(wrong)
        if not pending:
            return iter(())
        if shapes is None:
            samples = sum(request.num_samples for request in pending)
            lengths = [len(request.prompt_ids) for request in pending]
            params = [request.params for request in pending]
            shapes = self.shapes(len(pending), samples, params, lengths)
        return _Call(self, sampler_params, pending, purpose, shapes).run()

    def _wrong(self, request: Request, shapes: Shapes | None) -> str:
        """Say why a request cannot be sampled; "" if it can."""
        ids, params = request.prompt_ids, request.params
        vocab_size, problem = self.config.vocab_size, f"problem {request.problem_id}"
        if not len(ids) or request.num_samples < 1:
            return f"{problem}: a request needs a prompt and at least one sample"
        if ids.min() < 0 or ids.max() >= vocab_size:
            return f"{problem}: prompt ids must lie in [0, {vocab_size})"
        if params.stop and self.decode is None:
            return f"{problem}: stop strings need a sampler that is given decode"
        width = len(ids) + params.max_new_tokens
        if shapes and (len(ids) > shapes.columns[-1] or width > shapes.width):
            return f"{problem} needs more columns than the sampler is compiled for"
        if shapes and not set(filters_of([params])) <= set(shapes.filters):
            return f"{problem} needs a filter that the sampler is not compiled for"
        return ""


class _Call:
    """One call of `generate`: its schedule, the device state, and the tokens of this process's
    rows."""

    def __init__(
        self,
        sampler: Sampler,
        sampler_params: Decoder,
        requests: Sequence[Request],
        purpose: str,
        shapes: Shapes,
    ) -> None:
        self.sampler = sampler
        self.sampler_params = sampler_params
        self.purpose = purpose
        self.shapes = shapes
        self.mesh, self.ways = sampler.mesh, meshes.row_ways(sampler.mesh)
        rows, prompts = shapes.rows // self.ways, shapes.prompts // self.ways
        self.schedule = Schedule(requests, shards=self.ways, rows=rows, prompts=prompts)
        # By row: tokens, log-probs and entropies of each chunk.
        self.tokens: dict[int, list[tuple[np.ndarray, ...]]] = {}
        # By row: what looks for stop strings in its sample.
        self.watches: dict[int, Watch] = {}
        self.has_stops = any(request.params.stop for request in requests)
        self.rows = shapes.rows
        self.programs = sampler.programs(sampler_params, shapes)
        self.state: State
        self.prompts: Prompts
        self.state, self.prompts = self.programs["empty", None]()

    def run(self) -> Iterator[Rollout]:
        """Prefill, insert, decode a chunk, collect, until nothing is left.

        Finished rollouts are handed out while the next chunk is under way.
        """
        finished: list[Rollout] = []
        while True:
            processes.note_progress(f"sampling {self.purpose}")
            started = time.perf_counter()
            self._refill()
            running = [sample for sample in self.schedule.rows if sample is not None]
            if not running:
                break
            self._fit_rows(len(running))
            decode = "decode" if self.rows == self.shapes.rows else "decode_tail"
            # Whether this process was told to stop, on its devices: see `processes.stop_code`.
            codes = np.full(self.mesh.size, processes.stop_code(), np.int32)
            self.state, emitted = self.programs[decode, None](
                self.sampler_params, self.state, codes
            )
            self.sampler.usage.seconds += time.perf_counter() - started
            yield from self._hand_out(finished)
            started = time.perf_counter()
            finished = self._collect(emitted)
            self.sampler.usage.seconds += time.perf_counter() - started
        yield from self._hand_out(finished)

    def _hand_out(self, finished: Sequence[Rollout]) -> Iterator[Rollout]:
        """Yield the rollouts that a chunk ended, and say with each how many of them are left."""
        for number, rollout in enumerate(finished, 1):
            self.sampler.ready = len(finished) - number
            yield rollout

    def _refill(self) -> None:
        """Move waiting samples into the rows at rest."""
        while True:
            if placed := self.schedule.prefill():
                self._prefill(placed)
            inserted = self.schedule.insert()
            if not inserted:
                return
            self._insert(inserted)

    def _prefill(self, placed: dict[int, Request]) -> None:
        longest = max(len(request.prompt_ids) for request in placed.values())
        columns = next(size for size in self.shapes.columns if size >= longest)
        tokens = np.zeros((self.shapes.prompts, columns), np.int32)
        # A place without a request is one token of padding: no row of the softmax is empty.
        lengths = np.ones(self.shapes.prompts, np.int32)
        fresh = np.zeros(self.shapes.prompts, np.bool_)
        for place, request in placed.items():
            lengths[place], fresh[place] = len(request.prompt_ids), True
            tokens[place, columns - lengths[place] :] = request.prompt_ids
            self.sampler.usage.prefilled += len(request.prompt_ids)
        prefill = self.programs["prefill", columns]
        self.prompts = prefill(self.sampler_params, self.prompts, tokens, lengths, fresh)

    def _insert(self, inserted: dict[int, tuple[int, Sample]]) -> None:
        shapes = self.shapes
        fresh = Rows.at_rest(shapes.rows, shapes.stops)
        order, places = np.zeros((2, self.ways, shapes.rows // self.ways), np.int32)
        counts = np.zeros(self.ways, np.int32)
        for row, (place, sample) in inserted.items():
            self._describe(fresh, row, sample)
            shard, local = divmod(row, order.shape[1])
            order[shard, counts[shard]] = local
            places[shard, counts[shard]] = place % (shapes.prompts // self.ways)
            counts[shard] += 1
            self.tokens[row] = []
            self.watches.pop(row, None)
            stop, decode = sample.request.params.stop, self.sampler.decode
            if stop and decode is not None:  # as `generate` has seen to
                self.watches[row] = Watch(decode, stop)
        inputs = fresh, order.ravel(), places.ravel(), counts
        self.state = self.programs["insert", None](self.state, self.prompts, *inputs)

    def _describe(self, fresh: Rows[np.ndarray], row: int, sample: Sample) -> None:
        """Write a new sample's settings into the host arrays."""
        request, params = sample.request, sample.request.params_of(sample.number)
        names = request.problem_id, request.visit, sample.number
        fresh.random_keys[row] = named_keys.key_data(self.sampler.seed, self.purpose, *names)
        fresh.position[row], fresh.remaining[row] = len(request.prompt_ids), params.max_new_tokens
        fresh.temperature[row] = params.temperature
        fresh.top_k[row] = params.top_k
        fresh.top_p[row] = params.top_p
        fresh.stop_ids[row, : len(params.stop_ids)] = params.stop_ids

    def _fit_rows(self, running: int) -> None:
        """Move the last samples into the few rows of a call's end."""
        tail = self.shapes.tail
        if not running <= tail < self.rows or not self.schedule.is_drained:
            return
        order = self.schedule.narrow(tail)
        self.rows = tail
        self.state = self.programs["take_rows", None](self.state, np.array(order, np.int32))
        places = {row: place for place, row in enumerate(order)}
        self.tokens = {places[row]: parts for row, parts in self.tokens.items() if row in places}
        self.watches = {places[row]: watch for row, watch in self.watches.items() if row in places}

    def _collect(self, emitted: Emitted) -> list[Rollout]:
        """Add the chunk's tokens to this process's rows, and give the rollouts of those that are
        complete."""
        # The only wait for the device: what is on all devices is small, and says what to read.
        counts, stopped, interrupt_code = jax.device_get(emitted[3:])
        stopped = np.array(stopped)  # of which those that a text ended are to be marked
        processes.raise_if_stopped(int(interrupt_code))
        steps = int(counts.max()) if self.sampler.ends_early else self.sampler.chunk
        self.sampler.usage.row_steps += steps * len(counts)
        self.sampler.usage.generated += int(counts.sum())
        running = self.schedule.rows
        ends: dict[int, int] = {}  # row -> tokens of its response up to its stop string
        for first, arrays in _own_rows(*emitted[:3]):
            for row, sample in enumerate(running[first : first + len(arrays[0])], first):
                if sample is None:
                    continue
                tokens, *others = (array[row - first, : counts[row]] for array in arrays)
                self.tokens[row].append((tokens, *others))
                if row in self.watches and (end := self.watches[row].add(tokens)) is not None:
                    ends[row] = end
        if self.has_stops:
            ends = self._agree(ends)
        for row, end in ends.items():
            sample = running[row]
            assert sample is not None
            self.sampler.usage.generated -= sample.generated + int(counts[row]) - end
            stopped[row] = True
        finished = self.schedule.collect_finished(counts.tolist(), stopped.tolist())
        rollouts = []
        for row in finished:
            sample = running[row]
            if sample and self.tokens[row]:  # the rows of other processes have none here
                rollouts.append(self._rollout(row, sample, bool(stopped[row]), ends.get(row)))
        return rollouts

    def _agree(self, mine: dict[int, int]) -> dict[int, int]:
        """Return the rows whose stop string any process has found, with their ends, and put them to
        rest.

        Each process reads the text of its own rows; all must free the same ones.
        """
        ends: dict[int, int] = {}
        for found in processes.gather(sorted(mine.items())):
            ends |= dict(found)
        if ends:
            ended = np.zeros(self.rows, np.bool_)
            ended[list(ends)] = True
            self.state = self.programs["retire", self.rows](self.state, ended)
        return ends

    def _rollout(self, row: int, sample: Sample, stopped: bool, end: int | None) -> Rollout:
        """Make a rollout of a row's tokens. end: how many of them are its response, None: all."""
        parts = zip(*self.tokens.pop(row), strict=True)
        tokens, logprobs, entropies = (np.concatenate(part)[:end] for part in parts)
        request = sample.request
        names = request.problem_id, request.visit, sample.number
        reason: Literal["stop", "length"] = "stop" if stopped else "length"
        return Rollout(*names, request.prompt_ids, tokens, logprobs, entropies, reason)


def _own_rows(*arrays: jax.Array) -> Iterator[tuple[int, list[np.ndarray]]]:
    """Yield the parts of arrays [S, C] that this process answers for: first row, and each
    array's rows from there on.

    Of devices with the same rows, the first one's process answers for them.
    """
    for shards in zip(*(array.addressable_shards for array in arrays), strict=True):
        if shards[0].replica_id == 0:
            yield shards[0].index[0].start or 0, [np.asarray(shard.data) for shard in shards]


def _layout(config: ModelConfig, mesh: Mesh) -> Decoder:
    """Return the tree of a sampler's parameters with a NamedSharding in place of every array."""
    # XLA for TPU copies nothing out of a stack that a scan reads, and compiles one layer for all;
    # elsewhere each layer's arrays are read where they lie.
    if platform_of(mesh) == "tpu":
        return decoder.shardings(config, mesh)
    return decoder.unstacked_shardings(config, mesh)


def _to_sampler_params(config: ModelConfig, mesh: Mesh, dtype: jnp.dtype) -> Wrapped:
    """Return the program of a sampler's `to_sampler_params`, of this config."""
    is_stacked = platform_of(mesh) == "tpu"
    convert = lora.to_sampler_params if is_stacked else lora.to_unstacked_sampler_params
    layout = _layout(config, mesh)

    def moved(stack: jax.Array, where: NamedSharding) -> jax.Array:
        one = NamedSharding(where.mesh, PartitionSpec(*where.spec[1:]))
        return jax.lax.map(lambda layer: jax.lax.with_sharding_constraint(layer, one), stack)

    # Plans, and records of compiling, know the program by this name.
    def view(model: Decoder) -> Decoder:
        converted = convert(model, dtype)
        if is_stacked:  # XLA would gather all layers of an array before it splits them anew
            converted.blocks = jax.tree.map(moved, converted.blocks, layout.blocks)
        return converted

    return jax.jit(view, out_shardings=layout)


def _empty(
    config: ModelConfig, mesh: Mesh, dtype: jnp.dtype
) -> Callable[..., tuple[State, Prompts]]:
    """Return `programs.empty` for the mesh's devices."""
    platform = platform_of(mesh)
    # To write a column of bfloat16, XLA's CPU compiler makes the whole array float32 and back.
    cache_dtype = jnp.dtype(jnp.float32) if platform == "cpu" else dtype
    stacked = platform == "tpu"
    return partial(programs.empty, config, stacked=stacked, dtype=dtype, cache_dtype=cache_dtype)


def _abstract(
    config: ModelConfig, mesh: Mesh, dtype: jnp.dtype, shapes: Shapes
) -> tuple[State, Prompts]:
    """Return what `Sampler.abstract` does."""

    def place(x: jax.ShapeDtypeStruct, *axes: str | None) -> jax.ShapeDtypeStruct:
        return x.update(sharding=meshes.sharding(mesh, axes, x.shape))

    made: tuple[State, Prompts] = jax.eval_shape(
        partial(_empty(config, mesh, dtype), shapes=shapes)
    )
    return programs.lay_out_tree(made, place)


def _jitted(
    config: ModelConfig,
    mesh: Mesh,
    chunk: int,
    dtype: jnp.dtype,
    kernel: AttentionSetting,
    decode_kernel: DecodeKernel,
) -> dict[str, Wrapped]:
    """Return a sampler's jitted functions by name."""
    common: dict[str, Any] = {"mesh": mesh, "dtype": dtype}
    steps: dict[str, Any] = {"chunk": chunk, "kernel": decode_kernel, "branches": may_branch(mesh)}
    decode = partial(programs.decode_chunk, **steps, **common)
    ways = meshes.row_ways(mesh)
    # Results lie alike whatever the shapes: rows are always split over all ways.
    least = _abstract(config, mesh, dtype, Shapes(ways, ways, (16,), 16, 1, ()))
    state, prompts = jax.tree.map(lambda x: x.sharding, least)
    rows, whole = meshes.rows_sharding(mesh, (ways, 1)), meshes.replicated(mesh)
    emitted: list[Any] = [rows] * 3 + [whole] * 3
    decoded: dict[str, Any] = {
        "static_argnames": "filters",
        "donate_argnums": 1,
        "out_shardings": (state, Emitted(*emitted)),
    }
    of_state: dict[str, Any] = {"donate_argnums": 0, "out_shardings": state}
    empty = _empty(config, mesh, dtype)
    prefill = partial(programs.prefill, attention=kernel, **common)
    return {
        "empty": jax.jit(empty, static_argnames="shapes", out_shardings=(state, prompts)),
        "prefill": jax.jit(prefill, donate_argnums=1, out_shardings=prompts),
        "insert": jax.jit(partial(programs.insert, mesh=mesh), **of_state),
        "take_rows": jax.jit(programs.take_rows, out_shardings=state),
        "retire": jax.jit(programs.retire, **of_state),
        "decode": jax.jit(decode, **decoded),
        # By itself: the first chunk of a call does not wait until this one is compiled.
        "decode_tail": jax.jit(decode, **decoded),
    }


def _columns(lengths: Sequence[int], step: int) -> tuple[int, ...]:
    """Choose the columns of prefills for prompts of these lengths. One size holds the longest;
    where most are far shorter a second one is for those: 57 % of the CPU time of a call where one
    prompt in 16 has 200 tokens, and the others 8 at most."""
    longest = round_up(max(lengths), step)
    most = round_up(int(np.quantile(lengths, 0.9)), step)
    if 2 * most <= longest:
        return most, longest
    return (longest,)


def _power(size: int) -> int:
    """Return the next power of two."""
    return 1 << max(size - 1, 0).bit_length()
