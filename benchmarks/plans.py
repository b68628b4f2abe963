r"""Plans of the recipes for real models: compiled for each machine, then written into
docs/models.md.

    python benchmarks/plans.py --list                       the rows, and which of them are there
    python benchmarks/plans.py --only qwen2.5-0.5b v5e-4    compile those that have all these words in their name
    python benchmarks/plans.py                              compile what is missing, row after row
    python benchmarks/plans.py --write                      compile nothing, write what is there

A row is a config on a machine, for G2D and for GRPO alone, whose programs are mostly the same. It
is compiled in a process of its own and added to the table in docs/models.md when it is done, so
that this may be stopped at any time. A row that is there stays unless --again. TPUs need the extra
plan, GPUs the extra cuda.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import multiprocessing
import re
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from g2d_jax import recipes  # noqa: E402

TABLE = ROOT / "docs" / "models.md"
MARK = "<!-- written by benchmarks/plans.py -->\n"
METHODS = ("g2d", "grpo")
COMPILERS = {"tpu": ["libtpu"], "gpu": ["jax-cuda12-plugin", "jax-cuda13-plugin"]}
LORA = "lora=32"
HALF = "moments=bfloat16"  # for 8B on 16 chips of 16 GB, and 4B on eight

HEAD = (
    "config",
    "machine",
    "fullest program, GiB",
    "of",
    "hours of G2D, by stage",
    "of GRPO alone",
    "at least",
    "responses of 600",
    "compiled",
)
RESPONSE = 600
"""Tokens of a mean response, for the hours beside those of the longest."""

Results = dict[str, Sequence[str]]
"""Name of a row -> its cells in the table, under HEAD."""


@dataclass(frozen=True)
class Row:
    """A recipe, with one of its choices or "", on a machine."""

    recipe: str
    choice: str
    machine: str

    @property
    def config(self) -> str:
        """Return what --config takes."""
        return f"{self.recipe}:{self.choice}" if self.choice else self.recipe

    @property
    def name(self) -> str:
        """Return the row's key among the results."""
        return f"{self.config} on {self.machine}"


def rows() -> list[Row]:
    """All rows, those of the largest models first: a TPU slice and a GPU machine for each, more for
    the first."""
    small = [("", "v5e-4"), ("", "v5e-8"), ("", "h100x1")]
    which = {
        "qwen2.5-7b": [
            ("", "v5e-16"),
            ("", "v6e-8"),
            ("", "v5p-16"),
            ("", "h100x8"),
            (LORA, "h100x1"),
        ],
        "llama-3.1-8b": [("", "v6e-8"), ("", "h100x8"), (LORA, "h100x1")],
        "qwen3-8b": [(HALF, "v5e-16"), ("", "h100x8"), (LORA, "v6e-8")],
        "qwen3-30b-a3b": [("", "v5p-32"), (LORA, "h100x8")],
        "qwen3-4b": [("", "v5e-16"), (LORA, "h100x1")],
        "smollm3-3b": [("", "v5e-8")],
        "olmo-3-7b": [("", "v5e-16")],
        "gemma-3-4b": [("", "v5e-16")],
        "phi-4-mini": [("", "v5e-16")],
        "gemma-3-1b": [("", "v5e-8")],
        "qwen3.5-4b": [(HALF, "v5e-8"), (LORA, "v5e-8"), (LORA, "h100x1")],
        "qwen3.5-0.8b": [("", "v5e-8"), ("", "h100x1")],
        "qwen2.5-1.5b": [*small, ("", "h100x8")],
    }
    ordered = [*which, *(name for name in recipes.MODELS if name not in which)]
    return [
        Row(name, choice, machine) for name in ordered for choice, machine in which.get(name, small)
    ]


# Compiling


def measure(row: Row) -> dict[str, Any]:
    """Compile a row's programs. In a process that has not used JAX."""
    from g2d_jax.config import Config
    from g2d_jax.plan import planning, target
    from g2d_jax.plan.show import hours
    from g2d_jax.plan.topologies import GIB, topology
    from g2d_jax.recipes.config_load import resolve

    machine = topology(row.machine)
    target.prepare(machine)
    compiler = planning.Compiler(machine, lambda text: print(f"  {text}", flush=True))
    found, shorter = {}, {}
    for method in METHODS:
        spec = f"{row.config}{',' if row.choice else ':'}method={method}"
        config = Config.of(resolve(spec))
        made = planning.make(config, compiler)
        found[method] = [_stage(made, name) for name in made.stages]
        made = planning.make(config, compiler, response=RESPONSE)  # the same programs
        shorter[method] = round(hours(made.entries), 2)
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": _versions(["jax", *COMPILERS[machine.device.platform]]),
        "memory": round(machine.device.usable / GIB, 2),
        "chips": machine.chips,
        "methods": found,
        "shorter": shorter,
    }


def _versions(packages: Sequence[str]) -> dict[str, str]:
    """Of those that are installed."""
    installed = {found.name: found.version for found in importlib.metadata.distributions()}
    return {name: installed[name] for name in packages if name in installed}


