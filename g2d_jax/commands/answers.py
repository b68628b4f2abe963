"""Show answers of a policy of a run, with their rewards."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from rich.padding import Padding
from rich.text import Text

from g2d_jax.commands.opening import joined, last_policy, not_at_hand, opened
from g2d_jax.config import Config, Engine, Sampling, places
from g2d_jax.config.graph import plan
from g2d_jax.data.splits import problem_id
from g2d_jax.data.stops import cut
from g2d_jax.models.decoder import Decoder
from g2d_jax.records import Problem, Request, Rollout, SamplingParams, Verdict, pick
from g2d_jax.report.samples import conversation
from g2d_jax.runtime import processes, storage
from g2d_jax.runtime.terminal import clean
from g2d_jax.runtime.tracking import Tracker
from g2d_jax.session import inputs
from g2d_jax.session.policies import load_policy
from g2d_jax.session.problems import READ_FOR
from g2d_jax.session.session import Session
from g2d_jax.stages.alerts import position_issues
from g2d_jax.stages.run_issues import tell


def sample(
    workdir: storage.PathLike,
    *,
    policy: str | None = None,
    prompts: str | Iterable[str] | None = None,
    count: int = 4,
    temperature: float = 1.0,
) -> list[str]:
    """Show, and return, a policy's answers: `count` to each prompt (one at temperature 0), or one
    to each of `count` test problems.

    prompts: a text, or an iterator that may wait for typed input: each is answered before the next
    is read. Answers to test problems are shown with their reward. A terminal shows each problem
    above its answers; a file has a Markdown table of them. All processes call it together, with the
    same prompts; the leader shows the answers.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    policy = policy and places.decided(policy, "policy", places.here())
    needs = ["model", "tokenizer"]
    if prompts is None:
        needs += ["data", "tasks"]
    request = {"policy": policy, "count": count, "temperature": temperature}
    if isinstance(prompts, str):
        request["prompt"] = prompts
    with (
        joined(workdir, "sample", request) as config,
        # The sampler is used, even if the run used a server.
        opened(
            workdir,
            replace(config, engine=Engine()),
            needs=needs,
            splits=READ_FOR["test"] if prompts is None else (),
            samples=True,
        ) as session,
    ):
        chosen = policy or last_policy(session.config)
        settings = first_sampling(session.config)
        if prompts is None and not session.problems.by_split["test"]:
            raise ValueError(
                "the run has no test problems (data.test names none): give a problem with --prompt"
            )
        split = "test" if prompts is None else None
        inputs.verify(session, *inputs.scored_by(session.config, split))
        params = settings.params(session.sampling.stop_ids, temperature=temperature)
        view = session.sampling.sampler.to_sampler_params(load_policy(session, chosen))
        if prompts is None:
            return _answers(
                session, chosen, view, params, session.problems.by_split["test"][:count], 1
            )
        if temperature == 0:
            count = 1  # greedy answers are all the same
        texts = []
        for prompt in [prompts] if isinstance(prompts, str) else prompts:
            problem = Problem(problem_id(prompt), prompt)
            try:
                texts += _answers(session, chosen, view, params, [problem], count)
            except ValueError as error:
                # The next of several typed prompts may be accepted.
                if isinstance(prompts, str):
                    raise
                session.tracker.say(str(error))
        return texts


def first_sampling(config: Config) -> Sampling:
    """Return the sampling settings of the run's first stage that samples. Raises ValueError if none does."""
    for name in plan(config).order:
        for sampling in config.stages[name].samplings():
            return sampling
    raise ValueError("the run has no stage with sampling settings")


def _answers(
    session: Session,
    policy: str,
    view: Decoder,
    params: SamplingParams,
    problems: Sequence[Problem],
    samples: int,
) -> list[str]:
    """Show, and return, `samples` answers to each problem."""
    requests = [
        Request(p.id, session.tokenizer.encode_prompt(p), params, num_samples=samples)
        for p in problems
    ]
    most = range(params.max_new_tokens)
    pairs = [(request.prompt_ids, most) for request in requests]
    tell(session.tracker, position_issues(session, "--max-new-tokens", pairs=pairs))
    rollouts = _of_all(session.sampling.sampler.generate(view, requests, "sample"))
    place = {problem.id: i for i, problem in enumerate(problems)}
    rollouts.sort(key=lambda r: (place[r.problem_id], r.sample))
    repeated = [problems[place[rollout.problem_id]] for rollout in rollouts]
    texts = [cut(session.tokenizer.decode(rollout.token_ids), params.stop) for rollout in rollouts]
    rewards = _rewards(session, repeated, texts, [rollout.token_ids for rollout in rollouts])
    shown: dict[str, list[tuple[Rollout, str, str]]] = {}
    for rollout, text, reward in zip(rollouts, texts, rewards, strict=True):
        shown.setdefault(rollout.problem_id, []).append((rollout, text, reward))
    session.tracker.say_once(f"policy {policy}")
    for problem in problems:
        _print_template(session, problem)
        show = _show_on_terminal if session.tracker.screen.interactive else _show_as_table
        show(session.tracker, problem, shown[problem.id])
    return texts


