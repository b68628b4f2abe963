"""Supervised examples from the same sources as problems: a prompt and the completion that follows
it.

A row has either `messages`, whose last one, the assistant's, is the completion, or `prompt` and
`completion`, each a text or a list of messages (TRL's standard formats). Any two text fields can be
mapped: fields={"prompt": "question", "completion": "answer"}. The rules of data/filters.py apply to
problems only.
"""

from __future__ import annotations

from g2d_jax.config import Source
from g2d_jax.data import arithmetic
from g2d_jax.data.distinct import LoadReport, collect
from g2d_jax.data.fields import (
    BrokenRow,
    Fields,
    Found,
    Values,
    as_messages,
    as_prompt,
    as_reply,
    as_text,
    check_fields,
    find,
    named,
    require_rendered,
)
from g2d_jax.data.problems import open_rows, procedural
from g2d_jax.data.splits import problem_id
from g2d_jax.records import Example

_NAMES = ("messages", "prompt", "completion")


def load_examples(source: Source) -> tuple[list[Example], LoadReport]:
    """Load the distinct examples of a source in its order, and a report on its rows.

    An example's id is its prompt's, so `drop_overlap` removes those of an evaluation set. Examples
    that share a prompt and differ in the completion are all kept. Arguments and errors are those of
    `load_problems`; source.fields maps messages, or prompt and completion. "procedural:slips"
    returns demonstrations 0 … limit - 1, which are all from the train split and may recur.
    """
    check_fields(source.fields, _NAMES)
    if source.path.startswith("procedural:"):
        if source.split not in ("", "train"):
            raise ValueError(
                f"demonstrations of {source.path} are of the train split only, got split "
                f"{source.split!r}"
            )
        task, count = procedural(source)
        examples = [arithmetic.example(task, 0, index) for index in range(count)]
        return examples, LoadReport(source.path, rows=len(examples), kept=len(examples))
    _, rows = open_rows(source.path, source.revision)
    return collect(
        source,
        rows,
        lambda values: to_example(values, source.fields),
        key=lambda example: (example.id, example.completion),
    )


def to_example(values: Values, fields: Fields) -> Example:
    """Read one row as an Example. Raises BrokenRow."""
    require_rendered(values)

    def field(name: str) -> Found:
        if name in fields:
            return named(values, fields[name])
        return find(values, name)

    path, value = (None, None) if "prompt" in fields else field("messages")
    if path is not None:
        messages = as_messages(value, path)
        if messages[-1]["role"] != "assistant":
            roles = ", ".join(message["role"] for message in messages)
            raise BrokenRow(f"{path!r} must end with an assistant message, got {roles}")
        completion = as_text(messages[-1]["content"], path)
        if len(messages) == 1:
            raise BrokenRow(f"{path!r} has no user message before the assistant's")
        prompt = as_prompt(messages[:-1], path)
        return Example(problem_id(prompt), prompt, completion)
    prompt_path, prompt_value = field("prompt")
    path, value = field("completion")
    if prompt_path is None or path is None:
        names = ", ".join(map(repr, values)) or "none"
        raise BrokenRow(f"needs messages, or prompt and completion; the row has {names}"[:500])
    prompt = as_prompt(prompt_value, prompt_path)
    completion = as_text(as_reply(value, path), path)
    return Example(problem_id(prompt), prompt, completion)
