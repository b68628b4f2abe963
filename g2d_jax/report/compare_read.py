"""Read a comparison from the folders of runs, or of a study's points.

Problems are the same where their ids are, which are hashes of their texts. Everything about players is measured over
the common problems, from the completions on disk, not taken from what each run says of all of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

import numpy as np
from etils import epath

from g2d_jax import accounting
from g2d_jax.canonical import differences, own_differences
from g2d_jax.records import ScoredRollout
from g2d_jax.report import format as fmt
from g2d_jax.report import summary
from g2d_jax.report.compare import Comparison, Player, Side
from g2d_jax.report.run import Run, Stage, read_run
from g2d_jax.storage import PathLike, read_json
from g2d_jax.tables import read_rollouts
from g2d_jax.workdir import absolute

POLICIES = ("ends", "all")
"""Which policies of an evaluation take part: the last one with the first for context, or every one."""

SAMPLING = ("temperature", "top_p", "top_k", "max_new_tokens", "num_generations")
"""Settings of an evaluation without which accuracies are not of the same thing."""


def read_comparison(workdirs: Sequence[PathLike], *, policies: str = "ends") -> Comparison:
    """Read runs, or points of a study, for a comparison; policies: one of `POLICIES`.

    Of each run its last finished evaluation counts: of the first run whichever that is, of the others the last on the
    same split if there is one. Raises ValueError for fewer than two runs, one given twice, a folder that is no run, a
    run without a finished evaluation or without its completions, and where no problem is common.
    """
    if policies not in POLICIES:
        raise ValueError(f"policies must be {' or '.join(POLICIES)}, got {policies!r}")
    sides = _sides(workdirs)
    chosen, left_out = _distinct([(side, policy) for side in sides for policy in _chosen(side, policies)])
    found = [_measure(_rows(side, policy)) for side, policy in chosen]
    common = sorted(set.intersection(*(set(one) for one in found)))
    if not common:
        splits = ", ".join(f"{side.mark} ({side.label}) {len(side.problems):,} of {side.split}" for side in sides)
        raise ValueError(f"the runs have no problem in common, they cannot be compared; evaluated are {splits}")
    players = [_player(side, policy, one, common) for (side, policy), one in zip(chosen, found, strict=True)]
    for player in players:
        if not player.accuracy.problems:
            raise ValueError(
                f"none of the {len(common):,} common problems is scored for {player.name} as right or wrong: "
                "accuracies are compared, not rewards"
            )
    settings = [(side, _changes(sides[0].run, side.run)) for side in sides[1:]]
    return Comparison(sides, players, common, list(_warnings(sides, common)), settings, left_out)


def completions(player: Player, wanted: Set[str]) -> dict[str, list[ScoredRollout]]:
    """A player's completions of some problems by id, in the order of their samples. Raises ValueError if damaged."""
    found: dict[str, list[ScoredRollout]] = {}
    for row in sorted(_rows(player.side, player.policy), key=lambda row: (row.rollout.visit, row.rollout.sample)):
        if row.rollout.problem_id in wanted:
            found.setdefault(row.rollout.problem_id, []).append(row)
    return found


def _sides(workdirs: Sequence[PathLike]) -> list[Side]:
    roots = [absolute(workdir) for workdir in workdirs]
    if len(roots) < 2:
        raise ValueError(f"a comparison takes two runs or more, got {len(roots)}")
    if twice := next((root for i, root in enumerate(roots) if root in roots[:i]), None):
        raise ValueError(f"{twice} is given twice: compare runs that differ")
    names = [root.name for root in roots]
    sides: list[Side] = []
    for i, root in enumerate(roots):
        label = names[i] if names.count(names[i]) == 1 else str(root)
        sides.append(_side(_mark(i), label, read_run(root), sides[0].split if sides else ""))
    return sides


def _mark(number: int) -> str:
    """A … Z, AA … as spreadsheets count."""
    rest, letter = divmod(number, len(ascii_uppercase))
    return (_mark(rest - 1) if rest else "") + ascii_uppercase[letter]


def _side(mark: str, label: str, run: Run, split: str) -> Side:
    done = [stage for stage in run.evaluations if summary.policies(stage.manifest or {})]
    if not done:
        raise ValueError(f"{run.workdir} has no finished evaluation: let its evaluate stage finish first")
    stage = next((one for one in done[::-1] if split and _told(one)["split"] == split), done[-1])
    told = _told(stage)
    return Side(mark, label, run, stage, str(told["split"]), told, stage.problems())


def _told(stage: Stage) -> dict[str, Any]:
    """Split and sampling settings of an evaluation."""
    result = (stage.manifest or {})["result"]
    known = {**result["sampling"], "split": result["split"], "num_generations": result["samples"]}
    return {name: known[name] for name in ("split", *SAMPLING)}


