"""The online stage of the tiny config alone, with adapters."""

import small
from ml_collections import ConfigDict


def get_config(arg: str = "") -> ConfigDict:
    config = small.get_config()
    config.model.num_hidden_layers = 1
    config.lora.update(rank=2, targets=("q_proj", "down_proj"))
    for name in ("sft", "collect", "dpo", "evaluate"):
        del config.stages[name]
    config.stages.warmup.update(
        policy="init", steps=2, keep=(), filter={"dynamic_sampling": 0}, budget={"amount": 0.0}
    )
    return config
