# SPDX-License-Identifier: Apache-2.0
"""One layer of a model: attention and MLP, each after a norm and beside a residual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv.attention.base import Attention
from jaxkv.attention.norm import RMSNorm
from jaxkv.cache.layer_cache import LayerCache
from jaxkv.cache.shared import SharedKV
from jaxkv.core.numerics import Numerics
from jaxkv.models.mlp import MLP
from jaxkv.models.norm import LayerNorm

Norm = Literal["rms", "layer"]


class Block(nnx.Module):
    """One pre-norm layer: `x + attention(norm(x))`, then `x + mlp(norm(x))`.

    Args:
      features: D.
      attention: The attention module.
      mlp: The feed-forward module.
      make_norm: Called as `make_norm()` for each of the two norms.
      dropout_rate: Of both residual branches in training.
    """

    def __init__(
        self,
        attention: Attention,
        mlp: MLP,
        make_norm: Callable[[], nnx.Module],
        dropout_rate: float,
    ) -> None:
        self.attention_norm, self.mlp_norm = make_norm(), make_norm()
        self.attention, self.mlp = attention, mlp
        self.dropout_rate = dropout_rate

    def __call__(
        self,
        x: jax.Array,
        *,
        positions: jax.Array,
        tokens: dict[str, Any],
        context: dict[str, Any],
        cache: LayerCache | SharedKV | None = None,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Transforms `[B, T, D]`; dropout is on iff there is a key.

        `tokens` and `context` are what self- and cross-attention are told besides.
        """
        told = context if self.attention.reads_context else tokens
        if self.attention.rotary is not None:
            told = told | {"positions": positions}
        keys: list[Any] = [None] * 3
        if dropout_key is not None:
            keys = list(jax.random.split(dropout_key, 3))
        y, cache = self.attention(
            self.attention_norm(x),
            cache=cache,
            deterministic=dropout_key is None,
            rngs=None if keys[0] is None else nnx.Rngs(dropout=keys[0]),
            **told,
        )
        x = x + dropped(y, self.dropout_rate, keys[1])
        return x + dropped(self.mlp(self.mlp_norm(x)), self.dropout_rate, keys[2]), cache


def norm_maker(
    norm: Norm, features: int, epsilon: float, numerics: Numerics, rngs: nnx.Rngs
) -> Callable[[], nnx.Module]:
    """Chooses the norm of a model.

    Raises:
      ValueError: If the name is unknown.
    """
    common: dict[str, Any] = dict(epsilon=epsilon, numerics=numerics, rngs=rngs)
    makers: dict[str, Callable[[], nnx.Module]] = {
        "rms": lambda: RMSNorm(features, "embed", **common),
        "layer": lambda: LayerNorm(features, **common),
    }
    if norm not in makers:
        raise ValueError(f"norm {norm!r}: want one of {sorted(makers)}.")
    return makers[norm]


def dropped(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Drops a share `rate` of the channels in training, which is when there is a key."""
    if key is None or not rate:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros((), x.dtype))
