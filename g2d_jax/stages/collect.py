"""Collect: a frozen policy's rollouts, verified and kept, and the static preference dataset made from them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from g2d_jax import storage
from g2d_jax.data.loader import draw
from g2d_jax.data.preferences import random_pairs, to_preference
from g2d_jax.records import Preference, Problem, Prompt, ScoredRollout, Verdict
from g2d_jax.stages.context import Context, StopRun, Tally
from g2d_jax.stages.external import external_groups
from g2d_jax.stages.online import count_rollouts, draws_of, journal_of
from g2d_jax.stages.rollouts import Groups, describe, grouped, sampled_groups
from g2d_jax.tables import read_rollouts, write_preferences

Draws = list[tuple[Problem, int]]


def run(context: Context, name: str, stage: ConfigDict) -> dict[str, Any]:
    """Rollouts and preference pairs; returns the manifest's fields. Raises StopRun when no prompt gives a pair."""
    folder, tally = context.folders[name], Tally()
    with context.metered(tally):
        if stage.rollouts == "sample":
            draws, groups = _sample(context, name, stage, tally)
        elif stage.rollouts == "archive":
            draws, groups = _archive(context, stage)
        else:
            draws, groups = external_groups(context, stage.rollouts, folder / "rollouts" / "external.parquet")
        preferences, counts = _pairs(context, stage, draws, groups)
    if not preferences:
        raise StopRun(_no_pairs(name, counts))
    write_preferences(folder / "preferences" / "part-00000.parquet", preferences)
    # The underscore lets pandas and pyarrow read the folder: they take every other file in it for Parquet.
    storage.write_json(folder / "preferences" / "_manifest.json", _provenance(context, name, stage, counts))
    metrics = {**describe(groups), **{f"pairs/{key}": float(value) for key, value in counts.items()}}
    context.tracker.log(name, 0, metrics)
    return {**tally.manifest(), "counts": counts, "result": {**_lengths(preferences), "rollouts": describe(groups)}}


def check(stage: ConfigDict, stages: ConfigDict) -> None:
    """Raise ValueError for settings that cannot work, before any work."""
    source = stage.policy.partition("@")[0]
    if stage.rollouts == "archive" and (source not in stages or stages[source].kind != "online"):
        raise ValueError(f'rollouts="archive" needs a policy that is an online stage of this run, got {stage.policy!r}')
    if stage.rollouts not in ("sample", "archive") and not epath.Path(stage.rollouts).exists():
        raise ValueError(f"rollouts is {stage.rollouts!r}: write sample, archive, or the path of a file that exists")
    if not 0 <= stage.min_pass_rate <= stage.max_pass_rate <= 1:
        raise ValueError(f"the pass rates {stage.min_pass_rate} to {stage.max_pass_rate} are no window within 0 to 1")
    for name in ("prompts", "part", "num_generations", "pairs_per_prompt"):
        if stage[name] < 1:
            raise ValueError(f"{name} must be at least 1, got {stage[name]}")


def _sample(context: Context, name: str, stage: ConfigDict, tally: Tally) -> tuple[Draws, Groups]:
    """Sample the first stage.prompts of a seeded order, part by part; a part that is on disk is read back."""
    train = context.problems["train"]
    count = min(stage.prompts, len(train))
    order = context.order(len(train), f"collect/{name}")
    draws = [(train[index], visit) for index, visit in draw(order, 0, count)]
    view = context.sampler().view(context.policy(stage.policy))
    groups: Groups = []
    with context.tracker.progress(name, count) as bar:
        for part, first in enumerate(range(0, count, stage.part)):
            some = draws[first : first + stage.part]
            groups += sampled_groups(
                context,
                view,
                some,
                context.sampling_params(stage.sampling),
                num_generations=stage.num_generations,
                purpose=f"collect/{name}",
                policy=stage.policy,
                journal=context.folders[name] / "rollouts" / f"part-{part:05d}.parquet",
            )
            bar.update(len(groups), describe(groups[first:]))
    count_rollouts(context, tally, groups)
    return draws, groups


def _archive(context: Context, stage: ConfigDict) -> tuple[Draws, Groups]:
    """The groups an online stage drew on its way to the policy: no further generation."""
    source, _, step = stage.policy.partition("@")
    settings = context.config.stages[source]
    order = context.order(len(context.problems["train"]), f"online/{source}")
    draws: Draws = []
    groups: Groups = []
    for k in range(int(step) if step else settings.steps):
        some = draws_of(context, order, k, settings.prompts_per_step)
        rows = read_rollouts(journal_of(context.folders[source], k))
        draws += some
        groups += grouped(rows, some, settings.num_generations)
    return draws, groups


