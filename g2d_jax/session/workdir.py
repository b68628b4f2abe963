"""The work directory of a run: its settings, stages and environment, and whose it is."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import posixpath
import re
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from g2d_jax import __version__
from g2d_jax.config import Config
from g2d_jax.config.graph import dependents_of_final
from g2d_jax.config.io import (
    differences,
    from_dict,
    identity,
    to_dict,
    with_longer,
)
from g2d_jax.runtime import precision, storage
from g2d_jax.runtime.lock import LOCK

_STAGE = re.compile(r"(\d+)-(.+)")
_LOGIN = re.compile(r"(://)[^/?#\s@]*@")
_SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|KEY|CREDENTIALS)$", re.IGNORECASE)
PROGRAMS = "compiled"  # folder of compiled programs, of a run of several processes
PLANS = "sweeps"  # folder of studies: NAME.json has its config and points
# of a study's point: [[stage, folder relative to the point's, step to read], …] in order
LINKS = "stages.json"


def absolute(workdir: storage.PathLike) -> epath.Path:
    """Make a local path absolute, as Orbax requires; resolve ".." in that of an object store.

    Raises as `check_place` and `storage.check_driver` do.
    """
    check_place(workdir)
    storage.check_driver(workdir)
    if storage.is_local(workdir):
        return epath.Path(workdir).expanduser().resolve()
    scheme, _, rest = os.fspath(workdir).partition("://")
    return epath.Path(f"{scheme}://{posixpath.normpath(rest)}")


def check_place(workdir: storage.PathLike) -> None:
    """Raise ValueError for a work directory on S3: checkpoints cannot be written there."""
    path = os.fspath(workdir)
    if path.startswith("s3://"):
        raise ValueError(
            f"{path}: a work directory is on a local disk or on Google Cloud Storage (gs://…). "
            f"Work on a local disk, and copy it with `aws s3 sync DIRECTORY {path}`"
        )


def stage_folders(workdir: epath.Path) -> dict[str, epath.Path]:
    """Map stage -> folder, in order, for the stages that a run has begun, or all of a study's
    point."""
    links = workdir / LINKS
    if links.exists():
        return {row[0]: absolute(workdir / row[1]) for row in storage.read_json(links)}
    with storage.naming("list", workdir):
        paths = list(workdir.iterdir())
    numbered = []
    for path in paths:
        if match := _STAGE.fullmatch(path.name):
            numbered.append((int(match[1]), match[2], path))
    return {name: path for _, name, path in sorted(numbered)}


def has_begun(workdir: epath.Path) -> bool:
    """Return whether a run, or a study's point, has begun a stage there: until then its settings
    may change."""
    return workdir.exists() and bool(stage_folders(workdir))


def stage_steps(workdir: epath.Path) -> dict[str, int]:
    """Map stage -> step at which a study's point reads a longer trajectory; {} for a run."""
    links = workdir / LINKS
    if not links.exists():
        return {}
    return {row[0]: row[2] for row in storage.read_json(links) if row[2] is not None}


def no_run(workdir: epath.Path) -> ValueError:
    """Return the error for a folder that is not a run's work directory."""
    if not workdir.exists():
        reason = "there is no such folder"
    elif not workdir.is_dir():
        reason = "it is a file"
    elif (workdir / PLANS).exists():
        return ValueError(
            f"{workdir} holds no run but studies: give the folder of a point, points/STUDY/POINT "
            "in it"
        )
    else:
        reason = "no config.json"
    return ValueError(
        f"{workdir} holds no run ({reason}): give the work directory that g2d run printed when "
        "it began"
    )


def read_settings(workdir: epath.Path) -> ConfigDict:
    """Read the settings of a work directory, without the folders of reward functions: a directory
    from elsewhere must not name code to run.

    Raises ValueError if it holds no run, or settings of another version.
    """
    file = workdir / "config.json"
    if not file.exists():
        raise no_run(workdir)
    content = storage.read_json(file)
    if not isinstance(content, dict) or not isinstance(content.get("config"), dict):
        raise ValueError(f"{file} is not the settings of a run")
    try:
        config = from_dict(content["config"])
    except ValueError as error:
        raise ValueError(
            f"{file}, written by version {content.get('version')}: {error}. Use that version, or "
            "another work directory"
        ) from error
    for section in (config, *config.tasks.values()):
        section.reward.folder = None
    return config


