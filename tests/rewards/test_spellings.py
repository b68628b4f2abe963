r"""The whole verifier on kinds of spellings, a row for each: `+` is paid and `-` is not; and no
response is paid for two golds that differ."""

from __future__ import annotations

import random

import pytest

from g2d_jax.records import Verdict
from g2d_jax.rewards.pool import VerifierPool

ROWS = r"""
-|9:00 \text{ a.m.}|21:00
-|9:00 \text{ a.m.}|9:00 \text{ p.m.}
-|9:00 \text{ p.m.}|9{:}30
+|9:00 \text{ p.m.}|21:00
+|9:00 \text{ p.m.}|9:00
+|3:15 \text{ p.m.}|15:15
-|3:15 \text{ p.m.}|1:5
-|3:15 \text{ p.m.}|\frac{1}{5}
-|3:15 \text{ p.m.}|3:15 \text{ a.m.}
-|10:30 \text{ a.m.}|22:30
-|10:30 \text{ a.m.}|1:3
-|10:30 \text{ a.m.}|\frac{1}{3}
-|10:30 \text{ a.m.}|2:6
-|12:30 \text{ p.m.}|0:30
-|12:00 \text{ p.m.}|24:00
+|12:30 \text{ a.m.}|0:30
+|10:30 \text{ a.m.}|10:30 \text{ in the morning}
-|-2, 3|-2<x<3
-|-2, 3|-2 \le x \le 3
-|1, 5|1<x<5
-|2, 4|x>2, x<4
-|3|x<3
-|\pm 3|-3<x<3
-|6|6\text{k}
-|6|6\text{ k}
-|6|6\text{M}
-|6|6\text{ bn}
-|6|6\text{ pair}
-|6|6\text{ couple}
-|6|6\text{ score}
-|6|6\text{ quarter}
-|6|6\text{ halved}
-|6|6\text{ doubled}
-|6|6\text{ tripled}
-|6|6\text{ squared}
-|6|6\text{pi}
-|6|6\text{ pi}
-|6|6\text{i}
-|6|6\text{e3}
-|6|6\text{e}3
-|6|6\text{ gross}
-|6|6\text{K}
-|6|6\text{ mil}
-|6|6\text{ thousandths}
-|6|6\text{x}
+|6000|6\text{k}
+|6000|6 \text{ thousand}
+|6000|\$6\text{k}
+|6000|\text{6k}
+|6000000|6\text{M}
+|6000000|6 \text{ million}
+|6000000|\text{six million}
+|12|\text{one dozen}
-|\$12|12\%
-|5 \text{ km}|5\%
-|12 \text{ apples}|12\%
-|30^\circ|30\%
-|12\%|12 \text{ km}
-|12\%|\$12
+|12\%|12 \text{ percent}
+|12\%|12
-|(3,2)|[3,2]
-|[3,2]|(3,2)
-|(5,-1)|[5,-1]
-|[2,1)|(2,1)
-|72|72_{73}
-|72|72_{1}
-|72|72_{99}
-|72|72_n
-|0|0x48
-|0|0xFF
-|0|0b1
+|255|0xFF
+|18|\text{Total: }18
+|18|\text{Total: 18}
+|18|\text{Sum} = 18
+|18|\text{Final Answer: } 18
+|18|\textbf{Answer: } 18
+|18|\text{Result: }\$18
-|18|\text{Not: }18
-|18|\text{At least: }18
-|18|\text{approximately: }18
+|\text{ellipse}|\text{an ellipse}
+|\text{circle}|\text{a circle}
+|\text{parabola}|\text{A parabola}
+|\text{ellipse}|\text{The ellipse}
+|\infty|\text{infinity}
+|\infty|\text{Infinity}
+|-\infty|-\text{infinity}
+|-\infty|\text{negative infinity}
+|18|\text{eighteen}
+|21|\text{twenty-one}
+|125|\text{one hundred twenty-five}
+|-5|\text{negative five}
+|\frac{2}{3}|\text{two thirds}
+|\frac{1}{2}|\text{one half}
+|18|eighteen
-|18|\text{eighty}
-|18|\text{seventeen or eighteen}
-|72|\text{seventy-two or seventy-three}
-|5|\text{two three}
+|\text{undefined}|\text{does not exist}
+|\text{does not exist}|\text{DNE}
+|\text{does not exist}|\text{undefined}
+|\text{undefined}|\text{Does not exist.}
+|\text{undefined}|\text{not defined}
+|3:4|3\colon 4
+|3:4|3 \colon 4
+|3:4|3 \text{ to } 4
+|3:4|6:8
+|1:2:3|1\colon 2\colon 3
+|\frac12|\mathbf{\frac12}
+|3\sqrt{5}|\mathbf{3\sqrt{5}}
+|\frac12|\boldsymbol{\frac{1}{2}}
+|x=\frac12|x = \mathbf{\frac12}
+|\ln 2|\log_e 2
+|\ln 3|\log_{e} 3
+|\ln x|\log_e(x)
+|2 \text{ hours } 30 \text{ minutes}|\text{2 hours 30 minutes}
+|2 \text{ hours } 30 \text{ minutes}|2 \text{ hours and } 30 \text{ minutes}
+|2 \text{ hours } 30 \text{ minutes}|2.5 \text{ hours}
+|2 \text{ hours } 30 \text{ minutes}|150 \text{ minutes}
+|2 \text{ hours } 30 \text{ minutes}|2\text{ h }30\text{ min}
+|2 \text{ hours and 30 minutes}|2 \text{ hours } 30 \text{ minutes}
+|1 \text{ minute } 5 \text{ seconds}|1 \text{ min } 5 \text{ s}
-|2 \text{ hours } 30 \text{ minutes}|2 \text{ hours } 20 \text{ minutes}
-|2 \text{ hours } 30 \text{ minutes}|2 \text{ hours}
-|2|2 \text{ hours } 30 \text{ minutes}
-|30|2 \text{ hours } 30 \text{ minutes}
+|\text{March 5}|\text{March 5th}
+|\text{March 5}|\text{5th of March}
+|\text{March 5}|\text{the 5th of March}
+|\text{July 4}|\text{July 4th}
+|\text{March 5th}|\text{Mar. 5}
+|\text{December 25}|\text{December 25, 2020}
-|\text{March 5}|\text{March 6th}
-|\text{March 5}|\text{May 5th}
+|12000|US\$12,000
+|12000|\text{US}\$12,000
+|12000|\text{US\$}12,000
+|\$12,000|\text{USD }12,000
+|12000|\text{USD 12,000}
+|f(x)=x^2|x \mapsto x^2
+|f(x)=x^2|f: x \mapsto x^2
+|x^2|x \mapsto x^2
+|g(x)=x^2+1|g: x\mapsto x^2+1
-|f(x)=x^2|x \mapsto x^3
+|y=2x|f(x)=2x
+|(1,-2,3)|\mathbf{i}-2\mathbf{j}+3\mathbf{k}
+|(1,-2,3)|\hat{i}-2\hat{j}+3\hat{k}
+|\begin{pmatrix} 3 \\ 4 \end{pmatrix}|3\mathbf{i}+4\mathbf{j}
+|\begin{pmatrix} 3 \\ 0 \\ -1 \end{pmatrix}|3\vec{i}-\vec{k}
+|\langle 1,2\rangle|\hat{\mathbf{i}}+2\hat{\mathbf{j}}
+|3\mathbf{i}+4\mathbf{j}|\begin{pmatrix} 3 \\ 4 \end{pmatrix}
-|(1,-2,3)|\mathbf{i}+2\mathbf{j}+3\mathbf{k}
+|\frac{\sqrt{2}}{2}|x = y = z = \frac{\sqrt2}{2}
+|x=y=z=\frac{\sqrt2}{2}|\frac{\sqrt{2}}{2}
+|1|a=b=1
+|(1,1)|x=y=1
+|\left(\frac{1}{3},\frac13,\frac13\right)|x=y=z=\frac{1}{3}
-|1|x=y=2
+|\frac12|\frac12 \text{ (half)}
+|\frac12|\frac12 \text{ (one half)}
+|5|5 \text{ (five)}
+|5|5 \text{ apples and no pears}
+|3|3 \text{ dogs and no cats}
-|5|5 \text{ (six)}
-|5|5 \text{ (or six)}
-|5|5 \text{ apples and six pears}
-|5|5 \text{ and not } 6
+|1234567|1'234'567
+|12000|12'000
-|1234567|1'234'568
-|5|5'
+|12\pi|12pi
+|\ln 2|ln 2
+|\sin x|sin x
+|\mathbb{R}\setminus\{2\}|\mathbb{R}\backslash\{2\}
-|1,2|(2,1)
-|1,2|(1,2)
+|(1,2)|1,2
+|1,2|\{2,1\}
-|1,2|[1,2]
+|(1,2)|x=1,y=2
+|(1,2)|y=2,x=1
-|(1,2)|y=1,x=2
+|\{1,2\}|1,2
+|x^2+y^2=25|x^2+y^2-25=0
+|(2\sqrt3,\infty)|(\sqrt{12},\infty)
+|x>2\sqrt3|(\sqrt{12},\infty)
+|[\frac12,1]\cup[2,3]|[2,3]\cup[0.5,1]
-|(0,1)\cup(2,3)|(0,1]\cup(2,3)
+|[1,3]|[1,2]\cup[2,3]
+|\frac{\pi}{6}, \frac{5\pi}{6}|30^\circ, 150^\circ
+|1,\sqrt{2}|\sqrt2, 1
+|(\sqrt{12},1)|(2\sqrt3,1)
+|(0.5x,1)|(\frac{x}{2},1)
+|\frac{1+\sqrt5}{2},\frac{1-\sqrt5}{2}|\frac{1\pm\sqrt5}{2}
+|x=1,x=3|1,3
+|1,3|x=1 \text{ or } x=3
-|5 \text{ km north}|5 \text{ km south}
-|R^2-r^2|0
+|6|6 \text{ pairs}
+|18|18 \text{ (total)}
+|72|72 \text{ (in dollars)}
-|72|72 \text{ to the power of } 2
-|72|72 \text{ to } 73
-|72|72 \text{ cubed}
-|72|72 \text{ fold}
-|72|72 \text{ roughly}
-|72|72 \text{ quadrupled}
-|72|72 \text{ past}
"""


