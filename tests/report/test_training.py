"""What training did, from literal manifests: in report.md, report.csv and report.html."""

import csv
from pathlib import Path

from g2d_jax.report import write_all
from g2d_jax.report.page import markdown
from g2d_jax.report.run import read_run
from g2d_jax.report.run_page import report
from g2d_jax.storage import finish, write_json

FIRST = {"step": 0, "entropy": 0.5, "completions/mean_length": 20.0, "accuracy": 0.25, "kl": 0.0}
MIDDLE = {**FIRST, "step": 10, "entropy": 9.0}
LAST = {"step": 20, "entropy": 0.125, "completions/mean_length": 24.5, "accuracy": 0.75, "kl": 0.03}
COST = {"seconds": 12.0, "tokens": {"generated": 12_345}}
DPO = {
    "counts": {
        **{"steps": 20, "rollouts": 5120, "train_problems": 900, "prompts": 640, "pairs": 600, "skipped": 40},
        "left_out": 77,
    },
    "generation": {"calls": 4, "prompts_per_call": 160.000000003, "tokens_per_second": 4321.4, "share": 0.375},
    "dynamics": {"probes": [FIRST, MIDDLE, LAST], "probe_cost": COST},
    "warnings": [{"step": 9, "text": "spdpo, step 9: the entropy has collapsed"}],
}
GRPO = {
    "counts": {"steps": 40, "rollouts": 10240, "train_problems": 900, "prompts": 1280},
    "generation": {"calls": 40, "prompts_per_call": 32.0, "tokens_per_second": 900.0, "share": 0.8},
}
STAGES = {
    "warmup": ({"loss": "grpo", "beta": 0.0, "sync_every": 1, "reference_sync": False}, GRPO),
    "train": ({"loss": "dpo", "beta": 0.0, "sync_every": 0, "reference_sync": True}, DPO),
    "old": ({}, {"counts": {"steps": 5, "rollouts": 80}}),
    "older": ({}, {}),
}


def made(workdir: Path, stages: dict = STAGES) -> Path:
    """Finished online stages, as named, each of a section of the config and fields of a manifest."""
    sections = {name: {"kind": "online", **section} for name, (section, _) in stages.items()}
    write_json(workdir / "config.json", {"config": {"name": "made", "stages": sections}})
    for number, (name, (_, fields)) in enumerate(stages.items(), 1):
        finish(workdir / f"{number:02d}-{name}", {"name": name, "kind": "online", "seconds": 1.0, **fields})
    return workdir


def test_markdown_and_page_have_them(read, tmp_path):
    text = markdown(report(read_run(made(tmp_path))))
    for line in ("| measure | warmup | train | old | older |", "| rollouts | 10,240 | 5,120 | 80 | – |"):
        assert line in text
    assert "| left out | – | 77 | – | – |" in text and "| generation, share | 0.8 | 0.375 | – | – |" in text
    assert "\n- Warning: spdpo, step 9: the entropy has collapsed\n" in text
    _, page, seen = read(tmp_path)
    assert "#curves" in page.links
    for words in ("rollouts 10,240 5,120 80 –", "generation, calls 40 4 – –", "step 9: the"):
        assert words in seen


def test_figures_in_the_spreadsheet(tmp_path):
    with open(write_all(made(tmp_path))[2], newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))[1:]
    found = {(stage, measure): value for stage, _, measure, value in rows}
    assert len(found) == len(rows)
    for measure, value in {
        "counts/steps": "20",
        "counts/prompts": "640",
        "counts/rollouts": "5120",
        "counts/pairs": "600",
        "counts/skipped": "40",
        "counts/left_out": "77",
        "generation/calls": "4",
        "generation/share": "0.375",
    }.items():
        assert found["train", measure] == value, measure
    assert not [measure for stage, measure in found if stage == "older" and measure != "seconds"]
