# SPDX-License-Identifier: Apache-2.0
"""Random verbs on a model's cache whose layers differ in layout: all hold the same rows."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from jaxkv.cache import (
    Contiguous,
    Int8,
    KVSpec,
    Layout,
    ModelCache,
    Paged,
    Raw,
    Ring,
    create_layer,
    gather_layers,
)
from tests.cache.support import scoring

B, S, T = 3, 12, 5
SPEC = KVSpec(1, 4, 4)
# Pools too small for all rows, rings that forget, and rows shorter than the others'.
HYBRIDS: dict[str, tuple[Layout, ...]] = {
    "contiguous-paged": (Contiguous(), Paged(4, pages=3)),
    "paged-paged-ring": (Paged(4, pages=7), Paged(2, pages=6), Ring(4, spare=3)),
    "ring-contiguous": (Ring(3), Contiguous()),
    "ring-ring-paged": (Ring(5, spare=2), Ring(4, pinned=1), Paged(4, pages=4)),
}
USUAL = ("paged-paged-ring",)
COUNTS = st.lists(st.integers(0, T), min_size=B, max_size=B)
ROWS = st.lists(st.integers(-1, B), min_size=B, max_size=B)


@jax.jit
def _extended(cache: ModelCache, names: jax.Array, counts: jax.Array) -> ModelCache:
    """Appends tokens whose key and value are their name, int `[B, T]`, in every channel."""
    key = jnp.broadcast_to(names.astype(jnp.float32)[..., None, None], (B, T, 1, 4))
    how, opened = scoring(SPEC), cache.open(T, counts)
    layers = [opened.layer(i).extend(key, key, key, how)[2] for i in range(len(cache.layers))]
    return opened.close(layers)


_rollback = jax.jit(lambda cache, count: cache.rollback(count))
_reorder = jax.jit(lambda cache, rows: cache.reorder(rows))
_share = jax.jit(lambda cache, rows, count: cache.share(rows, count))
_reset = jax.jit(lambda cache, rows: cache.reset(rows))
_converted = jax.jit(lambda cache: cache.convert(layout=Contiguous(), capacity=S))


@jax.jit
def _held(cache: ModelCache) -> Any:
    def layer(number: int) -> Any:
        one = cache.layer(number)
        key, _ = one.records.codec.decode(one.records.spec, one.records.planes)
        entry, slot, order = one.layout.places(one.index, one.records.slots)
        return jnp.rint(key[entry, slot, 0, 0]).astype(jnp.int32), order

    return [layer(number) for number in range(len(cache.layers))]


class Hybrid(RuleBasedStateMachine):
    """Applies verbs under `jit` to a cache and to lists of names."""

    layouts: tuple[Layout, ...]

    def __init__(self) -> None:
        super().__init__()
        codecs = (Raw(jnp.float32), Int8(), Raw(jnp.float32))
        pairs = zip(codecs, self.layouts, strict=False)
        self.cache = gather_layers([create_layer(SPEC, c, B, S, layout=x) for c, x in pairs])
        self.rows: list[list[int]] = [[] for _ in range(B)]
        self.named = 0

    def _compared(self, wanted: list[list[int]], fallback: list[list[int]]) -> None:
        """Takes up what a verb did: what was wanted, or with a flag what it falls back to."""
        lengths, refused = self.cache.lengths.tolist(), self.cache.refused.tolist()
        for b in range(B):
            if lengths[b] != len(wanted[b]):
                assert refused[b] and lengths[b] == len(fallback[b])
                self.rows[b] = fallback[b]
            else:
                self.rows[b] = wanted[b]
        self.cache = self.cache.clear_flags()

    @rule(counts=COUNTS)
    def extend(self, counts: list[int]) -> None:
        names = 1 + (self.named + np.arange(B * T).reshape(B, T)) % 100
        self.named += B * T
        self.cache = _extended(self.cache, names, np.asarray(counts, np.int32))
        lengths, dropped = self.cache.lengths.tolist(), self.cache.overflowed.tolist()
        for b, count in enumerate(counts):
            fit = lengths[b] - len(self.rows[b])
            assert dropped[b] == (fit < count) and 0 <= fit <= count
            self.rows[b] = self.rows[b] + names[b, :fit].tolist()
        self.cache = self.cache.clear_flags()

    @rule(counts=COUNTS)
    def rollback(self, counts: list[int]) -> None:
        before = list(self.rows)
        self.cache = _rollback(self.cache, np.asarray(counts, np.int32))
        left = [row[: max(len(row) - n, 0)] for row, n in zip(before, counts, strict=True)]
        self._compared(left, before)

    @rule(rows=ROWS)
    def reorder(self, rows: list[int]) -> None:
        self.cache = _reorder(self.cache, np.asarray(rows, np.int32))
        self._compared([self.rows[r] if 0 <= r < B else [] for r in rows], [[]] * B)

    @rule(rows=ROWS, counts=COUNTS)
    def share(self, rows: list[int], counts: list[int]) -> None:
        given = np.asarray(rows, np.int32), np.asarray(counts, np.int32)
        self.cache = _share(self.cache, *given)
        wanted = [
            self.rows[b] if r < 0 else self.rows[r][:n] if r < B else []
            for b, (r, n) in enumerate(zip(rows, counts, strict=True))
        ]
        self._compared(wanted, [[]] * B)

    @rule(rows=st.lists(st.booleans(), min_size=B, max_size=B))
    def reset(self, rows: list[bool]) -> None:
        self.cache = _reset(self.cache, np.asarray(rows))
        self.rows = [[] if r else row for r, row in zip(rows, self.rows, strict=True)]

    @rule()
    def convert(self) -> None:
        """Converts on the side, since the layouts would be alike from then on."""
        kept, rows = (self.cache, list(self.rows)), self.rows
        self.cache = _converted(self.cache)
        self._compared(rows, [[]] * B)
        self.layers_hold_the_rows()
        self.cache, self.rows = kept

    @invariant()
    def layers_hold_the_rows(self) -> None:
        for index in self.cache.indices:
            assert index.lengths.tolist() == [len(row) for row in self.rows]
        for names, orders in _held(self.cache):
            for row, name, order in zip(self.rows, names, orders, strict=True):
                there = np.asarray(order) >= 0
                assert (np.asarray(order)[there] < len(row)).all()
                # Names are at most 100, and 8 bits round such a number by less than a half.
                want = np.asarray([*row, 0])[np.asarray(order)[there]]
                np.testing.assert_array_equal(np.asarray(name)[there], want)


@pytest.mark.parametrize(
    "name", [n if n in USUAL else pytest.param(n, marks=pytest.mark.full) for n in HYBRIDS]
)
def test_random_verbs_leave_the_same_rows_in_every_layer(name: str) -> None:
    machine = type("HybridOf", (Hybrid,), {"layouts": HYBRIDS[name]})
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=60, stateful_step_count=16, print_blob=False),
    )


def test_a_row_that_is_refused_gives_no_page_to_another() -> None:
    layouts = (Ring(3), Paged(4, pages=5))
    cache = gather_layers(
        [create_layer(SPEC, Raw(jnp.float32), B, S, layout=layout) for layout in layouts]
    )
    for counts in ([5, 5, 0], [5, 3, 0], [2, 0, 0]):  # 12, 8 and 0 tokens: no page is left
        names = np.ones((B, T), np.int32)
        cache = _extended(cache, names, np.asarray(counts, np.int32))
    cache = _share(cache, np.array([-1, -1, 1], np.int32), np.array([0, 0, 8], np.int32))
    assert cache.lengths.tolist() == [12, 8, 8] and not cache.refused.any()
    # The ring cannot take row 0 back, so its page is not there for row 1, whose last is shared.
    back = _rollback(cache, np.array([8, 1, 0], np.int32))
    assert [index.lengths.tolist() for index in back.indices] == [[12, 8, 8]] * 2
    assert back.refused.tolist() == [True, True, False]
