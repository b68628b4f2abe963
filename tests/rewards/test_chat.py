"""The client of a chat endpoint: retries, failures that are and are not fatal, concurrency, and the
journal."""

from __future__ import annotations

import base64
import gzip
import http.client
import json
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from judge_server import answering, completion, serving

from g2d_jax.config import Judge
from g2d_jax.rewards.chat import Chat, Reply, _wanted_pause, check_endpoint, parse_completion

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
    assert counts == {
        "sent": 2,
        "journal": 1,
        "cut": 0,
        "prompt_tokens": 14,
        "completion_tokens": 6,
    }
    assert judge.headers["authorization"] == f"Bearer {KEY}"
    (body,) = [body for body in judge.asked if body["messages"][0]["content"] == "a"]
    expected = {
        "model": "m",
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 9,
        "temperature": 0.0,
    }
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
        # failures: again
        assert [r.text for r in ask(judge.url, tmp_path, "good", "bad")[0]] == [
            "good",
            "better",
        ]


def test_a_slow_answer_is_a_timeout(tmp_path: Path) -> None:
    with serving(lambda content, number: time.sleep(1.0 * (content == "slow")) or "done") as judge:
        replies, _ = ask(judge.url, tmp_path, "quick", "slow", concurrency=1, timeout=0.4)
    assert [(r.text, r.failure, r.detail) for r in replies] == [
        ("done", "", ""),
        ("", "timeout", "no answer in 0.4 s"),
    ]


def test_as_many_requests_as_asked_for_are_under_way(tmp_path: Path) -> None:
    with serving(echo, seconds=0.1) as judge:
        replies, _ = ask(judge.url, tmp_path, *map(str, range(12)), concurrency=4)
    assert [reply.text for reply in replies] == [f"re: {i}" for i in range(12)]
    assert judge.busiest == 4


def test_a_server_that_is_down_stops_the_batch_early(tmp_path: Path) -> None:
    with serving(echo) as judge:
        pass
    with pytest.raises(
        ConnectionError, match=r"does not answer.*Check that the server runs, the url"
    ):
        ask(judge.url, tmp_path, "a")
    with serving(lambda content, number: (500, "{}")) as judge:
        with pytest.raises(
            ConnectionError, match="8 requests in a row failed, the last one with: status 500"
        ):
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
def test_a_wrong_key_or_model_stops_at_once_and_the_key_is_told_to_nobody(
    tmp_path: Path, status: int
) -> None:
    error = f'{{"error": {{"message": "no access with Bearer {KEY}\\u001b[2J"}}}}'
    with (
        serving(lambda content, number: "yes" if number == 1 else (status, error)) as judge,
        pytest.raises(ValueError, match=r"the key in OPENAI_API_KEY") as caught,
    ):
        ask(judge.url, tmp_path, *map(str, range(9)), concurrency=1)
    assert (
        f"status {status}" in str(caught.value)
        and "***" in str(caught.value)
        and KEY not in str(caught.value)
    )
    assert "\x1b" not in str(caught.value)
    written = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert b"***" in written and KEY.encode() not in written
    with (
        serving(
            lambda content, number: (400, '{"error": {"message": "max_tokens is not supported"}}')
        ) as judge,
        pytest.raises(ValueError, match=r"answers no request.*max_tokens is not supported"),
    ):
        ask(judge.url, tmp_path / "new", "a", "b")


def test_a_key_is_needed_away_from_this_machine_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
          ("", "localhost:8000/v1", "ftp://a/v1", "http://", "http://a/v1/chat/completions", "http://[a",
           "http://a:99999/v1", "http://a:0/v1", "http://a:port/v1", "http://a..b/v1", f"http://{'a' * 64}/v1",
           "http://a b/v1", "http://a\x7f/v1", "http://a/v1\n", "http://\u00e4/v1", "http://a/\u00e4")),
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
    assert parse_completion(completion(None).encode())[0] == Reply("", "stop")
    cut, usage = parse_completion(completion("[[5", "length").encode())
    assert not cut.complete and usage == {"prompt_tokens": 7, "completion_tokens": 3}

    hostile = json.dumps(
        {"choices": [{"message": {"content": "a"}, "finish_reason": "f" * 9999}]}
    ).encode()
    assert len(parse_completion(hostile)[0].finish) <= 100


