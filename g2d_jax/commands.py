"""Commands on the policies of a run: evaluate them on other problems, export them, show their
answers."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from etils import epath
from rich.padding import Padding
from rich.text import Text

from g2d_jax import config as settings
from g2d_jax import contents, run_stages
from g2d_jax.accounting import TRAINING, behind
from g2d_jax.card import WRITTEN_BY, base_named, card
from g2d_jax.config import (
    BestCheckpoint,
    Config,
    Evaluate,
    Mesh,
    Sampling,
    Sft,
    Source,
    Split,
    places,
    prefix_of,
    setting_of,
)
from g2d_jax.config.graph import plan
from g2d_jax.config.io import identity, to_dict
from g2d_jax.config.policy_name import INIT, OF_RUN, PolicyName
from g2d_jax.data import splits
from g2d_jax.data.splits import problem_id
from g2d_jax.data.stops import cut
from g2d_jax.data.tokenizer import CHAT_TEMPLATE
from g2d_jax.mesh import make_mesh, slices
from g2d_jax.models import hf
from g2d_jax.models.decoder import Decoder
from g2d_jax.records import Problem, Request, Rollout, SamplingParams, Verdict, pick
from g2d_jax.report.samples import conversation
from g2d_jax.report.tables import FIRST, summary_table
from g2d_jax.rewards.functions import RewardFunction, load_reward
from g2d_jax.runtime import flags, precision, processes, program_cache, storage
from g2d_jax.runtime.heartbeat import watched
from g2d_jax.runtime.terminal import clean
from g2d_jax.runtime.tracking import Tracker
from g2d_jax.session import inputs, kept_inputs
from g2d_jax.session.policies import base_path, base_revision, checkpoint_of, load_policy
from g2d_jax.session.problems import READ_FOR, SPLITS
from g2d_jax.session.session import Session
from g2d_jax.stages import evaluate as evaluation
from g2d_jax.stages.alerts import position_alerts
from g2d_jax.training.checkpoint import Checkpoints
from g2d_jax.workdir import (
    absolute,
    no_run,
    packages,
    settings_of,
    stage_folders,
    stage_steps,
    where_to_look,
)


def read_config(workdir: epath.Path, name: str = "config.json") -> Config:
    """Read the config a work directory was started with.

    name: of its file. Raises ValueError if it holds no run, or settings of another version.
    """
    file = workdir / name
    if not file.exists():
        raise no_run(workdir)
    content = storage.read_json(file)
    if not isinstance(content, dict) or not isinstance(content.get("config"), dict):
        raise ValueError(f"{file} is not the settings of a run")
    try:
        config, _ = settings_of(workdir, content)
    except ValueError as error:
        raise ValueError(f"{file}, written by version {content.get('version')}: {error}") from error
    # A work directory that came from elsewhere must not name code to run.
    for section in (config, *config.tasks.values()):
        section.reward.folder = None
    return Config.of(config)


def _not_at_hand(**_: Any) -> list[float | None]:
    """Stand in for a reward function that a run was given from Python."""
    raise ValueError(
        "the run's reward is a function given from Python, which its work directory does not "
        "hold: from Python, g2d_jax.commands.evaluate(WORKDIR, POLICY, reward=FUNCTION)"
    )


@contextmanager
def opened(
    workdir: storage.PathLike,
    config: Config | None = None,
    reward: RewardFunction | None = None,
    needs: Sequence[str] = ("model", "tokenizer"),
    splits: Sequence[str] = SPLITS,
) -> Iterator[Session]:
    """Yield a run's session for reading, on whatever devices there are: logs nothing to TensorBoard
    or W&B.

    needs: sections of the settings whose files have to be there, of problems those of `splits`.
    Raises ValueError naming all that are not.

    reward: that of a run which was given one from Python; without it such a run can be read, but
    nothing be scored.
    splits: those whose problems are read, if any are.
    """
    folder = absolute(workdir)
    config = config or read_config(folder)
    content = storage.read_json(folder / "config.json")
    values = to_dict(config)
    for task in (values["data"], *values["tasks"].values()):
        for split in {*SPLITS}.difference(splits):
            task[split]["path"] = ""  # not read, and so it need not be there
    places.require(values, needs, where_to_look(folder, content))
    flags.check_devices()
    config = _on_this_machine(config)
    if reward is None and "reward" in (content.get("own") or {}):
        reward = _not_at_hand
    shown = folder if processes.leader() else None
    _, moved = settings_of(folder, content)
    with (
        Tracker(shown, tensorboard=False) as tracker,
        precision.used(config.dtype),
        program_cache.cached(config.compute.compilation_cache),
    ):
        if moved:
            tracker.say("\n  ".join([f"{folder} has moved, and these with it:", *moved]))
        folders = {**plan(config).folders(folder), **stage_folders(folder)}
        session = Session(
            config, folder, tracker, folders, reward, steps=stage_steps(folder), splits=splits
        )
        # What ran already is of use, also where no run would begin with its template.
        session.fault = lambda error: session.say_once(f"WARNING: the run's tokenizer: {error}")
        with closing(session):
            yield session


def _on_this_machine(config: Config) -> Config:
    """Return the config, with a mesh of all devices where the run's own is of another number of
    them."""
    try:
        make_mesh(**config.mesh.to_dict())
    except ValueError:
        config = replace(config, mesh=Mesh(data=slices(jax.devices())))
    if config.compute.sampling_tensor and jax.device_count() % config.compute.sampling_tensor:
        config = replace(config, compute=replace(config.compute, sampling_tensor=0))
    return config


def last_policy(config: Config) -> str:
    """Return the run's result: the policy that no other stage trains on from, or the selection among
    its checkpoints. Raises ValueError where there are several."""
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
) -> dict[str, Any]:
    """Evaluate one policy as the run's evaluate stage does, on other problems or with other
    sampling settings.

    problems: a source as in data.*.path, scored by the reward of `task`; split: its part by id
    hash, limit: the first so many of that; None: all. Without problems, those of the stage. reward:
    the run's own, if given from Python.
    sampling: num_generations, temperature, top_p, max_new_tokens; None keeps the stage's. Results
    and completions go to WORKDIR/evaluations/NAME, named by settings and problems, and are reused
    by the same call. Returns the manifest.
    """
    folder = absolute(workdir)
    policy = places.decided(policy, "policy", places.here())
    config = read_config(folder)
    own, like = evaluate_stage(config)
    changes = {name: value for name, value in sampling.items() if value is not None}
    samples = changes.pop("num_generations", like.num_generations)
    limited = replace(like, num_generations=samples).told_at
    stage = replace(
        like,
        policies=(policy,),
        num_generations=samples,
        sampling=replace(like.sampling, **changes),
        pass_at=limited,
    )
    is_trained_on = False
    if problems is not None:
        source = _source(config, task, problems, split, limit)
        problems = source.path
        is_trained_on = _trained_on(config, source)
        config = _with_problems(config, task, stage.split, source)
    elif split or limit or task != "main":
        raise ValueError("split, limit and task say how to take other problems: name these too")
    _require_served(config, policy)
    needs = ("model", "tokenizer", "data", "tasks", "reward")
    with opened(folder, config, reward, needs, READ_FOR[stage.split]) as session:
        if session.reward is _not_at_hand and task == "main":
            _not_at_hand()
        if problems is None:
            session.tracker.say(f"{policy} on the problems of {stage.split}, as the stage {own}")
        elif is_trained_on:
            session.tracker.say(
                f"WARNING: the run trains on {problems} too: what is answered there may be learned "
                "by heart. Of a file that the run divides, --split test is what it holds out"
            )
        if limited != like.pass_at:
            session.tracker.say(
                f"pass_at of the run's stage is {like.pass_at}: of {samples} answers to a "
                f"problem only {limited} can be told"
            )
        kept_inputs.verify(session, policy, *_scored_by(session, None if problems else stage.split))
        name = _evaluation_name(session, stage, policy)
        place = folder / "evaluations" / name
        session.folders = {**session.folders, name: place}
        if not storage.finished(place):
            results = evaluation.run(session, name, stage)
            about = {
                "kind": "evaluate",
                "name": name,
                "problems": problems or stage.split,
                precision.NAME: precision.of(config.dtype),
            }
            storage.finish(place, {**about, **results})
        manifest = storage.finished(place) or {}
        session.tracker.table(*summary_table(manifest, []), first=FIRST)
        session.tracker.say(f"completions: {place / 'rollouts'}")
    return manifest


def _evaluation_name(session: Session, stage: Evaluate, policy: str) -> str:
    """Name an evaluation by all that decides it: settings, problems, weights and rewards."""
    asked = session.problems.by_split[stage.split]
    held_out = [[problem.id, problem.answer] for problem in asked]
    scored = [problem.task for problem in asked]
    named = [stage.to_dict(), held_out, version(session, policy), scored, _scoring(session)]
    named.append(precision.of(session.config.dtype))
    # A function is given more of a problem than its answer.
    read_whole = [problem for problem in asked if session.reading(problem.task).columns]
    if read_whole:
        named.append(contents.records(read_whole, columns=True).digest)
    return f"evaluation-{storage.fingerprint(named)}"


def _source(
    config: Config, task: str, problems: str, split: splits.Split | None, limit: int | None
) -> Source:
    """Return the source of other problems, of which a relative path is of this folder. Broken rows
    are taken as the run's own test problems take them.

    Raises ValueError where the run has no such task and where nothing is at the path.
    """
    if task not in config.all_tasks:
        raise ValueError(f"there is no task {task!r}; the run has {', '.join(config.all_tasks)}")
    path = places.decided(problems, "problems", places.here())
    if reason := places.missing(path, "problems"):
        raise ValueError(f"problems: {reason}")
    on_error = config.all_tasks[task].test.on_error
    return Source(path=path, split=split or "", limit=limit, on_error=on_error)


def _require_served(config: Config, policy: str) -> None:
    """Raise ValueError for a policy that the run's server would have to be sent, and never is."""
    if not (config.engine.is_server and config.engine.sync == "none"):
        return
    held = config.policies_sampled()
    if policy not in held:
        raise ValueError(
            f"the run's server was taken to hold {', '.join(sorted(held))} (engine.sync is 'none'), "
            f"so what it answers would be told as answers of {policy}: give the run's own command "
            "again with --config.engine.sync=folder or adapter, which leaves what is done, and "
            "then this one"
        )


