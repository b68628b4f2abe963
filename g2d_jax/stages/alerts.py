"""Warnings of a stage, with remedies: rules over its recorded metrics and counts.

    metrics, counts ─► rules ─► Warned ─► `say`, once a stage ─► terminal, metrics/, manifest ─► top of the reports

The rules are pure. They report what you would see in the curves: too few problems, nothing graded
or nothing correct, truncated responses, a constant reward, collapsed entropy or length.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized

import numpy as np

from g2d_jax.config import Issue, Offline, Online, Sampling
from g2d_jax.config.section import error, warning
from g2d_jax.models.config import LongRope, ModelConfig
from g2d_jax.records import Verdict
from g2d_jax.runtime.terminal import counted, shortened
from g2d_jax.session.session import Session
from g2d_jax.session.stage_result import Warned
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

WINDOW = 5  # steps at either end whose medians are compared
FALLS = {"entropy": ("entropy", 0.2, 0.05), "length": ("completions/mean_length", 0.5, 0.2)}
"""Cause -> metric, the share of its start below which it has collapsed if the reward has not risen,
and the share in any case.

Entropy falls whenever a policy learns: GRPO on the task chains ends at 10 to 40 % of its first
entropy while the reward doubles. One share alone would raise false alarms.
"""
CUT = 0.5  # share of responses cut at the limit, above which to warn
UNREAD = 0.5  # share of responses in which no answer was found
UNGRADED = 0.2  # share of responses that could not be graded
SIGNAL = 0.1  # share of prompts whose responses differ in reward, below which a step hardly teaches
MIXED = 0.1  # the same share of the prompts that pairs are made of
# Draws of each above which there are too few. Rewards tolerate more repetition than demonstrations,
# which are memorised.
MOST_VISITS = {"problems": 50, "examples": 20}
UPDATES = 10  # of an offline stage: fewer hardly move a policy
DISPLACED = 0.2  # nats per token that chosen responses lose
SAFE_EPSILON = 1e-4  # of Adam, as the paper has it for verifiable tasks


# Reporting


def say(
    session: Session, name: str, step: int, alerts: Iterable[Warned], warnings: list[Warned]
) -> None:
    """Show the alerts whose cause is not yet in `warnings`, and add them. All processes call it."""
    for alert in alerts:
        if alert.cause in {warning.cause for warning in warnings}:
            continue
        text = f"{name}{f', step {step}' if step else ''}: {alert.text}"
        warnings.append(Warned(alert.cause, text))
        session.tracker.warn(name, step, alert.cause, text)


def report(trainer: Trainer, alerts: Iterable[Warned]) -> None:
    """Show alerts at a Trainer's step; its checkpoints store those already shown."""
    say(trainer.session, trainer.name, trainer.step, alerts, trainer.extra_state.warnings)