@pytest.mark.parametrize("count", [10**4000, -5, 1.5, True, "7", None])
def test_a_count_of_tokens_that_cannot_be_one_is_left_out(count: Any) -> None:
    told = json.loads(completion("yes")) | {
        "usage": {"prompt_tokens": count, "completion_tokens": 3}
    }
    assert parse_completion(json.dumps(told).encode()) == (
        Reply("yes", "stop"),
        {"completion_tokens": 3},
    )


# Hostile servers


OK = b"HTTP/1.1 200 OK\r\n"
WHOLE = completion("yes").encode()


def fails(url: str, journal: Path, **settings: Any) -> Reply:
    """The failure of one request among others that the server answered before."""
    with closing(
        Chat(Judge(**{"url": url, "model": "m", "retries": 0, "timeout": 5.0, **settings}), journal)
    ) as chat:
        chat._replies["answered before"] = Reply("yes", "stop")
        (reply,) = chat.ask([[{"role": "user", "content": "a"}]])
    assert reply.text == "" and not reply.complete
    return reply


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed_and_stops_at_once(tmp_path: Path, status: int) -> None:
    with (
        serving(echo) as other,
        answering(
            b"HTTP/1.1 %d See\r\nLocation: %s/chat/completions\r\n\r\n"
            % (status, other.url.encode())
        ) as url,
        pytest.raises(
            ValueError,
            match=rf"status {status}: redirects are not followed, give the url of the server",
        ),
    ):
        ask(url, tmp_path, "a secret prompt", retries=3)
    assert other.asked == []


@pytest.mark.parametrize(
    ("pieces", "pause"),
    [
        ([OK + b"Content-Length: 9999\r\n\r\n", *[b" "] * 999], 0.05),
        ([OK + b"Transfer-Encoding: chunked\r\n\r\n", *[b"1\r\n \r\n"] * 999], 0.05),
        ([OK, *[b"a: b\r\n"] * 90], 0.05),
        ([b"HTTP/1.1 100 Continue\r\n\r\n"] * 99_999, 0.001),
        ([OK + b"Content-Length: 9999\r\n\r\n", b" "], 30.0),
    ],
)
def test_an_answer_that_drips_ends_at_the_deadline(
    tmp_path: Path, pieces: list[bytes], pause: float
) -> None:
    began = time.monotonic()
    with answering(*pieces, pause=pause) as url:
        reply = fails(url, tmp_path, timeout=0.4)
    assert (reply.failure, reply.detail) == (
        "timeout",
        "no answer in 0.4 s",
    ) and time.monotonic() - began < 3


def test_a_handshake_that_drips_ends_at_the_deadline(tmp_path: Path) -> None:
    began = time.monotonic()
    record = b"\x16\x03\x03\x3f\xff\x02\x00\x3f\xfb"  # a ServerHello of 16 KB
    with answering(record, *[b"\x00"] * 999, pause=0.05, reads=False) as url:
        reply = fails(url.replace("http:", "https:"), tmp_path, timeout=0.4)
    assert reply.failure == "timeout" and time.monotonic() - began < 3


BOMB = gzip.compress(bytes(50 << 20))
MOST = 2048 * (10 + 1000)


