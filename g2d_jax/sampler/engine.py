"""The sampler: it decodes requests in batches and yields each rollout when it finishes.

One program runs over the whole mesh, across all processes. Every process follows the same schedule
(schedule.py) and yields the rollouts of rows on its own devices. A prompt is prefilled once, and
its samples begin in free rows. All rows decode together in chunks, and a sample keeps its row.
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
"""Most prompt tokens that a device prefills at once. Fewer already keep its matrix units busy, and
each token takes memory that the cache could use."""


@dataclass(frozen=True)
class Rule:
    """A platform's rule for the rows of a call.

    samples: samples of a call for each row, one after the other. least: fewest rows. tail: the last
    samples move to rows / tail rows; 0: they stay. long: chunks of the longest response above which
    they move. least_tail: fewest rows of the tail.
    """

    samples: int = 1
    least: int = 1
    tail: int = 0
    long: int = 0
    least_tail: int = 0


# Savings of CPU time in a warm call of a 0.14M-parameter model on two cores, without compiling.
RULES = {
    "cpu": Rule(
        samples=4,  # 28 % for 512 samples of 48 tokens, 38 % for 256 of up to 512
        least=32,  # 26 % for 64 samples of up to 144 tokens; 64 rows save 13 % if all have 48
        tail=4,  # 21 % for 64 and 256 samples of up to 256 tokens, 38 % for 64 of up to 512
        long=8,  # shorter calls take at most 0.3 s, and compiling the tail 2 s
        least_tail=8,
    )
}
"""Rules by platform. On GPUs a simulated tail saves 0 to 37 %, but it needs extra cache where the
cache fills the memory. No device has run it."""


@dataclass(slots=True)
class Usage:
    """The cost of generation so far. row_steps: decode steps times rows; generated / row_steps is
    the share that yielded a token.

    Counts cover all processes, seconds only this one.
    """

    prefilled: int = 0
    generated: int = 0
    row_steps: int = 0
    seconds: float = 0.0


class Engine(Protocol):
    """A source of responses: `Sampler`, or a server (remote.py). All processes make each call with
    the same arguments. `config.Engine` has the settings that choose between them."""

    ready: int
    """Samples that have ended in the running `generate` and are not yielded yet."""

    def to_sampler_params(self, model: Decoder) -> Any:
        """Convert a policy to the engine's own form."""

    def generate(
        self,
        sampler_params: Any,
        requests: Iterable[Request],
        purpose: str,
        shapes: Shapes | None = None,
    ) -> Iterator[Rollout]:
        """Yield every sample as it finishes, in one of the processes.

        A sample's settings are `Request.params_of`. Seed, purpose, problem id, visit and sample
        index determine its random numbers.
        """
        ...


