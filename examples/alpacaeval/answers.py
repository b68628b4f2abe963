"""Write a model's answers to the prompts of AlpacaEval 2 or Arena-Hard, as these tools read them.

alpaca_eval   prompts: JSON list of {"instruction", "dataset"}
              answers: JSON list of {"dataset", "instruction", "output", "generator"}
arena_hard    prompts: JSONL of {"uid", "prompt"} (v2), or {"question_id", "turns"} of one turn (v0.1)
              answers: JSONL of {"uid", "ans_id", "model", "messages", "tstamp", "metadata"}, as
              gen_answer.py of arena-hard-auto v2 writes them

A run with one evaluate stage samples: after a kill the same command resumes it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from g2d_jax import config as settings
from g2d_jax import pipeline, recipes
from g2d_jax.recipes import config_load

LONGEST_PROMPT = 16_384  # tokens
_CODE = re.compile(r"```([^`]*)```")
_HEADERS = {f"h{level}": re.compile(rf"^#{{{level}}}\s", re.MULTILINE) for level in range(1, 7)}
_LISTS = {
    "ordered": re.compile(r"^[^\S\n]*\d+\.\s", re.MULTILINE),
    "unordered": re.compile(r"^[^\S\n]*[-*+]\s", re.MULTILINE),
}
_BOLD = {"**": re.compile(r"\*\*[^*\n]+\*\*"), "__": re.compile(r"__[^_\n]+__")}


class Question(NamedTuple):
    """A prompt. id: Arena-Hard's uid. dataset: AlpacaEval's part."""

    text: str
    id: str = ""
    dataset: str = ""


class Answer(NamedTuple):
    """A response, its tokens, and whether it reached the limit of tokens."""

    text: str
    tokens: int
    truncated: bool


def read_questions(path: Path, form: str) -> list[Question]:
    """Read the prompts in order. Raises ValueError for a file of another form."""
    content = path.read_text("utf-8")
    try:
        if form == "alpaca_eval":
            questions = [_alpaca_question(row) for row in json.loads(content)]
        else:
            questions = [_arena_question(json.loads(line)) for line in content.splitlines()]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no prompts file of {form}: {error!r}") from error
    if not questions:
        raise ValueError(f"{path} has no prompt")
    return questions


def _alpaca_question(row: dict[str, Any]) -> Question:
    if row.get("input"):
        raise ValueError("the field 'input' is not supported: put its text into 'instruction'")
    return Question(row["instruction"], dataset=row.get("dataset", ""))


def _arena_question(row: dict[str, Any]) -> Question:
    if "turns" not in row:
        return Question(row["prompt"], row["uid"])
    if len(row["turns"]) != 1:
        raise ValueError(f"{row['question_id']} has several turns, which are not supported")
    return Question(row["turns"][0]["content"], row["question_id"])


def unscored(completions: Sequence[Any], **columns: Any) -> list[None]:
    """Give no rewards: the benchmark rates the answers."""
    return [None] * len(completions)


def sample(
    model: str, questions: Sequence[Question], work: Path, overrides: Sequence[str], **sampling: Any
) -> list[Answer]:
    """Sample one answer to each question; equal questions have one answer.

    work: folder of the run that samples. overrides: of its settings, "config.mesh.tensor=2".
    sampling: max_new_tokens, temperature, top_p. Raises ValueError as `pipeline.run`.
    """
    # A conversation takes the model's chat template.
    rows = [{"prompt": [{"role": "user", "content": q.text}]} for q in questions]
    problems = work / "prompts.jsonl"
    work.mkdir(parents=True, exist_ok=True)
    problems.write_text("".join(f"{line}\n" for line in dict.fromkeys(map(json.dumps, rows))))
    config = recipes.real(model)
    config.name = "answers"
    config.data.max_prompt_length = LONGEST_PROMPT
    config.data.test = settings.source(str(problems))
    config.stages.answers = settings.evaluate(
        policies=("init",),
        num_generations=1,
        sampling=settings.sampling(**sampling),
        pass_at=(),
        greedy=False,
    )
    for override in overrides:
        config_load.apply(config, override)
    result = pipeline.run(config, work / "run", reward=unscored)["answers"]
    place = work / "run" / "01-answers"
    texts = {}
    for problem in json.loads((place / "problems.json").read_text("utf-8")):
        texts[problem["id"]] = problem["prompt"][0]["content"]
    found = {}
    table = pd.read_parquet(place / result.evaluation.policies[0].rollouts)
    for row in table.itertuples():
        answer = Answer(row.text, len(row.token_ids), bool(row.truncated))
        found[texts[row.problem_id]] = answer
    if missing := sum(question.text not in found for question in questions):
        raise ValueError(f"{missing} prompts are longer than {LONGEST_PROMPT} tokens")
    return [found[question.text] for question in questions]


def alpaca_json(name: str, questions: Sequence[Question], answers: Sequence[Answer]) -> str:
    """Write AlpacaEval's model_outputs."""
    rows = []
    for question, answer in zip(questions, answers, strict=True):
        asked = {"dataset": question.dataset, "instruction": question.text}
        rows.append({**asked, "output": answer.text, "generator": name})
    return json.dumps(rows, indent=2) + "\n"


