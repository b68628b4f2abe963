"""What a batch trains on, worked out by hand on groups without a model. A response is called
(prompt, sample)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from g2d_jax import config as settings
from g2d_jax.config.section import read
from g2d_jax.data.curriculum import History
from g2d_jax.data.packing import pack
from g2d_jax.data.preferences import pairs_of
from g2d_jax.records import Problem, Rollout, Score, ScoredRollout, Verdict
from g2d_jax.rewards.pool import REWARDS
from g2d_jax.rollouts import batches
from g2d_jax.rollouts.groups import correct, describe
from g2d_jax.study import informativeness, stats

VERIFIABLE = {"main": True, "chat": False}
WEIGHTS = ("weight", "pair_weight", "entropy_weight")
GRPO, GROUP_DPO = {"weight", "advantage", "sampler_logprob"}, {"side", "prompt", "pair_weight"}
GROUP_GRPO = {"loss": "group_dpo", "grpo_coef": 1.0}
PLAIN = [{}, {"loss": "dpo"}, {"loss": "group_dpo"}, GROUP_GRPO]
WITH_KL = [{"beta": 0.1}, {**GROUP_GRPO, "beta": 0.1}]


def group(
    prompt: int, rewards: Sequence, lengths=None, cut=(), scored=False, late=()
) -> list[ScoredRollout]:
    """Rewards of 1 are correct, None is unscorable; cut: the samples that reached the limit;
    scored: no verdicts.

    late: the samples whose verification timed out.
    """
    found = []
    for i, (reward, length) in enumerate(zip(rewards, lengths or [4] * len(rewards), strict=True)):
        tokens = 1000 * prompt + 100 * i + np.arange(length)
        logprobs = -np.arange(1, length + 1) / 8
        end = np.zeros(length), "length" if i in cut else "stop"
        rollout = Rollout(f"{prompt:016x}", 0, i, np.array([prompt + 1]), tokens, logprobs, *end)
        verdict = (
            Verdict.SCORED if scored else Verdict.CORRECT if reward == 1 else Verdict.INCORRECT
        )
        verdict = Verdict.TIMEOUT if i in late else verdict
        score = Score(reward, Verdict.UNSCORABLE if reward is None else verdict)
        found.append(ScoredRollout(rollout, f"response {i}", score))
    return found


def draws_of(groups, tasks=None, visit=0):
    tasks = tasks or ["main"] * len(groups)
    return [
        (Problem(g[0].rollout.problem_id, "", task=t), visit)
        for g, t in zip(groups, tasks, strict=True)
    ]


def stage_of(groups=(), **changes: Any):
    changes = {
        "prompts_per_step": len(groups) or 1,
        "num_generations": 2,
        "sampling": settings.sampling(8),
        **changes,
    }
    return read(settings.Online, settings.online(**changes), [])


def make(groups, tasks=None, visit=0, seed=0, **changes: Any) -> batches.Batch:
    return batches.make(
        seed, stage_of(groups, **changes), draws_of(groups, tasks, visit), groups, VERIFIABLE
    )


def named(response) -> tuple[int, int]:
    return int(response.token_ids[0]) // 1000, int(response.token_ids[0]) // 100 % 10


def values(batch: batches.Batch, name: str) -> dict[tuple[int, int], float]:
    """What every response of the batch has under this name, 0 where packing would put 0."""
    return {
        named(r): float({**r.token, **r.sequence}.get(name, 0.0))
        for some in batch.groups
        for r in some.responses
    }


def trained(batch: batches.Batch) -> set[tuple[int, int]]:
    return {name for weight in WEIGHTS for name, value in values(batch, weight).items() if value}


@pytest.mark.parametrize("how", [*PLAIN, *WITH_KL])
def test_refill_keeps_the_first_prompts_with_a_signal(how):
    groups = [
        group(i, rewards) for i, rewards in enumerate([[1, 1], [1, 0], [0, 0], [0, 1], [1, 0]])
    ]
    for wanted, kept in ((2, [1, 3]), (3, [1, 3, 4]), (4, [1, 3, 4])):
        batch = make(groups, **how, prompts_per_step=wanted, filter={"dynamic_sampling": 1})
        assert [named(some.responses[0])[0] for some in batch.groups] == kept
        assert batch.has_signal.tolist() == [False, True, False, True, True]
    assert len(make(groups, **how).groups) == (5 if how.get("beta") else 3)


@pytest.mark.parametrize("how", PLAIN)
def test_signal_of_each_loss(how):
    """Two different rewards of two wrong responses teach GRPO alone; without two scores there is
    nothing to learn."""
    groups = [
        group(0, [0.3, 0]),
        group(1, [1, None]),
        group(2, [None, None]),
        group(3, [0.5, 0.5]),
        group(4, [1, 0]),
    ]
    assert make(groups, **how).has_signal.tolist() == [
        how in ({}, GROUP_GRPO),
        False,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("scale_rewards", ["none", "group", "batch"])
@pytest.mark.parametrize("size", [2, 6, 7, 12])
def test_equal_rewards_have_no_spread_and_no_signal_whatever_their_mean_rounds_to(
    size, scale_rewards
):
    equal, apart = group(0, [0.7] * size), group(1, [0.7] * (size - 1) + [0.8])
    lonely = group(2, [0.7] + [None] * (size - 1))
    batch = make([equal, apart, lonely], scale_rewards=scale_rewards, beta=0.1)
    assert batch.has_signal.tolist() == [False, True, False]
    assert {value for (prompt, _), value in values(batch, "advantage").items() if prompt != 1} == {
        0.0
    }
    metrics = describe([equal, apart, lonely])
    assert metrics["frac_reward_zero_std"] == pytest.approx(2 / 3)
    assert metrics["reward_std"] == pytest.approx(0.1 / size**0.5 / 3)
    assert (
        describe([equal])["reward_std"] == 0.0 and describe([equal])["frac_reward_zero_std"] == 1.0
    )
    assert informativeness.prompts(informativeness.responses([equal]))[
        "reward_variance"
    ].tolist() == [0.0]


def test_rewards_of_different_tasks_are_normalised_apart():
    groups = [group(0, [0, 1]), group(1, [0, 100]), group(2, [1, 0]), group(3, [100, 0])]
    tasks, how = ["main", "chat", "main", "chat"], {"scale_rewards": "batch"}
    small, large = 0.5 / (3**-0.5 + 1e-4), 50 / (100 * 3**-0.5 + 1e-4)
    expected = np.array([[-small, small], [-large, large], [small, -small], [large, -large]])
    found = batches.advantages(stage_of(**how), draws_of(groups, tasks), groups)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    made = values(make(groups, tasks, **how), "advantage")
    assert list(made.values()) == pytest.approx(expected.ravel().tolist(), rel=1e-5)


def test_a_loss_that_no_batch_is_known_of_is_not_taken_for_another():
    """Settings may come to allow a word before the batches know it."""
    groups = [group(0, [1, 0])]
    stage = stage_of(groups)
    object.__setattr__(stage, "loss", "new")
    with pytest.raises(AssertionError, match="new"):
        batches.make(0, stage, draws_of(groups), groups, VERIFIABLE)
    with pytest.raises(AssertionError, match="new"):
        batches.fill(stage, make(groups).groups, np.zeros(8, np.float32))


ALIKE = [
    [0.1 + 0.2, 0.3, 0.3, 0.3],
    [1e9 / 3, 1e9 * (1 / 3), 1e9 / 3, 1e9 / 3],
    [-0.7, -0.1 * 7, -0.7, -0.7],
    [0.0, -0.0, 0.0, 0.0],
]


@pytest.mark.parametrize("rewards", ALIKE, ids=str)
@pytest.mark.parametrize("how", [*PLAIN, {"loss": "raft"}], ids=str)
def test_rewards_that_only_rounding_tells_apart_are_equal_everywhere(rewards, how):
    """Also for rewards that only rank, where a pair would prefer a rounding error."""
    equal, apart = group(0, rewards, scored=True), group(1, [0.3, 0.3 + 1e-6] * 2, scored=True)
    batch = make([equal, apart], ["chat"] * 2, **how)
    assert batch.has_signal.tolist() == [how.get("loss") == "raft", True]
    if how.get("loss") == "raft":  # all of them are the best
        assert {name for name in trained(batch) if name[0] == 0} == {(0, i) for i in range(4)}
    assert describe([equal, apart])["frac_reward_zero_std"] == 0.5
    assert pairs_of(0, "", 0, equal, 4, verifiable=False) == []
    assert len(pairs_of(0, "", 0, apart, 4, verifiable=False)) == 2
    assert informativeness.prompts(informativeness.responses([equal, apart]))["mixed"].tolist() == [
        False,
        True,
    ]
    history = History()
    for step in (1, 2):
        history.update(0, np.roll(rewards, step), np.full(4, np.nan))
    assert history.seen[0].times == 2


@pytest.mark.parametrize("how", PLAIN)
@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
def test_truncated_responses_teach_nothing_where_they_are_masked(how, entropy_coef):
    groups = [
        group(0, [1, 1, 0], [8, 2, 3], cut=[0]),
        group(1, [1, 0, None], [8, 8, 4], cut=[0, 1]),
    ]
    groups.append(group(2, [0, 1, 0], [8, 8, 8], cut=[0, 1, 2]))
    assert make(groups, **how).has_signal.tolist() == [True, True, True]
    batch = make(groups, **how, entropy_coef=entropy_coef, mask_truncated=True)
    assert batch.has_signal.tolist() == [True, False, False]
    counted = {(0, 1): 2, (0, 2): 3}
    if entropy_coef and how in ({}, GROUP_GRPO):
        # GRPO keeps an unscorable response, whose advantage is 0, for its entropy
        counted[1, 2] = 4
    assert trained(batch) == set(counted)
    assert {name for name, side in values(batch, "side").items() if side} <= {(0, 1), (0, 2)}
    weighed = {name: value for name, value in values(batch, "entropy_weight").items() if value}
    assert weighed == pytest.approx(
        dict.fromkeys(counted, 1 / sum(counted.values())) if entropy_coef else {}
    )


@pytest.mark.parametrize("how", [{}, GROUP_GRPO])
@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        ("sum", [1 / 4] * 2),
        ("seq-mean-token-sum", [1 / 8] * 2),
        ("grpo", [1 / 24, 1 / 40]),
        ("dr_grpo", [1 / 64, 1 / 64]),
        ("dapo", [1 / 32, 1 / 32]),
    ],
)
def test_a_batch_left_short_by_refill_weighs_its_prompts_as_a_full_one(how, loss_type, expected):
    groups = [group(0, [1, 1]), group(1, [1, 0], [3, 5]), group(2, [0, 0]), group(3, [0, 0])]
    full, short = (
        make(groups, **how, loss_type=loss_type, filter={"dynamic_sampling": refill})
        for refill in (0, 1)
    )
    assert list(values(full, "weight").values()) == pytest.approx(expected)
    # it divides by the tokens that there are
    expected = [1 / 8, 1 / 8] if loss_type == "dapo" else expected
    assert values(short, "weight") == pytest.approx({(1, 0): expected[0], (1, 1): expected[1]})


@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
@pytest.mark.parametrize("refill", [0, 1])
@pytest.mark.parametrize("how", [*PLAIN, WITH_KL[0], {"loss": "raft"}])
def test_a_batch_without_any_signal_has_no_weight_but_all_that_the_loss_reads(
    how, refill, entropy_coef
):
    read = {"dpo": {"weight"}, "raft": {"weight"}}
    read["group_dpo"] = GROUP_DPO | (GRPO if "grpo_coef" in how else set())
    names = read.get(how.get("loss"), GRPO) | ({"entropy_weight"} if entropy_coef else set())
    cut = [group(0, [1, 0], cut=[0, 1]), group(1, [0, 1], cut=[0, 1])]
    # equal rewards teach RAFT, unless all are wrong
    right = 0 if how == {"loss": "raft"} else 1
    same = [group(0, [right, right]), group(1, [0, None])]
    # GRPO's KL and entropy need no signal
    needs_none = how == WITH_KL[0] or (entropy_coef and how in ({}, GROUP_GRPO))
    for groups in (cut,) if needs_none else (cut, same):
        batch = make(
            groups,
            **how,
            filter={"dynamic_sampling": refill},
            entropy_coef=entropy_coef,
            mask_truncated=True,
        )
        arrays = pack(batch.groups, row_length=32, microbatch_rows=4).arrays
        assert arrays["tokens"].any() and not batch.has_signal.any()
        assert names <= set(arrays)
        assert not any(arrays[name].any() for name in {*WEIGHTS, "side"} & set(arrays))


def test_raft_trains_on_right_responses_alone():
    groups = [
        group(0, [1, 0, 1], [1, 5, 2]),
        group(1, [1, 1, 0], [4, 2, 3], cut=[1]),
        group(2, [0, None, 0]),
    ]
    batch = make(groups, loss="raft", mask_truncated=True)
    assert batch.has_signal.tolist() == [True, True, False]
    # 3 responses count, the one that was cut does not
    expected = {(0, 0): 1 / 3, (0, 2): 1 / 6, (1, 0): 1 / 12}
    assert values(batch, "weight") == pytest.approx(expected)


def test_raft_takes_the_best_where_no_response_is_right_or_wrong():
    groups = [group(0, [0.3, 0.7, None], scored=True), group(1, [None, None, None], scored=True)]
    batch = make(groups, ["chat", "chat"], loss="raft")
    assert batch.has_signal.tolist() == [True, False]
    assert values(batch, "weight") == pytest.approx({(0, 1): 1 / 4})


@pytest.mark.parametrize(("task", "scored"), [("main", False), ("chat", True)])
def test_dpo_takes_the_pair_of_the_pair_rule(task, scored):
    usable, found = [0, 2, 3, 5, 6, 7], set()
    for visit in range(6):
        groups = [
            group(number, [None, 1, 0, 1, 0, 1, 0, 1], cut=[1, 4], scored=scored)
            for number in (3, 5)
        ]
        batch = make(groups, [task] * 2, visit=visit, seed=7, loss="dpo", mask_truncated=True)
        for some, rows in zip(batch.groups, groups, strict=True):
            some_rows, problem = [rows[i] for i in usable], rows[0].rollout.problem_id
            [(chosen, rejected)] = pairs_of(7, problem, visit, some_rows, 1, verifiable=not scored)
            assert [named(r)[1] for r in some.responses] == [usable[chosen], usable[rejected]]
            assert [dict(r.sequence) for r in some.responses] == [
                {"weight": 0.5}
            ] * 2 and some.keep_together
            found.add((chosen, rejected))
    assert len(found) == 1 if scored else len(found) > 3


@pytest.mark.parametrize("loss", ["dpo", "group_dpo"])
def test_scalar_tasks_pair_the_best_with_the_worst(loss):
    rows = [
        group(0, [0.3, None, 2, -1, 1.9], scored=True),
        group(1, [1, 1], scored=True),
        group(2, [0, 1]),
    ]
    batch = make(rows, ["chat", "chat", "main"], loss=loss)
    order = [(2, 1), (2, 0)] if loss == "dpo" else [(2, 0), (2, 1)]
    assert [named(r) for some in batch.groups for r in some.responses] == [(0, 2), (0, 3), *order]
    if loss == "group_dpo":
        assert values(batch, "side") == {(0, 2): 1, (0, 3): -1, (2, 0): -1, (2, 1): 1}
        assert set(values(batch, "pair_weight").values()) == {0.5}
    assert not make(
        rows[:1], ["main"], loss=loss
    ).has_signal.any()  # no verdict, no right and wrong


def test_group_dpo_has_both_sides_of_a_prompt_and_each_pair_of_it_weighs_the_same():
    rewards = [[1, 0, 0, 1, None], [1, 1, None, 1, 1], [0, 1, 0, 0, None]]
    batch = make([group(i, some) for i, some in enumerate(rewards)], loss="group_dpo")
    right, wrong = {0: [0, 3], 2: [1]}, {0: [1, 2], 2: [0, 2, 3]}
    sides = {
        (p, i): side
        for side, some in ((1, right), (-1, wrong))
        for p, places in some.items()
        for i in places
    }
    assert values(batch, "side") == sides and all(some.keep_together for some in batch.groups)
    assert values(batch, "pair_weight") == pytest.approx(
        {name: 1 / 8 if name[0] == 0 else 1 / 6 for name in sides}
    )
    assert values(batch, "prompt") == {name: name[0] for name in sides}


@pytest.mark.parametrize(("normalizer", "weight"), [("pairs", 1 / 2), ("prompts", 1 / 4)])
@pytest.mark.parametrize("refill", [0, 1])
def test_dpo_is_divided_by_pairs_or_by_the_prompts_of_a_full_batch(normalizer, weight, refill):
    groups = [group(0, [1, 1]), group(1, [1, 0]), group(2, [0, 0]), group(3, [0, 1])]
    dpo = {**settings.online().dpo.to_dict(), "normalizer": normalizer}
    assert set(
        values(
            make(groups, loss="dpo", dpo=dpo, filter={"dynamic_sampling": refill}), "weight"
        ).values()
    ) == {weight}
    assert set(
        values(
            make(groups, loss="group_dpo", dpo=dpo, filter={"dynamic_sampling": refill}),
            "pair_weight",
        ).values()
    ) == {weight}


def test_unscorable_responses_leave_the_baseline_and_keep_kl_and_entropy():
    groups = [group(0, [1, 0, None], [2, 2, 5])]
    assert values(make(groups), "advantage") == {(0, 0): 0.5, (0, 1): -0.5}
    assert values(make(groups, beta=0.1), "advantage") == {(0, 0): 0.5, (0, 1): -0.5, (0, 2): 0}
    assert set(values(make(groups, entropy_coef=0.1), "entropy_weight").values()) == {1 / 9}
    both = make(groups, **GROUP_GRPO, beta=0.1)
    assert values(both, "side") == {(0, 0): 1, (0, 1): -1, (0, 2): 0}
    assert values(both, "pair_weight") == {(0, 0): 1, (0, 1): 1, (0, 2): 0}
    assert values(both, "weight") == {(0, 0): 1, (0, 1): 1, (0, 2): 1}


def test_a_timeout_is_a_wrong_answer_to_every_loss_and_accuracy():
    """A response whose worker the machine ended is none at all."""
    rewards = [
        REWARDS[verdict] for verdict in (Verdict.CORRECT, Verdict.INCORRECT, Verdict.TIMEOUT)
    ]
    groups = [group(0, [*rewards, REWARDS[Verdict.UNSCORABLE]], late=(2,))]
    advantages = values(make(groups, scale_rewards="none"), "advantage")
    assert advantages == pytest.approx({(0, 0): 2 / 3, (0, 1): -1 / 3, (0, 2): -1 / 3})
    assert trained(make(groups, loss="group_dpo")) == {(0, 0), (0, 1), (0, 2)}
    late = [group(0, [1, 0], late=(1,))]
    assert (
        trained(make(late, loss="dpo")) == {(0, 0), (0, 1)}
        and not make(late, loss="dpo").metrics["pairs/skipped"]
    )
    judged = correct(groups)
    np.testing.assert_array_equal(judged, [[1, 0, 0, np.nan]])
    assert (
        stats.accuracy(judged).mean
        == 1 / 3
        == informativeness.prompts(informativeness.responses(groups))["pass_rate"][0]
    )
    assert describe(groups)["reward"] == 1 / 3


@pytest.mark.parametrize("loss", ["dpo", "group_dpo"])
def test_pair_metrics(loss):
    """Prompts without a pair are counted among all that were drawn, pairs among those that are
    kept."""
    groups = [
        group(0, [1, 1]),
        group(1, [1, 0], [2, 6]),
        group(2, [0, None]),
        group(3, [0, 1], [8, 4]),
    ]
    kept = {
        "pairs/skipped": 2,
        "pairs/prompts": 1,
        "pairs/chosen_length": 2,
        "pairs/rejected_length": 6,
    }
    assert (
        make(groups, loss=loss, prompts_per_step=1, filter={"dynamic_sampling": 1}).metrics == kept
    )
    full = {
        "pairs/skipped": 2,
        "pairs/prompts": 2,
        "pairs/chosen_length": 3,
        "pairs/rejected_length": 7,
    }
    assert make(groups, loss=loss).metrics == full
    assert make(groups[:1], loss=loss).metrics == {"pairs/skipped": 1, "pairs/prompts": 0}
    if loss == "group_dpo":  # the mean over a side's responses, then over prompts
        more = [group(0, [1, 1, 0], [1, 3, 5]), group(1, [1, 0, 0], [8, 1, 2])]
        means = {"pairs/skipped": 0, "pairs/chosen_length": 5, "pairs/rejected_length": 3.25}
        assert make(more, loss=loss).metrics == full | means
    assert make(groups).metrics == {}


@pytest.mark.parametrize("how", [*PLAIN, *WITH_KL])
def test_fill_gives_every_response_its_own_span(how):
    """Lengths in order 1, 2, 3, 1."""
    groups = [group(0, [1, 0], [1, 2]), group(1, [1, 0], [3, 1])]
    made, stage = make(groups, **how).groups, stage_of(**how)
    rows, spans = [*groups[0], *groups[1]], [slice(0, 1), slice(1, 3), slice(3, 6), slice(6, 7)]
    reference, trainer = -np.arange(7, dtype=np.float32), -np.arange(7, dtype=np.float32) / 2
    sampled = how not in ({"loss": "dpo"}, {"loss": "group_dpo"})  # else there is no ratio
    bare = [r for some in batches.fill(stage, made, None, None) for r in some.responses]
    filled = batches.fill(stage, made, reference, trainer if sampled else None)
    assert [some.keep_together for some in filled] == [some.keep_together for some in made]
    found = [r for some in filled for r in some.responses]
    for response, before, row, span in zip(found, bare, rows, spans, strict=True):
        assert (
            response.token_ids.tolist()
            == before.token_ids.tolist()
            == row.rollout.token_ids.tolist()
        )
        assert not {"old_logprob", "ref_logprob", "reference"} & {*before.token, *before.sequence}
        expected = dict(before.token)
        if sampled:
            np.testing.assert_array_equal(before.token["sampler_logprob"], row.rollout.logprobs)
            expected |= {"old_logprob": trainer[span]}
        expected |= {"ref_logprob": reference[span]} if how.get("beta") else {}
        assert set(response.token) == set(expected)
        for name, value in expected.items():
            np.testing.assert_allclose(response.token[name], value, rtol=1e-6)
        total = {"reference": reference[span].sum()} if "loss" in how else {}
        assert response.sequence == {**before.sequence, **total}
