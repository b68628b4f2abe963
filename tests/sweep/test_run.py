"""Studies run from the command line, by one process and by two that share the directory."""

import json
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from etils import epath
from forks import Forked, Forks

from g2d_jax import commands
from g2d_jax.recipes.config_load import resolve
from g2d_jax.runtime.lock import try_lock
from g2d_jax.session import stage_result
from g2d_jax.session.policies import checkpoint_of
from g2d_jax.session.workdir import stage_folders
from g2d_jax.sweep import run as sweeps
from g2d_jax.sweep.graph import build, node_folder
from g2d_jax.sweep.points import Point, points, with_axes

TINY = str(Path(__file__).parents[1] / "tiny.py")
STEPS = "stages.warmup.steps=0,1,3"


def finish(process: Forked, status: int = 0) -> str:
    assert process.wait(400) == status, process.stderr
    return process.stdout


def sweep(forks: Forks, workdir: Path, *arguments: str, status: int = 0) -> str:
    return finish(forks.start("sweep", "--config", TINY, "--workdir", workdir, *arguments), status)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> tuple[Path, list[str]]:
    """A study of three K run by two processes at once, and what each of them said."""
    workdir = tmp_path_factory.mktemp("study") / "work"
    arguments = ("sweep", "--config", TINY, "--workdir", str(workdir), "--product", STEPS)
    both = [forks.start(*arguments) for _ in range(2)]
    return workdir, [finish(process) for process in both]


def ran(out: str) -> list[str]:
    return re.findall(r"^\[\d+/\d+\] (\S+)", out, re.MULTILINE)


def test_two_processes_share_the_work_and_do_nothing_twice(shared: tuple[Path, list[str]]) -> None:
    workdir, outputs = shared
    taken = [name for out in outputs for name in ran(out)]
    assert len(taken) == len(set(taken)) == len(list((workdir / "stages").iterdir())) == 17
    assert all((folder / "manifest.json").exists() for folder in (workdir / "stages").iterdir())


def test_a_point_is_what_a_run_of_its_config_gives(
    shared: tuple[Path, list[str]], finished: Path
) -> None:
    workdir, alone = shared[0], finished
    point = workdir / "points" / "tiny" / "warmup.steps=3,seed=0"
    links = stage_folders(epath.Path(point))
    assert list(links) == ["sft", "warmup", "collect", "dpo", "evaluate"]
    mine = (links["collect"] / "preferences" / "part-00000.parquet").read_bytes()
    assert mine == (alone / "03-collect" / "preferences" / "part-00000.parquet").read_bytes()
    whole, part = (
        stage_result.read(f).evaluation for f in (alone / "05-evaluate", links["evaluate"])
    )
    for one, other in zip(whole.policies, part.policies, strict=True):
        assert (one.marks, one.measure("entropy")) == (other.marks, other.measure("entropy"))
    dpo = [alone / "05-evaluate" / "rollouts", *(workdir / "stages").glob("evaluate-*/rollouts")]
    assert (dpo[0] / "dpo.parquet").read_bytes() in [
        (folder / "dpo.parquet").read_bytes()
        for folder in dpo[1:]
        if (folder / "dpo.parquet").exists()
    ]
    assert [one.sampled for one in whole.changes] == [one.sampled for one in part.changes]


@pytest.mark.slow
def test_more_points_use_what_is_there(shared: tuple[Path, list[str]], forks: Forks) -> None:
    workdir, _ = shared
    assert ran(sweep(forks, workdir, "--product", STEPS)) == []
    more = ran(sweep(forks, workdir, "--product", "stages.warmup.steps=1,5"))
    assert sorted(name.partition("-")[0] for name in more) == [
        "collect",
        "dpo",
        *["evaluate"] * 3,
        "warmup",
    ]
    assert (
        sorted(
            int(p.name) for p in next((workdir / "stages").glob("warmup-*/checkpoints")).iterdir()
        )[-1]
        == 5
    )
    kept = {path.name for path in next((workdir / "stages").glob("warmup-*/checkpoints")).iterdir()}
    assert kept >= {"0", "1", "3", "5"}  # what other points read stays
    assert ran(sweep(forks, workdir, "--product", STEPS)) == []
    plan = json.loads((workdir / "sweeps" / "tiny.json").read_text())
    assert len(plan["points"]) == 4  # 0, 1, 3 and 5
    missing = sweep(forks, workdir, "--product", "stages.warmup.steps=1,2", status=1)
    assert re.search(
        r"^warmup-\S+ failed: .* went on to 5 without keeping step 2", missing, re.MULTILINE
    )
    # What cannot be had fails for those alone who ask for it.
    assert ran(sweep(forks, workdir, "--product", STEPS)) == []


