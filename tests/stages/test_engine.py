"""A server in the sampler's place: the same shards as the sampler's, and what becomes of one that
fails or lies."""

import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_server import Server, as_sampled, choice, serving
from etils import epath
from ml_collections import ConfigDict
from safetensors.numpy import load_file
from worlds import bits, only, run

from g2d_jax import commands, pipeline
from g2d_jax.config import Config, Engine
from g2d_jax.config.io import to_dict
from g2d_jax.data.template import TemplateSettings
from g2d_jax.data.tokenizer import PromptTokenizer, load_tokenizer
from g2d_jax.models.hf import fetcher
from g2d_jax.records import Request, Rollout, SamplingParams
from g2d_jax.report.run import write_run
from g2d_jax.report.runs import read_run
from g2d_jax.runtime import endpoint, keys, storage
from g2d_jax.runtime.tables import read_rollouts
from g2d_jax.runtime.tracking import read_metrics
from g2d_jax.sampler.connection import EngineError
from g2d_jax.sampler.remote import Remote, Served
from g2d_jax.session.policies import load_policy
from g2d_jax.session.workdir import write_settings
from g2d_jax.stages import run_issues

PROMPT = np.array([3, 4, 5], np.int32)
REDIRECT, BYTES = (302, b""), (200, b"x" * 20_000_000)


@pytest.fixture(scope="module")
def tokenizer() -> PromptTokenizer:
    return load_tokenizer("procedural:slips", TemplateSettings())


Drawn = Callable[..., list[Rollout]]


@pytest.fixture
def draw(tokenizer: PromptTokenizer, tmp_path: Path) -> Drawn:
    """Samples of one prompt from a server, by an engine with these settings. said: its messages."""

    def draw(
        server: Server,
        said: list[str] | None = None,
        needs: bool = False,
        greedy: bool = False,
        **sampling: Any,
    ) -> list[Rollout]:
        settings = Engine(kind="server", url=server.url, timeout=10.0, retries=0)
        settings = replace(
            settings, **{k: sampling.pop(k) for k in ("retries", "timeout") if k in sampling}
        )
        say = (said if said is not None else []).append
        named = {"seed": 7, "dtype": "float32", "say": say}
        remote = Remote(settings, epath.Path(tmp_path), tokenizer, tokenizer.vocab_size, **named)
        params = SamplingParams(4, stop_ids=(tokenizer.stop_id,), **sampling)
        asked = {"num_samples": 3, "visit": 2, "greedy": greedy, "needs_logprobs": needs}
        request = Request("problem", PROMPT, params, **asked)
        return sorted(
            remote.generate(Served("served"), [request], "purpose"), key=lambda r: r.sample
        )

    return draw


def test_online_training_is_that_on_the_samplers_own_rollouts(
    config: ConfigDict, tmp_path: Path, opened: Any
) -> None:
    """Shards, weights that the server was given, and the trained policy."""
    config = only(config, "warmup")
    config.stages.warmup.update(steps=4, sync_every=2, clip={"importance_cap": 2.0})
    own = opened(config, tmp_path / "own")
    run(own)
    shards = {
        part.name: read_rollouts(part)
        for part in (tmp_path / "own/01-warmup/rollouts").glob("*.parquet")
    }
    seeds = {}
    for rollout in (row.rollout for rows in shards.values() for row in rows):
        low, high = keys.key_data(
            0, "online/warmup", rollout.problem_id, rollout.visit, rollout.sample
        ).tolist()
        seeds[tuple(rollout.prompt_ids.tolist()), (low | high << 32) >> 1] = rollout
    given: list[dict[str, np.ndarray]] = []
    sampled = as_sampled(seeds)

    def reply(body: dict[str, Any], number: int) -> Any:
        if number in (1, 33):  # the first of each interval
            given.append(
                load_file(next((tmp_path / "there/engine").glob("g2d-*/model.safetensors")))
            )
        return sampled(body, number)

    with serving(reply) as server:
        config.engine.update(kind="server", url=server.url, sync="folder")
        there = opened(config, tmp_path / "there")
        run(there)
        told = [path for path, _ in server.asked if path != "/v1/completions"]
    assert len(server.completions()) == 64 and len(shards) == 4
    loading = [
        "/collective_rpc",
        "/update_weight_version",
        "/reset_prefix_cache",
        "/weight_info",
        "/weight_info",
    ]
    assert told == ["/v1/models", *loading, *loading]
    for name, rows in shards.items():
        for mine, theirs in zip(
            rows, read_rollouts(tmp_path / "there/01-warmup/rollouts" / name), strict=True
        ):
            assert (mine.text, mine.score, mine.rollout.stop_reason) == (
                (theirs.text, theirs.score, theirs.rollout.stop_reason)
            )
            assert bits([mine.rollout.token_ids, mine.rollout.logprobs]) == bits(
                [theirs.rollout.token_ids, theirs.rollout.logprobs]
            )
            assert np.isnan(theirs.rollout.entropies).all()
    assert bits(load_policy(own, "warmup")) == bits(load_policy(there, "warmup"))
    name = "model.norm.weight"
    assert np.array_equal(
        given[0][name], fetcher(load_policy(own, "init"), np.dtype("float32"))(name)
    )
    assert not np.array_equal(given[0][name], given[1][name])


