"""Finding configs, choices, overrides, checks of names and types, and what counts as the same
config."""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from etils import epath
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from g2d_jax import cli, config, pipeline, recipes
from g2d_jax.commands import dryrun
from g2d_jax.config import check
from g2d_jax.config import io as config_io
from g2d_jax.recipes import config_load
from g2d_jax.runtime import storage
from g2d_jax.session import init_params
from g2d_jax.session.workdir import claim
from g2d_jax.stages import run_issues

ROOT = Path(__file__).resolve().parents[1]

FILE = """
from g2d_jax import config as schema
from g2d_jax.recipes.config_load import choices

def get_config(arg=""):
    chosen = choices(arg, preset=("full", "smoke"), seed=0, rate=0.5, fast=False, tag="x")
    config = schema.base()
    config.seed = chosen.seed
    config.stages.sft = schema.sft(steps=10 if chosen.preset == "smoke" else 2000)
    config.stages.warmup = schema.online(keep=(0, 10), clip={"epsilon_high": 0.3})
    config.stages.evaluate = schema.evaluate()
    {line}
    return config
"""


@pytest.fixture
def write(tmp_path):
    """write(line): the path of a config file with that line in get_config."""

    def to_file(line: str = "pass") -> str:
        path = tmp_path / "mine.py"
        path.write_text(FILE.replace("{line}", line))
        return str(path)

    return to_file


# Finding


def test_a_file_with_its_choices(write):
    made = config_load.resolve(f"{write()}:preset=smoke,seed=3")
    assert (made.stages.sft.steps, made.seed) == (10, 3)
    assert made.is_locked
    assert config_load.resolve(write()).stages.sft.steps == 2000


def test_an_edited_file_is_read_again_and_leaves_nothing_beside_it(write, tmp_path):
    assert config_load.resolve(write("config.seed = 1")).seed == 1
    assert config_load.resolve(write("config.seed = 2")).seed == 2
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


def test_shipped_configs_are_found_by_name():
    known = config_load.shipped()
    files = {path.stem for path in (ROOT / "configs").glob("*.py")}
    assert list(known) == sorted(files | recipes.MODELS.keys())
    for name, path in known.items():
        assert config_load.locate(f"{name}:a=1,b=2:3") == (path, "a=1,b=2:3")


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize("name", list(config_load.shipped()))
def test_shipped_configs_are_valid_and_survive_json(name):
    made = config_load.resolve(name)
    assert made.stages
    assert config_io.from_dict(json.loads(json.dumps(config_io.to_dict(made)))) == made


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "demoo:preset=smoke",
            r"unknown config 'demoo', did you mean demo\?; shipped configs are .*demo",
        ),
        (
            "my_file",
            r"unknown config 'my_file'; a config file's name ends in \.py; shipped configs are",
        ),
        (str(ROOT / "tests" / "tiny"), r"tiny', did you mean /.*/tiny\.py\?; shipped configs are"),
        ("no/none.py", r"no config file .*/no/none\.py; shipped configs are "),
    ],
)
def test_a_config_that_is_not_there(spec, message):
    with pytest.raises(ValueError, match=message):
        config_load.resolve(spec)


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [("fma avx512_bf16", "bfloat16"), ("amx_bf16 fma", "bfloat16"), ("avx512f", "float32")],
)
def test_smollm2_has_the_products_of_the_processor(prepared, monkeypatch, flags, dtype):
    monkeypatch.setattr("g2d_jax.runtime.flags.accelerated", lambda: False)
    monkeypatch.setattr(Path, "read_text", lambda self: f"flags : {flags}\n")
    config = config_load.resolve("smollm2:seed=3,K=4")
    assert (config.seed, config.stages.warmup.steps) == (3, 4)
    assert (config.dtype, config.model.path) == (dtype, str(prepared))
    assert config_load.resolve("smollm2:dtype=float32").dtype == "float32"


def test_the_installed_folder_comes_first(tmp_path):
    """An installed package carries configs/ inside it, and a folder beside it is not its own."""
    package = Path(shutil.copytree(ROOT / "g2d_jax", tmp_path / "g2d_jax"))
    for file in (
        package / "configs/inside.py",
        package / "configs/_helper.py",
        tmp_path / "configs/beside.py",
    ):
        file.parent.mkdir(exist_ok=True)
        file.touch()
    command = [
        sys.executable,
        "-c",
        "from g2d_jax.recipes import config_load; print(*config_load.shipped())",
    ]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == sorted(["inside", *recipes.MODELS]), done.stderr


