"""The reasons why responses and demonstrations teach nothing: their commonest verdict, an example,
and a remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from g2d_jax.config import Reward, Task
from g2d_jax.records import Problem, ScoredRollout, Verdict
from g2d_jax.rewards.extract import RULES, answer_text, final_answer, in_form
from g2d_jax.runtime.terminal import shown

MOST = 0.5
"""The share of a task's responses above which a verdict is the cause."""

QUOTED = 80  # characters at the end of a response
EASIER = "easier problems, a stronger policy (SFT, more warm-up), more num_generations"
HARDER = "harder problems, an earlier checkpoint"
LONGER = "a larger sampling.max_new_tokens, SFT on responses that end"
OTHERS = "other rollouts, with several responses to a prompt"
NO_VALUE = {
    "verify": "check the reference answers: --dry-run shows how they are read",
    "model": "a larger reward.model.max_length, which longer texts exceed",
}
"""reward.function -> the remedy if it returns no number; your own function returned None."""


@dataclass(frozen=True)
class Cause:
    """A reason why responses teach nothing. symptom: a clause about most responses. remedy:
    settings to change. verdict: that of most responses, None without a majority."""

    symptom: str
    remedy: str
    verdict: Verdict | None = None


def cause_of(
    problems: Sequence[Problem],
    groups: Sequence[Sequence[ScoredRollout]],
    tasks: Mapping[str, Task],
    sampled: bool = True,
) -> Cause:
    """Return why responses teach little: the commonest verdict of a task, if most have it.

    groups: the responses to each of the problems; tasks: by name; sampled: by this run, not read
    from a file.
    """
    rows: dict[str, list[ScoredRollout]] = {}
    for problem, group in zip(problems, groups, strict=True):
        rows.setdefault(problem.task, []).extend(group)
    found = [_of_task(name, of_task, tasks) for name, of_task in rows.items() if of_task]
    known = [cause for cause in found if cause.verdict is not None]
    if not known:
        return Cause("no verdict has a majority", "more num_generations")
    if sampled or "reward." in known[0].remedy:
        return known[0]
    return Cause(known[0].symptom, OTHERS, known[0].verdict)


def unread(texts: Sequence[str], name: str, tasks: Mapping[str, Task]) -> Cause | None:
    """Return why a task's rule reads no answer in most demonstrations, None if it reads most of
    them."""
    reward = tasks[name].reward
    mute = [text for text in texts if final_answer(text, reward.answers) is None]
    if len(mute) <= MOST * len(texts):
        return None
    share = f"{len(mute) / len(texts):.0%} of the demonstrations"
    symptom, remedy = _no_answer(mute, share, reward, _prefix(name))
    return Cause(symptom, remedy, Verdict.NO_ANSWER)


def _prefix(name: str) -> str:
    """Return the prefix of a task's settings, "" for the main task."""
    return "" if name == "main" else f"tasks.{name}."


def _of_task(name: str, rows: Sequence[ScoredRollout], tasks: Mapping[str, Task]) -> Cause:
    verdicts = [row.score.verdict for row in rows]
    verdict = max(Verdict, key=verdicts.count)
    most = [row for row in rows if row.score.verdict is verdict]
    if len(most) <= MOST * len(rows):
        return Cause("", "")
    share = f"{len(most) / len(rows):.0%} of the responses"
    if len(tasks) > 1:
        share += f" of the task {name}"
    symptom, remedy = _words(verdict, most, share, tasks[name].reward, _prefix(name))
    cut = sum(row.rollout.stop_reason == "length" for row in most) > MOST * len(most)
    if cut and verdict in (Verdict.NO_ANSWER, Verdict.INCORRECT):
        symptom, remedy = f"{symptom}; most of these were cut at max_new_tokens", LONGER
    return Cause(symptom, remedy, verdict)


def _words(
    verdict: Verdict, most: Sequence[ScoredRollout], share: str, reward: Reward, prefix: str
) -> tuple[str, str]:
    """Return symptom and remedy of responses with one verdict."""
    match verdict:
        case Verdict.CORRECT:
            return f"{share} are correct", HARDER
        case Verdict.TIMEOUT:
            return f"grading {share} took too long", f"a larger {prefix}reward.cpu_seconds"
        case Verdict.UNSCORABLE:
            remedy = NO_VALUE.get(
                reward.function, f"numbers in place of None from {reward.function}"
            )
            return f"{share} could not be scored", remedy
        case Verdict.NO_ANSWER:
            return _no_answer([row.text for row in most], share, reward, prefix)
        case Verdict.INCORRECT:
            return _incorrect(most, share, reward, prefix)
        case Verdict.SCORED:
            return f"the reward ranks {share}", "a reward that differs more, more num_generations"


def _no_answer(most: Sequence[str], share: str, reward: Reward, prefix: str) -> tuple[str, str]:
    """Return symptom and remedy of texts in which the rule finds no answer."""
    symptom = f"{prefix}reward.answers={reward.answers!r} finds no answer in {share}"
    symptom += f", such as {_end(most[0])}"
    if sum(answer_text(text) is None for text in most) > MOST * len(most):
        return f"{symptom}: <think> is never closed", f"tokenizer.enable_thinking=False, {LONGER}"
    form = f"ask for {in_form('x', reward.answers)} in the prompt, and show it in the SFT data"
    for rule in RULES:
        read = sum(final_answer(text, rule) is not None for text in most)
        if rule != reward.answers and read > MOST * len(most):
            setting = f"{prefix}reward.answers={rule!r}"
            return symptom, f"{setting}, which reads {read / len(most):.0%} of these; or {form}"
    return symptom, form


def _incorrect(
    most: Sequence[ScoredRollout], share: str, reward: Reward, prefix: str
) -> tuple[str, str]:
    """Return symptom and remedy of responses that were graded as wrong."""
    symptom = f"{share} are incorrect, such as {_end(most[0].text)}"
    values = [row.score.reward for row in most if row.score.reward is not None]
    if not values or min(values) == max(values):
        return symptom, EASIER
    span = f"rewards go from {min(values):g} to {max(values):g}"
    above = f"correct is above {prefix}reward.correct_above={reward.correct_above:g}"
    return f"{symptom}; {span}, and {above}", f"{EASIER}, another {prefix}reward.correct_above"


def _end(text: str) -> str:
    """Return the end of a response, where its answer is, in quotation marks."""
    return repr(shown(text.strip()[-QUOTED:]))
