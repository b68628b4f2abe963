"""Drive transformers' generate() and TRL's DPO and GRPO trainers, on one CPU thread."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from cases import END, FAMILIES, MODELS, PAD, STOPS, Case, Clock, run, text, tokenizer, tokens
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

BATCH = 32  # prompts of one call of generate(), which ends with the longest of its responses


def build(case: Case) -> Any:
    """Make a model with random weights."""
    special = {"pad_token_id": PAD, "eos_token_id": END, "tie_word_embeddings": True}
    family = FAMILIES.get(case.model, "qwen3")
    config = AutoConfig.for_model(
        family, vocab_size=case.vocabulary, **MODELS[case.model], **special
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def sampling(case: Case, clock: Clock) -> None:
    """Sample in batches, each prompt repeated for each of its samples, as its trainers do."""
    model = build(case).eval()
    how: dict[str, Any] = (
        {"eos_token_id": list(STOPS)} if case.stops else {"min_new_tokens": case.response}
    )
    clock.start()
    for step in range(case.steps):
        prompts = torch.tensor([prompt for prompt, responses in case.draw(step) for _ in responses])
        count = 0
        for some in prompts.split(BATCH):
            how |= {
                "attention_mask": torch.ones_like(some),
                "max_new_tokens": case.response,
                "pad_token_id": PAD,
            }
            out = model.generate(some, do_sample=True, top_k=0, **how)
            new = out[:, case.prompt :]
            count += (
                int((~torch.isin(new, torch.tensor([PAD, *STOPS]))).sum())
                if case.stops
                else new.numel()
            )
        clock.step(count)


class Steps(TrainerCallback):
    """Tells the clock of every step, from the end of the one before."""

    def __init__(self, clock: Clock, counts: list[int]) -> None:
        self.clock, self.counts = clock, counts

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Begin the first step."""
        self.clock.start()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """End a step, of the tokens that are next in the list."""
        self.clock.step(self.counts.pop(0))


def settings(case: Case, folder: str) -> dict[str, Any]:
    """What both trainers are told: nothing is saved, nothing is computed twice, float32."""
    return {
        "output_dir": folder,
        "per_device_train_batch_size": case.prompts * (case.samples if case.table == "grpo" else 1),
        "max_steps": case.steps,
        "learning_rate": 1e-5,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        "optim": "adamw_torch",
    }


def dpo(case: Case, clock: Clock) -> None:
    """Train on pairs; the trainer puts an end after each response."""
    steps = [case.draw(step) for step in range(case.steps)]
    rows = [
        (text(prompt) + " ", *(text(side[:-1]) for side in sides))
        for data in steps
        for prompt, sides in data
    ]
    pairs = Dataset.from_list(
        [dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in rows]
    )
    with tempfile.TemporaryDirectory() as folder:
        precomputed = {"precompute_ref_log_probs": not case.reference}
        config = DPOConfig(**settings(case, folder), beta=0.1, max_length=None, **precomputed)
        DPOTrainer(
            model=build(case),
            ref_model=build(case),
            args=config,
            train_dataset=pairs,
            processing_class=tokenizer(case.vocabulary),
            callbacks=[Steps(clock, [tokens(data) for data in steps])],
        ).train()


def grpo(case: Case, clock: Clock) -> None:
    """Sample, score, update; the share of even tokens is the reward."""

    def rewarded(completion_ids: list[list[int]], **_: Any) -> list[float]:
        counts.append(sum(map(len, completion_ids)))
        return [sum(i % 2 == 0 for i in row) / len(row) for row in completion_ids]

    counts: list[int] = []
    rows = [{"prompt": text(prompt)} for step in range(case.steps) for prompt, _ in case.draw(step)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "start")
        build(case).save_pretrained(path)  # a reference is read from where the model was
        config = GRPOConfig(
            **settings(case, folder),
            num_generations=case.samples,
            max_completion_length=case.response,
            loss_type="grpo",
            beta=0.04 if case.reference else 0.0,
            top_k=0,
            generation_kwargs={"min_new_tokens": case.response},
        )
        GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
            reward_funcs=rewarded,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer(case.vocabulary),
            callbacks=[Steps(clock, counts)],
        ).train()


if __name__ == "__main__":
    torch.set_num_threads(1)
    run({"sampling": sampling, "dpo": dpo, "grpo": grpo}, "torch", "transformers", "trl")
