"""Display of a plan: the verdict, a row for each stage and, if requested, every program's memory
and time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from g2d_jax.config import Collect, Evaluate, TrainingStage, setting_of
from g2d_jax.models.decoder import count_params
from g2d_jax.plan.planning import Entry, Plan
from g2d_jax.plan.topologies import GIB
from g2d_jax.plan.work import ASSUMED, SUITES, Time, reads_locally
from g2d_jax.runtime.tracking import Screen
from g2d_jax.session.stage_result import TOKENS
from g2d_jax.study.pricing import Rates


def show(
    plan: Plan,
    screen: Screen,
    *,
    price: float | None = None,
    response: int | None = None,
    verbose: bool = False,
) -> None:
    """Print whether the run fits, its hours and its cost; then a row for each stage.

    price: of a chip-hour. response: mean tokens of a response that the plan assumes. verbose:
    whether to print every program's memory and time.
    """
    screen.say(verdict(plan, price))
    columns = ["stage", "fullest program", "GiB", "of", "fits", *TOKENS, "hours", "least", "cost"]
    rows = [stage_row(plan, name, price) for name in [*plan.stages, "all"]]
    first = ("GiB", "of", "fits", "hours", "least", "cost")
    screen.table(f"the run on {plan.topology.name}", columns, rows, first)
    device = plan.topology.device
    length = "max_new_tokens" if response is None else f"{response} tokens"
    screen.say(
        f"Tokens and hours assume prompts of {plan.prompt:,.0f} tokens and responses of {length} "
        f"(set their means with --prompt N and --response N). Hours assume {device.reached:.0%} of a "
        f"{plan.topology.kind}'s documented speed, {device.decoding:.0%} in decode steps, as published "
        "runs and one H200 reach, plus estimated waits; "
        '"least" assumes full speed and no waits. Verifiers, checkpoints and loading are not included.'
        + ("" if verbose else " For every program, add --verbose.")
    )
    for line in assumptions(plan):
        screen.say(line)
    if plan.config.stages_of(TrainingStage):
        screen.say(f"training: {plan.micro}")
    if verbose:
        _show_programs(plan, screen)


def hours(entries: Sequence[Entry]) -> float:
    """Sum the hours at the reached share of the documented rates; programs that do not fit count
    0."""
    return sum(e.program.work.calls * e.time.seconds for e in entries if e.time) / 3600


def least_hours(entries: Sequence[Entry]) -> float:
    """Sum the hours at the documented rates, without waits."""
    return sum(e.program.work.calls * e.time.least for e in entries if e.time) / 3600


def _tokens(entries: Sequence[Entry], kind: str) -> float:
    return sum(getattr(entry.program.work, kind) for entry in entries)


def rates(plan: Plan, response: int | None) -> Rates:
    """Compute the seconds per token, by kind of token and of stage, as `hours` does.

    response: as in the plan. A stage's other work (converting parameters, inserting rows, the first
    state) is distributed over its kinds of tokens.
    """
    # seconds by kind of stage ("": all) and of token
    spent = defaultdict[tuple[str, str], float](float)
    counts = defaultdict[tuple[str, str], float](float)
    for name in plan.stages:
        entries = [entry for entry in plan.entries if entry.program.stage == name]
        by_kind = {}
        for kind in TOKENS:
            by_kind[kind] = hours([entry for entry in entries if _tokens([entry], kind)])
        with_tokens = sum(by_kind.values())
        if not with_tokens:
            continue
        for stage in ("", plan.config.stages[name].kind):
            for kind in TOKENS:
                spent[stage, kind] += 3600 * by_kind[kind] * hours(entries) / with_tokens
                counts[stage, kind] += _tokens(entries, kind)
    seconds: dict[str, dict[str, float]] = {}
    for (stage, kind), count in counts.items():
        if count:
            seconds.setdefault(stage, {})[kind] = spent[stage, kind] / count
    longest = 0
    for name in plan.stages:
        for sampling in plan.config.stages[name].samplings():
            longest = max(longest, sampling.max_new_tokens)
    return Rates(
        recipe=plan.config.name,
        topology=plan.topology.name,
        seconds=seconds,
        chips=plan.topology.chips,
        response=response or longest,
    )


def verdict(plan: Plan, price: float | None) -> str:
    """Return one line: whether the run fits, with hours and cost, or the programs that do not
    fit."""
    usable = _gib(plan.topology.device.usable)
    if plan.misfits:
        needs = []
        for entry in plan.misfits:
            why = entry.why or f"needs {_gib(entry.total)} of {usable} GiB"
            needs.append(f"{entry.program.stage}, {entry.program.name}: {why}")
        return f"fits: NO, {'; '.join(needs)}"
    spent = hours(plan.entries)
    chips = plan.topology.chips
    cost = ""
    if price is not None:
        cost = f", {spent * chips * price:,.2f} at {price:g} a chip-hour ({chips} chips)"
    least = least_hours(plan.entries)
    return f"fits: yes, {spent:,.1f} h on {plan.topology.name} (at least {least:,.1f}){cost}"


def stage_row(plan: Plan, name: str, price: float | None) -> list[str]:
    """Build the row of a stage or of the run ("all"): fullest program, its memory, tokens, hours,
    least hours, cost."""
    device = plan.topology.device
    entries = [entry for entry in plan.entries if name in (entry.program.stage, "all")]
    fullest = max(entries, key=lambda entry: (not entry.compiled, entry.total))
    memory = [_gib(fullest.total) if fullest.compiled else "?", _gib(device.usable)]
    fits = "yes" if all(entry.fits(device) for entry in entries) else "NO"
    counts = [f"{_tokens(entries, kind):,.0f}" for kind in TOKENS]
    spent = hours(entries)
    cost = "" if price is None else f"{spent * plan.topology.chips * price:,.2f}"
    spans = [f"{spent:.2f}", f"{least_hours(entries):.2f}"]
    return [name, fullest.program.name, *memory, fits, *counts, *spans, cost]


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"


def assumptions(plan: Plan) -> list[str]:
    """List a line for each assumption that neither settings nor problems decide."""
    config = plan.config
    if reads_locally(config):
        return []
    lines = []
    if plan.prompt == config.data.max_prompt_length:
        lines.append(
            f"prompts are assumed to have data.max_prompt_length={plan.prompt:,.0f} tokens, since "
            "tokenizer and problems are not all on this machine: set their mean with --prompt N"
        )
    splits = {}
    for name, evaluation in config.stages_of(Evaluate).items():
        if name in plan.stages:
            splits[evaluation.split] = name
    for split, stage in sorted(splits.items()):
        for name, task in config.all_tasks.items():
            source = getattr(task, split)
            if source.limit or source.path.partition(":")[0] in SUITES:
                continue
            field = setting_of(name, split)
            lines.append(
                f"{stage}: {field} is assumed to have {ASSUMED:,} problems, since it was not read and "
                f"has no limit: set their number with --config.{field}.limit=N"
            )
    unlimited = []
    for name, task in config.all_tasks.items():
        if task.train.path and not task.train.limit:
            unlimited.append(setting_of(name, "train"))
    for name, collect in config.stages_of(Collect).items():
        if unlimited and name in plan.stages and collect.samples:
            lines.append(
                f"{name}: {collect.prompts:,} prompts are assumed, since {', '.join(unlimited)} was not "
                f"read and has no limit: set their number with --config.{unlimited[0]}.limit=N"
            )
    return lines


def _show_programs(plan: Plan, screen: Screen) -> None:
    device = plan.topology.device
    mesh = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.items())
    screen.say(plan.topology.describe())
    screen.say(
        f"model: {count_params(plan.model):,} parameters; mesh {mesh}; "
        f"{plan.config.dtype}; the sampler's weights split over {plan.sampling_ways} devices"
    )
    memory, calls, decoding = [], [], []
    for entry in plan.entries:
        work = entry.program.work
        compiled = entry.compiled
        name = [entry.program.stage, entry.program.name]
        peak = [_gib(compiled.peak), _gib(entry.total)] if compiled else ["?", "?"]
        memory.append([*name, *peak, _gib(device.usable), "yes" if entry.fits(device) else "NO"])
        if compiled is None or entry.time is None:
            continue
        sent = f"{sum(compiled.sent.values()) / 1e9:.3g}"
        if plan.topology.between:
            sent += f", {compiled.far / 1e9:.3g} to other {plan.topology.between}"
        if compiled.unknown:
            sent += f" and {compiled.unknown} unknown"
        time = entry.time
        spans = [f"{1e3 * time.seconds:.3g}", f"{1e3 * time.least:.3g}", time.bound]
        calls.append([*name, f"{work.flops / 1e12:.3g}", sent, *spans, f"{work.calls:,.0f}"])
        if work.layers and work.calls:
            decoding.append([*name, *_decode_cells(plan, entry, time)])
    columns = ["stage", "program", "peak GiB", "with the rest", "of", "fits"]
    screen.table("memory of each device", columns, memory)
    columns = ["stage", "program", "TFLOP", "sent GB", "ms", "least ms", "longest part", "calls"]
    screen.table("one call on each device", columns, calls)
    split = ["weights ms", "cache ms", "links ms", "waits ms", "step ms"]
    columns = ["stage", "program", "rows", "columns read", *split, "tokens/s of a device"]
    screen.table("decode steps", columns, decoding)
    screen.say(
        "A decode step's time is the sum of its reads, transfers and waits. tokens/s includes rows "
        "that wait for the longest response. Programs over many tokens take as long as their "
        "longest part."
    )


def _decode_cells(plan: Plan, entry: Entry, time: Time) -> list[str]:
    """Format a decode step's rows, columns and parts, and the tokens that a device samples per
    second."""
    work, parts, steps = entry.program.work, time.parts, entry.program.trips
    device = plan.topology.device
    spans = [
        max(parts.products, parts.memory) / device.decoding,
        parts.cache / device.decoding,
        (parts.links + parts.network) / device.reached,
        parts.waits,
        time.seconds,
    ]
    rate = work.generated / work.calls / time.seconds / plan.topology.devices
    shown = [f"{1e3 * span / steps:.2f}" for span in spans]
    return [f"{work.rows:,}", f"{work.columns:,.0f}", *shown, f"{rate:,.0f}"]
