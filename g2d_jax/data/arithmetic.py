r"""The embedded arithmetic tasks: chains of operations on small numbers, evaluated from left to right, without any
download.

A problem is `57+3+2=?`: a start, then operations (+ and - with operands 2-9, * with 2-5, drawn
.4/.4/.2 from those that keep the running value in range). There is no precedence: `8-4+2*3=?` is
((8-4)+2)*3 = 18.

`procedural:slips` has 2-6 operations on values of one digit. Its demonstrations write every step,
with mistakes: the subtraction of n is skipped n times in ten, and the chain continues from the
unchanged value:

    8-2+3=?   8-2=6;6+3=9;\boxed{9}         and, two times in ten,         8-2=8;8+3=11;\boxed{11}

Greedy decoding always skips a step that is skipped more often than not: rewards have to correct
the demonstrations.

`procedural:digits` is a longer version for a larger model: 13-18 operations modulo ten, so that
every value is one digit and every step six tokens. Subtractions of 7, 8 and 9 are skipped 3, 6 and
8 times in ten:

    2-9+8-…=?   2-9=3;3+8=1;…               and, eight times in ten,         2-9=2;2+8=0;…

`procedural:chains` has 2-5 operations on values of two digits. Its demonstrations are all correct
but have three styles that a small model learns to different degrees, which leaves reinforcement
learning something to find:

    direct  .45  \boxed{62}
    fused   .20  57+3+2=62;\boxed{62}               two operations a step
    steps   .35  57+3=60;60+2=62;\boxed{62}

Everything is a pure function of (task, seed, index): BLAKE2b is the counter-based generator, so no
library version, order of calls or number of processes changes a problem. Prompts have at most 15
tokens, correct responses at most 45, those with skipped steps 66. For digits, prompts have at most
39 tokens and all responses 82 to 112.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from g2d_jax.data.splits import Split, problem_id, split_of
from g2d_jax.records import Example, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclasses.dataclass(frozen=True)
class Task:
    """Chains of one size, and the style of their demonstrations."""

    name: str
    max_value: int
    """The start is within 1 … max_value, every running value within 0 … max_value."""
    operations: tuple[int, int]
    """The fewest and the most operations of a problem."""
    styles: Mapping[str, float]
    """The shares of the demonstrations' styles."""
    forgotten: Mapping[int, float]
    """The share of demonstrations that skip the subtraction of an operand, by operand."""
    modulus: int | None = None
    """Values are computed modulo this number."""


CHAINS = Task("procedural:chains", 99, (2, 5), {"direct": 0.45, "fused": 0.20, "steps": 0.35}, {})
SLIPS = Task("procedural:slips", 9, (2, 6), {"steps": 1.0}, {n: n / 10 for n in range(2, 10)})
DIGITS = Task(
    "procedural:digits", 9, (13, 18), {"steps": 1.0}, {7: 0.3, 8: 0.6, 9: 0.8}, modulus=10
)
TASKS = {task.name: task for task in (CHAINS, SLIPS, DIGITS)}
"""The tasks by the names of their problems, demonstrations and (common) tokenizer as sources."""

# operator: (weight, operands)
_COMPUTE = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
_OPERATORS = {"+": (2, range(2, 10)), "-": (2, range(2, 10)), "*": (1, range(2, 6))}

PAD, EOS = "<pad>", "<eos>"
VOCABULARY = (PAD, EOS, *"0123456789+-*=;?", " ", "\n", "\\boxed{", "}")
"""The 22 tokens of all tasks in the order of their ids. There is no beginning-of-sequence token, as
in Qwen2."""

Move = tuple[str, int]


def problem(task: Task, seed: int, index: int) -> Problem:
    """Create problem number `index` of the task's endless sequence `seed`, of any split; a few short
    ones recur.

    Its answer is the value, its solution the step-by-step demonstration, its subset the number of
    operations.
    """
    start, moves = _chain(task, f"problem/{seed}/{index}")
    prompt = _prompt(start, moves)
    return Problem(
        id=problem_id(prompt),
        prompt=prompt,
        answer=str(evaluate(start, moves, task.modulus)),
        source=task.name,
        subset=f"{len(moves)} operations",
        solution=demonstration(start, moves, "steps", modulus=task.modulus),
    )


def problems(task: Task, seed: int, count: int, split: Split | Literal[""] = "") -> list[Problem]:
    """Create the first `count` distinct problems of one split ("": of all three), in the order of
    the sequence `seed`.

    Splits are disjoint by id, for any seeds. Raises ValueError when the sequence yields too few
    distinct problems.
    """
    distinct: dict[str, Problem] = {}
    for index in range(1000 + 100 * count):
        found = problem(task, seed, index)
        if split in ("", split_of(found.id)):
            distinct.setdefault(found.id, found)
        if len(distinct) == count:
            return list(distinct.values())
    raise ValueError(
        f"only {len(distinct)} of {count} distinct problems found ({split or 'all'}): lower the count"
    )


