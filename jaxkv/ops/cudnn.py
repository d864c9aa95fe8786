# SPDX-License-Identifier: Apache-2.0
"""Attention by NVIDIA's cuDNN, through JAX: the fastest there is for plain calls on GPUs."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxkv.core.platform import target_platform
from jaxkv.ops.blockwise import Blockwise
from jaxkv.ops.merge import add_sink
from jaxkv.ops.operands import Operands, cotangents, primals
from jaxkv.ops.triton import Triton, gradients


@dataclasses.dataclass(frozen=True)
class CuDNN:
    """Serves full, causal and left-windowed attention, key lengths and masks, in 16 bits.

    The log-sum-exp comes from cuDNN too; where somebody asks for its gradient, the backward
    pass is that of `Triton`.
    """

    name: str = "cudnn"

    def refuses(self, operands: Operands) -> str | None:
        """Refuses what cuDNN lacks, what JAX does not pass on, and what JAX's own checks refuse."""
        o = operands
        if target_platform() != "gpu":
            return "runs on GPUs only"
        return _lacks(o) or _lacks_places(o) or _refused(_Call.of(o))

    def yields(self, operands: Operands) -> str | None:
        """Yields to nothing."""
        del operands
        return None

    def run(self, operands: Operands) -> tuple[jax.Array, jax.Array]:
        """Computes `(out [B, T, N, V], lse float32[B, T, N])`.

        The log-sum-exp is 0 where nobody wants it.
        """
        o = dataclasses.replace(
            operands,
            sink_logits=None,
            key=operands.emptied(operands.key),
            value=operands.emptied(operands.value),
        )
        call = _Call.of(operands)
        if call.lse:
            out, lse = _attend(call, o)
        else:
            out, lse = call(*call.arguments(o)), jnp.zeros(o.query.shape[:3], jnp.float32)
        # Such a query was shown a key, or mixed all of them.
        blind = _blind(o)
        if blind is not None:
            out = jnp.where(blind[..., None], jnp.zeros((), out.dtype), out)
            lse = jnp.where(blind, -jnp.inf, lse)
        return add_sink(out, lse, operands.sink_logits)


def _lacks(o: Operands) -> str | None:
    """Names what neither cuDNN nor JAX's way to it knows, apart from places."""
    if lacking := o.given("bias", "ALiBi slopes", "soft-cap", "dropout", "segments"):
        return lacking
    if o.query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"computes in bfloat16 and float16, not in {o.query.dtype}"
    H, V = o.query.shape[3], o.value.shape[3]
    if V != H:
        return f"takes values as wide as keys, and here keys are {H} wide and values {V}"
    if 0 in o.query.shape or 0 in o.key.shape:
        return "takes no empty arrays"
    return None


def _lacks_places(o: Operands) -> str | None:
    """Says where queries and keys may not stand."""
    if o.offset is None and (o.rule.needs_alignment or not o.all_filled):
        return "takes no orders or offsets that are known only when it runs"
    left, right = _sight(o)
    if left is None and right is None:
        return None
    if o.rule.pinned:
        return "has no pinned tokens"
    if right != 0:
        return f"has no window that looks ahead, as {o.rule.window} does"
    T, S = o.query.shape[1], o.key.shape[1]
    if o.offset != 0 or T != S:
        return (
            f"starts queries and keys together and wants as many of both; here are {T} and {S}, "
            f"offset {o.offset}"
        )
    if left is not None and not o.all_filled:
        return "does not say what a query gives whose window lies behind the row's last key"
    return None


def _sight(o: Operands) -> tuple[int | None, int | None]:
    """Counts the keys that queries see behind and ahead; `None` where nothing is hidden."""
    left, right = o.rule.left, o.rule.right
    if o.offset is not None:
        if left is not None and left >= o.offset + o.query.shape[1] - 1:
            left = None
        if right is not None and o.offset + right >= o.key.shape[1] - 1:
            right = None
    return left, right


