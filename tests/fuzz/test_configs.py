"""Settings of any type and spelling: a checked config, or an error that names the field or the file."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from fuzz.hostile import NUMBERS, ODD, TEXTS, VALUES, accepted, as_json, changed, damaged, tries
from hypothesis import given
from hypothesis import strategies as st

from g2d_jax import config_io, config_load, pipeline, workdir
from g2d_jax.config import STAGES, Config

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("bounded_memory")]

KINDS = sorted(STAGES)
WHOLE = config_io.from_dict(
    {
        "stages": {kind: {"kind": kind} for kind in KINDS},
        "tasks": {"chat": {"weight": 0.5}},
        "data": {"train": {"fields": {"answer": "ground_truth"}}},
        "sweep": {"arms": {"one": {"product": ["seed=0,1"]}}},
    }
)
VALUES_OF_WHOLE = config_io.to_dict(WHOLE)
PATHS = sorted(config_io._paths(WHOLE))


@given(changed(VALUES_OF_WHOLE))
@tries(150)
def test_dictionaries(values: Any) -> None:
    made = accepted(lambda: config_io.from_dict(values), "")
    if made is not None:
        assert config_io.to_dict(
            config_io.from_dict(json.loads(as_json(config_io.to_dict(made))))
        ) == config_io.to_dict(made)
        assert config_io.differences(made, config_io.to_dict(made)) == []


@given(st.sampled_from(PATHS).flatmap(lambda path: st.tuples(st.just(path), VALUES)))
@tries(150)
def test_one_field_of_any_value(change: tuple[str, Any]) -> None:
    path, value = change
    values = json.loads(json.dumps(VALUES_OF_WHOLE))
    *parents, key = path.split(".")
    section = values
    for name in parents:
        section = section[name]
    section[key] = value
    made = accepted(lambda: config_io.from_dict(values), path.split(".")[0])
    if made is not None:
        accepted(lambda: pipeline.check(Config.of(made)), "")


SPELLINGS = (
    NUMBERS.map(repr)
    | TEXTS
    | VALUES.map(str)
    | st.sampled_from(
        [
            "None",
            "null",
            "TRUE",
            "yes",
            "1e999",
            "-inf",
            "nan",
            "0x10",
            "1_000",
            "٣",
            "²",
            "(1,",
            "[,]",
            "((((",
            "()",
            "' ",
        ]
    )
    | st.sampled_from(["(" * 10_000, "-" * 100_000 + "1", "9" * 5000, "[" * 300 + "]" * 300, "1," * 5000, "1\x00"])
)


@given(
    st.sampled_from([*PATHS, *(f"config.{path}" for path in PATHS), "data.train.fields.items", "stages.x.y"]), SPELLINGS
)
@tries(200)
def test_overrides(path: str, text: str) -> None:
    made = config_io.from_dict(VALUES_OF_WHOLE)
    field = path.removeprefix("config.")
    if accepted(lambda: config_load.apply(made, f"{path}={text}") or made, field) is not None:
        assert config_io.to_dict(config_io.from_dict(config_io.to_dict(made))) == config_io.to_dict(made)
        accepted(lambda: pipeline.check(Config.of(made)), "")


NAMES = st.sampled_from(["items", "keys", "update", "lock", "a.b", "", "__class__", "_fields", "answer"]) | TEXTS


@given(NAMES, TEXTS)
@tries(100)
def test_mapped_fields_of_any_name(name: str, text: str) -> None:
    made = config_io.from_dict({})
    accepted(lambda: config_load.apply(made, f"data.train.fields.{name}={text}"), "fields")
    accepted(lambda: config_io.from_dict({"data": {"train": {"fields": {name: text}}}}), "fields")


@given(NAMES, st.sampled_from(["stages", "tasks", "arms"]))
@tries(100)
def test_sections_of_any_name(name: str, where: str) -> None:
    values = {
        "stages": {"stages": {name: {"kind": "sft"}}},
        "tasks": {"tasks": {name: {"weight": 1.0}}},
        "arms": {"sweep": {"arms": {name: {}}}},
    }[where]
    made = accepted(lambda: config_io.from_dict(values), where)
    if made is not None:
        assert config_io.to_dict(config_io.from_dict(config_io.to_dict(made))) == config_io.to_dict(made)


@given(
    TEXTS
    | st.sampled_from(["demo:", "demo:=", "demo:preset", "demo:preset=", "x.py", "demo:seed=1e9", "/", "a.py:b.py"])
)
@tries(100)
def test_names_of_configs(spec: str) -> None:
    accepted(lambda: config_load.locate(spec), "")
    accepted(
        lambda: config_load.choices(spec.partition(":")[2], preset=("full", "smoke"), seed=0, rate=0.1, on=True), ""
    )


@given(st.data())
@tries(80)
def test_config_json_of_a_run(folder: Path, data: st.DataObject) -> None:
    """A work directory whose config.json is damaged is refused, and left as it is."""
    path = folder / "config.json"
    good = {"config": config_io.to_dict(config_io.from_dict({"stages": {"sft": {"kind": "sft"}}})), "own": {}}
    path.write_bytes(
        data.draw(
            damaged(as_json(good))
            | changed(good["config"]).map(lambda c: as_json({**good, "config": c}))
            | st.sampled_from(ODD[4:])
        )
    )
    before = path.read_bytes()
    (folder / "01-sft").mkdir(exist_ok=True)
    mine = config_io.from_dict({"stages": {"sft": {"kind": "sft", "steps": 12345}}})
    assert accepted(lambda: workdir.claim(Config.of(mine), folder) or True, folder.name) is None
    assert path.read_bytes() == before


def test_numbers_that_no_float_holds() -> None:
    with pytest.raises(ValueError, match=r"stages\.sft\.optimizer\.learning_rate must be a number"):
        config_io.from_dict({"stages": {"sft": {"kind": "sft", "optimizer": {"learning_rate": 10**400}}}})
    made = config_io.from_dict({"faults": {"hang_timeout": "Infinity"}})
    assert math.isinf(made.faults.hang_timeout)
