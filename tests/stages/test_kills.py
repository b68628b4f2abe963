"""Kill and stop runs at every step of what they do: each continues to the result of a run that
nothing disturbed."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import syscalls
from alike import arrays, differences, redone, steps_logged
from killed import Runs

from g2d_jax.runtime.tables import read_rollouts
from g2d_jax.runtime.tracking import read_metrics
from g2d_jax.session import stage_result
from g2d_jax.training.checkpoint import Checkpoints

EVERY, KEEP = 2, 2  # checkpoint.every and checkpoint.keep of the tiny config
STAGES = ("01-sft", "02-warmup", "03-collect", "04-dpo", "05-evaluate")

pytestmark = pytest.mark.timeout(900)
slow = pytest.mark.slow
from_outside = pytest.mark.skipif(
    not syscalls.available(), reason="needs seccomp's user notification"
)


@pytest.fixture(scope="module")
def seen(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first stage alone: `run`, and in `kept` its work directory before each change below its
    checkpoints."""
    folder = tmp_path_factory.mktemp("seen")
    runs(folder / "run", until="sft", keep=["01-sft/checkpoints/*", folder / "kept"])
    return folder


def checkpoints(workdir: Path, stage: str = "01-sft") -> Checkpoints:
    return Checkpoints(workdir / stage / "checkpoints")


def digest(folder: Path) -> str:
    """Of the names and contents of all files in a folder."""
    found = hashlib.blake2b()
    for path in sorted(folder.rglob("*")):
        content = path.read_bytes() if path.is_file() else b"folder"
        found.update(f"{path.relative_to(folder)} {len(content)} ".encode() + content)
    return found.hexdigest()


@slow
@from_outside
def test_whatever_a_kill_leaves_of_a_checkpoint_only_whole_ones_count(seen):
    """At each of some hundred changes that writing three checkpoints, and deleting one, comes
    to."""
    states = sorted((seen / "kept").iterdir())
    assert len(states) > 100
    newest, whole = [], set()
    for state in states:
        there = checkpoints(state)
        newest.append(there.latest() or 0)
        for step in there.steps()[-KEEP:]:
            content = digest(Path(there.folder / str(step)))
            if content not in whole:
                assert there.find_damage(step) == "", (state.name, step)
            whole.add(content)
    assert sorted(newest) == newest and set(newest) == {0, 2, 4, 6}
    assert len(whole) == 3  # one content for each step, whenever it was seen


@slow
@from_outside
def test_kill_9_while_checkpoints_are_written(runs, seen, tmp_path):
    number = round(0.62 * len(list((seen / "kept").iterdir())))
    workdir = tmp_path / "run"
    killed = runs(workdir, -9, until="sft", change=["01-sft/checkpoints/*", number])
    assert killed["changes"] == number
    newest = checkpoints(workdir).latest() or 0
    last = max((step for _, step in steps_logged(workdir)), default=0)
    runs(workdir, until="sft")
    assert differences(seen / "run", workdir) == []
    check_redone(workdir, newest, last)


def check_redone(workdir: Path, newest: int, last: int) -> None:
    """Steps after the newest whole checkpoint were done again, none before it, and each once more
    at most.

    One interval of checkpoint.every, and those that were done while the checkpoint at its end was
    being written, which are less than another: the next save waits for it.
    """
    assert redone(workdir) == last - newest <= 2 * EVERY
    assert set(steps_logged(workdir).values()) <= {1, 2}


@slow
@from_outside
def test_kill_9_before_and_after_each_manifest(runs, finished, tmp_path):
    """The boundaries of stages: nothing is lost of a finished one, and what is not finished is
    finished."""
    workdir, done = tmp_path / "run", []
    for stage in STAGES:
        runs(workdir, -9, change=[f"{stage}/manifest.json", 0])
        assert [name for name in STAGES if stage_result.read(workdir / name)] == done
        runs(workdir, -9, after=[f"{stage}/manifest.json"])
        done.append(stage)
        assert [name for name in STAGES if stage_result.read(workdir / name)] == done
    runs(workdir)
    assert differences(finished, workdir) == []
    assert redone(workdir) == 0


# What the run is at: at the n-th call (from 0, in its process) of a function, which takes SIGTERM;
# where it then saves.
STOPS = {
    "training, Ctrl-C": ("Trainer.update", 0, "sft", 1),
    "training": ("Trainer.update", 1, "sft", 3),
    "between stages": ("_compiled_programs", 0, "", 0),
    "generation": ("_Call._refill", 1, "warmup", 0),
    "scoring, Ctrl-C": ("score", 0, "warmup", 1),
    "training online, SIGHUP": ("Trainer.update", 0, "warmup", 2),
    "log-probabilities of the reference": ("reference_logprobs", 0, "", 0),
    "evaluation": ("answers_of", 1, "", 0),
}


