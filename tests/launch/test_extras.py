"""The extras named in launch/ are those that the shipped configs, and the places that a launcher
names, ask for."""

import importlib
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from ml_collections import ConfigDict
from stand import LAUNCH, ROOT

from g2d_jax.config import Config
from g2d_jax.data import problems
from g2d_jax.recipes.config_load import resolve, shipped
from g2d_jax.runtime import failures, storage
from g2d_jax.stages import run_issues, run_stages

# fsspec.registry itself is a view of what is in it
registry = importlib.import_module("fsspec.registry")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# '.[tpu,hub]', ${G2D_EXTRAS:-tpu,hub}
NAMED = re.compile(r"(?:(?:\.|g2d-jax)\[|G2D_EXTRAS:-)([a-z0-9,]+)[\]}]")


@pytest.fixture
def without_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every package that only an extra brings one that is not installed."""
    brought: set[str] = set()
    for extra, lines in PROJECT["optional-dependencies"].items():
        if extra not in ("test", "docs"):
            brought |= {name(line) for line in lines}
    always = {name(line) for line in PROJECT["dependencies"]}
    for package in brought - always:
        monkeypatch.setitem(sys.modules, package, None)
    for scheme in ("gs", "s3"):  # what was opened before is remembered
        monkeypatch.delitem(registry._registry, scheme, raising=False)


def name(requirement: str) -> str:
    return re.split(r"[\[<>=~; ]", requirement)[0]


def asked(action: Callable[[], Any]) -> set[str]:
    """The extra that an action stops for, none if it does not."""
    try:
        action()
    except ImportError as error:
        return {
            extra
            for extra in PROJECT["optional-dependencies"]
            if failures.install_command(extra) in str(error)
        }
    return set()


def sources(section: Any) -> Iterator[str]:
    """The problems that a config names, wherever in it."""
    if not isinstance(section, ConfigDict):
        return
    if {"on_error", "path"} <= set(section) and section.path:
        yield section.path
    for value in section.values():
        yield from sources(value)


def read(path: str) -> None:
    if not path.startswith("procedural:"):
        next(iter(problems.open_rows(path)[1]))


def needed() -> set[str]:
    """The extras of the shipped configs, and of the suites that recipes choose from."""
    found: set[str] = set()
    paths = set(problems.NAMED)
    for config in map(resolve, shipped()):
        paths |= set(sources(config))
        for check in (run_issues.checked, run_stages.require_packages):
            found |= asked(partial(check, Config.of(config)))
    for path in paths:
        found |= asked(partial(read, path))
    return found


@pytest.mark.usefixtures("prepared")
def test_what_is_named_covers_what_recipes_import(without_extras: None) -> None:
    recipes = needed()
    assert recipes  # of models on the hub, with problems from there
    for file in LAUNCH.iterdir():
        text = file.read_text()
        stores: set[str] = set()
        for url in {f"{scheme}://bucket" for scheme in ("gs", "s3") if f"{scheme}://" in text}:
            stores |= asked(partial(storage.check_driver, url))
        for named in NAMED.findall(text):
            offered = set(named.split(","))
            assert offered <= set(PROJECT["optional-dependencies"]), (file.name, named)
            assert recipes | stores <= offered, (file.name, named, recipes | stores)


def test_every_launcher_that_installs_or_asks_for_it_names_extras() -> None:
    named = {file.name for file in LAUNCH.iterdir() if NAMED.search(file.read_text())}
    assert named == {
        "Dockerfile.cuda", "Dockerfile.tpu", "skypilot.yaml", "slurm.sbatch", "tpu-queued-resource.sh",
        "workstation.sh",
    }  # fmt: skip
