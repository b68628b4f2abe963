"""compare.html, compare.md and compare.csv: runs side by side, in a folder of their own."""

from __future__ import annotations

from etils import epath

from g2d_jax.records import Verdict
from g2d_jax.report import compare_text as text
from g2d_jax.report import markup
from g2d_jax.report.browser import SAMPLES, beside, painter
from g2d_jax.report.compare import Comparison
from g2d_jax.report.compare_read import completions
from g2d_jax.report.html import document
from g2d_jax.report.listing import listing
from g2d_jax.report.markup import shown
from g2d_jax.report.scatter import accuracy_chart, interval_chart
from g2d_jax.report.table import markdown_table, one_line
from g2d_jax.storage import PathLike, write_bytes
from g2d_jax.workdir import absolute

FILES = ("compare.html", "compare.md", "compare.csv")
PROBLEMS = 40
"""At most so many problems are shown with their completions."""

LINKS = {
    "results": "Result",
    "differences": "Differences",
    "elo": "Elo",
    "problems": "Problems",
    "settings": "Settings",
}


def check_output(output: PathLike) -> epath.Path:
    """The folder a comparison may be written to. Raises ValueError if it holds anything else than a comparison."""
    folder = absolute(output)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: give --output a folder")
    others = sorted(child.name for child in folder.iterdir() if child.name not in FILES) if folder.exists() else []
    if others:
        raise ValueError(f"{folder} holds other things than a comparison ({others[0]}): choose another --output")
    return folder


def write_comparison(comparison: Comparison, output: PathLike) -> list[str]:
    """Write `FILES` into a folder, which is made if it is not there; returns their paths.

    The same comparison gives the same bytes. Raises ValueError as `check_output`, and for damaged completions; OSError.
    """
    folder = check_output(output)
    contents = (page(comparison), markdown(comparison), text.spreadsheet(comparison))
    for name, content in zip(FILES, contents, strict=True):
        write_bytes(folder / name, content.encode())
    return [str(folder / name) for name in FILES]


def markdown(comparison: Comparison) -> str:
    """The text of compare.md."""
    said = [text.verdict(comparison), text.shared(comparison), *comparison.warnings]
    after = [*text.notes(comparison), text.differences_note(comparison), text.ELO, text.same_settings(comparison)]
    tables = [markdown_table(*table) for table in text.tables(comparison)]
    parts = [f"# {one_line(text.title(comparison))}", *map(one_line, said), *tables, *map(one_line, after)]
    return "\n\n".join(filter(None, parts)) + "\n"


def page(comparison: Comparison) -> str:
    """The text of compare.html."""
    body = "".join(part(comparison) for part in (_results, _differences, _elo, _problems, _settings))
    return document(f"{text.title(comparison)}: G2D comparison", _header(comparison), body, LINKS)


def _header(comparison: Comparison) -> str:
    sentence = text.verdict(comparison).replace(" ± ", "\u00a0±\u00a0").replace(" %", "\u00a0%")  # kept together
    parts = [
        markup.paragraph(f"G2D comparison · {len(comparison.sides)} runs", "eyebrow"),
        f"<h1>{shown(text.title(comparison))}</h1>",
        markup.paragraph(sentence, "verdict"),
        *(markup.paragraph(warning, "warning") for warning in comparison.warnings),
    ]
    return f"<header>{''.join(parts)}</header>"


def _results(comparison: Comparison) -> str:
    intervals = [(p.name, p.accuracy.mean, p.accuracy.sem_clustered) for p in comparison.players]
    ratings = [(one.name, one.rating, one.low, one.high) for one in comparison.ratings]
    over = "Bars: intervals of 95 % over another draw of problems."
    return markup.section(
        "results",
        "Result",
        markup.paragraph(text.shared(comparison), "hint"),
        markup.table(*text.players_table(comparison)),
        *(markup.paragraph(note, "hint") for note in text.notes(comparison)),
        markup.table(*text.runs_table(comparison)),
        markup.charts(
            accuracy_chart("Accuracy (pass@1) on the common problems, %", intervals),
            interval_chart("Elo over the common problems", ratings, note=over),
        ),
    )


def _differences(comparison: Comparison) -> str:
    title, columns, rows = text.pairs_table(comparison)
    kept = [[pair.replace(" ", "\u00a0").replace("→\u00a0", "→ "), *rest] for pair, *rest in rows]  # two lines at most
    table = markup.table(title, columns, kept)
    return markup.section(
        "differences", "Differences", table, markup.paragraph(text.differences_note(comparison), "hint")
    )


def _elo(comparison: Comparison) -> str:
    table = markup.table(*text.ratings_table(comparison))
    return markup.section("elo", "Elo", table, markup.paragraph(text.ELO, "hint"))


def _problems(comparison: Comparison) -> str:
    """Completions beside each other, of the problems on which the runs' last policies differ most."""
    wanted = comparison.most_different(PROBLEMS)
    if not wanted:
        return ""
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
    return markup.section("problems", "Problems", *remarks, listed)


def _settings(comparison: Comparison) -> str:
    tables = [markup.table(*table) for table in text.settings_tables(comparison)]
    return markup.section("settings", "Settings", markup.paragraph(text.same_settings(comparison)), *tables)