def test_right_spellings_are_paid_and_wrong_ones_are_not(pool: VerifierPool) -> None:
    rows = [row.split("|", 2) for row in ROWS.split("\n") if row]
    golds, responses = [], []
    for _, gold, answer in rows:
        golds.append(gold)
        responses.append(rf"\boxed{{{answer}}}")
    scores = pool.score(golds, responses)
    wrong = []
    for row, score in zip(rows, scores, strict=True):
        if (score.verdict is Verdict.CORRECT) != (row[0] == "+"):
            wrong.append(row)
    assert wrong == []


def answers_of(n: int, m: int) -> dict[str, list[str]]:
    """Golds that differ for primes n from 13 to 23 and m from 29 to 43, each with other spellings of it."""
    return {
        f"{n}": [rf"\text{{Total: }}{n}", f"x = {n}", f"{n}.0"],
        f"-{n}": [f"- {n}", rf"x = -{n}"],
        rf"\frac{{{n}}}{{{m}}}": [f"{n}/{m}", rf"\mathbf{{\frac{{{n}}}{{{m}}}}}"],
        rf"{n}\pi": [f"{n}pi", rf"\pi \cdot {n}"],
        rf"\sqrt{{{n}}}": [rf"\sqrt {{{n}}}"],
        rf"{n}\text{{ thousand}}": [rf"{n}\text{{k}}", f"{n}000", f"{n}'000"],
        rf"{n}\text{{ million}}": [rf"{n}\text{{M}}"],
        rf"{n}\text{{ dozen}}": [f"{12 * n}"],
        rf"{n}\text{{ score}}": [f"{20 * n}"],
        f"({n}, {m})": [rf"{n}\mathbf{{i}}+{m}\mathbf{{j}}", f"y={m}, x={n}"],
        f"({m}, {n})": [rf"\begin{{pmatrix}} {m} \\ {n} \end{{pmatrix}}"],
        f"[{n}, {m}]": [rf"{n} \le x \le {m}"],
        f"[{n}, {m})": [rf"{n} \le x < {m}"],
        rf"\{{{n}, {m}, 61\}}": [f"61, {m}, {n}"],
        f"({n}, {m}, 61)": [rf"\langle {n}, {m}, 61 \rangle"],
        f"x > {n}": [rf"({n}, \infty)"],
        rf"x \ge {n}": [rf"[{n}, \infty)"],
        f"{n - 12}:{m} \\text{{ a.m.}}": [rf"{n - 12}:{m}\text{{ AM}}"],
        f"{n - 12}:{m} \\text{{ p.m.}}": [rf"{n - 12}:{m}\text{{ PM}}"],
        rf"{n}\text{{ hours }} {m}\text{{ minutes}}": [rf"{n}\text{{ h }} {m}\text{{ min}}"],
        rf"\text{{March }} {n}": [rf"\text{{{n} March}}", rf"\text{{March {n}th}}"],
        rf"\text{{April }} {n}": [rf"\text{{{n}th of April}}"],
        f"{n}:{m}:61": [rf"{n}\colon {m}\colon 61"],
        f"{n}x": [f"x \\cdot {n}"],
        f"f(x) = {n}x + {m}": [rf"x \mapsto {n}x + {m}", f"y = {m} + {n}x"],
        r"\text{undefined}": [r"\text{does not exist}"],
        r"\infty": [r"\text{infinity}"],
        r"\text{an ellipse}": [r"\text{ellipse}"],
    }


@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_no_response_is_paid_for_two_golds_that_differ(pool: VerifierPool, seed: int) -> None:
    chosen = random.Random(seed)
    n, m = chosen.choice([13, 17, 19, 23]), chosen.choice([29, 31, 37, 41, 43])
    spellings = answers_of(n, m)
    asked = []
    for gold in spellings:
        for its, others in spellings.items():
            for answer in (its, *others):
                asked.append((gold, its, answer))
    scores = pool.score(
        [gold for gold, _, _ in asked], [rf"\boxed{{{answer}}}" for *_, answer in asked]
    )
    wrong = []
    for row, score in zip(asked, scores, strict=True):
        if (score.verdict is Verdict.CORRECT) != (row[0] == row[1]):
            wrong.append(row)
    assert wrong == []
