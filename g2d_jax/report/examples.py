"""Completions side by side: test problems under every policy, chosen beside rejected, samples logged in training.

Which ones are shown is decided by a rule stated on the page, never by how well they read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from g2d_jax.records import Preference, Prompt, ScoredRollout, Verdict
from g2d_jax.report import format as fmt
from g2d_jax.report import markup, summary
from g2d_jax.report.listing import outcome
from g2d_jax.report.run import Run, Stage

KINDS = {"gained": 3, "lost": 2, "right in both": 1, "wrong in both": 2, "the same in part": 1}
"""Problems by what became of them between the first and the last policy, and how many of each are shown."""
REWARDED = {"higher reward": 3, "lower reward": 2, "the same reward": 1}
"""The same of problems whose rewards are scalar, by their mean reward."""
PAIRS = 4
LOGGED = 4
"""Pairs of a collect stage, and rows of a logged table of samples, that are shown."""

Answers = dict[str, list[ScoredRollout]]
"""Problem id -> a policy's completions in the order of their sample index."""


def examples(run: Run) -> str:
    """All examples there are: of the last evaluation, of every collect stage, of training."""
    evaluated = _evaluated(run.evaluations[-1]) if run.evaluations else ""
    collected = "".join(_pairs(stage) for stage in run.stages if stage.kind == "collect")
    return markup.section("examples", "Examples", evaluated, collected, _logged(run))


def _evaluated(stage: Stage) -> str:
    policies = summary.policies(stage.manifest or {})
    answers = {policy["name"]: _answers(stage.rollouts(policy["name"])) for policy in policies}
    columns = [(summary.policy_name(p), answers[p["name"]]) for p in policies if answers[p["name"]]]
    if not columns:
        return ""
    first, last = columns[0][1], columns[-1][1]
    limits = KINDS | REWARDED
    kinds: dict[str, list[str]] = {kind: [] for kind in limits}
    for problem in sorted(set(first) & set(last)):  # ids are hashes, so this order is as good as random
        if (kind := _kind(first[problem], last[problem])) is not None:
            kinds[kind].append(problem)
    problems = stage.problems()
    shown = [
        _problem(problem, problems.get(problem, {}), kind, columns)
        for kind, ids in kinds.items()
        for problem in ids[: limits[kind]]
    ]
    if not shown:
        return ""
    return f"<h3>Held-out problems</h3>{markup.paragraph(_rule(columns, kinds), 'hint')}{''.join(shown)}"


def _rule(columns: Sequence[tuple[str, Answers]], kinds: Mapping[str, Sequence[str]]) -> str:
    ends, sentences = f"from {columns[0][0]} to {columns[-1][0]}", []
    for measure, names in (("share of right answers", KINDS), ("mean reward", REWARDED)):
        if counts := ", ".join(f"{len(kinds[name]):,} {name}" for name in names if kinds[name]):
            sentences.append(f"By {measure}, {ends}: {counts}.")
    rule = "Shown are the first few of each kind by problem id, which is a hash; of each policy its first sample."
    return " ".join([*sentences, rule])


def _answers(rows: Sequence[ScoredRollout]) -> Answers:
    found: Answers = {}
    for row in sorted(rows, key=lambda row: (row.rollout.visit, row.rollout.sample)):
        found.setdefault(row.rollout.problem_id, []).append(row)
    return found


def _rate(rows: Sequence[ScoredRollout]) -> float:
    """Share of right answers among those that a verdict calls right or wrong, NaN without any."""
    return _mean([row.score.verdict.accuracy for row in rows])


def _reward(rows: Sequence[ScoredRollout]) -> float:
    """Mean of the scalar rewards, NaN without any."""
    scalar = [row.score.reward for row in rows if row.score.verdict is Verdict.SCORED and row.score.reward is not None]
    return _mean(scalar)


def _mean(values: Sequence[float]) -> float:
    """The mean of those that are not NaN, NaN without any."""
    known = [value for value in values if not math.isnan(value)]
    return float(np.mean(known)) if known else math.nan


def _kind(before: Sequence[ScoredRollout], after: Sequence[ScoredRollout]) -> str | None:
    """What became of a problem, None where either policy has no answer with a verdict or a reward."""
    first, last = _rate(before), _rate(after)
    if not math.isnan(first) and not math.isnan(last):
        if first == last:
            return {1.0: "right in both", 0.0: "wrong in both"}.get(last, "the same in part")
        return "gained" if last > first else "lost"
    first, last = _reward(before), _reward(after)
    if math.isnan(first) or math.isnan(last):
        return None
    return "the same reward" if first == last else "higher reward" if last > first else "lower reward"


