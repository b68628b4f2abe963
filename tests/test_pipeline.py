"""The graph of stages and the work directory: everything that is refused before any work. Runs: see
tests/stages."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from etils import epath
from ml_collections import ConfigDict
from tiny import even

from g2d_jax import commands, pipeline
from g2d_jax import config as settings
from g2d_jax.cli import status
from g2d_jax.commands import evaluation
from g2d_jax.config import Config, graph
from g2d_jax.config.io import to_dict
from g2d_jax.recipes.config_load import resolve
from g2d_jax.report.run import write_run
from g2d_jax.report.runs import read_run
from g2d_jax.runtime import storage
from g2d_jax.runtime.lock import locked
from g2d_jax.runtime.tracking import Tracker, read_metrics
from g2d_jax.session import stage_result
from g2d_jax.session.accounting import behind
from g2d_jax.session.policies import load_policy
from g2d_jax.session.row_shapes import choose_row_length
from g2d_jax.session.session import Options, Run, StopRun, loaded, session_of
from g2d_jax.session.stage_result import StageResult
from g2d_jax.session.workdir import claim
from g2d_jax.stages import run_issues, run_stages
from g2d_jax.training import objectives

TINY = str(Path(__file__).parent / "tiny.py")


@pytest.fixture
def config() -> ConfigDict:
    return resolve(TINY)


def test_stages_run_after_what_they_read_and_evaluations_last(config: ConfigDict) -> None:
    with config.stages.unlocked():
        config.stages.again = settings.online(policy="dpo")
    plan = graph.plan(Config.of(config))
    assert plan.order == ("sft", "warmup", "collect", "dpo", "again", "evaluate")
    assert plan.inputs["dpo"] == ("warmup", "collect")
    assert plan.folders(epath.Path("w"))["collect"] == epath.Path("w/03-collect")


@pytest.mark.parametrize(
    ("stage", "field", "value", "message"),
    [
        ("warmup", "policy", "stf", "'stf'; there are: init, dpo, sft"),
        ("warmup", "policy", "collect", "a collect stage trains no policy"),
        ("collect", "policy", "warmup@2", r"keeps steps 1, 3: add it to its keep"),
        ("collect", "policy", "warmup@x", "keeps steps 1, 3"),
        ("evaluate", "policies", ("sft@3",), "keeps steps 6"),
        ("warmup", "policy", "dpo", "cycle: collect, dpo, evaluate, warmup"),
        (
            "warmup",
            "policy",
            "run:nowhere#sft",
            r"stages.warmup.policy cannot be used: there is no /.*/nowhere",
        ),
        ("warmup", "policy", "run:nowhere", "write run:WORKDIR#STAGE"),
        ("warmup", "policy", "hf:./nowhere", "there is no /.*nowhere"),
        (
            "sft",
            "optimizer",
            settings.optimizer(1e-3, warmup_steps=6),
            "stages.sft.optimizer.warmup_steps",
        ),
        ("warmup", "optimizer", settings.optimizer(-1.0), "learning_rate must be at least 0"),
        ("warmup", "num_generations", 1, "num_generations must be at least 2"),
        (
            "warmup",
            "sampling",
            settings.sampling(8, temperature=0.0),
            "temperature must be above 0",
        ),
        ("warmup", "sampling", settings.sampling(8, top_p=0.9), "top_p is set .* leave it at 1"),
        (
            "collect",
            "sampling",
            settings.sampling(8, temperature=0.0),
            "stages.collect.sampling.temperature is 0, so all responses to a prompt are the same",
        ),
        ("collect", "dump.path", "rollouts.jsonl", "there is no .*rollouts.jsonl"),
        ("collect", "min_pass_rate", 1.5, "must be at least 0 and at most 1"),
        (
            "collect",
            "rollouts",
            "warmup",
            "'warmup', which is not a collect stage: .* use .archive.",
        ),
        ("collect", "rollouts", "collect", "cycle: collect, dpo, evaluate"),
        (
            "collect",
            "select",
            "uncertain",
            "stages.collect.select is 'uncertain', but without max_pairs all pairs are kept: set max_pairs",
        ),
        (
            "dpo",
            "preferences",
            "colect",
            "there is no .*colect .*, did you mean the stage collect",
        ),
        ("dpo", "policy", "warmup@9", "that stage keeps steps"),
        ("dpo", "preferences", "sft", "a stage that collects no pairs"),
    ],
)
def test_what_cannot_work_is_refused_before_any_work(
    config: ConfigDict, tmp_path: Path, stage: str, field: str, value: object, message: str
) -> None:
    config.stages[stage].update_from_flattened_dict({field: value})
    with pytest.raises(ValueError, match=message):
        pipeline.run(config, tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_archived_rollouts_need_an_online_policy_of_some_steps(config: ConfigDict) -> None:
    config.stages.collect.rollouts = "archive"
    run_issues.checked(config)
    config.stages.warmup.steps = 0
    with pytest.raises(ValueError, match="but 'warmup' is at step 0"):
        run_issues.checked(config)
    config.stages.collect.policy = "sft"
    with pytest.raises(ValueError, match=r"is 'sft', but .* needs an online stage of this run"):
        run_issues.checked(config)


def test_collect_stages_share_the_rollouts_of_one_policy(
    config: ConfigDict, tmp_path: Path
) -> None:
    with config.stages.unlocked():
        config.stages.again = settings.collect(rollouts="other")
        config.stages.other = settings.collect(rollouts="collect", select="confident", max_pairs=4)
    run_issues.checked(config)
    plan = graph.plan(Config.of(config))
    assert plan.order == ("sft", "warmup", "collect", "dpo", "other", "again", "evaluate")
    assert plan.inputs["other"] == ("warmup", "collect") and plan.inputs["again"] == (
        "warmup",
        "other",
    )
    config.stages.other.policy = "sft"
    with pytest.raises(
        ValueError,
        match=r"stages\.other\.policy is 'sft', but the rollouts of .collect. are from 'warmup'",
    ):
        run_issues.checked(config)
    config.stages.other.policy = "warmup"
    config.stages.collect.rollouts = "again"
    with pytest.raises(ValueError, match="cycle: again, collect, dpo, evaluate, other"):
        run_issues.checked(config)
    (tmp_path / "mine.jsonl").touch()
    config.stages.collect.rollouts = "sample"
    config.stages.collect.dump.path = str(tmp_path / "mine.jsonl")
    with pytest.raises(
        ValueError, match=r"stages\.other\.select .* entropies, but .*a dump has none"
    ):
        run_issues.checked(config)


def test_a_config_without_stages_and_an_unknown_stage_to_stop_at(
    config: ConfigDict, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="stages are empty: add one"):
        graph.plan(Config.of(settings.base()))
    with pytest.raises(ValueError, match="--until=warm names no stage: the stages are sft, warmup"):
        pipeline.run(config, tmp_path, until="warm")


def begun(
    config: ConfigDict, folder: Path, *stages: str, own: Mapping[str, str] | None = None
) -> epath.Path:
    """A work directory in which these stages are finished."""
    workdir = epath.Path(folder)
    claim(Config.of(config), workdir, own or {})
    for name in stages:
        stage_result.write(workdir / name, StageResult(kind="any", name=name))
    return workdir


def again(config: ConfigDict, workdir: epath.Path) -> None:
    """What `pipeline.run` does first."""
    run_issues.checked(config)
    claim(Config.of(config), workdir)


def test_an_online_stage_may_have_more_steps(config: ConfigDict, tmp_path: Path) -> None:
    workdir = begun(config, tmp_path / "work", "01-sft", "02-warmup")
    config.stages.warmup.update(steps=9, keep=(1, 3, 6))  # 3 is where it ended
    again(config, workdir)
    assert stage_result.read(workdir / "02-warmup") is None and stage_result.read(
        workdir / "01-sft"
    )
    assert storage.read_json(workdir / "config.json")["config"]["stages"]["warmup"]["steps"] == 9
    config.stages.warmup.steps = 3
    config.stages.warmup.keep = (1,)
    with pytest.raises(ValueError, match=r"stages\.warmup\.steps: 9 -> 3"):
        again(config, workdir)


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 9, "keep": (1, 2)},  # the checkpoint of step 2 is gone
        {"steps": 9, "keep": ()},
        {"steps": 9, "num_generations": 6},
        {"steps": 9, "optimizer.learning_rate": 1e-4},
        {"steps": 2},
    ],
)
def test_of_a_longer_stage_nothing_else_may_change(
    config: ConfigDict, tmp_path: Path, changes: dict[str, object]
) -> None:
    workdir = begun(config, tmp_path / "work", "01-sft", "02-warmup")
    config.stages.warmup.update_from_flattened_dict(changes)
    with pytest.raises(ValueError, match="was started with other settings") as error:
        again(config, workdir)
    assert f"stages.warmup.steps: 3 -> {changes['steps']}" in str(error.value)
    assert f"start another run with policy='run:{workdir}#warmup'" in str(error.value)
    assert stage_result.read(workdir / "02-warmup")


@pytest.mark.parametrize(
    "setting", [{"optimizer.schedule": "cosine"}, {"sync_every": 3}, {"budget.amount": 1e20}]
)
def test_a_stage_that_depends_on_its_number_of_steps_keeps_it(
    config: ConfigDict, tmp_path: Path, setting: dict[str, object]
) -> None:
    config.stages.warmup.update_from_flattened_dict(setting)
    workdir = begun(config, tmp_path / "work", "01-sft", "02-warmup")
    config.stages.warmup.steps = 9
    with pytest.raises(
        ValueError, match=r"stages\.warmup\.steps: 3 -> 9\nChoose another --workdir"
    ):
        again(config, workdir)


def test_a_stage_from_whose_end_others_were_made_goes_on_without_them(
    config: ConfigDict, tmp_path: Path
) -> None:
    workdir = begun(config, tmp_path / "work", "01-sft", "02-warmup", "03-collect", "04-dpo")
    config.stages.warmup.steps = 9
    with pytest.raises(
        ValueError, match="warmup could go on, but collect, dpo began with its last policy"
    ):
        again(config, workdir)
    # then no folder that is moved away makes the settings those of the rest
    config.reward.correct_above = 0.25
    with pytest.raises(ValueError, match=r"reward.correct_above: 0.5 -> 0.25") as error:
        again(config, workdir)
    assert "move their folders away" not in str(
        error.value
    ) and "start another run with policy" in str(error.value)
    config.reward.correct_above = 0.5
    (workdir / "03-collect").rename(tmp_path / "old")
    with pytest.raises(ValueError, match="warmup could go on, but dpo began"):
        again(config, workdir)
    (workdir / "04-dpo").rename(tmp_path / "older")
    again(config, workdir)
    assert stage_result.read(workdir / "02-warmup") is None


def test_what_was_made_from_a_kept_step_stays(config: ConfigDict, tmp_path: Path) -> None:
    for name in ("collect", "dpo"):
        config.stages[name].policy = "warmup@1"
    workdir = begun(config, tmp_path / "work", "01-sft", "02-warmup", "03-collect", "04-dpo")
    config.stages.warmup.steps = 9
    again(config, workdir)
    assert stage_result.read(workdir / "02-warmup") is None and stage_result.read(
        workdir / "04-dpo"
    )


def test_runtime_settings_may_change_and_others_are_refused(
    config: ConfigDict, tmp_path: Path
) -> None:
    workdir = begun(config, tmp_path, "01-sft")
    config.update_from_flattened_dict(
        {
            "compute.microbatch_tokens": 128,
            "logging.wandb": "mine",
            "mesh.tensor": 2,
            "reward.workers": 2,
            "name": "other",
        }
    )
    claim(Config.of(config), workdir)
    assert storage.read_json(tmp_path / "config.json")["config"]["mesh"]["tensor"] == 2
    assert storage.read_json(tmp_path / "environment.json")["packages"]["jax"]
    config.stages.warmup.steps = 40
    config.seed = 7
    with pytest.raises(ValueError, match=r"\n  seed: 0 -> 7\n  stages\.warmup\.steps: 3 -> 40\n"):
        claim(Config.of(config), workdir)
    assert storage.read_json(tmp_path / "config.json")["config"]["seed"] == 0


def test_a_mistake_in_the_first_try_costs_nothing(config: ConfigDict, tmp_path: Path) -> None:
    config.data.train.path = "missing.jsonl"
    with pytest.raises(ValueError, match=r"missing\.jsonl"):
        pipeline.run(config, tmp_path / "work")
    claim(Config.of(resolve(TINY)), epath.Path(tmp_path / "work"))  # no stage had begun


@pytest.mark.parametrize(
    ("name", "content"), [("notes.txt", "mine"), ("config.json", '{"model_type": "qwen2"}')]
)
def test_a_folder_of_other_things_is_refused(
    config: ConfigDict, tmp_path: Path, name: str, content: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match="choose another --workdir"):
        claim(Config.of(config), epath.Path(tmp_path))
    assert (tmp_path / name).read_text() == content


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("nope", "no such stage; this run has sft, warmup, dpo, and 'init'"),
        ("collect", "a collect stage trains none; this run has sft, warmup, dpo, and 'init'"),
        ("sft@x", "write the step after @ as a number"),
        ("sft@3", "has no checkpoint yet"),
        ("run:WORK#other", "has no stage 'other'; it has sft"),
        ("hf:no-such-folder", "neither an existing folder nor a hub id"),
    ],
)
def test_policies_that_are_not_there(
    config: ConfigDict, tmp_path: Path, policy: str, message: str
) -> None:
    storage.write_json(tmp_path / "config.json", {})
    (tmp_path / "01-sft").mkdir()
    with Tracker(tmp_path, tensorboard=False) as tracker:
        folders = graph.plan(Config.of(config)).folders(epath.Path(tmp_path))
        made = Config.of(config)
        run = Run(config=made, workdir=epath.Path(tmp_path), folders=folders, tracker=tracker)
        with (
            loaded(run, Options(splits=())) as shared,
            pytest.raises(ValueError, match=message),
        ):
            session = session_of(run, shared, samples=False)
            load_policy(session, policy.replace("WORK", str(tmp_path)))


def test_of_several_results_none_is_taken_by_its_name(config: ConfigDict) -> None:
    assert commands.last_policy(Config.of(config)) == "dpo"
    with config.unlocked(), config.stages.unlocked():
        config.stages.more = settings.online(policy="warmup")
        config.stages.validate = settings.evaluate(policies=("dpo",), split="dev")
    made = Config.of(config)
    assert behind("dpo", to_dict(made)["stages"]).keys() - {"dpo"} == {"sft", "warmup", "collect"}
    with pytest.raises(ValueError, match="ends with several policies, dpo, more: name one"):
        commands.last_policy(made)
    assert evaluation.evaluate_stage(made)[0] == "evaluate"


def test_a_run_warns_of_answers_that_are_cut_or_not_read(
    config: ConfigDict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As its dry run does, and before its first stage."""
    config.reward.update(function="verify", answers="tags")
    config.tokenizer.prompt_template = "{problem}\\boxed{}"
    config.stages.warmup.sampling.stop = ("<answer>",)
    made = Config.of(config)
    order = graph.plan(made)
    with run_stages.open_session(made, order, epath.Path(tmp_path), "", None, {}):
        said = capsys.readouterr().out
    assert "is 'tags', and the prompt asks for \\boxed{x}" in said
    assert "stop has '<answer>', which ends 40 of 80 right responses early" in said
    # A function of one's own may read anything.
    folder = epath.Path(tmp_path) / "own"
    with run_stages.open_session(made, order, folder, "", even, {}):
        assert "the prompt asks for" not in capsys.readouterr().out


