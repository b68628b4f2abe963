"""Attention kernels of the platforms: splash attention on TPU, cuDNN on GPU, XLA anywhere; and the
choice among them.

Layouts. "sequence": a row is one sequence with padding on one side (prompts before decoding).
"packed": a row holds groups whose members share one copy of the prompt (data/packing.py). In both,
`attention.visible` defines what a token sees. Layers with a sliding window shorter than the row are
treated as "packed".

- xla: `attention.packed_attention`, by pairs of blocks; blocks without anything visible are
  skipped.
- splash: "sequence" by causality and segment ids; "packed" by a mask for each row, built on the
  device; blocks without anything visible are skipped.
- cudnn: "sequence" by causality, with rows rolled to begin in column 0; "packed" by causality and a
  mask for each row, T * T bfloat16 numbers that every head shares. An H200 has run both, the latter
  faster than XLA's; no whole training has used it.

A mask for shared prompts on TPU: Splash compares segment ids, but a response sees two of them, its
own and the prompt's. There are three ways. Rows without sharing repeat the prompt for every
response: 8 responses of 512 tokens to a prompt of 256 are 6,144 tokens instead of 4,352, in all
products and not in attention alone. Two passes, own tokens and prompt, merged by their log-sum-exp,
compute every block twice, and their gradient needs private parts of the kernel. A mask uses the
public interface and the kernel's own gradient. It costs memory, T * T bytes a row for each of the
forward and the two backward kernels, and 4 T * T for the current row. Compiled for v5e, with 16,384
tokens a device in rows of 4,096 and 28 heads of 128, one layer's attention and gradient peak at 898
MiB; with segment ids alone at 745 MiB, by XLA at 1,846 MiB. It also saves work: most pairs of
blocks in a row of several groups do not see each other, and a causal mask would not skip them.

Shapes: B rows, T columns, H query heads, K key/value heads, R = H/K, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from g2d_jax.config import AttentionSetting, DecodeKernel, Remat, RematSetting
from g2d_jax.models.attention import CPU_BLOCK, SAVED, Segments, Windowed, packed_attention, visible
from g2d_jax.runtime import mesh as meshes

Kernel = Literal["xla", "splash", "cudnn"]
Layout = Literal["sequence", "packed"]
Attention = Callable[[Array, Array, Array, Segments], Array]
"""(q [B, T, H, D], k and v [B, T, K, D], segment_ids int32 [B, T]) -> [B, T, H, D]."""

LANES = 128
"""Rows for splash attention are a multiple of this."""

PIECE_BYTES = 2**21
"""Most bytes of 128 columns of a device's keys for the TPU's decode kernel."""

XLA_BLOCK = 512
"""Columns of a block of XLA's attention on a platform without a kernel of its own: enough to keep a
matrix unit busy."""

_OF_PLATFORM: dict[str, Kernel] = {"tpu": "splash", "gpu": "cudnn", "cuda": "cudnn", "cpu": "xla"}


def choose(
    setting: AttentionSetting,
    *,
    platform: str,
    dtype: jnp.dtype,
    head_dim: int,
    length: int,
    layout: Layout,
    capability: str = "",
) -> Kernel:
    """Choose the kernel for rows of `length` columns.

    setting: compute.attention. platform: of the mesh's devices, as JAX names it. dtype: of
    activations. capability: see `capability_of`. "auto" uses the platform's kernel if it can serve,
    else XLA. Raises ValueError with the remedy if a requested kernel cannot serve.
    """
    kernel = _OF_PLATFORM.get(platform, "xla") if setting == "auto" else setting
    obstacle = _obstacle(kernel, platform, jnp.dtype(dtype), head_dim, length, layout, capability)
    if obstacle and setting != "auto":
        raise ValueError(
            f"compute.attention is {setting!r}, but {obstacle} set compute.attention to auto"
        )
    return "xla" if obstacle else kernel


def _obstacle(
    kernel: Kernel,
    platform: str,
    dtype: jnp.dtype,
    head_dim: int,
    length: int,
    layout: Layout,
    capability: str,
) -> str:
    """Explain why the kernel cannot serve, with any remedy other than "auto"; "" if it can."""
    if kernel == "xla":
        return ""
    if _OF_PLATFORM.get(platform) != kernel:
        machine = "a TPU" if kernel == "splash" else "an NVIDIA GPU"
        return f"that kernel needs {machine} and these devices are {platform!r}: run there, or"
    if kernel == "splash":
        if head_dim % 8:
            return f"it needs a head_dim that is a multiple of 8, and this model's is {head_dim}:"
        if length % LANES:
            return f"it needs rows of a multiple of {LANES} tokens, not {length}:"
        return ""
    if obstacle := _too_old(capability):
        return obstacle
    if layout == "packed" and length % 2:
        return f"its gradient needs rows of an even number of tokens, not {length}:"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"it computes in bfloat16, not in {dtype.name}: set dtype to bfloat16, or"
    if head_dim % 8 or head_dim > 128:
        return (
            "it needs a head_dim that is a multiple of 8 and at most 128, and this model's is "
            f"{head_dim}:"
        )
    return ""


def piece_columns(width: int) -> int:
    """Return the columns that the TPU's decode kernel copies at once from a ring of `width`: a
    tile's, or all of a narrow ring."""
    return LANES if width % LANES == 0 else width


