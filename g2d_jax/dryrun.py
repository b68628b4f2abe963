"""The dry run: it shows the settings, stages and problems of a run, and refuses what the run would refuse."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import closing
from tempfile import TemporaryDirectory

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from g2d_jax import config_io, host_memory, places
from g2d_jax.config import BestCheckpoint, Collect, Config, Evaluate, Offline, Online, Sft
from g2d_jax.data.template import PLACEHOLDER
from g2d_jax.graph import Plan, made_from_ends, plan, policies_read
from g2d_jax.models.decoder import count_params, count_trained
from g2d_jax.models.kernels import platform_of
from g2d_jax.pipeline import check_models, check_packages
from g2d_jax.records import Preference, Problem
from g2d_jax.rewards.extract import in_form
from g2d_jax.rewards.forms import Form, asked_for, readers
from g2d_jax.rewards.verify import reading
from g2d_jax.runtime import flags, memory, storage
from g2d_jax.runtime.tracking import Tracker
from g2d_jax.stages import alerts, external_rollouts, inputs, kept_inputs, offline, online, sft
from g2d_jax.stages.problems import table, train_order
from g2d_jax.stages.runtime import Runtime, stop_strings
from g2d_jax.workdir import absolute, check_claim, stage_folders

SHOWN = 2  # problems that are shown in full
MOST_SHOWN = 1000  # characters of a prompt or response of a preference pair
_NOT_TRIED = {"model": "a reward model is loaded by the run alone", "judge": "a judge is asked by the run alone"}


def show(config: ConfigDict, named: ConfigDict | None = None, workdir: storage.PathLike | None = None) -> None:
    """Print changed settings, stages, problems with their answers as parsed, and rewards of made-up responses.

    named: the config before it was changed on the command line, None for no such changes. workdir: where the run would
    go, None for a new folder.
    Everything that the run reads but weights is read, and nothing is computed on devices. Raises what the run would.
    """
    settings = Config.of(config)
    order = plan(settings)
    check_packages(settings)
    places.require(config)
    flags.check_devices()
    with TemporaryDirectory() as folder, Tracker(folder, tensorboard=False) as tracker:
        place = epath.Path("WORKDIR") if workdir is None else absolute(workdir)
        runtime = Runtime(settings, epath.Path(folder), tracker, order.folders(place))
        runtime.follows = None if workdir is None else place
        with closing(runtime):
            _show_settings(runtime, config, config if named is None else named)
            if workdir is not None:
                check_claim(settings, place, {}, made_from_ends(settings, order))
            _check(runtime)
            if workdir is not None:
                found = inputs.contents_of(inputs.of_run(runtime))
                begun = place.exists() and bool(stage_folders(place))
                kept_inputs.compare(place, found, tracker.say, settings, begun)
            _show_stages(runtime, order, place)
            for sentence in runtime.tokenizer.template.differences():
                tracker.say(f"the chat template, as it is used here and exported: {sentence}")
            _show_memory(runtime)
            tracker.table("problems", ["task", "split", "source", "count"], table(settings, runtime.problems))
            for task in runtime.tasks:
                problems = _problems_of(runtime, task)
                for problem in problems[:SHOWN]:
                    _show_problem(runtime, problem)
                _try_reward(runtime, task, problems)
                _check_stops(runtime, task, problems)


def _show_settings(runtime: Runtime, config: ConfigDict, named: ConfigDict) -> None:
    typed = config_io.changes(named, config)
    if typed:
        runtime.tracker.say("\n  ".join(["changed here:", *typed]))
    own = config_io.changes(config_io.defaults(named), named)
    runtime.tracker.say("\n  ".join([f"{named.name}, where it differs from the defaults of docs/config.md:", *own]))


def _check(runtime: Runtime) -> None:
    """Raise ValueError for errors that the run would find after its settings: devices, weights, data, lengths."""
    _ = runtime.sampling_mesh
    if runtime.server is not None:
        runtime.tracker.say(f"engine: {runtime.config.engine.url} serves {runtime.server.model}")
    check_models(runtime)
    for name, stage in runtime.config.stages.items():
        too_long: list[alerts.Alert] = []
        if isinstance(stage, Sft):
            examples, _ = sft.examples(runtime, name, stage)
            sft.row_length(runtime, stage, examples)
            too_long = alerts.check_positions(runtime, pairs=examples)
            alerts.say(runtime, name, 0, alerts.scarce("sft", len(examples), stage.batch_size, stage.steps), [])
        elif isinstance(stage, Online):
            online.row_shape(runtime, stage)
            train_order(runtime.config, runtime.problems["train"], name)
            external = external_rollouts.external_batches(runtime, name, stage)
            if external is not None:
                unweighed = alerts.unweighed(external.without_logprobs, external.rows)
                alerts.say(runtime, name, 0, unweighed, [])
            too_long = online.positions_exceeded(runtime, stage, external)
            count = len(runtime.problems["train"])
            alerts.say(runtime, name, 0, alerts.scarce("online", count, stage.prompts_per_step, stage.steps), [])
        elif isinstance(stage, Collect) and stage.rollouts == "sample":
            too_long = alerts.check_positions(runtime, stage.sampling)
        elif isinstance(stage, Collect) and stage.rollouts not in ("archive", *runtime.config.stages):
            _, groups = external_rollouts.read_groups(runtime, stage.rollouts, stage.reward_column)
            rollouts = [row.rollout for rows in groups.values() for row in rows]
            too_long = alerts.check_positions(runtime, pairs=[(r.prompt_ids, r.token_ids) for r in rollouts])
        elif isinstance(stage, Offline):
            pairs = []
            if stage.preferences not in runtime.config.stages:
                pairs = offline.read(runtime, stage)
                _show_pair(runtime, name, pairs)
            too_long = offline.positions_exceeded(runtime, stage, pairs)
        elif isinstance(stage, Evaluate | BestCheckpoint):
            too_long = alerts.check_positions(runtime, stage.sampling)
        alerts.say(runtime, name, 0, too_long, [])
        if hasattr(stage, "sampling"):
            runtime.sampler()


def _show_stages(runtime: Runtime, order: Plan, place: epath.Path) -> None:
    stages = runtime.config.stages
    rows = []
    for name in order.order:
        policies = policies_read(stages[name])
        others = {*order.inputs[name]} - {policy.partition("@")[0] for policy in policies}
        rows.append([name, stages[name].kind, ", ".join([*policies, *sorted(others)])])
    runtime.tracker.table("stages", ["stage", "kind", "reads"], rows)
    if storage.is_local(place):
        parent = next(folder for folder in (place, *place.absolute().parents) if folder.exists())
        if not os.access(parent, os.W_OK):
            raise PermissionError(errno.EACCES, "cannot write in it", os.fspath(parent))
    trained, total = count_trained(runtime.model_config), count_params(runtime.model_config)
    parts = f", {trained:,} of them trained" if trained < total else ""
    runtime.tracker.say(f"model: {total:,} parameters{parts}; devices: {runtime.mesh.size}")


def _show_memory(runtime: Runtime) -> None:
    """Print the memory that each stage will need where the devices are this machine's processors."""
    if platform_of(runtime.mesh) != "cpu":
        return  # whose own `g2d plan` knows by compiling
    found, most = list(host_memory.estimates(runtime)), memory.limit()
    rows = [[estimate.stage, estimate.program, f"{estimate.size / memory.GIB:.1f}"] for estimate in found]
    runtime.tracker.table("host memory, estimated", ["stage", "fullest program", "GiB"], rows)
    if most is not None:
        runtime.tracker.say(f"this machine has {most / memory.GIB:.1f} GiB")
    largest = max((estimate.size for estimate in found), default=0)
    if most is not None and largest > most:
        runtime.tracker.say(
            f"warning: the run needs about {largest / memory.GIB:.1f} GiB of memory, and "
            f"{most / memory.GIB:.1f} are here: the system will end it. To try: lora.rank, a smaller "
            "compute.microbatch_tokens or compute.max_num_seqs, a smaller model, a larger machine"
        )


