"""The model card of an exported policy: what it was made from, by which stages, on which data, and what it reaches."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from g2d_jax import __version__, accounting, storage
from g2d_jax.canonical import to_dict
from g2d_jax.report import format as fmt
from g2d_jax.report.tables import one_line, summary_table
from g2d_jax.stages.context import Context

_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")


def card(context: Context, policy: str, *, adapters: bool = False) -> str:
    """README.md of a policy, from the run's settings and the manifests of its finished stages. adapters: of PEFT."""
    config = context.config
    manifests = {name: found for name, folder in context.folders.items() if (found := storage.finished(folder))}
    parts = [
        _front_matter(config, policy, adapters),
        f"# {config.name}: policy {policy}\n",
        *_made(context, policy, manifests),
        _quantised(config, adapters),
        _data(config),
        *(_results(found, manifests) for found in manifests.values() if found["kind"] == "evaluate"),
        _use(context),
        "## Licence\n\nNone is stated here. Those of the base model and of the data say what may be done with it.\n",
        f"## Settings\n\n```json\n{json.dumps(storage.plain(to_dict(config)), indent=2, sort_keys=True)}\n```\n",
    ]
    return "\n".join(part for part in parts if part)


def _front_matter(config: ConfigDict, policy: str, adapters: bool) -> str:
    """What hubs read. A base model is named by its id there only, not by a folder, and where all began with it."""
    stages = config.stages.to_dict()
    begins = [policy, *(stages[name].get("policy", "init") for name in accounting.behind(policy, stages))]
    lines = [f"library_name: {'peft' if adapters else 'transformers'}", "pipeline_tag: text-generation"]
    named = _HUB_ID.fullmatch(config.model.path) and not os.path.isdir(config.model.path)
    if named and not any(begin.startswith(("run:", "hf:")) for begin in begins):
        lines.append(f"base_model: {config.model.path}")
    return "\n".join(["---", *lines, "tags:", "- g2d-jax", "---", ""])


def _made(context: Context, policy: str, manifests: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What the policy was made from, and a row for each stage behind it, in the order of the run."""
    written, stages = f"Written by g2d_jax {__version__}.", context.config.stages
    if policy != "init" and policy.partition("@")[0] not in stages:  # run:…, hf:…
        return [f"{written} It was not trained by this run.\n"]
    behind = accounting.behind(policy, stages.to_dict())
    rows = [
        _row(stages[name], name, behind[name], manifests.get(name, {})) for name in context.folders if name in behind
    ]
    columns = ["stage", "what it did", "tokens generated", "tokens trained on", "FLOPs"]
    origin = f"{written} It began with {_origin(context, policy)}{'.' if rows else ', and was not trained.'}\n"
    return [origin, _table("How it was made", columns, rows)] if rows else [origin]


def _origin(context: Context, policy: str) -> str:
    config, path = context.config, context.base_path(policy)
    if not path:
        return f"random parameters (seed {config.seed})"
    revision = f", revision `{config.model.revision}`" if path == config.model.path and config.model.revision else ""
    lora = f", with adapters of rank {config.lora.rank}" if config.lora.rank else ""
    return f"`{path}`{revision}{lora}"


def _quantised(config: ConfigDict, adapters: bool) -> str:
    """That the base was quantised in training, and what that means for these files; "" where it was not."""
    if not config.lora.quantise:
        return ""
    told = f"In training, the base's linear layers were held as {config.lora.quantise} codes (`lora.quantise`). "
    if adapters:
        return told + (
            "Beside the base as it was before, these adapters compute something slightly different; `g2d export "
            "--policy init` writes the base that they were trained beside.\n"
        )
    return told + "The weights here are what the codes stand for, with the adapters added.\n"


def _row(stage: ConfigDict, name: str, step: int | None, manifest: Mapping[str, Any]) -> list[str]:
    cost = accounting.cost(manifest)
    taken = "" if step is None else f"; taken at step {step}"
    figures = (fmt.count(cost["generated"]), fmt.count(cost["trained"]), fmt.quantity(cost["flops"]))
    return [name, _did(stage, manifest) + taken, *figures]


def _did(stage: ConfigDict, manifest: Mapping[str, Any]) -> str:
    """A stage in one line: what it is, the policy it begins with, what its manifest counts, its learning rate."""
    counts = {"steps": stage.get("steps"), **manifest.get("counts", {})}
    counted = [f"{name.replace('_', ' ')} {number}" for name, number in counts.items() if number]
    rate = [f"learning rate {stage.optimizer.learning_rate:g}"] if "optimizer" in stage else []
    kind = f"{stage.kind} {stage.loss}" if "loss" in stage else stage.kind
    return f"{kind} from {stage.policy}: {', '.join([*counted, *rate])}"


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
    return _table("Data", ["task or stage", "train", "dev", "test", "reward"], rows)


def _source(section: ConfigDict) -> str:
    split, limit = (section.get(name) for name in ("split", "limit"))
    more = ", ".join([f"split {split}"] * bool(split) + [f"first {limit}"] * bool(limit))
    return f"{section.path} ({more})" if more else str(section.path)


def _results(evaluation: Mapping[str, Any], manifests: Mapping[str, Mapping[str, Any]]) -> str:
    title, columns, rows = summary_table(evaluation, manifests.values())
    return _table(f"Results: {title}", columns, rows) if rows else ""


def _table(heading: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *([one_line(cell) for cell in row] for row in rows)]
    return "\n".join([f"## {one_line(heading)}", "", *(f"| {' | '.join(line)} |" for line in lines), ""])


def _use(context: Context) -> str:
    tokenizer = context.tokenizer
    how = "its chat template" if tokenizer.template.is_chat else "the template in `tokenizer.prompt_template` below"
    stops = ", ".join(f"`{tokenizer.backend.id_to_token(i)}`" for i in tokenizer.eos_ids)
    return (
        f"## Use\n\nPrompts were made with {how}; responses end at {stops}. How the figures were sampled stands in "
        "the settings of the stages; generation_config.json has the base model's own sampling settings, where it has "
        "any.\n"
    )
