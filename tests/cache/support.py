# SPDX-License-Identifier: Apache-2.0
"""Caches under test, and a plain Python history that they are held against."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache import (
    Codec,
    Contiguous,
    Evicting,
    Float8,
    Int4,
    Int8,
    KVSpec,
    LayerCache,
    Layout,
    Paged,
    Raw,
    Ring,
    Scoring,
    create_layer,
)
from jaxkv.core.visibility import Visibility
from tests.support import dense

# Every kind of record: (spec, query heads).
SPECS = {
    "gqa": (KVSpec(2, 8, 6), 6),
    "latent": (KVSpec(1, 12, 8, value_offset=0), 4),
    "shared": (KVSpec(2, 8, 6, shared_width=4), 4),
    "middle": (KVSpec(2, 10, 4, value_offset=3), 4),
}
RULES = {
    "causal": Visibility(),
    "window": Visibility(window=3),
    "pinned": Visibility(window=3, pinned=2),
    "lookahead": Visibility(causal=False, window=(4, 1)),
}


@dataclasses.dataclass(frozen=True)
class SmallBlocks(Contiguous):
    """Reads 4 slots at a time, so that small caches have several blocks and a ragged last one."""

    def tile(self, slots: int, want: int) -> int:
        return min(slots, want, 4)


@dataclasses.dataclass(frozen=True)
class Kept:
    """What a layout promises, in plain numbers, of a row with `held` tokens.

    `high` is the most tokens the row has held since it was emptied.
    """

    layout: Layout
    room: Callable[[int, int], int]  # (held, capacity) -> tokens that still fit
    refuses: Callable[[int, int, int], bool]  # (held, wanted back, high) -> refused
    orders: Callable[[int, int], list[int]]  # (held, high) -> the tokens that are there
    lowers: Callable[[int], bool]  # (left) -> a rollback to so many starts `high` again


RING = Ring(window=3, pinned=2, spare=1)
RING_SLOTS = 6


def _in_ring(held: int, high: int) -> list[int]:
    return [k for k in range(held) if k < 2 or k >= high - 4]


# A further layout or codec joins the tests here.
LAYOUTS = {
    "contiguous": Kept(
        SmallBlocks(),
        lambda held, slots: slots - held,
        lambda held, n, high: n > held,
        lambda held, high: list(range(held)),
        lambda left: True,
    ),
    "ring": Kept(
        RING,
        lambda held, slots: 10**9,
        # The next query sees itself, two before it and the two pinned ones.
        lambda held, n, high: (
            n > held
            or not set(range(max(held - n - 2, 0), held - n)) <= set(_in_ring(held - n, high))
        ),
        _in_ring,
        lambda left: left <= 2,
    ),
    # With pages to spare; what happens without stands in test_paged.py.
    "paged": Kept(
        Paged(4, pages=256),
        lambda held, slots: -(-slots // 4) * 4 - held,
        lambda held, n, high: n > held,
        lambda held, high: list(range(held)),
        lambda left: True,
    ),
    # Here nobody evicts; who does stands in test_evicting.py.
    "evicting": Kept(
        Evicting(9),
        lambda held, slots: min(9, slots) - held,
        lambda held, n, high: n > held,
        lambda held, high: list(range(held)),
        lambda left: True,
    ),
}
CODECS: dict[str, Codec] = {
    "float32": Raw(jnp.float32),
    "bfloat16": Raw(jnp.bfloat16),
    "float16": Raw(jnp.float16),
    "int8": Int8(),
    "int4": Int4(group=4),
    "float8": Float8(),
}


def scoring(spec: KVSpec, rule: Visibility = RULES["causal"], **options: Any) -> Scoring:
    """Scores as most modules do."""
    return Scoring(rule, spec.query_width**-0.5, **options)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Draws float32 numbers of size 1."""
    return rng.normal(size=shape).astype(np.float32)


