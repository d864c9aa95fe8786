# SPDX-License-Identifier: Apache-2.0
"""The feed-forward half of a block: gated or plain."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from jaxkv.attention.projection import Projection

# `gelu` is the exact one and `gelu_tanh` its approximation, as Hugging Face's configs name them.
ACTIVATIONS = {
    "silu": nnx.silu,
    "gelu": lambda x: nnx.gelu(x, approximate=False),
    "gelu_tanh": lambda x: nnx.gelu(x, approximate=True),
    "relu": nnx.relu,
}


class MLP(nnx.Module):
    """Applies `down(act(up(x)))`, or with a gate `down(act(gate(x)) * up(x))`.

    Args:
      features: D.
      width: Inner features.
      activation: A name of `ACTIVATIONS`.
      gated: With a gate (SwiGLU and relatives, arXiv:2002.05202, section 2).
      **options: Of `Projection`.

    Raises:
      ValueError: If the activation is unknown.
    """

    def __init__(
        self, features: int, width: int, *, activation: str, gated: bool, **options: Any
    ) -> None:
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation {activation!r}: want one of {sorted(ACTIVATIONS)}.")
        self.activation = activation
        inner = ((features,), (width,), ("embed",), ("mlp",))
        self.gate = Projection(*inner, **options) if gated else None
        self.up = Projection(*inner, **options)
        self.down = Projection((width,), (features,), ("mlp",), ("embed",), **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Transforms `[B, T, D]` token by token."""
        act = ACTIVATIONS[self.activation]
        if self.gate is None:
            return self.down(act(self.up(x)))
        return self.down(act(self.gate(x)) * self.up(x))
