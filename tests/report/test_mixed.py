"""What mixed prompts are called, where rewards are scalar and where answers are right or wrong."""

import dataclasses
from pathlib import Path

import pytest

from g2d_jax.records import Score, Verdict
from g2d_jax.report.informativeness import informativeness
from g2d_jax.report.run import read_run
from g2d_jax.storage import finish
from g2d_jax.tables import write_rollouts

SCALAR = {"a": ((1.0, 2.0), (3.0, 4.0)), "b": ((2.0, 2.0), (2.5, 0.5)), "c": ((1.0, 1.0), (0.5, 1.5))}
"""Problem -> rewards of the first policy, and of the last one."""
JUDGED = {"d": ((0.0, 0.0), (1.0, 0.0))}


@pytest.fixture
def evaluated(tmp_path, make_rollout):
    """Writes an evaluation of two policies; those of JUDGED have right and wrong answers."""

    def make(*problems: str) -> Path:
        for place, policy in enumerate(("cold", "train@2")):
            rows = []
            for problem in problems:
                for sample, reward in enumerate((SCALAR | JUDGED)[problem][place]):
                    right = Verdict.CORRECT if reward else Verdict.INCORRECT
                    row = make_rollout(problem, sample, "1+1=2", Verdict.SCORED if problem in SCALAR else right, policy)
                    score = Score(reward, row.score.verdict, None)
                    rows.append(dataclasses.replace(row, score=score))
            write_rollouts(tmp_path / "01-evaluate" / "rollouts" / f"{policy}.parquet", rows)
        judged = [problem for problem in problems if problem in JUDGED]
        tasks = {"chat": {"accuracy": None, "reward": 1.0}} if len(judged) < len(problems) else {}
        tasks |= {"main": {"accuracy": 0.5}} if judged else {}
        measures = {"frac_mixed": 0.5, "pass_rate": 0.5 if judged else "NaN", "confidence": 0.5}
        entry = {"mean": 0.5 if judged else None, "tasks": tasks, "informativeness": measures}
        entries = [{"name": "cold", **entry}, {"name": "train@2", "label": "best", **entry}]
        fields = {"name": "evaluate", "kind": "evaluate", "seconds": 1.0}
        finish(tmp_path / "01-evaluate", {**fields, "result": {"policies": entries, "problems": len(problems)}})
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("problems", "words", "absent"),
    [
        ("a", "their completions have different rewards, as scalar ones are neither right nor wrong.", "AUROC"),
        (
            "ad",
            "they have right and wrong completions or, of scalar rewards, which are neither, different ones.",
            "as scalar",
        ),
        ("d", "they have right and wrong completions.", "scalar"),
    ],
)
def test_mixed_prompts_are_called_what_they_are(evaluated, problems, words, absent):
    found = informativeness(read_run(evaluated(*problems)))
    assert words in found and absent not in found