@pytest.mark.parametrize(
    ("answer", "failure", "detail"),
    [
        (
            OK + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(BOMB) + BOMB,
            "malformed",
            "no chat",
        ),
        (OK + b"\r\n" + b" " * (MOST + 1), "malformed", f"the answer has more than {MOST:,} bytes"),
        (
            OK + b"Content-Length: 99999999999\r\n\r\n" + b" " * (MOST + 1),
            "malformed",
            "the answer has more than",
        ),
        (
            OK + b"Content-Length: %d\r\n\r\n" % (len(WHOLE) + 1) + WHOLE,
            "unreachable",
            "IncompleteRead",
        ),
        (
            OK + b"Content-Length: %d\r\n\r\n" % (len(WHOLE) - 1) + WHOLE,
            "malformed",
            "no chat completion",
        ),
        (
            OK + b"Transfer-Encoding: chunked\r\n\r\nffffffff\r\n" + WHOLE,
            "unreachable",
            "IncompleteRead",
        ),
        (OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + WHOLE, "unreachable", "IncompleteRead"),
        (
            OK + b"a: b\r\n" * 200 + b"\r\n" + WHOLE,
            "unreachable",
            "HTTPException: got more than 100 headers",
        ),
        (OK + b"a: " + b"b" * 99_999 + b"\r\n\r\n" + WHOLE, "unreachable", "LineTooLong"),
        (b"\x1b[2J" * 99, "unreachable", "BadStatusLine"),
        (b"", "unreachable", "RemoteDisconnected"),
    ],
)
def test_an_answer_that_lies_about_itself_is_a_failure(
    tmp_path: Path, answer: bytes, failure: str, detail: str
) -> None:
    with answering(answer) as url:
        reply = fails(url, tmp_path, max_tokens=10)
    assert reply.failure == failure and detail in reply.detail and len(reply.detail) < 2000
    assert "\x1b" not in reply.detail


def test_memory_does_not_grow_with_what_a_server_sends(tmp_path: Path) -> None:
    tracemalloc.start()
    with answering(OK + b"\r\n", *[bytes(1 << 20)] * 64) as url:
        assert fails(url, tmp_path, max_tokens=10).failure == "malformed"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


def test_a_server_says_when_to_come_again_but_not_beyond_a_minute() -> None:
    def wanted(**headers: str) -> float | None:
        message = http.client.HTTPMessage()
        for name, value in headers.items():
            message[name.replace("_", "-")] = value
        return _wanted_pause(message)

    assert wanted(Retry_After="3") == 3.0 and wanted(retry_after_ms="250", retry_after="9") == 0.25
    assert wanted(Retry_After="99999") == 60.0
    for nothing in ("", "nan", "-1", "inf", "1e999", "Fri, 31 Dec 1999 23:59:59 GMT"):
        assert wanted(retry_after=nothing) is None


def test_a_request_that_waits_for_its_next_attempt_ends_with_the_others(tmp_path: Path) -> None:
    def reply(content: str, number: int) -> tuple[int, str]:
        time.sleep(0.2 * (content == "wrong"))
        return (503, "{}") if content == "later" else (401, "{}")

    with serving(reply) as judge:
        judge.again = "60"
        with pytest.raises(ValueError, match="answers no request"):
            ask(judge.url, tmp_path, "later", "wrong", retries=3, concurrency=2)
    for thread in threading.enumerate():
        if thread.name == "g2d-daemon":
            thread.join(5)
            assert not thread.is_alive()


def test_the_end_of_a_program_waits_for_no_request(tmp_path: Path) -> None:
    def reply(content: str, number: int) -> tuple[int, str]:
        if content == "slow":
            over.wait(30)
        return 401, "{}"

    code = """
import sys
from g2d_jax.config import Judge
from g2d_jax.rewards.chat import Chat
chat = Chat(Judge(url=sys.argv[1], model="m", api_key_env="", timeout=60.0, concurrency=2), sys.argv[2])
chat.ask([[{"role": "user", "content": content}] for content in ("slow", "fast")])
"""
    over = threading.Event()
    with serving(reply) as judge:
        try:
            command = [sys.executable, "-c", code, judge.url, str(tmp_path)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=25)
        finally:
            over.set()
    assert done.returncode == 1 and "answers no request" in done.stderr


