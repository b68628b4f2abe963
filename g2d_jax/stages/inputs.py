"""What a run reads from outside, kept by content in its work directory and compared at every start.

    settings, problems, tokenizer ─► of_run: setting -> Content ─┬─► WORKDIR/inputs.json, WORKDIR/inputs/SETTING.jsonl
                                                                 └─► compared with what earlier starts kept ─► refused

Places are free: what lies elsewhere with the same content is the same. A reward function's file is only warned about:
mending one that failed must not end a run.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, NoReturn

from etils import epath

from g2d_jax import contents, places
from g2d_jax.config import Config, Model, Online, Reward, Source, Stage, Tokenizer
from g2d_jax.config_load import beside
from g2d_jax.contents import Content, difference
from g2d_jax.data.arithmetic import SLIPS
from g2d_jax.data.dumps import by_step, dump_files, read_dump
from g2d_jax.data.examples import load_examples
from g2d_jax.data.problems import open_rows
from g2d_jax.data.tokenizer import PromptTokenizer
from g2d_jax.graph import policies_read
from g2d_jax.models import hf
from g2d_jax.runtime import storage
from g2d_jax.runtime.lock import awaited
from g2d_jax.scoring import reward_model
from g2d_jax.stages.init_params import base_policy, base_setting
from g2d_jax.stages.policies import base_of, followed, stage_of_run
from g2d_jax.stages.problems import Reading, gives_columns, read_source, reading, setting_of
from g2d_jax.stages.runtime import Runtime, open_tokenizer
from g2d_jax.training.checkpoint import Checkpoints
from g2d_jax.workdir import INPUTS, PLANS, absolute, settings_of, stage_folders

MOST_PARTS = 100_000  # of an input whose parts are kept: beyond, its digest and their number alone
PARTS = "inputs"  # folder of the parts' digests


class Reader(NamedTuple):
    """An input that a setting names. place: a path, or a name on the hub. kind: of the setting, as `places.parts` has
    it. read: what reads its content."""

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
        found = _parts(self.place, self.kind)
        if found is None:
            return self.kind == "problems" and not self.is_embedded  # a data set by its name
        return not found.sure and storage.is_local(found.place) and not os.path.isabs(found.place)

    @property
    def is_embedded(self) -> bool:
        """Whether it is of an embedded task."""
        return self.place.startswith("procedural:")


def _parts(place: str, kind: str) -> places.Parts | None:
    """Take a place apart, its path absolute; None where it names none."""
    return places.parts(places.decided(place, kind, places.here()), kind)


Readers = dict[str, Reader]
"""Setting -> the input that it names. Nothing is read before it is asked for."""


# What a run reads


def readers(config: Config, problems: Callable[[str], Content], tokenizer: Callable[[], PromptTokenizer]) -> Readers:
    """Return all inputs of a config. problems: from "data.train", … to its content."""
    model, tokens = config.model, config.tokenizer
    own = (tokens.path, tokens.revision) if tokens.path else (model.path or SLIPS.name, model.revision)
    found = {"tokenizer": Reader(own[0], "model", lambda: contents.tokens(tokenizer()), own[1])}
    if model.path:
        found["model.path"] = _model(model.path, model.revision)
    for name, task in config.all_tasks.items():
        for split in ("train", "dev", "test"):
            source: Source = getattr(task, split)
            if source.path:
                setting = setting_of(name, split)
                found[setting] = Reader(source.path, "problems", functools.partial(problems, setting), source.revision)
        found |= _of_reward(task.reward, "" if name == "main" else f"tasks.{name}.")
    for name, stage in config.stages.items():
        found |= _of_stage(config, name, stage)
    return found


def of_run(runtime: Runtime) -> Readers:
    """Return all inputs of a run. Raises ValueError as `bases`."""
    return {**named(runtime), **bases(runtime.config, runtime.folders)}


def bases(config: Config, folders: Mapping[str, epath.Path]) -> Readers:
    """Return the models that adapters of other runs stand beside. folders: stage -> its folder.

    Raises ValueError, as `base_policy`, for another run that is gone, or whose adapters do not fit these settings.
    """
    found: Readers = {}
    if not config.lora.rank:
        return found
    for name, stage in config.stages.items():
        policies = policies_read(stage)
        for number, policy in enumerate(policies):
            if not policy.startswith("run:"):
                continue
            # A stage that has begun knows its base.
            base = base_policy(config, name if len(policies) == 1 else policy, folders)
            if reader := _base(config, base):
                found[f"{_setting(name, policies, number)}.base"] = reader
    return found


def _base(config: Config, base: str) -> Reader | None:
    """Return the model that `base_policy` names, None for random parameters."""
    if base != "init":
        return _model(base.removeprefix("hf:"), None)
    return _model(config.model.path, config.model.revision) if config.model.path else None


def named(runtime: Runtime) -> Readers:
    """Return the inputs that the settings of a run name themselves."""
    return readers(runtime.config, lambda setting: runtime.problem_contents[setting], lambda: runtime.tokenizer)


def _of_reward(reward: Reward, prefix: str) -> Readers:
    """Return a reward model with its tokenizer, or the file of a user's own function."""
    if reward.function == "model":
        model, tokenizer = reward.model, reward.model.tokenizer
        source, revision = (tokenizer, None) if tokenizer else (model.path, model.revision)
        read_tokens = lambda: contents.tokens(reward_model.open_tokenizer(model))  # noqa: E731
        return {
            f"{prefix}reward.model.path": _model(model.path, model.revision),
            f"{prefix}reward.model.tokenizer": Reader(source, "model", read_tokens, revision),
        }
    file = _function_file(reward)
    if file is None:
        return {}
    return {f"{prefix}reward.function": Reader(str(file), "path", lambda: contents.files([str(file)]))}


