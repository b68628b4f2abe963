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
    """A source of problems or examples: `settings.source(PATH, SPLIT, LIMIT, FIELDS)`."""

    path: ProblemsPath = ""
    """JSONL, JSON or Parquet, also on `gs://` or `s3://`; `hub:owner/name`; a dataset's name
    (`gsm8k`); or an embedded task: `procedural:slips` (the demo's), `procedural:chains`,
    `procedural:digits`."""
    revision: str | None = None
    """A commit, branch or tag of the hub."""
    split: Literal["", "train", "dev", "test"] = ""
    """The rows of this split, by the hash of their id. Empty: all rows."""
    limit: Positive | None = None
    """The first N rows of the split that are usable and distinct. `procedural:` has no end and
    needs one, except for SFT."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Our names of columns and the file's: `{"problem": "q"}`, for SFT
    `{"prompt": "question", "completion": "solution"}`. Found without it: `problem`, `question`,
    `prompt`, `messages`; `answer`, `final_answer`, `expected_answer`, `solution`, `ground_truth`,
    `reward_model.ground_truth` (also GSM8K's `#### N`)."""
    on_error: OnError = "raise"
    """Broken rows are left out and counted: `raise` allows 5 % of all rows, `skip` any share. A
    source without a usable row is refused."""


class Splits(Section):
    """The problems of a task, and its share of every batch. A split without a path is empty."""

    train: Source = Source()
    """Problems to train on. Those of dev and test are removed, also where they are inside a system
    message, the prompt template or a conversation."""
    dev: Source = Source()
    """Problems to choose by. Those of test are removed."""
    test: Source = Source()
    """Problems to report on."""
    weight: NotNegativeFloat = 1.0
    """The task's weight: a batch holds tasks in the ratio of their weights."""


class Data(Splits):
    """The problems of the task `main`. A stage without the problems that it needs is refused."""

    max_prompt_length: Positive = 256
    """The longest prompt, in tokens. Longer ones are left out and counted."""


class RewardModel(Section):
    """The model that scores responses if `function` is `model`."""

    path: ModelPath = ""
    """A model with a scalar head (`LlamaForSequenceClassification`, Qwen2's, Qwen3's, Athene-RM's
    `v_head`), named as `model.path`, with a tokenizer that has a chat template. Its weights are in
    `dtype`."""
    revision: str | None = None
    """A commit, branch or tag of the hub."""
    max_length: Positive = 4096
    """The longest prompt and response, in tokens. Longer ones get no score; none is truncated."""
    batch_tokens: Positive = 16_384
    """Tokens of one forward pass, over all devices."""


class Reward(Section):
    """The scoring of responses (docs/rewards.md, docs/grading.md)."""

    function: str = "verify"
    """`verify` (math-verify against the reference answer), `model` (a reward model), or
    `package.module:function` with TRL's signature: installed, on `PYTHONPATH`, or in `module.py`
    next to the config file. It alone decides what is correct, and so pairs, unless `verifiable` is
    false."""
    functions: tuple[str, ...] = ()
    """More functions of yours, for example for the format. Their weighted rewards are added
    (docs/rewards.md#several-rewards)."""
    weights: tuple[Weight, ...] = ()
    """One for each of `functions`."""
    folder: FilePath | None = None
    """The folder of the function's file. Reading a config file sets it."""
    answers: AnswerRule = "boxed"
    """How the final answer is found, also for your own function. `boxed`: `\\boxed{x}`.
    `last_line`: a box, else the text after "Answer:". `hash`: `#### x`. `tags`:
    `<answer>x</answer>`. Risks: docs/grading.md#the-answer."""
    verifiable: bool | None = None
    """Whether rewards mark responses as right or wrong. If not, pairs are the best against the
    worst of a group, and there is no accuracy. Unset: true, except for a reward model."""
    correct_above: Annotated[
        float, Bounds(least=-MOST_REWARD, most=MOST_REWARD, why="rewards have this limit")
    ] = 0.5
    """A reward above this counts as right."""
    cpu_seconds: Annotated[
        float,
        Bounds(
            above=0,
            most=3600,
            why="seconds for one answer; an answer that hangs the verifier uses them all",
        ),
    ] = 5.0
    """CPU-seconds for the verdict on one response. Beyond them, or beyond 2 GB, it is wrong."""
    workers: Annotated[int, Bounds(least=1, most=1024, why="each is a process on this machine")] = 1
    """Processes that run the verifier."""
    decimal_places: Annotated[
        int,
        Bounds(
            least=1,
            most=6,
            why="decimal places to which a decimal may round another number",
        ),
    ] = 6
    """For `verify`: decimal places to which a decimal may round the other number. Fewer is a
    tolerance (docs/grading.md#right)."""
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
