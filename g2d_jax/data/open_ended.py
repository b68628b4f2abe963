"""Read the prompts files of AlpacaEval 2 and Arena-Hard, which are untrusted, and write the answers
files they read.

alpaca_eval   prompts: [{"instruction", "dataset"}]; answers: [{"dataset", "instruction", "output", "generator"}]
arena_hard    prompts: JSONL of {"uid", "prompt"} (v2; v0.1 has "question_id" and "turns"); answers: JSONL of
              {"uid", "ans_id", "model", "messages": […, {"role": "assistant", "content": {"answer"}}], "tstamp",
              "metadata"}, as gen_answer.py of arena-hard-auto v2 writes and its gen_judgment.py reads them
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from g2d_jax.data.fields import BrokenRow, Values, as_text, named
from g2d_jax.data.rows import file_rows
from g2d_jax.runtime import storage

Format: TypeAlias = Literal["alpaca_eval", "arena_hard"]

ENDINGS: dict[Format, str] = {"alpaca_eval": ".json", "arena_hard": ".jsonl"}
"""The ending of an answers file, by which the tools know its format."""

_CODE = re.compile(r"```([^`]*)```")
_HEADERS = {f"h{level}": re.compile(rf"^#{{{level}}}\s", re.MULTILINE) for level in range(1, 7)}
_LISTS = {
    "ordered": re.compile(r"^[^\S\n]*\d+\.\s", re.MULTILINE),
    "unordered": re.compile(r"^[^\S\n]*[-*+]\s", re.MULTILINE),
}
_BOLD = {"**": re.compile(r"\*\*[^*\n]+\*\*"), "__": re.compile(r"__[^_\n]+__")}


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt. id: Arena-Hard's uid, "" in AlpacaEval. dataset: AlpacaEval's part, "" in
    Arena-Hard."""

    text: str
    id: str = ""
    dataset: str = ""


def read_questions(path: str, form: Format) -> list[Question]:
    """Read the questions of a prompts file in order. Raises ValueError naming file and line for
    anything else."""
    parse = {"alpaca_eval": _alpaca_question, "arena_hard": _arena_question}[form]
    questions = [row.read(parse) for row in file_rows(path)]
    if not questions:
        raise ValueError(f"{path} holds no prompt")
    counts = Counter(question.id for question in questions if question.id)
    for uid, count in counts.items():
        if count > 1:
            raise ValueError(f"{path}: uid {uid!r} stands there twice")
    return questions


def alpaca_json(name: str, questions: Sequence[Question], texts: Sequence[str]) -> bytes:
    """Write AlpacaEval's model_outputs."""
    rows = []
    for question, text in zip(questions, texts, strict=True):
        asked = {"dataset": question.dataset, "instruction": question.text}
        rows.append({**asked, "output": text, "generator": name})
    return json.dumps(rows, indent=2).encode("ascii") + b"\n"


def arena_jsonl(
    name: str, questions: Sequence[Question], texts: Sequence[str], lengths: Sequence[int]
) -> bytes:
    """Write Arena-Hard's model_answer, one line a question; the file must be called NAME.jsonl.

    lengths: tokens of each text. Arena-Hard counts those of gpt-4o's tokenizer, for its style
    control; its utils/add_markdown_info.py counts them anew in files that have others.
    """
    now = time.time()
    lines = []
    for question, text, length in zip(questions, texts, lengths, strict=True):
        values = {
            "uid": question.id,
            "ans_id": storage.fingerprint([name, question.id, text]),
            "model": name,
            "messages": [
                {"role": "user", "content": question.text},
                {"role": "assistant", "content": {"answer": text}},
            ],
            "tstamp": now,
            "metadata": {"token_len": length, **markdown_counts(text)},
        }
        # Keys as they stand: show_result.py takes metadata by position.
        lines.append(json.dumps(values) + "\n")
    return "".join(lines).encode("ascii")


def markdown_counts(text: str) -> dict[str, dict[str, int]]:
    """Count headers, list items and bold passages as Arena-Hard's style control counts them.

    As there, the text of a code block is removed wherever it occurs.
    """
    prose = text
    for code in filter(None, _CODE.findall(text)):
        prose = prose.replace(code, "")
    counts = {}
    for name, kinds in (("header_count", _HEADERS), ("list_count", _LISTS), ("bold_count", _BOLD)):
        counts[name] = {kind: len(pattern.findall(prose)) for kind, pattern in kinds.items()}
    return counts


def _alpaca_question(values: Values) -> Question:
    if values.get("input"):
        raise BrokenRow("the field 'input' is not supported: write it into 'instruction'")
    dataset = values.get("dataset", "")
    if not isinstance(dataset, str):
        raise BrokenRow(f"'dataset' must be a text, got {type(dataset).__name__}")
    name, text = named(values, "instruction")
    return Question(as_text(text, name), dataset=dataset)


def _arena_question(values: Values) -> Question:
    name, uid = named(values, "uid", "question_id")
    uid = as_text(uid, name)
    name, text = named(values, "prompt", "turns")
    if name == "turns":
        if not isinstance(text, list) or len(text) != 1 or not isinstance(text[0], Mapping):
            raise BrokenRow(
                "'turns' must be a list of one turn: conversations of several are not supported"
            )
        name, text = "turns[0].content", text[0].get("content")
    return Question(as_text(text, name), uid)
