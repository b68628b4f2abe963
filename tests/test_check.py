"""All that is wrong with the settings of a run is one list: each mistake once, where it is, with
what to do."""

from __future__ import annotations

import ast
import itertools
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from ml_collections import ConfigDict

from g2d_jax.config import Config, Invalid, Issue, Section, check
from g2d_jax.config.section import Hint
from g2d_jax.recipes.config_load import resolve

BASE = resolve("demo")


def leaves(section: Section, at: str = "") -> Iterator[tuple[str, Hint]]:
    """Every setting of the demo with its dotted path."""
    for name, hint in section.hints().items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from leaves(value, f"{at}{name}.")
        elif name == "stages":
            for key, stage in value.items():
                yield from leaves(stage, f"{at}stages.{key}.")
        elif name not in ("kind", "tasks"):
            yield f"{at}{name}", hint


LEAVES = dict(leaves(Config.of(BASE)))
WRONG_TYPE = {int: "ten", float: "high", bool: "perhaps"}


def out_of_bounds(hint: Hint) -> list[Any]:
    """Values of the right type that the setting cannot have; [] where all are allowed."""
    if hint.choices:
        return ["no-such-choice"]
    if hint.kind in (int, float):
        tried: list[Any] = [hint.kind(value) for value in (-(10**15), 10**15, 0)]
        return [value for value in tried if hint.fault(value)][:1]
    return []


