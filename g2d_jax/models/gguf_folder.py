"""A GGUF file (runtime/gguf_file.py) as a Hugging Face model folder: its config.json and tensors,
by Hugging Face's names and in its layout.

What llama.cpp's converter changes is undone when rows are read: where it pairs the halves of
rotary embeddings otherwise, the rows of queries and keys; where norms multiply by 1 + weight, the 1
that it adds. Weights come as float32 from whatever they are stored as.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from etils import epath

from g2d_jax.models.attention import inverse_frequencies
from g2d_jax.models.config import FAMILIES, FULL, SLIDING, Llama3Rope
from g2d_jax.models.hf_config import MAX_LAYERS, config_from_hf
from g2d_jax.models.safetensors_file import Stored
from g2d_jax.runtime import gguf_file, storage
from g2d_jax.runtime.gguf_file import Gguf, Tensor

_LINEAR = {
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in ("q", "k", "v")},
    "attn_output": "self_attn.o_proj",
    **{f"attn_{name}_norm": f"self_attn.{name}_norm" for name in ("q", "k")},
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
_PRE_NORM = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_GEMMA_NORM = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class _Architecture:
    """One of GGUF's architectures. family: Hugging Face's model_type. norms: of a layer, GGUF's
    name -> Hugging Face's. permuted: rows of queries and keys are in llama.cpp's order."""

    family: str
    norms: Mapping[str, str] = field(default_factory=lambda: _PRE_NORM)
    permuted: bool = False


_ARCHITECTURES = {
    "llama": _Architecture("llama", permuted=True),
    "qwen2": _Architecture("qwen2"),
    "qwen3": _Architecture("qwen3"),
    "gemma3": _Architecture("gemma3_text", _GEMMA_NORM),
    "smollm3": _Architecture("smollm3", permuted=True),
}

_KNOWN = {
    *("context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size"),
    *("attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon"),
    *("attention.key_length", "attention.value_length"),
    *("attention.key_length_swa", "attention.value_length_swa"),
    *("attention.sliding_window", "attention.sliding_window_pattern"),
    *("rope.dimension_count", "rope.dimension_count_swa", "rope.freq_base", "rope.freq_base_swa"),
    *("rope.scale_linear", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.finetuned"),
    *("rope.scaling.original_context_length", "rope.scaling.attn_factor"),
    *("rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
    *("expert_count", "expert_used_count", "tensor_data_layout"),
}
"""The entries of an architecture that are understood: another may change the arithmetic."""

_GEMMA_27B_LAYERS = 62  # by which llama.cpp knows that model, whose scores are scaled otherwise


def read_config(path: storage.PathLike) -> dict[str, Any]:
    """Return the config.json of a file's model.

    Raises ValueError naming the file, and the entry, for an architecture that is not one of
    _ARCHITECTURES, for what would change the arithmetic and is not built here, and for entries that
    are missing or misformed.
    """
    return _Reader(gguf_file.read(path)).config()


def read_headers(path: storage.PathLike) -> dict[str, Stored]:
    """Map each tensor's name to its place; those that are not known keep their names in the
    file."""
    file = gguf_file.read(path)
    kind = _architecture(file)
    heads = {}
    if kind.permuted:
        reader = _Reader(file)
        heads = {"attn_q": reader.heads, "attn_k": reader.kv_heads}
    found: dict[str, Stored] = {}
    for name, tensor in file.tensors.items():
        if name == _ROPE_FACTORS:  # read_config has them
            continue
        part = name.split(".")[-2:][0]
        shift = 0.0
        if FAMILIES[kind.family].unit_offset and part.endswith("norm"):
            shift = 1.0
        found[_hf_name(name, kind)] = Blocks(
            epath.Path(file.path),
            tensor.shape,
            "F32",
            tensor.start,
            tensor=tensor,
            heads=heads.get(part, 0),
            shift=shift,
        )
    return found


@dataclass(frozen=True)
class Blocks(Stored):
    """A tensor of a GGUF file, whose rows are read as float32. heads: those whose rows are in
    llama.cpp's order, 0 where they are not. shift: what was added to its numbers."""

    tensor: Tensor = field(kw_only=True)
    heads: int = field(kw_only=True, default=0)
    shift: float = field(kw_only=True, default=0.0)

    @property
    def encoding(self) -> str:
        """GGML's name of the type that it is stored as."""
        return self.tensor.kind

    @property
    def nbytes(self) -> int:
        """The bytes that it takes in the file."""
        return self.tensor.length

    def rows(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Read rows [start, stop), all by default, in Hugging Face's layout."""
        stop = self.shape[0] if stop is None else stop
        if not self.heads:
            numbers = gguf_file.read_rows(self.file, self.tensor, start, stop)
            if self.shift:
                numbers -= np.float32(self.shift)
            return numbers
        whole = gguf_file.read_rows(self.file, self.tensor, 0, self.shape[0])
        # [heads, half, two, …] in the file: the two numbers that turn together lie side by side.
        pairs = whole.reshape(self.heads, -1, 2, *self.shape[1:])
        return pairs.swapaxes(1, 2).reshape(self.shape)[start:stop]


def _architecture(file: Gguf) -> _Architecture:
    name = file.need("general.architecture", str)
    if name not in _ARCHITECTURES:
        raise ValueError(
            f"{file.path}: general.architecture {name!r:.100} is not supported; supported are "
            f"{', '.join(_ARCHITECTURES)} (Llama, SmolLM2 and Mistral are llama)"
        )
    return _ARCHITECTURES[name]


def _hf_name(name: str, kind: _Architecture) -> str:
    """Return Hugging Face's name of a tensor, the same where it is not known."""
    if name in _OUTER:
        return _OUTER[name]
    known = {**_LINEAR, **kind.norms}
    block, _, rest = name.partition(".")
    layer, _, rest = rest.partition(".")
    part, _, what = rest.partition(".")
    if block != "blk" or part not in known:
        return name
    return f"model.layers.{layer}.{known[part]}.{what}"


class _Reader:
    """The entries of a file's architecture."""

    def __init__(self, file: Gguf) -> None:
        self.file = file
        self.kind = _architecture(file)
        self.prefix = f"{file.metadata['general.architecture']}."
        self.heads = self.size("attention.head_count")
        self.kv_heads = self.size("attention.head_count_kv", self.heads)

    def refuse(self, name: str, reason: str) -> ValueError:
        """Return the error for one of the entries."""
        return ValueError(f"{self.file.path}: {self.prefix}{name} {reason}")

    def value(self, name: str) -> Any:
        """Return an entry, None where there is none; of a list of equal numbers the number."""
        value = self.file.metadata.get(self.prefix + name)
        if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
            value = value[0].item()
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """Return a positive integer."""
        value = self.value(name)
        if value is None:
            value = default
        if type(value) is not int or value < 1:
            raise self.refuse(name, f"must be a positive integer, got {value!r:.100}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive number, as it was written before it was rounded to 32 bits."""
        value = self.value(name)
        if value is None:
            value = default
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise self.refuse(name, f"must be a positive number, got {value!r:.100}")
        return float(str(np.float32(value)))

    def config(self) -> dict[str, Any]:
        """Return the config.json."""
        self.refuse_unknown()
        family, tensors = self.kind.family, self.file.tensors
        if "token_embd.weight" not in tensors:
            raise ValueError(f"{self.file.path} has no tensor token_embd.weight")
        hidden = self.size("embedding_length")
        head_dim = self.size("attention.key_length", hidden // self.heads)
        for name in ("attention.value_length", "rope.dimension_count"):
            for each in (name, f"{name}_swa"):
                if self.size(each, head_dim) != head_dim:
                    raise self.refuse(
                        each, f"differs from the length of keys, {head_dim}: not supported"
                    )
        layers = self.size("block_count")
        if layers > MAX_LAYERS:
            raise self.refuse("block_count", f"{layers} is more than {MAX_LAYERS}")
        config: dict[str, Any] = {
            "model_type": family,
            "vocab_size": tensors["token_embd.weight"].shape[0],
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": head_dim,
            "intermediate_size": self.size("feed_forward_length"),
            "max_position_embeddings": self.size("context_length"),
            "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon"),
            "rope_theta": self.number("rope.freq_base", 10_000.0),
            "tie_word_embeddings": "output.weight" not in tensors,
        }
        if "attention_bias" in FAMILIES[family].stated:
            config["attention_bias"] = "blk.0.attn_q.bias" in tensors
        if family == "gemma3_text":
            config |= self.gemma(hidden, head_dim, layers)
        elif self.value("attention.sliding_window"):
            raise self.refuse("attention.sliding_window", "is supported in gemma3 alone")
        scaling = self.rope_scaling() or self.llama3_scaling(config)
        if scaling:
            config["rope_scaling"] = scaling
        return config

    def refuse_unknown(self) -> None:
        """Raise ValueError for an entry that is not understood, and for experts."""
        for name in self.file.metadata:
            entry = name.removeprefix(self.prefix)
            if name.startswith(self.prefix) and entry not in _KNOWN:
                raise self.refuse(entry, "is not supported: it may change the arithmetic")
        if self.value("expert_count"):
            raise self.refuse("expert_count", "is not 0: mixtures of experts are not supported")

    def gemma(self, hidden: int, head_dim: int, layers: int) -> dict[str, Any]:
        """Return the fields of Gemma 3 alone. What its files leave out llama.cpp knows by itself:
        every sixth layer is without a window, and how the largest model scales scores."""
        scalar = head_dim
        if layers == _GEMMA_27B_LAYERS:
            scalar = hidden // self.heads
        window = self.value("attention.sliding_window")
        if not window:
            return {"query_pre_attn_scalar": scalar, "layer_types": [FULL] * layers}
        fields: dict[str, Any] = {
            "query_pre_attn_scalar": scalar,
            "sliding_window": self.size("attention.sliding_window"),
            "rope_local_base_freq": self.number("rope.freq_base_swa", 10_000.0),
        }
        name = "attention.sliding_window_pattern"
        flags = self.file.metadata.get(self.prefix + name)
        if isinstance(flags, np.ndarray) and len(flags) == layers:
            fields["layer_types"] = [SLIDING if flag else FULL for flag in flags.tolist()]
        else:
            fields["sliding_window_pattern"] = self.size(name, 6)
        return fields

    def rope_scaling(self) -> dict[str, Any] | None:
        """Return the scaling of rotary embeddings that the entries state."""
        factor = self.number("rope.scaling.factor", self.number("rope.scale_linear", 1.0))
        kind = self.file.get(f"{self.prefix}rope.scaling.type", str, "linear")
        if kind == "none" or (kind == "linear" and factor == 1):
            return None
        if kind == "linear":
            return {"rope_type": "linear", "factor": factor}
        if kind != "yarn":
            raise self.refuse("rope.scaling.type", f"{kind!r:.100} is not supported")
        for name in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
            if self.number(f"rope.scaling.{name}", 1.0) != 1:
                raise self.refuse(f"rope.scaling.{name}", "other than 1 is not supported")
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": self.size("rope.scaling.original_context_length"),
            "beta_fast": self.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": self.number("rope.scaling.yarn_beta_slow", 1.0),
        }

    def llama3_scaling(self, config: dict[str, Any]) -> dict[str, Any] | None:
        """Return the scaling of Llama 3.1 and later that the file's factors come from.

        It has them alone, one for each frequency, and not the numbers that they were made of: only
        the factor differs between models, so they are made again and compared.
        """
        tensor = self.file.tensors.get(_ROPE_FACTORS)
        if tensor is None:
            return None
        if tensor.shape != (config["head_dim"] // 2,):
            raise ValueError(f"{self.file.path}: {_ROPE_FACTORS} has the shape {tensor.shape}")
        factors = gguf_file.read_rows(self.file.path, tensor, 0, tensor.shape[0])
        largest = float(factors.max())
        if (factors == 1).all():
            return None
        scaling = {
            "rope_type": Llama3Rope.rope_type,
            "factor": largest,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        if 1 < largest < float("inf"):
            plain = np.asarray(inverse_frequencies(config_from_hf(config)))
            scaled = inverse_frequencies(config_from_hf({**config, "rope_scaling": scaling}))
            if np.allclose(plain / np.asarray(scaled), factors, rtol=1e-4, atol=0):
                return scaling
        raise ValueError(
            f"{self.file.path}: {_ROPE_FACTORS} scales rotary embeddings otherwise than Llama 3.1 "
            "and 3.2 do (8192 positions, low_freq_factor 1, high_freq_factor 4): not supported"
        )
