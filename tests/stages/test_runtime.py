"""What a run says and refuses before any work: of attention's kernel, of problems, of rollouts made
elsewhere."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from chat_templates import PUBLISHED
from etils import epath
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from g2d_jax import config as settings
from g2d_jax.commands import dryrun
from g2d_jax.config import Collect, Config, Dump, Offline, Online, Optimizer, Sft
from g2d_jax.config.io import to_dict
from g2d_jax.data.packing import Group, Response
from g2d_jax.models import decoder, hf
from g2d_jax.models.decoder import count_params, count_trained
from g2d_jax.records import Verdict
from g2d_jax.rollouts.external import external_groups
from g2d_jax.runtime import storage
from g2d_jax.session.policies import (
    base_of,
    base_path,
    base_revision,
    frozen_params,
    load_policy,
    load_reference,
)
from g2d_jax.session.row_shapes import CPU_TOKENS, RowShape, choose_row_length, pack_rows
from g2d_jax.session.session import Run
from g2d_jax.session.stage_result import Cost
from g2d_jax.session.training_programs import Scorer
from g2d_jax.stages import sft


def test_kernels_of_attention_are_noted_and_not_said(config, tmp_path, opened, capsys):
    session = opened(config, tmp_path)
    assert [choose_row_length(session, longest) for longest in (100, 110, 600)] == [112, 112, 608]
    assert session.sampling.sampler is session.sampling.sampler
    rows = {f"packed rows of {length} tokens": "xla" for length in (112, 608)}
    assert session.sampling.kernels == {**rows, "prompts": "xla", "decode": "xla"}
    assert "xla" not in capsys.readouterr().out


def group(prompt: int, *responses: int) -> Group:
    made = [Response(np.zeros(length, np.int32)) for length in responses]
    return Group(np.zeros(prompt, np.int32), made, keep_together=True)


def test_rows_are_as_long_as_leaves_them_full(config, tmp_path, opened):
    """Pairs behind prompts of 64 tokens: all as long as the longest, and of 16 to 128 tokens a
    side."""
    config.mesh.fsdp = 1
    session, draw = opened(config, tmp_path), np.random.default_rng(0).integers
    batches = [[group(64, *draw(16, 129, 2)) for _ in range(64)] for _ in range(8)]
    varying = choose_row_length(session, 320, batches[:4])
    assert 320 <= varying <= CPU_TOKENS
    filled = [pack_rows(session, batch, RowShape(varying, 64)) for batch in batches[4:]]
    assert (
        min(packed.used / (packed.count * packed.arrays["tokens"][0].size) for packed in filled)
        > 0.9
    )
    alike = [group(64, 128, 128)] * 8
    packed = pack_rows(session, alike, RowShape(choose_row_length(session, 320, [alike]), 8))
    assert packed.used == packed.count * packed.arrays["tokens"][0].size


def test_a_kernel_of_another_platform_is_refused(config, tmp_path, opened):
    config.compute.attention = "splash"
    with pytest.raises(ValueError, match="attention is 'splash', but that kernel needs a TPU"):
        opened(config, tmp_path, names=[])


def test_what_adapters_stand_beside(config, tmp_path, opened):
    """The model of "hf:", also where a path has an @ in it, and where the run it was taken from is
    gone."""
    shape = opened(config, tmp_path / "shape").model_config
    other = hf.save(decoder.init(shape, jax.random.key(9)), tmp_path / "model@main")
    config.lora.rank = 2
    config.stages.warmup.policy = f"hf:{other}"
    session = opened(config, tmp_path / "first@here")
    expected = hf.load(other).blocks.down[...]
    np.testing.assert_array_equal(
        frozen_params(session, base_of(session, "warmup").policy).blocks.down[...], expected
    )
    assert base_of(session, "dpo") == base_of(session, "warmup@3") == (
        f"hf:{other}",
        "",
    ) and base_of(session, "sft") == ("init", "")
    storage.write_json(tmp_path / "first@here" / "config.json", {"config": to_dict(config)})

    config.stages.warmup.policy = f"run:{tmp_path / 'first@here'}#dpo@2"
    second = opened(config, tmp_path / "second")
    assert base_of(second, "dpo").policy == f"hf:{other}"
    storage.write_json(second.folders["warmup"] / "base.json", base_of(second, "warmup"))
    (tmp_path / "first@here" / "config.json").unlink()
    assert base_of(second, "dpo").policy == f"hf:{other}"
    with pytest.raises(ValueError, match="no longer holds a run"):
        base_of(opened(config, tmp_path / "third"), "dpo")


def test_a_policy_that_is_another_model_is_refused_before_any_work(config, tmp_path, opened):
    """By its config.json and the headers of its weights, by dry runs too. The length that it is
    made for may differ: nothing is computed with it."""
    shape = opened(config, tmp_path / "shape").model_config
    other = hf.save(decoder.init(shape, jax.random.key(9)), tmp_path / "other")
    own = storage.read_json(other / "config.json")
    config.stages.evaluate.policies = ("init", f"hf:{other}")

    storage.write_json(other / "config.json", {**own, "max_position_embeddings": 64})
    session = opened(config, tmp_path / "longer", names=["evaluate"])
    assert load_policy(session, f"hf:{other}").config == shape

    changed = {**own, "rms_norm_eps": 1e-5, "rope_parameters": None, "rope_theta": 5e5}
    storage.write_json(other / "config.json", changed)
    message = (
        r"stages\.evaluate\.policies cannot be used: policy 'hf:.*' has another shape than this run's model: "
        r"rope_theta 500000\.0 \(the run's: 10000\.0\), rms_norm_eps 1e-05 \(the run's: 1e-06\)$"
    )
    with pytest.raises(ValueError, match=message):
        dryrun.show(config)

    storage.write_json(other / "config.json", own)
    (other / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"^stages\.evaluate\.policies .* has neither model\.s"):
        opened(config, tmp_path / "none", names=["evaluate"])


def test_the_model_behind_another_run_s_policy(config, tmp_path, opened):
    """Without adapters it may be another one than this run's."""
    theirs = to_dict(config)
    theirs["model"]["path"] = "org/instruct"
    storage.write_json(tmp_path / "theirs" / "config.json", {"config": theirs})
    config.stages.warmup.policy = f"run:{tmp_path / 'theirs'}#warmup"
    assert base_path(opened(config, tmp_path / "ours"), "dpo") == "org/instruct"
    config.lora.rank = 2
    with pytest.raises(ValueError, match="its adapters belong to another model than this run's"):
        base_path(opened(config, tmp_path / "ours"), "dpo")


