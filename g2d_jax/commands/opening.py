"""Open a run that has ended: its settings, its session for reading, its result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import jax
from etils import epath

from g2d_jax.config import BestCheckpoint, Config, Faults, Invalid, Mesh, places
from g2d_jax.config.graph import plan
from g2d_jax.config.io import to_dict
from g2d_jax.rewards.functions import RewardFunction
from g2d_jax.runtime import flags, precision, processes, program_cache, storage
from g2d_jax.runtime.heartbeat import watched
from g2d_jax.runtime.mesh import make_mesh, slices
from g2d_jax.runtime.tracking import Tracker
from g2d_jax.session.accounting import TRAINING, behind
from g2d_jax.session.problems import SPLITS
from g2d_jax.session.session import Options, Run, Session, loaded, session_of
from g2d_jax.session.workdir import absolute, packages, read_settings, stage_folders, stage_steps
from g2d_jax.stages import run_stages


def read_config(workdir: epath.Path) -> Config:
    """Read the config a work directory was started with.

    Raises ValueError if it holds no run, or settings of another version.
    """
    return Config.of(read_settings(workdir))


@contextmanager
def joined(workdir: storage.PathLike, what: str, request: Mapping[str, Any]) -> Iterator[Config]:
    """Join processes that were started with the same command on a run; yield its config.

    what: the command, for messages. request: its arguments, JSON. Raises ValueError where settings,
    packages or arguments differ between the processes.
    """
    run_stages.check_joined()
    # SIGTERM ends a single process at once: there is nothing to save or to agree on. The run's own
    # limits are known only once all processes have read them, so the defaults apply.
    together = processes.count() > 1
    with watched(**Faults().to_dict()) if together else nullcontext():
        processes.note_progress(what)
        with processes.barrier():
            config = read_config(absolute(workdir))
        processes.agreed(
            "settings, packages or arguments",
            {"config": to_dict(config), "packages": packages(), **request},
        )
        yield config


def not_at_hand(**_: Any) -> list[float | None]:
    """Replace a reward function that a run was given from Python: raise ValueError."""
    raise ValueError(
        "the run's reward is a function given from Python, which its work directory does not "
        "hold: call g2d_jax.commands.evaluate(WORKDIR, POLICY, reward=FUNCTION) from Python"
    )


@contextmanager
def opened(
    workdir: storage.PathLike,
    config: Config | None = None,
    reward: RewardFunction | None = None,
    needs: Sequence[str] = ("model", "tokenizer"),
    splits: Sequence[str] = (),
    *,
    samples: bool = False,
) -> Iterator[Session]:
    """Yield a run's session for reading, on any devices. Logs nothing to TensorBoard or W&B.

    needs: sections of the settings whose files must exist. splits: those whose problems are read.
    reward: the function that the run was given from Python; without it such a run can be read, but
    not scored. samples: whether responses may be sampled. Raises ValueError naming all missing
    files.
    """
    folder = absolute(workdir)
    config = config or read_config(folder)
    content = storage.read_json(folder / "config.json")
    values = to_dict(config)
    for task in (values["data"], *values["tasks"].values()):
        for split in {*SPLITS}.difference(splits):
            task[split]["path"] = ""  # not read, so it need not exist
    if gone := list(places.issues(values, needs)):
        raise ValueError(
            f"{Invalid(gone)}\n{folder / 'config.json'} names these paths: restore the files there. "
            "If they have moved, repeat the run's command, which updates all paths: g2d run "
            f"--config FILE --workdir {folder}"
        )
    flags.check_devices()
    config = _on_this_machine(config)
    if reward is None and "reward" in (content.get("own") or {}):
        reward = not_at_hand
    shown = folder if processes.leader() else None
    with (
        Tracker(shown, tensorboard=False) as tracker,
        precision.used(config.dtype),
        program_cache.cached(),
    ):
        run = Run(
            config=config,
            workdir=folder,
            folders={**plan(config).folders(folder), **stage_folders(folder)},
            tracker=tracker,
            reward=reward,
            steps=stage_steps(folder),
            inputs=content.get("inputs") or {},
        )

        def fault(error: object) -> None:
            # An existing run is useful even if no new one could begin with its template.
            tracker.say_once(f"WARNING: the run's tokenizer: {error}")

        with loaded(run, Options(splits=splits, fault=fault)) as shared:
            yield session_of(run, shared, samples=samples)


def _on_this_machine(config: Config) -> Config:
    """Return the config, with a mesh of all devices if the run's own has another number of them."""
    try:
        make_mesh(**config.mesh.to_dict())
    except ValueError:
        config = replace(config, mesh=Mesh(data=slices(jax.devices())))
    if config.compute.sampling_tensor and jax.device_count() % config.compute.sampling_tensor:
        config = replace(config, compute=replace(config.compute, sampling_tensor=0))
    return config


def last_policy(config: Config) -> str:
    """Return the run's result: the policy from which no other stage trains, or the selection among
    its checkpoints. Raises ValueError if there are several."""
    trained = [name for name in plan(config).order if config.stages[name].kind in TRAINING]
    if not trained:
        raise ValueError("no stage of this run trains a policy: name one with --policy")
    stages = to_dict(config)["stages"]
    used: set[str] = set()
    for name in trained:
        used |= behind(name, stages).keys() - {name}
    ends = [name for name in trained if name not in used]
    if len(ends) > 1:
        raise ValueError(
            f"the run ends with several policies, {', '.join(ends)}: name one with --policy"
        )
    selections = config.stages_of(BestCheckpoint).items()
    chosen = [name for name, stage in selections if stage.policy == ends[0]]
    return [ends[0], *chosen][-1]
