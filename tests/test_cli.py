"""The g2d command as a user types it: from an empty folder, with a shipped or own config, to an
exported model."""

import contextlib
import io
import json
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import unicodedata
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from chat_templates import WITHOUT_HEADER
from etils import epath
from examples import examples
from forks import Forks
from hypothesis import given
from hypothesis import strategies as st
from toys import make_tokenizer, their_logits_and_ours

from g2d_jax import cli, commands, pipeline
from g2d_jax.commands import answers
from g2d_jax.config import Config
from g2d_jax.data import arithmetic
from g2d_jax.recipes.config_load import resolve
from g2d_jax.records import Ended, Problem, Rollout
from g2d_jax.report.run import state
from g2d_jax.report.runs import read_run
from g2d_jax.rewards.functions import load_reward
from g2d_jax.runtime import processes, storage
from g2d_jax.runtime.heartbeat import watched
from g2d_jax.runtime.lock import LOCK, holder, try_lock
from g2d_jax.runtime.tracking import Screen, Tracker
from g2d_jax.session import stage_result
from g2d_jax.session.answers import worked_examples
from g2d_jax.session.policies import load_policy
from g2d_jax.session.workdir import claim, write_settings

G2D = Callable[..., str]
TINY = str(Path(__file__).parent / "tiny.py")
SMALL = (
    "--config.stages.sft.steps=2",
    "--config.stages.warmup.steps=2",
    "--config.data.test.limit=8",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="module")
def work(folder: Path, finished: Path) -> Path:
    """A whole run of one's own."""
    return Path(shutil.copytree(finished, folder / "some" / "work"))


