"""All errors and warnings about the settings of a run, in one list.

    issues(config) ─► [Issue("error", "stages.warmup.steps", "must be at least 0, got -1"), …]

Fields check their types and bounds (section.py). The `issues` of each section report conflicting
settings, and graph.py reports inputs that stages cannot read. Nothing here needs JAX, a model or
the network.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from ml_collections import ConfigDict

from g2d_jax.config.graph import plan
from g2d_jax.config.section import Invalid, Issue, Section, error
from g2d_jax.config.settings import Config, setting_of
from g2d_jax.config.stages.stage import Stage


def issues(config: ConfigDict | Config, until: str | None = None) -> tuple[Config, list[Issue]]:
    """Return the settings as records, and all errors and warnings about them.

    until: the stage to stop after, None for all. An issue that only follows from another is left
    out: a conflict counts if it holds for two valid values in place of a wrong one.
    """
    if isinstance(config, Config):
        run, (found, rules) = config, _look(config, until)
        return run, [*found, *rules]
    wrong: list[Issue] = []
    run = Config.read(config, wrong)
    found, rules = _look(run, until)
    if wrong:
        others = {issue.path for issue in _look(Config.read(config, [], other=True), until)[1]}
        rules = [issue for issue in rules if issue.path in others]
    return run, [*wrong, *found, *rules]


def _look(run: Config, until: str | None) -> tuple[list[Issue], list[Issue]]:
    """Return unreadable inputs of stages, and conflicting settings."""
    found: list[Issue] = []
    try:
        order = plan(run).order
        if until is not None and until not in order:
            found.append(
                error(f"--until={until}", "names no stage", f"the stages are {', '.join(order)}")
            )
    except Invalid as invalid:
        found += invalid.issues
    reading = {".".join(issue.path.split(".")[:2]) for issue in found}
    if "stages" in reading:  # no stages, or a cycle
        return found, []
    needs = (_needs(name, stage) for name, stage in run.stages.items())
    rules = [*_of(run, "", run), *_missing_problems(run), *itertools.chain.from_iterable(needs)]
    silent = {f"{path}.{field}" for path in reading for field in _READING}
    return found, [issue for issue in rules if issue.path not in silent]


_READING = ("policy", "policies", "rollouts", "preferences", "steps", "select")
"""The fields of a stage whose rules depend on its inputs."""


def checked(config: ConfigDict | Config, until: str | None = None) -> Config:
    """Return the settings as records. Raises Invalid with all errors."""
    run, found = issues(config, until)
    refuse(found)
    return run


def refuse(found: Iterable[Issue]) -> None:
    """Raise Invalid with all errors in `found`, if there are any."""
    errors = [issue for issue in found if issue.level == "error"]
    if errors:
        raise Invalid(errors)


def _of(section: Section, path: str, run: Config) -> Iterator[Issue]:
    """Yield the issues of a section and its nested sections, with full paths. path: the
    section's."""
    for issue in section.issues(run):
        yield replace(issue, path=f"{path}.{issue.path}".strip("."))
    for name in section.hints():
        value = getattr(section, name)
        items = value if isinstance(value, Mapping) else {"": value}
        for key, item in items.items():
            if isinstance(item, Section):
                yield from _of(item, f"{path}.{name}.{key}".strip("."), run)


def _needs(name: str, stage: Stage) -> Iterator[Issue]:
    """Yield an error if a stage needs examples and no setting names them."""
    if stage.examples_path() == "":
        yield error(f"stages.{name}.data.path", "is not set", f"set it{_SOURCES}")


_SOURCES = " to a file or hub:owner/name; in a config file use settings.source(…)"


def _missing_problems(run: Config) -> Iterator[Issue]:
    """Yield splits that stages need and no setting names, and tasks of a mixed run without training
    problems. Only some of the tasks need held-out problems."""
    for split in ("train", "dev", "test"):
        readers = [name for name, stage in run.stages.items() if split in stage.splits_read()]
        without = [name for name, task in run.all_tasks.items() if not getattr(task, split).path]
        needed = f"is not set, and stages need {split} problems: {', '.join(readers)}"
        settings = [f"{setting_of(name, split)}.path" for name in without]
        if readers and len(without) == len(run.all_tasks):
            others = [f"or {setting}" for setting in settings[1:]]
            yield error(settings[0], needed, " ".join(["set it", *others]) + _SOURCES)
            continue
        for name, setting in zip(without, settings, strict=True):
            if readers and split == "train" and run.all_tasks[name].weight:
                weight = setting_of(name, "weight")
                yield error(setting, needed, f"set it{_SOURCES}, or {weight} to 0")
