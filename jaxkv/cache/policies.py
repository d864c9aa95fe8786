# SPDX-License-Identifier: Apache-2.0
"""Policies of an evicting cache: which tokens are worth keeping, judged by attention."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv.core.trees import check_sizes
from jaxkv.core.visibility import Visibility


class Policy(Protocol):
    """Ranks tokens by the attention they got; a frozen, hashable dataclass. One class each.

    Attributes:
      per_head: Each KV head keeps tokens of its own; else all heads of a layer keep the same.
      accumulates: The weight that a token got is added up over all calls, and stored.
      by_itself: A token's rank does not depend on other tokens, so that stored and new ones may be
        ranked apart, which saves a copy of both together.
    """

    per_head: ClassVar[bool]
    accumulates: ClassVar[bool]
    by_itself: ClassVar[bool] = False

    def evicts(self, length: int) -> bool:
        """Says whether a call of T = `length` tokens may evict any."""
        ...

    def compresses(self, count: jax.Array) -> jax.Array:
        """Says which rows, of `count int32[B]` new tokens, go down to their budget in such a call.

        Others keep what fits their slots.
        """
        return jnp.ones(count.shape, jnp.bool_)

    def narrowed(self, rule: Visibility) -> Visibility:
        """Narrows a module's rule to tokens that are kept whatever they got; raises if it can't."""
        return rule

    def observed(self, length: int) -> int:
        """How many of a call's last queries, of `length`, decide."""
        ...

    def rank(self, weights: jax.Array, order: jax.Array, end: jax.Array, budget: int) -> jax.Array:
        """Ranks tokens: those with the lowest rank are evicted.

        Args:
          weights: float32 `[B, K, C]`, the attention that each token got of the observed queries
            (of all calls, if it accumulates), summed over the query heads.
          order: int32 `[B, K, C]`, its order in the row; -1 = there is none.
          end: int32 `[B]`, tokens that the row was given so far.
          budget: How many tokens will stay.

        Returns:
          float32 `[B, K, C]`; what stands where there is no token is not looked at.
        """
        ...


