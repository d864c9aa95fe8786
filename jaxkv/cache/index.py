# SPDX-License-Identifier: Apache-2.0
"""What a cache knows of its rows, and the plan of one step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache.spec import KVSpec
from jaxkv.core.indexing import item, items, quotient, quotient_up
from jaxkv.core.sharding import constrain, out_sharding
from jaxkv.core.trees import is_known, static
from jaxkv.core.visibility import Visibility

Reach = tuple[jax.Array, jax.Array]
# The limit of a row that has none: orders are int32.
UNBOUNDED = int(np.iinfo(np.int32).max)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Index:
    """The bookkeeping of a group of layers with the same layout: once, not per layer.

    Attributes:
      lengths: int32 `[B]`, tokens each row holds.
      overflowed: bool `[B]`, tokens of this row were dropped because they did not fit.
      refused: bool `[B]`, a rollback of this row went deeper than what is still there.
      state: The layout's own pytree (`None` for contiguous).
      high: int32 `[B]`, the most tokens each row has held since it was emptied, where a codec of
        the group needs it (one that encodes whole groups of tokens); else `None`.
    """

    lengths: jax.Array
    overflowed: jax.Array
    refused: jax.Array
    state: Any = None
    high: jax.Array | None = None


def empty_index(batch: int, state: Any = None) -> Index:
    """Makes the index of `batch` empty rows; every leaf is a buffer of its own."""
    return Index(
        jnp.zeros((batch,), jnp.int32),
        jnp.zeros((batch,), jnp.bool_),
        jnp.zeros((batch,), jnp.bool_),
        state,
    )


def unflagged(index: Index) -> Index:
    """Clears the flags, so that those of one operation can be told from older ones."""
    return dataclasses.replace(
        index,
        overflowed=jnp.zeros_like(index.overflowed),
        refused=jnp.zeros_like(index.refused),
    )


def flagged(index: Index, before: Index) -> Index:
    """Adds the flags that stood before."""
    return dataclasses.replace(
        index,
        overflowed=index.overflowed | before.overflowed,
        refused=index.refused | before.refused,
    )


def raise_if(rows: jax.Array, message: Callable[[], str]) -> None:
    """Raises where flags bool `[B]` are known; under `jit` they stay in the cache for the caller.

    The message is only made if it is needed: it reads arrays, which waits for the device.
    """
    if is_known(rows) and bool(np.any(np.asarray(rows))):
        raise ValueError(f"{message()}; rows {np.flatnonzero(np.asarray(rows)).tolist()}.")


def take_rows(
    x: jax.Array, rows: jax.Array, axes: tuple[str | None, ...] = ("batch",)
) -> jax.Array:
    """Gathers rows of the first axis, on a mesh also from other devices.

    Args:
      x: Its first axis counts rows (or entries).
      rows: int32 `[R]`, each in range.
      axes: Names of the logical axes of `x`, the rest is not split.
    """
    names = (*axes, *(None,) * x.ndim)[: x.ndim]
    placed = out_sharding(names, (*rows.shape, *x.shape[1:]))
    taken = x.at[rows].get(mode="promise_in_bounds", out_sharding=placed)
    # On an Auto mesh XLA would leave every row on every device.
    return constrain(taken, names)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Jobs:
    """Windows to write, J per row: all int32 `[B, J]` (or `[B, K, J]`).

    A job writes window lanes `low .. high - 1` of a window of `width` slots that starts at `slot`
    of `entry`, reading token `offset + lane` of source row `row`; of one `head`, or of all. On a
    mesh, entries, rows and heads count from the first one of the device.
    """

    entry: jax.Array
    slot: jax.Array
    row: jax.Array
    offset: jax.Array
    low: jax.Array
    high: jax.Array
    width: int = static()
    head: jax.Array | None = None

    def live_first(self) -> tuple[Callable[[jax.Array], Jobs], jax.Array]:
        """Lists all jobs with live ones in front: job j, its fields scalars, and how many live."""
        live = (self.high > self.low).reshape(-1)
        order = jnp.argsort(jnp.logical_not(live), stable=True)
        jobs = jax.tree.map(lambda x: items(x.reshape(-1), order), self)

        def job(j: jax.Array) -> Jobs:
            return jax.tree.map(lambda x: item(x, j), jobs)

        return job, jnp.sum(live.astype(jnp.int32))

    @property
    def delay(self) -> jax.Array:
        """The array that what a write waits for goes into."""
        return self.high

    def delayed(self, zero: jax.Array) -> Jobs:
        """Makes the jobs depend on a scalar that is 0."""
        return dataclasses.replace(self, high=self.high + zero)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fill:
    """A write of many single tokens, in one pass over all slots.

    Attributes:
      source: int32 `[B, K, S]` (K is 1 if all heads take the same), the row's new token that goes
        into each slot, -1 = none.
    """

    source: jax.Array

    @property
    def delay(self) -> jax.Array:
        """The array that what a write waits for goes into."""
        return self.source

    def delayed(self, zero: jax.Array) -> Fill:
        """Makes the write depend on a scalar that is 0."""
        return Fill(self.source + zero)


def window_job(
    entry: jax.Array, slot: jax.Array, token: jax.Array, count: jax.Array, width: int, slots: int
) -> Jobs:
    """Makes one window per row: it writes `count` tokens from number `token` on to `slot` on.

    Args:
      entry: int32 `[B]`, where to.
      slot: int32 `[B]`, the first slot.
      token: int32 `[B]`, the first token, of the row's own.
      count: int32 `[B]`, at most `width`, and so that all lie inside the entry.
      width: Slots of every window.
      slots: S, slots of an entry.
    """
    # A window may not run past the end, so it starts earlier and its first lanes are left alone.
    begin = jnp.minimum(slot, slots - width)
    low = slot - begin
    rows = jnp.arange(slot.shape[0], dtype=jnp.int32)
    return Jobs(entry, begin, rows, token - low, low, low + count, width)


def stacked_jobs(jobs: Sequence[Jobs]) -> Jobs:
    """Stacks windows `[B]` to `[B, J]`."""
    return jax.tree.map(lambda *xs: jnp.stack(xs, axis=1), *jobs)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """One step of a group of layers: decided once, used by each of them.

    Attributes:
      start: int32 `[B]`, the order of each row's first new token.
      count: int32 `[B]`, how many new tokens were given.
      order: int32 `[B, T]`, where compacted tokens come from, or `None` if they stand in front.
      jobs: The writes.
      after: The index once the step is done.
    """

    start: jax.Array
    count: jax.Array
    order: jax.Array | None
    jobs: Jobs | Fill
    after: Index


def emptied_rows(index: Index, rows: jax.Array) -> Index:
    """Empties rows, bool `[B]`, and clears their flags; the layout's own state is left to it."""
    return dataclasses.replace(
        index,
        lengths=jnp.where(rows, 0, index.lengths),
        overflowed=index.overflowed & ~rows,
        refused=index.refused & ~rows,
        high=None if index.high is None else jnp.where(rows, 0, index.high),
    )


