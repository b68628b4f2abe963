"""Preference sets made elsewhere: files or a hub set of any form of `data.preference_sets`, as
pairs of token ids.

Of Parquet with all columns that a collect stage writes the pairs are taken as they are. Of other
sets ids are trained on as they are, and texts and messages are tokenised here: prompts as for
sampling, responses with a stop token behind them.
"""

from __future__ import annotations

import math
from collections import Counter
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
    """Read the pairs of stage.preferences, which is no stage, and say how many rows were left out,
    and why.

    Those are empty or equal pairs, prompts longer than data.max_prompt_length, a prompt and
    response longer than stage.max_length or than the model has positions, and texts that cannot be
    tokenised. Raises ValueError naming file and line of a row of no form, and where no pair is
    left.
    """
    source = stage.preferences
    pairs: list[Preference] = []
    left_out, firsts = Counter[str](), dict[str, str]()
    for where, found in _candidates(source):
        try:
            pair = found if isinstance(found, Preference) else _encoded(session, found)
            _refuse_long(session, stage, pair)
            pairs.append(pair)
        except LeftOut as reason:
            left_out[str(reason)] += 1
            if reason.__cause__ is not None:
                firsts.setdefault(str(reason), f" (the first: {where}: {reason.__cause__!s:.300})")
    counted = []
    for why, count in left_out.items():
        counted.append(f"{count} {why}{firsts.get(why, '')}")
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
    if len(pair.prompt_ids) > longest:
        raise LeftOut(f"with a prompt longer than data.max_prompt_length, {longest} tokens")
    if stage.max_length is not None and _length(pair) > stage.max_length:
        raise LeftOut(f"longer than the stage's max_length, {stage.max_length} tokens")


def _length(pair: Preference) -> int:
    """Count the tokens of the prompt and the longer response."""
    return len(pair.prompt_ids) + max(len(pair.chosen_ids), len(pair.rejected_ids))


def _encoded(session: Session, row: Row) -> Preference:
    """Read a pair and tokenise it. Raises BrokenRow with its place.

    Raises LeftOut for what cannot be tokenised, or is longer than the model has positions, of which
    pairs with our own columns are only warned about: a policy drew them.
    """
    pair = row.read(to_pair)
    tokenizer = session.tokenizer
    try:
        if pair.ids is None:
            prompt_ids = tokenizer.encode_prompt(pair.prompt)
            chosen_ids = tokenizer.encode_completion(pair.chosen)
            rejected_ids = tokenizer.encode_completion(pair.rejected)
        else:
            prompt_ids, chosen_ids, rejected_ids = pair.ids
    except ValueError as error:
        raise LeftOut("that cannot be tokenised") from error
    made = Preference(
        problem_id=problem_id(pair.prompt),
        prompt=pair.prompt,
        chosen=pair.chosen,
        rejected=pair.rejected,
        prompt_ids=prompt_ids,
        chosen_ids=chosen_ids,
        rejected_ids=rejected_ids,
        chosen_reward=math.nan,
        rejected_reward=math.nan,
    )
    positions = session.model_config.max_position_embeddings
    if _length(made) > positions:
        raise LeftOut(f"longer than the model has positions, {positions}")
    return made
