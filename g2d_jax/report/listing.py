"""A list of problems that unfold into completions, with filters by verdict, policy and prompt: markup for filter.js.

    listing ─ row (one problem: data-row, its prompt data-prompt)
                └ cell (one policy: data-policy, a number) ─ sample (data-verdict)

What is compared by the script stands in attributes as numbers and verdicts; model text is only ever text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from g2d_jax.records import ScoredRollout, Verdict
from g2d_jax.report import format as fmt
from g2d_jax.report import markup
from g2d_jax.report.markup import shown

BUDGET = 3_000_000
"""Characters of markup that one list may have: rows that do not fit are left out and counted."""

LINE = 120
"""Characters of a prompt in the line of a folded problem; a longer prompt is there in full below."""


@dataclass(frozen=True)
class Row:
    """One problem. prompt, facts, answer (None: no reference known): text. cells: markup of `cell`."""

    prompt: str
    facts: str
    answer: str | None
    cells: Sequence[str]


def listing(
    title: str,
    rule: str,
    rows: Iterable[Row],
    *,
    policies: Sequence[str] = (),
    verdicts: Sequence[Verdict] = (),
    what: str = "completions",
) -> str:
    """A list with its filters; "" without rows. rule: which problems these are. what: what the samples are.

    policies: names by number, to choose from if several. verdicts: those that occur. Rows are shown in their order as
    long as they fit the page.
    """
    drawn = [_row(row) for row in rows]
    kept, size = [], 0
    for one in drawn:
        if size + len(one) <= BUDGET:
            kept.append(one)
            size += len(one)
    if not drawn:
        return ""
    if left_out := len(drawn) - len(kept):
        rule += f" {left_out:,} of them would make this page too large and are left out."
    choices = [_choice("policy", "Policy", [(str(i), name) for i, name in enumerate(policies)])]
    choices += [_choice("verdict", "Verdict", [(v.value, v.value.replace("_", " ")) for v in verdicts])]
    label = shown(f"Problems: {title}", plain=True)
    body = f'<div class="rows" role="region" tabindex="0" aria-label="{label}">{"".join(kept)}</div>'
    return (
        f'<div data-listing="{shown(what, plain=True)}"><h3>{shown(title)}</h3>{markup.paragraph(rule, "hint")}'
        f"{_bar(choices, label)}{body}</div>"
    )


def _bar(choices: Sequence[str], label: str) -> str:
    """The filters, hidden until the script makes them work."""
    return (
        f'<div class="filters" data-control="bar" role="search" aria-label="{label}" hidden>'
        '<label>Prompt <input type="search" data-control="words" autocomplete="off"></label>'
        f'{"".join(choices)}<button type="button" data-control="open">Unfold all</button>'
        '<button type="button" data-control="close">Fold all</button><output data-control="count"></output></div>'
    )


def _choice(name: str, title: str, options: Sequence[tuple[str, str]]) -> str:
    if len(options) < 2:
        return ""
    listed = "".join(f'<option value="{value}">{shown(text, plain=True)}</option>' for value, text in options)
    return f'<label>{title} <select data-control="{name}"><option value="">any</option>{listed}</select></label>'


def _row(row: Row) -> str:
    line, cut = row.prompt.strip(), ""
    if len(line) > LINE or "\n" in line:
        cut = markup.preformatted(line).replace("<pre ", "<pre data-prompt ", 1)
        line = " ".join(line[: 4 * LINE].split())
        line = line if len(line) <= LINE else line[:LINE] + " …"
    answer = "" if row.answer is None else f"<p>Reference answer: <code>{shown(short(row.answer))}</code></p>"
    return (
        f"<details data-row><summary><code data-prompt>{shown(line) or '(empty)'}</code> "
        f'<span class="facts">{shown(row.facts)}</span></summary>{cut}{answer}'
        f'<div class="beside">{"".join(row.cells)}</div></details>'
    )


def cell(policy: int, title: str, samples: Sequence[str]) -> str:
    """What one policy answered: its number and name, and markup of `sample`."""
    return f'<div data-policy="{policy}"><h5>{shown(title)}</h5>{"".join(samples)}</div>'


def sample(verdict: str, head: str, body: str) -> str:
    """One completion. verdict: a Verdict's value, or "". head, body: markup."""
    return f'<div data-verdict="{verdict}"><p class="facts">{head}</p>{body}</div>'


def rollout(row: ScoredRollout, body: str) -> str:
    """A sampled completion with its verdict, length, confidence and answer; body: markup of its text."""
    facts = [f"{len(row.rollout.token_ids):,} tokens"]
    if row.score.verdict is Verdict.SCORED and row.score.reward is not None:
        facts.append(f"reward {fmt.value(row.score.reward)}")
    if not math.isnan(sure := confidence(row.rollout.logprobs)):
        facts.append(f"confidence {sure:.2f}")
    if row.score.answer is not None:
        facts.append(f"answer {short(row.score.answer)}")
    facts += ["cut at the limit"] if row.rollout.stop_reason == "length" else []
    return sample(row.score.verdict.value, f"{markup.badge(row.score.verdict)} {shown(', '.join(facts))}", body)


def outcome(rows: Sequence[ScoredRollout]) -> str:
    """What a policy's answers to one problem came to: "3/4" right ones, or "reward 1.25", the mean of scalar ones."""
    if any(row.score.verdict is Verdict.SCORED for row in rows):
        return f"reward {fmt.value(float(np.mean([r.score.reward for r in rows if r.score.reward is not None])))}"
    return f"{sum(row.score.verdict is Verdict.CORRECT for row in rows)}/{len(rows)}"


def confidence(logprobs: np.ndarray) -> float:
    """Geometric mean of the tokens' probabilities [T], NaN for none."""
    return math.exp(min(float(logprobs.mean(dtype=np.float64)), 0.0)) if len(logprobs) else math.nan


def short(text: str) -> str:
    """Text on one line, cut at 60 characters."""
    limit = 60
    line = " ".join(text[: 4 * limit].split())
    return line if len(line) <= limit else line[:limit] + " …"
