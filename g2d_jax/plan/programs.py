"""Every program that a run compiles, with abstract inputs of the largest shapes that its settings allow.

The functions, their shardings and their shapes come from the code that the run executes: a stage's batch is packed by
its own code from made-up responses of the greatest length, and only the arrays' shapes are kept.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from g2d_jax import mesh as meshes
from g2d_jax.data.packing import Group, Packed
from g2d_jax.models import decoder, lora
from g2d_jax.models.flops import attended, forward_flops, matmul_params, train_flops
from g2d_jax.plan.rewarding import scorings
from g2d_jax.plan.work import Work, device_bytes, problems, rounds
from g2d_jax.records import Preference, Problem, Rollout, Score, ScoredRollout, Verdict
from g2d_jax.rollout import programs as sampling
from g2d_jax.rollout.sampler import FIRST_WIDTH
from g2d_jax.stages import batches, diagnosis, offline, online, sft, starting
from g2d_jax.stages.context import Context
from g2d_jax.stages.supply import compares
from g2d_jax.training import objectives, signal
from g2d_jax.training.dropout import with_keys
from g2d_jax.training.objectives import Objective
from g2d_jax.training.optimizer import make_optimizer
from g2d_jax.training.step import abstract_batch, abstract_state, make_fresh_state, make_train_step

STOPS = 2  # tokens that end a response: no tokenizer is asked
Outputs = Mapping[str, Any]  # program -> its results' tree of ShapeDtypeStructs with shardings


@dataclass(frozen=True)
class Program:
    """One jitted function of a stage.

    arguments: from the outputs of the stage's programs before it. dynamic: trips of its outermost loop, where the
    text of the program does not tell. resident: trees of arrays that lie on the devices meanwhile and are not among its
    arguments; also: programs before it whose results do so too. work: what it does in the stage.
    """

    stage: str
    name: str
    run: Any
    arguments: Callable[[Outputs], tuple[Any, ...]]
    work: Work
    static: Mapping[str, Any] = field(default_factory=dict)
    dynamic: int = 1
    resident: tuple[Any, ...] = ()
    also: tuple[str, ...] = ()

    def beside(self, outputs: Outputs) -> int:
        """Bytes a device of what is resident."""
        return sum(device_bytes(tree) for tree in (*self.resident, *(outputs[name] for name in self.also)))

    def lower(self, outputs: Outputs) -> Any:
        """The program for these shapes, ready to be compiled."""
        return self.run.lower(*self.arguments(outputs), **self.static)


def programs_of(context: Context, name: str, response: int | None = None) -> list[Program]:
    """The programs of a stage, in the order in which they run.

    context: with the planned machine's mesh, and the model's shape. response: mean tokens of a response for the work
    to be done, max_new_tokens if None; shapes are those of the longest.
    """
    stage = context.config.stages[name]
    make = {"sft": _sft, "online": _online, "collect": _collect, "offline": _offline}.get(stage.kind, _evaluation)
    programs = list(make(context, name, stage, response))
    # Reward models are loaded when they are first needed, and stay.
    rewards = tuple(scoring.model for scoring in scorings(context.config, context.mesh))
    return [
        program if program.name == "reward" else dataclasses.replace(program, resident=(*program.resident, *rewards))
        for program in programs
    ]


# Stages


def _sft(context: Context, name: str, stage: ConfigDict, _: int | None) -> Iterator[Program]:
    half = stage.max_length // 2
    pair = _ids(stage.max_length - half), _ids(half)
    packed = context.pack(sft.as_groups([pair] * stage.batch_size), context.row_length(stage.max_length))
    yield from _training(context, name, stage, objectives.sft(context.compute), packed, stage.steps)


def _online(context: Context, name: str, stage: ConfigDict, response: int | None) -> Iterator[Program]:
    config = context.config
    row_length = context.row_length(online.longest(config, stage))
    bare, filled = (context.pack(groups, row_length, places=online.places(stage)) for groups in _groups(context, stage))
    params, state = _params_and_state(context, stage)
    reference = (params,) if compares(stage) and not stage.reference_sync else ()
    calls = rounds(stage.steps, stage.sync_every)
    prompts = stage.prompts_per_step * stage.steps // stage.num_iterations
    asked = _Asked(prompts, stage.num_generations, -(-prompts // max(calls, 1)), stage.sampling, response)
    held = (state.opt_state, *reference) if meshes.processes(context.mesh) == 1 else (state, *reference)
    yield from _sampling(context, name, asked, params, beside=held, meanwhile=(state, *reference))
    share = _share(stage.sampling.max_new_tokens, config.data.max_prompt_length, response)
    wanted = len(reference) + int(stage.reference_sync or bool(stage.importance_cap))
    if compares(stage) or stage.importance_cap:
        yield _scoring(context, name, bare, wanted * stage.steps / stage.num_iterations * share, (state,))
    objective = context.objectives.get(name, lambda compute: online.objective_of(compute, stage))(context.compute)
    yield from _training(context, name, stage, objective, filled, stage.steps * share, resident=reference)


def _collect(context: Context, name: str, stage: ConfigDict, response: int | None) -> Iterator[Program]:
    if stage.rollouts != "sample":
        return
    asked = _Asked(stage.prompts, stage.num_generations, min(stage.part, stage.prompts), stage.sampling, response)
    yield from _sampling(context, name, asked, _policy(context))


def _offline(context: Context, name: str, stage: ConfigDict, response: int | None) -> Iterator[Program]:
    config = context.config
    source = config.stages.get(stage.preferences)
    longest_response = source.sampling.max_new_tokens if source else stage.probe_sampling.max_new_tokens
    pairs = _pairs(source) if source else offline.SCORED_AT_ONCE
    prompt, side = _ids(config.data.max_prompt_length), _ids(longest_response)
    pair = Preference("0", "", "", "", prompt, side, side, 1.0, 0.0)
    row_length = context.row_length(config.data.max_prompt_length + 2 * longest_response)
    share = _share(longest_response, config.data.max_prompt_length, response, responses=2)

    def packed(count: int) -> Packed:
        return context.pack(offline.batch([pair] * count, np.zeros((count, 2), np.float32)), row_length)

    scored = min(offline.SCORED_AT_ONCE, pairs)
    times = (2 if stage.diagnose else 1) * pairs / scored * share
    yield _scoring(context, name, packed(scored), times, ())
    objective = offline.objective_of(context.compute, stage)
    if stage.diagnose and stage.signal_pairs:
        draws = diagnosis.signal_draws(context.order(pairs, f"signal/{name}"), stage.signal_pairs)
        if len(draws) > 1:
            yield _gradient(context, name, objective, packed(len(draws[0])), len(draws) * share)
    batch = min(stage.batch_size, pairs)
    steps = pairs * stage.epochs // batch
    if stage.probe.every:
        params, state = _params_and_state(context, stage, steps)
        many, held = stage.probe.prompts, (state.opt_state if meshes.processes(context.mesh) == 1 else state)
        times = many * (steps // stage.probe.every + 2)
        asked = _Asked(times, stage.probe.num_generations, many, stage.probe_sampling, response)
        yield from _sampling(context, name, asked, params, beside=(held,), meanwhile=(state,))
    yield from _training(context, name, stage, objective, packed(batch), steps * share, total=steps)


def _evaluation(context: Context, name: str, stage: ConfigDict, response: int | None) -> Iterator[Program]:
    """An evaluate or a select stage."""
    count = problems(context.config, stage.split)
    if stage.kind == "evaluate":
        policies, samples = len(stage.policies), stage.num_generations + int(stage.greedy)
    else:
        source = context.config.stages[stage.policy]
        kept = {*source.get("keep", ()), source.get("steps", 1)}
        policies, samples = len(stage.steps or kept), stage.num_generations
    asked = _Asked(count * policies, samples, count, stage.sampling, response)
    yield from _sampling(context, name, asked, _policy(context))


# Training


def _optimizer(stage: ConfigDict, total: int = 0) -> Any:
    settings = stage.optimizer.to_dict()
    return make_optimizer(**settings, total_steps=max(total, stage.get("steps", 0), settings["warmup_steps"] + 1))[0]


def _policy(context: Context) -> Any:
    """A policy's parameters, adapters included."""
    return decoder.abstract_on(context.model_config, context.mesh, starting.base_dtype(context.config))


