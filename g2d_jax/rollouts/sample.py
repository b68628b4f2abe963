"""The phase `sample`: a policy's responses, in the order of prompts and samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from g2d_jax.data.stops import cut
from g2d_jax.data.tokenizer import PromptTokenizer
from g2d_jax.records import Problem, Request, Rollout, ScoredRollout, by_id
from g2d_jax.rewards.pool import Begun
from g2d_jax.rollouts.groups import Draws, problems_of
from g2d_jax.rollouts.workload import Workload
from g2d_jax.runtime import processes
from g2d_jax.runtime.tables import safe_text
from g2d_jax.runtime.tracking import Progress
from g2d_jax.sampler.engine import Engine


@dataclass(frozen=True)
class Answer:
    """A rollout with its text.

    graded: the text that rewards read. pending: its verification, if it has begun.
    """

    rollout: Rollout
    problem: Problem
    text: str
    graded: str
    pending: Begun | None


Row = TypeVar("Row", ScoredRollout, Answer)


def sample(
    engine: Engine,
    tokenizer: PromptTokenizer,
    params: Any,
    draws: Draws,
    workload: Workload,
    *,
    verify: Callable[[Problem, str], Begun | None],
    bar: Progress,
) -> list[Answer]:
    """Sample responses to all draws; return those of this process's devices.

    params: the policy in the engine's form. verify: begins to verify a response while devices
    decode others. bar: advances by answered draws.
    """
    samples = workload.samples
    problems = by_id(problems_of(draws))
    opened = opening_thoughts(tokenizer, problems.values())
    answers: list[Answer] = []
    start = bar.done
    bar.begin()  # rows of equal length end together, after a long wait
    for rollout in engine.generate(
        params, requests(tokenizer, draws, workload), workload.rng_stream, workload.shapes
    ):
        problem = problems[rollout.problem_id]
        text = safe_text(cut(tokenizer.decode(rollout.token_ids), workload.params.stop))
        graded = _graded(text, problem, opened)
        answers.append(Answer(rollout, problem, text, graded, verify(problem, graded)))
        # Count responses that end together with the last of them, or the bar's rate would be wrong.
        if not engine.ready:
            # other processes have made similar progress
            answered = len(answers) // samples * processes.count()
            bar.update(start + min(answered, len(draws)))
    return in_order(answers, draws)


def requests(tokenizer: PromptTokenizer, draws: Draws, workload: Workload) -> list[Request]:
    """Return the request of each draw."""
    made = []
    for problem, visit in draws:
        request = Request(
            problem.id,
            tokenizer.encode_prompt(problem),
            workload.params,
            workload.samples,
            visit,
            greedy=workload.greedy,
            needs_logprobs=workload.needs_logprobs,
        )
        made.append(request)
    return made


def in_order(rows: Iterable[Row], draws: Draws) -> list[Row]:
    """Sort rows by draw and sample, so that files do not depend on the order of completion."""
    place = {(problem.id, visit): i for i, (problem, visit) in enumerate(draws)}
    return sorted(
        rows, key=lambda row: (place[row.rollout.problem_id, row.rollout.visit], row.rollout.sample)
    )


def graded_texts(
    tokenizer: PromptTokenizer, problems: Sequence[Problem], texts: Sequence[str]
) -> list[str]:
    """Return the texts that rewards read, including a `<think>` that the template opened in the
    prompt.

    Without it a verifier would parse the thought as the answer. problems: of each text.
    """
    opened = opening_thoughts(tokenizer, by_id(problems).values())
    return [_graded(text, problem, opened) for text, problem in zip(texts, problems, strict=True)]


def _graded(text: str, problem: Problem, opened: set[str]) -> str:
    return "<think>" + text if problem.id in opened else text


def opening_thoughts(tokenizer: PromptTokenizer, problems: Iterable[Problem]) -> set[str]:
    """Return the ids of problems whose rendered prompt opens a thought."""
    return {problem.id for problem in problems if tokenizer.opens_thought(problem)}
