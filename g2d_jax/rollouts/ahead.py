"""Sampling ahead of the updates: a server samples the next sync window while the current one trains.

    engine.ahead=0   server:  window 0             window 1             window 2
                     trainer:          updates 0..           updates s..           updates 2s..

    engine.ahead=1   server:  window 0  window 1    window 2    window 3
                     trainer:           updates 0.. updates s.. updates 2s..

With s = sync_every, and W(k) the weights before update k:

- **Weights.** Window 0 is sampled from W(0), and nothing trains meanwhile. When the responses of
  window n have arrived, the server loads W(ns) and begins window n + 1. So windows 0 and 1 are
  sampled from W(0), and window 2 from W(s). From window 1 on a response is s to 2s - 1 updates old.
  Its row names its policy, "STAGE@STEP"; the metric `staleness` is its age.
- **Correction.** Old log-probabilities, and a reference that follows (`reference_sync`), are from
  W(ns) for window n, as without `ahead`. A GRPO loss clips around them. `clip.importance_cap`
  weights each token by their ratio to the server's log-probabilities.
- **Prompts.** Prompts of window n + 1 are drawn at update ns, so `filter` knows one window less.
  Further rounds of dynamic sampling are drawn when window n + 1 begins, from the same weights, which
  the server still has.
- **Order.** Results depend on update numbers alone. Responses are requested in the order of batches
  and sorted when they are used, so the time of their arrival changes nothing.
- **A checkpoint within window n** has the prompts of window n + 1, but no responses: these are
  scored and written when window n + 1 begins. A stage that resumes there loads W(ns) on the server
  from engine.folder, and requests all responses that are not on disk again. If the folder is gone,
  they are sampled from the current weights, and the run logs this: results differ.
- **The end.** The last window begins no further one. A stage that stops early sends no further
  request and waits for none. The next load of weights waits for running requests. A server
  error is raised when window n + 1 begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from g2d_jax.config import Online
from g2d_jax.rollouts.generate import Policy, ask_ahead
from g2d_jax.rollouts.store import Batches, on_disk
from g2d_jax.rollouts.window import StageSampling, draw, share_out
from g2d_jax.session.extra_state import Cursor, PlannedWindow
from g2d_jax.session.session import Session
from g2d_jax.session.trainer import Trainer
from g2d_jax.session.windows import SyncWindow, window_at

if TYPE_CHECKING:
    from g2d_jax.sampler.remote import Remote, Served


def samples_ahead(session: Session, stage: Online) -> bool:
    """Return whether a server samples a stage's windows ahead of their updates."""
    return bool(session.config.engine.ahead) and stage.has_windows


def schedule(name: str, stage: Online) -> str:
    """Describe the effect of engine.ahead on a stage that samples."""
    every = stage.sync_every
    if not stage.has_windows:
        return f"{name}: engine.ahead=1 has no effect: its {stage.steps} updates are one window"
    return (
        f"{name}: engine.ahead=1: while a window of {every} updates trains, the server samples the "
        f"next one from the weights at its beginning. From update {every + 1} on, responses are "
        f"{every} to {2 * every - 1} updates old instead of 0 to {every - 1}"
    )


