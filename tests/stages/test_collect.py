"""Collection: from an archive, from files of others, from nothing; what becomes of every prompt;
DPO behind it."""

import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pandas as pd
import pytest
from ml_collections import ConfigDict
from worlds import bits, only, run

from g2d_jax import commands
from g2d_jax import config as settings
from g2d_jax.config import Config, Dump
from g2d_jax.config.graph import plan
from g2d_jax.config.io import from_dict, to_dict
from g2d_jax.data.preferences import random_pairs, to_preference
from g2d_jax.records import Preference, Rollout, Score, ScoredRollout, Verdict
from g2d_jax.rollouts import external as external_rollouts
from g2d_jax.runtime import storage
from g2d_jax.runtime.tables import read_preferences, read_rollouts
from g2d_jax.runtime.tracking import read_metrics
from g2d_jax.session import stage_result
from g2d_jax.session.policies import load_policy
from g2d_jax.session.problems import SPLITS
from g2d_jax.session.row_shapes import RowShape
from g2d_jax.session.session import StopRun
from g2d_jax.session.stage_result import Cost
from g2d_jax.session.training_programs import Scorer
from g2d_jax.session.workdir import claim
from g2d_jax.stages import collect, offline, run_issues
from g2d_jax.study import informativeness


@pytest.fixture
def small(config: ConfigDict) -> ConfigDict:
    """collect and dpo alone, from random parameters."""
    return only(config, "collect", "dpo")


def lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_sampled_pairs_are_read_by_pandas_and_counts_add_up(small, tmp_path, opened):
    session = opened(small, tmp_path)
    counts = run(session).counts
    assert counts["prompts"] == 8 == sum(counts[fate] for fate in collect.FATES)
    assert (
        counts["rollouts"] == 32
        and counts["unscorable_rollouts"] == counts["timeout_rollouts"] == 0
    )
    frame = pandas.read_parquet(tmp_path / "01-collect" / "preferences")
    assert len(frame) == counts["pairs"] > 0
    assert all(len(text) % 2 == 0 for text in frame.chosen) and all(
        len(text) % 2 == 1 for text in frame.rejected
    )
    prompts = {problem.id: problem.prompt for problem in session.problems.train}
    expected = []
    for group in groups_of(tmp_path / "01-collect"):  # all pairs are those of the pair rule
        problem, right = group[0].rollout.problem_id, np.array([row.score.reward for row in group])
        expected += [
            to_preference(prompts[problem], group, pair)
            for pair in random_pairs(0, problem, 0, right, 4)
        ]
    pairs = read_preferences(tmp_path / "01-collect" / "preferences")
    assert list(map(texts, pairs)) == list(map(texts, expected))
    how = storage.read_json(tmp_path / "01-collect" / "preferences" / "_manifest.json")
    assert how["policy"] == "init" and how["sampler"]["temperature"] == 1.0 and how["seed"] == 0
    assert (
        how["pair_rule"]["pairs_per_prompt"] == 4
        and how["rewards"]["main"]["function"] == "tiny:even"
    )


def test_the_window_of_pass_rates(small, tmp_path, opened):
    small.stages.collect.min_pass_rate = small.stages.collect.max_pass_rate = 0.5
    session = opened(small, tmp_path)
    counts = run(session).counts
    assert (
        counts["prompts"] == sum(counts[fate] for fate in collect.FATES)
        and counts["outside_window"] > 0
    )
    rows = read_rollouts(tmp_path / "01-collect" / "rollouts")
    rates: dict[str, list[float]] = {}
    for row in rows:
        rates.setdefault(row.rollout.problem_id, []).append(row.score.reward or 0.0)
    half = {identifier for identifier, rewards in rates.items() if np.mean(rewards) == 0.5}
    assert {p.problem_id for p in read_preferences(tmp_path / "01-collect" / "preferences")} == half


