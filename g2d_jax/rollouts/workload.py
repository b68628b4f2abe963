"""The demands of a stage on the sampler: how many responses to how many prompts, in calls of which
shapes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from g2d_jax.config import Collect, Online
from g2d_jax.records import SamplingParams
from g2d_jax.sampler import simulated
from g2d_jax.sampler.engine import Sampler
from g2d_jax.sampler.programs import Shapes
from g2d_jax.sampler.simulated import Decoded
from g2d_jax.session.session import Session
from g2d_jax.session.windows import window_at


@dataclass(frozen=True)
class Workload:
    """The sampling of a stage. shapes: that its programs are compiled for, the same for all its
    calls. rng_stream: names the random numbers. greedy: whether each prompt gets a greedy response
    besides.
    needs_logprobs: whether a loss needs the log-probabilities of what was drawn.

    For its programs' work: the prompts and calls of the whole stage, and the tokens of a mean
    response, None for the most.
    """

    params: SamplingParams
    num_generations: int
    shapes: Shapes
    rng_stream: str
    prompts: float = 0
    calls: float = 0
    response: int | None = None
    greedy: bool = False
    needs_logprobs: bool = False

    @property
    def samples(self) -> int:
        """The responses to a prompt, the greedy one included."""
        return self.num_generations + self.greedy

    @property
    def mean(self) -> int:
        """The tokens of a mean response."""
        return min(self.response or self.params.max_new_tokens, self.params.max_new_tokens)

    @property
    def responses(self) -> float:
        """The responses of the whole stage."""
        return self.prompts * self.samples

    def decoded(self, sampler: Sampler, prompt: float) -> Decoded:
        """Simulate the decode steps of a call, with drawn lengths where a mean response is told.
        prompt: tokens of a mean one."""
        most = self.params.max_new_tokens
        samples = max(round(self.responses / self.calls), 1)
        drawn = np.full(samples, most)
        if self.mean < most:
            drawn = simulated.lengths(samples, self.mean, most)
        read = simulated.reader(sampler, self.shapes)
        width = self.shapes.widths[-1]
        return simulated.decoded(round(prompt), drawn, self.shapes.rows, sampler.chunk, width, read)


def prompts_per_call(session: Session, samples: int) -> int:
    """Count the prompts that several batches may have together to be sampled in one call. samples:
    of each."""
    return max(session.config.compute.generation_batch_size // samples, 1)


def workload_of(
    session: Session, name: str, stage: Online | Collect, response: int | None = None
) -> Workload:
    """Compute a stage's workload: a call draws as many of a window's batches, or of the parts, as
    compute.generation_batch_size allows. response: mean tokens of a response, None: the most."""
    if isinstance(stage, Online):
        batch = stage.prompts_per_step
        prompts = stage.steps / stage.num_iterations * stage.prompts_per_step
        most = window_at(0, stage).batches * batch
    else:
        batch, prompts = stage.part, min(stage.prompts, session.problems.counts["train"])
        most = prompts
    samples, params = stage.num_generations, stage.sampling.params(session.sampling.stop_ids)
    together = min(max(prompts_per_call(session, samples) // batch, 1) * batch, most)
    shapes = session.sampling.shapes(
        stage,
        together,
        samples,
        params,
    )
    calls = -(-prompts // together)
    return Workload(
        params,
        samples,
        shapes,
        f"{stage.kind}/{name}",
        prompts,
        calls,
        response,
        needs_logprobs=isinstance(stage, Online) and bool(stage.clip.importance_cap),
    )
