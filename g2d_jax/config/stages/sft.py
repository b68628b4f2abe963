"""The settings of supervised fine-tuning."""

from __future__ import annotations

from typing import Annotated, Literal

from g2d_jax.config.build import stage_of
from g2d_jax.config.rewards import Source
from g2d_jax.config.section import Bounds, NonNegative, Policy, Positive
from g2d_jax.config.stages.stage import Stages, TrainingStage
from g2d_jax.config.training import Optimizer


class Sft(TrainingStage):
    """Supervised fine-tuning on worked answers. The loss is a mean over tokens."""

    kind: Literal["sft"] = "sft"
    policy: Policy = "init"
    data: Source = Source()
    """Examples of `messages`, or of `prompt` and `completion`, or an embedded task's demonstrations
    (`procedural:slips`); required. Of `messages` the last, the assistant's, is learnt, with the
    stop token; earlier answers are prompt. A text as prompt goes into
    `tokenizer.prompt_template`, and all prompts into the chat template. Examples whose prompt is a
    problem of dev or test are left out."""
    steps: NonNegative = 2000
    """Updates."""
    batch_size: Positive = 64
    """Examples of an update."""
    max_length: Annotated[int, Bounds(least=2)] = 512
    """The longest example, in tokens. Longer ones are left out, not truncated."""
    optimizer: Optimizer = Optimizer(learning_rate=2e-5, schedule="cosine", warmup_steps=50)

    shapes_from_data = True

    def longest_row(self, prompt: int, stages: Stages) -> int:
        """Return max_length, prompts included."""
        return self.max_length

    def examples_path(self) -> str:
        """Return the source of the demonstrations."""
        return self.data.path

    def kept_steps(self) -> list[int]:
        """Return its last step."""
        return [self.steps]


sft = stage_of(Sft)
