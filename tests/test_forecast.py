"""The forecast of a run: what it runs of a config, what it measures, and the command."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from g2d_jax import cli, forecast, run_stages
from g2d_jax.config import Config
from g2d_jax.config_load import resolve
from g2d_jax.runtime import storage
from g2d_jax.runtime.tables import read_rollouts

TINY = str(Path(__file__).parent / "tiny.py")


def test_a_budget_is_not_of_what_is_run_for_a_forecast() -> None:
    config = resolve("demo")
    config.stages.warmup.stop = "budget"
    config.stages.warmup.budget.amount = 1e15
    run_stages.refuse_unused(Config.of(forecast.shortened(config, "warmup", 9)))


def test_only_what_leads_to_the_warm_up_is_run() -> None:
    config = resolve("demo")
    config.stages.warmup.optimizer.update(schedule="cosine", min_lr_ratio=0.1)
    short = Config.of(forecast.shortened(config, "warmup", 9))
    assert (
        list(short.stages) == ["sft", "warmup"]
        and short.stages["sft"] == Config.of(config).stages["sft"]
    )
    warmup = short.stages["warmup"]
    assert (warmup.steps, warmup.keep, warmup.probe.every, warmup.optimizer.schedule) == (
        9,
        (0, 5),
        5,
        "constant",
    )
    assert (warmup.probe.prompts, warmup.probe.num_generations, warmup.probe.split) == (
        256,
        8,
        "dev",
    )
    with config.unlocked(), config.stages.unlocked():
        for name in ("warmup", "collect", "dpo", "evaluate"):
            del config.stages[name]
    with pytest.raises(ValueError, match="the config has none"):
        forecast.warmup_of(Config.of(config))


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*more: str) -> tuple[dict[str, Any], str]:
        assert (
            cli.main(["forecast", "--config", TINY, "--workdir", str(tmp_path), "--probe=2", *more])
            == 0
        )
        return json.loads((tmp_path / "forecast.json").read_text()), capsys.readouterr().out

    policy = "--config.stages.warmup.policy=init"
    content, shown = run(policy)
    assert [folder.name for folder in tmp_path.glob("0*")] == ["01-warmup"]
    assert [probe["step"] for probe in content["probes"]] == [0, 1, 2]
    first, *_, last = content["probes"]
    rows = read_rollouts(tmp_path / "01-warmup" / "probe" / "step-000000.parquet")
    right: dict[str, list[float]] = {}
    texts: dict[tuple[str, float], set[str]] = {}
    for row in rows:
        assert row.score.reward is not None
        right.setdefault(row.rollout.problem_id, []).append(row.score.reward)
        texts.setdefault((row.rollout.problem_id, row.score.reward), set()).add(row.text)
    rates = np.array([np.mean(rewards) for rewards in right.values()])
    assert first["prompts"] == len(rates) == 8 and sum(first["by_right"]) == 8
    assert first["pass_rate"] == pytest.approx(rates.mean())
    assert first["pass_rate_error"] == pytest.approx(rates.std(ddof=1) / np.sqrt(8))
    assert first["mixed"] == np.mean((rates > 0) & (rates < 1))
    # Up to four pairs a prompt, no two alike: as many as there are of different right and wrong
    # texts.
    offered = [len(texts.get((name, 1.0), ())) * len(texts.get((name, 0.0), ())) for name in right]
    assert first["pairs"] == sum(min(pairs, 4) for pairs in offered) == first["pairs_collected"] > 0
    assert first["response"] == pytest.approx(np.mean([len(row.rollout.token_ids) for row in rows]))
    assert content["change"] == pytest.approx(last["pass_rate"] - first["pass_rate"])
    assert (
        "2 steps changed the pass rate by" in shown and "cannot tell: give --topology NAME" in shown
    )
    assert "pairs from 8 such prompts" in shown
    files = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.parquet")}

    content, shown = run(
        policy, "--config.stages.collect.prompts=4", "--config.stages.collect.max_pairs=3"
    )
    assert (
        content["probes"][0]["pairs"] == first["pairs"]
        and content["probes"][0]["pairs_collected"] == 3
    )
    assert {
        file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.parquet")
    } == files  # nothing is sampled again


def test_rewards_that_only_rank_have_pairs_but_no_pass_rate(tmp_path: Path) -> None:
    config = resolve(
        TINY,
        ["stages.warmup.policy=init", "reward.function=tiny:longest", "reward.verifiable=false"],
    )
    content = forecast.forecast(config, tmp_path)
    (first,) = content["probes"]
    assert (first["pass_rate"], first["pass_rate_error"], content["change"]) == (None, None, None)
    assert first["mixed"] > 0 and first["pairs"] > 0
    assert storage.read_json(tmp_path / "forecast.json") == content
