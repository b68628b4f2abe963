"""Every setting there is, with its default. A config file starts from `base()` and adds stages.

`ml_collections.ConfigDict` fixes names and types: a field set to None here through `optional` may be left unset.
Identity fields decide the result and are fingerprinted; those in RUNTIME may change between two starts of one run.
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

RUNTIME = (
    *("mesh", "compute", "logging", "checkpoint", "faults", "reward.workers", "reward.model.batch_tokens"),
    "reward.folder",
    *(f"reward.judge.{name}" for name in ("url", "api_key_env", "timeout", "retries", "concurrency")),
)
"""Top-level sections and fields that do not change what is computed, beyond rounding."""


def optional(kind: type) -> Any:
    """A field that may be left unset (None) but, when set, has this type."""
    return placeholder(kind)


def source(path: str, split: str = "", limit: int | None = None, **fields: str) -> ConfigDict:
    """Where problems come from. path: a file, "hub:owner/name", "math500" …, or "procedural:slips".

    split: "train", "dev" or "test" by id hash, "" for all. fields: our field name -> the file's. revision, a setting of
    its own, pins data of the hub: a commit, branch or tag.
    """
    config = ConfigDict({"path": path, "split": split, "limit": optional(int), "fields": fields, "on_error": "raise"})
    config.revision = optional(str)
    config.limit = limit
    return config


def base() -> ConfigDict:
    """The settings every run has, for the demo's task; stages are added by the config file."""
    return ConfigDict(
        {
            "name": "run",
            "seed": 0,
            "dtype": "float32",  # of activations; parameters are float32
            "model": {
                "path": "",  # a Hugging Face folder or hub id; "" starts from random parameters of the shape below
                "revision": optional(str),
                "family": "qwen2",
                "hidden_size": 96,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 24,
                "intermediate_size": 256,
                "tie_word_embeddings": True,
                "rope_theta": 10_000.0,
                "init_std": 0.02,
            },
            "lora": {  # low-rank adapters beside the model's linear layers; what is trained is they alone
                "rank": 0,  # 0: none, all parameters are trained
                "alpha": 16.0,  # their product is scaled by alpha / rank
                "rslora": False,  # by alpha / sqrt(rank) instead
                "dropout": 0.0,  # of what the adapters read, in train steps only; in [0, 1)
                "targets": ("all-linear",),  # or some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj
                "base_dtype": "float32",  # of the parameters that are not trained: "bfloat16" halves their memory
                "quantise": "",  # of them the blocks' linear layers: "int8" or "nf4" (extra quant)
            },
            "tokenizer": {
                "path": "",  # "" is the model's own
                "revision": optional(str),
                "chat": optional(bool),  # unset: the chat template if the tokenizer has one
                "prompt_template": "plain",  # "plain", "paper", or any text with {problem}
                "system": optional(str),  # unset: no system block; "default": what the template inserts
                "date": optional(str),  # unset: the fixed date of data/template.py
                "enable_thinking": optional(bool),
            },
            "data": {
                "train": source("procedural:slips", "train", 20_000),
                "dev": source("procedural:slips", "dev", 256),
                "test": source("procedural:slips", "test", 1024),
                "seed": 0,
                "max_prompt_length": 256,
                "weight": 1.0,  # of these problems, the task "main", beside those of `tasks`
            },
            "reward": reward(),
            "tasks": {},  # further tasks of a mixed run, by name: see `task`
            "mesh": {"data": 1, "fsdp": -1, "tensor": 1},
            "compute": {
                "row_length": 0,  # tokens of a packed training row; 0 fits the stage's longest group
                "microbatch_tokens": 16_384,  # tokens of one forward and backward pass, over all devices
                "remat": "attention",  # "none", "full" or "attention": what the backward pass recomputes
                "attention": "auto",  # its kernel: "xla", "splash" (TPU), "cudnn" (GPU); "auto": the platform's own
                "decode_attention": "xla",  # of decode steps; "pallas": models/ring.py, for TPU; compiled only, not run
                "offload_optimizer": False,  # its state lies in the host's memory but for the update itself
                "max_num_seqs": optional(int),  # rows decoded together; unset: what memory allows
                "chunk": 16,  # decode steps between two looks at finished rows
                "prefill_rows": 32,  # prompts of one prefill
                "sampling_tensor": 0,  # devices that share one copy of the weights in sampling; 0: as few as hold it
                "responses_at_once": 16_384,  # of one call of the sampler, which is written when it is done
                "flags": "none",  # "overlap": collectives beside products, by g2d_jax/flags.py; compiled only, not run
                "compilation_cache": optional(str),  # a folder; "" is none; unset: JAX's own setting, else the user's
                "price_per_device_hour": optional(float),  # in your money: reports then have a column of it
            },
            "logging": {
                "tensorboard": True,
                "wandb": optional(str),
                "samples": 8,
                "every": 1,
                "profile": optional(str),  # updates under JAX's profiler, as STAGE:START-STOP
            },
            "checkpoint": {"every": 50, "keep": 2},
            "faults": {
                "max_skipped": 5,  # updates in a row skipped for a loss or gradient that is not finite: then stop
                "peer_timeout": 60.0,  # seconds without a sign of life after which another process counts as lost
                "hang_timeout": 3600.0,  # seconds in which no process gets any further: then end all
            },
            "stages": {},
        }
    )


