"""The cause, apart: difficulty and diversity of the pairs varied each by itself, at one policy and
number of pairs.

Command:   g2d sweep --config benchmarks/cause.py --workdir runs/study     (of sweep-k: what it has is used)
Hardware:  2 CPU cores
Result:    cause.html in the directory; the question, the predictions and the analysis are in docs/benchmarks.md

The policy is the demo's at K = 10. Difficulty is a window of pass rates; diversity is the number of
prompts that equally many pairs, up to eight of each, are drawn from. Choices: preset=full|smoke;
seeds=N.
"""

from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict

from g2d_jax import config as settings
from g2d_jax.recipes.config_load import choices, resolve

ABLATIONS = Path(__file__).with_name("ablations.py")
# Pass rates among the 32 responses to a prompt (hard and easy ones have the same reward variance),
# and how many prompts are answered for many and for few of them to lie within: of the demo's, half
# as many are easy as hard.
WINDOWS = {
    "hard": (0.15, 0.35, (2048, 448)),
    "middle": (0.4, 0.6, (2048, 448)),
    "easy": (0.65, 0.85, (4096, 896)),
}
SMOKE = {"hard": (0, 0.99, (128, 64)), "middle": (0, 1, (128, 64)), "easy": (0.01, 1, (128, 96))}


def get_config(arg: str = "") -> ConfigDict:
    """The study. Each of its six settings is in two arms, which compare it with another difficulty
    and diversity."""
    chosen = choices(arg, preset=("full", "smoke"), seeds=0)
    smoke = chosen.preset == "smoke"
    seeds = chosen.seeds or (1 if smoke else 5)
    config = resolve(f"{ABLATIONS}:preset={chosen.preset},seeds={seeds}")
    config.unlock()
    config.name = config.name.replace("ablations", "cause")
    config.stages.pool.num_generations = 8 if smoke else 32
    config.stages.collect.pairs_per_prompt = 8
    windows = SMOKE if smoke else WINDOWS
    lowest, highest, prompts = zip(*windows.values(), strict=True)
    config.sweep.arms = {
        **{
            name: settings.arm(fixed=_window([low], [high]), product=(_prompts(counts),))
            for name, (low, high, counts) in windows.items()
        },
        **{
            name: settings.arm(zip=(*_window(lowest, highest), _prompts(counts)))
            for name, counts in zip(
                ("many-prompts", "few-prompts"), zip(*prompts, strict=True), strict=True
            )
        },
    }
    return config


def _window(lowest: Sequence[float], highest: Sequence[float]) -> tuple[str, str]:
    return (
        f"stages.collect.min_pass_rate={_listed(lowest)}",
        f"stages.collect.max_pass_rate={_listed(highest)}",
    )


def _prompts(counts: Sequence[int]) -> str:
    return f"stages.pool.prompts={_listed(counts)}"


def _listed(values: Sequence[float]) -> str:
    return ",".join(map(str, values))
