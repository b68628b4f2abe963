"""Several processes that load one model: each reads its share of the file, and together they have all of it."""

import json
import subprocess
import sys

import jax
import pytest
from launched import HERE, by_jax, free_port

from g2d_jax.models import decoder, hf
from g2d_jax.models.config import ModelConfig


@pytest.mark.slow
def test_each_process_reads_its_share(one_device, tmp_path):
    """The odd one's 131 rows cannot be shared out among 4 devices: there each process reads what its devices hold."""
    wholes = {}
    for name, vocab in (("even", 8192), ("odd", 131)):
        config = ModelConfig("qwen2", vocab, 128, 3, 4, 2, 32, 512, tie_word_embeddings=True, qkv_bias=True)
        folder = hf.save(decoder.init(config, jax.random.key(0)), tmp_path / name)
        wholes[name] = (folder / "model.safetensors").read_bytes()
    flags = f"{one_device['XLA_FLAGS']} --xla_force_host_platform_device_count=2"
    command, port = [sys.executable, HERE / "loads.py", tmp_path, tmp_path / "out"], free_port()
    environments = [one_device | {"XLA_FLAGS": flags} | by_jax(2, port, index) for index in range(2)]
    # Interpreters of their own: what is read is counted by the system, for each process as a whole.
    both = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for env in environments]
    printed = [json.loads(process.communicate()[0].splitlines()[-1]) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert all(one["codes"] == [True] * 3 for one in printed)
    told = [one["shares"] for one in printed]
    assert told[0].keys() == {"even-ft", "even-d", "odd-f"}
    for name, share in (item for one in told for item in one.items()):
        model = name.partition("-")[0]
        assert (tmp_path / "out" / name / "model.safetensors").read_bytes() == wholes[model], name
        assert 0.5 < share < (0.52 if model == "even" else 0.55), told
