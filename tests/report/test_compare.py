"""Runs side by side: known figures over common problems only, honest gaps, hostile names, and what is refused."""

import csv
import math
import re
from pathlib import Path

import numpy as np
import pytest

from g2d_jax.records import Rollout, Score, ScoredRollout, Verdict
from g2d_jax.report import compare_page, compare_text
from g2d_jax.report.compare import Comparison
from g2d_jax.report.compare_read import completions, read_comparison
from g2d_jax.report.page import html, markdown
from g2d_jax.storage import finish, read_json, write_json
from g2d_jax.tables import write_rollouts

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 48}
VERDICTS = {1: Verdict.CORRECT, 0: Verdict.INCORRECT, "t": Verdict.TIMEOUT, "u": Verdict.UNSCORABLE}
STAGES = {
    "sft": {"kind": "sft", "policy": "init"},
    "warmup": {"kind": "online", "policy": "sft", "steps": 20},
    "collect": {"kind": "collect", "policy": "warmup", "rollouts": "sample"},
    "dpo": {"kind": "offline", "policy": "warmup", "preferences": "collect"},
}
ONE = {"p0": [1, 1], "p1": [1, 0], "p2": [0, 0], "p3": [1, 1]}
OTHER = {"p0": [1, 1], "p1": [1, 1], "p2": [1, 0], "p3": [0, 1]}
COST = {"tokens": {"generated": 1, "prefilled": 10, "scored": 100, "trained": 1000}, "flops": 7.0, "seconds": 60.0}


def answers(policy: str, table: dict[str, list], tokens: int = 3, text: str = "an answer") -> list[ScoredRollout]:
    """Completions of `tokens` tokens with an entropy of 0.5 each."""
    ids, nats = np.arange(tokens, dtype=np.int32), np.full(tokens, -0.5, np.float32)
    return [
        ScoredRollout(
            Rollout(problem, 0, i, ids, ids, nats, -nats, "stop"), text, Score(None, VERDICTS[one], None), policy
        )
        for problem, marks in table.items()
        for i, one in enumerate(marks)
    ]


def evaluation(folder: Path, name: str, rows: dict[str, list[ScoredRollout]], result: dict | None = None) -> None:
    problems = sorted({row.rollout.problem_id for some in rows.values() for row in some})
    write_json(folder / "problems.json", [{"id": p, "prompt": f"{p} = ?", "answer": "7"} for p in problems])
    entries = []
    for i, (policy, some) in enumerate(rows.items()):
        write_rollouts(folder / f"rollouts/{i}.parquet", some)
        entries.append({"name": policy, "label": policy, "mean": 0.123, "rollouts": f"rollouts/{i}.parquet"})
    told = {"split": "test", "sampling": SAMPLING, "samples": 2} if result is None else result
    finish(folder, {"kind": "evaluate", "name": name, "result": {**told, "policies": entries}})


def run(
    folder: Path, policies: dict[str, dict[str, list]], result: dict | None = None, stages: dict = STAGES, **config
) -> Path:
    """A finished run of these stages, whose manifests know no device time."""
    write_json(folder / "config.json", {"config": {"name": folder.name, "seed": 3, "stages": stages, **config}})
    for i, (name, stage) in enumerate(stages.items()):
        counts = {"steps": 20} if stage["kind"] == "online" else {}
        finish(folder / f"{i:02d}-{name}", {"kind": stage["kind"], "name": name, "counts": counts, **COST})
    rows = {policy: answers(policy, table) for policy, table in policies.items()}
    evaluation(folder / "09-evaluate", "evaluate", rows, result)
    return folder


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Four common problems; each run has one of its own on which it would look better."""
    one = run(tmp_path / "one", {"dpo": {**ONE, "only-here": [1, 1]}})
    return one, run(tmp_path / "other", {"dpo": {**OTHER, "only-there": [1, 1], "and-this": [1, 1]}})


@pytest.fixture
def three(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs that evaluated three policies each."""
    tables = {"sft": {"p0": [0, 0], "p1": [0, 1]}, "warmup": {"p0": [1, 0], "p1": [0, 1]}}
    one = run(tmp_path / "one", {**tables, "dpo": {"p0": [1, 1], "p1": [0, 1]}})
    return one, run(tmp_path / "other", {**tables, "dpo": {"p0": [1, 0], "p1": [1, 1]}})


