"""A local object store for tests: Google Cloud Storage by gcp-storage-emulator; no network."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from http import HTTPStatus
from typing import Any

BUCKET = "g2d-bucket"

_GS = {
    "FSSPEC_GCS_TOKEN": "anon",
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    "GOOGLE_CLOUD_PROJECT": "test",
}


@contextmanager
def gs_server(*, conditional: bool = True) -> Iterator[dict[str, str]]:
    """A server with an empty bucket; yields the environment variables that lead there.

    conditional: with generations, which the emulator gives but does not heed. Cloud Storage's own
    rules for ifGenerationMatch, ifGenerationNotMatch and the header x-goog-generation are put
    around its handlers; TensorStore's database of arrays is built on them, and so is the lock.
    """
    from gcp_storage_emulator import server as emulator
    from gcp_storage_emulator.handlers import objects

    class Quiet(emulator.server.HTTPServer):
        def handle_error(
            self, *args: Any
        ) -> None:  # clients that were killed, or do not wait for an answer
            pass

    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    server = emulator.create_server("127.0.0.1", 0, in_memory=True, default_bucket=BUCKET)
    heeded = (objects.insert, objects.get, objects.download)
    tables = [methods for _, methods in emulator.HANDLERS] if conditional else []
    before = [dict(methods) for methods in tables]
    for methods in tables:
        for method, inner in methods.items():
            if (
                getattr(inner, "__wrapped__", inner) in heeded
            ):  # another server of this process may have wrapped it too
                methods[method] = _heeding(inner, server._storage)
    server.start()
    server._api._httpd.__class__ = Quiet
    try:
        url = f"http://127.0.0.1:{server._api._httpd.socket.getsockname()[1]}"
        yield {**_GS, "STORAGE_EMULATOR_HOST": url, "TENSORSTORE_GCS_HTTP_URL": url}
    finally:
        for methods, old in zip(tables, before, strict=True):
            methods.update(old)
        server.stop()


def _heeding(inner: Callable[..., Any], mine: Any) -> Callable[..., Any]:
    """A handler that heeds generations, in the server with this storage. It serves one request at a
    time."""

    @wraps(getattr(inner, "__wrapped__", inner))
    def handle(request: Any, response: Any, storage: Any, *args: Any, **kwargs: Any) -> Any:
        if storage is not mine:
            return inner(request, response, storage, *args, **kwargs)
        there = _generation(request, storage)
        if request.query.get("ifGenerationMatch", [there]) != [there]:
            response.status = HTTPStatus.PRECONDITION_FAILED
            return None
        if there != "0" and request.query.get("ifGenerationNotMatch") == [there]:
            response.status = HTTPStatus.NOT_MODIFIED
            return None
        result = inner(request, response, storage, *args, **kwargs)
        if (now := _generation(request, storage)) != "0":
            response["x-goog-generation"] = now
        return result

    return handle


def _generation(request: Any, storage: Any) -> str:
    """Of the object that a request names; "0" if it is not there."""
    from gcp_storage_emulator.exceptions import NotFound

    name = (
        request.params.get("object_id")
        or request.query.get("name", [None])[0]
        or request.data["meta"]["name"]
    )
    try:
        return str(storage.get_file_obj(request.params["bucket_name"], name)["generation"])
    except NotFound:
        return "0"
