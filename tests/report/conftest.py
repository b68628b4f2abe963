"""A work directory as a run of the embedded task leaves it, its numbers made up but consistent."""

import dataclasses
import functools
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from g2d_jax.data.arithmetic import SLIPS
from g2d_jax.data.tokenizer import PromptTokenizer, load_tokenizer
from g2d_jax.records import Preference, Rollout, Score, ScoredRollout, Verdict
from g2d_jax.report import write_all
from g2d_jax.report.page import SCRIPT
from g2d_jax.stats import accuracy, by_subset, paired, pass_at
from g2d_jax.storage import finish, write_json
from g2d_jax.tables import write_columns, write_preferences, write_rollouts
from g2d_jax.tracking import Tracker

POLICIES = {"sft": ("cold", 0.33), "warmup": ("warm-up", 0.69), "dpo": ("G2D", 0.76)}
HOSTILE = (
    "</script><script>alert(1)</script>",
    "</pre></article><img src=x onerror=alert(2)>",
    "<style>*{display:none}</style><base href=//evil.example><meta http-equiv=refresh content=0>",
    "a\u202egnp.exe\u2066\u200b\ufeff\u2028b",
    "nul\0 escape\x1b[2J carriage\rreturn \x85 delete\x7f",
    "' onmouseover='alert(3)' \" autofocus onfocus=\"alert(4) &lt;b&gt; &#60;b&#62;",
    "]]><svg/onload=alert(5)> {{7*7}} ${7*7} <!-- --!>",
)


VOID = {"meta", "input"}
ALLOWED = """html head meta title style body header nav main section article h1 h2 h3 h4 h5 p a ol ul li div span strong
small table caption thead tbody tr th td figure figcaption svg line circle rect path polygon text details summary pre
code label input select option button output script"""
ATTRIBUTES = """lang charset http-equiv content name class id href aria-label aria-hidden role scope tabindex title
viewbox x y x1 x2 y1 y2 cx cy r rx d points width height text-anchor type value
autocomplete hidden data-listing data-control data-row data-prompt data-policy data-verdict"""


class Page(HTMLParser):
    """Checks nesting and names while reading; keeps the text of each section and all of it."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open, self.text, self.tags, self.links, self.attributes = [], [], [], [], []
        self.feed(source)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        assert tag in ALLOWED.split(), tag
        assert {name for name, _ in attrs} <= set(ATTRIBUTES.split()), (tag, attrs)
        self.links += [value for name, value in attrs if name == "href"]
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "script" in self.open:
            assert data == SCRIPT
        elif "style" not in self.open:
            self.text.append(data)


def completion(start: int, steps: list[tuple[str, int]], right: bool) -> str:
    """A chain of steps such as the embedded task's, the last result off by one if it is not right."""
    parts, value = [], start
    for operation, operand in steps:
        result = {"+": value + operand, "-": value - operand, "*": value * operand}[operation]
        parts.append(f"{value}{operation}{operand}={result}")
        value = result
    return ";".join(parts) + f";\\boxed{{{value if right else value + 1}}}"


@functools.cache
def embedded() -> PromptTokenizer:
    """The tokenizer of the embedded task, in which the completions are written."""
    return load_tokenizer(SLIPS.name)


def rollout(problem: str, sample: int, text: str, verdict: Verdict, policy: str) -> ScoredRollout:
    ids = embedded().encode_completion(text)
    nats = np.resize(np.array([-0.01, -0.02, -0.3, -1.2, -0.03, -2.5, -4.0], np.float32), len(ids))
    drawn = Rollout(problem, 0, sample, ids[:5], ids, nats, -nats, "length" if verdict == "no_answer" else "stop")
    reward = None if verdict == "unscorable" else float(verdict == Verdict.CORRECT)
    return ScoredRollout(drawn, text, Score(reward, verdict, text[-4:]), policy)


def tokens(**counts: int) -> dict[str, int]:
    return {"generated": 0, "prefilled": 0, "scored": 0, "trained": 0, **counts}


def build(workdir: Path, *, problems: int = 48, samples: int = 4, seed: int = 0) -> Path:
    """Write a finished run: sft, warmup, collect, dpo, evaluate."""
    rng = np.random.default_rng(seed)
    stages = {name: {"kind": kind} for name, kind in zip(NAMES, KINDS, strict=True)}
    config = {"name": "demo", "seed": seed, "dtype": "float32", "stages": stages}
    write_json(workdir / "config.json", {"config": config, "version": "0.1.0"})
    write_json(workdir / "environment.json", {"jax": "0.10.2", "devices": ["cpu:0"], "command": ["g2d", "run"]})
    _metrics(workdir, rng)
    cost = {"verifier_cpu_seconds": 0.0, "counts": {}, "result": {}}
    finish(
        workdir / "01-sft",
        {**cost, "kind": "sft", "name": "sft", "seconds": 84.2, "tokens": tokens(trained=5_120_000), "flops": 9.5e12},
    )
    finish(
        workdir / "02-warmup",
        {**cost, "kind": "online", "name": "warmup", "seconds": 31.7, "flops": 4.1e11, "verifier_cpu_seconds": 2.2}
        | {"tokens": tokens(generated=128_400, prefilled=10_240, trained=148_000), "counts": {"unscorable": 1}},
    )
    _collect(workdir / "03-collect", rng, cost)
    finish(
        workdir / "04-dpo",
        {
            **cost,
            "kind": "offline",
            "name": "dpo",
            "inputs": {"warmup": "0", "collect": "1"},
            "seconds": 24.9,
            "flops": 5.0e11,
        }
        | {"tokens": tokens(scored=331_000, trained=331_000), "result": OFFLINE},
    )
    _evaluate(workdir / "05-evaluate", rng, cost, problems, samples)
    return workdir


