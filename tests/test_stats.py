"""The arithmetic of accuracy: by hand, against enumeration, and under changes that must not matter."""

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
    # Problem means 1, 1/2, 0, so m = 1/2; runs 2/3 and 1/3.
    got = accuracy([[1, 1], [1, 0], [0, 0]])
    assert got.mean == 0.5
    assert got.std_runs == pytest.approx(math.sqrt(2 * (1 / 6) ** 2))  # 0.2357
    assert got.sem == pytest.approx(math.sqrt(6 * 0.25 / 5) / math.sqrt(6))  # 0.2236
    assert got.sem_clustered == pytest.approx(math.sqrt((0.25 + 0 + 0.25) / (3 * 2)))  # 0.2887
    assert (got.problems, got.samples, got.scored) == (3, 2, 6)


def test_nan_is_left_out_and_not_wrong():
    got = accuracy([[1, NAN], [0, 1], [NAN, NAN]])
    assert got.mean == 0.75  # of 1 and 1/2; not 2/6, and not 2/3
    assert got.std_runs == pytest.approx(math.sqrt(2 * 0.25**2))  # runs 1/2 and 1
    assert got.sem_clustered == pytest.approx(0.25)
    assert (got.problems, got.samples, got.scored) == (2, 2, 3)


def test_what_is_not_defined_is_nan():
    one_run = accuracy([[1], [0]])
    assert one_run.mean == 0.5
    assert math.isnan(one_run.std_runs)
    assert one_run.sem == one_run.sem_clustered == 0.5
    one_problem = accuracy([[1, 0]])
    assert math.isnan(one_problem.sem_clustered)
    for nothing in (np.zeros((0, 4)), np.zeros((3, 0)), [[NAN, NAN]]):
        got = accuracy(nothing)
        assert (got.problems, got.scored) == (0, 0)
        assert all(math.isnan(x) for x in (got.mean, got.std_runs, got.sem, got.sem_clustered))


def test_copies_of_an_answer_add_no_certainty():
    once = np.array([[1.0], [0.0], [0.0], [1.0], [1.0]])
    often = np.repeat(once, 10, axis=1)
    assert accuracy(often).sem_clustered == pytest.approx(accuracy(once).sem_clustered)
    assert accuracy(often).sem < 0.35 * accuracy(once).sem  # what independence would claim
    assert accuracy(often).std_runs == pytest.approx(0.0, abs=1e-15)


def test_clustered_error_is_that_of_the_papers_formula():
    rng = np.random.default_rng(0)
    correct = (rng.random((20, 3)) < rng.random((20, 1))).astype(float)
    residuals = correct - correct.mean()
    # Miller 2024 sums over all pairs of answers to one problem.
    within_clusters = sum(np.outer(row, row).sum() for row in residuals)
    expected = math.sqrt(within_clusters) / correct.size * math.sqrt(20 / 19)
    assert accuracy(correct).sem_clustered == pytest.approx(expected, rel=1e-12)


def test_clustered_error_matches_the_spread_over_redraws():
    rng = np.random.default_rng(1)
    rates = rng.beta(0.5, 0.5, size=(400, 60, 1))  # 400 test sets of 60 problems
    drawn = (rng.random((400, 60, 8)) < rates).astype(float)
    spread = drawn.mean(axis=(1, 2)).std(ddof=1)
    assert np.mean([accuracy(one).sem_clustered for one in drawn]) == pytest.approx(spread, rel=0.1)
    assert np.mean([accuracy(one).sem for one in drawn]) < 0.6 * spread


@given(answers, st.randoms(use_true_random=False))
def test_order_of_problems_and_samples_does_not_matter(correct, random):
    problems, samples = list(range(correct.shape[0])), list(range(correct.shape[1]))
    random.shuffle(problems)
    random.shuffle(samples)
    got, expected = accuracy(correct[problems][:, samples]), accuracy(correct)
    for name in ("mean", "std_runs", "sem", "sem_clustered", "problems", "scored"):
        assert getattr(got, name) == pytest.approx(getattr(expected, name), abs=1e-12, nan_ok=True)


@given(answers)
def test_right_and_wrong_mirror_each_other(correct):
    got, mirrored = accuracy(correct), accuracy(1 - correct)
    assert got.mean == pytest.approx(1 - mirrored.mean, nan_ok=True)
    for name in ("std_runs", "sem", "sem_clustered"):
        assert getattr(got, name) == pytest.approx(getattr(mirrored, name), abs=1e-12, nan_ok=True)


