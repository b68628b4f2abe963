"""An update that was not finite, computed once more from its dump: which numbers are not, and where they begin.

    dump ─► parameters and batch on this machine's devices ─► loss, gradients, log-probabilities ─► tables

The folder is all it takes: neither the work directory, nor the model, nor the data are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from g2d_jax import canonical, storage
from g2d_jax import mesh as meshes
from g2d_jax.models import decoder, lora
from g2d_jax.models.config import Llama3Rope, Lora, ModelConfig
from g2d_jax.models.decoder import Decoder
from g2d_jax.stages import offline, online, starting
from g2d_jax.stages.sick import told
from g2d_jax.tracking import Screen
from g2d_jax.training import objectives
from g2d_jax.training.checkpoint import flatten
from g2d_jax.training.dump import Dump, read_dump, versions
from g2d_jax.training.objectives import Compute, Objective
from g2d_jax.training.step import accumulate, make_scorer
from g2d_jax.workdir import absolute

SHOWN = 20  # rows of a table; of the rest only the number is told

Place = tuple[int, int, int]
"""Micro-batch, row, and column or response, from 0."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What came out here. recorded, found: loss and grad_norm then and now. micro_batches: those of each.

    inputs: array of the batch -> places of its values that are not finite. responses: (micro-batch, row, response) ->
    how many of its tokens, and of these how many have a log-probability that is not finite. parameters: name -> how
    many elements, and of these how many are not finite, in the parameter and in its gradient.
    """

    recorded: dict[str, float]
    found: dict[str, float]
    micro_batches: list[dict[str, float]]
    inputs: dict[str, list[Place]]
    responses: dict[Place, tuple[int, int]]
    parameters: dict[str, tuple[int, int, int]]

    @property
    def reproduced(self) -> bool:
        """Whether the update is not finite here either."""
        return not all(math.isfinite(value) for value in self.found.values())


def replay(
    folder: storage.PathLike, *, objective: Callable[[Compute], Objective] | None = None, mesh: Mesh | None = None
) -> Replay:
    """Compute a dump's update again and show what is not finite in it.

    objective: the stage's own, where it was given from Python. mesh: the devices to use, in place of all of them.
    Raises ValueError for a folder that is no dump, and for one whose loss is not known here.
    """
    dump = read_dump(absolute(folder))
    config, model = canonical.from_dict(dump.record["config"]), _model(dump.record["model"])
    stage, mesh = config.stages[dump.record["stage"]], _mesh(config) if mesh is None else mesh
    if dump.record["own_objective"] and objective is None:
        raise ValueError(
            f"{folder}: the loss of stage {dump.record['stage']!r} was given from Python, and a command cannot know "
            "it: call g2d_jax.replay.replay(folder, objective=…) with what the run was given"
        )
    attention = config.compute.get("attention", "auto")  # a dump made before there was this setting lacks it
    compute = Compute(mesh, jnp.dtype(config.dtype), config.compute.remat, attention)
    made = objective(compute) if objective is not None else objective_of(compute, stage)
    where = decoder.shardings(model, mesh)
    params = dump.params(decoder.abstract_on(model, mesh, starting.base_dtype(config)))
    found = _computed(dump, made, params, where, mesh, stage, compute)
    _show(dump, found, mesh, Screen())
    return found


def objective_of(compute: Compute, stage: ConfigDict) -> Objective:
    """The loss of a stage that trains."""
    if stage.kind == "sft":
        return objectives.sft(compute)
    if stage.kind == "offline":
        return offline.objective_of(compute, stage)
    return online.objective_of(compute, stage)


def _model(values: dict[str, Any]) -> ModelConfig:
    scaling, adapters = values["rope_scaling"], values["lora"]
    own = {"rope_scaling": scaling and Llama3Rope(**scaling), "lora": adapters and Lora(**adapters)}
    return ModelConfig(**{**values, **own})


def _mesh(config: ConfigDict) -> Mesh:
    """The config's mesh where these devices allow it, else all of them in the one way that always goes."""
    try:
        return meshes.make_mesh(**config.mesh)
    except ValueError:
        return meshes.make_mesh()


def _computed(
    dump: Dump, objective: Objective, params: Decoder, where: Any, mesh: Mesh, stage: ConfigDict, compute: Compute
) -> Replay:
    arrays = padded(dump.arrays, meshes.row_ways(mesh))
    trained, rest = lora.split(params)

    def update(
        params: Decoder, rest: Decoder | None, arrays: dict[str, jax.Array], count: jax.Array
    ) -> tuple[jax.Array, jax.Array, Decoder]:
        grads, loss, _ = accumulate(objective, params, arrays, count, rest)
        grads = jax.lax.with_sharding_constraint(grads, lora.split(where)[0])
        return loss, optax.tree.norm(grads), jax.tree.map(_not_finite, grads)

    run = jax.jit(update, out_shardings=meshes.replicated(mesh))

    def at(first: int, count: int) -> tuple[dict[str, float], Any]:
        """Micro-batches from `first` on, rolled to the front: one program does all of them, and each."""
        rolled = {name: meshes.put_rows(mesh, np.roll(x, -first, axis=0), axis=1) for name, x in arrays.items()}
        number = meshes.put(np.asarray(count, np.int32), meshes.replicated(mesh))
        loss, norm, sick = jax.device_get(jax.block_until_ready(run(trained, rest, rolled, number)))
        return {"loss": float(loss), "grad_norm": float(norm)}, sick

    whole, sick = at(0, dump.count)
    values = flatten(jax.device_get(jax.jit(lambda tree: jax.tree.map(_not_finite, tree))(params)))
    gradients, sizes = flatten(sick), {name: leaf.size for name, leaf in flatten(params).items()}
    metrics = dump.record["metrics"]
    return Replay(
        recorded={name: float(metrics[name]) for name in ("loss", "grad_norm")},
        found=whole,
        micro_batches=[at(i, 1)[0] for i in range(dump.count)],
        inputs=_sick_inputs(dump),
        responses=_sick_responses(dump, _logprobs(arrays, dump.count, params, mesh, stage, compute)),
        parameters={name: (sizes[name], int(values[name]), int(gradients.get(name, 0))) for name in sizes},
    )


