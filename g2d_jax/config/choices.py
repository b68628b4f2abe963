"""A config's own argument, "preset=smoke,seed=3", and the values in it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, TypeAlias

from g2d_jax.config.io import kind_of, listed, suggest, wrong_type

Scalar: TypeAlias = bool | int | float | str

BOOLS = {"true": True, "yes": True, "false": False, "no": False}


def choices(arg: str, **defaults: Any) -> SimpleNamespace:
    """Parse a config file's own argument, "preset=smoke,seed=3", each value typed by its default.

    A tuple of strings as default lists the allowed values, the default first: preset=("full",
    "smoke"). Raises ValueError for an unknown key or value, with a suggestion.
    """
    values = dict(defaults)
    for key, default in defaults.items():
        if isinstance(default, tuple):
            values[key] = default[0]
    for item in filter(None, map(str.strip, arg.split(","))):
        key, equals, text = map(str.strip, item.partition("="))
        if not equals:
            raise ValueError(
                f"choice {item!r} has no value: write key=value, with a key of {listed(defaults)}"
            )
        if key not in defaults:
            raise ValueError(
                f"unknown choice {key!r}{suggest(key, defaults)}; choices: {listed(defaults)}"
            )
        default = defaults[key]
        if not isinstance(default, tuple):
            values[key] = scalar(text, default, f"choice {key!r}")
        elif text in default:
            values[key] = text
        else:
            hint = f"{suggest(text, default)}; it can be {listed(default)}"
            raise ValueError(f"choice {key!r} cannot be {text!r}{hint}")
    return SimpleNamespace(**values)


def scalar(text: str, field: Any, path: str) -> Scalar:
    """Parse a value by the type of a field. Raises ValueError, with the path, for a wrong type."""
    kind, _ = kind_of(field)
    if kind is str:
        return text
    try:
        if kind is bool:
            return BOOLS[text.lower()]
        if kind is int or kind is float:
            return kind(text)
    except (KeyError, ValueError):
        pass
    raise wrong_type(path, field, text)
