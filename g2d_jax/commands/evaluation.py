"""Evaluate a policy of a run on other problems, or with other sampling settings."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from etils import epath

from g2d_jax.commands.opening import joined, not_at_hand, opened
from g2d_jax.config import Config, Evaluate, Sft, Source, Split, places
from g2d_jax.config.io import identity
from g2d_jax.config.policy_name import INIT, OF_RUN, PolicyName
from g2d_jax.data import splits
from g2d_jax.models import hf
from g2d_jax.report.tables import FIRST, answers_table, summary_table
from g2d_jax.rewards.functions import RewardFunction, load_reward
from g2d_jax.runtime import precision, processes, storage
from g2d_jax.session import contents, inputs, stage_result
from g2d_jax.session.policies import checkpoint_of
from g2d_jax.session.problems import READ_FOR
from g2d_jax.session.session import Session
from g2d_jax.session.stage_result import StageResult
from g2d_jax.session.workdir import absolute
from g2d_jax.stages import evaluate as evaluation
from g2d_jax.stages.run_issues import tell
from g2d_jax.training.checkpoint import Checkpoints


def evaluate(
    workdir: storage.PathLike,
    policy: str,
    *,
    problems: str | None = None,
    split: splits.Split | None = None,
    limit: int | None = None,
    task: str = "main",
    reward: RewardFunction | None = None,
    **sampling: Any,
) -> StageResult:
    """Evaluate one policy as the run's evaluate stage does, on other problems or with other
    sampling settings.

    problems: a source as in data.*.path, scored by the reward of `task`; None: those of the stage.
    split: its part by id hash; limit: only the first `limit` of that; None: all. reward: the run's
    own, if given from Python.
    sampling: num_generations, temperature, top_p, max_new_tokens; None keeps the stage's. Results
    and completions go to WORKDIR/evaluations/NAME, named by settings and problems; the same call
    reuses them. All processes call it together. Returns the record.
    """
    folder = absolute(workdir)
    policy = places.decided(policy, "policy", places.here())
    other = Other(problems, split, limit, task)
    with joined(folder, "evaluate", {"policy": policy, "other": [*other], **sampling}) as config:
        return _evaluate(folder, config, policy, other, reward, sampling)


class Other(NamedTuple):
    """Problems in place of the stage's, None for these. split, limit: the part to use. task: its
    reward scores them."""

    problems: str | None
    split: splits.Split | None
    limit: int | None
    task: str


def _evaluate(
    folder: epath.Path,
    config: Config,
    policy: str,
    other: Other,
    reward: RewardFunction | None,
    sampling: Mapping[str, Any],
) -> StageResult:
    """Evaluate, with the arguments of `evaluate`."""
    problems, split, limit, task = other
    own, like = evaluate_stage(config)
    stage = _stage(like, policy, sampling)
    is_trained_on = False
    if problems is not None:
        source = _source(config, task, problems, split, limit)
        problems = source.path
        is_trained_on = _trained_on(config, source)
        config = _with_problems(config, task, stage.split, source)
    elif split or limit or task != "main":
        raise ValueError("split, limit and task are for other problems: give problems, too")
    _require_served(config, policy)
    needs = ("model", "tokenizer", "data", "tasks", "reward")
    with opened(folder, config, reward, needs, READ_FOR[stage.split], samples=True) as session:
        if session.reward is not_at_hand and task == "main":
            not_at_hand()
        if problems is None:
            session.tracker.say(
                f"{policy} on the problems of {stage.split}, with the settings of stage {own}"
            )
        elif is_trained_on:
            session.tracker.say(
                f"WARNING: the run also trains on {problems}, so it may have memorised the "
                "answers. If the run divides that file, --split test is the held-out part"
            )
        if stage.pass_at != like.pass_at:
            session.tracker.say(
                f"pass_at of the run's stage is {like.pass_at}: {stage.num_generations} answers "
                f"to a problem allow only {stage.pass_at}"
            )
        inputs.verify(session, *inputs.scored_by(config, None if problems else stage.split))
        name = _evaluation_name(session, stage, policy)
        processes.agreed("problems, weights or rewards", name)
        place = folder / "evaluations" / name
        session = replace(session, folders={**session.folders, name: place})
        if not processes.on_leader(lambda: stage_result.read(place) is not None):
            seen = evaluation.issues(session, own, stage)
            tell(session.tracker, [*session.problems.issues, *seen.issues])
            made = _run(session, name, stage, problems)
            processes.on_leader(lambda: stage_result.write(place, made))
        result = stage_result.read(place)
        assert result is not None  # it was there, or the leader has written it
        assert result.evaluation is not None  # of its kind
        for table in (summary_table(result.evaluation, {}), answers_table(result.evaluation)):
            session.tracker.table(*table, first=FIRST)
        session.tracker.say(f"completions: {place / 'rollouts'}")
    return result


def _stage(like: Evaluate, policy: str, sampling: Mapping[str, Any]) -> Evaluate:
    """Return the run's stage for one policy, with other sampling settings where they are not
    None."""
    changes = {name: value for name, value in sampling.items() if value is not None}
    samples = changes.pop("num_generations", like.num_generations)
    settings = replace(like.sampling, **changes)
    stage = replace(like, policies=(policy,), num_generations=samples, sampling=settings)
    return replace(stage, pass_at=stage.shown_pass_at)


def _run(session: Session, name: str, stage: Evaluate, problems: str | None) -> StageResult:
    """Evaluate; return the record. problems: the path of other problems than the run's."""
    outcome = evaluation.run(session, name, stage)
    if problems and outcome.evaluation:
        outcome = replace(outcome, evaluation=replace(outcome.evaluation, split=problems))
    return StageResult(**vars(outcome), kind="evaluate", name=name)


