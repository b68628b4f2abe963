"""Numbers that are not finite and checkpoints that are damaged: nothing is trained on them or lost
by them."""

import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict
from safetensors.numpy import load_file
from worlds import bits, only, run, training

from g2d_jax.config import Sampling
from g2d_jax.data.packing import Group, Response
from g2d_jax.records import Request
from g2d_jax.rollouts.score import require_finite
from g2d_jax.runtime import storage
from g2d_jax.runtime.tracking import read_metrics
from g2d_jax.session import stage_result
from g2d_jax.session.policies import load_policy
from g2d_jax.session.session import Session, StopRun
from g2d_jax.stages import sft
from g2d_jax.training.checkpoint import Checkpoints, DamagedCheckpoint


@pytest.fixture
def only_sft(config: ConfigDict) -> ConfigDict:
    only(config, "sft").stages.sft.optimizer.schedule = "linear"
    return config


def groups(session: Session, weight: float | None = None) -> list[Group]:
    """Four demonstrations; `weight`: of the first one's tokens."""
    found = sft.batch(sft.examples(session, "sft", session.config.stages["sft"])[0][:4])
    if weight is None:
        return found
    first = Response(found[0].responses[0].token_ids, {"weight": weight})
    return [replace(found[0], responses=[first]), *found[1:]]


def test_skipped_updates_leave_no_trace_but_their_count(only_sft, tmp_path, opened, capsys):
    """Over a restart too: the schedule goes on where it was, and the learning rates in the log are
    those used."""
    session = opened(only_sft, tmp_path / "with")
    with training(session, "sft", 6) as trainer:
        for weight in (None, np.nan):
            trainer.update(groups(session, weight), {})
            trainer.checkpoint_if_due()
    again = opened(only_sft, tmp_path / "with")
    with training(again, "sft", 6) as trainer:
        state = trainer.extra_state
        assert (trainer.step, state.skipped_updates, state.skipped_in_row) == (2, 1, 1)
        for weight in (np.inf, None, None):
            trainer.update(groups(again, weight), {})
        assert trainer.finish({"examples": 3}).counts == {"examples": 3, "skipped_updates": 2}
        assert state.skipped_in_row == 0
        found = bits(trainer.state)
    without = opened(only_sft, tmp_path / "without")
    with training(without, "sft", 6) as trainer:
        for _ in range(3):
            trainer.update(groups(without), {})
        assert trainer.finish({}).counts == {}
        assert bits(trainer.state) == found
    logged, expected = (
        [r["metrics"] for r in read_metrics(tmp_path / name)] for name in ("with", "without")
    )
    assert [m["skipped_updates"] for m in logged] == [0, 1, 2, 2, 2]
    assert np.isnan(float(logged[1]["loss"]))
    done = [logged[i] for i in (0, 3, 4)]
    assert [(m["learning_rate"], m["loss"]) for m in done] == [
        (m["learning_rate"], m["loss"]) for m in expected
    ]
    assert logged[1]["learning_rate"] == logged[2]["learning_rate"] == logged[3]["learning_rate"]
    said = capsys.readouterr().out
    assert (
        said.count("is skipped") == 1
        and "sft: update 2 is skipped because it is not finite (loss NaN" in said
    )


def test_skips_in_a_row_end_the_run_and_leave_the_batch(only_sft, tmp_path, opened):
    session = opened(only_sft, tmp_path)
    with (
        training(session, "sft", 9) as trainer,
        pytest.raises(StopRun, match="sft: 5 updates in a row were not finite") as error,
    ):
        for weight in (None, np.inf, None, np.nan, np.nan, np.inf, np.nan, np.inf):
            trainer.update(groups(session, weight), {})
    folder = tmp_path / "01-sft" / "nonfinite-000008"
    assert trainer.step == 8 and str(folder) in str(error.value)
    batch = load_file(folder / "batch.safetensors")
    record = storage.read_json(folder / "record.json")
    response = groups(session)[0].responses[0].token_ids
    assert (batch["tokens"][np.isinf(batch["weight"])] == response).all()
    assert record["nonfinite_values"] == {"weight": len(response)}
    assert (record["stage"], record["step"]) == ("sft", 8)
    assert (
        record["metrics"]["loss"] in ("NaN", "Infinity")
        and record["metrics"]["skipped_updates"] == 6
    )