@pytest.fixture(autouse=True)
def hangs_up() -> Iterator[None]:
    """A suite under nohup ignores SIGHUP, and a process that it starts would too."""
    before = signal.signal(signal.SIGHUP, lambda *_: None)  # what is started has the default
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def g2d(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """g2d("status", place): what the command prints; with refused=True what it says when it
    stops."""

    def run(*arguments: object, refused: bool = False) -> str:
        assert cli.main([str(argument) for argument in arguments]) == refused
        return capsys.readouterr()[refused]

    return run


def cells(printed: str) -> list[list[str]]:
    """The rows of the tables in what was printed, without their heads."""
    lines = [line.split("|")[1:-1] for line in printed.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines[2:]]


@pytest.mark.quick
def test_a_run_leaves_its_results_and_status_tells_how_far_each_stage_is(
    work: Path, tmp_path: Path, g2d: G2D
) -> None:
    assert (work / "report.html").is_file() and (work / "report.md").is_file()
    evaluation = stage_result.read(work / "05-evaluate").evaluation
    assert list(evaluation.by_name) == ["sft", "warmup", "dpo"] and evaluation.problems == 16
    rows = cells(g2d("status", "--workdir", work))
    assert (
        rows[1][:4] == ["warmup", "online", "done", "3"]
        and float(rows[1][5]) > 0.1
        and [row[2] for row in rows] == ["done"] * 5
    )
    begun = shutil.copytree(work, tmp_path / "work")
    (begun / "03-collect" / "manifest.json").unlink()
    (begun / "02-warmup" / "manifest.json").unlink()
    states = [row[2] for row in cells(g2d("status", begun))]
    assert states == [
        "done",
        "stopped at step 3",
        "stopped with 2 files of rollouts",
        "done",
        "done",
    ]
    with Tracker(begun, tensorboard=False) as tracker:
        tracker.end(Ended("error", "nothing was learnt", "warmup"))
        tracker.log("warmup", 1, {})  # it was mended and went on
    with Tracker(begun, tensorboard=False) as tracker:
        tracker.end(Ended("error", "no preference pair\nfrom 8 prompts", "collect"))
    said = g2d("status", begun)
    assert "|\ncollect last stopped with: no preference pair\nfrom 8 prompts\n" in said
    assert said.endswith(
        "no process works on it: the same command with the same --workdir continues, once you have "
        "fixed the cause. Other settings need another --workdir\n"
    )


FEW_SHOT = "--config.tokenizer.prompt_template=1+1=?2####2{problem}"


@pytest.mark.parametrize(
    ("settings", "paid", "warned"),
    [
        ([FEW_SHOT], r"\| right \| #### -?\d+ +\| +1.0 \| correct", None),
        (
            [FEW_SHOT, "--config.reward.answers=last_line"],
            r"\| right, as asked \| #### -?\d+ +\| +0.0 \| no_answer",
            "reward.answers is 'last_line', and the prompt asks for #### x: let "
            "tokenizer.prompt_template, or the data's prompts, ask for Answer: x, or set it to "
            "'boxed' or 'hash'",
        ),
    ],
)
def test_dry_run_tries_the_form_that_the_prompt_shows(
    settings: list[str], paid: str, warned: str | None, g2d: G2D, tmp_path: Path
) -> None:
    tokenizer = arithmetic.tokenizer()
    tokenizer.add_tokens(["#"])
    tokenizer.save_pretrained(tmp_path)
    settings = [*settings, "--config.reward.function=verify", f"--config.tokenizer.path={tmp_path}"]
    settings.append("--config.data.max_prompt_length=32")
    shown = g2d("run", "--config", TINY, "--dry-run", *settings)
    assert len(re.findall(paid, shown)) == 3, shown
    assert ("WARNING" in shown) == (warned is not None)
    assert warned is None or warned in shown


def test_status_and_report_tell_a_run_at_work_from_one_that_died(
    work: Path, tmp_path: Path, g2d: G2D
) -> None:
    begun = epath.Path(shutil.copytree(work, tmp_path / "work"))
    for name in ("04-dpo", "05-evaluate"):
        shutil.rmtree(begun / name)
    shutil.rmtree(begun / "metrics")
    assert holder(begun) == "" and "stopped" not in g2d("status", begun)
    with try_lock(
        begun
    ):  # as a run that has just come to dpo, and has neither steps nor a checkpoint yet
        assert f"process {os.getpid()} on " in holder(begun)
        said = g2d("status", begun)
        assert [row[2] for row in cells(said)] == ["done"] * 3 + ["running", "waiting"]
        told = {"stage": "dpo", "done": 3, "total": 9, "left": "0:00:42 left", "note": "loss 0.5"}
        storage.write_json(begun / "progress.json", {**told, "peak_memory_bytes": 3 * 2**30})
        said = g2d("status", begun)
        assert cells(said)[3][2:] == ["running 3 of 9, 0:00:42 left", "", "", "3.0"]
        assert "\ndpo: loss 0.5\n" in said
        assert re.search(
            r" works on it now(, with \d+\.\d GiB of host memory, including its children)?\n$", said
        )
        assert "This run is still running (not begun: dpo, evaluate)" in state(read_run(begun))
    with Tracker(begun, tensorboard=False) as tracker:
        tracker.log("dpo", 1, {"loss": 0.5})
    (begun / "04-dpo").mkdir()
    # no such process: it was killed
    content = json.dumps({"host": socket.gethostname(), "pid": 2**22 + 1})
    (begun / LOCK).write_text(content)
    assert [row[2] for row in cells(g2d("status", begun))] == ["done"] * 3 + [
        "stopped at step 1",
        "waiting",
    ]
    assert (
        "This run stopped before its end (not finished: dpo at step 1; not begun: evaluate)"
        in state(read_run(begun))
    )
    assert (begun / LOCK).read_text() == content  # looking takes nothing


DAMAGE = {
    "metrics/00000.jsonl": b"\xff\n",
    "metrics/00007.jsonl": b'{"stage":"sft","step":1,"kind":"train"}\n[1]\n{"metrics":{"loss":"much"}}\n',
    "environment.json": b"\xff",
}


def test_what_only_informs_never_blocks(work: Path, tmp_path: Path, g2d: G2D) -> None:
    hurt = Path(shutil.copytree(work, tmp_path / "work"))
    for name, damage in DAMAGE.items():
        with (hurt / name).open("ab") as file:
            file.write(damage)
    count = sum(damage.count(b"\n") for damage in DAMAGE.values())
    said = g2d("export", hurt, "--output", tmp_path / "model")
    assert f"WARNING: {count} damaged lines or files of " in said
    assert (tmp_path / "model" / "config.json").exists() and (
        tmp_path / "model" / "README.md"
    ).exists()
    assert [row[2] for row in cells(g2d("status", hurt))] == ["done"] * 5
    for name in ("metrics/00009.jsonl", "environment.json"):
        (hurt / name).unlink(missing_ok=True)
        (hurt / name).mkdir()
    # A manifest only informs, too, of all stages but that which made the policy.
    evaluated = hurt / "05-evaluate" / "manifest.json"
    evaluated.write_bytes(evaluated.read_bytes().replace(b'"name"', b'"nome"'))
    (hurt / "01-sft" / "manifest.json").write_bytes(b"{")
    said = g2d("export", hurt, "--output", tmp_path / "another")
    assert f"WARNING: {count + 1} damaged lines or files of " in said
    assert "WARNING: evaluate is ignored: " in said and "WARNING: sft is ignored: " in said
    assert "05-evaluate" not in (tmp_path / "another" / "README.md").read_text()
    said = g2d("status", hurt)
    assert [row[2] for row in cells(said)] == ["damaged", "done", "done", "done", "damaged"]
    assert "evaluate has a damaged record: " in said and "sft has a damaged record: " in said
    g2d("report", hurt)
    warnings = [
        line
        for line in (hurt / "report.md").read_text().splitlines()
        if line.startswith("- Warning: ")
    ]
    assert any("evaluate is ignored: " in line for line in warnings)
    assert any("environment.json" in line for line in warnings)
    (hurt / "04-dpo" / "manifest.json").write_bytes(b'{"done": true}')  # what decides stays strict
    assert "edited or damaged" in g2d("export", hurt, "--output", tmp_path / "other", refused=True)
    (hurt / "04-dpo" / "manifest.json").write_bytes(b"\xff")
    assert "is not valid JSON" in g2d("export", hurt, "--output", tmp_path / "other", refused=True)


def test_a_report_that_fails_is_a_warning(work: Path, tmp_path: Path, g2d: G2D) -> None:
    again = shutil.copytree(work, tmp_path / "again")
    (again / "report.html").unlink()
    (again / "report.html").mkdir()  # where the page should be
    said = " ".join(g2d("run", "--config", TINY, "--workdir", again).split())
    assert (
        "WARNING: the report was not written: IsADirectoryError" in said
        and f"g2d report {again}" in said
    )


@pytest.mark.slow
def test_without_a_workdir_one_is_chosen_and_the_run_can_stop_early(
    tmp_path: Path, one_device: dict[str, str]
) -> None:
    command = [sys.executable, "-m", "g2d_jax", "run", "--config", TINY, "--until", "sft", *SMALL]
    done = subprocess.run(
        command, cwd=tmp_path, env=one_device, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    (chosen,) = (tmp_path / "runs").iterdir()
    assert (
        chosen.name.startswith("tiny-") and f"work directory: runs/{chosen.name}\n" in done.stdout
    )
    assert stage_result.read(chosen / "01-sft") and not (chosen / "02-warmup").exists()


def test_ctrl_c_that_is_lost_in_a_callback_is_heard(
    tmp_path: Path, one_device: dict[str, str]
) -> None:
    """Python forgets what a callback of the garbage collector raises, and JAX has one. Its
    traceback is not printed."""
    code = """
import gc, os, signal, sys
from g2d_jax import cli
def press(phase, info):
    if "jax.numpy" in sys.modules and press in gc.callbacks:
        gc.callbacks.remove(press)
        os.kill(os.getpid(), signal.SIGINT)
        while not cli.processes.state.interrupted:
            pass
gc.callbacks.append(press)
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a suite in the background ignores
sys.exit(cli.main(sys.argv[1:]))
"""
    command = [sys.executable, "-c", code, "run", "--config", TINY, "--workdir", "work", *SMALL]
    done = subprocess.run(
        command, cwd=tmp_path, env=one_device, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 130, done.stderr
    assert done.stderr == ("g2d: interrupted; the same command with the same --workdir continues\n")
    assert not (tmp_path / "work" / "01-sft").exists()


def test_ctrl_c_while_nothing_can_be_saved_is_heard_and_the_next_ends_at_once() -> None:
    """A mutex that is locked twice waits for ever, and unlike sleep returns to Python at no signal:
    as a program that compiles."""
    code = """
import ctypes, signal, sys, time
from g2d_jax.runtime import processes, heartbeat
signal.signal(signal.SIGINT, processes.on_interrupt)
with heartbeat.watched(peer_timeout=60, hang_timeout=60):
    print("waiting", file=sys.stderr, flush=True)
    lock = ctypes.CDLL(None).pthread_mutex_lock; mutex = bytes(64); lock(mutex); lock(mutex)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == "g2d: saving; Ctrl-C again ends at once\n"
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert (
            process.stderr.read()
            == "g2d: interrupted; the same command with the same --workdir continues\n"
        )


HANGING_UP = """
import fcntl, os, sys, termios, time
from pathlib import Path
from g2d_jax.runtime import processes, heartbeat
if os.isatty(0):
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # it is this session's from now on, which hears when it is closed
try:
    with heartbeat.watched(peer_timeout=60, hang_timeout=60):
        print("waiting", flush=True)
        for _ in range(int(sys.argv[2])):
            if sys.argv[3] == "waits":
                time.sleep(0.01)
            else:
                print("a line", flush=True)
            processes.check_stop()
except processes.Preempted as stopped:
    print("saved", flush=True)
    print("saved", file=sys.stderr, flush=True)
    Path(sys.argv[1]).write_text(stopped.cause)
    raise
print("went on", flush=True)
"""


def test_a_terminal_that_is_closed_stops_a_run_where_it_can_be_continued(tmp_path: Path) -> None:
    """What is being printed fails before the signal."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", HANGING_UP, str(tmp_path / "saved"), "3000000", "prints"]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        assert b"waiting" in os.read(ours, 100)
        os.close(ours)
        assert process.wait(20) == 75
    assert (tmp_path / "saved").read_text() == "SIGHUP"


def test_sighup_is_heard_unless_it_is_ignored_as_under_nohup(tmp_path: Path) -> None:
    for ignored, steps in (("", 3000), ("trap '' HUP; ", 50)):
        command = [sys.executable, "-c", HANGING_UP, str(tmp_path / "saved"), str(steps), "waits"]
        command = ["sh", "-c", ignored + 'exec "$@"', "sh", *command]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "waiting\n"
            process.send_signal(signal.SIGHUP)
            out, err = process.communicate(timeout=20)
        if ignored:
            assert (process.returncode, out, err) == (0, "went on\n", "")
        else:
            assert (process.returncode, out) == (
                75,
                "saved\n",
            ) and "g2d: stopped by SIGHUP: the same command" in err


def test_a_process_that_a_reward_forks_is_deaf_to_what_its_parent_hears() -> None:
    """The terminal interrupts both: the parent is to hear one Ctrl-C, not two; and the child ends
    as children do."""
    code = """
import os, signal, time
from g2d_jax.runtime import processes, heartbeat
signal.signal(signal.SIGINT, processes.on_interrupt)
with heartbeat.watched(peer_timeout=60, hang_timeout=60):
    child = os.fork()
    if not child:
        time.sleep(60)
    time.sleep(0.5)
    os.kill(child, signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    assert os.waitpid(child, 0)[1]
    for number in (signal.SIGTERM, signal.SIGHUP):
        child = os.fork()
        if not child:
            time.sleep(60)
        time.sleep(0.5)
        os.kill(child, number)
        assert os.waitpid(child, 0)[1] == number
    processes.check_stop()
"""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}  # of forks in a process with threads
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.stderr.count("saving; Ctrl-C again") == 1 and "interrupted" not in done.stderr
    assert done.returncode == 130 and "stopped by Ctrl-C" in done.stderr


def test_ctrl_c_in_a_program_of_the_users_own_is_python_s_again_afterwards() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with (
            pytest.raises(processes.Preempted) as stopped,
            watched(peer_timeout=60, hang_timeout=60),
        ):
            os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
            processes.check_stop()
        assert stopped.value.code == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        processes.check_interrupted()
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_settings_are_refused_for_the_same_workdir(work: Path, g2d: G2D) -> None:
    said = g2d(
        "run", "--config", TINY, "--workdir", work, "--config.data.test.limit=8", refused=True
    )
    assert "data.test.limit: 16 -> 8" in said


@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        (
            0.5,
            0.0,
            "reward misjudges '.*', a right answer to .* \\(0.5\\)",
        ),
        (1.0, 0.0, ""),
    ],
)
def test_dry_run_says_where_a_reward_and_its_threshold_disagree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, g2d: G2D, right: float, wrong: float, told: str
) -> None:
    name = f"scaled_{right}_{wrong}".replace(".", "_")
    code = """
def graded(completions, answer, **columns):
    pairs = zip(completions, answer, strict=True)
    return [RIGHT if f"{{{expected}}}" in text else WRONG for text, expected in pairs]
"""
    code = code.replace("RIGHT", str(right)).replace("WRONG", str(wrong))
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    verifiable = "--config.reward.verifiable=true"
    function = f"--config.reward.function={name}:graded"
    shown = g2d("run", "--config", TINY, "--dry-run", function, verifiable)
    assert bool(told) == ("misjudges" in shown)
    assert re.search(told, shown)


