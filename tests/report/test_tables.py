"""Tables and numbers as text, from literal records; escaping; CSV without formulas."""

import csv
import math
from dataclasses import replace

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from g2d_jax.report import format as fmt
from g2d_jax.report import tables
from g2d_jax.report.markup import prose, shorten, shown, visible
from g2d_jax.report.tables import answers_table, guarded, sheet, summary_table
from g2d_jax.session.stage_result import (
    NO_ACCURACY,
    Change,
    Compiled,
    Cost,
    Evaluated,
    Evaluation,
    Scored,
    Selection,
    StageResult,
    TaskResult,
)
from g2d_jax.study.stats import Accuracy, Paired

COLD = Evaluated(
    "sft",
    "cold",
    "",
    accuracy=Accuracy(0.3338, 0.0101, 1024),
    pass_at={"1": 0.3338, "2": 0.48, "4": 0.612},
    greedy=0.51,
)


def like(policy: Evaluated, name: str, label: str, mean: float, **fields) -> Evaluated:
    accuracy = replace(policy.accuracy, mean=mean)
    return replace(policy, name=name, label=label, accuracy=accuracy, **fields)


WARM = like(COLD, "warmup@20", "warm-up", 0.7, greedy=math.nan)
BEST = like(COLD, "dpo", "G2D", 0.7524)
CHANGES = [
    Change("sft", "warmup@20", Paired(0.3662, 0.011, 1024)),
    Change("warmup@20", "dpo", Paired(0.0524, 0.008, 1024), Paired(0.118, 0.014, 1024)),
    Change("sft", "dpo", Paired(0.4186, 0.009, 1024)),
]


def evaluation(policies, changes=(), problems=1024, samples=4, split="test") -> Evaluation:
    return Evaluation(policies, changes, [], problems, samples, split, {})


EVALUATION = evaluation([COLD, WARM, BEST], CHANGES)


def spent(generated: int, trained: int, flops: float, seconds: float) -> Cost:
    return Cost(generated=generated, trained=trained, flops=flops, seconds=seconds)


SPENT = {
    "sft": spent(0, 5_120_000, 9.5e12, 84.2),
    "warmup": spent(128_400, 148_000, 4.1e11, 31.7),
    "collect": spent(221_000, 0, 1.6e11, 12.6),
    "dpo": spent(0, 331_000, 5.0e11, 24.9),
}


def results(**costs: Cost) -> dict[str, StageResult]:
    return {name: StageResult(kind="any", name=name, cost=cost) for name, cost in costs.items()}


def test_the_result():
    costs = {"warmup@20": SPENT["warmup"].measures, "dpo": SPENT["dpo"].measures}
    title, columns, rows = summary_table(EVALUATION, costs)
    assert title.startswith("1,024 problems, 4 answers each")
    assert columns == ["policy", "accuracy %", "gain", "FLOPs"]
    assert rows == [
        ["cold (sft)", "33.4 ± 1.0", "–", "–"],
        ["warm-up (warmup@20)", "70.0 ± 1.0", "+36.6 ± 1.1", "410 G"],
        ["G2D (dpo)", "75.2 ± 1.0", "+5.2 ± 0.8", "500 G"],
    ]
    _, columns, rows = answers_table(EVALUATION)
    assert columns == ["measure", "cold (sft)", "warm-up (warmup@20)", "G2D (dpo)"]
    assert rows == [
        ["greedy %", "51.0", "–", "51.0"],
        ["greedy gain", "–", "–", "+11.8 ± 1.4"],
        ["pass@2 %", "48.0", "48.0", "48.0"],
        ["pass@4 %", "61.2", "61.2", "61.2"],
    ]


@pytest.mark.parametrize(("last", "shown"), [(0.38, []), (0.6, [["60.0"], ["–"], ["75.2"]])])
def test_the_result_has_right_last_numbers_where_the_form_hides_skill(last, shown):
    policies = [replace(COLD, last_number=last), WARM, replace(BEST, last_number=0.7524)]
    _, columns, rows = summary_table(evaluation(policies, CHANGES), {})
    place = [i for i, head in enumerate(columns) if head == "last number right %"]
    assert [[row[i] for i in place] for row in rows if place] == shown


MAIN = TaskResult(0.5, 0.1, math.nan, math.nan, 0.5, True, 8, 0.0, math.nan)


def chat(name: str, reward: float, mean: float = math.nan) -> Evaluated:
    """Results of a task with a scalar reward, after those of the main task where it has an
    accuracy."""
    nan = math.nan
    scored = TaskResult(reward, 0.125, reward / 10, nan, nan, False, 4, 0.25, nan)
    judged = not math.isnan(mean)
    tasks = {"main": MAIN, "chat": scored} if judged else {"chat": scored}
    accuracy = replace(COLD.accuracy, mean=mean, sem_clustered=0.1) if judged else NO_ACCURACY
    return Evaluated(name, name, "", accuracy=accuracy, tasks=tasks)