@dataclasses.dataclass(frozen=True)
class H2O(Policy):
    """Keeps the last tokens and the heavy hitters: those that got most attention so far.

    Args:
      recent: Last tokens that always stay, as far as the budget goes; default half of it.

    Raises:
      ValueError: If `recent` is below 1.

    Source: Zhang et al. 2023, "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of
    Large Language Models" (arXiv:2306.14048), section 4. The heads of a group add up.
    """

    recent: int | None = None
    per_head: ClassVar[bool] = True
    accumulates: ClassVar[bool] = True
    by_itself: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_sizes(recent=self.recent)

    def evicts(self, length: int) -> bool:
        """Every call keeps to the budget."""
        del length
        return True

    def observed(self, length: int) -> int:
        """Every query counts."""
        return length

    def rank(self, weights: jax.Array, order: jax.Array, end: jax.Array, budget: int) -> jax.Array:
        """Ranks the last tokens first, and the others by what they got."""
        recent = min(self.recent if self.recent is not None else -(-budget // 2), budget)
        return jnp.where(_among_last(order, end, recent), jnp.inf, weights)


@dataclasses.dataclass(frozen=True)
class TOVA(Policy):
    """Keeps the tokens that the newest query attends to most, the same for all heads.

    Source: Oren et al. 2024, "Transformers are Multi-State RNNs" (arXiv:2401.06104), section 3.2.
    """

    per_head: ClassVar[bool] = False
    accumulates: ClassVar[bool] = False
    by_itself: ClassVar[bool] = True

    def evicts(self, length: int) -> bool:
        """Every call keeps to the budget."""
        del length
        return True

    def observed(self, length: int) -> int:
        """The last query decides alone."""
        del length
        return 1

    def rank(self, weights: jax.Array, order: jax.Array, end: jax.Array, budget: int) -> jax.Array:
        """Ranks tokens by the weight that the last query gave them."""
        del order, end, budget
        return weights


@dataclasses.dataclass(frozen=True)
class SnapKV(Policy):
    """Compresses a prompt once, by what its last queries attend to; decoding evicts nothing.

    At least `window` tokens of a row in one call count as a prompt. What follows takes the `room`
    of `Evicting`, and overflows when that is full.

    Args:
      window: Last queries of the prompt, which observe, and stay as far as the budget goes.
      kernel: Neighbours, itself included, of which a token takes the largest weight (max
        pooling), so that what is kept are pieces of text and not single tokens.

    Raises:
      ValueError: If a size is below 1, or `kernel` is even.

    Source: Li et al. 2024, "SnapKV: LLM Knows What You are Looking for Before Generation"
    (arXiv:2404.14469), section 4.
    """

    window: int = 32
    kernel: int = 7
    per_head: ClassVar[bool] = True
    accumulates: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_sizes(window=self.window, kernel=self.kernel)
        if self.kernel % 2 == 0:
            raise ValueError(f"{self}: want an odd kernel, with a token in its middle.")

    def evicts(self, length: int) -> bool:
        """Only a prompt is compressed."""
        return length >= self.window

    def compresses(self, count: jax.Array) -> jax.Array:
        """A row whose part of the call is no prompt keeps what it has."""
        return count >= self.window

    def observed(self, length: int) -> int:
        """The observation window at the end of the prompt."""
        return min(self.window, length)

    def rank(self, weights: jax.Array, order: jax.Array, end: jax.Array, budget: int) -> jax.Array:
        """Ranks the observation window first, and the others by their neighbourhood's best."""
        there = order >= 0
        by_order = jnp.argsort(jnp.where(there, order, jnp.iinfo(jnp.int32).max), axis=-1)
        weights = jnp.where(there, weights, -jnp.inf)
        row = jnp.take_along_axis(weights, by_order, axis=-1)
        side = self.kernel // 2
        window = (1, 1, self.kernel)
        padding = ((0, 0), (0, 0), (side, side))
        pooled = lax.reduce_window(row, -jnp.inf, lax.max, window, (1, 1, 1), padding)
        back = jnp.take_along_axis(pooled, jnp.argsort(by_order, axis=-1), axis=-1)
        return jnp.where(_among_last(order, end, min(self.window, budget)), jnp.inf, back)


@dataclasses.dataclass(frozen=True)
class Recent(Policy):
    """Keeps the last tokens, and if wanted the first ones, whatever attention they got.

    As with `Ring`, which stores less beside the tokens, calls see what a module with this window
    and these pinned tokens sees; but tokens can be given up (`evict`), and others then stay longer.

    Args:
      window: Last tokens that a query sees, itself among them.
      pinned: First tokens of a row that stay for ever.

    Raises:
      ValueError: If a number is out of range.

    Source: Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks"
    (arXiv:2309.17453), section 3.2.
    """

    window: int
    pinned: int = 0
    per_head: ClassVar[bool] = False
    accumulates: ClassVar[bool] = False
    by_itself: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_sizes(window=self.window)
        if self.pinned < 0:
            raise ValueError(f"{self}: want pinned of at least 0 tokens.")

    def evicts(self, length: int) -> bool:
        """Every call keeps to the budget."""
        del length
        return True

    def narrowed(self, rule: Visibility) -> Visibility:
        """Narrows a rule to the window and the pinned tokens.

        Raises:
          ValueError: If the rule looks at first tokens that are not kept.
        """
        return last_tokens(rule, self.window, self.pinned, str(self))

    def observed(self, length: int) -> int:
        """No query decides."""
        del length
        return 0

    def rank(self, weights: jax.Array, order: jax.Array, end: jax.Array, budget: int) -> jax.Array:
        """Ranks tokens by their order, counted from the end: float32 tells these apart."""
        del weights, budget
        age = (order - end[:, None, None]).astype(jnp.float32)
        return jnp.where(order < self.pinned, jnp.inf, age)


def last_tokens(rule: Visibility, window: int, pinned: int, keeper: str) -> Visibility:
    """Narrows a rule to the last `window` and the first `pinned` tokens, which `keeper` keeps.

    Raises:
      ValueError: If the rule looks ahead without end, or at first tokens that are not kept.
    """
    if rule.right is None:
        raise ValueError(f"{keeper} keeps the last tokens only, and {rule} asks for all of them.")
    if rule.pinned > pinned:
        raise ValueError(f"{keeper} pins fewer tokens than {rule} looks at.")
    if rule.left is not None and rule.left < window:
        return rule
    return Visibility(rule.causal, window if rule.causal else (window - 1, rule.right), pinned)


# By the names that commands use; a new one is one line here.
POLICIES: dict[str, type[H2O] | type[TOVA] | type[SnapKV]] = {
    "h2o": H2O,
    "tova": TOVA,
    "snapkv": SnapKV,
}


def pyramid_budgets(budget: int, num_layers: int, steepness: float = 20.0) -> list[int]:
    """Shares out a mean budget so that lower layers keep more than higher ones.

    Args:
      budget: Tokens that a layer keeps on average.
      num_layers: L.
      steepness: The last layer's budget is the mean over this (beta in the source).

    Returns:
      A budget for each layer, falling evenly; their sum is `budget * num_layers`.

    Raises:
      ValueError: If a size is below 1 or `steepness` below 1.

    Source: Cai et al. 2024, "PyramidKV" (arXiv:2406.02069), section 3.3 (an arithmetic series).

    >>> pyramid_budgets(128, 4)
    [250, 168, 88, 6]
    """
    check_sizes(budget=budget, num_layers=num_layers)
    if not steepness >= 1:
        raise ValueError(f"steepness={steepness}: want at least 1.")
    last = budget / steepness
    first = 2 * budget - last
    total, out, done = 0.0, [], 0
    for layer in range(num_layers):
        share = layer / (num_layers - 1) if num_layers > 1 else 0.5
        total += first + (last - first) * share
        # Rounding the running sum keeps the whole exact.
        out.append(max(1, round(total) - done))
        done += out[-1]
    return out


def _among_last(order: jax.Array, end: jax.Array, count: int) -> jax.Array:
    return order >= (end - count)[:, None, None]