@pytest.mark.quick
def test_dry_run_shows_what_decides_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, g2d: G2D
) -> None:
    monkeypatch.chdir(tmp_path)
    few = "--config.stages.warmup.prompts_per_step=400"
    shown = g2d("run", "--config", TINY, "--dry-run", "--config.seed=3", "work", few)
    assert (
        "changed on the command line:\n  seed: 0 -> 3\n"
        "  stages.warmup.prompts_per_step: 4 -> 400\ntiny, where it differs" in shown
    )
    assert "stages.warmup.steps: 20 -> 3\n" in shown
    assert (
        "prompts_per_step is 400, and there are 40 problems for 3 batches: each is drawn 30 times, "
        "some of them twice" in shown
    )
    assert "| warmup   | online" in shown and "parameters; devices: " in shown
    assert "\ntokens that end a response: '<eos>' (1)\n" in shown
    assert re.search(
        r"kernels of attention:\n(  over .*: xla\n)*  over prompts: xla\n  over decode: xla\n",
        shown,
    )
    answers = re.findall(
        r"a prompt of \d+ tokens:\n  \| [-+*\d]+=\?\n  reference answer: (-?\d+)\n", shown
    )
    assert len(answers) == 3 and all(
        f"| right | \\boxed{{{answer}}}" in shown for answer in answers
    )
    # tiny.py's reward is no verifier
    assert "check how it reads responses, and correct_above" in shown
    assert len(shown.splitlines()) < 110 and list(tmp_path.iterdir()) == []
    tags = (
        "--config.reward.function=verify",
        "--config.reward.answers=tags",
        "--config.tokenizer.prompt_template={problem}\\boxed{}",
    )
    shown = g2d("run", "--config", TINY, "--dry-run", *tags)
    assert "| right           | <answer>" in shown and "read by the rule 'tags'" in shown
    assert re.search(r"\| right, as asked \| \\boxed\{\S+ +\| +0.0 \| no_answer", shown)
    assert "WARNING: reward.answers is 'tags', and the prompt asks for \\boxed{x}: let" in shown
    assert "misjudges" not in shown
    chosen = {
        "warmup.sampling": '["}"]',
        "collect.sampling": '[" ","   "]',
    }
    stops = [f"--config.stages.{place}.stop={texts}" for place, texts in chosen.items()]
    unread = "--config.stages.dpo.simpo_gamma=2.0"
    shown = g2d("run", "--config", TINY, "--dry-run", *stops, unread)
    assert "WARNING: stages.dpo.simpo_gamma is set, but loss_type='sigmoid' ignores it" in shown
    assert (
        "WARNING: stages.warmup.sampling.stop has '}', which ends 80 of 80 right responses early:"
        in shown
    )
    assert (
        "WARNING: stages.collect.sampling.stop has ' ', which ends a response at its first space\n"
        in shown
    )
    assert (
        "stages.collect.sampling.stop has '   ', which ends a response at its first 3 spaces in "
        "a row\n" in shown
    )
    policies = ("--config.stages.warmup.keep=2", "--config.stages.evaluate.policies=init,warmup@2")
    shown = g2d("run", "--config", TINY, "--dry-run", "--config.reward.function=verify", *policies)
    assert [row[2] for row in cells(shown)[:5]] == [
        "init",
        "sft",
        "warmup",
        "warmup, collect",
        "init, warmup@2",
    ]
    assert (
        len(re.findall(r"\| right \| \S+ +\| +1.0 \| correct", shown)) == 3
        and "warning" not in shown
    )
    assert len(re.findall(r"\| wrong \| \S+ +\| +0.0 \| incorrect", shown)) == 3
    assert len(re.findall(r"reference answer: (-?\d+), read as the number \1\n", shown)) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--until", "foo"], "--until=foo names no stage: the stages are sft, warmup"),
        (
            ["--config.model.path=MODEL", "--config.tokenizer.path=procedural:slips"],
            "has only pickled weights",
        ),
        (["--config.stages.dpo.preferences=MODEL"], "MODEL"),
        (["--config.stages.collect.dump.path=MODEL/mine.jsonl"], "mine.jsonl, line 1: "),
        (
            ["--config.stages.collect.dump.path=MODEL/single.jsonl"],
            "has one response to each of its 2 prompts, but a pref",
        ),
        (["--config.data.train.path=."], "is a folder: name a file in it that ends in .jsonl"),
        (
            ["--config.stages.collect.num_generations=1"],
            "num_generations is 1, but a preference pair needs two respon",
        ),
        (["--config.reward.function=test_cli:broken"], "test_cli.py, line"),
    ],
)
def test_dry_run_refuses_what_the_run_would(
    tmp_path: Path, g2d: G2D, changes: list[str], message: str
) -> None:
    model = tmp_path / "MODEL"
    model.mkdir()
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    heads = {"num_key_value_heads": 2, "vocab_size": 64, "model_type": "qwen2"}
    (model / "config.json").write_text(json.dumps(sizes | heads))
    (model / "pytorch_model.bin").touch()
    (model / "mine.jsonl").write_text("{}\n")
    single = [{"prompt": f"{n}+{n}=?", "completion": "2", "reward": n} for n in (0, 1)]
    (model / "single.jsonl").write_text("".join(json.dumps(row) + "\n" for row in single))
    asked = [change.replace("MODEL", str(model)) for change in changes]
    assert message in g2d("run", "--config", TINY, "--dry-run", *asked, refused=True)


