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
    api, home = f"/api/{kind}/{name}", f"/{name}" if kind == "models" else f"/{kind}/{name}"
    answers: dict[str, tuple[bytes | Path, str, str]] = {}  # path -> content, commit, the file that it downloads
    for revision, folder in folders.items():
        files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
        commit = sha1(revision.encode()).hexdigest()
        info = {"id": name, "sha": commit, "siblings": [{"rfilename": file} for file in files]}
        sizes = {file: path.stat().st_size for file, path in files.items()}
        tree = [{"type": "file", "path": file, "size": size, "oid": commit} for file, size in sizes.items()]
        for called in (revision, commit):
            answers[f"{api}/revision/{called}"] = json.dumps(info).encode(), commit, ""
            answers[f"{api}/tree/{called}"] = json.dumps(tree).encode(), commit, ""
            answers |= {f"{home}/resolve/{called}/{file}": (path, commit, file) for file, path in files.items()}
        if revision == "main":
            answers[api] = answers[f"{api}/revision/main"]
    revisions = {commit for _, commit, _ in answers.values()} | folders.keys()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0].rstrip("/")
            content, commit, file = answers.get(path, (b"", "", ""))
            data = content.read_bytes() if isinstance(content, Path) else content
            if file and self.command == "GET":
                asked.append(file)
            missing = "EntryNotFound" if revisions & {*path.split("/")} else "RevisionNotFound"
            self.send_response(200 if commit else 404)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("ETag", f'"{sha256(data).hexdigest()}"')
            if commit:
                self.send_header("X-Repo-Commit", commit)
            else:
                self.send_header("X-Error-Code", missing if path.startswith((api, home)) else "RepoNotFound")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        do_HEAD = do_GET

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