def texts(comparison: Comparison) -> str:
    return "\n".join(
        [compare_text.verdict(comparison), compare_text.shared(comparison), *compare_text.notes(comparison)]
    )


def test_known_figures_over_common_problems_only(two):
    comparison = read_comparison(two)
    assert list(comparison.problems) == ["p0", "p1", "p2", "p3"]
    a, b = comparison.players
    assert (a.name, b.name) == ("A: G2D (dpo)", "B: G2D (dpo)")
    assert (a.accuracy.mean, b.accuracy.mean) == (0.625, 0.75)
    assert a.accuracy.sem_clustered == pytest.approx(math.sqrt(0.6875 / 12))  # of 1, 1/2, 0, 1
    (pair,) = comparison.pairs
    assert pair.paired.difference == 0.125
    assert pair.paired.sem == pytest.approx(0.2393568)  # of 0, 1/2, 1/2, -1/2
    assert (pair.low, pair.high) == pytest.approx((-0.3441393, 0.5941393))
    assert (pair.wins, pair.draws, pair.losses, pair.is_beyond_noise) == (2, 1, 1, False)
    assert pair.interval.mean == 0.125 and -0.5 <= pair.interval.low < 0 < pair.interval.high <= 0.5
    assert (a.length, a.entropy) == (3.0, 0.5)
    assert compare_text.shared(comparison) == (
        "4 problems are common to all; 1 of A, 2 of B are not, and count nowhere here."
    )
    assert compare_text.verdict(comparison) == (
        "B: G2D (dpo) answers 75.0 ± 14.4 % of 4 common problems correctly, A: G2D (dpo) 62.5 ± 23.9 %: "
        "12.5 ± 23.9 points apart, within noise."
    )


def test_elo_of_a_known_count_of_wins(two):
    """B wins 2 and draws 1 of 4; the model's virtual draw makes that 3 to 2."""
    a, b = read_comparison(two).ratings
    assert (a.name, a.games) == ("A: G2D (dpo)", 4)
    assert (a.rating + b.rating) / 2 == pytest.approx(1000)
    assert b.rating - a.rating == pytest.approx(400 * math.log10(3 / 2))
    assert a.low < a.rating < a.high


def test_the_table_of_policies(two):
    _, columns, rows = compare_text.players_table(read_comparison(two))
    assert columns == [
        *("policy", "accuracy %", "pass@2 %", "length", "entropy", "K", "seed"),
        *("generated", "trained", "FLOPs", "time", "run"),
    ]
    assert rows == [
        ["A: G2D (dpo)", "62.5 ± 23.9", "75.0", "3", "0.5", "20", "3", "3", "3.00 k", "21", "3 min 00 s", "one"],
        ["B: G2D (dpo)", "75.0 ± 14.4", "100.0", "3", "0.5", "20", "3", "3", "3.00 k", "21", "3 min 00 s", "other"],
    ]  # of warmup, collect and dpo; not of sft


def test_which_policies_take_part(three):
    ends = read_comparison(three)
    assert [player.name for player in ends.players] == [
        "A: cold (sft)",
        "A: G2D (dpo)",
        "B: cold (sft)",
        "B: G2D (dpo)",
    ]
    assert len(read_comparison(three, policies="all").players) == 6
    assert [player.is_last for player in ends.players] == [False, True, False, True]
    assert [(p.before.name, p.after.name) for p in ends.pairs][1] == ("A: cold (sft)", "B: cold (sft)")
    assert len(ends.pairs) == 6 and "Of 6 pairs" in compare_text.differences_note(ends)


