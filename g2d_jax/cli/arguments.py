"""The arguments of the g2d command: its options and their help, and what was typed as values.

parse(argv) ─► the arguments of one command, and --config.FIELD=VALUE overrides
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any, get_args

from g2d_jax import __version__
from g2d_jax.config.io import suggest
from g2d_jax.recipes.config_load import take_apart
from g2d_jax.records import AnswerRule


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse arguments, and the --config.field=value overrides among them. Exits with usage for any
    other unknown."""
    parser = argparse.ArgumentParser(prog="g2d", description="How much online RL is enough?")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (add_arguments, what) in _COMMANDS.items():
        command = commands.add_parser(name, help=what)
        command.set_defaults(command=name)
        add_arguments(command)
    try:
        # Before argparse sees them: it takes what begins with "-" and holds a space for a work
        # directory.
        overrides, rest = take_apart(argv)
    except ValueError as error:
        parser.error(str(error))
    arguments, unknown = parser.parse_known_args(rest)
    takes_settings = arguments.command in ("run", "config", "plan", "sweep")
    if overrides and not takes_settings:
        name = f"--{overrides[0].partition('=')[0]}"
        parser.error(
            f"{name}: settings belong to the run, and this command takes none: leave it out"
        )
    options = [item for item in unknown if item.startswith("-")]
    if "place" in arguments and not options:
        unknown = _take_workdir(arguments, unknown)
    if unknown:
        first = [*options, *unknown][0]
        hint = suggest(first, [f"--{name.replace('_', '-')}" for name in vars(arguments)])
        if takes_settings and not hint:
            hint = "; settings are written --config.field=value"
        parser.error(f"unknown argument {first!r}{hint}")
    if arguments.command == "run":
        _require_settings(arguments)
    _expand_home(arguments)
    return arguments, overrides


def _require_settings(arguments: argparse.Namespace) -> None:
    """Exit with usage unless a run is given a config, or a model and problems."""
    own = (arguments.model, arguments.problems)
    if arguments.config is None and None not in own:
        return
    if arguments.config is None or (*own, arguments.template) != (None, None, None):
        arguments.usage.error(
            f"give either {_NAMED}, or {_OWN}, with --template TEXT where the model has no chat "
            "template"
        )


def _expand_home(arguments: argparse.Namespace) -> None:
    """Put this user's home for "~" in arguments that are paths: a shell leaves it in
    --workdir=~/runs/a."""
    for name in ("workdir", "output", "runs", "dumps"):
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
  g2d run --model Qwen/Qwen2.5-0.5B --problems mine.jsonl      your model, your problems
  g2d run --config demo                                        an embedded task, nothing to download
  g2d run --config demo:preset=smoke,seed=1 --workdir runs/a   a config's own choices; the same again continues
  g2d run --config mine.py --workdir runs/b --dry-run          what it would do, and the reward tried
  g2d run --config mine.py --workdir runs/b --config.stages.warmup.steps=100
  g2d run --config qwen2.5-1.5b --workdir gs://bucket/c --until warmup"""
_CONFIG_EXAMPLES = """examples:
  g2d config --config demo --config.stages.warmup.steps=50"""
_PLAN_EXAMPLES = """examples:
  g2d plan --config qwen2.5-7b --topology v5e-16 --price 1.20
  g2d plan --config mine.py --topology h100x8 --auto --response 600"""
_SWEEP_EXAMPLES = """examples:
  g2d sweep --config sweep-k --workdir runs/study
  g2d sweep --config mine.py --workdir runs/k --product stages.warmup.steps=0,50,150 --seeds 0,1,2,3,4"""


_NAMED = "--config NAME_OR_FILE"
_OWN = "--model MODEL --problems FILE"


def _config(
    parser: argparse.ArgumentParser, help: str, examples: str, needed: str = _NAMED
) -> None:
    """Add the config, and how settings are written, with examples, to a command's help. needed: the
    options that say what to run."""
    parser.add_argument("--config", required=needed == _NAMED, help=help)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = f"{parser.prog} {needed} [--config.FIELD=VALUE …] [options]"
    parser.epilog = f"{_SETTINGS}\n\n{examples}"


