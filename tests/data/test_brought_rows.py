"""Rows as people have them, read alike for problems, examples, pairs and rollouts: rendered, refused
by line and key, or counted."""

import contextlib
import json
import time
from typing import Any

import pytest
from sources import load_examples, load_problems

from g2d_jax.data.distinct import LoadReport
from g2d_jax.data.dumps import read_dump
from g2d_jax.data.preference_sets import pair_rows, to_pair
from g2d_jax.data.tokenizer import PromptTokenizer
from g2d_jax.records import Example

ASK = {"role": "user", "content": "2+2?"}
AGAIN = {"role": "user", "content": "Sure?"}
KINDS = ("problems", "examples", "pairs", "rollouts")
Says = dict[str, Any]


def answer_row(kind: str, answer: Any) -> dict[str, Any]:
    """A row of this kind with a message of the assistant, or a text of messages."""
    if kind == "problems":
        return {"prompt": [ASK, answer, AGAIN], "answer": "4"}
    if kind == "examples":
        return {"prompt": [ASK], "completion": [answer]}
    if kind == "pairs":
        other = {"role": "assistant", "content": "4", "tool_calls": None}
        return {"prompt": [ASK], "chosen": [answer], "rejected": [other]}
    return {"prompt": [ASK], "completion": [answer], "reward": 1}


def read(kind: str, path: str) -> Any:
    """The record of the first row, by the reader of its kind."""
    if kind == "problems":
        return load_problems(path)[0][0]
    if kind == "examples":
        return load_examples(path)[0][0]
    if kind == "pairs":
        return next(pair_rows(path)).read(to_pair)
    return next(read_dump(path))


def answer_read(kind: str, path: str) -> str:
    """The assistant's text in it."""
    record = read(kind, path)
    if kind == "problems":
        return record.prompt[1]["content"]
    return record[1] if kind == "pairs" else record.completion


THOUGHT = "two and two are four"
WRITTEN = f"<think>\n{THOUGHT}\n</think>\n\n4!"
KEPT: list[tuple[Says, str]] = [
    ({"reasoning_content": THOUGHT}, WRITTEN),
    ({"thinking": f"\n{THOUGHT}\n"}, WRITTEN),
    ({"reasoning": THOUGHT, "reasoning_content": THOUGHT}, WRITTEN),
    ({"reasoning_content": None, "tool_calls": [], "images": ""}, "4!"),
    ({"thinking": " \n", "tool_calls": [{"function": {"name": None}}], "name": "a"}, "4!"),
]
REFUSED: list[tuple[Says, str]] = [
    ({"tool_calls": [{"function": {"name": "add"}}]}, "'tool_calls' is for the chat template"),
    ({"function_call": {"name": "add"}}, "'function_call' is for the chat template"),
    ({"images": ["a.png"]}, "'images' is for the chat template"),
    ({"audio": {"data": "AA=="}}, "'audio' is for the chat template"),
    ({"thinking": [{"type": "thinking", "thinking": THOUGHT}]}, "thinking' must be a text"),
    ({"thinking": THOUGHT, "reasoning": "five"}, "has other reasoning already"),
    ({"thinking": THOUGHT, "content": "<think>four</think>4"}, "has other reasoning already"),
    ({"reasoning": THOUGHT, "role": "user"}, "is not the assistant's"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("keys", "text"), KEPT, ids=str)
def test_a_thought_is_part_of_what_the_assistant_wrote(jsonl, kind, keys, text):
    """Also in pairs: those that differ in it alone are two responses. Null and empty values pass."""
    path = jsonl(answer_row(kind, {"role": "assistant", "content": "4!", **keys}))
    assert answer_read(kind, path) == text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("keys", "message"), REFUSED, ids=str)
def test_what_is_not_rendered_is_refused_by_line_and_key(jsonl, kind, keys, message):
    path = jsonl(answer_row(kind, {"role": "assistant", "content": "4!", **keys}))
    with pytest.raises(ValueError, match=rf"rows\.jsonl, line 1: .*{message}"):
        read(kind, path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "add"}}]),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("images", ["a.png"]),
        ("video", "a.mp4"),
    ],
)
def test_columns_for_the_template_are_refused_unless_they_are_empty(jsonl, kind, key, value):
    row = answer_row(kind, {"role": "assistant", "content": "4!"})
    with pytest.raises(ValueError, match=rf"rows\.jsonl, line 1: '{key}' is for the chat template"):
        read(kind, jsonl({**row, key: value}))
    for empty in (None, [], {}, {"enable_thinking": None}, "", "[]"):
        assert answer_read(kind, jsonl({**row, key: empty})) == "4!"


@pytest.mark.parametrize("key", ["tools", "notes"])
@pytest.mark.parametrize("load", [load_problems, load_examples])
def test_what_is_nested_beyond_reading_is_a_broken_row(jsonl, load, key):
    good = json.dumps({"prompt": "2+2?", "completion": "4"})
    deep = '{"a":' * 900 + "1" + "}" * 900
    path = jsonl(
        good.encode(), f'{{"prompt": "3+3?", "completion": "6", "{key}": {deep}}}'.encode()
    )
    records, report = load(path, on_error="skip")
    assert len(records) + report.broken == 2 and records[0].prompt == "2+2?"
    if key == "tools":
        assert report.broken == 1 and "line 2: " in report.errors[0]


