"""The problems of a run: reading, filtering, separate splits, and the order in which stages
draw."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from g2d_jax.config import Config, Invalid, Issue, Reward, Source, Task, setting_of
from g2d_jax.config.section import faults, warning
from g2d_jax.data.fields import THOUGHTS
from g2d_jax.data.order import Mixture, Order
from g2d_jax.data.problems import FIELDS, LoadReport, load_problems
from g2d_jax.data.splits import Names, drop_overlap, names_of
from g2d_jax.data.template import Template
from g2d_jax.data.tokenizer import PromptTokenizer
from g2d_jax.records import Problem, Prompt, by_id, indices_by_task
from g2d_jax.runtime import keys, processes
from g2d_jax.runtime.terminal import counted

Say = Callable[[str], None]
Splits = dict[str, list[Problem]]
"""Problems by split: "train", "dev" and "test"."""
Unreadable = Callable[[Sequence[Problem]], Collection[str]]
"""Problems that the verifier grades -> ids of those whose reference answer it cannot read."""

SPLITS = ("train", "dev", "test")
READ_FOR = {"test": ("test",), "dev": ("dev", "test"), "train": SPLITS}
"""Split -> splits that must be read for it: it leaves out the problems of the others."""
NO_COLUMN = (
    f"none was found in {', '.join(FIELDS['answer'])} or a solution; fields={{'answer': NAME}} names "
    "another column"
)
SHOWN = 10  # reference answers that a message shows
MOST_SHOWN = 40  # characters of each


@dataclass(frozen=True, eq=False)
class Problems:
    """The problems of a run.

    by_split: those in use. left_out: those removed from each split because the verifier cannot read
    their reference answers. issues: warnings of these. conversation: of a prompt, see `names_of`.
    counts: problems of each split. prompt_lengths, mean_prompt: tokens of each problem's prompt,
    and their mean.
    """

    by_split: Splits
    left_out: Splits
    issues: list[Issue]
    conversation: Callable[[Prompt], Prompt]
    counts: Mapping[str, int]
    prompt_lengths: tuple[int, ...]
    mean_prompt: float

    @property
    def train(self) -> list[Problem]:
        """The training problems."""
        return self.by_split["train"]

    @cached_property
    def train_by_id(self) -> dict[str, Problem]:
        """The training problems by id."""
        return by_id(self.train)

    @cached_property
    def held_out(self) -> list[Problem]:
        """The problems of dev and test, those left out included: no stage may train on them."""
        return joined(self.by_split, ("dev", "test")) + joined(self.left_out, ("dev", "test"))

    @cached_property
    def held_out_names(self) -> Names:
        """The ids under which a prompt of `held_out` may occur."""
        return names_of(self.held_out, self.conversation)


def joined(splits: Splits, names: Iterable[str] = SPLITS) -> list[Problem]:
    """List the problems of some splits, split after split."""
    return list(itertools.chain.from_iterable(splits[name] for name in names))


def ids_of(problems: Iterable[Problem]) -> list[str]:
    """List the ids of problems."""
    return [problem.id for problem in problems]


def load(
    config: Config,
    tokenizer: PromptTokenizer,
    own_reward: bool,
    say: Say,
    splits: Collection[str] = SPLITS,
    unreadable: Unreadable | None = None,
) -> Problems:
    """Read the problems of all tasks, one task after the other.

    train excludes problems of dev and test; dev excludes those of test. Prompts that are too long
    are dropped, and reference answers that the verifier cannot read. own_reward: whether a function
    from Python scores the task "main", whose problems then need no answer. splits: those to read;
    the others stay empty, and so does one without a source. unreadable: None checks no answers.
    Raises ValueError if a source has no problem left, or processes read different ones.
    """
    loaded: Splits = {"train": [], "dev": [], "test": []}
    logged: list[str] = []

    def log(text: str) -> None:
        logged.append(text)
        say(text)

    with processes.barrier():
        read, wrong = _read(config, tokenizer, own_reward, log, splits)
        if wrong:
            raise Invalid(wrong)
    longest = config.data.max_prompt_length
    for name, found in read.items():
        for split, whole in found.items():
            problems, too_long = tokenizer.drop_too_long(whole, longest)
            if too_long:
                limit = f"{longest} tokens (data.max_prompt_length)"
                log(
                    f"{setting_of(name, split)}: {counted(too_long, 'prompt')} of over {limit} dropped"
                )
            earlier = set(ids_of(loaded[split]))
            new = [problem for problem in problems if problem.id not in earlier]
            dropped = len(problems) - len(new)
            if dropped:
                say(f"{name}, {split}: {counted(dropped, 'problem')} dropped: also in another task")
            loaded[split] += new
    _keep_apart(loaded, tokenizer, say)
    # Last, so that the verifier does not decide which problems a policy may train on.
    left_out, issues = _leave_out(config, loaded, own_reward, unreadable)
    for name, found in read.items():
        for split in found:
            if not any(problem.task == name for problem in loaded[split]):
                setting = setting_of(name, split)
                why = [text for text in [*logged, *map(str, issues)] if text.startswith(setting)]
                reason = "; ".join(why) or "a part of few problems may be empty, so give more"
                raise ValueError(f"{setting} has no problem left: {reason}")
    counts = {split: len(problems) for split, problems in loaded.items()}
    lengths = tuple(len(tokenizer.encode_prompt(problem)) for problem in joined(loaded))
    mean = float(np.mean(lengths or (longest,)))
    return Problems(loaded, left_out, issues, tokenizer.conversation, counts, lengths, mean)


def _keep_apart(loaded: Splits, tokenizer: PromptTokenizer, say: Say) -> None:
    """Drop the problems of dev that are in test, and those of train that are in either. Raises
    ValueError if none is left."""
    for split, others in (("dev", ("test",)), ("train", ("dev", "test"))):
        count = len(loaded[split])
        names = names_of(joined(loaded, others), tokenizer.conversation)
        loaded[split], overlap = drop_overlap(loaded[split], names)
        if count and not loaded[split]:
            raise ValueError(
                f"data.{split} has no problem left: all {count} occur in "
                f"{' or '.join(f'data.{other}' for other in others)}. Give data.{split} other "
                'problems, or divide one file: data.train.split="train", data.dev.split="dev", '
                'data.test.split="test"'
            )
        if overlap:
            say(f"{split}: {counted(overlap, 'problem')} dropped: also in {' or '.join(others)}")


def _leave_out(
    config: Config, loaded: Splits, own_reward: bool, unreadable: Unreadable | None
) -> tuple[Splits, list[Issue]]:
    """Remove problems whose reference answer the verifier cannot read; return them, and
    warnings."""
    graded = set()
    for name, reward in config.rewards.items():
        if reading(reward, own_reward and name == "main").verified:
            graded.add(name)
    ids: Collection[str] = ()
    if graded and unreadable is not None:
        ids = unreadable([problem for problem in joined(loaded) if problem.task in graded])
    left_out: Splits = {}
    found: list[Issue] = []
    for split, problems in loaded.items():
        left_out[split] = [problem for problem in problems if problem.id in ids]
        loaded[split] = [problem for problem in problems if problem.id not in ids]
        if left_out[split]:
            count = sum(problem.task in graded for problem in problems)
            found.append(_unread(split, left_out[split], count))
    return left_out, found


def _unread(split: str, unread: Sequence[Problem], of: int) -> Issue:
    """Warn of the reference answers of a split that the verifier cannot read, with the first
    ones."""
    first = ", ".join(
        f"{problem.answer!r:.{MOST_SHOWN}} (problem {problem.id})" for problem in unread[:SHOWN]
    )
    text = (
        f"has {len(unread):,} of {of:,} reference answers that the verifier cannot read, so their "
        f"problems are left out: {first}"
    )
    remedy = "give other answers, another column (fields), or a reward function of your own"
    return warning(f"data.{split}", text, remedy)


class Reading(NamedTuple):
    """The data that a reward needs. verified: an answer to every problem, for the verifier.
    columns: all columns."""

    verified: bool
    columns: bool


def reading(reward: Reward, own: bool = False) -> Reading:
    """Return the data that a task's reward needs. own: whether a function from Python replaces
    it."""
    return Reading(reward.function == "verify" and not own, bool(reward.user_functions) or own)


def _read(
    config: Config,
    tokenizer: PromptTokenizer,
    own_reward: bool,
    say: Say,
    splits: Collection[str],
) -> tuple[dict[str, Splits], list[Issue]]:
    """Read the sources of all tasks; return the problems by task and split, and the sources that
    cannot be read."""
    read: dict[str, Splits] = {}
    wrong: list[Issue] = []

    def of_source(name: str, split: str, task: Task) -> None:
        label = setting_of(name, split)
        how = reading(task.reward, own_reward and name == "main")
        source: Source = getattr(task, split)
        problems, report = load_problems(source, verified=how.verified)
        tell(label, report, say, tokenizer.template)
        if how.verified:
            problems = _answered(problems, label, say)
        without = sum(problem.answer is None for problem in problems)
        if without and how.columns:
            hint = f"; {NO_COLUMN}" * (without == len(problems))
            say(
                f"{label}: {without} of {len(problems)} problems have no reference answer: a reward "
                f"function gets None for them{hint}"
            )
        read.setdefault(name, {})[split] = [replace(problem, task=name) for problem in problems]

    for name, task in config.all_tasks.items():
        for split in SPLITS:
            if getattr(task, split).path and split in splits:
                wrong += faults(setting_of(name, split), partial(of_source, name, split, task))
    return read, wrong


def _answered(problems: list[Problem], label: str, say: Say) -> list[Problem]:
    """Return the problems that have a reference answer."""
    answered = [problem for problem in problems if problem.answer is not None]
    dropped = len(problems) - len(answered)
    if dropped:
        hint = "" if answered else f": {NO_COLUMN}"
        say(f"{label}: {counted(dropped, 'problem')} without a reference answer dropped{hint}")
    return answered


def tell(label: str, report: LoadReport, say: Say, template: Template) -> None:
    """Print which rows of a source are not used, and unused keys of its messages. label: of the
    source.

    Raises ValueError for thoughts that the chat template does not write.
    """
    rows = f"rows of {report.source}"
    if report.duplicates:
        say(f"{label}: {counted(report.duplicates, 'duplicate row')} of {report.source} dropped")
    if report.conflicts:
        say(
            f"WARNING: {label}: {report.conflicts} of the duplicates have another answer than the "
            "first row of their problem, which is kept"
        )
    if report.left_out:
        say(f"{label}: {rows} left out: {report.left_out}")
    if report.holes:
        listed = ", ".join(f"{count} have {hole}" for hole, count in report.holes.items())
        say(f"{label}: {rows} with a placeholder for a missing answer: {listed}")
    thoughts, unread = [], []
    for key, count in sorted(report.keys.items()):
        text = f"{count} have {key!r} (the first: {report.firsts[key]})"
        if key in THOUGHTS:
            thoughts.append(text)
        else:
            unread.append(text)
    if thoughts:
        template.require_thoughts(f"{label}: {rows} with thoughts: {', '.join(thoughts)}")
        say(
            f"{label}: {rows} with thoughts, written in <think> and </think>: {', '.join(thoughts)}"
        )
    if unread:
        say(f"{label}: {rows} whose messages have keys that are not read: {', '.join(unread)}")


def table(config: Config, loaded: Splits) -> list[list[str | int]]:
    """Return a row for each split of each task: task, split, the source of its problems ("none"),
    and their number."""
    by_task = {split: indices_by_task(problems) for split, problems in loaded.items()}
    rows: list[list[str | int]] = []
    for (name, task), split in itertools.product(config.all_tasks.items(), SPLITS):
        rows.append(
            [name, split, described(getattr(task, split)), len(by_task[split].get(name, ()))]
        )
    return rows


def described(source: Source) -> str:
    """Describe a source in a line, "none" for one without a path."""
    if not source.path:
        return "none"
    parts = [source.path]
    if source.revision is not None:
        parts.append(f"revision {source.revision}")
    if source.split:
        parts.append(f"its {source.split} part")
    if source.limit is not None:
        parts.append(f"the first {source.limit:,}")
    return ", ".join(parts)


def order(config: Config, count: int, purpose: str) -> Order:
    """Return the order in which a stage draws from `count` records."""
    low, _ = keys.key_data(config.seed, "order", purpose)
    return Order(count, int(low))


def count_drawn(config: Config, train: Sequence[Problem]) -> int:
    """Count the training problems of tasks with a weight."""
    tasks = config.all_tasks
    return sum(tasks[problem.task].weight > 0 for problem in train)


def train_order(config: Config, train: Sequence[Problem], purpose: str) -> Order | Mixture:
    """Return the order in which a stage draws from the training problems: tasks mixed by their
    weights."""
    tasks, counts = config.all_tasks, Counter(problem.task for problem in train)
    if len(tasks) == 1:
        return order(config, counts["main"], purpose)
    low, _ = keys.key_data(config.seed, "order", purpose)
    return Mixture(
        [counts[name] for name in tasks], [task.weight for task in tasks.values()], int(low)
    )
