"""Sampling ahead of the updates: a server draws the next sync window while the present one trains.

    engine.ahead=0   server:  window 0             window 1             window 2
                     trainer:          updates 0..           updates s..           updates 2s..

    engine.ahead=1   server:  window 0  window 1    window 2    window 3
                     trainer:           updates 0.. updates s.. updates 2s..

With s = sync_every, and W(k) the weights before update k:

- **Which weights.** Window 0 is drawn from W(0), and nothing trains meanwhile. Then, at the
  beginning of each window n but the last, once the responses of window n are here: the server is
  given W(ns) and begins window n + 1. So windows 0 and 1 are both of W(0), window 2 is of W(s). A
  response is at least s updates old from window 1 on, and at most 2s - 1: under two windows.
  Its row says by which policy it is, "STAGE@STEP"; the metric `staleness` says how old it is.
- **What it is corrected by.** Old log-probabilities, and a reference that follows
  (`reference_sync`), are of W(ns) for window n, computed when it begins, as without `ahead`:
  a GRPO loss clips around them, and `clip.importance_cap` weighs each token by their ratio to the
  server's, which are of the policy that drew it.
- **Which prompts.** Those of window n + 1 are drawn at update ns, by what prompts got up to there:
  `filter` knows a window less. Further rounds of dynamic sampling are drawn
  when window n + 1 begins, with what is known then, from the same weights, which the server still
  has: nothing trains meanwhile.
- **In what order.** All of it is decided by numbers of updates. Responses are asked for in the
  order of batches and sorted when they are used, so when they arrive decides nothing.
- **A checkpoint within window n** has the prompts of window n + 1, and no responses: these are
  scored and written when window n + 1 begins. A stage that goes on there, or at the beginning of
  window n + 1, has the server load W(ns) from the folder that it was given (engine.folder), and
  asks for what is not on disk, all of it again. Where the folder is gone, that is drawn from the
  weights that the trainer has by then, and the run says so: less stale, but other numbers.
- **The end.** The last window begins none. `--until` ends a run between stages, where nothing is
  under way. A stage that stops by a rule, a signal or an error sends no further request and waits
  for none, but the next load of weights waits for those that are under way; an error of the
  server is raised when window n + 1 begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from etils import epath

from g2d_jax.config import Online
from g2d_jax.rollouts.generate import Draws, ask_ahead, on_disk
from g2d_jax.rollouts.workload import Workload
from g2d_jax.session.extra_state import PlannedWindow
from g2d_jax.session.session import Session
from g2d_jax.session.trainer import Trainer
from g2d_jax.session.windows import SyncWindow, window_at

if TYPE_CHECKING:
    from g2d_jax.sampler.remote import Remote, Served

Parts = Mapping[int, tuple[Draws, epath.Path]]
"""The draws of each batch of a window, by its number, with their shard."""


def samples_ahead(session: Session, stage: Online) -> bool:
    """Return whether a server draws a stage's windows ahead of their updates."""
    return bool(session.config.engine.ahead) and stage.has_windows


def schedule(name: str, stage: Online) -> str:
    """Say in words what sampling ahead does in a stage that samples."""
    every = stage.sync_every
    if not stage.has_windows:
        return f"{name}: engine.ahead=1 changes nothing: its {stage.steps} updates are one window"
    return (
        f"{name}: engine.ahead=1: while a window of {every} updates trains, the server draws the "
        f"next one from the weights at its beginning: from update {every + 1} on responses are "
        f"{every} to {2 * every - 1} updates old, in place of 0 to {every - 1}"
    )


