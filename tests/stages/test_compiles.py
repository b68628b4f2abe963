"""After the first steps a stage compiles nothing but programs for further sizes, of which there are
few."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import pytest
from worlds import only

from g2d_jax import config as settings
from g2d_jax import pipeline, run_stages
from g2d_jax.config import Config, graph
from g2d_jax.records import Preference
from g2d_jax.runtime.program_cache import Jitted, Programs
from g2d_jax.runtime.tables import read_rollouts
from g2d_jax.runtime.tracking import Tracker
from g2d_jax.session.program import Program
from g2d_jax.session.row_shapes import RowShape
from g2d_jax.session.session import Session
from g2d_jax.session.trainer import open_trainer
from g2d_jax.session.training_programs import Training
from g2d_jax.stages import offline, sft
from g2d_jax.training import objectives

COMPILED = "/jax/core/compile/backend_compile_duration"


class Marking(Tracker):
    """Notes how much was compiled when each step was logged, which is within the next update, and
    at the end."""

    def __init__(self, compiled: list[tuple[str, str]]) -> None:
        super().__init__(None, tensorboard=False)
        self.compiled, self.marks = compiled, dict[tuple[str, int], int]()

    def log(self, stage, step, metrics, *, kind="train"):
        self.marks[stage, step] = len(self.compiled)


@pytest.fixture
def compiled_by() -> Iterator[list[tuple[str, str]]]:
    """The thread's and the program's names of all that is compiled, or taken from a cache, as it
    comes."""
    found: list[tuple[str, str]] = []

    def heard(event: str, duration_secs: float, **about: object) -> None:
        if event == COMPILED:
            name = str(about.get("fun_name")).removeprefix("jit(").removesuffix(")")
            found.append((threading.current_thread().name, name))

    jax.monitoring.register_event_duration_secs_listener(heard)
    yield found
    jax.monitoring.unregister_event_duration_listener(heard)


@pytest.mark.slow
def test_what_is_compiled_after_the_first_steps(config, opened, tmp_path, compiled_by):
    """Nothing, whatever the lengths: a stage's batches have one shape, and so have the sampler's
    programs."""
    config.stages.sft.steps, config.stages.warmup.steps, config.stages.warmup.keep = 6, 6, ()
    config.stages.warmup.sampling.max_new_tokens = 96
    # it stays random: responses end early and late
    config.stages.sft.optimizer.learning_rate = 1e-5
    config.compute.update(microbatch_tokens=256)
    config.checkpoint.every = 100
    config.stages.dpo.batch_size = 2
    session, order = opened(config, tmp_path), graph.plan(Config.of(config))
    with Marking(compiled_by) as session.tracker:
        for name in ("sft", "warmup", "collect", "dpo"):
            run_stages.run_stage(session, name, order)
    marks = session.tracker.marks
    for name in ("sft", "warmup", "dpo"):
        last = max(step for stage, step in marks if stage == name)
        assert last > 2
        later = Counter(program for _, program in compiled_by[marks[name, 1] : marks[name, last]])
        assert not later, (name, later)
    files = (tmp_path / "02-warmup").glob("rollouts/*.parquet")
    assert len({len(row.rollout.token_ids) for file in files for row in read_rollouts(file)}) > 10


@pytest.mark.slow
def test_stages_whose_numbers_differ_share_their_programs(config, opened, tmp_path, compiled_by):
    """Rates, lengths, decay and betas, as in a study: what trains is compiled once for each kind of
    loss."""
    only(config, "sft", "dpo")
    programs, ids = Programs(), np.arange(1, 6, dtype=np.int32)
    pair = Preference("0", "", "", "", ids[:2], ids[:3], ids[2:], 1.0, 0.0)
    groups = {
        "sft": sft.batch([(ids[:2], ids)] * 4),
        "dpo": offline.batch([pair] * 4, np.zeros((4, 2))),
    }
    seen = {"sft": [], "dpo": []}
    for rate, total, beta in ((1e-3, 4, 0.1), (3e-3, 4, 0.3), (1e-3, 7, 0.1)):
        for name in seen:
            config.stages[name].optimizer.update(
                learning_rate=rate, weight_decay=0.1 + beta, warmup_steps=1
            )
        config.stages.dpo.beta = beta
        session = opened(config, tmp_path / f"{rate}-{total}")
        session.programs = programs
        stages = session.config.stages
        for name, objective, per in (
            ("sft", objectives.sft(session.compute), "tokens"),
            ("dpo", offline.objective_of(session.compute, stages["dpo"]), "pairs"),
        ):
            training = Training(
                session, name, stages[name], objective, total=total, per=per, rows=RowShape(64)
            )
            with open_trainer(training) as trainer:
                for _ in range(2):
                    trainer.update(groups[name], {})
                trainer.flush()
                seen[name].append(trainer._last_metrics)
    for rows in seen.values():
        # warm-up is over
        assert [row["learning_rate"] for row in rows] == pytest.approx([1e-3, 3e-3, 1e-3])
        assert (
            rows[0]["loss"]
            == pytest.approx(rows[2]["loss"], rel=1e-6)
            != pytest.approx(rows[1]["loss"], rel=1e-6)
        )
    count = Counter(name for _, name in compiled_by)
    assert (count["train_step"], count["optimizer_state"]) == (2, 1)


Shape = tuple[Any, ...]


def shape_of(run: Jitted, arguments: tuple[Any, ...], static: Mapping[str, Any]) -> Shape:
    """A program as the compiler tells them apart: its function, the arrays it takes, what is static."""
    leaves = [(leaf.shape, np.dtype(leaf.dtype).name) for leaf in jax.tree.leaves(arguments)]
    return id(run), run._name, tuple(leaves), tuple(sorted(static.items()))


class Stages:
    """The programs that each stage of a run names, and those that it calls."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.named = defaultdict[str, set[Shape]](set)
        self.called = defaultdict[str, set[Shape]](set)
        self.stage = ""
        run_stage, lower, call = run_stages.run_stage, Program.lower, Jitted.__call__

        def stage_begins(session: Session, name: str, *rest: Any, **named: Any) -> Any:
            self.stage = name
            return run_stage(session, name, *rest, **named)

        def names(program: Program, outputs: Any) -> Any:
            arguments = program.arguments(outputs)
            self.named[program.stage].add(shape_of(program.run, arguments, program.static))
            return lower(program, outputs)

        def calls(run: Jitted, *arguments: Any, **static: Any) -> Any:
            self.called[self.stage].add(shape_of(run, arguments, static))
            return call(run, *arguments, **static)

        patch.setattr(pipeline, "run_stage", stage_begins)
        patch.setattr(Program, "lower", names)
        patch.setattr(Jitted, "__call__", calls)


