"""The browser of completions: rollouts of evaluations and collections, and pairs, to be filtered and read.

    Listing ─ Row (one problem) ─ Cell (what one policy answered) ─ Sample

What the script compares stands in attributes as numbers and verdicts; model text is only ever text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from g2d_jax.config.policy_name import own_stage
from g2d_jax.records import Prompt, Verdict
from g2d_jax.report import format as fmt
from g2d_jax.report.markup import on_one_line, shorten
from g2d_jax.report.read import COLLECT, Run, Stage, Study, read_parquet
from g2d_jax.report.tokens import Span, coloured, run_tokenizer

PROBLEMS, SAMPLES, MOST_DIFFERENT = 60, 4, 40
"""The first problems by id, the first samples of each policy (pairs of each problem), the problems of a comparison."""

LENGTH = 4000
"""Characters of a text without colours."""

_ROLLOUT = (
    *("problem_id", "visit", "sample", "policy", "token_ids", "text", "logprobs"),
    *("reward", "verdict", "answer", "stop_reason"),
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
    """A list of problems. rule: which these are. verdicts: those that occur. note: about the colours, "" if there are.

    is_coloured: whether its texts have colours.
    """

    title: str
    rule: str
    names: Sequence[str]
    rows: Sequence[Row]
    note: str

    @property
    def verdicts(self) -> list[str]:
        """Those that occur."""
        there = {sample.verdict for row in self.rows for cell in row.cells for sample in cell.samples}
        return [verdict.value for verdict in Verdict if verdict.value in there]


def browser(run: Run) -> list[Listing]:
    """List the completions of each evaluation, those of each collection and its pairs."""
    paint, note = painter(run)
    collected = [stage for stage in run.stages.values() if stage.kind == COLLECT]
    listings = [_evaluated(stage, paint, note) for stage in run.evaluations]
    listings += [listing for stage in collected for listing in _collected(run, stage, paint, note)]
    return [listing for listing in listings if listing.rows]


def painter(run: Run) -> tuple[Painter, str]:
    """How completions of this run are shown, and why there are no colours, "" if there are."""
    try:
        tokenizer, note = run_tokenizer(run.config, run.workdir), ""
    except ValueError as error:
        tokenizer = None
        note = f"Completions are shown without colours: the run's tokenizer is not to be had here. {error}"

    def paint(text: str, ids: np.ndarray, logprobs: np.ndarray | None) -> Sequence[Span]:
        spans = None if tokenizer is None or logprobs is None else coloured(tokenizer, text, ids, logprobs)
        return [Span(shorten(text, LENGTH))] if spans is None else spans

    return paint, note


def conversation(prompt: Prompt | Sequence[Mapping[str, str]]) -> str:
    """Return a prompt, or a completion, as text: chat messages below each other with their roles."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def read_samples(
    files: Sequence[epath.Path], columns: Sequence[str], also: Iterable[str] = (), first: int = PROBLEMS
) -> tuple[dict[str, list[Answer]], int]:
    """Read the rows of the `first` problems by id, and of those wanted `also`; and how many problems there are.

    Only of these are texts and arrays read. Raises ValueError for a damaged file.
    """
    there = {str(name) for file in files for name in read_parquet(file, ["problem_id"])["problem_id"].to_pylist()}
    wanted = {*sorted(there)[:first], *also}
    rows = [row for file in files for row in read_parquet(file, columns, wanted).to_pylist()]
    by_problem: dict[str, list[Answer]] = {}
    for row in sorted(rows, key=lambda row: (row["problem_id"], row.get("visit", 0), row.get("sample", 0))):
        by_problem.setdefault(row["problem_id"], []).append(row)
    return by_problem, len(there)


class Column(NamedTuple):
    """What stands in one column of a list: a policy's name, its answers by problem, and what shows them."""

    name: str
    answers: Mapping[str, Sequence[Answer]]
    paint: Painter