class Ahead:
    """The windows of a stage that a server draws ahead; see the top of the file.

    What a resumed stage has to know is in the Trainer's extra state, `planned`.
    """

    def __init__(self, trainer: Trainer, stage: Online) -> None:
        server = trainer.session.sampling.server
        assert server is not None
        self.server: Remote = server
        self.trainer = trainer
        self.stage = stage
        self.session = trainer.session
        self.state = trainer.extra_state
        # The policy that the server holds, and the update before which it was taken.
        self._served: Served | None = None
        self._step = -1

    def planned(self, window: SyncWindow) -> PlannedWindow | None:
        """Return the plan of a window that was begun ahead, None of the first one."""
        return next((p for p in self.state.planned if p.window == window.first_update), None)

    def following(self, window: SyncWindow) -> SyncWindow | None:
        """Return the window after this one, None behind the last."""
        step = window.first_update + window.updates
        if step == self.stage.steps:
            return None
        return window_at(step, self.stage)

    def plan(self, window: SyncWindow, plan: PlannedWindow) -> None:
        """Keep the plan of the window after this one, and forget those of earlier ones."""
        present = self.planned(window)
        self.state.planned = [*filter(None, [present]), plan]

    def pending(self) -> tuple[SyncWindow, PlannedWindow] | None:
        """Return the window whose responses a stage that goes on at this update needs next, and
        that an earlier start began; None if it began none."""
        window = window_at(self.trainer.step, self.stage)
        if self.trainer.step > window.first_update:
            following = self.following(window)
            if following is None:
                return None
            window = following
        plan = self.planned(window)
        if plan is None:
            return None
        return window, plan

    def hold_present(self) -> Served:
        """Have the server hold the present policy, if it does not yet."""
        if self._served is None or self._step != self.trainer.step:
            # The folder of the policy before goes: what was drawn from it has to be on disk.
            self.session.writer.wait()
            policy = self.trainer.finished_policy()
            label = self._label(self.trainer.step)
            with self.session.track_cost(self.trainer.cost):
                self._served = self.server.to_sampler_params(policy, label=label)
            self._step = self.trainer.step
        return self._served

    def hold(self, plan: PlannedWindow) -> Served:
        """Have the server hold the policy that a window is drawn from. Where that of an earlier
        start is gone, say so and take the present one, whose step the plan then has."""
        if self._served is None and not self._restored(plan):
            self.session.tracker.say(
                f"{self.trainer.name}: the policy of update {plan.step}, which the window at "
                f"update {plan.window} was to be drawn from, is not in {self.server.folder}: "
                f"what is not on disk of it is drawn from that of update {self.trainer.step}, so the run's numbers are "
                "not those that it would have had; put engine.folder where it stays"
            )
            plan.step = self.trainer.step
            self.hold_present()
        assert self._served is not None
        return self._served

    def hold_for(self, plan: PlannedWindow, parts: Parts) -> bool:
        """Have the server hold the policy of these parts of a window, unless all are on disk; return
        whether it does."""
        if on_disk(self.session, [shard for _, shard in parts.values()]):
            return False
        self.hold(plan)
        return True

    def ask(self, parts: Parts, workload: Workload) -> None:
        """Have the server begin a window's first round with the policy that it holds."""
        assert self._served is not None
        ask_ahead(self.session, self._served, list(parts.values()), workload)

    def ask_again(self, plan: PlannedWindow, parts: Parts, workload: Workload) -> None:
        """Have the server begin a window that an earlier start began, unless it is on disk."""
        if self.hold_for(plan, parts):
            self.ask(parts, workload)

    def close(self) -> None:
        """Send no further request."""
        self.server.forget()

    def _restored(self, plan: PlannedWindow) -> bool:
        """Have the server load the policy of a plan; return whether it was there."""
        with self.session.track_cost(self.trainer.cost):
            self._served = self.server.restore(self._label(plan.step))
        self._step = plan.step
        return self._served is not None

    def _label(self, step: int) -> str:
        """Return what names the policy before an update."""
        return f"{self.trainer.name}@{step}"


def staleness(step: int, policies: list[Any]) -> float:
    """Return how many updates old a batch is when update number `step` (from 0) takes it: the mean
    over its responses' policies, "STAGE@STEP" each."""
    ages = [step - int(policy.rpartition("@")[2]) for policy in policies]
    return sum(ages) / len(ages)
