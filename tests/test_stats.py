"""The arithmetic of accuracy: by hand, against enumeration, and under changes that must not
matter."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from g2d_jax.study.stats import accuracy, by_subset, paired, pass_at, pass_at_k

NAN = float("nan")

answers = hnp.arrays(
    np.float64,
    hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=6),
    elements=st.sampled_from([0.0, 1.0, NAN]),
)


def test_accuracy_by_hand():
    # Problem means 1, 1/2, 0, so m = 1/2.
    got = accuracy([[1, 1], [1, 0], [0, 0]])
    assert got.mean == 0.5
    assert got.sem_clustered == pytest.approx(math.sqrt((0.25 + 0 + 0.25) / (3 * 2)))  # 0.2887
    assert got.problems == 3


def test_nan_is_left_out_and_not_wrong():
    got = accuracy([[1, NAN], [0, 1], [NAN, NAN]])
    assert got.mean == 0.75  # of 1 and 1/2; not 2/6, and not 2/3
    assert got.sem_clustered == pytest.approx(0.25)
    assert got.problems == 2


def test_what_is_not_defined_is_nan():
    one_run = accuracy([[1], [0]])
    assert (one_run.mean, one_run.sem_clustered) == (0.5, 0.5)
    assert math.isnan(accuracy([[1, 0]]).sem_clustered)
    for nothing in (np.zeros((0, 4)), np.zeros((3, 0)), [[NAN, NAN]]):
        got = accuracy(nothing)
        assert got.problems == 0
        assert math.isnan(got.mean) and math.isnan(got.sem_clustered)


def test_copies_of_an_answer_add_no_certainty():
    once = np.array([[1.0], [0.0], [0.0], [1.0], [1.0]])
    often = np.repeat(once, 10, axis=1)
    assert accuracy(often).sem_clustered == pytest.approx(accuracy(once).sem_clustered)


def test_clustered_error_is_that_of_the_papers_formula():
    rng = np.random.default_rng(0)
    correct = (rng.random((20, 3)) < rng.random((20, 1))).astype(float)
    residuals = correct - correct.mean()
    # Miller 2024 sums over all pairs of answers to one problem.
    within_clusters = sum(np.outer(row, row).sum() for row in residuals)
    expected = math.sqrt(within_clusters) / correct.size * math.sqrt(20 / 19)
    assert accuracy(correct).sem_clustered == pytest.approx(expected, rel=1e-12)


@given(answers, st.randoms(use_true_random=False))
def test_neither_order_nor_what_is_not_scored_matters_and_right_mirrors_wrong(correct, random):
    problems, samples = list(range(correct.shape[0])), list(range(correct.shape[1]))
    random.shuffle(problems)
    random.shuffle(samples)
    expected, mirrored = accuracy(correct), accuracy(1 - correct)
    more = np.pad(correct[problems][:, samples], ((0, 2), (0, 1)), constant_values=NAN)
    got = accuracy(more)
    for name in ("mean", "sem_clustered", "problems"):
        assert getattr(got, name) == pytest.approx(getattr(expected, name), abs=1e-12, nan_ok=True)
    assert expected.mean == pytest.approx(1 - mirrored.mean, nan_ok=True)
    error = pytest.approx(expected.sem_clustered, abs=1e-12, nan_ok=True)
    assert mirrored.sem_clustered == error


def test_paired_by_hand():
    got = paired([[0, 1], [0, 0], [1, NAN], [NAN, NAN]], [[1], [0], [1], [1]])
    # Differences 1/2, 0, 0 of the three problems scored in both; mean 1/6.
    assert got.difference == pytest.approx(1 / 6)
    assert got.sem == pytest.approx(math.sqrt(((1 / 3) ** 2 + 2 * (1 / 6) ** 2) / (3 * 2)))
    assert got.problems == 3


@given(answers, st.integers(0, 2**32 - 1))
def test_pairing_is_antisymmetric_and_exactly_zero_with_itself(before, seed):
    after = np.random.default_rng(seed).integers(0, 2, before.shape).astype(float)
    there, back, itself = paired(before, after), paired(after, before), paired(before, before)
    assert there.difference == pytest.approx(-back.difference, nan_ok=True)
    assert there.sem == pytest.approx(back.sem, nan_ok=True)
    assert itself.difference == 0 or itself.problems == 0
    assert itself.sem == 0 or itself.problems < 2


def test_subsets():
    got = by_subset([[1, 1], [0, 1], [0, 0]], ["level 2", "level 1", "level 2"])
    assert {name: (part.mean, part.problems) for name, part in got.items()} == {
        "level 1": (0.5, 1),
        "level 2": (0.5, 2),
    }
    assert list(got) == ["level 1", "level 2"]


def test_pass_at_k_against_enumeration_and_literals():
    for n in range(1, 8):
        for c in range(n + 1):
            for k in range(1, n + 1):
                draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
                assert pass_at_k(n, c, k) == pytest.approx(
                    sum(map(any, draws)) / len(draws), abs=1e-14
                )
    np.testing.assert_allclose(pass_at_k(4, [0, 1, 2, 4], 2), [0, 1 / 2, 5 / 6, 1], atol=1e-15)
    np.testing.assert_allclose(pass_at_k([5, 10], [1, 1], 1), [0.2, 0.1], atol=1e-15)
    # no overflow, where binomials have thousands of digits
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5)


def test_mean_pass_at():
    correct = [[1, 0, 0, 0], [1, 1, NAN, NAN], [0, 0, 0, 0], [NAN, NAN, NAN, 1]]
    assert pass_at(correct, 1) == pytest.approx((0.25 + 1 + 0 + 1) / 4) == accuracy(correct).mean
    assert pass_at(correct, 2) == pytest.approx((0.5 + 1 + 0) / 3)  # the last has one answer only
    assert pass_at(correct, 4) == pytest.approx(1 / 2)
    assert math.isnan(pass_at([[NAN, 1]], 2))
