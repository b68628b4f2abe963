"""An OpenAI-style server that samples in the sampler's place, as vLLM 0.32 serves it: the Engine of
`engine.*`.

    to_sampler_params: policy ─► a folder that the server sees too ─► loaded there: by folder or by adapter
    generate:          requests ─► POST /completions, one a sample with its seed, `concurrency` at a time ─► rollouts
    ask_ahead:         the same requests, sent while the caller does something else; `generate` then has the answers

The server is believed in nothing that can be checked: what breaks the contract of a Rollout is an
EngineError, and the call's rollouts are drawn again when the run is continued. Only a connection
that fails is tried again.
"""

from __future__ import annotations

import functools
import http.client
import itertools
import json
import threading
import time
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from etils import epath

from g2d_jax import keys
from g2d_jax.config import Engine as Settings
from g2d_jax.data.stops import Watch
from g2d_jax.data.tokenizer import PromptTokenizer
from g2d_jax.models import hf
from g2d_jax.models.decoder import Decoder
from g2d_jax.models.hf_folder import ADAPTERS
from g2d_jax.records import Request, Rollout, SamplingParams
from g2d_jax.runtime import endpoint, processes
from g2d_jax.runtime.threads import in_daemons
from g2d_jax.sampler import COUNTS
from g2d_jax.sampler.programs import Shapes

PAUSE = 0.5
"""Seconds before the second attempt; they double with each further one."""

BYTES_A_TOKEN = 2048
"""Most bytes of an answer for each token of prompt and response, and of a thousand beside; vLLM
writes about 150."""

RESTING = (408, 409, 425, 429)
"""Statuses below 500 that say: try again."""

LEAST_LOGPROB, MOST_LOGPROB = float(np.finfo(np.float32).min), 1e-3
"""The least number that a rollout can hold, and what rounding may add to a log-probability of 0."""


T = TypeVar("T")

PREFIX = "g2d-"
"""The first part of the names of policies that are written for a server."""


class EngineError(ValueError):
    """The error that the server of engine.* does not answer, or not as it must; the message says
    what to do.

    Rollouts on disk stay, and the run can be continued.
    """


class _Lost(Exception):
    """The error of a request that is worth another attempt: its url, and what went wrong."""


class Served(NamedTuple):
    """A policy on the server: the name that requests give, and the version of its weights if the
    server tells that."""

    name: str
    version: str = ""


Answer = tuple[Served, Request, int, dict[str, Any]]
"""The answer to one sample of a request, with what it was asked for."""


class Busy:
    """A clock that runs while at least one request is under way, in any thread."""

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
        """Return the seconds since this call was made last."""
        before, self._taken = self._taken, self.seconds()
        return self._taken - before


Packed = tuple[Served, Request, int, bytes]
"""An `Answer` whose object is compressed JSON: a fifteenth of what the object takes, and a whole
window of them waits to be used."""


