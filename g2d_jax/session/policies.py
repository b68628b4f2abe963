"""The policies of a run, by name: "init", "STAGE", "STAGE@K", "run:WORKDIR#STAGE[@K]" of another
run, "hf:PATH"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp
from etils import epath

from g2d_jax.config import places
from g2d_jax.config.policy_name import INIT, OF_RUN, PolicyName
from g2d_jax.models import decoder, lora
from g2d_jax.models.decoder import Decoder
from g2d_jax.runtime import processes
from g2d_jax.runtime.program import Program
from g2d_jax.session import init_params, stage_result
from g2d_jax.session.accounting import POLICIES
from g2d_jax.session.session import Run, Session, base_of
from g2d_jax.session.workdir import check_place, stage_folders
from g2d_jax.training.checkpoint import Checkpoints
from g2d_jax.training.step import make_cast


def load_policy(session: Session, name: str) -> Decoder:
    """Load the parameters of a policy, by name, on the mesh.

    "init": the pretrained model, else random parameters. "STAGE": the stage's last checkpoint.
    "STAGE@K": that of its step K. "run:WORKDIR#STAGE" and "run:WORKDIR#STAGE@K": of another run.
    "hf:PATH": a Hugging Face folder. A best_checkpoint stage means the checkpoint that it chose.
    Raises ValueError if there is no such policy.
    """
    if PolicyName.parse(name).is_model:
        if (rest := frozen_params(session, base_of(session, name).policy)) is None:
            return _load_base(session, name)
        return init_params.add_lora(rest, session.model_config, session.mesh, session.config.seed)
    folder, step = checkpoint_of(session, name)
    rest = frozen_params(session, base_of(session, name).policy)
    with Checkpoints(folder) as checkpoints:
        steps = processes.on_leader(checkpoints.steps)
        chosen = max(steps, default=None) if step is None else step
        if chosen is None or chosen not in steps:
            there = "" if PolicyName.parse(name).origin == OF_RUN else _trained(session)
            raise ValueError(f"policy {name!r}: {_missing(folder, steps)}{there}")
        if step is None and not stage_result.read(folder.parent):
            session.tracker.say_once(f"WARNING: {name} is not finished: this is its step {chosen}")
        like, _ = lora.partition(decoder.abstract_on(session.model_config, session.mesh))
        return lora.combine(checkpoints.restore_params(chosen, like), rest)


def _missing(folder: epath.Path, steps: Sequence[int]) -> str:
    """Explain why a checkpoint is not in a stage's folder. steps: those that are."""
    if steps:
        listed = ", ".join(map(str, steps))
        return f"no checkpoint of that step in {folder} (there: {listed}); see stages.*.keep"
    if stage_result.read(folder.parent):
        return (
            f"the stage is finished, but {folder} no longer has a checkpoint: restore a copy, or move "
            "the folders of this stage and of all made from it out of the work directory"
        )
    return f"the stage is not finished, and {folder} has no checkpoint yet: let it finish first"


def _trained(session: Session) -> str:
    """List the stages that have finished and kept a policy."""
    names: list[str] = []
    for name, folder in session.folders.items():
        if stage_result.read(folder) and any((folder / "checkpoints").glob("*")):
            names.append(name)
    return f". Finished, with checkpoints: {', '.join(names) or 'none'}"


def load_reference(session: Session, policy: str) -> Decoder:
    """Load a policy as the fixed reference of training, in `reference_dtype`."""
    params, cast = load_policy(session, policy), reference_cast(session)
    return params if cast is None else cast(params)


def reference_cast(session: Session) -> Program | None:
    """Return the program that casts a policy to a reference, None if both have one dtype."""
    dtype = reference_dtype(session)
    if dtype == init_params.base_dtype(session.config):
        return None
    run = session.programs.get_or_make(make_cast, session.model_config, session.mesh, dtype)
    return Program("reference", run, (policy_shapes(session),))


def policy_shapes(session: Session) -> Decoder:
    """Return a policy's parameters as shapes, adapters included."""
    return decoder.abstract_on(
        session.model_config, session.mesh, init_params.base_dtype(session.config)
    )


def reference_shapes(session: Session) -> Decoder:
    """Return a fixed reference's parameters as shapes, adapters included: see `load_reference`."""
    return decoder.abstract_on(session.model_config, session.mesh, reference_dtype(session))


def reference_dtype(session: Session) -> jnp.dtype:
    """Return the dtype of a reference's parameters: that of computation, which does not change its
    results.

    With adapters it is that of their base, which all policies share.
    """
    return (
        init_params.base_dtype(session.config)
        if session.model_config.lora
        else session.compute.dtype
    )


def frozen_params(session: Session, base: str) -> Decoder | None:
    """Return the parameters of a policy that no stage trains, on the mesh: the model `base` of its
    adapters.

    None without adapters. Policies share the arrays of a base; only the last base used stays
    loaded.
    """
    if session.model_config.lora is None:
        return None
    if base not in session.bases:
        session.bases.clear()
        session.bases[base] = _load_base(session, base)
    return session.bases[base]


