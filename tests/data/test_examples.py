import pytest
from sources import load_examples

from g2d_jax.data import arithmetic
from g2d_jax.data.splits import drop_overlap, names_of, problem_id
from g2d_jax.records import Problem

SYSTEM = {"role": "system", "content": "s"}
USER = {"role": "user", "content": "1+1?"}
ASSISTANT = {"role": "assistant", "content": "2"}


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"messages": [USER, ASSISTANT]}, (USER,)),
        ({"messages": [SYSTEM, USER, ASSISTANT]}, (SYSTEM, USER)),
        ({"messages": [USER, ASSISTANT, USER, ASSISTANT]}, (USER, ASSISTANT, USER)),
        ({"prompt": "1+1?", "completion": "2"}, "1+1?"),
        ({"prompt": [USER], "completion": [ASSISTANT]}, (USER,)),
        ({"prompt": [USER], "completion": "2"}, (USER,)),
    ],
)
def test_standard_formats(jsonl, row, prompt):
    (example,), report = load_examples(jsonl(row))
    assert (example.prompt, example.completion, example.id) == (prompt, "2", problem_id(prompt))
    assert report.kept == 1


def test_mapped_fields(jsonl):
    row = {"messages": "unused", "question": "1+1?", "answer": "2"}
    (example,), _ = load_examples(jsonl(row), fields={"prompt": "question", "completion": "answer"})
    assert (example.prompt, example.completion) == ("1+1?", "2")
    (example,), _ = load_examples(
        jsonl({"chat": {"turns": [USER, ASSISTANT]}}), fields={"messages": "chat.turns"}
    )
    assert example.prompt == (USER,)
    with pytest.raises(ValueError, match="did you mean completion"):
        load_examples(jsonl(row), fields={"completions": "answer"})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x"}, "needs messages, or prompt and completion; the row has 'text'"),
        ({"messages": [USER]}, "must end with an assistant message, got user"),
        ({"messages": [ASSISTANT]}, "no user message before"),
        ({"messages": [ASSISTANT, ASSISTANT]}, "must end with a user message"),
        ({"messages": "hi"}, "must be a list of messages, got str"),
        ({"prompt": "x", "completion": [USER]}, "must be one assistant message, got user"),
        ({"prompt": "x", "completion": 2}, "'completion' must be a text, got int"),
        ({"prompt": "x", "completion": " "}, "'completion' is blank"),
    ],
)
def test_broken_rows(jsonl, row, message):
    path = jsonl({"prompt": "good", "completion": "1"}, row)
    with pytest.raises(ValueError, match=rf"rows\.jsonl, line 2: .*{message}"):
        load_examples(path)
    assert load_examples(path, on_error="skip")[1].broken == 1


def test_examples_of_one_prompt_stay_apart(jsonl):
    rows = [{"prompt": "x", "completion": c} for c in ("1", "2", "1")]
    examples, report = load_examples(jsonl(*rows))
    assert [example.completion for example in examples] == ["1", "2"] and report.duplicates == 1
    names = names_of([Problem(id=problem_id("x"), prompt="x")])
    assert drop_overlap(examples, names) == ([], 2)


def test_procedural_demonstrations():
    examples, _ = load_examples("procedural:slips", limit=4)
    assert examples == [arithmetic.example(arithmetic.SLIPS, 0, index) for index in range(4)]
    with pytest.raises(ValueError, match="train split only"):
        load_examples("procedural:slips", limit=4, split="test")
