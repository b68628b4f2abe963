"""config.json of transformers 4 and 5 read alike; what is not built is refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from g2d_jax.models.attention import inverse_frequencies
from g2d_jax.models.config import FULL, NO_WINDOW, SLIDING, LongRope, ModelConfig, YarnRope
from g2d_jax.models.hf_config import config_from_hf, config_to_hf
from g2d_jax.models.shapes import SHAPES

QWEN25_7B = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
    "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944,
    "max_position_embeddings": 131072, "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1", "use_cache": True, "use_mrope": False, "use_sliding_window": False,
    "vocab_size": 152064,
}  # fmt: skip
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
    "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
LLAMA31_8B = {
    "attention_bias": False, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "tie_word_embeddings": False, "vocab_size": 128256,
}  # fmt: skip

SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
    "eos_token_id": 0, "head_dim": 64, "hidden_act": "silu", "hidden_size": 576, "intermediate_size": 1536,
    "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 49152,
}  # fmt: skip
MISTRAL = {
    "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
    "vocab_size": 32768,
}  # fmt: skip
SMOLLM3 = {
    "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": None,
    "eos_token_id": 128012, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 11008,
    "layer_types": ["full_attention"] * 36, "max_position_embeddings": 65536, "max_window_layers": 28,
    "mlp_bias": False, "model_type": "smollm3", "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4, "pretraining_tp": 2,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None,
    "use_sliding_window": False, "vocab_size": 128256,
}  # fmt: skip
OLMO2 = {
    "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 100257,
    "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192,
    "max_position_embeddings": 4096, "model_type": "olmo2", "num_attention_heads": 16, "num_hidden_layers": 16,
    "num_key_value_heads": 16, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 500000,
    "tie_word_embeddings": False, "vocab_size": 100352,
}  # fmt: skip
OLMO3_7B = {
    "architectures": ["Olmo3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": 100257,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8, "max_position_embeddings": 65536,
    "model_type": "olmo3", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "pad_token_id": 100277, "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
        "original_max_position_embeddings": 8192, "rope_type": "yarn",
    },
    "rope_theta": 500000, "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 100278,
}  # fmt: skip
GEMMA3_1B = {
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
    "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
    "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text",
    "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1, "pad_token_id": 0,
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144,
}  # fmt: skip
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
    "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {
        "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
    },
}  # fmt: skip
PHI3_MINI = {
    "architectures": ["Phi3ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "embd_pdrop": 0.0,
    "eos_token_id": 32000, "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02,
    "intermediate_size": 8192, "max_position_embeddings": 4096, "model_type": "phi3", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32, "original_max_position_embeddings": 4096,
    "pad_token_id": 32000, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0,
    "sliding_window": 2047, "tie_word_embeddings": False, "vocab_size": 32064,
}  # fmt: skip
LONG = {"type": "longrope", "short_factor": [1.5] * 48, "long_factor": [3.0] * 48}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def as_transformers5(raw: dict[str, Any]) -> dict[str, Any]:
    raw = dict(raw)
    scaling = raw.pop("rope_scaling", None) or {"rope_type": "default"}
    rope = {**scaling, "rope_theta": raw.pop("rope_theta")}
    local = rope["rope_theta"] if raw["model_type"] == "olmo3" else None
    if theta := raw.pop("rope_local_base_freq", local):
        rope = {FULL: rope, SLIDING: {"rope_type": "default", "rope_theta": theta}}
    return {**raw, "rope_parameters": rope}


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        (QWEN25_7B, "Qwen2.5-7B"),
        (QWEN3_MOE, "Qwen3-30B-A3B"),
        (LLAMA31_8B, "Llama-3.1-8B"),
        (SMOLLM2_135M, "SmolLM2-135M"),
        (MISTRAL, "Mistral-7B-v0.3"),
        (SMOLLM3, "SmolLM3-3B"),
        (OLMO2, "OLMo-2-0425-1B"),
        (OLMO3_7B, "Olmo-3-7B"),
        (GEMMA3_1B, "gemma-3-1b"),
    ],
)
def test_published_configs_of_both_versions(raw: dict[str, Any], name: str) -> None:
    assert config_from_hf(raw) == SHAPES[name]
    assert config_from_hf(as_transformers5(raw)) == SHAPES[name]


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_goes_through_transformers_and_back(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    raw = config_to_hf(SHAPES[name], eos_ids=[2, 3], bos_id=1, dtype="bfloat16")
    config = transformers.AutoConfig.for_model(**raw)
    assert config_from_hf(raw) == SHAPES[name]
    assert config_from_hf(config.to_dict()) == SHAPES[name]
    assert (
        config_from_hf({**config.to_diff_dict(), "model_type": config.model_type}) == SHAPES[name]
    )
    assert (config.eos_token_id, config.bos_token_id, config.pad_token_id) == ([2, 3], 1, None)
    assert str(config.dtype).endswith("bfloat16")


def test_defaults_of_old_llama_files() -> None:
    raw = {
        k: v
        for k, v in LLAMA31_8B.items()
        if k not in ("num_key_value_heads", "rope_theta", "rope_scaling")
    }
    config = config_from_hf(raw)
    assert (config.num_key_value_heads, config.head_dim, config.rope_theta) == (32, 128, 10_000.0)


def test_layers_without_rope_by_interval() -> None:
    raw = {k: v for k, v in SMOLLM3.items() if not k.startswith("no_rope")}
    assert config_from_hf(raw) == SHAPES["SmolLM3-3B"]
    assert config_from_hf({**raw, "no_rope_layer_interval": 3}).no_rope_layers == (1, 1, 0) * 12
    with pytest.raises(
        ValueError,
        match=r"no_rope_layers must have 0 or 1 for each of 4 layers, got \(1, 1, 1, 0, 1",
    ):
        dataclasses.replace(SHAPES["SmolLM3-3B"], num_hidden_layers=4)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, YarnRope(4.0, 32_768, 1.138629436111989)),  # 0.1 ln 4 + 1
        # over 0.05 ln 4 + 1
        (
            {"mscale": 1.0, "mscale_all_dim": 0.5},
            YarnRope(4.0, 32_768, 1.0648211571),
        ),
        ({"factor": 0.5, "mscale": 2.0}, YarnRope(0.5, 32_768, 1.0)),
        (
            {"factor": None, "original_max_position_embeddings": 16_384},
            YarnRope(8.0, 16_384, 1.2079441541679836),
        ),
        (
            {"attention_factor": 1.5, "mscale": 1.0, "mscale_all_dim": 0.5},
            YarnRope(4.0, 32_768, 1.5),
        ),
        (
            {"original_max_position_embeddings": None, "beta_fast": 16},
            YarnRope(4.0, 131_072, 1.138629436111989, 16.0),
        ),
        (
            {"beta_slow": 2.0, "truncate": False},
            YarnRope(4.0, 32_768, 1.138629436111989, 32.0, 2.0, False),
        ),
    ],
)
def test_yarn(change: dict[str, Any], expected: YarnRope) -> None:
    rope = config_from_hf({**QWEN25_7B, "rope_scaling": {**YARN, **change}}).rope_scaling
    assert isinstance(rope, YarnRope)
    assert dataclasses.astuple(rope) == pytest.approx(dataclasses.astuple(expected))


@pytest.mark.parametrize(
    ("raw", "change", "window", "sliding"),
    [
        (MISTRAL, {"sliding_window": 4096}, 4096, range(32)),
        ({k: v for k, v in MISTRAL.items() if k != "sliding_window"}, {}, 4096, range(32)),
        (QWEN25_7B, {"use_sliding_window": True, "max_window_layers": 20}, 131_072, range(20, 28)),
        (QWEN25_7B, {"use_sliding_window": True, "max_window_layers": 0}, 131_072, range(28)),
        (
            QWEN25_7B,
            {"use_sliding_window": True, "layer_types": [SLIDING, FULL] * 14},
            131_072,
            range(0, 28, 2),
        ),
        (GEMMA3_1B, {"num_hidden_layers": 7}, 512, (0, 1, 2, 3, 4, 6)),
        (OLMO3_7B, {"layer_types": None, "num_hidden_layers": 5}, 4096, (0, 1, 2, 4)),
        (GEMMA3_1B, {"layer_types": [FULL] * 25 + [SLIDING], "sliding_window": 64}, 64, [25]),
    ],
)
def test_which_layers_have_a_window(
    raw: dict[str, Any], change: dict[str, Any], window: int, sliding: Any
) -> None:
    config = config_from_hf({**raw, **change})
    assert config.sliding_window == window
    assert [number for number, kind in enumerate(config.layer_types) if kind == SLIDING] == list(
        sliding
    )
    assert config_from_hf(config_to_hf(config)) == config
    assert config.windows(window) == () and set(config.windows(window + 1)) <= {window, NO_WINDOW}


def test_a_theta_of_olmo3_is_that_of_all_layers_where_one_is_stated() -> None:
    """As transformers 4 writes it; of an export its version 5 reads both."""
    transformers = pytest.importorskip("transformers")
    config = config_from_hf({**OLMO3_7B, "rope_theta": 20_000})
    assert (config.rope_theta, config.rope_local_base_freq) == (20_000.0, 20_000.0)
    read = transformers.AutoConfig.for_model(**config_to_hf(config))
    assert {kind: rope["rope_theta"] for kind, rope in read.rope_parameters.items()} == {
        FULL: 20_000.0,
        SLIDING: 20_000.0,
    }
    assert config_from_hf(read.to_dict()) == config


def test_ministral3_has_its_scaling_in_rope_parameters_alone() -> None:
    rope = {
        **YARN,
        "rope_theta": 1e6,
        "llama_4_scaling_beta": 0.1,
        "mscale": 1,
        "mscale_all_dim": 1,
    }
    raw = {**MISTRAL, "model_type": "ministral3", "rope_parameters": rope}
    del raw["sliding_window"], raw["rope_theta"]
    config = config_from_hf(raw)
    expected = YarnRope(4.0, 32_768, 1.0, llama_4_scaling_beta=0.1)
    assert (config.rope_scaling, config.rope_theta, config.layer_types) == (expected, 1e6, ())
    written = config_to_hf(config)
    assert written["rope_parameters"]["llama_4_scaling_beta"] == 0.1
    assert not {"rope_scaling", "rope_theta"} & set(written)
    assert config_from_hf(written) == config


def test_longrope_has_its_length_beside_the_entries() -> None:
    raw = {**PHI3_MINI, "rope_scaling": LONG, "max_position_embeddings": 131_072}
    config = config_from_hf(raw)
    # sqrt(1 + ln 32 / ln 4096)
    assert config.rope_scaling == LongRope((1.5,) * 48, (3.0,) * 48, 4096, 1.1902380714238083)
    assert config.positions == 4096
    written = config_to_hf(config)
    assert written["rope_scaling"] == LONG
    assert written["original_max_position_embeddings"] == 4096
    entries = {**LONG, "attention_factor": 1.5}
    other = config_from_hf({**raw, "rope_scaling": entries})
    assert config_to_hf(other)["rope_scaling"] == entries
    assert config_from_hf({**raw, "rope_scaling": {**LONG, "type": "su"}}) == config


def test_a_model_with_images_gives_its_language_model() -> None:
    assert config_from_hf(GEMMA3_4B) == SHAPES["gemma-3-4b"]
    full = {**GEMMA3_4B["text_config"], "num_attention_heads": 16, "vocab_size": 262_144}
    config = config_from_hf({**GEMMA3_4B, "text_config": full, "tie_word_embeddings": False})
    assert (config.num_attention_heads, config.vocab_size) == (16, 262_144)
    assert not config.tie_word_embeddings


def test_dropout_of_seed_oss_is_read_as_none() -> None:
    raw = {**LLAMA31_8B, "model_type": "seed_oss", "attention_dropout": 0.1}
    raw |= {"residual_dropout": 0.1, "attention_bias": None, "rope_scaling": None}
    config = config_from_hf(raw)
    assert (config.attention_bias, config.has_out_bias) == (True, False)
    written = config_to_hf(config)
    assert (written["attention_dropout"], written["residual_dropout"]) == (0.0, 0.0)


def test_unused_window_is_accepted() -> None:
    unused = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 28}
    assert config_from_hf({**QWEN25_7B, **unused}) == SHAPES["Qwen2.5-7B"]
    assert (
        config_from_hf({**QWEN25_7B, "max_window_layers": 0, "layer_types": [FULL] * 28})
        == SHAPES["Qwen2.5-7B"]
    )


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (
            QWEN25_7B,
            {"model_type": "qwen2_moe"},
            "model_type 'qwen2_moe' is not supported; supported are qwen2, qwen3",
        ),
        (QWEN3_MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step = 2 is not supported"),
        (QWEN3_MOE, {"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\] is not supported"),
        (QWEN3_MOE, {"num_local_experts": 64}, "num_local_experts 64 is not num_experts 128"),
        (QWEN3_MOE, {"num_experts_per_tok": 129}, "is more than num_experts"),
        (QWEN3_MOE, {"num_experts": 0}, "num_experts must be a positive integer"),
        (QWEN3_MOE, {"use_sliding_window": True, "sliding_window": 64}, "sliding-window"),
        (
            QWEN3_MOE,
            {"shared_expert_intermediate_size": 512},
            "shared_expert_intermediate_size = 512 is not supported",
        ),
        (
            QWEN25_7B,
            {"num_hidden_layers": 10**9},
            "num_hidden_layers 1000000000 is more than 10000",
        ),
        (QWEN25_7B, {"model_type": ["qwen2"]}, "is not supported"),
        (
            QWEN25_7B,
            {"layer_types": [FULL, SLIDING]},
            "layer_types must have 28 entries, each sliding_attention or full_att",
        ),
        (
            QWEN25_7B,
            {"layer_types": ["chunked_attention"] * 28},
            "layer_types must have 28 entries, each sliding_attention or",
        ),
        (QWEN25_7B, {"layer_types": [SLIDING] * 28}, "sliding-window"),
        (MISTRAL, {"sliding_window": 64, "layer_types": [FULL] * 32}, "sliding-window"),
        (MISTRAL, {"sliding_window": 0}, "sliding_window must be a positive integer"),
        (GEMMA3_1B, {"sliding_window": None}, "sliding-window"),
        (
            GEMMA3_1B,
            {"model_type": "gemma3"},
            "text_config must be an object, got None",
        ),
        (
            GEMMA3_4B,
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config = .* is not supported",
        ),
        (
            GEMMA3_4B,
            {"text_config": {**GEMMA3_1B, "model_type": "gemma4_text"}},
            "model_type 'gemma4_text' is not supported; .* and the language model of gemma3",
        ),
        (GEMMA3_1B, {"hidden_activation": "gelu"}, "hidden_activation = 'gelu'"),
        (GEMMA3_1B, {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        (GEMMA3_1B, {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        (
            GEMMA3_1B,
            {"rope_parameters": {FULL: {}, SLIDING: YARN}},
            "sliding_attention must be of rope type default",
        ),
        (
            GEMMA3_1B,
            {"rope_parameters": {FULL: {}, SLIDING: {"type": "linear", "factor": 8.0}}},
            "sliding_attention must be of rope type default",
        ),
        (
            GEMMA3_1B,
            {"rope_scaling": {"type": "linear", "factor": 8.0}},
            "rope_scaling.type is 'linear', which transformers ignores",
        ),
        (
            OLMO3_7B,
            {"rope_scaling": {**OLMO3_7B["rope_scaling"], "truncate": False}},
            "truncate is false, which transformers ignores",
        ),
        (
            QWEN25_7B,
            {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
            "rope type 'dynamic' is not supported",
        ),
        (
            QWEN25_7B,
            {"rope_scaling": {"rope_type": ["yarn"], "factor": 4.0}},
            r"rope type \['yarn'\]",
        ),
        (
            QWEN25_7B,
            {"rope_scaling": {"rope_type": "linear"}},
            "factor must be a positive number, got None",
        ),
        (
            QWEN25_7B,
            {"rope_scaling": {"rope_type": "yarn"}},
            "factor must be a positive number, got None",
        ),
        (QWEN25_7B, {"rope_scaling": {**YARN, "truncate": 0}}, "truncate must be true or false"),
        (
            QWEN25_7B,
            {"rope_scaling": YARN, "rope_theta": 1.0},
            "rope_theta must be more than 1 for yarn",
        ),
        (
            QWEN25_7B,
            {"original_max_position_embeddings": 4096},
            "original_max_position_embeddings = 4096",
        ),
        (
            QWEN25_7B,
            {"rope_scaling": {"mrope_section": [1, 2]}},
            r"unknown entries \['mrope_section'\]",
        ),
        (
            QWEN25_7B,
            {"rope_parameters": {"full_attention": {}}},
            r"unknown entries \['full_attention'\]",
        ),
        (QWEN25_7B, {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        (QWEN25_7B, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        (QWEN25_7B, {"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        (
            QWEN25_7B,
            {"num_key_value_heads": None},
            "num_key_value_heads must be a positive integer",
        ),
        (QWEN25_7B, {"hidden_size": "3584"}, "hidden_size must be a positive integer, got '3584'"),
        (QWEN25_7B, {"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
        (QWEN25_7B, {"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
        (QWEN25_7B, {"hidden_size": 3585}, "not a multiple of num_attention_heads"),
        (
            QWEN25_7B,
            {"attention_bias": True},
            "attention_bias: the family qwen2 does not have this field",
        ),
        (
            SMOLLM3,
            {"use_sliding_window": True, "sliding_window": 64, "layer_types": None},
            "sliding-window",
        ),
        (
            SMOLLM3,
            {"no_rope_layers": [1, 0] * 17},
            "no_rope_layers must be a list of 0 or 1 for each layer",
        ),
        (
            SMOLLM3,
            {"no_rope_layers": [2] * 36},
            "no_rope_layers must be a list of 0 or 1 for each layer",
        ),
        (
            PHI3_MINI,
            {"rope_scaling": YARN},
            "rope type 'yarn' is not supported; this family supports def",
        ),
        (PHI3_MINI, {"embd_pdrop": 0.1}, "embd_pdrop = 0.1 is not supported"),
        (PHI3_MINI, {"lm_head_bias": True}, "lm_head_bias = True is not supported"),
        (
            PHI3_MINI,
            {"partial_rotary_factor": 0.01},
            "partial_rotary_factor must turn an even part of head_dim 96, got 0.01",
        ),
        (
            PHI3_MINI,
            {"rope_scaling": {**LONG, "short_factor": [1.0]}},
            "short_factor of longrope must have 48 numbers",
        ),
        (
            PHI3_MINI,
            {"rope_scaling": {**LONG, "long_factor": ["1"] * 48}},
            "long_factor must be a list of positive numbers",
        ),
        (QWEN25_7B, {"rope_scaling": LONG}, "rope type 'longrope' is not supported"),
        (
            {**MISTRAL, "model_type": "ministral3"},
            {"rope_scaling": YARN},
            "llama_4_scaling_beta requires ministral3, where it must be set, .* got None and yarn",
        ),
        (
            {**MISTRAL, "model_type": "ministral3"},
            {},
            "llama_4_scaling_beta requires ministral3, .* got None and default",
        ),
        (
            MISTRAL,
            {"rope_scaling": {**YARN, "llama_4_scaling_beta": 0.1}},
            "llama_4_scaling_beta requires ministral3, .* got 0.1 and yarn",
        ),
        (
            LLAMA31_8B,
            {"attention_out_bias": True},
            "attention_out_bias: the family llama does not have this field",
        ),
        (
            LLAMA31_8B,
            {"logits_scaling": 8.0},
            "logits_scaling: the family llama does not have this field",
        ),
        (
            LLAMA31_8B,
            {"attention_multiplier": 1},
            "attention_multiplier: the family llama does not have this field",
        ),
        (
            {**LLAMA31_8B, "model_type": "granite"},
            {"residual_multiplier": 0},
            "residual_multiplier must be a positive number, got 0",
        ),
        (LLAMA31_8B, {"mlp_bias": True}, "mlp_bias = True is not supported"),
        (LLAMA31_8B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            LLAMA31_8B,
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "low_freq_factor must be",
        ),
    ],
)
def test_unsupported_is_refused_by_name(
    base: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_hf({**base, **change})


def test_ministral_from_scratch_has_a_config_that_is_read_again():
    config = ModelConfig("ministral3", 64, 32, 2, 4, 2, 8, 48)
    raw = config_to_hf(config)
    assert raw["rope_parameters"]["llama_4_scaling_beta"] == 0.0
    read = config_from_hf(raw)
    np.testing.assert_allclose(inverse_frequencies(read), inverse_frequencies(config), rtol=1e-6)
    assert read.rope_scaling is not None and read.rope_scaling.attention_factor == 1.0


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        (
            "olmo3",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
            "one for full_attention and one for sliding_attention, got .*nest them",
        ),
        (
            "granite",
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
                "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            },
            "rope_scaling and rope_parameters differ in rope_type, factor: remove one",
        ),
    ],
)
def test_ropes_that_versions_of_transformers_read_differently_are_refused(family, fields, message):
    raw = config_to_hf(ModelConfig(family, 64, 32, 2, 4, 2, 8, 48))
    with pytest.raises(ValueError, match=message):
        config_from_hf({**raw, **fields})
