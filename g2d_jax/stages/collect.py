"""The collect stage: a frozen policy's rollouts, verified and kept, and the static preference dataset made from them.

rollouts ─► difficulty window ─► pairs on offer ─► those that are kept ─► preferences, informativeness
   ├ "sample"     drawn here, from stage.policy
   ├ "archive"    those an online stage drew on its way to stage.policy
   ├ a stage      those of another collect stage of the run
   └ a dump       made elsewhere, see external_rollouts.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from etils import epath

from g2d_jax.config import Collect, Online
from g2d_jax.config.policy_name import PolicyName
from g2d_jax.config.stages.collect import rollout_origin
from g2d_jax.data.order import draw
from g2d_jax.data.preferences import is_correct, pairs_of, select_pairs, to_preference
from g2d_jax.data.tokenizer import CHAT_TEMPLATE
from g2d_jax.models.decoder import Decoder
from g2d_jax.records import Preference, Problem, Prompt, ScoredRollout, Verdict
from g2d_jax.rollouts.buffer import concat_rounds, read_rounds
from g2d_jax.rollouts.external import external_groups, read_groups
from g2d_jax.rollouts.generate import Draws, Groups, describe, grouped, sampled_groups
from g2d_jax.rollouts.programs import rollouts
from g2d_jax.rollouts.workload import workload_of
from g2d_jax.runtime import processes, storage
from g2d_jax.runtime.tables import read_rollouts, write_columns, write_preferences
from g2d_jax.session.cost import Cost
from g2d_jax.session.policies import load_policy
from g2d_jax.session.problems import train_order
from g2d_jax.session.program import Program
from g2d_jax.session.session import Session, StopRun
from g2d_jax.session.windows import window_at
from g2d_jax.stages import alerts
from g2d_jax.study import informativeness

Pairs = list[list[tuple[int, int]]]  # (chosen, rejected) of each group
FATES = ("mixed", "all_correct", "all_incorrect", "all_equal", "unscorable", "outside_window")
"""Possible outcomes of a prompt; all but the first give no pairs."""


def run(session: Session, name: str, stage: Collect) -> dict[str, Any]:
    """Collect rollouts and preference pairs; return the manifest's fields. Raises StopRun if a needed pair lacks."""
    folder, cost = session.folders[name], Cost()
    with session.track_cost(cost):
        draws, groups = rollouts_of(session, name, cost)
        pairs, counts = choose_pairs(session, stage, draws, groups)
        measures = _measure(folder, groups, pairs)
    described, limit = describe(groups), sampler_settings(session, name).get("max_new_tokens")  # a file has no limit
    if not counts["pairs"]:
        alerts.say(session, name, 0, alerts.sampled(described, limit), [])
        raise StopRun(_no_pairs(name, counts, groups))
    if missing := counts["pairs_missing"]:
        session.tracker.say(
            f"{name}: the rollouts give {missing} pairs fewer than max_pairs, {stage.max_pairs}: all kept"
        )
    preferences = to_preferences([shown(session, problem) for problem, _ in draws], groups, pairs)
    _write(folder / "preferences", preferences, _provenance(session, name, stage, counts))
    if template := session.tokenizer.template.pinned:
        # Other libraries render the pairs' messages with it as the policy saw them.
        processes.on_leader(lambda: storage.write_bytes(folder / CHAT_TEMPLATE, template.encode()))
    warnings: list[dict[str, Any]] = []
    drawn = stage.sampling if stage.rollouts == "sample" else None
    others = [] if drawn else [(row.rollout.prompt_ids, row.rollout.token_ids) for group in groups for row in group]
    alerts.say(session, name, 0, alerts.check_positions(session, drawn, others), warnings)
    alerts.say(session, name, 0, [*alerts.few_pairs(counts), *alerts.sampled(described, limit)], warnings)
    metrics = {**described, **{f"pairs/{key}": float(value) for key, value in counts.items()}}
    session.tracker.log(name, 0, metrics)
    result = {**_lengths(preferences), "rollouts": described, "informativeness": measures}
    return {**cost.manifest(), "counts": counts, "result": result, "warnings": warnings}


