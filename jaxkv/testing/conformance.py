# SPDX-License-Identifier: Apache-2.0
"""The public conformance suite: what every attention variant of this library does."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import numpy as np
from flax import nnx

from jaxkv.cache.layer_cache import LayerCache
from jaxkv.testing.caching import Caching
from jaxkv.testing.gradients import Gradients, Rematerialised
from jaxkv.testing.interop import Interop
from jaxkv.testing.masking import Masking
from jaxkv.testing.meshes import Meshes
from jaxkv.testing.padding import Padding
from jaxkv.testing.scoring import Scoring
from jaxkv.testing.suite import call, feed
from jaxkv.testing.tolerances import assert_close, assert_trees_equal
from jaxkv.testing.transforms import Transforms


class AttentionConformance(
    Caching, Padding, Masking, Scoring, Rematerialised, Transforms, Interop, Meshes
):
    """Tests of one self-attention variant, collected by pytest from a subclass that names it.

    ```python
    from jaxkv.testing.conformance import AttentionConformance

    class TestMine(AttentionConformance):
        variant = MyAttention
        sizes = {"in_features": 16, "num_heads": 4, "my_width": 6}
    ```

    A subclass may override `make(rngs, **overrides)` instead, and lists the `ScoreOptions` that
    its variant refuses in `unsupported`. Tolerances stand in `jaxkv.testing.tolerances`. The mesh
    tests need 8 devices (`jax.config.update("jax_num_cpu_devices", 8)`), and all of them matrix
    products in float32: `jax.config.update("jax_default_matmul_precision", "highest")`.
    """


class CrossConformance(Gradients, Transforms, Interop, Meshes):
    """Tests of one cross-attention variant: a context is stored by one call and read by others.

    ```python
    from jaxkv.testing.conformance import CrossConformance

    class TestMine(CrossConformance):
        variant = MyCrossAttention
        sizes = {"in_features": 16, "num_heads": 4, "context_features": 13}
    ```

    What is about a sequence's own positions, masks and chunks has no meaning here.
    """

    sizes: ClassVar[dict[str, Any]] = {"in_features": 16, "num_heads": 4, "context_features": 13}
    # Tokens of the context.
    context_length: ClassVar[int] = 7

    @classmethod
    def rotated(cls, seed: int | jax.Array = 0, **overrides: Any) -> Any:
        """Makes the module under test: positions of two sequences have nothing in common."""
        return cls.make(nnx.Rngs(seed), **overrides)

    def given(self, rows: int | None = None) -> dict[str, Any]:
        """Draws a float32 context `[B, S, Dc]`."""
        shape = (self.rows if rows is None else rows, self.context_length)
        rng = np.random.default_rng(1)
        size = (*shape, self.sizes["context_features"])
        return {"context": rng.normal(size=size).astype(np.float32)}

    def ready(self, attn: Any, rows: int | None = None) -> LayerCache:
        """Makes a cache that holds a context."""
        first = self.tokens(rows, 1)
        return call(attn, first, self.cache(attn, rows), **self.given(rows))[1]

    @staticmethod
    def cached(attn: Any, prefix: Any, x: Any, cache: Any) -> jax.Array:
        """Computes the outputs of tokens that read a context, which an earlier call stored."""
        _, cache = attn(x[:, :1], cache=cache, context=prefix)
        y, _ = attn(x, cache=cache)
        return y

    @staticmethod
    def uncached(attn: Any, prefix: Any, x: Any) -> jax.Array:
        """Computes the same in one pass."""
        return attn(x, context=prefix)[0]

    def inputs(self) -> tuple[np.ndarray, np.ndarray]:
        """Gives a context and tokens."""
        return self.given()["context"], self.tokens(length=4)

    def test_steps_and_chunks_read_the_context_alike(self, attn: Any) -> None:
        """Any cut of the queries gives what one pass gives, and changes nothing stored."""
        x = self.tokens()
        want, _ = call(attn, x, **self.given())
        cache = self.ready(attn)
        for widths in ([1] * 8, [3, 5], [8]):
            y, after = feed(attn, x, cache, widths)
            assert_close(y, want)
            assert_trees_equal(after, cache)