def _problems_of(runtime: Runtime, task: str) -> list[Problem]:
    """List the problems that a task is tried on: those of train, of test where there are none, else of dev."""
    for split in ("train", "test", "dev"):
        problems = [problem for problem in runtime.problems[split] if problem.task == task]
        if problems:
            return problems
    return []


def _show_problem(runtime: Runtime, problem: Problem) -> None:
    """Print the prompt as the model reads it, and the reference answer as it was parsed."""
    prompt = runtime.tokenizer.encode_prompt(problem)
    answer = "there is no reference answer" if problem.answer is None else f"reference answer: {problem.answer}"
    if problem.answer is not None and runtime.tasks[problem.task].reward.function == "verify":
        answer += f", read as {reading(problem.answer)}"
    task = f", task {problem.task}" if len(runtime.tasks) > 1 else ""
    lines = runtime.tokenizer.decode_raw(prompt).splitlines()
    runtime.tracker.say(
        "\n  | ".join([f"problem {problem.id}{task}, a prompt of {len(prompt)} tokens:", *lines]) + f"\n  {answer}"
    )


def _show_pair(runtime: Runtime, name: str, pairs: Sequence[Preference]) -> None:
    """Print the first pair of a set that was made elsewhere, as the policy reads it."""
    pair = pairs[0]
    lines = [f"{name}: {len(pairs)} pairs of {runtime.config.stage(name, Offline).preferences}; the first of them:"]
    for side, ids in (("prompt", pair.prompt_ids), ("chosen", pair.chosen_ids), ("rejected", pair.rejected_ids)):
        text = _shortened(runtime.tokenizer.decode_raw(ids))
        lines += [f"{side}, {len(ids)} tokens:", *(f"| {line}" for line in text.splitlines())]
    runtime.tracker.say("\n  ".join(lines))


