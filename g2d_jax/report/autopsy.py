"""The autopsy of a finished GRPO run from its rollouts: the gain of each step, and the pairs that
they can form.

    dumps ─► a row a response ─► informativeness by step ─► where the curve flattens ─► steps to build pairs from
                                                                  └─► rollouts.jsonl, autopsy_dpo.py
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import pandas as pd

from g2d_jax.config import Collect, Reward, places
from g2d_jax.config.places import data_files
from g2d_jax.data.distinct import LoadReport
from g2d_jax.data.dumps import DumpRow, read_dump
from g2d_jax.data.preferences import best_worst, random_pairs
from g2d_jax.data.rows import file_rows
from g2d_jax.records import AnswerRule
from g2d_jax.report import format as fmt
from g2d_jax.report.figures import curves
from g2d_jax.report.page import Note, Report, output_folder, write
from g2d_jax.report.tables import MEASURES, Table, table
from g2d_jax.rewards.extract import final_answer
from g2d_jax.runtime.storage import PathLike, write_bytes
from g2d_jax.study import informativeness
from g2d_jax.study.bend import EDGE, LITTLE, Bend, Estimate, bend

FILES = ("autopsy.html", "autopsy.md", "autopsy.csv", "figures", "rollouts.jsonl", "autopsy_dpo.py")
LINES = 12  # most rows of a table
SHARE = 0.1  # share of the steps to build pairs from, if the curve shows no bend
FIRST = 6  # columns of the first table
SHOWN = (
    *("frac_mixed", "distinct_answers", "pairs", "prompts", "reward_std"),
    *("confidence", "mean_length", "frac_truncated"),
)
KNOWN = {
    **MEASURES,
    "reward_mean": ("reward", fmt.value),
    "reward_std": ("reward std", fmt.value),
    "pairs": ("pairs", fmt.count),
    "prompts": ("prompts", fmt.count),
}
PAIRS = Collect().pairs_per_prompt

LEGEND = (
    "A mixed prompt has correct and incorrect responses, or different rewards. Only mixed prompts "
    "have advantages and pairs. Pairs are those of a collect stage. Reward std is within a "
    "prompt's responses. Answers are counted by prompt."
)
RULE = (
    "Two straight lines are fitted to the {what} by step. Brackets are 95 % intervals over the "
    "prompts of each step; they do not include another seed. Training stopped helping where the "
    f"lines meet if a later step adds less than {LITTLE:g} of an earlier one, and if the step is "
    "known to within half of the run."
)
BENT = (
    "The curve may bend there. G2D (arXiv 2605.21266) finds a moderate warm-up best: earlier "
    "rollouts form weak pairs, later ones over-confident and less informative pairs."
)
VARIED = "Rewards differ most within a prompt there (variance {most})."

CONFIG = '''"""Offline DPO from the rollouts of {span} of a finished GRPO run, chosen by g2d autopsy.

