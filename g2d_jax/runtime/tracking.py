"""Records of a run: metrics and completions on disk, TensorBoard, Weights & Biases, and the
console.

    Tracker ─► WORKDIR/metrics/*.jsonl   all logs: reports read this, the rest mirrors it
            ─► WORKDIR/samples/*.jsonl   tables of completions
            ─► WORKDIR/tensorboard/      scalars "stage/metric" over the stage's steps
            ─► Weights & Biases          the same, one run for the life of the work directory
            ─► Screen                    a progress bar, messages and tables; plain lines without a
                                         terminal; the program that compiles

Metric names are TRL's, where it has one: reward, reward_std, frac_reward_zero_std,
completions/mean_length, completions/clipped_ratio, kl, entropy, clip_ratio/*, sampling/*,
rewards/{chosen,rejected,margins,accuracies}, logps/*, loss, grad_norm, learning_rate, num_tokens
(so far), step_time (seconds). Shares of step_time, by activity: goodput/*.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple, Self, TextIO

from etils import epath
from rich import box
from rich import progress as bars
from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from g2d_jax.records import Ended
from g2d_jax.runtime import failures
from g2d_jax.runtime.compile_times import compiling
from g2d_jax.runtime.memory import Peak, measured
from g2d_jax.runtime.storage import (
    Appender,
    PathLike,
    Segments,
    is_local,
    read_json,
    read_segments,
    write_json,
)
from g2d_jax.runtime.terminal import clean, shortened
from g2d_jax.runtime.threads import repeating

SHOWN = {
    "loss": ("loss", ".4g"),
    "reward": ("reward", ".3f"),
    "accuracy": ("accuracy", ".3f"),
    "rewards/accuracies": ("accuracy", ".3f"),
    "rewards/margins": ("margin", ".3g"),
    "entropy": ("entropy", ".3f"),
    "completions/mean_length": ("length", ".1f"),
}
"""Metrics next to a progress bar: label and format; NaN is a dash. num_tokens is shown as tokens a
second."""

WHOLE = 20
"""Characters of a cell that stays on one line of a terminal."""

MOST_SAID = 200_000
"""Most characters of one message on the screen."""


class Underway(NamedTuple):
    """The progress of the current activity. done, total: steps. note: its last metrics, or the
    program that compiles. left: the remaining time, "0:12:34 left", "" if unknown."""

    stage: str
    done: int
    total: int
    note: str
    left: str


class Screen:
    """The run's display. On a terminal or in a notebook: a live bar, drawn tables. Elsewhere: plain
    lines.

    All text is shown literally, neither as markup nor as control codes. file: default standard
    output. every: seconds between progress lines without a terminal. long: seconds after which a
    line reports a slow compilation, if no bar does.
    """

    def __init__(
        self, file: TextIO | None = None, *, every: float = 10.0, long: float = 10.0
    ) -> None:
        if file is None:
            file = sys.stdout
        if file is None:
            file = open(os.devnull, "w")  # noqa: SIM115 (a process without standard output)
        terminal = file.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")
        width: int | None = None
        height: int | None = None
        # As in the standard library, where 0 means unset: rich prints nothing at width 0.
        if {"COLUMNS", "LINES"} & os.environ.keys():
            width, height = shutil.get_terminal_size()
        self.console = Console(
            file=file, force_terminal=terminal, highlight=False, width=width, height=height
        )
        self.terminal = terminal
        # A notebook's live bar is a widget; without ipywidgets there are lines, as in a file.
        self.interactive = terminal or (
            self.console.is_jupyter and find_spec("ipywidgets") is not None
        )
        self.every, self.long = every, long
        self._reported = "", 0.0  # the reported compilation: the program, and its start
        self.say_once = functools.cache(self.say)
        self._bar: Progress | None = None

    def say(self, text: str, style: str = "") -> None:
        """Print a message, above the bar if there is one. style: rich's, such as "yellow"; for a
        terminal only.

        Lines are not broken, so that you can copy paths and commands. A message of more than
        MOST_SAID characters loses its middle.
        """
        self._print(shortened(text, MOST_SAID), style)

    def _print(self, text: str, style: str = "") -> None:
        encoding = getattr(self.console.file, "encoding", None) or "utf-8"
        shown = clean(text).encode(encoding, "backslashreplace").decode(encoding)
        self.console.print(Text(shown, style), soft_wrap=True)

    def table(
        self,
        title: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[Any]],
        first: Sequence[str] = (),
        *,
        rest: str = "a wider terminal",
    ) -> None:
        """Print a table. Cells are text or numbers; None is an empty cell; columns without text are
        right-aligned.

        On a terminal it fits the width: the least important columns are left out, and a line names
        them. first: heads of the most important columns, in order; the others follow in their own
        order. rest: where to see all columns. Elsewhere a table is complete.
        """
        heads = list(map(clean, columns))
        cells: list[list[str]] = []
        for row in rows:
            cells.append([_cell(cell, newlines=self.interactive) for cell in row])
        is_number: list[bool] = []
        for i in range(len(heads)):
            is_number.append(bool(rows) and not any(isinstance(row[i], str) for row in rows))
        room = [min(max(map(cell_len, x)), WHOLE) for x in zip(heads, *cells, strict=True)]
        if not self.interactive:  # its natural width: a file has no width to wrap to
            table = _table(heads, cells, is_number, room, range(len(heads)), box.MARKDOWN)
            text = io.StringIO()
            Console(file=text, width=1_000_000, force_terminal=False).print(table)
            lines = filter(str.strip, [clean(title), *text.getvalue().splitlines()])
            self._print("\n".join(map(str.rstrip, lines)))
            return
        # The first column has the rows' names, and is always shown.
        order = [heads.index(head) for head in map(clean, first) if head in heads]
        shown = list(dict.fromkeys([0, *order, *range(len(heads))]))
        while len(shown) > 1 and sum(room[i] + 3 for i in shown) >= self.console.width:
            shown.pop()
        if title:
            self.console.print(Text(clean(title), "bold"))
        self.console.print(_table(heads, cells, is_number, room, sorted(shown), box.ROUNDED))
        left_out = "; ".join(head for i, head in enumerate(heads) if i not in shown)
        if left_out:
            note = f"left out to fit: {left_out} ({rest} shows them)"
            self.console.print(Text(note, "dim"))

    @contextlib.contextmanager
    def progress(self, stage: str, total: int, start: int = 0) -> Iterator[Progress]:
        """Open a bar for a stage of `total` steps, of which `start` are done. Raises ValueError
        inside another bar."""
        if self._bar is not None:
            raise ValueError(f"the progress bar of {self._bar.stage} is still open: close it first")
        self._bar = Progress(self, stage, total, start)
        try:
            yield self._bar
        finally:
            self._bar.close()
            self._bar = None

    @property
    def under_way(self) -> Underway | None:
        """The state of the open bar, None without one. For other threads too."""
        bar = self._bar
        return None if bar is None else bar.state

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """Report slow compilations while they run, from a thread, for the caller's own waits."""
        return repeating((self.long / 10, self._watch))

    def _watch(self) -> None:
        program, seconds = compiling.under_way() or ("", 0.0)
        began = time.perf_counter() - seconds
        bar = self.interactive and self._bar is not None  # which reports it
        if (
            seconds >= self.long
            and not bar
            and (program != self._reported[0] or began - self._reported[1] >= 1)
        ):
            self.say(_compiling(program, seconds))
            self._reported = program, began


