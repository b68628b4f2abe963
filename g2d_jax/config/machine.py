"""Settings of hardware, programs, sampling engine, logs and checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from g2d_jax.config.policy_name import own_stage
from g2d_jax.config.section import (
    Bounds,
    Concurrency,
    FilePath,
    Issue,
    NonNegative,
    Positive,
    Retries,
    Run,
    Section,
    Timeout,
    error,
)

Remat = Literal["none", "dots", "attention", "full"]
RematSetting = Literal["auto", Remat]
AttentionSetting = Literal["auto", "xla", "splash", "cudnn"]
DecodeKernel = Literal["xla", "pallas"]


class Mesh(Section):
    """Devices along each axis of the mesh; -1 for one of them uses the rest."""

    data: int = 1
    """Copies of the weights, each over `fsdp` times `tensor` devices. Only this axis crosses slices
    of TPUs: set it to their number."""
    fsdp: int = -1
    """Devices that share the weights and the optimiser state, and split the batch."""
    tensor: int = 1
    """Devices that split heads and feed-forward layers, for long responses (docs/plan.md)."""


class Compute(Section):
    """Settings of the programs. They change no result beyond rounding."""

    microbatch_tokens: Positive | None = None
    """Tokens of one forward and backward pass, over all devices. Unset: as many as fit in memory
    (docs/plan.md#what-fits), 16,384 where that is unknown."""
    remat: RematSetting = "auto"
    """The values that the backward pass recomputes: `none`; `dots`, all but linear layers and attention;
    `attention`, all but attention; `full`. `auto`: `dots` on a CPU, elsewhere as memory
    requires."""
    attention: AttentionSetting = "auto"
    """The attention kernel of training and prompts. `splash` is for TPUs. `cudnn` is for NVIDIA
    GPUs of compute capability 8.0 or more, in bfloat16. `auto`: the platform's kernel where it can
    serve (splash: rows of a multiple of 128 tokens), else `xla`. A kernel that cannot serve is
    refused. `xla` turns off the decode kernel too, which must agree with XLA in a trial on the
    device. What has run: docs/what-runs-when.md#compiled-only."""
    offload_optimizer: bool = False
    """Keep the optimiser state in the host's pinned memory between updates. Refused where there is
    none."""
    max_num_seqs: Positive | None = None
    """The most responses decoded together. Unset: the number that finishes soonest within the free
    memory (docs/what-runs-when.md#how-many-rows), 256 where that is unknown. A CPU decodes at most
    a quarter of the requested responses, or 32 if that is more, even if you set more."""
    sampling_tensor: NonNegative = 0
    """Devices that share one copy of the weights while sampling. 0: a power of two, by a formula
    (docs/what-runs-when.md#how-many-rows); 1 on a CPU."""
    generation_batch_size: Positive = 16_384
    """Responses of one call of the sampler. Each finished call is saved."""


@dataclass(frozen=True)
class Window:
    """A range of updates of a stage, `first` to `last`, numbered from 1 as in its metrics."""

    stage: str
    first: int
    last: int

    def __str__(self) -> str:
        """Return its name as a folder."""
        return f"{self.stage}-{self.first}-{self.last}"


class Logging(Section):
    """Where metrics go, in addition to the run's own files."""

    tensorboard: bool = True
    """Write TensorBoard's files."""
    wandb: str | None = None
    """A project of Weights & Biases."""
    profile: str | None = None
    """Updates to trace with JAX's profiler, and their sampling, as STAGE:START-STOP (`warmup:3-5`).
    Traces are in `WORKDIR/profiles`, for TensorBoard's plugin xprof."""

    def wandb_options(self, **options: str) -> dict[str, str] | None:
        """Return the keywords of `wandb.init`, None without a project. options: name, group."""
        return {"project": self.wandb, **options} if self.wandb else None

    @property
    def window(self) -> Window | None:
        """The updates to profile, None if `profile` is unset or malformed."""
        match = re.fullmatch(r"([A-Za-z0-9_-]+):([0-9]{1,9})-([0-9]{1,9})", self.profile or "")
        if not match or not 1 <= int(match[2]) <= int(match[3]):
            return None
        return Window(match[1], int(match[2]), int(match[3]))

    def issues(self, run: Run) -> Iterator[Issue]:
        """Yield profiled updates that are malformed or do not exist."""
        if self.profile is None:
            return
        if self.window is None:
            yield error(
                "profile",
                f"is {self.profile!r}",
                "write STAGE:START-STOP with the numbers of the first and the last update to "
                "trace, as in warmup:3-5; the first update of a stage is 1",
            )
            return
        training = [name for name, stage in run.stages.items() if stage.trains]
        if self.window.stage not in training:
            yield error(
                "profile",
                f"is {self.profile!r}",
                f"name a stage that trains: {', '.join(training) or 'there is none'}",
            )
            return
        # The number of pairs decides an offline stage's updates, and is not known yet.
        steps = getattr(run.stages[self.window.stage], "steps", None)
        if steps is not None and self.window.last > steps:
            yield error(
                "profile", f"is {self.profile!r}, but {self.window.stage} has {steps} updates"
            )


class Checkpoint(Section):
    """Checkpoints of a training stage, from which it resumes. Their size: docs/hardware.md#disk."""

    every: Positive = 50
    """Updates between two checkpoints."""
    keep: Positive = 2
    """How many of the newest stay. For chosen steps see `keep` of an online stage."""


class Faults(Section):
    """Limits at which a run gives up."""

    # JAX itself ends all processes after 100 seconds and names none.
    peer_timeout: Annotated[float, Bounds(least=5, most=90)] = 60.0
    """Seconds without a heartbeat after which another process counts as lost."""
    hang_timeout: Annotated[float, Bounds(least=5)] = 3600.0
    """Seconds without progress on any process after which the run ends."""


class Engine(Section):
    """The source of responses: the library's own sampler, or an OpenAI-compatible server such as
    vLLM (docs/server.md)."""

    kind: Literal["sampler", "server"] = "sampler"
    """The engine that samples responses."""
    url: str = ""
    """The base of the server's API, as in `http://localhost:8000/v1`."""
    model: str = ""
    """The server's name for its model. Empty: the only one that it lists."""
    sync: Literal["none", "folder", "adapter"] = "none"
    """How policies reach the server. `none`: it keeps the only sampled policy. `folder`: vLLM
    reloads weights from a folder. `adapter`: vLLM loads adapters in addition to its model."""
    folder: FilePath = ""
    """Where policies for the server are written; it needs access. Empty: `WORKDIR/engine`."""
    api_key_env: str = "VLLM_API_KEY"
    """The environment variable that holds the key."""
    timeout: Timeout = 600.0
    """Seconds of one attempt at a request."""
    retries: Retries = 5
    """More attempts at one request."""
    concurrency: Concurrency = 64
    """Concurrent requests of each process."""
    ahead: Annotated[int, Bounds(least=0, most=1)] = 0
    """1: the server samples the next window of `sync_every` updates while this one trains. The
    cost: docs/server.md#while-the-trainer-trains."""

    @property
    def is_server(self) -> bool:
        """True if a server samples."""
        return self.kind == "server"

    def issues(self, run: Run) -> Iterator[Issue]:
        """Yield server settings without a server, and policies that never reach it."""
        if not self.is_server:
            for name in ("url", "ahead", "sync"):
                if getattr(self, name) != getattr(Engine(), name):
                    yield error(
                        name,
                        "is set, but kind is 'sampler', which uses no server",
                        "set kind to 'server', or remove it",
                    )
            return
        if self.sync == "none":
            yield from self._never_sent(run)
        if self.sync == "adapter" and not run.lora.rank:
            yield error("sync", "is 'adapter', but lora.rank is 0", "use 'folder'")

    def _never_sent(self, run: Run) -> Iterator[Issue]:
        """Yield sampled policies that the server does not start with."""
        sampled = run.policies_sampled()
        made = [name for name in sorted(sampled) if own_stage(name) in run.stages]
        if len(sampled) > 1 or made:
            yield error(
                "sync",
                "is 'none', so the server keeps the policy it started with, but stages "
                f"sample from {', '.join(sorted(sampled))}",
                "set it to 'folder' or 'adapter'",
            )
