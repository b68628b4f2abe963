"""One idea a line: what makes a line hold several is rare, counted for 10,000 tokens of code."""

import ast
import io
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