def _shortened(text: str) -> str:
    """Return a long text without its middle: what a template puts around it stands at its ends."""
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN // 2]} … {text[-MOST_SHOWN // 2 :]}"


def _check_stops(runtime: Runtime, task: str, problems: Sequence[Problem]) -> None:
    """Warn of stop strings that would end a right response before its answer."""
    rule = runtime.tasks[task].reward.answers
    texts = [in_form(problem.answer, rule) for problem in problems if problem.answer is not None]
    texts += [problem.solution.strip() for problem in problems if problem.solution]
    texts += _worked_examples(runtime.tokenizer.settings.pattern, runtime.tokenizer.template.is_chat)
    for setting, string in stop_strings(runtime.config):
        where = f"warning: {setting} has {string!r}, which ends"
        ended = [text for text in texts if string in text]
        if ended:
            example = _shortened(ended[0])
            runtime.say_once(f"{where} {len(ended)} of {len(texts)} right responses early: {example!r}")
        elif not string.strip(" "):
            spaces = "space" if string == " " else f"{len(string)} spaces in a row"
            runtime.say_once(f"{where} a response at its first {spaces}")


def _worked_examples(pattern: str, is_chat: bool) -> list[str]:
    """List the responses of a prompt template's worked examples: what follows their problem as the response follows it.

    They are told by what stands before {problem} on its line, "Problem: " say; none where nothing does. Where nothing
    follows {problem} an example's problem ends with its line; without a chat template, which ends a message of its own,
    the response then begins with that line's break.
    """
    before, _, after = pattern.partition(PLACEHOLDER)
    label = before.rpartition("\n")[2]
    if not label.strip():
        return []
    ends_with_problem = not after.strip(" ")
    separator = "\n" if ends_with_problem else after
    blocks = f"\n{before}".split(f"\n{label}")[1:-1]
    responses = [block.partition(separator)[2].strip() for block in blocks]
    begin = "\n" if ends_with_problem and not is_chat else ""
    return [begin + response for response in responses if response]


