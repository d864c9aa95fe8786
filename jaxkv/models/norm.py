# SPDX-License-Identifier: Apache-2.0
"""Layer normalisation over features."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv.attention.projection import parameter
from jaxkv.core.numerics import Numerics


class LayerNorm(nnx.Module):
    """Subtracts the mean of the last axis, divides by its deviation, scales and shifts.

    The result has the dtype of the input; what lies between is float32.

    Args:
      features: D.
      epsilon: Added to the variance.
      numerics: Formats.
      rngs: Takes two `params` keys.

    Source: Ba et al. 2016, "Layer Normalization" (arXiv:1607.06450), section 3.

    >>> norm = LayerNorm(2, epsilon=0.0, numerics=Numerics(), rngs=nnx.Rngs(0))
    >>> norm(jnp.array([[1.0, 5.0]])).tolist()
    [[-1.0, 1.0]]
    """

    def __init__(
        self, features: int, *, epsilon: float = 1e-6, numerics: Numerics, rngs: nnx.Rngs
    ) -> None:
        ones, zeros = nnx.initializers.ones_init(), nnx.initializers.zeros_init()
        dtype = numerics.param_dtype
        self.scale = parameter(ones, rngs, (features,), dtype, ("embed",))
        self.bias = parameter(zeros, rngs, (features,), dtype, ("embed",))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises `[..., D]`."""
        wide, shape = x.astype(jnp.float32), (1,) * (x.ndim - 1) + x.shape[-1:]
        # In two passes: the one-pass variance cancels badly for activations far from 0.
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        scale, bias = (p[...].astype(jnp.float32).reshape(shape) for p in (self.scale, self.bias))
        return (centred * jax.lax.rsqrt(variance + self.epsilon) * scale + bias).astype(x.dtype)