def _listing(
    title: str, rule: str, problems: Mapping[str, Mapping[str, Any]], columns: Sequence[Column], note: str
) -> Listing:
    """Put policies' answers beside each other. problems: those listed, with their entries of problems.json, or {}."""
    rows = []
    for problem, entry in problems.items():
        answered = [(i, column, column.answers.get(problem, ())) for i, column in enumerate(columns)]
        cells = [
            Cell(i, column.name, [_sample(answer, column.paint) for answer in answers[:SAMPLES]])
            for i, column, answers in answered
            if answers
        ]
        facts = " · ".join(f"{column.name} {_outcome(answers)}" for _, column, answers in answered if answers)
        reference = None if entry.get("answer") is None else str(entry["answer"])
        rows.append(Row(conversation(entry.get("prompt", "")) or f"problem {problem}", facts, reference, cells))
    return Listing(title, rule, [column.name for column in columns], rows, note)


def _sample(row: Answer, paint: Painter) -> Sample:
    ids, nats = np.asarray(row["token_ids"], np.int32), np.asarray(row["logprobs"], np.float32)
    sure = math.exp(min(float(nats.mean(dtype=np.float64)), 0.0)) if len(nats) else math.nan
    facts = [f"{len(ids):,} tokens"]
    facts += [f"reward {fmt.value(row['reward'])}"] if row["verdict"] == "scored" and row["reward"] is not None else []
    facts += [] if math.isnan(sure) else [f"confidence {sure:.2f}"]
    facts += [] if row["answer"] is None else [f"answer {on_one_line(row['answer'], 60)}"]
    facts += ["cut at the limit"] if row["stop_reason"] == "length" else []
    return Sample(row["verdict"], ", ".join(facts), paint(row["text"], ids, nats))


def _outcome(rows: Sequence[Answer]) -> str:
    """Sum up a policy's answers to one problem: "3/4" right ones, or "reward 1.25", the mean of other rewards."""
    if any(row["verdict"] == "scored" for row in rows):
        return f"reward {fmt.value(float(np.mean([row['reward'] for row in rows if row['reward'] is not None])))}"
    return f"{sum(row['verdict'] == 'correct' for row in rows)}/{len(rows)}"


def _evaluated(stage: Stage, paint: Painter, note: str) -> Listing:
    """Every policy's answers to the same problems."""
    files = {fmt.policy_name(entry): stage.rollouts_file(name) for name, entry in stage.policies.items()}
    read = {name: read_samples([file], _ROLLOUT) for name, file in files.items() if file.exists()}
    first = sorted({problem for answers, _ in read.values() for problem in answers})[:PROBLEMS]
    rule = _rule(len(first), max((count for _, count in read.values()), default=0), "problems")
    columns = [Column(name, answers, paint) for name, (answers, _) in read.items()]
    problems = {problem: stage.problems.get(problem, {}) for problem in first}
    return _listing(f"Held-out problems, {stage.name}", rule, problems, columns, note)


def _collected(run: Run, stage: Stage, paint: Painter, note: str) -> list[Listing]:
    """List the rollouts of a collect stage, and its pairs: the chosen ones beside the rejected ones."""
    pairs, paired = read_samples(stage.parts("preferences"), _PAIRS)
    pairs = {problem: pairs[problem] for problem in sorted(pairs)[:PROBLEMS]}
    answers, total = read_samples(_rollouts(run, stage), _ROLLOUT, pairs)
    problems = {problem: {"prompt": pairs[problem][0]["prompt"]} if problem in pairs else {} for problem in answers}
    first = {problem: problems[problem] for problem in sorted(answers)[:PROBLEMS]}
    columns = [
        Column(
            fmt.policy_name({"name": name}),
            {problem: [row for row in answers[problem] if row["policy"] == name] for problem in first},
            paint,
        )
        for name in sorted({row["policy"] for problem in first for row in answers[problem]})
    ]
    rollouts = _listing(f"Rollouts, {stage.name}", _rule(len(first), total, "problems"), first, columns, note)
    nats = {(p, tuple(row["token_ids"])): row["logprobs"] for p in pairs for row in answers.get(p, ())}
    couples = []
    for rows in pairs.values():
        sides = [
            Cell(i, side, [_side(row, side, verdict, nats, paint) for row in rows[:SAMPLES]])
            for i, (side, verdict) in enumerate((("chosen", "correct"), ("rejected", "incorrect")))
        ]
        facts = f"{len(rows)} pair{'s' * (len(rows) != 1)}"
        couples.append(Row(conversation(rows[0]["prompt"]), facts, None, sides))
    rule = _rule(len(couples), paired, "problems with pairs")
    return [rollouts, Listing(f"Chosen and rejected, {stage.name}", rule, ["chosen", "rejected"], couples, note)]


