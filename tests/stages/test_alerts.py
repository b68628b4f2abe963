"""What is said to have gone wrong in a stage: the rules, and that each is said once."""

import math

import numpy as np
import pytest
from ml_collections import ConfigDict
from worlds import only, run, training

from g2d_jax.config import Dump, Offline, Online, Optimizer
from g2d_jax.config.io import to_dict
from g2d_jax.records import Verdict
from g2d_jax.report.page import text as markdown
from g2d_jax.report.run import report
from g2d_jax.report.runs import read_run
from g2d_jax.runtime.storage import write_json
from g2d_jax.runtime.tracking import read_metrics
from g2d_jax.session.stage_result import Warned
from g2d_jax.stages import alerts, online
from g2d_jax.stages.alerts import collapse, too_few
from g2d_jax.stages.causes import Cause

ONLINE = Online()
CAUSE = Cause("90% of the responses have no answer", "easier problems", Verdict.NO_ANSWER)


@pytest.fixture
def small(config: ConfigDict) -> ConfigDict:
    """One stage from random parameters."""
    return only(config, "dpo")


def causes(found: list[Warned]) -> list[str]:
    return [alert.cause for alert in found]


def falling(first: float, last: float, steps: int = 60, noise: float = 0.1) -> list[float]:
    """From one value to the other by equal factors, with noise."""
    rng = np.random.default_rng(0)
    return [
        first * (last / first) ** (i / (steps - 1)) * (1 + noise * rng.normal())
        for i in range(steps)
    ]


# First and last value of entropy and reward as measured on chains: online GRPO of 20, 60 and 160
# steps.
@pytest.mark.parametrize(
    ("entropy", "reward"),
    [((0.35, 0.1), (0.33, 0.81)), ((0.136, 0.016), (0.47, 0.91)), ((0.195, 0.024), (0.33, 0.81))],
)
def test_a_healthy_run_is_left_alone(entropy, reward):
    series = {
        "entropy": falling(*entropy),
        "reward": falling(*reward),
        "completions/mean_length": falling(19, 33),
        "completions/clipped_ratio": [0.0] * 58 + [1.0, 1.0],
    }
    for steps in range(61):
        assert collapse({name: values[:steps] for name, values in series.items()}, ONLINE) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"entropy": falling(0.3, 0.03)}, ["entropy"]),  # while the reward stays where it was
        ({"entropy": falling(0.3, 0.03), "reward": falling(0.3, 0.6)}, []),
        ({"entropy": falling(0.3, 0.005), "reward": falling(0.3, 0.6)}, ["entropy"]),
        ({"entropy": falling(0.3, 0.03), "reward": [math.nan] * 60}, []),  # nothing known of it
        ({"completions/mean_length": falling(600, 200)}, ["length"]),
        ({"completions/mean_length": falling(600, 200), "reward": falling(0.3, 0.6)}, []),
        ({"completions/mean_length": falling(600, 60), "reward": falling(0.3, 0.6)}, ["length"]),
        ({"entropy": [0.3] * 57 + [0.0] * 2 + [0.3]}, []),  # two odd steps
        ({"entropy": [math.nan, *falling(0.3, 0.03), math.nan, math.inf]}, ["entropy"]),
        ({"entropy": [0.0] * 60, "completions/mean_length": []}, []),
    ],
)
def test_what_has_collapsed(changes, expected):
    flat = {"entropy": [0.3] * 60, "reward": [0.3] * 60, "completions/mean_length": [600.0] * 60}
    assert causes(collapse({**flat, **changes}, ONLINE)) == expected


def test_short_runs_say_nothing():
    assert collapse({}, ONLINE) == []
    falls = [1.0] * 5 + [0.01] * 5
    assert collapse({"entropy": falls[:-1]}, ONLINE) == []
    (alert,) = collapse({"entropy": falls}, ONLINE)
    assert alert.cause == "entropy" and "to 0.01 nats per token, 1% of its" in alert.text


