"""The settings that may name a file or folder: all of them, found by their mark in config.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from g2d_jax import config as schema
from g2d_jax.section import Place, Section


class Named(NamedTuple):
    """A setting that may name a file or folder. path: its own, dotted. section, key: where its value is."""

    path: str
    place: Place
    section: Any
    key: str

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts of the setting that are not empty: none, one, or those of a list."""
        value = self.section[self.key]
        texts = value if isinstance(value, list | tuple) else (value,)
        return tuple(text for text in texts if isinstance(text, str) and text)


def walk(values: Mapping[str, Any]) -> Iterator[Named]:
    """Yield every setting of a config that may name a file or folder. values: a ConfigDict or its dictionary."""
    yield from _of_section(schema.Config, values, "")
    for name, task in values.get("tasks", {}).items():
        yield from _of_section(schema.Task, task, f"tasks.{name}.")
    for name, stage in values.get("stages", {}).items():
        yield from _of_section(schema.STAGES[stage["kind"]], stage, f"stages.{name}.")


def _of_section(kind: type[Section], values: Any, prefix: str) -> Iterator[Named]:
    for key, hint in kind.hints().items():
        if key not in values:  # settings of an older version
            continue
        if hint.place is not None:
            yield Named(f"{prefix}{key}", hint.place, values, key)
        elif issubclass(hint.kind, Section):
            yield from _of_section(hint.kind, values[key], f"{prefix}{key}.")
