"""The time of a program, from its estimated work and the bytes that it sends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from etils import epath

from g2d_jax.config import Config, Source, places
from g2d_jax.data.problems import NAMED
from g2d_jax.data.rows import SUFFIXES
from g2d_jax.models import hf, shapes
from g2d_jax.models.config import ModelConfig
from g2d_jax.plan.topologies import Device
from g2d_jax.runtime import storage
from g2d_jax.runtime.program import Work
from g2d_jax.runtime.rates import Seconds

SUITES = {"math500": 500, "amc23": 40, "gsm8k": 1319}
ASSUMED = 1000  # held-out problems of a file that was not read and has no limit


@dataclass(frozen=True)
class Time:
    """The time of one call. parts: at the device's documented rates. seconds: at the reached share
    of them, with waits. least: at the documented rates, without waits. bound: the longest part."""

    parts: Seconds
    seconds: float
    least: float
    bound: str


def time_of(
    work: Work,
    device: Device,
    groups: Mapping[int, float],
    axes: Mapping[int, int],
    far: float = 0.0,
    collectives: int = 0,
) -> Time:
    """Compute the time of one call: a decode step's parts run one after the other, those of a
    program over many tokens overlap.

    groups: bytes that a device sends, by group size. axes: the number of torus axes that a group
    spans, by group size; others span the most of any. far: bytes that leave its slice or GPU host.
    collectives: their number.
    """
    widest = max(axes.values(), default=1)
    links = 0.0
    for group, sent in groups.items():
        links += sent / device.group_link(axes.get(group, widest))
    waits = 0.0
    if work.layers:
        waits = collectives * device.latency + work.layers * device.launches
    parts = Seconds(
        products=work.flops / device.flops,
        memory=(work.moved or 0) / device.bandwidth,
        cache=work.cached / device.bandwidth,
        links=links,
        network=far / device.network,
        waits=waits,
    )
    bound = max(parts._fields, key=lambda name: getattr(parts, name))
    if work.layers:
        return Time(parts, device.step_seconds(parts), parts.one_by_one(), bound)
    return Time(parts, device.pass_seconds(parts), parts.at_once(), bound)


def shape_of(path: str) -> ModelConfig:
    """Return a model's shape without a download, from a folder's config.json or models/shapes.py.

    Raises ValueError for a folder that does not exist, and for a name that is not in shapes.py.
    """
    if epath.Path(path).expanduser().exists():
        return hf.read_config(hf.resolve(path))
    if places.is_path(path):
        raise ValueError(
            f"there is no folder {path}: set a folder with the model's config.json, or a model's name"
        )
    return shapes.shape(path)


def reads_locally(config: Config) -> bool:
    """Return whether tokenizer and problems are files on this machine, so that prompts can be
    tokenised."""
    tokenizer = config.tokenizer.path or config.model.path
    named = tokenizer and not tokenizer.startswith("procedural:")
    if named:
        folder = epath.Path(tokenizer).expanduser()
        names = ("tokenizer.json", "tokenizer_config.json")
        is_local = storage.is_local(tokenizer)
        if not is_local or not any((folder / name).exists() for name in names):
            return False
    sources = []
    for task in config.all_tasks.values():
        sources += [task.train.path, task.dev.path, task.test.path]
    return all(
        source.startswith("procedural:") or _is_local_file(source) for source in sources if source
    )


def _is_local_file(source: str) -> bool:
    name, _, rest = source.partition(":")
    path = rest if name in NAMED else source
    return (
        path.endswith(SUFFIXES)
        and storage.is_local(path)
        and epath.Path(path).expanduser().exists()
    )


def train_problems(config: Config) -> int | None:
    """Sum the limits of the training problems over all tasks; None if a task has none."""
    limits = [task.train.limit for task in config.all_tasks.values() if task.train.path]
    return None if None in limits else sum(filter(None, limits))


def problems(config: Config, split: str) -> int:
    """Count a held-out split's problems over all tasks: by its limit, the suite's size, or an
    assumed number."""
    total = 0
    for task in config.all_tasks.values():
        source: Source = getattr(task, split)
        if source.path:
            total += source.limit or SUITES.get(source.path.partition(":")[0], ASSUMED)
    return total
