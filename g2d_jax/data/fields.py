"""Readers of one field of a row as a given type. Each raises BrokenRow with the fault."""

from __future__ import annotations

import contextlib
import decimal
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from g2d_jax.config.io import suggest
from g2d_jax.records import Conversation, Message, Prompt

Values: TypeAlias = Mapping[str, Any]
"""The values of a row, by the names of its fields."""

Found: TypeAlias = tuple[str | None, Any]
"""The path of a field in a row, and the value there; (None, None) if the row lacks it."""

Fields: TypeAlias = Mapping[str, str]
"""Maps a record's field ("answer") to the row's ("reward_model.ground_truth"; dots lead into
nested objects)."""

ROLES = ("system", "user", "assistant")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of an assistant's message that hold its reasoning."""
UNRENDERED = (
    *("tools", "tool_calls", "function_call", "chat_template_kwargs"),
    *("image", "images", "audio", "audios", "video", "videos"),
)
"""Columns of a row, and keys of a message, that other tools pass to a chat template."""
MAX_TEXT = 2**20  # characters of a text: more than any model here reads
MAX_MESSAGES = 4096


_PACKED = re.compile(r"\s*(?:\[\s*)?\{(?=.*[\"'](?:role|from)[\"']\s*:)", re.DOTALL)
# as Python or NumPy prints a list of messages
_SHOWN = re.compile(r"\s*\[\s*\{\s*'(?:role|content|from|value)'\s*:")
# A missing answer as pandas writes it, or as people note it.
_HOLE = re.compile(r"-?nan|nat|[#<]?n[/.]?a[.>]?|null|none|tb[ad]|todo", re.IGNORECASE)
_ITEM = re.compile(r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[-+]?\d+(?:\.\d+)?)""", re.DOTALL)
_ITEMS = rf"{_ITEM.pattern}\s*(?:,\s*{_ITEM.pattern}\s*)*,?\s*"
_LIST = re.compile(rf"\s*\[\s*(?:{_ITEMS})?\]\s*", re.DOTALL)
_ESCAPE = re.compile(r"(?:\\u[0-9a-fA-F]{4})+|\\[\"'\\/bfnrt]")
# a backslash that JSON does not need, or may need
_SINGLE = re.compile(r"(?<!\\)(?:\\\\)*\\(?![\"'\\/]|u[0-9a-fA-F]{4})")
_DOUBLED = re.compile(r"(?<!\\)(?:\\\\)+(?=[A-Za-z])")


class BrokenRow(ValueError):
    """A row that cannot become a record, with the reason."""


class LeftOut(Exception):
    """A valid row that the dataset's filter leaves out. Its text is the reason, one of a few."""


def check_fields(fields: Fields, names: Iterable[str]) -> None:
    """Raise ValueError when `fields` maps a field that the record does not have."""
    names = tuple(names)
    for name in fields:
        if name not in names:
            raise ValueError(
                f"fields maps {name!r}, which is none of {', '.join(names)}{suggest(name, names)}"
            )


def find(values: Values, *paths: str, scalar: bool = False) -> Found:
    """Return (path, value) of the first path that the row has with a value other than null; else
    (None, None).

    scalar: skip values that are neither text nor number.
    """
    for path in paths:
        value = _at(values, path)
        is_scalar = isinstance(value, str | int | float) and not isinstance(value, bool)
        if value is not None and (is_scalar or not scalar):
            return path, value
    return None, None


def named(values: Values, *paths: str) -> tuple[str, Any]:
    """Return (path, value) of a field as `find` does. Raises BrokenRow when the row lacks it, or
    it is null."""
    path, value = find(values, *paths)
    if path is None:
        names = " or ".join(map(repr, paths))
        raise BrokenRow(
            f"no field {names}; the row has {', '.join(map(repr, values)) or 'none'}"[:500]
        )
    return path, value


def as_text(value: Any, path: str) -> str:
    """Return a text that is not blank, holds no NUL and can be written as UTF-8."""
    if not isinstance(value, str):
        raise BrokenRow(f"{path!r} must be a text, got {type(value).__name__}")
    if not value.strip():
        raise BrokenRow(f"{path!r} is blank")
    return _clean(value, path)


