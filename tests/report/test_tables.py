"""Tables, sentences and numbers as text, from literal manifests; escaping; CSV without formulas."""

import csv
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from g2d_jax.report import format as fmt
from g2d_jax.report import tables
from g2d_jax.report.headlines import run_headline as headline
from g2d_jax.report.markup import shorten, shown, visible
from g2d_jax.report.run import _interval
from g2d_jax.report.tables import guarded, problems, result_of, sheet, summary_table

COLD = {"name": "sft", "label": "cold", "mean": 0.3338, "std_runs": 0.0072, "sem_clustered": 0.0101}
COLD |= {"pass_at": {"1": 0.3338, "2": 0.48, "4": 0.612}, "greedy": 0.51}
WARM = {**COLD, "name": "warmup@20", "label": "warm-up", "mean": 0.7, "greedy": None}
BEST = {**COLD, "name": "dpo", "label": "G2D", "mean": 0.7524, "sem_clustered": "NaN"}
PAIRED = [
    {"before": "sft", "after": "warmup@20", "difference": 0.3662, "sem": 0.011, "problems": 1024},
    {"before": "warmup@20", "after": "dpo", "difference": 0.0524, "sem": 0.008, "problems": 1024},
    {"before": "sft", "after": "dpo", "difference": 0.4186, "sem": 0.009, "problems": 1024},
]
EVALUATION = {"kind": "evaluate", "name": "evaluate", "seconds": 5.0, "flops": 1e9}
EVALUATION |= {
    "result": {"policies": [COLD, WARM, BEST], "paired": PAIRED, "problems": 1024, "samples": 4}
}


def stage(
    name: str, kind: str, generated: int, trained: int, flops: float, seconds: float, *inputs: str
) -> dict:
    tokens = {"generated": generated, "prefilled": 0, "scored": 0, "trained": trained}
    made = {"name": name, "kind": kind, "tokens": tokens, "flops": flops, "seconds": seconds}
    return made | {"inputs": dict.fromkeys(inputs, "fingerprint")}


STAGES = [
    stage("sft", "sft", 0, 5_120_000, 9.5e12, 84.2),
    stage("warmup", "online", 128_400, 148_000, 4.1e11, 31.7, "sft"),
    stage("collect", "collect", 221_000, 0, 1.6e11, 12.6, "warmup"),
    stage("dpo", "offline", 0, 331_000, 5.0e11, 24.9, "warmup", "collect"),
    EVALUATION,
]


def test_the_result_and_its_sentence():
    title, columns, rows = summary_table(EVALUATION, STAGES)
    assert "1,024 problems, 4 answers each" in title
    assert columns == ["policy", "pass@1 %", "pass@4 %", "greedy %", "change",
                       "made by", "generated", "trained", "FLOPs", "time"]  # fmt: skip
    assert rows == [
        ["cold (sft)", "33.4 ± 1.0", "61.2", "51.0", "–", "sft", "0", "5.12 M", "9.50 T", "1 min 24 s"],
        ["warm-up (warmup@20)", "70.0 ± 1.0", "61.2", "–", "+36.6 ± 1.1", "warmup", "128 k", "148 k", "410 G", "32 s"],
        ["G2D (dpo)", "75.2", "61.2", "51.0", "+5.2 ± 0.8", "collect + dpo", "221 k", "331 k", "660 G", "38 s"],
    ]  # fmt: skip
    assert headline(EVALUATION) == (
        "Cold (sft) answers 33.4 ± 1.0 % of 1,024 held-out problems correctly; "
        "warm-up (warmup@20) rises to 70.0 % (+36.6 ± 1.1 points); G2D (dpo) rises to 75.2 % "
        "(+5.2 ± 0.8 points)."
    )
    # what the result does not have
    assert tables.paired_table(EVALUATION).rows == [["sft → dpo", "+41.9 ± 0.9"]]


def chat(reward: float, **accuracy: float) -> dict:
    """Results of a task with a scalar reward, after those of the main task where it has
    accuracies."""
    first = (
        {"main": {"reward": 0.5, "sem": 0.1, "accuracy": 0.5, "problems": 8}} if accuracy else {}
    )
    scored = {"reward": reward, "sem": 0.125, "accuracy": None, "problems": 4, "unscorable": 0.25}
    return {
        "tasks": {**first, "chat": {**scored, "length_normalised": reward / 10}},
        "mean": None,
        **accuracy,
    }


def rewarded(*entries: dict) -> dict:
    pair = {
        "before": "sft",
        "after": "dpo",
        "tasks": {"chat": {"difference": 0.5, "sem": 0.0625, "problems": 4}},
    }
    policies = [
        {"name": name, **entry} for name, entry in zip(("sft", "dpo"), entries, strict=True)
    ]
    return {"result": {"policies": policies, "paired": [pair], "problems": 4, "samples": 2}}


