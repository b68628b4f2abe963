"""List completions to look through: rollouts of evaluations and collections, and pairs, to be
filtered and read.

    Listing ─ Row (one problem) ─ Cell (what one policy answered) ─ Sample

What the script compares stands in attributes as numbers and verdicts; model text is only ever text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from g2d_jax.config.policy_name import own_stage
from g2d_jax.records import Prompt, Verdict, pick
from g2d_jax.report import format as fmt
from g2d_jax.report.markup import on_one_line, shorten
from g2d_jax.report.rows import Study
from g2d_jax.report.runs import COLLECT, Run, Stage, read_parquet
from g2d_jax.report.tokens import Span, coloured, run_tokenizer

PROBLEMS, SAMPLES, MOST_DIFFERENT = 60, 4, 40
"""The first problems by id, the first samples of each policy (pairs of each problem), the problems
of a comparison."""

LENGTH = 4000
"""Characters of a text without colours."""

_ROLLOUT = (
    "problem_id",
    "visit",
    "sample",
    "policy",
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

Painter = Callable[[str, np.ndarray, np.ndarray | None], Sequence[Span]]
"""Text, token ids [T] and log-probs [T] (None: unknown) of a completion -> what is shown of it."""


class Sample(NamedTuple):
    """One completion. verdict: a Verdict's value; facts: what else is known of it."""

    verdict: str
    facts: str
    spans: Sequence[Span]


class Cell(NamedTuple):
    """What one policy answered to a problem. number: the policy's in the list."""

    number: int
    name: str
    samples: Sequence[Sample]


class Row(NamedTuple):
    """One problem. answer: None if no reference is known."""

    prompt: str
    facts: str
    answer: str | None
    cells: Sequence[Cell]


class Listing(NamedTuple):
    """A list of problems. rule: which these are. verdicts: those that occur. note: about the
    colours, "" if there are.

    is_coloured: whether its texts have colours.
    """

    title: str
    rule: str
    names: Sequence[str]
    rows: Sequence[Row]
    note: str

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


def browser(run: Run) -> list[Listing]:
    """List the completions of each evaluation, those of each collection and its pairs."""
    paint, note = painter(run)
    listings = [_evaluated(stage, paint, note) for stage in run.evaluations]
    for stage in run.stages.values():
        if stage.kind == COLLECT:
            listings += _collected(run, stage, paint, note)
    return listings


def painter(run: Run) -> tuple[Painter, str]:
    """Return what shows completions of this run, and why there are no colours, "" if there are."""
    try:
        tokenizer, note = run_tokenizer(run.config, run.workdir), ""
    except ValueError as error:
        tokenizer = None
        note = (
            "Completions are shown without colours: the run's tokenizer is not to be had here. "
            f"{error}"
        )

    def paint(text: str, ids: np.ndarray, logprobs: np.ndarray | None) -> Sequence[Span]:
        spans = None
        if tokenizer is not None and logprobs is not None:
            spans = coloured(tokenizer, text, ids, logprobs)
        return [Span(shorten(text, LENGTH))] if spans is None else spans

    return paint, note


def conversation(prompt: Prompt | Sequence[Mapping[str, str]]) -> str:
    """Return a prompt, or a completion, as text: chat messages below each other with their
    roles."""
    if isinstance(prompt, str):
        return prompt
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
    wanted = {*sorted(there)[:first], *also}
    rows: list[Answer] = []
    for file in files:
        rows += read_parquet(file, columns, wanted).to_pylist()
    by_problem: dict[str, list[Answer]] = {}
    for row in sorted(
        rows, key=lambda row: (row["problem_id"], row.get("visit", 0), row.get("sample", 0))
    ):
        by_problem.setdefault(row["problem_id"], []).append(row)
    return by_problem, len(there)


class Column(NamedTuple):
    """What stands in one column of a list: a policy's name, its answers by problem, and what shows
    them."""

    name: str
    answers: Mapping[str, Sequence[Answer]]
    paint: Painter


