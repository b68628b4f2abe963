"""Stages in this process, on one device, each from the policies of runs made here."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import pytest
from etils import epath
from forks import Forks
from ml_collections import ConfigDict

from g2d_jax.config import Config, graph
from g2d_jax.recipes.config_load import resolve
from g2d_jax.rewards.functions import RewardFunction
from g2d_jax.runtime.program_cache import Programs
from g2d_jax.runtime.tracking import Tracker
from g2d_jax.sampler.engine import Sampler
from g2d_jax.session.session import Options, Run, Session, loaded, session_of

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file
from killed import Runs


def even(completions: list[str], **columns: Any) -> list[float]:
    """Reward 1 for a completion of even length: about half of a random model's."""
    return [float(len(text) % 2 == 0) for text in completions]


@pytest.fixture
def config() -> ConfigDict:
    return resolve(str(Path(__file__).parents[1] / "tiny.py"))


Jitted = dict[Callable[..., Any], list[tuple[Any, Any]]]


class AllPrograms(Programs):
    """The programs of all settings and tests, not of the newest alone; the sampler, which counts,
    is the context's."""

    def __init__(self, jitted: Jitted) -> None:
        super().__init__()
        self._jitted = jitted

    def get_or_make(self, make: Callable[..., Any], *settings: Any, **named: Any) -> Any:
        if make is Sampler:
            return super().get_or_make(make, *settings, **named)
        programs = self._jitted.setdefault(make, [])
        for before, program in programs:
            if before == (settings, named):
                return program
        programs.append(((settings, named), make(*settings, **named)))
        return programs[-1][1]


@pytest.fixture(scope="session")
def jitted() -> Jitted:
    """What the stages of all tests run, traced and compiled once."""
    return {}


@pytest.fixture
def opened(jitted: Jitted) -> Iterator[Callable[..., Session]]:
    """Make the context of a config and work directory; `reward` in place of tiny.py's."""
    with ExitStack() as stack:

        def make(
            config: ConfigDict,
            workdir: Path,
            reward: RewardFunction | None = even,
            programs: Programs | None = None,
            devices: int = 1,
            names: Sequence[str] | None = None,
            **given: Any,
        ) -> Session:
            tracker = stack.enter_context(Tracker(workdir, tensorboard=False))
            of_config = Config.of(config)
            folders = graph.plan(of_config).folders(epath.Path(workdir))
            run = Run(
                config=of_config,
                workdir=epath.Path(workdir),
                folders=folders,
                tracker=tracker,
                reward=reward,
                **given,
            )
            options = Options(names, devices=jax.devices()[:devices])
            made = loaded(run, options, programs or AllPrograms(jitted))
            return session_of(run, stack.enter_context(made))

        yield make


@pytest.fixture(scope="session")
def runs(forks: Forks) -> Runs:
    """Starts runs of the tiny config that end as they are told, each in a process of its own."""
    return Runs(forks)
