"""Preference sets from other tools: TRL's shapes give the same pair; other rows are named or
counted."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from g2d_jax.data.fields import BrokenRow, LeftOut
from g2d_jax.data.preference_sets import pair_rows, to_pair

ASK, GOOD, BAD = "What is 2+2?", "It is 4.", "It is 5."


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
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_pair(form: str) -> None:
    prompt, chosen, rejected = to_pair(FORMS[form])
    assert prompt in (ASK, tuple(turns(ASK)))
    assert (chosen, rejected) == (GOOD, BAD)


def test_a_system_message_stays_in_the_prompt() -> None:
    chosen, rejected = (turns(ASK, text, system="Be brief.") for text in (GOOD, BAD))
    prompt, *_ = to_pair({"chosen": chosen, "rejected": rejected})
    assert prompt == tuple(turns(ASK, system="Be brief."))


def test_several_turns_and_texts_that_begin_alike() -> None:
    long = turns("Hi", "Hello!", ASK)
    pair = to_pair({"chosen": [*long, *says(GOOD)], "rejected": [*long, *says(BAD)]})
    assert pair == (tuple(long), GOOD, BAD)
    # words stay whole
    text = to_pair({"chosen": "The sky is blue.", "rejected": "The sky is black."})
    assert text == ("The sky is", " blue.", " black.")
    text = to_pair(
        {"chosen": "Human: Hi\n\nAssistant: Yes", "rejected": "Human: Hi\n\nAssistant: No"}
    )
    assert text == ("Human: Hi\n\nAssistant:", " Yes", " No")


def test_texts_next_to_a_prompt_are_the_responses_as_they_are() -> None:
    """As TRL takes them, also where they begin with the prompt."""
    pair = to_pair({"prompt": "Hi", "chosen": "Hi there", "rejected": "Hi you"})
    assert pair == ("Hi", "Hi there", "Hi you")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": ASK, "chosen": "", "rejected": BAD}, "empty"),
        ({"prompt": ASK, "chosen": GOOD, "rejected": None}, "empty"),
        ({"prompt": ASK, "chosen": " \n", "rejected": BAD}, "empty"),
        ({"prompt": turns(ASK), "chosen": [], "rejected": says(BAD)}, "empty"),
        ({"chosen": turns(ASK, ""), "rejected": turns(ASK, BAD)}, "empty"),
        ({"chosen": "The sky is", "rejected": "The sky is blue."}, "empty"),
        ({"prompt": ASK, "chosen": GOOD, "rejected": GOOD}, "equal"),
        ({"prompt": ASK, "chosen": GOOD, "rejected": f"{GOOD}\n"}, "equal"),
        ({"chosen": turns(ASK, GOOD), "rejected": turns(ASK, GOOD)}, "equal"),
    ],
)
def test_empty_and_equal_pairs_are_left_out(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(LeftOut, match=reason):
        to_pair(row)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": ASK, "chosen": GOOD},
            r"no column 'rejected'; a preference set has prompt.* This row has 'prompt', 'chosen'",
        ),
        ({"text": "x"}, "no column 'chosen'"),
        (
            {"prompt": ASK, "chosen": GOOD, "rejected": says(BAD)},
            "one of 'chosen' and 'rejected' is a text, the other",
        ),
        ({"chosen": "Yes.", "rejected": "No."}, "do not begin with the same prompt"),
        ({"chosen": says(GOOD), "rejected": says(BAD)}, "do not begin with the same prompt"),
        (
            {"chosen": turns(ASK, GOOD), "rejected": turns("What is 3+3?", BAD)},
            "do not begin with the same prompt",
        ),
        (
            {"chosen": turns(ASK, "a", "More", GOOD), "rejected": turns(ASK, "b", "More", BAD)},
            "'chosen' must be one assistant message, got assistant, user, assistant",
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
            {"prompt": turns(ASK), "chosen": turns(ASK, GOOD), "rejected": turns(ASK, BAD)},
            "'chosen' must be one assistant message, got user, assistant",
        ),
        (
            {
                "prompt": ASK,
                "chosen": GOOD,
                "rejected": BAD,
                "prompt_ids": [1],
                "chosen_ids": [1],
                "rejected_ids": [1],
            },
            "it has token ids, which need a Parquet file with all columns of a collect stage",
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
        assert [pair[1:] for pair in pairs] == [(GOOD, BAD), ("Hello", "Go")], place
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(BrokenRow, match=r"a\.jsonl, line 1: no column 'chosen'"):
        next(pair_rows(str(tmp_path / "a.jsonl"))).read(to_pair)
