"""Each second counts once, compiling apart; what a stage tells of its time adds up."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import pytest
from worlds import run, training

from g2d_jax.config import Sft
from g2d_jax.report.tables import stages_table
from g2d_jax.runtime.compile_times import Compiling, compiling
from g2d_jax.runtime.tracking import read_metrics
from g2d_jax.session.clock import Clock
from g2d_jax.session.stage_result import ACTIVITIES, Cost, StageResult
from g2d_jax.stages import sft
from g2d_jax.training import objectives


def test_shares_of_the_wall_time():
    cost = Cost(
        seconds=8.0, generation_seconds=4.0, training_seconds=2.0, checkpointing_seconds=2.0
    )
    found = {name: share for name, share in cost.shares.items() if share}
    assert found == pytest.approx(
        {"generation": 0.4, "training": 0.2, "checkpointing": 0.2, "other": 0.2}
    )
    assert Cost().shares == {}
    assert cost.goodput["goodput/generation"] == pytest.approx(0.4)
    results = {
        name: StageResult(kind="sft", name=name, cost=one)
        for name, one in (("a", cost), ("empty", Cost()))
    }
    cells = {row[0]: row[1:3] for row in stages_table(results).rows}
    assert cells["generation, % of the time"] == ["40.0", "–"]
    assert (
        cells["training, % of the time"] == cells["checkpointing, % of the time"] == ["20.0", "–"]
    )
    assert cells["other, % of the time"] == ["20.0", "–"]


def test_an_activity_interrupts_the_one_around_it():
    clock, started = Clock(), time.perf_counter()
    before = clock.read()
    with clock.doing("generation"):
        time.sleep(0.01)
        with pytest.raises(KeyError), clock.doing("verification"):
            time.sleep(0.02)
            raise KeyError
        time.sleep(0.01)
    time.sleep(0.05)
    found, elapsed = clock.since(before), time.perf_counter() - started
    assert found["generation_seconds"] >= 0.02 and found["verification_seconds"] >= 0.02
    assert sum(found.values()) <= elapsed - 0.05


def test_compiling_is_told_apart():
    clock, started = Clock(), time.perf_counter()
    with clock.doing("training"):
        jax.jit(lambda x: jnp.sin(x) @ jax.jit(jnp.cos)(x))(jnp.ones((3, 3)))
    found, elapsed = clock.read(), time.perf_counter() - started
    assert found["compilation_seconds"] > 0 and sum(found.values()) <= elapsed


def test_phases_of_compiling_inside_each_other_count_once():
    compiling, started = Compiling(), time.perf_counter()
    trace = "/jax/core/compile/jaxpr_trace_duration"
    compile_ = "/jax/core/compile/backend_compile_duration"
    compiling.start(trace, 0.0, fun_name="train_step")
    for _ in range(2):
        compiling.start(trace, 0.0, fun_name="sin")
        time.sleep(0.02)
        compiling.end(trace, 0.02)
    compiling.end(trace, 0.04)
    compiling.end("/jax/compilation_cache/cache_retrieval_time_sec", 5.0)
    assert compiling.under_way() is None
    compiling.start(compile_, 0.0, fun_name="jit(train_step)")
    program, seconds = compiling.under_way()
    assert program == "train_step" and seconds >= 0.04  # since its tracing began
    compiling.end(compile_, 0.0)
    assert 0.04 <= compiling.seconds() <= time.perf_counter() - started


def test_the_program_that_is_compiled_now_has_a_name():
    seen = []

    def train_step(x):
        seen.append(compiling.under_way())
        return x + 1

    jax.jit(train_step)(1.0)
    assert seen[0][0] == "train_step" and compiling.under_way() is None


@jax.jit
def busy(x):
    """About a second of work on a CPU, after which the result is there."""
    return jax.lax.fori_loop(0, 2000, lambda _, y: jnp.tanh(y @ y), x).sum()


def test_time_in_no_activity_is_that_of_the_program_that_runs():
    jax.block_until_ready(busy(jnp.ones((256, 256))))
    clock = Clock()
    clock.launched("training", [busy(jnp.ones((256, 256)))])
    time.sleep(0.02)
    with clock.doing("verification"):
        time.sleep(0.02)
    with clock.doing("logprobs"):
        clock.settle()  # what waits for the program that runs waits in the account of that one
    time.sleep(0.02)  # nothing runs any more
    found = clock.read()
    assert found["training_seconds"] > found["verification_seconds"] >= 0.02
    assert found["training_seconds"] > found["logprobs_seconds"]
    started = time.perf_counter()
    clock.settle()
    time.sleep(0.02)
    assert clock.since(found)["training_seconds"] == 0 and time.perf_counter() - started >= 0.02


@pytest.mark.slow
def test_an_update_is_dispatched_before_the_one_before_it_is_done(config, opened, tmp_path):
    """After an update has returned its program still runs, and what it measured is fetched with the
    next one."""

    def slow(compute):
        inner = objectives.sft(compute)

        def objective(params, micro):
            loss, sums = inner(params, micro)
            return loss + 0.0 * busy(jnp.full((256, 256), jax.lax.stop_gradient(loss))), sums

        return objective

    config.stages.sft.update(steps=3, data={"limit": 48})
    config.checkpoint.every = 3
    session = opened(config, tmp_path, objectives={"sft": slow})
    stage = session.config.stage("sft", Sft)
    examples, *_ = sft.examples(session, "sft", stage)
    with training(session, "sft", 3) as trainer, session.track_cost(trainer.cost):
        running = []
        for step in range(2):
            trainer.update(sft.batch(examples[4 * step : 4 * step + 4]), {})
            running.append(
                not any(leaf.is_ready() for leaf in jax.tree.leaves(trainer.state.params))
            )
            assert trainer.bar.done == step  # the metrics of the update before, and no more
        assert running == [True, True]
        # the last: its checkpoint is due, with all it took
        trainer.update(sft.batch(examples[8:12]), {})
        assert trainer.bar.done == 3
    found = trainer.cost.shares
    assert found["training"] + found["compilation"] > 0.9, found


@pytest.mark.slow
def test_a_run_tells_where_its_time_went(config, opened, tmp_path):
    config.stages.sft.steps = 3
    config.stages.warmup.steps = 2
    session = opened(config, tmp_path)
    sampled = {"generation", "verification"}
    for name, spent_on in (
        ("sft", {"training"}),
        ("warmup", {"training", *sampled}),
        ("collect", sampled),
    ):
        manifest = run(session, name)
        found = manifest.cost.shares
        assert sum(found.values()) == pytest.approx(1) and min(found.values()) >= 0
        assert {
            name for name in ("training", "generation", "verification") if found[name]
        } == spent_on
        logged = {
            (r["kind"], r["step"]): r["metrics"]
            for r in read_metrics(tmp_path)
            if r["stage"] == name
        }
        if name == "collect":
            assert logged["goodput", 0] == pytest.approx(manifest.cost.goodput)
            continue
        assert found["checkpointing"] > 0
        for step in range(1, config.stages[name].steps + 1):
            figures = [
                logged["train", step][f"goodput/{activity}"] for activity in (*ACTIVITIES, "other")
            ]
            assert sum(figures) == pytest.approx(1) and min(figures) >= 0


def step_times(workdir, name):
    """The seconds of each update as they were logged."""
    records = [
        record
        for record in read_metrics(workdir)
        if (record["stage"], record["kind"]) == (name, "train")
    ]
    return [record["metrics"]["step_time"] for record in records]


def test_an_update_takes_until_it_is_done(config, opened, tmp_path):
    """The first one too, whose program compiles; those after it only what they add."""
    session = opened(config, tmp_path)
    stage = session.config.stage("sft", Sft)
    examples, *_ = sft.examples(session, "sft", stage)
    waited, opening = [], time.perf_counter()
    with training(session, "sft", 3) as trainer:
        first = time.perf_counter()
        for step in range(3):
            started = time.perf_counter()
            trainer.update(sft.batch(examples[4 * step : 4 * step + 4]), {})
            time.sleep(0.1)
            jax.block_until_ready(trainer.state.params)
            waited.append(time.perf_counter() - started)
        trainer.flush()
        last = time.perf_counter()
    found = step_times(tmp_path, "sft")
    assert found[0] >= waited[0]
    assert last - first <= sum(found) + 0.1 * 3 and sum(found) <= last - opening


def test_what_an_update_learns_from_is_of_its_time(config, opened, tmp_path):
    """Sampling and grading for an update come before its launch and after the end of the one
    before."""

    def slow(completions, **columns):
        time.sleep(0.3)
        return [float(len(text) % 2) for text in completions]

    config.stages.sft.steps = 1
    config.stages.warmup.steps = 3
    session = opened(config, tmp_path, slow)
    run(session, "sft")
    started = time.perf_counter()
    run(session, "warmup")
    found, wall = step_times(tmp_path, "warmup"), time.perf_counter() - started
    assert len(found) == 3 and min(found) >= 0.3 and sum(found) <= wall
