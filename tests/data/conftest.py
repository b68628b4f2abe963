"""Small real tokenizers, made in memory, with the habits of well-known families."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BOS, END, IM_START, IM_END = "<|bos|>", "<|end|>", "<|im_start|>", "<|im_end|>"
SPECIAL = [BOS, END, IM_START, IM_END]

# A default system prompt unless one is given, as Qwen2.5.
CHATML_WITH_DEFAULT = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are a toy.<|im_end|>\n' "
    "}}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% "
    "endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# No default; an empty thought before the last assistant turn and, on request, in the generation
# prompt, as Qwen3.
CHATML_THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' "
    "}}{% endif %}{% endif %}"
)
# BOS in the template, a system block with the date in every conversation, content trimmed, as Llama
# 3.2.
DATED = (
    "{{ bos_token }}"
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{% set given = messages[0].role == 'system' %}"
    "{{ '[system]\n\nToday Date: ' + date_string + '\n\n' }}"
    "{% if given %}{{ messages[0].content | trim }}{% endif %}{{ '<|im_end|>' }}"
    "{% for m in (messages[1:] if given else messages) %}"
    "{{ '[' + m.role + ']\n\n' + m.content | trim + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]\n\n' }}{% endif %}"
)


def byte_level() -> Tokenizer:
    """A byte-level BPE of all bytes and a few merges."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=275, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    backend.train_from_iterator(["the answer is the answer"] * 3, trainer)
    return backend


class Toys:
    """toys(chat_template=None, adds_bos=False, **special tokens): a byte-level tokenizer."""

    chatml_with_default = CHATML_WITH_DEFAULT
    chatml_thinking = CHATML_THINKING
    dated = DATED

    def __init__(self) -> None:
        self._serialized = byte_level().to_str()

    def __call__(
        self, chat_template: str | None = None, adds_bos: bool = False, **tokens: str
    ) -> PreTrainedTokenizerFast:
        backend = Tokenizer.from_str(self._serialized)
        if adds_bos:
            special = [(BOS, backend.token_to_id(BOS))]
            backend.post_processor = processors.TemplateProcessing(
                single=f"{BOS} $A", special_tokens=special
            )
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend, **{"eos_token": END, **tokens}
        )
        tokenizer.chat_template = chat_template
        return tokenizer


@pytest.fixture(scope="session")
def make() -> Toys:
    """See Toys."""
    return Toys()


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., str]:
    """jsonl(*rows): path of a file with these rows, values or raw bytes."""

    def write(*rows: Any) -> str:
        path = tmp_path / "rows.jsonl"
        path.write_bytes(
            b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)
        )
        return str(path)

    return write
