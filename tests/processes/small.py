"""The tiny config with a reward that can be slow or hang in one process, and with refilled batches in its warm-up."""

import os
import time

import tiny
from ml_collections import ConfigDict

from g2d_jax import processes


def even(completions, **columns):
    """tiny.py's reward. SLOW: seconds that a call takes. HANGS: in the process of this index it never returns."""
    time.sleep(float(os.environ.get("SLOW", "0")))
    while os.environ.get("HANGS") == str(processes.index()):
        time.sleep(1)
    return tiny.even(completions, **columns)


def get_config(arg: str = "") -> ConfigDict:
    config = tiny.get_config()
    config.reward.function = "small:even"
    config.stages.warmup.update(refill=1)
    return config
