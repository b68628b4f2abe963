"""The cheap exact step: what it decides, what it leaves to math-verify, and that it is bounded."""

from __future__ import annotations

from fractions import Fraction

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from g2d_jax.rewards.normalise import canonical, clean
from g2d_jax.rewards.quantity import Quantity, parse_quantity, terminates
from g2d_jax.rewards.verify import can_be_read, quick_verdict, reading


@pytest.mark.parametrize(
    ("raw", "cleaned"),
    [
        ("\u221a2", r"\sqrt{2}"),
        ("3\u00d710\u2074", r"3\times 10^{4}"),
        ("\uff14\uff12", "42"),
        ("\u0663\u0664", "34"),
        ("\u2212\u00bd", r"-\frac{1}{2}"),
        (r"1{,}234{,}567", "1234567"),
        (r"11,\! 111,\! 100", "11111100"),
        ("1\u2009234", "1234"),
        (r"\dfrac 59.", r"\frac{5}{9}"),
        (r"\left(1,\,2\right)", "(1, 2)"),
        (r"0.1\overline{6}", r"\frac{15}{90}"),
        ("0.333...", r"\frac{3}{9}"),
        (r"1 \\[6pt] 2 \\ [-0.3em] 3 \\*[2 mm] 4", r"1 \\ 2 \\ 3 \\ 4"),
        (r"\[ [6,7] \]", "[6,7]"),
        (r"\textcolor{red}{5}", "5"),
        (r"{\color{blue} \underline{\textbf{5}}}", "5"),
        (r"{\bf 5}", "5"),
        (r"\Large 5\,{\rm cm}", r"5 \text{ cm}"),
        (r"$\boxed{{7}}$", "7"),
        ("**7**", "7"),
        (r"\{1,2\}", r"\{1,2\}"),
        ("", ""),
    ],
)
def test_clean_gives_one_spelling(raw: str, cleaned: str) -> None:
    assert clean(raw) == cleaned


def test_canonical_ignores_spaces_but_not_between_digits() -> None:
    assert canonical(clean(r"\left( 3, \frac{\pi}{2} \right)")) == canonical(
        clean(r"(3,\frac{\pi}{2})")
    )
    assert canonical("1 2") != canonical("12")


