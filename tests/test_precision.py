"""The precision of products: set for a run in float32, kept in its files, and the user's before all."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from etils import epath

from g2d_jax import commands
from g2d_jax import config as settings
from g2d_jax.config import Config
from g2d_jax.models import reward_model
from g2d_jax.plan.planning import Compiler, planned
from g2d_jax.plan.programs import programs_of
from g2d_jax.plan.topologies import topology
from g2d_jax.recipes.config_load import resolve
from g2d_jax.runtime import precision, storage
from g2d_jax.runtime.mesh import abstract_rows, make_mesh
from g2d_jax.scoring.batches import make_program
from g2d_jax.session import init_params
from g2d_jax.session.workdir import require_same_run
from g2d_jax.sweep.graph import build
from g2d_jax.sweep.points import points

TINY = str(Path(__file__).parent / "tiny.py")


@pytest.fixture(autouse=True)
def nothing_set() -> Iterator[None]:
    before = getattr(jax.config, precision.NAME)
    jax.config.update(precision.NAME, None)
    yield
    jax.config.update(precision.NAME, before)


def precisions(text: str) -> set[tuple[str, str]]:
    """Those of the products of a lowered program."""
    return set(re.findall(r"precision = \[(\w+), (\w+)\]", text))


@pytest.mark.parametrize(
    ("dtype", "users", "chosen", "lowered"),
    [
        ("float32", None, "float32", "HIGHEST"),
        ("float32", "tensorfloat32", "tensorfloat32", "HIGH"),
    ],
)
def test_a_train_step_multiplies_as_its_run(
    dtype: str, users: str | None, chosen: str, lowered: str
) -> None:
    """In another thread, as what is compiled ahead, and inside a session of the other dtype."""
    jax.config.update(precision.NAME, users)
    compiler = Compiler(topology("v5e-1"), devices=jax.devices()[:1])
    config = Config.of(resolve(TINY, [f"config.dtype={dtype}"]))
    with precision.used("bfloat16"), planned(config, compiler) as session:
        assert precision.of(dtype) == chosen
        step = next(one for one in programs_of(session, "sft") if one.name == "train step")
        with ThreadPoolExecutor() as threads:
            text = threads.submit(step.lower).result().as_text()
    assert precisions(text) == {(lowered, lowered)}
    assert getattr(jax.config, precision.NAME) == users


def test_a_reward_model_multiplies_by_its_own_dtype() -> None:
    """Whatever its run does: TPUs compile no kernel that multiplies bfloat16 in float32."""
    mesh, own = make_mesh(1, 1, 1, devices=jax.devices()[:1]), jnp.dtype("bfloat16")
    shape = init_params.shape(Config.of(resolve(TINY)).model, 64, {})
    model = reward_model.abstract_on(shape, mesh, own)
    rows, lengths = abstract_rows(mesh, (1, 64)), abstract_rows(mesh, (1,))
    with precision.used("float32"):
        text = make_program(mesh, own).lower(model, rows, lengths).as_text()
    assert precisions(text) == {("DEFAULT", "DEFAULT")}


def test_a_run_keeps_its_precision_and_goes_on_in_no_other(finished: Path, tmp_path: Path) -> None:
    work = epath.Path(shutil.copytree(finished, tmp_path / "work"))
    assert storage.read_json(work / "config.json")[precision.NAME] == "float32"
    config = commands.read_config(work)
    require_same_run(config, work)
    with commands.opened(work):
        assert getattr(jax.config, precision.NAME) == "float32"
    assert getattr(jax.config, precision.NAME) is None
    jax.config.update(precision.NAME, "tensorfloat32")
    with pytest.raises(ValueError, match=f"{precision.NAME}: 'float32' -> 'tensorfloat32'"):
        require_same_run(config, work)


def test_a_study_takes_no_stage_of_another_precision() -> None:
    config = resolve(TINY)
    with config.unlocked():
        config.sweep = settings.sweep()
    ours = build(points(config)).nodes.keys()
    jax.config.update(precision.NAME, "tensorfloat32")
    assert ours.isdisjoint(build(points(config)).nodes)