@dataclasses.dataclass(frozen=True)
class _Call:
    """What is static about a call, shapes included, so that JAX's answer to it can be kept."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    mask: tuple[int, ...] | None
    dtype: Any
    scale: float
    left: int | None
    causal: bool
    ragged: bool
    lse: bool

    @classmethod
    def of(cls, o: Operands) -> _Call:
        left, right = _sight(o)
        return cls(
            query=o.query.shape,
            key=o.key.shape,
            mask=None if o.mask is None else o.mask.shape,
            dtype=o.query.dtype,
            scale=o.scale,
            left=left,
            causal=right is not None,
            ragged=not o.all_filled,
            lse=o.lse_wanted or o.sink_logits is not None,
        )

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        mask: jax.Array | None,
        lengths: jax.Array | None,
    ) -> Any:
        """Computes the output, and with `lse` also the log-sum-exp."""
        if mask is not None:
            mask = jnp.broadcast_to(mask, (*mask.shape[:2], self.query[1], self.key[1]))
        if self.lse:
            return self._with_lse(query, key, value, mask, lengths)
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            mask=mask,
            scale=self.scale,
            is_causal=self.causal,
            key_value_seq_lengths=lengths,
            local_window_size=None if self.left is None else (self.left, 0),
            implementation="cudnn",
        )

    def _with_lse(self, query: Any, key: Any, value: Any, mask: Any, lengths: Any) -> Any:
        """Asks what JAX asks itself, which rounds the log-sum-exp to 16 bits afterwards."""
        from jax._src.cudnn import fused_attention_stablehlo as cudnn

        kinds, full = cudnn.MaskType, None
        kind = kinds.CAUSAL if self.causal else kinds.NO_MASK
        if lengths is not None:
            kind = kinds.PADDING_CAUSAL if self.causal else kinds.PADDING
            full = jnp.full(lengths.shape, self.query[1], jnp.int32)
        both: Any = cudnn.dot_product_attention(
            query,
            key,
            value,
            None,
            mask,
            full,
            lengths,
            scale=self.scale,
            mask_type=kind,
            sliding_window_length=None if self.left is None else self.left + 1,
            return_residual=True,
        )
        return both[0], jnp.swapaxes(both[1], 1, 2)

    def arguments(self, o: Operands) -> tuple[Any, ...]:
        """Gathers what the call takes. A row without keys is shown one, lest its sum be empty."""
        lengths = jnp.maximum(_lengths(o), 1) if self.ragged else None
        return o.query, o.key, o.value, o.mask, lengths

    def abstract(self) -> tuple[jax.ShapeDtypeStruct | None, ...]:
        """Gives the shapes of `arguments`."""
        shape = jax.ShapeDtypeStruct
        mask = None if self.mask is None else shape(self.mask, jnp.bool_)
        lengths = shape(self.query[:1], jnp.int32) if self.ragged else None
        key = shape(self.key, self.dtype)
        return shape(self.query, self.dtype), key, key, mask, lengths


@functools.lru_cache(maxsize=1024)
def _refused(call: _Call) -> str | None:
    """Asks JAX whether it takes a call and its gradient: it knows the device and the library."""

    def both(*arguments: Any) -> Any:
        query, key, value, *rest = arguments
        return jax.vjp(lambda q, k, v: call(q, k, v, *rest), query, key, value)[0]

    try:
        # Each device makes the call by itself, so no mesh is part of the question.
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            jax.eval_shape(both, *call.abstract())
    # What JAX itself is built on may be missing or changed; another implementation serves then.
    except Exception as reason:
        return f"is not to be had here: {reason}"
    return None


def _lengths(o: Operands) -> jax.Array:
    """Counts the keys of each row: int32 `[B]`."""
    counts = jnp.sum(o.k_order >= 0, axis=1, dtype=jnp.int32)
    return jnp.broadcast_to(counts, (o.key.shape[0],))


def _blind(o: Operands) -> jax.Array | None:
    """Finds the queries that see nothing: bool `[B, T, N]`, `None` if there are none.

    A causal call starts queries and keys together, so each sees the row's first key.
    """
    B, T, N, _ = o.query.shape
    if o.mask is not None:
        blind = ~jnp.any(o.seen(), axis=-1)
        return jnp.broadcast_to(jnp.swapaxes(blind, 1, 2), (B, T, N))
    if o.all_filled:
        return None
    return jnp.broadcast_to((_lengths(o) == 0)[:, None, None], (B, T, N))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: _Call, o: Operands) -> tuple[jax.Array, jax.Array]:
    return call(*call.arguments(o))


def _forward(call: _Call, o: Any) -> tuple[tuple[jax.Array, jax.Array], tuple]:
    o = primals(o)
    query, key, value, *rest = call.arguments(o)
    outs, pull = jax.vjp(lambda q, k, v: call(q, k, v, *rest), query, key, value)
    return outs, (o, outs, pull)


def _backward(call: _Call, saved: tuple, grads: tuple) -> tuple[Any]:
    o, (out, lse), pull = saved
    d_out, d_lse = grads
    if isinstance(d_lse, SymbolicZero):
        d_out = jnp.zeros_like(out) if isinstance(d_out, SymbolicZero) else d_out
        d_query, d_key, d_value = pull((d_out, jnp.zeros_like(lse)))
    else:
        d_query, d_key, d_value = _with_lse_gradient(o, out, lse, d_out, d_lse)
    nothing = jax.tree.map(lambda _: None, o)
    return (dataclasses.replace(nothing, query=d_query, key=d_key, value=d_value),)


_attend.defvjp(_forward, _backward, symbolic_zeros=True)


def _with_lse_gradient(
    o: Operands, out: jax.Array, lse: jax.Array, d_out: Any, d_lse: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes what cuDNN does not: the gradient that comes by way of the log-sum-exp."""
    if o.mask is None:
        return gradients(Triton(), o, *cotangents(out, lse, d_out, d_lse))
    d_out = jnp.zeros_like(out) if isinstance(d_out, SymbolicZero) else d_out

    def again(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        return Blockwise().run(dataclasses.replace(o, query=query, key=key, value=value))

    return jax.vjp(again, o.query, o.key, o.value)[1]((d_out, d_lse))
