"""Offline DPO on a static preference dataset. The reference is the starting policy: its
log-probabilities are computed once, and no reference model stays in memory.

The stage also measures the pairs under the policy before and after training. This does not change
the trained policy, and its cost does not count.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
from etils import epath

from g2d_jax.config import Collect, DPOLoss, Offline, OnlineDPO
from g2d_jax.config.section import warning
from g2d_jax.data.order import draw
from g2d_jax.data.packing import Group, Response
from g2d_jax.data.preferences import check_preferences
from g2d_jax.data.splits import met
from g2d_jax.losses import dpo_weights
from g2d_jax.models.decoder import Decoder
from g2d_jax.records import Preference, pick
from g2d_jax.rollouts import external_preferences
from g2d_jax.rollouts.store import on_disk
from g2d_jax.runtime import processes, storage
from g2d_jax.runtime.tables import read_preferences, write_columns
from g2d_jax.runtime.terminal import counted
from g2d_jax.session.policies import load_policy
from g2d_jax.session.problems import order as problem_order
from g2d_jax.session.row_shapes import RowShape, choose_row_length
from g2d_jax.session.session import Session
from g2d_jax.session.stage_result import Cost, Outcome, Warned
from g2d_jax.session.trainer import open_trainer
from g2d_jax.session.training_programs import Scorer, Training
from g2d_jax.stages import Seen, alerts
from g2d_jax.study import informativeness
from g2d_jax.training import objectives
from g2d_jax.training.objectives import Compute, Objective

SCORED_AT_ONCE = 256  # pairs of one scoring call


def run(
    session: Session, name: str, stage: Offline, data: list[Preference] | None = None
) -> Outcome:
    """Train stage.epochs over the pairs; return the outcome.

    `measures` has metrics of the pairs, and pairs.parquet each pair's log-probabilities. before,
    after: `pair_summary` under the policy before and after training. margins: `margin_summary`
    after training, absent for a loss without a reference. (Before training rewards and margins are
    0: the policy is the reference.)
    """
    pairs = data or read(session, stage)
    examples = batch(pairs, np.zeros((len(pairs), 2)))
    count = len(pairs)
    row_length = _row_length(session, examples, stage.batch_size)
    scorer, training = phases(session, name, stage, pairs=count, row_length=row_length)
    session.ahead.compile([*scorer.programs(), *training.programs()])
    steps, batch_size = training.total, training.rows.most_rows
    unused = count * stage.epochs - steps * batch_size
    _print_reductions(training, stage, unused)
    references, scoring = reference_logprobs(scorer, name, stage, examples)
    lengths = _lengths(pairs)
    # now, because it refuses responses without tokens
    before = informativeness.pair_summary(references[:, 0], references[:, 1], *lengths)
    order = problem_order(session.config, count, f"offline/{name}")
    with open_trainer(training) as trainer:
        if trainer.step == 0 and stage.compares:
            trainer.cost = scoring
        few = alerts.few_updates(steps, batch_size, count)
        if few and stage.preferences in session.config.stages:  # else `issues` reported it
            more = "more prompts or pairs_per_prompt, a smaller batch_size, more epochs"
            alerts.report(trainer, [Warned("data", f"{few}. To try: {more}")])
        while trainer.meet_before_update():
            with session.track_cost(trainer.cost):
                drawn = [i for i, _ in draw(order, trainer.step * batch_size, batch_size)]
                trainer.update(batch(pick(pairs, drawn), references[drawn]), {})
            trainer.checkpoint_if_due()
        done = trainer.finish({"pairs": count, "steps": steps, "unused": unused})
        trained = score(scorer, trainer.policy, examples, Cost())
        change = np.mean((trained - references)[:, 0] / lengths[0])
        alerts.report(trainer, alerts.chosen_logps_fell(float(change), stage))
    after = informativeness.pair_summary(trained[:, 0], trained[:, 1], *lengths)
    measures = {"before": before, "after": after}
    if stage.compares:
        measures["margins"] = informativeness.margin_summary(stage.beta, references, trained)
    _write_pairs(session.folders[name] / "pairs.parquet", pairs, references, trained)
    metrics: dict[str, float] = {}
    for part, values in measures.items():
        metrics |= {f"{part}/{key}": value for key, value in values.items()}
    session.tracker.log(name, steps, metrics, kind="diagnosis")
    return replace(done, measures=measures)


def _row_length(session: Session, examples: list[Group], batch_size: int) -> int:
    """Choose the columns of a packed row by the first batches."""
    longest = max(map(_tokens, examples))
    size = min(batch_size, SCORED_AT_ONCE)
    firsts = [examples[i : i + size] for i in range(0, min(len(examples), SCORED_AT_ONCE), size)]
    return choose_row_length(session, longest, firsts)


def _tokens(example: Group) -> int:
    return len(example.prompt_ids) + sum(len(response.token_ids) for response in example.responses)


def issues(session: Session, name: str, stage: Offline) -> Seen:
    """Check a set from other tools, and return it for `run`. Raises ValueError as `read`."""
    if stage.preferences in session.config.stages:
        return Seen([])
    pairs = read(session, stage)
    pair, setting = pairs[0], f"stages.{name}.preferences"
    ids = {"prompt": pair.prompt_ids, "chosen": pair.chosen_ids, "rejected": pair.rejected_ids}
    head = f"{name}: {len(pairs)} pairs of {stage.preferences}; the first of them:"
    example = alerts.write_example(session, head, ids)
    unclosed = sum(session.tokenizer.leaves_open(pair.prompt, pair.chosen) for pair in pairs)
    size = min(stage.batch_size, len(pairs))
    found = alerts.unclosed(setting, "chosen responses", unclosed, len(pairs))
    if few := alerts.few_updates(len(pairs) * stage.epochs // size, size, len(pairs)):
        found.append(
            warning(setting, f"allows {few}", "more pairs, a smaller batch_size, more epochs")
        )
    sides = [(pair.prompt_ids, pair.chosen_ids) for pair in pairs]
    sides += [(pair.prompt_ids, pair.rejected_ids) for pair in pairs]
    found += alerts.position_issues(session, setting, pairs=sides)
    return Seen(found, pairs, example)


def phases(
    session: Session,
    name: str,
    stage: Offline,
    response: int | None = None,
    pairs: int = 0,
    row_length: int = 0,
) -> tuple[Scorer, Training]:
    """Return the scoring of this many pairs in rows of this length, and the training on them; 0:
    the maximum. response: mean tokens of a response, None: the maximum."""
    source = session.config.stages_of(Collect).get(stage.preferences)
    if source is not None and not pairs:
        most = source.prompts * source.pairs_per_prompt
        pairs = min(most, source.max_pairs or most)
    pairs = pairs or SCORED_AT_ONCE
    longest = stage.longest_row(session.config.data.max_prompt_length, session.config.stages)
    row_length = row_length or choose_row_length(session, longest)
    batch_size = min(stage.batch_size, pairs)
    steps = pairs * stage.epochs // batch_size
    rows, scored = (RowShape(row_length, min(n, pairs)) for n in (batch_size, SCORED_AT_ONCE))
    (fullest,) = _fullest(session, RowShape(row_length))
    prompt, side = len(fullest.prompt_ids), len(fullest.responses[0].token_ids)
    mean = min(session.problems.mean_prompt, prompt) + 2 * min(response or side, side)
    share = mean / (prompt + 2 * side)
    training = Training(
        session,
        name,
        _with_warmup_that_fits(stage, steps),
        objective_of(session.compute, stage),
        total=steps,
        per="pairs",
        rows=rows,
        fullest=lambda: _fullest(session, rows),
        share=share,
    )
    scorer = Scorer(
        session,
        scored,
        policy=training.policy,
        fullest=lambda: _fullest(session, scored),
        calls=(stage.compares + 1) * pairs / scored.most_rows * share,
    )
    return scorer, training


def _fullest(session: Session, rows: RowShape) -> list[Group]:
    """Build a batch of pairs that fill the rows."""
    prompt = np.zeros(min(session.config.data.max_prompt_length, rows.length // 3), np.int32)
    side = np.zeros((rows.length - len(prompt)) // 2, np.int32)
    pair = Preference("0", "", "", "", prompt, side, side, 1.0, 0.0)
    return batch([pair] * rows.most_rows, np.zeros((rows.most_rows, 2), np.float32))


def objective_of(compute: Compute, stage: Offline) -> Objective:
    """Return the stage's loss."""
    return objectives.dpo(
        compute, OnlineDPO(**{name: getattr(stage, name) for name in DPOLoss.hints()})
    )


