"""What the compiler made of the train steps: no logits of all tokens, the head gathered once, rows
that stay."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from g2d_jax.config import OnlineDPO, Optimizer
from g2d_jax.losses.logprobs import CPU_CHUNK as CHUNK
from g2d_jax.models.config import ModelConfig
from g2d_jax.plan import hlo as text
from g2d_jax.runtime import mesh as meshes
from g2d_jax.training import objectives
from g2d_jax.training.objectives import Compute, Objective, split
from g2d_jax.training.optimizer import make_optimizer
from g2d_jax.training.step import abstract_numbers, abstract_state, make_train_step

pytestmark = pytest.mark.slow

# no other size of the model or the batch is near 5,008 or its half
WORDS, WIDTH, LENGTH, PLACES = (
    5008,
    96,
    4096,
    16,
)
MESHES = {"fsdp": (1, 8, 1), "tensor": (1, 4, 2)}


def made(compute: Compute) -> dict[str, tuple[Objective, tuple[str, ...], tuple[str, ...]]]:
    """Each loss, with what its batch has for each token and for each response."""
    grpo: dict[str, Any] = {"epsilon": 0.2, "epsilon_high": None}
    token = ("weight", "advantage", "old_logprob")
    return {
        "sft": (objectives.sft(compute), ("weight",), ()),
        "grpo": (objectives.grpo(compute, temperature=1.0, beta=0.0, **grpo), token, ()),
        "dpo": (objectives.dpo(compute, OnlineDPO()), (), ("weight", "reference")),
        "group_dpo": (
            objectives.group_dpo(compute, OnlineDPO(), **grpo, grpo_coef=0.01),
            token,
            ("pair_weight", "side", "prompt", "reference"),
        ),
    }


def compiled(loss: str, sizes: tuple[int, int, int], *, tied: bool) -> str:
    """The HLO of a step on two micro-batches of a row a device, in bfloat16, on 8 devices."""
    mesh = meshes.make_mesh(*sizes)
    config = ModelConfig("qwen2", WORDS, WIDTH, 2, 2, 2, 32, 160, tie_word_embeddings=tied)
    optimizer, of_optimizer = make_optimizer(Optimizer(learning_rate=1e-06), total_steps=10)
    objective, of_tokens, of_responses = made(Compute(mesh, jnp.dtype("bfloat16"), "full"))[loss]
    structure, of_loss = split(objective)
    numbers = abstract_numbers({"optimizer": of_optimizer, "loss": of_loss}, mesh)
    kinds: dict[str, Any] = dict.fromkeys(
        ("tokens", "positions", "segment_ids", "logit_index", "response_index"), jnp.int32
    )
    kinds |= dict.fromkeys((*of_tokens, *of_responses), jnp.float32)
    rows = meshes.row_ways(mesh)

    def array(name: str, kind: Any) -> jax.ShapeDtypeStruct:
        shape = (2, rows, PLACES if name in of_responses else LENGTH)
        return jax.ShapeDtypeStruct(
            shape, kind, sharding=meshes.sharding(mesh, (None, "rows", None), shape)
        )

    arrays = {name: array(name, kind) for name, kind in kinds.items()}
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=meshes.replicated(mesh))
    step = make_train_step(structure, optimizer, config, mesh)
    return (
        step.lower(abstract_state(config, optimizer, mesh), arrays, count, numbers)
        .compile()
        .as_text()
    )


def shapes(hlo: str) -> set[tuple[int, ...]]:
    """Of every array in the program, those inside fusions and loops included."""
    return {
        tuple(map(int, dims.split(",")))
        for dims in re.findall(r"\b(?:pred|[a-z]+\d+)\[([\d,]+)\]", hlo)
    }


def computations(hlo: str) -> list[str]:
    """The program's computations: what a loop repeats is one of its own."""
    return re.findall(r"^(?:ENTRY )?%\S+ \(.*?\{\n(.*?)^\}", hlo, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("loss", "where"), [("sft", "tensor"), ("grpo", "fsdp")])
def test_no_step_holds_the_logits_of_all_tokens_and_the_head_is_gathered_once(
    loss: str, where: str
):
    hlo = compiled(loss, MESHES[where], tied=loss == "grpo")
    tokens = LENGTH // (2 if where == "tensor" else 1)  # of a device in one micro-batch
    assert tokens > 1.5 * CHUNK
    of_words = {shape for shape in shapes(hlo) if {WORDS, WORDS // 2} & {*shape}}
    assert (CHUNK, WORDS) in of_words  # it does look into the loops
    assert max(math.prod(shape) for shape in of_words) <= CHUNK * WORDS, sorted(of_words)
    gathers = re.findall(r"= (\S+) all-gather\(", hlo)
    assert sum({*shape} == {WIDTH, WORDS} for found in gathers for shape in shapes(found)) == 1, (
        gathers
    )
    looped = [body for body in computations(hlo) if (CHUNK, WORDS) in shapes(body)]
    assert looped and not [
        body for body in looped if re.search(r" all-(gather|reduce|to-all)| reduce-scatter", body)
    ]


def test_weights_are_sent_and_not_the_rows_of_all_devices():
    """Two micro-batches of 8 x 4,096 tokens, whose hidden states are 12.6 MB. Left to itself XLA
    sends 1,300 MB."""
    sent = text.bytes_sent(text.collectives(compiled("grpo", MESHES["fsdp"], tied=True), 2))
    assert 0 < sum(sent.values()) < 2 * 8 * LENGTH * WIDTH * 4
