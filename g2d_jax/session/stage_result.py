"""The record of a finished stage: manifest.json in its folder, written last and at once.

    a stage's run ─► Outcome ─► run_stages adds its origin ─► StageResult ─► write ─► read

A stage is finished when its record can be read.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
from etils import epath

from g2d_jax.runtime import storage
from g2d_jax.study.stats import Accuracy, Paired

VERSION = 1
"""The only version of the record that this library writes and reads."""

CHECKSUM = "checksum"
"""The field of the file that holds the `fingerprint` of all others."""

TOKENS = ("generated", "prefilled", "scored", "trained")
TIMES = ("seconds", "device_seconds", "verifier_cpu_seconds")
MEASURES = (*TOKENS, "tokens", "flops", *TIMES)
"""The measures of a cost. tokens: of the four kinds together. seconds: wall time."""

ACTIVITIES = ("generation", "verification", "logprobs", "training", "checkpointing", "compilation")
"""The activities of a stage; a cost has the seconds of each, "generation_seconds" and so on.

generation: sampling. verification: rewards. logprobs: log-probabilities outside updates, such as a
reference's. training: updates. checkpointing: waiting for checkpoints to be written. compilation:
of programs, in any activity.
"""


@dataclass(slots=True)
class Cost:
    """The cost of a stage so far.

    seconds: wall time without writing checkpoints. device_seconds: seconds times devices. The
    seconds of each of ACTIVITIES are part of seconds, except checkpointing, which is extra.
    """

    seconds: float = 0.0
    device_seconds: float = 0.0
    generated: int = 0
    prefilled: int = 0
    scored: int = 0
    trained: int = 0
    flops: float = 0.0
    verifier_cpu_seconds: float = 0.0
    generation_seconds: float = 0.0
    verification_seconds: float = 0.0
    logprobs_seconds: float = 0.0
    training_seconds: float = 0.0
    checkpointing_seconds: float = 0.0
    compilation_seconds: float = 0.0

    def add(self, part: Mapping[str, float]) -> None:
        """Add amounts by name; other names are ignored."""
        for name, amount in part.items():
            if name in self.__slots__:
                setattr(self, name, getattr(self, name) + amount)

    def part(self, start: float = 0.0, end: float = 1.0) -> dict[str, float]:
        """Return the part between two fractions of it, for `add`.

        Adjacent parts add up to the whole, integers exactly.
        """
        parts: dict[str, float] = {}
        for name, amount in dataclasses.asdict(self).items():
            if isinstance(amount, int) and amount:
                parts[name] = round(amount * end) - round(amount * start)
            elif amount:
                parts[name] = amount * (end - start)
        return parts

    @property
    def tokens(self) -> int:
        """The tokens of all kinds together."""
        return self.generated + self.prefilled + self.scored + self.trained

    @property
    def measures(self) -> dict[str, float]:
        """The amounts of `MEASURES` by name."""
        return {name: float(getattr(self, name)) for name in MEASURES}

    @property
    def shares(self) -> dict[str, float]:
        """Each activity's share of the wall time, and "other", the rest; {} without any time.

        The wall time is `seconds` plus the time of writing checkpoints.
        """
        spent = {name: getattr(self, f"{name}_seconds") for name in ACTIVITIES}
        whole = self.seconds + self.checkpointing_seconds
        if not whole > 0:
            return {}
        fractions = {activity: seconds / whole for activity, seconds in spent.items()}
        return {**fractions, "other": max(0.0, 1 - sum(fractions.values()))}

    @property
    def goodput(self) -> dict[str, float]:
        """The `shares` as metrics, "goodput/generation" and so on."""
        return {f"goodput/{activity}": share for activity, share in self.shares.items()}


@dataclass(frozen=True)
class Warned:
    """A warning of a stage. cause: its name, unique in the stage, or the setting."""

    cause: str
    text: str


@dataclass(frozen=True)
class Stop:
    """Why online training ended. rule: "steps", or "budget" with its measure."""

    rule: str = "steps"
    measure: str = ""


@dataclass(frozen=True)
class TaskResult:
    """A policy's results on the problems of one task; NaN where undefined.

    reward, sem: mean over problems of their mean reward; its standard error clustered by problem.
    length_normalised, length_normalised_sem: for tasks that are not verifiable: mean reward over
    mean response length, with its error. accuracy: of a verifiable task.
    verifiable: whether answers are correct or wrong. problems: those with a reward. unscorable:
    share of responses without one. mean_length: tokens per response. greedy: mean reward of greedy
    answers. score, score_sem: the criterion of best_checkpoint.
    """

    reward: float
    sem: float
    length_normalised: float
    length_normalised_sem: float
    accuracy: float
    verifiable: bool
    problems: int
    unscorable: float
    mean_length: float
    greedy: float = math.nan
    score: float = math.nan
    score_sem: float = math.nan


NO_ACCURACY = Accuracy(math.nan, math.nan, 0)
"""The accuracy of answers that are neither correct nor wrong."""


def marks_of(correct: np.ndarray) -> list[str]:
    """Write answers [N, S], 1 correct, 0 wrong or NaN, as S characters for each problem."""
    letters = np.select([correct == 1, correct == 0], ["1", "0"], "-")
    return list(map("".join, letters.tolist()))


@dataclass(frozen=True)
class Evaluated:
    """A policy's results in an evaluate stage.

    label: for readers, such as the step that a best_checkpoint stage chose. rollouts: the file of
    its completions, relative to the stage's folder. accuracy: NaN if no task is verifiable.
    reward: mean reward if the only task is verifiable. pass_at: k -> pass@k. greedy: accuracy of
    greedy answers, NaN without them. last_number: share of answers that are correct or whose
    last number is the reference answer; NaN unless all reference answers are integers. verdicts:
    number of answers with each. informativeness: see study/informativeness.py. marks: for each
    problem, in the order of `Evaluation.ids`, one character per sampled answer: "1" correct, "0"
    wrong, "-" not scored.
    """

    name: str
    label: str
    rollouts: str
    marks: Sequence[str] = ()
    accuracy: Accuracy = NO_ACCURACY
    reward: float = math.nan
    tasks: Mapping[str, TaskResult] = field(default_factory=dict)
    pass_at: Mapping[str, float] = field(default_factory=dict)
    greedy: float = math.nan
    last_number: float = math.nan
    subsets: Mapping[str, Accuracy] = field(default_factory=dict)
    verdicts: Mapping[str, int] = field(default_factory=dict)
    informativeness: Mapping[str, float] = field(default_factory=dict)

    @functools.cached_property
    def correct(self) -> np.ndarray:
        """The answers [N, S] float64: 1 correct, 0 wrong, NaN not scored; padded with NaN."""
        most = max(map(len, self.marks), default=0)
        joined = "".join(mark.ljust(most, "-") for mark in self.marks)
        codes = np.frombuffer(joined.encode(), np.uint8).reshape(len(self.marks), most)
        values = codes.astype(np.float64) - ord("0")
        values[codes == ord("-")] = math.nan
        return values

    def measure(self, name: str) -> float:
        """Return one of `informativeness`, NaN if it is not there."""
        return self.informativeness.get(name, math.nan)


NOT_COMPARED = Paired(math.nan, math.nan, 0)


@dataclass(frozen=True)
class Change:
    """The paired difference of two policies, after - before: in sampled accuracy, greedy accuracy,
    and the rewards of tasks that are not verifiable."""

    before: str
    after: str
    sampled: Paired = NOT_COMPARED
    greedy: Paired = NOT_COMPARED
    tasks: Mapping[str, Paired] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluate stage. ids: of the problems, in order. samples: answers per
    problem. sampling: its settings."""

    policies: Sequence[Evaluated]
    changes: Sequence[Change]
    ids: Sequence[str]
    problems: int
    samples: int
    split: str
    sampling: Mapping[str, Any]

    @functools.cached_property
    def by_name(self) -> dict[str, Evaluated]:
        """The policies by name, in the order they were evaluated."""
        return {policy.name: policy for policy in self.policies}

    def change(self, before: str, after: str) -> Change:
        """Return the difference of two policies, NaN where they were not compared."""
        for change in self.changes:
            if (change.before, change.after) == (before, after):
                return change
        return Change(before, after)