def live_span(index: Index, row: jax.Array, size: int, reach: Reach) -> tuple[jax.Array, jax.Array]:
    """Bounds the blocks between the reach's left edge and the row's length."""
    first, end = reach
    return quotient(first, size), quotient_up(jnp.minimum(end, item(index.lengths, row)), size)


class Ends(NamedTuple):
    """Where the slots of an entry end: those of the layout, and those that may be read.

    Padding that is read like slots never filled keeps blocks at whole tiles of a TPU.
    """

    slots: int
    held: int


def early_block(block: jax.Array, size: int, ends: Ends) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Finds a block of an entry; the last one starts early rather than run past the end.

    Returns:
      Its first slot, its slots int32 `[size]`, and which of them are no earlier block's.
    """
    begin = block * size
    slot = jnp.minimum(begin, ends.held - size)
    place = slot + jnp.arange(size, dtype=jnp.int32)
    return slot, place, (place >= begin) & (place < ends.slots)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Moves:
    """What has to move in the records when rows move: nothing, whole entries, or some copies.

    Attributes:
      take: int32 `[E']`, the entry that each new entry is a copy of.
      source: int32 `[C]`, entries to be copied within the records, before anything is written.
      target: int32 `[C]`, where each is copied to; -1 copies nothing.
    """

    take: jax.Array | None = None
    source: jax.Array | None = None
    target: jax.Array | None = None


class Blocks(Protocol):
    """The part of a layout that a read needs.

    Attributes:
      reads_padding: Whether `locate` gives slots of padding too, as slots never filled.
    """

    reads_padding: ClassVar[bool] = False

    @property
    def per_head(self) -> bool:
        """Whether slots of one head hold other tokens than those of the next."""
        return False

    def span(
        self, index: Index, row: jax.Array, slots: int, size: int, reach: Reach
    ) -> tuple[jax.Array, jax.Array]:
        """Bounds a row's live blocks of `size` slots: int32 scalars `(first, end)`.

        `reach` are the orders `[first, end)` that the row's queries may see at all.
        """
        ...

    def locate(
        self, index: Index, row: jax.Array, ends: Ends, size: int, block: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Finds a row's block: `(entry, first slot, order int32[size])`, -1 = not to be read."""
        ...

    def tile(self, slots: int, want: int) -> int:
        """Chooses how many slots a read takes at a time, about `want`."""
        return min(slots, want)

    def at_head(self, index: Index, head: jax.Array) -> Index:
        """Turns to the slots of one head, where heads hold different tokens."""
        del head
        return index


