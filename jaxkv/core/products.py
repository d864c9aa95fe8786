# SPDX-License-Identifier: Apache-2.0
"""Products of activations with weights, which a decode step is made of."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv.core.sharding import current_mesh, out_sharding

# Rows up to which a CPU gets its own form, and rows that a product has there at least.
FEW_ROWS, LEAST_ROWS = 16, 4
# A part of a split contraction has at least so many channels: its rows of float32 results then
# weigh little beside its weights, and the repacked weights stay in a core's cache.
PART_CHANNELS = 64


def project(
    x: jax.Array, kernel: jax.Array, inputs: int, axes: Sequence[str | None], precision: Any = None
) -> jax.Array:
    """Multiplies activations by a kernel.

    XLA's CPU backend repacks bfloat16 weights before a product (with one row it widens all of
    them to float32), which takes longer than a product of a few rows. Such a product gets four
    rows at least there, and its contraction in parts that are repacked and used while they are
    in a core's cache; float32 sums join them. No weight is copied whole.

    Args:
      x: `[B, T, *in]`.
      kernel: `[*in, *out]`, of the same dtype.
      inputs: Number of axes in `in`.
      axes: Logical names of the axes of `out`.
      precision: As in `jax.lax.dot_general`.

    Returns:
      `[B, T, *out]`, of the same dtype.
    """
    leading = x.ndim - inputs
    if _few(x, leading):
        return _project_few(x, kernel, inputs, precision)
    contract = (tuple(range(leading, x.ndim)), tuple(range(inputs)))
    return _product(x, kernel, contract, ("batch", None, *axes), precision)


def unembed(x: jax.Array, table: jax.Array, precision: Any = None) -> jax.Array:
    """Scores every row of a table for activations, with four rows at least on CPU as in `project`.

    Args:
      x: `[B, T, D]`.
      table: `[vocab, D]`, of the same dtype.
      precision: As in `jax.lax.dot_general`.

    Returns:
      `[B, T, vocab]`, of the same dtype.
    """
    if _few(x, 2):
        return _unembed_few(x, table, precision)
    return _product(x, table, ((2,), (1,)), ("batch", None, "vocab"), precision)


def _few(x: jax.Array, leading: int) -> bool:
    """Says whether a CPU has its own form: a mesh has none, nor has a count that is symbolic."""
    rows = math.prod(x.shape[:leading])
    known = isinstance(rows, int) and current_mesh() is None
    return known and x.dtype == jnp.bfloat16 and 0 < rows <= FEW_ROWS


def _product(
    x: jax.Array, kernel: jax.Array, contract: Any, axes: Sequence[str | None], precision: Any
) -> jax.Array:
    inputs, summed = contract
    out = [n for axis, n in enumerate(kernel.shape) if axis not in summed]
    shape = (*x.shape[: x.ndim - len(inputs)], *out)
    return lax.dot_general(
        x,
        kernel,
        (contract, ((), ())),
        precision=precision,
        out_sharding=out_sharding(axes, shape),
    )


# Jitted, so that a call outside of `jax.jit` finds what the last one compiled.
@functools.partial(jax.jit, static_argnums=(2, 3), inline=True)
def _project_few(x: jax.Array, kernel: jax.Array, inputs: int, precision: Any) -> jax.Array:
    leading, out = x.shape[: x.ndim - inputs], kernel.shape[inputs:]
    rows, channels = math.prod(leading), math.prod(kernel.shape[:inputs])
    x, kernel = x.reshape(rows, channels), kernel.reshape(channels, math.prod(out))
    whole = functools.partial(lax.dot, precision=precision)
    parts = functools.partial(_in_parts, precision=precision)
    y = lax.platform_dependent(x, kernel, cpu=parts, default=whole)
    return y.reshape(*leading, *out)


@functools.partial(jax.jit, static_argnums=2, inline=True)
def _unembed_few(x: jax.Array, table: jax.Array, precision: Any) -> jax.Array:
    rows = x.reshape(-1, x.shape[-1])

    def scores(rows: jax.Array, table: jax.Array) -> jax.Array:
        return lax.dot_general(rows, table, (((1,), (1,)), ((), ())), precision=precision)

    def padded(rows: jax.Array, table: jax.Array) -> jax.Array:
        return scores(_at_least(rows), table)[: len(rows)]

    y = lax.platform_dependent(rows, table, cpu=padded, default=scores)
    return y.reshape(*x.shape[:-1], -1)


def _in_parts(x: jax.Array, kernel: jax.Array, precision: Any) -> jax.Array:
    """Multiplies `[M, I]` by `[I, O]` in parts of the contraction."""
    rows, channels = x.shape
    parts = part_count(channels)
    # Put together row by row: a transposed operand would make XLA widen all weights.
    x = _at_least(jnp.concatenate([row.reshape(parts, 1, -1) for row in x], axis=1))
    y = lax.dot_general(
        x,
        kernel.reshape(parts, channels // parts, -1),
        (((2,), (1,)), ((0,), (0,))),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    # XLA would add up within the product, which is slower.
    return jnp.sum(lax.optimization_barrier(y)[:, :rows], axis=0).astype(kernel.dtype)


def part_count(channels: int) -> int:
    """Counts the parts that a contraction is split in: equal ones of `PART_CHANNELS` or more.

    >>> part_count(576), part_count(1536), part_count(577)
    (9, 24, 1)
    """
    most = max(1, channels // PART_CHANNELS)
    return next(n for n in range(most, 0, -1) if channels % n == 0)


def _at_least(x: jax.Array) -> jax.Array:
    """Repeats rows `[..., M, I]` until there are `LEAST_ROWS`."""
    return jnp.tile(x, (-(-LEAST_ROWS // x.shape[-2]), 1))
