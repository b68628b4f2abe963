"""A chat endpoint on this machine: an HTTP server in a thread, whose replies a test decides."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Judge:
    """reply(content, number): a text, or (status, body) for anything else; content is the first
    message's.

    asked: the bodies of all requests. headers: those of the last one. busiest: most requests under
    way at once.
    again: the seconds of Retry-After; without it attempts come at once.
    """

    def __init__(
        self, reply: Callable[[str, int], str | tuple[int, str]], seconds: float = 0.0
    ) -> None:
        self.reply, self.seconds = reply, seconds
        self.asked: list[dict[str, Any]] = []
        self.headers: dict[str, str] = {}
        self.url, self.again = "", ""
        self.busiest = self._busy = 0
        self._lock = threading.Lock()

    def answer(self, body: dict[str, Any], headers: dict[str, str]) -> tuple[int, str]:
        with self._lock:
            self.asked.append(body)
            self.headers, number = headers, len(self.asked)
            self._busy += 1
            self.busiest = max(self.busiest, self._busy)
        time.sleep(self.seconds)
        found = self.reply(body["messages"][0]["content"], number)
        with self._lock:
            self._busy -= 1
        return (200, completion(found)) if isinstance(found, str) else found


def completion(text: str | None, finish: str = "stop") -> str:
    """A chat completion with one choice."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "finish_reason": finish,
    }
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    return json.dumps(
        {"id": "1", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage}
    )


@contextmanager
def serving(
    reply: Callable[[str, int], str | tuple[int, str]], seconds: float = 0.0
) -> Iterator[Judge]:
    """A server while the block lasts. Retries come at once: the server says so."""
    judge = Judge(reply, seconds)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, text = (
                judge.answer(body, headers) if self.path == "/v1/chat/completions" else (404, "")
            )
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text.encode())))
            self.send_header(
                *(("retry-after", judge.again) if judge.again else ("retry-after-ms", "1"))
            )
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            pass

        def handle(self) -> None:
            with suppress(OSError):  # the client went away: it did not wait
                super().handle()

    class Server(ThreadingHTTPServer):
        # connections that wait; the default, 5, refuses some of many at once
        request_queue_size = 64

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    judge.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield judge
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Raw(str):
    """The url of a server that answers with bytes as they are. asked: what the last client sent
    first."""

    asked = b""


@contextmanager
def answering(*pieces: bytes, pause: float = 0.0, reads: bool = True) -> Iterator[Raw]:
    """A server that sends pieces of bytes, whatever is asked, and ends the connection: of every
    client, one at a time.

    pause: seconds after each piece. reads: it waits for a request first.
    """
    ended = threading.Event()

    def serve() -> None:
        while not ended.is_set():
            with suppress(OSError):
                connection, _ = listening.accept()
                with connection:
                    connection.settimeout(5)
                    url.asked = connection.recv(1 << 16) if reads else b""
                    for piece in pieces:
                        connection.sendall(piece)
                        if ended.wait(pause):
                            break
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(
                        1 << 16
                    ):  # until the client ends too: nothing is reset that it has not read
                        pass

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.05)
        url = Raw(f"http://127.0.0.1:{listening.getsockname()[1]}/v1")
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield url
        finally:
            ended.set()
            thread.join()
