"""G2D on the embedded task procedural:chains, which the studies are about: the demo with another
task and its settings.

Command:   g2d run --config chains            (preset=smoke: every stage in about a minute; seed=1: another seed)
Hardware:  2 CPU cores, under 3 GB of memory; 5 minutes
"""

from ml_collections import ConfigDict

from g2d_jax.config_load import choices, resolve


def get_config(arg: str = "") -> ConfigDict:
    """Give the demo the task chains and its settings. arg: preset=full|smoke, seed=N, K=N (steps of
    warm-up)."""
    chosen = choices(arg, preset=("full", "smoke"), seed=0, K=20)
    config = resolve(f"demo:preset={chosen.preset},seed={chosen.seed},K={chosen.K}")
    config.unlock()
    config.name = "chains-smoke" if chosen.preset == "smoke" else "chains"
    config.model.update(hidden_size=96, head_dim=24, intermediate_size=256)
    for source in (config.data.train, config.data.dev, config.data.test, config.stages.sft.data):
        source.path = "procedural:chains"
    config.stages.sft.update(steps=200, batch_size=64, max_length=64)
    config.stages.warmup.optimizer.learning_rate = 1e-4
    if chosen.preset == "full":
        config.stages.sft.steps = 2000
        config.data.dev.limit = 512
        config.data.test.limit = 1024
        config.stages.warmup.keep = tuple(step for step in (0, 10) if step <= chosen.K)
        config.stages.evaluate.update(num_generations=4, pass_at=(1, 2, 4))
    return config
