"""Warnings of a stage, in words, with remedies: rules over what the stage has recorded.

    metrics, counts ─► rules ─► Alert ─► `say`, once a stage ─► terminal, metrics/, manifest ─► top of the reports

The rules are pure. They report what a person would see in the curves: too few problems, nothing
graded or nothing right, responses that are cut, a reward that stays where it was, entropy or length
that collapse.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from g2d_jax.config import (
    BestCheckpoint,
    DPOLoss,
    Evaluate,
    Offline,
    Online,
    Sampling,
    TrainingStage,
)
from g2d_jax.models.config import LongRope
from g2d_jax.records import Verdict
from g2d_jax.runtime.terminal import counted, shortened
from g2d_jax.session.session import Session
from g2d_jax.session.trainer import Trainer
from g2d_jax.stages.causes import Cause

WATCHED = (
    "entropy",
    "reward",
    "frac_signal",
    "completions/mean_length",
    "completions/clipped_ratio",
    "verdicts/no_answer",
    "verdicts/unscorable",
    "verdicts/timeout",
)
"""Metrics of an online update that the rules read."""

Drawn = Literal["problems", "examples"]

WINDOW = 5  # steps at either end whose medians are compared
FALLS = {"entropy": ("entropy", 0.2, 0.05), "length": ("completions/mean_length", 0.5, 0.2)}
"""Cause -> metric, the share of its start below which it has collapsed if the reward has not risen,
and in any case.

