"""G2D at a middle scale: 3.2M parameters and responses of 100 tokens, on the embedded task
procedural:digits.

Command:   g2d sweep --config benchmarks/middle.py:study=true --workdir runs/middle     (sweep-k at this scale)
           g2d run --config benchmarks/middle.py      (preset=smoke: about a minute a stage; seed=1: another seed)
Hardware:  2 CPU cores, under 6 GB of memory; a run takes a quarter of an hour, most of it supervised fine-tuning
Result:    docs/benchmarks.md
"""

from ml_collections import ConfigDict

from g2d_jax import config as settings
from g2d_jax.recipes.config_load import choices, resolve


def get_config(arg: str = "") -> ConfigDict:
    """Give the demo, or with study=true sweep-k, a longer task and a larger model. arg:
    preset=full|smoke, and of a run seed=N, K=N (steps of warm-up)."""
    chosen = choices(arg, preset=("full", "smoke"), seed=0, K=10, study=False)
    base = "sweep-k:" if chosen.study else f"demo:seed={chosen.seed},K={chosen.K},"
    config = resolve(f"{base}preset={chosen.preset}")
    config.unlock()
    config.name = config.name.replace("demo", "middle").replace("sweep-k", "sweep-k-middle")
    for source in (config.data.train, config.data.dev, config.data.test, config.stages.sft.data):
        source.path = "procedural:digits"
    config.data.max_prompt_length = 40
    config.stages.sft.max_length = 160
    drawn = settings.sampling(114)
    for name in {"warmup", "collect", "evaluate", "dev"} & {*config.stages}:
        config.stages[name].sampling = drawn
    if chosen.preset == "full":
        config.model.update(
            hidden_size=256,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            intermediate_size=768,
        )
        config.data.dev.limit, config.data.test.limit = 256, 512
        config.stages.sft.steps = 600
        config.stages.sft.optimizer.learning_rate = 1e-3
        config.stages.collect.prompts = 512
        config.stages.dpo.batch_size = 32
        config.stages.dpo.optimizer.learning_rate = 5e-5
        config.stages.evaluate.update(num_generations=4, pass_at=(1, 2, 4))
        if chosen.study:
            config.stages.dev.update(num_generations=4, pass_at=(1, 2, 4))
            config.sweep.seeds = (0, 1, 2)
            del config.sweep.arms["gentle"]
            arms = config.sweep.arms
            arms.g2d.product = ("stages.warmup.steps=0,5,10,20,40",)
            arms.grpo.product = (
                "stages.warmup.optimizer.learning_rate=2e-05,5e-05,0.0001",
                "stages.warmup.steps=0,5,10,20,40,60",
            )
    return config
