"""Settings as frozen records: names, defaults, types, choices and bounds in one place, checked where one is made.

@dataclass(frozen=True, kw_only=True)
class Sampling(Section):
    temperature: Annotated[float, Bounds(least=0)] = 1.0

editable(Sampling()) ─► ConfigDict, which config files and --config.FIELD=VALUE change ─► record(Sampling, …)
"""

from __future__ import annotations

import dataclasses
import operator
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

S = TypeVar("S", bound="Section")


@dataclass(frozen=True)
class Bounds:
    """The bounds of a number: at least, more than, at most, less than these."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def __str__(self) -> str:
        """Return the bounds for a message: "at least 1 and at most 90"."""
        limits = (
            ("at least", self.least),
            ("more than", self.above),
            ("at most", self.most),
            ("less than", self.below),
        )
        return " and ".join(f"{words} {limit:g}" for words, limit in limits if limit is not None)

    def hold(self, value: float) -> bool:
        """Return whether a value keeps to the bounds; NaN keeps to none."""
        limits = (
            (self.least, operator.ge),
            (self.above, operator.gt),
            (self.most, operator.le),
            (self.below, operator.lt),
        )
        return all(within(value, limit) for limit, within in limits if limit is not None)


NotNegative = Annotated[int, Bounds(least=0)]
Positive = Annotated[int, Bounds(least=1)]
Share = Annotated[float, Bounds(least=0, most=1)]


class FieldError(ValueError):
    """The error that a field's value cannot be used. path: of the field, dotted; what: "must be …"."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(f"{path} {what}")
        self.path, self.what = path, what


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of the settings. Making one raises FieldError, or ValueError where several fields do not fit."""

    def __post_init__(self) -> None:
        for name, hint in hints(type(self)).items():
            _check(name, getattr(self, name), hint)
        self.check()

    def check(self) -> None:
        """Raise ValueError where fields do not go together; a section with such rules has its own."""

    def to_dict(self) -> dict[str, Any]:
        """Return the values as a dictionary, sections within it as such too."""
        return dataclasses.asdict(self)


def hints(section: type[Section]) -> dict[str, Any]:
    """Return the annotation of every field, with its bounds."""
    annotations = get_type_hints(section, include_extras=True)
    return {field.name: annotations[field.name] for field in dataclasses.fields(section)}


def _check(name: str, value: Any, hint: Any) -> None:
    """Raise FieldError for a value outside its field's choices or bounds."""
    if value is None:
        return
    if get_origin(hint) in (Union, types.UnionType):
        hint = _present(hint)
    if get_origin(hint) is Literal and value not in get_args(hint):
        choices = ", ".join(repr(choice) if choice == "" else str(choice) for choice in get_args(hint))
        raise FieldError(name, f"must be one of {choices}, got {value!r:.200}")
    if get_origin(hint) is Annotated:
        for bounds in hint.__metadata__:
            if not bounds.hold(value):
                raise FieldError(name, f"must be {bounds}, got {value}")


def _present(hint: Any) -> Any:
    """Return the type of an optional field when it is set: `int` of `int | None`."""
    return next(kind for kind in get_args(hint) if kind is not type(None))


def _kind(hint: Any) -> type:
    """Return the plain type of a field's values: bool, int, float, str, tuple, dict or a section."""
    if get_origin(hint) is Annotated:
        return _kind(get_args(hint)[0])
    if get_origin(hint) is Literal:
        return type(get_args(hint)[0])
    return get_origin(hint) or hint


def editable(section: Section) -> ConfigDict:
    """Return a section as the ConfigDict that users change; a field that may be None keeps its type when it is set."""
    config = ConfigDict()
    for name, hint in hints(type(section)).items():
        value = getattr(section, name)
        if isinstance(value, Section):
            config[name] = editable(value)
        elif get_origin(hint) in (Union, types.UnionType):
            config[name] = placeholder(_kind(_present(hint)))
            config[name] = value
        else:
            config[name] = ConfigDict(value) if isinstance(value, Mapping) else value
    return config


def record(section: type[S], values: ConfigDict, path: str = "") -> S:
    """Return the checked record of a ConfigDict that `editable` made. path: the section's own, for messages.

    Raises FieldError or ValueError naming the full path. Fields that the record lacks are left out.
    """
    prefix = f"{path}." if path else ""
    fields: dict[str, Any] = {}
    for name, hint in hints(section).items():
        value, kind = values[name], _kind(hint)
        if isinstance(kind, type) and issubclass(kind, Section):
            value = record(kind, value, f"{prefix}{name}")
        elif isinstance(value, ConfigDict):
            value = value.to_dict()
        fields[name] = value
    try:
        return section(**fields)
    except FieldError as error:
        raise FieldError(f"{prefix}{error.path}", error.what) from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}" if path else str(error)) from error
