"""Sequences longer than the model is made for: a warning in the dry run, the run and the report."""

import json

import jax
import numpy as np
import pytest
from worlds import run

from g2d_jax import config as settings
from g2d_jax.commands import dryrun
from g2d_jax.config.io import to_dict
from g2d_jax.data import arithmetic
from g2d_jax.data.tokenizer import PromptTokenizer
from g2d_jax.models import decoder, hf
from g2d_jax.models.config import LinearRope, Llama3Rope, LongRope, ModelConfig, YarnRope
from g2d_jax.records import Preference
from g2d_jax.report.page import text as markdown
from g2d_jax.report.run import report
from g2d_jax.report.runs import read_run
from g2d_jax.runtime.storage import write_json
from g2d_jax.runtime.tables import write_preferences
from g2d_jax.stages.alerts import beyond_positions

SHAPE = {
    "family": "llama", "vocab_size": 22, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 8,
}  # fmt: skip
POSITIONS = 8


@pytest.fixture
def short(config, tmp_path):
    """tiny.py's run from a model of few positions."""
    shape = ModelConfig(**SHAPE, max_position_embeddings=POSITIONS)
    folder = tmp_path / "model"
    PromptTokenizer(arithmetic.tokenizer()).save(folder)
    hf.save(decoder.init(shape, jax.random.key(0), 0.02), folder, eos_ids=(1,), pad_id=0)
    config.model.path = str(folder)
    return config


@pytest.mark.parametrize(
    ("lengths", "positions", "said"),
    [
        (
            [(57, 2048), (60, 2000)],
            512,
            "57 + 2,048 = 2,105 tokens of prompt and response, but the model supports 512 ",
        ),
        ([(12, 9)], 20, "makes 12 + 9 = 21 tokens of prompt and response, but the model supports"),
        ([(11, 9)], 20, None),
        ([(11, 9**9)], None, None),
        ([], 20, None),
    ],
)
def test_the_longest_sequence_counts(lengths, positions, said):
    shape = None
    if positions is not None:
        shape = ModelConfig(**SHAPE, max_position_embeddings=positions)
    found = beyond_positions("here", lengths, shape)
    assert [issue.level for issue in found] == ["warning"] * (said is not None)
    assert said is None or said in found[0].text


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        (None, 32_768),
        (YarnRope(4.0, 32_768, 1.1), 131_072),  # Qwen2.5, as its authors say to turn it on
        (YarnRope(4.0, 8192, 1.1), 32_768),
        (Llama3Rope(8.0, 1.0, 4.0, 8192), 32_768),
        (LinearRope(8.0), 32_768),
    ],
)
def test_the_extension_of_positions_counts(rope, positions):
    assert (
        ModelConfig(**SHAPE, max_position_embeddings=32_768, rope_scaling=rope).positions
        == positions
    )


def test_longrope_is_refused_beyond_its_short_sequences():
    rope = LongRope((1.0,) * 4, (2.0,) * 4, 4096, 1.2)
    shape = {**SHAPE, "family": "phi3"}
    config = ModelConfig(**shape, max_position_embeddings=131_072, rope_scaling=rope)
    assert config.positions == 4096
    assert beyond_positions("here", [(96, 4000)], config) == []
    (found,) = beyond_positions("here", [(96, 4000), (97, 4000)], config)
    assert found.level == "error" and "97 + 4,000 = 4,097 tokens" in found.text
    assert "longrope" in found.text and "at most 4,096" in found.text


def dump(path, *lengths):
    rows = [
        {"prompt": "1+1=?", "completion": "1" * length, "reward": 1.0, "finish_reason": "length"}
        for length in lengths
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def pair(prompt, chosen, rejected):
    ids = [np.full(length, 5, np.int32) for length in (prompt, chosen, rejected)]
    return Preference("other", "1+1=?", "2", "3", *ids, 1.0, 0.0)


def test_the_dry_run_warns_of_every_kind_of_stage(short, tmp_path, capsys):
    write_preferences(tmp_path / "pairs.parquet", [pair(4, 3, 19), pair(4, 2, 2)])
    stages = short.stages
    stages.warmup.sampling.max_new_tokens = 31
    stages.collect.sampling.max_new_tokens = 32
    stages.evaluate.sampling.max_new_tokens = 33
    with stages.unlocked():
        stages.best = settings.best_checkpoint(policy="warmup", sampling=settings.sampling(34))
        stages.others = settings.collect(dump={"path": dump(tmp_path / "dump.jsonl", 3, 35)})
        stages.pairs = settings.offline(
            policy="warmup", preferences=str(tmp_path / "pairs.parquet")
        )
    dryrun.show(short)
    shown = capsys.readouterr().out
    said = [line for line in shown.splitlines() if f"the model supports {POSITIONS} (" in line]
    ends = {line.split(".")[1]: line.partition(" + ")[2].partition(" = ")[0] for line in said}
    response = {
        "warmup": "31",
        "collect": "32",
        "evaluate": "33",
        "best": "34",
        "others": "35",
    }
    assert ends == {**response, "sft": ends["sft"]}
    left_out = f"1 longer than max_length or the model's positions, {POSITIONS} tokens"
    assert left_out in " ".join(shown.split())
    assert int(ends["sft"]) > 12
    short.model.path = ""  # random parameters know no positions
    dryrun.show(short)
    assert "the model supports" not in capsys.readouterr().out


def test_a_run_warns_once_and_its_report_tells(short, tmp_path, opened, capsys):
    with short.unlocked():
        short.stages = {"sft": short.stages.sft}
    short.stages.sft.steps = 2
    short.stages.sft.optimizer.warmup_steps = 0
    work = tmp_path / "work"
    write_json(work / "config.json", {"config": to_dict(short)})
    session = opened(short, work)
    manifest = run(session, "sft")
    said, page = capsys.readouterr().out, markdown(report(read_run(work)))
    (text,) = [one.text for one in manifest.warnings if "the model supports" in one.text]
    assert said.count(f"WARNING: {text}\n") == 1
    assert page.count("- Warning: stages.sft.max\\_length makes ") == 1
    assert text.startswith("stages.sft.max_length makes ")
