# SPDX-License-Identifier: Apache-2.0
"""Attention on arrays: checks a call and chooses who computes it."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.core.positions import orders
from jaxkv.core.sharding import axis_size, current_rules, local
from jaxkv.core.trees import check_arrays, check_constants, is_known
from jaxkv.core.visibility import Visibility
from jaxkv.ops.blockwise import Blockwise
from jaxkv.ops.cudnn import CuDNN
from jaxkv.ops.dropping import dropout_seeds
from jaxkv.ops.einsum import Einsum
from jaxkv.ops.operands import Implementation, Operands
from jaxkv.ops.reference import Reference
from jaxkv.ops.splash import Splash
from jaxkv.ops.triton import Triton

# How a caller says who shall compute.
Choice = str | Implementation | Sequence[str | Implementation] | None

# In order of preference; the last ones can serve anything.
IMPLEMENTATIONS: tuple[Implementation, ...] = (
    *(Splash(), CuDNN(), Triton()),
    *(Einsum(), Blockwise(), Reference()),
)


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    implementation: Choice = None,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Computes grouped scaled dot-product attention.

    Args:
      query: `[B, T, N, H]`.
      key: `[B, S, K, H]`; K divides N, and query head n reads KV head n // (N // K).
      value: `[B, S, K, V]`; V may differ from H.
      implementation: `None` picks the best that can serve and never fails; a name, or an
        implementation such as `Blockwise(slots=128)`, fails loudly if it cannot serve; a sequence
        of them is tried in order.
      return_lse: Also return the log-sum-exp of each query's scores.
      **options: causal, window, pinned, offset, query_order, key_order, query_segments,
        key_segments, query_lengths, key_lengths, mask, bias, scale, soft_cap, sink_logits,
        alibi_slopes, dropout_rate, dropout_key and
        precision, as `jaxkv.ops.api.prepare` explains them.

    Returns:
      `[B, T, N, V]` in the value's dtype, and with `return_lse` also float32 `[B, T, N]`. A
      query that sees no key gives exactly 0 and -inf.

    Raises:
      ValueError: If shapes do not fit, or the named implementation cannot serve.

    >>> q, k = jnp.ones((1, 2, 1, 1)), jnp.ones((1, 5, 1, 1))
    >>> v = jnp.arange(5.0).reshape(1, 5, 1, 1)
    >>> attention(q, k, v, causal=True, offset=3).ravel().tolist()  # end-aligned
    [1.5, 2.0]
    """
    operands = prepare(query, key, value, **_known_options(options))
    operands = dataclasses.replace(operands, lse_wanted=return_lse)
    out, lse = run_on_mesh(choose(operands, implementation), operands)
    return (out, lse) if return_lse else out


