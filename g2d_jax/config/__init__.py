"""All settings, with their defaults, choices and bounds. A config file starts from `base()` and
adds stages.

    base(), online(…), … ─► ConfigDict, the user's side: names and types are fixed, values change
    Config.of(config)    ─► frozen records, checked: what the library works with

section.py   what a section of settings is: types, choices, bounds
sections/    those outside the stages        stages/   a file for each kind of stage
settings.py  all of them, `Config`           build.py  the functions that config files call
graph.py     the stages' order, and what they read        gone.py   settings that older versions had
places.py    texts that name files and folders           policy_name.py   the parts of a policy's name
io.py        to JSON and back, and what differs

Identity fields decide the result and are fingerprinted; those in RUNTIME may change between two
starts of one run.
"""

from g2d_jax.config.build import arm, base, optimizer, probe, reward, sampling, source, sweep, task
from g2d_jax.config.choices import Dtype, Measure, SamplingWeights, Split, Tokens
from g2d_jax.config.section import Bounds, FieldError, Section
from g2d_jax.config.sections.engine import Engine
from g2d_jax.config.sections.machine import (
    AttentionSetting,
    Checkpoint,
    Compute,
    DecodeKernel,
    Faults,
    Logging,
    Mesh,
    Remat,
    Window,
)
from g2d_jax.config.sections.model import Lora, Model, Tokenizer
from g2d_jax.config.sections.problems import Data, Source
from g2d_jax.config.sections.rewards import Judge, Reward, RewardModel, Task
from g2d_jax.config.sections.training import Optimizer, Probe, Sampling
from g2d_jax.config.settings import LATER, RESERVED, RUNTIME, Config, prefix_of, setting_of
from g2d_jax.config.stages.best_checkpoint import BestCheckpoint, best_checkpoint
from g2d_jax.config.stages.collect import Collect, collect
from g2d_jax.config.stages.dpo import DPOLoss, OnlineDPO
from g2d_jax.config.stages.evaluate import Evaluate, evaluate
from g2d_jax.config.stages.offline import Offline, offline
from g2d_jax.config.stages.online import (
    Difficulty,
    DropSolved,
    GRPOLossType,
    Online,
    ScaleRewards,
    online,
)
from g2d_jax.config.stages.sft import Sft, sft
from g2d_jax.config.stages.stage import STAGES, Stage, TrainingStage
