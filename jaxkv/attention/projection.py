# SPDX-License-Identifier: Apache-2.0
"""A linear map between features and heads, with logical axes on its parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
from flax import nnx
from jax.typing import DTypeLike

from jaxkv.attention.options import Initializer
from jaxkv.core.numerics import Numerics
from jaxkv.core.products import project

KERNEL_INIT = nnx.initializers.lecun_normal()
BIAS_INIT = nnx.initializers.zeros_init()

Axes = Sequence[str | None]


def parameter(
    init: Initializer,
    rngs: nnx.Rngs,
    shape: Sequence[int],
    dtype: DTypeLike,
    axes: Axes,
    split: int | None = None,
) -> nnx.Param:
    """Draws a parameter that carries its logical axes as metadata `axes`.

    Args:
      init: `(key, shape, dtype) -> array`. With `split` it is called on the 2-D shape (fan-in,
        fan-out) that the first `split` and the other axes flatten to, so that the usual
        initialisers are right for kernels of any rank.
      rngs: Takes one `params` key.
      shape: Of the parameter.
      dtype: Of the parameter.
      axes: Logical name of each axis, or None.
      split: How many leading axes are inputs.

    Returns:
      The parameter.
    """
    drawn = tuple(shape)
    if split is not None:
        drawn = (math.prod(shape[:split]), math.prod(shape[split:]))
    value = init(rngs.params(), drawn, dtype).reshape(shape)
    return nnx.Param(value, axes=tuple(axes))


class Projection(nnx.Module):
    """Multiplies the last axes of an activation by a kernel, `[B, T, *in] -> [B, T, *out]`.

    Args:
      in_shape: Contracted sizes, for example `(D,)`.
      out_shape: Produced sizes, for example `(N, H)`.
      in_axes: Logical name of each contracted axis.
      out_axes: Logical name of each produced axis.
      use_bias: Add a bias of `out_shape`.
      numerics: Formats.
      kernel_init: Called on the flattened 2-D kernel.
      bias_init: Called on `out_shape`.
      rngs: Takes `params` keys.
    """

    def __init__(
        self,
        in_shape: Sequence[int],
        out_shape: Sequence[int],
        in_axes: Axes,
        out_axes: Axes,
        *,
        use_bias: bool = False,
        numerics: Numerics,
        kernel_init: Initializer = KERNEL_INIT,
        bias_init: Initializer = BIAS_INIT,
        rngs: nnx.Rngs,
    ) -> None:
        dtype = numerics.param_dtype
        shape, axes = (*in_shape, *out_shape), (*in_axes, *out_axes)
        self.kernel = parameter(kernel_init, rngs, shape, dtype, axes, split=len(in_shape))
        self.bias = parameter(bias_init, rngs, out_shape, dtype, out_axes) if use_bias else None
        self.inputs = len(in_shape)
        self.out_axes = tuple(out_axes)
        self.numerics = numerics

    def __call__(self, x: jax.Array) -> jax.Array:
        """Projects `[B, T, *in]` to `[B, T, *out]` in the compute dtype."""
        x = self.numerics.compute(x)
        kernel = self.kernel[...].astype(x.dtype)
        y = project(x, kernel, self.inputs, self.out_axes, self.numerics.precision)
        if self.bias is not None:
            bias = self.bias[...].astype(y.dtype)
            y = y + bias.reshape((1,) * (y.ndim - bias.ndim) + bias.shape)
        return y
