# SPDX-License-Identifier: Apache-2.0
"""Random verbs on rows that evict, each step held against the plain simulation."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from jaxkv.cache import (
    H2O,
    TOVA,
    Codec,
    Contiguous,
    Evicting,
    Int8,
    LayerCache,
    Layout,
    Paged,
    Raw,
    SnapKV,
    create_layer,
)
from tests.cache.evictions import Row, coded, extend, kept
from tests.cache.support import SPECS, draw_tokens, scoring
from tests.cache.support import poisoned as free_slots_poisoned
from tests.support.tolerances import assert_close

B, WIDTH, FLAGS = 2, 4, 12
COUNTS = st.lists(st.integers(0, WIDTH), min_size=B, max_size=B)
# (record, layout, codec)
SETTINGS: dict[str, tuple[str, Layout, Codec]] = {
    "h2o": ("gqa", Evicting(6, H2O()), Raw(jnp.float32)),
    "tova": ("latent", Evicting(6, TOVA()), Int8()),
    "snapkv": ("gqa", Evicting(5, SnapKV(window=2, kernel=3), room=3), Int8()),
    # These keep tokens in their order until the first eviction.
    "contiguous": ("latent", Contiguous(), Int8()),
    "paged": ("gqa", Paged(4), Raw(jnp.float32)),
}


@jax.jit
def poisoned(cache: LayerCache) -> LayerCache:
    """Puts NaN, and codes of 1, into every free slot of every head."""
    if not isinstance(cache.layout, Evicting):
        return free_slots_poisoned(cache)
    free = cache.index.state.order < 0

    def spoiled(x: jax.Array) -> jax.Array:
        where = free.reshape(*free.shape, *(1,) * (x.ndim - 3))
        wrong = jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 1
        return jnp.where(where, jnp.asarray(wrong, x.dtype), x)

    return dataclasses.replace(cache, records=jax.tree.map(spoiled, cache.records))


_rollback = jax.jit(lambda cache, count: cache.rollback(count))
_reset = jax.jit(lambda cache, rows: cache.reset(rows))
_reorder = jax.jit(lambda cache, rows: cache.reorder(rows))
_evict = jax.jit(lambda cache, keep: cache.evict(keep))


class Verbs(RuleBasedStateMachine):
    """Applies each verb to a cache and to plain rows; `setting` is given by the test."""

    setting: tuple[str, Layout, Codec]

    def __init__(self) -> None:
        super().__init__()
        name, layout, self.codec = self.setting
        self.spec, self.query_heads = SPECS[name]
        self.how = scoring(self.spec)
        cache = create_layer(self.spec, self.codec, B, 64, layout=layout)
        self.cache = poisoned(cache)
        kept = layout if isinstance(layout, Evicting) else Evicting(64)
        self.rows = [Row(self.spec, kept) for _ in range(B)]
        self.refused = [False] * B

    @rule(counts=COUNTS, seed=st.integers(0, 2**16))
    def extend(self, counts: list[int], seed: int) -> None:
        given = draw_tokens(np.random.default_rng(seed), self.spec, self.query_heads, B, WIDTH)
        key, value = map(np.asarray, coded(self.codec, self.spec, *given[1:]))
        count = jnp.asarray(counts, jnp.int32)
        out, self.cache = extend(self.how, self.cache, *given, count)
        for b, n in enumerate(counts):
            new = given[0][b, :n], key[b, :n], value[b, :n]
            want = self.rows[b].step(*new, self.how.scale)
            assert_close(out[b, :n], want, terms=64 * self.spec.query_width)

    @rule(counts=COUNTS)
    def rollback(self, counts: list[int]) -> None:
        counts = [min(n, row.end) for n, row in zip(counts, self.rows, strict=True)]
        self.cache = _rollback(self.cache, np.asarray(counts, np.int32))
        for b, n in enumerate(counts):
            self.refused[b] |= self.rows[b].rollback(n)

    @rule(rows=st.lists(st.booleans(), min_size=B, max_size=B))
    def reset(self, rows: list[bool]) -> None:
        self.cache = _reset(self.cache, np.asarray(rows))
        for b in np.flatnonzero(rows):
            self.rows[b], self.refused[b] = Row(self.spec, self.rows[b].layout), False

    @rule(rows=st.lists(st.integers(0, B - 1), min_size=B, max_size=B))
    def reorder(self, rows: list[int]) -> None:
        self.cache = _reorder(self.cache, np.asarray(rows, np.int32))
        self.rows = [copy.deepcopy(self.rows[r]) for r in rows]
        self.refused = [self.refused[r] for r in rows]

    @rule(keep=st.lists(st.booleans(), min_size=B * FLAGS, max_size=B * FLAGS))
    def evict(self, keep: list[bool]) -> None:
        flags = np.asarray(keep).reshape(B, FLAGS)
        self.cache = _evict(self.cache, flags)
        for row, mine in zip(self.rows, flags.tolist(), strict=True):
            row.give_up(mine)

    @rule()
    def poison(self) -> None:
        self.cache = poisoned(self.cache)

    @invariant()
    def the_same_tokens_are_kept(self) -> None:
        assert self.cache.lengths.tolist() == [row.end for row in self.rows]
        assert self.cache.refused.tolist() == self.refused
        assert not np.asarray(self.cache.overflowed).any()
        for b, row in enumerate(self.rows):
            wanted = [sorted(t.order for t in head) for head in row.heads]
            assert kept(self.cache, b) == (wanted if self.cache.layout.per_head else wanted[:1])


def run(setting: Any, examples: int) -> None:
    machine = type("VerbsOf", (Verbs,), {"setting": setting})
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=examples, stateful_step_count=14, print_blob=False),
    )


@pytest.mark.parametrize("name", ["h2o", "tova", "snapkv"])
def test_random_verbs_equal_the_simulation(name: str) -> None:
    run(SETTINGS[name], examples=8)


@pytest.mark.full
@pytest.mark.parametrize("name", SETTINGS)
def test_many_random_verbs_equal_the_simulation(name: str) -> None:
    run(SETTINGS[name], examples=60)
