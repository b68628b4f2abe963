"""A stage's inputs from outside the study, by content: a file that changed makes another node."""

from __future__ import annotations

import functools
import hashlib
import os

from etils import epath

from g2d_jax.config import Config, Sft
from g2d_jax.graph import policies_read
from g2d_jax.runtime import storage
from g2d_jax.stages.policies import stage_of_run


def contents(config: Config, name: str) -> dict[str, str]:
    """Map path or policy to digest, for the local files and the other runs' stages that a stage of the config reads."""
    stage = config.stages[name]
    named = [source.path for source in (config.data.train, config.data.dev, config.data.test)]
    named += [stage.data.path] if isinstance(stage, Sft) else []
    inside = {"sample", "archive", *config.stages}
    read = [getattr(stage, field, "sample") for field in ("rollouts", "preferences")]
    named += [path for path in read if path not in inside]
    digests = {path: digest for path in named if (digest := _file(path))}
    policies = [policy for policy in policies_read(stage) if policy.startswith("run:")]
    return digests | {policy: _run(policy) for policy in policies}


def _file(path: str) -> str:
    """Return the digest of a local file, or of a folder's files; "" if there is none. "math500:FILE" is the file."""
    for candidate in (path, path.partition(":")[2]):
        if candidate and storage.is_local(candidate) and epath.Path(candidate).expanduser().exists():
            place = epath.Path(candidate).expanduser()
            files = sorted(child for child in place.iterdir() if child.is_file()) if place.is_dir() else [place]
            return "-".join(_digest(os.fspath(file), file.stat().mtime, file.stat().length) for file in files)
    return ""


@functools.lru_cache(maxsize=256)
def _digest(path: str, changed: float, size: int) -> str:
    """Return the digest of a file's bytes; they are read again only when its time or size has changed."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8)).hexdigest()


def _run(policy: str) -> str:
    """Return the fingerprint of the stage that made a policy of another run, "" as long as it is not finished."""
    return str((storage.finished(stage_of_run(policy)) or {}).get("fingerprint", ""))
