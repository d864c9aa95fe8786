# SPDX-License-Identifier: Apache-2.0
"""Sizes, inputs and compiled calls that the parts of the conformance suite share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.typing import DTypeLike

from jaxkv.attention.base import Attention
from jaxkv.cache.index import Layout
from jaxkv.cache.layer_cache import LayerCache
from jaxkv.core.rotary import Rotary

# A small base, so that angles differ much between the few positions of a test.
ROTARY = Rotary(100.0)


def quick_jit(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compiles with the least effort: compiling tiny programs is nearly all of a test's time."""
    return jax.jit(fn, compiler_options={"xla_backend_optimization_level": 0}, **options)


@quick_jit
def _run(attn: Attention, x: Any, cache: LayerCache | None, given: dict[str, Any]) -> Any:
    return attn(x, cache=cache, **given)


def call(
    attn: Attention, x: Any, cache: LayerCache | None = None, **given: Any
) -> tuple[np.ndarray, Any]:
    """Calls a module; all tests that use one shape share one compilation."""
    y, cache = _run(attn, x, cache, given)
    return np.asarray(y), cache


def feed(
    attn: Attention, x: np.ndarray, cache: LayerCache, widths: Sequence[int]
) -> tuple[np.ndarray, LayerCache]:
    """Feeds `x [B, T, D]` to a cache in chunks of the given widths, and joins the outputs."""
    outs, start = [], 0
    for width in widths:
        y, cache = call(attn, x[:, start : start + width], cache)
        outs.append(y)
        start += width
    return np.concatenate(outs, axis=1), cache


def poisoned(cache: LayerCache) -> LayerCache:
    """Fills every slot of an empty cache with NaN: nobody may read what nobody has written."""
    return jax.tree.map(
        lambda x: jnp.full_like(x, jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x, cache
    )


def written(cache: LayerCache, length: int | None = None) -> dict[str, np.ndarray]:
    """Gives what a cache holds by the order of the tokens, wherever its layout puts them.

    Args:
      cache: The cache.
      length: Tokens of each row to look at; default those of the longest row.

    Returns:
      Each plane as `[B, length, heads, ...]`, 0 where no token is stored, and lengths and flags.
    """
    entry, slot, order = map(np.asarray, cache.layout.places(cache.index, cache.records.slots))
    lengths = np.asarray(cache.lengths)
    length = int(lengths.max(initial=0)) if length is None else length
    index = {
        name: np.asarray(getattr(cache, name)) for name in ("lengths", "overflowed", "refused")
    }
    found = {}
    for name, plane in cache.records.planes.items():
        plane = np.moveaxis(np.asarray(plane), 2, 1)
        out = np.zeros((lengths.size, length, *plane.shape[2:]), plane.dtype)
        row, place = np.nonzero((order >= 0) & (order < length))
        out[row, order[row, place]] = plane[entry[row, place], slot[row, place]]
        found[name] = out
    return {**found, **index}


class Suite:
    """Base of the suite's parts: a subclass names its variant, or makes modules itself.

    Attributes:
      variant: The class under test.
      sizes: Its sizes, by name of the constructor's argument.
      unsupported: Fields of `ScoreOptions` that the variant refuses.
      layout: Of the caches under test; `None` is contiguous.
    """

    variant: ClassVar[Callable[..., Attention]]
    sizes: ClassVar[dict[str, Any]] = {"in_features": 16, "num_heads": 4}
    unsupported: ClassVar[frozenset[str]] = frozenset()
    layout: ClassVar[Layout | None] = None
    # B, T, slots of a row, and the width of a chunk.
    rows, length, capacity, chunk = 2, 8, 12, 4

    @classmethod
    def make(cls, rngs: nnx.Rngs, **overrides: Any) -> Any:
        """Makes the module under test with other keyword arguments."""
        return cls.variant(**{**cls.sizes, **overrides}, rngs=rngs)

    @pytest.fixture(scope="class")
    @classmethod
    def attn(cls) -> Any:
        """The module that most tests use, so that they share its compiled calls."""
        return cls.rotated()

    @classmethod
    def rotated(cls, seed: int | jax.Array = 0, **overrides: Any) -> Any:
        """Makes the module under test with rotary positions; a seed, or a PRNG key."""
        return cls.make(nnx.Rngs(seed), **{"rotary": ROTARY, **overrides})

    @classmethod
    def tokens(
        cls, rows: int | None = None, length: int | None = None, *, seed: int = 0
    ) -> np.ndarray:
        """Draws float32 inputs `[B, T, D]`."""
        shape = (cls.rows if rows is None else rows, cls.length if length is None else length)
        rng = np.random.default_rng(seed)
        return rng.normal(size=(*shape, cls.sizes["in_features"])).astype(np.float32)

    def cache(self, attn: Any, rows: int | None = None, **options: Any) -> LayerCache:
        """Makes an empty cache of the suite's size."""
        capacity = options.pop("capacity", self.capacity)
        options = {"layout": self.layout, **options}
        return attn.init_cache(self.rows if rows is None else rows, capacity, **options)

    def given(self, rows: int | None = None) -> dict[str, Any]:
        """Gives what the first call of a sequence needs besides its tokens: nothing, or a context.

        Args:
          rows: B; default the suite's.
        """
        del rows
        return {}

    def ready(self, attn: Any, rows: int | None = None) -> LayerCache:
        """Makes a cache that calls go on from without anything besides their tokens."""
        return self.cache(attn, rows)


def cast(x: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """Rounds inputs to another format."""
    return x.astype(jnp.dtype(dtype))
