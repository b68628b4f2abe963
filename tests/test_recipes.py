"""The rows of "Bridging Offline and Online RL for LLMs" (arXiv 2506.21495): their numbers, and each
of them run.

At toy size the model, prompts, batch, group and lengths are small; the objective, the optimiser,
the synchronisation, the rewards and the templates are those of the config (tests/toys.py).
"""

import json
import math
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from etils import epath
from ml_collections import ConfigDict
from toys import (
    LLAMA,
    PAPER,
    QWEN,
    SIZES,
    make_tokenizer,
    save_policy,
    save_rows,
    shrink,
    solved_problems,
)

from g2d_jax import commands, pipeline
from g2d_jax.config import Config
from g2d_jax.config.graph import plan
from g2d_jax.recipes.config_load import resolve
from g2d_jax.runtime.tracking import Tracker, read_metrics
from g2d_jax.session import session
from g2d_jax.stages import run_issues

Run = tuple[Path, dict[str, Any]]

# Table 4, in its columns: beta, learning rate, Adam's epsilon, gradient clip, reference sync, max
# length, batch; with the loss and s before them. beta is DPO's or the weight of GRPO's KL term.
ROWS = {
    "bridging-math:method=offline": ("dpo", 0, 0.1, 1e-6, 1e-4, 1.0, False, 2048, 64),
    "bridging-math:method=s100": ("dpo", 100, 0.1, 1e-6, 1e-4, 1.0, True, 2048, 64),
    "bridging-math:method=s10": ("dpo", 10, 0.1, 1e-6, 1e-4, 1.0, True, 2048, 64),
    "bridging-math:method=s5": ("dpo", 5, 0.1, 1e-6, 1e-4, 1.0, True, 2048, 64),
    "bridging-math:method=s1": ("dpo", 1, 0.1, 1e-6, 1e-4, 1.0, True, 2048, 64),
    "bridging-math:method=grpo": ("grpo", 1, 0.001, 1e-6, 1e-4, 1.0, False, 2048, 64),
    "bridging-math:method=grpo,n=4": ("grpo", 1, 0.001, 1e-6, 1e-4, 1.0, False, 2048, 64),
    "bridging-math:method=grpo,n=12": ("grpo", 1, 0.001, 1e-6, 1e-4, 1.0, False, 2048, 64),
    "bridging-math:method=group_dpo": ("group_dpo", 100, 0.1, 1e-6, 1e-4, 1.0, True, 2048, 64),
    "bridging-math:method=combined": ("group_dpo", 1, 0.1, 1e-6, 1e-4, 1.0, True, 2048, 64),
    "bridging-math:method=nll": ("dpo", 100, 0.1, 1e-6, 1e-4, 1.0, True, 2048, 64),
    "bridging-math:method=nll,sync=1": ("dpo", 1, 0.1, 1e-6, 1e-4, 1.0, True, 2048, 64),
    "bridging-math:method=entropy": ("dpo", 100, 0.1, 1e-6, 1e-4, 1.0, True, 2048, 64),
    "bridging-math:method=entropy,sync=10": ("dpo", 10, 0.1, 1e-6, 1e-4, 1.0, True, 2048, 64),
    "bridging-chat:method=offline": ("dpo", 0, 0.01, 1e-6, 1e-8, 0.1, False, 1024, 32),
    "bridging-chat:method=s10": ("dpo", 10, 0.01, 1e-6, 1e-8, 0.1, False, 1024, 32),
    "bridging-chat:method=s5": ("dpo", 5, 0.01, 1e-6, 1e-8, 0.1, False, 1024, 32),
    "bridging-chat:method=s1": ("dpo", 1, 0.01, 1e-6, 1e-8, 0.1, False, 1024, 32),
    "bridging-chat:method=grpo": ("grpo", 1, 0.001, 1e-6, 1e-8, 0.1, False, 1024, 32),
    "bridging-mixed:row=both": ("dpo", 1, 0.01, 1e-6, 1e-5, 0.1, False, 2048, 32),
    "bridging-mixed:row=chat-to-math,start=hf:x/y": (
        "dpo",
        1,
        0.1,
        1e-6,
        1e-4,
        1.0,
        True,
        2048,
        32,
    ),
    "bridging-mixed:row=math-to-chat,start=hf:x/y": (
        "dpo",
        1,
        0.01,
        1e-6,
        1e-8,
        0.1,
        False,
        2048,
        32,
    ),
}


def published(stage: ConfigDict) -> tuple[object, ...]:
    """Normalisers and optimiser, of which the paper's table says nothing."""
    losses = (stage.dpo.normalizer, stage.loss_type, stage.scale_rewards, stage.scale_rewards_eps)
    adam = stage.optimizer
    return (*losses, adam.b2, adam.weight_decay, adam.schedule, adam.min_lr_ratio)