def arena_jsonl(name: str, questions: Sequence[Question], answers: Sequence[Answer]) -> str:
    """Write Arena-Hard's model_answer.

    Arena-Hard's style control counts the tokens of gpt-4o's tokenizer, not of the policy's: run its
    utils/add_markdown_info.py on the file, which counts them again.
    """
    now = time.time()
    lines = []
    for question, answer in zip(questions, answers, strict=True):
        named = json.dumps([name, question.id, answer.text])
        values = {
            "uid": question.id,
            "ans_id": hashlib.sha256(named.encode()).hexdigest()[:22],
            "model": name,
            "messages": [
                {"role": "user", "content": question.text},
                {"role": "assistant", "content": {"answer": answer.text}},
            ],
            "tstamp": now,
            # in this order: show_result.py takes metadata by position
            "metadata": {"token_len": answer.tokens, **markdown_counts(answer.text)},
        }
        lines.append(json.dumps(values) + "\n")
    return "".join(lines)


def markdown_counts(text: str) -> dict[str, dict[str, int]]:
    """Count headers, list items and bold passages as Arena-Hard's style control does.

    As there, the text of a code block is removed at every place where it occurs.
    """
    prose = text
    for code in filter(None, _CODE.findall(text)):
        prose = prose.replace(code, "")
    counts = {}
    for name, kinds in (("header_count", _HEADERS), ("list_count", _LISTS), ("bold_count", _BOLD)):
        counts[name] = {kind: len(pattern.findall(prose)) for kind, pattern in kinds.items()}
    return counts


FORMATS = {"alpaca_eval": (".json", alpaca_json), "arena_hard": (".jsonl", arena_jsonl)}
"""The formats: the ending of an answers file, and what writes it."""


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, sample, and write the file. Exits with 1 and a message on errors."""
    parser = argparse.ArgumentParser(description="Answer the prompts of AlpacaEval or Arena-Hard.")
    add = parser.add_argument
    add("model", help="folder that g2d export wrote, or another model of Hugging Face's form")
    add("--format", required=True, choices=FORMATS)
    add("--prompts", required=True, type=Path, help="alpaca_eval.json, or question.jsonl")
    add("--output", required=True, type=Path, help="file to write; its stem names the model")
    add("--work", type=Path, help="folder of the run that samples; default: the output's stem")
    add("--temperature", type=float, default=0.6)
    add("--top-p", type=float, default=0.9)
    add("--max-new-tokens", type=int, default=2048)
    given, overrides = parser.parse_known_args(argv)
    if unknown := [text for text in overrides if not text.startswith("--config.")]:
        parser.error(f"unknown arguments: {' '.join(unknown)}")
    ending, write = FORMATS[given.format]
    output = given.output
    try:
        if output.suffix != ending or output.exists():
            raise ValueError(f"--output must be a new file with the ending {ending}, not {output}")
        questions = read_questions(given.prompts, given.format)
        answers = sample(
            given.model,
            questions,
            given.work or output.with_suffix(""),
            [text.removeprefix("--") for text in overrides],
            max_new_tokens=given.max_new_tokens,
            temperature=given.temperature,
            top_p=given.top_p,
        )
    except (ValueError, OSError) as error:
        sys.exit(f"answers.py: {error}")
    output.write_text(write(output.stem, questions, answers), "utf-8")
    truncated = sum(answer.truncated for answer in answers)
    print(f"{len(answers)} answers, {truncated} of them truncated: {output}")


if __name__ == "__main__":
    main()
