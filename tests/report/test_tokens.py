"""Tokens with their probabilities: what is coloured spells the text, whatever the tokenizer does
with characters."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from g2d_jax.data.tokenizer import PromptTokenizer
from g2d_jax.report.tokens import MOST, Span, coloured, level, pieces, run_tokenizer


def byte_level() -> PromptTokenizer:
    """A token for every byte, as what is left of a character that no merge knows, and one for the
    end."""
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {
        "the": 256
    }
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PromptTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>"))


def sentence_piece() -> PromptTokenizer:
    """As in Llama 2: "▁" for a space, the first one not part of the text, and bytes where there is
    no token."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "b"]
    vocabulary = {word: i for i, word in enumerate(words)}
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[("▁", "a")], byte_fallback=True, unk_token="<unk>")
    )
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    backend.decoder = decoders.Sequence(steps)
    return PromptTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", unk_token="<unk>")
    )


BYTES, PIECES, EMBEDDED = byte_level(), sentence_piece(), run_tokenizer({})


def test_every_token_has_its_probability():
    ids = EMBEDDED.encode_completion("8-4=4;")
    spans = coloured(
        EMBEDDED, "8-4=4;", ids, np.log(np.float32([0.99, 0.95, 0.51, 0.21, 0.06, 0.01, 0.97]))
    )
    assert [span for span in spans if span.text] == [
        Span("8-", "p0", "2 tokens, least p = 0.95"),
        *(Span("4", "p1", "p = 0.51"), Span("=", "p2", "p = 0.21"), Span("4", "p3", "p = 0.06")),
        *(Span(";", "p4", "p = 0.01"), Span("<eos>", "p0 special", "p = 0.97")),
    ]


@pytest.mark.parametrize(
    ("probability", "number"),
    [
        (1, 0),
        (0.9, 0),
        (0.899, 1),
        (0.5, 1),
        (0.49, 2),
        (0.2, 2),
        (0.19, 3),
        (0.05, 3),
        (0.049, 4),
        (0, 4),
    ],
)
def test_classes(probability, number):
    assert level(probability) == number


def test_a_character_of_several_tokens_is_one_piece():
    ids = BYTES.encode_completion("é数🙂")[:-1]
    assert pieces(BYTES, ids) == [("é", 0, 2), ("数", 2, 5), ("🙂", 5, 9)]
    spans = coloured(BYTES, "é数🙂", ids, np.full(9, np.log(0.3), np.float32))
    assert Span("🙂", "p2", "4 tokens, mean p = 0.3") in spans


def cut(tokenizer: PromptTokenizer, ids: list[int], *, always: bool = True) -> None:
    """Pieces are the text and all of the tokens, or there are none."""
    found = pieces(tokenizer, np.array(ids, np.int32))
    assert found is not None or not always
    if found is not None:
        assert "".join(piece.text for piece in found) == tokenizer.decode_raw(ids)
        assert [i for piece in found for i in range(piece.first, piece.last)] == list(
            range(len(ids))
        )


@given(st.text(max_size=12))
def test_any_text_in_bytes_is_cut_without_loss(text):
    cut(PIECES, [1 + byte for byte in text.encode()])
    cut(BYTES, BYTES.encode_completion(text)[:-1].tolist())


@given(st.lists(st.integers(0, 255), max_size=24))
def test_bytes_that_are_no_text_lose_colours_at_most(ids):
    """Stray and unfinished characters, as a model under temperature writes them."""
    cut(BYTES, ids, always=False)


@given(st.lists(st.sampled_from([257, 258, 259, 260]), max_size=12))
def test_spaces_belong_to_the_right_token(ids):
    cut(PIECES, ids)


def test_of_a_long_text_both_ends_are_shown():
    text = "数" * 20_000
    ids = BYTES.encode_completion(text)[:-1]
    shown = "".join(
        span.text for span in coloured(BYTES, text, ids, np.zeros(len(ids), np.float32))
    )
    head, tail = shown.split("\n[… ")
    left_out, tail = tail.split(" tokens left out …]\n")
    assert "\ufffd" not in shown and head.count("数") and tail.count("数")
    assert int(left_out.replace(",", "")) == 60_000 - 3 * shown.count("数")
    assert MOST - 12 <= 3 * shown.count("数") <= MOST


@pytest.mark.parametrize("text", ["8-4=4;", "8-4=", "8", ""])
def test_what_a_stop_string_cut_off_is_coloured_too(text):
    """All of it where the response begins with the string: its text is empty."""
    ids = EMBEDDED.encode_completion("8-4=4;")[:-1]
    spans = coloured(EMBEDDED, text, ids, np.full(len(ids), -0.1, np.float32))
    assert "".join(span.text for span in spans) == "8-4=4;"


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
