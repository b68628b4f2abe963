"""A policy's answers to held-out problems, and their results, task by task.

    policy ─► answers, sampled or read back ─► rewards and accuracies of each task

Evaluations and selections share it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from etils import epath

from g2d_jax.config import BestCheckpoint, Evaluate
from g2d_jax.records import Problem, indices_by_task
from g2d_jax.rollouts.generate import (
    Batches,
    Draws,
    Groups,
    Sampled,
    correct,
    draw_once,
    joined,
    lengths,
    on_disk,
    rewards,
    sampled_batches,
    write_sampled,
)
from g2d_jax.rollouts.workload import Workload, prompts_per_call
from g2d_jax.runtime import processes, storage
from g2d_jax.runtime.tracking import Progress
from g2d_jax.session.policies import load_policy
from g2d_jax.session.session import Session
from g2d_jax.session.stage_result import Cost, TaskResult
from g2d_jax.stages import Seen, alerts
from g2d_jax.study import stats


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

    @property
    def file(self) -> epath.Path:
        """The file of the sampled answers; see `greedy_file`."""
        name = re.sub(r"[^\w@.-]", "_", self.policy)
        # No two share a file, nor one's sampled answers with another's greedy ones.
        if name != self.policy or name.endswith("-greedy"):
            name += f"-{storage.fingerprint(self.policy)[:8]}"
        return self.folder / f"{name}.parquet"

    def answers(self, rng_stream: str) -> Sampled:
        """Sample and score answers to each problem, a greedy one too if the stage asks for it, or
        read them back.

        The policy is loaded only if needed. What takes several calls of the sampler is kept call by
        call until all is there, so that a run that is killed loses one of them.
        """
        workload = sampling(self.session, self.stage, rng_stream)
        most = prompts_per_call(self.session, workload.samples)
        draws = self.draws
        if len(draws) <= most or on_disk(self.session, [self.file]):
            return self._sampled([(draws, self.file)], workload)[0]
        parts = self.folder / f"_{self.file.stem}"
        batches = []
        for first in range(0, len(draws), most):
            part = draws[first : first + most]
            # Named by what it holds: a later start may divide the problems otherwise.
            batches.append((part, parts / f"{first:06d}-{first + len(part):06d}.parquet"))
        sampled = joined(self._sampled(batches, workload))
        self.session.writer.submit(partial(write_sampled, [sampled], [self.file], parts))
        self.session.writer.wait()
        return sampled

    def _sampled(self, batches: Batches, workload: Workload) -> list[Sampled]:
        return sampled_batches(
            self.session,
            self._sampler_params,
            batches,
            workload,
            policy=self.policy,
            cost=self.cost,
            bar=self.bar,
        )

    def _sampler_params(self) -> Any:
        return self.session.sampling.engine.to_sampler_params(
            load_policy(self.session, self.policy)
        )


def phases(
    session: Session, name: str, stage: BestCheckpoint | Evaluate, response: int | None = None
) -> list[Workload]:
    """List the sampling of an evaluate or best_checkpoint stage. response: as of `sampling`."""
    return [sampling(session, stage, "", response)]


def sampling(
    session: Session, stage: BestCheckpoint | Evaluate, rng_stream: str, response: int | None = None
) -> Workload:
    """Return the sampling of an evaluate or best_checkpoint stage: each policy by itself, in as few
    calls as compute.generation_batch_size allows. response: mean tokens, None: the most."""
    params = stage.sampling.params(session.sampling.stop_ids)
    answers = stage.sampling.answers(stage.num_generations)
    samples = answers + stage.greedy
    policies = stage.policy_count(session.config.stages)
    prompts = session.problems.counts[stage.split]
    together = min(prompts, prompts_per_call(session, samples))
    return Workload(
        session,
        params,
        answers,
        session.sampling.shapes(stage, together, samples, params),
        rng_stream,
        prompts=prompts * policies,
        calls=policies * -(-prompts // max(together, 1)),
        response=response,
        greedy=stage.greedy,
    )


def issues(session: Session, name: str, stage: BestCheckpoint | Evaluate) -> Seen:
    """Return what may be wrong with the lengths of an evaluate or best_checkpoint stage."""
    setting = f"stages.{name}.sampling.max_new_tokens"
    return Seen(alerts.position_issues(session, setting, stage.sampling))


def write_problems(folder: epath.Path, problems: Sequence[Problem]) -> None:
    """Write the problems beside the answers: FOLDER/problems.json."""
    texts = [
        {"id": p.id, "prompt": p.prompt, "answer": p.answer, "subset": p.subset} for p in problems
    ]
    processes.on_leader(lambda: storage.write_json(folder / "problems.json", texts))


def task_results(
    problems: Sequence[Problem], groups: Groups, verifiable: Mapping[str, bool]
) -> dict[str, TaskResult]:
    """Summarise the answers [N, S] to N problems by task. verifiable: by task, see `Session`."""
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
) -> TaskResult:
    reward = stats.accuracy(values)
    quotient = error = accuracy = math.nan
    if is_correct is None:
        quotient, error = mean_quotient(values, tokens)
    else:
        accuracy = stats.accuracy(is_correct).mean
    return TaskResult(
        reward=reward.mean,
        sem=reward.sem_clustered,
        length_normalised=quotient,
        length_normalised_sem=error,
        accuracy=accuracy,
        verifiable=is_correct is not None,
        problems=reward.problems,
        unscorable=float(np.isnan(values).mean()),
        mean_length=float(tokens.mean()),
    )


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