def test_a_server_that_goes_loses_no_shard(config: ConfigDict, tmp_path: Path, opened: Any) -> None:
    config = only(config, "collect")
    config.compute.generation_batch_size = 16  # a part of 4 prompts a call
    config.engine.update(kind="server", timeout=5.0, retries=1)

    def reply(
        body: dict[str, Any], number: int
    ) -> Any:  # text alone; odd samples are odd in length
        return {"choices": [{"text": "1" * (1 + body["seed"] % 2), "finish_reason": "stop"}]}

    with serving(
        lambda body, number: reply(body, number) if number <= 16 else (503, b"busy")
    ) as server:
        config.engine.url = server.url
        with pytest.raises(
            EngineError,
            match=r"failed 2 times, the last time with status 503: busy.*rollouts on disk",
        ):
            run(opened(config, tmp_path))
    file = tmp_path / "01-collect/rollouts/part-00000.parquet"
    written = file.read_bytes()
    with serving(reply) as server:
        config.engine.url = server.url
        manifest = run(opened(config, tmp_path))
        assert len(server.completions()) == 16 and manifest.counts["rollouts"] == 32
    assert file.read_bytes() == written
    storage.write_json(tmp_path / "config.json", {"config": to_dict(Config.of(config))})
    _, page, _ = write_run(read_run(tmp_path), figures=False)
    text = Path(page).read_text("utf-8")
    assert "| pass rate % | 53.1 |" in text
    assert "nan" not in text