class Sampler:
    """A sampler of one model's shape over all devices of a `meshes.sampling` mesh.

    max_num_seqs: most rows that decode together. chunk: decode steps between two checks of the
    rows. prefill_rows: prompts of one prefill. dtype: of activations and cache. attention: kernel
    for prompts, see models/kernels.py. decode_kernel: of decode steps, None for the platform's.
    decode: converts ids to text, for requests with stop strings. programs: a cache of compiled
    programs, shared by samplers of equal settings, such as points of a sweep. A sample's noise
    depends on its key alone; samples are bit-equal for the same shapes and mesh.
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
            # Layers with a sliding window use the kernel of packed rows.
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
        """Convert a model, once per policy, to the form that decode reads: in dtype, split over the
        sampling mesh."""
        written: Decoder = self.view(model)(model)
        return written

    def view(self, model: Decoder) -> Program:
        """Return the program of `to_sampler_params`. model: arrays or shapes."""
        settings = self.config.without_codes, self.mesh, jnp.dtype(self.dtype)
        return Program("view", self._programs.get_or_make(_to_sampler_params, *settings), (model,))

    def abstract_params(self, model: Decoder) -> Decoder:
        """Return the shapes of `to_sampler_params`' result. model: shapes."""
        shapes = jax.eval_shape(self.view(model).function, model)
        return meshes.placed(shapes, _layout(self.config.without_codes, self.mesh))

    def programs(self, params: Decoder, shapes: Shapes) -> dict[tuple[Any, ...], Program]:
        """Map the name and size (None if there is only one) of each program of a call to the
        program.

        params: from `to_sampler_params` or `abstract_params`.
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
        """Choose the shapes to compile for. requests, samples: their numbers; lengths: tokens of
        the prompts.

        most_rows: most rows that decode together in this call, None for max_num_seqs; `RULES` may
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
        # With experts, each device of the tensor axis has a row for every token sent to any of
        # them.
        together = self.mesh.shape["tensor"] if self.config.num_experts else 1
        fitting = max(PREFILL_TOKENS // (columns[-1] * together), 1)
        widest = columns[-1] + round_up(longest, 16)
        if self.stacked:
            step = COLUMN_BLOCK if widest > COLUMN_BLOCK else 16
            widest = round_up(widest, step)
        elif self.decode_kernel == "pallas":  # it reads only each row's own columns, at any width
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
        """Return the device state and prompts as ShapeDtypeStructs with shardings."""
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

        All processes make the call, with the same requests. sampler_params: from
        `to_sampler_params`. purpose: determines the random numbers, with the seed, problem id,
        visit and sample index. shapes: of the compiled programs, None to choose them for these
        requests. Raises ValueError, before anything is sampled, for an empty prompt, no samples,
        ids out of the vocabulary, or too small shapes. Raises Preempted if any process received a
        stop signal.
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
        """Return why a request cannot be sampled; "" if it can."""
        ids, params = request.prompt_ids, request.params
        vocab_size, problem = self.config.vocab_size, f"problem {request.problem_id}"
        if not len(ids) or request.num_samples < 1:
            return f"{problem}: a request needs a prompt and at least one sample"
        if ids.min() < 0 or ids.max() >= vocab_size:
            return f"{problem}: prompt ids must be in [0, {vocab_size})"
        if params.stop and self.decode is None:
            return f"{problem}: stop strings need a sampler with decode"
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
        # By row: the search for stop strings in its sample.
        self.watches: dict[int, Watch] = {}
        self.has_stops = any(request.params.stop for request in requests)
        self.rows = shapes.rows
        self.programs = sampler.programs(sampler_params, shapes)
        self.state: State
        self.prompts: Prompts
        self.state, self.prompts = self.programs["empty", None]()

    def run(self) -> Iterator[Rollout]:
        """Prefill, insert, decode a chunk, collect, until nothing is left.

        Finished rollouts are yielded while the next chunk runs.
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
            # Devices carry each process's stop request to all processes, see `processes.stop_code`.
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
        """Yield a chunk's finished rollouts, with the number that remain in `ready`."""
        for number, rollout in enumerate(finished, 1):
            self.sampler.ready = len(finished) - number
            yield rollout

    def _refill(self) -> None:
        """Move waiting samples into rows at rest."""
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
        # A place without a request has one token of padding, so that no row of the softmax is
        # empty.
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
            if stop and decode is not None:  # `generate` has checked decode
                self.watches[row] = Watch(decode, stop)
        inputs = fresh, order.ravel(), places.ravel(), counts
        self.state = self.programs["insert", None](self.state, self.prompts, *inputs)

    def _describe(self, fresh: Rows[np.ndarray], row: int, sample: Sample) -> None:
        """Write a new sample's settings to the host arrays."""
        request, params = sample.request, sample.request.params_of(sample.number)
        names = request.problem_id, request.visit, sample.number
        fresh.random_keys[row] = named_keys.key_data(self.sampler.seed, self.purpose, *names)
        fresh.position[row], fresh.remaining[row] = len(request.prompt_ids), params.max_new_tokens
        fresh.temperature[row] = params.temperature
        fresh.top_k[row] = params.top_k
        fresh.top_p[row] = params.top_p
        fresh.stop_ids[row, : len(params.stop_ids)] = params.stop_ids

    def _fit_rows(self, running: int) -> None:
        """Move the last samples to the fewer rows of the tail."""
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
        """Add the chunk's tokens to this process's rows, and return the rollouts that are
        complete."""
        # The only wait for the device: these small arrays are on all devices and show which rows to
        # read.
        counts, stopped, interrupt_code = jax.device_get(emitted[3:])
        stopped = np.array(stopped)  # a copy, in which rows with a stop string are marked below
        processes.raise_if_stopped(int(interrupt_code))
        steps = int(counts.max()) if self.sampler.ends_early else self.sampler.chunk
        self.sampler.usage.row_steps += steps * len(counts)
        self.sampler.usage.generated += int(counts.sum())
        running = self.schedule.rows
        ends: dict[int, int] = {}  # row -> tokens up to its stop string
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
            if sample and self.tokens[row]:  # rows of other processes have none here
                rollouts.append(self._rollout(row, sample, bool(stopped[row]), ends.get(row)))
        return rollouts

    def _agree(self, mine: dict[int, int]) -> dict[int, int]:
        """Put rows to rest whose stop string any process has found; return them with their ends.

        Each process searches the text of its own rows, but all must free the same rows.
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
        """Build the rollout of a row's tokens. end: tokens of its response, None for all."""
        parts = zip(*self.tokens.pop(row), strict=True)
        tokens, logprobs, entropies = (np.concatenate(part)[:end] for part in parts)
        request = sample.request
        names = request.problem_id, request.visit, sample.number
        reason: Literal["stop", "length"] = "stop" if stopped else "length"
        return Rollout(*names, request.prompt_ids, tokens, logprobs, entropies, reason)


def _own_rows(*arrays: jax.Array) -> Iterator[tuple[int, list[np.ndarray]]]:
    """Yield this process's parts of arrays [S, C]: the first row, and each array's rows from there.

    Rows on several devices belong to the first one's process.
    """
    for shards in zip(*(array.addressable_shards for array in arrays), strict=True):
        if shards[0].replica_id == 0:
            yield shards[0].index[0].start or 0, [np.asarray(shard.data) for shard in shards]


def _layout(config: ModelConfig, mesh: Mesh) -> Decoder:
    """Return the NamedSharding of each of a sampler's parameters."""
    # On TPU, XLA copies nothing out of a stack that a scan reads, and compiles one layer for all.
    # Elsewhere unstacked layers avoid the copies.
    if platform_of(mesh) == "tpu":
        return decoder.shardings(config, mesh)
    return decoder.unstacked_shardings(config, mesh)


def _to_sampler_params(config: ModelConfig, mesh: Mesh, dtype: jnp.dtype) -> Wrapped:
    """Return the jitted `to_sampler_params` of this config."""
    is_stacked = platform_of(mesh) == "tpu"
    convert = lora.to_sampler_params if is_stacked else lora.to_unstacked_sampler_params
    layout = _layout(config, mesh)

    def moved(stack: jax.Array, where: NamedSharding) -> jax.Array:
        one = NamedSharding(where.mesh, PartitionSpec(*where.spec[1:]))
        return jax.lax.map(lambda layer: jax.lax.with_sharding_constraint(layer, one), stack)

    # Plans and compilation records use this function's name.
    def view(model: Decoder) -> Decoder:
        converted = convert(model, dtype)
        if is_stacked:  # else XLA gathers all layers of an array before it splits them again
            converted.blocks = jax.tree.map(moved, converted.blocks, layout.blocks)
        return converted

    return jax.jit(view, out_shardings=layout)


def _empty(
    config: ModelConfig, mesh: Mesh, dtype: jnp.dtype
) -> Callable[..., tuple[State, Prompts]]:
    """Return `programs.empty` for the mesh's devices."""
    platform = platform_of(mesh)
    # XLA on CPU converts the whole array to float32 and back to write one column of bfloat16.
    cache_dtype = jnp.dtype(jnp.float32) if platform == "cpu" else dtype
    stacked = platform == "tpu"
    return partial(programs.empty, config, stacked=stacked, dtype=dtype, cache_dtype=cache_dtype)


def _abstract(
    config: ModelConfig, mesh: Mesh, dtype: jnp.dtype, shapes: Shapes
) -> tuple[State, Prompts]:
    """Return the result of `Sampler.abstract`."""

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
    # Results have the same sharding for all shapes: rows are always split over all ways.
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
        # Separate, so that a call's first chunk does not wait for this one to compile.
        "decode_tail": jax.jit(decode, **decoded),
    }


def _columns(lengths: Sequence[int], step: int) -> tuple[int, ...]:
    """Choose the columns of prefills for prompts of these lengths. One size fits the longest. If
    most are far shorter, a second size serves those: it took 57 % of the CPU time where one prompt
    in 16 had 200 tokens and the others at most 8."""
    longest = round_up(max(lengths), step)
    most = round_up(int(np.quantile(lengths, 0.9)), step)
    if 2 * most <= longest:
        return most, longest
    return (longest,)


def _power(size: int) -> int:
    """Return the next power of two."""
    return 1 << max(size - 1, 0).bit_length()
