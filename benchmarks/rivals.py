"""Which recipe is best for a budget? GRPO and its cheaper rivals at equal FLOPs, tuned alike.

    g2d sweep --config benchmarks/rivals.py:part=tune --workdir DIR        # processes may share DIR
    python benchmarks/rivals_table.py write DIR tune 40 benchmarks/results/rivals          # of each seed
    python benchmarks/rivals_table.py choose benchmarks/results/rivals demo benchmarks/results/rivals/demo-rates.json
    g2d sweep --config benchmarks/rivals.py:part=judge --workdir DIR --seeds 101
    python benchmarks/rivals_table.py write DIR judge 101 benchmarks/results/rivals

and the same with scale=smollm2 (task=arithmetic or stories), whose files begin with the task.
part=pilot trains every arm on one other seed: `rivals_table.py pilot DIR` prints what each costs,
which is where the numbers of `DEMO` are from. Those of `SMOLLM2` are estimates until its pilot ran,
before it is tuned. docs/rivals.md has the plan of analysis.

All arms start from one policy for each seed and have constant learning rates, so that the budgets
of an online arm are checkpoints of one run. Of offline arms each budget buys prompts of its own.
"""

import itertools
import json
import runpy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ml_collections import ConfigDict

from g2d_jax import config as settings
from g2d_jax.recipes.config_load import choices, resolve

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results" / "rivals"
NAMES = ("low", "mid", "high")
"""Begin the names of the stages of each budget's rollouts and DPO."""
RATE = "stages.warmup.optimizer.learning_rate"


@dataclass(frozen=True)
class Arm:
    """A recipe. steps: of an online arm, the updates that each budget buys. prompts: of an offline
    arm, those that one of its rounds samples at each budget; 0 where its warm-up alone costs more.
    extra: further checkpoints of an online arm. warmup: K, the updates of GRPO before an offline
    arm's rollouts. overrides: FIELD=VALUE.
    """

    steps: tuple[int, ...] = ()
    prompts: tuple[int, ...] = ()
    extra: tuple[int, ...] = ()
    warmup: int = 0
    rounds: int = 1
    overrides: tuple[str, ...] = ()

    def policies(self, budgets: tuple[int, ...]) -> dict[str, int]:
        """Map each policy to judge to its budget, in updates of GRPO; 0 for one beside the
        budgets."""
        if self.steps:
            bought = dict(zip(self.steps, budgets, strict=True))
            steps = sorted({*self.steps, *self.extra})
            return {f"warmup@{step}": bought.get(step, 0) for step in steps}
        found = {"warmup": 0} if self.warmup else {}
        last = "again_dpo" if self.rounds == 2 else "dpo"
        for name, count, budget in zip(NAMES, self.prompts, budgets, strict=False):
            if count:
                found[f"{name}_{last}"] = budget
        return found


@dataclass(frozen=True)
class Scale:
    """A model with its task. budgets: in updates of GRPO with 8 rollouts a prompt, whose FLOPs they
    stand for. rates: the learning rates that every arm tries. middle: the place of the budget that
    rates are chosen at."""

    budgets: tuple[int, ...]
    middle: int
    rates: tuple[str, ...]
    tuning: tuple[int, ...]
    judging: tuple[int, ...]
    arms: Mapping[str, Arm]


def _online_dpo(sync_every: int) -> tuple[str, ...]:
    """Return the overrides of DPO whose sampling policy and reference follow every so many
    updates."""
    fields = ("loss=dpo", f"sync_every={sync_every}", "reference_sync=true")
    return tuple(f"stages.warmup.{entry}" for entry in fields)


TWO_UPDATES = ("stages.warmup.num_iterations=2", "stages.warmup.sync_every=2")
# RAFT's loss is a mean over tokens, GRPO's a sum: the large epsilon of Adam is for the latter.
RAFT = ("stages.warmup.loss=raft", "stages.warmup.optimizer.eps=1e-8")


def _two_rollouts(prompts: int) -> tuple[str, ...]:
    return ("stages.warmup.num_generations=2", f"stages.warmup.prompts_per_step={prompts}")


