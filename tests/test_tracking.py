"""Metrics, TensorBoard, samples and the console, as a user of a run meets them."""

from __future__ import annotations

import io
import json
import math
import os
import re
import struct
import sys
import time
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from g2d_jax import pipeline
from g2d_jax.commands import dryrun
from g2d_jax.recipes import config_load
from g2d_jax.report.tables import FIRST
from g2d_jax.runtime import storage
from g2d_jax.runtime.terminal import clean
from g2d_jax.runtime.tracking import Screen, Tracker, read_metrics, require_wandb


class Terminal(io.StringIO):
    """A text file that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    # as some CI services do: still no control codes in a file
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")


def tracker(workdir, **options):
    options = {"tensorboard": False, "screen": Screen(io.StringIO()), **options}
    return Tracker(workdir, **options)


def events(workdir):
    """(step, tag, value) of all scalars in a work directory's event files, in TensorBoard's reading
    order."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    found = []
    for path in sorted((workdir / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            assert struct.unpack("<I", data[8:12])[0] == masked_crc32c(data[:8])
            assert struct.unpack("<I", data[12 + length : 16 + length])[0] == masked_crc32c(
                data[12 : 12 + length]
            )
            event = Event.FromString(data[12 : 12 + length])
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
            data = data[16 + length :]
    return found


# Metrics


def test_metrics_are_read_back_with_their_non_finite_values(tmp_path):
    with tracker(tmp_path) as run:
        run.log(
            "warmup",
            np.int64(3),
            {"reward": np.float32(0.5), "kl": math.nan, "grad_norm": math.inf},
        )
        run.log("warmup", 3, {"accuracy": 0.25}, kind="evaluate")
    [train, evaluate] = read_metrics(tmp_path)
    assert (train["stage"], train["step"], train["kind"]) == ("warmup", 3, "train")
    assert train["metrics"]["reward"] == 0.5 and train["metrics"]["grad_norm"] == math.inf
    assert math.isnan(train["metrics"]["kl"])
    assert evaluate["metrics"] == {"accuracy": 0.25}
    line = (tmp_path / "metrics" / "00000.jsonl").read_text().splitlines()[0]
    metrics = json.loads(line, parse_constant=pytest.fail)["metrics"]  # standard JSON: no bare NaN
    assert metrics == {"reward": 0.5, "kl": "NaN", "grad_norm": "Infinity"}


def test_steps_redone_after_a_resume_count_once_in_the_place_of_the_first(tmp_path):
    assert read_metrics(tmp_path) == []
    with pytest.raises(KeyboardInterrupt), tracker(tmp_path, tensorboard=True) as run:
        for step in (1, 2, 3):
            run.log("sft", step, {"loss": 1.0 / step})
        run.log("sft", 3, {"loss": 0.5}, kind="evaluate")
        raise KeyboardInterrupt
    with tracker(tmp_path, tensorboard=True) as run:
        for step in (2, 3, 4):
            run.log("sft", step, {"loss": 10.0 / step})
        run.log("dpo", 2, {"loss": 7.0})
    records = [
        (r["stage"], r["step"], r["kind"], r["metrics"]["loss"]) for r in read_metrics(tmp_path)
    ]
    trained = [("sft", 1, "train", 1.0), ("sft", 2, "train", 5.0), ("sft", 3, "train", 10 / 3)]
    rest = [("sft", 3, "evaluate", 0.5), ("sft", 4, "train", 2.5), ("dpo", 2, "train", 7.0)]
    assert records == [*trained, *rest]
    assert [(tag, step) for step, tag, _ in events(tmp_path)] == [
        (f"{stage}/loss", step) for stage, step, *_ in records
    ]


def test_samples_keep_any_model_text(tmp_path):
    rows = [
        {
            "prompt": "1+1?",
            "completion": "\x1b[2J\ud800\x00</script>",
            "reward": None,
            "verdict": "timeout",
        }
    ]
    with tracker(tmp_path) as run:
        run.samples("evaluate", 20, rows)
    [record] = storage.read_segments(tmp_path / "samples")
    assert record["rows"] == rows and (record["stage"], record["step"], record["kind"]) == (
        "evaluate",
        20,
        "samples",
    )


# TensorBoard


def test_tensorboard_holds_every_scalar_at_once(tmp_path):
    """Also when the process is killed: nothing waits in a buffer."""
    with tracker(tmp_path, tensorboard=True) as run:
        run.log("dpo", 7, {"rewards/margins": 0.5, "kl": math.nan})
        margin, kl = events(tmp_path)
        assert margin == (7, "dpo/rewards/margins", 0.5)
        assert kl[:2] == (7, "dpo/kl") and math.isnan(kl[2])
        run.flush()
    assert len(events(tmp_path)) == 2


def test_a_torn_event_file_is_left_alone(tmp_path):
    with tracker(tmp_path, tensorboard=True) as run:
        run.log("sft", 1, {"loss": 1.0})
    [torn] = (tmp_path / "tensorboard").iterdir()
    torn.write_bytes(torn.read_bytes()[:-3])
    before = torn.read_bytes()
    with tracker(tmp_path, tensorboard=True) as run:
        run.log("sft", 2, {"loss": 0.5})
    assert torn.read_bytes() == before
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2


def test_a_folder_tensorboard_cannot_use_is_named(tmp_path):
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    with pytest.raises(OSError, match=r"cannot create.*tensorboard"):
        tracker(tmp_path, tensorboard=True)


@pytest.mark.skipif(sys.platform != "linux", reason="fills the event file by a limit on its size")
def test_a_full_disk_is_an_error_not_a_hang(tmp_path):
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with (
        tracker(tmp_path, tensorboard=True) as run,
        pytest.raises(OSError, match=r"cannot write.*tensorboard.*events"),
    ):
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
        try:
            for step in range(1000):
                run._tensorboard.log(step, {"sft/loss": 1.0})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


# Weights & Biases


def test_a_missing_wandb_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[wandb\]'"):
        tracker(tmp_path, wandb={"project": "g2d", "name": "run"})
    assert list(tmp_path.iterdir()) == []


def test_a_missing_wandb_is_refused_before_the_run_has_a_folder(tmp_path, monkeypatch):
    config = config_load.resolve(str(Path(__file__).parent / "tiny.py"))
    monkeypatch.setitem(sys.modules, "wandb", None)
    config.logging.wandb = "mine"
    for start in (dryrun.show, pipeline.run):
        with pytest.raises(ImportError, match=r"\(logging\.wandb\) .* '\.\[wandb\]'"):
            start(config, workdir=tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_a_folder_called_wandb_is_not_its_package(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()  # as W&B leaves one behind
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ImportError, match=r"logging\.wandb"):
        require_wandb()


def test_wandb_resumes_the_run_of_the_work_directory(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for step in (1, 2):
        with tracker(tmp_path, wandb={"project": "g2d"}) as run:
            run.log("sft", step, {"loss": 1.0 / step})
    run_id = storage.read_json(tmp_path / "wandb.json")["id"]
    assert len([name for name in os.listdir(tmp_path / "wandb") if name.endswith(run_id)]) >= 1


# Console


@given(st.text(st.characters()))
def test_clean_text_has_no_control_characters(text):
    for newlines in (True, False):
        allowed = "\n" if newlines else ""
        cleaned = clean(text, newlines=newlines)
        assert all(
            char in allowed
            or unicodedata.category(char)[0] != "C"
            or unicodedata.category(char) in ("Cn", "Co")
            for char in cleaned
        )
    assert clean(text).encode("utf-8").decode("utf-8") == clean(text)


def test_clean_text_shows_what_it_hides():
    assert (
        clean("\x1b[31mred\x07\r\n\x9b2J \u202eabc ü 😀")
        == "\\x1b[31mred\\x07\\r\n\\x9b2J \\u202eabc ü 😀"
    )


@pytest.mark.parametrize("file", [io.StringIO, Terminal])
def test_messages_are_neither_markup_nor_control_codes(file):
    screen = Screen(out := file())
    screen.say("[red]sum[/red] [/] :smile: \x1b]0;title\x07 [link=http://x]y" + " word" * 100)
    shown = "[red]sum[/red] [/] :smile: \\x1b]0;title\\x07 [link=http://x]y" + " word" * 100 + "\n"
    assert out.getvalue() == shown


def test_a_narrow_encoding_is_escaped():
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Screen(file).say("0.81 ± 0.02")
    assert file.buffer.getvalue() == b"0.81 \\xb1 0.02\n"


def test_a_table_in_a_file_is_aligned_text():
    Screen(out := io.StringIO()).table(
        "Result",
        ["policy", "pass@1", "tokens"],
        [["cold", "0.10 ± 0.01", 5], ["G2D 你", None, 12345], ["[b]\x1b\n", "", 0]],
    )
    lines = out.getvalue().splitlines()
    assert lines[0].strip() == "Result"
    assert lines[1:] == [
        "| policy    | pass@1      | tokens |",
        "|-----------|-------------|--------|",
        "| cold      | 0.10 ± 0.01 |      5 |",
        "| G2D 你    |             |  12345 |",
        "| [b]\\x1b\\n |             |      0 |",
    ]
    Screen(out := io.StringIO()).table("t", ["completion"], [["x" * 5000]])  # is not wrapped
    assert "x" * 5000 in out.getvalue() and len(out.getvalue()) < 30_000


def test_a_table_on_a_terminal_shows_markup_literally():
    Screen(out := Terminal()).table(
        "Samples", ["completion", "reward"], [["[bold]a[/bold]\x1b[2J", 1.0]]
    )
    assert "[bold]a[/bold]\\x1b[2J" in out.getvalue() and "\x1b[2J" not in out.getvalue()


def test_progress_in_a_file_is_plain_lines():
    screen = Screen(out := io.StringIO(), every=0.0)
    metrics = {"reward": 0.5, "entropy": 1.25, "completions/mean_length": 33.3, "kl": 9.0}
    with screen.progress("warmup", total=20, start=3) as bar:
        bar.update(3)
        bar.update(4, {**metrics, "num_tokens": 1000})
        bar.update(6, metrics)
        bar.update(20, {**metrics, "num_tokens": 90_000, "reward": math.nan})
    first, second, third, fourth = out.getvalue().splitlines()
    assert first == "warmup 3/20"
    assert second == "warmup 4/20  reward 0.500  entropy 1.250  length 33.3"
    assert re.fullmatch(
        r"warmup 6/20  reward 0\.500  entropy 1\.250  length 33\.3  \d+:\d\d:\d\d left", third
    )
    assert re.fullmatch(
        r"warmup 20/20  reward –  entropy 1\.250  length 33\.3  [\d,]+ tok/s", fourth
    )
    assert "\x1b" not in out.getvalue() and "\r" not in out.getvalue()


def test_progress_lines_come_at_a_bounded_rate_and_end_with_the_last():
    screen = Screen(out := io.StringIO(), every=3600.0)
    with pytest.raises(RuntimeError), screen.progress("dpo", total=1000) as bar:
        for step in range(501):
            bar.update(step, {"loss": 0.6931})
        raise RuntimeError
    assert [line.split("  ")[:2] for line in out.getvalue().splitlines()] == [
        ["dpo 0/1000", "loss 0.6931"],
        ["dpo 500/1000", "loss 0.6931"],
    ]


def drawn(out):
    """What a terminal was given, without control codes."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())


def test_progress_on_a_terminal_is_a_bar_with_messages_above():
    screen = Screen(out := Terminal())
    with screen.progress("warm[up]", total=20, start=5) as bar:
        bar.update(7, {"reward": 0.5})
        screen.say("checkpoint saved")
        bar.update(8)
    *_, last = drawn(out).strip().splitlines()
    assert (
        "checkpoint saved" in drawn(out)
        and "warm[up]" in last
        and "8/20" in last
        and "reward 0.500" in last
    )


@pytest.mark.parametrize(
    ("columns", "metrics"),
    [
        (100, "loss 0.1  reward 0.500  entropy 1.000  length 33.3"),
        (80, "loss 0.1  reward 0.500  entropy 1…"),
        (56, "loss 0.1 …"),
    ],
)
def test_a_bar_keeps_to_one_line(monkeypatch, columns, metrics):
    """Of two it would leave torn ones where the terminal gets narrower, or a message comes."""
    monkeypatch.setenv("COLUMNS", str(columns))
    screen = Screen(out := Terminal())
    values = {"reward": 0.5, "entropy": 1.0, "completions/mean_length": 33.3, "loss": 0.1}
    with screen.progress("warmup of a policy", total=20) as bar:
        bar.update(20, values)
    last = drawn(out).splitlines()[-1]
    assert len(last.rstrip()) <= columns
    assert re.fullmatch(r"warmup of a policy ━+ 20/20 0:00:00 " + re.escape(metrics), last.strip())


# Tables that fit a terminal. Wide characters take two columns, combining ones none.
TEXTS = st.text(st.sampled_from("ab1 ,=/-[]你好é\u0301😀─"), max_size=60)


def on_terminal(columns, *table, **options):
    """The lines of a table on a terminal of so many columns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        Screen(out := Terminal()).table(*table, **options)
    return drawn(out).splitlines()


@st.composite
def tables(draw):
    heads = draw(st.lists(TEXTS, min_size=1, max_size=12, unique=True))
    row = st.lists(TEXTS, min_size=len(heads), max_size=len(heads))
    return heads, draw(st.lists(row, max_size=4))


@given(tables(), st.integers(30, 130), st.data())
def test_a_table_fits_any_terminal(table, columns, data):
    heads, rows = table
    first = data.draw(st.lists(st.sampled_from(heads), unique=True))
    lines = on_terminal(columns, "title", heads, rows, first)
    assert max(map(cell_len, lines)) <= columns
    framed = [line for line in lines if line[:1] in "╭│├╰"]
    assert len({cell_len(line) for line in framed}) == 1
    # The columns that are shown are whole, folded into lines: the first one and the next in order.
    order = [0, *[i for i in map(heads.index, first) if i]]
    order += [i for i in range(len(heads)) if i not in order]
    inside = [line.strip("│").split("│") for line in framed if line[0] == "│"]
    for place, i in enumerate(sorted(order[: len(inside[0])])):
        text = "".join(cells[place] for cells in inside)
        expected = heads[i] + "".join(row[i] for row in rows)
        assert _wide(text) == _wide(expected)


def _wide(text: str) -> str:
    """Leave out blanks, and characters without a width of their own, which may go at an edge."""
    return "".join(letter for letter in text if letter != " " and cell_len(letter))


RESULT = [
    *("policy", "accuracy %", "pass@4 %", "greedy %", "gain", "greedy gain", "made by"),
    *("generated", "trained", "FLOPs", "time"),
]
ROW = [
    *("warm-up (warmup)", "39.3 ± 2.1", "69.5", "59.0", "+17.6 ± 1.5", "+30.1 ± 2.9", "warmup"),
    *("364 k", "297 k", "454 G", "24 s"),
]


@pytest.mark.parametrize(
    ("columns", "left_out"),
    [
        (60, [*RESULT[2:4], *RESULT[5:9], "time"]),
        (80, ["pass@4 %", "greedy gain", "made by", "generated", "trained"]),
        (100, ["made by", "generated", "trained"]),
        (140, []),
    ],
)
def test_a_result_shows_what_came_out_and_its_cost(columns, left_out):
    lines = on_terminal(columns, "Result", RESULT, [ROW], FIRST, rest="report.html")
    assert max(map(len, lines)) <= columns
    [row] = [line for line in lines if "warm-up (warmup)" in line]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == [cell for head, cell in zip(RESULT, ROW, strict=True) if head not in left_out]
    note = " ".join(lines[lines.index(next(line for line in lines if line[:1] == "╰")) + 1 :])
    named = f"left out to fit: {'; '.join(left_out)} (report.html shows them)"
    assert " ".join(note.split()) == (named if left_out else "")


def test_a_file_has_the_whole_table_whatever_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    Screen(out := io.StringIO()).table("Result", RESULT, [ROW], FIRST, rest="report.html")
    title, head, _, row = out.getvalue().splitlines()
    assert title == "Result"
    assert [cell.strip() for cell in head.strip("|").split("|")] == RESULT
    assert [cell.strip() for cell in row.strip("|").split("|")] == ROW


def compile_for(seconds, name="train_step"):
    """Have JAX trace a function that takes so long; its listeners are those of a run."""
    import jax

    import g2d_jax.session.clock  # noqa: F401 (registers them)

    def function(x):
        time.sleep(seconds)
        return x

    function.__name__ = name
    jax.jit(function).trace(1.0)


def test_steps_that_end_together_took_their_time_together():
    screen = Screen(out := io.StringIO(), every=0.0)
    with screen.progress("evaluate", total=40) as bar:
        time.sleep(0.2)  # loading
        bar.begin()
        time.sleep(1.0)
        for done in range(1, 11):
            bar.update(done)
    *_, last = out.getvalue().splitlines()
    assert re.fullmatch(r"evaluate 10/40  0:00:0[34] left", last)  # ten a second


def test_the_work_of_an_earlier_process_is_no_pace():
    screen = Screen(out := io.StringIO(), every=0.0)
    with screen.progress("evaluate", total=1000) as bar:
        bar.skip(990)
        bar.begin()
        time.sleep(1.0)
        bar.update(991)
    before, after = out.getvalue().splitlines()
    assert before == "evaluate 990/1000"
    assert re.fullmatch(r"evaluate 991/1000  0:00:(09|1\d) left", after)


def test_what_compiles_long_is_said_once_in_a_file():
    screen = Screen(out := io.StringIO(), long=1.0)
    with screen.watching():
        for _ in range(2):
            compile_for(1.5)
            time.sleep(1.1)  # so that it is another compilation, not the next phase of one
        compile_for(0.0, "quick")
        time.sleep(0.1)
    lines = out.getvalue().splitlines()
    assert len(lines) == 2 and all(
        re.fullmatch(r"compiling train step \(\d+ s\)", line) for line in lines
    )


def test_a_bar_says_what_compiles():
    screen = Screen(out := Terminal(), long=0.2)
    with screen.watching(), screen.progress("warmup", total=20):
        compile_for(2.5)
    assert "compiling train step (1 s)" in drawn(out) and "compiling train step (2 s)" in drawn(out)
    # beside the bar, not a line of its own
    assert not re.search(r"^compiling", drawn(out), re.MULTILINE)


def test_one_bar_at_a_time_also_after_an_error():
    screen = Screen(io.StringIO())
    with pytest.raises(ValueError, match="bar of sft is still open"), screen.progress("sft", 10):
        screen.progress("dpo", 10).__enter__()
    with screen.progress("dpo", 10) as bar:
        bar.update(1)


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    screen = Screen(out := Terminal(), every=0.0)
    with screen.progress("sft", 2) as bar:
        bar.update(1)
    screen.table("t", ["a"], [["b"]])
    assert not screen.interactive and "\x1b" not in out.getvalue()
