"""The dry run shows every set: source, count, rows left out and why, and an example as it is trained
on."""

import json
from pathlib import Path
from typing import Any

import pytest
from ml_collections import ConfigDict
from toys import QWEN, make_tokenizer
from worlds import only

from g2d_jax.commands import dryrun
from g2d_jax.config import Invalid
from g2d_jax.rollouts.sample import graded_texts

THINKS = QWEN.replace("assistant\n'", "assistant\n<think>\n'")


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def several(config: ConfigDict, tmp_path: Path) -> ConfigDict:
    """Problems, examples, pairs and rollouts from files, with a template that opens a thought."""
    only(config, "sft", "collect", "dpo")
    tokenizer = make_tokenizer(QWEN)
    tokenizer.chat_template = THINKS
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    config.tokenizer.path = str(tmp_path / "tokenizer")
    config.data.max_prompt_length = 64
    config.reward.function = "verify"
    problems = [{"problem": f"{n}+{n}=?", "answer": str(2 * n)} for n in range(8)]
    holes = [{"problem": "9+9=?", "answer": "nan"}, {"problem": "8+9=?", "answer": "TBD"}]
    config.data.train.update(path=written(tmp_path / "train.jsonl", [*problems, *holes]), split="")
    config.data.train.limit = None
    config.stages.sft.data.update(path=str(tmp_path / "sft.jsonl"), limit=None)
    config.stages.sft.max_length = 256
    config.stages.dpo.preferences = str(tmp_path / "pairs.jsonl")
    config.stages.collect.dump.path = str(tmp_path / "dump.jsonl")
    thought = {"role": "assistant", "content": "Yes.", "reasoning_content": "So be it.", "id": 5}
    asked = {"role": "user", "content": "Add one?"}
    examples = [{"messages": [{**asked, "content": f"Add {n}?"}, thought]} for n in range(18)]
    open_ones = [{"prompt": f"Take {n}?", "completion": "No."} for n in range(2)]
    written(tmp_path / "sft.jsonl", [*examples, *open_ones])
    other = {**thought, "reasoning_content": "Not so."}
    pairs = [
        {"prompt": [{**asked, "content": f"Add {n}?"}], "chosen": [thought], "rejected": [other]}
        for n in range(2)
    ]
    more = [{"prompt": f"Add {n}?", "chosen": "</think>A", "rejected": "B"} for n in range(2, 39)]
    tools = {"prompt": "Add?", "chosen": "A", "rejected": "B", "tools": [{"name": "add"}]}
    written(tmp_path / "pairs.jsonl", [*pairs, *more, tools])
    rows = [
        {"prompt": f"Add {n}?", "completion": f"</think>{m}", "score": m}
        for n in range(2)
        for m in range(2)
    ]
    written(tmp_path / "dump.jsonl", rows)
    return config


def test_every_set_is_shown_with_what_is_left_out_and_an_example(several, tmp_path, capsys):
    dryrun.show(several)
    said = " ".join(capsys.readouterr().out.split())
    sft, pairs = tmp_path / "sft.jsonl", tmp_path / "pairs.jsonl"
    begins = "| <|start|>user | Add 0?<|eot|> | <|start|>assistant | <think>"
    for line in (
        f"train: rows of {tmp_path / 'train.jsonl'} with a placeholder for a missing answer: 1 have 'nan', "
        "1 have 'TBD'",
        "train: 2 problems without a reference answer dropped",
        f"rows of {sft} with thoughts, written in <think> and </think>: 18 have "
        f"'reasoning_content' (the first: {sft}, line 1)",
        f"rows of {sft} whose messages have keys that are not read: 18 have 'id' (the first: {sft}",
        f"sft: 20 examples of {sft}; the first of them:",
        # the template has written <think> in the prompt
        "tokens: | So be it. | </think> | | Yes.<|eot|>",
        "stages.sft.data has 2 of 20 completions that leave a thought open",
        f"rows of {pairs} left out: 1 broken (the first: {pairs}, line 40: 'tools' is for the chat",
        f"dpo: 39 pairs of {pairs}; the first of them:",
        "tokens: | Not so. | </think> | | Yes.<|eot|>",
        f"collect: 4 responses to 2 prompts of {tmp_path / 'dump.jsonl'}; the first of them:",
        "tokens: | </think>0<|eot|>",
    ):
        assert line in said, line
    assert said.count(begins) >= 3


