"""Each second counts once, compiling apart; what a stage tells of its time adds up."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import pytest

from g2d_jax import pipeline
from g2d_jax.accounting import ACTIVITIES, goodput, shares
from g2d_jax.report.goodput import goodput_table
from g2d_jax.stages.clock import Clock, _Compiling
from g2d_jax.storage import finished
from g2d_jax.tracking import read_metrics


def test_shares_of_the_wall_time():
    record = {"seconds": 8.0, "generation_seconds": 4.0, "training_seconds": 2.0, "checkpointing_seconds": 2.0}
    found = {name: share for name, share in shares(record).items() if share}
    assert found == pytest.approx({"generation": 0.4, "training": 0.2, "checkpointing": 0.2, "other": 0.2})
    assert shares({"seconds": 8.0}) == shares({"seconds": 0.0, "training_seconds": 0.0}) == {}
    assert goodput(record)["goodput/generation"] == pytest.approx(0.4)
    _, columns, rows = goodput_table([{"name": "a", **record}, {"name": "old", "seconds": 8.0}])
    assert dict(zip(columns, *rows, strict=True)) == {
        **dict.fromkeys(ACTIVITIES, "0.0"),
        **{"stage": "a", "wall time": "10 s", "generation": "40.0", "training": "20.0", "checkpointing": "20.0"},
        "other": "20.0",
    }


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


def test_spans_of_compiling_that_overlap_count_once():
    compiling = _Compiling()
    for seconds in (0.25, 0.5, 1.0):  # all end now: each of them is inside the next
        compiling.heard("/jax/core/compile/jaxpr_trace_duration", seconds)
    compiling.heard("/jax/compilation_cache/cache_retrieval_time_sec", 5.0)
    assert 1.0 <= compiling.seconds() < 1.2


def test_a_run_tells_where_its_time_went(config, opened, tmp_path):
    config.stages.sft.steps = 3
    config.stages.warmup.steps = 2
    context, order = opened(config, tmp_path), pipeline.plan(config)
    sampled = {"generation", "verification"}
    for name, spent_on in (("sft", {"training"}), ("warmup", {"training", *sampled}), ("collect", sampled)):
        pipeline.run_stage(context, name, order)
        manifest = finished(context.folders[name])
        assert manifest is not None
        found = shares(manifest)
        assert sum(found.values()) == pytest.approx(1) and min(found.values()) >= 0
        assert {name for name in ("training", "generation", "verification") if found[name]} == spent_on
        logged = {(r["kind"], r["step"]): r["metrics"] for r in read_metrics(tmp_path) if r["stage"] == name}
        if name == "collect":
            assert logged["goodput", 0] == pytest.approx(goodput(manifest))
            continue
        assert found["checkpointing"] > 0
        for step in range(1, config.stages[name].steps + 1):
            figures = [logged["train", step][f"goodput/{activity}"] for activity in (*ACTIVITIES, "other")]
            assert sum(figures) == pytest.approx(1) and min(figures) >= 0
