"""Loading and saving Hugging Face folders: parity with transformers both ways, and damaged files
named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain import logits
from safetensors.numpy import load_file, save_file

from g2d_jax.models import decoder, hf
from g2d_jax.records import Request, SamplingParams
from g2d_jax.runtime import mesh as meshes
from g2d_jax.sampler.engine import Sampler


def transformers_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


def assert_same_parameters(one: decoder.Decoder, two: decoder.Decoder) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, two)


def test_loaded_logits_equal_transformers(reference: Any) -> None:
    model = hf.load(reference.folder)
    assert np.abs(reference.logits).max() > 1  # the comparison is of more than noise
    found = jax.jit(logits)(model, reference.tokens)
    np.testing.assert_allclose(found, reference.logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "name",
    [
        "gemma3",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "olmo2",
                "granite",
                "seed_oss",
                "ministral3",
                "phi3",
                "qwen3_5",
                "qwen3_moe",
            )
        ),
    ],
)
def test_greedy_answers_are_those_of_transformers(references: dict[str, Any], name: str) -> None:
    torch = pytest.importorskip("torch")
    reference, devices = references[name], jax.devices()[:1]
    model = hf.load(reference.folder)
    prompts = reference.tokens[:, :7]
    answers = torch.tensor(reference.tokens[:, :7].astype(np.int64))
    with torch.no_grad():
        for _ in range(24):
            following = reference.model(answers).logits[:, -1:].argmax(-1)
            answers = torch.cat([answers, following], dim=1)
    greedy = SamplingParams(24, temperature=0.0)
    requests = [Request(str(row), prompt, greedy) for row, prompt in enumerate(prompts)]
    sampler = Sampler(
        model.config,
        meshes.make_mesh(devices=devices),
        seed=0,
        max_num_seqs=2,
        chunk=8,
        prefill_rows=2,
    )
    rollouts = sorted(
        sampler.generate(sampler.to_sampler_params(model), requests, "test"),
        key=lambda rollout: rollout.problem_id,
    )
    np.testing.assert_array_equal([rollout.token_ids for rollout in rollouts], answers[:, 7:])


def test_exported_weights_reload_in_transformers(reference: Any, tmp_path: Path) -> None:
    model = hf.load(reference.folder)
    hf.save(model, tmp_path / "export", eos_ids=[3, 5], bos_id=1, pad_id=0)
    np.testing.assert_allclose(
        transformers_logits(tmp_path / "export", reference.tokens),
        reference.logits,
        atol=1e-6,
        rtol=0,
    )
    written = json.loads((tmp_path / "export/generation_config.json").read_text())
    assert written == {"eos_token_id": [3, 5], "bos_token_id": 1, "pad_token_id": 0}
    assert_same_parameters(hf.load(tmp_path / "export"), model)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "export").iterdir()}
    assert len(modes) == 1  # weights are as readable as config.json


@pytest.mark.slow
def test_another_family_is_that_of_transformers(another: Any, tmp_path: Path) -> None:
    test_loaded_logits_equal_transformers(another)
    test_exported_weights_reload_in_transformers(another, tmp_path)


def test_sharded_export_is_split_indexed_and_equal(
    references: dict[str, Any], tmp_path: Path
) -> None:
    reference = references["llama3"]
    model = hf.load(reference.folder)
    hf.save(model, tmp_path / "export", max_shard_bytes=60_000)
    shards = sorted(path.name for path in (tmp_path / "export").glob("*.safetensors"))
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert all(path.stat().st_size < 64_000 for path in (tmp_path / "export").glob("*.safetensors"))
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * decoder.count_params(model.config)
    assert_same_parameters(hf.load(tmp_path / "export"), model)


def test_sharded_file_of_transformers_loads(references: dict[str, Any], tmp_path: Path) -> None:
    reference = references["qwen3"]
    reference.model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert_same_parameters(hf.load(tmp_path), hf.load(reference.folder))


def test_bfloat16_file_gives_the_rounded_weights(
    references: dict[str, Any], tmp_path: Path
) -> None:
    model = hf.load(references["qwen2-tied"].folder)
    hf.save(model, tmp_path / "export", dtype="bfloat16")
    assert {
        array.dtype.name for array in load_file(tmp_path / "export/model.safetensors").values()
    } == {"bfloat16"}
    rounded = jax.tree.map(lambda x: np.asarray(x).astype(jnp.bfloat16), model)
    assert_same_parameters(hf.load(tmp_path / "export", dtype=jnp.bfloat16), rounded)
    assert_same_parameters(
        hf.load(tmp_path / "export"), jax.tree.map(lambda x: x.astype(np.float32), rounded)
    )


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *(
            pytest.param(name, {"fsdp": 2, "tensor": 2, "data": -1}, marks=pytest.mark.slow)
            for name in ("qwen3_5", "qwen3_moe")
        ),
        ("qwen3", {"fsdp": 1, "tensor": -1}),  # two KV heads on more devices: replicated
    ],
)
def test_load_onto_a_mesh_and_save_from_it(
    references: dict[str, Any], name: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    mesh = meshes.make_mesh(**sizes)
    plain = hf.load(references[name].folder)
    model = hf.load(references[name].folder, mesh=mesh)
    assert_same_parameters(model, plain)
    wanted = decoder.shardings(model.config, mesh)
    for array, sharding in zip(jax.tree.leaves(model), jax.tree.leaves(wanted), strict=True):
        assert array.sharding == sharding
    hf.save(model, tmp_path / "export")
    assert_same_parameters(hf.load(tmp_path / "export"), plain)


@pytest.mark.parametrize(
    ("prefix", "images"),
    [("language_model.", "vision_tower."), ("model.language_model.", "model.vision_tower.")],
)
def test_the_language_model_of_a_model_with_images_is_read_alone(
    references: dict[str, Any], prefix: str, images: str, tmp_path: Path
) -> None:
    """Under the names of both kinds of transformers' versions; an export has no images."""
    reference = references["gemma3"]
    tensors = load_file(reference.folder / "model.safetensors")
    renamed = {images + "head.probe": np.zeros(3, np.float32)}
    for name, tensor in tensors.items():
        renamed[prefix + (name.removeprefix("model.") if "model." in prefix[:6] else name)] = tensor
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    text = json.loads((reference.folder / "config.json").read_text())
    whole = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    model = hf.load(tmp_path)
    assert hf.has_images(tmp_path) and not hf.has_images(reference.folder)
    assert_same_parameters(model, hf.load(reference.folder))
    hf.save(model, tmp_path / "export")
    written = json.loads((tmp_path / "export/config.json").read_text())
    assert (written["model_type"], written["architectures"]) == (
        "gemma3_text",
        ["Gemma3ForCausalLM"],
    )
    assert set(load_file(tmp_path / "export/model.safetensors")) == set(tensors)


