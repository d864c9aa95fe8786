# SPDX-License-Identifier: Apache-2.0
"""Layouts alone: thousands of random plans, rollbacks and resets against lists of tokens."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.cache import Index
from jaxkv.cache.index import Ends, Fill, Jobs
from tests.cache.support import LAYOUTS, RING, Kept

ROWS, CAPACITY, STEPS = 64, 11, 120
NOTHING = -1


class Store:
    """Names of the tokens in each slot, written by a plan's jobs one after the other."""

    def __init__(self, entries: int, slots: int) -> None:
        self.names = np.full((entries, slots), NOTHING)

    def write(self, jobs: Jobs | Fill, new: np.ndarray) -> None:
        if isinstance(jobs, Fill):
            for row, slot in np.argwhere(np.asarray(jobs.source)[:, 0] >= 0):
                self.names[row, slot] = new[row, jobs.source[row, 0, slot]]
            return
        parts = (jobs.entry, jobs.slot, jobs.row, jobs.offset, jobs.low, jobs.high)
        for entry, slot, row, offset, low, high in zip(
            *(np.asarray(x).ravel() for x in parts), strict=True
        ):
            if high > low:
                assert slot >= 0 and slot + jobs.width <= self.names.shape[1], "inside the entry"
            for lane in range(low, high):
                self.names[entry, slot + lane] = new[row, offset + lane]

    def copy(self, source: Any, target: Any) -> None:
        if source is None:
            return
        for a, b in zip(np.asarray(source), np.asarray(target), strict=True):
            if b >= 0:
                self.names[b] = self.names[a]


def started(kept: Kept) -> tuple[Index, Store, int]:
    index = kept.layout.create(ROWS, CAPACITY)
    entries, slots = kept.layout.storage(ROWS, CAPACITY)
    return index, Store(entries, slots), slots


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_stored_is_what_was_written_last(name: str) -> None:
    kept, rng = LAYOUTS[name], np.random.default_rng(0)
    index, store, slots = started(kept)
    plan = jax.jit(
        lambda index, count, length: kept.layout.plan(index, slots, length, count), static_argnums=2
    )
    back = jax.jit(lambda index, count: kept.layout.rollback(index, slots, count))
    reset = jax.jit(kept.layout.reset)
    places = jax.jit(functools.partial(kept.layout.places, slots=slots))
    rows: list[list[int]] = [[] for _ in range(ROWS)]
    high, fresh = np.zeros(ROWS, int), 0
    for step in range(STEPS):
        held = np.array([len(row) for row in rows])
        action = rng.choice(["extend", "extend", "back", "reset"], p=[0.3, 0.3, 0.3, 0.1])
        if action == "extend":
            length = int(rng.choice([1, 4, 13]))
            count = rng.integers(0, length + 1, ROWS)
            new = fresh + np.arange(ROWS * length).reshape(ROWS, length)
            fresh += ROWS * length
            made = plan(index, jnp.asarray(count, jnp.int32), length)
            store.write(made.jobs, new)
            index = made.after
            for b in range(ROWS):
                fit = min(count[b], kept.room(held[b], CAPACITY))
                rows[b] += new[b, :fit].tolist()
                high[b] = max(high[b], len(rows[b]))
        elif action == "back":
            count = rng.integers(0, 5, ROWS)
            index, moves = back(index, jnp.asarray(count, jnp.int32))
            store.copy(moves.source, moves.target)
            for b in range(ROWS):
                if kept.refuses(held[b], count[b], high[b]):
                    continue
                rows[b] = rows[b][: held[b] - count[b]]
                if count[b] and kept.lowers(len(rows[b])):
                    high[b] = len(rows[b])
        else:
            chosen = rng.random(ROWS) < 0.2
            index = reset(index, jnp.asarray(chosen))
            for b in np.flatnonzero(chosen):
                rows[b], high[b] = [], 0
        np.testing.assert_array_equal(index.lengths, [len(row) for row in rows])
        entry, slot, order = map(np.asarray, places(index))
        for b, row in enumerate(rows):
            there = order[b] >= 0
            want = {k: row[k] for k in kept.orders(len(row), high[b])}
            stored = store.names[entry[b][there], slot[b][there]]
            got = dict(zip(order[b][there].tolist(), stored.tolist(), strict=True))
            assert got == want, f"step {step}, {action}, row {b}"


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("size", [1, 3, 4, 6])
def test_blocks_show_each_stored_token_once(name: str, size: int) -> None:
    kept = LAYOUTS[name]
    index, _, slots = started(kept)
    size = kept.layout.tile(slots, size)
    ends = Ends(slots, slots + 3 if kept.layout.reads_padding else slots)
    for length in (1, 4, 2, 1, 3):
        count = jnp.minimum(jnp.arange(ROWS, dtype=jnp.int32) % 5, length)
        index = kept.layout.plan(index, slots, length, count).after
    places = [np.asarray(x) for x in kept.layout.places(index, slots)]
    index = kept.layout.at_head(index, jnp.int32(0))
    for row in (0, 1, 2, 3, 4):
        everything = (jnp.int32(0), jnp.int32(10**6))
        first, end = kept.layout.span(index, jnp.int32(row), slots, size, everything)
        seen = []
        for block in range(int(first), int(end)):
            entry, slot, order = kept.layout.locate(index, row, ends, size, jnp.int32(block))
            assert int(slot) >= 0 and int(slot) + size <= ends.held
            seen += [(int(entry), int(slot) + i, int(k)) for i, k in enumerate(order) if k >= 0]
        listed = zip(*(x[row].tolist() for x in places), strict=True)
        assert sorted(seen) == sorted(p for p in listed if p[2] >= 0)


def test_spc_01_a_full_ring_refuses_what_it_does_not_hold() -> None:
    index = RING.create(1, 100)
    _, slots = RING.storage(1, 100)
    after = RING.plan(index, slots, 10, jnp.array([10], jnp.int32)).after
    # 0, 1 | 6 .. 9: after two steps back the next query, number 8, sees 6 and 7.
    for count, refused in ((0, False), (1, False), (2, False), (3, True), (7, True), (8, False)):
        back, _ = RING.rollback(after, slots, jnp.array([count], jnp.int32))
        assert bool(back.refused[0]) == refused, count
        assert int(back.lengths[0]) == (10 if refused else 10 - count)
