"""List completions to look through: rollouts of evaluations and collections, and pairs, to be
sorted, filtered and read.

    Listing ─ Listed (one problem) ─ Cell (what one policy answered) ─ Sample

What the script compares stands in attributes as numbers and verdicts; model text is only ever text.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from etils import epath

from g2d_jax.config.policy_name import own_stage
from g2d_jax.records import Prompt, Verdict, pick
from g2d_jax.report import format as fmt
from g2d_jax.report.markup import on_one_line, shorten
from g2d_jax.report.prompts import Prompts, run_tokenizer
from g2d_jax.report.rows import Row
from g2d_jax.report.runs import COLLECT, Run, read_parquet
from g2d_jax.runtime.terminal import counted
from g2d_jax.stage_result import Evaluated, Evaluation
from g2d_jax.study import stats

PROBLEMS, CHANGED, SAMPLES, MOST_DIFFERENT = 60, 30, 4, 40
"""The problems of a list, those among them that are there for their change, the first samples of
each policy (pairs of each problem), the problems of a comparison."""

LENGTH = 4000
"""Characters of a completion that are shown."""

_ROLLOUT = (
    "problem_id",
    "visit",
    "sample",
    "policy",
    "prompt_ids",
    "token_ids",
    "text",
    "logprobs",
    "reward",
    "verdict",
    "answer",
    "stop_reason",
)
_PAIRS = (
    "problem_id",
    "prompt",
    "chosen",
    "chosen_ids",
    "chosen_reward",
    "rejected",
    "rejected_ids",
    "rejected_reward",
)

Answer = Mapping[str, Any]
"""A row of rollouts, columns `_ROLLOUT`."""


class Sample(NamedTuple):
    """One completion. verdict: a Verdict's value; facts: what else is known of it; text: at most
    `LENGTH` characters of it; tokens: its length."""

    verdict: str
    facts: str
    text: str
    tokens: int = 0


class Cell(NamedTuple):
    """What one policy answered to a problem. number: the policy's in the list."""

    number: int
    name: str
    samples: Sequence[Sample]


class Listed(NamedTuple):
    """One problem. answer: None if no reference is known.

    anchor: its id on the page, "" for none. change: by how much it is answered better by the last
    policy than by the first, NaN if that is not known. rank: its place where not all rows fit.
    """

    prompt: str
    facts: str
    answer: str | None
    cells: Sequence[Cell]
    anchor: str = ""
    change: float = math.nan
    rank: int = 0

    @property
    def has_change(self) -> bool:
        """Whether its change is known."""
        return not math.isnan(self.change)


class Listing(NamedTuple):
    """A list of problems. rule: which these are. note: why prompts are missing, "" if none are.

    order: what its rows are sorted by.
    """

    title: str
    rule: str
    names: Sequence[str]
    rows: Sequence[Listed]
    note: str = ""
    order: str = "problem id"

    def __bool__(self) -> bool:
        """Whether there is anything to show."""
        return bool(self.rows)

    @property
    def verdicts(self) -> list[str]:
        """The verdicts that occur."""
        there: set[str] = set()
        for row in self.rows:
            for cell in row.cells:
                there.update(map(attrgetter("verdict"), cell.samples))
        return [verdict.value for verdict in Verdict if verdict.value in there]

    @property
    def orders(self) -> dict[str, str]:
        """How the script can sort it, "" for the order it has -> how readers know that."""
        orders = {"": self.order}
        if any(map(attrgetter("has_change"), self.rows)):
            orders["changed"] = "most changed"
            orders["lost"] = "right before, wrong after"
            orders["gained"] = "wrong before, right after"
        orders["shortest"] = "shortest answer"
        orders["longest"] = "longest answer"
        return orders


def browser(run: Run) -> list[Listing]:
    """List the completions of each evaluation, those of each collection and its pairs."""
    listings = [_evaluated(run, stage, evaluation) for stage, evaluation in run.evaluated()]
    for stage in run.folders:
        if run.kind(stage) == COLLECT:
            listings += _collected(run, stage)
    return listings


