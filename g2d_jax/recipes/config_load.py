"""The way from your input to a checked config: find the file, run `get_config`, check every field,
apply overrides.

    "demo:preset=smoke" ─► locate ─► get_config("preset=smoke") ─► from_dict (names and types) ─► overrides ─► config

A config file is your own Python code and runs as such. Everything else is data: overrides are
parsed, never run.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import inspect
import itertools
import re
import shlex
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from etils import epath
from ml_collections import ConfigDict

from g2d_jax import config as schema
from g2d_jax import recipes
from g2d_jax.config import places
from g2d_jax.config.choices import BOOLS, Scalar, scalar
from g2d_jax.config.choices import choices as choices
from g2d_jax.config.io import (
    MEANING,
    assign,
    field_of,
    from_dict,
    kind_of,
    listed,
    paths,
    suggest,
    typed,
)
from g2d_jax.config.section import Invalid, Issue, editable
from g2d_jax.session.workdir import read_settings

_UNSET = ("none", "null")


def resolve(
    spec: str | ConfigDict, overrides: Sequence[str] = (), wrong: list[Issue] | None = None
) -> ConfigDict:
    """Return the locked config of a file ("my/cfg.py", "runs/a/config.json"), a shipped name
    ("demo") or a recipe, with "NAME:key=value,…" for choices.

    overrides: "config.stages.warmup.steps=40", or without "config."; typed by the field. Later ones
    win. Paths become absolute: those in the file are relative to its folder, those of overrides,
    and of a shipped config's choices, to the working directory. reward.folder is set if the reward
    function is in a file next to the config. Raises ValueError for an unknown config, choice or
    field, or a wrong type, with the valid names and a suggestion. Raises Invalid for wrong
    overrides, unless `wrong` collects them.
    """
    path, values = _read(spec)
    try:
        config = from_dict(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    # The file's paths are resolved before overrides, whose paths have another base. A shipped
    # config names no files itself: its paths come from the choices you typed.
    base = places.here()
    # A work directory's config.json names no code to run.
    folder = path.parent if isinstance(path, Path) and path.suffix == ".py" else None
    if folder is not None and path not in shipped().values():
        base = places.Base(folder, f"the folder of {Path(path).name}")
        if "sweep" in config:
            config.sweep.folder = str(folder)
    places.decide(config, base)
    faults: list[Issue] = []
    for override in overrides:
        try:
            apply(config, override)
        except ValueError as fault:
            faults.append(Issue("error", "", str(fault)))
    if faults and wrong is None:
        raise Invalid(faults)
    if wrong is not None:
        wrong += faults
    for section in (config, *config.tasks.values()):
        reward = section.reward
        for function in (reward.function, *reward.functions):
            is_text = isinstance(function, str)  # otherwise check.py reports it
            if (
                reward.folder is None
                and folder
                and is_text
                and places.module_file(function, folder)
            ):
                reward.folder = str(folder)
    return config


# Finding and running config files


def shipped() -> dict[str, Path | str]:
    """Map names to the configs of the package: files of the installed package, or of the source
    checkout, and the names of recipes."""
    package = Path(__file__).resolve().parents[1]
    folder = package / "configs"
    if not folder.is_dir() and (package.parent / "pyproject.toml").is_file():
        folder = package.parent / "configs"
    configs: dict[str, Path | str] = {name: name for name in recipes.MODELS}
    for file in folder.rglob("*.py"):
        if file.name[0] != "_":
            configs[file.relative_to(folder).with_suffix("").as_posix()] = file
    return dict(sorted(configs.items()))


def _read(spec: str | ConfigDict) -> tuple[Path | str, dict[str, Any]]:
    """Return the file or name of a spec, and its settings."""
    if isinstance(spec, ConfigDict):
        return str(spec.name), dict(spec.to_dict())
    path, arg = locate(spec)
    if isinstance(path, str):
        return path, _recipe(path, arg)
    if path.suffix == ".json":
        return path, dict(read_settings(epath.Path(path.parent)).to_dict())
    return path, _call(path, arg)


def locate(spec: str) -> tuple[Path | str, str]:
    """Return a spec's config file, absolute, or the name of a recipe, and the text after its colon
    ("" if none). Raises ValueError if unknown.

    A linked file keeps the path you gave: its own paths are relative to that folder.
    """
    if match := re.fullmatch(r"(.+?\.py)(?::(.*))?|(?:.*/)?config\.json", spec):
        path, arg = Path(match[1] or spec).expanduser(), match[2] or ""
        if not path.is_file():
            raise ValueError(
                f"there is no config file {path.absolute()}; shipped configs are "
                f"{listed(shipped())}"
            )
        return path.parent.resolve() / path.name, arg
    name, _, arg = spec.partition(":")
    configs = shipped()
    if name not in configs:
        hint = suggest(name, configs) or "; a config file's name ends in .py"
        if Path(f"{name}.py").expanduser().is_file():
            hint = f", did you mean {name}.py?"
        raise ValueError(f"unknown config {name!r}{hint}; shipped configs are {listed(configs)}")
    return configs[name], arg


class _Uncached(importlib.machinery.SourceFileLoader):
    """A loader that always reads the source: bytecode of a config edited twice within a second
    would be stale."""

    def path_stats(self, path: Any) -> NoReturn:
        raise OSError(f"{path}: bytecode is not cached")


def _recipe(name: str, arg: str) -> dict[str, Any]:
    """Return the settings of a recipe. Raises ValueError for an unknown choice."""
    try:
        return dict(recipes.recipe(name, arg).to_dict())
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _call(path: Path, arg: str) -> dict[str, Any]:
    """Run the file's get_config. Any exception, or an exit, becomes a ValueError with file and
    line."""
    loader = _Uncached(f"g2d_config_{path.stem}", str(path))
    spec = importlib.util.spec_from_file_location(loader.name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    try:
        loader.exec_module(module)
        if not callable(get_config := getattr(module, "get_config", None)):
            raise ValueError("define get_config(arg: str = '') that returns a ConfigDict")
        takes_choices = bool(inspect.signature(get_config).parameters)
        if arg and not takes_choices:
            raise ValueError(f"its get_config accepts no choices: remove {':' + arg!r}")
        config = get_config(arg) if takes_choices else get_config()
    except (Exception, SystemExit) as error:
        # The innermost line of the file itself, not of code that it calls. A file with a syntax
        # error has no frame.
        place = str(path)
        line = None
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename == place:
                line = frame.lineno
        if isinstance(error, SyntaxError) and error.filename == place:
            line = error.lineno
        if line is not None:
            place += f", line {line}"
        raise ValueError(f"{place}: {_text(error)}") from error
    if not isinstance(config, ConfigDict):
        raise ValueError(
            f"{path}: get_config must return a ConfigDict, got {type(config).__name__}"
        )
    return dict(config.to_dict())


def _text(error: BaseException) -> str:
    """Return the error's message in one line: str() of a KeyError is a repr, and ml_collections
    nests messages."""
    while error.args and isinstance(error.args[0], BaseException):
        error = error.args[0]
    if isinstance(error, ImportError):
        return f"{error}: install it in the environment of g2d_jax, or remove the import"
    if not isinstance(error, (AttributeError, KeyError, TypeError, ValueError, SyntaxError)):
        # a bug rather than a wrong setting: the exception's type is needed too
        return f"{type(error).__name__}: {error}"
    text = str(next(iter(error.args), type(error).__name__))
    if match := _WRONG_TYPE.match(text):
        return _wrong_type(match["field"], match["given"], match["type"])
    if match := re.match(r"Key \"(.+?)\" does not exist", text):
        return f"unknown field {match[1]!r}{suggest(match[1], _every_path())}"
    if isinstance(error, KeyError):
        return f"unknown name {text}".replace("\n", ". ")
    return text


def _every_path() -> list[str]:
    """List the fields of a run and of each kind of stage, with dotted paths."""
    sections = [schema.base(), *(editable(kind()) for kind in schema.STAGES.values())]
    return [*itertools.chain.from_iterable(map(paths, sections))]


# ml_collections' message for a wrong value. It has the field's own name, not its path.
_WRONG_TYPE = re.compile(
    r"Could not override field '(?P<field>.+?)' \(reference\)\. (?P<given>.*) is of original "
    r"type <class '.+?'> "
    r"and cannot be casted to type <class '(?P<type>.+?)'>",
    re.DOTALL,
)


def _wrong_type(field: str, given: str, kind: str) -> str:
    """Return the error for a config file's value of the wrong type. kind: the field's type."""
    if len(given) >= 80 or "\n" in given:
        first, _, _ = given.strip().partition("\n")
        given = f"{first:.80}…"
    if not kind.endswith("ConfigDict"):
        meanings = {known.__name__: meaning for known, meaning in MEANING.items()}
        return f"{field} must be {meanings.get(kind, 'a value')} ({kind}), got {given!r}"
    maker = "source" if field in ("data", "train", "dev", "test") else field
    way = "set its fields one by one"
    if callable(getattr(schema, maker, None)):
        way = f"set it to settings.{maker}(…), or {way}"
    return f"{field} is a section of settings and cannot be {given}: {way}"


# Overrides

OVERRIDE = "--config."


def take_apart(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into its overrides, "config.FIELD=VALUE", and the other arguments, both
    in order.

    A value is everything after the first "=". Arguments after "--" are not overrides. Raises
    ValueError for an override without "=".
    """
    overrides: list[str] = []
    rest: list[str] = []
    for place, argument in enumerate(arguments):
        if argument == "--":
            return overrides, [*rest, *arguments[place:]]
        if not argument.startswith(OVERRIDE):
            rest.append(argument)
        elif "=" in argument:
            overrides.append(argument.removeprefix("--"))
        else:
            raise ValueError(_without_equals(argument, arguments[place + 1 :]))
    return overrides, rest


