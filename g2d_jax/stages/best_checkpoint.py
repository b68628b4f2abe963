"""The best of a stage's kept checkpoints by its reward on held-out problems (arXiv 2506.21495,
section 3).

    kept steps ─► answers to data.dev ─► score of each ─► the best one, which the stage's name then means

A checkpoint's score is the mean of its tasks' scores. A verifiable task's score is its mean reward
(the accuracy, if rewards are 0 and 1). Other rewards are divided by the mean response length in
tokens, as the authors do. All problems of a task have equal weight; unscorable responses are left
out.

The quotient is for rewards above 0: longer responses move a negative one nearer to 0, so the
division favours length, which it should prevent. The stage then warns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from g2d_jax.config import BestCheckpoint
from g2d_jax.rollouts.groups import draw_once
from g2d_jax.runtime import processes
from g2d_jax.runtime.tracking import Progress
from g2d_jax.session.session import Session, StopRun
from g2d_jax.session.stage_result import Cost, Outcome, Scored, Selection, Warned
from g2d_jax.stages import alerts
from g2d_jax.stages.held_out import (
    answers_file,
    answers_of,
    sampling,
    task_results,
    write_problems,
)
from g2d_jax.stages.held_out import issues as issues
from g2d_jax.stages.held_out import phases as phases
from g2d_jax.training.checkpoint import Checkpoints


def run(session: Session, name: str, stage: BestCheckpoint) -> Outcome:
    """Score the checkpoints; return the outcome with the chosen policy, "STAGE@STEP".

    Raises StopRun if no checkpoint has a score.
    """
    problems = session.problems.by_split["dev"]
    write_problems(session.folders[name], problems)
    warnings: list[Warned] = []
    cost = Cost()
    scores: dict[int, Scored] = {}
    steps = candidates(stage, session)
    with (
        session.track_cost(cost),
        session.tracker.progress(name, len(steps) * len(problems)) as bar,
    ):
        for step in steps:
            entry = scores[step] = _scored(session, name, stage, step, cost, bar)
            metrics = {"score": entry.score}
            for task, row in entry.tasks.items():
                metrics[f"tasks/{task}/score"] = row.score
            bar.update(bar.done, {"score": entry.score})
            session.tracker.log(name, step, metrics)
    best = best_step({step: entry.score for step, entry in scores.items()})
    if best is None:
        raise StopRun(
            f"{name}: no checkpoint of {stage.policy} has a score: there is a task without any "
            "scored response"
        )
    alerts.say(session, name, 0, _negative(scores), warnings)
    session.tracker.say(
        f"{name}: {stage.policy}@{best}, the best of steps {', '.join(map(str, steps))}"
    )
    selection = Selection(
        f"{stage.policy}@{best}",
        {str(step): entry for step, entry in scores.items()},
        "dev",
    )
    return Outcome(
        cost=cost,
        counts={"checkpoints": len(steps), "problems": len(problems)},
        selection=selection,
        warnings=warnings,
    )


def candidates(stage: BestCheckpoint, session: Session) -> list[int]:
    """List the steps to choose from, ascending: stage.steps, or all that the stage it reads was set
    to keep.

    Other checkpoints on disk do not count: checkpoint.keep must not change the result.
    """
    if stage.steps:
        return sorted(set(stage.steps))
    with Checkpoints(session.folders[stage.policy] / "checkpoints") as checkpoints:
        last = processes.on_leader(checkpoints.latest)
    assert last is not None  # a stage runs after those it reads, and they all save their last step
    steps = session.config.stages[stage.policy].kept_steps()
    return sorted({*(step for step in steps if step <= last), last})


def best_step(scores: Mapping[int, float]) -> int | None:
    """Return the step of the highest score, the earliest in a tie; None if no score is a number."""
    numbers = {step: score for step, score in scores.items() if not math.isnan(score)}
    return min(numbers, key=lambda step: (-numbers[step], step)) if numbers else None


def _scored(
    session: Session, name: str, stage: BestCheckpoint, step: int, cost: Cost, bar: Progress
) -> Scored:
    """Return the score and standard error of one checkpoint, and those of each task. bar: advances
    by the problems."""
    policy, problems = f"{stage.policy}@{step}", session.problems.by_split["dev"]
    file = answers_file(session.folders[name] / "rollouts", policy)
    workload = sampling(session, stage, "select")
    answers = answers_of(session, policy, draw_once(problems), file, workload, cost=cost, bar=bar)
    tasks = task_results(problems, answers.groups, session.config.verifiable)
    for task, row in tasks.items():
        score = row.reward, row.sem
        if not session.config.verifiable[task]:
            score = row.length_normalised, row.length_normalised_sem
        tasks[task] = replace(row, score=score[0], score_sem=score[1])
    # Tasks have different problems, so their errors are independent.
    spread = math.hypot(*(row.score_sem for row in tasks.values()))
    total = sum(row.score for row in tasks.values())
    return Scored(total / len(tasks), spread / len(tasks), tasks)


def _negative(scores: Mapping[int, Scored]) -> Iterator[Warned]:
    """Yield an alert for each task whose rewards, which are divided by lengths, are negative on
    average."""
    for task in next(iter(scores.values())).tasks:
        results = [entry.tasks[task] for entry in scores.values()]
        low = min(row.reward for row in results)
        if low < 0 and not any(row.verifiable for row in results):
            yield Warned(
                f"negative {task}",
                f"rewards of the task {task} are negative on average ({low:.3g}): divided by the "
                "length they favour long responses. To try: rewards shifted above 0",
            )
