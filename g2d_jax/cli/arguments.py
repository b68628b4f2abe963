"""The arguments of the g2d command: its options, their help, and their parsed values.

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
    """Parse arguments, and the --config.field=value overrides among them. Exits with usage for
    unknown ones."""
    parser = argparse.ArgumentParser(prog="g2d", description="How much online RL is enough?")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (add_arguments, what) in _COMMANDS.items():
        command = commands.add_parser(name, help=what)
        command.set_defaults(command=name)
        add_arguments(command)
    try:
        # Before argparse: it mistakes an override with a space for a work directory.
        overrides, rest = take_apart(argv)
    except ValueError as error:
        parser.error(str(error))
    arguments, unknown = parser.parse_known_args(rest)
    takes_settings = arguments.command in ("run", "config", "plan", "sweep")
    if overrides and not takes_settings:
        name = f"--{overrides[0].partition('=')[0]}"
        parser.error(f"{name}: this command reads the run's settings and accepts none; remove it")
    options = [item for item in unknown if item.startswith("-")]
    if "place" in arguments and not options:
        unknown = _take_workdir(arguments, unknown)
    if unknown:
        first = [*options, *unknown][0]
        hint = suggest(first, [f"--{name.replace('_', '-')}" for name in vars(arguments)])
        if takes_settings and not hint:
            hint = "; write settings as --config.field=value"
        parser.error(f"unknown argument {first!r}{hint}")
    if arguments.command == "run":
        _require_settings(arguments)
    _expand_home(arguments)
    return arguments, overrides


def _require_settings(arguments: argparse.Namespace) -> None:
    """Exit with usage unless a run has a config, or a model and problems."""
    own = (arguments.model, arguments.problems)
    if arguments.config is None and None not in own:
        return
    if arguments.config is None or (*own, arguments.template) != (None, None, None):
        arguments.usage.error(
            f"give either {_NAMED}, or {_OWN}; add --template TEXT if the model has no chat "
            "template"
        )


def _expand_home(arguments: argparse.Namespace) -> None:
    """Expand "~" in path arguments: a shell does not in --workdir=~/runs/a."""
    for name in ("workdir", "output", "runs", "dumps"):
        value = getattr(arguments, name, None)
        if isinstance(value, str):
            setattr(arguments, name, os.path.expanduser(value))
        elif value is not None:
            setattr(arguments, name, [os.path.expanduser(path) for path in value])


def _workdir(
    parser: argparse.ArgumentParser, help: str = "of the run", *, required: bool = True
) -> None:
    """Add a work directory, as a positional argument or as --workdir: `_take_workdir` merges
    them."""
    parser.add_argument("place", nargs="?", metavar="WORKDIR", help=f"work directory: {help}")
    parser.add_argument("--workdir", metavar="WORKDIR", help="the same")
    parser.set_defaults(usage=parser, required=required)


def _take_workdir(arguments: argparse.Namespace, unknown: list[str]) -> list[str]:
    """Set arguments.workdir; return the arguments that are still unknown. Exits with usage for none
    or two."""
    # argparse does not bind an optional positional after options: it is among the unknown ones.
    loose = (
        [item for item in unknown if not item.startswith("-")] if arguments.place is None else []
    )
    given = [item for item in (arguments.workdir, arguments.place, *loose) if item is not None]
    if len(given) > 1:
        arguments.usage.error(f"unknown argument {given[1]!r}: the work directory is {given[0]!r}")
    if not given and arguments.required:
        arguments.usage.error("add a work directory: WORKDIR, or --workdir WORKDIR")
    if given and given[0].startswith("-"):
        arguments.usage.error(
            f"{given[0]!r} is not a work directory, since it begins with '-'; did you misspell an "
            "option?"
        )
    arguments.workdir = next(iter(given), None)
    return [item for item in unknown if item not in loose]


_SETTINGS = """settings:
  --config.FIELD=VALUE  any setting of docs/config.md, as often as needed: --config.seed=3, --config.lora.rank=32,
                        --config.stages.warmup.keep=10,20 (a list), --config.data.test.limit=none (unset)"""
_RUN_EXAMPLES = """examples:
  g2d run --model Qwen/Qwen2.5-0.5B --problems mine.jsonl      your model, your problems
  g2d run --config demo                                        an embedded task, nothing to download
  g2d run --config demo:preset=smoke,seed=1 --workdir runs/a   a config's own choices; run it again to resume
  g2d run --config mine.py --workdir runs/b --dry-run          check it, and try the reward
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
    """Add the config option, with the help on settings and examples. needed: the options that say
    what to run."""
    parser.add_argument("--config", required=needed == _NAMED, help=help)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = f"{parser.prog} {needed} [--config.FIELD=VALUE …] [options]"
    parser.epilog = f"{_SETTINGS}\n\n{examples}"


_SHARED: dict[str, dict[str, Any]] = {
    "--topology": {"metavar": "NAME", "help": "machine: v5e-16, v6e-8, v5p-16, h100x8, h200x1 …"},
    "--price": {"type": float, "help": "of one chip for one hour, in your currency"},
    "--policy": {
        "help": "a stage, STAGE@K, init, hf:PATH or run:DIR#STAGE; default: the run's last trained "
        "or selected policy"
    },
    "--temperature": {"type": float},
    "--top-p": {"type": float},
    "--max-new-tokens": {"type": int},
}
"""Options that several commands have."""


