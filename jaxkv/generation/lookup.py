# SPDX-License-Identifier: Apache-2.0
"""Drafting from the row's own text: what followed the last time these tokens came up."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.core.trees import check_sizes, static
from jaxkv.generation.decoding import Carry, Given, How
from jaxkv.generation.speculation import Drafts, Speculation


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class History:
    """A row's prompt and new tokens: int32 `[B, W]`, and how many there are, int32 `[B]`."""

    tokens: jax.Array
    lengths: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptLookup(Speculation):
    """Speculates that text repeats itself: drafts what followed the row's last tokens before.

    Greedy text is the same as without, and draws have the same distribution. It pays where
    answers repeat what is in the prompt: summaries, edits, code.

    Args:
      ngram: The most last tokens to look for; fewer are tried where these are new. The latest
        earlier place counts, and a copy that reaches the end of the text goes on with itself.
      draft: Tokens drafted a step, as far as they fit.

    Raises:
      ValueError: If a number is below 1.

    Source: Saxena 2023, "Prompt Lookup Decoding" (github.com/apoorvumang/prompt-lookup-decoding).
    """

    ngram: int = static(default=3)
    draft: int = static(default=8)

    def __post_init__(self) -> None:
        check_sizes(ngram=self.ngram, draft=self.draft)

    def remember(self, how: How, given: Given, prepared: Any, first: Carry) -> History:
        """Keeps the prompts, and the first tokens behind them."""
        del prepared
        tokens = jnp.pad(given.tokens, ((0, 0), (0, how.limit)))
        return _appended(History(tokens, given.lengths), first.pending[:, None], first.counts)

    def propose(self, how: How, carry: Carry, room: jax.Array) -> Drafts:
        """Copies what followed the latest of the longest matches."""
        del how
        history: History = carry.own.memory
        found, copied = looked_up(history.tokens, history.lengths, self.ngram, self.draft)
        return Drafts(copied, jnp.where(found, room, 0), None, history)

    def learn(self, before: Carry, drafts: Drafts, new: jax.Array, count: jax.Array) -> History:
        """Appends the new tokens."""
        del before
        return _appended(drafts.memory, new, count)


def looked_up(
    tokens: jax.Array, lengths: jax.Array, ngram: int, draft: int
) -> tuple[jax.Array, jax.Array]:
    """Finds the latest earlier place of the longest possible run of each row's last tokens.

    Args:
      tokens: int32 `[B, W]`.
      lengths: int32 `[B]`.
      ngram: The most last tokens to look for.
      draft: Tokens to copy from behind that place.

    Returns:
      Whether even one token was found, bool `[B]`, and the copy, int32 `[B, draft]`.

    >>> text = jnp.array([[5, 6, 7, 1, 6, 7, 2, 5, 6, 7, 0, 0]])
    >>> [x.tolist() for x in looked_up(text, jnp.array([10]), 3, 4)]  # 5 6 7, not the later 6 7
    [[True], [[1, 6, 7, 2]]]
    """
    width = tokens.shape[1]
    place = jnp.arange(width, dtype=jnp.int32)[None]  # where a copy would begin
    last = lengths[:, None] - 1
    same, matched = place <= last, jnp.zeros_like(tokens)
    for back in range(ngram):
        wanted = jnp.take_along_axis(tokens, jnp.maximum(last - back, 0), axis=1)
        before = jnp.pad(tokens, ((0, 0), (back + 1, 0)))[:, :width]
        same &= (before == wanted) & (place > back)
        matched += same.astype(jnp.int32)
    best = jnp.argmax(jnp.where(matched > 0, matched * width + place, 0), axis=1).astype(jnp.int32)[
        :, None
    ]
    found = jnp.take_along_axis(matched, best, axis=1)[:, 0] > 0
    # Behind the end of the text stands the copy itself, which begins at `best` again.
    period = jnp.maximum(lengths[:, None] - best, 1)
    source = best + jnp.arange(draft, dtype=jnp.int32)[None] % period
    return found, jnp.take_along_axis(tokens, source, axis=1)


def _appended(history: History, new: jax.Array, count: jax.Array) -> History:
    """Appends `count int32[B]` of new tokens `[B, n]` to each row."""
    place = jnp.arange(history.tokens.shape[1], dtype=jnp.int32)[None] - history.lengths[:, None]
    values = jnp.take_along_axis(new, jnp.clip(place, 0, new.shape[1] - 1), axis=1)
    fresh = (place >= 0) & (place < count[:, None])
    tokens = jnp.where(fresh, values, history.tokens)
    return History(tokens, history.lengths + count)