def test_a_point_opens_like_a_run(
    shared: tuple[Path, list[str]], tmp_path: Path, forks: Forks
) -> None:
    point = shared[0] / "points" / "tiny" / "warmup.steps=1,seed=0"
    with commands.opened(point) as session:
        # of the trajectory, the step this point is about
        assert checkpoint_of(session, "warmup")[1] == 1
        assert checkpoint_of(session, "dpo")[0].parent.parent == shared[0] / "stages"
    finish(forks.start("export", "--workdir", str(point), "--output", str(tmp_path / "model")))
    assert (tmp_path / "model" / "model.safetensors").exists()


def studied(*product: str, seeds: tuple[int, ...] = (0,)) -> list[Point]:
    return points(with_axes(resolve(TINY), product, (), seeds))


def test_studies_of_one_name_claimed_at_once_keep_all_their_points(tmp_path: Path) -> None:
    wanted, root, config = (
        [studied(seeds=(seed,)) for seed in range(8)],
        epath.Path(tmp_path),
        resolve(TINY),
    )
    ready = Barrier(len(wanted))

    def claim(mine: list[Point]) -> None:
        ready.wait()
        sweeps._claim(config, mine, root, print)

    with ThreadPoolExecutor(len(wanted)) as pool:
        list(pool.map(claim, wanted))
    plan = json.loads((tmp_path / "sweeps" / "tiny.json").read_text())
    assert sorted(point["label"] for point in plan["points"]) == sorted(
        p.label for mine in wanted for p in mine
    )


def test_steps_that_a_later_study_asks_for_are_kept_by_the_one_that_runs_them(
    tmp_path: Path,
) -> None:
    root, config = epath.Path(tmp_path), resolve(TINY)
    first, second = studied("stages.warmup.steps=1,3"), studied("stages.warmup.steps=2,5")
    sweeps._claim(config, first, root, print)
    graph = sweeps.build(first, sweeps._requested_steps(root))
    sweeps._claim(config, second, root, print)
    with sweeps.Tracker(None, tensorboard=False) as tracker:
        worker = sweeps._Worker("tiny", first, graph, root, tracker)
        [before] = [node for node in graph.nodes.values() if node.name == "warmup"]
        stage = worker._latest(before).config.stages["warmup"]
    assert before.config.stages["warmup"].steps == 3
    assert stage.steps == 5 and set(stage.keep) >= {1, 2, 3, 5}


def test_a_second_call_of_a_study_still_asks_for_the_steps_of_its_first(tmp_path: Path) -> None:
    root, config = epath.Path(tmp_path), resolve(TINY)
    asked: dict[str, tuple[int, list[int]]] = {}
    for seed in (0, 1):
        sweeps._claim(config, studied("stages.warmup.steps=1,3", seeds=(seed,)), root, print)
        asked |= sweeps._requested_steps(root)
        assert sweeps._requested_steps(root) == asked and len(asked) == seed + 1


@pytest.mark.parametrize("setting", ["dpo.beta=0.01", "warmup.optimizer.learning_rate=0.5"])
def test_seeds_of_one_setting_have_one_setting(tmp_path: Path, setting: str) -> None:
    """What is given again, and what is another row of the report, may have another."""
    root, before = epath.Path(tmp_path), resolve(TINY)
    other = resolve(TINY, [f"config.stages.{setting}"])
    k, more = "stages.warmup.steps=1,3", "stages.warmup.steps=5"
    sweeps._claim(before, points(with_axes(before, (k,), (), (0,))), root, print)
    sweeps._claim(before, points(with_axes(before, (k,), (), (1,))), root, print)
    sweeps._claim(other, points(with_axes(other, (more,), (), (2,))), root, print)
    with pytest.raises(
        ValueError, match=re.escape(f"stages.{setting.partition('=')[0]}: ")
    ) as told:
        sweeps._claim(other, points(with_axes(other, (k,), (), (0,))), root, print)
    assert "the study has the point warmup.steps=1,seed=1 with other settings" in str(told.value)
    sweeps._claim(other, points(with_axes(other, (k,), (), (0, 1))), root, print)


