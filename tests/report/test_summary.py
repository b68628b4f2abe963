"""The result table and the sentence above it, from literal manifests."""

from pathlib import Path

import pytest

from g2d_jax.report import summary_table, write_all
from g2d_jax.report.page import markdown
from g2d_jax.report.run import read_run
from g2d_jax.report.run_page import report
from g2d_jax.report.summary import compute_table, policy_name, selection_table, tasks_table, verdict
from g2d_jax.storage import finish

COLD = {"name": "sft", "label": "cold", "mean": 0.3338, "std_runs": 0.0072, "sem_clustered": 0.0101}
COLD |= {"pass_at": {"1": 0.3338, "2": 0.48, "4": 0.612}, "greedy": 0.51}
WARM = {**COLD, "name": "warmup@20", "label": "warm-up", "mean": 0.7, "greedy": None}
BEST = {**COLD, "name": "dpo", "label": "G2D", "mean": 0.7524, "sem_clustered": "NaN"}
PAIRED = [
    {"before": "sft", "after": "warmup@20", "difference": 0.3662, "sem": 0.011},
    {"before": "warmup@20", "after": "dpo", "difference": 0.0524, "sem": 0.008},
]
EVALUATION = {"kind": "evaluate", "name": "evaluate", "seconds": 5.0, "flops": 1e9}
EVALUATION |= {"result": {"policies": [COLD, WARM, BEST], "paired": PAIRED, "problems": 1024, "samples": 4}}


def stage(name: str, kind: str, generated: int, trained: int, flops: float, seconds: float, *inputs: str) -> dict:
    tokens = {"generated": generated, "prefilled": 0, "scored": 0, "trained": trained}
    return {"name": name, "kind": kind, "tokens": tokens, "flops": flops, "seconds": seconds} | {
        "inputs": dict.fromkeys(inputs, "fingerprint")
    }


STAGES = [
    stage("sft", "sft", 0, 5_120_000, 9.5e12, 84.2),
    stage("warmup", "online", 128_400, 148_000, 4.1e11, 31.7, "sft"),
    stage("collect", "collect", 221_000, 0, 1.6e11, 12.6, "warmup"),
    stage("dpo", "offline", 0, 331_000, 5.0e11, 24.9, "warmup", "collect"),
    EVALUATION,
]


def test_the_table():
    title, columns, rows = summary_table(EVALUATION, STAGES)
    assert "1,024 problems, 4 answers each" in title
    assert columns == ["policy", "pass@1 %", "pass@4 %", "greedy %", "change",
                       "made by", "generated", "trained", "FLOPs", "time"]  # fmt: skip
    assert rows == [
        ["cold (sft)", "33.4 ± 1.0", "61.2", "51.0", "–", "sft", "0", "5.12 M", "9.50 T", "1 min 24 s"],
        ["warm-up (warmup@20)", "70.0 ± 1.0", "61.2", "–", "+36.6 ± 1.1",
         "warmup", "128 k", "148 k", "410 G", "32 s"],
        ["G2D (dpo)", "75.2", "61.2", "51.0", "+5.2 ± 0.8",
         "collect + dpo", "221 k", "331 k", "660 G", "38 s"],
    ]  # fmt: skip


def chat(reward: float, **accuracy: float) -> dict:
    """Results of a task with a scalar reward, after those of the main task where it has accuracies."""
    tasks = {"main": {"reward": 0.5, "sem": 0.1, "accuracy": 0.5, "problems": 8}} if accuracy else {}
    scored = {"reward": reward, "sem": 0.125, "accuracy": None, "problems": 4, "unscorable": 0.25}
    return {"tasks": {**tasks, "chat": {**scored, "length_normalised": reward / 10}}, "mean": None, **accuracy}


def rewarded(*entries: dict) -> dict:
    pair = {"before": "sft", "after": "dpo", "tasks": {"chat": {"difference": 0.5, "sem": 0.0625}}}
    policies = [{"name": name, **entry} for name, entry in zip(("sft", "dpo"), entries, strict=True)]
    return {"result": {"policies": policies, "paired": [pair], "problems": 4, "samples": 2}}


