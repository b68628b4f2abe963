"""Evaluations of tasks whose rewards are right or wrong, only rank, or both in one run."""

import csv
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from etils import epath
from ml_collections import ConfigDict
from worlds import run

from g2d_jax import config as settings
from g2d_jax.config import Config, check, graph
from g2d_jax.config.io import from_dict, to_dict
from g2d_jax.records import Verdict
from g2d_jax.report.run import write_run
from g2d_jax.report.runs import read_run
from g2d_jax.report.tables import answers_table, summary_table
from g2d_jax.rollouts.store import greedy_file
from g2d_jax.runtime import storage
from g2d_jax.runtime.tables import read_rollouts
from g2d_jax.session import stage_result
from g2d_jax.session.session import Session
from g2d_jax.session.stage_result import NO_ACCURACY, Evaluation
from g2d_jax.session.workdir import claim
from g2d_jax.stages.held_out import answers_file


@pytest.fixture
def config(config: ConfigDict) -> ConfigDict:
    """Two policies, the first with random parameters, the second a few steps on."""
    config.stages.sft.steps = 2
    drawn = settings.sampling(8)
    with config.unlocked():
        config.stages = {
            "sft": config.stages.sft,
            "evaluate": settings.evaluate(
                policies=("init", "sft"),
                sampling=drawn,
                num_generations=2,
                pass_at=(1, 2),
                split="dev",
            ),
        }
    return config


def ranked(config: ConfigDict) -> ConfigDict:
    config.reward.update(function="tiny:longest", verifiable=False)
    return config


def mixed(config: ConfigDict) -> ConfigDict:
    values = to_dict(config)
    chat = settings.task(
        *(settings.source("procedural:chains", split, 60) for split in ("train", "dev", "test"))
    )
    values["tasks"] = {"chat": to_dict(ranked(chat))}
    return from_dict(values)


def evaluated(session: Session) -> Evaluation:
    claim(session.config, epath.Path(session.workdir))
    return [run(session, name) for name in graph.plan(session.config).order][-1].evaluation


def test_an_evaluation_of_several_calls_is_kept_call_by_call(config, tmp_path, opened):
    """What was answered before a kill is not asked again, and what comes out is the same."""
    expected = evaluated(opened(config, tmp_path / "whole"))
    asked: list[int] = []

    def dies_at_the_third_call(completions: list[str], **columns: Any) -> list[float]:
        asked.append(len(completions))
        if len(asked) == 3:
            raise KeyboardInterrupt
        return [float(len(text) % 2 == 0) for text in completions]

    config.compute.generation_batch_size = (
        9  # three problems of two sampled answers and a greedy one
    )
    claim(Config.of(config), epath.Path(tmp_path / "parts"))
    session = opened(config, tmp_path / "parts", dies_at_the_third_call)
    run(session, "sft")
    with pytest.raises(KeyboardInterrupt):
        run(session, "evaluate")
    folder = tmp_path / "parts" / "02-evaluate" / "rollouts"
    kept = sorted(file.name for file in (folder / "_init").glob("0*[0-9].parquet"))
    assert kept == ["000000-000003.parquet", "000003-000006.parquet"]
    asked[:] = [0, 0, 0]
    again = run(opened(config, tmp_path / "parts", dies_at_the_third_call), "evaluate")
    assert asked[3:] == [6, 9, 9, 6]
    for entry, other in zip(expected.policies, again.evaluation.policies, strict=True):
        assert (entry.name, entry.marks, entry.verdicts) == (
            other.name,
            other.marks,
            other.verdicts,
        )
        assert entry.accuracy == other.accuracy and entry.pass_at == other.pass_at
        assert entry.measure("mean_length") == other.measure("mean_length")
        assert entry.measure("entropy") == pytest.approx(other.measure("entropy"), abs=1e-5)
    assert again.evaluation.changes == expected.changes
    assert [path for path in folder.iterdir() if path.is_dir()] == []


def test_greedy_answers_are_one(config, tmp_path, opened):
    """Four of the same would make pass@4 of pass@1, and errors too small."""
    stage = config.stages.evaluate
    stage.update(num_generations=4, pass_at=(1, 2, 4), greedy=False)
    stage.sampling.temperature = 0.0
    result = evaluated(opened(config, tmp_path))
    assert result.samples == 1
    for entry in result.policies:
        assert entry.pass_at.keys() == {"1"} and set(map(len, entry.marks)) == {1}
        assert sum(entry.verdicts.values()) == result.problems
    stage.pass_at = (1, 4)
    with pytest.raises(ValueError, match=r"sampling\.temperature 0 allows one answer: remove"):
        check.checked(config)


def test_without_verdicts_there_are_rewards_and_no_accuracy(config, tmp_path, opened):
    session = opened(ranked(config), tmp_path, None)
    result = evaluated(session)
    means = []
    for entry in result.policies:
        rows = read_rollouts(session.folders["evaluate"] / entry.rollouts)
        assert entry.verdicts == {Verdict.SCORED.value: 16}
        assert entry.accuracy is NO_ACCURACY and np.isnan(entry.greedy)
        assert entry.pass_at == entry.subsets == {}
        found = entry.tasks["main"]
        by_run = [
            np.mean([row.score.reward for row in rows if row.rollout.sample == sample])
            for sample in (0, 1)
        ]
        assert found.reward == pytest.approx(np.mean(by_run))
        per_token = np.mean(by_run) / np.mean([len(row.rollout.token_ids) for row in rows])
        assert found.length_normalised == pytest.approx(per_token)
        assert not found.verifiable and found.problems == 8 and found.unscorable == 0
        assert found.greedy >= 0
        means.append(found.reward)
    (pair,) = result.changes
    assert np.isnan(pair.sampled.difference)
    assert pair.tasks["main"].difference == pytest.approx(means[1] - means[0])
    page, *_ = write_run(read_run(tmp_path))
    text = (tmp_path / "report.md").read_text()
    assert (
        "mean reward" in text
        and "NaN" not in text
        and "accuracy %" not in text
        and "correctly" not in text
    )
    table = csv.DictReader((tmp_path / "report.csv").read_text().splitlines())
    (row,) = [row for row in table if row["policy"] == "sft"]
    assert float(row["reward/main"]) == means[1] and row["accuracy"] == "NaN"
    html = Path(page).read_text()
    assert "0/2" not in html and "wrong in both" not in html and 'class="scored"' in html


