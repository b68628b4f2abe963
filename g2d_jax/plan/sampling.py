"""The programs of sampling, with abstract inputs and their work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from g2d_jax import mesh as meshes
from g2d_jax.models import decoder, lora
from g2d_jax.models.flops import attended, forward_flops, matmul_params
from g2d_jax.plan.program import Outputs, Program, fixed
from g2d_jax.plan.rewarding import rewards
from g2d_jax.plan.work import Work, device_bytes
from g2d_jax.rollout.programs import empty_state
from g2d_jax.rollout.sampler import FIRST_WIDTH
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
    yield from _views(context, name, params, beside)
    meanwhile = (*meanwhile, rest)
    hosts = meshes.processes(context.mesh)
    at_once = min(asked.at_once, max(context.config.compute.responses_at_once // asked.samples, 1))
    mine = -(-at_once // hosts)  # of the prompts of a call, this host's
    yield _prefill(context, name, asked, mine, meanwhile)
    yield from _decode(context, name, asked, context.sampler().rows(mine * asked.samples), meanwhile)
    mean = context.config.data.max_prompt_length + asked.mean
    yield from rewards(context, name, asked.prompts * asked.samples, mean, meanwhile)


def _views(context: Context, name: str, params: Any, beside: tuple[Any, ...]) -> Iterator[Program]:
    """The policy as the sampler reads it; where there are several hosts, it is copied to each of them first."""
    sampler = context.sampler()
    if meshes.processes(context.mesh) > 1:
        held = device_bytes(params)
        work = Work(1, 0.0, 1.5 * held, {"parameters": held})
        yield Program(name, "cast", lora.decoded, fixed(params), work, {"dtype": context.dtype}, resident=beside)
        beside = (*beside, lora.split(params)[1])
        where = decoder.shardings(context.model_config.decoded, sampler.mesh)
        params = meshes.placed(jax.eval_shape(partial(lora.decoded, dtype=context.dtype), params), where)
    held = device_bytes(params)
    work = Work(1, 0.0, 2 * held, {"parameters": held})
    yield Program(name, "view", sampler.programs["view"], fixed(params), work, resident=beside)


def _prefill(context: Context, name: str, asked: Asked, mine: int, resident: tuple[Any, ...]) -> Program:
    sampler, config, mesh = context.sampler(), context.model_config, context.sampler().mesh
    prompt, rows = context.config.data.max_prompt_length, sampler.prompt_rows(mine)
    inputs = _host(mesh, rows, sampler.columns(prompt)), _host(mesh, rows)
    flops = forward_flops(config, rows * prompt, rows * attended(prompt)) / mesh.size
    calls = asked.prompts / meshes.processes(context.mesh) / rows
    work = Work(calls, flops, _weights(context), {}, prefilled=asked.prompts * prompt)
    return Program(
        name, "prefill", sampler.programs["prefill"], lambda made: (made["view"], *inputs), work, resident=resident
    )


def _decode(context: Context, name: str, asked: Asked, slots: int, resident: tuple[Any, ...]) -> Iterator[Program]:
    """Rows admitted into the cache at its widest, and a chunk of decode steps over it."""
    sampler, config, dtype = context.sampler(), context.model_config, context.dtype
    mesh, jitted, prompt = sampler.mesh, sampler.programs, context.config.data.max_prompt_length
    width = sampler.widest(prompt, asked.sampling.max_new_tokens)
    empty = jax.tree.map(
        lambda x: _host(mesh, *x.shape, kind=x.dtype),
        jax.eval_shape(lambda: empty_state(config, slots, FIRST_WIDTH, STOPS, dtype)),
    )
    fresh = jax.tree.map(lambda x: _host(mesh, *x.shape, kind=x.dtype), empty.rows)
    facts = _host(mesh, slots), _host(mesh, slots), fresh, _host(mesh)
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize
    ways = mesh.size if config.num_key_value_heads % mesh.shape["tensor"] == 0 else meshes.row_ways(mesh)
    whole = int(cache * slots * width / ways)
    responses = asked.prompts * asked.samples / meshes.processes(context.mesh)

    def admit(program: str, calls: float, arguments: Callable[[Outputs], tuple[Any, ...]]) -> Program:
        work = Work(calls, 0.0, 3.0 * whole, {"KV cache": whole})
        return Program(
            name, program, jitted[program], arguments, work, {"width": width}, resident=resident, also=("view",)
        )

    yield admit("admit", 1.0, lambda made: (empty, made["prefill"], *facts))
    yield admit("refill", responses / slots, lambda made: (made["admit"], made["prefill"], *facts))
    steps, length = sampler.chunk, prompt + asked.mean / 2
    flops = forward_flops(config, slots * steps, slots * steps * length) / mesh.size
    moved = steps * (_weights(context) + cache * slots * length / ways)
    generated = asked.prompts * asked.samples * asked.mean
    work = Work(responses * asked.mean / slots / steps, flops, moved, {"KV cache": whole}, generated=generated)
    static = {"filtered": asked.sampling.top_k > 0 or asked.sampling.top_p < 1}
    yield Program(
        name, "decode", jitted["decode"], lambda made: (made["view"], made["admit"]), work, static, steps, resident
    )


def _weights(context: Context) -> float:
    """Bytes of the matrices that one pass of the sampler reads on a device."""
    return 2 * matmul_params(context.model_config) / context.sampler().mesh.shape["tensor"]


def _host(mesh: Mesh, *shape: int, kind: Any = np.int32) -> jax.ShapeDtypeStruct:
    """What the host hands to all devices."""
    return jax.ShapeDtypeStruct(shape, kind, sharding=meshes.replicated(mesh))
