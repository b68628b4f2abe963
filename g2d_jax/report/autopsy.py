"""The autopsy of a finished GRPO run from the rollouts it left behind: what each step taught, and what is left in them.

dumps ─► groups by step ─► informativeness ─► where the learning curve flattens ─► steps to build pairs from
                                                                                     └─► rollouts.jsonl, dpo.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from g2d_jax.config import Collect
from g2d_jax.data.dumps import DumpRow, dump_files, read_dump
from g2d_jax.data.preferences import pairs_of
from g2d_jax.data.rows import file_rows
from g2d_jax.records import Rollout, Score, ScoredRollout, Verdict
from g2d_jax.report import format as fmt
from g2d_jax.report.comparison import check_output
from g2d_jax.report.figures import curves
from g2d_jax.report.page import Note, Report, Section, write
from g2d_jax.report.run import MEANINGS, MEASURES
from g2d_jax.report.tables import sheet, table
from g2d_jax.rewards.extract import final_answer
from g2d_jax.runtime.storage import PathLike, write_bytes
from g2d_jax.study import informativeness
from g2d_jax.study.bend import EDGE, LITTLE, Bend, Estimate, bend

Groups = list[list[ScoredRollout]]

FILES = ("autopsy.html", "autopsy.md", "autopsy.csv", "figures", "rollouts.jsonl", "dpo.py")
COLUMNS = ("step", "measure", "value")
LINES = 12  # of the table, at most
SHARE = 0.1  # of the steps that pairs come from where the curve does not say which
SHOWN = ("pass_rate", "frac_mixed", "distinct_answers", "confidence", "mean_length", "frac_truncated")
PAIRS = Collect().pairs_per_prompt

RULE = (
    "Two straight lines are fitted to the {what} by step; brackets are 95 % intervals over another draw of each step's "
    f"prompts. A run taught little from where they meet on if, beyond noise, a step added less than {LITTLE:g} of what "
    "it had added before, and the place is known to within half of the run. Steps are as the dump counts them: "
    "rollouts of step k were drawn before update k, or between its updates."
)
BENT = (
    "Pairs from the rollouts of {span}, which cannot be told apart as the place of the bend: before it the policy is "
    "weak, and it changes with every step; after it steps cost as much and teach little, and groups turn all correct or "
    "all incorrect. G2D (arXiv 2605.21266) finds a moderate warm-up best: rollouts of a cold policy make weak pairs, "
    "those of a late one over-confident and less informative ones."
)
VARIED = (
    "Pairs from the rollouts of {span}, a tenth of the run: there rewards differ most within a group (variance {most}), "
    "and so more of the groups give pairs than at other steps."
)

CONFIG = '''"""Offline DPO from the rollouts of {span} of a finished GRPO run, chosen by g2d autopsy.

