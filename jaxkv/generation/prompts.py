# SPDX-License-Identifier: Apache-2.0
"""Checks what `generate` is given, and pads prompts to few shapes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache.model_cache import ModelCache
from jaxkv.core.trees import check_arrays
from jaxkv.models.decoder import Decoder
from jaxkv.ops.api import check_lengths


def padded_prompts(prompts: Any, lengths: Any, model: Decoder) -> tuple[jax.Array, jax.Array]:
    """Pads prompts to one of a few widths, so that few of them compile anew.

    Args:
      prompts: Token lists of any lengths, or int32 `[B, T]`.
      lengths: int32 `[B]` of an array, or `None`.
      model: Says which tokens and positions there are.

    Returns:
      int32 `[B, T]` and int32 `[B]`.

    Raises:
      ValueError: If they are no tokens of the model.
    """
    rows = _rows(prompts, lengths)
    counts = np.array([row.size for row in rows], np.int32)
    if counts.size == 0 or counts.min() < 1:
        raise ValueError(f"prompts of {counts.tolist()} tokens: want at least one token in each.")
    if bad := [row for row in rows if row.ndim != 1 or not np.issubdtype(row.dtype, np.integer)]:
        kind = f"{bad[0].dtype} {bad[0].tolist()}"
        raise ValueError(f"a prompt of {kind}: want whole numbers, the tokens.")
    low, high = min(row.min() for row in rows), max(row.max() for row in rows)
    if low < 0 or high >= model.vocab:
        raise ValueError(f"prompts hold tokens {low} to {high}: want 0 to {model.vocab - 1}.")
    tokens = np.zeros((counts.size, bucket(int(counts.max()), model)), np.int32)
    for given, row in zip(tokens, rows, strict=True):
        given[: row.size] = row
    return jnp.asarray(tokens), jnp.asarray(counts)


def _rows(prompts: Any, lengths: Any) -> list[np.ndarray]:
    if isinstance(prompts, (jax.Array, np.ndarray)):
        array = np.asarray(prompts)
        if array.ndim != 2:
            raise ValueError(f"prompts {array.dtype}{array.shape}: want int32 [B, T] or lists.")
        if lengths is None:
            return list(array)
        check_lengths("lengths", jnp.asarray(lengths), array.shape[1], array.shape[0])
        return [row[:n] for row, n in zip(array, np.asarray(lengths), strict=True)]
    if lengths is not None:
        raise ValueError("lengths belong to an array of prompts; token lists know their own.")
    wrong = isinstance(prompts, str) or any(
        isinstance(p, str) or not hasattr(p, "__len__") for p in prompts
    )
    if wrong:
        raise ValueError("prompts want a list of token lists, one for each row: [[1, 2], [3]].")
    return [np.asarray(p) if len(p) else np.zeros(0, np.int32) for p in prompts]


def bucket(length: int, model: Decoder) -> int:
    """Rounds a length up: powers of two to 64, then multiples of 64, within learned positions."""
    rounded = -(-length // 64) * 64 if length > 64 else 1 << (length - 1).bit_length()
    limit = model.max_positions
    return rounded if limit is None or rounded <= limit else max(length, limit)


def checked_stops(stop_tokens: Any, vocab: int) -> tuple[int, ...]:
    """Gives stop tokens as plain numbers.

    Raises:
      ValueError: If one is no token.
    """
    stops = np.atleast_1d(np.asarray(stop_tokens))
    whole = stops.size == 0 or np.issubdtype(stops.dtype, np.integer)
    if stops.ndim != 1 or not whole or np.any((stops < 0) | (stops >= vocab)):
        raise ValueError(f"stop_tokens {stops.tolist()}: want tokens of 0 to {vocab - 1}.")
    return tuple(int(t) for t in stops)


def check_fit(cache: ModelCache, counts: np.ndarray) -> None:
    """Checks that prompts of `counts` tokens fit the rows of a cache.

    Raises:
      ValueError: If they do not, or if the cache is gone.
    """
    cache.check_alive()
    held = np.asarray(cache.lengths)
    if held.shape != counts.shape:
        raise ValueError(f"{counts.size} prompts for a cache of {held.size} rows: want the same.")
    if np.any(held.astype(np.int64) + counts > cache.capacity):
        raise ValueError(
            f"prompts of {counts.tolist()} tokens do not fit: rows hold {held.tolist()} of "
            f"{cache.capacity}."
        )


def check_context(cache: ModelCache, context: Any, lengths: Any) -> None:
    """Checks that each row has one context: in the cache, or given now.

    Raises:
      ValueError: If a row has none or two, or if the context does not fit.
    """
    check_arrays(context=context, context_lengths=lengths)
    held = cache.context_lengths
    if held is None:
        return  # the model says so itself if it is given one
    held = np.asarray(held)
    if context is None:
        if rows := np.flatnonzero(held == 0).tolist():
            raise ValueError(f"the cache holds no context for rows {rows}: pass context=.")
        return
    B, S = context.shape[:2]
    if lengths is not None:
        check_lengths("context_lengths", lengths, S, B)
    new = np.full(B, S) if lengths is None else np.asarray(lengths)
    if rows := np.flatnonzero((held > 0) & (new > 0)).tolist():
        raise ValueError(f"a new context, but rows {rows} of the cache hold one: reset those rows.")
    if new.max(initial=0) > (cache.context_capacity or 0):
        raise ValueError(
            f"a context of {new.max()} tokens does not fit: rows have {cache.context_capacity}."
        )