NO_QUANTITIES = ["5m", "3x", "2k", "5!", "1 2", "x", "", "1/0", r"\frac{1}{0}", "3 or 4", r"5\text{ or 6}", "3 mod 5",
                 "3 pi", "10^{999}", "1e99999", "9" * 10_000, "(1,2)", r"\times 10^{4}", "2^{3}", "1-5\\%", "10^{1/2}",
                 "(1,200)", "-", "1+"]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "quantity"),
    [
        ("-3", Quantity(Fraction(-3))),
        ("1,234.50", Quantity(Fraction(2469, 2), places=2)),
        (r"-\frac{3}{4}", Quantity(Fraction(-3, 4))),
        (r"137 \frac{1}{2}", Quantity(Fraction(275, 2))),
        ("7/8", Quantity(Fraction(7, 8))),
        ("1 234 567", Quantity(Fraction(1234567))),
        (r"1.2\times 10^{-3}", Quantity(Fraction(12, 10000))),
        ("10^{2}", Quantity(Fraction(100))),
        ("1.5e3", Quantity(Fraction(1500))),
        (r"50\%", Quantity(Fraction(50), percent=True)),
        (r"\$18.90", Quantity(Fraction(189, 10), "dollar", places=2)),
        (r"90^\circ", Quantity(Fraction(90), "degree")),
        (r"15\text{ cm}^2", Quantity(Fraction(15), "cm2")),
        (r"2\text{ million}", Quantity(Fraction(2_000_000))),
        ("18 eggs", Quantity(Fraction(18))),
        ("5 m", Quantity(Fraction(5), "m")),
        *((text, None) for text in NO_QUANTITIES),
    ],
)
def test_quantities(text: str, quantity: Quantity | None) -> None:
    assert parse_quantity(text) == quantity


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        (r"\frac{1}{2}", "0.5", True),
        (r"\frac{1}{3}", "0.333333", True),
        (r"\frac{1}{3}", "0.33333", False),
        (r"\frac{1}{3}", "0.3333334", False),
        (r"\frac{2}{3}", "0.666666", True),
        ("1" + "0" * 40, "1" + "0" * 39 + "1", False),
        ("1011_2", "1011_3", False),
        ("1011_2", "1011", True),
        ("11_3", "100_2", True),
        ("42", "52_8", True),
        ("42", "2A_{16}", True),
        ("42", "42_{10}", True),
        ("-42", "-52_8", True),
        ("42", "42_8", False),
        ("42", "-52_8", False),
        ("42.5", "52_8", False),
        (r"42\text{ apples}", "42_8", False),
        ("101", "101_2", False),
        ("52_8", "42", False),
        ("52_8", r"52\text{ in base 8}", True),
        (r"52 \text{ base } 8", r"52_{\text{eight}}", True),
        (r"52\text{ (base 8)}", "052_8", True),
        (r"2B5_{12}", r"2B5\text{ in base twelve}", True),
        ("52_8", r"53\text{ in base 8}", False),
        ("52_8", r"52\text{ (base 9)}", False),
        ("52_8", r"52_{\text{nine}}", False),
        ("x=5", "5", True),
        ("x=5", "y=5", None),
        (r"5\text{ cm}", "5", True),
        (r"5\text{ cm}", r"5\text{ m}", False),
        (r"5\text{ kJ}", r"5\text{ J}", False),
        (r"5\text{ mW}", r"5\text{ MW}", False),
        (r"5\text{ GB}", r"5\text{ gigabytes}", True),
        (r"5\text{ pesos}", r"5\text{ dollars}", False),
        (r"12^\circ\text{C}", r"12\text{ degrees Fahrenheit}", False),
        (r"12^\circ\text{C}", r"12^\circ", True),
        (r"12^\circ\text{C}", r"12^{\circ}C", True),
        (r"30^\circ\text{ N}", r"30^\circ\text{ S}", False),
        (r"5\text{ km north}", r"5\text{ km south}", False),
        (r"5\text{ km north}", r"5\text{ m north}", False),
        (r"7\text{ a.m.}", r"7\text{ p.m.}", False),
        (r"11:00\text{ p.m.}", r"11\text{ PM}", True),
        (r"\text{11 p.m.}", "23:00", True),
        (r"12\text{ noon}", r"12:00 \text{ p.m.}", True),
        (r"12\text{ p.m.}", r"12:00 \text{ midnight}", False),
        (r"11:00\text{ p.m.}", r"11\text{ a.m.}", False),
        (r"11:30\text{ p.m.}", r"11\text{ p.m.}", False),
        ("7:30", r"7\text{ a.m.}", False),
        ("7:00", "7", None),
        (r"44\text{ BC}", r"44\text{ AD}", False),
        (r"5\text{ profit}", r"5\text{ loss}", False),
        (r"5\text{ mph}", r"5\text{ miles per hour}", True),
        (r"5\text{ km/h}", r"5\,\frac{\text{km}}{\text{h}}", True),
        (r"5\text{ km/h}", r"5\,\mathrm{km\,h^{-1}}", True),
        (r"5\text{ m/s}", r"5\text{ m}\cdot\text{s}^{-1}", True),
        (r"20\text{ m/s}^2", r"20\frac{\mathrm{m}}{\mathrm{s}^{2}}", True),
        (r"20\text{ m/s}^2", r"20\frac{\mathrm{m}}{\mathrm{s}}", False),
        (r"5\text{ km/h}", r"5\,\frac{\text{m}}{\text{h}}", False),
        (r"5\text{ m/s}", r"5\text{ m min}^{-1}", False),
        ("5", r"5\frac{\mathrm{m}}{\mathrm{n}}", None),
        ("5", r"5\text{ x}^{-1}", False),
        (r"\frac{a}{b}", r"\frac{\mathrm{a}}{\mathrm{b}}", True),
        ("\u00a35", r"5\text{ pounds}", True),
        (r"18", r"\text{18 dollars}", True),
        (r"18", r"\mathrm{18\,cm}", True),
        (r"20", r"\text{20\%}", True),
        ("18", r"\text{\$18.00}", True),
        (r"\$32,\!348", r"\textbf{\$32,348}", True),
        (r"\$32,\!348", r"\text{\$32,384}", False),
        (r"-18", r"\text{-\$18}", True),
        (r"18", r"\text{-\$18}", False),
        (r"\$18", r"\text{18 euros}", False),
        (r"\$18", r"\text{\$18 or \$19}", None),
        (r"20", r"\text{20 or more}", None),
        (r"20", r"\text{about 20}", None),
        (r"3", r"\text{3 hours 20 minutes}", None),
        (r"\text{12 cm}", r"12", True),
        (r"\text{12 cm}", r"\text{12 mm}", False),
        (r"1,2,\ldots,10", r"1,2,10", False),
        (r"1,2,\ldots,10", r"1, 2, \dots, 10", True),
        (r"1,2,\ldots,10", r"10,\ldots,2,1", False),
        (r"3.14", r"3.14\ldots", False),
        (r"\frac{1}{3}", r"0.333\ldots", True),
        (r"\frac{3}{11}", r".\overline{27}", True),
        (r"\frac{3}{11}", r"0.2727\ldots", True),
        (r"\frac{3}{11}", r"0.2728\ldots", False),
        (r"\frac{3}{11}", r"0.27\ldots", False),
        (r"\frac{3}{11}", r"0.\overline{72}", False),
        (r"0.1\overline{23}", "0.1232323...", True),
        (r"0.1\overline{23}", "0.12323...", False),
        (r"2.7\overline{1828}", r"2.718281828\ldots", False),
        (r"\frac{1}{7}", "0.142857142857...", True),
        (r"\frac{1}{7}", r"0.\overline{142857}\ldots", True),
        (r"\frac{200}{3}\%", r"66.\overline{6}\%", True),
        (r"\frac{200}{3}\%", r"66.6\%", False),
        (r"\frac{50}{3}", r"16.\bar{6}\text{ km/h}", True),
        (r"\frac{50}{3}\text{ km}", r"16.\bar{6}\text{ km/h}", False),
        ("9", r"9\text{ times a day}", True),
        ("2", r"2\text{ more}", True),
        ("2", r"2\text{ more than one}", None),
        ("9", r"9\text{ other people}", True),
        ("120", r"120\text{ feet above sea level}", True),
        ("12", r"12\text{ below zero}", None),
        ("12", r"12\text{ times x}", None),
        (r"\text{(C)}", "C", True),
        ("C", "(C) 12", True),
        (r"\text{(C)}", r"\textbf{Option C}", True),
        (r"\text{Choice C}", "C", True),
        ("C", "Answer: (C) 12", True),
        (r"\text{(C)}", r"\text{Option B}", False),
        (r"\text{(C)}", r"\text{Option B or C}", None),
        (r"\text{(C)}", r"\text{not Option C}", None),
        ("5", r"\textcolor{red}{6}", False),
        ("5", r"\textcolor{5}{6}", False),
        ("5", r"5\textcolor{white}{6}", False),
        ("B", "(B) or (C)", None),
        (r"\emptyset", r"\text{No real solutions}", True),
        (r"\text{no solution}", r"\varnothing", True),
        (r"\text{no solution}", r"\text{no solutions}", True),
        (r"\text{no solution}", "0", False),
        (r"\text{no solution}", r"\text{one solution}", False),
        (r"\mathbb{R}", r"\text{the set of all real numbers}", True),
        (r"\text{all real numbers}", r"\text{all integers}", False),
        (r"\begin{aligned} x&=1 \\ y&=2 \end{aligned}", "y=2, x=1", True),
        ("x=1, y=2", r"\begin{align*} &x=1, \\[4pt] &y=2. \end{align*}", True),
        ("(1,2)", r"\begin{cases} x &= 1 \\ y &= 2 \end{cases}", True),
        (r"\begin{aligned} x&=1 \\ y&=2 \end{aligned}", "x=2, y=1", None),
        (r"\text{east}", "East", True),
        (r"\text{east}", "west", False),
        ("10", "2+3=5, 5+5=10", True),
        ("x^2", "x \\cdot x", None),
        ("ab", "ba", None),
        ("2abc", "2cba", None),
        ("HHT", "HTH", False),
        ("HHT", r"\text{HHT}", True),
        ("ABCD", "BCDA", False),
        ("AB", "BA", False),
        ("cat", "act", False),
        ("no", "on", False),
        ("(HHT, TTH)", "(HTH, TTH)", False),
        ("HHT, TTH", "TTH, HHT", True),
        ("HHT, TTH", "HTH, TTH", False),
        ("HHT, HTH", "HHT", False),
        (r"\angle ABC", r"\angle BAC", False),
        ("", "", False),
        ("073", r"\textbf{(73)}", None),
        ("73", r"\text{073}", True),
        ("69, 84", "84 or 69", True),
        ("69, 84", "69, 85", False),
        ("69, 84", "69", False),
        ("69", "69 or 84", False),
        ("(C), (D)", "D, C", True),
        (r"\{\frac{1}{3}, 2\}", "2, 0.333333", True),
        ("(1,2), (3,4)", "(3,4), (1,2)", True),
        ("(1,2)", "(2,1)", None),
        ("2, 3", "2, 3, 3", None),
        (r"\frac{1}{2}", "1/2 or 0.5", True),
        (r"\frac{1}{2}", "1/2 or 0.6", False),
    ],
)
def test_quick_verdict(gold: str, answer: str, verdict: bool | None) -> None:
    assert quick_verdict(gold, answer) is verdict


