"""The report of a run: what it shows is what was measured, hostile text stays text, and parts may
be missing."""

import base64
import csv
import dataclasses
import hashlib
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from overlaps import charts, overlaps
from reports import HOSTILE, STEERING, Page

from g2d_jax.records import Preference
from g2d_jax.report import page as pages
from g2d_jax.report.curves import CURVES, FOLDED, name_of, others
from g2d_jax.report.markup import shown
from g2d_jax.report.page import SCRIPT, STYLE
from g2d_jax.report.read import read_run
from g2d_jax.report.result import Result
from g2d_jax.report.run import headline, logged_metrics, report, write_run
from g2d_jax.report.samples import PROBLEMS, Cell, Listing, Row, Sample, read_samples
from g2d_jax.runtime.storage import finish, read_json, write_json
from g2d_jax.runtime.storage import finished as of_a_stage
from g2d_jax.runtime.tables import (
    read_preferences,
    read_rollouts,
    write_preferences,
    write_rollouts,
)
from g2d_jax.runtime.tracking import Tracker

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
ROLLOUT = ("problem_id", "policy", "visit", "sample")


def change(folder: Path, stage: str, **fields) -> None:
    """Overwrite fields of a stage's manifest."""
    (file,) = folder.glob(f"*-{stage}/manifest.json")
    finish(file.parent, {**read_json(file), **fields})


def test_a_finished_run_has_everything_and_its_numbers(report_of):
    folder, page = report_of
    assert page.links == [
        "#results",
        "#compute",
        "#curves",
        "#informativeness",
        "#pairs",
        "#browser",
        "#settings",
    ]
    manifest = read_json(folder / "05-evaluate/manifest.json")["result"]
    for row, policy in zip(
        page.table("Accuracy on 16 problems, 2 answers each"), manifest["policies"], strict=True
    ):
        assert (
            row["pass@1 %"] == f"{100 * policy['mean']:.1f} ± {100 * policy['sem_clustered']:.1f}"
        )
        assert row["pass@2 %"] == f"{100 * policy['pass_at']['2']:.1f}"
        # Student's t of 16 problems
        mean, half = (
            100 * policy["mean"],
            100 * 2.13145 * policy["sem_clustered"],
        )
        assert f"{mean:.4g} ({mean - half:.4g} to {mean + half:.4g})" in page.source
    assert "Bars: 95 %, over problems only; another seed is not in them." in page.text
    assert "another seed of training is not in them" in page.text
    shares = page.table("Answers that are not right, by verdict, %")
    for row, policy in zip(shares, manifest["policies"], strict=True):
        assert (
            row["incorrect"] == f"{100 * policy['verdicts']['incorrect'] / 32:.1f}"
            and "correct" not in row
        )
    costs = {row["stage"]: row for row in page.table("Compute of each finished stage")}
    assert list(costs) == ["sft", "warmup", "collect", "dpo", "evaluate", "all stages"]
    assert page.table("Rollouts of each policy")[0]["policy"] == "warm-up"
    prompts = {
        row["count"]: row["collect"] for row in page.table("What became of the prompts of collect")
    }
    assert prompts["prompts"] == "8" and prompts["rollouts"] == "32"
    moved = {
        row["measure"]: row for row in page.table("The pairs under the policy before and after dpo")
    }
    before = read_json(folder / "04-dpo/manifest.json")["result"]["before"]
    assert (
        moved["gap in log-prob, chosen − rejected, nats"]["before"] == f"{before['gap_mean']:.2f}"
    )
    assert moved["pairs ranked right %"]["before"] == f"{100 * before['frac_ranked']:.1f}"
    assert (
        not re.search(r"p10|gap_|_mean\b", " ".join(page.tables)) and "under way" not in page.text
    )
    assert "config tiny · seed 0" in page.text and '"name": "tiny"' in page.text


def test_no_number_is_shown_twice(report_of):
    """One table a subject, one figure a metric."""
    _, page = report_of
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", page.source)
    assert (
        len(captions) == len(set(captions))
        and sum("Accuracy (pass@1)" in caption for caption in captions) == 1
    )
    assert page.tags.count("caption") == len(page.tables)


