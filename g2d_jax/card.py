"""The card of an exported policy or a published preference dataset: its origin, its stages, its
data, its results."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from huggingface_hub import DatasetCardData, ModelCardData

from g2d_jax import __version__, accounting
from g2d_jax.config import (
    Collect,
    Config,
    Online,
    Reward,
    Sft,
    Source,
    Stage,
    TrainingStage,
    places,
)
from g2d_jax.config.io import from_dict, identity, to_dict
from g2d_jax.config.policy_name import is_external, own_stage
from g2d_jax.data.template import PLACEHOLDER, Template
from g2d_jax.data.tokenizer import CHAT_TEMPLATE, PromptTokenizer
from g2d_jax.models import hf
from g2d_jax.report import format as fmt
from g2d_jax.report.headlines import run_headline
from g2d_jax.report.tables import one_line, result_of, summary_table
from g2d_jax.runtime import storage
from g2d_jax.session.policies import base_path, base_revision
from g2d_jax.session.session import Session

WRITTEN_BY = "Written by g2d_jax"
"""The words by which a card, and so its folder, is known for one of ours."""

_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
_QUESTION = "1+1=?"
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values of vLLM's --max-lora-rank that adapters of a run need."""

VLLM_RANK = 16
"""The --max-lora-rank of a vLLM that is told none."""

HERE = "path/to/this"
"""Where a card says that its own files lie."""


def card(session: Session, policy: str, *, adapters: bool = False, note: str = "") -> str:
    """Write a policy's README.md from the run's settings and its finished stages' manifests.
    adapters: of PEFT; note: on their base, as `base_named` gives it."""
    config = session.config
    manifests = _finished(session, own_stage(policy))
    parts = [
        _front_matter(config, policy, adapters),
        f"# {config.name}: policy {policy}\n",
        _headline(manifests),
        *_made(session, policy, manifests),
        _too_long(session, policy, manifests),
        _quantised(config, adapters),
        _data(_published(config)),
        *map(partial(_results, manifests=manifests), _evaluations(manifests)),
        note and f"{note}\n",
        _use(session, adapters=adapters),
        *_origins(session, "the base model and of the data"),
    ]
    return "\n".join(filter(None, parts))


def base_named(session: Session, policy: str, *, published: bool) -> tuple[str | None, str]:
    """Return what PEFT loads the base of a policy's adapters by, and what whoever loads them has to
    know of it.

    The first is None where PEFT would load none, or one beside which they do nothing; the second a
    sentence, or "". published: of a path the last part. Raises ValueError for a base that is gone.
    """
    base = base_path(session, policy)
    shown = places.last_part(base)
    instead = "export it with --policy init, and load the adapters beside that folder"
    if not base:
        return None, f"These adapters' base is the run's own random model: {instead}."
    if hf.has_images(hf.resolve(base, revision=base_revision(session, policy))):
        return None, (
            f"These adapters are of the language model of {shown}, which has images too; beside the "
            f"whole model PEFT finds none of their layers, and they do nothing: {instead}. "
            "adapter_config.json names no base."
        )
    if published and shown != base:
        return shown, (
            f"adapter_config.json names these adapters' base by the last part of its path, "
            f"{shown}: load that model yourself, and the adapters beside it with PeftModel."
        )
    return base, ""


def dataset_card(session: Session, name: str, repository: str) -> str:
    """Write the README.md of a collect stage's preference pairs, in a repository as `dataset.write`
    lays it out."""
    config = session.config
    manifests = _finished(session, name)
    behind = {
        **accounting.behind(config.stage(name, Collect).policy, to_dict(config)["stages"]),
        name: None,
    }
    files = ("preferences/*.parquet", "completions/*.parquet", "problems.parquet")
    configs = []
    for pattern in files:
        configs.append({"config_name": re.split(r"\W", pattern)[0], "data_files": pattern})
    front = DatasetCardData(
        task_categories=["text-generation"], tags=["g2d-jax", "preference"], configs=configs
    )
    parts = [
        f"---\n{front.to_yaml()}\n---\n",
        f"# {config.name}: preference pairs of {name}\n",
        _headline(manifests),
        f"{WRITTEN_BY} {__version__}. `preferences` has the pairs, as TRL reads them; "
        "`completions` every answer with its score, from which they were chosen; `problems` what "
        "was asked, with reference answers.\n",
        _stages(session, behind, manifests),
        _data(_published(config)),
        "## Use\n\n```python\nfrom datasets import load_dataset\n",
        f'pairs = load_dataset("{repository}", "preferences", split="train")\n```\n',
        _pairs_use(session),
        *_origins(session, "the model that answered and of the data"),
    ]
    return "\n".join(filter(None, parts))


