"""The kinds of stages, a module each, and functions for all of them."""

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
    """The result of checking a stage before it begins. issues: errors and warnings. data: the data
    that was read, which `run` reuses; None if it reads none. example: text of its first example,
    exactly as it is trained on."""

    issues: list[Issue]
    data: Any = None
    example: str = ""


def of_kind(kind: str) -> ModuleType:
    """Return the module of a kind of stage, imported on first use. Raises ValueError for another
    kind.

    run(session, name, stage) returns an `Outcome`; a fourth argument is the data of `Seen`.
    phases(session, name, stage, response) lists the computations on the devices, in order; each has
    programs(). issues(session, name, stage) checks data, model and devices before the stage begins.
    It returns a `Seen`, and raises ValueError as `run` would.
    """
    if kind not in STAGES:
        raise ValueError(f"there is no kind of stage {kind!r}")
    return import_module(f"g2d_jax.stages.{kind}")


def programs(session: Session, name: str, response: int | None = None) -> list[Program]:
    """List the programs of a stage in the order of their runs, from settings alone. response: mean
    tokens of a response, to estimate work; None: the maximum."""
    stage = session.config.stages[name]
    found = []
    for phase in of_kind(stage.kind).phases(session, name, stage, response):
        found += [replace(program, stage=name) for program in phase.programs()]
    return found
