"""HTTP endpoints that a setting names: their url, their key, and one JSON request with a deadline."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

ERROR_CHARACTERS = 300


def check_url(url: str) -> None:
    """Raise ValueError for a url that is not the base of an endpoint, or that holds a login."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname)
        has_key = bool(parts.username or parts.password or parts.query)
    except ValueError:
        valid = has_key = False
    if has_key:  # not repeated here: it may be a secret
        raise ValueError("the endpoint's url holds a user name or parameters: put the key in the api_key_env variable")
    if not valid or parts.path.rstrip("/").endswith("/completions"):
        raise ValueError(
            f'{url!r} is no endpoint: give the base, as in "http://localhost:8000/v1" or "https://api.openai.com/v1"'
        )


def api_key(url: str, variable: str) -> str:
    """Return the key in an environment variable, "" if no variable is named.

    Raises ValueError where it is needed and not set: a server on this machine may want none.
    """
    key = os.environ.get(variable, "") if variable else ""
    if key or not variable or _is_this_machine(urlsplit(url).hostname or ""):
        return key
    raise ValueError(
        f"{url} needs a key: set the environment variable {variable}, name another one with "
        'api_key_env, or set that to "" if the server wants none'
    )


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def shown(text: str, key: str) -> str:
    """Shorten a server's text for an error message: without the key, which some repeat, and with escapes."""
    hidden = text.replace(key, "***") if key else text
    return hidden[:ERROR_CHARACTERS].encode("unicode_escape").decode("ascii")


def send(
    method: str, url: str, body: Any = None, *, key: str = "", timeout: float, most_bytes: int
) -> tuple[int, bytes]:
    """Send a request, with JSON unless the body is None; return status and body of the answer. Redirects are not
    followed: they could lead the key elsewhere.

    timeout: seconds to connect, and until the whole answer is there. Raises TimeoutError, another OSError or
    HTTPException without an answer, and ValueError for one of more than most_bytes.
    """
    parts, deadline = urlsplit(url), time.monotonic() + timeout
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=timeout)
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    with contextlib.closing(connection), _connected(connection, deadline):
        connection.request(method, parts.path or "/", None if body is None else json.dumps(body), headers)
        data = bytearray()
        with connection.getresponse() as response:
            while piece := response.read1(1 << 16):
                data += piece
                if len(data) > most_bytes:
                    raise ValueError(f"the answer has more than {most_bytes:,} bytes")
            if response.length:  # read1 does not tell a connection that ended too soon
                raise http.client.IncompleteRead(bytes(data), response.length)
            return response.status, bytes(data)


@contextlib.contextmanager
def _connected(connection: http.client.HTTPConnection, deadline: float) -> Iterator[None]:
    """Connect, and cut the connection off at a deadline: each byte that drips begins a socket's own timeout anew.

    deadline: on the monotonic clock. Raises TimeoutError for a block that was not through by then.
    """
    connection.connect()
    late = threading.Event()

    def cut() -> None:
        late.set()
        with contextlib.suppress(OSError):
            socket.socket.shutdown(wire, socket.SHUT_RDWR)  # not TLS's own, which a reader in another thread trips over

    wire, timer = connection.sock, threading.Timer(deadline - time.monotonic(), cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, http.client.HTTPException):
        if not late.is_set():
            raise
    finally:
        timer.cancel()
    if late.is_set():  # also where the cut looks like the answer's end
        raise TimeoutError(f"the answer was not complete after {connection.timeout:g} s")
