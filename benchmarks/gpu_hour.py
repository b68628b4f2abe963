"""What to run when a GPU is at hand, in order of worth, within the minutes that there are.

    python benchmarks/gpu_hour.py --minutes 28 --output DIR --dry-run       # commands and minutes
    python benchmarks/gpu_hour.py --minutes 28 --output DIR --plan FILE     # FILE: accelerator.py --make-plan
    python benchmarks/gpu_hour.py --minutes 60 --output DIR --shapes tiny   # a rehearsal on a CPU

A row has its own minutes, at which it is ended, and starts only if that many are left. DIR keeps
what it prints and writes; the same command goes on with the rows that have not come to their end.
If the first row fails, nothing else starts.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from string import Template

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from accelerator import heed_term, run  # noqa: E402

SIXTH = "XLA_CLIENT_MEM_FRACTION=0.14"
"""Of a card's memory, for one of six processes."""

RIVALS = "benchmarks/rivals.py"
TUNED_AND_JUDGED = {"tune": range(2), "judge": range(101, 109)}
"""Part of the study of rivals -> its seeds at 135M."""

BITS = rf"""run() {{
    exec >>$OUT/$1.log 2>&1
    exec env {SIXTH} python -m g2d_jax run --config $DEMO --config.dtype=bfloat16 --workdir $OUT/$1
}}
run one & run other & run killed &
until [ -e $OUT/killed/*-warmup ]; do kill -0 $! || exit 1; sleep 0.2; done
sleep 2; kill -9 $! || exit 1
wait; (run killed) && JAX_PLATFORMS=cpu PYTHONPATH=.:tests/stages:$PYTHONPATH python -c 'if True:
    import pathlib, sys
    from alike import differences
    one, *others = map(pathlib.Path, sys.argv[1:])
    found = [line for other in others for line in differences(one, other)]
    sys.exit("\n".join(found[:40]) or print("no difference"))' $OUT/one $OUT/other $OUT/killed"""
"""A run twice, and once killed in its first online stage and started again."""


@dataclass(frozen=True)
class Row:
    """A command, with variables that `text` puts in. expect: what decides. needs: files."""

    name: str
    minutes: int
    expect: str
    command: str
    needs: tuple[str, ...] = ()


def rows() -> list[Row]:
    """All rows, the most worth first."""
    demos = []
    for name in ("tensorfloat32", "float32"):
        for seed in range(3):
            where = (
                f"--config $DEMO,seed={seed} --workdir $OUT/{name}-{seed} >$OUT/{name}-{seed}.log"
            )
            demos.append(f"JAX_DEFAULT_MATMUL_PRECISION={name} python -m g2d_jax run {where} 2>&1")
    sampling = "$BENCH $SHAPE --parts sampling --rows 256 --decode pallas"
    memory = "$BENCH $SMALLER --parts memory $PLAN"
    no_order = "XLA_FLAGS=--xla_gpu_exclude_nondeterministic_ops=false"
    no_tuning = "XLA_FLAGS=--xla_gpu_autotune_level=0"
    # fmt: off
    return [
        Row("1-check", 2, "nothing missing, as XLA's; else stop", "$BENCH $SHAPE --check --parts trial"),
        Row("2-kernel", 3, "15-25 us at 43 % live, half of the bandwidth at 100 %; cuDNN within 1.3 x: take cuDNN",
            "$BENCH $SHAPE --parts kernel"),
        Row("3-sampling", 5, "XLA 21-23 s, pallas 7.5-9.5: go at 28,000 tok/s, profile below 20,000; chunk 64: +5 %",
            f"{sampling} xla --chunk 16 64"),
        Row("5-train", 5, "remat dots: 42,000 tok/s", "$BENCH $SHAPE --parts remat attention"),
        Row("5-unordered", 3, "quicker by 10 % at most", f"{no_order} $BENCH $SHAPE --parts remat"),
        Row("8-bits", 4, "no difference", BITS),
        Row("7-memory", 6, "within 10 % of the plan", memory),
        Row("6-precision", 6, "means within 5 points: TF32 costs nothing; 10 apart: it does", at_once(demos)),
        Row("4-trace", 2, "of a step products 1.5 ms, attention 0.7, drawing 0.3 at most", f"{sampling} --trace"),
        Row("9-heads", 3, "unfiltered 0.3 ms, top-p 2 at most; chunks of 2,048 quicker by 2-5 % than 1,024",
            "$BENCH $SHAPE --parts filters logprobs"),
        Row("7-untuned", 2, "within 2 % of the plan: autotuning is what row 7 has more",
            f"{no_tuning} {memory} --until warmup"),
        *rivals("arithmetic"),
        *rivals("stories"),
    ]
    # fmt: on