@given(answers)
def test_unscored_rows_and_columns_change_nothing(correct):
    more = np.pad(correct, ((0, 2), (0, 1)), constant_values=NAN)
    got, expected = accuracy(more), accuracy(correct)
    for name in ("mean", "std_runs", "sem", "sem_clustered", "problems", "scored"):
        assert getattr(got, name) == pytest.approx(getattr(expected, name), nan_ok=True)


def test_paired_by_hand():
    got = paired([[0, 1], [0, 0], [1, NAN], [NAN, NAN]], [[1], [0], [1], [1]])
    # Differences 1/2, 0, 0 of the three problems scored in both; mean 1/6.
    assert got.difference == pytest.approx(1 / 6)
    assert got.sem == pytest.approx(math.sqrt(((1 / 3) ** 2 + 2 * (1 / 6) ** 2) / (3 * 2)))
    assert got.problems == 3


@given(answers)
def test_pairing_with_itself_is_exactly_zero(correct):
    got = paired(correct, correct)
    assert got.difference == 0 or got.problems == 0
    assert got.sem == 0 or got.problems < 2


@given(answers, st.integers(0, 2**32 - 1))
def test_pairing_is_antisymmetric(before, seed):
    after = np.random.default_rng(seed).integers(0, 2, before.shape).astype(float)
    there, back = paired(before, after), paired(after, before)
    assert there.difference == pytest.approx(-back.difference, nan_ok=True)
    assert there.sem == pytest.approx(back.sem, nan_ok=True)


def test_pairing_sees_what_two_separate_errors_hide():
    rng = np.random.default_rng(2)
    before = np.repeat((rng.random((200, 1)) < 0.5).astype(float), 4, axis=1)
    after = before.copy()
    after[:10] = 1.0
    got = paired(before, after)
    separate = math.hypot(accuracy(before).sem_clustered, accuracy(after).sem_clustered)
    assert got.sem < 0.3 * separate


def test_subsets():
    got = by_subset([[1, 1], [0, 1], [0, 0]], ["level 2", "level 1", "level 2"])
    assert list(got) == ["level 1", "level 2"]
    assert (got["level 1"].mean, got["level 1"].problems) == (0.5, 1)
    assert (got["level 2"].mean, got["level 2"].problems) == (0.5, 2)


@given(answers, st.data())
def test_subsets_weigh_up_to_the_whole(correct, data):
    names = data.draw(st.lists(st.sampled_from("abc"), min_size=len(correct), max_size=len(correct)))
    parts = [part for part in by_subset(correct, names).values() if part.problems]
    whole = accuracy(correct)
    assert sum(part.problems for part in parts) == whole.problems
    if parts:
        assert np.average([p.mean for p in parts], weights=[p.problems for p in parts]) == pytest.approx(whole.mean)


def test_pass_at_k_against_enumeration():
    for n in range(1, 8):
        for c in range(n + 1):
            for k in range(1, n + 1):
                draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-14)


def test_pass_at_k_literals():
    np.testing.assert_allclose(pass_at_k(4, [0, 1, 2, 4], 2), [0, 1 / 2, 5 / 6, 1], atol=1e-15)
    np.testing.assert_allclose(pass_at_k([5, 10], [1, 1], 1), [0.2, 0.1], atol=1e-15)
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5)  # no overflow, where binomials have thousands of digits


@given(st.integers(1, 40), st.data())
def test_pass_at_k_grows_with_k_and_c(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    value = float(pass_at_k(n, c, k))
    assert 0 <= value <= 1
    if k < n:
        assert value <= pass_at_k(n, c, k + 1) + 1e-12
    if c < n:
        assert value <= pass_at_k(n, c + 1, k) + 1e-12


def test_mean_pass_at():
    correct = [[1, 0, 0, 0], [1, 1, NAN, NAN], [0, 0, 0, 0], [NAN, NAN, NAN, 1]]
    assert pass_at(correct, 1) == pytest.approx((0.25 + 1 + 0 + 1) / 4)
    assert pass_at(correct, 2) == pytest.approx((0.5 + 1 + 0) / 3)  # the last has one answer only
    assert pass_at(correct, 4) == pytest.approx(1 / 2)
    assert math.isnan(pass_at([[NAN, 1]], 2))


@given(answers)
def test_pass_at_one_is_the_mean(correct):
    assert pass_at(correct, 1) == pytest.approx(accuracy(correct).mean, nan_ok=True)
