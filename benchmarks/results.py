"""Pack what a study measured, without weights and texts, into one small archive; unpack it to
report or to go on.

    python benchmarks/results.py pack runs/study benchmarks/results/study-demo.tar.xz --seeds 0,1,2
    python benchmarks/results.py pack runs/study cut.tar.xz --finished      # of each plan the seeds that are done
    python benchmarks/results.py unpack benchmarks/results/study-demo.tar.xz runs/study

Packed are the plans, the points, and of each of their finished stages the manifest, its settings,
and, of evaluations, each answer's verdict by problem. `g2d report runs/study` writes the same
tables and figures from it, and `g2d sweep … --seeds 3,4 --workdir runs/study` adds other seeds: a
seed that was packed cannot be continued, since its policies are not there, so only seeds that are
finished should be packed.
"""

from __future__ import annotations

import argparse
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

FILES = ("manifest.json", "stage.json", "problems.json")
COLUMNS = ["problem_id", "verdict"]


def finished(study: Path, points: list[dict[str, Any]]) -> set[int]:
    """Return the seeds of which every stage of every point is done."""
    seeds = {point["seed"] for point in points}
    for point in points:
        for stage in point["stages"].values():
            if not (study / "stages" / stage / "manifest.json").exists():
                seeds.discard(point["seed"])
    return seeds


def packed(
    study: Path, seeds: set[int] | None, *, only_finished: bool = False
) -> Iterator[tuple[str, bytes]]:
    """Give name and content of each file to pack. seeds: of the points, None for all.

    only_finished: leave out, of each plan, the seeds that are not; says which.
    """
    stages: set[str] = set()
    for plan in sorted((study / "sweeps").glob("*.json")):
        content = json.loads(plan.read_text())
        points = [point for point in content["points"] if seeds is None or point["seed"] in seeds]
        if only_finished:
            done = finished(study, points)
            left_out = sorted({point["seed"] for point in points} - done)
            print(f"{plan.stem}: seeds {sorted(done)} are packed, {left_out} are not finished")
            points = [point for point in points if point["seed"] in done]
        if not points:
            continue
        yield f"sweeps/{plan.name}", json.dumps({**content, "points": points}, indent=1).encode()
        for point in points:
            folder = study / "points" / plan.stem / point["label"]
            files = filter(Path.is_file, folder.iterdir())
            for file in sorted(files):
                yield str(file.relative_to(study)), file.read_bytes()
            stages |= set(point["stages"].values())
    for stage in sorted(stages):
        yield from _stage(study, study / "stages" / stage)


def _stage(study: Path, folder: Path) -> Iterator[tuple[str, bytes]]:
    if not (folder / "manifest.json").exists():
        raise SystemExit(f"{folder.name} is not finished: pack the seeds that are, by --seeds")
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in FILES:
        if (folder / name).exists():
            yield str((folder / name).relative_to(study)), (folder / name).read_bytes()
    for policy in manifest.get("result", {}).get("policies", []):
        file = (folder / policy["rollouts"]).resolve()
        with io.BytesIO() as buffer:
            pq.write_table(pq.read_table(file, columns=COLUMNS), buffer, compression="none")
            yield str(file.relative_to(study.resolve())), buffer.getvalue()


def pack(
    study: Path, archive: Path, seeds: set[int] | None, *, only_finished: bool = False
) -> None:
    """Write the archive; the same study gives the same bytes. Arguments: see `packed`."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    files = dict(packed(study, seeds, only_finished=only_finished))
    if not files:
        raise SystemExit(f"{study} has nothing to pack: no plan, or no seed that was asked for")
    with tarfile.open(archive, "w:xz", preset=9) as tar:
        for name in sorted(files):
            entry = tarfile.TarInfo(name)
            entry.size = len(files[name])
            tar.addfile(entry, io.BytesIO(files[name]))
    print(f"{archive}: {len(files):,} files, {archive.stat().st_size / 1e6:.2f} MB")


def unpack(archive: Path, study: Path) -> None:
    """Write what the archive holds into the folder of a study."""
    with tarfile.open(archive) as tar:
        tar.extractall(study, filter="data")


def main() -> None:
    """Pack or unpack."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("pack", "unpack"))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--seeds", help="seeds to pack; all without")
    parser.add_argument(
        "--finished", action="store_true", help="of each plan leave out seeds that are not finished"
    )
    arguments = parser.parse_args()
    if arguments.action == "unpack":
        unpack(arguments.source, arguments.target)
    else:
        seeds = {int(seed) for seed in arguments.seeds.split(",")} if arguments.seeds else None
        pack(arguments.source, arguments.target, seeds, only_finished=arguments.finished)


if __name__ == "__main__":
    main()
