"""Numbers that are not finite and checkpoints that are damaged: nothing is trained on them or lost by them."""

import gc
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from g2d_jax import pipeline, storage
from g2d_jax.data.packing import Group, Response
from g2d_jax.records import Request
from g2d_jax.replay import padded, replay
from g2d_jax.stages import sft
from g2d_jax.stages.context import Context, StopRun
from g2d_jax.stages.sick import check_rollouts
from g2d_jax.stages.training import Trainer, trainer
from g2d_jax.tracking import read_metrics
from g2d_jax.training import objectives
from g2d_jax.training.checkpoint import Checkpoints, DamagedCheckpoint

Opened = Callable[..., Context]


@pytest.fixture
def only_sft(config: ConfigDict) -> ConfigDict:
    with config.unlocked():
        config.stages = {"sft": config.stages.sft}
    config.stages.sft.optimizer.schedule = "linear"
    return config


@contextmanager
def training(context: Context) -> Iterator[Trainer]:
    with trainer(
        context,
        "sft",
        objectives.sft(context.compute),
        context.config.stages.sft.optimizer,
        policy="init",
        total=6,
        row_length=64,
        per="tokens",
    ) as made:
        yield made


def groups(context: Context, weight: float | None = None) -> list[Group]:
    """Four demonstrations; `weight`: of the first one's tokens."""
    found = sft.batch(context, sft.examples(context, context.config.stages.sft)[0][:4])
    if weight is None:
        return found
    first = Response(found[0].responses[0].token_ids, {"weight": weight})
    return [replace(found[0], responses=[first]), *found[1:]]


def leaves(tree: object) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(jax.device_get(tree))]