def damaged(reference: Any, folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> Path:
    shutil.copytree(reference.folder, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (
            "model.layers.1.mlp.up_proj.weight",
            None,
            r"missing: model\.layers\.1\.mlp\.up_proj\.weight",
        ),
        ("lm_head.weight", None, r"missing: lm_head\.weight"),
        (
            "model.layers.0.self_attn.q_proj.bias",
            np.zeros(48, np.float32),
            r"architecture: .*0\.self_attn\.q_proj\.bias",
        ),
        (
            "model.norm.weight",
            np.zeros(47, np.float32),
            r"norm\.weight in model\.safetensors: \[47\], expected \[48\]",
        ),
        (
            "model.norm.weight",
            np.zeros(48, np.int8),
            r"unsupported dtype .*model\.norm\.weight: I8",
        ),
    ],
)
def test_wrong_tensor_is_named(
    references: dict[str, Any], tmp_path: Path, name: str, tensor: np.ndarray | None, message: str
) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors.pop(name, None)
        tensors.update({} if tensor is None else {name: tensor})

    with pytest.raises(ValueError, match=message):
        hf.load(damaged(references["llama3"], tmp_path / "model", change))


def test_truncated_file_names_the_tensor(references: dict[str, Any], tmp_path: Path) -> None:
    folder = shutil.copytree(references["llama3"].folder, tmp_path / "model")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-4])
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
    last = max(header, key=lambda name: header[name].get("data_offsets", [0, 0])[1])
    with pytest.raises(ValueError, match=f"truncated: tensor {last}"):
        hf.load(folder)
    for content in (b"", whole[:100], b"\xff" * 64, (10**6).to_bytes(8, "little") + b"[" * 10**6):
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match="not a readable safetensors file"):
            hf.load(folder)


