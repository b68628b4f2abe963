r"""Measure sampling ahead (engine.ahead) beside taking turns, with a server of this machine's own.

    python benchmarks/ahead.py times FOLDER [--rounds 2] [--update 3]
    python benchmarks/ahead.py accuracy FOLDER [--seeds 0 1 2] [--server URL]

times: the server gives answers that a seed decides, and takes as long for a window as the trainer
does. Neither computes for long: each update waits besides (--update seconds), and so does each
answer, as hosts wait for devices, so that what else the machine does tells little. How long the
trainer takes is measured first, with a server that takes no time. Printed by run: seconds an
update, and the share of the time in which the trainer was busy, over the windows in which
both work: without the first two and the last one. Then the ratio of the times.

accuracy: the demo's cold policy, then GRPO with either, at the same updates. The server is this
library's own sampler behind the interface, in a process of its own, and samples from the weights
that it is sent; --server: another one, such as vLLM with the model of FOLDER/cold. Printed: sampled
accuracy on 256 test problems, the difference by problem and its standard error.

Runs that are finished in the folder are not run again.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np  # noqa: E402
from engine_server import PolicySampler, after, choice, serving  # noqa: E402
from ml_collections import ConfigDict  # noqa: E402

from g2d_jax import config as settings  # noqa: E402
from g2d_jax import pipeline  # noqa: E402
from g2d_jax.recipes.config_load import resolve  # noqa: E402
from g2d_jax.runtime.tables import read_rollouts  # noqa: E402
from g2d_jax.runtime.tracking import read_metrics  # noqa: E402
from g2d_jax.session.trainer import Trainer  # noqa: E402

RESPONSE = 48  # tokens at most
PROMPT = 16
CONCURRENCY = 64
EVERY, WINDOWS = 4, 8  # updates of a window; windows of a run that is timed
PROMPTS, SAMPLES = 8, 8  # of an update


def by_seed(body: dict[str, Any], number: int) -> Any:
    """An answer that the seed decides: digits of the embedded task, then the stop token."""
    drawn = random.Random(body["seed"])
    ids = [drawn.randrange(3, 12) for _ in range(drawn.randrange(RESPONSE // 2, RESPONSE - 1))]
    return choice([*ids, *body["stop_token_ids"][:1]])


def even(completions: list[str], **columns: Any) -> list[float]:
    """Reward 1 for a response of even length."""
    return [float(len(text) % 2 == 0) for text in completions]


def serve(kind: str, seconds: float) -> None:
    """Serve until standard input ends; print the url. kind: "seeds" or "policy"."""
    reply = by_seed
    if kind == "policy":
        reply = sampler = PolicySampler(PROMPT, RESPONSE)
    with serving(after(lambda: seconds, reply)) as server:
        if kind == "policy":
            server.load = sampler.load
        print(server.url, flush=True)
        sys.stdin.read()


@contextmanager
def server_process(kind: str, seconds: float = 0.0) -> Iterator[str]:
    """The url of `serve` in a process of its own, while the block lasts."""
    command = [sys.executable, __file__, "serve", kind, repr(seconds)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.communicate("")


def timed(url: str, ahead: int) -> ConfigDict:
    """A run of updates alone, of a model whose own time is short."""
    config = settings.base()
    config.data.train = settings.source("procedural:slips", "train", 4000)
    config.data.max_prompt_length = PROMPT
    config.checkpoint.every = 1000
    config.logging.tensorboard = False
    config.engine.update(
        kind="server", url=url, sync="folder", ahead=ahead, concurrency=CONCURRENCY
    )
    config.stages.train = settings.online(
        policy="init", steps=EVERY * WINDOWS, sync_every=EVERY, prompts_per_step=PROMPTS,
        num_generations=SAMPLES, clip={"importance_cap": 2.0}, sampling=settings.sampling(RESPONSE),
        optimizer=settings.optimizer(1e-5),
    )  # fmt: skip
    return config


def figures(workdir: Path) -> dict[str, float]:
    """Of a finished run, over the windows in which both may work: seconds of a window and an
    update, busy shares, and the trainer's seconds of work in a window."""
    logged = [r["metrics"] for r in read_metrics(workdir) if "loss" in r["metrics"]]
    windows = [logged[first : first + EVERY] for first in range(0, len(logged), EVERY)]
    rows = []
    for window in windows[2:-2]:
        times = [metrics["step_time"] for metrics in window]
        waits = [metrics["step_time"] * metrics["goodput/generation"] for metrics in window]
        rows.append((sum(times), sum(waits)))
    seconds, waited = map(statistics.fmean, zip(*rows, strict=True))
    return {"update": seconds / EVERY, "trainer": 1 - waited / seconds, "work": seconds - waited}


def make_updates_wait(seconds: float) -> None:
    """Have every update take so long besides, as one on an accelerator would."""
    update = Trainer.update

    def waiting(self: Trainer, *given: Any) -> None:
        update(self, *given)
        self.flush()  # the device is busy with this update, not the one before
        time.sleep(seconds)

    Trainer.update = waiting


