"""Made-up evaluations, hostile text, and a parser that refuses what no report of ours consists
of."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path

import numpy as np

from g2d_jax.records import Rollout, Score, ScoredRollout, Verdict
from g2d_jax.report.page import RENEW, SCRIPT, STYLE
from g2d_jax.runtime.storage import write_json
from g2d_jax.runtime.tables import write_rollouts
from g2d_jax.session.stage_result import Change, Cost, Evaluated, Evaluation, StageResult, write
from g2d_jax.study.stats import accuracy, paired

HOSTILE = "\n".join(
    (
        "</script><script>alert(1)</script>",
        "</pre></article><img src=x onerror=alert(2)>",
        "<style>*{display:none}</style><base href=//evil.example><meta http-equiv=refresh "
        "content=0>",
        "a\u202egnp.exe\u2066\u200b\ufeff\u2028b",
        "nul\0 escape\x1b[2J carriage\rreturn \x85 delete\x7f",
        "' onmouseover='alert(3)' \" autofocus onfocus=\"alert(4) &lt;b&gt; &#60;b&#62;",
        "]]><svg/onload=alert(5)> {{7*7}} ${7*7} $x^2$ <!-- --!>",
    )
)
STEERING = "\u202e\u2066\u200b\ufeff\u2028\0\x1b\r\x85\x7f"
VOID = {"meta", "input"}
ELEMENTS = """html head meta title style body header nav main section h1 h2 h3 p a ul li div span table caption thead
tbody tr th td figure figcaption details summary pre code label input select option button output script
svg g path text use defs clippath rect tspan"""
ATTRIBUTES = """lang charset http-equiv content name class id href aria-label role scope tabindex title type value
autocomplete hidden data-listing data-control data-row data-rows data-prompt data-policy data-verdict data-change
data-tokens data-written data-every
viewbox d x y width height transform clip-path fill stroke stroke-width stroke-linecap stroke-linejoin stroke-dasharray
stroke-dashoffset fill-opacity stroke-opacity opacity font-size text-anchor"""
MARKS = {1: "1", 0: "0", "t": "0", "u": "-"}
VERDICTS = {1: Verdict.CORRECT, 0: Verdict.INCORRECT, "t": Verdict.TIMEOUT, "u": Verdict.UNSCORABLE}


class Page(HTMLParser):
    """Checks nesting, names and where links lead while reading. text: all of it; links: those
    outside lists of problems; sections: their anchors; tables: caption -> rows, each head -> cell."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.source, self.open, self.tags, self.links, self.attributes = source, [], [], [], []
        self.words, self.tables, self._cells = [], {}, []
        self.anchors, self.sections = [], []
        self.feed(source)
        self.close()
        assert not self.open, f"not closed: {self.open}"
        ids = [value for name, value in self.attributes if name == "id"]
        for link in (*self.links, *self.anchors):
            assert not link.startswith("#") or ids.count(link[1:]) == 1, link
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        assert tag in ELEMENTS.split(), tag
        assert {name for name, _ in attrs} <= set(ATTRIBUTES.split()), (tag, attrs)
        links = self.anchors if "summary" in self.open else self.links
        links += [value for name, value in attrs if name == "href" and tag == "a"]
        names = dict(attrs)
        if tag in ("section", "details") and "id" in names and "data-row" not in names:
            self.sections.append(names["id"])
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("caption", "th", "td"):
            self._cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag == "caption":
            self._rows = self.tables.setdefault(self._cells.pop().strip(), [])
        elif tag == "thead":
            self._heads, self._cells = self._cells, []
        elif tag == "tr" and "tbody" in self.open:
            self._rows.append(dict(zip(self._heads, self._cells, strict=True)))
            self._cells = []

    def handle_data(self, data):
        if "script" in self.open or "style" in self.open:
            assert data in {"script": (SCRIPT, RENEW), "style": (STYLE,)}[self.open[-1]]
            return
        data = data.replace("\u00a0", " ")  # as the terminal has it
        self.words.append(data)
        if {"caption", "th", "td"} & set(self.open):
            self._cells[-1] += data

    def table(self, words: str) -> list[dict[str, str]]:
        """The rows of the table whose caption has these words."""
        (found,) = [rows for caption, rows in self.tables.items() if words in caption]
        return found


def completions(
    policy: str, table: Mapping[str, Sequence], tokens: int = 3, text: str = "an answer"
) -> list[ScoredRollout]:
    """Completions of problems, right or wrong as marked, of `tokens` tokens with an entropy of 0.5
    each."""
    ids, nats = np.arange(tokens, dtype=np.int32), np.full(tokens, -0.5, np.float32)
    return [
        ScoredRollout(
            Rollout(problem, 0, i, ids, ids, nats, -nats, "stop"),
            text,
            Score(None, VERDICTS[mark], None),
            policy,
        )
        for problem, marks in table.items()
        for i, mark in enumerate(marks)
    ]


def finish(folder: Path, kind: str, name: str = "", **fields) -> None:
    """A finished stage. fields: of its record."""
    name = name or folder.name.partition("-")[2]
    write(folder, StageResult(kind=kind, name=name, **fields))


def evaluation(
    folder: Path,
    answers: Mapping[str, Mapping[str, Sequence]],
    *,
    accuracies: Mapping[str, float] | None = None,
    split: str = "test",
    sampling: Mapping | None = None,
    **measured,
) -> None:
    """A finished evaluation: policy -> problem -> its marks. accuracies: in place of what the
    answers say; measured: in the entry of each policy."""
    problems = sorted({problem for table in answers.values() for problem in table})
    write_json(
        folder / "problems.json", [{"id": p, "prompt": f"{p} = ?", "answer": "7"} for p in problems]
    )
    entries = []
    for i, (policy, table) in enumerate(answers.items()):
        write_rollouts(folder / f"rollouts/{i}.parquet", completions(policy, table))
        marks = ["".join(map(MARKS.__getitem__, table[problem])) for problem in problems]
        entry = Evaluated(policy, policy, f"rollouts/{i}.parquet", marks, **measured)
        found = accuracy(entry.correct)
        if policy in (accuracies or {}):
            found = replace(found, mean=accuracies[policy])
        entries.append(replace(entry, accuracy=found))
    changes = []
    for before, after in combinations(entries, 2):
        changes.append(Change(before.name, after.name, paired(before.correct, after.correct)))
    samples = max(map(len, entries[0].marks))
    result = Evaluation(
        entries, changes, problems, len(problems), samples, split, dict(sampling or {})
    )
    finish(folder, "evaluate", evaluation=result)


def cost(flops: float, **more: float) -> Cost:
    """A cost of so many FLOPs, some tokens, and a second on one device."""
    tokens = {"generated": 10, "prefilled": 1, "scored": int(flops), "trained": 5}
    times = {"seconds": 1.0, "device_seconds": 1.0, "verifier_cpu_seconds": 0.5}
    return Cost(**{"flops": flops, **tokens, **times, **more})
