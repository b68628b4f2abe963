"""A prompt and its response as one conversation in a reward model's own chat template, and as token
ids.

Prompts and responses are untrusted: text that spells a special token never becomes one. Text
without such a name is tokenised in one piece with the template, as other libraries do it. Otherwise
characters of Unicode's private use area hide the names from the template. The template's own
special tokens are encoded as such, and the text between them with special tokens switched off. The
ids hold exactly the special tokens that the template wrote, in its order, or there are no ids.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from g2d_jax.data.tokenizer import Ids, PromptTokenizer, encode
from g2d_jax.records import Conversation, Message, Prompt

_PRIVATE = range(0xF0000, 0xFFFFE)


class Conversations:
    """Token ids of conversations, in the template of one tokenizer.

    Raises ValueError for a tokenizer without a chat template.
    """

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        if not tokenizer.template.is_chat:
            raise ValueError(
                "the reward model's tokenizer has no chat template, so conversations cannot be "
                "formatted as in its training: put its chat_template.jinja into a copy of "
                "the model's folder, and set reward.model.path to that"
            )
        self.tokenizer = tokenizer
        special = tokenizer.special_tokens
        self._special: Mapping[str, int] = {name: special[name] for name in special if name}
        longest_first = sorted(self._special, key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._counted = {*self._special.values()} - {tokenizer.pretrained.unk_token_id}
        self._plain: Any = Tokenizer.from_str(tokenizer.backend.to_str())
        self._plain.encode_special_tokens = True  # treats their names as ordinary text

    def encode(self, prompt: Prompt, response: str) -> Ids | None:
        """Return the conversation's ids, [T] int32, with one BOS first if the tokenizer has one.

        None if the text cannot be encoded, or only with a special token that the template did not
        write. Raises ValueError when the chat template fails, which a setting must fix.
        """
        template = self.tokenizer.template
        answer = {"role": "assistant", "content": response}
        messages = (*template.conversation(prompt), answer)
        hidden = self._hide(messages)
        text = template.apply(tuple(_replaced(m, hidden) for m in messages), generation=False)
        frame = [self._special[name] for name in self._names.findall(text)]
        try:
            ids = None if hidden else self._if_framed(self.tokenizer.encode_text(text), frame)
            if ids is None:
                ids = self._if_framed(self._encode_apart(text, hidden), frame)
        except ValueError:  # a character that the tokenizer does not know
            return None
        if not ids:
            return None
        return np.asarray(self._with_one_bos(ids), np.int32)

    def _hide(self, messages: Conversation) -> dict[str, str]:
        """Map names of special tokens in the messages to characters that the messages lack."""
        text = "\n".join(message["content"] for message in messages)
        names = sorted(set(self._names.findall(text)), key=len, reverse=True)
        free = (chr(code) for code in _PRIVATE if chr(code) not in text)
        return dict(zip(names, free, strict=False))

    def _encode_apart(self, text: str, hidden: Mapping[str, str]) -> list[int]:
        """Encode the template's special tokens as such, and the text between them as plain text."""
        ids: list[int] = []
        start = 0
        for match in [*self._names.finditer(text), None]:
            piece = text[start : match.start() if match else None]
            for name, character in hidden.items():
                piece = piece.replace(character, name)
            ids += encode(self._plain, piece)
            if match:
                ids.append(self._special[match.group()])
                start = match.end()
        return ids

    def _if_framed(self, ids: list[int], frame: list[int]) -> list[int] | None:
        """Return ids if its special tokens equal the frame's, else None."""
        found = [i for i in ids if i in self._counted]
        expected = [i for i in frame if i in self._counted]
        return ids if found == expected else None

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        """Begin with one BOS: the template's, or else by the tokenizer's own rule."""
        bos, ids = self.tokenizer.bos_id, self.tokenizer.without_second_bos(ids)
        if self.tokenizer.adds_bos and bos is not None and ids[0] != bos:
            return [bos, *ids]
        return ids


def _replaced(message: Message, hidden: Mapping[str, str]) -> Message:
    content = message["content"]
    for name, character in hidden.items():
        content = content.replace(name, character)
    return {**message, "content": content}
