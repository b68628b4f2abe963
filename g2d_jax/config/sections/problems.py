"""The sources of problems."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Literal

from g2d_jax.config.choices import NotNegativeFloat, ProblemsPath
from g2d_jax.config.section import Positive, Section


class Source(Section):
    """A source of problems. path: a file, "hub:owner/name", "math500" …, or "procedural:slips".

    split: "train", "dev" or "test" by id hash, "" for all. fields: our field name -> the file's.
    """

    path: ProblemsPath = ""
    revision: str | None = None  # pins data of the hub: a commit, branch or tag
    split: Literal["", "train", "dev", "test"] = ""
    limit: Positive | None = None  # the first so many
    fields: Mapping[str, str] = field(default_factory=dict)
    on_error: Literal["raise", "skip"] = "raise"


class Data(Section):
    """The problems of the task "main". A split without a path has no problems."""

    train: Source = Source()
    dev: Source = Source()
    test: Source = Source()
    seed: int = 0
    max_prompt_length: Positive = 256
    weight: NotNegativeFloat = 1.0  # of these problems, beside those of `tasks`