def evaluate_stage(config: Config) -> tuple[str, Evaluate]:
    """Return the evaluate stage to take settings from, with its name: of several the first by name
    on test, else the first. Raises ValueError without any."""
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


def _scored_by(session: Session, split: str | None) -> list[str]:
    """List the inputs that scores come from: reward models, and the problems of a split; None: of
    no split."""
    settings = []
    for name in session.config.all_tasks:
        settings += [
            f"{prefix_of(name)}reward.model.path",
            f"{prefix_of(name)}reward.model.tokenizer",
        ]
        if split:
            settings.append(setting_of(name, split))
    return settings


def _scoring(session: Session) -> Any:
    """Identify what scores the responses: the settings of each task's reward, the files of
    functions, and one that was given from Python by its name and code.

    Raises ValueError for a function that cannot be loaded.
    """
    for name, reward in session.config.rewards.items():
        # The file of one is known once it is loaded.
        if reward.kind.is_function and not (name == "main" and session.reward is not None):
            load_reward(reward.function, reward.folder)
    found = {}
    for name, reader in inputs.named(session).items():
        if name.endswith("reward.function"):
            found[name] = reader.read().digest
    settings = identity(session.config)
    return [settings["reward"], settings["tasks"], found, _code_of(session.reward)]


def _code_of(function: RewardFunction | None) -> Any:
    """Identify a function by its name and code; what has more than these, such as a closure or an
    object, is another one every time."""
    if function is None:
        return None
    code = getattr(function, "__code__", None)
    if code is None or function.__closure__ or function.__defaults__:  # type: ignore[attr-defined]
        return processes.on_leader(lambda: uuid.uuid4().hex)
    return [function.__qualname__, code.co_code.hex(), repr(code.co_consts), code.co_names]  # type: ignore[attr-defined]


