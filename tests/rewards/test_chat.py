"""The client of a chat endpoint: retries, failures that are and are not fatal, concurrency, and the journal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from judge_server import completion, serving

from g2d_jax.config import Judge
from g2d_jax.rewards.chat import Chat, Reply, check_endpoint, parse_completion

KEY = "sk-very-secret-123"
Replies = Callable[[str, int], str | tuple[int, str]]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def ask(url: str, journal: Any, *texts: str, **settings: Any) -> tuple[list[Reply], dict[str, int]]:
    judge = Judge(**{"url": url, "model": "m", "retries": 0, "timeout": 5.0, **settings})
    with closing(Chat(judge, journal)) as chat:
        return chat.ask([[{"role": "user", "content": text}] for text in texts]), dict(chat.counts)


def echo(content: str, number: int) -> str:
    return f"re: {content}"


def test_replies_come_in_order_and_what_is_sent_is_what_the_api_names(tmp_path: Path) -> None:
    with serving(echo) as judge:
        replies, counts = ask(judge.url, tmp_path, "b", "a", "b", max_tokens=9)
    assert replies == [Reply("re: b", "stop"), Reply("re: a", "stop"), Reply("re: b", "stop")]
    assert counts == {"sent": 2, "journal": 1, "cut": 0, "prompt_tokens": 14, "completion_tokens": 6}
    assert judge.headers["authorization"] == f"Bearer {KEY}"
    (body,) = [body for body in judge.asked if body["messages"][0]["content"] == "a"]
    expected = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 9, "temperature": 0.0}
    assert body == expected


def test_a_second_run_asks_nothing_even_at_another_url(tmp_path: Path) -> None:
    with serving(echo) as judge:
        first, _ = ask(judge.url, tmp_path, "a", "b")
    with serving(lambda content, number: "another") as other:
        again, counts = ask(other.url, tmp_path, "b", "a", concurrency=1)
        assert again == first[::-1] and other.asked == [] and counts["journal"] == 2
        changed, _ = ask(other.url, tmp_path, "a", max_tokens=5)
    assert changed[0].text == "another"  # another request


def test_the_journal_lies_on_an_object_store_too(bucket: Any) -> None:
    with serving(echo) as judge:
        for _ in range(2):
            assert ask(judge.url, bucket / "journal", "\ud800 a")[0][0].text == "re: \ufffd a"
    assert len(judge.asked) == 1


def test_errors_that_pass_are_tried_again(tmp_path: Path) -> None:
    with serving(lambda content, number: (503, "{}") if number < 3 else "at last") as judge:
        replies, counts = ask(judge.url, tmp_path, "a", retries=2)
    assert replies[0].text == "at last" and len(judge.asked) == 3
    assert counts["sent"] == 1 and "failed" not in counts


@pytest.mark.parametrize(
    ("bad", "failure"),
    [
        ((503, "{}"), "unavailable"),
        ((429, "{}"), "unavailable"),
        ((400, '{"error": {"message": "the prompt is too long"}}'), "refused"),
        ((200, "not json"), "malformed"),
        ((200, "[" * 100_000), "malformed"),
        ((200, '{"choices": []}'), "malformed"),
        ((200, '{"choices": [{"message": {"content": 3}}]}'), "malformed"),
        ((200, '{"choices": {"0": 1}}'), "malformed"),
    ],
)
def test_one_failure_among_replies_is_a_failure_of_that_request_only(
    tmp_path: Path, bad: tuple[int, str], failure: str
) -> None:
    with serving(lambda content, number: bad if content == "bad" else "good") as judge:
        replies, counts = ask(judge.url, tmp_path, "good", "bad", "fine", concurrency=1)
        assert [reply.text for reply in replies] == ["good", "", "good"]
        assert replies[1].failure == failure and not replies[1].complete
        assert counts["failed"] == counts[failure] == 1
        judge.reply = lambda content, number: "better"
        assert [r.text for r in ask(judge.url, tmp_path, "good", "bad")[0]] == ["good", "better"]  # failures: again


def test_a_slow_answer_is_a_timeout(tmp_path: Path) -> None:
    with serving(lambda content, number: time.sleep(1.0 * (content == "slow")) or "done") as judge:
        replies, _ = ask(judge.url, tmp_path, "quick", "slow", concurrency=1, timeout=0.4)
    assert [(r.text, r.failure, r.detail) for r in replies] == [("done", "", ""), ("", "timeout", "no answer in 0.4 s")]


def test_as_many_requests_as_asked_for_are_under_way(tmp_path: Path) -> None:
    with serving(echo, seconds=0.1) as judge:
        replies, _ = ask(judge.url, tmp_path, *map(str, range(12)), concurrency=4)
    assert [reply.text for reply in replies] == [f"re: {i}" for i in range(12)]
    assert judge.busiest == 4


def test_a_server_that_is_down_stops_the_batch_early(tmp_path: Path) -> None:
    with serving(echo) as judge:
        pass
    with pytest.raises(ConnectionError, match=r"does not answer.*Check that the server runs, the url"):
        ask(judge.url, tmp_path, "a")
    with serving(lambda content, number: (500, "{}")) as judge:
        with pytest.raises(ConnectionError, match="8 requests in a row failed, the last one with: status 500"):
            ask(judge.url, tmp_path, *map(str, range(100)), concurrency=2)
        assert len(judge.asked) < 20


def test_a_server_that_goes_down_later_stops_too_and_keeps_what_it_said(tmp_path: Path) -> None:
    with serving(lambda content, number: "yes" if number <= 5 else (502, "{}")) as judge:
        with pytest.raises(ConnectionError, match="the answers so far are kept"):
            ask(judge.url, tmp_path, *map(str, range(30)), concurrency=1)
        judge.reply = lambda content, number: "no"
        replies, counts = ask(judge.url, tmp_path, *map(str, range(30)), concurrency=1)
    assert [reply.text for reply in replies] == ["yes"] * 5 + ["no"] * 25 and counts["sent"] == 25


@pytest.mark.parametrize("status", [401, 404])
def test_a_wrong_key_or_model_stops_at_once_and_the_key_is_told_to_nobody(tmp_path: Path, status: int) -> None:
    error = f'{{"error": {{"message": "no access with Bearer {KEY}\\u001b[2J"}}}}'
    with (
        serving(lambda content, number: "yes" if number == 1 else (status, error)) as judge,
        pytest.raises(ValueError, match=r"the key in OPENAI_API_KEY") as caught,
    ):
        ask(judge.url, tmp_path, *map(str, range(9)), concurrency=1)
    assert f"status {status}" in str(caught.value) and "***" in str(caught.value) and KEY not in str(caught.value)
    assert "\x1b" not in str(caught.value)
    written = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert b"***" in written and KEY.encode() not in written
    with (
        serving(lambda content, number: (400, '{"error": {"message": "max_tokens is not supported"}}')) as judge,
        pytest.raises(ValueError, match=r"answers no request.*max_tokens is not supported"),
    ):
        ask(judge.url, tmp_path / "new", "a", "b")


def test_a_key_is_needed_away_from_this_machine_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    with serving(echo) as judge:
        assert ask(judge.url, tmp_path, "a")[0][0].text == "re: a"
    with pytest.raises(ValueError, match="set the environment variable OPENAI_API_KEY"):
        Chat(Judge(url="https://api.example.com/v1", model="m"), tmp_path)
    Chat(Judge(url="http://judge:8000/v1", model="m", api_key_env=""), tmp_path).close()
    with pytest.raises(ValueError, match="set the environment variable MINE"):
        check_endpoint(Judge(url="http://1.2.3.4", model="m", api_key_env="MINE"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        *(({"url": url}, "give the base, as in") for url in
          ("", "localhost:8000/v1", "ftp://a/v1", "http://", "http://a/v1/chat/completions", "http://[a")),
        *(({name: value}, name) for name, value in
          (("model", ""), ("timeout", 0.0), ("timeout", float("inf")), ("retries", -1), ("concurrency", 0))),
        ({"url": f"https://user:{KEY}@host/v1"}, "put the key in"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        check_endpoint(Judge(**{"url": "http://a/v1", "model": "m", **wrong}))
    assert KEY not in str(caught.value)


def test_a_reply_without_text_or_cut_short() -> None:
    assert parse_completion(completion(None))[0] == Reply("", "stop")
    cut, usage = parse_completion(completion("[[5", "length"))
    assert not cut.complete and usage == {"prompt_tokens": 7, "completion_tokens": 3}


def test_without_the_package_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[judge\]'"):
        Chat(Judge(url="http://localhost/v1", model="m"), tmp_path)