def groups_of(folder: Path) -> list[list[ScoredRollout]]:
    groups: dict[str, list[ScoredRollout]] = {}
    for row in read_rollouts(folder / "rollouts"):
        groups.setdefault(row.rollout.problem_id, []).append(row)
    return list(groups.values())


def texts(pair: Preference) -> tuple[Any, str, str]:
    return pair.prompt, pair.chosen, pair.rejected


def sharing(config: ConfigDict, **stages: dict[str, Any]) -> ConfigDict:
    """The config with further collect stages that read the rollouts of "collect"."""
    with config.unlocked(), config.stages.unlocked():
        del config.stages.dpo
        for name, changes in stages.items():
            config.stages[name] = settings.collect(
                **{"policy": "init", "rollouts": "collect", **changes}
            )
    return config


def test_stages_choose_from_the_rollouts_of_another(small, tmp_path, opened):
    config = sharing(
        small,
        few=dict(select="random", max_pairs=5),
        many=dict(max_pairs=9, rollouts="few", prompts=1, num_generations=2),
        sure=dict(select="confident", max_pairs=5),
        unsure=dict(select="uncertain", max_pairs=5),
    )
    session = opened(config, tmp_path)
    manifests = {name: run(session, name) for name in plan(run_issues.checked(config)[0]).order}
    pairs = {name: read_preferences(session.folders[name] / "preferences") for name in manifests}
    assert {name: len(some) for name, some in pairs.items()} == dict(
        collect=18, few=5, many=9, sure=5, unsure=5
    )
    places = {
        name: [list(map(texts, pairs["collect"])).index(texts(p)) for p in some]
        for name, some in pairs.items()
    }
    # in the order of the prompts, each once
    assert all(some == sorted(set(some)) for some in places.values())
    assert set(places["few"]) < set(places["many"])
    entropy = {
        group[0].rollout.problem_id: informativeness.summary(informativeness.responses([group]))[
            "entropy"
        ]
        for group in groups_of(session.folders["collect"])
    }
    mixed = {pair.problem_id for pair in pairs["collect"]}
    ranked = sorted(mixed, key=entropy.__getitem__)
    assert {p.problem_id for p in pairs["sure"]} == set(ranked[:2]) and ranked[-1] in {
        p.problem_id for p in pairs["unsure"]
    }
    for name, manifest in manifests.items():
        own = name == "collect"
        assert (manifest.cost.generated > 0) == (manifest.cost.flops > 0) == own
        assert (session.folders[name] / "rollouts").exists() == own
        assert manifest.counts["rollouts"] == 32 and manifest.counts["pairs_available"] == 18
        how = storage.read_json(session.folders[name] / "preferences" / "_manifest.json")
        assert (
            how["sampler"]["purpose"] == "collect/collect"
            and how["sampler"]["num_generations"] == 4
        )
    assert (how["rollouts"], how["pair_rule"]["select"], how["pair_rule"]["max_pairs"]) == (
        "collect",
        "uncertain",
        5,
    )


def test_fewer_pairs_than_asked_for(small, tmp_path, opened, capsys):
    small.stages.collect.max_pairs = 1000
    manifest = run(opened(small, tmp_path))
    counts = manifest.counts
    assert (
        counts["pairs"] == counts["pairs_available"] > 0
        and counts["pairs_missing"] == 1000 - counts["pairs"]
    )
    assert (
        f"the rollouts have {counts['pairs_missing']} pairs fewer than max_pairs, 1000"
        in capsys.readouterr().out
    )