def anchor(*names: str) -> str:
    """Return the id on a page of a problem that these names tell from all others: a hash, which has
    nothing of them."""
    return f"p-{hashlib.sha256(json.dumps(names).encode()).hexdigest()[:12]}"


def conversation(prompt: Prompt | Sequence[Mapping[str, str]]) -> str:
    """Return a prompt, or a completion, as text: chat messages below each other with their roles,
    but for what a user alone says."""
    if isinstance(prompt, str):
        return prompt
    if [message["role"] for message in prompt] == ["user"]:
        return str(prompt[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def read_samples(
    files: Sequence[epath.Path],
    columns: Sequence[str],
    also: Iterable[str] = (),
    first: int = PROBLEMS,
) -> tuple[dict[str, list[Answer]], int]:
    """Read the rows of the `first` problems, ids ascending, and of those wanted `also`; count all
    problems.

    Only of these are texts and arrays read. Raises ValueError for a damaged file.
    """
    there: set[str] = set()
    for file in files:
        there.update(map(str, read_parquet(file, ["problem_id"])["problem_id"].to_pylist()))
    return _rows({*sorted(there)[:first], *also}, files, columns), len(there)


def _rows(
    wanted: Collection[str], files: Sequence[epath.Path], columns: Sequence[str]
) -> dict[str, list[Answer]]:
    """Read the rows of these problems, by problem, ids ascending."""
    rows: list[Answer] = []
    for file in files:
        rows += read_parquet(file, columns, wanted).to_pylist()
    by_problem: dict[str, list[Answer]] = {}
    for row in sorted(
        rows, key=lambda row: (row["problem_id"], row.get("visit", 0), row.get("sample", 0))
    ):
        by_problem.setdefault(row["problem_id"], []).append(row)
    return by_problem


def _scores(evaluation: Evaluation, policy: Evaluated, file: epath.Path) -> pd.Series[float]:
    """Return a policy's mean accuracy over all samples of each problem, or its mean reward where
    that alone is scored; NaN without either."""
    scores = pd.Series(stats.row_means(policy.correct), index=list(evaluation.ids))
    if scores.isna().any():
        rows = read_parquet(file, ["problem_id", "verdict", "reward"]).to_pandas()
        ranked = rows[rows["verdict"] == Verdict.SCORED.value]
        scores = scores.fillna(ranked.groupby("problem_id")["reward"].mean())
    return scores.sort_index()


class Column(NamedTuple):
    """What stands in one column of a list: a policy's name, and its answers by problem."""

    name: str
    answers: Mapping[str, Sequence[Answer]]


def _row(
    problem: str,
    entry: Mapping[str, Any],
    columns: Sequence[Column],
    place: str,
    change: float = math.nan,
) -> Listed:
    """Put policies' answers to a problem beside each other. entry: of problems.json, or {}; place:
    of the list."""
    cells = []
    facts = []
    prompt = conversation(entry.get("prompt", ""))
    for i, column in enumerate(columns):
        answers = column.answers.get(problem, ())
        if answers:
            samples = list(map(_sample, answers[:SAMPLES]))
            cells.append(Cell(i, column.name, samples))
            facts.append(f"{column.name} {_outcome(answers)}")
    reference = None if entry.get("answer") is None else str(entry["answer"])
    return Listed(
        prompt or f"problem {problem}",
        " · ".join(facts),
        reference,
        cells,
        anchor(place, problem),
        change,
    )


def _sample(row: Answer) -> Sample:
    length = len(row["token_ids"])
    nats = np.asarray(row["logprobs"], np.float32)
    facts = [f"{length:,} tokens"]
    if row["verdict"] == "scored" and row["reward"] is not None:
        facts.append(f"reward {fmt.value(row['reward'])}")
    mean = float(nats.mean(dtype=np.float64)) if len(nats) else math.nan
    if not math.isnan(mean):
        facts.append(f"confidence {math.exp(min(mean, 0.0)):.2f}")
    if row["answer"] is not None:
        facts.append(f"answer {on_one_line(row['answer'], 60)}")
    if row["stop_reason"] == "length":
        facts.append("cut at the limit")
    return Sample(row["verdict"], ", ".join(facts), shorten(row["text"], LENGTH), length)


def _outcome(rows: Sequence[Answer]) -> str:
    """Sum up a policy's answers to one problem: "3/4" right ones, or "reward 1.25", the mean of
    other rewards."""
    verdicts = list(map(itemgetter("verdict"), rows))
    if "scored" in verdicts:
        mean = np.mean([row["reward"] for row in rows if row["reward"] is not None])
        return f"reward {fmt.value(float(mean))}"
    return f"{verdicts.count('correct')}/{len(rows)}"


def _evaluated(run: Run, stage: str, evaluation: Evaluation) -> Listing:
    """List every policy's answers to the same problems: half of them for their change."""
    files: dict[str, epath.Path] = {}
    scores: list[pd.Series[float]] = []
    for policy in evaluation.policies:
        file = run.rollouts_file(stage, policy)
        if file.exists():
            files[fmt.policy_name(policy.name, policy.label)] = file
            scores.append(_scores(evaluation, policy, file))
    names = list(files)
    # Equal scores are equal also where rounding tells 2/3 - 1/3 from 1 - 2/3.
    changes = pd.Series(dtype=float) if len(names) < 2 else (scores[-1] - scores[0]).round(9)
    most = (
        changes[changes.notna() & (changes != 0)].abs().sort_values(ascending=False, kind="stable")
    )
    first = list(most.index[:CHANGED])
    there = sorted(evaluation.ids) if files else []
    # A dict keeps the order: those that changed most, then the first of the others by id.
    ranked = list(dict.fromkeys([*first, *there]))[:PROBLEMS]
    ranks = {problem: rank for rank, problem in enumerate(ranked)}
    columns = [Column(name, _rows(ranked, [file], _ROLLOUT)) for name, file in files.items()]
    rows = []
    problems = run.problems(stage)
    for problem in sorted(ranked):
        change = float(changes.get(problem, math.nan))
        row = _row(problem, problems.get(problem, {}), columns, stage, change)
        rows.append(row._replace(rank=ranks[problem]))
    chosen = ""
    if first:
        chosen = (
            f"the {len(first):,} whose mean over all samples changed most from {names[0]} to "
            f"{names[-1]}, either way, and "
        )
    rule = _rule(len(ranked), len(there), "problems", chosen)
    if len(names) > 1 and not (first and len(ranked) < len(there)):
        rule += f" Before and after: {names[0]} and {names[-1]}."
    return Listing(f"Held-out problems, {stage}", rule, names, rows)


def _collected(run: Run, stage: str) -> list[Listing]:
    """List the rollouts of a collect stage, and its pairs: the chosen ones beside the rejected
    ones."""
    pairs, paired = read_samples(run.parts(stage, "preferences"), _PAIRS)
    answers, total = read_samples(_rollouts(run, stage), _ROLLOUT)
    prompts, note = _prompts(run)
    problems: dict[str, Mapping[str, Any]] = {}
    by_policy: dict[str, dict[str, list[Answer]]] = {}
    for problem, rows in answers.items():
        problems[problem] = {"prompt": prompts(rows[0]["prompt_ids"])}
        if problem in pairs:
            problems[problem] = {"prompt": pairs[problem][0]["prompt"]}
        for row in rows:
            by_policy.setdefault(row["policy"], {}).setdefault(problem, []).append(row)
    columns = []
    for name in sorted(by_policy):
        columns.append(Column(fmt.policy_name(name), by_policy[name]))
    listed = []
    for problem, entry in problems.items():
        listed.append(_row(problem, entry, columns, stage))
    rollouts = Listing(
        f"Rollouts, {stage}",
        _rule(len(problems), total, "problems"),
        [column.name for column in columns],
        listed,
        note,
    )
    couples = []
    for problem, rows in pairs.items():
        chosen, rejected = [], []
        for row in rows[:SAMPLES]:
            chosen.append(_side(row, "chosen", "correct"))
            rejected.append(_side(row, "rejected", "incorrect"))
        cells = [Cell(0, "chosen", chosen), Cell(1, "rejected", rejected)]
        facts = counted(len(rows), "pair")
        place = anchor(stage, "pairs", problem)
        couples.append(Listed(conversation(rows[0]["prompt"]), facts, None, cells, place))
    rule = _rule(len(couples), paired, "problems with pairs")
    return [
        rollouts,
        Listing(f"Chosen and rejected, {stage}", rule, ["chosen", "rejected"], couples),
    ]


def _rollouts(run: Run, stage: str) -> list[epath.Path]:
    """Return the stage's own rollouts, or those of the online stage whose archive it reads."""
    section = run.sections.get(stage, {})
    source = own_stage(str(section.get("policy", "")))
    own = run.parts(stage)
    if own or source not in run.folders or section.get("rollouts") != "archive":
        return own
    return run.parts(source)


def _prompts(run: Run) -> tuple[Prompts, str]:
    """Return what decodes the run's prompts, and why it cannot, "" if it can."""
    try:
        return Prompts(run_tokenizer(run.config)), ""
    except ValueError as error:
        note = f"Problems without a pair are shown by id, without their text: {error}"
        return Prompts(None), note


def _side(row: Answer, side: str, verdict: str) -> Sample:
    length = len(row[f"{side}_ids"])
    text = row[side] if isinstance(row[side], str) else row[side][-1]["content"]
    facts = f"{length:,} tokens, reward {fmt.value(row[f'{side}_reward'])}"
    return Sample(verdict, facts, shorten(text, LENGTH), length)


def furthest_apart(last: Sequence[Row]) -> list[str]:
    """Order the problems on which the runs' last policies differ, largest difference first, equal
    ones by id."""
    means = np.stack([row.accuracies[0] for row in last])
    sizes = means.min(axis=0) - means.max(axis=0)
    # NaN, which sorts last, is not below 0
    largest_first = np.argsort(sizes, kind="stable")[: np.count_nonzero(sizes < 0)]
    return pick(last[0].ids, largest_first)


def most_different(
    last: Sequence[Row], files: Mapping[str, epath.Path], problems: Mapping[str, Mapping[str, Any]]
) -> list[Listing]:
    """Show the problems on which the runs' last policies differ most, with every policy's
    answers. files: name of a policy -> its completions. problems: id -> row of problems.json."""
    wanted = furthest_apart(last)[:MOST_DIFFERENT]
    if not wanted:
        return []
    columns = []
    for name, file in files.items():
        answers, _ = read_samples([file] if file.exists() else [], _ROLLOUT, wanted, 0)
        columns.append(Column(name, answers))
    rule = (
        f"{len(wanted):,} of {len(last[0].ids):,} common problems: those on which the "
        "accuracies of the runs' last policies are furthest apart, equal ones by problem id, which "
        f"is a hash. Of each policy the first {SAMPLES} samples; beside the prompt, right answers "
        f"among all samples. Before and after: {last[0].name} and {last[-1].name}."
    )
    changes = last[-1].accuracies[0] - last[0].accuracies[0]
    of_problem = dict(zip(last[0].ids, changes.tolist(), strict=True))
    rows = []
    for rank, problem in enumerate(wanted):
        listed = _row(problem, problems.get(problem, {}), columns, "problems", of_problem[problem])
        rows.append(listed._replace(rank=rank))
    names = [column.name for column in columns]
    title = "Where the runs differ most"
    return [Listing(title, rule, names, rows, order="largest difference")]


def _rule(listed: int, total: int, things: str, chosen: str = "") -> str:
    """Say which problems are listed, and how many samples, or pairs, of each. chosen: those that
    come before the first by id."""
    rule = f"{listed:,} of {total:,} {things}"
    if listed < total:
        rule += f": {chosen}" if chosen else ", "
        rule += f"the first by problem id, which is a hash; {total - listed:,} are left out"
    rule += f". Of each the first {SAMPLES} samples."
    if things == "problems":
        rule += (
            " Next to the prompt: right answers among all samples, or their mean reward. Confidence "
            "is the geometric mean of the tokens' probabilities, after temperature and filters."
        )
    return rule
