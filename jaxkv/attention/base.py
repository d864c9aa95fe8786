# SPDX-License-Identifier: Apache-2.0
"""What every attention module does; a variant states its record and its projections."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv.attention.options import ScoreOptions, written_out
from jaxkv.attention.placement import default_lanes, kv_replicas
from jaxkv.attention.tokens import (
    Tokens,
    cached_tokens,
    check_token_arguments,
    compacted,
    compacted_rows,
    emptied,
    restored,
    uncached_tokens,
)
from jaxkv.cache.codecs import Codec, Raw
from jaxkv.cache.contiguous import Contiguous
from jaxkv.cache.index import Layout, Plan
from jaxkv.cache.layer_cache import LayerCache, Scoring, create_layer
from jaxkv.cache.pairs import check_kinds
from jaxkv.cache.shared import SharedKV
from jaxkv.cache.spec import KVSpec
from jaxkv.core.numerics import Numerics
from jaxkv.core.rotary import Rotary
from jaxkv.core.trees import check_arrays, check_sizes
from jaxkv.core.visibility import Visibility
from jaxkv.ops.api import attention

# What modules attend to, by whether they read a context.
ATTENDED = ("its own tokens", "a context")


@dataclasses.dataclass(frozen=True)
class Call:
    """What one call adds to the tokens: masks, biases and dropout."""

    tokens: Tokens
    mask: jax.Array | None
    bias: jax.Array | None
    dropout_key: jax.Array | None


class Attention(nnx.Module):
    """Base of the variants.

    A self-attention variant gives `spec` (the record of a token), `queries` and `record` (those
    of new tokens) and, where its parts take several forms, its own `attend` and `attend_cached`.
    """

    # Whether it attends to a context instead of its own tokens.
    reads_context: ClassVar[bool] = False
    # The parameters that make records, which a reader of another module's does without.
    record_parameters: ClassVar[tuple[str, ...]] = ()
    # Whether it attends to keys and values that another module makes, see `reading`.
    reads_kv: bool = False
    spec: KVSpec
    in_features: int
    num_heads: int
    rule: Visibility
    rotary: Rotary | None
    score: ScoreOptions
    dropout_rate: float
    numerics: Numerics
    sink_logits: nnx.Param | None
    out: Any

    def __init_subclass__(cls, **options: Any) -> None:
        """Shows the constructor's arguments, which the metaclass hides, in `help` and editors."""
        super().__init_subclass__(**options)
        cls.__signature__ = written_out(cls.__init__)

    def reading(self) -> Self:
        """Makes this module read the keys and values of another one, and none of its own.

        The parameters that make them go; all others, and their names, stay. Where a cache is
        expected it is called with what the source's call returned, a `SharedKV`.

        Returns:
          The module itself.

        Raises:
          ValueError: If it does not tell which of its parameters make records.

        >>> from jaxkv import GroupedQueryAttention, SharedKV
        >>> source = GroupedQueryAttention(64, 8, rngs=nnx.Rngs(0))
        >>> reader = GroupedQueryAttention(64, 8, rngs=nnx.Rngs(1)).reading()
        >>> x, cache = jnp.ones((1, 3, 64)), source.init_cache(batch=1, capacity=16)
        >>> y, shared = source(x, cache=SharedKV(cache))  # without a cache: SharedKV()
        >>> z, shared = reader(y, cache=shared)
        >>> cache = shared.close()  # once all have read
        >>> cache.lengths.tolist(), cache.bytes_per_token
        ([3], 128)
        """
        if not self.record_parameters:
            raise ValueError(f"{type(self).__name__} cannot read another module's keys and values.")
        for name in self.record_parameters:
            setattr(self, name, None)
        self.reads_kv = True
        return self

    def queries(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Projects `x [B, T, D]` to queries, rotated at `positions`."""
        raise NotImplementedError

    def record(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Projects `x [B, T, D]` to keys, rotated at `positions`, and values."""
        raise NotImplementedError

    def project(
        self, x: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Projects `x [B, T, D]` to query, key and value, rotated at `positions`."""
        return self.queries(x, positions), *self.record(x, positions)

    def rotated(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Rotates `[B, T, heads, width]`, if this module has a rotation."""
        if self.rotary is None:
            return x
        with jax.named_scope("rotate"):
            return self.rotary.rotate(x, positions)

    @property
    def scale(self) -> float:
        """The factor on the scores."""
        if self.score.scale is not None:
            return self.score.scale
        return self.spec.query_width**-0.5

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
        """Attends: training without a cache; prefill, append and decode with one.

        Args:
          x: `[B, T, D]`.
          cache: Of this module, from `init_cache`; the tokens continue its rows. Donate it. To
            share keys and values, a `SharedKV` (see `reading`); which tokens are real is then for
            the source's call to say if there is a cache, and for every call if there is none.
          context: Only cross-attention takes one.
          context_lengths: Only cross-attention takes them.
          positions: int32 `[B|1, T]` for the rotation, in tokens; default: from the first real
            token of the row (or document), or from what the cache holds.
          segment_ids: int32 `[B, T]`; 0 is padding. Without a cache, tokens of different
            segments do not see each other (packing); a cached row is one sequence.
          lengths: int32 `[B]`, how many of the T tokens of each row are real.
          mask: bool, True = keep, `[S]`, `[T, S]` or `[B|1, N|1, T|1, S]`. S is T without a
            cache, and with one the row's capacity: keys are counted from the row's start.
          bias: Added to the scores; shapes as `mask`.
          deterministic: False switches dropout on (training; not with a cache).
          rngs: Gives a `dropout` key when dropout is on; never stored.

        Returns:
          `(y [B, T, out_features], cache)`; the cache is `None` if none was given, a `SharedKV`
          if one was.

        Raises:
          ValueError: At trace time, if anything does not fit; outside `jit` also if tokens do
            not fit the cache.
        """
        self._check_input(x)
        check_arrays(mask=mask, bias=bias)
        if context is not None or context_lengths is not None:
            raise ValueError(f"{type(self).__name__} takes no context: CrossAttention does.")
        B, T, _ = x.shape
        check_token_arguments(B, T, positions, segment_ids, lengths)
        if positions is not None and self.rotary is None:
            raise ValueError("positions are for the rotation: build with rotary=Rotary().")
        shared, stored = self._given(cache, x)
        key = self._dropout_key(deterministic, rngs, cached=stored is not None)
        x = self.numerics.compute(x)
        if stored is None:
            tokens = uncached_tokens(B, T, positions, segment_ids, lengths)
            query, k, v = self._projected(emptied(x, tokens), tokens.positions, shared)
            out = self.attend(query, k, v, Call(tokens, mask, bias, key))
            return self._output(out), None if shared is None else SharedKV(None, k, v, None, False)
        self.check_cache(stored, B)
        opened, plan = self._opened(stored, T, lengths, segment_ids)
        tokens = cached_tokens(plan, T, positions)
        with jax.named_scope("project"):
            x = emptied(compacted(x, plan), tokens)
            query, k, v = self._projected(x, tokens.positions, shared)
        rows = (compacted_rows(mask, plan), compacted_rows(bias, plan))
        out, settled = self.attend_cached(query, k, v, Call(tokens, *rows, None), opened)
        # A source decides for its readers what stays.
        waiting = (opened if self.reads_kv else settled).after(out)
        y = restored(self._output(out), plan)
        if shared is not None:
            return y, SharedKV(waiting, k, v, None, False)
        written = waiting.write(*waiting.replicated(k, v))
        return y, written if stored.plan is not None else written.close()

    def attend(
        self, query: jax.Array, key: jax.Array, value: jax.Array | None, call: Call
    ) -> jax.Array:
        """Attends without a cache: `[B, T, N, V]`."""
        if value is None:
            raise ValueError(f"{type(self).__name__} gives no value: it needs its own attend.")
        return attention(query, key, value, scale=self.scale, **self.options(call))

    def options(self, call: Call) -> dict[str, Any]:
        """Gathers the options of `ops.attention` for tokens that attend to one another."""
        tokens, options = call.tokens, self.shared_options(call)
        if tokens.segments is None:
            return options
        options |= dict(query_segments=tokens.segments, key_segments=tokens.segments)
        distances = self.rule.window is not None or options["alibi_slopes"] is not None
        if distances and not tokens.gapless:
            return options | dict(query_order=tokens.order, key_order=tokens.order)
        # What comes first is told by places too, which kernels want to know at trace time.
        return options

    def shared_options(self, call: Call) -> dict[str, Any]:
        """Gathers the options of `ops.attention` that do not depend on where tokens stand."""
        rule, given = self.rule, {}
        if call.dropout_key is not None:
            given = dict(dropout_rate=self.dropout_rate, dropout_key=call.dropout_key)
        return dict(
            causal=rule.causal,
            window=rule.window,
            pinned=rule.pinned,
            mask=call.mask,
            bias=call.bias,
            soft_cap=self.score.soft_cap,
            sink_logits=self._sinks(),
            alibi_slopes=self._slopes(),
            precision=self.numerics.precision,
            implementation=self.numerics.implementation,
            **given,
        )

    def attend_cached(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array | None,
        call: Call,
        cache: LayerCache,
    ) -> tuple[jax.Array, LayerCache]:
        """Attends to an open cache and the new tokens: `[B, T, N, V]`, and what they settle."""
        out, _, cache = cache.attend_both(
            query,
            key,
            value,
            self.scoring(),
            mask=call.mask,
            bias=call.bias,
            sink_logits=self._sinks(),
            alibi_slopes=self._slopes(),
            implementation=self.numerics.implementation,
        )
        return out.astype(query.dtype), cache

    def scoring(self) -> Scoring:
        """States how this module's scores are made."""
        return Scoring(self.rule, self.scale, self.score.soft_cap, self.numerics.precision)

    def init_cache(
        self,
        batch: int,
        capacity: int,
        *,
        layout: Layout | None = None,
        codec: Codec | None = None,
        lanes: int | None = None,
    ) -> LayerCache:
        """Makes an empty cache for this module.

        Args:
          batch: B, rows.
          capacity: Slots of each row, in tokens.
          layout: Where tokens go; default contiguous.
          codec: How records are stored; default the compute dtype.
          lanes: Minor widths are padded to a multiple of this; default 128 on TPU, else 1.

        Returns:
          The cache. On a mesh whose tensor axis has more devices than there are KV heads, each
          head is stored several times, which is logged.

        Raises:
          ValueError: If a size is not positive, keys rotated this way cannot be cached, or the
            layout does not keep what this module looks at.
        """
        check_sizes(capacity=capacity, lanes=lanes)
        if self.reads_kv:
            raise ValueError("this module reads another one's keys and values: that has the cache.")
        if self.rotary is not None:
            self.rotary.check_cacheable()
        check_kinds(layout, codec)
        layout = layout if layout is not None else Contiguous()
        layout.narrowed(self.rule)
        dtype = self.numerics.dtype if self.numerics.dtype is not None else jnp.float32
        return create_layer(
            self.spec,
            (codec if codec is not None else Raw()).resolve(dtype),
            batch,
            capacity,
            layout=layout,
            lanes=default_lanes() if lanes is None else lanes,
            replicas=kv_replicas(self.num_heads, self.spec.kv_heads, type(self).__name__),
            context=self.reads_context,
        )

    def check_cache(self, cache: LayerCache, batch: int) -> None:
        """Checks that a cache was made by a module like this one for `batch` rows.

        Raises:
          ValueError: Naming both records, or both batch sizes.
        """
        if not isinstance(cache, LayerCache):
            raise ValueError(f"cache is a {type(cache).__name__}: want a LayerCache of init_cache.")
        cache.check_alive()
        if cache.context != self.reads_context:
            raise ValueError(
                f"this cache belongs to another module: it holds {ATTENDED[cache.context]}, "
                f"{type(self).__name__} reads {ATTENDED[self.reads_context]}."
            )
        want = self.spec.replicated(cache.replicas)
        if cache.records.spec != want:
            raise ValueError(
                f"this cache belongs to another module: it holds {cache.records.spec}, "
                f"{type(self).__name__} stores {want}."
            )
        if self.num_heads % want.kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads cannot read {want.kv_heads} KV heads as stored on "
                "this mesh."
            )
        rows = cache.index.lengths.shape
        if rows != (batch,):
            raise ValueError(f"the cache has {rows} rows and x has {batch}: want the same.")

    def _given(
        self, cache: LayerCache | SharedKV | None, x: jax.Array
    ) -> tuple[SharedKV | None, LayerCache | None]:
        """Tells what is shared and what is stored; checks the former for `x [B, T, D]`."""
        name = type(self).__name__
        if not isinstance(cache, SharedKV):
            if self.reads_kv:
                raise ValueError(
                    f"this {name} reads another module's keys and values: pass as cache= the "
                    "SharedKV that the source's call returned."
                )
            return None, cache
        if self.reads_kv != (cache.context is not None):
            raise ValueError(
                f"this SharedKV holds no keys and values, which this {name} reads: call their "
                "source with it first."
                if self.reads_kv
                else f"this SharedKV holds the keys and values of another call than this {name}'s, "
                "which makes its own: close it, and begin a new one."
            )
        if cache.context not in (None, self.reads_context):
            kinds = ("a call's own tokens", "a context")
            raise ValueError(
                f"this SharedKV holds {kinds[cache.context]}: {name} reads "
                f"{kinds[self.reads_context]}."
            )
        if cache.key is None:
            return cache, cache.cache
        length = cache.key.shape[1] if self.reads_context else x.shape[1]
        want = (x.shape[0], length, self.spec.kv_heads, self.spec.query_width)
        apart = self.spec.value_offset is None
        value = (*want[:3], self.spec.value_width) if apart else None
        got = None if cache.value is None else cache.value.shape
        if (cache.key.shape, got) != (want, value):
            raise ValueError(
                f"shared keys {cache.key.shape} and values {got}: {name} reads {want} and {value}."
            )
        return cache, cache.cache

    def _projected(
        self, x: jax.Array, positions: jax.Array, shared: SharedKV | None
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Projects new tokens; a reader's keys and values are there already."""
        if shared is None or shared.key is None:
            return self.project(x, positions)
        return self.queries(x, positions), shared.key, shared.value

    def _opened(
        self,
        cache: LayerCache,
        length: int,
        lengths: jax.Array | None,
        segment_ids: jax.Array | None,
    ) -> tuple[LayerCache, Plan]:
        """Plans the step; a model that has opened it has also compacted its tokens."""
        if cache.plan is None:
            plan = cache.planned(length, lengths, segment_ids)
        else:  # a source has compacted its own tokens only
            order = cache.plan.order if self.reads_kv else None
            plan = dataclasses.replace(cache.plan, order=order)
        return dataclasses.replace(cache, plan=plan), plan

    def _output(self, out: jax.Array) -> jax.Array:
        with jax.named_scope("output"):
            return self.out(out)

    def _sinks(self) -> jax.Array | None:
        return None if self.sink_logits is None else self.sink_logits[...]

    def _slopes(self) -> jax.Array | None:
        slopes = self.score.slopes(self.num_heads)
        return None if slopes is None else jnp.asarray(slopes, jnp.float32)

    def _dropout_key(
        self, deterministic: bool, rngs: nnx.Rngs | None, cached: bool
    ) -> jax.Array | None:
        if deterministic or not self.dropout_rate:
            return None
        if cached:
            raise ValueError("dropout is for training: call with deterministic=True and a cache.")
        if rngs is None:
            raise ValueError("deterministic=False needs rngs=nnx.Rngs(dropout=key) in the call.")
        return rngs.dropout()

    def _check_input(self, x: jax.Array) -> None:
        check_arrays(x=x)
        if x.ndim != 3 or x.shape[-1] != self.in_features:
            raise ValueError(f"x {x.shape}: want [B, T, {self.in_features}].")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"x is {x.dtype}: want a float dtype.")