def _lengths(pairs: list[Preference]) -> tuple[np.ndarray, np.ndarray]:
    """Count the tokens of chosen and of rejected responses, int32 [pairs] each."""
    lengths = np.array(
        [(len(pair.chosen_ids), len(pair.rejected_ids)) for pair in pairs], np.int32
    ).reshape(-1, 2)
    return lengths[:, 0], lengths[:, 1]


def _write_pairs(
    path: epath.Path, pairs: list[Preference], references: np.ndarray, trained: np.ndarray
) -> None:
    """Write one row per pair, in order: problem_id, lengths in tokens, and summed log-probs in
    nats.

    references, trained: [pairs, 2] (chosen, rejected), under the policy before and after training.
    """
    chosen_length, rejected_length = _lengths(pairs)
    columns: dict[str, Any] = {
        "problem_id": [pair.problem_id for pair in pairs],
        "chosen_length": chosen_length,
        "rejected_length": rejected_length,
        "ref_chosen": references[:, 0],
        "ref_rejected": references[:, 1],
        "chosen": trained[:, 0],
        "rejected": trained[:, 1],
    }
    processes.on_leader(lambda: write_columns(path, columns))


def _print_reductions(training: Training, stage: Offline, unused: int) -> None:
    """Print which settings few pairs reduce. unused: pairs of the last epoch."""
    say, name = training.session.tracker.say, training.name
    steps, batch_size = training.total, training.rows.most_rows
    if unused or batch_size < stage.batch_size:
        rest = f"; {counted(unused, 'pair')} of the last epoch not used" * bool(unused)
        say(f"{name}: {counted(steps, 'update')} of {counted(batch_size, 'pair')}{rest}")
    before, warmup = stage.optimizer.warmup_steps, training.stage.optimizer.warmup_steps
    if warmup < before:
        say(f"{name}: only {steps} updates, so warmup_steps {before} becomes {warmup}")


