# SPDX-License-Identifier: Apache-2.0
"""The contiguous layout: row b is entry b, token n is slot n."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv.cache.index import (
    UNBOUNDED,
    Ends,
    Index,
    Layout,
    Moves,
    Plan,
    Reach,
    early_block,
    emptied_rows,
    empty_index,
    live_span,
    stacked_jobs,
    window_job,
)
from jaxkv.core.indexing import item
from jaxkv.core.visibility import Visibility


@dataclasses.dataclass(frozen=True)
class Contiguous(Layout):
    """Keeps every token of a row, in order, in one entry of `capacity` slots."""

    reads_padding: ClassVar[bool] = True

    def create(self, batch: int, capacity: int) -> Index:
        """Makes an empty index."""
        del capacity
        return empty_index(batch)

    def storage(self, batch: int, capacity: int) -> tuple[int, int]:
        """Sizes the records: one entry per row."""
        return batch, capacity

    def narrowed(self, rule: Visibility) -> Visibility:
        """Every token is kept, so every rule holds."""
        return rule

    def limit(self, index: Index, slots: int) -> int:
        """Tokens that a row may hold: its slots."""
        del index
        return slots

    def plan(self, index: Index, slots: int, length: int, count: jax.Array) -> Plan:
        """Plans one write window per row; tokens past the capacity are dropped."""
        start = index.lengths
        fit = jnp.minimum(count, slots - start)
        width = min(length, slots)
        rows = jnp.arange(start.shape[0], dtype=jnp.int32)
        none = jnp.zeros_like(start)
        jobs = window_job(rows, start, none, jnp.minimum(fit, width), width, slots)
        after = dataclasses.replace(
            index, lengths=start + fit, overflowed=index.overflowed | (fit < count)
        )
        return Plan(start, count, None, stacked_jobs([jobs]), after)

    def span(
        self, index: Index, row: jax.Array, slots: int, size: int, reach: Reach
    ) -> tuple[jax.Array, jax.Array]:
        """Bounds the blocks between the window's left edge and the row's length."""
        del slots
        return live_span(index, row, size, reach)

    def locate(
        self, index: Index, row: jax.Array, ends: Ends, size: int, block: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Finds block `block` of a row; the last one starts early rather than run past the end."""
        slot, order, fresh = early_block(block, size, ends)
        return row, slot, jnp.where(fresh & (order < item(index.lengths, row)), order, -1)

    def places(self, index: Index, slots: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Lists each row's slots: entry, slot and order, int32 `[B, S]`; order -1 = unfilled."""
        shape = (index.lengths.shape[0], slots)
        entry, slot = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        return entry, slot, jnp.where(slot < index.lengths[:, None], slot, -1)

    def rollback(self, index: Index, slots: int, count: jax.Array) -> tuple[Index, Moves]:
        """Takes back tokens; a row that holds fewer than `count` is left and flagged."""
        del slots
        good = (count >= 0) & (count <= index.lengths)
        return dataclasses.replace(
            index,
            lengths=jnp.where(good, index.lengths - count, index.lengths),
            refused=index.refused | jnp.logical_not(good),
        ), Moves()

    def rollback_limit(self, slots: int) -> int:
        """Every token that a row holds can be taken back."""
        del slots
        return UNBOUNDED

    def reset(self, index: Index, rows: jax.Array) -> Index:
        """Empties the rows where `rows bool[B]` is True."""
        return emptied_rows(index, rows)
