"""Settings of older versions: refused where they would run, with what to use now, and left out of
what ran already."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
from chat_templates import WITHOUT_HEADER
from etils import epath
from toys import make_tokenizer

from g2d_jax import commands, pipeline
from g2d_jax import config as settings
from g2d_jax.config import Config
from g2d_jax.config import io as config_io
from g2d_jax.config.gone import GONE, Gone, find
from g2d_jax.config_load import resolve
from g2d_jax.report.read import read_comparison
from g2d_jax.runtime import storage
from g2d_jax.session.extra_state import ExtraState
from g2d_jax.workdir import require_same_run, stages_to_extend

ROOT = Path(__file__).resolve().parents[1]
TINY = str(Path(__file__).parent / "tiny.py")
USED: dict[str, Any] = {
    "stages.warmup.stop": "adaptive",
    "stages.warmup.adaptive.min_steps": 30,
    "stages.dpo.loss": "kto",
    "stages.dpo.desirable_weight": 1.5,
    "stages.dpo.undesirable_weight": 0.5,
    "stages.dpo.signal_pairs": 8,
    "stages.collect.reward_column": "accuracy",
    "engine.sync": "weights",
    "compute.flags": "overlap",
}
"""Settings that are gone, in stages of tiny.py, with a value that a run went by; some of every
entry of GONE."""
UNUSED: dict[str, Any] = {
    "stages.warmup.stop": "steps",
    "stages.warmup.adaptive.min_steps": 20,
    "stages.warmup.adaptive.shift": 0.5,
    "stages.dpo.loss": "dpo",
    "stages.dpo.desirable_weight": 1.0,
    "stages.dpo.undesirable_weight": 1,
    "stages.dpo.signal_pairs": 256,
    "stages.collect.reward_column": None,
    "engine.sync": "none",
    "compute.flags": "none",
}
"""Values that older versions wrote into config.json where nothing was set."""


def entry(path: str) -> Gone:
    """The entry of GONE for a path of `USED`: it, or a section on the way to it."""
    names = path.split(".")
    found = [find(".".join(names[:depth])) for depth in range(1, len(names) + 1)]
    return next(gone for gone in found if gone is not None)


def old(changes: dict[str, Any]) -> dict[str, Any]:
    """The values of tiny.py with these settings of an older version."""
    values = config_io.to_dict(resolve(TINY))
    for path, value in changes.items():
        *parents, key = path.split(".")
        section = values
        for name in parents:
            section = section.setdefault(name, {})
        section[key] = value
    return values


def test_every_entry_has_an_example_here() -> None:
    assert {entry(path).path for path in USED} == {gone.path for gone in GONE}


@pytest.mark.parametrize("path", USED)
def test_a_setting_that_is_gone_is_refused_with_what_to_use(path: str) -> None:
    instead = entry(path).instead
    with pytest.raises(ValueError) as error:
        config_io.from_dict(old({path: USED[path]}))
    assert str(error.value).startswith(entry(path).path.split("*")[0]) and instead in str(
        error.value
    )
    with pytest.raises(ValueError) as error:
        resolve(TINY, [f"config.{path}={USED[path]}"])
    assert path in str(error.value) and instead in str(error.value)


@pytest.mark.parametrize(
    "path", [path for path in USED if path.startswith("stages.") and path.count(".") == 2]
)
def test_python_that_names_it_is_refused_too(path: str, tmp_path: Path) -> None:
    stage, field = path.split(".")[1:]
    value, instead = USED[path], entry(path).instead
    make = getattr(settings, resolve(TINY).stages[stage].kind)
    with pytest.raises(ValueError) as error:
        make(**{field: value})
    assert instead in str(error.value)
    file = tmp_path / "mine.py"
    file.write_text(
        f"import tiny\ndef get_config(arg=''):\n    config = tiny.get_config()\n"
        f"    config.stages.{stage}.{field} = {value!r}\n    return config\n"
    )
    with pytest.raises(ValueError) as error:
        resolve(str(file))
    if not entry(path).common:  # an assignment knows only the last name of the field
        assert instead in str(error.value)
    config = resolve(TINY)
    if field in config.stages[stage]:
        config.stages[stage][field] = value
        with pytest.raises(ValueError) as error:
            Config.of(config)
        assert instead in str(error.value)


@pytest.mark.parametrize("field", ["loss", "stop", "sync", "flags"])
def test_a_section_that_never_had_the_field_is_told_nothing_of_it(
    field: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        f"import tiny\ndef get_config(arg=''):\n    config = tiny.get_config()\n"
        f"    config.stages.sft.{field} = 'x'\n    return config\n"
    )
    with pytest.raises(ValueError, match=f'unknown field "{field}"') as error:
        resolve(str(file))
    assert not any(gone.instead in str(error.value) for gone in GONE)


def test_values_that_decided_nothing_are_left_out() -> None:
    assert config_io.from_dict(old(UNUSED)) == resolve(TINY)
    assert resolve(TINY, [f"{path}={value}" for path, value in UNUSED.items()]) == resolve(TINY)
    for path, value in UNUSED.items():
        names = path.split(".")
        if names[0] == "stages" and len(names) == 3:
            make = getattr(settings, resolve(TINY).stages[names[1]].kind)
            assert make(**{names[2]: value}) == make()


def test_a_run_that_used_them_is_read_and_exported_but_not_continued(tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "01-sft").mkdir(parents=True)
    storage.write_json(work / "config.json", {"config": old(USED), "own": {}, "version": "0"})
    read = commands.read_config(work)
    assert set(read.stages) == set(resolve(TINY).stages)
    commands.export(work, tmp_path / "model", policy="init")
    assert (tmp_path / "model" / "model.safetensors").exists()
    with pytest.raises(
        ValueError, match=r"does not hold this version's settings: .* is gone: .* another --workdir"
    ):
        pipeline.run(resolve(TINY), work)


@pytest.mark.parametrize("path", [path for path in USED if not entry(path).decides])
def test_a_run_begun_with_what_decided_no_result_goes_on_without_it(
    path: str, tmp_path: Path
) -> None:
    work = epath.Path(tmp_path / "work")
    (work / "01-sft").mkdir(parents=True)
    storage.write_json(
        work / "config.json", {"config": old({path: USED[path]}), "own": {}, "version": "0"}
    )
    require_same_run(Config.of(resolve(TINY)), work)
    assert stages_to_extend(Config.of(resolve(TINY)), work) == []
    with pytest.raises(ValueError, match="was started with other settings"):
        require_same_run(Config.of(resolve(TINY, ["stages.dpo.beta=0.7"])), work)


def test_a_run_of_a_template_that_none_would_begin_with_is_exported_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tokenizer(WITHOUT_HEADER["ChatML"][0]).save_pretrained(tmp_path / "tokenizer")
    config = resolve(TINY, [f"tokenizer.path={tmp_path / 'tokenizer'}"])
    work = tmp_path / "work"
    (work / "01-sft").mkdir(parents=True)
    storage.write_json(
        work / "config.json", {"config": config_io.to_dict(config), "own": {}, "version": "0"}
    )
    commands.export(work, tmp_path / "model", policy="init")
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert (
        capsys.readouterr().out.count("WARNING: the run's tokenizer: the chat template ignores")
        == 1
    )
    with pytest.raises(ValueError, match="the chat template ignores add_generation_prompt"):
        pipeline.run(config, tmp_path / "another")


def test_the_numbers_of_a_stage_resume_from_a_checkpoint_with_fields_that_are_gone() -> None:
    state = ExtraState(rewards=[0.5], ended={"rule": "budget"})
    older = {**state.to_json(), "prospects": [{"step": 0}], "forecasts": []}
    assert ExtraState.from_json(older).to_json() == state.to_json()


@pytest.mark.parametrize(
    "archive",
    sorted((ROOT / "benchmarks" / "results").glob("*.tar.xz")),
    ids=lambda file: file.name,
)
def test_packed_results_of_older_versions_are_read(archive: Path, tmp_path: Path) -> None:
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    studies = sorted(tmp_path.glob("points/*"))
    assert studies
    for study in studies:
        points = sorted(file.parent for file in study.glob("*/config.json"))
        # of two archives one is "adaptive"
        by_arm = {point.name.partition(",")[0]: point for point in points}
        for point in by_arm.values():
            assert commands.read_config(epath.Path(point)).stages
        # The points of one study are judged on the same problems, those of two need not be.
        comparison = read_comparison([points[0], points[-1]])
        assert len(comparison.problems) >= 96
        assert all(0 < row.accuracy.mean < 1 for row in comparison.last)