@dataclass(frozen=True)
class Scored:
    """The score of a checkpoint and its standard error, and the results of each task."""

    score: float
    sem: float
    tasks: Mapping[str, TaskResult]


@dataclass(frozen=True)
class Selection:
    """The choice of a best_checkpoint stage. policy: "STAGE@STEP". steps: step -> its score."""

    policy: str
    steps: Mapping[str, Scored]
    split: str


@dataclass(frozen=True)
class Compiled:
    """The number of times that a program was compiled or read from the cache, and their seconds."""

    compiled: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The part of a record that a stage's run returns.

    cost: of the whole stage. costs: step -> the cost up to each kept step. counts: of steps,
    prompts, pairs. generation: metrics of its sampling. stop: why an online stage ended. measures:
    further metrics: of a collect stage "rollouts", "informativeness" and "pairs"; of an offline
    stage "before", "after" and "margins".
    """

    cost: Cost = field(default_factory=Cost)
    costs: Mapping[str, Cost] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    warnings: Sequence[Warned] = ()
    generation: Mapping[str, float] = field(default_factory=dict)
    stop: Stop | None = None
    measures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    evaluation: Evaluation | None = None
    selection: Selection | None = None

    def measure(self, part: str, name: str) -> float:
        """Return one of `measures`, NaN if it is not there."""
        return self.measures.get(part, {}).get(name, math.nan)


@dataclass(frozen=True, kw_only=True)
class StageResult(Outcome):
    """The record of a finished stage.

    fingerprint: of its own settings and all its inputs. started: Unix seconds. programs: those
    compiled during it, by name. peak_memory_bytes: of host memory.
    """

    kind: str
    name: str
    fingerprint: str | None = None
    started: float = math.nan
    programs: Mapping[str, Compiled] = field(default_factory=dict)
    peak_memory_bytes: float = math.nan


def write(folder: storage.PathLike, result: StageResult) -> None:
    """Write the record, which makes its stage finished. Call it when all its other files are on
    disk."""
    content = storage.plain({"version": VERSION, **vars(result)})
    content[CHECKSUM] = storage.fingerprint(content)
    storage.write_json(epath.Path(folder) / storage.MANIFEST, content)


def read(folder: storage.PathLike) -> StageResult | None:
    """Read the record of a finished stage, None if it is not finished.

    Raises ValueError for a damaged record (wrong checksum), or one of another version.
    """
    path = epath.Path(folder) / storage.MANIFEST
    try:
        content = storage.read_json(path)  # not exists() first: an object store may list late
    except FileNotFoundError:
        return None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    if content.pop(CHECKSUM, None) != storage.fingerprint(content):
        raise ValueError(
            f"{path} was edited or damaged: its checksum does not fit. Restore a copy of it, or "
            "delete it: the stage then writes it again from its other files"
        )
    version = content.pop("version", 0)
    if version != VERSION:
        raise ValueError(
            f"{path} is a record of version {version}, and this g2d_jax reads version {VERSION}: "
            "use the g2d_jax that wrote it, or another --workdir"
        )
    try:
        return _reader(StageResult)(content)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} has other fields than this g2d_jax reads ({error}): use the g2d_jax that wrote "
            "it, or another --workdir"
        ) from error


def read_lenient(folder: storage.PathLike) -> tuple[StageResult | None, str]:
    """Return the record and "", or None and the error; for reports, which can do without it."""
    try:
        return read(folder), ""
    except storage.StoreUnavailable:
        raise
    except (OSError, ValueError) as error:
        return None, str(error)


@functools.cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """Return the function that restores a value of a type from JSON."""
    arguments = get_args(kind)
    origin = get_origin(kind)
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        readers = {one.name: _reader(hints[one.name]) for one in dataclasses.fields(kind)}

        make: Any = kind

        def restore(fields: dict[str, Any]) -> Any:
            return make(**{name: readers[name](value) for name, value in fields.items()})

        return restore
    if origin is not None and arguments[-1] is type(None):
        inner = _reader(arguments[0])
        return lambda value: None if value is None else inner(value)
    if origin is Mapping:
        item = _reader(arguments[1])
        return lambda values: {name: item(value) for name, value in values.items()}
    if origin is Sequence:
        item = _reader(arguments[0])
        return lambda values: list(map(item, values))
    return float if kind is float else lambda value: value
