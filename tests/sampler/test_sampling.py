"""The sampling distribution: filters against slow references, the draw against its distribution."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from g2d_jax.runtime import keys
from g2d_jax.sampler.sampling import FILTERS, draw, filter_logits, inverse_cdf, uniforms

pytestmark = pytest.mark.quick

LARGEST = 1 - 2.0**-24  # the largest float32 below 1
SETTINGS = [
    (0, 1.0),
    (1, 1.0),
    (0, 0.3),
    (7, 0.8),
    (100, 1.0),
]

filter_rows = jax.jit(filter_logits, static_argnames=("filters", "branches"))
cdf = jax.jit(inverse_cdf)
draw_rows = jax.jit(draw, static_argnames=("filters", "branches"))


def random_logits(rows: int, vocab: int = 50) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 3, (rows, vocab)).astype(np.float32)


def slow_filter(logits: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """Token by token in order of rank, equal logits by index."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: top_k or None]
    weights = np.exp(logits[order].astype(np.float64) - logits.max())
    kept, mass = [], 0.0
    for token, weight in zip(order, weights / weights.sum(), strict=True):
        if top_p < 1.0 and mass >= top_p:
            break
        kept.append(token)
        mass += weight
    out = np.full_like(logits, -np.inf)
    out[kept] = logits[kept]
    return out


@pytest.mark.parametrize("ties", [False, True])
def test_filters_equal_the_slow_reference(ties):
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (60, 50)).astype(np.float32)
    if ties:
        # -0.0 too
        logits = np.where(rng.random(logits.shape) < 0.1, -np.inf, np.round(logits)).astype(
            np.float32
        )
    top_k, top_p = rng.integers(0, 60, 60), rng.uniform(0.01, 1, 60).astype(np.float32)
    top_k[::4], top_p[::3] = 0, 1.0
    found = filter_rows(logits, top_k.astype(np.int32), top_p)
    for row in range(60):
        np.testing.assert_array_equal(
            found[row], slow_filter(logits[row], top_k[row], float(top_p[row]))
        )
    without_branches = filter_rows(logits, top_k.astype(np.int32), top_p, branches=False)
    np.testing.assert_array_equal(without_branches, found)


@pytest.mark.parametrize(("top_k", "top_p"), SETTINGS)
def test_filters_equal_those_of_transformers(top_k, top_p):
    torch = pytest.importorskip("torch")
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    logits = random_logits(16)
    theirs = torch.tensor(logits)
    if top_k:
        theirs = TopKLogitsWarper(top_k)(None, theirs)
    if top_p < 1.0:
        theirs = TopPLogitsWarper(top_p)(None, theirs)
    ours = filter_rows(logits, np.full(16, top_k, np.int32), np.full(16, top_p, np.float32))
    np.testing.assert_array_equal(ours, theirs.numpy())


def test_equal_logits_are_ranked_by_index():
    """Exactly top_k tokens stay; transformers would keep all that equal the last."""
    logits = np.array([[1.0, 2.0, 2.0, 2.0, 0.0]], np.float32)
    (two,) = filter_rows(logits, np.array([2], np.int32), np.ones(1, np.float32))
    assert np.flatnonzero(np.isfinite(two)).tolist() == [1, 2]
    (nucleus,) = filter_rows(
        np.zeros((1, 4), np.float32), np.zeros(1, np.int32), np.array([0.5], np.float32)
    )
    assert np.flatnonzero(np.isfinite(nucleus)).tolist() == [0, 1]


@pytest.mark.parametrize("kept", [1, 45])
def test_of_equal_logits_the_first_stay_over_the_blocks_of_a_vocabulary(kept):
    """Every third of 300 logits is the highest, over three blocks of 128: of these the first stay,
    by number and by mass."""
    logits = np.zeros((2, 300), np.float32)
    logits[:, ::3] = 30.0  # beside which the others weigh nothing
    top_k, top_p = np.array([kept, 0], np.int32), np.array([1.0, (kept - 0.5) / 100], np.float32)
    for row in filter_rows(logits, top_k, top_p):
        assert np.flatnonzero(np.isfinite(row)).tolist() == [*range(0, 3 * kept, 3)]


