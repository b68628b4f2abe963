"""A config file of an online stage that ends early: see test_early_stopping.py."""

import tiny
from ml_collections import ConfigDict


def get_config(arg: str = "") -> ConfigDict:
    """From random parameters. Offline training is cheap and much is predicted of it, so that the warm-up ends early."""
    config = tiny.get_config()
    config.seed = 4
    for name in ("sft", "evaluate"):
        del config.stages[name]
    warmup = config.stages.warmup
    warmup.update(policy="init", stop="adaptive", steps=8, keep=())
    warmup.adaptive.update(min_steps=2)
    warmup.probe.update(every=1, prompts=8, num_generations=4)
    warmup.optimizer.learning_rate = 1e-2
    config.stages.collect.update(prompts=8, pairs_per_prompt=1)
    config.stages.dpo.update(diagnose=False, batch_size=8, epochs=1)
    config.stages.dpo.optimizer.learning_rate = 0.3
    return config
