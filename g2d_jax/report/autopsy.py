"""The autopsy of a finished GRPO run from the rollouts it left behind: what each step taught, and
what is left in them.

dumps ─► groups by step ─► informativeness ─► where the learning curve flattens ─► steps to build pairs from
                                                                                     └─► rollouts.jsonl, autopsy_dpo.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd

from g2d_jax.config import Collect, Reward, places
from g2d_jax.config.places import data_files
from g2d_jax.data.distinct import LoadReport
from g2d_jax.data.dumps import DumpRow, read_dump
from g2d_jax.data.preferences import pairs_of
from g2d_jax.data.rows import file_rows
from g2d_jax.records import AnswerRule, Rollout, Score, ScoredRollout, Verdict
from g2d_jax.report import format as fmt
from g2d_jax.report.figures import curves
from g2d_jax.report.page import Note, Report, output_folder, write
from g2d_jax.report.tables import MEASURES, table
from g2d_jax.rewards.extract import final_answer
from g2d_jax.runtime.storage import PathLike, write_bytes
from g2d_jax.study import informativeness
from g2d_jax.study.bend import EDGE, LITTLE, Bend, Estimate, bend

Group = list[ScoredRollout]
Groups = list[Group]

FILES = ("autopsy.html", "autopsy.md", "autopsy.csv", "figures", "rollouts.jsonl", "autopsy_dpo.py")
COLUMNS = ("step", "measure", "value")
LINES = 12  # of the table, at most
SHARE = 0.1  # of the steps that pairs come from where the curve does not say which
SHOWN = (
    "pass_rate",
    "frac_mixed",
    "distinct_answers",
    "confidence",
    "mean_length",
    "frac_truncated",
)
PAIRS = Collect().pairs_per_prompt

LEGEND = (
    "Mixed prompts have right and wrong responses or, where rewards only rank, different ones: no "
    "other prompt gives advantages or pairs. Pairs are those that a collect stage makes. Reward "
    "std is that within a prompt's responses; distinct answers are counted by prompt, as their "
    "text."
)
RULE = (
    "Two straight lines are fitted to the {what} by step; brackets are 95 % intervals over "
    "another draw of each step's prompts; another seed is not in them. A run taught little from "
    f"where they meet on if by these intervals a step added less than {LITTLE:g} of what it had "
    "added before, and the place is known to within half of the run. Rollouts of step k are those "
    "drawn for update k."
)
BENT = (
    "Pairs from the rollouts of {span}, which cannot be told apart as the place of the bend: "
    "before it the policy is weak and changes with every step, after it steps cost as much and "
    "teach little, and groups turn all correct or all incorrect. G2D (arXiv 2605.21266) finds a "
    "moderate warm-up best: rollouts of a cold policy make weak pairs, those of a late one "
    "over-confident and less informative ones."
)
VARIED = (
    "Pairs from the rollouts of {span}, of about a tenth of the steps: there rewards differ "
    "most within a group (variance {most}), which is what pairs are made of."
)

CONFIG = '''"""Offline DPO from the rollouts of {span} of a finished GRPO run, chosen by g2d autopsy.