def test_large_lists_are_compared_without_a_worker() -> None:
    """Seconds of CPU do not decide: 3,000 elements, in another order and in other words."""
    numbers = list(range(7, 30_000, 10))
    gold = ", ".join(map(str, numbers))
    assert (
        quick_verdict(rf"\{{{gold}\}}", ", ".join(f"{2 * n}/2" for n in reversed(numbers))) is True
    )
    assert (
        quick_verdict(rf"\{{{gold}\}}", ", ".join(str(n) for n in [8, *reversed(numbers[1:])]))
        is False
    )
    roots = [rf"\sqrt{{{n}}}" for n in numbers]
    assert quick_verdict(", ".join(roots), ", ".join(reversed(roots))) is True


@pytest.mark.parametrize("gold", [r"x^2+\sqrt{2}", r"\{1, \sqrt{2}\}", r"(1, \pi)"])
def test_a_list_far_longer_than_the_gold_is_wrong_at_once(gold: str) -> None:
    numbers = ", ".join(map(str, range(2_000)))
    for answer in (numbers, rf"\{{{numbers}\}}", f"({numbers})"):
        assert quick_verdict(gold, answer) is False
        assert quick_verdict(answer, gold) is False


@pytest.mark.parametrize(
    ("gold", "words"),
    [
        ("1,080", "the number 1080"),
        (r"x = \frac{1}{2}", "the number 1/2"),
        (r"12\%", "the number 12 %"),
        (r"5\text{ cm}", "the number 5 (cm)"),
        (r"\text{(C)}", "the choice C"),
        ("1011_2", "the numeral 1011 in base 2"),
        (r"\{-2,2\}", "2 values: -2, 2"),
        (r"\text{Evelyn}", "the words evelyn"),
        ("x^2+1", "the expression x^2+1"),
        (" ", "nothing: no answer can match it"),
    ],
)
def test_how_a_reference_answer_is_read(gold: str, words: str) -> None:
    assert reading(gold) == words


