"""The pair rule: which of a prompt's responses become (chosen, rejected), and which pairs of all
prompts are kept."""

from __future__ import annotations

import math
import os
from collections.abc import Hashable, Sequence
from typing import Literal, TypeAlias

import numpy as np

from g2d_jax.records import Preference, Prompt, ScoredRollout, exceeds
from g2d_jax.runtime import keys

Pair: TypeAlias = tuple[int, int]
"""The places of the chosen and the rejected response in their group."""

Select: TypeAlias = Literal["all", "random", "uncertain", "confident"]
"""The pairs to prefer when not all are kept: random ones, or those of the most or the least
uncertain prompts."""


def pairs_of(
    seed: int,
    problem_id: str,
    visit: int,
    group: Sequence[ScoredRollout],
    limit: int,
    *,
    verifiable: bool,
) -> list[Pair]:
    """Choose up to `limit` pairs of one prompt's responses, as indices (chosen, rejected).

    verifiable: the reward knows right and wrong; then use `random_pairs` of the verdicts, else
    `best_worst` of the rewards. Responses of the same text count as one, even with other tokens: no
    two pairs are equal, and none prefers a text to itself. A response that cannot be scored is
    neither chosen nor rejected.
    """
    contents = [row.text for row in group]
    if verifiable:
        return random_pairs(seed, problem_id, visit, is_correct(group), limit, contents)
    # None becomes NaN
    return best_worst(np.array([row.score.reward for row in group], np.float64), limit, contents)


def is_correct(group: Sequence[ScoredRollout]) -> np.ndarray:
    """Return `Score.accuracy` of a group's responses, float64 [G]: 1 right, 0 wrong, NaN if
    unknown."""
    return np.array([row.score.accuracy for row in group], np.float64)


