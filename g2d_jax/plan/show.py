"""A plan on the screen: the verdict, a row for each stage; on request, memory and roofline of every program."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp

from g2d_jax.config import Evaluate
from g2d_jax.models.decoder import count_params
from g2d_jax.models.flops import matmul_params
from g2d_jax.plan.planning import Entry, Plan
from g2d_jax.plan.topologies import GIB
from g2d_jax.plan.work import ASSUMED, SUITES, reads_locally
from g2d_jax.runtime.tracking import Screen
from g2d_jax.sampler.capacity import kv_bytes

EFFICIENCY = 0.5
"""Assumed share of the roofline: published runs reach 40 to 65 % of the peak in training, and in decoding 40 to 85 % of
the bandwidth."""


DECODING, FLOOR_ROWS, FLOOR_CONTEXT = 0.55, 256, 1024
"""Assumed share of its roofline for decoding, and rows and context of the floor beside which it is shown."""


def show(
    plan: Plan,
    screen: Screen,
    *,
    price: float | None = None,
    response: int | None = None,
    verbose: bool = False,
) -> None:
    """Print whether the run fits, how long it takes and what it costs; then a row for each stage.

    price: of one chip for an hour. response: mean tokens of a response that the work was counted for. verbose: every
    program's memory and time, too.
    """
    screen.say(verdict(plan, price))
    columns = ["stage", "fullest program", "GiB", "of", "fits", "generated", "trained", "hours", "cost"]
    screen.table(f"the run on {plan.topology.name}", columns, short_rows(plan, price))
    length = "max_new_tokens" if response is None else f"{response} tokens"
    screen.say(
        f"Tokens and hours are for prompts of {plan.prompt:,.0f} tokens and responses of {length} (--prompt N, "
        f"--response N: their means), at {EFFICIENCY:.0%} of the roofline, "
        "without verifiers, judges, checkpoints and loading." + ("" if verbose else " Every program: --verbose.")
    )
    for line in assumptions(plan):
        screen.say(line)
    if verbose:
        _show_programs(plan, screen, price)


def verdict(plan: Plan, price: float | None) -> str:
    """Say in one line whether the run fits, with hours and cost, or else what does not fit."""
    if plan.misfits:
        return f"fits: NO, {'; '.join(_need(plan, entry) for entry in plan.misfits)}"
    spent = hours(plan.entries) / EFFICIENCY
    chips = plan.topology.chips
    cost = "" if price is None else f", {spent * chips * price:,.2f} at {price:g} a chip-hour ({chips} chips)"
    return f"fits: yes, {spent:,.1f} h on {plan.topology.name}{cost}"


def _need(plan: Plan, entry: Entry) -> str:
    needs = entry.why or f"needs {entry.total / GIB:.2f} of {plan.topology.device.usable / GIB:.2f} GiB"
    return f"{entry.program.stage}, {entry.program.name}: {needs}"


def short_rows(plan: Plan, price: float | None) -> list[list[str]]:
    """Build a row for each stage, and one for the run: fullest program, its memory, tokens, hours and cost."""
    rows = []
    for name, generated, _, _, trained, _, spent, cost in stage_rows(plan, price):
        entries = [entry for entry in plan.entries if name in (entry.program.stage, "all")]
        fullest = max(entries, key=lambda entry: (not entry.compiled, entry.total))
        _, program, _, total, most, _, _ = memory_row(plan, fullest)
        fits = "yes" if all(entry.fits(plan.topology.device) for entry in entries) else "NO"
        rows.append([name, program, total, most, fits, generated, trained, spent, cost])
    return rows


def assumptions(plan: Plan) -> list[str]:
    """List a line for each assumption of the work that neither settings nor problems decide."""
    config, planned = plan.config, {entry.program.stage for entry in plan.entries}
    if reads_locally(config):
        return []
    splits = {stage.split: name for name in planned if isinstance(stage := config.stages[name], Evaluate)}
    sources = {
        f"data.{split}" if name == "main" else f"tasks.{name}.{split}": (stage, getattr(task, split))
        for split, stage in sorted(splits.items())
        for name, task in config.all_tasks.items()
    }
    lengths = [
        f"prompts of data.max_prompt_length tokens, {plan.prompt:,.0f}, are assumed: tokenizer and problems are not "
        "all on this machine; --prompt N gives their mean"
    ]
    return lengths * (plan.prompt == config.data.max_prompt_length) + [
        f"{stage}: {ASSUMED:,} problems of {name}, which is not read and has no limit: set how many there are with "
        f"--config.{name}.limit=N"
        for name, (stage, source) in sources.items()
        if not source.limit and source.path.partition(":")[0] not in SUITES
    ]


def _show_programs(plan: Plan, screen: Screen, price: float | None) -> None:
    mesh = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.items())
    compute = plan.config.compute
    screen.say(plan.topology.describe())
    screen.say(
        f"model: {count_params(plan.model):,} parameters; mesh {mesh}; microbatch_tokens={compute.microbatch_tokens}, "
        f"remat={compute.remat}, {plan.config.dtype}; the sampler's weights over {plan.sampling_ways} devices"
    )
    columns = ["stage", "program", "peak GiB", "with the rest", "of", "fits", "of it, by formula, GiB"]
    screen.table("memory of each device", columns, [memory_row(plan, entry) for entry in plan.entries])
    columns = ["stage", "program", "TFLOP", "sent GB", "roofline ms", "bound by", "calls"]
    screen.table("one call on each device", columns, [time_row(entry) for entry in plan.entries if entry.time])
    columns = ["stage", "program", "rows", "tokens/s of a device", "share of the floor"]
    screen.table("decoding", columns, [decode_row(plan, entry) for entry in plan.entries if is_decode(entry)])
    screen.say(
        f"Decoding at {DECODING:.0%} of its roofline, rows that wait for the longest response included; beside the "
        f"floor of {FLOOR_ROWS} rows a device at a context of {FLOOR_CONTEXT:,} tokens with all weights on it."
    )
    columns = ["stage", "generated", "prefilled", "scored", "trained", "hours at least", "hours", "cost"]
    screen.table("the run", columns, stage_rows(plan, price))
    screen.say(
        f"Hours at least: every program at its roofline, max(FLOPs, memory, links). Hours: at {EFFICIENCY:.0%} of that."
    )


def memory_row(plan: Plan, entry: Entry) -> list[str]:
    """Build a row: stage, program, peak, peak with residents beside it, a device's memory, whether it fits, parts."""
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in entry.program.work.parts.items())
    peak = f"{entry.compiled.peak / GIB:.2f}" if entry.compiled else "?"
    total = f"{entry.total / GIB:.2f}" if entry.compiled else "?"
    fits = "yes" if entry.fits(plan.topology.device) else "NO"
    return [
        entry.program.stage,
        entry.program.name,
        peak,
        total,
        f"{plan.topology.device.usable / GIB:.2f}",
        fits,
        parts,
    ]


