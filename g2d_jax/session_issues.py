"""All that is wrong with a run and shows in what its settings name: part two of config/check.py.

    session ─► model, tokenizer, devices, weights, problems ─► rewards, stages ─► [Issue("error", "model.path", …), …]

No weights are loaded, and no program is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from g2d_jax import stages as stage_modules
from g2d_jax.config import Issue, check, prefix_of
from g2d_jax.config.policy_name import OF_MODEL, PolicyName
from g2d_jax.config.section import faults
from g2d_jax.models import hf
from g2d_jax.models.hf_folder import find_weights
from g2d_jax.models.kernels import LANES
from g2d_jax.runtime import processes, storage
from g2d_jax.session.answers import answer_issues
from g2d_jax.session.policies import base_of, model_of
from g2d_jax.session.row_shapes import kernel_of
from g2d_jax.session.session import Session
from g2d_jax.trial import Trial, try_reward


def refuse(session: Session, names: Sequence[str]) -> list[Trial]:
    """Print what is doubtful about a session, and keep it for the manifests of its stages; return
    the trials of its rewards.

    names: of stages; finished ones are passed over. All processes call it together. Raises Invalid
    with all that stops the run.
    """
    names = unfinished(session, names)
    tell(session, of_inputs(session, names))
    tried: list[Trial] = []
    found: list[Issue] = []
    if processes.leader():  # a judge is asked once
        for task in session.config.all_tasks:
            setting = f"{prefix_of(task)}reward.function"
            found += faults(setting, partial(try_reward, session, task, tried, found))
    found += [*answer_issues(session), *of_stages(session, names)]
    tell(session, found)
    return tried


def unfinished(session: Session, names: Sequence[str]) -> list[str]:
    """Return the stages that have no manifest yet, by the leader. All processes call it together."""
    return processes.on_leader(
        lambda: [name for name in names if not storage.finished(session.folders[name])]
    )


def tell(session: Session, found: Sequence[Issue]) -> None:
    """Raise Invalid for the errors among issues; without any print the warnings, each once, and
    keep them for the manifests of their stages, others for all. All processes call it together."""
    with processes.barrier():
        check.refuse(found)
    for issue in dict.fromkeys(found):
        section, _, rest = issue.path.partition(".")
        name = rest.partition(".")[0] if section == "stages" else ""
        told = session.tracker.warn(name, 0, issue.path, str(issue))
        session.warnings.setdefault(name, []).append(told)


def of_inputs(session: Session, names: Sequence[str]) -> list[Issue]:
    """Return what makes model, tokenizer, devices or problems unusable; not what follows from
    another of these."""
    config = session.config
    found: list[Issue] = []

    def works(path: str, look: Callable[[], object]) -> bool:
        new = faults(path, look)
        found.extend(new)
        return not new

    has_model = (
        (not config.model.path or works("model.path", lambda: hf.read_config(session.model_folder)))
        and works("tokenizer", lambda: session.tokenizer)
        and works("lora", lambda: session.model_config)
    )
    has_devices = works("mesh", lambda: session.mesh)
    if has_model and processes.leader():
        for path, look in _weights(session, names):
            works(path, look)
    # What all do together, none does if one of them cannot.
    if all(processes.gather(has_model)):
        works("data", lambda: session.problems)
        if has_devices:
            works("compute", lambda: kernel_of(session, LANES))
            works("compute", lambda: session.sampling.devices.for_sampling)
    return found


def _weights(session: Session, names: Sequence[str]) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the settings that name weights, each with what raises ValueError where they cannot be
    loaded, by config.json and headers."""
    if session.model_folder is not None:
        yield "model.path", lambda: find_weights(session.model_folder, session.model_config.base)
    for name in names:
        for field, policies in session.config.stages[name].policies_by_field().items():
            for policy in policies:
                if PolicyName.parse(policy).origin == OF_MODEL:
                    yield f"stages.{name}.{field}", partial(model_of, session, policy)
                elif session.config.lora.rank:
                    yield f"stages.{name}.{field}", partial(base_of, session, policy)
    for name, task in session.config.all_tasks.items():
        is_own = name == "main" and session.reward is not None
        if task.reward.function == "model" and not is_own:
            from g2d_jax.scoring import reward_model  # here: few runs have one

            look = partial(reward_model.conversations_of, task.reward.model)
            yield f"{prefix_of(name)}reward.model.path", look


def of_stages(session: Session, names: Sequence[str]) -> list[Issue]:
    """Return what stages find wrong with their data, their rows and what draws their responses."""
    config = session.config
    found = [*session.problems.issues]
    if any(config.stages[name].samplings() for name in names):
        setting = "engine.url" if config.engine.is_server else "compute"
        # A server is asked for its model's name.
        found += faults(setting, lambda: getattr(session.sampling.engine, "model", None))
    for name in names:
        found += _of_stage(session, name)
    return found


def _of_stage(session: Session, name: str) -> list[Issue]:
    stage = session.config.stages[name]
    module = stage_modules.of_kind(stage.kind)
    warnings: list[Issue] = []
    errors = faults(f"stages.{name}", lambda: warnings.extend(module.issues(session, name, stage)))
    return [*warnings, *errors]
