"""The records passed between the parts of the library. One problem's path:

    Problem ─► Request ─► Rollout ─► Score ─► ScoredRollout ─► Preference

All are frozen, host-side and free of JAX. Training sees token ids; rewards and readers see text.
Shapes: P prompt tokens, T response tokens (the stop token included, when there is one).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

Message: TypeAlias = Mapping[str, str]
"""One chat message: {"role": "system" | "user" | "assistant", "content": text}."""

Conversation: TypeAlias = tuple[Message, ...]
"""The messages of a chat, in order."""

Prompt: TypeAlias = str | Conversation
"""A bare problem statement, or a conversation that ends with a user message."""

AnswerRule = Literal["boxed", "last_line", "hash", "tags"]
"""The rule that finds the final answer of a response: see rewards/extract.py."""

SEGMENT_STRIDE = 1024
"""A packed token's segment id is group * SEGMENT_STRIDE + member. Tokens of member 0 form the
prefix that every member of the group may read: the responses to one prompt share one copy. Plain
packing has member 0 only; group 0 is padding.
"""


@dataclass(frozen=True, slots=True)
class Problem:
    """One prompt with its reference answer.

    id: stable 16 hex digits, from the prompt's text alone: the same prompt is the same problem.
    prompt: the statement before templating, or chat messages.
    answer: reference ("gold") answer as the dataset stores it, bare LaTeX or text; or None.
    source: name of the file or data set; subset: group for reporting (subject, level), may be "".
    solution: a worked solution if the data has one.
    columns: every other field of the row, passed to your reward functions.
    task: name of its task, whose reward scores its responses; see `config.task`.
    """

    id: str
    prompt: Prompt
    answer: str | None = None
    source: str = ""
    subset: str = ""
    solution: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    task: str = "main"


Item = TypeVar("Item")


def pick(items: Sequence[Item], indices: Iterable[int]) -> list[Item]:
    """List the items at some indices."""
    return [items[i] for i in indices]


def by_id(problems: Iterable[Problem]) -> dict[str, Problem]:
    """Map problems by id."""
    return {problem.id: problem for problem in problems}


def indices_by_task(problems: Sequence[Problem]) -> dict[str, list[int]]:
    """Map each task to the indices of its problems."""
    by_task: dict[str, list[int]] = {}
    for index, problem in enumerate(problems):
        by_task.setdefault(problem.task, []).append(index)
    return by_task


@dataclass(frozen=True, slots=True)
class Example:
    """One supervised example: the completion follows the prompt and only the completion carries
    loss."""

    id: str
    prompt: Prompt
    completion: str


MOST_STOPS, LONGEST_STOP = 16, 256
"""The most stop strings, and the most characters of one: the sampler decodes each chunk of tokens
with as many tokens of context."""


def stop_fault(stop: Sequence[str]) -> str:
    """Explain why stop strings cannot end a response, and what to change; "" where they can."""
    if isinstance(stop, str) or not all(isinstance(string, str) for string in stop):
        return f'is a list of texts, such as ("\\nProblem:",), got {stop!r:.200}'
    if len(stop) > MOST_STOPS:
        return f"can have at most {MOST_STOPS} texts, got {len(stop)}: keep those that occur"
    for string in stop:
        if not string:
            return "has an empty text, which every response contains: remove it"
        if len(string) > LONGEST_STOP:
            return (
                f"has a text of {len(string)} characters, the limit is {LONGEST_STOP}: use "
                "its beginning"
            )
        if "\ufffd" in string or any("\ud800" <= character <= "\udfff" for character in string):
            return (
                f"has {string!r:.100}, which contains broken characters (U+FFFD or surrogates): "
                "remove it"
            )
    return ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Settings of sampling. temperature 0 is greedy; top_p 1 and top_k 0 switch the filters off.

    max_new_tokens counts the stop token. stop_ids: any of them ends the response (and stays in it).
    stop: strings that also end it; the token that completes one is the last (data/stops.py).
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if fault := stop_fault(self.stop):
            raise ValueError(f"stop {fault}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not self.temperature >= 0.0:
            raise ValueError(f"temperature must be 0 (greedy) or positive, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], where 1 switches it off, got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or positive, got {self.top_k}")


@dataclass(frozen=True, slots=True)
class Request:
    """A request to the sampler for samples 0 … num_samples - 1 of one prompt.

    problem_id, visit (how often the prompt was drawn earlier) and the sample index determine the
    randomness. greedy: whether the last sample is decoded greedily, regardless of params.
    needs_logprobs: whether a loss needs log-probabilities, which a server may not provide.
    """

    problem_id: str
    prompt_ids: np.ndarray  # [P] int32
    params: SamplingParams
    num_samples: int = 1
    visit: int = 0
    greedy: bool = False
    needs_logprobs: bool = False

    def params_of(self, sample: int) -> SamplingParams:
        """Return the settings of one sample."""
        if self.greedy and sample == self.num_samples - 1:
            return replace(self.params, temperature=0.0, top_p=1.0, top_k=0)
        return self.params


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One sampled response.

    logprobs, entropies: in nats, of the distribution that each token was sampled from (after
    temperature and filters).
    stop_reason: "stop" when a stop token was sampled or a stop string completed, "length" when
    max_new_tokens cut it.
    """

    problem_id: str
    visit: int
    sample: int
    prompt_ids: np.ndarray  # [P] int32
    token_ids: np.ndarray  # [T] int32
    logprobs: np.ndarray  # [T] float32
    entropies: np.ndarray  # [T] float32
    stop_reason: Literal["stop", "length"]

    @property
    def length(self) -> int:
        """Count the tokens of the response."""
        return len(self.token_ids)


