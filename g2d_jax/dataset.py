"""A published preference dataset, and the check that its parts follow from each other.

g2d.json              the run: its settings, seed, packages and fingerprints
problems.parquet      the problems with their reference answers
completions/*.parquet every answer and its score      ◄─ scored again
preferences/*.parquet the pairs                        ◄─ chosen again from the completions
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from g2d_jax.accounting import behind
from g2d_jax.commands import read_config
from g2d_jax.config import Collect, Config, Reward
from g2d_jax.config_io import to_dict
from g2d_jax.data.fields import BrokenRow, as_prompt
from g2d_jax.data.rows import file_rows
from g2d_jax.data.splits import problem_id
from g2d_jax.graph import drawn_by, plan
from g2d_jax.records import Problem, Prompt, Score, ScoredRollout, Verdict
from g2d_jax.rewards.functions import load_reward
from g2d_jax.runtime import processes, storage
from g2d_jax.runtime.tables import read_completions, read_preferences, safe_text, write_columns, write_completions
from g2d_jax.runtime.tracking import Tracker
from g2d_jax.stages import collect
from g2d_jax.stages.cost import Cost
from g2d_jax.stages.rollouts import Draws, Groups, opening_thoughts
from g2d_jax.stages.runtime import Runtime

PROVENANCE, PROBLEMS, COMPLETIONS, PREFERENCES = "g2d.json", "problems.parquet", "completions", "preferences"
SCORERS = ("verify", "model", "judge")
"""What reward.function may be beside the name of a function."""


class Differs(ValueError):
    """A published dataset is not what its own completions, problems and settings give."""


def stage_of(config: Config, policy: str | None) -> str:
    """Return the last collect stage, of those behind a policy if one is named. Raises ValueError if there is none."""
    made_from = config.stages if policy is None else behind(policy, to_dict(config)["stages"])
    names = [name for name in plan(config).order if name in made_from and config.stages[name].kind == "collect"]
    if not names:
        raise ValueError("there are no preference pairs: the run has no collect stage, or none behind that policy")
    return names[-1]


def write(runtime: Runtime, name: str, folder: epath.Path, own: Mapping[str, str]) -> None:
    """Write a finished collect stage's problems, completions and preferences. All processes call it; the leader writes.

    own: the run's functions from Python, by name. Raises ValueError for a stage that is not finished, and where the
    data is no longer what it was made from.
    """
    if not storage.finished(runtime.folders[name]):
        raise ValueError(f"stage {name!r} is not finished: g2d run with the same --workdir continues it")
    draws, groups = collect.rollouts_of(runtime, name, Cost())
    processes.on_leader(lambda: _write(runtime, name, folder, draws, groups, own))


def _write(
    runtime: Runtime, name: str, folder: epath.Path, draws: Draws, groups: Groups, own: Mapping[str, str]
) -> None:
    size = runtime.config.stage(name, Collect).part
    for number, first in enumerate(range(0, len(groups), size)):
        part = slice(first, first + size)
        rows = [row for group in groups[part] for row in group]
        prompts = {draw: collect.shown(runtime, problem) for draw, (problem, _) in enumerate(draws[part])}
        shown = [prompts[draw] for draw, group in enumerate(groups[part]) for _ in group]
        write_completions(folder / COMPLETIONS / f"part-{number:05d}.parquet", rows, shown)
    for source in (runtime.folders[name] / PREFERENCES).glob("*.parquet"):
        storage.write_bytes(folder / PREFERENCES / source.name, storage.read_bytes(source))
    scored_by, problems = _scored_by(runtime.config, own), {problem.id: problem for problem, _ in draws}.values()
    write_columns(folder / PROBLEMS, _columns(list(problems), scored_by, opening_thoughts(runtime, problems)))


def _columns(
    problems: Sequence[Problem], scored_by: Mapping[str, str], thoughts: Collection[str]
) -> dict[str, list[str] | np.ndarray]:
    """Return the columns of problems.parquet: "" is None; conversations, and what only functions score by, are JSON."""
    prompts = [problem.prompt for problem in problems]
    rest = [None if scored_by[problem.task] in SCORERS else problem for problem in problems]
    try:
        columns = [json.dumps(storage.plain(problem.columns if problem else {})) for problem in rest]
    except TypeError as error:
        raise ValueError(
            f"the reward function may read what the problems have beside their answers: {error}"
        ) from error
    return {
        **{name: [getattr(problem, name) or "" for problem in problems] for name in ("id", "task", "subset", "answer")},
        "prompt": [prompt if isinstance(prompt, str) else json.dumps(prompt) for prompt in prompts],
        "is_chat": np.array([not isinstance(prompt, str) for prompt in prompts]),
        "opens_thought": np.array([problem.id in thoughts for problem in problems]),
        "solution": [(problem and problem.solution) or "" for problem in rest],
        "columns": columns,
    }


def _scored_by(config: Config, own: Mapping[str, str]) -> dict[str, str]:
    """Map each task to what scores it: one of SCORERS, or the name of a function."""
    named = {name: task.reward.function for name, task in config.all_tasks.items()}
    return {**named, "main": own.get("reward", named["main"])}


def verify(folder: Path, rewards: Collection[str] = ()) -> Counter[str]:
    """Score every completion again and choose the pairs again; count what was done, and what was not and why.

    rewards: names of reward functions of the dataset's settings that may be imported and run; they are code.
    Raises Differs naming the first row that differs; ValueError for files that are missing or damaged, and for a
    function that the settings name and `rewards` does not.
    Not scored: completions whose reward is a model's or a judge's, or came with them from elsewhere; and where the
    verifier gave up, here or there, the verdict depends on the machine.
    """
    place = epath.Path(folder)
    content = _provenance(place / PROVENANCE)
    config, own = _on_this_machine(read_config(place, PROVENANCE)), content["own"]
    stage = config.stages.get(name := str(content.get("stage")))
    if not isinstance(stage, Collect):
        raise ValueError(f"{place / PROVENANCE} names no collect stage of its settings: {content.get('stage')!r:.100}")
    scored_by = _scored_by(config, own)
    for task, function in scored_by.items():
        if function not in (*SCORERS, *rewards):
            raise ValueError(
                f"task {task} was scored by {function}, which is code of the dataset's author: get it, read it, put "
                f"its folder on PYTHONPATH, and add --reward {function}"
            )
    problems, thoughts = _problems(folder / PROBLEMS)
    rows = read_completions(place / COMPLETIONS)
    for number, (_, row) in enumerate(rows, 1):
        problem = problems.get(row.rollout.problem_id)
        if problem is None or problem.task not in scored_by:
            raise Differs(f"{_place(number, row)}: its problem is not in {PROBLEMS}, or its task not in the settings")
    reward = load_reward(own["reward"]) if "reward" in own else None
    with Tracker(None, tensorboard=False) as tracker:
        runtime = Runtime(config, place, tracker, {}, reward)
        with contextlib.closing(runtime):
            elsewhere = _made_elsewhere(config, name)
            counts = _check_scores(runtime, problems, thoughts, scored_by, [row for _, row in rows], elsewhere)
            counts["pairs chosen again"] = _check_pairs(runtime, stage, problems, rows, place / PREFERENCES)
    return counts


def _on_this_machine(config: Config) -> Config:
    """Return the config with no more verifier workers than there are processors: the dataset's author chose them."""

    def limited(reward: Reward) -> Reward:
        return replace(reward, workers=min(reward.workers, os.cpu_count() or 1))

    tasks = {name: replace(task, reward=limited(task.reward)) for name, task in config.tasks.items()}
    return replace(config, reward=limited(config.reward), tasks=tasks)


