"""A window of updates under the profiler: its files are there, and a window that cannot come is
refused at once."""

from __future__ import annotations

import gzip
import json

import pytest
from worlds import run

from g2d_jax import cli
from g2d_jax.stages import run_issues


def traced(workdir) -> dict[str, bytes]:
    return {
        str(file.relative_to(workdir / "profiles")): file.read_bytes()
        for file in workdir.rglob("process-*")
    }


@pytest.mark.slow
def test_a_window_is_traced_and_nothing_else(config, opened, tmp_path, capsys):
    config.stages.sft.steps = 4
    config.logging.profile = "sft:2-3"
    run(opened(config, tmp_path), "sft")
    found = traced(tmp_path)
    folder = "plugins/profile/sft-2-3"
    assert found.keys() == {f"{folder}/process-0.xplane.pb", f"{folder}/process-0.trace.json.gz"}
    events = json.loads(gzip.decompress(found[f"{folder}/process-0.trace.json.gz"]))["traceEvents"]
    calls = sorted(
        (e["ts"], e["ts"] + e["dur"])
        for e in events
        if "PjitFunction(train_step)" in e.get("name", "")
    )
    # another's record
    within = [any(first <= start and end < last for first, last in calls) for start, end in calls]
    assert within.count(False) == 2, calls
    assert "tensorboard --logdir" in capsys.readouterr().out


def test_a_window_up_to_the_last_update(config, opened, tmp_path):
    config.stages.sft.steps = 2
    config.logging.profile = "sft:2-2"
    run(opened(config, tmp_path), "sft")
    assert len(traced(tmp_path)) == 2


@pytest.mark.parametrize(
    "text", ["", "sft", "sft:3", "sft:3-2", "sft:0-1", "sft:1-x", "sft:-1-1", "a b:1-2"]
)
def test_what_is_no_window(config, text):
    config.logging.profile = text
    with pytest.raises(ValueError, match="write STAGE:START-STOP"):
        run_issues.checked(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("collect:1-2", "a stage that trains: dpo, sft, warmup"),
        ("none-such:1-2", "a stage that trains: dpo, sft, warmup"),
        ("sft:3-7", "but sft has 6 updates"),
    ],
)
def test_a_window_that_cannot_come_is_refused(config, text, message):
    config.logging.profile = text
    with pytest.raises(ValueError, match=message):
        run_issues.checked(config)


def test_the_flag_is_the_setting(tmp_path, capsys):
    arguments = [
        "run",
        "--config",
        "demo",
        "--workdir",
        str(tmp_path / "work"),
        "--profile",
        "sft:5",
    ]
    assert cli.main(arguments) == 1
    assert "logging.profile is 'sft:5': write STAGE:START-STOP" in capsys.readouterr().err
    assert not (tmp_path / "work").exists()
