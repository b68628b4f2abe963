"""Reference answers that the verifier cannot read: no response but the same text is ever right, so they are told."""

from __future__ import annotations

from g2d_jax.config import SamplingStage
from g2d_jax.records import Problem
from g2d_jax.stages.runtime import Runtime

SHOWN = 3  # of a split's
MOST_SHOWN = 80  # characters of an answer
MOST, SECONDS = 256, 30.0  # problems of a split that are looked at when a run starts, and seconds for all of them
MOST_DRY, SECONDS_DRY = 2000, 120.0  # in a dry run, which nothing waits for


def warn(runtime: Runtime, most: int = MOST, seconds: float = SECONDS) -> None:
    """Say how many reference answers of each split cannot be read, and show the first.

    most: problems of a split that are looked at, evenly spread. seconds: after which what workers have not read is left
    out of the count. Nothing is said of problems that the verifier does not score, or where no stage samples.
    """
    if not any(isinstance(stage, SamplingStage) for stage in runtime.config.stages.values()):
        return
    samples = {split: problems[:: -(-len(problems) // most) or 1] for split, problems in runtime.problems.items()}
    told = runtime.scorer.can_be_read([problem for sample in samples.values() for problem in sample], seconds)
    for split, sample in samples.items():
        read = [told[problem.id] for problem in sample if told.get(problem.id) is not None]
        unread = [problem for problem in sample if told.get(problem.id) is False]
        if unread:
            runtime.tracker.say(_message(split, unread, len(read), len(runtime.problems[split])), "yellow")


def _message(split: str, unread: list[Problem], looked_at: int, problems: int) -> str:
    among = f"{looked_at} looked at, of {problems}" if looked_at < problems else f"{problems}"
    first = "".join(f"\n  {problem.answer!r:.{MOST_SHOWN}} (problem {problem.id})" for problem in unread[:SHOWN])
    return (
        f"WARNING: data.{split}: the verifier cannot read {len(unread)} of the reference answers ({among}). Only the "
        "same text can equal them, so whatever a policy answers there is wrong or cannot be scored. The first:"
        f"{first}\n  To try: other answers for them, data.*.fields to map another column, a reward function of your "
        "own (docs/grading.md)"
    )
