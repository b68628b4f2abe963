"""All settings, with their defaults, choices and bounds. A config file starts from `base()` and
adds stages.

    base(), online(…), … ─► ConfigDict, the user's side: names and types are fixed, values change
    Config.of(config)    ─► frozen records, types and bounds checked: what the library works with

section.py   what a section of settings is: types, choices, bounds, and the types that several share
machine.py, model.py, rewards.py, training.py   the sections outside the stages
stages/      a file for each kind of stage
settings.py  all of them, `Config`           build.py  the functions that config files call
graph.py     the stages' order, and what they read      check.py   all that is wrong, in one list
places.py    texts that name files and folders           policy_name.py   the parts of a policy's name
io.py        to JSON and back, and what differs

Identity fields decide the result and are fingerprinted; those in RUNTIME may change between two
starts of one run.
"""

from g2d_jax.config.build import arm, base, optimizer, reward, sampling, source, sweep, task
from g2d_jax.config.machine import (
    AttentionSetting,
    Checkpoint,
    Compute,
    DecodeKernel,
    Engine,
    Faults,
    Logging,
    Mesh,
    Remat,
    RematSetting,
    Window,
)
from g2d_jax.config.model import Lora, Model, Tokenizer
from g2d_jax.config.rewards import Data, Reward, RewardModel, Source, Task
from g2d_jax.config.section import (
    Bounds,
    Dtype,
    Invalid,
    Issue,
    Measure,
    Section,
    Split,
    Tokens,
)
from g2d_jax.config.settings import RESERVED, RUNTIME, Config, prefix_of, setting_of
from g2d_jax.config.stages.best_checkpoint import BestCheckpoint, best_checkpoint
from g2d_jax.config.stages.collect import Collect, collect
from g2d_jax.config.stages.dpo import DPOLoss, OnlineDPO
from g2d_jax.config.stages.dump import Dump
from g2d_jax.config.stages.evaluate import Evaluate, evaluate
from g2d_jax.config.stages.offline import Offline, offline
from g2d_jax.config.stages.online import (
    Clip,
    Filter,
    GRPOLossType,
    Online,
    ScaleRewards,
    online,
)
from g2d_jax.config.stages.sft import Sft, sft
from g2d_jax.config.stages.stage import STAGES, Stage, TrainingStage
from g2d_jax.config.training import Optimizer, Sampling
