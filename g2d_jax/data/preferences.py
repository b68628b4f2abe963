"""The pair rule: which of a prompt's responses become (chosen, rejected)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from g2d_jax import keys
from g2d_jax.records import Preference, Prompt, ScoredRollout


def random_pairs(seed: int, problem_id: str, visit: int, correct: np.ndarray, limit: int) -> list[tuple[int, int]]:
    """Random correct with random incorrect (arXiv 2506.21495, section 2.2), up to `limit` pairs of one prompt.

    correct: [G], 1 or 0, NaN for a response without a verdict, which takes no part. Both sides are shuffled, then
    paired off so that every response of a side is used once before any of it is used twice; no pair occurs twice.
    Returns indices (chosen, rejected), none without both kinds.
    Drawn by (seed, problem, visit), so a prompt's pairs do not depend on what else is collected.
    """
    right, wrong = np.flatnonzero(correct == 1), np.flatnonzero(correct == 0)
    if not (right.size and wrong.size):
        return []
    rng = keys.rng(seed, "pairs", problem_id, visit)
    order = rng.permutation(right), rng.permutation(wrong)
    # Walking the grid of all pairs along its diagonals meets each pair once, and each response before any again.
    cycle = int(np.lcm(len(right), len(wrong)))
    turns = range(min(limit, len(right) * len(wrong)))
    return [(int(order[0][t % len(right)]), int(order[1][(t + t // cycle) % len(wrong)])) for t in turns]


def to_preference(prompt: Prompt, group: Sequence[ScoredRollout], pair: tuple[int, int]) -> Preference:
    """The record of one pair of a group. prompt: what the model was shown, as text or as messages."""
    chosen, rejected = group[pair[0]], group[pair[1]]
    assert chosen.score.reward is not None and rejected.score.reward is not None
    return Preference(
        problem_id=chosen.rollout.problem_id,
        prompt=prompt,
        chosen=chosen.text,
        rejected=rejected.text,
        prompt_ids=chosen.rollout.prompt_ids,
        chosen_ids=chosen.rollout.token_ids,
        rejected_ids=rejected.rollout.token_ids,
        chosen_reward=chosen.score.reward,
        rejected_reward=rejected.score.reward,
    )
