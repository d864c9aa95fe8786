# SPDX-License-Identifier: Apache-2.0
"""The paged layout: rows share a pool of pages, and a table says which are whose."""

from __future__ import annotations

import dataclasses

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
    emptied_rows,
    empty_index,
    live_span,
    stacked_jobs,
    take_rows,
    window_job,
)
from jaxkv.core.indexing import box, item, items, quotient, quotient_up, remainder
from jaxkv.core.sharding import axis_size
from jaxkv.core.trees import check_sizes
from jaxkv.core.visibility import Visibility

NOBODY = -1
# A read joins pages of fewer slots to one block: so many slots at most, and so many pages, since
# each is a slice of its own in the program. With larger ones the copies cost more than they save.
SMALL, JOINED_SLOTS, JOINED = 64, 128, 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages:
    """Who holds which page.

    Attributes:
      table: int32 `[B, M]`, the page of a row's tokens j Z .. j Z + Z - 1, or -1.
      references: int32 `[P]`, how many rows hold each page; the free ones are those of none.
    """

    table: jax.Array
    references: jax.Array


@dataclasses.dataclass(frozen=True)
class Paged(Layout):
    """Keeps every token of a row on pages of `size` tokens, given out as they are needed.

    Rows that are forked share their full pages; the last page, if it is not full, is copied then,
    so appending never copies. Pages are given out, shared and freed under `jit`, once per step for
    all layers. When they run out, tokens are dropped and their rows flagged, as in a full cache.

    Args:
      size: Z, tokens of a page, 16 to 256 where it should be fast.
      pages: P, pages of the pool; `None` gives every row enough for its capacity.

    Raises:
      ValueError: If a number is below 1.

    Sharding: each device of the data axis has its share of the pool for its own rows; rows are not
    moved between devices.

    Source: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
    PagedAttention" (arXiv:2309.06180), section 4.

    >>> Paged(16).storage(batch=4, capacity=100)
    (28, 16)
    """

    size: int = 64
    pages: int | None = None

    def __post_init__(self) -> None:
        check_sizes(size=self.size, pages=self.pages)

    def create(self, batch: int, capacity: int) -> Index:
        """Makes an empty index, whose state is the table and the counts of references."""
        devices = axis_size("batch")
        count, _ = self.storage(batch, capacity)
        if batch % devices or count % devices:
            raise ValueError(
                f"{batch} rows and {count} pages on {devices} data devices: want multiples of it."
            )
        table = jnp.full((batch, -(-capacity // self.size)), NOBODY, jnp.int32)
        return empty_index(batch, Pages(table, jnp.zeros((count,), jnp.int32)))

    def storage(self, batch: int, capacity: int) -> tuple[int, int]:
        """Sizes the records: one entry per page."""
        enough = batch * -(-capacity // self.size)
        return enough if self.pages is None else self.pages, self.size

    def narrowed(self, rule: Visibility) -> Visibility:
        """Every token is kept, so every rule holds."""
        return rule

    def limit(self, index: Index, slots: int) -> int:
        """Tokens that a row may hold: its capacity in whole pages."""
        return index.state.table.shape[1] * slots

    def plan(self, index: Index, slots: int, length: int, count: jax.Array) -> Plan:
        """Gives out pages, in the order of the rows, and plans one window for each page touched."""
        start, pages = index.lengths, index.state
        columns = pages.table.shape[1]
        end = start + jnp.minimum(count, columns * slots - start)
        have = quotient_up(start, slots)
        want = quotient_up(end, slots) - have
        ids, granted = _allocate(pages.references, want, min(-(-length // slots), columns))
        end = jnp.maximum(start, jnp.minimum(end, (have + granted) * slots))
        place = jnp.where(
            ids >= 0, have[:, None] + lax.broadcasted_iota(jnp.int32, ids.shape, 1), columns
        )
        table = _set_columns(pages.table, place, ids)
        references = _counted(pages.references, ids)
        jobs, width = [], min(length, slots)
        page_of = quotient(start, slots)
        for number in range(min(-(-length // slots) + 1, columns)):
            entry = _column(table, page_of + number)
            first = jnp.maximum(start, (page_of + number) * slots)
            last = jnp.minimum(end, (page_of + number + 1) * slots)
            tokens = jnp.maximum(last - first, 0)
            jobs.append(
                window_job(entry, remainder(first, slots), first - start, tokens, width, slots)
            )
        after = dataclasses.replace(
            index,
            lengths=end,
            overflowed=index.overflowed | (end - start < count),
            state=Pages(table, references),
        )
        return Plan(start, count, None, stacked_jobs(jobs), after)

    def span(
        self, index: Index, row: jax.Array, slots: int, size: int, reach: Reach
    ) -> tuple[jax.Array, jax.Array]:
        """Bounds the blocks between the window's left edge and the row's length."""
        del slots
        return live_span(index, row, size, reach)

    def locate(
        self, index: Index, row: jax.Array, ends: Ends, size: int, block: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Finds block `block` of a row, which lies within one page, or past the row's end."""
        begin = block * size
        table = index.state.table
        column = jnp.minimum(quotient(begin, ends.slots), table.shape[1] - 1)
        entry = box(table, (row, column), (1, 1)).reshape(())
        order = begin + jnp.arange(size, dtype=jnp.int32)
        live = (order < item(index.lengths, row)) & (entry >= 0)
        # Rounded down as JAX does: XLA must not see that the block of a whole page is at slot 0.
        return jnp.maximum(entry, 0), begin % ends.slots, jnp.where(live, order, -1)

    def places(self, index: Index, slots: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Lists each row's slots: entry, slot and order, int32 `[B, M Z]`; order -1 = unfilled."""
        table = index.state.table
        shape = (table.shape[0], table.shape[1] * slots)
        order = lax.broadcasted_iota(jnp.int32, shape, 1)
        entry = jnp.repeat(table, slots, axis=1)
        return entry, remainder(order, slots), jnp.where(order < index.lengths[:, None], order, -1)

    def rollback(self, index: Index, slots: int, count: jax.Array) -> tuple[Index, Moves]:
        """Takes back tokens and frees pages; a shared page that is full no more is copied.

        A row is refused if it holds fewer tokens, or if there is no page for that copy.
        """
        pages = index.state
        good = (count >= 0) & (count <= index.lengths)
        left = jnp.where(good, index.lengths - count, index.lengths)
        last = _column(pages.table, quotient(left, slots))
        torn = good & (count > 0) & (remainder(left, slots) > 0)
        torn &= items(pages.references, jnp.maximum(last, 0)) > 1
        # Only what others give up for certain is there for copies, and what is copied is not.
        settled = _released(pages, index.lengths, jnp.where(torn, index.lengths, left), slots)
        ids, granted = _allocate(settled, torn.astype(jnp.int32), 1)
        done = torn & (granted > 0)
        good &= ~torn | done
        left = jnp.where(good, left, index.lengths)
        references = _released(pages, index.lengths, left, slots)
        target = jnp.where(done, ids[:, 0], NOBODY)
        references = _counted(references, target)
        references = _counted(references, jnp.where(done, last, NOBODY), -1)
        held = lax.broadcasted_iota(jnp.int32, pages.table.shape, 1) * slots < left[:, None]
        table = jnp.where(held, pages.table, NOBODY)
        place = jnp.where(done, quotient(left, slots), table.shape[1])
        table = _set_columns(table, place[:, None], target[:, None])
        return dataclasses.replace(
            index,
            lengths=left,
            refused=index.refused | jnp.logical_not(good),
            state=Pages(table, references),
        ), Moves(source=jnp.maximum(last, 0), target=target)

    def rollback_limit(self, slots: int) -> int:
        """Every token that a row holds can be taken back."""
        del slots
        return UNBOUNDED

    def tile(self, slots: int, want: int) -> int:
        """Chooses how many slots a read takes at a time: a divisor of the page, or small pages."""
        if slots < SMALL and slots <= want:
            return slots * min(JOINED, min(JOINED_SLOTS, want) // slots)
        return max(n for n in range(1, min(slots, max(want, 1)) + 1) if slots % n == 0)

    def gather(
        self, index: Index, rows: jax.Array, left: jax.Array | None = None
    ) -> tuple[Index, Moves]:
        """Makes row i a copy of row `rows[i]` that shares its full pages.

        One copy of a row keeps its last page, the row itself if it stays in its place; the others
        get copies of it, or come out empty and `refused` where there is no page left. One that is
        then taken back to `left` tokens, all on pages before the last, goes without.

        Raises:
          ValueError: On a mesh that splits rows: pages of one device are no use on another.
        """
        if axis_size("batch") > 1:
            raise ValueError("rows on pages cannot be moved between the devices of a data axis.")
        moved = dataclasses.replace(index, state=None)
        moved = jax.tree.map(lambda x: take_rows(x, rows), moved)
        table = take_rows(index.state.table, rows)
        size = self.size
        last = quotient(moved.lengths, size)
        needed = remainder(moved.lengths, size) > 0
        if left is not None:
            needed &= left > last * size
        torn = _copies(rows, needed)
        columns = lax.broadcasted_iota(jnp.int32, table.shape, 1)
        kept = columns * size < moved.lengths[:, None]
        kept &= ~((torn | ~needed)[:, None] & (columns == last[:, None]))
        source = _column(table, last)
        none = jnp.zeros_like(index.lengths)
        references = _released(index.state, index.lengths, none, size)
        references = _counted(references, jnp.where(kept, table, NOBODY))
        ids, granted = _allocate(references, torn.astype(jnp.int32), 1)
        lost = torn & (granted == 0)
        target = jnp.where(torn & ~lost, ids[:, 0], NOBODY)
        references = _counted(references, target)
        place = jnp.where(target >= 0, last, table.shape[1])
        table = _set_columns(jnp.where(kept, table, NOBODY), place[:, None], target[:, None])
        made = dataclasses.replace(moved, state=Pages(table, references))
        emptied = self.reset(made, lost)
        made = dataclasses.replace(emptied, refused=emptied.refused | lost)
        return made, Moves(source=jnp.maximum(source, 0), target=target)

    def reset(self, index: Index, rows: jax.Array) -> Index:
        """Empties the rows where `rows bool[B]` is True, and frees pages that nobody else holds."""
        emptied = emptied_rows(index, rows)
        references = _released(index.state, index.lengths, emptied.lengths, self.size)
        table = jnp.where(rows[:, None], NOBODY, index.state.table)
        return dataclasses.replace(emptied, state=Pages(table, references))


def _copies(rows: jax.Array, needed: jax.Array) -> jax.Array:
    """Marks which copies of `rows int32[R]` need a last page of which another is the original."""
    number = lax.broadcasted_iota(jnp.int32, (rows.shape[0], rows.shape[0]), 1)
    own = rows == jnp.arange(rows.shape[0], dtype=jnp.int32)
    same = rows[:, None] == rows[None]
    # A row that stays is the original, else the first copy.
    before = needed[None] & (own[None] | (~own[:, None] & (number < number.T)))
    return needed & jnp.any(same & before & (number != number.T), axis=1)


def _allocate(references: jax.Array, want: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    """Picks free pages for rows that want some, in the order of the rows.

    Args:
      references: int32 `[P]`.
      want: int32 `[B]`, at most `most`.
      most: Columns of the result.

    Returns:
      Pages int32 `[B, most]`, -1 beyond what a row was granted, and how many that is, int32 `[B]`.
    """
    free = (references == 0).astype(jnp.int32)
    rank = jnp.cumsum(free)  # free pages up to each one
    before = jnp.cumsum(want) - want
    granted = jnp.clip(jnp.sum(free) - before, 0, want)
    number = lax.broadcasted_iota(jnp.int32, (want.shape[0], most), 1)
    ids = jnp.searchsorted(rank, before[:, None] + number + 1).astype(jnp.int32)
    return jnp.where(number < granted[:, None], ids, NOBODY), granted


def _counted(references: jax.Array, pages: jax.Array, by: int = 1) -> jax.Array:
    """Counts references to pages, of which -1 is none."""
    # An index of -1 would be the last page, and one past the end is dropped.
    place = jnp.where(pages >= 0, pages, references.shape[0])
    return references.at[place].add(by, mode="drop")


def _released(pages: Pages, lengths: jax.Array, left: jax.Array, size: int) -> jax.Array:
    """Counts references once rows of `lengths` tokens have only `left` of them."""
    column = lax.broadcasted_iota(jnp.int32, pages.table.shape, 1) * size
    gone = (column < lengths[:, None]) & (column >= left[:, None])
    return _counted(pages.references, jnp.where(gone, pages.table, NOBODY), -1)


def _column(table: jax.Array, column: jax.Array) -> jax.Array:
    """Takes one column of each row: int32 `[B]`."""
    inside = jnp.minimum(column, table.shape[1] - 1)
    return jnp.take_along_axis(table, inside[:, None], axis=1)[:, 0]


def _set_columns(table: jax.Array, column: jax.Array, pages: jax.Array) -> jax.Array:
    """Sets columns `[B, n]` of each row; a column past the end sets nothing."""
    row = lax.broadcasted_iota(jnp.int32, column.shape, 0)
    return table.at[row, column].set(pages, mode="drop")