def test_shared_rollouts_from_an_archive_or_a_file(config, tmp_path, opened):
    rows = [{"prompt": "1+1=?", "completion": f"\\boxed{{{i}}}", "reward": i % 2} for i in range(4)]
    with config.unlocked():
        config.stages = {"warmup": config.stages.warmup, "archive1": config.stages.collect}
        config.stages.mine = settings.collect(
            policy="init", dump={"path": lines(tmp_path / "mine.jsonl", rows)}
        )
        config.stages.mine2 = settings.collect(policy="init", rollouts="mine", max_pairs=2)
        config.stages.archive2 = settings.collect(
            policy="warmup@1", rollouts="archive1", max_pairs=2
        )
    config.stages.warmup.policy = "init"
    config.stages.archive1.update(policy="warmup@1", rollouts="archive")
    session = opened(config, tmp_path / "work")
    manifests = {name: run(session, name) for name in plan(run_issues.checked(config)[0]).order}
    assert [manifests[name].counts["pairs"] for name in ("archive2", "mine", "mine2")] == [
        2,
        4,
        2,
    ]
    # an archive costs nothing
    assert session.sampling.sampler.usage.generated == manifests["warmup"].cost.generated
    for name in ("archive1", "archive2"):
        assert manifests[name].counts["prompts"] == 4  # of one step
        assert manifests[name].cost.generated == 0
    drawn = read_rollouts(session.folders["warmup"] / "rollouts" / "step-000000.parquet")
    pairs = read_preferences(session.folders["archive1"] / "preferences")
    assert {pair.problem_id for pair in pairs} <= {row.rollout.problem_id for row in drawn}
    how = {
        name: storage.read_json(session.folders[name] / "preferences" / "_manifest.json")
        for name in ("archive2", "mine2")
    }
    assert how["archive2"]["sampler"]["purpose"] == "online/warmup"
    assert how["mine2"]["sampler"] == {"file": config.stages.mine.dump.path}
    # what drew them; those of this stage do not count
    limit = config.stages.warmup.sampling.max_new_tokens
    assert limit != config.stages.archive2.sampling.max_new_tokens
    for name, words in (
        ("archive1", [f"cut at max_new_tokens, {limit}, "]),
        ("archive2", [f", {limit}, "]),
        ("mine", []),
    ):
        cut = [warning.text for warning in manifests[name].warnings if warning.cause == "cut"]
        assert len(cut) == len(words) and all(map(str.__contains__, cut, words))


def test_informativeness_on_disk(small, tmp_path, opened):
    with small.unlocked(), small.stages.unlocked():
        small.stages.evaluate = settings.evaluate(
            policies=("init",),
            num_generations=2,
            pass_at=(1,),
            greedy=False,
            sampling=settings.sampling(8),
        )
    small.stages.collect.max_pairs = 7
    session = opened(small, tmp_path)
    found = run(session).measures
    measures, of_pairs = found["informativeness"], found["pairs"]
    folder = tmp_path / "01-collect"
    groups = groups_of(folder)
    summary = informativeness.summary(informativeness.responses(groups))
    assert measures == pytest.approx(summary, nan_ok=True)
    columns = pd.read_parquet(folder / "informativeness" / "prompts.parquet")
    assert columns["problem_id"].tolist() == [group[0].rollout.problem_id for group in groups]
    pairs = read_preferences(folder / "preferences")
    assert columns["pairs"].tolist() == [
        sum(p.problem_id == i for p in pairs) for i in columns["problem_id"]
    ]
    own = {
        (r.rollout.problem_id, r.text): float(r.rollout.logprobs.sum(dtype=np.float64))
        for g in groups
        for r in g
    }
    gaps = [own[p.problem_id, p.chosen] - own[p.problem_id, p.rejected] for p in pairs]
    assert of_pairs["pairs"] == 7.0 == len(pairs)
    assert of_pairs["gap_mean"] == pytest.approx(np.mean(gaps))
    (entry,) = run(session, "evaluate").evaluation.policies
    answers = groups_of(tmp_path / "03-evaluate")
    expected = informativeness.summary(informativeness.responses(answers))
    assert entry.informativeness == pytest.approx(expected, nan_ok=True)