@examples(200)
@given(st.text(max_size=60))
def test_every_answer_equals_itself_unless_it_is_empty(text: str) -> None:
    assert quick_verdict(text, text) is bool(clean(text))


@examples(200)
@given(st.text(alphabet="\\{}()$%^_.,=0123456789 abxfrctexq√²１", max_size=80))
def test_clean_is_idempotent_in_what_it_compares(text: str) -> None:
    once = clean(text)
    assert quick_verdict(once, text) in (True, None) or not once


@examples(200)
@given(st.integers(-(10**30), 10**30), st.integers(1, 10**12))
def test_fractions_compare_exactly(above: int, below: int) -> None:
    gold = rf"\frac{{{above}}}{{{below}}}"
    assert quick_verdict(gold, f"{above}/{below}") is True
    assert quick_verdict(gold, rf"\frac{{{above + 1}}}{{{below}}}") is False


@given(st.integers(1, 10**6))
def test_terminating_decimals(below: int) -> None:
    assert terminates(Fraction(1, below)) == (10**20 % below == 0)


UNITS = ["$", " ", "{", "}", "\\", "\\frac", "\\text{", " and", "1,", "√", "²", "1 ", "=", "0.", "\\!", "\\boxed{",
         "1, ", "\\{1,", "\\{", "\\text{1", "...", "\\ldots,", "\\{\\ldots,", "\\text{1 a"]  # fmt: skip


