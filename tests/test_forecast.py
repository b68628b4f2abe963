"""The forecast of a run: its arithmetic, what it runs of a config, and the command."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from g2d_jax import cli, forecast
from g2d_jax.config import Collect, Config, Offline, Optimizer
from g2d_jax.config_load import resolve
from g2d_jax.study.gain import Gain

TINY = str(Path(__file__).parent / "tiny.py")
STUDIED = Gain(1024, Collect(), Offline(beta=1.0, optimizer=Optimizer(1e-4, schedule="cosine")))
RATES = np.random.default_rng(0).binomial(8, np.random.default_rng(1).uniform(0.1, 0.6, 200)) / 8


def test_a_pace_is_found_again_and_slows_down() -> None:
    steps = np.array([0.0, 10, 20])
    nats = forecast.learned(steps, 0.1, bend=0.65)
    assert nats[1] == pytest.approx(0.65 * math.log(1 + 1 / 0.65)) and nats[1] > nats[2] - nats[1] > 0
    assert forecast.first_pace(nats[1] / 10, 10, 0.65) == pytest.approx(0.1)
    a = np.array([0.2, 0.3])[:, None].repeat(4, axis=1)  # prompts alike
    slope = (math.log(3 / 7) - math.log(1 / 4)) / 10
    assert forecast.pace_of([0, 10], a) == (pytest.approx(slope), pytest.approx(0, abs=1e-12))


@pytest.mark.parametrize("nats", [0.5, 2.0])
def test_warmed_answers_have_the_accuracy_asked_for(nats: float) -> None:
    odds = RATES.mean() / (1 - RATES.mean()) * math.exp(nats)
    after = forecast.warmed(np.append(RATES, math.nan), nats)
    assert after.mean() == pytest.approx(odds / (1 + odds), abs=0.01) and after.size == 8 * 200
    assert (after >= forecast.warmed(RATES, nats / 2)).all()


def test_k_is_told_by_what_a_step_costs() -> None:
    pace = (0.08, 0.01)
    prices = (0.0, 0.02, 0.2, 100.0)
    free, *others, dear = (forecast.k_interval(STUDIED, RATES, 10, pace, price) for price in prices)
    assert free[1] is None and dear == (0, 0)
    ends = [[math.inf if k is None else k for k in interval] for interval in (free, *others, dear)]
    assert all(low <= high for low, high in ends)
    assert all(before >= after for pair in itertools.pairwise(ends) for before, after in zip(*pair, strict=True))
    named = {(None, None): "more than 240", (3, None): "3 or more", (0, None): "cannot tell", (3, 9): "3 to 9"}
    for interval, text in named.items():
        assert forecast.k_text(interval).startswith(text)


def test_only_what_leads_to_the_warm_up_is_run() -> None:
    config = resolve("demo")
    config.stages.warmup.optimizer.update(schedule="cosine", min_lr_ratio=0.1)
    short = Config.of(forecast.shortened(config, "warmup", 9))
    assert list(short.stages) == ["sft", "warmup"] and short.stages["sft"] == Config.of(config).stages["sft"]
    warmup = short.stages["warmup"]
    assert (warmup.steps, warmup.keep, warmup.probe.every, warmup.optimizer.schedule) == (9, (0, 5), 5, "constant")
    assert (warmup.probe.prompts, warmup.probe.num_generations, warmup.probe.split) == (256, 8, "dev")
    with config.unlocked(), config.stages.unlocked():
        for name in ("warmup", "collect", "dpo", "evaluate"):
            del config.stages[name]
    with pytest.raises(ValueError, match="the config has none"):
        forecast.warmup_of(Config.of(config))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 176, "num_hidden_layers": 3}
    model |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    changes = [f"--config.model.{key}={value}" for key, value in model.items()]
    changes += ["--config.stages.warmup.policy=init", "--config.stages.collect.num_generations=8"]
    studied = {"beta": 1.0, "batch_size": 64, "optimizer.schedule": "cosine", "optimizer.learning_rate": 1e-4}
    changes += [f"--config.stages.dpo.{key}={value}" for key, value in studied.items()]

    def run(*more: str) -> tuple[dict[str, Any], str]:
        assert cli.main(["forecast", "--config", TINY, "--workdir", str(tmp_path), "--probe=2", *changes, *more]) == 0
        return json.loads((tmp_path / "forecast.json").read_text()), capsys.readouterr().out

    content, shown = run()
    assert [folder.name for folder in tmp_path.glob("0*")] == ["01-warmup"]
    assert sum(content["by_right"]) == content["prompts"] == 8 and 0 < content["pass_rate"] < 1
    assert [row["nats"] for row in content["gains"]] == [0, 1, 2, 3] and content["pace"]
    now = content["gains"][0]
    assert now["accuracy"] == pytest.approx(content["pass_rate"]) and now["mixed"] == content["mixed"]
    assert now["gain_interval"][0] < now["gain"] < now["gain_interval"][1]
    assert "what DPO is predicted to add" in shown and "cannot tell: give --topology NAME" in shown
    files = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.parquet")}

    content, shown = run("--config.stages.dpo.beta=0.1")
    assert content["cannot_tell"] == ["what DPO adds, and K: beta is 0.1, in the studies 1.0"]
    assert content["K"] is None and content["gains"] == [] and content["cannot_tell"][0] in shown
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.parquet")} == files  # nothing is sampled again
