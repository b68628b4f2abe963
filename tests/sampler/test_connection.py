"""The client of a sampling server, against servers that lie, drip or redirect, and behind proxies."""

from __future__ import annotations

import base64
import gc
import gzip
import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
import tracemalloc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from g2d_jax.config import Engine
from g2d_jax.runtime import endpoint
from g2d_jax.sampler.connection import BYTES_A_TOKEN, Connection, EngineError

KEY = "sk-very-secret-123"
OK = b"HTTP/1.1 200 OK\r\n"
WHOLE = json.dumps({"data": [{"id": "served", "parent": None}]}).encode()
MOST = BYTES_A_TOKEN * 1000


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("VLLM_API_KEY", KEY)


@pytest.fixture
def collected() -> Iterator[None]:
    """Free the sockets that Python 3.11's http.client leaves open when a proxy or TLS refuses; the
    garbage collector would warn of them during another test."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def models(url: str, **settings: Any) -> dict[str, bool]:
    return Connection(Engine(**{"url": url, "retries": 0, "timeout": 5.0, **settings})).models()


def error(url: str, **settings: Any) -> str:
    with pytest.raises(EngineError) as caught:
        models(url, **settings)
    assert KEY not in str(caught.value) and "\x1b" not in str(caught.value)
    return str(caught.value)


class Raw(str):
    """The url of a server that answers with bytes as they are. asked: what each client sent
    first."""

    asked: list[bytes]


@contextmanager
def answering(*pieces: bytes, pause: float = 0.0, reads: bool = True) -> Iterator[Raw]:
    """A server that sends pieces of bytes to every client, and ends the connection.

    pause: seconds after each piece. reads: it waits for a request first.
    """
    ended = threading.Event()

    def serve() -> None:
        while not ended.is_set():
            with suppress(OSError):
                connection, _ = listening.accept()
                with connection:
                    connection.settimeout(5)
                    url.asked.append(connection.recv(1 << 16) if reads else b"")
                    for piece in pieces:
                        connection.sendall(piece)
                        if ended.wait(pause):
                            break
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(1 << 16):
                        pass  # until the client ends too: nothing is reset that it has not read

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.05)
        url = Raw(f"http://127.0.0.1:{listening.getsockname()[1]}/v1")
        url.asked = []
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield url
        finally:
            ended.set()
            thread.join()


def test_a_whole_answer_and_what_is_asked() -> None:
    with answering(OK + b"Content-Length: %d\r\n\r\n" % len(WHOLE) + WHOLE) as url:
        assert models(url) == {"served": False}
    (request,) = url.asked
    assert request.startswith(b"GET /v1/models HTTP/1.1\r\n")
    headers = dict(line.lower().split(b": ", 1) for line in request.split(b"\r\n")[1:-2])
    assert headers[b"authorization"] == f"bearer {KEY}".encode()
    assert headers[b"accept-encoding"] == b"identity"


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(status: int) -> None:
    with answering(OK + b"\r\n" + WHOLE) as other:
        place = b"HTTP/1.1 %d See\r\nLocation: %s/models\r\n\r\n" % (status, other.encode())
        with answering(place) as url:
            assert "redirects are not followed" in error(url, retries=3)
    assert other.asked == [] and len(url.asked) == 1


@pytest.mark.parametrize(
    ("pieces", "pause"),
    [
        ([OK + b"Content-Length: 9999\r\n\r\n", *[b" "] * 999], 0.05),
        ([OK + b"Transfer-Encoding: chunked\r\n\r\n", *[b"1\r\n \r\n"] * 999], 0.05),
        ([OK, *[b"a: b\r\n"] * 90], 0.05),
        ([b"x"] * 999, 0.05),
        ([b"HTTP/1.1 100 Continue\r\n\r\n"] * 99_999, 0.001),
        ([OK + b"Content-Length: 9999\r\n\r\n", b" "], 30.0),
    ],
)
def test_an_answer_that_drips_ends_at_the_deadline(pieces: list[bytes], pause: float) -> None:
    began = time.monotonic()
    with answering(*pieces, pause=pause) as url:
        assert "failed 1 times, the last time with TimeoutError" in error(url, timeout=0.4)
    assert time.monotonic() - began < 3


def test_a_handshake_that_drips_ends_at_the_deadline() -> None:
    began = time.monotonic()
    record = b"\x16\x03\x03\x3f\xff\x02\x00\x3f\xfb"  # a ServerHello of 16 KB
    with answering(record, *[b"\x00"] * 999, pause=0.05, reads=False) as url:
        assert "TimeoutError" in error(url.replace("http:", "https:"), timeout=0.4)
    assert time.monotonic() - began < 3


BOMB = gzip.compress(bytes(50 << 20))
LOST = "failed 1 times, the last time with "
LIES = [
    (
        OK + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(BOMB) + BOMB,
        "no JSON object",
    ),
    (OK + b"\r\n" + b" " * (MOST + 1), f"more than {MOST:,} bytes"),
    (OK + b"Content-Length: 99999999999\r\n\r\n" + b" " * (MOST + 1), f"more than {MOST:,} bytes"),
    (OK + b"Content-Length: %d\r\n\r\n" % (len(WHOLE) + 1) + WHOLE, LOST),
    (OK + b"Content-Length: %d\r\n\r\n" % (len(WHOLE) - 1) + WHOLE, LOST),
    (OK + b"\r\n" + WHOLE[:-1], LOST + "no JSON object"),
    (OK + b"\r\n", LOST + "no JSON object"),
    (OK + b"Transfer-Encoding: chunked\r\n\r\nffffffff\r\n" + WHOLE, LOST),
    (OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + WHOLE, LOST),
    (OK + b"a: " + b"b" * 200_000 + b"\r\n\r\n" + WHOLE, LOST),
    (OK + b"\r\n" + b"[" * 100_000, "no JSON object"),
    (b"\x1b[2J" * 99, LOST),
    (b"", LOST),
]


@pytest.mark.parametrize(("answer", "message"), LIES)
def test_an_answer_that_lies_about_itself_is_named(answer: bytes, message: str) -> None:
    with answering(answer) as url:
        found = error(url)
    assert message in found and len(found) < 2000


def test_memory_does_not_grow_with_what_a_server_sends() -> None:
    tracemalloc.start()
    with answering(OK + b"\r\n", *[bytes(1 << 20)] * 64) as url:
        assert "bytes" in error(url)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


# The settings


@pytest.mark.parametrize(
    "url",
    ["", "localhost:8000/v1", "ftp://a/v1", "http://", "http://a/v1/chat/completions", "http://[a",
     "http://a:99999/v1", "http://a:0/v1", "http://a:port/v1", "http://a..b/v1", f"http://{'a' * 64}/v1",
     "http://a b/v1", "http://a\x7f/v1", "http://a/v1\n", "http://\u00e4/v1", "http://a/\u00e4"],
)  # fmt: skip
def test_urls_that_cannot_work_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="write its base, as in"):
        endpoint.check_url(url)


def test_a_login_in_the_url_is_not_repeated() -> None:
    with pytest.raises(ValueError, match="put the key in") as caught:
        endpoint.check_url(f"https://user:{KEY}@host/v1")
    assert KEY not in str(caught.value)


def test_a_key_is_needed_away_from_this_machine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINE", raising=False)
    for url in ("http://localhost:8000/v1", "http://127.0.0.2:8000/v1", "http://[::1]:8000/v1"):
        assert endpoint.api_key(url, "MINE") == ""
    assert endpoint.api_key("http://node:8000/v1", "") == ""
    for url in ("https://api.example.com/v1", "http://1.2.3.4"):
        with pytest.raises(ValueError, match="set the environment variable MINE"):
            endpoint.api_key(url, "MINE")


@pytest.mark.parametrize(
    "key", [f"{KEY}\n", f" {KEY}", f"{KEY}\r\nX-Other: 1", "sk-\u00fc", "sk-\x7f"]
)
def test_a_key_that_no_header_can_hold_is_refused_and_not_repeated(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("MINE", key)
    with pytest.raises(ValueError, match="environment variable MINE holds a space") as caught:
        endpoint.api_key("http://localhost/v1", "MINE")
    assert KEY not in str(caught.value)


# The way there


@pytest.mark.usefixtures("collected")
def test_https_goes_through_the_proxy_and_says_no_more_there_than_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with answering(b"HTTP/1.1 403 no\r\n\r\n") as proxy:
        place = proxy.removesuffix("/v1").replace("http://", "http://me:pass%40word@")
        monkeypatch.setenv("HTTPS_PROXY", place)
        assert "403" in error("https://server.example/v1")
    (asked,) = proxy.asked
    assert asked.startswith(b"CONNECT server.example:443 HTTP/1.")
    assert base64.b64encode(b"me:pass@word") in asked and KEY.encode() not in asked


def test_http_and_this_machine_are_reached_without_the_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_PROXY")
    with answering(OK + b"\r\n" + WHOLE) as url, answering(b"") as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.removesuffix("/v1"))
        monkeypatch.setenv("HTTPS_PROXY", proxy.removesuffix("/v1"))
        assert models(url) == {"served": False}
        error(url.replace("http:", "https:"))
    assert proxy.asked == []


@pytest.fixture
def certified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """The server's side of TLS, of a name that this process trusts: server.example."""
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
    ]
    command += ["-nodes", "-keyout", str(key), "-out", str(certificate), "-days", "2"]
    command += ["-subj", "/CN=server.example", "-addext", "subjectAltName=DNS:server.example"]
    subprocess.run(command, check=True, capture_output=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


@contextmanager
def tunnel(context: ssl.SSLContext, asked: list[bytes]) -> Iterator[str]:
    """A proxy that is the server behind it, too: what it was sent before and after TLS began."""

    def serve() -> None:
        with suppress(OSError), listening.accept()[0] as connection:
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


@pytest.mark.usefixtures("collected")
def test_https_is_spoken_with_the_server_behind_the_proxy_if_it_is_the_one_it_says(
    certified: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes] = []
    with tunnel(certified, asked) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy)
        assert models("https://server.example/v1") == {"served": False}
    assert asked[0].startswith(b"CONNECT server.example:443 ") and KEY.encode() not in asked[0]
    assert asked[1].startswith(b"GET /v1/models ")
    assert b"\r\nHost: server.example\r\n" in asked[1]
    asked.clear()
    with tunnel(certified, asked) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy)
        assert "CERTIFICATE_VERIFY_FAILED" in error("https://another.example/v1")
    assert len(asked) == 1


@pytest.mark.parametrize(
    "proxy",
    ["socks5://me:secret@127.0.0.1:1", "http://a:99999", "http://a:b", "http://user:secret#1@a:1",
     "http://a..b:1", "http://:1"],
)  # fmt: skip
def test_a_proxy_that_cannot_be_used_is_refused_before_anything_is_asked(
    monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    monkeypatch.setenv("https_proxy", proxy)
    with pytest.raises(ValueError, match="HTTPS_PROXY is not an http proxy") as caught:
        endpoint.check_url("https://server.test/v1")
    assert "secret" not in str(caught.value)
    endpoint.check_url("http://server.test/v1")  # which needs none
