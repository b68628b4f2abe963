"""The sources of a collect stage's rollouts.

"sample"     drawn here, from stage.policy
"archive"    those an online stage drew on its way to stage.policy
a stage      those of another collect stage of the run
a file       made elsewhere, see external.py
"""

from __future__ import annotations

from typing import Any

from g2d_jax.config import Collect, Online
from g2d_jax.data.loader import draw
from g2d_jax.graph import drawn_by
from g2d_jax.runtime import storage
from g2d_jax.runtime.tables import read_rollouts
from g2d_jax.stages.buffer import read_rounds, together, window_at
from g2d_jax.stages.cost import Cost
from g2d_jax.stages.external import external_groups
from g2d_jax.stages.policies import load_policy
from g2d_jax.stages.problems import train_order
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
from g2d_jax.stages.runtime import Runtime, StopRun


def rollouts_of(runtime: Runtime, name: str, tally: Cost) -> tuple[Draws, Groups]:
    """Return a collect stage's rollouts, in groups, and their draws. Adds to the tally the cost of generating them now.

    Those of another stage, of an archive and of a file cost nothing. Raises StopRun for an archive of nothing,
    ValueError for rollouts on disk that are not those of this run's problems.
    """
    drawn = drawn_by(name, runtime.config.stages)
    stage = runtime.config.stage(drawn, Collect)
    if stage.rollouts == "archive":
        return _archive(runtime, stage)
    if stage.rollouts == "sample" and drawn == name:
        return _sample(runtime, name, stage, tally)
    if stage.rollouts == "sample":
        draws = _draws(runtime, drawn, stage)
        return draws, grouped(read_rollouts(runtime.folders[drawn] / "rollouts"), draws, stage.num_generations)
    return external_groups(runtime, stage.rollouts, runtime.folders[drawn] / "rollouts" / "external.parquet")


def _draws(runtime: Runtime, name: str, stage: Collect) -> Draws:
    """Draw the first stage.prompts of a seeded order of the training problems."""
    train = runtime.problems["train"]
    order = train_order(runtime.config, runtime.problems["train"], stage.stream or f"collect/{name}")
    return [(train[index], visit) for index, visit in draw(order, 0, min(stage.prompts, len(train)))]


def asked_of(runtime: Runtime, stage: Collect, response: int | None = None) -> Asked:
    """Compute the stage's sampling workload; a call draws as many parts as compute.generation_batch_size allows.

    response: mean tokens of a response, None: the most.
    """
    prompts = min(stage.prompts, runtime.problem_counts["train"])
    together = max(prompts_at_once(runtime, stage.num_generations) // stage.part, 1) * stage.part
    params = runtime.sampling_params(stage.sampling)
    samples, weights = stage.num_generations, stage.sampling_weights
    shapes = runtime.sampling_shapes(stage, min(together, prompts), samples, params, weights=weights)
    return Asked(prompts, -(-prompts // together), samples, shapes, params.max_new_tokens, response, weights)


def _sample(runtime: Runtime, name: str, stage: Collect, tally: Cost) -> tuple[Draws, Groups]:
    """Sample the parts, several in a call; a call whose parts are all on disk is read back."""
    draws, folder = _draws(runtime, name, stage), runtime.folders[name] / "rollouts"
    parts = [
        (draws[first : first + stage.part], folder / f"part-{number:05d}.parquet")
        for number, first in enumerate(range(0, len(draws), stage.part))
    ]
    cached = on_disk(runtime, [shard for _, shard in parts])
    view = None if cached else runtime.view(load_policy(runtime, stage.policy), stage.sampling_weights)
    params, shapes = runtime.sampling_params(stage.sampling), asked_of(runtime, stage).shapes
    generation = Generation(params, stage.num_generations, shapes, stage.stream or f"collect/{name}")
    groups: Groups = []
    with runtime.tracker.progress(name, len(draws)) as bar:

        def tell(answered: int) -> None:
            bar.update(min(answered, len(draws)))

        for part in generate(runtime, view, parts, generation, policy=stage.policy, tell=tell):
            if part.before:
                tally.add(part.cost)
            groups += part.groups
            bar.update(max(bar.done, len(groups)), describe(part.groups))
    runtime.writer.wait()
    count_rollouts(runtime, tally, groups)
    return draws, groups


def _archive(runtime: Runtime, stage: Collect) -> tuple[Draws, Groups]:
    """Return the groups an online stage drew on its way to the policy: no further generation."""
    source, _, step = stage.policy.partition("@")
    settings = runtime.config.stage(source, Online)
    done = int(step) if step else _steps_done(runtime, source)
    draws: Draws = []
    groups: Groups = []
    for number in sorted({window_at(k, settings).number(k) for k in range(done)}):
        batch_draws, batch_groups = together(read_rounds(runtime, runtime.folders[source], number))
        draws += batch_draws
        groups += batch_groups
    if not groups:
        raise StopRun(f'{stage.policy} ended after 0 steps, so there is no archive: collect with rollouts="sample"')
    return draws, groups


def _steps_done(runtime: Runtime, source: str) -> int:
    """Count the steps an online stage did, which may be fewer than its settings allow."""
    manifest = storage.finished(runtime.folders[source])
    assert manifest is not None  # a stage runs after those it reads
    return int(manifest["counts"]["steps"])


def sampler_settings(runtime: Runtime, name: str) -> dict[str, Any]:
    """Return the settings the rollouts were really drawn with; of a file only its path is known."""
    config = runtime.config
    source = drawn_by(name, config.stages)
    collect = config.stage(source, Collect)
    if collect.rollouts not in ("sample", "archive"):
        return {"file": collect.rollouts}
    drawn: Collect | Online = collect
    if collect.rollouts == "archive":
        source = collect.policy.partition("@")[0]
        drawn = config.stage(source, Online)
    purpose = drawn.stream or f"{drawn.kind}/{source}"
    own = {"sampling_weights": drawn.sampling_weights, "num_generations": drawn.num_generations, "purpose": purpose}
    return {**drawn.sampling.to_dict(), **own}