def _with_problems(config: Config, task: str, split: Split, source: Source) -> Config:
    """Return the config with these problems in place of a task's held-out split, and with no others
    to evaluate on."""

    def changed(name: str) -> dict[str, Any]:
        sources = {"dev": Source(), "test": Source()}
        if name == task:
            sources[split] = source
        return sources

    tasks = {name: replace(section, **changed(name)) for name, section in config.tasks.items()}
    return replace(config, data=replace(config.data, **changed("main")), tasks=tasks)


def version(session: Session, policy: str) -> Any:
    """Identify the weights that a policy's name means now: of a model by content; of a stage by its
    folder's name, its step, and its fingerprint once finished."""
    name = PolicyName.parse(policy)
    if name.is_model:
        folder = session.model_folder if name.origin == INIT else hf.resolve(name.place)
        return [name.origin.rstrip(":"), None if folder is None else inputs.weights(folder).digest]
    folder, step = checkpoint_of(session, policy)
    manifest = storage.finished(folder.parent) or {}
    # the work directory may move
    place = str(folder) if name.origin == OF_RUN else folder.parent.name
    return [
        place,
        Checkpoints(folder).latest() if step is None else step,
        manifest.get("fingerprint"),
    ]


def export(
    workdir: storage.PathLike,
    output: storage.PathLike,
    *,
    policy: str | None = None,
    dtype: str = "float32",
    adapters: bool = False,
    published: bool = False,
) -> epath.Path:
    """Write a policy as a Hugging Face folder: safetensors, config, tokenizer, generation config,
    model card.

    dtype: "float32" or "bfloat16". adapters: write these alone, as PEFT has them, in place of the
    model they are merged into. published: name their base, where it is a path, by its last part.
    Several processes call it together: each reads and holds its part of the policy, the first one
    writes. Raises ValueError for another dtype, if the folder holds a model already, there is no such policy, it has
    no adapters to write, or the processes see different runs.
    """
    hf.stored_dtype(dtype)
    policy = policy and places.decided(policy, "policy", places.here())
    target = epath.Path(output).expanduser()
    request = {"policy": policy, "dtype": dtype, "adapters": adapters}
    # The defaults: the run's own limits are known only once all processes have read them.
    limits = settings.base().faults
    run_stages.check_joined()
    with ExitStack() as stack:
        # SIGTERM ends a process that is alone at once: there is nothing to save or to agree on.
        if processes.count() > 1:
            stack.enter_context(
                watched(peer_timeout=limits.peer_timeout, hang_timeout=limits.hang_timeout)
            )
        processes.note_progress("export")
        processes.on_leader(lambda: _require_free(target))
        with processes.barrier():
            config = read_config(absolute(workdir))
        processes.agreed(
            "settings or packages", {"config": to_dict(config), "packages": packages(), **request}
        )
        with opened(workdir, config) as session:
            chosen = policy or last_policy(config)
            _export(session, chosen, target, dtype, adapters=adapters, published=published)
    return target