def test_a_timeout_is_wrong_and_what_cannot_be_scored_counts_nowhere(tmp_path):
    tables = {"p0": [1, "t"], "p1": ["u", "u"], "p2": [1, "u"]}
    one = run(tmp_path / "one", {"dpo": tables})
    comparison = read_comparison([one, run(tmp_path / "other", {"dpo": {"p0": [1, 1], "p1": [0, 0], "p2": [0, 1]}})])
    a, b = comparison.players
    np.testing.assert_array_equal(a.means, [0.5, np.nan, 1.0])
    assert a.accuracy.mean == 0.75 and b.accuracy.mean == 0.5
    (pair,) = comparison.pairs
    assert (pair.paired.difference, pair.paired.problems, pair.draws) == (0.0, 2, 0)


def test_one_common_problem_has_no_interval(tmp_path):
    comparison = read_comparison([run(tmp_path / name, {"dpo": {"p0": [i, 1]}}) for i, name in enumerate("ab")])
    assert comparison.pairs[0].is_beyond_noise is None
    assert compare_text.pairs_table(comparison)[2][0][1:3] == ["+50.0", "–"]
    assert "1 common problem correctly" in texts(comparison) and "too few problems to tell" in texts(comparison)
    assert html(compare_page.report(comparison))


def test_several_devices_and_a_price(two):
    for folder in two:
        for file in folder.glob("0[0-3]-*/manifest.json"):
            write_json(file, {**read_json(file), "device_seconds": 240.0, "verifier_cpu_seconds": 1.0})
    config = read_json(two[0] / "config.json")["config"]
    write_json(two[0] / "config.json", {"config": {**config, "compute": {"price_per_device_hour": 3.0}}})
    _, columns, rows = compare_text.players_table(read_comparison(two))
    shown = [dict(zip(columns, row, strict=True)) for row in rows]
    assert [row["device time"] for row in shown] == ["12 min 00 s"] * 2
    assert [row["price"] for row in shown] == ["0.60", "–"]


def test_what_a_policy_is_made_of_elsewhere_is_said(two):
    config = read_json(two[1] / "config.json")["config"]
    stages = {**STAGES, "warmup": {**STAGES["warmup"], "policy": "run:/far/away#sft"}}
    write_json(two[1] / "config.json", {"config": {**config, "stages": stages}})
    comparison = read_comparison(two)
    assert [player.steps for player in comparison.players] == [20, 20]
    assert "B starts from run:/far/away#sft" in texts(comparison) and "A starts" not in texts(comparison)


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", 0.7), ("top_p", 0.9), ("top_k", 5), ("max_new_tokens", 16)]
)
def test_other_sampling_is_warned_of(tmp_path, name, value):
    one = run(tmp_path / "one", {"dpo": ONE})
    told = {"split": "test", "sampling": {**SAMPLING, name: value}, "samples": 2}
    comparison = read_comparison([one, run(tmp_path / "other", {"dpo": OTHER}, told)])
    expected = f"The evaluations differ in {name}: A {SAMPLING[name]}, B {value}. A difference in accuracy may"
    assert len(comparison.warnings) == 1 and comparison.warnings[0].startswith(expected)
    assert expected in html(compare_page.report(comparison)) and f"differ in {name}".replace("_", "\\_") in (
        markdown(compare_page.report(comparison))
    )


def test_evaluations_of_one_split_are_compared(tmp_path):
    one, other = run(tmp_path / "one", {"dpo": ONE}), run(tmp_path / "other", {"dpo": OTHER})
    told = {"split": "dev", "sampling": SAMPLING, "samples": 2}
    evaluation(other / "10-dev", "dev", {"dpo": answers("dpo", {"d0": [1, 1]})}, told)
    assert [side.stage.name for side in read_comparison([one, other]).sides] == ["evaluate", "evaluate"]
    with pytest.raises(ValueError, match=r"no problem in common.* A \(other\) 1 of dev, B \(one\) 4 of test"):
        read_comparison([other, one])


def test_other_reference_answers_are_warned_of(two):
    path = two[1] / "09-evaluate" / "problems.json"
    write_json(path, [{**row, "answer": "8" if row["id"] == "p1" else "7"} for row in read_json(path)])
    assert read_comparison(two).warnings == [
        "1 of the common problems have other reference answers in one run than in another."
    ]


