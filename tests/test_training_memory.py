"""Remat and micro-batches chosen from memory: literal numbers, what holds for any, and what a work
directory keeps."""

from dataclasses import replace
from typing import get_args

import pytest
from etils import epath
from hypothesis import given
from hypothesis import strategies as st

from g2d_jax import config as settings
from g2d_jax.config import Config, Remat
from g2d_jax.models import shapes
from g2d_jax.recipes.config_load import resolve
from g2d_jax.runtime.mesh import make_mesh
from g2d_jax.session import training_memory
from g2d_jax.session.devices import Devices, machine_of
from g2d_jax.session.training_memory import (
    REMATS,
    SHARE,
    TOKENS,
    WORK,
    Load,
    Micro,
    choose,
    keep,
    kept,
    load,
)

GIB = 2**30
A_TOKEN = {"none": 8e6, "dots": 4e6, "attention": 2e6, "full": 1e6}


def test_the_quickest_that_fits_by_literal_numbers():
    """A device that multiplies 1,000 tokens in a second and needs one for each micro-batch; a row
    has 5,000 tokens."""

    def chosen(memory: float, micro_batch: float = 1.0, **changes) -> tuple[Remat, int]:
        row = Load(10e9, A_TOKEN, 5000)
        return choose([row], memory / SHARE, token=1e-3, micro_batch=micro_batch, **changes)

    assert TOKENS == (4096, 8192, 16_384, 32_768, 65_536)
    assert chosen(10e9 + 4e6 * 65_536) == ("dots", 65_536)
    assert chosen(10e9 + 4e6 * 32_768) == ("dots", 32_768)
    assert chosen(30e9) == ("dots", 4096)  # one row of 5,000
    # Recomputing less saves 0.85 ms a token, larger micro-batches up to a 4,096th of their second.
    assert chosen(30e9, micro_batch=10.0) == ("full", 16_384)
    assert chosen(29e9) == ("attention", 8192)
    assert chosen(19e9) == ("full", 8192)
    assert chosen(14.9e9) == ("full", 4096)  # needs 15: nothing fits, and no less is needed
    assert chosen(30e9, remats=["full"]) == ("full", 16_384)
    assert chosen(19e9, tokens=[16_384]) == ("full", 16_384)


def test_what_a_train_step_holds_and_keeps_for_each_token():
    """Qwen2.5-7B in bfloat16 on 16 devices: 28 layers, 3584 wide, 4 key heads of 128, 18944 in
    between."""
    model, parameters = shapes.shape("Qwen2.5-7B"), 7_615_616_512 / 16
    found = load(model, state=16 * parameters, parameters=parameters, row=3072, itemsize=2)
    layer = 2 * (7 * 3584 + 3 * 512 + 3 * 18_944)
    assert found.row == 3072
    assert found.per_token["full"] == (28 * 3584 + layer) * 2 + 3 * 3072
    kept_of_dots = 28 * (4 * 3584 + 2 * 512 + 2 * 18_944)
    assert found.per_token["dots"] == (kept_of_dots + layer) * 2 + 3 * 3072
    head, logits = 6 * 152_064 * 3584, 12 * 768 * 152_064
    assert found.held == 18 * parameters + 4 * 3072**2 + head + logits
    wide = load(model, state=16 * parameters, parameters=parameters, row=3072, itemsize=4)
    assert wide.held == 16 * parameters + 4 * 3072**2 + 8 * 152_064 * 3584 + logits


LOADS = st.lists(
    st.builds(
        lambda held, each, row: Load(held, {remat: each * n for remat, n in A_TOKEN.items()}, row),
        st.floats(0, 100e9),
        st.floats(1e-3, 10),
        st.integers(1, 40_000),
    ),
    min_size=1,
    max_size=3,
)
MEMORY, SECONDS = st.floats(1e9, 200e9), st.floats(1e-9, 1.0)
OF_REMATS = st.lists(st.sampled_from(get_args(Remat)), min_size=1, unique=True)
OF_TOKENS = st.lists(st.integers(1, 10**6), min_size=1, unique=True)


@given(LOADS, MEMORY, MEMORY, SECONDS, SECONDS)
def test_more_memory_is_never_slower(loads, some, more, token, micro_batch):
    def seconds(memory: float) -> float:
        remat, count = choose(loads, memory, token=token, micro_batch=micro_batch)
        assert remat in REMATS and count in TOKENS
        return WORK[remat] * token + micro_batch / count

    assert seconds(max(some, more)) <= seconds(min(some, more))


