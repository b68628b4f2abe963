"""The sampling workload of a stage: its prompts, responses and call shapes, and the programs from
parameters to responses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from g2d_jax.config import Collect, Online
from g2d_jax.models import lora
from g2d_jax.models.decoder import Decoder
from g2d_jax.models.flops import attended, forward_flops, read_params
from g2d_jax.records import SamplingParams
from g2d_jax.runtime.mesh import device_bytes
from g2d_jax.runtime.program import Program, Work
from g2d_jax.sampler import simulated
from g2d_jax.sampler.capacity import LOGIT, launched_layers
from g2d_jax.sampler.programs import Shapes
from g2d_jax.sampler.sampling import readings
from g2d_jax.session.policies import policy_shapes
from g2d_jax.session.session import Session
from g2d_jax.session.windows import window_at


@dataclass(frozen=True)
class Workload:
    """The sampling workload of a stage.

    shapes: of the compiled programs, equal for all calls. rng_stream: determines the random
    numbers. greedy: whether each prompt also gets a greedy response. needs_logprobs: whether a loss
    needs the sampler's log-probabilities.

    For counting work: prompts, calls: of the whole stage. response: mean tokens of a response, None
    for the most.
    """

    session: Session
    params: SamplingParams
    num_generations: int
    shapes: Shapes
    rng_stream: str
    prompts: float = 0
    calls: float = 0
    response: int | None = None
    greedy: bool = False
    needs_logprobs: bool = False
    policy: Decoder | None = None
    living: tuple[Any, ...] = ()

    @property
    def samples(self) -> int:
        """The responses to a prompt, the greedy one included."""
        return self.num_generations + self.greedy

    @property
    def mean(self) -> int:
        """The tokens of a mean response."""
        return min(self.response or self.params.max_new_tokens, self.params.max_new_tokens)

    @property
    def responses(self) -> float:
        """The responses of the whole stage."""
        return self.prompts * self.samples

    def programs(self) -> Iterator[Program]:
        """Yield the programs from parameters to responses, with their work; none if a server
        samples."""
        session, shapes = self.session, self.shapes
        if not self.prompts or session.sampling.server is not None:
            return
        sampler = session.sampling.sampler
        policy = self.policy or policy_shapes(session)
        _, frozen = lora.partition(policy)
        params = sampler.abstract_params(policy)
        once = Work(1, temporary=device_bytes(policy))
        yield replace(sampler.view(policy), work=once, resident=(*self.living, frozen))
        resident = *self.living, frozen, params, *sampler.abstract(shapes)
        work = self._work()
        for (kind, size), program in sampler.programs(params, shapes).items():
            if kind == "empty":  # it creates the sampler's state
                yield replace(program, work=Work(1), resident=resident[:-2])
                continue
            done = work.get(kind, Work(0))
            if kind == "prefill":
                done = self._prefill(size)
            yield replace(program, work=done, resident=resident)

    def _prefill(self, columns: int) -> Work:
        """Count the work of the prefills of this many columns. Each size is assumed to have an
        equal share of the prompts."""
        shapes, model = self.shapes, self.session.model_config
        share = self.prompts / len(shapes.columns)
        tokens = shapes.prompts * columns
        # Without the head: prefill computes no logits.
        flops = forward_flops(model, tokens, shapes.prompts * attended(columns))
        flops -= 2.0 * model.vocab_size * model.hidden_size * tokens
        return Work(
            share / shapes.prompts,
            flops / self.session.sampling.sampler.mesh.size,
            self._weights(),
            prefilled=share * self.session.problems.mean_prompt,
        )

    def _work(self) -> dict[str, Work]:
        """Count the work of the other programs by name; `decode` includes that of `decode_tail`."""
        session, shapes, model = self.session, self.shapes, self.session.model_config
        sampler = session.sampling.sampler
        steps, mesh = sampler.chunk, sampler.mesh
        cache = sampler.abstract(shapes)[0].cache
        memories = device_bytes(cache.memories)
        keys_and_values = device_bytes((cache.keys, cache.values))
        decoded = self.decoded(session.problems.mean_prompt)
        chunks = self.calls * decoded.steps / steps
        # A sample that begins writes all columns of its row.
        written = (keys_and_values + memories) * self.responses / shapes.rows / chunks
        row_steps = shapes.rows * steps
        drawn = readings(shapes.filters) * LOGIT * row_steps * model.vocab_size / mesh.size
        # The state of recurrent layers is read and written.
        cached = keys_and_values * decoded.read / shapes.width + 2 * memories
        decode = Work(
            chunks,
            forward_flops(model, row_steps, row_steps * decoded.live) / mesh.size,
            steps * self._weights(shapes.rows) + drawn,
            generated=self.responses * self.mean,
            responses=self.responses,
            rows=shapes.rows,
            cached=steps * cached,
            columns=decoded.read,
            layers=steps * launched_layers(model, mesh.shape["tensor"]),
        )
        insert = Work(chunks, moved=written)
        return {"insert": insert, "decode": decode}

    def _weights(self, tokens: float = math.inf) -> float:
        """Count the bytes of the matrices that a sampler pass over this many tokens reads on a
        device."""
        session = self.session
        shape = session.sampling.sampler.mesh.shape
        read = read_params(session.model_config, tokens / shape["data"])
        return session.compute.dtype.itemsize * read / shape["tensor"] / shape["fsdp"]

    def decoded(self, prompt: float) -> simulated.Decoded:
        """Simulate the decode steps of a call, with random lengths if a mean response is set.
        prompt: mean tokens of a prompt."""
        sampler, most = self.session.sampling.sampler, self.params.max_new_tokens
        samples = max(round(self.responses / self.calls), 1)
        drawn = np.full(samples, most)
        if self.mean < most:
            drawn = simulated.lengths(samples, self.mean, most)
        read = simulated.reader(sampler, self.shapes)
        width = self.shapes.width
        return simulated.decoded(round(prompt), drawn, self.shapes.rows, sampler.chunk, width, read)


def prompts_per_call(session: Session, samples: int) -> int:
    """Count the prompts that several batches may have in one call. samples: of each prompt."""
    return max(session.config.compute.generation_batch_size // samples, 1)


def workload_of(
    session: Session, name: str, stage: Online | Collect, response: int | None = None
) -> Workload:
    """Compute a stage's workload. A call has as many batches of a window, or parts, as
    compute.generation_batch_size allows. response: mean tokens of a response, None for the most."""
    if isinstance(stage, Online):
        batch = stage.prompts_per_step
        prompts = stage.steps / stage.num_iterations * stage.prompts_per_step
        most = window_at(0, stage).batches * batch
    else:
        batch, prompts = stage.part, min(stage.prompts, session.problems.counts["train"])
        most = prompts
    samples, params = stage.num_generations, stage.sampling.params(session.sampling.stop_ids)
    together = min(max(prompts_per_call(session, samples) // batch, 1) * batch, most)
    shapes = session.sampling.shapes(
        stage,
        together,
        samples,
        params,
    )
    calls = -(-prompts // together)
    return Workload(
        session,
        params,
        samples,
        shapes,
        f"{stage.kind}/{name}",
        prompts,
        calls,
        response,
        needs_logprobs=isinstance(stage, Online) and bool(stage.clip.importance_cap),
    )