# Choices


def test_choices_have_the_types_of_their_defaults():
    defaults = {"preset": ("full", "smoke"), "rate": 0.5, "fast": False, "tag": "x", "n": 7}
    chosen = config_load.choices(" rate=2, fast=yes,tag=a=b ", **defaults)
    assert vars(chosen) == {"preset": "full", "rate": 2.0, "fast": True, "tag": "a=b", "n": 7}
    assert type(chosen.rate) is float


@pytest.mark.parametrize(
    ("arg", "message"),
    [
        (
            "sed=3",
            r"line 6: unknown choice 'sed', did you mean seed\?; choices: preset, seed, rate, "
            r"fast, tag",
        ),
        (
            "preset=smok",
            r"choice 'preset' cannot be 'smok', did you mean smoke\?; it can be full, smoke",
        ),
        ("seed=x", r"choice 'seed' must be an integer \(int\), got 'x'"),
        ("smoke", r"choice 'smoke' has no value: write key=value"),
    ],
)
def test_wrong_choices(write, arg, message):
    with pytest.raises(ValueError, match=message):
        config_load.resolve(f"{write()}:{arg}")


# What a file may say


def test_a_get_config_without_choices(tmp_path):
    """As ml_collections has it: nothing is handed over where nothing follows the file's name."""
    file = tmp_path / "mine.py"
    lines = [
        "from g2d_jax import config",
        "def get_config():",
        "    made = config.base()",
        "    made.name = 'own'",
    ]
    file.write_text("\n".join([*lines, "    return made"]))
    assert config_load.resolve(str(file)).name == "own"
    with pytest.raises(ValueError, match="its get_config accepts no choices: remove ':k=3'"):
        config_load.resolve(f"{file}:k=3")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("config.sede = 1", r"mine\.py: unknown field 'sede', did you mean seed\?"),
        ("config.data.trian = 1", r"unknown field 'data\.trian', did you mean data\.train\?"),
        ("config.stages.sft.stepz = 1", r"line 12: unknown field 'stepz', did you mean steps"),
        (
            "config.stages.sft = schema.sft(stepz=1)",
            r"line 12: unknown field 'stepz', did you mean steps",
        ),
        ("config.sede", r"line 12: .*Did you mean \"seed\""),
        ("config.seed = 'one'", r"line 12: seed must be an integer"),
        ("config.seed = True", r"seed must be an integer \(int\), got True"),
        (
            "config.stages.x = {'kind': 'onlin'}",
            r"stages\.x\.kind must be one of .*sft.* 'onlin', did you mean online",
        ),
        ("config.stages.x = {'kind': []}", r"stages\.x\.kind must be one of .*sft.*, got \[\]"),
        ("config.stages['a/b'] = schema.sft()", r"stages\.a/b: write a name with letters"),
        (
            "config.stages.x = {'kind': 'sft', 'data': 3}",
            r"stages\.x\.data is a section, got 3; its fields are ",
        ),
        (
            "config.stages.x = {'kind': 'evaluate', 'pass_at': (1, 'b')}",
            r"stages\.x\.pass_at\[1\] must be an integer",
        ),
        ("return 3", r"get_config must return a ConfigDict, got int"),
        ("(", r"mine\.py, line 12: '\(' was never closed"),
    ],
)
def test_mistakes_in_a_file_are_named(write, line, message):
    with pytest.raises(ValueError, match=message):
        config_load.resolve(write(line))


