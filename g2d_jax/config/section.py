"""Settings as frozen records: names, defaults, types, choices and bounds in one place, checked on
construction.

    class Sampling(Section):
        temperature: Annotated[float, Bounds(least=0)] = 1.0

    editable(Sampling()) ─► ConfigDict, changed by config files and --config.FIELD=VALUE ─► read(Sampling, …)
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
"""The whole `Config`, which rules of a section may read: settings.py builds it from all
sections."""


@dataclass(frozen=True)
class Bounds:
    """The bounds of a number: at least, more than, at most, less than. why: the reason, if it is
    not obvious. words: the bounds in words, replacing these."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    why: str = ""
    words: str = ""

    @property
    def _limits(self) -> Iterator[tuple[str, Any, float]]:
        """Yield each bound's words, its comparison, and the bound."""
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
        """Return whether a value is within the bounds; NaN never is."""
        return all(holds(value, limit) for _, holds, limit in self._limits)


NonNegative = Annotated[int, Bounds(least=0)]
Positive = Annotated[int, Bounds(least=1)]
Fraction = Annotated[float, Bounds(least=0, most=1)]


@dataclass(frozen=True)
class Place:
    """The mark of a text setting that may name a file or folder; places.py reads it.

    kind: "path" always names one. "model" may be a hub id, "problems" a dataset's name, "policy" a
    stage's or "init", "rollouts" and "preferences" a stage's name.
    """

    kind: Literal["path", "model", "problems", "policy", "rollouts", "preferences"]


# Types that several sections share

Dtype = Literal["float32", "bfloat16"]
Split = Literal["dev", "test"]
Tokens = Literal["generated", "prefilled", "scored", "trained", "tokens"]
Measure = Literal[Tokens, "flops", "seconds", "device_seconds", "verifier_cpu_seconds"]

OnError = Literal["raise", "skip"]
"""Broken rows of a set: "raise" allows 5 %, "skip" any share."""

NotNegativeFloat = Annotated[float, Bounds(least=0, below=math.inf)]

# For requests to servers: beyond these a run would hang, or use up this machine's connections,
# without an error.
Timeout = Annotated[
    float,
    Bounds(above=0, most=86_400, why="seconds until a request fails, at most a day"),
]
Retries = Annotated[int, Bounds(least=0, most=100, why="more attempts at one request")]
Concurrency = Annotated[
    int, Bounds(least=1, most=4096, why="each running request uses a thread and a connection")
]

# Texts that may name a file or folder: places.py makes their paths absolute.
FilePath = Annotated[str, Place("path")]
ModelPath = Annotated[str, Place("model")]
ProblemsPath = Annotated[str, Place("problems")]
Policy = Annotated[str, Place("policy")]
Policies = Annotated[tuple[str, ...], Place("policy")]
Rollouts = Annotated[str, Place("rollouts")]
Preferences = Annotated[str, Place("preferences")]


@dataclass(frozen=True)
class Issue:
    """An error or warning about the settings of a run. Only an error stops it.

    path: the setting, dotted, or the section. text continues it: "must be at least 1, got 0".
    remedy: the fix, "" if the text states it.
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
    """Return the errors that a function finds, [] if it raises none. path: as in `made`."""
    try:
        made(path, look)
    except Invalid as fault:
        return list(fault.issues)
    return []


def made(path: str, step: Callable[[], Made]) -> Made:
    """Return the result of a function. Raises Invalid for its ValueError. path: the setting to
    blame, unless the message begins with it, or with a nested one."""
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
    """Invalid settings. issues: all errors."""

    def __init__(self, issues: Sequence[Issue]) -> None:
        self.issues = tuple(issues)
        lines = list(map(str, self.issues))
        if len(lines) > 1:
            lines.insert(0, f"the settings have {len(lines)} errors:")
        super().__init__("\n  ".join(lines))


_ITEMS: dict[type, str] = {int: "integers", float: "numbers", str: "texts"}


class Hint(NamedTuple):
    """The content of a field's annotation: the plain type of its values, whether None is allowed,
    choices, bounds, kind of place, and the hint of a tuple's items."""

    kind: type
    optional: bool = False
    choices: tuple[Any, ...] = ()
    bounds: Bounds = Bounds()
    place: Place | None = None
    items: Hint | None = None

    def fault(self, value: Any) -> str:
        """Return what a value must be, "" for a valid one."""
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
        """Return another valid value for the field, the same if none is known. wrong: the invalid
        value; a list keeps its length."""
        if self.items is not None and isinstance(wrong, Sequence):
            return (self.items.other_than(self.items.kind()),) * len(wrong)
        tried = self.choices
        if self.kind in (int, float):
            tried = (10**6, 1, 0.5)
        return next((one for one in tried if one != value and not self.fault(one)), value)

    def item_fault(self, item: Any) -> str:
        """Return what an item of a tuple must be, "" for a valid one."""
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
    """A section of the settings. Subclasses become frozen dataclasses with keyword fields.

    Construction raises Invalid for a wrong type or a value out of bounds. check.py finds conflicts
    between values.
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
        """Yield conflicts within the section, or with the run's other settings.

        The paths of issues are relative to the section: "steps", not "stages.warmup.steps".
        """
        yield from ()

    @classmethod
    @functools.cache
    def hints(cls) -> dict[str, Hint]:
        """Return the hint of every field, by name."""
        annotations = typing.get_type_hints(cls, include_extras=True)
        return {field.name: _read(annotations[field.name]) for field in dataclasses.fields(cls)}

    def to_dict(self) -> dict[str, Any]:
        """Return the values as a dictionary, nested sections included."""
        return dataclasses.asdict(self)


def editable(section: Section) -> ConfigDict:
    """Return a section as a ConfigDict that you can change. A field that may be None keeps its
    type."""
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
    """Return the record of a ConfigDict from `editable`. Wrong values are added to `found`, and
    replaced by the default, or by another valid value (`other`).

    path: the section's own, for messages. fields: records that replace some of the values. Values
    without a field are ignored.
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
