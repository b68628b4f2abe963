"""The choice of attention's kernel; splash attention interpreted on the CPU and compiled for a TPU;
cuDNN's program."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain import attend
from unofficial import pretend_cudnn

from g2d_jax.models import kernels
from g2d_jax.models.attention import Segments, Windowed, visible
from g2d_jax.models.kernels import choose, choose_decode
from g2d_jax.records import SEGMENT_STRIDE
from g2d_jax.runtime import mesh as meshes

ONE = meshes.make_mesh(1, 1, 1, devices=jax.devices()[:1])
FIELDS = ("platform", "dtype", "head_dim", "length", "layout")


def test_jax_has_triton_in_pallas() -> None:
    """JAX 0.11 has declared it deprecated."""
    try:
        from jax.experimental.pallas import triton
    except ImportError:
        triton = None
    missing = [name for name in ("CompilerParams", "load", "store") if not hasattr(triton, name)]
    assert not missing, (
        f"jax {jax.__version__} has no {missing} of Pallas's Triton, which "
        "models/decode_kernel_gpu.py is written in: write it anew or delete it, and until then "
        "allow older versions of jax alone in pyproject.toml"
    )


@pytest.mark.parametrize(
    ("case", "kernel"),
    [
        (("cpu", "float32", 24, 512, "packed"), "xla"),
        (("cpu", "bfloat16", 128, 512, "sequence"), "xla"),
        (("tpu", "bfloat16", 128, 4096, "packed"), "splash"),
        (("tpu", "float32", 64, 128, "sequence"), "splash"),
        (("tpu", "bfloat16", 128, 4000, "packed"), "xla"),
        (("tpu", "bfloat16", 20, 4096, "packed"), "xla"),
        (("gpu", "bfloat16", 128, 200, "sequence"), "cudnn"),
        (("cuda", "bfloat16", 64, 16, "sequence"), "cudnn"),
        (("gpu", "bfloat16", 128, 4096, "packed"), "cudnn"),
        (("gpu", "bfloat16", 128, 4097, "packed"), "xla"),
        (("gpu", "float32", 128, 4096, "sequence"), "xla"),
        (("gpu", "bfloat16", 256, 4096, "sequence"), "xla"),
        (("rocm", "bfloat16", 128, 4096, "sequence"), "xla"),
    ],
)
def test_auto(case: tuple[Any, ...], kernel: str) -> None:
    facts = dict(zip(FIELDS, case, strict=True))
    assert choose("auto", **facts) == kernel
    assert choose("xla", **facts) == "xla"
    if kernel != "xla":
        assert choose(kernel, **facts) == kernel


@pytest.mark.parametrize(
    ("setting", "case", "message"),
    [
        (
            "splash",
            ("cpu", "float32", 128, 512, "packed"),
            "needs a TPU .* 'cpu': run there, or set .* to auto",
        ),
        ("splash", ("gpu", "bfloat16", 128, 512, "packed"), "needs a TPU"),
        (
            "splash",
            ("tpu", "bfloat16", 128, 500, "packed"),
            "multiple of 128 tokens, not 500: set",
        ),
        (
            "splash",
            ("tpu", "bfloat16", 20, 512, "packed"),
            "head_dim that is a multiple of 8, .* is 20",
        ),
        ("cudnn", ("cpu", "bfloat16", 128, 512, "sequence"), "needs an NVIDIA GPU"),
        (
            "cudnn",
            ("gpu", "bfloat16", 128, 511, "packed"),
            "an even number of tokens, not 511: set",
        ),
        (
            "cudnn",
            ("gpu", "float32", 128, 512, "sequence"),
            "not in float32: set dtype to bfloat16, or",
        ),
        (
            "cudnn",
            ("gpu", "bfloat16", 160, 512, "sequence"),
            "at most 128, and this model's is 160",
        ),
    ],
)
def test_a_kernel_that_cannot_serve_is_refused(
    setting: Any, case: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        choose(setting, **dict(zip(FIELDS, case, strict=True)))


def test_a_forced_kernel_is_refused_while_tracing() -> None:
    run = kernels.attention_for("splash", ONE, "packed")
    q = jax.ShapeDtypeStruct((1, 128, 2, 8), jnp.float32)
    with pytest.raises(ValueError, match="needs a TPU"):
        jax.eval_shape(run, q, q, q, jax.ShapeDtypeStruct((1, 128), jnp.int32))


def spans(length: int, *parts: tuple[int, int]) -> list[int]:
    """Segment ids: (id, tokens) one after the other, then padding."""
    ids = [number for number, tokens in parts for _ in range(tokens)]
    return ids + [0] * (length - len(ids))


M = SEGMENT_STRIDE
PACKED = [
    # over three blocks
    spans(384, (M, 100), (M + 1, 60), (M + 2, 130), (M + 3, 1), (2 * M, 20), (2 * M + 1, 40)),
    spans(384, (M, 1), (M + 1, 128), (2 * M, 127), (2 * M + 1, 128)),  # ends where a block ends
]
SPREAD = [spans(128, (M, 40), (M + 1, 30), (M + 2, 30)), spans(128, (M, 5), (M + 1, 123))]
BY_POSITION = [[*range(70), *range(40, 70), *[0] * 28], [*range(128)]]  # of SPREAD


def windowed(ids: jax.Array, positions: list[list[int]], window: int) -> Windowed:
    return Windowed(ids, jnp.asarray(positions), jnp.asarray(positions) - window + 1)


def inputs(
    rows: int, length: int, heads: int, kv_heads: int, dim: int = 8
) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(rows, length, n, dim) for n in (heads, kv_heads, kv_heads, heads)]
    return tuple(jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))


def both(
    run: Callable[..., jax.Array], q: jax.Array, k: jax.Array, v: jax.Array, w: jax.Array
) -> Any:
    """The output, and the gradient of its product with w, of q, k and v."""

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = run(q, k, v)
        return jnp.sum(w * out), out

    grads, out = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    return out, *grads


@pytest.mark.parametrize(
    ("layout", "segments", "kv_heads", "sizes"),
    [
        ("packed", PACKED, 1, (1, 1, 1)),
        # the tensor axis divides the query heads: the key head is repeated for it
        (
            "packed",
            SPREAD,
            1,
            (1, 2, 2),
        ),
    ],
)
def test_splash_is_xla_in_value_and_gradient(
    layout: Any, segments: list[list[int]], kv_heads: int, sizes: tuple[int, int, int]
) -> None:
    ids: Segments = jnp.asarray(segments, jnp.int32)
    if segments is SPREAD:
        ids = windowed(ids, BY_POSITION, 20)
    mesh = meshes.make_mesh(*sizes, devices=jax.devices()[: math.prod(sizes)])
    q, k, v, w = inputs(2, len(segments[0]), 2 * sizes[2], kv_heads)
    splash = partial(kernels.splash_attention, layout=layout, block=128, interpret=True)
    ours = both(lambda *x: kernels.per_device(splash, mesh, *x, ids), q, k, v, w)
    theirs = both(lambda *x: attend(*x, visible(ids, ids)), q, k, v, w)
    for one, other in zip(ours, theirs, strict=True):  # padding's rows too
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_rolled_causal_rows_are_xla_where_there_are_tokens() -> None:
    ids = jnp.asarray(
        [spans(24, (0, 9), (M, 15)), spans(24, (M, 20)), spans(24, (M, 24))], jnp.int32
    )
    q, k, v, w = inputs(3, 24, 4, 2)
    tokens = (ids != 0)[:, :, None, None]
    w = jnp.where(tokens, w, 0)
    ours = both(
        lambda *x: kernels.cudnn_attention(*x, ids, layout="sequence", implementation="xla"),
        q,
        k,
        v,
        w,
    )
    theirs = both(lambda *x: attend(*x, visible(ids, ids)), q, k, v, w)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(
            jnp.where(tokens, one, 0), jnp.where(tokens, other, 0), atol=1e-5
        )
        assert np.isfinite(one).all()


def test_a_mask_for_each_row_is_xla_in_value_and_gradient() -> None:
    ids = jnp.asarray(
        [spans(24, (M, 5), (M + 1, 6), (M + 2, 4), (2 * M, 3), (2 * M + 1, 4)), spans(24, (M, 24))]
    )
    ids = windowed(ids, [[*range(11), *range(5, 9), *range(7), 0, 0], [*range(24)]], 4)
    q, k, v, w = inputs(2, 24, 4, 2)
    ours = both(
        lambda *x: kernels.cudnn_attention(*x, ids, layout="packed", implementation="xla"),
        q,
        k,
        v,
        w,
    )
    theirs = both(lambda *x: attend(*x, visible(ids, ids)), q, k, v, w)
    for one, other in zip(ours, theirs, strict=True):  # padding's rows too
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize(
    ("capability", "kernel"), [("7.5", "xla"), ("8.0", "cudnn"), ("10.0", "cudnn")]
)
@pytest.mark.parametrize("layout", ["packed", "sequence"])
def test_cudnn_is_of_gpus_that_have_it(layout: str, capability: str, kernel: str) -> None:
    facts = dict(zip(FIELDS, ("gpu", "bfloat16", 128, 512, layout), strict=True))
    assert choose("auto", **facts, capability=capability) == kernel
    if kernel == "xla":
        with pytest.raises(ValueError, match=r"compute capability 8\.0, and this GPU's is 7\.5"):
            choose("cudnn", **facts, capability=capability)


@pytest.mark.parametrize(
    ("layout", "call"), [("sequence", "Softmax"), ("packed", "ScaleBiasSoftmax")]
)
def test_cudnn_is_in_the_program_for_cuda(
    monkeypatch: pytest.MonkeyPatch, layout: Any, call: str
) -> None:
    pretend_cudnn(monkeypatch)
    q, k = (jax.ShapeDtypeStruct((2, 32, heads, 64), jnp.bfloat16) for heads in (4, 2))
    ids = jax.ShapeDtypeStruct((2, 32), jnp.int32)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        return jnp.sum(kernels.cudnn_attention(q, k, v, ids, layout=layout).astype(jnp.float32))

    def program(run: Callable[..., Any]) -> str:
        return jax.jit(run).trace(q, k, k, ids).lower(lowering_platforms=("cuda",)).as_text()

    assert f"__cudnn$fmha{call}" in program(loss)
    backward = program(jax.grad(loss, (0, 1, 2)))
    assert (
        f"__cudnn$fmha{call}(" in backward.replace('"', "(")
        and f"__cudnn$fmha{call}Backward" in backward
    )


FOR_TPU = """
import jax, jax.numpy as jnp
from jax.experimental import topologies
from g2d_jax.runtime import mesh as meshes
from g2d_jax.models import decoder
from g2d_jax.models.config import ModelConfig
from g2d_jax.models.kernels import attention_for

devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
mesh = meshes.make_mesh(fsdp=2, tensor=2, devices=devices)
shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 128}
shape |= {"vocab_size": 256, "num_hidden_layers": 2, "intermediate_size": 128}
place = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
ids = jax.ShapeDtypeStruct((2, 256), jnp.int32, sharding=meshes.sharding(mesh, ("rows", None), (2, 256)))

def total(model, ids, layout):
    run = attention_for("auto", mesh, layout)
    hidden, _ = decoder.forward(model, ids, ids, ids, dtype=jnp.bfloat16, remat="attention", attention=run)
    return jnp.sum(hidden.astype(jnp.float32))

sliding = {"sliding_window": 64, "layer_types": ("sliding_attention", "full_attention")}
for layout, run, more in ("packed", jax.grad(total), {}), ("sequence", total, {}), ("sequence", total, sliding):
    config = ModelConfig("qwen2", **shape, **more)
    model = jax.tree.map(place, decoder.abstract(config), decoder.shardings(config, mesh))
    compiled = jax.jit(run, static_argnames="layout").lower(model, ids, layout=layout).compile()
    print(layout, compiled.as_text().count('custom_call_target="tpu_custom_call"'))
"""


def test_splash_compiles_for_a_tpu() -> None:
    """The decoder and its gradient. In a process of its own: libtpu reads the environment when it
    is loaded."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed (extra tpu)")
    settings = {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-16",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", FOR_TPU],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    # Forward, and backward for q and for k and v: remat "attention" does not run the forward kernel
    # again.
    assert done.stdout.split() == ["packed", "3", "sequence", "1", "sequence", "1"]


