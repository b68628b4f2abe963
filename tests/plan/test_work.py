"""Formulas by literal values: rooflines, bytes on a device, saved activations, a train step's
memory."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from g2d_jax import config as settings
from g2d_jax.config import Config
from g2d_jax.models import shapes
from g2d_jax.plan.search import choices, overrides, savings, train_bytes
from g2d_jax.plan.target import _needed
from g2d_jax.plan.topologies import DEVICES, topology
from g2d_jax.plan.work import ASSUMED, problems, shape_of, time_of
from g2d_jax.runtime.mesh import device_bytes, make_mesh
from g2d_jax.runtime.program import Work
from g2d_jax.session.training_programs import saved_per_token


def test_a_program_over_many_tokens_takes_as_long_as_its_longest_part():
    """A v5e: 197 TFLOP/s, 819 GB/s, and 200 GB/s over two axes of the torus, of which one gives a
    quarter."""
    device, work = DEVICES["v5e"], Work(1, 197e12, 819e9 / 2)
    axes = {16: 2, 4: 1}
    alone = time_of(work, device, {}, axes)
    assert (alone.least, alone.bound) == (1.0, "products")
    assert alone.seconds == pytest.approx(1 / 0.764)
    sending = time_of(work, device, {4: 50e9, 16: 100e9, 2: 100e9}, axes, collectives=1000)
    assert (sending.least, sending.bound) == (3.0, "links")
    assert sending.seconds == pytest.approx(3 / 0.764)  # others go on while one waits
    # 25 GB leave the slice, at 3.125 GB/s a chip.
    far = time_of(work, device, {16: 40e9}, axes, far=25e9)
    assert (far.least, far.bound) == (8.0, "network")


def test_a_decode_step_is_the_sum_of_what_it_reads_sends_and_waits_for():
    """Qwen2.5-1.5B, 256 rows that read 1,024 columns on one v6e chip: 3.09 GB of weights, longer
    than the products, and 7.5 GB of cache, in all 6.5 ms as performance tables have it."""
    cached = 256 * 1024 * 28_672
    work = Work(1, 2 * 1.544e9 * 256, 2 * 1.544e9, cached=cached, layers=28)
    alone = time_of(work, DEVICES["v6e"], {}, {})
    assert alone.bound == "cache" and alone.least == pytest.approx(6.5e-3, rel=0.01)
    assert alone.seconds == pytest.approx(alone.least / 0.472)
    sending = time_of(work, DEVICES["v6e"], {4: 100e6}, {4: 1}, collectives=61)
    assert sending.parts.links == 1e-3 and sending.parts.waits == pytest.approx(61 * 7e-6)
    assert sending.least == pytest.approx(alone.least + 1e-3)
    assert sending.seconds == pytest.approx(sending.least / 0.472 + 61 * 7e-6)
    launched = time_of(work, DEVICES["h100"], {}, {})
    assert launched.parts.waits == pytest.approx(28 * 25e-6)


def test_bytes_on_a_device():
    mesh = make_mesh(fsdp=8)
    split, whole = NamedSharding(mesh, PartitionSpec("fsdp")), NamedSharding(mesh, PartitionSpec())
    tree = {
        "a": jax.ShapeDtypeStruct((16, 3), jnp.float32, sharding=split),
        "b": jax.ShapeDtypeStruct((5,), jnp.bfloat16, sharding=whole),
    }
    assert device_bytes(tree) == 2 * 3 * 4 + 5 * 2
    offloaded = jax.ShapeDtypeStruct(
        (16, 3), jnp.float32, sharding=split.with_memory_kind("pinned_host")
    )
    assert device_bytes([offloaded, tree]) == device_bytes(tree)


def test_saved_activations():
    # 28 layers, 3584 wide, 28 heads and 4 key heads of 128, 18944 in between
    model = shapes.shape("Qwen2.5-7B")
    assert saved_per_token(model, "full") == 28 * 3584
    assert saved_per_token(model, "attention") == 28 * 2 * 3584
    assert saved_per_token(model, "none") == 28 * (7 * 3584 + 3 * 512 + 3 * 18_944)
    # Split over the axis tensor, what lies between the layers too.
    assert saved_per_token(model, "attention", 4) == 28 * 2 * 3584 / 4
    # 18 recurrent layers: nothing of what they give is kept; 6 with 8 heads of 256
    mixed = shapes.shape("Qwen3.5-0.8B")
    assert saved_per_token(mixed, "attention") == 18 * 1024 + 6 * (1024 + 2048)


def test_what_a_train_step_needs_by_formula():
    model, config = shapes.shape("Qwen2.5-7B"), settings.base()
    config.dtype, config.mesh.fsdp = "bfloat16", 16
    config.compute.update(microbatch_tokens=65_536, remat="full")

    def needs(*stages: str) -> float:
        return train_bytes(model, Config.of(config), 4096, stages)

    whole, parameters = needs(), 7_615_616_512 / 16
    saved, layer = 28 * 3584 * 4096 * 2, (7 * 3584 + 3 * 512 + 3 * 18_944) * 4096 * 4
    head, logits = 152_064 * 3584 * 6, 12 * 768 * 152_064
    masks = 7 * 4096**2
    assert whole == 18 * parameters + saved + layer + masks + head + logits
    config.stages.sft = settings.sft(optimizer=settings.optimizer(1e-3, moment_dtype="bfloat16"))
    assert whole - needs() == 4 * parameters
    config.stages.sft.optimizer.update(kind="adafactor", moment_dtype="float32")
    assert whole - needs() == 8 * parameters
    config.stages.dpo = settings.offline()  # AdamW in float32: the largest counts
    assert needs() == whole and whole - needs("sft") == 8 * parameters
    config.compute.offload_optimizer = True
    assert whole - needs() == 8 * parameters


def test_a_slice_takes_its_share_of_the_rows_and_all_of_the_parameters():
    model, config = shapes.shape("Qwen2.5-7B"), settings.base()
    config.dtype, config.mesh.fsdp = "bfloat16", 16
    config.compute.update(microbatch_tokens=65_536, remat="full")
    one = train_bytes(model, Config.of(config), 4096)
    config.mesh.data = 2
    config.compute.microbatch_tokens *= 2
    assert train_bytes(model, Config.of(config), 4096) == one


def test_what_saves_memory_and_changes_the_result():
    config = settings.base()
    config.stages.sft = settings.sft()
    config.stages.dpo = settings.offline()
    config.stages.test = settings.evaluate()
    adapters = ["lora.rank=16", "lora.base_dtype=bfloat16"]
    moments = [f"stages.{name}.optimizer.moment_dtype=bfloat16" for name in ("dpo", "sft")]
    codes = [["lora.quantise=int8"]] if importlib.util.find_spec("qwix") else []
    beside = [adapters, *([*adapters, *each] for each in codes)]
    assert savings(Config.of(config)) == [moments, *beside]
    assert savings(Config.of(config), ["dpo"]) == [moments[:1], *beside]
    assert savings(Config.of(config), ["test"]) == []
    config.stages.sft.optimizer.kind = "adafactor"
    config.stages.dpo.optimizer.moment_dtype = "bfloat16"
    assert savings(Config.of(config)) == beside
    config.lora.rank = 4
    assert savings(Config.of(config)) == [other[1:] for other in beside]
    config.lora.base_dtype = "bfloat16"
    assert savings(Config.of(config)) == codes
    config.lora.quantise = "nf4"
    assert savings(Config.of(config)) == []


def test_choices_are_those_a_config_can_take_quickest_first():
    config = Config.of(settings.base())
    tried = choices(config, topology("v5e-16"))
    first = [
        "mesh.data=1",
        "mesh.fsdp=16",
        "mesh.tensor=1",
        "compute.microbatch_tokens=262144",
        "compute.remat=none",
    ]
    assert overrides(tried[0]) == first
    assert {choice.mesh.tensor for choice in tried} == {1, 2, 4}  # within a host
    assert all(choice.mesh.fsdp * choice.mesh.tensor == 16 for choice in tried)
    assert dataclasses.replace(tried[0], mesh=config.mesh, compute=config.compute) == config
    assert {
        (one.mesh.data, one.mesh.fsdp * one.mesh.tensor)
        for one in choices(config, topology("2xv5e-16"))
    } == {(2, 16)}


def test_counts():
    config = settings.base()
    assert problems(Config.of(config), "test") == 0  # no setting names any
    config.data.test = settings.source("procedural:slips", limit=1024)
    assert problems(Config.of(config), "test") == 1024
    for source, count in (("math500", 500), ("mine.jsonl", ASSUMED)):
        config.data.test = settings.source(source)
        assert problems(Config.of(config), "test") == count


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/no/such", "there is no folder /no/such: set a folder"),
        ("Qwen/Qwen9-7B", "a folder with its config"),
    ],
)
def test_a_model_that_is_not_known(path: str, message: str):
    with pytest.raises(ValueError, match=message):
        shape_of(path)


def test_the_compilers_refusal_in_a_line():
    text = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (720.00G) "
    )
    assert _needed(text + "exceeds available HBM (15.75G).") == "needs 720.00G of 15.75G"
    assert _needed("Ran out of memory in memory space hbm. Used 17.2G of 15.75G hbm. Exceeded") == (
        "needs 17.2G of 15.75G"
    )
