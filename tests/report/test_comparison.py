"""Runs side by side: known figures over common problems only, honest gaps, hostile names, and what
is refused."""

import csv
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from reports import HOSTILE, STEERING, Page, completions, evaluation, finish

from g2d_jax.report.comparison import (
    FILES,
    Comparison,
    _incomparable,
    differences,
    read_comparison,
    report,
    runs_table,
)
from g2d_jax.report.frame import policies
from g2d_jax.report.page import html, output_folder, text
from g2d_jax.report.paired_differences import difference
from g2d_jax.report.study import details
from g2d_jax.report.tables import sheet
from g2d_jax.report.verdict import comparison_sentence
from g2d_jax.runtime.storage import read_json, write_json
from g2d_jax.runtime.tables import write_rollouts
from g2d_jax.session.stage_result import Cost, read, write

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 48, "stop": []}
MEASURED = {"split": "test", "sampling": SAMPLING}
STAGES = {
    "sft": {"kind": "sft", "policy": "init"},
    "warmup": {"kind": "online", "policy": "sft", "steps": 20},
    "collect": {"kind": "collect", "policy": "warmup", "rollouts": "sample"},
    "dpo": {"kind": "offline", "policy": "warmup", "preferences": "collect"},
}
ONE = {"p0": [1, 1], "p1": [1, 0], "p2": [0, 0], "p3": [1, 1]}
OTHER = {"p0": [1, 1], "p1": [1, 1], "p2": [1, 0], "p3": [0, 1]}
COST = Cost(generated=1, prefilled=10, scored=100, trained=1000, flops=7.0, seconds=60.0)


def run(
    folder: Path,
    policies: dict,
    result: dict = MEASURED,
    stages: dict = STAGES,
    cost: Cost = COST,
    **config,
) -> Path:
    """A finished run of these stages, each at this cost."""
    write_json(
        folder / "config.json",
        {"config": {"name": folder.name, "seed": 3, "stages": stages, **config}},
    )
    for i, (name, stage) in enumerate(stages.items()):
        counts = {"steps": 20} if stage["kind"] == "online" else {}
        finish(folder / f"{i:02d}-{name}", stage["kind"], counts=counts, cost=cost)
    evaluation(
        folder / "09-evaluate",
        policies,
        informativeness={"mean_length": 3.0, "entropy": 0.5},
        **result,
    )
    return folder


def compared(folders, **chosen) -> Comparison:
    return read_comparison(folders, **chosen)


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Four common problems; each run has one of its own on which it would look better."""
    one = run(tmp_path / "one", {"dpo": {**ONE, "only-here": [1, 1]}})
    return one, run(
        tmp_path / "other", {"dpo": {**OTHER, "only-there": [1, 1], "and-this": [1, 1]}}
    )


def names(runs: Comparison) -> list[str]:
    return [row.name for row in runs.rows]


def lines(runs: Comparison) -> list[dict[str, str]]:
    table = details(runs.rows)
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def change(folder: Path, **fields) -> None:
    """Change fields of a run's evaluation."""
    place = folder / "09-evaluate"
    result = read(place)
    write(place, replace(result, evaluation=replace(result.evaluation, **fields)))


def test_known_figures_over_common_problems_only(two):
    comparison = compared(two)
    assert comparison.problems == ["p0", "p1", "p2", "p3"]
    a, b = comparison.rows
    assert (a.name, b.name) == ("A: G2D (dpo)", "B: G2D (dpo)")
    assert (a.accuracy.mean, b.accuracy.mean) == (0.625, 0.75)
    pair = difference(b, a)
    assert pair.mean == 0.125
    # Student's t of four problems times the error of 0, 1/2, 1/2, -1/2
    half = 3.18245 * 0.2393568
    assert (pair.low, pair.high) == pytest.approx((0.125 - half, 0.125 + half), rel=1e-5)
    shown = runs_table(comparison)
    assert [row[shown.columns.index("not common")] for row in shown.rows] == ["1", "2"]
    assert "4 common problems the difference is +12.5 [-63.7, +88.7] points" in comparison_sentence(
        comparison.last
    )
    frame = comparison.frame
    assert frame["accuracy"].tolist() == [0.625, 0.75] and frame["problems"].tolist() == [4, 4]
    (row,) = differences(comparison)[1].rows
    assert row == ["A: G2D (dpo) → B: G2D (dpo)", "+12.5 [-63.7, +88.7]", "2", "1", "1"]
    assert a.accuracy.mean == 0.625
    # of warmup, collect and dpo; not of sft
    assert lines(comparison)[0] == {
        **{
            "policy": "A: G2D (dpo)",
            "K": "20",
            "pass@2 %": "75.0",
            "entropy, nats": "0.500",
            "length": "3.0",
        },
        **{
            "generated": "3",
            "trained": "3.00 k",
            "FLOPs": "21",
            "time": "3 min 00 s",
        },
    }