def device(platform: str, kind: str, capability: str = "") -> Any:
    return SimpleNamespace(platform=platform, device_kind=kind, compute_capability=capability)


TPU, H100 = device("tpu", "TPU v5 lite"), device("gpu", "NVIDIA H100", "9.0")
MODEL = {"dtype": jnp.bfloat16, "head_dim": 128, "kv_heads": 4}


@pytest.mark.parametrize(
    ("on", "model", "reason"),
    [
        (TPU, {}, ""),
        (TPU, {"dtype": jnp.float32, "head_dim": 80}, ""),
        (TPU, {"head_dim": 20}, "a head_dim that is a multiple of 8, and this model's is 20"),
        (TPU, {"kv_heads": 128}, "128 key heads of 128 on a device: raise compute.sampling_tens"),
        (H100, {"kv_heads": 128}, ""),
        (device("gpu", "NVIDIA A100-SXM4-80GB", "8.0"), {"head_dim": 80}, ""),
        (H100, {"head_dim": 512}, "a multiple of 8 and at most 256, and this model's is 512"),
        (device("gpu", "Tesla T4", "7.5"), {}, "compute capability 8.0, and this GPU's is 7.5"),
        (device("gpu", "AMD MI300X", "gfx942"), {}, "these devices are 'AMD MI300X': run there"),
        (jax.devices()[0], {}, "a TPU or an NVIDIA GPU and these devices are 'cpu': run there"),
    ],
)
def test_decode_steps_have_a_kernel_where_it_can_serve(on: Any, model: Any, reason: str) -> None:
    assert choose_decode(device=on, **MODEL | model) == ("xla" if reason else "pallas")