@pytest.mark.parametrize("unit", UNITS)
def test_long_hostile_answers_are_read_in_linear_time(unit: str) -> None:
    assert quick_verdict("3", "1" + unit * (90_000 // len(unit))) in (False, None)


BEGINNINGS = ["(", "\\{", "[", "P(", "f(x)=", "x<", "\\{x|", "\\begin{cases}", "]"]


@pytest.mark.parametrize("begun", BEGINNINGS)
def test_long_hostile_answers_beside_a_set_are_read_in_linear_time(begun: str) -> None:
    for unit in [*UNITS, ",", "<", "x,", "\\cup ", "1:", "'", "\\pm,", "\\le ", "&", "=", "A,"]:
        assert quick_verdict("x > 3", begun + unit * (20_000 // len(unit))) in (False, None)


@pytest.mark.parametrize(
    ("gold", "read"),
    [
        *(
            (gold, True)
            for gold in (
                "72",
                "-1,234.5",
                "50\\%",
                "72 apples",
                "C",
                "\\text{(B)}",
                "1011_2",
                "Evelyn",
            )
        ),
        *(
            (gold, True)
            for gold in (
                "x=5",
                "3, 5",
                "\\text{no solution}",
                "none of the above",
                "3, \\text{even}",
            )
        ),
        *(
            (gold, None)
            for gold in (
                r"\frac{\sqrt{2}}{2}",
                "x^2+1",
                "(1,2)",
                r"\sin x, 3",
                r"v_{initial}+1",
                "sqrt(2)",
            )
        ),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", None),
        *(
            (gold, False)
            for gold in (
                "",
                "???",
                " $ ",
                "about 72 apples I think",
                "It is 4.",
                "approximately 3.14",
            )
        ),
        *(
            (gold, False)
            for gold in (
                "3 (three)",
                "1, 2 or maybe 3",
                "the sum of all of these",
                "f(x)=2x for all x",
            )
        ),
        ("7" * 20_000, False),
    ],
)
def test_golds_that_no_response_can_equal(gold: str, read: bool | None) -> None:
    assert can_be_read(gold) is read
    if read is False:
        assert "can match it" in reading(gold)


@given(st.text(max_size=2000))
def test_any_text_is_told_whether_it_can_be_read(gold: str) -> None:
    assert can_be_read(gold) in (True, False, None)