def test_adapters_name_the_revision_of_the_run_s_model_alone(config, tmp_path):
    config.model.path, config.model.revision = "org/model", "abc123"
    run = Run(config=Config.of(config), workdir=epath.Path(tmp_path), folders={}, tracker=None)
    assert base_revision(run, "dpo") == "abc123"
    assert base_revision(run, "hf:org/other") is None


def test_a_reference_in_the_type_of_activations_gives_the_bits_of_the_policy(
    config, tmp_path, opened
):
    config.dtype = "bfloat16"
    session = opened(config, tmp_path)
    policy, reference = load_policy(session, "init"), load_reference(session, "init")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(reference)} == {"bfloat16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(policy)} == {"float32"}
    draw = np.random.default_rng(0).integers
    words = session.model_config.vocab_size
    some = [
        Group(draw(0, words, 9), [Response(draw(0, words, n)) for n in (5, 12)]) for _ in range(6)
    ]
    scorer = Scorer(session, RowShape(32, 6))
    expected, scored = (
        np.concatenate(list(itertools.chain.from_iterable(scorer(params, some, Cost()))))
        for params in (policy, reference)
    )
    assert np.abs(expected).max() > 1
    np.testing.assert_array_equal(scored, expected)
    config.lora.update(rank=2, base_dtype="bfloat16")
    session = opened(config, tmp_path)
    bases = (
        params.blocks.q.get_value()
        for params in (load_policy(session, "init"), load_reference(session, "init"))
    )
    assert next(bases) is next(bases)  # what stands beside adapters is shared


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_dev_goes_without_the_problems_of_test(config, tmp_path, opened, capsys):
    """Else `best_checkpoint` chooses on what `evaluate` measures."""
    rows = [{"problem": f"{n}+1", "answer": str(n + 1)} for n in range(1, 7)]
    splits = {"train": rows, "dev": rows[:4], "test": rows[2:5]}
    for split, some in splits.items():
        config.data[split] = settings.source(write(tmp_path / f"{split}.jsonl", *some))
    found = {
        split: [p.prompt for p in problems]
        for split, problems in opened(config, tmp_path).problems.by_split.items()
    }
    assert found == {"train": ["6+1"], "dev": ["1+1", "2+1"], "test": ["3+1", "4+1", "5+1"]}
    said = capsys.readouterr().out
    assert "dev: 2 problems dropped: also in test" in said
    assert "train: 5 problems dropped: also in dev or test" in said
    config.data.dev = config.data.test
    with pytest.raises(
        ValueError,
        match=r"data\.dev has no problem left: all 3 occur in data\.test\. Give .*data\.dev\.split=\"dev\"",
    ):
        opened(config, tmp_path)


def test_revisions_reach_the_loader(config, tmp_path, opened):
    config.stages.sft.data.revision = "v1"
    session = opened(config, tmp_path)
    with pytest.raises(
        ValueError, match="revision is 'v1', but 'procedural:chains' is not on the hub"
    ):
        sft.examples(session, "sft", session.config.stage("sft", Sft))
    config.data.dev.revision = "v2"
    with pytest.raises(ValueError, match="revision is 'v2', but"):
        opened(config, tmp_path)


def test_it_is_said_which_examples_are_not_used(config, tmp_path, opened, capsys):
    asked = opened(config, tmp_path).problems.by_split["test"][2].prompt
    system = {"role": "system", "content": "Be brief."}
    reply = {"role": "assistant", "content": "1"}
    rows = [
        {"prompt": "1+1=", "completion": "2"},
        {"prompt": "1+1=", "completion": "2"},
        {"promt": "1+2=", "completion": "3"},
        {"messages": [system, {"role": "user", "content": asked}, reply]},
    ]
    file = tmp_path / "examples.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config.stages.sft.data.update(path=str(file), on_error="skip", limit=None)
    session = opened(config, tmp_path)
    found, counts, _ = sft.examples(session, "sft", session.config.stage("sft", Sft))
    assert len(found) == 1
    left_out = {"duplicates": 1, "broken": 1, "overlap": 1, "too_long": 0, "unclosed": 0}
    assert counts == {"examples": 1, **left_out}
    said = " ".join(capsys.readouterr().out.split())
    for line in (
        f"stages.sft.data: 1 duplicate row of {file} dropped",
        f"stages.sft.data: rows of {file} left out: 1 broken (the first: {file}, line 3: needs",
        "stages.sft.data: 1 example dropped: their prompts are problems of dev or test",
    ):
        assert line in said


def test_a_stage_of_another_name_is_named(config, tmp_path, opened):
    config.stages.sft.max_length = 2
    session = opened(config, tmp_path)
    with pytest.raises(ValueError, match=r"stages\.cold\.data has no example that fits"):
        sft.examples(session, "cold", session.config.stage("sft", Sft))


def test_rollouts_from_elsewhere_are_graded_behind_the_thought_that_the_template_opens(
    config, tmp_path, opened
):
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=257, initial_alphabet=alphabet, special_tokens=["<|end|>"]
    )
    backend.train_from_iterator([], trainer)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>").save_pretrained(
        tmp_path / "tokenizer"
    )
    config.tokenizer.update(
        path=str(tmp_path / "tokenizer"), prompt_template="{problem}\n<think>\n"
    )
    config.data.max_prompt_length = 64
    config.reward.function = "verify"
    completions = (r"\boxed{2}", r"hm</think>\boxed{2}", r"\boxed{2}</think>\boxed{3}")
    rows = [{"prompt": "1+1=?", "completion": text, "answer": "2"} for text in completions]
    session = opened(config, tmp_path / "work", None)
    _, (group,) = external_groups(
        session,
        Dump(path=write(tmp_path / "rows.jsonl", *rows)),
        session.workdir / "rollouts.parquet",
    )
    assert [row.score.verdict for row in group] == [
        Verdict.NO_ANSWER,
        Verdict.CORRECT,
        Verdict.INCORRECT,
    ]
    assert [row.text for row in group] == list(completions)