class _Asked:
    """The requests that were sent ahead, whose packed answers come by sample."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.answers: dict[tuple[Any, ...], Future[Packed]] = {}


@dataclass(eq=False, repr=False)
class Remote:
    """The Engine behind engine.url. Give it its settings, checked by `check`, and where policies
    are written for it.

    seed: of the run. dtype: of the weights that are written. needs_logprobs: whether a loss needs
    the server's log-probabilities. say: shows the user a message.
    counts: of all calls that came to their end, in all processes: see `COUNTS`. busy: this
    process's requests.
    """

    settings: Settings
    folder: epath.Path
    tokenizer: PromptTokenizer
    vocab_size: int
    _: KW_ONLY
    seed: int
    dtype: str
    needs_logprobs: bool
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self.say = functools.cache(self.say)  # once each
        self.counts = Counter(dict.fromkeys(COUNTS, 0))
        self.ready = 0
        self.busy = Busy()
        self._asked = _Asked()
        self._forgotten: list[Future[Packed]] = []
        # Of all that is asked at once, ahead or not.
        self._places = threading.Semaphore(self.settings.concurrency)
        self._own: Counter[str] = Counter()  # of this call and process
        self._key = endpoint.api_key(self.settings.url, self.settings.api_key_env)
        self._base = self.settings.url.rstrip("/")
        self._root = self._base.removesuffix("/v1")  # where vLLM has what is not OpenAI's
        self._loaded = ""  # the version that this process had the server load last
        self._as_drawn: bool | None = None

    @functools.cached_property
    def model(self) -> str:
        """The name that the server has for its model: engine.model, or the only one it lists.
        Raises EngineError."""
        wanted = self.settings.model
        names = [name for name, is_adapter in self._models().items() if not is_adapter]
        if wanted in names or (not wanted and len(names) == 1):
            return wanted or names[0]
        listing = endpoint.shown(", ".join(names), self._key) or "no model"
        raise self._wrong(f"it serves {listing}", "set engine.model to the one to ask")

    def _models(self) -> dict[str, bool]:
        """Return the names that the server lists, each with whether it is an adapter's."""
        listed = self._json("GET", f"{self._base}/models")
        try:
            return {str(model["id"]): model.get("parent") is not None for model in listed["data"]}
        except (LookupError, TypeError, AttributeError) as error:
            raise self._wrong(
                "/models lists no models", "check that engine.url is the base of the API"
            ) from error

    def to_sampler_params(self, model: Decoder, weights: str = "", label: str = "") -> Served:
        """Have the server load a policy; all processes make the call. With sync="none" it is taken
        to hold it.

        weights: "" only. label: by which a later start finds what was written, see `restore`.
        Raises EngineError if it cannot be loaded.
        """
        if weights:
            raise ValueError(f"sampling weights {weights!r} are of the library's own sampler")
        name = processes.on_leader(lambda: self.model)
        if self.settings.sync == "none":
            return Served(name)
        labelled = _prefix(label)
        version = processes.on_leader(lambda: f"{labelled}{uuid.uuid4().hex[:16]}")
        if self.settings.sync == "adapter":
            hf.save_adapters(model, self.folder / version, base=name, dtype=self.dtype)
        else:
            hf.save(model, self.folder / version, dtype=self.dtype, eos_ids=self.tokenizer.eos_ids)
        return self._loaded_as(name, version)

    def restore(self, label: str) -> Served | None:
        """Have the server load the policy that was written last, by this start or an earlier one;
        None where it is not that of the label, of another kind than `sync` asks for, or gone. All
        processes make the call."""
        whole = "config.json"
        if self.settings.sync == "adapter":
            whole = ADAPTERS

        def find() -> list[str]:
            places = self.folder.glob(f"{_prefix(label)}*")
            return [place.name for place in places if (place / whole).exists()]

        found = processes.on_leader(find)
        if len(found) != 1:
            return None
        return self._loaded_as(processes.on_leader(lambda: self.model), found[0], again=True)

    def _loaded_as(self, name: str, version: str, again: bool = False) -> Served:
        """Have the server load what is in the folder of a version. name: of the model there.
        again: whether it may have it."""
        # What is under way for nobody holds blocks of the prefix cache, which could not be emptied.
        with processes.barrier():
            wait(self._forgotten)
        self._forgotten = []
        self.busy.take()
        processes.on_leader(lambda: self._load(version, again))
        self._loaded = version
        if self.settings.sync == "adapter":
            return Served(version)
        return Served(name, version)

    def ask_ahead(
        self, sampler_params: Served, calls: Iterable[Sequence[Request]], purpose: str
    ) -> None:
        """Send the requests of calls of `generate` that come later, with the same arguments: they
        have their answers, and raise what went wrong. All processes make the call.

        The threads that wait for answers take requests in the order of the calls, whatever is done
        in between.
        """
        with processes.barrier():
            self._check_held(sampler_params)
        stopped = self._asked.stopped

        def draw(job: tuple[Request, int]) -> Packed:
            served, request, number, answer = self._draw(sampler_params, purpose, stopped, *job)
            return served, request, number, zlib.compress(json.dumps(answer).encode(), 1)

        jobs: list[tuple[Request, int]] = []
        for requests in calls:
            jobs += _jobs(_own_share(requests))
        futures = in_daemons(draw, jobs, self.settings.concurrency)
        for job, future in zip(jobs, futures, strict=True):
            self._asked.answers[_sample(sampler_params, purpose, *job)] = future

    def forget(self) -> None:
        """Send no more of what was to be asked ahead, and let the answers go. What is under way is
        waited for before the server loads another policy."""
        self._asked.stopped.set()
        futures = self._asked.answers.values()
        self._forgotten += [future for future in futures if not future.cancel()]
        self._asked = _Asked()

    def generate(
        self,
        sampler_params: Served,
        requests: Iterable[Request],
        purpose: str,
        shapes: Shapes | None = None,
    ) -> Iterator[Rollout]:
        """Yield rollouts as they finish, in no particular order: this process's share of the
        requests.

        All processes make the call, with the same requests. sampler_params: of
        `to_sampler_params`. purpose: names the randomness as in `Sampler.generate`; the shapes are
        the sampler's. entropies are NaN, as are log-probabilities where the server's are not those
        of the distribution that was drawn from; greedy ones are 0. Raises EngineError.
        """
        jobs = _jobs(_own_share(requests))
        self._own.clear()
        with processes.barrier():  # the error of one process is that of all
            self._check_held(sampler_params)
            stopped = threading.Event()
            pool = ThreadPoolExecutor(self.settings.concurrency)

            def begin(request: Request, number: int) -> Future[Any]:
                name = _sample(sampler_params, purpose, request, number)
                asked = self._asked.answers.pop(name, None)
                if asked is not None:
                    return asked
                return pool.submit(self._draw, sampler_params, purpose, stopped, request, number)

            # As many again as are asked at once: a thread that is done finds its next request here.
            first = itertools.islice(jobs, 2 * self.settings.concurrency)
            waiting: set[Future[Any]] = {begin(*job) for job in first}
            try:
                while waiting:
                    future = next(processes.completed_interruptible(waiting))
                    waiting.remove(future)
                    self.ready = sum(other.done() for other in waiting)
                    served, request, number, answer = future.result()
                    if isinstance(answer, bytes):
                        answer = json.loads(zlib.decompress(answer))
                    yield self._rollout(served, request, number, answer)
                    waiting |= {begin(*job) for job in itertools.islice(jobs, 1)}
            finally:
                # After an error what is under way ends, and no more is sent.
                stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
            self._check_held(sampler_params)
        for counts in processes.gather(self._own):
            self.counts.update(counts)

    # The policy

    def _load(self, version: str, again: bool = False) -> None:
        """Have the server load the policy in the folder of its version; then remove those of
        others. again: whether it may have it."""
        place = self.folder / version
        if self.settings.sync == "adapter":
            if not (again and version in self._models()):
                self._set_adapter("load", version, lora_path=str(place))
            if self._loaded:
                self._set_adapter("unload", self._loaded)
        else:
            self._tell(
                "collective_rpc",
                {"method": "reload_weights", "kwargs": {"weights_path": str(place)}},
            )
            self._tell("update_weight_version", {"new_version": version})
            self._tell("reset_prefix_cache")  # its keys and values are the old policy's
        for other in self.folder.glob(f"{PREFIX}*"):
            if other.name != version:
                other.rmtree()

    def _set_adapter(self, action: Literal["load", "unload"], version: str, **where: str) -> None:
        """Have the server load or unload an adapter. It refuses to do again what it did without
        being heard."""
        url, body = f"{self._base}/{action}_lora_adapter", {"lora_name": version, **where}

        def ask(attempt: int) -> None:
            try:
                self._attempt("POST", url, body)
            except EngineError:
                if not attempt or (version in self._models()) != (action == "load"):
                    raise

        self._again(ask)

    def _tell(self, path: str, body: Any = None) -> None:
        """Send a request to vLLM's own part, which it serves with VLLM_SERVER_DEV_MODE=1."""
        self._bytes("POST", f"{self._root}/{path}", body)

    def _check_held(self, served: Served) -> None:
        """Raise EngineError if the server holds the weights of another policy. (It forgets an
        adapter's name.)"""
        if not served.version:
            return
        held = self._json("GET", f"{self._root}/weight_info").get("weight_version")
        if held != served.version:
            raise self._wrong(
                f"it holds the weights {endpoint.shown(repr(held), self._key)}, not "
                f"{served.version!r} as it was told: "
                "it was started again, or another run uses it too",
                "give each run a server of its own",
            )

    def _is_scored(self, served: Served, request: Request) -> bool:
        """Return whether the server's log-probabilities are those of the distribution that is drawn
        from.

        At temperature 1 without filters they are; else it is asked once for the likeliest tokens at
        temperatures 1 and 2, which differ if it gives those after the temperature (vLLM:
        --logprobs-mode processed_logprobs).
        """
        params = request.params
        if params.temperature == 1.0 and params.top_p == 1.0 and params.top_k == 0:
            return True
        if self._as_drawn is None:
            cool, warm = (self._likeliest(served, request, t) for t in (1.0, 2.0))
            shared = cool.keys() & warm.keys()
            self._as_drawn = any(abs(cool[token] - warm[token]) > MOST_LOGPROB for token in shared)
        return self._as_drawn

    def _likeliest(self, served: Served, request: Request, temperature: float) -> dict[str, float]:
        """Return the log-probabilities of a response's likeliest first tokens; {} if the server
        gives none."""
        body = {
            "model": served.name,
            "prompt": request.prompt_ids.tolist(),
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

    # Sampling

    def _draw(
        self, served: Served, purpose: str, stopped: threading.Event, request: Request, number: int
    ) -> Answer:
        """Get one response from the server, in a thread."""
        params = request.params
        low, high = keys.key_data(
            self.seed, purpose, request.problem_id, request.visit, number
        ).tolist()
        body = {
            "model": served.name,
            "prompt": request.prompt_ids.tolist(),
            "n": 1,
            "seed": (low | high << 32) >> 1,  # a signed integer of 64 bits
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "logprobs": 1,
            # vLLM's own:
            "stop_token_ids": params.stop_ids,
            "ignore_eos": True,  # those above are all
            "return_token_ids": True,
        }
        if params.stop:
            # The text has the string, so that it can be tokenised where the server gives no ids.
            body |= {"stop": list(params.stop), "include_stop_str_in_output": True}
        tokens = len(request.prompt_ids) + params.max_new_tokens
        url = f"{self._base}/completions"

        def ask(_: int) -> bytes:
            if stopped.is_set():  # while it waited for its place, or between attempts
                raise CancelledError
            with self.busy.request():
                return self._attempt("POST", url, body, tokens)

        with self._places:
            data = self._again(ask, stopped)
        return served, request, number, self._object(url, data)

    def _rollout(
        self, served: Served, request: Request, number: int, answer: dict[str, Any]
    ) -> Rollout:
        """Make a rollout of an answer. Raises EngineError for one that breaks the contract."""
        params = request.params
        choices = answer.get("choices")
        self._own["responses"] += 1  # in the main thread, like all that is kept here
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            what = "no choices"
            if isinstance(choices, list):
                what = f"{len(choices)} choices"
            raise self._wrong(
                f"an answer has {what}, for one that was asked",
                "check that engine.url is /v1 of vLLM",
            )
        choice = choices[0]
        finish, prompt = choice.get("finish_reason"), choice.get("prompt_token_ids")
        if finish not in ("stop", "length"):
            raise self._wrong(
                f"a response ended with finish_reason {finish!r:.50}", "look at its log"
            )
        if prompt is not None and prompt != request.prompt_ids.tolist():
            raise self._wrong(
                "it read another prompt than it was given", "switch off what changes prompts there"
            )
        ids = choice.get("token_ids")
        tokens = (
            self._tokenised(choice, params, answer.get("usage"))
            if ids is None
            else self._received_ids(ids, params)
        )
        drawn = len(tokens)
        end = self._end(tokens, params)
        # A server that reads a text otherwise, by its prompt say, has ended where it says so.
        named = finish == "stop" and choice.get("stop_reason") in params.stop
        stopped = end is not None or named or int(tokens[-1]) in params.stop_ids
        if finish == "stop" and not stopped and ids is not None:
            raise self._wrong(
                f"a response ended at token {tokens[-1]}, which is none of {list(params.stop_ids)}"
                + " and completes no stop string" * bool(params.stop),
                "start it with --generation-config vllm, so that it has no stop tokens of its own",
            )
        if not stopped and ids is not None and len(tokens) < params.max_new_tokens:
            raise self._wrong(
                f"a response was cut at {len(tokens)} of {params.max_new_tokens} tokens",
                "raise its --max-model-len to data.max_prompt_length + max_new_tokens at least",
            )
        tokens = tokens[:end]
        logprobs = self._logprobs(choice, drawn, served, request)[:end]
        entropies = np.full(len(tokens), np.nan, np.float32)
        if params.temperature == 0:
            entropies[:] = 0.0
        names = request.problem_id, request.visit, number
        reason: Literal["stop", "length"] = "stop" if stopped else "length"
        return Rollout(*names, request.prompt_ids, tokens, logprobs, entropies, reason)

    def _end(self, tokens: np.ndarray, params: SamplingParams) -> int | None:
        """Return how many tokens there are up to the first stop string, None without one: as the
        sampler finds it."""
        if not params.stop:
            return None
        return Watch(self.tokenizer.decode, params.stop).add(tokens)

    def _received_ids(self, ids: Any, params: SamplingParams) -> np.ndarray:
        """Return a response's ids, int32 [T]. Raises EngineError for what no sampler can have
        drawn."""
        if not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids):
            raise self._wrong(
                f"token_ids is {str(ids)!r:.80}, no list of numbers", "look at its version"
            )
        outermost = min(ids)
        if outermost >= 0:
            outermost = max(ids)
        if not 0 <= outermost < self.vocab_size:
            raise self._wrong(
                f"a response has token {outermost}, and the vocabulary {self.vocab_size}",
                "serve the model of this run, with its tokenizer",
            )
        if len(ids) > params.max_new_tokens or set(ids[:-1]) & set(params.stop_ids):
            raise self._wrong(
                f"a response has {len(ids)} tokens, beyond max_new_tokens "
                f"{params.max_new_tokens} or a stop token",
                "it does not heed max_tokens or stop_token_ids: use vLLM, or another version",
            )
        return np.array(ids, np.int32)

    def _tokenised(self, choice: dict[str, Any], params: SamplingParams, usage: Any) -> np.ndarray:
        """Return the ids of a response's text, int32 [T]: those that were drawn may be others."""
        text = choice.get("text")
        if not isinstance(text, str):
            raise self._wrong(
                "a response has neither token_ids nor text", "check that engine.url is /v1 of vLLM"
            )
        self.say(
            "engine: the server gives no token ids, so its text is tokenised again; the manifest "
            "counts them"
        )
        by_text = choice["finish_reason"] == "stop" and self._ended_by_text(choice, params)
        if by_text and not any(string in text for string in params.stop):
            text += choice["stop_reason"]  # the server cut it off
        ids = self.tokenizer.encode_text(text)
        if choice["finish_reason"] == "stop" and not by_text:
            ids.append(self.tokenizer.stop_id)
        told = usage.get("completion_tokens") if isinstance(usage, dict) else None
        other = (
            self.tokenizer.decode(ids) != text
            or told not in (None, len(ids))
            or len(ids) > params.max_new_tokens
        )
        self._own.update({"tokenised_again": 1, "other_ids": int(other)})
        if not ids:
            raise self._wrong(
                "a response is empty, and was not ended by a stop token", "look at its log"
            )
        return np.array(ids[: params.max_new_tokens], np.int32)

    def _ended_by_text(self, choice: dict[str, Any], params: SamplingParams) -> bool:
        """Return whether a stop string ended a response, which its text has or the server names."""
        return choice.get("stop_reason") in params.stop or any(
            string in choice["text"] for string in params.stop
        )

    def _logprobs(
        self, choice: dict[str, Any], length: int, served: Served, request: Request
    ) -> np.ndarray:
        """Return log-probabilities, float32 [T]; NaN where the server has none of what was drawn
        from."""
        if request.params.temperature == 0:
            return np.zeros(length, np.float32)  # a point mass, as our sampler has it
        given = choice.get("logprobs")
        if not given or choice.get("token_ids") is None or not self._is_scored(served, request):
            return self._without_logprobs(length)
        values = given.get("token_logprobs") if isinstance(given, dict) else None
        if not isinstance(values, list) or len(values) != length:
            raise self._wrong(
                f"{length} tokens have no log-probability each", "look at its version"
            )
        if any(
            type(x) not in (int, float) or not LEAST_LOGPROB <= x <= MOST_LOGPROB for x in values
        ):
            raise self._wrong(
                "a log-probability is no number, not finite or above 0",
                "its weights or activations may not be finite: check what it serves, and its dtype",
            )
        return np.minimum(np.array(values, np.float32), 0.0)

    def _without_logprobs(self, length: int) -> np.ndarray:
        why = (
            "the server gives none for the ids it drew, or not those after temperature and filters"
        )
        if self.needs_logprobs:
            raise self._wrong(
                f"a GRPO loss needs log-probabilities, and {why}",
                "start vLLM with --logprobs-mode processed_logprobs, or sample at temperature 1",
            )
        self.say(f"engine: log-probabilities are NaN: {why}")
        self._own["without_logprobs"] += 1
        return np.full(length, np.nan, np.float32)

    # Requests

    def _json(self, method: str, url: str, body: Any = None) -> dict[str, Any]:
        """Return the JSON object of an answer."""
        return self._object(url, self._bytes(method, url, body))

    def _object(self, url: str, data: bytes) -> dict[str, Any]:
        """Read an answer as a JSON object."""
        try:
            answer = json.loads(data)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            text = endpoint.shown(data.decode("utf-8", "replace"), self._key)
            raise self._wrong(
                f"{url} answers with what is no JSON object: {text}", "check engine.url"
            )
        return answer

    def _bytes(self, method: str, url: str, body: Any = None) -> bytes:
        """Return the answer to a request, tried again where there was none. Raises EngineError."""
        return self._again(lambda _: self._attempt(method, url, body))

    def _again(self, attempt: Callable[[int], T], stopped: threading.Event | None = None) -> T:
        """Return what an attempt, given its number from 0, returns: the first one that is not
        `_Lost`."""
        pause = stopped or threading.Event()
        for number in itertools.count():
            try:
                return attempt(number)
            except _Lost as error:
                if number == self.settings.retries or pause.is_set():
                    url, problem = error.args
                    raise self._wrong(
                        f"{url} failed {number + 1} times, the last time with {problem}",
                        "check that it runs, its log, engine.url and engine.timeout",
                    ) from error
            pause.wait(min(PAUSE * 2**number, 30.0))
        raise AssertionError  # the loop has no end

    def _attempt(self, method: str, url: str, body: Any = None, tokens: int = 0) -> bytes:
        """Return the answer to a request that is sent once. Raises _Lost, and EngineError for what
        stays so."""
        most, timeout = BYTES_A_TOKEN * (tokens + 1000), self.settings.timeout
        try:
            answer = endpoint.exchange(
                method, url, body, key=self._key, timeout=timeout, most_bytes=most
            )
        except (OSError, http.client.HTTPException) as error:
            raise _Lost(
                url, endpoint.shown(f"{type(error).__name__}: {error}", self._key)
            ) from error
        except ValueError as error:
            raise self._wrong(f"{url}: {error}", "look at its log") from error
        status = answer.status
        if status == 200:
            return answer.body
        problem = endpoint.shown(
            f"status {status}: {answer.body.decode('utf-8', 'replace')}", self._key
        )
        if status in RESTING or status >= 500:
            raise _Lost(url, problem)
        raise self._wrong(f"{url} answers {problem}", _advice(status, url))

    def _wrong(self, what: str, advice: str) -> EngineError:
        if self._key:
            what = what.replace(self._key, "***")
        return EngineError(
            f"the server of engine.url, {self.settings.url}: {what}. To try: {advice}; then start "
            "again: rollouts on disk are kept"
        )


