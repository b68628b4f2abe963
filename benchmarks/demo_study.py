"""How many online steps K are enough on procedural:slips, G2D and GRPO tuned alike: part=tune tries
six settings of each at each budget on three seeds, part=judge runs the chosen ones on ten others.

    g2d sweep --config benchmarks/demo_study.py:part=tune --workdir DIR     # again, or by several processes
    python benchmarks/tuned_alike.py choose DIR demo-study-tune benchmarks/results/demo-study.json
    g2d sweep --config benchmarks/demo_study.py:part=judge --workdir DIR
    python benchmarks/tuned_alike.py answers DIR demo-study-judge

The results are in docs/benchmarks.md.
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict

from g2d_jax import config as settings
from g2d_jax.recipes.config_load import choices, resolve

FOLDER = Path(__file__).parent
JUDGE = runpy.run_path(str(FOLDER / "tuned_alike.py"))["judge"]
GRIDS = {
    # K, GRPO's updates, rates of online RL, those of DPO after a warm-up, those of DPO alone.
    # Drawing pairs and DPO cost about 45 updates, so GRPO's budgets lie around K + 45.
    "full": (
        "5,10,20,40,80",
        "30,50,75,110,160",
        "1e-4,3e-4,1e-3",
        "1e-4,2e-4",
        "5e-5,1e-4,2e-4",
    ),
    "smoke": ("2", "2,4", "1e-4,3e-4", "1e-4,3e-4", "1e-4,3e-4"),
}
BOTH = "constant,cosine"


def get_config(arg: str = "") -> ConfigDict:
    """Give a part of the study. arg: part=tune|judge, preset=full|smoke, choice=FILE for judge."""
    chosen = choices(arg, part=("tune", "judge"), preset=("full", "smoke"), choice="")
    config = resolve(f"sweep-k:preset={chosen.preset}")
    config.unlock()
    smoke = "-smoke" if chosen.preset == "smoke" else ""
    config.name = f"demo-study{smoke}-{chosen.part}"
    if chosen.part == "tune":
        del config.stages["evaluate"]
        config.stages.dev.greedy = False
        config.sweep = _tune(GRIDS[chosen.preset], (0,) if smoke else (0, 1, 2))
    else:
        del config.stages["dev"]
        file = Path(chosen.choice) if chosen.choice else FOLDER / "results" / "demo-study.json"
        seeds = (10, 11) if smoke else tuple(range(10, 20))
        config.sweep = JUDGE(file, seeds, ("sft", "warmup", "evaluate"))
    return config


def _tune(grid: tuple[str, ...], seeds: tuple[int, ...]) -> ConfigDict:
    warmups, longest, rates, dpo, alone = grid
    on_dev = "stages.dev.policies=dpo"
    return settings.sweep(
        seeds=seeds,
        arms={
            "g2d": settings.arm(
                product=(
                    f"stages.warmup.optimizer.learning_rate={rates}",
                    f"stages.warmup.steps={warmups}",
                    f"stages.dpo.optimizer.learning_rate={dpo}",
                ),
                fixed=(on_dev,),
            ),
            # K = 0 has no warm-up's rate to try: as many settings are tried of DPO's.
            "offline": settings.arm(
                product=(
                    "stages.warmup.steps=0",
                    f"stages.dpo.optimizer.learning_rate={alone}",
                    f"stages.dpo.optimizer.schedule={BOTH}",
                ),
                fixed=(on_dev,),
            ),
            "grpo": settings.arm(
                product=(
                    f"stages.warmup.optimizer.learning_rate={rates}",
                    f"stages.warmup.optimizer.schedule={BOTH}",
                    f"stages.warmup.steps={longest}",
                ),
                stages=("sft", "warmup", "dev"),
                fixed=("stages.dev.policies=warmup",),
            ),
        },
    )
