# SPDX-License-Identifier: Apache-2.0
"""The one rule that says which key a query sees."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Tokens of a side of a window from which on it is no limit: no row has so many.
FARTHEST = 2**30


@dataclasses.dataclass(frozen=True)
class Visibility:
    """States which keys a query sees, by their order in the row.

    A key is seen iff it is filled (order >= 0), not after the query when `causal`, and inside
    the window or among the `pinned` first tokens. Segments and masks are added by `visible`.

    Args:
      causal: Hide keys after the query.
      window: `W`: a query sees the last W keys, itself included (needs `causal`);
        `(left, right)`: keys from `left` before to `right` after the query; `None`: no window.
      pinned: The first `pinned` tokens of a row are never outside the window (attention sinks
        of StreamingLLM, arXiv:2309.17453, section 3.2).

    Raises:
      ValueError: If a size is out of range, or an integer window is not causal.

    >>> rule = Visibility(causal=True, window=2)
    >>> rule.allows(jnp.array([[0], [1], [2]]), jnp.array([[0, 1, 2]])).astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """

    causal: bool = True
    window: int | tuple[int, int] | None = None
    pinned: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.causal, bool):
            raise ValueError(f"causal={self.causal!r}: want True or False.")
        if isinstance(self.window, tuple):
            bad = len(self.window) != 2 or not all(map(_is_count, self.window))
        else:
            bad = self.window is not None and not (_is_count(self.window) and self.window >= 1)
        if bad:
            raise ValueError(f"window={self.window}: want W >= 1 keys, or (left, right) >= 0.")
        if self.window is not None and not isinstance(self.window, tuple) and not self.causal:
            raise ValueError(
                f"window={self.window} with causal=False does not say how far a query looks "
                f"ahead: want (left, right), for example ({self.window - 1}, 0)."
            )
        if not _is_count(self.pinned) or (self.pinned and self.window is None):
            raise ValueError(f"pinned={self.pinned}: want >= 0, and a window to be pinned beside.")

    @property
    def left(self) -> int | None:
        """How many keys before itself a query sees; `None` if unbounded."""
        if self.window is None:
            return None
        return _side(self.window[0] if isinstance(self.window, tuple) else self.window - 1)

    @property
    def right(self) -> int | None:
        """How many keys after itself a query sees; `None` if unbounded."""
        if self.causal:
            return 0
        return _side(self.window[1]) if isinstance(self.window, tuple) else None

    @property
    def needs_alignment(self) -> bool:
        """Says whether it matters where the queries stand relative to the keys."""
        return self.causal or self.window is not None

    def allows(self, q_order: jax.Array, k_order: jax.Array) -> jax.Array:
        """Applies the rule to orders that broadcast against each other.

        Args:
          q_order: int32, order of each query in its row, in tokens.
          k_order: int32, same rank; -1 marks an unfilled slot.

        Returns:
          bool, True where the key is seen.
        """
        filled = jnp.broadcast_to(k_order >= 0, jnp.broadcast_shapes(q_order.shape, k_order.shape))
        return filled & self.meets(q_order, q_order, k_order, k_order)

    def meets(self, q_low: Any, q_high: Any, k_low: Any, k_high: Any) -> Any:
        """Says whether a query of orders `q_low .. q_high` may see a key of `k_low .. k_high`.

        Attention in tiles skips a pair of tiles where it may not. Works on arrays of JAX and of
        NumPy, and inside kernels; True alone where everything is seen.

        >>> rule = Visibility(causal=True, window=4)
        >>> at = jnp.array([0, 4, 8])  # tiles of 4 tokens
        >>> rule.meets(at[:, None], at[:, None] + 3, at[None], at[None] + 3).astype(int).tolist()
        [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
        """
        meets: Any = True
        if self.left is not None:
            meets = k_high >= q_low - self.left
        if self.right is not None and not self.causal:
            meets = meets & (k_low <= q_high + self.right)
        if self.pinned:
            meets = meets | (k_low < self.pinned)
        return meets & (k_low <= q_high) if self.causal else meets

    def reach(self, q_low: jax.Array, q_high: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Bounds the orders that queries `q_low .. q_high` may see: `[first, end)`.

        A read uses it to skip blocks that the rule hides whole; pinned tokens keep `first` at 0.
        """
        first = jnp.zeros_like(q_low)
        if self.left is not None and not self.pinned:
            first = jnp.maximum(q_low - self.left, 0)
        end = jnp.full_like(q_high, np.iinfo(np.int32).max)
        if self.right is not None:
            end = q_high + self.right + 1
        if not self.causal:
            end = jnp.maximum(end, self.pinned)
        return first, end


def _side(count: int) -> int | None:
    """Takes a side of a window that no row reaches for none: orders and it add up in int32."""
    return None if count >= FARTHEST else int(count)


def _is_count(x: object) -> bool:
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool) and bool(x >= 0)


def visible(
    rule: Visibility,
    q_order: jax.Array,
    k_order: jax.Array,
    q_segments: jax.Array | None = None,
    k_segments: jax.Array | None = None,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Combines rule, segments and the caller's mask into one boolean array.

    Args:
      rule: The static rule.
      q_order: int32 `[B|1, T]`, in tokens from the start of the row.
      k_order: int32 `[B|1, S]`; -1 marks an unfilled slot.
      q_segments: int32 `[B, T]`; 0 is padding and sees nothing.
      k_segments: int32 `[B, S]`; 0 is padding and is never seen.
      mask: bool, `[B|1, N|1, T|1, S]`, True = keep.

    Returns:
      bool `[B|1, N|1, T, S]`.
    """
    seen = rule.allows(q_order[:, :, None], k_order[:, None, :])
    if q_segments is not None and k_segments is not None:
        same = q_segments[:, :, None] == k_segments[:, None, :]
        seen = seen & same & (q_segments != 0)[:, :, None]
    seen = seen[:, None]
    return seen if mask is None else seen & mask