def test_dry_run_looks_at_the_work_directory(tmp_path: Path, g2d: G2D) -> None:
    claim(Config.of(resolve(TINY)), epath.Path(tmp_path))
    (tmp_path / "01-sft").mkdir()
    before = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    command = ("run", "--config", TINY, "--dry-run", tmp_path)
    assert "was started with other settings, files or models:\n  seed: 0 -> 3" in g2d(
        *command, "--config.seed=3", refused=True
    )
    (tmp_path / "config.json").rename(tmp_path / "notes.json")
    assert "is not empty and holds no run" in g2d(*command, refused=True)
    (tmp_path / "notes.json").rename(tmp_path / "config.json")
    assert {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()} == before


def broken(completions: list[str]) -> list[float]:
    raise LookupError("no such label")


@pytest.mark.parametrize(
    "command", ["run --config demo", "sweep --config demo", "status", "report", "sample"]
)
def test_a_work_directory_needs_no_option(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for place in (["runs/a"], ["--workdir", "runs/a"], ["--workdir=runs/a"]):
        assert cli.parse([*command.split(), *place])[0].workdir == "runs/a"
    name, *options = command.split()
    assert cli.parse([name, "runs/a", *options])[0].workdir == "runs/a"
    for places in (["runs/a", "runs/b"], ["--workdir=runs/a", "runs/b"]):
        with pytest.raises(SystemExit):
            cli.parse([*command.split(), *places])
        assert "unknown argument" in capsys.readouterr().err
    if name == "run":
        assert cli.parse(command.split())[0].workdir is None
        return
    with pytest.raises(SystemExit):
        cli.parse(command.split())
    assert "add a work directory: WORKDIR, or --workdir WORKDIR" in capsys.readouterr().err


def test_settings_are_told_apart_from_a_work_directory(capsys: pytest.CaptureFixture[str]) -> None:
    arguments, overrides = cli.parse(
        ["run", "--config", "demo", "--config.seed=3", "runs/a", "--config.name=x"]
    )
    assert (arguments.workdir, overrides) == ("runs/a", ["config.seed=3", "config.name=x"])
    assert cli.parse(["run", "--config=demo", "--", "runs/a"])[0].workdir == "runs/a"


@pytest.mark.parametrize(
    ("command", "name"),
    [
        *(
            ("report --workdir={}", "workdir"),
            ("run --config=demo {}", "workdir"),
            ("compare RUN {}", "runs"),
        ),
        *(("export RUN --output={}", "output"), ("autopsy {} --output=x", "dumps")),
    ],
)
def test_home_is_known_where_the_shell_leaves_it(command: str, name: str) -> None:
    found = getattr(cli.parse(command.format("~/a").split())[0], name)
    assert (found if isinstance(found, str) else found[-1]) == str(Path.home() / "a")


@given(
    value=st.text(),
    command=st.sampled_from(["run", "sweep", "plan"]),
    before=st.booleans(),
)
@examples(100)
def test_any_text_survives_the_command_line(value: str, command: str, before: bool) -> None:
    setting = f"--config.tokenizer.prompt_template={value}"
    place = {"plan": "--topology=v5e-1"}.get(command, "runs/a")
    arguments, overrides = cli.parse(
        [command, "--config", "demo", *([setting, place] if before else [place, setting])]
    )
    assert overrides == [setting.removeprefix("--")]
    assert command == "plan" or arguments.workdir == "runs/a"
    if "://" not in value:  # a login in a URL is refused
        assert resolve("demo", overrides).tokenizer.prompt_template == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--config.stages.warmup.steps", "5"],
            'lacks its "=": write --config.stages.warmup.steps=5,',
        ),
        (["--config.tokenizer.system", "You are"], "write '--config.tokenizer.system=You are',"),
        (["--config.seed", "=", "5"], "write --config.seed=5,"),
        (["--config.seed", "=5"], "write --config.seed=5,"),
        (["--config.seed", "--dry-run"], "write --config.seed=VALUE,"),
        (["--workdir=-x"], "'-x' is not a work directory, since it begins with '-'"),
        (["--", "--config.seed=3"], "'--config.seed=3' is not a work directory"),
        (
            ["--confg.tokenizer.system=You are"],
            "'--confg.tokenizer.system=You are' is not a work directory",
        ),
        (["-5"], "'-5' is not a work directory"),
        (
            ["--stages.warmup.steps=5"],
            "'--stages.warmup.steps=5'; write settings as --config.field=value",
        ),
    ],
)
def test_what_is_no_setting_becomes_no_work_directory(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("run", "sweep"):
        with pytest.raises(SystemExit):
            cli.parse([command, "--config", "demo", *arguments])
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        *(
            "evaluate RUN --policy dpo",
            "sample RUN",
            "export RUN --output x",
            "push RUN --repo a/b",
            "report RUN",
        ),
        *(
            "status RUN",
            "compare RUN RUN",
            "autopsy DUMP",
        ),
    ],
)
def test_settings_of_a_finished_run_are_refused_by_name(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.parse([*command.split(), "--config.stages.warmup.keep=3"])
    assert (
        "--config.stages.warmup.keep: this command reads the run's settings"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("end", [[""], []], ids=["empty", "eof"])
def test_problems_are_typed_until_an_empty_line_or_the_end(
    end: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys, "stdin", io.StringIO("".join(f"{line}\n" for line in ["1+1=?", " 2+2=? ", *end]))
    )
    assert list(cli._typed()) == ["1+1=?", "2+2=?"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "dmo"], "did you mean demo"),
        (["--config", TINY, "--config.stages.warmup.step=4"], "did you mean stages.warmup.steps"),
        (["--config", TINY, "--config.stages.warmup.policy=sf"], "there are: init, dpo, sft"),
    ],
)
def test_mistakes_stop_with_a_suggestion_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, g2d: G2D, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    error = g2d("run", *arguments, refused=True)
    assert error.startswith("g2d: ") and message in error and "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["run"],
        ["fly"],
        ["run", "--config", TINY, "--seed=3"],
        ["status", "--workdir", "w", "--config.a=1"],
    ],
)
def test_unknown_arguments_show_the_usage(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert "usage: g2d" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        *("report {}", "compare {} {}", "status --workdir {}", "export --workdir {} --output out"),
        *("sample --workdir {}", "evaluate --workdir {} --policy dpo"),
    ],
)
def test_a_folder_without_a_run(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, g2d: G2D
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    reasons = {"gone": "there is no such folder", "file": "it is a file", "empty": "no config.json"}
    for name, reason in reasons.items():
        error = g2d(*command.format(name, "other").split(), refused=True)
        assert (
            f"{name} holds no run ({reason}): give the work directory that g2d run printed" in error
        )
    if not command.startswith(("report", "compare")):
        (tmp_path / "sweeps").mkdir()
        error = g2d(*command.format(".").split(), refused=True)
        assert "holds no run but studies: give the folder of a point, points/STUDY/POINT" in error


def test_settings_of_another_version_are_named_with_their_file(tmp_path: Path, g2d: G2D) -> None:
    storage.write_json(
        tmp_path / "config.json", {"config": {"learning": 1}, "own": {}, "version": "0.0.9"}
    )
    error = g2d("status", tmp_path, refused=True)
    assert (
        f"{tmp_path / 'config.json'}, written by version 0.0.9: unknown field 'learning'" in error
    )
    (tmp_path / "01-sft").mkdir()
    error = g2d("run", "--config", TINY, "--workdir", tmp_path, refused=True)
    assert "written by version 0.0.9: unknown field 'learning'" in error


def test_a_run_of_a_template_that_none_would_begin_with_is_exported_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tokenizer(WITHOUT_HEADER["ChatML"][0]).save_pretrained(tmp_path / "tokenizer")
    config = resolve(TINY, [f"tokenizer.path={tmp_path / 'tokenizer'}"])
    work = tmp_path / "work"
    (work / "01-sft").mkdir(parents=True)
    write_settings(Config.of(config), epath.Path(work))
    commands.export(work, tmp_path / "model", policy="init")
    assert (tmp_path / "model" / "model.safetensors").exists()
    said = "WARNING: the run's tokenizer: the chat template ignores"
    assert capsys.readouterr().out.count(said) == 1
    with pytest.raises(ValueError, match="the chat template ignores add_generation_prompt"):
        pipeline.run(config, tmp_path / "another")


def test_a_folder_that_cannot_be_written(tmp_path: Path, g2d: G2D) -> None:
    (tmp_path / "file").touch()
    places = {
        f"{tmp_path}/file": (
            f"cannot create the folder: File exists: '{tmp_path}/file'; this is a file: choose another"
        ),
        # nobody makes a folder there, not even root
        "/sys/g2d": "'/sys/g2d'; .*choose a(nother)? folder",
        "/proc/g2d/work": (
            "cannot create the folder: No such file or directory: '/proc/g2d/work'; check the path, or choose"
        ),
    }
    for place, message in places.items():
        if Path(place).parents[-2].is_dir():
            error = g2d("run", "--config", TINY, "--workdir", place, refused=True)
            assert re.search(message, error) and "Errno" not in error


@pytest.fixture
def study(work: Path, tmp_path: Path) -> Path:
    """A directory of a study with two points: the run's stages, and the same ones with an
    unfinished evaluation."""
    root = tmp_path / "study"
    config = storage.read_json(work / "config.json")["config"]
    stages = {
        path.name.partition("-")[2]: os.path.relpath(path, root)
        for path in sorted(work.glob("0?-*"))
    }
    listed = []
    for label, last in (("K=1", stages["evaluate"]), ("K=2", "stages/evaluate-0")):
        folder = root / "points" / "mine" / label
        storage.write_json(folder / "config.json", {"config": config, "own": {}})
        links = {**stages, "evaluate": last}
        storage.write_json(
            folder / "stages.json", [[name, f"../../../{path}"] for name, path in links.items()]
        )
        listed.append({"label": label, "arm": "g2d", "seed": 0, "values": {}, "stages": {}})
    storage.write_json(root / "sweeps" / "mine.json", {"config": config, "points": listed})
    (root / "stages" / "evaluate-0").mkdir(parents=True)
    return root


def test_status_of_a_study_and_of_its_points(study: Path, g2d: G2D) -> None:
    printed = g2d("status", "--workdir", study)
    assert cells(printed) == [["K=1", "done"], ["K=2", "evaluate (stopped before its first step)"]]
    assert "1 of 2 points done; 6 stages after sharing, 5 of them done" in printed
    record = b'{"stage":"evaluate","step":2,"kind":"train","metrics":{}}\n'
    storage.write_bytes(study / "stages" / "evaluate-0" / "metrics" / "00000.jsonl", record)
    assert "| evaluate (stopped at step 2) |" in g2d("status", study)
    rows = cells(g2d("status", study / "points" / "mine" / "K=2"))
    assert [row[2] for row in rows] == ["done"] * 4 + ["stopped at step 2"]


def test_report_of_a_run_a_point_and_a_study(work: Path, study: Path, g2d: G2D) -> None:
    folder = study / "points" / "mine" / "K=1"
    names = ("report.html", "report.md", "report.csv")
    assert g2d("report", folder).split() == [str(folder / name) for name in names]
    names = ("mine.html", "mine.md", "mine.csv")
    assert g2d("report", study).split()[-3:] == [str(study / name) for name in names]
    assert "no study 'nope'" in g2d("report", study, "--study", "nope", refused=True)
    assert "holds no studies" in g2d("report", work, "--study", "mine", refused=True)
    for option in ("--price=2", "--topology=v5e-16", "--response=600"):
        assert "add --as" in g2d("report", study, option, refused=True)
    priced = ("--as", TINY, "--topology", "v5e-16")
    assert "--price is per device" in g2d("report", study, *priced, "--price=-1", refused=True)
    assert "a number of tokens" in g2d("report", study, *priced, "--response=0", refused=True)
    assert "holds no run" in g2d("report", study / "stages", refused=True)


def test_watching_ends_with_the_run_and_needs_a_terminal(work: Path, g2d: G2D) -> None:
    assert "--watch needs a terminal" in g2d("status", "--watch", work, refused=True)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "g2d_jax", "status", "--watch", str(work)]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # the end of a terminal
            while more := os.read(ours, 4096):
                shown += more
    assert process.returncode == 0 and b"evaluate" in shown


