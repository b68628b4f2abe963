"""The settings of supervised fine-tuning."""

from __future__ import annotations

from typing import Annotated, Literal

from g2d_jax.config.build import stage_of
from g2d_jax.config.rewards import Source
from g2d_jax.config.section import Bounds, NonNegative, Policy, Positive
from g2d_jax.config.stages.stage import Stages, TrainingStage
from g2d_jax.config.training import Optimizer


class Sft(TrainingStage):
    """Supervised fine-tuning. data: messages or prompt/completion files, or an embedded task's
    demonstrations; required."""

    kind: Literal["sft"] = "sft"
    policy: Policy = "init"
    data: Source = Source()
    steps: NonNegative = 2000
    batch_size: Positive = 64
    max_length: Annotated[int, Bounds(least=2)] = 512
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
