"""The cause, apart: difficulty and diversity of the pairs varied each by itself, at one policy and number of pairs.

Command:   g2d sweep --config cause --workdir runs/study     (the directory of sweep-k:task=demo: what it has is used)
Hardware:  2 CPU cores
Result:    cause.html in the directory; the question, the predictions and the analysis are in docs/cause.md

The policy is the demo's at K = 10. Difficulty is a window of pass rates; diversity is the number of prompts that equally
many pairs, up to eight of a prompt, are drawn from. Every pair of the 3 x 2 settings differs in text from all others.
Choices: preset=full|smoke; seeds=N.
"""

from ml_collections import ConfigDict

from g2d_jax import config as settings
from g2d_jax.config_load import choices, resolve

WINDOWS = {"hard": (0.15, 0.35), "middle": (0.4, 0.6), "easy": (0.65, 0.85)}
"""Pass rates among the 32 responses to a prompt. Hard and easy ones have the same reward variance."""


def get_config(arg: str = "") -> ConfigDict:
    """The study; the arms of one window or of one diversity show the same settings, each compared with its first."""
    chosen = choices(arg, preset=("full", "smoke"), seeds=0)
    smoke = chosen.preset == "smoke"
    config = resolve(f"ablations:preset={chosen.preset},task=demo,seeds={chosen.seeds or (1 if smoke else 5)}")
    config.unlock()
    config.name = config.name.replace("ablations-demo", "cause")
    prompts = (128, 64) if smoke else (4096, 512)
    config.stages.pool.num_generations = 8 if smoke else 32
    config.stages.collect.pairs_per_prompt = 8
    windows = {"hard": (0, 0.99), "middle": (0, 1), "easy": (0.01, 1)} if smoke else WINDOWS
    lowest, highest = (",".join(map(str, bounds)) for bounds in zip(*windows.values(), strict=True))
    bounds = (f"stages.collect.min_pass_rate={lowest}", f"stages.collect.max_pass_rate={highest}")
    config.sweep.arms = {
        **{
            name: settings.arm(
                fixed=(f"stages.collect.min_pass_rate={low}", f"stages.collect.max_pass_rate={high}"),
                product=(f"stages.pool.prompts={prompts[0]},{prompts[1]}",),
            )
            for name, (low, high) in windows.items()
        },
        **{
            name: settings.arm(fixed=(f"stages.pool.prompts={count}",), zip=bounds)
            for name, count in zip(("many-prompts", "few-prompts"), prompts, strict=True)
        },
    }
    return config