def _cell(value: Any, *, newlines: bool) -> str:
    return "" if value is None else clean(str(value), newlines=newlines)


def _table(
    heads: Sequence[str],
    cells: Sequence[Sequence[str]],
    is_number: Sequence[bool],
    room: Sequence[int],
    shown: Iterable[int],
    lines: box.Box,
) -> Table:
    """Build rich's table of the shown columns; columns narrower than WHOLE are never shrunk."""
    table = Table(box=lines)
    for i in shown:
        justify: Literal["left", "right"] = "right" if is_number[i] else "left"
        whole = room[i] < WHOLE
        table.add_column(Text(heads[i]), justify=justify, no_wrap=whole, overflow="fold")
    for row in cells:
        table.add_row(*[Text(row[i]) for i in shown])
    return table


def _compiling(program: str, seconds: float) -> str:
    return f"compiling {program.replace('_', ' ')} ({seconds:.0f} s)"


def _with_compiling(metrics: str) -> str:
    """Return the metrics next to a bar, or the program that has compiled for at least a second."""
    busy = compiling.under_way()
    if busy and busy[1] >= 1:
        return clean(_compiling(*busy))
    return metrics


class _Note(bars.ProgressColumn):
    """The metrics next to a bar; during a compilation, its program and seconds."""

    def render(self, task: bars.Task) -> Text:
        return Text(_with_compiling(task.fields["note"]), no_wrap=True, overflow="ellipsis")


