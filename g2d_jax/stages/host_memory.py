"""The memory that a run's stages will need on CPUs, where the host's is the devices': by formula,
nothing is compiled.

    arrays of a program, those that lie beside it, its temporaries ─► the stage's fullest program + what a process needs

It may be a quarter off. On accelerators `g2d plan` compiles the programs and knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from g2d_jax import stages as stage_modules
from g2d_jax.config.graph import plan
from g2d_jax.losses.logprobs import chunk_of
from g2d_jax.models.kernels import platform_of
from g2d_jax.runtime import memory
from g2d_jax.runtime import mesh as meshes
from g2d_jax.runtime.memory import GIB
from g2d_jax.runtime.program import Program
from g2d_jax.session.session import Session

PROCESS = 1.2 * GIB
"""Bytes of a process beside its arrays: Python, JAX, what compiling takes, one worker of the
verifier. Measured."""

LOGITS = 3
"""Arrays of a chunk's logits that are there at a time in the backward pass, and of a step's in a
decode."""

FLOAT32 = 4


@dataclass(frozen=True)
class Estimate:
    """The most memory that a stage will need. program: the one that needs it; size: bytes of the
    whole process."""

    stage: str
    program: str
    size: int


def estimates(session: Session) -> Iterator[Estimate]:
    """Yield the estimate of each stage that computes anything on devices, in the order of the run.

    A stage whose arrays do not follow from its settings is left out.
    """
    here = session.mesh.size // meshes.processes(session.mesh)
    for name in plan(session.config).order:
        try:
            programs = stage_modules.programs(session, name)
        except ValueError:
            # The longest pair that settings allow fits no row; those that will be there may.
            continue
        if not programs:
            continue
        fullest = max(programs, key=lambda program: _size(session, program))
        size = _size(session, fullest)
        yield Estimate(name, fullest.name, int(PROCESS + here * size))


def show(session: Session) -> None:
    """Print the memory that each stage will need where the devices are this machine's
    processors."""
    if platform_of(session.mesh) != "cpu":
        return  # whose own `g2d plan` knows by compiling
    found = list(estimates(session))
    most = memory.limit()
    rows = [[estimate.stage, estimate.program, f"{estimate.size / GIB:.1f}"] for estimate in found]
    session.tracker.table("host memory, estimated", ["stage", "fullest program", "GiB"], rows)
    if most is not None:
        session.tracker.say(f"this machine has {most / GIB:.1f} GiB")
    largest = max((estimate.size for estimate in found), default=0)
    if most is not None and largest > most:
        session.tracker.say(
            f"WARNING: the run needs about {largest / GIB:.1f} GiB of memory, and "
            f"{most / GIB:.1f} are here: the system will end it. To try: lora.rank, a "
            "smaller "
            "compute.microbatch_tokens or compute.max_num_seqs, a smaller model, a larger machine"
        )


def _size(session: Session, program: Program) -> int:
    """Count the bytes a device of a program's arrays, of those beside it, and of the largest
    temporaries."""
    words = session.model_config.vocab_size
    logits = LOGITS * (program.work.rows or chunk_of(words, "cpu")) * words * FLOAT32
    arrays = meshes.device_bytes((program.inputs, program.beside()))
    return int(arrays + program.work.temporary + logits)