def alerts_ahead(session: Session, name: str, stage: Collect) -> list[alerts.Alert]:
    """Return what may be wrong with the settings and a dump. Raises ValueError as the run would for one."""
    if stage.rollouts == "sample":
        return alerts.check_positions(session, stage.sampling)
    if stage.rollouts in ("archive", *session.config.stages):
        return []
    _, groups = read_groups(session, stage.rollouts, stage.reward_column)
    rows = [row.rollout for group in groups.values() for row in group]
    return alerts.check_positions(session, pairs=[(row.prompt_ids, row.token_ids) for row in rows])


def programs(session: Session, name: str, stage: Collect, response: int | None = None) -> Iterator[Program]:
    """Yield the stage's programs in the order of their runs. response: mean tokens of a response, None: the most."""
    if stage.rollouts == "sample":
        yield from rollouts(session, name, workload_of(session, name, stage, response))


def rollouts_of(session: Session, name: str, cost: Cost) -> tuple[Draws, Groups]:
    """Return a collect stage's rollouts, in groups, and their draws. Adds to the cost the cost of generating them now.

    Those of another stage, of an archive and of a file cost nothing. Raises StopRun for an archive of nothing,
    ValueError for rollouts on disk that are not those of this run's problems.
    """
    drawn = rollout_origin(name, session.config.stages)
    stage = session.config.stage(drawn, Collect)
    if stage.rollouts == "archive":
        return _archive(session, stage)
    if stage.rollouts == "sample" and drawn == name and not storage.finished(session.folders[name]):
        return _sample(session, name, stage, cost)
    if stage.rollouts == "sample":
        draws = _draws(session, drawn, stage)
        return draws, grouped(read_rollouts(session.folders[drawn] / "rollouts"), draws, stage.num_generations)
    return external_groups(
        session, stage.rollouts, session.folders[drawn] / "rollouts" / "external.parquet", stage.reward_column
    )


def _draws(session: Session, name: str, stage: Collect) -> Draws:
    """Draw the first stage.prompts of a seeded order of the training problems."""
    train = session.problems["train"]
    order = train_order(session.config, train, stage.stream or f"collect/{name}")
    return [(train[index], visit) for index, visit in draw(order, 0, min(stage.prompts, len(train)))]


def _sample(session: Session, name: str, stage: Collect, cost: Cost) -> tuple[Draws, Groups]:
    """Sample the parts, several in a call; a call whose parts are all on disk is read back."""
    draws, folder = _draws(session, name, stage), session.folders[name] / "rollouts"
    parts = [
        (draws[first : first + stage.part], folder / f"part-{number:05d}.parquet")
        for number, first in enumerate(range(0, len(draws), stage.part))
    ]

    def sampler_params() -> Decoder:
        return session.sampler_params(load_policy(session, stage.policy), stage.sampling_weights)

    workload = workload_of(session, name, stage)
    with session.tracker.progress(name, len(draws)) as bar:
        return draws, sampled_groups(session, sampler_params, parts, workload, policy=stage.policy, cost=cost, bar=bar)


def _archive(session: Session, stage: Collect) -> tuple[Draws, Groups]:
    """Return the groups an online stage drew on its way to the policy: no further generation."""
    policy = PolicyName.parse(stage.policy)
    source, step = policy.stage, policy.number
    settings = session.config.stage(source, Online)
    done = _steps_done(session, source) if step is None else step
    numbers = sorted({window_at(k, settings).number(k) for k in range(done)})
    rounds = [sampled for number in numbers for sampled in read_rounds(session, session.folders[source], number)]
    if not rounds:
        raise StopRun(f'{stage.policy} ended after 0 steps, so there is no archive: collect with rollouts="sample"')
    return concat_rounds(rounds)


def _steps_done(session: Session, source: str) -> int:
    """Count the steps an online stage did, which may be fewer than its settings allow."""
    manifest = storage.finished(session.folders[source])
    assert manifest is not None  # a stage runs after those it reads
    return int(manifest["counts"]["steps"])


def sampler_settings(session: Session, name: str) -> dict[str, Any]:
    """Return the settings the rollouts were really drawn with; of a dump only its path is known."""
    config = session.config
    source = rollout_origin(name, config.stages)
    collect = config.stage(source, Collect)
    drawn: Collect | Online = collect
    if collect.rollouts == "archive":
        source = PolicyName.parse(collect.policy).stage
        drawn = config.stage(source, Online)
    if drawn.rollouts != "sample":
        return {"file": drawn.rollouts}
    purpose = drawn.stream or f"{drawn.kind}/{source}"
    own = {"sampling_weights": drawn.sampling_weights, "num_generations": drawn.num_generations, "purpose": purpose}
    return {**drawn.sampling.to_dict(), **own}


