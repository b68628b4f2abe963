"""A server that draws the next window while this one trains: which weights draw what, and that
neither its pace nor a kill changes a number."""

import random
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from alike import differences
from engine_server import PolicySampler, Server, after, choice, serving
from etils import epath
from killed import Runs
from ml_collections import ConfigDict
from worlds import only, run

from g2d_jax.config import Config, Engine, Online
from g2d_jax.data.template import TemplateSettings
from g2d_jax.data.tokenizer import load_tokenizer
from g2d_jax.records import Request, SamplingParams
from g2d_jax.report.progress import stage_states
from g2d_jax.rollouts.ahead import schedule
from g2d_jax.runtime.tables import read_rollouts
from g2d_jax.runtime.tracking import read_metrics
from g2d_jax.sampler.connection import PAUSE
from g2d_jax.sampler.remote import Remote
from g2d_jax.session import stage_result
from g2d_jax.session.stage_result import StageResult
from g2d_jax.stages import run_issues

STAGE = {"steps": 6, "keep": (), "sync_every": 2, "clip": {"importance_cap": 2.0}}


def by_seed(body: dict[str, Any], number: int) -> Any:
    """An answer of up to 8 tokens that the seed decides, whatever the weights."""
    drawn = random.Random(body["seed"])
    ids = [drawn.randrange(2, 12) for _ in range(drawn.randrange(7))]
    return choice([*ids, *body["stop_token_ids"][:1]])


def served(config: ConfigDict, server: Server, **stage: Any) -> ConfigDict:
    """The warm-up alone, 6 updates in windows of 2, sampled ahead by a server."""
    only(config, "warmup").stages.warmup.update({**STAGE, **stage})
    config.engine.update(kind="server", url=server.url, sync="folder", ahead=1)
    return config


def logged(workdir: Path) -> list[dict[str, float]]:
    return [r["metrics"] for r in read_metrics(workdir) if "loss" in r["metrics"]]


def policies(workdir: Path) -> list[str]:
    """The policy of each batch's responses, all of one."""
    found = []
    for shard in sorted((workdir / "01-warmup/rollouts").glob("*.parquet")):
        (policy,) = {row.policy for row in read_rollouts(shard)}
        found.append(policy)
    return found


def test_each_window_is_drawn_from_the_weights_a_window_before(
    config: ConfigDict, tmp_path: Path, opened: Any
) -> None:
    with serving(by_seed) as server:
        manifest = run(opened(served(config, server), tmp_path))
    assert policies(tmp_path) == [f"warmup@{step}" for step in (0, 0, 0, 0, 2, 2)]
    assert [metrics["staleness"] for metrics in logged(tmp_path)] == [0, 1, 2, 3, 2, 3]
    # Old log-probabilities are of the weights at each window's beginning.
    assert all(abs(metrics["ratio"] - 1) < 1e-5 for metrics in logged(tmp_path)[::2])
    told = [path for path, _ in server.asked if path in ("/collective_rpc", "/v1/completions")]
    assert told == [
        *["/collective_rpc", *["/v1/completions"] * 64],
        *["/collective_rpc", *["/v1/completions"] * 32],
    ]
    figures = manifest.generation
    assert figures["ahead"] == 1 and 0 <= figures["server_idle"] <= 1


def test_the_schedule_in_words() -> None:
    assert schedule("warmup", Online(steps=60, sync_every=10)).endswith(
        "From update 11 on, responses are 10 to 19 updates old instead of 0 to 9"
    )
    alone = schedule("warmup", Online(steps=8, sync_every=10))
    assert alone.endswith("has no effect: its 8 updates are one window")


def remote_of(server: Server, folder: Path, **settings: Any) -> Remote:
    tokenizer = load_tokenizer("procedural:slips", TemplateSettings())
    of_test = {"concurrency": 2, "retries": 0, **settings}
    engine = Engine(kind="server", url=server.url, **of_test)
    named = {"seed": 7, "dtype": "float32", "say": print}
    return Remote(engine, epath.Path(folder), tokenizer, tokenizer.vocab_size, **named)


def requests_of(*problems: str) -> list[Request]:
    params = SamplingParams(8, stop_ids=(1,))
    return [
        Request(problem, np.array([3, 4], np.int32), params, num_samples=2) for problem in problems
    ]


def test_what_was_asked_ahead_is_asked_once_and_used_for_its_own_policy(tmp_path: Path) -> None:
    def drawn(remote: Remote, served: Any, *problems: str) -> list[tuple[str, int, list[int]]]:
        rollouts = remote.generate(served, requests_of(*problems), "purpose")
        return sorted((r.problem_id, r.sample, r.token_ids.tolist()) for r in rollouts)

    with serving(by_seed) as server:
        remote = remote_of(server, tmp_path)
        policy, other = remote.to_sampler_params(None), ("served", "")
        assert policy == other  # sync="none": there is one
        expected = drawn(remote, policy, "a", "b", "c")
        before = len(server.completions())
        remote.ask_ahead(policy, [requests_of("a", "b")], "purpose")
        assert drawn(remote, policy, "a", "b", "c") == expected
        assert len(server.completions()) - before == 6
        assert drawn(remote, policy, "a") == expected[:2]  # asked anew
        assert len(server.completions()) - before == 8
        remote.ask_ahead(policy, [requests_of("a")], "another purpose")
        assert drawn(remote, policy, "a") == expected[:2]
        remote.forget()
    assert remote.busy.seconds() > 0


