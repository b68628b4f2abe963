"""A hub for tests: repositories of models and data sets, over HTTP on this machine, to read from
and to write to.

Requests to write are checked against the hub's types as its own JavaScript client publishes them
(@huggingface/hub, src/types/api/api-commit.ts and api-create-repo.ts).
"""

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

import jsonschema
import yaml

Revisions = dict[str, tuple[str, dict[str, bytes | Path]]]
"""Revision -> its commit and its files."""

TEXT, NUMBER = {"type": "string"}, {"type": "integer", "minimum": 0}


def _object(required: Mapping[str, Any], **optional: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": False,
    }


def _objects(**required: Any) -> dict[str, Any]:
    return {"type": "array", "items": _object(required), "minItems": 1}


KINDS = {"enum": ["model", "dataset"]}
CREATE = _object(
    {"name": TEXT, "organization": TEXT, "visibility": {"enum": ["private", "public"]}}, type=KINDS
)
VALIDATE = _object({"content": TEXT, "repoType": KINDS})
PREUPLOAD = _object({"files": _objects(path=TEXT, sample=TEXT, size=NUMBER)})
LFS = _object(
    {
        "operation": {"const": "upload"},
        "transfers": {"contains": {"const": "basic"}},
        "hash_algo": {"const": "sha256"},
    },
    objects=_objects(oid={"pattern": "^[0-9a-f]{64}$"}, size=NUMBER),
    ref=_object({"name": TEXT}),
)
OPERATIONS = {
    "header": _object(
        {"summary": TEXT, "description": TEXT}, parentCommit={"pattern": "^[0-9a-f]{40}$"}
    ),
    "file": _object({"path": TEXT, "content": TEXT, "encoding": {"const": "base64"}}),
    "lfsFile": _object({"path": TEXT, "algo": {"const": "sha256"}, "oid": TEXT, "size": NUMBER}),
    "deletedFile": _object({"path": TEXT}),
}


class Refused(Exception):
    """An answer with an error: status, code, message."""


