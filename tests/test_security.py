"""What SECURITY.md promises, beside what tests/rewards says of the verifier: hostile files run
nothing, and no secret of the environment or the command line gets into what a run writes."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest
from etils import epath
from forks import Forks
from sources import load_problems

from g2d_jax import config as settings
from g2d_jax.config import Config
from g2d_jax.config.io import to_dict
from g2d_jax.data.template import TemplateSettings
from g2d_jax.data.tokenizer import load_tokenizer
from g2d_jax.models import decoder, hf
from g2d_jax.models.config import ModelConfig
from g2d_jax.recipes.config_load import resolve
from g2d_jax.runtime import storage, tables
from g2d_jax.session import workdir
from g2d_jax.training.checkpoint import Checkpoints, DamagedCheckpoint

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "g2d_jax"
TINY = str(Path(__file__).with_name("tiny.py"))

# No code from data


FORBIDDEN_MODULES = {
    *(
        "pickle",
        "cPickle",
        "_pickle",
        "dill",
        "cloudpickle",
        "shelve",
        "marshal",
        "joblib",
        "yaml",
        "code",
    )
}
FORBIDDEN_BUILTINS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_CALLS = {
    "system",
    "popen",
    "import_module",
    "exec_module",
    "load_module",
    "run_path",
    "run_module",
}
EXCEPTIONS = {
    ("stages/__init__.py", "import_module"),  # of the kinds of stages alone
    ("recipes/config_load.py", "exec_module"),  # a config file is the user's own program
    ("rewards/functions.py", "exec_module"),  # … and the reward file beside it that it names
    # reward.function = "package.module:function" names the user's own code
    (
        "rewards/functions.py",
        "import_module",
    ),
}


def violations(tree: ast.AST) -> Iterator[str]:
    """What a file does that could run code from data."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [str(node.module)]
            )
            yield from (name for name in names if name.split(".")[0] in FORBIDDEN_MODULES)
        if not isinstance(node, ast.Call):
            continue
        is_bare = isinstance(node.func, ast.Name)
        name = getattr(node.func, "id" if is_bare else "attr", "")
        owner = getattr(getattr(node.func, "value", None), "id", "")
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        if name in FORBIDDEN_CALLS or (is_bare and name in FORBIDDEN_BUILTINS):
            yield name
        if (owner, name) in {("torch", "load"), ("np", "load"), ("numpy", "load")}:
            yield f"{owner}.{name}"
        for risky in ("allow_pickle", "shell", "trust_remote_code"):
            if risky in keywords and not (
                isinstance(keywords[risky], ast.Constant) and keywords[risky].value is False
            ):
                yield risky
        if name == "from_pretrained" and "trust_remote_code" not in keywords:
            yield "from_pretrained without trust_remote_code=False"


def test_the_package_runs_no_code_from_data() -> None:
    found = {
        (path.relative_to(PACKAGE).as_posix(), what)
        for path in PACKAGE.rglob("*.py")
        for what in violations(ast.parse(path.read_text("utf-8")))
    }
    assert found == EXCEPTIONS


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from yaml import load", "eval(x)", "np.load(f)", "torch.load(f)",
     "np.load(f, allow_pickle=True)", "subprocess.run(c, shell=True)", "os.system(c)", "T.from_pretrained(n)",
     "T.from_pretrained(n, trust_remote_code=t)", "exec(t)", "spec.loader.exec_module(m)"],
)  # fmt: skip
def test_violations_are_found(source: str) -> None:
    assert [*violations(ast.parse(source))]


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """What hostile code would leave behind; afterwards it must not be there."""
    path = tmp_path / "ran"
    yield path
    assert not path.exists()


