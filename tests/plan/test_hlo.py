"""Collectives in HLO text: literal programs counted by hand, and one that is compiled for 8 devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from g2d_jax.plan.hlo import Collective, bytes_sent, collectives

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
    # The kernel's metadata goes on over lines that look like an end; what stands behind them counts too.
    assert collectives(UNROLLED) == [Collective("all-gather", 32, 4, 1), Collective("collective-permute", 8, 2, 4)]


def test_bytes_that_a_device_sends():
    sent = bytes_sent(collectives(LOOPS))
    assert sent["all-gather"] == 0.75 * (28 * 1024 + 32 + 32)
    assert sent["all-reduce"] == 2 * 0.75 * 68
    assert sent["reduce-scatter"] == 0.75 * 32
    assert sent["collective-permute"] == 8 and sent["all-to-all"] == 0


def test_a_stated_trip_count_is_used():
    text = LOOPS.replace("body=%inner_body", 'body=%inner_body, backend_config={"known_trip_count":{"n":"5"}}')
    assert collectives(text)[0].times == 5


@pytest.mark.parametrize("form", [("replica_groups={{0,1,2,3}}", "replica_groups=new"), ("bf16[64,8]", "f3e1[64,8]")])
def test_a_collective_in_an_unknown_form_is_counted_as_unknown(form):
    known, found = collectives(LOOPS), collectives(LOOPS.replace(*form))
    assert len(found) == len(known) and sum(one.sent is None for one in found) == 1
    assert 0 < sum(bytes_sent(found).values()) < sum(bytes_sent(known).values())


def test_all_gathers_inside_a_compiled_scan():
    """A channel alone does not make them one: those that are written in a shard_map all have the same."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))

    def local(w, x):
        def body(x, _):
            rows = jax.lax.all_gather(w + x[:1, :1], "x", axis=0, tiled=True)
            return jnp.tanh(x @ jax.lax.all_gather(rows, "y", axis=1, tiled=True)), None

        return jax.lax.scan(body, x, None, length=5)[0]

    split, whole = PartitionSpec("x", "y"), PartitionSpec()
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(split, whole), out_specs=whole, check_vma=False))
    args = [jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, at)) for at in (split, whole)]
    assert collectives(run.lower(*args).compile().as_text()) == [
        Collective("all-gather", 64 * 16 * 4, 2, 5),
        Collective("all-gather", 64 * 64 * 4, 4, 5),
    ]