def literal(text: str) -> Any:
    """A number, or the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def errors(config: ConfigDict) -> list[str]:
    return [str(issue) for issue in check.issues(config)[1] if issue.level == "error"]


def mutated(path: str, value: Any) -> ConfigDict:
    config = resolve("demo")
    config.update_from_flattened_dict({path: value})
    return config


BOUNDED = [(path, value) for path, hint in LEAVES.items() for value in out_of_bounds(hint)]


@pytest.mark.parametrize(("path", "value"), BOUNDED, ids=[path for path, _ in BOUNDED])
def test_a_value_out_of_bounds_is_one_error_with_its_path(path: str, value: Any) -> None:
    (found,) = errors(mutated(path, value))
    assert found.startswith(f"{path} must be ") and f"got {value}" in found.replace("'", "")


@pytest.mark.parametrize("path", [p for p, hint in LEAVES.items() if hint.kind in WRONG_TYPE])
def test_a_value_of_another_type_is_one_error_with_its_path(path: str) -> None:
    with pytest.raises(Invalid) as caught:
        resolve("demo", [f"{path}={WRONG_TYPE[LEAVES[path].kind]}"])
    assert str(caught.value).startswith(f"{path} must be ")
    assert len(caught.value.issues) == 1


MISTAKES = {
    "stages.warmup.num_generations=1": "stages.warmup.num_generations",
    "stages.warmup.sampling.temperature=0.0": "stages.warmup.sampling.temperature",
    "stages.warmup.sampling.top_p=0.9": "stages.warmup.sampling.top_p",
    "stages.warmup.grpo_coef=0.5": "stages.warmup.grpo_coef",
    "stages.warmup.steps=ten": "stages.warmup.steps",
    "stages.dpo.policy=warmp": "stages.dpo",
    "stages.dpo.beta=-0.1": "stages.dpo.beta",
    "stages.collect.select=uncertain": "stages.collect.select",
    "stages.sft.optimizer.min_lr_ratio=2.0": "stages.sft.optimizer.min_lr_ratio",
    "stages.evaluate.pass_at=99": "stages.evaluate.pass_at",
    "lora.quantise=int8": "lora.quantise",
    "engine.url=http://host/v1": "engine.url",
    "reward.function=model": "reward.model.path",
    "compute.attention=cudnn": "compute.attention",
    "logging.profile=warmup": "logging.profile",
    "data.test.path=": "data.test.path",
    "dtype=bf16": "dtype",
}
PAIRS = random.Random(0).sample(list(itertools.combinations(MISTAKES, 2)), 60)
FOLLOWS = ("compute.attention=cudnn", "dtype=bf16")  # nothing is known of the dtype that was meant


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair != FOLLOWS], ids=" ".join)
def test_two_mistakes_are_reported_at_once(pair: tuple[str, str]) -> None:
    found: list[Issue] = []
    config = resolve("demo", pair, found)
    found += check.issues(config)[1]
    shown = [str(issue) for issue in found if issue.level == "error"]
    for mistake in pair:
        assert [text for text in shown if text.startswith(MISTAKES[mistake])], shown
    assert len(shown) == 2


@pytest.mark.parametrize(
    ("overrides", "warned"),
    [
        (["stages.warmup.optimizer.learning_rate=0.0"], "warmup.optimizer.learning_rate is 0"),
        (["stages.sft.optimizer.learning_rate=1e3"], "sft.optimizer.learning_rate is 1000"),
        (["stages.dpo.optimizer.learning_rate=5e-3"], ""),
        (["stages.warmup.keep=5,40000"], "warmup.keep has 40000"),
        (["stages.warmup.sync_every=10", "stages.warmup.steps=10"], "warmup.sync_every is 10"),
        (["stages.warmup.sync_every=0"], ""),
        (
            [
                "stages.warmup.budget.amount=1e12",
                "stages.warmup.optimizer.schedule=cosine",
            ],
            "warmup.optimizer.schedule is 'cosine'",
        ),
        (["stages.dpo.loss_type=simpo", "stages.dpo.beta=0.1"], "dpo.beta is 0.1"),
        (["stages.dpo.loss_type=simpo", "stages.dpo.beta=2.0"], ""),
        (["reward.correct_above=0.9"], "reward.correct_above is set, but the verifier"),
        (["stages.warmup.budget.measure=seconds"], "warmup.budget.measure is set, but budget.amou"),
        (["stages.warmup.scale_rewards_eps=1e-6"], "scale_rewards_eps is set, but scale_rewards="),
        (["stages.evaluate.sampling.temperature=0.0", "stages.evaluate.pass_at=1"], "same: one is"),
    ],
)
def test_settings_that_hardly_anyone_wants_are_warned_of(overrides: list[str], warned: str) -> None:
    _, found = check.issues(resolve("demo", ["stages.warmup.keep=", *overrides]))
    assert {issue.level for issue in found} <= {"warning"}
    assert len(found) == bool(warned)
    assert all(warned in str(issue) for issue in found)


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("stages.warmup.optimizer.min_lr_ratio=0.2", "the learning rate is constant: set schedule"),
        ("stages.sft.optimizer.kind=adafactor", ""),
        ("stages.warmup.reference_sync=yes", "the loss has no reference"),
        ("stages.warmup.filter.drop_solved=2", ""),
        ("stages.evaluate.policies=", "is empty"),
        ("stages.evaluate.policies=init,init", "names a policy twice"),
        ("lora.alpha=8.0", "lora.rank is 0"),
        ("engine.sync=folder", "kind is 'sampler'"),
    ],
)
def test_what_does_not_go_together_is_named_with_a_remedy(override: str, found: str) -> None:
    shown = errors(resolve("demo", [override]))
    assert len(shown) == bool(found)
    assert all(text.startswith(override.partition("=")[0]) and found in text for text in shown)


def test_a_function_or_a_list_of_them_in_a_config_is_text() -> None:
    config = resolve("demo")
    config.reward.functions = (len,)
    config.reward.weights = (1.0,)
    assert errors(config)[0].startswith("reward.functions must hold texts")
    typed = resolve("demo", ["reward.functions=my_rewards:short,my_rewards:tidy"])
    assert typed.reward.functions == ("my_rewards:short", "my_rewards:tidy")


def test_a_reward_model_with_further_functions_still_knows_no_right_and_wrong() -> None:
    config = resolve("demo", ["reward.function=model", "reward.model.path=org/model"])
    config.reward.update(functions=("a:b",), weights=(1.0,), verifiable=True)
    (found,) = errors(config)
    assert found.startswith("reward.verifiable is True")


@pytest.mark.parametrize(
    ("text", "warned"),
    [
        (r"Q: {problem}\nA:", True),
        (r"{problem}\n\nanswer:", True),
        ("{problem}\nA:", False),
        (r"{problem} with $a \neq 0$, $\nabla f$, $\nu$, $x \not\in A$", False),
    ],
)
def test_line_breaks_that_a_shell_handed_over_as_two_characters_are_warned_of(
    text: str, warned: bool
) -> None:
    _, found = check.issues(resolve("demo", [f"tokenizer.prompt_template={text}"]))
    assert [issue.path for issue in found] == ["tokenizer.prompt_template"] * warned


def test_a_name_that_is_mistyped_is_one_error() -> None:
    config = resolve("demo")
    with config.stages.unlocked():
        config.stages.warmpu = config.stages.warmup
        del config.stages["warmup"]
    found = errors(config)
    assert {text.split()[0] for text in found} == {
        "stages.collect.policy",
        "stages.dpo.policy",
        "stages.evaluate.policies",
    }
    assert all("there are: init" in text for text in found)


@pytest.mark.parametrize(
    "overrides",
    [
        ["stages.warmup.steps=-5", "logging.profile=warmup:3-50"],
        ["dtype=bf16", "compute.attention=cudnn"],
        ["lora.rank=-1", "lora.quantise=int8"],
        ["stages.warmup.loss=dop", "stages.warmup.beta=0.1"],
        ["reward.functions=(1,)", "reward.weights=(1.0,)"],
    ],
)
def test_what_follows_from_a_wrong_value_is_not_reported(overrides: list[str]) -> None:
    config = resolve("demo")
    for override in overrides:
        path, _, text = override.partition("=")
        config.update_from_flattened_dict({path: literal(text)})
    assert len(errors(config)) == 1


def test_the_list_needs_no_jax_and_no_network() -> None:
    code = """
import socket, sys
socket.socket.connect = None
from g2d_jax.config import check
from g2d_jax.recipes.config_load import resolve
print(len(check.issues(resolve("demo", ["engine.kind=server", "lora.base_dtype=bfloat16"]))[1]))
assert not {"jax", "transformers", "torch"} & {*sys.modules}
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) >= 2
