"""Every mistake of mistakes.txt is reported where it was made, by the dry run and by the run,
before a device does anything."""

import contextlib
import io
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from etils import epath

from g2d_jax.cli import main
from g2d_jax.config import Config
from g2d_jax.data import arithmetic
from g2d_jax.data.tokenizer import PromptTokenizer
from g2d_jax.models import decoder, hf
from g2d_jax.models.config import ModelConfig
from g2d_jax.recipes.config_load import resolve
from g2d_jax.session.workdir import write_settings

TABLE = Path(__file__).with_name("mistakes.txt").read_text()
LINES = [line for line in TABLE.splitlines() if line and line[0] != "#"]
MISTAKES = {name: (at, how.split(" ; ")) for name, at, how in (s.split(" | ") for s in LINES)}

CONFIG = """
from g2d_jax import config as settings
from g2d_jax.recipes import config_load

def get_config():
    config = config_load.resolve("demo:preset=smoke").unlock()
    config.data.train.limit = config.stages.sft.data.limit = 64
    config.data.test.limit = config.data.dev.limit = 8
    config.stages.sft.steps = 4
    config.stages.sft.optimizer.warmup_steps = 0
    config.stages.warmup.steps = 2
    config.stages.collect.prompts = 8
    {}
    return config
"""
MY_REWARDS = """
def fine(completions, **columns):
    return [float(len(text)) for text in completions]
def fails(completions, **columns):
    return [1.0 / 0 for text in completions]
def too_few(completions, **columns):
    return [1.0]
def texts(completions, **columns):
    return ["good" for text in completions]
def other(responses, labels):
    return [1.0 for text in responses]
async def later(completions, **columns):
    return [1.0 for text in completions]
"""
SHAPE = {
    "family": "llama", "vocab_size": 22, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 8,
}  # fmt: skip


def save_rows(file: str, rows: list[dict[str, Any]]) -> None:
    Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows))


def save_model(folder: str, **shape: int) -> Path:
    """A model with the tokenizer of the embedded arithmetic."""
    place = Path("models", folder)
    PromptTokenizer(arithmetic.tokenizer()).save(place)
    config = ModelConfig(**{"max_position_embeddings": 256, **SHAPE, **shape})
    hf.save(decoder.init(config, jax.random.key(0), 0.02), place, eos_ids=(1,), pad_id=0)
    return place


def copied_model(folder: str, **changes: Any) -> Path:
    """The good model with changes of its config.json."""
    place = Path("models", folder)
    shutil.copytree("models/good", place)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | changes))
    return place


def write_problems() -> None:
    sums = [(f"{a}+{b}=?", str((a + b) % 10)) for a in range(6) for b in range(10)]
    save_rows("good.jsonl", [{"problem": p, "answer": a} for p, a in sums])
    save_rows("three.jsonl", [{"problem": p, "answer": a} for p, a in sums[:3]])
    save_rows("noanswer.jsonl", [{"problem": p} for p, _ in sums])
    save_rows("noproblem.jsonl", [{"task_text": p, "answer": a} for p, a in sums])
    save_rows("words.jsonl", [{"problem": p, "answer": "\\frac{"} for p, a in sums])
    Path("empty.jsonl").write_text("")
    Path("broken.jsonl").write_text("{'problem': '1+1=?', 'answer': '2'}\n" * 20)
    Path("table.csv").write_text("problem,answer\n1+1=?,2\n")
    Path("latin.jsonl").write_bytes('{"problem": "1+1=?", "answer": "é"}\n'.encode("latin-1"))
    Path("cut.parquet").write_bytes(b"PAR1 and no more")
    Path("folder").mkdir()


def write_models() -> None:
    save_model("good")
    save_model("few-tokens", vocab_size=9)
    copied_model("short", max_position_embeddings=20)
    copied_model("other-shape", hidden_size=16)
    copied_model("gpt2", model_type="gpt2")
    (copied_model("cut") / "config.json").write_text('{"model_type": "llama", ')
    (copied_model("weightless") / "model.safetensors").unlink()
    pickled = copied_model("pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    adapters = Path("models/adapters")
    adapters.mkdir()
    (adapters / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (adapters / "adapter_model.safetensors").write_bytes(b"")
    for file in copied_model("mute").glob("token*"):
        file.unlink()


@pytest.fixture(scope="module", autouse=True)
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with files that are wrong in many ways."""
    folder = tmp_path_factory.mktemp("mistakes")
    with contextlib.chdir(folder):
        write_problems()
        write_models()
        Path("my_rewards.py").write_text(MY_REWARDS)
        Path("broken_rewards.py").write_text("def graded(:\n")
        Path("good.py").write_text(CONFIG.format(""))
        begun = Config.of(resolve("good.py", ["stages.sft.batch_size=16"]))
        (folder / "begun" / "01-sft").mkdir(parents=True)
        write_settings(begun, epath.Path(folder) / "begun")
        yield folder


def command(how: list[str], number: int) -> list[str]:
    """The arguments of `g2d` with which a mistake is made."""
    lines = [item for item in how if re.match(r"config\.|del ", item)]
    file = f"config{number}.py"
    Path(file).write_text(CONFIG.format("\n    ".join(lines)))
    arguments = ["run", "--config", file]
    for item in how:
        if item.startswith("--"):
            arguments += shlex.split(item)
        elif item not in lines:
            arguments.append(f"--config.{item}")
    return arguments


def reported(arguments: list[str]) -> tuple[int, list[str]]:
    """The exit status of a command, and its errors and warnings."""
    shown, failed = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(failed):
        status = main(arguments)
    assert bool(status) == bool(failed.getvalue())
    warnings = [line for line in shown.getvalue().splitlines() if "WARNING" in line]
    return status, [*failed.getvalue().splitlines(), *warnings]


def test_without_a_mistake_nothing_is_reported() -> None:
    assert reported([*command([], 0), "--dry-run"]) == (0, [])


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_reported_where_it_was_made(name: str) -> None:
    """By the dry run; and an error by the run too, in the same words, before its first stage."""
    at, how = MISTAKES[name]
    arguments = command(how, list(MISTAKES).index(name))
    status, found = reported([*arguments, "--dry-run"])
    assert [line for line in found if at in line], found
    if not status:
        return
    has_workdir = "--workdir" in arguments
    stopped, told = reported([*arguments, *([] if has_workdir else ["--workdir", "work"])])
    assert stopped == 1 and (told == found or has_workdir), told
    assert not list(Path("work").glob("01-*"))
    shutil.rmtree("work", ignore_errors=True)
