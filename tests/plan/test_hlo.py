"""Collectives in HLO text: literal programs counted by hand, and one that is compiled for 8
devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from g2d_jax.plan.hlo import Collective, bytes_by_group, bytes_sent, collectives

LOOPS = """HloModule jit_step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%x, %y)
}

%inner_body (p: (s32[], bf16[64,8])) -> (s32[], bf16[64,8]) {
  %ag = bf16[64,8]{1,0:T(8,128)(2,1)} all-gather(%x), channel_id=7, replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %t = (s32[], bf16[64,8]) tuple(%i, %ag)
}

%inner_condition (p: (s32[], bf16[64,8])) -> pred[] {
  %c = s32[]{:T(128)} constant(28)
  ROOT %lt = pred[]{:T(512)} compare(%i, %c), direction=LT
}

%async_start (p: bf16[4]) -> bf16[4] {
  %g = bf16[16]{0} all-gather(%p), channel_id=9, replica_groups=[1,4]<=[4], dimensions={0}
}

%async_done (p: bf16[4]) -> bf16[4] {
  %g2 = bf16[16]{0} all-gather(%p), channel_id=9, replica_groups=[1,4]<=[4], dimensions={0}
}

%outer_body (p: (s32[], s32[])) -> (s32[], s32[]) {
  %w = (s32[], bf16[64,8]{1,0}) while(%t), condition=%inner_condition, body=%inner_body
  %f = bf16[4]{0} fusion(%p), kind=kCustom, calls=%async_start
  %f2 = bf16[4]{0} fusion(%f), kind=kCustom, calls=%async_done
  %ar = (f32[8,2]{1,0}, f32[]) all-reduce(%a, %b), channel_id=8, replica_groups=mesh['a'=2,'b'=4] {'b'}, to_apply=%add
  ROOT %r = (s32[], s32[]) tuple(%i, %n)
}

%outer_condition (p: (s32[], s32[])) -> pred[] {
  ROOT %lt2 = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (a: f32[2]) -> f32[2] {
  %w2 = (s32[], s32[]) while(%t0), condition=%outer_condition, body=%outer_body
  %s = (f32[2]{0}, f32[8]{0}) all-gather-start(%a), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}
  %d = f32[8]{0} all-gather-done(%s)
  %rs = f32[2]{0} reduce-scatter(%d), channel_id=2, replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add
  %cp = f32[2]{0} collective-permute(%rs), channel_id=3, source_target_pairs={{0,1},{1,0}}
  ROOT %alone = f32[2]{0} all-reduce(%cp), channel_id=4, replica_groups={{0},{1}}, to_apply=%add
}
"""


def test_loops_multiply_and_pieces_of_one_collective_count_once():
    assert collectives(LOOPS, dynamic=3) == [
        Collective("all-gather", 64 * 8 * 2, 4, 3 * 28),
        Collective("all-gather", 16 * 2, 4, 3),
        Collective("all-reduce", 8 * 2 * 4 + 4, 4, 3),
        Collective("all-gather", 8 * 4, 4, 1),
        Collective("reduce-scatter", 8 * 4, 4, 1),
        Collective("collective-permute", 2 * 4, 2, 1),
    ]


UNROLLED = """HloModule jit_step, is_scheduled=true

%started (p: f32[2]) -> f32[8] {
  %g = f32[8]{0} all-gather(%p), channel_id=5, replica_groups=[1,4]<=[4], dimensions={0}
  ROOT %c = (f32[2]{0}, f32[8]{0}) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}

%between (p: f32[2]) -> f32[8] {
  %g2 = f32[8]{0} all-gather(%p), channel_id=5, replica_groups=[1,4]<=[4], dimensions={0}
}

%body (p: (u32[], f32[8])) -> (u32[], f32[8]) {
  %two = u32[]{:T(128)} constant(2)
  %i = u32[]{:T(128)} get-tuple-element(%p), index=0
  %k = f32[8]{0} custom-call(%p), custom_call_target="tpu_custom_call", kernel_metadata={{
"block": "512"
}}, metadata={op_name="kernel"}
  %cp = f32[2]{0} collective-permute(%x), channel_id=6, source_target_pairs={{0,1},{1,0}}
  %f = f32[8]{0} fusion(%p), kind=kCustom, calls=%between
  %next = u32[]{:T(128)} add(%i, %two)
  ROOT %t = (u32[], f32[8]) tuple(%next, %f)
}

%condition (p: (u32[], f32[8])) -> pred[] {
  %n = u32[]{:T(128)} constant(7)
  %j = u32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%j, %n), direction=LT
}