def test_what_is_forgotten_is_not_sent(tmp_path: Path) -> None:
    here, on = threading.Event(), threading.Event()

    def held(body: dict[str, Any], number: int) -> Any:
        here.set()
        on.wait(20)
        return choice([1])

    with serving(held) as server:
        remote = remote_of(server, tmp_path)
        policy = remote.to_sampler_params(None)
        remote.ask_ahead(policy, [requests_of(problem) for problem in "abcdef"], "purpose")
        here.wait(20)
        began = time.perf_counter()
        remote.forget()
        assert time.perf_counter() - began < 5  # it waits for none of them
        on.set()
        time.sleep(0.1)
        assert len(server.completions()) <= 2


def test_what_waits_to_be_tried_again_is_not_sent_when_it_is_forgotten(tmp_path: Path) -> None:
    asked = threading.Event()

    def busy(body: dict[str, Any], number: int) -> Any:
        asked.set()
        return 503, b"busy"

    with serving(busy) as server:
        remote = remote_of(server, tmp_path, retries=9)
        policy = remote.to_sampler_params(None)
        before = {*threading.enumerate()}
        remote.ask_ahead(policy, [requests_of("a")], "purpose")
        begun = [thread for thread in {*threading.enumerate()} - before if thread.daemon]
        asked.wait(20)
        time.sleep(0.2)  # both are in their first pause, of PAUSE
        remote.forget()
        for thread in begun:
            thread.join(20)
        assert len(server.completions()) == 2


def test_calls_are_asked_in_their_order_by_as_many_threads_as_one(tmp_path: Path) -> None:
    at_once, most = 0, 0
    lock = threading.Lock()

    def slow(body: dict[str, Any], number: int) -> Any:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.02)
        with lock:
            at_once -= 1
        return choice([1])

    calls = []
    for token, problem in enumerate("abcdef", 10):
        prompt = np.array([token], np.int32)
        calls.append([replace(request, prompt_ids=prompt) for request in requests_of(problem)])
    with serving(slow) as server:
        remote = remote_of(server, tmp_path)
        policy = remote.to_sampler_params(None)
        before = {*threading.enumerate()}
        remote.ask_ahead(policy, calls, "purpose")
        begun = {*threading.enumerate()} - before
        assert sum(thread.name == "g2d-daemon" for thread in begun) == 2
        for call in calls:
            assert len(list(remote.generate(policy, call, "purpose"))) == 2
        asked = [body["prompt"][0] for body in server.completions()]
    assert most <= 2
    # Two at once may overtake each other, and no later call a whole one.
    assert all(abs(token - 10 - place // 2) <= 1 for place, token in enumerate(asked))


def test_pauses_of_a_server_that_is_down_are_not_its_work(tmp_path: Path) -> None:
    def down(body: dict[str, Any], number: int) -> Any:
        if number == 1:
            return 503, b"busy"
        return choice([1])

    with serving(down) as server:
        remote = remote_of(server, tmp_path, retries=1)
        began = time.perf_counter()
        (request,) = requests_of("a")
        list(remote.generate(remote.to_sampler_params(None), [request], "purpose"))
        assert time.perf_counter() - began > PAUSE > remote.busy.seconds()


def test_a_policy_of_another_kind_than_is_asked_for_is_none(tmp_path: Path) -> None:
    (tmp_path / "g2d-warmup@3-0123").mkdir()
    (tmp_path / "g2d-warmup@3-0123/config.json").write_text("{}")
    with serving(by_seed) as server:
        assert remote_of(server, tmp_path, sync="adapter").restore("warmup@3") is None
        restored = remote_of(server, tmp_path, sync="folder").restore("warmup@3")
    assert restored == ("served", "g2d-warmup@3-0123")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"engine.kind": "sampler"},
            r"engine\.ahead.*kind is 'sampler'.*set kind to 'server'",
        ),
        ({"engine.ahead": 2}, r"engine\.ahead must be at least 0 and at most 1"),
        ({"stages.warmup.sync_every": 0}, r"warmup.sync_every is 0.*set sync_every to 2 or more"),
        ({"stages.warmup.sync_every": 1}, "warmup.sync_every is 1"),
    ],
)
def test_settings_are_refused(config: ConfigDict, changes: dict[str, Any], message: str) -> None:
    config.engine.update(kind="server", url="http://localhost:8000/v1", sync="folder", ahead=1)
    config.stages.warmup.update(STAGE)
    run_issues.checked(config)
    config.update_from_flattened_dict(changes)
    with pytest.raises(ValueError, match=message):
        run_issues.checked(config)


