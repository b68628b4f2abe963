"""The g2d command: run, config, plan, sweep, evaluate, report, compare, autopsy, export, push,
sample, status."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from g2d_jax import recipes
from g2d_jax.cli.arguments import parse
from g2d_jax.config import Issue, places
from g2d_jax.config import io as config_io
from g2d_jax.recipes.config_load import resolve
from g2d_jax.runtime import failures, flags, processes, terminal

if TYPE_CHECKING:
    from ml_collections import ConfigDict

    from g2d_jax.report.page import Report
    from g2d_jax.study.pricing import Rates

CONTINUED = ("run", "sweep", "evaluate")
"""The commands that can resume after an interruption."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status: 0 done, 1 stopped with a message, 130 interrupted.

    A run that got SIGTERM or SIGHUP, or lost another of its processes, exits with
    `processes.RESTART`.
    """
    arguments, overrides = parse(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Otherwise transformers warns that PyTorch is not installed.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    traced = bool(os.environ.get("G2D_TRACEBACK"))
    if not traced:
        failures.hush()
    with contextlib.ExitStack() as stack:
        undo = terminal.clean_tracebacks()
        # In your own program, its traceback handling is restored afterwards.
        if argv is not None:
            stack.callback(undo)
        flags.set_up_gpus()
        flags.leave_tpu_out()
        processes.state.interrupted = False
        # In the background and in a notebook another handler is set, and stays.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, processes.on_interrupt)
            stack.callback(signal.signal, signal.SIGINT, signal.default_int_handler)
        # Before the import of JAX, which takes seconds: SIGTERM may come meanwhile.
        dry = getattr(arguments, "dry_run", False)
        if arguments.command in ("run", "sweep") and not dry:
            processes.reset_stop()
            stack.enter_context(processes.hearing_stops())
        try:
            return int(_COMMANDS[arguments.command](arguments, overrides) or 0)
        except (ValueError, ImportError, OSError, processes.PeerFailed) as error:
            if traced:
                raise
            return _stopped(error, failures.line(error) or str(error))
        except processes.Preempted as stopped:
            return processes.leave(int(stopped.code or 0))
        # From a user's code, or a library: an unfinished run must not exit with 0.
        except SystemExit as error:
            if traced:
                terminal.print_traceback(error)
            return _stopped(error, _exited(error))
        except Exception as error:
            if not traced and (text := failures.line(error)):
                return _stopped(error, text)
            if processes.count() == 1:
                raise
            terminal.print_traceback(error)
            return processes.leave(processes.status_of(error))
        except KeyboardInterrupt:
            again = f"; {processes.AGAIN}" if arguments.command in CONTINUED else ""
            processes.say(f"interrupted{again}")
            return processes.leave(processes.INTERRUPTED)


def _print(line: object) -> None:
    """Print a line to standard output, escaped by `terminal.shown`."""
    print(terminal.shown(str(line)), flush=True)


def _exited(error: SystemExit) -> str:
    """Describe where code called by a command tried to end the process."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"{last.filename}, line {last.lineno}, in {last.name}: SystemExit: {error}: code called by "
        f"a command must return or raise an exception. Fix it; for a run {processes.AGAIN}"
    )


def _stopped(error: BaseException, text: str) -> int:
    """Print why a command stopped, and exit."""
    where = f"{processes.name()}: " if processes.count() > 1 else ""
    processes.say(f"{where}{text}")
    return processes.leave(processes.status_of(error))


