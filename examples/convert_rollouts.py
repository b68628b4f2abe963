"""Convert the rollouts that verl or NeMo-RL wrote to the JSONL that g2d_jax reads.

python examples/convert_rollouts.py verl rollout_data/ rollouts.jsonl
python examples/convert_rollouts.py nemo-rl 'logs/exp_001/train_data_step*.jsonl' rollouts.jsonl

    written by                                    columns read
    verl 0.9, trainer.rollout_data_dir            input, output, score, step; gts
    NeMo-RL, train_data_step*.jsonl of grpo.py    content, rewards or filtered_rewards, input_lengths; in
                                                  newer versions token_ids, token_loss_mask, generation_logprobs

IN is a file, a folder or a glob of JSONL, JSON or Parquet; NeMo-RL's folder has validation files too.
--reward names another column that holds the reward. Both programs write prompts as they are after the
chat template: OUT has them as rendered_prompt, and a stage looks them up among the problems of
data.train.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from g2d_jax.config.places import data_files
from g2d_jax.data.fields import BrokenRow, Values
from g2d_jax.data.rows import file_rows

Converted = dict[str, Any]
"""A rollout by the reader's names: see g2d_jax/data/dumps.py."""


def from_verl(values: Values, reward: str | None, step: int | None) -> Converted:
    """Convert a row of verl. Its gts is the answer, unless it is something else that a reward
    needs. step: unused, rows have their own. Raises BrokenRow."""
    check_columns(values, "input", "output", "score", "step")
    return {
        "step": values["step"],
        "rendered_prompt": values["input"],
        "completion": values["output"],
        "reward": column(values, reward or "score"),
        "answer": answer_of(values.get("gts")),
    }


def from_nemo_rl(row: Values, reward: str | None, step: int | None) -> Converted:
    """Convert a row of NeMo-RL, whose columns are lists of one. step: of the file's name. Raises
    BrokenRow."""
    values = {name: single(value) for name, value in row.items()}
    check_columns(values, "content", "rewards", "input_lengths")
    rewards = "rewards"
    if "filtered_rewards" in values:  # with dynamic sampling these belong to the rows
        rewards = "filtered_rewards"
    converted = {"step": step, "reward": column(values, reward or rewards)}
    content = values["content"]
    if isinstance(content, list):  # a text for each message
        if len(content) != 2:
            raise BrokenRow(
                f"'content' must be a prompt and a completion, has {len(content)} messages: "
                "several turns are not supported"
            )
        converted |= {"rendered_prompt": content[0], "completion": content[1]}
    else:
        converted["completion"] = content
    if "token_ids" in values:
        converted |= token_columns(values)
    elif not isinstance(content, list):
        raise BrokenRow("it has neither a prompt in 'content' nor 'token_ids'")
    return converted


def token_columns(values: Values) -> Converted:
    """Split token ids into prompt and completion where token_loss_mask begins to be 1.

    Ids, mask and log-probabilities are padded; input_lengths counts prompt and completion together.
    """
    length = values["input_lengths"]
    lists = []
    for name in ("token_ids", "token_loss_mask", "generation_logprobs"):
        numbers = values.get(name)
        if not isinstance(length, int) or not isinstance(numbers, list):
            raise BrokenRow(f"input_lengths must be a number and {name!r} a list")
        if not 0 < length <= len(numbers):
            raise BrokenRow(f"{name!r} has {len(numbers)} numbers, input_lengths is {length}")
        lists.append(numbers[:length])
    ids, mask, logprobs = lists
    first = length
    if 1 in mask:
        first = mask.index(1)
    if not all(mask[first:]):
        raise BrokenRow("token_loss_mask marks several stretches: several turns are not supported")
    return {
        "prompt_ids": ids[:first],
        "completion_ids": ids[first:],
        "logprobs": logprobs[first:],
    }


def check_columns(values: Values, *names: str) -> None:
    """Raise BrokenRow for a row without one of the columns."""
    for name in names:
        column(values, name)


def column(values: Values, name: str) -> Any:
    """Return a column's value. Raises BrokenRow where the row lacks it."""
    if name not in values:
        raise BrokenRow(f"no column {name!r}; the row has {', '.join(map(repr, values))}"[:400])
    return values[name]


def single(value: Any) -> Any:
    """Return the item of a list of one, any other value as it is."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def answer_of(gts: Any) -> Any:
    """Return verl's ground truth where it is an answer or a list of answers, else None."""
    for item in gts if isinstance(gts, list) else [gts]:
        if isinstance(item, bool) or not isinstance(item, str | int | float):
            return None
    return gts


FORMATS: dict[str, Callable[[Values, str | None, int | None], Converted]] = {
    "verl": from_verl,
    "nemo-rl": from_nemo_rl,
}


def convert(kind: str, source: str, reward: str | None = None) -> Iterator[Converted]:
    """Yield the rollouts of a file, a folder or a glob. kind: of `FORMATS`.

    Raises ValueError naming file and line of a row that is of another format.
    """
    for file in data_files(source):
        numbers = re.findall(r"step[-_]?(\d+)", Path(file).stem)
        step = int(numbers[-1]) if numbers else None
        for row in file_rows(file):
            yield row.read(partial(FORMATS[kind], reward=reward, step=step))


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=FORMATS, metavar="verl|nemo-rl")
    parser.add_argument("source", metavar="IN", help="a file, a folder or a glob")
    parser.add_argument("output", metavar="OUT", type=Path, help="the JSONL file to write")
    parser.add_argument("--reward", metavar="COLUMN", help="the column that holds the reward")
    options = parser.parse_args(arguments)
    part = options.output.with_name(f"{options.output.name}.part")
    count = 0
    try:
        with part.open("w", encoding="utf-8") as file:
            for row in convert(options.kind, options.source, options.reward):
                file.write(f"{json.dumps(row)}\n")
                count += 1
    except ValueError as error:
        part.unlink()
        print(f"convert_rollouts: {error}", file=sys.stderr)
        return 1
    part.replace(options.output)
    print(f"{options.output}: {count} rollouts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
