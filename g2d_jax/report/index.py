"""The index of a folder of runs and studies: index.html."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from etils import epath

from g2d_jax.report import run as run_report
from g2d_jax.report import study as study_report
from g2d_jax.report.headlines import run_headline, study_headline
from g2d_jax.report.page import Entries, Entry, Report, html
from g2d_jax.report.read import read_run, read_study, studies
from g2d_jax.report.verdict import run_verdict, study_verdict
from g2d_jax.runtime import storage
from g2d_jax.workdir import absolute, stage_folders

FILE = "index.html"

MARK = b": G2D index</title>"
"""Bytes of every index that was written here."""


def write_index(folder: storage.PathLike) -> str:
    """Write index.html into a folder: what each of its runs and studies says first, with a link to
    its page where that is written. Returns its path.

    The studies are those of the folder itself and of folders in it; its runs are the work
    directories in it. One that cannot be read is listed with the reason. Raises ValueError if there
    is none, or if the folder has an index.html that is not of G2D.
    """
    root = absolute(folder)
    page = root / FILE
    if page.exists() and MARK not in storage.read_bytes(page):
        raise ValueError(
            f"{page} is not an index of g2d report, and is left as it is: move it, or g2d report "
            "each run by itself"
        )
    entries = list(_entries(root))
    if not entries:
        raise ValueError(f"{root} holds neither runs nor studies")
    count = len(entries)
    report = Report(
        kind="index",
        name=root.name,
        eyebrow=f"G2D · {count} run{'s' * (count != 1)} and studies",
        headline="",
        warnings=[],
        parts={"pages": [Entries(entries)]},
    )
    # Names of folders need not be UTF-8.
    storage.write_bytes(page, html(report).encode(errors="replace"))
    return str(page)


def holds_several(folder: storage.PathLike) -> bool:
    """Tell whether a folder is no work directory of a run, but holds some, or studies."""
    root = absolute(folder)
    if not root.is_dir() or (root / "config.json").exists():
        return False
    return bool(studies(root)) or any(map(_is_ours, root.iterdir()))


def _is_ours(folder: epath.Path) -> bool:
    """Whether a folder is a work directory of a run, or of studies; not one that is hidden, or that
    may not be read."""
    if folder.name.startswith("."):
        return False
    try:
        return folder.is_dir() and (_is_run(folder) or bool(studies(folder)))
    except PermissionError:
        return False


def _is_run(folder: epath.Path) -> bool:
    """Whether a folder is a work directory: a model's has a config.json too."""
    file = folder / "config.json"
    if not file.exists():
        return False
    try:
        content = storage.read_json(file)
    except ValueError:
        return bool(stage_folders(folder))  # ours, and damaged
    return isinstance(content, dict) and isinstance(content.get("config"), dict)


def _entries(root: epath.Path) -> Iterator[Entry]:
    yield from _studies(root, "")
    for folder in sorted(filter(_is_ours, root.iterdir())):
        yield from _studies(folder, f"{folder.name}/")
        if _is_run(folder):
            yield _run(folder)


def _studies(root: epath.Path, place: str) -> Iterator[Entry]:
    """Yield the studies of a folder. place: of the folder below the index."""
    for name in studies(root):
        page = root / f"{name}.html"
        try:
            study = read_study(root, name)
            said = [study_verdict(study) or study_headline(study), study_report.state(study)]
            eyebrow = study_report.eyebrow(study)
        except (ValueError, OSError) as error:
            eyebrow, said = "G2D study", [_unreadable(error)]
        yield _entry(f"{place}{name}", place, page, eyebrow, said)


def _run(folder: epath.Path) -> Entry:
    page = folder / "report.html"
    try:
        run = read_run(folder, lenient=True)
        said = [run_verdict(run) or run_headline(run.latest), run_report.state(run)]
        eyebrow = run_report.eyebrow(run)
    except (ValueError, OSError) as error:
        eyebrow, said = "G2D report", [_unreadable(error)]
    return _entry(folder.name, f"{folder.name}/", page, eyebrow, said)


def _unreadable(error: Exception) -> str:
    return f"It cannot be read: {error}"


def _entry(name: str, place: str, page: epath.Path, eyebrow: str, said: Sequence[str]) -> Entry:
    """place: of the page's folder below the index."""
    text = " ".join(filter(None, said))
    if page.exists():
        return Entry(name, f"{place}{page.name}", eyebrow, text)
    return Entry(name, "", f"{eyebrow} · no page yet: g2d report {page.parent}", text)
