"""Online RL from random parameters, which a made-up reward gives a signal."""

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import alike
import jax
import pytest
from etils import epath
from ml_collections import ConfigDict
from worlds import bits, only, run

from g2d_jax.commands import dryrun
from g2d_jax.config import Clip, Config, Online, OnlineDPO, check
from g2d_jax.models.flops import forward_flops
from g2d_jax.recipes.config_load import resolve
from g2d_jax.records import Problem
from g2d_jax.rollouts.external import external_batches
from g2d_jax.rollouts.generate import Policy, sampled_batches
from g2d_jax.rollouts.groups import Draws, Groups, count_rollouts
from g2d_jax.rollouts.store import concat_rounds
from g2d_jax.rollouts.workload import Workload
from g2d_jax.runtime import storage
from g2d_jax.runtime.mesh import make_mesh
from g2d_jax.runtime.tracking import Progress, Screen, read_metrics
from g2d_jax.session import stage_result
from g2d_jax.session.policies import load_policy
from g2d_jax.session.session import Session, StopRun
from g2d_jax.session.stage_result import Cost
from g2d_jax.session.workdir import claim
from g2d_jax.stages import online
from g2d_jax.training import objectives
from g2d_jax.training.checkpoint import Checkpoints


@pytest.fixture
def warmup(config: ConfigDict) -> ConfigDict:
    """One online stage alone."""
    only(config, "warmup").stages.warmup.steps = 2
    return config


def sampled(
    session: Session,
    tmp_path: Path,
    prompts: int = 6,
    samples: int = 4,
    bar: Progress | None = None,
) -> tuple[Draws, Groups]:
    stage = session.config.stages["warmup"]
    draws = [(problem, 0) for problem in session.problems.train[:prompts]]
    params = stage.sampling.params(session.sampling.stop_ids)
    workload = Workload(
        session, params, samples, session.sampling.shapes(stage, prompts, samples, params), "test"
    )

    def policy() -> Policy:
        return Policy(
            session.sampling.sampler.to_sampler_params(load_policy(session, "init")), "init"
        )

    parts = [(draws, epath.Path(tmp_path) / "shard.parquet")]
    return concat_rounds(sampled_batches(session, policy, parts, workload, cost=Cost(), bar=bar))


@pytest.mark.parametrize(
    ("prompts", "samples", "told"),
    [(20, 1, ["8/20", "16/20", "20/20"]), (6, 4, ["2/6", "4/6", "6/6"]), (5, 3, ["2/5", "5/5"])],
)
def test_responses_that_end_together_are_counted_together(
    warmup, tmp_path, opened, prompts, samples, told
):
    """Eight rows of one token each: the first of them would say that all the others take as long
    again."""
    warmup.compute.max_num_seqs = 8
    warmup.stages.warmup.sampling.max_new_tokens = 1
    screen = Screen(out := io.StringIO(), every=0.0)
    with screen.progress("warmup", total=prompts) as bar:
        sampled(opened(warmup, tmp_path), tmp_path, prompts, samples, bar)
    counts = [line.split()[1] for line in out.getvalue().splitlines()]
    assert list(dict.fromkeys(counts)) == told


def test_a_stage_with_more_steps_ends_like_one_that_had_them_from_the_start(
    warmup, tmp_path, opened
):
    stage = warmup.stages.warmup
    stage.keep = (2,)
    stage.optimizer.warmup_steps = 1
    for folder, steps in (("longer", 2), ("longer", 5), ("whole", 5)):
        stage.steps = steps
        claim(Config.of(warmup), epath.Path(tmp_path / folder))
        assert run(opened(warmup, tmp_path / folder)).counts["steps"] == steps
    assert alike.differences(tmp_path / "whole", tmp_path / "longer") == []
    assert alike.redone(tmp_path / "longer") == 0


