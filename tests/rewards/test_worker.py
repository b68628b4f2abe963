"""The worker process by itself: what it may see, and that no exception leaves it."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from g2d_jax.rewards.child import Child, _environment

HEADER = struct.Struct("!i")


def run_python(script: str) -> str:
    return subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout


def test_jax_is_never_imported() -> None:
    script = "import sys, g2d_jax.rewards.worker, g2d_jax.rewards.exact; print([m for m in sys.modules if 'jax' in m])"
    modules = run_python(script)
    assert "'jax'" not in modules
    assert "'flax'" not in modules


def test_the_environment_is_scrubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("XLA_FLAGS", "--anything")
    environment = _environment()
    assert "secret" not in environment.values()
    assert set(environment) == {
        "PATH", "LANG", "PYTHONHASHSEED", "PYTHONPATH", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"
    }  # fmt: skip


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_a_running_worker_has_nothing_of_its_parents(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", "sentinel-hf-token")
    held = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(held, True)
    child = Child(1.0, 1024)
    try:
        process = Path(f"/proc/{child.pid}")
        assert child.ask("x+1", "1+x", 60.0)["verdict"] == "correct"
        assert b"sentinel-hf-token" not in (process / "environ").read_bytes()
        files = {os.readlink(link) for link in (process / "fd").iterdir()}
        assert {name.partition(":")[0] for name in files} == {"pipe", "/dev/null"}
        status = dict(line.split(":\t") for line in (process / "status").read_text().splitlines() if ":\t" in line)
        assert child.unconfined == "" and status["Seccomp"] == "2" and status["NoNewPrivs"] == "1"
    finally:
        child.stop()
        os.close(held)


@pytest.mark.parametrize(
    ("raised", "reply"),
    [
        ("math_verify.errors.TimeoutException('x')", {"verdict": "timeout", "stopped": "crash"}),
        ("KeyboardInterrupt()", {"verdict": "timeout", "stopped": "crash"}),
        ("MemoryError()", {"verdict": "timeout", "stopped": "memory"}),
        ("RecursionError()", {"verdict": "incorrect", "stopped": None}),
        ("SystemExit(10)", {"verdict": "timeout", "stopped": "crash"}),
    ],
)
def test_no_exception_of_the_grader_passes_the_boundary(raised: str, reply: dict[str, str | None]) -> None:
    script = (
        "import json, math_verify\n"
        "from g2d_jax.rewards import worker\n"
        "def explode(gold, answer):\n"
        f"    raise {raised}\n"
        "worker.grade = explode\n"
        "print(json.dumps(worker._grade_in_child('1', '2', 1.0, 2048)))\n"
    )
    result = json.loads(run_python(script))
    assert {key: result[key] for key in reply} == reply


def encode_frame(message: dict[str, str]) -> bytes:
    body = json.dumps(message).encode()
    return HEADER.pack(len(body)) + body


def test_serves_until_its_input_ends() -> None:
    command = [sys.executable, "-m", "g2d_jax.rewards.worker", "--cpu-seconds", "2", "--memory-mb", "2048"]
    requests = encode_frame({"gold": "x+1", "answer": "1+x"}) + encode_frame({"gold": "^", "answer": "3"})
    requests += encode_frame({"gold": "\x00 \ud83d ٣ \n", "answer": "3"})  # frames carry any text
    output = subprocess.run(command, input=requests, check=True, capture_output=True).stdout
    replies = []
    while output:
        (length,) = HEADER.unpack(output[:4])
        replies.append(json.loads(output[4 : 4 + length]))
        output = output[4 + length :]
    assert replies[0].keys() == {"ready", "unconfined"}
    assert [reply["verdict"] for reply in replies[1:]] == ["correct", "unscorable", "correct"]