def test_one_filter_is_applied_by_itself():
    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05]], np.float32))
    both = np.array([3], np.int32), np.array([0.8], np.float32)
    kept = {
        filters: np.isfinite(filter_rows(logits, *both, filters=filters)).sum()
        for filters in ((), ("top_k",), ("top_p",), FILTERS)
    }
    # 0.5 + 0.3 is 0.8 of all, and more than that of the first three
    assert kept == {(): 4, ("top_k",): 3, ("top_p",): 2, FILTERS: 2}


@pytest.mark.parametrize("vocab", [7, 300])  # one block, several blocks
def test_frequencies(vocab):
    rng, draws = np.random.default_rng(1), 20_000
    masses = rng.gamma(0.7, size=vocab) * (rng.random(vocab) < 0.8)
    probs = np.broadcast_to(masses.astype(np.float32), (draws, vocab))
    counts = np.bincount(cdf(probs, rng.random((draws, 2), np.float32)), minlength=vocab)
    expected = draws * masses / masses.sum()
    assert not counts[masses == 0].any()
    often = expected > 5
    statistic, freedom = np.sum((counts - expected)[often] ** 2 / expected[often]), often.sum()
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


def test_every_token_has_its_interval():
    masses = np.array([0.0, 0.2, 0.1, 0.0, 0.4, 0.3, 0.0], np.float32)
    grid = np.linspace(0, 1, 10_001, dtype=np.float32)[:-1]
    tokens = np.asarray(cdf(np.broadcast_to(masses, (10_000, 7)), np.stack([grid, grid], 1)))
    assert (np.diff(tokens) >= 0).all()
    assert np.bincount(tokens, minlength=7).tolist() == pytest.approx(
        [0, 2000, 1000, 0, 4000, 3000, 0], abs=1
    )


def test_blocks_and_tokens_in_a_block_each_have_their_uniform():
    """300 words are three blocks of 128: the first number chooses the block, the second the token
    inside."""
    masses = np.zeros((4, 300), np.float32)
    masses[:, [5, 140, 141]] = 0.5, 0.125, 0.375
    found = cdf(
        masses, np.array([[0.49, 0.99], [0.51, 0.24], [0.51, 0.26], [0.99, 0.26]], np.float32)
    )
    assert found.tolist() == [5, 140, 141, 141]


