"""How many rows and ways memory allows and are quickest, by numbers counted by hand."""

import dataclasses
import math

import pytest

from g2d_jax.models import shapes
from g2d_jax.models.decoder import count_params
from g2d_jax.models.flops import matmul_params
from g2d_jax.runtime.rates import RATES
from g2d_jax.sampler.capacity import UNKNOWN, Split, best_ways, kv_bytes
from g2d_jax.sampler.simulated import decoded, lengths

SEVEN = shapes.shape("Qwen/Qwen2.5-7B")
SMALL = shapes.shape("Qwen/Qwen2.5-1.5B")
GIB = 2**30


def split(ways, devices, kind="v5p", model=SEVEN, axes=(1, 1)):
    """The model's weights over so many of the devices, with a cache of 3,072 columns."""
    return Split(model, 2, ways, devices, 3072, RATES[kind], axes=axes)


def chosen(devices, kind, gib, beside, samples, most, model=SEVEN):
    """The ways of a call with responses of 2,048 tokens at most."""
    powers = (2**power for power in range(devices.bit_length()))
    splits = [split(ways, devices, kind, model) for ways in powers]
    return best_ways(splits, 2048, int(gib * GIB), int(beside * GIB), samples, most)


def test_a_token_of_the_cache():
    assert kv_bytes(SEVEN, 2) == 57_344  # 28 layers, 4 key heads of 128, keys and values, bfloat16


def test_rows_fill_what_weights_and_training_leave():
    memory, beside = 28 * GIB, 8 * GIB
    rows = split(4, 8).rows_that_fit(memory, beside)
    taken = beside + 2 * count_params(SEVEN) / 4 + rows * 3072 * 57_344 / 8
    assert rows % 16 == 0 and 0.9 * memory < taken <= 0.95 * memory
    assert split(4, 8).rows_that_fit(memory, 0) > rows
    assert split(1, 8).rows_that_fit(15 * GIB, beside) == 0
    assert split(1, 1).rows_that_fit(None, beside) == UNKNOWN


def test_a_vocabulary_that_no_way_divides_is_whole_on_every_device():
    """OLMo 3 has 100,278 words, which 16 does not divide: compiled for v5e-16 the weights take 2.29
    GiB a device, where a sixteenth of them is 0.85."""
    olmo = shapes.shape("allenai/Olmo-3-7B")
    sixteenth = 2 * count_params(olmo) / 16
    whole = 2 * 2 * 100_278 * 4096 * 15 / 16
    assert (sixteenth + whole) / GIB == pytest.approx(2.29, abs=0.01)
    row = 3072 * kv_bytes(olmo, 2) / 16
    rows = split(16, 16, "v5e", olmo).rows_that_fit(int(14.49 * GIB), 0)
    taken = sixteenth + whole + rows * row
    assert 0 <= 0.94 * 14.49 * GIB - taken < 8 * row


def test_the_words_of_a_small_model_take_room_beside_its_cache():
    """Gemma 3's 1B has 262,144 words: with 1,216 rows, whose cache and the weights leave the usual
    share, the compiled step of v5e-8 needs 14.61 of 14.49 GiB."""
    gemma = shapes.shape("google/gemma-3-1b-it")
    memory, beside = int(14.49 * GIB), int(0.1 * GIB)
    rows = split(1, 8, "v5e", gemma).rows_that_fit(memory, beside)
    cache = 3072 * kv_bytes(gemma, 2)
    of_words = 4 * 4 * 262_144  # four times their logits
    copy = 2 * 262_144 * 1152  # of the embedding, which is the head too
    free = memory - beside - 2 * count_params(gemma) - copy
    assert rows == 1152 and rows // 8 * (cache + of_words) <= free < 1216 // 8 * (cache + of_words)


@pytest.mark.parametrize(
    ("ways", "rows", "collectives", "megabytes"),
    # of the compiled step of v5e-16: tests/plan/test_programs.py
    [(1, 256, 0, 0), (4, 256, 61, 45.8), (16, 128, 235, 156.6)],
)
def test_what_a_step_sends_and_how_often_it_waits(ways, rows, collectives, megabytes):
    """With memory, products and one of the two as quick as can be, the other's unit a second."""
    quick = dataclasses.replace(
        RATES["v5e"],
        flops=math.inf,
        bandwidth=math.inf,
        link=math.inf,
        latency=0.0,
        reached=0.5,
    )
    waits = dataclasses.replace(split(ways, 16), rates=dataclasses.replace(quick, latency=1.0))
    assert waits.step_seconds(rows, 0) == collectives
    # a link of the four, of which a half is reached
    sends = dataclasses.replace(split(ways, 16), rates=dataclasses.replace(quick, link=4 / 0.5))
    assert sends.step_seconds(rows, 0) / 1e6 == pytest.approx(megabytes, rel=1e-3)
    wide = dataclasses.replace(sends, axes=(2, 2))
    assert wide.step_seconds(rows, 0) == pytest.approx(sends.step_seconds(rows, 0) / 2)


