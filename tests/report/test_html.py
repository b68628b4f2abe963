"""report.html: complete, self-contained, safe against what models write, and useful before a run is finished."""

import base64
import hashlib
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from g2d_jax.records import Preference
from g2d_jax.report import write_all
from g2d_jax.report.markup import preformatted, shorten, shown, table
from g2d_jax.storage import read_json, write_json
from g2d_jax.tables import write_preferences


def test_a_finished_run_has_everything(read, finished_run):
    _, page, text = read(finished_run)
    assert re.findall("#([a-z]+)", " ".join(page.links)) == [
        "results",
        "compute",
        "curves",
        "informativeness",
        "pairs",
        "browser",
        "settings",
    ]
    policy = read_json(finished_run / "05-evaluate" / "manifest.json")["result"]["policies"][2]
    assert f"{100 * policy['mean']:.1f} ± {100 * policy['sem_clustered']:.1f}" in text
    for words in (
        "config demo · seed 0",
        "G2D (dpo)",
        "collect + dpo",
        "pass@4 %",
        "1 min 24 s",  # of sft
        "Paired differences",
        "Accuracy by subset",
        "Token entropy, nats",
        "Log-probability of completions, nats",
        "dropped, all correct",
        "Length of 60 pairs",
        "Reference answer: 6",
        "rewards/rejected",
        "random correct with random incorrect",
        '"jax": "0.10.2"',
    ):
        assert words in text, words
    assert "under way" not in text


def test_it_is_one_file_that_asks_for_nothing(read, finished_run):
    source, page, _ = read(finished_run)
    assert all(link.startswith("#") for link in page.links)
    assert not re.search(r"url\(|@import|https?://", source)
    style = re.search(r"<style>(.*?)</style>", source, re.S)[1]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', source)[1]
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:")
    assert source.index("Content-Security-Policy") < source.index("<style>")
    assert source.startswith('<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">')
    assert "prefers-color-scheme: dark" in style and "viewport" in source


def test_the_same_run_gives_the_same_bytes(finished_run):
    first = Path(write_all(finished_run)[0]).read_bytes()
    assert Path(write_all(finished_run)[0]).read_bytes() == first


def test_hostile_completions_stay_text(read, fresh_run, hostile):
    ids = np.arange(3, dtype=np.int32)
    pair = Preference(hostile, hostile, hostile, hostile, ids, ids, ids, 1.0, 0.0)
    write_preferences(fresh_run / "03-collect" / "preferences" / "00000.parquet", [pair])
    source, page, text = read(fresh_run)  # Page refuses elements and attributes that the report does not use itself
    assert "</script><script>alert(1)</script>" in text
    assert "</pre></article><img src=x onerror=alert(2)>" in text
    assert "\\u202e" in text and "\\x1b" in text and "\\x00" in text
    for char in "\u202e\u2066\u200b\ufeff\u2028\0\x1b\r\x85\x7f":
        assert char not in source, hex(ord(char))
    assert page.tags.count("main") == 1


def test_hostile_names_and_settings_stay_text(read, fresh_run):
    evil = "</title><script>x</script>\u202e\"'&"
    write_json(fresh_run / "config.json", {"config": {"name": evil, "stages": {}, evil: evil}})
    manifest = read_json(fresh_run / "05-evaluate" / "manifest.json")
    manifest["result"]["policies"][0]["label"] = evil
    manifest["result"]["policies"][0]["verdicts"] = {evil: 3, "correct": 1}
    manifest["result"]["policies"][0]["subsets"] = {evil: {"mean": 0.5, "problems": 2}}
    write_json(fresh_run / "05-evaluate" / "manifest.json", manifest)
    collect = read_json(fresh_run / "03-collect" / "manifest.json")
    write_json(fresh_run / "03-collect" / "manifest.json", {**collect, "counts": {evil: {evil: evil}}})
    _, _, text = read(fresh_run)
    assert "</title><script>x</script>" in text


