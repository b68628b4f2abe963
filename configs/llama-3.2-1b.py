"""Llama-3.2-1B on maths: G2D, or GRPO alone; all parameters, or adapters.

Command:   g2d run --config llama-3.2-1b --workdir DIR                        G2D, K = 500
           g2d run --config llama-3.2-1b:lora=32 --workdir DIR                the same, adapters of rank 32
           g2d run --config llama-3.2-1b:method=grpo --workdir DIR            GRPO alone, 2000 updates
           g2d sweep --config sweep-k:preset=llama-3.2-1b --workdir DIR       over K
Hardware:  those of the plan; not run at this size
Plan:      machine  choice  peak GiB        hours of G2D  of GRPO  compiled
           v5e-4            11.85 of 14.49  12.7          43.2     2026-11-26
           v5e-8            9.92 of 14.49   6.8           23.2     2026-11-26
           h100x1           53.19 of 66.21  20.9          71.4     2026-11-26
           (all responses at their greatest length; the rest: docs/models.md)

Result:    report.html in DIR. Neither paper has figures for this model.
Choices:   variant=instruct|base, or path=FOLDER_OR_HUB_ID; method=g2d|grpo; k=K; steps=N of GRPO alone; lora=RANK;
           train=math|gsm8k|numinamath, test=math500|amc23|gsm8k|numinamath, or other sources; length=TOKENS;
           moments=float32|bfloat16. What they mean, and every hyper-parameter with its source: g2d_jax/recipes.py
"""

from ml_collections import ConfigDict

from g2d_jax import recipes


def get_config(arg: str = "") -> ConfigDict:
    """K = 500 is that of the paper's model of this family."""
    return recipes.recipe("llama-3.2-1b", arg)
