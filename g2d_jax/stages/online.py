"""Online RL: rollout, score, group, loss, update. sync_every limits the age of the sampling policy.

The warm-up is this stage for K steps. Full GRPO and DPO on the policy's own rollouts use it, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import assert_never

import numpy as np

from g2d_jax.config import Online
from g2d_jax.config.policy_name import INIT
from g2d_jax.config.section import warning
from g2d_jax.data.packing import Group, Response
from g2d_jax.models import lora
from g2d_jax.models.decoder import Decoder
from g2d_jax.records import Problem, Rollout, Score, ScoredRollout, Verdict, indices_by_task, pick
from g2d_jax.rollouts import batches as grouping
from g2d_jax.rollouts import usage
from g2d_jax.rollouts.ahead import Ahead, samples_ahead, schedule, staleness
from g2d_jax.rollouts.batches import Batch, fill
from g2d_jax.rollouts.external import ExternalBatches, external_batches
from g2d_jax.rollouts.generate import Policy
from g2d_jax.rollouts.groups import (
    Draws,
    Groups,
    correct,
    count_rollouts,
    describe,
    draw_once,
    log_samples,
    problems_of,
    rewards,
    rows_of,
)
from g2d_jax.rollouts.logprobs import (
    FIXED,
    PRESENT,
    OtherLogprobs,
    logprob_scorer_of,
    other_logprobs,
    scored_under,
)
from g2d_jax.rollouts.store import concat_rounds, gone, shard_path
from g2d_jax.rollouts.window import StageSampling, WindowBatches, group, sample_window
from g2d_jax.rollouts.workload import Workload, workload_of
from g2d_jax.runtime import memory, processes
from g2d_jax.session.answers import SHOWN, show_problem
from g2d_jax.session.extra_state import Cursor
from g2d_jax.session.policies import load_reference, reference_shapes
from g2d_jax.session.row_shapes import RowShape, choose_row_length
from g2d_jax.session.session import Session, StopRun
from g2d_jax.session.stage_result import Outcome, Stop
from g2d_jax.session.trainer import Trainer, open_trainer
from g2d_jax.session.training_programs import Scorer, Training
from g2d_jax.session.windows import window_at
from g2d_jax.stages import Seen, alerts, early_stopping
from g2d_jax.stages.causes import LONGER, Cause, cause_of
from g2d_jax.stages.collect import write_rollout
from g2d_jax.training import objectives
from g2d_jax.training.objectives import Compute, Objective

PATIENCE = 50  # steps in a row without any reward signal, after which a stage stops


@dataclass(frozen=True)
class Source:
    """The source of a stage's rollouts: its own sampling, a server that is a window ahead of its
    updates (`ahead`), or a dump."""

    sampling: StageSampling | None
    ahead: Ahead | None = None
    dump: ExternalBatches | None = None


@dataclass(frozen=True)
class TrainBatch:
    """The batch of an update.

    draws, groups: all its rollouts, with scores. batch: the part to train on, whose own groups
    (packing.Group) have the loss's weights in place of scores. costs: of its rounds, and of other
    policies' log-probabilities.
    """

    draws: Draws
    groups: Groups
    batch: Batch
    costs: Sequence[Mapping[str, float]]


def run(session: Session, name: str, stage: Online, data: ExternalBatches | None = None) -> Outcome:
    """Do stage.steps updates; return the outcome. data: a dump as `issues` read it, None reads it
    now."""
    dump = data or external_batches(session, name, stage)
    *_, training = phases(session, name, stage)
    scorer = logprob_scorer_of(session, stage, training.rows)
    # The fixed reference stays loaded from window to window, because reading it takes long.
    fixed: dict[str, Decoder] = {}
    with open_trainer(training) as trainer, _opened(trainer, stage, dump) as source:
        _require_rollouts(trainer)
        state = trainer.extra_state
        ended = early_stopping.ends(trainer, stage)  # perhaps in an earlier start
        if source.ahead is not None and not ended:
            source.ahead.resume()
        batches: WindowBatches | None = None
        generation: dict[str, float] = {}
        cursor = state.cursor
        # Synchronises with the other processes, the last time, too; False when all updates are
        # done.
        while trainer.meet_before_update() and not ended:
            window = window_at(trainer.step, stage)
            if batches is None or batches.window != window:
                batches = WindowBatches(session, session.folders[name], window)
            # A synchronisation: all batches of the window are sampled now, or a server has sampled
            # them ahead. Their cost is stored with them, and counts when a batch is first trained
            # on.
            if trainer.step == window.first_update:
                cursor, generation = _sample_window(trainer, stage, source, batches)
                _add_logprobs(trainer, stage, scorer, fixed, batches)
            with session.track_cost(trainer.cost):
                train_batch = _train_batch(trainer, stage, batches)
                _stop_without_signal(trainer, stage, train_batch)
                if window.is_new(trainer.step):
                    _count(trainer, stage, source, train_batch)
                metrics = {**_describe(train_batch), **_staleness(trainer, stage, train_batch)}
                metrics |= train_batch.batch.metrics
                metrics |= generation  # of the window, with the first of its updates
                generation = {}
                if not trainer.step and stage.policy == INIT and dump is None:
                    _show_first(session, train_batch)
                # Launches this update, and logs the previous one, whose metrics are ready.
                trainer.update(train_batch.batch.groups, metrics)
            # Only now: a run killed earlier must draw the window's prompts again.
            state.cursor = cursor
            # Before the checkpoint, which stores the alerts and the end that these record.
            cause = partial(_cause, trainer, stage, train_batch)
            alerts.watch(trainer, stage, metrics, cause)
            ended = early_stopping.ends(trainer, stage)
            trainer.checkpoint_if_due()
            if trainer.step % max(stage.steps // 4, 1) == 0:
                _log_samples(trainer, train_batch)
        return _outcome(trainer, stage, source)


def _outcome(trainer: Trainer, stage: Online, source: Source) -> Outcome:
    """Finish training; return what was done."""
    state, has_server = trainer.extra_state, trainer.session.sampling.server is not None
    done = trainer.finish({"steps": trainer.step, **_counts(trainer, stage)})
    spent, seconds = usage.add_up([state.usage]), trainer.cost.seconds
    return replace(
        done,
        costs=state.costs,
        generation=usage.summary(spent, seconds, has_server, source.ahead is not None),
        stop=state.ended or Stop(),
    )


@contextmanager
def _opened(trainer: Trainer, stage: Online, dump: ExternalBatches | None) -> Iterator[Source]:
    """Yield the source of the stage's rollouts; end sampling ahead on exit."""
    session, name = trainer.session, trainer.name
    if dump is not None or not stage.steps:
        yield Source(None, dump=dump)
        return
    sampling = StageSampling.of(session, name, stage)
    if not samples_ahead(session, stage):
        yield Source(sampling)
        return
    session.tracker.say(schedule(name, stage))
    with closing(Ahead(trainer, sampling)) as ahead:
        yield Source(sampling, ahead)