def test_a_stage_that_ended_half_way_ends_with_the_same_bytes(small, tmp_path, opened):
    config = sharing(small, few=dict(select="uncertain", max_pairs=5))
    config.compute.generation_batch_size = 16  # those of a part
    whole = opened(config, tmp_path)
    for name in ("collect", "few"):
        run(whole, name)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*.parquet")}
    for lost in (
        "*/manifest.json",
        "*/preferences/*",
        "*/informativeness*/*",
        "01-collect/rollouts/part-00001.parquet",
    ):
        for path in tmp_path.glob(lost):
            path.unlink()
    times = {"seconds": 1000.0, "device_seconds": 8000.0, "verifier_cpu_seconds": 3.0}
    storage.write_json(tmp_path / "01-collect" / "rollouts" / "_part-00000.json", times)
    again = opened(config, tmp_path)
    found = {name: run(again, name) for name in ("collect", "few")}
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.parquet")} == files
    assert (
        1000 < found["collect"].cost.seconds < 2000 and found["collect"].cost.device_seconds > 8000
    )
    assert found["collect"].cost.verifier_cpu_seconds >= 3
    assert found["few"].cost.seconds < 1000  # rollouts of another stage were paid for there


@pytest.mark.parametrize(
    ("reward", "advice"),
    [
        (
            0.0,
            r"all_incorrect 8.*100% of the responses are incorrect.*a larger sampling.max_new_tokens",
        ),
        (1.0, r"all_correct 8.*100% of the responses are correct.*harder problems"),
        (None, r"unscorable 8.*could not be scored.*numbers in place of None"),
    ],
)
def test_no_pairs_stop_the_run_with_advice(small, tmp_path, opened, reward, advice):
    session = opened(small, tmp_path, lambda completions, **_: [reward] * len(completions))
    with pytest.raises(StopRun, match=rf"collect: no preference pair from 8 prompts .*{advice}"):
        run(session)
    last = read_metrics(tmp_path)[-1]
    assert last["kind"] == "ended" and last["text"].startswith("no preference pair from 8 prompts")
    assert len(read_rollouts(tmp_path / "01-collect" / "rollouts")) == 32  # kept all the same
    assert stage_result.read(tmp_path / "01-collect") is None


def test_a_run_whose_reward_came_from_python_is_opened_again(small, tmp_path, opened):
    """Its problems need no answers; what would score asks for the function."""
    small.data.train = settings.source(
        lines(tmp_path / "train.jsonl", [{"prompt": f"{n}+{n}=?"} for n in range(9)])
    )
    small.data.test = settings.source(lines(tmp_path / "test.jsonl", [{"prompt": "10+10=?"}]))
    small.data.dev.path, small.reward.function = "", "verify"
    with small.stages.unlocked():
        small.stages.evaluate = settings.evaluate(
            policies=("init",), pass_at=(1, 4), sampling=settings.sampling(8)
        )
    session = opened(
        small,
        tmp_path / "work",
        lambda completions, **_: [float(len(text) % 2) for text in completions],
    )
    claim(Config.of(small), session.workdir, {"reward": "mine:odd"})
    run(session)
    with commands.opened(session.workdir, splits=SPLITS) as read:
        _, groups = collect.rollouts_of(read, "collect", Cost())
    again = groups_of(tmp_path / "work" / "01-collect")
    assert [[row.text for row in group] for group in groups] == [
        [row.text for row in group] for group in again
    ]
    with pytest.raises(
        ValueError,
        match=r"a function given from Python.*evaluate\(WORKDIR, POLICY, reward=FUNCTION\)",
    ):
        commands.evaluate(session.workdir, "init")
    counted = commands.evaluate(
        session.workdir, "init", reward=lambda completions, **_: [1.0] * len(completions)
    )
    assert counted.evaluation.policies[0].accuracy.mean == 1.0


def test_a_dumps_answer_leaves_a_known_problem_what_the_data_say_of_it(small, tmp_path, opened):
    problems = [{"problem": "1+1=?", "answer": "2", "tests": "mine"}]
    problems += [{"problem": f"{n}+1=?", "answer": "0", "tests": ""} for n in range(2, 40)]
    small.data.train = settings.source(lines(tmp_path / "train.jsonl", problems))
    rows = [{"prompt": "1+1=?", "completion": text, "answer": "3"} for text in "12"]
    small.stages.collect.dump.path = lines(tmp_path / "rollouts.jsonl", rows)
    seen = []

    def reward(completions: list[str], answer: list[str], tests: list[str]) -> list[float]:
        seen.append((answer, tests))
        return [float(text == "1") for text in completions]

    run(opened(small, tmp_path / "work", reward))
    assert seen == [(["3", "3"], ["mine", "mine"])]


