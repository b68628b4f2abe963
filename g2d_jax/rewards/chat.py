"""A chat model behind any OpenAI-style endpoint: vLLM, OpenAI, a reward server of one's own. Its
answers are kept.

    conversations ─► journal (asked before?) ─► requests, `concurrency` at a time ─► journal ─► replies

The journal (`storage.Segments`) has a line for each reply, named by a fingerprint of what was
asked: model, messages and max_tokens, not the url. It is written before anything uses the reply, so
that a process started again asks what is missing and gets the same answers for the rest. Failures
are logged there too, for people; they are asked again.
"""

from __future__ import annotations

import http.client
import json
import math
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

from g2d_jax.config import Judge
from g2d_jax.records import Message
from g2d_jax.runtime import endpoint as endpoints
from g2d_jax.runtime import processes, storage
from g2d_jax.runtime.tables import safe_text
from g2d_jax.runtime.threads import in_daemons

Failure: TypeAlias = Literal[
    "unreachable", "timeout", "unavailable", "rejected", "refused", "malformed"
]
"""No connection; no answer in time; 408, 409, 425, 429 or 5xx; 401, 404 or a redirect, which every
request will get; any other status; an answer that is no chat completion, or too long for one."""

NO_REPLY = ("unreachable", "timeout", "unavailable")
PATIENCE = 8
"""So many requests without a reply in a row, or `concurrency` if that is more, and the server
counts as down."""
PAUSE = 0.5
"""Seconds before the second attempt; they double with each further one."""
MOST_PAUSE = 60.0
"""Seconds that no pause exceeds, whatever the server asks for."""
BYTES_A_TOKEN = 2048
"""Most bytes of an answer for each token of it, and of a thousand beside."""
MOST_BYTES = 64 << 20
"""Most bytes of any answer."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Holds the outcome of one request. finish: the server's finish_reason. failure: why there is
    no reply, else "".

    detail: the error's text, shortened, without the key.
    """

    text: str = ""
    finish: str = ""
    failure: Failure | Literal[""] = ""
    detail: str = ""

    @property
    def complete(self) -> bool:
        """Tell a whole reply from a failure and from one cut at max_tokens, which has not come to
        its verdict."""
        return not self.failure and self.finish != "length"


