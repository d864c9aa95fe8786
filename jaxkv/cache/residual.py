# SPDX-License-Identifier: Apache-2.0
"""Reading and writing what one layer stores, with or without a residual of exact tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv.cache.codecs import Codec, Planes, restored
from jaxkv.cache.grouped import Grouped, Newest
from jaxkv.cache.index import Ends, Index, Jobs, Layout, Plan, stacked_jobs, window_job
from jaxkv.cache.read import Reading, read
from jaxkv.cache.spec import KVSpec
from jaxkv.cache.write import framed, put_in_tiles, window_of, write, zero_after
from jaxkv.core.indexing import item, items, quotient, remainder
from jaxkv.ops.merge import merge


def read_stored(
    how: Reading,
    query: jax.Array,
    planes: Planes,
    rest: Planes,
    index: Index,
    q_order: jax.Array,
    mask: jax.Array | None,
    bias: jax.Array | None,
    weights: Any,
    slopes: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Attends to what a layer stores: as `read`, and to the residual `rest` if there is one."""
    added = (mask, bias, weights, slopes)
    if not isinstance(how.codec, Grouped):
        return read(how, query, planes, index, q_order, *added)
    codec = how.codec
    encoded = dataclasses.replace(index, lengths=codec.flushed(index.lengths))
    # What is encoded is a constant.
    old = read(how, query, lax.stop_gradient(planes), encoded, q_order, *added)
    near = dataclasses.replace(
        how, codec=codec.newest, layout=Newest(codec), slots=codec.rest_slots
    )
    new = read(near, query, rest, index, q_order, *added)
    return merge([old[0], new[0]], [old[1], new[1]])


def write_stored(
    spec: KVSpec,
    codec: Codec,
    layout: Layout,
    slots: int,
    planes: Planes,
    rest: Planes,
    key: jax.Array,
    value: jax.Array | None,
    plan: Plan,
) -> tuple[Planes, Planes]:
    """Stores a step's tokens: in the planes, or in the residual, which flushes whole groups.

    Args:
      spec: The shape of a record.
      codec: How it is stored.
      layout: Where tokens go.
      slots: S, in whole groups of tokens.
      planes: Each `[E, heads, S, ...]`.
      rest: The residual, each `[B, heads, 3 Q, ...]`, or none.
      key: `[B, T, K, H + shared]`.
      value: `[B, T, K, V]`, or `None` if it lies in the key.
      plan: Of the step.

    Returns:
      The planes and the residual.
    """
    if not isinstance(codec, Grouped):
        new = codec.encode(spec, key, value)
        return write(planes, _held(new, planes), plan.jobs), rest
    new = _held(codec.newest.encode(spec, key, value), rest)
    # The plan's jobs wait for the reads of this step; so must these.
    start = plan.start + zero_after(plan.jobs.delay)
    end = plan.after.lengths
    planes = _flushed(spec, codec, layout, slots, planes, rest, new, start, plan.after)
    # The residual is read before it is overwritten. One number of a plane of float32 tells when;
    # for one of 4 bits XLA for TPU may lay the plane out anew.
    last = max(planes.values(), key=lambda x: x.dtype.itemsize)
    jobs = _rest_jobs(codec, start + zero_after(last), end, key.shape[1])
    return planes, write(rest, new, jobs)


def _held(coded: Planes, planes: Planes) -> Planes:
    return {name: restored(x, planes[name].dtype) for name, x in coded.items()}


def _rest_jobs(codec: Grouped, start: jax.Array, end: jax.Array, length: int) -> Jobs:
    """Plans the windows of new tokens in the residual's ring, before and after it wraps."""
    slots = codec.rest_slots
    first = jnp.maximum(start, end - slots)
    begin, left = remainder(first, slots), end - first
    before = jnp.minimum(left, slots - begin)
    rows, width = jnp.arange(start.shape[0], dtype=jnp.int32), min(length, slots)
    segments = [
        (begin, first - start, before),
        (jnp.zeros_like(begin), first - start + before, left - before),
    ]
    return stacked_jobs([window_job(rows, s, t, n, width, slots) for s, t, n in segments])


def _flushed(
    spec: KVSpec,
    codec: Grouped,
    layout: Layout,
    slots: int,
    planes: Planes,
    rest: Planes,
    new: Planes,
    start: jax.Array,
    after: Index,
) -> Planes:
    """Encodes the groups that are a whole group behind once new tokens are there.

    One loop over them, each encoded for itself and written in place: its tokens come from the
    residual, from this call, or from both. A group of a row that was rolled back is encoded
    again, of the same tokens to the same bits.
    """
    Q = codec.group
    length = next(iter(new.values())).shape[2]
    number = jnp.arange(-(-length // Q), dtype=jnp.int32)
    groups = quotient(codec.flushed(start), Q)[:, None] + number[None]
    live = ((groups + 1) * Q <= codec.flushed(after.lengths)[:, None]).reshape(-1)
    rows = lax.broadcasted_iota(jnp.int32, groups.shape, 0).reshape(-1)
    front = jnp.argsort(jnp.logical_not(live), stable=True)
    rows, groups = items(rows, front), items(groups.reshape(-1), front)
    find = jax.vmap(lambda row, group: layout.locate(after, row, Ends(slots, slots), Q, group)[:2])
    entries, places = find(rows, groups)
    strides = {n: p.stride for n, p in codec.planes(spec, 1).items()}
    # No gradient passes a flush, so that none is asked of the loop.
    planes, rest, new = lax.stop_gradient((planes, rest, new))
    frames = {n: framed(x, rest[n], Q) for n, x in new.items()}

    def body(j: jax.Array, planes: Planes) -> Planes:
        row, first = item(rows, j), item(groups, j) * Q
        begin = item(start, row)
        older = first + jnp.arange(Q, dtype=jnp.int32) < begin

        def tokens(name: str) -> jax.Array:
            behind = window_of(rest[name], row, remainder(first, codec.rest_slots), Q)
            given = window_of(frames[name], row, first - begin + Q, Q)
            return jnp.where(older[:, None], behind, given)

        key, value = codec.newest.decode(spec, {n: tokens(n) for n in rest})
        coded = codec.encode(spec, key, None if spec.value_offset is not None else value)
        out = dict(planes)
        for name, x in _held(coded, planes).items():
            window = framed(x, planes[name], 0)
            slot = quotient(item(places, j), strides[name])
            out[name] = put_in_tiles(planes[name], window, item(entries, j), slot)
        return out

    return lax.fori_loop(0, jnp.sum(live.astype(jnp.int32)), body, dict(planes))