def test_skipped_updates_leave_no_trace_but_their_count(
    only_sft: ConfigDict, tmp_path: Path, opened: Opened, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over a restart too: the schedule goes on where it was, and the learning rates in the log are those used."""
    context = opened(only_sft, tmp_path / "with")
    with training(context) as made:
        for weight in (None, np.nan):
            made.update(groups(context, weight), {})
            made.checkpoint_if_due()
    again = opened(only_sft, tmp_path / "with")
    with training(again) as made:
        assert (made.step, made.skips.total, made.skips.row) == (2, 1, 1)
        for weight in (np.inf, None, None):
            made.update(groups(again, weight), {})
        made.flush()
        assert (made.skips.total, made.skips.row, made.skips.manifest()) == (2, 0, {"skipped_updates": 2})
        found = leaves(made.state)
    without = opened(only_sft, tmp_path / "without")
    with training(without) as made:
        for _ in range(3):
            made.update(groups(without), {})
        made.flush()
        assert leaves(made.state) == found and made.skips.manifest() == {}
    logged, expected = ([r["metrics"] for r in read_metrics(tmp_path / run)] for run in ("with", "without"))
    assert [m["skipped_updates"] for m in logged] == [0, 1, 2, 2, 2]
    assert np.isnan(float(logged[1]["loss"]))
    done = [logged[i] for i in (0, 3, 4)]
    assert [(m["learning_rate"], m["loss"]) for m in done] == [(m["learning_rate"], m["loss"]) for m in expected]
    assert logged[1]["learning_rate"] == logged[2]["learning_rate"] == logged[3]["learning_rate"]
    said = capsys.readouterr().out
    assert said.count("is skipped") == 1 and "sft: update 2 is skipped, it is not finite (loss NaN" in said


def test_skips_in_a_row_end_the_run_with_a_dump_that_reproduces(
    only_sft: ConfigDict, tmp_path: Path, opened: Opened, one_device: dict[str, str]
) -> None:
    only_sft.faults.max_skipped = 2
    context = opened(only_sft, tmp_path)
    with training(context) as made, pytest.raises(StopRun, match="sft: 2 updates in a row were not finite") as error:
        for weight in (None, np.inf, None, np.nan, np.inf):
            made.update(groups(context, weight), {})
    folder = tmp_path / "01-sft" / "dump-000005"
    assert made.step == 5 and f"g2d replay {folder}" in str(error.value)
    found = replay(folder, mesh=context.mesh)
    assert found.reproduced
    assert {k: str(v) for k, v in found.found.items()} == {k: str(v) for k, v in found.recorded.items()}
    length = len(groups(context)[0].responses[0].token_ids)
    assert {name: len(places) for name, places in found.inputs.items()} == {"weight": length}
    assert found.responses == {}  # the policy is well
    assert all(values == 0 for _, values, _ in found.parameters.values())
    assert any(gradient for _, _, gradient in found.parameters.values())
    shutil.move(folder, tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "01-sft")
    command = [sys.executable, "-m", "g2d_jax", "replay", "elsewhere"]
    done = subprocess.run(command, cwd=tmp_path, env=one_device, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "sft, update 5" in done.stdout and "reproduced: the update is not finite here either" in done.stdout


def test_rows_are_added_for_more_devices() -> None:
    arrays = {"tokens": np.ones((2, 3, 4), np.int32), "sequence": np.zeros((2, 3, 4), np.int32)}
    wider = padded(arrays, 4)
    assert wider["tokens"].shape == wider["sequence"].shape == (2, 4, 4)
    assert not wider["tokens"][:, 3].any() and (wider["sequence"][:, 3] == -1).all()
    assert padded(arrays, 3)["tokens"].shape == (2, 3, 4)


def test_a_dump_names_the_parameter_and_the_responses(only_sft: ConfigDict, tmp_path: Path, opened: Opened) -> None:
    only_sft.faults.max_skipped = 1
    context = opened(only_sft, tmp_path)
    token = int(groups(context)[2].responses[0].token_ids[0])
    carriers = [group for group in groups(context) if token in [*group.prompt_ids, *group.responses[0].token_ids[:-1]]]
    with training(context) as made, pytest.raises(StopRun):
        params = made.state.params
        made.state = replace(made.state, params=replace_embed(params, token))
        before = leaves(made.state)
        made.update(groups(context), {})
    assert leaves(made.state) == before
    found = replay(tmp_path / "01-sft" / "dump-000001", mesh=context.mesh)
    assert found.reproduced and not found.inputs
    assert {name for name, (_, values, _) in found.parameters.items() if values} == {"embed"}
    assert found.parameters["embed"][1] == 1
    assert len(found.responses) >= len(carriers) > 0


def test_beside_a_quantised_base_training_goes_on_and_is_replayed(
    only_sft: ConfigDict, tmp_path: Path, opened: Opened
) -> None:
    """The codes are made again at every start, and the checkpoint holds adapters alone; a dump holds the codes too."""
    pytest.importorskip("qwix", reason="qwix is not installed: pip install 'g2d-jax[quant]'")
    only_sft.faults.max_skipped = 1
    only_sft.lora.update(rank=2, targets=("q_proj",), quantise="nf4")
    whole, stopped = (opened(only_sft, tmp_path / name) for name in ("whole", "stopped"))
    with training(whole) as made:
        for _ in range(2):
            made.update(groups(whole), {})
        expected = leaves(made.state)
    with training(stopped) as made:
        made.update(groups(stopped), {})
        made.save_if_new()
        assert len(jax.tree.leaves(made.state.params)) == 2
    again = opened(only_sft, tmp_path / "stopped")
    with training(again) as made, pytest.raises(StopRun):
        assert made.step == 1
        made.update(groups(again), {})
        assert leaves(made.state) == expected
        made.update(groups(again, 1e30), {})
    found = replay(tmp_path / "stopped" / "01-sft" / "dump-000003", mesh=again.mesh)
    assert found.reproduced and found.found["loss"] == found.recorded["loss"]


def test_a_dump_of_adapters_gives_the_same_loss_with_the_same_dropout(
    only_sft: ConfigDict, tmp_path: Path, opened: Opened
) -> None:
    """A weight so great that the loss is finite and the gradient's norm is not: the two losses can be compared."""
    only_sft.faults.max_skipped = 1
    only_sft.lora.update(rank=2, dropout=0.5, targets=("q_proj", "down_proj"), base_dtype="bfloat16")
    context = opened(only_sft, tmp_path)
    with training(context) as made, pytest.raises(StopRun):
        made.update(groups(context), {})  # from here on B is not zero
        made.update(groups(context, 1e30), {})
    found = replay(tmp_path / "01-sft" / "dump-000002", mesh=context.mesh)
    assert found.reproduced and np.isfinite(found.recorded["loss"])
    assert found.found["loss"] == found.recorded["loss"] and np.isinf(found.recorded["grad_norm"])
    assert {name for name, (_, _, gradient) in found.parameters.items() if gradient} <= {
        f"blocks.{name}_{side}" for name in ("q", "down") for side in "ab"
    }
    without = replay(tmp_path / "01-sft" / "dump-000002", mesh=context.mesh, objective=undropped)
    assert without.found["loss"] != found.recorded["loss"]


def undropped(compute: objectives.Compute) -> objectives.Objective:
    inner = objectives.sft(compute)
    return lambda params, micro: inner(params, {name: x for name, x in micro.items() if name != "dropout"})


def replace_embed(params: object, token: int) -> object:
    """The parameters with an infinity in the embedding of one token."""
    flat, tree = jax.tree_util.tree_flatten_with_path(params)
    changed = [x.at[token, 0].set(np.inf) if "embed" in jax.tree_util.keystr(path) else x for path, x in flat]
    return jax.tree.unflatten(tree, changed)


def test_a_loss_given_from_python_is_replayed_from_python(only_sft: ConfigDict, tmp_path: Path, opened: Opened) -> None:
    only_sft.faults.max_skipped = 1
    context = opened(only_sft, tmp_path)
    context.objectives = {"sft": objectives.sft}
    with training(context) as made, pytest.raises(StopRun):
        made.update(groups(context, np.nan), {})
    with pytest.raises(ValueError, match=r"given from Python.*replay\(folder, objective=…\)"):
        replay(tmp_path / "01-sft" / "dump-000001")
    assert replay(tmp_path / "01-sft" / "dump-000001", objective=objectives.sft, mesh=context.mesh).reproduced


def test_a_sick_policy_is_not_sampled_from(only_sft: ConfigDict, tmp_path: Path, opened: Opened) -> None:
    context = opened(only_sft, tmp_path)
    params = context.policy("init")
    sampler, problem = context.sampler(), context.problems["train"][0]
    how = context.sampling_params(only_sft.stages.sft.get("sampling") or ConfigDict({"max_new_tokens": 4}))
    requests = [Request(problem.id, context.tokenizer.encode_prompt(problem), how, num_samples=3)]
    well = list(sampler.generate(sampler.view(params), requests, "test"))
    check_rollouts(well, "init")
    nowhere = jax.tree.map(lambda x: x * np.float32(np.nan), params)
    sick = list(sampler.generate(sampler.view(nowhere), requests, "test"))
    with pytest.raises(StopRun, match=r"policy sft@4: 3 of 6 sampled responses .*nan at token 1"):
        check_rollouts([*well, *sick], "sft@4")


DAMAGES = {
    "cut": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "flipped": lambda file: file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:]),
    "deleted": lambda file: file.unlink(),
}