def _options(arguments: argparse.Namespace, function: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments that match a function's parameters, by name."""
    return {
        name: value
        for name, value in vars(arguments).items()
        if name in signature(function).parameters
    }


def _join(arguments: argparse.Namespace) -> None:
    """Join the other processes of this command, if there are any."""
    processes.initialise(arguments.coordinator, arguments.num_processes, arguments.process_id)


def _of_a_run(
    arguments: argparse.Namespace,
    overrides: list[str],
    instead: str,
    wrong: list[Issue] | None = None,
) -> ConfigDict:
    """Return the config of a run. Raises ValueError for a study's, with the right command. wrong:
    as in `resolve`."""
    config = resolve(arguments.config, overrides, wrong)
    if "sweep" in config:
        raise ValueError(f"{arguments.config} describes a study: {instead}")
    return config


def _own(arguments: argparse.Namespace) -> ConfigDict:
    """Return the recipe for --model and --problems. Raises ValueError if either does not exist."""
    from g2d_jax.models import decoder, hf

    problems = places.decided(arguments.problems, "problems", places.here())
    if reason := places.missing(problems, "problems"):
        raise ValueError(f"--problems: {reason}")
    shape = hf.read_config(hf.resolve(arguments.model))
    size = decoder.count_params(shape)
    return recipes.own(arguments.model, problems, arguments.template, size)


def _run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    if is_own := arguments.config is None:
        arguments.config = _own(arguments)
    if arguments.profile:
        overrides = [*overrides, f"config.logging.profile={arguments.profile}"]
    wrong: list[Issue] = []
    instead = f"g2d sweep --config {arguments.config} --workdir DIR"
    config = _of_a_run(arguments, overrides, instead, wrong)
    from g2d_jax import pipeline
    from g2d_jax.commands import dryrun
    from g2d_jax.stages import run_issues

    if arguments.dry_run:
        named = resolve(arguments.config)
        dryrun.show(config, named, arguments.workdir, arguments.until, wrong)
        return
    settings, _ = run_issues.checked(config, arguments.until, wrong)
    _join(arguments)
    chosen = f"runs/{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    workdir = arguments.workdir or processes.on_leader(lambda: chosen)
    if processes.leader():
        _print(f"work directory: {workdir}")
        if not arguments.workdir:
            _print(f"to continue this run, add: --workdir {workdir}")
        if is_own:
            _print(f"to use its settings in another run, add: --config {workdir}/config.json")
    pipeline.run(settings, workdir, until=arguments.until)


def _config(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Print settings as FIELD=VALUE, the form that --config.FIELD=VALUE accepts."""
    config = resolve(arguments.config, overrides)
    usual = config_io.flat(config_io.defaults(config))
    values = config_io.flat(config)
    changed = [name for name in values if values[name] != usual.get(name)]
    for title, names in (("not the defaults", changed), ("defaults", values.keys() - changed)):
        _print(f"{title}:")
        for name in sorted(names):
            _print(f"  {name}={values[name]}")


def _plan(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Print a plan; return exit status 0 if everything fits, 1 if not."""
    config = _of_a_run(arguments, overrides, "plan its runs, such as qwen2.5-7b:k=50")
    from g2d_jax.plan import plan

    options = {**_options(arguments, plan), "config": config, "name": arguments.topology}
    return int(not plan(**options))


def _sweep(arguments: argparse.Namespace, overrides: list[str]) -> int:
    config = resolve(arguments.config, overrides)
    from g2d_jax.sweep import points, run

    config = points.with_axes(config, arguments.product, arguments.zip, arguments.seeds)
    points.refuse_decided(config, overrides)
    if arguments.dry_run:
        run.show(config, arguments.workdir)
        return 0
    _join(arguments)
    return int(bool(run.run(config, arguments.workdir)))


def _evaluate(arguments: argparse.Namespace, _: list[str]) -> None:
    from g2d_jax import commands

    names = ("num_generations", "temperature", "top_p", "max_new_tokens")
    sampling = {name: getattr(arguments, name) for name in names}
    _join(arguments)
    commands.evaluate(**_options(arguments, commands.evaluate), **sampling)


def _report(arguments: argparse.Namespace, _: list[str]) -> None:
    """Write the report of a run or of studies; needs neither the model nor a device."""
    from g2d_jax.report.run import write_run
    from g2d_jax.report.runs import read_run, studies
    from g2d_jax.report.study import write_study
    from g2d_jax.report.tables import FIRST
    from g2d_jax.runtime.tracking import Screen

    names = studies(arguments.workdir)
    if arguments.study and not names:
        raise ValueError(
            f"{arguments.workdir} holds no studies: remove --study for a run, or name their "
            "directory"
        )
    chosen = [arguments.study] if arguments.study else names
    screen = Screen()
    rates = _rates(arguments, chosen, screen.say)
    written: list[str] = []
    for name in chosen:
        show = partial(screen.table, first=FIRST, rest=f"{name}.html")
        written += write_study(
            arguments.workdir, name, show=show, say=screen.say, rates=rates.get(name)
        )
    for path in written or write_run(read_run(arguments.workdir, lenient=True)):
        _print(path)


def _rates(
    arguments: argparse.Namespace, names: Sequence[str], say: Callable[[str], None]
) -> dict[str, Rates]:
    """Return the rates of --as by study, {} without it. This compiles its recipe for the machine."""
    if arguments.recipe is None:
        if (arguments.topology, arguments.price, arguments.response) != (None, None, None):
            raise ValueError("--topology, --price and --response need a recipe: add --as")
        return {}
    if arguments.price is not None and arguments.price < 0:
        raise ValueError(f"--price is per device and hour and at least 0, got {arguments.price:g}")
    if arguments.response is not None and arguments.response < 1:
        raise ValueError(f"--response is a number of tokens, at least 1, got {arguments.response}")
    if arguments.topology is None or not names:
        raise ValueError(
            "--as prices the tokens of a study: add a directory of studies, and --topology"
        )
    from g2d_jax.plan import rates
    from g2d_jax.report.rows import read_study

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

    output = page.output_folder(arguments.output, comparison.FILES, "a comparison")
    report = comparison.report(
        comparison.read_comparison(arguments.runs, policies=arguments.policies)
    )
    _show(report, page.write(report, output, "compare"))


def _show(report: Report, written: Sequence[str]) -> None:
    """Print a report's warnings, notes and tables, its headline, and the paths of its files."""
    from g2d_jax.report import page
    from g2d_jax.report.tables import FIRST
    from g2d_jax.runtime.tracking import Screen

    screen = Screen()
    page_name = PurePath(written[0]).name  # contains the complete tables
    for line in report.warnings:
        screen.say(line)
    for part in report.shown_parts:
        if isinstance(part, page.Note):
            screen.say(part.text)
        elif isinstance(part, page.Table):
            screen.table(*part, first=FIRST, rest=page_name)
    for line in filter(None, (report.verdict, report.headline, *written)):
        screen.say(line)


def _autopsy(arguments: argparse.Namespace, _: list[str]) -> None:
    """Report what each step of a finished run added, from its dumps; needs no model and no
    device."""
    from g2d_jax.report import autopsy, page

    page.output_folder(arguments.output, autopsy.FILES, "an autopsy")
    columns = dict(arguments.columns)
    examined = autopsy.read(arguments.dumps, columns, arguments.answers)
    first, *others = arguments.dumps
    if others:
        first += f" and {len(others)} more"
    report = autopsy.report(examined, first)
    options = (arguments.dumps, arguments.output, columns, arguments.policy)
    _show(report, autopsy.write_autopsy(examined, report, *options))


def _export(arguments: argparse.Namespace, _: list[str]) -> None:
    from g2d_jax import commands

    _join(arguments)
    commands.export(**_options(arguments, commands.export))


def _push(arguments: argparse.Namespace, _: list[str]) -> None:
    from g2d_jax.commands import push

    _join(arguments)
    url = push.push(**_options(arguments, push.push))
    if processes.leader():
        _print(url)


def _sample(arguments: argparse.Namespace, _: list[str]) -> None:
    from g2d_jax import commands

    _join(arguments)
    prompts = arguments.prompt
    # Only one of several processes has a terminal: they answer the prompts given to all.
    if prompts is None and processes.count() == 1 and sys.stdin.isatty() and sys.stdout.isatty():
        prompts = _typed()
    commands.sample(prompts=prompts, **_options(arguments, commands.sample))


def _typed() -> Iterator[str]:
    """Yield problems as they are typed, until an empty line or the end of the input."""
    with contextlib.suppress(EOFError):
        while problem := input("problem (an empty line ends): ").strip():
            yield problem


def _status(arguments: argparse.Namespace, _: list[str]) -> None:
    from g2d_jax.cli import status

    if arguments.watch:
        status.watch(arguments.workdir)
    else:
        status.show(arguments.workdir)


_COMMANDS: dict[str, Callable[[argparse.Namespace, list[str]], int | None]] = {
    "run": _run,
    "config": _config,
    "plan": _plan,
    "sweep": _sweep,
    "evaluate": _evaluate,
    "report": _report,
    "compare": _compare,
    "autopsy": _autopsy,
    "export": _export,
    "push": _push,
    "sample": _sample,
    "status": _status,
}
