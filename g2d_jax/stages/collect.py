"""The collect stage: a frozen policy's rollouts, scored, and the static preference dataset made
from them.

rollouts ─► difficulty window ─► pairs on offer ─► those that are kept ─► preferences, informativeness
   ├ "sample"     sampled here, from stage.policy
   ├ "archive"    sampled by an online stage on its way to stage.policy
   ├ a stage      of another collect stage of the run
   └ a dump       from another tool, see rollouts/external.py
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from etils import epath

from g2d_jax.config import Collect, Issue, Online
from g2d_jax.config.policy_name import PolicyName
from g2d_jax.config.section import warning
from g2d_jax.config.stages.collect import rollout_origin
from g2d_jax.data.order import draw
from g2d_jax.data.preferences import is_correct, pairs_of, select_pairs, to_preference
from g2d_jax.data.tokenizer import CHAT_TEMPLATE
from g2d_jax.records import Preference, Problem, Prompt, ScoredRollout, Verdict, differ, pick
from g2d_jax.rollouts.external import ExternalGroups, external_groups, read_groups
from g2d_jax.rollouts.generate import Policy, sampled_batches
from g2d_jax.rollouts.groups import Draws, Groups, describe, problems_of, rewards
from g2d_jax.rollouts.store import Sampled, concat_rounds, grouped, read_rounds
from g2d_jax.rollouts.workload import Workload, workload_of
from g2d_jax.runtime import processes, storage
from g2d_jax.runtime.tables import read_rollouts, write_columns, write_preferences
from g2d_jax.session import stage_result
from g2d_jax.session.policies import load_policy
from g2d_jax.session.problems import count_drawn, train_order
from g2d_jax.session.session import Session, StopRun
from g2d_jax.session.stage_result import Cost, Outcome, Warned
from g2d_jax.session.windows import window_at
from g2d_jax.stages import Seen, alerts
from g2d_jax.stages.causes import Cause, cause_of
from g2d_jax.study import informativeness

Pairs = list[list[tuple[int, int]]]  # (chosen, rejected) of each group
FATES = ("mixed", "all_correct", "all_incorrect", "all_equal", "unscorable", "outside_window")
"""Possible outcomes of a prompt; all but the first give no pairs."""


def run(session: Session, name: str, stage: Collect) -> Outcome:
    """Collect rollouts and preference pairs; return the outcome. Raises StopRun without any
    pair."""
    folder = session.folders[name]
    cost = Cost()
    with session.track_cost(cost):
        draws, groups = rollouts_of(session, name, cost)
        pairs, counts = choose_pairs(session, stage, draws, groups)
        measures = _measure(folder, groups, pairs)
    described = describe(groups)
    # unknown for a file
    limit = sampler_settings(session, name).get("max_new_tokens")
    cause = _cause(session, stage, counts, draws, groups)
    of_samples = alerts.sampled(described, limit, lambda: cause)
    if not counts["pairs"]:
        raise StopRun(_no_pairs(name, counts, groups, cause))
    missing = counts["pairs_missing"]
    if missing:
        session.tracker.say(
            f"{name}: the rollouts have {missing} pairs fewer than max_pairs, {stage.max_pairs}: "
            "all are kept"
        )
    preferences = to_preferences([shown(session, problem) for problem, _ in draws], groups, pairs)
    _write(folder / "preferences", preferences, _provenance(session, name, stage, counts))
    template = session.tokenizer.template.pinned
    if template:  # other libraries render the pairs' messages with it as the policy saw them
        processes.on_leader(lambda: storage.write_bytes(folder / CHAT_TEMPLATE, template.encode()))
    warnings: list[Warned] = []
    alerts.say(session, name, 0, [*alerts.few_pairs(counts, cause), *of_samples], warnings)
    logged = dict(described)
    for key, value in counts.items():
        logged[f"pairs/{key}"] = float(value)
    session.tracker.log(name, 0, logged)
    return Outcome(
        cost=cost,
        counts=counts,
        measures={**measures, "rollouts": described},
        warnings=warnings,
    )


def issues(session: Session, name: str, stage: Collect) -> Seen:
    """Check the number and the lengths of prompts, or a dump. Raises ValueError for a dump as
    `run`."""
    if stage.samples:
        return Seen(_sampling_issues(session, name, stage))
    if not stage.dump.path:
        return Seen([])
    groups = read_groups(session, stage.dump)
    example = write_rollout(session, name, stage.dump.path, groups)
    rows = (row.rollout for row in itertools.chain.from_iterable(groups))
    pairs = [(rollout.prompt_ids, rollout.token_ids) for rollout in rows]
    found = alerts.position_issues(session, f"stages.{name}.dump.path", pairs=pairs)
    return Seen(found, example=example)


def write_rollout(session: Session, name: str, path: str, groups: ExternalGroups) -> str:
    """Format the first of the rollouts from another tool, as it is trained on."""
    first = groups[0][0].rollout
    count = sum(map(len, groups))
    head = f"{name}: {count} responses to {len(groups)} prompts of {path}; the first of them:"
    parts = {"prompt": first.prompt_ids, "completion": first.token_ids}
    return alerts.write_example(session, head, parts)


def _sampling_issues(session: Session, name: str, stage: Collect) -> list[Issue]:
    most = count_drawn(session.config, session.problems.train)
    found: list[Issue] = []
    if stage.prompts > most:
        text = f"is {stage.prompts}, but there are only {most} training problems: all are used"
        found.append(warning(f"stages.{name}.prompts", text))
    return found + alerts.position_issues(
        session, f"stages.{name}.sampling.max_new_tokens", stage.sampling
    )


def phases(
    session: Session, name: str, stage: Collect, response: int | None = None
) -> list[Workload]:
    """List the stage's sampling, if it samples. response: mean tokens of a response, None: the
    most."""
    if not stage.samples:
        return []
    return [workload_of(session, name, stage, response)]


def rollouts_of(session: Session, name: str, cost: Cost) -> tuple[Draws, Groups]:
    """Return the draws and groups of a collect stage's rollouts; add the cost of sampling them now.

    The rollouts of another stage, an archive or a file cost nothing. Raises StopRun for an empty
    archive, ValueError for rollouts on disk that are not of this run's problems.
    """
    origin = rollout_origin(name, session.config.stages)
    stage = session.config.stage(origin, Collect)
    folder = session.folders[origin] / "rollouts"
    if stage.rollouts == "archive":
        return _archive(session, stage)
    if stage.dump.path:
        return external_groups(session, stage.dump, folder / "external.parquet")
    if origin == name and not stage_result.read(session.folders[name]):
        return _sample(session, name, stage, cost)
    draws = _draws(session, origin, stage)
    return draws, grouped(read_rollouts(folder), draws, stage.num_generations)


def _draws(session: Session, name: str, stage: Collect) -> Draws:
    """Draw the first stage.prompts of a seeded order of the training problems, or as many as there
    are."""
    train = session.problems.train
    order = train_order(session.config, train, f"collect/{name}")
    most = count_drawn(session.config, train)
    return [(train[index], visit) for index, visit in draw(order, 0, min(stage.prompts, most))]


def _sample(session: Session, name: str, stage: Collect, cost: Cost) -> tuple[Draws, Groups]:
    """Sample the parts, several in a call; read back a call whose parts are all on disk."""
    draws = _draws(session, name, stage)
    folder = session.folders[name] / "rollouts"
    parts = []
    for number, first in enumerate(range(0, len(draws), stage.part)):
        part = draws[first : first + stage.part]
        parts.append((part, folder / f"part-{number:05d}.parquet"))

    def policy() -> Policy:
        params = session.sampling.engine.to_sampler_params(load_policy(session, stage.policy))
        return Policy(params, stage.policy)

    workload = workload_of(session, name, stage)
    with session.tracker.progress(name, len(draws)) as bar:
        sampled = sampled_batches(session, policy, parts, workload, cost=cost, bar=bar)
    return concat_rounds(sampled)


def _archive(session: Session, stage: Collect) -> tuple[Draws, Groups]:
    """Return the draws and groups of an online stage on its way to the policy, without sampling."""
    policy = PolicyName.parse(stage.policy)
    settings = session.config.stage(policy.stage, Online)
    done = _steps_done(session, policy.stage) if policy.number is None else policy.number
    folder, problems = session.folders[policy.stage], session.problems.train_by_id
    rounds: list[Sampled] = []
    for number in sorted({window_at(step, settings).batch_of(step) for step in range(done)}):
        rounds += read_rounds(folder, number, problems, session.writer)
    if not rounds:
        raise StopRun(
            f"{stage.policy} ended after 0 steps, so there is no archive: collect with "
            'rollouts="sample"'
        )
    return concat_rounds(rounds)


def _steps_done(session: Session, source: str) -> int:
    """Count the steps an online stage did, which may be fewer than its settings allow."""
    result = stage_result.read(session.folders[source])
    assert result is not None  # a stage runs after those it reads
    return result.counts["steps"]


def sampler_settings(session: Session, name: str) -> dict[str, Any]:
    """Return the settings that the rollouts were sampled with; of a dump only its path is known."""
    config = session.config
    source = rollout_origin(name, config.stages)
    collect = config.stage(source, Collect)
    stage: Collect | Online = collect
    if collect.rollouts == "archive":
        source = PolicyName.parse(stage.policy).stage
        stage = config.stage(source, Online)
    if stage.dump.path:
        return {"file": stage.dump.path}
    return {
        **stage.sampling.to_dict(),
        "num_generations": stage.num_generations,
        "purpose": f"{stage.kind}/{source}",
    }


def _write(folder: epath.Path, preferences: list[Preference], provenance: dict[str, Any]) -> None:
    """Write the dataset: each process writes one part, consecutive pairs; then the leader writes
    the index.

    In the order of the parts' names it is the same for any number of processes.
    """

    def clear() -> None:  # files of a killed run with other processes; the index first
        (folder / "_manifest.json").unlink(missing_ok=True)
        for part in folder.glob("*.parquet"):
            part.unlink()

    processes.on_leader(clear)
    shares = np.array_split(np.arange(len(preferences)), processes.count())
    parts = {}
    for number, share in enumerate(shares):
        if len(share):
            parts[f"part-{number:05d}.parquet"] = len(share)
    own = shares[processes.index()]
    with processes.barrier():
        if len(own):
            write_preferences(
                folder / f"part-{processes.index():05d}.parquet", pick(preferences, own)
            )
    # The index comes last: its existence means that all parts are there. The underscore lets pandas and
    # pyarrow read the folder: they take every other file in it for Parquet.
    processes.on_leader(
        lambda: storage.write_json(folder / "_manifest.json", {**provenance, "parts": parts})
    )


def choose_pairs(
    session: Session, stage: Collect, draws: Draws, groups: Groups
) -> tuple[Pairs, dict[str, int]]:
    """Choose the pairs of all groups; return them with the counts of prompts, rollouts and
    pairs."""
    offered, counts = _offered(session, stage, draws, groups)
    pairs = _selected(session, stage, draws, groups, offered)
    return pairs, {**counts, **_count_pairs(stage, offered, pairs)}


def _offered(
    session: Session, stage: Collect, draws: Draws, groups: Groups
) -> tuple[Pairs, dict[str, int]]:
    """Apply the difficulty window and the pair rule; count the outcome of every prompt."""
    counts: Counter[str] = Counter({"prompts": len(groups), "rollouts": sum(map(len, groups))})
    offered: Pairs = []
    for (problem, visit), group in zip(draws, groups, strict=True):
        for row in group:
            counts["unscorable_rollouts"] += row.score.reward is None
            counts["timeout_rollouts"] += row.score.verdict is Verdict.TIMEOUT
        verifiable = session.config.verifiable[problem.task]
        fate = (
            _fate(group, stage.min_pass_rate, stage.max_pass_rate)
            if verifiable
            else _ranked_fate(group)
        )
        counts[fate] += 1
        limit = stage.pairs_per_prompt if fate == "mixed" else 0
        offered.append(
            pairs_of(session.config.seed, problem.id, visit, group, limit, verifiable=verifiable)
        )
    for fate in FATES:
        counts.setdefault(fate, 0)
    return offered, dict(counts)


def _selected(
    session: Session, stage: Collect, draws: Draws, groups: Groups, offered: Pairs
) -> Pairs:
    """Select stage.max_pairs of the pairs by stage.select. A prompt's uncertainty is the mean
    entropy of its tokens."""
    entropies = informativeness.prompts(informativeness.responses(groups))["entropy"]
    prompts = []
    for (problem, visit), nats in zip(draws, entropies, strict=True):
        prompts.append((problem.id, visit, float(nats)))
    selected = select_pairs(
        session.config.seed, prompts, list(map(len, offered)), stage.select, stage.max_pairs
    )
    return list(map(pick, offered, selected))


def _count_pairs(stage: Collect, offered: Pairs, pairs: Pairs) -> dict[str, int]:
    available = sum(map(len, offered))
    missing = max((stage.max_pairs or 0) - available, 0)
    return {"pairs": sum(map(len, pairs)), "pairs_available": available, "pairs_missing": missing}


def to_preferences(prompts: Sequence[Prompt], groups: Groups, pairs: Pairs) -> list[Preference]:
    """Build the records of all pairs. prompts: as the model read them, by group."""
    preferences: list[Preference] = []
    for prompt, group, own in zip(prompts, groups, pairs, strict=True):
        preferences += map(partial(to_preference, prompt, group), own)
    return preferences


def _measure(folder: epath.Path, groups: Groups, pairs: Pairs) -> dict[str, dict[str, float]]:
    """Write the informativeness of rollouts and chosen pairs by prompt; return that of all:
    "informativeness" of the rollouts, "pairs" of those chosen.

    Metrics that need log-probabilities are NaN for rollouts without them.
    """
    rows = informativeness.responses(groups)
    table = informativeness.prompts(rows)
    counts = np.array(list(map(len, pairs)), np.int64)
    columns = {name: values.to_numpy() for name, values in table.items()}
    columns |= {"problem_id": table["problem_id"].tolist(), "pairs": counts}
    processes.on_leader(
        lambda: write_columns(folder / "informativeness" / "prompts.parquet", columns)
    )
    sides: list[ScoredRollout] = []  # of all pairs, chosen and rejected alternately
    for group, own in zip(groups, pairs, strict=True):
        sides += pick(group, itertools.chain.from_iterable(own))
    logprobs = np.array([side.rollout.logprobs.sum(dtype=np.float64) for side in sides])
    lengths = np.array([side.rollout.length for side in sides])
    summary = informativeness.pair_summary(
        logprobs[::2], logprobs[1::2], lengths[::2], lengths[1::2]
    )
    of_pairs = {**summary, **informativeness.prompts_of_pairs(table, counts)}
    return {"informativeness": informativeness.summary(rows), "pairs": of_pairs}


def _fate(group: Sequence[ScoredRollout], lowest: float, highest: float) -> str:
    """Return a prompt's outcome, one of FATES; only "mixed" has pairs."""
    judged = is_correct(group)
    if np.isnan(judged).all():
        return "unscorable"
    rate = float(np.nanmean(judged))
    if rate in (0.0, 1.0):
        return "all_correct" if rate else "all_incorrect"
    return "mixed" if lowest <= rate <= highest else "outside_window"