def test_a_sick_policy_is_not_sampled_from(only_sft, tmp_path, opened):
    session = opened(only_sft, tmp_path)
    params = load_policy(session, "init")
    sampler, problem = session.sampling.sampler, session.problems.train[0]
    how = Sampling(max_new_tokens=4).params(session.sampling.stop_ids)
    requests = [Request(problem.id, session.tokenizer.encode_prompt(problem), how, num_samples=3)]
    well = list(sampler.generate(sampler.to_sampler_params(params), requests, "test"))
    require_finite(well, "init")
    nowhere = jax.tree.map(lambda x: x * np.float32(np.nan), params)
    sick = list(sampler.generate(sampler.to_sampler_params(nowhere), requests, "test"))
    with pytest.raises(StopRun, match=r"policy sft@4: 3 of 6 sampled responses .*nan at token 1"):
        require_finite([*well, *sick], "sft@4")


DAMAGES = {
    "cut": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "flipped": lambda file: file.write_bytes(
        bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:]
    ),
    "deleted": lambda file: file.unlink(),
}


def damage(folder: Path, name: str) -> None:
    """The largest file of a checkpoint's parameters."""
    DAMAGES[name](
        max((f for f in (folder / "params" / "d").iterdir()), key=lambda f: f.stat().st_size)
    )


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(
    only_sft, tmp_path, opened, capsys
):
    """And ends like a run that was never disturbed; with none before it, it starts the stage
    again."""
    whole = opened(only_sft, tmp_path / "whole")
    run(whole)
    expected = bits(load_policy(whole, "sft"))
    (
        tmp_path / "whole" / "01-sft" / "manifest.json"
    ).unlink()  # as if killed before the stage was finished
    for name, alone in (("flipped", False), ("cut", True)):
        workdir = tmp_path / name
        shutil.copytree(tmp_path / "whole", workdir)
        checkpoints = workdir / "01-sft" / "checkpoints"
        damage(checkpoints / "6", name)
        if alone:
            shutil.rmtree(checkpoints / "4")
        session = opened(only_sft, workdir)
        capsys.readouterr()
        run(session)
        assert bits(load_policy(session, "sft")) == expected
        said = " ".join(capsys.readouterr().out.split())
        assert said.count("WARNING: sft: the checkpoint of step") == 1
        assert f"It was moved to {workdir}/01-sft/damaged/step-000006" in said
        assert f"Continuing from {'the start of the stage' if alone else 'step 4'}" in said
        assert [path.name for path in (workdir / "01-sft" / "damaged").iterdir()] == ["step-000006"]
        assert Checkpoints(checkpoints).steps() == [4, 6]
        assert stage_result.read(workdir / "01-sft")


def test_two_damaged_checkpoints_in_a_row_end_the_run_and_none_is_lost(only_sft, tmp_path, opened):
    """That may be the fault of what reads them."""
    run(opened(only_sft, tmp_path))
    (tmp_path / "01-sft" / "manifest.json").unlink()
    for step in (4, 6):
        damage(tmp_path / "01-sft" / "checkpoints" / str(step), "deleted")
    with pytest.raises(DamagedCheckpoint, match="Two unreadable ones in a row"):
        run(opened(only_sft, tmp_path))
    assert (tmp_path / "01-sft" / "damaged" / "step-000006").is_dir()
    assert (tmp_path / "01-sft" / "checkpoints" / "4").is_dir()


def test_another_models_checkpoint_is_not_damage(only_sft, tmp_path, opened):
    session = opened(only_sft, tmp_path)
    with training(session, "sft", 6) as trainer:
        trainer.save_and_pin()
    only_sft.model.intermediate_size = 96
    with (
        pytest.raises(ValueError, match="saved with another configuration"),
        training(opened(only_sft, tmp_path), "sft", 6),
    ):
        pass
    assert (tmp_path / "01-sft" / "checkpoints" / "0").exists() and not (
        tmp_path / "01-sft" / "damaged"
    ).exists()
