"""A policy's answers to held-out problems, and their results, task by task.

    policy ─► answers, sampled or read back ─► rewards and accuracies of each task

evaluate and best_checkpoint stages share this module.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from etils import epath

from g2d_jax.config import BestCheckpoint, Evaluate
from g2d_jax.records import Problem, indices_by_task
from g2d_jax.rollouts.generate import Policy, sampled_batches
from g2d_jax.rollouts.groups import Draws, Groups, correct, lengths, rewards
from g2d_jax.rollouts.store import Sampled, joined, on_disk, write_sampled
from g2d_jax.rollouts.workload import Workload, prompts_per_call
from g2d_jax.runtime import processes, storage
from g2d_jax.runtime.tracking import Progress
from g2d_jax.session.policies import load_policy
from g2d_jax.session.session import Session
from g2d_jax.session.stage_result import Cost, TaskResult
from g2d_jax.stages import Seen, alerts
from g2d_jax.study import stats


def answers_file(folder: epath.Path, policy: str) -> epath.Path:
    """Return the file of a policy's sampled answers in a folder; see `greedy_file`."""
    name = re.sub(r"[^\w@.-]", "_", policy)
    # A unique name, also among the files of greedy answers.
    if name != policy or name.endswith("-greedy"):
        name += f"-{storage.fingerprint(policy)[:8]}"
    return folder / f"{name}.parquet"


def answers_of(
    session: Session,
    policy: str,
    draws: Draws,
    file: epath.Path,
    workload: Workload,
    *,
    cost: Cost,
    bar: Progress,
) -> Sampled:
    """Sample and score a policy's answers to each problem, with a greedy one if the workload has
    it, or read them back.

    file: see `answers_file`. cost: theirs is added to it. bar: advances by the problems. All
    policies sample with the same random numbers, which narrows paired differences. The policy is
    loaded only if needed. Each of several sampler calls is stored until all are done, so a killed
    run repeats only one.
    """

    def loaded() -> Policy:
        params = session.sampling.engine.to_sampler_params(load_policy(session, policy))
        return Policy(params, policy)

    sample = partial(sampled_batches, session, loaded, workload=workload, cost=cost, bar=bar)
    most = prompts_per_call(session, workload.samples)
    if len(draws) <= most or on_disk(session.writer, [file]):
        return sample(batches=[(draws, file)])[0]
    parts = file.parent / f"_{file.stem}"
    batches = []
    for first in range(0, len(draws), most):
        part = draws[first : first + most]
        # Named by its range: a later start may divide the problems differently.
        batches.append((part, parts / f"{first:06d}-{first + len(part):06d}.parquet"))
    sampled = joined(sample(batches=batches))
    session.writer.submit(partial(write_sampled, [sampled], [file], parts))
    session.writer.wait()
    return sampled


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
    """Check the lengths of sequences in an evaluate or best_checkpoint stage."""
    setting = f"stages.{name}.sampling.max_new_tokens"
    return Seen(alerts.position_issues(session, setting, stage.sampling))


def write_problems(folder: epath.Path, problems: Sequence[Problem]) -> None:
    """Write the problems next to the answers: FOLDER/problems.json."""
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
    """Divide the mean value by the mean length, with its standard error. In a mean of quotients the
    shortest responses would dominate.

    values, lengths: float64 [N, S]; a NaN value is left out with its length. Means are over
    problems, as in `stats.accuracy`. The error is that of the linearised quotient, (value -
    quotient * length) / mean length, clustered by problem (Cochran, "Sampling Techniques", 3rd
    edition, chapter 6).
    """
    length = stats.accuracy(np.where(np.isnan(values), np.nan, lengths)).mean
    quotient = stats.accuracy(values).mean / length
    return quotient, stats.accuracy((values - quotient * lengths) / length).sem_clustered
