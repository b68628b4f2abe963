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

from g2d_jax.records import Prompt, Verdict
from g2d_jax.report import format as fmt
from g2d_jax.report.markup import on_one_line, shorten
from g2d_jax.report.read import COLLECT, Comparison, Run, Stage, read_parquet
from g2d_jax.report.tables import policies
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
    *(f"{side}{part}" for side in ("chosen", "rejected") for part in ("", "_ids", "_reward")),
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
    listings += [one for stage in collected for one in _collected(run, stage, paint, note)]
    return [one for one in listings if one.rows]


def painter(run: Run) -> tuple[Painter, str]:
    """How completions of this run are shown, and why there are no colours, "" if there are."""
    try:
        tokenizer, note = run_tokenizer(run.config), ""
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
    found: dict[str, list[Answer]] = {}
    for row in sorted(rows, key=lambda row: (row["problem_id"], row.get("visit", 0), row.get("sample", 0))):
        found.setdefault(row["problem_id"], []).append(row)
    return found, len(there)


Column = tuple[str, Mapping[str, Sequence[Answer]], Painter]
"""A policy's name, its answers by problem, and what shows them."""


def beside(problem: str, known: Mapping[str, Any], columns: Sequence[Column]) -> Row:
    """Put the policies' answers to a problem beside each other. known: its entry of problems.json, as far as known."""
    answered = [(i, name, rows, paint) for i, (name, by, paint) in enumerate(columns) if (rows := by.get(problem))]
    cells = [Cell(i, name, [_sample(row, paint) for row in rows[:SAMPLES]]) for i, name, rows, paint in answered]
    facts = " · ".join(f"{name} {_outcome(rows)}" for _, name, rows, _ in answered)
    gold = None if known.get("answer") is None else str(known["answer"])
    return Row(conversation(known.get("prompt", "")) or f"problem {problem}", facts, gold, cells)


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
    """Sum up a policy's answers to one problem: "3/4" right ones, or "reward 1.25", the mean of scalar ones."""
    if any(row["verdict"] == "scored" for row in rows):
        return f"reward {fmt.value(float(np.mean([row['reward'] for row in rows if row['reward'] is not None])))}"
    return f"{sum(row['verdict'] == 'correct' for row in rows)}/{len(rows)}"


def _evaluated(stage: Stage, paint: Painter, note: str) -> Listing:
    """Every policy's answers to the same problems."""
    files = {fmt.policy_name(one): stage.rollouts_file(one["name"]) for one in policies(stage.manifest)}
    read = {name: read_samples([file], _ROLLOUT) for name, file in files.items() if file}
    columns = [(name, answers, paint) for name, (answers, _) in read.items()]
    first = sorted({problem for answers, _ in read.values() for problem in answers})[:PROBLEMS]
    rows = [beside(problem, stage.problems.get(problem, {}), columns) for problem in first]
    rule = _rule(len(rows), max((count for _, count in read.values()), default=0), "problems")
    return Listing(f"Held-out problems, {stage.name}", rule, list(read), rows, note)


