"""The inputs of a run by content: one digest for each setting that names a file, model, data set or
policy of another run.

    Config ─► digests: {"model.path": "content 3f0c…", …} ─► identity (config/io.py)
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etils import epath

from g2d_jax.config import Config, Issue, Reward, places, prefix_of, setting_of
from g2d_jax.config.check import refuse
from g2d_jax.config.io import identity, input_settings, to_dict
from g2d_jax.config.policy_name import OF_MODEL, PolicyName
from g2d_jax.config.section import error
from g2d_jax.data.problems import on_hub, open_rows
from g2d_jax.models import hf
from g2d_jax.runtime import precision, storage
from g2d_jax.session import contents
from g2d_jax.session.policies import followed, stage_of_run
from g2d_jax.session.session import Session
from g2d_jax.session.workdir import has_begun, read_inputs
from g2d_jax.training.checkpoint import Checkpoints

_OUTSIDE = ("seed", "dtype", "model", "lora", "tokenizer", "data", "reward", "tasks", "engine")


def digests(config: Config, only: Sequence[str] | None = None) -> dict[str, str]:
    """Return setting -> content digest of the files, models and other runs that the settings name.

    only: settings or sections to read; None: all, and the files of reward functions. Raises Invalid
    listing all that cannot be read.
    """
    found: dict[str, str] = {}
    if only is None:
        found |= function_files(config)
    wrong: list[Issue] = []
    for path, text, kind, revision in input_settings(to_dict(config)):
        if only is not None and not path.startswith(tuple(only)):
            continue
        try:
            found[path] = digest(text, kind, revision)
        except ValueError as fault:
            wrong.append(error(path, f"cannot be used: {fault}"))
    refuse(wrong)
    return found


def digest(text: str, kind: str, revision: str | None = None) -> str:
    """Return the content digest of the input that a text names. kind: of its setting, see
    `places.parts`. Raises ValueError if it cannot be read."""
    if kind == "policy" and PolicyName.parse(text).origin != OF_MODEL:
        return _checkpoint(text)
    if kind in ("policy", "model"):
        name = text.removeprefix(OF_MODEL)
        if storage.is_local(name) and not os.path.isabs(name):
            return contents.of_model(_downloaded(name, revision=revision))
        return contents.of_model(hf.resolve(name))
    if kind == "problems":
        open_rows(text, revision)  # raises with advice
    found = places.parts(text, kind)
    place = found.place if found else ""
    if hub := on_hub(text):
        content = contents.of_repository(hub[0], revision)
    else:
        content = contents.of_files(places.data_files(place))
    # the name of a known set, its configuration and split decide which rows are read
    return " ".join([content, text.replace(place, "", 1)]).strip()


@functools.lru_cache(maxsize=64)
def _downloaded(name: str, *, revision: str | None) -> epath.Path:
    """Resolve a model of the hub, once per process: a study names its models at every point."""
    return hf.resolve(name, revision=revision)


def _checkpoint(policy: str) -> str:
    """Return the content of another run's checkpoint: the checksums of its arrays."""
    chosen = followed(policy, stage_of_run(policy))
    step = PolicyName.parse(chosen).number
    with Checkpoints(stage_of_run(chosen) / "checkpoints") as checkpoints:
        number = max(checkpoints.steps()) if step is None else step
        return storage.fingerprint(checkpoints.checksums(number))


def changed_functions(workdir: epath.Path, now: Mapping[str, str]) -> list[str]:
    """List reward functions whose file changed since the run's first stage began. now:
    `digests`."""
    before = read_inputs(workdir) if has_begun(workdir) else {}
    return [name for name in now if _FILE_OF in name and before.get(name, now[name]) != now[name]]


_FILE_OF = "reward.function "


def function_files(config: Config) -> dict[str, str]:
    """Return content digests of reward functions' files. They do not belong to a run's identity:
    you may fix a function and resume."""
    found = {}
    for name, reward in config.rewards.items():
        for function in reward.user_functions:
            file = _function_file(function, reward)
            if file is not None:
                found[f"{prefix_of(name)}{_FILE_OF}{function}"] = contents.of_files([str(file)])
    return found


def _function_file(function: str, reward: Reward) -> Path | None:
    """Return the file of a user's reward function, None where it has no file of its own."""
    if reward.folder is not None:
        file = places.module_file(function, Path(reward.folder))
        if file is not None:
            return file
    module = sys.modules.get(function.partition(":")[0])
    name = getattr(module, "__file__", None)
    return Path(name) if name else None


def verify(session: Session, *settings: str) -> None:
    """Check, before a policy is loaded, that a run's model, tokenizer and further settings have not
    changed. Raises ValueError if they have."""
    now = digests(session.config, ["model.", "tokenizer.", *settings])
    changed = [
        f"{setting}: {session.inputs[setting]} -> {content}"
        for setting, content in now.items()
        if session.inputs.get(setting, content) != content
    ]
    if changed:
        raise ValueError(
            f"{session.workdir} was made with other inputs:\n  " + "\n  ".join(changed) + "\n"
            "Restore them; for a hub repository, set revision= to the earlier commit"
        )


def scored_by(config: Config, split: str | None) -> list[str]:
    """List the settings that decide scores: reward models, and the problems of a split unless
    None."""
    settings = []
    for name in config.all_tasks:
        settings.append(f"{prefix_of(name)}reward.model.path")
        if split:
            settings.append(f"{setting_of(name, split)}.path")
    return settings


def fingerprint(session: Session) -> str:
    """Fingerprint everything outside the stages that decides a policy: model, tokenizer, data,
    seed."""
    settings = identity(session.config, session.inputs)
    shared = {name: settings[name] for name in _OUTSIDE}
    return storage.fingerprint([shared, precision.of(session.config.dtype)])


def stage_fingerprint(session: Session, name: str, made_from: Mapping[str, Any]) -> str:
    """Fingerprint a stage: its settings and outside inputs. made_from: fingerprints of the stages
    that it reads."""
    stage = identity(session.config, session.inputs)["stages"][name]
    return storage.fingerprint([fingerprint(session), stage, made_from])