def _pairs_use(session: Session) -> str:
    """Tell how other libraries give a model the prompts of pairs as the policy saw them, and where
    responses end."""
    tokenizer = session.tokenizer
    stops = ", ".join(_stop_strings(session.config))
    ended = ""
    if stops:
        ended = f"Responses also end at {stops}, which their texts lack and their ids have. "
    if not tokenizer.template.is_chat:
        return f"{ended}Prompts are texts as the policy saw them; `prompt_ids` are their tokens.\n"
    return (
        f"{ended}Prompts are messages; `prompt_ids` are the tokens that the policy saw. The chat "
        f"template `{CHAT_TEMPLATE}` here gives the same: `tokenizer.chat_template = "
        f'open("{CHAT_TEMPLATE}").read()`. An exported policy\'s tokenizer has it. '
        f"{_as_trained(tokenizer.template)}"
    )


def provenance(session: Session) -> dict[str, Any]:
    """Return what identifies a run and what it was made with. `run` is the same for runs of the
    same settings."""
    started = storage.read_json(session.workdir / "config.json")
    environment, _ = storage.read_informing(session.workdir / "environment.json")
    versions = environment.get("packages")
    settings = to_dict(_published(session.config))
    return {
        "config": settings,
        "own": started.get("own", {}),
        "version": started.get("version"),
        "run": storage.fingerprint([identity(session.config), started.get("own", {})]),
        "stages": {
            name: manifest.get("fingerprint") for name, manifest in _finished(session).items()
        },
        "tokenizer": session.tokenizer.fingerprint,
        "packages": versions if isinstance(versions, dict) else {},
    }


def _published(config: Config) -> Config:
    """Return the settings as others read them: where a file or folder lay on this machine is not
    theirs to know."""
    return Config.of(places.without_folders(from_dict(to_dict(config))))


def _finished(session: Session, needed: str = "") -> dict[str, dict[str, Any]]:
    """Map each finished stage to its manifest; a damaged one is left out, with a warning.

    Raises ValueError for that of the stage `needed`, whose work is exported.
    """
    manifests = {}
    for name, folder in session.folders.items():
        manifest, damage = storage.read_finished(folder)
        if damage and name == needed:
            raise ValueError(damage)
        if damage:
            session.say_once(f"WARNING: what {name} did is left out: {damage}")
        if manifest:
            manifests[name] = manifest
    return manifests