def _collected(run: Run, stage: Stage, paint: Painter, note: str) -> list[Listing]:
    """List the rollouts of a collect stage, and its pairs: the chosen ones beside the rejected ones."""
    pairs, paired = read_samples(stage.parts("preferences"), _PAIRS)
    chosen = sorted(pairs)[:PROBLEMS]
    answers, total = read_samples(_rollouts(run, stage), _ROLLOUT, chosen)
    prompts = {problem: {"prompt": rows[0]["prompt"]} for problem, rows in pairs.items()}
    first = sorted(answers)[:PROBLEMS]
    names = sorted({row["policy"] for problem in first for row in answers[problem]})
    columns = [
        (
            fmt.policy_name({"name": name}),
            {p: [row for row in answers[p] if row["policy"] == name] for p in first},
            paint,
        )
        for name in names
    ]
    rollouts = Listing(
        f"Rollouts, {stage.name}",
        _rule(len(first), total, "problems"),
        [name for name, _, _ in columns],
        [beside(problem, prompts.get(problem, {}), columns) for problem in first],
        note,
    )
    nats = {(p, tuple(row["token_ids"])): row["logprobs"] for p in chosen for row in answers.get(p, ())}
    couples = []
    for problem in chosen:
        sides = [
            Cell(i, side, [_side(row, side, verdict, nats, paint) for row in pairs[problem][:SAMPLES]])
            for i, (side, verdict) in enumerate((("chosen", "correct"), ("rejected", "incorrect")))
        ]
        count = len(pairs[problem])
        couples.append(Row(conversation(prompts[problem]["prompt"]), f"{count} pair{'s' * (count != 1)}", None, sides))
    rule = _rule(len(couples), paired, "problems with pairs")
    return [rollouts, Listing(f"Chosen and rejected, {stage.name}", rule, ["chosen", "rejected"], couples, note)]


def _rollouts(run: Run, stage: Stage) -> list[epath.Path]:
    """Return the stage's own rollouts, or those of the online stage whose archive it reads."""
    section = run.sections.get(stage.name, {})
    source = str(section.get("policy", "")).partition("@")[0] if section.get("rollouts") == "archive" else ""
    return stage.parts() or (run.stages[source].parts() if source in run.stages else [])


def _side(row: Answer, side: str, verdict: str, nats: Mapping[Any, Sequence[float]], paint: Painter) -> Sample:
    ids, text = row[f"{side}_ids"], row[side] if isinstance(row[side], str) else row[side][-1]["content"]
    logprobs = nats.get((row["problem_id"], tuple(ids)))
    spans = paint(text, np.asarray(ids, np.int32), None if logprobs is None else np.asarray(logprobs, np.float32))
    return Sample(verdict, f"{len(ids):,} tokens, reward {fmt.value(row[f'{side}_reward'])}", spans)


def furthest_apart(comparison: Comparison) -> list[str]:
    """Order the problems on which the runs' last policies differ, largest difference first, equal ones by id."""
    means = np.stack([row.accuracies[0] for row in comparison.last])
    apart = zip(means.min(axis=0) - means.max(axis=0), comparison.problems, strict=True)  # NaN is not below 0
    return [problem for size, problem in sorted((float(size), problem) for size, problem in apart if size < 0)]


def most_different(comparison: Comparison) -> list[Listing]:
    """Show the problems on which the runs' last policies differ most, with every policy's answers."""
    wanted = furthest_apart(comparison)[:MOST_DIFFERENT]
    painters = {side.mark: painter(side.run) for side in comparison.sides}
    known = {p: one for side in comparison.sides[::-1] for p, one in side.stage.problems.items() if one}
    columns = [
        (row.name, read_samples([file], _ROLLOUT, wanted, 0)[0], painters[side.mark][0])
        for row, (side, file) in zip(comparison.rows, comparison.files, strict=True)
    ]
    rule = (
        f"{len(wanted):,} of {len(comparison.problems):,} common problems: those on which the accuracies of the runs' "
        "last policies are furthest apart, equal ones by problem id, which is a hash. Of each policy the first "
        f"{SAMPLES} samples; beside the prompt, right answers among all samples."
    )
    note = " ".join(dict.fromkeys(note for _, note in painters.values() if note))
    names, rows = [name for name, _, _ in columns], [beside(p, known.get(p, {}), columns) for p in wanted]
    return [Listing("Where the runs differ most", rule, names, rows, note)] if rows else []


def _rule(listed: int, total: int, things: str) -> str:
    """Which problems are listed, and of each the first how many samples, or pairs."""
    left_out = f", the first by problem id, which is a hash; {total - listed:,} are left out" if listed < total else ""
    each = " Beside the prompt: right answers among all samples, or their mean reward." if things == "problems" else ""
    return f"{listed:,} of {total:,} {things}{left_out}. Of each the first {SAMPLES} samples.{each}"
