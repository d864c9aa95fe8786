# SPDX-License-Identifier: Apache-2.0
"""Planning one step of a cache: which tokens fit, in every group of layers alike."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache.codecs import Codec
from jaxkv.cache.grouped import Grouped
from jaxkv.cache.index import Index, Layout, Plan, raise_if
from jaxkv.core.positions import compaction
from jaxkv.core.sharding import local
from jaxkv.core.trees import is_known
from jaxkv.ops.api import check_lengths


class Group(NamedTuple):
    """Layers that share an index: their layout, the index, S of their entries, and their codecs."""

    layout: Layout
    index: Index
    slots: int
    codecs: tuple[Codec, ...] = ()

    def beyond(self, count: jax.Array) -> jax.Array:
        """Tells which rows cannot give `count int32[B]` tokens back exactly: bool `[B]`.

        Of a codec that encodes whole groups, exact tokens are there as far as its residual goes.
        """
        index = self.index
        out = jnp.zeros_like(index.refused)
        for codec in self.codecs:
            if isinstance(codec, Grouped) and index.high is not None:
                out |= index.lengths - count < codec.flushed(index.high)
        return out & (count > 0)

    @property
    def rollback_limit(self) -> int:
        """Tokens that can always be taken back: as far as the layout and every residual go."""
        residuals = [codec.group for codec in self.codecs if isinstance(codec, Grouped)]
        return min([self.layout.rollback_limit(self.slots), *residuals])


def marked(index: Index, *codecs: Codec) -> Index:
    """Gives an index the high-water mark that codecs of whole groups need, or takes it away."""
    if not any(isinstance(codec, Grouped) for codec in codecs):
        return dataclasses.replace(index, high=None)
    if index.high is not None:
        return index
    # A buffer of its own: an index is donated.
    return dataclasses.replace(index, high=jnp.array(index.lengths))


def plan_step(
    groups: Sequence[Group],
    length: int,
    lengths: jax.Array | None,
    segment_ids: jax.Array | None,
) -> tuple[Plan, ...]:
    """Plans the appending of one call's tokens to every group of a cache.

    A token that does not fit one group is dropped by all, so that layers never disagree on what
    a row holds.

    Args:
      groups: Of the cache.
      length: T, tokens of this call with padding.
      lengths: int32 `[B]`, how many of them are real, or `None` for all.
      segment_ids: int32 `[B, T]`, 0 is padding, or `None`; a cached row is one sequence.

    Returns:
      The plan of each group.

    Raises:
      ValueError: If lengths do not fit, or outside `jit` if tokens do not fit the cache.
    """
    indices = tuple(group.index for group in groups)
    count, order = _real_tokens(indices[0].lengths.shape[0], length, lengths, segment_ids)

    def plan(
        indices: tuple[Index, ...], count: jax.Array, order: jax.Array | None
    ) -> tuple[tuple[Plan, ...], jax.Array]:
        def planned(count: jax.Array) -> list[Plan]:
            return [
                g.layout.plan(i, g.slots, length, count)
                for g, i in zip(groups, indices, strict=True)
            ]

        asked = planned(count)
        room = [p.after.lengths - i.lengths for p, i in zip(asked, indices, strict=True)]
        fit = functools.reduce(jnp.minimum, room)
        if len(groups) > 1:
            asked = planned(fit)
        plans = []
        for index, made in zip(indices, asked, strict=True):
            high = index.high
            after = dataclasses.replace(
                made.after,
                overflowed=index.overflowed | (fit < count),
                refused=index.refused,
                high=None if high is None else jnp.maximum(high, made.after.lengths),
            )
            plans.append(dataclasses.replace(made, count=count, order=order, after=after))
        return tuple(plans), fit < count

    rows = ("batch",)
    plans, dropped = local(plan, (rows, rows, rows), rows)(indices, count, order)
    raise_if(
        dropped,
        lambda: (
            f"{count} new tokens do not fit: rows hold {indices[0].lengths} of "
            f"{min(group.layout.limit(group.index, group.slots) for group in groups)}"
        ),
    )
    return plans


def _real_tokens(
    batch: int, length: int, lengths: jax.Array | None, segment_ids: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Counts each row's real tokens, and orders them to the front where padding may precede."""
    if lengths is not None and segment_ids is not None:
        raise ValueError("lengths and segment_ids both mark padding: pass one of them.")
    if lengths is not None:
        check_lengths("lengths", lengths, length, batch)
        return jnp.clip(lengths.astype(jnp.int32), 0, length), None
    if segment_ids is None:
        return jnp.full((batch,), length, jnp.int32), None
    if segment_ids.shape not in ((batch, length), (1, length)):
        raise ValueError(f"segment_ids {segment_ids.shape}: want ({batch}, {length}).")
    segment_ids = jnp.broadcast_to(segment_ids, (batch, length))
    _check_one_sequence(segment_ids)
    count = jnp.sum((segment_ids != 0).astype(jnp.int32), axis=1)
    return count, compaction(segment_ids)


def _check_one_sequence(segment_ids: jax.Array) -> None:
    if not is_known(segment_ids):
        return
    for row in np.asarray(segment_ids):
        if np.unique(row[row != 0]).size > 1:
            raise ValueError(
                f"segment_ids {row.tolist()} pack several documents, but a cached row is one "
                "sequence: want one nonzero id in each row."
            )
