"""Problems whose reference answer the verifier cannot read: found out once, told, left out or
graded by equal text."""

import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from worlds import only

from g2d_jax import config as settings
from g2d_jax.config import Dump
from g2d_jax.records import Verdict
from g2d_jax.rollouts import external as external_rollouts
from g2d_jax.runtime import processes, storage
from g2d_jax.session import golds

PROSE, SENTENCE = "about 72 apples I think", "It is seven, since 3 + 4 = 7."
NO_FORMULA = r"\oplus\oplus"  # which takes a worker to say, and the others do not


def lines(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def problems(path: Path, first: int, *answers: str) -> str:
    return lines(
        path,
        [{"problem": f"{first + n}+1=?", "answer": answer} for n, answer in enumerate(answers)],
    )


@pytest.fixture
def asking(config, tmp_path):
    """The config with a stage that samples, and two, one and one golds of three splits that cannot
    be read."""
    only(config, "warmup")
    config.reward.function = "verify"
    for split, first, answers in (
        ("train", 0, ("1", SENTENCE, "3", PROSE, "5", '["1,234"]')),
        ("dev", 20, ("21", SENTENCE)),
        ("test", 40, (PROSE, "42", "43")),
    ):
        config.data[split] = settings.source(problems(tmp_path / f"{split}.jsonl", first, *answers))
    return config


def answers(session) -> dict[str, list[str]]:
    return {
        split: [problem.answer for problem in of] for split, of in session.problems.by_split.items()
    }


def said(capsys) -> str:
    return " ".join(capsys.readouterr().out.split())


LEFT = {"train": ["1", "3", "5", "1,234"], "dev": ["21"], "test": ["42", "43"]}
ALL = {
    "train": ["1", SENTENCE, "3", PROSE, "5", "1,234"],
    "dev": ["21", SENTENCE],
    "test": [PROSE, "42", "43"],
}


def test_they_are_left_out_of_every_split_and_told(asking, tmp_path, opened, capsys):
    session = opened(asking, tmp_path / "work", None)
    assert answers(session) == LEFT
    train, dev, test = map(str, session.problems.issues)
    assert train.startswith(
        "data.train has 2 of 6 reference answers that the verifier cannot read, so their problems "
        "are left out: 'It is seven, since 3 + 4 = 7.' (problem "
    )
    assert "'about 72 apples I think' (problem " in train
    assert dev.startswith("data.dev has 1 of 2 ") and test.startswith("data.test has 1 of 3 ")
    assert [problem.answer for problem in session.problems.left_out["train"]] == [SENTENCE, PROSE]
    assert {problem.answer for problem in session.problems.held_out} == {
        "21",
        SENTENCE,
        PROSE,
        "42",
        "43",
    }


def test_a_problem_left_out_of_a_held_out_split_is_not_trained_on(asking, tmp_path, opened):
    """Else a policy would know it once a verifier reads it."""
    rows = [{"problem": "40+1=?", "answer": "41"}, {"problem": "1+1=?", "answer": "2"}]
    asking.data.train.path = lines(tmp_path / "more.jsonl", rows)
    assert answers(opened(asking, tmp_path / "work", None))["train"] == ["2"]


def test_other_rewards_ask_nothing(asking, tmp_path, opened, capsys):
    choices = {"texts": {}, "even": {"function": "tiny:even"}}
    for first, (name, changes) in zip((60, 80), choices.items(), strict=True):
        train = settings.source(problems(tmp_path / f"{name}.jsonl", first, SENTENCE, "62"))
        with asking.tasks.unlocked():
            asking.tasks[name] = settings.task(
                train, settings.source(""), settings.source(""), **changes
            )
    session = opened(asking, tmp_path / "work", None)
    assert answers(session)["train"] == [*LEFT["train"], SENTENCE, "62", "62"]
    issue, *_ = session.problems.issues
    assert str(issue).startswith("data.train has 3 of 8 reference answers")
    own = opened(asking, tmp_path / "own")  # a function of the user's in place of the main task's
    assert answers(own)["train"][:6] == [*ALL["train"][:5], '["1,234"]']  # as the data has them
    asking.reward.function = asking.tasks.texts.reward.function = "tiny:even"
    opened(asking, tmp_path / "none", None)
    assert not (tmp_path / "none" / "golds").exists()


def test_what_was_found_out_holds_for_the_run_and_asks_no_worker_again(asking, tmp_path, opened):
    """As a start under a verifier that reads more, or less, would find it."""
    more = ("1", NO_FORMULA, "3", PROSE, "5", "x+1")
    asking.data.train.path = problems(tmp_path / "more.jsonl", 0, *more)
    first = opened(asking, tmp_path / "work", None)
    left = {**LEFT, "train": ["1", "3", "5", "x+1"]}
    assert answers(first) == left and first.scorer.verifier("main").cpu_seconds > 0
    file = tmp_path / "work" / "golds" / "read.jsonl"
    found = dict(map(json.loads, file.read_text().splitlines()))
    assert len(found) == 10 and sum(found.values()) == 7  # by gold: PROSE stands in two splits
    key = storage.fingerprint(["42", 5.0])
    assert found[key] is True
    file.write_text(
        "".join(json.dumps([name, name != key and read]) + "\n" for name, read in found.items())
    )
    again = opened(asking, tmp_path / "work", None)
    assert answers(again) == {**left, "test": ["43"]}
    (problem,) = [problem for problem in again.problems.left_out["test"] if problem.answer == "42"]
    (score,) = again.scorer([problem], [r"\boxed{42}"], [np.zeros(1, np.int32)])
    assert score.verdict is Verdict.UNSCORABLE
    assert not again.scorer.verifier("main").workers
    asking.reward.cpu_seconds = 4.0  # another limit, before a stage has begun: found out anew
    assert answers(opened(asking, tmp_path / "work", None)) == left
    file.write_text("[]\n")
    with pytest.raises(ValueError, match=r"golds/read\.jsonl is damaged: .* Restore a copy"):
        opened(asking, tmp_path / "work", None)


def test_what_was_found_out_before_a_stop_is_kept(asking, tmp_path, opened, monkeypatch):
    monkeypatch.setattr(golds, "AT_ONCE", 1)
    asking.reward.cpu_seconds = 300.0
    asking.data.train.path = problems(
        tmp_path / "slow.jsonl", 0, "x+1", "x^{" * 900 + "x" + "}" * 900
    )
    file = tmp_path / "work" / "golds" / "read.jsonl"

    def stop() -> None:
        while not file.exists() or not file.read_text():
            time.sleep(0.05)
        processes.ask(processes.SIGTERM)

    stopping = threading.Thread(target=stop)
    stopping.start()
    try:
        with pytest.raises(processes.Preempted):
            opened(asking, tmp_path / "work", None)
    finally:
        stopping.join()
        processes.reset_stop()
    assert json.loads(file.read_text()) == [storage.fingerprint(["x+1", 300.0]), True]


def test_a_points_golds_are_those_of_its_study(asking, tmp_path, opened):
    study, point = tmp_path / "study", tmp_path / "study" / "points" / "name" / "a"
    opened(asking, study, None)
    storage.write_json(point / "stages.json", [["warmup", "../../../stages/warmup-0", None]])
    session = opened(asking, point, None)
    assert answers(session) == LEFT and not session.scorer.verifier("main").workers
    assert not (point / "golds").exists()


def test_rollouts_of_a_problem_that_is_left_out_are_left_out_too(asking, tmp_path, opened, capsys):
    rows = [
        {"prompt": "0+1=?", "completion": r"\boxed{1}"},
        {"prompt": "1+1=?", "completion": r"\boxed{2}"},
    ]
    path = lines(
        tmp_path / "rows.jsonl", [*rows, {"prompt": "3+1=?", "completion": "4", "reward": 1}]
    )
    session = opened(asking, tmp_path / "work", None)
    ((kept,),) = external_rollouts.read(session, Dump(path=path))
    assert kept.text == r"\boxed{1}"
    assert "rows.jsonl: 2 responses are left out, because the verifier" in said(capsys)
    held_out = lines(
        tmp_path / "held.jsonl", [{"prompt": "40+1=?", "completion": "41", "reward": 1}]
    )
    with pytest.raises(ValueError, match=r"its prompt is in data\.dev or data\.test"):
        external_rollouts.read(session, Dump(path=held_out))


def test_a_split_of_such_problems_alone_is_refused(asking, tmp_path, opened):
    asking.data.dev.path = problems(tmp_path / "prose.jsonl", 60, PROSE, SENTENCE)
    with pytest.raises(
        ValueError, match=r"data\.dev has no problem left: data\.dev has 2 of 2 reference"
    ):
        opened(asking, tmp_path / "work", None)
