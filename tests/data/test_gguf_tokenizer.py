"""Tokenizers of GGUF files: the ids of the tokenizers that the files were made from, and what is
not supported or does not go together, by name."""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import GemmaTokenizer, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.tokenization_utils_base import generate_merges

from g2d_jax.data.template import TemplateSettings
from g2d_jax.data.tokenizer import load_tokenizer

gguf = pytest.importorskip("gguf")
import ggufs  # noqa: E402

ROOT = Path(__file__).parents[2]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
BOS, EOS, IM_START, IM_END = "<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WRITTEN = [
    "",
    " ",
    "Hello, world! Don't you'LL we've",
    "  leading, and   inner    spaces ",
    "3 33 333 3333  12 x=1.5e-3 ½ Ⅳ ²",
    "\n \n\n \n\n\n \t \t\t\r\n  \n   \n x",
    "e\u0301 é ﬁ Ångström 我想在apple工作 нещо на Български 🚀🦙🦙 \u200d",
    "```python\ndef f(x):\n    return x**2  # ''''''\n``` ======= ......!!!???",
    f"{IM_START}user\nhi{IM_END}\n{BOS} a {EOS}b <think> c</think>",
    "<s> a </s> b <bos> c <eos> d <0x41> <unk> \u2581 \u2581\u2581x",
]


def texts() -> list[str]:
    drawn = random.Random(0)
    letters = [
        *"abcdeXYZ      \n\n\t0123456789.,'\"!?-ñé中😀½",
        "the ",
        " and",
        IM_END,
        "</s>",
        "  ",
    ]
    made = ["".join(drawn.choices(letters, k=drawn.randint(1, 40))) for _ in range(400)]
    return WRITTEN + made


def corpus() -> list[str]:
    pages = [(ROOT / "docs" / name).read_text() for name in ("concepts.md", "limits.md")]
    return [*"\n".join(pages).splitlines(), *WRITTEN * 3]


def trained(splitter: Any, special: list[str], alphabet: list[str]) -> tuple[dict[str, int], Any]:
    """The tokens and merges of a BPE of 700 tokens, which cuts text so."""
    backend = Tokenizer(BPE(unk_token="<unk>" if "<unk>" in special else None))
    backend.pre_tokenizer = splitter
    trainer = BpeTrainer(
        vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(corpus(), trainer)
    model = json.loads(backend.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def metadata(vocab: Mapping[str, int], kinds: Mapping[str, int], **entries: Any) -> dict[str, Any]:
    """The metadata of a tokenizer. kinds: of those tokens that are not normal."""
    tokens = sorted(vocab, key=lambda token: vocab[token])
    own = {f"tokenizer.ggml.{name}": value for name, value in entries.items()}
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds.get(token, NORMAL) for token in tokens],
        **own,
    }


def written(path: Path, entries: Mapping[str, Any]) -> Path:
    return ggufs.write(path, entries, {})


def byte_level(pattern: str, composed: bool, whole: bool, digits: bool = False) -> Any:
    """A byte-level BPE in Hugging Face's form with its special tokens: backend, tokens, merges."""
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if pattern:
        steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern))
    splitter = pre_tokenizers.Sequence(steps)
    vocab, merges = trained(splitter, [], pre_tokenizers.ByteLevel.alphabet())
    if whole:  # a token that no merges make
        vocab["Ġsupported"] = len(vocab)
    backend = Tokenizer(BPE(vocab, merges, ignore_merges=whole))
    backend.pre_tokenizer = splitter
    backend.decoder = decoders.ByteLevel()
    if composed:
        backend.normalizer = normalizers.NFC()
    return add_own(backend), vocab, merges


def add_own(backend: Any) -> Any:
    backend.add_special_tokens([BOS, EOS, IM_START, IM_END])
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return backend


KINDS = {BOS: CONTROL, EOS: CONTROL, IM_START: CONTROL, IM_END: CONTROL, "<think>": USER_DEFINED}