def test_requests_and_answers(
    draw: Drawn, tokenizer: PromptTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sk-secret")
    stop = tokenizer.stop_id
    ids = {0: [4, stop], 1: [4, 5, 6, 7], 2: [stop]}

    def seed(sample: int) -> int:
        return (
            int.from_bytes(keys.key_data(7, "purpose", "problem", 2, sample).tobytes(), "little")
            >> 1
        )

    by_seed = {seed(sample): tokens for sample, tokens in ids.items()}

    def reply(body: dict[str, Any], number: int) -> Any:
        tokens = by_seed[body["seed"]]
        finish = "length" if len(tokens) == 4 else "stop"
        return choice(
            tokens, [-0.5] * (len(tokens) - 1) + [1e-7], finish, prompt_token_ids=body["prompt"]
        )

    with serving(reply) as server:
        rollouts = draw(server, needs=True)
        body = server.completions()[0]
        # greedy: a point mass
        assert draw(server, temperature=0.0)[1].logprobs.tolist() == [0.0] * 4
        asked = len(server.completions())
        draw(server, greedy=True)
        asked_with = {body["seed"]: body["temperature"] for body in server.completions()[asked:]}
        assert [asked_with[seed(sample)] for sample in range(3)] == [1.0, 1.0, 0.0]
    assert server.key == "Bearer sk-secret"
    assert {name: body[name] for name in body if name not in ("seed", "prompt")} == {
        **{
            "model": "served",
            "n": 1,
            "max_tokens": 4,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "logprobs": 1,
        },
        # or the server would take the model's own, of its generation_config.json
        **{"min_p": 0.0, "repetition_penalty": 1.0},
        **{"presence_penalty": 0.0, "frequency_penalty": 0.0},
        **{"stop_token_ids": [stop], "ignore_eos": True, "return_token_ids": True},
    }
    assert body["prompt"] == [3, 4, 5]
    assert [r.token_ids.tolist() for r in rollouts] == [ids[0], ids[1], ids[2]]
    assert [r.stop_reason for r in rollouts] == ["stop", "length", "stop"]
    assert (
        rollouts[1].logprobs.tolist() == [-0.5, -0.5, -0.5, 0.0]
        and rollouts[1].logprobs.dtype == np.float32
    )
    assert np.isnan(rollouts[1].entropies).all()


LIES = {
    "token 99999, but the vocabulary": choice([99999, 1]),
    "token -1, but the vocabulary": choice([-1, 1]),
    "5 tokens and goes beyond max_new_tokens 4": choice([4, 4, 4, 4, 1]),
    "2 tokens and goes beyond max_new_tokens 4 or a stop token": choice([1, 1]),
    "token_ids is .*not a list of numbers": choice([True, 1]),
    "ended at token 4, which is not in": choice([4]),
    "cut off at 2 of 4 tokens.*max-model-len": choice([4, 4], finish="length"),
    "finish_reason 'abort'": choice([4], finish="abort"),
    "log-probability 0.5;": choice([1], [0.5]),
    "log-probability nan;": choice([1], [float("nan")]),
    r"log-probability -1e\+30;": choice([4, 1], [-1.0, -1e30]),
    "log-probability -9999.0;": choice([1], [-9999.0]),
    "log-probability True;": choice([1], [True]),
    "not all of the 1 tokens have a log-probability": choice([1], [-1.0, -1.0]),
    "another prompt": choice([1], prompt_token_ids=[3, 4]),
    "2 choices; the request was for one": {"choices": choice([1])["choices"] * 2},
    "no choices": {"error": "none"},
    "no JSON object: <html>": (200, b"<html>\x1b[31m login"),
    r"neither token_ids nor text": {"choices": [{"finish_reason": "stop"}]},
    r"cannot be tokenised again: .*'a\\ud800b'.*let it return token ids": {
        "choices": [{"text": "a\ud800b", "finish_reason": "stop"}]
    },
    r"cannot be tokenised again: .*'\\x00'.*let it return token ids": {
        "choices": [{"text": "\0", "finish_reason": "stop"}]
    },
    r"status 302.*redirects are not followed": REDIRECT,
    r"status 401: \*\*\* is wrong.*api_key_env": (401, b"sk-secret is wrong"),
    r"status 400.*--max-model-len": (400, b"too long"),
    r"more than [\d,]+ bytes": BYTES,
    r"failed 1 times.*IncompleteRead": (200, b"{", 50),
    r"failed 1 times.*status 500": (500, b""),
}


@pytest.mark.parametrize("message", LIES)
def test_lies_are_named(
    draw: Drawn, tokenizer: PromptTokenizer, monkeypatch: pytest.MonkeyPatch, message: str
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sk-secret")
    assert tokenizer.stop_id == 1
    with (
        serving(lambda body, number: LIES[message]) as server,
        pytest.raises(EngineError, match=message) as error,
    ):
        draw(server)
    assert (
        "sk-secret" not in str(error.value)
        and "\x1b" not in str(error.value)
        and "To try: " in str(error.value)
    )


def test_slow_servers_and_no_servers_are_named_and_passing_faults_are_tried_again(
    draw: Drawn,
) -> None:
    def slow(body: dict[str, Any], number: int) -> Any:
        time.sleep(1.0)
        return choice([1])

    with serving(slow) as server, pytest.raises(EngineError, match="TimeoutError"):
        draw(server, timeout=0.3)
    with pytest.raises(EngineError, match="ConnectionRefusedError"):
        draw(server)
    for cut in ((200, b"{", 50), (200, b'{"choices": [{"text": "\xc3'), (200, b"")):
        with serving(lambda body, number: choice([1]) if number > 1 else cut) as server:  # noqa: B023
            assert len(draw(server, retries=1)) == 3 and len(server.completions()) == 4


def test_the_least_log_probability_that_float32_can_draw(draw: Drawn) -> None:
    least = float(np.log(np.finfo(np.float32).smallest_subnormal))
    assert -103.5 < least < -103
    with serving(lambda body, number: choice([1], [least])) as server:
        assert draw(server)[0].logprobs.tolist() == [np.float32(least)]


@pytest.mark.parametrize("drop", [b"x", b"a: b\r\n"])
def test_headers_that_drip_end_at_the_deadline(drop: bytes) -> None:
    def drip() -> None:
        connection, _ = listening.accept()
        with connection, suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\n")
            while True:
                connection.sendall(drop)
                time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=drip, daemon=True).start()
        started, url = time.monotonic(), f"http://127.0.0.1:{listening.getsockname()[1]}/"
        with pytest.raises(TimeoutError, match=r"not complete after 0\.5 s"):
            endpoint.exchange("GET", url, timeout=0.5, most_bytes=1000)
        assert time.monotonic() - started < 5


RELOAD, VERSION = "/collective_rpc", "/update_weight_version"
LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"
MODELS = "/v1/models"
RESET = "/reset_prefix_cache"
LOADS = {
    "adapter": [LOAD, LOAD, MODELS, LOAD, UNLOAD, UNLOAD, MODELS],
    "folder": [RELOAD, RELOAD, VERSION, VERSION, RESET, RELOAD, VERSION, RESET],
}


@pytest.mark.parametrize("sync", LOADS)
def test_a_load_whose_answer_is_lost_is_done_again(
    config: ConfigDict, tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch, sync: str
) -> None:
    """An adapter that is there counts as loaded; weights are loaded again."""
    monkeypatch.setattr("g2d_jax.sampler.connection.PAUSE", 0.0)
    config = only(config, "collect")
    config.lora.rank = 2 if sync == "adapter" else 0
    with serving(lambda body, number: choice([1])) as server:
        config.engine.update(kind="server", url=server.url, sync=sync)
        server.unheard = {"adapter": [LOAD, UNLOAD], "folder": [RELOAD, VERSION]}[sync]
        session = opened(config, tmp_path)
        policy = load_policy(session, "init")
        for _ in range(2):
            held = session.sampling.engine.to_sampler_params(policy)
        assert [path for path, _ in server.asked[1:]] == LOADS[sync] and not server.unheard
    assert (server.adapters, server.weights) == (
        ({held.name}, "default") if held.version == "" else (set(), held.version)
    )


def test_runs_that_share_a_folder_remove_their_own_policies(
    config: ConfigDict, tmp_path: Path, opened: Any
) -> None:
    config = only(config, "collect")
    with serving(lambda body, number: choice([1])) as server:
        config.engine.update(
            kind="server", url=server.url, sync="folder", folder=str(tmp_path / "shared")
        )
        for workdir in ("a", "b", "a"):
            session = opened(config, tmp_path / workdir)
            held = session.sampling.engine.to_sampler_params(load_policy(session, "init"))
            folders = list((tmp_path / "shared").glob("*/g2d-*"))
            assert held.version in {folder.name for folder in folders}
    assert len(folders) == 2 and len({folder.parent for folder in folders}) == 2


def test_text_is_tokenised_again_and_what_is_amiss_is_said(
    draw: Drawn, tokenizer: PromptTokenizer
) -> None:
    ids = tokenizer.encode_text("1 + 1")
    said: list[str] = []

    def reply(body: dict[str, Any], number: int) -> Any:
        text = {"text": "1 + 1", "finish_reason": "stop", "index": 0}
        return {
            "choices": [text],
            "usage": {"completion_tokens": len(ids) + (1 if number < 3 else 2)},
        }

    with serving(reply) as server:
        rollouts = draw(server, said)
        with pytest.raises(EngineError, match="GRPO loss needs log-probabilities"):
            draw(server, needs=True)
    cut = [*ids, tokenizer.stop_id][:4]
    assert [r.token_ids.tolist() for r in rollouts] == [cut] * 3
    assert all(np.isnan(r.logprobs).all() for r in rollouts) and len(said) == 3


def test_log_probs_before_the_temperature_are_left_out(draw: Drawn) -> None:
    """A server is asked once at two temperatures: its answers differ if it gives them after the
    temperature."""

    def reply(processed: bool) -> Callable[[dict[str, Any], int], Any]:
        def answer(body: dict[str, Any], number: int) -> Any:
            top = {"a": -0.1, "b": -2.4 / (body["temperature"] if processed else 1)}
            made = choice([1], [-0.7])
            made["choices"][0]["logprobs"]["top_logprobs"] = [top]
            return made

        return answer

    with serving(reply(True)) as server:
        assert draw(server, temperature=0.5)[0].logprobs.tolist() == [np.float32(-0.7)]
        asked = server.completions()
        assert len(asked) == 5
        # a penalty or a filter of the model's own would hide what the temperature does
        assert {(body["repetition_penalty"], body["min_p"], body["top_k"]) for body in asked} == {
            (1.0, 0.0, 0)
        }
    said: list[str] = []
    with serving(reply(False)) as server:
        assert np.isnan(draw(server, said, temperature=0.5)[0].logprobs).all() and len(said) == 1
        assert draw(server)[0].logprobs.tolist() == [np.float32(-0.7)]
        with pytest.raises(EngineError, match="processed_logprobs"):
            draw(server, needs=True, top_p=0.9)


def test_a_server_with_another_policy_is_not_believed(
    draw: Drawn, tokenizer: PromptTokenizer, tmp_path: Path
) -> None:
    with serving(lambda body, number: choice([1])) as server:
        settings = Engine(kind="server", url=server.url, model="mine")
        named = {"seed": 0, "dtype": "float32", "say": print}
        remote = Remote(settings, epath.Path(tmp_path), tokenizer, 20, **named)
        request = Request("problem", PROMPT, SamplingParams(4, stop_ids=(1,)))
        with pytest.raises(EngineError, match="has the weights 'default', not 'g2d-1'"):
            list(remote.generate(Served("served", "g2d-1"), [request], "purpose"))
        with pytest.raises(EngineError, match=r"it serves served.*engine\.model"):
            _ = remote.model
        assert not server.completions()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages.warmup.sync_every": 1}, "warmup.sync_every is 1"),
        ({"stages.warmup.clip.importance_cap": 0.0}, "warmup.*importance_cap"),
        (
            {"stages.collect.select": "uncertain", "stages.collect.max_pairs": 4},
            "collect.*entropies",
        ),
        (
            {
                "stages.collect.rollouts": "archive",
                "stages.collect.select": "confident",
                "stages.collect.max_pairs": 4,
            },
            "collect.*entropies",
        ),
        ({"engine.sync": "none"}, r"engine\.sync is 'none'.*sample from"),
        ({"engine.sync": "adapter"}, r"engine\.sync is 'adapter', but lora\.rank"),
        (
            {"engine.url": "http://me:pw@host/v1"},
            "engine.url holds a URL with a user name",
        ),
        ({"engine.url": "http://elsewhere:8000/v1"}, "engine.api_key_env .*VLLM_API_KEY"),
        ({"engine.url": ""}, "engine.url .* '' is not an endpoint"),
    ],
)
def test_settings_are_refused(config: ConfigDict, changes: dict[str, Any], message: str) -> None:
    config.engine.update(kind="server", url="http://localhost:8000/v1", sync="folder")
    config.stages.warmup.update(sync_every=3, clip={"importance_cap": 2.0})
    run_issues.checked(config)
    config.update_from_flattened_dict(changes)
    with pytest.raises(ValueError, match=message):
        run_issues.checked(config)