@pytest.mark.parametrize(
    "text",
    [
        " " * 300_000 + "x",
        "[" + " " * 300_000 + "x",
        "[{" + "'role' " * 60_000,
        '[{"role"' + " " * 300_000 + "x",
        "[{'role': " * 30_000,
    ],
    ids=lambda text: text.strip()[:12],
)
def test_texts_that_may_be_messages_are_searched_in_linear_time(jsonl, text):
    path = jsonl({"prompt": text, "completion": text, "chosen": text, "rejected": f"{text}."})
    started = time.process_time()
    for kind in KINDS:
        with contextlib.suppress(ValueError):
            read(kind, path)
    assert time.process_time() - started < 5


def test_keys_that_are_not_read_are_counted(jsonl):
    said = {"role": "assistant", "content": "4", "id": 7, "weight": None, "thinking": "four"}
    packed = json.dumps([{**ASK, "id": 3}])
    _, report = load_examples(
        jsonl({"messages": [ASK, said]}, {"prompt": packed, "completion": "5"})
    )
    assert report.keys == {"id": 2, "thinking": 1}
    assert "line 1" in report.firsts["id"] and "line 1" in report.firsts["thinking"]


PACKED = [
    (json.dumps([ASK]), (ASK,)),
    (f"\n {json.dumps([ASK], indent=1)} \n", (ASK,)),
    (json.dumps([{"content": "2+2?", "name": None, "role": "user"}]), (ASK,)),
    ("[1, 2] has which sum?", "[1, 2] has which sum?"),
    ('[{"x": 1}]', '[{"x": 1}]'),
    ('{"role": "admin"} is what?', '{"role": "admin"} is what?'),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("text", "prompt"), PACKED, ids=str)
def test_messages_kept_as_text_are_read_as_messages(jsonl, kind, text, prompt):
    row = {"prompt": text, "answer": "4", "completion": "4", "chosen": "4", "rejected": "5"}
    record = read(kind, jsonl(row))
    assert (record[0] if kind == "pairs" else record.prompt) == prompt


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("several", [False, True])
def test_answers_kept_as_text_are_read_as_messages(jsonl, kind, several):
    reply = {"role": "assistant", "content": "4!", "thinking": THOUGHT}
    packed = json.dumps([reply] if several else reply)
    other = json.dumps([{"role": "assistant", "content": "5"}])
    row = {"prompt": [ASK], "completion": packed, "chosen": packed, "rejected": other}
    assert answer_read(kind, jsonl(row)) == WRITTEN


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[{'role': 'user', 'content': '2+2?'}]", "write it with json.dumps"),
        ("[{'content': '2+2?', 'role': 'user'}\n {'content': '4'}]", "write it with json.dumps"),
        ('[{"from": "human", "value": "2+2?"}]', "the role must be one of"),
        (json.dumps([{"role": "tool", "content": "4"}]), "the role must be one of"),
    ],
)
def test_other_messages_kept_as_text_are_refused_by_line(jsonl, kind, text, message):
    row = {"prompt": text, "completion": "4", "chosen": "4", "rejected": "5"}
    with pytest.raises(ValueError, match=rf"rows\.jsonl, line 1: .*{message}"):
        read(kind, jsonl(row))


HOLES = ["nan", "None", "null", "NA", "TBD", " N/A ", "<NA>", "todo"]


@pytest.mark.parametrize("hole", HOLES)
@pytest.mark.parametrize("write", ["{}", r"\boxed{{{}}}", "#### {}", '["{}"]'])
def test_answers_that_stand_for_none_are_missing_and_counted(jsonl, hole, write):
    rows = [
        {"problem": "a", "answer": write.format(hole)},
        {"problem": "b", "solution": write.format(hole)},
        {"problem": "c", "answer": "4"},
    ]
    problems, report = load_problems(jsonl(*rows))
    assert [problem.answer for problem in problems] == [None, None, "4"]
    counted = not write.startswith("[")  # a list of nothing is left for the graders
    assert report.holes == ({repr(write.format(hole)): 1} if counted else {})
    if write == "{}":
        (problem,) = load_problems(jsonl({"problem": "d", "answer": [hole, "7"]}))[0]
        assert problem.answer == "7"
        row = {"prompt": "2+2?", "completion": "4", "answer": hole}
        assert next(read_dump(jsonl(row))).answer is None


def test_a_number_that_is_none_is_missing_too(jsonl):
    """As data frames write a hole in a column of numbers."""
    rows = [{"problem": "a", "answer": float("nan")}, {"problem": "b", "answer": 4.0}]
    problems, report = load_problems(jsonl(*rows))
    assert [problem.answer for problem in problems] == [None, "4"]
    assert report.holes == {"nan": 1}
    (problem,) = load_problems(jsonl({"problem": "a", "answer": [float("nan"), 7]}))[0]
    assert problem.answer == "7"


