"""The Engine of `engine.*`: an OpenAI-style server (vLLM 0.32) that samples in place of the
sampler.

    to_sampler_params: policy ─► a folder that the server can read ─► loaded there as weights or adapter
    generate:          requests ─► POST /completions, one per sample with its seed, `concurrency` at once ─► rollouts
    ask_ahead:         the same requests, sent in the background; `generate` then has the answers

connection.py sends the requests, answers.py reads the answers. After an EngineError, continue the
run: it samples the call's rollouts again.
"""

from __future__ import annotations

import functools
import itertools
import json
import threading
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, NamedTuple

from etils import epath

from g2d_jax.config import Engine as Settings
from g2d_jax.data.tokenizer import PromptTokenizer
from g2d_jax.models import hf
from g2d_jax.models.decoder import Decoder
from g2d_jax.models.hf_folder import ADAPTERS
from g2d_jax.records import MOST_LOGPROB, Request, Rollout
from g2d_jax.runtime import keys, processes
from g2d_jax.runtime.threads import in_daemons
from g2d_jax.sampler.answers import Reader
from g2d_jax.sampler.connection import PLAIN, Connection
from g2d_jax.sampler.programs import Shapes

PREFIX = "g2d-"
"""Prefix of the names of policies that are written for a server."""


class Served(NamedTuple):
    """A policy on the server: the model name in requests, and the version of its weights if the
    server reports it."""

    name: str
    version: str = ""


Job = tuple[Request, int]
"""One sample: its request, with that sample's settings, and its number."""


class _Asked:
    """Requests that were sent ahead, with the answers by sample.

    A whole window of answers waits as compressed JSON, a fifteenth of the size of the objects.
    """

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.answers: dict[tuple[Any, ...], Future[bytes]] = {}


