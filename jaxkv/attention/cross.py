# SPDX-License-Identifier: Apache-2.0
"""Cross-attention: queries of one sequence over keys and values of another."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.attention.base import Call
from jaxkv.attention.heads import HeadAttention
from jaxkv.attention.options import HeadOptions, ScoreOptions
from jaxkv.attention.tokens import uncached_tokens
from jaxkv.cache.layer_cache import LayerCache
from jaxkv.cache.shared import SharedKV
from jaxkv.core.positions import orders
from jaxkv.core.trees import check_arrays, check_sizes, is_known
from jaxkv.ops.api import attention, check_lengths
from jaxkv.ops.merge import add_sink


class CrossAttention(HeadAttention):
    """Attends with N query heads over the K KV heads of a context, such as an encoder's output.

    Every query sees the whole context. A cache holds the context's keys and values: they are
    projected once, in the call that brings the context, and only read afterwards.

    Args:
      in_features: D.
      num_heads: N.
      context_features: Dc, width of the context; default D.
      num_kv_heads: K, a divisor of N; default N.
      **options: See `HeadOptions`; `rngs` is required. There is no causal rule, window,
        rotation or ALiBi.

    Raises:
      ValueError: If sizes do not fit, or an option means nothing here.

    Source: Vaswani et al. 2017, "Attention Is All You Need" (arXiv:1706.03762), section 3.2.3.

    >>> attn = CrossAttention(64, 8, context_features=48, rngs=nnx.Rngs(0))
    >>> x, context = jnp.ones((1, 3, 64)), jnp.ones((1, 10, 48))
    >>> y, cache = attn(x, context=context, cache=attn.init_cache(batch=1, capacity=10))
    >>> y, cache = attn(x[:, :1], cache=cache)  # the next step: reads only
    >>> y.shape, cache.lengths.tolist()
    ((1, 1, 64), [10])
    """

    reads_context: ClassVar[bool] = True

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        context_features: int | None = None,
        num_kv_heads: int | None = None,
        **options: Unpack[HeadOptions],
    ) -> None:
        for name in ("causal", "window", "rotary"):
            if options.get(name):
                raise ValueError(
                    f"{name}={options.get(name)}: queries and context are two sequences, so "
                    "cross-attention has no causal rule, window or rotation."
                )
        score = options.get("score")
        if isinstance(score, ScoreOptions) and score.alibi:
            raise ValueError(
                f"alibi={score.alibi}: queries and context are two sequences, so no token of one "
                "is at a distance from one of the other."
            )
        check_sizes(context_features=context_features)
        self.context_features = in_features if context_features is None else context_features
        super().__init__(
            in_features,
            num_heads,
            num_heads if num_kv_heads is None else num_kv_heads,
            context_features=self.context_features,
            **{**options, "causal": False},
        )

    def __call__(
        self,
        x: jax.Array,
        *,
        cache: LayerCache | SharedKV | None = None,
        context: jax.Array | None = None,
        context_lengths: jax.Array | None = None,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        lengths: jax.Array | None = None,
        mask: jax.Array | None = None,
        bias: jax.Array | None = None,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
    ) -> tuple[jax.Array, Any]:
        """Attends to a context, or to the one that a cache holds.

        Args:
          x: `[B, T, D]`.
          cache: Of this module, from `init_cache`. With a context, this is stored; without one,
            the cache is only read. To share a context's keys and values, a `SharedKV` (see
            `reading`): the source takes the context.
          context: `[B, S, Dc]`; needed without a cache.
          context_lengths: int32 `[B]`, how many of the S tokens of each row are real. A row of
            a cache that is given 0 tokens keeps what it holds.
          positions: Refused: there is no rotation.
          segment_ids: int32 `[B, T]`; 0 is padding.
          lengths: int32 `[B]`, how many of the T tokens of each row are real.
          mask: bool, True = keep, `[S]`, `[T, S]` or `[B|1, N|1, T|1, S]`; with a cache, S is
            the row's capacity.
          bias: Added to the scores; shapes as `mask`.
          deterministic: False switches dropout on (training; not with a cache).
          rngs: Gives a `dropout` key when dropout is on; never stored.

        Returns:
          `(y [B, T, out_features], cache)`; the cache is `None` if none was given, a `SharedKV`
          if one was.

        Raises:
          ValueError: At trace time, if anything does not fit; outside `jit` also if a row that
            holds a context is given another one, or if the context does not fit the cache.

        Overflow: under `jit`, a row that holds a context keeps it, tokens that do not fit are
        dropped, and `cache.overflowed` is set for both.
        """
        self._check_input(x)
        check_arrays(context=context, mask=mask, bias=bias)
        B, T, _ = x.shape
        if positions is not None:
            raise ValueError("positions: cross-attention has no rotation that they are for.")
        self._check_context(context, context_lengths, B)
        context = None if context is None else context.astype(x.dtype)
        shared, stored = self._given(cache, x)
        key = self._dropout_key(deterministic, rngs, cached=stored is not None)
        tokens = uncached_tokens(B, T, None, segment_ids, lengths)
        call = Call(tokens, mask, bias, key)
        if self.reads_kv and context is not None:
            raise ValueError("this CrossAttention reads what another one made of its context.")
        if stored is not None:
            self.check_cache(stored, B)
            if stored.plan is not None:
                raise ValueError(
                    "this cache has an open step, which cross-attention takes no part in."
                )
            stored = self._with_context(stored, context, context_lengths)
        with jax.named_scope("project"):
            query = self.project_query(self.numerics.compute(x))
        if stored is not None:
            y = self._output(self._attend_stored(query, stored, call))
            return y, stored if shared is None else SharedKV(stored, context=True)
        if shared is None or shared.key is None:
            record = SharedKV(None, *self._record_of(context), context_lengths, True)
        else:
            record = shared
        y = self._output(self._attend_record(query, record, call))
        return y, None if shared is None else record

    def _record_of(self, context: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Projects a context to keys and values."""
        if context is None:
            raise ValueError("cross-attention needs context=[B, S, Dc], or a cache that holds one.")
        with jax.named_scope("project"):
            return self.project_record(self.numerics.compute(context))

    def _attend_record(self, query: jax.Array, record: SharedKV, call: Call) -> jax.Array:
        """Attends to a context that no cache holds."""
        key, value = record.key, record.value
        assert key is not None
        assert value is not None
        options = self.shared_options(call)
        options["key_lengths"] = record.lengths
        if call.tokens.segments is not None:
            options["query_segments"] = (call.tokens.segments != 0).astype(jnp.int32)
            options["key_segments"] = jnp.ones(key.shape[:2], jnp.int32)
        return attention(query, key, value, scale=self.scale, **options)

    def _with_context(
        self, cache: LayerCache, context: jax.Array | None, lengths: jax.Array | None
    ) -> LayerCache:
        """Projects a context, if there is one, and stores it in the rows that are empty."""
        filled = cache.lengths > 0
        if context is None:
            if is_known(filled) and filled.size and not filled.any():
                raise ValueError("the cache holds no context yet: pass context=[B, S, Dc].")
            return cache
        B, S, _ = context.shape
        if lengths is None:
            lengths = jnp.full((B,), S, jnp.int32)
        refused = filled & (lengths > 0)
        if is_known(refused) and refused.any():
            raise ValueError(
                f"a new context, but rows {np.flatnonzero(refused).tolist()} of the cache hold "
                "one: reset those rows, or start from a fresh cache."
            )
        plan = cache.planned(S, jnp.where(filled, 0, lengths), None)
        after = dataclasses.replace(plan.after, overflowed=plan.after.overflowed | refused)
        record = self._record_of(context)
        opened = dataclasses.replace(cache, plan=dataclasses.replace(plan, after=after))
        return opened.write(*cache.replicated(*record)).close()

    def _attend_stored(self, query: jax.Array, cache: LayerCache, call: Call) -> jax.Array:
        B, T, N, _ = query.shape
        mask, bias = cache.checked(call.mask, call.bias, (B, N, T))
        order = jnp.broadcast_to(orders(T), (B, T))
        out, lse = cache.attend(query, self.scoring(), q_order=order, mask=mask, bias=bias)
        out, _ = add_sink(out, lse, self._sinks())
        if call.tokens.segments is not None:
            out = jnp.where(call.tokens.segments[:, :, None, None] != 0, out, 0.0)
        return out.astype(query.dtype)

    def _check_context(
        self, context: jax.Array | None, lengths: jax.Array | None, batch: int
    ) -> None:
        if context is None:
            if lengths is not None:
                raise ValueError("context_lengths without a context: pass both.")
            return
        if not jnp.issubdtype(context.dtype, jnp.floating):
            raise ValueError(f"context is {context.dtype}: want a float dtype.")
        if context.ndim != 3 or context.shape[::2] != (batch, self.context_features):
            raise ValueError(
                f"context {context.shape}: want [{batch}, S, {self.context_features}]."
            )
        if lengths is not None:
            check_lengths("context_lengths", lengths, context.shape[1], batch)