class Layout(Blocks, Protocol):
    """Says where tokens go; a frozen, hashable dataclass. One file each.

    Attributes:
      per_layer: Every layer has an index of its own, since layers keep different tokens.
      leaves_holes: Tokens between others can be given up where they stand (`evict`).
    """

    per_layer: ClassVar[bool] = False
    leaves_holes: ClassVar[bool] = False

    @property
    def chooses(self) -> bool:
        """Whether the plan of a step is settled only after attention."""
        return False

    def fitted(self, spec: KVSpec) -> Layout:
        """Fills in what depends on the record."""
        del spec
        return self

    def create(self, batch: int, capacity: int) -> Index:
        """Makes an empty index."""
        ...

    def storage(self, batch: int, capacity: int) -> tuple[int, int]:
        """Sizes the records: `(E entries, S slots each)`."""
        ...

    def narrowed(self, rule: Visibility) -> Visibility:
        """Narrows a module's rule to the tokens that are kept; raises if they do not do."""
        ...

    def limit(self, index: Index, slots: int) -> int:
        """Tokens that a row may hold; `UNBOUNDED` if it forgets old ones instead."""
        ...

    def plan(self, index: Index, slots: int, length: int, count: jax.Array) -> Plan:
        """Plans the writing of `count int32[B]` of T = `length` tokens, for entries of S slots."""
        ...

    def adopted(self, index: Index, slots: int, order: jax.Array, lengths: jax.Array) -> Index:
        """Fills an empty index with rows of `lengths int32[B]` tokens that another layout has had.

        `order int32[B, S]` tells which of them are there still; -1 = none. A layout that cannot do
        without one of the others takes it for there all the same.
        """
        return self.plan(index, slots, max(order.shape[1], 1), lengths).after

    def places(self, index: Index, slots: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Lists each row's slots: entry, slot and order, int32 `[B, S]`; order -1 = unfilled."""
        ...

    def rollback(self, index: Index, slots: int, count: jax.Array) -> tuple[Index, Moves]:
        """Takes back the last `count int32[B]` tokens of each row, or flags the row `refused`."""
        ...

    def rollback_limit(self, slots: int) -> int:
        """Tokens that a rollback can always take back from a filled row; `UNBOUNDED` for all."""
        del slots
        return 0

    def gather(
        self, index: Index, rows: jax.Array, left: jax.Array | None = None
    ) -> tuple[Index, Moves]:
        """Makes row i a copy of row `rows[i]`, int32 `[R]`, each in range.

        With `left`, int32 `[R]`, the caller at once takes row i back to its first `left[i]` tokens,
        or empties it: what lies beyond need not be copied.
        """
        del left
        return jax.tree.map(lambda x: take_rows(x, rows), index), Moves(take=rows)

    def reset(self, index: Index, rows: jax.Array) -> Index:
        """Empties the rows where `rows bool[B]` is True."""
        ...

    def mask_width(self, index: Index, slots: int) -> int | None:
        """Width of a caller's mask over the whole row; `None` if orders are not bounded."""
        limit = self.limit(index, slots)
        return None if limit == UNBOUNDED else limit

    def observed(self, length: int) -> int:
        """How many of a call's last queries, of T = `length`, decide what is kept."""
        del length
        return 0

    def settled(self, index: Index, slots: int, plan: Plan, old: jax.Array, new: jax.Array) -> Plan:
        """Settles a plan by the attention that stored and new tokens got, `[B, heads, S | T]`."""
        del index, slots, old, new
        return plan

    def evict(self, index: Index, keep: jax.Array) -> Index:
        """Gives up the tokens of order w where `keep bool[B, W]` is False; later ones stay.

        Raises:
          ValueError: If the layout leaves no holes; the verb converts it first to one that does.
        """
        raise ValueError(f"{self} keeps tokens in their order, so none can be taken out.")

    def forgetting(self, slots: int) -> Any:
        """Gives the policy by which `Evicting` forgets what this layout does; `None` if nothing."""
        del slots
        return None

    def state_axes(self, heads: str | None) -> Any:
        """Names the logical axes of the state, `heads` being that of the records' heads."""
        del heads
        return ("batch",)

    def job_axes(self, heads: str | None) -> Any:
        """Names the logical axes of a plan's jobs, alike."""
        del heads
        return ("batch",)


def index_axes(layout: Layout, heads: str | None) -> Any:
    """Names the logical axes of an index, `heads` being that of the records' heads."""
    rows: Any = ("batch",)
    return Index(rows, rows, rows, layout.state_axes(heads), rows)


def plan_axes(layout: Layout, heads: str | None) -> Any:
    """Names the logical axes of a plan, alike."""
    rows: Any = ("batch",)
    return Plan(rows, rows, rows, layout.job_axes(heads), index_axes(layout, heads))