def reward(**changes: Any) -> ConfigDict:
    """How responses are scored. function: "verify" (math-verify against the reference answer), "model" (a reward
    model), "judge" (a language model behind an OpenAI-style endpoint), or "package.module:function" (TRL's signature),
    also of a file module.py in `folder`, which is the config file's where nothing else is said.

    scalar: rewards know better and worse but no right and wrong (see `is_scalar`): pairs are the best against the worst
    of a group, and there is no accuracy. Otherwise a reward above correct_above counts as correct.
    """
    return _stage(
        {
            "function": "verify",
            "folder": optional(str),  # of the file that the function is in, unset: found by `resolve`
            "scalar": optional(bool),  # unset: those of "model" and "judge" are
            "correct_above": 0.5,
            "cpu_seconds": 5.0,
            "memory_mb": 2048,
            "workers": 1,
            "model": {
                "path": "",  # a Hugging Face folder or hub id with a scalar head
                "revision": optional(str),
                "tokenizer": "",  # "" is the reward model's own
                "max_length": 4096,  # tokens of prompt and response; longer ones are unscorable, never cut
                "batch_tokens": 16_384,  # of one forward pass, over all devices
                "dtype": "bfloat16",
            },
            "judge": {
                "url": "",  # the endpoint's base, as in "http://localhost:8000/v1"
                "model": "",
                "api_key_env": "OPENAI_API_KEY",  # the environment variable that holds the key
                "prompt": "",  # text with {prompt}, {response} and, if wanted, {answer}; "" is the built-in rubric
                "pattern": r"\[\[(-?\d+(?:\.\d+)?)\]\]",  # its last match in the reply, first group, is the reward
                "max_tokens": 1024,
                "timeout": 120.0,  # seconds of one attempt
                "retries": 5,
                "concurrency": 16,
            },
        },
        changes,
    )


def is_scalar(reward: ConfigDict) -> bool:
    """Whether a reward section's rewards know better and worse only."""
    return reward.function in ("model", "judge") if reward.scalar is None else reward.scalar


def compares(stage: ConfigDict) -> bool:
    """Whether an online stage's loss compares the policy with a reference."""
    return bool(stage.loss != "grpo" or stage.beta)


def task(train: ConfigDict, dev: ConfigDict, test: ConfigDict, *, weight: float = 1.0, **changes: Any) -> ConfigDict:
    """A further task of a mixed run: its problems, its share of every batch, and its own reward (`changes`)."""
    return ConfigDict({"train": train, "dev": dev, "test": test, "weight": weight, "reward": reward(**changes)})


