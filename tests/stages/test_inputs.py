"""What a run reads from outside is kept by content: a change is refused with its name, the same
elsewhere goes on."""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from etils import epath
from ml_collections import ConfigDict
from safetensors.numpy import load_file, save_file
from toys import QWEN, SIZES, make_tokenizer, save_rows

from g2d_jax import commands, pipeline
from g2d_jax import config as settings
from g2d_jax.commands import dryrun
from g2d_jax.config import Config, Source, Stage, graph
from g2d_jax.config.section import ModelPath, Preferences, ProblemsPath, Rollouts, Section
from g2d_jax.models import table
from g2d_jax.models.hf_folder import read_config
from g2d_jax.session import inputs, stage_result
from g2d_jax.session.stage_result import StageResult
from g2d_jax.session.workdir import claim, read_inputs
from g2d_jax.training.checkpoint import Checkpoints

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
            dump={"path": str(place / "online.jsonl")},
            loss="dpo",
            num_generations=2,
        )
        config.stages.collect = settings.collect(policy="sft", dump={"path": str(place / "dump")})
        config.stages.dpo = settings.offline(policy="sft", preferences=str(place / "pairs.parquet"))
        config.stages.evaluate = settings.evaluate(
            policies=("init", "dpo", f"hf:{place / 'other'}")
        )
    return config


def start(config: ConfigDict, workdir: Path) -> None:
    """What the start of a run does before any work on devices."""
    taken = Config.of(config)
    claim(taken, epath.Path(workdir), inputs=inputs.digests(taken))


def begin(config: ConfigDict, workdir: Path) -> None:
    """Make the work directory of a run that has begun."""
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
        "data.train.path",
    ),
    (
        lambda place: edit_rows(place / "train.jsonl", lambda rows: rows[3].update(problem="What is  3+1?")),
        "data.train.path",
    ),
    (
        lambda place: edit_rows(place / "train.jsonl", lambda rows: rows.reverse()),
        "data.train.path",
    ),
    (
        lambda place: edit_rows(place / "train.jsonl", lambda rows: rows.append({"problem": "8+8?", "answer": "16"})),
        "data.train.path",
    ),
    (
        lambda place: edit_rows(place / "dev.jsonl", lambda rows: rows.pop()),
        "data.dev.path",
    ),
    (
        lambda place: parquet(place / "test.parquet", [{**ROWS[22], "answer": "0"}, ROWS[23]]),
        "data.test.path",
    ),
    (
        lambda place: edit_weights(place / "model", scaled),
        "model.path",
    ),
    (
        lambda place: edit_weights(place / "model", replaced),
        "model.path",
    ),
    (
        lambda place: edit_text(place / "model" / "config.json", "{", '{"rope_theta": 5.0, '),
        "model.path",
    ),
    (
        lambda place: edit_text(place / "model" / "chat_template.jinja", "You are Qwen.", "You are nobody."),
        "model.path",
    ),
    (lambda place: with_another_token(place / "model"), "model.path"),
    (
        lambda place: edit_weights(place / "other", replaced),
        "stages.train.policy",
    ),
    (
        lambda place: edit_rows(place / "told.jsonl", lambda rows: rows[1].update(completion="7")),
        "stages.sft.data.path",
    ),
    (
        lambda place: edit_rows(place / "dump" / "step-1.jsonl", lambda rows: rows[1].update(reward=0)),
        "stages.collect.dump.path",
    ),
    (
        lambda place: edit_rows(place / "dump" / "step-1.jsonl", lambda rows: rows.append(rows[0])),
        "stages.collect.dump.path",
    ),
    (
        lambda place: edit_rows(place / "online.jsonl", lambda rows: rows[1].update(completion="7")),
        "stages.train.dump.path",
    ),
    (  # of an earlier prompt: later groups would be trained on again
        lambda place: edit_rows(place / "online.jsonl", lambda rows: rows.extend(rows[:2])),
        "stages.train.dump.path",
    ),
    (
        lambda place: edit_rows(place / "online.jsonl", lambda rows: rows.append({**rows[7], "step": -1})),
        "stages.train.dump.path",
    ),
    (
        lambda place: parquet(place / "pairs.parquet", [{"problem_id": "0", "chosen": "1", "rejected": "3"}]),
        "stages.dpo.preferences",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("change", "setting"), CHANGES)
