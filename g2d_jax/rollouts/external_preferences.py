"""Preference sets from other tools as pairs of token ids.

Parquet with all columns that a collect stage writes is taken as it is. The texts and messages of
other sets (`data.preference_sets`) are tokenised here: prompts as for sampling, responses with a
stop token at their end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from g2d_jax.config import Offline
from g2d_jax.data.fields import LeftOut
from g2d_jax.data.preference_sets import HUB, pair_rows, to_pair
from g2d_jax.data.rows import Row
from g2d_jax.data.splits import problem_id
from g2d_jax.records import Preference
from g2d_jax.runtime.tables import has_preferences, read_preferences
from g2d_jax.session.session import Session


def read(session: Session, stage: Offline) -> list[Preference]:
    """Read the pairs of stage.preferences, which is no stage, and log how many rows were left out,
    and why.

    Those are empty or equal pairs, prompts longer than data.max_prompt_length, a prompt and
    response longer than stage.max_length or than the model has positions, and texts that cannot be
    tokenised. Raises ValueError naming file and line of a row of another shape, and where no pair
    is left.
    """
    source = stage.preferences
    pairs: list[Preference] = []
    left_out: dict[str, list[str]] = {}
    for where, found in _candidates(source):
        try:
            pair = found if isinstance(found, Preference) else _encoded(session, found)
            _refuse_long(session, stage, pair)
            pairs.append(pair)
        except LeftOut as reason:
            first = f"{where}: {reason.__cause__}" if reason.__cause__ else where
            left_out.setdefault(str(reason), []).append(first)
    counted = []
    for why, places in left_out.items():
        counted.append(f"{len(places)} {why} (the first: {places[0]:.400})")
    listed = ", ".join(counted)
    if not pairs:
        raise ValueError(f"{source} has no pair to train on: {listed or 'it has no rows'}")
    if left_out:
        session.say_once(f"{source}: {len(pairs)} pairs; left out: {listed}")
    return pairs


def _candidates(source: str) -> Iterator[tuple[str, Preference | Row]]:
    """Yield the place of each pair, and the pair, or the row that has it."""
    if not source.startswith(HUB) and has_preferences(source):
        for number, pair in enumerate(read_preferences(source)):
            yield f"{source}, pair {number}", pair
        return
    for row in pair_rows(source):
        yield row.where, row


def _refuse_long(session: Session, stage: Offline, pair: Preference) -> None:
    """Raise LeftOut for a pair that is too long."""
    longest = session.config.data.max_prompt_length
    prompt = len(pair.prompt_ids)
    if prompt > longest:
        raise LeftOut(f"with a prompt longer than data.max_prompt_length, {longest} tokens")
    positions = session.model_config.max_position_embeddings
    limit = min(stage.max_length or positions, positions)
    if prompt + max(len(pair.chosen_ids), len(pair.rejected_ids)) > limit:
        raise LeftOut(f"longer than max_length or the model's positions, {limit} tokens")


def _encoded(session: Session, row: Row) -> Preference:
    """Read a pair and tokenise it. Raises BrokenRow with its place, LeftOut for what cannot be
    tokenised."""
    prompt, chosen, rejected = row.read(to_pair)
    tokenizer = session.tokenizer
    try:
        prompt_ids = tokenizer.encode_prompt(prompt)
        chosen_ids = tokenizer.encode_completion(chosen)
        rejected_ids = tokenizer.encode_completion(rejected)
    except ValueError as error:
        raise LeftOut("that cannot be tokenised") from error
    ids = prompt_ids, chosen_ids, rejected_ids
    return Preference(problem_id(prompt), prompt, chosen, rejected, *ids, math.nan, math.nan)