def require_rendered(values: Values, where: str = "") -> None:
    """Raise BrokenRow for a row, or a message, with chat-template input that is not rendered here.
    where: the message's path."""
    for key in UNRENDERED:
        value = values.get(key)
        if not is_empty(value) and value not in ("[]", "{}", "null"):
            raise BrokenRow(
                f"{where}{key!r} is for the chat template and is not rendered here, so the policy "
                "would not see it: write it into the text, or remove such rows. "
                "For enable_thinking set tokenizer.enable_thinking, which applies to all rows"
            )


def further_keys(value: Any) -> set[str]:
    """Return the nonempty keys of a row's messages other than role and content."""
    if isinstance(value, str):
        with contextlib.suppress(BrokenRow):
            value = unpacked(value, "")
    if isinstance(value, Mapping):
        if {"role", "content"} <= value.keys():
            return {k for k, v in value.items() if k not in ("role", "content") and not is_empty(v)}
        return set().union(*map(further_keys, value.values()))
    if isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
        return set().union(*map(further_keys, value))
    return set()


def is_empty(value: Any) -> bool:
    """Return whether a value is null or blank, or holds only such values."""
    if isinstance(value, Mapping):
        return all(map(is_empty, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_empty, value))
    return value is None or (isinstance(value, str) and not value.strip())


def unpacked(value: Any, path: str) -> Any:
    """Parse a text that is a JSON list of messages, as tables store it; return any other value
    unchanged.

    Raises BrokenRow for such a list in Python's notation.
    """
    if not isinstance(value, str) or not _PACKED.match(value):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError) as error:
        if _SHOWN.match(value):
            raise BrokenRow(
                f"{path!r} is a list of messages in Python's notation, {value!r:.60}: write it "
                "with json.dumps"
            ) from error
        return value
    messages = found if isinstance(found, list) else [found]
    for message in messages:
        if not isinstance(message, Mapping) or not message.keys() & {"role", "from"}:
            return value
    return messages


def as_prompt(value: Any, path: str) -> Prompt:
    """Return a text, or a tuple of messages that ends with a user message."""
    value = unpacked(value, path)
    if not isinstance(value, list | tuple):
        return as_text(value, path)
    messages = as_messages(value, path)
    if messages[-1]["role"] != "user":
        raise BrokenRow(
            f"{path!r} must end with a user message, ends with {messages[-1]['role']!r}"
        )
    return messages


def as_messages(value: Any, path: str) -> Conversation:
    """Return at least one message with a role of system, user or assistant and a text.

    Reasoning under its own key (THOUGHTS) is put before the text, in <think> and </think>, as chat
    templates write it. Other keys that a template would render raise BrokenRow (UNRENDERED).
    `further_keys` counts the rest.
    """
    value = unpacked(value, path)
    if not isinstance(value, list | tuple) or not value:
        raise BrokenRow(f"{path!r} must be a list of messages, got {type(value).__name__}")
    if len(value) > MAX_MESSAGES:
        raise BrokenRow(f"{path!r} has {len(value):,} messages, the limit is {MAX_MESSAGES:,}")
    return tuple(_message(message, f"{path}[{i}]") for i, message in enumerate(value))


def _message(message: Any, path: str) -> Message:
    """Read one message."""
    if not isinstance(message, Mapping):
        raise BrokenRow(
            f"{path} must be a message with role and content, got {type(message).__name__}"
        )
    role, content = message.get("role"), message.get("content")
    require_rendered(message, f"{path}: ")
    if role not in ROLES:
        raise BrokenRow(f"{path}: the role must be one of {', '.join(ROLES)}, got {role!r:.50}")
    if not isinstance(content, str):
        raise BrokenRow(f"{path}: the content must be a text, got {type(content).__name__}")
    thoughts = {}  # by their text: some tools write one under two keys
    for key in THOUGHTS:
        if not is_empty(message.get(key)):
            thoughts[as_text(message[key], f"{path}.{key}")] = key
    for thought, key in thoughts.items():
        if role != "assistant" or len(thoughts) > 1 or "</think>" in content:
            raise BrokenRow(
                f"{path}: {key!r} holds reasoning, but the message has other reasoning already or "
                "is not the assistant's: keep one, in an assistant's message"
            )
        thought, text = thought.strip("\n"), content.lstrip("\n")
        content = f"<think>\n{thought}\n</think>\n\n{text}"
    return {"role": role, "content": _clean(content, path)}