ENTRY %main (a: f32[2]) -> f32[2] {
  %s = (f32[2]{0}, f32[8]{0}) fusion(%a), kind=kCustom, calls=%started
  ROOT %w = (u32[], f32[8]) while(%t0), condition=%condition, body=%body
}
"""


def test_unrolled_loops_count_their_strides_and_a_gather_beside_a_loop_counts_once():
    # The kernel's metadata goes on over lines that look like an end; what stands behind them counts
    # too.
    assert collectives(UNROLLED) == [
        Collective("all-gather", 32, 4, 1),
        Collective("collective-permute", 8, 2, 4),
    ]


def test_bytes_that_a_device_sends():
    sent = bytes_sent(collectives(LOOPS))
    assert sent["all-gather"] == 0.75 * (28 * 1024 + 32 + 32)
    assert sent["all-reduce"] == 2 * 0.75 * 68
    assert sent["reduce-scatter"] == 0.75 * 32
    assert sent["collective-permute"] == 8 and sent["all-to-all"] == 0
    of_four = 0.75 * (28 * 1024 + 64 + 2 * 68 + 32)
    assert bytes_by_group(collectives(LOOPS)) == {4: of_four, 2: 8}


def test_a_stated_trip_count_is_used():
    text = LOOPS.replace(
        "body=%inner_body", 'body=%inner_body, backend_config={"known_trip_count":{"n":"5"}}'
    )
    assert collectives(text)[0].times == 5


@pytest.mark.parametrize(
    "form", [("replica_groups={{0,1,2,3}}", "replica_groups=new"), ("bf16[64,8]", "f3e1[64,8]")]
)
def test_a_collective_in_an_unknown_form_is_counted_as_unknown(form):
    known, found = collectives(LOOPS), collectives(LOOPS.replace(*form))
    assert len(found) == len(known) and sum(one.sent is None for one in found) == 1
    assert 0 < sum(bytes_sent(found).values()) < sum(bytes_sent(known).values())


# One instruction each, as XLA prints its asynchronous forms for GPUs (the first is Qwen2.5-7B's,
# for 8 H100) and TPUs.
EIGHT = "channel_id=1, replica_groups=[1,8]<=[8]"
ASYNCHRONOUS = [
    (
        f"((f32[3584,19008]{{1,0}}), f32[448,19008]{{1,0}}) reduce-scatter-start(%p), {EIGHT}, "
        f"dimensions={{0}}",
        3584 * 19_008 * 4,
        7 / 8,
    ),
    (
        "((f32[16,64]{1,0}, bf16[16]{0}), (f32[2,64]{1,0}, bf16[2]{0})) reduce-scatter-start(%p, "
        "%q), "
        f"{EIGHT}, dimensions={{0}}, to_apply=%add",
        16 * 64 * 4 + 16 * 2,
        7 / 8,
    ),
    (
        f"((c64[64,8]{{1,0}}), c64[64,8]{{1,0}}) all-to-all-start(c64[64,8]{{1,0}} %p), {EIGHT}, "
        f"dimensions={{1}}",
        64 * 8 * 8,
        7 / 8,
    ),
    (
        f"((f32[4,8,128]{{2,1,0:T(8,128)}}), f32[4,8,128]{{2,1,0:T(8,128)S(1)}}, u32[]{{:S(2)}}, "
        f"u32[]{{:S(2)}}) "
        f"all-to-all-start(%p), {EIGHT}, dimensions={{1}}",
        4 * 8 * 128 * 4,
        7 / 8,
    ),
    (
        "f32[32]{0} all-reduce-start(%p), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, "
        "to_apply=%add",
        128,
        6 / 4,
    ),
    (
        f"(f32[32]{{0}}, bf16[8,2]{{1,0}}) all-reduce-start(%p, %q), {EIGHT}, to_apply=%add",
        128 + 32,
        14 / 8,
    ),
    (
        f"(bf16[4,2]{{1,0:T(8,128)(2,1)}}, bf16[32,2]{{1,0}}) all-gather-start(%p), {EIGHT}, "
        f"dimensions={{0}}",
        128,
        7 / 8,
    ),
    (
        "((s32[1024]{0}, s8[512]{0}), (s32[4096]{0}, s8[2048]{0})) all-gather-start(%p, %q), "
        "channel_id=1, "
        "replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}, use_global_device_ids=true",
        4096 * 4 + 2048,
        3 / 4,
    ),
    (
        "(bf16[8]{0}, bf16[8]{0}, u32[]{:T(128)}, u32[]{:T(128)}) collective-permute-start(%p), "
        "channel_id=1, "
        "source_target_pairs={{0,1},{1,0}}",
        16,
        1,
    ),
    (
        "((bf16[8]{0}, f32[2]{0}), (bf16[8]{0}, f32[2]{0}), u32[], u32[]) "
        "collective-permute-start(%p, %q), "
        "channel_id=1, source_target_pairs={{0,1},{1,0}}",
        24,
        1,
    ),
]


def entry(*instructions):
    """A program of these instructions."""
    lines = [f"  %i{number} = {text}" for number, text in enumerate(instructions)]
    return "\n".join(
        [
            "HloModule m, is_scheduled=true",
            "",
            "ENTRY %main (p: f32[2]) -> f32[2] {",
            *lines,
            "}",
            "",
        ]
    )


@pytest.mark.parametrize(("text", "size", "share"), ASYNCHRONOUS)
def test_an_asynchronous_collective_sends_what_a_ring_sends(text, size, share):
    (found,) = collectives(entry(text))
    assert found.size == size and found.sent == share * size


def test_an_asynchronous_tuple_in_another_form_is_unknown():
    (found,) = collectives(
        entry(f"f32[32]{{0}} reduce-scatter-start(%p), {EIGHT}, dimensions={{0}}")
    )
    assert found.sent is None


GROUPS = [  # of 16 devices, in 2 slices of 8
    ("replica_groups=[2,8]<=[16]", 8, None),
    ("replica_groups=[1,16]<=[16]", 16, 8),
    ("replica_groups=[8,2]<=[2,8]T(1,0)", 2, 1),  # a device with its like in the other slice
    ("replica_groups=[4,4]<=[2,4,2]T(1,0,2)", 4, 2),
    ("replica_groups={{0,1,2,3},{4,5,6,7},{8,9,10,11},{12,13,14,15}}", 4, None),
    ("replica_groups={{0,1,8,9},{2,3,4,10}}", 4, 1),
    ("replica_groups=mesh['a'=2,'b'=8] {'b'}", 8, None),
    ("replica_groups=mesh['a'=2,'b'=8] {'a'}", 2, 1),
    ("replica_groups=@mesh[a=2,b=8] {a}", 2, 1),
    ("replica_groups=mesh['a'=2,'b'=8] {'a','b':(4)2}", 4, 2),
    ("replica_groups=mesh['a'=16] {'a':(1)2}", 2, 1),
    ("replica_groups=mesh['a'=16] {'a':(2)8}", 8, None),
    ("replica_groups=mesh['a'=8,'b'=2], device_ids=([2,8]T(1,0)) {'b'}", 2, 1),
    ("replica_groups=mesh['a'=8,'b'=2], device_ids=([2,8]T(1,0)) {'a'}", 8, None),
    ("replica_groups=mesh['a'=2,'b'=2], device_ids=(0,8,1,9) {'a'}", 2, None),
]


@pytest.mark.parametrize(("text", "group", "within"), GROUPS)
def test_groups_over_several_slices_are_told_from_their_devices(text, group, within):
    (found,) = collectives(
        entry(f"f32[32]{{0}} all-reduce(%p), channel_id=1, {text}, to_apply=%add"), near=8
    )
    assert (found.group, found.within) == (group, within)
    assert found.far == (found.sent / within if within else 0)


def test_what_leaves_a_slice():
    whole = "channel_id=1, replica_groups=[1,16]<=[16]"
    pairs = ",".join(f"{{{device},{(device + 1) % 16}}}" for device in range(16))
    text = entry(
        f"f32[16]{{0}} all-gather(%p), {whole}, dimensions={{0}}",
        f"f32[16]{{0}} all-to-all(%p), {whole}, dimensions={{0}}",
        f"f32[16]{{0}} collective-permute(%p), channel_id=2, source_target_pairs={{{pairs}}}",
        "f32[16]{0} collective-permute(%p), channel_id=3, source_target_pairs={{0,1},{1,0}}",
    )
    gather, exchange, ring, inside = collectives(text, near=8)
    # on a ring of all 16 one of 8 sends to the other slice
    assert gather.sent == 60 and gather.far == 60 / 8
    assert exchange.far == 64 * 8 / 16  # half of it is for the other slice
    assert ring.far == ring.sent == 64 and inside.far == 0
    assert [one.far for one in collectives(text)] == [0, 0, 0, 0]


def test_pairs_are_those_of_their_own_list():
    """None is a list too, and what stands behind it may look like pairs."""
    behind = 'metadata={op_name="a{b{3,4}}"}'
    text = entry(
        f"f32[16]{{0}} collective-permute(%p), channel_id=1, source_target_pairs={{}}, {behind}",
        f"f32[16]{{0}} collective-permute(%p), channel_id=2, source_target_pairs={{{{0,9}}}}, "
        f"{behind}",
        "f32[16]{0} collective-permute(%p), channel_id=3, source_target_pairs={{0,9},{9,0}}",
    )
    found = collectives(text, near=8)
    assert [(one.group, one.sent, one.far) for one in found] == [
        (2, 64, 64)
    ] * 2  # the first sends nothing


def between(shape, transfer, target):
    """A TPU's send of an array to other slices, as libtpu prints it."""
    attributes = f'_xla_megascale_target="{target}",_xla_megascale_transfer_type="{transfer}"'
    return (
        f"({shape}{{2,1,0:T(8,128)}}, u32[], token[]) send(%x, %t), channel_id=3, "
        "is_host_transfer=true, "
        f'frontend_attributes={{_xla_host_transfer_handler_name="xla_megascale_runtime",{attributes}}}'
    )


