"""Put the claims of two papers beside what the packed studies measured, as the table of
docs/evidence.md.

    python benchmarks/claims.py                 # half a minute; unpacks benchmarks/results/ by itself
    python benchmarks/claims.py --folder DIR    # of archives unpacked before, DIR/NAME of NAME.tar.xz

The papers: G2D, arXiv 2605.21266, and "Bridging Offline and Online Reinforcement Learning for
LLMs", arXiv 2506.21495, table 1. A claim is one difference, or one at each K. Differences are
paired by seed and problem, their intervals of 95 % as of all studies (g2d_jax/study/frontier.py);
of what is one number a seed, such as entropy, they are Student's t over seeds. Nothing is widened
for how many there are. Rules, by the whole of each interval:

    more    agrees above 0, disagrees below 0; with several K it agrees if all agree and disagrees
            if any does; less: the other way round
    any     agrees if it is above 0 at any K, disagrees if it ends below +2 points at every K, and
            none is out of range: some study's GRPO has reached its cost, in every seed
    best    agrees if it is above 0 at any K, disagrees if it is below 0 at every K
    level   agrees within 2 points (of a number of pairs: 20 %), disagrees beyond them

All else cannot be told, and nothing of one seed, whose interval is over problems only. A study that
was run since gets a line in SCALES: where an archive is not there its cells say that it is to come.
"""

from __future__ import annotations

import argparse
import functools
import math
import runpy
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from g2d_jax.report.paired_differences import difference, over_baseline
from g2d_jax.report.read import read_study
from g2d_jax.study import frontier, stats

if TYPE_CHECKING:
    from g2d_jax.report.policies import Array, Policy
    from g2d_jax.report.rows import Row, Study
    from g2d_jax.study.frontier import Interval

HERE = Path(__file__).parent
LEVEL = 2.0
"""Points within which two accuracies count as level, as in benchmarks/tuned_alike.py."""

SHARE = 20.0
"""Per cent within which a count counts as hardly changed."""

Source = tuple[str, str]
"""An archive of benchmarks/results/, and a study in it."""


@dataclass(frozen=True)
class Scale:
    """A column of the table: a model on a task.

    over_k: studies over K, whose seeds are taken together. tuned: one whose arms tried equally many
    settings. spectrum: from offline to online. cause: pairs of one number and one policy.
    """

    title: str
    over_k: Sequence[Source]
    tuned: Source | None = None
    spectrum: Source | None = None
    cause: Source | None = None


SCALES = (
    Scale(
        "0.14M, `slips`",
        (("study-demo", "sweep-k-demo"), ("fresh-demo", "sweep-k-demo")),
        tuned=("demo-study", "demo-study-judge"),
        spectrum=("study-demo", "spectrum-demo"),
        cause=("study-demo", "cause"),
    ),
    Scale("3.2M, `digits`", (("middle", "sweep-k-middle"),)),
    Scale(
        "135M, `stories` *",
        (("smollm2-gpu", "smollm2-study"),),
        tuned=("smollm2-stories", "smollm2-stories-judge"),
        spectrum=("smollm2-stories", "smollm2-stories-spectrum"),
    ),
    Scale(
        "135M, `arithmetic`",
        (("smollm2-arithmetic", "smollm2-arithmetic-judge"),),
        tuned=("smollm2-arithmetic", "smollm2-arithmetic-judge"),
        spectrum=("smollm2-arithmetic", "smollm2-arithmetic-spectrum"),
    ),
)


@dataclass(frozen=True)
class Point:
    """G2D of one seed at one K, with GRPO alone of that seed. Accuracies are by problem, [N].

    gain: what DPO added. own, best: what it has over GRPO for equal FLOPs, at the warm-up's rate
    and at the rate that is best on dev; fourfold: over GRPO at the warm-up's rate for four times its
    FLOPs. NaN where GRPO did not go on so far, None where it was not run at such rates.
    """

    archive: str
    seed: int
    policy: Policy
    accuracy: Array
    gain: Array | None
    own: Array | None
    best: Array | None
    fourfold: Array | None

    @property
    def run(self) -> tuple[str, int]:
        """What the K of one seed have in common: two archives may have the same seed."""
        return self.archive, self.seed


