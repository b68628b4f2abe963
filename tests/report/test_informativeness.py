"""Measures of rollouts by policy, and of pairs before and after an offline stage."""

from g2d_jax.report.informativeness import informativeness, measured, table
from g2d_jax.report.run import read_run
from g2d_jax.storage import read_json, write_json


def test_rows_are_policies_and_columns_what_is_known(finished_run):
    rows = list(measured(read_run(finished_run)))
    assert [row[:2] for row in rows] == [
        ("warm-up", "collect"), ("cold (sft)", "evaluate"), ("warm-up", "evaluate"), ("G2D (dpo)", "evaluate"),
    ]  # fmt: skip
    columns, lines = table(rows, ["pass_rate", "frac_mixed", "entropy", "ece", "auroc", "novel_one"])
    assert columns == ["policy", "rollouts of", "pass rate %", "mixed %", "ECE", "AUROC", "novel one"]
    assert lines[0] == ["warm-up", "collect", "50.0", "100.0", "0.125", "–", "4"]
    assert lines[1][4:] == ["–", "0.750", "–"]


def test_pairs_before_and_after(read, finished_run):
    _, _, text = read(finished_run)
    for words in (
        "measure before after change logprob gap 3.5 9.25 +5.75 margin 0 7.5 +7.5",
        "of measure value pairs chosen length 33.25 signal norm over noise 2.75",
        "policy rollouts of pass rate % mixed % ECE AUROC warm-up collect 50.0 100.0 0.125 –",
        "policy rollouts of novel one warm-up collect 4",
        "Prompts of collect by pass rate, %",
        "Pass rates in steps of 1/2.",
    ):
        assert words in text, words


def test_without_measures_there_is_no_section(fresh_run):
    for name in ("04-dpo", "05-evaluate"):
        manifest = read_json(fresh_run / name / "manifest.json")
        for entry in manifest["result"].get("policies", ()):
            del entry["informativeness"]
        write_json(fresh_run / name / "manifest.json", manifest | ({"result": {}} if name == "04-dpo" else {}))
    (fresh_run / "03-collect" / "informativeness.json").unlink()
    (fresh_run / "03-collect" / "informativeness" / "prompts.parquet").unlink()
    section = informativeness(read_run(fresh_run))
    assert not any(part if isinstance(part, str) else part[2] for part in section.parts)
