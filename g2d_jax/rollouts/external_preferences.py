"""Preference sets made elsewhere: files or a hub set of any form of `data.preference_sets`, as
pairs of token ids.

Parquet with all columns that a collect stage writes is read as it is. Of other sets ids are trained
on as they are, and texts and messages are tokenised here: prompts as for sampling, responses with a
stop token behind them.
"""

from __future__ import annotations

import math
from collections import Counter

from g2d_jax.config import Offline
from g2d_jax.data.fields import LeftOut
from g2d_jax.data.preference_sets import HUB, PairRow, pair_rows, to_pair
from g2d_jax.data.splits import problem_id
from g2d_jax.records import Preference, Prompt
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
    if not source.startswith(HUB) and has_preferences(source):
        return read_preferences(source)
    held_out = _held_out(session)
    pairs: list[Preference] = []
    left_out, firsts = Counter[str](), dict[str, str]()
    for row in pair_rows(source):
        try:
            pair = row.read(to_pair)  # raises BrokenRow with its place
            pairs.append(_encoded(session, stage, pair, held_out))
        except LeftOut as reason:
            left_out[str(reason)] += 1
            if reason.__cause__ is not None:
                firsts.setdefault(
                    str(reason), f" (the first: {row.where}: {reason.__cause__!s:.300})"
                )
    counted = []
    for why, count in left_out.items():
        counted.append(f"{count} {why}{firsts.get(why, '')}")
    listed = ", ".join(counted)
    if not pairs:
        raise ValueError(f"{source} has no pair to train on: {listed or 'it has no rows'}")
    if left_out:
        session.say_once(f"{source}: {len(pairs)} pairs; left out: {listed}")
    return pairs


def _encoded(
    session: Session, stage: Offline, pair: PairRow, held_out: dict[str, str]
) -> Preference:
    """Tokenise a pair. Raises LeftOut for what is too long, or cannot be tokenised."""
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
    longest = session.config.data.max_prompt_length
    if len(prompt_ids) > longest:
        raise LeftOut(f"with a prompt longer than data.max_prompt_length, {longest} tokens")
    length = len(prompt_ids) + max(len(chosen_ids), len(rejected_ids))
    if stage.max_length is not None and length > stage.max_length:
        raise LeftOut(f"longer than the stage's max_length, {stage.max_length} tokens")
    positions = session.model_config.max_position_embeddings
    if length > positions:
        raise LeftOut(f"longer than the model has positions, {positions}")
    return Preference(
        problem_id=_problem(pair.prompt, held_out),
        prompt=pair.prompt,
        chosen=pair.chosen,
        rejected=pair.rejected,
        prompt_ids=prompt_ids,
        chosen_ids=chosen_ids,
        rejected_ids=rejected_ids,
        chosen_reward=math.nan,
        rejected_reward=math.nan,
    )


def _held_out(session: Session) -> dict[str, str]:
    """Map the ids of dev's and test's prompts, bare and in the prompt template, to the problem's
    own id."""
    found: dict[str, str] = {}
    for problem in session.problems.held_out:
        asked = session.tokenizer.conversation(problem)[-1]["content"]
        found |= {problem.id: problem.id, problem_id(asked): problem.id}
    return found


def _problem(prompt: Prompt, held_out: dict[str, str]) -> str:
    """Return the id of a pair's problem: of a held-out one that it asks, in whatever conversation,
    or else its own."""
    own = problem_id(prompt)
    asked = [own]
    if not isinstance(prompt, str):
        asked += [problem_id(message["content"]) for message in prompt if message["role"] == "user"]
    return next((held_out[identifier] for identifier in asked if identifier in held_out), own)
