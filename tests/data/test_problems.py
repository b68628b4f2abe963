import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from examples import examples
from hub_server import hub_server
from hypothesis import given
from hypothesis import strategies as st

from g2d_jax.data import rows
from g2d_jax.data.problems import load_problems, to_problem
from g2d_jax.data.splits import problem_id

SHARED = Path(__file__).parents[3] / "shared" / "data"


def write(path, *lines, ending="\n"):
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(ending.encode().join(encoded))
    return str(path)


@pytest.fixture
def jsonl(tmp_path):
    """jsonl(*rows): path of a file with these rows, dicts or raw bytes."""
    return lambda *lines, **options: write(tmp_path / "rows.jsonl", *lines, **options)


@pytest.mark.parametrize("prompt", ["problem", "question", "prompt"])
@pytest.mark.parametrize("answer", ["answer", "ground_truth", "solution"])
def test_usual_field_names(jsonl, prompt, answer):
    (problem,), report = load_problems(jsonl({prompt: "1+1?", answer: "2", "extra": [1]}))
    assert (problem.prompt, problem.answer, problem.columns) == ("1+1?", "2", {"extra": [1]})
    assert problem.id == problem_id("1+1?") and problem.source == "rows.jsonl"
    assert (report.rows, report.kept) == (1, 1)


def test_verl_row(jsonl):
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "1+1?", "name": None}],
        "reward_model": {"style": "rule", "ground_truth": 2},
        "extra_info": {"index": 0},
    }
    (problem,), _ = load_problems(jsonl(row))
    assert problem.prompt == ({"role": "user", "content": "1+1?"},)
    assert (problem.answer, problem.subset) == ("2", "openai/gsm8k")
    assert problem.columns == {"reward_model": row["reward_model"], "extra_info": {"index": 0}}


def test_mapped_fields(jsonl):
    row = {"problem": "not this", "q": {"text": "1+1?"}, "a.b": "2", "kind": 3}
    fields = {"prompt": "q.text", "answer": "a.b", "subset": "kind"}
    (problem,), _ = load_problems(jsonl(row), fields=fields)
    assert (problem.prompt, problem.answer, problem.subset) == ("1+1?", "2", "3")
    with pytest.raises(ValueError, match="did you mean answer"):
        load_problems(jsonl(row), fields={"answr": "a.b"})
    with pytest.raises(ValueError, match=r"line 1: no field 'gold'; the row has 'problem', 'q', 'a.b', 'kind'"):
        load_problems(jsonl(row), fields={"answer": "gold"})


@pytest.mark.parametrize(
    ("value", "text"),
    [(27.0, "27"), (27, "27"), (-0.0, "0"), (0.5, "0.5"), (1e-7, "0.0000001"), (1e22, "1" + "0" * 22), (100, "100"),
     (" 7 ", "7"), ("", None), (None, None), (0, "0")],
)  # fmt: skip
def test_answers_as_text(value, text):
    assert to_problem({"problem": "x", "answer": value}, "", {}).answer == text


@pytest.mark.parametrize("value", [True, [1], {"a": 1}, float("nan"), float("inf")])
def test_answers_of_a_wrong_type(jsonl, value):
    with pytest.raises(ValueError, match=r"rows.jsonl, line 1: 'answer' must be a text or a finite number"):
        load_problems(jsonl({"problem": "x", "answer": value}))


@pytest.mark.parametrize(
    ("row", "answer", "solution"),
    [
        ({"answer": "She has 3.\n#### 1,600"}, "1,600", "She has 3.\n#### 1,600"),
        (
            {"solution": r"So \boxed{1} or \boxed{\frac{1}{2}}."},
            r"\frac{1}{2}",
            r"So \boxed{1} or \boxed{\frac{1}{2}}.",
        ),
        ({"solution": r"So \boxed{1}.", "answer": "one"}, "one", r"So \boxed{1}."),
        ({"solution": "34"}, "34", None),
        ({"solution": "First this.\nThen that."}, None, "First this.\nThen that."),
        ({"solution": "long " * 40}, None, ("long " * 40).strip()),
        ({"solution": ["a list"], "answer": "3"}, "3", None),
    ],
)
def test_answers_inside_solutions(row, answer, solution):
    problem = to_problem({"problem": "x", **row}, "", {})
    assert (problem.answer, problem.solution) == (answer, solution)


