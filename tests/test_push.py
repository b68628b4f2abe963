"""Publishing on a hub, with its own client."""

import getpass
import os
import re
from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest
from hub_server import Hub, client_settings, serving

from g2d_jax import cli, commands
from g2d_jax.commands.push import push
from g2d_jax.runtime.tables import read_preferences

# of the hub's client
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
TOKEN = "hf_sentinelAAAA1111"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """An empty hub, and its client logged in."""
    with serving(Hub(token=TOKEN)) as served:
        for name, value in client_settings(served, tmp_path).items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield served


def require_public(files: dict[str, bytes], workdir: Path) -> None:
    """Nothing of the publisher's machine is in the files."""
    for name, content in files.items():
        for secret in (TOKEN, str(workdir), str(workdir.parent), str(Path.home()), os.getcwd()):
            assert secret.encode() not in content, name
    assert getpass.getuser() == "root" or getpass.getuser().encode() not in files["README.md"]


@pytest.mark.parametrize("what", ["pairs", pytest.param("model", marks=pytest.mark.slow)])
def test_what_a_run_made_is_pushed_with_a_card(
    what: str, finished: Path, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["push", str(finished), "--repo", "me/it", "--what", what]
    assert cli.main(command) == 0
    ((name, revisions),) = hub.repositories.items()
    assert capsys.readouterr().out.endswith(f"{hub.url}/{name}/commit/{revisions['main'][0]}\n")
    assert hub.private == {name}
    files = hub.files(name)
    require_public(files, finished)
    card = files["README.md"].decode()
    assert re.search(r"^\| dpo \|.* ± .*\|", card, re.MULTILINE), card
    for part in ("on 16 held-out problems ±", "| FLOPs |", "procedural:chains", '"seed": 0'):
        assert part in card
    # A file of an earlier push that is no longer there is gone after the next.
    revisions["main"][1]["preferences/part-00007.parquet"] = b""
    assert cli.main(command) == 0 and hub.files(name) == files
    if what == "model":
        exported = commands.export(finished, tmp_path / "model")
        assert files.keys() - {".gitattributes"} == {path.name for path in exported.iterdir()}
        return
    for file, content in files.items():
        (tmp_path / "pairs" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "pairs" / file).write_bytes(content)
    loaded = datasets.load_dataset(
        str(tmp_path / "pairs"), split="train", cache_dir=str(tmp_path / "cache")
    )
    pairs = read_preferences(finished / "03-collect" / "preferences")
    for column in ("prompt", "chosen", "rejected"):
        assert loaded[column][:] == [getattr(pair, column) for pair in pairs]


def test_what_others_wrote_is_not_replaced_and_what_is_public_not_written(
    finished: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(message: str) -> None:
        before = dict(hub.repositories["datasets/me/pairs"])
        with pytest.raises(ValueError, match=message):
            push(finished, "me/pairs", what="pairs")
        assert hub.repositories["datasets/me/pairs"] == before

    for theirs in ("README.md", "train.csv"):
        hub.repositories["datasets/me/pairs"] = {"main": ("1" * 40, {theirs: b"mine"})}
        hub.private = {"datasets/me/pairs"}
        refused("holds files that no g2d push wrote")
    hub.private.clear()
    refused("me/pairs is public: add --public")
    hub.private.add("datasets/me/pairs")
    monkeypatch.setenv("HF_TOKEN", "hf_another_token")
    refused("me/pairs: .* log in with `hf auth login`")
    monkeypatch.delenv("HF_TOKEN")
    refused("a push needs a token: log in with")
    with pytest.raises(ValueError, match="what is one of model, adapters, pairs, got 'adapter'"):
        push(finished, "me/it", what="adapter")


def test_a_dtype_is_checked_before_anything_else(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="saved as float32 or bfloat16, not float16"):
        commands.export(tmp_path, tmp_path / "out", dtype="float16")