LLAMA3 = str(inspect.signature(TikTokenConverter).parameters["pattern"].default)
TEKKEN = (  # of Mistral Nemo's tokenizer.json
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def of_pre(name: str) -> tuple[Any, dict[str, Any]]:
    """A reference for a value of tokenizer.ggml.pre, and the metadata of it."""
    forms = {
        "qwen2": ("", True, False),
        "llama-bpe": (LLAMA3, False, True),
        "smaug-bpe": (LLAMA3, False, True),
        "tekken": (TEKKEN, False, True),
        "smollm": ("", False, False),
        "gpt-2": ("", False, False),
    }
    backend, vocab, merges = byte_level(*forms[name], digits=name == "smollm")
    if name == "qwen2":
        backend = add_own(Qwen2Tokenizer(vocab=vocab, merges=merges).backend_tokenizer)
    all_tokens = backend.get_vocab(with_added_tokens=True)
    kinds = {**KINDS, "<|endoftext|>": CONTROL}
    for i in range(len(all_tokens), len(all_tokens) + 3):  # rows of the embedding beyond the tokens
        all_tokens[f"[PAD{i}]"] = i
        kinds[f"[PAD{i}]"] = UNUSED
    ids = {name: all_tokens[token] for name, token in (("bos", BOS), ("eos", EOS), ("eot", IM_END))}
    entries = metadata(
        all_tokens,
        kinds,
        model="gpt2",
        pre=name,
        merges=[" ".join(pair) for pair in merges],
        **{f"{role}_token_id": number for role, number in ids.items()},
    )
    if name in ("llama-bpe", "tekken"):
        backend.post_processor = TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, ids["bos"])]
        )
    return backend, {**entries, "tokenizer.chat_template": CHATML}


def of_sentence_piece(name: str) -> tuple[Any, dict[str, Any]]:
    """A reference in the form of Llama 2, Mistral 7B or Gemma 3, and the metadata of it."""
    gemma = name == "gemma3"
    bytes_of = [f"<0x{number:02X}>" for number in range(256)]
    special = ["<pad>", "<eos>", "<bos>", "<unk>"] if gemma else ["<unk>", "<s>", "</s>"]
    runs = ["\n\n", "\n\n\n", "\u2581\u2581", "\u2581\u2581\u2581"] if gemma else []
    vocab, _ = trained(pre_tokenizers.Metaspace(), [*special, *runs, *bytes_of], ["\u2581", "\n"])
    kinds = {token: CONTROL for token in special} | {token: BYTE for token in bytes_of}
    scores = {token: 0.0 if token in kinds else -float(i) for token, i in vocab.items()}
    ids = {"unknown_token_id": vocab["<unk>"], "model": "llama", "pre": "default"}
    if gemma:
        merges = generate_merges(vocab, {token: -i for token, i in vocab.items()})
        reference = GemmaTokenizer(vocab=vocab, merges=merges)
        lines = [AddedToken(token, normalized=False, special=False) for token in runs[:2]]
        reference.add_tokens(lines)
        backend = reference.backend_tokenizer
        bos, eos = "<bos>", "<eos>"
        kinds |= dict.fromkeys([*runs, "  ", "   "], USER_DEFINED)
        spelled = {
            token.replace("\u2581", " ") if token in runs else token: i
            for token, i in vocab.items()
        }
        scores = {token: -1000.0 for token in spelled}
        entries = metadata(spelled, kinds, add_space_prefix=False, **ids)
        entries["general.architecture"] = "gemma3"
    else:
        kinds["<unk>"] = UNKNOWN
        merges = generate_merges(vocab, scores)
        model = BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        backend = Tokenizer(model)
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
        steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
        backend.add_special_tokens(special)
        bos, eos = "<s>", "</s>"
        entries = metadata(vocab, kinds, **ids)
    backend.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, vocab[bos])]
    )
    entries["tokenizer.ggml.scores"] = [scores[token] for token in entries["tokenizer.ggml.tokens"]]
    entries["tokenizer.ggml.bos_token_id"] = vocab[bos]
    entries["tokenizer.ggml.eos_token_id"] = vocab[eos]
    return backend, entries


REFERENCES = {
    **{name: of_pre for name in ("qwen2", "llama-bpe", "smaug-bpe", "tekken", "smollm", "gpt-2")},
    **{name: of_sentence_piece for name in ("mistral", "gemma3")},
}