class Chat:
    """Asks an endpoint at temperature 0. For one thread, which sends from several; close it at the
    end.

    retries of the settings: further attempts of a request without a reply, after pauses that
    double, or as long as the server asks for, MOST_PAUSE at most. concurrency: requests under way
    at a time. Each request has the guards of `endpoint.exchange`: a deadline, a limit of bytes, no
    redirects.

    counts, since it was made: requests "sent", those that the "journal" answered (or an equal one
    beside them), "failed" (and by kind of failure) and "cut" at max_tokens, and the "prompt_tokens"
    and "completion_tokens" that the server reported.
    """

    def __init__(self, endpoint: Judge, journal: storage.PathLike) -> None:
        """journal: a folder, local or on an object store.

        Raises ValueError as `check_endpoint`.
        """
        check_endpoint(endpoint)
        self.endpoint = endpoint
        self.counts: Counter[str] = Counter()
        self._key = endpoints.api_key(endpoint.url, endpoint.api_key_env)
        self._journal = storage.Segments(journal)
        self._lost = 0  # requests without a reply in a row

    def close(self) -> None:
        """Make the journal durable."""
        self._journal.close()

    @cached_property
    def _replies(self) -> dict[str, Reply]:
        """Read the journal's replies, by what was asked."""
        records = storage.read_segments(self._journal.folder)
        return {r["request"]: Reply(r["text"], r["finish"]) for r in records if "text" in r}

    def ask(self, conversations: Sequence[Sequence[Message]]) -> list[Reply]:
        """Get one reply for each conversation, in order; equal conversations are asked once.

        A request that failed after all retries is a Reply with a failure. Raises ConnectionError
        when the server is down, ValueError when it rejects the key or the url, or all that was
        sent.
        """
        named = list(map(self._named, conversations))
        missing = {name: messages for name, messages in named if name not in self._replies}
        self.counts["journal"] += len(named) - len(missing)
        failed = self._send(missing)
        self._journal.flush()
        return [self._replies.get(name) or failed[name] for name, _ in named]

    def _named(self, conversation: Sequence[Message]) -> tuple[str, list[dict[str, str]]]:
        messages = [{"role": m["role"], "content": safe_text(m["content"])} for m in conversation]
        asked = [self.endpoint.model, messages, self.endpoint.max_tokens]
        return storage.fingerprint(asked), messages

    def _send(self, requests: dict[str, Any]) -> dict[str, Reply]:
        """Ask and journal; return the requests that failed."""
        failed: dict[str, Reply] = {}
        stopped = threading.Event()
        futures = in_daemons(
            lambda messages: self._request(messages, stopped),
            requests.values(),
            self.endpoint.concurrency,
        )
        waiting = dict(zip(futures, requests, strict=True))
        try:
            for done, future in enumerate(processes.completed_interruptible(waiting), 1):
                reply, usage = future.result()
                self._record(waiting[future], reply, usage)
                if reply.failure:
                    failed[waiting[future]] = reply
                    self._check_alive(reply, len(failed), done == len(requests))
        finally:
            stopped.set()
            for future in futures:
                # after an error no more is sent, and nobody waits for what is under way
                future.cancel()
        return failed

    def _record(self, name: str, reply: Reply, usage: dict[str, int]) -> None:
        self.counts["sent"] += 1
        self._lost += 1
        if reply.failure not in NO_REPLY:
            self._lost = 0
        if reply.failure:
            self.counts.update(["failed", reply.failure])
            self._journal.append(
                {"request": name, "failure": reply.failure, "detail": reply.detail}
            )
            return
        self.counts.update({"cut": int(reply.finish == "length"), **usage})
        self._journal.append({"request": name, "text": reply.text, "finish": reply.finish, **usage})
        self._replies[name] = reply

    def _check_alive(self, reply: Reply, failed: int, last: bool) -> None:
        """Raise rather than let a server that is down, or settings that it rejects, make thousands
        of failures."""
        patience = max(PATIENCE, self.endpoint.concurrency)
        # Answers of an earlier life count.
        nothing = not self._replies and (failed >= patience or last)
        where = f"{self.endpoint.url} (model {self.endpoint.model})"
        if self._lost >= patience or (nothing and reply.failure in NO_REPLY):
            raise ConnectionError(
                f"{where} does not answer: {self._lost} requests in a row failed, the last one "
                f"with: {reply.detail}. Check that the server runs, the url, the timeout, and the "
                "server's log; then start again: the answers so far are kept"
            )
        if nothing or reply.failure == "rejected":
            raise ValueError(
                f"{where} answers no request, the last one with: {reply.detail}. "
                f"Check the url (its base, often ending in /v1), the model's name and the key in "
                f"{self.endpoint.api_key_env or 'api_key_env'}"
            )

    def _request(
        self, messages: list[dict[str, str]], stopped: threading.Event
    ) -> tuple[Reply, dict[str, int]]:
        """Send one request, again where that may help, in a thread. stopped: no further attempt is
        wanted."""
        reply, usage, pause = self._attempt(messages)
        for attempt in range(self.endpoint.retries):
            if reply.failure not in NO_REPLY:
                break
            if pause is None:
                pause = min(PAUSE * 2**attempt, MOST_PAUSE)
            if stopped.wait(pause):
                break
            reply, usage, pause = self._attempt(messages)
        return reply, usage

    def _attempt(
        self, messages: list[dict[str, str]]
    ) -> tuple[Reply, dict[str, int], float | None]:
        """Send one request once; with the seconds after which the server wants the next attempt, if
        it says so."""
        most_tokens = self.endpoint.max_tokens
        pause = None
        kind: Failure
        try:
            answer = endpoints.exchange(
                "POST",
                f"{self.endpoint.url.rstrip('/')}/chat/completions",
                {
                    "model": self.endpoint.model,
                    "messages": messages,
                    "max_tokens": most_tokens,
                    "temperature": 0.0,
                },
                key=self._key,
                timeout=self.endpoint.timeout,
                most_bytes=min(BYTES_A_TOKEN * (most_tokens + 1000), MOST_BYTES),
            )
            if answer.status == 200:
                return *parse_completion(answer.body), None
            kind = _kind(answer.status)
            detail = f"status {answer.status}: {answer.body.decode('utf-8', 'replace')}"
            pause = _wanted_pause(answer.headers)
            if kind == "rejected" and answer.status < 400:
                detail = (
                    f"status {answer.status}: redirects are not followed, give the url of the "
                    "server itself"
                )
        except TimeoutError:
            kind, detail = "timeout", f"no answer in {self.endpoint.timeout:g} s"
        except (OSError, http.client.HTTPException) as error:
            kind, detail = "unreachable", f"{type(error).__name__}: {error}"
        except ValueError as error:
            kind, detail = "malformed", str(error)
        return Reply(failure=kind, detail=endpoints.shown(detail, self._key)), {}, pause


def _kind(status: int) -> Failure:
    """Return the kind of failure that a status other than 200 is."""
    if status >= 500 or status in (408, 409, 425, 429):
        return "unavailable"
    if 300 <= status < 400 or status in (401, 404):
        return "rejected"
    return "refused"


def _wanted_pause(headers: http.client.HTTPMessage) -> float | None:
    """Return the seconds, MOST_PAUSE at most, that a server asks to wait before the next attempt;
    None if it does not.

    In retry-after-ms, or in Retry-After as a number; as a date it counts as not asked.
    """
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name, "")) / unit
        except ValueError:
            continue
        if 0 <= seconds < math.inf:
            return min(seconds, MOST_PAUSE)
    return None


def parse_completion(body: bytes) -> tuple[Reply, dict[str, int]]:
    """Parse the reply in the JSON of a chat completion, and its token counts. Raises ValueError for
    any other body.

    A missing text is "": the model called a tool or refused.
    """
    try:
        content = json.loads(body)
        choice = content["choices"][0]
        text, finish = choice["message"].get("content"), choice.get("finish_reason")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"the answer is no chat completion: {body[:100]!r}") from error
    if not isinstance(text, str | None) or not isinstance(finish, str | None):
        raise ValueError(f"the answer's content is no text: {body[:100]!r}")
    usage = content.get("usage")
    counts = {}
    for name in ("prompt_tokens", "completion_tokens"):
        if isinstance(usage, dict) and _is_count(usage.get(name)):
            counts[name] = usage[name]
    return Reply(text or "", (finish or "")[:100]), counts


def _is_count(value: Any) -> bool:
    """Return whether a server's number can be a number of tokens."""
    return type(value) is int and 0 <= value < 1 << 32


def check_endpoint(settings: Judge) -> None:
    """Raise ValueError for the settings of an endpoint that cannot work, a key that is not set
    included."""
    endpoints.check_url(settings.url)
    if not settings.model:
        raise ValueError("name the model that the endpoint serves; GET <url>/models lists them")
    endpoints.api_key(settings.url, settings.api_key_env)
