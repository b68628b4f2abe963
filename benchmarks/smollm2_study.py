"""How many online steps K are enough for SmolLM2-135M, on stories (stories.py) and on arithmetic that
nobody chose, in hours on two cores or minutes of a GPU.

    python benchmarks/stories.py models/smollm2/stories
    g2d sweep --config benchmarks/smollm2_study.py:part=tune,task=stories --workdir DIR        # processes may share DIR
    python benchmarks/tuned_alike.py choose DIR smollm2-stories-tune benchmarks/results/smollm2-stories.json
    g2d sweep --config benchmarks/smollm2_study.py:part=judge,task=stories --workdir DIR
    python benchmarks/tuned_alike.py answers DIR smollm2-stories-judge

and the same with task=arithmetic. part=tune tries three settings of G2D and of GRPO at each budget
on seed 0, part=judge runs the chosen ones on three others, part=spectrum goes from offline to
online at one seed. part=first is the study before them, on an H200. docs/benchmarks.md has the
results.

arithmetic: all a + b and a - b of 2 to 20 and a x b of 2 to 12, 672 problems, in a fixed random
order, as in the config smollm2. The cold policy is the published model. That of stories has SFT.
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict

from g2d_jax import config as settings
from g2d_jax.recipes.config_load import choices, resolve

FOLDER = Path(__file__).parent
JUDGE = runpy.run_path(str(FOLDER / "tuned_alike.py"))["judge"]
GRIDS = {
    # K; GRPO's rates; those of a warm-up, and of DPO after it; those of DPO alone
    "full": (
        "5,20,60",
        "5e-6,1e-5,2e-5",
        ("1e-5,1e-5,2e-5", "5e-6,1e-5,5e-6"),
        "5e-6,1e-5,2e-5",
    ),
    "smoke": ("2", "1e-5,2e-5", ("1e-5,1e-5", "5e-6,1e-5"), "5e-6,1e-5"),
}

# GRPO's updates: drawing pairs and DPO cost up to twenty, so that K = 60 lies within them.
UPDATES = {"full": "10,20,40,60,80,100", "smoke": "2,3"}


def get_config(arg: str = "") -> ConfigDict:
    """Give a part of the study. arg: part=first|tune|judge|spectrum, task=stories|arithmetic,
    path=FOLDER that examples/smollm2/prepare.py wrote, preset=full|smoke, choice=FILE for judge."""
    chosen = choices(
        arg,
        part=("first", "tune", "judge", "spectrum"),
        task=("stories", "arithmetic"),
        path="",
        preset=("full", "smoke"),
        choice="",
    )
    smoke = chosen.preset == "smoke"
    config = _base(chosen.path, chosen.preset, chosen.task)
    if chosen.part == "first":
        return _first(config, smoke)
    config.name = f"smollm2-{chosen.task}{'-smoke' if smoke else ''}-{chosen.part}"
    cold = config.stages.warmup.policy
    stages = ("sft", "warmup") if cold == "sft" else ("warmup",)
    if chosen.part == "tune":
        del config.stages["evaluate"]
        config.sweep = _tune(GRIDS[chosen.preset], UPDATES[chosen.preset], (*stages, "dev"))
        return config
    del config.stages["dev"]
    if chosen.part == "spectrum":
        _spectrum(config, cold, smoke)
    else:
        file = FOLDER / "results" / f"smollm2-{chosen.task}.json"
        if chosen.choice:
            file = Path(chosen.choice)
        config.sweep = JUDGE(file, (1, 2) if smoke else (1, 2, 3), (*stages, "evaluate"))
    return config


def _base(path: str, preset: str, task: str) -> ConfigDict:
    """Give the run that all parts vary."""
    named = f",path={path}" if path else ""
    config = resolve(f"smollm2:preset={preset},dtype=bfloat16{named}")
    config.unlock()
    config.name = "smollm2-study"
    stages = config.stages
    for stage in stages.values():
        if "sampling" in stage:
            stage.sampling.update(stop=(), max_new_tokens=32 if task == "stories" else 24)
    if task == "stories":
        _stories(config, preset == "smoke")
    stages = config.stages
    stages.warmup.update(steps=2 if preset == "smoke" else 10, keep=())
    stages.warmup.optimizer.learning_rate = 1e-5
    stages.evaluate.greedy = False
    stages.dev = stages.evaluate.copy_and_resolve_references()
    stages.dev.split = "dev"
    return config


def _stories(config: ConfigDict, smoke: bool) -> None:
    """Put stories in place of arithmetic: SFT on worked answers first, no examples in the prompt."""
    folder = f"{config.model.path}/stories"
    config.data.train = settings.source(f"{folder}/train.jsonl", limit=4000)
    config.data.dev = settings.source(f"{folder}/dev.jsonl", limit=8 if smoke else 128)
    config.data.test = settings.source(f"{folder}/test.jsonl", limit=8 if smoke else 256)
    config.data.max_prompt_length = 96
    config.tokenizer.prompt_template = settings.base().tokenizer.prompt_template
    stages = config.stages
    stages.warmup.policy = "sft"
    stages.evaluate.policies = ("sft", "warmup", "dpo")
    sft = settings.sft(
        data=settings.source(f"{folder}/sft.jsonl", limit=128 if smoke else 384),
        steps=8 if smoke else 24,
        batch_size=16,
        max_length=128,
        optimizer=settings.optimizer(4e-5 if smoke else 2e-5, schedule="cosine", warmup_steps=2),
    )
    config.stages = ConfigDict({"sft": sft, **stages})


def _tune(grid: tuple, updates: str, alone: tuple[str, ...]) -> ConfigDict:
    warmups, rates, (warmup_rates, dpo), dpo_alone = grid
    on_dev = "stages.dev.policies=dpo"
    return settings.sweep(
        seeds=(0,),
        arms={
            "g2d": settings.arm(
                product=(f"stages.warmup.steps={warmups}",),
                zip=(
                    f"stages.warmup.optimizer.learning_rate={warmup_rates}",
                    f"stages.dpo.optimizer.learning_rate={dpo}",
                ),
                fixed=(on_dev,),
            ),
            # K = 0 has no warm-up's rate to try: as many settings are tried of DPO's.
            "offline": settings.arm(
                product=(
                    "stages.warmup.steps=0",
                    f"stages.dpo.optimizer.learning_rate={dpo_alone}",
                ),
                fixed=(on_dev,),
            ),
            "grpo": settings.arm(
                product=(
                    f"stages.warmup.optimizer.learning_rate={rates}",
                    f"stages.warmup.steps={updates}",
                ),
                stages=alone,
                fixed=("stages.dev.policies=warmup",),
            ),
        },
    )


def _spectrum(config: ConfigDict, cold: str, smoke: bool) -> None:
    """Put online training at one rate in place of all: DPO synchronised never, every ten updates
    and always, and GRPO, which part=tune has."""
    stages = config.stages
    del stages["collect"], stages["dpo"]
    stages.warmup.steps = 3 if smoke else 40
    stages.evaluate.policies = (cold, "warmup")
    arms = {"grpo": settings.arm()}
    for name, every in {"offline": 0, "s10": 10, "s1": 1}.items():
        if smoke and every == 10:
            continue
        overrides = ("loss=dpo", f"sync_every={every}", f"reference_sync={str(every > 0).lower()}")
        arms[name] = settings.arm(fixed=tuple(f"stages.warmup.{entry}" for entry in overrides))
    config.sweep = settings.sweep(seeds=(0,), arms=arms)


def _first(config: ConfigDict, smoke: bool) -> ConfigDict:
    """K in 0, 20 and 60 against GRPO that goes on to 100 steps, each with two rates tried."""
    if not smoke:
        config.data.dev.limit, config.data.test.limit = 256, 512
        config.compute.max_num_seqs = 1024
        # About what 25 steps of GRPO cost: a GPU has them as soon as a laptop 96 pairs.
        config.stages.collect.update(prompts=512, max_pairs=512)
        config.stages.dpo.batch_size = 16
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