def example(task: Task, seed: int, index: int) -> Example:
    """Create demonstration number `index` of the task's endless sequence `seed`: a training problem
    with a response.

    Its problem is not `problem(task, seed, index)`, but the first of its own draws that is in the
    train split.
    """
    for attempt in itertools.count():
        start, moves = _chain(task, f"example/{seed}/{index}/{attempt}")
        prompt = _prompt(start, moves)
        identifier = problem_id(prompt)
        if split_of(identifier) == "train":
            break
    style = _style(task, random_integers(f"style/{seed}/{index}")[0] / 2**64)
    forgotten = []
    draws = random_integers(f"slips/{seed}/{index}", len(moves))
    for draw, (operator, operand) in zip(draws, moves, strict=False):
        chance = task.forgotten.get(operand, 0.0)
        forgotten.append(operator == "-" and draw / 2**64 < chance)
    completion = demonstration(start, moves, style, forgotten, task.modulus)
    return Example(identifier, prompt, completion)


def demonstration(
    start: int,
    moves: list[Move],
    style: str,
    forgotten: Sequence[bool] = (),
    modulus: int | None = None,
) -> str:
    """Return the response to a chain in one style: "direct", "fused" (two operations a step) or
    "steps".

    forgotten: the steps that leave the value unchanged; without any the response is correct.
    """
    if style == "direct":
        return f"\\boxed{{{evaluate(start, moves, modulus)}}}"
    width = {"fused": 2, "steps": 1}[style]
    text = ""
    value = start
    for first in range(0, len(moves), width):
        step = moves[first : first + width]
        text += f"{value}{_operations(step)}="
        if not any(forgotten[first : first + width]):
            value = evaluate(value, step, modulus)
        text += f"{value};"
    return f"{text}\\boxed{{{value}}}"


def evaluate(start: int, moves: list[Move], modulus: int | None = None) -> int:
    """Compute the value of a chain, from left to right, each step modulo `modulus`."""
    value = start
    for operator, operand in moves:
        value = _COMPUTE[operator](value, operand)
        if modulus:
            value %= modulus
    return value


def tokenizer() -> PreTrainedTokenizerFast:
    r"""Create the task's tokenizer in memory: one token per character, `\boxed{` and `}` single, 22
    tokens.

    decode(encode(x)) == x for every text of these characters; any other character raises in
    `encode`.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # unk_token deliberately names no token: an unknown character then raises instead of being
    # hidden by a token.
    backend = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\\boxed\{|[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def _prompt(start: int, moves: list[Move]) -> str:
    return f"{start}{_operations(moves)}=?"


def _operations(moves: list[Move]) -> str:
    return "".join(f"{operator}{operand}" for operator, operand in moves)


def _chain(task: Task, name: str) -> tuple[int, list[Move]]:
    """Draw start and moves under one name; each step draws an operator, then an operand, that keep
    the range."""
    fewest, most = task.operations
    draws = random_integers(name, 2 + most)
    start = 1 + draws[0] % task.max_value
    count = fewest + draws[1] % (most - fewest + 1)
    value = start
    moves: list[Move] = []
    for draw in draws[2 : 2 + count]:
        choices = _choices(value, task.max_value, task.modulus)
        # The low bits select the operator, the high bits the operand: the two are independent.
        operator, operands = choices[draw % len(choices)]
        moves.append((operator, operands[(draw >> 32) % len(operands)]))
        value = evaluate(value, moves[-1:], task.modulus)
    return start, moves


@functools.cache
def _choices(
    value: int, max_value: int, modulus: int | None
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """List the operators that can follow `value`, each as often as its weight, with the operands
    that stay in range."""
    choices = []
    for operator, (weight, operands) in _OPERATORS.items():
        legal = tuple(
            n for n in operands if 0 <= evaluate(value, [(operator, n)], modulus) <= max_value
        )
        if legal:
            choices += [(operator, legal)] * weight
    return tuple(choices)


def random_integers(name: str, count: int = 1) -> list[int]:
    """Draw at least `count` uniform 64-bit integers from `name` alone (remainders by n <= 99 are
    biased by < 2^-24)."""
    blocks = [name, *(f"{name}/{block}" for block in range(1, -(-count // 8)))]
    names = (f"g2d_jax/arithmetic/{block}".encode() for block in blocks)
    digests = b"".join(hashlib.blake2b(name).digest() for name in names)
    return [int.from_bytes(digests[i : i + 8], "little") for i in range(0, len(digests), 8)]


def _style(task: Task, fraction: float) -> str:
    for style, share in task.styles.items():
        fraction -= share
        if fraction < 0.0:
            return style
    return [*task.styles][-1]