@pytest.fixture
def evil(tmp_path: Path, marker: Path) -> Path:
    """A folder with a module that leaves the marker when it is imported."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(marker)!r})\nclass Evil: pass\n")
    return folder


CODE = {
    "auto_map": {
        "AutoConfig": "evil.Evil",
        "AutoModelForCausalLM": "evil.Evil",
        "AutoTokenizer": ["evil.Evil"] * 2,
    }
}
MODEL = ModelConfig("qwen2", 32, 16, 2, 4, 2, 4, 24, tie_word_embeddings=True)


def test_the_bomb_is_live(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()


def test_a_models_own_code_is_not_run(evil: Path) -> None:
    hf.save(decoder.init(MODEL, jax.random.key(0)), evil)
    (evil / "config.json").write_text(
        json.dumps(json.loads((evil / "config.json").read_text()) | CODE)
    )
    jax.tree.map(
        np.testing.assert_array_equal, hf.load(evil), decoder.init(MODEL, jax.random.key(0))
    )
    (evil / "model.safetensors").write_bytes(pickle.dumps(Bomb(evil.parent / "ran")))
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        hf.load(evil)


def test_pickled_weights_are_not_unpickled(evil: Path, marker: Path) -> None:
    hf.save(decoder.init(MODEL, jax.random.key(0)), evil)
    (evil / "model.safetensors").unlink()
    (evil / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(marker)))
    with pytest.raises(ValueError, match=r"only pickled weights .*save_pretrained\(new_folder\)"):
        hf.load(evil)


@pytest.mark.parametrize("generic", [True, False])
def test_a_tokenizers_own_code_is_not_run(evil: Path, generic: bool) -> None:
    embedded = load_tokenizer("procedural:slips")
    embedded.save(evil)
    (evil / "config.json").write_text(json.dumps({"model_type": "qwen2", **CODE}))
    declared = json.loads((evil / "tokenizer_config.json").read_text())
    name = {"tokenizer_class": "PreTrainedTokenizerFast" if generic else "Qwen2Tokenizer"}
    (evil / "tokenizer_config.json").write_text(json.dumps(declared | CODE | name))
    if generic:
        assert load_tokenizer(evil).encode_prompt("57+3=?").tolist() == [7, 9, 12, 5, 15, 17]
        return
    try:
        load_tokenizer(evil)  # Qwen2's own rules, or an error: never the folder's code
    except ValueError as error:
        assert "cannot be loaded" in str(error)


@pytest.mark.parametrize(
    "template",
    [
        "{{ cycler.__init__.__globals__.os.mkdir(PATH) }}",
        "{{ ('{0.__class__.__mro__}'.format)(messages) }}",
        "{% include PATH %}",
        pytest.param("{{ messages | attr('__class__') }}", marks=pytest.mark.slow),
    ],
)
def test_a_chat_template_stays_in_its_sandbox(template: str, tmp_path: Path, marker: Path) -> None:
    load_tokenizer("procedural:slips").save(tmp_path / "tokenizer")
    (tmp_path / "tokenizer/chat_template.jinja").write_text(
        template.replace("PATH", repr(str(marker)))
    )
    with pytest.raises(ValueError, match=r"chat template failed|leaves out the user's text"):
        load_tokenizer(
            tmp_path / "tokenizer", TemplateSettings(chat=True, system="Be brief.")
        ).encode_prompt("1+1=?")


@pytest.mark.parametrize(
    ("read", "name"),
    [
        *((load_problems, f"problems.{kind}") for kind in ("parquet", "json", "jsonl")),
        (tables.read_rollouts, "part-00000.parquet"),
    ],
)
def test_a_pickle_among_the_data_is_not_read(
    read: Callable[[Any], object], name: str, tmp_path: Path, marker: Path
) -> None:
    (tmp_path / name).write_bytes(pickle.dumps(Bomb(marker)))
    with pytest.raises(ValueError, match=name):
        read(os.fspath(tmp_path / name))


def test_a_pickle_in_a_checkpoint_is_not_read(tmp_path: Path, marker: Path) -> None:
    params = {"weight": jnp.arange(6.0)}
    like = {"params": jax.eval_shape(lambda: params)}
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=params["weight"].sharding), like
    )
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, {"params": params}, {"step": 1})
    bomb, replaced = pickle.dumps(Bomb(marker)), set()
    for file in (tmp_path / "checkpoints/1").rglob("*"):
        if (
            not file.is_file() or "ocdbt" in str(file) or file.parent.name == "d"
        ):  # read by TensorStore, not in Python
            continue
        replaced.add(file.name)
        kept = file.read_bytes()
        file.write_bytes(bomb)
        with contextlib.suppress(
            DamagedCheckpoint
        ):  # some of Orbax' files are not needed for reading
            restored, _ = Checkpoints(tmp_path / "checkpoints").restore(1, like)
            np.testing.assert_array_equal(restored["params"]["weight"], params["weight"])
        file.write_bytes(kept)
    assert len(replaced) >= 3


# Secrets

SECRETS = {
    "HF_TOKEN": "hf_sentinelAAAA1111",
    "WANDB_API_KEY": "wandb-sentinel-BBBB2222",
    "OPENAI_API_KEY": "sk-sentinel-CCCC3333",
    "AWS_SECRET_ACCESS_KEY": "aws-sentinel-DDDD4444",
}
PASSWORD = "sentinel-password-EEEE5555"


def everything(folder: Path) -> bytes:
    """The bytes of all files, and of Parquet, which is compressed, the values too."""
    parts = []
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            parts += [str(file).encode(), file.read_bytes()]
            if file.suffix == ".parquet":
                table = pq.read_table(file)
                parts += [repr(table.to_pylist()).encode(), repr(table.schema.metadata).encode()]
    return b"\n".join(parts)


def test_a_run_writes_no_secret(tmp_path: Path, forks: Forks, one_device: dict[str, str]) -> None:
    command = ["run", "--until", "dpo", "--workdir", tmp_path / "run"]
    command += ["--config", f"{TINY}:https://someone:{PASSWORD}@host.example/{SECRETS['HF_TOKEN']}"]
    done = forks.run(*command, env={**one_device, **SECRETS})
    assert done.returncode == 0, done.stderr
    written = everything(tmp_path / "run") + done.stdout.encode() + done.stderr.encode()
    assert [name for name, value in SECRETS.items() if value.encode() in written] == []
    assert PASSWORD.encode() not in written
    stored = storage.read_json(tmp_path / "run" / "environment.json")["command"]
    assert stored[-1] == f"{TINY}:https://***@host.example/***"
    assert {"checkpoints", "rollouts", "preferences", "metrics"} <= {
        path.name for path in (tmp_path / "run").rglob("*")
    }


def test_the_command_is_kept_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "tokenizers")
    text = "--a=hf_abcdefgh s3://key:word@bucket/x@y http://host/a@b tokenizers"
    assert workdir.without_secrets(text) == "--a=*** s3://***@bucket/x@y http://host/a@b tokenizers"


@pytest.mark.parametrize("field", ["engine.url", "model.path", "data.train.path", "name"])
def test_a_login_in_the_settings_is_refused_and_not_repeated(field: str) -> None:
    override = f"config.{field}=https://someone:{PASSWORD}@host.example/v1"
    with pytest.raises(
        ValueError, match=f"{field} holds a URL with a user name or password"
    ) as caught:
        resolve(TINY, [override])
    assert "engine.api_key_env" in str(caught.value) and PASSWORD not in str(caught.value)


def test_a_login_in_a_config_made_in_python_is_not_written(tmp_path: Path) -> None:
    config = settings.base()
    config.engine.url = f"https://someone:{PASSWORD}@host.example/v1"
    with pytest.raises(ValueError, match=r"engine\.url holds a URL"):
        workdir.claim(Config.of(config), epath.Path(tmp_path / "run"))
    assert PASSWORD.encode() not in everything(tmp_path)


def test_usual_paths_are_no_logins() -> None:
    for value in (
        "s3://bucket/runs/a@b",
        "hub:owner/name@config:split",
        "http://localhost:8000/v1",
        "warmup@10",
    ):
        config = settings.base()
        config.name = value
        assert to_dict(config)["name"] == value


# Dependencies

AUDIT = ROOT / ".ci" / "audit.py"

if AUDIT.exists():  # not in the source distribution

    @pytest.fixture
    def audit() -> Any:
        spec = importlib.util.spec_from_file_location("audit", AUDIT)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    CLEAN = {"name": "rich", "version": "15.0.0", "vulns": []}
    FLAW = {"id": "CVE-2025-27516", "fix_versions": ["3.1.6"], "aliases": [], "description": "x"}
    FLAWED = {"name": "jinja2", "version": "3.1.5", "vulns": [FLAW]}
    SKIPPED = {"name": "g2d-jax", "skip_reason": "Dependency not found on PyPI"}
    OFFLINE = "Traceback\nrequests.exceptions.ConnectionError: Max retries exceeded"

    @pytest.mark.parametrize(
        ("packages", "errors", "status", "text"),
        [
            (
                [CLEAN, SKIPPED],
                "",
                0,
                "1 packages audited, no known vulnerabilities; not known there: g2d-jax",
            ),
            ([FLAWED, CLEAN], "", 1, "in 2 packages\njinja2 3.1.5: CVE-2025-27516, fixed in 3.1.6"),
            (
                [SKIPPED],
                "",
                0,
                "NOT AUDITED: the package index here has no vulnerability data for any of 1 "
                "packages",
            ),
            ([], OFFLINE, 0, "NOT AUDITED: the database of vulnerabilities cannot be reached"),
            (
                [],
                "usage: pip-audit\nerror: no such option",
                1,
                "pip-audit failed: error: no such option",
            ),
        ],
    )
    def test_what_the_audit_found(
        audit: Any, packages: list[Any], errors: str, status: int, text: str
    ) -> None:
        output = json.dumps({"dependencies": packages, "fixes": []}) if packages else ""
        judged, said = audit.judge(output, errors)
        assert judged == status and text in said
