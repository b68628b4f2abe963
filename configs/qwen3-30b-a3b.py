"""Qwen3-30B-A3B on maths: G2D, or GRPO alone; all parameters, or adapters.

Command:   g2d run --config qwen3-30b-a3b --workdir DIR                          G2D, K = 150
           g2d run --config qwen3-30b-a3b:lora=32 --workdir DIR                  the same, adapters of rank 32
           g2d run --config qwen3-30b-a3b:method=grpo --workdir DIR              GRPO alone, 600 updates
           g2d sweep --config sweep-k:preset=qwen3-30b-a3b --workdir DIR         over K
Hardware:  those of the plan; not run at this size
Plan:      machine  choice  peak GiB        hours of G2D  of GRPO  compiled
           v5p-32           50.80 of 88.08  2.2           6.0      2026-11-26
           (all responses at their greatest length; the rest: docs/models.md)

Result:    report.html in DIR. Neither paper has figures for this model.
Choices:   variant=chat|base, or path=FOLDER_OR_HUB_ID; method=g2d|grpo; k=K; steps=N of GRPO alone; lora=RANK;
           train=math|gsm8k|numinamath, test=math500|amc23|gsm8k|numinamath, or other sources; length=TOKENS;
           moments=float32|bfloat16. What they mean, and every hyper-parameter with its source: g2d_jax/recipes.py
"""

from ml_collections import ConfigDict

from g2d_jax import recipes


def get_config(arg: str = "") -> ConfigDict:
    """K = 150 is that of the paper's Qwen2.5-7B."""
    return recipes.recipe("qwen3-30b-a3b", arg)