def damage(folder: Path, name: str) -> None:
    """The largest file of a checkpoint's parameters."""
    DAMAGES[name](max((f for f in (folder / "params" / "d").iterdir()), key=lambda f: f.stat().st_size))


def run(context: Context) -> None:
    pipeline.run_stage(context, "sft", pipeline.plan(context.config))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax drops its own read errors
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(
    only_sft: ConfigDict, tmp_path: Path, opened: Opened, capsys: pytest.CaptureFixture[str]
) -> None:
    """And ends like a run that was never disturbed; with none before it, it starts the stage again."""
    whole = opened(only_sft, tmp_path / "whole")
    run(whole)
    expected = leaves(whole.policy("sft"))
    (tmp_path / "whole" / "01-sft" / "manifest.json").unlink()  # as if killed before the stage was finished
    for name, alone in (("flipped", False), ("cut", True)):
        workdir = tmp_path / name
        shutil.copytree(tmp_path / "whole", workdir)
        checkpoints = workdir / "01-sft" / "checkpoints"
        damage(checkpoints / "6", name)
        if alone:
            shutil.rmtree(checkpoints / "4")
        context = opened(only_sft, workdir)
        capsys.readouterr()
        run(context)
        assert leaves(context.policy("sft")) == expected
        said = " ".join(capsys.readouterr().out.split())
        assert said.count("WARNING: sft: the checkpoint of step") == 1
        assert f"It was moved to {workdir}/01-sft/damaged/step-000006" in said
        assert f"Continuing from {'the start of the stage' if alone else 'step 4'}" in said
        assert [path.name for path in (workdir / "01-sft" / "damaged").iterdir()] == ["step-000006"]
        assert Checkpoints(checkpoints).steps() == [4, 6]
        assert storage.finished(workdir / "01-sft")
    gc.collect()  # what Orbax drops of its errors, it drops here


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_two_damaged_checkpoints_in_a_row_end_the_run_and_none_is_lost(
    only_sft: ConfigDict, tmp_path: Path, opened: Opened
) -> None:
    """That may be the fault of what reads them."""
    run(opened(only_sft, tmp_path))
    (tmp_path / "01-sft" / "manifest.json").unlink()
    for step in (4, 6):
        damage(tmp_path / "01-sft" / "checkpoints" / str(step), "deleted")
    with pytest.raises(DamagedCheckpoint, match="Two in a row"):
        run(opened(only_sft, tmp_path))
    assert (tmp_path / "01-sft" / "damaged" / "step-000006").is_dir()
    assert (tmp_path / "01-sft" / "checkpoints" / "4").is_dir()
    gc.collect()


def test_another_models_checkpoint_is_not_damage(only_sft: ConfigDict, tmp_path: Path, opened: Opened) -> None:
    context = opened(only_sft, tmp_path)
    with training(context) as made:
        made.save_here()
    only_sft.model.intermediate_size = 96
    with pytest.raises(ValueError, match="saved with another configuration"), training(opened(only_sft, tmp_path)):
        pass
    assert (tmp_path / "01-sft" / "checkpoints" / "0").exists() and not (tmp_path / "01-sft" / "damaged").exists()
