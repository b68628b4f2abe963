"""Training with other optimisers: what is interrupted and continued ends like what never was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from alike import arrays, contents
from worlds import training

from g2d_jax.config import Sft
from g2d_jax.recipes.config_load import resolve
from g2d_jax.stages import sft

FACTORED = ["model.hidden_size=128", "model.intermediate_size=128"]
ADAPTERS = ["lora.rank=2", "lora.targets=q_proj,down_proj"]
SETTINGS = {
    "adafactor": ["stages.sft.optimizer.kind=adafactor", *FACTORED],
    "bfloat16 moments, offloaded, of adapters": [
        "stages.sft.optimizer.moment_dtype=bfloat16",
        "compute.offload_optimizer=True",
        *ADAPTERS,
    ],
}
TINY = str(Path(__file__).parents[1] / "tiny.py")


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(SETTINGS["adafactor"], marks=pytest.mark.slow),
        SETTINGS["bfloat16 moments, offloaded, of adapters"],
    ],
    ids=str,
)
def test_what_is_continued_ends_like_what_never_stopped(overrides, opened, tmp_path):
    """It stops after update 3, of which nothing is kept: the checkpoint is that of update 2."""
    config = resolve(TINY, overrides)

    def train(name: str, start: int, stop: int) -> None:
        session = opened(config, tmp_path / name)
        examples, *_ = sft.examples(session, "sft", session.config.stage("sft", Sft))
        with training(session, "sft", 4) as trainer:
            assert trainer.step == start
            while trainer.meet_before_update() and trainer.step < stop:
                trainer.update(sft.batch(examples[4 * trainer.step :][:4]), {})
                trainer.checkpoint_if_due()

    train("whole", 0, 4)
    train("stopped", 0, 3)
    train("stopped", 2, 4)
    ends = [tmp_path / name / "01-sft" / "checkpoints" / "4" for name in ("whole", "stopped")]
    first, second = map(contents, ends)
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []
    state = {
        name: array
        for name, array in arrays(ends[1]).items()
        if name.startswith("opt_state") and array.ndim
    }
    assert {str(array.dtype) for array in state.values()} == {
        "bfloat16" if "bfloat16" in overrides[0] else "float32"
    }
    assert any(np.any(array) for array in state.values())
    assert any("v_row" in name and array.shape[-1] == 128 for name, array in state.items()) == (
        "adafactor" in overrides[0]
    )
