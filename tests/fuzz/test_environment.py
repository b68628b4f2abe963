"""Hostile environment variables, locales and standard streams: the command works, or says what is
wrong."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from etils import epath
from fuzz.hostile import tries
from hypothesis import given
from hypothesis import strategies as st

from g2d_jax import cli
from g2d_jax.config import Config
from g2d_jax.config import io as config_io
from g2d_jax.models import hf
from g2d_jax.runtime.tracking import Screen
from g2d_jax.session.workdir import write_settings

pytestmark = pytest.mark.timeout(120)

COMMAND = [sys.executable, "-m", "g2d_jax"]


@pytest.fixture(scope="module")
def workdir(folder: Path) -> Path:
    """That of a run which was claimed and did no more."""
    config = config_io.from_dict(
        {"name": "début \u2190 \U0001f600", "stages": {"sft": {"kind": "sft"}}}
    )
    write_settings(Config.of(config), epath.Path(folder))
    return folder


WORDS = "0 1 -5 x 80 2147483648 nonsense dumb xterm-256color é\udcff ~ /nonexistent"
VALUES = st.sampled_from(["", "\n", "9" * 40, *WORDS.split()])
NAMES = "TERM COLUMNS LINES NO_COLOR FORCE_COLOR TTY_COMPATIBLE TTY_INTERACTIVE TMPDIR HOME LANG"


@pytest.mark.parametrize("columns", ["0", "00", "\u00b2"])
def test_a_terminal_of_no_columns(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    """As serial consoles and some containers say."""
    monkeypatch.setenv("COLUMNS", columns)
    screen = Screen(io.StringIO())
    screen.say("progress")
    assert "progress" in screen.console.file.getvalue()  # type: ignore[attr-defined]


@given(st.dictionaries(st.sampled_from(NAMES.split()), VALUES, max_size=4), st.booleans())
@tries(60)
def test_what_the_screen_and_the_commands_read(
    workdir: Path, values: dict[str, str], terminal: bool
) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        screen = Screen(Stream())
        screen.say("progress \x1b[2J \ud800 é")
        screen.table("table", ["stage", "steps"], [["sft", 1]])
        written = screen.console.file.getvalue()  # type: ignore[attr-defined]
        assert "progress" in written and "\x1b[2J" not in written
        patch.setattr(sys, "stdout", Stream())
        assert cli.main(["status", "--workdir", str(workdir)]) == 0
        with pytest.raises(ValueError) as error:
            hf.resolve("~/no/such/model")
        assert "/no/such/model" in str(error.value)  # behind any HOME, newlines included


def test_all_at_once_in_a_process_of_its_own(one_device: dict[str, str]) -> None:
    """No home, no folder for temporary files, an ASCII locale, and names that mean nothing."""
    env = {
        **{
            name: value
            for name, value in one_device.items()
            if name not in ("HOME", "LANG", "LC_CTYPE")
        },
        **{"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "TMPDIR": "/nonexistent"},
        **{
            "TERM": "nonsense",
            "COLUMNS": "-5",
            "LINES": "x",
            "HF_HUB_OFFLINE": "nonsense",
            "PYTHONOPTIMIZE": "2",
        },
    }
    config = Path(__file__).with_name("short.py")
    command = [*COMMAND, "run", "--config", config, "--dry-run", "--config.name=d\u00e9but \u2190"]
    done = subprocess.run(command, env=env, capture_output=True, timeout=100)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert b"sft" in done.stdout and not done.stderr


def test_a_reader_that_goes_away(workdir: Path, one_device: dict[str, str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [*COMMAND, "status", "--workdir", workdir]
        done = subprocess.run(
            command, env=one_device, stdout=writing, stderr=subprocess.PIPE, timeout=60
        )
    finally:
        os.close(writing)
    assert done.returncode in (0, 1, 120) and b"Traceback" not in done.stderr


def test_a_standard_output_that_is_full(workdir: Path, one_device: dict[str, str]) -> None:
    command = ["sh", "-c", 'exec "$@" >/dev/full', "sh", *COMMAND, "status", "--workdir", workdir]
    done = subprocess.run(command, env=one_device, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 1 and b"Traceback" not in done.stderr
    assert done.stderr.startswith(b"g2d: ") and b"No space left" in done.stderr


def test_a_text_that_no_terminal_shows_in_an_error(
    workdir: Path, one_device: dict[str, str]
) -> None:
    """A path that is not UTF-8 is named all the same."""
    command = [*map(os.fsencode, COMMAND), b"status", b"--workdir", os.fsencode(workdir) + b"/\xff"]
    done = subprocess.run(
        command, env={**one_device, "LC_ALL": "C.UTF-8"}, capture_output=True, timeout=60
    )
    assert (
        done.returncode == 1
        and done.stderr.startswith(b"g2d: ")
        and b"Traceback" not in done.stderr
    )
