"""A batched sampler: requests go in, finished rollouts come out; batching, refill and the cache are its own business.

A prompt is prefilled once and fanned out to its samples. Rows decode together in jitted chunks; between chunks the
host takes finished rows out and fills their slots with waiting samples. All rows are aligned at their newest token, so
a decode step writes one column of the cache, and the cache is as wide as the longest row that is alive.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from g2d_jax import keys as named_keys
from g2d_jax import mesh as meshes
from g2d_jax import processes
from g2d_jax.compilation import Programs
from g2d_jax.models.config import ModelConfig
from g2d_jax.models.decoder import Decoder, unstacked_shardings
from g2d_jax.models.kernels import LANES, Setting, choose, platform_of
from g2d_jax.models.lora import unstacked
from g2d_jax.records import Request, Rollout
from g2d_jax.rollout import programs
from g2d_jax.rollout.programs import Prefilled, Rows, State

FIRST_WIDTH = 64  # cache columns of a state without rows


def ladder(size: int, smallest: int) -> int:
    """The next size up in smallest * (1, 1.5, 2, 3, 4, 6, …): few shapes to compile, at most half of it unused."""
    step = smallest
    while step < size:
        if step + step // 2 >= size:
            return step + step // 2
        step *= 2
    return step


@dataclass(slots=True)
class Usage:
    """What generation cost so far. slot_steps: decode steps times rows; generated / slot_steps is slot efficiency."""

    prefilled: int = 0
    generated: int = 0
    slot_steps: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _Sample:
    """One sample under way: its request, and what has come of it so far."""

    request: Request
    sample: int
    prompt_row: int
    tokens: list[np.ndarray] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    entropies: list[np.ndarray] = field(default_factory=list)
    generated: int = 0

    @property
    def length(self) -> int:
        return len(self.request.prompt_ids) + self.generated

    def rollout(self, stop_reason: Literal["stop", "length"]) -> Rollout:
        return Rollout(
            problem_id=self.request.problem_id,
            visit=self.request.visit,
            sample=self.sample,
            prompt_ids=self.request.prompt_ids,
            token_ids=np.concatenate(self.tokens),
            logprobs=np.concatenate(self.logprobs),
            entropies=np.concatenate(self.entropies),
            stop_reason=stop_reason,
        )


class Sampler:
    """Samples from a model.

    slots: rows decoded together. chunk: decode steps between two looks at the rows. prefill_rows: prompts of one
    prefill. dtype: of activations and cache. attention: of prompts, see models/kernels.py. programs: where another
    sampler's of the same settings, such as another point's of a sweep, may lie; the attribute has them by name. Their
    shapes come from short ladders of sizes. Samples of one key are bit-equal for the same shapes and mesh; the noise
    always is.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        *,
        seed: int,
        slots: int = 256,
        chunk: int = 16,
        prefill_rows: int = 32,
        dtype: jnp.dtype = jnp.float32,  # type: ignore[assignment]
        attention: Setting = "auto",
        programs: Programs | None = None,
    ) -> None:
        if min(slots, chunk, prefill_rows) < 1:
            raise ValueError(f"slots, chunk and prefill_rows must be positive, got {slots}, {chunk}, {prefill_rows}")
        self.config, self.mesh, self.seed, self.dtype = config, mesh, seed, dtype
        self.slots, self.chunk, self.prefill_rows = slots, chunk, prefill_rows
        self.usage = Usage()
        self.kernel = choose(
            attention,
            platform=platform_of(mesh),
            dtype=dtype,
            head_dim=config.head_dim,
            length=LANES,
            layout="sequence",
        )
        self.programs = (programs or Programs()).take(_jitted, config, mesh, chunk, jnp.dtype(dtype), self.kernel)

    def view(self, model: Decoder) -> Decoder:
        """Give the model as decode reads it: in dtype, one set of arrays a layer. Once per policy."""
        return self.programs["view"](model)

    def columns(self, prompt: int) -> int:
        """Columns of a prefill whose longest prompt has so many tokens."""
        columns = ladder(prompt, 16)
        return -(-columns // LANES) * LANES if self.kernel == "splash" else columns

    def rows(self, samples: int) -> int:
        """Rows for so many samples: a power of two up to the configured number, divisible over the mesh."""
        wanted, ways = min(self.slots, max(_power(samples), 8)), meshes.row_ways(self.mesh)
        return -(-wanted // ways) * ways

    def prompt_rows(self, requests: int) -> int:
        """Prompts of one prefill in a call with so many requests."""
        return min(self.prefill_rows, _power(requests))

    def widest(self, prompt: int, new_tokens: int) -> int:
        """The most cache columns that a prompt of so many tokens and its response come to need."""
        return -(-(self.columns(prompt) + new_tokens + self.chunk) // 16) * 16

    def generate(self, view: Decoder, requests: Iterable[Request], purpose: str) -> Iterator[Rollout]:
        """Yield every request's rollouts as they finish, in no particular order.

        view: see `view`. purpose: names the randomness together with the seed, problem id, visit and sample index.
        Raises ValueError, before anything is sampled, for an empty prompt, no samples or ids out of the vocabulary.
        """
        waiting = list(requests)
        for request in waiting:
            if len(request.prompt_ids) == 0 or request.num_samples < 1:
                raise ValueError(f"problem {request.problem_id}: a request needs a prompt and at least one sample")
            if not 0 <= request.prompt_ids.min() <= request.prompt_ids.max() < self.config.vocab_size:
                raise ValueError(f"problem {request.problem_id}: prompt ids must lie in [0, {self.config.vocab_size})")
        if waiting:
            yield from _Session(self, view, waiting, purpose).run()


class _Session:
    """One call of generate: a queue of requests, the rows under way, and the device state."""

    def __init__(self, sampler: Sampler, view: Decoder, requests: Sequence[Request], purpose: str) -> None:
        self.sampler, self.view, self.purpose = sampler, view, purpose
        self.queue = deque(requests)
        self.prefilled: Prefilled | None = None  # the prompts of `fanout`, the last batch that was run
        self.prompt_columns = 0
        self.fanout: deque[_Sample] = deque()
        params = [request.params for request in requests]
        self.stops = max(1, *(len(p.stop_ids) for p in params))
        self.filtered = any(p.top_k > 0 or p.top_p < 1.0 for p in params)
        self.prompt_rows = sampler.prompt_rows(len(requests))
        self.widest = max(sampler.widest(len(r.prompt_ids), r.params.max_new_tokens) for r in requests)
        slots = self._slots(sum(r.num_samples for r in requests))
        self.rows: list[_Sample | None] = [None] * slots
        self.column, self.width = 0, FIRST_WIDTH
        self.state = self._empty(slots)

    def run(self) -> Iterator[Rollout]:
        """Refill, decode a chunk, harvest, until nothing is left."""
        while True:
            processes.check_stop()
            processes.mark(f"sampling {self.purpose}")
            started = time.perf_counter()
            self._refill()
            if not any(self.rows):
                return
            self.state, emitted = self.sampler.programs["decode"](self.view, self.state, filtered=self.filtered)
            finished = list(self._harvest(programs.Emitted(*(np.asarray(x) for x in jax.device_get(emitted)))))
            self.sampler.usage.seconds += time.perf_counter() - started
            yield from finished

    def _slots(self, samples: int) -> int:
        return self.sampler.rows(samples)

    def _empty(self, slots: int) -> State:
        sampler = self.sampler
        state = programs.empty_state(sampler.config, slots, self.width, self.stops, sampler.dtype)
        return jax.device_put(state, meshes.replicated(sampler.mesh))

    def _refill(self) -> None:
        """Give free rows to waiting samples; make room in the cache; give up half of the rows when few are alive."""
        while True:
            free = self.rows.count(None)
            if free and not self.fanout and self.queue:
                self._prefill_next()
            taken = [self.fanout.popleft() for _ in range(min(free, len(self.fanout)))]
            if taken:
                self._arrange(len(self.rows), taken)
                continue
            alive = len(self.rows) - free
            if alive and self._slots(alive) <= len(self.rows) // 2:
                self._arrange(self._slots(alive), [])
            elif alive and self.column + self.sampler.chunk > self.width:
                self._arrange(len(self.rows), [])
            return

    def _prefill_next(self) -> None:
        """Run the next prompts through the model and queue their samples."""
        batch = [self.queue.popleft() for _ in range(min(self.prompt_rows, len(self.queue)))]
        columns = self.sampler.columns(max(len(request.prompt_ids) for request in batch))
        tokens = np.zeros((self.prompt_rows, columns), np.int32)
        lengths = np.ones(self.prompt_rows, np.int32)  # a row without a request is one token of padding
        for row, request in enumerate(batch):
            lengths[row] = len(request.prompt_ids)
            tokens[row, columns - lengths[row] :] = request.prompt_ids
            self.fanout.extend(_Sample(request, sample, row) for sample in range(request.num_samples))
        everywhere = meshes.replicated(self.sampler.mesh)
        self.prefilled = self.sampler.programs["prefill"](
            self.view, meshes.put(tokens, everywhere), meshes.put(lengths, everywhere)
        )
        self.prompt_columns = columns
        self.sampler.usage.prefilled += int(sum(len(request.prompt_ids) for request in batch))

    def _arrange(self, slots: int, taken: Sequence[_Sample]) -> None:
        """Move the living rows into `slots` rows and put the samples taken into free ones."""
        assert self.prefilled is not None
        if slots == len(self.rows):  # rows stay where they are
            order = list(range(slots))
        else:
            living = [row for row, sample in enumerate(self.rows) if sample is not None]
            order = (living + [row for row, sample in enumerate(self.rows) if sample is None])[:slots]
        self.rows = [self.rows[row] for row in order]
        source, fresh = np.full(slots, -1, np.int32), self._blank(slots)
        free = [row for row, sample in enumerate(self.rows) if sample is None]
        for row, sample in zip(free, taken, strict=False):
            self.rows[row] = sample
            source[row] = sample.prompt_row
            self._describe(fresh, row, sample)
        longest = max(sample.length for sample in self.rows if sample is not None)
        self.column = max(longest, self.prompt_columns if taken else 0)
        width = min(ladder(max(self.column + self.sampler.chunk, self.prompt_columns), 64), self.widest)
        same = width == self.width and slots == self.state.hidden.shape[0]
        program = self.sampler.programs["refill" if same else "admit"]
        self.width = width
        host = (np.asarray(order, np.int32), source, fresh, np.asarray(self.column, np.int32))
        everywhere = meshes.replicated(self.sampler.mesh)
        device = jax.tree.map(lambda x: meshes.put(x, everywhere), host)
        self.state = program(self.state, self.prefilled, *device, width=width)

    def _blank(self, slots: int) -> Rows[np.ndarray]:
        zeros = np.zeros(slots, np.int32)
        return Rows(
            keys=np.zeros((slots, 2), np.uint32),
            position=zeros.copy(),
            left=zeros.copy(),
            temperature=np.ones(slots, np.float32),
            top_k=zeros.copy(),
            top_p=np.ones(slots, np.float32),
            stop_ids=np.full((slots, self.stops), -1, np.int32),
            response=zeros.copy(),
        )

    def _describe(self, fresh: Rows[np.ndarray], row: int, sample: _Sample) -> None:
        """Write one new sample's facts into the host arrays."""
        request, params = sample.request, sample.request.params
        values = {
            "keys": named_keys.key_data(
                self.sampler.seed, self.purpose, request.problem_id, request.visit, sample.sample
            ),
            "position": len(request.prompt_ids),
            "left": params.max_new_tokens,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
        }
        for name, value in values.items():
            getattr(fresh, name)[row] = value
        fresh.stop_ids[row, : len(params.stop_ids)] = params.stop_ids

    def _harvest(self, emitted: programs.Emitted[np.ndarray]) -> Iterator[Rollout]:
        """Add the chunk's tokens to their samples and yield those that are finished."""
        steps = int(emitted.counts.max())
        self.column += steps
        self.sampler.usage.slot_steps += steps * len(self.rows)
        self.sampler.usage.generated += int(emitted.counts.sum())
        for row, sample in enumerate(self.rows):
            if sample is None:
                continue
            count = int(emitted.counts[row])
            sample.tokens.append(emitted.tokens[row, :count])
            sample.logprobs.append(emitted.logprobs[row, :count])
            sample.entropies.append(emitted.entropies[row, :count])
            sample.generated += count
            if emitted.stopped[row] or sample.generated >= sample.request.params.max_new_tokens:
                self.rows[row] = None
                yield sample.rollout("stop" if emitted.stopped[row] else "length")


def _jitted(config: ModelConfig, mesh: Mesh, chunk: int, dtype: jnp.dtype, kernel: Setting) -> dict[str, Any]:
    """A sampler's programs. admit makes a state of another shape, refill changes one in place."""

    def view(model: Decoder) -> Decoder:
        return unstacked(model, dtype)

    admit = partial(programs.admit, mesh=mesh)
    return {
        "view": jax.jit(view, out_shardings=unstacked_shardings(config.decoded, mesh)),
        "prefill": jax.jit(partial(programs.prefill, mesh=mesh, dtype=dtype, attention=kernel)),
        "admit": jax.jit(admit, static_argnames="width"),
        "refill": jax.jit(admit, static_argnames="width", donate_argnums=0),
        "decode": jax.jit(
            partial(programs.decode, chunk=chunk, mesh=mesh, dtype=dtype), static_argnames="filtered", donate_argnums=1
        ),
    }


def _power(size: int) -> int:
    """The next power of two."""
    return 1 << max(size - 1, 0).bit_length()
