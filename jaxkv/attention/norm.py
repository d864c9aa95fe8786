# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square normalisation over channels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv.attention.projection import parameter
from jaxkv.core.numerics import Numerics


class RMSNorm(nnx.Module):
    """Divides by the root mean square of the last axis and multiplies by a learned scale.

    The result has the dtype of the input; what lies between is float32.

    Args:
      width: Channels of the last axis.
      axis: Logical name of that axis.
      epsilon: Added to the mean square.
      numerics: Formats.
      rngs: Takes one `params` key.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization" (arXiv:1910.07467),
    section 3.

    >>> norm = RMSNorm(2, "head_dim", numerics=Numerics(), rngs=nnx.Rngs(0))
    >>> norm(jnp.array([[3.0, 4.0]])).round(4).tolist()  # divided by (25 / 2) ** 0.5
    [[0.8485, 1.1314]]
    """

    def __init__(
        self, width: int, axis: str, *, epsilon: float = 1e-6, numerics: Numerics, rngs: nnx.Rngs
    ) -> None:
        ones = nnx.initializers.ones_init()
        self.scale = parameter(ones, rngs, (width,), numerics.param_dtype, (axis,))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises `[..., width]`."""
        wide = x.astype(jnp.float32)
        square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        scale = self.scale[...].astype(jnp.float32).reshape((1,) * (x.ndim - 1) + x.shape[-1:])
        return (wide * jax.lax.rsqrt(square + self.epsilon) * scale).astype(x.dtype)