def _ranked_fate(group: list[ScoredRollout]) -> str:
    """Return the outcome for a reward that only ranks; there is no window of pass rates."""
    values = rewards([group])[0]
    if np.isnan(values).all():
        return "unscorable"
    return "mixed" if differ(values) else "all_equal"


def shown(session: Session, problem: Problem) -> Prompt:
    """Return the prompt for other libraries: messages for a chat model, else the rendered text."""
    tokenizer = session.tokenizer
    if tokenizer.template.is_chat:
        return tokenizer.conversation(problem)
    return tokenizer.render(problem)


def _provenance(
    session: Session, name: str, stage: Collect, counts: dict[str, int]
) -> dict[str, Any]:
    """Return everything needed to build the dataset again."""
    return {
        "done": True,
        "policy": stage.policy,
        "rollouts": stage.rollouts,
        "sampler": sampler_settings(session, name),
        "rewards": {name: reward.to_dict() for name, reward in session.config.rewards.items()},
        "tokenizer": session.tokenizer.fingerprint,
        "pair_rule": {
            "name": (
                "random correct with random incorrect; of rewards that only rank, the best with "
                "the worst"
            ),
            "pairs_per_prompt": stage.pairs_per_prompt,
            "min_pass_rate": stage.min_pass_rate,
            "max_pass_rate": stage.max_pass_rate,
            "select": stage.select,
            "max_pairs": stage.max_pairs,
        },
        "seed": session.config.seed,
        "counts": counts,
    }


def _cause(
    session: Session, stage: Collect, counts: dict[str, int], draws: Draws, groups: Groups
) -> Cause:
    if 2 * counts["outside_window"] > counts["prompts"]:
        return Cause(
            "most prompts are outside the window of pass rates",
            "a wider window: min_pass_rate, max_pass_rate",
        )
    return cause_of(problems_of(draws), groups, session.config.all_tasks, stage.samples)


def _no_pairs(name: str, counts: dict[str, int], groups: Groups, cause: Cause) -> str:
    remedy = cause.remedy
    single = [len(group) for group in groups].count(1)
    if single > len(groups) / 2:
        remedy = f"rollouts with several responses to a prompt: {single} prompts have one"
    listed = ", ".join(f"{key} {value}" for key, value in counts.items() if value)
    return (
        f"{name}: no preference pair from {counts['prompts']} prompts ({listed}): "
        f"{cause.symptom}. To try: {remedy}"
    )