def times(folder: Path, rounds: int) -> None:
    """Print the times of both, in turn, so that what else the machine does falls on both."""

    def measured(name: str, seconds: float, ahead: int) -> dict[str, float]:
        with server_process("seeds", seconds) as url:
            pipeline.run(timed(url, ahead), folder / name, reward=even)
        found = figures(folder / name)
        busy = f"trainer busy {100 * found['trainer']:.0f} %"
        print(f"{name}: {found['update']:.2f} s an update, {busy}", flush=True)
        return found

    work = measured("no-delay", 0.0, 0)["work"]
    pause = work * CONCURRENCY / (EVERY * PROMPTS * SAMPLES)
    print(
        f"the trainer works {work:.1f} s a window: {pause:.2f} s an answer, {CONCURRENCY} at once"
    )
    ratios = []
    for number in range(rounds):
        turns, ahead = (
            measured(f"ahead-{ahead}-{number}", pause, ahead)["update"] for ahead in (0, 1)
        )
        ratios.append(ahead / turns)
        print(f"round {number}: an update takes {ratios[-1]:.2f} of its time", flush=True)
    print(f"ratios {', '.join(f'{ratio:.2f}' for ratio in ratios)}; mean {np.mean(ratios):.2f}")


def demo(seed: int) -> ConfigDict:
    """The demo up to its cold policy."""
    config = resolve(f"demo:seed={seed}")
    config.logging.tensorboard = False
    config.model.update(num_attention_heads=2, num_key_value_heads=1)  # vLLM's least
    config.unlock()
    config.stages = ConfigDict({"sft": config.stages.sft})
    return config.lock()


def trained(seed: int, cold: Path, url: str, ahead: int, updates: int, every: int) -> ConfigDict:
    """GRPO from the cold policy, and its evaluation on 256 problems."""
    config = demo(seed)
    config.data.test.limit = 256
    config.engine.update(kind="server", url=url, sync="folder", ahead=ahead)
    drawn = settings.sampling(RESPONSE)
    config.unlock()
    config.stages = ConfigDict()
    config.stages.train = settings.online(
        policy=f"run:{cold}#sft", steps=updates, sync_every=every, clip={"importance_cap": 2.0},
        sampling=drawn, optimizer=settings.optimizer(1e-4),
    )  # fmt: skip
    config.stages.evaluate = settings.evaluate(
        policies=("train",), num_generations=8, pass_at=(1,), greedy=False, sampling=drawn
    )
    return config.lock()


def by_problem(workdir: Path) -> Mapping[str, float]:
    """The share of right responses to each test problem."""
    found: dict[str, list[float]] = {}
    for row in read_rollouts(workdir / "02-evaluate/rollouts/train.parquet"):
        found.setdefault(row.rollout.problem_id, []).append(row.score.reward or 0.0)
    return {problem: float(np.mean(values)) for problem, values in found.items()}


def accuracy(folder: Path, seeds: list[int], server: str, updates: int, every: int) -> None:
    """Print what both end with, by seed."""
    for seed in seeds:
        cold = (folder / f"cold-{seed}").resolve()
        pipeline.run(demo(seed), cold)
        rates = []
        for ahead in (0, 1):
            workdir = folder / f"grpo-{seed}-{ahead}"
            with server_process("policy") as url:
                pipeline.run(trained(seed, cold, server or url, ahead, updates, every), workdir)
            rates.append(by_problem(workdir))
        assert rates[0].keys() == rates[1].keys()
        turns, ahead_too = (np.array([rate[key] for key in sorted(rate)]) for rate in rates)
        change = ahead_too - turns
        error = change.std(ddof=1) / np.sqrt(len(change))
        print(
            f"seed {seed}: {100 * turns.mean():.1f} % with ahead=0, {100 * ahead_too.mean():.1f} % "
            f"with ahead=1; {100 * change.mean():+.1f} ± {100 * error:.1f} over {len(change)} "
            f"problems, {abs(change.mean()) / max(error, 1e-9):.1f} standard errors",
            flush=True,
        )
        ages = [
            r["metrics"]["staleness"]
            for r in read_metrics(folder / f"grpo-{seed}-1")
            if "staleness" in r["metrics"]
        ]
        print(f"  staleness: mean {np.mean(ages):.1f}, at most {max(ages):.0f} updates")


def main() -> None:
    """Do one of the two, or serve."""
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2], float(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("times", "accuracy"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--update", type=float, default=3.0, help="seconds that it waits")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--server", default="", help="url of a server that is started already")
    given = parser.parse_args()
    if given.what == "times":
        make_updates_wait(given.update)
        times(given.folder, given.rounds)
    else:
        accuracy(given.folder, given.seeds, given.server, given.updates, given.every)


if __name__ == "__main__":
    main()