def _names(side: Side) -> list[str]:
    """The policies evaluated, in order."""
    return list(dict.fromkeys(str(entry.get("name", "")) for entry in summary.policies(side.stage.manifest or {})))


def _chosen(side: Side, policies: str) -> list[str]:
    names = _names(side)
    return names if policies == "all" else list(dict.fromkeys((names[0], names[-1])))


def _distinct(chosen: Sequence[tuple[Side, str]]) -> tuple[list[tuple[Side, str]], list[tuple[str, str]]]:
    """Without those for context whose completions are the very file of one before; and which these are."""
    kept, left_out, files = [], [], set()
    for side, policy in chosen:
        file = absolute(_file(side, policy))
        if file in files and policy != _names(side)[-1]:
            left_out.append((side.mark, policy))
        else:
            kept.append((side, policy))
        files.add(file)
    return kept, left_out


def _rows(side: Side, policy: str) -> list[ScoredRollout]:
    return read_rollouts(_file(side, policy))


def _file(side: Side, policy: str) -> epath.Path:
    file = side.stage.rollouts_file(policy)
    if file is None:
        raise ValueError(f"{side.stage.folder} has no completions of {policy!r} any more: they cannot be compared")
    return file


@dataclass
class _Answers:
    """One problem's: correct as in `Player`, their tokens together and the sum of the tokens' entropies."""

    correct: list[float]
    tokens: int = 0
    nats: float = 0.0


def _measure(rows: Iterable[ScoredRollout]) -> dict[str, _Answers]:
    """By problem id."""
    found: dict[str, _Answers] = {}
    for row in rows:
        answers = found.setdefault(row.rollout.problem_id, _Answers([]))
        answers.correct.append(row.score.verdict.accuracy)
        answers.tokens += len(row.rollout.token_ids)
        answers.nats += float(row.rollout.entropies.sum(dtype=np.float64))
    return found


def _player(side: Side, policy: str, found: Mapping[str, _Answers], common: Sequence[str]) -> Player:
    answers = [found[problem] for problem in common]
    correct = np.full((len(common), max(len(one.correct) for one in answers)), np.nan)
    for i, one in enumerate(answers):
        correct[i, : len(one.correct)] = one.correct
    tokens, count = sum(one.tokens for one in answers), sum(len(one.correct) for one in answers)
    entries = summary.policies(side.stage.manifest or {})
    entry = next(one for one in entries if str(one.get("name", "")) == policy)
    steps, outside = _origin(policy, side.run)
    return Player(
        side=side,
        policy=policy,
        name=f"{side.mark}: {summary.policy_name(entry)}",
        correct=correct,
        length=tokens / count,
        entropy=sum(one.nats for one in answers) / tokens if tokens else math.nan,
        costs=_costs(policy, side.run),
        steps=steps,
        outside=outside,
        is_last=policy == _names(side)[-1],
    )


def _origin(policy: str, run: Run) -> tuple[float, str]:
    """The online steps of a run behind a policy, NaN not known, and the policy of elsewhere at the beginning."""
    stages, manifests = run.config.get("stages", {}), {stage.name: stage.manifest or {} for stage in run.stages}
    steps = 0.0
    for _ in range(len(stages) + 1):
        name, _, step = policy.partition("@")
        if name not in stages:
            if policy == "init":
                return steps, ""
            return (steps, policy) if policy.startswith(("run:", "hf:")) else (math.nan, "")
        if stages[name].get("kind") == "online":
            steps += float(step) if step.isdecimal() else fmt.number(manifests.get(name, {}), "counts", "steps")
        chosen = (
            str(manifests.get(name, {}).get("result", {}).get("policy", ""))
            if stages[name].get("kind") == "select"
            else ""
        )
        policy = chosen or str(stages[name].get("policy", ""))
    return math.nan, ""


def _costs(policy: str, run: Run) -> dict[str, float]:
    manifests = {stage.name: stage.manifest for stage in run.stages if stage.manifest is not None}
    return accounting.cost_of(policy, run.config["stages"], manifests, price_per_device_hour=summary.price(run))


def _changes(first: Run, other: Run) -> list[str]:
    """What differs in settings, functions given from Python included."""
    before, after = (read_json(run.workdir / "config.json").get("own", {}) for run in (first, other))
    return differences(first.config, other.config) + own_differences(before, after)


def _warnings(sides: Sequence[Side], common: Sequence[str]) -> Iterator[str]:
    for name in ("split", *SAMPLING):
        values = {side.mark: side.sampling[name] for side in sides}
        if len({str(value) for value in values.values()}) > 1:
            listed = ", ".join(f"{mark} {value}" for mark, value in values.items())
            yield f"The evaluations differ in {name}: {listed}. A difference in accuracy may come from this."
    known = [[side.problems.get(problem) for side in sides] for problem in common]
    different = sum(len({str(row.get("answer")) for row in rows if row}) > 1 for rows in known)
    if different:
        yield f"{different:,} of the common problems have other reference answers in one run than in another."
