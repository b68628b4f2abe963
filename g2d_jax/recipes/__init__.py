"""All hyper-parameters of the recipes for real models, in one place, with their sources.

    "qwen2.5-7b:lora=32"  ─► recipe(name, arg)         ─► a run of G2D, or of GRPO alone
    --model, --problems   ─► own(model, problems, …)   ─► a run of G2D
    configs/sweep-k.py    ─► the same over K
    configs/bridging-*.py ─► maths(), adam(), as_published(), … with the stages of that paper's rows

The G2D paper (arXiv 2605.21266) states K, the models, MATH-500 as the test, and a cost of K = 150
of about a fourth of GRPO. It states no hyper-parameters. "Bridging" (arXiv 2506.21495) states those
of GRPO and DPO with verifiable rewards (table 4, verifiable tasks, and 3.2); they fill the gaps.
"chosen": in neither paper. Bridging's code: its authors' published recipe
(github.com/facebookresearch/fairseq2, recipes/lm/_online_finetune).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any

from ml_collections import ConfigDict

from g2d_jax import config as settings
from g2d_jax.config.choices import choices

LEARNING_RATE = 1e-6  # Bridging, table 4
# chosen: adapters need ten times the rate of all parameters (Schulman et al. 2025)
LORA_LEARNING_RATE = 1e-5
# chosen: as in "LoRA Without Regret", with the product scaled by alpha / rank
LORA_ALPHA = 32.0
ADAM_EPS = 1e-4  # Bridging, table 4
MAX_GRAD_NORM = 1.0  # Bridging, table 4
DPO_BETA = 0.1  # Bridging, table 4
KL_COEF = 0.001  # Bridging, table 4: beta of GRPO
RESPONSE = 2048  # Bridging, table 4: tokens; here of the response only
PROMPT = 1024  # chosen: longer prompts are dropped and counted
PROMPTS_PER_STEP = 64  # Bridging, table 4: batch size
GROUP = 8  # Bridging, table 5: responses to a prompt; 8 is the best of 4, 8 and 12
DECIDING = (0.6, 0.9)  # Bridging, 3.2: temperature and top-p of evaluation; in training both are 1
COLLECTED = 8192  # chosen: prompts for G2D's pairs, or all if there are fewer
# Bridging, 3.2: one correct and one incorrect response; G2D does not state its rule
PAIRS_PER_PROMPT = 1
PAIRS_PER_STEP = 64  # chosen: GRPO's number of prompts; one epoch
# chosen: GRPO alone makes this many times K updates; in G2D, at K = 150, it costs 4 times G2D
GRPO_STEPS = 4
DEV = 500  # chosen: held-out training problems, for choosing settings
SAMPLES = 4  # chosen: responses to a test problem, in addition to a greedy one
NUMINAMATH_TEST = 1980  # Bridging, 3.2
K = 150  # G2D's of Qwen2.5-7B; chosen for your own model
# chosen: parameters of your own model, between SmolLM2's 135M and the smallest of MODELS. Below it
# a laptop's processor can run the recipe
SMALL = 400_000_000


@dataclass(frozen=True)
class Model:
    """A model of the recipes. variants: name -> hub id, the default first. k: updates of G2D's
    warm-up.

    tokenizer: settings that differ from the defaults.
    """

    variants: dict[str, str]
    k: int
    tokenizer: dict[str, bool | str] = field(default_factory=dict)


def _qwen25(size: str) -> Model:
    # K: G2D's of Qwen2.5-7B, for the other sizes chosen.
    return Model({"base": f"Qwen/Qwen2.5-{size}", "instruct": f"Qwen/Qwen2.5-{size}-Instruct"}, 150)


def _qwen3(size: str) -> Model:
    # K: chosen, as for Qwen2.5. Thinking is off because its texts are longer than RESPONSE.
    variants = {"chat": f"Qwen/Qwen3-{size}", "base": f"Qwen/Qwen3-{size}-Base"}
    return Model(variants, 150, {"enable_thinking": False})


def _qwen35(size: str) -> Model:
    # As for Qwen3, whose templates have the same switch.
    variants = {"chat": f"Qwen/Qwen3.5-{size}", "base": f"Qwen/Qwen3.5-{size}-Base"}
    return Model(variants, 150, {"enable_thinking": False})


def _llama(size: str) -> Model:
    # K: G2D's of Llama-3.1-8B, chosen for 1B. Instruct first: Bridging uses it, and the base model
    # has no template.
    return Model(
        {"instruct": f"meta-llama/Llama-{size}-Instruct", "base": f"meta-llama/Llama-{size}"}, 500
    )


def _smollm3(size: str) -> Model:
    # K: chosen, as for Qwen2.5. The template keeps its system message, which turns thinking off.
    variants = {
        "chat": f"HuggingFaceTB/SmolLM3-{size}",
        "base": f"HuggingFaceTB/SmolLM3-{size}-Base",
    }
    return Model(variants, 150, {"enable_thinking": False, "system": "default"})


def _gemma3(size: str) -> Model:
    # K: chosen, as for Qwen2.5. Instruct first: the base model has no template.
    return Model(
        {"instruct": f"google/gemma-3-{size}-it", "base": f"google/gemma-3-{size}-pt"}, 150
    )


def _olmo3(size: str) -> Model:
    # K: chosen, as for Qwen2.5. The base model has no template; Think's texts are longer than
    # RESPONSE.
    return Model(
        {"instruct": f"allenai/Olmo-3-{size}-Instruct", "base": f"allenai/Olmo-3-1025-{size}"}, 150
    )


def _phi4_mini() -> Model:
    # K: chosen, as for Qwen2.5. PROMPT and RESPONSE fit its 4,096 positions without long factors.
    return Model({"instruct": "microsoft/Phi-4-mini-instruct"}, 150)


MODELS: dict[str, Model] = {
    "qwen2.5-0.5b": _qwen25("0.5B"),
    "qwen2.5-1.5b": _qwen25("1.5B"),
    "qwen2.5-7b": _qwen25("7B"),
    "qwen3-0.6b": _qwen3("0.6B"),
    "qwen3-4b": _qwen3("4B"),
    "qwen3-8b": _qwen3("8B"),
    "llama-3.2-1b": _llama("3.2-1B"),
    "llama-3.1-8b": _llama("3.1-8B"),
    "smollm3-3b": _smollm3("3B"),
    "gemma-3-1b": _gemma3("1b"),
    "gemma-3-4b": _gemma3("4b"),
    "olmo-3-7b": _olmo3("7B"),
    "phi-4-mini": _phi4_mini(),
    "qwen3-30b-a3b": _qwen3("30B-A3B"),
    "qwen3.5-0.8b": _qwen35("0.8B"),
    "qwen3.5-4b": _qwen35("4B"),
}

TRAIN = {"gsm8k": "gsm8k:train"}
"""Training sets whose plain name is another split. Other names are sources (data/problems.py)."""


def recipe(name: str, arg: str) -> ConfigDict:
    """Build the run of a model in MODELS from a config's argument.

    method=g2d|grpo; k=K of the warm-up; steps=N of method=grpo, 0 for GRPO_STEPS * k; variant of
    the model, or path=FOLDER_OR_HUB_ID instead; lora=RANK, 0 trains all parameters;
    train=math|gsm8k|numinamath and test=math500|amc23|gsm8k|numinamath, or any other source;
    length, tokens of a response; moments of Adam. Raises ValueError for unknown or conflicting
    choices.
    """
    model = MODELS[name]
    chosen = choices(
        arg,
        method=("g2d", "grpo"),
        k=model.k,
        steps=0,
        variant=tuple(model.variants),
        path="",
        lora=0,
        train="math",
        test="math500",
        length=RESPONSE,
        moments=("float32", "bfloat16"),
    )
    for choice, least in (("k", 0), ("steps", 0), ("lora", 0), ("length", 1)):
        if getattr(chosen, choice) < least:
            raise ValueError(
                f"choice {choice!r} must be at least {least}, got {getattr(chosen, choice)}"
            )
    if chosen.steps and chosen.method == "g2d":
        raise ValueError("choice 'steps' needs method=grpo; for G2D's warm-up set k")
    if chosen.method == "grpo" and not (chosen.steps or chosen.k):
        raise ValueError(
            f"method=grpo makes {GRPO_STEPS} * k updates: with k=0 set their number, steps=N"
        )
    config = maths(chosen.path or model.variants[chosen.variant], chosen.train, chosen.test)
    config.name = f"{name}-{chosen.variant}-{chosen.method}"
    config.tokenizer.update(model.tokenizer)
    if chosen.lora:
        config.name += f"-lora{chosen.lora}"
        # Frozen parameters are only read: in bfloat16, like the published weights.
        config.lora.update(rank=chosen.lora, alpha=LORA_ALPHA, base_dtype="bfloat16")
    if chosen.method == "g2d":
        _g2d(config, chosen)
    else:
        _grpo(config, chosen)
    return config


def own(model: str, problems: str, template: str | None, parameters: int) -> ConfigDict:
    """Build a G2D run for your own model with `parameters` parameters, on your own problems. They
    are split into train, dev and test by id hash; nothing reads dev.

    template: as in tokenizer.prompt_template. None: Bridging's prompt, in the chat template if the
    model has one. Below SMALL parameters, batches, lengths and rates differ (`_small`).
    """
    config = maths(model, problems, problems)
    config.name = f"{PurePath(model).name}-g2d"
    config.data.test.update(path=config.data.train.path, split="test")
    config.data.dev = settings.source("")
    for split in ("train", "test"):
        config.data[split].on_error = "raise"  # your own file, which you can fix
    if template is None:
        config.tokenizer.chat = True
    else:
        config.tokenizer.prompt_template = template
    _g2d(config, SimpleNamespace(k=K, length=RESPONSE, lora=0, moments="float32"))
    if parameters < SMALL:
        _small(config)
    return config


def _small(config: ConfigDict) -> None:
    """Apply the settings of configs/smollm2.py, tested on a model of 135M parameters. Lengths are
    chosen for worked answers in words."""
    stages = config.stages
    config.dtype = "float32"
    config.reward.workers = 2
    config.compute.max_num_seqs = 64  # otherwise all rows at once: 12 GiB of memory
    config.data.max_prompt_length = 512
    config.data.test.limit = 128
    stages.warmup.update(steps=10, prompts_per_step=8, beta=0.0)
    stages.warmup.optimizer = settings.optimizer(1e-5)
    stages.collect.update(prompts=256, max_pairs=96)
    stages.dpo.batch_size = 8
    stages.dpo.optimizer = settings.optimizer(5e-6, schedule="cosine", warmup_steps=1)
    for name in ("warmup", "collect", "evaluate"):
        stages[name].sampling.max_new_tokens = 256


def _g2d(config: ConfigDict, chosen: SimpleNamespace) -> None:
    """Add the stages of G2D (section 3): warm-up, pairs, offline DPO, each under its usual name."""
    config.stages.warmup = _online(chosen, chosen.k)
    config.stages.collect = settings.collect(
        prompts=COLLECTED,
        num_generations=GROUP,
        pairs_per_prompt=PAIRS_PER_PROMPT,
        sampling=settings.sampling(chosen.length),
    )
    config.stages.dpo = settings.offline(
        beta=DPO_BETA,
        batch_size=PAIRS_PER_STEP,
        optimizer=_optimizer(chosen),
    )
    config.stages.evaluate = _evaluate(("init", "warmup", "dpo"), chosen)


def _grpo(config: ConfigDict, chosen: SimpleNamespace) -> None:
    config.stages.grpo = _online(chosen, chosen.steps or GRPO_STEPS * chosen.k)
    config.stages.evaluate = _evaluate(("init", "grpo"), chosen)


def _online(chosen: SimpleNamespace, steps: int) -> ConfigDict:
    return settings.online(
        policy="init",
        steps=steps,
        prompts_per_step=PROMPTS_PER_STEP,
        num_generations=GROUP,
        beta=KL_COEF,
        sampling=settings.sampling(chosen.length),
        optimizer=_optimizer(chosen),
    )


def _evaluate(policies: tuple[str, ...], chosen: SimpleNamespace) -> ConfigDict:
    return settings.evaluate(
        policies=policies, num_generations=SAMPLES, sampling=deciding(chosen.length)
    )


def _optimizer(chosen: SimpleNamespace) -> ConfigDict:
    rate = LORA_LEARNING_RATE if chosen.lora else LEARNING_RATE
    return adam(rate, moment_dtype=chosen.moments)


# Shared with the configs of the other paper's rows


def real(path: str) -> ConfigDict:
    """Return a run of a published model, without problems and stages."""
    config = settings.base()
    config.model.path = path
    config.dtype = "bfloat16"
    config.data.max_prompt_length = PROMPT
    return config


def maths(path: str, train: str, test: str, *, dev: int = DEV) -> ConfigDict:
    """Return a `real` run on maths problems with Bridging's prompt; dev: training problems held out
    as data.dev."""
    config = real(path)
    config.tokenizer.prompt_template = "paper"
    source = TRAIN.get(train, train)
    config.data.train = settings.source(source, "train")
    config.data.dev = settings.source(source, "dev", dev)
    config.data.test = settings.source(test)
    # NuminaMath has one split, divided here; the other suites are test problems.
    if test.partition(":")[0] == "numinamath":
        config.data.test.update(split="test", limit=NUMINAMATH_TEST)
    # A few rows have almost no text; they are counted.
    for split in ("train", "dev", "test"):
        config.data[split].on_error = "skip"
    config.reward.workers = 8
    return config


def adam(learning_rate: float = LEARNING_RATE, **changes: Any) -> ConfigDict:
    """Return AdamW's settings for verifiable rewards: a constant rate, no weight decay (chosen)."""
    return settings.optimizer(learning_rate, eps=ADAM_EPS, max_grad_norm=MAX_GRAD_NORM, **changes)