def test_rewards_stand_where_there_is_no_accuracy():
    evaluation = rewarded(chat(1.0), chat(1.5))
    title, columns, rows = summary_table(evaluation, [])
    assert (
        title
        == "Reward on 4 problems, 2 answers each (± standard error clustered by problem; changes "
        "are paired)"
    )
    assert columns == ["policy", "reward", "change"]
    assert rows == [["cold (sft)", "1 ± 0.12", "–"], ["G2D (dpo)", "1.5 ± 0.12", "+0.5 ± 0.062"]]
    assert headline(evaluation) == (
        "Cold (sft) has a mean reward of 1 ± 0.12 on 4 held-out problems; G2D (dpo) rises to 1.5 "
        "(+0.5 ± 0.062)."
    )
    task = tables.tasks_table(evaluation)
    assert task.columns == [
        "policy",
        "task",
        "reward",
        "reward / token",
        "problems",
        "unscorable %",
    ]
    assert task.rows[0][1:] == ["chat", "1 ± 0.12", "0.1", "4", "25.0"]


def test_accuracy_and_rewards_of_a_mixed_evaluation():
    evaluation = rewarded(chat(1.0, mean=0.5, sem_clustered=0.1), chat(1.5, mean=0.5))
    title, columns, rows = summary_table(evaluation, [])
    assert title.startswith("Accuracy on 8 problems, ")
    assert columns == ["policy", "pass@1 %", "chat reward", "chat change"]
    assert rows[0][1] == "50.0 ± 10.0" and rows[1][-2:] == ["1.5 ± 0.12", "+0.5 ± 0.062"]
    assert [row[1:3] for row in tables.tasks_table(evaluation).rows] == [
        ["main", "50.0"],
        ["chat", "–"],
    ] * 2
    assert headline(evaluation).startswith(
        "Cold (sft) answers 50.0 ± 10.0 % of 8 held-out problems correctly"
    )


def test_what_a_selection_saw_with_its_steps_as_numbers():
    steps = {step: {"score": 0.5} for step in ("100", "last", "20")}
    steps["9"] = {"score": 0.75, "sem": 0.1, "tasks": {"a": {}}}
    manifest = {"name": "best", "result": {"policy": "train@9", "split": "dev", "steps": steps}}
    title, columns, rows = tables.selection_table(manifest)
    assert title == "Selection best: train@9 by its score on dev (± standard error)"
    assert columns == ["step", "score"]
    assert rows == [["9 (chosen)", "0.75 ± 0.1"], ["20", "0.5"], ["100", "0.5"], ["last", "0.5"]]


@pytest.mark.parametrize("path", ["run:/runs/cold#sft", "hf:org/model", "models/cold"])
def test_no_sentence_begins_with_a_capitalised_path(path):
    result = {"policies": [{"name": path, "mean": 0.25}], "problems": 9, "samples": 1}
    assert (
        headline({"result": result})
        == f"The policy {path} answers 25.0 % of 9 held-out problems correctly."
    )


def test_a_stages_cost_counts_once_and_little_is_little():
    policies = [{**WARM, "name": f"warmup@{k}"} for k in (10, 20)]
    _, columns, rows = summary_table(
        {"result": {"policies": policies, "problems": 2, "samples": 1}}, STAGES[1:2]
    )
    assert [row[columns.index("made by")] for row in rows] == ["–", "warmup"]
    assert summary_table(None, STAGES) == ("No evaluation is finished yet", [], [])
    base = {"result": {"policies": [{"name": "base"}]}}
    assert summary_table(base, [])[1:] == (["policy"], [["base"]])
    assert headline(base) == "Base answers – % of – held-out problems correctly."


def test_compute_sums_up_with_device_time_where_it_says_something():
    rows = tables.compute_table(STAGES[:4]).rows
    assert rows[-1] == ["all stages", "", "349 k", "0", "0", "5.60 M", "10.6 T", "2 min 33 s"]
    assert len(rows) == 5 and len(tables.compute_table(STAGES[:1]).rows) == 1  # no total of one
    stages = [
        {**one, "device_seconds": 8 * one["seconds"], "verifier_cpu_seconds": 1.0}
        for one in STAGES[:2]
    ]
    _, columns, rows = tables.compute_table(stages)
    assert columns[-3:] == ["time", "device time", "verifier CPU"]
    assert [row[-3:] for row in rows] == [
        ["1 min 24 s", "11 min 14 s", "1.0 s"],
        ["32 s", "4 min 14 s", "1.0 s"],
        ["1 min 56 s", "15 min 27 s", "2.0 s"],
    ]
    stages = [
        {**one, "peak_memory_bytes": gib << 30} for one, gib in zip(STAGES[:2], (3, 2), strict=True)
    ]
    assert [row[-1] for row in tables.compute_table(stages).rows] == [
        "3.0 GiB",
        "2.0 GiB",
        "3.0 GiB",
    ]
    assert [row[-1] for row in tables.compute_table([stages[0], STAGES[1]]).rows] == [
        "3.0 GiB",
        "–",
        "–",
    ]
    programs = {f"p{i}": {"compiled": 1, "seconds": 10.0 - i} for i in range(10)}
    more = {"programs": {"p0": {"compiled": 2, "seconds": 1.0}}}
    _, _, rows = tables.compiled_table([{"programs": programs}, more, {}])
    assert (
        rows[0] == ["p0", "3", "11.0 s"] and rows[-1] == ["others", "2", "3.0 s"] and len(rows) == 9
    )


