"""A comparison in plain text: its sentence, its tables for terminal, Markdown and page, and all figures as CSV."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from g2d_jax import accounting, stats
from g2d_jax.report import format as fmt
from g2d_jax.report.compare import Comparison, Pair, Player
from g2d_jax.report.compare_read import SAMPLING
from g2d_jax.report.spreadsheet import sheet
from g2d_jax.report.table import Text, known

COLUMNS = ("run", "policy", "before_run", "before_policy", "measure", "value")
"""Of compare.csv. before_*: of a difference, what is subtracted; "" for a policy's own figures."""

ELO = (
    "A problem is a game between every two policies: the higher accuracy on it wins, equal ones draw, half a win each. "
    "Ratings are the maximum likelihood of the Bradley-Terry model and have the mean 1000; 100 points are 64 of 100 "
    "games. Intervals (95 %) are over another draw of problems."
)


def title(comparison: Comparison) -> str:
    """The runs by their labels; only how many they are if that is long."""
    labels = " · ".join(f"{side.mark}: {side.label}" for side in comparison.sides)
    return labels if len(labels) <= 60 else f"{len(comparison.sides)} runs compared"


def verdict(comparison: Comparison) -> str:
    """Which of the runs' last policies is best, and by how much before the next, in one sentence."""
    best, second = comparison.leaders
    pair = next(one for one in comparison.pairs if {id(one.before), id(one.after)} == {id(best), id(second)})
    size = abs(pair.paired.difference)
    over = f"{fmt.count(len(comparison.problems))} common problem{'s' if len(comparison.problems) != 1 else ''}"
    reached = f"{best.name} answers {_accuracy(best)} % of {over} correctly, {second.name} {_accuracy(second)} %"
    noise = {True: "beyond noise", False: "within noise", None: "too few problems to tell"}[pair.is_beyond_noise]
    return f"{reached}: {fmt.percent(size)}{_margin(pair)} points apart, {noise}."


def _margin(pair: Pair) -> str:
    return "" if math.isnan(pair.paired.sem) else f" ± {100 * pair.paired.sem:.1f}"


def _accuracy(player: Player) -> str:
    return fmt.spread(player.accuracy.mean, player.accuracy.sem_clustered)


def shared(comparison: Comparison) -> str:
    """How many problems are common, and how many of each run are not."""
    count = len(comparison.problems)
    others = [
        f"{len(side.problems) - count:,} of {side.mark}" for side in comparison.sides if len(side.problems) > count
    ]
    left = f"; {', '.join(others)} are not, and count nowhere here" if others else ", all there are"
    return f"{count:,} problems are common to all{left}."


def notes(comparison: Comparison) -> list[str]:
    """What to know about the table of policies: what costs leave out, and which are not known."""
    found = [
        "Costs are of all that led to a policy but supervised fine-tuning. K: steps of online training behind it. "
        "Accuracies: ± standard error clustered by problem; they say nothing about another seed of training."
    ]
    if comparison.left_out:
        listed = ", ".join(f"{policy} of {mark}" for mark, policy in comparison.left_out)
        found.append(f"Evaluated once for several of these runs, and listed with the first of them: {listed}.")
    outside = {player.side.mark: player.outside for player in comparison.players if player.outside}
    found += [
        f"{mark} starts from {policy}: what was done there is in neither its costs nor its K."
        for mark, policy in outside.items()
    ]
    return found


def runs_table(comparison: Comparison) -> Text:
    """The runs, and how they were evaluated."""
    names = {"num_generations": "answers each", "max_new_tokens": "max tokens"}
    columns = ["run", "seed", "evaluation", "split", "problems", *(names.get(name, name) for name in SAMPLING)]
    rows = [
        [
            side.mark,
            _seed(side.run.config.get("seed")),
            side.stage.name,
            side.split or fmt.UNKNOWN,
            fmt.count(len(side.problems)),
            *(fmt.value(fmt.number(side.sampling, name)) for name in SAMPLING),
            str(side.run.config.get("name", fmt.UNKNOWN)),
            side.label,
        ]
        for side in comparison.sides
    ]
    return "Runs and how they were evaluated", [*columns, "config", "folder"], rows


def _seed(value: object) -> str:
    return str(value) if isinstance(value, int) else fmt.UNKNOWN


def players_table(comparison: Comparison) -> Text:
    """Policies with accuracy, pass@k, length, entropy, K, seed and costs."""
    k = comparison.samples
    several = any(player.costs["device_seconds"] > player.costs["seconds"] for player in comparison.players)
    hidden = {f"pass@{k} %": k == 1, "device time": not several}
    over = f"Policies on the {fmt.count(len(comparison.problems))} common problems"
    rows = [_row(player, k) for player in comparison.players]
    return known(over, rows, hidden=[name for name in hidden if hidden[name]])


