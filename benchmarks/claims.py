"""Compare recipes at equal cost, and the claims of two papers with what the studies measured: the
tables and the charts of docs/evidence.md and docs/rivals.md.

    python benchmarks/claims.py            # prints the tables, in seconds
    python benchmarks/claims.py FOLDER     # draws the charts into it

rivals_claims.py has the recipes. For the claims this reads two tables of benchmarks/results.
policies.parquet has a row for each policy of a study's point, in the order of training: study, arm,
setting, rate (of online training), seed, budget (online steps), policy, what its training cost (SFT
left out), its mean accuracy on dev and test, and measures of the rollouts behind its pairs.
verdicts.parquet has a row for each problem that a policy answered: the same first columns, split,
problem, answers, correct.

The papers: G2D, arXiv 2605.21266, and "Bridging Offline and Online Reinforcement Learning for
LLMs", arXiv 2506.21495, table 1. A claim is one difference, or one at each K. Differences are
paired by seed and problem, with the 95 % intervals of all studies (g2d_jax/study/frontier.py).
Measures with one number a seed, such as entropy, have Student's t over seeds. No interval is
widened for the number of comparisons. Rules, by whole intervals:

    more    agrees above 0, disagrees below 0; with several K it agrees if all agree and disagrees
            if any does; less: the other way round
    any     agrees if it is above 0 at any K, disagrees if it ends below +2 points at every K, and
            none is out of range: some study's GRPO has reached its cost, in every seed
    best    agrees if it is above 0 at any K, disagrees if it is below 0 at every K
    level   agrees within 2 points (of a number of pairs: 20 %), disagrees beyond them

Anything else is inconclusive. So is a difference of one seed, whose interval is over problems only.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import rivals_claims
from intervals import LEVEL, Found, over_seeds
from matplotlib.figure import Figure

from g2d_jax.report import figures
from g2d_jax.study import frontier

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from g2d_jax.study.frontier import Interval

    Array = NDArray[np.float64]

RESULTS = Path(__file__).parent / "results"
SHARE = 20.0
"""Per cent within which a count counts as hardly changed."""

POINT = ["study", "arm", "setting", "seed"]
RUN = ["study", "seed"]
"""The columns that all K of one seed have in common: two studies may have the same seed."""


@dataclass(frozen=True)
class Scale:
    """A model on a task: of 135M parameters where no number is named.

    over_k: studies over K, whose seeds are taken together. tuned: one whose arms tried equally many
    settings. rivals: one of many recipes, tuned alike, that takes its place in the claims. spectrum:
    from offline to online. cause: pairs of one number and one policy.
    """

    name: str
    over_k: Sequence[str]
    tuned: str = ""
    rivals: str = ""
    spectrum: str = ""
    cause: str = ""


SCALES = (
    Scale(
        "0.14M",
        ("sweep-k-demo", "sweep-k-demo-fresh"),
        tuned="demo-study-judge",
        rivals="demo",
        spectrum="spectrum-demo",
        cause="cause",
    ),
    Scale("3.2M", ("sweep-k-middle",)),
    Scale(
        "stories",
        ("smollm2-study",),
        tuned="smollm2-stories-judge",
        spectrum="smollm2-stories-spectrum",
    ),
    Scale(
        "arithmetic",
        ("smollm2-arithmetic-judge",),
        tuned="smollm2-arithmetic-judge",
        spectrum="smollm2-arithmetic-spectrum",
    ),
)


@functools.cache
def read(*studies: str) -> pd.DataFrame:
    """Read the points of studies: the row of each one's last policy.

    accuracy: by problem [N]. gain: what it added to the policy before it [N], NaN where that was
    not judged. Problems are those of all these studies, ids ascending.
    """
    chosen = [("study", "in", studies)]
    policies = pd.read_parquet(RESULTS / "policies.parquet", filters=chosen)
    answers = pd.read_parquet(
        RESULTS / "verdicts.parquet", filters=[*chosen, ("split", "==", "test")]
    )
    answers["accuracy"] = answers.correct / answers.answers
    policy = [*POINT, "policy"]
    by_problem = answers.astype(dict.fromkeys(["problem", *policy], "object")).pivot(
        index=policy, columns="problem", values="accuracy"
    )
    policies["accuracy"] = [*by_problem.reindex(policies.set_index(policy).index).to_numpy()]
    points = policies.drop_duplicates(POINT, keep="last").set_index(POINT)
    earlier = policies[policies.duplicated(POINT, keep="last")]
    start = earlier.drop_duplicates(POINT, keep="last").set_index(POINT)
    points["gain"] = points.accuracy - start.accuracy
    return points.reset_index()


def chosen(points: pd.DataFrame) -> pd.DataFrame:
    """Keep, of each budget, the points at the setting that is best on dev, the first of equal
    ones."""
    dev = points.groupby(["budget", "setting"], sort=False).dev.mean()
    # where dev was not judged there is one setting a budget
    best = dev.fillna(0).groupby("budget").idxmax()
    return points[points.setting.isin([setting for _, setting in best])]


def over_grpo(point: Any, grpo: pd.DataFrame, times: float = 1) -> Array | float:
    """Subtract what GRPO of a point's seed reaches for so many times its FLOPs, on a straight line
    between two budgets that follow each other [N].

    All are NaN where GRPO did not go on so far; one NaN where it has fewer than two budgets.
    """
    own = grpo[grpo.seed == point.seed].sort_values("budget")
    if len(own) < 2:
        return math.nan
    reached = frontier.interpolate(
        own.flops.to_numpy(), np.stack(own.accuracy), times * point.flops
    )
    if reached is None:
        return np.full_like(point.accuracy, math.nan)
    return point.accuracy - reached


@functools.cache
def against_grpo(studies: Sequence[str], *, tuned: bool) -> pd.DataFrame:
    """Read the points of G2D at their chosen settings, with GRPO alone of the same seed.

    own, best: what a point has over GRPO for equal FLOPs, at the warm-up's rate and at the rate that
    is best on dev; fourfold: over GRPO at the warm-up's rate for four times its FLOPs. The warm-up's
    rate counts only where GRPO has it at every budget. tuned: GRPO's rates were chosen before, so
    that a budget has one; else rates are compared only where budgets have several.
    """
    points = read(*studies)
    compared = []
    for study in studies:
        of_study = points[points.study == study]
        grpo = of_study[of_study.arm == "grpo"]
        best = chosen(grpo)
        if not tuned and len(best) == len(grpo):
            best = grpo[:0]
        for point in chosen(of_study[of_study.arm == "g2d"]).itertuples():
            own = grpo[grpo.rate == point.rate]
            if {*own.budget} != {*grpo.budget}:
                own = own[:0]
            gain = point.gain
            if np.isnan(gain).all():
                # its warm-up was judged as a point of GRPO alone
                (before,) = own[(own.budget == point.budget) & (own.seed == point.seed)].accuracy
                gain = point.accuracy - before
            over = {"own": over_grpo(point, own), "best": over_grpo(point, best)}
            over["fourfold"] = over_grpo(point, own, times=4)
            compared.append(point._asdict() | over | {"gain": gain})
    return pd.DataFrame(compared)


def in_points(interval: Interval, k: int | None = None) -> Found:
    """Take an interval of shares of 1 as points."""
    shares = (interval.mean, interval.low, interval.high)
    mean, low, high = (100 * share for share in shares)
    return Found(k, mean, low, high, interval.seeds)


def over_problems(differences: Iterable[Array], k: int | None = None) -> Found:
    """Average differences of seeds, each [N], with their interval over seeds and problems."""
    return in_points(frontier.mean_interval(np.stack([*differences]), limits=(-1, 1)), k)


def apart(points: pd.DataFrame, others: pd.DataFrame, column: str = "accuracy") -> pd.Series:
    """Subtract a column of other points, seed by seed of a study, for the seeds that both have."""
    own, other = points.set_index(RUN)[column], others.set_index(RUN)[column]
    common = own.index.intersection(other.index)
    return own[common] - other[common]


def at(points: pd.DataFrame, k: int) -> pd.DataFrame:
    """Take the points at one K."""
    return points[points.budget == k]


def budgets(points: pd.DataFrame) -> list[int]:
    """List the K of points, ascending."""
    return sorted({*points.budget})


def added(points: pd.DataFrame) -> list[Found]:
    """Give what DPO added at each K."""
    return [over_problems(at(points, k).gain, k) for k in budgets(points)]


def weak_without(points: pd.DataFrame) -> list[Found]:
    """Compare K = 20, which every study has, with K = 0."""
    return [over_problems(apart(at(points, 20), at(points, 0)), 20)]


def inner(points: pd.DataFrame) -> list[Found]:
    """Compare every K between 0 and the largest with the largest."""
    _, *between, largest = budgets(points)
    return [over_problems(apart(at(points, k), at(points, largest)), k) for k in between]


def against(points: pd.DataFrame, name: str) -> list[Found]:
    """Compare with GRPO at every K, in the studies whose GRPO has reached the cost in every seed;
    NaN where none has."""
    found = []
    for k, seeds in points.dropna(subset=name).groupby("budget"):
        is_beyond = np.array([np.isnan(values).all() for values in seeds[name]])
        inside = seeds[~seeds.study.isin(seeds.study[is_beyond])]
        if len(inside):
            found.append(over_problems(inside[name], k))
        else:
            found.append(Found(k, math.nan, math.nan, math.nan, 0))
    return found


def taught(points: pd.DataFrame, column: str, k: int, base: int) -> Found:
    """Compare what the rollouts behind the pairs were at a K with another, in %."""
    change = apart(at(points, k), at(points, base), column)
    before = at(points, base).set_index(RUN)[column]
    return over_seeds(100 * change / before[change.index], k)


def pairs_by_k(points: pd.DataFrame) -> list[Found]:
    """Compare the number of pairs at K = 20 and at the largest with K = 0."""
    return [taught(points, "pairs", k, 0) for k in (20, max(points.budget))]


def confidence(points: pd.DataFrame) -> list[Found]:
    """Compare the calibration error at the largest K with K = 20."""
    largest = max(points.budget)
    change = apart(at(points, largest), at(points, 20), "pairs_ece")
    return [over_seeds(100 * change, largest)]


def arms_apart(points: pd.DataFrame, arm: str, other: str) -> list[Found]:
    """Compare two arms of a spectrum."""
    return [over_problems(apart(points[points.arm == arm], points[points.arm == other]))]


def rarely(points: pd.DataFrame) -> list[Found]:
    """Compare the arm that synchronises every 50 updates with the one that always does; [] of a
    study that has none."""
    return arms_apart(points, "s50", "s1") if "s50" in {*points.arm} else []


def offline_added(points: pd.DataFrame) -> list[Found]:
    """Give what offline DPO added to the policy it started from."""
    return [over_problems(points[points.arm == "offline"].gain)]


def hard_less_easy(points: pd.DataFrame) -> list[Found]:
    """Compare pairs of easy prompts with those of hard ones, from many and from few prompts."""
    found = []
    for hard, easy in (("2048", "4096"), ("448", "896")):
        of_hard = points[(points.arm == "hard") & (points.setting == f"pool.prompts={hard}")]
        of_easy = points[(points.arm == "easy") & (points.setting == f"pool.prompts={easy}")]
        found.append(over_problems(apart(of_hard, of_easy)))
    return found


def tuned_differences(scale: Scale) -> list[Found]:
    """Compare G2D with GRPO at every K, both tuned alike."""
    if scale.rivals:
        return rivals_claims.g2d(scale.rivals)
    return against(against_grpo((scale.tuned,), tuned=True), "best")


def rivals_apart(scale: Scale, arm: str, other: str) -> list[Found]:
    """Compare two recipes at equal FLOPs."""
    return [rivals_claims.apart(scale.rivals, arm, other)]


@dataclass(frozen=True)
class Claim:
    """A row of the table. source: the field of `Scale` that it is read from; rule: see the module's
    docstring."""

    paper: str
    text: str
    source: str
    rule: str
    find: Callable[..., list[Found]] = tuned_differences
    unit: str = ""


def rollouts(name: str) -> Callable[[pd.DataFrame], list[Found]]:
    """Make the finder of the relative change of a measure of the rollouts."""
    return lambda points: [taught(points, name, max(points.budget), 0)]


CLAIMS = (
    Claim("G2D", "DPO improves the warm-up", "over_k", "more", added),
    Claim("G2D", "a warm-up helps: K = 20 against K = 0", "over_k", "more", weak_without),
    Claim("G2D", "a moderate K is best: against the largest K", "over_k", "best", inner),
    Claim(
        "G2D",
        "G2D beats GRPO of four times its FLOPs, at the warm-up's rate",
        "over_k",
        "any",
        lambda points: against(points, "fourfold"),
    ),
    Claim(
        "G2D",
        "G2D beats GRPO at equal FLOPs, at the warm-up's rate",
        "over_k",
        "any",
        lambda points: against(points, "own"),
    ),
    Claim(
        "G2D",
        "the same, GRPO's rate chosen on dev",
        "over_k",
        "any",
        lambda points: against(points, "best"),
    ),
    Claim(
        "G2D",
        "the same, both tuned alike",
        "tuned",
        "any",
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
        "G2D",
        "token entropy of the rollouts falls with K",
        "over_k",
        "less",
        rollouts("pairs_entropy"),
        " %",
    ),
    Claim(
        "G2D",
        "distinct answers per prompt fall with K",
        "over_k",
        "less",
        rollouts("pairs_distinct_answers"),
        " %",
    ),
    Claim(
        "G2D",
        "a large K is overconfident: calibration error against K = 20",
        "over_k",
        "more",
        confidence,
    ),
    Claim(
        "G2D",
        "equally many pairs teach unequally: hard prompts against easy ones",
        "cause",
        "more",
        hard_less_easy,
    ),
    Claim("Bridging", "offline DPO improves the start", "spectrum", "more", offline_added),
    Claim(
        "Bridging",
        "online DPO beats offline DPO",
        "spectrum",
        "more",
        lambda points: arms_apart(points, "s1", "offline"),
    ),
    Claim(
        "Bridging",
        "the same at equal FLOPs",
        "rivals",
        "more",
        lambda scale: rivals_apart(scale, "dpo_s1", "offline"),
    ),
    Claim(
        "Bridging",
        "new rollouts every 10 updates equal online DPO",
        "spectrum",
        "level",
        lambda points: arms_apart(points, "s10", "s1"),
    ),
    Claim(
        "Bridging",
        "every 100 updates (here 50) too",
        "spectrum",
        "level",
        rarely,
    ),
    Claim(
        "Bridging",
        "GRPO equals online DPO",
        "spectrum",
        "level",
        lambda points: arms_apart(points, "grpo", "s1"),
    ),
    Claim(
        "Bridging",
        "the same at equal FLOPs",
        "rivals",
        "level",
        lambda scale: rivals_apart(scale, "grpo", "dpo_s1"),
    ),
)


def verdict(rule: str, found: Sequence[Found], unit: str) -> str:
    """Say what the intervals tell by a claim's rule."""
    if any(each.seeds == 1 for each in found):
        return "inconclusive"  # over problems only, so another seed may differ
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
    return "disagrees" if disagrees else "inconclusive"