def _function_file(reward: Reward) -> Path | None:
    """Return the file of a user's reward function, None where it is none or lies in no file of its own."""
    if not gives_columns(reward):
        return None
    if reward.folder is not None and (file := beside(reward.function, Path(reward.folder))):
        return file
    module = sys.modules.get(reward.function.partition(":")[0])
    name = getattr(module, "__file__", None)
    return Path(name) if name else None


def _of_stage(config: Config, name: str, stage: Stage) -> Readers:
    """Return a stage's examples, rollouts and pairs of others, and policies of others."""
    found: Readers = {}
    data = getattr(stage, "data", None)
    if data is not None and not data.path.startswith("procedural:"):
        source = json.dumps(data.to_dict())
        read = functools.partial(_examples, source, config.data.seed, _stamp(data.path, "problems"))
        found[f"stages.{name}.data"] = Reader(data.path, "problems", read, data.revision)
    for key in ("rollouts", "preferences"):
        path = getattr(stage, key, "sample")
        if path in ("sample", "archive", *config.stages):
            continue
        read = functools.partial(_files, path)
        if isinstance(stage, Online):  # its dump may grow: it goes by rows, in the order that the stage takes them
            read = functools.partial(_rollouts, path, stage.reward_column)
        found[f"stages.{name}.{key}"] = Reader(path, key, read)
    policies = policies_read(stage)
    for number, policy in enumerate(policies):
        setting = _setting(name, policies, number)
        if policy.startswith("hf:"):
            found[setting] = _model(policy.removeprefix("hf:"), None)
        elif policy.startswith("run:"):
            found[setting] = Reader(policy, "policy", functools.partial(_checkpoint, policy))
    return found


def _setting(name: str, policies: tuple[str, ...], number: int) -> str:
    """Name the setting of a stage's policy."""
    return f"stages.{name}.policy" if len(policies) == 1 else f"stages.{name}.policies.{number}"


def _model(path: str, revision: str | None) -> Reader:
    return Reader(path, "model", lambda: weights(hf.resolve(path, revision=revision)), revision)


def weights(folder: epath.Path) -> Content:
    """Return the content of a model's folder, as `contents.weights`; a local one is read again only if it changed."""
    if not storage.is_local(folder):
        return contents.weights(folder)
    return _weights(str(folder), _stamp(str(folder), "path"))