def _pairs(
    context: Context, stage: ConfigDict, draws: Draws, groups: Groups
) -> tuple[list[Preference], dict[str, int]]:
    """Apply the difficulty window and the pair rule; count what becomes of every prompt."""
    counts: Counter[str] = Counter({"prompts": len(groups), "rollouts": sum(len(group) for group in groups)})
    preferences: list[Preference] = []
    for (problem, visit), group in zip(draws, groups, strict=True):
        right = _right(group)
        counts["unscorable_rollouts"] += int(np.isnan(right).sum())
        fate = _fate(right, stage.min_pass_rate, stage.max_pass_rate)
        counts[fate] += 1
        if fate == "mixed":
            pairs = random_pairs(context.config.seed, problem.id, visit, right, stage.pairs_per_prompt)
            preferences += [to_preference(_shown(context, problem), group, pair) for pair in pairs]
    for fate in ("mixed", "all_correct", "all_incorrect", "unscorable", "outside_window"):
        counts.setdefault(fate, 0)
    return preferences, {**counts, "pairs": len(preferences)}


def _right(group: list[ScoredRollout]) -> np.ndarray:
    """[G]: 1 correct, 0 incorrect, NaN where there is no reward."""
    scores = [row.score for row in group]
    return np.array([np.nan if score.reward is None else float(score.verdict is Verdict.CORRECT) for score in scores])


def _fate(right: np.ndarray, lowest: float, highest: float) -> str:
    """Why a prompt gives pairs ("mixed") or not. right: [G], 1 or 0, NaN for a response without a verdict."""
    if np.isnan(right).all():
        return "unscorable"
    rate = float(np.nanmean(right))
    if rate in (0.0, 1.0):
        return "all_correct" if rate else "all_incorrect"
    return "mixed" if lowest <= rate <= highest else "outside_window"


def _shown(context: Context, problem: Problem) -> Prompt:
    """The prompt as other libraries should see it: messages for a chat model, else the rendered text."""
    tokenizer = context.tokenizer
    return tokenizer.conversation(problem) if tokenizer.template.is_chat else tokenizer.render(problem)


def _provenance(context: Context, name: str, stage: ConfigDict, counts: dict[str, int]) -> dict[str, Any]:
    """Everything needed to build the dataset again."""
    return {
        "done": True,
        "policy": stage.policy,
        "rollouts": stage.rollouts,
        "sampler": _sampler(context, name, stage),
        "verifier": {k: v for k, v in context.config.reward.to_dict().items() if k != "workers"},
        "tokenizer": context.tokenizer.fingerprint,
        "pair_rule": {
            "name": "random correct with random incorrect",
            "pairs_per_prompt": stage.pairs_per_prompt,
            "min_pass_rate": stage.min_pass_rate,
            "max_pass_rate": stage.max_pass_rate,
        },
        "seed": context.config.seed,
        "counts": counts,
    }


def _sampler(context: Context, name: str, stage: ConfigDict) -> dict[str, Any]:
    """The settings the rollouts were really drawn with; of a file only its path is known."""
    if stage.rollouts not in ("sample", "archive"):
        return {"file": stage.rollouts}
    source = name if stage.rollouts == "sample" else stage.policy.partition("@")[0]
    drawn = context.config.stages[source]
    purpose = f"{drawn.kind}/{source}"
    return {**drawn.sampling.to_dict(), "num_generations": drawn.num_generations, "purpose": purpose}


def _lengths(preferences: list[Preference]) -> dict[str, float]:
    return {
        "chosen_mean_length": float(np.mean([len(p.chosen_ids) for p in preferences])),
        "rejected_mean_length": float(np.mean([len(p.rejected_ids) for p in preferences])),
    }


def _no_pairs(name: str, counts: dict[str, int]) -> str:
    advice = "take a stronger policy (more warm-up) or easier problems"
    if counts["all_correct"] > counts["all_incorrect"]:
        advice = "take harder problems or an earlier checkpoint of the warm-up"
    if counts["outside_window"]:
        advice = "widen min_pass_rate and max_pass_rate"
    if counts["unscorable"] > counts["prompts"] / 2:
        advice = "look at the reference answers: most prompts could not be scored"
    listed = ", ".join(f"{key} {value}" for key, value in counts.items())
    return f"{name}: no preference pair from {counts['prompts']} prompts ({listed}): {advice}; or raise num_generations"
