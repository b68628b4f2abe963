import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import hub_server
from sources import load_problems

from g2d_jax.config import Source
from g2d_jax.data import fields, rows
from g2d_jax.data import problems as reading
from g2d_jax.data.problems import to_problem
from g2d_jax.data.splits import problem_id
from g2d_jax.rewards.verify import quick_verdict

VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1+1?", "name": None}],
    "reward_model": {"style": "rule", "ground_truth": 2},
}


@pytest.mark.parametrize(
    ("row", "prompt", "answer", "subset", "columns"),
    [
        *(({p: "1+1?", a: "2", "x": [1]}, "1+1?", "2", "", {"x": [1]})
          for p in ("problem", "question", "prompt") for a in ("answer", "ground_truth", "solution")),
        (VERL, ({"role": "user", "content": "1+1?"},), "2", "openai/gsm8k", {"reward_model": VERL["reward_model"]}),
    ],
)  # fmt: skip
def test_usual_field_names(jsonl, row, prompt, answer, subset, columns):
    (problem,), report = load_problems(jsonl(row))
    assert (problem.prompt, problem.answer, problem.subset, problem.columns) == (
        prompt,
        answer,
        subset,
        columns,
    )
    assert problem.id == problem_id("1+1?") and problem.source == "rows.jsonl"
    assert (report.rows, report.kept) == (1, 1)


def test_what_became_of_the_rows_is_counted(jsonl):
    answers = [("x", "1"), ("y", ""), ("x\n", "1"), (" x", "3"), ("z", None)]
    problems, report = load_problems(jsonl(*({"problem": p, "answer": a} for p, a in answers)))
    assert [(problem.prompt, problem.answer) for problem in problems] == [
        ("x", "1"),
        ("y", None),
        ("z", None),
    ]
    assert (report.rows, report.kept, report.duplicates, report.conflicts) == (5, 3, 2, 1)
    for content, message in (
        (b"", "no usable row: 0 rows"),
        (b"x\ny", r"2 rows, left out: 2 broken \(the first: .*1"),
    ):
        with pytest.raises(ValueError, match=message):
            load_problems(jsonl(content), on_error="skip")


