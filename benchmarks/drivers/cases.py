"""Say what is measured: models, cases, their data, and the clock that all drivers read.

A driver is a script beside this file. It runs in the environment of the library that it drives,
takes one case as JSON, and after each step prints a line of JSON and waits for a line to begin the
next. Nothing but Python is imported here.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

WARM = 2
"""Steps that compile, in Tunix the second too: they are counted apart."""

PAD, END, BEGIN, UNKNOWN = range(4)
STOPS = (END, *range(100, 131))
"""A random model says one of them every 64 tokens or so, of 2,048."""

QWEN3 = {
    "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
    "intermediate_size": 768,
}  # fmt: skip
QWEN2 = QWEN3 | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 704,
}
SMOLLM2 = {
    "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    "intermediate_size": 1536,
}  # fmt: skip
MODELS = {
    "qwen3": QWEN3,
    "qwen2": QWEN2,
    "smollm2": SMOLLM2,
    "tiny": QWEN3
    | {"hidden_size": 32, "num_hidden_layers": 1, "head_dim": 4, "intermediate_size": 32},
}
"""Shapes in Hugging Face's names, all float32 and with tied embeddings."""

FAMILIES = {"qwen2": "qwen2", "smollm2": "llama"}
"""The family of a shape's name, as transformers calls it; of the others it is qwen3."""


@dataclass(frozen=True)
class Case:
    """One measurement. A step is a call of the sampler, or an update of all that it takes.

    prompt, response: tokens. samples: responses to a prompt. stops: whether STOPS end a response.
    varying: responses of an eighth of `response` up to all of it. reference: whether its
    log-probabilities are computed in each step.
    steps: how many there will be.
    """

    table: str
    prompts: int
    prompt: int
    response: int
    samples: int = 1
    model: str = "qwen3"
    vocabulary: int = 2048
    stops: bool = False
    varying: bool = False
    reference: bool = False
    steps: int = WARM

    def draw(self, step: int) -> list[tuple[list[int], list[list[int]]]]:
        """Draw prompts, each with its responses: the same for all libraries, others in each
        step."""
        rng = random.Random(step)

        def ids(length: int) -> list[int]:
            return [rng.randrange(200, self.vocabulary) for _ in range(length)]

        def length() -> int:
            return rng.randint(self.response // 8, self.response) if self.varying else self.response

        return [
            (ids(self.prompt), [ids(length()) for _ in range(self.samples)])
            for _ in range(self.prompts)
        ]


def tokens(data: list[tuple[list[int], list[list[int]]]]) -> int:
    """Count the tokens of the responses, each with its prompt; padding is none."""
    return sum(len(prompt) + len(response) for prompt, responses in data for response in responses)


OF_SMOLLM2: dict[str, Any] = {"model": "smollm2", "vocabulary": 49_152}
TABLES = {
    "sampling": {
        "32 prompts of 64, 128 tokens each": Case("sampling", 32, 64, 128),
        "128 prompts of 64, ends at random, at most 256": Case(
            "sampling", 128, 64, 256, stops=True
        ),
        "4 prompts of 512, 8 x 128 tokens": Case("sampling", 4, 512, 128, samples=8),
        "Qwen2, 32 prompts of 32, 128 tokens each": Case("sampling", 32, 32, 128, model="qwen2"),
        "SmolLM2-135M, 32 prompts of 57, 64 tokens each": Case(
            "sampling", 32, 57, 64, **OF_SMOLLM2
        ),
    },
    "dpo": {
        "8 pairs of 64 + 128": Case("dpo", 8, 64, 128, 2, reference=True),
        "the same, reference known": Case("dpo", 8, 64, 128, 2),
        "8 pairs of 64 + 16 to 128": Case("dpo", 8, 64, 128, 2, varying=True, reference=True),
        "8 pairs of 256 + 128": Case("dpo", 8, 256, 128, 2, reference=True),
        "Qwen2, 16 pairs of 32 + 128": Case("dpo", 16, 32, 128, 2, model="qwen2", reference=True),
        "Qwen2, the same, reference known": Case("dpo", 16, 32, 128, 2, model="qwen2"),
        "SmolLM2-135M, 8 pairs of 60 + 32": Case("dpo", 8, 60, 32, 2, reference=True, **OF_SMOLLM2),
    },
    "grpo": {
        "4 x 8 of 64 + 128, beta .04": Case("grpo", 4, 64, 128, 8, reference=True),
        "4 x 8 of 256 + 128, beta .04": Case("grpo", 4, 256, 128, 8, reference=True),
        "Qwen2, 8 x 8 of 32 + 64": Case("grpo", 8, 32, 64, 8, model="qwen2"),
        "SmolLM2-135M, 8 x 8 of 57 + 32": Case("grpo", 8, 57, 32, 8, **OF_SMOLLM2),
    },
}
"""Cases of each table by what its rows say. GRPO's beta is .04 where there is a reference, else
0."""


def tiny(case: Case) -> Case:
    """Make a case so small that it only shows that it runs."""
    sizes = {"prompts": 2, "prompt": 8, "response": 8, "samples": min(case.samples, 2)}
    return replace(case, model="tiny", **sizes)


class Clock:
    """Counts CPU-seconds of this process, all its threads, from one step's end to the next, and
    those of its parts; and its peak of memory, in GB."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin a step."""
        self.begun = self.last = time.process_time()
        self.parts: dict[str, float] = {}

    def part(self, name: str) -> None:
        """End a part of a step."""
        now = time.process_time()
        self.parts[name], self.last = now - self.last, now

    def step(self, tokens: int) -> None:
        """End a step, tell it, and begin the next in its turn: what still ran meanwhile is the next
        one's."""
        taken, parts = time.process_time() - self.begun, self.parts
        self.start()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        told = {"cpu": taken, "tokens": tokens, "parts": parts, "peak": peak}
        print("\n" + json.dumps(told), flush=True)
        sys.stdin.readline()


def run(tables: Mapping[str, Callable[[Case, Clock], None]], *packages: str) -> None:
    """Measure the case that this driver was asked for. What is printed first is the versions of
    packages."""
    case = Case(**json.loads(sys.argv[1]))
    print("\n" + json.dumps({name: version(name) for name in packages}), flush=True)
    tables[case.table](case, Clock())


def tokenizer(vocabulary: int) -> Any:
    """Make a transformers tokenizer of one word a token, "w17" for 17, in either peer's
    environment."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}
    words = [*special.values(), *(f"w{i}" for i in range(len(special), vocabulary))]
    model = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=model, padding_side="left", **special)


def text(ids: list[int]) -> str:
    """Write ids as that tokenizer reads them."""
    return " ".join(f"w{i}" for i in ids)
