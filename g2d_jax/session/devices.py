"""The devices of a run: their memory and its use, the number that sampling splits the model over,
and the micro-batches of training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from g2d_jax.config import Config, Online, Stage, TrainingStage
from g2d_jax.models import decoder, hf
from g2d_jax.models.config import ModelConfig
from g2d_jax.models.flops import matmul_params, read_params
from g2d_jax.models.kernels import (
    DecodeKernel,
    Kernel,
    capability_of,
    choose_decode,
    platform_of,
    remat_for,
)
from g2d_jax.models.kernels import choose as choose_kernel
from g2d_jax.runtime import mesh as meshes
from g2d_jax.runtime.rates import Rates, rates_of
from g2d_jax.sampler import capacity
from g2d_jax.session import init_params
from g2d_jax.session.training_memory import (
    REMATS,
    TOKENS,
    WITHOUT_MEMORY,
    Load,
    Micro,
    choose,
    load,
)
from g2d_jax.session.windows import window_at
from g2d_jax.training import optimizer


def shape_here(path: str, revision: str | None = None) -> ModelConfig:
    """Return the shape of a pretrained model, from its config.json."""
    return hf.read_config(hf.resolve(path, revision=revision))


@dataclass(frozen=True)
class Machine:
    """The abilities of devices. memory: usable bytes of the smallest, None if none reports them.
    near: devices that fast links join, see `meshes.near`. rates: of each. shape_of: returns a
    model's shape for its path and revision."""

    memory: int | None
    near: int
    rates: Rates
    shape_of: Callable[[str, str | None], ModelConfig] = shape_here


def machine_of(mesh: Mesh, memories: Sequence[int | None]) -> Machine:
    """Return the Machine of a mesh. memories: all processes' `meshes.memory`."""
    memory = min((size for size in memories if size is not None), default=None)
    return Machine(memory, meshes.near(mesh), rates_of(mesh.devices.flat[0]))


