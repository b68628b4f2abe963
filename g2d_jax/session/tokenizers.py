"""The tokenizer that a run's settings name, and the stop strings of its stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from g2d_jax.config import Config, Model, Tokenizer
from g2d_jax.config.section import Section
from g2d_jax.data import arithmetic
from g2d_jax.data.template import Fault, TemplateSettings, refuse
from g2d_jax.data.tokenizer import PromptTokenizer, load_tokenizer
from g2d_jax.models import hf


def stop_strings(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the stop strings of all stages, each with the setting that has it."""
    for name, stage in config.stages.items():
        for sampling in stage.samplings():
            for string in sampling.stop:
                yield f"stages.{name}.sampling.stop", string


def open_tokenizer(settings: Tokenizer, model: Model, fault: Fault = refuse) -> PromptTokenizer:
    """Load the tokenizer that settings name, else the model's, else that of the embedded tasks.
    fault: called with an error of it."""
    source: Any = arithmetic.SLIPS.name
    rows = None
    if model.path:
        source = hf.resolve(model.path, revision=model.revision)
        rows = hf.read_config(source).vocab_size
    template = chosen(settings, ("chat", "prompt_template", "system", "enable_thinking"))
    return load_tokenizer(
        settings.path or source,
        TemplateSettings(**template),
        revision=settings.revision,
        rows=rows,
        fault=fault,
    )


def chosen(section: Section, names: Sequence[str]) -> dict[str, Any]:
    """Return the fields that are set: the others are None, for the default of their user."""
    values = {name: getattr(section, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}