def _files(path: str) -> Content:
    """Return the content of a dump's or a preference set's files, of the hub of its rows."""
    if path.startswith("hub:"):
        return contents.rows(row.values for row in open_rows(path)[1])
    return contents.files(dump_files(path))


def _rollouts(path: str, reward: str | None) -> Content:
    """Return the content of an online stage's dump. reward: the column of its rewards, as of `read_dump`."""
    return _rows_of_dump(path, reward, tuple(map(contents.stamp, dump_files(path))))


@functools.lru_cache(maxsize=8)
def _rows_of_dump(path: str, reward: str | None, stamps: tuple[str, ...]) -> Content:
    """Read a dump. stamps: of its files, so that it is read again when one changes."""
    return contents.rollouts(by_step(read_dump(path, reward)))


def _checkpoint(policy: str) -> Content:
    """Return the content of another run's checkpoint: the checksums of its arrays."""
    chosen = followed(policy, stage_of_run(policy))
    step = chosen.rpartition("#")[2].partition("@")[2]
    with Checkpoints(stage_of_run(chosen) / "checkpoints") as checkpoints:
        number = int(step) if step else max(checkpoints.steps())
        arrays = checkpoints.checksums(number)
    return contents.content("arrays", {name: f"{arrays[name]:08x}" for name in sorted(arrays)})


def contents_of(every: Readers) -> dict[str, Content]:
    """Read inputs."""
    return {name: reader.content() for name, reader in every.items()}


def digests(found: Mapping[str, Content]) -> dict[str, str]:
    """Return what fingerprints have of inputs. A reward function's file is not in them: see the top."""
    return {name: item.digest for name, item in found.items() if not name.endswith("reward.function")}


# Of a config alone, for studies, which name their stages before they open a run


def of_config(config: Config) -> dict[str, Content]:
    """Read the inputs of a config, but those of embedded tasks, which its settings say, and those on the hub.

    What was read before in this process is read again only where its files have another time or size.
    """
    sources = {
        setting_of(name, split): (getattr(task, split), reading(task.reward))
        for name, task in config.all_tasks.items()
        for split in ("train", "dev", "test")
    }

    def problems(setting: str) -> Content:
        source, how = sources[setting]
        return _problems(json.dumps(source.to_dict()), config.data.seed, how, _stamp(source.path, "problems"))

    def tokenizer() -> PromptTokenizer:
        return _tokenizer(config.tokenizer, config.model, _stamp(config.tokenizer.path or config.model.path, "model"))

    found = {**readers(config, problems, tokenizer), **bases(config, {})}
    read = {name: reader for name, reader in found.items() if not (reader.is_on_hub or reader.is_embedded)}
    return contents_of(read)


def on_hub(config: Config) -> dict[str, list[str | None]]:
    """Return place and revision of the inputs of a config that lie on the hub, by setting."""

    def unread(*_: str) -> NoReturn:
        raise AssertionError("only places are asked for")

    found = {**readers(config, unread, unread), **bases(config, {})}
    return {name: [reader.place, reader.revision] for name, reader in found.items() if reader.is_on_hub}


@functools.lru_cache(maxsize=64)
def _problems(source: str, seed: int, how: Reading, stamp: Stamp) -> Content:
    """Read a source of problems, given as JSON. stamp: of its file, so that it is read again when that changes."""
    return read_source(Source(**json.loads(source)), seed, how)[2]


@functools.lru_cache(maxsize=64)
def _examples(source: str, seed: int, stamp: Stamp) -> Content:
    """Read a source of examples, as `_problems`."""
    return contents.records(load_examples(Source(**json.loads(source)), seed)[0])


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
    """Return the stamp of a local file, or of all files in a local folder; () for what is no such."""
    found = _parts(place, kind)
    if found is None or not os.path.isabs(found.place):
        return ()
    path = Path(found.place)
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    statuses = [(str(file), file.stat()) for file in files if file.exists()]
    return tuple((name, status.st_mtime_ns, status.st_size) for name, status in statuses)


# Keeping and comparing