def draw_tokens(
    rng: np.random.Generator, spec: KVSpec, heads: int, batch: int, length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Draws query, key and value of new tokens; heads agree on what they share."""
    query = normal(rng, batch, length, heads, spec.query_width)
    key = normal(rng, batch, length, spec.kv_heads, spec.query_width)
    key[..., spec.key_width :] = key[:, :, :1, spec.key_width :]
    if spec.value_offset is not None:
        return query, key, None
    return query, key, normal(rng, batch, length, spec.kv_heads, spec.value_width)


def values_of(spec: KVSpec, key: Any, value: Any) -> Any:
    """Gives the values of tokens: their own array, or their part of the key."""
    if spec.value_offset is None:
        return value
    return key[..., spec.value_offset : spec.value_offset + spec.value_width]


def poisoned(cache: LayerCache, fills: tuple[float, float] = (np.nan, np.inf)) -> LayerCache:
    """Puts NaN and inf, slot by slot in turns, wherever no token is stored."""
    entry, slot, order = cache.layout.places(cache.index, cache.records.slots)
    shape = next(iter(cache.records.planes.values())).shape
    # Slots of no row, as pages that nobody owns, are not filled either.
    filled = jnp.zeros((shape[0] + 1, shape[2]), bool)
    filled = filled.at[jnp.where(order >= 0, entry, shape[0]), slot].set(True)[: shape[0]]

    def spoil(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.where(_over(filled, x), x, jnp.ones((), x.dtype))
        turn = (jnp.arange(x.shape[2]) % 2 == 0).reshape(1, 1, -1, *(1,) * (x.ndim - 3))
        rubbish = jnp.where(turn, *(jnp.asarray(f, x.dtype) for f in fills))
        return jnp.where(_over(filled, x), x, rubbish)

    planes = {n: spoil(x) for n, x in cache.records.planes.items()}
    return dataclasses.replace(cache, records=dataclasses.replace(cache.records, planes=planes))


def _over(filled: jax.Array, x: jax.Array) -> jax.Array:
    return filled.reshape(filled.shape[0], 1, filled.shape[1], *(1,) * (x.ndim - 3))


@functools.partial(jax.jit, static_argnums=range(6))
def fresh(
    name: str = "gqa",
    batch: int = 2,
    capacity: int = 12,
    layout: str = "contiguous",
    codec: str = "float32",
    lanes: int = 1,
) -> LayerCache:
    """Makes an empty cache with rubbish in its slots."""
    chosen = LAYOUTS[layout].layout
    return poisoned(
        create_layer(SPECS[name][0], CODECS[codec], batch, capacity, layout=chosen, lanes=lanes)
    )


def bits(x: Any) -> np.ndarray:
    """Views an array as bytes, so that NaN equals itself."""
    x = np.asarray(x)
    return x.view(np.uint8).reshape(*x.shape, x.dtype.itemsize)


@dataclasses.dataclass
class History:
    """All tokens of each row, in order, as a list of (key `[K, H]`, value `[K, V]`)."""

    rows: list[list[tuple[np.ndarray, np.ndarray]]]

    def arrays(self, row: int, spec: KVSpec) -> tuple[np.ndarray, np.ndarray]:
        """Stacks one row: keys `[1, S, K, H]`, values `[1, S, K, V]`."""
        tokens = self.rows[row]
        key = np.zeros((len(tokens), spec.kv_heads, spec.query_width))
        value = np.zeros((len(tokens), spec.kv_heads, spec.value_width))
        for i, (k, v) in enumerate(tokens):
            key[i], value[i] = k, v
        return key[None], value[None]

    def attend(
        self,
        row: int,
        spec: KVSpec,
        how: Scoring,
        query: np.ndarray,
        first: int,
        mask: np.ndarray | None = None,
        bias: np.ndarray | None = None,
        sink_logits: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Attends in float64 from queries `[T, N, H]` that stand at order `first` and on.

        Args:
          row: Whose tokens.
          spec: Of the records.
          how: Rule, scale and so on.
          query: `[T, N, H]`.
          first: Order of the first query.
          mask: bool `[N, T, S]` or None; bias alike. S is at least the row's length.
          bias: As the mask.
          sink_logits: `[N]`.

        Returns:
          `(out [T, N, V], lse [T, N])`.
        """
        key, value = self.arrays(row, spec)
        S = key.shape[1]
        arrays: dict[str, Any] = {"query": query[None], "key": key, "value": value}
        options: dict[str, Any] = {
            "causal": how.rule.causal,
            "window": how.rule.window,
            "pinned": how.rule.pinned,
            "offset": first,
            "scale": how.scale,
            "soft_cap": how.soft_cap,
        }
        if mask is not None:
            options["mask"] = mask[None, ..., :S]
        if bias is not None:
            arrays["bias"] = bias[None, ..., :S]
        if sink_logits is not None:
            arrays["sink_logits"] = sink_logits
        result = dense.attention(arrays, options)
        return result.out[0], result.lse[0]
