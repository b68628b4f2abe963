"""The recipes for real models: every hyper-parameter, every suite by name, and each method run at
toy size."""

import itertools
import math
import re
import runpy
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
import pytest
import toys as toy
from etils import epath
from ml_collections import ConfigDict

from g2d_jax import commands, pipeline, recipes
from g2d_jax.commands import dryrun
from g2d_jax.config import Config, graph
from g2d_jax.config.graph import plan
from g2d_jax.recipes.config_load import resolve
from g2d_jax.runtime.tracking import read_metrics
from g2d_jax.session.policies import load_policy
from g2d_jax.session.problems import SPLITS
from g2d_jax.stages import run_issues
from g2d_jax.sweep.points import points

ROOT = Path(__file__).parents[1]

# Model -> hub ids by variant, the default first; K; updates of GRPO alone; whether templates are
# told not to think.
MODELS = {
    "qwen2.5-0.5b": ("base Qwen/Qwen2.5-0.5B, instruct Qwen/Qwen2.5-0.5B-Instruct", 150, 600, None),
    "qwen2.5-1.5b": ("base Qwen/Qwen2.5-1.5B, instruct Qwen/Qwen2.5-1.5B-Instruct", 150, 600, None),
    "qwen2.5-7b": ("base Qwen/Qwen2.5-7B, instruct Qwen/Qwen2.5-7B-Instruct", 150, 600, None),
    "qwen3-0.6b": ("chat Qwen/Qwen3-0.6B, base Qwen/Qwen3-0.6B-Base", 150, 600, False),
    "qwen3-4b": ("chat Qwen/Qwen3-4B, base Qwen/Qwen3-4B-Base", 150, 600, False),
    "qwen3-8b": ("chat Qwen/Qwen3-8B, base Qwen/Qwen3-8B-Base", 150, 600, False),
    "llama-3.2-1b": (
        "instruct meta-llama/Llama-3.2-1B-Instruct, base meta-llama/Llama-3.2-1B",
        500,
        2000,
        None,
    ),
    "llama-3.1-8b": (
        "instruct meta-llama/Llama-3.1-8B-Instruct, base meta-llama/Llama-3.1-8B",
        500,
        2000,
        None,
    ),
    "smollm3-3b": (
        "chat HuggingFaceTB/SmolLM3-3B, base HuggingFaceTB/SmolLM3-3B-Base",
        150,
        600,
        False,
    ),
    "gemma-3-1b": ("instruct google/gemma-3-1b-it, base google/gemma-3-1b-pt", 150, 600, None),
    "gemma-3-4b": ("instruct google/gemma-3-4b-it, base google/gemma-3-4b-pt", 150, 600, None),
    "olmo-3-7b": (
        "instruct allenai/Olmo-3-7B-Instruct, base allenai/Olmo-3-1025-7B",
        150,
        600,
        None,
    ),
    "phi-4-mini": ("instruct microsoft/Phi-4-mini-instruct", 150, 600, None),
    "qwen3-30b-a3b": (
        "chat Qwen/Qwen3-30B-A3B, base Qwen/Qwen3-30B-A3B-Base",
        150,
        600,
        False,
    ),
    "qwen3.5-0.8b": (
        "chat Qwen/Qwen3.5-0.8B, base Qwen/Qwen3.5-0.8B-Base",
        150,
        600,
        False,
    ),
    "qwen3.5-4b": ("chat Qwen/Qwen3.5-4B, base Qwen/Qwen3.5-4B-Base", 150, 600, False),
}
METHODS = {"g2d": ("warmup", "collect", "dpo", "evaluate"), "grpo": ("grpo", "evaluate")}


@pytest.mark.parametrize("model", MODELS)
def test_models(model: str) -> None:
    variants, steps, alone, thinking = MODELS[model]
    ids = dict(item.split() for item in variants.split(", "))
    found = {variant: resolve(f"{model}:variant={variant}").model.path for variant in ids}
    assert found == ids and resolve(model).model.path == next(iter(ids.values()))
    assert resolve(model).stages.warmup.steps == steps
    assert resolve(f"{model}:method=grpo").stages.grpo.steps == alone
    assert resolve(model).tokenizer.enable_thinking is thinking
    assert resolve(f"{model}:path=mine/tuned").model.path == "mine/tuned"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("lora", "rate"), [(0, 1e-6), (32, 1e-5)])
