# SPDX-License-Identifier: Apache-2.0
"""The ring layout: a row keeps its last tokens, and if wanted its first ones."""

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
    stacked_jobs,
    window_job,
)
from jaxkv.cache.policies import Recent, last_tokens
from jaxkv.core.indexing import item, quotient_up, remainder
from jaxkv.core.trees import check_sizes
from jaxkv.core.visibility import Visibility


@dataclasses.dataclass(frozen=True)
class Ring(Layout):
    """Keeps the first `pinned` and the last `window` tokens of a row.

    A module whose own rule shows more is narrowed to that: the calls with such a cache see what a
    module with this window and these pinned tokens sees, however the tokens arrive. Positions
    are those of the tokens, before and after the ring wraps.

    Args:
      window: W, tokens that are kept: a query sees itself and the W - 1 before it.
      pinned: First tokens of a row that are kept for ever (StreamingLLM's attention sinks).
      spare: Slots beside these, so that `spare` more tokens can be rolled back.

    Raises:
      ValueError: If a number is out of range.

    Source: Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks"
    (arXiv:2309.17453), section 3.2.

    >>> Ring(window=512, pinned=4).storage(batch=8, capacity=4096)
    (8, 516)
    """

    reads_padding: ClassVar[bool] = True

    window: int
    pinned: int = 0
    spare: int = 0

    def __post_init__(self) -> None:
        check_sizes(window=self.window)
        if min(self.pinned, self.spare) < 0:
            raise ValueError(f"{self}: want pinned and spare of at least 0 tokens.")

    @property
    def _whole(self) -> int:
        return self.pinned + self.window + self.spare

    def create(self, batch: int, capacity: int) -> Index:
        """Makes an empty index; its state is the high-water mark of each row."""
        del capacity
        return empty_index(batch, jnp.zeros((batch,), jnp.int32))

    def storage(self, batch: int, capacity: int) -> tuple[int, int]:
        """Sizes the records: one entry per row, of no more slots than the row has tokens."""
        return batch, min(self._whole, capacity)

    def narrowed(self, rule: Visibility) -> Visibility:
        """Narrows a rule to what the ring keeps.

        Raises:
          ValueError: If the rule looks ahead without end, or at first tokens that are not kept.
        """
        return last_tokens(rule, self.window, self.pinned, str(self))

    def limit(self, index: Index, slots: int) -> int:
        """Tokens that a row may hold: no limit, but for a ring cut short by its capacity."""
        del index
        return slots if slots < self._whole else UNBOUNDED

    def plan(self, index: Index, slots: int, length: int, count: jax.Array) -> Plan:
        """Plans the pinned tokens' window and two of the ring's, before and after it wraps."""
        start, width = index.lengths, min(length, slots)
        fit = jnp.minimum(count, self.limit(index, slots) - start)
        end = start + fit
        pinned = min(self.pinned, slots)
        ring = slots - pinned  # 0 if the capacity is within the pinned tokens
        head_end = jnp.minimum(end, pinned)
        first = jnp.maximum(jnp.maximum(start, pinned), end - ring)
        begin = pinned + remainder(first - pinned, max(ring, 1))
        left = jnp.maximum(end - first, 0)
        before = jnp.minimum(left, slots - begin)
        segments = [
            (start, start, jnp.maximum(head_end - start, 0)),
            (begin, first, before),
            (jnp.full_like(begin, min(pinned, slots - 1)), first + before, left - before),
        ]
        rows = jnp.arange(start.shape[0], dtype=jnp.int32)
        jobs = [window_job(rows, s, t - start, n, width, slots) for s, t, n in segments]
        after = dataclasses.replace(
            index,
            lengths=end,
            overflowed=index.overflowed | (fit < count),
            state=jnp.maximum(index.state, end),
        )
        return Plan(start, count, None, stacked_jobs(jobs), after)

    def span(
        self, index: Index, row: jax.Array, slots: int, size: int, reach: Reach
    ) -> tuple[jax.Array, jax.Array]:
        """Bounds the blocks that hold anything."""
        del reach
        filled = jnp.minimum(item(index.state, row), slots)
        return jnp.zeros_like(filled), quotient_up(filled, size)

    def locate(
        self, index: Index, row: jax.Array, ends: Ends, size: int, block: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Finds block `block` of a row; the last one starts early rather than run past the end."""
        slot, place, fresh = early_block(block, size, ends)
        order = self._order(item(index.lengths, row), item(index.state, row), place, ends.slots)
        return row, slot, jnp.where(fresh, order, -1)

    def places(self, index: Index, slots: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Lists a row's slots: entry, slot and order, each int32 `[B, S]`; -1 = unfilled."""
        shape = (index.lengths.shape[0], slots)
        entry, slot = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        order = self._order(index.lengths[:, None], index.state[:, None], slot, slots)
        return entry, slot, order

    def _order(self, length: jax.Array, high: jax.Array, slot: jax.Array, slots: int) -> jax.Array:
        """Tells which token stands in a slot: the newest one before `high` that belongs there.

        `high` is not lowered by a rollback, so a slot whose token was taken back is known.
        """
        pinned = min(self.pinned, slots)
        ring = max(slots - pinned, 1)
        newest = high - 1 - pinned
        turned = newest - remainder(newest - (slot - pinned), ring)
        # A slot that nothing has reached yet gives a negative number here, or one beyond `high`.
        turned = jnp.where(turned >= 0, turned + pinned, -1)
        order = jnp.where(slot < pinned, slot, turned)
        return jnp.where(order < length, order, -1)

    def rollback(self, index: Index, slots: int, count: jax.Array) -> tuple[Index, Moves]:
        """Takes back tokens, unless what the next query would see is there no more."""
        pinned = min(self.pinned, slots)
        back = index.lengths - count
        oldest = index.state - (slots - pinned)  # the first token that the ring still holds
        # Within the pinned tokens nothing of the ring is seen, so its mark can start again.
        anew = back <= pinned
        needed = jnp.maximum(back - self.window + 1, pinned)
        good = (count >= 0) & (back >= 0) & (anew | (needed >= oldest))
        lengths = jnp.where(good, back, index.lengths)
        return dataclasses.replace(
            index,
            lengths=lengths,
            refused=index.refused | jnp.logical_not(good),
            state=jnp.where(good & anew & (count > 0), lengths, index.state),
        ), Moves()

    def rollback_limit(self, slots: int) -> int:
        """The last token and `spare` more; all of a ring that is cut short by its capacity."""
        return UNBOUNDED if slots < self._whole else self.spare + 1

    def forgetting(self, slots: int) -> Recent | None:
        """Keeps the same tokens, unless a ring cut short by its capacity forgets none of them."""
        return None if slots < self.pinned + self.window else Recent(self.window, self.pinned)

    def reset(self, index: Index, rows: jax.Array) -> Index:
        """Empties the rows where `rows bool[B]` is True."""
        state = jnp.where(rows, 0, index.state)
        return dataclasses.replace(emptied_rows(index, rows), state=state)
