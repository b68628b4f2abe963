"""A completions server on this machine, of whose answers a test decides; or one that samples from
the weights it is given, as vLLM does. Also used by benchmarks/ahead.py."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = Callable[[dict[str, Any], int], Any]
"""Answers a completion's body, counted from 1: an object; (status, bytes) for anything else;
(status, bytes, length) to promise more bytes than come."""


def choice(
    ids: list[int], logprobs: list[float] | None = None, finish: str = "stop", **more: Any
) -> dict[str, Any]:
    """An answer as vLLM gives it."""
    scores = {"token_logprobs": logprobs if logprobs is not None else [-1.0] * len(ids)}
    return {
        "choices": [
            {
                "index": 0,
                "text": "",
                "finish_reason": finish,
                "token_ids": ids,
                "logprobs": scores,
                **more,
            }
        ]
    }


class Server:
    """asked: (path, body) of all requests. key: of the last one. weights: the version it holds.
    adapters: their names.
    unheard: paths, each taken out when a request to it is done and its answer cut. load: is called
    with the folder of weights that it is to hold. What is out of turn is refused as vLLM does.
    """

    def __init__(self, reply: Reply) -> None:
        self.reply, self.url, self.key, self.weights = reply, "", "", "default"
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.adapters: set[str] = set()
        self.unheard: list[str] = []
        self.load: Callable[[str], object] = str
        self.lock = threading.Lock()

    def completions(self) -> list[dict[str, Any]]:
        return [body for path, body in self.asked if path == "/v1/completions"]

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        with self.lock:
            self.asked.append((path, body))
            number = len(self.completions())
            refused = self.change(path, body)
        if path == "/v1/completions":
            return self.reply(body, number)
        if path in self.unheard:
            self.unheard.remove(path)
            return 200, b"{", 50
        names = [("served", None), *((name, "served") for name in self.adapters)]
        return refused or {
            "/v1/models": {"data": [{"id": name, "parent": parent} for name, parent in names]},
            "/weight_info": {"weight_version": self.weights},
        }.get(path, {})

    def change(self, path: str, body: dict[str, Any]) -> Any:
        """Do what a request asks for; return a refusal if it is out of turn."""
        adapter = body.get("lora_name", "")
        if path.endswith("_lora_adapter") and (adapter in self.adapters) == path.startswith(
            "/v1/load"
        ):
            return 400, b"already done"
        self.adapters ^= {adapter} if adapter else set()
        if path == "/collective_rpc":
            self.load(body["kwargs"]["weights_path"])
        self.weights = body.get("new_version") or self.weights
        return None


@contextmanager
def serving(reply: Reply) -> Iterator[Server]:
    """A server while the block lasts."""
    served = Server(reply)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            served.key = self.headers.get("Authorization", "")
            answer = served.answer(self.path, json.loads(data or b"{}"))
            status, body, *promised = (
                answer if isinstance(answer, tuple) else (200, json.dumps(answer).encode())
            )
            self.send_response(status)
            self.send_header("Location", "http://127.0.0.1:9/")
            self.send_header("Content-Length", str(promised[0] if promised else len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST

        def log_message(self, *_: Any) -> None:
            pass

        def handle(self) -> None:
            with suppress(OSError):  # the client went away
                super().handle()

    class Listening(ThreadingHTTPServer):
        request_queue_size = 64

    server = Listening(("127.0.0.1", 0), Handler)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    served.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def as_sampled(rollouts: Mapping[tuple[tuple[int, ...], int], Any]) -> Reply:
    """A server that answers with rollouts: by prompt and seed."""

    def reply(body: dict[str, Any], number: int) -> Any:
        rollout = rollouts[tuple(body["prompt"]), body["seed"]]
        ids, logprobs = rollout.token_ids.tolist(), rollout.logprobs.tolist()
        return choice(ids, logprobs, rollout.stop_reason, prompt_token_ids=body["prompt"])

    return reply


def after(seconds: Callable[[], float], reply: Reply) -> Reply:
    """A server that takes so long for each answer besides: the time of a device that is not
    here."""

    def slow(body: dict[str, Any], number: int) -> Any:
        time.sleep(seconds())
        return reply(body, number)

    return slow


class PolicySampler:
    """A Reply that samples from the folder of weights which `load` was given last, with the
    library's own sampler: the same ids and log-probabilities for the same weights, prompt and seed,
    in whatever order and company they come. Requests that wait are sampled together.

    shapes: prompts of at most so many tokens, responses of at most so many.
    """

    def __init__(self, prompt: int, response: int) -> None:
        self.longest = prompt, response
        self.policy: Any = None
        self.waiting: queue.Queue[tuple[dict[str, Any], Future[Any]]] = queue.Queue()
        threading.Thread(target=self._work, daemon=True).start()

    def __call__(self, body: dict[str, Any], number: int) -> Any:
        answer: Future[Any] = Future()
        self.waiting.put((body, answer))
        return answer.result()

    def load(self, folder: str) -> None:
        from g2d_jax.models import hf

        sampler = _sampler(hf.read_config(folder))
        self.policy = sampler, sampler.to_sampler_params(hf.load(folder, mesh=sampler.mesh))

    def _work(self) -> None:
        while True:
            taken = [self.waiting.get()]
            with suppress(queue.Empty):
                while True:
                    taken.append(self.waiting.get_nowait())
            answers = dict(taken_answers(taken))
            try:
                for rollout in self._sampled([body for body, _ in taken]):
                    ids, logprobs = rollout.token_ids.tolist(), rollout.logprobs.tolist()
                    answers[rollout.problem_id].set_result(
                        choice(ids, logprobs, rollout.stop_reason)
                    )
            except BaseException as error:  # the trainer is told, and says so
                for _, answer in taken:
                    if not answer.done():
                        answer.set_result((500, repr(error).encode()))

    def _sampled(self, bodies: list[dict[str, Any]]) -> Iterator[Any]:
        import numpy as np

        from g2d_jax.records import Request, SamplingParams

        sampler, weights = self.policy
        prompt, response = self.longest
        requests = []
        for body in bodies:
            params = SamplingParams(
                body["max_tokens"], body["temperature"], stop_ids=tuple(body["stop_token_ids"])
            )
            ids = np.array(body["prompt"], np.int32)
            requests.append(Request(str(body["seed"]), ids, params))
        params = [SamplingParams(response, stop_ids=requests[0].params.stop_ids)]
        shapes = sampler.shapes(64, 256, params, [prompt])
        return sampler.generate(weights, requests, "served", shapes)


def taken_answers(taken: list[tuple[dict[str, Any], Future[Any]]]) -> Iterator[tuple[str, Any]]:
    """The answers by seed, which no two requests of a policy share."""
    for body, answer in taken:
        yield str(body["seed"]), answer


@cache
def _sampler(config: Any) -> Any:
    import jax

    from g2d_jax.runtime.mesh import make_mesh
    from g2d_jax.sampler.engine import Sampler

    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    return Sampler(config, mesh, seed=0, max_num_seqs=64)
