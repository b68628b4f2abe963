"""The programs of sampling, with abstract inputs and their work."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from g2d_jax import mesh as meshes
from g2d_jax.models import lora
from g2d_jax.models.attention import KEY_COLUMNS, VALUE_COLUMNS
from g2d_jax.models.decode import Cache
from g2d_jax.models.flops import attended, forward_flops, read_params
from g2d_jax.rollouts.workload import Workload
from g2d_jax.sampler.capacity import LOGIT, launched_layers
from g2d_jax.sampler.sampling import readings
from g2d_jax.sampler.simulated import Decoded
from g2d_jax.session.program import Outputs, Program, Work, device_bytes, fixed
from g2d_jax.session.session import Session
from g2d_jax.session.training_programs import mean_prompt, policy_shapes

STATES = "recurrent states"
"""Names what a cache holds beside keys and values in plans."""


def sampling_programs(
    session: Session,
    name: str,
    workload: Workload,
    *,
    resident_during_view: tuple[Any, ...] = (),
    resident_during_generation: tuple[Any, ...] = (),
) -> Iterator[Program]:
    """Yield the programs from parameters to responses; none where a server samples.

    resident_during_view: arrays on the devices while the sampler's parameters are made;
    resident_during_generation: after that. The frozen parameters below adapters are always
    resident.
    """
    if session.sampling.server is not None:
        return
    params = policy_shapes(session)
    _, rest = lora.partition(params)
    held = device_bytes(params)
    work = Work(1, 0.0, 2 * held, {"parameters": held})
    run = session.sampling.sampler.to_sampler_params_program()
    yield Program(name, "view", run, fixed(params), work, resident=resident_during_view)
    yield from _generation(session, name, workload, (*resident_during_generation, rest))


def _generation(
    session: Session,
    name: str,
    workload: Workload,
    resident: tuple[Any, ...],
) -> Iterator[Program]:
    """Yield the sampler's programs for these shapes; decode with the cache at each of its widths
    that is a program."""
    sampler, shapes, mesh = session.sampling.sampler, workload.shapes, session.sampling.sampler.mesh
    run = sampler.programs

    def params(outputs: Outputs) -> Any:
        return sampler.on_sampling_mesh(outputs["view"])

    def host(*shape: int, kind: Any = np.int32) -> jax.ShapeDtypeStruct:
        return meshes.abstract_rows(mesh, shape, kind)

    def inputs_of_prefill(columns: int, outputs: Outputs) -> tuple[Any, ...]:
        host_arrays = (
            host(shapes.prompts, columns),
            host(shapes.prompts),
            host(shapes.prompts, kind=np.bool_),
        )
        return params(outputs), outputs["empty"][1], *host_arrays

    def inputs_of_insert(outputs: Outputs) -> tuple[Any, ...]:
        state, _ = outputs["empty"]
        fresh = jax.tree.map(lambda x: host(*x.shape, kind=x.dtype), state.rows)
        return (
            state,
            outputs["prefill"],
            fresh,
            host(shapes.rows),
            host(shapes.rows),
            host(meshes.row_ways(mesh)),
        )

    def inputs_of_decode(state: str, outputs: Outputs) -> tuple[Any, ...]:
        where = meshes.sharding(mesh, ("devices",), (mesh.size,))
        return (
            params(outputs),
            outputs[state],
            jax.ShapeDtypeStruct((mesh.size,), np.int32, sharding=where),
        )

    state, _ = sampler.abstract(shapes)
    parts = {"KV cache": device_bytes((state.cache.keys, state.cache.values))}
    if state.cache.memories:
        parts[STATES] = device_bytes(state.cache.memories)
    work = Work(1, 0.0, sum(parts.values()), parts)
    yield Program(
        name,
        "empty",
        run["empty"],
        fixed(),
        work,
        {"shapes": shapes},
        resident=resident,
        also=("view",),
    )
    for columns in shapes.columns:
        work = _prefill_work(session, workload, columns, parts)
        inputs = partial(inputs_of_prefill, columns)
        yield Program(name, "prefill", run["prefill"], inputs, work, resident=(*resident, state))
    decoded = workload.decoded(sampler, mean_prompt(session))
    work = _insert_work(session, workload, decoded, parts)
    yield Program(
        name, "insert", run["insert"], inputs_of_insert, work, resident=resident, also=("view",)
    )
    if len(shapes.widths) > 1:
        number = jax.ShapeDtypeStruct((), np.int32, sharding=meshes.replicated(mesh))
        keys, values = state.cache.keys[0], state.cache.values[0]
        for array, axis in ((keys, KEY_COLUMNS), (values, VALUE_COLUMNS)):
            others = tuple(x for x in jax.tree.leaves(state) if x is not array)
            yield Program(
                name,
                "resize",
                run["resize"],
                fixed(array, (number, number), number),
                _resize_work(workload, state.cache, array, parts),
                {"axis": axis},
                resident=(*resident, others),
                also=("view", "prefill"),
            )
    work = _decode_work(session, workload, decoded, parts)
    for widths in sampler.decoded_widths(shapes):
        static = {"filters": shapes.filters, "widths": widths}
        yield Program(
            name,
            "decode",
            run["decode"],
            partial(inputs_of_decode, "insert"),
            work,
            static,
            sampler.chunk,
            resident,
            also=("prefill",),
        )
    if shapes.tail:
        # What is decoded in them is in the work of the other rows.
        nothing = Work(0, 0.0, 0, parts)
        taken = partial(_inputs_of_take_rows, host(shapes.tail))
        yield Program(name, "take_rows", run["take_rows"], taken, nothing, resident=resident)
        inputs = partial(inputs_of_decode, "take_rows")
        yield Program(
            name, "decode_tail", run["decode_tail"], inputs, nothing, static, resident=resident
        )


def _inputs_of_take_rows(order: Any, outputs: Outputs) -> tuple[Any, ...]:
    return outputs["insert"], order


def _prefill_work(
    session: Session, workload: Workload, columns: int, parts: Mapping[str, int]
) -> Work:
    """Count the work of the prefills of so many columns: each of these sizes has an equal share of
    the prompts."""
    shapes, share = workload.shapes, 1 / len(workload.shapes.columns)
    model = session.model_config
    tokens = shapes.prompts * columns
    # The head is not computed: nothing is drawn from a prompt's inner tokens.
    flops = forward_flops(model, tokens, shapes.prompts * attended(columns))
    flops -= 2.0 * model.vocab_size * model.hidden_size * tokens
    calls = share * workload.prompts / shapes.prompts
    prefilled = share * workload.prompts * mean_prompt(session)
    moved = _weights(session)
    return Work(
        calls, flops / session.sampling.sampler.mesh.size, moved, parts, prefilled=prefilled
    )


def _insert_work(
    session: Session, workload: Workload, decoded: Decoded, parts: Mapping[str, int]
) -> Work:
    """Count the work of insertions, one a chunk of decode: a row's columns are written when a
    sample begins in it."""
    chunks = workload.calls * decoded.steps / session.sampling.sampler.chunk
    return Work(
        chunks, 0.0, sum(parts.values()) * workload.responses / workload.shapes.rows / chunks, parts
    )


def _resize_work(workload: Workload, cache: Cache, array: Any, parts: Mapping[str, int]) -> Work:
    """Count the work of moving keys or values to another width: a call's rows grow through all
    widths."""
    calls = workload.calls * (len(workload.shapes.widths) - 1) * len(cache.keys)
    return Work(calls, 0.0, 2 * device_bytes(array), parts)


def _decode_work(
    session: Session, workload: Workload, decoded: Decoded, parts: Mapping[str, int]
) -> Work:
    """Count the work of decode with the cache at one of its widths, of which each has an equal
    share of the chunks."""
    sampler, shapes, model = session.sampling.sampler, workload.shapes, session.model_config
    steps = sampler.chunk
    row_steps = shapes.rows * steps
    drawn = readings(shapes.filters) * LOGIT * row_steps * model.vocab_size / sampler.mesh.size
    share = 1 / len(sampler.decoded_widths(shapes))
    # What recurrent layers keep is read and written.
    cached = parts["KV cache"] * decoded.read / shapes.widths[-1] + 2 * parts.get(STATES, 0)
    return Work(
        share * workload.calls * decoded.steps / steps,
        forward_flops(model, row_steps, row_steps * decoded.live) / sampler.mesh.size,
        steps * _weights(session, shapes.rows) + drawn,
        parts,
        generated=share * workload.responses * workload.mean,
        responses=share * workload.responses,
        rows=shapes.rows,
        cached=steps * cached,
        columns=decoded.read,
        layers=steps * launched_layers(model, sampler.mesh.shape["tensor"]),
    )


def _weights(session: Session, tokens: float = math.inf) -> float:
    """Count the bytes of the matrices that one pass of the sampler over so many tokens reads on a
    device."""
    mesh = session.sampling.sampler.mesh
    read = read_params(session.model_config, tokens / mesh.shape["data"])
    return session.compute.dtype.itemsize * read / mesh.shape["tensor"] / mesh.shape["fsdp"]
