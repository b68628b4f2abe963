"""From offline to online: arms that differ in how often the sampling policy is refreshed, or in the online loss.

s is the number of updates between two synchronisations (a stage's sync_every): 1 is online, never (0 there, ∞ here) is
offline. The range is that of "Bridging Offline and Online Reinforcement Learning for LLMs" (arXiv 2506.21495).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from g2d_jax import frontier
from g2d_jax.report import format as fmt
from g2d_jax.report import markup
from g2d_jax.report.page import Note, Part, Section
from g2d_jax.report.scatter import interval_chart
from g2d_jax.report.study import Row, Study
from g2d_jax.report.study_compare import difference
from g2d_jax.report.study_entry import ONLINE, Array, Entry
from g2d_jax.report.study_tables import caution, costs_of, percent_interval, points_interval, steps_of
from g2d_jax.report.table import Text, known, same

Measures = Mapping[str, tuple[str, Callable[[float], str]]]

EVALUATED: Measures = {
    "greedy %": ("greedy", fmt.percent),
    "entropy, nats": ("entropy", lambda nats: fmt.UNKNOWN if math.isnan(nats) else f"{nats:.3f}"),
    "length, tokens": ("mean_length", lambda tokens: fmt.UNKNOWN if math.isnan(tokens) else f"{tokens:.1f}"),
    "truncated %": ("truncated", fmt.percent),
}
"""Head of the column -> its name in the evaluation of a policy, its numbers as text."""


class Arm(NamedTuple):
    """Points that differ in their seed alone. name: for readers. start: the policy that their training began with.

    sync_every: as in the config, 0 for never; None, with no loss, of the policy that all arms start from.
    """

    name: str
    sync_every: int | None
    loss: str
    start: str
    row: Row

    @property
    def s(self) -> str:
        """For readers: "100", "∞"."""
        return fmt.UNKNOWN if self.sync_every is None else str(self.sync_every or "∞")


def arms(study: Study) -> list[Arm]:
    """Points that end with an online stage, from offline to s = 1, other losses after the one with the most s.

    [] if all have the same sync_every and loss. Stages of a time without these settings have s = 1 and GRPO.
    """
    found = []
    for group in study.groups:
        for row in group.rows:
            entry = row.entries[0]
            if entry.kind == ONLINE:
                stage = _stage(entry)
                name = f"{group.name}, K = {steps_of(row)}" if len(group.rows) > 1 else group.name
                settings = int(stage.get("sync_every", 1)), str(stage.get("loss", "grpo"))
                found.append(Arm(name, *settings, entry.chain[1], row))
    return _ordered(found) if len({(arm.sync_every, arm.loss) for arm in found}) > 1 else []


def _stage(entry: Entry) -> Mapping[str, Any]:
    stage: Mapping[str, Any] = entry.config["stages"][entry.final.partition("@")[0]]
    return stage


def _ordered(found: Sequence[Arm]) -> list[Arm]:
    spans: dict[str, list[float]] = {}
    for arm in found:
        spans.setdefault(arm.loss, []).append(_distance(arm))
    losses = sorted(spans, key=lambda loss: (-len(set(spans[loss])), -max(spans[loss])))
    return sorted(found, key=lambda arm: (losses.index(arm.loss), -_distance(arm)))


def _distance(arm: Arm) -> float:
    return arm.sync_every or math.inf


def start_of(found: Sequence[Arm]) -> Arm | None:
    """The policy that all arms start from, where it is one for each seed and was evaluated on the same problems."""
    entries = [entry for arm in found for entry in arm.row.entries]
    origins = {(entry.seed, *_origin(entry)) for entry in entries}
    if not found or len({name for _, name, _ in origins}) > 1 or len(origins) > len({entry.seed for entry in entries}):
        return None
    name, known = found[0].start, dict[int, tuple[Entry, Array]]()
    kind = entries[0].config["stages"].get(name.partition("@")[0], {}).get("kind", "")
    for entry in entries:
        answers = entry.answers("test", name)
        if answers is not None and answers.ids == found[0].row.ids:
            known.setdefault(entry.seed, (replace(entry, final=name, kind=kind, steps=None), answers.values))
    if not known:
        return None
    ordered = [known[seed] for seed in sorted(known)]
    row = Row([entry for entry, _ in ordered], found[0].row.ids, np.stack([values for _, values in ordered]))
    return Arm(name, None, "", name, row)


def _origin(entry: Entry) -> tuple[str, str]:
    """The policy that the last stage started from: its name, and the folder of its stage."""
    name = entry.chain[1]
    return name, str(entry.folders.get(name.partition("@")[0], ""))


def offline_of(found: Sequence[Arm]) -> Arm | None:
    """The arm that is never synchronised, the first if several are."""
    return next((arm for arm in found if arm.sync_every == 0), None)


def gain(row: Row) -> frontier.Interval | None:
    """What training added to the policy it started from, paired by seed and problem; None where it is not known."""
    found = []
    for entry, after in zip(row.entries, row.accuracies, strict=True):
        before = entry.answers("test", entry.chain[1]) if len(entry.chain) > 1 else None
        if before is not None and before.ids == row.ids:
            found.append(after - before.values)
    return frontier.bootstrap(np.stack(found)) if found else None


def generation(entry: Entry) -> Mapping[str, Any]:
    """What the online stage says of its generation, {} where it says nothing, or the policy is not that of its end."""
    steps = fmt.number(entry.trained, "counts", "steps")
    ended = entry.kind == ONLINE and entry.final.partition("@")[2] in ("", f"{steps:.0f}")
    return entry.trained.get("generation", {}) if ended else {}


def evaluated(row: Row, name: str) -> Array:
    """One of `EVALUATED` on test [seeds], NaN where it was not measured."""
    return np.array([fmt.number(entry.result("test"), EVALUATED[name][0]) for entry in row.entries])


def section(study: Study) -> Section:
    """The table, a figure, and what generation took; empty for a study of something else."""
    parts: list[Part] = []
    if arms(study):
        parts = [Note(note(study)), table(study), markup.charts(figure(study))]
    return Section("spectrum", "From offline to online", parts)


def note(study: Study) -> str:
    """What the columns are, and what cannot be compared; "" for a study of something else."""
    found = arms(study)
    if not found:
        return ""
    parts = [
        "s: updates between two synchronisations of the sampling policy with the trained one; 1 is online, ∞ (never) "
        "is offline. Entropy (of the distribution drawn from) and length are of each policy's own samples on test.",
        f"{caution(study)}.",
    ]
    if len({entry.reached for arm in found for entry in arm.row.entries}) > 1:
        parts.append("Not all points have made the same number of updates.")
    return " ".join(parts)


def sentence(study: Study) -> str:
    """What every arm reached; "" for a study of something else, or one that has points with an offline stage too."""
    found = arms(study)
    if not found or study.offline:
        return ""
    start, updates = start_of(found), {steps_of(arm.row) for arm in found}
    text = f"On {fmt.count(len(found[0].row.ids))} test problems"
    text += f", from {start.name} ({fmt.percent(start.row.accuracy.mean)} %)" if start else ""
    text += f", after {updates.pop()} updates" if len(updates) == 1 else ""
    reached = [
        f"{arm.name}{' answers' * (i == 0)} {percent_interval(arm.row.accuracy)} %" for i, arm in enumerate(found)
    ]
    return f"{text}: {', '.join(reached)} correctly."


def table(study: Study) -> Text:
    """Title, columns and rows: the policy all start from and every arm; what they reach, how they answer, their cost.

    Columns of which nothing is known are left out, as is the number of seeds where it is the same for all.
    """
    found = arms(study)
    start, offline = start_of(found), offline_of(found)
    lines = [_line(arm, start, offline, _over_start(found)) for arm in (*([start] if start else []), *found)]
    title = "Arms from offline to online; differences in points on test, paired by seed and problem"
    return known(title, lines, hidden=same(lines, "seeds"))


def _over_start(found: Sequence[Arm]) -> str:
    names = {arm.start for arm in found}
    return f"over {names.pop()}" if len(names) == 1 else "over its start"


def _line(arm: Arm, start: Arm | None, offline: Arm | None, over_start: str) -> dict[str, str]:
    row = arm.row
    over = None if offline is None or arm is offline else difference(row, offline.row)
    return {
        **{"arm": arm.name, "s": arm.s, "loss": arm.loss or fmt.UNKNOWN, "seeds": str(len(row.entries))},
        "test % [95 %]": percent_interval(row.accuracy),
        f"over {offline.name if offline else ''}": _gained(row, over),
        over_start: _gained(row, None if arm is start else gain(row)),
        **{name: written(float(np.mean(evaluated(row, name)))) for name, (_, written) in EVALUATED.items()},
        "updates": steps_of(row),
        **costs_of(row),
    }


def _gained(row: Row, found: frontier.Interval | None) -> str:
    """A difference, and of how many seeds it is where that is not all of them."""
    text, seeds = points_interval(found), len(row.entries)
    some = f" ({found.seeds} of {seeds} seeds)" if found is not None and 0 < found.seeds < seeds else ""
    return text + some


def figure(study: Study) -> str:
    """Accuracy of every arm, with its interval."""
    found = arms(study)
    start = start_of(found)
    rows = [(arm.name, arm.row.accuracy) for arm in (*([start] if start else []), *found)]
    bars = [(name, 100 * one.mean, 100 * one.low, 100 * one.high) for name, one in rows]
    return interval_chart("Test accuracy, % (bars: 95 %)", bars)
