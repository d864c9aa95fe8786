# SPDX-License-Identifier: Apache-2.0
"""Number formats of a module, and the two helpers every matrix product goes through."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class Numerics:
    """States in which formats a module stores and computes.

    Args:
      dtype: Compute dtype; `None` means the dtype of the input.
      param_dtype: Storage dtype of parameters.
      precision: Passed to every matrix product, as in `jax.lax.dot_general`.
      implementation: Who computes attention over a call's own tokens, as in `ops.attention`.
    """

    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    precision: Any = None
    implementation: str | None = None

    def compute(self, x: jax.Array) -> jax.Array:
        """Casts an activation to the compute dtype."""
        return x if self.dtype is None else x.astype(self.dtype)


def pad_width(x: jax.Array, width: int) -> jax.Array:
    """Pads the last axis with zeros up to `width` channels."""
    missing = width - x.shape[-1]
    if missing == 0:
        return x
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])


def lone_row_doubled(x: jax.Array, axis: int) -> jax.Array:
    """Repeats a single 16-bit row, so that a product over it has two.

    XLA's CPU backend widens the whole other operand to float32 when a 16-bit product has one
    row (a matrix-vector product), which costs 3 to 7 times the product itself. Two rows take
    the matrix path; callers drop the second result. Elsewhere a second row is free.
    """
    if x.shape[axis] != 1 or x.dtype.itemsize != 2:
        return x
    return jnp.concatenate([x, x], axis=axis)
