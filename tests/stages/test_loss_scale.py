"""The length of one update's gradient, from groups to the train step, against a plain loop over
prompts.

64 prompts with 4 responses each, of which 32 have a pair: what a loss is divided by decides how far
the step goes, the more so as Adam's epsilon is large. Each loss is taken with the normalisers it
has, ours and the papers' authors'. The loop differentiates the loss by hand, in float64; only the
model's own gradient is JAX's, of sequences one a row.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from g2d_jax import config as settings
from g2d_jax.config import Online, Optimizer
from g2d_jax.config.section import read
from g2d_jax.data.packing import Packed, pack
from g2d_jax.losses import mean_metrics
from g2d_jax.models import decoder
from g2d_jax.models.config import ModelConfig
from g2d_jax.records import SEGMENT_STRIDE, Problem, Rollout, Score, ScoredRollout, Verdict
from g2d_jax.rollouts import batches
from g2d_jax.runtime import mesh as meshes
from g2d_jax.stages import online
from g2d_jax.training.objectives import Compute, split
from g2d_jax.training.optimizer import make_optimizer
from g2d_jax.training.step import (
    make_fresh_state,
    make_scorer,
    make_train_step,
    put_batch,
    put_numbers,
)

CONFIG = ModelConfig("qwen2", 64, 32, 2, 4, 2, 8, 48, tie_word_embeddings=True)
ONE = meshes.make_mesh(devices=jax.devices()[:1])
PROMPTS, GROUP, LONGEST, WIDTH = 64, 4, 6, 12  # WIDTH: of a prompt and a response
KL, BETA, COEF = 0.05, 0.3, 0.01
OPTIMIZER, NUMBERS = make_optimizer(Optimizer(learning_rate=0.001), total_steps=10)


@functools.cache
def groups() -> list[list[ScoredRollout]]:
    """Rewards of the even prompts differ, those of the odd ones are all 1 or all 0."""
    rng = np.random.default_rng(0)

    def response(prompt: int, sample: int, prompt_ids: np.ndarray) -> ScoredRollout:
        right = (sample <= prompt % 3) if prompt % 2 == 0 else prompt % 4 == 1
        tokens = rng.integers(0, 64, rng.integers(1, LONGEST + 1))
        sampled = rng.normal(-4, 0.5, len(tokens)), np.zeros(len(tokens)), "stop"
        rollout = Rollout(f"{prompt:016x}", 0, sample, prompt_ids, tokens, *sampled)
        return ScoredRollout(
            rollout,
            str(sample),
            Score(float(right), Verdict.CORRECT if right else Verdict.INCORRECT),
        )

    made = []
    for prompt in range(PROMPTS):
        prompt_ids = rng.integers(0, 64, rng.integers(2, WIDTH - LONGEST))
        made.append([response(prompt, sample, prompt_ids) for sample in range(GROUP)])
    return made


@functools.cache
def model(seed: int) -> decoder.Decoder:
    return decoder.init(CONFIG, jax.random.key(seed), std=0.2)


@functools.cache
def unpacked() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids and segments, one response a row behind its prompt; and where the response's tokens
    are, [N, G, W]."""
    ids, segments, mask = (np.zeros((PROMPTS, GROUP, WIDTH), np.int32) for _ in range(3))
    for i, group in enumerate(groups()):
        for j, row in enumerate(group):
            start = len(row.rollout.prompt_ids)
            end = len(row.rollout.prompt_ids) + len(row.rollout.token_ids)
            ids[i, j, :end] = np.concatenate([row.rollout.prompt_ids, row.rollout.token_ids])
            segments[i, j, :end], mask[i, j, start:end] = SEGMENT_STRIDE, 1
    return ids.reshape(-1, WIDTH), segments.reshape(-1, WIDTH), mask


def logprobs(params: decoder.Decoder) -> jax.Array:
    """Of every token given those before it, [N, G, W]."""
    ids, segments = (jnp.asarray(x) for x in unpacked()[:2])
    hidden, _ = decoder.forward(
        params, ids, jnp.broadcast_to(jnp.arange(WIDTH)[None], ids.shape), segments
    )
    logits = jax.nn.log_softmax(hidden[:, :-1] @ decoder.head_matrix(params))
    chosen = jnp.take_along_axis(logits, ids[:, 1:, None], axis=-1)[..., 0]
    return jnp.pad(chosen, ((0, 0), (1, 0))).reshape(PROMPTS, GROUP, WIDTH)