def rewarded(*policies: Evaluated) -> Evaluation:
    change = Change("sft", "dpo", tasks={"chat": Paired(0.5, 0.0625, 4)})
    return evaluation(policies, [change], problems=4, samples=2)


def test_rewards_stand_where_there_is_no_accuracy():
    found = rewarded(chat("sft", 1.0), chat("dpo", 1.5))
    title, columns, rows = summary_table(found, {})
    assert title.startswith("4 problems, 2 answers each ")
    assert columns == ["policy", "reward", "gain"]
    assert rows == [["cold (sft)", "1 ± 0.12", "–"], ["G2D (dpo)", "1.5 ± 0.12", "+0.5 ± 0.062"]]
    assert answers_table(found).rows == [["reward, chat", "1 ± 0.12", "1.5 ± 0.12"]]


def test_accuracy_and_rewards_of_a_mixed_evaluation():
    found = rewarded(chat("sft", 1.0, mean=0.5), chat("dpo", 1.5, mean=0.5))
    title, columns, rows = summary_table(found, {})
    assert title.startswith("8 problems, ")
    assert columns == ["policy", "accuracy %"] and rows[0][1] == "50.0 ± 10.0"
    cells = dict(row[:2] for row in answers_table(found).rows)
    assert cells["accuracy %, main"] == "50.0" and cells["reward, chat"] == "1 ± 0.12"


def test_what_a_selection_saw_with_its_steps_as_numbers():
    steps = {step: Scored(0.5, math.nan, {"a": MAIN}) for step in ("100", "20")}
    steps["9"] = Scored(0.75, 0.1, {"a": MAIN})
    title, columns, rows = tables.selection_table("best", Selection("train@9", steps, "dev"))
    assert title == "Selection best: score on dev (± standard error)"
    assert columns == ["step", "score"]
    assert rows == [["9 (chosen)", "0.75 ± 0.1"], ["20", "0.5"], ["100", "0.5"]]


def cells_of(table: tables.Table) -> dict[str, list[str]]:
    return {name: cells for name, *cells in table.rows}


def test_stages_sum_up_with_device_time_where_it_says_something():
    table = tables.stages_table(results(**SPENT))
    assert table.columns == ["measure", *SPENT, "all stages"]
    assert [row[0] for row in table.rows] == ["generated", "prefilled", "scored", "trained", "FLOPs", "time",
                                              "verifier CPU", "other, % of the time"]  # fmt: skip
    assert [row[-1] for row in table.rows][:6] == ["349 k", "0", "0", "5.60 M", "10.6 T", "2 min 33 s"]  # fmt: skip
    assert tables.stages_table(results(sft=SPENT["sft"])).columns == ["measure", "sft"]
    held = {}
    for name, gib in (("sft", 3), ("warmup", 2)):
        seconds = SPENT[name].seconds
        several = replace(SPENT[name], device_seconds=8 * seconds, training_seconds=seconds / 2)
        held[name] = StageResult(kind="", name="", cost=several, peak_memory_bytes=gib << 30)
    cells = cells_of(tables.stages_table(held))
    assert cells["device time"] == ["11 min 14 s", "4 min 14 s", "15 min 27 s"]
    assert cells["host memory"] == ["3.0 GiB", "2.0 GiB", "3.0 GiB"]
    assert cells["training, % of the time"] == ["50.0", "50.0", "50.0"]
    programs = {f"p{i}": Compiled(1, 10.0 - i) for i in range(10)}
    first = StageResult(kind="sft", name="a", programs=programs)
    more = StageResult(kind="sft", name="b", programs={"p0": Compiled(2, 1.0)})
    said = tables.compiled([first, more])
    assert ": p0 11.0 s, p1 9.0 s, " in said and "p5" not in said and not tables.compiled([])


def test_labels_of_the_shipped_stages():
    names = ("sft", "warmup", "warmup@10", "dpo", "grpo", "hf:org/model")
    expected = ["cold (sft)", "warm-up", "warm-up (warmup@10)", "G2D (dpo)", "grpo", "hf:org/model"]
    assert [fmt.policy_name(name, name) for name in names] == expected
    assert fmt.policy_name("dpo", "offline DPO") == "offline DPO (dpo)"


