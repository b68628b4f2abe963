"""Choose the settings of a study's arms by a written rule, and judge the chosen ones on other
seeds.

    python benchmarks/tuned_alike.py choose DIR STUDY FILE      # of part=tune: writes FILE, which part=judge reads
    python benchmarks/tuned_alike.py answers DIR STUDY          # of part=judge: the tables and the verdicts

The rule: of each arm and budget (updates of online RL) the settings with the highest mean accuracy
on dev over all seeds; of equal ones those that are listed first. `choose` refuses a study of which
an evaluation is missing, or whose arms did not try equally many settings at each budget.

demo_study.py and smollm2_study.py are such studies. Their results are in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from g2d_jax.session import stage_result

if TYPE_CHECKING:
    from ml_collections import ConfigDict

    from g2d_jax.report.rows import Row, Study
    from g2d_jax.study.frontier import Interval

STEPS = "stages.warmup.steps"
LEVEL = 2.0
"""Points within which two accuracies count as level."""

Settings = dict[str, str]
"""Field of the config -> value, as overrides write it."""


def arm_of(name: str) -> str:
    """Tell an arm of GRPO alone from one of G2D, of which K = 0 has a grid of its own."""
    return "grpo" if name == "grpo" else "g2d"


def choose(study: Path, name: str) -> dict[str, Any]:
    """Apply the rule to a finished part=tune. Raises SystemExit where something is missing."""
    plan = json.loads((study / "sweeps" / f"{name}.json").read_text())
    measured: dict[str, dict[tuple[tuple[str, str], ...], dict[int, float]]] = {}
    missing = 0
    for point in plan["points"]:
        result = stage_result.read(study / "stages" / point["stages"]["dev"])
        if result is None or result.evaluation is None:
            missing += 1
            continue
        mean = result.evaluation.policies[0].accuracy.mean
        settings = tuple(point["values"].items())
        tried = measured.setdefault(arm_of(point["arm"]), {}).setdefault(settings, {})
        tried[point["seed"]] = mean
    if missing:
        raise SystemExit(f"{missing} of {len(plan['points'])} points are not judged on dev yet")
    seeds = sorted({point["seed"] for point in plan["points"]})
    chosen: dict[str, list[dict[str, Any]]] = {}
    for arm, candidates in measured.items():
        by_budget: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for settings, means in candidates.items():
            if sorted(means) != seeds:
                raise SystemExit(f"{arm}, {dict(settings)}: has seeds {sorted(means)} of {seeds}")
            dev = [means[seed] for seed in seeds]
            row = {"settings": dict(settings), "dev": sum(dev) / len(dev), "seeds": dev}
            by_budget[int(dict(settings)[STEPS])].append(row)
        chosen[arm] = []
        for budget in sorted(by_budget):
            rows = by_budget[budget]
            best = max(rows, key=lambda row: row["dev"])
            chosen[arm].append({"budget": budget, "best": best, "tried": rows})
    counts = {len(budget["tried"]) for budgets in chosen.values() for budget in budgets}
    if len(counts) != 1:
        raise SystemExit(f"the arms did not try equally many settings a budget: {sorted(counts)}")
    _complete(chosen, plan["config"])
    return {"study": name, "rule": "highest mean on dev", "seeds": seeds, "arms": chosen}


def _complete(chosen: Mapping[str, Sequence[Mapping[str, Any]]], config: Any) -> None:
    """Give every chosen row of an arm the fields that another row of it has, from the config."""
    for budgets in chosen.values():
        fields: dict[str, None] = {}
        for budget in budgets:
            fields.update(dict.fromkeys(budget["best"]["settings"]))
        for budget in budgets:
            own = budget["best"]["settings"]
            for field in fields:
                if field not in own:
                    own[field] = _value(config, field)


def _value(config: Any, field: str) -> str:
    for part in field.split("."):
        config = config[part]
    return str(config)


def arms(file: Path) -> dict[str, tuple[str, ...]]:
    """Return arm -> the entries of `zip` that make its chosen settings, one point a budget.

    Raises ValueError where nothing was chosen yet.
    """
    if not file.exists():
        raise ValueError(
            f"{file} is not there: run part=tune to its end, then `python "
            "benchmarks/tuned_alike.py choose DIR STUDY FILE` writes it"
        )
    entries: dict[str, tuple[str, ...]] = {}
    for arm, budgets in json.loads(file.read_text())["arms"].items():
        rows: list[Settings] = [budget["best"]["settings"] for budget in budgets]
        columns = []
        for field in rows[0]:
            columns.append(f"{field}={','.join(row[field] for row in rows)}")
        entries[arm] = tuple(columns)
    return entries


def judge(file: Path, seeds: Sequence[int], alone: Sequence[str]) -> ConfigDict:
    """Make the sweep of part=judge: the chosen settings on other seeds. alone: the stages of GRPO.

    Raises ValueError as `arms`.
    """
    from g2d_jax import config as settings

    entries = arms(file)
    return settings.sweep(
        seeds=seeds,
        arms={
            "g2d": settings.arm(zip=entries["g2d"], fixed=("stages.evaluate.policies=warmup,dpo",)),
            "grpo": settings.arm(
                zip=entries["grpo"],
                stages=alone,
                fixed=("stages.evaluate.policies=warmup",),
            ),
        },
    )


def table_of(choice: Mapping[str, Any]) -> list[str]:
    """Write what was chosen as rows of a table, with all that was tried."""
    lines = ["| arm | budget | chosen | dev | all that was tried, dev |", "|---|---|---|---|---|"]
    for arm, budgets in choice["arms"].items():
        for budget in budgets:
            best = budget["best"]
            tried = []
            for row in budget["tried"]:
                tried.append(f"{_short(row['settings'])}: {100 * row['dev']:.1f}")
            cells = [arm, str(budget["budget"]), _short(best["settings"])]
            cells += [f"{100 * best['dev']:.1f}", "; ".join(tried)]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _short(settings: Mapping[str, str]) -> str:
    parts = []
    for field, value in settings.items():
        if field != STEPS:
            name = field.removeprefix("stages.").replace(".optimizer.", " ").replace("_", " ")
            parts.append(f"{name} {value}")
    return ", ".join(parts)


def advantage(row: Row, baseline: Sequence[Row], measure: str, level: float) -> Interval | None:
    """Subtract what GRPO reaches at a row's cost, seed by seed: between two of its budgets that
    follow each other by a straight line.

    baseline: by budget, each with the row's seeds. None where a seed's cost does not lie within
    those of its GRPO: which seeds do is no accident.
    """
    from g2d_jax.report import paired_differences as paired

    over = paired.over_baseline(row, baseline, measure, level)
    return None if over is paired.OUT_OF_RANGE else over


def of_seeds(row: Row, seeds: Sequence[int]) -> Row:
    """Take some seeds of a row."""
    return replace(row, policies=row.policies[row.policies["seed"].isin(seeds)])


def verdict(interval: Interval | None) -> str:
    """Say what an interval of a difference, in shares of 1, tells by the rules of the page."""
    if interval is None:
        return "out of range"
    if interval.seeds < 2:
        # over problems only, which says nothing of another seed
        return "inconclusive"
    low, high = 100 * interval.low, 100 * interval.high
    if low > 0:
        return "better"
    if high < 0:
        return "worse"
    if low > -LEVEL and high < LEVEL:
        return "level"
    return "inconclusive"


def read_priced(study: Path, name: str, recipe: str, topology: str, response: int) -> Study:
    """Read a study, with its tokens at the rates of a larger model's plan where a recipe is named.

    response: tokens to take its responses for, 0 for what they have. The recipe is compiled, for
    which the extra plan is needed.
    """
    from g2d_jax.report.rows import read_study

    read = read_study(study, name)
    if not recipe:
        return read
    from g2d_jax.plan import rates
    from g2d_jax.recipes.config_load import resolve

    def say(message: str) -> None:
        print(message, file=sys.stderr)

    per_token = rates(resolve(recipe), topology, say, response or None)
    scale = response / read.mean_length if response else 1.0
    return read_study(study, name, replace(per_token, scale=scale))


def answers(read: Study) -> list[str]:
    """Write the tables of a finished part=judge, and the verdicts of the page's rules.

    Raises SystemExit where a setting is judged in no seed: all seeds lack a policy then.
    """
    from g2d_jax.report.paired_differences import apart

    if absent := _absent(read):
        raise SystemExit(f"judged in no seed yet: {', '.join(absent)}")
    some: set[int] = set().union(*(row.seeds for row in read.rows))
    every = some.intersection(*(row.seeds for row in read.rows))
    seeds = sorted(every)
    rows: dict[str, list[Row]] = {"g2d": [], "grpo": []}
    for row in read.rows:
        rows[arm_of(row.arm)].append(of_seeds(row, seeds))
    for own in rows.values():
        own.sort(key=lambda row: row.mean("K"))
    chosen = rows["g2d"]
    grpo = rows["grpo"]
    # As many comparisons are made as there are K: each interval is as much wider.
    wide = 1 - 0.05 / len(chosen)
    lines = [f"{len(seeds)} seeds: {', '.join(map(str, seeds))}"]
    if some > every:
        unfinished = ", ".join(map(str, sorted(some - every)))
        lines.append(f"left out, since not every policy of theirs is judged: {unfinished}")
    lines.append("")
    lines += [
        "| GRPO, updates | accuracy | FLOPs | generated | settings |",
        "|---|---|---|---|---|",
    ]
    for row in grpo:
        lines.append(_line(row, []))
    measures = ["generated"] if read.rates is None else ["generated", "hours"]
    heads = ["K", "after DPO", "FLOPs", "generated", "settings", "what DPO added"]
    heads += ["against GRPO, equal FLOPs", f"at {wide:.1%}", "verdict"]
    heads += [f"equal {measure}" for measure in measures]
    lines += ["", f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    verdicts = {}
    for row in chosen:
        at_flops = advantage(row, grpo, "flops", wide)
        verdicts[row.mean("K")] = verdict(at_flops), at_flops
        cells = [_text(row.gain), _text(advantage(row, grpo, "flops", 0.95)), _text(at_flops)]
        cells.append(verdicts[row.mean("K")][0])
        for measure in measures:
            cells.append(_text(advantage(row, grpo, measure, 0.95)))
        lines.append(_line(row, cells))
    lines += ["", f"1. Is G2D better than GRPO at equal FLOPs, tuned alike? {_worth(verdicts)}"]
    last = chosen[-1]
    compared = (
        ("accuracy after DPO", "by_seed", "2. Is a smaller K better than the largest?", _best),
        ("what DPO adds", "gains", "3. Does what DPO adds fall with K?", _falls),
    )
    for title, name, question, answer in compared:
        lines += ["", f"{title}, at each K less at K = {last.mean('K'):g} ({wide:.1%}):", ""]
        words = []
        for row in chosen[:-1]:
            less = apart(getattr(row, name), getattr(last, name), wide)
            words.append(verdict(less))
            lines.append(f"- K = {row.mean('K'):g}: {_text(less)}, {words[-1]}")
        lines += ["", f"{question} {answer(words)}"]
    return [*lines, "", *_rollouts(chosen)]


def _absent(read: Study) -> list[str]:
    """List the settings whose every point is left out."""
    judged = set()
    for row in read.rows:
        judged.update(_without_seed(Path(folder).name) for folder in row.policies["workdir"])
    return sorted({*map(_without_seed, read.left_out)} - judged)


def _without_seed(label: str) -> str:
    return label.rpartition(",seed=")[0]


def _best(words: Sequence[str]) -> str:
    """Answer from the verdicts on accuracy at each smaller K, less that at the largest."""
    if "better" in words:
        return "yes."
    return "no." if set(words) == {"worse"} else "inconclusive."


def _falls(words: Sequence[str]) -> str:
    """Answer from the first verdict, on what DPO adds at the least K, less that at the largest."""
    answered = {"better": "yes.", "worse": "no.", "level": "no."}
    return answered.get(words[0], "inconclusive.")


TAUGHT = ("entropy", "distinct_answers", "frac_mixed", "pass_rate")
"""What rollouts can teach: measures of them, the first two of which decide."""


def _rollouts(chosen: Sequence[Row]) -> list[str]:
    """Write what the rollouts behind the pairs were like, and whether they teach less with K."""
    names = [name.replace("_", " ") for name in TAUGHT]
    lines = [f"| K | {' | '.join(names)} | pairs |", f"|---|{'---|' * (len(names) + 1)}"]
    for row in chosen:
        cells = [f"{row.mean('K'):g}"]
        cells += [f"{row.mean(f'rollouts/{name}'):.3f}" for name in TAUGHT]
        cells.append(f"{row.mean('pairs'):,.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    first, last = (row.policies.set_index("seed") for row in (chosen[0], chosen[-1]))
    lower: list[float] = []
    for name in TAUGHT[:2]:
        before, after = first[f"rollouts/{name}"], last[f"rollouts/{name}"]
        lower += np.sign(before - after).dropna()
    # one seed tells nothing of another
    is_alike = len(set(lower)) == 1 and len(lower) > len(TAUGHT[:2])
    answer = {1: "yes.", -1: "no."}.get(lower[0] if is_alike else 0)
    return [*lines, "", f"4. Do rollouts teach less as K grows? {answer or 'inconclusive.'}"]


def _worth(verdicts: Mapping[float, tuple[str, Interval | None]]) -> str:
    """Answer in one word: yes if at any K it is better; no if at every K it is at most 2 points,
    over seeds."""
    better = [f"K = {k:g}" for k, (word, _) in verdicts.items() if word == "better"]
    if better:
        return f"yes, at {', '.join(better)}."
    highest = []
    for _, interval in verdicts.values():
        is_of_seeds = interval is not None and interval.seeds > 1
        highest.append(interval.high if is_of_seeds else math.inf)
    return "no." if 100 * max(highest) < LEVEL else "inconclusive."


def _line(row: Row, more: Sequence[str]) -> str:
    accuracy = row.accuracy
    mean = f"{100 * accuracy.mean:.1f} [{100 * accuracy.low:.1f}, {100 * accuracy.high:.1f}]"
    cells = [f"{row.mean('K'):g}", mean, f"{row.mean('flops') / 1e9:,.0f} G"]
    settings = dict(part.split("=", 1) for part in row.first["settings"].split(";"))
    cells += [f"{row.mean('generated') / 1e3:,.0f} k", _short(settings), *more]
    return f"| {' | '.join(cells)} |"


def _text(interval: Interval | None) -> str:
    if interval is None:
        return "out of range"
    numbers = (interval.mean, interval.low, interval.high)
    mean, low, high = (f"{100 * number:+.1f}" for number in numbers)
    return f"{mean} [{low}, {high}]"


def main() -> None:
    """Choose, or answer."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("choose", "answers"))
    parser.add_argument("folder", type=Path, help="the directory of `g2d sweep`")
    parser.add_argument("study", help="the study's name in it")
    parser.add_argument("file", type=Path, nargs="?", help="where to write what was chosen")
    parser.add_argument(
        "--as", dest="recipe", default="", help="answers: a recipe whose prices to take"
    )
    parser.add_argument("--topology", default="v5e-16", help="the machine of --as")
    parser.add_argument("--response", type=int, default=0, help="tokens to take responses for")
    arguments = parser.parse_args()
    if arguments.action == "answers":
        priced = (arguments.recipe, arguments.topology, arguments.response)
        read = read_priced(arguments.folder, arguments.study, *priced)
        print("\n".join(answers(read)))
        return
    if arguments.file is None:
        parser.error("choose writes a file: name it")
    choice = choose(arguments.folder, arguments.study)
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    arguments.file.write_text(json.dumps(choice, indent=1) + "\n")
    print("\n".join(table_of(choice)))


if __name__ == "__main__":
    main()