def test_it_is_one_file_that_asks_for_nothing_and_styles_nothing_itself(report_of):
    _, page = report_of
    assert all(link.startswith("#") for link in page.links)
    assert not re.search(r"@import|https?://|url\((?!#)", page.source)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page.source)[1]
    digests = [
        base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
        for part in (STYLE, SCRIPT)
    ]
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{digests[0]}'; img-src data:; base-uri 'none'; "
        "form-action 'none'; "
        f"script-src 'sha256-{digests[1]}'"
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
    paths = [Path(path) for path in write_run(folder)]
    assert [path.name for path in paths] == ["report.html", "report.md", "report.csv"]
    files = [*paths, *sorted((folder / "figures").iterdir())]
    before = [file.read_bytes() for file in files]
    write_run(folder)
    assert [file.read_bytes() for file in files] == before
    names = {file.name for file in files}
    assert {
        "report-accuracy.svg",
        "report-accuracy.pdf",
        "report-reward.svg",
        "report-token-entropy.pdf",
    } <= names
    assert all(file.read_bytes().startswith(b"%PDF") for file in files if file.suffix == ".pdf")
    shutil.rmtree(folder / "figures")
    write_run(folder, figures=False)
    assert not (folder / "figures").exists()


def test_the_csv_has_every_figure_and_the_markdown_every_table(report_of):
    folder, page = report_of
    header, *rows = csv.reader((folder / "report.csv").read_text("utf-8").splitlines())
    assert header == ["stage", "policy", "measure", "value"]
    table = {tuple(row[:3]): float(row[3]) for row in rows}
    assert len(table) == len(rows)
    result = read_json(folder / "05-evaluate/manifest.json")["result"]
    assert table["evaluate", "dpo", "mean"] == result["policies"][2]["mean"]
    assert (
        table["evaluate", "dpo", "informativeness/ece"]
        == result["policies"][2]["informativeness"]["ece"]
    )
    pair = result["paired"][1]
    assert (
        table["evaluate", pair["after"], f"paired/{pair['before']}/greedy/sem"]
        == pair["greedy"]["sem"]
    )
    manifest = read_json(folder / "03-collect/manifest.json")
    assert table["collect", "", "counts/pairs"] == manifest["counts"]["pairs"]
    assert table["collect", "", "tokens/generated"] == manifest["tokens"]["generated"]
    assert ("sft", "", "started") not in table
    text = (folder / "report.md").read_text("utf-8")
    assert (
        text.startswith("# tiny\n\n")
        and headline(read_json(folder / "05-evaluate/manifest.json")) in text
    )
    for caption, (first, *_) in page.tables.items():
        if caption not in page.source.partition("<details>")[0] and "Programs" not in caption:
            continue
        line = f"| {' | '.join(first.values())} |"
        assert line in text.replace("\\", "") or caption.startswith(
            ("Programs", "Other", "Accuracy by")
        ), caption


def test_every_source_of_completions_is_listed(report_of):
    folder, page = report_of
    browser = page.source.partition('<section id="browser">')[2].partition("</section>")[0]
    evaluated, collected, pairs = browser.split("<div data-listing>")[1:]
    assert evaluated.count("<details data-row") == 16 and collected.count("<details data-row") == 8
    paired = {row.problem_id for row in read_preferences(folder / "03-collect/preferences")}
    assert pairs.count("<details data-row") == len(paired)
    names = re.findall(r'<option value="(\w*)">([^<]*)', evaluated)
    assert names[:4] == [("", "any"), ("0", "cold (sft)"), ("1", "warm-up"), ("2", "G2D (dpo)")]
    assert ("incorrect", "incorrect") in names
    (row, *_) = sorted(
        read_rollouts(folder / "05-evaluate/rollouts/dpo.parquet"),
        key=lambda row: (row.rollout.problem_id, row.rollout.sample),
    )
    assert f'<pre tabindex="0">{shown(row.text)}</pre>' in evaluated
    assert "Reference answer:" in evaluated and "confidence 0." in evaluated and "reward 1" in pairs


