"""How many online steps K are enough: accuracy and compute over K, against GRPO that goes on, at equal compute.

Command:   g2d sweep --config sweep-k --workdir runs/sweep-k     (again, or on another machine, to continue or share)
Hardware:  2 CPU cores for the embedded task; see below for the presets of 7B models
Result:    report.html in the directory; the embedded task's is written down in docs/evidence.md

Choices: preset=full|smoke for the embedded task; seeds=N.
"""

from ml_collections import ConfigDict

from g2d_jax import config as settings
from g2d_jax.resolve import choices, resolve

K = (0, 5, 10, 20, 40, 80, 160)
RATES = (3e-5, 1e-4, 3e-4)  # of GRPO alone; G2D's warm-up has the demo's


def get_config(arg: str = "") -> ConfigDict:
    """The study. One warm-up trajectory for each seed and learning rate carries all K."""
    chosen = choices(arg, preset=("full", "smoke"), seeds=0)
    smoke = chosen.preset == "smoke"
    config = resolve("demo:preset=smoke" if smoke else "demo")
    config.unlock()
    config.name = f"sweep-k-{chosen.preset}"
    config.data.dev.limit = 32 if smoke else 512
    config.stages.warmup.keep = ()
    config.stages.evaluate.greedy = not smoke
    config.stages.dev = config.stages.evaluate.copy_and_resolve_references()
    config.stages.dev.split = "dev"  # what is chosen is chosen here; the test problems are for reporting alone
    steps = f"stages.warmup.steps={_listed((0, 2, 4) if smoke else K)}"
    rates = f"stages.warmup.optimizer.learning_rate={_listed((1e-4, 3e-4) if smoke else RATES)}"
    only = tuple(f"stages.{stage}.policies=warmup" for stage in ("evaluate", "dev"))
    config.sweep = settings.sweep(
        seeds=tuple(range(chosen.seeds or (1 if smoke else 5))),
        arms={
            "g2d": settings.arm(product=(steps,)),
            "grpo": settings.arm(product=(rates, steps), stages=("sft", "warmup", "evaluate", "dev"), fixed=only),
        },
    )
    return config


def _listed(values: tuple[float, ...]) -> str:
    return ",".join(str(value) for value in values)