def _listing(
    title: str,
    rule: str,
    problems: Mapping[str, Mapping[str, Any]],
    columns: Sequence[Column],
    note: str,
) -> Listing:
    """Put policies' answers beside each other. problems: those listed, with their entries of
    problems.json, or {}."""
    rows = []
    for problem, entry in problems.items():
        cells = []
        facts = []
        for i, column in enumerate(columns):
            answers = column.answers.get(problem, ())
            if answers:
                samples = [_sample(answer, column.paint) for answer in answers[:SAMPLES]]
                cells.append(Cell(i, column.name, samples))
                facts.append(f"{column.name} {_outcome(answers)}")
        prompt = conversation(entry.get("prompt", "")) or f"problem {problem}"
        reference = None if entry.get("answer") is None else str(entry["answer"])
        rows.append(Row(prompt, " · ".join(facts), reference, cells))
    return Listing(title, rule, [column.name for column in columns], rows, note)


def _sample(row: Answer, paint: Painter) -> Sample:
    ids = np.asarray(row["token_ids"], np.int32)
    nats = np.asarray(row["logprobs"], np.float32)
    facts = [f"{len(ids):,} tokens"]
    if row["verdict"] == "scored" and row["reward"] is not None:
        facts.append(f"reward {fmt.value(row['reward'])}")
    mean = float(nats.mean(dtype=np.float64)) if len(nats) else math.nan
    if not math.isnan(mean):
        facts.append(f"confidence {math.exp(min(mean, 0.0)):.2f}")
    if row["answer"] is not None:
        facts.append(f"answer {on_one_line(row['answer'], 60)}")
    if row["stop_reason"] == "length":
        facts.append("cut at the limit")
    return Sample(row["verdict"], ", ".join(facts), paint(row["text"], ids, nats))


def _outcome(rows: Sequence[Answer]) -> str:
    """Sum up a policy's answers to one problem: "3/4" right ones, or "reward 1.25", the mean of
    other rewards."""
    verdicts = list(map(itemgetter("verdict"), rows))
    if "scored" in verdicts:
        mean = np.mean([row["reward"] for row in rows if row["reward"] is not None])
        return f"reward {fmt.value(float(mean))}"
    return f"{verdicts.count('correct')}/{len(rows)}"


def _evaluated(stage: Stage, paint: Painter, note: str) -> Listing:
    """List every policy's answers to the same problems."""
    columns: list[Column] = []
    there = set[str]()
    total = 0
    for name, entry in stage.policies.items():
        file = stage.rollouts_file(name)
        if file.exists():
            answers, count = read_samples([file], _ROLLOUT)
            columns.append(Column(fmt.policy_name(entry), answers, paint))
            there.update(answers)
            total = max(total, count)
    first = sorted(there)[:PROBLEMS]
    rule = _rule(len(first), total, "problems")
    problems = {problem: stage.problems.get(problem, {}) for problem in first}
    return _listing(f"Held-out problems, {stage.name}", rule, problems, columns, note)


def _collected(run: Run, stage: Stage, paint: Painter, note: str) -> list[Listing]:
    """List the rollouts of a collect stage, and its pairs: the chosen ones beside the rejected
    ones."""
    pairs, paired = read_samples(stage.parts("preferences"), _PAIRS)
    answers, total = read_samples(_rollouts(run, stage), _ROLLOUT, pairs)
    problems: dict[str, Mapping[str, Any]] = {}
    by_policy: dict[str, dict[str, list[Answer]]] = {}
    for problem in list(answers)[:PROBLEMS]:
        problems[problem] = {}
        if problem in pairs:
            problems[problem] = {"prompt": pairs[problem][0]["prompt"]}
        for row in answers[problem]:
            by_policy.setdefault(row["policy"], {}).setdefault(problem, []).append(row)
    columns = []
    for name in sorted(by_policy):
        columns.append(Column(fmt.policy_name({"name": name}), by_policy[name], paint))
    rollouts = _listing(
        f"Rollouts, {stage.name}", _rule(len(problems), total, "problems"), problems, columns, note
    )
    couples = []
    for problem, rows in pairs.items():
        nats = {tuple(row["token_ids"]): row["logprobs"] for row in answers.get(problem, ())}
        chosen, rejected = [], []
        for row in rows[:SAMPLES]:
            chosen.append(_side(row, "chosen", "correct", nats, paint))
            rejected.append(_side(row, "rejected", "incorrect", nats, paint))
        cells = [Cell(0, "chosen", chosen), Cell(1, "rejected", rejected)]
        facts = f"{len(rows)} pair{'s' * (len(rows) != 1)}"
        couples.append(Row(conversation(rows[0]["prompt"]), facts, None, cells))
    rule = _rule(len(couples), paired, "problems with pairs")
    return [
        rollouts,
        Listing(f"Chosen and rejected, {stage.name}", rule, ["chosen", "rejected"], couples, note),
    ]


