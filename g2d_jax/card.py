"""The model card of an exported policy: what it was made from, by which stages, on which data, and what it reaches."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from g2d_jax import __version__, accounting, storage
from g2d_jax.canonical import to_dict
from g2d_jax.report.summary import markdown_table, summary_table
from g2d_jax.stages.context import Context

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def card(context: Context, policy: str, *, adapters: bool = False) -> str:
    """README.md of a policy, from the run's settings and the manifests of its finished stages. adapters: of PEFT."""
    config = context.config
    manifests = {name: found for name, folder in context.folders.items() if (found := storage.finished(folder))}
    parts = [
        _front_matter(config, adapters),
        f"# {config.name}: policy {policy}\n",
        f"Made by [g2d_jax](https://pypi.org/project/g2d-jax/) {__version__} from {_origin(config)}.\n",
        _stages(context, policy, manifests),
        _data(config),
        *(_results(found, manifests) for found in manifests.values() if found["kind"] == "evaluate"),
        _use(context),
        "## Licence\n\nNone is stated here. Those of the base model and of the data say what may be done with it.\n",
        f"## Settings\n\n```json\n{json.dumps(storage.plain(to_dict(config)), indent=2, sort_keys=True)}\n```\n",
    ]
    return "\n".join(part for part in parts if part)


def _front_matter(config: ConfigDict, adapters: bool) -> str:
    """What hubs read. A base model is named only by its id there."""
    lines = [f"library_name: {'peft' if adapters else 'transformers'}", "pipeline_tag: text-generation"]
    if _HUB_ID.fullmatch(config.model.path) and not config.model.path.startswith("."):
        lines.append(f"base_model: {config.model.path}")
    return "\n".join(["---", *lines, "tags:", "- g2d-jax", "---", ""])


def _origin(config: ConfigDict) -> str:
    if not config.model.path:
        return f"random parameters (seed {config.seed})"
    revision = f", revision `{config.model.revision}`" if config.model.revision else ""
    lora = f", with adapters of rank {config.lora.rank}" if config.lora.rank else ""
    return f"`{config.model.path}`{revision}{lora}"


def _stages(context: Context, policy: str, manifests: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for each stage behind the policy, in the order of the run."""
    stages = context.config.stages
    try:
        behind = accounting.behind(policy, stages.to_dict())
    except ValueError:  # a stage that is not in the config any more
        behind = {}
    if not behind:
        return "It is the model itself, not trained by this run.\n" if policy == "init" else ""
    rows = []
    for name in [name for name in stages if name in behind]:
        found, step = manifests.get(name, {}), behind[name]
        cost = accounting.cost(found)
        taken = f" (taken at step {step})" if step is not None else ""
        tokens = [f"{cost[kind]:,.0f}" if cost[kind] == cost[kind] else "" for kind in ("generated", "trained")]
        flops = f"{cost['flops']:.3g}" if cost["flops"] == cost["flops"] else ""
        rows.append([name, _did(stages[name], found) + taken, *tokens, flops])
    columns = ["stage", "what it did", "tokens generated", "tokens trained on", "FLOPs"]
    return markdown_table("How it was made", columns, rows)


def _did(stage: ConfigDict, manifest: Mapping[str, Any]) -> str:
    """A stage in one line: its settings, and what its manifest counts."""
    counts = manifest.get("counts", {})
    steps = counts.get("steps", stage.get("steps"))
    rate = f", learning rate {stage.optimizer.learning_rate:g}" if "optimizer" in stage else ""
    if stage.kind == "sft":
        return f"supervised fine-tuning from {stage.policy}: {steps} steps of {stage.batch_size} examples{rate}"
    if stage.kind == "online":
        sync = f"refreshed every {stage.sync_every}" if stage.sync_every else "never refreshed"
        drawn = f"{stage.prompts_per_step} prompts x {stage.num_generations} responses"
        return f"online {stage.loss} from {stage.policy}: {steps} steps of {drawn}, sampling policy {sync}{rate}"
    if stage.kind == "collect":
        pairs, rollouts = (counts.get(key, "?") for key in ("pairs", "rollouts"))
        return f"{pairs} preference pairs from {rollouts} rollouts of {stage.policy} ({stage.rollouts})"
    if stage.kind == "offline":
        on = f"{counts.get('pairs', '?')} pairs of {stage.preferences}, {stage.epochs} epochs in batches"
        return f"DPO from {stage.policy}: {steps} steps, {on} of {stage.batch_size}, beta {stage.beta:g}{rate}"
    chosen = manifest.get("result", {}).get("policy", "?")
    return f"chose {chosen} among the checkpoints of {stage.policy}, on {stage.split}"


def _data(config: ConfigDict) -> str:
    """Where problems came from and what was rewarded, by task."""
    sections = {"main": {**config.data, "reward": config.reward}, **config.tasks}
    rows = [
        [task, *(_source(section[split]) for split in ("train", "dev", "test")), str(section["reward"].function)]
        for task, section in sections.items()
    ]
    rows += [
        [name, _source(stage.data), "", "", "demonstrations"]
        for name, stage in config.stages.items()
        if stage.kind == "sft"
    ]
    return markdown_table("Data", ["task or stage", "train", "dev", "test", "reward"], rows)


def _source(section: ConfigDict) -> str:
    split, limit = (section.get(name) for name in ("split", "limit"))
    more = ", ".join([f"split {split}"] * bool(split) + [f"first {limit}"] * bool(limit))
    return f"{section.path} ({more})" if more else str(section.path)


def _results(evaluation: Mapping[str, Any], manifests: Mapping[str, Mapping[str, Any]]) -> str:
    title, columns, rows = summary_table(evaluation, manifests.values())
    return markdown_table(f"Results: {title}", columns, rows) if rows else ""


def _use(context: Context) -> str:
    tokenizer = context.tokenizer
    how = "its chat template" if tokenizer.template.is_chat else "the template in `tokenizer.prompt_template` below"
    stops = ", ".join(f"`{tokenizer.backend.id_to_token(i)}`" for i in tokenizer.eos_ids)
    return (
        f"## Use\n\nPrompts were made with {how}; responses end at {stops}. How the figures were sampled stands in "
        "the settings of the stages; generation_config.json has the base model's own sampling settings, where it has "
        "any.\n"
    )
