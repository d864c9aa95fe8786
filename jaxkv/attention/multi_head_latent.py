# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention: one compressed latent per token stands for all heads."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal, Unpack, get_args

import jax
import jax.numpy as jnp

from jaxkv.attention.base import Attention, Call
from jaxkv.attention.heads import (
    check_rate,
    default_head_dim,
    required_rngs,
    sink_parameter,
)
from jaxkv.attention.latent_view import ExpandedHeads, LatentWeights, absorb, expand, unabsorb
from jaxkv.attention.norm import RMSNorm
from jaxkv.attention.options import HeadOptions, ScoreOptions, check_options
from jaxkv.attention.projection import BIAS_INIT, KERNEL_INIT, Projection, parameter
from jaxkv.cache.layer_cache import LayerCache
from jaxkv.cache.spec import KVSpec
from jaxkv.core.numerics import Numerics
from jaxkv.core.trees import check_sizes
from jaxkv.core.visibility import Visibility
from jaxkv.ops.api import attention

Form = Literal["expanded", "absorbed"]


@dataclasses.dataclass(frozen=True)
class LatentOptions:
    """Sizes of latent attention, and the form it computes in.

    Args:
      latent_dim: C, width of the cached latent; default 4 x head_dim (DeepSeek's ratio).
      rope_dim: R, width of the rotated key part that all heads share; default head_dim / 2,
        made even.
      query_latent_dim: Width that queries are compressed to; `None` does not compress them.
      form: "expanded" makes keys and values of every head, "absorbed" moves the queries into the
        latent space; `None` takes the cheaper one for the number of new tokens.
      norm_epsilon: Of the latents' RMS norms.
    """

    latent_dim: int | None = None
    rope_dim: int | None = None
    query_latent_dim: int | None = None
    form: Form | None = None
    norm_epsilon: float = 1e-6

    def __post_init__(self) -> None:
        if self.form not in (None, *get_args(Form)):
            raise ValueError(f"form={self.form!r}: want one of {get_args(Form)}, or None.")


