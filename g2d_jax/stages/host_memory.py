"""An estimate of the host memory that a run's stages need on CPUs: by formula, nothing is compiled.

    arrays of a program, others on the device, temporaries ─► the fullest program + the process
    itself

It may be a quarter off. On accelerators `g2d plan` compiles the programs and is exact.
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
"""Bytes of a process without its arrays: Python, JAX, compilation, one worker of the verifier.
Measured."""

LOGITS = 3
"""Arrays of a chunk's logits that exist at once in the backward pass, and of a decode step's."""

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

    A stage whose settings do not decide its arrays is left out.
    """
    here = session.mesh.size // meshes.processes(session.mesh)
    for name in plan(session.config).order:
        try:
            programs = stage_modules.programs(session, name)
        except ValueError:
            # The longest pair that settings allow fits no row; the actual pairs may.
            continue
        if not programs:
            continue
        fullest = max(programs, key=lambda program: _size(session, program))
        size = _size(session, fullest)
        yield Estimate(name, fullest.name, int(PROCESS + here * size))


def show(session: Session) -> None:
    """Print the memory that each stage needs if the devices are CPUs."""
    if platform_of(session.mesh) != "cpu":
        return  # `g2d plan` compiles for these
    found = list(estimates(session))
    most = memory.limit()
    rows = [[estimate.stage, estimate.program, f"{estimate.size / GIB:.1f}"] for estimate in found]
    session.tracker.table("host memory, estimated", ["stage", "fullest program", "GiB"], rows)
    if most is not None:
        session.tracker.say(f"this machine has {most / GIB:.1f} GiB")
    largest = max((estimate.size for estimate in found), default=0)
    if most is not None and largest > most:
        session.tracker.say(
            f"WARNING: the run needs about {largest / GIB:.1f} GiB of memory, but this machine has "
            f"{most / GIB:.1f} GiB: the system will kill it. To try: lora.rank, a smaller "
            "compute.microbatch_tokens or compute.max_num_seqs, a smaller model, a larger machine"
        )


def _size(session: Session, program: Program) -> int:
    """Count the bytes per device of a program's arrays, other resident arrays, and the largest
    temporaries."""
    words = session.model_config.vocab_size
    logits = LOGITS * (program.work.rows or chunk_of(words, "cpu")) * words * FLOAT32
    arrays = meshes.device_bytes((program.inputs, program.other_resident()))
    return int(arrays + program.work.temporary + logits)
