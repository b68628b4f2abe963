"""The dry run's estimate of memory on CPUs: what it adds up, and what it says where that is too
much."""

import re
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from g2d_jax.commands import dryrun
from g2d_jax.recipes.config_load import resolve
from g2d_jax.runtime.memory import GIB
from g2d_jax.stages import host_memory

TINY = str(Path(__file__).with_name("tiny.py"))


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> ConfigDict:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return resolve(TINY)


def told(config: ConfigDict, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, float], str]:
    """GiB by stage, and all that was said."""
    dryrun.show(config)
    said = capsys.readouterr().out
    table = said.partition("memory, estimated")[2].partition("problems")[0]
    rows = re.findall(r"^\| (\w+) +\| ([\w -]+?) +\| +([\d.]+) +\|$", table, re.MULTILINE)
    return {stage: float(size) for stage, _, size in rows}, said


def test_every_stage_is_estimated_and_a_tiny_model_is_the_process_alone(config, capsys):
    found, said = told(config, capsys)
    assert found == dict.fromkeys(config.stages, round(host_memory.PROCESS / GIB, 1))
    assert "the run needs about" not in said


def test_a_large_model_needs_its_state_and_gradients_and_is_warned_of(config, capsys):
    config.model.update(
        hidden_size=8192, num_hidden_layers=96, num_attention_heads=64, num_key_value_heads=8
    )
    config.model.update(intermediate_size=28672)
    found, said = told(config, capsys)
    # 8192 * (8192 * 2 + 1024 * 2 + 3 * 28672) numbers a layer: 80 billion, and 20 bytes of each in
    # a train step.
    weights = 96 * 8192 * (2 * 8192 + 2 * 1024 + 3 * 28672)
    assert found["sft"] == pytest.approx(20 * weights / GIB, rel=0.02)
    # each of the eight devices samples from a copy of its own
    assert found["collect"] == pytest.approx(8 * 4 * weights / GIB, rel=0.02)
    assert re.search(
        r"WARNING: the run needs about [\d.,]+ GiB of memory, but this machine has [\d.]+ GiB", said
    )
