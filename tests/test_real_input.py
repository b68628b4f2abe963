"""GSM8K and MATH-500 through every stage, with a model and tokenizer that transformers made, and back into it.

A random model solves nothing, so its pairs come from supplied rollouts: gold solutions against corrupted copies.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from forks import Forks

DATA = Path(__file__).parents[1] / "../shared/data"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="needs GSM8K and MATH-500 in ../shared/data")

CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CONFIG = """
from g2d_jax.stages.policies import load_policy
from g2d_jax.stages.policies import load_policy
from g2d_jax import config as settings

def get_config(arg=""):
    config = settings.base()
    config.name = "real"
    config.model.path = "model"
    config.tokenizer.prompt_template = "paper"
    config.data.train = settings.source("DATA/gsm8k_train.jsonl", limit=24)
    config.data.dev = settings.source("gsm8k:DATA/gsm8k_test.jsonl", limit=4)
    config.data.test = settings.source("math500:DATA/math500.jsonl", limit=6)
    config.data.max_prompt_length = 512
    config.compute.update(max_num_seqs=8, chunk=4, prefill_rows=4, row_length=1024, microbatch_tokens=4096)
    drawn = settings.sampling(8)
    gsm8k = settings.source("DATA/gsm8k_train.jsonl", limit=8, prompt="question", completion="answer")
    fast = settings.optimizer(1e-3)
    config.stages.sft = settings.sft(data=gsm8k, steps=2, batch_size=4, max_length=1024, optimizer=fast)
    config.stages.warmup = settings.online(
        steps=1, prompts_per_step=2, num_generations=2, sampling=drawn, optimizer=fast
    )
    config.stages.collect = settings.collect(rollouts="rollouts.jsonl")
    config.stages.dpo = settings.offline(batch_size=4, optimizer=fast)
    config.stages.evaluate = settings.evaluate(num_generations=1, pass_at=(1,), greedy=False, sampling=drawn)
    return config
"""


def rows(name: str, count: int) -> list[dict[str, str]]:
    with open(DATA / f"{name}.jsonl") as file:
        return [json.loads(next(file)) for _ in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Qwen2 model of transformers' own making, a config, and rollouts."""
    torch = pytest.importorskip("torch")
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

    folder = tmp_path_factory.mktemp("real")
    problems = rows("gsm8k_train", 200)
    texts = [row["question"] + row["answer"] for row in problems]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Qwen2Tokenizer().train_new_from_iterator(texts, 512, new_special_tokens=special, show_progress=False)
    tokenizer.chat_template, tokenizer.eos_token, tokenizer.pad_token = CHAT, "<|im_end|>", "<|endoftext|>"
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    shape = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
    )
    Qwen2ForCausalLM(shape).save_pretrained(folder / "model")
    with open(folder / "rollouts.jsonl", "w") as file:
        for row in problems[:8]:
            solution, _, answer = row["answer"].rpartition("\n#### ")
            number = int(answer.replace(",", ""))
            for value in (number, number + 1):
                text = f"{solution}\nThe answer is \\boxed{{{value}}}."
                file.write(json.dumps({"prompt": row["question"], "completion": text}) + "\n")
    (folder / "real.py").write_text(CONFIG.replace("DATA", str(DATA.resolve())))
    return folder


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_stage_and_back_into_transformers(folder: Path, forks: Forks, monkeypatch: pytest.MonkeyPatch) -> None:
    def g2d(*arguments: str) -> None:
        done = forks.run(*arguments, cwd=folder)
        assert done.returncode == 0, done.stderr

    g2d("run", "--config", "real.py", "--workdir", "work")
    manifests = {p.parent.name[3:]: json.loads(p.read_text()) for p in (folder / "work").glob("*/manifest.json")}
    assert set(manifests) == {"sft", "warmup", "collect", "dpo", "evaluate"}
    counts = manifests["collect"]["counts"]  # every verdict is as it must be: one right, one wrong
    assert (counts["prompts"], counts["mixed"], counts["pairs"]) == (8, 8, 8)
    assert 5 <= manifests["evaluate"]["counts"]["problems"] <= 6  # a long drawing in one of them
    assert set(manifests["evaluate"]["result"]["policies"][0]["subsets"]) <= {
        row["subject"] for row in rows("math500", 500)
    }
    g2d("export", "--workdir", "work", "--output", "trained")
    monkeypatch.chdir(folder)  # the config's model.path is a relative one
    same_logits(folder / "trained", folder / "work")


def same_logits(exported: Path, work: Path) -> None:
    import jax.numpy as jnp

    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from g2d_jax import commands
    from g2d_jax.models.decoder import forward, head_matrix
    from g2d_jax.records import MEMBERS
    from g2d_jax.stages.policies import load_policy

    model, tokenizer = AutoModelForCausalLM.from_pretrained(exported), AutoTokenizer.from_pretrained(exported)
    with commands.opened(work) as runtime:
        problem = runtime.problems["test"][0]
        ids = runtime.tokenizer.encode_prompt(problem)
        params = load_policy(runtime, "dpo")
        start = load_policy(runtime, "init")
        messages = [dict(message) for message in runtime.tokenizer.conversation(problem)]
        stops = runtime.tokenizer.eos_ids
    theirs_ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert list(theirs_ids) == ids.tolist()
    with torch.no_grad():
        theirs = model(torch.tensor(ids[None].astype(np.int64))).logits[0].numpy()
    tokens = jnp.asarray(ids)[None]
    positions = jnp.arange(len(ids))[None]
    ours, before = (
        np.asarray(forward(p, tokens, positions, jnp.full_like(tokens, MEMBERS))[0] @ head_matrix(p))[0]
        for p in (params, start)
    )
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert np.abs(ours - before).max() > 1e-2  # it was trained
    assert set(stops) == set(np.atleast_1d(model.generation_config.eos_token_id).tolist())
