"""Verifiable and reward-model rewards in one policy: the three combined rows of table 3 of arXiv
2506.21495.

Command:   g2d run --config bridging-mixed --workdir runs/mixed
           g2d run --config bridging-mixed:row=chat-to-math,start=run:runs/chat-s1#best --workdir runs/chat-to-math
           g2d run --config bridging-mixed:row=math-to-chat,start=run:runs/math-s1#best --workdir runs/math-to-chat
Hardware:  meant for one host with eight devices of 80 GB; not run at this size
Result:    report.html in the directory

The paper's numbers (Llama-3.1-8B-Instruct, online DPO; the last two columns judged by GPT-4o):

    row=                              MATH-500     AMC23        AlpacaEval LC   Arena-Hard
    (the model)                       47.4 (1.6)   23.7 (5.2)   32.0            27.8
    (maths only: bridging-math)       58.7 (1.2)   32.9 (5.2)   36.2            34.9
    (chat only: bridging-chat)        35.0 (1.6)   15.0 (4.3)   62.8            50.4
    chat-to-math                      54.7 (1.2)   30.4 (5.5)   71.9            62.3
    math-to-chat                      33.3 (1.6)   13.2 (4.9)   78.8            61.2
    both                              57.3 (1.4)   31.7 (6.0)   65.6            57.1

Which of the last two columns' values belongs to which row was read from a text whose layout sets
the rows of this table apart: check it against the paper before relying on it.

Choices: row; start=POLICY of the two rows that go on from an earlier run, run:DIR#best or hf:PATH;
model, path, n, steps, keep, recipe, reward as in bridging-math and bridging-chat; math=SOURCE and
chat=SOURCE of prompts; dev=FILE of chat prompts to choose the best checkpoint on. docs/recipes.md
says what the paper leaves open and what was chosen.
"""

from types import SimpleNamespace

from ml_collections import ConfigDict

from g2d_jax import config as settings
from g2d_jax import recipes
from g2d_jax.recipes.config_load import choices, resolve

# row -> the task trained on alone, DPO's beta, Adam's epsilon, the norm gradients are clipped to,
# reference sync
ROWS = {
    "both": ("", 0.01, 1e-5, 0.1, False),
    "chat-to-math": ("math", 0.1, 1e-4, 1.0, True),
    "math-to-chat": ("chat", 0.01, 1e-8, 0.1, False),
}
MODELS = ("llama-3.1-8b-instruct", "qwen2.5-7b")


def get_config(arg: str = "") -> ConfigDict:
    """Online DPO on maths, chat, or batches that hold both; then the choice of the best checkpoint,
    and evaluation."""
    chosen = choices(
        arg,
        row=tuple(ROWS),
        start="",
        model=MODELS,
        path="",
        reward="Nexusflow/Athene-RM-8B",
        n=8,
        steps=15_000,
        keep=1000,
        recipe=recipes.AUTHORS,
        math="numinamath",
        chat="wildchat",
        dev="",
    )
    alone, beta, eps, clip, sync = ROWS[chosen.row]
    if bool(chosen.start) != bool(alone):
        what = (
            "goes on from an earlier run: give start=run:DIR#best"
            if alone
            else "begins anew: leave start out"
        )
        raise ValueError(f"row={chosen.row} {what}")
    config = _chat(chosen) if alone == "chat" else _math(chosen)
    config.unlock()
    config.name = f"bridging-mixed-{chosen.row}"
    config.data.train.limit = 100_000
    stage = config.stages.train
    stage.policy = chosen.start or "init"
    stage.prompts_per_step = 32
    for sampling in (stage.sampling, config.stages.best.sampling, config.stages.evaluate.sampling):
        sampling.max_new_tokens = 2048
    stage.reference_sync = sync
    stage.dpo.beta = beta
    stage.optimizer.update(eps=eps, max_grad_norm=clip)
    if alone:
        config.stages.evaluate.policies = ("init", chosen.start, "best")
    else:
        _add_chat(config, chosen)
    return config


def _math(chosen: SimpleNamespace) -> ConfigDict:
    return resolve(f"bridging-math:{_shared(chosen)},train={chosen.math}")


def _chat(chosen: SimpleNamespace) -> ConfigDict:
    return resolve(
        f"bridging-chat:{_shared(chosen)},train={chosen.chat},dev={chosen.dev},reward={chosen.reward}"
    )


def _shared(chosen: SimpleNamespace) -> str:
    names = ("model", "path", "n", "steps", "keep", "recipe")
    return ",".join(["method=s1", *(f"{name}={getattr(chosen, name)}" for name in names)])


def _add_chat(config: ConfigDict, chosen: SimpleNamespace) -> None:
    """50,000 chat prompts beside 100,000 of maths, about half of which give no pair."""
    chat = _chat(chosen).data
    chat.train.limit = 50_000
    config.data.weight = 2.0
    config.tasks.chat = settings.task(chat.train, chat.dev, chat.test, weight=1.0, function="model")
    config.tasks.chat.reward.model.path = chosen.reward