def test_harmless_extras_are_ignored(references: dict[str, Any], tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(6, np.float32)}
    folder = damaged(references["llama3"], tmp_path / "model", lambda t: t.update(extra))
    assert_same_parameters(hf.load(folder), hf.load(references["llama3"].folder))


def test_tied_model_with_a_head_in_the_file(references: dict[str, Any], tmp_path: Path) -> None:
    reference = references["qwen2-tied"]

    def repeat(tensors: dict[str, np.ndarray]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    def another(tensors: dict[str, np.ndarray]) -> None:
        repeat(tensors)
        tensors["lm_head.weight"][-1, -1] += 1

    assert_same_parameters(
        hf.load(damaged(reference, tmp_path / "same", repeat)), hf.load(reference.folder)
    )
    with pytest.raises(
        ValueError, match=r"lm_head\.weight differs .* set tie_word_embeddings to false"
    ):
        hf.load(damaged(reference, tmp_path / "other", another))


@pytest.mark.parametrize("name", ["llama3", "qwen2-tied"])
@pytest.mark.parametrize("what", ["its head alone", "its body alone", "both"])
def test_other_names_of_the_same_tensors_are_read(
    references: dict[str, Any], tmp_path: Path, name: str, what: str
) -> None:
    reference = references[name]

    def change(tensors: dict[str, np.ndarray]) -> None:
        if what != "its body alone":
            tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
        if what != "its head alone":
            for whole in list(tensors):
                tensors[whole.removeprefix("model.")] = tensors.pop(whole)

    folder = damaged(reference, tmp_path / "model", change)
    if name == "qwen2-tied" or what == "its body alone":
        assert_same_parameters(hf.load(folder), hf.load(reference.folder))
        return
    with pytest.raises(ValueError, match=r"missing: model\.embed_tokens\.weight"):
        hf.load(folder)


def test_missing_shard_and_escaping_index_are_refused(
    references: dict[str, Any], tmp_path: Path
) -> None:
    hf.save(hf.load(references["llama3"].folder), tmp_path / "model", max_shard_bytes=60_000)
    index = tmp_path / "model" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    second = content["weight_map"]["model.layers.0.mlp.down_proj.weight"]
    (tmp_path / "model" / second).rename(tmp_path / "away.safetensors")
    with pytest.raises(ValueError, match=f"file {second} is missing; .* lists model"):
        hf.load(tmp_path / "model")
    content["weight_map"]["model.norm.weight"] = "../away.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="file names in the same folder"):
        hf.load(tmp_path / "model")


def test_an_index_that_is_wrong_names_tensor_and_shard(
    references: dict[str, Any], tmp_path: Path
) -> None:
    folder = hf.save(
        hf.load(references["llama3"].folder), tmp_path / "model", max_shard_bytes=60_000
    )
    content = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    first, last = min(content.values()), max(content.values())
    moved = next(name for name, file in content.items() if file == last)
    write = (folder / "model.safetensors.index.json").write_text
    write(json.dumps({"weight_map": {**content, moved: first}}))
    with pytest.raises(
        ValueError,
        match=rf"tensors missing: {moved} \(by model\.safetensors\.index\.json in {first}\)",
    ):
        hf.load(folder)
    write(
        json.dumps({"weight_map": {name: file for name, file in content.items() if file != last}})
    )
    with pytest.raises(
        ValueError, match=f"tensors missing: .*{moved}"
    ):  # no file is read that the index does not name
        hf.load(folder)
    write(json.dumps({"weight_map": content}))
    save_file({**load_file(folder / last), **load_file(folder / first)}, folder / last)
    with pytest.raises(ValueError, match=f"is in both .*{first} and .*{last}"):
        hf.load(folder)


def test_sampling_settings_of_a_folder(tmp_path: Path) -> None:
    assert hf.read_sampling(tmp_path) == {}
    settings = {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
    }
    others = {
        "repetition_penalty": 1.05,  # changes greedy answers too
        "eos_token_id": [151645, 151643],
        "min_p": None,
        "typical_p": "high",
        "transformers_version": "4",
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(settings | others))
    assert hf.read_sampling(tmp_path) == settings
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"generation_config\.json must contain a JSON object"):
        hf.read_sampling(tmp_path)


