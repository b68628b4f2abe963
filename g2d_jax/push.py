"""Publish a run's model, adapters or preference dataset on the Hugging Face hub, with a card."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from etils import epath
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id

from g2d_jax import dataset
from g2d_jax.card import dataset_card, provenance
from g2d_jax.commands import export, last_policy, opened, read_config
from g2d_jax.dataset import PROVENANCE
from g2d_jax.runtime import processes, storage
from g2d_jax.runtime.tracking import Screen
from g2d_jax.workdir import absolute, secret_variables, without_secrets

KINDS = ("model", "adapters", "dataset")
"""The kinds of things that a run publishes."""

_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
_ANSWERS = {
    401: f"the token is not accepted: {_LOG_IN}",
    403: "the token has no right to write there: make one that has, or choose another --repo",
    412: "the repository was changed meanwhile: run the same command again",
}

_UNREACHED = (
    "and nothing was uploaded: check the network (HF_HUB_OFFLINE, HTTPS_PROXY), or write the same "
    "files with --output FOLDER and upload them elsewhere"
)


def push(
    workdir: storage.PathLike,
    repo: str | None = None,
    *,
    output: storage.PathLike | None = None,
    what: str = "model",
    policy: str | None = None,
    dry_run: bool = False,
    public: bool = False,
) -> str | None:
    """Upload a policy's model, its adapters or its preference dataset, in one commit; return the
    commit's URL.

    output: a new local folder to write the same files to in place of an upload; it is returned, and
    no hub is asked.
    what: "model", "adapters", or "dataset": the last pairs, or the last behind the policy. policy:
    None is the run's result. dry_run: only show the files and the card. A new repository is private
    unless `public`. All processes call it together; the leader writes and uploads. The token is
    that of huggingface_hub. Raises ValueError for a repository that holds something other than an
    earlier push of this run, or that is public without `public`; where there is no token; for
    another `what`; and for a file with a secret in it. Nothing is uploaded then, nor written to `output`.
    """
    if what not in KINDS:
        raise ValueError(f"what is one of {', '.join(KINDS)}, got {what!r}")
    if (repo is None) == (output is None):
        raise ValueError(
            "give --repo USER/NAME to upload, or --output FOLDER to write what would be uploaded"
        )
    folder = absolute(workdir)
    target = None if output is None else processes.on_leader(lambda: _new_folder(output))
    upload = (
        None if repo is None else _Upload(repo, "dataset" if what == "dataset" else "model", public)
    )
    config = read_config(folder)
    stage = None
    needs = ["model", "tokenizer"]
    if what == "dataset":
        stage = dataset.stage_of(config, policy)
        needs += ["data", "tasks"]
    with _staging(target) as place:
        with opened(folder, config, needs=needs) as session:
            origin = {
                **provenance(session),
                "what": what,
                "stage": stage or policy or last_policy(config),
            }
            if upload is not None and not dry_run:
                processes.on_leader(lambda: upload.check(origin))
            if stage:
                dataset.write(session, stage, place, origin["own"])
                card = dataset_card(session, stage, repo or os.fspath(output or ""))
                processes.on_leader(lambda: storage.write_bytes(place / "README.md", card.encode()))
        if not stage:
            export(folder, place, policy=policy, adapters=what == "adapters", published=True)
        processes.on_leader(lambda: storage.write_json(place / PROVENANCE, origin))
        return processes.on_leader(lambda: _publish(upload, target, Path(place), dry_run))


def _new_folder(output: storage.PathLike) -> str:
    """Return the absolute path of a folder to write, links followed. Raises ValueError where
    something is there, and for a store."""
    if not storage.is_local(output):
        raise ValueError(f"{os.fspath(output)}: --output is a folder on this machine")
    folder = Path(output).expanduser().resolve()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(
            f"{folder} is there already and not an empty folder: choose another --output"
        )
    return str(folder)


def _publish(upload: _Upload | None, target: str | None, place: Path, dry_run: bool) -> str | None:
    """Upload the files of `place`, or move them to the folder `target`, or with dry_run show
    them."""
    files = {
        str(path.relative_to(place)): path for path in sorted(place.rglob("*")) if path.is_file()
    }
    _refuse_secrets(files)
    if not dry_run:
        return upload.send(files) if upload is not None else _move(place, Path(str(target)))
    screen = Screen()
    sizes = {name: path.stat().st_size for name, path in files.items()}
    title = str(target) if upload is None else f"{upload.kind} {upload.repo}"
    screen.table(title, ["file", "bytes"], [*sizes.items(), ("all", sum(sizes.values()))])
    screen.say(files["README.md"].read_text())
    return None


def _move(place: Path, target: Path) -> str:
    """Move what a folder of `_staging` holds to the target; a new target has the rights of any that
    is made there."""
    if place.parent == target:
        for child in sorted(place.iterdir()):
            child.rename(target / child.name)
        return str(target)
    target.mkdir(exist_ok=True)
    mode = target.stat().st_mode
    place.rename(target)
    target.chmod(mode)
    return str(target)


@contextlib.contextmanager
def _staging(target: str | None) -> Iterator[epath.Path]:
    """Yield a new folder, the leader's on all processes; what is left of it is removed afterwards.
    It lies beside the folder `target`, to be moved there, or in it where it exists; without one
    where TMPDIR says."""

    def make() -> str:
        parent = None
        if target is not None and os.path.isdir(target):
            # it may be a mount point, whose own name is on another file system
            parent = Path(target)
        elif target is not None:
            parent = Path(target).parent
            parent.mkdir(parents=True, exist_ok=True)
        return tempfile.mkdtemp(prefix=".g2d-push-", dir=parent)

    folder = processes.on_leader(make)
    try:
        yield epath.Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _secrets() -> dict[str, str]:
    """Return what must not be published, by name: the hub's token, and variables named like a
    secret."""
    secrets = secret_variables()
    token = get_token()
    if token:
        secrets["the hub's token"] = token
    return secrets


def _refuse_secrets(files: dict[str, Path]) -> None:
    """Raise ValueError for a file that holds a secret, without repeating it; Parquet's values are
    looked at too."""
    secrets = _secrets()
    for name, path in files.items():
        for part in _parts(path):
            for secret, value in secrets.items():
                if any(part.find(form) >= 0 for form in _forms(value)):
                    raise ValueError(
                        f"{name} would hold the value of {secret}, so nothing is uploaded: look "
                        "for it in the settings, the data and the model's answers; a variable that "
                        "is no secret can be unset"
                    )


def _forms(secret: str) -> set[bytes]:
    """Return a secret's bytes as they are, and as they stand in JSON."""
    return {
        text.encode()
        for text in (secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1])
    }