@jax.jit
def norm_of(params: decoder.Decoder, slopes: jax.Array) -> jax.Array:
    """The length of the gradient of a loss that changes so with each token's log-probability."""
    grads = jax.grad(lambda p: jnp.sum(logprobs(p) * slopes))(params)
    return jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))


@functools.cache
def known(seed: int) -> np.ndarray:
    return np.asarray(jax.jit(logprobs)(model(seed)), np.float64) * unpacked()[2]


def grpo_slopes(divisor: float | np.ndarray, scaled: bool, beta: float) -> np.ndarray:
    """d loss / d log-probability at ratio 1: (-A + beta * (1 - reference / policy)) / divisor."""
    slopes = np.zeros((PROMPTS, GROUP, WIDTH))
    for i, group in enumerate(groups()):
        rewards = np.array([row.score.reward for row in group])
        advantages = rewards - rewards.mean()
        if scaled:
            advantages /= rewards.std(ddof=1) + 1e-6
        for j, advantage in enumerate(advantages):
            slopes[i, j] = -advantage + beta * (1 - np.exp(known(1)[i, j] - known(0)[i, j]))
    return slopes / divisor * unpacked()[2]


def dpo_slopes(divisor: int) -> np.ndarray:
    """The mean over all pairs of a prompt."""
    slopes = np.zeros((PROMPTS, GROUP, WIDTH))
    ratios = (known(0) - known(1)).sum(axis=2)
    for i, group in enumerate(groups()):
        right = [j for j, row in enumerate(group) if row.score.reward == 1]
        wrong = [j for j, row in enumerate(group) if row.score.reward == 0]
        pairs = [(c, r) for c in right for r in wrong]
        for c, r in pairs:
            margin = BETA * (ratios[i, c] - ratios[i, r])
            pull = BETA / (1 + np.exp(margin)) / len(pairs) / divisor
            slopes[i, c] -= pull
            slopes[i, r] += pull
    return slopes * unpacked()[2]


def stage_of(**changes: Any) -> Any:
    dpo = changes.pop("dpo", {})
    stage = settings.online(
        prompts_per_step=PROMPTS,
        num_generations=GROUP,
        sampling=settings.sampling(LONGEST),
        **changes,
    )
    stage.dpo.update(beta=BETA, **dpo)
    return read(Online, stage, [])


def make(stage: Any) -> batches.Batch:
    draws = [(Problem(group[0].rollout.problem_id, ""), 0) for group in groups()]
    return batches.make(0, stage, draws, groups(), {"main": True})


def filled(stage: Any, trainer: decoder.Decoder | None = None) -> Packed:
    """The stage's batch in rows, with the log-probabilities of the reference, and of the trainer if
    wanted."""
    made = make(stage).groups
    places = {
        id(row.rollout.token_ids): (i, j)
        for i, group in enumerate(groups())
        for j, row in enumerate(group)
    }
    where = [places[id(response.token_ids)] for group in made for response in group.responses]
    of_reference = np.concatenate([known(1)[at][unpacked()[2][at] > 0] for at in where])

    def rows(trainer: np.ndarray | None) -> Packed:
        full = batches.fill(stage, made, of_reference, trainer)
        return pack(full, row_length=48, microbatch_rows=8, max_responses_per_row=16)

    if trainer is None:
        return rows(None)
    bare = rows(None)
    scored = bare.unpack(
        np.asarray(make_scorer(Compute(ONE, jnp.bfloat16))(trainer, *put_batch(bare, ONE))[0])
    )
    return rows(np.concatenate([values for group in scored for values in group]))


@functools.cache
def step_of(structure: Any) -> Any:
    return make_train_step(structure, OPTIMIZER, CONFIG, ONE)