class Progress:
    """The progress of one stage, from `Screen.progress`.

    rich estimates the remaining time from the steps of this process: after its first step, which
    includes one-time work such as loading, or after `begin`.
    """

    def __init__(self, screen: Screen, stage: str, total: int, start: int) -> None:
        self.stage, self.total, self.done = stage, total, start
        self._screen, self._printed_at = screen, -math.inf
        self._note = self._line = ""  # _line: not printed yet
        # num_tokens at the first sight, and the time
        self._tokens: tuple[float, float] | None = None
        self._bars = bars.Progress(
            bars.TextColumn("{task.description}", markup=False),
            bars.BarColumn(12, table_column=Column(no_wrap=True)),
            bars.MofNCompleteColumn(table_column=Column(no_wrap=True)),
            bars.TimeRemainingColumn(table_column=Column(no_wrap=True)),
            _Note(table_column=Column()),  # a narrow window shrinks this one
            console=screen.console,
            disable=not screen.interactive,
            speed_estimate_period=math.inf,  # a step may take longer than any period
        )
        self._task = self._bars.add_task(clean(stage), total=total, completed=start, note="")
        self._bars.start()

    @property
    def state(self) -> Underway:
        """The state that the bar shows."""
        note = _with_compiling(self._note)
        return Underway(self.stage, self.done, self.total, note, self._left())

    def begin(self) -> None:
        """Measure the speed from here on, if steps run concurrently and the first one's end is not
        typical."""
        self._bars.advance(self._task, 0)

    def skip(self, done: int) -> None:
        """Show that `done` of the steps are done, the last of them by an earlier process."""
        self._bars.reset(self._task, completed=done)
        self.update(done)

    def update(self, done: int, metrics: Mapping[str, float] | None = None) -> None:
        """Show that `done` of the steps are done, with the available metrics of `SHOWN`."""
        self.done = done
        if metrics is not None:
            self._note = self._describe(metrics)
        self._bars.update(self._task, completed=done, note=self._note)
        if self._screen.interactive:
            return
        parts = [f"{self.stage} {done}/{self.total}", self._note, self._left()]
        self._line = "  ".join(filter(None, parts))
        if time.monotonic() - self._printed_at >= self._screen.every:
            self._screen.say(self._line)
            self._printed_at, self._line = time.monotonic(), ""

    def _left(self) -> str:
        """Return the remaining time, "0:12:34 left"; "" if it is zero or unknown."""
        seconds = self._bars.tasks[0].time_remaining
        if not seconds:
            return ""
        return f"{timedelta(seconds=seconds)} left"

    def _describe(self, metrics: Mapping[str, float]) -> str:
        """Write the available metrics of `SHOWN`, and tokens a second."""
        parts: list[str] = []
        for name, (label, spec) in SHOWN.items():
            if name in metrics:
                value = float(metrics[name])
                shown = "–" if math.isnan(value) else format(value, spec)
                parts.append(f"{label} {shown}")
        if "num_tokens" in metrics:
            now, tokens = time.monotonic(), float(metrics["num_tokens"])
            self._tokens = self._tokens or (tokens, now)
            if now > self._tokens[1]:
                rate = (tokens - self._tokens[0]) / (now - self._tokens[1])
                parts.append(f"{rate:,.0f} tok/s")
        return "  ".join(parts)

    def close(self) -> None:
        """Stop the bar, and keep the last state visible."""
        self._bars.stop()
        if self._line:
            self._screen.say(self._line)