def test_which_policies_take_part(tmp_path):
    tables = {"sft": {"p0": [0, 0], "p1": [0, 1]}, "warmup": {"p0": [1, 0], "p1": [0, 1]}}
    runs = [
        run(tmp_path / name, {**tables, "dpo": {"p0": [1, i], "p1": [0, 1]}})
        for i, name in enumerate(("one", "other"))
    ]
    ends = compared(runs)
    assert names(ends) == ["A: cold (sft)", "A: G2D (dpo)", "B: cold (sft)", "B: G2D (dpo)"]
    assert [row.name for row in ends.last] == ["A: G2D (dpo)", "B: G2D (dpo)"]
    assert len(compared(runs, policies="all").rows) == 6
    page = Page(html(report(ends)))
    pairs = [row["pair"] for row in page.table("Paired differences")]
    assert pairs == [
        "A: cold (sft) → A: G2D (dpo)",
        "B: cold (sft) → B: G2D (dpo)",
        "A: G2D (dpo) → B: G2D (dpo)",
    ]


def test_the_27th_run_has_a_letter_too(tmp_path):
    runs = [run(tmp_path / f"{i}", {"dpo": ONE}) for i in range(27)]
    assert [side.mark for side in compared(runs).sides][24:] == ["Y", "Z", "AA"]


def test_policies_with_different_numbers_of_answers_are_compared_at_the_pass_at_k_of_all(tmp_path):
    few, many = ({f"p{i}": [1, *[0] * more] for i in range(3)} for more in (1, 3))
    comparison = compared(
        [run(tmp_path / "few", {"dpo": few}), run(tmp_path / "many", {"dpo": many})]
    )
    assert [row["pass@2 %"] for row in lines(comparison)] == ["100.0", "50.0"]


def test_a_timeout_is_wrong_and_what_cannot_be_scored_counts_nowhere(tmp_path):
    one = run(tmp_path / "one", {"dpo": {"p0": [1, "t"], "p1": ["u", "u"], "p2": [1, "u"]}})
    other = run(tmp_path / "other", {"dpo": {"p0": [1, 1], "p1": [0, 0], "p2": [0, 1]}})
    a, b = compared([one, other]).rows
    np.testing.assert_array_equal(a.accuracies, [[0.5, np.nan, 1.0]])
    assert a.accuracy.mean == 0.75 and b.accuracy.mean == 0.5
    pair = difference(b, a)
    assert pair.mean == 0.0 and differences(compared([one, other]))[1].rows[0][2:] == [
        "1",
        "0",
        "1",
    ]
    assert "2 common problems the difference" in comparison_sentence([a, b])
    bad = run(tmp_path / "bad", {"dpo": {"p0": ["u", "u"]}})
    with pytest.raises(ValueError, match="none of the 1 common problems is scored for B: G2D"):
        compared([one, bad])


def test_one_common_problem_has_no_interval(tmp_path):
    comparison = compared(
        [run(tmp_path / name, {"dpo": {"p0": [i, 1]}}) for i, name in enumerate("ab")]
    )
    (row,) = Page(html(report(comparison))).table("Paired differences")
    assert row["difference [95 %]"] == "+50.0"
    assert [row.accuracy.mean for row in comparison.rows] == [0.5, 1.0]


def test_what_comes_from_elsewhere(tmp_path):
    two = [run(tmp_path / name, {"dpo": ONE}) for name in ("one", "other")]
    second = read_json(two[1] / "config.json")["config"]
    stages = {**STAGES, "warmup": {**STAGES["warmup"], "policy": "run:/far/away#sft"}}
    write_json(two[1] / "config.json", {"config": {**second, "stages": stages}})
    comparison = compared(two)
    assert [row["K"] for row in lines(comparison)] == ["20", "20"]
    shown = runs_table(comparison)
    starts = [row[shown.columns.index("starts from")] for row in shown.rows]
    assert starts == ["–", "run:/far/away#sft"]


@pytest.mark.parametrize(
    ("name", "there", "said"), [("stop", ["\n", "Q:"], "['\\n', 'Q:']"), ("top_k", 5, "5")]
)
def test_settings_of_either_kind_that_differ_are_warned_of(tmp_path, name, there, said):
    """Stop strings are a list, all others are numbers."""
    one = run(tmp_path / "one", {"dpo": ONE})
    other = run(
        tmp_path / "other", {"dpo": OTHER}, {**MEASURED, "sampling": {**SAMPLING, name: there}}
    )
    comparison = compared([one, other])
    here = {"stop": "none", "top_k": "0"}[name]
    assert (
        report(comparison)
        .warnings[0]
        .startswith(f"The evaluations differ in {name}: A {here}, B {said}.")
    )


