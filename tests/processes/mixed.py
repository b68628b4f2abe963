"""Two tasks, one of them scored by a reward model; online DPO, a group loss, a selection, and
rollouts from elsewhere.

What is trained are adapters.

Its files are in the folder of the environment variable MIXED, see test_same_result.py.
"""

import os
from pathlib import Path

import tiny
from ml_collections import ConfigDict

from g2d_jax import config as settings


def get_config(arg: str = "") -> ConfigDict:
    folder = Path(os.environ["MIXED"])
    config = tiny.get_config()
    config.reward.function = "small:even"
    sources = [
        settings.source(str(folder / f"{split}.jsonl")) for split in ("train", "dev", "test")
    ]
    config.tasks.likes = settings.task(*sources, function="model")
    model = config.tasks.likes.reward.model
    model.update(path=str(folder / "reward-model"), max_length=128, batch_tokens=512)
    config.lora.update(rank=2, targets=("q_proj", "down_proj"), quantise="int8")
    sampling, optimizer = config.stages.warmup.sampling, settings.optimizer(1e-3)
    draws = {
        "steps": 4,
        "sync_every": 2,
        "prompts_per_step": 6,
        "num_generations": 4,
        "sampling": sampling,
    }
    config.stages = ConfigDict()
    config.stages.dpo = settings.online(
        policy="init", keep=(2,), loss="dpo", reference_sync=True, optimizer=optimizer
    )
    config.stages.dpo.update(draws)
    config.stages.best = settings.best_checkpoint(policy="dpo", sampling=sampling)
    config.stages.group = settings.online(
        policy="best", loss="group_dpo", grpo_coef=0.5, optimizer=optimizer
    )
    config.stages.group.update(draws, clip={"importance_cap": 2.0}, num_iterations=2)
    config.stages.outside = settings.collect(
        policy="best", dump={"path": str(folder / "outside.jsonl")}
    )
    return config