class Ahead:
    """The windows of a stage that a server samples ahead; see the top of the file.

    The Trainer's extra state has their plans (`planned`), for a resumed stage.
    """

    def __init__(self, trainer: Trainer, sampling: StageSampling) -> None:
        server = trainer.session.sampling.server
        assert server is not None
        self.server: Remote = server
        self.trainer = trainer
        self.sampling = sampling
        self.session = trainer.session
        self.state = trainer.extra_state
        # The policy on the server, and the number of the update before which it was copied.
        self._served: Served | None = None
        self._step = -1

    def planned(self, window: SyncWindow) -> PlannedWindow | None:
        """Return the plan of a window that was begun ahead, None for the first one."""
        return next((p for p in self.state.planned if p.window == window.first_update), None)

    def begin_next(self, window: SyncWindow, cursor: Cursor) -> None:
        """Make the server begin the window after this one, with the policy of this one's first
        update. cursor: after this window's prompts."""
        following = self._following(window)
        if following is None:
            return
        count = following.batches * self.sampling.stage.prompts_per_step
        drawn, behind = draw(self.sampling.prompts, cursor, self.state.history, count)
        plan = PlannedWindow(following.first_update, window.first_update, drawn, behind)
        self.state.planned = [*filter(None, [self.planned(window)]), plan]
        self._ask(following, plan, self._hold_present())

    def resume(self) -> None:
        """Make the server sample a window again that an earlier start began ahead, unless it is on
        disk."""
        window = window_at(self.trainer.step, self.sampling.stage)
        if self.trainer.step > window.first_update:
            following = self._following(window)
            if following is None:
                return
            window = following
        plan = self.planned(window)
        if plan is None:
            return
        shards = [shard for _, shard in self._parts(window, plan)]
        if not on_disk(self.session.writer, shards):
            self._ask(window, plan, self._hold(plan))

    def policy(self, plan: PlannedWindow | None) -> Policy:
        """Load a window's policy on the server; return it. plan: of a window that was begun
        ahead."""
        if plan is None:
            return Policy(self._hold_present(), self._label(self._step))
        return Policy(self._hold(plan), self._label(plan.step))

    def close(self) -> None:
        """Send no further request."""
        self.server.forget()

    def _following(self, window: SyncWindow) -> SyncWindow | None:
        """Return the window after this one, None after the last."""
        step = window.first_update + window.updates
        if step == self.sampling.stage.steps:
            return None
        return window_at(step, self.sampling.stage)

    def _parts(self, window: SyncWindow, plan: PlannedWindow) -> Batches:
        """Distribute the draws of a plan over the batches of its window."""
        missing = dict.fromkeys(window.batch_numbers, self.sampling.stage.prompts_per_step)
        draws = self.sampling.prompts.draws(plan.draws)
        return list(share_out(self.sampling.folder, draws, missing).values())

    def _ask(self, window: SyncWindow, plan: PlannedWindow, served: Served) -> None:
        """Make the server begin a window's first round with its loaded policy."""
        ask_ahead(self.session, served, self._parts(window, plan), self.sampling.workload)

    def _hold_present(self) -> Served:
        """Load the current policy on the server, unless it is loaded already."""
        if self._served is None or self._step != self.trainer.step:
            # This removes the previous policy's folder: first write its rollouts to disk.
            self.session.writer.wait()
            policy = self.trainer.finished_policy()
            label = self._label(self.trainer.step)
            with self.session.track_cost(self.trainer.cost):
                self._served = self.server.to_sampler_params(policy, label=label)
            self._step = self.trainer.step
        return self._served

    def _hold(self, plan: PlannedWindow) -> Served:
        """Load a window's policy on the server. If an earlier start's is gone, log this and use the
        current policy; the plan then has its step."""
        if self._served is None and not self._restored(plan):
            self.session.tracker.say(
                f"{self.trainer.name}: the window at update {plan.window} needs the policy of update "
                f"{plan.step}, which is not in {self.server.folder}. The rest of the window is sampled "
                f"from that of update {self.trainer.step}, so results differ from an uninterrupted "
                "run; use an engine.folder that is kept"
            )
            plan.step = self.trainer.step
            self._hold_present()
        assert self._served is not None
        return self._served

    def _restored(self, plan: PlannedWindow) -> bool:
        """Restore the policy of a plan on the server; return whether it was found."""
        with self.session.track_cost(self.trainer.cost):
            self._served = self.server.restore(self._label(plan.step))
        self._step = plan.step
        return self._served is not None

    def _label(self, step: int) -> str:
        """Return the label of the policy before an update."""
        return f"{self.trainer.name}@{step}"


def staleness(step: int, policies: list[Any]) -> float:
    """Return the mean age of a batch in updates, when update number `step` (from 0) uses it.
    policies: of its responses, "STAGE@STEP" each."""
    ages = [step - int(policy.rpartition("@")[2]) for policy in policies]
    return sum(ages) / len(ages)