def _problem(name: str, problem: Mapping[str, Any], kind: str, columns: Sequence[tuple[str, Answers]]) -> str:
    head = f"<h4>{markup.shown(kind)} <code>{markup.shown(name)}</code></h4>"
    prompt = _prompt(problem.get("prompt", ""))
    gold = problem.get("answer")
    answer = f"<p>Reference answer: <code>{markup.shown(str(gold))}</code></p>" if gold is not None else ""
    cells = [_completion(title, answers.get(name, [])) for title, answers in columns]
    return f'<article>{head}{prompt}{answer}<div class="beside">{"".join(cells)}</div></article>'


def _prompt(prompt: Prompt | Sequence[Mapping[str, str]]) -> str:
    text = markup.conversation(prompt)
    return markup.preformatted(text) if text else ""


def _completion(title: str, rows: Sequence[ScoredRollout]) -> str:
    if not rows:
        return f'<div><h5>{markup.shown(title)}</h5><p class="hint">not sampled</p></div>'
    row = rows[0]
    facts = [f"{len(row.rollout.token_ids):,} tokens", *_outcome(rows)]
    facts += ["cut at the limit"] if row.rollout.stop_reason == "length" else []
    line = f"{markup.badge(row.score.verdict)} {markup.shown(', '.join(facts))}"
    return f'<div><h5>{markup.shown(title)}</h5><p class="facts">{line}</p>{markup.preformatted(row.text)}</div>'


def _outcome(rows: Sequence[ScoredRollout]) -> list[str]:
    """How many of a policy's answers are right; of scalar rewards that of the first, and the mean of all."""
    if not any(row.score.verdict is Verdict.SCORED for row in rows):
        return [f"{sum(row.score.verdict is Verdict.CORRECT for row in rows)} of {len(rows)} samples right"]
    known = [f"reward {fmt.value(_reward(rows[:1]))}"] if rows[0].score.verdict is Verdict.SCORED else []
    return [*known, f"mean {outcome(rows)} of {len(rows)} samples"]


def _pairs(stage: Stage) -> str:
    rows = stage.preferences()
    places = sorted({round(i) for i in np.linspace(0, len(rows) - 1, min(PAIRS, len(rows)))})
    if not places:
        return ""
    rule = f"{len(places)} of {len(rows):,} pairs, evenly spaced in the order they were written."
    articles = "".join(_pair(rows[i]) for i in places)
    return f"<h3>Chosen and rejected, {markup.shown(stage.name)}</h3>{markup.paragraph(rule, 'hint')}{articles}"


def sides(row: Preference) -> tuple[tuple[str, str, np.ndarray, float, Verdict], ...]:
    """Chosen and rejected of a pair: name, text, token ids, reward, and the verdict whose colour it has."""
    return (
        ("chosen", row.chosen, row.chosen_ids, row.chosen_reward, Verdict.CORRECT),
        ("rejected", row.rejected, row.rejected_ids, row.rejected_reward, Verdict.INCORRECT),
    )


def _pair(row: Preference) -> str:
    cells = "".join(
        f'<div><h5><span class="badge v-{colour.value}">{name}</span></h5>'
        f'<p class="facts">{len(ids):,} tokens, reward {fmt.value(reward)}</p>{markup.preformatted(text)}</div>'
        for name, text, ids, reward, colour in sides(row)
    )
    head = f"<h4>problem <code>{markup.shown(row.problem_id)}</code></h4>"
    return f'<article>{head}{_prompt(row.prompt)}<div class="beside">{cells}</div></article>'


def _logged(run: Run) -> str:
    """The first and the last table of samples that each stage logged."""
    stages = dict.fromkeys(record["stage"] for record in run.samples)
    parts = []
    for stage in stages:
        records = [record for record in run.samples if record["stage"] == stage and record["rows"]]
        for record in records[:1] + records[1:][-1:]:
            title = f"Logged during {stage}, step {record['step']}"
            parts.append(markup.details(title, _rows(title, record["rows"][:LOGGED])))
    return f"<h3>Samples logged on the way</h3>{''.join(parts)}" if parts else ""


def _rows(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(rows[0])
    cells = [[markup.shorten(str(row.get(name, "")), 600)[0] for name in columns] for row in rows]
    return markup.table(title, columns, cells)