DEMO = Scale(
    budgets=(30, 75, 160),
    middle=1,
    rates=("1e-4", "2e-4", "4e-4", "8e-4"),
    tuning=(40, 41, 42, 43),
    judging=tuple(range(101, 113)),
    arms={
        "grpo": Arm((30, 75, 160), extra=(20, 50, 110, 240)),
        "grpo_n2": Arm((50, 120, 230), overrides=_two_rollouts(128)),
        "grpo_2x": Arm((32, 78, 176), overrides=TWO_UPDATES),
        "raft": Arm((31, 58, 96), overrides=RAFT),
        "dpo_s1": Arm((55, 130, 245), overrides=_online_dpo(1)),
        "dpo_s10": Arm((50, 110, 200), overrides=_online_dpo(10)),
        "dpo_2rounds": Arm(prompts=(430, 860, 1500), rounds=2),
        "offline": Arm(prompts=(820, 1640, 2840)),
        "g2d_k5": Arm(prompts=(650, 1450, 2630), warmup=5),
        "g2d_k20": Arm(prompts=(390, 1770, 3800), warmup=20),
        "g2d_k60": Arm(prompts=(0, 640, 3790), warmup=60),
    },
)
SMOLLM2 = Scale(
    budgets=(30, 60),
    middle=0,
    rates=("5e-6", "1e-5", "2e-5"),
    tuning=(0, 1),
    judging=tuple(range(101, 109)),
    arms={
        "grpo": Arm((30, 60), extra=(20, 45, 75)),
        "grpo_n2": Arm((30, 60), overrides=_two_rollouts(32)),
        "raft": Arm((30, 60), overrides=RAFT),
        "dpo_s10": Arm((30, 60), overrides=_online_dpo(10)),
        "offline": Arm(prompts=(138, 276)),
        "g2d_k20": Arm(prompts=(46, 184), warmup=20),
    },
)
SCALES = {"demo": DEMO, "smollm2": SMOLLM2}


def get_config(arg: str = "") -> ConfigDict:
    """Give a part of the study. arg: scale=demo|smollm2, part=pilot|tune|judge, preset=full|smoke,
    task=arithmetic|stories and path=MODEL of smollm2, choice=FILE of the rates for judge."""
    chosen = choices(
        arg,
        scale=("demo", "smollm2"),
        part=("pilot", "tune", "judge"),
        preset=("full", "smoke"),
        task=("arithmetic", "stories"),
        path="",
        choice="",
    )
    smoke = chosen.preset == "smoke"
    task = chosen.task if chosen.scale == "smollm2" else "demo"
    config = _demo(smoke) if task == "demo" else _smollm2(task, chosen.path, smoke)
    scale = shrunk(SCALES[chosen.scale]) if smoke else SCALES[chosen.scale]
    config.name = f"rivals-{task}{'-smoke' if smoke else ''}-{chosen.part}"
    _add_offline_stages(config)
    file = Path(chosen.choice) if chosen.choice else RESULTS / f"{task}-rates.json"
    rates = _chosen(file) if chosen.part == "judge" else {}
    seeds = {"pilot": (99,), "tune": scale.tuning, "judge": scale.judging}[chosen.part]
    arms = {}
    for name, arm in scale.arms.items():
        if chosen.part == "judge" and rates[name] is None:
            continue  # every rate ruined a tuning run
        # the pilot takes the second rate, or the only one
        tried = {"pilot": scale.rates[:2][-1:], "tune": scale.rates, "judge": (rates.get(name),)}
        arms[name] = _arm(config, scale, arm, chosen.part, tried[chosen.part])
    config.sweep = settings.sweep(seeds=seeds, arms=arms)
    return config


def _demo(smoke: bool) -> ConfigDict:
    config = resolve(f"demo:preset={'smoke' if smoke else 'full'}")
    config.unlock()
    if not smoke:
        config.data.dev.limit, config.data.test.limit = 512, 1024
    return config


def _smollm2(task: str, path: str, smoke: bool) -> ConfigDict:
    study = runpy.run_path(str(FOLDER / "smollm2_study.py"))
    config: ConfigDict = study["_base"](path, "smoke" if smoke else "full", task)
    stages = config.stages
    if task == "arithmetic":
        config.data.dev.limit = 16 if smoke else 384  # 160 without those of test
        for name in ("warmup", "collect", "evaluate"):
            stages[name].sampling.stop = ("\n\n",)
    if not smoke:
        stages.collect.update(num_generations=16, pairs_per_prompt=6, max_pairs=None)
    del stages["dev"]
    return config


def shrunk(scale: Scale) -> Scale:
    """Return the same arms, too short to learn much."""
    arms = {}
    for name, arm in scale.arms.items():
        small = replace(arm, steps=arm.steps and (2, 4), prompts=arm.prompts and (0, 24))
        small = replace(small, extra=arm.extra and (6,))
        overrides = [entry for entry in arm.overrides if "prompts_per_step" not in entry]
        arms[name] = replace(small, warmup=min(arm.warmup, 2), overrides=tuple(overrides))
    small = replace(scale, budgets=(2, 4), rates=scale.rates[:1], middle=1, arms=arms)
    return replace(small, tuning=(0,), judging=(1, 2))


