"""The functions that config files call. Each returns a section as a ConfigDict, whose values you
then change."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, ParamSpec

from ml_collections import ConfigDict

from g2d_jax.config.rewards import Reward, Source
from g2d_jax.config.section import Section, editable
from g2d_jax.config.settings import Config
from g2d_jax.config.stages.stage import Stage
from g2d_jax.config.training import Optimizer, Sampling

P = ParamSpec("P")


def _parameters_of(
    section: Callable[P, Section],
) -> Callable[[Callable[..., ConfigDict]], Callable[P, Any]]:
    """Give a function the parameters of a section, which editors and notebooks then complete."""

    def decorate(function: Callable[..., ConfigDict]) -> Callable[P, Any]:
        function.__signature__ = inspect.signature(section)  # type: ignore[attr-defined]
        return function

    return decorate


def stage_of(kind: Callable[P, Stage]) -> Callable[P, Any]:
    """Return the function that builds a stage of this kind as a ConfigDict."""

    @_parameters_of(kind)
    def build(**changes: Any) -> ConfigDict:
        return _filled(kind(), changes)  # type: ignore[call-arg]

    name = str(getattr(kind, "kind", ""))
    build.__name__ = build.__qualname__ = name
    build.__doc__ = (
        f"Return the settings of a stage of kind {name}: see `{getattr(kind, '__name__', name)}`."
    )
    return build


def base() -> ConfigDict:
    """Return the settings that every run has. The config file adds problems and stages."""
    return editable(Config())


def source(
    path: str,
    split: Literal["", "train", "dev", "test"] = "",
    limit: int | None = None,
    fields: Mapping[str, str] | None = None,
    *,
    on_error: Literal["raise", "skip"] = "raise",
    revision: str | None = None,
) -> ConfigDict:
    """Return a source of problems: see `Source`. fields: our field name -> the file's, such as
    {"problem": "question"}."""
    return editable(
        Source(
            path=path,
            revision=revision,
            split=split,
            limit=limit,
            fields=fields or {},
            on_error=on_error,
        )
    )


@_parameters_of(Reward)
def reward(**changes: Any) -> ConfigDict:
    """Return the scoring of responses: see `Reward`."""
    return _filled(Reward(), changes)


def task(
    train: ConfigDict, dev: ConfigDict, test: ConfigDict, *, weight: float = 1.0, **changes: Any
) -> ConfigDict:
    """Return another task of a mixed run: problems, share of every batch, own reward
    (`changes`)."""
    return ConfigDict(
        {"train": train, "dev": dev, "test": test, "weight": weight, "reward": reward(**changes)}
    )


@_parameters_of(Optimizer)
def optimizer(learning_rate: float, **changes: Any) -> ConfigDict:
    """Return an optimiser's settings: see `Optimizer`."""
    return _filled(Optimizer(), {"learning_rate": learning_rate, **changes})


@_parameters_of(Sampling)
def sampling(max_new_tokens: int, **changes: Any) -> ConfigDict:
    """Return sampling settings: see `Sampling`."""
    return _filled(Sampling(), {"max_new_tokens": max_new_tokens, **changes})


def sweep(**changes: Any) -> ConfigDict:
    """Return a study: the config under many overrides. seeds: () keeps the config's own. Fill
    `arms` with `arm(…)`.

    folder: paths in arms are relative to it. Reading a config file sets it; "" is the working
    directory.
    """
    return _set(ConfigDict({"seeds": (), "arms": {}, "folder": ""}), changes)


def arm(**changes: Any) -> ConfigDict:
    """Return points of a study that vary the same fields, written as overrides of the config.

    fixed: for all points ("stages.dpo.beta=0.5"). product: every combination of
    "field=value,value,…"; put a value with commas in brackets. zip: fields that change together,
    value by value. stages: the stages that the points run, () for all.
    """
    return _set(ConfigDict({"fixed": (), "product": (), "zip": (), "stages": ()}), changes)


def _filled(section: Section, changes: Mapping[str, Any]) -> ConfigDict:
    """Return a section with changed values; a dictionary changes the values of a nested section.
    Raises AttributeError for an unknown field."""
    rest = dict(changes)
    groups = {}
    for name, value in changes.items():
        within = getattr(section, name, None)
        if isinstance(within, Section) and type(value) is dict:
            groups[name] = _filled(within, rest.pop(name))
    return _set(editable(section), {**rest, **groups})


def _set(config: ConfigDict, changes: Mapping[str, Any]) -> ConfigDict:
    config.lock()
    for name, value in changes.items():
        setattr(config, name, value)
    return config