g2d run --config {name} --workdir runs/{stem} --dry-run       and again without --dry-run
"""

from ml_collections import ConfigDict

from g2d_jax import config as settings
from g2d_jax import recipes

POLICY = {policy!r}  # the checkpoint saved nearest to step {step}: a folder of safetensors, a URL or a hub id


def reward(completions, **columns):
    raise ValueError("the rollouts have their rewards; to score other responses, put the run's own reward here")


def get_config(arg: str = "") -> ConfigDict:
    if not POLICY:
        raise ValueError("POLICY is empty: write there the run's checkpoint that was saved nearest to step {step}")
    config = recipes.real(POLICY)
    config.name = {stem!r}
    config.data.update(train=settings.source(), dev=settings.source(), test=settings.source())
    config.tokenizer.chat = {chat}  # False: prompts are texts as they are; None: the chat template if there is one
    config.reward.update(function="dpo:reward", verifiable={verifiable}, correct_above={above!r})
    config.stages.collect = settings.collect(policy="init", rollouts={rollouts!r})
    config.stages.dpo = settings.offline(policy="init", beta=recipes.DPO_BETA, optimizer=recipes.adam())
    return config
'''


@dataclass(frozen=True)
class Autopsy:
    """A dump's groups by step, ascending; of responses only what figures need (see `_rollout`).

    verifiable: rewards have one value or two, the higher for right, and `above` lies between; else they rank.
    unit: of lengths. unknown: measures that the dump does not give. repeated: steps left out, for they have the rollouts
    of one before. as_text: prompts are texts without ids, to be given to the model as they are.
    """

    steps: Mapping[int, Groups]
    verifiable: bool
    above: float
    unit: str
    unknown: frozenset[str]
    repeated: Sequence[int]
    as_text: bool

    @cached_property
    def measures(self) -> dict[int, dict[str, float]]:
        """The figures of each step; see `measure`."""
        return {step: self.measure(groups) for step, groups in self.steps.items()}

    @cached_property
    def bend(self) -> Bend | None:
        """The bend of the pass rate by step, or of the mean reward where rewards rank."""
        column = "pass_rate" if self.verifiable else "reward_mean"
        curve = {step: np.asarray(informativeness.prompts(groups)[column]) for step, groups in self.steps.items()}
        curve = {step: values[~np.isnan(values)] for step, values in curve.items()}
        curve = {step: values for step, values in curve.items() if len(values)}
        counts = np.array([len(values) for values in curve.values()])
        squares = sum(float(np.square(values - values.mean()).sum()) for values in curve.values())
        freedom = counts.sum() - len(counts)
        errors = np.sqrt((squares / freedom if freedom else math.nan) / counts)
        return bend(list(curve), [values.mean() for values in curve.values()], errors)

    @property
    def flat(self) -> Bend | None:
        """The bend from which on the run taught little, None if that cannot be told."""
        return self.bend if self.bend and self.bend.flattens else None

    @cached_property
    def chosen(self) -> tuple[int, int]:
        """The first and the last step that pairs come from: the bend's interval, else where rewards vary most."""
        if self.flat:
            return round(self.flat.step.low), round(self.flat.step.high)
        variances = np.nan_to_num([figures["reward_variance"] for figures in self.measures.values()])
        width, numbers = max(round(SHARE * len(variances)), 1), list(self.steps)
        first = int(np.convolve(variances, np.ones(width), mode="valid").argmax())
        return numbers[first], numbers[first + width - 1]

    @property
    def checkpoint(self) -> int:
        """The step whose checkpoint DPO starts from."""
        return round(self.flat.step.value) if self.flat else self.chosen[1]

    def groups(self, first: int, last: int) -> Groups:
        """Return the groups of these steps, both included."""
        return [group for step, groups in self.steps.items() if first <= step <= last for group in groups]

    def measure(self, groups: Groups) -> dict[str, float]:
        """Compute `informativeness.summary` and: pairs that a collect stage makes; reward_mean, reward_std (in a group)."""
        by_prompt = informativeness.prompts(groups)
        means, variances = (np.asarray(by_prompt[name], np.float64) for name in ("reward_mean", "reward_variance"))
        scored = ~np.isnan(means)
        pairs = [pairs_of(0, g[0].rollout.problem_id, 0, g, PAIRS, verifiable=self.verifiable) for g in groups]
        figures = {
            **informativeness.summary(groups),
            "pairs": float(sum(map(len, pairs))),
            "reward_mean": float(means[scored].mean()) if scored.any() else math.nan,
            "reward_std": float(np.sqrt(variances[scored]).mean()) if scored.any() else math.nan,
        }
        return {name: math.nan if name in self.unknown else value for name, value in figures.items()}


