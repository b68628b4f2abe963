"""Settings as records: what is checked where one is made, and the way to and from a user's
ConfigDict."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Literal

import pytest

from g2d_jax import config as settings
from g2d_jax.config import STAGES, Config, check
from g2d_jax.config.places import walk
from g2d_jax.config.section import Bounds, Invalid, Issue, Section, editable, read
from g2d_jax.recipes.config_load import apply, resolve


class Inner(Section):
    rate: Annotated[float, Bounds(above=0, below=1)] = 0.5
    limit: Annotated[int, Bounds(least=1)] | None = None


class Outer(Section):
    kind: Literal["a", "b"] = "a"
    names: tuple[str, ...] = ()
    words: Mapping[str, str] = field(default_factory=dict)
    inner: Inner = Inner()


def test_a_record_becomes_editable_and_a_record_again():
    outer = Outer(names=("x",), words={"a": "b"}, inner=Inner(limit=3))
    assert read(Outer, editable(outer), []) == outer
    assert outer.to_dict() == {
        "kind": "a",
        "names": ("x",),
        "words": {"a": "b"},
        "inner": {"rate": 0.5, "limit": 3},
    }


def test_an_editable_field_keeps_its_type_and_an_optional_one_may_be_unset():
    changed = editable(Outer())
    assert changed.inner.limit is None
    changed.inner.limit = 4
    changed.inner.limit = None
    with pytest.raises(TypeError):
        changed.inner.limit = "4"
    with pytest.raises(TypeError):
        changed.kind = 3


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("kind", "c", "top.kind must be one of a, b, got 'c'"),
        ("inner.rate", 0.0, "top.inner.rate must be more than 0 and less than 1, got 0.0"),
        ("inner.rate", 1.0, "top.inner.rate must be more than 0 and less than 1, got 1.0"),
        ("inner.rate", float("nan"), "top.inner.rate must be more than 0 and less than 1, got nan"),
        ("inner.limit", 0, "top.inner.limit must be at least 1, got 0"),
    ],
)
def test_what_is_wrong_is_told_with_its_whole_path(field: str, value: object, message: str):
    changed = editable(Outer())
    changed.update_from_flattened_dict({field: value})
    found: list[Issue] = []
    assert read(Outer, changed, found, "top") == Outer()
    assert list(map(str, found)) == [message]


def test_a_record_made_in_python_is_checked_too_and_cannot_be_changed():
    with pytest.raises(Invalid, match=r"^rate must be more than 0"):
        Inner(rate=-1.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Inner().rate = 0.1


@pytest.mark.parametrize("kind", STAGES)
def test_every_kind_of_stage_has_settings_of_its_own_name(kind: str):
    stage = getattr(settings, kind)()
    assert read(STAGES[kind], stage, []) == STAGES[kind]()
    with pytest.raises(AttributeError):
        stage.no_such_field = 1


def test_a_config_tells_a_stage_by_its_kind():
    config = settings.base()
    config.stages.warmup = settings.online(steps=3)
    made = Config.of(config)
    assert made.stage("warmup", settings.Online).steps == 3
    with pytest.raises(TypeError, match=r"stages\.warmup is of kind online, not sft"):
        made.stage("warmup", settings.Sft)


@pytest.mark.parametrize("name", [*settings.STAGES, "sampling", "optimizer", "reward"])
def test_factories_tell_editors_the_fields(name: str) -> None:
    factory = getattr(settings, name)
    parameters = inspect.signature(factory).parameters
    made = factory(*{"sampling": (8,), "optimizer": (0.5,)}.get(name, ()))
    assert (
        set(parameters) == set(made)
        and next(iter(parameters.values())).default is not inspect.Parameter.empty
    )


def test_every_setting_that_may_name_a_file_is_found():
    config = settings.base()
    config.tasks.other = settings.task(
        settings.source("a"), settings.source(""), settings.source("c")
    )
    with config.unlocked():
        config.stages.sft = settings.sft()
        config.stages.online = settings.online()
        config.stages.collect = settings.collect()
        config.stages.dpo = settings.offline()
        config.stages.eval = settings.evaluate(policies=("init", "dpo"))
    found = {named.path: (named.place.kind, named.texts) for named in walk(config)}
    assert found == {
        named.path: (named.place.kind, named.texts) for named in walk(config.to_dict())
    }
    assert found["model.path"] == ("model", ())
    assert found["tasks.other.test.path"] == ("problems", ("c",))
    assert found["stages.eval.policies"] == ("policy", ("init", "dpo"))
    reward = {
        f"{prefix}reward.{name}"
        for prefix in ("", "tasks.other.")
        for name in ("folder", "model.path")
    }
    sources = {
        f"{prefix}.{split}.path"
        for prefix in ("data", "tasks.other")
        for split in ("train", "dev", "test")
    }
    stages = {f"stages.{name}.policy" for name in ("sft", "online", "collect", "dpo")} | {
        "stages.eval.policies"
    }
    stages |= {
        "stages.sft.data.path",
        "stages.online.dump.path",
        "stages.collect.dump.path",
        "stages.collect.rollouts",
        "stages.dpo.preferences",
    }
    single = {"model.path", "tokenizer.path", "engine.folder"}
    assert set(found) == reward | sources | stages | single


def test_a_rule_of_reading_is_a_known_one_and_of_a_reward_that_reads_answers() -> None:
    config = resolve("demo")
    apply(config, "reward.answers=last_line")
    assert Config.of(config).reward.answers == "last_line"
    for changes, why in (
        (["reward.answers=box"], "boxed"),
        (["reward.function=model"], "reads whole responses"),
    ):
        for change in changes:
            apply(config, change)
        with pytest.raises(ValueError, match=rf"reward.answers .*{why}"):
            check.checked(config)
        apply(config, "reward.answers=tags")


def test_bounds_are_told_as_they_are_written():
    assert str(Bounds(least=512, most=1 << 20)) == "at least 512 and at most 1,048,576"
    assert str(Bounds(above=0, most=0.95)) == "more than 0 and at most 0.95"
    assert str(Bounds(least=-1e12, most=1e12)) == "at least -1e+12 and at most 1e+12"


NO_MACHINE_HAS = {
    "reward.cpu_seconds": ("1e300", "0", "nan", "inf", "3601"),
    "reward.workers": ("0", "1025", "9" * 30),
    "reward.correct_above": ("nan", "inf", "-1e13"),
    "tasks.other.reward.workers": ("100000",),
    "engine.timeout": ("0", "1e12", "nan"),
    "engine.retries": ("-1", "101"),
    "engine.concurrency": ("0", "4097"),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name in NO_MACHINE_HAS for value in NO_MACHINE_HAS[name]]
)
def test_a_setting_that_no_machine_can_hold_is_refused_with_the_bound_and_why(
    name: str, value: str
) -> None:
    config = settings.base()
    config.tasks.other = settings.task(
        settings.source(""), settings.source(""), settings.source("")
    )
    apply(config, f"{name}={value}")
    with pytest.raises(
        Invalid,
        match=rf"^{name} must be (at least|more than) .* and at most [^:]*, got [^:]+: \w+,? ",
    ):
        Config.of(config)
