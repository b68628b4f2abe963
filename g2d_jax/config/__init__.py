"""All settings, with their defaults, choices and bounds. A config file starts from `base()` and
adds stages.

    base(), online(…), … ─► ConfigDict, which users edit: names and types are fixed, values change
    Config.of(config)    ─► frozen records, types and bounds checked: the library reads these

    section.py   the class of all sections: types, choices, bounds; shared types
    machine.py, model.py, rewards.py, training.py   the sections outside the stages
    stages/      one file for each kind of stage
    settings.py  `Config`, the whole                build.py  the functions that config files call
    graph.py     the order of stages, their inputs  check.py  all errors and warnings, in one list
    places.py    settings that name files, folders  policy_name.py   the parts of a policy's name
    io.py        to JSON and back, and differences

Identity fields decide the result and are part of its fingerprint. Fields in RUNTIME may change when
you restart a run.
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