@pytest.mark.slow
def test_every_kind_of_stage_gives_the_programs_that_it_runs(
    config, tmp_path, compiled_by, monkeypatch
):
    """On eight devices, each stage calls no others than it names, and the run's own thread compiles
    none of them: other threads have."""
    run_by = Stages(monkeypatch)
    stages = config.stages
    stages.sft.steps = 2
    stages.warmup.update(steps=2, beta=0.1)
    with config.unlocked():
        stages.select = settings.best_checkpoint(policy="warmup", sampling=settings.sampling(8))
    stages.dpo.update(policy="select", batch_size=4)
    config.dtype = "bfloat16"
    # two widths of the cache, and responses that need the second
    stages.evaluate.sampling.max_new_tokens = 272
    stages.evaluate.update(policies=("init", "dpo"), greedy=True)
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        manifests = pipeline.run(config, tmp_path)
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert {manifest.kind for manifest in manifests.values()} == settings.STAGES.keys()
    by_thread = {"compiling" in thread: set() for thread, _ in compiled_by}
    for thread, name in compiled_by:
        by_thread["compiling" in thread].add(name)
    sampling = {"view", "empty", "prefill", "insert", "resize", "decode_chunk"}
    given = {*sampling, "cast", "score_logprobs", "optimizer_state", "train_step"}
    assert by_thread[True] == given
    told = Counter[str]()
    for manifest in manifests.values():
        told.update({name: program.compiled for name, program in manifest.programs.items()})
    assert told == Counter(name for _, name in compiled_by)
    assert not given & by_thread.get(False, set())
    assert run_by.called.keys() == manifests.keys()
    for stage, called in run_by.called.items():
        assert called <= run_by.named[stage], stage
