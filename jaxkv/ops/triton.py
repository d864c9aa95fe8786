# SPDX-License-Identifier: Apache-2.0
"""Flash attention on GPUs by kernels of our own, for what vendors' kernels leave out."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from types import ModuleType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxkv.core.platform import target_platform
from jaxkv.ops.merge import add_sink
from jaxkv.ops.operands import Operands, cotangents, empty_result, first_order, primals
from jaxkv.ops.tiles import Cut, live_pairs

if TYPE_CHECKING:
    from jaxkv.kernels.gpu import flash

WIDEST = 256
# Tensor cores multiply tiles of at least as many rows.
SMALLEST = 16


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Queries and keys of a tile, groups of 32 threads, and depth of the pipeline."""

    rows: int
    slots: int
    warps: int
    stages: int


# By the wider of the two head widths, for 16-bit numbers, forward and backward: they stay in the
# registers and the shared memory of each chip of docs/measurements.md. 32-bit numbers halve both
# sides. None has been timed yet.
FORWARD = {64: Tiles(128, 64, 4, 3), 128: Tiles(128, 64, 8, 2), 256: Tiles(64, 32, 4, 2)}
BACKWARD = {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 64, 8, 2), 256: Tiles(32, 32, 4, 1)}


@dataclasses.dataclass(frozen=True)
class Triton:
    """Serves windows, segments, soft-caps, sinks, traced orders, and widths up to 256.

    Args:
      rows: Queries of a tile, a power of two from 16 on; `None` fits the head width.
      slots: Keys of a tile, likewise.
      interpret: Run the kernels as plain operations, on any platform: for tests.

    Raises:
      ValueError: If a size is no such power.
    """

    rows: int | None = None
    slots: int | None = None
    interpret: bool = False
    name: str = "triton"

    def __post_init__(self) -> None:
        for name in ("rows", "slots"):
            size = getattr(self, name)
            if size is not None and (size < SMALLEST or size & (size - 1)):
                raise ValueError(f"{name}={size}: want a power of two, at least {SMALLEST}.")

    def refuses(self, operands: Operands) -> str | None:
        """Refuses what is added to scores or dropped from weights, and wide heads."""
        o = operands
        if not self.interpret and target_platform() != "gpu":
            return "runs on GPUs only"
        if importlib.util.find_spec("jax.experimental.pallas.triton") is None:
            return "needs Pallas on Triton, which this JAX has not"
        if lacking := o.given("bias", "mask", "ALiBi slopes", "dropout"):
            return lacking
        if o.query.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            return f"does not compute in {o.query.dtype}"
        width = max(o.query.shape[3], o.value.shape[3])
        if width > WIDEST:
            return f"takes heads up to {WIDEST} wide, and here are {width}"
        return None

    def yields(self, operands: Operands) -> str | None:
        """Yields where queries are too few for a tile."""
        T = operands.query.shape[1]
        return f"has tiles that {T} queries leave empty" if T < SMALLEST else None

    def run(self, operands: Operands) -> tuple[jax.Array, jax.Array]:
        """Computes `(out [B, T, N, V], lse float32[B, T, N])`."""
        o = dataclasses.replace(operands, sink_logits=None)
        # Weights of 0 times what lies in unfilled slots must be 0.
        emptied = dict(query=o.emptied_query(), key=o.emptied(o.key), value=o.emptied(o.value))
        out, lse = empty_result(o) or _attend(self, dataclasses.replace(o, **emptied))
        return add_sink(out, lse, operands.sink_logits)

    def call(self, o: Operands, table: dict[int, Tiles]) -> flash.Call:
        """Gathers what is static about a call."""
        flash = _kernels()
        width = max(o.query.shape[3], o.value.shape[3])
        tiles = table[min(w for w in table if w >= width)]
        half = 2 if o.query.dtype == jnp.float32 else 1
        T, S = o.query.shape[1], o.key.shape[1]
        slots = self.slots or flash.tile(S, max(SMALLEST, tiles.slots // half))
        hidden = o.rule.needs_alignment or not o.all_filled or o.q_segments is not None
        return flash.Call(
            rule=o.rule,
            scale=o.scale,
            soft_cap=o.soft_cap,
            precision=o.precision,
            masked=hidden or S % slots != 0,
            rows=self.rows or flash.tile(T, max(SMALLEST, tiles.rows // half)),
            slots=slots,
            warps=tiles.warps,
            stages=tiles.stages,
            interpret=self.interpret,
        )


def _kernels() -> ModuleType:
    """Imports the kernels when first used: Pallas takes a while, and may lack its Triton."""
    from jaxkv.kernels.gpu import flash

    return flash


@functools.partial(first_order, "triton")
def gradients(
    how: Triton, o: Operands, d_out: jax.Array, lse: jax.Array, delta: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the gradients by query, key and value; `lse` and `delta` as in `flash.backward`."""
    c = how.call(o, BACKWARD)
    spans = _spans(c, o, True), _spans(c, o, False)
    return _kernels().backward(c, o.query, o.key, o.value, d_out, lse, delta, _places(o), *spans)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(how: Triton, o: Operands) -> tuple[jax.Array, jax.Array]:
    c = how.call(o, FORWARD)
    return _kernels().forward(c, o.query, o.key, o.value, _places(o), _spans(c, o, True))


def _forward(how: Triton, o: Any) -> tuple[tuple[jax.Array, jax.Array], tuple]:
    o = primals(o)
    out, lse = _attend(how, o)
    return (out, lse), (o, out, lse)


def _backward(how: Triton, saved: tuple, grads: tuple) -> tuple[Any]:
    o, out, lse = saved
    d_query, d_key, d_value = gradients(how, o, *cotangents(out, lse, *grads))
    nothing = jax.tree.map(lambda _: None, o)
    return (dataclasses.replace(nothing, query=d_query, key=d_key, value=d_value),)


_attend.defvjp(_forward, _backward, symbolic_zeros=True)


def _places(o: Operands) -> flash.Places:
    B, T, S = o.query.shape[0], o.query.shape[1], o.key.shape[1]
    q_order = jnp.broadcast_to(o.q_order, (B, T)).astype(jnp.int32)
    k_order = jnp.broadcast_to(o.k_order, (B, S)).astype(jnp.int32)
    if o.k_segments is not None:
        k_order = jnp.where(o.k_segments != 0, k_order, -1)
    return _kernels().Places(q_order, k_order, o.q_segments, o.k_segments)


def _spans(c: flash.Call, o: Operands, by_query: bool) -> flash.Span:
    """Bounds the tiles of keys that each tile of queries meets, or the other way round."""
    B, T, S = o.query.shape[0], o.query.shape[1], o.key.shape[1]
    pairs = live_pairs(o, Cut(T, min(T, c.rows)), Cut(S, min(S, c.slots)), 1)[:, 0]
    pairs = pairs if by_query else jnp.swapaxes(pairs, 1, 2)
    count = pairs.shape[2]
    first = jnp.argmax(pairs, axis=2).astype(jnp.int32)
    end = count - jnp.argmax(pairs[:, :, ::-1], axis=2).astype(jnp.int32)
    end = jnp.where(jnp.any(pairs, axis=2), end, first)
    return _kernels().Span(*(jnp.broadcast_to(x, (B, x.shape[1])) for x in (first, end)))
