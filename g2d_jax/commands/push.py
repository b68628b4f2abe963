"""Publish a run's model, adapters or preference pairs on the Hugging Face hub, with a card."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from etils import epath
from huggingface_hub import HfApi, get_token

from g2d_jax.commands import export, opened, read_config
from g2d_jax.commands.card import WRITTEN_BY, card
from g2d_jax.config import Config
from g2d_jax.config.graph import plan
from g2d_jax.config.io import to_dict
from g2d_jax.data.tokenizer import CHAT_TEMPLATE
from g2d_jax.runtime import processes, storage
from g2d_jax.session import stage_result
from g2d_jax.session.accounting import behind
from g2d_jax.session.session import Session
from g2d_jax.session.workdir import absolute

KINDS = ("model", "adapters", "pairs")
"""The kinds of things that a run publishes."""


def push(
    workdir: storage.PathLike,
    repo: str,
    *,
    what: str = "model",
    policy: str | None = None,
    public: bool = False,
) -> str:
    """Upload a policy's model or adapters, or preference pairs; return the commit's URL.

    repo: "USER/NAME", or "NAME" of your own; a new one is private unless `public`, and the files of
    an earlier push are replaced. what: one of KINDS. policy: None is the run's result. Pairs are
    those of the last collect stage, or of the last one that `policy` was made from. All processes
    call it together; the leader uploads. Raises ValueError for another `what`, an unfinished stage,
    a repository that holds files from other tools or is public without `public`, and if the hub
    refuses.
    """
    if what not in KINDS:
        raise ValueError(f"what is one of {', '.join(KINDS)}, got {what!r}")
    if get_token() is None:
        raise ValueError("a push needs a token: log in with `hf auth login`, or set HF_TOKEN")
    kind = "dataset" if what == "pairs" else "model"
    place = processes.on_leader(lambda: tempfile.mkdtemp(prefix="g2d-push-"))
    try:
        if what == "pairs":
            folder = absolute(workdir)
            config = read_config(folder)
            name = _last_collect(config, policy)
            with opened(folder, config) as session:
                processes.on_leader(lambda: _write_pairs(session, name, epath.Path(place)))
        else:
            export(workdir, place, policy=policy, adapters=what == "adapters", published=True)
        return processes.on_leader(lambda: _upload(place, repo, kind, public))
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _last_collect(config: Config, policy: str | None) -> str:
    stages = to_dict(config)["stages"]
    reached = stages if policy is None else behind(policy, stages)
    for name in reversed(plan(config).order):
        if name in reached and stages[name]["kind"] == "collect":
            return name
    raise ValueError("there are no preference pairs: no collect stage made any")


def _write_pairs(session: Session, name: str, place: epath.Path) -> None:
    """Write a collect stage's pairs, the chat template of their prompts, and a card."""
    folder = session.folders[name]
    if not stage_result.read(folder):
        raise ValueError(f"stage {name!r} is not finished: run g2d with the same --workdir first")
    storage.write_bytes(place / "README.md", card(session, name, what="pairs").encode())
    for part in (folder / "preferences").glob("*.parquet"):
        storage.write_bytes(place / "preferences" / part.name, storage.read_bytes(part))
    if template := session.tokenizer.template.pinned:
        storage.write_bytes(place / CHAT_TEMPLATE, template.encode())


def _upload(place: str, repo: str, kind: str, public: bool) -> str:
    """Replace the files of a repository; return the commit's URL. Raises ValueError as `push`."""
    api = HfApi()
    try:
        made = api.create_repo(repo, repo_type=kind, private=not public, exist_ok=True)
    except Exception as error:  # network and authentication each raise their own kinds
        raise ValueError(f"{repo}: {storage.hub_reason(error)}") from error
    repo = made.repo_id
    if not (public or api.repo_info(repo, repo_type=kind).private):
        raise ValueError(f"{repo} is public: add --public, or make it private on the hub")
    files = {*api.list_repo_files(repo, repo_type=kind)} - {".gitattributes"}
    readme = ""
    if "README.md" in files:
        readme = Path(api.hf_hub_download(repo, "README.md", repo_type=kind)).read_text("utf-8")
    if files and WRITTEN_BY not in readme:
        raise ValueError(f"{repo} holds files that no g2d push wrote: choose another --repo")
    commit = api.upload_folder(repo_id=repo, repo_type=kind, folder_path=place, delete_patterns="*")
    return str(commit.commit_url)