def check(
    workdir: epath.Path,
    found: Mapping[str, Content],
    say: Callable[[str], None],
    settings: Config,
    begun: bool | None = None,
) -> None:
    """Compare the inputs of a run with those that its work directory keeps, or keep them. For one process.

    begun: whether a stage has begun, None to look: before, all may change. Raises ValueError with what differs and what
    to do.
    """
    kept = read(workdir)
    begun = bool(stage_folders(workdir)) if begun is None else begun
    compare(workdir, found, say, settings, begun)
    if begun and kept is None:
        say(
            f"{workdir} was begun by a version that kept no contents: {INPUTS} is written now, and what it reads "
            "(problems, tokenizer, weights, files of others) is compared from now on"
        )
    if kept is None or any(_entry(kept.get(name)) != _entry(item) for name, item in found.items()):
        keep(workdir, {**(kept or {}), **found} if begun else found)


def compare(
    workdir: epath.Path, found: Mapping[str, Content], say: Callable[[str], None], settings: Config, begun: bool
) -> None:
    """Raise ValueError as `check` does; write nothing."""
    _check_bases_of_others(found, settings)
    kept = read(workdir)
    if not begun or kept is None:
        return
    changed = list(_differences(workdir, kept, found, settings, say))
    if changed:
        raise ValueError(refusal(workdir, changed))


def _check_bases_of_others(found: Mapping[str, Content], settings: Config) -> None:
    """Raise ValueError where adapters of another run would stand beside another model than they were trained with."""
    for name, stage in settings.stages.items():
        policies = policies_read(stage)
        for number, policy in enumerate(policies):
            setting = _setting(name, policies, number)
            if f"{setting}.base" in found:
                _check_base_of_other(setting, policy, found[f"{setting}.base"])


def _check_base_of_other(setting: str, policy: str, base: Content) -> None:
    """Raise ValueError where a base is not the model that another run's adapters were trained with, which it keeps."""
    place, _, stage = policy.removeprefix("run:").rpartition("#")
    other = absolute(place)
    theirs = Config.of(settings_of(other, storage.read_json(other / "config.json"), finished=True)[0])
    name = base_setting(theirs, stage)
    kept = (read(other) or {}).get(name)
    if kept is not None and difference(kept, base):
        raise ValueError(
            f"{setting}: the adapters of {policy} stand beside another model than {base.place} now holds: "
            f"{difference(_with_parts(other, name, kept), base)}. Put back the model that they were trained with, or "
            "export that policy and use hf:FOLDER"
        )


def check_hub(root: epath.Path, runtime: Runtime) -> None:
    """Compare what a study reads from the hub with what its directory keeps of it, by name and revision, or keep it.

    The names of a study's stages have no more of it than that, for it may not have been here when they were made.
    """
    every = of_run(runtime).items()
    found = contents_of({f"{name} {at.place}@{at.revision or ''}": at for name, at in every if at.is_on_hub})
    if found:
        check_shared(root, found, runtime.tracker.say, runtime.config)


def check_shared(root: epath.Path, found: Mapping[str, Content], say: Callable[[str], None], settings: Config) -> None:
    """Compare contents with those that the directory of a study keeps, or keep them, one process at a time."""
    with awaited(root / PLANS):
        check(root, found, say, settings, begun=read(root) is not None)


def refusal(workdir: epath.Path, changed: list[str]) -> str:
    """Return the message for inputs that are not what a run began with."""
    return "\n  ".join([f"{workdir} was made with other inputs:", *changed]) + (
        "\nPut them back as they were (where they lie does not matter: settings may name another place, and with "
        "revision= a commit of the hub), or choose another --workdir"
    )


def _differences(
    workdir: epath.Path,
    kept: Mapping[str, Content],
    found: Mapping[str, Content],
    settings: Config,
    say: Callable[[str], None],
) -> Iterator[str]:
    """Yield a line for each input that is not as it was; of a reward function's file it is only said."""
    for name, new in found.items():
        if name not in kept or not difference(kept[name], new):
            continue
        old = _with_parts(workdir, name, kept[name])
        line = f"{name}{f' ({new.place})' if new.place else ''}: {difference(old, new)}"
        if name.endswith("reward.function"):
            say(f"warning: {line}. Rewards from now on may not be those of earlier stages")
        elif not _has_grown(name, old, new, settings):
            yield line