@pytest.mark.parametrize(
    ("written", "value", "text"),
    [
        *((fmt.quantity, value, text) for value, text in {
            0: "0", 7: "7", 0.5: "0.50", 999: "999", 999.6: "1.00 k", 10_240: "10.2 k", 128_400: "128 k",
            999_900: "1.00 M", 5.12e6: "5.12 M", 4.1e11: "410 G", 1.08e13: "10.8 T", 2e21: "2000 E", math.inf: "–",
        }.items()),
        *((fmt.duration, seconds, text) for seconds, text in {
            0: "0.0 s", 0.012: "0.01 s", 9.94: "9.9 s", 9.96: "10 s", 59.4: "59 s", 59.6: "1 min 00 s",
            245: "4 min 05 s", 3599.6: "1 h 00 min", 7380: "2 h 03 min",
        }.items()),
        *((written, math.nan, "–") for written in (fmt.quantity, fmt.duration, fmt.count, fmt.percent)),
    ],
)  # fmt: skip
def test_numbers_as_text(written, value, text):
    assert written(value) == text


def test_numbers_are_read_as_storage_writes_them_and_nothing_else():
    record = {
        "a": {"b": 2, "nan": "NaN", "inf": "-Infinity"},
        "none": None,
        "true": True,
        "text": "many",
        "list": [1],
    }
    assert fmt.number(record, "a", "b") == 2.0 and fmt.number(record, "a", "inf") == -math.inf
    for path in (
        ("a", "nan"),
        ("none",),
        ("true",),
        ("text",),
        ("list",),
        ("a",),
        ("gone", "b"),
        ("none", "b"),
    ):
        assert math.isnan(fmt.number(record, *path)), path
    assert (
        fmt.spread(0.3338, math.nan),
        fmt.change(-0.0524, math.nan),
        fmt.change(math.nan, 0),
    ) == (
        "33.4",
        "-5.2",
        "–",
    )


@pytest.mark.parametrize(
    ("text", "markup"),
    [
        ("a<b & \"c\" 'd'", "a&lt;b &amp; &#34;c&#34; &#39;d&#39;"),
        ("line\n\tnext", "line\n\tnext"),
        ("\0", '<span class="escape" title="U+0000">\\x00</span>'),
        ("\u202e", '<span class="escape" title="U+202E">\\u202e</span>'),
        ("\U000e0041", '<span class="escape" title="U+E0041">\\U000e0041</span>'),
        ("\ud800", '<span class="escape" title="U+D800">\\ud800</span>'),
        ("é 数 🙂 √2", "é 数 🙂 √2"),
    ],
)
def test_shown(text, markup):
    assert shown(text) == markup and "<span" not in visible(text)


def test_no_line_of_a_page_breaks_within_a_number():
    text = "K = 6: 9 ± 1 % [8, 10], accuracy %"
    assert prose(text).replace("\u00a0", "_") == "K_=_6: 9_±_1_% [8,_10], accuracy %"


@given(st.text())
def test_nothing_invisible_is_left_of_any_text(text):
    assert visible(text).replace("\n", "").replace("\t", "").encode() or not text.strip("\n\t")
    assert "<" not in str(shown(text)).replace("<span", "").replace("</span", "")


def test_long_text_says_what_is_left_out():
    assert shorten("abc", 3) == "abc"
    text = shorten("a" * 5000 + "END", 1000)
    assert "[… 4,003 characters left out …]" in text and text.endswith("aEND")


@pytest.mark.parametrize(
    ("text", "cell"),
    [("=1+1", "'=1+1"), ("+x", "'+x"), ("-x", "'-x"), ("@x", "'@x"), (" =1", "' =1"), ("\uff1d1", "'\uff1d1"),
     ("a=1", "a=1"), ("", ""), ("\x1b[2J\t=", "\\x1b[2J\\t="), ("\ud800", "\\ud800")],
)  # fmt: skip
def test_guarded(text, cell):
    assert guarded(text) == cell


@given(st.lists(st.tuples(st.text(), st.floats()), min_size=1, max_size=5))
def test_a_sheet_reads_back_and_no_text_begins_a_formula(rows):
    frame = pd.DataFrame(rows, columns=["=text", "value"])
    header, *lines = csv.reader(sheet(frame).splitlines())
    assert header == ["'=text", "value"]
    for (_, value), (cell, number) in zip(rows, lines, strict=True):
        assert not cell.lstrip().startswith(("=", "+", "-", "@", "\t", "\r"))
        assert float(number) == value or (number == "NaN" and math.isnan(value))


def test_the_problems_of_a_result_are_named_by_their_split() -> None:
    on_test, on_dev = (evaluation([COLD], problems=4, split=split) for split in ("test", "dev"))
    assert tables.count_problems(on_dev, "held-out problems") == "4 dev problems"
    assert tables.count_problems(on_test, "held-out problems") == "4 held-out problems"
