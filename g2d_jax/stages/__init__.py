"""The kinds of stages, a module each, and what they share."""

from importlib import import_module
from types import ModuleType

from g2d_jax.config import STAGES


def of_kind(kind: str) -> ModuleType:
    """Return the module of a kind of stage, imported when one is needed.

    Its run(session, name, stage) returns an `Outcome`, what was done, and programs(session, name,
    stage, response) yields the programs that a run compiles. issues(session, name, stage) returns
    what its data, model or devices tell before it begins, and raises ValueError as `run` would.
    Raises ValueError for no kind of stage.
    """
    if kind not in STAGES:
        raise ValueError(f"there is no kind of stage {kind!r}")
    return import_module(f"g2d_jax.stages.{kind}")