def _shared(parser: Any, *names: str, **changed: Any) -> None:
    """Add options of `_SHARED` to a parser or a group. changed: overrides for this command."""
    for name in names:
        parser.add_argument(name, **{**_SHARED[name], **changed})


def _several(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "several processes", "detected on Cloud TPU, Slurm and Open MPI 4"
    )
    add = group.add_argument
    add("--coordinator", metavar="HOST:PORT", help="address of process 0")
    add("--num-processes", type=int, metavar="N", help="number of processes")
    add("--process-id", type=int, metavar="I", help="index of this process, from 0")


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    what = "a shipped config (demo), a file, or config.json of a run; NAME:key=value,… for choices"
    _config(parser, what, _RUN_EXAMPLES, f"({_NAMED} | {_OWN})")
    _workdir(parser, "where results go; by default chosen and printed", required=False)
    add = parser.add_argument
    add("--model", help="without --config: a Hugging Face folder or hub id, to train with G2D")
    what = "problems to train and evaluate on, like data.train.path; split into train and test"
    add("--problems", metavar="FILE", help=what)
    shape = (
        "prompt template: paper, plain or a text with {problem}; default: paper, for a chat model"
    )
    add("--template", help=shape)
    add("--until", help="stop after this stage")
    dry = "check a run without starting it; show changed settings, prompts, the reward"
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
    add("--prompt", type=int, metavar="N", help="mean tokens of a prompt; default: from the data")
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
    add("--dry-run", action="store_true", help="list the points, and the work left in each")
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
    add("--limit", type=int, help="use the first LIMIT of --problems")
    add("--task", default="main", help="of a mixed run: its reward scores --problems")
    add("--num-generations", type=int, help="samples of each problem")
    _shared(parser, "--temperature", "--top-p", "--max-new-tokens")
    _several(parser)


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    _workdir(parser, "of a run, a point of a study, or a directory of studies")
    parser.add_argument("--study", help="one study of the directory; default: all of them")
    priced = parser.add_argument_group("cost of a study with another model's tokens")
    whose = "price a study's tokens with this config, qwen2.5-7b …"
    priced.add_argument("--as", dest="recipe", metavar="CONFIG", help=whose)
    _shared(priced, "--topology", "--price")
    scaled = "scale the tokens to a mean response of N tokens"
    priced.add_argument("--response", type=int, metavar="N", help=scaled)


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="work directories of at least two runs or points")
    add("--output", default="compare", help="folder to write; default: compare")
    whose = "the first and the last of each run, or all"
    add("--policies", choices=("ends", "all"), default="ends", help=whose)


def _pair(text: str) -> tuple[str, str]:
    """Split FIELD=COLUMN. Raises ArgumentTypeError."""
    field, equals, column = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} has no '='; write reward=accuracy_reward")
    return field, column


def _autopsy_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    rollouts = "its rollouts, as JSONL, JSON or Parquet: files, folders, globs"
    add("dumps", nargs="+", metavar="DUMP", help=rollouts)
    named = "columns with other names, such as reward=accuracy_reward completion=text"
    add("--columns", nargs="+", type=_pair, default=(), metavar="FIELD=COLUMN", help=named)
    rule = "how final answers are extracted, like reward.answers"
    add("--answers", choices=get_args(AnswerRule), default="boxed", help=rule)
    start = (
        "the start of DPO: a checkpoint's folder, URL or hub id; default: left for you to fill in"
    )
    add("--policy", default="", help=start)
    add("--output", default="autopsy", help="folder to write; default: autopsy")


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    _workdir(parser)
    add = parser.add_argument
    add("--output", required=True, help="folder to write")
    _shared(parser, "--policy")
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--adapters", action="store_true", help="write only the adapters, in PEFT's format")
    _several(parser)


def _push_arguments(parser: argparse.ArgumentParser) -> None:
    _workdir(parser)
    add = parser.add_argument
    where = "repository on the Hugging Face hub; created if needed"
    add("--repo", required=True, metavar="USER/NAME", help=where)
    add("--what", choices=("model", "adapters", "pairs"), default="model", help="default: model")
    _shared(parser, "--policy")
    add("--public", action="store_true", help="create a public repository; default: private")
    _several(parser)


def _sample_arguments(parser: argparse.ArgumentParser) -> None:
    _workdir(parser)
    _shared(parser, "--policy")
    what = "a problem; default: typed on a terminal, else test problems"
    parser.add_argument("--prompt", help=what)
    count = "samples of --prompt (one at temperature 0), or test problems; default: 4"
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
    "config": (_config_arguments, "print all settings: first those that differ from the defaults"),
    "plan": (_plan_arguments, "estimate memory, time and cost of a run on a target machine"),
    "sweep": (_sweep_arguments, "run a config under many overrides, or continue"),
    "evaluate": (_evaluate_arguments, "evaluate a policy of a run on a set of problems"),
    "report": (_report_arguments, "write the results of a run or a study: HTML, Markdown, CSV"),
    "compare": (_compare_arguments, "compare runs on the problems they share"),
    "autopsy": (
        _autopsy_arguments,
        "report what each step of a finished GRPO run added, and build pairs from it",
    ),
    "export": (_export_arguments, "write a policy as a Hugging Face model"),
    "push": (
        _push_arguments,
        "upload a model, adapters or preference pairs to the Hugging Face hub",
    ),
    "sample": (_sample_arguments, "show a policy's answers to a problem"),
    "status": (_status_arguments, "show how far a run or a study is"),
}
"""The commands: the function that adds their arguments, and their help."""
