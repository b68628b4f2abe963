"""A hub for tests: repositories of models and data sets, over HTTP on this machine, to read from
and to write to."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Files = dict[str, bytes | Path]
Revisions = dict[str, tuple[str, Files]]
"""Revision -> its commit and its files."""


class Refused(Exception):
    """An answer with an error: status, code, and perhaps a body."""


@dataclass(eq=False)
class Hub:
    """The hub's content. asked: gets the files that are downloaded. token: of requests to write and
    of private repositories, None refuses them all."""

    asked: list[str] = field(default_factory=list)
    token: str | None = None
    repositories: dict[str, Revisions] = field(default_factory=dict)  # by "models/org/name"
    private: set[str] = field(default_factory=set)
    url: str = ""

    def files(self, name: str) -> dict[str, bytes]:
        """The files of a repository's main branch: "datasets/org/name"."""
        return {file: _content(data) for file, data in self.repositories[name]["main"][1].items()}

    def answer(self, path: str, headers: Mapping[str, str]) -> tuple[bytes, str, str]:
        """What a GET of a path gives: content, commit, the file that it downloads. Raises
        Refused."""
        for name, revisions in self.repositories.items():
            api, home = f"/api/{name}", f"/{name.removeprefix('models/')}"
            if not path.startswith((f"{api}/", f"{home}/")) and path != api:
                continue
            if name in self.private:
                self.authorise(headers)
            known = {
                **revisions,
                **{commit: (commit, files) for commit, files in revisions.values()},
            }
            for called, (commit, files) in known.items():
                if path == f"{api}/revision/{called}" or (path == api and called == "main"):
                    siblings = [{"rfilename": file} for file in files]
                    about = {"id": name.partition("/")[2], "sha": commit, "siblings": siblings}
                    about["private"] = name in self.private
                    return json.dumps(about).encode(), commit, ""
                if path == f"{api}/tree/{called}":
                    entries = []
                    for file, data in files.items():
                        entry = {"type": "file", "path": file, "oid": commit}
                        entries.append({**entry, "size": len(_content(data))})
                    return json.dumps(entries).encode(), commit, ""
                file = path.removeprefix(f"{home}/resolve/{called}/")
                if file in files:
                    return _content(files[file]), commit, file
            there = known.keys() & {*path.split("/")}
            raise Refused(404, "EntryNotFound" if there else "RevisionNotFound")
        raise Refused(404, "RepoNotFound")

    def write(self, path: str, body: bytes) -> Any:
        """What a POST gives, as JSON. Raises Refused."""
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('type', 'model')}s/{asked['organization']}/{asked['name']}"
            url = {"url": f"{self.url}/{name.removeprefix('models/')}"}
            if name in self.repositories:
                raise Refused(409, "", url)
            commit = sha1(name.encode()).hexdigest()
            self.repositories[name] = {"main": (commit, {".gitattributes": b""})}
            if asked["visibility"] == "private":
                self.private.add(name)
            return url
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        name = next(name for name in self.repositories if path.startswith(f"/api/{name}/"))
        if "/preupload/" in path:
            files = [one["path"] for one in json.loads(body)["files"]]
            regular = {"uploadMode": "regular", "shouldIgnore": False}
            return {"files": [{"path": file, **regular} for file in files]}
        return self._commit(name, body)

    def _commit(self, name: str, body: bytes) -> Any:
        files = dict(self.repositories[name]["main"][1])
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "deletedFile":
                del files[line["value"]["path"]]
            elif line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        commit = sha1(body).hexdigest()
        self.repositories[name]["main"] = commit, files
        url = f"{self.url}/{name}/commit/{commit}"
        return {"success": True, "commitOid": commit, "commitUrl": url}

    def authorise(self, headers: Mapping[str, str]) -> None:
        if headers.get("Authorization") != f"Bearer {self.token}":
            raise Refused(401, "")


def _content(data: bytes | Path) -> bytes:
    return data if isinstance(data, bytes) else data.read_bytes()


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve a hub; its url is then where."""

    class Handler(BaseHTTPRequestHandler):
        def _send(self, status: int, data: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def do_GET(self) -> None:
            path = self.path.partition("?")[0].rstrip("/")
            try:
                data, commit, file = hub.answer(path, self.headers)
            except Refused as refused:
                self._send(refused.args[0], b"", X_Error_Code=refused.args[1])
                return
            if file and self.command == "GET":
                hub.asked.append(file)
            self._send(200, data, ETag=f'"{sha256(data).hexdigest()}"', X_Repo_Commit=commit)

        do_HEAD = do_GET

        def do_POST(self) -> None:
            body = self._body()
            try:
                hub.authorise(self.headers)
                self._send(200, json.dumps(hub.write(self.path, body)).encode())
            except Refused as refused:
                status, code, *body = refused.args
                self._send(status, json.dumps(dict(*body)).encode(), X_Error_Code=code)

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers["Content-Length"]))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def client_settings(hub: Hub, folder: Path) -> dict[str, Any]:
    """Constants of huggingface_hub by which its client talks to this hub, and keeps files in a
    folder; without its own protocol for large files."""
    return {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
        "HF_TOKEN_PATH": str(folder / "token"),
        "HF_HUB_CACHE": str(folder / "cache"),
    }


@contextmanager
def hub_server(
    name: str, folders: Path | Mapping[str, Path], asked: list[str], kind: str = "models"
) -> Iterator[str]:
    """Serve folders by revision, or one as "main", as the repository `name`, and yield the hub's
    URL.

    asked: gets the files that are downloaded. kind: "models" or "datasets".
    """
    folders = folders if isinstance(folders, Mapping) else {"main": folders}
    revisions: Revisions = {}
    for revision, folder in folders.items():
        files: Files = {}
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                files[str(path.relative_to(folder))] = path
        revisions[revision] = sha1(revision.encode()).hexdigest(), files
    with serving(Hub(asked, repositories={f"{kind}/{name}": revisions})) as hub:
        yield hub.url