def measured(claim: Claim, scale: Scale) -> list[Found] | None:
    """Return the differences of a claim at a scale, ascending; None where it has no study."""
    source = getattr(scale, claim.source)
    if not source:
        return None
    if claim.source in ("tuned", "rivals"):
        found = claim.find(scale)
    else:
        points = against_grpo(source, tuned=False) if claim.source == "over_k" else read(source)
        found = claim.find(points)
    # those out of range last
    return sorted(found, key=lambda each: (math.isnan(each.mean), each.mean))


def row(claim: Claim) -> str:
    """Write a claim, its verdict at each scale, and the largest difference at 0.14M, the scale with
    the most seeds."""
    scales: dict[str, list[str]] = {}
    shown = None
    for scale in SCALES:
        found = measured(claim, scale)
        if not found:
            continue
        inside = [each for each in found if each.seeds]
        shown = shown or max(inside, key=lambda each: abs(each.mean))
        word = verdict(claim.rule, found, claim.unit) if inside else "out of range"
        scales.setdefault(word, []).append(scale.name)
    assert shown is not None  # each claim has a study at 0.14M
    verdicts = "; ".join(f"**{word}** {', '.join(names)}" for word, names in scales.items())
    k = "" if shown.k is None else f", K = {shown.k}"
    number = f"{shown.mean:+.1f}{claim.unit} [{shown.low:+.1f}, {shown.high:+.1f}]{k}"
    return f"| {claim.text} | {verdicts} | {number} |"