def _evaluation_name(session: Session, stage: Evaluate, policy: str) -> str:
    """Name an evaluation by all that decides it: settings, problems, weights and rewards."""
    evaluated = session.problems.by_split[stage.split]
    held_out = [[problem.id, problem.answer] for problem in evaluated]
    scored = [problem.task for problem in evaluated]
    named = [stage.to_dict(), held_out, _version(session, policy), scored, _scoring(session)]
    named.append(precision.of(session.config.dtype))
    # A function reads more columns of a problem than its answer.
    for task in {problem.task for problem in evaluated if session.reading(problem.task).columns}:
        source = getattr(session.config.all_tasks[task], stage.split)
        if not source.path.startswith("procedural:"):
            named.append(inputs.digest(source.path, "problems", source.revision))
    return f"evaluation-{storage.fingerprint(named)}"


def _source(
    config: Config, task: str, problems: str, split: splits.Split | None, limit: int | None
) -> Source:
    """Return the source of other problems; a relative path is relative to the working directory.
    Broken rows are treated as in the run's test problems.

    Raises ValueError for an unknown task and for a missing file.
    """
    if task not in config.all_tasks:
        raise ValueError(f"there is no task {task!r}; the run has {', '.join(config.all_tasks)}")
    path = places.decided(problems, "problems", places.here())
    if reason := places.missing(path, "problems"):
        raise ValueError(f"problems: {reason}")
    on_error = config.all_tasks[task].test.on_error
    return Source(path=path, split=split or "", limit=limit, on_error=on_error)


def _require_served(config: Config, policy: str) -> None:
    """Raise ValueError for a policy that the run's server does not hold, and is never sent."""
    if not (config.engine.is_server and config.engine.sync == "none"):
        return
    held = config.policies_sampled()
    if policy not in held:
        raise ValueError(
            f"the run assumes that its server holds {', '.join(sorted(held))} (engine.sync is "
            f"'none'), so its answers would not be those of {policy}. Repeat the run's command with "
            "--config.engine.sync=folder or adapter (finished stages stay), and then this one"
        )


def evaluate_stage(config: Config) -> tuple[str, Evaluate]:
    """Return the name and the evaluate stage whose settings are used: by name the first on test,
    else the first. Raises ValueError without any."""
    stages = config.stages_of(Evaluate)
    if not stages:
        raise ValueError("the run has no evaluate stage to take settings from")
    tested = [name for name in sorted(stages) if stages[name].split == "test"]
    name = [*tested, *sorted(stages)][0]
    return name, stages[name]


def _trained_on(config: Config, source: Source) -> bool:
    """Return whether a stage may train on problems of a source, by its path and split alone."""
    sources = [task.train for task in config.all_tasks.values()]
    sources += [stage.data for stage in config.stages_of(Sft).values()]
    for other in sources:
        apart = other.split and source.split and other.split != source.split
        if other.path == source.path and not apart:
            return True
    return False


def _scoring(session: Session) -> Any:
    """Identify the scoring of responses: the settings of each task's reward, the files of
    functions, and a function from Python by its name and code.

    Raises ValueError for a function that cannot be loaded.
    """
    for name, reward in session.config.rewards.items():
        # The file of a function is known once it is loaded.
        is_given = name == "main" and session.reward is not None
        for function in reward.functions if is_given else reward.user_functions:
            load_reward(function, reward.folder)
    files = inputs.function_files(session.config)
    settings = identity(session.config, session.inputs)
    return [settings["reward"], settings["tasks"], files, _code_of(session.reward)]


def _code_of(function: RewardFunction | None) -> Any:
    """Identify a function by its name and code; one with further state, such as a closure or an
    object, gets a new id every time."""
    if function is None:
        return None
    code = getattr(function, "__code__", None)
    if code is None or function.__closure__ or function.__defaults__:  # type: ignore[attr-defined]
        return processes.on_leader(lambda: uuid.uuid4().hex)
    return [function.__qualname__, code.co_code.hex(), repr(code.co_consts), code.co_names]  # type: ignore[attr-defined]


def _with_problems(config: Config, task: str, split: Split, source: Source) -> Config:
    """Return the config with these problems in place of a task's held-out split, and no other
    held-out problems."""

    def changed(name: str) -> dict[str, Any]:
        sources = {"dev": Source(), "test": Source()}
        if name == task:
            sources[split] = source
        return sources

    tasks = {name: replace(section, **changed(name)) for name, section in config.tasks.items()}
    return replace(config, data=replace(config.data, **changed("main")), tasks=tasks)


def _version(session: Session, policy: str) -> Any:
    """Identify the current weights of a policy: a model by content; a stage by its folder's name,
    its step, and its fingerprint once finished."""
    name = PolicyName.parse(policy)
    if name.is_model:
        folder = session.model_folder if name.origin == INIT else hf.resolve(name.place)
        return [name.origin.rstrip(":"), None if folder is None else contents.of_model(folder)]
    folder, step = checkpoint_of(session, policy)
    made = stage_result.read(folder.parent)
    # the work directory may move
    place = str(folder) if name.origin == OF_RUN else folder.parent.name
    return [
        place,
        Checkpoints(folder).latest() if step is None else step,
        made and made.fingerprint,
    ]
