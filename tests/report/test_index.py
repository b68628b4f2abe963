"""The index of a folder of runs and studies: what it lists, what it leaves alone."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote_to_bytes

import pytest
from reports import HOSTILE, Page

from g2d_jax.report.index import holds_several, write_index
from g2d_jax.runtime.storage import write_json

SAFE_HOSTILE = HOSTILE.replace("/", "_").replace("\0", "")[:80]


def work_directory(folder: Path, *, is_reported: bool = True) -> Path:
    write_json(folder / "config.json", {"config": {"name": "mine", "stages": {}}})
    if is_reported:
        (folder / "report.html").write_text("a report")
    return folder


def test_an_index_lists_runs_and_no_other_folders(tmp_path: Path) -> None:
    work_directory(tmp_path / "a")
    work_directory(tmp_path / "b", is_reported=False)
    work_directory(tmp_path / ".trash")
    write_json(tmp_path / "model" / "config.json", {"model_type": "llama"})
    write_json(tmp_path / "list" / "config.json", [1])
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "config.json").write_text("{")
    (tmp_path / "file").write_text("x")
    assert holds_several(tmp_path)
    page = Page(Path(write_index(tmp_path)).read_text())
    assert [link for link in page.links if not link.startswith("#")] == ["./a/report.html"]
    assert "no page yet: g2d report" in page.text
    assert "2 runs and studies" in page.text


def test_a_damaged_run_is_listed_with_the_reason(tmp_path: Path) -> None:
    work_directory(tmp_path / "good")
    damaged = work_directory(tmp_path / "damaged")
    (damaged / "01-sft").mkdir()
    (damaged / "config.json").write_text("{")
    text = Page(Path(write_index(tmp_path)).read_text()).text
    assert "good" in text and "It cannot be read" in text and "config.json" in text


def test_no_name_leads_elsewhere(tmp_path: Path) -> None:
    for name in ("javascript:alert(1)", "a#b?c %41", SAFE_HOSTILE, "not UTF-8: \udcff"):
        work_directory(tmp_path / name)
    page = Page(Path(write_index(tmp_path)).read_text())
    links = [link for link in page.links if not link.startswith("#")]
    assert len(links) == 4
    for link in links:
        assert link.startswith("./") and (tmp_path / os.fsdecode(unquote_to_bytes(link))).exists()


def test_an_index_of_others_is_left_as_it_is(tmp_path: Path) -> None:
    work_directory(tmp_path / "a")
    index = tmp_path / "index.html"
    index.write_text("my own page")
    with pytest.raises(ValueError, match="is not an index of g2d report"):
        write_index(tmp_path)
    assert index.read_text() == "my own page"
    index.unlink()
    assert write_index(tmp_path) == write_index(tmp_path)


def test_a_folder_of_others_holds_none(tmp_path: Path) -> None:
    write_json(tmp_path / "model" / "config.json", {"model_type": "llama"})
    assert not holds_several(tmp_path)
    with pytest.raises(ValueError, match="holds neither runs nor studies"):
        write_index(tmp_path)
