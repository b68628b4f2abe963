"""A program's work, counted by formula, and its least time: the roofline of its device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from etils import epath

from g2d_jax.config import Config, Source, places
from g2d_jax.data.problems import NAMED
from g2d_jax.data.rows import SUFFIXES
from g2d_jax.models import hf, shapes
from g2d_jax.models.config import ModelConfig
from g2d_jax.plan.topologies import Device
from g2d_jax.runtime import gguf_file, storage
from g2d_jax.session.program import Work

SUITES = {"math500": 500, "amc23": 40, "gsm8k": 1319}
ASSUMED = 1000  # held-out problems of a file whose length no setting gives


class Roofline(NamedTuple):
    """The least seconds of one call, and the resource that takes so long: compute, memory, links or
    network."""

    seconds: float
    bound: str


def roofline(work: Work, sent: Mapping[str, float], device: Device, far: float = 0.0) -> Roofline:
    """Compute the roofline of one call: all resources work at once, so the longest of their times
    counts.

    sent: bytes a device sends in it, by kind of collective. far: what of it leaves its slice, or
    its host of GPUs.
    """
    return max(
        Roofline(work.flops / device.flops, "compute"),
        Roofline(work.moved / device.bandwidth, "memory"),
        Roofline(sum(sent.values()) / device.link, "links"),
        Roofline(far / device.network, "network"),
    )


def shape_of(path: str) -> ModelConfig:
    """Return a model's shape without a download: of a folder's config.json or a GGUF file, else by
    the tables of models/shapes.py by name.

    Raises ValueError for a folder that does not exist, and for a name that is not in the tables.
    """
    if path.startswith(places.PACKAGE) or epath.Path(path).expanduser().exists():
        return hf.read_config(hf.resolve(path))
    if places.is_path(path):
        raise ValueError(
            f"there is no folder {path}: give one with the model's config.json, or a model's name"
        )
    return shapes.shape(path)


def reads_locally(config: Config) -> bool:
    """Tell whether tokenizer and problems are files on this machine, so that the lengths of prompts
    can be counted."""
    tokenizer = config.tokenizer.path or config.model.path
    named = tokenizer and not tokenizer.startswith("procedural:")
    if named and not gguf_file.is_gguf(tokenizer):
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


def problems(config: Config, split: str) -> int:
    """Count the problems of a held-out split over all tasks: its limit, the suite's size, or an
    assumed number."""
    total = 0
    for task in config.all_tasks.values():
        source: Source = getattr(task, split)
        if source.path:
            total += source.limit or SUITES.get(source.path.partition(":")[0], ASSUMED)
    return total