def test_greedy_answers_are_compared_like_sampled_ones():
    policies = [
        {**entry, "greedy": value} for entry, value in ((COLD, 0.066), (WARM, 0.652), (BEST, 0.77))
    ]
    greedily = [{"difference": 0.586, "sem": 0.022}, {"difference": 0.118, "sem": 0.014}]
    paired = [{**pair, "greedy": found} for pair, found in zip(PAIRED, greedily, strict=False)]
    evaluation = {"result": {**EVALUATION["result"], "policies": policies, "paired": paired}}
    assert headline(evaluation).endswith(
        "(+5.2 ± 0.8 points). Decoded greedily: 6.6 %, then 65.2 % (+58.6 ± 2.2), then 77.0 % "
        "(+11.8 ± 1.4)."
    )
    _, columns, rows = summary_table(evaluation, [])
    assert [row[columns.index("greedy change")] for row in rows] == [
        "–",
        "+58.6 ± 2.2",
        "+11.8 ± 1.4",
    ]


@pytest.mark.parametrize(
    ("difference", "sem", "problems", "words"),
    [
        (
            *(0.02, 0.0101, 9),
            "G2D (dpo) is at 75.2 %, and the 95 % interval of its difference from cold (sft) has "
            "0 in it (+2.0 ± 1.0",
        ),
        (-0.02, 0.0103, 1000, "has 0 in it (-2.0 ± 1.0 points)"),
        (-0.03, 0.01, 9, "G2D (dpo) falls to 75.2 % (-3.0 ± 1.0 points)"),
        (0.0199, 0.01, 1000, "G2D (dpo) rises to 75.2 %"),  # Student's t of a thousand is 1.962
        (0.12, 0.01, 2, "has 0 in it (+12.0 ± 1.0 points)"),  # and of two 12.7
        (0.13, 0.01, 2, "G2D (dpo) rises to 75.2 %"),
        (0.04, 0.01, 3, "has 0 in it"),
        (0.03, "NaN", 1, "G2D (dpo) reaches 75.2 % (not compared pairwise with cold (sft))"),
    ],
)
def test_a_change_whose_interval_has_zero_in_it_is_called_so(difference, sem, problems, words):
    pair = {
        "before": "sft",
        "after": "dpo",
        "difference": difference,
        "sem": sem,
        "problems": problems,
    }
    assert words in headline(
        {"result": {"policies": [COLD, BEST], "paired": [pair], "problems": 9, "samples": 1}}
    )


def test_labels_of_the_shipped_stages():
    names = ("sft", "warmup", "warmup@10", "dpo", "grpo", "hf:org/model")
    expected = ["cold (sft)", "warm-up", "warm-up (warmup@10)", "G2D (dpo)", "grpo", "hf:org/model"]
    assert [fmt.policy_name({"name": name, "label": name}) for name in names] == expected
    assert fmt.policy_name({"name": "dpo", "label": "offline DPO"}) == "offline DPO (dpo)"


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


@given(st.lists(st.tuples(st.text(), st.floats()), max_size=5))
def test_a_sheet_reads_back_and_no_text_begins_a_formula(rows):
    header, *lines = csv.reader(sheet(("text", "value"), rows).splitlines())
    assert header == ["text", "value"]
    for (_, value), (cell, number) in zip(rows, lines, strict=True):
        assert not cell.lstrip().startswith(("=", "+", "-", "@", "\t", "\r"))
        assert float(number) == value or (math.isnan(float(number)) and math.isnan(value))


@pytest.mark.parametrize(
    ("mean", "sem", "problems", "ends"),
    [
        (0.5, 0.1, 2, (0.0, 100.0)),  # Student's t of two is 12.7
        (0.95, 0.04, 9, (85.776, 100.0)),
        (0.05, 0.04, 9, (0.0, 14.224)),
        (0.5, 0.04, 9, (40.776, 59.224)),
        (1.0, 0.0, 9, (100.0, 100.0)),
        (0.5, "NaN", 1, (math.nan, math.nan)),
    ],
)
def test_a_bar_ends_where_accuracies_do(mean, sem, problems, ends):
    drawn = _interval({"mean": mean, "sem_clustered": sem, "problems": problems})
    assert drawn == pytest.approx((100 * mean, *ends), abs=1e-3, nan_ok=True)


def test_the_result_is_that_on_test_wherever_it_stands() -> None:
    """A stage named "validation" runs behind one named "evaluate"."""
    on_test = {"result": {"split": "test", "problems": 4}}
    on_dev = {"result": {"split": "dev", "problems": 4}}
    assert result_of([on_test, on_dev]) is on_test
    assert result_of([on_dev]) is on_dev and result_of([]) is None
    assert problems(on_dev, "held-out problems") == "4 dev problems"
    assert problems(on_test, "held-out problems") == "4 held-out problems"
