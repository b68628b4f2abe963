"""What runs and studies measured, for people: pages, Markdown, CSV, figures, and the table at the
end of a run.

    runs.py ─► frame.py ─► rows.py ─► tables.py, verdict.py, figures.py, samples.py ─► run.py, study.py, comparison.py
    ─► page.py

runs.py         reads a work directory: settings, records, what was logged
frame.py        policies: ancestry, cost, accuracy; one row each     rows.py     several seeds and K; studies
verdict.py      what was found, and the sentence that says it
paired_differences.py   policies beside each other: at equal compute, at equal K, chosen on dev
tables.py       tables of text, and frames as CSV                    format.py   numbers as text
figures.py      figures as SVG and PDF                               markup.py   escaping: model text is hostile
samples.py      completions to look through                          prompts.py  prompts as they were read
result.py       what pipeline.run returns, as a notebook shows it
run.py study.py comparison.py   the three reports                    page.py     one frame: page, Markdown, CSV
templates/ style.css filter.js  the page's markup, its only style sheet and its only script
"""