@pytest.mark.parametrize("spec", ROWS)
@pytest.mark.parametrize("model", ["llama-3.1-8b-instruct", "qwen2.5-7b"])
def test_a_row_has_the_papers_numbers(spec: str, model: str) -> None:
    config = resolve(f"{spec},model={model}")
    assert plan(run_issues.checked(config)[0]).order == ("train", "best", "evaluate")
    stage, adam = config.stages.train, config.stages.train.optimizer
    beta = stage.beta if stage.loss == "grpo" else stage.dpo.beta
    numbers = (beta, adam.learning_rate, adam.eps, adam.max_grad_norm, stage.reference_sync)
    size = (stage.sampling.max_new_tokens, stage.prompts_per_step)
    assert (stage.loss, stage.sync_every, *numbers, *size) == ROWS[spec]
    assert published(stage) == (
        "prompts",
        "seq-mean-token-sum",
        "group",
        1e-6,
        0.95,
        0.1,
        "cosine",
        0.2,
    )
    assert (
        stage.num_iterations,
        stage.clip.importance_cap,
        adam.warmup_steps,
        adam.learning_rate,
    ) == (
        1,
        0.0,
        0,
        1e-6,
    )
    printed = resolve(f"{spec},model={model},recipe=paper").stages.train
    assert published(printed) == ("pairs", "sum", "none", 1e-4, 0.999, 0.0, "constant", 0.0)
    assert (printed.optimizer.eps, printed.optimizer.max_grad_norm) == (
        adam.eps,
        adam.max_grad_norm,
    )
    assert (stage.sampling.temperature, stage.sampling.top_p) == (1.0, 1.0)
    assert stage.filter.dynamic_sampling == stage.filter.drop_solved == 0
    for name in ("best", "evaluate"):
        drawn = config.stages[name].sampling
        assert (drawn.temperature, drawn.top_p, drawn.max_new_tokens) == (0.6, 0.9, size[0])
    assert stage.steps == (15_000 if "mixed" in spec else 1500)
    assert (
        config.model.path
        == {"l": "meta-llama/Llama-3.1-8B-Instruct", "q": "Qwen/Qwen2.5-7B"}[model[0]]
    )


def test_what_else_sets_the_rows_apart() -> None:
    def train(spec: str) -> ConfigDict:
        return resolve(spec).stages.train

    assert [
        train(f"bridging-math:method=grpo{n}").num_generations for n in (",n=4", "", ",n=12")
    ] == [4, 8, 12]
    combined = train("bridging-math:method=combined,alpha=0.001")
    assert (
        combined.grpo_coef,
        combined.beta,
        train("bridging-math:method=combined").grpo_coef,
    ) == (0.001, 0.001, 0.01)
    nll = train("bridging-math:method=nll").dpo
    assert nll.nll_coef == 1.0
    found = [
        train(f"bridging-math:method=entropy{more}").entropy_coef for more in ("", ",entropy=1e-4")
    ]
    assert found == [3e-4, 1e-4]
    plain = train("bridging-math:method=s1")
    assert plain.grpo_coef == plain.beta == plain.entropy_coef == plain.dpo.nll_coef == 0.0
    assert plain.dpo.loss_type == "sigmoid"
    assert plain.keep == (250, 500, 750, 1000, 1250, 1500)


