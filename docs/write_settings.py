"""Write docs/settings.md, the reference of all settings, from the docstrings in g2d_jax/config."""

from __future__ import annotations

import ast
import inspect
import itertools
import math
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from g2d_jax.config import (
    RUNTIME,
    STAGES,
    Config,
    Dump,
    Optimizer,
    Sampling,
    Section,
    Source,
)
from g2d_jax.config.section import Hint

PAGE = Path(__file__).with_name("settings.md")
HEAD = """# All settings

<!-- written by docs/write_settings.py -->

[How to set them](config.md).
Fields marked *runtime* change results only by rounding, and may change between two starts of a run.
Set a stage's fields as `config.stages.NAME.FIELD`, those of a source as `config.data.train.FIELD`.
"""
TABLE = "| field | values | default | meaning |\n|---|---|---|---|\n"
SHARED = {Source: "source", Optimizer: "optimizer", Sampling: "sampling", Dump: "dump"}
"""Sections that several others hold: each has a table of its own."""

KINDS = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "true, false",
    Mapping: "by name",
}


def page() -> str:
    """Return the text of the page."""
    parts = [HEAD, section("The run", Config(), "", prefix="")]
    for name, hint in Config.hints().items():
        if issubclass(hint.kind, Section):
            parts.append(section(name, hint.kind(), f"{name}.", prefix=f"{name}."))
    for kind, stage in STAGES.items():
        parts.append(section(f"Stage {kind}", stage(), f"{kind}.", prefix=""))
    for shared, name in SHARED.items():
        parts.append(section(name, shared(), f"{name}.", prefix=f"{name}."))
    return "\n".join(parts)


def section(title: str, values: Section, anchor: str, *, prefix: str) -> str:
    """Return a section's heading, its docstring and its table. anchor: what leads to a field is
    this and its name. prefix: what is written before a field's name."""
    text = linked(inspect.getdoc(type(values)) or "").replace("\n", " ").replace(". ", ".\n")
    return f"## {title}\n\n{text}\n\n{TABLE}" + "".join(rows(values, anchor, prefix))


def rows(values: Section, anchor: str, prefix: str) -> Iterator[str]:
    """Yield the rows of a section's fields, and of the sections in it that are its alone."""
    meanings = docstrings(type(values))
    own = vars(type(values))["__annotations__"]
    for name, hint in sorted(values.hints().items(), key=lambda field: field[0] not in own):
        value = getattr(values, name)
        nested = isinstance(value, Section) and type(value) not in SHARED
        if (nested and isinstance(values, Config)) or (name == "kind" and name not in meanings):
            continue
        path = f"{prefix}{name}"
        is_section = issubclass(hint.kind, Section) and name not in meanings
        meaning = inspect.getdoc(type(value)) or "" if is_section else meanings[name]
        cells = [
            f'<a id="{anchor}{name}"></a>`{path}`',
            "" if nested else allowed(hint),
            "" if nested else shown(value),
            linked(meaning).replace("\n", " ").replace("|", r"\|") + runtime(path),
        ]
        yield f"| {' | '.join(cells)} |\n"
        if nested:
            yield from rows(value, f"{anchor}{name}.", f"{path}.")


def docstrings(kind: type[Section]) -> dict[str, str]:
    """Return the docstrings of a section's fields; those of a subclass replace its parents'."""
    found = {}
    for base in reversed(kind.__mro__):
        if issubclass(base, Section):
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body  # type: ignore[attr-defined]
            for field, text in itertools.pairwise(body):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    found[ast.unparse(field.target)] = inspect.cleandoc(
                        ast.literal_eval(text.value)
                    )
    return found


def allowed(hint: Hint) -> str:
    """Return the values that a field takes, in words."""
    if hint.kind in SHARED:
        return f"[{SHARED[hint.kind]}](#{SHARED[hint.kind]})"
    if hint.choices:
        return ", ".join(f"`{choice}`" if choice else "empty" for choice in hint.choices)
    if hint.items is not None:
        return f"list: {allowed(hint.items)}"
    bounds = hint.bounds
    limits = {"≥": bounds.least, ">": bounds.above, "≤": bounds.most, "<": bounds.below}
    words = [KINDS[hint.kind]]
    words += [
        f"{sign} {limit:{',' if isinstance(limit, int) else 'g'}}"
        for sign, limit in limits.items()
        if limit not in (None, math.inf)
    ]
    return ", ".join(words)


def shown(value: Any) -> str:
    """Return a default; of a section, the fields that differ from the section's own."""
    if isinstance(value, Section):
        own = type(value)().to_dict()
        changed = {k: v for k, v in value.to_dict().items() if v != own[k]}
        return ", ".join(f"`{k}` {shown(v)}" for k, v in changed.items())
    if isinstance(value, tuple):
        return ", ".join(map(shown, value)) or "()"
    if isinstance(value, float):
        return f"{value:g}"
    words = {"None": "unset", "": "empty", "True": "true", "False": "false"}
    return words.get(str(value), str(value))


def runtime(path: str) -> str:
    """Return the mark of a field that changes no result."""
    return " *Runtime.*" if {path, path.partition(".")[0]} & RUNTIME else ""


def linked(text: str) -> str:
    """Return a docstring with links in place of "docs/PAGE.md#PART"."""

    def link(match: re.Match[str]) -> str:
        place, *words = match.groups()
        return f"[{': '.join(filter(None, words)).replace('-', ' ')}]({place})"

    return re.sub(r"docs/(([\w-]+)\.md(?:#([\w-]+))?)", link, text)


if __name__ == "__main__":
    PAGE.write_text(page())