def test_a_file_without_get_config_and_one_that_fails(write, tmp_path):
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(ValueError, match="define get_config"):
        config_load.resolve(str(tmp_path / "empty.py"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "import torchx",
            r"line 12: No module named 'torchx': install it in the environment of g2d_jax, or "
            r"remove the import",
        ),
        ("from json import nothing", r"line 12: cannot import name 'nothing' from 'json'"),
        ("1 / 0", r"line 12: ZeroDivisionError: division by zero"),
        ("raise RuntimeError('no GPU')", r"line 12: RuntimeError: no GPU"),
        ("open('nofile')", r"line 12: FileNotFoundError: .*nofile"),
        ("raise SystemExit('bye')", r"line 12: SystemExit: bye"),
    ],
)
def test_an_error_of_the_files_own_code_names_file_and_line(write, line, message):
    with pytest.raises(ValueError, match=r"mine\.py, " + message) as raised:
        config_load.resolve(write(line))
    assert raised.value.__cause__ is not None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "config.data.train = 'x.jsonl'",
            r"train is a section .*x\.jsonl: set it to settings\.source\(",
        ),
        ("config.data.test = 3", r"test is a section .* 3: set it to settings\.source\("),
        ("config.data = 'x.jsonl'", r"data is a section .*settings\.source\("),
        (
            "config.model = 'Qwen/Qwen2.5-0.5B'",
            r"model is a section .*: set its fields one by one$",
        ),
        ("config.reward = print", r"reward is a section .*settings\.reward\("),
        ("config.compute = 8", r"compute is a section .*set its fields one by one"),
        (
            "config.stages = [schema.sft()]",
            r"stages is a section .*set its fields",
        ),
        ("config.stages.sft = 'sft'", r"sft is a section .*settings\.sft\("),
        ("config.stages.sft.data = 'x.jsonl'", r"data is a section .*settings\.source\("),
        (
            "config.stages.more = schema.sft(optimizer=3e-4)",
            r"optimizer is a section .* 0\.0003: .*settings\.optimizer\(",
        ),
        (
            "config.stages.warmup.sampling = 512",
            r"sampling is a section .*settings\.sampling\(",
        ),
        ("config.seed = 'x'", r"seed must be an integer \(int\), got 'x'"),
    ],
)
def test_a_plain_value_for_a_section_is_refused_with_what_makes_one(write, line, message):
    with pytest.raises(ValueError, match=r"mine\.py, line 12: " + message) as raised:
        config_load.resolve(write(line))
    assert "\n" not in str(raised.value) and "ml_collections" not in str(raised.value)


def test_sections_shared_in_a_file_are_separate_afterwards(write):
    line = "config.stages.warmup.sampling = config.stages.evaluate.sampling"
    made = config_load.resolve(write(line), ["stages.warmup.sampling.top_k=5"])
    assert (made.stages.warmup.sampling.top_k, made.stages.evaluate.sampling.top_k) == (5, 0)


def test_fields_of_a_source_may_have_any_name(write):
    named = write("config.data.train = schema.source('x.jsonl', fields={'problem': 'q'})")
    data = config_load.resolve(named, ["data.dev.fields.answer=a"]).data
    assert (data.train.fields.problem, data.dev.fields.answer, data.train.limit) == ("q", "a", None)
    with pytest.raises(ValueError, match=r"data\.train\.fields\.problem must be text"):
        config_load.resolve(write("config.data.train.fields.problem = 3"))


# Overrides


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("config.stages.warmup.steps=40", 40),
        ("stages.warmup.steps = 40 ", 40),
        ("stages.warmup.beta=1", 1.0),
        ("stages.warmup.optimizer.learning_rate=1e-6", 1e-6),
        ("stages.warmup.optimizer.kind=adafactor", "adafactor"),
        ("stages.warmup.keep=(0,10,20)", (0, 10, 20)),
        ("stages.warmup.keep=0, 10, 20", (0, 10, 20)),
        ("stages.warmup.keep=[5]", (5,)),
        ("stages.warmup.keep=7,", (7,)),
        ("stages.warmup.keep=", ()),
        ("stages.warmup.keep=()", ()),
        # as Python writes it, whether or not the list has texts already
        (r'stages.warmup.sampling.stop=["\n\n", "a, b"]', ("\n\n", "a, b")),
        (r'stages.warmup.sampling.stop=["\n\n"]', ("\n\n",)),
        (r'stages.warmup.sampling.stop=("\n\n")', ("\n\n",)),
        ("stages.evaluate.policies=sft,warmup@10", ("sft", "warmup@10")),
        ("stages.warmup.clip.epsilon_high=none", None),
        ("stages.warmup.clip.epsilon_high=1", 1.0),
        ("data.train.limit=7", 7),
        ("data.train.limit=None", None),
        ("tokenizer.enable_thinking=no", False),
        ("logging.tensorboard=False", False),
        ("stages.evaluate.greedy=yes", True),
        ("tokenizer.prompt_template={problem} = ?", "{problem} = ?"),
        ("tokenizer.prompt_template=__import__('os')", "__import__('os')"),
        ("tokenizer.prompt_template=none", "none"),
        ("tokenizer.system=", ""),
        ("tokenizer.system= You are \n", " You are \n"),
        ("tokenizer.prompt_template=a = (1, 2)\n", "a = (1, 2)\n"),
        ("tokenizer.prompt_template='{problem}'", "'{problem}'"),
        ("stages.evaluate.policies=('sft', \"hf:a, b\", warmup )", ("sft", "hf:a, b", "warmup")),
        ("data.train.limit= none ", None),
        ("mesh.fsdp=-1", -1),
    ],
)
def test_overrides_are_typed_by_their_field(write, override, value):
    made = config_load.resolve(write(), [override])
    path = override.partition("=")[0].strip().removeprefix("config.")
    assert made[path] == value
    assert type(made[path]) is type(value)