def _require_rollouts(trainer: Trainer) -> None:
    """Raise ValueError for rollouts that an earlier start trained on, and that are gone."""
    folder = trainer.session.folders[trainer.name]

    def missing() -> list[str]:
        there = {file.name for file in (folder / "rollouts").glob("*.parquet")}
        needed = []
        for number, rounds in enumerate(trainer.extra_state.rounds):
            needed += [shard_path(folder, number, extra) for extra in range(rounds)]
        return [str(file) for file in needed if file.name not in there]

    for file in processes.on_leader(missing):
        raise gone(file)


def _sample_window(
    trainer: Trainer, stage: Online, source: Source, batches: WindowBatches
) -> tuple[Cursor, dict[str, float]]:
    """Draw a window's prompts, and sample and score responses with the current policy, or read them
    from a dump; return the position after the prompts, and metrics."""
    state, window = trainer.extra_state, batches.window
    if source.dump is not None:  # its windows have one batch: the config's check ensures it
        number = window.first_batch
        shard = shard_path(trainer.session.folders[trainer.name], number)
        batches.add(number, source.dump.batch(number, shard))
        return state.cursor, {}
    assert source.sampling is not None  # of a source without a dump
    ahead, plan = source.ahead, None
    if ahead is not None:
        plan = ahead.planned(window)

    def policy() -> Policy:
        present = trainer.finished_policy()
        if ahead is not None:
            return ahead.policy(plan)
        with trainer.session.track_cost(trainer.cost):
            params = trainer.session.sampling.engine.to_sampler_params(present)
        return Policy(params, f"{trainer.name}@{trainer.step}")

    cursor, costs = sample_window(source.sampling, batches, state, policy, plan)
    if ahead is not None:
        ahead.begin_next(window, cursor)
    rates = usage.rates(usage.add_up(costs), trainer.session.sampling.server is not None)
    metrics = {f"generation/{name}": value for name, value in rates.items()}
    if stage.filter.targets:
        problems = len(source.sampling.prompts.train)
        metrics |= {
            "curriculum/retired": state.history.share_retired(stage.filter, problems),
            "curriculum/skipped": float(cursor.skipped),
            "curriculum/saved": cursor.skipped / (cursor.drawn + cursor.skipped),
        }
    return cursor, metrics


