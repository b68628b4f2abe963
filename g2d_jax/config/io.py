"""Configs as plain dictionaries and back, with every name and type checked; and the part that
decides the result.

    config ─► to_dict ─► config.json ─► from_dict ─► the same config
    config ─► identity ─► fingerprint, differences

`config.py` has the names and types of all fields; a stage has the fields of its kind.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict, FieldReference

from g2d_jax import config as schema
from g2d_jax.config.places import Named, walk
from g2d_jax.config.policy_name import is_external
from g2d_jax.config.section import Section, editable
from g2d_jax.runtime import storage

MEANING = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    tuple: "a list like 0,10,20",
}
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")  # as written by storage
_ABSENT = object()
_LOGIN = re.compile(r"[A-Za-z][\w+.-]*://[^/?#\s@]*@")


def to_dict(config: ConfigDict | Section) -> dict[str, Any]:
    """Return the config in JSON's types, keys sorted; unset fields are None. `from_dict` inverts
    it.

    Raises ValueError naming a field whose URL holds a login.
    """
    values = storage.plain(config.to_dict())
    _refuse_logins(values, "")
    return values


def _refuse_logins(value: Any, path: str) -> None:
    """Raise ValueError for a password, without repeating it: settings are printed and saved."""
    if isinstance(value, str) and _LOGIN.search(value):
        raise ValueError(
            f"{path} holds a URL with a user name or password, which the run would write to its "
            "files. Remove it: put a server's key in an environment variable "
            "(engine.api_key_env), and log in to a store or hub with its own tools"
        )
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        for key, item in value.items():
            _refuse_logins(item, f"{path}.{key}".lstrip("."))


def from_dict(values: Mapping[str, Any]) -> ConfigDict:
    """Return the locked config with these values; other fields have their defaults.

    Raises ValueError with the full path of a field that is unknown or has the wrong type.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"a config must be a section, got {values!r:.200}")
    config = schema.base()
    for name, stage in _named(values, "stages"):
        kind = stage.get("kind") if isinstance(stage, Mapping) else None
        if not isinstance(kind, str) or kind not in schema.STAGES:
            kinds = f"{listed(schema.STAGES)}, got {kind!r:.50}{suggest(kind, schema.STAGES)}"
            raise ValueError(f"stages.{name}.kind must be one of {kinds}")
        config.stages[name] = editable(schema.STAGES[kind]())
    for name, _ in _named(values, "tasks"):
        if name == "main":
            raise ValueError(
                "tasks.main: data.* and reward.* are the task main already; choose another name"
            )
        config.tasks[name] = editable(schema.Task())
    if "sweep" in values:  # only studies have it
        config.sweep = schema.sweep().unlock()
        for name, _ in _named(values["sweep"], "arms", "sweep."):
            config.sweep.arms[name] = schema.arm()
    _fill(config, values, "", config)
    return config.lock()


def _named(values: Any, section: str, prefix: str = "") -> list[tuple[str, Any]]:
    """List the items of a section with user-chosen names. Raises ValueError for an invalid name."""
    if not isinstance(values, Mapping):
        return []
    items = values.get(section, {})
    if not isinstance(items, Mapping):
        raise ValueError(f"{prefix}{section} must be a section, got {items!r:.200}")
    for name in items:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", str(name)):
            raise ValueError(
                f"{prefix}{section}.{name}: write a name with letters, digits, - and _ only"
            )
    return list(items.items())


def _fill(section: ConfigDict, values: Mapping[str, Any], prefix: str, config: ConfigDict) -> None:
    """Copy values into a section of the config, checking names and types."""
    is_open = len(section) == 0
    field: Any = ""
    for key, value in values.items():
        path = f"{prefix}{key}"
        if not is_open:
            field = field_of(section, str(key), path, config)
        if not isinstance(field, ConfigDict):
            assign(section, key, typed(value, field, path), path)
        elif isinstance(value, Mapping):
            _fill(field, value, f"{path}.", config)
        else:
            raise ValueError(
                f"{path} is a section, got {value!r:.200}; its fields are {listed(field.keys())}"
            )