def test_groups_of_a_dump_train_as_they_did_when_they_were_sampled(
    warmup, tmp_path, opened, capsys
):
    """The policy is that of the run which drew them, bit for bit, also where it is continued, and
    nothing is sampled."""
    stage = warmup.stages.warmup
    stage.update(clip={"importance_cap": 2.0}, steps=3, keep=(2,))
    whole = opened(warmup, tmp_path / "whole")
    drawn = run(whole)
    stage.dump.path = str(tmp_path / "whole/01-warmup/rollouts")
    for folder, steps in (("dump", 2), ("dump", 3)):
        stage.steps = steps
        claim(Config.of(warmup), epath.Path(tmp_path / folder))
        session = opened(warmup, tmp_path / folder)
        manifest = run(session)
        taken = f"has 12 groups, enough for 3 updates; it uses {steps}"
        assert taken in capsys.readouterr().out
    tokens = {name: getattr(manifest.cost, name) for name in ("generated", "trained")}
    assert tokens == {"generated": 0, "trained": drawn.cost.trained} and drawn.cost.generated > 0
    assert session.sampling.sampler.usage.generated == 0
    assert bits(load_policy(session, "warmup")) == bits(load_policy(whole, "warmup"))
    stage.steps = 4
    with pytest.raises(
        ValueError,
        match=r"has 12 groups, enough for 3 updates with prompts_per_step=4: set stages\.war",
    ):
        run(opened(warmup, tmp_path / "too-long"))
    stage.update(steps=3, num_generations=3)
    with pytest.raises(
        ValueError,
        match=r"row 1: its prompt has 4 responses at its step, .*num_generations is 3: set",
    ):
        run(opened(warmup, tmp_path / "too-small"))


def test_pairs_of_a_dump_without_logprobs(warmup, tmp_path, opened):
    stage, problems = warmup.stages.warmup, opened(warmup, tmp_path).problems.train[:2]
    rows = [
        {"prompt": p.prompt, "completion": "1" * (1 + n % 2), "reward": n % 2}
        for p in problems
        for n in range(8)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stage.update(dump={"path": str(path)}, loss="dpo", steps=1)
    counts = run(opened(warmup, tmp_path / "dpo")).counts
    assert (counts["rollouts"], counts["prompts"], counts["pairs"]) == (16, 4, 4)
    assert read_metrics(tmp_path / "dpo")[-1]["metrics"]["grad_norm"] > 0
    stage.update(loss="grpo", clip={"importance_cap": 2.0})
    with pytest.raises(
        ValueError,
        match=r"rows\.jsonl, line 1: it has no logprobs, but 0 of the 16 .* clip.importance_cap=0",
    ):
        run(opened(warmup, tmp_path / "cap"))
    path.write_text(json.dumps({"prompt": "0+0=?", "completion": "1", "reward": 1}) + "\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 1: its prompt is not in data\.train"):
        run(opened(warmup, tmp_path / "other"))


def rows_of(problems: list[Problem], logprob: float | None) -> list[dict[str, Any]]:
    """Groups of four, half of them right, each token with this log-probability."""
    known = {} if logprob is None else {"logprobs": [logprob] * 2}
    ids = [[1 + n % 2, 2] for n in range(4)]
    return [
        {
            "prompt": p.prompt,
            "completion_ids": ids[n],
            "reward": n % 2,
            "finish_reason": "length",
            **known,
        }
        for p in problems
        for n in range(4)
    ]


@pytest.mark.parametrize(
    "loss",
    [pytest.param({}, marks=pytest.mark.slow), {"loss": "group_dpo", "grpo_coef": 0.1}],
)
def test_a_ratio_needs_the_logprobs_that_a_dump_has(warmup, tmp_path, opened, loss):
    """Those of another policy are no ratio of 1: the rule of a server's responses holds
    for dumps."""
    problems = opened(warmup, tmp_path).problems.train[:4]
    path = tmp_path / "rows.jsonl"
    warmup.stages.warmup.update(dump={"path": str(path)}, steps=1, **loss)

    def write(*rows: dict[str, Any]) -> None:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    write(*rows_of(problems, -0.7))
    for start in (lambda: run(opened(warmup, tmp_path / "off")), lambda: dryrun.show(warmup)):
        with pytest.raises(
            ValueError,
            match=r"rows\.jsonl has the logprobs .* Set stages\.warmup\.clip\.importance_cap, for example to 2",
        ):
            start()
    if loss:
        return
    warmup.stages.warmup.clip.importance_cap = 2.0
    shown = {}
    for logprob in (-0.7, -1.7):
        write(*rows_of(problems, logprob))
        run(opened(warmup, tmp_path / str(logprob)))
        shown[logprob] = read_metrics(tmp_path / str(logprob))[-1]["metrics"]["rollout_corr/kl"]
    # how far off the dump is, nats a token
    assert shown[-0.7] - shown[-1.7] == pytest.approx(1.0, abs=1e-5)
    warmup.stages.warmup.clip.importance_cap = 0.0
    write(*rows_of(problems, None))
    manifest = run(opened(warmup, tmp_path / "none"))
    (warning,) = [one for one in manifest.warnings if "without logprobs" in one.text]
    assert "has 16 responses without logprobs" in warning.text


@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_logprobs_of_some_rows_alone_are_refused(warmup, tmp_path, opened, cap):
    session = opened(warmup, tmp_path / "some")
    problems = session.problems.train[:4]
    path = tmp_path / "rows.jsonl"
    rows = [*rows_of(problems[:3], -0.7), *rows_of(problems[3:], None)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    warmup.stages.warmup.update(dump={"path": str(path)}, steps=1, clip={"importance_cap": cap})
    stage = Config.of(warmup).stages["warmup"]
    assert isinstance(stage, Online)
    with pytest.raises(
        ValueError,
        match=r"rows\.jsonl, line 13: it has no logprobs, but 12 of the 16 .* logprobs to all rows, or r",
    ):
        external_batches(session, "warmup", stage)
    # pairs need none
    assert external_batches(session, "warmup", replace(stage, loss="dpo", clip=Clip()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"sync_every": 4},
            "sync_every is 4, but .* samples nothing: set it to num_iterations",
        ),
        (
            {"filter": {"dynamic_sampling": 1}},
            "samples nothing in their place: remove it",
        ),
        ({"filter": {"drop_solved": 2}}, "filter skips prompts"),
    ],
)
def test_settings_of_sampling_are_refused_beside_a_dump(warmup, changes, message):
    warmup.stages.warmup.update({"dump": {"path": "mine"}, **changes})
    with pytest.raises(ValueError, match=message):
        check.checked(warmup)


