"""Where the time of each finished stage went, as a table of shares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from g2d_jax.accounting import ACTIVITIES, shares
from g2d_jax.report import format as fmt

COLUMNS = (*ACTIVITIES, "other")


def goodput_table(manifests: Iterable[Mapping[str, Any]]) -> tuple[str, list[str], list[list[str]]]:
    """Title, columns and rows; no rows where no manifest tells, which those of version 0.1 did not at first.

    The wall time has writing checkpoints in it, and neither probes nor diagnoses, which are counted apart.
    """
    found = [(manifest, shares(manifest)) for manifest in manifests]
    rows = [
        [str(manifest.get("name", "")), fmt.duration(_wall(manifest)), *(fmt.percent(of[name]) for name in COLUMNS)]
        for manifest, of in found
        if of
    ]
    return "Where the time went, in % of the wall time", ["stage", "wall time", *COLUMNS], rows


def _wall(manifest: Mapping[str, Any]) -> float:
    return fmt.number(manifest, "seconds") + fmt.number(manifest, "checkpointing_seconds")
