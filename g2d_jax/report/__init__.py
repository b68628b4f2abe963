"""What runs and studies measured, for people: pages, Markdown, CSV, figures, and the table at the
end of a run.

    read.py ─► runs.py, policies.py, rows.py ─► tables.py, figures.py, samples.py ─► run.py, study.py, comparison.py
    ─► page.py

read.py         the one reader: a run, a study, runs side by side
runs.py policies.py rows.py     what it gives: runs and stages; policies; seeds, K and studies
headlines.py    what each report says in a sentence, below its name
paired_differences.py   policies beside each other: at equal compute, at equal K, chosen on dev
tables.py       tables of text, those of a run's manifests, CSV      format.py   numbers as text
figures.py      figures as SVG and PDF                               markup.py   escaping: model text is hostile
samples.py      completions to look through                          prompts.py  prompts as they were read
result.py       what pipeline.run returns, as a notebook shows it
run.py study.py comparison.py   the three reports                    page.py     one frame: page, Markdown, CSV
templates/ style.css filter.js  the page's markup, its only style sheet and its only script
"""