def test_broken_rows_of_recorded_rollouts_are_left_out_where_a_setting_allows_it(
    several, tmp_path, capsys
):
    only(several, "collect")
    with open(tmp_path / "dump.jsonl", "a") as file:
        file.write('{"prompt": "Add 5?"}\n' * 4)
    with pytest.raises(ValueError, match=r'4 of 8 rows are broken; .* on_error="skip"'):
        dryrun.show(several)
    several.stages.collect.dump.on_error = "skip"
    dryrun.show(several)
    said = " ".join(capsys.readouterr().out.split())
    assert f"rows of {tmp_path / 'dump.jsonl'} left out: 4 broken" in said
    assert "collect: 4 responses to 2 prompts" in said


def test_the_dry_run_grades_as_the_run(several, tmp_path, opened, capsys):
    """A response that does not close the prompt's thought has no answer in either."""
    only(several, "sft")
    dryrun.show(several)
    shown = capsys.readouterr().out
    assert shown.count("</think>\\boxed{") == 6
    assert " 1.0 | correct" in shown and "misjudges" not in shown
    session = opened(several, tmp_path / "work", None)
    problem = session.problems.train[0]
    texts = [f"</think>\\boxed{{{problem.answer}}}", f"\\boxed{{{problem.answer}}}"]
    scores = session.scorer(
        [problem] * 2, graded_texts(session.tokenizer, [problem] * 2, texts), [[1]] * 2
    )
    assert [score.verdict.value for score in scores] == ["correct", "no_answer"]


def test_thoughts_that_the_template_does_not_write_are_refused(several, tmp_path):
    only(several, "sft")
    make_tokenizer(QWEN).save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(
        ValueError, match=r"18 have 'reasoning_content' .*line 1.* No chat template in use writes"
    ):
        dryrun.show(several)


def test_missing_answers_are_counted_and_tried_with_a_function(
    several, tmp_path, monkeypatch, capsys
):
    (tmp_path / "needs_answers.py").write_text(
        "def reward(completions, answer, **_):\n    return [len(text) for text in answer]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    only(several, "sft")
    several.reward.function = "needs_answers:reward"
    with pytest.raises(Invalid, match=r"^reward\.function cannot be used: .* TypeError"):
        dryrun.show(several)
    assert "train: 2 of 10 problems have no reference answer" in capsys.readouterr().out
    written(tmp_path / "train.jsonl", [{"problem": "1+1=?", "gold": "2"}])
    with pytest.raises(Invalid, match=r"^reward\.function cannot be used: .* TypeError"):
        dryrun.show(several)
    said = capsys.readouterr().out
    assert "train: 1 of 1 problems have no reference answer" in said
    assert "none was found in answer, ground_truth" in said and "fields={'answer': NAME}" in said


@pytest.mark.parametrize("form", ["The answer is {}.", r"\boxed{{{}}}"])
def test_demonstrations_are_read_as_the_reward_reads_responses(
    several: ConfigDict, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    """Also those behind a system message; those of other problems are not looked at."""
    only(several, "sft")
    system = {"role": "system", "content": "Be brief."}
    rows: list[dict[str, Any]] = []
    for n in range(8):
        reply = {"role": "assistant", "content": f"</think>{form.format(2 * n)}"}
        rows.append({"messages": [system, {"role": "user", "content": f"{n}+{n}=?"}, reply]})
    rows += [{"prompt": f"Hello {n}", "completion": "</think>Hi"} for n in range(20)]
    written(tmp_path / "sft.jsonl", rows)
    dryrun.show(several)
    said = " ".join(capsys.readouterr().out.split())
    warned = (
        "stages.sft.data teaches answers that get no reward: reward.answers='boxed' finds no answer in 100% "
        "of the demonstrations, such as "
        "'</think>The answer is 0.'"
    )
    assert (warned in said) == (form[0] == "T")
    assert ("reward.answers='last_line', which reads 100% of these" in said) == (form[0] == "T")
    assert "asks for no form" not in said


def test_a_prompt_that_asks_for_no_form_is_warned_of_without_demonstrations(
    several: ConfigDict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    only(several, "collect", "dpo")
    dryrun.show(several)
    asks = r"reward.answers is 'boxed', and the prompt asks for no form of answers"
    assert asks in " ".join(capsys.readouterr().out.split())
    written(tmp_path / "train.jsonl", [{"problem": r"1+1=? Use \boxed{}.", "answer": "2"}])
    dryrun.show(several)
    assert "asks for no form" not in capsys.readouterr().out


def test_what_counts_as_correct_is_said_of_a_function(
    several: ConfigDict,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "near.py").write_text(
        "def reward(completions, **_):\n    return [0.42 for text in completions]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    only(several, "sft")
    several.reward.update(function="near:reward", correct_above=0.4)
    dryrun.show(several)
    assert "are correct above reward.correct_above=0.4" in capsys.readouterr().out
