"""Settings as frozen records: names, defaults, types, choices and bounds in one place, checked
where one is made.

class Sampling(Section):
    temperature: Annotated[float, Bounds(least=0)] = 1.0

editable(Sampling()) ─► ConfigDict, which config files and --config.FIELD=VALUE change ─► read(Sampling, …)
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar, Union

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from g2d_jax.runtime.terminal import shortened

S = TypeVar("S", bound="Section")
Made = TypeVar("Made")

Run: TypeAlias = Any
"""The whole `Config`, which rules of a section may read: settings.py makes it of all sections."""


@dataclass(frozen=True)
class Bounds:
    """The bounds of a number: at least, more than, at most, less than these. why: of a bound that
    is not plain. words: the bounds in a word, in place of these."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    why: str = ""
    words: str = ""

    @property
    def _limits(self) -> Iterator[tuple[str, Any, float]]:
        """Yield what each bound is called, how a value is compared with it, and the bound."""
        for words, holds, limit in (
            ("at least", operator.ge, self.least),
            ("more than", operator.gt, self.above),
            ("at most", operator.le, self.most),
            ("less than", operator.lt, self.below),
        ):
            if limit is not None:
                yield words, holds, limit

    def __str__(self) -> str:
        """Return the bounds for a message: "at least 1 and at most 90"."""
        limits = []
        for words, _, limit in self._limits:
            shown = f"{limit:,}" if isinstance(limit, int) else f"{limit:g}"
            limits.append(f"{words} {shown}")
        return self.words or " and ".join(limits)

    def hold(self, value: float) -> bool:
        """Return whether a value keeps to the bounds; NaN keeps to none."""
        return all(holds(value, limit) for _, holds, limit in self._limits)


NonNegative = Annotated[int, Bounds(least=0)]
Positive = Annotated[int, Bounds(least=1)]
Fraction = Annotated[float, Bounds(least=0, most=1)]


@dataclass(frozen=True)
class Place:
    """The mark of a text setting that may name a file or folder; places.py reads it.

    kind: "path" is always one. "model" may be a hub id, "problems" a data set's name, "policy" a
    stage's or "init", "rollouts" and "preferences" a stage's name.
    """

    kind: Literal["path", "model", "problems", "policy", "rollouts", "preferences"]


# Types that several sections share

Dtype = Literal["float32", "bfloat16"]
Split = Literal["dev", "test"]
Tokens = Literal["generated", "prefilled", "scored", "trained", "tokens"]
Measure = Literal[Tokens, "flops", "seconds", "device_seconds", "verifier_cpu_seconds"]

OnError = Literal["raise", "skip"]
"""Broken rows of a set: at most 5 %, or any share."""

NotNegativeFloat = Annotated[float, Bounds(least=0, below=math.inf)]

# Of servers that are asked: beyond these a run would hang, or take all connections of this machine,
# and not say why.
Timeout = Annotated[
    float,
    Bounds(above=0, most=86_400, why="seconds, a day at most, after which a server is given up"),
]
Retries = Annotated[int, Bounds(least=0, most=100, why="further attempts of one request")]
Concurrency = Annotated[
    int, Bounds(least=1, most=4096, why="each request under way takes a thread and a connection")
]

# Texts that may name a file or folder: places.py makes them absolute.
FilePath = Annotated[str, Place("path")]
ModelPath = Annotated[str, Place("model")]
ProblemsPath = Annotated[str, Place("problems")]
Policy = Annotated[str, Place("policy")]
Policies = Annotated[tuple[str, ...], Place("policy")]
Rollouts = Annotated[str, Place("rollouts")]
Preferences = Annotated[str, Place("preferences")]


@dataclass(frozen=True)
class Issue:
    """Something wrong with the settings of a run. An error stops it, a warning does not.

    path: the setting, dotted, or the section. text goes on from it: "must be at least 1, got 0".
    remedy: what to do, "" where the text says so.
    """

    level: Literal["error", "warning"]
    path: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        # a setting may hold a text of any length
        whole = f"{self.path} {shortened(self.text, 1000)}".strip()
        return f"{whole}: {self.remedy}" if self.remedy else whole


error = functools.partial(Issue, "error")
warning = functools.partial(Issue, "warning")


def faults(path: str, look: Callable[[], object]) -> list[Issue]:
    """Return what a function finds wrong, [] where it raises nothing. path: as in `made`."""
    try:
        made(path, look)
    except Invalid as fault:
        return list(fault.issues)
    return []


def made(path: str, step: Callable[[], Made]) -> Made:
    """Return what a function makes. Raises Invalid for its ValueError. path: the setting that cannot
    be used then, unless the message begins with it, or with one within."""
    try:
        return step()
    except Invalid:
        raise
    except ValueError as fault:
        first, _, rest = str(fault).partition(" ")
        if f"{first}.".startswith(f"{path}."):
            raise Invalid([error(first, rest)]) from fault
        raise Invalid([error(path, f"cannot be used: {fault}")]) from fault


