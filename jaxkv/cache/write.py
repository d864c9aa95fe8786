# SPDX-License-Identifier: Apache-2.0
"""The one writer: a loop of masked windows over a plan's live jobs, in place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkv.cache.codecs import Planes
from jaxkv.cache.index import Fill, Jobs
from jaxkv.core.numerics import pad_width


def write(planes: Planes, new: Planes, jobs: Jobs | Fill) -> Planes:
    """Writes new tokens into their slots; nothing else is touched.

    Args:
      planes: Storage, each `[E, heads, S, ...]`.
      new: Encoded tokens, each `[B, heads, T, ...]` with the dtypes of `planes`.
      jobs: Which token goes where.

    Returns:
      The planes with the tokens in them. Lane padding of a written slot becomes 0.
    """
    if isinstance(jobs, Fill):
        return {name: _filled(x, new[name], jobs.source) for name, x in planes.items()}
    return write_windows(planes, new, jobs)


def _filled(plane: jax.Array, new: jax.Array, source: jax.Array) -> jax.Array:
    """Takes the new token of each slot that gets one: a pass over the plane, in place."""
    beyond = plane.shape[2] - source.shape[2]
    source = jnp.pad(source, [(0, 0), (0, 0), (0, beyond)], constant_values=-1)
    if plane.ndim == 4:
        new, source = pad_width(new, plane.shape[3]), source[..., None]
    taken = jnp.take_along_axis(new, jnp.maximum(source, 0), axis=2)
    return jnp.where(source >= 0, taken, plane)


@jax.custom_vjp
def write_windows(planes: Planes, new: Planes, jobs: Jobs) -> Planes:
    """Writes windows of tokens; arguments and result as in `write`.

    One loop serves all planes and layouts. It is in place when `planes` is donated, where a
    scatter relayouts 8-bit and 64-wide caches and unrolled windows copy the cache.
    """
    jobs, live = jobs.live_first()
    frames = {name: framed(x, planes[name], jobs.width) for name, x in new.items()}

    def body(j: jax.Array, planes: Planes) -> Planes:
        out = dict(planes)
        for name, frame in frames.items():
            old = _slot_window(planes[name], jobs, j)
            kept = jnp.where(_chosen(jobs, j, old), _token_window(frame, jobs, j), old)
            out[name] = put_window(planes[name], kept, jobs.entry[j], jobs.slot[j], _head(jobs, j))
        return out

    return lax.fori_loop(0, live, body, dict(planes))


def _forward(planes: Planes, new: Planes, jobs: Jobs) -> tuple[Planes, tuple[Planes, Jobs]]:
    return write_windows(planes, new, jobs), (new, jobs)


def _backward(saved: tuple[Planes, Jobs], grads: Planes) -> tuple[Planes, Planes, None]:
    """Sends each written slot's gradient to its token, and none to what it overwrote."""
    new, jobs = saved
    jobs, live = jobs.live_first()
    floats = {n: g for n, g in grads.items() if jnp.issubdtype(new[n].dtype, jnp.floating)}
    frames = {n: jnp.zeros_like(framed(new[n], g, jobs.width)) for n, g in floats.items()}

    def body(j: jax.Array, carry: tuple[Planes, Planes]) -> tuple[Planes, Planes]:
        slots, tokens = dict(carry[0]), dict(carry[1])
        for name in floats:
            grad = _slot_window(slots[name], jobs, j)
            chosen = _chosen(jobs, j, grad)
            given = jnp.where(chosen, grad, _token_window(tokens[name], jobs, j))
            place = jobs.offset[j] + jobs.width
            tokens[name] = put_window(tokens[name], given, jobs.row[j], place, _head(jobs, j))
            left = jnp.where(chosen, jnp.zeros_like(grad), grad)
            where = (jobs.entry[j], jobs.slot[j], _head(jobs, j))
            slots[name] = put_window(slots[name], left, *where)
        return slots, tokens

    slots, tokens = lax.fori_loop(0, live, body, (floats, frames))
    unframed = {n: _unframed(x, new[n], jobs.width) for n, x in tokens.items()}
    return {**grads, **slots}, {**jax.tree.map(zero_cotangent, new), **unframed}, None


