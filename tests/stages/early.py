"""A config file, and a process, of an online stage that ends early: see test_ending.py.

python early.py WORKDIR UNTIL PATTERN      PATTERN: of the file in WORKDIR that kills it, "" for none
"""

import sys
import threading
from pathlib import Path

import tiny
from ml_collections import ConfigDict

from g2d_jax import pipeline
from g2d_jax.config_load import resolve


def get_config(arg: str = "") -> ConfigDict:
    """From random parameters. Offline training is cheap and hoped for, so that the warm-up ends early."""
    config = tiny.get_config()
    config.seed = 4
    for name in ("sft", "evaluate"):
        del config.stages[name]
    warmup = config.stages.warmup
    warmup.update(policy="init", stop="adaptive", steps=8, keep=())
    warmup.adaptive.update(min_steps=2, shift=4.0)
    warmup.probe.update(every=1, prompts=8, num_generations=4)
    warmup.optimizer.learning_rate = 1e-2
    config.stages.collect.update(prompts=8, pairs_per_prompt=1)
    config.stages.dpo.update(diagnose=False, batch_size=64, epochs=1)
    return config


if __name__ == "__main__":
    from killed import kill_after

    workdir, until, pattern = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    if pattern:
        threading.Thread(target=kill_after, args=(workdir, pattern, 0.0), daemon=True).start()
    pipeline.run(resolve(__file__), workdir, until=until)
