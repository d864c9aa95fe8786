# SPDX-License-Identifier: Apache-2.0
"""Keys and values that one layer makes and others read, for as long as a call takes."""

from __future__ import annotations

import dataclasses

import jax

from jaxkv.cache.layer_cache import LayerCache
from jaxkv.core.trees import static


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SharedKV:
    """Hands one layer's keys and values of a call to the layers that read them.

    It stands in the place of a cache: the source is called with `SharedKV(cache)`, or without a
    cache with `SharedKV()`, and each reader with what the call before returned. Nothing is written
    before `close`, since a write may overwrite what the queries of a reader still see (a ring's
    does). A context is stored before anything reads it.

    Attributes:
      cache: The source's cache, of which the call's step is open; `None` without a cache.
      key: `[B, T, K, H + shared]`, the call's own keys, rotated, or those of a context of T tokens
        that no cache holds; `None` before the source's call, and where the cache has them all.
      value: `[B, T, K, V]`, or `None` if it lies in the key.
      lengths: int32 `[B]`, how many of such a context's tokens are real; `None`: all.
      context: Whether they are those of a context; `None` before the source's call.
    """

    cache: LayerCache | None = None
    key: jax.Array | None = None
    value: jax.Array | None = None
    lengths: jax.Array | None = None
    context: bool | None = static(default=None)

    def close(self) -> LayerCache | None:
        """Stores the call's tokens, now that every layer has read, and ends the step.

        Raises:
          ValueError: If no source was called with it.
        """
        if self.context is None:
            raise ValueError("no keys and values are shared yet: call their source with this.")
        if self.cache is None or self.key is None:
            return self.cache
        return self.cache.write(*self.cache.replicated(self.key, self.value)).close()
