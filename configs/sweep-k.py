"""How many online steps K are enough: accuracy and compute over K, against GRPO that goes on, at
equal compute.

Command:   g2d sweep --config sweep-k --workdir runs/study     (again, or on another machine, to continue or share)
           g2d sweep --config sweep-k:preset=qwen2.5-7b --workdir /shared/study
Hardware:  2 CPU cores for the embedded task; presets of real models have not been run: see their plans
Result:    sweep-k.html in the directory; written down in docs/benchmarks.md

Choices: preset=full|smoke, or the name of a real model's config (qwen2.5-7b, llama-3.1-8b, …);
seeds=N; train=SOURCE of the real presets.
"""

from ml_collections import ConfigDict

from g2d_jax import config as settings
from g2d_jax import recipes
from g2d_jax.recipes.config_load import choices, resolve

# K and the learning rates of GRPO alone; the warm-up of G2D has the second one.
GRIDS = {
    "full": ((0, 5, 10, 20, 40, 80, 160), (2e-5, 5e-5, 1.5e-4)),
    "smoke": ((0, 2, 4), (3e-5, 1e-4)),
}
# Around the K that arXiv 2605.21266 found best, 150 for Qwen2.5-7B and 500 for Llama-3.1-8B; what
# else the real presets set is in g2d_jax/recipes/__init__.py.
REAL = {150: (0, 25, 50, 100, 150, 300, 600), 500: (0, 50, 100, 250, 500, 1000)}
GRIDS |= {name: (REAL[model.k], (3e-7, 1e-6, 3e-6)) for name, model in recipes.MODELS.items()}


def get_config(arg: str = "") -> ConfigDict:
    """The study: one warm-up trajectory for each seed and learning rate carries all K."""
    chosen = choices(arg, preset=("full", "smoke", *recipes.MODELS), seeds=0, train="math")
    real = chosen.preset in recipes.MODELS
    config = resolve(f"{chosen.preset}:train={chosen.train}") if real else _embedded(chosen.preset)
    config.unlock()
    config.name = "sweep-k" if chosen.preset == "full" else f"sweep-k-{chosen.preset}"
    warmup, evaluate = config.stages.warmup, config.stages.evaluate
    warmup.keep = ()
    config.stages.dev = evaluate.copy_and_resolve_references()
    # what is chosen is chosen here; the test problems are for reporting alone
    config.stages.dev.split = "dev"
    grid, rates = GRIDS[chosen.preset]
    warmup.optimizer.learning_rate = rates[1]
    steps = f"stages.warmup.steps={_listed(grid)}"
    # On the embedded task, where the offline stage costs as much as many steps, GRPO alone goes on
    # until it has spent what the last warm-up and that stage did.
    longer = steps if real else f"stages.warmup.steps={_listed((*grid, grid[-1] * 3 // 2))}"
    alone = tuple(name for name in ("sft", "warmup", "evaluate", "dev") if name in config.stages)
    config.sweep = settings.sweep(
        seeds=tuple(range(chosen.seeds or (1 if chosen.preset == "smoke" else 5))),
        arms={
            "g2d": settings.arm(product=(steps,)),
            "grpo": settings.arm(
                product=(f"stages.warmup.optimizer.learning_rate={_listed(rates)}", longer),
                stages=alone,
                fixed=("stages.evaluate.policies=warmup", "stages.dev.policies=warmup"),
            ),
        },
    )
    if chosen.preset == "full":
        gentle = (
            f"stages.dpo.optimizer.learning_rate={config.stages.dpo.optimizer.learning_rate / 5}"
        )
        config.sweep.arms.gentle = settings.arm(
            product=(f"stages.warmup.steps={_listed(grid[::2])}",), fixed=(gentle,)
        )
    return config


def _embedded(preset: str) -> ConfigDict:
    config = resolve(f"demo:preset={preset}")
    config.unlock()
    config.stages.evaluate.greedy = preset == "full"
    if preset == "full":
        config.data.dev.limit, config.data.test.limit = 512, 1024
        config.stages.evaluate.update(num_generations=4, pass_at=(1, 2, 4))
    return config


def _listed(values: tuple[float, ...]) -> str:
    return ",".join(str(value) for value in values)
