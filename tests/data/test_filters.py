import pytest
from sources import load_problems

from g2d_jax.data.filters import has_options

GOOD = {"problem": "What is 1 + 1?", "solution": r"So it is $\boxed{2}$.", "source": "aops_forum"}


@pytest.fixture
def load(jsonl):
    """load(name, *rows): what the named data set makes of a local file of these rows."""
    return lambda name, *rows, **options: load_problems(f"{name}:{jsonl(*rows)}", **options)


def test_numinamath_row(load):
    row = {**GOOD, "messages": [{"role": "user", "content": "x"}], "level": 3}
    (problem,), report = load("numinamath", row)
    assert (problem.prompt, problem.answer, problem.subset) == ("What is 1 + 1?", "2", "aops_forum")
    assert (problem.source, problem.solution, problem.columns) == (
        "numinamath",
        GOOD["solution"],
        {"level": 3},
    )
    assert (report.rows, report.kept, report.filtered) == (1, 1, {})


REASONS = [
    ({"source": "orca_math"}, "synthetic"),
    ({"source": "synthetic_amc"}, "synthetic"),
    ({"source": "synthetic_math"}, "synthetic"),
    ({"problem": "Prove that $1 < 2$."}, "proof"),
    ({"problem": "(1) Find $a$. (2) Show that $a < 2$."}, "proof"),
    ({"problem": "Prove or disprove: all $n$ are even."}, "proof"),
    ({"problem": "Is it so? Give a proof."}, "proof"),
    ({"problem": "All rows are equal.", "solution": r"\boxed{\text{Proof completed}}"}, "proof"),
    (
        {"problem": r"It is: $\textbf{(A)}\ 3 \qquad \textbf{(B)}\ 4 \qquad \textbf{(C)}\ 5$"},
        "multiple choice",
    ),
    (
        {"problem": r"It is $(\mathrm{A}) 1, (\mathrm{B}) 2, (\mathrm{C}) 3, (\mathrm{D}) 4$"},
        "multiple choice",
    ),
    ({"problem": "It is\n(A) -3\n(B) 4\n(C) 5\n(D) 6"}, "multiple choice"),
    ({"problem": "It is\nA: 3\nB: 4\nC: 5"}, "multiple choice"),
    ({"problem": "It is (  ) A. $3$ B. $4$ C. $5$ D. $6$"}, "multiple choice"),
    ({"problem": "It is ____.\nA) left B) right C) up D) down"}, "multiple choice"),
    ({"solution": r"So $\boxed{C}$."}, "multiple choice"),
    ({"solution": r"So $\boxed{\text{(B)}}$."}, "multiple choice"),
    ({"solution": r"So $\boxed{\textbf{(D)}\ 12}$."}, "multiple choice"),
    ({"solution": r"So $\boxed{A: 12}$."}, "multiple choice"),
    ({"solution": "So it is 2."}, "without an answer"),
    ({"solution": "2"}, "without an answer"),
    ({"solution": r"So it is \boxed{ }."}, "without an answer"),
    ({"solution": None}, "without an answer"),
    ({"solution": "#### Step 1\nAdd them."}, "without an answer"),
]


@pytest.mark.parametrize(("changes", "reason"), REASONS, ids=lambda value: str(value)[:40])
def test_numinamath_filter(load, changes, reason):
    problems, report = load("numinamath", {**GOOD, "problem": "good"}, {**GOOD, **changes})
    assert [problem.prompt for problem in problems] == ["good"]
    assert dict(report.filtered) == {reason: 1} and report.rows == 2 == report.kept + 1


def test_reasons_are_counted(load):
    rows = [{**GOOD, "problem": f"no. {n}", **changes} for n, (changes, _) in enumerate(REASONS)]
    good = {**GOOD, "problem": "good"}
    _, report = load("numinamath", good, good, *rows, {**GOOD, "problem": "x"}, on_error="skip")
    listed = [reason for _, reason in REASONS]
    assert report.filtered == {reason: listed.count(reason) for reason in dict.fromkeys(listed)}
    assert (report.kept, report.duplicates, report.broken) == (1, 1, 1)
    assert report.rows == report.kept + report.duplicates + report.broken + sum(
        report.filtered.values()
    )
    with pytest.raises(ValueError, match=r"has no usable row: 3 rows, left out: 3 synthetic"):
        load(
            "numinamath",
            *({**GOOD, "source": "orca_math", "problem": f"no. {n}"} for n in range(3)),
        )