class Invalid(ValueError):
    """Settings cannot be used. issues: all that is wrong."""

    def __init__(self, issues: Sequence[Issue]) -> None:
        self.issues = tuple(issues)
        lines = list(map(str, self.issues))
        if len(lines) > 1:
            lines.insert(0, f"{len(lines)} things are wrong with the settings:")
        super().__init__("\n  ".join(lines))


_ITEMS: dict[type, str] = {int: "integers", float: "numbers", str: "texts"}


class Hint(NamedTuple):
    """Holds what a field's annotation says: its values' plain type, whether it may be None,
    choices, bounds, what a text leads to, and the hint of a tuple's items."""

    kind: type
    optional: bool = False
    choices: tuple[Any, ...] = ()
    bounds: Bounds = Bounds()
    place: Place | None = None
    items: Hint | None = None

    def fault(self, value: Any) -> str:
        """Say what a value must be, "" for one that the field may have."""
        if value is None:
            return ""
        if self.choices and value not in self.choices:
            choices = ", ".join(choice or repr(choice) for choice in self.choices)
            return f"must be one of {choices}, got {value!r:.200}"
        if not self.bounds.hold(value):
            why = self.bounds.why and f": {self.bounds.why}"
            return f"must be {self.bounds}, got {value!s:.40}{why}"
        if self.items is not None:
            return next(filter(None, map(self.items.item_fault, value)), "")
        return ""

    def other_than(self, value: Any, wrong: Any = None) -> Any:
        """Return a value that the field may have and that is another one; the same if there is none
        at hand. wrong: the value in whose place it stands: of a list as many items."""
        if self.items is not None and isinstance(wrong, Sequence):
            return (self.items.other_than(self.items.kind()),) * len(wrong)
        tried = self.choices
        if self.kind in (int, float):
            tried = (10**6, 1, 0.5)
        return next((one for one in tried if one != value and not self.fault(one)), value)

    def item_fault(self, item: Any) -> str:
        """Say what an item of a tuple must be, "" for one that it may have."""
        if type(item) is not self.kind and (self.kind, type(item)) != (float, int):
            return f"must hold {_ITEMS[self.kind]}, got {item!r:.200}"
        return self.fault(item)


def _read(annotation: Any) -> Hint:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return _read(next(kind for kind in arguments if kind is not type(None)))._replace(
            optional=True
        )
    if origin is Annotated:
        hint, mark = _read(arguments[0]), arguments[1]
        if isinstance(mark, Place):
            return hint._replace(place=mark)
        return hint._replace(bounds=mark)
    if origin is Literal:
        return Hint(type(arguments[0]), choices=arguments)
    if origin is tuple:
        return Hint(tuple, items=_read(arguments[0]))
    return Hint(origin or annotation)


@typing.dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,)
)
@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of the settings: classes made from it are frozen dataclasses, their fields given by
    name.

    Making one raises Invalid for values of another type or beyond their bounds. Which values do not
    go together is found by check.py.
    """

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        found = []
        for name, hint in self.hints().items():
            if fault := hint.fault(getattr(self, name)):
                found.append(error(name, fault))
        if found:
            raise Invalid(found)

    def issues(self, run: Run) -> Iterator[Issue]:
        """Yield what in the section does not go together, or with the rest of the run's settings.

        The paths of issues begin at the section: "steps", not "stages.warmup.steps".
        """
        yield from ()

    @classmethod
    @functools.cache
    def hints(cls) -> dict[str, Hint]:
        """Return what the annotation of every field says, by name."""
        annotations = typing.get_type_hints(cls, include_extras=True)
        return {field.name: _read(annotations[field.name]) for field in dataclasses.fields(cls)}

    def to_dict(self) -> dict[str, Any]:
        """Return the values as a dictionary, sections within it as such too."""
        return dataclasses.asdict(self)


def editable(section: Section) -> ConfigDict:
    """Return a section as the ConfigDict that users change; a field that may be None keeps its type
    when it is set."""
    config = ConfigDict()
    for name, hint in section.hints().items():
        value = getattr(section, name)
        if hint.optional:
            config[name] = placeholder(hint.kind)
        if isinstance(value, Section):
            value = editable(value)
        elif isinstance(value, Mapping):
            value = ConfigDict(value)
        config[name] = value
    return config


def read(
    section: type[S],
    values: ConfigDict,
    found: list[Issue],
    path: str = "",
    *,
    other: bool = False,
    **fields: Any,
) -> S:
    """Return the record of a ConfigDict that `editable` made. Values that are wrong are added to
    `found`, and replaced by the default, or by another value that the field may have (`other`).

    path: the section's own, for messages. fields: records that stand in place of some of the
    values. Values that the record has no field for are left out.
    """
    prefix = path and f"{path}."
    for name, hint in section.hints().items():
        if name in fields:
            continue
        value = values[name]
        if issubclass(hint.kind, Section):
            value = read(hint.kind, value, found, f"{prefix}{name}", other=other)
        if isinstance(value, ConfigDict):
            value = value.to_dict()
        if fault := hint.fault(value):
            found.append(error(f"{prefix}{name}", fault))
            wrong, value = value, getattr(section(), name)
            if other:
                value = hint.other_than(value, wrong)
        fields[name] = value
    return section(**fields)