@pytest.mark.parametrize("text", [r'["\n\n", "a"]', r"('\n\n', 'a',)"])
def test_texts_are_written_as_in_python_where_a_list_has_some_too(write, text):
    config = write('config.stages.warmup.sampling.stop = ("x",)')
    made = config_load.resolve(config, [f"stages.warmup.sampling.stop={text}"])
    assert made.stages.warmup.sampling.stop == ("\n\n", "a")


def test_a_text_in_place_of_a_list_is_shown(write):
    with pytest.raises(ValueError, match="got 'Question:…'"):
        config_load.resolve(write(r'config.stages.warmup.sampling.stop = ("\nQuestion:")'))


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("", []),
        ("1,2,", ["1", "2"]),
        (" 1 , 2 ", ["1", "2"]),
        ("(1,2),[3, 4],5", ["(1,2)", "[3, 4]", "5"]),
        ("'a, b ',\" c\"", ["a, b ", " c"]),
        ("it's, don't", ["it's", "don't"]),
        ("'a' b, 'c", ["'a' b", "'c"]),
        ("f(1,(2), 3)", ["f(1,(2)", "3)"]),
        ("'',x\n", ["", "x"]),
    ],
)
def test_values_are_split_at_commas_outside_quotes_and_brackets(text, values):
    assert config_load.split_values(text) == values


@given(st.lists(st.text(st.characters(exclude_characters="'", exclude_categories=["Cs"]))))
@examples(100)
def test_quoted_values_survive_whatever_they_hold(values):
    assert config_load.split_values(",".join(f"'{value}'" for value in values)) == values


def test_a_list_without_items_takes_numbers(write):
    line = "config.stages.again = schema.online()"
    assert config_load.resolve(write(line), ["stages.again.keep=0,10"]).stages.again.keep == (0, 10)
    with pytest.raises(
        ValueError, match=r"stages\.again\.keep: an item must be a number.*got .__import__"
    ):
        config_load.resolve(write(line), ["stages.again.keep=__import__('os')"])


def test_the_last_override_wins(write):
    assert config_load.resolve(write(), ["seed=1", "config.seed=2"]).seed == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "stages.warmup.stepz=1",
            r"unknown field 'stages\.warmup\.stepz', did you mean stages\.warmup\.steps\?",
        ),
        (
            "stages.wramup.steps=1",
            r"unknown field 'stages\.wramup\.steps', did you mean stages\.warmup\.steps\?",
        ),
        ("warmup.steps=1", r"unknown field 'warmup\.steps', did you mean stages\.warmup\.steps\?"),
        (
            "steps=1",
            r"unknown field 'steps', did you mean stages\.sft\.steps or stages\.warmup\.steps\?",
        ),
        ("seed.x=1", r"unknown field 'seed\.x', did you mean seed\?"),
        ("nonsense=1", r"unknown field 'nonsense'; the fields are checkpoint, compute, data, "),
        (
            "stages.warmup.steps=1.5",
            r"stages\.warmup\.steps must be an integer \(int\), got '1\.5'",
        ),
        (
            "stages.warmup.steps=true",
            r"stages\.warmup\.steps must be an integer \(int\), got 'true'",
        ),
        ("stages.warmup.beta=high", r"stages\.warmup\.beta must be a number \(float\), got 'high'"),
        ("stages.warmup.keep=0,x", r"stages\.warmup\.keep must be an integer \(int\), got 'x'"),
        ("logging.tensorboard=1", r"logging\.tensorboard must be true or false \(bool\), got '1'"),
        (
            "data.train.limit=all",
            r"data\.train\.limit must be an integer \(int\) or none, got 'all'",
        ),
        ("stages.warmup=1", r"stages\.warmup is a section; set one of its fields: beta, "),
        ("stages.warmup.kind=sft", r"stages\.warmup\.kind decides which fields the stage has"),
        ("seed", r"override 'seed' has no value: write seed=value"),
        ("", r"has no value"),
        ("=1", r"unknown field ''"),
    ],
)
def test_wrong_overrides_are_named(write, override, message):
    with pytest.raises(ValueError, match=message):
        config_load.resolve(write(), [override])