def test_of_many_problems_the_first_by_id_are_read_and_listed(own_run, read):
    parts = own_run / "03-collect/rollouts"
    row, *_ = read_rollouts(parts)
    ids = [f"{7 * i % 200:03}" for i in range(200)]
    rows = [
        dataclasses.replace(row, rollout=dataclasses.replace(row.rollout, problem_id=name))
        for name in ids
    ]
    shutil.rmtree(parts)
    for part in range(4):
        write_rollouts(parts / f"part-{part:05d}.parquet", rows[50 * part : 50 * part + 50])
    answers, total = read_samples(sorted(parts.iterdir()), ROLLOUT, {"150"})
    assert sorted(answers) == [f"{i:03}" for i in [*range(PROBLEMS), 150]] and total == 200
    assert (
        "60 of 200 problems, the first by problem id, which is a hash; 140 are left out."
        in read(own_run).text
    )


def test_a_list_stays_within_its_budget():
    rows = [
        Row(f"{i}", "", None, [Cell(0, "", [Sample("correct", "", "x" * 100_000)])])
        for i in range(40)
    ]
    parts = {"browser": [Listing("Many", "", [""], rows)]}
    source = pages.html(pages.Report("report", "Many", "", "", [], parts))
    count = source.count("<details data-row")
    assert 25 < count < 40 and len(source) < pages.BUDGET + 100_000
    assert (
        f"{40 - count} of them would make this page too large and are left out."
        in Page(source).text
    )


def test_without_the_tokenizer_the_page_says_why_problems_have_no_text(read, own_run):
    content = read_json(own_run / "config.json")
    write_json(
        own_run / "config.json",
        {**content, "config": {**content["config"], "tokenizer": {"path": "/nowhere/<t>"}}},
    )
    page = read(own_run)
    assert "Problems without a pair are shown by id, without their text:" in page.text
    assert "/nowhere/<" in page.text


def test_pairs_from_the_archive_of_the_warmup_have_their_rollouts(read, own_run):
    shutil.rmtree(own_run / "02-warmup/rollouts")
    (own_run / "03-collect/rollouts").rename(own_run / "02-warmup/rollouts")
    content = read_json(own_run / "config.json")
    assert "Rollouts, collect" not in read(own_run).text
    content["config"]["stages"]["collect"] |= {"rollouts": "archive", "policy": "warmup@10"}
    write_json(own_run / "config.json", content)
    assert "Rollouts, collect" in read(own_run).text