def test_hyper_parameters(model: str, method: str, lora: int, rate: float) -> None:
    """Table 4 of arXiv 2506.21495, verifiable tasks, and what the papers leave open."""
    config = resolve(f"{model}:method={method},lora={lora}")
    assert plan(run_issues.checked(config)[0]).order == METHODS[method]
    adapters = (lora, 32.0, "bfloat16") if lora else (0, 16.0, "float32")
    assert (config.lora.rank, config.lora.alpha, config.lora.base_dtype) == adapters
    assert config.lora.targets == ("all-linear",)
    system = "default" if model == "smollm3-3b" else None
    assert (config.dtype, config.tokenizer.prompt_template, config.tokenizer.system) == (
        "bfloat16",
        "paper",
        system,
    )
    assert (config.data.max_prompt_length, config.reward.function) == (1024, "verify")
    assert (config.mesh.data, config.mesh.fsdp, config.mesh.tensor) == (1, -1, 1)
    assert (config.compute.microbatch_tokens, config.compute.remat) == (None, "auto")

    online = config.stages[METHODS[method][0]]
    assert (online.policy, online.loss, online.loss_type, online.scale_rewards) == (
        "init",
        "grpo",
        "sum",
        "none",
    )
    assert (online.beta, online.prompts_per_step, online.num_generations, online.sync_every) == (
        0.001,
        64,
        8,
        1,
    )
    assert (online.sampling.max_new_tokens, online.sampling.temperature, online.sampling.top_p) == (
        2048,
        1.0,
        1.0,
    )
    trained = [online]
    if method == "g2d":
        pairs, dpo = config.stages.collect, config.stages.dpo
        assert (pairs.policy, pairs.prompts, pairs.num_generations, pairs.pairs_per_prompt) == (
            "warmup",
            8192,
            8,
            1,
        )
        assert pairs.sampling == online.sampling
        assert (dpo.policy, dpo.beta, dpo.loss_type, dpo.batch_size, dpo.epochs) == (
            "warmup",
            0.1,
            "sigmoid",
            64,
            1,
        )
        trained.append(dpo)
    for stage in trained:
        adam = stage.optimizer
        assert (adam.kind, adam.schedule, adam.moment_dtype) == ("adamw", "constant", "float32")
        assert adam.learning_rate == rate
        assert (adam.eps, adam.max_grad_norm, adam.weight_decay, adam.b2) == (
            1e-4,
            1.0,
            0.0,
            0.999,
        )
    evaluate = config.stages.evaluate
    assert evaluate.policies == (("init", "warmup", "dpo") if method == "g2d" else ("init", "grpo"))
    drawn = evaluate.sampling
    assert (drawn.temperature, drawn.top_p, drawn.max_new_tokens, evaluate.num_generations) == (
        0.6,
        0.9,
        2048,
        4,
    )


def test_what_else_may_be_chosen() -> None:
    assert list(recipes.MODELS) == list(MODELS)
    for k in (0, 150, 500):
        assert resolve(f"qwen2.5-7b:k={k}").stages.warmup.steps == k
        assert resolve(f"qwen2.5-7b:method=grpo,k={k},steps=7").stages.grpo.steps == 7
    config = resolve("qwen2.5-7b:length=512,moments=bfloat16")
    assert {
        stage.sampling.max_new_tokens for stage in config.stages.values() if "sampling" in stage
    } == {512}
    assert {config.stages[name].optimizer.moment_dtype for name in ("warmup", "dpo")} == {
        "bfloat16"
    }
    names = [resolve(f"qwen3-8b:{arg}").name for arg in ("", "method=grpo,lora=8", "variant=base")]
    assert names == ["qwen3-8b-chat-g2d", "qwen3-8b-chat-grpo-lora8", "qwen3-8b-base-g2d"]