class MultiHeadLatentAttention(Attention):
    """Attends through a latent of C channels and a shared rotary key of R channels.

    The cache keeps C + R numbers per token, whatever the number of heads. H (`head_dim`) is the
    key width without the rotated part.

    Args:
      in_features: D.
      num_heads: N.
      latent: Sizes and form.
      **options: See `HeadOptions`; `rngs` is required.

    Raises:
      ValueError: If sizes do not fit.

    Numerics: the default scale is `(H + R) ** -0.5`, times YaRN's squared `mscale_all_dim` factor.

    Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1; DeepSeek-V3 (arXiv:2412.19437), 2.1.1.

    >>> from flax import nnx
    >>> attn = MultiHeadLatentAttention(64, 8, rngs=nnx.Rngs(0))
    >>> attn.init_cache(batch=1, capacity=16).bytes_per_token  # (4 x 8 + 4) x 4 bytes
    144
    """

    record_parameters: ClassVar[tuple[str, ...]] = ("latent_down", "latent_norm")

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        latent: LatentOptions | None = None,
        **options: Unpack[HeadOptions],
    ) -> None:
        check_options(options)
        given = options.get
        latent = latent if latent is not None else LatentOptions()
        check_sizes(
            in_features=in_features,
            num_heads=num_heads,
            latent_dim=latent.latent_dim,
            rope_dim=latent.rope_dim,
            query_latent_dim=latent.query_latent_dim,
        )
        head_dim = given("head_dim") or default_head_dim(in_features, num_heads)
        value_dim = given("value_dim") or head_dim
        C, R = latent.latent_dim or 4 * head_dim, latent.rope_dim or max(2, head_dim // 4 * 2)
        self.in_features, self.num_heads = in_features, num_heads
        self.head_dim, self.value_dim, self.latent = head_dim, value_dim, latent
        self.spec = KVSpec(1, C + R, C, value_offset=0)
        self.score = given("score") or ScoreOptions()
        self.score.slopes(num_heads)  # are there as many as heads?
        if self.score.qk_norm:
            raise ValueError("qk_norm: latent attention normalises its latents instead.")
        self.rule = Visibility(given("causal", True), given("window"), self.score.pinned)
        self.rotary = given("rotary")
        if self.rotary is not None:
            self.rotary.width(R)
        self.dropout_rate = check_rate(given("dropout_rate", 0.0))
        self.numerics = given("numerics") or Numerics()
        self._make_parameters(C, R, options)

    def _make_parameters(self, C: int, R: int, options: HeadOptions) -> None:
        rngs, bias = required_rngs(options), options.get("use_bias", False)
        D, N, H, V = self.in_features, self.num_heads, self.head_dim, self.value_dim
        kernel_init = options.get("kernel_init") or KERNEL_INIT
        common: dict[str, Any] = dict(
            numerics=self.numerics,
            kernel_init=kernel_init,
            bias_init=options.get("bias_init") or BIAS_INIT,
            rngs=rngs,
        )
        narrow = self.latent.query_latent_dim
        norm: dict[str, Any] = dict(
            epsilon=self.latent.norm_epsilon, numerics=self.numerics, rngs=rngs
        )
        heads = ("heads", "head_dim")
        if narrow is None:
            self.query = Projection(
                (D,), (N, H + R), ("embed",), heads, use_bias=bool(bias), **common
            )
        else:
            self.query_down = Projection(
                (D,), (narrow,), ("embed",), ("latent",), use_bias=bool(bias), **common
            )
            self.query_latent_norm = RMSNorm(narrow, "latent", **norm)
            self.query_up = Projection((narrow,), (N, H + R), ("latent",), heads, **common)
        self.latent_down = Projection(
            (D,), (C + R,), ("embed",), ("latent",), use_bias=bool(bias), **common
        )
        self.latent_norm = RMSNorm(C, "latent", **norm)
        dtype = self.numerics.param_dtype
        up = ("latent", "heads", "head_dim")
        self.key_up = parameter(kernel_init, rngs, (C, N, H), dtype, up, split=1)
        self.value_up = parameter(kernel_init, rngs, (C, N, V), dtype, up, split=1)
        width = options.get("out_features") or D
        self.out = Projection((N, V), (width,), heads, ("embed",), use_bias=bias is True, **common)
        self.sink_logits = sink_parameter(self.score, N, self.numerics, rngs)

    @property
    def scale(self) -> float:
        """The factor on the scores: of the whole key width, never of the latent's."""
        if self.score.scale is not None:
            return self.score.scale
        R = self.spec.key_width - self.spec.value_width
        mscale = self.rotary.score_mscale() if self.rotary is not None else 1.0
        return (self.head_dim + R) ** -0.5 * mscale

    def queries(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Projects `x [B, T, D]` to queries `[B, T, N, H + R]`, of which R are rotated."""
        H = self.head_dim
        if self.latent.query_latent_dim is None:
            query = self.query(x)
        else:
            query = self.query_up(self.query_latent_norm(self.query_down(x)))
        turned = self.rotated(query[..., H:], positions)
        return jnp.concatenate([query[..., :H], turned], axis=-1)

    def record(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, None]:
        """Projects `x [B, T, D]` to records `[B, T, 1, C + R]`, which hold the values."""
        C, down = self.spec.value_width, self.latent_down(x)
        latent, shared = self.latent_norm(down[..., :C])[:, :, None], down[:, :, None, C:]
        return jnp.concatenate([latent, self.rotated(shared, positions)], axis=-1), None

    def form(self, length: int, cached: bool) -> Form:
        """Chooses how T = `length` new tokens are attended.

        Per key, the absorbed form costs T N (2C + R) multiplications and the expanded one
        C N (H + V) to make the heads and T N (H + R + V) to use them.
        """
        if self.latent.form is not None:
            return self.latent.form
        C, widths = self.spec.value_width, self.head_dim + self.value_dim
        saved = length * (2 * C - widths)
        return "expanded" if not cached or saved > C * widths else "absorbed"

    def attend(
        self, query: jax.Array, key: jax.Array, value: jax.Array | None, call: Call
    ) -> jax.Array:
        """Attends without a cache: `[B, T, N, V]`."""
        weights, options = self._weights(query), self.options(call)
        if self.form(query.shape[1], cached=False) == "expanded":
            k, v = expand(weights, key)
            return attention(query, k, v, scale=self.scale, **options)
        latent = key[..., : self.spec.value_width]
        out = attention(absorb(weights, query), key, latent, scale=self.scale, **options)
        return unabsorb(weights, out)

    def attend_cached(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array | None,
        call: Call,
        cache: LayerCache,
    ) -> tuple[jax.Array, LayerCache]:
        """Attends to an open cache and the new tokens: `[B, T, N, V]`."""
        T, weights = query.shape[1], self._weights(query)
        if self.form(T, cached=True) == "absorbed":
            moved = absorb(weights, query)
            out, cache = super().attend_cached(moved, key, None, call, cache)
            return unabsorb(weights, out), cache
        return self._attend_expanded(query, key, weights, call, cache)

    def _attend_expanded(
        self,
        query: jax.Array,
        key: jax.Array,
        weights: LatentWeights,
        call: Call,
        cache: LayerCache,
    ) -> tuple[jax.Array, LayerCache]:
        B, T, N, _ = query.shape
        scoring = self.scoring()
        record, _ = cache.seen_through_codec(key, None)
        mask, bias = cache.checked(call.mask, call.bias, (B, N, T))
        R = self.spec.key_width - self.spec.value_width
        view = ExpandedHeads(self.head_dim + R, self.value_dim, str(query.dtype))
        q_order, _ = cache.new_orders(T)
        added: dict[str, Any] = dict(mask=mask, bias=bias, alibi_slopes=self._slopes())
        viewed: dict[str, Any] = dict(view=view, weights=weights)
        old = cache.attend(query, scoring, q_order=q_order, **added, **viewed)
        k, v = expand(weights, record)
        new = cache.attend_new(
            query, k, v, scoring, **added, implementation=self.numerics.implementation
        )
        out, lse = cache.joined([old, new], self._sinks())
        settled = cache.settled(query, k, lse, scoring, alibi_slopes=self._slopes(), **viewed)
        return out.astype(query.dtype), settled

    def _weights(self, like: jax.Array) -> LatentWeights:
        key_up, value_up = self.key_up[...], self.value_up[...]
        return LatentWeights(key_up.astype(like.dtype), value_up.astype(like.dtype))