OFFLINE = {
    "pairs": {"chosen_length": 33.25},
    "before": {"logprob_gap": 3.5, "margin": 0.0},
    "after": {"logprob_gap": 9.25, "margin": 7.5},
    "signal": {"norm_over_noise": 2.75},
}
NAMES = ("sft", "warmup", "collect", "dpo", "evaluate")
KINDS = ("sft", "online", "collect", "offline", "evaluate")


def _metrics(workdir: Path, rng: np.random.Generator) -> None:
    with Tracker(workdir, tensorboard=False) as tracker:
        for step in range(1, 401):
            loss = 0.35 + 2.2 * np.exp(-step / 60) + rng.normal(0, 0.03)
            tracker.log("sft", step * 5, {"loss": loss, "grad_norm": 0.4 + rng.gamma(2, 0.2), "learning_rate": 3e-3})
        for step in range(1, 21):
            reward = 0.33 + 0.36 * step / 20 + rng.normal(0, 0.02)
            metrics = {"reward": reward, "reward_std": 0.42 - 0.006 * step, "entropy": 0.195 - 0.0067 * step}
            metrics |= {
                "completions/mean_length": 22 + 0.4 * step,
                "completions/clipped_ratio": 0.0,
                "kl": 0.004 * step,
            }
            metrics |= {"frac_reward_zero_std": 0.1 + 0.01 * step, "loss": rng.normal(0, 0.02)}
            tracker.log("warmup", step, metrics | {"grad_norm": 0.5 + rng.gamma(2, 0.1), "num_tokens": 7000.0 * step})
            if step in (1, 20):
                row = {"prompt": "8-4+2", "completion": "8-4=4;4+2=6;\\boxed{6}", "verdict": "correct", "reward": 1.0}
                tracker.samples("warmup", step, [row])
        tracker.log(
            "collect", 0, {"reward": 0.69, "entropy": 0.06, "completions/mean_length": 30.0, "pairs/pairs": 60.0}
        )
        for step in range(1, 52):
            done = step / 51
            metrics = {"loss": 0.69 - 0.3 * done + rng.normal(0, 0.02), "rewards/chosen": 0.3 * done}
            metrics |= {"rewards/rejected": -1.6 * done + rng.normal(0, 0.05), "rewards/margins": 1.9 * done}
            metrics |= {"rewards/accuracies": 0.5 + 0.4 * done, "logps/chosen": -3.2 + 0.3 * done}
            metrics |= {"logps/rejected": -4.4 - 1.6 * done, "grad_norm": 2 + rng.gamma(2, 0.3), "learning_rate": 1e-4}
            tracker.log("dpo", step, metrics)


def _collect(folder: Path, rng: np.random.Generator, cost: dict) -> None:
    pairs, rows = [], []
    for i in range(60):
        start, steps = int(rng.integers(1, 60)), [("+", int(rng.integers(2, 9))), ("-", 3), ("*", 2)]
        good, bad = completion(start, steps, True), f"\\boxed{{{int(rng.integers(0, 99))}}}" * int(rng.integers(1, 3))
        ids = [np.arange(6, dtype=np.int32), *map(embedded().encode_completion, (good, bad))]
        prompt = f"{start}" + "".join(f"{op}{n}" for op, n in steps)
        pairs.append(Preference(f"{i:016x}", prompt, good, bad, *ids, 1.0, 0.0))
        rows.append(rollout(f"{i:016x}", 0, good, Verdict.CORRECT, "warmup"))
        rows.append(rollout(f"{i:016x}", 1, bad, Verdict.INCORRECT, "warmup"))
    write_rollouts(folder / "rollouts" / "part-00000.parquet", rows)
    write_json(folder / "informativeness.json", {"pass_rate": 0.5, "frac_mixed": 1.0, "ece": 0.125, "novel_one": 4.0})
    columns = {"pass_rate": np.full(60, 0.5), "scored": np.full(60, 2)}
    write_columns(folder / "informativeness" / "prompts.parquet", columns)
    rule = {"name": "random correct with random incorrect", "pairs_per_prompt": 4}
    write_json(
        folder / "preferences" / "_manifest.json", {"done": True, "policy": "warmup", "pair_rule": rule, "seed": 0}
    )
    write_preferences(folder / "preferences" / "00000.parquet", pairs)
    dropped = {"all correct": 150, "all incorrect": 44, "outside the pass-rate window": 0, "unscorable": 2}
    counts = {"prompts": 1024, "rollouts": 8192, "mixed_prompts": 828, "pairs": 60, "dropped": dropped}
    finish(
        folder,
        {**cost, "kind": "collect", "name": "collect", "seconds": 12.6, "flops": 1.6e11, "counts": counts}
        | {"verifier_cpu_seconds": 4.4, "tokens": tokens(generated=221_000, prefilled=11_300)},
    )