def test_splits_and_limit(jsonl):
    path = jsonl(*({"problem": str(n)} for n in range(60)))
    everything = {problem.id for problem in load_problems(path)[0]}
    for split in ("train", "dev", "test"):
        problems, report = load_problems(path, split=split)
        everything -= {problem.id for problem in problems}
        assert problems and report.rows == 60 == report.kept + report.other_split
        assert load_problems(path, split=split, limit=3)[0] == problems[:3]
    assert not everything
    assert len(load_problems("procedural:slips", split="test", limit=5)[0]) == 5
    for options in ({"limit": 0}, {"on_error": "ignore"}, {"split": "valid"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            load_problems(path, **options)


def test_mapped_fields(jsonl):
    row = {"problem": "not this", "q": {"text": "1+1?"}, "a.b": "2", "kind": 3}
    fields = {"prompt": "q.text", "answer": "a.b", "subset": "kind"}
    (problem,), _ = load_problems(jsonl(row), fields=fields)
    assert (problem.prompt, problem.answer, problem.subset) == ("1+1?", "2", "3")
    with pytest.raises(ValueError, match="did you mean answer"):
        load_problems(jsonl(row), fields={"answr": "a.b"})
    with pytest.raises(
        ValueError, match=r"line 1: no field 'gold'; the row has 'problem', 'q', 'a.b', 'kind'"
    ):
        load_problems(jsonl(row), fields={"answer": "gold"})


@pytest.mark.parametrize(
    ("value", "text"),
    [(27.0, "27"), (27, "27"), (-0.0, "0"), (0.5, "0.5"), (1e-7, "0.0000001"), (1e22, "1" + "0" * 22), (100, "100"),
     (" 7 ", "7"), ("", None), (None, None), (0, "0")],
)  # fmt: skip
def test_answers_as_text(value, text):
    assert to_problem({"problem": "x", "answer": value}, "", {}).answer == text


@pytest.mark.parametrize(
    ("row", "answer", "solution"),
    [
        ({"answer": "She has 3.\n#### 1,600"}, "1,600", "She has 3.\n#### 1,600"),
        ({"solution": r"So \boxed{1} or \boxed{1/2}."}, "1, 1/2", r"So \boxed{1} or \boxed{1/2}."),
        (
            {"solution": r"So \boxed{1}, and then \boxed{1/2}."},
            "1/2",
            r"So \boxed{1}, and then \boxed{1/2}.",
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


BROKEN = {
    b'{"problem": "x"': "not JSON",
    b'{"problem": "\xff"}': "not UTF-8 at byte 13",
    b"[1, 2]": "must be an object with named fields, got list",
    b'"x"': "got str",
    b"{}": "no field 'problem' or 'question' or 'prompt' or 'messages'; the row has none",
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
    b'{"problem": "x", "answer": true}': "'answer' must be a text or a finite number, got True",
    b'{"problem": "x", "answer": [[1]]}': r"'answer\[0\]' must be a text or a finite number",
    b'{"problem": "x", "answer": Infinity}': "'answer' must be a text or a finite number, got inf",
    b"\x00\xff\xfe": "not UTF-8",
}


@pytest.mark.parametrize("line", BROKEN, ids=lambda line: line[:30].decode("latin-1"))
def test_broken_rows_are_named_and_skipped_only_on_request(jsonl, line):
    path = jsonl({"problem": "good", "answer": "1"}, line, {"problem": "also good", "answer": "2"})
    with pytest.raises(ValueError, match=rf"rows\.jsonl, line 2: .*{BROKEN[line]}"):
        load_problems(path)
    problems, report = load_problems(path, on_error="skip")
    assert [problem.answer for problem in problems] == ["1", "2"]
    assert (report.rows, report.broken) == (3, 1) and "line 2" in report.errors[0]


def test_lines_of_all_kinds(jsonl, monkeypatch):
    monkeypatch.setattr(rows, "MAX_ROW_BYTES", 100)
    path = jsonl({"problem": "x" * 1000}, {"problem": "short"})
    problems, report = load_problems(path, on_error="skip")
    assert [problem.prompt for problem in problems] == ["short"]
    assert "line 1: the row is longer than 100 bytes" in report.errors[0]
    windows = b'\xef\xbb\xbf{"problem": "a"}\r\n\r\n{"problem": "b\xe2\x80\xa8c"}\r\n'
    assert [problem.prompt for problem in load_problems(jsonl(windows))[0]] == ["a", "b\u2028c"]


def test_json_and_parquet_read_alike(tmp_path, jsonl):
    values = [
        {"question": q, "answer": x, "reward_model": {"x": x}} for q, x in (("a", 1.0), ("b", 2.0))
    ]
    listed, wrapped, table = (
        tmp_path / name for name in ("rows.json", "wrapped.json", "rows.parquet")
    )
    listed.write_text(json.dumps(values))
    wrapped.write_text(json.dumps({"data": values}))
    pq.write_table(pa.Table.from_pylist(values), table)
    expected = load_problems(jsonl(*values))[0]
    for path in (listed, wrapped, table):
        problems = load_problems(str(path))[0]
        assert [p.answer for p in problems] == ["1", "2"]
        assert [(p.id, p.prompt, p.columns) for p in problems] == [
            (p.id, p.prompt, p.columns) for p in expected
        ]
    column = pa.array([b"good", b"\xff", b"fine"]).cast(pa.binary()).view(pa.string())
    pq.write_table(pa.table({"problem": column}), table)
    problems, report = load_problems(str(table), on_error="skip")
    assert [problem.prompt for problem in problems] == ["good", "fine"]
    assert "row 2: it has a value that Python cannot represent: 'utf-8'" in report.errors[0]


def test_equal_long_texts_of_parquet_are_expanded_a_few_at_a_time(tmp_path, monkeypatch):
    """Parquet stores a text once for all rows that have it."""
    path = tmp_path / "small.parquet"
    long = "x" * 200_000
    pq.write_table(pa.table({"problem": [long] * 1000, "n": range(1000)}), path, compression="zstd")
    assert path.stat().st_size < 20_000
    monkeypatch.setattr(rows, "BATCH_BYTES", 10**6)
    before = pa.total_allocated_bytes()
    count = 0
    for row in rows.file_rows(str(path)):
        assert row.values == {"problem": long, "n": count}
        assert pa.total_allocated_bytes() - before < 5 * 10**6
        count += 1
    assert count == 1000
    monkeypatch.setattr(rows, "MAX_ROW_BYTES", 199_999)
    with pytest.raises(
        ValueError, match=r"left out: 1000 broken .*row 1: the row is longer than 199,999 bytes"
    ):
        load_problems(str(path), on_error="skip")


LONG = "x" * 2**16
HOSTILE = {
    "a list of one row that says a text often": {
        "n": pa.array([[LONG] * 100], pa.list_(pa.string()))
    },
    "a map of one row": {
        "n": pa.array([[(str(i), LONG) for i in range(100)]], pa.map_(pa.string(), pa.string()))
    },
    "lists in lists": {"n": pa.array([[[LONG] * 10] * 10])},
    "messages": {"n": pa.array([[{"role": "user", "content": LONG}] * 100])},
    "bytes": {"n": pa.array([[LONG.encode()] * 100])},
}


@pytest.mark.parametrize("columns", HOSTILE.values(), ids=HOSTILE)
def test_a_row_of_a_small_parquet_file_that_says_a_text_often_is_refused_unexpanded(
    tmp_path, columns, monkeypatch
):
    for limit in ("MAX_ROW_BYTES", "BATCH_BYTES"):
        monkeypatch.setattr(rows, limit, 2**20)
    rest = {
        name: pa.concat_arrays([values, pa.array([None], values.type)])
        for name, values in columns.items()
    }
    pq.write_table(
        pa.table({"problem": ["1+1=", "2+2="], **rest}), tmp_path / "a.parquet", compression="zstd"
    )
    assert (tmp_path / "a.parquet").stat().st_size < 30_000
    before = pa.default_memory_pool().bytes_allocated()
    seen = []
    for row in rows.file_rows(str(tmp_path / "a.parquet")):
        seen.append(row)
        assert pa.default_memory_pool().bytes_allocated() - before < 2**20
    assert seen[0].error == "the row is longer than 1,048,576 bytes"
    assert seen[1].values == {"problem": "2+2=", "n": None}


def test_parquet_that_grows_too_far_when_it_is_read_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "GROUP_BYTES", 10 * 2**20)
    path = tmp_path / "a.parquet"
    long = pa.array([[b"x" * 2**20] * 11], pa.list_(pa.binary(2**20)))
    tables = {
        "one long text": pa.table({"problem": ["x" * 11 * 2**20]}),
        "a list of a number": pa.table({"problem": ["1+1="], "n": pa.array([[7] * 2 * 2**20])}),
        "a list of long values": pa.table({"problem": ["1+1="], "n": long}),
    }
    for what, table in tables.items():
        pq.write_table(table, path, compression="zstd")
        with pytest.raises(
            ValueError, match=r"a\.parquet, group 1 of its rows: .* Write smaller groups"
        ):
            list(rows.file_rows(str(path)))
        assert path.stat().st_size < 100_000, what
    prefixes = {
        "use_dictionary": False,
        "column_encoding": {"n.list.element": "DELTA_BYTE_ARRAY", "problem": "PLAIN"},
    }
    pq.write_table(
        pa.table({"problem": ["1"], "n": [["x" * 2**20] * 11]}),
        path,
        compression="zstd",
        **prefixes,
    )
    with pytest.raises(ValueError, match="group 1 of its rows"):
        list(rows.file_rows(str(path)))


WRITTEN = {
    "as ever": {},
    "no indices": {"use_dictionary": False},
    "version 2": {"data_page_version": "2.0"},
    "without Arrow's schema": {"store_schema": False},
    "prefixes": {
        "use_dictionary": False,
        "column_encoding": {
            "problem": "DELTA_BYTE_ARRAY",
            "deep.list.element.list.element": "DELTA_BYTE_ARRAY",
            "texts.list.element": "DELTA_LENGTH_BYTE_ARRAY",
        },
    },
}


@pytest.mark.parametrize("how", WRITTEN.values(), ids=WRITTEN)
def test_all_that_parquet_holds_is_read_in_pieces_as_it_was_written(tmp_path, monkeypatch, how):
    monkeypatch.setattr(rows, "BATCH_BYTES", 700)
    table = pa.table(
        {
            "problem": [f"1+{i}=" for i in range(60)],
            "texts": pa.array([["y" * 100, None], None, []] * 20, pa.list_(pa.string())),
            "messages": [[{"role": "user", "content": "a"}], [{"role": "user", "content": None}]]
            * 30,
            "map": pa.array(
                [[("k", "v")], [("q", "w"), ("r", None)]] * 30, pa.map_(pa.string(), pa.string())
            ),
            "category": pa.array(["a", None] * 30).dictionary_encode(),
            "numbers": pa.array([1, 2] * 30).dictionary_encode(),
            "large": pa.array([["a"], []] * 30, pa.large_list(pa.large_string())),
            "deep": [[["a"]], [["b", "c"], []]] * 30,
            "bytes": pa.array([b"a", None] * 30),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=25, **how)
    assert [row.values for row in rows.file_rows(str(tmp_path / "a.parquet"))] == table.to_pylist()


def test_texts_conversations_and_files_have_bounds(jsonl, tmp_path, monkeypatch):
    message = {"role": "user", "content": "x"}
    path = jsonl(
        {"problem": "x" * (fields.MAX_TEXT + 1)},
        {"problem": "x", "answer": "1" * (fields.MAX_TEXT + 1)},
        {"problem": [{**message, "content": "x" * (fields.MAX_TEXT + 1)}]},
        {"problem": [message] * (fields.MAX_MESSAGES + 1)},
        {"problem": "x" * fields.MAX_TEXT},
        {"problem": [message] * fields.MAX_MESSAGES},
    )
    problems, report = load_problems(path, on_error="skip")
    assert (len(problems), report.broken) == (2, 4)
    said = (
        "1,048,577 characters",
        "1,048,577 characters",
        "1,048,577 characters",
        "4,097 messages",
    )
    for number, (error, what) in enumerate(zip(report.errors, said, strict=True), 1):
        assert f"line {number}: " in error and what in error
    listed = tmp_path / "rows.json"
    listed.write_text(json.dumps([{"problem": "x"}]))
    size = listed.stat().st_size
    monkeypatch.setattr(rows.storage, "MOST_JSON", size)
    assert len(load_problems(str(listed))[0]) == 1
    monkeypatch.setattr(rows.storage, "MOST_JSON", size - 1)
    with pytest.raises(
        ValueError, match=r"rows\.json has more than .* bytes: convert it to \.jsonl"
    ):
        load_problems(str(listed))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'{"problem": "x"}', "must be a list of objects"),
        ("a.json", b'{"problem": "x"}\n{"problem": "y"}', "in a .jsonl file"),
        ("a.json", b"\xff\xfe", "not UTF-8"),
        ("a.parquet", b"PAR1 no", "not a readable Parquet file"),
        ("a.parquet", b"", "not a readable Parquet file"),
        ("a.csv", b"problem", r'unknown data source .*: python -c "import pandas; .*a.csv'),
        ("a.jsonl.gz", b"", "unknown data source .*gunzip .*a.jsonl.gz"),
        ("a.jsonl", '{"problem": "x"}\n'.encode("utf-16"), "save the file as UTF-8"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_problems(str(tmp_path / name), on_error="skip")


def test_files_on_an_object_store(bucket):
    (bucket / "rows.jsonl").write_bytes(b'{"problem": "a"}\n{"problem": "b"}\n')
    problems, _ = load_problems(str(bucket / "rows.jsonl"))
    assert [problem.prompt for problem in problems] == ["a", "b"] and problems[
        0
    ].source == "rows.jsonl"
    with pytest.raises(ValueError, match=r"s3://bucket/data/none.jsonl cannot be read"):
        load_problems(str(bucket / "none.jsonl"))


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("missing.jsonl", {}, r"missing.jsonl cannot be read: .*hub:owner/name"),
        ("math-500", {}, "did you mean math500"),
        ("procedural:geometry", {"limit": 1}, "unknown procedural task"),
        ("procedural:slips", {"limit": 1, "split": "valid"}, "split must be one of"),
        ("procedural:slips", {}, "is endless"),
        *((path, {"limit": 1, "revision": "v1"}, f"revision is 'v1', but '{path}' is not on the hub")
          for path in ("math500:file.jsonl", "file.jsonl", "procedural:slips")),
    ],
)  # fmt: skip
def test_sources_that_cannot_be(source, options, message):
    with pytest.raises(ValueError, match=message):
        load_problems(source, **options)


def test_hub_without_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    for source in ("hub:owner/name", "math500", "gsm8k:train"):
        with pytest.raises(ImportError, match=r"pip install '\.\[hub\]'"):
            load_problems(source)


@pytest.mark.parametrize("name", ["math500", "amc23", "gsm8k", "gsm8k:train", "math", "numinamath"])
def test_a_suite_when_the_hub_cannot_be_reached(name, monkeypatch, tmp_path):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    suite = name.partition(":")[0]
    with pytest.raises(
        ValueError, match=rf"hub:\S+/\S+: split .* cannot be loaded: .* write {suite}:FILE\.jsonl"
    ):
        load_problems(name)


FROM_HUB = """
from sources import load_examples, load_problems
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
        (folder / "train.jsonl").write_text(
            json.dumps({"question": "1+1?", "answer": f"#### {answer}"})
        )
    with hub_server("org/data", folders, [], kind="datasets") as url:
        env = {
            **os.environ,
            "HF_ENDPOINT": url,
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(tmp_path / "cache"),
        }
        env["PYTHONPATH"] = os.pathsep.join(sys.path)
        run = subprocess.run(
            [sys.executable, "-c", FROM_HUB], env=env, cwd=tmp_path, capture_output=True, text=True
        )
    assert (run.returncode, run.stdout) == (0, "2 #### 2\n3 #### 3\n"), run.stderr


LISTS = [
    (r'["1,234"]', "1,234"),
    (r'["3","5"]', "3, 5"),
    (r'["10\\%"]', r"10\%"),
    (r"['3', '5']", "3, 5"),  # as Python writes it
    ("[72]", "72"),
    (r'[ "-2.5" ]', "-2.5"),
    (r'["1,234", "5"]', "1234, 5"),
    (r'["\\frac{1}{2}", "\\sqrt{2}"]', r"\frac{1}{2}, \sqrt{2}"),
    (r'["\frac{1}{2}"]', r"\frac{1}{2}"),  # put into quotes as it was
    (r'["\\boxed{3}", "\\boxed{5}"]', "3, 5"),
    (r'["\u03c0", "\\text{say \"no\"}"]', 'π, \\text{say "no"}'),
    ("[]", None),
    ('[""]', None),
    ("[3, 5]", "[3, 5]"),  # an interval
    (r"\left[3,5\right]", r"\left[3,5\right]"),
    ("(3, 5)", "(3, 5)"),
    ('"3"', '"3"'),
    ("[x, y]", "[x, y]"),
]


@pytest.mark.parametrize(("text", "answer"), LISTS)
def test_answers_in_a_list_are_read_as_the_graders_have_several(tmp_path, text, answer):
    problem_rows = [{"problem": "p", "answer": text}, {"problem": "q", "answer": "1"}]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in problem_rows))
    loaded, _ = load_problems(path)
    assert loaded[0].answer == answer
    # a user's function reads its own
    raw, _ = reading.load_problems(Source(path=str(path)), verified=False)
    assert raw[0].answer == text


@pytest.mark.parametrize(
    ("items", "answer"),
    [
        (["1,234"], "1,234"),
        (["3", "5"], "3, 5"),
        ([3, 5.0], "3, 5"),
        ([r"10\%"], r"10\%"),
        ([r"\frac{1}{2}", None, ""], r"\frac{1}{2}"),
        ([r'\text{a "b"}'], r'\text{a "b"}'),
        ([72], "72"),
        ([], None),
    ],
)
def test_list_columns_of_answers(tmp_path, items, answer):
    row = {"problem": "p", "answer": items}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    places = [tmp_path / "a.jsonl"]
    if len({type(item) for item in items if item is not None}) == 1:
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
        places.append(tmp_path / "a.parquet")
    for place in places:
        assert load_problems(place)[0][0].answer == answer
    (tmp_path / "a.jsonl").write_text(json.dumps({"problem": "p", "answer": [{"a": 1}]}) + "\n")
    with pytest.raises(
        ValueError, match=r"'answer\[0\]' must be a text or a finite number, got dict"
    ):
        load_problems(tmp_path / "a.jsonl")


def test_several_answers_are_graded_complete_and_in_any_order():
    gold = reading.plain_answer(r'["3", "1,005", "\\frac{1}{2}"]')
    for right in ("3, 1005, 1/2", r"\{0.5, 3, 1005\}", r"\frac12, 1005 \text{ and } 3"):
        assert quick_verdict(gold, right) is True, right
    for wrong in ("3", "3, 1005", "3, 1, 5, 1/2"):
        assert quick_verdict(gold, wrong) is False, wrong


@pytest.mark.parametrize(
    "source", ["openai/gsm8k", "openai/gsm8k@main:test", "open-r1/OpenR1-Math-220k", "me/set-1.5"]
)
def test_a_hub_id_is_told_how_it_is_written(source):
    with pytest.raises(
        ValueError, match=f"for a dataset on the Hugging Face hub write hub:{source}; a file"
    ):
        load_problems(source)


@pytest.mark.parametrize("source", ["data/mine.csv", "gsm9k", "/data/set"])
def test_what_is_no_hub_id_is_told_all_forms(source):
    with pytest.raises(
        ValueError, match=r"give a \.jsonl, \.json, \.parquet file, hub:owner/name, or one of"
    ):
        load_problems(source)


@pytest.mark.parametrize("name", ["problem", "prompt"])
def test_a_problems_text_is_mapped_by_either_name(tmp_path, name):
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"q": "What is 1+1?", "a": "2", "problem": "no"}) + "\n"
    )
    source = Source(path=str(tmp_path / "a.jsonl"), fields={name: "q", "answer": "a"})
    assert [(p.prompt, p.answer) for p in reading.load_problems(source)[0]] == [
        ("What is 1+1?", "2")
    ]
    both = Source(path=str(tmp_path / "a.jsonl"), fields={"prompt": "q", "problem": "q"})
    with pytest.raises(ValueError, match="maps both 'prompt' and 'problem'"):
        reading.load_problems(both)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_a_pointer_of_git_lfs_is_named_as_one(suffix, tmp_path):
    file = tmp_path / f"problems{suffix}"
    file.write_bytes(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 12345\n"
    )
    with pytest.raises(
        ValueError, match=r"is only Git LFS's pointer to the file: run `git lfs pull`"
    ):
        load_problems(str(file))