class _TensorBoard:
    """Scalars in a new event file, so that a torn file of a killed process is never continued.

    It uses tensorboardX's EventsWriter. Its SummaryWriter writes in a thread, which a full disk
    ends silently, and to object stores with other drivers and credentials.
    """

    def __init__(self, folder: epath.Path, stack: contextlib.ExitStack) -> None:
        # here, since it imports torch, if that is installed
        from tensorboardX import (
            event_file_writer,
            record_writer,
        )
        from tensorboardX.proto.event_pb2 import Event

        self._folder = folder
        self._event = Event
        self._events_writer = event_file_writer.EventsWriter
        record_writer.register_writer_factory("g2d", self)
        self._start()
        stack.callback(lambda: self._writer.close())

    def open(self, path: str) -> Appender:
        """Open a file for tensorboardX, which calls this for paths that begin with "g2d:"."""
        self._file = Appender(path.removeprefix("g2d:"), pause=10.0)
        return self._file

    def _start(self) -> None:
        prefix = f"g2d:{os.fspath(self._folder / 'events')}"
        # read in the order of names
        self._writer = self._events_writer(prefix, f".{time.time_ns():020d}")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        if self._file.size > 1 << 20:  # an object store rewrites the whole file each time
            self._writer.close()
            self._start()
        values = [{"tag": tag, "simple_value": value} for tag, value in scalars.items()]
        self._writer.write_event(
            self._event(wall_time=time.time(), step=step, summary={"value": values})
        )

    def flush(self) -> None:
        self._writer.flush()


def _start_wandb(
    workdir: epath.Path, options: Mapping[str, Any], stack: contextlib.ExitStack
) -> Any:
    """Start or resume the W&B run of this work directory; leaving the stack by an error marks it as
    failed."""
    require_wandb()
    import wandb

    named = {"id": run_id(workdir / "wandb.json"), "resume": "allow"}
    folder = {"dir": os.fspath(workdir)} if is_local(workdir) else {}
    run = wandb.init(**{"project": "g2d-jax", **folder, **options, **named})
    stack.push(lambda kind, *_: run.finish(exit_code=int(kind is not None)))
    return run


def require_wandb() -> None:
    """Raise ImportError naming the extra if W&B's package is not installed."""
    found = find_spec("wandb")
    # A plain folder of that name can be imported too, and W&B itself creates one where a run
    # starts.
    if found is None or found.origin is None:
        raise failures.missing_extra(
            "logging to Weights & Biases (logging.wandb) needs the package wandb", "wandb"
        )


def run_id(file: epath.Path) -> str:
    """Return the id of a work directory's run from a file, or create one and write it."""
    try:
        return str(read_json(file)["id"])
    except FileNotFoundError:
        write_json(file, {"id": (run_id := secrets.token_hex(4))})
        return run_id


class Samples(NamedTuple):
    """A table of completions: rows with equal columns, of a stage at a step."""

    stage: str
    step: int
    rows: Sequence[Mapping[str, Any]]


