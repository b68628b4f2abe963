"""What an offline stage measures of its pairs: literal where nothing is learnt, same after a restart, paid apart."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
import pytest
from ml_collections import ConfigDict
from worlds import bits, only, run

from g2d_jax import pipeline
from g2d_jax.config import Config, OnlineDPO
from g2d_jax.data.order import Order
from g2d_jax.models.decoder import Decoder
from g2d_jax.records import Preference
from g2d_jax.runtime import storage
from g2d_jax.runtime.tables import read_preferences, write_preferences
from g2d_jax.runtime.tracking import read_metrics
from g2d_jax.stages import offline
from g2d_jax.stages.cost import Cost
from g2d_jax.stages.policies import load_policy
from g2d_jax.stages.problems import order as problem_order
from g2d_jax.stages.runtime import Runtime
from g2d_jax.study import informativeness
from g2d_jax.training import objectives
from g2d_jax.training.objectives import Compute, Micro, Objective

PAIRS = 20


@pytest.fixture
def small(config: ConfigDict, tmp_path: Path) -> ConfigDict:
    """The dpo stage alone, from random parameters on pairs of a file."""
    only(config, "dpo").stages.dpo.preferences = str(tmp_path / "pairs.parquet")
    write_preferences(tmp_path / "pairs.parquet", made(PAIRS))
    return config


def made(count: int) -> list[Preference]:
    """Pairs of 1 to 6 tokens to prompts of 4."""
    rng = np.random.default_rng(0)

    def ids(length: int) -> np.ndarray:
        return rng.integers(1, 12, length).astype(np.int32)

    def pair(i: int) -> Preference:
        chosen, rejected, prompt = ids(1 + i % 6), ids(1 + (i + 3) % 6), ids(4)
        return Preference(f"other-{i}", "1+1=?", "2", "3", prompt, chosen, rejected, 1.0, 0.0)

    return [pair(i) for i in range(count)]


def again(runtime: Runtime) -> dict[str, Any]:
    """The stage once more, as if it had been killed before its manifest was written."""
    (runtime.folders["dpo"] / storage.MANIFEST).unlink()
    return run(runtime)


def without_seconds(manifest: dict[str, Any]) -> dict[str, Any]:
    """A manifest's fields that two runs share."""
    assert manifest["diagnosis"]["seconds"] > 0
    kept = {key: manifest[key] for key in ("result", "flops", "tokens", "counts", "fingerprint")}
    return {**kept, "diagnosis": {name: x for name, x in manifest["diagnosis"].items() if "seconds" not in name}}


