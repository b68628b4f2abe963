"""Which stages of a study are one node."""

import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from g2d_jax import config as settings
from g2d_jax.config import Config
from g2d_jax.recipes.config_load import resolve
from g2d_jax.runtime import storage
from g2d_jax.session.inputs import digests
from g2d_jax.stages import run_issues
from g2d_jax.sweep.graph import Graph, build
from g2d_jax.sweep.points import points
from g2d_jax.training.checkpoint import Checkpoints

TINY = str(Path(__file__).parents[1] / "tiny.py")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def graph(*overrides: str, seeds: tuple[int, ...] = (), **arm: tuple[str, ...]) -> Graph:
    config = resolve(TINY, overrides)
    config.unlock()
    config.sweep = settings.sweep(seeds=seeds, arms={"main": settings.arm(**arm)})
    return build(points(config.lock()))


def names(made: Graph) -> list[str]:
    return sorted(node.name for node in made.nodes.values())


def test_one_trajectory_carries_all_numbers_of_steps() -> None:
    made = graph(product=("stages.warmup.steps=0,1,3",))
    trajectory = [node for node in made.nodes.values() if node.name == "warmup"]
    assert len(trajectory) == 1
    assert (
        trajectory[0].config.stages["warmup"].steps,
        trajectory[0].config.stages["warmup"].keep,
    ) == (3, (0, 1, 3))
    policies = [config.stages["collect"].policy for _, config, _ in made.points]
    assert policies == ["sft", "warmup@1", "warmup@3"]
    assert [config.stages["evaluate"].policies for _, config, _ in made.points] == [
        ("sft", "dpo"),  # 0 steps of online training leave the policy as it was
        ("sft", "warmup@1", "dpo"),
        ("sft", "warmup@3", "dpo"),
    ]
    # sft once, dpo and collect for each K, each policy evaluated once: sft, warmup@1, warmup@3,
    # three times dpo; and for each K the comparison.
    assert names(made) == sorted(
        ["sft", "warmup", *["collect"] * 3, *["dpo"] * 3, *["evaluate"] * (6 + 3)]
    )


def test_every_node_comes_after_what_it_reads() -> None:
    made = graph(product=("stages.warmup.steps=1,3", "stages.dpo.beta=0.1,1"), seeds=(0, 1))
    seen: set[str] = set()
    for node in made.nodes.values():
        assert seen.issuperset(node.inputs)
        assert set(node.stages) == set(node.config.stages)
        run_issues.checked(node.config)
        seen.add(node.id)


def test_studies_of_the_demo_go_on_from_the_sweep_over_k() -> None:
    """And the study of the cause trains one policy on six sets of equally many pairs."""
    sweep, *studies = (
        build(points(resolve(f"{name}:seeds=1")))
        for name in ("sweep-k", f"{BENCHMARKS}/ablations.py", "spectrum", f"{BENCHMARKS}/cause.py")
    )
    shared = [
        {made.nodes[key].name for key in made.nodes.keys() & sweep.nodes.keys()} for made in studies
    ]
    assert shared == [
        {"sft", "warmup", "evaluate"},
        {"sft", "evaluate", "dev"},
        {"sft", "warmup", "evaluate"},
    ]
    trained = [node.config.stages for node in studies[-1].nodes.values() if node.name == "dpo"]
    assert len(studies[-1].points) == 12 and len(trained) == 6
    assert {(stages["collect"].max_pairs, stages["dpo"].policy) for stages in trained} == {
        (480, "warmup@10")
    }
    varied = {(stages["collect"].min_pass_rate, stages["pool"].prompts) for stages in trained}
    assert varied == {(0.15, 2048), (0.15, 448), (0.4, 2048), (0.4, 448), (0.65, 4096), (0.65, 896)}


def test_the_middle_scale_has_a_study_over_k() -> None:
    studied = points(resolve(f"{BENCHMARKS}/middle.py:study=true"))
    assert len(studied) == 3 * (5 + 3 * 6)
    assert {point.arm for point in studied} == {"g2d", "grpo"}
    sizes = {(point.config.model.hidden_size, point.config.data.test.path) for point in studied}
    assert sizes == {(256, "procedural:digits")}


def test_a_schedule_with_an_end_is_not_shared() -> None:
    made = graph("stages.warmup.optimizer.schedule=linear", product=("stages.warmup.steps=1,3",))
    assert names(made).count("warmup") == 2
    assert {config.stages["collect"].policy for _, config, _ in made.points} == {"warmup"}


@pytest.mark.parametrize(
    ("field", "shared"),
    [
        ("data.train.limit=30,40", set()),
        ("stages.sft.steps=5,6", set()),
        ("stages.warmup.optimizer.learning_rate=1e-3,1e-4", {"sft"}),
        ("stages.collect.num_generations=3,4", {"sft", "warmup"}),
        ("stages.dpo.beta=0.1,0.2", {"sft", "warmup", "collect"}),
        ("compute.microbatch_tokens=64,128", {"sft", "warmup", "collect", "dpo", "evaluate"}),
        ("checkpoint.keep=1,2", {"sft", "warmup", "collect", "dpo", "evaluate"}),
    ],
)
def test_a_stage_is_shared_by_points_that_decide_it_alike(field: str, shared: set[str]) -> None:
    made = graph(product=(field,))
    assert {
        name for name in made.points[0][2] if made.points[0][2][name] == made.points[1][2][name]
    } == shared


def test_a_point_that_cannot_work_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"point dpo.beta=-1,seed=0: stages.dpo.beta must be more than 0"
    ):
        graph(product=("stages.dpo.beta=1,-1",))


def test_a_file_that_changes_makes_another_study(tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    overrides = (f"data.train.path={file}", "data.train.split=", "seed=0")

    def first_id() -> str:
        return next(iter(graph(*overrides, product=("stages.dpo.beta=1,2",)).nodes))

    file.write_text('{"problem": "1+1", "answer": "2"}\n')
    before = first_id()
    assert first_id() == before
    file.write_text('{"problem": "1+2", "answer": "3"}\n{"problem": "1+3", "answer": "4"}\n')
    assert first_id() != before


def test_a_policy_of_another_run_is_known_by_its_arrays(tmp_path: Path) -> None:
    config = resolve(TINY)
    found = []
    for name, value in (("one", 1.0), ("same", 1.0), ("other", 2.0)):
        storage.write_json(tmp_path / name / "config.json", {})
        with Checkpoints(tmp_path / name / "01-sft" / "checkpoints") as checkpoints:
            checkpoints.save(6, {"params": {"a": jnp.full(3, value)}}, {})
        config.stages.warmup.policy = f"run:{tmp_path / name}#sft"
        read = digests(Config.of(config))
        found.append(read["stages.warmup.policy"])
    assert found[0] == found[1] != found[2]


def test_a_study_goes_by_what_is_in_files_and_not_by_where_they_are(tmp_path: Path) -> None:
    def nodes(folder: str, answer: str) -> set[str]:
        file = tmp_path / folder / f"{folder}.jsonl"
        file.parent.mkdir(exist_ok=True)
        rows = [{"problem": "1+2=?", "answer": "3"}, {"problem": "1+3=?", "answer": answer}]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        overrides = (f"data.train.path={file}", "data.train.split=")
        return set(graph(*overrides, product=("stages.dpo.beta=1,2",)).nodes)

    first = nodes("here", "4")
    assert nodes("there", "4") == first
    assert not nodes("here", "5") & first