def _made_elsewhere(config: Config, name: str) -> bool:
    """Return whether by the settings a dump was read in place of sampling. Raises ValueError as `plan`."""
    plan(config)  # stages may read each other in a circle
    drawn = config.stage(drawn_by(name, config.stages), Collect)
    source = config.stages.get(drawn.policy.partition("@")[0]) if drawn.rollouts == "archive" else drawn
    return getattr(source, "rollouts", "sample") != "sample"


def _provenance(file: epath.Path) -> dict[str, Any]:
    if not file.exists():
        raise ValueError(f"{file.parent} holds no {PROVENANCE}: it is no dataset that g2d push wrote")
    content = storage.read_json(file)
    if not isinstance(content, dict) or content.get("what") != "dataset" or not isinstance(content.get("own"), dict):
        raise ValueError(f"{file} does not describe a dataset that g2d push wrote")
    return content


def _problems(file: Path) -> tuple[dict[str, Problem], set[str]]:
    """Read the problems by id, and the ids of those in whose prompt a thought is opened. Raises BrokenRow."""
    rows = [row.read(_problem) for row in file_rows(str(file))]
    return {problem.id: problem for problem, _ in rows}, {problem.id for problem, thought in rows if thought}


def _problem(values: dict[str, Any]) -> tuple[Problem, bool]:
    for name in ("id", "task", "subset", "answer", "prompt", "solution", "columns"):
        if not isinstance(values.get(name), str):
            raise BrokenRow(f"it needs a text {name!r}")
    try:
        prompt = as_prompt(json.loads(values["prompt"]) if values.get("is_chat") else values["prompt"], "prompt")
        columns = dict(json.loads(values["columns"]))
    except (ValueError, TypeError, RecursionError) as error:  # BrokenRow is one
        raise BrokenRow(str(error)) from error
    if values["id"] != problem_id(prompt):
        raise BrokenRow("its id is not that of its prompt")
    answer, solution = values["answer"] or None, values["solution"] or None
    problem = Problem(values["id"], prompt, answer, "", values["subset"], solution, columns, values["task"])
    return problem, bool(values.get("opens_thought"))