class Verdict(enum.StrEnum):
    """A verifier's verdict on a response.

    TIMEOUT: the answer exceeded the verifier's CPU time or memory, or crashed it. It counts as
    wrong everywhere, so that a policy gains nothing from answers that hang the verifier.
    UNSCORABLE: the problem, the reward or the machine is at fault; the response counts nowhere.
    SCORED: the reward has degrees, but no right and wrong.
    """

    CORRECT = "correct"
    INCORRECT = "incorrect"
    NO_ANSWER = "no_answer"
    TIMEOUT = "timeout"
    UNSCORABLE = "unscorable"
    SCORED = "scored"

    @property
    def accuracy(self) -> float:
        """Return the verdict's value in an accuracy: 1 for CORRECT, NaN (left out) for UNSCORABLE
        and SCORED, else 0.

        Rewards, advantages, pass rates, pairs and accuracies all use this rule for correctness.
        """
        if self in (Verdict.UNSCORABLE, Verdict.SCORED):
            return math.nan
        return 1.0 if self is Verdict.CORRECT else 0.0


MOST_REWARD = 1e12
"""The largest absolute reward: sums of squares over any batch then stay finite in float32."""


EQUAL = 1e-9
"""Rewards within this relative difference count as equal: rounding separates 0.1 + 0.2 and 0.3."""


def exceeds(reward: Any, other: Any) -> Any:
    """Return whether a reward is above another by more than EQUAL; accepts arrays.

    `exceeds` and `differ` define which rewards are equal: in advantages, signals, pairs, curricula
    and metrics. NaN exceeds nothing.
    """
    return reward - other > EQUAL * np.maximum(np.abs(reward), np.abs(other))


def differ(rewards: np.ndarray) -> Any:
    """Return whether any two rewards of a group differ by more than EQUAL, bool [...].

    rewards: float64 [..., G], NaN for a response that could not be scored, which is ignored.
    """
    scored = ~np.isnan(rewards)
    highest = np.where(scored, rewards, -math.inf).max(-1, initial=-math.inf)
    lowest = np.where(scored, rewards, math.inf).min(-1, initial=math.inf)
    return exceeds(highest, lowest)


def is_reward(value: float) -> bool:
    """Return whether a number can be a reward: not NaN and not beyond MOST_REWARD."""
    return -MOST_REWARD <= value <= MOST_REWARD


MOST_LOGPROB = 1e-3
"""Rounding adds at most this much to a log-probability of 0."""

LEAST_LOGPROB = -104.0
"""Below the log-probability of every token that can be sampled: a float32 probability below 2^-150,
half of the smallest positive number, is 0, and ln 2^-150 = -103.97."""


def is_logprob(value: Any) -> Any:
    """Return whether a number can be a sampled token's log-probability; accepts arrays: not NaN,
    from LEAST_LOGPROB to MOST_LOGPROB."""
    return (value >= LEAST_LOGPROB) & (value <= MOST_LOGPROB)


@dataclass(frozen=True, slots=True)
class Score:
    """A response's reward and verdict. reward None is unscorable: counted, but left out of means,
    baselines and pairs.

    answer: the final answer extracted from the response, or None.
    parts: function -> its own reward, if the reward is a weighted sum; else {}.
    """

    reward: float | None
    verdict: Verdict
    answer: str | None = None
    parts: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def accuracy(self) -> float:
        """Return the verdict's `accuracy`, NaN without a reward."""
        return math.nan if self.reward is None else self.verdict.accuracy


@dataclass(frozen=True, slots=True, eq=False)
class ScoredRollout:
    """A rollout with its text and score: one row of rollouts/*.parquet.

    policy: name of the policy that sampled it ("warmup@20").
    """

    rollout: Rollout
    text: str
    score: Score
    policy: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Preference:
    """One (chosen, rejected) pair of the same prompt: one row of preferences/*.parquet.

    chosen_truncated, rejected_truncated: whether max_new_tokens cut the response, so that its ids
    have no stop token; None if unknown.
    """

    problem_id: str
    prompt: Prompt
    chosen: str
    rejected: str
    prompt_ids: np.ndarray  # [P] int32
    chosen_ids: np.ndarray  # [Tc] int32
    rejected_ids: np.ndarray  # [Tr] int32
    chosen_reward: float
    rejected_reward: float
    chosen_truncated: bool | None = None
    rejected_truncated: bool | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended before its last stage.

    how: "until" (the stage that --until named), "signal" or "error". text: the signal's name, or
    the error. stage: where the error occurred, or "". hopeless: whether the same command would
    stop at the same place again.
    """

    how: Literal["until", "signal", "error"]
    text: str = ""
    stage: str = ""
    hopeless: bool = False


def tie_nats(magnitude: Any) -> Any:
    """Return how far rounding alone can separate the log-ratios of a pair's responses, in nats;
    accepts arrays.

    magnitude: the sum of the absolute values, in nats, of the log-probabilities in the two ratios.
    Each is a sum over tokens in float32, whose relative step is 1.2e-7. A token's own comes from
    logits of some tens, whose step is about 4e-6. Differences below this are not training effects.
    """
    return 1e-5 + 1e-6 * magnitude
