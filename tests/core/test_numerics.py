# SPDX-License-Identifier: Apache-2.0
"""Number formats of a module, and the helpers of matrix products."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.core.numerics import Numerics, lone_row_doubled, pad_width


def test_defaults_compute_in_the_input_s_format_and_store_float32():
    numerics = Numerics()
    assert numerics.param_dtype == jnp.float32 and numerics.precision is None
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        assert numerics.compute(jnp.ones(2, dtype)).dtype == dtype


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, "float16"])
def test_compute_casts_to_the_format_asked_for(dtype):
    x = jnp.asarray([1.0, 1 + 2**-12])
    got = Numerics(dtype=dtype).compute(x)
    assert got.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(got, x.astype(dtype))


def test_numerics_are_frozen_and_hash_by_value():
    assert hash(Numerics(dtype=jnp.bfloat16)) == hash(Numerics(dtype=jnp.bfloat16))
    with pytest.raises(dataclasses.FrozenInstanceError):
        Numerics().dtype = jnp.float32


def test_pad_width_adds_zeros_at_the_end():
    x = jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3)
    got = pad_width(x, 5)
    assert got.dtype == x.dtype
    assert got.tolist() == [[0, 1, 2, 0, 0], [3, 4, 5, 0, 0]]
    assert pad_width(x, 3) is x


@pytest.mark.parametrize("axis", [0, 2])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("rows", [1, 2])
def test_only_a_lone_16_bit_row_is_doubled(axis, dtype, rows):
    shape = [3, 4, 5]
    shape[axis] = rows
    x = jnp.arange(np.prod(shape)).reshape(shape).astype(dtype)
    got = lone_row_doubled(x, axis)
    if rows == 1 and dtype != jnp.float32:
        np.testing.assert_array_equal(got, np.repeat(x, 2, axis))
    else:
        assert got is x


def test_gradient_of_a_doubled_row_counts_the_first_only_where_the_second_is_dropped():
    x = jnp.ones((1, 4), jnp.bfloat16)
    grad = jax.grad(lambda x: jnp.sum(lone_row_doubled(x, 0)[:1].astype(jnp.float32)))(x)
    np.testing.assert_array_equal(grad, np.ones((1, 4)))