def metrics_of(stage: Any, packed: Packed, dtype: Any = jnp.float32) -> dict[str, float]:
    structure, numbers = split(online.objective_of(Compute(ONE, dtype), stage))
    numbers = put_numbers({"optimizer": NUMBERS, "loss": numbers}, ONE)
    policy = model(0)
    state = make_fresh_state(policy.config, OPTIMIZER, ONE)(policy)
    _, sums = step_of(structure)(state, *put_batch(packed, ONE), numbers)
    norm = float(sums.pop("grad_norm"))
    return {
        **mean_metrics(jax.device_get(sums), "tokens" if stage.loss == "grpo" else "pairs"),
        "grad_norm": norm,
    }


TOKENS = sum(len(row.rollout.token_ids) for group in groups() for row in group)
AUTHORS = {"loss_type": "seq-mean-token-sum", "scale_rewards": "group", "scale_rewards_eps": 1e-6}
GRPO = {
    "sum": ({}, PROMPTS, False),
    "authors": (AUTHORS, PROMPTS * GROUP, True),
    "dapo": ({"loss_type": "dapo"}, TOKENS, False),
}


@pytest.mark.parametrize(
    ("name", "beta"),
    [
        ("dapo", KL),
        ("sum", 0.0),
    ],
)
def test_grpo(name, beta):
    """Without a KL term responses of advantage 0, which have no gradient, are left out of the
    batch."""
    changes, divisor, scaled = GRPO[name]
    stage = stage_of(beta=beta, **changes)
    trained = sum(len(group.responses) for group in make(stage).groups)
    assert trained == (PROMPTS * GROUP if beta else PROMPTS * GROUP // 2)
    expected = norm_of(model(0), grpo_slopes(divisor, scaled, beta))
    assert metrics_of(stage, filled(stage))["grad_norm"] == pytest.approx(float(expected), rel=2e-5)


def test_dpo():
    """Of 64 prompts half have a pair, so that the authors' gradient is half as long."""
    norms = {}
    for normalizer, divisor in (("pairs", 32), ("prompts", 64)):
        stage = stage_of(loss="group_dpo", dpo={"normalizer": normalizer})
        batch = make(stage)
        assert (batch.metrics["pairs/prompts"], batch.metrics["pairs/skipped"]) == (32, 32)
        expected = norm_of(model(0), dpo_slopes(divisor))
        norms[normalizer] = metrics_of(stage, filled(stage))["grad_norm"]
        assert norms[normalizer] == pytest.approx(float(expected), rel=2e-5)
    assert norms["pairs"] == pytest.approx(2 * norms["prompts"], rel=1e-5)


def test_group_dpo_with_grpo():
    more = {**AUTHORS, "dpo": {"normalizer": "prompts"}}
    stage = stage_of(loss="group_dpo", grpo_coef=COEF, beta=KL, **more)
    grpo = grpo_slopes(PROMPTS * GROUP, True, KL)
    expected = norm_of(model(0), dpo_slopes(PROMPTS) + COEF * grpo)
    assert metrics_of(stage, filled(stage))["grad_norm"] == pytest.approx(float(expected), rel=2e-5)


def test_the_first_update_on_a_batch_is_on_policy_in_bfloat16():
    """Up to the rounding of two programs, where a batch serves two updates. What was sampled with
    is off by e^0.5 and more, and would have clipped most tokens."""
    stage = stage_of(sync_every=2)
    packed = filled(stage, trainer=model(0))
    assert "old_logprob" in packed.arrays
    metrics = metrics_of(stage, packed, jnp.bfloat16)
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-3)
    assert [metrics[f"clip_ratio/{side}_mean"] for side in ("low", "high", "region")] == [
        0.0,
        0.0,
        0.0,
    ]
    # those with a signal
    sampled = np.concatenate([row.rollout.logprobs for group in groups()[::2] for row in group])
    # in float32; the policy's are in bfloat16
    log_importance = known(0)[::2][unpacked()[2][::2] > 0] - sampled
    expected = {
        "sampling_logp_difference/mean": np.abs(log_importance).mean(),
        "sampling_logp_difference/max": np.abs(log_importance).max(),
        "importance_sampling_ratio/mean": np.exp(log_importance).mean(),
        "importance_sampling_ratio/min": np.exp(log_importance).min(),
        "importance_sampling_ratio/max": np.exp(log_importance).max(),
    }
    assert {name: metrics[f"sampling/{name}"] for name in expected} == pytest.approx(
        expected, rel=0.05
    )