def optimizer(learning_rate: float, **changes: Any) -> ConfigDict:
    """AdamW or Adafactor. schedule: "constant", or "linear" or "cosine" decay over the updates after warmup_steps."""
    config = ConfigDict(
        {
            "kind": "adamw",  # or "adafactor", which has no use for moment_dtype, b1, b2 and eps
            "moment_dtype": "float32",  # of AdamW's moments; or "bfloat16"
            "learning_rate": learning_rate,
            "schedule": "constant",
            "warmup_steps": 0,
            "min_lr_ratio": 0.0,  # what a decay ends at, of the learning rate
            "b1": 0.9,
            "b2": 0.999,
            "eps": 1e-8,
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
        }
    )
    config.update(changes)
    return config


def sampling(max_new_tokens: int, **changes: Any) -> ConfigDict:
    """How responses are drawn: temperature 0 is greedy, top_p 1 and top_k 0 are off."""
    config = ConfigDict({"max_new_tokens": max_new_tokens, "temperature": 1.0, "top_p": 1.0, "top_k": 0})
    config.update(changes)
    return config


def sft(**changes: Any) -> ConfigDict:
    """Supervised fine-tuning. data: messages or prompt/completion files, or an embedded task's demonstrations."""
    return _stage(
        {
            "kind": "sft",
            "policy": "init",
            "data": source("procedural:slips"),
            "steps": 2000,
            "batch_size": 64,
            "max_length": 512,
            "optimizer": optimizer(3e-3, schedule="cosine", warmup_steps=50),
        },
        changes,
    )


def online(**changes: Any) -> ConfigDict:
    """Online RL, and the range to offline: every `sync_every` updates the sampling policy becomes the trained one.

    An update trains on a batch of prompts_per_step prompts. At a synchronisation the rollouts of all batches up to the
    next one are drawn at once. keep: the steps K whose checkpoints stay for later stages (the last one always does).
    """
    return _stage(
        {
            "kind": "online",
            "policy": "sft",
            "steps": 20,
            "keep": (),
            "stop": "steps",  # "budget" or "adaptive" may end it earlier: see stages/ending.py and stopping.py
            "budget": {"measure": "flops", "amount": 0.0},
            "adaptive": {"min_steps": 20, "shift": 0.5},  # measures on probes: set probe.every too
            "prompts_per_step": 32,
            "num_generations": 8,
            "sampling": sampling(256),
            "sampling_weights": "",  # "int8": codes of the linear layers in place of their weights (extra quant)
            "stream": optional(str),  # names the order of prompts and the random draws; unset: the stage's own
            "sync_every": 1,  # updates; 0 is never: offline
            "reference_sync": False,  # whether the reference becomes the sampling policy at each synchronisation
            "num_iterations": 1,  # updates on every batch of rollouts; sync_every must be a multiple
            "loss": "grpo",  # or "dpo", "group_dpo"
            # GRPO
            "loss_type": "sum",
            "scale_rewards": "none",
            "scale_rewards_eps": 1e-4,  # beside the standard deviation
            "epsilon": 0.2,
            "epsilon_high": optional(float),
            "beta": 0.0,
            "importance_sampling_level": "token",  # "sequence" is GSPO
            "importance_cap": 0.0,  # truncated importance sampling of trainer against sampler at this ratio; 0: off
            # DPO
            "dpo": {
                "loss_type": "sigmoid",
                "beta": 0.1,
                "label_smoothing": 0.0,
                "normalizer": "pairs",  # or "prompts": all of the batch, those without a pair too
                "nll_coef": 0.0,
                "nll_length_normalization": True,  # the NLL term is a mean over the chosen response's tokens, not a sum
            },
            "grpo_coef": 0.0,  # times the GRPO loss, beside "group_dpo"
            # both
            "entropy_coef": 0.0,  # times the mean next-token entropy of the trained responses, which is rewarded
            "mask_truncated": False,  # leave responses that reached max_new_tokens out of the loss
            "overlong_buffer": 0,  # tokens before max_new_tokens over which a reward falls linearly by up to 1 (DAPO)
            "refill": 0,  # more rounds of prompts, at most, in place of those without a signal (dynamic sampling)
            "retire": {"after": 0, "revisit": 0},  # same reward so many times running: out for so many steps (0: ever)
            "difficulty": {"min_pass_rate": 0.0, "max_pass_rate": 1.0, "outside": 0.1},  # chance of a prompt outside
            "patience": 50,  # stop after so many steps in a row without any reward signal
            "probe": probe(),
            "optimizer": optimizer(1e-6, eps=1e-4),
        },
        changes,
    )


