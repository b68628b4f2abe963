"""compare.html, compare.md and compare.csv: runs side by side, in a folder of their own."""

from __future__ import annotations

from etils import epath

from g2d_jax.records import Verdict
from g2d_jax.report import compare_text as text
from g2d_jax.report.browser import SAMPLES, beside, painter
from g2d_jax.report.compare import Comparison
from g2d_jax.report.compare_read import completions
from g2d_jax.report.listing import listing
from g2d_jax.report.page import Note, Part, Report, Section, write
from g2d_jax.storage import PathLike
from g2d_jax.workdir import absolute

FILES = ("compare.html", "compare.md", "compare.csv")
PROBLEMS = 40
"""At most so many problems are shown with their completions."""


def check_output(output: PathLike) -> epath.Path:
    """The folder a comparison may be written to. Raises ValueError if it holds anything else than a comparison."""
    folder = absolute(output)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: give --output a folder")
    others = sorted(child.name for child in folder.iterdir() if child.name not in FILES) if folder.exists() else []
    if others:
        raise ValueError(f"{folder} holds other things than a comparison ({others[0]}): choose another --output")
    return folder


def write_comparison(comparison: Comparison, made: Report, output: PathLike) -> list[str]:
    """Write `FILES` into a folder, which is made if it is not there; returns their paths. made: its `report`.

    The same comparison gives the same bytes. Raises ValueError as `check_output`; OSError.
    """
    return write(made, text.spreadsheet(comparison), check_output(output), "compare")


def report(comparison: Comparison) -> Report:
    """Put together all that a comparison shows. Raises ValueError for damaged completions."""
    found: list[Part] = [
        text.runs_table(comparison),
        text.players_table(comparison),
        *map(Note, text.notes(comparison)),
    ]
    settings = [Note(same)] if (same := text.same_settings(comparison)) else []
    return Report(
        kind="comparison",
        name=text.title(comparison),
        eyebrow=f"G2D comparison · {len(comparison.sides)} runs",
        verdict=text.verdict(comparison),
        warnings=comparison.warnings,
        sections=[
            Section("results", "Result", [Note(text.shared(comparison)), *found]),
            Section(
                "differences",
                "Differences",
                [text.pairs_table(comparison), Note(text.differences_note(comparison))],
            ),
            Section("elo", "Elo", [text.ratings_table(comparison), Note(text.ELO)]),
            _problems(comparison),
            Section("settings", "Settings", [*settings, *text.settings_tables(comparison)]),
        ],
    )


def _problems(comparison: Comparison) -> Section:
    """Completions beside each other, of the problems on which the runs' last policies differ most."""
    wanted = comparison.most_different(PROBLEMS)
    shown = {side.mark: painter(side.run) for side in comparison.sides}  # how each run's completions are shown
    remarks = list(dict.fromkeys(note for _, note in shown.values()))
    columns = [(p.name, completions(p, set(wanted)), shown[p.side.mark][0]) for p in comparison.players]
    known = {problem: one for side in comparison.sides[::-1] for problem, one in side.problems.items() if one}
    rows = [beside(problem, known.get(problem, {}), columns) for problem in wanted]
    there = {row.score.verdict for _, some, _ in columns for rows in some.values() for row in rows[:SAMPLES]}
    rule = (
        f"{len(rows):,} of {len(comparison.problems):,} common problems: those on which the accuracies of the runs' "
        "last policies are furthest apart, equal ones by problem id, which is a hash. Of each policy the first "
        f"{SAMPLES} samples; beside the prompt, right answers among all samples."
    )
    listed = listing(
        "Where the runs differ most",
        rule,
        rows,
        policies=[player.name for player in comparison.players],
        verdicts=[verdict for verdict in Verdict if verdict in there],
    )
    return Section("problems", "Problems", [*remarks, listed] if wanted else [])