@pytest.mark.parametrize("answer", ["no", "0", "nano", "none of them", "N", "Na", "-"])
def test_other_short_answers_stay(jsonl, answer):
    expected = None if answer.lower() == "na" else answer
    assert load_problems(jsonl({"problem": "a", "answer": answer}))[0][0].answer == expected


OPEN_INSTRUCT = {"messages": [ASK], "ground_truth": ["4"], "dataset": ["math"]}


def test_rows_of_open_instruct_and_of_verl(jsonl):
    (problem,), _ = load_problems(jsonl(OPEN_INSTRUCT))
    assert (problem.prompt, problem.answer) == ((ASK,), "4")
    assert problem.columns == {"dataset": ["math"]}
    whole = [ASK, {"role": "assistant", "content": "4"}]
    with pytest.raises(ValueError, match=r"line 1: 'messages' must end with a user message"):
        load_problems(jsonl({**OPEN_INSTRUCT, "messages": whole}))


@pytest.mark.parametrize(
    ("keys", "reward", "has_reward"),
    [
        ({"score": 0.5}, 0.5, True),
        ({"score": None}, None, True),
        ({"score": 0.5, "reward": 0.25}, 0.25, True),
        ({"score": 0.5, "reward": None}, None, True),
        ({}, None, False),
    ],
)
def test_a_score_of_a_rollout_is_its_reward(jsonl, keys, reward, has_reward):
    row = next(read_dump(jsonl({"prompt": "2+2?", "completion": "4", **keys})))
    assert (row.reward, row.has_reward) == (reward, has_reward)


def test_few_broken_rows_are_left_out_and_more_need_a_setting(jsonl):
    """Of problems and examples; of pairs and rollouts, which have no such setting, few may be."""
    good = [{"prompt": f"{n}+1?", "completion": "4"} for n in range(39)]
    for load in (load_problems, load_examples):
        records, report = load(jsonl(*good, {"text": "x"}))
        assert len(records) == 39 and report.broken == 1
        assert "line 40: " in report.left_out and report.left_out.startswith("1 broken")
        many = jsonl(*good, *[{"text": "x"}] * 3)
        with pytest.raises(
            ValueError, match=r"line 40: .* 3 of 42 rows are broken; at most 5% may be"
        ):
            load(many)
        assert load(many, on_error="skip")[1].broken == 3
        with pytest.raises(ValueError, match="has no usable row: 3 rows, left out: 3 broken"):
            load(jsonl(*[{"text": "x"}] * 3), on_error="skip")
    for bad, passes in ((1, True), (3, False)):
        path = jsonl(*good, *[{"text": "x"}] * bad)
        report = LoadReport(path)
        rows = list(read_dump(path, report=report))
        assert len(rows) == 39 and report.broken == bad
        if passes:
            report.require_usable(rows)
            continue
        with pytest.raises(ValueError, match=r"line 40: .* remove them from the file"):
            report.require_usable(rows)


OPENS = "{{ '<|im_start|>assistant\n<think>\n' }}"
CLOSES = "{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}"
PLAIN = "{{ '<|im_start|>assistant\n' }}"


def template(begins: str) -> str:
    """A chat template whose prompts end so."""
    turns = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    )
    return turns + "{% endfor %}{% if add_generation_prompt %}" + begins + "{% endif %}"


@pytest.mark.parametrize(
    ("begins", "completion", "trained", "is_open"),
    [
        (OPENS, "<think>\nfour\n</think>\n\n4", "four\n</think>\n\n4", False),
        (OPENS, "\n<think>four</think>4", "four</think>4", False),
        (OPENS, "four</think>4", "four</think>4", False),
        (OPENS, "\\boxed{4}", "\\boxed{4}", True),
        (OPENS, "<think>four", "four", True),
        (CLOSES, "<think>\n\n</think>\n\n4", "4", False),
        (CLOSES, "4", "4", False),
        (PLAIN, "<think>\nfour\n</think>\n\n4", "<think>\nfour\n</think>\n\n4", False),
        (PLAIN, "<think>\nfour", "<think>\nfour", True),
    ],
)
def test_a_thought_that_the_prompt_begins_is_begun_once(make, begins, completion, trained, is_open):
    tokenizer = PromptTokenizer(make(template(begins)))
    prompt, ids = tokenizer.encode_example(Example("a", "2+2?", completion))
    assert tokenizer.decode(ids) == trained
    assert tokenizer.decode_raw(prompt).endswith(begins[4:-4])
    assert tokenizer.leaves_open("2+2?", completion) == is_open


def test_a_second_thought_is_refused(make):
    tokenizer = PromptTokenizer(make(template(CLOSES)))
    for completion in ("<think>four</think>4", "<think>four"):
        with pytest.raises(ValueError, match="the prompt ends with a closed thought"):
            tokenizer.encode_completion(completion, "2+2?")
