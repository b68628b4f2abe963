"""An OpenAI-style server that samples in the sampler's place, as vLLM 0.32 serves it: the Engine of
`engine.*`.

    to_sampler_params: policy ─► a folder that the server sees too ─► loaded there: by folder or by adapter
    generate:          requests ─► POST /completions, one a sample with its seed, `concurrency` at a time ─► rollouts
    ask_ahead:         the same requests, sent while the caller does something else; `generate` then has the answers

How it is asked is in connection.py, how its answers are read in answers.py. After an EngineError the
call's rollouts are drawn again when the run is continued.
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
"""The first part of the names of policies that are written for a server."""


class Served(NamedTuple):
    """A policy on the server: the name that requests give, and the version of its weights if the
    server tells that."""

    name: str
    version: str = ""


Job = tuple[Request, int]
"""One sample of a request: the request, with the settings of that sample, and its number."""


class _Asked:
    """The requests that were sent ahead, whose answers come by sample.

    They wait as compressed JSON, a fifteenth of what the objects take: a whole window of them does.
    """

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.answers: dict[tuple[Any, ...], Future[bytes]] = {}


@dataclass(eq=False, repr=False)
class Remote:
    """The Engine behind engine.url. Give it its settings, checked by `check`, and where policies
    are written for it.

    seed: of the run. dtype: of the weights that are written. say: shows the user a message.
    busy: the clock of this process's requests.
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
        self._loaded = ""  # the version that this process had the server load last
        self._as_drawn: bool | None = None

    @functools.cached_property
    def model(self) -> str:
        """The name that the server has for its model: engine.model, or the only one it lists.
        Raises EngineError."""
        wanted = self.settings.model
        names = [name for name, is_adapter in self.connection.models().items() if not is_adapter]
        if wanted in names or (not wanted and len(names) == 1):
            return wanted or names[0]
        listing = self.connection.shown(", ".join(names)) or "no model"
        raise self.connection.wrong(f"it serves {listing}", "set engine.model to the one to ask")

    def to_sampler_params(self, model: Decoder, label: str = "") -> Served:
        """Have the server load a policy; all processes make the call. With sync="none" it is taken
        to hold it.

        label: by which a later start finds what was written, see `restore`.
        Raises EngineError if it cannot be loaded.
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
        self.connection.busy.take()
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
        with processes.barrier():  # the error of one process is that of all
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

            # As many again as are asked at once: a thread that is done finds its next request here.
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
                # After an error what is under way ends, and no more is sent.
                stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
            self._check_held(sampler_params)

    # The policy

    def _load(self, version: str, again: bool = False) -> None:
        """Have the server load the policy in the folder of its version; then remove those of
        others. again: whether it may have it."""
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
        """Raise EngineError if the server holds the weights of another policy. (It forgets an
        adapter's name.)"""
        if not served.version:
            return
        held = self.connection.held_version()
        if held != served.version:
            raise self.connection.wrong(
                f"it holds the weights {self.connection.shown(repr(held))}, not "
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
            prompt = request.prompt_ids.tolist()
            cool, warm = (self.connection.likeliest(served.name, prompt, t) for t in (1.0, 2.0))
            shared = cool.keys() & warm.keys()
            self._as_drawn = any(abs(cool[token] - warm[token]) > MOST_LOGPROB for token in shared)
        return self._as_drawn

    # Sampling

    def _draw(
        self, served: Served, purpose: str, stopped: threading.Event, request: Request, number: int
    ) -> dict[str, Any]:
        """Get the answer of one sample from the server, in a thread."""
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
            "ignore_eos": True,  # those above are all
            "return_token_ids": True,
        }
        if params.stop:
            # The text has the string, so that it can be tokenised where the server gives no ids.
            body |= {"stop": list(params.stop), "include_stop_str_in_output": True}
        tokens = len(request.prompt_ids) + params.max_new_tokens
        return self.connection.complete(body, tokens, stopped)


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


def _jobs(requests: Iterable[Request]) -> Iterator[Job]:
    """Yield each sample of some requests."""
    for request in requests:
        for number in range(request.num_samples):
            yield replace(request, params=request.params_of(number)), number
