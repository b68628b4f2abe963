"""Parquet parts: exact round trips, files that pandas reads, damage that is named."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from g2d_jax.records import Preference, Rollout, Score, ScoredRollout, Verdict
from g2d_jax.runtime import tables

CHAT = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"})


def ids(*values):
    return np.array(values, np.int32)


def rollout(
    text="2",
    reward=1.0,
    answer="2",
    *,
    sample=0,
    stop_reason="stop",
    tokens=(7, 2),
    logprobs=(-0.1, -1e-30),
):
    verdict = Verdict.UNSCORABLE if reward is None else Verdict.CORRECT
    nats = np.array(logprobs, np.float32)
    inner = Rollout(
        "00ff00ff00ff00ff", 3, sample, ids(1, 5), ids(*tokens), nats, -nats, stop_reason
    )
    return ScoredRollout(inner, text, Score(reward, verdict, answer), "warmup@20")


def preference(prompt="1+1?", chosen="2", rejected="3", rewards=(1.0, 0.0)):
    return Preference(
        "00ff00ff00ff00ff", prompt, chosen, rejected, ids(1, 5), ids(7, 2), ids(2**31 - 1), *rewards
    )


def same(a, b):
    """Equal field by field; arrays and floats bit for bit (a NaN equals itself, 0.0 is not
    -0.0)."""
    assert type(a) is type(b)
    if dataclasses.is_dataclass(a):
        return all(
            same(getattr(a, field.name), getattr(b, field.name)) for field in dataclasses.fields(a)
        )
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return repr(a) == repr(b)


texts = st.text(st.characters(exclude_categories=["Cs"]))
nats = hnp.arrays(np.float32, st.integers(0, 5), elements=st.floats(width=32))
tokens = hnp.arrays(np.int32, st.integers(0, 5))
rollouts = st.builds(
    ScoredRollout,
    st.builds(
        Rollout,
        problem_id=st.text("0123456789abcdef", min_size=16, max_size=16),
        visit=st.integers(0, 2**31 - 1),
        sample=st.integers(0, 2**31 - 1),
        prompt_ids=tokens,
        token_ids=tokens,
        logprobs=nats,
        entropies=nats,
        stop_reason=st.sampled_from(["stop", "length"]),
    ),
    texts,
    st.builds(Score, st.none() | st.floats(), st.sampled_from(Verdict), st.none() | texts),
    texts,
)


@examples(40)
@given(rows=st.lists(rollouts, max_size=4))
def test_rollouts_round_trip_bit_for_bit(rows, tmp_path_factory):
    path = tmp_path_factory.mktemp("rollouts") / "00000.parquet"
    tables.write_rollouts(path, rows)
    read = tables.read_rollouts(path)
    assert len(read) == len(rows) and all(map(same, read, rows))


def test_pandas_reads_rollouts(tmp_path):
    long = rollout(
        "x\x00y",
        None,
        None,
        sample=1,
        stop_reason="length",
        tokens=(7, 7, 7),
        logprobs=(-1.0, -2.0, -3.0),
    )
    tables.write_rollouts(tmp_path / "0.parquet", [rollout(), long])
    frame = pd.read_parquet(tmp_path / "0.parquet")
    assert list(frame.columns) == tables.ROLLOUTS.names
    assert frame["reward"].isna().tolist() == [False, True] and frame["answer"].isna().tolist() == [
        False,
        True,
    ]
    assert frame["truncated"].tolist() == [False, True] and frame["verdict"].tolist() == [
        "correct",
        "unscorable",
    ]
    assert frame["text"].tolist() == ["2", "x\x00y"]
    assert frame["token_ids"][1].tolist() == [7, 7, 7] and frame["logprobs"][0].dtype == np.float32


def test_a_folder_is_read_in_the_order_of_names(tmp_path):
    for name, sample in [("00001.parquet", 1), ("00010.parquet", 2), ("00000.parquet", 0)]:
        tables.write_rollouts(tmp_path / name, [rollout(sample=sample)])
    (tmp_path / ".00002.parquet.1234abcd.tmp").write_bytes(b"left by a killed process")
    (tmp_path / "manifest.json").write_text("{}")
    assert [row.rollout.sample for row in tables.read_rollouts(tmp_path)] == [0, 1, 2]
    with pytest.raises(FileNotFoundError, match=r"has no \*\.parquet file"):
        (tmp_path / "empty").mkdir()
        tables.read_rollouts(tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match="absent"):
        tables.read_rollouts(tmp_path / "absent")


def test_read_arrays_are_writable_and_own_their_memory(tmp_path):
    tables.write_rollouts(tmp_path / "0.parquet", [rollout(), rollout()])
    first, second = (row.rollout.token_ids for row in tables.read_rollouts(tmp_path))
    first[0] = 99
    assert second.tolist() == [7, 2] and first.base is None


def test_lone_surrogates_become_replacement_characters(tmp_path):
    tables.write_rollouts(
        tmp_path / "0.parquet", [rollout("a\ud800\udc00b\udfff", answer="\udcff")]
    )
    [row] = tables.read_rollouts(tmp_path)
    assert (row.text, row.score.answer) == ("a\ufffd\ufffdb\ufffd", "\ufffd")
    assert tables.safe_text("plain \x00 \U0001f600") == "plain \x00 \U0001f600"


def test_arrays_of_another_dtype_are_refused(tmp_path):
    row = rollout()
    wide = dataclasses.replace(
        row, rollout=dataclasses.replace(row.rollout, token_ids=np.array([1, 2]))
    )
    with pytest.raises(
        ValueError, match=r"token_ids must be one-dimensional int32, got int64 \[2\]"
    ):
        tables.write_rollouts(tmp_path / "0.parquet", [wide])
    assert not list(tmp_path.iterdir())


def test_any_flipped_or_missing_byte_names_the_file(tmp_path):
    path = tmp_path / "00007.parquet"
    tables.write_rollouts(path, [rollout("long " * 50)])
    whole = path.read_bytes()
    damaged = [whole[:cut] for cut in (0, 3, len(whole) // 2, len(whole) - 1)]
    at = whole.index(b"long ")
    damaged.append(whole[:at] + b"wrong"[: len(b"long ")] + whole[at + 5 :])
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"00007\.parquet is damaged"):
            tables.read_rollouts(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop_columns(["logprobs"]), "no column logprobs"),
        (
            lambda t: t.set_column(0, "problem_id", pa.array([None], pa.string())),
            "field 'problem_id' with null",
        ),
        (
            lambda t: t.set_column(4, "prompt_ids", pa.array([[1, None]], pa.list_(pa.int32()))),
            "null",
        ),
        (lambda t: t.set_column(10, "verdict", pa.array(["perhaps"])), "perhaps"),
        (lambda t: t.set_column(12, "stop_reason", pa.array(["tired"])), "tired"),
        (lambda t: t.set_column(1, "visit", pa.array([2**40])), "not in range"),
    ],
)
def test_parts_made_elsewhere_are_checked(change, message, tmp_path):
    tables.write_rollouts(tmp_path / "0.parquet", [rollout()])
    pq.write_table(change(pq.read_table(tmp_path / "0.parquet")), tmp_path / "0.parquet")
    with pytest.raises(ValueError, match=rf"0\.parquet is damaged.*{message}"):
        tables.read_rollouts(tmp_path)


@pytest.mark.parametrize("prompt", ["1+1?", CHAT])
def test_preferences_round_trip(prompt, tmp_path):
    rows = [preference(prompt), preference(prompt, "", "naïve\n\x00", (0.1, -np.inf))]
    tables.write_preferences(tmp_path / "0.parquet", rows)
    read = tables.read_preferences(tmp_path)
    assert len(read) == 2 and all(map(same, read, rows))


def replied(text):
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("1+1?", ["1+1?", "2", "3"]), (CHAT, [list(CHAT), replied("2"), replied("3")])],
)
def test_pandas_reads_and_writes_preferences_as_trl_wants_them(prompt, expected, tmp_path):
    tables.write_preferences(tmp_path / "0.parquet", [preference(prompt)])
    frame = pd.read_parquet(tmp_path / "0.parquet")
    [row] = frame.to_dict("records")
    shown = [row[name] for name in ("prompt", "chosen", "rejected")]
    assert [text if isinstance(text, str) else list(text) for text in shown] == expected
    assert row["chosen_ids"].tolist() == [7, 2] and row["rejected_ids"].tolist() == [2**31 - 1]
    assert (row["problem_id"], row["chosen_reward"], row["rejected_reward"]) == (
        "00ff00ff00ff00ff",
        1.0,
        0.0,
    )
    frame.to_parquet(tmp_path / "0.parquet")
    assert all(map(same, tables.read_preferences(tmp_path), [preference(prompt)]))


@pytest.mark.parametrize("prompt", ["1+1?", CHAT])
def test_pairs_with_a_truncated_response_can_be_left_out(prompt, tmp_path):
    cut = dataclasses.replace(preference(prompt), chosen_truncated=False, rejected_truncated=True)
    whole = dataclasses.replace(
        preference(prompt), chosen_truncated=False, rejected_truncated=False
    )
    tables.write_preferences(tmp_path / "0.parquet", [cut, whole, preference(prompt)])
    assert all(map(same, tables.read_preferences(tmp_path), [cut, whole, preference(prompt)]))
    frame = pd.read_parquet(tmp_path / "0.parquet")
    assert frame["rejected_truncated"].tolist() == [True, False, None]
    frame[:2].drop(columns=["chosen_truncated", "rejected_truncated"]).to_parquet(
        tmp_path / "0.parquet"
    )
    read = tables.read_preferences(tmp_path)  # as other programs write pairs
    assert [(row.chosen_truncated, row.rejected_truncated) for row in read] == [(None, None)] * 2


def test_preferences_that_fit_no_table_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"1 of 2 prompts are conversations"):
        tables.write_preferences(tmp_path / "0.parquet", [preference(), preference(CHAT)])
    with pytest.raises(ValueError, match="role and content"):
        named = ({"role": "user", "content": "1+1?", "name": "Ada"},)
        tables.write_preferences(tmp_path / "0.parquet", [preference(named)])
    tables.write_preferences(tmp_path / "0.parquet", [])
    assert tables.read_preferences(tmp_path) == []


@examples(40)
@given(
    written=st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=3),
        hnp.arrays(
            st.sampled_from([np.float64, np.float32, np.int64, np.bool_]),
            st.just(3),
            fill=st.nothing(),
        )
        | st.lists(texts, min_size=3, max_size=3),
        max_size=4,
    )
)
def test_columns_round_trip_bit_for_bit(written, tmp_path_factory):
    path = tmp_path_factory.mktemp("columns") / "prompts.parquet"
    tables.write_columns(path, written)
    table = pq.read_table(path)
    assert table.column_names == list(written)
    for name, values in written.items():
        assert same(
            table[name].to_pylist() if isinstance(values, list) else table[name].to_numpy(), values
        )


def test_columns_of_texts_and_of_nothing(tmp_path):
    tables.write_columns(tmp_path / "new" / "0.parquet", {"policy": ["a", "b\ud800"]})
    assert pd.read_parquet(tmp_path / "new" / "0.parquet")["policy"].tolist() == ["a", "b\ufffd"]
    tables.write_columns(tmp_path / "0.parquet", {"figures": np.zeros(0, np.float32), "texts": []})
    empty = pq.read_table(tmp_path / "0.parquet")
    assert len(empty) == 0 and [str(kind) for kind in empty.schema.types] == ["float", "string"]
    assert (
        pq.ParquetFile(tmp_path / "0.parquet").metadata.row_group(0).column(1).compression == "ZSTD"
    )


@pytest.mark.parametrize(
    ("values", "message"), [(np.zeros((2, 2)), "1-dimensional"), (np.zeros(1), "length")]
)
def test_columns_that_fit_no_table_are_refused(values, message, tmp_path):
    with pytest.raises(ValueError, match=rf"0\.parquet: cannot write these rows: .*{message}"):
        tables.write_columns(tmp_path / "0.parquet", {"y": np.array([1, 2]), "x": values})
    assert not list(tmp_path.iterdir())
