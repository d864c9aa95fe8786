# SPDX-License-Identifier: Apache-2.0
"""How many slots a layer is given for a context: what window layers keep is a choice."""

from __future__ import annotations

import dataclasses

from jaxkv.models.geometry import LayerSpec


@dataclasses.dataclass(frozen=True)
class SlotPolicy:
    """States what window layers keep, and in what portions slots are given out.

    Args:
      ring: Whether a window layer keeps its window only, or the whole context.
      page: Tokens per page; 1 gives out single slots.

    Raises:
      ValueError: If `page` is below 1.

    >>> from jaxkv.cache.spec import KVSpec
    >>> windowed = LayerSpec("window", 8, KVSpec(8, 64, 64), window=128)
    >>> [SlotPolicy.parse(text).slots(windowed, 8192) for text in ("window", "full", "pages:16")]
    [128, 8192, 144]
    """

    ring: bool = True
    page: int = 1

    def __post_init__(self) -> None:
        if self.page < 1:
            raise ValueError(f"pages of {self.page} tokens: want at least 1.")

    @classmethod
    def parse(cls, text: str) -> SlotPolicy:
        """Reads `window` (a ring of W slots), `full` (every token) or `pages:Z`.

        Raises:
          ValueError: If it is none of these.
        """
        name, _, size = text.partition(":")
        if text in ("window", "full"):
            return cls(ring=text == "window")
        if name == "pages" and size.isdecimal() and int(size) > 0:
            return cls(page=int(size))
        raise ValueError(f"window policy {text!r}: want window, full or pages:Z, such as pages:16.")

    def is_ring(self, layer: LayerSpec) -> bool:
        """Tells whether a layer keeps less than every token."""
        return self.ring and layer.window is not None

    def slots(self, layer: LayerSpec, context: int) -> int:
        """Counts the slots of a layer for one row of `context` tokens.

        W tokens in a row lie on up to ceil((W - 1) / Z) + 1 pages, wherever they start.
        """
        if layer.spec is None:
            return 0
        pages = -(-context // self.page)
        if self.is_ring(layer) and layer.window is not None:
            pages = min(pages, -(-(layer.window - 1) // self.page) + 1)
        return pages * self.page

    def __str__(self) -> str:
        if self.page > 1:
            return f"pages:{self.page}"
        return "window" if self.ring else "full"