def _parts(path: Path) -> Iterator[bytes | mmap.mmap]:
    """Yield a file's bytes, or of Parquet, which is compressed, those of its values."""
    if path.suffix == ".parquet":
        for column in pq.read_table(path).columns:
            for chunk in column.chunks:
                yield from (buffer.to_pybytes() for buffer in chunk.buffers() if buffer is not None)
    elif path.stat().st_size:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            yield content


class _Upload:
    """A repository on the hub, to be written in one commit on top of the one that `check` found."""

    def __init__(self, repo: str, kind: str, public: bool) -> None:
        """Raise ValueError for what is no name of a repository."""
        validate_repo_id(repo)
        if "/" not in repo:
            raise ValueError(f"--repo is USER/NAME, got {repo!r}")
        self.repo, self.kind, self.public = repo, kind, public
        self._api = HfApi()
        self._parent: str | None = None
        self._files: set[str] = set()

    def check(self, origin: dict[str, Any]) -> None:
        """Raise ValueError if the repository holds something else or is public unasked, and where
        there is no token."""
        if get_token() is None:
            raise ValueError(
                f"an upload takes a token of the Hugging Face hub: {_LOG_IN}; or add --dry-run"
            )
        pushed = None
        with _asking(self.repo):
            try:
                info: Any = self._api.repo_info(self.repo, repo_type=self.kind)
            except RepositoryNotFoundError:
                return
            self._parent = info.sha
            self._files = {file.rfilename for file in info.siblings or ()} - {".gitattributes"}
            if PROVENANCE in self._files:
                pushed = self._api.hf_hub_download(
                    self.repo, PROVENANCE, repo_type=self.kind, revision=info.sha
                )
        if not (info.private or self.public):
            raise ValueError(
                f"{self.repo} is public: add --public, or make it private in its settings on the "
                "hub"
            )
        before = storage.read_json(pushed) if pushed else None
        same = isinstance(before, dict) and all(
            before.get(name) == origin[name] for name in ("run", "what")
        )
        if self._files and not same:
            raise ValueError(
                f"{self.repo} holds something other than this run's {origin['what']}: choose "
                "another --repo"
            )

    def send(self, files: dict[str, Path]) -> str:
        """Upload the files in one commit, in place of those that are there; return the commit's
        URL."""
        operations = [CommitOperationAdd(name, str(path)) for name, path in files.items()]
        gone = [CommitOperationDelete(name) for name in sorted(self._files - files.keys())]
        message = "Pushed by g2d_jax"
        with _asking(self.repo):
            if self._parent is None:
                self._api.create_repo(self.repo, repo_type=self.kind, private=not self.public)
            commit = self._api.create_commit(
                self.repo,
                [*operations, *gone],
                commit_message=message,
                repo_type=self.kind,
                parent_commit=self._parent,
            )
        return str(commit.commit_url)


@contextlib.contextmanager
def _asking(repo: str) -> Iterator[None]:
    """Turn whatever the hub's client raises into a ValueError that says what to do and repeats no
    secret."""
    try:
        yield
    except Exception as error:  # network, authentication and storage each raise their own kinds
        reason = without_secrets(storage.hub_reason(error, _ANSWERS, _UNREACHED)).replace(
            get_token() or "\0", "***"
        )
        raise ValueError(f"{repo}: {reason}") from None