def assign(section: ConfigDict, key: str, value: Any, path: str) -> None:
    """Set a field. A section with user-chosen names, such as fields, may not have it yet. Raises
    ValueError."""
    try:
        with section.unlocked():
            section[key] = value
    except (
        KeyError,
        TypeError,
        ValueError,
    ) as error:  # a name with a dot in it, or an attribute of ConfigDict
        raise ValueError(f"{path} cannot be set: {error}") from error


def field_of(section: Any, key: str, path: str, config: ConfigDict) -> Any:
    """Look up a name in a section: a value, a section, or a FieldReference for an optional field.

    Raises ValueError if there is no such field, with the nearest path of the config or the
    section's fields.
    """
    if not isinstance(section, ConfigDict):
        raise ValueError(f"unknown field {path!r}{suggest(path, paths(config))}")
    fields = dict(section.items(preserve_field_references=True))
    if key not in fields:
        hint = suggest(path, paths(config)) or f"; the fields are {listed(fields)}"
        raise ValueError(f"unknown field {path!r}{hint}")
    return fields[key]


def paths(section: ConfigDict, prefix: str = "") -> Iterator[str]:
    """Yield all dotted paths of a config, sections before their fields."""
    for key, value in section.items():
        yield f"{prefix}{key}"
        if isinstance(value, ConfigDict):
            yield from paths(value, f"{prefix}{key}.")


def kind_of(field: Any) -> tuple[type, bool]:
    """Return the type of a field, and whether it may be None."""
    if isinstance(field, FieldReference):
        return field.get_type(), True
    return type(field), False


def typed(value: Any, field: Any, path: str) -> Any:
    """Return the value if it has the field's type: None only where optional, integers for floats,
    lists for tuples.

    Raises ValueError with the path and the expected type, and for a URL with a login.
    """
    _refuse_logins(value, path)
    kind, optional = kind_of(field)
    if value is None and optional:
        return None
    if kind is float and (type(value) is int or value in _NOT_FINITE):
        try:
            return float(value)
        except OverflowError as error:
            raise wrong_type(path, field, value) from error
    if kind is tuple and isinstance(value, list | tuple):
        if optional or not field:
            return tuple(value)
        return tuple(typed(item, field[0], f"{path}[{i}]") for i, item in enumerate(value))
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise wrong_type(path, field, value)
    return value


def wrong_type(path: str, field: Any, value: Any) -> ValueError:
    """Return the error that states the type of the field at this path."""
    kind, optional = kind_of(field)
    expected = f"{MEANING.get(kind, 'a value')} ({kind.__name__})" + " or none" * optional
    return ValueError(f"{path} must be {expected}, got {value!r:.500}")


class InputSetting(NamedTuple):
    """A setting that names an input of the run. path: dotted, with the index in a list."""

    path: str
    text: str
    kind: str
    revision: str | None


def input_settings(values: Mapping[str, Any]) -> Iterator[InputSetting]:
    """Yield the settings that name inputs: files, models, datasets, policies of other runs. values:
    from `to_dict`."""
    inside = ("sample", "archive", *values["stages"])
    for named in walk(values):
        kind = named.place.kind
        if kind == "path":
            continue
        revision = named.section.get("revision")
        is_list = isinstance(named.section[named.key], list)
        for number, text in enumerate(named.texts):
            if kind == "policy" and not is_external(text):
                continue
            if text in inside or text.startswith("procedural:"):
                continue
            yield InputSetting(
                f"{named.path}.{number}" * is_list or named.path, text, kind, revision
            )


