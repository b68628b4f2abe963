"""Preference sets of others train: from texts and messages to ids, and through an offline stage
alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_collections import ConfigDict
from toys import QWEN, make_tokenizer
from worlds import only, run

from g2d_jax.commands import dryrun
from g2d_jax.data.tokenizer import PromptTokenizer
from g2d_jax.records import Preference
from g2d_jax.rollouts import external_preferences
from g2d_jax.runtime.tables import write_preferences
from g2d_jax.stages import offline, run_issues

CHAT = PromptTokenizer(make_tokenizer(QWEN))


@pytest.fixture
def small(config: ConfigDict) -> ConfigDict:
    """The dpo stage alone, from random parameters."""
    only(config, "dpo")
    config.data.max_prompt_length = 64
    return config


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def says(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def pairs(count: int) -> list[dict[str, Any]]:
    return [
        {"chosen": turns(f"Add {n}.", "Yes."), "rejected": turns(f"Add {n}.", "No way.")}
        for n in range(count)
    ]


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def with_chat(config: ConfigDict, tmp_path: Path) -> ConfigDict:
    """The config with a tokenizer that has a chat template."""
    make_tokenizer(QWEN).save_pretrained(tmp_path / "tokenizer")
    config.tokenizer.path = str(tmp_path / "tokenizer")
    return config


def read(config: ConfigDict, tmp_path: Path, opened: Any, rows: list[Any]) -> list[Any]:
    """The set's pairs, with a tokenizer that has a chat template."""
    config.stages.dpo.preferences = written(tmp_path / "set.jsonl", rows)
    session = opened(with_chat(config, tmp_path), tmp_path / "work")
    return offline.read(session, session.config.stages["dpo"])


def test_texts_and_messages_are_rendered_by_the_runs_own_template(small, tmp_path, opened):
    """As for sampling; a response ends with the stop token, and only once."""
    system = {"role": "system", "content": "Be brief."}
    rows = [
        {"prompt": "Add 1.", "chosen": "Yes.", "rejected": "No.<|eot|>"},
        {"prompt": [system, *turns("Add 1.")], "chosen": says("Yes."), "rejected": says("No.")},
        {
            "chosen": turns("Hi", "Hello", "Add 1.", "Yes."),
            "rejected": turns("Hi", "Hello", "Add 1.", "No."),
        },
    ]
    found = read(small, tmp_path, opened, rows)
    tokenizer, begin = CHAT, "<|start|>system\nBe brief.<|eot|>\n"
    several = "<|start|>user\nHi<|eot|>\n<|start|>assistant\nHello<|eot|>\n"
    for pair, before in zip(found, ("", begin, several), strict=True):
        prompt = f"{before}<|start|>user\nAdd 1.<|eot|>\n<|start|>assistant\n"
        assert tokenizer.decode_raw(pair.prompt_ids) == prompt
        assert tokenizer.decode_raw(pair.chosen_ids) == "Yes.<|eot|>"
        assert tokenizer.decode_raw(pair.rejected_ids) == "No.<|eot|>"
        np.testing.assert_array_equal(pair.prompt_ids, tokenizer.encode_prompt(pair.prompt))


def test_what_cannot_be_trained_on_is_left_out_and_counted(small, tmp_path, opened, capsys):
    small.stages.dpo.max_length = 80
    rows = [
        *pairs(3),
        {"prompt": "Add 1.", "chosen": "Yes.", "rejected": "Yes."},
        {"prompt": "Add 1.", "chosen": "Yes.", "rejected": ""},
        {"prompt": "Add 1. " * 40, "chosen": "Yes.", "rejected": "No."},
        {"prompt": "Add 1.", "chosen": "Yes. " * 60, "rejected": "No."},
        {"prompt": "Add 1.", "chosen": "<|start|>", "rejected": "No."},
        {"prompt": "Add <|start|>.", "chosen": "Yes.", "rejected": "No."},
    ]
    assert len(read(small, tmp_path, opened, rows)) == 3
    said = capsys.readouterr().out
    for reason in (
        "3 pairs: rows of ",
        "set.jsonl left out: 1 with two equal responses (the first: ",
        "set.jsonl, line 4), 1 with an empty response",
        "1 with a prompt longer than data.max_prompt_length, 64 tokens",
        "1 longer than max_length or the model's positions, 80 tokens",
        "2 that cannot be tokenised (the first: ",
        "set.jsonl, line 8: the special token '<|start|>' is in the text itself",
    ):
        assert reason in " ".join(said.split()), reason
    with pytest.raises(
        ValueError,
        match=r"set\.jsonl has no usable row: 1 rows, left out: 1 with two equal resp",
    ):
        read(small, tmp_path, opened, rows[3:4])
    with pytest.raises(ValueError, match=r"set\.jsonl, line 2: no column 'chosen'"):
        read(small, tmp_path, opened, [*rows[:1], {"prompt": "x"}])
    small.stages.dpo.on_error = "skip"
    broken = [{"prompt": "x"}, {"chosen": 1, "rejected": "No."}, {**rows[0], "tools": [{"a": 1}]}]
    assert len(read(small, tmp_path, opened, [*rows[:1], *broken])) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "set.jsonl left out: 3 broken (the first: " in said
    with pytest.raises(ValueError, match=r"set\.jsonl has no usable row: 3 rows"):
        read(small, tmp_path, opened, broken)


