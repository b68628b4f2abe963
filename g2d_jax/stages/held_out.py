"""A policy's answers to held-out problems, and their results, task by task.

    policy ─► answers, sampled or read back ─► rewards and accuracies of each task

Evaluations and selections share it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from etils import epath

from g2d_jax.config import BestCheckpoint, Evaluate
from g2d_jax.records import Problem, indices_by_task
from g2d_jax.rollouts.generate import (
    Draws,
    Groups,
    correct,
    draw_once,
    lengths,
    rewards,
    sampled_groups,
)
from g2d_jax.rollouts.programs import sampling_programs
from g2d_jax.rollouts.workload import Workload
from g2d_jax.runtime import processes, storage
from g2d_jax.runtime.tracking import Progress
from g2d_jax.sampler.programs import Shapes
from g2d_jax.session.cost import Cost
from g2d_jax.session.policies import load_policy
from g2d_jax.session.program import Program
from g2d_jax.session.session import Session
from g2d_jax.stages import alerts
from g2d_jax.study import stats

GREEDY: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}


@dataclass
class HeldOut:
    """One policy on the problems of a stage.

    folder: of its answers. cost: theirs is added to it. bar: moves by the problems. All policies
    sample with the same random numbers, which makes paired differences sharper.
    """

    session: Session
    stage: BestCheckpoint | Evaluate
    policy: str
    folder: epath.Path
    cost: Cost
    bar: Progress

    @property
    def problems(self) -> list[Problem]:
        """The problems of the stage's split."""
        return self.session.problems.by_split[self.stage.split]

    @property
    def draws(self) -> Draws:
        """The draws: each problem once."""
        return draw_once(self.problems)

    def file(self, suffix: str = "") -> epath.Path:
        """Return the file of one kind of answers."""
        name = re.sub(r"[^\w@.-]", "_", self.policy)
        if name != self.policy:  # no two share a file
            name += f"-{storage.fingerprint(self.policy)[:8]}"
        return self.folder / f"{name}{suffix}.parquet"

    def answers(self, rng_stream: str, *, greedy: bool = False) -> Groups:
        """Sample and score answers to each problem, or one greedy answer, or read them back.

        The policy is loaded only if needed.
        """
        stage, stop_ids = self.stage, self.session.sampling.stop_ids
        params, samples, file = stage.sampling.params(stop_ids), stage.num_generations, self.file()
        if greedy:
            params, samples = stage.sampling.params(stop_ids, **GREEDY), 1
            file = self.file("-greedy")
        workload = Workload(params, samples, sampling_shapes(self.session, stage), rng_stream)
        return sampled_groups(
            self.session,
            lambda: self._sampler_params,
            [(self.draws, file)],
            workload,
            policy=self.policy,
            cost=self.cost,
            bar=self.bar,
        )

    @cached_property
    def _sampler_params(self) -> Any:
        return self.session.sampling.engine.to_sampler_params(
            load_policy(self.session, self.policy)
        )


def sampling_shapes(session: Session, stage: BestCheckpoint | Evaluate) -> Shapes:
    """Choose the sampler's shapes for an evaluate or best_checkpoint stage, greedy answers
    included."""
    params = [stage.sampling.params(session.sampling.stop_ids)]
    if stage.greedy:
        params.append(stage.sampling.params(session.sampling.stop_ids, **GREEDY))
    return session.sampling.shapes(
        stage, session.problems.counts[stage.split], stage.num_generations, *params
    )


def alerts_ahead(
    session: Session, name: str, stage: BestCheckpoint | Evaluate
) -> list[alerts.Alert]:
    """Return what may be wrong with the settings of an evaluate or best_checkpoint stage."""
    return alerts.position_alerts(session, stage.sampling)


def programs(
    session: Session, name: str, stage: BestCheckpoint | Evaluate, response: int | None = None
) -> Iterator[Program]:
    """Yield the programs of an evaluate or best_checkpoint stage. response: mean tokens, None: the
    most."""
    greedy = int(stage.greedy)
    kinds, samples = 1 + greedy, stage.num_generations + greedy
    policies = stage.policy_count(session.config.stages)
    params, shapes = (
        stage.sampling.params(session.sampling.stop_ids),
        sampling_shapes(session, stage),
    )
    prompts, calls = session.problems.counts[stage.split] * policies, kinds * policies
    yield from sampling_programs(
        session, name, Workload(params, samples, shapes, "", "", prompts, calls, response)
    )


def write_problems(folder: epath.Path, problems: Sequence[Problem]) -> None:
    """Write the problems beside the answers: FOLDER/problems.json."""
    texts = [
        {"id": p.id, "prompt": p.prompt, "answer": p.answer, "subset": p.subset} for p in problems
    ]
    processes.on_leader(lambda: storage.write_json(folder / "problems.json", texts))


def task_results(
    problems: Sequence[Problem], groups: Groups, verifiable: Mapping[str, bool]
) -> dict[str, dict[str, Any]]:
    """Summarise the answers [N, S] to N problems by task. verifiable: by task, see `Session`.

    reward, sem, std_runs   mean over problems of their mean reward; its standard error clustered by problem; how much
                            it moves from one of S runs over the problems to the next
    length_normalised, length_normalised_sem   `mean_quotient` of rewards and response tokens; None if verifiable
    accuracy                None if not verifiable
    problems, unscorable    problems with a reward; share of responses without
    mean_length             tokens of a response
    """
    values = rewards(groups)
    tokens = np.maximum(lengths(groups), 1).astype(np.float64)
    is_correct = correct(groups)
    results = {}
    for task, rows in indices_by_task(problems).items():
        judged = is_correct[rows] if verifiable[task] else None
        results[task] = _task_result(values[rows], tokens[rows], judged)
    return results


def _task_result(
    values: np.ndarray, tokens: np.ndarray, is_correct: np.ndarray | None
) -> dict[str, Any]:
    reward = stats.accuracy(values)
    quotient = error = accuracy = None
    if is_correct is None:
        quotient, error = mean_quotient(values, tokens)
    else:
        accuracy = stats.accuracy(is_correct).mean
    return {
        "reward": reward.mean,
        "sem": reward.sem_clustered,
        "std_runs": reward.std_runs,
        "length_normalised": quotient,
        "length_normalised_sem": error,
        "accuracy": accuracy,
        "problems": reward.problems,
        "unscorable": float(np.isnan(values).mean()),
        "mean_length": float(tokens.mean()),
    }


def mean_quotient(values: np.ndarray, lengths: np.ndarray) -> tuple[float, float]:
    """Divide the mean value by the mean length, with its standard error; a mean of quotients would
    go by the shortest.

    values, lengths: float64 [N, S], a NaN value being left out with its length. Means are over
    problems, as in `stats.accuracy`. The error is that of the linearised quotient, (value -
    quotient * length) / mean length, clustered by problem (Cochran, "Sampling Techniques", 3rd
    edition, chapter 6).
    """
    length = stats.accuracy(np.where(np.isnan(values), np.nan, lengths)).mean
    quotient = stats.accuracy(values).mean / length
    return quotient, stats.accuracy((values - quotient * lengths) / length).sem_clustered
