"""The schedule by hand, without a model."""

import numpy as np
import pytest

from g2d_jax.records import Request, SamplingParams
from g2d_jax.sampler.schedule import Schedule

pytestmark = pytest.mark.quick


def request(name: str, samples: int, length: int) -> Request:
    return Request(name, np.arange(length), SamplingParams(max_new_tokens=2), samples)


def inserted(schedule: Schedule) -> dict[int, tuple[int, int]]:
    """row -> (place of the prompt, number of the sample)"""
    return {row: (place, sample.number) for row, (place, sample) in schedule.insert().items()}


def test_samples_of_one_prompt_are_spread_over_the_shards():
    asked = request("a", 5, 3)
    schedule = Schedule([asked], shards=4, rows=2, prompts=1)
    assert schedule.prefill() == {0: asked, 1: asked, 2: asked}
    assert inserted(schedule) == {0: (0, 0), 1: (0, 1), 2: (1, 2), 3: (1, 3), 4: (2, 4)}


def test_a_row_is_filled_again_when_its_sample_ends():
    short, long = request("short", 1, 3), request("long", 3, 5)
    schedule = Schedule([short, long], shards=1, rows=2, prompts=1)
    assert schedule.prefill() == {0: long}
    assert inserted(schedule) == {0: (0, 0), 1: (0, 1)}
    assert schedule.collect_finished([1, 1], [False, True]) == [1]
    assert inserted(schedule) == {1: (0, 2)}
    assert schedule.prefill() == {}, "no row waits for it"
    assert schedule.collect_finished([1, 1], [False, False]) == [0], "2 tokens of 2"
    assert schedule.prefill() == {0: short}


def test_the_last_samples_go_on_in_few_rows():
    asked = Request("a", np.arange(3), SamplingParams(max_new_tokens=9), 5)
    schedule = Schedule([asked], shards=1, rows=4, prompts=1)
    schedule.prefill()
    assert inserted(schedule) == {row: (0, row) for row in range(4)}
    assert not schedule.is_drained, "a sample waits for a row"
    schedule.collect_finished([1] * 4, [False, True, False, False])
    assert inserted(schedule) == {1: (0, 4)} and schedule.is_drained
    assert schedule.collect_finished([1] * 4, [True, False, True, False]) == [0, 2]
    assert schedule.narrow(3) == [1, 3, 0]
    assert [sample and sample.number for sample in schedule.rows] == [4, 3, None]
    assert schedule.collect_finished([7, 7, 0], [False] * 3) == [1], "9 tokens of 9"
    assert schedule.collect_finished([1, 0, 0], [False] * 3) == [0]
