"""The g2d command: run, plan, forecast, sweep, evaluate, report, compare, autopsy, export, push,
sample, outputs, status."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, get_args

from g2d_jax import __version__
from g2d_jax.config import Config
from g2d_jax.config.graph import plan
from g2d_jax.config_load import resolve, take_apart
from g2d_jax.records import AnswerRule
from g2d_jax.runtime import failures, flags, processes, storage, terminal

if TYPE_CHECKING:
    from etils import epath
    from ml_collections import ConfigDict

    from g2d_jax.report.page import Report
    from g2d_jax.runtime.tracking import Screen
    from g2d_jax.study.pricing import Rates


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status: 0 done, 1 stopped with a message, 130 interrupted.

    A run that got SIGTERM or SIGHUP, or lost another of its processes, exits with
    `processes.RESTART`.
    """
    arguments, overrides = parse(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault(
        "TRANSFORMERS_NO_ADVISORY_WARNINGS", "1"
    )  # a warning that PyTorch is not installed
    if not os.environ.get("G2D_TRACEBACK"):
        failures.hush()
    stack = contextlib.ExitStack()
    undo = terminal.clean_tracebacks()
    if (
        argv is not None
    ):  # called in a program of the user's own, whose tracebacks are its own afterwards
        stack.callback(undo)
    flags.take_memory()
    flags.leave_tpu_out()
    processes.state.interrupted = False
    heard = (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )  # false in the background and in a notebook
    if heard:
        signal.signal(signal.SIGINT, processes.on_interrupt)
    continues = arguments.command in (_run, _forecast, _sweep) and not getattr(
        arguments, "dry_run", False
    )
    if continues:
        processes.reset_stop()
        stack.enter_context(
            processes.hearing_stops()
        )  # before JAX is imported, which takes seconds
    try:
        return int(arguments.command(arguments, overrides) or 0)
    except (ValueError, ImportError, OSError, processes.PeerFailed) as error:
        if os.environ.get("G2D_TRACEBACK"):
            raise
        return _stopped(error, failures.line(error) or str(error))
    except processes.Preempted as stopped:
        return processes.leave(int(stopped.code or 0))
    except (
        SystemExit
    ) as error:  # of a user's code, or a library's: a run that is not done never says that it is
        if os.environ.get("G2D_TRACEBACK"):
            terminal.print_traceback(error)
        return _stopped(error, _exited(error))
    except Exception as error:
        if not os.environ.get("G2D_TRACEBACK") and (text := failures.line(error)):
            return _stopped(error, text)
        if processes.count() == 1:
            raise
        terminal.print_traceback(error)
        return processes.leave(processes.status_of(error))
    except KeyboardInterrupt:
        processes.say(f"interrupted; {processes.AGAIN}")
        return processes.leave(processes.INTERRUPTED)
    finally:
        if heard:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        stack.close()


def _print(line: object) -> None:
    """Print a line to standard output, as `terminal.shown`."""
    print(terminal.shown(str(line)), flush=True)


def _exited(error: SystemExit) -> str:
    """Tell of code that a command called, and that tried to end the process."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"{last.filename}, line {last.lineno}, in {last.name}: SystemExit: {error}: code that a "
        "command calls must "
        f"return or raise an exception. Mend it, and for a run {processes.AGAIN}"
    )


def _stopped(error: BaseException, text: str) -> int:
    """Print why a command stopped, and leave."""
    where = f"{processes.name()}: " if processes.count() > 1 else ""
    processes.say(f"{where}{text}")
    return processes.leave(processes.status_of(error))


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse arguments, and the --config.field=value overrides among them. Exits with usage for any
    other unknown."""
    parser = argparse.ArgumentParser(prog="g2d", description="How much online RL is enough?")
    if argv and argv[0] in _GONE:
        parser.exit(2, f"g2d: the command {argv[0]!r} is gone: {_GONE[argv[0]]}\n")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for function, add_arguments, what in _COMMANDS:
        command = commands.add_parser(function.__name__[1:].replace("_", "-"), help=what)
        command.set_defaults(command=function)
        add_arguments(command)
    try:
        # Before argparse sees them: it takes what begins with "-" and holds a space for a work
        # directory.
        overrides, rest = take_apart(argv)
    except ValueError as error:
        parser.error(str(error))
    arguments, unknown = parser.parse_known_args(rest)
    takes_settings = arguments.command in (_run, _plan, _forecast, _sweep)
    if overrides and not takes_settings:
        name = f"--{overrides[0].partition('=')[0]}"
        parser.error(
            f"{name}: settings belong to the run, and this command takes none: leave it out"
        )
    options = [item for item in unknown if item.startswith("-")]
    if "place" in arguments and not options:
        unknown = _take_workdir(arguments, unknown)
    if unknown:
        hint = "; settings are written --config.field=value" if takes_settings else ""
        parser.error(f"unknown argument {[*options, *unknown][0]!r}{hint}")
    _expand_home(arguments)
    return arguments, overrides


def _expand_home(arguments: argparse.Namespace) -> None:
    """Put this user's home for "~" in arguments that are paths: a shell leaves it in
    --workdir=~/runs/a."""
    for name in ("workdir", "output", "prompts", "runs", "dumps"):
        value = getattr(arguments, name, None)
        if isinstance(value, str):
            setattr(arguments, name, os.path.expanduser(value))
        elif value is not None:
            setattr(arguments, name, [os.path.expanduser(path) for path in value])


def _workdir(
    parser: argparse.ArgumentParser, help: str = "of the run", *, required: bool = True
) -> None:
    """Add a work directory, as an argument of its own or behind --workdir: `_take_workdir` makes
    one of both."""
    parser.add_argument("place", nargs="?", metavar="WORKDIR", help=f"work directory: {help}")
    parser.add_argument("--workdir", metavar="WORKDIR", help="the same")
    parser.set_defaults(usage=parser, required=required)


def _take_workdir(arguments: argparse.Namespace, unknown: list[str]) -> list[str]:
    """Set arguments.workdir; return what is still unknown. Exits with usage if there is none, and
    for two of them."""
    # argparse does not bind an optional argument that stands behind options: it is among the
    # unknown ones.
    loose = (
        [item for item in unknown if not item.startswith("-")] if arguments.place is None else []
    )
    given = [item for item in (arguments.workdir, arguments.place, *loose) if item is not None]
    if len(given) > 1:
        arguments.usage.error(f"unknown argument {given[1]!r}: the work directory is {given[0]!r}")
    if not given and arguments.required:
        arguments.usage.error("a work directory is needed: WORKDIR, or --workdir WORKDIR")
    if given and given[0].startswith("-"):
        arguments.usage.error(
            f"{given[0]!r} is no work directory, for it begins with '-': an option is misspelt?"
        )
    arguments.workdir = next(iter(given), None)
    return [item for item in unknown if item not in loose]


_SETTINGS = """settings:
  --config.FIELD=VALUE  any setting of docs/config.md, as often as needed: --config.seed=3, --config.lora.rank=32,
                        --config.stages.warmup.keep=10,20 (a list), --config.data.test.limit=none (unset)"""
_RUN_EXAMPLES = """examples:
  g2d run --config demo                                        an embedded task, nothing to download
  g2d run --config demo:preset=smoke,seed=1 --workdir runs/a   a config's own choices; the same again continues
  g2d run --config mine.py --workdir runs/b --dry-run          what it would do, and the reward tried
  g2d run --config mine.py --workdir runs/b --config.stages.warmup.steps=100
  g2d run --config qwen2.5-1.5b --workdir gs://bucket/c --until warmup"""
_PLAN_EXAMPLES = """examples:
  g2d plan --config qwen2.5-7b --topology v5e-16 --price 1.20
  g2d plan --config mine.py --topology h100x8 --auto --response 600"""
_FORECAST_EXAMPLES = """examples:
  g2d forecast --config demo --probe 10
  g2d forecast --config mine.py --workdir runs/forecast --topology h100x8 --price 2.50"""
_SWEEP_EXAMPLES = """examples:
  g2d sweep --config sweep-k --workdir runs/study
  g2d sweep --config mine.py --workdir runs/k --product stages.warmup.steps=0,50,150 --seeds 0,1,2,3,4"""


def _config(parser: argparse.ArgumentParser, help: str, examples: str) -> None:
    """Add the config, and how settings are written, with examples, to a command's help."""
    parser.add_argument("--config", required=True, help=help)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = f"{parser.prog} --config NAME_OR_FILE [--config.FIELD=VALUE …] [options]"
    parser.epilog = f"{_SETTINGS}\n\n{examples}"


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    _config(
        parser, "a shipped config (demo), or a file; NAME:key=value,… for choices", _RUN_EXAMPLES
    )
    _workdir(parser, "where results go; chosen and printed if left out", required=False)
    add = parser.add_argument
    add("--until", help="stop after this stage")
    add(
        "--dry-run",
        action="store_true",
        help="check all that a run would; show changed settings, prompts, the reward",
    )
    add(
        "--profile",
        metavar="STAGE:START-STOP",
        help="trace these updates of a stage into WORKDIR/profiles",
    )
    _several_arguments(parser)


def _several_arguments(parser: argparse.ArgumentParser) -> None:
    several = parser.add_argument_group(
        "several processes", "found by themselves on Cloud TPU, Slurm and Open MPI"
    )
    several.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0")
    several.add_argument(
        "--num-processes", type=int, metavar="N", help="how many processes there are"
    )
    several.add_argument(
        "--process-id", type=int, metavar="I", help="which of them this is, from 0"
    )


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    _config(parser, "as in g2d run", _PLAN_EXAMPLES)
    add = parser.add_argument
    add("--topology", required=True, metavar="NAME", help="v5e-16, v6e-8, v5p-16, h100x8, h200x1 …")
    add("--price", type=float, help="of one chip for an hour, in your money")
    add("--prompt", type=int, metavar="N", help="mean tokens of a prompt; default: the data's own")
    add(
        "--response",
        type=int,
        metavar="N",
        help="mean tokens of a response; default: max_new_tokens",
    )
    add(
        "--stage",
        action="append",
        default=[],
        dest="stages",
        help="this stage only; may be repeated",
    )
    add("--auto", action="store_true", help="choose mesh, micro-batch and remat")
    add("--verbose", action="store_true", help="show every program: memory, traffic, roofline")


def _forecast_arguments(parser: argparse.ArgumentParser) -> None:
    _config(parser, "as in g2d run", _FORECAST_EXAMPLES)
    _workdir(parser, "where its samples go; chosen and printed if left out", required=False)
    add = parser.add_argument
    add(
        "--probe",
        type=int,
        default=0,
        metavar="STEPS",
        help="online steps that may be done; default: none",
    )
    add("--topology", metavar="NAME", help="machine of the plan, for hours: v5e-16, h100x8 …")
    add("--price", type=float, help="of one of its chips for an hour, in your money")


def _sweep_arguments(parser: argparse.ArgumentParser) -> None:
    _config(parser, "a config with a study (sweep-k), or any other with --product", _SWEEP_EXAMPLES)
    _workdir(parser, "where results go; several processes may share it")
    add = parser.add_argument
    add(
        "--product", action="append", default=[], metavar="FIELD=V,V", help="every value of a field"
    )
    add("--zip", action="append", default=[], metavar="FIELD=V,V", help="fields that go together")
    add("--seeds", type=_integers, default=(), metavar="N,N", help="every point with each seed")
    add("--dry-run", action="store_true", help="list the points, and what is left to compute")


def _integers(text: str) -> tuple[int, ...]:
    if not all(item.strip().isdecimal() for item in text.split(",")):
        raise argparse.ArgumentTypeError(f"write whole numbers with commas, 0,1,2, not {text!r}")
    return tuple(map(int, text.split(",")))


def _evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    _workdir(parser)
    add = parser.add_argument
    add("--policy", required=True, help="a stage, STAGE@K, init, hf:PATH or run:DIR#STAGE")
    add("--problems", help="math500, amc23, gsm8k, numinamath, hub:… or a file; default: the run's")
    add("--split", choices=("train", "dev", "test"), help="of --problems, by id hash; default: all")
    add("--limit", type=int, help="the first so many of --problems")
    add("--task", default="main", help="of a mixed run: whose reward scores --problems")
    add("--num-generations", type=int, help="samples of each problem")
    add("--temperature", type=float)
    add("--top-p", type=float)
    add("--max-new-tokens", type=int)


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    _workdir(parser, "of a run, a point of a study, or a directory of studies")
    add = parser.add_argument
    add("--study", help="one study of the directory; default: all of them")
    add(
        "--as",
        dest="recipe",
        metavar="CONFIG",
        help="price a study's tokens as those of this config, qwen2.5-7b …",
    )
    add("--topology", metavar="NAME", help="with --as, the machine: v5e-16, h100x8 …")
    add(
        "--response",
        type=int,
        metavar="N",
        help="with --as, scale the tokens to responses of N tokens in the mean",
    )
    add("--price", type=float, help="with --as, of one chip for an hour, in your money")


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="work directories of two runs or more, or of points")
    add("--output", default="compare", help="folder to write; default: compare")
    whose = "of each run the first and the last, or every one"
    add("--policies", choices=("ends", "all"), default="ends", help=whose)