def claims_of(paper: str) -> list[str]:
    """Write the table of a paper's claims."""
    heads = f"| {paper} | verdict | largest difference at 0.14M |"
    return [heads, "|---|---|---|", *(row(each) for each in CLAIMS if each.paper == paper)]


RUINED = 0.05
"""Accuracy that a ruined run loses, as in docs/rivals.md."""


def ruined() -> list[str]:
    """Count the ruined seeds of each study: GRPO falls below the start or a shorter run of the same
    rate and seed, DPO below its warm-up."""
    lines = ["| ruined seeds | GRPO, highest rate | lower rates | DPO |", "|---|---|---|---|"]
    for scale in SCALES:
        # arithmetic has one study, tuned alike
        studies = {
            scale.over_k: "",
            (scale.tuned,): f"{', older' * bool(scale.rivals)}, tuned alike",
        }
        for names, kind in studies.items():
            if not names[0]:
                continue
            grpo = grpo_falls(names)
            is_highest = grpo.rate == grpo.rate.max()
            highest = f"{ruined_of(grpo[is_highest])} at {grpo.rate.max():g}"
            lower = ruined_of(grpo[~is_highest])
            points = against_grpo(names, tuned=bool(kind))
            dpo = points.assign(fall=-points.gain.map(np.nanmean))
            lines.append(f"| {scale.name}{kind} | {highest} | {lower} | {ruined_of(dpo)} |")
    return lines