def identity(
    config: ConfigDict | Section | Mapping[str, Any], inputs: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the fields that decide the result, in JSON's types: all but `name` and those in
    `config.RUNTIME`.

    inputs: the contents of the run's inputs (session/inputs.py), which replace paths and revisions.
    None keeps these.
    """
    values = storage.plain(config) if isinstance(config, Mapping) else to_dict(config)
    if inputs is not None:
        for named in walk(values):
            _put_content(named, inputs)
    return _without(values, "")


def _put_content(named: Named, inputs: Mapping[str, str]) -> None:
    """Replace the value of a setting by the content of its input, in a dictionary of settings."""
    section, key = named.section, named.key
    if section[key] and named.path in inputs:
        section[key] = inputs[named.path]
        if "revision" in section:
            section["revision"] = None
    elif isinstance(section[key], list):
        section[key] = [
            inputs.get(f"{named.path}.{number}", text) for number, text in enumerate(section[key])
        ]


def _without(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    # Rules for the main task's reward also apply to tasks.NAME.reward.
    base = re.sub(r"^tasks\.[^.]+\.", "", prefix)
    left_out = (*schema.RUNTIME, "name")
    rest = {}
    for key, value in values.items():
        if f"{base}{key}" not in left_out:
            rest[key] = _without(value, f"{prefix}{key}.") if isinstance(value, dict) else value
    return rest


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """List the differences between two configs' identities, one line a field: "stages.warmup.steps:
    20 -> 40"."""
    return list(_differences(old, new, ""))


def begins_more(stage: Mapping[str, Any]) -> bool:
    """Return whether you can extend a stage by raising its steps: an online stage with a constant
    schedule.

    A stage that samples ahead cannot grow: resuming inside an interval needs the policy from its
    start.
    """
    if stage["kind"] != "online":
        return False
    return bool(
        stage["optimizer"]["schedule"] == "constant"
        and not stage["budget"]["amount"]
        and stage["sync_every"] == 1
    )


def with_longer(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return an identity with the added steps of another one, and the names of the longer stages.

    Only stages that `begins_more` accepts count. They may also keep more steps, but none before
    their old end: those checkpoints are gone.
    """
    extended = storage.plain(old)
    longer = []
    for name, stage in extended["stages"].items():
        other = new["stages"].get(name, {})
        if (
            other.get("kind") == stage["kind"]
            and begins_more(stage)
            and other["steps"] > stage["steps"]
        ):
            keep = list(stage["keep"])
            for step in other["keep"]:
                if step >= stage["steps"] and step not in stage["keep"]:
                    keep.append(step)
            stage |= {"steps": other["steps"], "keep": keep}
            longer.append(name)
    return extended, longer


def changes(old: ConfigDict | Section, new: ConfigDict | Section) -> list[str]:
    """List all differences between two configs, as lines like those of `differences`, including
    fields that do not decide the result."""
    return differences(to_dict(old), to_dict(new))


def defaults(config: ConfigDict) -> ConfigDict:
    """Return a config with the same stages and tasks, and every other setting at its default."""
    stages = {name: {"kind": stage.kind} for name, stage in config.stages.items()}
    return from_dict({"stages": stages, "tasks": {name: {} for name in config.tasks}})


def flat(config: ConfigDict) -> dict[str, str]:
    """Return the text of every setting, in override syntax, by dotted path."""
    texts: dict[str, str] = {}

    def walk(values: Mapping[str, Any], prefix: str) -> None:
        for name, value in values.items():
            path = f"{prefix}{name}"
            if isinstance(value, dict):
                walk(value, f"{path}.")
            elif isinstance(value, list):
                texts[path] = ",".join(map(str, value))
            else:
                texts[path] = "none" if value is None else str(value)

    walk(to_dict(config), "")
    return texts


def _differences(old: Any, new: Any, path: str) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from _differences(
                old.get(key, _ABSENT), new.get(key, _ABSENT), f"{path}.{key}".lstrip(".")
            )
    elif old is _ABSENT or new is _ABSENT or storage.fingerprint(old) != storage.fingerprint(new):
        yield f"{path}: {_shown(old)} -> {_shown(new)}"


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "(absent)"
    if isinstance(value, dict):
        return f"{{{', '.join(value)}}}"
    if value is None:
        return "none"
    return repr(value)


def suggest(given: Any, candidates: Iterable[str]) -> str:
    """Return ", did you mean …?" with names that have the same last part, else the nearest name; ""
    if there are none."""
    names = list(candidates)
    text = str(given)
    last = text.rsplit(".", 1)[-1]
    alike = [name for name in names if name.rsplit(".", 1)[-1] == last]
    count = 1 if "." in text else 3
    near = difflib.get_close_matches(text, alike, count, 0) or difflib.get_close_matches(
        text, names, 1, 0.7
    )
    if not near:
        return ""
    return f", did you mean {' or '.join(near)}?"


def listed(names: Iterable[Any]) -> str:
    """Join the names in one line, for a message."""
    return ", ".join(map(str, names)) or "none"
