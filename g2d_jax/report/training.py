"""What training did, stage by stage: updates and prompts, what generation took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from g2d_jax.report import format as fmt
from g2d_jax.report.run import Run, Stage
from g2d_jax.report.table import Text, known

COUNTED = {
    "steps": "updates",
    "prompts": "prompts drawn",
    "rollouts": "responses",
    "pairs": "pairs trained on",
    "skipped": "prompts without a pair",
    "left_out": "prompts left out",
}
"""Count of the manifest -> head of its column."""


def tables(run: Run) -> list[Text]:
    """The tables that have rows: updates and generation of finished online stages, from their manifests.

    A column in which nothing is known is left out.
    """
    online = [stage for stage in run.stages if stage.kind == "online" and stage.manifest is not None]
    found = (
        (
            "Training of each online stage (s: updates between synchronisations)",
            [_updates(stage, settings(run, stage)) for stage in online],
        ),
        ("Generation of each online stage", [_generation(stage) for stage in online]),
    )
    texts = (_text(title, rows) for title, rows in found)
    return [text for text in texts if text[2]]


def settings(run: Run, stage: Stage) -> Mapping[str, Any]:
    """The stage's section of the config, {} if it has none."""
    found = run.config.get("stages", {}).get(stage.name)
    return found if isinstance(found, Mapping) else {}


def _updates(stage: Stage, section: Mapping[str, Any]) -> dict[str, str]:
    manifest = stage.manifest or {}
    counted = {name: fmt.count(fmt.number(manifest, "counts", name)) for name in COUNTED}
    every = fmt.number(section, "sync_every")
    row = {
        "loss": str(section.get("loss", fmt.UNKNOWN)),
        "s": "∞" if every == 0 else fmt.count(every),
        **{COUNTED[name]: text for name, text in counted.items()},
    }
    return {"stage": stage.name, **row}


def _generation(stage: Stage) -> dict[str, str]:
    found = (stage.manifest or {}).get("generation", {})
    return {
        "stage": stage.name,
        "calls": fmt.count(fmt.number(found, "calls")),
        "prompts a call": fmt.value(fmt.number(found, "prompts_per_call")),
        "tokens/s": fmt.count(fmt.number(found, "tokens_per_second")),
        "share of time %": fmt.percent(fmt.number(found, "share")),
    }


def _text(title: str, rows: Sequence[Mapping[str, str]]) -> Text:
    """A table without rows of which nothing is known but the stage's name."""
    return known(title, [row for row in rows if set(row.values()) - {row["stage"], fmt.UNKNOWN}])
