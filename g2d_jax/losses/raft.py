"""RAFT, rejection sampling: the log-likelihood of correct responses alone.

"A Minimalist Approach to LLM Reasoning: from Rejection Sampling to Reinforce" (arXiv 2504.11343):
keep each prompt's responses with the highest reward, 1 with a verifiable reward, and train on them
as in supervised fine-tuning (`sft_loss`). Normaliser: the kept responses in the global batch of one
optimiser step. Each counts as the mean over its tokens, as in the paper's token-level objective
RAFT++ at a ratio of 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def raft_weights(lengths: ArrayLike, kept: ArrayLike) -> np.ndarray:
    """Weigh each token of each response: 1 / (kept responses * the response's own tokens), 0 in a
    response that is not kept.

    lengths: [S] tokens of every response in the global batch. kept: [S] bool. Returns [S] float32.
    Host side. Raises ValueError for shapes that differ.
    """
    lengths, kept = np.asarray(lengths, np.int64), np.asarray(kept, bool)
    if lengths.ndim != 1 or lengths.shape != kept.shape:
        raise ValueError(f"lengths and kept must be [S], got {lengths.shape} and {kept.shape}")
    shares = 1.0 / (max(int(kept.sum()), 1) * np.maximum(lengths, 1))
    return np.where(kept, shares, 0.0).astype(np.float32)