@dataclass(frozen=True)
class Found:
    """A difference with its interval, in points or per cent; NaN where a seed is out of range. k:
    None of one that has no K."""

    k: int | None
    mean: float
    low: float
    high: float
    seeds: int


class Results:
    """The unpacked archives, a folder each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.study = functools.cache(self._study)
        self.points = functools.cache(self._points)

    def _study(self, source: Source) -> Study | None:
        archive, name = source
        if not (self.folder / archive / "sweeps" / f"{name}.json").exists():
            return None
        return read_study(self.folder / archive, name)

    def _points(self, sources: tuple[Source, ...], *, tuned: bool) -> dict[int, list[Point]]:
        """Return K -> the seeds of all studies that are there; tuned: see `seeds_of`."""
        points: dict[int, list[Point]] = {}
        ids: list[str] = []
        for source in sources:
            study = self.study(source)
            if study is None:
                continue
            ids = ids or study.problems
            if study.problems != ids:
                raise ValueError(f"{source}: was tested on other problems than the study before")
            for k, row in chosen(study, "g2d").items():
                points.setdefault(k, []).extend(seeds_of(row, study, source[0], tuned=tuned))
        return dict(sorted(points.items()))


def chosen(study: Study, arm: str) -> dict[int, Row]:
    """Return K, or steps of GRPO -> the row of an arm that is best on dev."""
    rows: dict[int, Row] = {}
    for row in study.rows:
        if row.group.arm == arm:
            steps = int(row.steps)
            if steps not in rows or row.dev > rows[steps].dev:
                rows[steps] = row
    return rows


def seeds_of(row: Row, study: Study, archive: str, *, tuned: bool) -> list[Point]:
    """Split a row into its seeds. tuned: GRPO's rates were chosen before, so that one a budget is
    there; else rates are compared only where each budget has several, and the warm-up's rate only
    where GRPO has it at every budget."""
    grpo = chosen(study, "grpo")
    own: list[Row] = []
    for group in study.baselines:
        # of several, each has the same steps of the same runs
        is_whole = {int(other.steps) for other in group.rows} == set(grpo)
        if row.group.goes_on_from(group) and is_whole and not own:
            own = group.rows
    best = [grpo[steps] for steps in sorted(grpo)]
    rates = sum(len(group.rows) for group in study.baselines)
    if not tuned and rates == len(grpo):
        best = []
    over_own = over_baseline(row, own, "flops")
    over_best = over_baseline(row, best, "flops")
    over_fourfold = over_baseline(row, own, "flops", times=4)
    points = []
    for policy, accuracy in zip(row.policies, row.accuracies, strict=True):
        over = [found.get(policy.run.seed) for found in (over_own, over_best, over_fourfold)]
        gain = policy.gain
        if gain is None:
            # its warm-up was judged as a point of GRPO alone
            before = [other.by_seed.get(policy.run.seed) for other in own if other.k == row.k]
            gain = accuracy - before[0] if before and before[0] is not None else None
        points.append(Point(archive, policy.run.seed, policy, accuracy, gain, *over))
    return points


def in_points(interval: Interval, k: int | None = None) -> Found:
    """Take an interval of shares of 1 as points."""
    shares = (interval.mean, interval.low, interval.high)
    mean, low, high = (100 * share for share in shares)
    return Found(k, mean, low, high, interval.seeds)


def over_problems(differences: Sequence[Array], k: int | None = None) -> Found:
    """Average differences of seeds, each [N], with their interval over seeds and problems."""
    return in_points(frontier.mean_interval(np.stack(differences), limits=(-1, 1)), k)


def over_seeds(numbers: Sequence[float], k: int | None = None) -> Found:
    """Average one number a seed, in points or per cent, with Student's t over seeds."""
    values = np.array(numbers)
    mean = float(values.mean())
    half = stats.t_quantile(len(values)) * stats.std(values) / math.sqrt(len(values))
    return Found(k, mean, mean - half, mean + half, len(values))


