"""The batched sampler against the trainer's forward pass, itself in other shapes, and its own
promises.

Everywhere: float32, prompts of 1 to 17 tokens, responses of 1 to 120, 19 samples in 8 rows, so that
rows are refilled, and the ring of columns wraps.
"""

from __future__ import annotations

import dataclasses
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain import noisy

from g2d_jax.data.packing import Group, Response, pack
from g2d_jax.models import decoder
from g2d_jax.models.config import ModelConfig
from g2d_jax.records import SEGMENT_STRIDE, Request, Rollout, SamplingParams
from g2d_jax.runtime import keys
from g2d_jax.runtime import mesh as meshes
from g2d_jax.sampler import programs
from g2d_jax.sampler.engine import Sampler, Usage
from g2d_jax.sampler.sampling import uniforms
from g2d_jax.training.objectives import Compute
from g2d_jax.training.step import make_scorer, put_batch

pytestmark = pytest.mark.quick

CONFIG = ModelConfig("qwen2", 64, 32, 2, 4, 2, 8, 48, tie_word_embeddings=True)
SEED = 3
EARLY = tuple(range(0, 64, 2))  # half of the vocabulary: often the first token
HOT = 0.7

# (prompt length, samples, max_new_tokens, temperature, stop ids)
TABLE = [
    (1, 3, 40, HOT, (3, 9)),
    (3, 1, 5, HOT, ()),
    (7, 4, 12, 1.3, EARLY),
    (16, 2, 120, HOT, (5,)),
    (17, 5, 1, 1.3, EARLY),  # rows at rest for the rest of a chunk draw on, and do not stop
    (5, 4, 20, 1.3, (63, 1, 2)),
]


def request(
    number: int, length: int, samples: int, new: int, temperature: float, stops: tuple[int, ...]
) -> Request:
    ids = np.random.default_rng(number).integers(0, 64, length).astype(np.int32)
    if (
        number != 3
        # ids that no model draws: one compiled shape for all calls, which leaves places free in
        # problem 3
    ):
        stops += tuple(range(64, 64 + 32 - len(stops)))
    return Request(
        f"problem{number}",
        ids,
        SamplingParams(new, temperature, stop_ids=stops),
        samples,
        visit=number % 2,
    )


REQUESTS = [request(number, *row) for number, row in enumerate(TABLE)]


def one_device() -> jax.sharding.Mesh:
    return meshes.make_mesh(devices=jax.devices()[:1])


def run(
    sampler: Sampler,
    model: decoder.Decoder,
    requests: list[Request],
    purpose: str = "test",
) -> list[Rollout]:
    samples = sum(request.num_samples for request in requests)
    params = [request.params for request in requests]
    lengths = [*range(1, 18), *(len(request.prompt_ids) for request in requests)]
    shapes = sampler.shapes(len(requests), samples, params, lengths) if requests else None
    rollouts = sampler.generate(sampler.to_sampler_params(model), requests, purpose, shapes)
    return sorted(rollouts, key=lambda r: (r.problem_id, r.sample))


@pytest.fixture(scope="module")
def model() -> decoder.Decoder:
    """Random, biases and norms included; std 0.15 makes distributions that are neither flat nor
    certain."""
    return noisy(decoder.init(CONFIG, jax.random.key(0), std=0.15))


def make_sampler(
    mesh: jax.sharding.Mesh | None = None,
    max_num_seqs: int = 8,
    chunk: int = 4,
    prefill_rows: int = 4,
    dtype: jnp.dtype = jnp.float32,
):
    sizes = {"max_num_seqs": max_num_seqs, "chunk": chunk, "prefill_rows": prefill_rows}
    return Sampler(CONFIG, mesh or one_device(), seed=SEED, dtype=dtype, **sizes)


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    return make_sampler()


@pytest.fixture(scope="module")
def on_eight(model: decoder.Decoder) -> tuple[Sampler, decoder.Decoder]:
    """A sampler with rows over 4 devices and heads over 2, and the policy over all 8 as training
    has it."""
    training = meshes.make_mesh(1, 8, 1)
    # 2 a device's part
    sampler = make_sampler(meshes.sampling(training, 2, CONFIG.num_key_value_heads), prefill_rows=8)
    return sampler, jax.device_put(model, decoder.shardings(CONFIG, training))


