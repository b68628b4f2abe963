"""The report of a run: what it shows is what was measured, hostile text stays text, and parts may
be missing."""

import base64
import csv
import hashlib
import re
import shutil
from dataclasses import replace
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from reports import HOSTILE, STEERING, Page

from g2d_jax.records import Preference
from g2d_jax.report.page import SCRIPT, STYLE
from g2d_jax.report.result import Result
from g2d_jax.report.run import write_run
from g2d_jax.report.runs import read_run
from g2d_jax.runtime.storage import read_json, write_json
from g2d_jax.runtime.tables import (
    write_preferences,
)
from g2d_jax.runtime.tracking import Tracker
from g2d_jax.session.stage_result import Warned, write
from g2d_jax.session.stage_result import read as of_a_stage


def change(folder: Path, stage: str, **fields) -> None:
    """Overwrite fields of a stage's record."""
    (file,) = folder.glob(f"*-{stage}/manifest.json")
    write(file.parent, replace(of_a_stage(file.parent), **fields))


def test_a_finished_run_has_everything_and_its_numbers(report_of):
    folder, page = report_of
    assert page.sections == [
        "results",
        "answers",
        "curves",
        "informativeness",
        "pairs",
        "browser",
        "compute",
        "settings",
    ]
    evaluation = of_a_stage(folder / "05-evaluate").evaluation
    answers = {
        row.pop("measure"): list(row.values()) for row in page.table("More about the answers")
    }
    for i, (row, policy) in enumerate(
        zip(page.table("16 problems, 2 answers each"), evaluation.policies, strict=True)
    ):
        accuracy = policy.accuracy
        assert (
            row["accuracy %"] == f"{100 * accuracy.mean:.1f} ± {100 * accuracy.sem_clustered:.1f}"
        )
        assert answers["pass@2 %"][i] == f"{100 * policy.pass_at['2']:.1f}"
        assert answers["incorrect %"][i] == f"{100 * policy.verdicts['incorrect'] / 32:.1f}"
        # Student's t of 16 problems
        mean, half = 100 * accuracy.mean, 100 * 2.13145 * accuracy.sem_clustered
        assert f"{mean:.4g} ({mean - half:.4g} to {mean + half:.4g})" in page.source
    assert "correct %" not in answers and "Bars: 95 %, over problems only" in page.text
    costs = page.table("Cost of each stage")
    assert [*costs[0]] == [
        *("measure", "sft", "warmup", "collect", "dpo", "evaluate", "all stages")
    ]
    assert "rollouts of collect" in page.table("Rollouts of each policy")[0]
    assert "8 prompts" in page.text and "32 rollouts" in page.text
    moved = {row["measure"]: row for row in page.table("Pairs under the policy")}
    before = of_a_stage(folder / "04-dpo").measures["before"]
    gap = moved["gap in log-prob, chosen − rejected, nats"]
    assert gap["before dpo"] == f"{before['gap_mean']:.2f}"
    assert moved["pairs ranked correctly %"]["before dpo"] == f"{100 * before['frac_ranked']:.1f}"
    assert (
        not re.search(r"p10|gap_|_mean\b", " ".join(page.tables))
        and "still running" not in page.text
    )
    assert "· seed 0" in page.text and '"name": "tiny"' in page.text


def test_it_is_one_file_that_asks_for_nothing_and_styles_nothing_itself(report_of):
    _, page = report_of
    assert not page.links
    assert not re.search(r"@import|https?://|url\((?!#)", page.source)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page.source)[1]
    digests = [
        base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
        for part in (STYLE, SCRIPT)
    ]
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{digests[0]}'; script-src 'sha256-{digests[1]}'; "
        "base-uri 'none'; form-action 'none'"
    )
    assert page.source.index("Content-Security-Policy") < page.source.index("<style>")
    # the parser compares them with STYLE and SCRIPT
    assert page.tags.count("script") == page.tags.count("style") == 1
    assert not [name for name, _ in page.attributes if name.startswith("on") or name == "style"]
    assert not re.search(r"innerHTML|eval|document\.write|Function|setAttribute|</", SCRIPT)
    assert "prefers-color-scheme: dark" in STYLE and ("name", "viewport") in page.attributes


@pytest.mark.slow
def test_the_same_run_gives_the_same_bytes_and_figures_for_papers(report_of):
    folder, _ = report_of
    paths = [Path(path) for path in write_run(read_run(folder))]
    assert [path.name for path in paths] == ["report.html", "report.md", "report.csv"]
    files = [*paths, *sorted((folder / "figures").iterdir())]
    before = [file.read_bytes() for file in files]
    write_run(read_run(folder))
    assert [file.read_bytes() for file in files] == before
    names = {file.name for file in files}
    assert {
        "report-accuracy.svg",
        "report-accuracy.pdf",
        "report-warmup-reward.svg",
        "report-warmup-token-entropy.pdf",
    } <= names
    assert all(file.read_bytes().startswith(b"%PDF") for file in files if file.suffix == ".pdf")
    shutil.rmtree(folder / "figures")
    write_run(read_run(folder), figures=False)
    assert not (folder / "figures").exists()