@given(path=st.text(max_size=20), text=st.text(max_size=20))
@examples(60)
def test_no_override_fails_otherwise(path, text):
    made = config_io.from_dict({"stages": {"warmup": {"kind": "online"}}})
    try:
        config_load.apply(made, f"{path}={text}")
    except ValueError:
        return
    assert config_io.from_dict(config_io.to_dict(made)) == made


# Dictionaries, identity, differences


def test_a_config_survives_json(write):
    overrides = [
        "stages.warmup.keep=0,10,20",
        "stages.warmup.clip.epsilon_high=none",
        "reward.cpu_seconds=inf",
    ]
    made = config_load.resolve(write("config.data.train.fields.problem = 'q'"), overrides)
    again = config_io.from_dict(json.loads(json.dumps(config_io.to_dict(made), allow_nan=False)))
    assert again == made and again.stages.warmup.keep == (0, 10, 20)
    assert math.isinf(again.reward.cpu_seconds) and again.data.train.fields.to_dict() == {
        "problem": "q"
    }
    with pytest.raises(AttributeError):
        again.stages.warmup.stepz = 1
    again.stages.warmup.clip.epsilon_high = 0.2  # an unset field still knows its type
    with pytest.raises(TypeError):
        again.stages.warmup.clip.epsilon_high = "high"


def test_fields_not_named_have_their_defaults():
    made = config_io.from_dict({"seed": 3, "stages": {"warmup": {"kind": "online", "steps": 5}}})
    assert (made.seed, made.data.max_prompt_length) == (3, config.base().data.max_prompt_length)
    assert (made.stages.warmup.steps, made.stages.warmup.num_generations) == (
        5,
        config.online().num_generations,
    )


def test_identity_leaves_out_what_may_change_and_is_the_same_from_the_file_on_disk(write, tmp_path):
    made = config_load.resolve(write())
    session = [
        "mesh.data=2",
        "compute.max_num_seqs=8",
        "logging.tensorboard=no",
        "checkpoint.every=1",
        "reward.workers=9",
    ]
    storage.write_json(tmp_path / "config.json", config_io.to_dict(made))
    for same in (
        config_load.resolve(write(), [*session, "name=other"]),
        storage.read_json(tmp_path / "config.json"),
    ):
        assert config_io.identity(same) == config_io.identity(made)
    identity = config_io.identity(made)
    assert identity["reward"]["function"] == "verify" and "workers" not in identity["reward"]
    assert not {"mesh", "compute", "logging", "checkpoint", "name"} & identity.keys()


def test_differences_are_lines_of_fields(write):
    old = config_load.resolve(write("config.stages.old = schema.sft()"))
    new = config_load.resolve(
        write("config.data.train.fields.problem = 'q'"),
        [
            "stages.warmup.steps=40",
            "stages.warmup.clip.epsilon_high=none",
            "stages.warmup.keep=0",
            "mesh.data=4",
        ],
    )
    lines = config_io.differences(config_io.identity(old), config_io.identity(new))
    assert lines[:1] + lines[2:] == [
        "data.train.fields.problem: (absent) -> 'q'",
        "stages.warmup.clip.epsilon_high: 0.3 -> none",
        "stages.warmup.keep: [0, 10] -> [0]",
        "stages.warmup.steps: 20 -> 40",
    ]
    assert lines[1].startswith("stages.old: {batch_size, ") and lines[1].endswith("} -> (absent)")