def _try_reward(runtime: Runtime, task: str, problems: Sequence[Problem]) -> None:
    """Score the reference answer, and that of another problem, as the prompt asks for answers.

    Where it asks for none, or for a form that the rule of reward.answers does not read, in the form of the rule; such a
    form is tried beside it, and warned of.
    """
    reward = runtime.tasks[task].reward
    if why := _NOT_TRIED.get(reward.function, "" if problems else "there is no problem"):
        runtime.tracker.say(f"the reward of {task} is not tried: {why}")
        return
    asked = asked_for(_instruction(runtime, problems[0]))
    read = [form for form in asked if form.is_read_by(reward.answers)]
    by_rule = reward.function == "verify" or reward.answers != "boxed"  # a function of one's own may read anything
    chosen = (read if by_rule else asked)[:1]
    answers = list(dict.fromkeys(problem.answer for problem in problems if problem.answer is not None))
    tried: list[tuple[Problem, str, str]] = []
    for problem in problems[:SHOWN]:
        wrong = next((answer for answer in answers if answer != problem.answer), f"{problem.answer}1")
        for kind, answer in (("right", problem.answer or ""), ("wrong", wrong)):
            tried.append((problem, kind, chosen[0].write(answer) if chosen else in_form(answer, reward.answers)))
        if asked and not chosen:
            tried.append((problem, "right, as asked", asked[0].write(problem.answer or "")))
    texts = [text for _, _, text in tried]
    tried_problems = [problem for problem, _, _ in tried]
    scores = runtime.scorer.apart(tried_problems, texts, [np.zeros(1, np.int32)] * len(texts))
    rows = [
        [problem.id, "" if problem.answer is None else kind, text, score.reward, score.verdict.value]
        for (problem, kind, text), score in zip(tried, scores, strict=True)
    ]
    if asked and by_rule and not read:
        _warn_of_form(runtime, task, asked[0])
    title = f"the reward of {task}, tried; answers are read by the rule {reward.answers!r}"
    runtime.tracker.table(title, ["problem", "", "response", "reward", "verdict"], rows)
    rewards: dict[str, dict[str, float]] = {}
    for (problem, kind, _), score in zip(tried, scores, strict=True):
        rewards.setdefault(problem.id, {})[kind] = score.reward or 0.0
    alike = [
        problem.id
        for problem in problems[:SHOWN]
        if problem.answer is not None and not rewards[problem.id]["right"] > rewards[problem.id]["wrong"]
    ]
    if alike and runtime.verifiable[task]:
        form = chosen[0].write("") if chosen else in_form("", reward.answers)
        runtime.tracker.say(
            f"warning: the reference answer of {' and '.join(alike)} gets no more, in {form.strip()}, "
            "than a wrong one: look at it as it was parsed, and at how the reward reads responses"
        )


def _instruction(runtime: Runtime, problem: Problem) -> str:
    """Return what stands around a problem in its prompt, or a conversation's messages: there a form is asked for.

    A problem's own text asks for none: it may hold anything.
    """
    settings = runtime.tokenizer.settings
    if isinstance(problem.prompt, str):
        return f"{settings.system or ''}\n{settings.pattern.replace(PLACEHOLDER, '')}"
    return "\n".join([settings.system or "", *(message["content"] for message in problem.prompt)])


def _warn_of_form(runtime: Runtime, task: str, asked: Form) -> None:
    """Warn that the prompt asks for a form of answers that the task's rule does not read."""
    rule, rules = runtime.tasks[task].reward.answers, " or ".join(map(repr, readers(asked)))
    runtime.tracker.say(
        f"warning: the prompt asks for {asked.write('x')}, where {task} reads answers by the rule {rule!r}, by which "
        f"that is none: let tokenizer.prompt_template, or the data's prompts, ask for {in_form('x', rule)}, or set "
        f"reward.answers={rules}"
    )