g2d run --config THIS_FILE --dry-run       and then with --workdir in place of --dry-run
"""

from ml_collections import ConfigDict

from g2d_jax import config as settings
from g2d_jax import recipes

POLICY = {policy!r}  # the checkpoint saved nearest to step {step}: a folder of safetensors, a URL or a hub id
PROBLEMS = ""  # the run's problems, a file or data set: {problems}


def reward(completions, **columns):
    raise ValueError("the rollouts have their rewards; to score other responses, put the run's own reward here")


def get_config(arg: str = "") -> ConfigDict:
    for name in {required!r}:
        if not globals()[name]:
            raise ValueError(f"{{name}} is empty: fill in its line at the top of this file")
    config = recipes.real(POLICY)
    config.name = "autopsy"
    for split, path in (("train", PROBLEMS), ("dev", ""), ("test", "")):  # to evaluate, name others for test
        config.data[split] = settings.source(path)
    config.tokenizer.chat = {chat}  # False: prompts are texts as they are; None: the chat template if there is one
    config.reward.update(function="autopsy_dpo:reward", verifiable={verifiable}, correct_above={above!r})
    config.stages.collect = settings.collect(policy="init", dump={{"path": {rollouts!r}, "columns": {columns!r}}})
    config.stages.dpo = settings.offline(policy="init", beta=recipes.DPO_BETA, optimizer=recipes.adam())
    return config
'''


@dataclass(frozen=True)
class Autopsy:
    """A dump's groups by step, ascending; of responses only what figures need (see `_response`).

    verifiable: rewards have one value or two, the higher for right, and `above` lies between; else
    they rank.
    unit: of lengths. unknown: measures that the dump does not give. repeated: steps left out, with
    the rollouts of one before. as_text: prompts are texts without ids, given to the model as they
    are. rendered: some prompts are known after a chat template only, or as ids.
    left_out: the rows that cannot be read, described; "" for none.
    """

    steps: Mapping[int, Groups]
    verifiable: bool
    above: float
    unit: str
    unknown: frozenset[str]
    repeated: Sequence[int]
    as_text: bool
    rendered: bool
    left_out: str

    @cached_property
    def measures(self) -> dict[int, dict[str, float]]:
        """The figures of each step; see `measure`."""
        return {step: self.measure(groups) for step, groups in self.steps.items()}

    @cached_property
    def bend(self) -> Bend | None:
        """The bend of the pass rate by step, or of the mean reward where rewards rank."""
        column = "pass_rate" if self.verifiable else "reward_mean"
        means = {}
        counts = []
        squares = 0.0
        for step, groups in self.steps.items():
            values = np.asarray(informativeness.prompts(groups)[column])
            values = values[~np.isnan(values)]
            if len(values):
                means[step] = values.mean()
                counts.append(len(values))
                squares += float(np.square(values - values.mean()).sum())
        freedom = sum(counts) - len(counts)
        errors = np.sqrt((squares / freedom if freedom else math.nan) / np.array(counts))
        return bend(list(means), list(means.values()), errors)

    @property
    def flat(self) -> Bend | None:
        """The bend from which on the run taught little, None if that cannot be told."""
        return self.bend if self.bend and self.bend.flattens else None

    @cached_property
    def chosen(self) -> tuple[int, int]:
        """The first and the last step that pairs come from: the bend's interval, else where rewards
        vary most."""
        if self.flat:
            return round(self.flat.step.low), round(self.flat.step.high)
        variances = np.nan_to_num(self.by_step("reward_variance"))
        width = max(round(SHARE * len(variances)), 1)
        numbers = list(self.steps)
        first = int(np.convolve(variances, np.ones(width), mode="valid").argmax())
        return numbers[first], numbers[first + width - 1]

    @property
    def checkpoint(self) -> int:
        """The step whose checkpoint DPO starts from."""
        return round(self.flat.step.value) if self.flat else self.chosen[1]

    def by_step(self, measure: str) -> list[float]:
        """List a figure of every step, in their order."""
        return [figures[measure] for figures in self.measures.values()]

    def groups(self, first: int, last: int) -> Groups:
        """Return the groups of these steps, both included."""
        chosen: Groups = []
        for step, groups in self.steps.items():
            if first <= step <= last:
                chosen += groups
        return chosen

    def collected(self) -> Groups:
        """Return the chosen rollouts as a collect stage groups them: a prompt's of all steps
        together."""
        by_prompt: dict[str, list[ScoredRollout]] = {}
        for group in self.groups(*self.chosen):
            by_prompt.setdefault(group[0].rollout.problem_id, []).extend(group)
        return list(by_prompt.values())

    def measure(self, groups: Groups) -> dict[str, float]:
        """Compute `informativeness.summary` and reward_mean, reward_std (within a group), pairs (as
        collected)."""
        by_prompt = informativeness.prompts(groups)
        means = np.asarray(by_prompt["reward_mean"], np.float64)
        variances = np.asarray(by_prompt["reward_variance"], np.float64)
        scored = ~np.isnan(means)
        pairs = 0
        for group in groups:
            name = group[0].rollout.problem_id
            pairs += len(pairs_of(0, name, 0, group, PAIRS, verifiable=self.verifiable))
        figures = {**informativeness.summary(groups), "pairs": float(pairs)}
        figures["reward_mean"] = figures["reward_std"] = math.nan
        if scored.any():
            figures["reward_mean"] = float(means[scored].mean())
            figures["reward_std"] = float(np.sqrt(variances[scored]).mean())
        return figures | dict.fromkeys(figures.keys() & self.unknown, math.nan)


def read(
    paths: Sequence[str],
    columns: Mapping[str, str] | None = None,
    answers: AnswerRule = "boxed",
) -> Autopsy:
    """Read the dumps of a run; paths and columns: as of `read_dump`. answers: how final answers are
    read in them.

    Broken rows are left out and counted. Raises ValueError where no row is left, and for a row that
    does not say its step or has no field for its reward.
    """
    drawn: dict[int, dict[str, Group]] = {}
    contents: dict[int, set[tuple[str, str]]] = {}  # of each step, by which repeated ones are known
    rewards = set()
    lengths = set()
    lacking = {"distinct_answers"}
    as_text, rendered = True, False
    counted = LoadReport(", ".join(paths), "skip")
    for row in read_dump(paths, columns, counted):
        if row.step is None or not row.has_reward:
            what = "step" if row.step is None else "reward"
            raise ValueError(f"{row.where}: it does not give its {what}, which an autopsy goes by")
        group = drawn.setdefault(row.step, {}).setdefault(row.prompt_key, [])
        group.append(_response(row, len(group), answers))
        contents.setdefault(row.step, set()).add((row.prompt_key, group[-1].text))
        if row.reward is not None:
            rewards.add(row.reward)
        lengths.add("characters" if row.completion_ids is None else "tokens")
        if group[-1].score.answer:
            lacking.discard("distinct_answers")
        if row.finish_reason is None:
            lacking.add("frac_truncated")
        rendered |= row.prompt is None
        as_text &= isinstance(row.prompt, str) and row.prompt_ids is None
    counted.require_usable(drawn)
    if len(lengths) > 1:
        lacking |= {name for name in MEASURES if "length" in name}
    verifiable = len(rewards) <= 2
    above = sum(rewards) / 2 if len(rewards) == 2 else Reward().correct_above
    steps = {}
    seen = set()
    for step in sorted(drawn):
        content = frozenset(contents[step])
        if content not in seen:
            seen.add(content)
            steps[step] = list(drawn[step].values())
            if verifiable:
                steps[step] = [_judged(group, above) for group in steps[step]]
    return Autopsy(
        steps=steps,
        verifiable=verifiable,
        above=above,
        unit=" or ".join(sorted(lengths)),
        unknown=frozenset(lacking),
        repeated=sorted(drawn.keys() - steps.keys()),
        as_text=as_text,
        rendered=rendered,
        left_out=counted.left_out,
    )


def _response(row: DumpRow, sample: int, answers: AnswerRule) -> ScoredRollout:
    """Reduce a row to what figures need: in place of tokens zeros, which take no memory, of
    log-probs their mean, of the text its hash.

    Where there are no ids, a zero for each character.
    """
    ids = row.completion_ids
    text = row.completion
    length = len(text or "") if ids is None else len(ids)
    logprob = math.nan if row.logprobs is None else float(row.logprobs.mean())
    zeros = np.broadcast_to(np.int32(0), length)
    logprobs = np.broadcast_to(np.float32(logprob), length)
    unknown = np.broadcast_to(np.float32(math.nan), length)
    stop = row.finish_reason or "stop"
    rollout = Rollout(row.prompt_key, 0, sample, zeros[:0], zeros, logprobs, unknown, stop)
    content = hash(text if ids is None or text is not None else ids.tobytes())
    verdict = Verdict.UNSCORABLE if row.reward is None else Verdict.SCORED
    answer = None if text is None else final_answer(text, answers)
    return ScoredRollout(rollout, str(content), Score(row.reward, verdict, answer))


def _judged(group: Group, above: float) -> Group:
    """Return the responses with those of a reward above the threshold as right, of others as
    wrong."""
    judged = []
    for row in group:
        reward = row.score.reward
        if reward is not None:
            verdict = Verdict.CORRECT if reward > above else Verdict.INCORRECT
            row = replace(row, score=replace(row.score, verdict=verdict))
        judged.append(row)
    return judged


def report(autopsy: Autopsy, name: str) -> Report:
    """Put together what the autopsy found. name: of the dump."""
    what, measure = (
        ("pass rate", "pass_rate") if autopsy.verifiable else ("mean reward", "reward_mean")
    )
    chosen = autopsy.collected()
    figures = autopsy.measure(chosen)
    steps = list(autopsy.steps)
    most = fmt.value(figures["reward_variance"])
    why = (BENT if autopsy.flat else VARIED).format(span=span(*autopsy.chosen), most=most)
    lines = {}
    for series, key in ((what, measure), ("share of mixed prompts", "frac_mixed")):
        lines[series] = list(zip(steps, autopsy.by_step(key), strict=True))
    warnings = []
    if autopsy.repeated:
        repeated = ", ".join(map(str, autopsy.repeated))
        warnings.append(f"Steps with the rollouts of one before, which do not count: {repeated}")
    if autopsy.left_out:
        warnings.append(f"Rows left out: {autopsy.left_out}")
    parts = [
        table(f"Informativeness by step (length in {autopsy.unit})", _rows(autopsy)),
        curves("steps", "What was sampled at each step", lines),
        Note(LEGEND),
        Note(RULE.format(what=what)),
        Note(f"{why} They have {fmt.count(figures['pairs'])} pairs of {len(chosen)} prompts."),
    ]
    return Report(
        kind="autopsy",
        name=name,
        eyebrow=f"G2D autopsy · {len(steps)} steps",
        headline=headline(autopsy),
        warnings=warnings,
        parts={"steps": parts},
        frame=lambda: pd.DataFrame(_records(autopsy), columns=COLUMNS),
    )


def headline(autopsy: Autopsy) -> str:
    """Say from which step on the run taught little, or that this cannot be told, and why."""
    fit = autopsy.bend
    if fit is None:
        return (
            f"Cannot tell from which step on it taught little: that takes {2 * EDGE + 1} steps, "
            "of several prompts."
        )
    taught = (
        f"a step added {_rate(autopsy, fit.before)} before and {_rate(autopsy, fit.after)} after"
    )
    where = f"{fit.step.value:.0f} [{fit.step.low:.0f}, {fit.step.high:.0f}]"
    if not autopsy.flat:
        return (
            "Cannot tell from which step on it taught little: the curve bends most at step "
            f"{where}; {taught}."
        )
    later = autopsy.groups(autopsy.checkpoint + 1, max(autopsy.steps))
    after = len(later) / sum(map(len, autopsy.steps.values()))
    return (
        f"It taught little from step {where} on: {taught}. {fmt.percent(after)} % of its groups "
        "were drawn after."
    )


def _rate(autopsy: Autopsy, slope: Estimate) -> str:
    unit, scale = (" points", 100) if autopsy.verifiable else ("", 1)
    value, low, high = (f"{scale * number:+.2g}" for number in slope)
    return f"{value}{unit} [{low}, {high}]"


def span(first: int, last: int) -> str:
    """Name steps: "step 3", "steps 3 to 5"."""
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _rows(autopsy: Autopsy) -> Iterator[dict[str, str]]:
    """Yield the table's lines, each of as many steps."""
    for part in np.array_split(list(autopsy.steps), min(LINES, len(autopsy.steps))):
        first, last = int(part[0]), int(part[-1])
        figures = autopsy.measure(autopsy.groups(first, last))
        row = {
            "steps": f"{first}" if first == last else f"{first}–{last}",
            "prompts": fmt.count(figures["prompts"]),
            "pairs": fmt.count(figures["pairs"]),
        }
        if not autopsy.verifiable:
            row["reward"] = fmt.value(figures["reward_mean"])
        row["reward std"] = fmt.value(figures["reward_std"])
        yield row | fmt.cells({name: MEASURES[name] for name in SHOWN}, figures.__getitem__)