@pytest.fixture(scope="module")
def policy_server() -> Iterator[Server]:
    """A server that samples from the weights it is given, each answer after a time of its own."""
    sampler, pace = PolicySampler(prompt=16, response=8), random.Random(0)
    with serving(after(lambda: pace.random() / 50, sampler)) as server:
        server.load = sampler.load
        yield server


def job(server: Server, **stage: Any) -> dict[str, Any]:
    """A run up to a warm-up of 9 updates in windows of 3, with a checkpoint at each."""
    settings = {"steps": 9, "sync_every": 3, "clip.importance_cap": 2, "keep": "()", **stage}
    overrides = [f"stages.warmup.{name}={value}" for name, value in settings.items()]
    engine = {"kind": "server", "url": server.url, "sync": "folder", "ahead": 1}
    overrides += [f"engine.{name}={value}" for name, value in engine.items()]
    return {"overrides": [*overrides, "checkpoint.every=1"], "until": "warmup"}


ENDS = {
    "in the middle of the first window": ("TERM", "_train_batch", 1),
    "when the next window is needed": ("KILL", "_sample_window", 0),
    "between the answers of a window": ("KILL", "Reader.rollout", 8),
    "before the server loads new weights": ("KILL", "Remote._load", 1),
    "when the next window has begun": ("TERM", "_add_logprobs", 0),
    "in the middle of the second window": ("KILL", "_train_batch", 2),
    "after that, once more": ("KILL", "_train_batch", 1),
}
FILTERS = {"filter.drop_solved": 1, "filter.dynamic_sampling": 1}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_killed_again_and_again_ends_like_one_that_never_was(
    runs: Runs, tmp_path: Path, policy_server: Server
) -> None:
    asked = job(policy_server, **FILTERS)
    runs(tmp_path / "whole", **asked)
    for ending in ENDS.values():
        runs(tmp_path / "ended", {"KILL": -9, "TERM": 75}[ending[0]], **asked, call=ending)
    runs(tmp_path / "ended", **asked)
    assert not differences(tmp_path / "whole", tmp_path / "ended")
    shards = (tmp_path / "whole/02-warmup/rollouts").glob("*.parquet")
    drawn_by = {row.policy for shard in shards for row in read_rollouts(shard)}
    assert drawn_by == {"warmup@0", "warmup@3"}
    told = [body for path, body in policy_server.asked if path == "/update_weight_version"]
    versions = [body["new_version"] for body in told]
    assert len(versions) > len({*versions})  # a start that went on had them loaded again


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_whose_weights_are_gone_draws_from_those_it_has_and_says_so(
    runs: Runs, tmp_path: Path
) -> None:
    with serving(by_seed) as server:
        asked = job(server)
        runs(tmp_path / "run", 75, **asked, call=("TERM", "_train_batch", 4))
        shutil.rmtree(tmp_path / "run/engine")
        said = runs(tmp_path / "run", **asked)["text"]
    assert "the window at update 6 needs the policy of update 3" in said
    shards = sorted((tmp_path / "run/02-warmup/rollouts").glob("*.parquet"))
    drawn_by = [read_rollouts(shard)[0].policy for shard in shards]
    assert drawn_by == ["warmup@0"] * 6 + ["warmup@5"] * 3


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_server_that_is_lost_ends_the_run_and_costs_no_number(runs: Runs, tmp_path: Path) -> None:
    """It is lost while the first window trains. What was written of it stays."""
    with serving(by_seed) as server:
        asked = job(server)
        asked["overrides"].append("engine.retries=0")
        runs(tmp_path / "whole", **asked)
        server.reply = lambda body, number: by_seed(body, 0) if number <= left else (503, b"busy")
        left = len(server.completions()) + 60
        said = runs(tmp_path / "lost", 1, **asked)["text"]
        assert "failed 1 times, the last time with status 503: busy" in said
        server.reply = by_seed
        runs(tmp_path / "lost", **asked)
    assert not differences(tmp_path / "whole", tmp_path / "lost")


def test_status_says_how_long_both_waited(tmp_path: Path) -> None:
    settings = Config(
        engine=Engine(kind="server", sync="folder", ahead=1),
        stages={"train": Online(**STAGE, policy="init")},
    )

    def said() -> str:
        return stage_states(epath.Path(tmp_path), settings, "")[0].sides

    assert said() == ""
    figures = {"share": 0.4, "server_idle": 0.03}
    stage_result.write(
        tmp_path / "01-train", StageResult(kind="online", name="train", generation=figures)
    )
    assert said() == (
        "the trainer waited for the server 40 % of the time, and the server for requests 3 %"
    )
