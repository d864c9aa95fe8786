# SPDX-License-Identifier: Apache-2.0
"""Prefix reuse: which row already holds a prompt's first tokens, and how a new one takes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache.index import UNBOUNDED
from jaxkv.cache.model_cache import ModelCache
from jaxkv.cache.paged import Paged
from jaxkv.core.trees import check_sizes, is_known

Tokens = Sequence[int] | np.ndarray | jax.Array


class Match(NamedTuple):
    """The row that holds a prompt's first `count` tokens; row -1 and count 0 if none does."""

    row: int
    count: int


def block_key(before: int, block: bytes) -> int:
    """Hashes a block of tokens together with the key of all that stands before it."""
    return hash((before, block))


class PrefixIndex:
    """Remembers which rows of a cache hold which tokens, so that prompts can share their prefix.

    It lives on the host. A finished request's row is stored and stays as it is, until its place
    is needed: `evict` names the row that was of no use for the longest time. Hashes only find
    candidates: the tokens themselves are always compared.

    Args:
      page: Z, tokens of a page: the size of the cache's `Paged`.
      rows: B, rows of the cache.
      unit: Tokens that one hash covers, a divisor of the page; default the page.

    Raises:
      ValueError: If a number is below 1, or if the unit does not divide the page.

    >>> index = PrefixIndex(page=4, rows=2)
    >>> index.store(0, [1, 2, 3, 4, 5, 6])
    >>> index.match([1, 2, 3, 4, 5, 6, 7])
    Match(row=0, count=4)
    """

    def __init__(self, page: int, rows: int, unit: int | None = None) -> None:
        check_sizes(page=page, rows=rows, unit=unit)
        self.page, self.rows, self.unit = page, rows, page if unit is None else unit
        if page % self.unit:
            raise ValueError(f"unit={unit} for pages of {page} tokens: want a divisor of {page}.")
        self._stored: dict[int, np.ndarray] = {}  # the least recently used row comes first
        self._holders: dict[int, set[int]] = {}

    @property
    def stored(self) -> tuple[int, ...]:
        """The stored rows, the least recently used one first."""
        return tuple(self._stored)

    def match(self, tokens: Tokens) -> Match:
        """Finds the stored row with the longest prefix of a prompt, which counts as a use of it.

        Args:
          tokens: int `[T]`, the prompt.

        Returns:
          The row and how many tokens, whole pages and at most T - 1: one has to be run for logits.
        """
        given = _checked(tokens)
        best, same, begin = Match(-1, 0), set(self._stored), 0
        for end, key in self._keys(given[: (given.size - 1) // self.page * self.page]):
            same &= self._holders.get(key, set())
            block = given[begin:end]
            same = {r for r in same if np.array_equal(self._stored[r][begin:end], block)}
            if not same:
                break
            if end % self.page == 0:
                best = Match(next(r for r in reversed(self._stored) if r in same), end)
            begin = end
        if best.count:
            self._stored[best.row] = self._stored.pop(best.row)
        return best

    def store(self, row: int, tokens: Tokens) -> None:
        """Keeps a row for later prompts: it must be left as it is until it is released.

        Args:
          row: Holds no other stored tokens.
          tokens: int `[T]`, all that the row holds, from its first token on.

        Raises:
          ValueError: If there is no such row, or if it is stored already.
        """
        self.check_row(row)
        if row in self._stored:
            raise ValueError(f"row {row} is stored already: release it first.")
        self._stored[row] = _checked(tokens)
        for _, key in self._keys(self._stored[row]):
            self._holders.setdefault(key, set()).add(row)

    def release(self, row: int) -> None:
        """Forgets a stored row, whose place the cache may then `reset` or use anew.

        Raises:
          ValueError: If the row is not stored, so also if it is released twice.
        """
        if row not in self._stored:
            raise ValueError(f"row {row} is not stored: want one of {sorted(self._stored)}.")
        for _, key in self._keys(self._stored.pop(row)):
            holders = self._holders.get(key, set())
            holders.discard(row)
            if not holders:
                self._holders.pop(key, None)

    def evict(self) -> int:
        """Releases the least recently used row and names it, for the cache to `reset`.

        Raises:
          ValueError: If no row is stored.
        """
        if not self._stored:
            raise ValueError(f"none of the {self.rows} rows is stored: there is none to evict.")
        row = self.stored[0]
        self.release(row)
        return row

    def check_row(self, row: int) -> None:
        """Checks that there is such a row.

        Raises:
          ValueError: If there is none.
        """
        if row not in range(self.rows):
            raise ValueError(f"row {row!r}: want a row from 0 to {self.rows - 1}.")

    def _keys(self, tokens: np.ndarray) -> Iterator[tuple[int, int]]:
        """Yields the end and the key of each whole unit."""
        key = 0
        for end in range(self.unit, tokens.size + 1, self.unit):
            key = block_key(key, tokens[end - self.unit : end].tobytes())
            yield end, key


def adopt(
    cache: ModelCache, index: PrefixIndex, row: int, tokens: Tokens
) -> tuple[ModelCache, int]:
    """Makes a row begin anew with the longest stored prefix of a prompt, whose pages it shares.

    What is left is to run the model on `tokens[count:]`: positions go on from there by themselves.
    A row that was stored is released, and may take over its own prefix.

    Args:
      cache: All its layers on pages (it is donated: use the one that comes back).
      index: The rows that are stored. Their tokens had the positions 0, 1, 2 and so on.
      row: The row to fill; what it held is gone.
      tokens: int `[T]`, the prompt.

    Returns:
      The cache, and how many tokens the row has now: 0 if nothing fits.

    Raises:
      ValueError: If the cache does not fit the index, or has too few free pages for the prompt.
    """
    _check_cache(cache, index)
    index.check_row(row)
    donor, count = index.match(tokens)
    _check_donor(cache, donor, count)
    _check_pages(cache, row, index.page, Match(donor, count), len(tokens))
    rows, counts = np.full(index.rows, -1, np.int32), np.zeros(index.rows, np.int32)
    rows[row], counts[row] = donor, count
    fresh = (np.arange(index.rows) == row) & (donor != row)
    made = _begun(cache, jnp.asarray(fresh), jnp.asarray(rows), jnp.asarray(counts))
    if row in index.stored:
        index.release(row)
    return made, count


def _begin(cache: ModelCache, fresh: jax.Array, rows: jax.Array, count: jax.Array) -> ModelCache:
    return cache.reset(fresh).share(rows, count)


_begun = jax.jit(_begin, donate_argnums=0)


def _check_cache(cache: ModelCache, index: PrefixIndex) -> None:
    if not is_known(cache.lengths):
        raise ValueError("adopt looks at what rows hold: call it outside jit.")
    cache.check_alive()
    if cache.lengths.size != index.rows:
        raise ValueError(f"a cache of {cache.lengths.size} rows, an index of {index.rows}.")
    if cache.context_lengths is not None:
        raise ValueError("a cache with a context: equal tokens leave different records there.")
    for layout in cache.layouts:
        if not isinstance(layout, Paged) or layout.size != index.page:
            raise ValueError(f"{layout}: want Paged({index.page}), the page of the index.")
    if cache.rollback_limit < UNBOUNDED:
        raise ValueError(
            f"rows can be cut by {cache.rollback_limit} tokens for certain: a prefix needs a codec "
            "that encodes each token for itself."
        )


def _check_donor(cache: ModelCache, donor: int, count: int) -> None:
    held = int(cache.lengths[donor])
    if count and (held < count or bool(cache.overflowed[donor] | cache.refused[donor])):
        raise ValueError(
            f"row {donor} is stored with {count} tokens or more, but holds {held} or is flagged: "
            "release it."
        )


def _check_pages(cache: ModelCache, row: int, size: int, match: Match, length: int) -> None:
    """Checks that pages are left for the rest of a prompt: then sharing lacks none either."""
    for group in cache.indices:
        table, references = np.asarray(group.state.table), np.array(group.state.references)
        given_up = table[row, match.count // size if match.row == row else 0 :]
        np.subtract.at(references, given_up[given_up >= 0], 1)
        want, free = -(-(length - match.count) // size), int((references == 0).sum())
        if want > free:
            raise ValueError(
                f"a prompt of {length} tokens, {match.count} of them stored, needs {want} pages, "
                f"and {free} of {references.size} are free: reset another row, such as that of "
                "index.evict()."
            )


def _checked(tokens: Tokens) -> np.ndarray:
    """Copies tokens, so that nobody changes them later."""
    array = np.asarray(tokens)
    if array.ndim != 1 or not array.size or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"tokens {array.dtype}{array.shape}: want int [T] with T of at least 1.")
    return np.array(array, np.int64)