def _records(autopsy: Autopsy) -> Iterator[tuple[str, str, float]]:
    """Yield all figures of autopsy.csv: of every step, and of the bend ("bend/step/low")."""
    for step, figures in autopsy.measures.items():
        for measure, value in figures.items():
            yield str(step), measure, value
    if autopsy.bend is None:
        return
    for part in ("step", "before", "after"):
        for end, value in getattr(autopsy.bend, part)._asdict().items():
            yield "", f"bend/{part}/{end}", value


def write_autopsy(
    autopsy: Autopsy,
    content: Report,
    paths: Sequence[str],
    output: PathLike,
    columns: Mapping[str, str],
    policy: str,
) -> list[str]:
    """Write `FILES` into a folder and return their paths: the report, the chosen rollouts as they
    stand in the dumps, and a config that makes pairs of them and trains on these from the policy.

    policy: a folder, URL or hub id; "" leaves a line to fill in. Raises ValueError as
    `output_folder`; OSError.
    """
    folder = output_folder(output, FILES, "an autopsy")
    first, last = autopsy.chosen
    chosen = autopsy.steps.keys() & range(first, last + 1)
    rollouts, config = folder / "rollouts.jsonl", folder / "autopsy_dpo.py"
    lines = []
    for file in data_files(paths):
        rows = read_dump(file, columns, LoadReport(file))
        steps = {row.where: row.step for row in rows}
        for raw in file_rows(file):
            if steps.get(raw.where) in chosen:
                lines.append(f"{json.dumps(raw.values, default=str)}\n")
    write_bytes(rollouts, "".join(lines).encode())
    required = ["POLICY"]
    problems = "not needed, the dump has them"
    if autopsy.rendered:
        required.append("PROBLEMS")
        problems = "prompts of the dump are looked up there"
    text = CONFIG.format(
        span=span(first, last),
        policy=places.decided(policy, "model", places.here()),
        step=autopsy.checkpoint,
        problems=problems,
        required=tuple(required),
        chat=False if autopsy.as_text else None,
        verifiable=autopsy.verifiable,
        above=autopsy.above,
        rollouts=str(rollouts),
        columns=columns,
    )
    write_bytes(config, text.encode())
    return [*write(content, folder, "autopsy"), str(rollouts), str(config)]