def prepare(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool = False,
    window: int | tuple[int, int] | None = None,
    pinned: int = 0,
    offset: jax.Array | int | None = None,
    query_order: jax.Array | None = None,
    key_order: jax.Array | None = None,
    query_segments: jax.Array | None = None,
    key_segments: jax.Array | None = None,
    query_lengths: jax.Array | None = None,
    key_lengths: jax.Array | None = None,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: jax.Array | None = None,
    alibi_slopes: jax.Array | tuple[float, ...] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    precision: Any = None,
) -> Operands:
    """Checks a call and gathers it into `Operands`.

    Args:
      query: `[B, T, N, H]`.
      key: `[B, S, K, H]`.
      value: `[B, S, K, V]`. NaN at a key that is not filled or padding changes nothing; a value
        of NaN that only a mask, a window or `causal` hides may reach the output, since 0 times NaN
        is NaN.
      causal: Hide keys after the query.
      window: W keys, self included, or `(left, right)`; see `Visibility`.
      pinned: First tokens of a row that a window never hides.
      offset: Order of query 0 among the keys, an int or int32 `[B]`, in tokens.
      query_order: int32 `[B|1, T]`, instead of `offset`.
      key_order: int32 `[B|1, S]`; -1 marks an unfilled slot. Default 0 .. S-1.
      query_segments: int32 `[B, T]`; 0 is padding (sees nothing, gives 0).
      key_segments: int32 `[B, S]`; defaults to `query_segments` when T == S.
      query_lengths: int32 `[B]`, real queries of each row, in tokens.
      key_lengths: int32 `[B]`, real keys of each row, in tokens.
      mask: bool, True = keep; `[S]`, `[T, S]` or 4-D, broadcastable to `[B, N, T, S]`.
      bias: Added to the scores after the soft-cap; shapes as `mask`.
      scale: Multiplies the scores; default `H ** -0.5`.
      soft_cap: Squashes scores into (-cap, cap); `None` or 0 is off.
      sink_logits: `[N]`, learned logits that join the softmax without a value.
      alibi_slopes: `[N]`; each score is lowered by its head's slope times the distance of key and
        query in tokens (Press et al., arXiv:2108.12409, section 3). Also what
        `jaxkv.alibi_slopes(N)` gives.
      dropout_rate: Share of attention weights dropped, in [0, 1).
      dropout_key: PRNG key; needed when `dropout_rate` is not 0.
      precision: Of the matrix products, as in `jax.lax.dot_general`.

    Returns:
      The checked `Operands`.

    Raises:
      ValueError: If anything does not fit; the message names what was passed and what fits.
    """
    if isinstance(alibi_slopes, tuple):
        alibi_slopes = jnp.asarray(alibi_slopes, jnp.float32)
    check_arrays(
        query=query,
        key=key,
        value=value,
        query_order=query_order,
        key_order=key_order,
        query_segments=query_segments,
        key_segments=key_segments,
        query_lengths=query_lengths,
        key_lengths=key_lengths,
        mask=mask,
        bias=bias,
        sink_logits=sink_logits,
        alibi_slopes=alibi_slopes,
    )
    _check_shapes(query, key, value)
    B, T, N, H = query.shape
    S = key.shape[1]
    rule = Visibility(causal, window, pinned)
    if offset is not None and query_order is not None:
        raise ValueError("offset and query_order both place the queries: pass one of them.")
    if rule.needs_alignment and T != S and offset is None and query_order is None:
        raise ValueError(
            f"{T} queries and {S} keys with {rule}: where do the queries stand? Pass offset "
            f"(order of query 0; {S - T} aligns the ends) or query_order."
        )
    known = offset is None or isinstance(offset, (int, np.integer))
    aligned = int(offset or 0) if known and query_order is None and key_order is None else None
    q_order = orders(T) if query_order is None else query_order
    k_order = orders(S) if key_order is None else key_order
    _check_ints(query_order=(q_order, T, B), key_order=(k_order, S, B))
    if offset is not None:
        q_order = q_order + _offsets(offset, B)
    k_order = _limited(k_order, key_lengths, S, B, "key_lengths")
    if query_segments is not None and key_segments is None and T == S:
        key_segments = query_segments
    if query_lengths is not None:
        real = _limited(orders(T), query_lengths, T, B, "query_lengths") >= 0
        query_segments = _zeroed(query_segments, real, key_segments)
        key_segments = jnp.ones((B, S), jnp.int32) if key_segments is None else key_segments
    if (query_segments is None) != (key_segments is None):
        raise ValueError("query_segments and key_segments belong together: pass both.")
    if query_segments is not None and key_segments is not None:
        _check_ints(query_segments=(query_segments, T, B), key_segments=(key_segments, S, B))
        query_segments = jnp.broadcast_to(query_segments, (B, T))
        key_segments = jnp.broadcast_to(key_segments, (B, S))
    for name, x in (("sink_logits", sink_logits), ("alibi_slopes", alibi_slopes)):
        if x is not None and (x.shape != (N,) or not jnp.issubdtype(x.dtype, jnp.floating)):
            raise ValueError(f"{name} {x.dtype}{x.shape}: want float ({N},), one per query head.")
    check_constants(scale=scale, soft_cap=soft_cap, dropout_rate=dropout_rate)
    _check_key(dropout_key)
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale={scale}: want a finite number, or None.")
    if not 0 <= dropout_rate < 1 or (dropout_rate and dropout_key is None):
        raise ValueError(f"dropout_rate={dropout_rate}: want [0, 1) and a dropout_key if not 0.")
    if soft_cap is not None and not 0 <= soft_cap < math.inf:
        raise ValueError(f"soft_cap={soft_cap}: want a finite number above 0, or None.")
    return Operands(
        query,
        key,
        value,
        q_order,
        k_order,
        query_segments,
        key_segments,
        as_mask(mask, (B, N, T, S)),
        as_bias(bias, (B, N, T, S)),
        sink_logits,
        alibi_slopes,
        dropout_seeds(dropout_key, B, N) if dropout_key is not None and dropout_rate else None,
        rule,
        H**-0.5 if scale is None else float(scale),
        soft_cap or None,
        dropout_rate,
        precision,
        all_filled=key_order is None and key_lengths is None,
        offset=aligned,
        lse_wanted=True,
    )


