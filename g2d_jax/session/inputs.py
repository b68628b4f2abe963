"""The inputs that a run reads from outside: a reader of the content of each, by the setting that
names it.

settings, problems, tokenizer ─► of_run: setting -> Reader ─► contents_of: setting -> Content ─► kept_inputs.py
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from etils import epath

from g2d_jax import contents
from g2d_jax.config import (
    Config,
    Model,
    Reward,
    Source,
    Stage,
    Tokenizer,
    places,
    prefix_of,
    setting_of,
)
from g2d_jax.config.io import identity
from g2d_jax.config.places import data_files
from g2d_jax.config.policy_name import INIT, OF_MODEL, OF_RUN, PolicyName
from g2d_jax.config.section import Place, Section
from g2d_jax.contents import Content
from g2d_jax.data.arithmetic import SLIPS
from g2d_jax.data.problems import open_rows
from g2d_jax.data.tokenizer import PromptTokenizer
from g2d_jax.models import hf
from g2d_jax.runtime import precision, storage
from g2d_jax.session.init_params import base_policy
from g2d_jax.session.policies import followed, stage_of_run
from g2d_jax.session.problems import SPLITS, Reading, read_source, reading
from g2d_jax.session.session import Session
from g2d_jax.session.tokenizers import open_tokenizer
from g2d_jax.training.checkpoint import Checkpoints


class Reader(NamedTuple):
    """An input that a setting names. place: a path, or a name on the hub. kind: of the setting, as
    `places.parts` has it. read: what reads its content."""

    place: str
    kind: str
    read: Callable[[], Content]
    revision: str | None = None

    def content(self) -> Content:
        """Read the content, with its place."""
        return replace(self.read(), place=self.place)

    @property
    def is_on_hub(self) -> bool:
        """Whether it lies on the hub, so that it may not be on this machine yet."""
        found = places.parts(self.place, self.kind)
        if found is None:
            return self.kind == "problems" and not self.is_embedded  # a data set by its name
        return not found.sure and storage.is_local(found.place) and not os.path.isabs(found.place)

    @property
    def is_embedded(self) -> bool:
        """Whether it is of an embedded task."""
        return self.place.startswith("procedural:")


Readers = dict[str, Reader]
"""Setting -> the input that it names. Nothing is read before it is asked for."""


# What a run reads


def fingerprint(session: Session) -> str:
    """Fingerprint everything outside the stages that decides a policy: model, tokenizer, data,
    seed."""
    sections = ("seed", "dtype", "model", "lora", "data", "reward", "tasks", "engine")
    shared = {name: value for name, value in identity(session.config).items() if name in sections}
    read = {}
    for name, digest in session.contents.items():
        if not name.startswith("stages."):
            read[name] = digest
    shared[precision.NAME] = precision.of(session.config.dtype)
    return storage.fingerprint([shared, session.tokenizer.fingerprint, read])


def stage_fingerprint(session: Session, name: str, made_from: Mapping[str, Any]) -> str:
    """Fingerprint a stage: its settings, what it reads from outside, and the fingerprints of its
    inputs."""
    read = {}
    for key, digest in session.contents.items():
        if key.startswith(f"stages.{name}."):
            read[key] = digest
    stage = identity(session.config)["stages"][name]
    return storage.fingerprint([fingerprint(session), stage, read, made_from])


def readers(
    config: Config, problems: Callable[[str], Content], tokenizer: Callable[[], PromptTokenizer]
) -> Readers:
    """Return all inputs of a config. problems: from "data.train", … to its content."""
    model, tokens = config.model, config.tokenizer
    place, revision = model.path or SLIPS.name, model.revision
    if tokens.path:
        place, revision = tokens.path, tokens.revision
    found = {"tokenizer": Reader(place, "model", lambda: contents.tokens(tokenizer()), revision)}
    if model.path:
        found["model.path"] = _model(model.path, model.revision)
    for name, task in config.all_tasks.items():
        for split in SPLITS:
            source: Source = getattr(task, split)
            if source.path:
                setting = setting_of(name, split)
                found[setting] = Reader(
                    source.path, "problems", functools.partial(problems, setting), source.revision
                )
        found |= _of_reward(task.reward, prefix_of(name))
    for name, stage in config.stages.items():
        found |= _of_stage(config, name, stage)
    return found


def of_run(session: Session) -> Readers:
    """Return all inputs of a run. Raises ValueError as `bases`."""
    return {**named(session), **bases(session.config, session.folders)}


def bases(config: Config, folders: Mapping[str, epath.Path]) -> Readers:
    """Return the models that the adapters of other runs belong to. folders: stage -> its folder.

    Raises ValueError, as `base_policy`, for another run that is gone, or whose adapters do not fit
    these settings.
    """
    found: Readers = {}
    if not config.lora.rank:
        return found
    for name, stage in config.stages.items():
        policies = policy_settings(name, stage)
        for setting, policy in policies.items():
            if PolicyName.parse(policy).origin != OF_RUN:
                continue
            # A stage that has begun knows its base.
            base = base_policy(config, name if len(policies) == 1 else policy, folders)
            reader = base_model(config, base)
            if reader is not None:
                found[f"{setting}.base"] = reader
    return found


def base_model(config: Config, base: str) -> Reader | None:
    """Return the model that `base_policy` names, None for random parameters."""
    name = PolicyName.parse(base)
    if name.origin != INIT:
        return _model(name.place, None)
    return _model(config.model.path, config.model.revision) if config.model.path else None


def named(session: Session) -> Readers:
    """Return the inputs that the settings of a run name themselves."""
    return readers(
        session.config,
        lambda setting: session.problems.contents[setting],
        lambda: session.tokenizer,
    )


def _of_reward(reward: Reward, prefix: str) -> Readers:
    """Return a reward model with its tokenizer, and the files of a user's own functions."""
    found = {}
    for function in reward.user_functions:
        file = _function_file(function, reward.folder)
        if file is not None:
            setting = "function" if function == reward.function else f"functions.{function}"
            found[f"{prefix}reward.{setting}"] = Reader(
                str(file), "path", functools.partial(contents.files, [str(file)])
            )
    if reward.function == "model":
        model = reward.model
        # What a kind of input needs is imported where a run has it.
        from g2d_jax.scoring import reward_model

        read_tokens = lambda: contents.tokens(reward_model.open_tokenizer(model))  # noqa: E731
        found[f"{prefix}reward.model.path"] = _model(model.path, model.revision)
        found[f"{prefix}reward.model.tokenizer"] = Reader(
            model.path, "model", read_tokens, model.revision
        )
    return found