def read(paths: Sequence[str], reward: str | None = None) -> Autopsy:
    """Read the dumps of a run; paths and reward: as of `read_dump`.

    Raises ValueError as that, and for a row that does not say its step or its reward.
    """
    drawn: dict[int, dict[str, list[tuple[Rollout, str, float | None, str | None]]]] = {}
    rewards: set[float] = set()
    has_ids, has_finish, as_text = set[bool](), set[bool](), True
    for row in read_dump(paths, reward):
        if row.step is None:
            raise ValueError(f"{row.where}: it does not say of which step it is: an autopsy goes by the field 'step'")
        if not row.has_reward:
            raise ValueError(f"{row.where}: it has no reward, which an autopsy goes by")
        rewards |= {row.reward} - {None}
        has_ids.add(row.completion_ids is not None)
        has_finish.add(row.finish_reason is not None)
        as_text &= isinstance(row.prompt, str) and row.prompt_ids is None and not row.rendered
        group = drawn.setdefault(row.step, {}).setdefault(row.prompt_key, [])
        content = row.completion_ids.tobytes() if row.completion is None else row.completion
        answer = None if row.completion is None else final_answer(row.completion)
        group.append((_rollout(row, len(group)), str(hash(content)), row.reward, answer))
    first: dict[frozenset[tuple[str, str]], int] = {}
    for step in sorted(drawn):
        texts = frozenset((key, text) for key, group in drawn[step].items() for _, text, *_ in group)
        first.setdefault(texts, step)
    above = sum(rewards) / 2 if len(rewards) == 2 else 0.5
    verifiable = len(rewards) <= 2
    unknown = {"distinct_answers"} if all(r[3] is None for s in drawn.values() for g in s.values() for r in g) else set()
    unknown |= {"frac_truncated"} if False in has_finish else set()
    unknown |= {name for name in MEASURES if "length" in name} if len(has_ids) > 1 else set()

    def score(value: float | None, answer: str | None) -> Score:
        if value is None:
            return Score(None, Verdict.UNSCORABLE, answer)
        verdict = Verdict.CORRECT if value > above else Verdict.INCORRECT
        return Score(value, verdict if verifiable else Verdict.SCORED, answer)

    return Autopsy(
        steps={
            step: [[ScoredRollout(r, text, score(*given)) for r, text, *given in group] for group in drawn[step].values()]
            for step in first.values()
        },
        verifiable=verifiable,
        above=above,
        unit="tokens" if True in has_ids else "characters",
        unknown=frozenset(unknown),
        repeated=sorted(drawn.keys() - first.values()),
        as_text=as_text,
    )


def _rollout(row: DumpRow, sample: int) -> Rollout:
    """Make what figures need of a row, without its tokens: zeros in their place, and the mean log-prob for each.

    Where there are no ids, one for each character.
    """
    length = len(row.completion or "") if row.completion_ids is None else len(row.completion_ids)
    logprob = math.nan if row.logprobs is None else row.logprobs.mean()
    zeros, logprobs, unknown = (
        np.broadcast_to(value, length) for value in (np.int32(0), np.float32(logprob), np.float32(math.nan))
    )
    return Rollout(row.prompt_key, 0, sample, zeros[:0], zeros, logprobs, unknown, row.finish_reason or "stop")


def report(autopsy: Autopsy, name: str) -> Report:
    """Put together what the autopsy found. name: of the dump."""
    what = "pass rate" if autopsy.verifiable else "mean reward"
    chosen = autopsy.groups(*autopsy.chosen)
    most = fmt.fixed(3)(informativeness.summary(chosen)["reward_variance"])
    why = (BENT if autopsy.flat else VARIED).format(span=span(*autopsy.chosen), most=most)
    steps = list(autopsy.measures)
    lines = {
        title: (steps, [figures[measure] for figures in autopsy.measures.values()])
        for title, measure in {what: "pass_rate" if autopsy.verifiable else "reward_mean", "mixed": "frac_mixed"}.items()
    }
    return Report(
        kind="autopsy",
        name=name,
        eyebrow=f"G2D autopsy · {len(steps)} steps",
        headline=headline(autopsy),
        warnings=[f"Steps that have the rollouts of a step before, and do not count: {', '.join(map(str, autopsy.repeated))}"]
        * bool(autopsy.repeated),
        sections=[
            Section(
                "steps",
                "Steps",
                [
                    table(f"Informativeness by step (length in {autopsy.unit})", _rows(autopsy)),
                    curves("steps", f"{what.capitalize()}, and share of mixed prompts", {"": lines}),
                    Note(RULE.format(what=what)),
                    Note(f"{why} They have {fmt.count(autopsy.measure(chosen)['pairs'])} pairs of {len(chosen)} prompts."),
                    Note(MEANINGS),
                ],
            )
        ],
    )