def test_rows_without_answer_are_counted(jsonl):
    problems, report = load_problems(
        jsonl({"prompt": "a"}, {"prompt": "b", "answer": ""}, {"prompt": "c", "answer": "1"})
    )
    assert [problem.answer for problem in problems] == [None, None, "1"]
    assert report.without_answer == 2


def test_duplicates_are_dropped_and_contradictions_counted(jsonl):
    path = jsonl(*({"problem": p, "answer": a} for p, a in [("x", "1"), ("y", "2"), ("x\n", "1"), (" x", "3")]))
    problems, report = load_problems(path)
    assert [(problem.prompt, problem.answer) for problem in problems] == [("x", "1"), ("y", "2")]
    assert (report.rows, report.kept, report.duplicates, report.conflicts) == (4, 2, 2, 1)


BROKEN = {
    b'{"problem": "x"': "not JSON",
    b'{"problem": "\xff"}': "not UTF-8 at byte 13",
    b"[1, 2]": "an object with named fields is needed, got list",
    b'"x"': "got str",
    b"{}": "no field problem or question or prompt",
    b'{"problem": null, "text": 1}': "the row has 'problem', 'text'",
    b'{"problem": 5}': "'problem' must be a text, got int",
    b'{"problem": " "}': "'problem' is blank",
    b'{"problem": "a\\u0000b"}': "NUL",
    b'{"problem": "a\x00b"}': "not JSON",
    b'{"problem": "\\ud800"}': "surrogate",
    b'{"prompt": []}': "list of messages",
    b'{"prompt": [{"role": "user"}]}': r"prompt\[0\]: the content must be a text",
    b'{"prompt": [{"role": "tool", "content": ""}]}': r"role must be one of .* got 'tool'",
    b'{"prompt": ["hi"]}': "must be a message",
    b'{"prompt": [{"role": "assistant", "content": "a"}]}': "must end with a user message",
    b"[" * 100_000: "nested too deeply",
    b'{"problem": "x", "answer": ' + b"9" * 5000 + b"}": "not JSON",
}


@pytest.mark.parametrize("line", BROKEN, ids=lambda line: line[:30].decode("latin-1"))
def test_broken_rows_are_named_and_skipped_only_on_request(jsonl, line):
    path = jsonl({"problem": "good", "answer": "1"}, line, {"problem": "also good", "answer": "2"})
    with pytest.raises(ValueError, match=rf"rows\.jsonl, line 2: .*{BROKEN[line]}"):
        load_problems(path)
    problems, report = load_problems(path, on_error="skip")
    assert [problem.answer for problem in problems] == ["1", "2"]
    assert (report.rows, report.broken) == (3, 1) and "line 2" in report.errors[0]


def test_lines_without_end_are_not_read_into_memory(jsonl, monkeypatch):
    monkeypatch.setattr(rows, "MAX_LINE_BYTES", 100)
    path = jsonl({"problem": "x" * 1000}, {"problem": "short"})
    problems, report = load_problems(path, on_error="skip")
    assert [problem.prompt for problem in problems] == ["short"]
    assert "line 1: the line is longer than 100 bytes" in report.errors[0]


def test_byte_order_mark_windows_line_ends_and_blank_lines(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"problem": "a"}\r\n\r\n{"problem": "b\xe2\x80\xa8c"}\r\n')
    assert [problem.prompt for problem in load_problems(str(path))[0]] == ["a", "b\u2028c"]


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_empty_files(tmp_path, content):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="holds nothing usable: 0 rows"):
        load_problems(str(path), on_error="skip")


def test_a_file_of_broken_rows_only(jsonl):
    with pytest.raises(ValueError, match=r"2 rows, 2 of them broken; the first: .*line 1"):
        load_problems(jsonl(b"x", b"y"), on_error="skip")


@given(st.binary(max_size=200))
@examples(60)
def test_any_bytes_give_problems_or_a_value_error(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("bytes") / "rows.jsonl"
    path.write_bytes(content)
    try:
        problems, report = load_problems(str(path), on_error="skip")
    except ValueError:
        return
    assert len(problems) == report.kept


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["role", "content"]), inner, max_size=2)
    ),
    max_leaves=4,
)
ROWS = st.dictionaries(
    st.sampled_from(["problem", "prompt", "answer", "solution", "reward_model", "subject"]), JSON_VALUES
)