def _of_all(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """Return the rollouts of all processes, without their prompts and entropies."""
    own = []
    for rollout in rollouts:
        tokens, logprobs = rollout.token_ids.tolist(), rollout.logprobs.tolist()
        own.append((rollout.problem_id, rollout.sample, tokens, logprobs, rollout.stop_reason))
    nothing = np.zeros(0, np.float32)
    every = []
    for name, sample, tokens, logprobs, reason in itertools.chain(*processes.gather(own)):
        ids, sampled = np.array(tokens, np.int32), np.array(logprobs, np.float32)
        every.append(Rollout(name, 0, sample, ids[:0], ids, sampled, nothing, reason))
    return every


def _print_template(session: Session, problem: Problem) -> None:
    """Print once the text around each problem in its prompt, if any."""
    if not isinstance(problem.prompt, str):
        return
    template = "{problem}".join(session.tokenizer.template.frame())
    if template != "{problem}":
        session.tracker.say_once(f"prompt of each problem: {clean(template, newlines=False)}")


def _show_as_table(
    tracker: Tracker, problem: Problem, answers: Sequence[tuple[Rollout, str, str]]
) -> None:
    """Show the answers to a problem, and their rewards, as a Markdown table below it."""
    rows = []
    for rollout, text, reward in answers:
        cells = [text, problem.answer or "", reward, rollout.stop_reason, _mean_logprob(rollout)]
        rows.append([cell.replace("|", r"\|") for cell in cells])
    tracker.say("")
    tracker.say(f"problem: {clean(conversation(problem.prompt), newlines=False)}")
    tracker.table("", ["response", "reference", "reward", "stop", "mean log-prob"], rows)


def _show_on_terminal(
    tracker: Tracker, problem: Problem, answers: Sequence[tuple[Rollout, str, str]]
) -> None:
    """Show the answers to a problem, and their rewards, each over the terminal's whole width."""
    tracker.say("")
    tracker.screen.console.print(Text(clean(conversation(problem.prompt)), "bold"))
    if problem.answer is not None:
        tracker.say(f"reference answer: {problem.answer}")
    for rollout, text, reward in answers:
        facts = [reward] if reward else []
        facts.append(f"{len(rollout.token_ids):,} tokens")
        if rollout.stop_reason == "length":
            facts.append("cut at the limit")
        facts.append(f"mean log-prob {_mean_logprob(rollout)}")
        tracker.say("")
        tracker.say(" · ".join(facts), "dim")
        # Indented, to set even wrapped lines of an answer apart from lines about it.
        tracker.screen.console.print(Padding(Text(clean(text)), (0, 0, 0, 2)))


def _mean_logprob(rollout: Rollout) -> str:
    return f"{float(np.mean(rollout.logprobs)):.2f}"


def _rewards(
    session: Session,
    problems: Sequence[Problem],
    texts: Sequence[str],
    token_ids: Sequence[np.ndarray],
) -> list[str]:
    """Return the reward and verdict of each response; "" without a reference answer, for a reward
    model, and for a function that is not available."""
    rewards = session.config.rewards
    if session.reward is not_at_hand:
        del rewards["main"]
    places = []
    for i, problem in enumerate(problems):
        is_cheap = problem.task in rewards and rewards[problem.task].function != "model"
        if problem.answer is not None and is_cheap:
            places.append(i)
    shown = [""] * len(problems)
    try:
        scores = session.scorer(
            pick(problems, places), pick(texts, places), pick(token_ids, places)
        )
    # Raised by the user's own function, here or in another process: the answers can still be shown.
    except (ValueError, processes.PeerFailed) as error:
        session.tracker.say(f"no rewards: {error}")
        return shown
    for i, score in zip(places, scores, strict=True):
        parts = []
        if score.reward is not None:
            parts.append(f"{score.reward:g}")
        if score.verdict is not Verdict.SCORED:
            parts.append(score.verdict.value)
        shown[i] = " ".join(parts)
    return shown
