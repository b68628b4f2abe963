"""Several processes that load one model: each reads its share of the file, and together they have
all of it."""

import json

import jax
import pytest

from g2d_jax.models import decoder, hf
from g2d_jax.models.config import ModelConfig


@pytest.mark.slow
def test_each_process_reads_its_share(launch, tmp_path):
    """The odd one's 131 rows cannot be shared out among 4 devices: there each process reads what
    its devices hold."""
    wholes = {}
    for name, vocab in (("even", 8192), ("odd", 131)):
        config = ModelConfig("qwen2", vocab, 128, 3, 4, 2, 32, 512, tie_word_embeddings=True)
        folder = hf.save(decoder.init(config, jax.random.key(0)), tmp_path / name)
        wholes[name] = (folder / "model.safetensors").read_bytes()
    launched = launch(2, 2, "loads", tmp_path, tmp_path / "out")
    assert launched.statuses() == [0, 0], launched.told()
    printed = [json.loads(process.stdout.splitlines()[-1]) for process in launched.running]
    assert all(one["codes"] == [True] * 3 for one in printed)
    told = [one["shares"] for one in printed]
    assert told[0].keys() == {"even-ft", "even-d", "odd-f"}
    for name, share in (item for one in told for item in one.items()):
        model = name.partition("-")[0]
        assert (tmp_path / "out" / name / "model.safetensors").read_bytes() == wholes[model], name
        # C's files read blocks of 4 KiB at both ends of a part, and these are small
        assert 0.5 < share < 0.65, told
