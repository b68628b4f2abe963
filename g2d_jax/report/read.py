"""Read finished work directories: a run, a study's directory, or runs side by side.

read_run ─► Run ─► Policy ─► Row, its seeds ─► Group, its K ─► Study ◄─ read_study, read_comparison
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

import numpy as np
from etils import epath

from g2d_jax import accounting
from g2d_jax.config.io import differences, identity
from g2d_jax.report.format import policy_name, setting
from g2d_jax.report.policies import Policy
from g2d_jax.report.rows import SAMPLING, Group, Side, Study, policies_of, rows_of
from g2d_jax.report.runs import EVALUATE, ONLINE, Run, Stage, read_answers, read_optional
from g2d_jax.runtime.storage import PathLike, read_finished, read_json
from g2d_jax.study.pricing import Rates
from g2d_jax.workdir import FROM_PYTHON, PLANS, absolute, no_run, stage_folders

if TYPE_CHECKING:
    import pandas as pd

UNFINISHED, UNTESTED = "not finished", "not evaluated on test"
"""Why a point is left out of a study."""

SHARED = "evaluated once for several of these runs, and listed with the first of them"
"""Why a policy of a run is left out of a study whose arms are runs."""

WARMUP = "warm-up (GRPO goes on)"
"""The name of `Study.warmups`."""


def read_run(
    workdir: PathLike,
    answers: Callable[[epath.Path], pd.DataFrame] | None = None,
    rates: Rates | None = None,
    *,
    lenient: bool = False,
    ending: str = "",
) -> Run:
    """Read config and manifests; all else is read when it is asked for. What is not written yet is
    empty.

    answers: `Run.answers`, shared by the points of a study, which share evaluations. rates:
    `Run.rates`.
    lenient: read a damaged manifest as if its stage had not finished, see `Run.left_out`. ending:
    `Run.ending`.
    Raises ValueError if there is no such folder, it holds nothing of a run, or a file is damaged.
    """
    root = epath.Path(workdir)
    try:
        folders = stage_folders(root)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise no_run(root) from error
    config = read_optional(root / "config.json").get("config", {})
    if not config and not folders:
        raise no_run(root)
    sections = config.get("stages", {})
    stages, left_out = {}, []
    for name, folder in folders.items():
        manifest, damage = read_finished(folder)
        if damage and not lenient:
            raise ValueError(damage)
        if damage:
            left_out.append(f"{name} is left out: {damage}")
        stages[name] = Stage(folder, name, sections.get(name, {}), manifest or {})
    cached = answers or functools.cache(read_answers)
    return Run(root, config, stages, cached, rates, left_out, ending)


def studies(workdir: PathLike) -> list[str]:
    """List the names of the studies in a directory, [] if it is none of studies."""
    return sorted(path.stem for path in (absolute(workdir) / PLANS).glob("*.json"))


Seeds = Mapping[int | None, Sequence[Policy]]
"""K, None where it does not vary -> policies that differ in their seed alone."""


def read_study(workdir: PathLike, name: str, rates: Rates | None = None) -> Study:
    """Read a study, finished or not. rates: those at which its tokens are priced.

    Raises ValueError if the directory has none of that name, a file is damaged, or points that
    differ in their seed alone were tested on different problems.
    """
    root = absolute(workdir)
    there = studies(root)
    if name not in there:
        raise ValueError(f"{root} holds no study {name!r}; there are: {', '.join(there) or 'none'}")
    plan = read_json(root / PLANS / f"{name}.json")
    answers = functools.cache(read_answers)
    left_out = {}
    arms: dict[tuple[str, tuple[tuple[str, str], ...]], dict[int | None, list[Policy]]] = {}
    follows = _follows(plan["points"])
    for point in plan["points"]:
        run = read_run(root / "points" / name / point["label"], answers, rates)
        policy = _last_evaluated(run)
        if policy is None or not policy.result("test"):
            left_out[point["label"]] = UNFINISHED if policy is None else UNTESTED
            continue
        steps = _steps_fields(point["values"], run)
        k = None
        if steps:
            k = int(point["values"][steps[0]])
        values = []
        for field, text in point["values"].items():
            if field not in steps or not follows(point["arm"], steps[0], field):
                values.append((field, text))
        by_steps = arms.setdefault((point["arm"], tuple(values)), {})
        by_steps.setdefault(k, []).append(policy)
    groups = [_group(arm, dict(values), by_steps) for (arm, values), by_steps in arms.items()]
    return Study(root, name, groups, left_out, plan["config"], _warmups(groups), rates)


def _last_evaluated(run: Run) -> Policy | None:
    """Return the policy a point is about; None until its evaluations, and all they rest on, are
    finished.

    So points of K = 0 do not wait for a warm-up.
    """
    evaluated: list[str] = []
    needed: set[str] = set()
    for name, section in run.sections.items():
        if section["kind"] == EVALUATE:
            needed.add(name)
            evaluated += section["policies"]
    for policy in evaluated:
        needed.update(accounting.behind(policy, run.sections))
    if not evaluated or not needed <= run.manifests.keys():
        return None
    return Policy(run, evaluated[-1])


def _follows(points: Sequence[Mapping[str, Any]]) -> Callable[[str, str, str], bool]:
    """Make the test whether, in an arm, one field's value decides another's, as it does of fields
    that are zipped."""

    @functools.cache
    def follows(arm: str, field: str, other: str) -> bool:
        decided: dict[str, str] = {}
        for point in points:
            values = point["values"]
            if point["arm"] != arm or field not in values or other not in values:
                continue
            if decided.setdefault(values[field], values[other]) != values[other]:
                return False
        return True

    return follows


def _steps_fields(values: Mapping[str, str], run: Run) -> list[str]:
    """List the fields that are steps of online stages, in the order of the stages: the first is
    K."""
    fields = []
    for name in run.stages:
        is_online = run.sections.get(name, {}).get("kind") == ONLINE
        if is_online and f"stages.{name}.steps" in values:
            fields.append(f"stages.{name}.steps")
    return fields


def _group(arm: str, values: Mapping[str, str], by_steps: Seeds) -> Group:
    group = Group(arm, values)
    for k in sorted(by_steps, key=lambda k: -1 if k is None else k):
        seeds = by_steps[k]
        name = group.name
        if len(by_steps) > 1:
            name += f", K = {np.mean([policy.steps for policy in seeds]):g}"
        group.add(name, seeds, _same_problems(seeds), k)
    return group


def _same_problems(seeds: Sequence[Policy]) -> list[pd.DataFrame]:
    """Read the test answers of policies. Raises ValueError where they are gone, or not to the same
    problems."""
    answers = []
    for policy in seeds:
        own = policy.answers("test")
        if own is None:
            raise ValueError(
                f"{policy.run.workdir} has no test completions of {policy.name!r} any more"
            )
        answers.append(own)
        if not own.index.equals(answers[0].index):
            names = f"{seeds[0].run.workdir.name} and {policy.run.workdir.name}"
            raise ValueError(f"{names} were tested on different problems")
    return answers


def _warmups(groups: Sequence[Group]) -> list[Group]:
    """Make groups of online training alone, of warm-ups that points evaluated, unless a group is
    about just that."""
    alone = [group for group in groups if not group.is_offline]
    families: list[list[Group]] = []
    for group in groups:
        if group.stops or not all(policy.is_single_warmup for policy in group.policies):
            continue
        if any(map(group.goes_on_from, alone)):
            continue
        for family in families:
            if any(map(group.goes_on_from, family)):
                family.append(group)
                break
        else:
            families.append([group])
    warmups = []
    for family in families:
        warmup = _warmup(family, several=len(families) > 1)
        if len(warmup.rows) > 1:
            warmups.append(warmup)
    return warmups


def _warmup(family: Sequence[Group], *, several: bool) -> Group:
    """Add to groups with one warm-up a group of online training: K = 0 is the policy that it starts
    from."""
    values = {}
    for name, text in family[0].values.items():
        if all(group.values.get(name) == text for group in family):
            values[name] = text
    arm = WARMUP
    if several:
        arm += f" of {', '.join(dict.fromkeys(group.arm for group in family))}"
    by_steps: dict[int | None, dict[int, Policy]] = {}
    for trained in sorted(policies_of(rows_of(family)), key=lambda policy: policy.run.seed):
        for name in trained.chain[1:]:
            policy = Policy(trained.run, name)
            if policy.result("test"):
                by_steps.setdefault(int(policy.steps), {}).setdefault(policy.run.seed, policy)
    return _group(arm, values, {k: list(by_seed.values()) for k, by_seed in by_steps.items()})


def read_comparison(
    workdirs: Sequence[PathLike], output: PathLike = "compare", *, policies: str = "ends"
) -> Study:
    """Read runs, or points of a study, as a study whose arms they are, on the problems that all of
    them answered.

    Problems are those of the same id, which is a hash of their text. output: the directory of the
    study that is made.
    policies: "ends" for each run's first and last one, "all". Of each run a finished evaluation
    counts: of the first run the last on test, of the others the last on the first one's split; where
    there is none, the last on test, else the last. Raises ValueError for fewer than two runs, one
    given twice, a folder that is no run, a run without a finished evaluation or without its
    completions, and where no problem is common.
    """
    if policies not in ("ends", "all"):
        raise ValueError(f"policies must be ends or all, got {policies!r}")
    sides = _sides(workdirs)
    chosen: list[tuple[Side, Policy, pd.DataFrame]] = []
    left_out = {}
    for side in sides:
        names = list(side.stage.policies)
        if policies == "ends":
            names = list(dict.fromkeys((names[0], names[-1])))
        for name in names:
            policy = Policy(side.run, name)
            answers = policy.answers(side.stage.split)
            if answers is None:
                raise ValueError(
                    f"{side.stage.folder} has no completions of {name!r} any more: they cannot be "
                    "compared"
                )
            # A file that several runs share is read once.
            is_shared = any(answers is other for _, _, other in chosen)
            if is_shared and name != side.last:
                left_out[f"{side.mark}: {name}"] = SHARED
            else:
                chosen.append((side, policy, answers))
    common = sorted(set.intersection(*(set(answers.index) for _, _, answers in chosen)))
    if not common:
        evaluated = []
        for side in sides:
            count = f"{len(side.stage.problems):,} of {side.stage.split}"
            evaluated.append(f"{side.mark} ({side.label}) {count}")
        raise ValueError(
            "the runs have no problem in common, they cannot be compared; evaluated are "
            f"{', '.join(evaluated)}"
        )
    groups = [_arm(side, policy, answers.loc[common]) for side, policy, answers in chosen]
    warnings = list(_incomparable(sides, common))
    return Study(absolute(output), "compare", groups, left_out, sides=sides, warnings=warnings)


def _sides(workdirs: Sequence[PathLike]) -> list[Side]:
    roots = list(map(absolute, workdirs))
    if len(roots) < 2:
        raise ValueError(f"a comparison takes two runs or more, got {len(roots)}")
    names = [root.name for root in roots]
    answers = functools.cache(read_answers)
    sides: list[Side] = []
    for i, root in enumerate(roots):
        if root in roots[:i]:
            raise ValueError(f"{root} is given twice: compare runs that differ")
        run = read_run(root, answers)
        stages = [stage for stage in run.evaluations if stage.policies]
        if not stages:
            raise ValueError(
                f"{run.workdir} has no finished evaluation: let its evaluate stage finish first"
            )
        alike = [stage for stage in stages if sides and stage.split == sides[0].stage.split]
        tested = [stage for stage in stages if stage.split == "test"]
        label = root.name if names.count(root.name) == 1 else str(root)
        sides.append(Side(_mark(i), label, run, [*stages, *tested, *alike][-1]))
    return sides


def _mark(number: int) -> str:
    """Return A … Z, AA … as spreadsheets count."""
    rest, letter = divmod(number, len(ascii_uppercase))
    return (_mark(rest - 1) if rest else "") + ascii_uppercase[letter]


def _arm(side: Side, policy: Policy, answers: pd.DataFrame) -> Group:
    """Make a group of one policy of a run. Raises ValueError where none of its answers is right or
    wrong."""
    title = f"{side.mark}: {policy_name(side.stage.policies[policy.name])}"
    if answers.isna().to_numpy().all():
        raise ValueError(
            f"none of the {len(answers):,} common problems is scored for {title} as right or "
            "wrong: accuracies are compared, not rewards"
        )
    group = Group(title, {"run": side.label})
    group.add(title, [policy], [answers], split=str(side.stage.split))
    return group


def changed_settings(first: Run, other: Run) -> list[str]:
    """List the settings that differ, as "field: there -> here", functions given from Python
    included."""
    identities = []
    for run in (first, other):
        own = read_json(run.workdir / "config.json").get("own", {})
        identities.append({**identity(run.config), FROM_PYTHON: own})
    return differences(*identities)


def _incomparable(sides: Sequence[Side], common: Collection[str]) -> Iterator[str]:
    for name in ("split", *SAMPLING):
        values = {side.mark: setting(side.sampling[name]) for side in sides}
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{mark} {value}" for mark, value in values.items())
            yield (
                f"The evaluations differ in {name}: {listed}. A difference in accuracy may come "
                "from this."
            )
    different = sum(len(_reference_answers(sides, problem)) > 1 for problem in common)
    if different:
        yield (
            f"{different:,} of the common problems have other reference answers in one run than "
            "in another."
        )


def _reference_answers(sides: Sequence[Side], problem: str) -> set[str]:
    answers = set()
    for side in sides:
        if problem in side.stage.problems:
            answers.add(str(side.stage.problems[problem].get("answer")))
    return answers
