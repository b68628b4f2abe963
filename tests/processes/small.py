"""The tiny config with refilled batches, a warm-up that may end by itself, and what can go
wrong.

SLOW: seconds that a call of the reward takes. HANGS, DIFFERS, STOPPED: index of the process in
which it never returns, of the one with another seed, and of the one that gets SIGTERM while it
reads this config.
"""

import os
import signal
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
    index = os.environ.get("JAX_PROCESS_ID", "0")
    if os.environ.get("STOPPED") == index:
        os.kill(os.getpid(), signal.SIGTERM)
    config.seed = int(os.environ.get("DIFFERS") == index)
    config.reward.function = "small:even"
    config.stages.warmup.update(filter={"dynamic_sampling": 1}, budget={"amount": 1e30})
    config.stages.evaluate.update(policies=("warmup", "dpo"))
    return config