def test_a_dry_run_refuses_what_the_sweep_refuses(tmp_path: Path) -> None:
    config = with_axes(resolve(TINY), ("stages.warmup.steps=1,3",), (), (0,))
    unused = resolve(TINY, ["lora.base_dtype=bfloat16"])
    with pytest.raises(ValueError, match=r"point .*seed=0: .*lora\.base_dtype"):
        sweeps.show(with_axes(unused, (), (), (0,)), tmp_path / "new")
    sweeps._claim(config, points(config), epath.Path(tmp_path / "study"), print)
    other = resolve(TINY, ["stages.dpo.beta=0.01"])
    with pytest.raises(ValueError, match="with other settings"):
        sweeps.show(with_axes(other, ("stages.warmup.steps=1,3",), (), (1,)), tmp_path / "study")
    sweeps.show(config, tmp_path / "study")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty and holds no study"):
        sweeps.show(config, tmp_path / "mine")


def test_a_reward_function_that_changed_is_said_once(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    config = resolve(TINY, [f"config.reward.folder={tmp_path}", "config.reward.function=mine:fair"])
    said: list[str] = []
    for score in (1.0, 1.0, 2.0, 2.0):
        file.write_text(
            f"def fair(completions, **columns):\n    return [{score}] * len(completions)\n"
        )
        sweeps._claim(
            config, points(with_axes(config, (), (), (0, 1))), epath.Path(tmp_path), said.append
        )
    (line,) = said
    assert line.startswith("WARNING: reward.function mine:fair is in a file that has changed. ")
    assert "Finished stages keep their rewards" in line


@pytest.mark.parametrize(
    ("number", "status", "words"),
    [(signal.SIGTERM, 75, "by SIGTERM"), (signal.SIGINT, 130, "by Ctrl-C")],
)
def test_a_worker_that_waits_for_another_is_stopped(
    tmp_path: Path, forks: Forks, number: signal.Signals, status: int, words: str
) -> None:
    root = epath.Path(tmp_path / "work")
    [sft] = [node for node in build(studied(STEPS)).nodes.values() if node.name == "sft"]
    # the folder holds studies, though this test was there first
    (root / "sweeps").mkdir(parents=True)
    with (
        try_lock(node_folder(root, sft.id)) as got,
        forks.start("sweep", "--config", TINY, "--workdir", root, "--product", STEPS) as sweeping,
    ):
        assert got
        while "waiting for" not in sweeping.stdout:
            assert sweeping.poll() is None, sweeping.stderr
            time.sleep(0.05)
        sweeping.send_signal(number)
        assert (
            sweeping.wait(60) == status and f"stopped {words}" in sweeping.stdout + sweeping.stderr
        )


@pytest.mark.slow
def test_a_point_that_fails_does_not_end_the_study(tmp_path: Path, forks: Forks) -> None:
    window = ("stages.collect.min_pass_rate=0,0.99", "stages.collect.max_pass_rate=1,0.99")
    out = sweep(forks, tmp_path / "w", "--zip", window[0], "--zip", window[1], status=1)
    assert re.search(r"^collect-\S+ failed: collect: no preference pair", out, re.MULTILINE)
    assert re.search(r"^dpo-\S+ failed: it reads collect-", out, re.MULTILINE)
    assert len([name for name in ran(out) if name.startswith("dpo")]) == 1


def test_a_study_is_not_a_run(tmp_path: Path, forks: Forks) -> None:
    process = forks.start(
        "run", "--config", "sweep-k:preset=smoke", "--workdir", str(tmp_path / "w")
    )
    assert (
        process.wait(60) == 1
        and "describes a study: g2d sweep --config sweep-k:preset=smoke" in process.stderr
    )
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    process = forks.start(
        "sweep", "--config", TINY, "--workdir", str(tmp_path / "mine"), "--seeds", "1,2"
    )
    assert process.wait(60) == 1 and "is not empty and holds no study" in process.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_study_of_the_embedded_task_runs(forks: Forks, tmp_path: Path) -> None:
    """At smoke size."""
    process = forks.start(
        "sweep", "--config", "sweep-k:preset=smoke", "--workdir", "study", cwd=tmp_path
    )
    assert process.wait(800) == 0, process.stderr
    page = "sweep-k-smoke.html"
    assert f"/{page}" in process.stdout and (tmp_path / "study" / page).exists()
