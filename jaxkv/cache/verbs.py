# SPDX-License-Identifier: Apache-2.0
"""The verbs that every cache has, written once over groups of layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jaxkv.cache.codecs import Codec, Raw
from jaxkv.cache.grouped import Grouped
from jaxkv.cache.index import (
    UNBOUNDED,
    Index,
    Layout,
    Moves,
    flagged,
    index_axes,
    raise_if,
    take_rows,
    unflagged,
)
from jaxkv.cache.pairs import check_kinds, refusal
from jaxkv.cache.plans import Group, marked
from jaxkv.cache.records import Records, bytes_per_token, physical_bytes, tree_bytes
from jaxkv.cache.regroup import recoded
from jaxkv.cache.relayout import Move, leaving_holes, relaid
from jaxkv.core.sharding import Rules, local, named
from jaxkv.core.trees import check_arrays, is_known


class Verbs:
    """Operations on a cache's rows; a cache states its parts and how to rebuild itself.

    All verbs that change contents return a new cache, keep every shape, and work under `jit`.
    """

    def _parts(self) -> tuple[tuple[Layout, ...], tuple[Index, ...], tuple[Records, ...], tuple]:
        """Gives layouts and indices (one per group), layers, and each layer's group."""
        raise NotImplementedError

    def _rebuilt(
        self,
        indices: tuple[Index, ...],
        layers: tuple[Records, ...],
        layouts: tuple[Layout, ...] | None = None,
        groups: tuple[int, ...] | None = None,
    ) -> Self:
        raise NotImplementedError

    def _extended(self) -> int:
        """How many groups a step extends; they come first."""
        return 1

    def _groups(self) -> tuple[Group, ...]:
        """Gives the groups that a step extends."""
        layouts, indices, layers, groups = self._parts()

        def group(number: int) -> Group:
            mine = [r for r, g in zip(layers, groups, strict=True) if g == number]
            codecs = tuple(dict.fromkeys(r.codec for r in mine))
            return Group(layouts[number], indices[number], mine[0].slots, codecs)

        return tuple(map(group, range(self._extended())))

    def _own(self) -> list[Records]:
        """Gives the layers that a step extends."""
        _, _, layers, groups = self._parts()
        return [r for r, group in zip(layers, groups, strict=True) if group < self._extended()]

    def __repr__(self) -> str:
        """Names the cache in a line: the arrays themselves are long."""
        layouts, indices, layers, _ = self._parts()
        name, lengths = type(self).__name__, indices[0].lengths
        if not all(hasattr(x, "shape") for x in jax.tree.leaves(self)):
            return f"{name}(a tree like that of a cache, of {len(layers)} layers)"
        rows, stored = lengths.shape[0], sorted({str(r.codec) for r in layers})
        capacity = "unbounded" if self.capacity == UNBOUNDED else self.capacity
        held = "unknown"
        if is_known(lengths) and isinstance(lengths, jax.Array) and not lengths.is_deleted():
            held = np.asarray(lengths).tolist()
            held = held if rows <= 8 else f"{min(held)} to {max(held)}"
        return (
            f"{name}(rows={rows}, lengths={held}, capacity={capacity}, layers={len(layers)}, "
            f"bytes_per_token={self.bytes_per_token}, layout={', '.join(map(str, layouts))}, "
            f"codec={', '.join(stored)})"
        )

    def check_alive(self) -> None:
        """Checks that this cache was not donated to an earlier call.

        Raises:
          ValueError: If it was, since its arrays are gone.
        """
        arrays = jax.tree.leaves(self)
        if any(isinstance(x, jax.Array) and is_known(x) and x.is_deleted() for x in arrays):
            raise ValueError(
                "this cache was donated to an earlier call and is gone: go on with the one that "
                "the call returned."
            )

    @property
    def lengths(self) -> jax.Array:
        """int32 `[B]`, tokens each row has been given and holds."""
        return self._parts()[1][0].lengths

    @property
    def overflowed(self) -> jax.Array:
        """bool `[B]`, tokens of the row were dropped because they did not fit."""
        return _any(tuple(i.overflowed for i in self._parts()[1]))

    @property
    def refused(self) -> jax.Array:
        """bool `[B]`, a rollback of the row went deeper than what is still there."""
        return _any(tuple(i.refused for i in self._parts()[1]))

    @property
    def capacity(self) -> int:
        """Tokens that every row may hold; `UNBOUNDED` (2**31 - 1) if it forgets old ones."""
        return min(g.layout.limit(g.index, g.slots) for g in self._groups())

    @property
    def rollback_limit(self) -> int:
        """Tokens that `rollback` can take back from rows that hold as many as they ever did.

        In a ring, and with a codec of whole groups, rollbacks that follow each other share it: a
        row that grows again past its highest length has all of it anew.
        """
        return min(group.rollback_limit for group in self._groups())

    def rollback(self, count: jax.Array) -> Self:
        """Takes back the last tokens of each row.

        Args:
          count: int32 `[B]` (or an int for all rows), in tokens.

        Returns:
          The cache. A row that does not hold `count` tokens any more is left as it is and
          flagged `refused`; nothing is lost. So is one of which a codec of whole groups has
          encoded a token that would be the newest, or a later one.

        Raises:
          ValueError: Outside `jit`, if a row is refused.
        """
        self.check_alive()
        held = self.lengths
        count = jnp.asarray(count)
        if count.shape not in ((), held.shape) or not jnp.issubdtype(count.dtype, jnp.integer):
            want = f"int32 {held.shape}, or one int for all"
            raise ValueError(f"rollback count {count.dtype}{count.shape}: want {want}.")
        cache, refused = self._rolled_back(jnp.broadcast_to(count.astype(jnp.int32), held.shape))
        raise_if(
            refused,
            lambda: (
                f"rollback of {count} tokens, each to be from 0 to rollback_limit: rows hold {held}"
            ),
        )
        return cache

    def _rolled_back(self, count: jax.Array) -> tuple[Self, jax.Array]:
        """Takes back `count int32[B]` tokens, and tells which rows are refused and left alone."""
        groups = self._groups()

        def back(indices: tuple[Index, ...], count: jax.Array) -> Any:
            def each(count: jax.Array) -> list[tuple[Index, Moves]]:
                return [
                    g.layout.rollback(unflagged(i), g.slots, count)
                    for g, i in zip(groups, indices, strict=True)
                ]

            # A row that one group refuses is refused by all: layers agree on what a row holds. It
            # then gives up no pages either, for want of which a group may refuse another row.
            def refusals(refused: jax.Array) -> jax.Array:
                done = each(jnp.where(refused, 0, count))
                return _any((refused, *(index.refused for index, _ in done)))

            lost = (g._replace(index=i).beyond(count) for g, i in zip(groups, indices, strict=True))
            refused = refusals(_any(tuple(lost)))
            if len(groups) > 1:
                refused = _unchanging(refusals, refused)
            done = each(jnp.where(refused, 0, count))
            new = [dataclasses.replace(index, refused=refused) for index, _ in done]
            return tuple(map(flagged, new, indices)), tuple(m for _, m in done), refused

        new, moves, refused = _by_rows(back)(tuple(g.index for g in groups), count)
        _, before, layers, groups = self._parts()
        moves = (*moves, *(Moves() for _ in before[len(new) :]))
        moved = tuple(r.moved(moves[g]) for r, g in zip(layers, groups, strict=True))
        return self._rebuilt((*new, *before[len(new) :]), moved), refused

    def reset(self, rows: jax.Array | None = None) -> Self:
        """Empties rows and clears their flags; `rows` is bool `[B]`, default all."""
        self.check_alive()
        layouts, indices, layers, _ = self._parts()
        if rows is None:
            rows = jnp.ones(indices[0].refused.shape, jnp.bool_)
        check_arrays(rows=rows)
        if rows.shape != indices[0].refused.shape or rows.dtype != jnp.bool_:
            want = indices[0].refused.shape
            raise ValueError(
                f"reset rows {rows.dtype}{rows.shape}: want bool{want}, True for each to empty."
            )

        def emptied(indices: tuple[Index, ...], rows: jax.Array) -> tuple[Index, ...]:
            return tuple(lay.reset(i, rows) for lay, i in zip(layouts, indices, strict=True))

        return self._rebuilt(_by_rows(emptied)(indices, rows), layers)

    def clear_flags(self) -> Self:
        """Clears `overflowed` and `refused` of every row, once the caller has dealt with them."""
        _, indices, layers, _ = self._parts()
        return self._rebuilt(tuple(map(unflagged, indices)), layers)

    def reorder(self, rows: jax.Array, *, contexts: bool = True) -> Self:
        """Makes row i what row `rows[i]` was (beams); else as `fork`.

        Args:
          rows: int32 `[B]`.
          contexts: False leaves contexts where they are, for rows that only change places with
            rows of the same context: beams then read theirs without ever copying it.
        """
        check_arrays(rows=rows)
        if rows.shape != self.lengths.shape:
            raise ValueError(f"reorder rows {rows.shape}: want {self.lengths.shape}; else fork.")
        return self._taken(rows, len(self._parts()[1]) if contexts else self._extended())

    def fork(self, rows: jax.Array) -> Self:
        """Makes a cache whose row i is a copy of row `rows[i]`.

        Args:
          rows: int32 `[R]`, any number of rows.

        Returns:
          The cache. A row that does not exist, or for which no page is left, comes out empty and
          flagged `refused`. Pages are as many as before: make a cache of `Paged(size, pages=P)`
          with pages for all the rows that will be.

        Raises:
          ValueError: Outside `jit`, if there is such a row.
        """
        return self._taken(rows, len(self._parts()[1]))

    def _taken(self, rows: jax.Array, number: int, left: jax.Array | None = None) -> Self:
        """Moves the rows of the first `number` groups.

        `left` tokens of each row are kept at once after, as `Layout.gather` says; not of contexts.
        """
        self.check_alive()
        layouts, indices, layers, groups = self._parts()
        batch = indices[0].lengths.shape[0]
        check_arrays(rows=rows)
        if rows.ndim != 1 or not jnp.issubdtype(rows.dtype, jnp.integer):
            raise ValueError(f"rows {rows.dtype}{rows.shape}: want int32 [R].")
        missing = (rows < 0) | (rows >= batch)
        raise_if(missing, lambda: f"rows {rows} of a cache of {batch}")
        there = jnp.clip(jnp.asarray(rows, jnp.int32), 0, max(batch - 1, 0))
        # An older flag of a row must not hide that it is lost now.
        fresh = (dataclasses.replace(i, refused=jnp.zeros_like(i.refused)) for i in indices)
        taken = [
            layout.gather(index, there, left if group < self._extended() else None)
            for group, (layout, index) in enumerate(zip(layouts[:number], fresh, strict=False))
        ]
        lost = _any(tuple(index.refused for index, _ in taken))
        raise_if(lost, lambda: "no page is left for copies of the last pages of rows")
        new = [
            dataclasses.replace(index, refused=index.refused | take_rows(old.refused, there))
            for index, old in zip(
                _emptied(layouts, [index for index, _ in taken], lost | missing),
                indices[:number],
                strict=True,
            )
        ]
        moves = [move for _, move in taken]
        new, moves = (*new, *indices[number:]), (*moves, *(Moves() for _ in indices[number:]))
        moved = tuple(
            r.moved(moves[g], there if g < number else None)
            for r, g in zip(layers, groups, strict=True)
        )
        return self._rebuilt(new, moved)

    def share(self, rows: jax.Array, count: jax.Array) -> Self:
        """Makes row i begin anew with the first tokens of another row (a shared prefix).

        Args:
          rows: int32 `[B]`, the row to take them from; -1 leaves row i as it is.
          count: int32 `[B]`, how many tokens.

        Returns:
          The cache. Full pages are shared, not copied. Where a row does not exist, does not have
          so many tokens any more, or no page is left for a copy of the last one, row i comes out
          empty and flagged `refused`.

        Raises:
          ValueError: Outside `jit`, if there is such a row.
        """
        check_arrays(rows=rows, count=count)
        own = jnp.arange(self.lengths.shape[0], dtype=jnp.int32)
        if rows.shape != own.shape or count.shape != own.shape:
            raise ValueError(f"share rows {rows.shape}, count {count.shape}: want {own.shape}.")
        number = len(self._parts()[1])
        left = jnp.where(rows < 0, self.lengths, count)
        forked = self._taken(jnp.where(rows < 0, own, rows), number, left)
        shared, refused = forked._rolled_back(forked.lengths - left)
        raise_if(
            refused, lambda: f"share of the first {count} tokens of rows that hold {self.lengths}"
        )
        layouts, indices, layers, _ = shared._parts()
        return shared._rebuilt(_emptied(layouts, indices, refused), layers)

    def evict(self, keep: jax.Array) -> Self:
        """Gives up tokens of each row; those that stay keep their positions.

        Args:
          keep: bool `[B, W]`: whether the row's token of order w stays. Tokens from W on stay.

        Returns:
          The cache, with room for as many tokens more. Where a slot tells the position of what is
          in it none can be left out: such layers move to `Evicting` first, of as many slots as a
          row may hold tokens (a ring: as it has; it goes on forgetting). In a loop, where a cache
          must keep its layout, `convert` before.

        Raises:
          ValueError: If a codec does not fit `Evicting`.
        """
        self.check_alive()
        check_arrays(keep=keep)
        batch = self.lengths.shape[0]
        if keep.ndim != 2 or keep.shape[0] != batch or keep.dtype != jnp.bool_:
            raise ValueError(f"evict keep {keep.dtype}{keep.shape}: want bool[{batch}, W].")
        if not all(g.layout.leaves_holes for g in self._groups()):
            return self._relaid(leaving_holes)[0].evict(keep)
        groups = self._groups()

        def kept(indices: tuple[Index, ...], keep: jax.Array) -> tuple[Index, ...]:
            return tuple(g.layout.evict(i, keep) for g, i in zip(groups, indices, strict=True))

        _, indices, layers, _ = self._parts()
        new = _by_rows(kept)(indices[: len(groups)], keep)
        return self._rebuilt((*new, *indices[len(groups) :]), layers)

    def convert(
        self,
        *,
        layout: Layout | None = None,
        codec: Codec | None = None,
        lanes: int | None = None,
        capacity: int | None = None,
    ) -> Self:
        """Stores the same tokens in another layout or codec, or with other lane padding.

        Args:
          layout: For the layers that steps extend; a context stays where it is.
          codec: For all layers.
          lanes: For all layers.
          capacity: With a layout, slots of each row, in tokens; default as before.

        Returns:
          The cache. A row of which the layout would keep a token that is not there any more (a
          ring has forgotten it), or that does not fit, comes out empty and flagged `refused`;
          for `Evicting`, what a ring has forgotten is evicted already.

        Raises:
          ValueError: Outside `jit`, if there is such a row; or if a capacity is needed.
        """
        check_kinds(layout, codec)
        self.check_alive()
        layouts, indices, layers, groups = self._parts()
        if layout is not None and isinstance(codec, Grouped):
            # The old layout need not fit a codec of whole groups, nor the new one the old codec.
            fits = all(refusal(layout, r.codec) is None for r in self._own())
            moved = self if fits else self.convert(codec=Raw(jnp.float32))
            moved = moved.convert(layout=layout, capacity=capacity)
            return moved.convert(codec=codec, lanes=lanes)
        layers = [
            recoded(r, codec, lanes, layouts[g], indices[g])
            for r, g in zip(layers, groups, strict=True)
        ]
        indices = tuple(
            marked(index, *(r.codec for r, g in zip(layers, groups, strict=True) if g == number))
            for number, index in enumerate(indices)
        )
        cache = self._rebuilt(indices, tuple(layers))
        if layout is None:
            return cache
        moved, lost = cache._relaid(lambda _: Move(layout, capacity))
        raise_if(
            lost,
            lambda: (
                f"{layout} cannot keep the tokens of rows of {self}: "
                "some are forgotten already, or they do not fit its capacity or pages"
            ),
        )
        return moved

    def _relaid(self, want: Callable[[Group], Move | None]) -> tuple[Self, jax.Array]:
        """Moves the groups that steps extend to other layouts; tells the rows that are lost.

        These are empty and flagged.
        """
        layouts, indices, layers, groups = self._parts()
        number = self._extended()
        mine = [
            {i: r for i, r in enumerate(layers) if groups[i] == group} for group in range(number)
        ]
        done = relaid(self._groups(), mine, want)
        further = len(done.layouts) - number
        moved = self._rebuilt(
            (*_emptied(done.layouts, done.indices, done.lost), *indices[number:]),
            tuple(done.layers.get(i, r) for i, r in enumerate(layers)),
            (*done.layouts, *layouts[number:]),
            tuple(done.groups[i] if g < number else g + further for i, g in enumerate(groups)),
        )
        return moved, done.lost

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token leaves in all layers, as specified, without padding or context."""
        return sum(bytes_per_token(r.spec, r.codec) for r in self._own())

    @property
    def nbytes(self) -> int:
        """Bytes of every leaf: what the live arrays add up to."""
        return tree_bytes(self)

    def physical_nbytes(self, chip: str = "cpu") -> int:
        """Bytes in a device's memory; TPUs pad minor axes to tiles of 128 lanes."""
        tiled = chip.startswith(("v4", "v5", "v6", "tpu"))
        return sum(physical_bytes(x, tiled) for x in jax.tree.leaves(self))

    def abstract(self) -> Self:
        """Gives the cache's shapes and dtypes, for `jit(...).lower` and Orbax."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self)

    def sharding(self, mesh: Mesh, rules: Rules | None = None) -> Self:
        """Gives each leaf's `NamedSharding`: rows over `batch`, heads over `kv_heads`."""
        layouts, indices, layers, _ = self._parts()

        def tree(axes: tuple[str | None, ...], part: Any) -> Any:
            def place(x: Any) -> Any:
                return named(mesh, (*axes, *(None,) * x.ndim)[: x.ndim], x.shape, rules)

            return jax.tree.map(place, part)

        def is_axes(node: Any) -> bool:
            return type(node) is tuple

        spread = tuple(
            jax.tree.map(tree, index_axes(layout, "kv_heads"), index, is_leaf=is_axes)
            for layout, index in zip(layouts, indices, strict=True)
        )

        placed = tuple(
            dataclasses.replace(
                r,
                planes={n: named(mesh, r.axes()[n], x.shape, rules) for n, x in r.planes.items()},
                rest={n: named(mesh, r.rest_axes()[n], x.shape, rules) for n, x in r.rest.items()},
            )
            for r in layers
        )
        return self._rebuilt(spread, placed)


def _any(flags: tuple[jax.Array, ...]) -> jax.Array:
    out = flags[0]
    for flag in flags[1:]:
        out = out | flag
    return out


def _unchanging(step: Callable[[jax.Array], jax.Array], flags: jax.Array) -> jax.Array:
    """Repeats a step that only adds flags until it adds none."""

    def more(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.any(carry[0] != carry[1])

    return lax.while_loop(more, lambda carry: (carry[1], step(carry[1])), (flags, step(flags)))[1]


def _emptied(
    layouts: Sequence[Layout], indices: Sequence[Index], rows: jax.Array
) -> tuple[Index, ...]:
    """Empties and flags lost rows, bool `[B]`: in all groups, since layers agree on every row."""

    def each(indices: tuple[Index, ...], rows: jax.Array) -> tuple[Index, ...]:
        emptied = (layout.reset(i, rows) for layout, i in zip(layouts, indices, strict=False))
        return tuple(dataclasses.replace(i, refused=i.refused | rows) for i in emptied)

    return _by_rows(each)(tuple(indices), rows)


def _by_rows(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Runs `fn(indices, what is asked of each row)` on each device's own rows."""
    return local(fn, (("batch",), ("batch",)), ("batch",))