@given(LOADS, MEMORY, SECONDS, SECONDS, OF_REMATS, OF_TOKENS)
def test_the_choice_fits_wherever_any_does(loads, memory, token, micro_batch, remats, tokens):
    """And is among those that are allowed."""
    rates = {"token": token, "micro_batch": micro_batch}
    remat, count = choose(loads, memory, **rates, remats=remats, tokens=tokens)
    assert remat in remats and count in tokens
    needs = max(each.total(remat, count) for each in loads)
    least = min(
        max(each.total(other, fewer) for each in loads) for other in remats for fewer in tokens
    )
    assert needs <= SHARE * memory or needs == least > SHARE * memory


@pytest.fixture
def devices(monkeypatch):
    """Make the devices of a recipe's run, taken for accelerators of so much memory."""
    monkeypatch.setattr("g2d_jax.session.devices.platform_of", lambda mesh: "tpu")

    def make(config: Config, memory: int | None) -> Devices:
        mesh = make_mesh(fsdp=8)
        machine = machine_of(mesh, [memory])
        return Devices(config, shapes.shape("Qwen2.5-1.5B"), mesh, machine)

    return make


def test_a_run_chooses_by_its_memory_and_keeps_what_is_set(devices):
    recipe = Config.of(resolve("qwen2.5-1.5b"))

    def micro(memory: float | None, **changes) -> Micro:
        compute = replace(recipe.compute, **changes)
        return devices(replace(recipe, compute=compute), memory and int(memory * GIB)).micro

    assert micro(66) == Micro("dots", 8 * 32_768)
    assert micro(6) == Micro("full", 8 * 4096)  # nothing fits: what takes least
    assert micro(66, remat="none", microbatch_tokens=999) == Micro("none", 999)
    assert micro(66, remat="full") == Micro("full", 8 * 65_536)
    assert micro(66, microbatch_tokens=65_536) == Micro("dots", 65_536)
    assert micro(None) == Micro("dots", 16_384)  # this machine's own, a CPU's
    assert micro(None, remat="full") == Micro("full", 16_384)
    alone = replace(recipe, stages={"evaluate": recipe.stages["evaluate"]})
    assert devices(alone, 66 * GIB).micro == Micro("dots", 16_384)


def test_a_cpu_chooses_nothing():
    config = Config.of(resolve("qwen2.5-1.5b"))
    mesh = make_mesh(fsdp=8)
    here = Devices(config, shapes.shape("Qwen2.5-1.5B"), mesh, machine_of(mesh, [None]))
    assert (here.loads, here.micro) == ([], Micro("dots", 16_384))


@pytest.mark.parametrize(
    ("stage", "row"),
    [
        (settings.sft(max_length=300), 300),
        (settings.online(), 100 + 256),
        (settings.online(loss="dpo"), 100 + 2 * 256),
        (settings.online(loss="group_dpo", num_generations=6), 100 + 6 * 256),
        (settings.offline(), 100 + 2 * 64),
        (settings.offline(preferences="pairs.jsonl", max_length=500), 2 * 500),
        (settings.offline(preferences="pairs.jsonl"), 100 + 2 * 256),
    ],
)
def test_the_longest_row_of_a_stage(stage, row):
    config = settings.base()
    config.stages.collect = settings.collect(sampling=settings.sampling(64))
    if "sampling" in stage:
        stage.sampling.max_new_tokens = 256
    config.stages.trains = stage
    made = Config.of(config).stages
    assert made["trains"].longest_row(100, made) == row


def test_pairs_of_an_archive_are_as_long_as_what_was_sampled():
    config = settings.base()
    config.stages.warmup = settings.online(policy="init", sampling=settings.sampling(8192))
    config.stages.collect = settings.collect(policy="warmup", rollouts="archive")
    config.stages.dpo = settings.offline(policy="warmup")
    made = Config.of(config).stages
    assert made["dpo"].longest_row(100, made) == 100 + 2 * 8192


def test_a_micro_batch_may_be_set_below_a_token_a_device(devices):
    config = resolve("qwen2.5-1.5b")
    config.compute.microbatch_tokens = 4
    assert devices(Config.of(config), 80 * GIB).micro.tokens == 4


def test_a_work_directory_keeps_the_choice_of_each_machine(tmp_path):
    folder, chosen, other = epath.Path(tmp_path), Micro("dots", 65_536), Micro("full", 32_768)
    eight, four = {"devices": "8 devices (H100)"}, {"devices": "4 devices (H100)"}
    assert kept(folder, eight) is None
    assert keep(folder, eight, chosen, begun=False) == chosen
    assert keep(folder, eight, other, begun=True) == chosen
    assert keep(folder, four, other, begun=True) == other
    assert keep(folder, eight, other, begun=True) == kept(folder, eight) == chosen
    # No stage has begun: nothing rests on what is kept.
    assert keep(folder, eight, other, begun=False) == other
    assert kept(folder, four) is None
    assert (folder / training_memory.KEPT).exists()