def choose_decode(
    *, device: jax.Device, dtype: jnp.dtype, head_dim: int, kv_heads: int
) -> DecodeKernel:
    """Choose the kernel of decode steps: the platform's if it can serve, else XLA's.

    device: any of the mesh. dtype: of activations and cache. kv_heads: of a device.
    """
    capability = _capability(device)
    if device.platform != "tpu" and (not capability or _too_old(capability)):
        return "xla"
    if head_dim % 8 or (capability and head_dim > 256):
        return "xla"
    piece = kv_heads * head_dim * LANES * jnp.dtype(dtype).itemsize
    return "xla" if not capability and piece > PIECE_BYTES else "pallas"


def capability_of(mesh: Mesh) -> str:
    """Return the compute capability of the mesh's NVIDIA GPUs, as "9.0", "" for other devices."""
    return _capability(mesh.devices.flat[0])


def _too_old(capability: str) -> str:
    """Explain, as `_obstacle` does, why a GPU is too old for the kernels; "" if it is not."""
    if capability and int(capability.split(".")[0]) < 8:
        return f"it needs compute capability 8.0, and this GPU's is {capability}:"
    return ""


def _capability(device: jax.Device) -> str:
    if device.platform not in ("gpu", "cuda"):
        return ""
    capability = str(getattr(device, "compute_capability", ""))  # of AMD's GPUs a name, gfx942
    return capability if capability[:1].isdigit() else ""


def remat_for(setting: RematSetting, mesh: Mesh) -> Remat:
    """Choose the remat policy. "auto": a CPU, whose micro-batches are small, keeps the outputs of
    linear layers; other devices keep attention's output alone."""
    if setting != "auto":
        return setting
    return "dots" if platform_of(mesh) == "cpu" else "attention"


def platform_of(mesh: Mesh) -> str:
    """Return the platform of the mesh's devices, present or of a topology for compiling."""
    return str(mesh.devices.flat[0].platform)


def attention_for(setting: AttentionSetting, mesh: Mesh, of_rows: Layout) -> Attention:
    """Return the attention of `decoder.forward`; the shapes at tracing determine the kernel."""
    platform, capability = platform_of(mesh), capability_of(mesh)

    def attention(q: Array, k: Array, v: Array, segment_ids: Segments) -> Array:
        length, dim = q.shape[1], q.shape[3]
        layout = "packed" if isinstance(segment_ids, Windowed) else of_rows
        kernel = choose(
            setting,
            platform=platform,
            dtype=q.dtype,
            head_dim=dim,
            length=length,
            layout=layout,
            capability=capability,
        )
        block = CPU_BLOCK if platform == "cpu" else XLA_BLOCK
        run: Attention = partial(packed_attention, block=block)
        if kernel == "splash":
            block = block_size(str(mesh.devices.flat[0].device_kind), length, layout)
            run = partial(splash_attention, layout=layout, block=block)
        if kernel == "cudnn":
            run = partial(cudnn_attention, layout=layout)
        return per_device(run, mesh, q, k, v, segment_ids)

    return attention


def block_size(device_kind: str, length: int, layout: Layout) -> int:
    """Return a block's columns, a divisor of `length`: at most 512 on v5e and for masks (1 MiB a
    block), else 1024."""
    small = layout == "packed" or "v5 lite" in device_kind.lower() or "v5e" in device_kind.lower()
    sizes = (512, 256, LANES) if small else (1024, 512, 256, LANES)
    return next(size for size in sizes if length % size == 0)