Entropy falls wherever a policy learns: GRPO on the task chains ends at 10 to 40 % of its first
entropy while the reward doubles, so that a share alone would raise false alarms.
"""
MOST_CUT = 0.9  # share of responses cut at the limit above which length has exploded …
CUT_RISE = 0.2  # … if it is so much more than at the start
CUT = 0.5  # share of responses cut at the limit that is too much from the start
UNREAD = 0.5  # share of responses in which no answer was found
UNGRADED = 0.2  # share of responses that no one could grade
SIGNAL = 0.1  # share of prompts whose responses differ in reward, below which a step hardly teaches
MIXED = 0.1  # the same share of the prompts that pairs are made of
BATCHES: Mapping[Drawn, tuple[str, int]] = {
    "problems": ("prompts_per_step", 50),
    "examples": ("batch_size", 20),
}
"""By what a stage draws, the setting that says how many a step, and the times that each is drawn
above which they are too few. Rewards stand more repetition than demonstrations, which are learned
by heart."""
UPDATES = 10  # of an offline stage: fewer hardly move a policy
STEPS = 20  # of an online stage: the fewest whose rewards a line is fitted to
HALFWAY = 100  # steps of an online stage from which on this is done halfway, too
LEAST_RISE = 0.1  # of a reward from 0 to 1 over a stage: less than this is hardly any …
HIGH_REWARD = 0.9  # … but there is little left to rise above this
DISPLACED = 0.2  # nats a token that chosen responses lose
HIGHEST_RATE = 0.05  # learning rate above which a slip of the pen is likelier than a wish
SAFE_EPSILON = 1e-4  # of Adam, as the paper has it for verifiable tasks


@dataclass(frozen=True)
class Alert:
    """A warning. cause: its name, one a stage. text: the symptom, and what to try. values: the
    numbers it rests on."""

    cause: str
    text: str
    values: Mapping[str, float] = field(default_factory=dict)


# Reporting


def say(
    session: Session, name: str, step: int, alerts: Iterable[Alert], warnings: list[dict[str, Any]]
) -> None:
    """Show the user the alerts whose cause is not among the warnings, and add them there; all
    processes call it.

    warnings: {"cause", "step", "text", "values"} each, for the manifest; JSON.
    """
    for alert in alerts:
        if alert.cause in {warning["cause"] for warning in warnings}:
            continue
        text = f"{name}{f', step {step}' if step else ''}: {alert.text}"
        warnings.append(
            {"cause": alert.cause, "step": step, "text": text, "values": dict(alert.values)}
        )
        session.tracker.warn(name, step, alert.cause, text, alert.values)


def report(trainer: Trainer, alerts: Iterable[Alert]) -> None:
    """Show alerts at a Trainer's step; those already shown are part of the state with which the
    stage resumes."""
    say(trainer.session, trainer.name, trainer.step, alerts, trainer.extra_state.warnings)


def watch(
    trainer: Trainer,
    stage: Online,
    metrics: Mapping[str, float],
    cause: Callable[[], Cause],
    *,
    new: bool = True,
) -> None:
    """Add a step's metrics to the series of `WATCHED`, and warn of what has gone wrong.

    Call it once a step, after the update. cause: of most responses of the batch. new: whether no
    step before was on the same batch, whose reward counts once.
    """
    series = trainer.extra_state.series
    for metric in WATCHED:
        value = float(metrics.get(metric, math.nan))
        if math.isfinite(value):
            values = series.setdefault(metric, [])
            values.append(value)
            del values[WINDOW:-WINDOW]
    latest = {}
    for name, values in series.items():
        if len(values) >= WINDOW:
            latest[name] = statistics.fmean(values[-WINDOW:])
    limit: int | None = stage.sampling.max_new_tokens
    if stage.rollouts != "sample":
        limit = None  # a dump's is its writer's
    report(trainer, [*collapse(series, stage), *sampled(latest, limit, cause)])
    reward = float(metrics.get("reward", math.nan))
    if math.isfinite(reward):
        if new:
            trainer.extra_state.rewards.append(reward)
        if trainer.total >= HALFWAY and trainer.step == trainer.total // 2:
            _judge_rise(trainer, stage)


def conclude(trainer: Trainer, stage: Online) -> None:
    """Warn of what only the whole of an online stage shows."""
    state = trainer.extra_state
    report(trainer, silent(state.without_signal, trainer.step, state.rewards))
    _judge_rise(trainer, stage)


def _judge_rise(trainer: Trainer, stage: Online) -> None:
    """Warn of a reward that has hardly risen over the whole of an online stage, or half of a long
    one; withdraw that where it no longer holds.

    A warning that is withdrawn stays in the log of metrics, but not in the manifest, and so not in
    the report.
    """
    if not stage.samples_anew:
        return  # its batches' rewards are not of what it has learned
    warnings = trainer.extra_state.warnings
    causes = {warning["cause"] for warning in warnings}
    alerts = stalled(trainer.extra_state.rewards, stage)
    if "stalled" in causes and not alerts:
        warnings[:] = [warning for warning in warnings if warning["cause"] != "stalled"]
        trainer.session.tracker.say(
            f"{trainer.name}: that the reward has hardly risen, as was said before, no longer holds"
        )
    if "signal" not in causes:  # that warning gives the reason
        report(trainer, alerts)


def position_alerts(
    session: Session,
    sampling: Sampling | None = None,
    pairs: Iterable[tuple[Sized, Sized]] = (),
) -> list[Alert]:
    """Apply `beyond_positions` to a stage. sampling: of its responses; pairs: prompts and responses
    from elsewhere."""
    lengths = [(len(prompt), len(response)) for prompt, response in pairs]
    if sampling is not None:
        lengths.append((max(session.problems.prompt_lengths, default=0), sampling.max_new_tokens))
    # A model that begins with random parameters was trained on no positions.
    positions = None if session.model_folder is None else session.model_config.positions
    if positions is not None and isinstance(session.model_config.rope_scaling, LongRope):
        refuse_beyond_short(lengths, positions)
    return beyond_positions(lengths, positions)


# Rules


def unlikely(stage: TrainingStage) -> list[Alert]:
    """Warn of settings that do what hardly anyone wants: a learning rate that changes nothing or
    everything, and what an online stage asks for behind its last step."""
    found = []
    rate = stage.optimizer.learning_rate
    if rate == 0:
        text = "optimizer.learning_rate is 0: the stage trains nothing"
        found.append(Alert("rate", text, {"learning_rate": rate}))
    if rate > HIGHEST_RATE:
        text = (
            f"optimizer.learning_rate is {rate:g}, and every update moves each parameter by about "
            "that much, which ruins a model. To try: 1e-6 for all parameters, 1e-5 for adapters, "
            "1e-4 to 1e-3 for a tiny model"
        )
        found.append(Alert("rate", text, {"learning_rate": rate}))
    if isinstance(stage, DPOLoss):
        found += unlikely_beta(stage)
    if not isinstance(stage, Online) or not stage.steps:
        return found
    if stage.is_preference_loss:
        found += unlikely_beta(stage.dpo)
    beyond = [step for step in stage.keep if step > stage.steps]
    if beyond:
        listed = ", ".join(map(str, beyond))
        text = f"keep has {listed}, and the stage ends with step {stage.steps}: they come with more steps"
        found.append(Alert("keep", text, {"steps": stage.steps}))
    if stage.stop == "budget" and stage.optimizer.schedule != "constant":
        text = (
            f"optimizer.schedule is {stage.optimizer.schedule!r}, which decays over all {stage.steps} "
            "steps, and the budget may end the stage long before: the learning rate then has hardly "
            'fallen. To try: steps at about what the budget pays for, or schedule="constant"'
        )
        found.append(Alert("schedule", text, {"steps": stage.steps}))
    if stage.steps <= stage.sync_every and stage.sync_every > stage.num_iterations:
        text = (
            f"sync_every is {stage.sync_every}, and the stage has {stage.steps} steps: all its "
            "responses are drawn from the policy that it begins with, as with sync_every=0, which "
            "is offline. To try: a smaller sync_every, or more steps"
        )
        found.append(Alert("sync", text, {"sync_every": stage.sync_every, "steps": stage.steps}))
    return found


def unlikely_beta(loss: DPOLoss) -> list[Alert]:
    """Warn of a beta for sums over tokens in a loss that takes means over them."""
    if loss.loss_type not in ("sigmoid_norm", "simpo") or loss.beta >= 1:
        return []
    text = (
        f"beta is {loss.beta:g}, a value for log-probabilities summed over tokens, and "
        f"{loss.loss_type!r} takes their means. To try: 2 to 2.5 as SimPO (arXiv 2405.14734), 5 as "
        "Tulu 3 for DPO normalised by length (arXiv 2411.15124)"
    )
    return [Alert("beta", text, {"beta": loss.beta})]


def one_answer(stage: BestCheckpoint | Evaluate) -> list[Alert]:
    """Warn of several greedy answers to a problem, which are all the same."""
    if stage.sampling.answers(stage.num_generations) == stage.num_generations:
        return []
    text = (
        f"sampling.temperature is 0, so that the {stage.num_generations} answers of num_generations "
        "to a problem would be the same: one is sampled. To try: a temperature above 0, or "
        "num_generations=1"
    )
    return [Alert("greedy", text, {"num_generations": stage.num_generations})]


def unclosed(what: str, count: int, of: int) -> list[Alert]:
    """Warn of texts to train on that leave a thought open: a policy that learns them gives no
    answer that a reward reads."""
    if not count:
        return []
    text = (
        f"{count} of {of} {what} leave a thought open: they lack </think>, and responses like them "
        "are graded as without an answer. To try: data with whole thoughts, or "
        "tokenizer.enable_thinking=False where the chat template knows it"
    )
    return [Alert("unclosed", text, {what: of, "open": count})]


def say_example(session: Session, head: str, parts: Mapping[str, np.ndarray]) -> None:
    """Print an example exactly as it is trained on, special tokens written out. parts: token ids,
    [T] int32 each, by what they are."""
    lines = [head]
    for part, ids in parts.items():
        text = shortened(session.tokenizer.decode_raw(ids), 1000)
        lines += [f"{part}, {len(ids)} tokens:", *(f"| {line}" for line in text.splitlines())]
    session.tracker.say("\n  ".join(lines))


def too_few_problems(what: Drawn, count: int, batch: int, batches: int) -> list[Alert]:
    """Warn if a stage of this many batches has too few problems, or examples, to draw them from."""
    size, most_visits = BATCHES[what]
    visits = batches * batch / count
    if not batches or (count >= batch and visits <= most_visits):
        return []
    text = (
        f"{count} {what} for {batches} batches of {batch}: each is drawn {visits:.0f} "
        f"times{', some of them twice in a batch' if count < batch else ''}. To try: more {what}, a "
        f"smaller {size}, fewer steps"
    )
    return [Alert("data", text, {what: count, "visits": visits})]


def too_few_prompts(asked: int, count: int) -> list[Alert]:
    """Warn if a stage asks for rollouts of more prompts than there are training problems."""
    if asked <= count:
        return []
    text = f"prompts is {asked}, and there are {count} training problems: rollouts are of these"
    return [Alert("data", text, {"prompts": asked, "problems": count})]


def unweighed(rows: int) -> list[Alert]:
    """Warn if a loss with a ratio of policies trains on rollouts whose log-probabilities are not
    known. rows: how many there are of these."""
    if not rows:
        return []
    text = (
        f"the dump's {rows} responses have no logprobs: how far the policy that wrote "
        "them is from this one cannot be told, and GRPO takes them for its own, at a ratio of 1. "
        "To try: rollouts with logprobs and "
        'importance_cap=2, loss="dpo", which needs none'
    )
    return [Alert("unweighed", text, {"responses": rows})]


def refuse_beyond_short(lengths: Iterable[tuple[int, int]], positions: int) -> None:
    """Raise ValueError if a sequence of a model with LongRoPE is longer than its short ones. lengths:
    as `beyond_positions` has it."""
    prompt, response = max(lengths, key=sum, default=(0, 0))
    if prompt + response > positions:
        raise ValueError(
            f"prompt and response can have {prompt:,} + {response:,} = {prompt + response:,} "
            f"tokens, and the model's rope type longrope is supported for sequences of at most "
            f"{positions:,} (original_max_position_embeddings in its config.json): longer ones "
            "have other frequencies at all positions. To try: a smaller sampling.max_new_tokens "
            "(of SFT max_length) or data.max_prompt_length"
        )


def beyond_positions(lengths: Iterable[tuple[int, int]], positions: int | None) -> list[Alert]:
    """Warn if a sequence is longer than what the model is made for. lengths: tokens of prompts and
    their responses, the longest that there can be. positions: that the model was trained on, None:
    no limit.

    Rotary embeddings go on beyond it, so that nothing fails: answers just become worse.
    """
    prompt, response = max(lengths, key=sum, default=(0, 0))
    if positions is None or prompt + response <= positions:
        return []
    text = (
        f"prompt and response can have {prompt:,} + {response:,} = {prompt + response:,} tokens, "
        f"and the model is made for {positions:,} (max_position_embeddings in its config.json): "
        "beyond these it gets worse. To try: a smaller sampling.max_new_tokens (of SFT "
        "max_length), a model of longer context, or the rope_scaling that its authors give for "
        "this length"
    )
    return [Alert("positions", text, {"tokens": prompt + response, "positions": positions})]


def few_updates(updates: int, batch: int, pairs: int, more: str) -> list[Alert]:
    """Warn if an offline stage does too few updates to move a policy. more: what there may be more
    of."""
    if updates >= UPDATES:
        return []
    text = (
        f"{counted(updates, 'update')} of {counted(batch, 'pair')} ({pairs:,} in all) is too little "
        f"to change a policy much. To try: more {more}, a smaller batch_size, more epochs"
    )
    return [Alert("data", text, {"pairs": pairs, "updates": updates})]


def few_pairs(counts: Mapping[str, int], cause: Cause) -> list[Alert]:
    """Warn if few of a collect stage's prompts have a better and a worse response. counts: those of
    its manifest. cause: of most responses."""
    prompts, mixed = counts["prompts"], counts["mixed"]
    if mixed >= MIXED * prompts:
        return []
    fates = {
        "all_incorrect": "all wrong",
        "all_correct": "all right",
        "all_equal": "all of one reward",
    }
    fates |= {"unscorable": "not graded", "outside_window": "outside the window of pass rates"}
    why = ", ".join(f"{counts[fate]} {words}" for fate, words in fates.items() if counts.get(fate))
    text = (
        f"{mixed} of {prompts} prompts have responses to tell apart ({why}), which gives "
        f"{counts['pairs']} pairs: {cause.symptom}. To try: {cause.remedy}"
    )
    return [Alert("signal", text, {"mixed": mixed, "prompts": prompts})]


def sampled(
    shares: Mapping[str, float],
    limit: int | None,
    cause: Callable[[], Cause],
    whose: str = "its responses",
) -> list[Alert]:
    """Warn of faulty responses of a policy, by their shares under the names of `WATCHED`; missing
    ones give no warning.
    limit: the max_new_tokens that they were sampled with; None: not known, and not judged. cause:
    of most responses. whose: for the message."""
    alerts = []
    if limit is not None and (cut := shares.get("completions/clipped_ratio", 0.0)) > CUT:
        text = (
            f"{cut:.0%} of {whose} are cut at max_new_tokens, {limit}, and so have no end. To try: "
            "a larger sampling.max_new_tokens, the template that the model was trained with "
            "(tokenizer.chat, tokenizer.prompt_template), SFT on responses that end"
        )
        alerts.append(Alert("cut", text, {"clipped_ratio": cut}))
    unscorable = shares.get("verdicts/unscorable", 0.0)
    timeout = shares.get("verdicts/timeout", 0.0)
    if unscorable + timeout > UNGRADED:
        text = (
            f"{unscorable + timeout:.0%} of {whose} could not be graded ({unscorable:.0%} "
            f"unscorable, {timeout:.0%} timeouts, which count as wrong). To try: look at the "
            "reference answers and at samples/, a larger reward.cpu_seconds"
        )
        alerts.append(Alert("ungraded", text, {"unscorable": unscorable, "timeout": timeout}))
    signal = shares.get("frac_signal", 1.0)
    mute = shares.get("verdicts/no_answer", 0.0)
    if signal >= SIGNAL and mute <= UNREAD:
        return alerts
    why = cause()
    if signal < SIGNAL:
        text = (
            f"{signal:.0%} of the prompts give a signal, and the rest teaches nothing: "
            f"{why.symptom}. To try: {why.remedy}"
        )
        alerts.append(Alert("signal", text, {"frac_signal": signal}))
    elif why.verdict is Verdict.NO_ANSWER:
        text = f"of {whose}, {why.symptom}. To try: {why.remedy}"
        alerts.append(Alert("no_answer", text, {"no_answer": mute}))
    return alerts


def silent(without_signal: int, steps: int, rewards: Sequence[float]) -> list[Alert]:
    """Warn if no step of an online stage had a prompt whose responses differ in reward.
    without_signal: the steps in a row, at its end, that had none; rewards: the mean of each
    batch."""
    if not steps or without_signal < steps:
        return []
    reward = statistics.fmean(rewards) if rewards else math.nan
    text = (
        f"not one of its {steps} steps had a prompt that gives a signal, with a mean reward of "
        f"{reward:.3f}: it learned nothing from rewards. samples/ has responses. To try: "
        "responses of more than one reward to a prompt, more steps"
    )
    return [Alert("signal", text, {"steps": steps, "reward": reward})]


def stalled(rewards: Sequence[float], stage: Online) -> list[Alert]:
    """Warn if the mean rewards of an online stage's batches have hardly risen; noise alone gives no
    warning.

    The rise is that of a line fitted by least squares to all batches; its error is from their scatter
    about it. It is hardly any if it is no more than two errors above 0, and two errors more would
    still be less than LEAST_RISE. A reward on another scale than 0 to 1 has no such size: it must
    not have risen at all.
    """
    steps = len(rewards)
    if steps < STEPS:
        return []
    on_scale = min(rewards) >= 0 and max(rewards) <= 1
    first = statistics.fmean(rewards[: steps // 4])
    rise, error = _rise(rewards)
    least = LEAST_RISE if on_scale else 2 * error
    if (on_scale and first > HIGH_REWARD) or rise > 2 * error or rise + 2 * error > least:
        return []
    text = (
        f"the reward has hardly risen: by {rise:.3f} ± {error:.3f} over {steps} batches, from "
        f"{first:.3f} in the first {steps // 4}. To try: a larger optimizer.learning_rate (now "
        f"{stage.optimizer.learning_rate:g}), more steps, more prompts_per_step or num_generations "
        "against the noise, problems that are sometimes answered right"
    )
    return [Alert("stalled", text, {"rise": rise, "error": error, "first": first})]


def _rise(values: Sequence[float]) -> tuple[float, float]:
    """Fit a line by least squares. Return its rise from the first to the last value, and the
    standard error of that."""
    count = len(values)
    slope, intercept = statistics.linear_regression(range(count), values)
    residuals = math.fsum(
        (value - intercept - slope * step) ** 2 for step, value in enumerate(values)
    )
    variance = residuals / (count - 2) / (count * (count**2 - 1) / 12)
    return slope * (count - 1), math.sqrt(variance) * (count - 1)


def chosen_logps_fell(change: float, stage: Offline) -> list[Alert]:
    """Warn if an offline stage has made even the chosen responses much less likely. This is
    likelihood displacement (arXiv 2410.08847). change: mean over pairs of their log-probability
    after less before, nats a token."""
    if not change < -DISPLACED:
        return []
    text = (
        f"the chosen responses have lost {-change:.2f} nats a token, too: what both sides lose "
        f"goes to other responses (arXiv 2410.08847). To try: a larger beta (now {stage.beta:g}), "
        f"a smaller optimizer.learning_rate (now {stage.optimizer.learning_rate:g}), fewer epochs, "
        "pairs of the policy's own recent responses"
    )
    return [Alert("displaced", text, {"chosen_per_token": change})]


def collapse(series: Mapping[str, Sequence[float]], stage: Online) -> list[Alert]:
    """Warn of collapsed series of `WATCHED` metrics, by the medians of their first and last
    `WINDOW` values. The causes are "entropy", "length", or "limit", responses that grew to
    max_new_tokens.

    Values that are not finite do not count; a series of fewer than two windows says nothing. The
    reward has not risen if its median is known not to be above that at the start.
    """
    ends = {metric: _ends(series.get(metric, ())) for metric in WATCHED}
    risen = not ends["reward"][1] <= ends["reward"][0]
    alerts = []
    for cause, (metric, without_gain, anyway) in FALLS.items():
        first, last = ends[metric]
        if last < first * (anyway if risen else without_gain):
            alerts.append(_collapsed(cause, first, last, stage))
    first, last = ends["completions/clipped_ratio"]
    if last > MOST_CUT and last > first + CUT_RISE:
        alerts.append(_collapsed("limit", first, last, stage))
    return alerts


def _ends(values: Sequence[float]) -> tuple[float, float]:
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2 * WINDOW:
        return math.nan, math.nan
    return statistics.median(finite[:WINDOW]), statistics.median(finite[-WINDOW:])


def _collapsed(cause: str, first: float, last: float, stage: Online) -> Alert:
    share = f"{last / first:.0%} of what it was at the start" if first else ""
    what = {
        "entropy": f"the entropy of its samples has collapsed to {last:.3g} nats a token, {share}",
        "length": f"the length of its samples has collapsed to {last:.4g} tokens, {share}",
        "limit": f"{last:.0%} of its samples are cut at max_new_tokens, {first:.0%} at the start",
    }[cause]
    text = f"{what}. To try (arXiv 2506.21495): {'; '.join(remedies(cause, stage))}"
    return Alert(cause, text, {"first": first, "last": last})


def remedies(cause: str, stage: Online) -> list[str]:
    """List what the paper found to help, or tried, against a collapse, less what the stage has
    already; never empty.

    Reference synchronisation avoids the collapse of length in online DPO on maths (figures 2 and
    7), a larger epsilon sudden divergence of DPO (section 5.1); long windows raise the risk
    (section 4.2). Its entropy term did not hold entropy in every run (figure 6).
    """
    changes = []
    eps = stage.optimizer.eps
    if eps < SAFE_EPSILON:
        changes.append(f"a larger Adam epsilon, optimizer.eps=1e-4 (now {eps:g})")
    if stage.is_preference_loss and stage.sync_every and stage.has_fixed_reference:
        changes.insert(0, "reference_sync=True")
    if stage.sync_every != 1:
        changes.append(f"a smaller sync_every (now {stage.sync_every or 'never'})")
    if cause == "entropy" and not stage.entropy_coef:
        changes.append("entropy_coef=1e-4 (now 0)")
    return changes or ["a smaller optimizer.learning_rate"]