def watch(
    trainer: Trainer,
    stage: Online,
    metrics: Mapping[str, float],
    cause: Callable[[], Cause],
) -> None:
    """Add a step's metrics to the series of `WATCHED`, and warn of problems.

    Call it once per step, after the update. cause: returns that of most responses of the batch.
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
    if not stage.samples:
        limit = None  # unknown for a dump
    report(trainer, [*collapse(series, stage), *sampled(latest, limit, cause)])


def position_issues(
    session: Session,
    setting: str,
    sampling: Sampling | None = None,
    pairs: Iterable[tuple[Sized, Sized]] = (),
) -> list[Issue]:
    """Apply `beyond_positions` to a stage. sampling: of its responses; pairs: prompts and responses
    from elsewhere."""
    lengths = [(len(prompt), len(response)) for prompt, response in pairs]
    if sampling is not None:
        lengths.append((max(session.problems.prompt_lengths, default=0), sampling.max_new_tokens))
    # A model that begins with random parameters was trained on no positions.
    shape = None if session.model_folder is None else session.model_config
    return beyond_positions(setting, lengths, shape)


# Rules


def unclosed(setting: str, what: str, count: int, of: int) -> list[Issue]:
    """Warn of training texts that leave a thought open: a policy that learns them writes no answer
    that a reward reads."""
    if not count:
        return []
    text = (
        f"has {count} of {of} {what} that leave a thought open: they lack </think>, and responses "
        "like them are graded as without an answer"
    )
    remedy = "use whole thoughts, or tokenizer.enable_thinking=False if the template supports it"
    return [warning(setting, text, remedy)]


def write_example(session: Session, head: str, parts: Mapping[str, np.ndarray]) -> str:
    """Format an example exactly as it is trained on, with special tokens. parts: name -> token ids,
    [T] int32."""
    lines = [head]
    for part, ids in parts.items():
        text = shortened(session.tokenizer.decode_raw(ids), 1000)
        lines += [f"{part}, {len(ids)} tokens:", *(f"| {line}" for line in text.splitlines())]
    return "\n  ".join(lines)


def too_few(setting: str, what: str, count: int, batch: int, batches: int) -> list[Issue]:
    """Warn if this many batches draw from too few problems or examples. setting: of the batch
    size."""
    visits = batches * batch / count
    if not batches or (count >= batch and visits <= MOST_VISITS[what]):
        return []
    text = (
        f"is {batch}, and there are {count} {what} for {batches} batches: each is drawn "
        f"{visits:.0f} times{', some of them twice in a batch' if count < batch else ''}"
    )
    return [warning(setting, text, f"lower it or steps, or give more {what}")]


def beyond_positions(
    setting: str, lengths: Iterable[tuple[int, int]], shape: ModelConfig | None
) -> list[Issue]:
    """Report a sequence that is longer than the model supports. lengths: the most tokens of prompts
    and their responses. shape: of the model, None: no limit.

    Rotary embeddings extend beyond the limit without an error, but answers get worse.
    """
    prompt, response = max(lengths, key=sum, default=(0, 0))
    total = prompt + response
    if shape is None or shape.positions is None or total <= shape.positions:
        return []
    text = (
        f"makes {prompt:,} + {response:,} = {total:,} tokens of prompt and response, but the model "
    )
    remedy = "lower it or data.max_prompt_length, or use a model with a longer context"
    if isinstance(shape.rope_scaling, LongRope):
        text += (
            f"(rope type longrope) is supported for sequences of at most {shape.positions:,} "
            "(original_max_position_embeddings in its config.json): longer ones have other "
            "frequencies at all positions"
        )
        return [error(setting, text, remedy)]
    text += (
        f"supports {shape.positions:,} (max_position_embeddings in its config.json): beyond "
        "these its answers get worse"
    )
    return [warning(setting, text, f"{remedy}, or the rope_scaling that its authors recommend")]


def few_updates(updates: int, batch: int, pairs: int) -> str:
    """Warn in words of an offline stage with too few updates to change a policy, "" for enough."""
    if updates >= UPDATES:
        return ""
    return (
        f"{counted(updates, 'update')} of {counted(batch, 'pair')} ({pairs:,} in all), too few to "
        "change a policy much"
    )


def few_pairs(counts: Mapping[str, int], cause: Cause) -> list[Warned]:
    """Warn if few of a collect stage's prompts have a better and a worse response. counts: those of
    its manifest. cause: of most responses."""
    prompts, mixed = counts["prompts"], counts["mixed"]
    if mixed >= MIXED * prompts:
        return []
    fates = {
        "all_incorrect": "all wrong",
        "all_correct": "all correct",
        "all_equal": "all of one reward",
    }
    fates |= {"unscorable": "not graded", "outside_window": "outside the window of pass rates"}
    why = ", ".join(f"{counts[fate]} {words}" for fate, words in fates.items() if counts.get(fate))
    text = (
        f"{mixed} of {prompts} prompts have a better and a worse response ({why}), so there are "
        f"{counts['pairs']} pairs: {cause.symptom}. To try: {cause.remedy}"
    )
    return [Warned("signal", text)]


def sampled(
    shares: Mapping[str, float],
    limit: int | None,
    cause: Callable[[], Cause],
    whose: str = "its responses",
) -> list[Warned]:
    """Warn of faulty responses of a policy, by their shares under the names of `WATCHED`; missing
    ones give no warning. limit: the max_new_tokens of their sampling, None if unknown. cause:
    returns that of most responses. whose: for the message."""
    alerts = []
    if limit is not None and (cut := shares.get("completions/clipped_ratio", 0.0)) > CUT:
        text = (
            f"{cut:.0%} of {whose} are cut at max_new_tokens, {limit}, before their end. To try: "
            "a larger sampling.max_new_tokens, the template that the model was trained with "
            "(tokenizer.chat, tokenizer.prompt_template), SFT on responses that end"
        )
        alerts.append(Warned("cut", text))
    unscorable = shares.get("verdicts/unscorable", 0.0)
    timeout = shares.get("verdicts/timeout", 0.0)
    if unscorable + timeout > UNGRADED:
        text = (
            f"{unscorable + timeout:.0%} of {whose} could not be graded ({unscorable:.0%} "
            f"unscorable, {timeout:.0%} timeouts, which count as wrong). To try: check the "
            "reference answers and samples/, a larger reward.cpu_seconds"
        )
        alerts.append(Warned("ungraded", text))
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
        alerts.append(Warned("signal", text))
    elif why.verdict is Verdict.NO_ANSWER:
        text = f"of {whose}, {why.symptom}. To try: {why.remedy}"
        alerts.append(Warned("no_answer", text))
    return alerts


def chosen_logps_fell(change: float, stage: Offline) -> list[Warned]:
    """Warn if an offline stage has made even the chosen responses much less likely. This is
    likelihood displacement (arXiv 2410.08847). change: mean over pairs of their log-probability,
    after minus before, in nats per token."""
    if not change < -DISPLACED:
        return []
    text = (
        f"the chosen responses have lost {-change:.2f} nats per token, too: other responses gain "
        f"this probability (arXiv 2410.08847). To try: a larger beta (now {stage.beta:g}), "
        f"a smaller optimizer.learning_rate (now {stage.optimizer.learning_rate:g}), fewer epochs, "
        "pairs of the policy's own recent responses"
    )
    return [Warned("displaced", text)]


def collapse(series: Mapping[str, Sequence[float]], stage: Online) -> list[Warned]:
    """Warn of collapsed series of `WATCHED` metrics, by the medians of their first and last
    `WINDOW` values. The causes are "entropy" and "length".

    Values that are not finite do not count; a series of fewer than two windows is not judged. The
    reward has not risen if its median is known not to be above that at the start.
    """
    ends = {metric: _ends(series.get(metric, ())) for metric in WATCHED}
    risen = not ends["reward"][1] <= ends["reward"][0]
    alerts = []
    for cause, (metric, without_gain, anyway) in FALLS.items():
        first, last = ends[metric]
        if last < first * (anyway if risen else without_gain):
            alerts.append(_collapsed(cause, first, last, stage))
    return alerts


def _ends(values: Sequence[float]) -> tuple[float, float]:
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2 * WINDOW:
        return math.nan, math.nan
    return statistics.median(finite[:WINDOW]), statistics.median(finite[-WINDOW:])


def _collapsed(cause: str, first: float, last: float, stage: Online) -> Warned:
    share = f"{last / first:.0%} of its first value" if first else ""
    what = {
        "entropy": f"the entropy of its samples has collapsed to {last:.3g} nats per token, {share}",
        "length": f"the length of its samples has collapsed to {last:.4g} tokens, {share}",
    }[cause]
    text = f"{what}. To try (arXiv 2506.21495): {'; '.join(remedies(cause, stage))}"
    return Warned(cause, text)


def remedies(cause: str, stage: Online) -> list[str]:
    """List remedies against a collapse that the paper found or tried, and the stage does not use
    yet; never empty.

    Reference synchronisation prevents the collapse of length in online DPO on maths (figures 2 and
    7). A larger epsilon prevents sudden divergence of DPO (section 5.1). Long windows raise the
    risk (section 4.2). Its entropy term did not keep entropy in every run (figure 6).
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