def test_compare(
    work: Path, study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, g2d: G2D
) -> None:
    monkeypatch.chdir(tmp_path)
    point = study / "points" / "mine" / "K=1"
    out = g2d("compare", work, point)
    assert "Accuracy on 16 common problems" in out
    assert "| A: G2D (dpo) → B: G2D (dpo)" in out  # not B's sft, which is the same file
    assert out.split()[-3:] == [
        str(tmp_path / "compare" / f"compare.{kind}") for kind in ("html", "md", "csv")
    ]
    assert "A: warm-up" in g2d("compare", work, point, "--policies", "all")
    assert "holds files that are not of a comparison" in g2d(
        "compare", work, point, "--output", work, refused=True
    )
    unfinished = study / "points" / "mine" / "K=2"
    assert "has no finished evaluation" in g2d("compare", work, unfinished, refused=True)


@pytest.mark.quick
def test_sample(work: Path, folder: Path, forks: Forks) -> None:
    done = forks.run(
        "sample", "--workdir", "some/work", "--prompt", "1+2+3=?", "--count", "3", cwd=folder
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines.count("policy dpo") == lines.count("problem: 1+2+3=?") == 1
    # no reference answer is known, and so there is no reward
    rows = re.findall(
        r"^\| (?!response).+ \| +\| +\| (?:stop|length) *\| -\d+\.\d\d +\|$", done.stdout, re.M
    )
    assert len(rows) == 3
    done = forks.run("sample", "--count", "2", "some/work", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"\| (1 correct|0 incorrect) +\|", done.stdout)) == 2
    problems = re.findall("^problem: (.*)$", done.stdout, re.M)
    assert len(problems) == 2
    assert not [line for line in done.stdout.splitlines() if line.startswith("|") and "=?" in line]


