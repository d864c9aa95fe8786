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

    Raises:
      ValueError: If a dtype is no float dtype.
    """

    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    precision: Any = None
    implementation: Any = None

    def __post_init__(self) -> None:
        for name in ("dtype", "param_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
                raise ValueError(f"{name}={dtype}: want a float dtype.")

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


@jax.custom_jvp
def exp_below(x: jax.Array) -> jax.Array:
    """Exponentiates numbers that are at most 0, but for rounding.

    A softmax subtracts the largest score. XLA may compute scores twice, in two parts of a program,
    and very large ones then differ by more than `exp` can take. The gradient is that of `exp`: the
    largest score, which may come out a hair above 0, keeps its own.
    """
    return jnp.exp(jnp.minimum(x, jnp.zeros((), x.dtype)))


@exp_below.defjvp
def _exp_below_tangent(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    y = exp_below(*primals)
    return y, y * tangents[0]
