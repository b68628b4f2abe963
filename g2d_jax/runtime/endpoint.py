"""HTTP endpoints from settings: their url, their key, and one JSON request with a deadline.

The client is the standard library's. huggingface_hub's is httpx before version 2 and httpx2 from it
on, and has no deadline for a whole answer: 283 tokens around it would replace 653 of these.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import ipaddress
import json
import os
import socket
import ssl
import threading
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

ERROR_CHARACTERS = 300


def check_url(url: str) -> None:
    """Raise ValueError for a url that is not the base of an endpoint or holds a login, and for an
    unusable proxy."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and _has_place(parts)
        valid = valid and url.isascii() and url.isprintable() and " " not in url
        has_key = bool(parts.username or parts.password or parts.query)
    except ValueError:
        valid = has_key = False
    if has_key:  # not repeated here: it may be a secret
        raise ValueError(
            "the endpoint's url holds a user name or parameters: put the key in the api_key_env "
            "variable"
        )
    if not valid or parts.path.rstrip("/").endswith("/completions"):
        raise ValueError(
            f'{url!r} is not an endpoint: write its base, as in "http://localhost:8000/v1" or '
            '"https://api.openai.com/v1"'
        )
    _connection(parts, 1.0)


def _has_place(parts: SplitResult) -> bool:
    """Return whether a url has a valid host and port. Raises ValueError for some invalid ones."""
    host = parts.hostname or ""
    if ":" not in host:  # otherwise an IPv6 address
        host.encode("idna")  # as for a connection: each part of a name has 1 to 63 characters
    return (
        bool(host) and host.isascii() and host.isprintable() and " " not in host and parts.port != 0
    )


def api_key(url: str, variable: str) -> str:
    """Return the key in an environment variable, "" if no variable is named.

    Raises ValueError for a key that no header can hold, and if a key is needed and not set. A
    server on this machine may need none.
    """
    key = variable and os.environ.get(variable, "")
    if not (key.isascii() and key.isprintable() and " " not in key):  # never print the key itself
        raise ValueError(
            f"the key in the environment variable {variable} holds a space, a newline or another "
            "invalid character: set it to the key alone"
        )
    if key or not variable or is_this_machine(urlsplit(url).hostname or ""):
        return key
    raise ValueError(
        f"{url} needs a key: set the environment variable {variable}, set another one with "
        'api_key_env, or set that to "" if the server needs none'
    )


def is_this_machine(host: str) -> bool:
    """Return whether a url's host is this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def shown(text: str, key: str) -> str:
    """Shorten a server's text for an error message, with escapes and without the key, which some
    servers repeat."""
    if key:
        text = text.replace(key, "***")
    return text[:ERROR_CHARACTERS].encode("unicode_escape").decode("ascii")


class Answer(NamedTuple):
    """The status and the body of a server's answer."""

    status: int
    body: bytes


def exchange(
    method: str, url: str, body: Any = None, *, key: str = "", timeout: float, most_bytes: int
) -> Answer:
    """Send a request, with JSON unless the body is None; return the answer. Redirects are not
    followed, since they could expose the key. Compressed answers are neither requested nor
    expanded.

    timeout: seconds to connect to an address, and for the complete answer. https uses the proxy in
    HTTPS_PROXY. Raises TimeoutError, another OSError or HTTPException without an answer, and
    ValueError for one of more than most_bytes and for an unusable proxy.
    """
    parts = urlsplit(url)
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    connection = _connection(parts, timeout)
    with contextlib.closing(connection), _deadline(connection, timeout) as raise_if_late:
        connection.connect()
        if parts.scheme == "https":
            context = ssl.create_default_context()
            # Without the handshake, so that the deadline covers the new socket before the server
            # sends anything.
            connection.sock = context.wrap_socket(
                connection.sock, server_hostname=parts.hostname, do_handshake_on_connect=False
            )
            raise_if_late()
            connection.sock.do_handshake()
        raise_if_late()
        connection.request(
            method, parts.path or "/", None if body is None else json.dumps(body), headers
        )
        data = bytearray()
        with connection.getresponse() as response:
            while piece := response.read1(1 << 16):
                data += piece
                if len(data) > most_bytes:
                    raise ValueError(f"the answer has more than {most_bytes:,} bytes")
            if response.length:  # read1 does not report a connection that closed too early
                raise http.client.IncompleteRead(bytes(data), response.length)
            return Answer(response.status, bytes(data))


def _connection(parts: SplitResult, timeout: float) -> http.client.HTTPConnection:
    """Return a connection, still closed, to the host of a url or to the proxy in front of it."""
    host = parts.hostname or ""
    proxy = urllib.request.getproxies().get("https", "")
    if parts.scheme != "https":
        return http.client.HTTPConnection(
            host, parts.port or http.client.HTTP_PORT, timeout=timeout
        )
    port = parts.port or http.client.HTTPS_PORT
    if not proxy or is_this_machine(host) or urllib.request.proxy_bypass(host):
        connection = http.client.HTTPConnection(host, port, timeout=timeout)
        connection.default_port = http.client.HTTPS_PORT  # otherwise the header Host includes it
        return connection
    try:
        through = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        valid = through.scheme == "http" and _has_place(through)
    except ValueError:
        valid = False
    if not valid:  # not repeated here: it may hold a login
        raise ValueError("HTTPS_PROXY is not an http proxy: write http://HOST:PORT, or unset it")
    connection = http.client.HTTPConnection(
        through.hostname or "", through.port or http.client.HTTP_PORT, timeout=timeout
    )
    connection.default_port = http.client.HTTPS_PORT
    login = {}
    if through.username is not None:
        pair = f"{unquote(through.username)}:{unquote(through.password or '')}"
        login = {"Proxy-Authorization": f"Basic {base64.b64encode(pair.encode()).decode('ascii')}"}
    connection.set_tunnel(host, port, login)
    return connection


@contextlib.contextmanager
def _deadline(
    connection: http.client.HTTPConnection, seconds: float
) -> Iterator[Callable[[], None]]:
    """Cut a connection off after a number of seconds: a socket's own timeout restarts with each
    byte.

    Yields a function that raises TimeoutError after the deadline; call it for each new socket.
    Raises TimeoutError if the block ends after the deadline.
    """
    done = threading.Event()
    late = threading.Event()

    def watch() -> None:
        if done.wait(seconds):
            return
        late.set()
        while not done.is_set():  # a socket opened later is cut off too
            with contextlib.suppress(OSError, AttributeError, TypeError):
                # Not TLS's own shutdown, which breaks a reader in another thread.
                socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)
            done.wait(0.1)

    def raise_if_late() -> None:
        if late.is_set():
            raise TimeoutError(f"the answer was not complete after {seconds:g} s")

    threading.Thread(target=watch, name="g2d-deadline", daemon=True).start()
    try:
        yield raise_if_late
    except (OSError, http.client.HTTPException):
        raise_if_late()
        raise
    finally:
        done.set()
    raise_if_late()  # also if the cut looks like the answer's end
