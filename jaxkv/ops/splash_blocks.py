# SPDX-License-Identifier: Apache-2.0
"""What splash attention is told of a call: its blocks, and which pairs of blocks it visits."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jax.typing import DTypeLike

from jaxkv.core.visibility import Visibility

LANES = 128
# Queries and keys of a block, in tokens. By the compiler's estimates (128 wide, bfloat16, nothing
# masked) forward and backward take 3 % less than with half as many queries on v5p and 9 % less on
# tpu7x, and twice as many keys would take 3 % less again; those for v5e and v6e cannot be had.
BLOCK = 1024
# Bytes of a head's key or value, in 16-bit numbers, up to which such blocks fit v5e, v6e, v5p and
# tpu7x. Half the block holds four times as much, and float32 twice as much as its bytes, since
# products in full precision take more room.
WIDEST = 512
# The smallest block that is chosen for any other sake than padding's: smaller ones cost too much.
SMALL = 256


def block_sizes(rule: Visibility, T: int, S: int, width: int, dtype: DTypeLike) -> tuple[int, int]:
    """Chooses the blocks of T queries and S keys with keys and values of at most `width`."""
    size = np.dtype(dtype).itemsize
    most, room = BLOCK, WIDEST
    while most > SMALL and width * size * (size // 2) > room:
        most, room = most // 2, room * 4
    q, kv = _fitted(T, most), _fitted(S, most)
    if rule.left is not None and rule.right is not None:
        while kv > SMALL and 2 * kv > rule.left + rule.right + 1:
            kv //= 2
    return q, kv


def _fitted(length: int, most: int) -> int:
    """Weighs padding against steps, each of which costs about what `LANES` tokens do."""
    blocks = [most]
    while blocks[-1] > LANES:
        blocks.append(blocks[-1] // 2)
    return min(blocks, key=lambda block: _padded(length, block) * (block + LANES) // block)


def _padded(length: int, block: int) -> int:
    return -(-length // block) * block


@dataclasses.dataclass(frozen=True)
class Pattern:
    """What a rule lets T queries see of S keys, where query 0 is of order `offset`.

    Both axes are lengthened to whole blocks.
    """

    rule: Visibility
    offset: int
    T: int
    S: int
    q_block: int
    kv_block: int

    @property
    def queries(self) -> int:
        """Counts the queries with padding."""
        return _padded(self.T, self.q_block)

    @property
    def keys(self) -> int:
        """Counts the keys with padding."""
        return _padded(self.S, self.kv_block)

    def mask_function(self) -> Callable[[Any, Any], Any] | None:
        """Gives a function of the indices of queries and keys, or `None` where all is seen."""
        right = self.rule.right
        reached = right is None or self.offset + self.T - 1 + right >= self.S
        hide = self.keys > self.S and (reached or self.rule.pinned > self.S)
        if not (self.rule.needs_alignment or hide):
            return None
        return functools.partial(self._sees, hide)

    def _sees(self, hide: bool, q: Any, k: Any) -> Any:
        q = q + self.offset if self.offset else q
        seen = self.rule.meets(q, q, k, k)
        return seen & (k < self.S) if hide else seen

    def live(self) -> np.ndarray:
        """Tells which pairs of blocks have anything to see: bool `[query blocks, key blocks]`."""
        q = np.arange(0, self.T, self.q_block)[:, None]
        k = np.arange(0, self.S, self.kv_block)[None]
        q_high = np.minimum(q + self.q_block, self.T) - 1 + self.offset
        k_high = np.minimum(k + self.kv_block, self.S) - 1
        seen = self.rule.meets(q + self.offset, q_high, k, k_high)
        return np.broadcast_to(seen, (q.size, k.size))


class Visits(NamedTuple):
    """The blocks that a kernel goes through, as it reads them, `[1, outer, inner]`.

    Attributes:
      block: Which inner block each step takes; a step that does nothing names the next one that
        does, so that it is fetched early.
      run: 1 where a step does anything, else 0.
    """

    block: np.ndarray
    run: np.ndarray


def visits(live: np.ndarray) -> Visits:
    """Lists for each row of `live [outer, inner]` the blocks that are live, one step for each.

    >>> visits(np.array([[True, False, False], [False, True, True]])).block.tolist()
    [[[0, 1], [1, 2]]]
    """
    steps = max(1, int(live.sum(axis=1).max()))
    block = np.argsort(~live, axis=1, kind="stable")[:, :steps]
    run = np.take_along_axis(live, block, axis=1)
    at = np.flatnonzero(run)
    if at.size:
        following = at[np.searchsorted(at, np.arange(run.size)) % at.size]
        block = block.ravel()[following].reshape(run.shape)
    small = np.min_scalar_type(-live.shape[1])  # scalar memory is scarce
    return Visits(block[None].astype(small), run[None].astype(np.int8))