def test_a_collapse_is_said_once_also_after_a_restart(small, tmp_path, opened, capsys):
    session, stage = opened(small, tmp_path), Online(policy="init", loss="dpo", sync_every=10)
    lengths = falling(600, 60, 40)
    for first in (0, 13, 26):  # three processes: what a checkpoint has of it is JSON
        with training(session, "dpo", 40, stage) as trainer:
            for i in range(first, min(first + 13, 40)):
                trainer.step = i + 1
                metrics = {
                    "entropy": 0.3,
                    "completions/mean_length": lengths[i],
                    "reward": math.nan if i % 3 else 0.4,
                }
                alerts.watch(trainer, stage, metrics, lambda: CAUSE)
            trainer.save_and_pin()
    said = capsys.readouterr().out
    (warning,) = trainer.extra_state.warnings
    assert said.count("WARNING: ") == said.count("has collapsed") == 1 and warning.text in said
    assert warning.cause == "length"
    (record,) = read_metrics(tmp_path)
    whole = {"completions/mean_length": lengths[: record["step"]], "reward": [0.4] * 14}
    assert collapse(whole, stage)[0].text in warning.text
    assert record["kind"] == "warning/length" and record["text"] == warning.text
    for remedy in ("reference_sync=True", "smaller sync_every (now 10)"):
        assert remedy in warning.text
    assert "epsilon" not in warning.text and "entropy_coef" not in warning.text


@pytest.mark.parametrize(
    ("changes", "cause", "expected"),
    [
        ({}, "entropy", ["entropy_coef=1e-4 (now 0)"]),
        ({"loss": "dpo", "sync_every": 0}, "length", ["a smaller sync_every (now never)"]),
        (
            {"loss": "dpo", "reference_sync": True, "entropy_coef": 1e-4},
            "entropy",
            ["a smaller optimizer"],
        ),
        ({"optimizer": Optimizer()}, "length", ["a larger Adam epsilon"]),
        (
            {"loss": "group_dpo", "sync_every": 5},
            "length",
            ["reference_sync=True", "a smaller sync_every (now 5)"],
        ),
    ],
)
def test_remedies_are_those_not_taken_yet(changes, cause, expected):
    found = alerts.remedies(cause, Online(**changes))
    assert len(found) == len(expected) and all(map(str.startswith, found, expected))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ("problems", 3, 8, 30),
            "a.size is 8, and there are 3 problems for 30 batches: each is drawn "
            "80 times, some of them twice in a batch:",
        ),
        (("problems", 7, 8, 1), "each is drawn 1 times, some of them twice in a batch"),
        (("problems", 100, 32, 200), "each is drawn 64 times: lower it or steps, or give more"),
        (("problems", 20_000, 32, 160), ""),
        (("examples", 64, 64, 21), "a.size is 64, and there are 64 examples"),
        (("examples", 128_000, 64, 2000), ""),
    ],
)
def test_too_little_data_for_a_stage(arguments, expected):
    found = too_few("a.size", *arguments)
    assert len(found) == bool(expected) and all(expected in str(issue) for issue in found)


@pytest.mark.parametrize(
    ("shares", "expected", "words"),
    [
        (
            {"completions/clipped_ratio": 0.98},
            ["cut"],
            "98% of its responses are cut at max_new_tokens, 256",
        ),
        ({"completions/clipped_ratio": 0.5}, [], ""),
        (
            {"verdicts/unscorable": 0.15, "verdicts/timeout": 0.1},
            ["ungraded"],
            "25% of its responses could not be",
        ),
        ({"verdicts/unscorable": 0.1, "verdicts/timeout": 0.1}, [], ""),
        ({"frac_signal": 0.05, "reward": 0.001}, ["signal"], CAUSE.remedy),
        ({"verdicts/no_answer": 0.6}, ["no_answer"], "of its responses, 90% of the"),
        ({"verdicts/no_answer": 0.6, "frac_signal": 0.0}, ["signal"], CAUSE.symptom),
        ({"frac_signal": 0.1, "reward": 0.0}, [], ""),
        ({}, [], ""),
    ],
)
def test_what_is_wrong_with_responses(shares, expected, words):
    found = alerts.sampled(shares, 256, lambda: CAUSE)
    assert causes(found) == expected and all(words in alert.text for alert in found)
    assert "cut" not in causes(alerts.sampled(shares, None, lambda: CAUSE))


