"""Read problems back from the tokens of the prompts that a run sampled from: a collect stage keeps
no other text of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from g2d_jax.config import places
from g2d_jax.data import arithmetic
from g2d_jax.data.template import TemplateSettings
from g2d_jax.data.tokenizer import PromptTokenizer, load_tokenizer
from g2d_jax.runtime.storage import is_local


class Prompts:
    """Decodes the prompts of a run. tokenizer: None if it is not available."""

    def __init__(self, tokenizer: PromptTokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._around: list[str] = []
        if tokenizer is not None:
            with contextlib.suppress(ValueError):  # of a template that fails; prompts stay whole
                self._around = tokenizer.template.frame()

    def __call__(self, ids: Sequence[int]) -> str:
        """Return the problem in the tokens [T] of a prompt: all of their text where the template
        cannot be told from it, "" without a tokenizer and for what are no tokens."""
        if self._tokenizer is None or min(ids, default=0) < 0:
            return ""
        # A chat template writes special tokens, and a BOS before a plain prompt is none of its own.
        for text in (self._tokenizer.decode_raw(ids), self._tokenizer.decode(ids)):
            if len(self._around) != 2:
                continue
            before, after = self._around
            if text.startswith(before) and text.endswith(after):
                return text[len(before) : len(text) - len(after)]
        return self._tokenizer.decode(ids)


def run_tokenizer(config: Mapping[str, Any]) -> PromptTokenizer:
    """Load the tokenizer that a run's config names from this machine: no hub and no object store is
    asked for it. Raises ValueError when it cannot be loaded."""
    settings = config.get("tokenizer") or {}
    model = config.get("model") or {}
    try:
        names = ("chat", "prompt_template", "system", "enable_thinking")
        chosen = TemplateSettings(
            **{name: settings[name] for name in names if settings.get(name) is not None}
        )
        section = settings if settings.get("path") else model
        path = section.get("path") or arithmetic.SLIPS.name
        place = _on_this_machine(path, section.get("revision"))
        return load_tokenizer(place, chosen, fault=lambda error: None)  # a report only decodes
    except (
        OSError,
        ImportError,
        TypeError,
        AttributeError,
    ) as error:  # of a config.json that nothing here wrote, too
        raise ValueError(f"the tokenizer cannot be loaded: {error}") from error


def _on_this_machine(path: str, revision: str | None) -> str:
    """Return the folder of a tokenizer on this machine, of a hub id the downloaded one. Raises
    ValueError."""
    if path in arithmetic.TASKS:
        return path
    if not is_local(path):
        raise ValueError(
            f"the tokenizer lies at {path}, and a report reads this machine's files alone"
        )
    if places.is_path(path) or os.path.isdir(path):
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot_download(path, revision=revision, local_files_only=True)
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise ValueError(
            f"the tokenizer {path} was not downloaded here, and a report asks no hub"
        ) from error
