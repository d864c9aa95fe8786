# SPDX-License-Identifier: Apache-2.0
"""Attention whose record is one key and one value for each KV head."""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

import jax
from flax import nnx

from jaxkv.attention.base import Attention
from jaxkv.attention.norm import RMSNorm
from jaxkv.attention.options import HeadOptions, ScoreOptions, check_options
from jaxkv.attention.projection import BIAS_INIT, KERNEL_INIT, Projection, parameter
from jaxkv.cache.spec import KVSpec
from jaxkv.core.numerics import Numerics
from jaxkv.core.trees import check_sizes
from jaxkv.core.visibility import Visibility


class HeadAttention(Attention):
    """Attention of N query heads over K KV heads; its variants choose K.

    Args:
      in_features: D.
      num_heads: N.
      num_kv_heads: K, a divisor of N.
      context_features: Width of what keys and values are made of; default D.
      **options: See `HeadOptions`.

    Raises:
      ValueError: If sizes do not fit.
    """

    record_parameters: ClassVar[tuple[str, ...]] = ("key", "value", "key_norm")

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int,
        /,
        *,
        context_features: int | None = None,
        **options: Unpack[HeadOptions],
    ) -> None:
        check_options(options)
        check_sizes(in_features=in_features, num_heads=num_heads, context_features=context_features)
        check_heads(num_heads, num_kv_heads)
        given = options.get
        head_dim = given("head_dim") or default_head_dim(in_features, num_heads)
        value_dim = given("value_dim") or head_dim
        self.in_features, self.num_heads = in_features, num_heads
        self.spec = KVSpec(num_kv_heads, head_dim, value_dim)
        self.score = given("score") or ScoreOptions()
        self.score.slopes(num_heads)  # are there as many as heads?
        self.rule = Visibility(given("causal", True), given("window"), self.score.pinned)
        self.rotary = given("rotary")
        if self.rotary is not None:
            self.rotary.width(head_dim)
        self.dropout_rate = check_rate(given("dropout_rate", 0.0))
        self.numerics = given("numerics") or Numerics()

        context = context_features if context_features is not None else in_features
        self._make_parameters(context, options)

    def _make_parameters(self, context_features: int, options: HeadOptions) -> None:
        rngs, bias, given = required_rngs(options), options.get("use_bias", False), options.get
        D, N, spec = self.in_features, self.num_heads, self.spec
        common: dict[str, Any] = dict(
            numerics=self.numerics,
            kernel_init=given("kernel_init") or KERNEL_INIT,
            bias_init=given("bias_init") or BIAS_INIT,
            rngs=rngs,
        )
        self.query, self.key, self.value = (
            Projection(
                (features,),
                (heads, width),
                ("embed",),
                (axis, "head_dim"),
                use_bias=bool(bias),
                **common,
            )
            for features, heads, width, axis in (
                (D, N, spec.key_width, "heads"),
                (context_features, spec.kv_heads, spec.key_width, "kv_heads"),
                (context_features, spec.kv_heads, spec.value_width, "kv_heads"),
            )
        )
        self.out = Projection(
            (N, spec.value_width),
            (given("out_features") or D,),
            ("heads", "head_dim"),
            ("embed",),
            use_bias=bias is True,
            **common,
        )
        self.query_norm, self.key_norm = (
            RMSNorm(spec.key_width, "head_dim", numerics=self.numerics, rngs=rngs)
            if self.score.qk_norm
            else None
            for _ in range(2)
        )
        self.sink_logits = sink_parameter(self.score, N, self.numerics, rngs)

    def queries(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Projects `x [B, T, D]` to queries `[B, T, N, H]`, rotated."""
        return self.rotated(self.project_query(x), positions)

    def record(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Projects `x [B, T, D]` to keys `[B, T, K, H]`, rotated, and values `[B, T, K, V]`."""
        key, value = self.project_record(x)
        return self.rotated(key, positions), value

    def project_query(self, x: jax.Array) -> jax.Array:
        """Projects `x [B, T, D]` to queries `[B, T, N, H]`, not rotated."""
        query = self.query(x)
        return query if self.query_norm is None else self.query_norm(query)

    def project_record(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Projects `[B, T, D]` to keys `[B, T, K, H]`, not rotated, and values `[B, T, K, V]`."""
        key = self.key(x)
        return key if self.key_norm is None else self.key_norm(key), self.value(x)


def check_heads(num_heads: int, num_kv_heads: int) -> None:
    """Checks that query heads divide over KV heads.

    Raises:
      ValueError: Naming both numbers.
    """
    whole = isinstance(num_kv_heads, int)
    if not whole or not 1 <= num_kv_heads <= num_heads or num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads cannot share {num_kv_heads} KV heads: want a divisor of "
            f"{num_heads}."
        )


def default_head_dim(in_features: int, num_heads: int) -> int:
    """Divides the model width over the heads.

    Raises:
      ValueError: If it does not divide.
    """
    if num_heads < 1 or in_features % num_heads:
        raise ValueError(
            f"in_features={in_features} does not divide over {num_heads} heads: pass head_dim."
        )
    return in_features // num_heads


def check_rate(rate: float) -> float:
    """Checks a dropout rate."""
    if not 0 <= rate < 1:
        raise ValueError(f"dropout_rate={rate}: want 0 <= rate < 1.")
    return rate


def required_rngs(options: HeadOptions) -> nnx.Rngs:
    """Takes `rngs` out of the options."""
    rngs = options.get("rngs")
    if rngs is None:
        raise ValueError("rngs is missing: want nnx.Rngs(seed) to draw the parameters.")
    return rngs


def sink_parameter(
    score: ScoreOptions, num_heads: int, numerics: Numerics, rngs: nnx.Rngs
) -> nnx.Param | None:
    """Makes the learned sink logit of each head, if wanted."""
    if not score.sink_logits:
        return None
    zeros = nnx.initializers.zeros_init()
    return parameter(zeros, rngs, (num_heads,), numerics.param_dtype, ("heads",))