def test_few_pairs_and_few_updates():
    assert alerts.few_updates(10, 8, 80) == ""
    text = "1 update of 8 pairs (9 in all), too few to change a policy much"
    assert alerts.few_updates(1, 8, 9) == text
    counts = {"prompts": 100, "mixed": 9, "all_correct": 1, "all_incorrect": 90, "pairs": 20}
    (alert,) = alerts.few_pairs(counts, CAUSE)
    assert (
        "9 of 100 prompts have a better and a worse response (90 all wrong, 1 all correct), so there are 20"
        in alert.text
    )
    assert CAUSE.remedy in alert.text
    assert alerts.few_pairs({**counts, "mixed": 10}, CAUSE) == []


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (Online(policy="init", steps=20), ["cut"]),
        # its limit is the writer's
        (Online(policy="init", steps=20, dump=Dump(path="dump.jsonl")), []),
    ],
)
def test_what_its_batches_tell_of_a_policy_is_said_where_they_are_its_own(
    small, tmp_path, opened, stage, expected
):
    with training(opened(small, tmp_path), "dpo", 20, stage) as trainer:
        for step in range(1, 21):
            trainer.step = step
            metrics = {"reward": 0.3, "completions/clipped_ratio": 0.98}
            alerts.watch(trainer, stage, metrics, lambda: CAUSE)
        assert [warning.cause for warning in trainer.extra_state.warnings] == expected
        trainer.step = 0


def test_a_batch_that_serves_several_updates_is_drawn_once(config, tmp_path, opened):
    only(config, "warmup").stages.warmup.update(steps=12, num_iterations=4, sync_every=4, keep=())
    config.data.train.limit = 3
    session = opened(config, tmp_path)
    (found,) = online.issues(session, "warmup", session.config.stages["warmup"]).issues
    assert "3 problems for 3 batches: each is drawn 4 times" in found.text


def test_chosen_responses_that_become_unlikely():
    dpo = Offline()
    assert (
        alerts.chosen_logps_fell(-0.1, dpo)
        == alerts.chosen_logps_fell(0.5, dpo)
        == alerts.chosen_logps_fell(math.nan, dpo)
        == []
    )
    (alert,) = alerts.chosen_logps_fell(-0.31, dpo)
    assert "have lost 0.31 nats per token" in alert.text and "a larger beta (now 0.1)" in alert.text


def test_a_run_that_learns_nothing_says_so_in_the_terminal_and_at_the_top_of_the_report(
    config, tmp_path, opened, capsys
):
    """Three problems, four a step, all rewards 0."""
    only(config, "warmup").stages.warmup.update(steps=6, keep=())
    config.data.train.limit = 3
    write_json(tmp_path / "config.json", {"config": to_dict(config)})
    session = opened(config, tmp_path, lambda completions, **_: [0.0] * len(completions))
    manifest = run(session)
    found = [one.cause for one in manifest.warnings if one.cause != "cut"]
    assert found == ["stages.warmup.prompts_per_step", "signal"]
    said = capsys.readouterr().out
    for text in (one.text for one in manifest.warnings):
        assert said.count(f"WARNING: {text}\n") == 1
    assert said.index("3 problems for 6 batches") < said.index("warmup 1/6")
    text = markdown(report(read_run(tmp_path)))
    assert text.index("there are 3 problems for 6 batches") < text.index("\n## ")
    (
        tmp_path / "01-warmup" / "manifest.json"
    ).unlink()  # of a stage under way it is what was logged
    # one that it is under way
    assert markdown(report(read_run(tmp_path))).count("- Warning: ") == 1 + len(manifest.warnings)