def test_a_server_that_is_sent_nothing_is_asked_for_what_it_holds_alone(
    config: ConfigDict, tmp_path: Path
) -> None:
    """Its answers would be told as those of a policy that it never got."""
    config.unlock()
    config.engine.update(kind="server", url="http://localhost:8000/v1")
    del config.stages["warmup"]
    config.stages.collect.policy = config.stages.dpo.policy = "init"
    config.stages.evaluate.policies = ("init",)
    held = Config.of(config)
    config.stages.evaluate.policies = ("sft@4",)
    del config.stages["collect"], config.stages["dpo"]
    with pytest.raises(ValueError, match=r"engine\.sync is 'none'.* sample from sft@4: set"):
        run_issues.checked(config)
    write_settings(held, epath.Path(tmp_path))
    for policy in ("dpo", "sft", "hf:other"):
        with pytest.raises(
            ValueError, match=f"assumes that its server holds init .*those of {policy}"
        ):
            commands.evaluate(tmp_path, policy)


@pytest.fixture
def vllm(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Starts vLLM by launch/vllm.sh and gives its url. G2D_TEST_VLLM names the command where PATH
    has none."""
    command = os.environ.get("G2D_TEST_VLLM") or shutil.which("vllm")
    if not command:
        pytest.skip("vLLM is not installed; G2D_TEST_VLLM may name its command")
    started: list[subprocess.Popen[bytes]] = []

    def start(model: Path, sync: str, *options: str) -> str:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        variables = {"VLLM_COMMAND": command, "VLLM_PORT": str(port), "VLLM_CPU_KVCACHE_SPACE": "1"}
        script = Path(__file__).parents[2] / "launch" / "vllm.sh"
        fixed = [
            "--dtype",
            "float32",
            "--enforce-eager",
            "--max-model-len",
            "256",
            "--max-num-seqs",
            "16",
            *options,
        ]
        with (tmp_path / "vllm.log").open("wb") as log:
            line = ["bash", str(script), str(model), sync, *fixed]
            kept = {
                name: value
                for name, value in os.environ.items()
                if name not in ("PYTHONPATH", "XLA_FLAGS")
            }
            started.append(
                subprocess.Popen(
                    line,
                    env={**kept, **variables},
                    cwd=tmp_path,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
        deadline = time.monotonic() + 600
        while started[-1].poll() is None and time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return f"http://127.0.0.1:{port}/v1"
            time.sleep(1)
        raise RuntimeError((tmp_path / "vllm.log").read_text()[-2000:])

    yield start
    for process in started:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:  # told so while it starts, it may not heed it
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sync", ["folder", "adapter"])
def test_vllm_draws_what_the_trainer_would(tmp_path: Path, vllm: Any, sync: str) -> None:
    """Two intervals of GRPO and an evaluation: after each load its log-probabilities are the
    trainer's."""
    import toys

    from g2d_jax import config as settings

    model = tmp_path / "toy"
    model.mkdir()
    sizes = {
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 64,
    }
    toys.save_policy(model, "Qwen2", toys.make_qwen2_tokenizer(), **sizes)
    toys.save_rows(tmp_path / "problems.jsonl", toys.solved_problems(80))
    config = settings.base()
    config.model.path = str(model)
    config.lora.rank = 4 if sync == "adapter" else 0
    for split in ("train", "dev", "test"):
        config.data[split] = settings.source(str(tmp_path / "problems.jsonl"), split)
    config.reward.function = "tiny:even"
    config.engine.update(kind="server", url=vllm(model, sync), sync=sync)
    drawn, grown = settings.sampling(8), settings.optimizer(1e-2)
    config.stages.train = settings.online(
        policy="init", steps=4, sync_every=2, prompts_per_step=4, num_generations=4, sampling=drawn,
        clip={"importance_cap": 2.0}, optimizer=grown,
    )  # fmt: skip
    config.stages.evaluate = settings.evaluate(
        policies=("init", "train"), sampling=settings.sampling(8, temperature=2)
    )
    toys.shrink(config)
    pipeline.run(config, tmp_path / "run")
    name = "sampling/sampling_logp_difference/max"
    gaps = [
        record["metrics"][name]
        for record in read_metrics(tmp_path / "run")
        if name in record["metrics"]
    ]
    assert len(gaps) == 4 and max(gaps) < 1e-3
