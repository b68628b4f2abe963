"""The settings that may name a file or folder. Their paths are made absolute once.

    "data/x.jsonl" in /home/me/run/mine.py ─► decided ─► "/home/me/run/data/x.jsonl"
    "Qwen/Qwen3-8B", no folder of this name ─► decided ─► "Qwen/Qwen3-8B", a hub id

Paths in a config file are relative to its folder; those of a command line or a Python program to
the working directory. A mark in config.py shows which settings these are. A run's config.json keeps
the absolute paths.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from etils import epath
from ml_collections import ConfigDict

from g2d_jax import config as schema
from g2d_jax.config.policy_name import OF_MODEL, OF_RUN, PolicyName
from g2d_jax.config.section import Issue, Place, Section, error
from g2d_jax.runtime import storage

FILES = (".jsonl", ".json", ".parquet", ".safetensors")
"""File endings by which a text counts as a path."""

_WITHOUT_PATH = ("sample", "archive")  # of rollouts
_OF_NAMED_SET = re.compile(r"(\w+:)(?!//)(.+)", re.DOTALL)  # "math500:FILE"


# Which settings


class Named(NamedTuple):
    """A setting that may name a file or folder. path: dotted. section, key: the place of its
    value."""

    path: str
    place: Place
    section: Any
    key: str

    @property
    def texts(self) -> tuple[str, ...]:
        """The non-empty texts of the setting: none, one, or those of a list."""
        texts = self.section[self.key]
        if not isinstance(texts, list | tuple):
            texts = [texts]
        return tuple(text for text in texts if isinstance(text, str) and text)


def walk(values: Mapping[str, Any]) -> Iterator[Named]:
    """Yield every setting of a config that may name a file or folder. values: a ConfigDict or its
    dictionary."""
    yield from _of_section(schema.Config, values, "")
    for name, task in values["tasks"].items():
        yield from _of_section(schema.Task, task, f"tasks.{name}.")
    for name, stage in values["stages"].items():
        yield from _of_section(schema.STAGES[stage["kind"]], stage, f"stages.{name}.")


def _of_section(kind: type[Section], values: Any, prefix: str) -> Iterator[Named]:
    for key, hint in kind.hints().items():
        if hint.place is not None:
            yield Named(f"{prefix}{key}", hint.place, values, key)
        elif issubclass(hint.kind, Section):
            yield from _of_section(hint.kind, values[key], f"{prefix}{key}.")


# The path in a text


class Parts(NamedTuple):
    """The parts of a text that may name a place: "hf:" "models/a" "" or "run:" "runs/a" "#dpo@3".
    sure: place is a path."""

    head: str
    place: str
    tail: str
    sure: bool


def is_path(text: str) -> bool:
    """Return whether a text has the form of a path. A hub id never starts with "/", "." or "~", and
    has at most one "/" and no scheme. It does not end like a data or weights file."""
    return (
        text.startswith(("/", ".", "~"))
        or not storage.is_local(text)
        or text.count("/") > 1
        or text.lower().endswith(FILES)
    )


def parts(text: str, kind: str, stages: Collection[str] = ()) -> Parts | None:
    """Split a setting's text into parts; None if it names no place (a stage, a dataset, "init").

    kind: of the setting's mark. stages: names that mean a stage of the run.
    """
    if not text or text.startswith("procedural:"):
        return None
    if kind == "path":
        return Parts("", text, "", True)
    if kind == "model":
        return Parts("", text, "", False)
    if kind == "policy":
        return _of_policy(text)
    if text.startswith("hub:"):
        place = re.match(r"hub:([^:@]*)", text)
        assert place is not None
        return Parts("hub:", place[1], text[place.end() :], False)
    if kind == "problems":
        return _of_problems(text)
    if text in _WITHOUT_PATH or text in stages:
        return None
    return Parts("", text, "", True)


def _of_policy(text: str) -> Parts | None:
    name = PolicyName.parse(text)
    if name.origin == OF_MODEL:
        return Parts(OF_MODEL, name.place, "", False)
    if name.origin == OF_RUN and name.place:
        return Parts(OF_RUN, name.place, text.removeprefix(f"{OF_RUN}{name.place}"), True)
    return None


def _of_problems(text: str) -> Parts | None:
    named = _OF_NAMED_SET.fullmatch(text)
    if named and text.lower().endswith(FILES):
        return Parts(named[1], named[2], "", True)
    if not is_path(text):
        return None
    return Parts("", text, "", True)


# Make paths absolute


class Base(NamedTuple):
    """The folder that paths are relative to. what: its description for messages."""

    folder: Path
    what: str


def here() -> Base:
    """Return the base for paths of a command line or a Python program."""
    return Base(Path.cwd(), "the working directory")


_given: dict[str, str] = {}
"""Absolute path -> the original text and its base, for messages."""


def decided(text: str, kind: str, base: Base, stages: Collection[str] = ()) -> str:
    """Return the text with its path absolute. Hub ids and texts without a path stay unchanged.

    A text that does not look like a path counts as one if it exists relative to the base. Raises
    ValueError for "~" of an unknown user.
    """
    found = parts(text, kind, stages)
    if found is None or not found.place:
        return text
    if not (found.sure or is_path(found.place) or os.path.exists(base.folder / found.place)):
        return text
    return f"{found.head}{absolute(found.place, base)}{found.tail}"


def absolute(path: str, base: Base) -> str:
    """Return a path as an absolute one, with "~" expanded; a URL unchanged. Raises ValueError for
    "~" of an unknown user."""
    if not storage.is_local(path):
        return path
    try:
        expanded = Path(path).expanduser()
    except (
        RuntimeError
    ) as error:  # "~nobody/…", or "~/…" without HOME and without an entry for this user
        raise ValueError(f"{path!r}: {error}; write the path without ~") from error
    whole = os.path.normpath(base.folder / expanded)
    if not expanded.is_absolute():
        _given[whole] = f"given as {path!r}, relative to {base.what}, {base.folder}"
    return whole


def shown(path: str) -> str:
    """Return a path for a message, with the original text if that was relative."""
    if path in _given:
        return f"{path} ({_given[path]})"
    return path


def decide(config: ConfigDict, base: Base, only: str | None = None) -> None:
    """Make the paths of a config absolute, in place. only: the path of one setting to change."""
    change(config, lambda text, kind, stages: decided(text, kind, base, stages), only)


def change(
    config: ConfigDict,
    new: Callable[[str, str, Collection[str]], str],
    only: str | None = None,
) -> None:
    """Replace texts that may name a place, in place.

    new: maps a text, the kind of its setting, and the run's stage names to the new text. only: the
    path of one setting to change.
    """
    stages = tuple(config.stages)
    for named in walk(config):
        if only not in (None, named.path):
            continue
        changed = {}
        for old in named.texts:
            try:
                text = new(old, named.place.kind, stages)
            except ValueError as error:
                if named.path in str(error):
                    raise
                raise ValueError(f"{named.path}: {error}") from error
            if text != old:
                changed[old] = text
        if not changed:
            continue
        value = named.section[named.key]
        with named.section.unlocked():
            if isinstance(value, str):
                named.section[named.key] = changed[value]
            else:
                named.section[named.key] = tuple(changed.get(text, text) for text in value)


# Existence


def issues(values: Mapping[str, Any], sections: Collection[str] | None = None) -> Iterator[Issue]:
    """Yield settings whose files or folders are missing or relative.

    values: a config after `decide`, or its dictionary. sections: the top-level sections to check,
    None for all. Object stores, and folders that the run creates, are not checked.
    """
    stages = tuple(values["stages"])
    for named in walk(values):
        if sections is not None and named.path.partition(".")[0] not in sections:
            continue
        for text in named.texts:
            if reason := missing(text, named.place.kind, stages):
                yield error(named.path, f"cannot be used: {reason}")


def missing(text: str, kind: str, stages: Collection[str] = ()) -> str:
    """Return why the place named by a text is missing, "" if it exists. text: from `decided`. kind,
    stages: as in `parts`.

    A relative path is refused, since the next command may run in another folder.
    """
    found = parts(text, kind, stages)
    if found is None or not storage.is_local(found.place):
        return ""
    if not os.path.isabs(found.place):
        if not (found.sure or is_path(found.place)):
            return ""  # a hub id
        return (
            f"{found.place} is relative, but a Config needs absolute paths: write an absolute "
            "path, or run a ConfigDict"
        )
    place = Path(found.place)
    if "*" in found.place:  # the folder above the wildcards
        place = next(parent for parent in place.parents if "*" not in str(parent))
    if kind == "path" or os.path.exists(place):
        return ""
    near = difflib.get_close_matches(os.path.basename(found.place), stages, 1, 0.7)
    hint = f", did you mean the stage {near[0]}?" if near else ""
    return f"there is no {shown(found.place)}{hint}"


def module_file(function: str, folder: Path) -> Path | None:
    """Return the file in a folder that holds a reward "module:function", None without one."""
    module = function.partition(":")[0]
    file = folder / f"{module}.py"
    return file if module.isidentifier() and file.is_file() else None


# For publication


def without_folders(config: ConfigDict) -> ConfigDict:
    """Shorten the local paths of a config to their last part, in place; return it."""
    change(config, without_folder)
    return config


def without_folder(text: str, kind: str, stages: Collection[str] = ()) -> str:
    """Shorten the local path in a text, if any, to its last part; arguments as in `parts`."""
    found = parts(text, kind, stages)
    if found is None:
        return text
    return f"{found.head}{last_part(found.place)}{found.tail}"


def last_part(path: str) -> str:
    """Return the last part of an absolute path, other texts unchanged."""
    return os.path.basename(path) if os.path.isabs(path) else path


def data_files(paths: str | Sequence[str]) -> list[str]:
    """List the files of a dump: of a folder, of a glob, or the file; step 2 before step 10.

    A folder's .json files count only if it has no .jsonl or .parquet, since they then describe the
    set. Raises ValueError if there is no file.
    """
    if isinstance(paths, str):
        paths = [paths]
    files: list[str] = []
    for path in paths:
        place = epath.Path(path).expanduser()
        matching: list[epath.Path] = []
        if "*" in path:
            parent = next(parent for parent in place.parents if "*" not in os.fspath(parent))
            matching = list(parent.glob(os.fspath(place.relative_to(parent))))
        elif place.is_dir():
            matching = [*place.glob("*.jsonl"), *place.glob("*.parquet")] or list(
                place.glob("*.json")
            )
        elif place.exists():
            matching = [place]
        if not matching:
            raise ValueError(
                f"{path} is not a file, a folder with .jsonl, .parquet or .json files, or a glob "
                "that matches any"
            )
        files += sorted(map(os.fspath, matching), key=_natural)
    return files


def _natural(path: str) -> list[tuple[int, str]]:
    """Return a sort key that orders the numbers in names by value."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path)
    ]