@pytest.mark.parametrize("vocab", [1, 129, 300])
def test_extreme_uniforms_give_the_first_and_the_last_possible_token(vocab):
    rng = np.random.default_rng(vocab)
    masses = (rng.gamma(0.5, size=(200, vocab)) * (rng.random((200, vocab)) < 0.3)).astype(
        np.float32
    )
    masses[:, vocab // 2] = 0.1
    for value, edge in ((0.0, 0), (LARGEST, -1)):
        found = cdf(masses, np.full((200, 2), value, np.float32))
        assert found.tolist() == [np.flatnonzero(row)[edge] for row in masses]


@examples(10)
@given(st.integers(0, 2**32 - 1), st.sampled_from([10, 130, 257]))
def test_a_token_of_probability_0_is_never_drawn(seed, vocab):
    rng = np.random.default_rng(seed)
    logits = np.where(
        rng.random((64, vocab)) < 0.9, -np.inf, rng.normal(0, 20, (64, vocab))
    ).astype(np.float32)
    logits[:, seed % vocab] = 0.0
    probs = np.asarray(jax.nn.softmax(logits, axis=-1))
    uniform = rng.choice(np.array([0.0, 0.5, LARGEST, 1e-7, rng.random()], np.float32), (64, 2))
    assert (np.take_along_axis(probs, np.asarray(cdf(probs, uniform))[:, None], 1) > 0).all()


def call(logits, temperature=1.0, top_k=0, top_p=1.0, filters=()):
    rows = len(logits)
    named = jnp.asarray(np.stack([keys.key_data(0, "test", row) for row in range(rows)]))
    numbers = (
        np.full(rows, temperature, np.float32),
        np.full(rows, top_k, np.int32),
        np.full(rows, top_p, np.float32),
    )
    return draw_rows(
        np.asarray(logits, np.float32), named, jnp.arange(rows), *numbers, filters=filters
    )


def test_greedy_is_a_point_mass():
    drawn = call([[0.0, 3.0, 1.0], [2.0, 2.0, -1.0]], temperature=0.0)
    assert drawn.token.tolist() == [1, 0]
    assert drawn.logprob.tolist() == drawn.entropy.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_show_in_greedy_rows(value: float):
    drawn = call([[0.0, value, 1.0], [2.0, 1.0, -math.inf]], temperature=0.0)
    assert math.isnan(drawn.logprob[0]) and drawn.logprob[1] == 0.0 and drawn.token[1] == 0


def test_literal_logprob_and_entropy():
    drawn = call(np.log([[0.5, 0.25, 0.25]] * 50))
    assert set(drawn.token.tolist()) == {0, 1, 2}
    np.testing.assert_allclose(
        drawn.logprob, np.log([0.5, 0.25, 0.25])[np.asarray(drawn.token)], rtol=1e-6
    )
    np.testing.assert_allclose(drawn.entropy, 1.5 * math.log(2), rtol=1e-6)


def test_temperature_divides_the_logits():
    """At temperature 1/2 probabilities are squared: 4, 1, 1 of 6."""
    drawn = call(np.log([[0.5, 0.25, 0.25]] * 50), temperature=0.5)
    np.testing.assert_allclose(
        drawn.logprob, np.log([4 / 6, 1 / 6, 1 / 6])[np.asarray(drawn.token)], rtol=1e-5
    )
    np.testing.assert_allclose(
        drawn.entropy, -(4 * math.log(4 / 6) + 2 * math.log(1 / 6)) / 6, rtol=1e-6
    )


def test_logprobs_are_those_after_the_filters():
    drawn = call(np.log([[0.5, 0.3, 0.15, 0.05]] * 50), top_k=3, top_p=0.8, filters=FILTERS)
    assert set(drawn.token.tolist()) == {0, 1}  # 0.5 / 0.95 < 0.8 <= 0.8 / 0.95
    np.testing.assert_allclose(
        drawn.logprob, np.log([0.625, 0.375])[np.asarray(drawn.token)], rtol=1e-5
    )
    np.testing.assert_allclose(
        drawn.entropy, -(0.625 * math.log(0.625) + 0.375 * math.log(0.375)), rtol=1e-5
    )


def test_filters_switched_off_change_nothing():
    logits = random_logits(20)
    plain, filtered = call(logits), call(logits, filters=FILTERS)
    np.testing.assert_array_equal(plain.token, filtered.token)
    np.testing.assert_array_equal(plain.logprob, filtered.logprob)


def test_noise_is_a_row_s_own():
    named = np.stack([keys.key_data(0, "test", row) for row in range(6)])
    positions = np.arange(6, dtype=np.int32)
    noise = np.asarray(uniforms(jnp.asarray(named), jnp.asarray(positions)))
    assert (
        noise.shape == (6, 2)
        and (noise >= 0).all()
        and (noise < 1).all()
        and np.unique(noise).size == 12
    )
    order = np.array([3, 0, 5])
    np.testing.assert_array_equal(jax.jit(uniforms)(named[order], positions[order]), noise[order])
    np.testing.assert_array_equal(
        uniforms(jnp.asarray(named[2:3]), jnp.asarray(positions[2:3])), noise[2:3]
    )


def test_frozen_noise():
    noise = uniforms(jnp.asarray(keys.key_data(0, "init"))[None], jnp.array([5]))
    assert noise[0].tolist() == [0.2165212631225586, 0.683063268661499]
