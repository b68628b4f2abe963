"""Runs and studies whose directory is on an object store: killed and continued, they give what local disk gives.

The stores are servers of this process, the runs processes of their own that reach them over HTTP.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from object_store import BUCKET

TINY = str(Path(__file__).parent / "tiny.py")
SMALL = (
    *("--config.stages.sft.steps=2", "--config.stages.warmup.steps=2", "--config.data.test.limit=8"),
    *("--config.checkpoint.every=1", "--config.checkpoint.keep=1"),
)
MODEL = """
import sys
import jax, numpy as np, tiny
from etils import epath
from g2d_jax.data.tokenizer import load_tokenizer
from g2d_jax.models import decoder, hf
from g2d_jax.models.config import ModelConfig
from g2d_jax.stages.context import Context
tokenizer = load_tokenizer("procedural:arithmetic")
shape = ModelConfig("llama", tokenizer.vocab_size, 32, 2, 2, 1, 16, 64)
model = decoder.init(shape, jax.random.key(0))
config, folder = tiny.get_config(), epath.Path(sys.argv[1])
for url in sys.argv[2:]:
    tokenizer.save(url)
    hf.save(model, url, max_shard_bytes=20_000, eos_ids=tokenizer.eos_ids)
    config.model.path = url
    context = Context(config, folder, None, {})
    assert context.model_config == shape
    assert context.tokenizer.fingerprint == tokenizer.fingerprint
    jax.tree.map(np.testing.assert_array_equal, context.policy("init"), model)
    config.model.path = url + "/none"
    context = Context(config, folder, None, {})
    for attribute in ("model_config", "tokenizer"):
        try:
            getattr(context, attribute)
        except ValueError as error:
            assert url + "/none" in str(error) and "hub" not in str(error), error
        else:
            sys.exit("found what is not there")
"""
G2D = "import sys; from g2d_jax import cli, locks; locks.BEAT, locks.LEASE = 0.5, 8.0; sys.exit(cli.main(sys.argv[1:]))"
READ = """
import json, sys
from etils import epath
from g2d_jax.storage import fingerprint
from g2d_jax.tables import read_preferences
from g2d_jax.tracking import read_metrics
from g2d_jax.training.checkpoint import Checkpoints
from g2d_jax.workdir import LOCK, absolute, stage_folders
root = absolute(sys.argv[1])
folders = stage_folders(root)
timed = lambda key: key == "step_time" or key.startswith(("generation/", "goodput/"))  # how fast it went
log = [(r["stage"], r["step"], r["kind"], {k: str(v) for k, v in r["metrics"].items() if not timed(k)})
       for r in read_metrics(root)]
print(json.dumps({
    "losses": [row for row in log if row[2] == "train"],
    "pairs": [[p.problem_id, p.prompt_ids.tolist(), p.chosen_ids.tolist(), p.rejected_ids.tolist()]
              for p in read_preferences(folders["collect"] / "preferences")],
    "steps": {name: Checkpoints(folder / "checkpoints").steps() for name, folder in folders.items()},
    "damage": [Checkpoints(folders["warmup"] / "checkpoints").damage(2)],
    "files": sorted(path.name for path in root.iterdir() if path.name != LOCK),
}))
"""


def begin(env: dict[str, str], code: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def call(env: dict[str, str], code: str, *arguments: str) -> tuple[str, str]:
    process = begin(env, code, *arguments)
    out, error = process.communicate(timeout=240)
    assert process.returncode == 0, error
    return out, error


def digests(folder: Path) -> dict[str, str]:
    """Of an exported model's weights."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.safetensors")}


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, one_device: dict[str, str]) -> tuple[dict, dict[str, str]]:
    """What an uninterrupted run on local disk has, and its last policy."""
    folder = tmp_path_factory.mktemp("local")
    call(one_device, G2D, "run", "--config", TINY, "--workdir", str(folder / "run"), *SMALL)
    call(one_device, G2D, "export", "--workdir", str(folder / "run"), "--policy", "dpo", "--output", str(folder / "hf"))
    return json.loads(call(one_device, READ, str(folder / "run"))[0]), digests(folder / "hf")


@pytest.mark.parametrize("store", ["s3", "gs"])
def test_a_run_killed_and_continued_is_the_run_on_local_disk(store, local, request, one_device, tmp_path):
    env, workdir = {**one_device, **request.getfixturevalue(store)}, f"{store}://{BUCKET}/run"
    arguments = ("run", "--config", TINY, "--workdir", workdir, *SMALL)
    with begin(env, G2D, *arguments) as first:
        assert any(line.startswith("warmup 1/2") for line in first.stdout)
        first.kill()
    out, error = call(env, G2D, *arguments)
    assert "sft: done before, skipped" in out and f"report: {workdir}/report.html" in out
    assert "is locked by process" in error and "its lock is taken over" in error
    found, (expected, weights) = json.loads(call(env, READ, workdir)[0]), local
    assert found["damage"] == [""] and found == expected
    call(env, G2D, "export", "--workdir", workdir, "--policy", "dpo", "--output", str(tmp_path / "hf"))
    assert digests(tmp_path / "hf") == weights != {}
    assert call(env, G2D, "status", "--workdir", workdir)[0].count(" done ") == 5
    assert "nothing" not in call(env, G2D, "report", workdir)[0]


def test_a_run_starts_from_a_model_on_a_store(s3, gs, one_device, tmp_path):
    urls = [f"{store}://{BUCKET}/models/tiny" for store in ("s3", "gs")]
    call({**one_device, **s3, **gs}, MODEL, str(tmp_path), *urls)


def test_half_an_upload_is_no_checkpoint_and_is_cleared_away(s3, one_device):
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
    call({**one_device, **s3}, code)


def test_two_processes_share_a_study(s3, one_device, tmp_path):
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
    both = [begin({**one_device, **s3}, G2D, *arguments, *values) for _ in range(2)]
    ended = [process.communicate(timeout=240) for process in both]
    assert [process.returncode for process in both] == [0, 0], ended
    taken = [line.split()[1] for out, _ in ended for line in out.splitlines() if line.startswith("[")]
    assert len(taken) == len(set(taken)) == 2, ended
    assert call({**one_device, **s3}, G2D, "status", "--workdir", workdir)[0]


@pytest.mark.parametrize(("scheme", "package", "extra"), [("s3", "s3fs", "s3"), ("gs", "gcsfs", "gcs")])
def test_a_missing_driver_names_the_extra(scheme, package, extra, one_device):
    hidden = f"import sys; sys.modules[{package!r}] = None\n" + G2D  # as if it were not installed
    for command in (("run", "--config", TINY, "--workdir", f"{scheme}://b/run"), ("report", f"{scheme}://b/run")):
        with begin(one_device, hidden, *command) as process:
            _, error = process.communicate(timeout=120)
        assert process.returncode == 1
        assert f"{scheme}://b/run needs an extra: pip install 'g2d-jax[{extra}]'" in error


def test_an_unknown_store_is_refused(one_device):
    with begin(one_device, G2D, "run", "--config", TINY, "--workdir", "az://b/run") as process:
        _, error = process.communicate(timeout=120)
    assert process.returncode == 1 and "paths are local, gs://BUCKET/… or s3://BUCKET/…, not az://" in error
