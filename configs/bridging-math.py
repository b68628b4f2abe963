"""Verifiable rewards from offline to online: every row of tables 1 and 5 of arXiv 2506.21495, and
of its figures 6-10.

Command:   g2d run --config bridging-math:method=s100 --workdir runs/math-s100
           g2d evaluate --workdir runs/math-s100 --policy best --problems amc23 --num-generations 50    another test set
Hardware:  meant for one host with eight devices of 80 GB; not run at this size
Result:    report.html in the directory, with each policy's accuracy on MATH-500

The paper's numbers (Llama-3.1-8B-Instruct; mean over 50 samples of each problem, in parentheses
their spread):

    method=           MATH-500     NuminaMath   AMC23
    (the model)       47.4 (1.6)   33.9 (0.6)   23.7 (5.2)
    offline           53.7 (1.6)   36.4 (0.6)   28.8 (7.0)
    s100              58.9 (1.2)   39.3 (0.4)   35.1 (5.3)
    s10               57.2 (1.1)   39.4 (0.5)   31.4 (4.3)
    s1                58.7 (1.2)   39.6 (0.5)   32.9 (5.2)
    grpo, n=4         55.7 (1.4)   37.7 (0.5)   30.6 (5.2)
    grpo              58.1 (1.3)   38.8 (0.5)   33.6 (5.1)
    grpo, n=12        57.6 (1.2)   38.4 (0.6)   32.2 (5.9)

The value 57.2 stands apart from its row in the text that it was read from. For s5, group_dpo,
combined, nll and entropy it reports no accuracy: the last four changed nothing substantial.

Choices: method; model=llama-3.1-8b-instruct|qwen2.5-7b, or path=FOLDER_OR_HUB_ID; n responses to a
prompt; alpha of combined; entropy, the coefficient; recipe=code|paper, whose normalisers and
optimiser, the authors' published code's or those that the equations print; sync, in place of the s
that a variant of the loss has here; steps; keep, updates between the checkpoints that the best is
chosen from; train=SOURCE, which is split into train, dev and test by id hash; test=SOURCE.
docs/recipes.md says what the paper leaves open and what was chosen.
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
    "s100": ("dpo", 100),
    "s10": ("dpo", 10),
    "s5": ("dpo", 5),
    "s1": ("dpo", 1),
    "offline": ("dpo", 0),
    "grpo": ("grpo", 1),
    "group_dpo": ("group_dpo", 100),  # figure 8
    "combined": ("group_dpo", 1),  # figure 8
    "nll": ("dpo", 100),  # figure 10, which has s=1 too
    "entropy": ("dpo", 100),  # figure 6, which has s=10 too
}
VARIANTS = ("group_dpo", "combined", "nll", "entropy")


def get_config(arg: str = "") -> ConfigDict:
    """One online stage, the choice of its best checkpoint, and both policies on MATH-500."""
    chosen = choices(
        arg,
        method=tuple(METHODS),
        model=tuple(MODELS),
        path="",
        n=recipes.GROUP,
        alpha=0.01,
        entropy=3e-4,
        sync=0,
        steps=1500,
        keep=250,
        recipe=recipes.AUTHORS,
        train="numinamath",
        test="math500",
    )
    path = chosen.path or MODELS[chosen.model]
    config = recipes.maths(path, chosen.train, chosen.test, dev=recipes.NUMINAMATH_TEST)
    config.name = f"bridging-math-{chosen.method}"
    config.checkpoint.every = 100
    config.stages.train = _train(chosen)
    config.stages.best = settings.best_checkpoint(policy="train", sampling=recipes.deciding())
    config.stages.evaluate = settings.evaluate(
        policies=("init", "best"),
        num_generations=50,
        sampling=recipes.deciding(),
        pass_at=(1,),
        greedy=False,
    )
    return config


def _train(chosen: SimpleNamespace) -> ConfigDict:
    loss, every = METHODS[chosen.method]
    if chosen.sync and chosen.method not in VARIANTS:
        raise ValueError(
            f"choice 'sync' is for method={'|'.join(VARIANTS)}; {chosen.method} says what it is"
        )
    every = chosen.sync or every
    stage = settings.online(
        policy="init",
        steps=chosen.steps,
        keep=tuple(range(chosen.keep, chosen.steps + 1, chosen.keep)),
        prompts_per_step=recipes.PROMPTS_PER_STEP,
        num_generations=chosen.n,
        sampling=settings.sampling(recipes.RESPONSE),
        loss=loss,
        sync_every=every,
        reference_sync=loss != "grpo" and every > 0,
        beta=recipes.KL_COEF if chosen.method in ("grpo", "combined") else 0.0,
        grpo_coef=chosen.alpha if chosen.method == "combined" else 0.0,
        entropy_coef=chosen.entropy if chosen.method == "entropy" else 0.0,
        optimizer=recipes.adam(),
    )
    stage.dpo.beta = recipes.DPO_BETA
    stage.dpo.nll_coef = 1.0 if chosen.method == "nll" else 0.0
    recipes.as_published(stage, chosen.recipe)
    return stage
