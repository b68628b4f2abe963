"""Problems and examples from hostile files: valid records, or an error that names the file."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fuzz.hostile import COLUMNS, DEEP, ODD, VALUES, accepted, as_json, changed, damaged, tries
from hypothesis import given
from hypothesis import strategies as st
from sources import load_examples, load_problems

from g2d_jax.data.splits import problem_id

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("bounded_memory")]

GOOD = [
    {"problem": "1+1?", "answer": "2", "solution": "one and one is \\boxed{2}", "subset": "sums"},
    {
        "prompt": [{"role": "user", "content": "2+2?"}],
        "reward_model": {"ground_truth": 4},
        "level": 3,
    },
    {"question": "3+3?", "answer": "3 and 3\n#### 6", "data_source": "gsm"},
    {"messages": [{"role": "user", "content": "4+4?"}, {"role": "assistant", "content": "8"}]},
    {"prompt": "5+5?", "completion": "10"},
    {
        "conversation": [{"role": "user", "content": "hi there"}],
        "toxic": False,
        "source": "olympiads",
    },
]
LINES = b"".join(as_json(row) + b"\n" for row in GOOD)
SOURCES = st.sampled_from(["", "math500:", "numinamath:", "wildchat:"])


def check(path: Path, prefix: str = "") -> None:
    """Read it as problems and as examples, stopping at broken rows and skipping them."""
    for on_error in ("raise", "skip"):
        found = accepted(lambda: load_problems(f"{prefix}{path}", on_error=on_error), path.name)  # noqa: B023
        if found is not None:
            problems, report = found
            left = (
                report.duplicates
                + report.broken
                + report.other_split
                + sum(report.filtered.values())
            )
            assert report.rows == report.kept + left and report.kept == len(problems)
            for problem in problems:
                assert problem.id == problem_id(problem.prompt) and problem.prompt
                json.dumps(problem.prompt, ensure_ascii=False).encode()
                assert problem.answer is None or problem.answer.strip() == problem.answer != ""
        examples = accepted(lambda: load_examples(path, on_error=on_error), path.name)  # noqa: B023
        for example in examples[0] if examples else ():
            assert example.prompt and example.completion.strip()


@given(damaged(LINES), SOURCES)
@tries(60)
def test_damaged_lines(folder: Path, data: bytes, prefix: str) -> None:
    path = folder / "rows.jsonl"
    path.write_bytes(data)
    check(path, prefix)


@given(
    st.lists(st.sampled_from(ODD) | VALUES.map(as_json) | changed(GOOD).map(as_json), max_size=4),
    SOURCES,
)
@tries(60)
def test_odd_lines_beside_good_ones(folder: Path, lines: list[bytes], prefix: str) -> None:
    path = folder / "rows.jsonl"
    path.write_bytes(b"\n".join([as_json(GOOD[0]), *lines, as_json(GOOD[3])]))
    check(path, prefix)


@given(
    changed(GOOD).flatmap(
        lambda rows: st.sampled_from(
            [as_json(row) for row in rows] if isinstance(rows, list) and rows else [b"{}"]
        )
    ),
    SOURCES,
)
@tries(100)
def test_rows_of_wrong_types(folder: Path, line: bytes, prefix: str) -> None:
    path = folder / "rows.jsonl"
    path.write_bytes(line)
    check(path, prefix)


@given(
    damaged(as_json(GOOD))
    | changed({"data": GOOD}).map(as_json)
    | st.sampled_from(ODD)
    | st.binary(max_size=100)
)
@tries(60)
def test_json_files(folder: Path, data: bytes) -> None:
    path = folder / "rows.json"
    path.write_bytes(data)
    check(path)


def parquet(path: Path, table: pa.Table) -> bytes:
    pq.write_table(table, path)
    return path.read_bytes()


@given(st.data())
@tries(100)
def test_damaged_parquet(folder: Path, data: st.DataObject) -> None:
    path = folder / "rows.parquet"
    rows = [{"problem": f"{i}+{i}?", "answer": str(2 * i), "nested": {"a": [i]}} for i in range(20)]
    whole = parquet(path, pa.Table.from_pylist(rows))
    path.write_bytes(data.draw(damaged(whole) | st.sampled_from(ODD)))
    check(path)


NAMES = [
    "problem",
    "prompt",
    "answer",
    "solution",
    "subject",
    "reward_model",
    "messages",
    "completion",
    "conversation",
]


@given(
    st.lists(
        st.tuples(st.sampled_from(NAMES), st.sampled_from(sorted(COLUMNS))), min_size=1, max_size=4
    ),
    SOURCES,
)
@tries(80)
def test_parquet_of_any_types(folder: Path, columns: list[tuple[str, str]], prefix: str) -> None:
    path = folder / "rows.parquet"
    table = pa.Table.from_arrays(
        [COLUMNS[kind] for _, kind in columns], [name for name, _ in columns]
    )
    try:
        parquet(path, table)
    except (pa.ArrowException, OSError):  # Parquet cannot hold every type
        return
    check(path, prefix)


@pytest.mark.parametrize("kind", sorted(COLUMNS))
def test_a_column_nobody_asked_for(folder: Path, kind: str) -> None:
    """A value that Python cannot hold breaks its row, not the file."""
    path = folder / "rows.parquet"
    try:
        parquet(
            path,
            pa.Table.from_arrays(
                [pa.array(["1+1?", "2?", "3?"]), COLUMNS[kind]], ["problem", "extra"]
            ),
        )
    except pa.ArrowException:
        pytest.skip("Parquet cannot hold this type")
    check(path)


@pytest.mark.parametrize(
    "text",
    ["\\boxed{" * 20_000, "( " * 50_000, "A " * 50_000 + "A.", "A: " * 30_000, " " * 200_000 + "x"],
)
@pytest.mark.parametrize("prefix", ["", "numinamath:"])
def test_long_texts_are_searched_in_linear_time(folder: Path, text: str, prefix: str) -> None:
    path = folder / "rows.jsonl"
    path.write_bytes(
        as_json({"problem": text, "solution": text, "answer": text, "source": "olympiads"})
    )
    check(path, prefix)


@pytest.mark.parametrize("line", DEEP, ids=range(len(DEEP)))
def test_deep_nesting_is_a_broken_row(folder: Path, line: bytes) -> None:
    path = folder / "rows.jsonl"
    path.write_bytes(as_json(GOOD[0]) + b"\n" + line)
    problems, report = load_problems(path, on_error="skip")
    assert len(problems) == 1 and report.broken == 1


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet"])
def test_a_folder_and_a_device_in_place_of_a_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    check(tmp_path / name)
    (tmp_path / name).rmdir()
    (tmp_path / name).symlink_to("/dev/null")
    check(tmp_path / name)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to(name)  # a circle
    check(tmp_path / name)