def test_a_run_begins_with_what_it_is_in_plain_words(
    config: ConfigDict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.data.train.limit = 2000
    config.lora.rank = 2
    made = Config.of(config)
    order = graph.plan(made)
    with run_stages.open_session(made, order, epath.Path(tmp_path), "warmup", None, {}) as (
        session,
        _,
    ):
        choose_row_length(session, 64)
        said = [x for x in capsys.readouterr().out.splitlines() if not x.startswith("WARNING")]
    assert said[0] == "tiny: sft (6 steps), warmup (online, 3 steps)"
    assert re.fullmatch(
        r"model: new, with random weights, [\d,]+ parameters, [\d,]+ of them trained; "
        r"\d devices \(CPU\), in float32",
        said[1],
    )
    assert said[2:] == [
        "train: 2,000 problems from procedural:chains, its train part, the first 2,000",
        "dev: 8 problems from procedural:chains, its dev part, the first 8",
        "test: 16 problems from procedural:chains, its test part, the first 16",
        "sft: examples from procedural:chains, the first 48",
    ]  # and nothing of kernels, which manifests have


def test_functions_given_from_python_belong_to_the_run(config: ConfigDict, tmp_path: Path) -> None:
    begun(config, tmp_path, "01-sft", own={"reward": "mine:length"})
    with pytest.raises(ValueError, match=r"Python\.reward: 'mine:length' -> "):
        claim(Config.of(config), epath.Path(tmp_path))


def test_one_process_at_a_time_works_in_a_folder(config: ConfigDict, tmp_path: Path) -> None:
    with locked(epath.Path(tmp_path)):
        with pytest.raises(ValueError, match="in use by another process"):
            pipeline.run(config, tmp_path)
        assert not (tmp_path / "config.json").exists()
    with locked(epath.Path(tmp_path)):
        # the lock's own file does not make the folder a foreign one
        claim(Config.of(config), epath.Path(tmp_path))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stages.dpo.optimizer.schedule=cosin", "stages.dpo.optimizer.schedule must be one of"),
        (
            "stages.evaluate.sampling.max_new_tokens=0",
            "stages.evaluate.sampling.max_new_tokens must be at least 1",
        ),
        ("stages.warmup.steps=-5", "stages.warmup.steps must be at least 0, got -5"),
        ("dtype=bf16", "dtype must be one of float32, bfloat16"),
        ("compute.attention=cudnn", "computes in bfloat16 only: set dtype to bfloat16"),
        ("reward.function=nosuch.module:f", "cannot import 'nosuch"),
        ("model.family=gpt2", "model.family must be one of qwen2, qwen3, .*, got 'gpt2'"),
        ("model.hidden_size=30", "model.head_dim must be even"),
        ("model.num_hidden_layers=0", "model.num_hidden_layers must be at least 1, got 0"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_any_work(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_issues.checked(resolve(TINY, [override]))


@pytest.mark.slow
def test_a_loss_from_python_that_changed_between_two_runs_is_the_new_one_in_the_second(
    config: ConfigDict, tmp_path: Path
) -> None:
    """The function is the same object, as in a notebook, and it cannot be hashed."""

    @dataclass
    class Scaled:
        scale: float = 1.0
        compute: objectives.Compute | None = None

        def __call__(self, params, micro):
            loss, sums = objectives.sft(self.compute)(params, micro)
            return self.scale * loss, sums

    objective = Scaled()

    def make(compute: objectives.Compute) -> objectives.Objective:
        objective.compute = compute
        return objective

    config.stages.sft.steps = 1
    for objective.scale in (1.0, 3.0):
        folder = tmp_path / str(objective.scale)
        pipeline.run(config, folder, objectives={"sft": make}, until="sft")
        first = next(row["metrics"] for row in read_metrics(folder) if row["stage"] == "sft")
        assert first["loss"] == pytest.approx(objective.scale * first["nll"], rel=1e-5)


def test_a_run_that_would_stop_again_asks_for_other_settings(
    config: ConfigDict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the error, in g2d status, and at the top of the report."""
    config.stages.sft.steps = 1
    config.stages.warmup.steps = 60
    with pytest.raises(StopRun, match="change the settings, and give another --workdir"):
        pipeline.run(
            config, tmp_path / "run", reward=lambda completions, **_: [0.0] * len(completions)
        )
    capsys.readouterr()
    status.show(tmp_path / "run")
    said = " ".join(capsys.readouterr().out.split())
    assert "last stopped with: no reward signal for 50 steps in a row" in said
    assert said.count("another --workdir") == 1 and said.endswith("and give another --workdir")
    page, *_ = write_run(read_run(tmp_path / "run"))
    for file in (page, page.replace(".html", ".md")):
        text = Path(file).read_text()
        assert "Stopped by an error: no reward signal for 50 steps in a row" in text
        assert "continues" not in text and "No policy has been evaluated" not in text
