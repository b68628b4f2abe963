"""The scoring of responses, each by the reward of its problem's task. Equal rewards of several tasks share a scorer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from etils import epath
from jax.sharding import Mesh

from g2d_jax.config import Reward
from g2d_jax.records import Problem, Score, Verdict
from g2d_jax.rewards.functions import RewardFunction, Scorer, VerifierScorer, function_scorer, load_reward
from g2d_jax.rewards.judge import JudgeScorer
from g2d_jax.rewards.normalise import clean
from g2d_jax.rewards.pool import Begun, VerifierPool
from g2d_jax.rewards.quantity import parse_quantity
from g2d_jax.runtime import processes
from g2d_jax.scoring.reward_model import RewardModel


@dataclass
class RewardManager:
    """The rewards of all tasks. rewards: task -> its reward section. own: a caller's function in place of the main
    task's reward.

    journal: folder for the judges' answers; of several processes each has its own in it. Pools and reward models start
    when they are first needed. Of several processes each scores some of the responses, but a reward model lies on the
    devices of all of them, and all must run it at once, on the same responses: its scores are joint.
    """

    rewards: Mapping[str, Reward]
    mesh: Callable[[], Mesh]
    journal: epath.Path
    own: RewardFunction | None = None
    _made: dict[str, Scorer] = field(default_factory=dict)
    _pools: list[VerifierPool] = field(default_factory=list)
    _models: list[RewardModel] = field(default_factory=list)
    _judges: list[JudgeScorer] = field(default_factory=list)
    _elsewhere: float = 0.0  # CPU seconds of other processes' verifiers

    def __call__(
        self, problems: Sequence[Problem], texts: Sequence[str], token_ids: Sequence[np.ndarray]
    ) -> list[Score]:
        """Return one Score per response, in order. token_ids: [T] int32 each. All processes call it, with the same."""
        mine = slice(processes.index(), None, processes.count())
        with processes.barrier():
            own = self.apart(problems[mine], texts[mine], token_ids[mine])
        self.share_usage()
        shares = processes.gather([[score.reward, score.verdict.value, score.answer] for score in own])
        scores = [Score(None, Verdict.UNSCORABLE)] * len(problems)
        for first, share in enumerate(shares):
            scores[first :: processes.count()] = [
                Score(reward, Verdict(verdict), answer) for reward, verdict, answer in share
            ]
        return self.joint(problems, texts, token_ids, scores)

    def start(self, problems: Sequence[Problem]) -> None:
        """Let the verifiers' workers start in the background, for tasks with answers that are more than a number.

        problems: some of each task's, whose answers decide that.
        """
        hard = {problem.task for problem in problems if not _is_number(problem.answer)}
        for task, reward in self.rewards.items():
            if task in hard and reward.function == "verify" and not (task == "main" and self.own):
                self._of(task)
        for pool in self._pools:
            pool.start()

    def verifier(self, task: str) -> VerifierPool:
        """Return what grades a task's responses. Raises ValueError for a task with another reward."""
        scorer = self._of(task)
        if not isinstance(scorer, VerifierScorer):
            raise ValueError(f"task {task!r} is not scored by the verifier")
        return scorer.pool

    def begin(self, problem: Problem, text: str) -> Begun | None:
        """Begin to score a response while others are sampled, where each is scored by itself; for `apart`."""
        scorer = None if self._is_joint(problem.task) else self._of(problem.task)
        return scorer.begin(problem, text) if isinstance(scorer, VerifierScorer) else None

    def apart(
        self,
        problems: Sequence[Problem],
        texts: Sequence[str],
        token_ids: Sequence[np.ndarray],
        begun: Sequence[Begun | None] | None = None,
    ) -> list[Score]:
        """Compute the scores that this process can give by itself; joint ones are unscorable as yet.

        begun: the result of `begin` for each response.
        """
        scores = [Score(None, Verdict.UNSCORABLE)] * len(problems)
        return self._score(problems, texts, token_ids, scores, begun, joint=False)

    def joint(
        self,
        problems: Sequence[Problem],
        texts: Sequence[str],
        token_ids: Sequence[np.ndarray],
        scores: Sequence[Score],
    ) -> list[Score]:
        """Put the joint scores into the scores. All processes call it with the same responses."""
        return self._score(problems, texts, token_ids, scores, None, joint=True)

    def has_joint(self) -> bool:
        """Return whether any task has joint scores."""
        return any(map(self._is_joint, self.rewards))

    def _is_joint(self, task: str) -> bool:
        return self.rewards[task].function == "model" and not (task == "main" and self.own)

    def _score(
        self,
        problems: Sequence[Problem],
        texts: Sequence[str],
        token_ids: Sequence[np.ndarray],
        scores: Sequence[Score],
        begun: Sequence[Begun | None] | None,
        *,
        joint: bool,
    ) -> list[Score]:
        """Replace the scores of some tasks' problems."""
        merged = list(scores)
        for task in dict.fromkeys(problem.task for problem in problems):
            if self._is_joint(task) != joint:
                continue
            indices = [i for i, problem in enumerate(problems) if problem.task == task]
            scorer, under_way = self._of(task), [begun[i] for i in indices] if begun else []
            if isinstance(scorer, VerifierScorer) and under_way:
                new = scorer.pool.finish([work for work in under_way if work is not None])
            else:
                new = scorer(
                    [problems[i] for i in indices], [texts[i] for i in indices], [token_ids[i] for i in indices]
                )
            for index, score in zip(indices, new, strict=True):
                merged[index] = score
        return merged

    def usage(self) -> dict[str, float]:
        """Return the cost of scoring since the start, as fields of a Cost; other processes' is that of the last
        `share_usage`."""
        return {
            "verifier_cpu_seconds": self._elsewhere + self._own_seconds(),
            "scored": sum(model.usage.tokens for model in self._models),
            "flops": sum(model.usage.flops for model in self._models),
        }

    def share_usage(self) -> None:
        """Share the cost of this process's verifiers with the others. All processes make the call."""
        own = self._own_seconds()
        self._elsewhere = sum(processes.gather(own)) - own

    def _own_seconds(self) -> float:
        return sum(pool.cpu_seconds for pool in self._pools)

    def close(self) -> None:
        """End the verifiers' processes and the judges' connections."""
        for pool in self._pools:
            pool.close()
        for judge in self._judges:
            judge.close()

    def _of(self, task: str) -> Scorer:
        if task not in self._made:
            same = [t for t in self._made if self.rewards[t] == self.rewards[task] and not self.own]
            self._made[task] = self._made[same[0]] if same else self._make(task)
        return self._made[task]

    def _make(self, task: str) -> Scorer:
        reward = self.rewards[task]
        own = self.own if task == "main" else None
        if own is None and reward.function == "verify":
            pool = VerifierPool(
                reward.workers,
                cpu_seconds=reward.cpu_seconds,
                memory_mb=reward.memory_mb,
                unreadable=reward.unreadable,
                decimal_places=reward.decimal_places,
            )
            self._pools.append(pool)
            return VerifierScorer(pool, reward.answers)
        if own is None and reward.function == "model":
            model = RewardModel(reward.model, self.mesh())
            self._models.append(model)
            return lambda problems, texts, _: model.score([problem.prompt for problem in problems], texts)
        if own is None and reward.function == "judge":
            folder = self.journal / task
            own_folder = folder / f"process-{processes.index()}" if processes.count() > 1 else folder
            judge = JudgeScorer(reward.judge, own_folder)
            self._judges.append(judge)
            return judge
        function = own or load_reward(reward.function, reward.folder)
        return function_scorer(function, reward.correct_above if reward.is_verifiable else None, reward.answers)


def _is_number(answer: str | None) -> bool:
    """Return whether a reference answer can be compared without a worker, whatever the response."""
    return answer is None or parse_quantity(clean(answer)) is not None