def test_hostile_text_everywhere_stays_text(read, own_run):
    evil, ids = HOSTILE + "<" * 100_000, np.arange(3, dtype=np.int32)
    pair = Preference(HOSTILE, evil, evil, evil, ids, ids, ids, 1.0, 0.0)
    shutil.rmtree(own_run / "03-collect/preferences")
    write_preferences(own_run / "03-collect/preferences/part-00000.parquet", [pair])
    problems = own_run / "05-evaluate/problems.json"
    write_json(problems, [{**row, "prompt": evil, "answer": evil} for row in read_json(problems)])
    result = read_json(own_run / "05-evaluate/manifest.json")["result"]
    result["policies"][0] |= {"label": HOSTILE, "verdicts": {HOSTILE: 3, "correct": 1}}
    result["policies"][0]["subsets"] = {HOSTILE: {"mean": 0.5, "problems": 2}}
    change(own_run, "evaluate", result=result)
    change(own_run, "collect", counts={HOSTILE: {HOSTILE: 3}}, warnings=[{"text": HOSTILE}])
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
        for cell in row[:3]
    ]
    assert not any(cell.lstrip().startswith(("=", "+", "-", "@")) for cell in cells)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_in_a_browser_the_filters_appear_and_hostile_text_does_nothing(tmp_path):
    """The policy lets the script run, and only it: without it the bar stays hidden."""
    rows = [
        Row(f"{HOSTILE} {i}", HOSTILE, HOSTILE, [Cell(0, HOSTILE, [Sample("correct", "", [])])])
        for i in range(3)
    ]
    parts = {"browser": [Listing("List", "", [HOSTILE], rows, "")]}
    source = pages.html(pages.Report("report", "Safe", "", "", [], parts))
    path = tmp_path / "page.html"
    path.write_text(
        source.replace("</body>", '<script>document.title = "broken"</script></body>'),
        encoding="utf-8",
    )
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}/profile",
    ]
    done = subprocess.run(
        [*command, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=120
    )
    assert "3 of 3 problems, 3 completions</output>" in done.stdout
    assert re.search(r'data-control="bar"[^>]*>', done.stdout)[0].count("hidden") == 0
    assert "<title>Safe: G2D report</title>" in done.stdout


@pytest.mark.parametrize("missing", ["03-collect", "metrics", "0*/manifest.json", "0*/rollouts"])
def test_any_part_may_be_missing(read, own_run, missing):
    """A stage, what was logged, and any artefact of all stages."""
    for path in own_run.glob(missing):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    page = read(own_run)
    assert "#settings" in page.links
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
    assert "No policy has been evaluated yet." in page.text and page.links == ["#settings"]
    assert (
        "This run stopped before its end (not finished: sft; not begun: dpo). No process works on "
        "it: the same command" in page.text
    )
    assert "script" not in page.tags and "script-src" not in page.source


def test_what_is_no_work_directory_is_refused_and_damage_names_the_file(tmp_path, own_run):
    with pytest.raises(ValueError, match="holds no run"):
        write_run(tmp_path / "run" / "metrics")
    with pytest.raises(
        ValueError, match=r"gone holds no run \(there is no such folder\): give the work directory"
    ):
        write_run(tmp_path / "gone")
    (own_run / "05-evaluate/rollouts/dpo.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(ValueError, match=r"dpo\.parquet is damaged"):
        write_run(own_run)


def test_stages_are_in_the_order_of_their_numbers_and_conversations_have_roles(
    read, tmp_path, own_run
):
    for name in ("10-dpo", "9-collect", "2-warmup"):
        finish(
            tmp_path / "other" / name, {"kind": "x", "name": name.partition("-")[2], "seconds": 1}
        )
    rows = read(tmp_path / "other").table("Compute of each finished stage")
    assert [row["stage"] for row in rows] == ["warmup", "collect", "dpo", "all stages"]
    problems = own_run / "05-evaluate/problems.json"
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "8-4+2 <b>"}]
    write_json(problems, [{**row, "prompt": prompt} for row in read_json(problems)])
    assert "system: Be brief. user: 8-4+2 <b>" in read(own_run).text


def test_curves_are_of_what_was_logged_side_by_side_with_fresh_samples(tmp_path, read):
    stages = {"plain": {"kind": "online"}, "train": {"kind": "online", "loss": "dpo"}}
    write_json(tmp_path / "config.json", {"config": {"name": "made", "seed": 0, "stages": stages}})
    warned = "train, step 9: it has collapsed"
    counts = {"counts": {"steps": 20, "rollouts": 5120, "skipped": 0}}
    more = {"warnings": [{"text": warned}], "generation": {"calls": 4, "share": 0.5}}
    for number, name in enumerate(stages, 1):
        manifest = {
            "name": name,
            "kind": "online",
            "seconds": 1.0,
            **counts,
            **(more if name == "train" else {}),
        }
        finish(tmp_path / f"0{number}-{name}", manifest)
    with Tracker(tmp_path, tensorboard=False) as tracker:
        for step in range(1, 21):
            tracker.log(
                "plain",
                step,
                {"entropy": 0.4 - 0.01 * step, "mine/metric": 1.0, "goodput/training": 0.5},
            )
            tracker.log(
                "train",
                step,
                {"entropy": 0.3, "logps/chosen": -3.0, "logps/rejected": float("nan")},
            )
        for step in (0, 10, 20):
            tracker.log(
                "train",
                step,
                {"entropy": 0.4, "once": 1.0} if step == 0 else {"entropy": 0.2},
                kind="other",
            )
    page = read(tmp_path)
    assert page.source.index(f'<p class="warning">{warned}') < page.source.index("<section")
    words = {label for name, label in page.attributes if name == "aria-label" and label}
    (entropy,) = [label for label in words if label.startswith("Token entropy, nats")]
    assert "entropy in plain from 0.39 to 0.2 over 20 points" in entropy
    assert "entropy (other) in train from 0.4 to 0.2 over 3 points" in entropy
    assert "20 of 40 values are not finite and not drawn." in page.text
    assert any(label.startswith("mine: mine, metric in plain") for label in words)
    assert not any(label.startswith(("goodput", "once")) for label in words)
    counted = {
        row["count"]: (row["plain"], row["train"]) for row in page.table("What training did")
    }
    assert counted == {"steps": ("20", "20"), "rollouts": ("5,120", "5,120"), "generation, calls": ("–", "4"),
                       "generation, share": ("–", "0.50")}  # fmt: skip
    titles = [part.title for section in report(read_run(tmp_path)).sections for part in section.parts
              if isinstance(part, pages.Chart)]  # fmt: skip
    assert titles == [title for title in CURVES if title in titles]


