"""Stop strings through the stages: what is graded, stored, preferred and asked of a server."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_server import Server, choice, serving
from etils import epath
from ml_collections import ConfigDict
from toys import save_rows
from worlds import only, run

from g2d_jax.config import Dump, Engine
from g2d_jax.data.template import TemplateSettings
from g2d_jax.data.tokenizer import PromptTokenizer, load_tokenizer
from g2d_jax.records import Request, Rollout, SamplingParams
from g2d_jax.rollouts import external as external_rollouts
from g2d_jax.runtime.tables import read_preferences, read_rollouts
from g2d_jax.sampler.connection import EngineError
from g2d_jax.sampler.remote import Remote, Served

STOP = ("7", "11", "=2")


def test_what_a_stop_string_ends_is_whole_and_its_text_ends_before_it(
    config: ConfigDict, tmp_path: Path, opened: Any
):
    seen: list[str] = []

    def reward(completions: list[str], **columns: Any) -> list[float]:
        seen.extend(completions)
        return [float(len(text) % 2 == 0) for text in completions]

    config = only(config, "collect")
    config.stages.collect.sampling.stop = (*STOP, "5", ";-")
    session = opened(config, tmp_path, reward)
    run(session)
    rows = [
        row
        for part in (tmp_path / "01-collect/rollouts").glob("*.parquet")
        for row in read_rollouts(part)
    ]
    stops, by_text = (*STOP, "5", ";-"), 0
    for row in rows:
        ids, whole = row.rollout.token_ids, session.tokenizer.decode(row.rollout.token_ids)
        assert not any(stop in session.tokenizer.decode(ids[:-1]) for stop in stops)
        ended = any(stop in whole for stop in stops)
        by_text += ended
        assert ended == (row.text != whole)
        assert not ended or (whole.startswith(row.text) and row.rollout.stop_reason == "stop")
        assert not any(stop in row.text for stop in stops)
    assert len(rows) == 32 and 8 <= by_text < 32
    assert sorted(seen) == sorted(row.text for row in rows)
    by_ids = {row.rollout.token_ids.tobytes(): row for row in rows}
    pairs = read_preferences(tmp_path / "01-collect/preferences")
    for pair in pairs:
        chosen = by_ids[pair.chosen_ids.tobytes()]
        assert pair.chosen == chosen.text and pair.chosen_truncated == (
            chosen.rollout.stop_reason == "length"
        )
    assert any(not pair.chosen_truncated for pair in pairs)
    # The rollouts are read elsewhere as what they are.
    config = only(config, "collect")
    config.stages.collect.dump.path = str(tmp_path / "01-collect/rollouts")
    read = external_rollouts.read(
        opened(config, tmp_path / "again"), Dump(path=config.stages.collect.dump.path)
    )
    texts = [row.text for row in itertools.chain(*read)]
    assert sorted(texts) == sorted(row.text for row in rows)


# completions of the ids of "3+4=7;" -> how many are reported, None where they are refused
TEXTS = [
    (["3+4=7;", "3+4=7;"], 0),
    (["3+4=7;", "3+4"], 0),  # without the stop string that ended it
    (["", ""], 0),
    (["", "8"], None),  # another tokenizer's: the empty one does not show it
    (["8", "3+"], 1),
]


@pytest.mark.parametrize(("texts", "reported"), TEXTS)
def test_texts_that_are_not_those_of_their_ids_are_reported(
    config: ConfigDict,
    tmp_path: Path,
    opened: Any,
    capsys: Any,
    texts: list[str],
    reported: int | None,
):
    session = opened(only(config, "collect"), tmp_path)
    ids = session.tokenizer.encode_text("3+4=7;")
    rows = [
        {"prompt": "3+4=?", "answer": "7", "completion": text, "completion_ids": ids}
        for text in texts
    ]
    save_rows(tmp_path / "rows.jsonl", rows)
    if reported is None:
        with pytest.raises(ValueError, match="no completion is the text of its completion_ids"):
            external_rollouts.read(session, Dump(path=str(tmp_path / "rows.jsonl")))
        return
    (read,) = external_rollouts.read(session, Dump(path=str(tmp_path / "rows.jsonl")))
    logged = " ".join(capsys.readouterr().out.split())
    assert ("1 responses have a completion that is not the beginning" in logged) == bool(reported)
    assert [row.text for row in read] == texts


@pytest.fixture(scope="module")
def tokenizer() -> PromptTokenizer:
    return load_tokenizer("procedural:slips", TemplateSettings())


def drawn(
    server: Server, tokenizer: PromptTokenizer, folder: Path, said: list[str] | None = None
) -> Rollout:
    """A sample of at most eight tokens from a server, ended by STOP too."""
    settings = replace(Engine(), kind="server", url=server.url, timeout=10.0, retries=0)
    named: dict[str, Any] = {"seed": 7, "dtype": "float32"}
    say = (said if said is not None else []).append
    remote = Remote(settings, epath.Path(folder), tokenizer, tokenizer.vocab_size, say=say, **named)
    params = SamplingParams(8, stop_ids=(tokenizer.stop_id,), stop=STOP)
    (rollout,) = remote.generate(
        Served("served"), [Request("problem", np.array([3], np.int32), params)], "purpose"
    )
    return rollout


# what a server drew, its finish_reason and stop_reason ─► the response, and why it ended
ANSWERS = [
    ("3+4=7", "stop", "7", "3+4=7", "stop"),
    # several at a time, or a server that knows no stop strings
    (
        "3+4=71+2",
        "length",
        None,
        "3+4=7",
        "stop",
    ),
    ("3+4=1-1+", "length", None, "3+4=1-1+", "length"),
    ("3+4=1", "stop", "1 at the prompt's end", None, None),
    ("3+4=1", "stop", "=2", "3+4=1", "stop"),  # it reads the text otherwise, and has ended
]


@pytest.mark.parametrize(("text", "finish", "reason", "expected", "ended"), ANSWERS)
def test_a_server_ends_a_response_as_the_sampler_does(
    tokenizer: PromptTokenizer,
    tmp_path: Path,
    text: str,
    finish: str,
    reason: Any,
    expected: Any,
    ended: Any,
):
    ids = tokenizer.encode_text(text)
    scores = [-0.25 * (i + 1) for i in range(len(ids))]
    with serving(lambda body, number: choice(ids, scores, finish, stop_reason=reason)) as server:
        if expected is None:
            with pytest.raises(EngineError, match="and completes no stop string"):
                drawn(server, tokenizer, tmp_path)
            return
        rollout = drawn(server, tokenizer, tmp_path)
        (body,) = server.completions()
    assert body["stop"] == list(STOP) and body["include_stop_str_in_output"] is True
    assert (
        rollout.token_ids.tolist() == tokenizer.encode_text(expected)
        and rollout.stop_reason == ended
    )
    assert rollout.logprobs.tolist() == scores[: len(rollout.token_ids)]


@pytest.mark.parametrize(
    ("text", "more", "expected", "by_eos"),
    [
        ("3+4=7", {"stop_reason": "7"}, "3+4=7", False),  # as vLLM writes it
        ("3+4=", {"stop_reason": "7"}, "3+4=7", False),  # a server that cuts it off and says which
        ("3+4=", {}, "3+4=", True),  # nothing says that it was a string
    ],
)
def test_a_text_without_ids_has_its_stop_string(
    tokenizer: PromptTokenizer,
    tmp_path: Path,
    text: str,
    more: dict[str, str],
    expected: str,
    by_eos: bool,
):
    answer = {"choices": [{"text": text, "finish_reason": "stop", **more}]}
    with serving(lambda body, number: answer) as server:
        rollout = drawn(server, tokenizer, tmp_path)
    end = [tokenizer.stop_id] if by_eos else []
    assert (
        rollout.token_ids.tolist() == [*tokenizer.encode_text(expected), *end]
        and rollout.stop_reason == "stop"
    )


def test_without_stop_strings_a_server_is_asked_as_before(
    tokenizer: PromptTokenizer, tmp_path: Path
):
    settings = replace(Engine(), kind="server", timeout=10.0, retries=0)
    with serving(lambda body, number: choice([tokenizer.stop_id])) as server:
        settings = replace(settings, url=server.url)
        named: dict[str, Any] = {
            "seed": 7,
            "dtype": "float32",
            "say": print,
        }
        remote = Remote(settings, epath.Path(tmp_path), tokenizer, tokenizer.vocab_size, **named)
        params = SamplingParams(8, stop_ids=(tokenizer.stop_id,))
        list(
            remote.generate(
                Served("served"), [Request("p", np.array([3], np.int32), params)], "purpose"
            )
        )
        (body,) = server.completions()
    assert not {"stop", "include_stop_str_in_output"} & body.keys()
