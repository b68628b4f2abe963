"""Runs and studies whose directory is on an object store: killed and continued, they give what
local disk gives.

The store is a server of this process, the runs processes of their own that reach it over HTTP.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forks import Forked, Forks
from object_store import BUCKET

from g2d_jax import cli
from g2d_jax.recipes.config_load import resolve
from g2d_jax.runtime.lock import LOCK
from g2d_jax.stages import run_issues

sys.path.append(str(Path(__file__).parent / "stages"))
from alike import differences

TINY = str(Path(__file__).parent / "tiny.py")
MODEL = """
import sys
import jax, numpy as np, tiny
from etils import epath
from g2d_jax.data.tokenizer import load_tokenizer
from g2d_jax.models import decoder, hf
from g2d_jax.config import Config
from g2d_jax.models.config import ModelConfig
from g2d_jax.session.policies import load_policy
from g2d_jax.runtime.tracking import Tracker
from g2d_jax.session.session import Options, Run, loaded, session_of
tokenizer = load_tokenizer("procedural:slips")
shape = ModelConfig("llama", tokenizer.vocab_size, 32, 2, 2, 1, 16, 64)
model = decoder.init(shape, jax.random.key(0))
config, folder = tiny.get_config(), epath.Path(sys.argv[1])
def opened():
    tracker = Tracker(None, tensorboard=False)
    run = Run(config=Config.of(config), workdir=folder, folders={}, tracker=tracker)
    with loaded(run, Options(splits=())) as shared:
        return session_of(run, shared)
for url in sys.argv[2:]:
    tokenizer.save(url)
    hf.save(model, url, max_shard_bytes=20_000, eos_ids=tokenizer.eos_ids)
    config.model.path = url
    runtime = opened()
    assert runtime.model_config == shape
    assert runtime.tokenizer.fingerprint == tokenizer.fingerprint
    jax.tree.map(np.testing.assert_array_equal, load_policy(runtime, "init"), model)
    config.model.path = url + "/none"
    try:
        opened()
    except ValueError as error:
        assert url + "/none" in str(error) and "hub" not in str(error), error
    else:
        sys.exit("found what is not there")
"""
G2D = """import sys
from g2d_jax import cli
from g2d_jax.runtime import lock
lock.BEAT, lock.LEASE = 0.5, 8.0
sys.exit(cli.main(sys.argv[1:]))"""
COPY = (
    "import fsspec, sys\nfiles, root = fsspec.core.url_to_fs(sys.argv[1])\nfiles.get(root, "
    "sys.argv[2], recursive=True)"
)


Start = Callable[..., Forked]


@pytest.fixture
def start(forks: Forks, one_device: dict[str, str]) -> Start:
    """start(variables, code, *arguments): with these variables in the environment too."""
    return lambda variables, code, *arguments: forks.start(
        *arguments, code=code, env={**one_device, **variables}
    )


@pytest.fixture
def call(start: Start) -> Callable[..., Forked]:
    """The same, to its end, which must be a good one."""

    def call(*arguments: Any) -> Forked:
        done = start(*arguments)
        assert done.wait() == 0, done.stderr
        return done

    return call


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_killed_and_continued_is_the_run_on_local_disk(gs, finished, start, call, tmp_path):
    workdir = f"gs://{BUCKET}/run"
    arguments = (gs, G2D, "run", "--config", TINY, "--workdir", workdir)
    with start(*arguments) as first:
        while "warmup 1/3" not in first.stdout:
            assert first.poll() is None, first.stderr
            time.sleep(0.02)
    done = call(*arguments)
    assert (
        "sft: done before, skipped" in done.stdout
        and f"report: {workdir}/report.html" in done.stdout
    )
    assert "is locked by process" in done.stderr and "takes it over" in done.stderr
    call(gs, COPY, workdir, tmp_path / "copy")
    assert differences(finished, tmp_path / "copy") == []
    names = [
        {path.name for path in root.iterdir()} - {LOCK} for root in (finished, tmp_path / "copy")
    ]
    assert names[0] == names[1]
    call(gs, G2D, "export", "--workdir", workdir, "--policy", "dpo", "--output", tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert call(gs, G2D, "status", "--workdir", workdir).stdout.count(" done ") == 5
    assert "nothing" not in call(gs, G2D, "report", workdir).stdout


@pytest.mark.slow
def test_a_run_starts_from_a_model_on_a_store(gs, call, tmp_path):
    call(gs, MODEL, tmp_path, f"gs://{BUCKET}/models/tiny")


@pytest.mark.slow
def test_what_lies_on_a_store_is_known_by_the_stores_checksums(gs, call):
    code = f"""
from etils import epath
from g2d_jax.session.contents import of_files, of_model
folder = epath.Path("gs://{BUCKET}/contents")
def put(name, data):
    (folder / name).write_bytes(data)
    return str(folder / name)
files = [put("a.jsonl", b"1"), put("b.jsonl", b"2")]
first = of_files(files)
put("a.jsonl", b"1")
assert of_files(files) == first
put("a.jsonl", b"3")
assert of_files(files) != first
put("config.json", b"{{}}"), put("model.safetensors", b"1")
model = of_model(folder)
put("model.safetensors", b"2")
assert of_model(folder) != model
"""
    call(gs, code)


@pytest.mark.parametrize(
    ("package", "extra", "arguments", "message"),
    [
        ("gcsfs", "gcs", ("run", "--config", TINY, "--workdir", "gs://b/run"), "gs://b/run"),
        ("gcsfs", "gcs", ("report", "gs://b/run"), "gs://b/run"),
        (
            "s3fs",
            "s3",
            ("run", "--config", TINY, "--config.model.path=s3://b/model", "--dry-run"),
            "s3://b/model",
        ),
    ],
    ids=("run", "report", "model"),
)
def test_a_missing_driver_names_the_extra(package, extra, arguments, message, start):
    hidden = f"import sys; sys.modules[{package!r}] = None\n" + G2D  # as if it were not installed
    process = start({}, hidden, *arguments)
    assert process.wait() == 1
    assert (
        f"{message} needs a driver, from an extra that is not installed: pip install '.[{extra}]'"
        in process.stderr
    )


@pytest.mark.parametrize(
    "command",
    [
        ("run", "--config", TINY),
        ("run", "--config", TINY, "--dry-run"),
        ("sweep", "--config", TINY, "--seeds", "0,1"),
        ("report",),
        ("status",),
        ("sample",),
        ("evaluate", "--policy", "dpo"),
        ("export", "--output", "model"),
    ],
    ids=lambda command: " ".join(command[:1] + command[3:]),
)
def test_a_work_directory_on_s3_is_refused_with_what_to_do(
    command: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([*command, "--workdir", "s3://bucket/run"]) == 1
    refused = capsys.readouterr().err
    assert refused.startswith(
        "g2d: s3://bucket/run: a work directory is on a local disk or on Google Cloud Storage"
    )
    assert "`aws s3 sync DIRECTORY s3://bucket/run`" in refused and refused.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_policy_of_a_run_on_s3_is_refused_too() -> None:
    config = resolve(TINY)
    config.stages.warmup.policy = "run:s3://bucket/run#sft"
    with pytest.raises(ValueError, match=r"s3://bucket/run: a work directory is on a local disk"):
        run_issues.checked(config)


def test_an_unknown_store_is_refused(start):
    process = start({}, G2D, "run", "--config", TINY, "--workdir", "az://b/run")
    assert process.wait() == 1
    assert "use a local path, gs://BUCKET/… or s3://BUCKET/…, not az://" in process.stderr