def _write(folder: epath.Path, preferences: list[Preference], provenance: dict[str, Any]) -> None:
    """Write the dataset: every process a part, an unbroken stretch of the pairs, and then the leader the index.

    Read in the order of the parts' names it is the same dataset whatever the number of processes.
    """

    def clear() -> None:  # files of a killed run of other processes; the index first
        (folder / "_manifest.json").unlink(missing_ok=True)
        for part in folder.glob("*.parquet"):
            part.unlink()

    processes.on_leader(clear)
    shares = [list(indices) for indices in np.array_split(np.arange(len(preferences)), processes.count())]
    parts = {f"part-{number:05d}.parquet": len(share) for number, share in enumerate(shares) if share}
    with processes.barrier():
        share = shares[processes.index()]
        if share:
            write_preferences(folder / f"part-{processes.index():05d}.parquet", [preferences[i] for i in share])
    # The underscore lets pandas and pyarrow read the folder: they take every other file in it for Parquet.
    processes.on_leader(lambda: storage.write_json(folder / "_manifest.json", {**provenance, "parts": parts}))


def choose_pairs(session: Session, stage: Collect, draws: Draws, groups: Groups) -> tuple[Pairs, dict[str, int]]:
    """Choose the pairs of all groups; return them with the counts of prompts, rollouts and pairs."""
    offered, counts = _offered(session, stage, draws, groups)
    pairs = _selected(session, stage, draws, groups, offered)
    return pairs, {**counts, **_count_pairs(stage, offered, pairs)}


def _offered(session: Session, stage: Collect, draws: Draws, groups: Groups) -> tuple[Pairs, dict[str, int]]:
    """Apply the difficulty window and the pair rule; count the outcome of every prompt."""
    counts: Counter[str] = Counter({"prompts": len(groups), "rollouts": sum(len(group) for group in groups)})
    offered: Pairs = []
    for (problem, visit), group in zip(draws, groups, strict=True):
        counts["unscorable_rollouts"] += sum(row.score.reward is None for row in group)
        counts["timeout_rollouts"] += sum(row.score.verdict is Verdict.TIMEOUT for row in group)
        verifiable = session.verifiable[problem.task]
        fate = _fate(group, stage.min_pass_rate, stage.max_pass_rate) if verifiable else _ranked_fate(group)
        counts[fate] += 1
        limit = stage.pairs_per_prompt if fate == "mixed" else 0
        offered.append(pairs_of(session.config.seed, problem.id, visit, group, limit, verifiable=verifiable))
    for fate in FATES:
        counts.setdefault(fate, 0)
    return offered, dict(counts)


def _selected(session: Session, stage: Collect, draws: Draws, groups: Groups, offered: Pairs) -> Pairs:
    """Select stage.max_pairs of the pairs by stage.select; a prompt's uncertainty is its tokens' mean entropy."""
    entropies = informativeness.prompts(groups)["entropy"]
    prompts = [(problem.id, visit, float(nats)) for (problem, visit), nats in zip(draws, entropies, strict=True)]
    selected = select_pairs(session.config.seed, prompts, list(map(len, offered)), stage.select, stage.max_pairs)
    return [[pairs[index] for index in indices] for pairs, indices in zip(offered, selected, strict=True)]


def _count_pairs(stage: Collect, offered: Pairs, pairs: Pairs) -> dict[str, int]:
    available, used = (sum(map(len, listed)) for listed in (offered, pairs))
    return {"pairs": used, "pairs_available": available, "pairs_missing": max((stage.max_pairs or 0) - available, 0)}


def to_preferences(prompts: Sequence[Prompt], groups: Groups, pairs: Pairs) -> list[Preference]:
    """Make the records of all pairs. prompts: what the model was shown, by group."""
    return [
        to_preference(prompt, group, pair)
        for prompt, group, group_pairs in zip(prompts, groups, pairs, strict=True)
        for pair in group_pairs
    ]


