"""The training section: warnings, tables and curves of what stages logged, whatever their names are."""

import math
from pathlib import Path

import pytest

from g2d_jax.report import write_all
from g2d_jax.storage import finish, write_json
from g2d_jax.tracking import Tracker


def made(workdir: Path, warning: str = "train, step 9: it has collapsed") -> Path:
    """An online stage with synchronisations and probes, an offline one with probes, and one without either."""
    online = {"kind": "online", "loss": "dpo", "sync_every": 10, "num_generations": 8}
    stages = {"plain": {"kind": "online"}, "train": online, "dpo": {"kind": "offline"}}
    write_json(workdir / "config.json", {"config": {"name": "made", "seed": 0, "stages": stages}})
    for number, (name, stage) in enumerate(stages.items(), 1):
        (workdir / f"{number:02d}-{name}").mkdir()
        manifest = {"name": name, "kind": stage["kind"], "seconds": 1.0}
        if name == "train":
            cost = {"seconds": 12.0, "tokens": {"generated": 12_345}}
            manifest["dynamics"] = {"probes": [], "probe_cost": cost}
            manifest["warnings"] = [{"cause": "entropy", "step": 9, "text": warning}]
            manifest["counts"] = {"steps": 20, "rollouts": 5120, "prompts": 640, "pairs": 300, "skipped": 340}
            manifest["generation"] = {"calls": 4, "prompts_per_call": 160.0, "tokens_per_second": 4321.4, "share": 0.5}
        if name != "dpo":  # which is still under way
            finish(workdir / f"{number:02d}-{name}", manifest)
    with Tracker(workdir, tensorboard=False) as tracker:
        for step in range(1, 21):
            metrics = {"entropy": 0.4 - 0.01 * step, "reward": 0.3, "completions/mean_length": 20.0, "kl": 0.001 * step}
            tracker.log("plain", step, metrics)
            apart = {"completions/mean_length_correct": 22.0, "completions/mean_length_incorrect": 18.0}
            sides = {"pairs/chosen_length": 21.0, "logps/chosen": -3.0, "logps/rejected": math.nan}
            drawn = {"generation/prompts": 320.0, "generation/tokens_per_second": 5000.0 + step}
            drawn["generation/share"] = 0.25 if step == 1 else 0.75
            tracker.log("train", step, metrics | apart | sides | (drawn if step % 10 == 1 else {}))
        for name in ("train", "dpo"):
            for step in (0, 10, 20):
                probe = {"entropy": 0.4 - 0.015 * step, "completions/mean_length": 20.0 + step, "accuracy": 0.5}
                tracker.log(name, step, probe | ({"kl": 0.01 * step} if name == "dpo" else {}), kind="probe")
        tracker.warn("train", 9, "entropy", warning, {"last": 0.01})
    return workdir


def test_it_has_what_was_logged(read, tmp_path):
    source, page, text = read(made(tmp_path))
    assert "#curves" in page.links
    section = source[source.index('<section id="curves">') : source.index('<section id="settings">')]
    for title in ("Token entropy, nats", "Completion length", "Reward", "KL divergence", "Length in pairs"):
        assert section.count(f"<figcaption>{title}") == 1, title
    for words in (
        "entropy, fresh",
        "train, step 9: it has collapsed",
        "Fresh samples are of the trained policy itself",
    ):
        assert words in text, words
    assert "rejected, fresh" not in section and "warning" not in section
    assert "rollouts – 5,120" in text
    assert "generation, calls – 4" in text  # of the manifest: what is logged is by interval, not by call
    assert source.index('<p class="warning">train, step 9') < source.index("<section")
    assert "20 of 40 values are not finite and not drawn." in text


@pytest.mark.parametrize("where", ["warning", "stage", "loss"])
def test_hostile_names_stay_text(read, tmp_path, hostile, where):
    folder = made(tmp_path, hostile if where == "warning" else "none")
    if where != "warning":
        name = "<img src=x onerror=alert(2)>" if where == "stage" else "train"
        stage = {"kind": "online", "loss": hostile, "sync_every": hostile, "num_generations": hostile}
        write_json(folder / "config.json", {"config": {"name": "made", "stages": {name: stage}}})
        (folder / f"04-{name}").mkdir()
        with Tracker(folder, tensorboard=False) as tracker:
            for step in (1, 2):
                tracker.log(name, step, {"generation/prompts": 4.0, "entropy": 0.5})
                tracker.log(name, step, {"entropy": 0.5}, kind="probe")
                tracker.log(hostile, step, {hostile: 0.5}, kind="probe")
    _, _, text = read(folder)  # Page refuses elements and attributes that the report does not use itself
    assert ("<img src=x onerror=alert(2)>" if where == "stage" else "</script><script>alert(1)</script>") in text
    first = Path(write_all(folder)[0]).read_bytes()
    assert Path(write_all(folder)[0]).read_bytes() == first