def _headline(manifests: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the report's headline, "" where nothing was evaluated."""
    evaluation = result_of(_evaluations(manifests))
    return f"{one_line(run_headline(evaluation))}\n" if evaluation else ""


def _evaluations(manifests: Mapping[str, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """List the manifests of the evaluate stages."""
    return [manifest for manifest in manifests.values() if manifest.get("kind") == "evaluate"]


def _origins(session: Session, licensed: str) -> list[str]:
    """State fingerprints, packages, licence and settings."""
    known = provenance(session)
    stages = ", ".join(f"{name} `{fingerprint}`" for name, fingerprint in known["stages"].items())
    versions = {"g2d_jax": known["version"], **known["packages"]}
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    settings = json.dumps(storage.plain(known["config"]), indent=2, sort_keys=True)
    return [
        f"## Provenance\n\nRun `{known['run']}`, seed {session.config.seed}, tokenizer "
        f"`{known['tokenizer']}`. Stages: {stages}. Made with {packages}.\n",
        f"## Licence\n\nNone is stated here. Those of {licensed} say what may be done with it.\n",
        f"## Settings\n\n```json\n{settings}\n```\n",
    ]


def _front_matter(config: Config, policy: str, adapters: bool) -> str:
    """Write the metadata for hubs. The base model is named only by hub id, and only if all policies
    began with it."""
    stages = to_dict(config)["stages"]
    begins = [policy]
    for name in accounting.behind(policy, stages):
        begins.append(stages[name].get("policy", "init"))
    named = _HUB_ID.fullmatch(config.model.path) and not places.is_path(config.model.path)
    elsewhere = any(map(is_external, begins))
    data = ModelCardData(
        library_name="peft" if adapters else "transformers",
        pipeline_tag="text-generation",
        base_model=config.model.path if named and not elsewhere else None,
        tags=["g2d-jax"],
    )
    return f"---\n{data.to_yaml()}\n---\n"


def _made(session: Session, policy: str, manifests: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Describe the policy's base, and tabulate each stage behind it, in the order of the run."""
    written = f"{WRITTEN_BY} {__version__}."
    if is_external(policy):
        return [f"{written} It was not trained by this run.\n"]
    behind = accounting.behind(policy, to_dict(session.config)["stages"])
    table = _stages(session, behind, manifests)
    origin = (
        f"{written} It began with "
        f"{_origin(session, policy)}{'.' if table else ', and was not trained.'}\n"
    )
    return [origin, table]


def _stages(
    session: Session, behind: Mapping[str, int | None], manifests: Mapping[str, Mapping[str, Any]]
) -> str:
    """Tabulate what these stages did, in the order of the run; "" for none. behind: the step each
    was taken at."""
    stages = _published(session.config).stages
    rows = []
    for name in session.folders:
        if name in behind:
            rows.append(_row(stages[name], name, behind[name], manifests.get(name, {})))
    columns = ["stage", "what it did", "tokens generated", "tokens trained on", "FLOPs"]
    return _table("How it was made", columns, rows) if rows else ""


def _origin(session: Session, policy: str) -> str:
    config, path = session.config, base_path(session, policy)
    if not path:
        return f"random parameters (seed {config.seed})"
    found = base_revision(session, policy)
    revision = f", revision `{found}`" if found else ""
    lora = f", with adapters of rank {config.lora.rank}" if config.lora.rank else ""
    return f"`{places.last_part(path)}`{revision}{lora}"


def _quantised(config: Config, adapters: bool) -> str:
    """State that the base was quantised in training, and what that means for these files; "" where
    it was not."""
    if not config.lora.quantise:
        return ""
    sentence = (
        f"In training, the base's linear layers were held as {config.lora.quantise} codes "
        "(`lora.quantise`). "
    )
    if adapters:
        return sentence + (
            "Beside the base as it was before, these adapters compute something slightly "
            "different; `g2d export --policy init` writes the base that they were trained beside.\n"
        )
    return sentence + "The weights here are what the codes stand for, with the adapters added.\n"


def _too_long(session: Session, policy: str, manifests: Mapping[str, Mapping[str, Any]]) -> str:
    """State that the policy was trained on longer sequences than its config.json says; "" where it
    was not."""
    lengths = []
    for name in accounting.behind(policy, to_dict(session.config)["stages"]):
        for warning in manifests.get(name, {}).get("warnings", ()):
            if warning["cause"] == "positions":
                lengths.append(int(warning["values"]["tokens"]))
    if not lengths:
        return ""
    positions = session.model_config.max_position_embeddings
    return (
        f"Sequences of up to {max(lengths):,} tokens were allowed in training. That is more than "
        f"the base model's `max_position_embeddings`, {positions:,}, which config.json keeps.\n"
    )


def _row(stage: Stage, name: str, step: int | None, manifest: Mapping[str, Any]) -> list[str]:
    """Tabulate what a stage did, up to the step that a policy was taken at; None: all of it."""
    # what was spent up to the step, where the stage went on
    cost = accounting.cost(manifest.get("at", {}).get(str(step), manifest))
    taken = "" if step is None else f"; taken at step {step}"
    figures = (
        fmt.count(cost["generated"]),
        fmt.count(cost["trained"]),
        fmt.quantity(cost["flops"]),
    )
    counts = {"steps": getattr(stage, "steps", None), **manifest.get("counts", {})}
    if step is not None:
        counts = {"steps": step}  # the others are of the whole stage
    return [name, _did(stage, counts) + taken, *figures]


def _did(stage: Stage, counts: Mapping[str, int | None]) -> str:
    """Describe a stage in one line: its kind, the policy it begins with, what it counted, its
    learning rate."""
    counted = [f"{name.replace('_', ' ')} {number}" for name, number in counts.items() if number]
    rate = (
        [f"learning rate {stage.optimizer.learning_rate:g}"]
        if isinstance(stage, TrainingStage)
        else []
    )
    kind = f"{stage.kind} {stage.loss}" if isinstance(stage, Online) else stage.kind
    return f"{kind} from {', '.join(stage.policies_read())}: {', '.join([*counted, *rate])}"


def _data(config: Config) -> str:
    """Tabulate the sources of problems and the rewards, by task."""
    rows = []
    for name, task in config.all_tasks.items():
        sources = map(_source, (task.train, task.dev, task.test))
        rows.append([name, *sources, _reward(task.reward)])
    for name, stage in config.stages_of(Sft).items():
        rows.append([name, _source(stage.data), "", "", "demonstrations"])
    return _table("Data", ["task or stage", "train", "dev", "test", "reward"], rows)


def _reward(reward: Reward) -> str:
    return f"verify, answers: {reward.answers}" if reward.function == "verify" else reward.function


def _source(source: Source) -> str:
    more = [f"split {source.split}"] * bool(source.split) + [f"first {source.limit}"] * bool(
        source.limit
    )
    return f"{source.path} ({', '.join(more)})" if more else source.path


def _results(evaluation: Mapping[str, Any], manifests: Mapping[str, Mapping[str, Any]]) -> str:
    title, columns, rows = summary_table(evaluation, manifests.values())
    return _table(f"Results: {title}", columns, rows) if rows else ""


def _table(heading: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"## {one_line(heading)}", "", f"| {' | '.join(columns)} |"]
    lines.append(f"|{' --- |' * len(columns)}")
    for row in rows:
        lines.append(f"| {' | '.join(map(one_line, row))} |")
    return "\n".join([*lines, ""])


def _use(session: Session, *, adapters: bool) -> str:
    """Tell how prompts were made, with one as the policy saw it."""
    tokenizer = session.tokenizer
    template = tokenizer.template
    ends = [
        *(f"`{tokenizer.backend.id_to_token(i)}`" for i in tokenizer.eos_ids),
        *_stop_strings(session.config),
    ]
    parts = ["## Use\n"]
    if template.is_chat:
        parts.append(
            "Prompts were made with the chat template that lies here; responses end at "
            f"{', '.join(ends)}. " + _as_trained(template)
        )
    else:
        parts.append(
            "Prompts were made with the text of `tokenizer.prompt_template` below and no chat "
            f"template, so that none lies here; responses end at {', '.join(ends)}.\n"
        )
    parts.append(_code_block(_prompt_code(tokenizer), "python"))
    parts.append("The policy was trained on prompts like this one:\n")
    parts.append(_code_block(tokenizer.render(_QUESTION), "text"))
    if adapters:
        parts.append(_served(session))
    sampled = "How the figures were sampled stands in the settings of the stages"
    if adapters:
        parts.append(
            "Beside its base, what ends a response is the base's own; here it was "
            f"{tokenizer.ends()}: hand these over, as `eos_token_id` to `generate`, as "
            "`stop_token_ids` to vLLM.\n"
        )
    else:
        sampled += (
            "; generation_config.json has the base model's own sampling settings, where it has any, "
            "but no `repetition_penalty`: nothing here was sampled with one"
        )
    parts.append(f"{sampled}.\n")
    return "\n".join(parts)


def _served(session: Session) -> str:
    """Tell how vLLM serves the adapters beside their base."""
    rank = hf.greatest_rank(session.model_config)
    command, notes = "vllm serve BASE --enable-lora --lora-modules NAME=FOLDER", []
    if rank > VLLM_RANKS[-1]:
        notes.append(f"vLLM serves adapters up to rank {VLLM_RANKS[-1]}, these have {rank}.")
    elif rank > VLLM_RANK:
        command += f" --max-lora-rank {min(n for n in VLLM_RANKS if n >= rank)}"
        notes.append(f"Their greatest rank is {rank}.")
    if session.tokenizer.template.differences():
        command += " --chat-template FOLDER/chat_template.jinja"
        notes.append("The base's own chat template would be used else.")
    return " ".join([f"Served beside the base: `{command}`.", *notes]) + "\n"


def _stop_strings(config: Config) -> list[str]:
    """List the texts that ended responses in any stage, as code."""
    strings: dict[str, None] = {}
    for stage in config.stages.values():
        for sampling in stage.samplings():
            strings |= dict.fromkeys(sampling.stop)
    return [f"`{string!r}`" for string in strings]


def _as_trained(template: Template) -> str:
    """Tell that a chat template renders what the policy saw, and where it differs from the model's
    own."""
    same = (
        "It is the model's own."
        if template.pinned == template.own
        else "It has the settings of the training in it."
    )
    return " ".join([same, *template.differences()]) + "\n"


def _prompt_code(tokenizer: PromptTokenizer) -> str:
    """Write the Python that makes the prompt of a question as it was made in training."""
    lines = [
        "from transformers import AutoTokenizer",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("{HERE}")',
    ]
    lines += [f"prompt = {tokenizer.settings.pattern!r}.replace({PLACEHOLDER!r}, {_QUESTION!r})"]
    if tokenizer.template.is_chat:
        lines.append('messages = [{"role": "user", "content": prompt}]')
        lines.append(
            "ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, "
            "return_dict=False)"
        )
    else:
        lines.append('ids = tokenizer(prompt)["input_ids"]')
    return "\n".join(lines)


def _code_block(text: str, language: str) -> str:
    """Fence a text with more backticks than stand together in it."""
    runs = re.findall("`+", text)
    fence = "`" * max(3, 1 + max(map(len, runs), default=0))
    return f"{fence}{language}\n{text}\n{fence}\n"