def _without_equals(argument: str, following: Sequence[str]) -> str:
    """Return how to write an override that lacks its "=". following: the arguments after it."""
    value = "VALUE"
    if following and not following[0].startswith("-"):
        value = following[0]
    if value == "=" and len(following) > 1:  # typed with spaces around the "="
        value = following[1]
    whole = f"{argument}={value.removeprefix('=')}"
    return f'{argument} lacks its "=": write {shlex.quote(whole)}, without spaces around the "="'


_ITEM = re.compile(
    r"""\s*(?:'([^']*)'|"([^"]*)")\s*(?=,|\Z)"""  # in quotes: everything between them
    r"""|((?:\([^)]*\)|\[[^\]]*\]|[^,])*)"""  # otherwise up to a comma outside brackets
)


def split_values(text: str) -> list[str]:
    """Split values at commas, "0,'a, b',(1,2)" into "0", "a, b" and "(1,2)".

    A quoted value is the text between the quotes, byte for byte; other values are stripped. A
    trailing comma is ignored.
    """
    values: list[str] = []
    place = 0
    while place < len(text):
        item = _ITEM.match(text, place)
        assert item is not None  # its second half matches anything
        single, double, bare = item.groups()
        quoted = double if single is None else single
        values.append(bare.strip() if quoted is None else quoted)
        place = item.end() + 1
    return values