_SHARED: dict[str, dict[str, Any]] = {
    "--topology": {"metavar": "NAME", "help": "machine: v5e-16, v6e-8, v5p-16, h100x8, h200x1 …"},
    "--price": {"type": float, "help": "of one chip for an hour, in your money"},
    "--policy": {
        "help": "a stage, STAGE@K, init, hf:PATH or run:DIR#STAGE; default: what the run is for, "
        "its last trained or selected one"
    },
    "--temperature": {"type": float},
    "--top-p": {"type": float},
    "--max-new-tokens": {"type": int},
}
"""Options that several commands have."""


def _shared(parser: Any, *names: str, **changed: Any) -> None:
    """Add options of `_SHARED`. parser: or a group of one. changed: what this command has
    otherwise."""
    for name in names:
        parser.add_argument(name, **{**_SHARED[name], **changed})


def _several(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "several processes", "found by themselves on Cloud TPU, Slurm and Open MPI 4"
    )
    add = group.add_argument
    add("--coordinator", metavar="HOST:PORT", help="address of process 0")
    add("--num-processes", type=int, metavar="N", help="how many processes there are")
    add("--process-id", type=int, metavar="I", help="which of them this is, from 0")


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    what = "a shipped config (demo), a file, or config.json of a run; NAME:key=value,… for choices"
    _config(parser, what, _RUN_EXAMPLES, f"({_NAMED} | {_OWN})")
    _workdir(parser, "where results go; chosen and printed if left out", required=False)
    add = parser.add_argument
    add("--model", help="without --config: a Hugging Face folder or hub id, to train with G2D")
    what = "what it is trained and evaluated on, as data.train.path; split into train and test"
    add("--problems", metavar="FILE", help=what)
    asked = "how it is asked: paper, plain or a text with {problem}; default: paper, if it can chat"
    add("--template", help=asked)
    add("--until", help="stop after this stage")
    dry = "check all that a run would; show changed settings, prompts, the reward"
    add("--dry-run", action="store_true", help=dry)
    what = "trace these updates of a stage into WORKDIR/profiles"
    add("--profile", metavar="STAGE:START-STOP", help=what)
    _several(parser)


def _config_arguments(parser: argparse.ArgumentParser) -> None:
    _config(parser, "as in g2d run", _CONFIG_EXAMPLES)


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    _config(parser, "as in g2d run", _PLAN_EXAMPLES)
    _shared(parser, "--topology", required=True)
    _shared(parser, "--price")
    add = parser.add_argument
    add("--prompt", type=int, metavar="N", help="mean tokens of a prompt; default: the data's own")
    mean = "mean tokens of a response; default: max_new_tokens"
    add("--response", type=int, metavar="N", help=mean)
    only = "this stage only; may be repeated"
    add("--stage", action="append", default=[], dest="stages", help=only)
    add("--auto", action="store_true", help="choose mesh, micro-batch and remat")
    add("--verbose", action="store_true", help="show every program: memory, traffic, time")


def _sweep_arguments(parser: argparse.ArgumentParser) -> None:
    _config(parser, "a config with a study (sweep-k), or any other with --product", _SWEEP_EXAMPLES)
    _workdir(parser, "where results go; several processes may share it")
    add = parser.add_argument
    for name, what in (
        ("--product", "every value of a field"),
        ("--zip", "fields that go together"),
    ):
        add(name, action="append", default=[], metavar="FIELD=V,V", help=what)
    add("--seeds", type=_integers, default=(), metavar="N,N", help="every point with each seed")
    add("--dry-run", action="store_true", help="list the points, and what is left to compute")
    _several(parser)


def _integers(text: str) -> tuple[int, ...]:
    if not all(item.strip().isdecimal() for item in text.split(",")):
        raise argparse.ArgumentTypeError(f"write whole numbers with commas, 0,1,2, not {text!r}")
    return tuple(map(int, text.split(",")))


