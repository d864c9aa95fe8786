# SPDX-License-Identifier: Apache-2.0
"""Models small enough to be trained in a test."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv.attention import GroupedQueryAttention
from jaxkv.core.numerics import Numerics
from jaxkv.core.rotary import Rotary
from jaxkv.core.sharding import out_sharding
from jaxkv.models.decoder import Decoder

POISON = 255


class Bigram(nnx.Module):
    """Predicts a byte from the one before, with dropout between; compiles in no time.

    A `POISON` byte in the input makes the loss NaN.
    """

    vocab = 256

    def __init__(self, width: int = 4, *, rngs: nnx.Rngs, dropout_rate: float = 0.0) -> None:
        self.dropout_rate = dropout_rate
        init = nnx.initializers.normal(0.5)
        self.embedding = nnx.Param(init(rngs.params(), (256, width), jnp.float32))
        self.kernel = nnx.Param(init(rngs.params(), (width, 256), jnp.float32))

    def __call__(
        self,
        tokens: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
    ) -> tuple[jax.Array, None]:
        place = out_sharding(("batch", None, None), (*tokens.shape, 1))
        x = self.embedding[...].at[tokens].get(out_sharding=place)
        if self.dropout_rate and not deterministic:
            assert rngs is not None
            keep = jax.random.bernoulli(rngs.dropout(), 1 - self.dropout_rate, x.shape)
            x = jnp.where(keep, x / (1 - self.dropout_rate), 0.0)
        x = jnp.where(tokens[..., None] == POISON, jnp.nan, x)
        return x @ self.kernel[...], None


def decoder(*, width: int = 16, seed: int = 0, **options: Any) -> Decoder:
    """Makes a decoder of one layer with two heads."""
    numerics = options.get("numerics", Numerics())
    attention = functools.partial(
        GroupedQueryAttention,
        num_heads=2,
        rotary=None if options.get("max_positions") else Rotary(1e4),
        numerics=numerics,
        dropout_rate=options.pop("attention_dropout", 0.0),
    )
    options = {"mlp_features": 2 * width, "gated": False} | options
    return Decoder(256, width, 1, attention, rngs=nnx.Rngs(seed), **options)
