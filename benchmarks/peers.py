r"""Measure this library beside its peers, at equal work, and print a table of tokens per
CPU-second.

    taskset -c 1 python benchmarks/peers.py sampling --tunix ~/tunix/bin/python --trl ~/trl/bin/python
    taskset -c 1 python benchmarks/peers.py dpo      --tunix ~/tunix/bin/python --trl ~/trl/bin/python
    taskset -c 1 python benchmarks/peers.py grpo     --tunix ~/tunix/bin/python --trl ~/trl/bin/python

--tunix, --trl: Pythons of environments that have these libraries; without one its column is left
out. Every library has a process of its own, and in each round they take a step of the case in turn,
so that what else the machine does falls on all. Cells: median of the rounds, with the lowest and
highest; then the CPU-seconds of the first two steps, which compile, and the process's peak of
memory. In sampling and GRPO sampled tokens are counted, in DPO those of both sides, each with its
prompt. Models, cases and settings are in drivers/cases.py and the drivers beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks" / "drivers"))

from cases import FAMILIES, TABLES, WARM, Case, tiny  # noqa: E402

PEERS = {"tunix": "google-tunix", "trl": "transformers, TRL"}
ALONE = {
    "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
    "WANDB_DISABLED": "true", "TF_CPP_MIN_LOG_LEVEL": "3",
}  # fmt: skip


class Driver:
    """One library at one case, in its own process. Raises RuntimeError with what that said when it
    fails."""

    def __init__(self, who: str, python: str, case: Case, rounds: int, **environment: str) -> None:
        self.script = ROOT / "benchmarks" / "drivers" / f"drive_{who}.py"
        self.said = tempfile.TemporaryFile("w+")  # noqa: SIM115  # read when the process fails
        rest = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        own = {"PYTHONPATH": str(ROOT)} if who == "ours" else {}
        asked = json.dumps(dataclasses.asdict(dataclasses.replace(case, steps=WARM + rounds)))
        self.process = subprocess.Popen(
            [python, str(self.script), asked],
            env={**rest, **ALONE, **own, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.said,
            text=True,
        )
        self.versions = self._read()
        self.first = self._read()["cpu"] + sum(self.step()["cpu"] for _ in range(1, WARM))

    def step(self) -> dict[str, Any]:
        """Let it take the next step: CPU-seconds, tokens, and CPU-seconds of parts."""
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith('{"'):
                return json.loads(line)  # type: ignore[no-any-return]
        self.said.seek(0)
        raise RuntimeError(f"{self.script.name}: {self.said.read()[-3000:]}")

    def close(self) -> None:
        """Let it end."""
        self.process.communicate()
        self.said.close()


def rounds(drivers: Mapping[Any, Driver], number: int) -> dict[Any, list[dict[str, Any]]]:
    """Let every driver take a step, in turn, so many times; their steps."""
    found: dict[Any, list[dict[str, Any]]] = {key: [] for key in drivers}
    for _ in range(number):
        for key, driver in drivers.items():
            found[key].append(driver.step())
    for driver in drivers.values():
        driver.close()
    return found


def start(name: str, case: Case, pythons: dict[str, str], number: int) -> dict[str, Driver]:
    """Start every library that can do a case; one that fails is said to, and its cell stays
    empty."""
    drivers = {}
    for who, python in pythons.items():
        try:
            if who != "tunix" or case.model not in FAMILIES:  # its driver builds Qwen3 alone
                drivers[who] = Driver(who, python, case, number)
        except RuntimeError as error:
            print(f"{who} fails at {name!r}: {error}", file=sys.stderr)
    return drivers


def row(
    name: str,
    columns: Iterable[str],
    drivers: dict[str, Driver],
    found: dict[str, list[dict[str, Any]]],
) -> str:
    """A line of the table, with the ratio to the quickest peer."""
    rates = {who: [step["tokens"] / step["cpu"] for step in steps] for who, steps in found.items()}
    middle = {who: statistics.median(each) for who, each in rates.items()}
    cells = {
        who: (
            f"{middle[who]:,.0f} ({min(each):,.0f}–{max(each):,.0f}); {drivers[who].first:.0f}; "
            f"{found[who][-1]['peak']:.1f} GB"
        )
        for who, each in rates.items()
    }
    peers = [value for who, value in middle.items() if who != "ours"]
    ratio = f"{middle['ours'] / max(peers):.2f}" if peers and "ours" in middle else "–"
    return f"| {' | '.join([name, *(cells.get(who, '–') for who in columns), ratio])} |"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=TABLES)
    for who, package in PEERS.items():
        parser.add_argument(f"--{who}", metavar="PYTHON", help=f"of an environment with {package}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="only show that it runs")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    arguments = parser.parse_args()
    pythons = {"ours": sys.executable} | {
        who: vars(arguments)[who] for who in PEERS if vars(arguments)[who]
    }
    for who in PEERS.keys() - pythons.keys():
        print(f"{who} is left out: there is no --{who} PYTHON", file=sys.stderr)
    print(f"| {arguments.table} | {' | '.join(pythons)} | ratio |\n|{'---|' * (len(pythons) + 2)}")
    versions: dict[str, str] = {}
    for name, case in TABLES[arguments.table].items():
        if arguments.only in name:
            drivers = start(name, tiny(case) if arguments.tiny else case, pythons, arguments.rounds)
            print(row(name, pythons, drivers, rounds(drivers, arguments.rounds)), flush=True)
            for driver in drivers.values():
                versions |= driver.versions
    print("\n" + ", ".join(f"{name} {number}" for name, number in sorted(versions.items())))


if __name__ == "__main__":
    main()
