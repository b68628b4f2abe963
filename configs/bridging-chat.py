"""Rewards from a reward model, offline to online: every row of table 2 of arXiv 2506.21495 (1,000
WildChat prompts).

Command:   g2d run --config bridging-chat:method=s10 --workdir runs/chat-s10
           g2d export runs/chat-s10 --policy best --output s10   # then examples/alpacaeval
Hardware:  meant for one host with eight devices of 80 GB; not run at this size
Result:    report.html in the directory: rewards on held-out prompts. The paper's figures are win rates by judges.

The paper's numbers (Llama-3.1-8B-Instruct; AlpacaEval 2.0 length-controlled and Arena-Hard, two
judges each):

                  AlpacaEval     Arena-Hard     AlpacaEval    Arena-Hard
    method=       GPT-4-1106     GPT-4-1106     GPT-4o        GPT-4o
    (the model)   27.3           21.3           32.0          27.8
    offline       53.2           38.3           39.4          38.2
    s10           81.6           59.4           61.1          43.0
    s5            78.7           60.7           58.5          49.8
    s1            83.1           60.1           62.8          50.4
    grpo          75.2           55.0           59.1          54.3

Choices: method; model=llama-3.1-8b-instruct|qwen2.5-7b, or path=FOLDER_OR_HUB_ID;
reward=FOLDER_OR_HUB_ID of a model with a scalar head; n responses to a prompt; recipe=code|paper as
in bridging-math; steps; keep, updates between the checkpoints that the best is chosen from;
train=SOURCE, which is split into train, dev and test by id hash; dev=FILE of prompts to choose the
best checkpoint on. The paper's 470 (AlpacaFarm's validation and Evol-Test, less those in AlpacaEval
2.0) are not to be had as one file: without dev= held-out WildChat prompts stand in for them.
"""

from types import SimpleNamespace

from ml_collections import ConfigDict

from g2d_jax import config as settings
from g2d_jax import recipes
from g2d_jax.recipes.config_load import choices

MODELS = {
    "llama-3.1-8b-instruct": "meta-llama/Llama-3.1-8B-Instruct",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B",
}
# method -> loss, updates between two synchronisations (0: never)
METHODS = {
    "s10": ("dpo", 10),
    "s5": ("dpo", 5),
    "s1": ("dpo", 1),
    "offline": ("dpo", 0),
    "grpo": ("grpo", 1),
}
HELD_OUT = 470  # prompts of the paper's validation set


def get_config(arg: str = "") -> ConfigDict:
    """One online stage, the choice of its best checkpoint, and the rewards of both policies on
    held-out prompts."""
    chosen = choices(
        arg,
        method=tuple(METHODS),
        model=tuple(MODELS),
        path="",
        reward="Nexusflow/Athene-RM-8B",
        n=8,
        steps=1500,
        keep=250,
        recipe=recipes.AUTHORS,
        train="wildchat",
        dev="",
    )
    config = recipes.real(chosen.path or MODELS[chosen.model])
    config.name = f"bridging-chat-{chosen.method}"
    config.data.train = settings.source(chosen.train, "train", 1000)
    config.data.dev = (
        settings.source(chosen.dev)
        if chosen.dev
        else settings.source(chosen.train, "dev", HELD_OUT)
    )
    config.data.test = settings.source(chosen.train, "test", HELD_OUT)
    for split in ("train", "dev", "test"):
        config.data[split].on_error = "skip"  # WildChat has blank prompts; they are counted
    config.reward = settings.reward(function="model")
    config.reward.model.path = chosen.reward
    config.checkpoint.every = 100
    deciding = settings.sampling(1024, temperature=0.6, top_p=0.9)
    config.stages.train = _train(chosen)
    config.stages.best = settings.best_checkpoint(policy="train", sampling=deciding)
    config.stages.evaluate = settings.evaluate(
        policies=("init", "best"), num_generations=1, sampling=deciding, pass_at=(), greedy=False
    )
    return config


def _train(chosen: SimpleNamespace) -> ConfigDict:
    loss, every = METHODS[chosen.method]
    stage = settings.online(
        policy="init",
        steps=chosen.steps,
        keep=tuple(range(chosen.keep, chosen.steps + 1, chosen.keep)),
        prompts_per_step=32,
        num_generations=chosen.n,
        sampling=settings.sampling(1024),
        loss=loss,
        sync_every=every,
        reference_sync=False,
        beta=0.001 if loss == "grpo" else 0.0,
        optimizer=settings.optimizer(1e-6, eps=1e-8, max_grad_norm=0.1),
    )
    stage.dpo.beta = 0.01
    recipes.as_published(stage, chosen.recipe)
    return stage