write_windows.defvjp(_forward, _backward)


def zero_after(x: jax.Array) -> jax.Array:
    """Makes an int32 0 that can only be known once `x`, not empty, is computed.

    XLA writes a buffer in place only if it can prove that all readers are done. Where a write
    shares no data with a read, and barriers are gone when copies are inserted, this orders them.
    """
    first = lax.squeeze(lax.slice(x, (0,) * x.ndim, (1,) * x.ndim), range(x.ndim))
    if jnp.issubdtype(x.dtype, jnp.floating):
        bits = lax.bitcast_convert_type(first.astype(jnp.float32), jnp.int32)
    else:
        bits = first.astype(jnp.int32)
    # Always 0, whatever the bits are, but not to a compiler that simplifies without ranges.
    return jnp.minimum(bits & 1, 0)


def zero_cotangent(x: jax.Array) -> Any:
    """Makes the zero cotangent of an array: float0 for integers."""
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    return jnp.zeros_like(x) if floating else np.zeros(x.shape, jax.dtypes.float0)


def window_of(
    x: jax.Array,
    entry: jax.Array,
    slot: jax.Array,
    width: int,
    heads: tuple[jax.Array, int] | None = None,
) -> jax.Array:
    """Slices slots of one entry, of all heads or of (first, count): `[1, heads, width, ...]`."""
    head, count = heads or (jnp.zeros_like(entry), x.shape[1])
    return lax.dynamic_slice(x, _corner(x, entry, head, slot), (1, count, width, *x.shape[3:]))


def add_window(
    x: jax.Array, window: jax.Array, entry: jax.Array, slot: jax.Array, head: jax.Array
) -> jax.Array:
    """Adds a window `[1, heads, width, ...]` to the slots and heads it was sliced from."""
    old = window_of(x, entry, slot, window.shape[2], (head, window.shape[1]))
    return lax.dynamic_update_slice(x, old + window, _corner(x, entry, head, slot))


def put_window(
    x: jax.Array,
    window: jax.Array,
    entry: jax.Array,
    slot: jax.Array,
    heads: tuple[jax.Array, int] | None = None,
) -> jax.Array:
    """Puts a window where `window_of` takes one."""
    head = heads[0] if heads is not None else jnp.zeros_like(entry)
    return lax.dynamic_update_slice(x, window, _corner(x, entry, head, slot))


def _head(jobs: Jobs, j: jax.Array) -> tuple[jax.Array, int] | None:
    return None if jobs.head is None else (jobs.head[j], 1)


def _corner(
    x: jax.Array, entry: jax.Array, head: jax.Array, slot: jax.Array
) -> tuple[jax.Array, ...]:
    return (entry, head, slot) + (jnp.zeros_like(entry),) * (x.ndim - 3)


def _slot_window(plane: jax.Array, jobs: Jobs, j: jax.Array) -> jax.Array:
    return window_of(plane, jobs.entry[j], jobs.slot[j], jobs.width, _head(jobs, j))


def _token_window(frame: jax.Array, jobs: Jobs, j: jax.Array) -> jax.Array:
    first = jobs.offset[j] + jobs.width
    return window_of(frame, jobs.row[j], first, jobs.width, _head(jobs, j))


def _chosen(jobs: Jobs, j: jax.Array, like: jax.Array) -> jax.Array:
    lane = jnp.arange(jobs.width, dtype=jnp.int32)
    chosen = (lane >= jobs.low[j]) & (lane < jobs.high[j])
    return chosen.reshape((1, 1, jobs.width) + (1,) * (like.ndim - 3))


def framed(new: jax.Array, plane: jax.Array, width: int) -> jax.Array:
    """Pads tokens by a window on both sides and channels up to the plane's lanes."""
    lanes = [(0, want - have) for want, have in zip(plane.shape[3:], new.shape[3:], strict=True)]
    return jnp.pad(new, [(0, 0), (0, 0), (width, width), *lanes])


def _unframed(frame: jax.Array, new: jax.Array, width: int) -> jax.Array:
    start = (0, 0, width) + (0,) * (new.ndim - 3)
    return lax.slice(frame, start, [a + b for a, b in zip(start, new.shape, strict=True)])