def test_what_a_run_returns_has_its_manifests_accuracies_and_policies(finished, report_of):
    result, (folder, _) = Result(finished), report_of
    assert list(result) == ["sft", "warmup", "collect", "dpo", "evaluate"] and len(result) == 5
    assert result["dpo"] == of_a_stage(finished / "04-dpo")
    evaluated = {policy["name"]: policy for policy in result["evaluate"]["result"]["policies"]}
    assert result.accuracies["accuracy"].to_dict() == {
        name: policy["mean"] for name, policy in evaluated.items()
    }
    assert result.accuracies.loc["dpo", "greedy"] == evaluated["dpo"]["greedy"]
    assert result.policies["warmup"] == finished / "02-warmup/checkpoints/3"
    assert list(result.policies) == ["sft", "warmup", "dpo"]
    assert result.report == finished / "report.html"
    shown = Result(folder)._repr_html_()
    page = Page(
        unescape(re.fullmatch(r'<iframe srcdoc="([^"]*)" sandbox [^<>]*></iframe>', shown)[1])
    )
    assert (
        page.links == ["#results", "#curves"]
        and page.table("Accuracy on")[0]["policy"] == "cold (sft)"
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


def test_every_metric_that_is_drawn_has_a_name_in_words_and_no_text_covers_another(report_of):
    run = read_run(report_of[0])
    logged = logged_metrics(run)
    metrics = {metric for named in logged.values() for _, metric in named}
    assert metrics <= {name for names in (*CURVES.values(), *FOLDED.values()) for name in names}
    drawn = charts(report(run).shown_parts)
    assert len(drawn) > 20
    for chart in drawn:
        assert overlaps(chart) == [], chart.title
        for ax in chart.figure.axes:
            for name in ax.get_legend_handles_labels()[1]:
                assert not re.search(r"[a-z][_/][a-z]", name), name


def test_metrics_of_tasks_stand_in_one_figure_and_unknown_ones_keep_their_names():
    assert name_of("tasks/chat/reward") == ("Reward, by task", "chat")
    assert name_of("tasks/chat/completions/mean_length_correct") == (
        "Completion length, tokens, by task",
        "chat, right",
    )
    assert name_of("mine/hit_rate") == ("mine", "mine, hit rate")
    points = [(1, 0.5), (2, 0.25)]
    logged = {"a": {("train", f"tasks/{task}/reward"): points for task in ("chat", "maths")}}
    (chart,) = others(logged)
    assert chart.title == "Reward, by task"
    assert chart.words.startswith("chat in a from 0.5 to 0.25 over 2 points; maths in a")


def test_pass_rates_are_bars(report_of):
    (rates,) = [
        chart
        for chart in charts(report(read_run(report_of[0])).shown_parts)
        if "by pass rate" in chart.title
    ]
    heights = [bar.get_height() for bar in rates.figure.axes[0].patches]
    assert sum(heights) == pytest.approx(100) and not rates.figure.axes[0].lines


def test_only_prompts_always_or_never_answered_right_are_at_the_ends(own_run):
    (file,) = own_run.glob("*/informativeness/prompts.parquet")
    rates = [0.0, 1 / 64, 63 / 64, 1.0]
    pq.write_table(pa.table({"pass_rate": rates, "scored": [64] * 4}), file)
    parts = charts(report(read_run(own_run)).shown_parts)
    (chart,) = [chart for chart in parts if "by pass rate" in chart.title]
    heights = [bar.get_height() for bar in chart.figure.axes[0].patches]
    assert heights == [25, 25, *[0] * 7, 25, 25]