def time_row(entry: Entry) -> list[str]:
    """Build a row: stage, program, TFLOP and GB sent in one call, least milliseconds, bound, calls in the stage."""
    assert entry.compiled is not None and entry.time is not None
    sent = f"{sum(entry.compiled.sent.values()) / 1e9:.3g}"
    if entry.compiled.unknown:
        sent += f" and {entry.compiled.unknown} unknown"
    work = entry.program.work
    return [
        entry.program.stage,
        entry.program.name,
        f"{work.flops / 1e12:.3g}",
        sent,
        f"{1e3 * entry.time.seconds:.3g}",
        entry.time.bound,
        f"{work.calls:,.0f}",
    ]


def is_decode(entry: Entry) -> bool:
    """Return whether a program generates tokens, and fits."""
    return bool(entry.time and entry.program.work.generated)


def decode_row(plan: Plan, entry: Entry) -> list[str]:
    """Build a row: stage, program, rows decoded together, tokens/s of a device, and those as a share of the floor."""
    assert entry.time is not None
    work, device = entry.program.work, plan.topology.device
    rate = DECODING * work.generated / (work.calls * entry.time.seconds) / plan.topology.devices
    itemsize = jnp.dtype(plan.config.dtype).itemsize
    read = matmul_params(plan.model.base) * itemsize + FLOOR_ROWS * FLOOR_CONTEXT * kv_bytes(plan.model, itemsize)
    share = rate / (FLOOR_ROWS * device.bandwidth / read)
    return [entry.program.stage, entry.program.name, f"{work.rows:,}", f"{rate:,.0f}", f"{share:.0%}"]


def stage_rows(plan: Plan, price: float | None) -> list[list[str]]:
    """Build rows of tokens, hours and cost: of every stage, and of the run."""
    names = list(dict.fromkeys(entry.program.stage for entry in plan.entries))
    rows = [_stage_row(plan, name, [e for e in plan.entries if e.program.stage == name], price) for name in names]
    return [*rows, _stage_row(plan, "all", plan.entries, price)]


def hours(entries: Sequence[Entry]) -> float:
    """Sum the hours at the roofline; programs that do not fit count as nothing."""
    return sum(entry.program.work.calls * entry.time.seconds for entry in entries if entry.time) / 3600


def _stage_row(plan: Plan, name: str, entries: Sequence[Entry], price: float | None) -> list[str]:
    counts = [
        sum(getattr(entry.program.work, kind) for entry in entries)
        for kind in ("generated", "prefilled", "scored", "trained")
    ]
    least = hours(entries)
    cost = "" if price is None else f"{least / EFFICIENCY * plan.topology.chips * price:,.2f}"
    return [name, *(f"{count:,.0f}" for count in counts), f"{least:.2f}", f"{least / EFFICIENCY:.2f}", cost]
