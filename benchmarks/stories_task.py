"""Try a difficulty of procedural:stories: SFT of the config smollm2 on its worked answers, then
accuracy on dev problems.

    g2d run --config benchmarks/stories_task.py:steps=1-2,numbers=20,path=FOLDER --workdir DIR

docs/benchmarks/stories-task.md has the candidates and what came out.
"""

from ml_collections import ConfigDict

from g2d_jax import config as settings
from g2d_jax.config_load import choices, resolve


def get_config(arg: str = "") -> ConfigDict:
    """Give SFT and an evaluation on stories. arg: steps=N or N-M, numbers=N, path=FOLDER."""
    chosen = choices(arg, steps="1-2", numbers=20, path="")
    config = resolve(f"smollm2:path={chosen.path}" if chosen.path else "smollm2")
    config.unlock()
    config.name = "stories-task"
    stories = f"procedural:stories:steps={chosen.steps},numbers={chosen.numbers}"
    sft = config.stages.sft
    for source in (config.data.train, config.data.dev, config.data.test, sft.data):
        source.path = stories
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
