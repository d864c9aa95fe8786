# SPDX-License-Identifier: Apache-2.0
"""Codecs that encode whole groups of tokens, and keep the newest tokens as they are."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxkv.cache.codecs import Codec, Raw
from jaxkv.cache.index import Blocks, Ends, Index, Reach, early_block
from jaxkv.core.indexing import item, quotient, remainder

# Groups that a residual has slots for: the newest, which is open, the whole one that is kept
# behind it, and the one before, which a rollback into the whole one brings back.
REST_GROUPS = 3


class Grouped(Codec):
    """A codec of `group` tokens at a time, which has a residual of the newest tokens.

    A group is flushed (encoded and stored) once it is a whole group behind: tokens `g Q .. g Q +
    Q - 1` when the row has `(g + 2) Q` of them, Q being `group`. So a row of L tokens has
    `flushed(L)` encoded ones, whatever happened before, and between Q and 2 Q - 1 exact ones (all
    L below 2 Q). These lie in a ring of 3 Q slots of the row's own, token n in slot n mod 3 Q.

    `encode`, `decode`, `scores` and `mix` are about encoded tokens, whole groups of them.
    """

    group: int
    dtype: DTypeLike | None

    @property
    def newest(self) -> Raw:
        """How the residual is stored."""
        return Raw(self.dtype)

    @property
    def rest_slots(self) -> int:
        """Slots of a row's residual."""
        return REST_GROUPS * self.group

    def flushed(self, lengths: jax.Array) -> jax.Array:
        """Counts the encoded tokens of rows of `lengths` tokens."""
        return jnp.maximum(quotient(lengths, self.group) - 1, 0) * self.group


def tokens_together(codec: Codec) -> int:
    """Tells how many tokens a codec encodes together."""
    return codec.group if isinstance(codec, Grouped) else 1


@dataclasses.dataclass(frozen=True)
class Newest(Blocks):
    """Finds the exact tokens of a row in its residual, as a layout finds those of its slots."""

    codec: Grouped

    def span(
        self, index: Index, row: jax.Array, slots: int, size: int, reach: Reach
    ) -> tuple[jax.Array, jax.Array]:
        """Bounds the blocks: all of them, unless the row is empty."""
        del reach
        none = jnp.zeros_like(row)
        return none, jnp.where(item(index.lengths, row) > 0, -(-slots // size), none)

    def locate(
        self, index: Index, row: jax.Array, ends: Ends, size: int, block: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Finds a block; the last one starts early rather than run past the end."""
        slot, place, fresh = early_block(block, size, ends)
        order = self.orders(item(index.lengths, row), place)
        return row, slot, jnp.where(fresh, order, -1)

    def orders(self, length: jax.Array, slot: jax.Array) -> jax.Array:
        """Tells which exact token of a row of `length` stands in a slot, -1 = none."""
        first = self.codec.flushed(length)
        slots = self.codec.rest_slots
        order = first + remainder(slot + (slots - remainder(first, slots)), slots)
        return jnp.where(order < length, order, -1)