def test_settings_that_differ(tmp_path):
    one = run(tmp_path / "one", {"dpo": ONE}, beta=0.1)
    other, same = run(tmp_path / "other", {"dpo": OTHER}, beta=1.0), run(tmp_path / "same", {"dpo": OTHER}, beta=0.1)
    content = read_json(other / "config.json")
    write_json(other / "config.json", {**content, "own": {"reward": "mine:even"}})
    comparison = read_comparison([one, other, same])
    assert compare_text.settings_tables(comparison) == [
        (
            "Settings that differ, A (one) -> B (other)",
            ["setting", "change"],
            [["beta", "0.1 -> 1.0"], ["reward from Python", "none -> mine:even"]],
        )
    ]
    assert compare_text.same_settings(comparison) == "C: all settings as those of A."


def test_what_points_of_a_study_share_is_listed_once(tmp_path):
    """A policy whose completions are one file is one player, unless it is a run's last."""
    one, other = (run(tmp_path / name, {"sft": ONE, "dpo": OTHER}) for name in ("one", "other"))
    file = other / "09-evaluate" / "manifest.json"
    manifest = read_json(file)
    manifest["result"]["policies"][0]["rollouts"] = "../../one/09-evaluate/rollouts/0.parquet"
    manifest["result"]["policies"][1]["rollouts"] = "../../one/09-evaluate/rollouts/1.parquet"
    write_json(file, manifest)
    comparison = read_comparison([one, other])
    assert [player.name for player in comparison.players] == ["A: cold (sft)", "A: G2D (dpo)", "B: G2D (dpo)"]
    assert "listed with the first of them: sft of B." in texts(comparison)
    assert comparison.pairs[-1].is_beyond_noise is False


def test_folders_of_one_name_are_told_apart_by_their_paths(tmp_path):
    one, other = run(tmp_path / "a" / "run", {"dpo": ONE}), run(tmp_path / "b" / "run", {"dpo": OTHER})
    assert [side.label for side in read_comparison([one, other]).sides] == [str(one), str(other)]