def _add_logprobs(
    trainer: Trainer,
    stage: Online,
    scorer: Scorer,
    fixed: dict[str, Decoder],
    batches: WindowBatches,
) -> None:
    """Add the log-probabilities under other policies to all batches of a window, if the loss needs
    any. The next update overwrites the policy that sampled.

    fixed: `FIXED` -> the reference, once it is loaded.
    """
    needed, window = scored_under(stage), batches.window
    if not needed:
        return
    for number in window.batch_numbers:
        processes.check_stop_together()
        if batches.has_logprobs(number):
            continue
        if FIXED in needed.values() and not fixed:
            fixed[FIXED] = load_reference(trainer.session, stage.policy)
        policies = {**fixed, PRESENT: trainer.policy}
        groups = group(trainer.session, stage, batches.rounds(number)).groups
        batches.add_logprobs(number, other_logprobs(scorer, needed, policies, groups))
    if window.first_update + window.updates == stage.steps:
        fixed.clear()  # its memory is free for the last updates


def _train_batch(trainer: Trainer, stage: Online, batches: WindowBatches) -> TrainBatch:
    """Return the batch of the next update."""
    number = batches.window.batch_of(trainer.step)
    rounds = batches.rounds(number)
    others = OtherLogprobs()
    if scored_under(stage):
        others = batches.logprobs(number)
    batch = group(trainer.session, stage, rounds)
    filled = fill(stage, batch.groups, others.reference, others.trainer)
    costs = [*(sampled.cost for sampled in rounds), others.cost]
    return TrainBatch(*concat_rounds(rounds), replace(batch, groups=filled), costs)


def _count(trainer: Trainer, stage: Online, source: Source, train_batch: TrainBatch) -> None:
    """Add the cost and counts of a new batch to the stage's, and its rewards to the history by
    which a curriculum chooses the next prompts."""
    cost, state, groups = trainer.cost, trainer.extra_state, train_batch.groups
    state.rounds.append(len(train_batch.costs) - 1)
    for part in train_batch.costs:
        cost.add(part)
    state.usage = usage.add_up([state.usage, *train_batch.costs])
    counts = {"prompts": len(groups)}
    if stage.is_preference_loss:
        metrics = train_batch.batch.metrics
        counts["pairs"] = int(metrics["pairs/prompts"])
        counts["skipped"] = int(metrics["pairs/skipped"])
    state.counts = {name: state.counts.get(name, 0) + number for name, number in counts.items()}
    if source.sampling is None:  # the tokens of a dump cost this run nothing
        return
    count_rollouts(trainer.session.model_config, cost, groups)
    if stage.filter.targets:
        index_of = source.sampling.prompts.index_of
        outcomes = zip(train_batch.draws, rewards(groups), correct(groups), strict=True)
        for (problem, _), values, verdicts in outcomes:
            state.history.update(index_of[problem.id], values, verdicts)


def _counts(trainer: Trainer, stage: Online) -> dict[str, int]:
    """Return counts for the record: of rollouts, of prompts, and of the use of prompts."""
    names = ["prompts"]
    if stage.is_preference_loss:
        names += ["pairs", "skipped"]
    counts = {**dict.fromkeys(names, 0), **trainer.extra_state.counts}
    if stage.filter.targets:
        counts["left_out"] = trainer.extra_state.cursor.skipped
    rollouts = counts["prompts"] * stage.num_generations
    problems = len(trainer.session.problems.train)
    return {"rollouts": rollouts, **counts, "train_problems": problems}


def _staleness(trainer: Trainer, stage: Online, train_batch: TrainBatch) -> dict[str, float]:
    """Return the age of a batch at this update as a metric, {} if it is always 0."""
    if not stage.samples or stage.sync_every == 1:
        return {}
    policies = [row.policy for row in rows_of(train_batch.groups)]
    return {"staleness": staleness(trainer.step, policies)}


