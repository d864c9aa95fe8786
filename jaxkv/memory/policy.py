# SPDX-License-Identifier: Apache-2.0
"""Which layout each layer is given: what a layer keeps is a choice."""

from __future__ import annotations

import dataclasses
import math

from jaxkv.cache.contiguous import Contiguous
from jaxkv.cache.evicting import Evicting
from jaxkv.cache.index import Layout
from jaxkv.cache.paged import Paged
from jaxkv.cache.policies import POLICIES
from jaxkv.cache.ring import Ring
from jaxkv.models.geometry import LayerSpec


@dataclasses.dataclass(frozen=True)
class SlotPolicy:
    """States what layers keep, and whether slots are given out in pages.

    Args:
      ring: Whether window layers keep their window only (`Ring`), or every token as others do.
      page: Z, tokens of a page, on which every layer keeps every token (`Paged`); `None` gives
        each row slots of its own (`Contiguous`).
      evicting: What layers without a window keep, if not every token; `None`: every token.

    Raises:
      ValueError: If `page` is below 1, or stands beside a ring or an evicting layout.

    >>> from jaxkv.cache.spec import KVSpec
    >>> windowed = LayerSpec("window", 8, KVSpec(8, 64, 64), window=128)
    >>> [SlotPolicy.parse(text).slots(windowed, 8190) for text in ("window", "full", "pages:16")]
    [128, 8190, 8192]
    >>> full = LayerSpec("full", 8, KVSpec(8, 64, 64))
    >>> SlotPolicy.parse("h2o:1024").slots(full, 8190)
    1024
    """

    ring: bool = True
    page: int | None = None
    evicting: Evicting | None = None

    def __post_init__(self) -> None:
        beside = self.ring or self.evicting is not None
        if self.page is not None and (self.page < 1 or beside):
            raise ValueError(f"{self!r}: want pages of at least 1 token, and ring=False with them.")

    @classmethod
    def parse(cls, text: str) -> SlotPolicy:
        """Reads `window` (a ring of W slots), `full` (every token), `pages:Z` or a policy's budget.

        Raises:
          ValueError: If it is none of these.
        """
        name, _, size = text.partition(":")
        if text in ("window", "full"):
            return cls(ring=text == "window")
        if name == "pages" and size.isdecimal() and int(size) > 0:
            return cls(ring=False, page=int(size))
        if name in POLICIES and size.isdecimal() and int(size) > 0:
            return cls(evicting=Evicting(int(size), POLICIES[name]()))
        raise ValueError(
            f"window policy {text!r}: want window, full, pages:Z such as pages:16, or a budget of "
            f"tokens such as {', '.join(f'{name}:512' for name in POLICIES)}."
        )

    def is_ring(self, layer: LayerSpec) -> bool:
        """Tells whether a layer keeps less than every token."""
        return self.ring and layer.window is not None

    def layout(self, layer: LayerSpec) -> Layout:
        """Chooses the layout of a layer's cache."""
        if self.ring and layer.window is not None:
            return Ring(layer.window)
        if self.evicting is not None and layer.spec is not None:
            return self.evicting.fitted(layer.spec)
        return Contiguous() if self.page is None else Paged(self.page)

    def slots(self, layer: LayerSpec, context: int) -> int:
        """Counts the slots that a layer gives one row of `context` tokens."""
        return 0 if layer.spec is None else math.prod(self.layout(layer).storage(1, context))

    def __str__(self) -> str:
        if self.page is not None:
            return f"pages:{self.page}"
        if self.evicting is not None:
            name = type(self.evicting.policy).__name__.lower()
            return f"{name}:{self.evicting.budget}"
        return "window" if self.ring else "full"
