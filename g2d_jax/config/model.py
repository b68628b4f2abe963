"""The model, its adapters and its tokenizer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Annotated, Literal

from g2d_jax.config.section import (
    Bounds,
    Dtype,
    Issue,
    ModelPath,
    NonNegative,
    Positive,
    Run,
    Section,
    error,
    warning,
)


class Model(Section):
    """The model that a run starts from."""

    # a Hugging Face folder or hub id; "": random parameters of the shape below
    path: ModelPath = ""
    revision: str | None = None
    family: str = "qwen2"
    hidden_size: Positive = 96
    num_hidden_layers: Positive = 3
    num_attention_heads: Positive = 4
    num_key_value_heads: Positive = 2
    intermediate_size: Positive = 256

    def issues(self, run: Run) -> Iterator[Issue]:
        """Yield a hidden size that the heads of a random model do not divide."""
        heads = self.num_attention_heads
        if not self.path and self.hidden_size % (2 * heads):
            text = f"is {self.hidden_size}, and {heads} heads need an even size each"
            yield error("hidden_size", text, f"set it to a multiple of {2 * heads}")


class Lora(Section):
    """Low-rank adapters for the model's linear layers; only the adapters are trained."""

    rank: NonNegative = 0  # 0: no adapters, all parameters are trained
    alpha: Annotated[float, Bounds(above=0, below=math.inf)] = (
        16.0  # the adapters' product is scaled by alpha / rank
    )
    # or some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, …
    targets: tuple[str, ...] = ("all-linear",)
    # of the frozen parameters: "bfloat16" halves their memory
    base_dtype: Dtype = "float32"
    # of the frozen linear layers in the blocks: "int8" or "nf4" (extra quant)
    quantise: Literal["", "int8", "nf4"] = ""

    def issues(self, run: Run) -> Iterator[Issue]:
        """Yield adapter settings without adapters."""
        for name, value in Lora().to_dict().items():
            if not self.rank and getattr(self, name) != value:
                yield error(
                    name,
                    "is for adapters, but lora.rank is 0, which trains all parameters",
                    "set lora.rank too (in a recipe: lora=RANK)",
                )


class Tokenizer(Section):
    """The tokenizer and its templates."""

    path: ModelPath = ""  # "": the model's own
    revision: str | None = None
    chat: bool | None = None  # unset: the chat template if the tokenizer has one
    prompt_template: str = "plain"  # "plain", "paper", or any text with {problem}
    system: str | None = None  # unset: no system message; "default": the template's own
    enable_thinking: bool | None = None

    def issues(self, run: Run) -> Iterator[Issue]:
        """Yield a line break that the shell passed on as backslash and n."""
        yield from super().issues(run)
        for name in ("prompt_template", "system"):
            if _TYPED_BREAK.search(getattr(self, name) or ""):
                text = "contains a backslash and an n; you may mean a line break"
                remedy = rf"in bash, write $'--config.tokenizer.{name}=…\n…'"
                yield warning(name, text, f"{remedy}, or set it in the config file")


# A backslash and an n that begin no LaTeX command.
_TYPED_BREAK = re.compile(r"\\n(?!(?:abla|e|eg|eq|ewline|i|mid|onumber|ot|otin|u)\b)")