def _params_and_state(context: Context, stage: ConfigDict, total: int = 0) -> tuple[Any, Any]:
    offload = context.config.compute.offload_optimizer
    return _policy(context), abstract_state(context.model_config, _optimizer(stage, total), context.mesh, offload)


def _training(
    context: Context,
    name: str,
    stage: ConfigDict,
    objective: Objective,
    packed: Packed,
    calls: float,
    *,
    total: int = 0,
    resident: tuple[Any, ...] = (),
) -> Iterator[Program]:
    """The first state, and the train step."""
    config, mesh = context.model_config, context.mesh
    optimizer = _optimizer(stage, total)
    params, state = _params_and_state(context, stage, total)
    trained, rest = lora.split(params)
    held, changed = (device_bytes(params), device_bytes(state)), device_bytes(trained)
    once = Work(1, 0.0, 2 * changed + held[1], {"parameters": held[0], "state": held[1]})
    fixed = () if rest is None else (rest,)
    offload = context.config.compute.offload_optimizer
    fresh = make_fresh_state(config, optimizer, mesh, offload)
    yield Program(name, "fresh state", fresh, _fixed(trained), once, resident=fixed)
    remat = 1.0 if context.config.compute.remat == "none" else 4 / 3
    count = packed.arrays["tokens"].shape[0]
    flops = remat * train_flops(config, packed.used, packed.attended) / mesh.size
    weights = 2 * matmul_params(config) / mesh.shape["tensor"]
    moved = 2 * held[1] + packed.count * 3 * weights
    parts = {"parameters": held[0], "optimiser": held[1] - changed, "gradients": changed}
    parts["activations"] = activation_bytes(context, packed)
    step = make_train_step(objective, optimizer, config, mesh, offload)
    work = Work(calls, flops, moved, parts, trained=packed.used * calls)
    inputs = abstract_batch(with_keys(packed, config, context.config.seed, name, 0), mesh)
    yield Program(
        name, "train step", step, _fixed(state, *inputs, *fixed), work, {}, min(count, packed.count), resident
    )


