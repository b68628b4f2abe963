"""G2D on the embedded task procedural:chains, which the studies are about: a cold policy that is right but unsure.

Command:   g2d run --config chains            (preset=smoke: every stage in about a minute; seed=1: another seed)
Hardware:  2 CPU cores, under 3 GB of memory; 5 minutes
"""

from ml_collections import ConfigDict

from g2d_jax import config as settings
from g2d_jax.resolve import choices


def get_config(arg: str = "") -> ConfigDict:
    """arg: preset=full|smoke, seed=N, K=N (steps of warm-up)."""
    chosen = choices(arg, preset=("full", "smoke"), seed=0, K=20)
    config = settings.base()
    config.name = "chains"
    config.seed = chosen.seed
    for split in ("train", "dev", "test"):
        config.data[split].path = "procedural:chains"
    config.data.max_prompt_length = 16
    config.data.dev.limit = 512
    config.compute.slots = 256
    config.compute.chunk = 8
    drawn = settings.sampling(48)
    config.stages.sft = settings.sft(
        data=settings.source("procedural:chains", limit=40_000),
        steps=2000,
        max_length=64,
    )
    config.stages.warmup = settings.online(
        policy="sft",
        steps=chosen.K,
        keep=(0, 10),
        sampling=drawn,
        optimizer=settings.optimizer(1e-4),
    )
    config.stages.collect = settings.collect(policy="warmup", prompts=1024, sampling=drawn)
    config.stages.dpo = settings.offline(
        beta=1.0,
        optimizer=settings.optimizer(1e-4, schedule="cosine", warmup_steps=5),
    )
    config.stages.evaluate = settings.evaluate(num_generations=4, sampling=drawn)
    if chosen.preset == "smoke":
        _shrink(config)
    return config


def _shrink(config: ConfigDict) -> None:
    """The same stages, too short to learn much."""
    config.name = "chains-smoke"
    config.data.train.limit = 2000
    config.data.test.limit = 64
    config.data.dev.limit = 32
    config.stages.sft.data.limit = 4000
    config.stages.sft.steps = 200
    config.stages.warmup.steps = 3
    config.stages.warmup.keep = (0,)
    config.stages.warmup.prompts_per_step = 8
    config.stages.collect.prompts = 64
    config.stages.collect.part = 32
    config.stages.dpo.batch_size = 4
    config.stages.dpo.optimizer.warmup_steps = 1
    config.stages.evaluate.num_generations = 2
    config.stages.evaluate.pass_at = (1, 2)
    config.checkpoint.every = 100
