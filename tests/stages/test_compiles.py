"""After the first steps a stage compiles nothing but programs for further sizes, of which there are few."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import jax
import pytest

from g2d_jax import pipeline
from g2d_jax.tables import read_rollouts
from g2d_jax.tracking import Tracker

COMPILED = "/jax/core/compile/backend_compile_duration"


class Marking(Tracker):
    """Notes how much was compiled when each step was logged, which is within the next update, and at the end."""

    def __init__(self, compiled: list[str]) -> None:
        super().__init__(None, tensorboard=False)
        self.compiled, self.marks = compiled, dict[tuple[str, int], int]()

    def log(self, stage, step, metrics, *, kind="train"):
        self.marks[stage, step] = len(self.compiled)


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """The names of the programs that are compiled, or taken from a cache, as they come."""
    found: list[str] = []

    def heard(event: str, duration_secs: float, **about: object) -> None:
        if event == COMPILED:
            found.append(str(about.get("fun_name")).removeprefix("jit(").removesuffix(")"))

    jax.monitoring.register_event_duration_secs_listener(heard)
    yield found
    jax.monitoring.unregister_event_duration_listener(heard)


@pytest.mark.slow
def test_what_is_compiled_after_the_first_steps(config, opened, tmp_path, compiled):
    """Nothing, whatever the lengths: a stage's batches have one shape, and so have the sampler's programs."""
    config.stages.sft.steps, config.stages.warmup.steps, config.stages.warmup.keep = 6, 6, ()
    config.stages.warmup.sampling.max_new_tokens = 96
    config.stages.sft.optimizer.learning_rate = 1e-5  # it stays random: responses end early and late
    config.compute.update(row_length=128, microbatch_tokens=256)
    config.checkpoint.every = 100
    config.stages.dpo.diagnose, config.stages.dpo.batch_size = False, 2
    context, order = opened(config, tmp_path), pipeline.plan(config)
    with Marking(compiled) as context.tracker:
        for name in ("sft", "warmup", "collect", "dpo"):
            pipeline.run_stage(context, name, order)
    marks = context.tracker.marks
    for name in ("sft", "warmup", "dpo"):
        last = max(step for stage, step in marks if stage == name)
        assert last > 2
        later = Counter(compiled[marks[name, 1] : marks[name, last]])
        assert not later, (name, later)
    files = (tmp_path / "02-warmup").glob("rollouts/*.parquet")
    assert len({len(row.rollout.token_ids) for file in files for row in read_rollouts(file)}) > 10


def test_the_same_settings_once_more_compile_no_program_again(config, opened, tmp_path, compiled):
    """As the next point of a sweep does, in a context of its own."""
    order, again = pipeline.plan(config), Counter[str]()
    contexts = [opened(config, tmp_path / folder) for folder in ("one", "two")]
    contexts[1].programs = contexts[0].programs
    for name in ("sft", "warmup"):
        pipeline.run_stage(contexts[0], name, order)
        before = len(compiled)
        pipeline.run_stage(contexts[1], name, order)
        again.update(compiled[before:])
    jitted = {"prefill", "insert", "decode_chunk", "view", "score_logprobs", "optimizer_state", "train_step"}
    assert jitted.isdisjoint(again), again
