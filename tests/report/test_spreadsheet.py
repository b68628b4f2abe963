"""report.csv: one figure a row, numbers that read back, and no formulas."""

import csv
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from g2d_jax.report import write_all
from g2d_jax.report.spreadsheet import guarded
from g2d_jax.storage import read_json, write_json


def load(path: str) -> dict[tuple[str, str, str], str]:
    with open(path, newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    assert header == ["stage", "policy", "measure", "value"]
    table = {tuple(row[:3]): row[3] for row in rows}
    assert len(table) == len(rows)  # tidy: no figure twice
    return table


def test_figures_costs_and_informativeness(finished_run):
    table = load(write_all(finished_run)[2])
    manifest = read_json(finished_run / "05-evaluate" / "manifest.json")["result"]
    assert float(table["evaluate", "dpo", "mean"]) == manifest["policies"][2]["mean"]
    assert float(table["evaluate", "dpo", "pass_at/4"]) == manifest["policies"][2]["pass_at"]["4"]
    assert float(table["evaluate", "dpo", "paired/warmup/sem"]) == manifest["paired"][1]["sem"]
    assert float(table["evaluate", "dpo", "paired/warmup/greedy/difference"]) == 0.25
    assert table["evaluate", "sft", "informativeness/auroc"] == "0.75"
    assert table["evaluate", "sft", "informativeness/entropy"] == "NaN"
    assert table["sft", "", "tokens/trained"] == "5120000"
    assert table["warmup", "", "flops"] == "410000000000"
    assert table["warmup", "", "seconds"] == "31.7"
    assert table["collect", "", "informativeness/ece"] == "0.125"
    assert table["collect", "", "counts/dropped/all correct"] == "150"
    assert table["dpo", "", "after/logprob_gap"] == "9.25"
    assert all(value == "NaN" or math.isfinite(float(value)) for value in table.values())


def test_no_cell_of_text_is_a_formula(fresh_run):
    manifest = read_json(fresh_run / "05-evaluate" / "manifest.json")
    evil = '=HYPERLINK("//evil")\n@x'
    manifest["result"]["policies"][0] |= {"name": evil, "difference": -0.5}
    manifest["counts"] = {"+1,2": 3}
    write_json(fresh_run / "05-evaluate" / "manifest.json", manifest)
    table = load(write_all(fresh_run)[2])
    assert table["evaluate", '\'=HYPERLINK("//evil")\\n@x', "difference"] == "-0.5"  # a number stays one
    assert table["evaluate", "", "counts/+1,2"] == "3"


@pytest.mark.parametrize(
    ("text", "cell"),
    [("=1+1", "'=1+1"), ("+x", "'+x"), ("-x", "'-x"), ("@x", "'@x"), (" =1", "' =1"), ("\uff1d1", "'\uff1d1"),
     ("a=1", "a=1"), ("", ""), ("\x1b[2J\t=", "\\x1b[2J\\t="), ("\ud800", "\\ud800")],
)  # fmt: skip
def test_guarded(text, cell):
    assert guarded(text) == cell


@given(st.text())
def test_no_text_begins_a_formula(text):
    assert not guarded(text).lstrip().startswith(("=", "+", "-", "@", "\t", "\r"))


def test_all_three_are_written(fresh_run):
    assert write_all(fresh_run) == [str(fresh_run / f"report.{kind}") for kind in ("html", "md", "csv")]
    assert all((fresh_run / f"report.{kind}").stat().st_size > 500 for kind in ("html", "md", "csv"))
