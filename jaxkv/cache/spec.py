# SPDX-License-Identifier: Apache-2.0
"""What one token leaves behind in one layer: the shape of its record."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class KVSpec:
    """Describes the record that a layer keeps of one token.

    Every attention variant is a choice of these numbers; nothing else in the cache depends on
    the variant.

    Args:
      kv_heads: K, the KV heads that are stored.
      key_width: H, channels of one head's own key record.
      value_width: V, channels of one head's value.
      shared_width: channels of a key part that all KV heads share, stored once per token
        (a decoupled rotary part). Queries are then `key_width + shared_width` wide.
      value_offset: `None` if the value is an array of its own; a number if the value is channels
        `value_offset : value_offset + value_width` of the key record (absorbed MLA: 0).

    Raises:
      ValueError: If a width is negative or the value does not lie inside the key record.

    >>> KVSpec(kv_heads=8, key_width=128, value_width=128).elements_per_token
    2048
    >>> KVSpec(1, 512 + 64, 512, value_offset=0).elements_per_token  # DeepSeek-V3, one layer
    576
    """

    kv_heads: int
    key_width: int
    value_width: int
    shared_width: int = 0
    value_offset: int | None = None

    def __post_init__(self) -> None:
        if min(self.kv_heads, self.key_width, self.value_width) < 1 or self.shared_width < 0:
            raise ValueError(
                f"{self}: kv_heads and widths are at least 1, shared_width at least 0."
            )
        if self.value_offset is not None:
            end = self.value_offset + self.value_width
            if self.value_offset < 0 or end > self.key_width:
                raise ValueError(
                    f"value channels {self.value_offset}:{end} do not lie inside a key record of "
                    f"{self.key_width} channels."
                )

    @property
    def query_width(self) -> int:
        """Channels of a query head: the key's own and the shared ones."""
        return self.key_width + self.shared_width

    @property
    def elements_per_token(self) -> int:
        """Counts the numbers stored for one token in one layer, before any codec or padding."""
        own = self.key_width + (self.value_width if self.value_offset is None else 0)
        return self.kv_heads * own + self.shared_width

    def replicated(self, times: int) -> KVSpec:
        """Repeats each KV head `times` times, for meshes with more devices than heads."""
        return dataclasses.replace(self, kv_heads=self.kv_heads * times)
