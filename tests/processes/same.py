"""Comparing what two runs left: to the bit, or but for rounding."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from g2d_jax import policies, storage
from g2d_jax.tables import read_preferences, read_rollouts
from g2d_jax.tracking import read_metrics

ATOL = {"logprobs": 1e-5, "parameters": 5e-5, "metrics": 1e-4}
"""What rounding may change where devices share a sum in another order; seen are 5e-7, 4e-6 and 5e-6."""


def bits(one: Path, other: Path, policy_names: tuple[str, ...], exports: Path) -> None:
    """All that is no measure of time is the same: every Parquet file, metrics, manifests, parameters."""
    files = parquet(one)
    assert files and files == parquet(other)
    for file in files:
        assert (one / file).read_bytes() == (other / file).read_bytes(), file
    assert metrics(one) == metrics(other)
    for file in sorted(one.glob("*/manifest.json")):
        assert timeless(storage.finished(file.parent)) == timeless(storage.finished(other / file.parent.name)), file
    for policy in policy_names:
        first, second = (parameters(policy, workdir, exports) for workdir in (one, other))
        assert first.keys() == second.keys()
        for name, array in first.items():
            np.testing.assert_array_equal(array, second[name], err_msg=f"{policy}: {name}")


def but_for_rounding(one: Path, other: Path, policy_names: tuple[str, ...], exports: Path) -> None:
    """The same draws, tokens, verdicts and pairs; log-probabilities, metrics and parameters within ATOL."""
    assert parquet(one, "rollouts", "probe") == parquet(other, "rollouts", "probe") != []
    for file in parquet(one, "rollouts", "probe"):
        rollouts(one / file, other / file)
    for folder in one.glob("*/preferences"):
        pairs(folder, other / folder.relative_to(one))
    for file in sorted(one.glob("*/manifest.json")):
        first, second = (storage.finished(workdir / file.parent.name) for workdir in (one, other))
        assert first is not None and second is not None
        close(timeless(first), timeless(second), file.parent.name)
    close(metrics(one), metrics(other), "metrics")
    for policy in policy_names:
        first, second = (parameters(policy, workdir, exports) for workdir in (one, other))
        for name, array in first.items():
            np.testing.assert_allclose(array, second[name], 0, ATOL["parameters"], err_msg=f"{policy}: {name}")


def parquet(workdir: Path, *folders: str) -> list[Path]:
    found = sorted(path.relative_to(workdir) for path in workdir.rglob("*.parquet"))
    return [path for path in found if not folders or path.parts[1] in folders]


def rollouts(one: Path, other: Path) -> None:
    for a, b in zip(read_rollouts(one), read_rollouts(other), strict=True):
        which = f"{one}: {a.rollout.problem_id}"
        for name in ("problem_id", "visit", "sample", "stop_reason"):
            assert getattr(a.rollout, name) == getattr(b.rollout, name), which
        np.testing.assert_array_equal(a.rollout.prompt_ids, b.rollout.prompt_ids, err_msg=which)
        np.testing.assert_array_equal(a.rollout.token_ids, b.rollout.token_ids, err_msg=which)
        assert (a.text, a.policy, a.score.verdict, a.score.answer) == (
            b.text,
            b.policy,
            b.score.verdict,
            b.score.answer,
        )
        close(a.score.reward, b.score.reward, which)
        for name in ("logprobs", "entropies"):
            values = getattr(a.rollout, name), getattr(b.rollout, name)
            np.testing.assert_allclose(*values, 0, ATOL["logprobs"], err_msg=which)


def pairs(one: Path, other: Path) -> None:
    def read(folder: Path) -> list[tuple[str, list[int], list[int]]]:
        return [(pair.problem_id, [*pair.chosen_ids], [*pair.rejected_ids]) for pair in read_preferences(folder)]

    assert read(one) and read(one) == read(other)


def close(one: Any, other: Any, where: str) -> None:
    """Numbers of JSON within ATOL["metrics"] of their size, all else equal."""
    if isinstance(one, dict):
        assert isinstance(other, dict) and one.keys() == other.keys(), where
        for key in one:
            close(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            close(a, b, f"{where}/{i}")
    elif isinstance(one, float) and isinstance(other, float):
        atol = ATOL["metrics"]
        np.testing.assert_allclose(one, other, atol, atol, err_msg=where)
    else:
        assert one == other, where


def metrics(workdir: Path) -> dict[str, Any]:
    """What was logged last of each stage that is there, by stage, step and kind, without times."""
    clocked = ("step_time", "generation/share", "generation/tokens_per_second", "goodput/")
    there = {folder.name.partition("-")[2] for folder in workdir.glob("[0-9]*-*")}
    return {
        json.dumps([record["stage"], record["step"], record.get("kind")]): {
            key: value for key, value in record["metrics"].items() if not key.startswith(clocked)
        }
        for record in read_metrics(workdir)
        if record["stage"] in there
    }


def timeless(value: Any) -> Any:
    """A manifest without what a clock measured, and what depends on where the run was."""
    if isinstance(value, list):
        return [timeless(item) for item in value]
    if not isinstance(value, dict):
        return value
    clocked = ("started", "verifier_cpu_seconds", "share", "tokens_per_second", "programs")
    return {k: timeless(v) for k, v in value.items() if k not in clocked and "seconds" not in k}


def parameters(policy: str, workdir: Path, exports: Path) -> dict[str, np.ndarray]:
    folder = exports / workdir.name / policy
    return load_file(policies.export(workdir, folder, policy=policy) / "model.safetensors")