def _function_file(function: str, folder: str | None) -> Path | None:
    """Return the file of a user's reward function, None where it has no file of its own."""
    if folder is not None:
        file = places.module_file(function, Path(folder))
        if file is not None:
            return file
    module = sys.modules.get(function.partition(":")[0])
    name = getattr(module, "__file__", None)
    return Path(name) if name else None


def _of_stage(config: Config, name: str, stage: Stage) -> Readers:
    """Return a stage's examples, rollouts and pairs of others, and policies of others."""
    found = _of_fields(config, stage, stage, f"stages.{name}")
    for setting, policy in policy_settings(name, stage).items():
        named_policy = PolicyName.parse(policy)
        if named_policy.origin == OF_MODEL:
            found[setting] = _model(named_policy.place, None)
        elif named_policy.origin == OF_RUN:
            found[setting] = Reader(policy, "policy", functools.partial(_checkpoint, policy))
    return found


_PLACES_WITH_CONTENT = [Place(kind) for kind in ("model", "problems", "rollouts", "preferences")]
"""The marks of the texts whose places an identity leaves out (config/io.py), for what lies there is
compared; policies have their own reader."""


def _of_fields(config: Config, stage: Stage, section: Section, prefix: str) -> Readers:
    """Return what the fields of a stage's section name, whatever they are called. prefix: the
    section's setting."""
    found: Readers = {}
    for key, hint in section.hints().items():
        setting = f"{prefix}.{key}"
        value = getattr(section, key)
        if isinstance(value, Source):
            found |= _of_source(config, stage, value, setting)
        elif isinstance(value, Section):
            found |= _of_fields(config, stage, value, setting)
        elif hint.place in _PLACES_WITH_CONTENT and value:
            found |= _of_text(config, stage, value, hint.place.kind, setting)
    return found


def _of_source(config: Config, stage: Stage, source: Source, setting: str) -> Readers:
    """Return the file or data set of a source in a stage: its examples, or rows of any kind."""
    path = source.path
    if not path or path.startswith("procedural:"):
        return {}
    read = functools.partial(_rows, path, source.revision)
    if path == stage.examples_path():
        of_source = json.dumps(source.to_dict())
        stamp = _stamp(path, "problems")
        read = functools.partial(_examples, of_source, stamp)
    return {setting: Reader(path, "problems", read, source.revision)}


def _of_text(config: Config, stage: Stage, text: str, kind: str, setting: str) -> Readers:
    """Return the input that a text of a stage names, unless it names none outside the run.

    kind: as `places.parts` has it.
    """
    if kind == "model":
        return {setting: _model(text, None)}
    if text.startswith("procedural:") or text in ("sample", "archive", *config.stages):
        return {}
    read = functools.partial(_files, text)
    if kind == "problems":
        read = functools.partial(_rows, text, None)
    return {setting: Reader(text, kind, read)}


def policy_settings(name: str, stage: Stage) -> dict[str, str]:
    """Return the policies that a stage reads, each behind the setting that names it."""
    policies = stage.policies_read()
    if len(policies) == 1:
        return {f"stages.{name}.policy": policies[0]}
    return {f"stages.{name}.policies.{i}": policy for i, policy in enumerate(policies)}