def _require_free(folder: epath.Path) -> None:
    """Raise ValueError for a folder that holds anything but an export that was broken off, and for
    what is no folder."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file: choose another --output")
    for name, what in hf.FINISHED.items():
        if (folder / name).exists():
            raise ValueError(f"{folder} holds {what} already: choose another --output")
    others = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    readme = folder / "README.md"
    is_ours = readme.exists() and WRITTEN_BY.encode() in storage.read_bytes(readme)
    if others and not is_ours:
        raise ValueError(
            f"{folder} holds {others[0]}, and no export that was broken off: choose another "
            "--output, a new folder or an empty one"
        )


def _export(
    session: Session,
    policy: str,
    folder: epath.Path,
    dtype: str,
    *,
    adapters: bool,
    published: bool,
) -> None:
    """Write the files of `export`, config.json or PEFT's last but for the card's note."""
    if adapters and not session.config.lora.rank:
        raise ValueError("the run has no adapters (lora.rank is 0): export without --adapters")
    processes.on_leader(lambda: kept_inputs.verify(session, policy))
    params = load_policy(session, policy)
    base, note = None, ""
    if adapters:
        base, note = processes.on_leader(lambda: base_named(session, policy, published=published))
    text = processes.on_leader(lambda: _write_texts(session, policy, folder, adapters, note))
    if adapters:
        if note:
            session.tracker.say(note)
        session.tracker.say(
            f"responses of this policy end at {session.tokenizer.ends()}, which a server beside "
            "the base has to be told: see the model card"
        )
        revision = base_revision(session, policy) if base else None
        hf.save_adapters(params, folder, base=base, revision=revision, dtype=dtype)
    else:
        _save_model(session, policy, params, folder, dtype)
    processes.on_leader(lambda: _add_note(session, folder, text))


def _write_texts(
    session: Session, policy: str, folder: epath.Path, adapters: bool, note: str
) -> str:
    """Write the model card and the tokenizer; return the card."""
    text = card(session, policy, what="adapters" if adapters else "model", note=note)
    storage.write_bytes(folder / "README.md", text.encode())  # first: it says whose folder this is
    session.tokenizer.save(folder)
    for sentence in session.tokenizer.template.differences():
        session.tracker.say(f"{CHAT_TEMPLATE} is written as in training: {sentence}")
    return text


def _add_note(session: Session, folder: epath.Path, text: str) -> None:
    """Add the note on the tokenizer, if there is one, to the model card, and show it."""
    if note := _tokenizer_note(folder):
        text = text.replace("AutoTokenizer", "PreTrainedTokenizerFast")  # in the code that it shows
        storage.write_bytes(folder / "README.md", (text + note).encode())
        session.tracker.say(note.strip())


def _save_model(
    session: Session, policy: str, params: Decoder, folder: epath.Path, dtype: str
) -> None:
    """Save the weights with adapters merged, with the sampling settings of the model that the run
    started from."""
    tokenizer = session.tokenizer
    base = base_path(session, policy)
    try:
        source = session.model_folder
        if base != session.config.model.path:
            source = hf.resolve(base) if base else None
    except ValueError as error:
        session.tracker.say(f"its sampling settings are left out: {error}")
        source = None
    hf.save(
        params,
        folder,
        dtype=dtype,  # type: ignore[arg-type]
        eos_ids=tokenizer.eos_ids,
        bos_id=tokenizer.bos_id,
        pad_id=tokenizer.pad_id,
        generation_entries=hf.read_sampling(source) if source is not None else {},
    )


def _tokenizer_note(folder: epath.Path) -> str:
    """Return a note where AutoTokenizer, which goes by the kind of model, would misread the
    exported tokenizer."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not storage.is_local(folder):
        return ""
    rules = []
    for loader in (AutoTokenizer, PreTrainedTokenizerFast):
        backend = json.loads(
            loader.from_pretrained(folder, trust_remote_code=False).backend_tokenizer.to_str()
        )
        rules.append([backend[part] for part in ("normalizer", "pre_tokenizer", "decoder")])
    if rules[0] == rules[1]:
        return ""
    return (
        "\nThe tokenizer is not one that transformers uses with this kind of model: load it with "
        "`PreTrainedTokenizerFast.from_pretrained`, since `AutoTokenizer` would put other rules "
        "in its place.\n"
    )


