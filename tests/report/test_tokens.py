"""Tokens with their probabilities: what is coloured spells the text, whatever the tokenizer does with characters."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from g2d_jax.data.tokenizer import PromptTokenizer
from g2d_jax.report.tokens import MOST, coloured, level, pieces, run_tokenizer


def byte_level() -> PromptTokenizer:
    """A token for every byte, as what is left of a character that no merge knows, and one for the end."""
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {"the": 256}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PromptTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>"))


def sentence_piece() -> PromptTokenizer:
    """As in Llama 2: "▁" for a space, the first one not part of the text, and bytes where there is no token."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "b"]
    vocabulary = {word: i for i, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a")], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return PromptTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", unk_token="<unk>"))


BYTES, PIECES, EMBEDDED = byte_level(), sentence_piece(), run_tokenizer({})


def nats(*probabilities: float) -> np.ndarray:
    return np.log(np.array(probabilities, np.float32))


def test_every_token_has_its_probability():
    ids = EMBEDDED.encode_completion("8-4=4;")
    markup = coloured(EMBEDDED, "8-4=4;", ids, nats(0.99, 0.95, 0.51, 0.21, 0.06, 0.01, 0.97))
    assert markup == (
        '<pre tabindex="0" class="tokens"><span class="p0" title="2 tokens, least p = 0.95">8-</span>'
        '<span class="p1" title="p = 0.51">4</span><span class="p2" title="p = 0.21">=</span>'
        '<span class="p3" title="p = 0.06">4</span><span class="p4" title="p = 0.01">;</span>'
        '<span class="p0 special" title="p = 0.97">&lt;eos&gt;</span></pre>'
    )


@pytest.mark.parametrize(
    ("probability", "number"),
    [(1, 0), (0.9, 0), (0.899, 1), (0.5, 1), (0.49, 2), (0.2, 2), (0.19, 3), (0.05, 3), (0.049, 4), (0, 4)],
)
def test_classes(probability, number):
    assert level(probability) == number


def test_a_character_of_several_tokens_is_one_piece():
    ids = BYTES.encode_completion("é数🙂")[:-1]
    assert len(ids) == 9
    assert [(piece.text, piece.first, piece.last) for piece in pieces(BYTES, ids)] == [
        ("é", 0, 2), ("数", 2, 5), ("🙂", 5, 9),
    ]  # fmt: skip
    markup = coloured(BYTES, "é数🙂", ids, np.full(9, np.log(0.3), np.float32))
    assert markup.count('title="2 tokens, mean p = 0.3">é<') == 1
    assert markup.count('title="4 tokens, mean p = 0.3">🙂<') == 1


def cut(tokenizer: PromptTokenizer, ids: list[int]) -> None:
    found = pieces(tokenizer, np.array(ids, np.int32))
    assert found is not None
    assert "".join(piece.text for piece in found) == tokenizer.decode_raw(ids)
    assert [i for piece in found for i in range(piece.first, piece.last)] == list(range(len(ids)))


@given(st.binary(max_size=24))
@example(b"\xf0\x90\x80")  # a prefix of a character whose second byte leaves the text as it was
def test_any_bytes_are_cut_without_loss(data):
    """Also what is no UTF-8: stray and unfinished characters, as a model under temperature writes them."""
    cut(BYTES, [BYTE_IDS[byte] for byte in data])


@given(st.text(max_size=12))
def test_any_text_in_bytes_is_cut_without_loss(text):
    """Llama's byte tokens: one that is out of place spoils all bytes beside it, so here only text."""
    cut(PIECES, [1 + byte for byte in text.encode()])


def _byte_ids() -> dict[int, int]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    order = sorted(pre_tokenizers.ByteLevel.alphabet())
    return {byte: order.index(name) for byte, name in names.items()}


BYTE_IDS = _byte_ids()
"""The id of the token that stands for a byte: GPT-2's table of printable stand-ins."""


@given(st.lists(st.sampled_from([257, 258, 259, 260]), max_size=12))
def test_spaces_belong_to_the_right_token(ids):
    cut(PIECES, ids)


def test_of_a_long_text_both_ends_are_shown():
    text = "数" * 20_000
    ids = BYTES.encode_completion(text)[:-1]
    markup = coloured(BYTES, text, ids, np.zeros(len(ids), np.float32))
    head, tail = markup.split("\n[… ")
    left_out, tail = tail.split(" tokens left out …]\n")
    assert "\ufffd" not in markup
    assert int(left_out.replace(",", "")) == 60_000 - 3 * markup.count("数")
    assert MOST - 12 <= 3 * markup.count("数") <= MOST
    assert head.count("数") and tail.count("数") and len(markup) < 1000


@pytest.mark.parametrize(
    ("text", "ids", "logprobs"),
    [
        ("another text", [7, 2], [-0.1, -0.1]),
        ("50", [7, 2], [-0.1, np.nan]),  # from elsewhere: not known
        ("50", [7, 2], [-0.1]),
        ("50", [-7, 2], [-0.1, -0.1]),
        ("", [], []),
    ],
)
def test_what_cannot_be_right_is_not_coloured(text, ids, logprobs):
    assert coloured(EMBEDDED, text, np.array(ids, np.int32), np.array(logprobs, np.float32)) is None


def test_text_that_looks_like_markup_or_a_special_token_is_neither():
    text = "<end></pre><script>alert(1)</script>\x1b[2J\u202e\0"
    raw = text.encode()
    ids = np.array([BYTE_IDS[byte] for byte in raw], np.int32)
    markup = coloured(BYTES, text, ids, np.full(len(ids), -5, np.float32))
    assert "<script" not in markup and "special" not in markup
    assert "\\x1b" in markup and "\\u202e" in markup and "\\x00" in markup
    assert not {"\x1b", "\u202e", "\0"} & set(markup)


@pytest.mark.parametrize(
    "config",
    [
        {"model": {"path": "/nowhere/model"}},
        {"tokenizer": {"path": "/nowhere/tokenizer"}},
        {"tokenizer": {"prompt_template": 3}},
        {"tokenizer": []} | {"model": [1]},
    ],
)
def test_a_tokenizer_that_is_not_there(config):
    with pytest.raises(ValueError, match=r"tokenizer|prompt_template"):
        run_tokenizer(config)
