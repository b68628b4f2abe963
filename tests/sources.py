"""Problems and examples of a source whose settings are given by keyword."""

from typing import Any

from g2d_jax.config import Source
from g2d_jax.data import examples, problems


def load_problems(path: object, seed: int = 0, **options: Any) -> Any:
    return problems.load_problems(Source(path=str(path), **options), seed)


def load_examples(path: object, seed: int = 0, **options: Any) -> Any:
    return examples.load_examples(Source(path=str(path), **options), seed)
