"""Comparing what two runs left, but for rounding; tests/stages/alike.py does it to the bit."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
from alike import timeless
from safetensors.numpy import load_file

from g2d_jax import commands
from g2d_jax.runtime import storage
from g2d_jax.runtime.tracking import read_metrics
from g2d_jax.session import stage_result

ATOL = {"logprobs": 1e-5, "parameters": 5e-5, "metrics": 1e-4}
"""What rounding may change where devices share a sum in another order; seen are 5e-7, 4e-6 and
5e-6."""


def but_for_rounding(one: Path, other: Path, policy_names: tuple[str, ...], exports: Path) -> None:
    """The same draws, tokens, verdicts, pairs and manifests; log-probabilities, metrics and
    parameters within ATOL."""
    assert parquet(one) == parquet(other) != []
    pairs = [folder.relative_to(one) for folder in one.glob("*/preferences")]
    for path in (*parquet(one), *pairs):
        first, second = (pd.read_parquet(workdir / path) for workdir in (one, other))
        assert len(first)
        pd.testing.assert_frame_equal(first, second, rtol=0, atol=ATOL["logprobs"], obj=str(path))
    for file in sorted(one.glob("*/manifest.json")):
        name = file.parent.name
        records = [storage.plain(stage_result.read(workdir / name)) for workdir in (one, other)]
        for record in records:
            record.pop("warnings")  # those of a run's start are of the command alone
        close(*map(timeless, records), name)
    close(metrics(one), metrics(other), "metrics")
    for policy in policy_names:
        first, second = (
            load_file(
                commands.export(workdir, exports / workdir.name / policy, policy=policy)
                / "model.safetensors"
            )
            for workdir in (one, other)
        )
        assert first.keys() == second.keys()
        for name, array in first.items():
            np.testing.assert_allclose(
                array, second[name], 0, ATOL["parameters"], err_msg=f"{policy}: {name}"
            )


def parquet(workdir: Path) -> list[Path]:
    paths = sorted(path.relative_to(workdir) for path in workdir.rglob("*.parquet"))
    return [path for path in paths if path.parts[1] == "rollouts"]


def close(one: Any, other: Any, where: str) -> None:
    """Numbers of JSON within ATOL of their size, all else equal."""
    (first, structure), (second, expected) = jax.tree.flatten(one), jax.tree.flatten(other)
    assert structure == expected and structure.num_leaves, where
    for a, b in zip(first, second, strict=True):
        if isinstance(a, float) and isinstance(b, float):
            np.testing.assert_allclose(a, b, ATOL["metrics"], ATOL["metrics"], err_msg=where)
        else:
            assert a == b, where


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
