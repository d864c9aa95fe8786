# SPDX-License-Identifier: Apache-2.0
"""JAX's splash attention on TPU, made to keep this library's promises."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkv.core.platform import target_platform
from jaxkv.ops.einsum import TILE_SCORES
from jaxkv.ops.merge import add_sink
from jaxkv.ops.operands import Operands, first_order
from jaxkv.ops.splash_blocks import LANES, Pattern, block_sizes, visits

if TYPE_CHECKING:
    from jax.experimental.pallas.tpu import InterpretParams

_WHERE = "jax.experimental.pallas.ops.tpu.splash_attention"
# JAX's own gradient runs the forward kernel again and takes none by the log-sum-exp, so its kernels
# are called one by one.
USED = ("_splash_attention_forward", "_splash_attention_bwd_dkv", "_splash_attention_bwd_dq")
# Ids that match none, of queries and of keys: padding sees nothing, and nothing sees it.
NO_QUERY, NO_KEY = np.iinfo(np.int32).min, np.iinfo(np.int32).min + 1
# What the kernel takes for a score that is not seen, and an LSE that makes any weight 0.
UNSEEN = -0.7 * float(np.finfo(np.float32).max)
# The kernel writes each log-sum-exp into all lanes, and takes copies that have heads first. Rows
# are taken together up to so many bytes of log-sum-exps, and heads of a row that is taken alone.
ROWS_BYTES, HEADS_BYTES = 2**26, 2**23


@dataclasses.dataclass(frozen=True)
class Splash:
    """Splash attention, a flash attention that skips blocks by a static rule, on TPU.

    Args:
      q_block: Queries of a block, in tokens; `None` fits the call's lengths, width, dtype and
        window, alike on every chip (`splash_blocks.block_sizes`).
      kv_block: Keys of a block, in tokens; `None` alike.
      interpret: Run on any platform, slowly, for tests: as plain operations, or with the memories
        of a chip by `jax.experimental.pallas.tpu.InterpretParams()`.

    Raises:
      ValueError: If a block is not made of whole lanes.

    Source: JAX, `jax.experimental.pallas.ops.tpu.splash_attention`.
    """

    q_block: int | None = None
    kv_block: int | None = None
    interpret: bool | InterpretParams = False
    name: str = "splash"

    def __post_init__(self) -> None:
        for name in ("q_block", "kv_block"):
            size = getattr(self, name)
            if size is not None and (size < LANES or size % LANES):
                raise ValueError(f"{name}={size}: want a multiple of {LANES}.")

    def refuses(self, operands: Operands) -> str | None:
        """Says which feature is missing for this call, or `None` if it can serve."""
        o, platform = operands, target_platform()
        if platform != "tpu" and not self.interpret:
            return f"runs on TPU only, not on {platform}"
        if lacking := o.given("bias", "ALiBi slopes", "dropout"):
            return lacking
        reasons = {
            f"has no {o.query.dtype}": o.query.dtype not in (jnp.float32, jnp.bfloat16),
            "has no mask but the rule and segments": o.mask is not None,
            "must know at trace time where queries and keys stand": o.offset is None,
            f"has no precision {o.precision}": _precision(o) is None,
            "is another one in this version of JAX": not all(hasattr(_library(), n) for n in USED),
        }
        return next((reason for reason, missing in reasons.items() if missing), None)

    def yields(self, operands: Operands) -> str | None:
        """Yields where a call is short."""
        T, S = operands.query.shape[1], operands.key.shape[1]
        if T < LANES:
            return "pads queries to a block"
        return "has one tile" if T * S <= TILE_SCORES else None

    def run(self, operands: Operands) -> tuple[jax.Array, jax.Array]:
        """Computes `(out [B, T, N, V], lse float32[B, T, N])`."""
        o = operands
        B, T, N, _ = o.query.shape
        if o.offset is None or 0 in (*o.query.shape, *o.value.shape):
            out = jnp.zeros((B, T, N, o.value.shape[-1]), o.value.dtype)
            lse = jnp.full((B, T, N), -jnp.inf, jnp.float32)
        else:
            S = o.key.shape[1]
            width = max(o.query.shape[3], o.value.shape[3])
            q_block, kv_block = block_sizes(o.rule, T, S, width, o.query.dtype)
            how = Kernels(
                Pattern(o.rule, o.offset, T, S, self.q_block or q_block, self.kv_block or kv_block),
                o.key.shape[2] == 1,
                o.scale,
                o.soft_cap,
                _precision(o) or "default",
                self.interpret,
            )
            arrays = o.emptied_query(), o.emptied(o.key), o.emptied(o.value)
            out, lse = _attend(how, *arrays, *_ids(o))
        return add_sink(out, lse, o.sink_logits)


def _ids(o: Operands) -> tuple[jax.Array | None, jax.Array | None]:
    """Gives segments int32 `[B, T]` and `[B, S]` in which padding matches nothing."""
    if o.q_segments is None and o.all_filled:
        return None, None
    B, T, S = *o.query.shape[:2], o.key.shape[1]
    ones = jnp.ones((1, 1), jnp.int32)
    q = jnp.broadcast_to(ones if o.q_segments is None else o.q_segments, (B, T))
    k = jnp.broadcast_to(ones if o.k_segments is None else o.k_segments, (B, S))
    if not o.all_filled:
        k = jnp.where(o.k_order >= 0, k, 0)
    return jnp.where(q == 0, NO_QUERY, q), jnp.where(k == 0, NO_KEY, k)


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The kernels of one call, for one row: heads come first in all its arrays."""

    pattern: Pattern
    one_head: bool
    scale: float
    soft_cap: float | None
    precision: str
    interpret: bool | InterpretParams

    def forward(
        self, q: jax.Array, k: jax.Array, v: jax.Array, ids: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Computes `(out [N, T, V], lse float32[N, T])` of whole blocks, from scaled queries."""
        lib, p = _library(), self.pattern
        with _plain(self.precision):
            out, (lse,) = lib._splash_attention_forward(
                self._info(),
                q,
                self._keys(k),
                self._keys(v),
                None if ids is None else lib.SegmentIds(*ids),
                None,
                mask_value=UNSEEN,
                is_mqa=self.one_head,
                block_sizes=lib.BlockSizes(p.q_block, p.kv_block, _part(p.kv_block)),
                residual_checkpoint_name=None,
                save_residuals=True,
                mask_function=p.mask_function(),
                attn_logits_soft_cap=self.soft_cap,
                interpret=self.interpret,
            )
        return out, lse

    def backward(
        self, q: jax.Array, k: jax.Array, v: jax.Array, ids: Any, rest: tuple
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Computes the gradients by scaled q, k and v from `(lse, d_out, delta)`."""
        lib, p = _library(), self.pattern
        segments = None if ids is None else lib.SegmentIds(*ids)
        args = (q, self._keys(k), self._keys(v), segments, None, *rest)
        layout = lib.QKVLayout.HEAD_DIM_MINOR
        options = dict(
            bq=p.q_block,
            bkv=p.kv_block,
            is_mqa=self.one_head,
            mask_value=UNSEEN,
            attn_logits_soft_cap=self.soft_cap,
            q_layout=layout,
            k_layout=layout,
            v_layout=layout,
            mask_function=p.mask_function(),
            interpret=self.interpret,
        )
        with _plain(self.precision):
            _, d_k, d_v = lib._splash_attention_bwd_dkv(
                *args,
                bkv_compute=p.kv_block,
                mask_info=self._info(by_key=True),
                use_fused_bwd_kernel=False,
                **options,
            )
            d_q = lib._splash_attention_bwd_dq(*args, mask_info=self._info(), **options)
        return d_q, d_k.reshape(k.shape), d_v.reshape(v.shape)

    def scaled(self, x: jax.Array) -> jax.Array:
        """Multiplies by the scale, rounding once."""
        return (x.astype(jnp.float32) * self.scale).astype(x.dtype)

    def _keys(self, x: jax.Array) -> jax.Array:
        return x[0] if self.one_head else x

    def _info(self, *, by_key: bool = False) -> Any:
        """Tells a kernel which blocks to visit; `by_key` is the order of the keys' gradient."""
        info = importlib.import_module(f"{_WHERE}.splash_attention_mask_info").MaskInfo
        if self.pattern.mask_function() is None:
            return info(None, None, None, None, None)
        live = self.pattern.live()
        block, run = visits(live.T if by_key else live)
        if by_key:
            block, run = block.swapaxes(1, 2), run.swapaxes(1, 2)
        queries = np.arange(self.pattern.queries, dtype=np.int32)
        return info(jnp.asarray(block), None, jnp.asarray(run), None, jnp.asarray(queries))


def _part(block: int) -> int:
    """Takes the keys of a block half by half: the forward kernel holds fewer scores."""
    return block // 2 if block % (2 * LANES) == 0 else block


@functools.cache
def _library() -> Any:
    return importlib.import_module(f"{_WHERE}.splash_attention_kernel")


@contextlib.contextmanager
def _plain(precision: str) -> Iterator[None]:
    """Runs code that was not written for strict promotion, with the precision of a call."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.numpy_dtype_promotion("standard"))
        stack.enter_context(jax.numpy_rank_promotion("allow"))
        if precision != "ambient":
            stack.enter_context(jax.default_matmul_precision(precision))
        yield


def _precision(o: Operands) -> str | None:
    """Names the precision of the products, `None` if the kernel knows none like it.

    Those of 16-bit numbers are exact in float32, and the compiler takes no other for them.
    """
    if o.query.dtype != jnp.float32:
        return "default"
    if o.precision is None:
        return "ambient"
    try:
        return lax.Precision(o.precision).name.lower()
    except ValueError:
        return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    how: Kernels, query: jax.Array, key: jax.Array, value: jax.Array, q_ids: Any, k_ids: Any
) -> tuple[jax.Array, jax.Array]:
    ids = None if q_ids is None else (q_ids, k_ids)

    def scaled(fn: Callable[..., Any]) -> Callable[..., Any]:
        return lambda q, *rest: fn(how.scaled(q), *rest)

    return _by_rows(functools.partial(_heads, how), scaled, ids, query, key, value)


def _forward(how: Kernels, *args: Any) -> tuple[tuple[jax.Array, jax.Array], tuple]:
    out, lse = _attend(how, *args)
    return (out, lse), (args, out, lse)


def _backward(how: Kernels, saved: tuple, grads: tuple) -> tuple:
    (query, key, value, q_ids, k_ids), *outs = saved
    ids = None if q_ids is None else (q_ids, k_ids)
    return *_gradients(how, ids, query, key, value, *outs, *grads), None, None


@functools.partial(first_order, "splash")
def _gradients(how: Kernels, *args: Any) -> tuple[jax.Array, ...]:
    """Computes the gradients by query, key and value of all rows, from what a row's need."""

    def scaled(fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(q: jax.Array, *rest: jax.Array) -> tuple[jax.Array, ...]:
            d_q, *others = fn(how.scaled(q), *rest)
            return how.scaled(d_q), *others

        return call

    return _by_rows(functools.partial(_heads_gradients, how), scaled, *args)


_attend.defvjp(_forward, _backward)


def _by_rows(fn: Callable[..., Any], scaled: Callable[..., Any], ids: Any, *args: jax.Array) -> Any:
    """Maps `fn(ids, *row)` over rows, as many at once as their log-sum-exps in all lanes allow.

    Of a row that is taken alone it takes some heads at a time.

    Args:
      fn: Takes and differentiates by scaled queries.
      scaled: Makes a function that does so one of the queries as they are.
      ids: Segments of queries and keys, or `None`.
      *args: Queries, keys and what else belongs to each row.
    """
    B, T, N, _ = args[0].shape
    most = ROWS_BYTES // (4 * LANES * T * N)
    rows = max(n for n in range(1, B + 1) if B % n == 0 and n <= max(1, most))
    parts = 1 if rows > 1 else _parts(T, N, args[1].shape[2])

    def row(given: tuple[Any, ...]) -> Any:
        ids, *args = given
        each = functools.partial(fn, ids)
        return each(*args) if parts == 1 else _by_heads(scaled(each), parts, *args)

    def every(*args: jax.Array) -> Any:
        if rows == B:
            return jax.vmap(row)((ids, *args))
        return lax.map(row, (ids, *args), batch_size=rows)

    # Scaled within the map, queries of rows that go together cost XLA for TPU more copies of all.
    return scaled(every)(*args) if parts == 1 else every(*args)


def _by_heads(fn: Callable[..., Any], parts: int, *args: jax.Array) -> Any:
    """Maps `fn` over a part of a row's heads at a time.

    Heads are the second axis of all that `fn` takes and gives. Query heads stay with their KV
    head; those of a single one may part, and what they give for it is added up.
    """

    def part(i: Any, x: jax.Array) -> jax.Array:
        n = x.shape[1] // parts
        return lax.dynamic_slice_in_dim(x, i * n, n, 1) if n else x

    def one(i: Any) -> list[jax.Array]:
        return jax.tree.leaves(fn(*(part(i, x) for x in args)))

    def joined(i: jax.Array, done: jax.Array, new: jax.Array) -> jax.Array:
        if done.shape == new.shape:
            return done + new.astype(done.dtype)
        return lax.dynamic_update_slice_in_dim(done, new, i * new.shape[1], 1)

    def body(i: jax.Array, done: list[jax.Array]) -> list[jax.Array]:
        return [joined(i, *pair) for pair in zip(done, one(i), strict=True)]

    whole, shared = jax.eval_shape(fn, *args), jax.eval_shape(lambda: one(0))
    shapes = list(zip(jax.tree.leaves(whole), shared, strict=True))
    types = [jnp.float32 if w.shape == x.shape else w.dtype for w, x in shapes]
    empty = [jnp.zeros(w.shape, t) for (w, _), t in zip(shapes, types, strict=True)]
    done = lax.fori_loop(0, parts, body, empty)
    done = [x.astype(w.dtype) for x, (w, _) in zip(done, shapes, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(whole), done)


def _parts(T: int, N: int, K: int) -> int:
    """Says in how many parts the N heads of a row are taken."""
    units = N if K == 1 else K
    most = HEADS_BYTES // (4 * LANES * T * (N // units))
    return units // max(n for n in range(1, units + 1) if units % n == 0 and n <= max(1, most))


def _heads(how: Kernels, ids: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    """Computes `(out [T, n, V], lse float32[T, n])` of some heads of a row."""
    p = how.pattern
    q, k, v = _heads_first(q, p.queries), _heads_first(k, p.keys), _heads_first(v, p.keys)
    out, lse = how.forward(q, k, v, _whole(how, ids))
    # A query that sees nothing has weighed what it must not see, or nothing at all.
    blind = lse <= UNSEEN / 2
    out = jnp.where(blind[..., None], jnp.zeros((), out.dtype), out)
    lse = jnp.where(blind, -jnp.inf, lse)
    return jnp.swapaxes(out, 0, 1)[: p.T], jnp.swapaxes(lse, 0, 1)[: p.T]


def _heads_gradients(
    how: Kernels,
    ids: Any,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array,
) -> tuple[jax.Array, ...]:
    """Computes the gradients by `q [T, n, H]`, `k [S, k, H]` and `v [S, k, V]` of some heads."""
    p, blind = how.pattern, jnp.isneginf(lse)
    d_out = jnp.where(blind[..., None], jnp.zeros((), d_out.dtype), d_out)
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1) - d_lse
    delta = jnp.where(blind, 0.0, delta)
    lse = jnp.where(blind, -UNSEEN, lse)  # such a query gives weight 0 to all
    rest = (
        _heads_first(lse, p.queries, -UNSEEN),
        _heads_first(d_out, p.queries),
        _heads_first(delta, p.queries),
    )
    grads = how.backward(
        _heads_first(q, p.queries),
        _heads_first(k, p.keys),
        _heads_first(v, p.keys),
        _whole(how, ids),
        rest,
    )
    sizes = (p.T, p.S, p.S)
    return tuple(jnp.swapaxes(g, 0, 1)[:n] for g, n in zip(grads, sizes, strict=True))


def _heads_first(x: jax.Array, length: int, fill: float = 0.0) -> jax.Array:
    """Turns `[T, N, *]` into `[N, length, *]`."""
    return _longer(jnp.swapaxes(x, 0, 1), 1, length, fill)


def _whole(how: Kernels, ids: Any) -> Any:
    if ids is None:
        return None
    q, k = ids
    lengths = how.pattern.queries, how.pattern.keys
    return _longer(q, 0, lengths[0], NO_QUERY), _longer(k, 0, lengths[1], NO_KEY)


def _longer(x: jax.Array, axis: int, length: int, fill: float) -> jax.Array:
    pad = [(0, 0, 0)] * x.ndim
    pad[axis] = (0, length - x.shape[axis], 0)
    return lax.pad(x, jnp.asarray(fill, x.dtype), pad)
