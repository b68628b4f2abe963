"""Lists of completions to browse: rollouts of evaluations and collections, and pairs, with sorting
and filters.

    Listing ─ Listed (one problem) ─ Cell (one policy's answers) ─ Sample

The script compares attributes with numbers and verdicts; model text is only ever text.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from etils import epath

from g2d_jax.config.policy_name import own_stage
from g2d_jax.records import Prompt, Verdict
from g2d_jax.report import format as fmt
from g2d_jax.report.markup import shorten
from g2d_jax.report.prompts import prompts_of
from g2d_jax.report.rows import Row
from g2d_jax.report.runs import COLLECT, Run, read_parquet
from g2d_jax.session.stage_result import Evaluation

PROBLEMS, CHANGED, SAMPLES = 40, 20, 4
"""The problems of a list, those among them chosen for their change, and the first samples (pairs)
of each problem."""

LENGTH = 1500
"""Characters of a completion that are shown."""

ROLLOUT = (
    *("problem_id", "visit", "sample", "policy", "prompt_ids", "token_ids"),
    *("text", "reward", "verdict", "stop_reason"),
)
PAIR = (
    *("problem_id", "prompt", "chosen", "chosen_ids", "chosen_reward"),
    *("rejected", "rejected_ids", "rejected_reward"),
)


BY_ID = "the first by id (a hash)"
ORDERS = {"": "as listed", "shortest": "shortest answer", "longest": "longest answer"}
"""The script's sort keys -> their names for readers."""

CHANGES = {
    "changed": "most changed",
    "lost": "newly incorrect",
    "gained": "newly correct",
}
"""The same, if changes are known."""


class Sample(NamedTuple):
    """One completion. verdict: a Verdict's value; facts: other measures; text: at most `LENGTH`
    characters; tokens: its length."""

    verdict: str
    facts: str
    text: str
    tokens: int = 0


class Cell(NamedTuple):
    """One policy's answers to a problem. number: the policy's in the list."""

    number: int
    name: str
    samples: Sequence[Sample]


class Listed(NamedTuple):
    """One problem. answer: None if no reference is known. anchor: its id on the page. change: the
    gain of the last policy over the first, NaN if unknown."""

    prompt: str
    facts: str
    answer: str | None
    cells: Sequence[Cell]
    anchor: str = ""
    change: float = math.nan

    @property
    def has_change(self) -> bool:
        """True if its change is known."""
        return not math.isnan(self.change)


class Listing(NamedTuple):
    """A list of problems; false if empty. rule: the selection in words. verdicts: those that occur.
    orders: from `ORDERS`. note: why prompts are missing, "" if none are."""

    title: str
    rule: str
    names: Sequence[str]
    rows: Sequence[Listed]
    verdicts: Sequence[str]
    orders: Mapping[str, str]
    note: str

    def __bool__(self) -> bool:
        """Return whether there is anything to show."""
        return bool(self.rows)


def browser(run: Run) -> list[Listing]:
    """List the completions of each evaluation, those of each collection and its pairs."""
    listings: list[Listing] = []
    for stage, evaluation in run.evaluated():
        listings += _evaluated(run, stage, evaluation)
    for stage in run.folders:
        if run.kind(stage) == COLLECT:
            listings += _collected(run, stage)
    return listings


