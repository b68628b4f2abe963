"""Write a policy's answers to a file of prompts, in the form that AlpacaEval or Arena-Hard reads.

Answers are drawn in parts, kept in WORKDIR/outputs as Parquet, like all rollouts: run again, the
command goes on where it was stopped. The randomness is named by prompt, so that parts and other
prompts do not change an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import PurePosixPath

from etils import epath

from g2d_jax import commands
from g2d_jax.config import places
from g2d_jax.data.open_ended import (
    ENDINGS,
    Format,
    Question,
    alpaca_json,
    arena_jsonl,
    read_questions,
)
from g2d_jax.data.splits import problem_id
from g2d_jax.models.decoder import Decoder
from g2d_jax.records import Problem, Request, Rollout, SamplingParams, Score, ScoredRollout, Verdict
from g2d_jax.runtime import storage
from g2d_jax.runtime.tables import read_rollouts, safe_text, write_rollouts
from g2d_jax.session import kept_inputs
from g2d_jax.session.policies import load_policy
from g2d_jax.session.session import Session

PART = 128
"""Prompts written, and resumed, at a time."""


def write_outputs(
    workdir: storage.PathLike,
    form: Format,
    prompts: str,
    output: str,
    *,
    policy: str | None = None,
    name: str | None = None,
    temperature: float = 0.6,
    top_p: float = 0.9,
    max_new_tokens: int = 2048,
) -> epath.Path:
    """Write one answer of a run's policy to each prompt; return the file.

    name: the model's name in it; default: the file's own name. policy: default: see
    `commands.last_policy`. Raises ValueError for prompts that cannot be read or encoded, and for an
    output that exists already.
    """
    policy = policy and places.decided(policy, "policy", places.here())
    target, name = _target(form, output, name)
    questions = read_questions(prompts, form)
    with commands.opened(workdir) as session:
        chosen = policy or commands.last_policy(session.config)
        kept_inputs.verify(session, chosen)
        params = SamplingParams(
            max_new_tokens, temperature, top_p, stop_ids=session.tokenizer.eos_ids
        )
        rows = _answers(session, chosen, questions, params, prompts)
        texts = [row.text for row in rows]
        if form == "alpaca_eval":
            content = alpaca_json(name, questions, texts)
        else:
            content = arena_jsonl(name, questions, texts, [row.rollout.length for row in rows])
        storage.write_bytes(target, content)
        cut = sum(row.rollout.stop_reason == "length" for row in rows)
        session.tracker.say(
            f"{len(rows)} answers of {chosen}, {cut} of them cut at {max_new_tokens} tokens, "
            f"under the name {name}"
        )
    return target


def _target(form: Format, output: str, name: str | None) -> tuple[epath.Path, str]:
    """Return the file to write and the model's name. Raises ValueError where the tool would not
    read it."""
    target = epath.Path(output)
    if form not in ENDINGS:
        raise ValueError(f"unknown format {form!r}: choose {' or '.join(ENDINGS)}")
    if target.suffix != ENDINGS[form]:
        raise ValueError(f"{output}: a file of {form} ends in {ENDINGS[form]}")
    if target.exists():
        raise ValueError(f"{output} is there already: choose another --output, or remove it")
    stem = PurePosixPath(output).stem
    if form == "arena_hard" and name not in (None, stem):
        raise ValueError(
            f"Arena-Hard goes by the file's name: call it {name}.jsonl, or leave --name out"
        )
    return target, name or stem


def _answers(
    session: Session,
    policy: str,
    questions: Sequence[Question],
    params: SamplingParams,
    prompts: str,
) -> list[ScoredRollout]:
    """Return the answers in the order of the questions, read back or sampled."""
    requests = _requests(session, questions, params, prompts)
    settings = asdict(params)
    del settings["stop"]  # always empty here; folders of earlier versions are named without it
    identity = [[commands.version(session, policy), session.tokenizer.fingerprint, settings]]
    identity += [[r.problem_id, r.visit, r.prompt_ids] for r in requests]
    folder = session.workdir / "outputs" / f"answers-{storage.fingerprint(identity)}"
    rows: list[ScoredRollout] = []
    view: Decoder | None = None
    with session.tracker.progress(f"answers of {policy}", len(requests)) as bar:
        for start in range(0, len(requests), PART):
            file = folder / f"part-{start // PART:05d}.parquet"
            before = file.exists()
            if not before:
                view = view or session.sampling.sampler.to_sampler_params(
                    load_policy(session, policy)
                )
                write_rollouts(file, _drawn(session, policy, view, requests[start : start + PART]))
            rows += read_rollouts(file)
            show = bar.skip if before else bar.update
            show(len(rows))
    return rows


def _drawn(
    session: Session, policy: str, view: Decoder, requests: Sequence[Request]
) -> list[ScoredRollout]:
    """Draw responses in the order of the requests. They stay unscored: scoring is those tools'
    part."""
    place = {(request.problem_id, request.visit): i for i, request in enumerate(requests)}
    drawn: list[Rollout] = sorted(
        session.sampling.sampler.generate(view, requests, "outputs"),
        key=lambda r: place[r.problem_id, r.visit],
    )
    unscored = Score(None, Verdict.UNSCORABLE)
    rows = []
    for rollout in drawn:
        text = safe_text(session.tokenizer.decode(rollout.token_ids))
        rows.append(ScoredRollout(rollout, text, unscored, policy))
    return rows


def _requests(
    session: Session, questions: Sequence[Question], params: SamplingParams, prompts: str
) -> list[Request]:
    """Build a request for each question; a repeated prompt is drawn with other randomness, as its
    next visit."""
    visits: dict[str, int] = {}
    requests = []
    for number, question in enumerate(questions, 1):
        # a chat: the run's own prompt template has no part in it
        message = {
            "role": "user",
            "content": question.text,
        }
        problem = Problem(problem_id((message,)), (message,))
        try:
            ids = session.tokenizer.encode_prompt(problem)
        except ValueError as error:
            raise ValueError(f"{prompts}, prompt {number}: {error}") from error
        visit = visits[problem.id] = visits.get(problem.id, -1) + 1
        requests.append(Request(problem.id, ids, params, visit=visit))
    return requests
