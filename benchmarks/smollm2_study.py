"""How many online steps K are enough for SmolLM2-135M on procedural:stories, tried on one GPU: K in
0, 20 and 60, against GRPO that goes on to 100 steps, each with two rates tried.

    g2d sweep --config benchmarks/smollm2_study.py --workdir DIR --seeds 0      # then 1 and 2; processes may share DIR

docs/benchmarks/2026-11-26-gpu.md has what was asked beforehand and what came out.
"""

from ml_collections import ConfigDict

from g2d_jax import config as settings
from g2d_jax.config_load import choices, resolve


def get_config(arg: str = "") -> ConfigDict:
    """Give the study. arg: path=FOLDER_OR_FILE of the model, preset=full|smoke."""
    chosen = choices(arg, path="", preset=("full", "smoke"))
    named = f",path={chosen.path}" if chosen.path else ""
    smoke = chosen.preset == "smoke"
    config = resolve(f"smollm2:preset={chosen.preset}{named}")
    config.unlock()
    config.name = "smollm2-study"
    config.dtype = "bfloat16"
    stages = config.stages
    stages.warmup.keep = ()
    stages.evaluate.greedy = False
    if not smoke:
        config.data.dev.limit, config.data.test.limit = 256, 512
        config.compute.max_num_seqs = 1024
        # About what 25 steps of GRPO cost: a GPU has them as soon as a laptop 96 pairs.
        stages.collect.update(prompts=512, max_pairs=512)
        stages.dpo.batch_size = 16
    stages.dev = stages.evaluate.copy_and_resolve_references()
    stages.dev.split = "dev"
    steps, longest = ("0,2", "0,2,3") if smoke else ("0,20,60", "0,20,40,60,80,100")
    config.sweep = settings.sweep(
        seeds=(0,) if smoke else (0, 1, 2),
        arms={
            "g2d": settings.arm(
                product=(
                    f"stages.warmup.steps={steps}",
                    "stages.dpo.optimizer.learning_rate=5e-6,1e-5",
                ),
                # What the warm-up alone gives is in the other arm.
                fixed=("stages.evaluate.policies=dpo", "stages.dev.policies=dpo"),
            ),
            "grpo": settings.arm(
                product=(
                    "stages.warmup.optimizer.learning_rate=1e-5,2e-5",
                    f"stages.warmup.steps={longest}",
                ),
                stages=("sft", "warmup", "evaluate", "dev"),
                fixed=("stages.evaluate.policies=warmup", "stages.dev.policies=warmup"),
            ),
        },
    )
    return config
