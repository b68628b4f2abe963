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
from g2d_jax.workdir import absolute

FILE = "index.html"


def write_index(folder: storage.PathLike) -> str:
    """Write index.html into a folder: what each of its runs and studies says first, with a link to
    its page where that is written. Returns its path.

    The studies are those of the folder itself and of folders in it; its runs are the work
    directories in it. Raises ValueError if there is none, or one is damaged.
    """
    root = absolute(folder)
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
    storage.write_bytes(root / FILE, html(report).encode())
    return str(root / FILE)


def holds_several(folder: storage.PathLike) -> bool:
    """Tell whether a folder is no work directory of a run, but holds some, or studies."""
    root = absolute(folder)
    if not root.is_dir() or (root / "config.json").exists():
        return False
    return bool(studies(root)) or any(map(_is_ours, root.iterdir()))


def _is_ours(folder: epath.Path) -> bool:
    return folder.is_dir() and ((folder / "config.json").exists() or bool(studies(folder)))


def _entries(root: epath.Path) -> Iterator[Entry]:
    yield from _studies(root, "")
    for folder in sorted(filter(_is_ours, root.iterdir())):
        yield from _studies(folder, f"{folder.name}/")
        if (folder / "config.json").exists():
            yield _run(folder)


def _studies(root: epath.Path, place: str) -> Iterator[Entry]:
    """Yield the studies of a folder. place: of the folder below the index."""
    for name in studies(root):
        study = read_study(root, name)
        said = [study_verdict(study) or study_headline(study), study_report.state(study)]
        page = root / f"{name}.html"
        yield _entry(f"{place}{name}", place, page, study_report.eyebrow(study), said)


def _run(folder: epath.Path) -> Entry:
    run = read_run(folder, lenient=True)
    said = [run_verdict(run) or run_headline(run.latest), run_report.state(run)]
    page = folder / "report.html"
    return _entry(folder.name, f"{folder.name}/", page, run_report.eyebrow(run), said)


def _entry(name: str, place: str, page: epath.Path, eyebrow: str, said: Sequence[str]) -> Entry:
    """place: of the page's folder below the index."""
    text = " ".join(filter(None, said))
    if page.exists():
        return Entry(name, f"{place}{page.name}", eyebrow, text)
    return Entry(name, "", f"{eyebrow} · no page yet: g2d report {page.parent}", text)