def checkpoint_of(session: Session, name: str) -> tuple[epath.Path, int | None]:
    """Return the checkpoint folder and step that a policy's name means."""
    chosen = chosen_policy(session, name)
    step = PolicyName.parse(chosen).number
    return _stage_folder(session, chosen) / "checkpoints", session.steps.get(
        chosen
    ) if step is None else step


def chosen_policy(session: Session, name: str) -> str:
    """Return the policy that a name refers to: for a best_checkpoint stage the chosen "STAGE@K",
    else the name itself.

    Raises ValueError for a stage that does not exist, or has not chosen yet.
    """
    parsed = PolicyName.parse(name)
    if parsed.is_model:
        return name
    folder, stage = _stage_folder(session, name), parsed.own_stage
    selects = (
        stage in session.config.stages and session.config.stages[stage].kind == "best_checkpoint"
    )
    if selects and stage_result.read(folder) is None:
        raise ValueError(
            f"policy {name!r}: that stage has not chosen a checkpoint yet: let it finish first"
        )
    return followed(name, folder)


def _stage_folder(session: Session, name: str) -> epath.Path:
    parsed = PolicyName.parse(name)
    _ = parsed.number  # raises
    if parsed.origin == OF_RUN:
        return stage_of_run(name)
    stage, stages = parsed.stage, session.config.stages
    trained = [
        other for other in session.folders if other in stages and stages[other].kind in POLICIES
    ]
    if stage not in trained:
        why = f"a {stages[stage].kind} stage trains none" if stage in stages else "no such stage"
        raise ValueError(f"policy {name!r}: {why}; this run has {', '.join(trained)}, and 'init'")
    return session.folders[stage]


def base_path(session: Run, policy: str) -> str:
    """Return the path or hub id of the model that a policy was trained from, "" for random
    parameters."""
    base = PolicyName.parse(base_of(session, policy).policy)
    return session.config.model.path if base.origin == INIT else base.place


def base_revision(session: Run, policy: str) -> str | None:
    """Return the revision of the model that a policy was trained from, None for the newest."""
    model = session.config.model
    if base_path(session, policy) != model.path:
        return None
    return model.revision or None


def _load_base(session: Session, name: str) -> Decoder:
    """Load "init" or "hf:PATH" without adapters: the frozen part, if the run has adapters."""
    is_own = PolicyName.parse(name).origin == INIT
    folder = session.model_folder if is_own else init_params.model_of(name, session.model_config)
    return init_params.base(session.config, folder, session.model_config, session.mesh)


def followed(policy: str, folder: epath.Path) -> str:
    """Return the policy that a name refers to, see `chosen_policy`. folder: its stage's."""
    result = stage_result.read(folder)
    if result is None or result.selection is None:
        return policy
    name = PolicyName.parse(policy)
    if name.step is not None:
        raise ValueError(
            f"policy {policy!r}: a best_checkpoint stage chooses the step itself: leave out "
            f"@{name.step}"
        )
    chosen = PolicyName.parse(result.selection.policy)
    return str(replace(name, stage=chosen.stage, step=chosen.step))


def require_elsewhere(policy: str) -> None:
    """Raise ValueError if a policy of another run ("run:…") does not exist, or is the end of an
    unfinished stage: each load would read a newer step."""
    name = PolicyName.parse(policy)
    if name.origin == OF_RUN:
        policy = followed(policy, stage_of_run(policy))
        step = PolicyName.parse(policy).step
        steps = Checkpoints(stage_of_run(policy) / "checkpoints").steps()
        if not steps or (step is not None and step not in map(str, steps)):
            raise ValueError(
                f"policy {policy!r}: that stage has checkpoints of "
                f"{', '.join(map(str, steps)) or 'no step'}"
            )
        if step is None and not stage_result.read(stage_of_run(policy)):
            raise ValueError(
                f"policy {policy!r}: that stage has not finished, so its newest checkpoint may "
                f"change: name a step that it keeps, as in {policy}@{max(steps)}, or let it finish "
                "first"
            )


def stage_of_run(policy: str) -> epath.Path:
    """Return the folder of another run's stage. Raises ValueError for "run:WORKDIR#STAGE[@STEP]"
    that leads nowhere."""
    name = PolicyName.parse(policy)
    workdir, stage = name.place, name.stage
    if not (workdir and stage):
        raise ValueError(f"policy {policy!r}: write run:WORKDIR#STAGE or run:WORKDIR#STAGE@STEP")
    check_place(workdir)
    other = epath.Path(workdir)
    if not (other / "config.json").exists():
        raise ValueError(
            f"policy {policy!r}: {places.shown(workdir)} holds no run (no config.json)"
        )
    folders = stage_folders(other)
    if stage not in folders:
        raise ValueError(
            f"policy {policy!r}: {other} has no stage {stage!r}; it has "
            f"{', '.join(folders) or 'none'}"
        )
    return folders[stage]