def grpo_falls(studies: Sequence[str]) -> pd.DataFrame:
    """Return by how much GRPO falls at most, by rate and seed."""
    policies = pd.read_parquet(RESULTS / "policies.parquet", filters=[("study", "in", studies)])
    start = policies[policies.policy.isin(["init", "sft"])].groupby("seed").test.first()
    grpo = policies[policies.arm == "grpo"].sort_values("budget")
    rows = []
    for (rate, seed), run in grpo.groupby(["rate", "seed"]):
        series = np.array([start[seed], *run.test])
        rows.append((float(rate), seed, (np.maximum.accumulate(series) - series).max()))
    return pd.DataFrame(rows, columns=["rate", "seed", "fall"])


def ruined_of(runs: pd.DataFrame) -> str:
    """Count the seeds with a ruined run."""
    falls = runs.groupby("seed").fall.max()
    return f"{(falls >= RUINED).sum()} of {len(falls)}" if len(falls) else "not tried"


def tables() -> str:
    """Write all tables of docs/evidence.md."""
    parts = (
        rivals_claims.advised("demo"),
        rivals_claims.compared("demo"),
        claims_of("G2D"),
        claims_of("Bridging"),
        ruined(),
    )
    return "\n\n".join("\n".join(lines) for lines in parts)