g2d run --config THIS_FILE --dry-run       then again, with --workdir instead of --dry-run
"""

from ml_collections import ConfigDict

from g2d_jax import config as settings
from g2d_jax import recipes

POLICY = {policy!r}  # the checkpoint saved nearest to step {step}: a folder of safetensors, a URL or a hub id
PROBLEMS = ""  # the run's problems, a file or dataset: {problems}


def reward(completions, **columns):
    raise ValueError("the rollouts have rewards already; to score other responses, put the run's own reward here")


def get_config(arg: str = "") -> ConfigDict:
    for name in {required!r}:
        if not globals()[name]:
            raise ValueError(f"{{name}} is empty: fill in its line at the top of this file")
    config = recipes.real(POLICY)
    config.name = "autopsy"
    for split, path in (("train", PROBLEMS), ("dev", ""), ("test", "")):  # to evaluate, set other problems for test
        config.data[split] = settings.source(path)
    config.tokenizer.chat = {chat}  # False: plain prompts; None: the chat template if there is one
    config.reward.update(function="autopsy_dpo:reward", verifiable={verifiable}, correct_above={above!r})
    config.stages.collect = settings.collect(policy="init", dump={{"path": {rollouts!r}, "columns": {columns!r}}})
    config.stages.dpo = settings.offline(policy="init", beta=recipes.DPO_BETA, optimizer=recipes.adam())
    return config
'''


@dataclass(frozen=True)
class Autopsy:
    """The responses of a dump.

    rows: from `informativeness.responses`; a group is a step's responses to a prompt; see
    `_response`. verifiable: rewards have at most two values, the higher for correct, with `above`
    between them; otherwise they only rank. repeated: ignored steps that repeat earlier rollouts.
    left_out: a description of unreadable rows; "" for none.
    """

    rows: pd.DataFrame
    verifiable: bool
    above: float
    repeated: Sequence[int]
    left_out: str

    @property
    def judged_by(self) -> str:
        """The measure of the curve."""
        return "pass_rate" if self.verifiable else "reward_mean"

    @cached_property
    def measures(self) -> pd.DataFrame:
        """The measures of each step, a row a step ascending; see `measure`."""
        by_step = self.rows.groupby("step")
        return pd.DataFrame({step: self.measure(rows) for step, rows in by_step}).T

    @cached_property
    def bend(self) -> Bend | None:
        """The bend of the pass rate by step, or of the mean reward if rewards only rank."""
        values = informativeness.prompts(self.rows)[self.judged_by].dropna()
        by_step = values.groupby(self.rows.groupby("group")["step"].first())
        means, counts = by_step.mean(), by_step.count()
        squares = np.square(values - by_step.transform("mean")).sum()
        freedom = (len(values) - len(means)) or math.nan
        return bend(means.index, means, np.sqrt(squares / freedom / counts))

    @property
    def flat(self) -> Bend | None:
        """The bend after which training added little, None if that is unclear."""
        if self.bend and self.bend.flattens:
            return self.bend
        return None

    @cached_property
    def chosen(self) -> tuple[int, int]:
        """The first and the last step for pairs: the bend's interval, otherwise the steps where
        rewards vary most."""
        if self.flat:
            return round(self.flat.step.low), round(self.flat.step.high)
        variances = self.measures["reward_variance"].fillna(0)
        width = max(round(SHARE * len(variances)), 1)
        first = int(np.convolve(variances, np.ones(width), mode="valid").argmax())
        return int(variances.index[first]), int(variances.index[first + width - 1])

    @property
    def checkpoint(self) -> int:
        """The step of the checkpoint that DPO starts from."""
        return round(self.flat.step.value) if self.flat else self.chosen[1]

    def between(self, first: float, last: float) -> pd.DataFrame:
        """Return the rows of these steps, including both ends."""
        return self.rows[self.rows["step"].between(first, last)]

    def measure(self, rows: pd.DataFrame) -> dict[str, float]:
        """Compute `informativeness.summary` and reward_mean, reward_std (within a group), pairs (as
        collected)."""
        prompts = informativeness.prompts(rows)
        choose = partial(random_pairs, 0, "", 0) if self.verifiable else best_worst
        column = "correct" if self.verifiable else "reward"
        pairs = 0
        for _, group in rows.groupby("group"):
            pairs += len(choose(group[column].to_numpy(), PAIRS, group["content"].tolist()))
        measures = informativeness.summary(rows)
        if self.rows["answer"].isna().all():
            measures["distinct_answers"] = math.nan
        measures["reward_mean"] = float(prompts["reward_mean"].mean())
        measures["reward_std"] = float(np.sqrt(prompts["reward_variance"]).mean())
        return {**measures, "pairs": pairs}


def read(
    paths: Sequence[str],
    columns: Mapping[str, str] | None = None,
    answers: AnswerRule = "boxed",
) -> Autopsy:
    """Read the dumps of a run; paths and columns: as in `read_dump`. answers: how final answers
    are extracted.

    Broken rows are left out and counted. Raises ValueError if no row is left, and for a row
    without its step or its reward.
    """
    counted = LoadReport(", ".join(paths), "skip")
    found = [_response(row, answers) for row in read_dump(paths, columns, counted)]
    counted.require_usable(found)
    rows = pd.DataFrame(found).sort_values("step", kind="stable")
    rewards = rows["reward"].dropna().unique()
    above = Reward().correct_above
    if len(rewards) == 2:
        above = float(rewards.mean())
    verifiable = len(rewards) <= 2
    is_judged = rows["reward"].notna() & verifiable
    rows["correct"] = (rows["reward"] > above).astype(float).where(is_judged)
    seen = rows[["problem_id", "content"]].agg(tuple, axis=1).groupby(rows["step"]).agg(frozenset)
    repeated = seen.index[seen.duplicated()].tolist()
    rows = rows[~rows["step"].isin(repeated)]
    rows = rows.assign(group=rows.groupby(["step", "problem_id"]).ngroup())
    return Autopsy(rows, verifiable, above, repeated, counted.left_out)


def _response(row: DumpRow, answers: AnswerRule) -> dict[str, Any]:
    """Return the measures of a response, and content, equal for the same text or ids. Without ids,
    characters count as tokens."""
    if row.step is None or not row.has_reward:
        what = "step" if row.step is None else "reward"
        raise ValueError(f"{row.where}: it has no {what}, which an autopsy needs")
    ids, text = row.completion_ids, row.completion
    length, unit = len(text or ""), "characters"
    content: object = text
    if ids is not None:
        length, unit = len(ids), "tokens"
        if text is None:
            content = ids.tobytes()
    return {
        "where": row.where,
        "step": row.step,
        "problem_id": row.prompt_key,
        "visit": 0,
        "reward": math.nan if row.reward is None else row.reward,
        "length": length,
        "logprob": math.nan if row.logprobs is None else length * float(row.logprobs.mean()),
        "entropy": math.nan,
        "truncated": {None: math.nan, "stop": 0.0, "length": 1.0}[row.finish_reason],
        "answer": None if text is None else final_answer(text, answers),
        "content": hash(content),
        "unit": unit,
        "as_text": isinstance(row.prompt, str) and row.prompt_ids is None,
        "rendered": row.prompt is None,  # only ids, or the text after a chat template, are known
    }


def report(autopsy: Autopsy, name: str) -> Report:
    """Build the report of an autopsy. name: of the dump."""
    rows = autopsy.between(*autopsy.chosen)
    # as in a collect stage: a prompt's responses of all steps together
    pairs = autopsy.measure(rows.assign(group=rows["problem_id"]))
    chosen = (
        f"Pairs come from the rollouts of {span(*autopsy.chosen)}: {fmt.count(pairs['pairs'])} "
        f"pairs of {fmt.count(pairs['prompts'])} prompts."
    )
    left_out = {
        "Ignored steps that repeat earlier rollouts": ", ".join(map(str, autopsy.repeated)),
        "Rows left out": autopsy.left_out,
    }
    what, scale, unit = "mean reward", 1, ""
    if autopsy.verifiable:
        what, scale, unit = "pass rate", 100, ", %"
    lines = {}
    for series, measure in ((what, autopsy.judged_by), ("mixed prompts", "frac_mixed")):
        lines[series] = list((scale * autopsy.measures[measure]).items())
    look = f"Look for where the {what} stops rising: later steps cost the same. {chosen}"
    title = f"{what.capitalize()} and share of mixed prompts, by step{unit}"
    few, others = _tables(autopsy)
    reason = BENT if autopsy.flat else VARIED.format(most=fmt.value(pairs["reward_variance"]))
    notes = [Note(LEGEND), Note(RULE.format(what=what)), Note(f"{chosen} {reason}")]
    return Report(
        kind="autopsy",
        name=name,
        eyebrow=f"G2D autopsy · {len(autopsy.measures)} steps",
        verdict=verdict(autopsy),
        warnings=[f"{what}: {which}" for what, which in left_out.items() if which],
        parts={
            "results": [curves("steps", title, lines, note=look), few],
            "steps": [others, *notes],
        },
        frame=lambda: _frame(autopsy),
    )


def verdict(autopsy: Autopsy) -> str:
    """Return the step after which training helped little, or that no such step is clear, and
    why."""
    fit = autopsy.bend
    unclear = "No clear point where training stopped helping"
    if fit is None:
        return f"{unclear}: finding one needs {2 * EDGE + 1} steps of several prompts."
    where = f"step {fit.step.value:.0f} [{fit.step.low:.0f}, {fit.step.high:.0f}]"
    steps = autopsy.measures.index
    if fit.step.value == steps[EDGE]:  # the first candidate: the bend may be earlier
        where = f"step {fit.step.value:.0f} or earlier"
    added = (
        f"a step added {_rate(autopsy, fit.before)} before it and {_rate(autopsy, fit.after)} after"
    )
    if not autopsy.flat:
        return f"{unclear}: the curve bends most at {where}; {added}."
    rest = autopsy.between(autopsy.checkpoint + 1, math.inf)["group"].nunique()
    share = fmt.percent(rest / autopsy.rows["group"].nunique())
    later = Estimate(*((steps[-1] - fit.step.value) * np.array(fit.after)))
    return (
        f"Training slowed down at {where}: {added}. The last {share} % of the rollouts added "
        f"{_rate(autopsy, later)} in all."
    )


def _rate(autopsy: Autopsy, slope: Estimate) -> str:
    unit, scale = "", 1
    if autopsy.verifiable:
        unit, scale = " points", 100
    value, low, high = (f"{scale * number:+.2g}" for number in slope)
    return f"{value}{unit} [{low}, {high}]"


def span(first: int, last: int) -> str:
    """Name steps: "step 3", "steps 3 to 5"."""
    if first == last:
        return f"step {first}"
    return f"steps {first} to {last}"


def _tables(autopsy: Autopsy) -> Iterator[Table]:
    """Show the measures in two tables with the same rows: the most important columns, then the
    rest."""
    columns = {name: KNOWN[name] for name in (autopsy.judged_by, *SHOWN)}
    lines = []
    steps = autopsy.measures.index
    for part in np.array_split(steps, min(LINES, len(steps))):
        measures = autopsy.measure(autopsy.between(part[0], part[-1]))
        named = "–".join(dict.fromkeys([str(part[0]), str(part[-1])]))
        lines.append({"steps": named, **fmt.cells(columns, measures.__getitem__)})
    units = " or ".join(sorted(autopsy.rows["unit"].unique()))
    heads = ["steps", *(head for head, _ in columns.values())]
    shown = {"Measures of each step": heads[:FIRST]}
    shown[f"More measures (length in {units})"] = [heads[0], *heads[FIRST:]]
    for title, chosen in shown.items():
        yield table(title, [{head: line[head] for head in chosen} for line in lines])


def _frame(autopsy: Autopsy) -> pd.DataFrame:
    """Tabulate all measures of autopsy.csv: of every step, and of the bend ("bend/step/low")."""
    rows = []
    for step, measures in autopsy.measures.to_dict("index").items():
        rows += [(str(step), measure, value) for measure, value in measures.items()]
    for part in ("step", "before", "after") if autopsy.bend else ():
        for end, value in getattr(autopsy.bend, part)._asdict().items():
            rows.append(("", f"bend/{part}/{end}", value))
    return pd.DataFrame(rows, columns=["step", "measure", "value"])


def write_autopsy(
    autopsy: Autopsy,
    content: Report,
    paths: Sequence[str],
    output: PathLike,
    columns: Mapping[str, str],
    policy: str,
) -> list[str]:
    """Write `FILES` into a folder and return their paths: the report, the chosen rollouts in their
    original form, and a config that builds pairs from them and trains the policy on these.

    policy: a folder, URL or hub id; "" leaves a line to fill in. Raises ValueError like
    `output_folder`, and OSError.
    """
    folder = output_folder(output, FILES, "an autopsy")
    rollouts, config = folder / "rollouts.jsonl", folder / "autopsy_dpo.py"
    chosen = set(autopsy.between(*autopsy.chosen)["where"])
    lines = []
    for raw in itertools.chain.from_iterable(map(file_rows, data_files(paths))):
        if raw.where in chosen:
            lines.append(f"{json.dumps(raw.values, default=str)}\n")
    write_bytes(rollouts, "".join(lines).encode())
    required = ["POLICY"]
    problems = "not needed, the dump has them"
    if autopsy.rows["rendered"].any():
        required.append("PROBLEMS")
        problems = "used to look up the dump's prompts"
    text = CONFIG.format(
        span=span(*autopsy.chosen),
        policy=places.decided(policy, "model", places.here()),
        step=autopsy.checkpoint,
        problems=problems,
        required=tuple(required),
        chat=False if autopsy.rows["as_text"].all() else None,
        verifiable=autopsy.verifiable,
        above=autopsy.above,
        rollouts=str(rollouts),
        columns=columns,
    )
    write_bytes(config, text.encode())
    return [*write(content, folder, "autopsy"), str(rollouts), str(config)]
