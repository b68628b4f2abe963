"""A prompt and its response as one conversation in a reward model's own chat template, and as token
ids.

Prompts and responses are hostile: what they spell is never a special token. Text without the name
of one is tokenised in one piece with the template's text around it, as every other library does it.
Elsewhere the names are hidden from the template behind characters of Unicode's private use area,
the template's own special tokens are told apart from the text between them, and that text is
tokenised with special tokens switched off. Whatever comes out, the special tokens in the ids are
those that the template wrote, in its order, or there are no ids.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from g2d_jax.data.tokenizer import Ids, PromptTokenizer, encode
from g2d_jax.records import Message, Prompt

_PRIVATE = range(0xF0000, 0xFFFFE)


class Conversations:
    """Token ids of conversations, in the template of one tokenizer.

    Raises ValueError for a tokenizer without a chat template.
    """

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        if not tokenizer.template.is_chat:
            raise ValueError(
                "the reward model's tokenizer has no chat template, so a conversation cannot be "
                "written as the model "
                "was trained: set reward.model.tokenizer to the folder of one that has"
            )
        self.tokenizer = tokenizer
        self._special: Mapping[str, int] = {
            name: i for name, i in tokenizer.special_tokens.items() if name
        }
        self._names = re.compile(
            "|".join(map(re.escape, sorted(self._special, key=len, reverse=True))) or r"(?!)"
        )
        unknown = tokenizer.pretrained.unk_token_id
        self._special_ids = np.asarray(sorted(set(self._special.values()) - {unknown}), np.int32)
        self._unknown = unknown
        self._plain: Any = Tokenizer.from_str(tokenizer.backend.to_str())
        self._plain.encode_special_tokens = True  # their names are text like any other

    def encode(self, prompt: Prompt, response: str) -> Ids | None:
        """Return the conversation's ids, [T] int32, beginning with one BOS where the tokenizer has
        one.

        None when the text cannot be encoded, or not without a special token that the template did
        not write. Raises ValueError when the chat template fails, which is a matter of settings.
        """
        messages = (
            *self.tokenizer.template.conversation(prompt),
            {"role": "assistant", "content": response},
        )
        hidden = self._hide(messages)
        text = self.tokenizer.template.apply(
            tuple(_replaced(m, hidden) for m in messages), generation=False
        )
        frame = [self._special[name] for name in self._names.findall(text)]
        try:
            ids = None if hidden else self._checked(self.tokenizer.encode_text(text), frame)
            if ids is None:
                ids = self._checked(self._encode_apart(text, hidden), frame)
        except ValueError:  # a character that the tokenizer does not know
            return None
        if not ids:
            return None
        return np.asarray(self._with_one_bos(ids), np.int32)

    def _hide(self, messages: tuple[Message, ...]) -> dict[str, str]:
        """Map names of special tokens in the messages to characters that occur nowhere in them."""
        text = "\n".join(message["content"] for message in messages)
        names = sorted(set(self._names.findall(text)), key=len, reverse=True)
        free = (chr(code) for code in _PRIVATE if chr(code) not in text)
        return dict(zip(names, free, strict=False))

    def _encode_apart(self, text: str, hidden: Mapping[str, str]) -> list[int]:
        """Encode the template's special tokens as such, and the text between them without any."""
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

    def _checked(self, ids: list[int], frame: list[int]) -> list[int] | None:
        """Return ids if its special tokens are those of the frame, else None."""
        array = np.asarray(ids, np.int64)
        expected = [i for i in frame if i != self._unknown]
        if array[np.isin(array, self._special_ids)].tolist() != expected:
            return None
        return ids

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        """Begin with one BOS: as the template wrote it, or else by the tokenizer's own rule."""
        bos, ids = self.tokenizer.bos_id, self.tokenizer.without_second_bos(ids)
        if self.tokenizer.adds_bos and bos is not None and ids[0] != bos:
            return [bos, *ids]
        return ids


def _replaced(message: Message, hidden: Mapping[str, str]) -> Message:
    content = message["content"]
    for name, character in hidden.items():
        content = content.replace(name, character)
    return {**message, "content": content}
