# SPDX-License-Identifier: Apache-2.0
"""The one writer: a loop of masked windows over a plan's live jobs, in place."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkv.cache.codecs import TILE_BITS, Planes, bits_of
from jaxkv.cache.index import Fill, Jobs
from jaxkv.core.indexing import box, put_box, quotient
from jaxkv.core.numerics import pad_width
from jaxkv.core.platform import by_platform


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
    tiled = any(tile_rows(x) > 1 for x in planes.values())
    return by_platform(_written, False, tiled, planes, new, jobs)


def _written(tiles: bool, planes: Planes, new: Planes, jobs: Jobs) -> Planes:
    """Runs the loop; with `tiles`, windows begin and end at whole tiles of a TPU."""
    job, live = jobs.live_first()
    rows = {name: tile_rows(x) if tiles else 1 for name, x in planes.items()}
    widths = {n: _whole(jobs.width, rows[n], x.shape[2]) for n, x in planes.items()}
    frames = {name: framed(x, planes[name], widths[name]) for name, x in new.items()}

    def body(j: jax.Array, planes: Planes) -> Planes:
        out, own = dict(planes), job(j)
        for name, frame in frames.items():
            w = _window(own, rows[name], widths[name], planes[name].shape[2])
            old = w.slots_of(planes[name])
            kept = jnp.where(w.chosen(old), w.tokens_of(frame), old)
            out[name] = put_window(planes[name], kept, w.entry, w.slot, w.heads)
        return out

    return lax.fori_loop(0, live, body, dict(planes))


def _forward(planes: Planes, new: Planes, jobs: Jobs) -> tuple[Planes, tuple[Planes, Jobs]]:
    return write_windows(planes, new, jobs), (new, jobs)


def _backward(saved: tuple[Planes, Jobs], grads: Planes) -> tuple[Planes, Planes, None]:
    """Sends each written slot's gradient to its token, and none to what it overwrote."""
    new, jobs = saved
    job, live = jobs.live_first()
    floats = {n: g for n, g in grads.items() if jnp.issubdtype(new[n].dtype, jnp.floating)}
    frames = {n: jnp.zeros_like(framed(new[n], g, jobs.width)) for n, g in floats.items()}

    def body(j: jax.Array, carry: tuple[Planes, Planes]) -> tuple[Planes, Planes]:
        slots, tokens, own = dict(carry[0]), dict(carry[1]), job(j)
        for name in floats:
            w = _window(own, 1, jobs.width, slots[name].shape[2])
            grad = w.slots_of(slots[name])
            chosen = w.chosen(grad)
            given = jnp.where(chosen, grad, w.tokens_of(tokens[name]))
            tokens[name] = put_window(tokens[name], given, w.row, w.offset + w.width, w.heads)
            left = jnp.where(chosen, jnp.zeros_like(grad), grad)
            slots[name] = put_window(slots[name], left, w.entry, w.slot, w.heads)
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
    return box(x, _corner(x, entry, head, slot), (1, count, width, *x.shape[3:]))


def add_window(
    x: jax.Array, window: jax.Array, entry: jax.Array, slot: jax.Array, head: jax.Array
) -> jax.Array:
    """Adds a window `[1, heads, width, ...]` to the slots and heads it was sliced from."""
    old = window_of(x, entry, slot, window.shape[2], (head, window.shape[1]))
    return put_box(x, old + window, _corner(x, entry, head, slot))


def put_window(
    x: jax.Array,
    window: jax.Array,
    entry: jax.Array,
    slot: jax.Array,
    heads: tuple[jax.Array, int] | None = None,
) -> jax.Array:
    """Puts a window where `window_of` takes one."""
    head = heads[0] if heads is not None else jnp.zeros_like(entry)
    return put_box(x, window, _corner(x, entry, head, slot))


