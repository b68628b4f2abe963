"""A hub for tests: a repository of a model or a data set, its files those of folders, over HTTP on this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@contextmanager
def hub_server(name: str, folders: Path | Mapping[str, Path], asked: list[str], kind: str = "models") -> Iterator[str]:
    """Serve folders by revision, or one as "main", as the repository `name`, and yield the hub's URL.

    asked: gets the files that are downloaded. kind: "models" or "datasets".
    """
    folders = folders if isinstance(folders, Mapping) else {"main": folders}
    revisions = {
        revision: {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
        for revision, folder in folders.items()
    }
    commits = {revision: sha1(revision.encode()).hexdigest() for revision in revisions}
    named = {
        **{commit: revision for revision, commit in commits.items()},
        **{revision: revision for revision in commits},
    }
    api, home = f"/api/{kind}/{name}/", f"/{name}/" if kind == "models" else f"/{kind}/{name}/"

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            path = self.path.partition("?")[0]
            path = f"{api}revision/main" if f"{path}/" == api else path
            prefix = api if path.startswith(api) else home if path.startswith(home) else None
            what, _, rest = path.removeprefix(prefix or "/").partition("/")
            wanted, _, file = rest.partition("/")
            revision = named.get(wanted)
            if prefix is None or revision is None:
                return self.send(b"", 404, error="RevisionNotFound" if prefix else "RepoNotFound")
            files, self.commit = revisions[revision], commits[revision]
            if what == "revision":
                siblings = [{"rfilename": one} for one in files]
                return self.send(json.dumps({"id": name, "sha": self.commit, "siblings": siblings}).encode())
            if what == "tree" and not file:
                sizes = {one: there.stat().st_size for one, there in files.items()}
                entries = [
                    {"type": "file", "path": one, "size": size, "oid": self.commit} for one, size in sizes.items()
                ]
                return self.send(json.dumps(entries).encode())
            if what != "resolve" or file not in files:
                return self.send(b"", 404, error="EntryNotFound")
            if self.command == "GET":
                asked.append(file)
            return self.send(files[file].read_bytes())

        commit = ""

        def send(self, data: bytes, status: int = 200, *, error: str = "") -> None:
            self.send_response(status)
            headers = {"Content-Length": len(data), "ETag": f'"{sha256(data).hexdigest()}"'}
            headers |= {"X-Error-Code": error} if error else {"X-Repo-Commit": self.commit}
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
