"""Qwen2.5-7B on maths: G2D, or GRPO alone; all parameters, or adapters.

Command:   g2d run --config qwen2.5-7b --workdir DIR                          G2D, K = 150
           g2d run --config qwen2.5-7b:lora=32 --workdir DIR                  the same, adapters of rank 32
           g2d run --config qwen2.5-7b:method=grpo --workdir DIR              GRPO alone, 600 updates
           g2d sweep --config sweep-k:preset=qwen2.5-7b --workdir DIR         over K
Hardware:  those of the plan; not run at this size
Plan:      machine  choice   peak GiB        hours of G2D  of GRPO  compiled
           v5e-16            14.24 of 14.49  5.3           15.4     2026-11-26
           v6e-8             25.69 of 28.75  5.2           14.1     2026-11-26
           v5p-16            68.17 of 88.08  3.4           9.5      2026-11-26
           h100x8            42.35 of 66.21  3.9           11.0     2026-11-26
           h100x1   lora=32  63.36 of 66.21  23.4          60.3     2026-11-26
           (all responses at their greatest length; the rest: docs/models.md)

Result:    report.html in DIR. The G2D paper's, on MATH-500: 62.4 % with K = 150; GRPO alone 51.6 % at 4 times the cost.
Choices:   variant=base|instruct, or path=FOLDER_OR_HUB_ID; method=g2d|grpo; k=K; steps=N of GRPO alone; lora=RANK;
           train=math|gsm8k|numinamath, test=math500|amc23|gsm8k|numinamath, or other sources; length=TOKENS;
           moments=float32|bfloat16. What they mean, and every hyper-parameter with its source: g2d_jax/recipes.py
"""

from ml_collections import ConfigDict

from g2d_jax import recipes


def get_config(arg: str = "") -> ConfigDict:
    """K = 150 is the paper's."""
    return recipes.recipe("qwen2.5-7b", arg)