class Terminal(io.StringIO):
    """A terminal that keeps what is shown."""

    def isatty(self) -> bool:
        return True


def test_what_is_shown_of_answers_is_told_from_the_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long ones are wrapped, and none can pretend to be a line about it, or steer."""

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    ids, nats = np.arange(3, dtype=np.int32), np.full(3, -0.5, np.float32)
    rollout = Rollout("p", 0, 0, ids, ids, nats, nats, "length")
    evil = "1 correct · 3 tokens\n" + "word " * 100 + "\n| 1 | 2 |\x1b[2J"
    problem = Problem("p", [{"role": "user", "content": "x | y\nproblem: z"}], "7")
    shown = {}
    for show, out in (
        (answers._show_on_terminal, Terminal()),
        (answers._show_as_table, io.StringIO()),
    ):
        with Tracker(tmp_path, tensorboard=False, screen=Screen(out)) as tracker:
            show(tracker, problem, [(rollout, evil, "0 incorrect")])
        shown[show] = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())
    lines = [line.rstrip() for line in shown[answers._show_on_terminal].splitlines()]
    start = lines.index("0 incorrect · 3 tokens · cut at the limit · mean log-prob -0.50")
    assert lines[:start] == ["", "x | y", "problem: z", "reference answer: 7", ""]
    assert all(line.startswith("  ") for line in lines[start + 1 :])
    assert max(map(len, lines)) <= 80 and "\x1b" not in "".join(lines)
    blank, asked, head, _, row = shown[answers._show_as_table].splitlines()
    assert (blank, asked) == ("", r"problem: x | y\nproblem: z")
    assert [cell.strip() for cell in head.strip("|").split("|")] == [
        "response", "reference", "reward", "stop", "mean log-prob"
    ]  # fmt: skip
    assert row.startswith("| 1 correct") and r"\x1b[2J" in row and r"\| 1 \| 2 \|" in row


def test_evaluate_elsewhere(work: Path, folder: Path, forks: Forks) -> None:
    problems = folder / "mine.jsonl"
    rows = [{"problem": f"{i}+2+3=?", "answer": str(i + 5)} for i in range(5)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [
        "evaluate",
        "--workdir",
        "some/work",
        "--policy",
        "warmup@1",
        "--problems",
        "mine.jsonl",
    ]
    done = forks.run(*command, "--num-generations", "1", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "5 problems, 1 answer" in done.stdout
    (place,) = (work / "evaluations").iterdir()
    manifest = stage_result.read(place)
    assert manifest is not None and manifest.evaluation.policies[0].name == "warmup@1"
    before = {file: file.stat().st_mtime_ns for file in place.rglob("*.parquet")}
    assert forks.run(*command, "--num-generations", "1", cwd=folder).returncode == 0
    assert {file: file.stat().st_mtime_ns for file in place.rglob("*.parquet")} == before


def test_samples_are_drawn_as_the_stage_that_runs_first_draws() -> None:
    """The order of a run is not that of names: there `best` precedes `train`."""
    from g2d_jax import config as settings

    config = settings.base()
    config.data.train = config.data.test = settings.source("procedural:chains")
    drawn = settings.sampling(1024, stop=("x",))
    config.stages.train = settings.online(policy="init", sampling=drawn)
    config.stages.best = settings.best_checkpoint(policy="train")
    assert answers.first_sampling(Config.of(config)).max_new_tokens == 1024
    del config.stages["train"], config.stages["best"]
    config.stages.sft = settings.sft()
    with pytest.raises(ValueError, match="no stage with sampling settings"):
        answers.first_sampling(Config.of(config))


def test_evaluation_and_samples_read_no_other_problems(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not the training problems, nor held-out ones that are not asked for: they may be gone, or be
    those asked."""
    from g2d_jax import commands

    copy = Path(shutil.copytree(work, tmp_path / "work"))
    content = storage.read_json(copy / "config.json")
    rows = [{"problem": problem, "answer": "1"} for problem in ("1+2=?", "3+4=?", "5+6=?")]
    dev, gone = tmp_path / "dev.jsonl", {"path": str(tmp_path / "gone.jsonl")}
    dev.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def changed(split: str = "test", **sources: dict) -> Path:
        content["config"]["data"].update(sources)
        content["config"]["stages"]["evaluate"]["split"] = split
        storage.write_json(copy / "config.json", content)
        return copy

    run = changed("dev", train=gone, dev={"path": str(dev)})
    manifest = commands.evaluate(run, "sft", problems=str(dev), num_generations=1)
    assert manifest.evaluation.problems == 3

    run = changed(train={"path": str(dev)}, dev={"path": str(dev)})

    # a row that tells nothing is skipped as the run's test problems skip theirs
    with dev.open("a") as file:
        file.write('{"text": "7+8=?"}\n')
    source = {"path": "procedural:chains", "split": "test", "limit": 16}
    run = changed(test=source | {"on_error": "skip"})

    def by_column(completions: list[str], tests: list[str], **columns: object) -> list[float]:
        return [float(test == "passes") for test in tests]

    for tests, mean in (("fails", 0.0), ("passes", 1.0)):  # the answers and prompts are the same
        dev.write_text("".join(json.dumps({**row, "tests": tests}) + "\n" for row in rows))
        manifest = commands.evaluate(
            run, "sft", problems=str(dev), num_generations=1, reward=by_column
        )
        assert manifest.evaluation.policies[0].accuracy.mean == mean
    assert f"WARNING: the run also trains on {dev}" in capsys.readouterr().out
    run = changed(test=gone)
    # a given problem needs no others
    assert len(commands.sample(run, policy="sft", prompts="1+1=?", count=1)) == 1
    with pytest.raises(
        ValueError, match=r"data\.test\.path cannot be used: there is no .*gone\.jsonl"
    ):
        commands.sample(run, policy="sft", count=1)