def headline(autopsy: Autopsy) -> str:
    """Say from which step on the run taught little, or that this cannot be told, and why."""
    fit, last = autopsy.bend, max(autopsy.steps)
    if fit is None:
        return f"Cannot tell from which step on it taught little: that takes {2 * EDGE + 1} steps, of several prompts."
    taught = f"a step added {_rate(autopsy, fit.before)} before and {_rate(autopsy, fit.after)} after"
    where = f"{fit.step.value:.0f} [{fit.step.low:.0f}, {fit.step.high:.0f}]"
    if not autopsy.flat:
        return f"Cannot tell from which step on it taught little: the curve bends most at step {where}; {taught}."
    after = len(autopsy.groups(autopsy.checkpoint + 1, last)) / len(autopsy.groups(0, last))
    return f"It taught little from step {where} on: {taught}. {fmt.percent(after)} % of its groups were drawn after."


def _rate(autopsy: Autopsy, slope: Estimate) -> str:
    unit = " points" if autopsy.verifiable else ""
    value, low, high = (f"{(100 if autopsy.verifiable else 1) * number:+.2g}" for number in slope)
    return f"{value}{unit} [{low}, {high}]"


def span(first: int, last: int) -> str:
    """Name steps: "step 3", "steps 3 to 5"."""
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _rows(autopsy: Autopsy) -> Iterator[dict[str, str]]:
    """Yield the table's lines, each of as many steps."""
    for part in np.array_split(list(autopsy.steps), min(LINES, len(autopsy.steps))):
        first, last = int(part[0]), int(part[-1])
        figures = autopsy.measure(autopsy.groups(first, last))
        yield {
            "steps": f"{first}" if first == last else f"{first}–{last}",
            "prompts": fmt.count(figures["prompts"]),
            "pairs": fmt.count(figures["pairs"]),
            "reward": fmt.fixed(3)(figures["reward_mean"]),
            "reward std": fmt.fixed(3)(figures["reward_std"]),
            **{head: written(figures[name]) for name, (head, written) in MEASURES.items() if name in SHOWN},
        }


def _records(autopsy: Autopsy) -> Iterator[tuple[str, str, float]]:
    """Yield all figures of autopsy.csv: of every step, and of the bend ("bend/step/low")."""
    for step, figures in autopsy.measures.items():
        for measure, value in figures.items():
            yield str(step), measure, value
    for part in ("step", "before", "after") if autopsy.bend else ():
        for end, value in getattr(autopsy.bend, part)._asdict().items():
            yield "", f"bend/{part}/{end}", value


def write_autopsy(
    autopsy: Autopsy, content: Report, paths: Sequence[str], output: PathLike, reward: str | None, policy: str
) -> list[str]:
    """Write `FILES` into a folder and return their paths: the report, the chosen rollouts as they stand in the dumps,
    and a config that makes pairs of them and trains on these from the policy.

    policy: a folder, URL or hub id; "" leaves a line to fill in. Raises ValueError as `check_output`; OSError.
    """
    folder = check_output(output, FILES, "an autopsy")
    first, last = autopsy.chosen
    rollouts, config = folder / "rollouts.jsonl", folder / "dpo.py"
    lines = [
        json.dumps(raw.values, default=str)
        for file in dump_files(paths)
        for raw, row in zip(file_rows(file), read_dump(file, reward), strict=True)
        if row.step is not None and first <= row.step <= last and row.step not in autopsy.repeated
    ]
    write_bytes(rollouts, "".join(f"{line}\n" for line in lines).encode())
    text = CONFIG.format(
        span=span(first, last),
        name=config,
        stem=folder.name,
        policy=policy,
        step=autopsy.checkpoint,
        chat=False if autopsy.as_text else None,
        verifiable=autopsy.verifiable,
        above=autopsy.above,
        rollouts=str(rollouts),
    )
    write_bytes(config, text.encode())
    return [*write(content, sheet(COLUMNS, _records(autopsy)), folder, "autopsy"), str(rollouts), str(config)]
