"""The g2d command: run, sweep, evaluate, export, sample, status."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

from g2d_jax import __version__, storage
from g2d_jax.resolve import resolve


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0 done, 1 stopped with a message, 130 interrupted."""
    arguments, overrides = parse(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        return int(arguments.command(arguments, overrides) or 0)
    except (ValueError, ImportError, OSError) as error:
        if os.environ.get("G2D_TRACEBACK"):
            raise
        print(f"g2d: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("g2d: interrupted; the same command with the same --workdir continues", file=sys.stderr)
        return 130


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Arguments, and the --config.field=value overrides among them. Exits with usage for anything else unknown."""
    parser = argparse.ArgumentParser(prog="g2d", description="How much online RL is enough?")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _run_arguments(commands.add_parser("run", help="run a config, or continue it"))
    _sweep_arguments(commands.add_parser("sweep", help="run a config under many overrides, or continue"))
    _evaluate_arguments(commands.add_parser("evaluate", help="evaluate a policy of a run on a set of problems"))
    _export_arguments(commands.add_parser("export", help="write a policy as a Hugging Face model"))
    _sample_arguments(commands.add_parser("sample", help="show a policy's answers to a problem"))
    status = commands.add_parser("status", help="show how far a run is")
    status.add_argument("--workdir", required=True, help="work directory of the run")
    status.set_defaults(command=_status)
    arguments, rest = parser.parse_known_args(argv)
    overrides = [item.removeprefix("--") for item in rest if item.startswith("--config.") and "=" in item]
    unknown = [item for item in rest if item.removeprefix("--") not in overrides]
    if unknown or (overrides and arguments.command not in (_run, _sweep)):
        parser.error(f"unknown argument {(unknown or overrides)[0]!r}; settings are written --config.field=value")
    return arguments, overrides


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", required=True, help="a shipped config (demo), or a file; NAME:key=value,… for choices"
    )
    parser.add_argument("--workdir", help="where results go; chosen and printed if left out")
    parser.add_argument("--until", help="stop after this stage")
    parser.add_argument("--dry-run", action="store_true", help="show settings, stages, disk need and the first batch")
    parser.set_defaults(command=_run)


def _sweep_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, help="a config with a study (sweep-k), or any other with --product")
    parser.add_argument("--workdir", required=True, help="where results go; several processes may share it")
    parser.add_argument("--product", action="append", default=[], metavar="FIELD=V,V", help="every value of a field")
    parser.add_argument("--zip", action="append", default=[], metavar="FIELD=V,V", help="fields that go together")
    parser.add_argument("--seeds", type=_integers, default=(), metavar="N,N", help="every point with each seed")
    parser.add_argument("--dry-run", action="store_true", help="list the points, and what is left to compute")
    parser.set_defaults(command=_sweep)


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(item) for item in text.split(","))


def _evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workdir", required=True, help="work directory of the run")
    parser.add_argument("--policy", required=True, help="a stage, STAGE@K, init, hf:PATH or run:DIR#STAGE")
    parser.add_argument("--problems", help="math500, amc23, gsm8k, hub:… or a file; default: the run's test problems")
    parser.add_argument("--num-generations", type=int, help="samples of each problem")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--max-new-tokens", type=int)
    parser.set_defaults(command=_evaluate)


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workdir", required=True, help="work directory of the run")
    parser.add_argument("--output", required=True, help="folder to write")
    parser.add_argument("--policy", help="a stage or STAGE@K; default: the last stage that trains")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.set_defaults(command=_export)


def _sample_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workdir", required=True, help="work directory of the run")
    parser.add_argument("--policy", help="a stage or STAGE@K; default: the last stage that trains")
    parser.add_argument("--prompt", help="a problem; default: some of the run's test problems")
    parser.add_argument("--count", type=int, default=4, help="problems, or samples of --prompt")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.set_defaults(command=_sample)


def _run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    config = resolve(arguments.config, overrides)
    if "sweep" in config:
        raise ValueError(f"{arguments.config} describes a study: g2d sweep --config {arguments.config} --workdir DIR")
    from g2d_jax import dryrun, pipeline

    pipeline.check(config)
    if arguments.dry_run:
        dryrun.show(config)
        return
    workdir = arguments.workdir or f"runs/{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    print(f"work directory: {workdir}", flush=True)
    if not arguments.workdir:
        print(f"to continue this run, add: --workdir {workdir}", flush=True)
    pipeline.run(config, workdir, until=arguments.until)


def _sweep(arguments: argparse.Namespace, overrides: list[str]) -> int:
    config = resolve(arguments.config, overrides)
    from g2d_jax.sweep import points, run

    config = points.with_axes(config, arguments.product, arguments.zip, arguments.seeds)
    if arguments.dry_run:
        run.show(config, arguments.workdir)
        return 0
    return 1 if run.run(config, arguments.workdir) else 0


def _evaluate(arguments: argparse.Namespace, _: list[str]) -> None:
    from g2d_jax import policies

    policies.evaluate(
        arguments.workdir,
        arguments.policy,
        problems=arguments.problems,
        num_generations=arguments.num_generations,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        max_new_tokens=arguments.max_new_tokens,
    )


def _export(arguments: argparse.Namespace, _: list[str]) -> None:
    from g2d_jax import policies

    print(policies.export(arguments.workdir, arguments.output, policy=arguments.policy, dtype=arguments.dtype))


def _sample(arguments: argparse.Namespace, _: list[str]) -> None:
    from g2d_jax import policies

    policies.sample(
        arguments.workdir,
        policy=arguments.policy,
        prompt=arguments.prompt,
        count=arguments.count,
        temperature=arguments.temperature,
    )


def _status(arguments: argparse.Namespace, _: list[str]) -> None:
    """Stages with what is done; needs neither the model nor a device."""
    from etils import epath

    from g2d_jax import pipeline, policies
    from g2d_jax.tracking import Screen, read_metrics

    workdir = epath.Path(arguments.workdir)
    config = policies.read_config(workdir)
    steps: dict[str, int] = {}
    for record in read_metrics(workdir):
        steps[record["stage"]] = max(steps.get(record["stage"], 0), int(record["step"]))
    rows: list[list[str]] = []
    for name, folder in pipeline.plan(config).folders(workdir).items():
        manifest = storage.finished(folder)
        total = config.stages[name].get("steps", "")
        state = "done" if manifest else f"at step {steps[name]}" if name in steps else "waiting"
        rows.append(
            [name, config.stages[name].kind, state, str(total), f"{manifest['seconds']:.0f}" if manifest else ""]
        )
    Screen().table(str(workdir), ["stage", "kind", "state", "steps", "seconds"], rows)


if __name__ == "__main__":
    sys.exit(main())