def _add_offline_stages(config: ConfigDict) -> None:
    """Put rollouts and DPO of each budget, of one round and of two, in place of those there."""
    stages = config.stages
    evaluate, collect, dpo = stages.evaluate, stages.collect, stages.dpo
    for name in ("evaluate", "collect", "dpo"):
        del stages[name]
    dpo.optimizer.update(schedule="constant", warmup_steps=0)
    stages.warmup.keep = ()
    for name in NAMES:
        for first, policy in (("", "warmup"), ("again_", f"{name}_dpo")):
            pairs, trained = f"{name}_{first}collect", f"{name}_{first}dpo"
            stages[pairs] = collect.copy_and_resolve_references()
            stages[trained] = dpo.copy_and_resolve_references()
            stages[pairs].policy = stages[trained].policy = policy
            stages[trained].preferences = pairs
    evaluate.greedy = False
    evaluate.pass_at = (1,)
    stages.evaluate = evaluate


def _arm(config: ConfigDict, scale: Scale, arm: Arm, part: str, rates: Sequence[str]) -> ConfigDict:
    """Return the points of an arm, one a rate."""
    cold = "sft" if "sft" in config.stages else "init"
    stages = [name for name in ("sft", "warmup") if name in config.stages]
    fixed = list(arm.overrides)
    if arm.steps:
        policies = _online(arm, scale, part)
        steps = sorted(int(policy.partition("@")[2]) for policy in policies)
        fixed.append(f"stages.warmup.steps={steps[-1]}")
        fixed.append(f"stages.warmup.keep={','.join(map(str, steps))}")
        fields = (RATE,)
    else:
        bought = [place for place, count in enumerate(arm.prompts) if count]
        if part != "judge":
            bought = [scale.middle]
        rounds = ("", "again_")[: arm.rounds]
        for place, first in itertools.product(bought, rounds):
            fixed.append(f"stages.{NAMES[place]}_{first}collect.prompts={arm.prompts[place]}")
            stages += [f"{NAMES[place]}_{first}collect", f"{NAMES[place]}_{first}dpo"]
        fixed.append(f"stages.warmup.steps={arm.warmup}")
        policies = ["warmup"] * bool(arm.warmup)
        # A tuning run is watched after its first round too.
        seen = rounds if part == "tune" else rounds[-1:]
        policies += [f"{NAMES[place]}_{first}dpo" for place in bought for first in seen]
        fields = tuple(f"stages.{name}.optimizer.learning_rate" for name in stages if "dpo" in name)
    if part != "pilot":
        stages.append("evaluate")
        fixed.append(f"stages.evaluate.policies={','.join([cold, *policies])}")
        fixed.append(f"stages.evaluate.split={'dev' if part == 'tune' else 'test'}")
    return settings.arm(
        fixed=tuple(fixed), zip=_axes(arm, fields, rates), stages=tuple(dict.fromkeys(stages))
    )


def _online(arm: Arm, scale: Scale, part: str) -> list[str]:
    """List the checkpoints of an online arm that are of use."""
    middle = arm.steps[scale.middle]
    if part == "judge":
        return list(arm.policies(scale.budgets))
    if part == "tune":
        return [f"warmup@{middle * third // 3}" for third in (1, 2, 3)]
    last = max(*arm.steps, *arm.extra)
    return [f"warmup@{step}" for step in [*range(10, last, 10), last]]


def _axes(arm: Arm, fields: Sequence[str], rates: Sequence[str]) -> tuple[str, ...]:
    """Vary the rate of an arm: of DPO after a warm-up it is half the warm-up's, which was the best
    or next to it in the study before this one."""
    axes = dict.fromkeys(fields, rates)
    if arm.warmup:
        halves = [f"{float(rate) / 2:g}" for rate in rates]
        axes = {RATE: rates, **dict.fromkeys(fields, halves)}
    return tuple(f"{name}={','.join(values)}" for name, values in axes.items())


def _chosen(file: Path) -> dict[str, str]:
    """Return arm -> the rate that part=tune chose. Raises ValueError where nothing was chosen."""
    if not file.exists():
        raise ValueError(
            f"{file} is not there: run part=tune to its end, then `python "
            "benchmarks/rivals_table.py choose DIR FILE` writes it"
        )
    return {name: arm["rate"] for name, arm in json.loads(file.read_text())["arms"].items()}
