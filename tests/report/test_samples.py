"""The browser of completions: what is listed deserves it, it is sorted in a browser, and each
problem has a link."""

import dataclasses
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from reports import evaluation
from toys import QWEN, make_tokenizer

from g2d_jax.data.template import TemplateSettings
from g2d_jax.data.tokenizer import load_tokenizer
from g2d_jax.records import Score, Verdict
from g2d_jax.report.prompts import Prompts, prompts_of
from g2d_jax.report.runs import read_run
from g2d_jax.report.samples import (
    PROBLEMS,
    Listing,
    browser,
)
from g2d_jax.runtime.storage import write_json
from g2d_jax.runtime.tables import read_rollouts, write_preferences, write_rollouts

MANY = [f"{i:03}" for i in range(200)]


def listed(
    folder: Path, answers: Mapping[str, Mapping[str, Sequence]], name: str = "09-evaluate"
) -> Listing:
    """The list of an evaluation with these marks."""
    write_json(folder / "config.json", {"config": {"name": "made", "seed": 0, "stages": {}}})
    evaluation(folder / name, answers)
    (listing,) = browser(read_run(folder))
    return listing


def problems(listing: Listing) -> list[str]:
    """The problems in the list's order; `evaluation` calls each "ID = ?"."""
    return [row.prompt.removesuffix(" = ?") for row in listing.rows]


def test_what_changed_most_among_all_problems_is_listed_whatever_its_id(tmp_path: Path) -> None:
    before = {problem: [1, 0, 1, 0] for problem in MANY}
    between = {problem: [1, 1, 1, 1] for problem in MANY}  # it does not count
    after = {**before, "199": [0, 0, 0, 0], "150": [1, 1, 1, 1], "170": [1, 1, 1, 0]}
    # not known before or after, whatever is on the other side
    before["160"] = ["u", "u", "u", "u"]
    after["165"] = ["u", "u", "u", "u"]
    listing = listed(tmp_path, {"sft": before, "warmup": between, "dpo": after})
    # of two equal changes that of the lower id
    assert problems(listing) == ["150", "199", "170", *MANY[: PROBLEMS - 3]]
    assert [row.change for row in listing.rows[:4]] == [0.5, -0.5, 0.25, 0]
    assert listing.rule.startswith(
        "40 of 200 problems: first the largest changes from cold (sft) to G2D (dpo), then by id."
    )


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        ([1, 1, 0, 0], [1, "u", "u", 0], 0.0),  # what cannot be scored is left out
        (["t", 1], [1, 1], 0.5),
        (["u", "u"], [1, 1], math.nan),
    ],
)
def test_a_change_is_of_accuracies(
    tmp_path: Path, before: list, after: list, change: float
) -> None:
    (row,) = listed(tmp_path, {"sft": {"a": before}, "dpo": {"a": after}}).rows
    assert row.change == change or (math.isnan(row.change) and math.isnan(change))
    assert row.has_change is not math.isnan(change)


def test_of_one_policy_nothing_changed_and_of_few_problems_all_are_listed(tmp_path: Path) -> None:
    one = listed(tmp_path / "one", {"sft": {problem: [1, 0] for problem in MANY}})
    assert problems(one) == MANY[:PROBLEMS] and "changed" not in one.rule
    assert list(one.orders) == ["", "shortest", "longest"]
    two = listed(tmp_path / "two", {"sft": {"a": [1], "b": [0]}, "dpo": {"a": [0], "b": [0]}})
    assert problems(two) == ["a", "b"] and two.rule.startswith("2 of 2 problems. ")
    assert list(two.orders) == ["", "shortest", "longest", "changed", "lost", "gained"]


def test_rewards_that_are_no_verdicts_change_too(tmp_path: Path) -> None:
    marks = {"a": ["u", "u"], "b": ["u", "u"]}
    listed(tmp_path, {"sft": marks, "dpo": marks})
    rewards = {"sft": {"a": 1.0, "b": 2.0}, "dpo": {"a": 1.0, "b": -0.25}}
    for i, of_problem in enumerate(rewards.values()):
        file = tmp_path / f"09-evaluate/rollouts/{i}.parquet"
        rows = []
        for row in read_rollouts(file):
            reward = of_problem[row.rollout.problem_id]
            score = Score(reward, Verdict.SCORED, None)
            rows.append(dataclasses.replace(row, score=score))
        file.unlink()
        write_rollouts(file, rows)
    (listing,) = browser(read_run(tmp_path))
    assert [row.change for row in listing.rows] == [-2.25, 0.0]
    assert listing.rows[0].facts == "cold (sft) reward 2 · G2D (dpo) reward -0.25"


def test_a_collected_problem_without_a_pair_is_shown_too(own_run: Path) -> None:
    """Its prompt is in its tokens."""
    listing = browser(read_run(own_run))[1]
    prompts = {row.prompt for row in listing.rows}
    assert listing.title == "Rollouts, collect" and len(prompts) == 8
    shutil.rmtree(own_run / "03-collect/preferences")
    write_preferences(own_run / "03-collect/preferences/part-00000.parquet", [])
    listing = browser(read_run(own_run))[1]
    assert {row.prompt for row in listing.rows} == prompts
    assert all(re.fullmatch(r"[\d+*-]+=\?", prompt) for prompt in prompts)


@pytest.mark.parametrize(
    "settings",
    [{}, {"system": "Be brief."}, {"prompt_template": "paper"}, {"chat": False}],
)
def test_a_problem_is_read_from_the_tokens_of_its_prompt(tmp_path: Path, settings: dict) -> None:
    make_tokenizer(QWEN).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path), TemplateSettings(**settings))
    prompts = Prompts(tokenizer)
    for problem in ("What is\n{1+1}?  ", "<b>&", "é\u202e"):
        assert prompts(tokenizer.encode_prompt(problem).tolist()) == problem
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    if settings.get("chat") is not False:  # not one problem: all of it
        ids = tokenizer.encode_prompt((*turns, {"role": "user", "content": "c"})).tolist()
        assert re.search("a.*b.*c", prompts(ids), re.DOTALL)
    assert prompts([-1, 5]) == prompts([]) == Prompts(None)([5]) == ""


@pytest.mark.parametrize(
    "config",
    [
        {"model": {"path": "/nowhere/model"}},
        {"tokenizer": {"path": "/nowhere/tokenizer"}},
        {"tokenizer": {"prompt_template": 3}},
        {"tokenizer": []} | {"model": [1]},
    ],
)
def test_a_tokenizer_that_is_not_there(config: dict) -> None:
    prompts = prompts_of(config)
    assert prompts.fault.startswith("the tokenizer cannot be loaded: ") and prompts([5]) == ""
