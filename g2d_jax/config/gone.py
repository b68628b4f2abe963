"""Settings that older versions had and this one has not, and what their use means now.

GONE ─► Gone of a path ─┬► refused, with what to use now: where something would run
                        └► left out: where a finished run is read, and where the value changed nothing; where a run
                           that has begun goes on, also what decided no result
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


def one_of(*values: Any) -> Callable[[Any], bool]:
    """Return a test that holds for these values."""
    return lambda value: value in values


def other_than(*values: Any) -> Callable[[Any], bool]:
    """Return a test that holds for all values but these."""
    return lambda value: value not in values


def _is_not_default(adaptive: Any) -> bool:
    """Return whether a section "adaptive" has a value that was set; each field had one default."""
    defaults = {"min_steps": 20, "shift": 0.5}
    return not isinstance(adaptive, Mapping) or any(
        value != defaults.get(key) for key, value in adaptive.items()
    )


@dataclass(frozen=True)
class Gone:
    """A setting that is gone, or a setting of which some values are.

    path: its dotted field, with * for the name of a stage or of a task; or a section's, for all
    that is in it.
    used: returns whether a value decided something in a run. Others, such as the old default, are
    left out silently.
    instead: the sentence that says what to use now.
    then: what a finished run is read with in its place; None is the field's default, if there still
    is such a field.
    common: whether its last name fits fields of other sections, so that the name alone tells
    nothing.
    decides: whether a value that was used decided the result; a run begun with one that did not
    goes on without it.
    """

    path: str
    used: Callable[[Any], bool]
    instead: str
    then: Any = None
    common: bool = False
    decides: bool = True

    def refusal(self, path: str, value: Any) -> ValueError:
        """Return the error for a setting with this path and value that something would run with."""
        return ValueError(f"{path}={value!r:.200} is gone: {self.instead}")


ADAPTIVE = (
    'no rule ends a warm-up by itself, so leave it out; stop="budget" ends it at a cost, '
    "keep=(10, 20, 40) with a "
    "best_checkpoint stage chooses among its steps, and g2d sweep compares them"
)
KTO = (
    "offline stages train on pairs, by DPO, so leave it out; to train on graded responses alone "
    "use TRL's KTOTrainer"
)

SIGNAL = "the gradient's signal and noise are measured no more: leave it out"

GONE: tuple[Gone, ...] = (
    Gone("stages.*.stop", one_of("adaptive"), ADAPTIVE, common=True),
    Gone("stages.*.adaptive", _is_not_default, ADAPTIVE),
    Gone("stages.*.loss", one_of("kto"), KTO, common=True),
    Gone("stages.*.desirable_weight", other_than(1.0), KTO),
    Gone("stages.*.undesirable_weight", other_than(1.0), KTO),
    Gone("stages.*.signal_pairs", other_than(0, 256), SIGNAL, decides=False),
    Gone(
        "stages.*.reward_column",
        other_than(None, "None"),
        'use columns={"reward": "its name"}',
    ),
    Gone(
        "engine.sync",
        one_of("weights"),
        "use 'folder', from which vLLM reloads its weights, or 'adapter' where lora.rank is "
        "above 0",
        then="folder",
        common=True,
    ),
    Gone(
        "compute.flags",
        other_than("none"),
        "leave it out; flags of XLA and libtpu can be set in XLA_FLAGS and LIBTPU_INIT_ARGS",
        common=True,
        decides=False,
    ),
)
"""All settings that are gone."""


def find(path: str) -> Gone | None:
    """Return the entry of `GONE` for a dotted path, None if it is none of them."""
    return next((gone for gone in GONE if _fits(path.split("."), gone.path.split("."))), None)


def _fits(names: list[str], pattern: list[str]) -> bool:
    if len(names) != len(pattern):
        return False
    return all(part in ("*", name) for name, part in zip(names, pattern, strict=True))


def refuse(values: Mapping[str, Any], prefix: str = "") -> None:
    """Raise ValueError for the first setting in nested values that is gone and was used. prefix:
    the values' own path, with a dot at its end."""
    for key, value in values.items():
        path = f"{prefix}{key}"
        gone = find(path)
        if gone is not None and gone.used(value):
            raise gone.refusal(path, value)
        if isinstance(value, Mapping):
            refuse(value, f"{path}.")


def without_undeciding(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values without the settings that are gone and decided no result. prefix: as of
    `refuse`."""
    kept: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{prefix}{key}"
        gone = find(path)
        if gone is not None and not gone.decides:
            continue
        if isinstance(value, Mapping):
            value = without_undeciding(value, f"{path}.")
        kept[key] = value
    return kept


def named(field: str) -> list[str]:
    """List what to use in place of a field whose last name tells that it is gone: for an error that
    knows no more."""
    instead = []
    for gone in GONE:
        if gone.path.rpartition(".")[2] == field and not gone.common:
            instead.append(gone.instead)
    return instead