def test_columns_without_a_dump_are_refused(warmup):
    warmup.stages.warmup.dump.columns = {"reward": "accuracy"}
    with pytest.raises(
        ValueError, match=r"dump\.path is not set, but other settings of the dump are"
    ):
        check.checked(warmup)


def test_with_a_reference_kl_is_zero_at_the_first_step_only(warmup, tmp_path, opened):
    warmup.stages.warmup.beta = 0.1
    warmup.stages.warmup.scale_rewards = "group"
    manifest = run(opened(warmup, tmp_path))
    kl = [record["metrics"]["kl"] for record in read_metrics(tmp_path)]
    assert abs(kl[0]) < 1e-9 < 1e-7 < kl[1]
    assert manifest.cost.scored > 0
    assert manifest.counts["rollouts"] == 2 * 4 * 4


@pytest.mark.slow
def test_sampler_and_trainer_have_the_same_log_probabilities(warmup, tmp_path, opened):
    """Of tokens that were sampled, over those that the loss counts: rollout_corr/kl."""
    warmup.stages.warmup.update(clip={"importance_cap": 2.0}, steps=1)
    run(opened(warmup, tmp_path))
    metrics = read_metrics(tmp_path)[-1]["metrics"]
    assert abs(metrics["rollout_corr/kl"]) <= 1e-5
    assert metrics["ratio"] == 1.0


def test_metrics_have_trl_names_and_tokens_are_those_of_the_rollouts(warmup, tmp_path, opened):
    session = opened(warmup, tmp_path)
    manifest = run(session)
    record = read_metrics(tmp_path)[-1]
    of_trl = {
        "reward",
        "reward_std",
        "frac_reward_zero_std",
        "entropy",
        "completions/mean_length",
        "loss",
        "grad_norm",
    }
    assert of_trl | {"sampling/sampling_logp_difference/mean"} < {*record["metrics"]}
    usage = session.sampling.sampler.usage
    assert manifest.cost.generated == usage.generated
    assert manifest.cost.prefilled == usage.prefilled
    assert Checkpoints(tmp_path / "01-warmup" / "checkpoints").steps() == [1, 2]


