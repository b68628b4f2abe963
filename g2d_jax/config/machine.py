"""Settings of where and how a run computes and draws responses, and what it writes beside its
results."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from g2d_jax.config.section import (
    Bounds,
    Concurrency,
    FieldError,
    FilePath,
    NonNegative,
    Positive,
    Retries,
    Section,
    Timeout,
)

Remat = Literal["none", "dots", "attention", "full"]
RematSetting = Literal["auto", Remat]
AttentionSetting = Literal["auto", "xla", "splash", "cudnn"]
DecodeKernel = Literal["xla", "pallas"]
DecodeSetting = Literal["auto", DecodeKernel]


class Mesh(Section):
    """The device mesh; -1 stands for the remaining devices."""

    data: int = 1
    fsdp: int = -1
    tensor: int = 1


class Compute(Section):
    """Settings of the programs; nothing here changes a result beyond rounding."""

    row_length: NonNegative = 0  # tokens of a packed training row; 0 fits the stage's longest group
    # tokens of one forward and backward pass, over all devices; unset: what memory allows
    microbatch_tokens: Positive | None = None
    remat: RematSetting = "auto"  # what the backward pass recomputes; "auto": what memory asks for
    # its kernel: "xla", "splash" (TPU), "cudnn" (GPU); "auto": the platform's own
    attention: AttentionSetting = "auto"
    # its kernel in decode steps: "xla", "pallas" (TPU and GPU: models/decode_kernel*.py, compiled
    # only, not run); "auto": the platform's own
    decode_attention: DecodeSetting = "auto"
    offload_optimizer: bool = False  # its state lies in the host's memory but for the update itself
    max_num_seqs: Positive | None = None  # rows decoded together; unset: what memory allows
    chunk: Positive = 16  # decode steps between two checks for finished rows
    prefill_rows: Positive = 32  # prompts of one prefill, at most
    # devices that share one copy of the weights in sampling; 0: as few as hold it
    sampling_tensor: NonNegative = 0
    # of one call of the sampler, which is written when it is done
    generation_batch_size: Positive = 16_384
    # a folder; "" is none; unset: JAX's own setting, else the user's
    compilation_cache: FilePath | None = None
    # of one JAX device, in your money: reports then have a column of it; a TPU7x chip is two devices
    price_per_device_hour: float | None = None


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
    samples: NonNegative = 8
    every: Positive = 1
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

    def conflicts(self) -> Iterator[ValueError]:
        """Refuse a window that cannot be read."""
        if self.profile is not None and self.window is None:
            yield FieldError(
                "profile",
                f"is {self.profile!r}: write STAGE:START-STOP with the numbers of the first and "
                "the last update to trace, as in warmup:3-5; the first update of a stage is 1",
            )


class Checkpoint(Section):
    """Checkpoints of a stage in training: one every so many updates, of which the newest are
    kept."""

    every: Positive = 50
    keep: Positive = 2


class Faults(Section):
    """Limits at which a run gives up."""

    # updates in a row skipped for a loss or gradient that is not finite: then stop
    max_skipped: Positive = 5
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

    def conflicts(self) -> Iterator[ValueError]:
        """Refuse to sample ahead on the devices that train."""
        if self.ahead and not self.is_server:
            yield FieldError(
                "ahead",
                "is 1, and kind is 'sampler', which has the devices that train: set kind to "
                "'server', or leave it at 0",
            )

    def unused(self) -> Iterator[ValueError]:
        """Refuse a server that is not asked."""
        if self.url and not self.is_server:
            yield FieldError(
                "url",
                "is set, and kind is 'sampler', which asks no server: set kind to 'server', or "
                "leave it out",
            )
