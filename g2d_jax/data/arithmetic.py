r"""The embedded task: chains of operations on small numbers, worked from left to right, without any download.

A problem is `57+3+2=?`: a start of 1-99, then 2-5 operations (+ and - with operands 2-9, * with 2-5, drawn
.4/.4/.2 from those that keep the running value within 0-99). There is no precedence: `8-4+2*3=?` is ((8-4)+2)*3 = 18.

Demonstrations are all correct but come in three styles that a small model masters to different degrees, which is what
leaves reinforcement learning something to find:

    direct  .45  \boxed{62}
    fused   .20  57+3+2=62;\boxed{62}               two operations a step
    steps   .35  57+3=60;60+2=62;\boxed{62}

Everything is a pure function of (seed, index): BLAKE2b is the counter-based generator, so no library version, order
of calls or number of processes changes a problem. Prompts have at most 14 tokens, responses at most 45.
"""

from __future__ import annotations

import functools
import hashlib
from typing import TYPE_CHECKING

from g2d_jax.data.splits import Split, check_split, problem_id, split_of
from g2d_jax.records import Example, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SOURCE = "procedural:arithmetic"
STYLES = {"direct": 0.45, "fused": 0.20, "steps": 0.35}
MAX_VALUE = 99
MIN_OPERATIONS, MAX_OPERATIONS = 2, 5

# operator: (weight, operands)
_OPERATORS = {"+": (2, range(2, 10)), "-": (2, range(2, 10)), "*": (1, range(2, 6))}

PAD, EOS = "<pad>", "<eos>"
VOCABULARY = (PAD, EOS, *"0123456789+-*=;?", " ", "\n", "\\boxed{", "}")
"""The 22 tokens in the order of their ids. There is no beginning-of-sequence token, as in Qwen2."""

Move = tuple[str, int]


def problem(seed: int, index: int) -> Problem:
    """Problem number `index` of the endless sequence `seed`, of any split; a few short ones recur.

    Its answer is the value, its solution the step-by-step demonstration, its subset the number of operations.
    """
    return _problem(*_chain(f"problem/{seed}/{index}"))


def problems(seed: int, count: int, split: Split | None = None) -> list[Problem]:
    """The first `count` distinct problems of one split (None: of all three), in the order of the sequence `seed`.

    Splits are disjoint by id, whatever the seeds. Raises ValueError for an unknown split or count below 0, and when
    the sequence yields too few distinct problems.
    """
    if split is not None:
        check_split(split)
    if count < 0:
        raise ValueError(f"count must not be negative, got {count}")
    found: dict[str, Problem] = {}
    for index in range(1000 + 100 * count):
        if len(found) == count:
            break
        candidate = problem(seed, index)
        if split in (None, split_of(candidate.id)):
            found.setdefault(candidate.id, candidate)
    if len(found) < count:
        raise ValueError(f"only {len(found)} of {count} distinct problems found ({split or 'all'}): ask for fewer")
    return list(found.values())


def example(seed: int, index: int) -> Example:
    """Demonstration number `index` of the endless sequence `seed`: a training problem answered in one of three styles.

    Distinct from `problem(seed, index)`: the first of its own draws that falls into the train split.
    """
    attempt = 0
    while True:
        start, moves = _chain(f"example/{seed}/{index}/{attempt}")
        prompt = _prompt(start, moves)
        identifier = problem_id(prompt)
        if split_of(identifier) == "train":
            style = _style(_draws(f"style/{seed}/{index}")[0] / 2**64)
            return Example(id=identifier, prompt=prompt, completion=demonstration(start, moves, style))
        attempt += 1


def demonstration(start: int, moves: list[Move], style: str) -> str:
    """The correct response to a chain in one style: "direct", "fused" (two operations a step) or "steps"."""
    width = {"direct": 0, "fused": 2, "steps": 1}[style]
    text, value = "", start
    for first in range(0, len(moves) if width else 0, width or 1):
        step = moves[first : first + width]
        result = evaluate(value, step)
        text += f"{value}{_operations(step)}={result};"
        value = result
    return f"{text}\\boxed{{{evaluate(start, moves)}}}"


def evaluate(start: int, moves: list[Move]) -> int:
    """The value of a chain, from left to right."""
    value = start
    for operator, operand in moves:
        value = value + operand if operator == "+" else value - operand if operator == "-" else value * operand
    return value


def tokenizer() -> PreTrainedTokenizerFast:
    r"""The task's tokenizer, made in memory: one token per character, `\boxed{` and `}` single, 22 tokens.

    decode(encode(x)) == x for every text of these characters; any other character raises in `encode`.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # unk_token names no token on purpose: an unknown character is an error, not a token that hides it.
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\\boxed\{|[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def _problem(start: int, moves: list[Move]) -> Problem:
    prompt = _prompt(start, moves)
    return Problem(
        id=problem_id(prompt),
        prompt=prompt,
        answer=str(evaluate(start, moves)),
        source=SOURCE,
        subset=f"{len(moves)} operations",
        solution=demonstration(start, moves, "steps"),
    )


def _prompt(start: int, moves: list[Move]) -> str:
    return f"{start}{_operations(moves)}=?"


def _operations(moves: list[Move]) -> str:
    return "".join(f"{operator}{operand}" for operator, operand in moves)


def _chain(name: str) -> tuple[int, list[Move]]:
    """Start and moves drawn under one name; each step draws an operator, then an operand, that keep the range."""
    draws = _draws(name)
    start = 1 + draws[0] % MAX_VALUE
    count = MIN_OPERATIONS + draws[1] % (MAX_OPERATIONS - MIN_OPERATIONS + 1)
    value = start
    moves: list[Move] = []
    for draw in draws[2 : 2 + count]:
        choices = _choices(value)
        operator, operands = choices[draw % len(choices)]
        moves.append((operator, operands[(draw >> 32) % len(operands)]))
        value = evaluate(value, moves[-1:])
    return start, moves


@functools.cache
def _choices(value: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The operators that can follow `value`, each as often as its weight, with the operands that stay in range."""
    choices = []
    for operator, (weight, operands) in _OPERATORS.items():
        legal = tuple(n for n in operands if 0 <= evaluate(value, [(operator, n)]) <= MAX_VALUE)
        choices += [(operator, legal)] * weight if legal else []
    return tuple(choices)


def _draws(name: str) -> list[int]:
    """Eight uniform 64-bit integers that depend on `name` alone (their remainders by n <= 99 are biased by < 2^-24)."""
    digest = hashlib.blake2b(f"g2d_jax/arithmetic/{name}".encode(), digest_size=64).digest()
    return [int.from_bytes(digest[i : i + 8], "little") for i in range(0, 64, 8)]


def _style(fraction: float) -> str:
    for style, share in STYLES.items():
        fraction -= share
        if fraction < 0.0:
            return style
    return "steps"
