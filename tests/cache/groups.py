# SPDX-License-Identifier: Apache-2.0
"""Caches whose codec encodes whole groups of tokens, fed and looked into."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.cache import (
    Contiguous,
    Kivi,
    KVSpec,
    LayerCache,
    Layout,
    Paged,
    create_layer,
)
from tests.cache.feeding import fed
from tests.cache.support import SPECS, bits, draw_tokens, scoring

Q = 4
KIVI = Kivi(bits=4, group=Q, value_group=3, dtype=jnp.float32)
B, S, WIDTH = 2, 26, 24
LAYOUTS: dict[str, Layout] = {"contiguous": Contiguous(), "paged": Paged(2 * Q, pages=40)}
USUAL = [(name, "contiguous") for name in ("gqa", "latent")] + [("gqa", "paged")]
EVERY = [
    case if case in USUAL else pytest.param(*case, marks=pytest.mark.full)
    for case in itertools.product(SPECS, LAYOUTS)
]


def flushed(length: int, group: int = Q) -> int:
    """Counts encoded tokens, from the rule: group g once there are (g + 2) groups."""
    return sum(group for g in range(length) if length >= (g + 2) * group)


def empty(name: str = "gqa", layout: str = "contiguous", codec: Any = KIVI) -> LayerCache:
    """Makes an empty cache whose every float is NaN and whose every code is 1."""
    cache = create_layer(SPECS[name][0], codec, B, S, layout=LAYOUTS[layout])
    spoilt = jax.tree.map(
        lambda x: jnp.full_like(x, jnp.nan if x.dtype == jnp.float32 else 1),
        (cache.records.planes, cache.records.rest),
    )
    records = dataclasses.replace(cache.records, planes=spoilt[0], rest=spoilt[1])
    return dataclasses.replace(cache, records=records)


def given(name: str = "gqa", length: int = WIDTH, seed: int = 0) -> Any:
    return draw_tokens(np.random.default_rng(seed), *SPECS[name], B, length)


def feed(cache: LayerCache, name: str, tokens: Any, widths: list[int], first: int = 0) -> Any:
    outs = []
    for width in widths:
        out, _, cache = fed(
            scoring(SPECS[name][0]), cache, tokens, first, first + width, width=WIDTH
        )
        outs.append(out)
        first += width
    return np.concatenate(outs, axis=1), cache


def live(cache: LayerCache, row: int) -> dict[str, list[bytes]]:
    """Gives the bytes of what a row stores: codes group by group, exact tokens by order."""
    r, length = cache.records, int(np.asarray(cache.lengths)[row])
    index = jax.tree.map(np.asarray, cache.index)
    entry, slot, _ = (np.asarray(x)[row] for x in cache.layout.places(index, r.slots))
    group = r.codec.group
    done, found = flushed(length, group), {}
    for name, plane in r.codec.planes(r.spec, 1).items():
        x = bits(r.planes[name])
        picked = range(0, done, plane.stride)
        found[name] = [x[entry[k], :, slot[k] // plane.stride].tobytes() for k in picked]
    for name, x in r.rest.items():
        x = bits(x)
        found[f"rest {name}"] = [x[row, :, k % (3 * group)].tobytes() for k in range(done, length)]
    return found


def coded(codec: Kivi, spec: KVSpec, key: Any, value: Any) -> Any:
    stored = jax.jit(functools.partial(codec.encode, spec))(key, value)
    return map(np.asarray, jax.jit(functools.partial(codec.decode, spec))(stored))


def converted(cache: LayerCache, **options: Any) -> LayerCache:
    return jax.jit(lambda cache: cache.convert(**options))(cache)
