# SPDX-License-Identifier: Apache-2.0
"""Orders, positions and compaction, against loops over tokens."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jaxkv.core.positions import (
    compaction,
    orders,
    segment_positions,
    segments_from_lengths,
    take_tokens,
)

ANY_SEGMENTS = arrays(np.int32, (2, 7), elements=st.integers(0, 3))


def counted(row):
    """Counts from the first token of each document; padding in between does not count."""
    positions, last, place = [], None, 0
    for segment in row:
        if segment == 0:
            positions.append(0)
            continue
        place = place + 1 if segment == last else 0
        positions.append(place)
        last = segment
    return positions


@hypothesis.given(ANY_SEGMENTS)
@hypothesis.example(np.array([[0] * 7, [3] * 7], np.int32))
@hypothesis.example(np.array([[0, 0, 1, 1, 1, 2, 0], [1, 0, 1, 2, 0, 2, 1]], np.int32))
def test_positions_count_the_tokens_of_a_document(segments):
    got = segment_positions(jnp.asarray(segments))
    assert got.dtype == jnp.int32
    assert got.tolist() == [counted(row) for row in segments.tolist()]


@hypothesis.given(ANY_SEGMENTS)
def test_compaction_puts_real_tokens_first_in_their_order(segments):
    order = compaction(jnp.asarray(segments))
    assert order.dtype == jnp.int32
    want = [
        [t for t in range(7) if row[t] != 0] + [t for t in range(7) if row[t] == 0]
        for row in segments.tolist()
    ]
    assert order.tolist() == want
    x = np.arange(2 * 7 * 3).reshape(2, 7, 3)
    moved = take_tokens(jnp.asarray(x), order)
    np.testing.assert_array_equal(moved, [row[o] for row, o in zip(x, want, strict=True)])
    back = take_tokens(moved, jnp.argsort(order, axis=1))
    np.testing.assert_array_equal(back, x)


def test_take_tokens_works_on_any_rank():
    order = jnp.array([[2, 0, 1]])
    assert take_tokens(jnp.array([[5, 6, 7]]), order).tolist() == [[7, 5, 6]]
    deep = take_tokens(jnp.arange(12).reshape(1, 3, 2, 2), order)
    assert deep[0, :, 0, 0].tolist() == [8, 0, 4]


@pytest.mark.parametrize("length", [0, 1, 4])
def test_orders_count_from_0(length):
    got = orders(length)
    assert got.shape == (1, length) and got.dtype == jnp.int32
    assert got[0].tolist() == list(range(length))


def test_segments_from_lengths_mark_the_first_tokens():
    got = segments_from_lengths(jnp.array([0, 1, 3, -1]), 3)
    assert got.dtype == jnp.int32
    assert got.tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]]


@pytest.mark.parametrize("shape", [(2, 0), (0, 3)])
def test_no_tokens_and_no_rows(shape):
    segments = jnp.zeros(shape, jnp.int32)

    @jax.jit
    def run(segments):
        order = compaction(segments)
        return segment_positions(segments), take_tokens(segments, order)

    assert [x.shape for x in run(segments)] == [shape, shape]