@given(st.lists(ROWS, max_size=4))
@examples(60)
def test_rows_of_any_types_are_counted_exactly(tmp_path_factory, values):
    path = write(tmp_path_factory.mktemp("rows") / "rows.jsonl", {"problem": "good"}, *values)
    problems, report = load_problems(path, on_error="skip")
    assert report.rows == 1 + len(values) == report.kept + report.duplicates + report.broken
    for problem in problems:
        assert problem.id == problem_id(problem.prompt)
        assert problem.answer is None or problem.answer.strip() == problem.answer != ""


def test_json_and_parquet_read_alike(tmp_path, jsonl):
    values = [
        {"question": "a", "answer": 1.0, "reward_model": {"x": 1}},
        {"question": "b", "answer": 2.0, "reward_model": {"x": 2}},
    ]
    listed = tmp_path / "rows.json"
    listed.write_text(json.dumps(values))
    wrapped = tmp_path / "wrapped.json"
    wrapped.write_text(json.dumps({"data": values}))
    table = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(values), table)
    expected = load_problems(jsonl(*values))[0]
    for path in (listed, wrapped, table):
        problems = load_problems(str(path))[0]
        assert [p.answer for p in problems] == ["1", "2"]
        assert [(p.id, p.prompt, p.columns) for p in problems] == [(p.id, p.prompt, p.columns) for p in expected]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'{"problem": "x"}', "a list of objects is needed"),
        ("a.json", b'{"problem": "x"}\n{"problem": "y"}', "goes into a .jsonl file"),
        ("a.json", b"\xff\xfe", "not UTF-8"),
        ("a.parquet", b"PAR1 no", "not a readable Parquet file"),
        ("a.parquet", b"", "not a readable Parquet file"),
        ("a.csv", b"problem", "unknown data source"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_problems(str(tmp_path / name), on_error="skip")


def test_files_on_an_object_store(bucket):
    (bucket / "rows.jsonl").write_bytes(b'{"problem": "a"}\n{"problem": "b"}\n')
    problems, _ = load_problems(str(bucket / "rows.jsonl"))
    assert [problem.prompt for problem in problems] == ["a", "b"] and problems[0].source == "rows.jsonl"
    with pytest.raises(ValueError, match=r"s3://bucket/data/none.jsonl cannot be read"):
        load_problems(str(bucket / "none.jsonl"))


def test_broken_text_in_parquet_is_named_by_row(tmp_path):
    column = pa.array([b"good", b"\xff", b"fine"]).cast(pa.binary()).view(pa.string())
    pq.write_table(pa.table({"problem": column}), tmp_path / "rows.parquet")
    problems, report = load_problems(str(tmp_path / "rows.parquet"), on_error="skip")
    assert [problem.prompt for problem in problems] == ["good", "fine"]
    assert "row 2: not UTF-8" in report.errors[0]


def test_missing_file_and_unknown_sources():
    with pytest.raises(ValueError, match=r"missing.jsonl cannot be read: .*hub:owner/name"):
        load_problems("missing.jsonl")
    with pytest.raises(ValueError, match="did you mean math500"):
        load_problems("math-500")
    with pytest.raises(ValueError, match="unknown procedural task"):
        load_problems("procedural:geometry", limit=1)
    with pytest.raises(ValueError, match="unknown split"):
        load_problems("procedural:slips", limit=1, split="valid")


def test_splits_and_limit(jsonl):
    path = jsonl(*({"problem": str(n)} for n in range(60)))
    parts = {split: load_problems(path, split=split) for split in ("train", "dev", "test")}
    everything, _ = load_problems(path)
    ids = [problem.id for problems, _ in parts.values() for problem in problems]
    assert sorted(ids) == sorted(problem.id for problem in everything) and all(
        problems for problems, _ in parts.values()
    )
    for problems, report in parts.values():
        assert report.rows == 60 == report.kept + report.other_split
        first, short = load_problems(path, split=parts_name(parts, problems), limit=3)
        assert first == problems[:3] and short.rows <= 60
    with pytest.raises(ValueError, match="limit"):
        load_problems(path, limit=0)
    with pytest.raises(ValueError, match="on_error"):
        load_problems(path, on_error="ignore")


def parts_name(parts, problems):
    return next(split for split, (found, _) in parts.items() if found is problems)


def test_procedural_source():
    problems, report = load_problems("procedural:slips", split="test", limit=5, seed=1)
    assert len(problems) == report.kept == 5
    with pytest.raises(ValueError, match="no end"):
        load_problems("procedural:slips")


def test_hub_without_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    for source in ("hub:owner/name", "math500", "gsm8k:train"):
        with pytest.raises(ImportError, match=r"pip install 'g2d-jax\[hub\]'"):
            load_problems(source)


@pytest.mark.parametrize("name", ["math500", "amc23", "gsm8k", "gsm8k:train", "math", "numinamath"])
def test_a_suite_when_the_hub_cannot_be_reached(name, monkeypatch, tmp_path):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    suite = name.partition(":")[0]
    with pytest.raises(ValueError, match=rf"hub:\S+/\S+: split .* cannot be loaded: .* write {suite}:FILE\.jsonl"):
        load_problems(name)


def test_hub_data_set_from_a_local_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (tmp_path / "owner" / "name").mkdir(parents=True)
    write(tmp_path / "owner" / "name" / "train.jsonl", {"question": "1+1?", "answer": "#### 2"})
    (problem,), report = load_problems("hub:owner/name:train")
    assert (problem.answer, problem.source, report.rows) == ("2", "owner/name", 1)
    with pytest.raises(ValueError, match="split 'nothing'"):
        load_problems("hub:owner/name:nothing")


FROM_HUB = """
from g2d_jax.data.examples import load_examples
from g2d_jax.data.problems import load_problems
for revision in (None, "v1"):
    (problem,), _ = load_problems("hub:org/data", revision=revision)
    fields = {"prompt": "question", "completion": "answer"}
    (example,), _ = load_examples("hub:org/data", revision=revision, fields=fields)
    print(problem.answer, example.completion)
try:
    load_problems("hub:org/data", revision="v2")
except ValueError as error:
    assert "hub:org/data: split 'train' of configuration None cannot be loaded" in str(error), error
else:
    raise AssertionError("a revision that there is not")
"""


def test_a_revision_pins_hub_data(tmp_path):
    folders = {revision: tmp_path / revision for revision in ("main", "v1")}
    for answer, folder in enumerate(folders.values(), 2):
        folder.mkdir()
        write(folder / "train.jsonl", {"question": "1+1?", "answer": f"#### {answer}"})
    with hub_server("org/data", folders, [], kind="datasets") as url:
        env = {**os.environ, "HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "cache")}
        run = subprocess.run([sys.executable, "-c", FROM_HUB], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "2 #### 2\n3 #### 3\n"), run.stderr


@pytest.mark.parametrize("path", ["math500:file.jsonl", "file.jsonl", "procedural:slips"])
def test_only_hub_data_has_a_revision(path):
    with pytest.raises(ValueError, match=f"revision is 'v1', but '{path}' does not come from the hub"):
        load_problems(path, limit=1, revision="v1")


needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="needs the shared data")


@needs_shared
def test_math500():
    problems, report = load_problems(f"math500:{SHARED / 'math500.jsonl'}")
    assert (report.rows, report.kept, report.without_answer) == (500, 500, 0)
    assert problems[0].source == "math500" and problems[0].subset == "Precalculus"
    assert problems[0].answer == r"\left( 3, \frac{\pi}{2} \right)"
    lines = [json.loads(line) for line in (SHARED / "math500.jsonl").read_text().splitlines()]
    for problem, line in zip(problems, lines, strict=True):
        del line["answer"]
        assert to_problem(line, "", {}).answer == problem.answer


@needs_shared
def test_gsm8k():
    problems, report = load_problems(f"gsm8k:{SHARED / 'gsm8k_test.jsonl'}")
    assert (report.kept, report.without_answer) == (1319, 0)
    assert [problem.answer for problem in problems[:4]] == ["18", "3", "70000", "540"]
    assert problems[0].solution.endswith("#### 18")


@needs_shared
def test_amc23():
    problems, report = load_problems(f"amc23:{SHARED / 'amc23.jsonl'}")
    assert report.kept == 40
    assert [problem.answer for problem in problems[:4]] == ["27", "36", "45", "3159"]
    assert all("." not in problem.answer for problem in problems)