def test_sigterm_and_ctrl_c_in_the_first_stage(runs, tmp_path):
    runs(tmp_path / "whole", until="sft")
    stop_and_continue(runs, tmp_path / "whole", tmp_path / "run", [*STOPS][:2], until="sft")


@pytest.mark.parametrize("call", ["load_policy", "base_of"])
def test_sigterm_before_the_first_update_ends_without_a_checkpoint(runs, tmp_path, call):
    """What would be saved is what the stage began with, and saving it compiles."""
    stopped = runs(tmp_path / "run", 75, until="sft", call=["TERM", call, 0])
    assert "stopped by SIGTERM: the same command" in " ".join(stopped["text"].split())
    assert not (tmp_path / "run" / "01-sft" / "checkpoints").exists()


@slow
def test_sigterm_and_ctrl_c_save_where_it_is_and_nothing_is_done_twice(runs, finished, tmp_path):
    stop_and_continue(runs, finished, tmp_path / "run", [*STOPS])


def stop_and_continue(runs: Runs, whole: Path, workdir: Path, stops: list[str], **job: str) -> None:
    for what in stops:
        name, number, stage, step = STOPS[what]
        by = what.partition(", ")[2] or "SIGTERM"
        pressed = by == "Ctrl-C"
        sent = "INT" if pressed else by.removeprefix("SIG")
        stopped = runs(workdir, 130 if pressed else 75, call=[sent, name, number], **job)
        assert stopped["seconds"] < 30, (what, stopped)
        said = " ".join(stopped["text"].split())
        assert f"stopped by {by}: the same command with the same --workdir continues" in said, what
        assert ("g2d: saving; Ctrl-C again ends at once" in said) == pressed, what
        if stage:
            assert f"{stage}: stopped on request; saved at step {step} of" in stopped["text"], (
                what,
                stopped,
            )
            (folder,) = workdir.glob(f"*-{stage}")
            assert checkpoints(workdir, folder.name).latest() == step, what
            assert max((s for at, s in steps_logged(workdir) if at == stage), default=0) == step, (
                what
            )
    runs(workdir, **job)
    assert differences(whole, workdir) == []
    assert redone(workdir) == 0


@slow
def test_resume_on_other_numbers_of_devices(runs, finished, tmp_path):
    """1, then 4, then 2: the same prompts and keys, and figures within tolerance of those of one
    device."""
    workdir = tmp_path / "run"
    for devices, number, step in ((1, 1, 2), (4, 1, 4)):
        stopped = runs(workdir, 75, devices=devices, call=["TERM", "Trainer.update", number])
        assert f"sft: stopped on request; saved at step {step} of 6" in stopped["text"]
    done = runs(workdir, devices=2, until="warmup")
    assert "sft: continuing after step 4 of 6" in done["text"]
    assert redone(workdir) == 0
    compare_metrics(finished, workdir)
    for file in sorted((finished / "02-warmup" / "rollouts").glob("*.parquet")):
        compare_rollouts(file, workdir / "02-warmup" / "rollouts" / file.name)
    for stage, step in (("01-sft", 6), ("02-warmup", 3)):
        ours, theirs = (
            arrays(checkpoints(root, stage).folder / str(step)) for root in (workdir, finished)
        )
        assert ours.keys() == theirs.keys()
        for name, array in theirs.items():
            np.testing.assert_allclose(
                ours[name], array, rtol=1e-3, atol=1e-4, err_msg=f"{stage}: {name}"
            )


def compare_metrics(whole: Path, workdir: Path) -> None:
    ours, theirs = (
        {
            (row["stage"], row["step"]): row["metrics"]
            for row in read_metrics(root)
            if row["stage"] in ("sft", "warmup")
        }
        for root in (workdir, whole)
    )
    assert ours.keys() == theirs.keys()
    for key, metrics in ours.items():
        # the same examples, the same responses
        assert metrics["num_tokens"] == theirs[key]["num_tokens"], key
        for name in ("loss", "grad_norm", "learning_rate", "entropy", "reward"):
            if name in metrics:
                np.testing.assert_allclose(
                    metrics[name], theirs[key][name], rtol=1e-3, atol=1e-5, err_msg=f"{key}"
                )


def compare_rollouts(one: Path, other: Path) -> None:
    """The keys name the same noise: the same tokens are drawn from log-probabilities that differ in
    their last bits."""
    for a, b in zip(read_rollouts(one), read_rollouts(other), strict=True):
        named = [(r.rollout.problem_id, r.rollout.visit, r.rollout.sample) for r in (a, b)]
        assert named[0] == named[1]
        np.testing.assert_array_equal(a.rollout.prompt_ids, b.rollout.prompt_ids)
        np.testing.assert_array_equal(a.rollout.token_ids, b.rollout.token_ids)
        np.testing.assert_allclose(a.rollout.logprobs, b.rollout.logprobs, atol=1e-4)
        assert a.score == b.score