def _has_grown(name: str, old: Content, new: Content, settings: Config) -> bool:
    """Return whether a dump of an online stage goes on behind what it was: later updates take what is added."""
    stage = settings.stages.get(name.split(".")[1]) if name.endswith(".rollouts") else None
    return isinstance(stage, Online) and contents.grown(old, new)


def _entry(item: Content | None) -> dict[str, object]:
    """Return what inputs.json has of an input."""
    if item is None:
        return {}
    values = {"kind": item.kind, "digest": item.digest, "count": item.count, "commit": item.commit, "place": item.place}
    return {key: value for key, value in values.items() if value != ""}


def keep(workdir: epath.Path, found: Mapping[str, Content]) -> None:
    """Write inputs.json, and before it the digests of parts."""
    for name, item in found.items():
        if item.parts and len(item.parts) <= MOST_PARTS:
            lines = "".join(f"{json.dumps([part, digest])}\n" for part, digest in item.parts.items())
            storage.write_bytes(_parts_file(workdir, name), lines.encode())
    storage.write_json(workdir / INPUTS, {name: _entry(item) for name, item in found.items()})


def _parts_file(workdir: epath.Path, name: str) -> epath.Path:
    return workdir / PARTS / f"{re.sub(r'[^A-Za-z0-9_.@-]', '_', name)}.jsonl"


def read(workdir: epath.Path) -> dict[str, Content] | None:
    """Read what a work directory keeps of its inputs, without their parts; None where it keeps nothing."""
    file = workdir / INPUTS
    if not file.exists():
        return None
    try:
        return {name: Content(**entry) for name, entry in storage.read_json(file).items()}
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{file} is damaged: {error}. Delete it, and contents are kept anew") from error


def _with_parts(workdir: epath.Path, name: str, item: Content) -> Content:
    """Return an input with the digests of its parts, where they are kept and belong to it."""
    file = _parts_file(workdir, name)
    if not file.exists():
        return item
    lines = storage.read_bytes(file).decode().splitlines()
    whole = contents.content(item.kind, dict(json.loads(line) for line in lines))
    return replace(item, parts=whole.parts) if whole.digest == item.digest else item


# Commands on a run


def verify(runtime: Runtime, policy: str, *settings: str) -> None:
    """Compare the tokenizer, what a policy is made of and some further inputs with what the run keeps of them.

    Raises ValueError where they differ: adapters beside another base, for one, would be another policy.
    """
    kept = read(runtime.workdir) or {}
    every = named(runtime)
    wanted = ["tokenizer", *settings, *_under(runtime, policy)]
    if runtime.config.lora.rank and (base := _base(runtime.config, base_of(runtime, policy))):
        if policy.startswith("run:"):
            _check_base_of_other("policy", policy, base.content())
        wanted.append(base_setting(runtime.config, policy))
        every.setdefault(wanted[-1], base)
    found = {name: every[name].content() for name in dict.fromkeys(wanted) if name in kept and name in every}
    changed = list(_differences(runtime.workdir, kept, found, runtime.config, runtime.tracker.say))
    if changed:
        raise ValueError(refusal(runtime.workdir, changed))


def _under(runtime: Runtime, policy: str) -> Iterator[str]:
    """Yield the settings of the weights that loading a policy reads beside the run's own checkpoints."""
    loaded = {_normal(runtime, policy)}
    if runtime.config.lora.rank:
        loaded.add(base_of(runtime, policy))
    if "init" in loaded:
        yield "model.path"
    for name, stage in runtime.config.stages.items():
        policies = policies_read(stage)
        for number, other in enumerate(policies):
            if _normal(runtime, other) in loaded:
                yield _setting(name, policies, number)


def _normal(runtime: Runtime, policy: str) -> str:
    """Return a policy's name with the path of a model as `base_of` gives it."""
    return base_of(runtime, policy) if policy.startswith("hf:") else policy