def _with_warmup_that_fits(stage: Offline, steps: int) -> Offline:
    """Shorten a warm-up that is too long for the updates."""
    # The number of pairs is known only now: a run must not fail for few of them after its rollouts.
    if stage.optimizer.warmup_steps < steps:
        return stage
    return dataclasses.replace(
        stage, optimizer=dataclasses.replace(stage.optimizer, warmup_steps=steps - 1)
    )


def read(session: Session, stage: Offline) -> list[Preference]:
    """Read the pairs of a collect stage of this run, or of a set from other tools
    (`external_preferences`).

    Raises ValueError for pairs that cannot be trained on, or that are for held-out problems.
    """
    name = stage.preferences
    if name in session.folders:
        pairs = read_preferences(session.folders[name] / "preferences")
    else:
        pairs = external_preferences.read(session, stage)
    check_preferences(name, pairs, session.model_config.vocab_size)
    names = session.problems.held_out_names
    if leaked := sum(met(pair.problem_id, pair.prompt, names) is not None for pair in pairs):
        raise ValueError(
            f"{leaked} of {len(pairs)} pairs are for problems of data.dev or data.test: leave "
            "them out"
        )
    return pairs


def batch(pairs: list[Preference], references: np.ndarray) -> list[Group]:
    """Build a batch of pairs, weighted so that the loss is their mean.

    Both sides of a pair are in one row, after one copy of their prompt. references: summed
    log-probabilities under the reference, [pairs, 2].
    """
    groups = []
    for pair, reference, weight in zip(pairs, references, dpo_weights(len(pairs)), strict=True):
        responses = []
        for ids, nats in zip((pair.chosen_ids, pair.rejected_ids), reference, strict=True):
            sequence = {"reference": float(nats), "weight": float(weight)}
            responses.append(Response(ids, {}, sequence))
        groups.append(Group(pair.prompt_ids, responses, keep_together=True))
    return groups


def reference_logprobs(
    scorer: Scorer, name: str, stage: Offline, examples: list[Group]
) -> tuple[np.ndarray, Cost]:
    """Compute summed log-probabilities of both responses under the starting policy, float32
    [examples, 2].

    Returns them with their cost. Both are read back if an earlier start wrote them for the same
    tokens.
    """
    session = scorer.session
    tokens = [
        [group.prompt_ids, *(side.token_ids for side in group.responses)] for group in examples
    ]
    same = storage.fingerprint(tokens)
    file = session.folders[name] / "reference.json"
    if on_disk(session.writer, [file]):
        record = storage.read_json(file)
        if record["tokens"] == same:
            return np.asarray(record["logprobs"], np.float32), Cost(**record["cost"])
    cost = Cost()
    with session.track_cost(cost):
        logprobs = score(scorer, load_policy(session, stage.policy), examples, cost)
    record = {"tokens": same, "logprobs": logprobs, "cost": dataclasses.asdict(cost)}
    processes.on_leader(lambda: storage.write_json(file, record))
    return logprobs, cost


def score(scorer: Scorer, params: Decoder, examples: list[Group], cost: Cost) -> np.ndarray:
    """Compute summed log-probabilities of both responses under a policy, float32 [examples, 2]."""
    scored: list[np.ndarray] = []
    size = scorer.rows.most_rows
    for first in range(0, len(examples), size):
        processes.check_stop_together()
        processes.note_progress(f"scoring {len(examples)} examples from {first}")
        logprobs = scorer(params, examples[first : first + size], cost)
        sides = itertools.chain.from_iterable(logprobs)
        scored += [side.sum(dtype=np.float32) for side in sides]
    return np.array(scored, np.float32).reshape(-1, 2)