@pytest.mark.parametrize(
    ("text", "markup"),
    [
        ("a<b & \"c\" 'd'", "a&lt;b &amp; &quot;c&quot; &#x27;d&#x27;"),
        ("line\n\tnext", "line\n\tnext"),
        ("\0", '<span class="escape" title="U+0000">\\x00</span>'),
        ("\u202e", '<span class="escape" title="U+202E">\\u202e</span>'),
        ("\U000e0041", '<span class="escape" title="U+E0041">\\U000e0041</span>'),
        ("\ud800", '<span class="escape" title="U+D800">\\ud800</span>'),
        ("é 数 🙂 √2", "é 数 🙂 √2"),
    ],
)
def test_shown(text, markup):
    assert shown(text) == markup
    assert "<span" not in shown(text, plain=True)


def test_long_text_says_what_is_left_out():
    assert shorten("abc", 3) == ("abc", 0)
    text, left_out = shorten("a" * 5000 + "END", 1000)
    assert left_out == 4003 and text.endswith("aEND")
    assert "[… 4,003 characters left out …]" in preformatted("a" * 5000 + "END", 1000)
    assert "(empty)" in preformatted("")


def test_tables_have_captions_and_heads():
    got = table("Title", ["stage", "count", "what"], [["a", "1,024", "x"], ["b", "–", "y"]])
    assert "<caption><span>Title</span></caption>" in got
    assert '<th scope="col" class="number">count</th><th scope="col">what</th>' in got
    assert got.count('<th scope="row">') == 2


def test_a_run_that_has_only_begun(read, tmp_path):
    config = {"name": "young", "stages": {"sft": {"kind": "sft"}, "dpo": {"kind": "offline"}}}
    write_json(tmp_path / "config.json", {"config": config})
    (tmp_path / "01-sft").mkdir()
    _, page, text = read(tmp_path)
    assert "No policy has been evaluated yet." in text
    assert "a run under way (not finished: sft; not begun: dpo)" in text
    assert page.links == ["#settings"]


@pytest.mark.parametrize("missing", ["01-sft", "02-warmup", "03-collect", "04-dpo", "05-evaluate", "metrics"])
def test_any_part_may_be_missing(read, fresh_run, missing):
    shutil.rmtree(fresh_run / missing)
    _, page, text = read(fresh_run)
    assert "#settings" in page.links
    if missing[0] == "0":
        assert f"not begun: {missing[3:]}" in text


@pytest.mark.parametrize("name", ["sft", "warmup", "collect", "dpo", "evaluate"])
def test_any_stage_may_be_unfinished(read, fresh_run, name):
    next(fresh_run.glob(f"*-{name}/manifest.json")).unlink()
    _, _, text = read(fresh_run)
    assert f"not finished: {name}" in text


@pytest.mark.parametrize("name", ["rollouts", "preferences", "problems.json"])
def test_any_artefact_may_be_missing(read, fresh_run, name):
    for path in fresh_run.glob(f"0*/{name}"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    read(fresh_run)


def test_a_finished_stage_without_details(read, fresh_run):
    for path in fresh_run.glob("0*/manifest.json"):
        manifest = read_json(path)
        write_json(path, {key: manifest[key] for key in ("done", "kind", "name")})
    _, _, text = read(fresh_run)
    assert "No policy has been evaluated yet." in text


def test_conversations_are_shown_with_their_roles(read, fresh_run):
    path = fresh_run / "05-evaluate" / "problems.json"
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "8-4+2 <b>"}]
    write_json(path, [{**row, "prompt": prompt} for row in read_json(path)])
    _, _, text = read(fresh_run)
    assert "system: Be brief. user: 8-4+2 <b>" in text


def test_stages_are_in_the_order_of_their_numbers(read, tmp_path):
    for name in ("10-dpo", "9-collect", "2-warmup"):
        write_json(
            tmp_path / name / "manifest.json", {"done": True, "kind": "x", "name": name.split("-")[1], "seconds": 1}
        )
    _, _, text = read(tmp_path)
    assert text.index("warmup") < text.index("collect") < text.index("dpo")


def test_what_is_no_work_directory_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no run"):
        write_all(tmp_path)
    with pytest.raises(ValueError, match=r"gone holds no run \(there is no such folder\): give the work directory"):
        write_all(tmp_path / "gone")