# Names


@pytest.mark.parametrize("name", config.RESERVED)
def test_words_that_mean_something_else_name_no_stage_and_no_task(name):
    stages = config_io.from_dict({"stages": {name: {"kind": "sft"}}})
    with pytest.raises(ValueError, match=rf"stages\.{name} has a reserved name.*{name}-1"):
        run_issues.checked(stages)
    stages = {f"{name}-2": {"kind": "sft", "data": {"path": "procedural:slips"}}}
    run_issues.checked(
        config.Config.of(
            config_io.from_dict({"stages": stages, "tokenizer": {"path": "procedural:slips"}})
        )
    )
    if name != "main":  # which is refused before
        tasks = config_io.from_dict({"stages": {"sft": {"kind": "sft"}}, "tasks": {name: {}}})
        with pytest.raises(ValueError, match=rf"tasks\.{name} has a reserved name"):
            run_issues.checked(tasks)


@pytest.mark.parametrize(
    "read", [{"init": "init"}, {"a": "a"}, {"a": "b", "b": "a"}, {"a": "b@3", "b": "a@2"}]
)
def test_a_policy_made_from_itself_is_followed_to_an_end(read):
    stages = {name: {"kind": "sft", "policy": policy} for name, policy in read.items()}
    made = config.Config.of(config_io.from_dict({"stages": stages}))
    if "init" in read:  # which is the model, whatever a stage is called
        assert init_params.base_of(made, "init", {}, {}) == ("init", "")
        return
    with pytest.raises(ValueError, match="is made from itself"):
        init_params.base_of(made, "a", {}, {})


def test_of_the_default_pass_at_those_are_told_that_so_many_answers_tell():
    few = config.Evaluate(num_generations=2, policies=("init",))
    assert few.shown_pass_at == (1, 2)
    stages = {"evaluate": few}
    test = config.Source(path="procedural:slips", split="test", limit=4)
    made = config.Config(
        stages=stages, data=config.Data(test=test), tokenizer=config.Tokenizer(path=test.path)
    )
    run_issues.checked(made)
    with pytest.raises(ValueError, match=r"pass_at has 8, but num_generations is 2: remove these"):
        run_issues.checked(
            dataclasses.replace(made, stages={"evaluate": dataclasses.replace(few, pass_at=(1, 8))})
        )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engine.url=http://localhost:8000/v1", "kind is 'sampler', which uses no server"),
        ("reward.model.path=FOLDER", "set function to 'model'"),
        ("lora.base_dtype=bfloat16", "lora.rank is 0, which trains all"),
        ("stages.dpo.max_length=80", "preferences is the stage 'collect'"),
        (
            "stages.collect.max_pass_rate=0.9;reward.function=model;reward.model.path=FOLDER",
            "only rank them",
        ),
        (
            "stages.warmup.filter.max_pass_rate=0.9;reward.function=model;reward.model.path=FOLDER",
            "only rank them",
        ),
        (
            "stages.warmup.filter.max_pass_rate=80",
            "filter.max_pass_rate must be at least 0 and at most 1, got 80",
        ),
        (
            "stages.dpo.optimizer.max_grad_norm=-1.0",
            r"dpo\.optimizer\.max_grad_norm must be at least 0",
        ),
    ],
)
def test_a_setting_that_does_nothing_is_an_error(override, message):
    overrides = [f"config.{entry}" for entry in override.split(";")]
    with pytest.raises(ValueError, match=message):
        check.checked(config_load.resolve("demo", overrides))


def warned(changes: dict[str, object]) -> set[str]:
    """The fields of the warm-up that are warned of."""
    made = config_load.resolve("demo")
    made.stages.warmup.update_from_flattened_dict(changes)
    _, found = check.issues(made)
    assert {issue.level for issue in found} <= {"warning"}
    return {issue.path.removeprefix("stages.warmup.") for issue in found}