def _row(player: Player, k: int) -> dict[str, str]:
    costs = player.costs
    return {
        "policy": player.name,
        "accuracy %": _accuracy(player),
        f"pass@{k} %": fmt.percent(stats.pass_at(player.correct, k)),
        "length": fmt.value(player.length),
        "entropy": fmt.value(player.entropy),
        "K": fmt.count(player.steps),
        "seed": _seed(player.side.run.config.get("seed")),
        "generated": fmt.quantity(costs["generated"]),
        "trained": fmt.quantity(costs["trained"]),
        "FLOPs": fmt.quantity(costs["flops"]),
        "time": fmt.duration(costs["seconds"]),
        "device time": fmt.duration(costs["device_seconds"]),
        "price": fmt.UNKNOWN if math.isnan(costs.get("price", math.nan)) else f"{costs['price']:,.2f}",
        "run": player.side.label,
    }


def pairs_table(comparison: Comparison) -> Text:
    """Every difference with its intervals, and on how many problems the second policy is better, equal and worse."""
    columns = ["pair", "difference", "95 % interval", "bootstrap 95 %", "better", "equal", "worse", "beyond noise"]
    rows = [
        [
            f"{pair.before.name} → {pair.after.name}",
            fmt.change(pair.paired.difference, pair.paired.sem),
            _interval(pair.low, pair.high),
            _interval(pair.interval.low, pair.interval.high),
            *map(fmt.count, (pair.wins, pair.draws, pair.losses)),
            {True: "yes", False: "no", None: fmt.UNKNOWN}[pair.is_beyond_noise],
        ]
        for pair in comparison.pairs
    ]
    return "Paired differences in accuracy, points (second minus first)", columns, rows


def differences_note(comparison: Comparison) -> str:
    """How to read the table of differences."""
    note = (
        "95 % interval: the difference ± 1.96 standard errors, clustered by problem; bootstrap: over another draw of "
        "problems. Beyond noise: the first interval leaves zero out. Better, equal, worse: problems on which the "
        "second policy's accuracy is higher, the same, lower."
    )
    if (count := len(comparison.pairs)) > 4:
        note += f" Of {count} pairs without any difference about {0.05 * count:.1f} would seem beyond noise by chance."
    return note


def _interval(low: float, high: float) -> str:
    return fmt.UNKNOWN if math.isnan(low) else f"{100 * low:+.1f} to {100 * high:+.1f}"


def ratings_table(comparison: Comparison) -> Text:
    """Elo ratings with intervals, best first."""
    ordered = sorted(comparison.ratings, key=lambda rating: -rating.rating)
    rows = [[r.name, f"{r.rating:.0f}", f"{r.low:.0f} to {r.high:.0f}", fmt.count(r.games)] for r in ordered]
    return "Elo ratings over the common problems", ["policy", "rating", "95 % interval", "games"], rows


def settings_tables(comparison: Comparison) -> list[Text]:
    """What differs in settings from the first run, a table for each other run that differs."""
    first = comparison.sides[0]
    found = []
    for side, changes in comparison.settings:
        rows = [[field, change] for field, _, change in (line.partition(": ") for line in changes)]
        if rows:
            heading = f"Settings that differ, {first.mark} ({first.label}) -> {side.mark} ({side.label})"
            found.append((heading, ["setting", "change"], rows))
    return found


def same_settings(comparison: Comparison) -> str:
    """Which runs have the first one's settings, "" if none has."""
    same = [side.mark for side, changes in comparison.settings if not changes]
    return f"{', '.join(same)}: all settings as those of {comparison.sides[0].mark}." if same else ""


def spreadsheet(comparison: Comparison) -> str:
    """The text of compare.csv: columns `COLUMNS`, one figure a row; fractions, tokens, nats, seconds, Elo points."""
    return sheet(COLUMNS, _records(comparison))


def _records(comparison: Comparison) -> Iterator[tuple[str, str, str, str, str, float]]:
    for player, rating in zip(comparison.players, comparison.ratings, strict=True):
        for measure, value in _figures(player, comparison.samples):
            yield player.side.label, player.policy, "", "", measure, value
        for measure in ("rating", "low", "high"):
            yield player.side.label, player.policy, "", "", f"elo/{measure}", float(getattr(rating, measure))
    for pair in comparison.pairs:
        who = (pair.after.side.label, pair.after.policy, pair.before.side.label, pair.before.policy)
        found = {"difference": pair.paired.difference, "sem": pair.paired.sem, "low": pair.low, "high": pair.high}
        found |= {"bootstrap/low": pair.interval.low, "bootstrap/high": pair.interval.high}
        found |= {"better": pair.wins, "equal": pair.draws, "worse": pair.losses}
        for measure, value in found.items():
            yield *who, measure, value


def _figures(player: Player, k: int) -> Sequence[tuple[str, float]]:
    accuracy = player.accuracy
    found = [("mean", accuracy.mean), ("sem_clustered", accuracy.sem_clustered), ("problems", accuracy.problems)]
    found += [(f"pass_at/{k}", stats.pass_at(player.correct, k))]
    found += [("mean_length", player.length), ("entropy", player.entropy), ("steps", player.steps)]
    return found + [(f"cost/{m}", player.costs[m]) for m in accounting.MEASURES if m in player.costs]
