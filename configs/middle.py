"""G2D at a middle scale: 3.2M parameters and responses of 100 tokens, on the embedded task
procedural:digits.

Command:   g2d run --config middle            (preset=smoke: every stage in about a minute; seed=1: another seed)
Hardware:  2 CPU cores, under 6 GB of memory; a quarter of an hour, most of it supervised fine-tuning
"""

from ml_collections import ConfigDict

from g2d_jax import config as settings
from g2d_jax.config_load import choices, resolve


def get_config(arg: str = "") -> ConfigDict:
    """Give the demo a longer task and a larger model. arg: preset=full|smoke, seed=N, K=N (steps of
    warm-up)."""
    chosen = choices(arg, preset=("full", "smoke"), seed=0, K=10)
    config = resolve(f"demo:preset={chosen.preset},seed={chosen.seed},K={chosen.K}")
    config.unlock()
    config.name = "middle-smoke" if chosen.preset == "smoke" else "middle"
    for source in (config.data.train, config.data.dev, config.data.test, config.stages.sft.data):
        source.path = "procedural:digits"
    config.data.max_prompt_length = 40
    config.stages.sft.max_length = 160
    drawn = settings.sampling(114)
    for name in ("warmup", "collect", "evaluate"):
        config.stages[name].sampling = drawn
    if chosen.preset == "full":
        config.model.update(
            hidden_size=256,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=32,
            intermediate_size=768,
        )
        config.data.dev.limit = 256
        config.stages.sft.steps = 600
        config.stages.sft.optimizer.learning_rate = 1e-3
        config.stages.collect.prompts = 512
        config.stages.dpo.batch_size = 32
        config.stages.dpo.optimizer.learning_rate = 5e-5
        config.stages.evaluate.update(num_generations=4, pass_at=(1, 2, 4))
    return config
