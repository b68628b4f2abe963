"""KTO on graded rollouts: what is an example, the first update by hand, the reference point, a restart."""

from pathlib import Path

import numpy as np
import pytest
from ml_collections import ConfigDict
from worlds import bits, only, run

from g2d_jax import pipeline
from g2d_jax.config import Config
from g2d_jax.records import Rollout, Score, ScoredRollout, Verdict
from g2d_jax.runtime import storage
from g2d_jax.runtime.tables import write_rollouts
from g2d_jax.runtime.tracking import read_metrics
from g2d_jax.stages import kto, offline
from g2d_jax.stages.policies import load_policy

GRADES = ("cc", "iii", "ci", "cti")  # correct, incorrect, in no time; of four problems, two of which give no pair
VERDICTS = {"c": Verdict.CORRECT, "i": Verdict.INCORRECT, "t": Verdict.TIMEOUT}


def rollouts() -> list[ScoredRollout]:
    rng, rows = np.random.default_rng(0), []
    for problem, grades in enumerate(GRADES):
        prompt = rng.integers(1, 12, 4).astype(np.int32)
        for sample, grade in enumerate(grades):
            ids = rng.integers(1, 12, 1 + (problem + sample) % 5).astype(np.int32)
            nats = np.zeros(len(ids), np.float32)
            rollout = Rollout(f"other-{problem}", 0, sample, prompt, ids, nats, nats, "stop")
            rows.append(ScoredRollout(rollout, "", Score(float(grade == "c"), VERDICTS[grade]), "elsewhere"))
    return rows


@pytest.fixture
def small(config: ConfigDict, tmp_path: Path) -> ConfigDict:
    """Two passes of KTO over nine responses of a file, from random parameters."""
    stage = only(config, "dpo").stages.dpo
    stage.update(loss="kto", preferences=str(tmp_path / "rollouts.parquet"), batch_size=4, epochs=2)
    stage.update(undesirable_weight=1.5)
    write_rollouts(tmp_path / "rollouts.parquet", rollouts())
    return config


def test_every_graded_response_is_an_example(small, tmp_path, opened):
    runtime = opened(small, tmp_path)
    examples, labels = kto.read(runtime, runtime.config.stages["dpo"])
    assert labels.tolist() == [1, 1, 0, 0, 0, 1, 0, 1, 0]
    graded = [row.rollout for row in rollouts() if row.score.verdict is not Verdict.TIMEOUT]
    others = kto.of_other_problems([rollout.problem_id for rollout in graded])
    for example, rollout, index in zip(examples, graded, others, strict=True):
        other = graded[index]
        assert other.problem_id != rollout.problem_id
        for response, expected in zip(example.responses, (rollout, other), strict=True):
            assert response.token_ids.tolist() == expected.token_ids.tolist()
        assert example.prompt_ids.tolist() == rollout.prompt_ids.tolist()


def test_training_is_what_the_formulae_say_and_a_restart_the_same(small, tmp_path, opened):
    runtime = opened(small, tmp_path)
    manifest = run(runtime)
    assert manifest["counts"] == {"responses": 9, "desirable": 4, "undesirable": 5, "steps": 4, "unused": 2}
    assert "result" not in manifest  # there are no pairs to measure
    steps = [row["metrics"] for row in read_metrics(tmp_path) if row["stage"] == "dpo" and "loss" in row["metrics"]]
    first, *_, last = steps
    # The policy is the reference: every factor is 1/2, and so is the gradient's step towards the labels.
    assert first["loss"] == pytest.approx(0.5 * (first["desirable"] + 1.5 * first["undesirable"]) / 4, rel=1e-5)
    assert first["kl"] == first["rewards/chosen"] == 0.0 and all(step["kl"] >= 0 for step in steps)
    assert last["rewards/chosen"] > last["rewards/rejected"]

    stage, bare = runtime.config.stages["dpo"], load_policy(runtime, "dpo")
    examples, _ = kto.read(runtime, stage)
    row_length = offline._row_length(runtime, examples, 4)
    references, _ = offline.reference_logprobs(runtime, "dpo", stage, examples, row_length)
    rows = offline.RowShape(row_length, 4)
    kl = kto.measure_kl(runtime, bare, examples[:4], references[:4, 1], rows, offline.Cost())
    trained = offline.score(runtime, bare, examples, row_length, offline.Cost())
    assert kl == pytest.approx(max(0.0, float((trained - references)[:4, 1].mean())), rel=1e-4, abs=1e-6)

    (runtime.folders["dpo"] / storage.MANIFEST).unlink()
    for checkpoint in (tmp_path / "01-dpo" / "checkpoints").glob("4*"):
        checkpoint.rename(tmp_path / "moved")
    assert run(opened(small, tmp_path))["counts"] == manifest["counts"]
    assert bits(load_policy(runtime, "dpo")) == bits(bare)


def test_what_kto_cannot_use_is_refused(small, tmp_path, opened):
    pipeline.check(Config.of(small))
    small.stages.dpo.loss_type = "ipo"
    with pytest.raises(ValueError, match=r"stages\.dpo: loss_type and label_smoothing are settings of DPO"):
        Config.of(small)
    small.stages.dpo.loss_type, small.reward.verifiable = "sigmoid", False
    with pytest.raises(ValueError, match=r"stages\.dpo: .* right and wrong responses, which some rewards do not"):
        pipeline.check(Config.of(small))
    small.reward.verifiable = None
    write_rollouts(tmp_path / "rollouts.parquet", rollouts()[:2])
    with pytest.raises(ValueError, match="all graded responses are to one problem"):
        run(opened(small, tmp_path))


@pytest.mark.parametrize("problems", ["aabb", "abab", "aaaaabbb", "aaaaaaab", "abcabcaab", "ba"])
def test_the_other_response_is_to_another_problem_in_any_order(problems):
    others = kto.of_other_problems(list(problems))
    assert all(problems[other] != own for own, other in zip(problems, others, strict=True))
    assert kto.of_other_problems(list("aabb")).tolist() == [2, 3, 0, 1]