def _scoring(context: Context, name: str, packed: Packed, calls: float, resident: tuple[Any, ...]) -> Program:
    params = _policy(context)
    flops = forward_flops(context.model_config, packed.used, packed.attended) / context.mesh.size
    weights = 2 * matmul_params(context.model_config) / context.mesh.shape["tensor"]
    parts = {"parameters": device_bytes(params)}
    work = Work(calls, flops, packed.count * weights, parts, scored=packed.used * calls)
    inputs = abstract_batch(packed, context.mesh)
    program = context.score_program()
    return Program(
        name, "log-probs", program, _fixed(params, *inputs), work, {"temperature": 1.0}, packed.count, resident
    )


def _gradient(context: Context, name: str, objective: Objective, packed: Packed, calls: float) -> Program:
    """The measure of a gradient's signal before offline training."""
    config, mesh = context.model_config, context.mesh
    trained, rest = lora.split(_policy(context))
    norm = jax.ShapeDtypeStruct((), jnp.float32, sharding=meshes.replicated(mesh))
    sums = signal.GradientSums(trained, norm)  # type: ignore[arg-type]  # shapes in place of arrays
    held, changed = device_bytes((trained, rest)), device_bytes(trained)
    flops = 4 / 3 * train_flops(config, packed.used, packed.attended) / mesh.size
    parts = {"parameters": held, "gradients": 2 * changed}
    work = Work(calls, flops, held + 2 * changed, parts, trained=packed.used * calls)
    inputs = (*abstract_batch(packed, mesh), *(() if rest is None else (rest,)))
    run = signal.make_gradient_sums(objective, config, mesh)
    return Program(name, "gradient", run, _fixed(sums, trained, *inputs), work, {}, packed.count)


