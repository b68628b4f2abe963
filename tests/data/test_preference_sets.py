"""Preference sets of others: every form gives the same pair, and what is no pair is named or
counted."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from g2d_jax.data.fields import BrokenRow, LeftOut
from g2d_jax.data.preference_sets import pair_rows, to_pair

ASK, GOOD, BAD, TOLD = "What is 2+2?", "It is 4.", "It is 5.", "Answer briefly."


def turns(*texts: str, system: str = "") -> list[dict[str, str]]:
    """A conversation of these messages, the user's first."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return [{"role": "system", "content": system}, *messages] if system else messages


def says(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


FORMS = {
    "TRL, explicit text": {"prompt": ASK, "chosen": GOOD, "rejected": BAD},
    "TRL, explicit messages": {"prompt": turns(ASK), "chosen": says(GOOD), "rejected": says(BAD)},
    "TRL, implicit messages": {"chosen": turns(ASK, GOOD), "rejected": turns(ASK, BAD)},
    "UltraFeedback": {
        **{
            "prompt": ASK,
            "prompt_id": "a",
            "chosen": turns(ASK, GOOD),
            "rejected": turns(ASK, BAD),
        },
        **{"messages": turns(ASK, GOOD), "score_chosen": 9.0, "score_rejected": 2.0},
    },
    "prompt beside whole conversations": {
        **{"prompt": turns(ASK), "chosen": turns(ASK, GOOD), "rejected": turns(ASK, BAD)},
    },
    "Orca": {"system": "", "question": ASK, "chosen": GOOD, "rejected": BAD},
    "Argilla": {"instruction": ASK, "input": "", "chosen_response": GOOD, "rejected_response": BAD},
    "one message": {"prompt": ASK, "chosen": says(GOOD)[0], "rejected": says(BAD)[0]},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_pair(form: str) -> None:
    pair = to_pair(FORMS[form])
    assert pair.prompt in (ASK, tuple(turns(ASK)))
    assert (pair.chosen, pair.rejected, pair.ids) == (GOOD, BAD, None)


@pytest.mark.parametrize(
    "row",
    [
        {"system": TOLD, "question": ASK, "chosen": GOOD, "rejected": BAD},
        {"system_prompt": TOLD, "prompt": turns(ASK), "chosen": says(GOOD), "rejected": says(BAD)},
        {"chosen": turns(ASK, GOOD, system=TOLD), "rejected": turns(ASK, BAD, system=TOLD)},
        {"system": TOLD, "prompt": ASK, "chosen": turns(ASK, GOOD), "rejected": turns(ASK, BAD)},
        {
            "system": f"{TOLD}\n",
            "prompt": turns(ASK, system=TOLD),
            "chosen": says(GOOD),
            "rejected": says(BAD),
        },
    ],
)
def test_a_system_text_stands_before_the_prompt(row: dict[str, Any]) -> None:
    pair = to_pair(row)
    assert [message["role"] for message in pair.prompt] == ["system", "user"]
    assert (pair.prompt[0]["content"].strip(), pair.prompt[1]["content"], pair.chosen) == (
        TOLD,
        ASK,
        GOOD,
    )


def test_several_turns_and_texts_that_begin_alike() -> None:
    long = turns("Hi", "Hello!", ASK)
    pair = to_pair({"chosen": [*long, *says(GOOD)], "rejected": [*long, *says(BAD)]})
    assert (pair.prompt, pair.chosen) == (tuple(long), GOOD)
    # words stay whole
    text = to_pair({"chosen": "The sky is blue.", "rejected": "The sky is black."})
    assert (text.prompt, text.chosen, text.rejected) == ("The sky is", " blue.", " black.")
    alpaca = to_pair({"instruction": "Add them.", "input": "2, 2", "chosen": "4", "rejected": "5"})
    assert alpaca.prompt == "Add them.\n2, 2"


@pytest.mark.parametrize(
    ("prompt", "chosen", "rejected"),
    [
        (ASK, f"{ASK} {GOOD}", f"{ASK} {BAD}"),
        ("\n\nHuman: 2+2\n\nAssistant:", f"\n\nHuman: 2+2\n\nAssistant: {GOOD}", None),
    ],
)
def test_a_prompt_beside_whole_texts_is_cut_off_them(
    prompt: str, chosen: str, rejected: str | None
) -> None:
    pair = to_pair({"prompt": prompt, "chosen": chosen, "rejected": rejected or f"{prompt} {BAD}"})
    assert (pair.prompt, pair.chosen, pair.rejected) == (prompt, f" {GOOD}", f" {BAD}")


@pytest.mark.parametrize(
    ("prompt", "chosen", "rejected"),
    [("Hi", "Hi there", "Hi you"), ("Good morning", "Good morning!", "Good mornings")],
)
def test_a_response_that_repeats_a_greeting_is_whole(
    prompt: str, chosen: str, rejected: str
) -> None:
    pair = to_pair({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    assert (pair.chosen, pair.rejected) == (chosen, rejected)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": ASK, "chosen": "", "rejected": BAD}, "empty"),
        ({"prompt": ASK, "chosen": GOOD, "rejected": None}, "empty"),
        ({"prompt": ASK, "chosen": " \n", "rejected": BAD}, "empty"),
        ({"prompt": turns(ASK), "chosen": [], "rejected": says(BAD)}, "empty"),
        ({"chosen": turns(ASK, ""), "rejected": turns(ASK, BAD)}, "empty"),
        ({"chosen": "The sky is", "rejected": "The sky is blue."}, "empty"),
        ({"prompt": ASK, "chosen": f"{ASK} {GOOD}", "rejected": ASK}, "empty"),
        ({"prompt": ASK, "chosen": f"{ASK} {GOOD}", "rejected": BAD}, "prompt before one of"),
        ({"prompt": ASK, "chosen": GOOD, "rejected": GOOD}, "equal"),
        ({"prompt": ASK, "chosen": GOOD, "rejected": f"{GOOD}\n"}, "equal"),
        ({"chosen": turns(ASK, GOOD), "rejected": turns(ASK, GOOD)}, "equal"),
    ],
)
def test_empty_equal_and_half_whole_pairs_are_left_out(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(LeftOut, match=reason):
        to_pair(row)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": ASK, "chosen": GOOD},
            r"no field 'rejected' or .*has 'prompt', 'chosen'\. A preference set has prompt",
        ),
        ({"text": "x"}, "no field 'chosen'"),
        (
            {"prompt": ASK, "chosen": GOOD, "rejected": says(BAD)},
            "one of 'chosen' and 'rejected' is a text, the other",
        ),
        ({"chosen": "Yes.", "rejected": "No."}, "no beginning in common"),
        ({"chosen": says(GOOD), "rejected": says(BAD)}, "no message in common"),
        (
            {"chosen": turns(ASK, GOOD), "rejected": turns("What is 3+3?", BAD)},
            "no message in common",
        ),
        (
            {"chosen": turns(ASK, "a", "More", GOOD), "rejected": turns(ASK, "b", "More", BAD)},
            "share their prompt, and differ in the last message alone",
        ),
        (
            {"prompt": "Hi?", "chosen": turns(ASK, GOOD), "rejected": turns(ASK, BAD)},
            "do not begin with the row's own",
        ),
        (
            {"prompt": ASK, "chosen": 4, "rejected": 5},
            "'chosen' must be a list of messages, got int",
        ),
        (
            {"prompt": ASK, "chosen": [{"from": "gpt", "value": GOOD}], "rejected": says(BAD)},
            "role must be one of",
        ),
        ({"prompt": 7, "chosen": GOOD, "rejected": BAD}, "'prompt' must be a text"),
        (
            {
                "system": "Other.",
                "prompt": turns(ASK, system=TOLD),
                "chosen": says(GOOD),
                "rejected": says(BAD),
            },
            "not the system message",
        ),
        (
            {
                "prompt": ASK,
                "chosen": GOOD,
                "rejected": BAD,
                "prompt_ids": [1],
                "chosen_ids": ["x"],
                "rejected_ids": [1],
            },
            "'chosen_ids' must be a list of whole numbers",
        ),
    ],
)
def test_rows_of_no_form_are_broken(row: dict[str, Any], message: str) -> None:
    with pytest.raises(BrokenRow, match=message):
        to_pair(row)


def test_files_of_every_kind_hold_the_same_rows(tmp_path: Path) -> None:
    rows = [
        FORMS["TRL, implicit messages"],
        {"chosen": turns("Hi", "Hello"), "rejected": turns("Hi", "Go")},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "b.json").write_text(json.dumps(rows))
    (tmp_path / "set").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "set" / "train.parquet")
    for place in ("a.jsonl", "b.json", "set", "set/*.parquet"):
        pairs = [row.read(to_pair) for row in pair_rows(str(tmp_path / place))]
        assert [(pair.chosen, pair.rejected) for pair in pairs] == [(GOOD, BAD), ("Hello", "Go")], (
            place
        )
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(BrokenRow, match=r"a\.jsonl, line 1: no field 'chosen'"):
        next(pair_rows(str(tmp_path / "a.jsonl"))).read(to_pair)
