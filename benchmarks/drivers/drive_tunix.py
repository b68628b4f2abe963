"""Drive google-tunix: its JAX sampler, its DPO trainer and its GRPO learner, all on one device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from cases import END, MODELS, PAD, STOPS, Case, Clock, run, text, tokenizer, tokens
from flax import nnx
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.qwen3.model import ModelConfig, Qwen3
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.sft.dpo.dpo_trainer import DPOTrainer, DPOTrainingConfig, TrainingInput

NEVER = 10**9
BATCH = 32  # prompts of one call of the sampler, which ends with the longest of its responses


def build(case: Case) -> Qwen3:
    """Make a model with random weights."""
    shape = MODELS[case.model]
    config = ModelConfig(
        num_layers=shape["num_hidden_layers"],
        vocab_size=case.vocabulary,
        embed_dim=shape["hidden_size"],
        hidden_dim=shape["intermediate_size"],
        num_heads=shape["num_attention_heads"],
        head_dim=shape["head_dim"],
        num_kv_heads=shape["num_key_value_heads"],
        rope_theta=1_000_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
    )
    return Qwen3(config, rngs=nnx.Rngs(0))


def one_mesh() -> Any:
    """The mesh of one device that its trainers ask for."""
    return jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def words(prompt: list[int]) -> str:
    """Write a prompt without its first token: Tunix puts one before it."""
    return text(prompt[1:])


def sampling(case: Case, clock: Clock) -> None:
    """Sample in batches, each prompt repeated for each of its samples, as its rollouts do."""
    shape = MODELS[case.model]
    sizes = (
        case.prompt + case.response,
        shape["num_hidden_layers"],
        shape["num_key_value_heads"],
        shape["head_dim"],
    )
    sampler = Sampler(build(case), tokenizer(case.vocabulary), CacheConfig(*sizes))
    ends: dict[str, Any] = {"forbidden_tokens": [PAD, END]}
    if case.stops:
        ends = {"forbidden_tokens": [PAD], "eos_tokens": list(STOPS)}
    clock.start()
    for step in range(case.steps):
        prompts = [words(prompt) for prompt, responses in case.draw(step) for _ in responses]
        count = 0
        for first in range(0, len(prompts), BATCH):
            how = {"temperature": 1.0, "top_p": 1.0, "seed": 1000 * step + first, **ends}
            out = sampler(prompts[first : first + BATCH], case.response, case.prompt, **how)
            count += sum(map(len, out.tokens))
        clock.step(count)


def dpo(case: Case, clock: Clock) -> None:
    """Train on pairs; a batch is asked for when the step before it is done."""

    def padded(name: str, rows: list[list[int]], length: int) -> dict[str, jax.Array]:
        ids = np.full((len(rows), length), PAD, np.int32)
        for row, own in zip(ids, rows, strict=True):
            row[: len(own)] = own
        return {f"{name}_ids": jnp.asarray(ids), f"{name}_mask": jnp.asarray(ids != PAD, jnp.int32)}

    def batches() -> Iterator[TrainingInput]:
        clock.start()
        for step in range(case.steps):
            data = case.draw(step)
            arrays = padded("prompt", [prompt for prompt, _ in data], case.prompt)
            for name, side in (("chosen", 0), ("rejected", 1)):
                arrays |= padded(name, [sides[side] for _, sides in data], case.response)
            yield TrainingInput(**arrays)
            clock.step(tokens(data))

    waiting = {"max_inflight_computations": 1, "data_sharding_axis": ("fsdp",)}
    config = DPOTrainingConfig(beta=0.1, eval_every_n_steps=NEVER, **waiting)
    reference = build(case) if case.reference else None
    trainer = DPOTrainer(
        model=build(case), ref_model=reference, optimizer=optax.adamw(1e-5), training_config=config
    )
    with one_mesh():
        trainer.train(batches())


def grpo(case: Case, clock: Clock) -> None:
    """Sample, score, update; the share of even tokens is the reward."""

    def rewarded(prompts: Any, completions: list[str], **_: Any) -> list[float]:
        drawn = [completion.split() for completion in completions]
        counts.append(sum(map(len, drawn)))
        return [
            sum(int(word[1:]) % 2 == 0 for word in row if word[1:].isdigit()) / len(row)
            for row in drawn
        ]

    def batches() -> Iterator[dict[str, np.ndarray]]:
        clock.start()
        for step in range(case.steps):
            yield {"prompts": np.array([words(prompt) for prompt, _ in case.draw(step)])}
            clock.step(counts[-1])

    counts: list[int] = []
    sizes = (case.response, case.prompt, case.prompt + case.response)
    rollouts = dict(
        zip(("max_tokens_to_generate", "max_prompt_length", "kv_cache_size"), sizes, strict=True)
    )
    # no token ends
    drawn = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": None,
        "eos_tokens": [case.vocabulary],
    }
    steps = RLTrainingConfig(
        actor_optimizer=optax.adamw(1e-5), eval_every_n_steps=NEVER, max_steps=NEVER
    )
    config = ClusterConfig(
        role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), one_mesh()),
        rollout_engine="vanilla",
        offload_to_cpu=False,
        training_config=steps,
        rollout_config=RolloutConfig(**rollouts, **drawn),
    )
    known = tokenizer(case.vocabulary)
    reference = build(case) if case.reference else None
    cluster = RLCluster(
        actor=build(case), reference=reference, tokenizer=known, cluster_config=config
    )
    beta = 0.04 if case.reference else 0.0
    rule = GRPOConfig(num_generations=case.samples, num_iterations=1, beta=beta, epsilon=0.2)
    GRPOLearner(cluster, rule, reward_fns=rewarded).train(batches())


if __name__ == "__main__":
    run({"sampling": sampling, "dpo": dpo, "grpo": grpo}, "google-tunix", "jax")
