"""All that is wrong with the settings of a run, in one list.

    issues(config) ─► [Issue("error", "stages.warmup.steps", "must be at least 0, got -1"), …]

Types and bounds are those of the fields (section.py). What does not go together says `issues` of
each section, what stages cannot read graph.py. Nothing here needs JAX, a model or the network.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping

from ml_collections import ConfigDict

from g2d_jax.config import places
from g2d_jax.config.graph import plan
from g2d_jax.config.section import Invalid, Issue, Section, error
from g2d_jax.config.settings import Config, setting_of
from g2d_jax.config.stages.stage import Stage


def issues(config: ConfigDict | Config, until: str | None = None) -> tuple[Config, list[Issue]]:
    """Return the settings as records, and all that is wrong with them.

    until: the stage to stop after, None for all. An issue that may follow from another is left out:
    one of the same section that mentions a setting with a wrong value, or what a stage reads.
    """
    found: list[Issue] = []
    run = config if isinstance(config, Config) else Config.read(config, found)
    wrong = [(_home(issue.path), issue.path.rpartition(".")[2]) for issue in found]
    try:
        order = plan(run).order
        if until is not None and until not in order:
            found.append(
                error(f"--until={until}", "names no stage", f"the stages are {', '.join(order)}")
            )
    except Invalid as invalid:
        found += invalid.issues
        for issue in invalid.issues:
            wrong += [(issue.path, word) for word in ("policy", "rollouts", "steps")]
    if ("stages", "policy") in wrong:  # without stages, or in a circle
        return run, found
    needs = (_needs(name, stage, run) for name, stage in run.stages.items())
    for issue in itertools.chain(_of(run, "", run), _missing_problems(run), *needs):
        mentioned = {(_home(issue.path), word) for word in re.findall(r"\w+", str(issue))}
        if mentioned.isdisjoint(wrong):
            found.append(issue)
    return run, found


def checked(config: ConfigDict | Config, until: str | None = None) -> Config:
    """Return the settings as records. Raises Invalid with all errors among the issues."""
    run, found = issues(config, until)
    errors = [issue for issue in found if issue.level == "error"]
    if errors:
        raise Invalid(errors)
    return run


def _of(section: Section, at: str, run: Config) -> Iterator[Issue]:
    """Yield the issues of a section and of all within it. at: as of `Section.issues`."""
    yield from section.issues(at, run)
    for name in section.hints():
        value = getattr(section, name)
        items = value if isinstance(value, Mapping) else {"": value}
        for key, item in items.items():
            if isinstance(item, Section):
                yield from _of(item, f"{at}{name}.{key}".rstrip(".") + ".", run)


def _needs(name: str, stage: Stage, run: Config) -> Iterator[Issue]:
    """Yield examples and files that a stage needs and that are not there."""
    at = f"stages.{name}"
    if stage.examples_path() == "":
        yield error(f"{at}.data.path", "is not set", f"set it{_SOURCES}")
    for needed in stage.files_read(run.stages):
        try:
            places.data_files(needed.path)
        except ValueError as fault:
            shown = places.shown(needed.path)
            reason = str(fault).replace(needed.path, shown, 1)
            yield error(f"{at}.{needed.field}", needed.refusal.format(place=shown, error=reason))


_SOURCES = " to a file or hub:owner/name; in a config file with settings.source(…)"


def _missing_problems(run: Config) -> Iterator[Issue]:
    """Yield splits that stages need and no setting names, and tasks of a mixed run without training
    problems. Held-out problems may be of some of the tasks only."""
    for split in ("train", "dev", "test"):
        readers = [name for name, stage in run.stages.items() if split in stage.splits_read()]
        without = [name for name, task in run.all_tasks.items() if not getattr(task, split).path]
        needed = f"is not set, and problems of {split} are needed by {', '.join(readers)}"
        settings = [f"{setting_of(name, split)}.path" for name in without]
        if readers and len(without) == len(run.all_tasks):
            others = [f"or {setting}" for setting in settings[1:]]
            yield error(settings[0], needed, " ".join(["set it", *others]) + _SOURCES)
            continue
        for name, setting in zip(without, settings, strict=True):
            if readers and split == "train" and run.all_tasks[name].weight:
                weight = setting_of(name, "weight")
                yield error(setting, needed, f"set it{_SOURCES}, or {weight} to 0")


def _home(path: str) -> str:
    """Return the section that a path belongs to: "stages.warmup", "lora"."""
    parts = path.split(".")
    return ".".join(parts[: 2 if parts[0] in ("stages", "tasks") else 1])
