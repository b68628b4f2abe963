"""What a run says and refuses of attention's kernel before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ml_collections import ConfigDict


def test_the_kernel_of_packed_rows_is_said_once(config: ConfigDict, tmp_path: Path, opened: Any, capsys: Any) -> None:
    config.compute.row_length = 0
    context = opened(config, tmp_path)
    assert [context.row_length(longest) for longest in (100, 110, 600)] == [112, 112, 1024]
    said = [line for line in capsys.readouterr().out.splitlines() if "attention" in line]
    assert said == ["attention over packed rows of 112 tokens: xla", "attention over packed rows of 1024 tokens: xla"]


def test_the_kernel_of_prompts_is_said_once(config: ConfigDict, tmp_path: Path, opened: Any, capsys: Any) -> None:
    context = opened(config, tmp_path)
    assert context.sampler() is context.sampler()
    assert capsys.readouterr().out.count("attention over prompts: xla") == 1


def test_a_kernel_of_another_platform_is_refused(config: ConfigDict, tmp_path: Path, opened: Any) -> None:
    config.compute.attention, config.compute.row_length = "splash", 0
    context = opened(config, tmp_path)
    for begin in (context.sampler, lambda: context.row_length(100)):
        with pytest.raises(ValueError, match="attention is 'splash', but that kernel needs a TPU"):
            begin()