# The way there


def test_https_goes_through_the_proxy_and_says_no_more_there_than_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with answering(b"HTTP/1.1 403 no\r\n\r\n") as proxy:
        monkeypatch.setenv(
            "HTTPS_PROXY", proxy.removesuffix("/v1").replace("http://", "http://me:pass%40word@")
        )
        reply = fails("https://judge.example/v1", tmp_path)
    login = base64.b64encode(b"me:pass@word")
    assert reply.failure == "unreachable" and "Tunnel connection failed: 403" in reply.detail
    assert proxy.asked.startswith(b"CONNECT judge.example:443 HTTP/1.") and login in proxy.asked
    assert KEY.encode() not in proxy.asked


@pytest.fixture
def certified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """The server's side of TLS, of a name that this process trusts: judge.example."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    command += [
        "-keyout",
        str(key),
        "-out",
        str(certificate),
        "-days",
        "2",
        "-subj",
        "/CN=judge.example",
    ]
    subprocess.run(
        [*command, "-addext", "subjectAltName=DNS:judge.example"], check=True, capture_output=True
    )
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


@contextmanager
def tunnel(context: ssl.SSLContext, asked: list[bytes]) -> Iterator[str]:
    """A proxy that is the server behind it, too: what it was told before and after TLS began."""

    def serve() -> None:
        with suppress(OSError):
            connection, _ = listening.accept()
            asked.append(connection.recv(1 << 16))
            connection.sendall(b"HTTP/1.1 200 here you are\r\n\r\n")
            with context.wrap_socket(connection, server_side=True) as secure:
                asked.append(secure.recv(1 << 16))
                secure.sendall(OK + b"Content-Length: %d\r\n\r\n" % len(WHOLE) + WHOLE)
                secure.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    thread.join(10)


def test_https_is_spoken_with_the_server_behind_the_proxy_if_it_is_the_one_it_says(
    tmp_path: Path, certified: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes] = []
    with tunnel(certified, asked) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy)
        replies, _ = ask("https://judge.example/v1", tmp_path / "journal", "a")
    assert [reply.text for reply in replies] == ["yes"]
    assert asked[0].startswith(b"CONNECT judge.example:443 ") and KEY.encode() not in asked[0]
    assert (
        asked[1].startswith(b"POST /v1/chat/completions ")
        and b"\r\nHost: judge.example\r\n" in asked[1]
    )
    asked.clear()
    with tunnel(certified, asked) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy)
        reply = fails("https://another.example/v1", tmp_path / "other")
    assert reply.failure == "unreachable" and "CERTIFICATE_VERIFY_FAILED" in reply.detail
    assert len(asked) == 1


@pytest.mark.parametrize(
    "proxy",
    [
        "socks5://me:secret@127.0.0.1:1",
        "http://a:99999",
        "http://a:b",
        "http://user:secret#1@a:1",
        "http://a..b:1",
        "http://:1",
    ],
)
def test_a_proxy_that_cannot_be_used_is_refused_before_anything_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    monkeypatch.setenv("https_proxy", proxy)
    with pytest.raises(ValueError, match="HTTPS_PROXY names no proxy") as caught:
        Chat(Judge(url="https://judge.test/v1", model="m", api_key_env=""), tmp_path)
    assert "secret" not in str(caught.value)
    Chat(
        Judge(url="http://judge.test/v1", model="m", api_key_env=""), tmp_path
    ).close()  # which needs none


@pytest.mark.parametrize(
    "key", [f"{KEY}\n", f" {KEY}", f"{KEY}\r\nX-Other: 1", "sk-\u00fc", "sk-\x7f"]
)
def test_a_key_that_no_header_can_hold_is_refused_and_not_told(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(
        ValueError, match="the key in the environment variable OPENAI_API_KEY holds a space"
    ) as caught:
        check_endpoint(Judge(url="http://localhost/v1", model="m"))
    assert KEY not in str(caught.value)
