"""A config file for tests: every stage in a few seconds. Its rewards are made so that a random
model gets some."""

from ml_collections import ConfigDict

from g2d_jax import config as settings


def even(completions, **columns):
    """Reward 1 for a completion of even length: about half of a random model's."""
    return [float(len(text) % 2 == 0) for text in completions]


def longest(completions, **columns):
    """A scalar reward: how long a completion is."""
    return [float(len(text)) for text in completions]


def get_config(arg: str = "") -> ConfigDict:
    config = settings.base()
    config.name = "tiny"
    config.model.update(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=64,
    )
    for split, count in (("train", 40), ("dev", 8), ("test", 16)):
        config.data[split] = settings.source("procedural:chains", split, count)
    config.data.max_prompt_length = 16
    config.reward.function = "tiny:even"  # the tests put this folder on the path
    config.compute.update(max_num_seqs=32)
    config.checkpoint.every = 2
    drawn = settings.sampling(8)
    config.stages.sft = settings.sft(
        data=settings.source("procedural:chains", limit=48),
        steps=6,
        batch_size=8,
        max_length=64,
        optimizer=settings.optimizer(3e-3),
    )
    config.stages.warmup = settings.online(
        steps=3,
        keep=(1,),
        prompts_per_step=4,
        num_generations=4,
        sampling=drawn,
        optimizer=settings.optimizer(1e-3),
    )
    config.stages.collect = settings.collect(prompts=8, num_generations=4, sampling=drawn)
    config.stages.dpo = settings.offline(batch_size=8, optimizer=settings.optimizer(1e-3))
    config.stages.evaluate = settings.evaluate(num_generations=2, pass_at=(1, 2), sampling=drawn)
    return config
