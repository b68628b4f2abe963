"""Write a run's preference dataset as it is published.

g2d.json              the run: its settings, seed, packages and fingerprints
chat_template.jinja   renders the pairs' messages as the policy saw them; only where they are messages
problems.parquet      the problems with their reference answers
completions/*.parquet every answer and its score
preferences/*.parquet the pairs that were chosen from them
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from operator import itemgetter

import numpy as np
from etils import epath

from g2d_jax.accounting import behind
from g2d_jax.config import Collect, Config
from g2d_jax.config.graph import plan
from g2d_jax.config.io import to_dict
from g2d_jax.config.rewards import REWARD_KINDS
from g2d_jax.data.tokenizer import CHAT_TEMPLATE
from g2d_jax.records import Problem, Prompt, by_id
from g2d_jax.rollouts.generate import Draws, Groups, problems_of, rows_of
from g2d_jax.runtime import processes, storage
from g2d_jax.runtime.tables import write_columns, write_completions
from g2d_jax.session.cost import Cost
from g2d_jax.session.session import Session
from g2d_jax.stages import collect

PROVENANCE = "g2d.json"
PROBLEMS = "problems.parquet"
COMPLETIONS = "completions"
PREFERENCES = "preferences"


def stage_of(config: Config, policy: str | None) -> str:
    """Return the last collect stage, of those behind a policy if one is named. Raises ValueError if
    there is none."""
    made_from = config.stages if policy is None else behind(policy, to_dict(config)["stages"])
    names = []
    for name in plan(config).order:
        if name in made_from and config.stages[name].kind == "collect":
            names.append(name)
    if not names:
        raise ValueError(
            "there are no preference pairs: the run has no collect stage, or none behind that "
            "policy"
        )
    return names[-1]


def write(session: Session, name: str, folder: epath.Path, own: Mapping[str, str]) -> None:
    """Write a finished collect stage's problems, completions and preferences. All processes call
    it; the leader writes.

    own: the run's functions from Python, by name. Raises ValueError for a stage that is not
    finished, and where the data is no longer what it was made from.
    """
    if not storage.finished(session.folders[name]):
        raise ValueError(
            f"stage {name!r} is not finished: g2d run with the same --workdir continues it"
        )
    draws, groups = collect.rollouts_of(session, name, Cost())
    processes.on_leader(lambda: _write(session, name, folder, draws, groups, own))


def _write(
    session: Session,
    name: str,
    folder: epath.Path,
    draws: Draws,
    groups: Groups,
    own: Mapping[str, str],
) -> None:
    size = session.config.stage(name, Collect).part
    for number, first in enumerate(range(0, len(groups), size)):
        part = slice(first, first + size)
        shown: list[Prompt] = []
        for (problem, _), group in zip(draws[part], groups[part], strict=True):
            shown += [collect.shown(session, problem)] * len(group)
        write_completions(
            folder / COMPLETIONS / f"part-{number:05d}.parquet", rows_of(groups[part]), shown
        )
    for source in (session.folders[name] / PREFERENCES).glob("*.parquet"):
        storage.write_bytes(folder / PREFERENCES / source.name, storage.read_bytes(source))
    template = session.tokenizer.template.pinned
    if template:
        storage.write_bytes(folder / CHAT_TEMPLATE, template.encode())
    problems = by_id(problems_of(draws))
    write_columns(
        folder / PROBLEMS, _columns(list(problems.values()), _scored_by(session.config, own))
    )


def _columns(
    problems: Sequence[Problem], scored_by: Mapping[str, str]
) -> dict[str, list[str] | np.ndarray]:
    """Return the columns of problems.parquet: "" is None; conversations, and what only functions
    score by, are JSON."""
    rows = []
    for problem in problems:
        # Solutions and further columns count only where a function of the user's own may score by
        # them.
        rest = problem
        if scored_by[problem.task] in REWARD_KINDS:
            rest = Problem("", "", None)
        prompt = problem.prompt
        is_chat = not isinstance(prompt, str)
        if is_chat:
            prompt = json.dumps(prompt)
        try:
            further = json.dumps(storage.plain(rest.columns))
        except TypeError as error:
            raise ValueError(
                f"the reward function may read what the problems have beside their answers: {error}"
            ) from error
        rows.append(
            {
                "id": problem.id,
                "task": problem.task,
                "subset": problem.subset or "",
                "answer": problem.answer or "",
                "prompt": prompt,
                "is_chat": is_chat,
                "solution": rest.solution or "",
                "columns": further,
            }
        )
    columns = {name: list(map(itemgetter(name), rows)) for name in rows[0]}
    return {**columns, "is_chat": np.array(columns["is_chat"])}


def _scored_by(config: Config, own: Mapping[str, str]) -> dict[str, str]:
    """Map each task to what scores it: one of REWARD_KINDS, or the name of a function."""
    named = {name: reward.function for name, reward in config.rewards.items()}
    return {**named, "main": own.get("reward", named["main"])}