@dataclass(eq=False)
class Hub:
    """The hub's content. asked: gets the files that are downloaded. token: of requests to write,
    None refuses them all.

    requests: "METHOD PATH" of each request to write.
    """

    asked: list[str] = field(default_factory=list)
    token: str | None = None
    repositories: dict[str, Revisions] = field(default_factory=dict)  # by "models/org/name"
    private: set[str] = field(default_factory=set)
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    url: str = ""

    def files(self, name: str) -> dict[str, bytes]:
        """The files of a repository's main branch: "datasets/org/name"."""
        files = self.repositories[name]["main"][1]
        return {
            file: data if isinstance(data, bytes) else data.read_bytes()
            for file, data in files.items()
        }

    def answer(self, path: str, headers: Mapping[str, str]) -> tuple[bytes, str, str]:
        """What a GET of a path gives: content, commit, the file that it downloads. Raises
        Refused."""
        allowed = "Authorization" in headers
        if allowed:
            self._authorise(headers)
        for name, revisions in self.repositories.items():
            if name in self.private and not allowed:
                continue
            api, home = f"/api/{name}", f"/{name.removeprefix('models/')}"
            if not path.startswith((f"{api}/", f"{home}/")) and path != api:
                continue
            known = {
                **revisions,
                **{commit: (commit, files) for commit, files in revisions.values()},
            }
            for called, (commit, files) in known.items():
                if path == f"{api}/revision/{called}" or (path == api and called == "main"):
                    siblings = [{"rfilename": file} for file in files]
                    info = {
                        "id": name.partition("/")[2],
                        "sha": commit,
                        "private": name in self.private,
                    }
                    return json.dumps({**info, "siblings": siblings}).encode(), commit, ""
                if path == f"{api}/tree/{called}":
                    sizes = {file: len(_content(data)) for file, data in files.items()}
                    entries = [
                        {"type": "file", "path": f, "size": size, "oid": commit}
                        for f, size in sizes.items()
                    ]
                    return json.dumps(entries).encode(), commit, ""
                file = path.removeprefix(f"{home}/resolve/{called}/")
                if file in files:
                    return _content(files[file]), commit, file
            raise Refused(
                404,
                "EntryNotFound" if known.keys() & {*path.split("/")} else "RevisionNotFound",
                "",
            )
        raise Refused(404, "RepoNotFound", "")

    def write(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Any:
        """What a POST or PUT gives, as JSON. Raises Refused."""
        self.requests.append(f"{method} {path}")
        if (
            method == "PUT"
        ):  # to the store of large files, whose address is signed: it gets no token
            assert (
                "Authorization" not in headers
                and sha256(body).hexdigest() == path.rpartition("/")[2]
            )
            self.objects[sha256(body).hexdigest()] = body
            return {}
        self._authorise(headers)
        if path == "/api/repos/create":
            return self._create(_checked(body, CREATE))
        if path == "/api/validate-yaml":
            front = yaml.safe_load(_checked(body, VALIDATE)["content"].split("---\n")[1])
            assert isinstance(front, dict)
            return {"errors": [], "warnings": []}
        name = next(
            n
            for n in self.repositories
            if f"{n}/" in path or f"/{n.removeprefix('models/')}.git/" in path
        )
        action = path.removesuffix("/main").rpartition("/")[2]
        return {"preupload": self._preupload, "batch": self._batch, "commit": self._commit}[action](
            name, body, headers
        )

    def _authorise(self, headers: Mapping[str, str]) -> None:
        given = headers.get("Authorization")
        if given != f"Bearer {self.token}":
            raise Refused(401, "", f"Invalid credentials in Authorization header: {given}")

    def _create(self, asked: dict[str, Any]) -> Any:
        name = f"{asked.get('type', 'model')}s/{asked['organization']}/{asked['name']}"
        if name in self.repositories:
            raise Refused(409, "", "You already created this repo")
        self.repositories[name] = {
            "main": (sha1(name.encode()).hexdigest(), {".gitattributes": b""})
        }
        self.private |= {name} if asked["visibility"] == "private" else set()
        return {"url": f"{self.url}/{name.removeprefix('models/')}"}

    def _preupload(self, name: str, body: bytes, headers: Mapping[str, str]) -> Any:
        modes = []
        for file in _checked(body, PREUPLOAD)["files"]:
            assert len(base64.b64decode(file["sample"])) == min(file["size"], 512)
            mode = "lfs" if file["path"].endswith((".parquet", ".safetensors")) else "regular"
            modes.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False})
        return {"files": modes}

    def _batch(self, name: str, body: bytes, headers: Mapping[str, str]) -> Any:
        assert headers["Content-Type"] == "application/vnd.git-lfs+json"
        objects = _checked(body, LFS)["objects"]
        actions = [{"upload": {"href": f"{self.url}/store/{asked['oid']}"}} for asked in objects]
        return {
            "transfer": "basic",
            "objects": [{**o, "actions": a} for o, a in zip(objects, actions, strict=True)],
        }

    def _commit(self, name: str, body: bytes, headers: Mapping[str, str]) -> Any:
        assert headers["Content-Type"] == "application/x-ndjson"
        operations = [(line["key"], line["value"]) for line in map(json.loads, body.splitlines())]
        for key, value in operations:
            jsonschema.validate(value, OPERATIONS[key])
        assert [key == "header" for key, _ in operations] == [True] + [False] * (
            len(operations) - 1
        )
        before, files = self.repositories[name]["main"]
        if operations[0][1].get("parentCommit", before) != before:
            raise Refused(412, "", "A commit has happened since. Please refresh and try again.")
        files = dict(files)
        for key, value in operations[1:]:
            if key == "deletedFile":
                del files[value["path"]]
            else:
                files[value["path"]] = (
                    self.objects[value["oid"]]
                    if key == "lfsFile"
                    else base64.b64decode(value["content"])
                )
        commit = sha1(before.encode() + body).hexdigest()
        self.repositories[name]["main"] = commit, files
        return {
            "success": True,
            "commitOid": commit,
            "commitUrl": f"{self.url}/{name}/commit/{commit}",
        }


def _content(data: bytes | Path) -> bytes:
    return data if isinstance(data, bytes) else data.read_bytes()


def _checked(body: bytes, schema: dict[str, Any]) -> dict[str, Any]:
    asked = json.loads(body)
    jsonschema.validate(asked, schema)
    return asked


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

        def _refuse(self, refused: Refused) -> None:
            status, code, message = refused.args
            body = b"" if self.command == "GET" else json.dumps({"error": message}).encode()
            self._send(status, body, X_Error_Code=code, X_Error_Message=message)

        def do_GET(self) -> None:
            try:
                data, commit, file = hub.answer(
                    self.path.partition("?")[0].rstrip("/"), self.headers
                )
            except Refused as refused:
                self._refuse(refused)
                return
            if file and self.command == "GET":
                hub.asked.append(file)
            self._send(200, data, ETag=f'"{sha256(data).hexdigest()}"', X_Repo_Commit=commit)

        do_HEAD = do_GET

        def do_POST(self) -> None:
            body = self._body()
            try:
                self._send(
                    200, json.dumps(hub.write(self.command, self.path, body, self.headers)).encode()
                )
            except Refused as refused:
                self._refuse(refused)
            except Exception as error:  # a request that is not what the hub takes
                self._refuse(
                    Refused(400, "", f"{type(error).__name__}: {str(error).splitlines()[:1]}")
                )

        do_PUT = do_POST

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
        files = {
            str(path.relative_to(folder)): path
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        revisions[revision] = sha1(revision.encode()).hexdigest(), dict(files)
    with serving(Hub(asked, repositories={f"{kind}/{name}": revisions})) as hub:
        yield hub.url