def test_a_change_is_refused_with_its_name(
    place: Path, begun: Path, change: Change, setting: str
) -> None:
    before = (begun / "config.json").read_bytes()
    change(place)
    with pytest.raises(
        ValueError,
        match=rf"other settings, files or models:\n(?s:.*)  {setting}: 'content \w+' -> ",
    ) as refused:
        start(reading(place), begun)
    assert "Choose another --workdir" in str(refused.value)
    assert (begun / "config.json").read_bytes() == before


class Elsewhere(Section):
    """A section of a kind of stage. cases: problems."""

    cases: Source = Source()


class Borrowing(Stage):
    """A stage that is not the library's, whose fields have names of its own."""

    kind: Literal["borrowing"] = "borrowing"
    shown: Rollouts = "sample"
    liked: Preferences = ""
    judge: ModelPath = ""
    words: ProblemsPath = ""
    elsewhere: Elsewhere = Elsewhere()


del settings.STAGES["borrowing"]  # which it is in for good else


def test_what_a_stage_reads_is_compared_whatever_its_field_is_called(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only that: sources that are embedded, stages of the run and empty settings are no
    input."""
    monkeypatch.setitem(settings.STAGES, "borrowing", Borrowing)
    begun = Config.of(reading(place))

    def read(**fields: Any) -> dict[str, str]:
        stages = {**begun.stages, "borrowing": Borrowing(**fields)}
        config = dataclasses.replace(begun, stages=stages)
        found = inputs.digests(config, ["stages.borrowing."])
        return {name.removeprefix("stages.borrowing."): text for name, text in found.items()}

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
    assert before.keys() == {"shown", "liked", "judge", "words", "elsewhere.cases.path"}
    edit_rows(place / "dump" / "step-1.jsonl", lambda rows: rows[1].update(reward=0))
    parquet(place / "pairs.parquet", [{"problem_id": "0", "chosen": "1", "rejected": "3"}])
    edit_weights(place / "other", replaced)
    for name in ("train", "dev"):
        edit_rows(place / f"{name}.jsonl", lambda rows: rows[0].update(answer="5"))
    after = read(**named)
    assert [name for name in before if before[name] == after[name]] == []


def test_the_same_elsewhere_goes_on_and_another_there_does_not(
    place: Path, begun: Path, tmp_path: Path
) -> None:
    there = Path(shutil.move(place, tmp_path / "there"))
    start(reading(there), begun)
    assert str(there / "model") in (begun / "config.json").read_text()
    shutil.move(begun, tmp_path / "moved")
    start(reading(there), tmp_path / "moved")
    edit_weights(there / "model", scaled)
    with pytest.raises(ValueError, match=r"model\.path: 'content \w+' -> "):
        start(reading(there), tmp_path / "moved")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("hub:{folder}:train", "hub:{folder}:test"),
        ("hub:{folder}@main:train", "hub:{folder}@socratic:train"),
        ("gsm8k:{folder}/train.jsonl", "{folder}/train.jsonl"),
    ],
)
def test_what_is_read_of_a_set_belongs_to_its_content(place: Path, one: str, other: str) -> None:
    found = [inputs.digest(text.format(folder=place), "problems") for text in (one, other, one)]
    assert found[0] == found[2] != found[1]
    assert str(place) not in "".join(found)


def test_before_a_stage_has_begun_all_is_free(place: Path, tmp_path: Path) -> None:
    config, workdir = reading(place), tmp_path / "work"
    start(config, workdir)
    edit_weights(place / "model", scaled)
    start(config, workdir)
    stage_result.write(workdir / "01-sft", StageResult(kind="sft", name="sft"))
    start(config, workdir)
    edit_weights(place / "model", replaced)
    with pytest.raises(ValueError, match=r"model\.path: 'content \w+' -> "):
        start(config, workdir)


def test_a_reward_function_that_changed_is_known(place: Path, tmp_path: Path) -> None:
    config, workdir = reading(place), tmp_path / "work"
    config.reward.update(function="my_own:score", folder=str(place))
    begin(config, workdir)
    with (place / "my_own.py").open("a") as file:
        file.write("# mended\n")
    after = inputs.digests(Config.of(config))
    changed = inputs.changed_functions(epath.Path(workdir), after)
    assert changed == ["reward.function my_own:score"]
    start(config, workdir)
    assert inputs.changed_functions(epath.Path(workdir), after) == []


def test_a_run_is_refused_before_any_work_and_its_directory_stays_as_it_was(
    place: Path, tmp_path: Path
) -> None:
    """In one go with what `pipeline.run` does; all stages are finished, so that nothing is
    trained."""
    config, workdir = reading(place), tmp_path / "work"
    config.tokenizer.chat = False
    start(config, workdir)
    for folder in graph.plan(Config.of(config)).folders(epath.Path(workdir)).values():
        stage_result.write(folder, StageResult(kind="any", name="any"))
    pipeline.run(config, workdir, until="evaluate")
    assert set(read_inputs(epath.Path(workdir))) == {
        "model.path",
        "data.train.path",
        "data.dev.path",
        "data.test.path",
        "stages.sft.data.path",
        "stages.train.policy",
        "stages.train.dump.path",
        "stages.collect.dump.path",
        "stages.dpo.preferences",
        "stages.evaluate.policies.2",
    }
    before = {
        file.name: file.read_bytes()
        for file in workdir.glob("*.json")
        if file.name != "environment.json"
    }
    edit_rows(place / "train.jsonl", lambda rows: rows[3].update(answer="5"))
    with pytest.raises(ValueError, match=r"data\.train\.path: 'content \w+' -> "):
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
    with pytest.raises(ValueError, match=r"stages\.sft\.data\.path: 'content \w+' -> "):
        dryrun.show(config, workdir=workdir)


def test_commands_do_not_put_a_policy_together_from_what_it_was_not_made_of(
    place: Path, tmp_path: Path
) -> None:
    config, workdir = reading(place), tmp_path / "work"
    config.tokenizer.chat = False
    config.lora.rank = 2
    begin(config, workdir)
    with pytest.raises(ValueError, match=r"\S+/01-sft/checkpoints no longer has a checkpoint"):
        commands.export(workdir, tmp_path / "model", policy="sft")
    parquet(place / "test.parquet", ROWS[21:23])
    with pytest.raises(ValueError, match=r"data\.test\.path: content"):
        commands.evaluate(workdir, "sft")
    with pytest.raises(ValueError, match=r"data\.test\.path: content"):
        commands.sample(workdir, policy="sft")
    edit_weights(place / "model", scaled)
    for policy in ("sft", "init"):
        with pytest.raises(ValueError, match=r"other inputs:\n  model\.path: content"):
            commands.export(workdir, tmp_path / "model", policy=policy)
    with pytest.raises(ValueError, match=r"model\.path: content"):
        commands.sample(workdir, policy="sft", prompts="1+1?")


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
    message = "its adapters (were trained on|belong to) another model"
    with pytest.raises(ValueError, match=message):
        pipeline.run(config, tmp_path / "again")
    if begins_with == "hf:":
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
    with pytest.raises(ValueError, match="its adapters belong to another model than this run's"):
        pipeline.run(config, tmp_path / "again")


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
    policy = f"run:{other}#sft"
    message = "its adapters (were trained on|belong to) another model"
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
