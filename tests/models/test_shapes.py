"""The table of real models against their published parameter counts."""

from __future__ import annotations

import pytest

from g2d_jax.models.decoder import count_params
from g2d_jax.models.hf_config import config_to_hf
from g2d_jax.models.shapes import SHAPES, shape

# As the hub shows them (a tied head counted once).
PUBLISHED = {
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Llama-3-8B": 8_030_261_248,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "SmolLM2-135M": 134_515_008,
    "SmolLM2-360M": 361_821_120,
    "SmolLM2-1.7B": 1_711_376_384,
    "SmolLM3-3B": 3_075_098_624,
    "Mistral-7B-v0.3": 7_248_023_552,
    "OLMo-2-0425-1B": 1_484_916_736,
    "Olmo-3-7B": 7_298_011_136,
    "Phi-4-mini": 3_836_021_760,
    "gemma-3-4b": 3_880_263_168,  # without images
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_is_the_published_one(name: str) -> None:
    assert count_params(SHAPES[name]) == PUBLISHED[name]


@pytest.mark.parametrize("name", sorted(SHAPES.keys() - PUBLISHED.keys()))
def test_parameter_count_is_that_of_transformers(name: str) -> None:
    """Of models with images the hub shows the whole's alone."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**config_to_hf(SHAPES[name]))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    assert count_params(SHAPES[name]) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen2.5-7B"),
        ("Qwen3-8B-Base", "Qwen3-8B"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("meta-llama/Llama-3.2-1B", "Llama-3.2-1B"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "Mistral-7B-v0.3"),
        ("google/gemma-3-1b-it", "gemma-3-1b"),
        ("allenai/Olmo-3-1025-7B", "Olmo-3-7B"),
        ("microsoft/Phi-4-mini-instruct", "Phi-4-mini"),
    ],
)
def test_variants_share_the_entry(name: str, entry: str) -> None:
    assert shape(name) is SHAPES[entry]


def test_unknown_model_suggests_near_ones() -> None:
    with pytest.raises(
        ValueError, match=r"no shape table for model 'Qwen/Qwen2\.5-8B'; nearest: .*Qwen2\.5-7B"
    ):
        shape("Qwen/Qwen2.5-8B")
