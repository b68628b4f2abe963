"""g2d_jax: how much online RL is enough?

GRPO warm-up with verifiable rewards, a static preference dataset from that policy's rollouts, then
offline DPO. This file imports nothing heavy: verifier workers import it in a fraction of a second.
"""

__version__ = "0.1.0"