@pytest.mark.parametrize(
    ("shape", "transfer", "target", "expected"),
    [
        ("f32[1,8,128]", "ALL_REDUCE", "{1,2}x{0:3}", ("all-reduce", 4096, 2, 4096)),
        ("f32[1,8,128]", "ALL_REDUCE", "{1,2,3,4}x{0:3}", ("all-reduce", 4096, 4, 6144)),
        ("f32[1,8,128]", "ALL_REDUCE", "{1:4}x{0:3}", ("all-reduce", 4096, 4, 6144)),
        ("bf16[2,8,128]", "REDUCE_SCATTER", "{1,2}x{0:7}", ("reduce-scatter", 4096, 2, 2048)),
        ("bf16[1,8,128]", "ALL_GATHER", "{1,2}x{0:7}", ("all-gather", 4096, 2, 2048)),
        ("pred[4,8,128]", "ALL_TO_ALL", "{1,2}x{0:7}", ("all-to-all", 4096, 2, 2048)),
        ("pred[4,8,128]", "ONE_TO_ONE", "{1,2}x{0:7}", ("collective-permute", 4096, 2, 4096)),
    ],
)
def test_what_tpus_send_to_other_slices_is_a_collective_of_slices(
    shape, transfer, target, expected
):
    """Sends to a host's callback are none."""
    callback = "(f32[8]{0}, u32[], token[]) send(%x, %t), channel_id=9, is_host_transfer=true"
    (found,) = collectives(entry(between(shape, transfer, target), callback), near=8)
    assert (found.kind, found.size, found.group, found.far) == expected and found.sent == found.far


