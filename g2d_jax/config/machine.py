"""Settings of where and how a run computes and draws responses, and what it writes beside its
results."""

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
    """The device mesh; -1 stands for the remaining devices."""

    data: int = 1
    fsdp: int = -1
    tensor: int = 1


class Compute(Section):
    """Settings of the programs; nothing here changes a result beyond rounding."""

    # tokens of one forward and backward pass, over all devices; unset: what memory allows
    microbatch_tokens: Positive | None = None
    remat: RematSetting = "auto"  # what the backward pass recomputes; "auto": what memory asks for
    # its kernel: "xla", in decode steps too, "splash" (TPU), "cudnn" (GPU); "auto": the platform's own
    attention: AttentionSetting = "auto"
    offload_optimizer: bool = False  # its state lies in the host's memory but for the update itself
    max_num_seqs: Positive | None = None  # rows decoded together; unset: what memory allows
    # devices that share one copy of the weights in sampling; 0: as few as hold it
    sampling_tensor: NonNegative = 0
    # of one call of the sampler, which is written when it is done
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
        """The updates to profile, None where no text names any."""
        match = re.fullmatch(r"([A-Za-z0-9_-]+):([0-9]{1,9})-([0-9]{1,9})", self.profile or "")
        if not match or not 1 <= int(match[2]) <= int(match[3]):
            return None
        return Window(match[1], int(match[2]), int(match[3]))

    def issues(self, run: Run) -> Iterator[Issue]:
        """Yield updates to profile that cannot be read, or do not come."""
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
                f"name a stage with updates: {', '.join(training) or 'there is none'}",
            )
            return
        # An offline stage has as many as its pairs fill, which are not known yet.
        steps = getattr(run.stages[self.window.stage], "steps", None)
        if steps is not None and self.window.last > steps:
            yield error(
                "profile", f"is {self.profile!r}, but {self.window.stage} has {steps} updates"
            )


class Checkpoint(Section):
    """Checkpoints of a stage in training: one every so many updates, of which the newest are
    kept."""

    every: Positive = 50
    keep: Positive = 2


class Faults(Section):
    """Limits at which a run gives up."""

    # Seconds without a sign of life after which another process counts as lost. JAX itself ends all
    # after 100 seconds and names none.
    peer_timeout: Annotated[float, Bounds(least=5, most=90)] = 60.0
    # seconds in which no process gets any further: then end
    hang_timeout: Annotated[float, Bounds(least=5)] = 3600.0


class Engine(Section):
    """Says what draws responses: the library's own sampler, or an OpenAI-style server as vLLM is
    one (docs/server.md).

    sync: how policies get to the server: "none" (it serves the only one that is sampled from),
    "folder" (vLLM reloads its weights from one), or "adapter" (vLLM loads the adapters beside its
    model).
    """

    kind: Literal["sampler", "server"] = "sampler"
    url: str = ""  # of a server: the base of its API, as in "http://localhost:8000/v1"
    model: str = ""  # the name that the server has for its model; "": the only one that it lists
    sync: Literal["none", "folder", "adapter"] = "none"
    # where policies are written for the server, which sees it too; "": WORKDIR/engine
    folder: FilePath = ""
    api_key_env: str = "VLLM_API_KEY"  # the environment variable that holds the key
    timeout: Timeout = 600.0  # seconds of one attempt
    retries: Retries = 5
    concurrency: Concurrency = 64  # requests under way, of each process
    # windows that it samples ahead of their updates, while the one before trains:
    # rollouts/ahead.py
    ahead: Annotated[int, Bounds(least=0, most=1)] = 0

    @property
    def is_server(self) -> bool:
        """True if a server samples."""
        return self.kind == "server"

    def issues(self, run: Run) -> Iterator[Issue]:
        """Yield what needs a server where there is none, and policies that never reach it."""
        if not self.is_server:
            for name in ("url", "ahead", "sync"):
                if getattr(self, name) != getattr(Engine(), name):
                    yield error(
                        name,
                        "is set, and kind is 'sampler', which uses no server",
                        "set kind to 'server', or leave it out",
                    )
            return
        if self.sync == "none":
            yield from self._never_sent(run)
        if self.sync == "adapter" and not run.lora.rank:
            yield error("sync", "is 'adapter', and lora.rank is 0", "use 'folder'")

    def _never_sent(self, run: Run) -> Iterator[Issue]:
        """Yield policies to sample from that the server was not started with."""
        sampled = run.policies_sampled()
        made = [name for name in sorted(sampled) if own_stage(name) in run.stages]
        if len(sampled) > 1 or made:
            yield error(
                "sync",
                "is 'none', so the server holds the policy that it was started with, and stages "
                f"sample from {', '.join(sorted(sampled))}",
                "set it to 'folder' or 'adapter'",
            )