def _evaluate(folder: Path, rng: np.random.Generator, cost: dict, problems: int, samples: int) -> None:
    hardness, names = rng.random((problems, 1)), [f"{i:016x}" for i in range(problems)]
    subsets = [f"{2 + i % 4} operations" for i in range(problems)]
    correct, policies = {}, []
    write_json(
        folder / "problems.json",
        [{"id": n, "prompt": f"{i + 8}-4+2", "answer": f"{i + 6}", "subset": s}
         for i, (n, s) in enumerate(zip(names, subsets, strict=True))],
    )  # fmt: skip
    for policy, (label, rate) in POLICIES.items():
        odds = np.clip(rate + 0.8 * (0.5 - hardness), 0.02, 0.98)
        right = (rng.random((problems, samples)) < odds).astype(float)
        rows = []
        for i, name in enumerate(names):
            for s in range(samples):
                verdict = Verdict.CORRECT if right[i, s] else Verdict.INCORRECT
                if not right[i, s] and rng.random() < 0.15:
                    verdict = Verdict.NO_ANSWER
                rows.append(
                    rollout(name, s, completion(i + 8, [("-", 4), ("+", 2)], bool(right[i, s])), verdict, policy)
                )
        for i, text in enumerate(HOSTILE):  # of the first problems, whose first samples are shown
            if (i + 1) * samples <= len(rows) and policy == "warmup":
                rows[i * samples] = dataclasses.replace(rows[i * samples], text=text)
        write_rollouts(folder / "rollouts" / f"{policy}.parquet", rows)
        correct[policy] = right
        policies.append(_policy(policy, label, right, rows, subsets))
    compared = [("sft", "warmup"), ("warmup", "dpo"), ("sft", "dpo")]
    pairs = {(b, a): paired(correct[b], correct[a]) for b, a in compared}
    result = {
        "policies": policies,
        "paired": [
            {
                "before": b,
                "after": a,
                "difference": p.difference,
                "sem": p.sem,
                "greedy": {"difference": 0.25, "sem": 0.1},
            }
            for (b, a), p in pairs.items()
        ],
        "problems": problems,
        "samples": samples,
    }
    finish(
        folder,
        {**cost, "kind": "evaluate", "name": "evaluate", "seconds": 18.8, "flops": 2.0e11, "result": result}
        | {"verifier_cpu_seconds": 6.1, "tokens": tokens(generated=310_000, prefilled=15_000)},
    )


def _policy(name: str, label: str, right: np.ndarray, rows: list[ScoredRollout], subsets: list[str]) -> dict:
    measured = dataclasses.asdict(accuracy(right))
    verdicts = [row.score.verdict.value for row in rows]
    return {
        "name": name,
        "rollouts": f"rollouts/{name}.parquet",
        "label": label,
        **{key: measured[key] for key in ("mean", "std_runs", "sem", "sem_clustered")},
        "pass_at": {str(k): pass_at(right, k) for k in (1, 2, 4) if k <= right.shape[1]},
        "greedy": min(measured["mean"] + 0.1, 1.0),
        "subsets": {s: {"mean": a.mean, "problems": a.problems} for s, a in by_subset(right, subsets).items()},
        "verdicts": {verdict: verdicts.count(verdict) for verdict in sorted(set(verdicts))},
        "mean_length": float(np.mean([len(row.rollout.token_ids) for row in rows])),
        "informativeness": {"pass_rate": measured["mean"], "auroc": 0.75, "entropy": "NaN"},
        "truncated": float(np.mean([row.rollout.stop_reason == "length" for row in rows])),
    }


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; read it only."""
    return build(tmp_path_factory.mktemp("runs") / "demo")


@pytest.fixture
def fresh_run(tmp_path: Path) -> Path:
    """A finished run of one's own, smaller, to take things from."""
    return build(tmp_path / "demo", problems=8, samples=2)


@pytest.fixture(scope="session")
def hostile() -> str:
    """Text that tries to be markup, to run, to steer the terminal and the direction of writing."""
    return "\n".join(HOSTILE)


@pytest.fixture(scope="session")
def read() -> Callable[[Path], tuple[str, Page, str]]:
    """Writes a run's report.html and returns its source, the parsed page and its text with single spaces."""

    def read_page(workdir: Path) -> tuple[str, Page, str]:
        source = Path(write_all(workdir)[0]).read_text(encoding="utf-8")
        page = Page(source)
        return source, page, " ".join(" ".join(page.text).split())

    return read_page


@pytest.fixture(scope="session")
def parse() -> type[Page]:
    """See Page."""
    return Page


@pytest.fixture(scope="session")
def make_rollout() -> Callable[..., ScoredRollout]:
    """See rollout."""
    return rollout
