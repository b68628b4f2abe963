"""A run that can be watched: the page and progress.json while it lives, and what is left of them
when it ends, well or badly."""

from __future__ import annotations

import io
import json
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from etils import epath
from forks import Forks
from reports import Page

from g2d_jax.config import Config
from g2d_jax.config.io import to_dict
from g2d_jax.recipes import config_load
from g2d_jax.report import live
from g2d_jax.report.live import samples_table, stages_table
from g2d_jax.report.page import Live, Report, html
from g2d_jax.report.progress import PROGRESS, StageState
from g2d_jax.runtime.storage import write_json
from g2d_jax.runtime.tracking import Samples, Screen, Tracker

TINY = Path(__file__).parents[1] / "tiny.py"

WATCH = '''
import shutil
import time
from pathlib import Path

def look(completions, **columns):
    """Keep what there is to see once the warm-up is under way: a reward is asked for in it."""
    work, seen = Path("{work}"), Path("{work}").with_name("seen")
    limit = time.monotonic() + 60
    while not seen.exists() and time.monotonic() < limit:
        time.sleep(0.1)
        try:
            told = (work / "progress.json").read_text()
        except FileNotFoundError:  # between two bars there is none
            continue
        if "warmup" in told:
            seen.mkdir()
            (seen / "progress.json").write_text(told)
            shutil.copy(work / "report.html", seen)
    return [float(len(text) % 2 == 0) for text in completions]

def fails(completions, **columns):
    if len(completions) < 9:  # as the run tries it before it begins
        return [0.0 for _ in completions]
    raise RuntimeError("the judge is <b>out</b>")
'''


def run(forks: Forks, folder: Path, reward: str, *more: str):
    (folder / "watch.py").write_text(WATCH.format(work=folder / "work"))
    config = shutil.copy(TINY, folder)
    settings = [f"--config.reward.function=watch:{reward}", *more]
    return forks.run("run", "--config", config, "--workdir", "work", *settings, cwd=folder)


@pytest.mark.slow
def test_a_run_is_followed_while_it_lives_and_its_page_says_how_it_ended(
    forks: Forks, tmp_path: Path
) -> None:
    done = run(forks, tmp_path, "look")
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "seen" / PROGRESS).read_text())
    assert told["stage"] == "warmup" and told["total"] == 3 and told["done"] < 3
    assert told["peak_memory_bytes"] > 1e8
    page = (tmp_path / "seen" / "report.html").read_text()
    assert "data-written=" in page and "location.reload()" in page
    stages = Page(page).table("Stages")
    assert [row["stage"] for row in stages] == ["sft", "warmup", "collect", "dpo", "evaluate"]
    assert re.search("Running: (warmup|sft), running", page)
    assert '<p class="warning">' not in page
    end = (tmp_path / "work" / "report.html").read_text()
    assert "data-written" not in end and "location.reload()" not in end
    assert "Running" not in end and not (tmp_path / "work" / PROGRESS).exists()
    assert re.search(r"evaluate 48/48  accuracy \d", done.stdout)
    # a warm-up of random numbers teaches nothing that can be told
    assert re.search(r"3 GRPO updates, then DPO: \d+\.\d .* on 16 problems", done.stdout)


class Slow:
    """A cell whose text is there when it may be: a page with it takes as long."""

    def __init__(self) -> None:
        self.asked, self.may = threading.Event(), threading.Event()

    def __str__(self) -> str:
        self.asked.set()
        self.may.wait(60)
        return "a cell that came late"


@pytest.fixture
def session(tmp_path: Path) -> Iterator[SimpleNamespace]:
    """What the follower asks of a session, of a run that is about to begin."""
    settings = config_load.resolve(str(TINY))
    write_json(tmp_path / "config.json", {"config": to_dict(settings)})
    with Tracker(tmp_path, tensorboard=False, screen=Screen(io.StringIO())) as tracker:
        yield SimpleNamespace(
            workdir=epath.Path(tmp_path), config=Config.of(settings), tracker=tracker
        )


def test_a_page_that_was_begun_before_the_end_does_not_take_the_last_ones_place(
    session: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "SHORTEST", 0.05)
    monkeypatch.setattr(live, "PAUSE", 0.01)
    slow = Slow()
    with pytest.raises(RuntimeError), live.followed(session):
        session.tracker.last_samples = Samples("warmup", 1, [{"prompt": slow}])
        assert slow.asked.wait(60)
        threading.Timer(0.3, slow.may.set).start()
        raise RuntimeError("the judge is out")
    assert slow.may.is_set()  # the end waited for the page
    page = (session.workdir / "report.html").read_text()
    assert "by an error: the judge is out" in page and "a cell that came late" not in page


def test_what_a_killed_run_told_is_not_told_of_the_one_that_goes_on(
    session: SimpleNamespace,
) -> None:
    told = session.workdir / PROGRESS
    stage = next(iter(session.config.stages))
    told.write_text(json.dumps({"stage": stage, "done": 3, "total": 10, "note": "loss 1"}))
    with live.followed(session):
        assert not told.exists()
        with session.tracker.progress(stage, 10) as bar:
            bar.update(4)
            limit = time.monotonic() + 60
            while not told.exists() and time.monotonic() < limit:
                time.sleep(0.05)
            assert json.loads(told.read_text())["done"] == 4
    assert not told.exists()


def test_ctrl_c_is_told_by_its_name(session: SimpleNamespace) -> None:
    with pytest.raises(KeyboardInterrupt), live.followed(session):
        raise KeyboardInterrupt
    page = (session.workdir / "report.html").read_text()
    assert "stopped before its end by Ctrl-C (" in page


@pytest.mark.slow
def test_a_run_that_fails_says_so_on_its_page_and_renews_it_no_more(
    forks: Forks, tmp_path: Path
) -> None:
    failed = run(forks, tmp_path, "fails")
    assert failed.returncode != 0
    page = (tmp_path / "work" / "report.html").read_text()
    assert "This run stopped before its end by an error (" in page
    assert (
        page.count("the judge is &lt;b&gt;out") == 1
        and "No process works on it: the same command" in page
    )
    assert "data-written" not in page and not (tmp_path / "work" / PROGRESS).exists()


HOSTILE = "<script>alert(1)</script>"


def test_a_page_under_way_shows_text_as_text_and_allows_its_scripts_alone() -> None:
    stage = StageState("warmup", "running 3 of 10", seconds=4.0, peak_bytes=2**30, note=HOSTILE)
    waiting = StageState("dpo", "waiting")
    rows = [{"prompt": HOSTILE, "completion": "x" * 1000, "verdict": "correct"}]
    now = [stages_table([stage, waiting]), samples_table(Samples("warmup", 3, rows))]
    report = Report("report", "mine", "", [], {"now": now}, live=Live(1e9, 30.0))
    page = html(report)
    assert HOSTILE not in page and page.count("&lt;script&gt;alert") == 2
    assert 'data-written="1000000000.0" data-every="30.0"' in page
    shown = Page(page)
    assert [row["host memory"] for row in shown.table("Stages")] == ["1.0 GiB", "–"]
    (sample,) = shown.table("Last completions: warmup, step 3")
    assert "600 characters left out" in sample["completion"]
