"""Where the rollouts of a collect stage are from.

"sample"     drawn here, from stage.policy
"archive"    those an online stage drew on its way to stage.policy
a stage      those of another collect stage of the run
a file       made elsewhere, see external.py
"""

from __future__ import annotations

from typing import Any

from etils import epath
from ml_collections import ConfigDict

from g2d_jax import storage
from g2d_jax.data.loader import draw
from g2d_jax.stages.context import Context, StopRun, Tally
from g2d_jax.stages.external import external_groups
from g2d_jax.stages.programs.sampling import Asked
from g2d_jax.stages.rollouts import (
    Draws,
    Generation,
    Groups,
    count_rollouts,
    describe,
    generate,
    grouped,
    on_disk,
    prompts_at_once,
)
from g2d_jax.stages.supply import interval_at, read_rounds, together
from g2d_jax.tables import read_rollouts


def check_rollouts(stage: ConfigDict, stages: ConfigDict) -> None:
    """Raise ValueError if stage.rollouts leads nowhere, or to those of another policy."""
    if stage.rollouts == "sample":
        return
    if stage.rollouts == "archive":
        source, _, step = stage.policy.partition("@")
        if source not in stages or stages[source].kind != "online":
            raise ValueError(
                f'rollouts="archive" needs a policy that is an online stage of this run, got {stage.policy!r}'
            )
        if (int(step) if step else stages[source].steps) == 0:
            raise ValueError(f'rollouts="archive" finds none before {stage.policy!r}, which is 0 steps on: use sample')
    elif stage.rollouts in stages:
        other = stages[stage.rollouts]
        if other.kind != "collect":
            raise ValueError(
                f"rollouts is {stage.rollouts!r}, a stage that is no collect stage; those of an online stage are "
                f'rollouts="archive" with policy={stage.rollouts!r}'
            )
        if other.policy != stage.policy:
            raise ValueError(
                f"rollouts of {stage.rollouts!r} are those of policy {other.policy!r}: policy must be the same, "
                f"got {stage.policy!r}"
            )
    elif not epath.Path(stage.rollouts).exists():
        raise ValueError(
            f"rollouts is {stage.rollouts!r}: write sample, archive, a collect stage, or the path of a file that exists"
        )


def lender(stage: ConfigDict, stages: ConfigDict) -> str | None:
    """The collect stage whose rollouts a collect stage reads, None if it has its own. Its name wins over a file's."""
    named = stage.rollouts
    is_stage = named not in ("sample", "archive") and named in stages and stages[named].kind == "collect"
    return named if is_stage else None


def drawn_by(name: str, stages: ConfigDict) -> str:
    """The collect stage that a stage's rollouts are from in the end: itself, if it reads those of no other."""
    while other := lender(stages[name], stages):
        name = other
    return name


def rollouts_of(context: Context, name: str, tally: Tally) -> tuple[Draws, Groups]:
    """A collect stage's rollouts, in groups, and what was drawn. Adds to the tally what generating them costs now.

    Those of another stage, of an archive and of a file cost nothing. Raises StopRun for an archive of nothing,
    ValueError for rollouts on disk that are not those of this run's problems.
    """
    drawn = drawn_by(name, context.config.stages)
    stage = context.config.stages[drawn]
    if stage.rollouts == "archive":
        return _archive(context, stage)
    if stage.rollouts == "sample" and drawn == name:
        return _sample(context, name, stage, tally)
    if stage.rollouts == "sample":
        draws = _draws(context, drawn, stage)
        return draws, grouped(read_rollouts(context.folders[drawn] / "rollouts"), draws, stage.num_generations)
    return external_groups(context, stage.rollouts, context.folders[drawn] / "rollouts" / "external.parquet")


def _draws(context: Context, name: str, stage: ConfigDict) -> Draws:
    """The first stage.prompts of a seeded order of the training problems."""
    train = context.problems["train"]
    order = context.train_order(stage.stream or f"collect/{name}")
    return [(train[index], visit) for index, visit in draw(order, 0, min(stage.prompts, len(train)))]


def asked_of(context: Context, stage: ConfigDict, response: int | None = None) -> Asked:
    """What the stage asks the sampler for; a call draws as many parts as compute.responses_at_once allows.

    response: mean tokens of a response, None: the most.
    """
    prompts = min(stage.prompts, context.problem_counts["train"])
    together = max(prompts_at_once(context, stage.num_generations) // stage.part, 1) * stage.part
    params = context.sampling_params(stage.sampling)
    samples, weights = stage.num_generations, stage.sampling_weights
    shapes = context.sampling_shapes(stage, min(together, prompts), samples, params, weights=weights)
    return Asked(prompts, -(-prompts // together), samples, shapes, params.max_new_tokens, response, weights)


def _sample(context: Context, name: str, stage: ConfigDict, tally: Tally) -> tuple[Draws, Groups]:
    """Sample the parts, several in a call; a call whose parts are all on disk is read back."""
    draws, folder = _draws(context, name, stage), context.folders[name] / "rollouts"
    parts = [
        (draws[first : first + stage.part], folder / f"part-{number:05d}.parquet")
        for number, first in enumerate(range(0, len(draws), stage.part))
    ]
    there = on_disk(context, [journal for _, journal in parts])
    view = None if there else context.view(context.policy(stage.policy), stage.sampling_weights)
    params, shapes = context.sampling_params(stage.sampling), asked_of(context, stage).shapes
    generation = Generation(params, stage.num_generations, shapes, stage.stream or f"collect/{name}")
    groups: Groups = []
    with context.tracker.progress(name, len(draws)) as bar:

        def tell(answered: int) -> None:
            bar.update(min(answered, len(draws)))

        for part in generate(context, view, parts, generation, policy=stage.policy, tell=tell):
            if part.before:
                tally.add(part.cost)
            groups += part.groups
            bar.update(max(bar.done, len(groups)), describe(part.groups))
    context.writer.wait()
    count_rollouts(context, tally, groups)
    return draws, groups


def _archive(context: Context, stage: ConfigDict) -> tuple[Draws, Groups]:
    """The groups an online stage drew on its way to the policy: no further generation."""
    source, _, step = stage.policy.partition("@")
    settings = context.config.stages[source]
    done = int(step) if step else _steps_done(context, source)
    draws: Draws = []
    groups: Groups = []
    for number in sorted({interval_at(k, settings).number(k) for k in range(done)}):
        some, more = together(read_rounds(context, context.folders[source], number))
        draws += some
        groups += more
    if not groups:
        raise StopRun(f'{stage.policy} ended after 0 steps, so there is no archive: collect with rollouts="sample"')
    return draws, groups


def _steps_done(context: Context, source: str) -> int:
    """How many steps an online stage went, which may be fewer than its settings allow."""
    manifest = storage.finished(context.folders[source])
    assert manifest is not None  # a stage runs after those it reads
    return int(manifest["counts"]["steps"])


def sampler_settings(context: Context, name: str) -> dict[str, Any]:
    """The settings the rollouts were really drawn with; of a file only its path is known."""
    stages = context.config.stages
    source = drawn_by(name, stages)
    origin, policy = stages[source].rollouts, stages[source].policy
    if origin not in ("sample", "archive"):
        return {"file": origin}
    if origin == "archive":
        source = policy.partition("@")[0]
    drawn = stages[source]
    purpose = drawn.stream or f"{drawn.kind}/{source}"
    how = {"sampling_weights": drawn.sampling_weights, "num_generations": drawn.num_generations, "purpose": purpose}
    return {**drawn.sampling.to_dict(), **how}