def test_rows_of_a_prompt_have_the_same_answer(small, tmp_path, opened):
    ask = {"prompt": "7+7+7+7=?"}
    small.reward.function = "verify"
    nothing = [{**ask, "completion": "7", "reward": 1}, {**ask, "completion": "9"}]
    with pytest.raises(
        ValueError, match=r"c\.jsonl, line 2: it has no reward, and there is no answer"
    ):
        external_rollouts.read(
            opened(small, tmp_path, None), Dump(path=lines(tmp_path / "c.jsonl", nothing))
        )
    rows = [{**ask, "completion": "8", "answer": answer} for answer in ("7", "7", "8")]
    with pytest.raises(
        ValueError,
        match=r"b\.jsonl, line 3: its answer or its prompt_ids .* same prompt in .*line 1",
    ):
        external_rollouts.read(
            opened(small, tmp_path), Dump(path=lines(tmp_path / "b.jsonl", rows))
        )


def test_a_function_scores_rows_without_an_answer(small, tmp_path, opened):
    problems = [{"problem": f"{n}+1=?"} for n in range(2, 40)]
    small.data.train = settings.source(lines(tmp_path / "train.jsonl", problems))
    rows = [{"prompt": "2+1=?", "completion": text} for text in "12"]
    small.stages.collect.dump.path = lines(tmp_path / "rollouts.jsonl", rows)

    def reward(completions: list[str], **_: object) -> list[float]:
        return [float(text == "1") for text in completions]

    assert run(opened(small, tmp_path / "work", reward)).counts["pairs"] == 1


def test_rollouts_made_elsewhere(small, tmp_path, opened):
    train = opened(small, tmp_path).problems.train
    rows = [
        {"prompt": train[0].prompt, "completion": "\\boxed{1}", "reward": 1},
        {"prompt": train[0].prompt, "completion": "\\boxed{2}", "reward": 0},
        {"prompt": train[0].prompt, "completion": "\\boxed{3}", "reward": None},
        # scored: its problem is known
        {
            "prompt": train[1].prompt,
            "completion": f"\\boxed{{{train[1].answer}}}",
        },
        {"prompt": train[1].prompt, "completion": "\\boxed{-1}"},
        # scored: against its own answer
        {
            "prompt": "1+1=?",
            "completion": "\\boxed{2}",
            "answer": "2",
        },
        {"prompt": "1+1=?", "completion": "\\boxed{3}", "answer": "2"},
    ]
    small.stages.collect.dump.path = lines(tmp_path / "rollouts.jsonl", rows)
    small.reward.function = "verify"
    manifest = run(opened(small, tmp_path / "work", None))
    assert manifest.counts == {
        **dict.fromkeys(collect.FATES, 0),
        **{
            "prompts": 3,
            "rollouts": 7,
            "unscorable_rollouts": 1,
            "timeout_rollouts": 0,
            "mixed": 3,
        },
        **{"pairs": 3, "pairs_available": 3, "pairs_missing": 0},
    }
    measures = manifest.measures["informativeness"]
    assert (
        measures["frac_mixed"] == 1.0
        and measures["scored"] == 6.0
        and manifest.measures["pairs"]["chosen_length"] > 1
    )
    for unknown in (
        measures["entropy"],
        measures["ece"],
        manifest.measures["pairs"]["frac_ranked"],
    ):
        assert math.isnan(unknown)
    pairs = {
        p.prompt: p for p in read_preferences(tmp_path / "work" / "01-collect" / "preferences")
    }
    assert (pairs["1+1=?"].chosen, pairs["1+1=?"].rejected) == ("\\boxed{2}", "\\boxed{3}")
    assert pairs[train[0].prompt].rejected == "\\boxed{2}"
    assert pairs["1+1=?"].chosen_ids[-1] in opened(small, tmp_path / "work").tokenizer.eos_ids
    read = read_rollouts(tmp_path / "work" / "01-collect" / "rollouts")
    assert {row.policy for row in read} == {"external"} and np.isnan(read[0].rollout.logprobs).all()