def _prefix(label: str) -> str:
    """Return the first part of the names of policies with a label."""
    return PREFIX + f"{label}-" * bool(label)


def _own_share(requests: Iterable[Request]) -> list[Request]:
    """Return the requests that this process sends, of those that all processes have."""
    return list(requests)[processes.index() :: processes.count()]


def _sample(
    served: Served, purpose: str, request: Request, number: int
) -> tuple[Served, str, str, int, int]:
    """Return what names a sample, as its seed does, and the policy it is drawn from."""
    return served, purpose, request.problem_id, request.visit, number


def _jobs(requests: Iterable[Request]) -> Iterator[tuple[Request, int]]:
    """Yield each sample's request, with the settings of that sample, and its number."""
    for request in requests:
        for number in range(request.num_samples):
            yield replace(request, params=request.params_of(number)), number


def _advice(status: int, url: str) -> str:
    """Say what to do about a status that is no passing one."""
    if status in (401, 403):
        return "check the key in the variable that engine.api_key_env names"
    if 300 <= status < 400:
        return "redirects are not followed: set engine.url to where the server is"
    if status == 404 and not url.endswith("/completions"):
        return "start it by launch/vllm.sh, which serves what engine.sync needs"
    return "check engine.url and engine.model, and what it was started with (--max-model-len)"
