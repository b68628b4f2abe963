"""Try a difficulty of stories: SFT of the config smollm2 on its worked answers, then accuracy on dev
problems.

    python examples/smollm2/stories.py FOLDER --steps 1-2 --numbers 20
    g2d run --config benchmarks/stories_task.py:stories=FOLDER --workdir DIR

docs/benchmarks.md has the rule of choice and the result.
"""

from ml_collections import ConfigDict

from g2d_jax import config as settings
from g2d_jax.recipes.config_load import resolve


def get_config(arg: str = "") -> ConfigDict:
    """Give SFT and an evaluation on stories. arg: that of the config smollm2."""
    config = resolve(f"smollm2:{arg}")
    config.unlock()
    config.name = "stories-task"
    sft = config.stages.sft
    drawn = settings.sampling(40)
    evaluate = settings.evaluate(
        policies=("sft",),
        split="dev",
        num_generations=2,
        pass_at=(1, 2),
        greedy=False,
        sampling=drawn,
    )
    config.stages = {"sft": sft, "evaluate": evaluate}
    return config
