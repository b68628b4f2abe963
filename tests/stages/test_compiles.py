"""After the first steps a stage compiles nothing but programs for further sizes, of which there are
few."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import jax
import numpy as np
import pytest
from unofficial import watch_compiler
from worlds import only

from g2d_jax import config as settings
from g2d_jax.config import Config, graph
from g2d_jax.models.decoder import count_params
from g2d_jax.records import Preference
from g2d_jax.runtime.compile_times import compiling
from g2d_jax.runtime.program_cache import Programs
from g2d_jax.runtime.tables import read_rollouts
from g2d_jax.runtime.tracking import Tracker
from g2d_jax.session.row_shapes import RowShape
from g2d_jax.session.trainer import open_trainer
from g2d_jax.session.training_programs import Training
from g2d_jax.stages import offline, run_stages, sft
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
    with Marking(compiled_by) as tracker:
        session = replace(session, tracker=tracker)
        for name in ("sft", "warmup", "collect", "dpo"):
            run_stages.run_stage(session, name, order)
    marks = tracker.marks
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
        session = opened(config, tmp_path / f"{rate}-{total}", programs=programs)
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


SMALL = 1 / 4
"""Of the model's bytes: what a program that no stage names may take and give, such as a slice or the
checksum of an array."""


@pytest.mark.slow
def test_no_stage_compiles_a_program_that_it_did_not_name(
    config, opened, tmp_path, monkeypatch, compiled_by
):
    """Every kind of stage, each with functions of its own, on eight devices: other threads compile
    what it names, and its own thread nothing of any size but the first parameters of all."""
    stages = config.stages
    stages.sft.steps = 2
    stages.warmup.update(steps=2, beta=0.1)
    online = {**stages.warmup.to_dict(), "beta": 0.0, "loss": "dpo"}
    with config.unlocked():
        stages.preferred = settings.online(**{**online, "sync_every": 1})
        stages.behind = settings.online(**{**online, "loss": "grpo", "sync_every": 2})
        stages.behind_dpo = settings.online(**{**online, "sync_every": 2})
        stages.select = settings.best_checkpoint(policy="warmup", sampling=settings.sampling(8))
    stages.dpo.update(policy="select", batch_size=4)
    config.dtype = "bfloat16"
    stages.evaluate.update(policies=("init", "dpo"), greedy=True)
    order, compiled = graph.plan(Config.of(config)), watch_compiler(monkeypatch)
    kinds, told = set(), Counter[str]()
    compiling.take_programs()  # those of other tests in this process
    for name in order.order:
        session = opened(config, tmp_path, programs=Programs(), devices=8)
        del compiled[:]
        run_stages.compile_ahead(session, [name])
        result = run_stages.run_stage(session, name, order)
        kinds.add(result.kind)
        told.update({program: made.compiled for program, made in result.programs.items()})
        most = SMALL * 4 * count_params(session.model_config)
        unnamed = [
            (program, size)
            for thread, program, size in compiled
            if "compiling" not in thread and program != "_parameters" and size > most
        ]
        assert not unnamed and max(size for *_, size in compiled) > most, name
    assert kinds == settings.STAGES.keys()
    assert told == Counter(name for _, name in compiled_by)