def conversation(prompt: Prompt | Sequence[Mapping[str, str]]) -> str:
    """Return a prompt, or a completion, as text: chat messages with their roles, except for a
    single user message."""
    if isinstance(prompt, str):
        return prompt
    if [message["role"] for message in prompt] == ["user"]:
        return str(prompt[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def read_samples(
    files: Sequence[epath.Path], columns: Sequence[str], problems: Collection[str]
) -> pd.DataFrame:
    """Read the rows of these problems, ids ascending. Raises ValueError for a damaged file."""
    frames = [read_parquet(file, columns, problems).to_pandas() for file in files]
    rows = pd.concat(frames) if frames else pd.DataFrame(columns=list(columns))
    order = [name for name in ("problem_id", "visit", "sample") if name in columns]
    return rows.sort_values(order, kind="stable")


Rows = list[Mapping[Any, Any]]


def _sample(row: Mapping[Any, Any]) -> Sample:
    length = len(row["token_ids"])
    facts = [f"{length:,} tokens"]
    is_scored = row["verdict"] == Verdict.SCORED.value
    if pd.notna(row["reward"]) and (is_scored or row["reward"] not in (0, 1)):
        facts.append(f"reward {fmt.value(row['reward'])}")
    if row.get("stop_reason") == "length":
        facts.append("truncated")
    return Sample(
        row["verdict"], ", ".join(facts), shorten(conversation(row["text"]), LENGTH), length
    )


def _outcome(rows: Rows) -> str:
    """Summarise a policy's answers to one problem: "3/4" correct ones, or "reward 1.25", a mean."""
    verdicts = [row["verdict"] for row in rows]
    if Verdict.SCORED.value in verdicts:
        return f"reward {fmt.value(float(np.nanmean([row['reward'] for row in rows])))}"
    return f"{verdicts.count(Verdict.CORRECT.value)}/{len(rows)}"


def _listing(
    title: str,
    ids: Sequence[str],
    total: int,
    columns: Mapping[str, pd.DataFrame],
    entries: Mapping[str, Mapping[str, Any]],
    *,
    which: str = BY_ID,
    changes: Mapping[str, float] = {},
    outcome: Callable[[Rows], object] = _outcome,
    note: str = "",
) -> Listing:
    """Put answers to each problem next to each other, in the order of ids.

    total: the number of problems; which: the choice in words. columns: name of each -> its answers.
    entries: prompts and reference answers, of problems.json. changes: for `Listed`. outcome:
    summarises the answers to a problem.
    """
    groups: dict[str, dict[str, Rows]] = {name: {} for name in columns}
    for name, rows in columns.items():
        for row in rows.to_dict("records"):
            groups[name].setdefault(row["problem_id"], []).append(row)
    listed = []
    there: set[str] = set()
    for problem in ids:
        entry = entries.get(problem, {})
        cells, facts = [], []
        for number, (name, answers) in enumerate(groups.items()):
            if problem in answers:
                first = list(map(_sample, answers[problem][:SAMPLES]))
                there.update(sample.verdict for sample in first)
                cells.append(Cell(number, name, first))
                facts.append(f"{name} {outcome(answers[problem])}")
        reference = None if entry.get("answer") is None else str(entry["answer"])
        prompt = conversation(entry.get("prompt", "")) or f"problem {problem}"
        # a hash, so that the anchor contains no name
        digest = hashlib.sha256(json.dumps([title, problem]).encode()).hexdigest()
        change = changes.get(problem, math.nan)
        anchor = f"p-{digest[:12]}"
        listed.append(Listed(prompt, " · ".join(facts), reference, cells, anchor, change))
    rule = f"{len(ids):,} of {total:,} problems"
    if len(ids) < total:
        rule += f": {which}"
    rule += f". Each column shows at most {SAMPLES} answers."
    verdicts = [verdict.value for verdict in Verdict if verdict.value in there]
    orders = ORDERS | CHANGES if len(changes) else ORDERS
    return Listing(title, rule, list(columns), listed, verdicts, orders, note)


def _scores(file: epath.Path) -> pd.Series[float]:
    """Return a policy's mean accuracy over all samples of each problem, ids ascending, or its mean
    reward if only that is scored; NaN without either."""
    rows = read_parquet(file, ["problem_id", "verdict", "reward"]).to_pandas()
    known = rows["verdict"].map({verdict.value: verdict.accuracy for verdict in Verdict})
    scores = known.where(rows["verdict"] != Verdict.SCORED.value, rows["reward"])
    return scores.groupby(rows["problem_id"]).mean()


def _evaluated(run: Run, stage: str, evaluation: Evaluation) -> Iterator[Listing]:
    """List every policy's answers to the same problems: half of them for their change."""
    files: dict[str, epath.Path] = {}
    scores: list[pd.Series[float]] = []
    for policy in evaluation.policies:
        file = run.rollouts_file(stage, policy)
        if file.exists():
            files[fmt.policy_name(policy.name, policy.label)] = file
            scores.append(_scores(file))
    if not files:
        return
    # Round, so that equal changes such as 2/3 - 1/3 and 1 - 2/3 stay equal.
    changes = (scores[-1] - scores[0]).round(9)
    sizes = changes.abs().sort_values(ascending=False, kind="stable")
    most = list(sizes.index[sizes > 0])[:CHANGED]
    # A dict keeps the order: the largest changes, then the first of the others by id.
    ids = list(dict.fromkeys([*most, *changes.index]))[:PROBLEMS]
    before, *_, after = [*files, *files]
    which = f"first the largest changes from {before} to {after}, then by id"
    yield _listing(
        f"Held-out problems, {stage}",
        ids,
        len(changes),
        {name: read_samples([file], ROLLOUT, ids) for name, file in files.items()},
        run.problems(stage),
        which=which if most else BY_ID,
        changes=changes.dropna() if before != after else {},
    )


def _collected(run: Run, stage: str) -> Iterator[Listing]:
    """List the rollouts of a collect stage, and its pairs: chosen next to rejected."""
    rollouts, total = _first(_rollouts(run, stage), ROLLOUT)
    pairs, paired = _first(run.parts(stage, "preferences"), PAIR)
    decoded = prompts_of(run.config)
    note = decoded.fault and f"Problems without a pair are shown by id: {decoded.fault}"
    entries = {}
    for problem, rows in rollouts.groupby("problem_id"):
        entries[problem] = {"prompt": decoded(rows["prompt_ids"].iloc[0])}
    for problem, prompt in zip(pairs["problem_id"], pairs["prompt"], strict=True):
        entries[problem] = {"prompt": prompt}
    columns = {fmt.policy_name(name): rows for name, rows in rollouts.groupby("policy")}
    ids = list(rollouts["problem_id"].unique())
    yield _listing(f"Rollouts, {stage}", ids, total, columns, entries, note=note)
    sides = {}
    for side, verdict in (("chosen", Verdict.CORRECT), ("rejected", Verdict.INCORRECT)):
        heads = {side: "text", f"{side}_ids": "token_ids", f"{side}_reward": "reward"}
        sides[side] = pairs.rename(columns=heads).assign(verdict=verdict.value)
    ids = list(pairs["problem_id"].unique())
    yield _listing(f"Chosen and rejected, {stage}", ids, paired, sides, entries, outcome=len)


def _first(files: Sequence[epath.Path], columns: Sequence[str]) -> tuple[pd.DataFrame, int]:
    """Read the rows of the first `PROBLEMS` problems, ids ascending, and count all problems."""
    ids: set[str] = set()
    for file in files:
        ids.update(read_parquet(file, ["problem_id"])["problem_id"].to_pylist())
    return read_samples(files, columns, sorted(ids)[:PROBLEMS]), len(ids)


def _rollouts(run: Run, stage: str) -> list[epath.Path]:
    """Return the stage's own rollouts, or those of the stage whose archive it reads."""
    section = run.sections.get(stage, {})
    source = own_stage(str(section.get("policy", "")))
    is_archive = section.get("rollouts") == "archive" and source in run.folders
    return run.parts(source if is_archive else stage)


def most_different(
    last: Sequence[Row], files: Mapping[str, epath.Path], problems: Mapping[str, Mapping[str, Any]]
) -> list[Listing]:
    """Show the problems where the runs' last policies differ, most first, with every policy's
    answers. files: name of a policy -> its completions. problems: id -> row of problems.json."""
    means = pd.DataFrame([row.accuracies[0] for row in last], columns=last[0].ids)
    sizes = means.max(skipna=False) - means.min(skipna=False)
    furthest = sizes[sizes > 0].sort_values(ascending=False, kind="stable")
    ids = list(furthest.index[:PROBLEMS])
    columns = {}
    for name, file in files.items():
        columns[name] = read_samples([file] if file.exists() else [], ROLLOUT, ids)
    changes = means.iloc[-1] - means.iloc[0]
    title = "Problems on which the last policies differ most"
    which = f"those with the largest differences between {last[0].name} and {last[-1].name}"
    return [_listing(title, ids, len(last[0].ids), columns, problems, which=which, changes=changes)]