def test_rewards_stand_where_there_is_no_accuracy():
    evaluation = rewarded(chat(1.0), chat(1.5))
    title, columns, rows = summary_table(evaluation, [])
    assert title == "Reward on 4 problems, 2 answers each (± standard error clustered by problem; changes are paired)"
    assert columns == ["policy", "reward", "change"]
    assert rows == [["cold (sft)", "1 ± 0.12", "–"], ["G2D (dpo)", "1.5 ± 0.12", "+0.5 ± 0.062"]]
    assert verdict(evaluation) == (
        "Cold (sft) has a mean reward of 1 ± 0.12 on 4 held-out problems; G2D (dpo) rises to 1.5 (+0.5 ± 0.062)."
    )
    figures = ["chat", "–", "1 ± 0.12", "–", "0.1", "–", "–", "4", "25.0"]
    assert tasks_table(evaluation)[2][0][1:] == figures


def test_accuracy_and_rewards_of_a_mixed_evaluation():
    evaluation = rewarded(chat(1.0, mean=0.5, sem_clustered=0.1), chat(1.5, mean=0.5))
    title, columns, rows = summary_table(evaluation, [])
    assert title.startswith("Accuracy on 8 problems, ")
    assert columns == ["policy", "pass@1 %", "greedy %", "change", "chat reward", "chat change"]
    assert rows[0][1] == "50.0 ± 10.0" and rows[1][-2:] == ["1.5 ± 0.12", "+0.5 ± 0.062"]
    assert [row[1:3] for row in tasks_table(evaluation)[2]] == [["main", "50.0"], ["chat", "–"]] * 2
    assert verdict(evaluation).startswith("Cold (sft) answers 50.0 ± 10.0 % of 8 held-out problems correctly")


def test_what_a_selection_saw():
    steps = {"10": {"score": 0.5, "sem": 0.1, "tasks": {"main": {}}}, "20": {"score": 0.75, "tasks": {"main": {}}}}
    manifest = {"name": "best", "result": {"policy": "train@20", "split": "dev", "steps": steps}}
    title, columns, rows = selection_table(manifest)
    assert title == "Selection best: train@20 by its score on dev (± standard error)"
    assert (columns, rows) == (["step", "score"], [["10", "0.5 ± 0.1"], ["20 (chosen)", "0.75"]])


def test_steps_of_a_selection_are_numbers(read, tmp_path):
    steps = {step: {"score": 0.5} for step in ("10", "100", "last", "20", "9")}
    result = {"policy": "train@9", "split": "dev", "steps": steps}
    said = [{"cause": "negative main", "step": 0, "text": "best: rewards are *negative*"}]
    manifest = {"name": "best", "kind": "select", "seconds": 1.0, "result": result, "warnings": said}
    finish(tmp_path / "01-best", manifest)
    _, _, rows = selection_table({"name": "best", "result": result})
    assert [row[0] for row in rows] == ["9 (chosen)", "10", "20", "100", "last"]
    text = markdown(report(read_run(tmp_path)))
    assert "\n\n- Warning: best: rewards are \\*negative\\*\n\n## Result\n\nSelection best" in text
    assert "best: rewards are *negative*" in read(tmp_path)[2]


@pytest.mark.parametrize("path", ["run:/runs/cold#sft", "hf:org/model", "models/cold"])
def test_no_sentence_begins_with_a_capitalised_path(path):
    cold = {"name": path, "mean": 0.25}
    result = {"policies": [cold], "problems": 9, "samples": 1}
    assert verdict({"result": result}) == f"The policy {path} answers 25.0 % of 9 held-out problems correctly."
    scalar = {"result": {**result, "policies": [{"name": path, **chat(1.0)}]}}
    assert verdict(scalar) == f"The policy {path} has a mean reward of 1 ± 0.12 on 9 held-out problems."


def test_a_stages_cost_counts_once():
    policies = [{**WARM, "name": f"warmup@{k}"} for k in (10, 20)]
    evaluation = {"result": {"policies": policies, "problems": 2, "samples": 1}}
    _, columns, rows = summary_table(evaluation, STAGES[1:2])
    made_by = columns.index("made by")
    assert [row[made_by] for row in rows] == ["–", "warmup"]


def test_without_evaluation_there_are_no_rows():
    title, columns, rows = summary_table(None, STAGES)
    assert title == "No evaluation is finished yet"
    assert rows == columns == []


def test_a_policy_with_nothing_but_a_name():
    evaluation = {"result": {"policies": [{"name": "base"}]}}
    _, columns, rows = summary_table(evaluation, [])
    assert columns == ["policy", "pass@1 %", "greedy %", "change"]
    assert rows == [["base", *["–"] * (len(columns) - 1)]]
    assert verdict(evaluation) == "Base answers – % of – held-out problems correctly."