def test_dumps_behind_a_template_whose_bos_begins_every_turn(config, tmp_path, opened):
    """SmolLM2's: its own system block is taken out, and no second BOS stays in front of the user's
    turn."""
    template, bos, eos, _ = PUBLISHED["SmolLM2"]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=258, initial_alphabet=alphabet, special_tokens=[bos, eos]
    )
    backend.train_from_iterator([], trainer)
    pretrained = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos)
    pretrained.chat_template = template
    pretrained.save_pretrained(tmp_path / "tokenizer")
    config.tokenizer.path = str(tmp_path / "tokenizer")
    config.data.max_prompt_length = 128
    session = opened(config, tmp_path / "work")
    problem = session.problems.train[0]
    shown = f"{bos}user\n{problem.prompt}{eos}\n{bos}assistant\n"
    rows = [{"rendered_prompt": shown, "completion": text, "reward": 1.0} for text in ("12", "3")]
    draws, _ = external_groups(
        session,
        Dump(path=write(tmp_path / "rows.jsonl", *rows)),
        session.workdir / "rollouts.parquet",
    )
    assert draws == [(problem, 0)]


def test_what_training_holds_while_it_samples(config, opened, tmp_path):
    """Parameters, two moments, and a reference where the loss of an online stage compares: 4 bytes
    each."""
    session = opened(config, tmp_path)
    devices = session.sampling.devices
    assert devices.state_bytes(Online()) == 0  # a CPU tells of no memory
    devices = replace(devices, machine=replace(devices.machine, memory=10**9))
    trained = count_trained(session.model_config)
    assert devices.state_bytes(Online()) == 12 * trained == devices.state_bytes(Offline())
    assert devices.state_bytes(Online(loss="dpo")) == 16 * trained
    small = Online(loss="dpo", reference_sync=True, optimizer=Optimizer(moment_dtype="bfloat16"))
    assert devices.state_bytes(small) == 8 * trained
    assert devices.state_bytes(Collect()) == 0


def test_the_base_of_adapters_lies_beside_the_sampler_in_every_stage(config, opened, tmp_path):
    config.lora.rank = 2
    session = opened(config, tmp_path)
    devices = session.sampling.devices
    devices = replace(devices, machine=replace(devices.machine, memory=10**9))
    frozen = 4 * (count_params(session.model_config) - count_trained(session.model_config))
    assert devices.state_bytes(Collect()) == frozen > 0
    assert devices.state_bytes(Online()) == frozen + 12 * count_trained(session.model_config)


def test_all_that_is_wrong_with_the_inputs_is_told_at_once(config, opened, tmp_path):
    """And not what follows from another: problems are read with the tokenizer."""
    config.mesh.tensor, config.data.dev.revision = 3, "v2"
    with pytest.raises(settings.Invalid) as both:
        opened(config, tmp_path, names=[])
    assert [issue.path for issue in both.value.issues] == ["mesh", "data.dev"]
    config.tokenizer.path = str(tmp_path / "none")
    with pytest.raises(settings.Invalid) as first:
        opened(config, tmp_path, names=[])
    assert [issue.path for issue in first.value.issues] == ["tokenizer", "mesh"]
