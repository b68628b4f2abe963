"""Supervised fine-tuning, which trains the starting policy of the other stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from g2d_jax.config import Issue, Sft
from g2d_jax.config.section import warning
from g2d_jax.data.distinct import require_few
from g2d_jax.data.examples import load_examples
from g2d_jax.data.order import draw
from g2d_jax.data.packing import Group, Response
from g2d_jax.data.splits import drop_overlap, problem_id
from g2d_jax.losses import sft_weights
from g2d_jax.records import Example
from g2d_jax.runtime.terminal import counted
from g2d_jax.session.answers import is_read_by_rule
from g2d_jax.session.problems import described, tell
from g2d_jax.session.problems import order as problem_order
from g2d_jax.session.row_shapes import RowShape, choose_row_length
from g2d_jax.session.session import Session
from g2d_jax.session.stage_result import Outcome
from g2d_jax.session.trainer import open_trainer
from g2d_jax.session.training_programs import Training
from g2d_jax.stages import Seen, alerts
from g2d_jax.stages.causes import unread
from g2d_jax.training import objectives

MOST_READ = 256  # demonstrations of a task whose answers are checked
Encoded = tuple[np.ndarray, np.ndarray]
"""The token ids of a prompt and of its completion, int32 [P] and [T]."""
Examples = tuple[list[Encoded], dict[str, int], list[Issue]]
"""Examples that fit, counts of each kind, and issues."""


def run(session: Session, name: str, stage: Sft, data: Examples | None = None) -> Outcome:
    """Train on demonstrations for stage.steps updates; return the outcome. data: as `issues` read
    it, None reads it now."""
    demonstrations, counts, _ = data or examples(session, name, stage)
    order = problem_order(session.config, len(demonstrations), f"sft/{name}")
    columns = row_length(session, stage, demonstrations)
    (training,) = phases(session, name, stage, columns=columns)
    session.ahead.compile(training.programs())
    with open_trainer(training) as trainer:
        while trainer.meet_before_update():
            with session.track_cost(trainer.cost):
                drawn = draw(order, trainer.step * stage.batch_size, stage.batch_size)
                trainer.update(batch([demonstrations[index] for index, _ in drawn]), {})
            trainer.checkpoint_if_due()
        return trainer.finish(counts)


def issues(session: Session, name: str, stage: Sft) -> Seen:
    """Check the examples, and return them for `run`."""
    data = encoded, _, found = examples(session, name, stage)
    prompt, completion = encoded[0]
    head = f"{name}: {len(encoded)} examples of {described(stage.data)}; the first of them:"
    example = alerts.write_example(session, head, {"prompt": prompt, "completion": completion})
    row_length(session, stage, encoded)
    return Seen(found, data, example)


def phases(
    session: Session, name: str, stage: Sft, response: int | None = None, columns: int = 0
) -> list[Training]:
    """List the stage's training. columns: of a row, 0: enough for max_length. Every example counts
    as max_length tokens, for any `response`."""
    half = stage.max_length // 2
    pair = np.zeros(stage.max_length - half, np.int32), np.zeros(half, np.int32)
    columns = columns or choose_row_length(session, stage.max_length)
    training = Training(
        session,
        name,
        stage,
        objectives.sft(session.compute),
        total=stage.steps,
        per="tokens",
        rows=RowShape(columns, stage.batch_size),
        fullest=lambda: batch([pair] * stage.batch_size),
    )
    return [training]


def examples(session: Session, name: str, stage: Sft) -> Examples:
    """Load the examples that fit, without those whose prompt is in dev or test, as token ids;
    return them with counts of each kind, and issues."""
    data, tokenizer = stage.data, session.tokenizer
    limit = data.limit or (
        stage.steps * stage.batch_size if data.path.startswith("procedural:") else None
    )
    loaded, report = load_examples(replace(data, limit=limit))
    tell(f"stages.{name}.data", report, session.tracker.say, tokenizer.template)
    distinct, overlap = drop_overlap(loaded, session.problems.held_out_names)
    fits: list[Encoded] = []
    unwritten: list[str] = []
    unclosed = 0
    for example in distinct:
        try:
            prompt, completion = tokenizer.encode_example(example)
        except ValueError as fault:
            unwritten.append(f"{data.path}, example of prompt {example.prompt!r:.80}: {fault}")
            continue
        if len(prompt) + len(completion) <= stage.max_length:
            fits.append((prompt, completion))
            unclosed += tokenizer.leaves_open(example.prompt, example.completion)
    if data.on_error != "skip":
        require_few(unwritten, len(unwritten), len(distinct), data.on_error)
    if unwritten:
        session.tracker.say(
            f"{data.path}: {len(unwritten)} of {len(distinct)} examples that cannot be tokenised "
            f"dropped (the first: {unwritten[0]})"
        )
    if overlap:
        session.tracker.say(
            f"stages.{name}.data: {counted(overlap, 'example')} dropped: their prompts are problems "
            "of dev or test"
        )
    too_long = len(distinct) - len(unwritten) - len(fits)
    if too_long:
        session.tracker.say(
            f"{data.path}: {too_long} of {len(distinct)} examples longer than max_length {stage.max_length} dropped"
        )
    if not fits:
        raise ValueError(
            f"stages.{name}.data has no example that fits: {too_long} are longer than max_length "
            f"{stage.max_length}, {overlap} are for problems of dev or test"
        )
    counts = {
        "duplicates": report.duplicates,
        "broken": report.broken + len(unwritten),
        "overlap": overlap,
        "too_long": too_long,
        "unclosed": unclosed,
    }
    at = f"stages.{name}"
    found = [
        *alerts.too_few(f"{at}.batch_size", "examples", len(fits), stage.batch_size, stage.steps),
        *alerts.unclosed(f"{at}.data", "completions", unclosed, len(fits)),
        *alerts.position_issues(session, f"{at}.max_length", pairs=fits),
        *_unread(session, f"{at}.data", distinct),
    ]
    return fits, {"examples": len(fits), **counts}, found


def _unread(session: Session, setting: str, demonstrations: Sequence[Example]) -> list[Issue]:
    """Warn of demonstrations of training problems whose answers the reward would not read."""
    tasks, problems = session.config.all_tasks, session.problems.train_by_id
    by_task: dict[str, list[str]] = {}
    for example in demonstrations:
        prompt = example.prompt
        question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        problem = problems.get(example.id) or problems.get(problem_id(question))
        if problem is not None and problem.answer is not None:
            by_task.setdefault(problem.task, []).append(example.completion)
    found = []
    for task, texts in by_task.items():
        if is_read_by_rule(session, task) and (cause := unread(texts[:MOST_READ], task, tasks)):
            text = f"teaches answers that get no reward: {cause.symptom}"
            found.append(warning(setting, text, f"to try: {cause.remedy}"))
    return found


def row_length(session: Session, stage: Sft, encoded: Sequence[Encoded]) -> int:
    """Choose the columns of a packed row by the first batches."""
    size = min(stage.batch_size, 256)
    firsts = range(0, min(len(encoded), 4 * size), size)
    return choose_row_length(
        session, stage.max_length, [batch(encoded[i : i + size]) for i in firsts]
    )


def batch(encoded: Sequence[Encoded]) -> list[Group]:
    """Build groups of one prompt and one completion, weighted so that the loss is the mean over
    completion tokens."""
    weights = sft_weights(np.array([len(completion) for _, completion in encoded]))
    groups = []
    for (prompt, completion), weight in zip(encoded, weights, strict=True):
        groups.append(Group(prompt, [Response(completion, {"weight": weight})]))
    return groups