def _not_finite(array: jax.Array) -> jax.Array:
    return jnp.sum(~jnp.isfinite(array), dtype=jnp.int32)


def padded(arrays: dict[str, np.ndarray], ways: int) -> dict[str, np.ndarray]:
    """[N, R, …] with empty rows added until R is a multiple of `ways`: other devices than those of the run."""
    more = -next(iter(arrays.values())).shape[1] % ways
    return {
        name: np.pad(x, [(0, 0), (0, more), *[(0, 0)] * (x.ndim - 2)], constant_values=-1 if name == "sequence" else 0)
        for name, x in arrays.items()
    }


def _logprobs(
    arrays: dict[str, np.ndarray], count: int, params: Decoder, mesh: Mesh, stage: ConfigDict, compute: Compute
) -> np.ndarray:
    """Of all tokens, float32 [N, R, T], at the temperature that the loss has them at."""
    temperature = stage.sampling.temperature if stage.kind == "online" and stage.loss == "grpo" else 1.0
    on_mesh = {name: meshes.put_rows(mesh, x, axis=1) for name, x in arrays.items()}
    number = meshes.put(np.asarray(count, np.int32), meshes.replicated(mesh))
    return np.asarray(make_scorer(compute)(params, on_mesh, number, temperature=float(temperature))[0])


def _sick_inputs(dump: Dump) -> dict[str, list[Place]]:
    found = {}
    for name, array in dump.arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array[: dump.count]).all():
            found[name] = [(int(n), int(r), int(c)) for n, r, c in np.argwhere(~np.isfinite(array[: dump.count]))]
    return found


def _sick_responses(dump: Dump, logprobs: np.ndarray) -> dict[Place, tuple[int, int]]:
    found = {}
    sequence = dump.arrays["sequence"][: dump.count]
    sick = ~np.isfinite(logprobs[: dump.count, : sequence.shape[1]]) & (sequence >= 0)
    for n, r in np.argwhere(sick.any(axis=2)):
        for place in np.unique(sequence[n, r][sick[n, r]]):
            mine = sequence[n, r] == place
            found[int(n), int(r), int(place)] = (int(mine.sum()), int((sick[n, r] & mine).sum()))
    return found


def _show(dump: Dump, found: Replay, mesh: Mesh, screen: Screen) -> None:
    record, here = dump.record, versions()
    then_mesh = " x ".join(f"{axis} {size}" for axis, size in record["mesh"].items())
    now_mesh = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    rows = [[name, str(found.recorded[name]), str(found.found[name])] for name in ("loss", "grad_norm")]
    rows += [["mesh", then_mesh, now_mesh]]
    rows += [["device", str(record["devices"][0]), str(mesh.devices.flat[0].device_kind)]]
    rows += [[name, version, here.get(name, "")] for name, version in record["versions"].items()]
    screen.table(f"{record['stage']}, update {record['step']}", ["", "recorded", "here"], rows)
    micro = [[i, str(one["loss"]), str(one["grad_norm"]), _finite(one)] for i, one in enumerate(found.micro_batches)]
    screen.table("micro-batches", ["micro-batch", "loss", "gradient norm", "finite"], micro)
    inputs = [[name, len(places), *places[0]] for name, places in found.inputs.items()]
    _table(
        screen,
        "values of the batch that are not finite",
        ["array", "values", "first: micro-batch", "row", "column or response"],
        inputs,
    )
    responses = [[*place, *counts] for place, counts in found.responses.items()]
    _table(
        screen,
        "responses with log-probabilities that are not finite",
        ["micro-batch", "row", "response", "tokens", "not finite"],
        responses,
    )
    parameters = [[name, *counts] for name, counts in found.parameters.items() if counts[1] or counts[2]]
    _table(
        screen,
        "parameters that are not finite, or whose gradient is not",
        ["parameter", "elements", "not finite", "gradient not finite"],
        parameters,
    )
    screen.say(
        f"reproduced: the update is not finite here either ({told(**found.found)})"
        if found.reproduced
        else f"not reproduced: the update is finite here ({told(**found.found)}); it may take the devices, the mesh or "
        "the versions of the run"
    )


def _finite(numbers: dict[str, float]) -> str:
    return "yes" if all(math.isfinite(number) for number in numbers.values()) else "no"


def _table(screen: Screen, title: str, columns: list[str], rows: list[list[Any]]) -> None:
    """At most SHOWN rows; where there are none a line says so."""
    if not rows:
        screen.say(f"{title}: none")
        return
    more = f" (the first {SHOWN} of {len(rows)})" if len(rows) > SHOWN else ""
    screen.table(title + more, columns, rows[:SHOWN])
