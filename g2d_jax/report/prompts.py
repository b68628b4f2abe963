"""Decoding of problems from the tokens of sampled prompts: a collect stage saves no other text of
them."""

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
    """Decodes the prompts of a run. tokenizer: None if unavailable; fault: the reason."""

    tokenizer: PromptTokenizer | None
    fault: str = ""

    @cached_property
    def _around(self) -> list[str]:
        """The texts before and after a problem."""
        with contextlib.suppress(ValueError):  # for a failing template; prompts stay whole
            if self.tokenizer is not None:
                return self.tokenizer.template.frame()
        return []

    def __call__(self, ids: Sequence[int]) -> str:
        """Return the problem in the tokens [T] of a prompt: its whole text if the template cannot
        be removed, "" without a tokenizer and for invalid tokens."""
        if self.tokenizer is None or min(ids, default=0) < 0:
            return ""
        plain = self.tokenizer.decode(ids)
        # A chat template writes special tokens; a BOS before a plain prompt is not part of the
        # template.
        for text in (self.tokenizer.decode_raw(ids), plain):
            if len(self._around) == 2:
                before, after = self._around
                if text.startswith(before) and text.endswith(after):
                    return text[len(before) : len(text) - len(after)]
        return plain


def prompts_of(config: Mapping[str, Any]) -> Prompts:
    """Load the tokenizer of a run's config from this machine, without any request to a hub or an
    object store."""
    names = ("chat", "prompt_template", "system", "enable_thinking")
    try:
        settings, model = config.get("tokenizer") or {}, config.get("model") or {}
        given = {name: settings[name] for name in names if settings.get(name) is not None}
        section = settings if settings.get("path") else model
        path = section.get("path") or arithmetic.SLIPS.name
        if not is_local(path):
            raise ValueError(f"it is at {path}, but a report reads only files on this machine")
        if not (path in arithmetic.TASKS or places.is_path(path) or os.path.isdir(path)):
            from huggingface_hub import snapshot_download

            path = snapshot_download(path, revision=section.get("revision"), local_files_only=True)
        # a report only decodes
        return Prompts(load_tokenizer(path, TemplateSettings(**given), fault=lambda error: None))
    # config.json may also be from another tool
    except (ValueError, OSError, ImportError, TypeError, AttributeError) as error:
        return Prompts(None, f"the tokenizer cannot be loaded: {error}")