def test_the_cost_at_every_kept_step_survives_a_restart(warmup, tmp_path, opened):
    warmup.stages.warmup.keep = (0, 1)
    whole = run(opened(warmup, tmp_path))
    at, folder = whole.costs, tmp_path / "01-warmup"
    assert set(at) == {"0", "1", "2"}
    assert at["0"] == Cost()
    # the checkpoint holds all of its own step but what writing it took
    one, other = (replace(cost, checkpointing_seconds=0.0) for cost in (at["2"], whole.cost))
    assert one == other
    assert 0 < at["1"].flops < at["2"].flops and 0 < at["1"].seconds < at["2"].seconds
    assert at["1"].device_seconds == at["1"].seconds
    (folder / storage.MANIFEST).unlink()
    shutil.rmtree(folder / "checkpoints" / "2")  # as if killed in the second step
    again = run(opened(warmup, tmp_path))
    assert again.costs["0"] == at["0"] and again.costs["1"] == at["1"]
    for key in ("flops", "tokens"):
        values = {getattr(cost, key) for cost in (again.costs["2"], again.cost, whole.cost)}
        assert len(values) == 1


def test_attention_is_counted_position_by_position(warmup, tmp_path, opened):
    session, cost = opened(warmup, tmp_path), Cost()
    _, groups = sampled(session, tmp_path)
    count_rollouts(session.model_config, cost, groups)
    prompts = [len(group[0].rollout.prompt_ids) for group in groups]
    responses = [[len(row.rollout.token_ids) for row in group] for group in groups]
    read = sum(sum(range(1, prompt + 1)) for prompt in prompts)
    read += sum(
        sum(range(p + 1, p + n + 1)) for p, ns in zip(prompts, responses, strict=True) for n in ns
    )
    tokens = sum(prompts) + sum(map(sum, responses))
    assert cost.prefilled + cost.generated == tokens
    assert cost.flops == pytest.approx(forward_flops(session.model_config, tokens, read), rel=1e-12)


def test_device_time_is_paid_for_every_device(warmup, tmp_path, opened):
    session, cost = opened(warmup, tmp_path, devices=2), Cost()
    with session.track_cost(cost):
        pass
    assert cost.device_seconds == 2 * cost.seconds > 0


def test_without_reward_signal_it_stops_and_keeps_the_policy(warmup, tmp_path, opened):
    def reward(completions, **_):
        return [0.0] * len(completions)

    warmup.stages.warmup.steps = 60
    warmup.checkpoint.every = 100
    with pytest.raises(
        StopRun,
        match=r"no reward signal for 50 steps in a row; .*are incorrect.*To try: .*another --workdir",
    ) as stop:
        run(opened(warmup, tmp_path, reward))
    assert "The policy so far is saved, step 49 in" in str(stop.value)
    assert Checkpoints(tmp_path / "01-warmup" / "checkpoints").steps() == [1, 49]
    assert stage_result.read(tmp_path / "01-warmup") is None
    session = opened(warmup, tmp_path, reward)
    load_policy(session, "warmup@49")
    with pytest.raises(StopRun):  # the same command stops again at once
        run(session)
    assert session.sampling.sampler.usage.generated == 0


def test_cispo_and_simpo_reach_the_loss_and_simpo_has_no_reference():
    compute = objectives.Compute(make_mesh(1, 1, 1, devices=jax.devices()[:1]))
    ratios = {
        "epsilon": 0.2,
        "epsilon_high": 4.0,
        "importance_sampling_level": "token",
        "importance_cap": 0.0,
    }
    expected = objectives.grpo(
        compute, temperature=1.0, beta=0.0, **ratios, entropy_coef=0.0, cispo=True
    )
    assert (
        online.objective_of(compute, Online(loss_type="cispo", clip=Clip(epsilon_high=4.0)))
        == expected
    )
    simpo = OnlineDPO(loss_type="simpo", beta=2.0)
    assert [Online(loss=loss, dpo=simpo).compares for loss in ("dpo", "group_dpo")] == [
        False,
        False,
    ]
    config = resolve("demo", ["stages.warmup.loss=dpo", "stages.warmup.reference_sync=yes"])
    config.stages.warmup.dpo.loss_type = "simpo"
    with pytest.raises(ValueError, match="the loss has no reference"):
        check.checked(config)


def test_a_loss_without_an_objective_is_not_taken_for_another():
    stage = Online()
    object.__setattr__(stage, "loss", "new")
    with pytest.raises(AssertionError, match="new"):
        online.objective_of(
            objectives.Compute(make_mesh(1, 1, 1, devices=jax.devices()[:1])), stage
        )
