"""Publishing on a hub, with its own client, and checking what was published."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import Hub, serving

from g2d_jax import cli, commands, dataset, pipeline
from g2d_jax import config as settings
from g2d_jax.config_load import resolve
from g2d_jax.push import push, verify_dataset
from g2d_jax.runtime.tables import read_preferences

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of the hub's client
TOKEN = "hf_sentinelAAAA1111"
TINY = str(Path(__file__).parent / "tiny.py")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """An empty hub, and its client logged in; large files go as to any LFS server, not in the client's own protocol."""
    with serving(Hub(token=TOKEN)) as served:
        template = f"{served.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        changes = {"ENDPOINT": served.url, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_OFFLINE": False}
        changes |= {"HF_HUB_DISABLE_XET": True, "HF_TOKEN_PATH": str(tmp_path / "token")}
        for name, value in {**changes, "HF_HUB_CACHE": str(tmp_path / "cache")}.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield served


def test_a_dataset_is_pushed_in_one_commit_and_verified_from_the_hub(
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
    with pytest.raises(ValueError, match=r"scored by tiny:even, which is code .* add --reward tiny:even"):
        verify_dataset("me/pairs")
    assert cli.main(["verify-dataset", "me/pairs", "--reward", "tiny:even"]) == 0
    counts = json.loads((finished / "03-collect" / "manifest.json").read_text())["counts"]
    assert f"32 answers scored again; {counts['pairs']} pairs chosen again" in capsys.readouterr().out
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
    headline = (finished / "report.md").read_text().splitlines()[2]
    manifest = json.loads((finished / "03-collect" / "manifest.json").read_text())
    assert headline in card and f"collect `{manifest['fingerprint']}`" in card and "seed 0" in card and "flax 0" in card
    assert str(finished) not in card + known
    assert '```python\nfrom datasets import load_dataset\n\npairs = load_dataset("me/pairs", "preferences"' in card
    tables = {
        name: datasets.load_dataset(str(tmp_path / "pairs"), name, split="train", cache_dir=str(tmp_path / "cache"))
        for name in ("preferences", "completions", "problems")
    }
    assert {name: len(table) for name, table in tables.items()} == {
        **{"preferences": manifest["counts"]["pairs"], "completions": 32, "problems": 8}
    }
    row = tables["completions"][0]
    assert (
        row["prompt"] in tables["problems"]["prompt"] and isinstance(row["completion"], str) and row["reward"] in (0, 1)
    )


@pytest.mark.parametrize("what", ["model", "dataset"])
def test_output_writes_what_would_be_pushed_and_asks_no_hub(
    what: str, finished: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    push(finished, "me/it", what=what)
    (pushed,) = hub.repositories
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://localhost:1")
    folder = tmp_path / "new" / "folder"
    command = ["push", str(finished), "--output", str(folder), "--what", what]
    assert cli.main([*command, "--dry-run"]) == 0 and not folder.exists()
    assert cli.main(command) == 0 and capsys.readouterr().out.endswith(f"{folder}\n")
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    theirs = hub.files(pushed)
    assert not theirs.pop(".gitattributes") and files.keys() == theirs.keys()
    assert b"me/it" not in b"".join(files.values())
    assert all(files[name] == theirs[name] for name in files if what == "model" or name != "README.md")
    assert [path.name for path in folder.parent.iterdir()] == ["folder"]  # nothing is left of what was put together
    assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777
    assert cli.main(command) == 1 and "is there already and not an empty folder" in capsys.readouterr().err
    for arguments in ([], ["--repo", "me/it", "--output", str(tmp_path / "other")]):
        assert cli.main(["push", str(finished), *arguments]) == 1
        assert "give --repo USER/NAME to upload, or --output FOLDER" in capsys.readouterr().err


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
    with pytest.raises(ValueError, match="me/adapters holds something other than this run's adapters"):
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
    with pytest.raises(ValueError, match="the repository was changed meanwhile: run the same command again"):
        push(finished, "me/pairs", what="dataset")
    hub.__class__ = Hub
    push(finished, "me/pairs", what="dataset")


# What was published is checked


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset whose answers the verifier scored, and one that came with its reward."""
    folder = tmp_path_factory.mktemp("published")
    rows = [
        {"prompt": f"{n}+1=?", "completion": f"\\boxed{{{answer}}}", "answer": str(n + 1)}
        for n in range(1, 4)
        for answer in (n + 1, n, 9, "")
    ]
    rows.append({"prompt": "1+1=?", "completion": "9", "reward": 0.0})
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = resolve(TINY)
    config.reward.function = "verify"
    with config.unlocked(), config.stages.unlocked():
        for name in list(config.stages):
            del config.stages[name]
        config.stages.collect = settings.collect(policy="init", rollouts=str(folder / "answers.jsonl"))
    pipeline.run(config, folder / "run", until="collect")
    with commands.opened(folder / "run") as runtime:
        place = commands.absolute(folder / "pairs")
        dataset.write(runtime, "collect", place, {})
        described = {
            "what": "dataset",
            "stage": "collect",
            "own": {},
            "config": json.loads((folder / "run" / "config.json").read_text())["config"],
        }
        (place / "g2d.json").write_text(json.dumps(described))
    return Path(place)


def copied(folder: Path, target: Path, change: Callable[[dict[str, Any]], Any], file: str, row: int) -> Path:
    """A copy of a dataset with one row changed, or left out where `change` returns False."""
    for path in folder.rglob("*.*"):
        name = str(path.relative_to(folder))
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(path.read_bytes())
    place = target / file
    parquet = place.suffix == ".parquet"
    table = pq.read_table(place) if parquet else None
    rows = table.to_pylist() if table else [json.loads(place.read_text())]
    if change(rows[row]) is False:
        del rows[row]
    if table:
        pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), place)
    else:
        place.write_text(json.dumps(rows[0]))
    return target


COMPLETIONS, PAIRS = "completions/part-00000.parquet", "preferences/part-00000.parquet"


def test_a_published_dataset_is_scored_and_paired_again(published: Path) -> None:
    assert dataset.verify(published) == {
        "answers scored again": 12,
        "not scored again: the reward came with the answer": 1,
        "pairs chosen again": 10,
    }


@pytest.mark.parametrize(
    ("file", "row", "change", "message"),
    [
        (COMPLETIONS, 1, lambda r: r.update(reward=1.0, verdict="correct"),
         r"completions, row 2 \(problem \w{16}, visit 0, sample 1\) is published as correct, reward 1.0, answer '1'; "
         "scored again it is incorrect, reward 0.0"),
        (COMPLETIONS, 5, lambda r: r.update(completion="\\boxed{4}"), "row 6 .* published as correct"),
        (COMPLETIONS, 6, lambda r: r.update(prompt="5+1=?"), "have different prompts"),
        (COMPLETIONS, 6, lambda r: False, "preferences, row 7 .*, of problem"),
        (COMPLETIONS, 6, lambda r: r.update(problem_id="0" * 16), "its problem is not in problems.parquet"),
        (PAIRS, 2, lambda r: r.update(chosen=r["rejected"]), r"row 3 \(problem \w{16}\): its chosen is not that"),
        (PAIRS, 3, lambda r: r.update(rejected_ids=[3, 3]), "preferences, row 4 .*: its rejected_ids is not"),
        (PAIRS, -1, lambda r: False, "preferences has 9 rows; the completions give 10 pairs"),
        ("problems.parquet", 2, lambda r: r.update(answer="9"), "row 10 .* published as correct"),
        ("problems.parquet", 1, lambda r: r.update(prompt="7+1=?"), "problems.parquet, row 2: its id is not that"),
        ("problems.parquet", 1, lambda r: r.update(columns="[1]"), "problems.parquet, row 2: cannot convert"),
        ("g2d.json", 0, lambda r: r["config"].update(seed=1), "preferences, row"),
        ("g2d.json", 0, lambda r: r["config"]["stages"]["collect"].update(rollouts="sample"),
         "row 5 .* published as incorrect, reward 0.0, answer None; scored again it is no_answer"),
        ("g2d.json", 0, lambda r: r["config"]["stages"]["collect"].update(rollouts="archive"), "row 5 .* as incorrect"),
        ("g2d.json", 0, lambda r: r["config"]["stages"]["collect"].update(rollouts="collect"), "in a circle: collect"),
    ],
)  # fmt: skip
def test_the_first_row_that_differs_is_named(
    published: Path, tmp_path: Path, file: str, row: int, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        dataset.verify(copied(published, tmp_path, change, file, row))


def test_a_dataset_that_names_a_judge_has_nothing_sent_to_it(published: Path, tmp_path: Path, hub: Hub) -> None:
    def hostile(row: dict[str, Any]) -> None:
        judge = {**row["config"]["reward"]["judge"], "url": hub.url, "model": "m", "api_key_env": "HF_TOKEN"}
        row["config"]["reward"] |= {"function": "judge", "judge": judge}

    with pytest.raises(dataset.Differs, match="preferences, row 2"):  # a judge's are paired by another rule
        dataset.verify(copied(published, tmp_path, hostile, "g2d.json", 0))
    assert hub.requests == []
    with pytest.raises(ValueError, match=r"holds no g2d\.json: it is no dataset that g2d push wrote"):
        dataset.verify(tmp_path / "completions")