def _rollouts(run: Run, stage: Stage) -> list[epath.Path]:
    """Return the stage's own rollouts, or those of the online stage whose archive it reads."""
    own = stage.parts()
    source = run.stages.get(own_stage(str(stage.section.get("policy", ""))))
    if own or source is None or stage.section.get("rollouts") != "archive":
        return own
    return source.parts()


def _side(
    row: Answer, side: str, verdict: str, nats: Mapping[Any, Sequence[float]], paint: Painter
) -> Sample:
    ids = row[f"{side}_ids"]
    text = row[side] if isinstance(row[side], str) else row[side][-1]["content"]
    logprobs = nats.get(tuple(ids))
    spans = paint(
        text,
        np.asarray(ids, np.int32),
        None if logprobs is None else np.asarray(logprobs, np.float32),
    )
    return Sample(verdict, f"{len(ids):,} tokens, reward {fmt.value(row[f'{side}_reward'])}", spans)


def furthest_apart(study: Study) -> list[str]:
    """Order the problems on which the runs' last policies differ, largest difference first, equal
    ones by id."""
    means = np.stack([row.accuracies[0] for row in study.last])
    sizes = means.min(axis=0) - means.max(axis=0)
    # NaN, which sorts last, is not below 0
    largest_first = np.argsort(sizes, kind="stable")[: np.count_nonzero(sizes < 0)]
    return pick(study.problems, largest_first)


def most_different(study: Study) -> list[Listing]:
    """Show the problems on which the runs' last policies differ most, with every policy's
    answers."""
    wanted = furthest_apart(study)[:MOST_DIFFERENT]
    if not wanted:
        return []
    painters = {side.run.workdir: painter(side.run) for side in study.sides}
    columns = []
    for row in study.rows:
        policy = row.policies[0]
        stage = policy.evaluation(row.split)
        answers, _ = read_samples(
            [stage.rollouts_file(policy.name)] if stage else [], _ROLLOUT, wanted, 0
        )
        columns.append(Column(row.name, answers, painters[policy.run.workdir][0]))
    entries: dict[str, Mapping[str, Any]] = {}
    for side in reversed(study.sides):
        entries |= side.stage.problems
    rule = (
        f"{len(wanted):,} of {len(study.problems):,} common problems: those on which the "
        "accuracies of the runs' last policies are furthest apart, equal ones by problem id, which "
        f"is a hash. Of each policy the first {SAMPLES} samples; beside the prompt, right answers "
        "among all samples."
    )
    note = " ".join(dict.fromkeys(note for _, note in painters.values() if note))
    problems = {problem: entries.get(problem, {}) for problem in wanted}
    return [_listing("Where the runs differ most", rule, problems, columns, note)]


def _rule(listed: int, total: int, things: str) -> str:
    """Say which problems are listed, and how many samples, or pairs, of each."""
    rule = f"{listed:,} of {total:,} {things}"
    if listed < total:
        rule += f", the first by problem id, which is a hash; {total - listed:,} are left out"
    rule += f". Of each the first {SAMPLES} samples."
    if things == "problems":
        rule += " Beside the prompt: right answers among all samples, or their mean reward."
    return rule