class Tracker:
    """Logs a run. Use it in a with statement, in one thread of one process.

    workdir/metrics is the record. Without a workdir it prints and writes nothing, as for all
    processes but one. Steps repeated after a resume are logged there again and the last record
    counts (see `read_metrics`); TensorBoard and W&B, which cannot replace a point, keep the first.
    wandb: keywords of `wandb.init` (project, name, group …), None for none.
    """

    def __init__(
        self,
        workdir: PathLike | None,
        *,
        tensorboard: bool,
        wandb: Mapping[str, Any] | None = None,
        screen: Screen | None = None,
    ) -> None:
        """Raise ImportError naming the extra if W&B is requested and missing; OSError."""
        self.last_samples: Samples | None = None
        self.ended: Ended | None = None
        self.peak: Peak | None = None
        self._metrics: Segments | None = None
        self._samples: Segments | None = None
        self._wandb: Any = None
        self._tensorboard: _TensorBoard | None = None
        damaged: list[str] = []
        with contextlib.ExitStack() as stack:  # closes what is open if the next cannot be opened
            if workdir is None:
                screen = Screen(stack.enter_context(open(os.devnull, "w")))
            else:
                self._open(epath.Path(workdir), tensorboard, wandb, stack, damaged)
            self.screen = Screen() if screen is None else screen
            if workdir is not None and screen is None:
                stack.enter_context(self.screen.watching())
            self._stack = stack.pop_all()
        self.say = self.screen.say
        self.say_once = self.screen.say_once
        self.table = self.screen.table
        self.progress = self.screen.progress
        for line in damaged:
            self.say(f"WARNING: {line}", "yellow")

    def _open(
        self,
        workdir: epath.Path,
        tensorboard: bool,
        wandb: Mapping[str, Any] | None,
        stack: contextlib.ExitStack,
        damaged: list[str],
    ) -> None:
        logged = read_metrics(workdir, damaged.append)
        self._seen = {(record["stage"], record["step"], record["kind"]) for record in logged}
        self._metrics = stack.enter_context(contextlib.closing(Segments(workdir / "metrics")))
        self._samples = stack.enter_context(contextlib.closing(Segments(workdir / "samples")))
        self._wandb = None if wandb is None else _start_wandb(workdir, wandb, stack)
        self._tensorboard = _TensorBoard(workdir / "tensorboard", stack) if tensorboard else None

    def log(
        self, stage: str, step: int, metrics: Mapping[str, float], *, kind: str = "train"
    ) -> None:
        """Log scalars of one step. Several logs at one step are all kept only if their kinds
        differ.

        Non-finite values are kept: in the files as "NaN", "Infinity", "-Infinity". Raises OSError
        naming the file.
        """
        if self._metrics is None:
            return
        values = self._record(self._metrics, stage, step, kind, metrics=metrics)["metrics"]
        if (stage, step, kind) in self._seen:
            return
        scalars = {f"{stage}/{name}": value for name, value in values.items()}
        if self._tensorboard is not None:
            self._tensorboard.log(int(step), scalars)
        if self._wandb is not None:
            self._wandb.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
            self._wandb.log({**scalars, f"{stage}/step": int(step)})

    def warn(self, stage: str, step: int, cause: str, text: str) -> None:
        """Print a warning in yellow, and log it with the kind "warning/CAUSE"."""
        self.screen.say(f"WARNING: {text}", "yellow")
        self._record(self._metrics, stage, step, f"warning/{cause}", metrics={}, text=text)

    @contextlib.contextmanager
    def measured(self) -> Iterator[Peak]:
        """Measure the host memory of a block; `peak` is that of the last one."""
        with measured() as self.peak:
            yield self.peak

    def end(self, ended: Ended) -> None:
        """Log how the run ended, with the kind "ended", unless an end was logged already. Errors of
        writing are ignored."""
        if self.ended is not None:
            return
        self.ended = replace(ended, text=shortened(ended.text, 2000))
        fields = asdict(self.ended)
        with contextlib.suppress(OSError):
            self._record(self._metrics, fields.pop("stage"), 0, "ended", metrics={}, **fields)

    def samples(self, stage: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep a table of completions: rows with equal columns, such as prompt, completion, answer,
        reward, verdict."""
        self.last_samples = Samples(stage, step, rows)
        self._record(self._samples, stage, step, "samples", rows=rows)

    def _record(
        self, log: Segments | None, stage: str, step: int, kind: str, **fields: Any
    ) -> dict[str, Any]:
        if log is None:
            return {}
        if "metrics" in fields:
            fields["metrics"] = {name: float(value) for name, value in fields["metrics"].items()}
        record = {"stage": stage, "step": int(step), "kind": kind, "time": time.time(), **fields}
        log.append(record)
        return record

    def flush(self) -> None:
        """Make all logs durable: before a checkpoint."""
        for log in filter(None, (self._metrics, self._samples)):
            log.flush()
        if self._tensorboard is not None:
            self._tensorboard.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


def ended_by(record: Mapping[str, Any]) -> Ended | None:
    """Return how a run ended from the last record of its log; None for other records."""
    if record.get("kind") != "ended":
        return None
    return Ended(record["how"], record["text"], record["stage"], record["hopeless"])


def read_metrics(
    workdir: PathLike, say: Callable[[str], object] | None = None
) -> list[dict[str, Any]]:
    """Read a run's logs, repeated steps once: {stage, step, kind, time (Unix seconds), metrics
    {name: float}} each.

    [] if nothing was logged. Damaged records are ignored, since the log only informs, and `say`
    receives a line with their number.
    """
    folder = epath.Path(workdir) / "metrics"
    damaged: list[str] = []
    last: dict[tuple[str, int, str], dict[str, Any]] = {}  # in the order of their first
    for record in read_segments(folder, damaged.append):
        try:
            metrics = {str(name): float(value) for name, value in record["metrics"].items()}
            key = str(record["stage"]), int(record["step"]), str(record["kind"])
            time_logged = float(record["time"])
        except (AttributeError, KeyError, TypeError, ValueError):
            damaged.append(f"{folder}: a record is not a run's metrics: {json.dumps(record)[:100]}")
            continue
        last[key] = {**record, "metrics": metrics, "time": time_logged}
    if damaged and say is not None:
        say(
            f"{len(damaged)} damaged lines or files of {folder} are ignored, the first: "
            f"{damaged[0]}"
        )
    return list(last.values())
