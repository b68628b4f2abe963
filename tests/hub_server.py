"""A model hub for tests: one repository, whose files are those of a folder, over HTTP on this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub_server(name: str, folder: Path, asked: list[str]) -> Iterator[str]:
    """Serve `folder` as the repository `name`, and yield the hub's URL. asked: gets the files that are downloaded."""
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            path = self.path.partition("?")[0]
            if path.startswith(f"/api/models/{name}/revision/"):
                siblings = [{"rfilename": file} for file in files]
                return self.send(json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode())
            if path.startswith(f"/api/models/{name}/tree/"):
                sizes = {file: there.stat().st_size for file, there in files.items()}
                entries = [{"type": "file", "path": file, "size": size, "oid": COMMIT} for file, size in sizes.items()]
                return self.send(json.dumps(entries).encode())
            file = path.removeprefix(f"/{name}/resolve/").partition("/")[2]
            if file not in files:
                return self.send(b"", 404)
            if self.command == "GET":
                asked.append(file)
            return self.send(files[file].read_bytes())

        def send(self, data: bytes, status: int = 200) -> None:
            self.send_response(status)
            headers = {"Content-Length": len(data), "ETag": f'"{sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
            for key, value in headers.items():
                self.send_header(key, str(value))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