OPTIONS = tuple(inspect.signature(prepare).parameters)[3:]


def _check_key(key: Any) -> None:
    if key is None:
        return
    dtype = getattr(key, "dtype", None)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if np.shape(key) != (() if typed else (2,)) or not (typed or dtype == jnp.uint32):
        raise ValueError(f"dropout_key={key!r}: want one PRNG key, such as jax.random.key(0).")


def _known_options(options: dict[str, Any]) -> dict[str, Any]:
    if unknown := sorted(set(options) - set(OPTIONS)):
        raise ValueError(f"unknown options {unknown} of attention: want of {list(OPTIONS)}.")
    return options


def run_on_mesh(chosen: Implementation, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Runs an implementation on each device's own rows and heads."""
    heads = head_axis(operands.key.shape[2])
    kv_heads = "kv_heads" if heads and operands.key.shape[2] > 1 else None
    rows = ("batch", None)
    keys = ("batch", None, kv_heads, None)
    scores = ("batch", heads, None, None)
    axes = dataclasses.replace(
        operands,
        query=("batch", None, heads, None),
        key=keys,
        value=keys,
        q_order=rows,
        k_order=rows,
        q_segments=rows,
        k_segments=rows,
        mask=scores,
        bias=scores,
        sink_logits=(heads,),
        alibi_slopes=(heads,),
        dropout_seeds=("batch", heads),
    )
    out_axes = (("batch", None, heads, None), ("batch", None, heads))
    return local(chosen.run, (axes,), out_axes)(operands)


def head_axis(kv_heads: int) -> str | None:
    """Names the logical axis of query heads: split only where each device's KV heads fit.

    One KV head serves any split of the query heads; several must be divided alike, over the
    same mesh axis. Rows keep a mesh axis that rows and heads both ask for.
    """
    rules = current_rules()
    mine, theirs = rules.mesh_axis("heads"), rules.mesh_axis("kv_heads")
    alike = mine == theirs and kv_heads % axis_size("kv_heads") == 0
    fits = mine != rules.mesh_axis("batch") and (kv_heads == 1 or alike)
    return "heads" if fits else None


def choose(operands: Operands, implementation: Choice) -> Implementation:
    """Finds the implementation for a call, or raises with every reason why not."""
    known = {i.name: i for i in IMPLEMENTATIONS}
    if implementation is None:
        given: Sequence[Any] = IMPLEMENTATIONS
    else:
        given = implementation if isinstance(implementation, (list, tuple)) else [implementation]
    if not given:
        raise ValueError(f"implementation={implementation!r} names none: want of {sorted(known)}.")
    if unknown := [i for i in given if i not in known and not hasattr(i, "refuses")]:
        raise ValueError(f"unknown implementation {unknown}: want of {sorted(known)}.")
    tried: list[Implementation] = [known[i] if isinstance(i, str) else i for i in given]
    able = [i for i in tried if i.refuses(operands) is None]
    if implementation is None:
        able.sort(key=lambda one: one.yields(operands) is not None)
    if able:
        return able[0]
    reasons = {i.name: i.refuses(operands) for i in tried}
    raise ValueError(f"cannot serve this call: {reasons}.")


def explain(query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> dict[str, str]:
    """Lists each implementation with "serves" or the reason why it cannot serve the call.

    One that can serve but is not the best choice says so; `implementation=None` passes it over.

    >>> q = jnp.ones((1, 1024, 1, 4))
    >>> explain(q, q, q)["einsum"]
    'serves, but holds all 1024 x 1024 scores of a head at once'
    """
    operands = prepare(query, key, value, **_known_options(options))
    return {i.name: _said(i, operands) for i in IMPLEMENTATIONS}


def _said(one: Implementation, operands: Operands) -> str:
    refused, yielded = one.refuses(operands), one.yields(operands)
    return refused or ("serves" if yielded is None else f"serves, but {yielded}")


def as_mask(mask: jax.Array | None, want: tuple[int, int, int, int]) -> jax.Array | None:
    """Checks a caller's mask and lifts it to 4-D; it is never dropped or reinterpreted."""
    if mask is None:
        return None
    if mask.dtype != jnp.bool_:
        raise ValueError(f"mask is {mask.dtype}: want bool, True = keep.")
    return _lifted("mask", mask, want)


def as_bias(bias: jax.Array | None, want: tuple[int, int, int, int]) -> jax.Array | None:
    """Checks a caller's bias and lifts it to 4-D."""
    if bias is None:
        return None
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise ValueError(f"bias is {bias.dtype}: want a float dtype (a bool array is a mask).")
    return _lifted("bias", bias, want)


def check_lengths(name: str, lengths: jax.Array, most: int, batch: int) -> None:
    """Checks int32 `[B]` lengths; values are checked where they are known (outside `jit`)."""
    check_arrays(**{name: lengths})
    if lengths.shape != (batch,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(f"{name} {lengths.dtype}{lengths.shape}: want int32 ({batch},).")
    if is_known(lengths):
        values = np.asarray(lengths)
        if values.size and (values.min() < 0 or values.max() > most):
            raise ValueError(f"{name} {values.tolist()}: want 0 to {most} tokens in each row.")


def _offsets(offset: jax.Array | int, batch: int) -> jax.Array:
    offset = jnp.asarray(offset)
    fits = offset.shape in ((), (1,), (batch,)) and jnp.issubdtype(offset.dtype, jnp.integer)
    if not fits:
        raise ValueError(f"offset {offset.dtype}{offset.shape}: want int32 () or ({batch},).")
    return offset.astype(jnp.int32).reshape(-1, 1)


def _limited(
    order: jax.Array, lengths: jax.Array | None, size: int, batch: int, name: str
) -> jax.Array:
    if lengths is None:
        return order
    check_lengths(name, lengths, size, batch)
    return jnp.where(orders(size) < lengths[:, None], order, -1)


def _zeroed(
    segments: jax.Array | None, real: jax.Array, key_segments: jax.Array | None
) -> jax.Array:
    if segments is None:
        if key_segments is not None:
            raise ValueError("key_segments without query_segments: pass both.")
        return real.astype(jnp.int32)
    return jnp.where(real, segments, 0)


def _lifted(name: str, x: jax.Array, want: tuple[int, int, int, int]) -> jax.Array:
    shape = (1,) * (4 - x.ndim) + x.shape
    fits = x.ndim in (1, 2, 4) and all(a in (1, b) for a, b in zip(shape[:3], want, strict=False))
    if not fits or shape[3] != want[3]:
        raise ValueError(
            f"{name} {x.shape} does not fit: want [S], [T, S] or [B|1, N|1, T|1, S] with "
            f"B={want[0]}, N={want[1]}, T={want[2]}, S={want[3]}."
        )
    return x.reshape(shape)


def _check_shapes(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    got = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if not query.ndim == key.ndim == value.ndim == 4:
        raise ValueError(f"{got}: want [B, T, N, H], [B, S, K, H], [B, S, K, V].")
    B, _, N, H = query.shape
    if key.shape[0] != B or key.shape[3] != H or key.shape[:3] != value.shape[:3]:
        raise ValueError(f"{got}: want the same B, K, S and key width H={H}.")
    K = key.shape[2]
    if K < 1 or N % K:
        raise ValueError(f"{got}: {N} query heads are no multiple of {K} KV heads.")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"{query.dtype}, {key.dtype}, {value.dtype}: want one dtype for all.")
    if not jnp.issubdtype(query.dtype, jnp.floating):
        raise ValueError(f"query, key and value are {query.dtype}: want a float dtype.")


def _check_ints(**arrays: tuple[jax.Array, int, int]) -> None:
    for name, (x, size, batch) in arrays.items():
        fits = x.ndim == 2 and x.shape[0] in (1, batch) and x.shape[1] == size
        if not fits or not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{name} {x.dtype}{x.shape}: want int32 ({batch}, {size}).")