@dataclass(frozen=True, eq=False)
class Devices:
    """The devices of a run, and the load of its settings and model on them. mesh: for training."""

    config: Config
    model: ModelConfig
    mesh: Mesh
    machine: Machine

    @cached_property
    def reward_bytes(self) -> int:
        """The bytes per device of reward models, which stay loaded."""
        from g2d_jax.models import reward_model  # here: few runs have one

        size = 0
        for path, model in self.config.reward_models.items():
            shape = self.machine.shape_of(path, model.revision)
            arrays = reward_model.abstract_on(shape, self.mesh, jnp.dtype(self.config.dtype))
            size += meshes.device_bytes(arrays)
        return size

    def row_kernel(self, length: int) -> Kernel:
        """Return the attention kernel for packed rows of a length. Raises ValueError if the
        configured one does not support them."""
        return choose_kernel(
            self.config.compute.attention,
            platform=platform_of(self.mesh),
            dtype=jnp.dtype(self.config.dtype),
            head_dim=self.model.head_dim,
            length=length,
            layout="packed",
            capability=capability_of(self.mesh),
        )

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the sampler's weights and cache."""
        return jnp.dtype(self.config.dtype).itemsize

    def state_bytes(self, stage: Stage) -> int:
        """Estimate a stage's bytes per device, without the sampler and its weights.

        The sum of frozen parameters, reward models and, per trained parameter, 4 bytes, its
        optimiser's state and a reference.
        """
        if self.machine.memory is None:
            return 0
        size = init_params.rest_bytes(self.config, self.model)
        if isinstance(stage, TrainingStage):
            each = 4 + self.itemsize * stage.has_fixed_reference
            if not self.config.compute.offload_optimizer:
                each += optimizer.state_bytes(stage.optimizer.kind, stage.optimizer.moment_dtype)
            size += each * decoder.count_trained(self.model)
        return size // (self.mesh.shape["fsdp"] * self.mesh.shape["tensor"]) + self.reward_bytes

    @cached_property
    def micro(self) -> Micro:
        """The remat and the tokens of a micro-batch, as configured or as memory allows."""
        compute, ways = self.config.compute, meshes.row_ways(self.mesh)
        if not self.loads or self.machine.memory is None:
            remat = remat_for(compute.remat, self.mesh)
            return Micro(remat, compute.microbatch_tokens or WITHOUT_MEMORY)
        token, micro_batch = self._training_seconds()
        remat, tokens = choose(
            self.loads,
            self.machine.memory,
            token=token,
            micro_batch=micro_batch,
            remats=REMATS if compute.remat == "auto" else (compute.remat,),
            tokens=(max(compute.microbatch_tokens // ways, 1),)
            if compute.microbatch_tokens
            else TOKENS,
        )
        return Micro(remat, compute.microbatch_tokens or tokens * ways)

    @cached_property
    def loads(self) -> list[Load]:
        """The load of each stage's train step on a device; [] if there is no choice, because all is
        set or the devices (such as CPUs) do not report their memory."""
        compute, data = self.config.compute, self.config.data
        is_set = compute.remat != "auto" and compute.microbatch_tokens
        if is_set or platform_of(self.mesh) == "cpu" or self.machine.memory is None:
            return []
        tensor = self.mesh.shape["tensor"]
        ways = self.mesh.shape["fsdp"] * tensor
        floats = init_params.float32_params(self.config, self.model)
        gradients = 4 * decoder.count_trained(self.model)
        loads = []
        for stage in self.config.stages_of(TrainingStage).values():
            row = stage.longest_row(data.max_prompt_length, self.config.stages)
            found = load(
                self.model,
                state=self.state_bytes(stage) + gradients / ways,
                parameters=floats / ways,
                row=row,
                itemsize=self.itemsize,
                tensor=tensor,
            )
            loads.append(found)
        return loads

    @property
    def inputs(self) -> dict[str, Any]:
        """The inputs of `micro`, except memory, that may differ between two starts of a run."""
        compute = self.config.compute
        return {
            "devices": meshes.describe(self.mesh),
            "mesh": dict(self.mesh.shape),
            "row": max((each.row for each in self.loads), default=0),
            "offload_optimizer": compute.offload_optimizer,
            "remat": compute.remat,
            "microbatch_tokens": compute.microbatch_tokens,
        }

    def _training_seconds(self) -> tuple[float, float]:
        """Estimate the seconds of a token's products in a forward pass, and the seconds in which a
        micro-batch reads and transfers the matrices: forward, backward and as gradients."""
        data, fsdp, tensor = (self.mesh.shape[axis] for axis in meshes.AXES)
        rates, size = self.machine.rates, self.itemsize * read_params(self.model) / tensor
        seconds = 3 * size / rates.bandwidth
        if fsdp > 1:
            seconds += (
                3 * size / (rates.network if fsdp * tensor > self.machine.near else rates.link)
            )
        if data > 1:  # the sum of a device's part of the gradients
            far = self.mesh.size > self.machine.near
            seconds += 2 * size / fsdp / (rates.network if far else rates.link)
        return 2 * matmul_params(self.model) / tensor / rates.flops, seconds

    @cached_property
    def for_sampling(self) -> Mesh:
        """The mesh for sampling. Raises ValueError for settings that do not fit the devices."""
        tensor = self.config.compute.sampling_tensor or self._best_ways()
        return meshes.sampling(self.mesh, tensor, self.model.num_key_value_heads)

    def _best_ways(self) -> int:
        """Choose the number of devices that sampling splits the model over: the quickest that
        memory allows."""
        every = self.config.stages.values()
        stages = []
        longest = 1
        for stage in every:
            samplings = stage.samplings()
            if samplings and getattr(stage, "steps", None) != 0:
                stages.append(stage)
                longest = max(longest, *map(attrgetter("max_new_tokens"), samplings))
        columns = self.config.data.max_prompt_length + longest
        resident = max(map(self.state_bytes, every), default=0)
        samples = min(map(self._samples, stages), default=1)
        powers = (2**power for power in range(self.mesh.size.bit_length()))
        splits = [self.split(ways, columns) for ways in powers if self.mesh.size % ways == 0]
        return capacity.best_ways(
            splits, longest, self.machine.memory, resident, samples, self.machine.near
        )

    def split(self, ways: int, columns: int) -> capacity.Split:
        """Return the Split of the model over `ways` devices, with a cache of `columns`."""
        model = self.model.base
        axes = 1, 1
        if self.machine.near % ways == 0:
            axes = meshes.torus_axes(meshes.sampling(self.mesh, ways, model.num_key_value_heads))
        parts = math.gcd(ways, model.num_key_value_heads)
        kernel: DecodeKernel = "xla"
        if self.config.compute.attention != "xla":
            kernel = choose_decode(
                device=self.mesh.devices.flat[0],
                dtype=jnp.dtype(self.config.dtype),
                head_dim=model.head_dim,
                kv_heads=model.num_key_value_heads // parts,
            )
        sizes = model, self.itemsize, ways, self.mesh.size, columns
        return capacity.Split(*sizes, self.machine.rates, kernel, axes)

    def _samples(self, stage: Stage) -> int:
        """Count the most responses of a stage's call; an online stage's are at most those of a
        window."""
        most = self.config.compute.generation_batch_size
        if not isinstance(stage, Online):
            return most
        prompts = window_at(0, stage).batches * stage.prompts_per_step
        return min(most, prompts * stage.num_generations)