def test_evaluations_of_one_split_are_compared_and_reference_answers_with_them(tmp_path):
    one, other = run(tmp_path / "a/run", {"dpo": ONE}), run(tmp_path / "b/run", {"dpo": OTHER})
    evaluation(other / "10-dev", {"dpo": {"d0": [1, 1]}}, split="dev", sampling=SAMPLING)
    path = other / "09-evaluate/problems.json"
    write_json(
        path, [{**row, "answer": "8" if row["id"] == "p1" else "7"} for row in read_json(path)]
    )
    comparison = compared([one, other])
    assert [side.stage for side in comparison.sides] == ["evaluate", "evaluate"]
    # folders of one name
    assert [side.label for side in comparison.sides] == [
        str(one),
        str(other),
    ]
    assert list(_incomparable(comparison)) == [
        "1 of the common problems have different reference answers in two runs."
    ]
    # whichever is named first: dev is behind test
    again = compared([other, one])
    assert [side.stage for side in again.sides] == ["evaluate", "evaluate"]
    shutil.rmtree(other / "09-evaluate")
    with pytest.raises(
        ValueError, match=r"no problem in common.* A \(.*b/run\) 1 of dev, B \(.*a/run\) 4 of test"
    ):
        compared([other, one])


def test_settings_that_differ(tmp_path):
    one = run(tmp_path / "one", {"dpo": ONE}, beta=0.1, name="x")
    other = run(tmp_path / "other", {"dpo": OTHER}, beta=1.0, name="x")
    same = run(tmp_path / "same", {"dpo": OTHER}, beta=0.1, name="x")
    write_json(
        other / "config.json", {**read_json(other / "config.json"), "own": {"reward": "mine:even"}}
    )
    page = Page(html(report(compared([one, other, same]))))
    assert page.table("Settings that differ") == [
        {"setting": "beta", "run": "B", "change from A": "0.1 -> 1.0"},
        {
            **{"setting": "given from Python.reward", "run": "B"},
            "change from A": "(absent) -> 'mine:even'",
        },
    ]
    assert [row["other settings"] for row in page.table("The runs")] == ["0", "2", "0"]


def test_problems_where_runs_differ_most(tmp_path):
    one = run(
        tmp_path / "one",
        {"dpo": {"a": [1, 1], "b": [0, 0], "c": [1, 0], "d": [0, 0], "p0": [1, 1]}},
    )
    table = {"a": [1, 1], "b": [1, 0], "c": [0, 1], "d": [1, 1], "p0": ["u", "u"]}
    comparison = compared([one, run(tmp_path / "other", {"dpo": table})])
    page = Page(html(report(comparison)))
    assert page.sections == ["results", "rows", "differences", "problems"]
    assert (
        "2 of 5 problems: those with the largest differences" in page.text
        and page.source.count("<details data-row") == 2
    )  # a and c are equal, p0 is not scored
    assert page.text.index("d = ?") < page.text.index("b = ?")


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        (lambda one, other: [one], "at least two runs"),
        (lambda one, other: [one, f"{one}/../one"], "each once"),
        (lambda one, other: [one, one.parent], "holds no run"),
        (lambda one, other: (other / "09-evaluate/manifest.json").unlink() or [one, other], "no finished evaluation"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_and_folders_of_other_things_are_refused(two, choose, message):
    with pytest.raises(ValueError, match=message):
        compared(choose(*two))
    with pytest.raises(ValueError, match=r"holds files that are not of a comparison \(00-sft\)"):
        output_folder(two[0], FILES, "a comparison")
    with pytest.raises(ValueError, match="is a file"):
        output_folder(two[0] / "config.json", FILES, "a comparison")


def test_hostile_names_and_completions_stay_text(tmp_path):
    evil = "<script>x<\u202e\x1b[2J|*"
    one, other = run(tmp_path / evil, {"dpo": ONE}), run(tmp_path / "=1+1", {"dpo": OTHER})
    (entry,) = read(other / "09-evaluate").evaluation.policies
    entry = replace(entry, name=f"=cmd {evil}", label=HOSTILE)
    change(other, policies=[entry], split=evil, sampling={**SAMPLING, "temperature": evil})
    write_rollouts(other / "09-evaluate/rollouts/0.parquet", completions(evil, OTHER, text=HOSTILE))
    stages = {entry.name: {"kind": "sft", "policy": "init"}}
    write_json(other / "config.json", {"config": {"name": evil, "stages": stages, evil: evil}})
    comparison = compared([one, other])
    source = html(report(comparison))
    page = Page(source)
    assert "</script><script>alert(1)</script>" in page.text and "<script>x<" in page.text
    for char in STEERING:
        assert char not in source, hex(ord(char))
    assert not re.search(r"(?<!\\)<", text(report(comparison))) and "\x1b" not in text(
        report(comparison)
    )
    written = sheet(policies(one, other)).splitlines()
    cells = [cell for row in csv.reader(written) for cell in row]
    assert not any(cell.startswith(("=", "+", "@")) for cell in cells) and "'=1+1" in cells
