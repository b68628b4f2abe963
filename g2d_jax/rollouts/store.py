"""The files of rollouts: a shard for each batch, Parquet, with its cost next to it.

A shard that exists is whole. Scored rollouts are all that a stage must write to go on after a kill:
it reads them back, and computes the rest again.
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

    greedy: the greedy response to each draw, if there are any. from_disk: whether this was read back:
    an earlier start sampled it, or its batch is one of a long window.
    """

    draws: Draws
    groups: Groups
    cost: Mapping[str, float]
    from_disk: bool = False
    greedy: Sequence[ScoredRollout] = ()

    @property
    def every(self) -> Groups:
        """The groups with the greedy responses behind the sampled ones."""
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
    """Join parts of what one file is to hold, with the sums of their costs."""
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
    """Write one call's shards. parts: folder of the processes' own files, whose rows are in the
    shards then."""
    for batch, shard in zip(sampled, shards, strict=True):
        # before the shard, whose existence means that all is there
        storage.write_json(cost_file(shard), batch.cost)
        if batch.greedy:
            write_rollouts(greedy_file(shard), batch.greedy)
        write_rollouts(shard, rows_of(batch.groups))
    clear(parts)


def read_batch(draws: Draws, shard: epath.Path, num_generations: int, greedy: bool) -> Sampled:
    """Read a batch back. greedy: whether it has greedy responses. Raises ValueError where the shard
    lacks any of them."""
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
    """Return the file of a shard's cost. pandas and pyarrow pass over files with an underscore in
    front."""
    return shard.parent / f"_{shard.stem}.json"


def greedy_file(shard: epath.Path) -> epath.Path:
    """Return the file of the greedy responses of a shard's prompts."""
    return shard.parent / f"{shard.stem}-greedy.parquet"


def cost_of(shard: epath.Path) -> dict[str, float]:
    """Read the cost of sampling and scoring a shard's rollouts, as `generate` wrote it."""
    file = cost_file(shard)
    return storage.read_json(file) if file.exists() else {}


def shard_path(folder: epath.Path, number: int, extra: int = 0) -> epath.Path:
    """Return the file of a batch of an online stage, counted from 0: of its first round or of an
    `extra` one."""
    suffix = f"-{extra}" if extra else ""
    return folder / "rollouts" / f"step-{number:06d}{suffix}.parquet"


def read_rounds(
    folder: epath.Path, number: int, problems: Mapping[str, Problem], writer: Writer
) -> list[Sampled]:
    """Read all rounds of a batch of an online stage, its first one first. All processes make the
    call.

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
    """Make the error for a file that cannot be made again, because its policy no longer exists."""
    return ValueError(
        f"{file} is gone, and this stage cannot make it again: put it back, or delete the folder of "
        "the stage to start it anew"
    )


def grouped(rows: Sequence[ScoredRollout], draws: Draws, num_generations: int) -> Groups:
    """Sort rows into the draws' groups. Raises ValueError when some are missing: the file belongs
    to another run."""
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
    """Return whether all of the files exist, for all processes alike, after pending writes."""
    writer.wait()
    return processes.on_leader(lambda: all(file.exists() for file in files))