def floats(values: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


def test_nothing_learnt_is_no_reward(small, tmp_path, opened):
    small.stages.dpo.optimizer.learning_rate = 0.0
    result = run(opened(small, tmp_path))["result"]
    margins = floats(result["margins"])
    assert margins.pop("loss") == pytest.approx(np.log(2), rel=1e-12)
    assert margins.pop("pairs") == PAIRS
    assert set(margins.values()) == {0.0} and "accuracy" in margins
    assert result["before"] == result["after"]
    assert result["before"]["pairs"] == PAIRS and result["before"]["chosen_length"] == np.mean(
        [1 + i % 6 for i in range(PAIRS)]
    )
    assert result["signal"]["signal"] > 0  # the gradient is not


def test_what_is_measured_is_what_the_table_holds(small, tmp_path, opened):
    runtime = opened(small, tmp_path)
    manifest = run(runtime)
    table = pd.read_parquet(tmp_path / "01-dpo" / "pairs.parquet")
    pairs = read_preferences(tmp_path / "pairs.parquet")
    examples = offline.batch(pairs, np.zeros((PAIRS, 2)))
    lengths = table["chosen_length"].to_numpy(), table["rejected_length"].to_numpy()
    assert list(table["problem_id"]) == [pair.problem_id for pair in pairs]
    assert lengths[0].tolist() == [len(pair.chosen_ids) for pair in pairs]
    assert lengths[1].tolist() == [len(pair.rejected_ids) for pair in pairs]
    before, after = (np.stack([table[f"{which}chosen"], table[f"{which}rejected"]], axis=1) for which in ("ref_", ""))
    for policy, found in (("init", before), ("dpo", after)):
        scored = offline.score(runtime, load_policy(runtime, policy), examples, 64, Cost())
        np.testing.assert_array_equal(found, scored, err_msg=policy)
    result = manifest["result"]
    assert result["before"] == informativeness.pair_summary(*before.T, *lengths)
    assert result["after"] == informativeness.pair_summary(*after.T, *lengths)
    assert result["margins"] == informativeness.margin_summary(0.1, before, after)
    assert result["margins"]["margin_mean"] > 0 and result["margins"]["loss"] < np.log(2)
    signal = floats(result["signal"])
    assert (signal["batches"], signal["pairs_per_batch"]) == (16, 1)
    assert signal["ratio"] == pytest.approx(signal["signal"] / signal["noise"])
    (logged,) = [record for record in read_metrics(tmp_path) if record["kind"] == "diagnosis"]
    assert (logged["stage"], logged["step"]) == ("dpo", PAIRS // 8)
    assert logged["metrics"]["after/gap_mean"] == result["after"]["gap_mean"]
    assert logged["metrics"]["margins/accuracy"] == result["margins"]["accuracy"]
    assert logged["metrics"]["signal/ratio"] == signal["ratio"]


def test_a_restart_measures_the_same(small, tmp_path, opened):
    runtime = opened(small, tmp_path)
    first = run(runtime)
    folder = tmp_path / "01-dpo"
    (kept,) = folder.glob("signal-*.json")
    written, table = kept.stat().st_mtime_ns, (folder / "pairs.parquet").read_bytes()
    (folder / "pairs.parquet").unlink()
    assert without_seconds(again(opened(small, tmp_path))) == without_seconds(first)
    assert kept.stat().st_mtime_ns == written  # read, not measured again
    assert (folder / "pairs.parquet").read_bytes() == table
    kept.unlink()
    assert without_seconds(again(runtime)) == without_seconds(first)


def test_diagnosis_is_paid_apart_and_changes_nothing(small, tmp_path, opened):
    diagnosed = opened(small, tmp_path / "with")
    one = run(diagnosed)
    small.stages.dpo.diagnose = False
    plain = opened(small, tmp_path / "without")
    other = run(plain)
    assert "result" not in other and "diagnosis" not in other
    assert not list((tmp_path / "without" / "01-dpo").glob("*.parquet"))
    assert not list((tmp_path / "without" / "01-dpo").glob("signal-*"))
    assert {key: one[key] for key in ("flops", "tokens", "counts")} == {
        key: other[key] for key in ("flops", "tokens", "counts")
    }
    cost = one["diagnosis"]
    assert cost["tokens"]["scored"] == one["tokens"]["scored"] > 0  # all pairs once, as for the reference
    pairs = made(PAIRS)
    used = [pairs[i] for (i,) in offline.signal_draws(problem_order(diagnosed.config, PAIRS, "signal/dpo"), 256)]
    assert cost["tokens"]["trained"] == sum(4 + len(p.chosen_ids) + len(p.rejected_ids) for p in used)
    assert cost["flops"] > 0 and cost["seconds"] > 0
    assert bits(load_policy(diagnosed, "dpo")) == bits(load_policy(plain, "dpo"))


def test_the_gradient_is_that_of_the_loss_that_trains(small, tmp_path, opened):
    def measured(workdir: Path, factor: float) -> dict[str, float]:
        def scaled(compute: Compute) -> Objective:
            inner = objectives.dpo(compute, OnlineDPO())

            def objective(params: Decoder, micro: Micro) -> tuple[jax.Array, dict[str, jax.Array]]:
                loss, sums = inner(params, micro)
                return factor * loss, sums

            return objective

        runtime = opened(small, workdir)
        runtime.objectives = {"dpo": scaled}
        return floats(run(runtime)["result"]["signal"])

    small.stages.dpo.signal_pairs = 8
    one, two = measured(tmp_path / "one", 1.0), measured(tmp_path / "two", 2.0)
    assert two["square_signal"] == pytest.approx(4 * one["square_signal"], rel=1e-4)
    assert two["noise"] == pytest.approx(2 * one["noise"], rel=1e-4) and one["noise"] > 0
    assert (one["batches"], one["pairs_per_batch"]) == (8, 1)


def test_an_empty_response_is_refused_before_training(small, tmp_path, opened):
    pairs = made(4)
    pairs[2] = dataclasses.replace(pairs[2], rejected_ids=np.zeros(0, np.int32))
    write_preferences(tmp_path / "pairs.parquet", pairs)
    with pytest.raises(ValueError, match="each response has at least 1"):
        run(opened(small, tmp_path))
    assert not (tmp_path / "01-dpo" / "checkpoints").exists()


def test_the_signal_alone_can_be_left_out(small, tmp_path, opened):
    small.stages.dpo.signal_pairs = 0
    manifest = run(opened(small, tmp_path))
    assert manifest["result"]["signal"] == {} and manifest["diagnosis"]["tokens"]["trained"] == 0
    assert manifest["result"]["after"]["pairs"] == PAIRS


def test_one_pair_has_no_noise_to_see(small, tmp_path, opened, capsys):
    write_preferences(tmp_path / "pairs.parquet", made(1))
    manifest = run(opened(small, tmp_path))
    assert manifest["result"]["signal"] == {} and manifest["result"]["before"]["pairs"] == 1
    output = capsys.readouterr()
    assert "dpo: the gradient's signal is not measured, that takes at least 2 pairs" in output.out + output.err


def test_simpo_has_no_reference_to_score(small, tmp_path, opened):
    small.stages.dpo.update(loss_type="simpo", beta=2.0, diagnose=False)
    manifest = run(opened(small, tmp_path))
    assert manifest["tokens"]["scored"] == 0 and not list((tmp_path / "01-dpo").glob("reference-*"))
    steps = [row["metrics"] for row in read_metrics(tmp_path) if "loss" in row["metrics"]]
    assert all(-2 * 5 < step["rewards/chosen"] < 0 for step in steps)  # beta times a mean log-probability of 12 words


def test_settings_that_cannot_work_are_refused(small):
    pipeline.check(Config.of(small))
    small.stages.dpo.signal_pairs = 1
    with pytest.raises(ValueError, match=r"stages\.dpo\.signal_pairs must be at least 2, or 0 .* got 1"):
        pipeline.check(Config.of(small))


@pytest.mark.parametrize(
    ("pairs", "wanted", "batches", "size"),
    [(1000, 256, 16, 16), (1000, 40, 16, 2), (40, 256, 16, 2), (5, 256, 5, 1), (100, 2, 2, 1), (100, 0, 0, 0)],
)
def test_batches_of_the_signal(pairs, wanted, batches, size):
    draws = offline.signal_draws(Order(pairs, 7), wanted)
    assert [len(drawn) for drawn in draws] == [size] * batches
    flat = [index for drawn in draws for index in drawn]
    assert flat == [Order(pairs, 7)[position][0] for position in range(batches * size)]
    assert len(set(flat)) == len(flat)