def issues(session: Session, name: str, stage: Online) -> Seen:
    """Check the number of problems, the lengths of responses, or a dump, which `run` reuses. Raises
    ValueError as the run would for them."""
    row_shape(session, stage)
    external = external_batches(session, name, stage)
    if external is None:
        count = -(-stage.steps // stage.num_iterations)
        problems, size = len(session.problems.train), stage.prompts_per_step
        limit = f"stages.{name}.sampling.max_new_tokens"
        few = f"stages.{name}.prompts_per_step"
        return Seen(
            [
                *alerts.too_few(few, "problems", problems, size, count),
                *alerts.position_issues(session, limit, stage.sampling),
            ]
        )
    example = write_rollout(session, name, stage.dump.path, external.groups)
    setting = f"stages.{name}.dump.path"
    found = alerts.position_issues(session, setting, pairs=external.pairs)
    if external.unweighed:
        text = (
            f"has {external.unweighed} responses without logprobs, so GRPO treats them as sampled by "
            "the current policy, at a ratio of 1"
        )
        remedy = 'give logprobs and set clip.importance_cap=2, or loss="dpo", which needs none'
        found.append(warning(setting, text, remedy))
    return Seen(found, external, example)


def phases(
    session: Session, name: str, stage: Online, response: int | None = None
) -> tuple[*tuple[Workload | Scorer, ...], Training]:
    """List the stage's sampling, the log-probabilities that its loss needs, and its training.
    response: mean tokens of a response, None: the most."""
    most = stage.sampling.max_new_tokens
    longest = session.config.data.max_prompt_length + most
    share = (session.problems.mean_prompt + min(response or most, most)) / longest
    policies = scored_under(stage).values()
    reference: tuple[Decoder, ...] = ()
    if FIXED in policies:  # all policies of a run share the frozen parameters
        reference = lora.partition(reference_shapes(session))[:1]
    training = Training(
        session,
        name,
        stage,
        objective_of(session.compute, stage),
        total=stage.steps,
        per="pairs" if stage.is_preference_loss else "tokens",
        rows=row_shape(session, stage),
        fullest=partial(_longest_batch, session, stage, is_filled=True),
        share=share,
        resident=reference,
    )
    found: list[Workload | Scorer] = []
    policy = training.state, training.frozen
    living = *policy, *reference
    if stage.samples and stage.steps:
        workload = workload_of(session, name, stage, response)
        found.append(replace(workload, policy=training.policy, living=living))
    scorer = replace(
        logprob_scorer_of(session, stage, training.rows),
        policy=training.policy,
        fullest=partial(_longest_batch, session, stage),
        calls=stage.steps / stage.num_iterations * share,
        resident=living,
    )
    for params in reference:
        scored = lora.combine(params, training.frozen)
        found.append(replace(scorer, policy=scored, is_reference=True, resident=policy))
    if PRESENT in policies:
        found.append(scorer)
    return *found, training


def _longest_batch(session: Session, stage: Online, is_filled: bool = False) -> list[Group]:
    """Build a batch with the stage's own code: prompts and responses of the greatest length, half
    of them correct. is_filled: with the log-probabilities of other policies."""
    length = stage.sampling.max_new_tokens
    prompt = np.zeros(session.config.data.max_prompt_length, np.int32)
    tokens = np.zeros(length, np.int32)
    floats = np.zeros(length, np.float32)
    rows = []
    for i in range(stage.num_generations):
        verdict = (Verdict.CORRECT, Verdict.INCORRECT)[i % 2]
        rollout = Rollout("", 0, i, prompt, tokens, floats, floats, "stop")
        # responses of equal text make one pair
        rows.append(ScoredRollout(rollout, str(i), Score(verdict.accuracy, verdict)))
    draws = draw_once([Problem(str(i), "", "0") for i in range(stage.prompts_per_step)])
    responses = [rows] * len(draws)
    groups = grouping.make(session.config.seed, stage, draws, responses, {"main": True}).groups
    if not is_filled:
        return groups
    others = np.zeros(length * sum(len(group.responses) for group in groups), np.float32)
    return fill(stage, groups, **dict.fromkeys(scored_under(stage), others))


def objective_of(compute: Compute, stage: Online) -> Objective:
    """Return the stage's loss. Raises AssertionError for a loss without an objective."""
    settings = {**stage.clip.to_dict(), "entropy_coef": stage.entropy_coef}
    settings["cispo"] = stage.loss_type == "cispo"
    match stage.loss:
        case "grpo":
            return objectives.grpo(
                compute, temperature=stage.sampling.temperature, beta=stage.beta, **settings
            )
        case "raft":
            return objectives.raft(compute, entropy_coef=stage.entropy_coef)
        case "dpo":
            return objectives.dpo(compute, stage.dpo, entropy_coef=stage.entropy_coef)
        case "group_dpo":
            return objectives.group_dpo(
                compute, stage.dpo, grpo_coef=stage.grpo_coef, kl_beta=stage.beta, **settings
            )
        case _:
            assert_never(stage.loss)


def row_shape(session: Session, stage: Online) -> RowShape:
    """Choose packed rows for responses of all lengths, up to the greatest.

    Lengths are not known ahead, and rows for the longest responses alone would be half empty after
    shorter ones. With GroupDPO a row holds at least all responses of a prompt.
    """
    most = stage.sampling.max_new_tokens
    keep_together = stage.is_preference_loss
    samples = stage.compared
    max_responses = 16
    if stage.loss == "group_dpo":
        max_responses = max(max_responses, samples + samples % 2)
    prompts = session.problems.prompt_lengths[: min(stage.prompts_per_step, 32)]
    # Multiples of the golden ratio, modulo 1: any number of them is spread evenly over 0 to 1, with
    # short and long ones mixed.
    shares = np.arange(1, len(prompts) * samples + 1) * 0.618034 % 1

    def batch(lengths: np.ndarray) -> list[Group]:
        groups = []
        for prompt, own in zip(prompts, lengths.reshape(-1, samples), strict=True):
            responses = [Response(np.zeros(length, np.int32)) for length in own]
            groups.append(Group(np.zeros(prompt, np.int32), responses, keep_together=keep_together))
        return groups

    likely = [
        batch(np.full(shares.shape, most)),
        batch(np.maximum(np.ceil(shares * most), 1).astype(int)),
    ]
    most_rows = stage.prompts_per_step * (1 if keep_together else stage.num_generations)
    longest = stage.longest_row(session.config.data.max_prompt_length, session.config.stages)
    length = choose_row_length(session, longest, likely, max_responses_per_row=max_responses)
    return RowShape(length, most_rows, max_responses)


def _describe(train_batch: TrainBatch) -> dict[str, float]:
    """Compute metrics of a batch's groups, and of each task's where there are several."""
    metrics = {
        **describe(train_batch.groups),
        "frac_signal": float(np.mean(train_batch.batch.has_signal)),
    }
    by_task = indices_by_task(problems_of(train_batch.draws))
    if len(by_task) > 1:
        for task, indices in by_task.items():
            for key, value in describe(pick(train_batch.groups, indices)).items():
                metrics[f"tasks/{task}/{key}"] = value
    return metrics


def _show_first(session: Session, train_batch: TrainBatch) -> None:
    """Show three prompts, an answer of the untrained model to each with its grade, and the peak of
    memory so far."""
    say = session.tracker.say
    for (problem, _), (row, *_) in zip(
        train_batch.draws[:SHOWN], train_batch.groups[:SHOWN], strict=True
    ):
        show_problem(session, problem)
        grade = row.score.verdict.value
        if row.score.reward is not None:
            grade = f"reward {row.score.reward:g}, {grade}"
        head = f"  an answer of {row.rollout.length} tokens: {grade}"
        say("\n  | ".join([head, *row.text.splitlines()]))
    device = session.mesh.local_devices[0].memory_stats() or {}
    sizes = {
        "host": (session.tracker.peak and session.tracker.peak.read(), memory.limit()),
        "device": (device.get("peak_bytes_in_use"), device.get("bytes_limit")),
    }
    for where, (size, limit) in sizes.items():
        if size and limit:
            say(
                f"memory before the first update, {where}: {size / memory.GIB:.1f} of {limit / memory.GIB:.1f} GiB"
            )


def _log_samples(trainer: Trainer, train_batch: TrainBatch) -> None:
    session, sampled = trainer.session, (train_batch.draws, train_batch.groups)
    log_samples(session.tracker, session.tokenizer, trainer.name, trainer.step, *sampled)


def _stop_without_signal(trainer: Trainer, stage: Online, train_batch: TrainBatch) -> None:
    """Raise StopRun after `PATIENCE` steps in a row without reward signal; save the policy
    first."""
    state = trainer.extra_state
    if train_batch.batch.has_signal.any():
        state.without_signal = 0
        return
    state.without_signal += 1
    if state.without_signal < PATIENCE:
        return
    trainer.save_and_pin()
    _log_samples(trainer, train_batch)
    cause = _cause(trainer, stage, train_batch)
    raise StopRun(
        f"{trainer.name}: no reward signal for {state.without_signal} steps in a row; "
        f"{cause.symptom}. To try: {cause.remedy}. "
        f"The policy so far is saved, step {trainer.step} in {trainer.session.folders[trainer.name]}"
    )


def _cause(trainer: Trainer, stage: Online, train_batch: TrainBatch) -> Cause:
    rows = rows_of(train_batch.groups)
    if stage.mask_truncated and all(row.rollout.stop_reason == "length" for row in rows):
        return Cause(
            "every response was cut at max_new_tokens, and mask_truncated leaves these out", LONGER
        )
    return cause_of(
        problems_of(train_batch.draws),
        train_batch.groups,
        trainer.session.config.all_tasks,
        stage.samples,
    )