def test_data_of_the_rows() -> None:
    maths, chat, both = map(resolve, ("bridging-math", "bridging-chat", "bridging-mixed"))
    read = [
        (maths.data[split].path, maths.data[split].split, maths.data[split].limit)
        for split in ("train", "dev")
    ]
    assert read == [("numinamath", "train", None), ("numinamath", "dev", 1980)]
    assert (maths.data.test.path, maths.reward.function) == ("math500", "verify")
    assert maths.tokenizer.prompt_template == "paper"
    assert (maths.stages.evaluate.num_generations, maths.tokenizer.system) == (50, None)

    read = [(chat.data[split].split, chat.data[split].limit) for split in ("train", "dev")]
    assert read == [("train", 1000), ("dev", 470)] and chat.data.train.path == "wildchat"
    assert (chat.reward.function, chat.reward.model.path) == ("model", "Nexusflow/Athene-RM-8B")
    assert not Config.of(chat).reward.is_verifiable
    assert resolve("bridging-chat:dev=held-out.jsonl").data.dev.path == str(
        Path.cwd() / "held-out.jsonl"
    )

    assert (both.data.train.path, both.data.train.limit, both.data.weight) == (
        "numinamath",
        100_000,
        2.0,
    )
    other = both.tasks.chat
    assert (other.train.path, other.train.limit, other.weight) == ("wildchat", 50_000, 1.0)
    verifiable = {
        name: task.reward.is_verifiable for name, task in Config.of(both).all_tasks.items()
    }
    assert (
        verifiable == {"main": True, "chat": False}
        and other.reward.model.path == "Nexusflow/Athene-RM-8B"
    )
    alone = {
        row: resolve(f"bridging-mixed:row={row},start=hf:x/y")
        for row in ("chat-to-math", "math-to-chat")
    }
    assert {
        row: (c.data.train.path, c.data.train.limit, len(c.tasks)) for row, c in alone.items()
    } == {
        "chat-to-math": ("numinamath", 100_000, 0),
        "math-to-chat": ("wildchat", 100_000, 0),
    }
    assert all(c.stages.train.policy == "hf:x/y" for c in alone.values())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("math:method=s10,sync=5", "choice 'sync' is for method=group_dpo"),
        ("math:method=s7", "choice 'method' cannot be 's7'"),
        ("mixed:row=chat-to-math", "row=chat-to-math goes on from an earlier run: give start="),
        ("mixed:start=run:x#best", "row=both begins anew: leave start out"),
    ],
)
def test_choices_that_make_no_row(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(f"bridging-{spec}")


# Toys

CHAT = 3 * "Given the following problem, reason and give a final answer to the problem. "


def save_athene(folder: Path) -> None:
    """A reward model in Athene-RM-8B's layout: v_head.weight, read at the token 128003."""
    torch = pytest.importorskip("torch")
    from safetensors.numpy import save_file
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(1)
    config = LlamaConfig(
        **{**SIZES, "hidden_size": 8, "num_attention_heads": 2}, vocab_size=128_256
    )
    tensors = {
        f"model.{name}": value.numpy() for name, value in LlamaModel(config).state_dict().items()
    }
    tensors["v_head.weight"] = torch.randn(1, 8).numpy()
    make_tokenizer(LLAMA, cls_id=128_003).save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors")
    written = {**config.to_dict(), "architectures": ["AtheneForSequenceClassification"]}
    (folder / "config.json").write_text(json.dumps(written, default=str))


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small models, and of data in the forms of NuminaMath-CoT, MATH-500 and
    WildChat-1M."""
    folder = tmp_path_factory.mktemp("toys")
    save_policy(folder / "llama", "Llama", make_tokenizer(LLAMA))
    save_policy(folder / "qwen", "Qwen2", make_tokenizer(QWEN))
    save_athene(folder / "athene")
    solved = solved_problems(80)
    left_out = [
        {**solved[0], "problem": "Prove it."},
        {**solved[1], "problem": "What?", "source": "orca_math"},
    ]
    save_rows(folder / "numina.jsonl", [*left_out, *solved])
    test = [
        {"problem": f"Find {k}.", "answer": "2", "subject": "Algebra", "level": 1} for k in range(5)
    ]
    save_rows(folder / "math500.jsonl", test)
    turns = [
        [{"role": "user", "content": f"{CHAT}{k}"}, {"role": "assistant", "content": "No."}]
        for k in range(80)
    ]
    blank = {"conversation": [{"role": "user", "content": " "}], "toxic": False, "redacted": False}
    said = [
        {"conversation": turn, "toxic": k == 3, "redacted": False} for k, turn in enumerate(turns)
    ]
    save_rows(folder / "wildchat.jsonl", [blank, *said])
    return folder


@pytest.fixture(scope="module")
def run(toys: Path, process: ProcessPoolExecutor) -> Callable[[str], Run]:
    """run("bridging-math:method=s1"): its folder and manifests, at toy size; each run is made
    once."""
    done: dict[str, Run] = {}

    def run(spec: str) -> Run:
        if spec not in done:
            workdir = toys / f"run-{len(done)}"
            config = shrunk(spec, toys)
            done[spec] = workdir, process.submit(pipeline.run, config, str(workdir)).result()
        return done[spec]

    return run


def shrunk(spec: str, toys: Path, family: str = "llama") -> ConfigDict:
    """The config with toys for its model, data and reward model, small numbers, and in float32."""
    name = spec.partition(":")[0]
    maths, chat = f"numinamath:{toys}/numina.jsonl", f"wildchat:{toys}/wildchat.jsonl"
    small = f"path={toys}/{family},steps=3,keep=2"
    config = resolve(
        {
            "bridging-math": f"{spec},{small},train={maths}",
            "bridging-chat": f"{spec},{small},train={chat},reward={toys}/athene",
            "bridging-mixed": f"{spec},{small},math={maths},chat={chat},reward={toys}/athene",
        }[name]
    )
    if config.data.test.path == "math500":
        config.data.test.path = f"math500:{toys}/math500.jsonl"
    shrink(config)
    train = config.stages.train
    train.prompts_per_step, train.num_generations = 3, 4
    train.sync_every = min(train.sync_every, 2)  # so that it does within the three steps
    for stage in config.stages.values():
        stage.sampling.max_new_tokens = 8
    return config


def updates(workdir: Path) -> list[dict[str, float]]:
    """Metrics of the updates, in order."""
    rows = [
        row for row in read_metrics(workdir) if row["stage"] == "train" and "loss" in row["metrics"]
    ]
    return [row["metrics"] for row in rows]


# Rows that differ from one another in more than a number.
RUNS = (
    "bridging-math:method=s1",
    "bridging-math:method=combined",
    "bridging-chat:method=grpo",
    "bridging-mixed:row=both",
)


@pytest.mark.slow
@pytest.mark.parametrize("spec", RUNS)
def test_a_row_runs(spec: str, run: Callable[[str], Run]) -> None:
    workdir, manifests = run(spec)
    assert list(manifests) == ["train", "best", "evaluate"]
    loss, every, *_ = ROWS[spec]
    assert (
        manifests["train"].counts["steps"] == 3
        and manifests["train"].counts["rollouts"] == 3 * 3 * 4
    )
    assert manifests["train"].generation["calls"] == {0: 1, 1: 3}.get(every, 2)
    assert manifests["best"].selection.policy in ("train@2", "train@3")
    assert [policy.name for policy in manifests["evaluate"].evaluation.policies][-1] == "best"

    steps = updates(workdir)
    assert len(steps) == 3 and all(math.isfinite(step["loss"]) for step in steps)
    assert all(step["grad_norm"] > 0 for step in steps if step["frac_signal"] > 0)
    assert any(step["frac_signal"] > 0 for step in steps)
    scored = {step["verdicts/scored"] for step in steps}  # the share that a reward model scored
    judged = sum(step["verdicts/correct"] > 0 and step["verdicts/incorrect"] > 0 for step in steps)
    if "both" in spec:
        assert scored == {1 / 3}  # two of maths and one of chat in every batch
        assert all(step["tasks/chat/reward_std"] > 0 for step in steps) and judged
    else:
        chat = "bridging-chat" in spec
        assert scored == {1.0 if chat else 0.0} and bool(judged) != chat
    if loss == "dpo":
        check_dpo(spec, steps, every)


def check_dpo(spec: str, steps: list[dict[str, float]], every: int) -> None:
    """While the policy is the reference the loss of a pair is log 2, of those of three prompts a
    third of each."""
    same = [
        step for step in (steps if every == 1 and "math:" in spec else steps[:1]) if step["pairs"]
    ]
    for step in same:
        extra = step["loss"] - math.log(2) * step["pairs"] / 3
        if "nll" in spec:
            assert extra > 0.1  # of the chosen response: the tokens of a random model are unlikely
        elif "entropy" in spec:
            # 3e-4 times the entropy of some 400 tokens
            assert -3e-4 * math.log(500) < extra < -3e-5
        else:
            assert abs(extra) < 1e-4


@pytest.mark.parametrize(
    ("spec", "family", "text"),
    [
        (
            "bridging-math:method=s1",
            "llama",
            f"<|bos|><|start|>user<|end|>\n\n{PAPER}<|eot|><|start|>assistant<|end|>\n\n",
        ),
        (
            "bridging-math:method=nll",
            "qwen",
            f"<|start|>user\n{PAPER}<|eot|>\n<|start|>assistant\n",
        ),
        (
            "bridging-chat:method=s1",
            "llama",
            "<|bos|><|start|>user<|end|>\n\n{}<|eot|><|start|>assistant<|end|>\n\n",
        ),
    ],
)
def test_prompts_are_those_of_the_papers_figures(
    spec: str, family: str, text: str, toys: Path, tmp_path: Path
) -> None:
    with Tracker(None, tensorboard=False) as tracker:
        config = Config.of(shrunk(spec, toys, family))
        run = session.Run(config=config, workdir=epath.Path(tmp_path), folders={}, tracker=tracker)
        with session.loaded(run, session.Options()) as shared:
            pass
        for problem in shared.problems.train:
            said = (
                problem.prompt if isinstance(problem.prompt, str) else problem.prompt[0]["content"]
            )
            assert shared.tokenizer.render(problem) == text.format(said)


@pytest.mark.slow
def test_other_test_sets(
    run: Callable[[str], Run], toys: Path, process: ProcessPoolExecutor
) -> None:
    """Whole suites, and the held-out part of the training data."""
    workdir, _ = run("bridging-math:method=s1")
    suite = f"amc23:{toys}/math500.jsonl"
    found = process.submit(
        commands.evaluate, str(workdir), "best", problems=suite, num_generations=3
    ).result()
    assert (found.evaluation.samples, found.evaluation.problems) == (3, 5)
    held_out = {"problems": f"numinamath:{toys}/numina.jsonl", "split": "test", "limit": 2}
    found = process.submit(
        commands.evaluate, str(workdir), "best", **held_out, num_generations=1
    ).result()
    assert 1 <= found.evaluation.problems <= 2