AUTHORS = ("code", "paper")
"""The sources that `as_published` accepts; the first is the default."""


def as_published(stage: ConfigDict, source: str) -> None:
    """Set what Bridging's tables leave open for an online stage: the losses' normalisers, the rest
    of the optimiser.

    source: "code" uses its authors' recipe. Pair losses are summed over all prompts of a batch;
    GRPO's is the mean over the group, with advantages over their standard deviation + 1e-6. Adam
    has betas 0.9 and 0.95, weight decay 0.1, and a cosine to a fifth of the peak. "paper" uses
    equations 1, 3 and 4 as printed, and otherwise the defaults of `config.online` and
    `config.optimizer`. In both, NLL is a mean over tokens, and GRPO's loss is not divided by length
    (5.1).
    """
    if source == "code":
        stage.dpo.normalizer = "prompts"
        stage.update(loss_type="seq-mean-token-sum", scale_rewards="group", scale_rewards_eps=1e-6)
        stage.optimizer.update(b2=0.95, weight_decay=0.1, schedule="cosine", min_lr_ratio=0.2)


def deciding(length: int = RESPONSE) -> ConfigDict:
    """Return the sampling settings for choosing and comparing policies."""
    temperature, top_p = DECIDING
    return settings.sampling(length, temperature=temperature, top_p=top_p)