def splash_attention(
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Segments,
    *,
    layout: Layout,
    block: int,
    interpret: bool = False,
) -> Array:
    """Attend by jax.experimental.pallas.ops.tpu.splash_attention, on one device.

    block: columns of a block. interpret: run the kernel's program step by step on any platform, for
    tests. Its output and log-sum-exp have the name SAVED, so that remat "attention" does not run
    the forward kernel again.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    batch, length, heads, dim = q.shape
    repeats = heads // k.shape[2]
    names = (
        "block_q",
        "block_kv",
        "block_kv_compute",
        "block_q_dkv",
        "block_kv_dkv",
        "block_kv_dkv_compute",
    )
    sizes: dict[str, Any] = dict.fromkeys((*names, "block_q_dq", "block_kv_dq"), block)
    make: Callable[..., Any] = partial(
        splash.make_splash_mqa_single_device,
        block_sizes=splash.BlockSizes(**sizes),
        residual_checkpoint_name=SAVED,
        interpret=interpret,
    )

    def row(q: Array, k: Array, v: Array, ids: Any) -> Array:
        """Attend in one row: q [K, R, T, D], k and v [K, T, D], ids [T]."""
        if layout == "sequence":
            kernel = make(masks.MultiHeadMask([masks.CausalMask((length, length))] * repeats))
            return jax.vmap(kernel, in_axes=(0, 0, 0, None))(q, k, v, splash.SegmentIds(ids, ids))
        ids = jax.tree.map(lambda x: x[None], ids)
        kernel = make(visible(ids, ids))
        # Created while tracing, this flag would be an array, on which the kernel could not branch.
        infos = (kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info)
        dynamic_infos = (info._replace(is_dynamic_mask=True) for info in infos)
        masked: Any = splash.SplashAttentionKernel(*dynamic_infos, **kernel.kwargs)
        return jax.vmap(masked)(q, k, v)

    # The kernel has no scale of its own.
    scaled = (q.astype(jnp.float32) * dim**-0.5).astype(q.dtype)
    q = scaled.transpose(0, 2, 1, 3).reshape(batch, -1, repeats, length, dim)
    mixed = jax.vmap(row)(q, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), segment_ids)
    return mixed.reshape(batch, heads, length, dim).transpose(0, 2, 1, 3)


def cudnn_attention(
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Segments,
    *,
    layout: Layout,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Array:
    """Attend by jax.nn.dot_product_attention in bfloat16, on one device.

    Rows of one sequence are rolled to the left until they begin in column 0. All padding is then
    after the sequence, where causality hides it, so that no lengths are needed. The rows of padding
    itself differ from `visible`, but nothing reads them. implementation: "xla" computes the same
    without a GPU, for tests.
    """
    attend = partial(jax.nn.dot_product_attention, is_causal=True, implementation=implementation)
    if layout == "packed":
        mask = visible(segment_ids, segment_ids)[:, None]
        return checkpoint_name(attend(q, k, v, mask=mask), SAVED)
    assert isinstance(segment_ids, Array)
    first = jnp.argmax(segment_ids != 0, axis=1)  # [B]
    roll = jax.vmap(lambda x, by: jnp.roll(x, by, axis=0))
    q, k, v = (roll(x, -first) for x in (q, k, v))
    return checkpoint_name(roll(attend(q, k, v), first), SAVED)


def per_device(
    kernel: Attention, mesh: Mesh, q: Array, k: Array, v: Array, segment_ids: Segments
) -> Array:
    """Run the kernel on each device's rows and heads: XLA cannot split a kernel by itself, nor a
    loop of data-dependent length.

    If the tensor axis divides the query heads but not the key heads, these are repeated first:
    otherwise a device's query heads would need a part of them that no sharding describes.
    """
    q_spec = meshes.spec(mesh, ("rows", None, "heads", None), q.shape)
    if q_spec[2] and k.shape[2] % mesh.shape["tensor"]:
        k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    kv_spec = meshes.spec(mesh, ("rows", None, "kv_heads", None), k.shape)
    ids_spec = meshes.spec(mesh, ("rows", None), q.shape[:2])
    specs = q_spec, kv_spec, kv_spec, ids_spec
    run = jax.shard_map(kernel, mesh=mesh, in_specs=specs, out_specs=q_spec, check_vma=False)
    return run(q, k, v, segment_ids)
