# SPDX-License-Identifier: Apache-2.0
"""What each policy keeps, in plain float64, by the words of its paper."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from jaxkv.cache import H2O, TOVA, Evicting, KVSpec, LayerCache, SnapKV
from tests.cache.support import SPECS

HEADS = SPECS["gqa"][1]


@dataclasses.dataclass
class Token:
    order: int
    key: np.ndarray
    value: np.ndarray
    weight: float = 0.0


class Row:
    """What one row keeps, head by head, by the words of the papers."""

    def __init__(self, spec: KVSpec, layout: Evicting, slopes: Any = None) -> None:
        self.spec, self.layout, self.end, self.slopes = spec, layout, 0, slopes
        self.heads: list[list[Token]] = [[] for _ in range(spec.kv_heads)]
        self.mark = 0  # the row's length when it last gave tokens up

    def step(self, query: Any, key: Any, value: Any, scale: float) -> np.ndarray:
        """Attends `query [t, N, H]` to what is kept and to the call's own tokens; evicts."""
        K, count = self.spec.kv_heads, len(query)
        per_group = query.shape[1] // K
        out = np.zeros((count, query.shape[1], self.spec.value_width))
        got: list[np.ndarray] = []
        for k in range(K):
            self.heads[k] += [Token(self.end + i, key[i, k], value[i, k]) for i in range(count)]
            weights = np.zeros((count, len(self.heads[k])))
            for i in range(count):
                seen = [t for t in self.heads[k] if t.order <= self.end + i]
                for n in range(k * per_group, (k + 1) * per_group):
                    s = np.array([query[i, n] @ t.key for t in seen]) * scale
                    if self.slopes is not None:
                        s -= self.slopes[n] * np.array([self.end + i - t.order for t in seen])
                    p = np.exp(s - s.max())
                    p /= p.sum()
                    out[i, n] = p @ np.stack([t.value for t in seen])
                    weights[i, : len(seen)] += p
            got.append(weights)
        self.end += count
        if count:
            self.evict(got)
        return out

    def evict(self, got: list[np.ndarray]) -> None:
        policy = self.layout.policy
        if isinstance(policy, TOVA):
            everywhere = sum(w[-1] for w in got)
            for k, tokens in enumerate(self.heads):
                self.heads[k] = self.best(tokens, everywhere, 0, self.layout.budget)
            return
        for k, tokens in enumerate(self.heads):
            budget = self.layout.budget
            budget = budget[k] if isinstance(budget, tuple) else budget
            if isinstance(policy, H2O):
                for token, gain in zip(tokens, got[k].sum(axis=0), strict=True):
                    token.weight += gain
                most = max(np.atleast_1d(self.layout.budget))
                recent = policy.recent or -(-int(most) // 2)
                worth = np.array([t.weight for t in tokens])
                self.heads[k] = self.best(tokens, worth, recent, budget)
            elif isinstance(policy, SnapKV):
                if len(got[k]) < policy.window:  # no prompt: it keeps what fits
                    budget = self.layout.budget + self.layout.room
                seen = got[k][-policy.window :].sum(axis=0)
                side = policy.kernel // 2
                worth = np.array(
                    [seen[max(i - side, 0) : i + side + 1].max() for i in range(len(seen))]
                )
                self.heads[k] = self.best(tokens, worth, policy.window, budget)

    def best(self, tokens: list[Token], worth: Any, recent: int, budget: Any) -> list[Token]:
        worth = np.where([t.order >= self.end - recent for t in tokens], np.inf, worth)
        # Of equals the older one goes.
        ranked = sorted(range(len(tokens)), key=lambda i: (worth[i], tokens[i].order))
        if len(ranked) > budget:
            self.mark = self.end
        stay = sorted(ranked[-budget:])
        return [tokens[i] for i in stay]

    def rollback(self, count: int) -> bool:
        """Takes tokens back; says whether it is refused."""
        if count and self.end - count < self.mark:
            return True
        self.end -= count
        self.heads = [[t for t in head if t.order < self.end] for head in self.heads]
        return False

    def give_up(self, keep: list[bool]) -> None:
        """Evicts the tokens of order w where `keep[w]` is False."""
        before = sum(map(len, self.heads))
        self.heads = [
            [t for t in head if t.order >= len(keep) or keep[t.order]] for head in self.heads
        ]
        if sum(map(len, self.heads)) < before:
            self.mark = self.end


def kept(cache: LayerCache, row: int) -> list[list[int]]:
    """Lists the orders that each head (or all of them) keeps."""
    layout, index = cache.layout, cache.index
    if isinstance(layout, Evicting):
        order = np.asarray(index.state.order)[row]
    else:
        order = np.asarray(layout.places(index, cache.records.slots)[2])[row, None]
    return [sorted(int(o) for o in head if o >= 0) for head in order]


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def extend(
    how: Any, cache: LayerCache, query: Any, key: Any, value: Any, count: Any, slopes: Any = None
) -> Any:
    opened = cache.open(query.shape[1], count)
    out, _, cache = opened.extend(query, key, value, how, alibi_slopes=slopes)
    return out, cache.close()


@functools.partial(jax.jit, static_argnums=(0, 1))
def coded(codec: Any, spec: KVSpec, key: Any, value: Any) -> Any:
    return codec.decode(spec, codec.encode(spec, key, value))