def _evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    _workdir(parser)
    _shared(
        parser, "--policy", required=True, help="a stage, STAGE@K, init, hf:PATH or run:DIR#STAGE"
    )
    add = parser.add_argument
    add("--problems", help="math500, amc23, gsm8k, numinamath, hub:… or a file; default: the run's")
    add("--split", choices=("train", "dev", "test"), help="of --problems, by id hash; default: all")
    add("--limit", type=int, help="the first so many of --problems")
    add("--task", default="main", help="of a mixed run: whose reward scores --problems")
    add("--num-generations", type=int, help="samples of each problem")
    _shared(parser, "--temperature", "--top-p", "--max-new-tokens")
    _several(parser)


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    _workdir(parser, "of a run, a point of a study, or a directory of studies")
    parser.add_argument("--study", help="one study of the directory; default: all of them")
    priced = parser.add_argument_group("cost of a study, where another model had its tokens")
    whose = "price a study's tokens as those of this config, qwen2.5-7b …"
    priced.add_argument("--as", dest="recipe", metavar="CONFIG", help=whose)
    _shared(priced, "--topology", "--price")
    scaled = "scale the tokens to responses of N tokens in the mean"
    priced.add_argument("--response", type=int, metavar="N", help=scaled)


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="work directories of two runs or more, or of points")
    add("--output", default="compare", help="folder to write; default: compare")
    whose = "of each run the first and the last, or every one"
    add("--policies", choices=("ends", "all"), default="ends", help=whose)


def _pair(text: str) -> tuple[str, str]:
    """Split FIELD=COLUMN. Raises ArgumentTypeError."""
    field, equals, column = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} has no '=': write reward=accuracy_reward")
    return field, column


def _autopsy_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    rollouts = "its rollouts, as JSONL, JSON or Parquet: files, folders, globs"
    add("dumps", nargs="+", metavar="DUMP", help=rollouts)
    named = "columns with other names, such as reward=accuracy_reward completion=text"
    add("--columns", nargs="+", type=_pair, default=(), metavar="FIELD=COLUMN", help=named)
    rule = "how final answers are read, as reward.answers does"
    add("--answers", choices=get_args(AnswerRule), default="boxed", help=rule)
    start = "where DPO starts: a checkpoint's folder, URL or hub id; default: to be filled in"
    add("--policy", default="", help=start)
    add("--output", default="autopsy", help="folder to write; default: autopsy")


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    _workdir(parser)
    add = parser.add_argument
    add("--output", required=True, help="folder to write")
    _shared(parser, "--policy")
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--adapters", action="store_true", help="write the adapters alone, as PEFT reads them")
    _several(parser)


def _push_arguments(parser: argparse.ArgumentParser) -> None:
    _workdir(parser)
    add = parser.add_argument
    where = "repository on the Hugging Face hub; made if there is none"
    add("--repo", required=True, metavar="USER/NAME", help=where)
    add("--what", choices=("model", "adapters", "pairs"), default="model", help="default: model")
    _shared(parser, "--policy")
    add("--public", action="store_true", help="a new repository is private otherwise")
    _several(parser)


def _sample_arguments(parser: argparse.ArgumentParser) -> None:
    _workdir(parser)
    _shared(parser, "--policy")
    what = "a problem; default: typed one after the other on a terminal, else test problems"
    parser.add_argument("--prompt", help=what)
    count = "samples of --prompt (of temperature 0 one), or test problems; default: 4"
    parser.add_argument("--count", type=int, default=4, help=count)
    _shared(parser, "--temperature", default=1.0)
    _several(parser)


def _status_arguments(parser: argparse.ArgumentParser) -> None:
    _workdir(parser, "of the run, or of studies")
    parser.add_argument(
        "--watch",
        action="store_true",
        help="on a terminal: show it again every two seconds while it runs",
    )


_COMMANDS = {
    "run": (_run_arguments, "run a config, or continue it"),
    "config": (_config_arguments, "print all settings: first those that are not the defaults"),
    "plan": (_plan_arguments, "what a run needs and costs on a target machine"),
    "sweep": (_sweep_arguments, "run a config under many overrides, or continue"),
    "evaluate": (_evaluate_arguments, "evaluate a policy of a run on a set of problems"),
    "report": (_report_arguments, "write what a run or a study measured: HTML, Markdown, CSV"),
    "compare": (_compare_arguments, "put runs side by side on the problems they share"),
    "autopsy": (
        _autopsy_arguments,
        "tell what each step of a finished GRPO run taught, and what to do with it",
    ),
    "export": (_export_arguments, "write a policy as a Hugging Face model"),
    "push": (
        _push_arguments,
        "upload a model, adapters or preference pairs to the Hugging Face hub",
    ),
    "sample": (_sample_arguments, "show a policy's answers to a problem"),
    "status": (_status_arguments, "show how far a run or a study is"),
}
"""The commands: what adds their arguments, and what the help says of them."""
