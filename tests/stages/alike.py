"""Whether two work directories hold the same run, bit for bit but for what a clock measured.

Also used by benchmarks/soak.py; NumPy and the package's own readers, no device.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from safetensors.numpy import load_file

from g2d_jax.runtime.storage import read_segments
from g2d_jax.runtime.tables import read_rollouts
from g2d_jax.runtime.tracking import read_metrics
from g2d_jax.training.checkpoint import Checkpoints

# "attention" is what the process has chosen kernels for so far: a resumed one for less.
CLOCKED = (
    *(
        "started",
        "share",
        "server_idle",
        "tokens_per_second",
        "programs",
        "checksum",
        "peak_memory_bytes",
    ),
    "attention",
)


def differences(one: Path, other: Path) -> list[str]:
    """What differs, a line each; [] for the same run: prompts, tokens, log-probabilities, verdicts,
    metrics by step, preferences, manifests but for times, and every array and count of the
    checkpoints that both kept."""
    return [*_metrics(one, other), *_files(one, other), *_checkpoints(one, other)]


def timeless(value: Any) -> Any:
    """JSON without what a clock measured."""
    if not isinstance(value, dict):
        return [timeless(item) for item in value] if isinstance(value, list) else value
    return {k: timeless(v) for k, v in value.items() if k not in CLOCKED and "seconds" not in k}


def steps_logged(workdir: Path) -> Counter[tuple[str, int]]:
    """How often each (stage, step) was done, in the stages that train."""
    trained = {path.parent.name.partition("-")[2] for path in workdir.glob("[0-9]*-*/checkpoints")}
    records = (r for r in read_segments(workdir / "metrics") if r["kind"] == "train")
    return Counter((r["stage"], r["step"]) for r in records if r["stage"] in trained)


def redone(workdir: Path) -> int:
    """How many steps were done again; one that was done three times counts twice."""
    return sum(times - 1 for times in steps_logged(workdir).values())


def _metrics(one: Path, other: Path) -> Iterator[str]:
    """An error that a stage ended with, that of a lost process say, is no part of what it was to
    make."""
    records = [
        [r for r in read_metrics(workdir) if r["kind"] != "ended"] for workdir in (one, other)
    ]
    logs = [
        {(r["stage"], r["step"], r["kind"]): steady(r["metrics"]) for r in each} for each in records
    ]
    for key in sorted({*logs[0], *logs[1]}):
        values = [log.get(key) for log in logs]
        if values[0] != values[1]:
            yield f"metrics of {key}: {values[0]} and {values[1]}"


def steady(metrics: dict[str, float]) -> str:
    kept = {
        k: v
        for k, v in metrics.items()
        if k != "step_time" and not k.startswith(("generation/", "goodput/"))
    }
    return json.dumps(kept, sort_keys=True)


def _files(one: Path, other: Path) -> Iterator[str]:
    """Journals, preferences, manifests, log-probabilities: everything in the stages' folders but
    checkpoints."""
    listed = [{path.relative_to(root) for path in _kept(root)} for root in (one, other)]
    for file in sorted(listed[0] ^ listed[1]):
        yield f"{file} is in one of the two only"
    for file in sorted(listed[0] & listed[1]):
        if _content(one / file) != _content(other / file):
            yield f"{file} differs" + (
                _which(one / file, other / file) if "rollouts" in file.parts else ""
            )


def _kept(root: Path) -> Iterator[Path]:
    for path in root.glob("[0-9]*-*/**/*"):
        if (
            path.is_file()
            and not {"checkpoints", "damaged", "_parts"} & {*path.parts}
            and path.suffix != ".tmp"
        ):
            yield path


def _content(file: Path) -> object:
    if file.suffix == ".json":
        return timeless(json.loads(file.read_text()))
    if file.suffix == ".safetensors":  # its head has what it took
        return {name: array.tobytes() for name, array in load_file(file).items()}
    return file.read_bytes()


def _which(one: Path, other: Path) -> str:
    """The first response that differs, and in what."""
    if one.suffix != ".parquet":
        return ""
    rows = [read_rollouts(file) for file in (one, other)]
    for number, (a, b) in enumerate(zip(*rows, strict=False)):
        for field in ("problem_id", "visit", "sample", "prompt_ids", "token_ids", "logprobs"):
            if not np.array_equal(getattr(a.rollout, field), getattr(b.rollout, field)):
                return f": {field} of response {number}, {a.rollout.problem_id}"
        if a.score != b.score:
            return (
                f": verdict of response {number}, {a.rollout.problem_id}: {a.score} and {b.score}"
            )
    return ""


def _checkpoints(one: Path, other: Path) -> Iterator[str]:
    for folder in sorted(one.glob("[0-9]*-*/checkpoints")):
        pair = [Checkpoints(root / folder.relative_to(one)) for root in (one, other)]
        if pair[0].latest() != pair[1].latest():
            yield (
                f"{folder.relative_to(one)}: the newest are {pair[0].latest()} and "
                f"{pair[1].latest()}"
            )
        for step in sorted({*pair[0].steps()} & {*pair[1].steps()}):
            found = [contents(there.folder / str(step)) for there in pair]
            for name in sorted({*found[0], *found[1]}):
                if found[0].get(name) != found[1].get(name):
                    yield f"{folder.relative_to(one)}/{step}: {name} differs"


def contents(folder: Any) -> dict[str, object]:
    """Every array of a checkpoint as bytes, and its counters."""
    found: dict[str, object] = {
        "host": timeless(ocp.JsonCheckpointHandler().restore(folder / "host")["content"])
    }
    for name, array in arrays(folder).items():
        found[name] = (str(array.dtype), array.shape, array.tobytes())
    return found


def arrays(folder: Any) -> dict[str, np.ndarray]:
    """Every array of a checkpoint by tree and path, in host memory."""
    found = {}
    for tree in ("params", "opt_state"):
        handler = ocp.PyTreeCheckpointHandler()
        keys = ocp.StandardCheckpointHandler().metadata(folder / tree).tree
        how = {key: ocp.RestoreArgs(restore_type=np.ndarray) for key in keys}
        args = ocp.args.PyTreeRestore(item=dict.fromkeys(keys, 0), restore_args=how)
        restored = handler.restore(folder / tree, args=args)
        found.update({f"{tree}.{key}": np.asarray(restored[key]) for key in keys})
    return found
