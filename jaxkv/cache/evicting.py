# SPDX-License-Identifier: Apache-2.0
"""The evicting layout: a row keeps some tokens, which a policy or the caller chooses."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkv.cache.index import (
    UNBOUNDED,
    Ends,
    Fill,
    Index,
    Jobs,
    Layout,
    Moves,
    Plan,
    Reach,
    early_block,
    emptied_rows,
    empty_index,
)
from jaxkv.cache.policies import Policy
from jaxkv.cache.spec import KVSpec
from jaxkv.core.indexing import box, quotient_up
from jaxkv.core.trees import check_sizes
from jaxkv.core.visibility import Visibility

Pair = tuple[jax.Array, jax.Array]  # of stored tokens, and of a step's own
HIGHEST = float(np.finfo(np.float32).max)
# Calls of more new tokens than this share of the slots write all of these in one pass.
FEW = 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Kept:
    """Which tokens stand where: the state of an evicting layer.

    Attributes:
      order: int32 `[B, K, S]`, the order of the token in each slot, -1 = free; K is 1 where all
        heads keep the same.
      weight: float32 `[B, K, S]`, the attention it got, if the policy adds that up; else `None`.
      mark: int32 `[B]`, a rollback to fewer tokens than this would miss what was evicted.
    """

    order: jax.Array
    weight: jax.Array | None
    mark: jax.Array


class OneHead(NamedTuple):
    """The order plane, and the head that a read is at."""

    order: jax.Array
    head: jax.Array


@dataclasses.dataclass(frozen=True)
class Evicting(Layout):
    """Keeps `budget` tokens of a row and gives the others up; tokens keep their positions.

    A call attends to what is kept and to its own tokens, then its policy chooses what stays. So
    results depend on how tokens arrive once something is evicted; until then they are those
    of any other layout. Each layer chooses for itself: give a list of these for
    budgets that differ by layer (`pyramid_budgets`).

    Args:
      budget: Tokens of a row that stay; a tuple: for each KV head.
      policy: Who chooses; `None`: the caller, by `evict`, and a full row overflows.
      room: Slots beside these, for tokens that follow where the policy does not evict (`SnapKV`).
      heads: KV heads that keep tokens of their own; filled in by the cache.

    Raises:
      ValueError: If a number is out of range, or budgets by head meet a policy of whole layers.

    >>> from jaxkv.cache.policies import H2O
    >>> Evicting(512, H2O()).storage(batch=8, capacity=4096)
    (8, 512)
    """

    budget: int | tuple[int, ...]
    policy: Policy | None = None
    room: int = 0
    heads: int = 1

    per_layer: ClassVar[bool] = True
    leaves_holes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for budget in self._budgets():
            check_sizes(budget=budget)
        if not isinstance(self.room, int) or self.room < 0:
            raise ValueError(f"room={self.room!r}: want at least 0 tokens.")
        lacking = self.policy is not None and not hasattr(self.policy, "rank")
        if isinstance(self.policy, type) or lacking:
            raise ValueError(f"policy={self.policy!r}: want a policy such as H2O(), or None.")
        by_head = isinstance(self.budget, tuple)
        if by_head and not (self.policy is not None and self.policy.per_head):
            raise ValueError(f"{self}: budgets by head want a policy that chooses by head.")

    def _budgets(self) -> tuple[int, ...]:
        return self.budget if isinstance(self.budget, tuple) else (self.budget,)

    @property
    def per_head(self) -> bool:
        """Whether slots of one head hold other tokens than those of the next."""
        return self.heads > 1

    @property
    def chooses(self) -> bool:
        """Whether the plan of a step is settled only after attention."""
        return self.policy is not None

    def fitted(self, spec: KVSpec) -> Evicting:
        """Gives each KV head tokens of its own, if the policy chooses by head.

        Raises:
          ValueError: If there are budgets for another number of heads.
        """
        chooses = self.policy is not None and self.policy.per_head and not spec.shared_width
        heads = spec.kv_heads if chooses else 1
        if isinstance(self.budget, tuple) and len(self.budget) != heads:
            raise ValueError(
                f"{len(self.budget)} budgets for {heads} KV heads that keep tokens of their own."
            )
        return dataclasses.replace(self, heads=heads)

    def create(self, batch: int, capacity: int) -> Index:
        """Makes an empty index."""
        shape = (batch, self.heads, self.storage(batch, capacity)[1])
        adds = self.policy is not None and self.policy.accumulates
        weight = jnp.zeros(shape, jnp.float32) if adds else None
        order = jnp.full(shape, -1, jnp.int32)
        return empty_index(batch, Kept(order, weight, jnp.zeros((batch,), jnp.int32)))

    def storage(self, batch: int, capacity: int) -> tuple[int, int]:
        """Sizes the records: one entry per row, of no more slots than the row has tokens."""
        return batch, min(max(self._budgets()) + self.room, capacity)

    def narrowed(self, rule: Visibility) -> Visibility:
        """Checks that what is evicted could be missed by later queries only; asks the policy too.

        Raises:
          ValueError: If the rule looks ahead without end, or at more than the policy keeps.
        """
        if rule.right is None:
            raise ValueError(f"{self} gives tokens up, and {rule} asks for all of them.")
        return rule if self.policy is None else self.policy.narrowed(rule)

    def limit(self, index: Index, slots: int) -> int:
        """Tokens that a row may hold: its slots if only the caller evicts, else no limit."""
        del index
        return slots if self.policy is None else UNBOUNDED

    def plan(self, index: Index, slots: int, length: int, count: jax.Array) -> Plan:
        """Plans with what is known before attention: the oldest tokens would be evicted."""
        order = index.state.order
        if self.policy is not None and self.policy.evicts(length):
            fit = count
        else:
            free = jnp.sum((order < 0).astype(jnp.int32), axis=2)
            fit = jnp.minimum(count, jnp.min(free, axis=1))
        after = dataclasses.replace(
            index, lengths=index.lengths + fit, overflowed=index.overflowed | (fit < count)
        )
        plan = Plan(index.lengths, count, None, _no_jobs(index), after)
        return self._chosen(index, slots, plan, _following(index, length), None)

    def adopted(self, index: Index, slots: int, order: jax.Array, lengths: jax.Array) -> Index:
        """Takes what is there: the others count as evicted. The row is empty if that does not fit.

        As in a step, a policy that evicts goes down to its budget; no token has got attention yet.
        """
        length, held = order.shape[1], jnp.sum((order >= 0).astype(jnp.int32), axis=1)
        chosen = self.policy is not None and self.policy.evicts(length)
        fit = lengths if chosen else jnp.where(held <= slots, lengths, 0)
        after = dataclasses.replace(index, lengths=fit)
        plan = Plan(index.lengths, lengths, None, _no_jobs(index), after)
        order = jnp.sort(jnp.where(order < 0, UNBOUNDED, order), axis=1)
        shape = index.state.order.shape[:2]
        weights = jnp.zeros((*shape, slots)), jnp.zeros((*shape, length))
        index = self._chosen(index, slots, plan, order, weights).after
        mark = jnp.where(held < fit, fit, index.state.mark)
        return dataclasses.replace(index, state=dataclasses.replace(index.state, mark=mark))

    def observed(self, length: int) -> int:
        """How many of a call's last queries, of T = `length`, have to be weighed."""
        if self.policy is None or not self.policy.evicts(length):
            return 0
        return min(self.policy.observed(length), length)

    def settled(self, index: Index, slots: int, plan: Plan, old: jax.Array, new: jax.Array) -> Plan:
        """Chooses what stays, now that it is known what attention each token got.

        Args:
          index: Before the step.
          slots: S.
          plan: The step's.
          old: float32 `[B, heads, S]`, of stored tokens.
          new: float32 `[B, heads, T]`, of the step's own.
        """
        if index.state.weight is not None:
            old = old + index.state.weight
        order = _following(index, new.shape[2])
        return self._chosen(index, slots, plan, order, (old, new))

    def _chosen(
        self,
        index: Index,
        slots: int,
        plan: Plan,
        new_order: jax.Array,
        weights: tuple[jax.Array, jax.Array] | None,
    ) -> Plan:
        """Evicts what ranks lowest, and gives the step's own tokens that stay their slots.

        These are of the orders `[B, T]`. Without weights the oldest rank lowest. Stored and new
        tokens are put together only to be ranked: a step's temporaries would be several times the
        state's size.
        """
        state, end, length = index.state, plan.after.lengths, new_order.shape[1]
        new_order = jnp.broadcast_to(new_order[:, None], (*state.order.shape[:2], length))
        live = state.order >= 0, new_order < end[:, None, None]
        old, new = live
        if self.policy is not None and self.policy.evicts(length):
            orders = state.order, jnp.where(new, new_order, -1)
            ranks = orders if weights is None else self._ranks(weights, orders, end, slots)
            allowed = self._allowed(slots, plan.count)
            # At most one is too many: no need to sort.
            lowest = _lowest_one if length == 1 and not self.room else _lowest
            gone = lowest(ranks, orders, allowed)
            old, new = old & ~gone[0], new & ~gone[1]
        to = jnp.where(new, _nth_free(~old, jnp.cumsum(new.astype(jnp.int32), axis=2)), slots)
        few = length * FEW <= slots
        source = None if few else _inverse(to, slots)
        evicted = (
            jnp.any(was & ~now, axis=(1, 2)) for was, now in zip(live, (old, new), strict=True)
        )
        weight = state.weight
        if weight is not None and weights is not None:
            weight = _put(jnp.where(old, weights[0], 0.0), weights[1], to, source)
        after = Kept(
            _put(jnp.where(old, state.order, -1), new_order, to, source),
            weight,
            jnp.where(functools.reduce(jnp.logical_or, evicted), end, state.mark),
        )
        jobs = _jobs(to, slots) if source is None else Fill(source)
        return dataclasses.replace(
            plan, jobs=jobs, after=dataclasses.replace(plan.after, state=after)
        )

    def _ranks(self, weights: Pair, orders: Pair, end: jax.Array, slots: int) -> Pair:
        """Ranks stored and new tokens by their weights."""
        assert self.policy is not None
        budget = min(max(self._budgets()), slots)
        if self.policy.by_itself:
            old, new = (
                self.policy.rank(weight, order, end, budget)
                for weight, order in zip(weights, orders, strict=True)
            )
            return old, new
        weight, order = (jnp.concatenate(x, axis=2) for x in (weights, orders))
        rank = self.policy.rank(weight, order, end, budget)
        return rank[..., :slots], rank[..., slots:]

    def _allowed(self, slots: int, count: jax.Array) -> jax.Array:
        """Tells how many tokens may stay after a call that evicts: int32 `[B, heads or 1]`."""
        assert self.policy is not None
        every = jnp.full((count.shape[0], 1), slots, jnp.int32)
        budgets = jnp.asarray(np.minimum(self._budgets(), slots)[None], jnp.int32)
        return jnp.where(self.policy.compresses(count)[:, None], budgets, every)

    def at_head(self, index: Index, head: jax.Array) -> Index:
        """Turns to the slots of one head."""
        order = index.state.order
        head = jnp.minimum(head, order.shape[1] - 1)
        return dataclasses.replace(index, state=OneHead(order, head))

    def state_axes(self, heads: str | None) -> Any:
        """Names the logical axes of the state: heads lie where their records do."""
        by_head = ("batch", "kv_heads" if heads is not None and self.per_head else None, None)
        return Kept(by_head, by_head, ("batch",))  # type: ignore[arg-type]

    def job_axes(self, heads: str | None) -> Any:
        """Names the logical axes of jobs, alike."""
        return ("batch", "kv_heads" if heads is not None and self.per_head else None, None)

    def span(
        self, index: Index, row: jax.Array, slots: int, size: int, reach: Reach
    ) -> tuple[jax.Array, jax.Array]:
        """Bounds the blocks up to the last slot that holds anything."""
        del reach
        held = _slots_of(index.state, row, jnp.zeros_like(row), slots) >= 0
        end = jnp.max(jnp.where(held, jnp.arange(1, slots + 1, dtype=jnp.int32), 0))
        return jnp.zeros_like(end), quotient_up(end, size)

    def locate(
        self, index: Index, row: jax.Array, ends: Ends, size: int, block: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Finds block `block` of a row; the last one starts early rather than run past the end."""
        slot, _, fresh = early_block(block, size, ends)
        order = _slots_of(index.state, row, slot, size)
        return row, slot, jnp.where(fresh, order, -1)

    def places(self, index: Index, slots: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Lists each row's slots: entry, slot and order, int32 `[B, S]`, of the first head."""
        shape = (index.lengths.shape[0], slots)
        entry, slot = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        return entry, slot, index.state.order[:, 0]

    def rollback(self, index: Index, slots: int, count: jax.Array) -> tuple[Index, Moves]:
        """Takes back tokens, unless anything was evicted since.

        The attention that other tokens got of those taken back stays counted.
        """
        del slots
        back = index.lengths - count
        good = (count >= 0) & ((count == 0) | (back >= index.state.mark))
        left = jnp.where(good, back, index.lengths)
        gone = index.state.order >= left[:, None, None]
        return dataclasses.replace(
            index,
            lengths=left,
            refused=index.refused | jnp.logical_not(good),
            state=_freed(index.state, gone, index.state.mark),
        ), Moves()

    def evict(self, index: Index, keep: jax.Array) -> Index:
        """Gives up the tokens of order w where `keep bool[B, W]` is False; later ones stay."""
        order = index.state.order
        width = keep.shape[1]
        asked = jnp.clip(order, 0, max(width - 1, 0))
        stays = jax.vmap(lambda row, at: row[at])(keep, asked) | (order >= width)
        gone = (order >= 0) & ~stays
        any_gone = jnp.any(gone, axis=(1, 2))
        mark = jnp.where(any_gone, index.lengths, index.state.mark)
        return dataclasses.replace(index, state=_freed(index.state, gone, mark))

    def reset(self, index: Index, rows: jax.Array) -> Index:
        """Empties the rows where `rows bool[B]` is True."""
        gone = jnp.broadcast_to(rows[:, None, None], index.state.order.shape)
        state = _freed(index.state, gone, jnp.where(rows, 0, index.state.mark))
        return dataclasses.replace(emptied_rows(index, rows), state=state)


def _following(index: Index, length: int) -> jax.Array:
    """Counts the orders `[B, T]` of a step's T = `length` new tokens."""
    return index.lengths[:, None] + jnp.arange(length, dtype=jnp.int32)[None]


def _lowest(ranks: Pair, orders: Pair, allowed: jax.Array) -> Pair:
    """Marks the tokens (order >= 0), stored and new, of lowest rank beyond what is allowed."""
    rank, order = (jnp.concatenate(x, axis=2) for x in (ranks, orders))
    live = order >= 0
    number = jnp.sum(live.astype(jnp.int32), axis=2)
    extra = jnp.maximum(number - allowed, 0)[..., None]
    # The dead stand before all others, and of equal ranks the older token.
    place = _inverse(jnp.lexsort((order, rank, live), axis=2), rank.shape[2])
    gone = live & (place < rank.shape[2] - number[..., None] + extra)
    slots = ranks[0].shape[2]
    return gone[..., :slots], gone[..., slots:]


def _lowest_one(ranks: Pair, orders: Pair, allowed: jax.Array) -> Pair:
    """Does what `_lowest` does where at most one token is too many, of which one is new."""
    live = [order >= 0 for order in orders]
    number = sum(jnp.sum(x.astype(jnp.int32), axis=2) for x in live)
    extra = (number > allowed)[..., None]
    # A rank of infinity comes before what is not there.
    stored, own = (
        jnp.where(x, jnp.minimum(rank.astype(jnp.float32), HIGHEST), jnp.inf)
        for x, rank in zip(live, ranks, strict=True)
    )
    old, new = (jnp.min(rank, axis=2, keepdims=True) for rank in (stored, own))
    place = lax.broadcasted_iota(jnp.int32, stored.shape, 2)
    first = jnp.argmin(stored, axis=2, keepdims=True).astype(jnp.int32)
    return live[0] & extra & (old <= new) & (place == first), live[1] & extra & (new < old)


def _nth_free(free: jax.Array, number: jax.Array) -> jax.Array:
    """Finds the slot of the n-th free one, n from 1 on: int32, like `number`."""
    if number.shape[2] == 1:
        return jnp.argmax(free, axis=2, keepdims=True).astype(jnp.int32)
    count = jnp.cumsum(free.astype(jnp.int32), axis=2)
    find = jax.vmap(jax.vmap(jnp.searchsorted))
    return find(count, number).astype(jnp.int32)


def _put(old: jax.Array, new: jax.Array, to: jax.Array, source: jax.Array | None) -> jax.Array:
    """Puts `new [B, heads, T]` where `to` says, of which `source` (of many) is the inverse."""
    if source is not None:
        picked = jnp.take_along_axis(new, jnp.maximum(source, 0), axis=2)
        return jnp.where(source >= 0, picked, old)
    if new.shape[2] == 1:  # a pass over all slots, which fuses with what made `old`
        return jnp.where(lax.broadcasted_iota(jnp.int32, old.shape, 2) == to, new, old)
    b, k, _ = (lax.broadcasted_iota(jnp.int32, to.shape, axis) for axis in range(3))
    return old.at[b, k, to].set(new, mode="drop")


def _inverse(to: jax.Array, size: int) -> jax.Array:
    """Lists for each of `size` places the last index that points to it, or -1; others drop."""
    b, k, t = (lax.broadcasted_iota(jnp.int32, to.shape, axis) for axis in range(3))
    empty = jnp.full((*to.shape[:2], size), -1, jnp.int32)
    return empty.at[b, k, to].set(t, mode="drop")


def _jobs(to: jax.Array, slots: int) -> Jobs:
    """Makes a window of one slot for each token that stays (slot below `slots`)."""
    row, head, token = (lax.broadcasted_iota(jnp.int32, to.shape, axis) for axis in range(3))
    zero = jnp.zeros_like(to)
    stays = (to < slots).astype(jnp.int32)
    heads = head if to.shape[1] > 1 else None
    return Jobs(row, jnp.minimum(to, slots - 1), row, token, zero, stays, 1, heads)


def _no_jobs(index: Index) -> Fill:
    return Fill(jnp.full_like(index.state.order, -1))


def _slots_of(state: Any, row: jax.Array, first: jax.Array, count: int) -> jax.Array:
    """Slices the orders of some slots of a row, of the head that the read is at."""
    corner = (row, state.head, first)
    return box(state.order, corner, (1, 1, count)).reshape(count)


def _freed(state: Kept, gone: jax.Array, mark: jax.Array) -> Kept:
    weight = None if state.weight is None else jnp.where(gone, 0.0, state.weight)
    return Kept(jnp.where(gone, -1, state.order), weight, mark)
