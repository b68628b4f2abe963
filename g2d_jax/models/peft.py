"""Adapters alone, as the files that Hugging Face's PEFT reads: adapter_model.safetensors and adapter_config.json.

peft.save(policy, "adapters", base="Qwen/Qwen2.5-7B")
PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B"), "adapters")
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from etils import epath

from g2d_jax.models import shard
from g2d_jax.models.config import Lora
from g2d_jax.models.decoder import Decoder
from g2d_jax.models.hf import fetcher, tensors, write_json
from g2d_jax.models.hf_folder import stored_shape
from g2d_jax.runtime import processes, storage

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def save(policy: Decoder, folder: storage.PathLike, *, base: str, dtype: str = "float32") -> epath.Path:
    """Write a policy's adapters. base: the model they stand beside, a hub id or a folder; PEFT loads it by that name.

    adapter_config.json is written last. Every process must call it; the first one writes. Raises ValueError for a
    policy without adapters, and for a folder that holds some already.
    """
    place, lora = epath.Path(folder), policy.config.lora
    if lora is None:
        raise ValueError("the policy has no adapters: all its parameters were trained, export it as a model")
    processes.on_leader(lambda: _make(place))
    shapes = {name: stored_shape(row) for name, (_, row, _) in tensors(policy.config).items() if row.adapter}
    writer = jax.process_index() == 0
    shard.write(place / WEIGHTS, shapes, jnp.dtype(dtype), fetcher(policy, jnp.dtype(dtype)), writer=writer)
    if writer:
        write_json(place / CONFIG, _config(lora, base))
    return place


def _make(folder: epath.Path) -> None:
    """Make the folder. Raises ValueError if it holds adapters."""
    if (folder / CONFIG).exists():
        raise ValueError(f"{folder} holds adapters already: choose another folder")
    with storage.naming("write", folder):
        folder.mkdir(parents=True, exist_ok=True)


def _config(lora: Lora, base: str) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "target_modules": list(lora.targets),
        "lora_dropout": lora.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
