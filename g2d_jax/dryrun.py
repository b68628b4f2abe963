"""What a run would do, without doing it: settings, stages, disk need, and the first batch as the model would see it."""

from __future__ import annotations

import json
from contextlib import closing
from tempfile import TemporaryDirectory

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from g2d_jax import pipeline
from g2d_jax.canonical import to_dict
from g2d_jax.data.packing import Packed, pack
from g2d_jax.models.decoder import count_params, count_trained
from g2d_jax.stages import sft
from g2d_jax.stages.context import Context
from g2d_jax.stages.select import kept_steps
from g2d_jax.tracking import Tracker

MAX_CELLS = 96  # tokens of the first row that are shown


def show(config: ConfigDict) -> None:
    """Print it. Loads tokenizer and data as the run would, so their errors show here too; computes nothing."""
    order = pipeline.plan(config)
    with TemporaryDirectory() as folder, Tracker(folder, tensorboard=False) as tracker:
        context = Context(config, epath.Path(folder), tracker, order.folders(epath.Path("WORKDIR")))
        with closing(context):
            tracker.say(json.dumps(to_dict(config), indent=2, sort_keys=True))
            rows = [
                [name, config.stages[name].kind, ", ".join(order.inputs[name]) or "init", disk_need(context, name)]
                for name in order.order
            ]
            tracker.table("stages", ["stage", "kind", "reads", "disk"], rows)
            counts = [[split, str(len(problems))] for split, problems in context.problems.items()]
            tracker.table("problems", ["split", "count"], counts)
            trained, total = count_trained(context.model_config), count_params(context.model_config)
            tracker.say(f"model: {total:,} parameters" + (f", {trained:,} of them trained" if trained < total else ""))
            _show_batch(context, order)


def disk_need(context: Context, name: str) -> str:
    """About what a stage leaves on disk: checkpoints with optimiser state, and rollouts at 16 bytes a token."""
    stage = context.config.stages[name]
    size = 0.0
    if stage.kind in ("sft", "online", "offline"):
        kept = context.config.checkpoint.keep + len(stage.get("keep", ())) + 1
        size += 12.0 * count_trained(context.model_config) * kept
    if "sampling" in stage:
        many = {
            "online": lambda: stage.steps,
            "collect": lambda: stage.prompts,
            "select": lambda: _checkpoints(context, stage) * len(context.problems[stage.split]),
            "evaluate": lambda: len(stage.policies) * len(context.problems[stage.split]),
        }[stage.kind]()
        many *= stage.get("prompts_per_step", 1) * stage.num_generations
        size += 16.0 * many * stage.sampling.max_new_tokens
    return f"{size / 1e6:,.0f} MB"


def _checkpoints(context: Context, stage: ConfigDict) -> int:
    """Of how many a select stage chooses."""
    return len(stage.steps or kept_steps(context.config.stages[stage.policy]) or (None,))


def _show_batch(context: Context, order: pipeline.Plan) -> None:
    """The first SFT batch if there is such a stage, else the first prompts."""
    tokenizer = context.tokenizer
    first = [name for name in order.order if context.config.stages[name].kind == "sft"]
    if not first:
        for problem in context.problems["train"][:2]:
            tracker_text = tokenizer.render(problem)
            context.tracker.say(
                f"prompt {problem.id}: {tracker_text!r}\nids: {tokenizer.encode_prompt(problem).tolist()}"
            )
        return
    stage = context.config.stages[first[0]]
    examples, _ = sft.examples(context, stage)
    length = context.row_length(stage.max_length)
    packed = pack(
        sft.batch(context, examples[: stage.batch_size]),
        row_length=length,
        microbatch_rows=context.microbatch_rows(length),
    )
    shape = "x".join(map(str, packed.arrays["tokens"].shape))
    context.tracker.say(f"first batch of {first[0]}: {shape} tokens, {packed.used} of them used; its first row:")
    context.tracker.table("", ["column", "id", "text", "position", "segment", "weight"], _cells(context, packed))


def _cells(context: Context, packed: Packed) -> list[list[str]]:
    names = ("tokens", "positions", "segment_ids", "weight")
    tokens, positions, segments, weights = (packed.arrays[name][0, 0] for name in names)
    columns = np.flatnonzero(segments)[:MAX_CELLS]
    return [
        [
            str(c),
            str(tokens[c]),
            repr(context.tokenizer.decode_raw([int(tokens[c])])),
            str(positions[c]),
            str(segments[c]),
            f"{weights[c]:.3g}",
        ]
        for c in columns
    ]
