"""What a run measured, for people: report.html, report.md and the table at the end of a run.

run.py        reads a work directory, finished or not
format.py     numbers as text
summary.py    the result table, the sentence above it, compute per stage: plain text for terminal, Markdown and HTML
markup.py     escaping (model text is hostile) and the parts of a page
charts.py     SVG charts
results.py    the result section        sections.py   compute, curves, pairs, settings
examples.py   completions side by side
html.py       the page
"""

from g2d_jax.report.html import write_report
from g2d_jax.report.summary import summary_table, write_markdown

__all__ = ["summary_table", "write_markdown", "write_report"]
