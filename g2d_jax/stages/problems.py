"""The problems of a run: read, filtered, kept apart by split, and the order in which stages draw from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from g2d_jax import keys
from g2d_jax.config import Config, Source, Task
from g2d_jax.data.order import Mixture, Order
from g2d_jax.data.problems import LoadReport, load_problems
from g2d_jax.data.splits import drop_overlap
from g2d_jax.data.tokenizer import PromptTokenizer
from g2d_jax.records import Problem
from g2d_jax.runtime import processes, storage

Say = Callable[[str], None]
Splits = dict[str, list[Problem]]
"""Problems by split: "train", "dev" and "test"."""


SPLITS = ("train", "dev", "test")
READ_FOR = {"test": ("test",), "dev": ("dev", "test"), "train": SPLITS}
"""Split -> those that have to be read for it: it goes without the problems that are in the others."""


def load(
    config: Config, tokenizer: PromptTokenizer, own_reward: bool, say: Say, splits: Collection[str] = SPLITS
) -> Splits:
    """Read the problems of all tasks, one task after the other, by split.

    train is without those of dev and test, dev without those of test, and none has too long a prompt. own_reward:
    whether the task "main" is scored by a function given from Python, so that its problems need no answer.
    splits: those to read. The others have none, and so has a split where no source is named.
    Raises ValueError where sources come to none, and where processes read different ones.
    """
    loaded: Splits = {"train": [], "dev": [], "test": []}
    for name, task in config.all_tasks.items():
        for split, problems in _of_task(config, name, task, tokenizer, own_reward, say, splits).items():
            earlier_ids = {problem.id for problem in loaded[split]}
            new = [problem for problem in problems if problem.id not in earlier_ids]
            if dropped := len(problems) - len(new):
                say(f"{name}, {split}: {dropped} problems dropped that another task has too")
            loaded[split] += new
    for split, others in (("dev", ("test",)), ("train", ("dev", "test"))):
        count = len(loaded[split])
        loaded[split], overlap = drop_overlap(loaded[split], [p for other in others for p in loaded[other]])
        if count and not loaded[split]:
            raise ValueError(
                f"data.{split} has no problem left: all {count} occur in "
                f"{' or '.join(f'data.{other}' for other in others)}. Give data.{split} other problems; dev may be "
                "a part held out from the training problems"
            )
        if overlap:
            say(f"{split}: {overlap} problems dropped that occur in {' or '.join(others)}")
    for split, problems in loaded.items():
        is_named = any(getattr(task, split).path for task in config.all_tasks.values())
        if not problems and is_named and split in splits:
            raise ValueError(f"data.{split} has no problem left after filtering; see the messages above")
    ids = {split: [problem.id for problem in problems] for split, problems in loaded.items()}
    processes.agreed("problems", storage.fingerprint(ids))
    return loaded


def _of_task(
    config: Config,
    name: str,
    task: Task,
    tokenizer: PromptTokenizer,
    own_reward: bool,
    say: Say,
    splits: Collection[str],
) -> Splits:
    prefix, longest = "" if name == "main" else f"{name}, ", config.data.max_prompt_length
    verified = task.reward.function == "verify" and not (own_reward and name == "main")
    loaded: Splits = {}
    for split, source in (("train", task.train), ("dev", task.dev), ("test", task.test)):
        if not source.path or split not in splits:
            continue
        problems = _read(source, config.data.seed, f"{prefix}{split}", verified, say)
        short, dropped = tokenizer.drop_too_long(problems, longest)
        loaded[split] = [replace(problem, task=name) for problem in short]
        if dropped:
            say(f"{prefix}{split}: {dropped} prompts longer than {longest} tokens dropped")
    return loaded


def _read(source: Source, seed: int, label: str, verified: bool, say: Say) -> list[Problem]:
    """Read a source; without problems that lack a reference answer where `verified`."""
    problems, report = load_problems(source, seed)
    _warn(label, report, say)
    if not verified:
        return problems
    answered = [problem for problem in problems if problem.answer is not None]
    if dropped := len(problems) - len(answered):
        say(f"{label}: {dropped} problems without a reference answer dropped")
    return answered


def _warn(label: str, report: LoadReport, say: Say) -> None:
    for name in ("duplicates", "conflicts", "broken"):
        if getattr(report, name):
            say(f"{label}: {getattr(report, name)} rows of {report.source} are {name}")
    if report.filtered:
        listed = ", ".join(f"{count} {reason}" for reason, count in report.filtered.items())
        say(f"{label}: rows of {report.source} left out: {listed}")


def order(config: Config, count: int, purpose: str) -> Order:
    """Return the order in which a stage draws from `count` records."""
    low, _ = keys.key_data(config.seed, "order", purpose)
    return Order(count, int(low))


def train_order(config: Config, train: Sequence[Problem], purpose: str) -> Order | Mixture:
    """Return the order in which a stage draws from the training problems: tasks mixed by their weights.

    Raises ValueError for a task with a weight and without problems.
    """
    tasks, counts = config.all_tasks, Counter(problem.task for problem in train)
    if len(tasks) == 1:
        return order(config, counts["main"], purpose)
    if empty := [name for name, task in tasks.items() if task.weight and not counts[name]]:
        raise ValueError(f"task {empty[0]!r} has no training problem left: see the messages above, or set its weight 0")
    low, _ = keys.key_data(config.seed, "order", purpose)
    return Mixture([counts[name] for name in tasks], [task.weight for task in tasks.values()], int(low))