def _check_scores(
    runtime: Runtime,
    problems: Mapping[str, Problem],
    thoughts: Collection[str],
    scored_by: Mapping[str, str],
    rows: Sequence[ScoredRollout],
    elsewhere: bool,
) -> Counter[str]:
    """Raise Differs at the first row that scores otherwise; count what was scored, and what was not, and why.

    elsewhere: whether the rows were made elsewhere, and so may have come with their rewards.
    """
    counts: Counter[str] = Counter()
    again: list[int] = []
    for i, row in enumerate(rows):
        scorer = scored_by[problems[row.rollout.problem_id].task]
        if scorer in ("model", "judge"):
            counts[f"not scored again: the reward is a {scorer}'s"] += 1
        elif elsewhere and row.score.answer is None and row.score.verdict is not Verdict.NO_ANSWER:
            counts["not scored again: the reward came with the answer"] += 1
        else:
            again.append(i)
    asked = [problems[rows[i].rollout.problem_id] for i in again]
    texts = ["<think>" * (rows[i].rollout.problem_id in thoughts) + rows[i].text for i in again]
    scores = runtime.scorer(asked, texts, [rows[i].rollout.token_ids for i in again])
    for i, score in zip(again, scores, strict=True):
        published = rows[i].score
        score = replace(score, answer=None if score.answer is None else safe_text(score.answer))
        if Verdict.TIMEOUT in (score.verdict, published.verdict):
            counts["not compared: the verifier gave up, here or there"] += 1
        elif score != published:
            raise Differs(
                f"{_place(i + 1, rows[i])} is published as {_said(published)}; scored again it is {_said(score)}"
            )
        else:
            counts["answers scored again"] += 1
    return counts


def _said(score: Score) -> str:
    return f"{score.verdict.value}, reward {score.reward}, answer {score.answer!r:.100}"


def _place(number: int, row: ScoredRollout) -> str:
    rollout = row.rollout
    return f"{COMPLETIONS}, row {number} (problem {rollout.problem_id}, visit {rollout.visit}, sample {rollout.sample})"


def _check_pairs(
    runtime: Runtime,
    stage: Collect,
    problems: Mapping[str, Problem],
    rows: Sequence[tuple[Prompt, ScoredRollout]],
    folder: Path,
) -> int:
    """Raise Differs at the first pair that the completions do not give; return how many there are."""
    prompts: list[Prompt] = []
    draws: Draws = []
    groups: Groups = []
    for (identifier, visit), group in itertools.groupby(rows, lambda r: (r[1].rollout.problem_id, r[1].rollout.visit)):
        shown, answers = zip(*group, strict=True)
        if any(prompt != shown[0] for prompt in shown):
            raise Differs(f"{COMPLETIONS}: the answers to problem {identifier}, visit {visit}, have different prompts")
        prompts.append(shown[0])
        draws.append((problems[identifier], visit))
        groups.append(list(answers))
    pairs, _ = collect.choose_pairs(runtime, stage, draws, groups)
    expected, published = collect.to_preferences(prompts, groups, pairs), read_preferences(folder)
    for number, (ours, theirs) in enumerate(zip(expected, published, strict=False), 1):
        for field in dataclasses.fields(ours):
            if not np.array_equal(getattr(ours, field.name), getattr(theirs, field.name)):
                raise Differs(
                    f"{PREFERENCES}, row {number} (problem {theirs.problem_id}): its {field.name} is not that of the "
                    f"pair that the completions give there, of problem {ours.problem_id}"
                )
    if len(expected) != len(published):
        raise Differs(f"{PREFERENCES} has {len(published)} rows; the completions give {len(expected)} pairs")
    return len(published)
