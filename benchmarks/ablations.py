"""Which pairs are worth training on, at one K: one policy and, but for the last two arms, one
number of pairs.

Command:   g2d sweep --config benchmarks/ablations.py --workdir runs/study     (of sweep-k: what it has is used)
Hardware:  2 CPU cores
Result:    ablations.html in the directory; written down in docs/benchmarks.md

Arms: difficulty (a window of pass rates), uncertainty (token entropy of a prompt's responses), temperature of the
rollouts, number of pairs (one epoch; and at equal updates). Every pair is of another prompt, so that no arm has more
prompts than another; they come from rollouts on 3,072 prompts. Choices: preset=full|smoke; seeds=N; K=N, by default
the demo's own, 10.
"""

from ml_collections import ConfigDict

from g2d_jax import config as settings
from g2d_jax.recipes.config_load import choices, resolve


def get_config(arg: str = "") -> ConfigDict:
    """The study; stages.pool draws the rollouts, stages.collect chooses pairs from them."""
    chosen = choices(arg, preset=("full", "smoke"), seeds=0, K=0)
    smoke = chosen.preset == "smoke"
    config = resolve(f"sweep-k:preset={chosen.preset}")
    config.unlock()
    config.name = config.name.replace("sweep-k", "ablations")
    stages, count = config.stages, 4 if smoke else 480
    del stages["dev"]  # nothing is chosen here
    stages.warmup.steps = 4 if smoke else chosen.K or stages.warmup.steps
    stages.pool = stages.collect.copy_and_resolve_references()
    stages.pool.update(prompts=64 if smoke else 3072, pairs_per_prompt=1)
    stages.collect = settings.collect(
        rollouts="pool", pairs_per_prompt=1, select="random", max_pairs=count
    )
    stages.dpo.batch_size = 4 if smoke else 16
    stages.evaluate.policies = ("warmup", "dpo")
    numbers = (
        [count // 2, count] if smoke else [count // 4, count // 2, count, 2 * count, 4 * count]
    )
    most = numbers[-1]
    config.sweep = settings.sweep(
        seeds=tuple(range(chosen.seeds or (1 if smoke else 3))),
        arms={
            "difficulty": settings.arm(
                zip=(
                    f"stages.collect.min_pass_rate={'0,0.01' if smoke else '0,0.01,0.24,0.49'}",
                    f"stages.collect.max_pass_rate={'1,0.99' if smoke else '1,0.51,0.76,0.99'}",
                )
            ),
            "uncertainty": settings.arm(
                product=("stages.collect.select=random,uncertain,confident",)
            ),
            "temperature": settings.arm(
                product=(
                    f"stages.pool.sampling.temperature={'1.0,1.3' if smoke else '1.0,0.7,1.3'}",
                )
            ),
            "pairs": settings.arm(product=(f"stages.collect.max_pairs={_listed(numbers)}",)),
            "pairs-equal-updates": settings.arm(
                zip=(
                    f"stages.collect.max_pairs={_listed(numbers)}",
                    f"stages.dpo.epochs={_listed([most // number for number in numbers])}",
                )
            ),
        },
    )
    return config


def _listed(values: list[int]) -> str:
    return ",".join(map(str, values))
