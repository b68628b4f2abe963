"""Stop strings in tokens that come in parts: by the definition, whatever the parts and the
tokenizer."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from g2d_jax.data.stops import Watch, cut
from g2d_jax.records import SamplingParams

TEXTS = [
    "Problem: 2 + 2 = ?\nAnswer: 4\n\n",
    "naïve café – 東京 🙂🙃\n",
    "#### 12\nProblem:",
    "aaaaabaaab " * 4,
]


def byte_level():
    """Bytes with merges, as of GPT-2 and its like: a character may take four tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS[:3], trainer)
    return tokenizer


def with_fallback():
    """Pieces that begin with their space, and bytes for what they lack: as of Llama 2 and Gemma."""
    words = [
        "▁",
        "▁a",
        "a",
        "b",
        "▁Problem",
        "Prob",
        "lem",
        ":",
        "\n",
        "\n\n",
        "#",
        "####",
        "1",
        "2",
        "é",
    ]
    pieces = {
        piece: i
        for i, piece in enumerate(["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words])
    }
    tokenizer = Tokenizer(models.BPE(pieces, [], unk_token="<unk>", byte_fallback=True))
    replace, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence(
        [replace, decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    return tokenizer


KINDS = {"byte level": byte_level(), "byte fallback": with_fallback()}
ALPHABET = ["\n", "\n\n", "Problem:", "aab", "é", "京", "🙂", " a", "####", "b", "a b", "🙂🙃", ":"]


def first_end(decode, ids, stop):
    """The definition: the least number of tokens whose text has a stop string."""
    ends = (
        end for end in range(1, len(ids) + 1) if any(string in decode(ids[:end]) for string in stop)
    )
    return next(ends, None)


def watched(decode, ids, stop, sizes):
    """What a watch says of ids that come in parts of these sizes."""
    watch, rest = Watch(decode, stop), list(ids)
    for size in itertools.cycle(sizes):
        if not rest:
            return None
        part, rest = rest[:size], rest[size:]
        if (end := watch.add(part)) is not None:
            return end


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_the_end_is_where_the_text_first_has_the_string(kind, data):
    tokenizer = KINDS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=120))
    if data.draw(st.booleans()):  # text that the strings are in
        text = "".join(data.draw(st.lists(st.sampled_from([*ALPHABET, *TEXTS]), max_size=12)))
        ids = ids[:30] + tokenizer.encode(text, add_special_tokens=False).ids + ids[30:]
    stop = data.draw(st.lists(st.sampled_from(ALPHABET), min_size=1, max_size=4))
    sizes = data.draw(st.lists(st.integers(1, 64), min_size=1, max_size=4))
    expected = first_end(tokenizer.decode, ids, stop)
    for parts in (sizes, [1], [7], [64], [1000]):
        assert watched(tokenizer.decode, ids, stop, parts) == expected, parts


def test_by_hand():
    pieces = ["The", " ans", "wer\n", "\nPro", "blem: 3", " x", "\n\n"]

    def decode(ids):
        return "".join(pieces[i] for i in ids)

    # it ends inside the token "blem: 3", which stays
    assert watched(decode, range(7), ("\nProblem:",), [16]) == 5
    assert cut(decode(range(5)), ("\nProblem:",)) == "The answer\n"
    assert watched(decode, range(7), ("\nProblem:", "\n\n"), [16]) == 4
    assert cut(decode(range(4)), ("\nProblem:", "\n\n")) == "The answer"
    assert (
        watched(decode, range(7), ("none",), [3]) is None
        and cut("text", ("none",)) == cut("text", ()) == "text"
    )
    assert cut("a b c", ("c", "b")) == "a "  # the one that begins first, whatever their order


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["word ", "🙂", "<s>"])
def test_the_work_grows_with_the_length_alone(kind, text):
    """Tokens decoded, of 4 and of 16 thousand; special tokens have no text, and the parts before
    them are few."""
    tokenizer, counts = KINDS[kind], []
    for length in (4000, 16_000):
        decoded = 0

        def decode(ids):
            nonlocal decoded
            decoded += len(ids)
            return tokenizer.decode(ids)

        ids = (tokenizer.encode(text, add_special_tokens=False).ids * length)[:length]
        assert watched(decode, ids, ("\nProblem:", "\n\n"), [16]) is None
        counts.append(decoded)
    assert counts[1] <= 6 * counts[0]


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        ("\n", "stop is a list of texts"),
        ((1,), "stop is a list of texts"),
        (("",), "an empty text"),
        (("x" * 257,), "a text of 257 characters"),
        (tuple("abcdefghijklmnopq"), "stop can have at most 16 texts, got 17"),
        (("\ufffd",), "broken characters"),
        (("\ud800",), "broken characters"),
    ],
)
def test_strings_that_cannot_end_a_response_are_refused(stop, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(8, stop=stop)
    assert SamplingParams(8, stop=("\n", "x" * 256)).stop