def _stage(made: Any, name: str) -> dict[str, Any]:
    """A stage's fullest program with its GiB a device; what does not fit; hours, and at least;
    tokens of the whole stage."""
    from g2d_jax.plan.show import hours, least_hours
    from g2d_jax.plan.topologies import GIB

    entries = [entry for entry in made.entries if entry.program.stage == name]
    fullest = max(entries, key=lambda entry: entry.total)
    misfits = {
        entry.program.name: entry.why or f"needs {entry.total / GIB:.2f} GiB"
        for entry in entries
        if not entry.fits(made.topology.device)
    }
    tokens = {
        kind: sum(getattr(e.program.work, kind) for e in entries)
        for kind in ("generated", "trained")
    }
    return {
        "stage": name,
        "peak": round(fullest.total / GIB, 2),
        "program": fullest.program.name,
        "misfits": misfits,
        "hours": round(hours(entries), 2),
        "least": round(least_hours(entries), 2),
        **{kind: round(count) for kind, count in tokens.items()},
    }


def compile_rows(wanted: Sequence[Row], results: Results, stamps: Stamps) -> None:
    """Compile row after row, each in a process of its own, and write each when it is there."""
    for number, row in enumerate(wanted, 1):
        print(f"{number} of {len(wanted)}: {row.name}", flush=True)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            try:
                plan = pool.submit(measure, row).result()
            except BrokenProcessPool:
                print("  the process was killed, as for want of memory: left out", flush=True)
                continue
        results[row.name] = cells_of(row, plan)
        stamps.add(plan)
        write(results, stamps)


# Writing


def total_hours(stages: Sequence[Mapping[str, Any]]) -> str:
    """Of a whole run; "does not fit" with the program that does not."""
    for stage in stages:
        for program, why in stage["misfits"].items():
            return f"no: {stage['stage']}, {program}, {why}"
    return f"{sum(stage['hours'] for stage in stages):,.1f}"


def cells_of(row: Row, plan: Mapping[str, Any]) -> Sequence[str]:
    """A row of the table, from what `measure` found."""
    g2d, grpo = (plan["methods"][method] for method in METHODS)
    fullest = max((*g2d, *grpo), key=lambda stage: float(stage["peak"]))
    by_stage = ", ".join(f"{stage['stage']} {stage['hours']:.1f}" for stage in g2d)
    hours = total_hours(g2d)
    least = [f"{sum(stage['least'] for stage in stages):,.1f}" for stages in (g2d, grpo)]
    shorter = [f"{plan['shorter'][method]:,.1f}" for method in METHODS]
    return (
        f"`{row.config}`",
        row.machine,
        f"{fullest['peak']:.2f} ({fullest['stage']}, {fullest['program']})",
        f"{plan['memory']:.2f}",
        hours if hours.startswith("no") else f"**{hours}**: {by_stage}",
        total_hours(grpo),
        "; ".join(least),
        "; ".join(shorter),
        plan["date"],
    )


@dataclass
class Stamps:
    """The versions that the rows were compiled with ("jax 0.10.2")."""

    versions: set[str] = field(default_factory=set)

    def add(self, plan: Mapping[str, Any]) -> None:
        """One more row, as `measure` found it."""
        self.versions |= {f"{name} {version}" for name, version in plan["versions"].items()}

    def line(self) -> str:
        """As a sentence."""
        return f"Compiled with {', '.join(sorted(self.versions))}; nothing ran on a TPU or GPU."


def read() -> tuple[Results, Stamps]:
    """What the table in docs/models.md has. Raises ValueError if it has no mark."""
    _, mark, body = TABLE.read_text("utf-8").partition(MARK)
    if not mark:
        raise ValueError(f"{TABLE} has no line {MARK.strip()!r}")
    written = [
        tuple(cell.strip() for cell in line[1:-1].split("|"))
        for line in body.splitlines()
        if line[:3] == "| `"
    ]
    there = {(cells[0], cells[1]): cells for cells in written}
    results: Results = {
        row.name: found for row in rows() if (found := there.get((f"`{row.config}`", row.machine)))
    }
    stamps = Stamps()
    if line := re.search(r"^Compiled with (.*); nothing", body, re.M):
        stamps = Stamps(set(line[1].split(", ")))
    return results, stamps


def write(results: Results, stamps: Stamps) -> None:
    """The table in docs/models.md, after its mark."""
    head = TABLE.read_text("utf-8").partition(MARK)[0]
    lines = [results[row.name] for row in rows() if row.name in results]
    table = [
        f"| {' | '.join(HEAD)} |",
        "|---" * len(HEAD) + "|",
        *(f"| {' | '.join(cells)} |" for cells in lines),
    ]
    body = (
        "\n".join(["", stamps.line(), "", *table, ""]) if results else "\nNothing compiled yet.\n"
    )
    if results and (missing := [f"`{row.name}`" for row in rows() if row.name not in results]):
        body += f"\nNot compiled yet: {', '.join(missing)}.\n"
    TABLE.write_text(head + MARK + body, "utf-8")


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="WORD", help="rows whose name has all these words"
    )
    parser.add_argument("--again", action="store_true", help="compile rows that are there, too")
    parser.add_argument("--list", action="store_true", help="list the rows")
    parser.add_argument("--write", action="store_true", help="write what is there, compile nothing")
    arguments = parser.parse_args()
    results, stamps = read()
    chosen = [row for row in rows() if set(arguments.only) <= set(re.split(r"[ :]", row.name))]
    if arguments.list:
        print(
            "\n".join(
                f"{'there  ' if row.name in results else 'missing'}  {row.name}" for row in chosen
            )
        )
        return
    if not arguments.write:
        compile_rows(
            [row for row in chosen if arguments.again or row.name not in results], results, stamps
        )
    write(results, stamps)


if __name__ == "__main__":
    main()