@pytest.fixture(scope="module")
def base(sampler: Sampler, model: decoder.Decoder) -> tuple[list[Rollout], Usage]:
    """All requests at once, and what they cost."""
    return run(sampler, model, REQUESTS), dataclasses.replace(sampler.usage)


def params_of(rollout: Rollout) -> SamplingParams:
    return next(r.params for r in REQUESTS if r.problem_id == rollout.problem_id)


def assert_bit_equal(first: list[Rollout], second: list[Rollout]) -> None:
    assert [(r.problem_id, r.sample, r.stop_reason) for r in first] == [
        (r.problem_id, r.sample, r.stop_reason) for r in second
    ]
    for a, b in zip(first, second, strict=True):
        for name in ("token_ids", "logprobs", "entropies"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


@partial(jax.jit, static_argnames="dtype")
def logits_of(
    model: decoder.Decoder, tokens: jax.Array, dtype: jnp.dtype = jnp.float32
) -> jax.Array:
    """What the trainer's forward pass makes of rows [B, T] of one sequence each: [B, T, V]."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    segments = jnp.full_like(tokens, SEGMENT_STRIDE)
    hidden, _ = decoder.forward(model, tokens, positions, segments, dtype=dtype)
    return (hidden @ decoder.head_matrix(model, dtype)).astype(jnp.float32)


ROWS = 20, 216  # no fewer than any call has, so that one program serves all


def assert_likeliest(model: decoder.Decoder, greedy: Rollout) -> None:
    first, size = len(greedy.prompt_ids), len(greedy.token_ids)
    tokens = np.zeros(ROWS, np.int32)
    tokens[0, : first + size] = np.concatenate([greedy.prompt_ids, greedy.token_ids])
    logits = np.asarray(logits_of(model, jnp.asarray(tokens)))[0, first - 1 : first + size - 1]
    np.testing.assert_array_equal(greedy.token_ids, logits.argmax(-1))


def assert_drawn(
    model: decoder.Decoder, rollouts: list[Rollout], requests: list[Request] = REQUESTS
) -> None:
    """Every token is what its names draw: seed, purpose, problem, visit, sample, and its place in
    the response.

    Their uniform lies in the token's step of the distribution function (64 words: one block), up to
    rounding.
    """
    rows, length = ROWS
    temperatures = {r.problem_id: r.params.temperature for r in requests}
    tokens, data = np.zeros((rows, length), np.int32), np.zeros((rows, 2), np.uint32)
    for row, r in enumerate(rollouts):
        tokens[row, : len(r.prompt_ids) + len(r.token_ids)] = np.concatenate(
            [r.prompt_ids, r.token_ids]
        )
        data[row] = keys.key_data(SEED, "test", r.problem_id, r.visit, r.sample)
    places = jnp.tile(jnp.arange(length), rows)
    noise = np.asarray(uniforms(jnp.asarray(data.repeat(length, 0)), places))[:, 1].reshape(
        rows, length
    )
    logits = np.asarray(logits_of(model, jnp.asarray(tokens)), np.float64)
    for row, r in enumerate(rollouts):
        size, first = len(r.token_ids), len(r.prompt_ids) - 1
        masses = np.exp(logits[row, first : first + size] / temperatures[r.problem_id])
        masses /= masses.sum(1, keepdims=True)
        above, own = (x[np.arange(size), r.token_ids] for x in (masses.cumsum(1), masses))
        assert (
            (above - own - 1e-4 < noise[row, :size]) & (noise[row, :size] < above + 1e-4)
        ).all(), r


def assert_same(model: decoder.Decoder, first: list[Rollout], second: list[Rollout]) -> None:
    """Equal tokens and log-probabilities up to rounding; a token may differ where the noise lies
    between the two."""
    assert [(r.problem_id, r.sample) for r in first] == [(r.problem_id, r.sample) for r in second]
    assert_drawn(model, second)
    for a, b in zip(first, second, strict=True):
        length = min(len(a.token_ids), len(b.token_ids))
        differing = np.flatnonzero(a.token_ids[:length] != b.token_ids[:length])
        same = differing[0] if differing.size else length
        np.testing.assert_allclose(a.logprobs[:same], b.logprobs[:same], atol=1e-5)
        np.testing.assert_allclose(a.entropies[:same], b.entropies[:same], atol=2e-5)
        assert differing.size or (
            len(a.token_ids) == len(b.token_ids) and a.stop_reason == b.stop_reason
        )


def test_tokens_are_drawn_by_their_names(base, model):
    assert_drawn(model, base[0])


def test_every_sample_once_and_its_prompt_with_it(base):
    rollouts, _ = base
    expected = sorted(
        (r.problem_id, r.visit, sample) for r in REQUESTS for sample in range(r.num_samples)
    )
    assert [(r.problem_id, r.visit, r.sample) for r in rollouts] == expected
    prompts = {r.problem_id: r.prompt_ids for r in REQUESTS}
    for rollout in rollouts:
        np.testing.assert_array_equal(rollout.prompt_ids, prompts[rollout.problem_id])


def test_lengths_and_stop_reasons(base):
    rollouts, _ = base
    for rollout in rollouts:
        params, tokens = params_of(rollout), rollout.token_ids
        is_stop = np.isin(tokens, params.stop_ids)
        assert 1 <= len(tokens) <= params.max_new_tokens and not is_stop[:-1].any()
        assert (
            tokens.dtype == np.int32
            and rollout.logprobs.dtype == rollout.entropies.dtype == np.float32
        )
        assert len(rollout.logprobs) == len(rollout.entropies) == len(tokens)
        if rollout.stop_reason == "stop":
            assert is_stop[-1]
        else:
            assert not is_stop[-1] and len(tokens) == params.max_new_tokens
    first = [r for r in rollouts if len(r.token_ids) == 1 and r.stop_reason == "stop"]
    assert first, "no response ended with its first token: choose another seed"
    assert {
        int(r.token_ids[-1])
        for r in rollouts
        if r.problem_id == "problem0" and r.stop_reason == "stop"
    } <= {3, 9}


def test_logprobs_are_the_trainers(base, model):
    rollouts, _ = base
    compute = Compute(one_device())
    score = make_scorer(compute)
    for temperature in (HOT, 1.3):
        chosen = [r for r in rollouts if params_of(r).temperature == temperature]
        packed = pack(
            [Group(r.prompt_ids, [Response(r.token_ids)]) for r in chosen],
            row_length=144,
            microbatch_rows=8,
        )
        logprobs, entropies = score(
            model, *put_batch(packed, compute.mesh), temperature=temperature
        )
        pairs = zip(
            packed.unpack(np.asarray(logprobs)),
            packed.unpack(np.asarray(entropies)),
            chosen,
            strict=True,
        )
        for (logprob,), (entropy,), rollout in pairs:
            np.testing.assert_allclose(rollout.logprobs, logprob, atol=1e-5)
            np.testing.assert_allclose(rollout.entropies, entropy, atol=2e-5)


def test_usage(base):
    rollouts, usage = base
    assert usage.prefilled == sum(length for length, *_ in TABLE)  # once per prompt, not per sample
    assert usage.generated == sum(len(r.token_ids) for r in rollouts)
    assert usage.row_steps >= usage.generated and usage.seconds > 0


def sizes(sampler):
    return {name: program._cache_size() for name, program in sampler._jitted.items()}


def test_repeated_bit_for_bit_without_compiling(sampler, model, base):
    run(sampler, model, REQUESTS)  # compiles where the process has forgotten what it had
    before = sizes(sampler)
    assert_bit_equal(run(sampler, model, REQUESTS), base[0])
    assert sizes(sampler) == before


def test_ragged_lengths_compile_nothing_new(sampler, model, base):
    """Other prompts, other lengths, other parameters and stop ids."""
    run(sampler, model, REQUESTS)
    before = sizes(sampler)
    for lengths in ([17, 9, 2, 11, 4], [13, 3, 1, 12, 6], [5, 16, 8, 2, 2]):
        run(
            sampler,
            model,
            [
                request(n, length, 3, 104 + n, 1.1, (5, 8, n))
                for n, length in enumerate(lengths, 10)
            ],
        )
    assert sizes(sampler) == before


def test_samples_do_not_depend_on_slots_chunk_or_prefill_rows(model, base):
    other = make_sampler(max_num_seqs=16, chunk=7, prefill_rows=8)
    assert_same(model, base[0], run(other, model, REQUESTS))


PIECES = [
    b"a",
    b"b",
    b"ab",
    b"xa",
    b"bb\n",
    b"\n",
    b"\n\n",
    b"\xc3",
    b"\xa9",
    b"\xa9!",
    b"!",
    b"",
    b"c",
    b"dd",
    b" ",
    b"e",
]
"""What the model's tokens spell, again and again: parts of words, of a character, of two lines, and
nothing."""
STOPS = ("xa", "\n\n", "é!", " e", "b!")


def spelt(ids):
    return b"".join(PIECES[i % len(PIECES)] for i in ids).decode("utf-8", "replace")


def has_stop(ids):
    return any(stop in spelt(ids) for stop in STOPS)


def stopping(requests):
    return [
        dataclasses.replace(r, params=dataclasses.replace(r.params, stop=STOPS)) for r in requests
    ]


def test_a_stop_string_ends_a_response_with_its_last_token(model, base):
    """Decoded together with others, the sample is the beginning of the one without stop strings."""
    sizes = {"max_num_seqs": 8, "chunk": 64, "prefill_rows": 4}
    sampler = Sampler(CONFIG, one_device(), seed=SEED, decode=spelt, **sizes)
    found = run(sampler, model, stopping(REQUESTS[::-1]))
    ended = [has_stop(r.token_ids) for r in found]
    assert 5 <= sum(ended) < len(found)
    whole = {(r.problem_id, r.sample): r for r in base[0]}
    shortened = []
    for rollout, by_text in zip(found, ended, strict=True):
        assert not has_stop(rollout.token_ids[:-1])
        other, size = whole[rollout.problem_id, rollout.sample], len(rollout.token_ids)
        assert len(rollout.logprobs) == len(rollout.entropies) == size
        assert rollout.stop_reason == ("stop" if by_text else other.stop_reason)
        cut = {name: getattr(other, name)[:size] for name in ("token_ids", "logprobs", "entropies")}
        shortened.append(dataclasses.replace(other, **cut, stop_reason=rollout.stop_reason))
    assert_same(model, shortened, found)
    assert sampler.usage.generated == sum(len(r.token_ids) for r in found)
    assert_bit_equal(found, run(sampler, model, stopping(REQUESTS[::-1])))


def test_rows_that_a_stop_string_ended_take_the_next_sample(model):
    """The rows that are freed so decode others, and at the end nothing: what is thrown away is
    within a chunk."""
    sampler = Sampler(
        CONFIG, one_device(), seed=SEED, max_num_seqs=2, chunk=4, prefill_rows=2, decode=spelt
    )
    stops = tuple(piece.decode() for piece in (b"a", b"b", b"\n", b"!", b"c", b"d", b" ", b"e"))
    requests = [
        Request(f"z{n}", np.array([n], np.int32), SamplingParams(400, 1.3, stop=stops), 3)
        for n in range(4)
    ]
    found = run(sampler, model, requests)
    assert len(found) == 12 and {r.stop_reason for r in found} == {"stop"}
    assert sampler.usage.row_steps <= 2 * sum(len(r.token_ids) + 4 for r in found)


def test_stop_strings_need_text(sampler, model):
    with pytest.raises(ValueError, match="problem0: stop strings need a sampler with decode"):
        run(sampler, model, stopping(REQUESTS[:1]))


def test_samples_do_not_depend_on_the_mesh(model, base, on_eight):
    other, placed = on_eight
    assert {*jax.tree.leaves(other.to_sampler_params(placed))[-1].sharding.mesh.shape.values()} == {
        4,
        1,
        2,
    }
    short = [r for r in REQUESTS if r.problem_id != "problem3"]
    # More prompts than places: some are prefilled while others' samples still wait. Their ids are
    # the first and last.
    more = [
        Request(f"z{n}", np.array([63, 0, n], np.int32), SamplingParams(1 + 3 * n, 1.3), 3)
        for n in range(6)
    ]
    rollouts = run(other, placed, [*short, *more])
    assert_same(model, [r for r in base[0] if r.problem_id != "problem3"], rollouts[:-18])
    assert_drawn(model, rollouts[-18:], more)
    assert_bit_equal(rollouts, run(other, placed, [*short, *more]))


@pytest.mark.slow
def test_samples_are_the_same_however_the_weights_are_split(model, base):
    """Two copies of the weights, each over 4 devices."""
    training = meshes.make_mesh(1, 8, 1)
    mesh = meshes.sampling(training, 4, CONFIG.num_key_value_heads)
    assert (*mesh.shape.values(),) == (2, 2, 2)
    sampler = make_sampler(mesh, prefill_rows=8)
    placed = jax.device_put(model, decoder.shardings(CONFIG, training))
    assert_same(model, base[0], run(sampler, placed, REQUESTS))


def test_a_prefill_is_as_large_as_a_device_has_use_for():
    mesh = meshes.sampling(meshes.make_mesh(2, 4, 1), 2, CONFIG.num_key_value_heads)
    sampler = Sampler(CONFIG, mesh, seed=SEED, max_num_seqs=64, prefill_rows=32)
    prompts = {
        length: sampler.shapes(64, 64, [SamplingParams(16)], [length]).prompts
        for length in (100, 4096, 9000)
    }
    assert prompts == {100: 32, 4096: 8, 9000: 4}, "on four parts of 8,192 tokens, or of a prompt"


def test_a_quarter_of_the_samples_decode_at_once_on_a_cpu():
    sampler = make_sampler(chunk=16, max_num_seqs=256)
    call = [SamplingParams(32)], [40]
    rows = [sampler.shapes(8, samples, *call).rows for samples in (16, 64, 512)]
    assert rows == [16, 32, 128]


def test_bfloat16_samples_have_the_log_probabilities_of_the_forward_pass(model):
    """Keys and values lie in float32 on a CPU, where a column of bfloat16 costs the whole array."""
    mesh = meshes.make_mesh(devices=jax.devices()[:1])
    sampler = make_sampler(mesh, dtype=jnp.bfloat16)
    requests = [dataclasses.replace(r, params=SamplingParams(12)) for r in REQUESTS[:4]]
    state, _ = sampler.abstract(sampler.shapes(4, 4, [SamplingParams(12)], [40]))
    assert {x.dtype for x in (*state.cache.keys, *state.cache.values)} == {jnp.dtype("float32")}
    assert state.hidden.dtype == jnp.bfloat16
    rollouts = run(sampler, model, requests)
    tokens = np.zeros((len(rollouts), 32), np.int32)
    for row, rollout in enumerate(rollouts):
        both = np.concatenate([rollout.prompt_ids, rollout.token_ids])
        tokens[row, : len(both)] = both
    logits = np.asarray(logits_of(model, jnp.asarray(tokens), dtype=jnp.bfloat16))
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for row, rollout in zip(logprobs, rollouts, strict=True):
        places = len(rollout.prompt_ids) - 1 + np.arange(len(rollout.token_ids))
        np.testing.assert_allclose(rollout.logprobs, row[places, rollout.token_ids], atol=0.05)


def test_a_prompt_is_inserted_where_it_lies(model):
    """On eight devices: nothing is sent, the state is changed in place, and no array of the cache's
    size is made."""
    mesh = meshes.sampling(meshes.make_mesh(2, 4, 1), 2, CONFIG.num_key_value_heads)
    sampler = make_sampler(mesh, max_num_seqs=64, prefill_rows=8)
    shapes = sampler.shapes(64, 512, [SamplingParams(200)], [40])
    state, _ = sampler.abstract(shapes)
    compiled = sampler.programs(None, shapes)["insert", None].lower().compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert not re.findall(
        r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\b", text
    )
    cache = state.cache.keys[0].sharding.shard_shape(state.cache.keys[0].shape)
    assert cache == (16, 1, 8, 256), "rows over 4 devices, key heads over 2"
    assert not [
        line
        for line in text.splitlines()
        if f"f32[{','.join(map(str, cache))}]" in line and " copy(" in line
    ]
    size = math.prod(cache) * 4
    assert memory.alias_size_in_bytes >= 4 * size and memory.temp_size_in_bytes < size


def test_samples_do_not_depend_on_other_requests(sampler, model, base):
    assert_same(model, base[0], run(sampler, model, REQUESTS[::-1]))


def test_the_end_of_a_call_decodes_in_few_rows(model):
    """The last samples move into 8 of 20 rows, with their cache, their stop strings and what names
    their draws."""
    sizes = {"max_num_seqs": 20, "chunk": 4, "prefill_rows": 4}
    sampler = Sampler(CONFIG, one_device(), seed=SEED, decode=spelt, **sizes)
    assert sampler.shapes(6, 40, [SamplingParams(32)], [9]).tail == 0, "eight chunks at most"
    requests = [*REQUESTS[:3], *stopping(REQUESTS[3:])]
    found, used = [], []
    for tail in (8, 0):
        shapes = sampler.shapes(6, 40, [one.params for one in requests], range(1, 18))
        assert (shapes.rows, shapes.tail) == (20, 8)
        shapes = dataclasses.replace(shapes, tail=tail)
        before = dataclasses.replace(sampler.usage)
        params = sampler.to_sampler_params(model)
        rollouts = sampler.generate(params, requests, "test", shapes)
        found.append(sorted(rollouts, key=lambda one: (one.problem_id, one.sample)))
        assert sampler.usage.generated - before.generated == sum(
            len(r.token_ids) for r in found[-1]
        )
        used.append(sampler.usage.row_steps - before.row_steps)
    assert used[0] < 0.7 * used[1]
    for one, other in zip(*found, strict=True):
        assert (one.sample, one.stop_reason) == (other.sample, other.stop_reason)
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_filters_and_greedy_beside_plain_requests(sampler, model, base):
    """A call in which some rows are filtered leaves the others as they are; top_k 1 is greedy."""
    prompt = REQUESTS[2].prompt_ids
    # Four prompts, as one prefill of `base`.
    greedy = Request("greedy", prompt, SamplingParams(12, temperature=0.0))
    top = Request("top", prompt, SamplingParams(12, temperature=2.0, top_k=1), num_samples=2)
    nucleus = Request("nucleus", prompt, SamplingParams(12, top_p=0.5, top_k=9), num_samples=3)
    rollouts = run(sampler, model, [REQUESTS[2], greedy, top, nucleus])
    by_name = {
        name: [r for r in rollouts if r.problem_id == name]
        for name in ("greedy", "top", "nucleus", "problem2")
    }
    assert_same(model, [r for r in base[0] if r.problem_id == "problem2"], by_name["problem2"])
    (best,) = by_name["greedy"]
    assert not best.logprobs.any() and not best.entropies.any()
    for rollout in by_name["top"]:
        np.testing.assert_array_equal(rollout.token_ids, best.token_ids)
        np.testing.assert_allclose(rollout.logprobs, 0.0, atol=1e-6)
    assert all((r.entropies <= np.log(9) + 1e-5).all() for r in by_name["nucleus"])
    assert_likeliest(model, best)


def test_a_greedy_sample_shares_its_prompt(sampler, model, base):
    """The samples before it are those of the same request without it, and the prompt is read
    once."""
    drawn = run(sampler, model, [REQUESTS[2]])
    before = sampler.usage.prefilled
    greedy = dataclasses.replace(REQUESTS[2], num_samples=5, greedy=True)
    *others, best = sorted(run(sampler, model, [greedy]), key=lambda rollout: rollout.sample)
    assert sampler.usage.prefilled == before + len(REQUESTS[2].prompt_ids)
    assert_same(model, drawn, others)
    assert_likeliest(model, best)
    assert best.sample == 4 and not best.logprobs.any()


@pytest.mark.parametrize(
    ("asked", "filters"),
    [({}, ()), ({"top_k": 1}, ("top_k",)), ({"top_p": 0.9, "top_k": 2}, ("top_k", "top_p"))],
)
def test_filters_are_compiled_in_where_a_request_has_one(sampler, asked, filters):
    params = [SamplingParams(5), SamplingParams(5, **asked)]
    assert sampler.shapes(2, 2, params, [7]).filters == filters


@pytest.fixture
def chunk_of_filters(sampler, model):
    """A chunk of 6 steps of rows with 0, 3, 1 and 9 tokens left, of which some use a filter."""
    shapes = sampler.shapes(4, 4, [SamplingParams(9, top_k=5), SamplingParams(9, top_p=0.8)], [7])
    state, _ = sampler.programs(None, shapes)["empty", None]()
    rows = dataclasses.replace(
        state.rows,
        remaining=jnp.array([0, 3, 1, 9]),
        top_k=jnp.array([0, 5, 0, 0]),
        top_p=jnp.array([1.0, 1.0, 0.8, 1.0]),
    )
    hidden = jax.random.normal(jax.random.key(0), state.hidden.shape)
    state = dataclasses.replace(state, rows=rows, hidden=hidden)
    return partial(
        programs.decode_chunk,
        sampler.to_sampler_params(model),
        state,
        jnp.zeros(1, jnp.int32),
        chunk=6,
        filters=shapes.filters,
        mesh=sampler.mesh,
        dtype=jnp.float32,
    )


def test_nothing_in_a_chunk_without_branches_depends_on_data(chunk_of_filters):
    """As on a GPU, whose host would wait for the answer."""
    branches = r"\b(?:cond|while)\["
    without = str(jax.make_jaxpr(partial(chunk_of_filters, branches=False))())
    assert "scan[" in without and not re.findall(branches, without)
    assert re.findall(branches, str(jax.make_jaxpr(chunk_of_filters)()))


@pytest.mark.slow
def test_a_chunk_without_branches_draws_the_same(chunk_of_filters):
    """All of its steps are taken, and rows at rest do nothing."""
    _, ours = jax.jit(partial(chunk_of_filters, branches=False))()
    _, theirs = jax.jit(chunk_of_filters)()
    assert ours.counts.tolist() == theirs.counts.tolist() == [0, 3, 1, 6]
    for row, count in enumerate(ours.counts):
        np.testing.assert_array_equal(ours.tokens[row, :count], theirs.tokens[row, :count])
        np.testing.assert_array_equal(ours.logprobs[row, :count], theirs.logprobs[row, :count])


def test_no_requests(sampler, model):
    assert run(sampler, model, []) == []


def test_what_does_not_fit_the_shapes_is_refused(sampler, model):
    shapes = sampler.shapes(1, 1, [SamplingParams(5)], [7])
    for columns, new in ((17, 5), (7, 60)):
        with pytest.raises(ValueError, match="needs more columns than the sampler is compiled for"):
            list(
                sampler.generate(
                    sampler.to_sampler_params(model),
                    [request(9, columns, 1, new, 1.0, ())],
                    "test",
                    shapes,
                )
            )


@pytest.mark.parametrize(
    ("ids", "samples", "message"),
    [
        ([], 1, "problem bad: a request needs a prompt"),
        ([1], 0, "at least one sample"),
        ([1, 64], 1, r"prompt ids must be in \[0, 64\)"),
        ([-1, 5], 1, r"prompt ids must be in \[0, 64\)"),
    ],
)
def test_bad_requests_are_refused_before_anything_is_sampled(sampler, model, ids, samples, message):
    before = sampler.usage.prefilled
    bad = Request("bad", np.array(ids, np.int32), SamplingParams(4), samples)
    with pytest.raises(ValueError, match=message):
        run(sampler, model, [REQUESTS[1], bad])
    assert sampler.usage.prefilled == before


def test_sizes_must_be_positive():
    with pytest.raises(ValueError, match="must be positive"):
        make_sampler(max_num_seqs=0)


@pytest.mark.parametrize(
    ("new", "ready"),
    [
        ([5] * 12, [7, 6, 5, 4, 3, 2, 1, 0, 3, 2, 1, 0]),  # of eight rows
        ([2, 2, 6], [1, 0, 0]),
    ],
)
def test_it_is_known_how_many_have_ended_together(sampler, model, new, ready):
    requests = [
        Request(f"r{i}", np.array([3, 4], np.int32), SamplingParams(length), num_samples=1)
        for i, length in enumerate(new)
    ]
    found = [
        sampler.ready for _ in sampler.generate(sampler.to_sampler_params(model), requests, "test")
    ]
    assert found == ready


RECURRENT = ModelConfig(
    "qwen3_5_text",
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    layer_types=("linear_attention", "full_attention") * 2,
    partial_rotary_factor=0.5,
)


EXPERTS = ModelConfig(
    "qwen3_moe",
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
)


def test_devices_that_share_experts_prefill_as_many_tokens_together_as_one_would() -> None:
    many = [SamplingParams(8)]
    prompts = {}
    none = {"num_experts": 0, "num_experts_per_tok": 0, "moe_intermediate_size": 0}
    for config in (EXPERTS, dataclasses.replace(EXPERTS, family="qwen3", **none)):
        mesh = meshes.sampling(meshes.make_mesh(1, 8, 1), 2, config.num_key_value_heads)
        assert mesh.shape["tensor"] == 2
        shapes = Sampler(config, mesh, seed=SEED, prefill_rows=64).shapes(64, 64, many, [2048])
        prompts[config.num_experts] = shapes.prompts
    # Four groups of two devices, rows of 2,048 columns, 8,192 tokens a group at most.
    assert prompts == {0: 16, 8: 8}


@pytest.mark.parametrize(
    ("config", "devices", "ways"),
    [
        (RECURRENT, 1, 1),
        pytest.param(RECURRENT, 8, 2, marks=pytest.mark.slow),
        pytest.param(EXPERTS, 8, 4, marks=pytest.mark.slow),
    ],
    ids=lambda value: value.family if isinstance(value, ModelConfig) else str(value),
)
def test_other_layers_sample_what_their_trainer_scores(
    config: ModelConfig, devices: int, ways: int
) -> None:
    """Rows take over from others, prompts from their own state; responses to a prompt share a
    row. Experts lie on two devices, and with four ways their width on two as well."""
    model = noisy(decoder.init(config, jax.random.key(0), std=0.15))
    mesh = one_device()
    if devices > 1:
        mesh = meshes.sampling(meshes.make_mesh(1, devices, 1), ways, config.num_key_value_heads)
        model = jax.device_put(model, decoder.shardings(config, mesh))
    sampler = Sampler(config, mesh, seed=SEED, max_num_seqs=8, chunk=4, prefill_rows=4)
    rollouts = run(sampler, model, REQUESTS[:4])
    assert len(rollouts) == 10 and sampler.usage.row_steps > 0
    prompts: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        if params_of(rollout).temperature == HOT:
            prompts.setdefault(rollout.problem_id, []).append(rollout)
    groups = [
        Group(own[0].prompt_ids, [Response(r.token_ids) for r in own]) for own in prompts.values()
    ]
    ways = meshes.row_ways(mesh)
    packed = pack(groups, row_length=288, microbatch_rows=ways, rows_multiple=ways)
    scored, _ = make_scorer(Compute(mesh))(model, *put_batch(packed, mesh), temperature=HOT)
    found = packed.unpack(np.asarray(scored))
    for own, logprobs in zip(prompts.values(), found, strict=True):
        for rollout, logprob in zip(own, logprobs, strict=True):
            np.testing.assert_allclose(rollout.logprobs, logprob, atol=1e-4)
