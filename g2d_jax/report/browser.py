"""The browser: rollouts of every evaluation and collection, and pairs, to be filtered and read, tokens coloured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
from etils import epath

from g2d_jax.data.tokenizer import Ids, PromptTokenizer
from g2d_jax.records import Preference, ScoredRollout, Verdict
from g2d_jax.report import format as fmt
from g2d_jax.report import markup, summary
from g2d_jax.report.listing import Row, cell, listing, outcome, rollout
from g2d_jax.report.markup import shown
from g2d_jax.report.page import Section
from g2d_jax.report.run import Run, Stage
from g2d_jax.report.tokens import coloured, legend, run_tokenizer
from g2d_jax.tables import read_rollouts

PROBLEMS, SAMPLES = 60, 4
"""The first problems by id of each source, and the first samples of each policy (pairs of each problem), are listed."""

Answers = dict[str, list[ScoredRollout]]
"""Problem id -> completions in the order of their visit and sample."""

Painter = Callable[[str, Ids, np.ndarray | None], str]
"""Text, token ids [T] and log-probs [T] (None: unknown) of a completion -> markup."""


def browser(run: Run) -> Section:
    """The section: a list for each evaluation, each collection and its pairs."""
    paint, note = painter(run)
    lists = [_evaluated(stage, paint) for stage in run.evaluations]
    lists += [one for stage in run.stages if stage.kind == "collect" for one in _collected(run, stage, paint)]
    return Section("browser", "Browser", [note, *lists] if any(lists) else [])


def painter(run: Run) -> tuple[Painter, str]:
    """How completions of this run are shown, and markup that says what the colours mean, or why there are none."""
    try:
        tokenizer = run_tokenizer(run.config)
    except ValueError as error:
        reason = f"Completions are shown without colours: the run's tokenizer is not to be had here. {error}"
        return lambda text, ids, logprobs: markup.preformatted(text), markup.paragraph(reason, "warning")
    note = (
        "Probabilities are those of drawing, after temperature and filters; point at a token to see its own. "
        "Confidence is their geometric mean over a completion. A text is left without colours where no log-probability "
        "is on disk or the tokens do not spell it."
    )
    return _with(tokenizer), legend() + markup.paragraph(note, "hint")


def _with(tokenizer: PromptTokenizer) -> Painter:
    def paint(text: str, ids: Ids, logprobs: np.ndarray | None) -> str:
        found = None if logprobs is None else coloured(tokenizer, text, ids, logprobs)
        return markup.preformatted(text) if found is None else found

    return paint


def first_problems(parts: Iterable[epath.Path], wanted: Set[str] = frozenset()) -> tuple[Answers, int]:
    """Completions of the first `PROBLEMS` problems by id, and of those wanted, and how many problems there are.

    Part by part, so that no more is kept than is asked for. Raises ValueError for a damaged part.
    """
    kept: Answers = {}
    seen: set[str] = set()
    for part in parts:
        for row in read_rollouts(part):
            seen.add(row.rollout.problem_id)
            kept.setdefault(row.rollout.problem_id, []).append(row)
        smallest = {*sorted(seen)[:PROBLEMS], *wanted}
        kept = {problem: rows for problem, rows in kept.items() if problem in smallest}
    ordered = {p: sorted(rows, key=lambda row: (row.rollout.visit, row.rollout.sample)) for p, rows in kept.items()}
    return ordered, len(seen)


def _evaluated(stage: Stage, paint: Painter) -> str:
    """Every policy's answers to the same problems."""
    policies = [policy for policy in summary.policies(stage.manifest or {}) if stage.rollouts_file(policy["name"])]
    found = [first_problems([stage.rollouts_file(policy["name"])]) for policy in policies]
    columns = [(summary.policy_name(policy), rows) for policy, (rows, _) in zip(policies, found, strict=True)]
    problems, total = stage.problems(), max((count for _, count in found), default=0)
    first = sorted({problem for _, answers in columns for problem in answers})[:PROBLEMS]
    painted = [(name, answers, paint) for name, answers in columns]
    rows = [beside(problem, problems.get(problem, {}), painted) for problem in first]
    return listing(
        f"Held-out problems, {stage.name}",
        _rule(len(rows), total, "problems", "samples"),
        rows,
        policies=[name for name, _ in columns],
        verdicts=_verdicts(answers for _, answers in columns),
    )