def test_devices_that_are_not_here_are_told_in_a_line(
    work: Path, one_device: dict[str, str]
) -> None:
    if find_spec("jax_plugins"):
        pytest.skip("a plugin is installed that may find such devices")
    environment = {**one_device, "JAX_PLATFORMS": "cuda"}
    command = ["run", "--config", "demo:preset=smoke", "--workdir", "new"]
    python = [sys.executable, "-m", "g2d_jax", *command]
    done = subprocess.run(python, env=environment, cwd=work.parent, capture_output=True, text=True)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()[-1:]
    assert line.startswith("g2d: JAX_PLATFORMS is 'cuda', but JAX finds no such devices: ")
    assert "Traceback" not in done.stderr and "pip install '.[cuda]'" in line
    assert not (work.parent / "new" / "config.json").exists()


@pytest.mark.filterwarnings("ignore")
def test_export_loads_in_transformers_with_the_same_logits(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, g2d: G2D
) -> None:
    pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

    from g2d_jax import commands
    from g2d_jax.data.tokenizer import load_tokenizer

    monkeypatch.chdir(tmp_path)
    said = g2d("export", "--workdir", work, "--output", "model")
    assert said.endswith("\ndpo is in model\n")
    model = AutoModelForCausalLM.from_pretrained("model")
    # AutoTokenizer puts Qwen2's own rules in place of this tokenizer's, as it goes by the model;
    # see test_real_models.
    tokenizer = PreTrainedTokenizerFast.from_pretrained("model")
    ids = tokenizer("12+3*4=?;\\boxed{60}")["input_ids"]
    assert tokenizer.decode(ids) == "12+3*4=?;\\boxed{60}"
    ours = load_tokenizer("model")  # as a later run with model.path=model does
    assert ours.encode_completion("12+3*4=?;\\boxed{60}").tolist()[:-1] == ids
    with commands.opened(work) as session:
        params = load_policy(session, "dpo")
        assert (
            ids == session.tokenizer.encode_completion("12+3*4=?;\\boxed{60}").tolist()[: len(ids)]
        )
        assert set(session.tokenizer.eos_ids) <= set(
            np.atleast_1d(model.generation_config.eos_token_id).tolist()
        )
    np.testing.assert_allclose(*their_logits_and_ours(model, params, ids), atol=1e-4)
    card = (tmp_path / "model" / "README.md").read_text()
    assert "# tiny: dpo\n" in card and "PreTrainedTokenizerFast.from_pretrained" in card
    check_card(card)
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1].replace("path/to/this", "model")
    made: dict[str, object] = {}
    exec(code, made)
    assert made["ids"] == ours.encode_prompt("1+1=?").tolist()
    # as an owner may write
    asked = {
        "temperature": 0.7,
        "top_k": 20,
        "do_sample": True,
        "custom_generate": "org/code",
    }
    place = tmp_path / "model" / "generation_config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | asked))
    assert "holds a model already" in g2d("export", work, "--output", "model", refused=True)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "README.md").write_text("# My project")
    assert "holds README.md, and is not an interrupted export" in g2d(
        "export", work, "--output", mine, refused=True
    )
    g2d("export", work, "--output", "early", "--policy", "warmup@1")
    spent = stage_result.read(work / "02-warmup").costs["1"]
    early = (tmp_path / "early" / "README.md").read_text()
    name, _, generated, *_ = cells(early.partition("## Results and cost")[2])[0]
    assert (name, generated) == ("warmup@1", str(spent.generated))
    g2d("export", work, "--output", "other", "--policy", "hf:model")  # and back
    assert str(tmp_path) not in (tmp_path / "other" / "README.md").read_text()
    first, second = (tmp_path / name / "model.safetensors" for name in ("model", "other"))
    assert first.read_bytes() == second.read_bytes()
    sampling = GenerationConfig.from_pretrained("other")
    assert (sampling.temperature, sampling.top_k, sampling.do_sample) == (0.7, 20, True)
    assert "custom_generate" not in (tmp_path / "other" / "generation_config.json").read_text()


def check_card(card: str) -> None:
    """It has the accuracy and the cost of each policy of tiny.py, and what dpo was made from."""
    front = card.split("---")[1]
    # it began with random parameters
    assert "library_name: transformers" in front and "base_model" not in front
    headings = re.findall(r"^## (.+)", card, re.MULTILINE)
    assert headings == ["Results and cost", "Data", "Use", "Settings"]
    rows = cells(card.partition("## Results and cost")[2].partition("\n## ")[0])
    assert [name for name, *_ in rows] == ["dpo", "sft", "warmup"]
    assert all(" ± " in accuracy for _, accuracy, *_ in rows)