def as_reply(value: Any, path: str) -> str:
    """Return a text, which may be blank, from a text or a conversation of one assistant message."""
    value = unpacked(value, path)
    if isinstance(value, list | tuple):
        messages = as_messages(value, path)
        roles = [message["role"] for message in messages]
        if roles != ["assistant"]:
            raise BrokenRow(f"{path!r} must be one assistant message, got {', '.join(roles)}")
        value = messages[0]["content"]
    if isinstance(value, str) and not value.strip():
        return value
    return as_text(value, path)


def as_answer(value: Any, path: str) -> str | None:
    """Read an answer as `as_scalar` does; return a list of answers as JSON text, '["3", "5"]',
    without null and blank ones."""
    if not isinstance(value, list | tuple):
        return as_scalar(value, path)
    items = [as_scalar(item, f"{path}[{i}]") for i, item in enumerate(value) if item is not None]
    return json.dumps([item for item in items if item is not None], ensure_ascii=False)


def listed(text: str) -> list[str] | None:
    r"""Return the items of an answer that is a list written as text: `["1,234"]`, `["3", "5"]`,
    `['10\%']`, `[72]`.

    Its items are quoted, in the JSON or Python way, or it is one number. None for any other text:
    `[3, 5]` is an interval.
    """
    if not _LIST.fullmatch(text):
        return None
    items = [match.group() for match in _ITEM.finditer(text)]
    quoted = [item for item in items if item[0] in "\"'"]
    if len(items) > 1 and not quoted:
        return None
    return [_unquoted(item).strip() if item in quoted else item for item in items]


def _unquoted(item: str) -> str:
    r"""Return the text in quotes, without the backslashes that JSON or Python puts before its own
    characters.

    A text that was quoted without escaping, `"\frac{1}{2}"`, has single backslashes before letters
    and no doubled ones: they begin commands, though JSON knows `\f` too.
    """
    inside = item[1:-1]
    if _SINGLE.search(inside) and not _DOUBLED.search(inside):
        return re.sub(r"\\([\"'])", r"\1", inside)
    return _ESCAPE.sub(
        lambda found: "'" if found[0] == r"\'" else json.loads(f'"{found[0]}"'), inside
    )


def as_scalar(value: Any, path: str) -> str | None:
    """Return a value as text, None when blank or a placeholder such as NaN or NA. 27.0 becomes
    "27", since data frames turn whole numbers into floats."""
    if isinstance(value, str):
        text = _clean(value, path).strip()
        return None if _HOLE.fullmatch(text) else text or None
    if isinstance(value, int | float | decimal.Decimal) and not isinstance(value, bool):
        number = decimal.Decimal(str(value))
        if number.is_nan():
            return None
        if number.is_finite():
            text = format(number, "f")
            if "." in text:
                text = text.rstrip("0").rstrip(".")
            if text in ("-0", ""):
                return "0"
            return text
    shown = f"{value!r:.50}" if isinstance(value, bool | float) else type(value).__name__
    raise BrokenRow(f"{path!r} must be a text or a finite number, got {shown}")


def _clean(value: str, path: str) -> str:
    if len(value) > MAX_TEXT:
        raise BrokenRow(f"{path!r} has {len(value):,} characters, the limit is {MAX_TEXT:,}")
    if "\0" in value:
        raise BrokenRow(f"{path!r} contains a NUL character")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BrokenRow(
            f"{path!r} contains half of a surrogate pair at character {error.start}"
        ) from error
    return value


def _at(values: Values, path: str) -> Any:
    if path in values:
        return values[path]
    value: Any = values
    for key in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value
