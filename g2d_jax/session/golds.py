"""Reference answers ("golds") that the verifier cannot read: found when problems are loaded, and
stored with the run.

    problems ─┬► WORKDIR/golds/read.jsonl, of an earlier start ─┬► ids ─► left out
              └► else the workers of the verifier, and kept ────┘

A run keeps its first results: a verifier of another version does not change its problems. One
process checks the answers and shares the results; all points of a study use one file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from etils import epath

from g2d_jax.config import Reward
from g2d_jax.records import Problem, indices_by_task, pick
from g2d_jax.runtime import processes, storage
from g2d_jax.runtime.lock import awaited
from g2d_jax.runtime.tracking import Tracker
from g2d_jax.session.reward_manager import RewardManager
from g2d_jax.session.workdir import LINKS, absolute

if TYPE_CHECKING:
    from g2d_jax.rewards.pool import VerifierPool

FOLDER = "golds"  # of the file, and of its lock
FILE = "read.jsonl"  # [key, whether it can be read] of each gold
AT_ONCE = 1024  # golds that workers read between two writes; an interruption repeats at most these


def unreadable(
    scorer: RewardManager,
    tracker: Tracker,
    workdir: epath.Path,
    follows: epath.Path | None,
    problems: Sequence[Problem],
) -> set[str]:
    """Return the ids of problems whose reference answer the verifier cannot read. All processes
    call it with the same arguments.

    problems: with an answer, of tasks that the verifier scores. The scorer keeps the results.
    follows: the work directory whose results apply, None for `workdir`, which stores new ones.
    Raises as `VerifierPool.read`.
    """
    ids = set(
        processes.on_leader(
            lambda: _unreadable_ids(problems, scorer, tracker, workdir, follows or workdir)
        )
    )
    for task, indices in indices_by_task(problems).items():
        own = pick(problems, indices)
        scorer.verifier(task).know({str(problem.answer): problem.id not in ids for problem in own})
    return ids


def _unreadable_ids(
    problems: Sequence[Problem],
    scorer: RewardManager,
    tracker: Tracker,
    workdir: epath.Path,
    follows: epath.Path,
) -> list[str]:
    """Return the ids as `unreadable` does."""
    found = _kept(follows)
    keys = {problem.id: _key(problem, scorer.rewards[problem.task]) for problem in problems}
    if not found.keys() >= set(keys.values()):
        with awaited(_home(workdir) / FOLDER):
            found |= _kept(workdir)  # another process of a study may have been first
            _keep(workdir, found)
            for task, indices in indices_by_task(problems).items():
                own = pick(problems, indices)
                golds = {}
                for problem in own:
                    if keys[problem.id] not in found:
                        golds[keys[problem.id]] = str(problem.answer)
                for read in _answers(golds, scorer.verifier(task), tracker):
                    found |= read
                    _keep(workdir, found)
    return [problem.id for problem in problems if not found[keys[problem.id]]]


def _answers(
    golds: Mapping[str, str], pool: VerifierPool, tracker: Tracker
) -> Iterator[dict[str, bool]]:
    """Yield by key whether golds can be read, part by part. golds: by key."""
    from g2d_jax.rewards.verify import can_be_read  # here: other rewards need no verifier

    hard: dict[str, str] = {}
    for key, gold in golds.items():
        processes.check_stop()
        if can_be_read(gold) is None:
            hard[key] = gold
    keys = list(hard)
    if keys:
        with tracker.progress("reading reference answers", len(keys)) as bar:
            for first in range(0, len(keys), AT_ONCE):
                part = keys[first : first + AT_ONCE]
                read = pool.read([hard[key] for key in part])
                bar.update(first + len(part))
                yield {key: read[hard[key]] for key in part}
    if len(hard) < len(golds):
        read = pool.read(golds.values())
        yield {key: read[gold] for key, gold in golds.items()}


def _key(problem: Problem, reward: Reward) -> str:
    """Return the key of a gold: its text and the verifier's time limit."""
    return storage.fingerprint([problem.answer, reward.cpu_seconds])


def _home(workdir: epath.Path) -> epath.Path:
    """Return the folder that stores the results: for a study's point it is the study's."""
    return absolute(workdir / "../../..") if (workdir / LINKS).exists() else workdir


def _kept(workdir: epath.Path) -> dict[str, bool]:
    """Read the stored results by key; {} without any. Raises ValueError for a damaged file."""
    file = _home(workdir) / FOLDER / FILE
    if not file.exists():
        return {}
    try:
        found = {}
        for key, read in map(json.loads, storage.read_bytes(file).splitlines()):
            found[str(key)] = bool(read)
        return found
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{file} is damaged: {error}. Restore a copy of it. If you have none and no stage has "
            "begun, delete it"
        ) from error


def _keep(workdir: epath.Path, found: Mapping[str, bool]) -> None:
    """Store the results."""
    storage.write_json_lines(_home(workdir) / FOLDER / FILE, found.items())