def rivals(task: str) -> list[Row]:
    """The study of rivals at 135M on a task, tuned and then judged, each seed in a process of its
    own. The tables of whole seeds are in the row's folder."""
    rates = f"benchmarks/results/rivals/{task}-rates.json"
    made = []
    for part, seeds in TUNED_AND_JUDGED.items():
        sweep = f"python -m g2d_jax sweep --config {RIVALS}:scale=smollm2,task={task},part={part}"
        table = f"python benchmarks/rivals_table.py write $OUT/all {part}"
        runs = []
        for seed in seeds:
            run = f"{sweep} --seeds {seed} --workdir $OUT/all $ONLY >$OUT/{seed}.log 2>&1"
            runs.append(f"{run} && {table} {seed} benchmarks/results/rivals")
        command = f"{at_once(runs)}; status=$?"
        needs = [RIVALS, "models/smollm2"]
        if part == "tune":
            command += f"; python benchmarks/rivals_table.py choose benchmarks/results/rivals {task} {rates}"
        else:
            needs.append(rates)
        command += "; cp -r benchmarks/results/rivals $OUT; exit $status"
        expect = "whole seeds: docs/rivals.md"
        made.append(Row(f"rivals-{part}-{task}", 4, expect, command, tuple(needs)))
    return made


def at_once(commands: list[str]) -> str:
    """A command that runs these on one card, six at a time, and fails if any fails."""
    lines = " ".join(f'"{command}"' for command in commands)
    return rf"printf '%s\n' {lines} | xargs -P 6 -d '\n' -n 1 env {SIXTH} sh -c"


def text(row: Row, minutes: float, options: argparse.Namespace) -> str:
    """The command for a shell."""
    tiny, out = options.shapes == "tiny", shlex.quote(str(options.output / row.name))
    limit = f"--output {out} --limit {60 * minutes - 15:.0f}"
    return Template(row.command).safe_substitute(
        BENCH=f"python benchmarks/accelerator.py {limit} --shapes",
        SHAPE=options.shapes or "1.5b",
        SMALLER=options.shapes or "0.5b",
        PLAN=f"--plan {shlex.quote(str(options.plan.absolute()))}" if options.plan else "",
        DEMO=f"demo:preset={'smoke' if tiny else 'full'}",
        ONLY="--dry-run" if tiny else "",
        OUT=out,
    )


def parsed() -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=28)
    add("--output", type=Path, required=True, help="folder for what rows print and write")
    add("--rows", nargs="+", default=[], help="these, by the beginnings of their names, and anew")
    add("--plan", type=Path, help="of memory, made before by accelerator.py --make-plan")
    add("--shapes", default="", choices=("", "tiny"), help="tiny: toy sizes, 5 x the minutes")
    add("--dry-run", action="store_true", help="print the commands and their minutes")
    arguments = parser.parse_args()
    arguments.output = arguments.output.absolute()
    return arguments


def main() -> None:
    """The command."""
    options = parsed()
    heed_term()
    os.chdir(ROOT)
    os.environ["PYTHONUNBUFFERED"] = "1"
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    started, planned, times = time.monotonic(), 0.0, 5 if options.shapes == "tiny" else 1
    for row in rows():
        spent = planned if options.dry_run else (time.monotonic() - started) / 60
        left, done = times * options.minutes - spent, options.output / f"{row.name}.done"
        if options.rows and not row.name.startswith(tuple(options.rows)):
            continue
        missing = [file for file in row.needs if not Path(file).exists()]
        if missing:
            print(f"{row.name}: skipped, there is no {' and no '.join(missing)}", flush=True)
        elif times * row.minutes > left:
            print(f"{row.name}: skipped, {times * row.minutes} of {left:.1f} minutes", flush=True)
        elif done.exists() and not options.rows:
            print(f"{row.name}: done, {done.read_text()}", flush=True)
        else:
            minutes = left if row.needs else times * row.minutes
            planned += minutes
            command = text(row, minutes, options)
            print(
                f"\n{row.name}, at most {minutes:.0f} minutes. Expected: {row.expect}", flush=True
            )
            print(command, flush=True)
            if not options.dry_run:
                start(row, command, minutes, options.output)


def start(row: Row, command: str, minutes: float, output: Path) -> None:
    """Run a row. Exits if it is the first and fails."""
    started = time.monotonic()
    (output / row.name).mkdir(parents=True, exist_ok=True)
    status = run(["bash", "-c", command], output / f"{row.name}.log", 60 * minutes)
    result = f"status {status} after {time.monotonic() - started:.0f} s"
    print(f"{row.name}: {result}", flush=True)
    if status and row.name.startswith("1-"):
        sys.exit("the first row failed: nothing else starts")
    if status != 124:
        (output / f"{row.name}.done").write_text(result)


if __name__ == "__main__":
    main()