def sample(
    workdir: storage.PathLike,
    *,
    policy: str | None = None,
    prompts: str | Iterable[str] | None = None,
    count: int = 4,
    temperature: float = 1.0,
) -> list[str]:
    """Show, and return, a policy's answers: `count` to each prompt, greedily one, or one to each of
    `count` test problems.

    prompts: may be an iterator that waits for what is typed: each is answered before the next is
    asked for. Answers to test problems are shown with their reward. Each problem is shown once,
    above its answers: in a file these are a Markdown table, a row an answer.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    policy = policy and places.decided(policy, "policy", places.here())
    needs = ["model", "tokenizer"]
    if prompts is None:
        needs += ["data", "tasks"]
    with opened(workdir, needs=needs, splits=READ_FOR["test"]) as session:
        chosen = policy or last_policy(session.config)
        settings = first_sampling(session.config)
        if prompts is None and not session.problems.by_split["test"]:
            raise ValueError(
                "the run has no test problems (data.test names none): give a problem with --prompt"
            )
        kept_inputs.verify(
            session, chosen, *_scored_by(session, "test" if prompts is None else None)
        )
        params = settings.params(session.sampling.stop_ids, temperature=temperature)
        view = session.sampling.sampler.to_sampler_params(load_policy(session, chosen))
        if prompts is None:
            return _answers(
                session, chosen, view, params, session.problems.by_split["test"][:count], 1
            )
        if temperature == 0:
            count = 1  # greedy answers are all the same
        texts = []
        for prompt in [prompts] if isinstance(prompts, str) else prompts:
            problem = Problem(problem_id(prompt), prompt)
            try:
                texts += _answers(session, chosen, view, params, [problem], count)
            except ValueError as error:
                # Of several prompts, typed one after the other, the next may be accepted.
                if isinstance(prompts, str):
                    raise
                session.tracker.say(str(error))
        return texts


def first_sampling(config: Config) -> Sampling:
    """Return the sampling settings of the run's first stage that samples. Raises ValueError where
    none does."""
    for name in plan(config).order:
        for drawn in config.stages[name].samplings():
            return drawn
    raise ValueError("the run has no stage with sampling settings")


def _answers(
    session: Session,
    policy: str,
    view: Decoder,
    params: SamplingParams,
    problems: Sequence[Problem],
    samples: int,
) -> list[str]:
    """Show, and return, `samples` answers to each problem."""
    requests = [
        Request(p.id, session.tokenizer.encode_prompt(p), params, num_samples=samples)
        for p in problems
    ]
    most = range(params.max_new_tokens)
    pairs = [(request.prompt_ids, most) for request in requests]
    for alert in position_alerts(session, pairs=pairs):
        session.say_once(f"WARNING: {alert.text}")
    rollouts = list(session.sampling.sampler.generate(view, requests, "sample"))
    place = {problem.id: i for i, problem in enumerate(problems)}
    rollouts.sort(key=lambda r: (place[r.problem_id], r.sample))
    repeated = [problems[place[rollout.problem_id]] for rollout in rollouts]
    texts = [cut(session.tokenizer.decode(rollout.token_ids), params.stop) for rollout in rollouts]
    rewards = _rewards(session, repeated, texts, [rollout.token_ids for rollout in rollouts])
    shown: dict[str, list[tuple[Rollout, str, str]]] = {}
    for rollout, text, reward in zip(rollouts, texts, rewards, strict=True):
        shown.setdefault(rollout.problem_id, []).append((rollout, text, reward))
    session.say_once(f"policy {policy}")
    for problem in problems:
        _say_template(session, problem)
        show = _show_on_terminal if session.tracker.screen.interactive else _show_as_table
        show(session.tracker, problem, shown[problem.id])
    return texts


def _say_template(session: Session, problem: Problem) -> None:
    """Say once what the policy reads around each problem, if anything."""
    if not isinstance(problem.prompt, str):
        return
    template = "{problem}".join(session.tokenizer.template.frame())
    if template != "{problem}":
        session.say_once(f"prompt of each problem: {clean(template, newlines=False)}")


def _show_as_table(
    tracker: Tracker, problem: Problem, answers: Sequence[tuple[Rollout, str, str]]
) -> None:
    """Show the answers to a problem, and their rewards, as a Markdown table below it."""
    rows = []
    for rollout, text, reward in answers:
        cells = [text, problem.answer or "", reward, rollout.stop_reason, _mean_logprob(rollout)]
        rows.append([cell.replace("|", r"\|") for cell in cells])
    tracker.say("")
    tracker.say(f"problem: {clean(conversation(problem.prompt), newlines=False)}")
    tracker.table("", ["response", "answer", "reward", "stop", "mean log-prob"], rows)


def _show_on_terminal(
    tracker: Tracker, problem: Problem, answers: Sequence[tuple[Rollout, str, str]]
) -> None:
    """Show the answers to a problem, and their rewards, each over the terminal's whole width."""
    tracker.say("")
    tracker.screen.console.print(Text(clean(conversation(problem.prompt)), "bold"))
    if problem.answer is not None:
        tracker.say(f"reference answer: {problem.answer}")
    for rollout, text, reward in answers:
        facts = [reward] if reward else []
        facts.append(f"{len(rollout.token_ids):,} tokens")
        if rollout.stop_reason == "length":
            facts.append("cut at the limit")
        facts.append(f"mean log-prob {_mean_logprob(rollout)}")
        tracker.say("")
        tracker.say(" · ".join(facts), "dim")
        # Lines of an answer stay apart from lines about it, also where they are wrapped.
        tracker.screen.console.print(Padding(Text(clean(text)), (0, 0, 0, 2)))


