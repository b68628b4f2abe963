"""The programs of sampling, with abstract inputs and their work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from g2d_jax import mesh as meshes
from g2d_jax.models import lora
from g2d_jax.models.flops import attended, forward_flops, matmul_params
from g2d_jax.sampler.capacity import bytes_saved
from g2d_jax.sampler.programs import Shapes
from g2d_jax.stages.programs.program import Outputs, Program, Work, device_bytes, fixed
from g2d_jax.stages.runtime import Runtime


@dataclass(frozen=True)
class Asked:
    """The sampling workload of a stage. prompts: of the whole stage, in so many calls, each with `samples` responses;
    shapes: that its programs are compiled for; longest: tokens that a response can have; response: those of a mean one,
    None for the longest; weights: of the sampler, as in `Sampler.view`."""

    prompts: float
    calls: float
    samples: int
    shapes: Shapes
    longest: int
    response: int | None
    weights: str = ""

    @property
    def mean(self) -> int:
        """The tokens of a mean response."""
        return min(self.response or self.longest, self.longest)

    @property
    def steps(self) -> float:
        """The decode steps of the whole stage: at the end of a call rows wait for its longest response."""
        waves = self.prompts * self.samples / self.calls / self.shapes.rows
        return self.calls * (max(waves - 1, 0) * self.mean + self.longest)


def rollouts(
    runtime: Runtime,
    name: str,
    workload: Asked,
    params: Any,
    *,
    prefix: str = "",
    viewed: bool = False,
    beside: tuple[Any, ...] = (),
    meanwhile: tuple[Any, ...] = (),
) -> Iterator[Program]:
    """Yield the programs from parameters to responses. beside: arrays on the devices while the view is made, meanwhile:
    after that.

    The frozen parameters beside adapters are always resident. prefix: of the programs' names, where a stage samples
    twice. viewed: whether the stage has the program of the sampler's weights already.
    """
    _, rest = lora.partition(params)
    view = "view" if viewed else f"{prefix}view"
    if not viewed:
        held = device_bytes(params)
        work = Work(1, 0.0, 2 * held, {"parameters": held})
        yield Program(name, view, runtime.sampler().viewing(workload.weights), fixed(params), work, resident=beside)
    yield from _generation(runtime, name, workload, prefix, view, (*meanwhile, rest))


def _generation(
    runtime: Runtime, name: str, workload: Asked, prefix: str, view: str, resident: tuple[Any, ...]
) -> Iterator[Program]:
    """Yield the sampler's programs for these shapes; decode with the cache at each of its widths that is a program."""
    sampler, config, shapes = runtime.sampler(), runtime.model_config, workload.shapes
    mesh, jitted, prompt = sampler.mesh, sampler.programs, runtime.mean_prompt
    empty, prefill, insert, decode = (prefix + kind for kind in ("empty", "prefill", "insert", "decode"))

    def host(*shape: int, kind: Any = np.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, kind, sharding=meshes.rows_sharding(mesh, shape))

    def inputs_of_prefill(columns: int, outputs: Outputs) -> tuple[Any, ...]:
        host_arrays = host(shapes.prompts, columns), host(shapes.prompts), host(shapes.prompts, kind=np.bool_)
        return outputs[view], outputs[empty][1], *host_arrays

    def inputs_of_insert(outputs: Outputs) -> tuple[Any, ...]:
        state, _ = outputs[empty]
        fresh = jax.tree.map(lambda x: host(*x.shape, kind=x.dtype), state.rows)
        return state, outputs[prefill], fresh, host(shapes.rows), host(shapes.rows), host(meshes.row_ways(mesh))

    run, static = jitted["empty"], {"shapes": shapes}
    state, _ = sampler.abstract(shapes)
    whole = device_bytes(state.cache)
    parts = {"KV cache": whole}
    yield Program(name, empty, run, fixed(), Work(1, 0.0, whole, parts), static, resident=resident, also=(view,))
    for columns in shapes.columns:
        flops = forward_flops(config, shapes.prompts * columns, shapes.prompts * attended(columns)) / mesh.size
        share = 1 / len(shapes.columns)
        work = Work(
            share * workload.prompts / shapes.prompts,
            flops,
            _weights(runtime, workload.weights),
            parts,
            prefilled=share * workload.prompts * prompt,
        )
        yield Program(
            name,
            prefill,
            jitted["prefill"],
            partial(inputs_of_prefill, columns),
            work,
            resident=(*resident, state),
        )
    # A row's columns are written when a sample begins in it.
    responses = workload.prompts * workload.samples
    chunks = workload.steps / sampler.chunk
    work = Work(chunks, 0.0, whole * responses / shapes.rows / chunks, parts)
    yield Program(name, insert, jitted["insert"], inputs_of_insert, work, resident=resident, also=(view,))
    steps, length = sampler.chunk, prompt + workload.mean / 2
    flops = forward_flops(config, shapes.rows * steps, shapes.rows * steps * length) / mesh.size
    moved = steps * (_weights(runtime, workload.weights) + whole * length / shapes.widths[-1])
    widths = sampler.decoded_widths(shapes)
    notices = jax.ShapeDtypeStruct((mesh.size,), np.int32, sharding=meshes.sharding(mesh, ("devices",), (mesh.size,)))
    for active_widths in widths:
        share = 1 / len(widths)
        work = Work(
            share * chunks,
            flops,
            moved,
            parts,
            generated=share * responses * workload.mean,
            responses=share * responses,
            rows=shapes.rows,
        )
        yield Program(
            name,
            decode,
            jitted["decode"],
            lambda outputs: (outputs[view], outputs[insert], notices),
            work,
            {"filtered": shapes.filtered, "widths": active_widths},
            steps,
            resident,
            also=(prefill,),
        )


def _weights(runtime: Runtime, weights: str) -> float:
    """Count the bytes of the matrices that one pass of the sampler reads on a device. weights: as of `Sampler.view`."""
    mesh, model, itemsize = runtime.sampler().mesh, runtime.model_config.held(weights), runtime.dtype.itemsize
    read = itemsize * matmul_params(model) - bytes_saved(model, itemsize)
    return read / mesh.shape["tensor"] / mesh.shape["fsdp"]
