"""Small models for tests of recipes, with tokenizer and chat template, made by transformers; and
files of problems.

A random model solves nothing, so the toy's output matrix favours a few answers that the toy
problems have: the verifier then finds right and wrong ones.
"""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from g2d_jax.models import decoder
from g2d_jax.records import SEGMENT_STRIDE

LLAMA = (  # Llama 3.1's: the system block is there unasked
    "{{ bos_token }}<|start|>system<|end|>\n\nToday Date: 26 Jul 2024\n\n"
    "{% set given = messages[0].role == 'system' %}{% if given %}{{ messages[0].content }}{% "
    "endif %}<|eot|>"
    "{% for m in (messages[1:] if given else messages) %}"
    "{{ '<|start|>' + m.role + '<|end|>\n\n' + m.content | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"
)
QWEN = (
    "{% if messages[0].role != 'system' %}{{ '<|start|>system\nYou are Qwen.<|eot|>\n' }}{% "
    "endif %}"
    "{% for m in messages %}{{ '<|start|>' + m.role + '\n' + m.content + '<|eot|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
GEMMA = (  # Gemma 3's: a system message begins the first user's
    "{{ bos_token }}{% set given = messages[0].role == 'system' %}"
    "{% for m in (messages[1:] if given else messages) %}"
    "{{ '<|start|>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{% if given and loop.first %}{{ messages[0].content + '\n\n' }}{% endif %}"
    "{{ m.content | trim + '<|eot|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>model\n' }}{% endif %}"
)
PAPER = (
    "Given the following problem, reason and give a final answer to the problem. Problem: "
    "{}\nYour response should end "
    "with 'The final answer is $\\boxed{{[answer]}}$. I hope it is correct.' where [answer] is "
    "the response to the "
    "problem."
)
SPECIAL = ["<|bos|>", "<|eot|>", "<|start|>", "<|end|>", "<|pad|>", "<|cls|>"]
ANSWERS = ["\\boxed{1}", "\\boxed{2}"]
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def make_tokenizer(template: str, cls_id: int | None = None) -> Any:
    """Byte-level BPE that knows the paper's prompt well. cls_id: where special tokens begin, less
    5."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([PAPER] * 5, trainer)
    if cls_id is not None:
        state = json.loads(backend.to_str())
        state["model"]["vocab"] |= {name: cls_id - 5 + i for i, name in enumerate(SPECIAL)}
        backend = Tokenizer.from_str(json.dumps(state))
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens(ANSWERS)
    names = {
        "bos_token": "<|bos|>",
        "eos_token": "<|eot|>",
        "pad_token": "<|pad|>",
        "cls_token": "<|cls|>",
    }
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.chat_template = template
    return tokenizer


def make_qwen2_tokenizer() -> Any:
    """One of Qwen2's own class."""
    from transformers import Qwen2Tokenizer

    options = {"new_special_tokens": SPECIAL, "show_progress": False}
    tokenizer = Qwen2Tokenizer().train_new_from_iterator([PAPER] * 5, 400, **options)
    tokenizer.add_tokens(ANSWERS)
    tokenizer.chat_template, tokenizer.eos_token, tokenizer.pad_token = QWEN, "<|eot|>", "<|pad|>"
    return tokenizer


def save_policy(folder: Path, family: str, tokenizer: Any, **sizes: float) -> None:
    """A model whose likeliest tokens are the answers and the end of turn: coordinate 0 is the same
    everywhere."""
    torch = pytest.importorskip("torch")
    import transformers

    eos = tokenizer.convert_tokens_to_ids("<|eot|>")
    torch.manual_seed(0)
    build = getattr(transformers, f"{family}ForCausalLM")
    model = build(
        build.config_class(**{**SIZES, **sizes}, vocab_size=len(tokenizer), eos_token_id=eos)
    )
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 3.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[[eos, *tokenizer.convert_tokens_to_ids(ANSWERS)], 0] = 1.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def their_logits_and_ours(model: Any, params: Any, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The logits of some tokens, of a model of transformers and of the library's parameters."""
    torch = pytest.importorskip("torch")
    tokens = jnp.asarray([ids])
    hidden, _ = decoder.forward(
        params, tokens, jnp.arange(len(ids))[None], jnp.full_like(tokens, SEGMENT_STRIDE)
    )
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy(), np.asarray(
            hidden @ decoder.head_matrix(params)
        )[0]


def shrink(config: ConfigDict) -> None:
    """Set what a run of the toys on a few problems needs, in float32; its stages are left as they
    are."""
    config.dtype = "float32"
    config.logging.tensorboard = False
    config.data.max_prompt_length = 96
    config.compute.update(microbatch_tokens=384, max_num_seqs=4, remat="none")
    for section in (config.data, *config.tasks.values()):
        section.train.limit, section.dev.limit, section.test.limit = 24, 4, 5
    for rewards in (config.reward, *(task.reward for task in config.tasks.values())):
        rewards.workers, rewards.model.max_length, rewards.model.batch_tokens = 1, 256, 192
    config.stages.evaluate.num_generations = 2


def save_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def solved_problems(count: int) -> list[dict[str, str]]:
    """Rows in the form of NuminaMath-CoT whose answers are 1 and 2."""
    maths = [(f"What is {k + 1 + k % 2} - {k}?", 1 + k % 2) for k in range(count)]
    return [
        {"problem": p, "solution": f"It is $\\boxed{{{a}}}$.", "source": "aops_forum"}
        for p, a in maths
    ]