def _groups(context: Context, stage: ConfigDict) -> tuple[list[Group], list[Group]]:
    """A batch of an online stage as its own code makes it: prompts and responses of the greatest length, half right.

    Without and with the log-probabilities of other policies.
    """
    prompt, length = _ids(context.config.data.max_prompt_length), stage.sampling.max_new_tokens
    tokens, floats = _ids(length), np.zeros(length, np.float32)
    draws = [(Problem(str(i), "", "0"), 0) for i in range(stage.prompts_per_step)]

    def response(problem: Problem, i: int) -> ScoredRollout:
        right = i < (stage.num_generations + 1) // 2
        score = Score(float(right), Verdict.CORRECT if right else Verdict.INCORRECT)
        return ScoredRollout(Rollout(problem.id, 0, i, prompt, tokens, floats, floats, "stop"), "", score)

    groups = [[response(problem, i) for i in range(stage.num_generations)] for problem, _ in draws]
    made = batches.make(context.config.seed, stage, draws, groups, {"main": False}).groups
    count = sum(len(response.token_ids) for group in made for response in group.responses)
    others = np.zeros(count, np.float32)
    reference, trainer = (others if needed else None for needed in (compares(stage), stage.importance_cap))
    return made, batches.fill(stage, made, reference, trainer)


def activation_bytes(context: Context, packed: Packed) -> int:
    """What a micro-batch's layers keep for the backward pass on one device, by formula: see `saved_per_token`."""
    _, rows, length = packed.arrays["tokens"].shape
    tokens = rows * length // meshes.row_ways(context.mesh)
    kept = saved_per_token(context.model_config, context.config.compute.remat, context.mesh.shape["tensor"])
    return int(tokens * kept * context.dtype.itemsize)


def saved_per_token(config: Any, remat: str, tensor: int = 1) -> float:
    """Numbers that all layers keep for each token: their input; "attention" its output too; "none" all they multiply.

    Without remat: both norms' results, queries, keys and values before and after rotation, attention's output, and
    three arrays of the feed-forward width.
    """
    e, heads, kv = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    width, key_width, m = heads * config.head_dim / tensor, kv * config.head_dim / tensor, config.intermediate_size
    each = {"full": e, "attention": e + width, "none": 4 * e + 3 * width + 3 * key_width + 3 * m / tensor}[remat]
    return config.num_hidden_layers * each


# Sampling


@dataclass(frozen=True)
class _Asked:
    """prompts: of the whole stage, each with `samples` responses; at_once: prompts of one call of the sampler."""

    prompts: float
    samples: int
    at_once: int
    sampling: ConfigDict
    response: int | None


