# SPDX-License-Identifier: Apache-2.0
"""Indices, divisions and slices whose numbers are known not to be negative.

JAX lets every index count from the end, and rounds every division down: a comparison, a sum and
a choice for each index of each slice, and ten operations for a quotient. Where indices count
slots, rows and blocks they are most of a small program, and most of the time it takes to compile.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

# What a number may be divided by, or a slice begin at: an int, a symbolic dimension, or a scalar.
Count = jax.Array | int


def quotient(x: jax.Array, n: Count) -> jax.Array:
    """Divides int32 numbers, none below 0, by a positive one, and rounds down.

    >>> quotient(jnp.array([0, 3, 4, 9]), 4).tolist()
    [0, 0, 1, 2]
    """
    return x if isinstance(n, int) and n == 1 else lax.div(x, jnp.full_like(x, n))


def quotient_up(x: jax.Array, n: Count) -> jax.Array:
    """Divides like `quotient`, and rounds up.

    >>> quotient_up(jnp.array([0, 3, 4, 9]), 4).tolist()
    [0, 1, 1, 3]
    """
    return quotient(x + (n - 1), n)


def remainder(x: jax.Array, n: Count) -> jax.Array:
    """Gives what `quotient` leaves; of a number below 0 (`Ring` has such), nothing above 0.

    >>> remainder(jnp.array([0, 3, 4, 9]), 4).tolist()
    [0, 3, 0, 1]
    """
    return jnp.zeros_like(x) if isinstance(n, int) and n == 1 else lax.rem(x, jnp.full_like(x, n))


def item(x: jax.Array, i: Count) -> jax.Array:
    """Takes number i of the first axis."""
    return lax.dynamic_index_in_dim(x, i, 0, keepdims=False, allow_negative_indices=False)


def items(x: jax.Array, at: jax.Array, axis: int = 0) -> jax.Array:
    """Takes numbers `at int32[n]`, each in range, of one axis."""
    picked = x.at[(slice(None),) * axis + (at,)]
    return picked.get(mode="promise_in_bounds", wrap_negative_indices=False)


def box(x: jax.Array, starts: Sequence[Count], sizes: Sequence[int]) -> jax.Array:
    """Slices a box that begins at `starts`."""
    return lax.dynamic_slice(x, starts, sizes, allow_negative_indices=False)


def put_box(x: jax.Array, new: jax.Array, starts: Sequence[Count]) -> jax.Array:
    """Puts a box where it begins at `starts`."""
    return lax.dynamic_update_slice(x, new, starts, allow_negative_indices=False)


def stretch(x: jax.Array, start: Count, size: int, axis: int = 0) -> jax.Array:
    """Slices `size` numbers of one axis."""
    return lax.dynamic_slice_in_dim(x, start, size, axis, allow_negative_indices=False)


def put_stretch(x: jax.Array, new: jax.Array, start: Count, axis: int = 0) -> jax.Array:
    """Puts numbers of one axis where they begin at `start`."""
    return lax.dynamic_update_slice_in_dim(x, new, start, axis, allow_negative_indices=False)