def _rollouts(run: Run, stage: Stage) -> list[epath.Path]:
    """Return the stage's own rollouts, or those of the online stage whose archive it reads."""
    is_archive = stage.section.get("rollouts") == "archive"
    source = run.stages.get(own_stage(str(stage.section.get("policy", "")))) if is_archive else None
    return stage.parts() or (source.parts() if source else [])


def _side(row: Answer, side: str, verdict: str, nats: Mapping[Any, Sequence[float]], paint: Painter) -> Sample:
    ids, text = row[f"{side}_ids"], row[side] if isinstance(row[side], str) else row[side][-1]["content"]
    logprobs = nats.get((row["problem_id"], tuple(ids)))
    spans = paint(text, np.asarray(ids, np.int32), None if logprobs is None else np.asarray(logprobs, np.float32))
    return Sample(verdict, f"{len(ids):,} tokens, reward {fmt.value(row[f'{side}_reward'])}", spans)


def furthest_apart(study: Study) -> list[str]:
    """Order the problems on which the runs' last policies differ, largest difference first, equal ones by id."""
    means = np.stack([row.accuracies[0] for row in study.last])
    apart = zip(means.min(axis=0) - means.max(axis=0), study.problems, strict=True)  # NaN is not below 0
    return [problem for size, problem in sorted((float(size), problem) for size, problem in apart if size < 0)]


def most_different(study: Study) -> list[Listing]:
    """Show the problems on which the runs' last policies differ most, with every policy's answers."""
    wanted = furthest_apart(study)[:MOST_DIFFERENT]
    if not wanted:
        return []
    painters = {side.run.workdir: painter(side.run) for side in study.sides}
    columns = []
    for row in study.rows:
        policy = row.policies[0]
        stage = policy.evaluation(row.split)
        answers, _ = read_samples([stage.rollouts_file(policy.name)] if stage else [], _ROLLOUT, wanted, 0)
        columns.append(Column(row.name, answers, painters[policy.run.workdir][0]))
    entries: dict[str, Mapping[str, Any]] = {}
    for side in study.sides[::-1]:
        entries |= {problem: entry for problem, entry in side.stage.problems.items() if entry}
    rule = (
        f"{len(wanted):,} of {len(study.problems):,} common problems: those on which the accuracies of the runs' "
        "last policies are furthest apart, equal ones by problem id, which is a hash. Of each policy the first "
        f"{SAMPLES} samples; beside the prompt, right answers among all samples."
    )
    note = " ".join(dict.fromkeys(note for _, note in painters.values() if note))
    problems = {problem: entries.get(problem, {}) for problem in wanted}
    return [_listing("Where the runs differ most", rule, problems, columns, note)]


def _rule(listed: int, total: int, things: str) -> str:
    """Which problems are listed, and of each the first how many samples, or pairs."""
    left_out = f", the first by problem id, which is a hash; {total - listed:,} are left out" if listed < total else ""
    each = " Beside the prompt: right answers among all samples, or their mean reward." if things == "problems" else ""
    return f"{listed:,} of {total:,} {things}{left_out}. Of each the first {SAMPLES} samples.{each}"
