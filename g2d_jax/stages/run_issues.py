"""The errors and warnings of a run, as lists: first those of its settings and the files they name,
then those of its rewards and stages. session/session.py raises the errors of its inputs.

    settings ─► config/check.py ─► files, rewards, other runs ─► [Issue("error", "stages.dpo.beta", …), …]
    session ─► rewards, stages ─► [Issue("error", "stages.sft.data", …), …]

No weights are loaded, and no program is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from etils import epath
from ml_collections import ConfigDict

from g2d_jax import stages as stage_modules
from g2d_jax.config import Config, Issue, check, places, prefix_of, setting_of
from g2d_jax.config.io import to_dict
from g2d_jax.config.section import faults
from g2d_jax.data.problems import check_training
from g2d_jax.rewards.functions import load_reward
from g2d_jax.runtime import processes
from g2d_jax.runtime.tracking import Tracker
from g2d_jax.session import init_params, stage_result
from g2d_jax.session.answers import answer_issues
from g2d_jax.session.policies import require_elsewhere
from g2d_jax.session.session import Session
from g2d_jax.session.stage_result import Warned
from g2d_jax.stages import Seen
from g2d_jax.stages.trial import Trial, try_reward


def checked(
    config: ConfigDict | Config, until: str | None = None, known: Sequence[Issue] = ()
) -> tuple[Config, list[Issue]]:
    """Return the settings as records, and warnings: errors should show now, not after hours of
    warm-up.

    config: relative paths of a ConfigDict are relative to the working directory; a Config's are
    absolute. until: the stage to stop after, None for all. known: errors found earlier. Raises
    Invalid with all errors: those of config/check.py, missing files, reward functions that cannot
    be imported, missing policies of other runs. Loads nothing.
    """
    if isinstance(config, ConfigDict):
        config = config.copy_and_resolve_references()
        places.decide(config, places.here())
    run, found = check.issues(config, until)
    found = [*known, *found]
    for issue in (*places.issues(to_dict(run)), *_issues(run)):
        if issue.path not in {other.path for other in found}:
            found.append(issue)
    check.refuse(found)
    return run, found


def _issues(config: Config) -> Iterator[Issue]:
    """Yield the errors of settings that name something unusable, or an impossible shape."""
    if not config.model.path:
        shape = partial(init_params.shape, config.model, 1)
        wrong = faults("model", lambda: shape({}))
        yield from wrong or faults("lora", lambda: shape(init_params.adapters(config.lora)))
    if config.engine.is_server:
        from g2d_jax.runtime import endpoint  # here: few runs have one

        url, key = config.engine.url, config.engine.api_key_env
        wrong = faults("engine.url", lambda: endpoint.check_url(url))
        yield from wrong or faults("engine.api_key_env", lambda: endpoint.api_key(url, key))
    for name, task in config.all_tasks.items():
        setting = f"{setting_of(name, 'train')}.path"
        yield from faults(setting, partial(check_training, task.train.path, setting))
        for function in task.reward.user_functions:
            setting = "function" if function == task.reward.function else "functions"
            look = partial(load_reward, function, task.reward.folder)
            yield from faults(f"{prefix_of(name)}reward.{setting}", look)
    for name, stage in config.stages.items():
        for setting, policies in stage.policies_by_field().items():
            for policy in policies:
                yield from faults(f"stages.{name}.{setting}", partial(require_elsewhere, policy))


@dataclass(frozen=True)
class Found:
    """The result of checking stages. seen: by stage, whose run removes it. trials: of rewards."""

    issues: list[Issue] = field(default_factory=list)
    seen: dict[str, Seen] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)

    def warnings(self, stage: str) -> list[Warned]:
        """List the warnings for a stage's manifest: all except those of other stages."""
        issues = dict.fromkeys(self.issues)
        own = [issue for issue in issues if _stage_of(issue) in ("", stage)]
        return [Warned(issue.path, str(issue)) for issue in own]


def examine(session: Session, names: Sequence[str], known: Sequence[Issue] = ()) -> Found:
    """Check a session; print the warnings, and return them with the trials of its rewards.

    names: of stages that are not finished. known: issues found earlier. All processes call it
    together. Raises Invalid with all errors.
    """
    tell(session.tracker, known)
    trials: list[Trial] = []
    issues: list[Issue] = []
    if processes.leader():  # a judge gets one request
        for task in session.config.all_tasks:
            setting = f"{prefix_of(task)}reward.function"
            issues += faults(setting, partial(try_reward, session, task, trials, issues))
    answers = answer_issues(session)
    found = of_stages(session, names)
    issues += [*answers, *found.issues]
    tell(session.tracker, issues)
    return replace(found, issues=[*known, *issues], trials=trials)


def unfinished(folders: Mapping[str, epath.Path], names: Sequence[str]) -> list[str]:
    """Return the stages that have no manifest yet, by the leader. All processes call it together."""
    return processes.on_leader(
        lambda: [name for name in names if not stage_result.read(folders[name])]
    )


def tell(tracker: Tracker, found: Sequence[Issue]) -> None:
    """Raise Invalid for the errors among issues; without any, print each warning once. All
    processes call it together."""
    with processes.barrier():
        check.refuse(found)
    for issue in dict.fromkeys(found):
        tracker.warn(_stage_of(issue), 0, issue.path, str(issue))


def _stage_of(issue: Issue) -> str:
    """Return the stage that an issue is of, "" for none."""
    section, name, *_ = f"{issue.path}..".split(".")
    return name if section == "stages" else ""


def of_stages(session: Session, names: Sequence[str]) -> Found:
    """Check the data, rows and engines of stages; return the issues, and the data they read."""
    config = session.config
    found = Found([*session.problems.issues])
    if any(config.stages[name].samplings() for name in names):
        setting = "engine.url" if config.engine.is_server else "compute"
        # Requests a server's model name.
        found.issues.extend(
            faults(setting, lambda: getattr(session.sampling.engine, "model", None))
        )
    for name in names:
        found.issues.extend(faults(f"stages.{name}", partial(_look_at, session, name, found)))
    return found


def _look_at(session: Session, name: str, found: Found) -> None:
    stage = session.config.stages[name]
    found.seen[name] = seen = stage_modules.of_kind(stage.kind).issues(session, name, stage)
    found.issues.extend(seen.issues)
