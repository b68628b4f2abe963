"""The scoring of responses, each by the reward of its problem's task. Tasks with equal rewards
share
a scorer.

score_local        each process scores some of the responses by itself
score_collective   a reward model is split over the devices of all processes: all run it together,
on the same responses
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from jax.sharding import Mesh

from g2d_jax.config import Dtype, Reward
from g2d_jax.records import Problem, Score, Verdict, indices_by_task, pick
from g2d_jax.rewards.functions import (
    RewardFunction,
    Scorer,
    VerifierScorer,
    call_reward,
    function_scorer,
    load_reward,
)
from g2d_jax.rewards.normalise import clean
from g2d_jax.rewards.quantity import parse_quantity
from g2d_jax.runtime import processes

if TYPE_CHECKING:
    from g2d_jax.rewards.pool import Begun, VerifierPool
    from g2d_jax.scoring.reward_model import RewardModel

UNSCORED = Score(None, Verdict.UNSCORABLE)  # until a reward model has run


def shares(problems: Sequence[Problem], count: int) -> list[list[int]]:
    """Deal response indices to `count` processes; consecutive responses to one problem stay
    together."""
    dealt: list[list[int]] = [[] for _ in range(count)]
    places = iter(range(len(problems)))
    for number, (_, group) in enumerate(itertools.groupby(problem.id for problem in problems)):
        dealt[number % count] += [next(places) for _ in group]
    return dealt


@dataclass
class RewardManager:
    """The rewards of all tasks. rewards: task -> its reward section. own: a caller's function in
    place of the main task's reward. dtype: of reward models.

    Pools and reward models start when they are first needed.
    """

    rewards: Mapping[str, Reward]
    mesh: Callable[[], Mesh]
    own: RewardFunction | None = None
    dtype: Dtype = "float32"
    _made: dict[str, Scorer] = field(default_factory=dict)
    _further: dict[str, dict[str, RewardFunction]] = field(default_factory=dict)
    _pools: list[VerifierPool] = field(default_factory=list)
    _models: list[RewardModel] = field(default_factory=list)
    _elsewhere: float = 0.0  # CPU seconds of other processes' verifiers

    def __call__(
        self, problems: Sequence[Problem], texts: Sequence[str], token_ids: Sequence[np.ndarray]
    ) -> list[Score]:
        """Return one Score per response, in order. token_ids: [T] int32 each. All processes call it
        with the same arguments.

        One process scores consecutive responses to one problem together.
        """
        dealt = shares(problems, processes.count())
        mine = dealt[processes.index()]
        with processes.barrier():
            own = self.score_local(pick(problems, mine), pick(texts, mine), pick(token_ids, mine))
        self.share_usage()
        found = processes.gather(
            [[score.reward, score.verdict.value, score.answer, score.parts] for score in own]
        )
        scores = [UNSCORED] * len(problems)
        for places, share in zip(dealt, found, strict=True):
            for place, (reward, verdict, *rest) in zip(places, share, strict=True):
                scores[place] = Score(reward, Verdict(verdict), *rest)
        return self.score_collective(problems, texts, token_ids, scores)

    def start(self, problems: Sequence[Problem]) -> None:
        """Start the verifiers' workers in the background, for tasks whose answers are not just
        numbers.

        problems: a sample of each task's, whose answers decide that.
        """
        hard = {problem.task for problem in problems if not _is_number(problem.answer)}
        for task, reward in self.rewards.items():
            if task in hard and reward.function == "verify" and self._own_of(task) is None:
                self._of(task)
        for pool in self._pools:
            pool.start()

    def verifier(self, task: str) -> VerifierPool:
        """Return the verifier of a task. Raises ValueError for a task with another reward."""
        scorer = self._of(task)
        if not isinstance(scorer, VerifierScorer):
            raise ValueError(f"task {task!r} is not scored by the verifier")
        return scorer.pool

    def submit(self, problem: Problem, text: str) -> Begun | None:
        """Start to verify a response, for `score_local`, while others are sampled; None for other
        rewards."""
        if self._is_collective(problem.task):
            return None
        scorer = self._of(problem.task)
        if not isinstance(scorer, VerifierScorer):
            return None
        return scorer.begin(problem, text)

    def score_local(
        self,
        problems: Sequence[Problem],
        texts: Sequence[str],
        token_ids: Sequence[np.ndarray],
        pending: Sequence[Begun | None] | None = None,
    ) -> list[Score]:
        """Compute the scores that need no reward model; the others stay `UNSCORED`.

        pending: the result of `submit` for each response.
        """
        scores = [UNSCORED] * len(problems)
        for task, indices in indices_by_task(problems).items():
            parts = self._parts(
                task, pick(problems, indices), pick(texts, indices), pick(token_ids, indices)
            )
            if self._is_collective(task):
                _put(scores, indices, [replace(UNSCORED, parts=row) for row in parts])
                continue
            scorer = self._of(task)
            if pending and isinstance(scorer, VerifierScorer):
                found = scorer.pool.finish(list(filter(None, pick(pending, indices))))
            else:
                found = scorer(
                    pick(problems, indices), pick(texts, indices), pick(token_ids, indices)
                )
            _put(scores, indices, self._weighted(task, found, parts))
        return scores

    def score_collective(
        self,
        problems: Sequence[Problem],
        texts: Sequence[str],
        token_ids: Sequence[np.ndarray],
        scores: Sequence[Score],
    ) -> list[Score]:
        """Add the reward models' scores. All processes call it with the same responses."""
        merged = list(scores)
        for task, indices in indices_by_task(problems).items():
            if self._is_collective(task):
                found = self._of(task)(
                    pick(problems, indices), pick(texts, indices), pick(token_ids, indices)
                )
                parts = [scores[index].parts for index in indices]
                _put(merged, indices, self._weighted(task, found, parts))
        return merged

    def _parts(
        self,
        task: str,
        problems: Sequence[Problem],
        texts: Sequence[str],
        token_ids: Sequence[np.ndarray],
    ) -> list[dict[str, float | None]]:
        """Compute the reward of each of reward.functions for each response, before weights."""
        reward = self.rewards[task]
        if task not in self._further:
            self._further[task] = {
                name: load_reward(name, reward.folder) for name in reward.functions
            }
        parts: list[dict[str, float | None]] = [{} for _ in problems]
        for name, function in self._further[task].items():
            values = call_reward(function, problems, texts, token_ids)
            for row, value in zip(parts, values, strict=True):
                row[name] = value
        return parts

    def _weighted(
        self, task: str, scores: Sequence[Score], parts: Sequence[Mapping[str, float | None]]
    ) -> list[Score]:
        """Add weighted parts to scores. A part of None adds nothing, as in TRL."""
        reward = self.rewards[task]
        if not reward.functions:
            return list(scores)
        own = self._own_of(task)
        main = reward.function if own is None else getattr(own, "__name__", "reward")
        weights = dict(zip(reward.functions, reward.weights, strict=True))
        weighted = []
        for score, row in zip(scores, parts, strict=True):
            total, verdict = score.reward, score.verdict
            if total is not None:
                total += sum(weight * (row[name] or 0.0) for name, weight in weights.items())
                verdict = verdict if reward.is_verifiable else Verdict.SCORED
            named = {main: score.reward, **row}
            weighted.append(Score(total, verdict, score.answer, named))
        return weighted

    def has_collective(self) -> bool:
        """Return whether all processes must score the responses of any task together."""
        return any(map(self._is_collective, self.rewards))

    def _is_collective(self, task: str) -> bool:
        return self.rewards[task].function == "model" and self._own_of(task) is None

    def _own_of(self, task: str) -> RewardFunction | None:
        return self.own if task == "main" else None

    def usage(self) -> dict[str, float]:
        """Return the cost of scoring since the start, as fields of a Cost; that of other processes
        is as of the last `share_usage`."""
        return {
            "verifier_cpu_seconds": self._elsewhere + self._own_seconds(),
            "scored": sum(model.usage.tokens for model in self._models),
            "flops": sum(model.usage.flops for model in self._models),
        }

    def share_usage(self) -> None:
        """Share the cost of this process's verifiers with the others. All processes make the
        call."""
        own = self._own_seconds()
        self._elsewhere = sum(processes.gather(own)) - own

    def _own_seconds(self) -> float:
        return sum(pool.cpu_seconds for pool in self._pools)

    def close(self) -> None:
        """End the verifiers' processes."""
        for pool in self._pools:
            pool.close()

    def _of(self, task: str) -> Scorer:
        if task not in self._made:
            equal = (
                other
                for other in self._made
                if self.rewards[other] == self.rewards[task] and not self.own
            )
            other = next(equal, "")
            self._made[task] = self._made.get(other) or self._make(task)
        return self._made[task]

    def _make(self, task: str) -> Scorer:
        reward = self.rewards[task]
        own = self._own_of(task)
        correct_above = None
        if reward.is_verifiable:
            correct_above = reward.correct_above
        if own is not None:
            return function_scorer(own, correct_above, reward.answers)
        # Imported here, because most runs have one kind of reward.
        if reward.function == "verify":
            from g2d_jax.rewards.pool import VerifierPool

            pool = VerifierPool(
                reward.workers,
                cpu_seconds=reward.cpu_seconds,
                decimal_places=reward.decimal_places,
            )
            self._pools.append(pool)
            return VerifierScorer(pool, reward.answers)
        if reward.function == "model":
            from g2d_jax.scoring.reward_model import RewardModel

            model = RewardModel(reward.model, self.mesh(), self.dtype)
            self._models.append(model)
            return lambda problems, texts, _: model.score(
                [problem.prompt for problem in problems], texts
            )
        return function_scorer(
            load_reward(reward.function, reward.folder), correct_above, reward.answers
        )


def _put(scores: list[Score], indices: Sequence[int], found: Sequence[Score]) -> None:
    for index, score in zip(indices, found, strict=True):
        scores[index] = score


def _is_number(answer: str | None) -> bool:
    """Return whether a reference answer can be compared without a worker, for any response."""
    return answer is None or parse_quantity(clean(answer)) is not None
