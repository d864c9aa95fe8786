# SPDX-License-Identifier: Apache-2.0
"""Keys and values that one layer makes and others read, for as long as a call takes."""

from __future__ import annotations

import dataclasses

import jax

from jaxkv.cache.layer_cache import LayerCache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SharedKV:
    """Hands one layer's keys and values of a call to the layers that read them.

    It stands in the place of a cache: the source is called with `SharedKV(cache)`, or without a
    cache with `SharedKV()`, and each reader with what the call before returned. Nothing is written
    before `close`, since a write may overwrite what the queries of a reader still see (a ring's
    does).

    Attributes:
      cache: The source's cache, of which the call's step is open; `None` without a cache.
      key: `[B, T, K, H + shared]`, the call's own keys, rotated; `None` before the source's call.
      value: `[B, T, K, V]`, or `None` if it lies in the key.
    """

    cache: LayerCache | None = None
    key: jax.Array | None = None
    value: jax.Array | None = None

    def close(self) -> LayerCache | None:
        """Stores the call's tokens, now that every layer has read, and ends the step.

        Raises:
          ValueError: If no source was called with it.
        """
        if self.key is None:
            raise ValueError("no keys and values are shared yet: call their source with this.")
        if self.cache is None:
            return None
        return self.cache.write(*self.cache.replicated(self.key, self.value)).close()
