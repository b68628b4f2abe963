"""Runs and studies whose directory is on an object store: killed and continued, they give what local disk gives.

The stores are servers of this process, the runs processes of their own that reach them over HTTP.
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

from g2d_jax.runtime.lock import LOCK

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
from g2d_jax.stages.policies import load_policy
from g2d_jax.stages.runtime import Runtime
tokenizer = load_tokenizer("procedural:slips")
shape = ModelConfig("llama", tokenizer.vocab_size, 32, 2, 2, 1, 16, 64)
model = decoder.init(shape, jax.random.key(0))
config, folder = tiny.get_config(), epath.Path(sys.argv[1])
for url in sys.argv[2:]:
    tokenizer.save(url)
    hf.save(model, url, max_shard_bytes=20_000, eos_ids=tokenizer.eos_ids)
    config.model.path = url
    runtime = Runtime(Config.of(config), folder, None, {})
    assert runtime.model_config == shape
    assert runtime.tokenizer.fingerprint == tokenizer.fingerprint
    jax.tree.map(np.testing.assert_array_equal, load_policy(runtime, "init"), model)
    config.model.path = url + "/none"
    runtime = Runtime(Config.of(config), folder, None, {})
    for attribute in ("model_config", "tokenizer"):
        try:
            getattr(runtime, attribute)
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
    "import fsspec, sys\nfiles, root = fsspec.core.url_to_fs(sys.argv[1])\nfiles.get(root, sys.argv[2], recursive=True)"
)


Start = Callable[..., Forked]


@pytest.fixture
def start(forks: Forks, one_device: dict[str, str]) -> Start:
    """start(variables, code, *arguments): with these variables in the environment too."""
    return lambda variables, code, *arguments: forks.start(*arguments, code=code, env={**one_device, **variables})


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
@pytest.mark.parametrize("store", ["s3", "gs"])
def test_a_run_killed_and_continued_is_the_run_on_local_disk(store, finished, request, start, call, tmp_path):
    variables, workdir = request.getfixturevalue(store), f"{store}://{BUCKET}/run"
    arguments = (variables, G2D, "run", "--config", TINY, "--workdir", workdir)
    with start(*arguments) as first:
        while "warmup 1/3" not in first.stdout:
            assert first.poll() is None, first.stderr
            time.sleep(0.02)
    done = call(*arguments)
    assert "sft: done before, skipped" in done.stdout and f"report: {workdir}/report.html" in done.stdout
    assert "is locked by process" in done.stderr and "its lock is taken over" in done.stderr
    call(variables, COPY, workdir, tmp_path / "copy")
    assert differences(finished, tmp_path / "copy") == []
    names = [{path.name for path in root.iterdir()} - {LOCK} for root in (finished, tmp_path / "copy")]
    assert names[0] == names[1]
    call(variables, G2D, "export", "--workdir", workdir, "--policy", "dpo", "--output", tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert call(variables, G2D, "status", "--workdir", workdir).stdout.count(" done ") == 5
    assert "nothing" not in call(variables, G2D, "report", workdir).stdout


@pytest.mark.slow
def test_a_run_starts_from_a_model_on_a_store(s3, gs, call, tmp_path):
    urls = [f"{store}://{BUCKET}/models/tiny" for store in ("s3", "gs")]
    call({**s3, **gs}, MODEL, tmp_path, *urls)


def test_half_an_upload_is_no_checkpoint_and_is_cleared_away(s3, call):
    code = f"""
import jax.numpy as jnp, sys
from etils import epath
from g2d_jax.training.checkpoint import Checkpoints
folder = epath.Path("s3://{BUCKET}/checkpoints")
(folder / "7" / "params" / "d" / "x").write_bytes(b"half")
with Checkpoints(folder, keep=2, pinned=(1,)) as checkpoints:
    assert checkpoints.steps() == [] and checkpoints.latest() is None
    for step in (1, 2, 3, 4):
        checkpoints.save(step, {{"params": {{"w": jnp.full(3, step, jnp.float32)}}}}, {{"n": step}})
    checkpoints.wait()
    assert checkpoints.steps() == [1, 3, 4], checkpoints.steps()
    assert sorted(path.name for path in folder.iterdir()) == ["1", "3", "4"]
    try:
        checkpoints.save(4, {{"params": {{"w": jnp.zeros(3)}}}}, {{}})
    except ValueError as error:
        assert "step 4" in str(error) and "already" in str(error), error
    else:
        sys.exit("saved twice")
import boto3
before = [path.name for path in folder.iterdir()]
boto3.client("s3").put_object(Bucket="{BUCKET}", Key="checkpoints/others", Body=b"")  # another process's, so to say
assert sorted([*before, "others"]) == sorted(path.name for path in folder.iterdir())  # no listing is remembered
(folder / "4" / "commit_success.txt").unlink()
assert Checkpoints(folder).latest() == 3
"""
    call(s3, code)


@pytest.mark.slow
def test_two_processes_share_a_study(s3, start, call, tmp_path):
    (tmp_path / "only_sft.py").write_text(
        "import tiny\n"
        "def get_config(arg=''):\n"
        "    config = tiny.get_config()\n"
        "    for name in ('warmup', 'collect', 'dpo', 'evaluate'):\n"
        "        del config.stages[name]\n"
        "    config.stages.sft.steps = 2\n"
        "    return config\n"
    )
    workdir = f"s3://{BUCKET}/study"
    arguments = ("sweep", "--config", str(tmp_path / "only_sft.py"), "--workdir", workdir)
    values = ("--product", "stages.sft.steps=1,2")
    both = [start(s3, G2D, *arguments, *values) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0], [process.stderr for process in both]
    taken = [line.split()[1] for process in both for line in process.stdout.splitlines() if line.startswith("[")]
    assert len(taken) == len(set(taken)) == 2, taken
    assert call(s3, G2D, "status", "--workdir", workdir).stdout


@pytest.mark.parametrize(("scheme", "package", "extra"), [("s3", "s3fs", "s3"), ("gs", "gcsfs", "gcs")])
def test_a_missing_driver_names_the_extra(scheme, package, extra, start):
    hidden = f"import sys; sys.modules[{package!r}] = None\n" + G2D  # as if it were not installed
    for command in (("run", "--config", TINY, "--workdir", f"{scheme}://b/run"), ("report", f"{scheme}://b/run")):
        process = start({}, hidden, *command)
        assert process.wait() == 1
        message = f"{scheme}://b/run needs a driver, from an extra that is not installed: pip install '.[{extra}]'"
        assert message in process.stderr


def test_an_unknown_store_is_refused(start):
    process = start({}, G2D, "run", "--config", TINY, "--workdir", "az://b/run")
    assert process.wait() == 1
    assert "paths are local, gs://BUCKET/… or s3://BUCKET/…, not az://" in process.stderr
