"""The tiny config with refilled batches, a probed warm-up that may end by itself, and what can go wrong.

The reward can be slow or hang, the seed can differ.

SLOW: seconds that a call of the reward takes. HANGS, DIFFERS: index of the process in which it never returns, and of
the one with another seed.
"""

import os
import time

import tiny
from ml_collections import ConfigDict

from g2d_jax.runtime import processes


def even(completions, **columns):
    """tiny.py's reward."""
    time.sleep(float(os.environ.get("SLOW", "0")))
    while os.environ.get("HANGS") == str(processes.index()):
        time.sleep(1)
    return tiny.even(completions, **columns)


def get_config(arg: str = "") -> ConfigDict:
    config = tiny.get_config()
    config.seed = int(os.environ.get("DIFFERS", "none") == os.environ.get("JAX_PROCESS_ID"))
    config.reward.function = "small:even"
    config.stages.warmup.update(dynamic_sampling=1, stop="adaptive", adaptive={"min_steps": 1})
    config.stages.warmup.probe.update(every=1, prompts=4, num_generations=2)
    config.stages.evaluate.update(policies=("warmup", "dpo"))
    return config