Points = Mapping[int, Sequence[Point]]


def paired(points: Points, k: int, other: int) -> Found:
    """Subtract accuracy at another K, seed by seed of a study."""
    there = {point.run: point.accuracy for point in points[other]}
    apart = [point.accuracy - there[point.run] for point in points[k] if point.run in there]
    return over_problems(apart, k)


def added(points: Points) -> list[Found]:
    """Say what DPO added at each K."""
    found = []
    for k, seeds in points.items():
        gains = [point.gain for point in seeds if point.gain is not None]
        found.append(over_problems(gains, k))
    return found


def weak_without(points: Points) -> list[Found]:
    """Compare K = 20, which every study has, with K = 0."""
    return [paired(points, 20, 0)]


def inner(points: Points) -> list[Found]:
    """Compare every K between 0 and the largest with the largest."""
    return [paired(points, k, max(points)) for k in list(points)[1:-1]]


def against(points: Points, name: str) -> list[Found]:
    """Compare with GRPO at every K, in the studies whose GRPO has reached the cost in every seed;
    NaN where none has."""
    found = []
    for k, seeds in points.items():
        over: dict[str, list[Array]] = {}
        for point in seeds:
            values = getattr(point, name)
            if values is not None:
                over.setdefault(point.archive, []).append(values)
        inside: list[Array] = []
        for of_study in over.values():
            if not any(np.isnan(values).all() for values in of_study):
                inside += of_study
        if inside:
            found.append(over_problems(inside, k))
        elif over:
            found.append(Found(k, math.nan, math.nan, math.nan, 0))
    return found


def taught(
    points: Points, measure: Callable[[Policy], float], k: int, base: int, *, relative: bool
) -> Found:
    """Compare what the rollouts behind the pairs were at a K with another."""
    first = {point.run: measure(point.policy) for point in points[base]}
    changes = []
    for point in points[k]:
        if point.run in first:
            before = first[point.run]
            change = measure(point.policy) - before
            changes.append(100 * change / before if relative else 100 * change)
    return over_seeds(changes, k)


def pairs_by_k(points: Points) -> list[Found]:
    """Compare the number of pairs at K = 20 and at the largest with K = 0."""
    return [taught(points, pairs, k, 0, relative=True) for k in (20, max(points))]


def confidence(points: Points) -> list[Found]:
    """Compare the calibration error at the largest K with K = 20."""
    return [taught(points, informative("ece"), max(points), 20, relative=False)]


def informative(name: str) -> Callable[[Policy], float]:
    """Give the reader of a measure of a policy's rollouts."""
    return lambda policy: float(policy.pairs_manifest["result"]["informativeness"][name])


def pairs(policy: Policy) -> float:
    """Count its pairs."""
    return float(policy.pairs_manifest["counts"]["pairs"])


def arms_apart(study: Study, arm: str, other: str) -> list[Found]:
    """Compare two arms of a spectrum; [] without a seed or the problems in common."""
    rows = {row.group.arm: row for row in study.rows}
    found = difference(rows[arm], rows[other])
    return [in_points(found)] if found else []


def rarely(study: Study) -> list[Found]:
    """Compare the arm that synchronises every 50 or 100 updates with the one that always does; [] of
    a study that has none."""
    arms = {group.arm for group in study.groups}
    return [
        found for arm in ("s50", "s100") if arm in arms for found in arms_apart(study, arm, "s1")
    ]


def offline_added(study: Study) -> list[Found]:
    """Say what offline DPO added to the policy it started from."""
    (row,) = (row for row in study.rows if row.group.arm == "offline")
    return [in_points(row.gain)] if row.gain else []


