"""The programs of sampling, with abstract inputs and their work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from g2d_jax import mesh as meshes
from g2d_jax.models import lora
from g2d_jax.models.flops import attended, forward_flops, matmul_params
from g2d_jax.plan.program import Outputs, Program, fixed
from g2d_jax.plan.rewarding import rewards
from g2d_jax.plan.work import Work, device_bytes
from g2d_jax.records import SamplingParams
from g2d_jax.sampler.programs import Shapes
from g2d_jax.stages.context import Context

STOPS = 2  # tokens that end a response: no tokenizer is asked


@dataclass(frozen=True)
class Asked:
    """prompts: of the whole stage, each with `samples` responses; at_once: prompts of one call of the sampler.

    response: mean tokens of one, None for the most that may be.
    """

    prompts: float
    samples: int
    at_once: int
    sampling: ConfigDict
    response: int | None

    @property
    def mean(self) -> int:
        """Tokens of a response."""
        longest = int(self.sampling.max_new_tokens)
        return longest if self.response is None else min(self.response, longest)


def rollouts(
    context: Context,
    name: str,
    asked: Asked,
    params: Any,
    *,
    beside: tuple[Any, ...] = (),
    meanwhile: tuple[Any, ...] = (),
) -> Iterator[Program]:
    """From parameters to rewards. beside: what lies on the devices while the view is made, meanwhile: after that.

    What stands beside adapters is there all the time.
    """
    _, rest = lora.split(params)
    sampler = context.sampler()
    held = device_bytes(params)
    work = Work(1, 0.0, 2 * held, {"parameters": held})
    yield Program(name, "view", sampler.programs["view"], fixed(params), work, resident=beside)
    meanwhile = (*meanwhile, rest)
    at_once = min(asked.at_once, max(context.config.compute.responses_at_once // asked.samples, 1))
    sampling = SamplingParams(**{**asked.sampling.to_dict(), "stop_ids": tuple(range(STOPS))})
    shapes = sampler.shapes(at_once, at_once * asked.samples, [sampling], context.prompt_lengths)
    yield from _generation(context, name, asked, shapes, meanwhile)
    mean = context.config.data.max_prompt_length + asked.mean
    yield from rewards(context, name, asked.prompts * asked.samples, mean, meanwhile)


def _generation(
    context: Context, name: str, asked: Asked, shapes: Shapes, resident: tuple[Any, ...]
) -> Iterator[Program]:
    """The sampler's programs for these shapes, the cache at its widest."""
    sampler, config = context.sampler(), context.model_config
    mesh, jitted, prompt = sampler.mesh, sampler.programs, context.config.data.max_prompt_length
    state, prompts = sampler.abstract(shapes)
    responses, whole, ways = asked.prompts * asked.samples, device_bytes(state.cache), meshes.row_ways(mesh)
    parts = {"KV cache": whole}

    def host(*shape: int, kind: Any = np.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, kind, sharding=meshes.rows_sharding(mesh, shape))

    def inputs_of_insert(made: Outputs) -> tuple[Any, ...]:
        return state, made["prefill"], *facts

    def inputs_of_decode(made: Outputs) -> tuple[Any, ...]:
        return made["view"], made["insert"], notices

    flops = forward_flops(config, shapes.prompts * prompt, shapes.prompts * attended(prompt)) / mesh.size
    calls = asked.prompts / shapes.prompts
    inputs = host(shapes.prompts, shapes.columns[-1]), host(shapes.prompts), host(shapes.prompts, kind=np.bool_)
    work = Work(calls, flops, _weights(context), parts, prefilled=asked.prompts * prompt)
    run, beside = jitted["prefill"], (*resident, state)
    yield Program(name, "prefill", run, lambda made: (made["view"], prompts, *inputs), work, resident=beside)
    # A row's columns are written when a sample begins in it.
    chunks = responses * asked.mean / shapes.rows / sampler.chunk
    fresh = jax.tree.map(lambda x: host(*x.shape, kind=x.dtype), state.rows)
    facts = fresh, host(shapes.rows), host(shapes.rows), host(ways)
    work = Work(chunks, 0.0, whole * responses / shapes.rows / chunks, parts)
    yield Program(name, "insert", jitted["insert"], inputs_of_insert, work, resident=resident, also=("view",))
    steps, length = sampler.chunk, prompt + asked.mean / 2
    flops = forward_flops(config, shapes.rows * steps, shapes.rows * steps * length) / mesh.size
    moved = steps * (_weights(context) + whole * length / shapes.widths[-1])
    work = Work(chunks, flops, moved, parts, generated=responses * asked.mean)
    notices = jax.ShapeDtypeStruct((mesh.size,), np.int32, sharding=meshes.sharding(mesh, ("devices",), (mesh.size,)))
    static = {"filtered": shapes.filtered, "widths": shapes.widths[-1:]}
    yield Program(name, "decode", jitted["decode"], inputs_of_decode, work, static, steps, resident, also=("prefill",))


def _weights(context: Context) -> float:
    """Bytes of the matrices that one pass of the sampler reads on a device."""
    mesh = context.sampler().mesh
    return context.dtype.itemsize * matmul_params(context.model_config) / mesh.shape["tensor"] / mesh.shape["fsdp"]
