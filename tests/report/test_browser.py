"""The browser of rollouts: which are listed, how they are filtered, and that hostile text stays text."""

import base64
import hashlib
import re
import shutil
import subprocess

import numpy as np
import pytest

from g2d_jax.records import Preference, Verdict
from g2d_jax.report.browser import PROBLEMS, first_problems
from g2d_jax.report.listing import BUDGET, Row, cell, listing, sample
from g2d_jax.report.page import SCRIPT, Report, Section, html
from g2d_jax.storage import read_json, write_json
from g2d_jax.tables import write_preferences, write_rollouts

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def section(source: str) -> str:
    """The browser's part of a page."""
    return source[source.index('<section id="browser">') : source.index('<section id="settings">')]


def test_every_source_is_listed(read, finished_run):
    source, page, text = read(finished_run)
    for words in (
        "Held-out problems, evaluate 48 of 48 problems. Of each the first 4 samples.",
        "Rollouts, collect 60 of 60 problems",
        "Chosen and rejected, collect 60 of 60 problems with pairs. Of each the first 4 pairs.",
        "Probability of a token: 0.9 or more 0.5 to 0.9 0.2 to 0.5 0.05 to 0.2 less than 0.05",
        "Reference answer: 6",
    ):
        assert words in text, words
    assert section(source).count("<details data-row") == 48 + 60 + 60
    assert {("data-policy", "2"), ("data-verdict", "no_answer"), ("hidden", None)} <= set(page.attributes)
    names = re.findall(r'<option value="(\w*)">([^<]*)', section(source))
    assert names[:4] == [("", "any"), ("0", "cold (sft)"), ("1", "warm-up"), ("2", "G2D (dpo)")]
    assert ("no_answer", "no answer") in names


def test_tokens_of_rollouts_and_pairs_are_coloured(read, finished_run):
    listed = section(read(finished_run)[0])
    evaluated, collected, pairs = listed.split("<h3>")[1:]
    for part in (evaluated, collected, pairs):
        assert 'title="p = 0.3">' in part and 'class="p4"' in part and "&lt;eos&gt;" in part
    assert pairs.count('class="tokens"') == 120
    assert evaluated.count('class="tokens"') == 3 * 48 * 4 - 7  # of the hostile ones the tokens do not spell the text


def test_the_only_script_is_the_one_allowed(read, finished_run):
    source, page, _ = read(finished_run)  # compares the script with SCRIPT
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', source)[1]
    assert policy.endswith(f"; script-src 'sha256-{digest}'") and "unsafe" not in policy
    assert page.tags.count("script") == 1
    assert not re.search(r"innerHTML|eval|document\.write|Function|setAttribute|</", SCRIPT)
    assert not [name for name, _ in page.attributes if name.startswith("on")]


def test_a_page_without_lists_has_no_script(read, fresh_run):
    shutil.rmtree(fresh_run / "05-evaluate")
    shutil.rmtree(fresh_run / "03-collect")
    source, page, _ = read(fresh_run)
    assert "script" not in page.tags and "script-src" not in source


def test_of_many_problems_the_first_by_id_are_listed(read, fresh_run, make_rollout):
    rows = [make_rollout(f"{(7 * i) % 200:016x}", 0, "8-4=4;", Verdict.CORRECT, "warmup") for i in range(200)]
    for part in range(4):
        path = fresh_run / "03-collect" / "rollouts" / f"part-{part:05d}.parquet"
        write_rollouts(path, rows[50 * part : 50 * part + 50])
    answers, total = first_problems(sorted((fresh_run / "03-collect" / "rollouts").iterdir()), {f"{150:016x}"})
    assert sorted(answers) == [f"{i:016x}" for i in [*range(PROBLEMS), 150]] and total == 200
    _, _, text = read(fresh_run)
    assert "60 of 200 problems, the first by problem id, which is a hash; 140 are left out." in text


def test_a_list_stays_within_its_budget():
    rows = [Row(f"{i}", "", None, ["x" * 100_000]) for i in range(40)]
    markup = listing("Many", "All 40 problems.", rows)
    assert len(markup) < BUDGET + 5_000
    kept = markup.count("<details data-row")
    assert 25 < kept < 40 and f"{40 - kept} of them would make this page too large and are left out." in markup
    assert listing("None", "", []) == ""