def apply(config: ConfigDict, override: str, base: places.Base | None = None) -> None:
    """Apply one override, "path=text", to the config. Raises ValueError as `resolve` does.

    A text setting keeps the value unchanged, including whitespace. base: of paths, None for the
    working directory.
    """
    path, equals, text = override.partition("=")
    path = path.strip().removeprefix("config.")
    if not equals:
        raise ValueError(f"override {override!r} has no value: write {path}=value")
    *parents, key = path.split(".")
    section: Any = config
    for name in parents:
        section = field_of(section, name, path, config)
    # only these sections have user-chosen names
    is_open = parents[-1:] in (["fields"], ["columns"])
    field = "" if is_open else field_of(section, key, path, config)
    if isinstance(field, ConfigDict):
        fields = listed(field.keys()) if field else f"{path}.NAME=…"
        raise ValueError(f"{path} is a section; set one of its fields: {fields}")
    value = typed(_parse(text, field, path), field, path)
    # A stage's kind decides its fields; an optimiser's kind, three names down, may change.
    if key == "kind" and len(parents) == 2 and value != field:
        raise ValueError(f"{path} decides which fields the stage has: change it in the config file")
    assign(section, key, value, path)
    places.decide(config, base or places.here(), only=path)


def _parse(text: str, field: Any, path: str) -> Any:
    """Parse an override's value for a field."""
    kind, optional = kind_of(field)
    if kind is not str:
        text = text.strip()
    if optional and text.lower() in _UNSET:
        return None
    if kind is not tuple:
        return scalar(text, field, path)
    written = _written_texts(text)
    if written is not None:
        return written
    if text[:1] + text[-1:] in ("()", "[]"):
        text = text[1:-1]
    default = field.get() if optional else field
    if default:
        return tuple(scalar(item, default[0], path) for item in split_values(text))
    return tuple(_literal(item, path) for item in _bare_items(text))


def _written_texts(text: str) -> tuple[str, ...] | None:
    r"""Parse a list of quoted texts in brackets as Python does, so that "\n" is a newline; None if
    it is no such list."""
    if text[:1] + text[-1:] not in ("()", "[]"):
        return None
    try:
        items = ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    if isinstance(items, str):  # one text in brackets
        return (items,)
    if not items or not isinstance(items, list | tuple):
        return None
    return tuple(items) if all(isinstance(item, str) for item in items) else None


def _bare_items(text: str) -> list[str]:
    """Split the items of a list without a known item type. Quotes stay, since they alone mark
    text."""
    items = list(map(str.strip, text.split(",")))
    if items[-1] == "":  # from "", and from a trailing comma as in (10,)
        items.pop()
    return items


def _literal(text: str, path: str) -> Scalar:
    """Parse an item of a list without a known item type: a number, true or false, a name such as
    "my_rewards:short", or quoted text."""
    if text.lower() in BOOLS:
        return BOOLS[text.lower()]
    if re.fullmatch(r"[A-Za-z_][\w.]*(:\w+)?", text):
        return text
    try:
        value = ast.literal_eval(text)
    except (
        ValueError,
        SyntaxError,
        MemoryError,
        RecursionError,
    ):  # the last two: nested too deeply
        value = None
    if not isinstance(value, bool | int | float | str):
        raise ValueError(
            f"{path}: an item must be a number, true, false or quoted text, got {text!r:.200}"
        )
    return value
