"""Llama-3.1-8B on maths: G2D, or GRPO alone; all parameters, or adapters.

Command:   g2d run --config llama-3.1-8b --workdir DIR                        G2D, K = 500
           g2d run --config llama-3.1-8b:lora=32 --workdir DIR                the same, adapters of rank 32
           g2d run --config llama-3.1-8b:method=grpo --workdir DIR            GRPO alone, 2000 updates
           g2d sweep --config sweep-k:preset=llama-3.1-8b --workdir DIR       over K
Hardware:  those of the plan; not run at this size
Plan:      machine  choice   peak GiB        hours of G2D  of GRPO  compiled
           v6e-8             26.91 of 28.75  20.9          71.9     2026-11-26
           h100x8            43.65 of 66.21  16.0          55.9     2026-11-26
           h100x1   lora=32  65.27 of 66.21  102.3         339.5    2026-11-26
           (all responses at their greatest length; the rest: docs/models.md)

Result:    report.html in DIR. The G2D paper's, on MATH-500: 49.4 % with K = 500, above its GRPO.
Choices:   variant=instruct|base, or path=FOLDER_OR_HUB_ID; method=g2d|grpo; k=K; steps=N of GRPO alone; lora=RANK;
           train=math|gsm8k|numinamath, test=math500|amc23|gsm8k|numinamath, or other sources; length=TOKENS;
           moments=float32|bfloat16. What they mean, and every hyper-parameter with its source: g2d_jax/recipes.py
"""

from ml_collections import ConfigDict

from g2d_jax import recipes


def get_config(arg: str = "") -> ConfigDict:
    """K = 500 is the paper's."""
    return recipes.recipe("llama-3.1-8b", arg)