@pytest.mark.parametrize(
    ("arg", "message"),
    [
        ("method=dpo", "choice 'method' cannot be 'dpo'.*; it can be g2d, grpo"),
        ("variant=chat", "choice 'variant' cannot be 'chat'.*; it can be base, instruct"),
        ("lora=true", r"choice 'lora' must be an integer \(int\), got 'true'"),
        ("lora=-1", "choice 'lora' must be at least 0, got -1"),
        ("k=-1", "choice 'k' must be at least 0, got -1"),
        ("length=0", "choice 'length' must be at least 1, got 0"),
        ("steps=100", "choice 'steps' needs method=grpo; for G2D's warm-up set k"),
        (
            "method=grpo,k=0",
            r"method=grpo makes 4 \* k updates: with k=0 set their number, steps=N",
        ),
        ("moments=fp8", "choice 'moments' cannot be 'fp8'.*; it can be float32, bfloat16"),
        ("instruct=true", "unknown choice 'instruct'.*; choices: method, k, steps, variant"),
    ],
)
def test_choices_that_make_no_recipe(arg: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(f"qwen2.5-7b:{arg}")


# Suites


@pytest.mark.parametrize(
    ("name", "train", "test"),
    [
        ("math", "math", ("math", "", None)),
        ("gsm8k", "gsm8k:train", ("gsm8k", "", None)),
        ("numinamath", "numinamath", ("numinamath", "test", 1980)),
        ("math500:FILE.jsonl", "math500:FILE.jsonl", ("math500:FILE.jsonl", "", None)),
        ("hub:owner/name", "hub:owner/name", ("hub:owner/name", "", None)),
    ],
)
def test_suites_by_name(name: str, train: str, test: tuple[str, str, int | None]) -> None:
    data = resolve(f"qwen2.5-7b:train={name},test={name}").data
    here = f"{Path.cwd()}/FILE.jsonl"  # of a file the whole path is kept
    train = train.replace("FILE.jsonl", here)
    test = (test[0].replace("FILE.jsonl", here), *test[1:])
    assert (data.train.path, data.train.split, data.train.limit) == (train, "train", None)
    assert (data.dev.path, data.dev.split, data.dev.limit) == (train, "dev", 500)
    assert (data.test.path, data.test.split, data.test.limit) == test


@pytest.mark.parametrize(
    "suite",
    [
        "math500",
        "amc23",
        "gsm8k",
        "math500:test",
        "gsm8k:test",
        "hub:HuggingFaceH4/MATH-500:test",
        "gsm8k:test[:50%]",
        "math500:test[:400]",
        "hub:openai/gsm8k@main:test[:100]",
        "gsm8k:train[:10%] + test",
    ],
)
def test_test_problems_are_not_trained_on(suite: str) -> None:
    config = resolve("qwen2.5-7b")
    config.data.train.path = suite
    with pytest.raises(
        ValueError,
        match=re.escape(f"data.train.path is '{suite}', which holds test problems: train on math"),
    ):
        run_issues.checked(config)


# The study over K


@pytest.mark.parametrize(
    ("model", "steps"), [("qwen2.5-7b", (0, 150, 600)), ("llama-3.1-8b", (0, 500, 1000))]
)
def test_the_study_of_a_real_model(model: str, steps: tuple[int, ...]) -> None:
    study = resolve(f"sweep-k:preset={model},seeds=1")
    plain = resolve(model)
    assert (
        study.model == plain.model and study.compute == plain.compute and study.data == plain.data
    )
    made = [point.config for point in points(study)]
    assert {c.stages.warmup.steps for c in made if "collect" in c.stages} >= set(steps)
    assert {c.stages.warmup.optimizer.learning_rate for c in made if "collect" not in c.stages} == {
        3e-7,
        1e-6,
        3e-6,
    }


# Toys


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a small model of each family, and of problems in the form of each suite."""
    folder = tmp_path_factory.mktemp("toys")
    toy.save_policy(folder / "llama", "Llama", toy.make_tokenizer(toy.LLAMA))
    toy.save_policy(folder / "qwen2.5", "Qwen2", toy.make_qwen2_tokenizer())
    toy.save_policy(folder / "qwen3", "Qwen3", toy.make_tokenizer(toy.QWEN), head_dim=8)
    some = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    toy.save_policy(
        folder / "experts", "Qwen3Moe", toy.make_tokenizer(toy.QWEN), head_dim=8, **some
    )
    layers = {"no_rope_layer_interval": 2, "pad_token_id": 0}
    toy.save_policy(folder / "smollm3", "SmolLM3", toy.make_tokenizer(toy.QWEN), **layers)
    layers = {"head_dim": 8, "sliding_window": 24, "sliding_window_pattern": 2}
    toy.save_policy(folder / "gemma", "Gemma3", toy.make_tokenizer(toy.GEMMA), **layers)
    toy.save_policy(folder / "olmo", "Olmo3", toy.make_tokenizer(toy.QWEN), sliding_window=24)
    partly = {"partial_rotary_factor": 0.5, "pad_token_id": 0}
    toy.save_policy(folder / "phi", "Phi3", toy.make_tokenizer(toy.QWEN), **partly)
    layers = {"full_attention_interval": 2, "head_dim": 8, "linear_num_key_heads": 2}
    layers |= {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    toy.save_policy(folder / "qwen3.5", "Qwen3_5", toy.make_tokenizer(toy.QWEN), **layers)
    solved = toy.solved_problems(80)
    answers = [str(1 + k % 2) for k in range(80)]
    toy.save_rows(folder / "numinamath.jsonl", solved)
    toy.save_rows(
        folder / "math.jsonl",
        [{**row, "answer": a} for row, a in zip(solved, answers, strict=True)],
    )
    asked = [row["problem"] for row in solved]
    worked = [
        {"question": q, "answer": f"So.\n#### {a}"} for q, a in zip(asked, answers, strict=True)
    ]
    toy.save_rows(folder / "gsm8k.jsonl", worked)
    toy.save_rows(
        folder / "gsm8k-test.jsonl",
        [{"question": f"Find {k}.", "answer": "So.\n#### 2"} for k in range(6)],
    )
    toy.save_rows(
        folder / "math500.jsonl",
        [{"problem": f"Find {k}.", "answer": "2", "level": 1} for k in range(5)],
    )
    toy.save_rows(
        folder / "amc23.jsonl",
        [{"id": k, "question": f"Find {k}.", "answer": "2.0"} for k in range(4)],
    )
    return folder


def at_toy_size(spec: str, toys: Path, train: str, test: str) -> ConfigDict:
    """The recipe on files in the form of these suites, with a small model of its family."""
    suites = {"train": train, "test": test}
    files = [
        f"{split}={name.partition('-')[0]}:{toys}/{name}.jsonl" for split, name in suites.items()
    ]
    family = "experts" if "-a3b" in spec else spec.partition("-")[0]
    config = resolve(",".join([spec, f"path={toys}/{family}", *files]))
    config.logging.tensorboard = False
    return config


# Every family with every method, with and without adapters; every model once at least.
SPECS = [
    f"{models[i % len(models)]}:method={method},lora={lora}"
    for models in (
        [name for name in MODELS if name.startswith(family)]
        for family in ("qwen2.5-", "qwen3-", "llama-")
    )
    for i, (method, lora) in enumerate(itertools.product(METHODS, (0, 8)))
]
SPECS += ["smollm3-3b:method=g2d,lora=8", "gemma-3-1b:method=g2d,lora=8"]
SPECS += ["olmo-3-7b:method=g2d,lora=8", "phi-4-mini:method=g2d,lora=8"]
SPECS += ["qwen3.5-0.8b:method=g2d,lora=8"]
SUITES = [
    ("math", "math500", 5),
    ("gsm8k", "amc23", 4),
    ("numinamath", "gsm8k-test", 6),
    ("gsm8k", "numinamath", 6),
]


@pytest.mark.parametrize("spec", SPECS[::9])
def test_dry_run(spec: str, toys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train, test, count = SUITES[SPECS.index(spec) % len(SUITES)]
    config = at_toy_size(spec, toys, train, test)
    run_issues.checked(config)
    dryrun.show(config)
    shown = capsys.readouterr().out
    places = [
        shown.index(f" {name} ", shown.index("reads"))
        for name in graph.plan(Config.of(config)).order
    ]
    assert places == sorted(places)
    assert "Given the following problem, reason and give a final answer" in shown
    assert (" of them trained" in shown) == bool(config.lora.rank)
    rows = [line.split() for line in shown.splitlines()]
    assert [row[-2] for row in rows if row[1:4:2] == ["main", "test"]] == [str(count)]


@pytest.mark.parametrize(
    ("spec", "train", "test", "steps"),
    [
        ("qwen2.5-7b:method=g2d,k=2,lora=4", "gsm8k", "amc23", 2),
        ("llama-3.1-8b:method=grpo,k=1", "numinamath", "math500", 4),
        ("qwen3.5-0.8b:method=g2d,k=2", "math", "math500", 2),
    ],
)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_recipe_runs(
    spec: str,
    train: str,
    test: str,
    steps: int,
    toys: Path,
    process: ProcessPoolExecutor,
    tmp_path: Path,
) -> None:
    config = at_toy_size(f"{spec},length=8", toys, train, test)
    toy.shrink(config)
    config.data.max_prompt_length = 128
    config.stages.evaluate.update(greedy=False, pass_at=(1,))
    first, *others, _ = METHODS["g2d" if "g2d" in spec else "grpo"]
    config.stages[first].prompts_per_step = 3
    if others:
        config.stages.collect.update(prompts=6)
        config.stages.dpo.update(batch_size=2)
        config.stages.dpo.optimizer.learning_rate = 1e-2
    manifests = process.submit(pipeline.run, config, str(tmp_path / "run")).result()
    assert (
        tuple(manifests) == (first, *others, "evaluate")
        and manifests[first].counts["steps"] == steps
    )
    names = [policy.name for policy in manifests["evaluate"].evaluation.policies]
    assert names == list(config.stages.evaluate.policies)
    updates = [row["metrics"] for row in read_metrics(tmp_path / "run") if "loss" in row["metrics"]]
    assert all(math.isfinite(update["loss"]) for update in updates) and any(
        u["grad_norm"] > 0 for u in updates
    )
    if others:
        assert manifests["collect"].counts["pairs"] > 0 and manifests["dpo"].counts["steps"] > 0
        check_in_transformers(
            tmp_path / "run", commands.export(tmp_path / "run", tmp_path / "trained")
        )


def check_in_transformers(work: Path, exported: epath.Path) -> None:
    """The exported policy reads and answers prompts there as it does here, with the tokenizer its
    model brought."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    with commands.opened(work, splits=SPLITS) as session:
        problem = session.problems.by_split["test"][0]
        ids = session.tokenizer.encode_prompt(problem).tolist()
        messages = [dict(message) for message in session.tokenizer.conversation(problem)]
        collected = session.folders["collect"]
        assert set(session.tokenizer.eos_ids) == set(
            np.atleast_1d(model.generation_config.eos_token_id).tolist()
        )
        before, after = (
            toy.their_logits_and_ours(model, load_policy(session, name), ids)
            for name in ("init", "dpo")
        )
    options = {"add_generation_prompt": True, "return_dict": False}
    asked = [message for message in messages if message["role"] != "system"]
    assert (
        tokenizer.apply_chat_template(messages, **options)
        == ids
        == tokenizer.apply_chat_template(asked, **options)
    )
    # And the pairs' messages with the template beside them are the ids that the policy saw.
    tokenizer.chat_template = (collected / "chat_template.jinja").read_text()
    for pair in pandas.read_parquet(collected / "preferences").itertuples():
        assert (
            tokenizer.apply_chat_template(list(pair.prompt), **options) == pair.prompt_ids.tolist()
        )
    np.testing.assert_allclose(*after, atol=1e-4)
    assert np.abs(after[1] - before[1]).max() > 1e-3  # it was trained


# Plans


PLANS = SimpleNamespace(**runpy.run_path(str(ROOT / "benchmarks" / "plans.py")))


def test_plans_that_are_written_are_those_compiled() -> None:
    results, _ = PLANS.read()
    assert results and all(resolve(row.config) for row in PLANS.rows())
    written = [line for line in PLANS.TABLE.read_text().splitlines() if line.startswith("| `")]
    # none is lost in reading
    assert {f"| {' | '.join(cells)} |" for cells in results.values()} <= set(written)


def test_how_a_plan_is_written() -> None:
    def stage(name: str, peak: float, hours: float, **misfits: str) -> dict[str, Any]:
        return {
            "stage": name,
            "peak": peak,
            "program": "decode",
            "misfits": misfits,
            "hours": hours,
            "least": hours / 2,
        }

    g2d = [stage("warmup", 13.64, 30.0), stage("dpo", 14.1, 4.0), stage("evaluate", 3.0, 0.5)]
    grpo = [stage("grpo", 15.9, 120.0, decode="needs 15.90 GiB")]
    cells = PLANS.cells_of(
        PLANS.Row("qwen2.5-7b", "", "v5e-16"),
        {
            "date": "2026-11-26",
            "memory": 15.75,
            "methods": {"g2d": g2d, "grpo": grpo},
            "shorter": {"g2d": 12.0, "grpo": 40.0},
        },
    )
    assert cells[2:4] == ("15.90 (grpo, decode)", "15.75")
    assert cells[4:6] == (
        "**34.5**: warmup 30.0, dpo 4.0, evaluate 0.5",
        "no: grpo, decode, needs 15.90 GiB",
    )
    assert cells[6:] == ("17.2; 60.0", "12.0; 40.0", "2026-11-26")
