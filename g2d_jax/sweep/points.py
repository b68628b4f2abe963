"""The points of a study: a config, and overrides of it, multiplied out.

config.sweep.arms.NAME ─► fixed, product, zip ─► overrides ─► one config for each seed and combination
"""

from __future__ import annotations

import functools
import itertools
import operator
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ml_collections import ConfigDict

from g2d_jax import config as schema
from g2d_jax.config.io import from_dict, listed, suggest, to_dict
from g2d_jax.config.places import Base, here
from g2d_jax.recipes.config_load import apply, split_values
from g2d_jax.runtime import storage

MAIN = "main"  # the arm of a study given on the command line


@dataclass(frozen=True)
class Point:
    """One config of a study.

    arm: the arm it belongs to. values: what varies within the arm, field -> text. config: without
    the study's section.
    label: of the arm, the values and the seed; unique, and the name of the point's folder.
    """

    arm: str
    seed: int
    values: Mapping[str, str]
    config: ConfigDict
    label: str


def with_axes(
    config: ConfigDict, product: Sequence[str], zipped: Sequence[str], seeds: Sequence[int]
) -> ConfigDict:
    """Return the config with a study from the command line; seeds replace the config's.

    Raises ValueError if both the config and the command line have arms, or neither.
    """
    study: ConfigDict = config.copy_and_resolve_references()
    study.unlock()
    if "sweep" not in study:
        study.sweep = schema.sweep().unlock()
    if product or zipped:
        if len(study.sweep.arms):
            raise ValueError(
                f"this config has arms of its own ({listed(study.sweep.arms)}): change them there, "
                "--product and --zip are for configs without"
            )
        study.sweep.arms[MAIN] = schema.arm(product=tuple(product), zip=tuple(zipped))
        study.sweep.folder = ""  # what the command line names is relative to the working directory
    if seeds:
        study.sweep.seeds = tuple(seeds)
    if not len(study.sweep.arms):
        if not study.sweep.seeds:
            raise ValueError(
                "nothing varies: give --product FIELD=VALUE,VALUE or --seeds, or a config with "
                "sweep.arms"
            )
        study.sweep.arms[MAIN] = schema.arm()
    return study.lock()


def refuse_decided(config: ConfigDict, overrides: Sequence[str]) -> None:
    """Raise ValueError for an override, "FIELD=VALUE", that every point replaces."""
    arms = []
    for arm in config.sweep.arms.values():
        arms.append({_field(entry) for entry in (*arm.fixed, *arm.product, *arm.zip)})
    for override in overrides:
        field = _field(override)
        if field == "seed" and config.sweep.seeds:
            raise ValueError(
                f"the study runs its seeds, {listed(config.sweep.seeds)}, and ignores {override}: "
                "give --seeds"
            )
        if all(field in fields for fields in arms):
            raise ValueError(
                f"every arm of the study sets {field}, which replaces {override}: change the arms"
            )


def _field(entry: str) -> str:
    """Return the field of "FIELD=VALUE"."""
    return entry.partition("=")[0].strip().removeprefix("config.")


def points(config: ConfigDict) -> list[Point]:
    """List all points of a config with a sweep section: by seed, then arm (by name), then
    combination.

    Raises ValueError, naming arm and override, for overrides that do not fit the config and for
    equal points.
    """
    seeds = tuple(config.sweep.seeds) or (config.seed,)
    all_points: list[Point] = []
    for seed, (name, arm) in itertools.product(seeds, config.sweep.arms.items()):
        for values in _combinations(name, arm):
            all_points.append(_point(config, name, int(seed), values))
    counts = Counter(point.label for point in all_points)
    double = [label for label, count in counts.items() if count > 1]
    if double:
        raise ValueError(f"the study has the point {double[0]!r} twice: leave one out")
    return all_points


def _combinations(name: str, arm: ConfigDict) -> list[dict[str, str]]:
    """List the combinations of values within an arm: product's last field fastest, zip as one axis
    after it."""
    axes: list[list[dict[str, str]]] = []
    for entry in arm.product:
        field, values = _values(name, entry)
        axes.append([{field: value} for value in values])
    if arm.zip:
        columns = dict(_values(name, entry) for entry in arm.zip)
        lengths = {field: len(values) for field, values in columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(
                f"sweep.arms.{name}.zip: fields that go together need equally many values, got "
                f"{lengths}"
            )
        axes.append(
            [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        )
    return [functools.reduce(operator.or_, parts, {}) for parts in itertools.product(*axes)]


def _values(name: str, entry: str) -> tuple[str, list[str]]:
    """Split "a.b=1,2,(3,4)" into ("a.b", ["1", "2", "(3,4)"]); see `split_values`."""
    _, equals, text = entry.partition("=")
    field, arm = _field(entry), f"sweep.arms.{name}"
    if field in ("seed", "name"):
        raise ValueError(
            f"{arm}: {entry!r}: set seeds with sweep.seeds or --seeds; names are automatic"
        )
    values = split_values(text)
    if not equals or not values:
        raise ValueError(f"{arm}: {entry!r} has no values: write FIELD=VALUE,VALUE")
    return field, values


def _point(config: ConfigDict, name: str, seed: int, values: Mapping[str, str]) -> Point:
    arm = config.sweep.arms[name]
    settings = to_dict(config)
    del settings["sweep"]
    changed = from_dict(settings)
    changed.unlock()
    changed.seed = seed
    if arm.stages:
        for stage in arm.stages:
            if stage not in changed.stages:
                raise ValueError(
                    f"sweep.arms.{name}.stages: no stage {stage!r}{suggest(stage, changed.stages)}"
                )
        for stage in list(changed.stages):
            if stage not in arm.stages:
                del changed.stages[stage]
    changed.lock()
    folder = config.sweep.folder
    base = Base(Path(folder), "the config's folder") if folder else here()
    try:
        for entry in arm.fixed:
            _values(name, entry)
        for override in (*arm.fixed, *map("=".join, values.items())):
            apply(changed, override, base)
    except ValueError as error:
        raise ValueError(f"sweep.arms.{name}: {error}") from error
    label = _label(name if len(config.sweep.arms) > 1 else "", values, seed)
    changed.name = label
    return Point(name, seed, dict(values), changed, label)


def _label(arm: str, values: Mapping[str, str], seed: int) -> str:
    """Name a point for readers: its arm, fields without "stages." and "optimizer.", and seed."""
    parts = list(filter(None, [arm]))
    for field, value in values.items():
        short = field.removeprefix("stages.").replace(".optimizer.", ".")
        parts.append(f"{short}={value}")
    text = ",".join([*parts, f"seed={seed}"])
    safe = re.sub(r"[^\w.,=+()-]", "_", text)
    return (
        safe
        if safe == text and len(safe) < 120
        else f"{safe[:100]}-{storage.fingerprint(text)[:8]}"
    )