OWN = {"question": "What is 1 + 1?", "gold": "2", "from": "olympiads"}


@pytest.mark.parametrize(
    ("row", "answer", "fields"),
    [
        *(({**GOOD, "problem": problem}, "2", {}) for problem in (
            "Improve this: how many ways?",
            "It can be shown that $x = m/n$. Find $m + n$.",
            "For events with P(A) = 0.1, P(B) = 0.2 and P(C) = 0.3, find P(A)P(B)P(C).",
            "Let $f(A) + f(B) = f(C)$ for sets. How many $f$?",
            "A circle passes through A. Its tangent meets BC at B. Let C. be D. and so on. How long is AB?",
            "Points (A) and (B) are 3 apart. How far is their middle from each?",
            "In triangle ABC, A:B:C = 1:2:3. What is the angle at D?",
            "A team has 3 players. B has 4. How many together?",
        )),
        *(({**GOOD, "solution": rf"So $\boxed{{{answer}}}$."}, answer, {})
          for answer in ("AB", "A:B=1:2", "(A, B)", r"\frac{A}{2}", "C_n", "D(x)", "x")),
        ({**GOOD, "solution": "Because.", "answer": 2}, "2", {}),
        (OWN, "2", {"answer": "gold", "subset": "from"}),
    ],
)  # fmt: skip
def test_rows_that_only_look_filtered_are_kept(load, row, answer, fields):
    (problem,), report = load("numinamath", row, fields=fields)
    assert (problem.answer, report.filtered) == (answer, {})


def talk(*contents, **flags):
    roles = ("user", "assistant")
    turns = [
        {"role": roles[i % 2], "content": text, "toxic": False, **flags}
        for i, text in enumerate(contents)
    ]
    return {
        "conversation": turns,
        "model": "gpt-4",
        "language": "English",
        "toxic": False,
        "redacted": False,
    }


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        (
            "numinamath",
            {"problem": "What is 1 + 1?", "solution": r"\boxed{2}"},
            "no field 'source'",
        ),
        ("numinamath", {**GOOD, "problem": "  "}, "blank"),
        ("numinamath", {**GOOD, "problem": " 7 "}, "'problem' is too short for a prompt: '7'"),
        ("wildchat", talk(" "), "blank"),
        ("wildchat", talk("?"), "too short"),
        ("wildchat", talk(5), "must be a text, got int"),
        ("wildchat", {"conversation": []}, "no user message"),
        (
            "wildchat",
            {"conversation": [{"role": "assistant", "content": "Hi"}, "x"]},
            "no user message",
        ),
        ("wildchat", {"conversation": "Hi"}, "must be a list of messages, got str"),
        ("wildchat", {"prompt": "Hi"}, "must be a list of messages, got NoneType"),
    ],
)
def test_broken_rows(load, name, row, message):
    with pytest.raises(ValueError, match=f"line 1: .*{message}"):
        load(name, row)


@pytest.mark.parametrize(
    "text", ["(" * 100_000, "A " * 100_000, "\n" * 100_000, "A" + " " * 100_000, "(A)" * 50_000]
)
def test_hostile_problems_take_no_time(text):
    assert has_options(text) is False


def test_wildchat_row(load):
    row = {
        **talk("Write a poem.", "No.", "Please!"),
        "hashed_ip": "f0",
        "header": {},
        "openai_moderation": [{}],
    }
    (problem,), _ = load("wildchat", row)
    assert problem.prompt == ({"role": "user", "content": "Write a poem."},)
    assert (problem.answer, problem.source) == (None, "wildchat")
    assert problem.columns == {
        "model": "gpt-4",
        "language": "English",
        "toxic": False,
        "redacted": False,
    }


def test_wildchat_keeps_every_language_and_drops_flagged_rows(load):
    problems, report = load(
        "wildchat",
        {**talk("写一首诗"), "language": "Chinese"},
        {**talk("a bad thing"), "toxic": True},
        talk("another bad thing", toxic=True),
        {**talk("my name is NAME_1"), "redacted": True},
        talk("写一首诗", "whatever"),
    )
    assert [problem.prompt[0]["content"] for problem in problems] == ["写一首诗"]
    assert (report.filtered, report.duplicates) == ({"toxic": 2, "redacted": 1}, 1)
