# SPDX-License-Identifier: Apache-2.0
"""Which layout each layer is given: what window layers keep is a choice."""

from __future__ import annotations

import dataclasses
import math

from jaxkv.cache.contiguous import Contiguous
from jaxkv.cache.index import Layout
from jaxkv.cache.paged import Paged
from jaxkv.cache.ring import Ring
from jaxkv.models.geometry import LayerSpec


@dataclasses.dataclass(frozen=True)
class SlotPolicy:
    """States what window layers keep, and whether slots are given out in pages.

    Args:
      ring: Whether window layers keep their window only (`Ring`), or every token as others do.
      page: Z, tokens of a page, on which every layer keeps every token (`Paged`); `None` gives
        each row slots of its own (`Contiguous`).

    Raises:
      ValueError: If `page` is below 1, or stands beside a ring.

    >>> from jaxkv.cache.spec import KVSpec
    >>> windowed = LayerSpec("window", 8, KVSpec(8, 64, 64), window=128)
    >>> [SlotPolicy.parse(text).slots(windowed, 8190) for text in ("window", "full", "pages:16")]
    [128, 8190, 8192]
    """

    ring: bool = True
    page: int | None = None

    def __post_init__(self) -> None:
        if self.page is not None and (self.page < 1 or self.ring):
            raise ValueError(f"{self!r}: want pages of at least 1 token, and ring=False with them.")

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
            return cls(ring=False, page=int(size))
        raise ValueError(f"window policy {text!r}: want window, full or pages:Z, such as pages:16.")

    def is_ring(self, layer: LayerSpec) -> bool:
        """Tells whether a layer keeps less than every token."""
        return self.ring and layer.window is not None

    def layout(self, layer: LayerSpec) -> Layout:
        """Chooses the layout of a layer's cache."""
        if self.ring and layer.window is not None:
            return Ring(layer.window)
        return Contiguous() if self.page is None else Paged(self.page)

    def slots(self, layer: LayerSpec, context: int) -> int:
        """Counts the slots that a layer gives one row of `context` tokens."""
        return 0 if layer.spec is None else math.prod(self.layout(layer).storage(1, context))

    def __str__(self) -> str:
        if self.page is not None:
            return f"pages:{self.page}"
        return "window" if self.ring else "full"
