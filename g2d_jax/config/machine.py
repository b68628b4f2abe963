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
    """The device mesh; -1 uses the remaining devices."""

    data: int = 1
    fsdp: int = -1
    tensor: int = 1


class Compute(Section):
    """Settings of the programs. They change no result beyond rounding."""

    # tokens of one forward and backward pass, over all devices; unset: as many as fit in memory
    microbatch_tokens: Positive | None = None
    remat: RematSetting = "auto"  # recomputed in the backward pass; "auto": as memory requires
    # kernel: "xla" (also in decoding), "splash" (TPU), "cudnn" (GPU); "auto": the platform's
    # default
    attention: AttentionSetting = "auto"
    offload_optimizer: bool = False  # keep its state in host memory except during the update
    max_num_seqs: Positive | None = None  # rows decoded together; unset: as many as fit in memory
    # devices that share one copy of the weights in sampling; 0: as few as hold it
    sampling_tensor: NonNegative = 0
    # responses of one call of the sampler; each finished call is saved
    generation_batch_size: Positive = 16_384


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
    """Settings of logging."""

    tensorboard: bool = True
    wandb: str | None = None
    profile: str | None = None  # updates under JAX's profiler, as STAGE:START-STOP

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
    """Checkpoints of a training stage: one every `every` updates; the newest `keep` are kept."""

    every: Positive = 50
    keep: Positive = 2


class Faults(Section):
    """Limits at which a run gives up."""

    # Seconds without a heartbeat after which another process counts as lost. JAX itself ends all
    # processes after 100 seconds and names none.
    peer_timeout: Annotated[float, Bounds(least=5, most=90)] = 60.0
    # seconds without progress on any process, after which the run ends
    hang_timeout: Annotated[float, Bounds(least=5)] = 3600.0


class Engine(Section):
    """The source of responses: the library's own sampler, or an OpenAI-compatible server such as
    vLLM (docs/server.md).

    sync: how policies reach the server: "none" (it keeps the only sampled policy), "folder" (vLLM
    reloads weights from a folder), or "adapter" (vLLM loads adapters in addition to its model).
    """

    kind: Literal["sampler", "server"] = "sampler"
    url: str = ""  # the base of a server's API, as in "http://localhost:8000/v1"
    model: str = ""  # the server's name for its model; "": the only one that it lists
    sync: Literal["none", "folder", "adapter"] = "none"
    # policies for the server, which needs access to the folder; "": WORKDIR/engine
    folder: FilePath = ""
    api_key_env: str = "VLLM_API_KEY"  # the environment variable that holds the key
    timeout: Timeout = 600.0  # seconds of one attempt
    retries: Retries = 5
    concurrency: Concurrency = 64  # concurrent requests of each process
    # windows sampled ahead, while the previous window trains: rollouts/ahead.py
    ahead: Annotated[int, Bounds(least=0, most=1)] = 0

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