def test_problems_where_runs_differ_most(tmp_path):
    one = run(tmp_path / "one", {"sft": ONE, "dpo": {"a": [1, 1], "b": [0, 0], "c": [1, 0], "d": [0, 0], "p0": [1, 1]}})
    table = {"a": [1, 1], "b": [1, 0], "c": [0, 1], "d": [1, 1], "p0": ["u", "u"]}
    other = run(tmp_path / "other", {"dpo": table})
    with pytest.raises(ValueError, match="no problem in common"):
        read_comparison([run(tmp_path / "third", {"dpo": {"z": [1]}}), other])
    manifest = read_json(one / "09-evaluate" / "manifest.json")
    manifest["result"]["policies"] = manifest["result"]["policies"][1:]
    write_json(one / "09-evaluate" / "manifest.json", manifest)
    comparison = read_comparison([one, other])
    assert comparison.most_different(40) == ["d", "b"]  # a and c are equal, p0 is not scored
    assert comparison.most_different(1) == ["d"]
    found = completions(comparison.players[1], {"d"})
    assert [row.rollout.sample for row in found["d"]] == [0, 1] and list(found) == ["d"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one, other: [one], "two runs or more, got 1"),
        (lambda one, other: [one, f"{one}/../one"], "is given twice"),
        (lambda one, other: [one, one.parent], "holds no run"),
        (
            lambda one, other: (other / "09-evaluate" / "manifest.json").unlink() or [one, other],
            "no finished evaluation",
        ),
        (
            lambda one, other: (other / "09-evaluate/rollouts/0.parquet").unlink() or [one, other],
            "no completions of 'dpo'",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(two, change, message):
    with pytest.raises(ValueError, match=message):
        read_comparison(change(*two))


def test_unknown_choices_and_unscorable_problems_are_refused(tmp_path, two):
    with pytest.raises(ValueError, match="policies must be ends or all, got 'some'"):
        read_comparison(two, policies="some")
    bad = run(tmp_path / "bad", {"dpo": {"p0": ["u", "u"]}})
    with pytest.raises(ValueError, match="none of the 1 common problems is scored for B: G2D"):
        read_comparison([two[0], bad])


def test_three_files_the_same_bytes_each_time(two, tmp_path):
    comparison = read_comparison(two)
    output = tmp_path / "out" / "compare"
    paths = compare_page.write_comparison(comparison, compare_page.report(comparison), output)
    assert paths == [str(output / name) for name in ("compare.html", "compare.md", "compare.csv")]
    first = [Path(path).read_bytes() for path in paths]
    compare_page.write_comparison(comparison, compare_page.report(comparison), output)  # over a comparison of before
    assert [Path(path).read_bytes() for path in paths] == first
    (output / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds other things than a comparison \(notes.txt\)"):
        compare_page.check_output(output)
    with pytest.raises(ValueError, match="is a file"):
        compare_page.check_output(output / "notes.txt")


def test_the_csv_has_every_figure(two):
    header, *rows = csv.reader(compare_text.spreadsheet(read_comparison(two)).splitlines())
    assert header == ["run", "policy", "before_run", "before_policy", "measure", "value"]
    table = {tuple(row[:5]): float(row[5]) for row in rows}
    assert len(table) == len(rows)
    assert table["one", "dpo", "", "", "mean"] == 0.625
    assert table["other", "dpo", "", "", "pass_at/2"] == 1.0
    assert table["one", "dpo", "", "", "cost/generated"] == 3.0
    assert math.isnan(table["one", "dpo", "", "", "cost/device_seconds"])
    assert table["other", "dpo", "one", "dpo", "difference"] == 0.125
    assert table["other", "dpo", "one", "dpo", "better"] == 2.0
    assert table["other", "dpo", "", "", "elo/rating"] == pytest.approx(1000 + 200 * math.log10(1.5))


@pytest.fixture
def page_parser(read, finished_run) -> type:
    """The parser that refuses elements and attributes which reports do not use themselves."""
    return type(read(finished_run)[1])


def test_the_page_is_one_safe_file(three, page_parser):
    source = html(compare_page.report(read_comparison(three)))
    page = page_parser(source)
    assert page.links == ["#results", "#differences", "#elo", "#problems", "#settings"]
    assert "default-src 'none'; style-src 'sha256-" in source and not re.search(r"url\(|@import|https?://", source)
    text = " ".join(" ".join(page.text).split())
    for words in (
        "A: one · B: other",
        "Elo ratings over the common problems",
        "Where the runs differ most",
        "p0 = ?",
        "B: all settings as those",
    ):
        assert words in text, words
    assert "2 of 2 common problems: those on which" in text and source.count("<details data-row") == 2


def test_hostile_names_and_completions_stay_text(tmp_path, page_parser, hostile):
    evil = "<script>x<\u202e\x1b[2J|*"
    one, other = run(tmp_path / evil, {"dpo": ONE}), run(tmp_path / "=1+1", {"dpo": OTHER})
    manifest = read_json(other / "09-evaluate" / "manifest.json")
    entry = {**manifest["result"]["policies"][0], "name": f"=cmd {evil}", "label": hostile}
    manifest["result"] |= {"policies": [entry], "split": evil, "sampling": {**SAMPLING, "temperature": evil}}
    write_json(other / "09-evaluate" / "manifest.json", manifest)
    write_rollouts(other / "09-evaluate/rollouts/0.parquet", answers(evil, OTHER, text=hostile))
    stages = {entry["name"]: {"kind": "sft", "policy": "init"}}
    write_json(other / "config.json", {"config": {"name": evil, "seed": evil, "stages": stages, evil: evil}})
    comparison = read_comparison([one, other])
    source = html(compare_page.report(comparison))
    text = " ".join(page_parser(source).text)
    assert "</script><script>alert(1)</script>" in text and "<script>x<" in text
    for char in "\u202e\u2066\u200b\ufeff\u2028\0\x1b\r\x85\x7f":
        assert char not in source, hex(ord(char))
    lines = markdown(compare_page.report(comparison)).splitlines()
    assert not any(re.search(r"(?<!\\)<", line) for line in lines) and "\x1b" not in "".join(lines)
    cells = [cell for row in csv.reader(compare_text.spreadsheet(comparison).splitlines()) for cell in row[:5]]
    assert not any(cell.startswith(("=", "+", "-", "@")) for cell in cells) and "'=1+1" in cells