def test_a_response_is_scored_as_the_task_of_its_prompt_asks(small, tmp_path, opened):
    """Also where the dump has the answer."""
    values = to_dict(small)
    task = settings.task(
        *(settings.source("procedural:chains", split, 60) for split in ("train", "dev", "test")),
        function="verify",
        answers="hash",
    )
    values["tasks"] = {"hash": to_dict(task)}
    small = from_dict(values)
    train = opened(small, tmp_path).problems.train
    asked = next(problem for problem in train if problem.task == "hash")
    row = {"prompt": asked.prompt, "completion": asked.answer, "answer": asked.answer}
    other = {"prompt": "1+1=?", "completion": "2", "answer": "2"}
    dump = lines(tmp_path / "dump.jsonl", [row, other])
    groups = external_rollouts.read(opened(small, tmp_path), Dump(path=dump))
    assert [row.problem.task for row in itertools.chain(*groups)] == ["hash", "main"]


def test_rollouts_of_more_prompts_than_there_are_is_said(small, tmp_path, opened):
    small.stages.collect.prompts = 100
    session = opened(small, tmp_path)
    count = len(session.problems.train)
    (issue,) = collect.issues(session, "collect", session.config.stages["collect"]).issues
    assert str(issue).startswith(
        f"stages.collect.prompts is 100, but there are only {count} training problems"
    )


def test_no_pairs_of_single_responses_say_so(small, tmp_path, opened):
    rows = [
        {"prompt": f"{n}+1=?", "completion": text, "reward": 1}
        for n, text in ((1, "2"), (2, "3"), (3, "4"), (3, "5"))
    ]
    small.stages.collect.dump.path = lines(tmp_path / "rollouts.jsonl", rows)
    with pytest.raises(StopRun, match="several responses to a prompt: 2 prompts have one"):
        run(opened(small, tmp_path / "some"))
    small.stages.collect.dump.path = lines(tmp_path / "single.jsonl", rows[:3])
    with pytest.raises(
        ValueError,
        match=r"single\.jsonl has one response to each of its 3 prompts, but a preference pair",
    ):
        run(opened(small, tmp_path / "none"))


def test_rollouts_with_ids_are_exact(small, tmp_path, opened, capsys):
    """Of our own parts, and of rows with the same ids, the pairs are those of the stage that
    sampled."""
    session = opened(small, tmp_path / "own")
    run(session)
    drawn = groups_of(tmp_path / "own" / "01-collect")
    prompts = {problem.id: problem.prompt for problem in session.problems.train}
    rows = [
        {
            "prompt": prompts[row.rollout.problem_id],
            "prompt_ids": row.rollout.prompt_ids.tolist(),
            "completion_ids": row.rollout.token_ids.tolist(),
            "logprobs": row.rollout.logprobs.tolist(),
            "finish_reason": row.rollout.stop_reason,
            "reward": row.score.reward,
        }
        for group in drawn
        for row in group
    ]
    dumps = {
        "parts": str(tmp_path / "own/01-collect/rollouts"),
        "rows": lines(tmp_path / "rows.jsonl", rows),
    }
    expected = (tmp_path / "own/01-collect/preferences/part-00000.parquet").read_bytes()
    for name, dump in dumps.items():
        small.stages.collect.dump.path = dump
        run(opened(small, tmp_path / name))
        assert (
            tmp_path / name / "01-collect/preferences/part-00000.parquet"
        ).read_bytes() == expected
        again = [row for group in groups_of(tmp_path / name / "01-collect") for row in group]
        for kept, row in zip(again, (row for group in drawn for row in group), strict=True):
            assert kept.text == row.text and kept.rollout.stop_reason == row.rollout.stop_reason
            np.testing.assert_array_equal(kept.rollout.logprobs, row.rollout.logprobs)
    assert "other ids" not in capsys.readouterr().out
    other = [{**row, "prompt_ids": row["prompt_ids"][1:]} for row in rows]
    small.stages.collect.dump.path = lines(tmp_path / "other.jsonl", other)
    run(opened(small, tmp_path / "other"))
    assert "32 responses have other prompt ids than this run" in capsys.readouterr().out
    assert read_preferences(tmp_path / "other/01-collect/preferences")[0].prompt_ids.tolist() in [
        row["prompt_ids"] for row in other
    ]


