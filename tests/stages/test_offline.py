"""What an offline stage measures of its pairs: literal where nothing is learnt, same after a
restart, paid apart."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from ml_collections import ConfigDict
from worlds import only, run

from g2d_jax.records import Preference
from g2d_jax.runtime import storage
from g2d_jax.runtime.tables import read_preferences, write_preferences
from g2d_jax.runtime.tracking import read_metrics
from g2d_jax.session.policies import load_policy
from g2d_jax.session.row_shapes import RowShape
from g2d_jax.session.session import Session
from g2d_jax.session.stage_result import Cost, StageResult
from g2d_jax.session.training_programs import Scorer
from g2d_jax.stages import offline
from g2d_jax.study import informativeness

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


def again(session: Session) -> StageResult:
    """The stage once more, as if it had been killed before its manifest was written."""
    (session.folders["dpo"] / storage.MANIFEST).unlink()
    return run(session)


def without_seconds(result: StageResult) -> tuple:
    """What two runs share."""
    return result.measures, result.cost.flops, result.cost.tokens, result.counts, result.fingerprint


def floats(values: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


def test_nothing_learnt_is_no_reward(small, tmp_path, opened):
    small.stages.dpo.optimizer.learning_rate = 0.0
    result = run(opened(small, tmp_path)).measures
    margins = floats(result["margins"])
    assert margins.pop("loss") == pytest.approx(np.log(2), rel=1e-12)
    assert margins.pop("pairs") == PAIRS
    assert margins.pop("accuracy") == 0.5
    assert set(margins.values()) == {0.0}
    updates = [record["metrics"] for record in read_metrics(tmp_path) if record["kind"] == "train"]
    assert [update["rewards/accuracies"] for update in updates] == [0.5, 0.5]
    assert result["before"] == result["after"]
    assert result["before"]["pairs"] == PAIRS and result["before"]["chosen_length"] == np.mean(
        [1 + i % 6 for i in range(PAIRS)]
    )


def test_what_is_measured_is_what_the_table_holds(small, tmp_path, opened):
    session = opened(small, tmp_path)
    manifest = run(session)
    table = pd.read_parquet(tmp_path / "01-dpo" / "pairs.parquet")
    pairs = read_preferences(tmp_path / "pairs.parquet")
    examples = offline.batch(pairs, np.zeros((PAIRS, 2)))
    lengths = table["chosen_length"].to_numpy(), table["rejected_length"].to_numpy()
    assert list(table["problem_id"]) == [pair.problem_id for pair in pairs]
    assert lengths[0].tolist() == [len(pair.chosen_ids) for pair in pairs]
    assert lengths[1].tolist() == [len(pair.rejected_ids) for pair in pairs]
    before, after = (
        np.stack([table[f"{which}chosen"], table[f"{which}rejected"]], axis=1)
        for which in ("ref_", "")
    )
    for policy, found in (("init", before), ("dpo", after)):
        scorer = Scorer(session, RowShape(64, len(examples)))
        scored = offline.score(scorer, load_policy(session, policy), examples, Cost())
        np.testing.assert_allclose(found, scored, rtol=1e-6, err_msg=policy)
    result = manifest.measures
    assert result["before"] == informativeness.pair_summary(*before.T, *lengths)
    assert result["after"] == informativeness.pair_summary(*after.T, *lengths)
    assert result["margins"] == informativeness.margin_summary(0.1, before, after)
    assert result["margins"]["margin_mean"] > 0 and result["margins"]["loss"] < np.log(2)
    (logged,) = [record for record in read_metrics(tmp_path) if record["kind"] == "diagnosis"]
    assert (logged["stage"], logged["step"]) == ("dpo", PAIRS // 8)
    assert logged["metrics"]["after/gap_mean"] == result["after"]["gap_mean"]
    assert logged["metrics"]["margins/accuracy"] == result["margins"]["accuracy"]


def test_a_restart_measures_the_same(small, tmp_path, opened):
    first = run(opened(small, tmp_path))
    table = tmp_path / "01-dpo" / "pairs.parquet"
    written = table.read_bytes()
    table.unlink()
    assert without_seconds(again(opened(small, tmp_path))) == without_seconds(first)
    assert table.read_bytes() == written


def test_an_empty_response_is_refused_before_training(small, tmp_path, opened):
    pairs = made(4)
    pairs[2] = dataclasses.replace(pairs[2], rejected_ids=np.zeros(0, np.int32))
    write_preferences(tmp_path / "pairs.parquet", pairs)
    with pytest.raises(ValueError, match="each response need at least 1"):
        run(opened(small, tmp_path))
    assert not (tmp_path / "01-dpo" / "checkpoints").exists()


def test_limits_hold_for_a_set_with_our_own_columns_too(small, tmp_path, opened, capsys):
    pairs = made(4)
    pairs[1] = dataclasses.replace(pairs[1], chosen_ids=np.full(30, 3, np.int32))
    pairs[2] = dataclasses.replace(pairs[2], prompt_ids=np.full(17, 3, np.int32))
    write_preferences(tmp_path / "pairs.parquet", pairs)
    small.data.max_prompt_length = 16
    small.stages.dpo.max_length = 32
    session = opened(small, tmp_path)
    kept = offline.read(session, session.config.stages["dpo"])
    assert [pair.problem_id for pair in kept] == ["other-0", "other-3"]
    said = " ".join(capsys.readouterr().out.split())
    assert "2 pairs: rows of " in said
    assert (
        "pairs.parquet left out: 1 longer than max_length or the model's positions, 32 tok" in said
    )
    assert "1 with a prompt longer than data.max_prompt_length, 16 tokens" in said


def test_a_set_with_our_own_columns_is_refused_for_held_out_problems(small, tmp_path, opened):
    asked = opened(small, tmp_path).problems.by_split["test"][2].prompt
    system = {"role": "system", "content": "Be brief."}
    pairs = []
    for pair, text in zip(made(4), ("1+1=?", asked, "1+2=?", "1+3=?"), strict=True):
        prompt = (system, {"role": "user", "content": text})
        pairs.append(dataclasses.replace(pair, prompt=prompt))
    write_preferences(tmp_path / "pairs.parquet", pairs)
    session = opened(small, tmp_path)
    with pytest.raises(ValueError, match=r"1 of 4 pairs are for problems of data\.dev"):
        offline.read(session, session.config.stages["dpo"])


def test_one_pair_is_measured(small, tmp_path, opened):
    write_preferences(tmp_path / "pairs.parquet", made(1))
    assert run(opened(small, tmp_path)).measures["before"]["pairs"] == 1


def test_simpo_scores_for_the_measurement_alone(small, tmp_path, opened):
    small.stages.dpo.update(loss_type="simpo", beta=2.0)
    manifest = run(opened(small, tmp_path))
    assert manifest.cost.scored == 0
    steps = [row["metrics"] for row in read_metrics(tmp_path) if "loss" in row["metrics"]]
    # beta times a mean log-probability of 12 words
    assert all(-2 * 5 < step["rewards/chosen"] < 0 for step in steps)
