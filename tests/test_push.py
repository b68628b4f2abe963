"""Publishing on a hub, with its own client."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
import pytest
from hub_server import Hub, serving
from matrix import slow

from g2d_jax import cli, commands
from g2d_jax.push import push
from g2d_jax.runtime.tables import read_preferences

# of the hub's client
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
TOKEN = "hf_sentinelAAAA1111"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """An empty hub, and its client logged in; large files go as to any LFS server, not in the
    client's own protocol."""
    with serving(Hub(token=TOKEN)) as served:
        template = f"{served.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        changes = {
            "ENDPOINT": served.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": template,
            "HF_HUB_OFFLINE": False,
        }
        changes |= {"HF_HUB_DISABLE_XET": True, "HF_TOKEN_PATH": str(tmp_path / "token")}
        for name, value in {**changes, "HF_HUB_CACHE": str(tmp_path / "cache")}.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield served


def test_a_dataset_is_pushed_in_one_commit(
    finished: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["push", "--workdir", str(finished), "--repo", "me/pairs", "--what", "dataset"]
    assert cli.main([*command, "--dry-run"]) == 0 and hub.requests == []
    said = capsys.readouterr().out
    assert "| problems.parquet" in said and "# tiny: preference pairs of collect" in said
    assert cli.main(command) == 0
    commit = hub.repositories["datasets/me/pairs"]["main"][0]
    assert f"{hub.url}/datasets/me/pairs/commit/{commit}\n" in capsys.readouterr().out
    files = hub.files("datasets/me/pairs")
    pairs = [name for name in files if name.startswith("preferences/")]
    parts = ["completions/part-00000.parquet", "completions/part-00001.parquet"]
    rest = [".gitattributes", "README.md", "g2d.json", "problems.parquet"]
    assert sorted(files) == sorted([*rest, *parts, *pairs]) and hub.private == {"datasets/me/pairs"}
    assert [request for request in hub.requests if "/commit/" in request] == [hub.requests[-1]]
    assert all(files[name] == (finished / "03-collect" / name).read_bytes() for name in pairs)
    # Again, over a file that is no longer of it, and that the hub added.
    hub.repositories["datasets/me/pairs"]["main"][1]["completions/part-00007.parquet"] = b""
    assert cli.main(command) == 0 and hub.files("datasets/me/pairs") == files


def test_the_card_has_the_headline_where_it_came_from_and_tables_to_look_at(
    finished: Path, hub: Hub, tmp_path: Path
) -> None:
    push(finished, "me/pairs", what="dataset", public=True)
    assert not hub.private
    for name, content in hub.files("datasets/me/pairs").items():
        (tmp_path / "pairs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "pairs" / name).write_bytes(content)
    card, known = ((tmp_path / "pairs" / name).read_text() for name in ("README.md", "g2d.json"))
    headline = (finished / "report.md").read_text().splitlines()[4]  # below the verdict
    manifest = json.loads((finished / "03-collect" / "manifest.json").read_text())
    assert (
        headline in card
        and f"collect `{manifest['fingerprint']}`" in card
        and "seed 0" in card
        and "flax 0" in card
    )
    assert str(finished) not in card + known
    assert (
        '```python\nfrom datasets import load_dataset\n\npairs = load_dataset("me/pairs", '
        '"preferences"' in card
    )
    tables = {
        name: datasets.load_dataset(
            str(tmp_path / "pairs"), name, split="train", cache_dir=str(tmp_path / "cache")
        )
        for name in ("preferences", "completions", "problems")
    }
    assert {name: len(table) for name, table in tables.items()} == {
        **{"preferences": manifest["counts"]["pairs"], "completions": 32, "problems": 8}
    }
    row = tables["completions"][0]
    assert (
        row["prompt"] in tables["problems"]["prompt"]
        and isinstance(row["completion"], str)
        and row["reward"] in (0, 1)
    )


@pytest.mark.parametrize("what", [*slow("model"), "dataset"])
def test_output_writes_what_would_be_pushed_and_asks_no_hub(
    what: str,
    finished: Path,
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    push(finished, "me/it", what=what)
    (pushed,) = hub.repositories
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://localhost:1")
    folder = tmp_path / "new" / "folder"
    command = ["push", str(finished), "--output", str(folder), "--what", what]
    assert cli.main([*command, "--dry-run"]) == 0 and not folder.exists()
    assert cli.main(command) == 0 and capsys.readouterr().out.endswith(f"{folder}\n")
    files = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    theirs = hub.files(pushed)
    assert not theirs.pop(".gitattributes") and files.keys() == theirs.keys()
    assert b"me/it" not in b"".join(files.values())
    assert all(
        files[name] == theirs[name] for name in files if what == "model" or name != "README.md"
    )
    # nothing is left of what was put together
    assert [path.name for path in folder.parent.iterdir()] == ["folder"]
    assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777
    assert (
        cli.main(command) == 1
        and "is there already and not an empty folder" in capsys.readouterr().err
    )
    for arguments in ([], ["--repo", "me/it", "--output", str(tmp_path / "other")]):
        assert cli.main(["push", str(finished), *arguments]) == 1
        assert "give --repo USER/NAME to upload, or --output FOLDER" in capsys.readouterr().err


def test_output_goes_into_an_empty_folder_whatever_its_name_is(
    finished: Path, tmp_path: Path
) -> None:
    """As into a mount point, whose parent is on another file system, may not be written to, and
    which has its name."""
    folder = tmp_path / "mounted" / "disk"
    folder.mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder)
    before = folder.stat().st_ino
    assert push(finished, output=tmp_path / "link", what="dataset", dry_run=True) is None
    assert not list(folder.iterdir())
    assert push(finished, output=tmp_path / "link", what="dataset") == str(folder)
    assert (tmp_path / "link").is_symlink() and folder.stat().st_ino == before
    names = {path.name for path in folder.iterdir()}
    assert names == {"README.md", "g2d.json", "problems.parquet", "preferences", "completions"}
    (tmp_path / "nowhere").symlink_to(tmp_path / "made")
    push(finished, output=tmp_path / "nowhere", what="dataset")
    assert {path.name for path in (tmp_path / "made").iterdir()} == names


def test_output_with_a_secret_in_it_is_not_written(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "preference pairs")  # it stands in the card
    with pytest.raises(ValueError, match="would hold the value of SOME_TOKEN"):
        push(finished, output=tmp_path / "out" / "pairs", what="dataset")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_model_is_pushed_as_it_is_exported(finished: Path, hub: Hub, tmp_path: Path) -> None:
    push(finished, "me/model")
    exported = commands.export(finished, tmp_path / "model")
    files = hub.files("models/me/model")
    assert files.pop("g2d.json") and not files.pop(".gitattributes")
    assert files == {path.name: path.read_bytes() for path in exported.iterdir()}
    hub.repositories["models/me/adapters"] = hub.repositories["models/me/model"]
    with pytest.raises(ValueError, match="me/model is public"):
        hub.private.clear()
        push(finished, "me/model")
    with pytest.raises(
        ValueError, match="me/adapters holds something other than this run's adapters"
    ):
        push(finished, "me/adapters", what="adapters", public=True)


class Changing(Hub):
    """A hub on which somebody else commits while a push is under way."""

    def _preupload(self, name: str, body: bytes, headers: Mapping[str, str]) -> Any:
        self.repositories[name]["main"] = "0" * 40, self.repositories[name]["main"][1]
        return super()._preupload(name, body, headers)


def test_what_cannot_be_pushed_is_refused_and_nothing_is_written(
    finished: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(message: str, repo: str = "me/pairs") -> None:
        before = {name: revisions["main"] for name, revisions in hub.repositories.items()}
        with pytest.raises(ValueError, match=message) as caught:
            push(finished, repo, what="dataset")
        assert hub.token not in str(caught.value)
        assert {name: revisions["main"] for name, revisions in hub.repositories.items()} == before

    refused("Repo id must be in the form", "a/b/c")
    refused("--repo is USER/NAME", "pairs")
    hub.repositories["datasets/me/pairs"] = {"main": ("1" * 40, {"train.csv": b"theirs"})}
    hub.private.add("datasets/me/pairs")
    refused("holds something other than this run's dataset")
    prompts = read_preferences(finished / "03-collect" / "preferences")
    for name, value in (
        ("A_PASSWORD", max((str(pair.prompt) for pair in prompts), key=len)),
        ("A_KEY", "procedural:chains"),
    ):
        monkeypatch.setenv(name, value)
        file = "README.md" if name == "A_KEY" else r"completions/part-0000\d.parquet"
        refused(f"{file} would hold the value of {name}, so nothing is uploaded", "me/new")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_TOKEN", "hf_another_token")
    refused("the token is not accepted: log in with", "me/new")
    monkeypatch.delenv("HF_TOKEN")
    refused("takes a token of the Hugging Face hub: log in", "me/new")


def test_a_commit_in_between_is_not_lost(finished: Path, hub: Hub) -> None:
    push(finished, "me/pairs", what="dataset")
    hub.__class__ = Changing
    with pytest.raises(
        ValueError, match="the repository was changed meanwhile: run the same command again"
    ):
        push(finished, "me/pairs", what="dataset")
    hub.__class__ = Hub
    push(finished, "me/pairs", what="dataset")


def test_what_there_is_to_publish_and_dtypes_are_checked_before_anything_else(
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match="what is one of model, adapters, dataset, got 'adapter'"):
        push(tmp_path, "me/it", what="adapter")
    with pytest.raises(ValueError, match="saved as float32 or bfloat16, not float16"):
        commands.export(tmp_path, tmp_path / "out", dtype="float16")
