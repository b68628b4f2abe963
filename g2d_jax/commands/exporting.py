"""Write a policy of a run as a Hugging Face folder."""

from __future__ import annotations

import json

from etils import epath

from g2d_jax.commands.card import WRITTEN_BY, base_named, card
from g2d_jax.commands.opening import joined, last_policy, opened
from g2d_jax.config import places
from g2d_jax.data.tokenizer import CHAT_TEMPLATE
from g2d_jax.models import hf
from g2d_jax.models.decoder import Decoder
from g2d_jax.runtime import processes, storage
from g2d_jax.session import inputs
from g2d_jax.session.policies import base_path, base_revision, load_policy
from g2d_jax.session.session import Session


def export(
    workdir: storage.PathLike,
    output: storage.PathLike,
    *,
    policy: str | None = None,
    dtype: str = "float32",
    adapters: bool = False,
    published: bool = False,
) -> epath.Path:
    """Write a policy as a Hugging Face folder: safetensors, config, tokenizer, generation config,
    model card.

    dtype: "float32" or "bfloat16". adapters: write only these, in PEFT's format, instead of merging
    them into the model. published: shorten the path of their base to its last part. All processes
    call it together: each reads its part of the policy, the leader writes. Raises ValueError for
    another dtype, a folder that already holds a model, an unknown policy, one without adapters to
    write, or processes that see different runs.
    """
    hf.stored_dtype(dtype)
    policy = policy and places.decided(policy, "policy", places.here())
    target = epath.Path(output).expanduser()
    request = {"policy": policy, "dtype": dtype, "adapters": adapters}
    with joined(workdir, "export", request) as config:
        processes.on_leader(lambda: _require_free(target))
        with opened(workdir, config) as session:
            chosen = policy or last_policy(config)
            _export(session, chosen, target, dtype, adapters=adapters, published=published)
            if not published:  # then `push` deletes the folder
                session.tracker.say(f"{chosen} is in {target}")
    return target


def _require_free(folder: epath.Path) -> None:
    """Raise ValueError for a file, and for a folder that holds anything but an interrupted
    export."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file: choose another --output")
    for name, what in hf.FINISHED.items():
        if (folder / name).exists():
            raise ValueError(f"{folder} holds {what} already: choose another --output")
    others = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    readme = folder / "README.md"
    is_ours = readme.exists() and WRITTEN_BY.encode() in storage.read_bytes(readme)
    if others and not is_ours:
        raise ValueError(
            f"{folder} holds {others[0]}, and is not an interrupted export: choose a new or empty "
            "folder for --output"
        )


def _export(
    session: Session,
    policy: str,
    folder: epath.Path,
    dtype: str,
    *,
    adapters: bool,
    published: bool,
) -> None:
    """Write the files of `export`. config.json, or PEFT's, is last except for the card's note."""
    if adapters and not session.config.lora.rank:
        raise ValueError("the run has no adapters (lora.rank is 0): export without --adapters")
    processes.on_leader(lambda: inputs.verify(session))
    params = load_policy(session, policy)
    base, note = None, ""
    if adapters:
        base, note = processes.on_leader(lambda: base_named(session, policy, published=published))
    text = processes.on_leader(lambda: _write_texts(session, policy, folder, adapters, note))
    if adapters:
        if note:
            session.tracker.say(note)
        session.tracker.say(
            f"responses of this policy end at {session.tokenizer.ends()}. A server of the base "
            "needs these as a setting: see the model card"
        )
        revision = base_revision(session, policy) if base else None
        hf.save_adapters(params, folder, base=base, revision=revision, dtype=dtype)
    else:
        _save_model(session, policy, params, folder, dtype)
    processes.on_leader(lambda: _add_note(session, folder, text))


def _write_texts(
    session: Session, policy: str, folder: epath.Path, adapters: bool, note: str
) -> str:
    """Write the model card and the tokenizer; return the card."""
    text = card(session, policy, what="adapters" if adapters else "model", note=note)
    storage.write_bytes(folder / "README.md", text.encode())  # first: it marks the folder as ours
    session.tokenizer.save(folder)
    for sentence in session.tokenizer.template.differences():
        session.tracker.say(f"{CHAT_TEMPLATE} is written as in training: {sentence}")
    return text


def _add_note(session: Session, folder: epath.Path, text: str) -> None:
    """Add the note on the tokenizer, if there is one, to the model card, and show it."""
    if note := _tokenizer_note(folder):
        text = text.replace("AutoTokenizer", "PreTrainedTokenizerFast")  # in the code that it shows
        storage.write_bytes(folder / "README.md", (text + note).encode())
        session.tracker.say(note.strip())


def _save_model(
    session: Session, policy: str, params: Decoder, folder: epath.Path, dtype: str
) -> None:
    """Save the weights with adapters merged, with the sampling settings of the model that the run
    started from."""
    tokenizer = session.tokenizer
    base = base_path(session, policy)
    try:
        source = session.model_folder
        if base != session.config.model.path:
            source = hf.resolve(base) if base else None
    except ValueError as error:
        session.tracker.say(f"the base model's sampling settings are left out: {error}")
        source = None
    hf.save(
        params,
        folder,
        dtype=dtype,  # type: ignore[arg-type]
        eos_ids=tokenizer.eos_ids,
        bos_id=tokenizer.bos_id,
        pad_id=tokenizer.pad_id,
        generation_entries=hf.read_sampling(source) if source is not None else {},
    )


def _tokenizer_note(folder: epath.Path) -> str:
    """Return a note if AutoTokenizer, which goes by the kind of model, would misread the exported
    tokenizer, else ""."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not storage.is_local(folder):
        return ""
    rules = []
    for loader in (AutoTokenizer, PreTrainedTokenizerFast):
        backend = json.loads(
            loader.from_pretrained(folder, trust_remote_code=False).backend_tokenizer.to_str()
        )
        rules.append([backend[part] for part in ("normalizer", "pre_tokenizer", "decoder")])
    if rules[0] == rules[1]:
        return ""
    return (
        "\nThe tokenizer is not one that transformers uses with this kind of model: load it with "
        "`PreTrainedTokenizerFast.from_pretrained`, since `AutoTokenizer` would apply other "
        "rules.\n"
    )
