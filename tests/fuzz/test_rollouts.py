"""Rollouts made elsewhere, from hostile files: groups of scored responses, or an error that names
file and line."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from etils import epath
from fuzz.hostile import DEEP, ODD, VALUES, accepted, as_json, changed, damaged, tries
from hypothesis import given
from hypothesis import strategies as st

from g2d_jax.config import Config, Dump, graph
from g2d_jax.recipes.config_load import resolve
from g2d_jax.rollouts.external import external_groups
from g2d_jax.runtime.tracking import Tracker
from g2d_jax.session.session import Options, Run, Session, loaded, session_of

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("bounded_memory")]

GOOD: list[dict[str, Any]] = [
    {"prompt": "1+1=?", "completion": "\\boxed{2}", "reward": 1},
    {"prompt": "1+1=?", "completion": "\\boxed{3}", "reward": None},
    {"prompt": "2+2=?", "completion": "\\boxed{4}", "answer": "4"},
    {
        "prompt": "4+4=?",
        "completion_ids": [5, 6],
        "logprobs": [-1.5, 0],
        "finish_reason": "length",
        "reward": 1,
    },
    {
        "prompt": [{"role": "user", "content": "3+3=?"}],
        "completion": "6",
        "reward": 0.5,
        "problem_id": "ffff",
    },
]
LINES = b"".join(as_json(row) + b"\n" for row in GOOD)


def even(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text) % 2 == 0) for text in completions]


@pytest.fixture(scope="module")
def session(folder: Path) -> Iterator[Session]:
    """Of the tiny config, with a reward of ours."""
    config = resolve(str(Path(__file__).parents[1] / "tiny.py"))
    with Tracker(folder / "work", tensorboard=False) as tracker:
        work = epath.Path(folder / "work")
        run = Run(
            config=Config.of(config),
            workdir=work,
            folders=graph.plan(Config.of(config)).folders(work),
            tracker=tracker,
            reward=even,
        )
        with loaded(run, Options()) as shared:
            yield session_of(run, shared)


def check(session: Session, path: Path) -> int:
    """How many responses were taken."""
    shard = epath.Path(path.parent / "shard" / "part.parquet")
    shutil.rmtree(shard.parent, ignore_errors=True)
    found = accepted(lambda: external_groups(session, Dump(path=str(path)), shard), path.name)
    if found is None:
        assert not shard.exists()  # refused before anything is written
        return 0
    draws, groups = found
    assert len(draws) == len(groups) and all(groups)
    held_out = {
        problem.id for split in ("dev", "test") for problem in session.problems.by_split[split]
    }
    for (problem, visit), group in zip(draws, groups, strict=True):
        assert problem.id not in held_out and visit == 0
        assert [row.rollout.sample for row in group] == list(range(len(group)))
        for row in group:
            assert (
                row.rollout.problem_id == problem.id
                and len(row.rollout.token_ids)
                and len(row.rollout.prompt_ids)
            )
            assert row.score.reward is None or np.isfinite(row.score.reward)
    again = external_groups(session, Dump(path=str(path)), shard)
    assert [problem.id for problem, _ in again[0]] == [problem.id for problem, _ in draws]
    return sum(map(len, groups))


def test_good_rows(session: Session, folder: Path) -> None:
    path = folder / "mine.jsonl"
    path.write_bytes(LINES)
    assert check(session, path) == len(GOOD)


@given(damaged(LINES))
@tries(60)
def test_damaged_lines(session: Session, folder: Path, data: bytes) -> None:
    path = folder / "mine.jsonl"
    path.write_bytes(data)
    check(session, path)


@given(st.sampled_from(GOOD).flatmap(changed) | VALUES)
@tries(150)
def test_rows_of_any_types(session: Session, folder: Path, row: Any) -> None:
    path = folder / "mine.jsonl"
    path.write_bytes(as_json(GOOD[0]) + b"\n" + as_json(row))
    check(session, path)


@pytest.mark.parametrize(
    "reward",
    [10**400, -(10**400), float("inf"), "1e999", "nan", [1], {"a": 1}, "", "good" * 10_000],
)
def test_rewards_that_are_none(session: Session, folder: Path, reward: Any) -> None:
    path = folder / "mine.jsonl"
    path.write_bytes(as_json(GOOD[0]) + b"\n" + as_json({**GOOD[0], "reward": reward}))
    with pytest.raises(ValueError, match=r"mine\.jsonl, line 2: its reward .{0,120} is not"):
        external_groups(session, Dump(path=str(path)), epath.Path(folder / "never.parquet"))
    assert check(session, path) == 0


@pytest.mark.parametrize("line", range(len(DEEP)))
def test_deep_nesting(session: Session, folder: Path, line: int) -> None:
    path = folder / "mine.jsonl"
    path.write_bytes(as_json(GOOD[0]) + b"\n" + DEEP[line])
    assert check(session, path) == 0


@given(
    st.sampled_from(ODD) | damaged(as_json(GOOD)), st.sampled_from(["mine.json", "mine.parquet"])
)
@tries(40)
def test_other_files(session: Session, folder: Path, data: bytes, name: str) -> None:
    (folder / name).write_bytes(data)
    check(session, folder / name)


def test_parquet(session: Session, folder: Path) -> None:
    table = pa.table(
        {"prompt": ["1+1=?", "1+1=?"], "completion": ["2", "3"], "reward": pa.array([1.0, None])}
    )
    pq.write_table(table, folder / "mine.parquet")
    assert check(session, folder / "mine.parquet") == 2
    pq.write_table(
        table.set_column(2, "reward", pa.array([2**62, 0], pa.duration("s"))),
        folder / "mine.parquet",
    )
    assert check(session, folder / "mine.parquet") == 0