# Code that exits, and text that steers

CONFIG = """
from g2d_jax import config as settings


def get_config(arg=""):
    config = settings.base()
    config.data.train = settings.source("problems.jsonl")
    config.stages.warmup = settings.online(policy="init", steps=1, optimizer=settings.optimizer(1e-3))
    config.tokenizer.path = "procedural:slips"
    config.reward.function = "REWARD:graded"
    return config
"""


def as_typed(g2d: G2D, folder: Path, config: str, reward: str) -> str:
    """What the dry run says when it stops, of a config and a reward beside it."""
    (folder / "my_config.py").write_text(config.replace("REWARD", f"my_reward_of_{folder.name}"))
    (folder / f"my_reward_of_{folder.name}.py").write_text(reward)
    problems = [json.dumps({"problem": f"{i}+1=?", "answer": str(i + 1)}) for i in range(64)]
    (folder / "problems.jsonl").write_text("\n".join(problems))
    place = folder / "work"
    return g2d(
        "run",
        "--config",
        str(folder / "my_config.py"),
        "--workdir",
        place,
        "--dry-run",
        refused=True,
    )


@pytest.mark.parametrize(
    ("config", "reward", "told"),
    [
        (CONFIG + "import sys; sys.exit(0)", "", "my_config.py, line 12: SystemExit: 0"),
        (
            CONFIG,
            "def graded(completions):\n    raise SystemExit(0)",
            "line 2, in graded: it exits (SystemExit: 0)",
        ),
        (
            CONFIG,
            "class Own(list):\n    def __len__(self): raise SystemExit(0)\n"
            "def graded(completions):\n    return Own([1.0 for _ in completions])",
            "line 2, in __len__: SystemExit: 0: code called by a command must return",
        ),
    ],
)
def test_code_that_exits_is_told_and_never_ends_with_status_0(
    g2d: G2D, tmp_path: Path, config: str, reward: str, told: str
) -> None:
    assert told in as_typed(g2d, tmp_path, config, reward)


STEERING = "\x1b[2J\x9b31m\r\u202e\u2066\ue000\x07"


def is_harmless(text: str) -> bool:
    """Whether nothing in a text steers a terminal."""
    return not any(
        unicodedata.category(char) in ("Cc", "Cf", "Cs") for char in text.replace("\n", "")
    )


@pytest.mark.parametrize(
    "text", [f"tensor {STEERING} of shape [{'1, ' * 200_000}]", "\ud800" * 10**6, "\x1b" * 10**5]
)
def test_whatever_a_command_says_is_cleaned_and_has_an_end(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    processes.say(text)
    said = capsys.readouterr().err
    assert (
        said.startswith("g2d: ")
        and said.count("\n") == 1
        and len(said) < 12_000
        and is_harmless(said)
    )
    assert "characters left out" in said


def test_text_from_elsewhere_cannot_pass_for_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    processes.say("the server said: no\ng2d: all passed\n\ng2d: done")
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "g2d: the server said: no" and said[1:] == [
        "  g2d: all passed",
        "",
        "  g2d: done",
    ]


def test_what_a_reward_raises_is_printed_cleaned_and_with_an_end(g2d: G2D, tmp_path: Path) -> None:
    said = as_typed(
        g2d,
        tmp_path,
        CONFIG,
        f"def graded(completions):\n    raise ValueError({STEERING!r} + 'long ' * 200_000)",
    )
    assert "\\x1b[2J" in said and "\\u202e" in said and "characters left out" in said
    assert len(said) < 40_000 and is_harmless(said)


def test_a_command_that_a_program_calls_leaves_its_tracebacks_as_they_were(tmp_path: Path) -> None:
    hooks = sys.excepthook, threading.excepthook
    assert cli.main(["status", str(tmp_path / "none")]) == 1
    assert (sys.excepthook, threading.excepthook) == hooks


def test_the_traceback_of_an_error_that_nobody_expected_is_printed_cleaned() -> None:
    code = """
import sys, threading
from g2d_jax.runtime import terminal
terminal.clean_tracebacks()
def fail():
    raise LookupError(STEERING + "x" * 10**6)
thread = threading.Thread(target=fail)
thread.start()
thread.join()
fail()
""".replace("STEERING", repr(STEERING))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.count("LookupError: \\x1b[2J") == 2
    assert (
        done.stderr.count("characters left out") == 2
        and len(done.stderr) < 250_000
        and is_harmless(done.stderr)
    )


@pytest.mark.parametrize(
    ("pattern", "is_chat", "responses"),
    [
        ("Problem: 3 + 4\n3 + 4 = 7\n#### 7\n\nProblem: {problem}\n", False, ["3 + 4 = 7\n#### 7"]),
        ("Q: 1 + 1\nA: 2\n\nQ: 2 + 2\nA: It is 4.\n\nQ: {problem}\nA:", True, ["2", "It is 4."]),
        ("Solve it.\nQ: {problem}\nA:", False, []),
        ("{problem}\nAnswer:", False, []),
        ("Q: 1 + 1\nA: 2\n\nQ: {problem}", True, ["A: 2"]),
        ("Q: 1 + 1\nA: 2\n\nQ: {problem}", False, ["\nA: 2"]),
        (
            "Solve.\n\nProblem: 8 + 6?\n8 + 6 = 14\n#### 14\n\nProblem: {problem} ",
            True,
            ["8 + 6 = 14\n#### 14"],
        ),
        ("Q: 1 + 1\n\nQ: 2 + 2\n4\n\nQ: {problem}", True, ["4"]),
        ("Read an FAQ: it helps.\nQ: 1 + 1\n2\nQ: {problem}", True, ["2"]),
        ("Solve it. {problem}", True, []),
    ],
)
def test_worked_examples_of_a_template(pattern: str, is_chat: bool, responses: list[str]) -> None:
    assert worked_examples(pattern, is_chat) == responses


def test_a_reward_that_a_work_directory_names_comes_with_the_folder_to_give(tmp_path: Path) -> None:
    config = resolve(TINY, ["reward.function=own_reward_of_a_run:exact"])
    config.reward.folder = str(tmp_path / "my code")
    write_settings(Config.of(config), epath.Path(tmp_path))
    assert commands.read_config(epath.Path(tmp_path)).reward.folder is None
    with pytest.raises(ValueError, match="PYTHONPATH=FOLDER g2d "):
        load_reward("own_reward_of_a_run:exact")


@pytest.mark.parametrize(
    ("typed", "hint"),
    [("--dryrun", ", did you mean --dry-run?"), ("--seed=3", "; write settings as --config.")],
)
def test_an_option_that_there_is_not(
    typed: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.parse(["run", "--config", "demo", typed])
    assert f"unknown argument {typed!r}{hint}" in capsys.readouterr().err