def hard_less_easy(study: Study) -> list[Found]:
    """Compare pairs of easy prompts with those of hard ones, from many and from few prompts."""
    by_arm: dict[str, list[Row]] = {"hard": [], "easy": []}
    for row in study.rows:
        if row.group.arm in by_arm:
            by_arm[row.group.arm].append(row)
    found = []
    for arm in by_arm.values():
        arm.sort(key=lambda row: -int(row.group.values["stages.pool.prompts"]))
    for easy, hard in zip(by_arm["easy"], by_arm["hard"], strict=True):
        if less := difference(hard, easy):
            found.append(in_points(less))
    return found


@dataclass(frozen=True)
class Claim:
    """A row of the table. source: the field of `Scale` that it is read from; rule: see the module's
    docstring."""

    paper: str
    text: str
    source: str
    rule: str
    find: Callable[..., list[Found]]
    unit: str = ""


def rollouts(name: str) -> Callable[[Points], list[Found]]:
    """Make the finder of the relative change of a measure of the rollouts."""
    return lambda points: [taught(points, informative(name), max(points), 0, relative=True)]


CLAIMS = (
    Claim("G2D", "offline DPO adds to the warm-up", "over_k", "more", added),
    Claim("G2D", "K = 0 is weak: 20 less 0", "over_k", "more", weak_without),
    Claim("G2D", "a moderate K is best: each less the largest", "over_k", "best", inner),
    Claim(
        "G2D",
        "better than GRPO of four times its FLOPs, at the warm-up's rate",
        "over_k",
        "any",
        lambda points: against(points, "fourfold"),
    ),
    Claim(
        "G2D",
        "better than GRPO of equal FLOPs, at the warm-up's rate",
        "over_k",
        "any",
        lambda points: against(points, "own"),
    ),
    Claim(
        "G2D",
        "equal FLOPs, GRPO's rate chosen on dev",
        "over_k",
        "any",
        lambda points: against(points, "best"),
    ),
    Claim(
        "G2D",
        "equal FLOPs, both tuned alike",
        "tuned",
        "any",
        lambda points: against(points, "best"),
    ),
    Claim(
        "G2D",
        "the number of pairs hardly changes with K",
        "over_k",
        "level",
        pairs_by_k,
        " %",
    ),
    Claim(
        "G2D", "rollouts' token entropy falls with K", "over_k", "less", rollouts("entropy"), " %"
    ),
    Claim(
        "G2D",
        "so do distinct answers a prompt",
        "over_k",
        "less",
        rollouts("distinct_answers"),
        " %",
    ),
    Claim(
        "G2D",
        "large K is over-confident: its calibration error less that at K = 20",
        "over_k",
        "more",
        confidence,
    ),
    Claim(
        "G2D",
        "equally many pairs teach unequally: hard prompts less easy ones",
        "cause",
        "more",
        hard_less_easy,
    ),
    Claim("Bridging", "offline DPO adds to the start", "spectrum", "more", offline_added),
    Claim(
        "Bridging",
        "online DPO is better than offline",
        "spectrum",
        "more",
        lambda study: arms_apart(study, "s1", "offline"),
    ),
    Claim(
        "Bridging",
        "s = 10 is as good as online",
        "spectrum",
        "level",
        lambda study: arms_apart(study, "s10", "s1"),
    ),
    Claim(
        "Bridging",
        "s = 100 (here 50) is as good as online",
        "spectrum",
        "level",
        rarely,
    ),
    Claim(
        "Bridging",
        "GRPO is as good as online DPO",
        "spectrum",
        "level",
        lambda study: arms_apart(study, "grpo", "s1"),
    ),
)


def verdict(rule: str, found: Sequence[Found], unit: str) -> str:
    """Say what the intervals tell by a claim's rule."""
    above = [each.low > 0 for each in found]
    below = [each.high < 0 for each in found]
    within = SHARE if unit else LEVEL
    if rule == "more":
        agrees, disagrees = all(above), any(below)
    elif rule == "less":
        agrees, disagrees = all(below), any(above)
    elif rule == "any":
        agrees, disagrees = any(above), all(each.high < LEVEL for each in found)
    elif rule == "best":
        agrees, disagrees = any(above), all(below)
    else:
        agrees = all(-within < each.low and each.high < within for each in found)
        disagrees = any(each.low > within or each.high < -within for each in found)
    if agrees:
        return "agrees"
    return "disagrees" if disagrees else "cannot tell"