def _mean_logprob(rollout: Rollout) -> str:
    return f"{float(np.mean(rollout.logprobs)):.2f}"


def _rewards(
    session: Session,
    problems: Sequence[Problem],
    texts: Sequence[str],
    token_ids: Sequence[np.ndarray],
) -> list[str]:
    """Score each response: reward and verdict. It is "" without an answer, and for a reward of a
    model, an endpoint or a function that is not at hand."""
    rewards = session.config.rewards
    if session.reward is _not_at_hand:
        del rewards["main"]
    places = []
    for i, problem in enumerate(problems):
        is_cheap = problem.task in rewards and not rewards[problem.task].kind.not_tried
        if problem.answer is not None and is_cheap:
            places.append(i)
    shown = [""] * len(problems)
    try:
        scores = session.scorer(
            pick(problems, places), pick(texts, places), pick(token_ids, places)
        )
    except ValueError as error:  # raised by the user's own function: the answers can still be shown
        session.tracker.say(f"no rewards: {error}")
        return shown
    for i, score in zip(places, scores, strict=True):
        parts = []
        if score.reward is not None:
            parts.append(f"{score.reward:g}")
        if score.verdict is not Verdict.SCORED:
            parts.append(score.verdict.value)
        shown[i] = " ".join(parts)
    return shown
