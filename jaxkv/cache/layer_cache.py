# SPDX-License-Identifier: Apache-2.0
"""The cache of one attention layer: what a module is handed and gives back."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv.cache.codecs import Codec
from jaxkv.cache.contiguous import Contiguous
from jaxkv.cache.grouped import Grouped
from jaxkv.cache.index import Fill, Index, Jobs, Layout, Plan, index_axes, plan_axes
from jaxkv.cache.pairs import check_kinds, check_pair
from jaxkv.cache.plans import marked, plan_step
from jaxkv.cache.read import BlockView, Reading
from jaxkv.cache.records import Records, create_records
from jaxkv.cache.residual import read_stored, write_stored
from jaxkv.cache.settling import Attended, settle
from jaxkv.cache.spec import KVSpec
from jaxkv.cache.verbs import Verbs
from jaxkv.cache.write import zero_after
from jaxkv.core.sharding import local
from jaxkv.core.trees import static
from jaxkv.core.visibility import Visibility
from jaxkv.ops.api import Choice, as_bias, as_mask, attention, head_axis
from jaxkv.ops.merge import add_sink, merge


@dataclasses.dataclass(frozen=True)
class Scoring:
    """How scores are made: the static options of one attention call over a cache."""

    rule: Visibility
    scale: float
    soft_cap: float | None = None
    precision: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class LayerCache(Verbs):
    """Records of one layer with the index of its rows, and the open plan of a step.

    `context` marks one that holds a context (of cross-attention): a model's steps read it and
    never extend it.

    Donate it: `jax.jit(step, donate_argnums=...)` writes it in place, and the one that was
    passed in is gone.
    """

    index: Index
    records: Records
    plan: Plan | None
    layout: Layout = static()
    replicas: int = static()
    context: bool = static()

    def _parts(self) -> Any:
        return (self.layout,), (self.index,), (self.records,), (0,)

    def _rebuilt(
        self,
        indices: tuple[Index, ...],
        layers: tuple[Records, ...],
        layouts: tuple[Layout, ...] | None = None,
        groups: tuple[int, ...] | None = None,
    ) -> LayerCache:
        del groups
        layout = self.layout if layouts is None else layouts[0]
        return dataclasses.replace(self, index=indices[0], records=layers[0], layout=layout)

    def open(
        self, length: int, lengths: jax.Array | None = None, segment_ids: jax.Array | None = None
    ) -> LayerCache:
        """Plans this call's T = `length` tokens, unless a model has done so for its layers."""
        if self.plan is not None:
            return self
        return dataclasses.replace(self, plan=self.planned(length, lengths, segment_ids))

    def planned(
        self, length: int, lengths: jax.Array | None, segment_ids: jax.Array | None
    ) -> Plan:
        """Makes the plan of one step."""
        return plan_step(self._groups(), length, lengths, segment_ids)[0]

    def close(self) -> LayerCache:
        """Ends the step: the index moves on."""
        return dataclasses.replace(self, index=self._opened().after, plan=None)

    def after_step(self) -> Index:
        """Tells the index once the model's step is done, of which a context takes no part."""
        return self.index if self.plan is None else self.plan.after

    def new_orders(self, length: int) -> tuple[jax.Array, jax.Array]:
        """Gives order int32 `[B, T]` and reality bool `[B, T]` of this call's tokens."""
        plan = self._opened()
        token = jnp.arange(length, dtype=jnp.int32)[None]
        return plan.start[:, None] + token, token < plan.count[:, None]

    def attend(
        self,
        query: jax.Array,
        scoring: Scoring,
        *,
        q_order: jax.Array,
        mask: jax.Array | None = None,
        bias: jax.Array | None = None,
        view: BlockView | None = None,
        weights: Any = None,
        alibi_slopes: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Attends to the tokens that are stored, before any write of this step.

        Args:
          query: `[B, T, N, H]`.
          scoring: Rule, scale and so on.
          q_order: int32 `[B, T]`.
          mask: bool `[B|1, N|1, T|1, S]` by order of the key.
          bias: float, same shape.
          view: Another form of the records (MLA: expanded heads), or `None`.
          weights: The view's arrays.
          alibi_slopes: `[N]`; scores fall with the distance of the orders.

        Returns:
          `(out float32[B, T, N, V], lse float32[B, T, N])`.
        """
        r, how = self.records, self._reading(query, scoring, view)
        heads = head_axis(r.spec.kv_heads)

        scores = ("batch", heads, None, None)
        in_axes = (
            ("batch", None, heads),
            self._plane_axes(heads, r.axes()),
            self._plane_axes(heads, r.rest_axes()),
            index_axes(self.layout, heads),
            ("batch",),
            scores,
            scores,
            view.weight_axes if view is not None else (),
            (heads,),
        )
        out_axes = (("batch", None, heads), ("batch", None, heads))
        args = (query, r.planes, r.rest, self.index, q_order, mask, bias, weights, alibi_slopes)
        return local(functools.partial(read_stored, how), in_axes, out_axes)(*args)

    def write(self, key: jax.Array, value: jax.Array | None) -> LayerCache:
        """Stores this step's tokens: key `[B, T, K, H + shared]`, value `[B, T, K, V]` or None."""
        r, plan = self.records, self._opened()
        if key.size == 0:  # no rows or no tokens
            return self
        heads, tokens = head_axis(r.spec.kv_heads), self._token_axes()
        axes = (self._plane_axes(heads, r.axes()), self._plane_axes(heads, r.rest_axes()))
        in_axes = (*axes, tokens, tokens, plan_axes(self.layout, heads))
        stored = functools.partial(write_stored, r.spec, r.codec, self.layout, r.whole_slots)
        planes, rest = local(stored, in_axes, axes)(r.planes, r.rest, key, value, plan)
        return dataclasses.replace(self, records=dataclasses.replace(r, planes=planes, rest=rest))

    def extend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array | None,
        scoring: Scoring,
        *,
        mask: jax.Array | None = None,
        bias: jax.Array | None = None,
        sink_logits: jax.Array | None = None,
        alibi_slopes: jax.Array | None = None,
        implementation: Choice = None,
    ) -> tuple[jax.Array, jax.Array, LayerCache]:
        """Attends to stored and new tokens, then stores the new ones.

        Args:
          query: `[B, T, N, H]` (H with the shared part).
          key: `[B, T, K, H]`, rotated.
          value: `[B, T, K, V]`, or `None` if it lies in the key.
          scoring: Rule, scale and so on.
          mask: bool, broadcastable to `[B, N, T, S]`, by order of the key.
          bias: float, likewise.
          sink_logits: `[N]` or `None`.
          alibi_slopes: `[N]` or `None`.
          implementation: Of the new tokens' part.

        Returns:
          `(out float32[B, T, N, V], lse float32[B, T, N], cache)`; padding gives 0 and -inf.
        """
        cache = self.open(query.shape[1])
        out, lse, cache = cache.attend_both(
            query,
            key,
            value,
            scoring,
            mask=mask,
            bias=bias,
            sink_logits=sink_logits,
            alibi_slopes=alibi_slopes,
            implementation=implementation,
        )
        written = cache.after(out).write(*cache.replicated(key, value))
        return out, lse, written if self.plan is not None else written.close()

    def attend_both(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array | None,
        scoring: Scoring,
        *,
        mask: jax.Array | None = None,
        bias: jax.Array | None = None,
        sink_logits: jax.Array | None = None,
        alibi_slopes: jax.Array | None = None,
        implementation: Choice = None,
    ) -> tuple[jax.Array, jax.Array, LayerCache]:
        """Attends to stored and new tokens as `extend` does, in an open step, and stores none.

        Returns:
          What `extend` returns; in the cache, what will be stored is settled.
        """
        B, T, N, _ = query.shape
        query = self.emptied(query)
        # What is stored is encoded once, from what was given: rounding twice moves it again.
        seen = self.seen_through_codec(*self.replicated(key, value))
        mask, bias = self.checked(mask, bias, (B, N, T))
        q_order, _ = self.new_orders(T)
        added: dict[str, Any] = dict(mask=mask, bias=bias, alibi_slopes=alibi_slopes)
        old = self.attend(query, scoring, q_order=q_order, **added)
        new = self.attend_new(query, *seen, scoring, **added, implementation=implementation)
        out, lse = self.joined([old, new], sink_logits)
        settled = self.settled(query, seen[0], lse, scoring, alibi_slopes=alibi_slopes)
        return out, lse, settled

    def emptied(self, query: jax.Array) -> jax.Array:
        """Zeroes padding in `query [B, T, N, H]`: rubbish there must not reach a gradient."""
        _, real = self.new_orders(query.shape[1])
        tokens = ("batch", None, head_axis(self.records.spec.kv_heads))

        def kept(query: jax.Array, real: jax.Array) -> jax.Array:
            return jnp.where(real[:, :, None, None], query, jnp.zeros((), query.dtype))

        return local(kept, (tokens, ("batch",)), tokens)(query, real)

    def seen_through_codec(
        self, key: jax.Array, value: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Passes new tokens through the codec, so that results do not depend on chunking.

        One that encodes whole groups stores new tokens as they are, in its residual's dtype.
        """
        r, tokens = self.records, self._token_axes()
        codec = r.codec.newest if isinstance(r.codec, Grouped) else r.codec

        def through(key: jax.Array, value: jax.Array | None) -> tuple[jax.Array, jax.Array]:
            if value is None:
                first = r.spec.value_offset or 0
                value = key[..., first : first + r.spec.value_width]
            return _rounded(r.spec, codec, key, value)

        return local(through, (tokens, tokens), tokens)(key, value)

    def attend_new(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        scoring: Scoring,
        *,
        mask: jax.Array | None = None,
        bias: jax.Array | None = None,
        alibi_slopes: jax.Array | None = None,
        implementation: Choice = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Attends to this call's own tokens; mask, bias and slopes as in `attend`."""
        T, plan, rule = query.shape[1], self._opened(), self.layout.narrowed(scoring.rule)
        if rule.pinned:
            q_order, real = self.new_orders(T)
            where = dict(query_order=q_order, key_order=jnp.where(real, q_order, -1))
        else:  # real tokens come first and count up, and only pinned ones are told by their order
            where = dict(offset=0, key_lengths=plan.count)
        return attention(
            query,
            key,
            value,
            causal=rule.causal,
            window=rule.window,
            pinned=rule.pinned,
            **where,
            mask=self._new_columns(mask, plan.start, T, False),
            bias=self._new_columns(bias, plan.start, T, 0),
            scale=scoring.scale,
            soft_cap=scoring.soft_cap,
            alibi_slopes=alibi_slopes,
            precision=scoring.precision,
            implementation=implementation,
            return_lse=True,
        )

    def joined(
        self, parts: list[tuple[jax.Array, jax.Array]], sink_logits: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Merges the parts of one step, adds the sink once, and empties padding."""
        heads = head_axis(self.records.spec.kv_heads)
        _, real = self.new_orders(parts[0][0].shape[1])
        axes = (("batch", None, heads), (heads,), ("batch",))
        return local(_joined, axes, ("batch", None, heads))(parts, sink_logits, real)

    def after(self, out: jax.Array) -> LayerCache:
        """Orders the coming write after the reads that made `out [B, T, N, V]`.

        Reads and write share no data, and XLA has to know that all readers are done; so the
        jobs are made to depend on the outputs, on every device on its own ones.
        """
        plan = self._opened()
        heads = head_axis(self.records.spec.kv_heads)
        job_axes = self.layout.job_axes(heads)
        in_axes = (job_axes, ("batch", None, heads))
        jobs = local(_awaiting, in_axes, job_axes)(plan.jobs, lax.stop_gradient(out))
        return dataclasses.replace(self, plan=dataclasses.replace(plan, jobs=jobs))

    def settled(
        self,
        query: jax.Array,
        key: jax.Array,
        lse: jax.Array,
        scoring: Scoring,
        *,
        view: BlockView | None = None,
        weights: Any = None,
        alibi_slopes: jax.Array | None = None,
    ) -> LayerCache:
        """Lets a layout that goes by attention choose what stays, before anything is written.

        Args:
          query: `[B, T, N, H]`, as attended.
          key: `[B, T, K, H]`, the call's own, as attended.
          lse: float32 `[B, T, N]`, over all that each query saw.
          scoring: Rule, scale and so on.
          view: The form of the records that was attended, as in `attend`.
          weights: The view's arrays.
          alibi_slopes: As attended, or `None`.
        """
        if not self.layout.chooses:
            return self
        heads = head_axis(self.records.spec.kv_heads)
        how = self._reading(query, scoring, view)
        call = Attended(query, key, lse, alibi_slopes)
        axes = heads, self._plane_axes(heads, self.records.axes())
        stored = self.records.planes, self.index, self._opened()
        plan = settle(self.layout, how, call, *stored, weights, axes)
        return dataclasses.replace(self, plan=plan)

    def replicated(
        self, key: jax.Array, value: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Repeats KV heads where a mesh has more tensor devices than heads."""
        if self.replicas == 1:
            return key, value
        if value is not None:
            value = jnp.repeat(value, self.replicas, axis=2)
        return jnp.repeat(key, self.replicas, axis=2), value

    def checked(
        self, mask: jax.Array | None, bias: jax.Array | None, sizes: tuple[int, int, int]
    ) -> tuple[jax.Array | None, jax.Array | None]:
        """Checks a mask and a bias against the row's capacity and lifts them to 4-D."""
        width = self.layout.mask_width(self.index, self.records.slots)
        if width is None and (mask is not None or bias is not None):
            raise ValueError(f"{self.layout} has no fixed key axis: it takes no mask or bias.")
        want = (*sizes, width or 0)
        return as_mask(mask, want), as_bias(bias, want)

    def _new_columns(
        self, x: jax.Array | None, start: jax.Array, length: int, fill: Any
    ) -> jax.Array | None:
        """Picks a mask's or bias's columns of this call's own tokens: `[B, N|1, T|1, T]`."""
        if x is None:
            return None
        scores = ("batch", head_axis(self.records.spec.kv_heads), None, None)
        take = functools.partial(_columns, length, fill)
        return local(take, (scores, ("batch",)), scores)(x, start)

    def _reading(self, query: jax.Array, scoring: Scoring, view: BlockView | None) -> Reading:
        """Gathers the static choices of a read by queries `[B, T, N, H]`."""
        r = self.records
        return Reading(
            r.spec,
            r.codec,
            self.layout,
            self.layout.narrowed(scoring.rule),
            scoring.scale,
            max(1, query.shape[2] // r.spec.kv_heads),
            r.whole_slots,
            r.held_slots,
            scoring.soft_cap,
            scoring.precision,
            view,
        )

    def _opened(self) -> Plan:
        if self.plan is None:
            raise ValueError("this cache has no open step: call cache.open(T, lengths) first.")
        return self.plan

    def _token_axes(self) -> tuple[str | None, ...]:
        """Names the logical axes of keys and values of new tokens: a single head is not split."""
        kv_heads = self.records.spec.kv_heads
        split = kv_heads > 1 and head_axis(kv_heads) is not None
        return ("batch", None, "kv_heads" if split else None)

    def _plane_axes(
        self, heads: str | None, axes: dict[str, tuple[str | None, ...]]
    ) -> dict[str, tuple[str | None, ...]]:
        if heads is not None:
            return axes
        return {n: tuple(None if a == "kv_heads" else a for a in ax) for n, ax in axes.items()}


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _rounded(
    spec: KVSpec, codec: Codec, key: jax.Array, value: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Encodes and decodes; gradients pass as if nothing was rounded (straight-through)."""
    stored = codec.encode(spec, key, None if spec.value_offset is not None else value)
    key_back, value_back = codec.decode(spec, stored)
    return key_back.astype(key.dtype), value_back.astype(value.dtype)


@_rounded.defjvp
def _rounded_tangents(spec: KVSpec, codec: Codec, primals: Any, tangents: Any) -> Any:
    return _rounded(spec, codec, *primals), tangents


def create_layer(
    spec: KVSpec,
    codec: Codec,
    batch: int,
    capacity: int,
    *,
    layout: Layout | None = None,
    lanes: int = 1,
    replicas: int = 1,
    context: bool = False,
) -> LayerCache:
    """Allocates an empty cache for one layer.

    Args:
      spec: The variant's record, without replication.
      codec: How records are stored.
      batch: B.
      capacity: Slots of each row, in tokens.
      layout: Where tokens go; default contiguous.
      lanes: Minor widths are padded to a multiple of this.
      replicas: How many times each KV head is stored.
      context: The cache holds a context, which a model's steps do not extend.

    Returns:
      The cache.

    Raises:
      ValueError: If a size is not positive, or layout and codec do not fit.
    """
    if batch < 0 or capacity < 1 or lanes < 1:
        raise ValueError(f"batch={batch}, capacity={capacity}, lanes={lanes}: want >= 0, 1, 1.")
    check_kinds(layout, codec)
    spec = spec.replicated(replicas)
    layout = (layout if layout is not None else Contiguous()).fitted(spec)
    check_pair(layout, codec)
    entries, slots = layout.storage(batch, capacity)
    records = create_records(spec, codec, entries, slots, lanes, rows=batch)
    index = marked(layout.create(batch, capacity), codec)
    return LayerCache(index, records, None, layout, replicas, context)


def _joined(
    parts: list[tuple[jax.Array, jax.Array]], sink_logits: jax.Array | None, real: jax.Array
) -> tuple[jax.Array, jax.Array]:
    out, lse = merge([out for out, _ in parts], [lse for _, lse in parts])
    out, lse = add_sink(out, lse, sink_logits)
    real = real[:, :, None]
    return jnp.where(real[..., None], out, 0.0), jnp.where(real, lse, -jnp.inf)


def _awaiting(jobs: Jobs | Fill, out: jax.Array) -> Jobs | Fill:
    """Gives the same jobs, which can only be known once `out` is."""
    if out.size == 0:
        return jobs
    return jobs.delayed(zero_after(out))


def _columns(length: int, fill: Any, x: jax.Array, start: jax.Array) -> jax.Array:
    """Picks `length` columns of `x [B|1, N|1, T|1, S]` from `start int32[B]` on."""
    x = jnp.broadcast_to(x, (start.shape[0], *x.shape[1:]))
    columns = start[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
    take = functools.partial(jnp.take, axis=-1, mode="fill", fill_value=fill)
    return jax.vmap(take)(x, columns)