def test_no_two_policies_share_a_file(tmp_path):
    named = ["dpo", "dpo-greedy", "dpo_greedy", "run:a#dpo", "run:b#dpo", "run_a_dpo", "dpo@5"]
    files = []
    for policy in named:
        file = answers_file(epath.Path(tmp_path), policy)
        files += [file, greedy_file(file)]
    assert len(set(files)) == 2 * len(named)
    assert files[0].name == "dpo.parquet"


def test_a_greedy_answer_shares_its_prompt_with_the_sampled_ones(config, tmp_path, opened):
    session = opened(config, tmp_path, None)
    result = evaluated(session)
    folder = session.folders["evaluate"]
    files = [folder / entry.rollouts for entry in result.policies]
    greedy = [file.with_name(f"{file.stem}-greedy.parquet") for file in files]
    prompts = 0
    for file in files:
        rows = read_rollouts(file)
        assert sorted({row.rollout.sample for row in rows}) == [0, 1]
        prompts += sum(len(row.rollout.prompt_ids) for row in rows if row.rollout.sample == 0)
    for file in greedy:
        rows = read_rollouts(file)
        assert {row.rollout.sample for row in rows} == {0}
        assert not any(row.rollout.logprobs.any() for row in rows)
    manifest = stage_result.read(folder)
    assert manifest is not None and manifest.cost.prefilled == prompts
    # One of the two files alone is no whole call: it is drawn again, and is the same.
    before = [file.read_bytes() for file in (*files, *greedy)]
    greedy[1].unlink()
    (folder / "manifest.json").unlink()
    assert storage.plain(evaluated(opened(config, tmp_path, None))) == storage.plain(result)
    assert [file.read_bytes() for file in (*files, *greedy)] == before


def test_a_mixed_evaluation_keeps_its_tasks_apart(config, tmp_path, opened):
    session = opened(mixed(config), tmp_path, None)
    result = evaluated(session)
    tasks = {problem.id: problem.task for problem in session.problems.by_split["dev"]}
    golds = {problem.id: problem.answer for problem in session.problems.by_split["dev"]}
    counts = {task: list(tasks.values()).count(task) for task in ("main", "chat")}
    assert counts["main"] == 8 and counts["chat"] > 0
    for entry in result.policies:
        rows = read_rollouts(session.folders["evaluate"] / entry.rollouts)
        right = [
            row.score.verdict == Verdict.CORRECT
            for row in rows
            if tasks[row.rollout.problem_id] == "main"
        ]
        last = [
            re.findall(r"\d+", row.text)[-1:] == [golds[row.rollout.problem_id]]
            for row in rows
            if tasks[row.rollout.problem_id] == "main"
        ]
        assert entry.last_number == pytest.approx(np.mean(np.logical_or(last, right)))
        rewards = [row.score.reward for row in rows if tasks[row.rollout.problem_id] == "chat"]
        main, chat = entry.tasks["main"], entry.tasks["chat"]
        assert entry.accuracy.mean == main.accuracy == pytest.approx(np.mean(right))
        assert entry.accuracy.problems == main.problems == 8
        assert chat.reward == pytest.approx(np.mean(rewards)) and chat.problems == counts["chat"]
        assert np.isnan(main.length_normalised) and not chat.verifiable
        assert entry.verdicts[Verdict.SCORED.value] == len(rewards)
        assert 0 <= entry.greedy <= 1 and entry.pass_at.keys() == {"1", "2"}
    (pair,) = result.changes
    assert pair.sampled.problems == pair.greedy.problems == 8 and pair.tasks.keys() == {"chat"}
    before, after = (entry.greedy for entry in result.policies)
    assert pair.greedy.difference == pytest.approx(after - before)
    assert pair.tasks["chat"].problems == counts["chat"]
    write_run(read_run(tmp_path))
    text = (tmp_path / "report.md").read_text()
    assert "| accuracy % |" in text and "| reward, chat |" in text and "NaN" not in text


@pytest.mark.parametrize("dense", [False, True])
def test_one_task_with_verdicts_has_no_tasks(config, tmp_path, opened, dense):
    """Its mean reward is shown where it is no accuracy."""
    config.stages.evaluate.policies = ("init",)
    with config.unlocked():
        del config.stages.sft

    def reward(completions, **_):
        return [len(text) / 7 if dense else float(len(text) > 3) for text in completions]

    session = opened(config, tmp_path, reward)
    evaluation = evaluated(session)
    (entry,) = evaluation.policies
    assert not entry.tasks and entry.accuracy.problems == 8
    rows = read_rollouts(session.folders["evaluate"] / entry.rollouts)
    rewards = [row.score.reward for row in rows]
    assert entry.reward == pytest.approx(np.mean(rewards))
    assert "accuracy %" in summary_table(evaluation, {}).columns
    rows = answers_table(evaluation).rows
    assert any(row[0] == "reward" for row in rows) == dense
