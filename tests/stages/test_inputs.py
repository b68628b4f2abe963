"""What a run reads from outside is kept by content: a change is refused with its name, the same
elsewhere goes on."""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from etils import epath
from ml_collections import ConfigDict
from safetensors.numpy import load_file, save_file
from toys import QWEN, SIZES, make_tokenizer, save_rows
from transformers import PreTrainedTokenizerFast

from g2d_jax import commands, dryrun, pipeline, stage_result
from g2d_jax import config as settings
from g2d_jax.config import Config, Source, Stage, graph
from g2d_jax.config.section import ModelPath, Preferences, ProblemsPath, Rollouts, Section
from g2d_jax.contents import Content, content
from g2d_jax.data.template import TemplateSettings
from g2d_jax.data.tokenizer import PromptTokenizer, load_tokenizer
from g2d_jax.models import table
from g2d_jax.models.hf_folder import read_config
from g2d_jax.session import inputs, kept_inputs, problems
from g2d_jax.stage_result import StageResult
from g2d_jax.training.checkpoint import Checkpoints
from g2d_jax.workdir import claim, require_same_run

ROWS = [{"problem": f"What is {n}+1?", "answer": str(n + 1)} for n in range(24)]
TOLD = [{"prompt": row["problem"], "completion": row["answer"]} for row in ROWS]
ROLLOUTS = [{**TOLD[n // 2], "reward": n % 2, "step": 0} for n in range(8)]

Change = Callable[[Path], Any]


def save_model(folder: Path, seed: int = 0) -> None:
    """A model of random numbers, with a tokenizer and a chat template."""
    folder.mkdir(parents=True)
    tokenizer = make_tokenizer(QWEN)
    tokenizer.save_pretrained(folder)
    sizes = {**SIZES, "vocab_size": len(tokenizer), "model_type": "qwen2"}
    (folder / "config.json").write_text(json.dumps(sizes))
    draw = np.random.default_rng(seed)
    shapes = table.expected_shapes(read_config(folder))
    weights = {name: draw.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")


def edit_weights(folder: Path, edit: Callable[[dict[str, np.ndarray]], Any]) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors")


def edit_rows(file: Path, edit: Callable[[list[dict[str, Any]]], Any]) -> None:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    edit(rows)
    save_rows(file, rows)


def edit_text(file: Path, old: str, new: str) -> None:
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def parquet(file: Path, rows: list[dict[str, Any]], **options: Any) -> None:
    pq.write_table(pa.Table.from_pylist(rows), file, **options)


def with_another_token(folder: Path) -> None:
    tokenizer = make_tokenizer(QWEN)
    tokenizer.add_tokens(["\\boxed{3}"])
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that a run may read."""
    place = tmp_path_factory.mktemp("made")
    for name, rows in (
        ("train.jsonl", ROWS[:20]),
        ("dev.jsonl", ROWS[20:22]),
        ("told.jsonl", TOLD[:6]),
    ):
        save_rows(place / name, rows)
    save_rows(place / "online.jsonl", ROLLOUTS)
    (place / "dump").mkdir()
    save_rows(place / "dump" / "step-1.jsonl", ROLLOUTS)
    parquet(place / "test.parquet", ROWS[22:])
    parquet(place / "pairs.parquet", [{"problem_id": "0", "chosen": "1", "rejected": "2"}])
    save_model(place / "model")
    save_model(place / "other", seed=1)
    (place / "my_own.py").write_text(
        "def score(completions, **columns):\n    return [1.0 for _ in completions]\n"
    )
    return place


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "here"))


def reading(place: Path) -> ConfigDict:
    """A config that reads everything in a folder."""
    config = settings.base()
    config.model.path = str(place / "model")
    config.data.train = settings.source(str(place / "train.jsonl"))
    config.data.dev = settings.source(str(place / "dev.jsonl"))
    config.data.test = settings.source(str(place / "test.parquet"))
    config.logging.tensorboard = False
    with config.unlocked():
        config.stages.sft = settings.sft(data=settings.source(str(place / "told.jsonl")))
        config.stages.train = settings.online(
            policy=f"hf:{place / 'other'}",
            rollouts=str(place / "online.jsonl"),
            loss="dpo",
            num_generations=2,
        )
        config.stages.collect = settings.collect(policy="sft", rollouts=str(place / "dump"))
        config.stages.dpo = settings.offline(policy="sft", preferences=str(place / "pairs.parquet"))
        config.stages.evaluate = settings.evaluate(
            policies=("init", "dpo", f"hf:{place / 'other'}")
        )
    return config


def found_in(config: ConfigDict) -> dict[str, Content]:
    """The contents of what a config names, as a run finds them; its tokenizer's template is not
    tried out first."""
    settings = Config.of(config)

    def read_problems(setting: str) -> Content:
        source = getattr(settings.data, setting.partition(".")[2])
        return problems.read_source(source, settings.data.seed, problems.reading(settings.reward))[
            2
        ]

    def tokenizer() -> PromptTokenizer:
        template = TemplateSettings(chat=settings.tokenizer.chat)
        return PromptTokenizer(
            PreTrainedTokenizerFast.from_pretrained(settings.model.path), template
        )

    return inputs.contents_of(
        {**inputs.readers(settings, read_problems, tokenizer), **inputs.bases(settings, {})}
    )


def start(config: ConfigDict, workdir: Path) -> None:
    """What the start of a run does before any work on devices."""
    place = epath.Path(workdir)
    require_same_run(Config.of(config), place)
    kept_inputs.check(place, found_in(config), print, Config.of(config))
    claim(Config.of(config), place)


def begin(config: ConfigDict, workdir: Path) -> None:
    """Make the work directory of a run that has begun."""
    claim(Config.of(config), epath.Path(workdir))
    start(config, workdir)
    stage_result.write(workdir / "01-sft", StageResult(kind="sft", name="sft"))


@pytest.fixture
def begun(place: Path, tmp_path: Path) -> Path:
    """The work directory of a run that reads everything in `place`, and has begun."""
    begin(reading(place), tmp_path / "work")
    return tmp_path / "work"


def replaced(weights: dict[str, np.ndarray]) -> None:
    weights["model.norm.weight"] = weights["model.norm.weight"][::-1].copy()


def scaled(weights: dict[str, np.ndarray]) -> None:
    weights.update({name: values * np.float32(1.5) for name, values in weights.items()})


CHANGES: list[tuple[Change, str]] = [
    (
        lambda place: edit_rows(place / "train.jsonl", lambda rows: rows[3].update(answer="5")),
        r"data\.train \(\S+train\.jsonl\): the 20 problems are not the same$",
    ),
    (
        lambda place: edit_rows(place / "train.jsonl", lambda rows: rows[3].update(problem="What is  3+1?")),
        r"data\.train \(\S+\): the 20 problems are not the same$",
    ),
    (
        lambda place: edit_rows(place / "train.jsonl", lambda rows: rows.reverse()),
        r"data\.train \(\S+\): the 20 problems are not the same$",
    ),
    (
        lambda place: edit_rows(place / "train.jsonl", lambda rows: rows.append({"problem": "8+8?", "answer": "16"})),
        r"data\.train \(\S+\): other problems: there were 20, there are 21$",
    ),
    (
        lambda place: edit_rows(place / "dev.jsonl", lambda rows: rows.pop()),
        r"data\.dev \(\S+\): other problems: there were 2, there are 1$",
    ),
    (
        lambda place: parquet(place / "test.parquet", [{**ROWS[22], "answer": "0"}, ROWS[23]]),
        r"data\.test \(\S+test\.parquet\): the 2 problems are not the same$",
    ),
    (
        lambda place: edit_weights(place / "model", scaled),
        r"model\.path \(\S+model\): the 28 tensors and settings are not the same$",
    ),
    (
        lambda place: edit_weights(place / "model", replaced),
        r"model\.path \(\S+model\): the 28 tensors and settings are not the same$",
    ),
    (
        lambda place: edit_text(place / "model" / "config.json", "{", '{"rope_theta": 5.0, '),
        r"model\.path \(\S+model\): the 28 tensors and settings are not the same$",
    ),
    (
        lambda place: edit_text(place / "model" / "chat_template.jinja", "You are Qwen.", "You are nobody."),
        r"tokenizer \(\S+model\): the 3 parts are not the same$",
    ),
    (lambda place: with_another_token(place / "model"), r"tokenizer \(\S+model\): the 3 parts are not the same$"),
    (
        lambda place: edit_weights(place / "other", replaced),
        r"stages\.train\.policy \(\S+other\): the 28 tensors and settings are not the same$",
    ),
    (
        lambda place: edit_rows(place / "told.jsonl", lambda rows: rows[1].update(completion="7")),
        r"stages\.sft\.data \(\S+told\.jsonl\): the 6 examples are not the same$",
    ),
    (
        lambda place: edit_rows(place / "dump" / "step-1.jsonl", lambda rows: rows[1].update(reward=0)),
        r"stages\.collect\.rollouts \(\S+dump\): the 1 files are not the same$",
    ),
    (
        lambda place: edit_rows(place / "dump" / "step-1.jsonl", lambda rows: rows.append(rows[0])),
        r"stages\.collect\.rollouts \(\S+dump\): the 1 files are not the same$",
    ),
    (
        lambda place: edit_rows(place / "online.jsonl", lambda rows: rows[1].update(completion="7")),
        r"stages\.train\.rollouts \(\S+online\.jsonl\): the 1 files are not the same$",
    ),
    (  # of an earlier prompt: later groups would be trained on again
        lambda place: edit_rows(place / "online.jsonl", lambda rows: rows.extend(rows[:2])),
        r"stages\.train\.rollouts \(\S+online\.jsonl\): the 1 files are not the same$",
    ),
    (
        lambda place: edit_rows(place / "online.jsonl", lambda rows: rows.append({**rows[7], "step": -1})),
        r"stages\.train\.rollouts \(\S+online\.jsonl\): the 1 files are not the same$",
    ),
    (
        lambda place: parquet(place / "pairs.parquet", [{"problem_id": "0", "chosen": "1", "rejected": "3"}]),
        r"stages\.dpo\.preferences \(\S+pairs\.parquet\): the 1 files are not the same$",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_a_change_is_refused_with_its_name(
    place: Path, begun: Path, change: Change, message: str
) -> None:
    before = (begun / "inputs.json").read_bytes(), (begun / "config.json").read_bytes()
    change(place)
    with pytest.raises(
        ValueError, match=rf"(?m)was made with other inputs:\n  (?s:.*){message}"
    ) as refused:
        start(reading(place), begun)
    assert "or choose another --workdir" in str(refused.value)
    assert ((begun / "inputs.json").read_bytes(), (begun / "config.json").read_bytes()) == before


class Elsewhere(Section):
    """A section of a kind of stage. cases: problems."""

    cases: Source = Source()


class Borrowing(Stage):
    """A stage that is not the library's, whose fields have names of its own; without a kind, for
    that would register it for good."""

    shown: Rollouts = "sample"
    liked: Preferences = ""
    judge: ModelPath = ""
    words: ProblemsPath = ""
    elsewhere: Elsewhere = Elsewhere()


def test_what_a_stage_reads_is_compared_whatever_its_field_is_called(
    place: Path,
) -> None:
    """And only that: sources that are embedded, stages of the run and empty settings are no
    input."""
    begun = Config.of(reading(place))

    def read(**fields: Any) -> dict[str, str]:
        stages = {**begun.stages, "borrowing": Borrowing(**fields)}
        config = dataclasses.replace(begun, stages=stages)
        found = inputs.readers(config, unread, unread)
        return {
            name.removeprefix("stages.borrowing."): reader.content().digest
            for name, reader in found.items()
            if name.startswith("stages.borrowing.")
        }

    def unread(*_: str) -> Any:
        raise AssertionError("of other sections")

    none = Elsewhere(cases=Source(path="procedural:slips"))
    assert read(shown="collect", words="procedural:slips", elsewhere=none) == {}

    named: dict[str, Any] = {
        "shown": str(place / "dump"),
        "liked": str(place / "pairs.parquet"),
        "judge": str(place / "other"),
        "words": str(place / "train.jsonl"),
        "elsewhere": Elsewhere(cases=Source(path=str(place / "dev.jsonl"))),
    }
    before = read(**named)
    assert before.keys() == {"shown", "liked", "judge", "words", "elsewhere.cases"}
    edit_rows(place / "dump" / "step-1.jsonl", lambda rows: rows[1].update(reward=0))
    parquet(place / "pairs.parquet", [{"problem_id": "0", "chosen": "1", "rejected": "3"}])
    edit_weights(place / "other", replaced)
    for name in ("train", "dev"):
        edit_rows(place / f"{name}.jsonl", lambda rows: rows[0].update(answer="5"))
    after = read(**named)
    assert [name for name in before if before[name] == after[name]] == []


SAME: list[Change] = [
    lambda place: None,
    lambda place: parquet(place / "test.parquet", ROWS[22:], compression="gzip", row_group_size=1),
    lambda place: edit_rows(place / "train.jsonl", lambda rows: [row.update(note="unread") for row in rows]),
    lambda place: edit_text(place / "model" / "config.json", "{", '{"transformers_version": "9", '),
]  # fmt: skip


@pytest.mark.parametrize("change", SAME)
def test_what_is_read_the_same_goes_on(place: Path, begun: Path, change: Change) -> None:
    change(place)
    start(reading(place), begun)


def test_the_same_elsewhere_goes_on_and_another_there_does_not(
    place: Path, begun: Path, tmp_path: Path
) -> None:
    there = Path(shutil.move(place, tmp_path / "there"))
    start(reading(there), begun)
    assert str(there / "model") in (begun / "config.json").read_text()
    shutil.move(begun, tmp_path / "moved")
    start(reading(there), tmp_path / "moved")
    edit_weights(there / "model", scaled)
    with pytest.raises(
        ValueError, match=r"there/model\): the 28 tensors and settings are not the same"
    ):
        start(reading(there), tmp_path / "moved")


def test_before_a_stage_has_begun_all_is_free(place: Path, tmp_path: Path) -> None:
    config, workdir = reading(place), tmp_path / "work"
    claim(Config.of(config), epath.Path(workdir))
    start(config, workdir)
    edit_weights(place / "model", scaled)
    start(config, workdir)
    stage_result.write(workdir / "01-sft", StageResult(kind="sft", name="sft"))
    start(config, workdir)
    edit_weights(place / "model", replaced)
    with pytest.raises(ValueError, match=r"the 28 tensors and settings are not the same"):
        start(config, workdir)


def test_a_work_directory_without_contents_goes_on_and_keeps_them_from_then_on(
    place: Path, begun: Path
) -> None:
    (begun / "inputs.json").unlink()
    start(reading(place), begun)
    edit_rows(place / "train.jsonl", lambda rows: rows.reverse())
    with pytest.raises(ValueError, match="the 20 problems are not the same"):
        start(reading(place), begun)


def test_of_a_reward_function_that_changed_a_run_is_warned_once(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, workdir = reading(place), tmp_path / "work"
    config.reward.update(function="my_own:score", folder=str(place))
    begin(config, workdir)
    with (place / "my_own.py").open("a") as file:
        file.write("# mended\n")
    capsys.readouterr()
    start(config, workdir)
    said = capsys.readouterr().out
    assert (
        "WARNING: reward.function (" in said and "my_own.py): the 1 files are not the same" in said
    )
    start(config, workdir)
    assert "WARNING: reward.function" not in capsys.readouterr().out
    # the function is given it
    edit_rows(place / "train.jsonl", lambda rows: rows[0].update(note="read"))
    with pytest.raises(ValueError, match=r"data\.train \(\S+\): the 20 problems are not the same"):
        start(config, workdir)


@pytest.mark.parametrize("reward", ["verify", "my_own:score"])
def test_a_study_reads_problems_as_a_run_does(place: Path, reward: str) -> None:
    save_rows(
        place / "train.jsonl", [{"problem": f"{n}+1=?", "answer": [str(n + 1)]} for n in range(9)]
    )
    config = settings.base()
    config.data.train = settings.source(str(place / "train.jsonl"))
    config.reward.update(function=reward, folder=str(place))
    taken = Config.of(config)
    in_study = inputs.of_config(taken)["data.train"]
    tokenizer = load_tokenizer("procedural:slips")
    in_run = problems.load(taken, tokenizer, False, print, ["train"]).contents["data.train"]
    assert in_study == in_run


@pytest.mark.parametrize(
    ("place", "kind", "is_on_hub"),
    [
        ("org/model", "model", True),
        ("/a/model", "model", False),
        ("gs://a/model", "model", False),
        ("procedural:slips", "model", False),
        ("math500", "problems", True),
        ("math500:/a/file.jsonl", "problems", False),
        ("hub:org/set@main:train", "problems", True),
        ("hub:/a/folder:train", "problems", False),
        ("hub:/a/folder", "preferences", False),
        ("hub:org/pairs", "preferences", True),
        ("/a/*/rows.jsonl", "rollouts", False),
        ("procedural:slips", "problems", False),
        ("run:/a/run#sft", "policy", False),
        ("/a/mine.py", "path", False),
    ],
)
def test_what_is_on_the_hub(place: str, kind: str, is_on_hub: bool) -> None:
    assert inputs.Reader(place, kind, lambda: Content("", "", 0)).is_on_hub is is_on_hub


def test_a_local_folder_of_a_set_is_read_again_when_a_file_in_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "data" / "train.jsonl"
    file.parent.mkdir()
    file.write_text("1")
    before = inputs._stamp(f"hub:{tmp_path}:train", "problems")
    file.write_text("12")
    assert before != inputs._stamp(f"hub:{tmp_path}:train", "problems") != ()


def test_the_tokenizer_of_a_reward_model_answers_nothing_and_has_no_weights(tmp_path: Path) -> None:
    template = (
        "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% "
        "endfor %}"
    )
    make_tokenizer(template).save_pretrained(tmp_path)
    config = settings.base()
    config.reward.function, config.reward.model.path = "model", str(tmp_path)
    kept = inputs._of_reward(Config.of(config).reward, "")["reward.model.tokenizer"].content()
    assert kept.place == str(tmp_path) and kept.count == 3


def test_a_run_is_refused_before_any_work_and_its_directory_stays_as_it_was(
    place: Path, tmp_path: Path
) -> None:
    """In one go with what `pipeline.run` does; all stages are finished, so that nothing is
    trained."""
    config, workdir = reading(place), tmp_path / "work"
    config.tokenizer.chat = False
    claim(Config.of(config), epath.Path(workdir))
    for folder in graph.plan(Config.of(config)).folders(epath.Path(workdir)).values():
        stage_result.write(folder, StageResult(kind="any", name="any"))
    pipeline.run(config, workdir, until="evaluate")
    kept = json.loads((workdir / "inputs.json").read_text())
    assert kept["data.train"] == {
        "kind": "problems", "count": 20, "digest": kept["data.train"]["digest"], "place": str(place / "train.jsonl")
    }  # fmt: skip
    names = {
        "tokenizer",
        "model.path",
        "data.train",
        "data.dev",
        "data.test",
        "stages.sft.data",
        "stages.train.policy",
    }
    names |= {"stages.train.rollouts", "stages.collect.rollouts", "stages.dpo.preferences"}
    assert set(kept) == names | {"stages.evaluate.policies.2"}
    before = {
        file.name: file.read_bytes()
        for file in workdir.glob("*.json")
        if file.name != "environment.json"
    }
    edit_rows(place / "train.jsonl", lambda rows: rows[3].update(answer="5"))
    with pytest.raises(
        ValueError, match=r"data\.train \(\S+train\.jsonl\): the 20 problems are not the same"
    ):
        pipeline.run(config, workdir, until="evaluate")
    assert {name: (workdir / name).read_bytes() for name in before} == before


def test_the_dry_run_compares_too(place: Path, tmp_path: Path) -> None:
    config, workdir = reading(place), tmp_path / "work"
    config.tokenizer.chat = False
    with config.unlocked(), config.stages.unlocked():
        for name in set(config.stages) - {"sft"}:
            del config.stages[name]
    config.stages.sft.update(steps=0, batch_size=2)
    begin(config, workdir)
    edit_rows(place / "told.jsonl", lambda rows: rows[1].update(completion="7"))
    with pytest.raises(
        ValueError, match=r"stages\.sft\.data \(\S+\): the 6 examples are not the same"
    ):
        dryrun.show(config, workdir=workdir)


def test_commands_do_not_put_a_policy_together_from_what_it_was_not_made_of(
    place: Path, tmp_path: Path
) -> None:
    config, workdir = reading(place), tmp_path / "work"
    config.tokenizer.chat = False
    config.lora.rank = 2
    begin(config, workdir)
    with pytest.raises(ValueError, match=r"\S+/01-sft/checkpoints has no checkpoint any more"):
        commands.export(workdir, tmp_path / "model", policy="sft")
    parquet(place / "test.parquet", ROWS[21:23])
    with pytest.raises(ValueError, match=r"data\.test \(\S+\): the 2 problems are not the same"):
        commands.evaluate(workdir, "sft")
    with pytest.raises(ValueError, match=r"data\.test \(\S+\): the 2 problems are not the same"):
        commands.sample(workdir, policy="sft")
    edit_weights(place / "model", scaled)
    for policy in ("sft", "init"):
        with pytest.raises(
            ValueError,
            match=r"other inputs:\n  model\.path \(\S+\): the 28 tensors and settings are not",
        ):
            commands.export(workdir, tmp_path / "model", policy=policy)
    with pytest.raises(ValueError, match=r"model\.path \(\S+\): the 28 tensors"):
        commands.sample(workdir, policy="sft", prompts="1+1?")


def test_workers_of_a_study_keep_what_each_reads(tmp_path: Path) -> None:
    config = Config.of(settings.base())

    def keep(number: int) -> None:
        found = {f"model.path org/{number}@": content("tensors", {"a": f"{number}"})}
        kept_inputs.check_shared(epath.Path(tmp_path), found, print, config)

    with ThreadPoolExecutor(8) as workers:
        list(workers.map(keep, range(24)))
    kept = kept_inputs.read(epath.Path(tmp_path))
    assert kept is not None and len(kept) == 24
    with pytest.raises(ValueError, match=r"model\.path org/3@: the 1 tensors are not the same"):
        kept_inputs.check_shared(
            epath.Path(tmp_path),
            {"model.path org/3@": content("tensors", {"a": "4"})},
            print,
            config,
        )


@pytest.mark.parametrize("begins_with", ["init", "hf:"])
def test_adapters_of_another_run_beside_another_model(
    place: Path, tmp_path: Path, begins_with: str
) -> None:
    other, base = trained_elsewhere(place, tmp_path, begins_with)
    config = reading(place)
    config.lora.rank = 2
    config.tokenizer.chat = False
    config.stages.dpo.policy = f"run:{other}#sft"
    begin(config, tmp_path / "work")
    edit_weights(base, replaced)
    message = (
        rf"dpo\.policy: the adapters of run:\S+other#sft stand beside another model than {base} "
        r"now holds: the 28"
    )
    with pytest.raises(ValueError, match=message):
        begin(config, tmp_path / "again")
    message = r"other inputs:\n(?s:.*)  stages\.dpo\.policy\.base \(\S+\): the 28 tensors"
    with pytest.raises(ValueError, match=message):
        commands.export(tmp_path / "work", tmp_path / "exported", policy="dpo")


def test_adapters_of_another_run_beside_the_same_model_elsewhere(
    place: Path, tmp_path: Path
) -> None:
    other, base = trained_elsewhere(place, tmp_path, "init")
    config = reading(place)
    config.lora.rank = 2
    config.stages.collect.policy = f"run:{other}#sft"
    config.model.path = str(shutil.copytree(base, tmp_path / "copy"))
    begin(config, tmp_path / "work")
    edit_weights(tmp_path / "copy", replaced)
    with pytest.raises(
        ValueError, match=r"stand beside another model than \S+copy now holds: the 28 tensors"
    ):
        begin(config, tmp_path / "again")
    (other / "inputs.json").unlink()  # a study's point has no entry for a model of the hub
    with pytest.raises(ValueError, match="its adapters are not beside this run's model"):
        begin(config, tmp_path / "again")


@pytest.mark.parametrize("begins_with", ["init", "hf:"])
def test_commands_put_no_adapters_of_another_run_beside_another_model(
    place: Path, tmp_path: Path, begins_with: str
) -> None:
    other, base = trained_elsewhere(place, tmp_path, begins_with)
    config, workdir = reading(place), tmp_path / "work"
    config.lora.rank = 2
    config.tokenizer.chat = False
    config.model.path = str(shutil.copytree(place / "model", tmp_path / "copy"))
    edit_weights(tmp_path / "copy" if begins_with == "init" else base, replaced)
    begin(config, workdir)
    policy, message = (
        f"run:{other}#sft",
        r"policy: the adapters of run:\S+#sft stand beside another model",
    )
    with pytest.raises(ValueError, match=message):
        commands.export(workdir, tmp_path / "model", policy=policy)
    with pytest.raises(ValueError, match=message):
        commands.sample(workdir, policy=policy, prompts="1+1?")
    with pytest.raises(ValueError, match=message):
        commands.evaluate(workdir, policy)


def trained_elsewhere(place: Path, tmp_path: Path, begins_with: str) -> tuple[Path, Path]:
    """The work directory of a run with adapters of a stage "sft", and the folder of the model they
    stand beside."""
    config, other = reading(place), tmp_path / "other"
    config.lora.rank = 2
    base = place / "model" if begins_with == "init" else place / "other"
    config.stages.sft.policy = "init" if begins_with == "init" else f"hf:{base}"
    begin(config, other)
    with Checkpoints(other / "01-sft" / "checkpoints") as checkpoints:
        checkpoints.save(6, {"params": {"a": jnp.ones(3)}}, {})
    return other, base


def exported(workdir: Path, folder: Path, **options: Any) -> tuple[dict[str, Any], str]:
    """adapter_config.json and the card of fresh adapters."""
    commands.export(workdir, folder, policy="init", adapters=True, **options)
    card = (folder / "README.md").read_text()
    return json.loads((folder / "adapter_config.json").read_text()), card


def test_adapters_say_what_they_are_loaded_beside(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The base's place on this machine is not published; a model with images is not named, since
    PEFT would put the adapters nowhere in it."""
    config, model = reading(place), place / "model"
    config.lora.rank = 24
    config.stages.evaluate.sampling.stop = ("\n\n",)
    (model / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    begin(config, tmp_path / "work")
    found, card = exported(tmp_path / "work", tmp_path / "adapters")
    assert found["base_model_name_or_path"] == str(model) and found["revision"] is None
    assert "320 and 512 that is at least 24." in card and "was a local folder" not in card
    found, card = exported(tmp_path / "work", tmp_path / "there", published=True)
    assert found["base_model_name_or_path"] == "model"
    said = "The base of these adapters, model, was a local folder: load that model yourself"
    assert said in card and said in capsys.readouterr().out
    for file in (tmp_path / "there").iterdir():
        assert str(place).encode() not in file.read_bytes(), file
    assert "Base model: `model`, licence apache-2.0." in card
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1]
    made: dict[str, Any] = {}
    exec(code.replace("path/to/this", str(tmp_path / "there")), made)
    with commands.opened(tmp_path / "work") as session:
        assert made["ids"] == session.tokenizer.encode_prompt("1+1=?").tolist()
        ends = session.tokenizer.ends()
    assert rf"Responses end at {ends}, or the text `'\n\n'`." in card

    text = json.loads((model / "config.json").read_text())
    draw, text["model_type"] = np.random.default_rng(0), "gemma3_text"
    whole = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    (model / "config.json").write_text(json.dumps(whole))
    shapes = table.expected_shapes(read_config(model))
    save_file(
        {
            name.replace("model.", "model.language_model.", 1): draw.standard_normal(
                shape, np.float32
            )
            for name, shape in shapes.items()
        },
        model / "model.safetensors",
    )
    config.stages.train.policy, config.stages.evaluate.policies = "init", ("init", "dpo")
    config.lora.rank = 16
    begin(config, tmp_path / "images")
    found, card = exported(tmp_path / "images", tmp_path / "beside")
    assert found["base_model_name_or_path"] is None
    said = "PEFT cannot apply these adapters to their base, model: export it"
    assert said in card and said in capsys.readouterr().out