def _measure(folder: epath.Path, groups: Groups, pairs: Pairs) -> dict[str, Any]:
    """Write the informativeness of rollouts and selected pairs, by prompt and in all; return the latter.

    Figures that need log-probabilities are NaN where rollouts came without.
    """
    columns = {**informativeness.prompts(groups), "pairs": np.array([len(own) for own in pairs], np.int64)}
    processes.on_leader(lambda: write_columns(folder / "informativeness" / "prompts.parquet", columns))
    both = [(group[i].rollout, group[j].rollout) for group, own in zip(groups, pairs, strict=True) for i, j in own]
    logprobs = np.array([[r.logprobs.sum(dtype=np.float64) for r in pair] for pair in both]).reshape(-1, 2)
    lengths = np.array([[len(r.token_ids) for r in pair] for pair in both]).reshape(-1, 2)
    of_pairs = {**informativeness.pair_summary(*logprobs.T, *lengths.T), **informativeness.prompts_of_pairs(columns)}
    measures = {**informativeness.summary(groups), "pairs": of_pairs}
    processes.on_leader(lambda: storage.write_json(folder / "informativeness.json", measures))
    return measures


def _fate(group: Sequence[ScoredRollout], lowest: float, highest: float) -> str:
    """Return a prompt's outcome, one of FATES; "mixed" gives pairs."""
    judged = is_correct(group)
    if np.isnan(judged).all():
        return "unscorable"
    rate = float(np.nanmean(judged))
    if rate in (0.0, 1.0):
        return "all_correct" if rate else "all_incorrect"
    return "mixed" if lowest <= rate <= highest else "outside_window"


def _ranked_fate(group: list[ScoredRollout]) -> str:
    """Return the outcome where the reward knows better and worse only; there is no window of pass rates."""
    values = {row.score.reward for row in group} - {None}
    return "mixed" if len(values) > 1 else "all_equal" if values else "unscorable"


def shown(session: Session, problem: Problem) -> Prompt:
    """Return the prompt for other libraries: messages for a chat model, else the rendered text."""
    tokenizer = session.tokenizer
    return tokenizer.conversation(problem) if tokenizer.template.is_chat else tokenizer.render(problem)


def _provenance(session: Session, name: str, stage: Collect, counts: dict[str, int]) -> dict[str, Any]:
    """Return everything needed to build the dataset again."""
    return {
        "done": True,
        "policy": stage.policy,
        "rollouts": stage.rollouts,
        "sampler": sampler_settings(session, name),
        "rewards": {name: task.reward.to_dict() for name, task in session.tasks.items()},
        "tokenizer": session.tokenizer.fingerprint,
        "pair_rule": {
            "name": "random correct with random incorrect; of rewards that only rank, the best with the worst",
            "pairs_per_prompt": stage.pairs_per_prompt,
            "min_pass_rate": stage.min_pass_rate,
            "max_pass_rate": stage.max_pass_rate,
            "select": stage.select,
            "max_pairs": stage.max_pairs,
        },
        "seed": session.config.seed,
        "counts": counts,
    }


def _lengths(preferences: list[Preference]) -> dict[str, float]:
    if not preferences:
        return {}
    return {
        "chosen_mean_length": float(np.mean([len(p.chosen_ids) for p in preferences])),
        "rejected_mean_length": float(np.mean([len(p.rejected_ids) for p in preferences])),
    }


def _no_pairs(name: str, counts: dict[str, int], groups: Groups) -> str:
    advice = "take a stronger policy (SFT, more warm-up), easier problems or a reward that it can earn"
    if counts["all_correct"] > counts["all_incorrect"]:
        advice = "take harder problems or an earlier checkpoint of the warm-up"
    if counts["outside_window"]:
        advice = "widen min_pass_rate and max_pass_rate"
    if counts["unscorable"] > counts["prompts"] / 2:
        advice = "look at the reference answers: most prompts could not be scored"
    more = "raise num_generations"
    single = sum(len(group) == 1 for group in groups)
    if single > len(groups) / 2:
        advice = f"{single} prompts have one response (one generation), and a pair takes two, one better than the other"
        more = "take rollouts with several responses to a prompt"
    verdicts = [row.score.verdict for group in groups for row in group]
    mute = f"{verdicts.count(Verdict.NO_ANSWER) / max(len(verdicts), 1):.0%} of the responses have no answer to grade"
    listed = ", ".join(f"{key} {value}" for key, value in counts.items() if value)
    return f"{name}: no preference pair from {counts['prompts']} prompts ({listed}; {mute}): {advice}; or {more}"
