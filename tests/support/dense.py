# SPDX-License-Identifier: Apache-2.0
"""Attention in float64 NumPy, one query and one head at a time, from the definition.

Nothing here is shared with the library: who sees whom is decided key by key from absolute
positions, and the gradient is written out by hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Result:
    """Outputs `[B, T, N, V]`, log-sum-exps `[B, T, N]`, and gradients by operand name."""

    out: np.ndarray
    lse: np.ndarray
    grads: dict[str, np.ndarray]


def sees(i: int, j: int, causal: bool, window: int | tuple[int, int] | None, pinned: int) -> bool:
    """Says whether the query at position i sees the key at position j (-1: no key there)."""
    if j < 0 or (causal and j > i):
        return False
    if window is None or j < pinned:
        return True
    left, right = window if isinstance(window, tuple) else (window - 1, 0)
    return i - left <= j <= i + right


def orders(shape: tuple[int, int, int], given: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Places queries `[B, T]` and keys `[B, S]` by the options of `ops.attention`."""
    B, T, S = shape
    offset = np.broadcast_to(np.asarray(given.get("offset", 0)), (B,))
    q_order = np.broadcast_to(given.get("query_order", np.arange(T)[None]), (B, T))
    return q_order + offset[:, None], np.broadcast_to(
        given.get("key_order", np.arange(S)[None]), (B, S)
    )


def visible(shape: tuple[int, int, int, int], options: Mapping[str, Any]) -> np.ndarray:
    """Builds bool `[B, N, T, S]` key by key from the options of `ops.attention`."""
    B, N, T, S = shape
    given = dict(options)
    q_order, k_order = orders((B, T, S), given)
    q_count = np.broadcast_to(given.get("query_lengths", T), (B,))
    k_count = np.broadcast_to(given.get("key_lengths", S), (B,))
    q_segments = given.get("query_segments")
    k_segments = given.get("key_segments", q_segments)
    mask = np.broadcast_to(given.get("mask", True), (B, N, T, S))
    rule = (given.get("causal", False), given.get("window"), given.get("pinned", 0))

    seen = np.zeros((B, N, T, S), bool)
    for b, n, t, s in np.ndindex(B, N, T, S):
        real = t < q_count[b] and s < k_count[b]
        if q_segments is not None:
            real &= q_segments[b, t] == k_segments[b, s] != 0
        seen[b, n, t, s] = real and mask[b, n, t, s] and sees(q_order[b, t], k_order[b, s], *rule)
    return seen


def attention(
    arrays: Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
    bars: tuple[Any, Any] | None = None,
    keep: np.ndarray | None = None,
) -> Result:
    """Computes attention, and its gradient if the gradients of its two results are given.

    Args:
      arrays: query `[B, T, N, H]`, key `[B, S, K, H]`, value `[B, S, K, V]`, and maybe bias
        (broadcastable to `[B, N, T, S]`), sink_logits `[N]` and alibi_slopes `[N]`.
      options: As in `ops.attention`.
      bars: The loss's gradients by out `[B, T, N, V]` and lse `[B, T, N]`.
      keep: `[B, N, T, S]`, what dropout multiplies the weights by.
    """
    options = dict(options or {})
    x = {name: np.asarray(array).astype(np.float64) for name, array in arrays.items()}
    B, T, N, H = x["query"].shape
    S, K, V = x["value"].shape[1:]
    G = N // K
    scale = options.get("scale")
    scale = 1 / np.sqrt(H) if scale is None else scale
    cap = options.get("soft_cap") or None
    seen = visible((B, N, T, S), options)
    bias = np.broadcast_to(x.get("bias", 0.0), (B, N, T, S))
    keep = np.ones((B, N, T, S)) if keep is None else keep
    slopes = x.get("alibi_slopes", np.zeros(N))
    q_order, k_order = orders((B, T, S), options)

    out, lse = np.zeros((B, T, N, V)), np.full((B, T, N), -np.inf)
    grads = {name: np.zeros(array.shape) for name, array in x.items()}
    bias_bar = np.zeros((B, N, T, S))
    for b, n, t in np.ndindex(B, N, T):
        keys = np.flatnonzero(seen[b, n, t])
        k = n // G
        raw = scale * x["key"][b, keys, k] @ x["query"][b, t, n]
        distance = np.abs(q_order[b, t] - k_order[b, keys])
        scores = raw if cap is None else cap * np.tanh(raw / cap)
        scores = scores + bias[b, n, t, keys] - slopes[n] * distance
        # A sink is one more score, whose value is 0.
        extra = [x["sink_logits"][n]] if "sink_logits" in x else []
        everything = np.concatenate([scores, extra])
        if everything.size == 0:
            continue
        top = everything.max()
        weights = np.exp(everything - top)
        lse[b, t, n] = top + np.log(weights.sum())
        weights /= weights.sum()
        kept = weights[: len(keys)] * keep[b, n, t, keys]
        out[b, t, n] = kept @ x["value"][b, keys, k]
        if bars is None:
            continue
        out_bar, lse_bar = (np.asarray(bar).astype(np.float64)[b, t, n] for bar in bars)
        grads["value"][b, keys, k] += kept[:, None] * out_bar
        weights_bar = keep[b, n, t, keys] * (x["value"][b, keys, k] @ out_bar)
        weights_bar = np.concatenate([weights_bar, np.zeros(len(extra))])
        everything_bar = weights * (weights_bar - weights @ weights_bar + lse_bar)
        scores_bar = everything_bar[: len(keys)]
        if extra:
            grads["sink_logits"][n] += everything_bar[-1]
        bias_bar[b, n, t, keys] = scores_bar
        if "alibi_slopes" in x:
            grads["alibi_slopes"][n] -= scores_bar @ distance
        raw_bar = scores_bar if cap is None else scores_bar * (1 - np.tanh(raw / cap) ** 2)
        grads["query"][b, t, n] += scale * raw_bar @ x["key"][b, keys, k]
        grads["key"][b, keys, k] += scale * np.outer(raw_bar, x["query"][b, t, n])
    if "bias" in x:
        grads["bias"] = summed_to(bias_bar, x["bias"].shape)
    return Result(out, lse, grads)


def summed_to(full: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sums over the axes that an array of `shape` was repeated along."""
    lifted = (1,) * (full.ndim - len(shape)) + tuple(shape)
    axes = tuple(a for a, size in enumerate(lifted) if size == 1)
    return full.sum(axis=axes, keepdims=True).reshape(shape)
