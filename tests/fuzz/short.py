"""The tiny config, shorter: four steps of sft with two checkpoints, and pairs from what it
samples."""

import tiny
from ml_collections import ConfigDict


def get_config(arg: str = "") -> ConfigDict:
    config = tiny.get_config()
    with config.stages.unlocked():
        for name in ("warmup", "dpo", "evaluate"):
            del config.stages[name]
    config.stages.sft.steps = 4
    config.stages.collect.policy = "sft"
    return config