def test_hostile_text_everywhere_stays_text(read, own_run):
    evil, ids = HOSTILE + "<" * 100_000, np.arange(3, dtype=np.int32)
    pair = Preference(HOSTILE, evil, evil, evil, ids, ids, ids, 1.0, 0.0)
    shutil.rmtree(own_run / "03-collect/preferences")
    write_preferences(own_run / "03-collect/preferences/part-00000.parquet", [pair])
    problems = own_run / "05-evaluate/problems.json"
    write_json(problems, [{**row, "prompt": evil, "answer": evil} for row in read_json(problems)])
    evaluation = of_a_stage(own_run / "05-evaluate").evaluation
    first, *others = evaluation.policies
    subsets = {HOSTILE: first.accuracy}
    first = replace(first, label=HOSTILE, verdicts={HOSTILE: 3, "correct": 1}, subsets=subsets)
    change(own_run, "evaluate", evaluation=replace(evaluation, policies=[first, *others]))
    change(own_run, "collect", counts={HOSTILE: 3}, warnings=[Warned("any", HOSTILE)])
    content = read_json(own_run / "config.json")
    config = {**content["config"], "name": HOSTILE, HOSTILE: HOSTILE}
    write_json(own_run / "config.json", {**content, "config": config})
    (own_run / f"06-{'<img src=x onerror=alert(2)>'}").mkdir()
    with Tracker(own_run, tensorboard=False) as tracker:
        for step in (1, 2):
            tracker.log(
                "<img src=x onerror=alert(2)>",
                step,
                {HOSTILE: 0.5 * step, "entropy": 0.5},
                kind="other",
            )
            tracker.log("warmup", 10 + step, {HOSTILE: 0.5})
    # the parser refuses elements and attributes that reports do not use themselves
    page = read(own_run)
    assert (
        "</script><script>alert(1)</script>" in page.text
        and "</pre></article><img src=x" in page.text
    )
    assert "\\u202e" in page.text and "\\x1b" in page.text and "\\x00" in page.text
    assert "characters left out …]" in page.text and len(page.source) < 4_000_000
    for char in STEERING:
        assert char not in page.source, hex(ord(char))
    lines = (own_run / "report.md").read_text("utf-8")
    assert not re.search(r"(?<!\\)<", lines) and not set(STEERING) & set(lines)
    cells = [
        cell
        for row in csv.reader((own_run / "report.csv").read_text("utf-8").splitlines())
        for cell in row[:5]
    ]
    assert not any(cell.lstrip().startswith(("=", "+", "-", "@")) for cell in cells)


@pytest.mark.parametrize("missing", ["03-collect", "0*/manifest.json"])
def test_any_part_may_be_missing(read, own_run, missing):
    """A stage, what was logged, and any artefact of all stages."""
    for path in own_run.glob(missing):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    page = read(own_run)
    assert "settings" in page.sections
    unfinished = re.search(
        r"not finished: sft[\w ]*, warmup[\w ]*, collect[\w ]*, dpo[\w ]*, evaluate", page.text
    )
    assert bool(unfinished) == missing.endswith("manifest.json")
    assert missing[:1] != "0" or "*" in missing or f"not begun: {missing[3:]}" in page.text


def test_a_run_that_has_only_begun(read, tmp_path):
    config = {"name": "young", "stages": {"sft": {"kind": "sft"}, "dpo": {"kind": "offline"}}}
    write_json(tmp_path / "config.json", {"config": config})
    (tmp_path / "01-sft").mkdir()
    page = read(tmp_path)
    assert "No stage of this run evaluates a policy." in page.text and page.sections == ["settings"]
    assert (
        "This run stopped before its end (not finished: sft; not begun: dpo). No process works on "
        "it: the same command" in page.text
    )
    assert "script" not in page.tags and "script-src 'none'" in page.source


def test_what_is_no_work_directory_is_refused_and_damage_names_the_file(tmp_path, own_run):
    with pytest.raises(ValueError, match="holds no run"):
        read_run(tmp_path / "run" / "metrics")
    with pytest.raises(
        ValueError, match=r"gone holds no run \(there is no such folder\): give the work directory"
    ):
        read_run(tmp_path / "gone")
    (own_run / "05-evaluate/rollouts/dpo.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(ValueError, match=r"dpo\.parquet is damaged"):
        write_run(read_run(own_run))


def test_what_a_run_returns_has_its_manifests_accuracies_and_policies(finished, report_of):
    result, (folder, _) = Result(finished), report_of
    assert list(result) == ["sft", "warmup", "collect", "dpo", "evaluate"] and len(result) == 5
    assert result["dpo"] == of_a_stage(finished / "04-dpo")
    evaluated = result["evaluate"].evaluation.by_name
    assert result.accuracies["accuracy"].to_dict() == {
        name: policy.accuracy.mean for name, policy in evaluated.items()
    }
    assert result.accuracies.loc["dpo", "greedy"] == evaluated["dpo"].greedy
    assert result.policies["warmup"] == finished / "02-warmup/checkpoints/3"
    assert list(result.policies) == ["sft", "warmup", "dpo"]
    assert result.report == finished / "report.html"
    shown = Result(folder)._repr_html_()
    page = Page(
        unescape(re.fullmatch(r'<iframe srcdoc="([^"]*)" sandbox [^<>]*></iframe>', shown)[1])
    )
    assert (
        page.sections == ["results", "curves"]
        and page.table("answers each")[0]["policy"] == "cold (sft)"
    )


def test_a_run_that_has_begun_has_a_result_too(own_run):
    (own_run / "05-evaluate/manifest.json").unlink()
    (own_run / "report.html").unlink(missing_ok=True)
    result = Result(own_run)
    assert (
        "evaluate" not in result
        and result.accuracies.empty
        and result.report is None
        and result.policies == {}
    )
    assert repr(result) == f"Result('{own_run}': sft, warmup, collect, dpo)"
