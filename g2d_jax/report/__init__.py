"""What a run measured, for people: report.html, report.md, report.csv and the table at the end of a run.

run.py        reads a work directory, finished or not
format.py     numbers as text
summary.py    the result table, the sentence above it, compute per stage: plain text for terminal, Markdown and HTML
markup.py     escaping (model text is hostile) and the parts of a page
charts.py     lines over steps, as SVG          scatter.py   points, intervals, as SVG
table.py      tables of text and of Markdown
results.py    the result section        sections.py   compute, training, pairs, settings
informativeness.py   measures of rollouts by policy, of pairs before and after an offline stage
browser.py    rollouts and pairs to look through    listing.py   a list with filters    tokens.py   coloured tokens
style.css     the page's style sheet               filter.js    its only script
page.py       a page and Markdown of sections      spreadsheet.py   report.csv
run_page.py   the sections of a run
study.py      a study read from its directory: study_entry.py (a point), study_compare.py (points beside each other),
              study_page.py (the page and Markdown: study_tables.py, study_frontier.py, study_cause.py,
              study_ablations.py, study_stopping.py), study_csv.py
compare.py    runs beside each other: compare_read.py, compare_text.py, compare_page.py (page, Markdown and CSV)
"""

from g2d_jax.report.page import write
from g2d_jax.report.run import read_run
from g2d_jax.report.run_page import report
from g2d_jax.report.spreadsheet import document
from g2d_jax.report.study_page import write_study
from g2d_jax.report.summary import summary_table
from g2d_jax.storage import PathLike


def write_all(workdir: PathLike) -> list[str]:
    """Write report.html, report.md and report.csv from what a work directory holds, finished or not.

    Returns their paths in this order. The same work directory gives the same bytes. Raises ValueError as `read_run`
    does, and if completions or pairs are damaged; OSError.
    """
    run = read_run(workdir)
    return write(report(run), document(run), run.workdir, "report")
