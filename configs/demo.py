"""G2D on the embedded task procedural:slips: a tiny model trained from scratch, nothing to
download.

Command:   g2d run --config demo            (preset=smoke: every stage in under a minute; seed=1: another seed)
Hardware:  2 CPU cores, under 2 GB of memory
"""

from ml_collections import ConfigDict

from g2d_jax import config as settings
from g2d_jax.recipes.config_load import choices


def get_config(arg: str = "") -> ConfigDict:
    """The embedded default. arg: preset=full|smoke, seed=N, K=N (steps of warm-up)."""
    chosen = choices(arg, preset=("full", "smoke"), seed=0, K=10)
    config = settings.base()
    config.name = "demo"
    config.seed = chosen.seed
    config.model.update(hidden_size=64, intermediate_size=176)
    config.data.train = settings.source("procedural:slips", "train", 20_000)
    config.data.dev = settings.source("procedural:slips", "dev", 256)
    config.data.test = settings.source("procedural:slips", "test", 512)
    config.data.max_prompt_length = 16
    drawn = settings.sampling(48)
    config.stages.sft = settings.sft(
        data=settings.source("procedural:slips", limit=40_000),
        steps=1000,
        batch_size=32,
        max_length=80,
        optimizer=settings.optimizer(3e-3, schedule="cosine", warmup_steps=50),
    )
    config.stages.warmup = settings.online(
        policy="sft", steps=chosen.K, keep=(0,), sampling=drawn, optimizer=settings.optimizer(5e-5)
    )
    config.stages.collect = settings.collect(policy="warmup", prompts=1024, sampling=drawn)
    config.stages.dpo = settings.offline(
        beta=1.0, optimizer=settings.optimizer(1e-4, schedule="cosine", warmup_steps=5)
    )
    config.stages.evaluate = settings.evaluate(
        num_generations=16, pass_at=(1, 4, 16), sampling=drawn
    )
    if chosen.preset == "smoke":
        _shrink(config)
    return config


def _shrink(config: ConfigDict) -> None:
    """The same stages, too short to learn much."""
    config.name = "demo-smoke"
    config.data.train.limit = 2000
    config.data.test.limit = 64
    config.data.dev.limit = 32
    config.stages.sft.data.limit = 4000
    config.stages.sft.steps = 100
    config.stages.warmup.steps = 3
    config.stages.warmup.prompts_per_step = 8
    config.stages.collect.prompts = 64
    config.stages.dpo.batch_size = 4
    config.stages.dpo.optimizer.warmup_steps = 1
    config.stages.evaluate.num_generations = 2
    config.stages.evaluate.pass_at = (1, 2)
    config.checkpoint.every = 100
