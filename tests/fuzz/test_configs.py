"""Settings of any type and spelling: a checked config, or an error that names the field or the
file."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from fuzz.hostile import (
    NAMES,
    NUMBERS,
    ODD,
    TEXTS,
    VALUES,
    accepted,
    as_json,
    changed,
    damaged,
    tries,
)
from hypothesis import given
from hypothesis import strategies as st

from g2d_jax.config import STAGES, Config
from g2d_jax.config import io as config_io
from g2d_jax.recipes import config_load
from g2d_jax.session import workdir
from g2d_jax.stages import run_issues

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
PATHS = sorted(config_io.paths(WHOLE))


@given(changed(VALUES_OF_WHOLE))
@tries(150)
def test_dictionaries(values: Any) -> None:
    config = accepted(lambda: config_io.from_dict(values), "")
    if config is not None:
        written = config_io.to_dict(config)
        assert config_io.to_dict(config_io.from_dict(json.loads(as_json(written)))) == written
        assert config_io.differences(config_io.identity(config), config_io.identity(written)) == []


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
    config = accepted(lambda: config_io.from_dict(values), path.split(".")[0])
    if config is not None:
        accepted(lambda: run_issues.checked(config), "")


WORDS = "None null TRUE yes 1e999 -inf nan 0x10 1_000 ٣ ² (1, [,] (((( ()"
SPELLINGS = (
    NUMBERS.map(repr)
    | TEXTS
    | VALUES.map(str)
    | st.sampled_from([*WORDS.split(), "' "])
    | st.sampled_from(
        ["(" * 10_000, "-" * 100_000 + "1", "9" * 5000, "[" * 300 + "]" * 300, "1," * 5000, "1\x00"]
    )
)


@given(
    st.sampled_from(
        [*PATHS, *(f"config.{path}" for path in PATHS), "data.train.fields.items", "stages.x.y"]
    ),
    SPELLINGS,
)
@tries(200)
def test_overrides(path: str, text: str) -> None:
    config = config_io.from_dict(VALUES_OF_WHOLE)
    field = path.removeprefix("config.")
    if accepted(lambda: config_load.apply(config, f"{path}={text}") or config, field) is not None:
        assert config_io.to_dict(
            config_io.from_dict(config_io.to_dict(config))
        ) == config_io.to_dict(config)
        accepted(lambda: run_issues.checked(config), "")


@given(NAMES, TEXTS)
@tries(100)
def test_mapped_fields_of_any_name(name: str, text: str) -> None:
    config = config_io.from_dict({})
    accepted(lambda: config_load.apply(config, f"data.train.fields.{name}={text}"), "fields")


SPECS = "demo: demo:= demo:preset demo:preset= x.py demo:seed=1e9 / a.py:b.py"


@given(TEXTS | st.sampled_from(SPECS.split()))
@tries(100)
def test_names_of_configs(spec: str) -> None:
    accepted(lambda: config_load.locate(spec), "")
    choices = {"preset": ("full", "smoke"), "seed": 0, "rate": 0.1, "on": True}
    accepted(lambda: config_load.choices(spec.partition(":")[2], **choices), "")


@given(st.data())
@tries(80)
def test_config_json_of_a_run(folder: Path, data: st.DataObject) -> None:
    """A work directory whose config.json is damaged is refused, and left as it is."""
    path = folder / "config.json"
    good = {
        "config": config_io.to_dict(config_io.from_dict({"stages": {"sft": {"kind": "sft"}}})),
        "own": {},
    }
    odd = changed(good["config"]).map(
        lambda config: as_json({**good, "config": config})
    ) | st.sampled_from(ODD[4:])
    path.write_bytes(data.draw(damaged(as_json(good)) | odd))
    before = path.read_bytes()
    (folder / "01-sft").mkdir(exist_ok=True)
    mine = config_io.from_dict({"stages": {"sft": {"kind": "sft", "steps": 12345}}})
    assert accepted(lambda: workdir.claim(Config.of(mine), folder) or True, folder.name) is None
    assert path.read_bytes() == before


def test_numbers_that_no_float_holds() -> None:
    with pytest.raises(ValueError, match=r"stages\.sft\.optimizer\.learning_rate must be a number"):
        config_io.from_dict(
            {"stages": {"sft": {"kind": "sft", "optimizer": {"learning_rate": 10**400}}}}
        )
    config = config_io.from_dict({"faults": {"hang_timeout": "Infinity"}})
    assert math.isinf(config.faults.hang_timeout)
