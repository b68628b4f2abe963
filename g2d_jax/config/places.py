"""The settings that may name a file or folder, and where those are: decided once, kept absolute.

    "data/x.jsonl" in /home/me/run/mine.py ─► decided ─► "/home/me/run/data/x.jsonl"
    "Qwen/Qwen3-8B", no folder of this name ─► decided ─► "Qwen/Qwen3-8B", a hub id

What a config file names is relative to its folder, what a command line or a Python program names to
the working directory. Which settings these are says their mark in config.py. A run keeps what was
decided in its config.json.
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
"""Endings by which a text is known to name a file."""

_WITHOUT_PATH = ("sample", "archive")  # of rollouts
_OF_NAMED_SET = re.compile(r"(\w+:)(?!//)(.+)", re.DOTALL)  # "math500:FILE"


# Which settings


class Named(NamedTuple):
    """A setting that may name a file or folder. path: its own, dotted. section, key: where its
    value is."""

    path: str
    place: Place
    section: Any
    key: str

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts of the setting that are not empty: none, one, or those of a list."""
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


# What a text names


class Parts(NamedTuple):
    """A text that may name a place, "hf:" "models/a" "" or "run:" "runs/a" "#dpo@3". sure: place is
    a path."""

    head: str
    place: str
    tail: str
    sure: bool


def is_path(text: str) -> bool:
    """Return whether a text has the form of a path: no hub id begins with "/", "." or "~", has a
    scheme or two "/", or ends like a file of data or weights."""
    return (
        text.startswith(("/", ".", "~"))
        or not storage.is_local(text)
        or text.count("/") > 1
        or text.lower().endswith(FILES)
    )


def parts(text: str, kind: str, stages: Collection[str] = ()) -> Parts | None:
    """Take apart a text of a setting; None where it names no place: a stage, a data set by its
    name, "init".

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


# Deciding


class Base(NamedTuple):
    """The folder that paths are relative to. what: its description for messages."""

    folder: Path
    what: str


def here() -> Base:
    """Return the base of what a command line or a Python program names."""
    return Base(Path.cwd(), "the working directory")


_given: dict[str, str] = {}
"""Absolute path -> how it was written and what it was taken to be relative to. For messages
alone."""


def decided(text: str, kind: str, base: Base, stages: Collection[str] = ()) -> str:
    """Return the text with its path absolute; what names no path, and a hub id, stays as it is.

    A text that has not the form of a path, but names something that exists relative to the base, is
    a path. Raises ValueError for "~" of a user who is not known here.
    """
    found = parts(text, kind, stages)
    if found is None or not found.place:
        return text
    if not (found.sure or is_path(found.place) or os.path.exists(base.folder / found.place)):
        return text
    return f"{found.head}{absolute(found.place, base)}{found.tail}"


def absolute(path: str, base: Base) -> str:
    """Return a path as an absolute one, "~" being this user's home; a URL as it is. Raises
    ValueError as `decided`."""
    if not storage.is_local(path):
        return path
    try:
        expanded = Path(path).expanduser()
    except (
        RuntimeError
    ) as error:  # "~nobody/…", or "~/…" without HOME and without an entry for this user
        raise ValueError(f"{path!r}: {error}; give the path without ~") from error
    whole = os.path.normpath(base.folder / expanded)
    if not expanded.is_absolute():
        _given[whole] = f"given as {path!r}, relative to {base.what}, {base.folder}"
    return whole


def shown(path: str) -> str:
    """Return a path for a message: with how it was given, where that was not absolute."""
    if path in _given:
        return f"{path} ({_given[path]})"
    return path


def decide(config: ConfigDict, base: Base, only: str | None = None) -> None:
    """Decide what the settings of a config name, in place. only: the path of the one setting to
    look at."""
    change(config, lambda text, kind, stages: decided(text, kind, base, stages), only)


def change(
    config: ConfigDict,
    new: Callable[[str, str, Collection[str]], str],
    only: str | None = None,
) -> None:
    """Replace texts that may name a place, in place.

    new: from a text, the kind of its setting, and the names of the run's stages to what it becomes.
    only: the path of the one setting to look at.
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


# Whether it is there


def issues(values: Mapping[str, Any], sections: Collection[str] | None = None) -> Iterator[Issue]:
    """Yield files and folders that settings name and that are not there, or relative.

    values: a config, or its dictionary, whose places are decided. sections: the top-level sections
    to look at, None for all. Folders that are made where there are none, and object stores, are not
    looked at.
    """
    stages = tuple(values["stages"])
    for named in walk(values):
        if sections is not None and named.path.partition(".")[0] not in sections:
            continue
        for text in named.texts:
            if reason := missing(text, named.place.kind, stages):
                yield error(named.path, f"cannot be used: {reason}")


def missing(text: str, kind: str, stages: Collection[str] = ()) -> str:
    """Say why what a text names is not to be had here, "" if it is. text: decided. kind, stages: as
    of `parts`.

    A path that is still relative is refused: what it is relative to would be another folder for the
    next command.
    """
    found = parts(text, kind, stages)
    if found is None or not storage.is_local(found.place):
        return ""
    if not os.path.isabs(found.place):
        if not (found.sure or is_path(found.place)):
            return ""  # a hub id
        return (
            f"{found.place} is relative, and a Config's paths are absolute: give it so, or run a "
            "ConfigDict"
        )
    place = Path(found.place)
    if "*" in found.place:  # the folder that its stars are in
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


# For others to read


def without_folders(config: ConfigDict) -> ConfigDict:
    """Cut the local paths of a config to their last part, in place; return it."""
    change(config, without_folder)
    return config


def without_folder(text: str, kind: str, stages: Collection[str] = ()) -> str:
    """Cut the local path that a text names, if any, to its last part; arguments as of `parts`."""
    found = parts(text, kind, stages)
    if found is None:
        return text
    return f"{found.head}{last_part(found.place)}{found.tail}"


def last_part(path: str) -> str:
    """Return the last part of an absolute path; anything else as it is."""
    return os.path.basename(path) if os.path.isabs(path) else path


def data_files(paths: str | Sequence[str]) -> list[str]:
    """List a dump's files: of a folder, of a glob, or the file; step 2 before step 10.

    A folder's are its .jsonl and .parquet, or where it has none its .json, which beside these
    describe the set. Raises ValueError for what holds no file.
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
                f"{path} is no file, no folder with .jsonl, .parquet or .json files, and no glob "
                "that matches some"
            )
        files += sorted(map(os.fspath, matching), key=_natural)
    return files


def _natural(path: str) -> list[tuple[int, str]]:
    """Return a sort key that orders the numbers in names by value."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path)
    ]
