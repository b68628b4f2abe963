"""The sampling of a run: the sampler or a server, the shapes of its calls, and stop tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from etils import epath

from g2d_jax.config import Config, DecodeKernel, Stage
from g2d_jax.data.stops import Decode
from g2d_jax.data.tokenizer import PromptTokenizer
from g2d_jax.models import hf
from g2d_jax.models.config import LongRope, ModelConfig
from g2d_jax.models.decode_check import trial
from g2d_jax.models.kernels import choose_decode
from g2d_jax.records import SamplingParams
from g2d_jax.runtime import mesh as meshes
from g2d_jax.runtime import processes
from g2d_jax.runtime.program_cache import Programs
from g2d_jax.runtime.tracking import run_id
from g2d_jax.sampler.engine import Engine, Sampler
from g2d_jax.sampler.programs import Shapes
from g2d_jax.session.devices import Devices
from g2d_jax.session.tokenizers import chosen
from g2d_jax.session.workdir import absolute

if TYPE_CHECKING:
    from g2d_jax.sampler.remote import Remote

Say = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class RunSampling:
    """The engines that a run samples with.

    server: of engine.*, None if the sampler samples. decode_kernel: the sampler's, None for the
    platform's. prompt_lengths: tokens of every problem's prompt. stop_ids: tokens that end a
    response. decode: converts ids to text for the sampler; None if no stage has stop strings.
    kernels: use of attention so far -> its kernel.
    """

    devices: Devices
    programs: Programs
    server: Remote | None
    decode_kernel: DecodeKernel | None
    prompt_lengths: Sequence[int]
    stop_ids: tuple[int, ...]
    decode: Decode | None
    kernels: dict[str, str] = field(default_factory=dict)

    @property
    def config(self) -> Config:
        """The settings of the run."""
        return self.devices.config

    @property
    def engine(self) -> Engine:
        """The source of responses: the sampler, or the server of engine.*."""
        return self.sampler if self.server is None else self.server

    @cached_property
    def sampler(self) -> Sampler:
        """The sampler, one for the run."""
        settings = chosen(self.config.compute, ("attention", "max_num_seqs"))
        settings |= {"chunk": self._chunk(), "decode_kernel": self.decode_kernel}
        sampler = self.programs.get_or_make(
            Sampler,
            self.devices.model,
            self.devices.for_sampling,
            **settings,
            seed=self.config.seed,
            dtype=jnp.dtype(self.config.dtype),
            programs=self.programs,
            decode=self.decode,
        )
        self.kernels.update(prompts=sampler.kernel, decode=sampler.decode_kernel)
        return sampler

    def _chunk(self) -> int:
        """Return the decode steps between two checks of the rows, 4 to 16. Ended responses wait for
        the next check, so short responses need frequent ones."""
        longest = 1
        for stage in self.config.stages.values():
            for sampling in stage.samplings():
                longest = max(longest, sampling.max_new_tokens)
        quarter = (1 << longest.bit_length()) // 8
        return min(max(quarter, 4), 16)

    def shapes(
        self,
        stage: Stage,
        prompts: int,
        samples: int,
        params: SamplingParams,
    ) -> Shapes:
        """Choose the sampler's shapes for a stage's largest call. samples: responses per prompt.

        Rows are compute.max_num_seqs, or the quickest number that fits in memory with the stage's
        own arrays.
        """
        sampler, rows = self.sampler, self.config.compute.max_num_seqs
        call = prompts, prompts * samples, [params], self.prompt_lengths
        if not rows:
            memory = self.devices.machine.memory
            shapes = sampler.shapes(*call, 1)
            mesh = self.devices.for_sampling
            ways = mesh.size // mesh.shape["data"]
            split = self.devices.split(ways, shapes.width)
            _, prefilled = sampler.abstract(shapes)
            resident = self.devices.state_bytes(stage) + meshes.device_bytes(prefilled)
            rows = max(split.rows_that_fit(memory, resident), 1)
            if memory is not None:
                rows = split.quickest_rows(params.max_new_tokens, rows, prompts * samples)
        return sampler.shapes(*call, rows)


def open_server(
    config: Config, model: ModelConfig, tokenizer: PromptTokenizer, workdir: epath.Path, say: Say
) -> Remote | None:
    """Return the server that samples, None if the sampler does. workdir: for the folder of its
    files. All processes make the call."""
    settings, folder = config.engine, workdir / "engine"
    if not settings.is_server:
        return None
    from g2d_jax.sampler.remote import Remote  # here: few runs have one

    processes.on_leader(lambda: refuse_unserved(config, model))
    if isinstance(model.rope_scaling, LongRope):
        say(
            f"engine: start the server with --max-model-len {model.positions}: with a longer one vLLM "
            "rotates this model's positions (longrope) differently from training here"
        )
    if settings.folder:  # other runs may share it
        folder = absolute(settings.folder) / processes.on_leader(
            lambda: run_id(workdir / "engine.json")
        )
    return Remote(
        settings,
        folder,
        tokenizer,
        model.vocab_size,
        seed=config.seed,
        dtype=config.dtype,
        say=say,
    )


def refuse_unserved(config: Config, model: ModelConfig) -> None:
    """Raise ValueError if a server would read policies incorrectly: of Ministral 3, and of models
    with images, whose tensors have other names."""
    settings = config.engine
    if not settings.is_server or settings.sync == "none":
        return
    if model.traits.scaled_queries:
        # vllm-project/vllm issue 48621: its YaRN factor differs from transformers'.
        raise ValueError(
            f"engine.sync={settings.sync}: vLLM computes models of the family {model.family} "
            "differently from transformers: use engine.kind=sampler"
        )
    path = config.model.path
    if path and hf.has_images(hf.resolve(path, revision=config.model.revision)):
        raise ValueError(
            f"engine.sync={settings.sync}: {path} has images, but only its language model "
            "is trained, whose tensors have other names. Export it (g2d export --policy init), serve "
            "that folder and set model.path to it"
        )


def tried_kernel(devices: Devices, say: Say) -> DecodeKernel | None:
    """Return the kernel of decode steps: "xla" if compute.attention is, or if the platform's kernel
    fails a trial on these devices; else None, for the platform's. All processes make the call."""
    dtype, model = jnp.dtype(devices.config.dtype), devices.model
    if devices.config.compute.attention == "xla":
        return "xla"
    device = devices.mesh.devices.flat[0]
    if device.platform == "cpu" or device not in jax.devices():
        return None
    kv_heads = max(model.num_key_value_heads // devices.for_sampling.shape["tensor"], 1)
    sizes: dict[str, Any] = {"head_dim": model.head_dim, "kv_heads": kv_heads, "dtype": dtype}
    if choose_decode(device=device, **sizes) == "xla":
        return "xla"
    repeats = model.num_attention_heads // model.num_key_value_heads
    mine = trial(jax.local_devices()[0], repeats * kv_heads, **sizes)
    failed = next(filter(None, processes.gather(mine)), "")
    if not failed:
        return None
    say(f"decode steps use XLA's attention, because their kernel {failed}")
    return "xla"
