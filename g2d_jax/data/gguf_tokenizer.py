"""A tokenizer and chat template of a GGUF file's metadata, built with the library `tokenizers`.

A file has tokens, merges or scores, and the name of the rule by which text is cut before merging.
The rest (normalisation, how spaces are written) is known by that name, as Hugging Face's tokenizers
of these families have it, so that ids are theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from g2d_jax.runtime import gguf_file, storage
from g2d_jax.runtime.gguf_file import Gguf

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # of tokenizer.ggml.token_type
_MOST_CHARACTERS = 256  # of a token; merges are made of all ways to cut one
_SPACE = "\u2581"  # as which SentencePiece writes a space

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _Cut:
    """A rule by which byte-level BPE cuts text. pattern: a regular expression whose matches are
    merged each by itself; empty: GPT-2's. digits: each digit is cut off first. composed: text is
    put into Unicode's form NFC. whole: a piece that is a token is not merged. bos: a text begins
    with BOS where the file does not say."""

    pattern: str = ""
    digits: bool = False
    composed: bool = False
    whole: bool = False
    bos: bool = False


_CUTS = {
    "gpt-2": _Cut(),
    "smollm": _Cut(digits=True),
    "qwen2": _Cut(_QWEN2, composed=True),
    "llama-bpe": _Cut(_LLAMA3, whole=True, bos=True),
    "llama-v3": _Cut(_LLAMA3, whole=True, bos=True),
    "llama3": _Cut(_LLAMA3, whole=True, bos=True),
    "smaug-bpe": _Cut(_LLAMA3, whole=True),  # SmolLM3's too: Llama 3's without BOS
    "tekken": _Cut(_TEKKEN, whole=True, bos=True),
}
"""By tokenizer.ggml.pre."""


def load(path: storage.PathLike) -> tuple[PreTrainedTokenizerFast, tuple[int, ...]]:
    """Return the tokenizer of a file with its chat template, and the ids that end a response.

    Raises ValueError naming the file and the entry for a kind of tokenizer or rule that is not
    known here, and for tokens, merges, scores and ids that do not go together.
    """
    file = gguf_file.read(path)
    try:
        return _build(_Vocabulary(file))
    except ValueError as error:
        text = str(error)
        if text.startswith(file.path):
            raise
        raise ValueError(f"{file.path}: {text}") from error


class _Vocabulary:
    """The tokens of a file. tokens: by id. kinds: int [tokens]. ids: of tokens, without those that
    only fill the embedding up."""

    def __init__(self, file: Gguf) -> None:
        self.file = file
        self.model: str = file.need("tokenizer.ggml.model", str)
        self.tokens: list[str] = file.need("tokenizer.ggml.tokens", list)
        self.kinds = self.numbers("token_type")
        if len(set(self.tokens)) < len(self.tokens):
            raise ValueError("tokenizer.ggml.tokens has a token twice")
        if max(map(len, self.tokens), default=0) > _MOST_CHARACTERS:
            raise ValueError(
                f"tokenizer.ggml.tokens has a token of more than {_MOST_CHARACTERS} characters"
            )
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        for i in np.flatnonzero(self.kinds == _UNUSED).tolist():
            if self.tokens[i] == f"[PAD{i}]":
                del self.ids[self.tokens[i]]

    def numbers(self, name: str) -> np.ndarray:
        """Return a list of as many numbers as there are tokens."""
        numbers = self.file.need(f"tokenizer.ggml.{name}", np.ndarray)
        if len(numbers) != len(self.tokens):
            raise ValueError(
                f"tokenizer.ggml.{name} has {len(numbers)} numbers for {len(self.tokens)} tokens"
            )
        return numbers  # type: ignore[no-any-return]

    def of_kind(self, *kinds: int) -> list[str]:
        """List the tokens of these kinds that are not empty."""
        chosen = np.flatnonzero(np.isin(self.kinds, kinds)).tolist()
        return [self.tokens[i] for i in chosen if self.tokens[i]]

    def special(self, name: str) -> str | None:
        """Return the token of a role, None without one."""
        number = self.file.get(f"tokenizer.ggml.{name}_token_id", int)
        return None if number is None else self.tokens[self.valid_id(name, number)]

    def valid_id(self, name: str, number: int) -> int:
        """Return the id of a token of a role. Raises ValueError if there is no such token."""
        inside = 0 <= number < len(self.tokens)
        if not inside or self.tokens[number] not in self.ids or not self.tokens[number]:
            raise ValueError(
                f"tokenizer.ggml.{name}_token_id is {number}, which is none of {len(self.tokens)} "
                "tokens"
            )
        return number

    def merges(self) -> list[tuple[str, str]] | None:
        """Return the merges that the file has, None without them."""
        lines = self.file.get("tokenizer.ggml.merges", list)
        if lines is None:
            return None
        # A token may begin with a space, and has none elsewhere.
        merges = []
        for line in lines:
            left = line[:1] + line[1:].partition(" ")[0]
            merges.append((left, line[len(left) + 1 :]))
        return merges


def _build(vocabulary: _Vocabulary) -> tuple[PreTrainedTokenizerFast, tuple[int, ...]]:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    builders: Mapping[str, Callable[[_Vocabulary], tuple[Any, bool]]] = {
        "gpt2": _byte_level,
        "llama": _sentence_piece,
    }
    if vocabulary.model not in builders:
        raise ValueError(
            f"tokenizer.ggml.model {vocabulary.model!r:.100} is not supported; supported are "
            f"{', '.join(builders)}"
        )
    backend, bos_unsaid = builders[vocabulary.model](vocabulary)
    control = vocabulary.of_kind(_CONTROL, _UNKNOWN)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    named = vocabulary.of_kind(_USER_DEFINED)
    own = [token for token in named if not _is_run_of_spaces(token, vocabulary)]
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in own])
    roles = {
        "bos_token": vocabulary.special("bos"),
        "eos_token": vocabulary.special("eos"),
        "unk_token": vocabulary.special("unknown"),
        "pad_token": vocabulary.special("padding"),
    }
    _add_ends(backend, vocabulary, roles, bos_unsaid)
    pretrained = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        **{role: token for role, token in roles.items() if token is not None},
    )
    pretrained.chat_template = vocabulary.file.get("tokenizer.chat_template", str)
    ends = []
    for name in ("eot", "eom"):
        end = vocabulary.file.get(f"tokenizer.ggml.{name}_token_id", int)
        if end is not None:
            ends.append(vocabulary.valid_id(name, end))
    return pretrained, tuple(ends)


def _add_ends(
    backend: Any, vocabulary: _Vocabulary, roles: Mapping[str, str | None], bos_unsaid: bool
) -> None:
    """Let the tokenizer begin texts with BOS and end them with EOS as the file has it."""
    from tokenizers.processors import TemplateProcessing

    bos, eos = roles["bos_token"], roles["eos_token"]
    adds_bos = vocabulary.file.get("tokenizer.ggml.add_bos_token", bool, bos_unsaid and bool(bos))
    adds_eos = vocabulary.file.get("tokenizer.ggml.add_eos_token", bool, False)
    for adds, token, name in ((adds_bos, bos, "bos"), (adds_eos, eos, "eos")):
        if adds and token is None:
            raise ValueError(
                f"tokenizer.ggml.add_{name}_token is true, and there is no "
                f"tokenizer.ggml.{name}_token_id"
            )
    before = [bos] if adds_bos else []
    behind = [eos] if adds_eos else []
    if not (before or behind):
        return
    second = [f"{part}:1" for part in (*before, "$B", *behind)]
    ids = [(token, vocabulary.ids[token]) for token in {*before, *behind}]
    try:
        backend.post_processor = TemplateProcessing(
            single=[*before, "$A", *behind],
            pair=[*before, "$A", *behind, *second],
            special_tokens=ids,
        )
    except Exception as error:  # of a token that the bindings read as something else
        raise ValueError(f"a text cannot begin or end with {ids!r:.100}: {error!s:.200}") from error


def _byte_level(vocabulary: _Vocabulary) -> tuple[Any, bool]:
    """Return byte-level BPE, and whether it begins texts with BOS where the file does not say."""
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    name = vocabulary.file.need("tokenizer.ggml.pre", str)
    if name not in _CUTS:
        raise ValueError(
            f"tokenizer.ggml.pre {name!r:.100} is not supported; supported are {', '.join(_CUTS)}"
        )
    cut = _CUTS[name]
    merges = vocabulary.merges()
    if merges is None:
        raise ValueError("its metadata lacks tokenizer.ggml.merges")
    backend = _bpe(vocabulary.ids, merges, ignore_merges=cut.whole)
    steps: list[Any] = []
    if cut.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if cut.pattern:
        steps.append(pre_tokenizers.Split(Regex(cut.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not cut.pattern))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if cut.composed:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend, cut.bos


def _sentence_piece(vocabulary: _Vocabulary) -> tuple[Any, bool]:
    """Return SentencePiece's BPE, and that it begins texts with BOS where the file does not say.

    Gemma's tokens of several spaces are written as such in files, and its merges go in the order
    of the tokens: those have no scores.
    """
    from tokenizers import decoders, normalizers, pre_tokenizers

    for name in ("precompiled_charsmap", "remove_extra_whitespaces"):
        value = vocabulary.file.metadata.get(f"tokenizer.ggml.{name}")
        if value is not None and np.any(value):
            raise ValueError(f"tokenizer.ggml.{name} is not supported")
    gemma = _is_gemma(vocabulary)
    ids = vocabulary.ids
    scores: np.ndarray = np.arange(0, -len(vocabulary.tokens), -1)
    if gemma:
        ids = {
            _respelled(token) if _is_run_of_spaces(token, vocabulary) else token: i
            for token, i in ids.items()
        }
    else:
        scores = vocabulary.numbers("scores")
    merges = vocabulary.merges()
    if merges is None:
        if len(scores) > 1 and (scores == scores[0]).all():
            raise ValueError(
                "tokenizer.ggml.scores are all the same: the order of merges is lost, and there "
                "are no tokenizer.ggml.merges"
            )
        merges = _merges_of(ids, scores)
    unknown = vocabulary.special("unknown")
    backend = _bpe(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    prefixed = vocabulary.file.get("tokenizer.ggml.add_space_prefix", bool, not gemma)
    written = normalizers.Replace(" ", _SPACE)
    decoded = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.normalizer = written
    if prefixed:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), written])
        decoded.append(decoders.Strip(" ", 1, 0))
    if gemma:
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence(decoded)
    return backend, True


def _is_gemma(vocabulary: _Vocabulary) -> bool:
    architecture = vocabulary.file.metadata.get("general.architecture")
    return vocabulary.model == "llama" and architecture == "gemma3"


def _is_run_of_spaces(token: str, vocabulary: _Vocabulary) -> bool:
    """Tell whether a token is one of Gemma's of several spaces, which text is merged to."""
    return _is_gemma(vocabulary) and len(token) > 1 and not token.strip(" ")


def _respelled(token: str) -> str:
    return _SPACE * len(token)


def _merges_of(ids: Mapping[str, int], scores: np.ndarray) -> list[tuple[str, str]]:
    """Return the merges that make tokens of two others, those of the highest score first.

    Those of one score come in the order in which transformers' converters have them, by which
    tokenizer.json files were made: longer first parts, longer second parts, then smaller ids.
    """
    found: list[tuple[float, int, int, int, int, str, str]] = []
    for token, number in ids.items():
        score = -float(scores[number])
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in ids and right in ids:
                found.append((score, -at, -len(right), number, ids[left], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _bpe(ids: Mapping[str, int], merges: list[tuple[str, str]], **options: Any) -> Any:
    """Return a tokenizer of these tokens and merges, the first merges first."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    try:
        return Tokenizer(BPE(dict(ids), merges, **options))
    except Exception as error:  # the bindings raise bare Exceptions
        raise ValueError(f"its tokens and merges do not go together: {error!s:.300}") from error
