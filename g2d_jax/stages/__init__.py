"""The kinds of stages, a module each, and what they share."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from g2d_jax.config import STAGES, Issue

if TYPE_CHECKING:
    from g2d_jax.runtime.program import Program
    from g2d_jax.session.session import Session


class Seen(NamedTuple):
    """What a look at a stage finds before it begins. data: what was read for it, None for nothing.
    example: of the data, as it is trained on."""

    issues: list[Issue]
    data: Any = None
    example: str = ""


def of_kind(kind: str) -> ModuleType:
    """Return the module of a kind of stage, imported when one is needed.

    Its run(session, name, stage) returns an `Outcome`, what was done. phases(session, name, stage,
    response) lists what it computes on the devices, in order; each has programs(). issues(session,
    name, stage) returns what its data, model or devices tell before it begins, `Seen`, and raises
    ValueError as `run` would, which takes the data as a fourth argument. Raises ValueError for no
    kind of stage.
    """
    if kind not in STAGES:
        raise ValueError(f"there is no kind of stage {kind!r}")
    return import_module(f"g2d_jax.stages.{kind}")


def programs(session: Session, name: str, response: int | None = None) -> list[Program]:
    """List the programs of a stage in the order of their runs, by settings alone. response: mean
    tokens of a response for the work to be done, None: the most."""
    stage = session.config.stages[name]
    found = []
    for phase in of_kind(stage.kind).phases(session, name, stage, response):
        found += [replace(program, stage=name) for program in phase.programs()]
    return found
