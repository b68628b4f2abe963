"""The record of a stage: it reads back as it was written, and what was changed, or is of another
version, is refused with what to do."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from g2d_jax.runtime import storage
from g2d_jax.session import stage_result
from g2d_jax.session.stage_result import (
    Change,
    Compiled,
    Cost,
    Evaluated,
    Evaluation,
    StageResult,
    Stop,
    TaskResult,
    Warned,
    marks_of,
)
from g2d_jax.study.stats import Accuracy, Paired

TASK = TaskResult(0.5, 0.1, math.nan, math.nan, 0.5, True, 8, 0.0, 3.0)
ENTRY = Evaluated(
    "warmup@20",
    "warm-up",
    "rollouts/warmup@20.parquet",
    marks=["10", "0-"],
    accuracy=Accuracy(0.1 + 0.2, 0.125, 2),
    tasks={"main": TASK},
    pass_at={"1": 0.25},
    verdicts={"correct": 1},
)
EVALUATION = Evaluation(
    [ENTRY],
    [Change("sft", "warmup@20", Paired(0.125, 0.5, 2))],
    ["p0", "p1"],
    problems=2,
    samples=2,
    split="test",
    sampling={"temperature": 1.0, "stop": []},
)
RESULT = StageResult(
    kind="evaluate",
    name="evaluate",
    fingerprint="0c96cf70c0dcb81b",
    started=1795922735.5,
    cost=Cost(seconds=1.5, generated=12, flops=1e9),
    costs={"40": Cost(trained=3)},
    counts={"steps": 40},
    warnings=[Warned("cut", "many are cut")],
    programs={"prefill": Compiled(2, 1.5)},
    stop=Stop("budget", "flops"),
    measures={"before": {"gap_mean": -2.5}},
    evaluation=EVALUATION,
)


def test_a_record_reads_back_as_it_was_written(tmp_path):
    assert stage_result.read(tmp_path) is None
    stage_result.write(tmp_path, RESULT)
    found = stage_result.read(tmp_path)
    # NaN is not equal to itself; JSON has its name
    assert storage.plain(found) == storage.plain(RESULT)
    assert found.evaluation.by_name["warmup@20"].accuracy == ENTRY.accuracy
    assert math.isnan(found.evaluation.policies[0].greedy) and math.isnan(found.peak_memory_bytes)
    assert found.evaluation.change("sft", "warmup@20").sampled == Paired(0.125, 0.5, 2)
    assert math.isnan(found.evaluation.change("warmup@20", "sft").sampled.difference)
    assert found.measure("before", "gap_mean") == -2.5 and math.isnan(found.measure("after", "x"))


def test_verdicts_by_problem_give_every_interval_again():
    correct = np.array([[1.0, 0.0, math.nan], [0.0, 0.0, 1.0]])
    assert marks_of(correct) == ["10-", "001"]
    np.testing.assert_array_equal(replace(ENTRY, marks=marks_of(correct)).correct, correct)
    padded = replace(ENTRY, marks=["1", "01"]).correct
    np.testing.assert_array_equal(padded, [[1.0, math.nan], [0.0, 1.0]])


CHANGES = {
    "a digit": (b'"gap_mean": -2.5', b'"gap_mean": -2.6'),
    "a digit far behind the point": (b"0.30000000000000004", b"0.30000000000000010"),
    "a sign": (b'"steps": 40', b'"steps": -40'),
    "a name": (b'"steps"', b'"stepz"'),
    "what is nested": (b"warmup@20", b"warmup@21"),
    "the checksum": (b'"checksum": "', b'"checksum": "0'),
    "a bit": (b"accuracy", b"accurac\x78"),
    "true for a number": (b'"steps": 40', b'"steps": true'),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_record_that_was_changed_is_named_with_what_to_do(tmp_path, change):
    stage_result.write(tmp_path, RESULT)
    file = tmp_path / "manifest.json"
    before, after = CHANGES[change]
    assert before in file.read_bytes()
    file.write_bytes(file.read_bytes().replace(before, after))
    with pytest.raises(
        ValueError,
        match=r"manifest.json was edited or damaged: .* Restore a copy of it, or delete",
    ):
        stage_result.read(tmp_path)
    assert stage_result.read_lenient(tmp_path)[0] is None


def test_one_without_a_checksum_is_damaged_and_one_laid_out_differently_is_not(tmp_path):
    file = tmp_path / "manifest.json"
    storage.write_json(file, {"kind": "sft", "name": "sft", "version": stage_result.VERSION})
    with pytest.raises(ValueError, match=r"manifest\.json was edited or damaged"):
        stage_result.read(tmp_path)
    storage.write_json(file, ["done"])
    with pytest.raises(ValueError, match=r"manifest\.json must hold a JSON object"):
        stage_result.read(tmp_path)
    stage_result.write(tmp_path, RESULT)
    file.write_text(json.dumps(dict(reversed(json.loads(file.read_text()).items()))))
    assert storage.plain(stage_result.read(tmp_path)) == storage.plain(RESULT)


def test_a_record_of_another_version_is_refused_by_its_number(tmp_path):
    content = {"kind": "sft", "name": "sft", "version": 7}
    content["checksum"] = storage.fingerprint(content)
    storage.write_json(tmp_path / "manifest.json", content)
    with pytest.raises(
        ValueError, match=r"a record of version 7, and this g2d_jax reads version 1"
    ):
        stage_result.read(tmp_path)