def test_an_unknown_transfer_between_slices_is_unknown():
    (found,) = collectives(entry(between("f32[8]", "NEW", "{1,2}x{0:3}")), near=4)
    assert found.sent is None and found.far == 0


def test_a_sharded_step_sends_what_fsdp_is_known_to():
    """By a ring: weights gathered forward and backward, their gradient reduced and scattered; of
    each (n-1)/n."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    width, rows, layers = 64, 8, 3
    weights, activations = PartitionSpec(None, "x"), PartitionSpec("x")

    @jax.checkpoint
    def layer(x, w):
        return jnp.tanh(x @ jax.lax.all_gather(w, "x", axis=0, tiled=True)), None

    def local(w, x):
        return jax.grad(lambda w: jnp.sum(jax.lax.scan(layer, x, w)[0]))(w)

    run = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(weights, activations), out_specs=weights)
    )
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, at))
        for shape, at in (((layers, width, width), weights), ((rows, width), activations))
    ]
    sent = bytes_sent(collectives(run.lower(*arguments).compile().as_text()))
    each = layers * 7 / 8 * 4 * width * width
    assert sent["all-gather"] == 2 * each
    assert sent["reduce-scatter"] == each
    assert sum(sent.values()) == 3 * each


def test_all_gathers_inside_a_compiled_scan():
    """A channel alone does not make them one: those that are written in a shard_map all have the
    same."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))

    def local(w, x):
        def body(x, _):
            rows = jax.lax.all_gather(w + x[:1, :1], "x", axis=0, tiled=True)
            return jnp.tanh(x @ jax.lax.all_gather(rows, "y", axis=1, tiled=True)), None

        return jax.lax.scan(body, x, None, length=5)[0]

    split, whole = PartitionSpec("x", "y"), PartitionSpec()
    run = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(split, whole), out_specs=whole, check_vma=False)
    )
    args = [
        jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, at))
        for at in (split, whole)
    ]
    assert collectives(run.lower(*args).compile().as_text()) == [
        Collective("all-gather", 64 * 16 * 4, 2, 5),
        Collective("all-gather", 64 * 64 * 4, 4, 5),
    ]
