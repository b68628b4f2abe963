"""One idea a line: what makes a line hold several is rare, counted for 10,000 tokens of code. Words
that a stranger reads twice are gone from docstrings, comments and messages."""

import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "g2d_jax"
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
WORDS = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstring_lines(tree: ast.AST) -> set[int]:
    lines = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            lines |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return lines


def counted(text: str) -> Counter[str]:
    """Count tokens outside docstrings, and what holds several ideas in one expression."""
    tree = ast.parse(text)
    documented = docstring_lines(tree)
    counts = Counter[str]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        counts["tokens"] += token.type in WORDS and token.start[0] not in documented
    for node in ast.walk(tree):
        if isinstance(node, COMPREHENSIONS):
            inner = [
                other
                for other in ast.walk(node)
                if other is not node and isinstance(other, COMPREHENSIONS)
            ]
            counts["comprehensions"] += 1
            counts["nested comprehensions"] += bool(inner) or len(node.generators) > 1
        counts["conditional expressions"] += isinstance(node, ast.IfExp)
        if isinstance(node, ast.If | ast.While) and node.test.end_lineno != node.test.lineno:
            named = [part for part in ast.walk(node.test) if isinstance(part, ast.NamedExpr)]
            counts["walruses in conditions of several lines"] += bool(named)
    return counts


@pytest.fixture(scope="module")
def total() -> Counter[str]:
    return sum((counted(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")), Counter[str]())


@pytest.mark.parametrize(
    ("what", "most"),
    [
        ("nested comprehensions", 1),
        ("comprehensions", 40),
        ("conditional expressions", 20),
        ("walruses in conditions of several lines", 0),
    ],
)
def test_a_line_holds_one_idea(total: Counter[str], what: str, most: float) -> None:
    assert 10_000 * total[what] / total["tokens"] <= most


BUDGET = {
    ".": 2_000,
    "cli": 5_750,
    "commands": 8_250,
    "config": 17_750,
    "data": 22_500,
    "losses": 6_750,
    "models": 43_250,
    "plan": 11_000,
    "recipes": 4_250,
    "report": 30_750,
    "rewards": 25_250,
    "rollouts": 15_000,
    "runtime": 24_500,
    "sampler": 18_250,
    "scoring": 2_250,
    "session": 27_500,
    "stages": 22_000,
    "study": 3_500,
    "sweep": 5_750,
    "training": 7_750,
}
"""Tokens of code that each room may hold, "." the modules outside of rooms. A change that needs more
raises its number here and says in CHANGELOG.md who asked for it."""


def test_each_room_keeps_to_its_budget() -> None:
    sizes = Counter[str]()
    for file in PACKAGE.rglob("*.py"):
        room = str(file.relative_to(PACKAGE).parents[-2]) if file.parent != PACKAGE else "."
        sizes[room] += counted(file.read_text("utf-8"))["tokens"]
    assert sizes.keys() == BUDGET.keys()
    assert not {room: size for room, size in sizes.items() if size > BUDGET[room]}


DIALECT = re.compile(
    r"\b(told|said|whatever|mend(ed|s)?|heeds?|amiss|so many|of others|under way|cannot be told"
    r"|nothing is lost|by turns|beside(?![:,]))\b"
)


def prose(text: str) -> str:
    """Join docstrings, comments and other texts, without what is quoted as code."""
    kinds = {
        tokenize.COMMENT,
        tokenize.STRING,
        getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING),
    }
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return re.sub(
        r"`[^`]*`", "", "\n".join(token.string for token in tokens if token.type in kinds)
    )


def test_prose_has_no_words_of_a_dialect() -> None:
    found = {}
    for file in PACKAGE.rglob("*.py"):
        words = [match[0] for match in DIALECT.finditer(prose(file.read_text("utf-8")))]
        if words:
            found[str(file.relative_to(PACKAGE))] = words
    assert not found


def test_the_counts() -> None:
    text = 'def f(x):\n    """[a for a in b]"""\n    return [y if y else 0 for z in [w for w in x] for y in z]\n'
    assert counted(text)["comprehensions"] == 2
    assert counted(text)["nested comprehensions"] == 1
    assert counted(text)["conditional expressions"] == 1
    assert (
        counted("if (\n    (a := b)\n    and c\n):\n    pass\n")[
            "walruses in conditions of several lines"
        ]
        == 1
    )
