"""Keys and values as int8 codes: what they stand for, and attention that reads them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from g2d_jax.models.attention import attend_blocks, attend_cached
from g2d_jax.models.kv_codes import KEY_COLUMNS, VALUE_COLUMNS, Codes, encode, map_parts

pytestmark = pytest.mark.quick

BOTH = pytest.mark.parametrize("columns", [KEY_COLUMNS, VALUE_COLUMNS])


def decoded(kept: Codes, columns: int) -> np.ndarray:
    """The numbers that codes stand for."""
    scales = np.moveaxis(np.asarray(kept.scales), KEY_COLUMNS, columns)
    with np.errstate(invalid="ignore"):
        return np.asarray(kept.codes) * scales


def test_a_column_has_127_codes_up_to_its_greatest_magnitude():
    keys = jnp.array([[[[127.0, 0.5, 0.0], [-63.4, -0.25, 0.0]]]])  # D = 2, W = 3
    for x, columns in ((keys, KEY_COLUMNS), (keys.swapaxes(-1, -2), VALUE_COLUMNS)):
        kept = encode(x, columns)
        assert kept.codes.dtype == jnp.int8 and kept.scales.dtype == jnp.float32
        np.testing.assert_allclose(kept.scales, [[[[1.0, 0.5 / 127, 0.0]]]], rtol=1e-6)
        codes = jnp.moveaxis(kept.codes, columns, KEY_COLUMNS)
        assert codes.tolist() == [[[[127, 127, 0], [-63, -64, 0]]]]


@BOTH
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_number_is_within_half_a_code(columns, dtype):
    x = jax.random.normal(jax.random.key(0), (3, 2, 16, 24), dtype)
    kept = encode(x, columns)
    assert kept.shape == x.shape and kept.scales.shape == (3, 2, 1, x.shape[columns])
    half = np.moveaxis(np.asarray(kept.scales), KEY_COLUMNS, columns) / 2
    assert (np.abs(decoded(kept, columns) - np.asarray(x, float)) <= half + 1e-7).all()


@BOTH
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_column_that_is_not_finite_stays_visible(columns, bad):
    x = jnp.ones((1, 1, 4, 4)).at[0, 0, 1, 2].set(bad)
    lost = np.isnan(decoded(encode(x, columns), columns)).any(
        axis=(0, 1, KEY_COLUMNS + VALUE_COLUMNS - columns)
    )
    assert lost.tolist() == [number == (2 if columns == KEY_COLUMNS else 1) for number in range(4)]


@pytest.mark.parametrize("by_sums", [True, False])
def test_attention_to_codes_is_that_to_what_they_stand_for(by_sums):
    random = jax.random.split(jax.random.key(1), 3)
    q = jax.random.normal(random[0], (3, 1, 6, 8))
    keys = encode(jax.random.normal(random[1], (2, 3, 2, 8, 512)), KEY_COLUMNS)
    values = encode(jax.random.normal(random[2], (2, 3, 2, 512, 8)), VALUE_COLUMNS)
    column, earlier = jnp.int32(300), jnp.array([0, 299, 511])
    mask = ((column - jnp.arange(512)) % 512)[None] <= earlier[:, None]
    whole = jnp.array(decoded(keys, KEY_COLUMNS)), jnp.array(decoded(values, VALUE_COLUMNS))

    def layer(kept, columns):
        return map_parts(lambda x, axis: x[1], columns, kept)

    plain = attend_cached(q, whole[0][1], whole[1][1], mask, by_sums=False)
    ours = attend_cached(
        q, layer(keys, KEY_COLUMNS), layer(values, VALUE_COLUMNS), mask, by_sums=by_sums
    )
    blocks = attend_blocks(q, keys, values, jnp.int32(1), column, earlier, earlier.max())
    np.testing.assert_allclose(ours, plain, atol=2e-6)
    np.testing.assert_allclose(blocks, plain, atol=2e-6)