def probe(**changes: Any) -> ConfigDict:
    """Fresh samples of the policy in training, every so many updates (0: none), on the first prompts of a split."""
    return _stage({"every": 0, "prompts": 64, "num_generations": 1, "split": "dev"}, changes)


def collect(**changes: Any) -> ConfigDict:
    """Rollouts of a frozen policy, and preference pairs from them.

    rollouts: "sample"; "archive" takes the groups that the policy's own online stage drew; the name of another collect
    stage takes those it has, whatever this one says of prompts and sampling; or a JSONL file's path.
    """
    return _stage(
        {
            "kind": "collect",
            "policy": "warmup",
            "rollouts": "sample",
            "prompts": 1024,
            "part": 128,  # prompts of a file
            "num_generations": 8,
            "sampling": sampling(256),
            "sampling_weights": "",  # "int8": codes of the linear layers in place of their weights (extra quant)
            "stream": optional(str),  # names the order of prompts and the random draws; unset: the stage's own
            "pairs_per_prompt": 4,
            "min_pass_rate": 0.0,  # prompts outside this window of pass rates give no pair
            "max_pass_rate": 1.0,
            "select": "all",  # or "random", "uncertain", "confident": which pairs to keep when max_pairs is set
            "max_pairs": optional(int),  # unset: all pairs
        },
        changes,
    )


def offline(**changes: Any) -> ConfigDict:
    """Offline DPO from a policy on a preference dataset; the reference is the policy it starts from.

    diagnose: measure what the pairs are to the policy, before and after; its cost is counted apart. The trained policy
    is the same without.
    """
    return _stage(
        {
            "kind": "offline",
            "policy": "warmup",
            "preferences": "collect",
            "epochs": 1,
            "batch_size": 64,
            "shuffle": True,  # False takes the pairs in the order in which they were collected
            "loss_type": "sigmoid",
            "beta": 0.1,
            "label_smoothing": 0.0,
            "probe": probe(),
            "probe_sampling": sampling(256),
            "diagnose": True,
            "signal_pairs": 256,  # of the gradient's signal at the start, in 16 batches; 0: not measured
            "optimizer": optimizer(1e-6, eps=1e-4),
        },
        changes,
    )


def select(**changes: Any) -> ConfigDict:
    """The best of a policy's kept checkpoints by its reward on held-out problems; a policy's name like any other.

    steps: which of the kept ones, () for all. length_normalise: the mean scalar reward is divided by the mean length.
    """
    return _stage(
        {
            "kind": "select",
            "policy": "train",
            "steps": (),
            "num_generations": 1,
            "sampling": sampling(256, temperature=0.6, top_p=0.9),
            "length_normalise": True,
        },
        changes,
    )


def evaluate(**changes: Any) -> ConfigDict:
    """Accuracy of policies on held-out problems."""
    return _stage(
        {
            "kind": "evaluate",
            "policies": ("sft", "warmup", "dpo"),
            "split": "test",  # which of data.dev and data.test
            "num_generations": 4,
            "sampling": sampling(256),
            "pass_at": (1, 2, 4),
            "greedy": True,
        },
        changes,
    )


def sweep(**changes: Any) -> ConfigDict:
    """A study: the config under many overrides. seeds: () keeps the config's own. Fill `arms` with `arm(…)`."""
    return _stage({"seeds": (), "arms": {}}, changes)


def arm(**changes: Any) -> ConfigDict:
    """Points of a study that vary alike, written as overrides of the config.

    fixed: for all of them ("stages.dpo.beta=0.5"). product: every combination of "field=value,value,…"; a value with
    commas stands in brackets. zip: fields that go together, value by value. stages: those the points keep, () for all.
    """
    return _stage({"fixed": (), "product": (), "zip": (), "stages": ()}, changes)


def _stage(defaults: dict[str, Any], changes: dict[str, Any]) -> ConfigDict:
    config = ConfigDict(defaults)
    config.lock()
    for name, value in changes.items():
        setattr(config, name, value)
    return config