def put_in_tiles(x: jax.Array, window: jax.Array, entry: jax.Array, slot: jax.Array) -> jax.Array:
    """Puts a window whose slot is a multiple of its width, whole tiles of a TPU at a time.

    Where XLA does not see that a write begins at a tile, it lays the whole cache out in smaller
    ones. A window that shares its tile with others is put with what they hold.
    """
    rows, width = tile_rows(x), window.shape[2]
    if rows == 1 or (rows % width and width % rows):
        return put_window(x, window, entry, slot)
    begin = quotient(slot, rows) * rows
    if width < rows:
        place = lax.broadcasted_iota(jnp.int32, (1, 1, rows, 1), 2)
        chosen = quotient(place, width) == quotient(slot - begin, width)
        old = window_of(x, entry, begin, rows)
        window = jnp.where(chosen, jnp.tile(window, (1, 1, rows // width, 1)), old)
    return put_window(x, window, entry, begin)


def _corner(
    x: jax.Array, entry: jax.Array, head: jax.Array, slot: jax.Array
) -> tuple[jax.Array, ...]:
    return (entry, head, slot) + (jnp.zeros_like(entry),) * (x.ndim - 3)


class _Window(NamedTuple):
    """One job as it is done on a plane: as in `Jobs`, each a scalar; tokens come from a frame."""

    entry: jax.Array
    slot: jax.Array
    row: jax.Array
    offset: jax.Array
    low: jax.Array
    high: jax.Array
    width: int
    heads: tuple[jax.Array, int] | None

    def slots_of(self, plane: jax.Array) -> jax.Array:
        return window_of(plane, self.entry, self.slot, self.width, self.heads)

    def tokens_of(self, frame: jax.Array) -> jax.Array:
        return window_of(frame, self.row, self.offset + self.width, self.width, self.heads)

    def chosen(self, like: jax.Array) -> jax.Array:
        lane = jnp.arange(self.width, dtype=jnp.int32)
        chosen = (lane >= self.low) & (lane < self.high)
        return chosen.reshape((1, 1, self.width) + (1,) * (like.ndim - 3))


def _window(job: Jobs, rows: int, width: int, slots: int) -> _Window:
    """Fits a job to a plane: its window of `width` begins at a multiple of `rows`.

    The compiler has to see the multiple. Otherwise XLA lays the whole cache out in smaller tiles
    for TPU, at every write.
    """
    begin = job.slot
    if rows > 1:
        begin = jnp.minimum(quotient(begin, rows), (slots - width) // rows) * rows
    shift = job.slot - begin
    heads = None if job.head is None else (job.head, 1)
    low, high, offset = job.low + shift, job.high + shift, job.offset - shift
    return _Window(job.entry, begin, job.row, offset, low, high, width, heads)


def _whole(width: int, rows: int, slots: int) -> int:
    """Widens a window so that it holds `width` slots wherever they begin among `rows`."""
    return min(-(-(width + rows - 1) // rows) * rows, slots) if rows > 1 else width


def tile_rows(plane: jax.Array) -> int:
    """Counts the slots of a TPU's tile of codes `[E, heads, S, width]`; 1 if S is no multiple.

    Of wider numbers XLA takes tiles of 8 slots, within which a window may begin anywhere.
    """
    if plane.ndim != 4 or plane.dtype.itemsize > 1:
        return 1
    rows = TILE_BITS // bits_of(plane.dtype)
    return rows if plane.shape[2] % rows == 0 else 1


def framed(new: jax.Array, plane: jax.Array, width: int) -> jax.Array:
    """Pads tokens by a window on both sides and channels up to the plane's lanes."""
    lanes = [(0, want - have) for want, have in zip(plane.shape[3:], new.shape[3:], strict=True)]
    return jnp.pad(new, [(0, 0), (0, 0), (width, width), *lanes])


def _unframed(frame: jax.Array, new: jax.Array, width: int) -> jax.Array:
    start = (0, 0, width) + (0,) * (new.ndim - 3)
    return lax.slice(frame, start, [a + b for a, b in zip(start, new.shape, strict=True)])