def test_dumps_whose_prompts_are_behind_a_template(small, tmp_path, opened):
    """The problem is that of data.train which looks like this after the template here."""
    session = opened(small, tmp_path)
    train, held_out = session.problems.train[3], session.problems.by_split["test"][3]

    def row(problem: Any, **more: Any) -> dict[str, Any]:
        text = session.tokenizer.render(problem)
        return {"rendered_prompt": text, "completion": "1", "answer": "9", "reward": 1, **more}

    path = lines(tmp_path / "1.jsonl", [row(train), row(train, completion="", reward=0.0)])
    (rows,) = external_rollouts.read(session, Dump(path=path))
    assert [row.rollout.problem_id for row in rows] == [train.id] * 2
    assert [row.rollout.token_ids[-1] for row in rows] == [session.tokenizer.stop_id] * 2
    for bad, message in (
        (row(held_out), "in data.dev or data.test"),
        (row("0+0"), "matches no problem in data.train"),
    ):
        with pytest.raises(ValueError, match=rf"line 1: .*{message}"):
            external_rollouts.read(session, Dump(path=lines(tmp_path / "1.jsonl", [bad])))


def test_a_reward_that_fails_names_its_stage_and_loses_nothing(small, tmp_path, opened):
    rows = [{"prompt": "1+1=?", "completion": f"\\boxed{{{i}}}", "answer": "2"} for i in range(4)]
    small.stages.collect.dump.path = lines(tmp_path / "mine.jsonl", rows)
    (tmp_path / "my_failing_rewards.py").write_text(
        "labels = {}\ndef exact(completions, answer):\n"
        "    return [float(labels.get(gold, 0) if '3' not in text else labels[gold]) for text, "
        "gold in "
        "zip(completions, answer)]\n"
    )
    small.reward.function, small.reward.folder = "my_failing_rewards:exact", str(tmp_path)
    with pytest.raises(
        ValueError, match=r"^collect: reward exact .*, line 3, in .*: KeyError: '2'"
    ) as failed:
        run(opened(small, tmp_path / "work", None))
    assert "response '\\\\boxed{3}'" in str(failed.value) and "same --workdir continues" in str(
        failed.value
    )
    sys.modules["my_failing_rewards"].labels["2"] = 1  # type: ignore[attr-defined]  # mended
    with pytest.raises(StopRun, match="no preference pair"):  # all are right
        run(opened(small, tmp_path / "work", None))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "1+1=?", "reward": 1},
            "a rollout needs .* completion or completion_ids.* This row has 'prompt', 'reward'",
        ),
        ({"prompt": "1+1=?", "completion": "x", "reward": "good"}, "reward 'good' is not a number"),
        ({"prompt": "1+1=?", "completion": "x", "reward": "nan"}, "reward 'nan' is not"),
        ({"prompt": "", "completion": "x", "reward": 1}, "'prompt' is blank"),
        ({"prompt": "TEST", "completion": "x", "reward": 1}, "in data.dev or data.test"),
        ({"prompt": "1+1=?", "completion": "<eos>1", "reward": 1}, "special token '<eos>'"),
        ({"prompt": "what?", "completion": "2", "reward": 1}, "the tokenizer cannot encode 'what"),
        (
            {"prompt": "1+1=?", "completion_ids": [1, 9999], "reward": 1},
            "has 9999, but the ids of the tokenizer",
        ),
        (
            {"prompt": "2+2=?", "prompt_ids": [1], "completion": "2", "reward": 1},
            "its answer or its prompt_ids differ from those of the same prompt in .* 1",
        ),
    ],
)
def test_broken_rows_are_named_by_file_and_line(small, tmp_path, opened, row, message):
    if row["prompt"] == "TEST":
        row = {**row, "prompt": opened(small, tmp_path).problems.by_split["test"][3].prompt}
    good = {"prompt": "2+2=?", "completion": "\\boxed{4}", "reward": 1}
    small.stages.collect.dump.path = lines(tmp_path / "mine.jsonl", [good, row])
    with pytest.raises(ValueError, match=rf"mine\.jsonl, line 2: .*({message})"):
        run(opened(small, tmp_path / "work"))