def beside(problem: str, known: Mapping[str, Any], columns: Sequence[tuple[str, Answers, Painter]]) -> Row:
    """Put the policies' answers to a problem beside each other. known: its entry of problems.json, as far as there is.

    columns: names of policies, with their answers and what shows these.
    """
    prompt, gold = markup.conversation(known.get("prompt", "")) or f"problem {problem}", known.get("answer")
    cells, facts = [], []
    for number, (name, answers, paint) in enumerate(columns):
        if rows := answers.get(problem, []):
            samples = [rollout(r, paint(r.text, r.rollout.token_ids, r.rollout.logprobs)) for r in rows[:SAMPLES]]
            cells.append(cell(number, name, samples))
            facts.append(f"{name} {outcome(rows)}")
    return Row(prompt, " · ".join(facts), None if gold is None else str(gold), cells)


def _collected(run: Run, stage: Stage, paint: Painter) -> list[str]:
    """The rollouts of a collect stage, and its pairs."""
    pairs: dict[str, list[Preference]] = {}
    for pair in stage.preferences():
        pairs.setdefault(pair.problem_id, []).append(pair)
    chosen = sorted(pairs)[:PROBLEMS]
    answers, total = first_problems(_parts(run, stage), set(chosen))
    logprobs = {(p, r.rollout.token_ids.tobytes()): r.rollout.logprobs for p, rows in answers.items() for r in rows}
    prompts = {problem: some[0].prompt for problem, some in pairs.items()}
    first = sorted(answers)[:PROBLEMS]
    columns = _by_policy({problem: answers[problem] for problem in first})
    rows = [beside(p, {"prompt": prompts.get(p, "")}, [(*column, paint) for column in columns]) for p in first]
    sampled = listing(
        f"Rollouts, {stage.name}",
        _rule(len(rows), total, "problems", "samples"),
        rows,
        policies=[name for name, _ in columns],
        verdicts=_verdicts(answers for _, answers in columns),
    )
    couples = [
        Row(markup.conversation(prompts[p]), _count(pairs[p]), None, [_pairs(p, pairs[p], logprobs, paint)])
        for p in chosen
    ]
    rule = _rule(len(chosen), len(pairs), "problems with pairs", "pairs")
    return [sampled, listing(f"Chosen and rejected, {stage.name}", rule, couples, what="pairs")]


def _by_policy(answers: Answers) -> list[tuple[str, Answers]]:
    """Completions by the policy that gave them: several where an archive of the warm-up is read."""
    found: dict[str, Answers] = {}
    for problem, rows in answers.items():
        for row in rows:
            found.setdefault(row.policy, {}).setdefault(problem, []).append(row)
    return [(summary.policy_name({"name": name}), found[name]) for name in sorted(found)]


def _parts(run: Run, stage: Stage) -> list[epath.Path]:
    """The stage's own rollouts, or those of the online stage whose archive it reads."""
    if parts := stage.parts():
        return parts
    settings = run.config.get("stages", {}).get(stage.name, {})
    source = str(settings.get("policy", "")).partition("@")[0] if settings.get("rollouts") == "archive" else ""
    return next((other.parts() for other in run.stages if other.name == source), [])


def _pairs(
    problem: str, pairs: Sequence[Preference], logprobs: dict[tuple[str, bytes], np.ndarray], paint: Painter
) -> str:
    """Pairs of one problem below each other, each chosen beside rejected, as one cell."""
    found = []
    for pair in pairs[:SAMPLES]:
        cells = "".join(
            f'<div><p class="facts"><span class="badge v-{colour.value}">{side}</span> '
            f"{shown(f'{len(ids):,} tokens, reward {fmt.value(reward)}')}</p>"
            f"{paint(text, ids, logprobs.get((problem, ids.tobytes())))}</div>"
            for side, colour in (("chosen", Verdict.CORRECT), ("rejected", Verdict.INCORRECT))
            for text, ids, reward in [[getattr(pair, f"{side}{part}") for part in ("", "_ids", "_reward")]]
        )
        found.append(f'<div class="beside" data-verdict="">{cells}</div>')
    return f'<div class="wide" data-policy="0">{"".join(found)}</div>'


def _count(pairs: Sequence[Preference]) -> str:
    return f"{len(pairs)} pair{'s' if len(pairs) != 1 else ''}"


def _verdicts(columns: Iterable[Answers]) -> list[Verdict]:
    """Those that occur among the samples listed."""
    there = {row.score.verdict for answers in columns for rows in answers.values() for row in rows[:SAMPLES]}
    return [verdict for verdict in Verdict if verdict in there]


def _rule(shown: int, total: int, things: str, samples: str) -> str:
    """Which problems are listed, and of each the first how many samples, or pairs."""
    left_out = f", the first by problem id, which is a hash; {total - shown:,} are left out" if shown < total else ""
    each = "Beside the prompt: right answers among all samples, or their mean reward." if samples == "samples" else ""
    return f"{shown:,} of {total:,} {things}{left_out}. Of each the first {SAMPLES} {samples}. {each}".strip()