@pytest.mark.parametrize("name", REFERENCES)
def test_ids_are_those_of_the_original(name: str, tmp_path: Path) -> None:
    backend, entries = REFERENCES[name](name)
    found = load_tokenizer(written(tmp_path / "a.gguf", entries))
    for text in texts():
        for special in (False, True):
            theirs = backend.encode(text, add_special_tokens=special).ids
            assert found.backend.encode(text, add_special_tokens=special).ids == theirs, repr(text)
        for kept in (False, True):
            expected = backend.decode(theirs, skip_special_tokens=kept)
            assert found.backend.decode(theirs, skip_special_tokens=kept) == expected
    assert found.adds_bos == (name in ("llama-bpe", "tekken", "mistral", "gemma3"))


def test_template_and_stop_tokens_are_the_files(tmp_path: Path) -> None:
    _, entries = of_pre("qwen2")
    tokenizer = load_tokenizer(written(tmp_path / "a.gguf", entries), TemplateSettings())
    assert tokenizer.render("1+1") == ("<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n")
    names = {tokenizer.backend.id_to_token(i) for i in tokenizer.eos_ids}
    assert names == {EOS, IM_END}
    assert tokenizer.backend.id_to_token(tokenizer.stop_id) == IM_END
    assert tokenizer.backend.id_to_token(tokenizer.bos_id) == BOS
    assert "[PAD" not in tokenizer.backend.to_str()
    tokenizer.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    for text in texts():
        assert again.encode_text(text) == tokenizer.encode_text(text)
    assert again.template.source == tokenizer.template.source


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"model": "t5"}, "tokenizer.ggml.model 't5' is not supported; supported are gpt2, llama"),
        ({"pre": "glm4"}, "tokenizer.ggml.pre 'glm4' is not supported; supported are gpt-2, smoll"),
        ({"pre": None}, "its metadata lacks tokenizer.ggml.pre"),
        ({"merges": None}, "lacks tokenizer.ggml.merges"),
        ({"merges": ["a b", "zz yy"]}, "its tokens and merges do not go together"),
        ({"merges": ["ab"]}, "its tokens and merges do not go together"),
        ({"token_type": [1, 1]}, "token_type has 2 numbers for 4 tokens"),
        ({"tokens": ["a", "b", "ab", "a"]}, "has a token twice"),
        ({"tokens": ["a", "b", "ab", "c" * 300]}, "a token of more than 256 characters"),
        ({"eos_token_id": 4}, "eos_token_id is 4, which is none of 4 tokens"),
        ({"eos_token_id": "x"}, "eos_token_id must be an integer, got 'x'"),
        (
            {"tokens": ["a", "b", "ab", "[PAD3]"], "token_type": [1, 1, 1, 5]},
            "eos_token_id is 3, which is none of 4",
        ),
        ({"token_type": "1111"}, "token_type must be a list of numbers, got '1111'"),
        ({"tokens": [1, 2, 3, 4]}, "tokens must be a list of texts"),
        (
            {"tokens": ["a", "b", "ab", "a:b:c"], "add_eos_token": True},
            "a text cannot begin or end with",
        ),
        ({"eos_token_id": None}, "has no end-of-sequence token"),
        ({"add_bos_token": True}, "add_bos_token is true, and there is no tokenizer.ggml.bos"),
        ({"model": "llama"}, "its metadata lacks tokenizer.ggml.scores"),
        ({"model": "llama", "scores": [0.0] * 4, "merges": None}, "scores are all the same"),
        ({"model": "llama", "remove_extra_whitespaces": True}, "remove_extra_whitespaces is not"),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, entries: dict[str, Any], message: str
) -> None:
    whole = {
        "tokens": ["a", "b", "ab", "<end>"],
        "token_type": [1, 1, 1, 3],
        "merges": ["a b"],
        "model": "gpt2",
        "pre": "gpt-2",
        "eos_token_id": 3,
        **entries,
    }
    stated = {f"tokenizer.ggml.{key}": value for key, value in whole.items() if value is not None}
    path = written(tmp_path / "a.gguf", {"general.architecture": "llama", **stated})
    with pytest.raises(ValueError, match=message) as error:
        load_tokenizer(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