def _sampling(
    context: Context,
    name: str,
    asked: _Asked,
    params: Any,
    *,
    beside: tuple[Any, ...] = (),
    meanwhile: tuple[Any, ...] = (),
) -> Iterator[Program]:
    """From parameters to rollouts. beside: what lies on the devices while the view is made, meanwhile: after that."""
    sampler, config, dtype = context.sampler(), context.model_config, context.dtype
    mesh, hosts = sampler.mesh, meshes.processes(context.mesh)
    at_once = min(asked.at_once, max(context.config.compute.responses_at_once // asked.samples, 1))
    mine = -(-at_once // hosts)
    slots, prompt_rows = sampler.rows(mine * asked.samples), sampler.prompt_rows(mine)
    prompt, new = context.config.data.max_prompt_length, asked.sampling.max_new_tokens
    columns, width = sampler.columns(prompt), sampler.widest(prompt, new)
    jitted, weights = sampler.programs, 2 * matmul_params(config)
    held = device_bytes(params)
    copied = params
    if hosts > 1:
        work = Work(1, 0.0, 1.5 * held, {"parameters": held})
        yield Program(name, "cast", context.cast_program(), _fixed(params), work, resident=beside)
        copied = decoder.abstract_on(config.base, mesh, dtype)
    work = Work(1, 0.0, 2 * device_bytes(copied), {"parameters": device_bytes(copied)})
    yield Program(name, "view", jitted["view"], _fixed(copied), work, resident=beside)
    everywhere = meshes.replicated(mesh)

    def host(*shape: int, kind: Any = np.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, kind, sharding=everywhere)

    prompts = host(prompt_rows, columns), host(prompt_rows)
    flops = forward_flops(config, prompt_rows * prompt, prompt_rows * attended(prompt)) / mesh.size
    calls = asked.prompts / hosts / prompt_rows
    work = Work(calls, flops, weights / mesh.shape["tensor"], {}, prefilled=asked.prompts * prompt)
    yield Program(name, "prefill", jitted["prefill"], lambda made: (made["view"], *prompts), work, resident=meanwhile)
    empty = jax.tree.map(
        lambda x: host(*x.shape, kind=x.dtype),
        jax.eval_shape(lambda: sampling.empty_state(config, slots, FIRST_WIDTH, STOPS, dtype)),
    )
    fresh = jax.tree.map(lambda x: host(*x.shape, kind=x.dtype), empty.rows)
    facts = host(slots), host(slots), fresh, host()
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize
    ways = mesh.size if config.num_key_value_heads % mesh.shape["tensor"] == 0 else meshes.row_ways(mesh)
    mean = asked.response or new
    responses = asked.prompts * asked.samples / hosts
    whole = int(cache * slots * width / ways)

    def admit(program: str, calls: float, arguments: Callable[[Outputs], tuple[Any, ...]]) -> Program:
        work = Work(calls, 0.0, 3.0 * whole, {"KV cache": whole})
        return Program(
            name, program, jitted[program], arguments, work, {"width": width}, resident=meanwhile, also=("view",)
        )

    yield admit("admit", 1.0, lambda made: (empty, made["prefill"], *facts))
    yield admit("refill", responses / slots, lambda made: (made["admit"], made["prefill"], *facts))
    steps, context_length = sampler.chunk, prompt + mean / 2
    flops = forward_flops(config, slots * steps, slots * steps * context_length) / mesh.size
    moved = steps * (weights / mesh.shape["tensor"] + cache * slots * context_length / ways)
    work = Work(
        responses * mean / slots / steps,
        flops,
        moved,
        {"KV cache": whole},
        generated=asked.prompts * asked.samples * mean,
    )
    filtered = asked.sampling.top_k > 0 or asked.sampling.top_p < 1
    yield Program(
        name,
        "decode",
        jitted["decode"],
        lambda made: (made["view"], made["admit"]),
        work,
        {"filtered": filtered},
        steps,
        meanwhile,
    )
    yield from _rewards(context, name, asked.prompts * asked.samples, prompt + mean, meanwhile)


def _rewards(
    context: Context, name: str, responses: float, mean: float, resident: tuple[Any, ...]
) -> Iterator[Program]:
    """Reward models over so many responses of `mean` tokens with their prompts."""
    found = list(scorings(context.config, context.mesh))
    for scoring in found:
        others = tuple(other.model for other in found if other is not scoring)
        arguments = scoring.model, scoring.tokens, scoring.lengths
        scored = scoring.share * responses * mean
        calls = scored / math.prod(scoring.tokens.shape)
        weights = scoring.weights() / context.mesh.shape["tensor"]
        parts = {"parameters": device_bytes(scoring.model)}
        work = Work(calls, scoring.flops() / context.mesh.size, weights, parts, scored=scored)
        yield Program(name, "reward", scoring.run, _fixed(*arguments), work, resident=(*resident, *others))


def _fixed(*arguments: Any) -> Callable[[Outputs], tuple[Any, ...]]:
    """Arguments that no program before makes. (A lambda would look its names up when the program is compiled.)"""
    return lambda _: arguments


def _pairs(source: ConfigDict) -> int:
    """The most pairs that a collect stage can give."""
    most = source.prompts * source.pairs_per_prompt
    return min(most, source.max_pairs) if source.max_pairs else most


def _share(longest: int, prompt: int, response: int | None, responses: int = 1) -> float:
    """Tokens of a mean group over those of the longest."""
    mean = longest if response is None else min(response, longest)
    return (prompt + responses * mean) / (prompt + responses * longest)


def _ids(length: int) -> np.ndarray:
    return np.zeros(length, np.int32)