def test_dpo_starts_at_the_reference(small, tmp_path, opened):
    small.stages.dpo.update(loss_type="ipo", beta=0.5)
    session = opened(small, tmp_path)
    run(session)
    manifest = run(session, "dpo")
    first = next(
        r["metrics"] for r in read_metrics(tmp_path) if (r["stage"], r["step"]) == ("dpo", 1)
    )
    assert first["loss"] == pytest.approx(1.0, rel=1e-5)  # (1/2β)²
    assert first["rewards/margins"] == pytest.approx(0.0, abs=1e-5)
    assert manifest.counts["steps"] == max(manifest.counts["pairs"] // 8, 1)
    assert manifest.cost.scored > 0
    assert bits(load_policy(session, "init")) != bits(load_policy(session, "dpo"))


def test_reference_logprobs_are_read_back_with_their_cost(small, tmp_path, opened):
    session = opened(small, tmp_path)
    run(session)
    pairs = read_preferences(tmp_path / "01-collect" / "preferences")
    settings = small.stages.dpo

    def score(some: list[Any]) -> tuple[np.ndarray, Cost]:
        examples = offline.batch(some, np.zeros((len(some), 2)))
        scorer = Scorer(session, RowShape(64, len(examples)))
        return offline.reference_logprobs(scorer, "dpo", settings, examples)

    values, cost = score(pairs)
    file = tmp_path / "02-dpo" / "reference.json"
    content = storage.read_json(file)
    storage.write_json(file, {**content, "logprobs": (values - 1).tolist()})  # to see it is read
    again, same_cost = score(pairs)
    np.testing.assert_array_equal(again, values - 1)
    assert (same_cost.scored, same_cost.flops) == (cost.scored, cost.flops) and cost.scored > 0
    np.testing.assert_allclose(score(pairs[1:])[0], values[1:], rtol=1e-5)  # other pairs


def test_fate_of_a_prompt():
    verdicts = {
        "+": Score(1.0, Verdict.CORRECT),
        "-": Score(0.0, Verdict.INCORRECT),
        "?": Score(None, Verdict.UNSCORABLE),
        "t": Score(0.0, Verdict.TIMEOUT),
    }
    nothing = Rollout(
        "p", 0, 0, *[np.zeros(1, np.int32)] * 2, *[np.zeros(1, np.float32)] * 2, "stop"
    )

    def fate(signs: str, *window: float) -> str:
        group = [ScoredRollout(nothing, "", verdicts[sign]) for sign in signs]
        return collect._fate(group, *(window or (0.0, 1.0)))

    assert fate("??") == "unscorable"
    assert fate("+?") == "all_correct"
    assert fate("--") == fate("-t") == fate("tt") == "all_incorrect"
    assert fate("+-?") == fate("+-t") == "mixed"
    assert fate("+---", 0.3, 0.7) == fate("+-tt", 0.3, 0.7) == "outside_window"
    assert fate("+-", 0.5, 0.5) == "mixed"
    assert fate("+tt") == "mixed"
