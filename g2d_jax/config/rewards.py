"""Tasks: the sources of problems, and the scoring of responses to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Annotated, Literal

from g2d_jax.config.section import (
    Bounds,
    FilePath,
    Issue,
    ModelPath,
    NotNegativeFloat,
    OnError,
    Positive,
    ProblemsPath,
    Run,
    Section,
    error,
    warning,
)
from g2d_jax.records import MOST_REWARD, AnswerRule

Weight = Annotated[float, Bounds(least=-1000, most=1000, why="reward.function itself has weight 1")]


class Source(Section):
    """A source of problems. path: a file, "hub:owner/name", "math500" …, or "procedural:slips".

    split: "train", "dev" or "test" by id hash, "" for all. fields: our field name -> the file's.
    """

    path: ProblemsPath = ""
    revision: str | None = None  # of a dataset on the hub: a commit, branch or tag
    split: Literal["", "train", "dev", "test"] = ""
    limit: Positive | None = None  # keep the first `limit`
    fields: Mapping[str, str] = field(default_factory=dict)
    on_error: OnError = "raise"


class Splits(Section):
    """The problems of a task, and its share of every batch. A split without a path is empty."""

    train: Source = Source()
    dev: Source = Source()
    test: Source = Source()
    weight: NotNegativeFloat = 1.0


class Data(Splits):
    """The problems of the task "main"."""

    max_prompt_length: Positive = 256


class RewardModel(Section):
    """A model that scores responses."""

    path: ModelPath = ""  # a Hugging Face folder or hub id with a scalar head, and its tokenizer
    revision: str | None = None
    # tokens of prompt and response; longer ones are not scored, never truncated
    max_length: Positive = 4096
    batch_tokens: Positive = 16_384  # tokens of one forward pass, over all devices


class Reward(Section):
    """The scoring of responses.

    function: "verify" (math-verify against the reference answer), "model" (a reward model), or
    "package.module:function" (TRL's signature). module.py may be in `folder`, by default the config
    file's. functions: more functions, for example for the format. The reward is that of `function`
    plus their weighted sum. `function` alone decides correctness, and so pairs, unless verifiable
    is False. answers: how the final answer is extracted, also with your own function. verifiable: a
    reward above correct_above counts as correct. If False, rewards only rank: pairs are the best
    against the worst of a group, and there is no accuracy.
    """

    function: str = "verify"
    functions: tuple[str, ...] = ()  # more functions, whose weighted rewards are added
    weights: tuple[Weight, ...] = ()  # one for each of `functions`
    folder: FilePath | None = None  # contains the function's file; unset: `resolve` finds it
    # "last_line": or "Answer: x"; "hash": "#### x"; "tags": "<answer>x</answer>"
    answers: AnswerRule = "boxed"
    verifiable: bool | None = None  # unset: True, except for function "model"
    correct_above: Annotated[
        float, Bounds(least=-MOST_REWARD, most=MOST_REWARD, why="rewards have this limit")
    ] = 0.5
    cpu_seconds: Annotated[
        float,
        Bounds(
            above=0,
            most=3600,
            why="seconds for one answer; an answer that hangs the verifier uses them all",
        ),
    ] = 5.0
    workers: Annotated[int, Bounds(least=1, most=1024, why="each is a process on this machine")] = 1
    decimal_places: Annotated[
        int,
        Bounds(
            least=1,
            most=6,
            why="decimal places to which a decimal may round another number",
        ),
    ] = 6
    model: RewardModel = RewardModel()

    @property
    def is_function(self) -> bool:
        """True if `function` is your own."""
        return self.function not in ("verify", "model")

    @property
    def user_functions(self) -> tuple[str, ...]:
        """The import paths of all your own functions, which receive all columns."""
        return (self.function,) * self.is_function + self.functions

    @property
    def is_verifiable(self) -> bool:
        """True if its rewards mark responses as correct or incorrect."""
        if self.verifiable is None:
            return self.function != "model"
        return self.verifiable

    def issues(self, run: Run) -> Iterator[Issue]:
        """Yield a `verifiable` that the function does not support, settings of another function,
        and a reward model without a path."""
        knows = {"verify": "right and wrong", "model": "better and worse only"}
        # A sum with more functions may only rank, even with the verifier.
        ranks = bool(self.functions) and not self.is_verifiable
        if not (self.is_function or ranks) and self.is_verifiable != (self.function == "verify"):
            yield error(
                "verifiable",
                f"is {self.verifiable}, but {self.function!r} knows {knows[self.function]}",
                "leave it unset",
            )
        yield from self._further_issues()
        if self.answers != "boxed" and self.function == "model":
            yield error("answers", "is set, but a reward model reads whole responses", "remove it")
        if self.function == "verify" and self.correct_above != Reward().correct_above:
            yield warning("correct_above", "is set, but the verifier returns only 1 or 0")
        if self.function != "verify" and self.decimal_places != Reward().decimal_places:
            yield error(
                "decimal_places",
                f"is for the verifier, but function is {self.function!r}",
                "remove it",
            )
        if self.function == "model" and not self.model.path:
            yield error(
                "model.path",
                "is not set",
                "set it to the folder or hub id of a model with a scalar head",
            )
        if self.model.path and self.function != "model":
            yield error(
                "model.path",
                f"is set, but function is {self.function!r}, which uses no model",
                "set function to 'model', or remove it",
            )

    def _further_issues(self) -> Iterator[Issue]:
        """Yield functions without a weight, and functions named twice."""
        if len(self.functions) != len(self.weights):
            yield error(
                "weights",
                f"has {len(self.weights)} numbers for {len(self.functions)} functions",
                "set one for each",
            )
        known = ("verify", "model", self.function)
        for name in self.functions:
            if name in known or self.functions.count(name) > 1:
                yield error(
                    "functions",
                    f"has {name!r}",
                    "name each of your functions once, and set function to verify, model or the "
                    "function that decides correctness",
                )
                return


class Task(Splits):
    """A task: its problems, and its reward."""

    reward: Reward = Reward()
