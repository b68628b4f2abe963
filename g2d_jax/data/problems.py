r"""Problems from files, hub data sets and the procedural tasks: rows ─► distinct problems ─► one
split.

Sources, all texts:

    problems.jsonl · problems.json · problems.parquet        local or gs://
    hub:owner/name[@configuration][:split]                   Hugging Face hub (extra `hub`); split "train" if not given
    math500 · amc23 · gsm8k[:split]                          from the hub, by name; split "test" if not given
    math                                                     the 12,000 problems of MATH outside MATH-500
    math500:path/to/file.jsonl                               the same from a local file
    numinamath[:split] · wildchat[:split]                    for training, filtered by data/filters.py; from the hub
                                                             (split "train" if not given), or
                                                             numinamath:file.jsonl
    procedural:slips, procedural:chains, procedural:digits   see data/arithmetic.py

Fields have their usual names (`FIELDS`) or are mapped: fields={"answer":
"reward_model.ground_truth"}.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any

from etils import epath

from g2d_jax.config import Source
from g2d_jax.config.io import suggest
from g2d_jax.data import arithmetic, filters
from g2d_jax.data.distinct import LoadReport, collect
from g2d_jax.data.fields import (
    Fields,
    Found,
    Values,
    as_answer,
    as_prompt,
    as_scalar,
    check_fields,
    find,
    listed,
    named,
    require_rendered,
)
from g2d_jax.data.rows import SUFFIXES, Row, file_rows, hub_rows
from g2d_jax.data.splits import problem_id
from g2d_jax.records import Problem
from g2d_jax.rewards.extract import solution_answer

FIELDS = {
    "prompt": ("problem", "question", "prompt", "messages"),
    "answer": (
        "answer",
        "ground_truth",
        "reward_model.ground_truth",
        "final_answer",
        "expected_answer",
    ),
    "solution": ("solution",),
    "subset": ("subset", "subject", "data_source"),
}
"""A problem's fields -> the row's field names to look for, in this order."""
_BARE_ANSWER_CHARACTERS = 100
_THOUSANDS = re.compile(r"\A[-+]?\\?\$?\d{1,3}(?:,\d{3})+(?![\d,])")


NAMED = {
    "math500": "HuggingFaceH4/MATH-500:test",
    "amc23": "math-ai/amc23:test",
    "gsm8k": "openai/gsm8k@main:test",
    "math": "nlile/hendrycks-MATH-benchmark:train",
    "numinamath": "AI-MO/NuminaMath-CoT:train",
    "wildchat": "allenai/WildChat-1M:train",
}
"""The places on the hub of datasets known by name: repository[@configuration]:split, the default
split."""


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w.-]+)?(:[\w.-]+)?")
_FILE = re.compile(r"\.[a-z]{2,5}$")  # not the end of Qwen2.5


def load_problems(source: Source, *, verified: bool = True) -> tuple[list[Problem], LoadReport]:
    """Load the distinct problems of a source in its order, and a report on its rows.

    source.fields: names of the row's fields for prompt (or "problem"), answer, solution and subset,
    if they differ from the usual ones. source.on_error: "skip" leaves broken rows out and counts
    them. A procedural source needs a limit. verified: answers are for the verifier, so that a list
    around one is removed (`plain_answer`). Your own functions get answers as the dataset stores
    them, and of a worked solution its final answer.

    Raises ValueError naming file and line of the first broken row, and for a source that is
    unknown, unreadable or without problems; ImportError for a hub source without the extra.
    """
    fields = _by_our_names(source.fields)
    check_fields(fields, ("problem", *FIELDS))
    if source.path.startswith("procedural:"):
        task, count = procedural(source)
        problems = arithmetic.problems(task, 0, count, source.split)
        return problems, LoadReport(source.path, rows=len(problems), kept=len(problems))
    label, rows = open_rows(source.path, source.revision)
    read = _READ.get(source.path.partition(":")[0], to_problem)
    holes = Counter[str]()
    given = [fields["answer"]] if "answer" in fields else FIELDS["answer"]

    def convert(values: Values) -> Problem:
        problem = read(values, label, fields)
        hole = find(values, *given)[1]
        if problem.answer is None and hole is not None:
            holes[f"{hole!r:.40}"] += 1
        return problem

    problems, report = collect(
        source,
        rows,
        convert,
        key=lambda problem: problem.id,
        content=lambda problem: problem.answer,
    )
    if verified:
        problems = [
            dataclasses.replace(p, answer=p.answer and plain_answer(p.answer)) for p in problems
        ]
    report.holes = holes
    return problems, report


def _by_our_names(fields: Fields) -> Fields:
    """Return the mapping with "prompt" for "problem", the name of a problem's text outside the
    code."""
    if "problem" not in fields:
        return fields
    if "prompt" in fields:
        raise ValueError(
            "fields maps both 'prompt' and 'problem', which mean the same: remove one of them"
        )
    return {"prompt" if name == "problem" else name: path for name, path in fields.items()}


def to_problem(values: Values, source: str, fields: Fields) -> Problem:
    r"""Read one row as a Problem. Raises BrokenRow.

    An answer that contains GSM8K's `#### N` or a `\boxed{}` is a worked solution ending with the
    answer. With a solution only, the answer is found in it the same way; a solution of one short
    line is itself the answer.
    """
    require_rendered(values)
    used: dict[str, Found] = {}
    for name, paths in FIELDS.items():
        if name in fields:
            used[name] = named(values, fields[name])
        elif name == "prompt":
            used[name] = named(values, *paths)
        # a solution or subset that is neither a text nor a number is another field of that name
        else:
            used[name] = find(values, *paths, scalar=name != "answer")
    prompt = as_prompt(used["prompt"][1], str(used["prompt"][0]))
    answer, solution = _reference(used["answer"], used["solution"])
    path, value = used["subset"]
    subset = path and as_scalar(value, path)
    taken = {path for path, _ in used.values()}
    return Problem(
        id=problem_id(prompt),
        prompt=prompt,
        answer=answer,
        source=source,
        subset=subset or "",
        solution=solution,
        columns=_without(values, taken),
    )


def _numinamath(values: Values, source: str, fields: Fields) -> Problem:
    r"""Read a row of NuminaMath-CoT: problem, solution, source; the answer is its own or the
    solution's last box.

    Raises BrokenRow, and LeftOut by the rules of data/filters.py.
    """
    values = _without(values, filters.UNWANTED)
    problem = to_problem(values, source, {"subset": "source", **fields})
    if isinstance(problem.prompt, str):
        filters.long_enough(problem.prompt, fields.get("prompt", "problem"))
    if "answer" not in fields and find(values, *FIELDS["answer"])[0] is None:
        # Here "####" is a heading, not the mark of an answer, and a short solution is no answer.
        boxed = solution_answer((problem.solution or "").replace("####", ""))
        problem = dataclasses.replace(problem, answer=boxed)
    filters.filter_numinamath(problem)
    return problem


def _wildchat(values: Values, source: str, fields: Fields) -> Problem:
    """Read the first user turn of a row of WildChat-1M as a conversation of one message, without an
    answer.

    Raises BrokenRow, and LeftOut by the rules of data/filters.py.
    """
    path = fields.get("prompt", "conversation")
    turn = filters.first_turn(values, path)
    columns = _without(values, (path, *filters.UNWANTED))
    rest = _without(fields, ("prompt",))
    return to_problem({**columns, "problem": [turn]}, source, rest)


def _without(values: Mapping[str, Any], names: Container[str | None]) -> dict[str, Any]:
    """Return the mapping without the given columns or fields."""
    return {name: value for name, value in values.items() if name not in names}


_READ: dict[str, Callable[[Values, str, Fields], Problem]] = {
    "numinamath": _numinamath,
    "wildchat": _wildchat,
}
"""The readers of datasets that need more than a mapping of fields."""


def open_rows(source: str, revision: str | None = None) -> tuple[str, Iterator[Row]]:
    """Open every source but procedural ones; return its name and its rows.

    revision: a commit, branch or tag of the hub's repository. Raises ValueError for an unknown
    source, and for a revision of a source outside the hub.
    """
    head, _, rest = source.partition(":")
    name = ""
    if head in NAMED:
        name = head
    check_revision(source, revision)
    hub = on_hub(source)
    if hub:
        return name or hub[0], hub_rows(*hub, revision, name=name)
    if name:
        return name, file_rows(rest)
    if source.lower().endswith(SUFFIXES):
        return epath.Path(source).name, file_rows(source)
    if Path(source).is_dir():
        raise ValueError(
            f"data source {source!r} is a folder: name a file in it that ends in {', '.join(SUFFIXES)}"
        )
    if _HUB_ID.fullmatch(source) and not _FILE.search(source):
        raise ValueError(
            f"unknown data source {source!r}: for a dataset on the Hugging Face hub write "
            f"hub:{source}; a file must end in {', '.join(SUFFIXES)}"
        )
    known = (*NAMED, *arithmetic.TASKS)
    how = suggest(source, known)
    if source.lower().endswith((".csv", ".csv.gz")):
        code = f"import pandas; pandas.read_csv({source!r}, dtype=str)"
        code += ".to_json('rows.jsonl', orient='records', lines=True)"
        how = f'. To convert it: python -c "{code}"'
    elif source.lower().endswith(".gz"):
        how = f". To unpack it: gunzip {source}"
    raise ValueError(
        f"unknown data source {source!r}: give a {', '.join(SUFFIXES)} file, hub:owner/name, or "
        f"one of {', '.join(known)}{how}"
    )


def check_revision(source: str, revision: str | None) -> None:
    """Raise ValueError for a revision of a source that is not on the hub."""
    if revision is not None and not on_hub(source):
        raise ValueError(
            f"revision is {revision!r}, but {source!r} is not on the hub: leave revision unset"
        )


def on_hub(source: str) -> tuple[str, str | None, str] | None:
    """Return repository, configuration and split of a source on the hub; None for any other."""
    head, _, rest = source.partition(":")
    if head != "hub" and (head not in NAMED or rest.lower().endswith(SUFFIXES)):
        return None
    place, _, split = NAMED.get(head, rest).partition(":")
    repository, _, configuration = place.partition("@")
    if head in NAMED:
        split = rest or split
    return repository, configuration or None, split or "train"


def check_training(source: str, field: str) -> None:
    """Raise ValueError naming the field for the test problems of a suite, by its name or its place
    on the hub."""
    suites = [place.partition(":")[0].partition("@")[0] for place in NAMED.values()]
    repository, _, split = on_hub(source) or ("", None, "")
    # Parts of splits are written test[:50%] and train+test.
    parts = {part.strip() for part in re.split(r"[\[(+]", split)}
    if repository in suites and not parts.isdisjoint({"test", "all"}):
        raise ValueError(
            f"{field} is {source!r}, which holds test problems: train on math, numinamath or "
            "gsm8k:train, or on a file"
        )


def procedural(source: Source) -> tuple[arithmetic.Task, int]:
    """Return the task of a procedural source, and its limit, which such a source needs.

    Raises ValueError without a limit, with a revision, and for an unknown task.
    """
    check_revision(source.path, source.revision)
    task = arithmetic.TASKS.get(source.path)
    if task is None:
        raise ValueError(
            f"unknown procedural task {source.path!r}: choose one of {', '.join(arithmetic.TASKS)}"
        )
    if source.limit is None:
        raise ValueError(f"{source.path} is endless: set limit to the number of problems")
    return task, source.limit


def plain_answer(answer: str) -> str | None:
    r"""Return an answer without the list around it: the text `["1,234"]` becomes 1,234 and `["3",
    "5"]` becomes 3, 5.

    Several answers are the complete list of values, in any order, as the graders have it
    (rewards/lists.py). None for an empty list. A text that is not a list (`fields.listed`) stays
    the same.
    """
    items = listed(answer)
    if items is None:
        return answer
    values = [solution_answer(item) or item for item in items if as_scalar(item, "answer")]
    if len(values) > 1:
        # A comma between thousands would otherwise separate values.
        values = [
            _THOUSANDS.sub(lambda number: number[0].replace(",", ""), value) for value in values
        ]
    return ", ".join(values) or None


def _reference(answer: Found, solution: Found) -> tuple[str | None, str | None]:
    """Return (answer, solution) of a row from the (path, value) of its two fields."""
    worked = as_scalar(solution[1], solution[0]) if solution[0] is not None else None
    given = as_answer(answer[1], answer[0]) if answer[0] is not None else None
    if given is not None:
        inside = None if listed(given) is not None else solution_answer(given)
        if inside is None:
            return given, worked
        return as_scalar(inside, "answer"), worked or given
    if worked is None:
        return None, None
    inside = solution_answer(worked)
    if inside is None and "\n" not in worked and len(worked) <= _BARE_ANSWER_CHARACTERS:
        return worked, None
    return inside and as_scalar(inside, "solution"), worked
