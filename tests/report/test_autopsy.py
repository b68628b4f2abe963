"""The autopsy of a run by its rollouts: those that TRL wrote, made-up ones in other formats; and
its config."""

import csv
import json
from pathlib import Path

import jax
import pandas as pd
import pytest

from g2d_jax import cli, pipeline
from g2d_jax.data import arithmetic
from g2d_jax.models import decoder, hf
from g2d_jax.models.config import ModelConfig
from g2d_jax.recipes.config_load import resolve
from g2d_jax.report.autopsy import read, report, verdict, write_autopsy
from g2d_jax.session import stage_result

TRL = str(Path(__file__).parent / "trl-1.16")
SHAPE = ModelConfig("qwen2", 22, 16, 1, 2, 1, 8, 16, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the command wrote for TRL's tables."""
    folder = tmp_path_factory.mktemp("autopsy")
    policy = folder / "policy"
    hf.save(decoder.init(SHAPE, jax.random.key(0)), policy, eos_ids=(1,))
    arithmetic.tokenizer().save_pretrained(policy)
    assert cli.main(["autopsy", TRL, "--output", str(folder / "out"), "--policy", str(policy)]) == 0
    return folder / "out"


def save(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_what_trl_s_tables_say(written: Path) -> None:
    with open(written / "autopsy.csv") as file:
        values = {
            (row["step"], row["measure"]): float(row["value"]) for row in csv.DictReader(file)
        }
    table = pd.read_parquet(Path(TRL) / "completions_00012.parquet")
    rates = table.groupby("prompt").accuracy_reward.mean()
    answers = (
        table.completion.str.extract(r"boxed\{(.*)\}")[0]
        .groupby(table.prompt)
        .nunique(dropna=False)
    )
    expected = {
        "responses": 256,
        "prompts": 32,
        "pass_rate": rates.mean(),
        "frac_mixed": rates.between(0, 1, inclusive="neither").mean(),
        "reward_std": table.groupby("prompt").accuracy_reward.std(ddof=0).mean(),
        "distinct_answers": answers.mean(),
        "mean_length": table.completion.str.len().mean(),
    }
    assert {name: values["12", name] for name in expected} == pytest.approx(expected)
    # the tables do not say what was cut
    assert values["12", "frac_truncated"] != values["12", "frac_truncated"]
    assert (
        values["", "bend/step/value"],
        values["", "bend/step/low"],
        values["", "bend/step/high"],
    ) == (12, 12, 16)
    said = (written / "autopsy.md").read_text()
    # 12 is the first step that is tried
    assert "at step 12 or earlier: a step added +2.6 points" in said
    assert "length in characters" in said and "2605.21266" in said


def test_its_config_makes_the_pairs_that_it_counted(written: Path, tmp_path: Path) -> None:
    config = resolve(
        str(written / "autopsy_dpo.py"), ["dtype=float32", "logging.tensorboard=false"]
    )
    pipeline.run(config, tmp_path / "run", until="collect")
    counts = stage_result.read(tmp_path / "run" / "01-collect").counts
    assert (
        f"steps 12 to 16: {counts['pairs']} pairs of {counts['prompts']} prompts"
        in (written / "autopsy.md").read_text()
    )
    rows = [json.loads(line) for line in (written / "rollouts.jsonl").read_text().splitlines()]
    assert counts["rollouts"] == len(rows) == 512 and {row["step"] for row in rows} == {12, 16}


def test_without_a_policy_its_config_is_refused(written: Path, tmp_path: Path, capsys) -> None:
    file = tmp_path / "autopsy_dpo.py"
    text = (written / "autopsy_dpo.py").read_text()
    file.write_text(text.replace(f"POLICY = {str(written.parent / 'policy')!r}", "POLICY = ''"))
    assert cli.main(["run", "--config", str(file), "--dry-run"]) == 1
    assert "autopsy_dpo.py, line 22: POLICY is empty: fill in its line" in capsys.readouterr().err


def test_rewards_that_rank_log_probs_and_steps_that_repeat(tmp_path: Path) -> None:
    rows = [
        {
            "step": step,
            "prompt": f"<b>{prompt}</b>",
            "completion": f"{step // 2}{sample}",
            "completion_ids": [1, 2],
            "logprobs": [-0.5, -1.5],
            "finish_reason": "length" if sample else "stop",
            "reward": [0.0, 0.5, 2.0][(sample + prompt) % 3] * (step == 4 or sample),
        }
        for step in (1, 2, 3, 4)
        for prompt in range(2)
        for sample in range(3)
    ]
    dump = save(tmp_path / "dump.jsonl", rows)
    found = read([dump])
    assert list(found.measures.index) == [1, 2, 4] and found.repeated == [3]
    assert (
        not found.verifiable and "length in tokens" in report(found, "run").parts["steps"][0].title
    )
    last = found.measures.loc[4]
    assert (
        last["pairs"] == 2
        and last["reward_mean"] == pytest.approx(2.5 / 3)
        and last["frac_truncated"] == 2 / 3
    )
    assert (
        last["confidence"] == pytest.approx(2.718281828**-1)
        and last["pass_rate"] != last["pass_rate"]
    )
    assert "No clear point" in verdict(found) and found.chosen == (1, 1) and found.checkpoint == 1
    page = report(found, "<script>")
    paths = write_autopsy(found, page, [dump], tmp_path / "out", {}, "")
    markup = Path(paths[0]).read_text()
    assert "<script>" not in markup.split("</head>")[1] and "repeat earlier rollouts: 3" in markup
    assert "verifiable=False" in (tmp_path / "out" / "autopsy_dpo.py").read_text()


def test_rows_that_cannot_be_read_are_left_out_and_counted(tmp_path: Path) -> None:
    good = {"prompt": "1+1=?", "step": 1}
    rows = [{**good, "completion": str(n), "reward": float(n == 2)} for n in range(4)]
    broken = [{**rows[0], "reward": "high"}, {"prompt": "1+1=?"}, {**rows[0], "logprobs": [-1e30]}]
    dump = save(tmp_path / "dump.jsonl", [*rows[:2], *broken, *rows[2:]])
    with open(dump, "a") as file:
        file.write('{"prompt": "1+1=')
    found = read([dump])
    first = found.measures.loc[1]
    assert first["responses"] == 4 and first["pass_rate"] == 0.25
    page = report(found, "run")
    (warning,) = page.warnings
    assert warning.startswith(f"Rows left out: 4 broken (the first: {dump}, line 3: its reward")
    write_autopsy(found, page, [dump], tmp_path / "out", {}, "")
    kept = (tmp_path / "out" / "rollouts.jsonl").read_text().splitlines()
    assert list(map(json.loads, kept)) == rows
    with pytest.raises(ValueError, match=r"dump\.jsonl has no usable row: 3 rows"):
        read([save(tmp_path / "dump.jsonl", broken)])


def test_prompts_after_a_template_need_their_problems(tmp_path: Path) -> None:
    row = {"rendered_prompt": "user\n1+1=?", "step": 1}
    rows = [{**row, "completion": str(n), "score": float(n == 2)} for n in range(4)]
    dump = save(tmp_path / "1.jsonl", rows)
    columns = {"reward": "score"}
    found = read([dump], columns)
    first = found.measures.loc[1]
    assert found.verifiable and first["pass_rate"] == 0.25 and first["pairs"] == 3
    write_autopsy(found, report(found, "run"), [dump], tmp_path / "out", columns, str(tmp_path))
    text = (tmp_path / "out" / "autopsy_dpo.py").read_text()
    assert "\"columns\": {'reward': 'score'}" in text
    with pytest.raises(ValueError, match=r"line 22: PROBLEMS is empty: fill in its line"):
        resolve(str(tmp_path / "out" / "autopsy_dpo.py"))


def test_different_answers_are_counted_by_the_rule_that_is_named(tmp_path: Path) -> None:
    texts = ["Answer: 1", "Answer: 2", "Answer: 2", "none"]
    rows = [
        {"prompt": "1+1=?", "completion": text, "reward": "2" in text, "step": 1} for text in texts
    ]
    dump = save(tmp_path / "dump.jsonl", rows)
    counts = [
        read([dump], None, rule).measures["distinct_answers"][1] for rule in ("boxed", "last_line")
    ]
    assert counts[0] != counts[0] and counts[1] == 3  # NaN: no answer at all


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"prompt": "p", "completion": "c", "reward": 1}, "line 1: it has no step"),
        (
            {"prompt": "p", "completion": "c", "answer": "1", "step": 1},
            "line 1: it has no reward",
        ),
    ],
)
def test_a_dump_that_does_not_tell(tmp_path: Path, row: dict, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        read([save(tmp_path / "dump.jsonl", [row])])