def claim(
    config: Config,
    workdir: epath.Path,
    own: Mapping[str, str] = MappingProxyType({}),
    inputs: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Claim a work directory for a config, or check that it is this config's. Writes config.json
    and environment.json; returns the token of `mark_start`.

    own: names of functions from Python in place of configured ones. inputs: setting -> content
    digest (session/inputs.py). Both belong to the run's identity.
    Until a stage has begun, the settings may change. Later a stage that `with_longer` lets go on
    may have more steps, unless a stage made from its end has begun.
    """
    for folder in require_same_run(config, workdir, own, inputs):
        storage.unfinish(folder)
    write_settings(config, workdir, own, inputs)
    return mark_start(workdir)


def write_settings(
    config: Config,
    workdir: epath.Path,
    own: Mapping[str, str] = MappingProxyType({}),
    inputs: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write config.json. own, inputs: as of `claim`."""
    kept = {
        "config": to_dict(config),
        "inputs": dict(inputs),
        "own": dict(own),
        precision.NAME: precision.of(config.dtype),
        "version": __version__,
    }
    storage.write_json(workdir / "config.json", kept)


def read_inputs(workdir: epath.Path) -> dict[str, str]:
    """Read the content of what a run was started with, by setting."""
    return dict(storage.read_json(workdir / "config.json").get("inputs") or {})


def mark_start(workdir: epath.Path) -> str:
    """Write environment.json; return a token of this start, for `check_token`."""
    token = secrets.token_hex(8)
    storage.write_json(workdir / "environment.json", {**environment(), "start": token})
    return token


def require_same_run(
    config: Config,
    workdir: epath.Path,
    own: Mapping[str, str] = MappingProxyType({}),
    inputs: Mapping[str, str] = MappingProxyType({}),
) -> list[epath.Path]:
    """Return the folders of begun stages that go on past their former end. Writes nothing.

    Raises ValueError, as `claim`, for a work directory that is not this config's.
    """
    file = workdir / "config.json"
    if not file.exists():
        _require_empty(workdir)
        return []
    content = storage.read_json(file)
    if not isinstance(content, dict) or not isinstance(content.get("config"), dict):
        raise ValueError(
            f"{workdir} holds a config.json that is not a run's: choose another --workdir"
        )
    # Until a stage has begun the settings may change: no result depends on them.
    begun = stage_folders(workdir)
    if not begun:
        return []
    then = identity(read_settings(workdir), content.get("inputs") or {})
    then |= {
        FROM_PYTHON: content.get("own") or {},
        precision.NAME: content.get(precision.NAME, precision.DEFAULT),
    }
    now = identity(config, inputs)
    now |= {FROM_PYTHON: dict(own), precision.NAME: precision.of(config.dtype)}
    longer, names = with_longer(then, now)
    goes_on = [name for name in names if name in begun]
    ended = {}
    for name, others in dependents_of_final(config).items():
        if name in goes_on and (stale := sorted(begun.keys() & set(others))):
            ended[name] = stale
    others = differences(longer, now)
    if ended or others:
        raise ValueError(_refusal(workdir, differences(then, now), {} if others else ended))
    return [begun[name] for name in goes_on]


FROM_PYTHON = "given from Python"
"""The part of a run's identity that names its functions from Python."""


def _require_empty(workdir: epath.Path) -> None:
    """Raise ValueError for a folder without settings that is not empty."""
    # A start that was interrupted before it wrote its settings leaves these two.
    if workdir.exists() and any(child.name not in (LOCK, PROGRAMS) for child in workdir.iterdir()):
        raise ValueError(f"{workdir} is not empty and holds no run: choose another --workdir")


def _refusal(
    workdir: epath.Path, changed: Sequence[str], ended: Mapping[str, Sequence[str]]
) -> str:
    """Explain why a run cannot go on with changed settings, and what to do.

    changed: its differences. ended: stage that could go on -> the begun stages that are made from
    the policy it ended with.
    """
    parts = [
        f"{workdir} was started with other settings, files or models:\n  " + "\n  ".join(changed),
        "Choose another --workdir, or undo the change. A file or model may be at another path with "
        "the same content. For an old commit of the hub, set revision. Only what docs/config.md "
        "calls runtime may change (mesh, compute, logging, checkpoint …), and the steps of an "
        "online stage that can go on may be raised",
    ]
    for name, others in ended.items():
        parts.append(
            f"Stage {name} could go on, but {', '.join(others)} began with its last policy: move "
            "their folders away first"
        )
    stage = "STAGE"
    for line in changed:
        if re.match(r"stages\.[^.]+\.(steps|epochs):", line):
            stage = line.split(".")[1]
            break
    parts.append(
        "To go on from the end of a stage with other settings, start another run with "
        f"policy='run:{workdir}#{stage}' in its first stage, or 'hf:FOLDER' of an export. Its "
        "optimiser starts anew"
    )
    return "\n".join(parts)


def check_token(workdir: epath.Path, token: str) -> None:
    """Raise ValueError if this process sees another folder than the one that `claim` was called
    for."""
    file = workdir / "environment.json"
    if not file.exists() or storage.read_json(file).get("start") != token:
        raise ValueError(
            f"{workdir} is not the same folder on {socket.gethostname()} as for process 0: the "
            "work directory must be on a file system or object store that all processes share"
        )


def source_digest(folder: Path = Path(__file__).parents[1]) -> str:
    """Digest this library's modules: an edited checkout keeps its version number."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder)}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def packages() -> dict[str, str]:
    """Return the versions of the packages that decide results."""
    names = (
        "jax",
        "jaxlib",
        "flax",
        "optax",
        "orbax-checkpoint",
        "transformers",
        "math-verify",
        "grain",
        "numpy",
    )
    return {name: importlib.metadata.version(name) for name in names}


def environment() -> dict[str, Any]:
    """Return versions, devices and the command (without secrets), for provenance."""
    import jax  # here: reports read work directories without it

    return {
        "g2d_jax": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages(),
        "devices": [str(device) for device in jax.devices()],
        "processes": jax.process_count(),
        "command": [without_secrets(argument) for argument in sys.argv],
    }


def without_secrets(text: str) -> str:
    """Replace logins in URLs, and values of environment variables named like a secret, by "***"."""
    text = _LOGIN.sub(r"\1***@", text)
    for value in secret_variables().values():
        text = text.replace(value, "***")
    return text


def secret_variables() -> dict[str, str]:
    """Return the environment variables that are named like a secret and long enough for one."""
    secrets = {}
    for name, value in os.environ.items():
        if _SECRET.search(name) and len(value) >= 8:
            secrets[name] = value
    return secrets