def _autopsy_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "dumps",
        nargs="+",
        metavar="DUMP",
        help="its rollouts: of TRL, verl, NeMo-RL or here; files, folders, globs",
    )
    add("--reward", metavar="COLUMN", help="of a dump with several rewards, the one to go by")
    add(
        "--answers",
        choices=get_args(AnswerRule),
        default="boxed",
        help="how final answers are read, as reward.answers does",
    )
    add(
        "--policy",
        default="",
        help="where DPO starts: a checkpoint's folder, URL or hub id; default: to be filled in",
    )
    add("--output", default="autopsy", help="folder to write; default: autopsy")


def _policy(parser: argparse.ArgumentParser) -> None:
    what = (
        "a stage, STAGE@K, init, hf:PATH …; default: what the run is for, its last trained or "
        "selected one"
    )
    parser.add_argument("--policy", help=what)


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    _workdir(parser)
    parser.add_argument("--output", required=True, help="folder to write")
    _policy(parser)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--adapters", action="store_true", help="write the adapters alone, as PEFT reads them"
    )
    _several_arguments(parser)


def _push_arguments(parser: argparse.ArgumentParser) -> None:
    _workdir(parser)
    add = parser.add_argument
    add(
        "--repo",
        metavar="USER/NAME",
        help="repository on the Hugging Face hub; made if there is none",
    )
    add(
        "--output",
        metavar="FOLDER",
        help="in place of --repo: a folder to write the same files to; no hub is asked",
    )
    add("--what", choices=("model", "adapters", "dataset"), default="model", help="default: model")
    _policy(parser)
    add(
        "--dry-run", action="store_true", help="list files and sizes, show the card; upload nothing"
    )
    add("--public", action="store_true", help="a new repository is private otherwise")
    _several_arguments(parser)


