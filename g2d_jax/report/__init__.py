"""Results of runs and studies for readers: pages, Markdown, CSV, figures, and the table at the end
of a run.

    runs.py ─► frame.py ─► rows.py ─► tables.py, verdict.py, figures.py, samples.py ─► run.py, study.py, comparison.py
            ─► page.py

    runs.py      reads a work directory: settings, records, logs
    frame.py     policies, a row each: ancestry, cost, accuracy       rows.py  seeds and K; studies
    verdict.py   the findings as sentences
    paired_differences.py   compares policies: at equal compute, at equal K, chosen on dev
    tables.py    tables of text, and frames as CSV          format.py   numbers as text
    figures.py   figures as SVG and PDF                     markup.py   escapes untrusted model text
    samples.py   completions to browse                      prompts.py  prompts decoded from tokens
    result.py    the return value of pipeline.run, and its display in a notebook
    run.py study.py comparison.py   the three reports       page.py  their form: page, Markdown, CSV
    templates/ style.css filter.js  the page's markup, its one style sheet and its one script
"""