def text(found: Found, unit: str, seeds: int = 0) -> str:
    """Write a difference with its interval, and its seeds where they are not so many. seeds: 0 for
    as many as it has."""
    k = "" if found.k is None else f"K={found.k} "
    fewer = f" ({found.seeds} seeds)" if seeds not in (0, found.seeds) else ""
    return f"{k}{found.mean:+.1f}{unit} [{found.low:+.1f}, {found.high:+.1f}]{fewer}"


def measured(claim: Claim, scale: Scale, results: Results) -> list[Found] | None:
    """Return the differences of a claim at a scale, ascending; None where no study of it is
    there."""
    source = getattr(scale, claim.source)
    if not source:
        return None
    read: Points | Study | None
    if claim.source in ("over_k", "tuned"):
        tuned = claim.source == "tuned"
        read = results.points((source,) if tuned else source, tuned=tuned)
    else:
        read = results.study(source)
    if not read:
        return None
    found = claim.find(read)
    # those out of range last
    return sorted(found, key=lambda each: (math.isnan(each.mean), each.mean))


def cell(claim: Claim, scale: Scale, found: Sequence[Found] | None, seeds: int) -> str:
    """Write the verdict, the least and the greatest difference, and for how many seeds, where these
    are not the column's."""
    if found is None:
        return "to come" if getattr(scale, claim.source) else "no study"
    if not found:
        return "no study"
    inside = [each for each in found if not math.isnan(each.mean)]
    if not inside:
        return "out of range"
    # All intervals of one number of seeds that is not the column's: said once.
    counts = {each.seeds for each in inside}
    fewer = ""
    if len(counts) == 1 and seeds not in counts:
        fewer = f" ({inside[0].seeds} seeds)"
        seeds = inside[0].seeds
    shown = dict.fromkeys((inside[0], inside[-1]))
    told = "; ".join(text(each, claim.unit, seeds) for each in shown)
    beyond = sorted({each.k for each in found if each.k is not None} - {each.k for each in inside})
    if beyond:
        told += f"; K={', '.join(map(str, beyond))} out of range"
    if min(counts) == 1:
        # over problems only, which says nothing of another seed
        return f"one seed: {told}"
    return f"**{verdict(claim.rule, found, claim.unit)}** {told}{fewer}"


def table(folder: Path, paper: str) -> list[str]:
    """Write the table of a paper's claims, of archives that are unpacked in a folder. A scale of
    which nothing is there has no column."""
    results = Results(folder)
    claims = [claim for claim in CLAIMS if claim.paper == paper]
    lines = [f"| {claim.text} |" for claim in claims]
    heads = [f"| {paper} |"]
    for scale in SCALES:
        found = [measured(claim, scale, results) for claim in claims]
        there = [each for each in found if each]
        if there:
            seeds = max(each[0].seeds for each in there)
            heads.append(f" {scale.title}, {seeds} seed{'s' * (seeds > 1)} |")
            for place, (claim, each) in enumerate(zip(claims, found, strict=True)):
                lines[place] += f" {cell(claim, scale, each, seeds)} |"
    return ["".join(heads), "|" + "---|" * len(heads), *lines]


def tables(folder: Path) -> str:
    """Write both tables."""
    return "\n\n".join("\n".join(table(folder, paper)) for paper in ("G2D", "Bridging"))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="where the archives are unpacked")
    arguments = parser.parse_args()
    if arguments.folder:
        print(tables(arguments.folder))
        return
    unpack = runpy.run_path(str(HERE / "results.py"))["unpack"]
    with tempfile.TemporaryDirectory() as folder:
        for archive in sorted((HERE / "results").glob("*.tar.xz")):
            unpack(archive, Path(folder) / archive.name.removesuffix(".tar.xz"))
        print(tables(Path(folder)))


if __name__ == "__main__":
    main()
