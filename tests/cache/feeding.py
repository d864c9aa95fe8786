# SPDX-License-Identifier: Apache-2.0
"""Feeding tokens to a cache piece by piece, with few programs to compile."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from jaxkv.cache import LayerCache, Scoring


@functools.partial(jax.jit, static_argnums=0)
def extended(
    how: Scoring, cache: LayerCache, given: Any, counts: Any = None, **options: Any
) -> Any:
    """Extends a cache by query, key and value: `(out, lse, cache)`."""
    query, key, value = given
    opened = cache.open(query.shape[1], counts)
    out, lse, written = opened.extend(query, key, value, how, **options)
    return out, lse, written.close()


def fed(
    how: Scoring,
    cache: LayerCache,
    given: Any,
    first: int = 0,
    last: int | None = None,
    *,
    counts: Any = None,
    width: int = 8,
) -> Any:
    """Feeds tokens `first .. last - 1`, padded with NaN to one width: one program serves many."""
    cut = [None if x is None else np.asarray(x)[:, first:last] for x in given]
    batch, real = cut[0].shape[:2]
    more = [(0, 0), (0, width - real), (0, 0), (0, 0)]
    padded = [None if x is None else np.pad(x, more, constant_values=np.nan) for x in cut]
    counts = np.full(batch, real, np.int32) if counts is None else np.asarray(counts, np.int32)
    out, lse, cache = extended(how, cache, padded, counts)
    return np.asarray(out)[:, :real], np.asarray(lse)[:, :real], cache
