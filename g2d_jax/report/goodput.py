"""Where the time of each finished stage went, as a table of shares."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from g2d_jax.accounting import ACTIVITIES, shares
from g2d_jax.report import format as fmt

COLUMNS = (*ACTIVITIES, "other")


SHOWN = 8
"""Programs that are shown by name."""


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


def compiled_table(manifests: Iterable[Mapping[str, Any]]) -> tuple[str, list[str], list[list[str]]]:
    """Title, columns and rows of the programs that took longest to compile, those of a name together, and of the rest.

    Without rows where no manifest tells.
    """
    compiled, seconds = Counter[str](), defaultdict[str, float](float)
    for manifest in manifests:
        for name, program in (manifest.get("programs") or {}).items():
            compiled[name] += int(program["compiled"])
            seconds[name] += float(program["seconds"])
    longest = sorted(seconds, key=lambda name: -seconds[name])[:SHOWN]
    rest = [name for name in seconds if name not in longest]
    rows = [[name, str(compiled[name]), f"{seconds[name]:.1f} s"] for name in longest]
    if rest:
        rows.append(["others", str(sum(compiled[n] for n in rest)), f"{sum(seconds[n] for n in rest):.1f} s"])
    return "Programs compiled, or read from the cache", ["program", "times", "took"], rows