@dataclass(eq=False, repr=False)
class Remote:
    """The Engine at engine.url.

    settings: checked by `config.check`. folder: for the policies that it writes. seed: of the run.
    dtype: of the written weights. say: shows the user a message. busy: the clock of this process's
    requests.
    """

    settings: Settings
    folder: epath.Path
    tokenizer: PromptTokenizer
    vocab_size: int
    _: KW_ONLY
    seed: int
    dtype: str
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self.say = functools.cache(self.say)  # once each
        self.ready = 0
        self.connection = Connection(self.settings)
        self.busy = self.connection.busy
        self._reader = Reader(self.tokenizer, self.vocab_size, self.connection.wrong, self.say)
        self._asked = _Asked()
        self._forgotten: list[Future[bytes]] = []
        self._loaded = ""  # the version that the server last loaded for this process
        self._as_drawn: bool | None = None

    @functools.cached_property
    def model(self) -> str:
        """The model's name on the server: engine.model, or the only one it lists. Raises
        EngineError."""
        wanted = self.settings.model
        names = [name for name, is_adapter in self.connection.models().items() if not is_adapter]
        if wanted in names or (not wanted and len(names) == 1):
            return wanted or names[0]
        listing = self.connection.shown(", ".join(names)) or "no model"
        raise self.connection.wrong(f"it serves {listing}", "set engine.model to one of its models")

    def to_sampler_params(self, model: Decoder, label: str = "") -> Served:
        """Make the server load a policy. With sync="none" it is assumed to have it. All processes
        make the call.

        label: by which a later start finds the written policy, see `restore`. Raises EngineError if
        it cannot be loaded.
        """
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
        """Make the server load the policy of this label that was written last, by this start or an
        earlier one. Return None if it is gone, or of another kind than `sync`. All processes make
        the call."""
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
        """Make the server load a version's folder. name: of the model there. again: whether it may
        be loaded already."""
        # Running requests without a reader hold blocks of the prefix cache, which then cannot be
        # reset.
        with processes.barrier():
            wait(self._forgotten)
        self._forgotten = []
        self.connection.busy.take()
        processes.on_leader(lambda: self._load(version, again))
        self._loaded = version
        if self.settings.sync == "adapter":
            return Served(version)
        return Served(name, version)

    def ask_ahead(
        self, sampler_params: Served, calls: Iterable[Sequence[Request]], purpose: str
    ) -> None:
        """Send the requests of later calls of `generate` with the same arguments; those return the
        answers and raise the errors. All processes make the call.

        Threads send the requests in the order of the calls.
        """
        with processes.barrier():
            self._check_held(sampler_params)
        stopped = self._asked.stopped

        def draw(job: Job) -> bytes:
            answer = self._draw(sampler_params, purpose, stopped, *job)
            return zlib.compress(json.dumps(answer).encode(), 1)

        jobs: list[Job] = []
        for requests in calls:
            jobs += _jobs(_own_share(requests))
        futures = in_daemons(draw, jobs, self.settings.concurrency)
        for job, future in zip(jobs, futures, strict=True):
            self._asked.answers[_sample(sampler_params, purpose, *job)] = future

    def forget(self) -> None:
        """Cancel the requests that were to be sent ahead, and drop the answers. The next load of a
        policy waits for running requests."""
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
        """Yield the rollouts of this process's share of the requests as they finish, in no
        particular order.

        All processes make the call, with the same requests. sampler_params: from
        `to_sampler_params`. purpose: determines the random numbers as in `Sampler.generate`.
        shapes: unused. Entropies are NaN, and so are log-probabilities if the server's are not
        those of the sampling distribution; greedy ones are 0. Raises EngineError.
        """
        jobs = _jobs(_own_share(requests))
        with processes.barrier():  # all processes raise the error of one
            self._check_held(sampler_params)
            stopped = threading.Event()
            pool = ThreadPoolExecutor(self.settings.concurrency)

            def begin(job: Job) -> Future[Any]:
                asked = self._asked.answers.pop(_sample(sampler_params, purpose, *job), None)
                if asked is not None:
                    return asked
                return pool.submit(self._draw, sampler_params, purpose, stopped, *job)

            def is_scored(request: Request) -> bool:
                return self._is_scored(sampler_params, request)

            # Twice `concurrency`, so that a free thread finds its next request queued.
            first = itertools.islice(jobs, 2 * self.settings.concurrency)
            waiting = {begin(job): job for job in first}
            try:
                while waiting:
                    future = next(processes.completed_interruptible(waiting))
                    job = waiting.pop(future)
                    self.ready = sum(other.done() for other in waiting)
                    answer = future.result()
                    if isinstance(answer, bytes):
                        answer = json.loads(zlib.decompress(answer))
                    yield self._reader.rollout(*job, answer, is_scored)
                    waiting |= {begin(job): job for job in itertools.islice(jobs, 1)}
            finally:
                # After an error, running requests end and no further one is sent.
                stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
            self._check_held(sampler_params)

    # The policy

    def _load(self, version: str, again: bool = False) -> None:
        """Make the server load a version's folder; then remove the folders of other versions.
        again: whether it may be loaded already."""
        place = self.folder / version
        if self.settings.sync == "adapter":
            if not (again and version in self.connection.models()):
                self.connection.set_adapter("load", version, lora_path=str(place))
            if self._loaded:
                self.connection.set_adapter("unload", self._loaded)
        else:
            self.connection.load_folder(str(place), version)
        for other in self.folder.glob(f"{PREFIX}*"):
            if other.name != version:
                other.rmtree()

    def _check_held(self, served: Served) -> None:
        """Raise EngineError if the server has another policy's weights. (Requests for an unloaded
        adapter fail by themselves.)"""
        if not served.version:
            return
        held = self.connection.held_version()
        if held != served.version:
            raise self.connection.wrong(
                f"it has the weights {self.connection.shown(repr(held))}, not "
                f"{served.version!r} as loaded: it was restarted, or another run uses it too",
                "give each run a server of its own",
            )

    def _is_scored(self, served: Served, request: Request) -> bool:
        """Return whether the server's log-probabilities are those of the sampling distribution.

        At temperature 1 without filters they are. Otherwise one query for the likeliest tokens at
        temperatures 1 and 2 decides: they differ if the server applies the temperature first (vLLM:
        --logprobs-mode processed_logprobs).
        """
        params = request.params
        if params.temperature == 1.0 and params.top_p == 1.0 and params.top_k == 0:
            return True
        if self._as_drawn is None:
            prompt = request.prompt_ids.tolist()
            cool, warm = (self.connection.likeliest(served.name, prompt, t) for t in (1.0, 2.0))
            shared = cool.keys() & warm.keys()
            self._as_drawn = any(abs(cool[token] - warm[token]) > MOST_LOGPROB for token in shared)
        return self._as_drawn

    # Sampling

    def _draw(
        self, served: Served, purpose: str, stopped: threading.Event, request: Request, number: int
    ) -> dict[str, Any]:
        """Request one sample from the server, in a thread."""
        params = request.params
        low, high = keys.key_data(
            self.seed, purpose, request.problem_id, request.visit, number
        ).tolist()
        body = {
            **PLAIN,
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
            "ignore_eos": True,  # stop_token_ids has them all
            "return_token_ids": True,
        }
        if params.stop:
            # Keep the string in the text, which is tokenised here if the server returns no ids.
            body |= {"stop": list(params.stop), "include_stop_str_in_output": True}
        tokens = len(request.prompt_ids) + params.max_new_tokens
        return self.connection.complete(body, tokens, stopped)


def _prefix(label: str) -> str:
    """Return the prefix of the names of policies with a label."""
    return PREFIX + f"{label}-" * bool(label)


def _own_share(requests: Iterable[Request]) -> list[Request]:
    """Return the part of all processes' requests that this process sends."""
    return list(requests)[processes.index() :: processes.count()]


def _sample(
    served: Served, purpose: str, request: Request, number: int
) -> tuple[Served, str, str, int, int]:
    """Return the key of a sample: its policy, and the names that determine its seed."""
    return served, purpose, request.problem_id, request.visit, number


def _jobs(requests: Iterable[Request]) -> Iterator[Job]:
    """Yield each sample of some requests."""
    for request in requests:
        for number in range(request.num_samples):
            yield replace(request, params=request.params_of(number)), number
