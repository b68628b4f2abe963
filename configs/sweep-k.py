"""How many online steps K are enough: accuracy and compute over K, against GRPO that goes on, at equal compute.

Command:   g2d sweep --config sweep-k --workdir runs/study     (again, or on another machine, to continue or share)
           g2d sweep --config sweep-k:preset=qwen2.5-7b --workdir /shared/study
Hardware:  2 CPU cores for the embedded task; the 7B and 8B presets have not been run: eight devices of 80 GB are meant
Result:    sweep-k.html in the directory; that of the embedded task is written down in docs/evidence.md

Choices: preset=full|smoke (the embedded task), qwen2.5-7b, llama-3.1-8b; seeds=N; train=SOURCE of the real presets.
"""

from ml_collections import ConfigDict

from g2d_jax import config as settings
from g2d_jax.resolve import choices, resolve

# K and the learning rates of GRPO alone; the warm-up of G2D has the second one. The largest K of the real presets,
# and what else they set, are the papers': 150 and 500 steps (arXiv 2605.21266), the rest arXiv 2506.21495, since the
# former does not report it. The smaller K are a scale below.
GRIDS = {
    "full": ((0, 5, 10, 20, 40, 80, 160), (3e-5, 1e-4, 3e-4)),
    "smoke": ((0, 2, 4), (3e-5, 1e-4)),
    "qwen2.5-7b": ((0, 25, 50, 100, 150, 300, 600), (3e-7, 1e-6, 3e-6)),
    "llama-3.1-8b": ((0, 50, 100, 250, 500, 1000), (3e-7, 1e-6, 3e-6)),
}
MODELS = {"qwen2.5-7b": "Qwen/Qwen2.5-7B", "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct"}
MATH = "hub:nlile/hendrycks-MATH-benchmark:train"


def get_config(arg: str = "") -> ConfigDict:
    """The study: one warm-up trajectory for each seed and learning rate carries all K, and one arm chooses K itself."""
    chosen = choices(arg, preset=tuple(GRIDS), seeds=0, train=MATH)
    smoke, real = chosen.preset == "smoke", chosen.preset in MODELS
    config = _real(MODELS[chosen.preset], chosen.train) if real else _embedded(smoke)
    config.name = "sweep-k" if chosen.preset == "full" else f"sweep-k-{chosen.preset}"
    warmup, evaluate = config.stages.warmup, config.stages.evaluate
    warmup.keep = ()
    config.stages.dev = evaluate.copy_and_resolve_references()
    config.stages.dev.split = "dev"  # what is chosen is chosen here; the test problems are for reporting alone
    grid, rates = GRIDS[chosen.preset]
    warmup.optimizer.learning_rate = rates[1]
    steps = f"stages.warmup.steps={_listed(grid)}"
    alone = tuple(name for name in ("sft", "warmup", "evaluate", "dev") if name in config.stages)
    config.sweep = settings.sweep(
        seeds=tuple(range(chosen.seeds or (1 if smoke else 5))),
        arms={
            "adaptive": settings.arm(fixed=("stages.warmup.stop=adaptive", f"stages.warmup.steps={grid[-1]}")),
            "g2d": settings.arm(product=(steps,)),
            "grpo": settings.arm(
                product=(f"stages.warmup.optimizer.learning_rate={_listed(rates)}", steps),
                stages=alone,
                fixed=("stages.evaluate.policies=warmup", "stages.dev.policies=warmup"),
            ),
        },
    )
    return config


def _embedded(smoke: bool) -> ConfigDict:
    config = resolve("demo:preset=smoke" if smoke else "demo")
    config.unlock()
    config.stages.evaluate.greedy = not smoke
    if smoke:
        config.stages.warmup.adaptive.min_steps = 3
        config.stages.dpo.signal_pairs = 16
    return config


def _real(model: str, train: str) -> ConfigDict:
    """From the pretrained model, without supervised fine-tuning; evaluated on MATH-500."""
    config = settings.base()
    config.dtype = "bfloat16"
    config.model.path = model
    config.tokenizer.prompt_template = "paper"
    config.data.train = settings.source(train, "train")
    config.data.dev = settings.source(train, "dev", 500)
    config.data.test = settings.source("math500")
    config.data.max_prompt_length = 1024
    config.reward.workers = 8
    drawn = settings.sampling(2048)
    config.stages.warmup = settings.online(policy="init", prompts_per_step=64, beta=0.001, sampling=drawn)
    config.stages.collect = settings.collect(prompts=8192, pairs_per_prompt=1, sampling=drawn)
    config.stages.dpo = settings.offline(beta=0.1, optimizer=settings.optimizer(1e-6, eps=1e-4))
    config.stages.evaluate = settings.evaluate(
        policies=("init", "warmup", "dpo"), sampling=settings.sampling(2048, temperature=0.6, top_p=0.9)
    )
    return config


def _listed(values: tuple[float, ...]) -> str:
    return ",".join(str(value) for value in values)