def test_a_step_takes_what_is_read_sent_and_waited_for():
    """7B on v5e-16 over 4 ways, 256 rows: 3.54 GB of weights and 1.41 GB of keys and values at 819
    GB/s, longer than the products; 45.8 MB at 50 GB/s; of both rates 0.764 is reached; 61 times 7
    us."""
    weights, cached = 2 * matmul_params(SEVEN) / 4, 256 * 1536 * 57_344 / 16
    by_hand = ((weights + cached) / 819e9 + 45.84e6 / 50e9) / 0.764 + 61 * 7e-6
    assert split(4, 16, "v5e").step_seconds(256, 1536) == pytest.approx(by_hand, rel=1e-3)
    products = 2 * matmul_params(SEVEN) * 4096 / 16 / 197e12
    assert split(1, 16, "v5e").step_seconds(4096, 1536) == pytest.approx(
        (products + 16 * cached / 819e9) / 0.764
    )
    assert split(1, 8, "h100").step_seconds(8, 0) > 28 * 25e-6  # launches


@pytest.mark.parametrize(
    ("kind", "devices", "gib", "beside", "samples", "ways"),
    [
        ("v5p", 8, 1000, 0, 100_000, 1),
        ("v5p", 8, 88, 14, 16_384, 1),
        ("v5p", 8, 88, 14, 512, 4),
        ("v6e", 8, 28.75, 12, 512, 4),
        ("v6e", 8, 28.75, 12, 16_384, 4),
        ("v5e", 16, 14.49, 7, 512, 4),  # no more than the 4 key heads
        ("v5e", 16, 14.49, 7, 16_384, 4),
        ("v5e", 256, 14.49, 0.5, 512, 16),
        ("h100", 8, 71.2, 14, 512, 4),
        ("h100", 8, 71.2, 14, 16_384, 1),
    ],
)
def test_weights_are_split_where_it_is_worth_the_sending(
    kind: str, devices: int, gib: float, beside: float, samples: int, ways: int
):
    assert chosen(devices, kind, gib, beside, samples, devices) == ways


def test_few_ways_where_rows_suffice_on_a_host_of_gpus():
    for samples in (512, 5120, 16_384):
        assert chosen(8, "h100", 71.2, 14, samples, 8) <= 4
        assert chosen(8, "h100", 71.2, 3, samples, 8, SMALL) <= 2


def test_ways_are_one_where_memory_is_unknown():
    splits = [split(ways, 8) for ways in (1, 2, 4, 8)]
    assert best_ways(splits, 2048, None, 0, 8, 8) == 1


@pytest.mark.parametrize(("samples", "rows"), [(250, 256), (512, 512), (5120, 640), (16_384, 800)])
def test_a_call_has_as_many_rows_as_draw_it_soonest(samples: int, rows: int):
    """On a v5p-16, 8 devices, weights over two of them, memory for 3,200 rows of 3,072 columns:
    2,048 are responses.

    By hand: a step reads for 3.3 ms of weights, at 0.764 of 2,765 GB/s, and for 0.0049 a row in use;
    products take as long as the weights at 700 rows; it sends for 0.0018 ms a row and waits 0.4 ms.
    5,120 samples with 3,200, 1,600, 800, 640 and 400 rows take 2,355, 3,174, 4,813, 5,632 and 8,090
    steps.
    """
    assert split(2, 8).quickest_rows(2048, 3200, samples) == rows


@pytest.mark.parametrize(
    ("kernel", "samples", "rows", "seconds"),
    [
        ("xla", 512, 256, 22.6),
        ("pallas", 512, 256, 7.7),
        ("pallas", 512, 512, 9.9),
        ("pallas", 4096, 1024, 41.7),
    ],
)
def test_a_call_on_an_h200(kernel: str, samples: int, rows: int, seconds: float):
    """1.5B, prompts of 128 tokens, responses of 2,048 at most and 600 in the mean. The first was
    measured; the others are another model's of the same step."""
    one = Split(SMALL, 2, 1, 1, 2176, RATES["h200"], kernel)
    assert one.call_seconds(2048, rows, samples) == pytest.approx(seconds, rel=0.15)


@pytest.mark.parametrize(("rows", "in_use"), [(256, 0.43), (512, 0.28)])
def test_rows_in_use_are_those_of_the_h200(rows: int, in_use: float):
    steps = decoded(128, lengths(512, 600, 2048), rows, 16, 2176, lambda earlier, _: earlier).steps
    assert 512 * 600 / rows / steps == pytest.approx(in_use, rel=0.15)


@pytest.mark.parametrize("devices", [16, 32, 64])
@pytest.mark.parametrize("samples", [8, 64, 512, 16_384])
def test_no_layer_waits_for_another_host_of_gpus_where_copies_fit(devices: int, samples: int):
    for kind, gib, model in (("h100", 71.2, SEVEN), ("a100-80", 71.3, SEVEN), ("l40s", 37, SMALL)):
        assert chosen(devices, kind, gib, 112 / devices, samples, 8, model) <= 8
    large = dataclasses.replace(SEVEN, num_hidden_layers=160)  # 77 GB
    assert 2 <= chosen(devices, "h100", 71.2, 10, samples, 8, large) <= 8


@pytest.mark.parametrize(
    ("devices", "most", "ways"), [(16, 16, 4), (16, 2, 2), (64, 4, 4), (8, 1, 1)]
)
def test_a_copy_of_the_weights_lies_within_a_host_or_slice(devices: int, most: int, ways: int):
    """With few samples four would share one."""
    assert chosen(devices, "h100", 90, 0, 8, most) == ways


def test_weights_that_fill_a_host_go_over_several():
    """14.2 GiB of weights on hosts of one device of 10 GiB; those of two leave room."""
    assert chosen(4, "h100", 10, 0, 8, 1) > 1
    assert chosen(4, "h100", 10, 0, 8, 2) == 2