def test_compute_sums_up():
    title, columns, rows = compute_table(STAGES[:4])
    assert title == "Compute of each finished stage"
    assert rows[-1] == ["all stages", "", "349 k", "0", "0", "5.60 M", "10.6 T", "2 min 33 s", "–"]
    assert len(rows) == 5 and all(len(row) == len(columns) for row in rows)
    assert len(compute_table(STAGES[:1])[2]) == 1  # no total of one


def test_device_time_is_shown_where_it_differs_and_its_price_where_one_is_set():
    stages = [{**one, "device_seconds": 8 * one["seconds"], "verifier_cpu_seconds": 1.0} for one in STAGES[:2]]
    _, columns, rows = compute_table(stages, price_per_device_hour=4.5)
    assert columns[-4:] == ["time", "device time", "verifier CPU", "price"]
    assert [row[-4:] for row in rows] == [
        ["1 min 24 s", "11 min 14 s", "1.0 s", "0.84"],
        ["32 s", "4 min 14 s", "1.0 s", "0.32"],
        ["1 min 56 s", "15 min 27 s", "2.0 s", "1.16"],
    ]
    same = [{**one, "device_seconds": one["seconds"]} for one in STAGES[:2]]
    assert compute_table(same)[1][-3:] == ["FLOPs", "time", "verifier CPU"]
    old = compute_table(STAGES[:1], price_per_device_hour=4.5)  # without device_seconds: not known
    assert old[1][-1] == "price" and old[2][0][-1] == "–"


def test_the_sentence_is_made_of_measured_numbers():
    assert verdict(EVALUATION) == (
        "Cold (sft) answers 33.4 ± 1.0 % of 1,024 held-out problems correctly; "
        "warm-up (warmup@20) rises to 70.0 % (+36.6 ± 1.1 points); G2D (dpo) rises to 75.2 % (+5.2 ± 0.8 points)."
    )


def test_greedy_answers_are_compared_like_sampled_ones():
    policies = [{**entry, "greedy": value} for entry, value in ((COLD, 0.066), (WARM, 0.652), (BEST, 0.77))]
    greedily = [{"difference": 0.586, "sem": 0.022}, {"difference": 0.118, "sem": 0.014}]
    paired = [{**pair, "greedy": found} for pair, found in zip(PAIRED, greedily, strict=True)]
    evaluation = {"result": {**EVALUATION["result"], "policies": policies, "paired": paired}}
    assert verdict(evaluation).endswith(
        "(+5.2 ± 0.8 points). Decoded greedily: 6.6 %, then 65.2 % (+58.6 ± 2.2), then 77.0 % (+11.8 ± 1.4)."
    )
    _, columns, rows = summary_table(evaluation, [])
    at = columns.index("greedy change")
    assert [row[at] for row in rows] == ["–", "+58.6 ± 2.2", "+11.8 ± 1.4"]


@pytest.mark.parametrize(
    ("difference", "sem", "words"),
    [
        (0.02, 0.0101, "G2D (dpo) at 75.2 % is within two standard errors of cold (sft) (+2.0 ± 1.0 points)"),
        (-0.02, 0.0101, "within two standard errors"),
        (-0.03, 0.01, "G2D (dpo) falls to 75.2 % (-3.0 ± 1.0 points)"),
        (0.03, "NaN", "G2D (dpo) reaches 75.2 % (not compared pairwise with cold (sft))"),
    ],
)
def test_a_change_within_noise_is_called_so(difference, sem, words):
    pair = {"before": "sft", "after": "dpo", "difference": difference, "sem": sem}
    assert words in verdict({"result": {"policies": [COLD, BEST], "paired": [pair], "problems": 9, "samples": 1}})


def test_markdown(finished_run):
    lines = Path(write_all(finished_run)[1]).read_text(encoding="utf-8").splitlines()
    assert lines[0] == "# demo"
    header = next(i for i, line in enumerate(lines) if line.startswith("| policy"))
    assert lines[header + 1].startswith("| --- | ---: |")
    assert [line.split(" | ")[0] for line in lines[header + 2 : header + 5]] == [
        "| cold (sft)",
        "| warm-up",
        "| G2D (dpo)",
    ]
    assert any(line.startswith("| all stages |") for line in lines)


def test_labels_of_the_shipped_stages():
    names = ("sft", "warmup", "warmup@10", "dpo", "grpo", "hf:org/model")
    expected = ["cold (sft)", "warm-up", "warm-up (warmup@10)", "G2D (dpo)", "grpo", "hf:org/model"]
    assert [policy_name({"name": name, "label": name}) for name in names] == expected
    assert policy_name({"name": "dpo", "label": "offline DPO"}) == "offline DPO (dpo)"
