"""From offline to online on the demo's task: DPO synchronised every s updates, and GRPO, at equal
updates.

Command:   g2d sweep --config spectrum --workdir runs/spectrum        (again to continue; preset=smoke: a few minutes)
Hardware:  2 CPU cores
Result:    spectrum.html in the directory; what it showed is in docs/benchmarks.md

All arms start from one cold policy for each seed and make equally many updates on equally many
prompts, in the same order (arXiv 2506.21495, table 1, at toy size); as there, the reference follows
the sampling policy but in the offline arm. All have one learning rate, as there: DPO's 1e-4, between
5e-5 and 1.5e-4, with both of which GRPO ends within two points of the same accuracy (sweep-k).
Choices: preset=full|smoke; seeds=N; updates=N; beta=B of DPO; sync=false for a reference that stays.
"""

from ml_collections import ConfigDict

from g2d_jax import config as settings
from g2d_jax.recipes.config_load import choices, resolve


def get_config(arg: str = "") -> ConfigDict:
    """The study: offline, s = 50, 10 and 1, and GRPO."""
    chosen = choices(arg, preset=("full", "smoke"), seeds=0, updates=0, beta=1.0, sync=True)
    smoke = chosen.preset == "smoke"
    config = resolve(f"sweep-k:preset={chosen.preset}")
    config.unlock()
    config.name = config.name.replace("sweep-k", "spectrum")
    updates = chosen.updates or (4 if smoke else 200)
    # 200 updates hold four intervals of 50, whose rollouts are of three policies that were trained
    # on DPO.
    middle = (2,) if smoke else (50, 10)
    drawn, evaluate = config.stages.warmup.sampling, config.stages.evaluate
    del config.stages["warmup"], config.stages["collect"], config.stages["dpo"]
    config.stages.train = settings.online(
        policy="sft",
        steps=updates,
        prompts_per_step=8 if smoke else 32,
        sampling=drawn,
        optimizer=settings.optimizer(1e-4),
    )
    evaluate.policies = config.stages.dev.policies = ("sft", "train")
    arms = {"offline": 0, **{f"s{every}": every for every in middle}, "s1": 1}
    config.sweep = settings.sweep(
        seeds=tuple(range(chosen.seeds or (1 if smoke else 3))),
        arms={
            **{name: _dpo(every, chosen.beta, chosen.sync) for name, every in arms.items()},
            "grpo": settings.arm(),
        },
    )
    return config


def _dpo(every: int, beta: float, sync: bool) -> ConfigDict:
    reference_sync = str(sync and every > 0).lower()
    overrides = (
        "loss=dpo",
        f"sync_every={every}",
        f"dpo.beta={beta}",
        f"reference_sync={reference_sync}",
    )
    return settings.arm(fixed=tuple(f"stages.train.{override}" for override in overrides))
