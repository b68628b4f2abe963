"""Scores of responses by a reward model, with its own tokenizer and template.

scores = RewardModel(config.reward.model, mesh, config.dtype).score(prompts, responses)
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax.sharding import Mesh

from g2d_jax.config import Dtype
from g2d_jax.config import RewardModel as Settings
from g2d_jax.data.template import DEFAULT_SYSTEM, TemplateSettings
from g2d_jax.data.tokenizer import Ids, PromptTokenizer, load_tokenizer
from g2d_jax.models import hf, reward_model
from g2d_jax.records import Prompt, Score, Verdict, is_reward
from g2d_jax.scoring.batches import BatchScorer
from g2d_jax.scoring.conversation import Conversations

_UNSCORABLE = Score(None, Verdict.UNSCORABLE)


class RewardModel:
    """The reward model of a config's reward.model section, on the mesh.

    Raises ValueError for wrong settings or a wrong folder (see models/reward_model.py), such as
    another model's tokenizer, or a max_length beyond the model's positions. max_length: most tokens
    of a conversation. A longer one has no score, since the token that carries the score would be
    cut. batch_tokens, dtype: see BatchScorer. usage: the model's work so far; compare it around a
    call.
    """

    def __init__(self, settings: Settings, mesh: Mesh, dtype: Dtype) -> None:
        self.conversations = conversations_of(settings)
        self.max_length = settings.max_length
        folder = hf.resolve(settings.path, revision=settings.revision)
        model = reward_model.load(folder, mesh=mesh, dtype=jnp.dtype(dtype))
        self.read_out = model.read_out
        self.scorer = BatchScorer(
            model, mesh, batch_tokens=settings.batch_tokens, dtype=jnp.dtype(dtype)
        )
        self.usage = self.scorer.usage

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Score]:
        """Score every response to its prompt: SCORED, or UNSCORABLE with reward None.

        Unscorable are conversations of more than max_length tokens, those that cannot be encoded or
        lack the scored token, and scores that are not finite or beyond MOST_REWARD. Raises
        ValueError when the counts of prompts and responses differ, and when the chat template
        fails.
        """
        encoded = [self._encode(*pair) for pair in zip(prompts, responses, strict=True)]
        read = {row: ids for row, ids in enumerate(encoded) if ids is not None}
        values = self.scorer.score(list(read.values()))
        scores = [_UNSCORABLE] * len(encoded)
        for row, value in zip(read, values.tolist(), strict=True):
            if is_reward(value):
                scores[row] = Score(value, Verdict.SCORED)
        return scores

    def _encode(self, prompt: Prompt, response: str) -> Ids | None:
        """Return the tokens to run, scored at the last one; None if there is no score."""
        ids = self.conversations.encode(prompt, response)
        if ids is None:
            return None
        whole = self.read_out.complete(ids)
        scored = self.read_out.scored_part(whole)
        return scored if len(scored) and len(whole) <= self.max_length else None


def conversations_of(settings: Settings) -> Conversations:
    """Return a reward model's conversations, from its tokenizer and its weights' headers alone.

    Raises ValueError as `RewardModel` does.
    """
    folder = hf.resolve(settings.path, revision=settings.revision)
    config, _, _, read_out = reward_model.read_layout(folder)
    tokenizer = open_tokenizer(settings)
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"the reward model has {config.vocab_size} words, but its tokenizer has "
            f"{tokenizer.vocab_size}: use both from the same model"
        )
    if read_out.cls_id is not None and tokenizer.pretrained.cls_token_id != read_out.cls_id:
        raise ValueError(
            f"the reward model reads its score at the CLS token {read_out.cls_id}, but its "
            f"tokenizer's cls_token has the id {tokenizer.pretrained.cls_token_id}: set reward.model.path to a "
            "copy of its folder with its original tokenizer"
        )
    if not 1 <= settings.max_length <= config.positions:
        raise ValueError(
            f"reward.model.max_length is {settings.max_length}, but the reward model has "
            f"{config.positions} positions: lower it to at most that"
        )
    return Conversations(tokenizer)


def open_tokenizer(settings: Settings) -> PromptTokenizer:
    """Load the tokenizer of a reward model, without its weights. Raises ValueError as
    `load_tokenizer`.

    The template is used as it is, its own system block included: the model was trained with it.
    """
    template = TemplateSettings(system=DEFAULT_SYSTEM)
    return load_tokenizer(settings.path, template, revision=settings.revision, generates=False)
