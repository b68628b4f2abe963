"""Requests to the server of engine.*, in the protocol of vLLM 0.32.

Failed connections and temporary errors are retried. Any other problem is an EngineError.
"""

from __future__ import annotations

import http.client
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

from g2d_jax.config import Engine as Settings
from g2d_jax.runtime import endpoint

PAUSE = 0.5
"""Seconds before the second attempt, doubled for each further one."""

BYTES_A_TOKEN = 2048
"""Most bytes of an answer per token of prompt and response, plus a thousand tokens; vLLM writes
about 150."""

RESTING = (408, 409, 425, 429)
"""Statuses below 500 that are retried."""

PLAIN = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""The model's own distribution. A server fills parameters that a request omits from the model's
generation_config.json."""

T = TypeVar("T")


class EngineError(ValueError):
    """The error of a server (engine.*) that fails or answers wrongly; the message includes what to
    do.

    Rollouts on disk stay, and the run can be continued.
    """


class _Lost(Exception):
    """The error of a request that is worth a retry: its url, and the problem."""


class Busy:
    """A clock that runs while at least one request is running, in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way = 0
        self._since = 0.0
        self._seconds = 0.0
        self._taken = 0.0

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a block as a request."""
        with self._lock:
            if not self._under_way:
                self._since = time.perf_counter()
            self._under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self._under_way -= 1
                if not self._under_way:
                    self._seconds += time.perf_counter() - self._since

    def seconds(self) -> float:
        """Return the seconds so far."""
        with self._lock:
            seconds = self._seconds
            if self._under_way:
                seconds += time.perf_counter() - self._since
            return seconds

    def take(self) -> float:
        """Return the seconds since the last call of `take`."""
        before, self._taken = self._taken, self.seconds()
        return self._taken - before


class Connection:
    """The server at engine.url; several threads may send requests at once.

    busy: the clock of responses that are being sampled. Raises ValueError as `endpoint.api_key`.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.busy = Busy()
        self._key = endpoint.api_key(settings.url, settings.api_key_env)
        self._base = settings.url.rstrip("/")
        self._root = self._base.removesuffix("/v1")  # of vLLM's own endpoints
        # Limits all concurrent responses, ahead or not.
        self._places = threading.Semaphore(settings.concurrency)

    def models(self) -> dict[str, bool]:
        """Map the names that the server lists to whether they are adapters."""
        listed = self._json("GET", f"{self._base}/models")
        try:
            return {str(model["id"]): model.get("parent") is not None for model in listed["data"]}
        except (LookupError, TypeError, AttributeError) as error:
            raise self.wrong(
                "/models lists no models", "check that engine.url is the base of the API"
            ) from error

    def complete(self, body: Any, tokens: int, stopped: threading.Event) -> dict[str, Any]:
        """Sample a response. tokens: most tokens of prompt and response. Raises CancelledError once
        `stopped` is set, also while waiting for a place and between attempts."""
        url = f"{self._base}/completions"

        def ask(_: int) -> dict[str, Any]:
            if stopped.is_set():
                raise CancelledError
            with self.busy.request():
                return self._object(url, self._attempt("POST", url, body, tokens))

        with self._places:
            return self._again(ask, stopped)

    def likeliest(self, model: str, prompt_ids: list[int], temperature: float) -> dict[str, float]:
        """Return the log-probabilities of the likeliest first tokens after a prompt; {} if the
        server returns none. model: its name on the server."""
        body = {
            **PLAIN,
            "model": model,
            "prompt": prompt_ids,
            "max_tokens": 1,
            "logprobs": 2,
            "temperature": temperature,
        }
        answer = self._json("POST", f"{self._base}/completions", body)
        try:
            tops = dict(answer["choices"][0]["logprobs"]["top_logprobs"][0])
        except (LookupError, TypeError, ValueError):
            return {}
        return {token: x for token, x in tops.items() if type(x) in (int, float)}

    def load_folder(self, place: str, version: str) -> None:
        """Make the server load the weights in a folder, under the name of their version."""
        weights = {"method": "reload_weights", "kwargs": {"weights_path": place}}
        self._post("collective_rpc", weights)
        self._post("update_weight_version", {"new_version": version})
        self._post("reset_prefix_cache")  # its keys and values are the old policy's

    def held_version(self) -> Any:
        """Return the version of its weights that the server reports."""
        return self._json("GET", f"{self._root}/weight_info").get("weight_version")

    def set_adapter(self, action: Literal["load", "unload"], version: str, **where: str) -> None:
        """Make the server load or unload an adapter. A retry fails if the first answer was lost:
        the server refuses to repeat the action."""
        url, body = f"{self._base}/{action}_lora_adapter", {"lora_name": version, **where}

        def ask(attempt: int) -> None:
            try:
                self._attempt("POST", url, body)
            except EngineError:
                if not attempt or (version in self.models()) != (action == "load"):
                    raise

        self._again(ask)

    def shown(self, text: str) -> str:
        """Shorten the server's message, and remove the key."""
        return endpoint.shown(text, self._key)

    def wrong(self, what: str, advice: str) -> EngineError:
        """Build the error of a problem with the server."""
        if self._key:
            what = what.replace(self._key, "***")
        return EngineError(
            f"the server at engine.url, {self.settings.url}: {what}. To try: {advice}; then start "
            "again: rollouts on disk are kept"
        )

    def _post(self, path: str, body: Any = None) -> None:
        """Send a request to vLLM's own endpoints, which need VLLM_SERVER_DEV_MODE=1."""
        self._again(lambda _: self._attempt("POST", f"{self._root}/{path}", body))

    def _json(self, method: str, url: str, body: Any = None) -> dict[str, Any]:
        """Return the JSON object of an answer, with retries. Raises EngineError."""
        return self._again(lambda _: self._object(url, self._attempt(method, url, body)))

    def _object(self, url: str, data: bytes) -> dict[str, Any]:
        """Read an answer as a JSON object. Raises _Lost for a truncated one: without a
        Content-Length, a cut-off answer looks complete."""
        try:
            answer = json.loads(data)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            shown = self.shown(data.decode("utf-8", "replace"))
            problem = f"no JSON object: {shown}"
            if not data.strip() or data.lstrip().startswith(b"{"):
                raise _Lost(url, problem)
            raise self.wrong(f"{url} answers with {problem}", "check engine.url")
        return answer

    def _again(self, attempt: Callable[[int], T], stopped: threading.Event | None = None) -> T:
        """Return the result of the first attempt that is not `_Lost`. attempt: called with its
        number, from 0."""
        pause = stopped or threading.Event()
        for number in itertools.count():
            try:
                return attempt(number)
            except _Lost as error:
                if number == self.settings.retries or pause.is_set():
                    url, problem = error.args
                    raise self.wrong(
                        f"{url} failed {number + 1} times, the last time with {problem}",
                        "check that it runs, then its log, engine.url and engine.timeout",
                    ) from error
            pause.wait(min(PAUSE * 2**number, 30.0))
        raise AssertionError  # the loop has no end

    def _attempt(self, method: str, url: str, body: Any = None, tokens: int = 0) -> bytes:
        """Send a request once and return the answer. Raises _Lost, and EngineError for a permanent
        failure."""
        most, timeout = BYTES_A_TOKEN * (tokens + 1000), self.settings.timeout
        try:
            answer = endpoint.exchange(
                method, url, body, key=self._key, timeout=timeout, most_bytes=most
            )
        except (OSError, http.client.HTTPException) as error:
            raise _Lost(url, self.shown(f"{type(error).__name__}: {error}")) from error
        except ValueError as error:
            raise self.wrong(f"{url}: {error}", "check its log") from error
        status = answer.status
        if status == 200:
            return answer.body
        problem = self.shown(f"status {status}: {answer.body.decode('utf-8', 'replace')}")
        if status in RESTING or status >= 500:
            raise _Lost(url, problem)
        raise self.wrong(f"{url} answers {problem}", _advice(status, url))


def _advice(status: int, url: str) -> str:
    """Return the advice for a permanent error status."""
    if status in (401, 403):
        return "check the key in the variable that engine.api_key_env names"
    if 300 <= status < 400:
        return "redirects are not followed: set engine.url to the server's own address"
    if status == 404 and not url.endswith("/completions"):
        return "start it with launch/vllm.sh, which enables the endpoints for engine.sync"
    return "check engine.url, engine.model and the server's options, such as --max-model-len"
