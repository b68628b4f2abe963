"""All that is wrong with a run, in lists: what config/check.py finds in the settings with what needs
other files, and then what a session needs.

    settings ─► config/check.py ─► files, rewards, other runs ─► [Issue("error", "stages.dpo.beta", …), …]
    session ─► model, tokenizer, devices, weights, problems ─► rewards, stages ─► [Issue("error", "model.path", …), …]

No weights are loaded, and no program is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from ml_collections import ConfigDict

from g2d_jax import stages as stage_modules
from g2d_jax.config import Config, Issue, check, places, prefix_of, setting_of
from g2d_jax.config.io import to_dict
from g2d_jax.config.policy_name import OF_MODEL, PolicyName
from g2d_jax.config.section import faults
from g2d_jax.data.problems import check_training
from g2d_jax.models import hf
from g2d_jax.models.hf_folder import find_weights
from g2d_jax.models.kernels import LANES
from g2d_jax.rewards.functions import load_reward
from g2d_jax.runtime import processes
from g2d_jax.session import init_params, stage_result
from g2d_jax.session.answers import answer_issues
from g2d_jax.session.policies import base_of, model_of, require_elsewhere
from g2d_jax.session.row_shapes import kernel_of
from g2d_jax.session.session import Session
from g2d_jax.session.stage_result import Warned
from g2d_jax.stages.trial import Trial, try_reward


def checked(
    config: ConfigDict | Config, until: str | None = None, known: Sequence[Issue] = ()
) -> tuple[Config, list[Issue]]:
    """Return the settings as records, and warnings: what is wrong should show now, not after hours
    of warm-up.

    config: relative paths of a ConfigDict are relative to the working directory; a Config's are
    absolute. until: the stage to stop after, None for all. known: errors found before. Raises
    Invalid with all errors: those of config/check.py, files that are not there, reward functions
    that cannot be imported, policies of other runs that do not exist. Loads nothing.
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
    """Yield settings that name something which cannot be used, or a shape that is none."""
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
        for field, policies in stage.policies_by_field().items():
            for policy in policies:
                yield from faults(f"stages.{name}.{field}", partial(require_elsewhere, policy))


def examine(session: Session, names: Sequence[str]) -> list[Trial]:
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
        lambda: [name for name in names if not stage_result.read(session.folders[name])]
    )


def tell(session: Session, found: Sequence[Issue]) -> None:
    """Raise Invalid for the errors among issues; without any print the warnings, each once, and
    keep them for the manifests of their stages, others for all. All processes call it together."""
    with processes.barrier():
        check.refuse(found)
    for issue in dict.fromkeys(found):
        section, _, rest = issue.path.partition(".")
        name = rest.partition(".")[0] if section == "stages" else ""
        session.tracker.warn(name, 0, issue.path, str(issue))
        session.warnings.setdefault(name, []).append(Warned(issue.path, str(issue)))


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
