"""Load two models on several meshes of all processes, export them again, and print what share of a file was read; and
whether codes made while loading are those of what was loaded.

loads.py FOLDER OUTPUT
"""

import json
import sys
from pathlib import Path

from g2d_jax.runtime import processes

processes.initialise()

import jax  # noqa: E402

from g2d_jax import mesh as meshes  # noqa: E402
from g2d_jax.models import hf, lora  # noqa: E402
from g2d_jax.models.config import Lora  # noqa: E402


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


hf._BLOCK = 1 << 20  # so that the even one's embedding comes to the leader in several blocks
folder, output = map(Path, sys.argv[1:])
meshes_of = {
    "even": {"ft": {"fsdp": 2, "tensor": 2}, "d": {"data": -1, "fsdp": 1}},
    "odd": {"f": {}},
}
shares, same = {}, []
for model, sizes_of in meshes_of.items():
    size = (folder / model / "model.safetensors").stat().st_size
    for name, sizes in sizes_of.items():
        mesh = meshes.make_mesh(**sizes)
        hf.load(folder / model, mesh=mesh)  # programs are compiled, or read from a cache
        before = bytes_read()
        loaded = jax.block_until_ready(hf.load(folder / model, mesh=mesh))
        shares[f"{model}-{name}"] = (bytes_read() - before) / size
        hf.save(loaded, output / f"{model}-{name}")
        codes = hf.load(folder / model, mesh=mesh, lora=Lora(2, 4.0), quantised="int8")
        equal = jax.jit(lambda *two: jax.tree.map(lambda a, b: (a == b).all(), *two))
        same.append(bool(jax.tree.all(equal(codes, lora.frozen(loaded, codes.config)))))
processes.gather("saved")  # the leader writes
print(json.dumps({"shares": shares, "codes": same}))