@pytest.mark.parametrize(
    ("changes", "idle"),
    [
        ({}, ()),
        ({"loss_type": "dapo", "dpo.nll_coef": 1.0, "dpo.beta": 0.5}, ("dpo.beta", "dpo.nll_coef")),
        ({"loss": "dpo", "scale_rewards": "group", "dpo.beta": 0.5}, ("scale_rewards",)),
        ({"loss": "group_dpo", "grpo_coef": 1.0, "scale_rewards": "group"}, ()),
        ({"loss": "dpo", "dpo.simpo_gamma": 2.0}, ("dpo.simpo_gamma",)),
        ({"loss": "dpo", "dpo.simpo_gamma": 2.0, "dpo.loss_type": "simpo", "dpo.beta": 2.0}, ()),
    ],
)
def test_what_a_loss_does_not_read(changes, idle):
    assert warned(changes) == {*idle}


@pytest.mark.parametrize(
    ("changes", "idle"),
    [
        ({}, ()),
        ({"clip.epsilon": 0.2}, ()),
        ({"clip.importance_sampling_level": "sequence"}, ("clip.importance_sampling_level",)),
        ({"clip.importance_sampling_level": "sequence", "clip.importance_cap": 2.0}, ()),
        (
            {"clip.epsilon": 3e-4, "clip.epsilon_high": 4e-4, "clip.importance_cap": 2.0},
            ("clip.epsilon", "clip.epsilon_high"),
        ),
        ({"clip.epsilon": 3e-4, "clip.epsilon_high": 4e-4, "sync_every": 2}, ()),
        ({"clip.epsilon": 3e-4, "sync_every": 4, "num_iterations": 2}, ()),
        ({"clip.epsilon": 3e-4, "sync_every": 0}, ()),
        ({"loss_type": "cispo"}, ("loss_type",)),
        ({"loss": "group_dpo", "grpo_coef": 1.0, "clip.epsilon": 3e-4}, ("clip.epsilon",)),
    ],
)
def test_what_a_ratio_of_one_leaves_without_effect(changes, idle):
    assert warned(changes) == {*idle}


def test_what_does_nothing_is_refused_in_a_work_directory_too(tmp_path):
    made = config_load.resolve("demo")
    claim(config.Config.of(made), epath.Path(tmp_path))
    made.stages.warmup.grpo_coef = 0.5
    with pytest.raises(ValueError, match=r"warmup\.grpo_coef"):
        pipeline.run(made, tmp_path)
    with pytest.raises(ValueError, match=r"warmup\.grpo_coef"):
        dryrun.show(made, workdir=tmp_path)


@pytest.mark.parametrize(
    ("section", "field", "items", "fault"),
    [
        ("stages.warmup", "keep", (1, None), "must hold integers, got None"),
        ("stages.warmup", "keep", (2.5,), "must hold integers, got 2.5"),
        ("stages.warmup", "keep", (True,), "must hold integers, got True"),
        ("stages.warmup", "keep", (1, -1), "must be at least 0, got -1"),
        ("stages.evaluate", "pass_at", (1, 0), "must be at least 1, got 0"),
        ("stages.evaluate", "policies", ("sft", 3), "must hold texts, got 3"),
        ("stages.warmup.sampling", "stop", ([],), r"must hold texts, got \[\]"),
        ("lora", "targets", (None,), "must hold texts, got None"),
    ],
)
def test_items_of_lists_have_types_and_bounds(section, field, items, fault):
    made = config_load.resolve("demo")
    setattr(operator.attrgetter(section)(made), field, items)
    with pytest.raises(ValueError, match=rf"^{section}\.{field} {fault}"):
        config.Config.of(made)


@pytest.mark.usefixtures("prepared")
def test_what_ships_sets_nothing_that_does_nothing():
    for name in config_load.shipped():
        made = config_load.resolve(name)
        if "sweep" not in made:
            check.checked(made)


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize("name", ["demo", "qwen2.5-1.5b:lora=32", "bridging-math"])
def test_what_g2d_config_prints_are_overrides_that_change_nothing(name, capsys):
    assert cli.main(["config", "--config", name]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "not the defaults:" and "defaults:" in lines
    overrides = [line.strip() for line in lines if "=" in line]
    made = config_load.resolve(name)
    assert config_io.changes(made, config_load.resolve(name, overrides)) == []
    changed = overrides[: lines.index("defaults:")]
    own = {line.partition(":")[0] for line in config_io.changes(config_io.defaults(made), made)}
    assert {line.partition("=")[0] for line in changed} == own
