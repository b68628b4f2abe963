"""Early stopping of an online stage: at its budget."""

from __future__ import annotations

from dataclasses import replace

from g2d_jax.config import Online
from g2d_jax.runtime import processes
from g2d_jax.session.stage_result import Stop
from g2d_jax.session.trainer import Trainer


def ends(trainer: Trainer, stage: Online) -> bool:
    """Return whether the stage ends with the current step, or has ended, maybe in an earlier start.

    Records the reason in trainer.extra_state, prints it, and keeps the step's checkpoint.
    """
    state, step = trainer.extra_state, trainer.step
    if state.ended or not stage.budget.amount:
        return state.ended is not None
    spent = trainer.cost.measures[stage.budget.measure]
    spent = processes.on_leader(lambda: spent)  # seconds differ from one process to the next
    if not step or spent < stage.budget.amount:
        return False
    state.ended = Stop("budget", stage.budget.measure)
    trainer.pinned.add(step)
    # Even if the step was saved already, by a process that was stopped in between.
    state.costs.setdefault(str(step), replace(trainer.cost))
    trainer.session.tracker.say(
        f"{trainer.name}: ends after step {step} of at most {stage.steps} by budget"
    )
    return True
