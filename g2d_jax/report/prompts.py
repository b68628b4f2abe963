"""Read problems back from the tokens of the prompts that a run sampled from: a collect stage keeps
no other text of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from g2d_jax.config import places
from g2d_jax.data import arithmetic
from g2d_jax.data.template import TemplateSettings
from g2d_jax.data.tokenizer import PromptTokenizer, load_tokenizer
from g2d_jax.runtime.storage import is_local


@dataclass(frozen=True)
class Prompts:
    """Decodes the prompts of a run. tokenizer: None if it is not available; fault: then why."""

    tokenizer: PromptTokenizer | None
    fault: str = ""

    @cached_property
    def _around(self) -> list[str]:
        """The texts that stand before and behind a problem."""
        with contextlib.suppress(ValueError):  # of a template that fails; prompts stay whole
            if self.tokenizer is not None:
                return self.tokenizer.template.frame()
        return []

    def __call__(self, ids: Sequence[int]) -> str:
        """Return the problem in the tokens [T] of a prompt: all of their text where the template
        cannot be told from it, "" without a tokenizer and for what are no tokens."""
        if self.tokenizer is None or min(ids, default=0) < 0:
            return ""
        plain = self.tokenizer.decode(ids)
        # A chat template writes special tokens, and a BOS before a plain prompt is none of its own.
        for text in (self.tokenizer.decode_raw(ids), plain):
            if len(self._around) == 2:
                before, after = self._around
                if text.startswith(before) and text.endswith(after):
                    return text[len(before) : len(text) - len(after)]
        return plain


def prompts_of(config: Mapping[str, Any]) -> Prompts:
    """Load the tokenizer that a run's config names from this machine: no hub and no object store is
    asked for it."""
    names = ("chat", "prompt_template", "system", "enable_thinking")
    try:
        settings, model = config.get("tokenizer") or {}, config.get("model") or {}
        given = {name: settings[name] for name in names if settings.get(name) is not None}
        section = settings if settings.get("path") else model
        path = section.get("path") or arithmetic.SLIPS.name
        if not is_local(path):
            raise ValueError(f"it lies at {path}, and a report reads this machine's files alone")
        if not (path in arithmetic.TASKS or places.is_path(path) or os.path.isdir(path)):
            from huggingface_hub import snapshot_download

            path = snapshot_download(path, revision=section.get("revision"), local_files_only=True)
        # a report only decodes
        return Prompts(load_tokenizer(path, TemplateSettings(**given), fault=lambda error: None))
    # of a config.json that nothing here wrote, too
    except (ValueError, OSError, ImportError, TypeError, AttributeError) as error:
        return Prompts(None, f"the tokenizer cannot be loaded: {error}")