def test_pairs_of_held_out_problems_are_refused_in_every_form(small, tmp_path, opened):
    asked = opened(small, tmp_path / "work").problems.by_split["test"][2].prompt
    reply = {"chosen": "1", "rejected": "2"}
    for row in (
        {"prompt": asked, **reply},
        {
            "prompt": [{"role": "system", "content": "Be brief."}, *turns(asked)],
            "chosen": says("1"),
            "rejected": says("2"),
        },
        {"chosen": turns("Hi", "Hello", asked, "1"), "rejected": turns("Hi", "Hello", asked, "2")},
    ):
        with pytest.raises(
            ValueError,
            match=r"1 of 3 pairs are for problems of data\.dev or data\.test: leave them out",
        ):
            read(small, tmp_path, opened, [*pairs(2), row])
    small.tokenizer.prompt_template = "Solve this: {problem}"
    row = {
        "prompt": turns(f"Solve this: {asked}"),
        "chosen": turns("", "1")[1:],
        "rejected": turns("", "2")[1:],
    }
    with pytest.raises(ValueError, match=r"1 of 1 pairs are for problems of data\.dev"):
        read(small, tmp_path, opened, [row])


def test_pairs_with_all_columns_of_a_collect_stage_train_on_their_ids(small, tmp_path, opened):
    ids = {"prompt_ids": [5, 6], "chosen_ids": [7, 8, 9], "rejected_ids": [3]}
    arrays = [np.array(values, np.int32) for values in ids.values()]
    pair = Preference("a" * 16, "Add 1.", "Yes.", "No.", *arrays, 1.0, 0.0)
    write_preferences(tmp_path / "pairs.parquet", [pair, pair])
    small.stages.dpo.preferences = str(tmp_path / "pairs.parquet")
    session = opened(small, tmp_path / "work")
    found = offline.read(session, session.config.stages["dpo"])
    assert len(found) == 2
    assert {name: getattr(found[0], name).tolist() for name in ids} == ids
    small.stages.dpo.max_length = 4
    session = opened(small, tmp_path / "work")
    with pytest.raises(
        ValueError, match=r"no usable row: 2 rows, left out: 2 longer than max_length .*, 4 tok"
    ):
        offline.read(session, session.config.stages["dpo"])


def test_a_hub_set(small, tmp_path, opened):
    (tmp_path / "set").mkdir()
    written(tmp_path / "set" / "train.jsonl", pairs(5))
    small.stages.dpo.preferences = f"hub:{tmp_path / 'set'}"
    session = opened(with_chat(small, tmp_path), tmp_path / "work")
    found = external_preferences.read(session, session.config.stages["dpo"])
    assert len(found) == 5 and session.tokenizer.decode(found[0].chosen_ids) == "Yes."
    run_issues.checked(small)


def test_an_offline_stage_alone_trains_on_a_set(small, tmp_path, opened, capsys):
    """From the dry run, which shows a pair, to a policy that prefers what was chosen."""
    with_chat(small, tmp_path)
    small.stages.dpo.update(
        preferences=written(tmp_path / "set.jsonl", pairs(16)),
        batch_size=4,
        epochs=2,
    )
    dryrun.show(small)
    shown = capsys.readouterr().out
    assert (
        "stages.dpo.preferences allows 8 updates of 4 pairs (16 in all), too few to change a policy much"
        in shown
    )
    assert (
        "dpo: 16 pairs of " in shown
        and "| <|start|>user\n  | Add 0.<|eot|>\n  | <|start|>assistant" in shown
    )
    assert (
        "chosen, " in shown
        and "  | Yes.<|eot|>\n  rejected, " in shown
        and "  | No way.<|eot|>" in shown
    )
    manifest = run(opened(small, tmp_path / "work"))
    assert manifest.counts["pairs"] == 16 and manifest.counts["steps"] == 8
    assert manifest.measures["margins"]["margin_mean"] > 0


def test_a_path_that_is_nothing_is_refused_before_any_work(small):
    for path in ("nowhere.jsonl", "no/folder"):
        small.stages.dpo.preferences = path
        with pytest.raises(
            ValueError,
            match=rf"stages.dpo.preferences cannot be used: .*{path}",
        ):
            run_issues.checked(small)