def test_pickled_weights_are_refused(references: dict[str, Any], tmp_path: Path) -> None:
    shutil.copy(references["llama3"].folder / "config.json", tmp_path)
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        hf.load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ValueError, match=r"pickled weights .* convert it"):
        hf.load(tmp_path)


def test_killed_export_does_not_look_complete(
    references: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hf.load(references["llama3"].folder)
    hf.save(model, tmp_path, max_shard_bytes=60_000)
    (tmp_path / "config.json").unlink()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("numpy.ascontiguousarray", killed)  # between the header and the first tensor
        with pytest.raises(KeyboardInterrupt):
            hf.save(model, tmp_path)
    with pytest.raises(ValueError, match=r"has no config\.json"):
        hf.load(tmp_path)
    hf.save(model, tmp_path)  # an unfinished export is taken up without asking
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    assert_same_parameters(hf.load(tmp_path), model)


def test_finished_model_is_not_overwritten_unasked(
    references: dict[str, Any], tmp_path: Path
) -> None:
    model = hf.load(references["llama3"].folder)
    hf.save(model, tmp_path, generation_entries={"temperature": 0.6})
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"temperature": 0.6}
    with pytest.raises(ValueError, match="already holds a model"):
        hf.save(model, tmp_path)
    with pytest.raises(ValueError, match="float32 or bfloat16, not float16"):
        hf.save(model, tmp_path / "new", dtype="float16")


def test_float16_file(references: dict[str, Any], tmp_path: Path) -> None:
    def halve(tensors: dict[str, np.ndarray]) -> None:
        tensors.update({name: array.astype(np.float16) for name, array in tensors.items()})

    folder = damaged(references["qwen3"], tmp_path / "model", halve)
    expected = jax.tree.map(
        lambda x: np.asarray(x).astype(np.float16).astype(np.float32),
        hf.load(references["qwen3"].folder),
    )
    assert_same_parameters(hf.load(folder), expected)


def test_resolve_takes_folders_and_refuses_other_names(tmp_path: Path) -> None:
    assert hf.resolve(tmp_path) == tmp_path
    for name in (
        "./missing/folder",
        "/no/such/folder",
        "~/no/such",
        "a/b/c",
        Path("org/name"),
        "model.safetensors",
    ):
        with pytest.raises(ValueError, match=r"model: there is no folder /"):
            hf.resolve(name)
    for name in ("just-a-name", "org/na me"):
        with pytest.raises(ValueError, match="neither an existing folder nor a hub id"):
            hf.resolve(name)


def test_resolve_without_network_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="on another machine and set the path"):
        hf.resolve("no-such-organisation/no-such-model")


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 12345\n"


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "generation_config.json"])
def test_a_pointer_of_git_lfs_is_named_as_one(
    file: str, references: dict[str, Any], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(references["llama3"].folder, tmp_path / "model"))
    (folder / file).write_bytes(POINTER)
    with pytest.raises(
        ValueError,
        match=rf"^{folder / file} is only Git LFS's pointer .*git lfs pull",
    ):
        hf.read_sampling(folder)
        hf.load(folder)


@pytest.mark.parametrize(
    ("prefix", "cause"),
    [
        ("_orig_mod.", "torch.compile"),
        ("model._orig_mod.", "torch.compile"),
        ("base_model.model.", r"PEFT's adapters in it: save the result of merge_and_unload\(\)"),
        ("module.", "DataParallel"),
    ],
)
def test_a_wrapper_that_tensors_are_called_after_is_named(
    prefix: str, cause: str, references: dict[str, Any], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(references["llama3"].folder, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {f"{prefix}{name}": array for name, array in tensors.items()}, folder / "model.safetensors"
    )
    with pytest.raises(
        ValueError, match=f"tensor {prefix}.* more are named after a model .*{cause}.*{prefix}"
    ):
        hf.load(folder)


@pytest.mark.parametrize("whole", [False, True], ids=["alone", "beside a model"])
@pytest.mark.parametrize("base", ["Qwen/Qwen2.5-0.5B", None])
def test_a_folder_of_adapters_says_what_to_do(
    base: str | None, whole: bool, tmp_path: Path
) -> None:
    """Beside a model too: transformers loads them into it."""
    if whole:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": base})
    )
    with pytest.raises(ValueError, match=rf"has adapters for {base!r}, .*merge_and_unload"):
        hf.load(tmp_path)