def best_worst(
    rewards: np.ndarray, limit: int, contents: Sequence[Hashable] | None = None
) -> list[Pair]:
    """Pair the highest reward against the lowest (arXiv 2506.21495, section 3.1), then the second
    against the second …

    rewards: [G], NaN for a response that could not be scored, which is ignored. contents: [G],
    equal for identical responses, of which the first counts; None: all differ. Returns up to
    `limit` pairs (chosen, rejected), no response in two of them. Each chosen reward is greater by
    more than rounding (`records.exceeds`); equal rewards keep their order.
    """
    if contents is None:
        contents = range(len(rewards))
    scored = np.array(_distinct(np.flatnonzero(~np.isnan(rewards)).tolist(), contents), np.int64)
    rising = scored[np.argsort(rewards[scored], kind="stable")]
    falling = scored[np.argsort(-rewards[scored], kind="stable")]
    pairs = []
    for i in range(min(limit, len(scored) // 2)):
        if exceeds(rewards[falling[i]], rewards[rising[i]]):
            pairs.append((int(falling[i]), int(rising[i])))
    return pairs


def random_pairs(
    seed: int,
    problem_id: str,
    visit: int,
    correct: np.ndarray,
    limit: int,
    contents: Sequence[Hashable] | None = None,
) -> list[Pair]:
    """Pair random correct with random incorrect (arXiv 2506.21495, section 3.2), up to `limit`
    pairs of one prompt.

    correct: [G], 1 or 0, NaN for a response without a verdict, which is ignored. contents: [G],
    equal for identical responses, which count once, or not at all if they are both correct and
    incorrect; None: all differ. Both sides are shuffled, then paired so that every response of a
    side is used once before any is used twice; no pair occurs twice. The first pair joins a random
    correct and a random incorrect response, copies included. Returns indices (chosen, rejected),
    none unless both kinds exist. The random numbers depend on (seed, problem, visit), so a prompt's
    pairs do not depend on the rest of the collection.
    """
    if contents is None:
        contents = range(len(correct))
    right = np.flatnonzero(correct == 1).tolist()
    wrong = np.flatnonzero(correct == 0).tolist()
    disputed = {contents[i] for i in right} & {contents[i] for i in wrong}
    right = [i for i in right if contents[i] not in disputed]
    wrong = [i for i in wrong if contents[i] not in disputed]
    if not (right and wrong):
        return []
    rng = keys.rng(seed, "pairs", problem_id, visit)
    right = _distinct(rng.permutation(right).tolist(), contents)
    wrong = _distinct(rng.permutation(wrong).tolist(), contents)
    # The diagonals of the grid of all pairs visit each pair once, and each response once before
    # any again.
    cycle = int(np.lcm(len(right), len(wrong)))
    turns = range(min(limit, len(right) * len(wrong)))
    return [(right[t % len(right)], wrong[(t + t // cycle) % len(wrong)]) for t in turns]


def _distinct(indices: Sequence[int], contents: Sequence[Hashable]) -> list[int]:
    """Return the indices in their order, without those of repeated contents."""
    firsts: dict[Hashable, int] = {}
    for i in indices:
        firsts.setdefault(contents[i], i)
    return list(firsts.values())


def select_pairs(
    seed: int,
    prompts: Sequence[tuple[str, int, float]],
    offered: Sequence[int],
    select: Select,
    most: int | None,
) -> list[list[int]]:
    """Choose which of the offered pairs to keep: `most` of all prompts together, or all if there
    are fewer.

    prompts: (problem id, visit, uncertainty), no problem and visit twice; the uncertainty is any
    number and matters to "uncertain" and "confident" alone. offered: how many pairs each of them
    has. most: None keeps all. Returns for each prompt the kept ones of its pairs 0 … offered - 1,
    ascending.

    "random" and "all" keep a random subset of the pairs. "uncertain" keeps the pairs of the most
    uncertain prompt first, then of the next; "confident" starts from the other end. Equal prompts
    are in random order, a prompt's pairs in their own. The random numbers depend on (seed, problem,
    visit), so the order of the prompts does not matter, and a smaller `most` keeps a subset. Raises
    ValueError for a negative `most`, and for a NaN uncertainty if it matters.
    """
    if most is not None and most < 0:
        raise ValueError(f"the number of pairs to keep must not be negative, got {most}")
    at_random = select in ("all", "random")
    ranked: list[tuple[float, float, str, int, int, int]] = []  # lower ranks are kept first
    for place, ((problem_id, visit, uncertainty), count) in enumerate(
        zip(prompts, offered, strict=True)
    ):
        if math.isnan(uncertainty) and not at_random:
            raise ValueError(
                f"problem {problem_id} has no uncertainty to choose by: select all or random "
                "pairs instead"
            )
        # tie orders prompts of one rank, whose pairs stay together; at random each pair has its own.
        tie, *draws = keys.rng(seed, "select", problem_id, visit).random(1 + count).tolist()
        rank = 0.0
        if not at_random:
            rank = uncertainty if select == "confident" else -uncertainty
            draws = [tie] * count
        ranked += [(rank, draws[i], problem_id, visit, i, place) for i in range(count)]
    chosen: list[list[int]] = [[] for _ in prompts]
    for *_, index, place in sorted(ranked)[:most]:
        chosen[place].append(index)
    return list(map(sorted, chosen))


def to_preference(prompt: Prompt, group: Sequence[ScoredRollout], pair: Pair) -> Preference:
    """Return one pair of a group as a record. prompt: as shown to the model, text or messages."""
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
        chosen_truncated=chosen.rollout.stop_reason == "length",
        rejected_truncated=rejected.rollout.stop_reason == "length",
    )


def check_preferences(
    path: str | os.PathLike[str], pairs: Sequence[Preference], vocab_size: int
) -> None:
    """Raise ValueError, naming the file and the pair, for pairs unfit for training, perhaps from
    another tool.

    These are: no pairs at all, an empty prompt or response, and token ids beyond vocab_size, which
    a lookup on the device would silently map to other tokens.
    """
    if not pairs:
        raise ValueError(f"{os.fspath(path)} has no pairs")
    for number, pair in enumerate(pairs, 1):
        for name in ("prompt_ids", "chosen_ids", "rejected_ids"):
            ids = getattr(pair, name)
            where = f"{os.fspath(path)}, pair {number} of {len(pairs)}: {name}"
            if not ids.size:
                raise ValueError(
                    f"{where} is empty; a prompt and each response need at least 1 token"
                )
            wrong = ids[(ids < 0) | (ids >= vocab_size)]
            if wrong.size:
                raise ValueError(
                    f"{where} has {wrong[-1]}; ids must be from 0 to {vocab_size - 1}: "
                    "was it made with another tokenizer?"
                )
