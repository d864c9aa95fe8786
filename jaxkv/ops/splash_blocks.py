# SPDX-License-Identifier: Apache-2.0
"""What splash attention is told of a call: its blocks, and which pairs of blocks it visits."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxkv.core.platform import target_kind
from jaxkv.core.visibility import Visibility

LANES = 128
# A block may lengthen an axis by this part of it.
MOST_PADDING = 1 / 8


class Sizes(NamedTuple):
    """Blocks `(queries, keys)`, in tokens, of the forward and of the backward kernels."""

    forward: tuple[int, int]
    backward: tuple[int, int]


# By device kind
_BY_KIND: dict[str, Sizes] = {}
_OTHERS = Sizes((512, 1024), (512, 512))


def block_sizes(q_block: int | None, kv_block: int | None, T: int, S: int) -> Sizes:
    """Chooses the blocks for T queries and S keys, but for sizes that are given."""
    best = _BY_KIND.get(target_kind() or "", _OTHERS)
    q = q_block or _fitted(T, best.forward[0])
    kv = kv_block or _fitted(S, best.forward[1])
    return Sizes((q, kv), (_cut(q, best.backward[0]), _cut(kv, best.backward[1])))


def padded(length: int, block: int) -> int:
    """Lengthens an axis to whole blocks."""
    return -(-length // block) * block


def _fitted(length: int, block: int) -> int:
    """Halves a block until it lengthens the axis little enough."""
    while block > LANES and padded(length, block) > length * (1 + MOST_PADDING):
        block //= 2
    return block


def _cut(block: int, most: int) -> int:
    """Halves a block until it is small enough, as far as it is made of whole lanes."""
    while block > most and block % (2 * LANES) == 0:
        block //= 2
    return block


@dataclasses.dataclass(frozen=True)
class Pattern:
    """What a rule lets T queries see of S keys, where query 0 is of order `offset`.

    Both axes are lengthened to whole forward blocks, which backward ones divide.
    """

    rule: Visibility
    offset: int
    T: int
    S: int
    sizes: Sizes

    @property
    def queries(self) -> int:
        """Counts the queries with padding."""
        return padded(self.T, self.sizes.forward[0])

    @property
    def keys(self) -> int:
        """Counts the keys with padding."""
        return padded(self.S, self.sizes.forward[1])

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
        seen = _meets(self.rule, q, q, k, k)
        return seen & (k < self.S) if hide else seen

    def live(self, q_block: int, kv_block: int) -> np.ndarray:
        """Tells which pairs of blocks have anything to see: bool `[query blocks, key blocks]`."""
        q = np.arange(0, self.queries, q_block)[:, None]
        k = np.arange(0, self.keys, kv_block)[None]
        q_high = np.minimum(q + q_block, self.T) - 1 + self.offset
        k_high = np.minimum(k + kv_block, self.S) - 1
        seen = _meets(self.rule, q + self.offset, q_high, k, k_high)
        return seen & (q < self.T) & (k < self.S)


def _meets(rule: Visibility, q_low: Any, q_high: Any, k_low: Any, k_high: Any) -> Any:
    """Does what `Visibility.meets` does, on NumPy's arrays and inside a kernel alike."""
    seen: Any = True
    if rule.causal:
        seen = k_low <= q_high
    if rule.left is not None:
        near = k_high >= q_low - rule.left
        if rule.right is not None and not rule.causal:
            near = near & (k_low <= q_high + rule.right)
        seen = seen & (near | (k_low < rule.pinned) if rule.pinned else near)
    return seen


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
