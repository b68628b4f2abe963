"""Preference sets from other tools as pairs of token ids.

Parquet with all columns of a collect stage is used unchanged. Texts and messages of other sets
(`data.preference_sets`) are tokenised: prompts as for sampling, responses with a stop token at the
end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

from g2d_jax.config import Offline
from g2d_jax.data.distinct import LoadReport
from g2d_jax.data.fields import LeftOut, Values
from g2d_jax.data.preference_sets import HUB, pair_rows, to_pair
from g2d_jax.data.rows import Row
from g2d_jax.data.splits import problem_id
from g2d_jax.records import Preference
from g2d_jax.runtime.tables import has_preferences, read_preferences
from g2d_jax.session.problems import tell
from g2d_jax.session.session import Session


def read(session: Session, stage: Offline) -> list[Preference]:
    """Read the pairs of stage.preferences, a file or dataset; log how many rows were left out, and
    why.

    Left out are empty or equal pairs, prompts over data.max_prompt_length, pairs over
    stage.max_length or the model's positions, texts that cannot be tokenised, and a few malformed
    rows. Raises ValueError as `LoadReport.require_usable`.
    """
    source = stage.preferences
    report = LoadReport(source, stage.on_error)
    pairs: list[Preference] = []
    for row in _rows(source):
        pair = report.read(row, partial(_fitting, session, stage))
        if pair is not None:
            pairs.append(pair)
    report.require_usable(pairs)
    tell(f"{len(pairs)} pairs", report, session.tracker.say_once, session.tokenizer.template)
    return pairs


def _rows(source: str) -> Iterator[Row]:
    """Yield the rows of a set; a collect stage's rows have their pair in the column "pair"."""
    if source.startswith(HUB) or not has_preferences(source):
        yield from pair_rows(source)
        return
    for number, pair in enumerate(read_preferences(source)):
        yield Row(f"{source}, pair {number}", {"pair": pair})


def _fitting(session: Session, stage: Offline, values: Values) -> Preference:
    """Read a pair that fits. Raises BrokenRow and LeftOut."""
    pair = values.get("pair")
    if not isinstance(pair, Preference):  # it may be a column of another tool's set
        pair = _encoded(session, values)
    _refuse_long(session, stage, pair)
    return pair


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


def _encoded(session: Session, values: Values) -> Preference:
    """Read a pair and tokenise it. Raises BrokenRow, and LeftOut for a text that cannot be
    tokenised."""
    prompt, chosen, rejected = to_pair(values)
    tokenizer = session.tokenizer
    try:
        prompt_ids = tokenizer.encode_prompt(prompt)
        chosen_ids = tokenizer.encode_completion(chosen, prompt)
        rejected_ids = tokenizer.encode_completion(rejected, prompt)
    except ValueError as error:
        raise LeftOut("that cannot be tokenised") from error
    ids = prompt_ids, chosen_ids, rejected_ids
    return Preference(problem_id(prompt), prompt, chosen, rejected, *ids, math.nan, math.nan)
