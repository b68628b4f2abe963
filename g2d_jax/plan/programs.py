"""Every program that a run compiles, with abstract inputs of the largest shapes that its settings allow.

The functions, their shardings and their shapes come from the code that the run executes: a stage's batch is packed by
its own code from made-up responses of the greatest length, and only the arrays' shapes are kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
from ml_collections import ConfigDict

from g2d_jax.data.packing import Group, Packed
from g2d_jax.models import lora
from g2d_jax.plan.program import Program
from g2d_jax.plan.rewarding import scorings
from g2d_jax.plan.sampling import Asked, rollouts
from g2d_jax.plan.training import gradient, logprobs, params_and_state, policy_shapes, training
from g2d_jax.plan.work import problems, rounds
from g2d_jax.records import Preference, Problem, Rollout, Score, ScoredRollout, Verdict
from g2d_jax.stages import batches, diagnosis, offline, online, sft
from g2d_jax.stages.context import Context
from g2d_jax.stages.supply import compares, trains_off_policy
from g2d_jax.training import objectives


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
    packed = context.pack(sft.batch([pair] * stage.batch_size), context.row_length(stage.max_length), stage.batch_size)
    yield from training(context, name, stage, objectives.sft(context.compute), packed, stage.steps)


def _online(context: Context, name: str, stage: ConfigDict, response: int | None) -> Iterator[Program]:
    config = context.config
    row_length = online.row_length(context, stage)
    rows, places = online.most_rows(stage), online.places(stage)
    bare, filled = (context.pack(groups, row_length, rows, places=places) for groups in _groups(context, stage))
    params, state = params_and_state(context, stage)
    trained, _ = lora.split(params)  # all policies of a run share what is not trained
    reference = (trained,) if compares(stage) and not stage.reference_sync else ()
    calls = rounds(stage.steps, stage.sync_every)
    prompts = stage.prompts_per_step * stage.steps // stage.num_iterations
    probed = _probed(config, stage, stage.steps) * stage.probe.num_generations / stage.num_generations
    asked = Asked(prompts + probed, stage.num_generations, -(-prompts // max(calls, 1)), stage.sampling, response)
    beside = (state.opt_state, *reference)
    yield from rollouts(context, name, asked, params, beside=beside, meanwhile=(state, *reference))
    share = _share(stage.sampling.max_new_tokens, config.data.max_prompt_length, response)
    wanted = len(reference) + int(stage.reference_sync or trains_off_policy(stage))
    if compares(stage) or trains_off_policy(stage):
        yield logprobs(context, name, bare, wanted * stage.steps / stage.num_iterations * share, (state,))
    objective = context.objectives.get(name, lambda compute: online.objective_of(compute, stage))(context.compute)
    yield from training(context, name, stage, objective, filled, stage.steps * share, resident=reference)


def _collect(context: Context, name: str, stage: ConfigDict, response: int | None) -> Iterator[Program]:
    if stage.rollouts != "sample":
        return
    asked = Asked(stage.prompts, stage.num_generations, min(stage.part, stage.prompts), stage.sampling, response)
    yield from rollouts(context, name, asked, policy_shapes(context))


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
        return context.pack(offline.batch([pair] * count, np.zeros((count, 2), np.float32)), row_length, count)

    scored = min(offline.SCORED_AT_ONCE, pairs)
    times = (2 if stage.diagnose else 1) * pairs / scored * share
    yield logprobs(context, name, packed(scored), times, ())
    objective = offline.objective_of(context.compute, stage)
    if stage.diagnose and stage.signal_pairs:
        draws = diagnosis.signal_draws(context.order(pairs, f"signal/{name}"), stage.signal_pairs)
        if len(draws) > 1:
            yield gradient(context, name, objective, packed(len(draws[0])), len(draws) * share)
    batch = min(stage.batch_size, pairs)
    steps = pairs * stage.epochs // batch
    if stage.probe.every:
        params, state = params_and_state(context, stage, steps)
        probed = _probed(config, stage, steps)
        asked = Asked(probed, stage.probe.num_generations, stage.probe.prompts, stage.probe_sampling, response)
        yield from rollouts(context, name, asked, params, beside=(state.opt_state,), meanwhile=(state,))
    yield from training(context, name, stage, objective, packed(batch), steps * share, total=steps)


def _evaluation(context: Context, name: str, stage: ConfigDict, response: int | None) -> Iterator[Program]:
    """An evaluate or a select stage."""
    count = problems(context.config, stage.split if stage.kind == "evaluate" else "dev")
    if stage.kind == "evaluate":
        policies, samples = len(stage.policies), stage.num_generations + int(stage.greedy)
    else:
        source = context.config.stages[stage.policy]
        kept = {*source.get("keep", ()), source.get("steps", 1)}
        policies, samples = len(stage.steps or kept), stage.num_generations
    asked = Asked(count * policies, samples, count, stage.sampling, response)
    yield from rollouts(context, name, asked, policy_shapes(context))


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
        return ScoredRollout(Rollout(problem.id, 0, i, prompt, tokens, floats, floats, "stop"), str(i), score)

    groups = [[response(problem, i) for i in range(stage.num_generations)] for problem, _ in draws]
    made = batches.make(context.config.seed, stage, draws, groups, {"main": False}).groups
    count = sum(len(response.token_ids) for group in made for response in group.responses)
    others = np.zeros(count, np.float32)
    reference, trainer = (others if needed else None for needed in (compares(stage), trains_off_policy(stage)))
    return made, batches.fill(stage, made, reference, trainer)


def _probed(config: ConfigDict, stage: ConfigDict, steps: int) -> int:
    """Prompts that the probes of a stage sample: before its first update, every so many, and after its last."""
    every = stage.probe.every
    return min(stage.probe.prompts, problems(config, stage.probe.split)) * (1 + -(-steps // every)) if every else 0


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
