"""Why sampled responses teach nothing: their commonest verdict, a response that shows it, and a
remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from g2d_jax.config import Task
from g2d_jax.records import Problem, ScoredRollout, Verdict
from g2d_jax.rewards.extract import RULES, final_answer, in_form
from g2d_jax.runtime.terminal import shown

MOST = 0.5
"""The share of responses that makes a verdict the cause."""

QUOTED = 80  # characters at the end of a response
EASIER = "easier problems, a stronger policy (SFT, more warm-up), more num_generations"
HARDER = "harder problems, difficulty.max_pass_rate, an earlier checkpoint"
LONGER = "a larger sampling.max_new_tokens, SFT on responses that end"
REFERENCES = "look at the reference answers: --dry-run shows how they are read"


Response = tuple[Problem, ScoredRollout]


@dataclass(frozen=True)
class Cause:
    """symptom: what most responses have in common, a clause. remedy: settings to change."""

    symptom: str
    remedy: str


NOTHING_SAMPLED = Cause("no response was sampled", "more prompts")


def cause_of(
    problems: Sequence[Problem],
    groups: Sequence[Sequence[ScoredRollout]],
    tasks: Mapping[str, Task],
) -> Cause:
    """Return the first cause that more than half of the responses share. groups: the responses to
    each of the problems; tasks: by name."""
    by_verdict: dict[Verdict, list[Response]] = {verdict: [] for verdict in Verdict}
    for problem, group in zip(problems, groups, strict=True):
        for row in group:
            by_verdict[row.score.verdict].append((problem, row))
    count = sum(map(len, by_verdict.values()))
    verdict, most = max(by_verdict.items(), key=lambda item: len(item[1]))
    if not count:
        return NOTHING_SAMPLED
    if len(most) <= MOST * count:
        return Cause("the verdicts are mixed", "more num_generations")
    share = f"{len(most) / count:.0%} of the responses"
    cut = sum(row.rollout.stop_reason == "length" for _, row in most) > MOST * len(most)
    if verdict is Verdict.CORRECT:
        return Cause(f"{share} are correct", HARDER)
    if verdict in (Verdict.UNSCORABLE, Verdict.TIMEOUT):
        return Cause(f"{share} could not be graded ({verdict})", REFERENCES)
    if verdict is Verdict.NO_ANSWER:
        symptom, remedy = _no_answer(most, share, tasks)
    elif verdict is Verdict.INCORRECT:
        symptom, remedy = _incorrect(most, share, tasks)
    else:
        symptom, remedy = "the responses to a prompt get equal rewards", EASIER
    if cut:
        return Cause(f"{symptom}; most of these were cut at max_new_tokens", LONGER)
    return Cause(symptom, remedy)


def _no_answer(
    responses: Sequence[Response], share: str, tasks: Mapping[str, Task]
) -> tuple[str, str]:
    """Return the symptom and remedy of responses without an answer for the rule."""
    problem, row = responses[0]
    rule = tasks[problem.task].reward.answers
    symptom = f"reward.answers={rule!r} finds no answer in {share}, such as {_end(row)}"
    remedy = f"ask for {in_form('x', rule)} in the prompt, and show it in the SFT data"
    for other in RULES:
        answer = final_answer(row.text, other)
        if answer:
            return symptom, f"reward.answers={other!r}, which reads {answer!r} there; or {remedy}"
    return symptom, remedy


def _incorrect(
    responses: Sequence[Response], share: str, tasks: Mapping[str, Task]
) -> tuple[str, str]:
    """Return the symptom and remedy of responses that were graded as wrong."""
    symptom = f"{share} are incorrect, such as {_end(responses[0][1])}"
    problem, row = max(responses, key=lambda response: response[1].score.reward or 0.0)
    if not row.score.reward or row.score.reward <= 0:
        return symptom, EASIER
    above = tasks[problem.task].reward.correct_above
    partial = f"rewards go up to {row.score.reward:g}, and correct is above {above:g}"
    return f"{symptom}; {partial} (reward.correct_above)", f"a lower correct_above, {EASIER}"


def _end(row: ScoredRollout) -> str:
    """Return the end of a response, where its answer is, in quotation marks."""
    return repr(shown(row.text.strip()[-QUOTED:]))
