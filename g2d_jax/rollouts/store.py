"""The files of rollouts: a Parquet shard for each batch, with its cost next to it.

A shard that exists is complete. To resume after a kill a stage needs its scored rollouts and, inside
a window of several updates, their log-probabilities under other policies (rollouts/logprobs.py).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from etils import epath

from g2d_jax.records import Problem, ScoredRollout
from g2d_jax.rollouts.groups import Draws, Groups, draw_of, rows_of
from g2d_jax.runtime import processes, storage
from g2d_jax.runtime.tables import read_rollouts, write_rollouts
from g2d_jax.session.background_writer import Writer

Batches = Sequence[tuple[Draws, epath.Path]]
"""Draws that are stored together, each batch with its shard: the Parquet file of its rollouts."""


@dataclass(frozen=True)
class Sampled:
    """The draws of a batch, its groups, and the cost of sampling and scoring them, for `Cost.add`.

    greedy: the greedy response to each draw, or empty. from_disk: whether it was read back, because
    an earlier start sampled it or the window is long.
    """

    draws: Draws
    groups: Groups
    cost: Mapping[str, float]
    from_disk: bool = False
    greedy: Sequence[ScoredRollout] = ()

    @property
    def every(self) -> Groups:
        """The groups with the greedy responses after the sampled ones."""
        if not self.greedy:
            return self.groups
        return [[*group, row] for group, row in zip(self.groups, self.greedy, strict=True)]


def concat_rounds(rounds: Sequence[Sampled]) -> tuple[Draws, Groups]:
    """Join the draws of several rounds, and their groups."""
    draws: Draws = []
    groups: Groups = []
    for sampled in rounds:
        draws += sampled.draws
        groups += sampled.groups
    return draws, groups


def joined(parts: Sequence[Sampled]) -> Sampled:
    """Join the parts of one file, and add up their costs."""
    draws, groups = concat_rounds(parts)
    cost: Counter[str] = Counter()
    greedy: list[ScoredRollout] = []
    for part in parts:
        cost.update(part.cost)
        greedy += part.greedy
    return Sampled(draws, groups, dict(cost), greedy=greedy)


def write_sampled(
    sampled: Sequence[Sampled], shards: Sequence[epath.Path], parts: epath.Path
) -> None:
    """Write a call's shards. parts: the folder of the processes' own files, removed afterwards."""
    for batch, shard in zip(sampled, shards, strict=True):
        # before the shard, whose existence means that all files exist
        storage.write_json(cost_file(shard), batch.cost)
        if batch.greedy:
            write_rollouts(greedy_file(shard), batch.greedy)
        write_rollouts(shard, rows_of(batch.groups))
    clear(parts)


def read_batch(draws: Draws, shard: epath.Path, num_generations: int, greedy: bool) -> Sampled:
    """Read a batch back. greedy: whether it has greedy responses. Raises ValueError if any response
    is missing."""
    groups = grouped(read_rollouts(shard), draws, num_generations)
    last: Groups = []
    if greedy:
        last = grouped(read_rollouts(greedy_file(shard)), draws, 1)
    return Sampled(draws, groups, cost_of(shard), from_disk=True, greedy=rows_of(last))


def clear(parts: epath.Path) -> None:
    """Remove the processes' own files, once their rows are in the shards."""
    if parts.exists():
        parts.rmtree()


def cost_file(shard: epath.Path) -> epath.Path:
    """Return the file of a shard's cost. pandas and pyarrow skip files that begin with an
    underscore."""
    return shard.parent / f"_{shard.stem}.json"


def greedy_file(shard: epath.Path) -> epath.Path:
    """Return the file of the greedy responses of a shard's prompts."""
    return shard.parent / f"{shard.stem}-greedy.parquet"


def cost_of(shard: epath.Path) -> dict[str, float]:
    """Read the cost of sampling and scoring a shard's rollouts, as `generate` wrote it."""
    cost: dict[str, float] = storage.read_json(cost_file(shard))
    return cost


def shard_path(folder: epath.Path, number: int, extra: int = 0) -> epath.Path:
    """Return the file of an online stage's batch, counted from 0. extra: the round, 0 for the
    first."""
    suffix = f"-{extra}" if extra else ""
    return folder / "rollouts" / f"step-{number:06d}{suffix}.parquet"


def read_rounds(
    folder: epath.Path, number: int, problems: Mapping[str, Problem], writer: Writer
) -> list[Sampled]:
    """Read all rounds of an online stage's batch, in order. All processes make the call.

    problems: the training problems by ID. Raises ValueError if there is no round, or if a problem
    is not among the training problems.
    """
    writer.wait()

    def count() -> int:
        extras = itertools.count()
        return next(extra for extra in extras if not shard_path(folder, number, extra).exists())

    shards = [shard_path(folder, number, extra) for extra in range(processes.on_leader(count))]
    if not shards:
        raise gone(shard_path(folder, number))
    return [_read_shard(shard, problems) for shard in shards]


def _read_shard(shard: epath.Path, problems: Mapping[str, Problem]) -> Sampled:
    draws: Draws = []
    groups: Groups = []
    try:
        for (problem_id, visit), rows in itertools.groupby(read_rollouts(shard), draw_of):
            draws.append((problems[problem_id], visit))
            groups.append(list(rows))
    except KeyError as error:
        raise ValueError(
            f"{shard}: problem {error} is not in data.train: was the data changed?"
        ) from error
    return Sampled(draws, groups, cost_of(shard), from_disk=True)


def gone(file: object) -> ValueError:
    """Build the error for a missing file that cannot be recreated, since its policy no longer
    exists."""
    return ValueError(
        f"{file} is gone, and this stage cannot recreate it: restore the file, or delete the stage's "
        "folder to start it again"
    )


def grouped(rows: Sequence[ScoredRollout], draws: Draws, num_generations: int) -> Groups:
    """Sort rows into the draws' groups. Raises ValueError if any is missing: the file is from
    another run."""
    by_key = {(*draw_of(row), row.rollout.sample): row for row in rows}
    groups: Groups = []
    try:
        for problem, visit in draws:
            groups.append([by_key[problem.id, visit, sample] for sample in range(num_generations)])
    except KeyError as error:
        raise ValueError(
            f"rollouts on disk lack problem, visit, sample {error}: was the data changed?"
        ) from error
    return groups


def on_disk(writer: Writer, files: Sequence[epath.Path]) -> bool:
    """Return whether all files exist, after pending writes; the same for all processes."""
    writer.wait()
    return processes.on_leader(lambda: all(file.exists() for file in files))