def _model(path: str, revision: str | None) -> Reader:
    return Reader(path, "model", lambda: weights(hf.resolve(path, revision=revision)), revision)


def weights(folder: epath.Path) -> Content:
    """Return the content of a model's folder, as `contents.weights`; a local one is read again only
    if it changed."""
    if not storage.is_local(folder):
        return contents.weights(folder)
    return _weights(str(folder), _stamp(str(folder), "path"))


def _rows(path: str, revision: str | None) -> Content:
    """Return the content of a source's rows, all of them as they are in the file."""
    return contents.rows(row.values for row in open_rows(path, revision)[1])


def _files(path: str) -> Content:
    """Return the content of a dump's or a preference set's files, of the hub of its rows."""
    if path.startswith("hub:"):
        return _rows(path, None)
    return contents.files(data_files(path))


def _checkpoint(policy: str) -> Content:
    """Return the content of another run's checkpoint: the checksums of its arrays."""
    chosen = followed(policy, stage_of_run(policy))
    step = PolicyName.parse(chosen).number
    with Checkpoints(stage_of_run(chosen) / "checkpoints") as checkpoints:
        number = max(checkpoints.steps()) if step is None else step
        arrays = checkpoints.checksums(number)
    return contents.content("arrays", {name: f"{arrays[name]:08x}" for name in sorted(arrays)})


def contents_of(every: Readers) -> dict[str, Content]:
    """Read inputs."""
    return {name: reader.content() for name, reader in every.items()}


def digests(found: Mapping[str, Content]) -> dict[str, str]:
    """Return what fingerprints have of inputs. A reward function's file is not in them: see the
    top."""
    kept = {}
    for name, item in found.items():
        if "reward.function" not in name:
            kept[name] = item.digest
    return kept


# Of a config alone, for studies, which name their stages before they open a run


def of_config(config: Config) -> dict[str, Content]:
    """Read the inputs of a config, but those of embedded tasks, which its settings say, and those
    on the hub.

    What was read before in this process is read again only where its files have another time or
    size.
    """
    sources: dict[str, tuple[Source, Reading]] = {}
    for (name, task), split in itertools.product(config.all_tasks.items(), SPLITS):
        sources[setting_of(name, split)] = (getattr(task, split), reading(task.reward))

    def problems(setting: str) -> Content:
        source, how = sources[setting]
        return _problems(json.dumps(source.to_dict()), how, _stamp(source.path, "problems"))

    def tokenizer() -> PromptTokenizer:
        return _tokenizer(
            config.tokenizer,
            config.model,
            _stamp(config.tokenizer.path or config.model.path, "model"),
        )

    found = {**readers(config, problems, tokenizer), **bases(config, {})}
    read = {}
    for name, reader in found.items():
        if not (reader.is_on_hub or reader.is_embedded):
            read[name] = reader.content()
    return read


def on_hub(config: Config) -> dict[str, list[str | None]]:
    """Return place and revision of the inputs of a config that lie on the hub, by setting."""

    def unread(*_: str) -> NoReturn:
        raise AssertionError("only places are asked for")

    found = {}
    for name, reader in {**readers(config, unread, unread), **bases(config, {})}.items():
        if reader.is_on_hub:
            found[name] = [reader.place, reader.revision]
    return found


@functools.lru_cache(maxsize=64)
def _problems(source: str, how: Reading, stamp: Stamp) -> Content:
    """Read a source of problems, given as JSON. stamp: of its file, so that it is read again when
    that changes."""
    return read_source(Source(**json.loads(source)), how)[2]


@functools.lru_cache(maxsize=64)
def _examples(source: str, stamp: Stamp) -> Content:
    """Read a source of examples, as `_problems`."""
    from g2d_jax.data.examples import load_examples

    return contents.records(load_examples(Source(**json.loads(source)))[0])


@functools.lru_cache(maxsize=8)
def _tokenizer(settings: Tokenizer, model: Model, stamp: Stamp) -> PromptTokenizer:
    """Load a tokenizer. stamp: of its files."""
    return open_tokenizer(settings, model)


@functools.lru_cache(maxsize=64)
def _weights(folder: str, stamp: Stamp) -> Content:
    """Read a local model's folder. stamp: of its files."""
    return contents.weights(folder)


Stamp = tuple[tuple[str, int, int], ...]
"""The name, time and size of each file."""


def _stamp(place: str, kind: str) -> Stamp:
    """Return the stamp of a local file, or of all files in a local folder; () for what is no
    such."""
    found = places.parts(place, kind)
    if found is None or not os.path.isabs(found.place):
        return ()
    path = Path(found.place)
    files = [path]
    if path.is_dir():
        files = sorted(path.rglob("*"))
    stamps = []
    for file in filter(Path.is_file, files):
        status = file.stat()
        stamps.append((str(file), status.st_mtime_ns, status.st_size))
    return tuple(stamps)
