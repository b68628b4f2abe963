"""Preference files, rollout parts and tables of figures from elsewhere: whole records, or an error
that names them."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fuzz.hostile import COLUMNS, ODD, TEXTS, accepted, damaged, tries
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from g2d_jax.data.preferences import check_preferences
from g2d_jax.records import Preference, Rollout, Score, ScoredRollout, Verdict
from g2d_jax.runtime import tables

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("bounded_memory")]

NAME = "part-00000.parquet"
IDS = np.arange(3, dtype=np.int32)
PAIR = Preference("p", "1+1?", "2", "3", IDS, IDS[:2], IDS[:1], 1.0, 0.0)
CHAT = dataclasses.replace(
    PAIR, prompt=({"role": "system", "content": "add"}, {"role": "user", "content": "1+1?"})
)
NATS = np.zeros(2, np.float32)
ROLLOUT = ScoredRollout(
    Rollout("p", 0, 0, IDS, IDS[:2], NATS, NATS, "stop"),
    "2",
    Score(1.0, Verdict.CORRECT, "2"),
    "sft",
)

READERS: dict[str, Callable[[Path], Any]] = {
    "pairs": tables.read_preferences,
    "chat": tables.read_preferences,
    "rollouts": tables.read_rollouts,
}


def good(kind: str, path: Path) -> pa.Table:
    """Write three good rows; the table."""
    if kind == "rollouts":
        tables.write_rollouts(path, [ROLLOUT] * 3)
    else:
        tables.write_preferences(path, [CHAT if kind == "chat" else PAIR] * 3)
    return pq.read_table(path)


def check(path: Path, read: Callable[[Path], Any]) -> None:
    for row in accepted(lambda: read(path), path.name) or ():
        if isinstance(row, Preference):
            texts = [row.problem_id, row.chosen, row.rejected]
            texts += (
                [row.prompt]
                if isinstance(row.prompt, str)
                else [m[k] for m in row.prompt for k in ("role", "content")]
            )
            assert all(isinstance(text, str) for text in texts) and row.prompt != ()
            ids = [row.prompt_ids, row.chosen_ids, row.rejected_ids]
            accepted(lambda: check_preferences(path, [row], 3), path.name)  # noqa: B023
        else:
            ids = [row.rollout.prompt_ids, row.rollout.token_ids]
            assert isinstance(row.text, str) and isinstance(row.score.verdict, Verdict)
        assert all(array.dtype == np.int32 and array.ndim == 1 for array in ids)


@given(st.data(), st.sampled_from(sorted(READERS)))
@tries(150)
def test_damaged_parts(folder: Path, data: st.DataObject, kind: str) -> None:
    path = folder / NAME
    good(kind, path)
    path.write_bytes(data.draw(damaged(path.read_bytes()) | st.sampled_from(ODD)))
    check(path, READERS[kind])


@given(st.data(), st.sampled_from(sorted(READERS)))
@tries(200)
def test_columns_of_any_type(folder: Path, data: st.DataObject, kind: str) -> None:
    path = folder / NAME
    table = good(kind, path)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, table.num_columns - 1))
        what = data.draw(
            st.sampled_from([*sorted(COLUMNS), "left out", "twice", "none of its rows"])
        )
        match what:
            case "left out":
                table = table.remove_column(at)
            case "twice":
                table = table.append_column(table.schema.field(at), table.column(at))
            case "none of its rows":
                table = table.slice(0, 0)
            case _:
                table = table.set_column(
                    at, table.column_names[at], COLUMNS[what].slice(0, table.num_rows)
                )
    try:
        pq.write_table(table, path)
    except pa.ArrowException:  # Parquet cannot hold every type
        return
    check(path, READERS[kind])


INT32 = arrays.arrays(np.int32, st.integers(0, 4), elements=st.integers(-(2**31), 2**31 - 1))


@given(
    st.tuples(TEXTS, TEXTS, TEXTS, TEXTS),
    st.tuples(INT32, INT32, INT32),
    st.tuples(st.floats(), st.floats()),
)
@tries(100)
def test_pairs_of_any_content_are_written_whole_and_checked(
    folder: Path, texts: tuple[str, ...], ids: tuple[np.ndarray, ...], rewards: tuple[float, float]
) -> None:
    path = folder / NAME
    pair = Preference(*texts, *ids, *rewards)  # type: ignore[call-arg, misc]
    if accepted(lambda: tables.write_preferences(path, [pair]) or True, path.name) is None:
        return
    (read,) = tables.read_preferences(path)
    assert read.chosen == tables.safe_text(pair.chosen) and np.array_equal(
        read.chosen_ids, pair.chosen_ids
    )
    sound = all(array.size and array.min() >= 0 and array.max() < 1000 for array in ids)
    assert (
        accepted(lambda: check_preferences(path, [read], 1000) or True, path.name) is not None
    ) == sound


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chosen_ids": IDS[:0]}, "pair 2 of 2: chosen_ids is empty"),
        ({"prompt_ids": IDS[:0]}, "pair 2 of 2: prompt_ids is empty"),
        ({"rejected_ids": IDS + 9}, r"pair 2 of 2: rejected_ids has 11; ids must be from 0 to 9"),
        ({"chosen_ids": IDS - 1}, r"pair 2 of 2: chosen_ids has -1; ids must be from 0 to 9"),
    ],
)
def test_pairs_that_cannot_be_trained_on(change: dict[str, Any], message: str) -> None:
    check_preferences("pairs.parquet", [PAIR, CHAT], 10)
    with pytest.raises(ValueError, match=rf"pairs\.parquet, {message}"):
        check_preferences("pairs.parquet", [PAIR, dataclasses.replace(PAIR, **change)], 10)
    with pytest.raises(ValueError, match=r"pairs\.parquet has no pairs"):
        check_preferences("pairs.parquet", [], 10)