def _sample_arguments(parser: argparse.ArgumentParser) -> None:
    _workdir(parser)
    _policy(parser)
    what = "a problem; default: typed one after the other on a terminal, else test problems"
    parser.add_argument("--prompt", help=what)
    parser.add_argument(
        "--count", type=int, default=4, help="samples of a problem, or test problems"
    )
    parser.add_argument("--temperature", type=float, default=1.0)


def _outputs_arguments(parser: argparse.ArgumentParser) -> None:
    _workdir(parser)
    _policy(parser)
    add = parser.add_argument
    add("--format", required=True, choices=("alpaca_eval", "arena_hard"), help="of both files")
    add("--prompts", required=True, metavar="FILE", help="alpaca_eval.json, or question.jsonl")
    add("--output", required=True, metavar="FILE", help="file to write: NAME.json, or NAME.jsonl")
    add("--name", help="what the model is called in it; default: NAME")
    add("--temperature", type=float, default=0.6)
    add("--top-p", type=float, default=0.9)
    add("--max-new-tokens", type=int, default=2048)


def _options(arguments: argparse.Namespace, function: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments that a function has parameters for, by name."""
    return {
        name: value
        for name, value in vars(arguments).items()
        if name in signature(function).parameters
    }


def _of_a_run(arguments: argparse.Namespace, overrides: list[str], instead: str) -> ConfigDict:
    """Return the config of a run. Raises ValueError for a study's, with what to do instead."""
    config = resolve(arguments.config, overrides)
    if "sweep" in config:
        raise ValueError(f"{arguments.config} describes a study: {instead}")
    return config


def _run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    if arguments.profile:
        overrides = [*overrides, f"config.logging.profile={arguments.profile}"]
    config = _of_a_run(arguments, overrides, f"g2d sweep --config {arguments.config} --workdir DIR")
    from g2d_jax import dryrun, pipeline, run_stages

    run_stages.check(Config.of(config), arguments.until)
    if arguments.dry_run:
        dryrun.show(config, resolve(arguments.config), arguments.workdir)
        return
    processes.initialise(arguments.coordinator, arguments.num_processes, arguments.process_id)
    chosen = f"runs/{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    workdir = arguments.workdir or processes.on_leader(lambda: chosen)
    if processes.leader():
        _print(f"work directory: {workdir}")
        if not arguments.workdir:
            _print(f"to continue this run, add: --workdir {workdir}")
    pipeline.run(Config.of(config), workdir, until=arguments.until)


def _plan(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Print a plan; return exit status 0 if everything fits, 1 if not."""
    config = _of_a_run(arguments, overrides, "plan the runs it is made of, as qwen2.5-7b:k=50")
    from g2d_jax.plan import plan, ready

    for line in ready(arguments.config, arguments.topology):
        _print(line)
    options = {**_options(arguments, plan), "config": config, "name": arguments.topology}
    return int(not plan(**options))


def _forecast(arguments: argparse.Namespace, overrides: list[str]) -> None:
    config = _of_a_run(arguments, overrides, "forecast the runs it is made of")
    if arguments.probe < 0 or (arguments.price is not None and arguments.topology is None):
        raise ValueError(
            "--probe is a number of steps, and --price that of a machine: give --topology too"
        )
    from g2d_jax import forecast

    planned = []
    if arguments.topology:
        planned = [f"--config={arguments.config}", f"--topology={arguments.topology}"]
        planned += [f"--{item}" for item in overrides]
    if arguments.price is not None:
        planned.append(f"--price={arguments.price}")
    workdir = arguments.workdir or f"runs/{config.name}-forecast-{time.strftime('%Y%m%d-%H%M%S')}"
    _print(f"work directory: {workdir}")
    forecast.forecast(config, workdir, probe=arguments.probe, plan_arguments=planned)


def _sweep(arguments: argparse.Namespace, overrides: list[str]) -> int:
    config = resolve(arguments.config, overrides)
    from g2d_jax.sweep import points, run

    config = points.with_axes(config, arguments.product, arguments.zip, arguments.seeds)
    if arguments.dry_run:
        run.show(config, arguments.workdir)
        return 0
    return int(bool(run.run(config, arguments.workdir)))


def _evaluate(arguments: argparse.Namespace, _: list[str]) -> None:
    from g2d_jax import commands

    names = ("num_generations", "temperature", "top_p", "max_new_tokens")
    sampling = {name: getattr(arguments, name) for name in names}
    commands.evaluate(**_options(arguments, commands.evaluate), **sampling)


def _report(arguments: argparse.Namespace, _: list[str]) -> None:
    """Write the report of a run or of studies; needs neither the model nor a device."""
    from g2d_jax.report.read import studies
    from g2d_jax.report.run import write_run
    from g2d_jax.report.study import write_study
    from g2d_jax.runtime.tracking import Screen

    names = studies(arguments.workdir)
    if arguments.study and not names:
        raise ValueError(
            f"{arguments.workdir} holds no studies: leave --study out for a run, or give their "
            "directory"
        )
    chosen = [arguments.study] if arguments.study else names
    screen = Screen()
    rates = _rates(arguments, chosen, screen.say)
    written: list[str] = []
    for name in chosen:
        written += write_study(arguments.workdir, name, show=screen.table, rates=rates.get(name))
    for path in written or write_run(arguments.workdir):
        _print(path)


def _rates(
    arguments: argparse.Namespace, names: Sequence[str], say: Callable[[str], None]
) -> dict[str, Rates]:
    """Return the rates of --as by study, {} without it: its recipe is compiled for the machine."""
    if arguments.recipe is None:
        return {}
    if arguments.topology is None or not names:
        raise ValueError(
            "--as prices the tokens of a study: give a directory of studies, and --topology"
        )
    from g2d_jax.plan import rates
    from g2d_jax.report.read import read_study

    per_token = rates(resolve(arguments.recipe), arguments.topology, say, arguments.response)
    priced = {}
    for name in names:
        length = read_study(arguments.workdir, name).mean_length
        scale = arguments.response / length if arguments.response else 1.0
        priced[name] = replace(per_token, scale=scale, price=arguments.price)
    return priced


def _compare(arguments: argparse.Namespace, _: list[str]) -> None:
    """Write the comparison of runs and show it; needs neither the model nor a device."""
    from g2d_jax.report import comparison, page
    from g2d_jax.report.read import read_comparison

    output = page.check_output(arguments.output, comparison.FILES, "a comparison")
    runs = read_comparison(arguments.runs, output, policies=arguments.policies)
    report = comparison.report(runs)
    _show(report, page.write(report, runs.workdir, runs.name))


def _show(report: Report, written: Sequence[str]) -> None:
    """Print a report's warnings, notes and tables, its headline, and the paths of its files."""
    from g2d_jax.report import page
    from g2d_jax.runtime.tracking import Screen

    screen = Screen()
    for line in report.warnings:
        screen.say(line)
    for part in itertools.chain.from_iterable(section.parts for section in report.sections):
        if isinstance(part, page.Note):
            screen.say(part.text)
        elif isinstance(part, page.Table):
            screen.table(*part)
    for line in (report.headline, *written):
        screen.say(line)


def _autopsy(arguments: argparse.Namespace, _: list[str]) -> None:
    """Tell what the steps of a finished run taught, by its dumps; needs neither a model nor a
    device."""
    from g2d_jax.report import autopsy, page

    page.check_output(arguments.output, autopsy.FILES, "an autopsy")
    examined = autopsy.read(arguments.dumps, arguments.reward, arguments.answers)
    first, *others = arguments.dumps
    if others:
        first += f" and {len(others)} more"
    report = autopsy.report(examined, first)
    options = (arguments.dumps, arguments.output, arguments.reward, arguments.policy)
    _show(report, autopsy.write_autopsy(examined, report, *options))


def _export(arguments: argparse.Namespace, _: list[str]) -> None:
    from g2d_jax import commands

    processes.initialise(arguments.coordinator, arguments.num_processes, arguments.process_id)
    written = commands.export(**_options(arguments, commands.export))
    if processes.leader():
        _print(written)


def _push(arguments: argparse.Namespace, _: list[str]) -> None:
    from g2d_jax import push

    processes.initialise(arguments.coordinator, arguments.num_processes, arguments.process_id)
    url = push.push(**_options(arguments, push.push))
    if url and processes.leader():
        _print(url)


def _sample(arguments: argparse.Namespace, _: list[str]) -> None:
    from g2d_jax import commands

    prompts = arguments.prompt
    if prompts is None and sys.stdin.isatty() and sys.stdout.isatty():
        prompts = _typed()
    commands.sample(prompts=prompts, **_options(arguments, commands.sample))


def _typed() -> Iterator[str]:
    """Yield problems as they are typed, until an empty line or the end of the input."""
    with contextlib.suppress(EOFError):
        while problem := input("problem (an empty line ends): ").strip():
            yield problem


def _outputs(arguments: argparse.Namespace, _: list[str]) -> None:
    from g2d_jax import outputs

    _print(
        outputs.write_outputs(form=arguments.format, **_options(arguments, outputs.write_outputs))
    )


def _status(arguments: argparse.Namespace, _: list[str]) -> None:
    """Show stages with what is done, or points with what is left; needs neither the model nor a
    device."""
    from g2d_jax.report.read import studies
    from g2d_jax.workdir import absolute

    workdir = absolute(arguments.workdir)
    names = studies(workdir)
    for name in names:
        _study_status(workdir, name)
    if not names:
        _run_status(workdir)


def _study_status(workdir: epath.Path, name: str) -> None:
    """Show a row for each point. Stages that points share are counted once."""
    from g2d_jax.runtime.lock import holder
    from g2d_jax.runtime.tracking import Screen
    from g2d_jax.workdir import PLANS, stage_folders

    labels = [
        str(point["label"])
        for point in storage.read_json(workdir / PLANS / f"{name}.json")["points"]
    ]
    points = {label: stage_folders(workdir / "points" / name / label) for label in labels}
    stages: dict[epath.Path, str] = {}
    for folders in points.values():
        stages |= {folder: stage for stage, folder in folders.items()}
    described = {
        folder: _state(stage, folder, folder, bool(holder(folder)))
        for folder, stage in stages.items()
    }
    states = {folder: state for folder, (state, _) in described.items()}
    rows = []
    for label, folders in points.items():
        left = [
            (stage, states[folder]) for stage, folder in folders.items() if states[folder] != "done"
        ]
        listed = [stage if state == "waiting" else f"{stage} ({state})" for stage, state in left]
        rows.append([label, ", ".join(listed) or "done"])
    done = list(states.values()).count("done")
    whole = sum(text == "done" for _, text in rows)
    screen = Screen()
    screen.table(f"{name}: {len(rows)} points", ["point", "left to do"], rows)
    screen.say(
        f"{whole} of {len(rows)} points done; {len(states)} stages after sharing, {done} of them "
        "done"
    )
    _say_remarks(screen, {folder.name: remark for folder, (_, remark) in described.items()})


def _run_status(workdir: epath.Path) -> None:
    from g2d_jax import commands
    from g2d_jax.runtime import memory
    from g2d_jax.runtime.lock import holder, holder_here
    from g2d_jax.runtime.tracking import Screen
    from g2d_jax.workdir import LINKS, stage_folders

    config = commands.read_config(workdir)
    is_point = (
        workdir / LINKS
    ).exists()  # a study's point: its stages lie elsewhere, each with its own metrics
    owner = ""
    folders = stage_folders(workdir)
    if not is_point:
        owner = holder(workdir)
        folders = plan(config).folders(workdir)
    # a run does its stages one after the other: its process is at the first that is not finished
    is_next = True
    rows: list[list[str]] = []
    remarks: dict[str, str] = {}
    for name, folder in folders.items():
        manifest = storage.read_finished(folder)[0] or {}
        logged = workdir
        running = bool(owner) and is_next and not manifest
        if is_point:
            logged = folder
            running = bool(holder(folder))
        is_next = is_next and bool(manifest)
        state, remarks[name] = _state(name, folder, logged, running)
        seconds = gib = ""
        if manifest:
            seconds = f"{float(manifest['seconds']):.0f}"
        peak = manifest.get("peak_memory_bytes")  # manifests of earlier versions have none
        if peak:
            gib = f"{peak / memory.GIB:.1f}"
        steps = str(getattr(config.stages[name], "steps", ""))
        rows.append([name, config.stages[name].kind, state, steps, seconds, gib])
    screen = Screen()
    screen.table(
        str(workdir), ["stage", "kind", "state", "steps", "seconds", "host memory, GiB"], rows
    )
    _say_remarks(screen, remarks)
    if owner:
        process = holder_here(workdir)
        held = None if process is None else memory.held(process)
        more = ""
        if held is not None:
            more = f", with {held / memory.GIB:.1f} GiB of host memory, its children's too"
        screen.say(f"{owner} works on it now{more}")
    elif not is_point and any(row[2] != "done" for row in rows):
        screen.say(f"no process works on it: {processes.AGAIN}")


def _say_remarks(screen: Screen, remarks: Mapping[str, str]) -> None:
    for stage, remark in remarks.items():
        if remark:
            screen.say(f"{stage} {remark}", "yellow")


def _state(name: str, folder: epath.Path, logged: epath.Path, running: bool) -> tuple[str, str]:
    """Describe a stage: done, waiting, damaged, or running or stopped and how far, by the steps
    logged in `logged` or by the rollouts written. With a remark: on the damage, or the error that
    is the last of its log; "" for none.

    running: whether a process is at it.
    """
    manifest, damage = storage.read_finished(folder)
    if damage:
        return "damaged", f"has a damaged manifest: {damage}"
    if manifest:
        return "done", ""
    ignored: list[str] = []
    records = [
        record
        for record in storage.read_segments(logged / "metrics", ignored.append)
        if record.get("stage") == name and isinstance(record.get("step"), int)
    ]
    error = ""
    if records and records[-1].get("kind") == "error":
        error = f"last stopped with: {str(records[-1].get('text', '')).removeprefix(f'{name}: ')}"
    step = max((record["step"] for record in records), default=0)
    files = len(list((folder / "rollouts").glob("*.parquet")))
    far = f"with {files} files of rollouts" if files else ""
    if step:
        far = f"at step {step}"
    if running:
        return f"running {far}".rstrip(), error
    if not far and not folder.exists():
        return "waiting", error
    return f"stopped {far or 'before its first step'}", error


_COMMANDS = (
    (_run, _run_arguments, "run a config, or continue it"),
    (_plan, _plan_arguments, "what a run needs and costs on a target machine"),
    (
        _forecast,
        _forecast_arguments,
        "what a run's starting policy answers, and what the run will cost",
    ),
    (_sweep, _sweep_arguments, "run a config under many overrides, or continue"),
    (_evaluate, _evaluate_arguments, "evaluate a policy of a run on a set of problems"),
    (_report, _report_arguments, "write what a run or a study measured: HTML, Markdown, CSV"),
    (_compare, _compare_arguments, "put runs side by side on the problems they share"),
    (
        _autopsy,
        _autopsy_arguments,
        "tell what each step of a finished GRPO run taught, and what to do with it",
    ),
    (_export, _export_arguments, "write a policy as a Hugging Face model"),
    (
        _push,
        _push_arguments,
        "upload a model, adapters or a preference dataset to the Hugging Face hub",
    ),
    (_sample, _sample_arguments, "show a policy's answers to a problem"),
    (_outputs, _outputs_arguments, "write a policy's answers as AlpacaEval or Arena-Hard do"),
    (
        _status,
        partial(_workdir, help="of the run, or of studies"),
        "show how far a run or a study is",
    ),
)
"""The functions that the commands are named after, what adds their arguments, and what the help
says of them."""

_GONE = {
    "judge": (
        "g2d outputs writes the answers files of AlpacaEval and Arena-Hard, which bring judges of "
        "their own"
    ),
    "verify-dataset": (
        "a run with the settings of the dataset's g2d.json scores its answers and chooses its "
        "pairs anew"
    ),
}
"""Commands of earlier versions -> what to do instead."""
