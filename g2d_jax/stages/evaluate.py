"""Evaluation of policies on held-out problems, with the templates, sampler and rewards of training.
Every completion is kept."""

from __future__ import annotations

import dataclasses
import math
import os
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from g2d_jax.config import Evaluate
from g2d_jax.config.policy_name import OF_RUN, PolicyName
from g2d_jax.records import Problem, Verdict, indices_by_task, pick
from g2d_jax.rewards.extract import last_number_is
from g2d_jax.rollouts.groups import (
    Groups,
    correct,
    describe,
    draw_once,
    log_samples,
    rewards,
    rows_of,
)
from g2d_jax.runtime.tracking import Progress
from g2d_jax.session import stage_result
from g2d_jax.session.policies import chosen_policy
from g2d_jax.session.session import Session
from g2d_jax.session.stage_result import (
    NO_ACCURACY,
    NOT_COMPARED,
    Change,
    Cost,
    Evaluated,
    Evaluation,
    Outcome,
    Warned,
    marks_of,
)
from g2d_jax.stages import alerts
from g2d_jax.stages.causes import Cause, cause_of
from g2d_jax.stages.held_out import (
    answers_file,
    answers_of,
    sampling,
    task_results,
    write_problems,
)
from g2d_jax.stages.held_out import issues as issues
from g2d_jax.stages.held_out import phases as phases
from g2d_jax.study import informativeness, stats


class Answers(NamedTuple):
    """A policy's S answers to each of N problems. correct: float64 [N, S], 1 correct, 0 wrong or
    NaN; rewards: float64 [N, S]; greedy: `correct` of the greedy answers, float64 [N, 1], None
    without any; described: see `describe`; cause: of most answers."""

    correct: np.ndarray
    rewards: np.ndarray
    greedy: np.ndarray | None
    described: dict[str, float]
    cause: Cause


def run(session: Session, name: str, stage: Evaluate) -> Outcome:
    """Evaluate stage.policies in order; return the outcome, with paired differences."""
    problems = session.problems.by_split[stage.split]
    cost = Cost()
    policies: list[Evaluated] = []
    answers: dict[str, Answers] = {}
    warnings: list[Warned] = []
    write_problems(session.folders[name], problems)
    total = len(problems) * len(stage.policies)
    label = name if name in session.config.stages else "evaluate"
    with session.track_cost(cost), session.tracker.progress(label, total) as bar:
        for number, policy in enumerate(stage.policies, start=1):
            entry, answers[policy] = evaluate_policy(session, name, stage, policy, cost, bar)
            policies.append(entry)
            if policy in session.evaluated:
                earlier = stage_result.read(session.evaluated[policy])
                if earlier is not None:
                    cost.add(dataclasses.asdict(earlier.cost))
            metrics = _metrics(entry)
            bar.update(bar.done, _shown(metrics))
            length = entry.informativeness["mean_length"]
            session.tracker.log(name, number, {**metrics, "completions/mean_length": length})
            if number < len(stage.policies):
                continue  # what is wrong with earlier policies is what training is for
            found = alerts.sampled(
                answers[policy].described,
                stage.sampling.max_new_tokens,
                partial(getattr, answers[policy], "cause"),
                f"the responses of {policy}",
            )
            alerts.say(session, name, number, found, warnings)
    pairs = list(zip(stage.policies[:-1], stage.policies[1:], strict=True))
    if len(stage.policies) > 2:
        pairs.append((stage.policies[0], stage.policies[-1]))
    changes = []
    for before, after in pairs:
        change = _change(session, problems, answers[before], answers[after])
        changes.append(dataclasses.replace(change, before=before, after=after))
    result = Evaluation(
        policies,
        changes,
        ids=[problem.id for problem in problems],
        problems=len(problems),
        samples=stage.sampling.answers(stage.num_generations),
        split=stage.split,
        sampling=stage.sampling.to_dict(),
    )
    counts = {"problems": len(problems)}
    return Outcome(cost=cost, counts=counts, evaluation=result, warnings=warnings)


