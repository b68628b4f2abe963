"""Problems and examples of a source whose settings are given by keyword."""

from typing import Any

from g2d_jax.config import Source
from g2d_jax.data import examples, problems


def load_problems(path: object, **options: Any) -> Any:
    return problems.load_problems(Source(path=str(path), **options))


def load_examples(path: object, **options: Any) -> Any:
    return examples.load_examples(Source(path=str(path), **options))
