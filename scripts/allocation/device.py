# SPDX-License-Identifier: Apache-2.0
"""The part on the device: many steps of a cache in one program, with what each of them holds."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv.cache import KVSpec, Layout, Paged, Raw, create_layer
from jaxkv.cache.layer_cache import LayerCache

# A token's record: its request as the key, its place in the row as the value.
SPEC = KVSpec(kv_heads=1, key_width=1, value_width=1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """What each row works on: int32 `[B]`, and whether it works at all, bool `[B]`.

    Attributes:
      request: Its number.
      prompt: Tokens that are appended in chunks; all others come one at a step.
      total: Tokens with which the request is done.
      reserved: Slots that are set aside for it, where pages are not given out on demand.
      active: Whether the row has a request.
    """

    request: jax.Array
    prompt: jax.Array
    total: jax.Array
    reserved: jax.Array
    active: jax.Array


class Figures(NamedTuple):
    """What one step leaves, int32: rows, slots, and how often something happened."""

    running: jax.Array
    held: jax.Array  # slots that are given out
    live: jax.Array  # of them, with a token
    reserved: jax.Array  # of them, for tokens that the request will still have
    held_back: jax.Array  # rows whose tokens found no page: dropped, and tried again
    faults: jax.Array  # rows or pools whose books do not balance


def create(layout: Layout, rows: int, longest: int) -> LayerCache:
    """Allocates a cache of the smallest records: only where they go matters."""
    return create_layer(SPEC, Raw(jnp.float32), rows, longest, layout=layout)


@functools.partial(jax.jit, static_argnums=(2, 3), donate_argnums=0)
def advance(
    cache: LayerCache, rows: Rows, chunk: int, steps: int
) -> tuple[LayerCache, Rows, Figures]:
    """Runs `steps` steps: prompts grow by up to `chunk` tokens, other rows by one.

    A row that is done is reset, which frees its pages, in the step that finishes it. Rows that are
    out of pages keep what they have and try again.
    """

    def step(carry: tuple[LayerCache, Rows], _: None) -> tuple[tuple[LayerCache, Rows], Figures]:
        cache, rows = carry
        start = cache.lengths
        count = jnp.where(start < rows.prompt, jnp.minimum(chunk, rows.prompt - start), 1)
        cache = append(cache, rows.request, jnp.where(rows.active, count, 0), chunk)
        held_back = cache.overflowed
        figures = measured(cache, rows, start, count, held_back)
        done = rows.active & (cache.lengths >= rows.total)
        cache = lax.cond(jnp.any(done), lambda c: c.reset(done), lambda c: c, cache)
        rows = dataclasses.replace(rows, active=rows.active & ~done)
        return (cache.clear_flags(), rows), figures

    (cache, rows), figures = lax.scan(step, (cache, rows), None, steps)
    return cache, rows, figures


def append(cache: LayerCache, request: jax.Array, count: jax.Array, chunk: int) -> LayerCache:
    """Appends `count int32[B]` records to each row, without attending to any."""
    B = count.shape[0]
    cache = cache.open(chunk, count)
    order, _ = cache.new_orders(chunk)
    key = jnp.broadcast_to(request[:, None], (B, chunk)).astype(jnp.float32)
    return cache.write(key[..., None, None], order.astype(jnp.float32)[..., None, None]).close()


def measured(
    cache: LayerCache, rows: Rows, start: jax.Array, count: jax.Array, held_back: jax.Array
) -> Figures:
    """Counts slots, and checks that rows, tokens and pages add up."""
    lengths, total = cache.lengths, rows.total
    if isinstance(cache.layout, Paged):
        size = cache.layout.size
        held = -(-lengths // size) * size
        given = jnp.sum((cache.index.state.references > 0).astype(jnp.int32)) * size
        wasteful = held - lengths >= size  # more than one partial page
    else:
        held = jnp.where(rows.active, rows.reserved, 0)
        given = jnp.sum(held)
        wasteful = lengths > held
    later = jnp.minimum(held, total) - lengths
    kept = rows.active & held_back & (lengths - start < count)
    whole = lengths == jnp.where(rows.active, start + count, 0)
    faults = jnp.sum((wasteful | ~(whole | kept)).astype(jnp.int32))
    return Figures(
        running=jnp.sum(rows.active.astype(jnp.int32)),
        held=given,
        live=jnp.sum(lengths),
        reserved=jnp.sum(jnp.where(rows.active, jnp.maximum(later, 0), 0)),
        held_back=jnp.sum(held_back.astype(jnp.int32)),
        faults=faults + (given != jnp.sum(held)).astype(jnp.int32),
    )


@functools.partial(jax.jit, donate_argnums=0)
def reset(cache: LayerCache, rows: jax.Array) -> LayerCache:
    """Empties rows, bool `[B]`: their requests are to begin again."""
    return cache.reset(rows)


@jax.jit
def misplaced(cache: LayerCache, rows: Rows) -> jax.Array:
    """Counts the tokens of all rows that are not what was written there: of others, or moved."""
    entry, slot, order = cache.layout.places(cache.index, cache.records.slots)
    planes, at = cache.records.planes, (jnp.maximum(entry, 0), slot)
    request, place = (planes[n][:, 0, :, 0][at].astype(jnp.int32) for n in ("key", "value"))
    wrong = (request != rows.request[:, None]) | (place != order)
    return jnp.sum(((order >= 0) & (wrong | (entry < 0))).astype(jnp.int32))
