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

    path: ModelPath = ""
    """A Hugging Face folder, local, `gs://…` or `s3://…`, or a hub id
    (docs/hardware.md#gated-models). Empty: random parameters, with the family and shape of the
    fields below."""
    revision: str | None = None
    """A commit, branch or tag of the hub."""
    family: str = "qwen2"
    """The family of random parameters: `qwen2`, `qwen3`, `llama` (SmolLM2 too), `mistral`,
    `smollm3`, `olmo2`, `olmo3` (no window), `granite` (its four scalars are 1), `seed_oss` (no
    biases), `ministral3` (no YaRN), `phi3`, `qwen3_moe` (eight experts of `intermediate_size`, two
    for each token), `qwen3_5_text` (at least four layers; three of four are recurrent) or
    `gemma3_text` (no window). A model in `path` must be of one of these families, and brings its
    own."""
    hidden_size: Positive = 96
    """Width of the hidden state."""
    num_hidden_layers: Positive = 3
    """Layers."""
    num_attention_heads: Positive = 4
    """Query heads."""
    num_key_value_heads: Positive = 2
    """Key and value heads."""
    intermediate_size: Positive = 256
    """Width of the feed-forward layers."""

    def issues(self, run: Run) -> Iterator[Issue]:
        """Yield a hidden size that the heads of a random model do not divide."""
        heads = self.num_attention_heads
        if not self.path and self.hidden_size % (2 * heads):
            text = f"is {self.hidden_size}, and {heads} heads need an even size each"
            yield error("hidden_size", text, f"set it to a multiple of {2 * heads}")


class Lora(Section):
    """Low-rank adapters for the model's linear layers (LoRA, arXiv 2106.09685). Only the adapters
    are trained and saved."""

    rank: NonNegative = 0
    """The adapters' rank. 0: no adapters, all parameters are trained."""
    alpha: Annotated[float, Bounds(above=0, below=math.inf)] = 16.0
    """The adapters' product is scaled by alpha / rank."""
    targets: tuple[str, ...] = ("all-linear",)
    """Layers with adapters: `all-linear` (of a mixture of experts attention alone), or some of
    `q_proj`, `k_proj`, `v_proj`, `o_proj`, `gate_proj`, `up_proj`, `down_proj`. Recurrent layers of
    Qwen3.5 have `in_proj_q`, `in_proj_k`, `in_proj_v` (exported as one, of the sum of their ranks),
    `in_proj_z`, `in_proj_b`, `in_proj_a`, `out_proj`."""
    base_dtype: Dtype = "float32"
    """The type of the frozen parameters; `bfloat16` halves their memory."""
    quantise: Literal["", "int8", "nf4"] = ""
    """QLoRA (arXiv 2305.14314), extra `quant`: frozen linear weights of the layers, the reference's
    too, as `int8` (a scale for each output) or `nf4` (4.5 bits, a scale for every 32 inputs).
    `g2d export --policy init` writes the base as the adapters see it. On a TPU `int8` is decoded
    within the product, `nf4` into a float32 copy. Refused for a mixture of experts."""

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
    """The tokenizer and its templates. What is checked:
    docs/troubleshooting.md#the-tokenizer-is-refused."""

    path: ModelPath = ""
    """Empty: the model's own. Random parameters have that of the embedded arithmetic, unless you
    name one."""
    revision: str | None = None
    """A commit, branch or tag of the hub."""
    chat: bool | None = None
    """Use the chat template. Unset: where the tokenizer has one. Responses end at the template's
    token after an assistant's message, and at the stop tokens of the tokenizer, config.json and
    generation_config.json."""
    prompt_template: str = "plain"
    """`plain`, `paper` (arXiv 2506.21495), or any text with `{problem}`."""
    system: str | None = None
    """The system message, refused where the template cannot take one (Gemma 2, Mistral 0.1). Unset:
    no system message, not even the template's own. `default`: the template's own, with 2024-07-26
    for today. Exports bring the template as trained (docs/share.md#the-prompt-that-the-policy-saw).
    A system message in the data replaces it."""
    enable_thinking: bool | None = None
    """`false` turns thinking off where the template can (Qwen3, SmolLM3). Elsewhere `true` is
    refused, and so is `false` if the template's prompts begin a thought."""

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