def details() -> str:
    """Write what no page has: each recipe at each budget, and what its answers are like."""
    parts = (rivals_claims.each_budget("demo"), rivals_claims.answers("demo"))
    return "\n\n".join("\n".join(lines) for lines in parts)


def tuned_chart() -> Figure:
    """Draw accuracy over FLOPs for GRPO and G2D, tuned alike, at the scales without rivals, with
    95 % bands over seeds and problems. G2D's labels are K."""
    studies = sorted(
        (scale.name, scale.tuned) for scale in SCALES if scale.tuned and not scale.rivals
    )
    with figures.styled():
        figure = Figure(figsize=(7, 3.4), layout="constrained")
        for ax, (task, study) in zip(figure.subplots(1, len(studies)), studies, strict=True):
            points = read(study)
            for arm, label in (("grpo", "GRPO"), ("g2d", "G2D")):
                flops, bands = [], []
                for k, seeds in chosen(points[points.arm == arm]).groupby("budget"):
                    found = in_points(frontier.mean_interval(np.stack([*seeds.accuracy])))
                    flops.append(seeds.flops.mean() / 1e12)
                    bands.append((found.mean, found.low, found.high))
                    if arm == "g2d":
                        place = (flops[-1], found.mean)
                        ax.annotate(str(k), place, (3, -9), textcoords="offset points")
                mean, low, high = np.transpose(bands)
                (line,) = ax.plot(flops, mean, label=label)
                ax.fill_between(flops, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
            ax.set_title(task)
            ax.set_xlabel("trillion FLOPs")
            ax.legend(loc="lower right")
        figure.axes[0].set_ylabel("accuracy on test problems, %")
    return figure


def charts() -> dict[str, Figure]:
    """Draw the charts of docs/evidence.md, by the names of their files."""
    return {"evidence-demo": rivals_claims.chart("demo"), "evidence-smollm2": tuned_chart()}


if __name__ == "__main__":
    if sys.argv[1:]:
        for name, figure in charts().items():
            drawn = figures.Chart(name, "", "", "", figure)
            Path(sys.argv[1], f"{name}.svg").write_bytes(drawn.file("svg"))
    else:
        print(tables(), details(), *rivals_claims.costs("demo"), sep="\n")