@pytest.mark.parametrize("config", [{"model": {"path": "/nowhere/<model>"}}, {"tokenizer": {"path": "/nowhere/<t>"}}])
def test_without_the_tokenizer_text_is_plain_and_the_page_says_why(read, fresh_run, config):
    content = read_json(fresh_run / "config.json")
    write_json(fresh_run / "config.json", {"config": {**content["config"], **config}})
    source, _, text = read(fresh_run)
    assert "Completions are shown without colours: the run's tokenizer is not to be had here." in text
    assert "/nowhere/<" in text and 'class="tokens"' not in source
    assert "8-4=4;4+2=6;\\boxed{6}" in section(source)


def test_pairs_without_rollouts_are_plain(read, fresh_run):
    shutil.rmtree(fresh_run / "03-collect" / "rollouts")
    source, _, _ = read(fresh_run)
    pairs = section(source).split("<h3>")[-1]
    assert "Chosen and rejected" in pairs and 'class="tokens"' not in pairs


def test_pairs_from_the_archive_of_the_warmup(read, fresh_run):
    (fresh_run / "03-collect" / "rollouts").rename(fresh_run / "02-warmup" / "rollouts")
    content = read_json(fresh_run / "config.json")["config"]
    content["stages"]["collect"] |= {"rollouts": "archive", "policy": "warmup@10"}
    write_json(fresh_run / "config.json", {"config": content})
    source, _, _ = read(fresh_run)
    assert section(source).split("<h3>")[-1].count('class="tokens"') == 120


def test_a_manifest_says_where_completions_are(read, fresh_run):
    (fresh_run / "05-evaluate" / "rollouts").rename(fresh_run / "elsewhere")
    manifest = read_json(fresh_run / "05-evaluate" / "manifest.json")
    for entry in manifest["result"]["policies"]:
        entry["rollouts"] = f"../elsewhere/{entry['name']}.parquet"
    write_json(fresh_run / "05-evaluate" / "manifest.json", manifest)
    assert "Held-out problems, evaluate" in read(fresh_run)[0]


def test_hostile_text_everywhere(read, fresh_run, hostile):
    evil = hostile + "<" * 100_000
    ids = np.arange(3, dtype=np.int32)
    write_preferences(
        fresh_run / "03-collect" / "preferences" / "00000.parquet",
        [Preference(hostile, evil, evil, evil, ids, ids, ids, 1.0, 0.0)],
    )
    path = fresh_run / "05-evaluate" / "problems.json"
    write_json(path, [{**row, "prompt": evil, "answer": evil} for row in read_json(path)])
    manifest = read_json(fresh_run / "05-evaluate" / "manifest.json")
    manifest["result"]["policies"][0]["label"] = hostile
    write_json(fresh_run / "05-evaluate" / "manifest.json", manifest)
    source, page, text = read(fresh_run)  # refuses elements and attributes of any other kind
    for char in "\u202e\u2066\u200b\ufeff\u2028\0\x1b\r\x85\x7f":
        assert char not in source, hex(ord(char))
    assert "characters left out …]" in text and len(section(source)) < 1_000_000
    assert page.tags.count("script") == 1 and page.tags.count("main") == 1


def test_lone_surrogates_and_quotes_in_a_list():
    evil = "\"><img src=x onerror=alert(1)> ' \ud800"
    markup = listing(evil, evil, [Row(evil, evil, evil, [cell(0, evil, [sample("", "", "")])])], policies=[evil, evil])
    assert "<img" not in markup and '"><img' not in markup and "\\ud800" in markup
    markup.encode()


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_in_a_browser_the_filters_appear_and_hostile_text_does_nothing(tmp_path, hostile):
    """The policy lets the script run, and only it: without it the bar stays hidden."""
    rows = [Row(f"{hostile} {i}", hostile, hostile, [cell(0, hostile, [sample("correct", "", "")])]) for i in range(3)]
    body = f'<section id="x">{listing("List", "", rows)}</section><script>document.title = "broken"</script>'
    path = tmp_path / "page.html"
    path.write_text(html(Report("report", "Safe", "", "", [], [Section("x", "X", [body])])), encoding="utf-8")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    shown = subprocess.run([*command, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=120).stdout
    assert "3 of 3 problems, 3 completions</output>" in shown
    assert re.search(r'data-control="bar"[^>]*>', shown)[0].count("hidden") == 0
    assert "<title>Safe: G2D report</title>" in shown