def evaluate_policy(
    session: Session, name: str, stage: Evaluate, policy: str, cost: Cost, bar: Progress
) -> tuple[Evaluated, Answers]:
    """Evaluate one policy. Completions on disk are read back. bar: advances by the problems.

    Accuracies are over the problems of verifiable tasks. "tasks" has the results of each task, if
    there are several or one that is not verifiable; otherwise "reward" is the mean reward.
    """
    folder = session.evaluated.get(policy, session.folders[name]) / "rollouts"
    # the cost of another stage's completions is in its record
    own = Cost() if policy in session.evaluated else cost
    problems, file = session.problems.by_split[stage.split], answers_file(folder, policy)
    draws, workload = draw_once(problems), sampling(session, stage, "evaluate")
    sampled = answers_of(session, policy, draws, file, workload, cost=own, bar=bar)
    groups, described = sampled.groups, describe(sampled.groups)
    greedy = [[row] for row in sampled.greedy] if stage.greedy else None
    is_run = PolicyName.parse(policy).origin == OF_RUN
    entry = Evaluated(
        name=policy,
        label=policy if is_run else chosen_policy(session, policy),
        rollouts=os.path.relpath(file, session.folders[name]),
        marks=marks_of(correct(groups)),
        verdicts=dict(Counter(row.score.verdict.value for row in rows_of(groups))),
        informativeness=informativeness.summary(informativeness.responses(groups)),
        **_accuracies(session, stage, problems, groups, greedy),
        **_tasks(session, problems, groups, greedy),
    )
    log_samples(session.tracker, session.tokenizer, name, 0, draws, groups, policy=policy)
    greedily_correct = None if greedy is None else correct(greedy)
    cause = cause_of(problems, groups, session.config.all_tasks)
    return entry, Answers(correct(groups), rewards(groups), greedily_correct, described, cause)


def _accuracies(
    session: Session,
    stage: Evaluate,
    problems: Sequence[Problem],
    groups: Groups,
    greedy: Groups | None,
) -> dict[str, Any]:
    """Compute accuracies: of all problems, of greedy answers, and by subset."""
    answers = correct(groups)
    if not _judged(session, problems):
        return {}
    verifiable = session.config.verifiable
    judged = [i for i, problem in enumerate(problems) if verifiable[problem.task]]
    names = [problem.subset for problem in pick(problems, judged)]
    subsets = stats.by_subset(answers[judged], names)
    subsets.pop("", None)
    return {
        "accuracy": stats.accuracy(answers),
        "pass_at": {str(k): stats.pass_at(answers, k) for k in stage.shown_pass_at},
        "greedy": math.nan if greedy is None else stats.accuracy(correct(greedy)).mean,
        "last_number": _last_number(session, problems, groups),
        "subsets": subsets,
    }


def _last_number(session: Session, problems: Sequence[Problem], groups: Groups) -> float:
    """Return the share of answers that are correct or whose last number is the reference answer;
    NaN unless all reference answers are integers."""
    found: list[float] = []
    for problem, group in zip(problems, groups, strict=True):
        if session.config.verifiable[problem.task]:
            for row in group:
                is_last = last_number_is(problem.answer or "", row.text)
                found.append(max(is_last, float(row.score.verdict is Verdict.CORRECT)))
    return stats.mean(np.array(found))


def _tasks(
    session: Session, problems: Sequence[Problem], groups: Groups, greedy: Groups | None
) -> dict[str, Any]:
    tasks = task_results(problems, groups, session.config.verifiable)
    if len(tasks) == 1 and _judged(session, problems):
        return {"reward": next(iter(tasks.values())).reward}
    if greedy is not None:
        for task, row in task_results(problems, greedy, session.config.verifiable).items():
            tasks[task] = dataclasses.replace(tasks[task], greedy=row.reward)
    return {"tasks": tasks}


def _judged(session: Session, problems: Sequence[Problem]) -> bool:
    """Return whether any of the problems is of a verifiable task."""
    return any(session.config.verifiable[problem.task] for problem in problems)


def _metrics(entry: Evaluated) -> dict[str, float]:
    """Return a policy's logged metrics: its accuracy, if it has one, and the mean reward of each
    task."""
    metrics = {} if entry.accuracy is NO_ACCURACY else {"pass@1": entry.accuracy.mean}
    for task, row in entry.tasks.items():
        metrics[f"tasks/{task}/reward"] = row.reward
    return metrics


def _shown(metrics: dict[str, float]) -> dict[str, float]:
    """Return the number next to the bar: the accuracy, or without one the mean reward."""
    if "pass@1" in metrics:
        return {"accuracy": metrics["pass@1"]}
    return {"reward": next(iter(metrics.values()))}


def _change(
    session: Session, problems: Sequence[Problem], before: Answers, after: Answers
) -> Change:
    """Compute the differences in sampled and greedy accuracy, if any, and in rewards that only
    rank."""
    sampled = greedy = NOT_COMPARED
    if _judged(session, problems):
        sampled = stats.paired(before.correct, after.correct)
        if before.greedy is not None and after.greedy is not None:
            greedy = stats.paired(before.greedy, after.greedy)
    tasks = {}
    for task, rows in indices_by_task(problems).items():
        if not session.config.verifiable[task]:
            tasks[task] = stats.paired(before.rewards[rows], after.rewards[rows])
    return Change("", "", sampled, greedy, tasks)
